//! Overwrites secret values in files in place.
//!
//! Every character of a value becomes `*`, so nothing in a file moves. In an archive that would break
//! more than it mends: archives are left, and the search that follows finds them again. Doing it twice
//! changes nothing, so a daemon that dies in the middle begins again.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::FileType;
use rustix::io::Errno;

use super::scan::NeedleScan;
use super::{Match, MatchKind, Needles, scan_file};
use crate::failpoint;
use crate::model::{LayerId, Place};
use crate::store::tree::{Dir, TreeDir, file_type, stat_of, times};
use crate::store::walk::vanished;
use crate::store::{Result, Store, StoreError, blocking};

impl Store {
    /// Masks what was found in an open layer that nothing writes to, and that stands on `chain`.
    /// What cannot be masked is left as it is.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`]; what was done stays done.
    pub async fn mask(
        &self,
        open: &LayerId,
        chain: &[LayerId],
        needles: &Arc<Needles>,
        finds: &[Match],
    ) -> Result<()> {
        let (store, open, chain) = (self.clone(), open.clone(), chain.to_vec());
        let (needles, finds) = (Arc::clone(needles), finds.to_vec());
        blocking(move || store.mask_now(&open, &chain, &needles, &finds)).await
    }

    fn mask_now(
        &self,
        open: &LayerId,
        chain: &[LayerId],
        needles: &Needles,
        finds: &[Match],
    ) -> Result<()> {
        let root = TreeDir::root(&self.diff_dir(open))?;
        let mut files: BTreeMap<&[u8], Vec<Place>> = BTreeMap::new();
        for find in finds {
            if let MatchKind::Secret { place, maskable: true, .. } = &find.what {
                files.entry(&find.path).or_default().push(*place);
            }
        }
        // Backwards: what is in a directory before the directory, whose name may change.
        for (path, places) in files.iter().rev() {
            let Some((dir, name)) = parent(&root, path)? else { continue };
            for place in [Place::Contents, Place::Link, Place::Attribute, Place::Name] {
                if places.contains(&place) {
                    mask_one(&dir, &name, place, needles)?;
                }
            }
            let renamed = dir.stat(&name).is_err();
            if renamed && self.lies_below(chain, path)? {
                dir.make_whiteout(&name)?;
            }
            failpoint::pass("guard.masked");
        }
        Ok(())
    }

    /// Whether some layer of `chain` has something at `path`.
    pub(in crate::store) fn lies_below(&self, chain: &[LayerId], path: &[u8]) -> Result<bool> {
        for layer in chain {
            let root = TreeDir::root(&self.diff_dir(layer))?;
            match parent(&root, path) {
                Ok(Some((dir, name))) if dir.stat(&name).is_ok() => return Ok(true),
                Ok(_) => {}
                Err(error) if vanished(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }
}

/// The directory a path is in, and its name there; `None` for the root.
pub(in crate::store) fn parent(root: &TreeDir, path: &[u8]) -> Result<Option<(Dir, CString)>> {
    let (above, name) = match path.iter().rposition(|byte| *byte == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (&path[..0], path),
    };
    let Ok(name) = CString::new(name) else { return Ok(None) };
    if name.is_empty() {
        return Ok(None);
    }
    let place = if above.is_empty() { root.clone() } else { root.descend(above)? };
    Ok(Some((place.open()?, name)))
}

fn mask_one(dir: &Dir, name: &CStr, place: Place, needles: &Needles) -> Result<()> {
    match place {
        Place::Contents => {
            if file_type(&dir.stat(name)?) != FileType::RegularFile {
                return Ok(());
            }
            let file = dir.open_to_change(name)?;
            mask_contents(&file, needles).map_err(|error| dir.failure("mask", name, error))
        }
        Place::Link => {
            let target = dir.link_target(name)?;
            dir.relink(name, &needles.mask(target.as_bytes()))
        }
        Place::Attribute => {
            for (key, value) in dir.xattrs(name)? {
                if needles.mask(key.as_bytes()) != key.as_bytes() {
                    dir.set_xattr(name, &key, None)?;
                } else if needles.mask(&value) != value {
                    dir.set_xattr(name, &key, Some(&needles.mask(&value)))?;
                }
            }
            Ok(())
        }
        Place::Name => mask_name(dir, name, needles),
        Place::Member => Ok(()),
    }
}

fn mask_name(dir: &Dir, name: &CStr, needles: &Needles) -> Result<()> {
    let path = dir.path_of(name);
    let last = path.len() - name.to_bytes().len();
    let Ok(new) = CString::new(&needles.mask(&path)[last..]) else { return Ok(()) };
    if new.as_c_str() == name {
        return Ok(());
    }
    match dir.move_to(name, dir, &new) {
        // Something has that name already: this one is found again, and refused.
        Err(StoreError::Io { source, .. }) if source.kind() == io::ErrorKind::AlreadyExists => {
            Ok(())
        }
        moved => moved,
    }
}

/// Overwrites all values in a file, and leaves its times as they were.
fn mask_contents(file: &OwnedFd, needles: &Needles) -> Result<(), Errno> {
    let stat = stat_of(file)?;
    let mut runs: Vec<Range<u64>> = Vec::new();
    let mut scan = NeedleScan::new(needles);
    scan_file(file, &stat, &mut scan, &mut |found| {
        runs.extend(found.runs());
        false
    })
    .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    let stars = [b'*'; 4096];
    for run in runs {
        let mut at = run.start;
        while at < run.end {
            let length = usize::try_from(run.end - at).unwrap_or(usize::MAX).min(stars.len());
            at += rustix::io::pwrite(file, &stars[..length], at)? as u64;
        }
    }
    rustix::fs::futimens(file, &times(&stat))
}
