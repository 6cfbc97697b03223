//! The layers under a layer, as the overlay will show them.
//!
//! A layer speaks of files it does not hold in two ways: it may have a file in a directory that it
//! does not describe, which must then look as it does below; and a hard link may lead to a file below.

use std::ffi::OsStr;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::PathBuf;
use std::{fs, io};

use super::OPAQUE;

const MOST_LINKS: usize = 40;

/// The layers below; the first is the topmost.
#[derive(Debug)]
pub(in crate::store::image) struct Below<'a>(pub(in crate::store::image) &'a [PathBuf]);

/// Where something was found, and what it is.
#[derive(Debug)]
pub(in crate::store::image) struct LowerEntry {
    pub(in crate::store::image) path: PathBuf,
    pub(in crate::store::image) metadata: fs::Metadata,
}

/// A path, a name at a time.
pub(in crate::store::image) type Names = Vec<Vec<u8>>;

impl Below<'_> {
    /// Finds `path`, following symlinks on the way to it but not at its end.
    pub(in crate::store::image) fn find(&self, path: &[Vec<u8>]) -> Option<LowerEntry> {
        self.walk(path, false).map(|(_, found, _)| found)
    }

    /// Finds what `path` leads to, following all symlinks, and says where that is.
    pub(in crate::store::image) fn follow(&self, path: &[Vec<u8>]) -> Option<(Names, LowerEntry)> {
        self.walk(path, true).map(|(place, found, _)| (place, found))
    }

    /// The same, and where what is in it is, if it is a directory. The top is one.
    pub(in crate::store::image) fn open(&self, path: &[Vec<u8>]) -> Option<Shown> {
        if path.iter().all(|name| matches!(name.as_slice(), b"" | b".")) {
            let path = self.0.first()?.clone();
            let metadata = fs::metadata(&path).ok()?;
            return Some(Shown {
                place: Names::new(),
                entry: LowerEntry { path, metadata },
                dirs: self.0.to_vec(),
            });
        }
        self.walk(path, true).map(|(place, entry, dirs)| Shown { place, entry, dirs })
    }

    fn walk(
        &self,
        path: &[Vec<u8>],
        to_the_end: bool,
    ) -> Option<(Names, LowerEntry, Vec<PathBuf>)> {
        // Directories entered so far: where each exists, and its name.
        let mut stack: Vec<(Vec<PathBuf>, Vec<u8>)> = vec![(self.0.to_vec(), Vec::new())];
        let mut todo: Names = path.iter().rev().cloned().collect();
        let mut links = 0;
        while let Some(name) = todo.pop() {
            match name.as_slice() {
                b"" | b"." => continue,
                b".." => {
                    if stack.len() > 1 {
                        stack.pop();
                    }
                    continue;
                }
                _ => {}
            }
            let (found, dirs) = look(&stack.last()?.0, &name)?;
            if found.metadata.is_symlink() && (to_the_end || !todo.is_empty()) {
                links += 1;
                if links > MOST_LINKS {
                    return None;
                }
                let target = fs::read_link(&found.path).ok()?.into_os_string().into_vec();
                if target.starts_with(b"/") {
                    stack.truncate(1);
                }
                todo.extend(target.split(|b| *b == b'/').rev().map(<[u8]>::to_vec));
                continue;
            }
            if todo.iter().all(|name| matches!(name.as_slice(), b"" | b".")) {
                let mut place: Names = stack.drain(1..).map(|(_, name)| name).collect();
                place.push(name);
                return Some((place, found, dirs));
            }
            if !found.metadata.is_dir() {
                return None;
            }
            stack.push((dirs, name));
        }
        None
    }
}

/// Something that shows.
#[derive(Debug)]
pub(in crate::store::image) struct Shown {
    /// Where it is, all links followed.
    pub(in crate::store::image) place: Names,
    pub(in crate::store::image) entry: LowerEntry,
    /// The directories whose content together is its content.
    pub(in crate::store::image) dirs: Vec<PathBuf>,
}

impl Shown {
    /// What is in a directory, in the order of names. Links are not followed.
    pub(in crate::store::image) fn children(&self) -> io::Result<Vec<Self>> {
        let mut names = std::collections::BTreeSet::new();
        for dir in &self.dirs {
            for entry in fs::read_dir(dir)? {
                names.insert(entry?.file_name().into_vec());
            }
        }
        let child = |name: Vec<u8>| {
            let (entry, dirs) = look(&self.dirs, &name)?;
            let place = self.place.iter().cloned().chain([name]).collect();
            Some(Self { place, entry, dirs })
        };
        Ok(names.into_iter().filter_map(child).collect())
    }
}

/// Looks a name up in a directory that exists in several layers. Also tells in which of them the name
/// is a directory whose content shows.
fn look(dirs: &[PathBuf], name: &[u8]) -> Option<(LowerEntry, Vec<PathBuf>)> {
    let mut first: Option<LowerEntry> = None;
    let mut below = Vec::new();
    for dir in dirs {
        let path = dir.join(OsStr::from_bytes(name));
        let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
        if metadata.file_type().is_char_device() && metadata.rdev() == 0 {
            break;
        }
        let is_dir = metadata.is_dir();
        if is_dir {
            below.push(path.clone());
        }
        let opaque = is_dir && xattr::get(&path, OPAQUE).ok().flatten().is_some();
        // A file hides what is below, and under a directory a file does not show.
        if first.is_none() {
            first = Some(LowerEntry { path, metadata });
        } else if !is_dir {
            break;
        }
        if !is_dir || opaque {
            break;
        }
    }
    first.map(|found| (found, below))
}
