//! The disk of a machine: a blank one, what an image's captures wrote, what this session writes.
//!
//! A session's disks are `<n>.qcow2` in its `disk_dir`, the highest on top. A capture links the topmost into a memory layer; from
//! then on it has two names and is never written again. So whether the topmost may be written to is told by its links.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::blank::blank;
use super::qcow2;
use super::qemu::Chain;
use crate::driver::DriverResult;
use crate::driver::confined::Confined;
use crate::driver::host::{broken, failed};

/// The disk of a memory layer.
pub(super) const OF_LAYER: &str = "disk.qcow2";

/// A chain, and what was made for it now: to be removed if the machine does not start.
#[derive(Debug)]
pub(super) struct Disk {
    pub(super) chain: Chain,
    pub(super) made: Vec<PathBuf>,
}

/// Where a chain comes from.
#[derive(Debug, Clone, Copy)]
pub(super) struct Source<'a> {
    pub(super) cache: &'a Path,
    /// Makes blank disks.
    pub(super) confined: &'a Confined,
    /// The session's disks.
    pub(super) directory: &'a Path,
    /// Memory layers, the topmost first.
    pub(super) image: &'a [PathBuf],
    /// How large a disk is that stands on nothing yet.
    pub(super) size: u64,
    /// Whether memory goes with it: then nothing may have been written since the image was captured.
    pub(super) as_captured: bool,
    /// What names of its nodes begin with.
    pub(super) name: &'a str,
}

/// Puts a disk together, with something on top that can be written to.
pub(super) fn assemble(source: &Source<'_>) -> DriverResult<Disk> {
    let Source { cache, confined, directory, image, size, as_captured, name } = *source;
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .map_err(failed("create", directory))?;
    let mut written = Vec::new();
    let mut inodes = Vec::new();
    for (number, layer) in image.iter().rev().enumerate() {
        let path = layer.join(OF_LAYER);
        inodes.push(inode(&path).map_err(failed("open the disk", &path))?);
        written.push((format!("{name}-image-{number}"), path));
    }
    let mut session = session(directory).map_err(failed("list", directory))?;
    // The host lost power before anything was flushed to it: nothing that anybody was told of is on it.
    if let Some((_, path)) = session.last()
        && fs::metadata(path).is_ok_and(|about| about.nlink() == 1)
        && qcow2::is_lost(path).map_err(failed("read the disk", path))?
    {
        fs::remove_file(path).map_err(failed("remove", path))?;
        session.pop();
    }
    let next = session.last().map_or(0, |(number, _)| number + 1);
    for (number, path) in session {
        let there = inode(&path).map_err(failed("open the disk", &path))?;
        // Those that the image has as well were captured in this session.
        if inodes.contains(&there) {
            continue;
        }
        if as_captured && !qcow2::is_empty(&path).map_err(failed("read the disk", &path))? {
            let what = format!("`{}` was written after the image was captured", path.display());
            return Err(broken("restore the machine", &what));
        }
        written.push((node(name, number), path));
    }
    let blank_size = match written.first() {
        Some((_, path)) => qcow2::size(path).map_err(failed("read the disk", path))?,
        None => size,
    };
    let mut made = Vec::new();
    let can_write = written.len() > inodes.len()
        && written.last().is_some_and(|(_, top)| fs::metadata(top).is_ok_and(|at| at.nlink() == 1));
    if !can_write {
        let below = match written.last() {
            Some((_, path)) => qcow2::size(path).map_err(failed("read the disk", path))?,
            None => 0,
        };
        let path = directory.join(file(next));
        qcow2::create(&path, size.max(below)).map_err(failed("create", &path))?;
        made.push(path.clone());
        written.push((node(name, next), path));
    }
    let blank = blank(confined, cache, blank_size)?;
    Ok(Disk { chain: Chain { blank, written }, made })
}

/// The session's disks, the lowest first.
pub(super) fn session(directory: &Path) -> io::Result<Vec<(u32, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let number =
            path.file_name().and_then(|name| name.to_str()?.strip_suffix(".qcow2")?.parse().ok());
        found.extend(number.map(|number: u32| (number, path)));
    }
    found.sort();
    Ok(found)
}

/// The file of a session's disk.
pub(super) fn file(number: u32) -> String {
    format!("{number}.qcow2")
}

/// The name that the hypervisor knows it by.
pub(super) fn node(name: &str, number: u32) -> String {
    format!("{name}-{number}")
}

/// What a file is, whatever its name.
pub(super) fn inode(path: &Path) -> io::Result<(u64, u64)> {
    fs::metadata(path).map(|about| (about.dev(), about.ino()))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use super::{Confined, Source, assemble, inode, session};
    use crate::driver::confined::tests::confined;
    use crate::driver::microvm::qcow2;

    const SIZE: u64 = 64 << 20;

    /// A directory with helpers.
    struct Place {
        dir: tempfile::TempDir,
        confined: Confined,
    }

    fn place() -> Option<Place> {
        let dir = tempfile::TempDir::with_prefix("keep-disks-").unwrap();
        let confined = confined(dir.path())?;
        Some(Place { dir, confined })
    }

    fn source<'a>(place: &'a Place, session: &'a Path, image: &'a [PathBuf]) -> Source<'a> {
        Source {
            cache: place.dir.path(),
            confined: &place.confined,
            directory: session,
            image,
            size: SIZE,
            as_captured: false,
            name: "d",
        }
    }

    fn names(source: &Source<'_>) -> Vec<String> {
        let disk = assemble(source).unwrap();
        disk.chain.written.into_iter().map(|(node, _)| node).collect()
    }

    fn write(disk: &Path) {
        // An entry of its first table: no disk that a guest could read, but not an empty one.
        use std::os::unix::fs::FileExt;
        let file = fs::OpenOptions::new().write(true).open(disk).unwrap();
        file.write_all_at(&[0x80, 0, 0, 0, 0, 4, 0, 0], 3 << 16).unwrap();
    }

    #[test]
    fn what_was_captured_is_never_written_again() {
        let Some(place) = place() else { return };
        let dir = place.dir.path();
        let (ours, layer) = (dir.join("session"), dir.join("layer"));
        assert_eq!(names(&source(&place, &ours, &[])), ["d-0"]);
        assert_eq!(
            names(&source(&place, &ours, &[])),
            ["d-0"],
            "one that nobody has is used again"
        );
        // A capture.
        fs::create_dir(&layer).unwrap();
        fs::hard_link(ours.join("0.qcow2"), layer.join("disk.qcow2")).unwrap();
        let image = [layer];
        assert_eq!(names(&source(&place, &ours, &image)), ["d-image-0", "d-1"], "not twice");
        write(&ours.join("1.qcow2"));
        assert_eq!(names(&source(&place, &ours, &[])), ["d-0", "d-1"], "a session that broke off");
        let restored = Source { as_captured: true, ..source(&place, &ours, &image) };
        let refused = assemble(&restored).unwrap_err().to_string();
        assert!(refused.contains("after the image was captured"), "{refused}");
        // Another machine from the same image.
        let theirs = dir.join("fork");
        let forked = Source { as_captured: true, ..source(&place, &theirs, &image) };
        assert_eq!(names(&forked), ["d-image-0", "d-0"]);
        assert_eq!(session(&theirs).unwrap().len(), 1);
        assert_ne!(inode(&theirs.join("0.qcow2")).unwrap(), inode(&ours.join("0.qcow2")).unwrap());
    }

    #[test]
    fn a_disk_that_never_came_to_stable_storage_is_made_again() {
        let Some(place) = place() else { return };
        let dir = place.dir.path();
        let ours = dir.join("session");
        assert_eq!(names(&source(&place, &ours, &[])), ["d-0"]);
        let disk = ours.join("0.qcow2");
        let length = fs::metadata(&disk).unwrap().len();
        fs::write(&disk, []).unwrap();
        fs::OpenOptions::new().write(true).open(&disk).unwrap().set_len(length).unwrap();
        assert_eq!(names(&source(&place, &ours, &[])), ["d-0"]);
        assert_eq!(qcow2::size(&disk).unwrap(), SIZE);
    }

    #[test]
    fn a_disk_never_shrinks_under_its_filesystem() {
        let Some(place) = place() else { return };
        let dir = place.dir.path();
        let layer = dir.join("layer");
        fs::create_dir(&layer).unwrap();
        qcow2::create(&layer.join("disk.qcow2"), SIZE).unwrap();
        let image = [layer];
        for (asked, given) in [(SIZE / 2, SIZE), (SIZE * 2, SIZE * 2)] {
            let ours = dir.join(asked.to_string());
            let source = Source { size: asked, ..source(&place, &ours, &image) };
            let disk = assemble(&source).unwrap();
            assert!(disk.chain.blank.ends_with(format!("{SIZE}.raw")), "{:?}", disk.chain.blank);
            assert_eq!(qcow2::size(&ours.join("0.qcow2")).unwrap(), given);
        }
    }
}
