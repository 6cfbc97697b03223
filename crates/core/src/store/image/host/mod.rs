//! The `host` image: this machine's own system directories, as one layer.
//!
//! It is what makes a sandbox possible with nothing configured and nothing downloaded. What is taken
//! and what is not is decided in [`rules`], file by file; [`etc_files`] writes the parts of `/etc` that
//! must not be the host's.
//!
//! Programs are *hard links* to the host's own where the data directory is on the same filesystem,
//! which takes seconds, costs a directory entry each and shares the page cache; elsewhere they are
//! reflinks or copies. A hard link shares the inode, and this is what follows from it:
//!
//! - No owner, mode, time or extended attribute of a linked file is ever changed here or anywhere in
//!   the store: the host would see it. Directories and fresh files are our own.
//! - Sandboxes cannot write through it: a layer is only ever the lower side of an overlay, and a
//!   write copies the file up first.
//! - A program that the host's package manager replaces stays as it was in the image, because package
//!   managers replace files by renaming. A file that somebody on the host edits *in place* changes in
//!   the image as well. That is why `/etc` and the package databases are copied, not linked, and why
//!   the image can be built anew.
//!
//! What must be copied is added up first, by the same walk, so that an image that does not fit is refused
//! before anything is written. While it is copied the free space is checked before every file: others
//! may be taking it meanwhile.
//!
//! The work is done by a few threads that share a stack of directories; it is bound by the
//! filesystem, not by the processor.

mod etc_files;
mod rules;

use std::collections::{BTreeSet, HashSet};
use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use sha2::{Digest as _, Sha256};

use self::rules::{EtcRule, Means};
use super::attributes::{Attributes, copy_file};
use super::error::{ImageError, ImageResult};
use super::progress::Reporter;

/// How many entries go by between two reports.
const REPORT_EVERY: u64 = 2000;
/// What an entry takes besides its contents, and what contents and directories are rounded up to.
const ENTRY_COST: u64 = 512;
const BLOCK: u64 = 4096;
/// The file with which it is tried whether files can be cloned.
const TRIAL: &str = ".clone-trial";

/// Refuses when so many bytes do not fit beside the host's reserve.
pub type RoomCheck = dyn Fn(u64) -> ImageResult<()> + Send + Sync;

/// The machine an image is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostRoot {
    /// Its root directory.
    pub root: PathBuf,
    /// Directories below it to be taken beyond the rules, such as `/opt/node`.
    pub also: Vec<PathBuf>,
}

impl Default for HostRoot {
    fn default() -> Self {
        Self { root: PathBuf::from("/"), also: Vec::new() }
    }
}

/// What was made of a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostTree {
    /// How many files, directories and links it has.
    pub files: u64,
    /// How many of them are shared with the host.
    pub shared: u64,
    /// The space those take, which is the host's.
    pub shared_bytes: u64,
    /// Bytes that had to be copied.
    pub copied: u64,
    /// SHA-256 over names, modes, sizes and times, as `sha256:…`: changes when the host does.
    pub digest: String,
}

impl HostRoot {
    /// How many bytes the tree takes in `diff`, an empty directory: next to nothing if files can be linked or cloned into it.
    ///
    /// # Errors
    ///
    /// Returns an error when a directory of the host cannot be read.
    pub fn measure(&self, diff: &Path, never: &Path) -> ImageResult<u64> {
        let silent = Reporter::silent();
        let found = fs::metadata(diff).map_err(ImageError::io("look at", diff))?;
        let work = CopyWork {
            never: fs::metadata(never).ok().map(|found| identity(&found)),
            homes: etc_files::homes(&self.root),
            only_measure: Some(identity(&found).0),
            ..CopyWork::new(&silent, &|_| Ok(()))
        };
        self.plan_all(&work, diff)?;
        work.run()?;
        let first = work.first.into_inner();
        let all = work.copied.into_inner();
        let is_cloned = first.is_some_and(|first| can_clone(&first, diff));
        Ok(if is_cloned { work.entries.into_inner() } else { all + work.entries.into_inner() })
    }

    /// Builds the tree in `diff`, an empty directory. What is below `never` is not taken, wherever it
    /// lies. Before a file is copied `room` is asked whether it fits.
    ///
    /// # Errors
    ///
    /// Returns the first file that could not be linked or copied. `diff` is then of no use.
    pub fn build(
        &self,
        diff: &Path,
        never: &Path,
        room: &RoomCheck,
        progress: &Reporter,
    ) -> ImageResult<HostTree> {
        let work = CopyWork {
            never: fs::metadata(never).ok().map(|found| identity(&found)),
            homes: etc_files::homes(&self.root),
            ..CopyWork::new(progress, room)
        };
        fs::set_permissions(diff, std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .map_err(ImageError::io("change the mode of", diff))?;
        for (name, mode) in rules::SKELETON {
            self.make_empty(diff, name, mode)?;
        }
        self.plan_all(&work, diff)?;
        work.run()?;
        etc_files::write(&self.root, diff)?;
        Ok(work.into_tree())
    }

    fn plan_all(&self, work: &CopyWork<'_>, diff: &Path) -> ImageResult<()> {
        for name in rules::PROGRAMS {
            self.plan(work, diff, name, Means::Link, Rule::Programs)?;
        }
        self.plan(work, diff, "etc", Means::Copy, Rule::Etc)?;
        for name in rules::VAR {
            self.plan(work, diff, name, Means::Copy, Rule::All)?;
        }
        for path in &self.also {
            let inside = path.strip_prefix("/").unwrap_or(path);
            let Some(name) = inside.to_str().filter(|name| !name.contains("..")) else {
                let name = path.display().to_string();
                let reason = "it must be an absolute path without `..`".to_owned();
                return Err(ImageError::NotAnImage { what: name, reason });
            };
            self.plan(work, diff, name, Means::Link, Rule::All)?;
        }
        Ok(())
    }

    /// Makes a directory like the host's of that name, but empty.
    fn make_empty(&self, diff: &Path, name: &str, mode: u32) -> ImageResult<()> {
        let path = diff.join(name);
        match fs::create_dir(&path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
            Err(source) => return Err(ImageError::Io { action: "create", path, source }),
        }
        let dir = fs::File::open(&path).map_err(ImageError::io("open", &path))?;
        let stat = rustix::fs::lstat(self.root.join(name)).ok();
        let like_host = stat.filter(|stat| FileType::from_raw_mode(stat.st_mode).is_dir());
        let attributes = match like_host {
            // Mount points look different on a host that runs, and its own /root may be open.
            Some(stat) if !matches!(name, "proc" | "sys" | "dev" | "run" | "root") => {
                Attributes::of(&stat)
            }
            _ => Attributes { mode, ..Attributes::DIRECTORY },
        };
        attributes.give(&dir).map_err(ImageError::io("set the attributes of", &path))
    }

    /// Puts one name of the host on the list: a directory to be walked, or a file or link.
    fn plan(
        &self,
        work: &CopyWork<'_>,
        diff: &Path,
        name: &str,
        means: Means,
        rule: Rule,
    ) -> ImageResult<()> {
        let source = self.root.join(name);
        let Ok(stat) = rustix::fs::lstat(&source) else { return Ok(()) };
        let target = diff.join(name);
        let parent = target.parent().unwrap_or(diff);
        if work.only_measure.is_none() {
            fs::create_dir_all(parent).map_err(ImageError::io("create", parent))?;
        }
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                work.push(Job { source, target, name: name.to_owned(), means, rule, stat });
                Ok(())
            }
            FileType::Symlink | FileType::RegularFile if work.only_measure.is_some() => {
                work.entries.fetch_add(BLOCK, Ordering::Relaxed);
                Ok(())
            }
            FileType::Symlink => {
                let to = fs::read_link(&source).map_err(ImageError::io("read", &source))?;
                std::os::unix::fs::symlink(to, &target).map_err(ImageError::io("create", &target))
            }
            FileType::RegularFile if rules::others_may_read(stat.st_mode) => {
                fs::copy(&source, &target).map_err(ImageError::io("copy", &source)).map(drop)
            }
            _ => Ok(()),
        }
    }
}

/// Which names in a directory are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    Programs,
    Etc,
    All,
}

/// A directory to be made and filled.
struct Job {
    source: PathBuf,
    target: PathBuf,
    /// Its path from the root, without a slash in front.
    name: String,
    means: Means,
    rule: Rule,
    stat: Stat,
}

/// What the threads share.
struct CopyWork<'a> {
    never: Option<(u64, u64)>,
    homes: BTreeSet<String>,
    progress: &'a Reporter,
    room: &'a RoomCheck,
    /// Nothing is made, only added up; the device that it would be made on.
    only_measure: Option<u64>,
    /// What entries take besides the contents of files, when it is added up, and the first file that would be copied.
    entries: AtomicU64,
    first: Mutex<Option<PathBuf>>,
    stack: Mutex<JobQueue>,
    changed: Condvar,
    failed: AtomicBool,
    files: AtomicU64,
    shared: AtomicU64,
    shared_bytes: AtomicU64,
    /// Files with several names, whose space counts once.
    linked: Mutex<HashSet<u64>>,
    copied: AtomicU64,
    /// One hash for each entry; sorted at the end, because threads finish in any order.
    hashes: Mutex<Vec<[u8; 32]>>,
}

#[derive(Default)]
struct JobQueue {
    jobs: Vec<Job>,
    busy: usize,
    error: Option<ImageError>,
}

impl<'a> CopyWork<'a> {
    fn new(progress: &'a Reporter, room: &'a RoomCheck) -> Self {
        Self {
            never: None,
            homes: BTreeSet::new(),
            progress,
            room,
            only_measure: None,
            entries: AtomicU64::new(0),
            first: Mutex::default(),
            stack: Mutex::default(),
            changed: Condvar::new(),
            failed: AtomicBool::new(false),
            files: AtomicU64::new(0),
            shared: AtomicU64::new(0),
            shared_bytes: AtomicU64::new(0),
            linked: Mutex::default(),
            copied: AtomicU64::new(0),
            hashes: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, JobQueue> {
        self.stack.lock()
    }

    fn push(&self, job: Job) {
        self.lock().jobs.push(job);
        self.changed.notify_one();
    }

    fn run(&self) -> ImageResult<()> {
        let threads = std::thread::available_parallelism().map_or(2, |n| n.get().clamp(2, 8));
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| self.fill());
            }
        });
        self.lock().error.take().map_or(Ok(()), Err)
    }

    /// Takes directories off the stack until it is empty and no thread could add any.
    fn fill(&self) {
        let mut hashes = Vec::new();
        while let Some(job) = self.next() {
            let done = self.directory(&job, &mut hashes);
            let mut stack = self.lock();
            stack.busy -= 1;
            if let Err(error) = done {
                self.failed.store(true, Ordering::Relaxed);
                stack.jobs.clear();
                stack.error.get_or_insert(error);
            }
            drop(stack);
            self.changed.notify_all();
        }
        self.hashes.lock().append(&mut hashes);
    }

    fn next(&self) -> Option<Job> {
        let mut stack = self.lock();
        loop {
            if self.failed.load(Ordering::Relaxed) {
                return None;
            }
            if let Some(job) = stack.jobs.pop() {
                stack.busy += 1;
                return Some(job);
            }
            if stack.busy == 0 {
                return None;
            }
            self.changed.wait(&mut stack);
        }
    }

    fn directory(&self, job: &Job, hashes: &mut Vec<[u8; 32]>) -> ImageResult<()> {
        let Some(source) = open_source(&job.source)? else { return Ok(()) };
        if self.only_measure.is_some() {
            self.entries.fetch_add(BLOCK, Ordering::Relaxed);
            return self.all_entries(job, &source, source.as_fd(), hashes);
        }
        match fs::create_dir(&job.target) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(ImageError::io("create", &job.target)(error));
            }
            _ => {}
        }
        let target = fs::File::open(&job.target).map_err(ImageError::io("open", &job.target))?;
        self.all_entries(job, &source, target.as_fd(), hashes)?;
        // After the entries, whose making would change the time.
        Attributes::of(&job.stat)
            .give(&target)
            .map_err(ImageError::io("set the attributes of", &job.target))
    }

    fn all_entries(
        &self,
        job: &Job,
        source: &OwnedFd,
        target: BorrowedFd<'_>,
        hashes: &mut Vec<[u8; 32]>,
    ) -> ImageResult<()> {
        let stat = rustix::fs::fstat(source).map_err(ImageError::io("look at", &job.source))?;
        let barred = self.never == Some((stat.st_dev, stat.st_ino));
        if !barred && rules::others_may_enter(stat.st_mode) {
            let entries = Dir::read_from(source).map_err(ImageError::io("read", &job.source))?;
            for entry in entries {
                let entry = entry.map_err(ImageError::io("read", &job.source))?;
                let name = entry.file_name().to_bytes();
                if name != b"." && name != b".." {
                    self.entry(job, source.as_fd(), target, name, hashes)?;
                }
            }
        }
        Ok(())
    }

    fn entry(
        &self,
        job: &Job,
        source: BorrowedFd<'_>,
        target: BorrowedFd<'_>,
        name: &[u8],
        hashes: &mut Vec<[u8; 32]>,
    ) -> ImageResult<()> {
        let text = String::from_utf8_lossy(name);
        let path = format!("{}/{text}", job.name);
        let Some((means, rule)) = self.verdict(job, &path, &text) else { return Ok(()) };
        let stat = match rustix::fs::statat(source, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            // The host lives on; what is gone by now is not in the image.
            Err(Errno::NOENT) => return Ok(()),
            Err(error) => return Err(ImageError::io("look at", job.source.join(&*text))(error)),
        };
        match FileType::from_raw_mode(stat.st_mode) {
            // Another filesystem is mounted there, which is none of the system's own.
            FileType::Directory if stat.st_dev != job.stat.st_dev => return Ok(()),
            FileType::Directory => {
                let name = std::ffi::OsStr::from_bytes(name);
                let (source, target) = (job.source.join(name), job.target.join(name));
                self.push(Job { source, target, name: path.clone(), means, rule, stat });
            }
            FileType::RegularFile if !rules::others_may_read(stat.st_mode) => return Ok(()),
            FileType::RegularFile | FileType::Symlink if self.only_measure.is_some() => {
                self.add_up(means, &stat, || job.source.join(std::ffi::OsStr::from_bytes(name)));
                return Ok(());
            }
            FileType::RegularFile | FileType::Symlink => {
                self.take(means, source, target, name, &stat)?
                    .map_err(ImageError::io("take", job.source.join(&*text)))?;
            }
            _ => return Ok(()),
        }
        hashes.push(hash(&path, &stat));
        let files = self.files.fetch_add(1, Ordering::Relaxed) + 1;
        if files.is_multiple_of(REPORT_EVERY) {
            self.progress.say("linking system files", files, None);
        }
        Ok(())
    }

    /// Whether a name is taken, and how it and what is below it are.
    fn verdict(&self, job: &Job, path: &str, name: &str) -> Option<(Means, Rule)> {
        if rules::SECRET_NAMES.contains(&name) || self.homes.contains(path) {
            return None;
        }
        match job.rule {
            Rule::Programs if rules::LEFT_OUT.contains(&path) => None,
            Rule::Programs if rules::COPIED.contains(&path) => Some((Means::Copy, Rule::All)),
            Rule::Etc => match rules::etc_rule(path.strip_prefix("etc/").unwrap_or(path)) {
                EtcRule::Take => Some((Means::Copy, Rule::All)),
                EtcRule::Enter => Some((Means::Copy, Rule::Etc)),
                EtcRule::LeaveOut => None,
            },
            rule @ (Rule::Programs | Rule::All) => Some((job.means, rule)),
        }
    }

    fn take(
        &self,
        means: Means,
        source: BorrowedFd<'_>,
        target: BorrowedFd<'_>,
        name: &[u8],
        stat: &Stat,
    ) -> ImageResult<io::Result<()>> {
        if means == Means::Link {
            match rustix::fs::linkat(source, name, target, name, AtFlags::empty()) {
                Ok(()) => {
                    self.count_shared(stat);
                    return Ok(Ok(()));
                }
                Err(Errno::NOENT) => return Ok(Ok(())),
                // Another filesystem, one that has no hard links, or a file with too many.
                Err(Errno::XDEV | Errno::PERM | Errno::OPNOTSUPP | Errno::MLINK) => {}
                Err(error) => return Ok(Err(error.into())),
            }
        }
        (self.room)(space_of(stat))?;
        Ok(self.copy(source, target, name, stat))
    }

    fn copy(
        &self,
        source: BorrowedFd<'_>,
        target: BorrowedFd<'_>,
        name: &[u8],
        stat: &Stat,
    ) -> io::Result<()> {
        if FileType::from_raw_mode(stat.st_mode).is_symlink() {
            let to: CString = rustix::fs::readlinkat(source, name, Vec::new())?;
            rustix::fs::symlinkat(to, target, name)?;
            return Attributes::of(stat).give_at(target, name, true);
        }
        match copy_file(source, name, target, name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => {
                self.copied.fetch_add(u64::try_from(stat.st_size).unwrap_or(0), Ordering::Relaxed);
                done
            }
        }
    }

    /// Adds up what a file would take.
    fn add_up(&self, means: Means, stat: &Stat, path: impl FnOnce() -> PathBuf) {
        self.entries.fetch_add(ENTRY_COST, Ordering::Relaxed);
        let is_linked = means == Means::Link && Some(stat.st_dev) == self.only_measure;
        if is_linked || !FileType::from_raw_mode(stat.st_mode).is_file() || stat.st_size == 0 {
            return;
        }
        self.copied.fetch_add(space_of(stat), Ordering::Relaxed);
        self.first.lock().get_or_insert_with(path);
    }

    fn count_shared(&self, stat: &Stat) {
        self.shared.fetch_add(1, Ordering::Relaxed);
        let seen = || {
            let mut linked = self.linked.lock();
            !linked.insert(stat.st_ino)
        };
        if stat.st_nlink == 1 || !seen() {
            let bytes = u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
            self.shared_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    fn into_tree(self) -> HostTree {
        let mut hashes = self.hashes.into_inner();
        hashes.sort_unstable();
        let mut all = Sha256::new();
        for hash in &hashes {
            all.update(hash);
        }
        HostTree {
            files: self.files.into_inner(),
            shared: self.shared.into_inner(),
            shared_bytes: self.shared_bytes.into_inner(),
            copied: self.copied.into_inner(),
            digest: super::digest::text(&all.finalize()),
        }
    }
}

/// Opens a directory of the host; nothing if it is gone or is none any more.
fn open_source(path: &Path) -> ImageResult<Option<OwnedFd>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(dir) => Ok(Some(dir)),
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
        Err(error) => Err(ImageError::io("open", path)(error)),
    }
}

/// What the contents of a file take.
fn space_of(stat: &Stat) -> u64 {
    u64::try_from(stat.st_size).unwrap_or(0).next_multiple_of(BLOCK)
}

/// Whether files can be cloned from where this one is into `diff`.
fn can_clone(file: &Path, diff: &Path) -> bool {
    let trial = diff.join(TRIAL);
    let cloned = fs::File::open(file)
        .and_then(|from| Ok((from, fs::File::create_new(&trial)?)))
        .is_ok_and(|(from, to)| rustix::fs::ioctl_ficlone(to, from).is_ok());
    let _ = fs::remove_file(&trial);
    cloned
}

fn identity(found: &fs::Metadata) -> (u64, u64) {
    use std::os::unix::fs::MetadataExt as _;
    (found.dev(), found.ino())
}

fn hash(path: &str, stat: &Stat) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(path.as_bytes());
    for number in [i64::from(stat.st_mode), stat.st_size, stat.st_mtime] {
        hash.update(number.to_le_bytes());
    }
    hash.finalize().into()
}
