//! Hashes what a walk visits, in the walk's order.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fd::OwnedFd;
use rustix::fs::{FileType, Statx};
use sha2::{Digest, Sha256};

use super::ordered_walk::{OrderedWalk, Visited};
use crate::store::background;
use crate::store::tree::{TreeDir, Xattrs, file_type};
use crate::store::{Result, StoreError};

/// How to read files while others want the disk.
#[derive(Debug, Clone)]
pub struct ReadThrottle {
    /// The largest number of bytes per second.
    pub rate: u64,
    /// Whether to read from the disk what is in the page cache, and to leave none of it there.
    pub bypass_cache: bool,
    /// Set to end it early.
    pub stop: Arc<AtomicBool>,
}

/// Limits the rate at which files are read.
#[derive(Debug)]
struct RateLimiter<'a> {
    throttle: Option<&'a ReadThrottle>,
    begun: Instant,
    read: AtomicU64,
}

impl<'a> RateLimiter<'a> {
    fn new(throttle: Option<&'a ReadThrottle>) -> Self {
        Self { throttle, begun: Instant::now(), read: AtomicU64::new(0) }
    }

    /// Waits until that many more bytes may be read.
    fn take(&self, bytes: u64) -> Result<()> {
        let Some(throttle) = self.throttle else { return Ok(()) };
        let read = self.read.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let due = Duration::from_millis(read.saturating_mul(1000) / throttle.rate.max(1));
        loop {
            if throttle.stop.load(Ordering::Relaxed) {
                return Err(StoreError::ShuttingDown);
            }
            match due.checked_sub(self.begun.elapsed()) {
                None | Some(Duration::ZERO) => return Ok(()),
                Some(early) => thread::sleep(early.min(Duration::from_millis(200))),
            }
        }
    }

    /// Drops the pages of a file from the page cache.
    fn drop_pages(&self, file: &OwnedFd) {
        if self.throttle.is_some_and(|throttle| throttle.bypass_cache) {
            let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
        }
    }
}

/// What a name costs beside its content, in bytes.
const NAME_COSTS: u64 = 4096;

/// How many names are hashed at once if several threads do it.
const BATCH_NAMES: usize = 1024;
/// How many directories are open for that.
const BATCH_DIRS: usize = 64;
/// How long the paths of these names are together.
const BATCH_PATHS: usize = 1 << 20;

/// A name with its hash.
#[derive(Debug)]
pub(super) struct HashedEntry {
    /// The path from the root of the layer, as text.
    pub(super) path: String,
    /// In hexadecimal digits.
    pub(super) hash: String,
    /// The inode, if it has other names, here or elsewhere.
    pub(super) linked_inode: Option<u64>,
}

/// Hashes every name of a tree, in the order of path texts.
#[derive(Debug)]
pub(super) struct TreeHasher<'a> {
    walk: OrderedWalk,
    limiter: RateLimiter<'a>,
    threads: usize,
    ready: VecDeque<HashedEntry>,
}

impl<'a> TreeHasher<'a> {
    /// Uses all processors, or this thread alone if it works in the background.
    pub(super) fn new(root: TreeDir, throttle: Option<&'a ReadThrottle>) -> Self {
        let threads = match background::is_entered() {
            true => 1,
            false => thread::available_parallelism().map_or(2, usize::from).clamp(2, 8),
        };
        let limiter = RateLimiter::new(throttle);
        Self { walk: OrderedWalk::new(root), limiter, threads, ready: VecDeque::new() }
    }

    /// The next name, or `None` at the end.
    pub(super) fn next(&mut self) -> Result<Option<HashedEntry>> {
        if self.ready.is_empty() {
            let batch = self.next_batch()?;
            self.hash_batch(&batch)?;
        }
        Ok(self.ready.pop_front())
    }

    fn next_batch(&mut self) -> Result<Vec<Visited>> {
        let names = if self.threads == 1 { 1 } else { BATCH_NAMES };
        let (mut batch, mut dirs, mut paths) = (Vec::<Visited>::new(), 0, 0);
        while batch.len() < names && dirs < BATCH_DIRS && paths < BATCH_PATHS {
            let Some(visited) = self.walk.next()? else { break };
            let same = batch.last().is_some_and(|last| Arc::ptr_eq(&last.dir, &visited.dir));
            dirs += usize::from(!same);
            paths += visited.path.len();
            batch.push(visited);
        }
        Ok(batch)
    }

    fn hash_batch(&mut self, batch: &[Visited]) -> Result<()> {
        if let [one] = batch {
            self.ready.push_back(hash_entry(one, &self.limiter)?);
            return Ok(());
        }
        let next = AtomicUsize::new(0);
        let work = || -> Result<Vec<(usize, HashedEntry)>> {
            let mut done = Vec::new();
            while let number = next.fetch_add(1, Ordering::Relaxed)
                && let Some(visited) = batch.get(number)
            {
                done.push((number, hash_entry(visited, &self.limiter)?));
            }
            Ok(done)
        };
        let mut hashed = thread::scope(|scope| {
            let helpers: Vec<_> =
                (1..self.threads.min(batch.len())).map(|_| scope.spawn(work)).collect();
            let mut hashed = work();
            for helper in helpers {
                let done = helper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                match (&mut hashed, done) {
                    (Ok(hashed), Ok(done)) => hashed.extend(done),
                    (Ok(_), Err(error)) => hashed = Err(error),
                    (Err(_), _) => {}
                }
            }
            hashed
        })?;
        hashed.sort_unstable_by_key(|(number, _)| *number);
        self.ready.extend(hashed.into_iter().map(|(_, entry)| entry));
        Ok(())
    }
}

fn hash_entry(visited: &Visited, limiter: &RateLimiter<'_>) -> Result<HashedEntry> {
    let Visited { path, dir, name } = visited;
    limiter.take(NAME_COSTS)?;
    let stat = dir.stat(name)?;
    let mut hash = hash_metadata(&stat, &dir.xattrs(name)?);
    match file_type(&stat) {
        FileType::RegularFile => {
            let file = dir.open_file(name)?;
            limiter.drop_pages(&file);
            let mut buffer = vec![0u8; 128 << 10];
            loop {
                background::step();
                let got = rustix::io::read(&file, &mut buffer);
                let got = got.map_err(|error| dir.failure("read", name, error))?;
                if got == 0 {
                    break;
                }
                hash.update(&buffer[..got]);
                limiter.take(got as u64)?;
            }
            limiter.drop_pages(&file);
        }
        FileType::Symlink => hash.update(dir.link_target(name)?.as_bytes()),
        _ => {}
    }
    let linked = file_type(&stat) != FileType::Directory && stat.stx_nlink > 1;
    Ok(HashedEntry {
        path: path.clone(),
        hash: hex::encode(hash.finalize()),
        linked_inode: linked.then_some(stat.stx_ino),
    })
}

fn hash_metadata(stat: &Statx, xattrs: &Xattrs) -> Sha256 {
    let mut hash = Sha256::new();
    let size = match file_type(stat) {
        FileType::Directory => 0,
        _ => stat.stx_size,
    };
    let modified = stat.stx_mtime;
    hash.update(format!(
        "{:o} {} {} {size} {}.{} {}:{}\n",
        stat.stx_mode,
        stat.stx_uid,
        stat.stx_gid,
        modified.tv_sec,
        modified.tv_nsec,
        stat.stx_rdev_major,
        stat.stx_rdev_minor
    ));
    for (key, value) in xattrs {
        hash.update(key.as_bytes());
        hash.update(format!("={}:", value.len()));
        hash.update(value);
    }
    hash.update(b"\n");
    hash
}
