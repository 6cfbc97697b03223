//! Visits a tree with several threads, and measures it.

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use parking_lot::{Condvar, Mutex};
use rustix::fs::{FileType, Statx};
use rustix::io::Errno;
use sha2::{Digest as _, Sha256};

use super::layer::junk::{Junk, JunkDir, JunkLook, JunkRules};
use super::tree::{TreeDir, file_type};
use super::{Result, StoreError};

/// What a tree takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Measure {
    /// Disk space: blocks, each inode once.
    pub(super) bytes: u64,
    /// Names, the root's not counted.
    pub(super) files: u64,
    /// A hash over what is known of every name without reading files. The order does not matter: it
    /// is the exclusive or of one hash for each.
    pub(super) summary: [u8; 32],
}

/// Hashes the names of one directory. What goes into the hash of a name is its path from the root of the tree and what is
/// known of it; the size of directories, link counts and change times are the filesystem's own.
struct NameHasher {
    /// The path of the directory has gone in.
    prefix: Sha256,
}

impl NameHasher {
    /// For names in the directory at `path`, without slashes at its ends.
    fn new(path: &[u8]) -> Self {
        let mut prefix = Sha256::new();
        prefix.update(path);
        if !path.is_empty() {
            prefix.update(b"/");
        }
        Self { prefix }
    }

    fn hash(&self, name: &[u8], stat: &Statx) -> [u8; 32] {
        let size = match file_type(stat) {
            FileType::Directory => 0,
            _ => stat.stx_size,
        };
        let numbers = [
            u64::from(stat.stx_mode),
            u64::from(stat.stx_uid),
            u64::from(stat.stx_gid),
            size,
            stat.stx_mtime.tv_sec.cast_unsigned(),
            u64::from(stat.stx_mtime.tv_nsec),
            u64::from(stat.stx_rdev_major),
            u64::from(stat.stx_rdev_minor),
        ];
        // A zero before each number, and all of them in one piece: a hasher is asked for every name.
        let mut text = [0u8; 8 * 9];
        for (to, number) in text.chunks_exact_mut(9).zip(numbers) {
            to[1..].copy_from_slice(&number.to_le_bytes());
        }
        let mut hash = self.prefix.clone();
        hash.update(name);
        hash.update(text);
        hash.finalize().into()
    }
}

fn add_up(sum: &mut [u8; 32], one: &[u8; 32]) {
    sum.iter_mut().zip(one).for_each(|(sum, one)| *sum ^= one);
}

/// Measures the tree under `root`, which must not change.
pub(super) fn measure(root: &Path) -> Result<Measure> {
    Ok(measure_looking(root, false, None)?.0)
}

/// Measures the tree under `root` while it may change: what vanishes meanwhile does not count.
pub(super) fn measure_moving(root: &Path) -> Result<Measure> {
    Ok(measure_looking(root, true, None)?.0)
}

/// Measures the tree under `root`, and looks for junk in it on the way.
pub(super) fn measure_looking(
    root: &Path,
    moving: bool,
    rules: Option<&JunkRules>,
) -> Result<(Measure, Vec<Junk>)> {
    let look = rules.map(JunkLook::new);
    let (bytes, files) = (AtomicU64::new(0), AtomicU64::new(0));
    let linked = Mutex::new(HashSet::new());
    let root = TreeDir::root(root)?;
    let own = root.open()?.own_stat()?;
    bytes.fetch_add(own.stx_blocks * 512, Ordering::Relaxed);
    let summary = Mutex::new(NameHasher::new(b"").hash(b"", &own));
    visit((root, None::<Arc<JunkDir>>), |(place, junk_dir), more| {
        let dir = match place.open() {
            Err(error) if moving && vanished(&error) => return Ok(()),
            opened => opened?,
        };
        let mut here = Measure::default();
        let hasher = (!moving).then(|| NameHasher::new(dir.path()));
        let listed = dir.for_each(|name, _| {
            let stat = match dir.stat(name) {
                Err(error) if moving && vanished(&error) => return Ok(()),
                found => found?,
            };
            let is_dir = file_type(&stat) == FileType::Directory;
            here.files += 1;
            if let Some(hasher) = &hasher {
                add_up(&mut here.summary, &hasher.hash(name.to_bytes(), &stat));
            }
            if is_dir || stat.stx_nlink == 1 || linked.lock().insert(stat.stx_ino) {
                here.bytes += stat.stx_blocks * 512;
            }
            let look = look.as_ref().filter(|_| junk_dir.is_none());
            if is_dir {
                let junk_dir = junk_dir.clone().or_else(|| look?.dir(dir.path_of(name), &stat));
                more.push((dir.child(name), junk_dir));
            } else if let Some(look) = look
                && file_type(&stat) == FileType::RegularFile
            {
                let path = || dir.path_of(name);
                look.file(dir.fd().as_fd(), name.to_bytes(), path, &stat);
            }
            Ok(())
        });
        if let Some(junk_dir) = &junk_dir {
            junk_dir.add(here.bytes);
        }
        match listed {
            Err(error) if moving && vanished(&error) => {}
            listed => listed?,
        }
        bytes.fetch_add(here.bytes, Ordering::Relaxed);
        files.fetch_add(here.files, Ordering::Relaxed);
        add_up(&mut summary.lock(), &here.summary);
        Ok(())
    })?;
    let summary = summary.into_inner();
    let measure = Measure { bytes: bytes.into_inner(), files: files.into_inner(), summary };
    Ok((measure, look.map(JunkLook::finish).unwrap_or_default()))
}

/// Measures a tree name by name, for a walk that its caller makes: a directory comes before what is
/// in it.
pub(super) struct Measuring<'r> {
    measure: Measure,
    /// Inodes with several names that were counted.
    linked: HashSet<u64>,
    look: Option<JunkLook<'r>>,
    /// The directory the walk is in, if that is junk.
    junk_dir: Option<Arc<JunkDir>>,
    /// Hashes the names of the directory with this path.
    hasher: (Vec<u8>, NameHasher),
}

impl<'r> Measuring<'r> {
    /// Begins with the root of the tree.
    pub(super) fn new(root: &Statx, rules: Option<&'r JunkRules>) -> Self {
        let hasher = NameHasher::new(b"");
        let summary = hasher.hash(b"", root);
        Self {
            measure: Measure { bytes: root.stx_blocks * 512, files: 0, summary },
            linked: HashSet::new(),
            look: rules.map(JunkLook::new),
            junk_dir: None,
            hasher: (Vec::new(), hasher),
        }
    }

    /// Adds the name at `path`, in the open directory `dir`.
    pub(super) fn add(&mut self, dir: BorrowedFd<'_>, path: &[u8], stat: &Statx) {
        let (parent, name) = match path.iter().rposition(|byte| *byte == b'/') {
            Some(at) => (&path[..at], &path[at + 1..]),
            None => (&b""[..], path),
        };
        if self.hasher.0 != parent {
            self.hasher = (parent.to_vec(), NameHasher::new(parent));
        }
        let is_dir = file_type(stat) == FileType::Directory;
        self.measure.files += 1;
        add_up(&mut self.measure.summary, &self.hasher.1.hash(name, stat));
        let counts = is_dir || stat.stx_nlink == 1 || self.linked.insert(stat.stx_ino);
        let bytes = if counts { stat.stx_blocks * 512 } else { 0 };
        self.measure.bytes += bytes;
        let Some(look) = &self.look else { return };
        // What is in it comes right after it.
        if let Some(junk_dir) = self.junk_dir.as_ref().filter(|junk_dir| junk_dir.holds(path)) {
            junk_dir.add(bytes);
        } else if is_dir {
            self.junk_dir = look.dir(path.to_vec(), stat);
        } else if file_type(stat) == FileType::RegularFile {
            look.file(dir, name, || path.to_vec(), stat);
        }
    }

    pub(super) fn finish(self) -> (Measure, Vec<Junk>) {
        (self.measure, self.look.map(JunkLook::finish).unwrap_or_default())
    }
}

/// Whether something was gone, or something else, when it was looked at.
pub(super) fn vanished(error: &StoreError) -> bool {
    let gone = [Errno::NOENT, Errno::NOTDIR, Errno::LOOP];
    let is_gone =
        |source: &io::Error| Errno::from_io_error(source).is_some_and(|e| gone.contains(&e));
    matches!(error, StoreError::Io { source, .. } if is_gone(source))
}

/// Calls `work` with `first` and with all that `work` adds, on as many threads as there are
/// processors, at least two and at most eight; on this one alone in the background. Ends at the first error.
///
/// The newest item goes first, so that a walk is depth first and few items wait.
pub(super) fn visit<T, F>(first: T, work: F) -> Result<()>
where
    T: Send,
    F: Fn(T, &mut Vec<T>) -> Result<()> + Sync,
{
    let threads = match super::background::is_entered() {
        true => 1,
        false => thread::available_parallelism().map_or(2, usize::from).clamp(2, 8),
    };
    let queue = Queue {
        state: Mutex::new(WalkState { waiting: vec![first], busy: 0, outcome: Ok(()) }),
        changed: Condvar::new(),
    };
    thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(|| queue.work_off(&work));
        }
        queue.work_off(&work);
    });
    queue.state.into_inner().outcome
}

struct Queue<T> {
    state: Mutex<WalkState<T>>,
    changed: Condvar,
}

struct WalkState<T> {
    waiting: Vec<T>,
    busy: usize,
    outcome: Result<()>,
}

impl<T> Queue<T> {
    fn work_off(&self, work: &impl Fn(T, &mut Vec<T>) -> Result<()>) {
        let mut more = Vec::new();
        while let Some(item) = self.take() {
            // Lets the others end should `work` panic.
            let turn = Turn { queue: self };
            let outcome = work(item, &mut more);
            let mut state = self.state.lock();
            if outcome.is_err() && state.outcome.is_ok() {
                state.outcome = outcome;
            }
            state.waiting.append(&mut more);
            drop(state);
            drop(turn);
        }
    }

    fn take(&self) -> Option<T> {
        let mut state = self.state.lock();
        loop {
            if state.outcome.is_err() {
                return None;
            }
            if let Some(item) = state.waiting.pop() {
                state.busy += 1;
                return Some(item);
            }
            if state.busy == 0 {
                return None;
            }
            self.changed.wait(&mut state);
        }
    }
}

struct Turn<'a, T> {
    queue: &'a Queue<T>,
}

impl<T> Drop for Turn<'_, T> {
    fn drop(&mut self) {
        self.queue.state.lock().busy -= 1;
        self.queue.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::ffi::OsStrExt;
    use std::path::PathBuf;

    use std::os::fd::OwnedFd;

    use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
    use sandkeep_upper::{Index, Limits, Lower, Visited, look};

    use super::*;
    use crate::model::{Guard, Size};

    /// The summary as `docs/formats/layer.md` defines it. Sealed layers are compared by it for years.
    fn by_definition(root: &Path, names: &[&str]) -> [u8; 32] {
        let mut sum = [0; 32];
        for name in names {
            let at = if name.is_empty() { root.to_owned() } else { root.join(name) };
            let stat = statx(CWD, &at, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::BASIC_STATS)
                .expect("a name of the test");
            let is_dir = file_type(&stat) == FileType::Directory;
            let mut text = PathBuf::from(name).as_os_str().as_bytes().to_vec();
            for number in [
                u64::from(stat.stx_mode),
                u64::from(stat.stx_uid),
                u64::from(stat.stx_gid),
                if is_dir { 0 } else { stat.stx_size },
                stat.stx_mtime.tv_sec.cast_unsigned(),
                u64::from(stat.stx_mtime.tv_nsec),
                u64::from(stat.stx_rdev_major),
                u64::from(stat.stx_rdev_minor),
            ] {
                text.push(0);
                text.extend(number.to_le_bytes());
            }
            add_up(&mut sum, &Sha256::digest(&text).into());
        }
        sum
    }

    #[test]
    fn the_summary_is_the_documented_one() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let (root, long) = (dir.path(), "d".repeat(200));
        fs::create_dir_all(root.join(format!("a/{long}/b"))).expect("directories");
        for file in ["top", "a/middle", &format!("a/{long}/b/deep")] {
            fs::write(root.join(file), file).expect("a file");
        }
        std::os::unix::fs::symlink("top", root.join("a/link")).expect("a link");
        let [under, below, deep] = ["", "/b", "/b/deep"].map(|end| format!("a/{long}{end}"));
        let names = ["", "top", "a", "a/middle", "a/link", &under, &below, &deep];
        let measured = measure(root).expect("a tree that can be read");
        assert_eq!(measured.files, 7);
        assert_eq!(measured.summary, by_definition(root, &names));
    }

    #[test]
    fn a_walk_that_somebody_else_makes_measures_the_same() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let root = dir.path();
        for path in ["a/b/c", "a-b", "node/.cache/x/y", "node/.cache-not", "node/z"] {
            fs::create_dir_all(root.join(path)).expect("directories");
        }
        for path in ["a/b/c/1", "a-b/2", "a.txt", "node/.cache/x/y/3", "node/.cache/4", "node/z/5"]
        {
            fs::write(root.join(path), vec![7; 1 << 20]).expect("a file");
        }
        fs::write(root.join("node/.cache-not/6"), vec![7; 2 << 20]).expect("a file");
        fs::hard_link(root.join("a.txt"), root.join("a/b/linked")).expect("a hard link");
        fs::hard_link(root.join("a.txt"), root.join("node/.cache/linked")).expect("a hard link");
        std::os::unix::fs::symlink("a.txt", root.join("link")).expect("a link");
        let guard = Guard { large: Size(2 << 20), ..Guard::default() };
        let rules = JunkRules::of(&guard).expect("globs of the test").expect("a guard that looks");
        let expected = measure_looking(root, false, Some(&rules)).expect("a tree to be read");
        let top = OwnedFd::from(fs::File::open(root).expect("the root"));
        let stat = crate::store::tree::stat_of(&top).expect("the root");
        let mut measuring = Measuring::new(&stat, Some(&rules));
        let limits = Limits { names: 1_000, go_on: &|| true };
        let visit = &mut |name: &Visited<'_>| measuring.add(name.dir, name.path, name.stat);
        let seen = look(top.as_fd(), &Lower::new(Vec::new()), &Index::default(), &limits, visit);
        assert!(
            seen.expect("a tree to be read").is_some_and(|seen| seen.complete && !seen.skipped)
        );
        let (measure, junk) = measuring.finish();
        assert_eq!(measure, expected.0);
        assert_eq!(junk.len(), 2, "{junk:?}");
        let kinds =
            |junk: &[Junk]| junk.iter().map(|one| (one.path.clone(), one.kind)).collect::<Vec<_>>();
        assert_eq!(kinds(&junk), kinds(&expected.1));
    }
}
