//! Finds large files, caches and core dumps that may not be meant to be in a snapshot.
//!
//! The look is part of the walk that measures a layer and costs it next to nothing: a file's path is
//! only put together, and compared with globs, when the file is large enough to matter. A directory
//! that matches is one find, with the size of all that is in it.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use rustix::fs::Statx;

use crate::model::{FindingKind, Guard, OnJunk, Timestamp};
use crate::store::layer::exclude::Globs;
use crate::store::tree::open_file;
use crate::store::{Result, StoreError};

/// Smaller junk is not reported.
const WORTH_TELLING: u64 = 1 << 20;
/// What a process that crashed leaves is larger.
const SMALLEST_CORE: u64 = 64 << 10;

/// What is looked for.
#[derive(Debug)]
pub struct JunkRules {
    large: u64,
    globs: Globs,
}

/// Something that was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Junk {
    /// The path from the layer's root, without a leading slash.
    pub path: Vec<u8>,
    /// What it takes on the disk.
    pub size: u64,
    /// When it last changed.
    pub changed: Timestamp,
    /// What it is.
    pub kind: FindingKind,
}

impl JunkRules {
    /// What a guard looks for; `None` when it does not.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::BadGlob`].
    pub fn of(guard: &Guard) -> Result<Option<Self>, StoreError> {
        if guard.junk == OnJunk::Off {
            return Ok(None);
        }
        Ok(Some(Self { large: guard.large.0, globs: Globs::parse(&guard.globs)? }))
    }
}

/// A directory that is junk, and what was counted in it so far.
#[derive(Debug)]
pub(in crate::store) struct JunkDir {
    path: Vec<u8>,
    changed: Timestamp,
    bytes: AtomicU64,
}

/// A look under way.
pub(in crate::store) struct JunkLook<'r> {
    rules: &'r JunkRules,
    found: Mutex<Vec<Junk>>,
    dirs: Mutex<Vec<Arc<JunkDir>>>,
}

impl<'r> JunkLook<'r> {
    pub(in crate::store) fn new(rules: &'r JunkRules) -> Self {
        Self { rules, found: Mutex::default(), dirs: Mutex::default() }
    }

    /// Looks at a directory in one that is no junk.
    pub(in crate::store) fn dir(&self, path: Vec<u8>, stat: &Statx) -> Option<Arc<JunkDir>> {
        if !self.rules.globs.matches(&path) {
            return None;
        }
        let bytes = AtomicU64::new(stat.stx_blocks * 512);
        let junk_dir = Arc::new(JunkDir { path, changed: changed(stat), bytes });
        self.dirs.lock().push(Arc::clone(&junk_dir));
        Some(junk_dir)
    }

    /// Looks at a file in a directory that is no junk.
    pub(in crate::store) fn file(
        &self,
        dir: BorrowedFd<'_>,
        name: &[u8],
        path: impl Fn() -> Vec<u8>,
        stat: &Statx,
    ) {
        let size = (stat.stx_blocks * 512).min(stat.stx_size);
        let is_core = || size >= SMALLEST_CORE && is_core_name(name) && is_core_dump(dir, name);
        let kind = if is_core() {
            FindingKind::CoreDump
        } else if size >= self.rules.large {
            FindingKind::Large
        } else if size >= WORTH_TELLING && self.rules.globs.matches(&path()) {
            FindingKind::Junk
        } else {
            return;
        };
        let path = path();
        self.found.lock().push(Junk { path, size, changed: changed(stat), kind });
    }

    pub(in crate::store) fn finish(self) -> Vec<Junk> {
        let mut found = std::mem::take(&mut *self.found.lock());
        for junk_dir in self.dirs.lock().iter() {
            let size = junk_dir.bytes.load(Ordering::Relaxed);
            if size >= WORTH_TELLING {
                let (path, changed) = (junk_dir.path.clone(), junk_dir.changed);
                found.push(Junk { path, size, changed, kind: FindingKind::Junk });
            }
        }
        found.sort_by(|a, b| a.path.cmp(&b.path));
        found
    }
}

impl JunkDir {
    /// Whether a path is in it.
    pub(in crate::store) fn holds(&self, path: &[u8]) -> bool {
        path.strip_prefix(self.path.as_slice()).is_some_and(|rest| rest.first() == Some(&b'/'))
    }

    pub(in crate::store) fn add(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

fn changed(stat: &Statx) -> Timestamp {
    let nanos = i32::try_from(stat.stx_mtime.tv_nsec).unwrap_or(0);
    Timestamp::new(stat.stx_mtime.tv_sec, nanos).unwrap_or(Timestamp::UNIX_EPOCH)
}

fn is_core_name(name: &[u8]) -> bool {
    match name {
        b"core" => true,
        name => name
            .strip_prefix(b"core.")
            .is_some_and(|rest| rest.first().is_some_and(u8::is_ascii_digit)),
    }
}

/// Whether a file is what the kernel writes when a process crashes. Many things are called `core`.
fn is_core_dump(dir: BorrowedFd<'_>, name: &[u8]) -> bool {
    let mut head = [0; 18];
    let Ok(file) = open_file(dir, name) else { return false };
    let Ok(18) = rustix::io::pread(&file, &mut head, 0) else { return false };
    // The type comes after the sixteen bytes that say in which order its bytes are.
    let kind = if head[5] == 2 { [head[17], head[16]] } else { [head[16], head[17]] };
    head.starts_with(b"\x7fELF") && kind == [4, 0]
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::Write;

    use super::{Junk, JunkRules};
    use crate::model::{FindingKind, Guard, OnJunk, Size};
    use crate::store::walk::measure_looking;

    fn elf(kind: u8) -> Vec<u8> {
        let mut bytes = vec![1; 100 << 10];
        bytes[..18].copy_from_slice(&[
            0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, kind, 0,
        ]);
        bytes
    }

    #[test]
    fn junk_is_told_from_what_only_looks_like_it() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            path
        };
        fs::write(at("app/core"), elf(4)).unwrap();
        fs::write(at("app/core.1234"), elf(4)).unwrap();
        fs::write(at("bin/core"), elf(2)).unwrap();
        fs::write(at("bin/core.js"), elf(4)).unwrap();
        fs::write(at("src/core/mod.rs"), vec![1; 2 << 20]).unwrap();
        for n in 0..4 {
            fs::write(at(&format!("root/.cache/pip/{n}/x")), vec![1; 400 << 10]).unwrap();
        }
        fs::write(at("small/.cache/x"), vec![1; 100 << 10]).unwrap();
        fs::write(at("big.bin"), vec![1; 5 << 20]).unwrap();
        fs::write(at("logs/a.log"), vec![1; 2 << 20]).unwrap();
        let mut sparse = File::create(at("sparse")).unwrap();
        sparse.set_len(1 << 40).unwrap();
        sparse.write_all(b"x").unwrap();
        let mut guard = Guard { large: Size(4 << 20), ..Guard::default() };
        guard.globs.push("*.log".to_owned());
        let rules = JunkRules::of(&guard).unwrap();
        let (_, found) = measure_looking(root.path(), false, rules.as_ref()).unwrap();
        let told: Vec<_> = found
            .iter()
            .map(|Junk { path, kind, .. }| (String::from_utf8_lossy(path).into_owned(), *kind))
            .collect();
        let expected = [
            ("app/core", FindingKind::CoreDump),
            ("app/core.1234", FindingKind::CoreDump),
            ("big.bin", FindingKind::Large),
            ("logs/a.log", FindingKind::Junk),
            ("root/.cache", FindingKind::Junk),
        ];
        assert_eq!(told, expected.map(|(path, kind)| (path.to_owned(), kind)));
        assert!(found[4].size >= 1600 << 10, "{:?}", found[4]);
        assert!(JunkRules::of(&Guard { junk: OnJunk::Off, ..guard }).unwrap().is_none());
    }
}
