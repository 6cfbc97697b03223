//! Visits every name of a tree in the order of path texts, with bounded memory.
//!
//! The order is that of `digest.json`: byte order of whole paths, so `a`, `a.b`, `a/b`. It is also
//! depth first: in each directory, sorted together, `a` stands for the name itself and `a/` for
//! everything below it.
//!
//! Only names that are still to be visited in the directories on the current path are held, and at
//! most [`NAMES_HELD`] of them. A larger directory is listed again for its next names. If a
//! subdirectory needs the memory, the names of its ancestors are dropped and listed again later.

use std::ffi::CString;
use std::sync::Arc;

use rustix::fs::{FileType, SeekFrom};

use crate::store::path_text::{path_bytes, path_text};
use crate::store::tree::{Dir, TreeDir, file_type};
use crate::store::{Result, StoreError};

/// How many names a walk holds. While it lists a directory it holds up to three times as many.
const NAMES_HELD: usize = 1 << 16;
/// How many directories stay open. Others are opened again when the walk returns to them.
const DIRS_OPEN: usize = 32;

/// A walk under way.
#[derive(Debug)]
pub(super) struct OrderedWalk {
    root: TreeDir,
    limit: usize,
    /// The current directory's path from the root, in bytes and as text.
    path: Vec<u8>,
    text: String,
    /// The directories on the current path, the root first. Empty before and after the walk.
    levels: Vec<Level>,
    begun: bool,
    /// The last key that was visited in the current directory.
    last: Option<String>,
    held: usize,
    /// Levels below this number hold no names.
    dropped: usize,
    /// The most names that were held at once.
    #[cfg(test)]
    pub(super) peak: usize,
}

#[derive(Debug)]
struct Level {
    /// How long `path` and `text` are without this directory.
    parent_path: usize,
    parent_text: usize,
    dir: Option<Arc<Dir>>,
    /// Absent until the directory is listed, and if its names were dropped.
    pending: Option<Box<Pending>>,
}

/// Names of a directory that are still to be visited.
#[derive(Debug)]
struct Pending {
    /// `name`, and `name/` for the contents of a directory; the next one is the last.
    keys: Vec<String>,
    /// Whether there are no others.
    complete: bool,
}

/// A name that the walk came to. Directories come before their contents.
#[derive(Debug)]
pub(super) struct Visited {
    /// The path from the root, as text.
    pub(super) path: String,
    pub(super) dir: Arc<Dir>,
    /// `.` for the root.
    pub(super) name: CString,
}

impl OrderedWalk {
    pub(super) fn new(root: TreeDir) -> Self {
        Self::with_limit(root, NAMES_HELD)
    }

    pub(super) fn with_limit(root: TreeDir, limit: usize) -> Self {
        Self {
            root,
            limit,
            path: Vec::new(),
            text: String::new(),
            levels: Vec::new(),
            begun: false,
            last: None,
            held: 0,
            dropped: 0,
            #[cfg(test)]
            peak: 0,
        }
    }

    /// The next name, or `None` at the end.
    pub(super) fn next(&mut self) -> Result<Option<Visited>> {
        if !self.begun {
            self.begun = true;
            let dir = Arc::new(self.root.open()?);
            self.descend(0, 0, Arc::clone(&dir));
            return Ok(Some(Visited { path: String::new(), dir, name: c".".to_owned() }));
        }
        while !self.levels.is_empty() {
            let Some(key) = self.next_key()? else {
                self.ascend();
                continue;
            };
            let dir = self.current_dir()?;
            let name_text = key.strip_suffix('/').unwrap_or(&key);
            let name = path_bytes(name_text).and_then(|name| CString::new(name).ok());
            let name = name.unwrap_or_default();
            if key.ends_with('/') {
                let child = Arc::new(dir.child(&name).open()?);
                let (parent_path, parent_text) = (self.path.len(), self.text.len());
                if !self.path.is_empty() {
                    self.path.push(b'/');
                    self.text.push('/');
                }
                self.path.extend_from_slice(name.to_bytes());
                self.text.push_str(name_text);
                self.descend(parent_path, parent_text, child);
                continue;
            }
            let separator = if self.text.is_empty() { "" } else { "/" };
            let path = format!("{}{separator}{name_text}", self.text);
            self.last = Some(key);
            return Ok(Some(Visited { path, dir, name }));
        }
        Ok(None)
    }

    fn descend(&mut self, parent_path: usize, parent_text: usize, dir: Arc<Dir>) {
        self.last = None;
        self.levels.push(Level { parent_path, parent_text, dir: Some(dir), pending: None });
        if let Some(far) = self.levels.len().checked_sub(DIRS_OPEN + 1) {
            self.levels[far].dir = None;
        }
    }

    fn ascend(&mut self) {
        let Some(level) = self.levels.pop() else { return };
        let mut key = self.text[level.parent_text..].trim_start_matches('/').to_owned();
        key.push('/');
        self.last = Some(key);
        self.path.truncate(level.parent_path);
        self.text.truncate(level.parent_text);
    }

    fn current_dir(&mut self) -> Result<Arc<Dir>> {
        let level = self.levels.last_mut();
        let known = level.and_then(|level| level.dir.clone());
        if let Some(dir) = known {
            return Ok(dir);
        }
        let dir = Arc::new(self.root.descend(&self.path)?.open()?);
        if let Some(level) = self.levels.last_mut() {
            level.dir = Some(Arc::clone(&dir));
        }
        Ok(dir)
    }

    /// The next key of the current directory.
    fn next_key(&mut self) -> Result<Option<String>> {
        loop {
            let pending = self.levels.last_mut().and_then(|level| level.pending.as_mut());
            match pending {
                None => self.list()?,
                Some(pending) => match pending.keys.pop() {
                    Some(key) => {
                        self.held -= 1;
                        return Ok(Some(key));
                    }
                    None if pending.complete => return Ok(None),
                    None => self.list()?,
                },
            }
        }
    }

    /// Lists the current directory for the names after the last one.
    fn list(&mut self) -> Result<()> {
        let dir = self.current_dir()?;
        // The descriptor is at the end of the directory if it was listed before.
        rustix::fs::seek(dir.fd(), SeekFrom::Start(0))
            .map_err(|error| dir.failure("list", c".", error))?;
        let mut next =
            NextKeys { last: self.last.take(), limit: self.limit, ..NextKeys::default() };
        dir.for_each(|name, kind| {
            let is_dir = match kind {
                FileType::Directory => true,
                FileType::Unknown => file_type(&dir.stat(name)?) == FileType::Directory,
                _ => false,
            };
            let key = path_text(name.to_bytes());
            if is_dir {
                next.offer(format!("{key}/"));
            }
            next.offer(key);
            Ok(())
        })?;
        #[cfg(test)]
        {
            self.peak = self.peak.max(self.held + next.peak);
        }
        let pending = next.finish();
        let top = self.levels.len().saturating_sub(1);
        self.dropped = self.dropped.min(top);
        while self.held + pending.keys.len() > self.limit && self.dropped < top {
            let dropped = self.levels[self.dropped].pending.take();
            self.held -= dropped.map_or(0, |pending| pending.keys.len());
            self.dropped += 1;
        }
        self.held += pending.keys.len();
        if let Some(level) = self.levels.last_mut() {
            level.pending = Some(Box::new(pending));
        }
        Ok(())
    }
}

/// Finds the smallest keys after `last`.
#[derive(Debug, Default)]
struct NextKeys {
    last: Option<String>,
    limit: usize,
    keys: Vec<String>,
    /// Larger keys are left for another listing.
    largest: Option<String>,
    incomplete: bool,
    #[cfg(test)]
    peak: usize,
}

impl NextKeys {
    fn offer(&mut self, key: String) {
        if self.last.as_ref().is_some_and(|last| key <= *last) {
            return;
        }
        if self.largest.as_ref().is_some_and(|largest| key > *largest) {
            return;
        }
        self.keys.push(key);
        #[cfg(test)]
        {
            self.peak = self.peak.max(self.keys.len());
        }
        if self.keys.len() >= 2 * self.limit {
            self.cut();
        }
    }

    fn cut(&mut self) {
        self.keys.sort_unstable();
        if self.keys.len() > self.limit {
            self.keys.truncate(self.limit);
            self.largest = self.keys.last().cloned();
            self.incomplete = true;
        }
    }

    fn finish(mut self) -> Pending {
        self.cut();
        self.keys.reverse();
        self.keys.shrink_to_fit();
        Pending { keys: self.keys, complete: !self.incomplete }
    }
}

impl Iterator for OrderedWalk {
    type Item = Result<Visited, StoreError>;

    fn next(&mut self) -> Option<Self::Item> {
        OrderedWalk::next(self).transpose()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    fn paths(root: &Path, limit: usize) -> (Vec<String>, usize) {
        let mut walk = OrderedWalk::with_limit(TreeDir::root(root).unwrap(), limit);
        let paths = walk.by_ref().map(|visited| visited.unwrap().path).collect();
        assert_eq!(walk.held, 0);
        (paths, walk.peak)
    }

    fn fill(root: &Path, depth: usize) -> Vec<String> {
        let mut all = Vec::new();
        for name in ["a", "a.b", "a-", "a%", "b\n", "z"] {
            all.push(path_text(name.as_bytes()));
            if depth == 0 || name == "z" {
                fs::write(root.join(name), "").unwrap();
            } else {
                fs::create_dir(root.join(name)).unwrap();
                let below = fill(&root.join(name), depth - 1);
                let prefix = path_text(name.as_bytes());
                all.extend(below.into_iter().map(|path| format!("{prefix}/{path}")));
            }
        }
        all
    }

    #[test]
    fn paths_come_in_the_order_of_their_texts_however_few_names_are_held() {
        let dir = tempfile::tempdir().unwrap();
        let mut expected = fill(dir.path(), 3);
        expected.push(String::new());
        expected.sort();
        for limit in [1, 2, 3, 7, 1000] {
            assert_eq!(paths(dir.path(), limit).0, expected, "{limit} names held");
        }
    }

    #[test]
    fn the_number_of_names_held_does_not_grow_with_a_directory_or_the_depth() {
        let dir = tempfile::tempdir().unwrap();
        let mut at = dir.path().to_owned();
        for _ in 0..40 {
            for number in 0..50 {
                fs::write(at.join(format!("file{number}")), "").unwrap();
                fs::create_dir(at.join(format!("dir{number}"))).unwrap();
            }
            at.push("dir1");
        }
        for number in 0..5000 {
            fs::write(at.join(format!("{number}")), "").unwrap();
        }
        let (paths, peak) = paths(dir.path(), 100);
        assert_eq!(paths.len(), 1 + 40 * 100 + 5000);
        assert!(paths.is_sorted());
        assert!(peak <= 300, "{peak} names were held");
    }
}
