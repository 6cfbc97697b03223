//! Writes the pages of a machine's RAM that differ from the image below it.
//!
//! RAM is private memory over page files, so a page that the machine changed is an *anonymous* page of its process, and the
//! kernel reports which those are. Many of them hold what they held before, or zeros: only pages
//! that differ are written.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;

use parking_lot::Mutex;

use super::map::{Extent, overlay};
use super::{DEEPEST, MOST_ENTRIES, layers_of, trouble};
use crate::driver::host::usable;
use crate::model::{PAGE, PageIndex, PageRun, Reserve};

/// Unchanged pages between changed ones that are written as well, so that there are fewer runs.
const GAP: u64 = 3;
/// The widest such gap before all of RAM is written instead.
const WIDEST_GAP: u64 = 256;
/// Pages that a thread takes at a time: what fits its processor's cache.
const BATCH: u64 = 128;
/// How much is written between two looks at the free space.
const LOOK_EVERY: u64 = 8 << 20;
const SIZE: usize = PAGE as usize;
static NOTHING: [u8; SIZE] = [0; SIZE];

/// What was written. It is not on stable storage before [`sync`](Self::sync).
#[derive(Debug)]
#[must_use = "what was written is not on stable storage before it is synced"]
pub struct PagesWritten {
    /// Pages in the file.
    pub pages: u64,
    /// Runs in the index.
    pub runs: usize,
    /// Whether all of RAM was written.
    pub whole: bool,
    /// The files, and the directory they are in.
    files: [File; 3],
}

impl PagesWritten {
    /// Brings pages and index to stable storage. The machine may run again meanwhile.
    ///
    /// # Errors
    ///
    /// Returns the filesystem's error; what was captured is not valid then.
    pub fn sync(&self) -> io::Result<()> {
        self.files.iter().try_for_each(File::sync_all)
    }
}

/// Writes `pages` and `index` of a stopped machine into the directory `into`: what differs from `image`, whose first is the
/// topmost, and which the machine was started from. RAM is at address `at` of process `pid`, and `ram` bytes long. Of a
/// machine that was booted all is written: its image is empty.
///
/// # Errors
///
/// Returns an error when the process cannot be read, the image is not what it should be, or the filesystem is full but for
/// `reserve` ([`io::ErrorKind::StorageFull`]). What is in `into` is then of no use.
pub fn capture_pages(
    pid: u32,
    at: u64,
    ram: u64,
    image: &[PathBuf],
    into: &Path,
    reserve: Reserve,
) -> io::Result<PagesWritten> {
    capture_within(MOST_ENTRIES, pid, at, ram, image, into, reserve)
}

/// The same, with RAM in at most `most` pieces.
pub(super) fn capture_within(
    most: usize,
    pid: u32,
    at: u64,
    ram: u64,
    image: &[PathBuf],
    into: &Path,
    reserve: Reserve,
) -> io::Result<PagesWritten> {
    if !at.is_multiple_of(PAGE) || !ram.is_multiple_of(PAGE) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "RAM does not begin at a page"));
    }
    let pages = ram / PAGE;
    let process = HypervisorRam::open(pid, at)?;
    process.check(pages)?;
    let below = ImageBelow::open(image, pages)?;
    let file = create(&into.join("pages"))?;
    let out = Out { file, end: AtomicU64::new(0), reserve, looked: AtomicU64::new(0) };
    out.check_room(0)?;
    let changed = process.changed(pages)?;
    let whole = below.files.is_empty() || below.files.len() >= DEEPEST;
    let kept = if whole { None } else { capture_part(most, &process, &below, &changed, &out)? };
    let (whole, runs) = match kept {
        Some(runs) => (false, runs),
        None => (true, capture_whole(most, &process, &below, &changed, &out)?),
    };
    let end = out.end.into_inner();
    out.file.set_len(end)?;
    let index = PageIndex { whole, ram: pages, runs };
    let list = create(&into.join("index"))?;
    list.write_all_at(&index.encode(), 0)?;
    let dir = File::open(into).map_err(|error| trouble(into, error))?;
    let files = [out.file, list, dir];
    Ok(PagesWritten { pages: end / PAGE, runs: index.runs.len(), whole, files })
}

fn create(path: &Path) -> io::Result<File> {
    File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(|error| trouble(path, error))
}

/// Writes what differs; nothing if that would leave RAM in too many pieces.
fn capture_part(
    most: usize,
    process: &HypervisorRam,
    below: &ImageBelow,
    changed: &[Range<u64>],
    out: &Out,
) -> io::Result<Option<Vec<PageRun>>> {
    let runs = write_all(process, Some(below), &join(changed, GAP), out)?;
    let pieces = |runs: &[PageRun]| overlay(&below.extents, usize::MAX, runs).len();
    if pieces(&runs) <= most {
        return Ok(Some(runs));
    }
    let Some(wider) = widen(&runs, WIDEST_GAP, |runs| pieces(runs) <= most) else {
        return Ok(None);
    };
    out.empty()?;
    write_exactly(process, &wider, out).map(Some)
}

/// Writes all that is not zero.
fn capture_whole(
    most: usize,
    process: &HypervisorRam,
    below: &ImageBelow,
    changed: &[Range<u64>],
    out: &Out,
) -> io::Result<Vec<PageRun>> {
    out.empty()?;
    let mut all: Vec<Range<u64>> = changed.to_vec();
    all.extend(below.extents.iter().map(|extent| extent.first..extent.end()));
    all.sort_by_key(|range| range.start);
    let runs = write_all(process, None, &join(&all, GAP), out)?;
    if runs.len() <= most {
        return Ok(runs);
    }
    let Some(wider) = widen(&runs, u64::MAX, |runs| runs.len() <= most) else { return Ok(runs) };
    out.empty()?;
    write_exactly(process, &wider, out)
}

/// Joins ranges, which are sorted, where less than a gap is between them.
fn join(ranges: &[Range<u64>], gap: u64) -> Vec<Range<u64>> {
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last) if range.start <= last.end.saturating_add(gap) => {
                last.end = last.end.max(range.end);
            }
            _ => joined.push(range.clone()),
        }
    }
    joined
}

/// Joins runs over ever wider gaps until they are few enough. What is between is written too; runs of zeros that
/// are not between stay what they are.
fn widen(
    runs: &[PageRun],
    widest: u64,
    is_few: impl Fn(&[PageRun]) -> bool,
) -> Option<Vec<PageRun>> {
    let mut gap = GAP;
    while gap < widest {
        gap = gap.saturating_mul(2);
        let mut joined: Vec<PageRun> = Vec::new();
        // Where the last run that is not zero is in `joined`.
        let mut last: Option<usize> = None;
        for run in runs {
            if run.at.is_none() {
                joined.push(*run);
                continue;
            }
            match last {
                Some(place) if run.first <= joined[place].end().saturating_add(gap) => {
                    joined.truncate(place + 1);
                    joined[place].count = run.end() - joined[place].first;
                }
                _ => {
                    last = Some(joined.len());
                    joined.push(*run);
                }
            }
        }
        if is_few(&joined) {
            return Some(joined);
        }
    }
    None
}

/// Looks through ranges of RAM and writes the pages that differ from what is below, or, if nothing is, from zero.
fn write_all(
    process: &HypervisorRam,
    below: Option<&ImageBelow>,
    ranges: &[Range<u64>],
    out: &Out,
) -> io::Result<Vec<PageRun>> {
    let mut batches = Vec::new();
    for range in ranges {
        let starts = range.clone().step_by(BATCH as usize);
        batches.extend(starts.map(|start| start..range.end.min(start + BATCH)));
    }
    in_parallel(&batches, |buffers: &mut Buffers, batch| {
        let here = buffers.here(batch);
        process.read(batch.start, here)?;
        let known = match below {
            Some(below) => below.read(batch, &mut buffers.there)?,
            None => Vec::new(),
        };
        let here = &buffers.here[..bytes(batch)];
        let mut runs = differences(here, &known, &buffers.there);
        out.put(batch.start, &mut runs, here)?;
        Ok(runs)
    })
}

/// Writes runs as they are, whatever is in them; blocks of zeros become holes.
fn write_exactly(process: &HypervisorRam, runs: &[PageRun], out: &Out) -> io::Result<Vec<PageRun>> {
    let mut batches = Vec::new();
    let mut placed = runs.to_vec();
    for run in placed.iter_mut().filter(|run| run.at.is_some()) {
        let at = out.end.fetch_add(run.count * PAGE, Ordering::Relaxed);
        run.at = Some(at);
        for start in (run.first..run.end()).step_by(BATCH as usize) {
            let batch = start..run.end().min(start + BATCH);
            batches.push((batch, at + (start - run.first) * PAGE));
        }
    }
    in_parallel(&batches, |buffers: &mut Buffers, (batch, at)| {
        let here = buffers.here(batch);
        process.read(batch.start, here)?;
        let full = |range: &Range<usize>| here[range.clone()] != NOTHING[..];
        let pages = (0..here.len()).step_by(SIZE).map(|start| start..start + SIZE);
        out.check_room(at + bytes(batch) as u64)?;
        for page in pages.filter(full) {
            out.file.write_all_at(&here[page.clone()], at + page.start as u64)?;
        }
        Ok(Vec::new())
    })?;
    Ok(placed)
}

/// The runs of pages in `here`, counted from its beginning, that are not as in `there`, of which only the ranges in `known`
/// count; elsewhere there are zeros.
fn differences(here: &[u8], known: &[Range<usize>], there: &[u8]) -> Vec<PageRun> {
    let mut runs: Vec<PageRun> = Vec::new();
    let mut known = known.iter().peekable();
    // Where the last run that is not zero is in `runs`.
    let mut last: Option<usize> = None;
    for (place, page) in here.chunks_exact(SIZE).enumerate() {
        let (place, byte) = (place as u64, place * SIZE);
        while known.next_if(|range| range.end <= byte).is_some() {}
        let is_known = known.peek().is_some_and(|range| range.start <= byte);
        let before = if is_known { &there[byte..byte + SIZE] } else { &NOTHING[..] };
        if page == before {
            continue;
        }
        if page == &NOTHING[..] {
            match runs.last_mut() {
                Some(run) if run.at.is_none() && run.end() == place => run.count += 1,
                _ => runs.push(PageRun { first: place, count: 1, at: None }),
            }
            continue;
        }
        match last {
            Some(at) if place <= runs[at].end() + GAP => {
                runs.truncate(at + 1);
                runs[at].count = place + 1 - runs[at].first;
            }
            _ => {
                last = Some(runs.len());
                runs.push(PageRun { first: place, count: 1, at: Some(0) });
            }
        }
    }
    runs
}

/// Does `work` on each item, on two threads, and puts together what comes of it, in order.
fn in_parallel<T: Sync>(
    items: &[T],
    work: impl Fn(&mut Buffers, &T) -> io::Result<Vec<PageRun>> + Sync,
) -> io::Result<Vec<PageRun>> {
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let done = Mutex::new(Vec::with_capacity(items.len()));
    let work_off = || {
        let mut buffers = Buffers::default();
        while !failed.load(Ordering::Relaxed) {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(number) else { break };
            match work(&mut buffers, item) {
                Ok(runs) => {
                    done.lock().push((number, runs));
                }
                Err(error) => {
                    failed.store(true, Ordering::Relaxed);
                    return Err(error);
                }
            }
        }
        Ok(())
    };
    thread::scope(|scope| {
        // A few pages are not worth a thread.
        let helper = (items.len() > 8).then(|| scope.spawn(work_off));
        let mine = work_off();
        match helper.map(thread::ScopedJoinHandle::join) {
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            Some(Ok(theirs)) => mine.and(theirs),
            None => mine,
        }
    })?;
    let mut done = done.into_inner();
    done.sort_by_key(|(number, _)| *number);
    let mut runs: Vec<PageRun> = Vec::new();
    for run in done.into_iter().flat_map(|(_, runs)| runs) {
        match runs.last_mut() {
            Some(last) if last.end() == run.first && follows(last, &run) => last.count += run.count,
            _ => runs.push(run),
        }
    }
    Ok(runs)
}

/// Whether the pages of a run come right behind those of another in the file, or both are zero.
fn follows(last: &PageRun, next: &PageRun) -> bool {
    last.at.map(|at| at + last.count * PAGE) == next.at
}

fn bytes(pages: &Range<u64>) -> usize {
    (pages.end - pages.start) as usize * SIZE
}

/// A thread's room for what it compares.
#[derive(Default)]
struct Buffers {
    here: Vec<u8>,
    there: Vec<u8>,
}

impl Buffers {
    fn here(&mut self, batch: &Range<u64>) -> &mut [u8] {
        self.here.resize(BATCH as usize * SIZE, 0);
        &mut self.here[..bytes(batch)]
    }
}

/// The process that has RAM in its memory.
struct HypervisorRam {
    mem: File,
    pagemap: File,
    at: u64,
}

impl HypervisorRam {
    fn open(pid: u32, at: u64) -> io::Result<Self> {
        let open = |name: &str| {
            let path = PathBuf::from(format!("/proc/{pid}/{name}"));
            File::open(&path).map_err(|error| trouble(&path, error))
        };
        Ok(Self { mem: open("mem")?, pagemap: open("pagemap")?, at })
    }

    /// Refuses where RAM is not: what is not mapped would look like a machine that never wrote anything.
    fn check(&self, pages: u64) -> io::Result<()> {
        for page in [0, pages.saturating_sub(1)] {
            self.read(page, &mut [0]).map_err(|error| {
                let text = format!("there is no RAM at {:x}, page {page}: {error}", self.at);
                io::Error::new(error.kind(), text)
            })?;
        }
        Ok(())
    }

    fn read(&self, page: u64, into: &mut [u8]) -> io::Result<()> {
        self.mem.read_exact_at(into, self.at + page * PAGE)
    }

    /// The pages that are the process's own: there or swapped out, and of no file.
    fn changed(&self, pages: u64) -> io::Result<Vec<Range<u64>>> {
        const FILE: u64 = 1 << 61;
        const THERE: u64 = 1 << 63 | 1 << 62;
        let mut ranges: Vec<Range<u64>> = Vec::new();
        let mut buffer = vec![0u8; 512 << 10];
        let mut page = 0;
        while page < pages {
            let count = (pages - page).min(buffer.len() as u64 / 8);
            let entries = &mut buffer[..count as usize * 8];
            self.pagemap.read_exact_at(entries, (self.at / PAGE + page) * 8)?;
            for entry in entries.chunks_exact(8) {
                let word = u64::from_le_bytes(entry.try_into().unwrap_or_default());
                if word & THERE != 0 && word & FILE == 0 {
                    match ranges.last_mut() {
                        Some(last) if last.end == page => last.end += 1,
                        _ => ranges.push(page..page + 1),
                    }
                }
                page += 1;
            }
        }
        Ok(ranges)
    }
}

/// The image that RAM is compared with.
struct ImageBelow {
    files: Vec<File>,
    extents: Vec<Extent>,
}

impl ImageBelow {
    fn open(image: &[PathBuf], pages: u64) -> io::Result<Self> {
        let layers = layers_of(image)?;
        let mut below = Self { files: Vec::new(), extents: Vec::new() };
        for (file, (path, index)) in layers.iter().enumerate().rev() {
            if index.ram != pages {
                return Err(trouble(path, "it is of a machine with another amount of RAM"));
            }
            below.extents = overlay(&below.extents, file, &index.runs);
        }
        for (path, _) in &layers {
            below.files.push(File::open(path).map_err(|error| trouble(path, error))?);
        }
        Ok(below)
    }

    /// Reads what is known of a batch, and returns which parts of the buffer that is.
    fn read(&self, batch: &Range<u64>, into: &mut Vec<u8>) -> io::Result<Vec<Range<usize>>> {
        into.resize(BATCH as usize * SIZE, 0);
        let first = self.extents.partition_point(|extent| extent.end() <= batch.start);
        let mut known = Vec::new();
        for extent in self.extents[first..].iter().take_while(|extent| extent.first < batch.end) {
            let (start, end) = (extent.first.max(batch.start), extent.end().min(batch.end));
            let place = bytes(&(batch.start..start))..bytes(&(batch.start..end));
            let at = extent.at + (start - extent.first) * PAGE;
            self.files[extent.file].read_exact_at(&mut into[place.clone()], at)?;
            known.push(place);
        }
        Ok(known)
    }
}

/// The file of pages, to which several threads append.
struct Out {
    file: File,
    end: AtomicU64,
    reserve: Reserve,
    /// How much had been written when free space was looked at last.
    looked: AtomicU64,
}

impl Out {
    /// Refuses when what is free is the host's reserve. Looked at for every [`LOOK_EVERY`] bytes.
    fn check_room(&self, end: u64) -> io::Result<()> {
        let looked = self.looked.load(Ordering::Relaxed);
        if end > 0 && end < looked.saturating_add(LOOK_EVERY) {
            return Ok(());
        }
        self.looked.store(end, Ordering::Relaxed);
        if usable(&self.file, self.reserve)? <= LOOK_EVERY {
            let why = "memory would use the free space that is kept on the host's disk";
            return Err(io::Error::new(io::ErrorKind::StorageFull, why));
        }
        Ok(())
    }

    /// Throws away what was written so far.
    fn empty(&self) -> io::Result<()> {
        self.end.store(0, Ordering::Relaxed);
        self.looked.store(0, Ordering::Relaxed);
        self.file.set_len(0)
    }

    /// Appends the runs of a batch that begins with page `first`, and says where each is.
    fn put(&self, first: u64, runs: &mut [PageRun], batch: &[u8]) -> io::Result<()> {
        let total: u64 = runs.iter().filter(|run| run.at.is_some()).map(|run| run.count).sum();
        let mut end = self.end.fetch_add(total * PAGE, Ordering::Relaxed);
        self.check_room(end)?;
        for run in runs {
            if run.at.is_some() {
                let bytes = run.first as usize * SIZE..run.end() as usize * SIZE;
                self.file.write_all_at(&batch[bytes], end)?;
                run.at = Some(end);
                end += run.count * PAGE;
            }
            run.first += first;
        }
        Ok(())
    }
}
