//! The disks of a machine: decides which files QEMU opens for a block device, and which of them it may write.
//!
//! A writable disk is a chain: a *base disk* (`base_disk.rs`, an empty ext4), the qcow2 files of the memory layers that the machine is
//! restored from, and the session's own qcow2 files on top. The layers of the root filesystem are read-only erofs images
//! (`packed_layers.rs`).
//!
//! A session's files are `<n>.qcow2` in its `disk_dir`; the highest number is the topmost. A capture hard-links the topmost file into a
//! memory layer. From then on it has two links and is never written again, so the link count shows
//! whether the topmost file is writable.

pub(super) mod base_disk;
pub(super) mod merge;
pub(super) mod packed_layers;
pub(super) mod qcow2;

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use self::base_disk::base_disk;
use super::qemu::Chain;
use crate::driver::DriverResult;
use crate::driver::host::helper::Helpers;
use crate::driver::host::{broken, failed};

/// The disk of a memory layer.
pub(crate) const LAYER_DISK: &str = "disk.qcow2";

/// A chain, and what was made for it now: to be removed if the machine does not start.
#[derive(Debug)]
pub(crate) struct Disk {
    pub(crate) chain: Chain,
    pub(crate) made: Vec<PathBuf>,
}

/// Where a chain comes from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DiskSpec<'a> {
    pub(crate) cache: &'a Path,
    /// Makes blank disks.
    pub(crate) helpers: &'a Helpers,
    /// The session's disks.
    pub(crate) directory: &'a Path,
    /// Memory layers, the topmost first.
    pub(crate) image: &'a [PathBuf],
    /// How large a disk is that stands on nothing yet.
    pub(crate) size: u64,
    /// Whether memory goes with it: then nothing may have been written since the image was captured.
    pub(crate) as_captured: bool,
    /// What names of its nodes begin with.
    pub(crate) name: &'a str,
}

/// Puts a disk together, with something on top that can be written to.
pub(crate) fn assemble(source: &DiskSpec<'_>) -> DriverResult<Disk> {
    let DiskSpec { cache, helpers, directory, image, size, as_captured, name } = *source;
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .map_err(failed("create", directory))?;
    let mut written = Vec::new();
    let mut inodes = Vec::new();
    for (number, layer) in image.iter().rev().enumerate() {
        let path = layer.join(LAYER_DISK);
        inodes.push(inode(&path).map_err(failed("open the disk", &path))?);
        written.push((format!("{name}-image-{number}"), path));
    }
    let mut session = session(directory).map_err(failed("list", directory))?;
    // The host lost power before anything was flushed to it: nothing on it was ever reported as
    // written.
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
    let blank = base_disk(helpers, cache, blank_size)?;
    Ok(Disk { chain: Chain { blank, written }, made })
}

/// The session's disks, the lowest first.
pub(crate) fn session(directory: &Path) -> io::Result<Vec<(u32, PathBuf)>> {
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
pub(crate) fn file(number: u32) -> String {
    format!("{number}.qcow2")
}

/// The name that the hypervisor knows it by.
pub(crate) fn node(name: &str, number: u32) -> String {
    format!("{name}-{number}")
}

/// What a file is, whatever its name.
pub(crate) fn inode(path: &Path) -> io::Result<(u64, u64)> {
    fs::metadata(path).map(|about| (about.dev(), about.ino()))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use super::{DiskSpec, Helpers, assemble, inode, session};
    use crate::driver::host::helper::tests::helpers;
    use crate::driver::microvm::disk::qcow2;

    const SIZE: u64 = 64 << 20;

    /// A directory with helpers.
    struct TestDisks {
        dir: tempfile::TempDir,
        helpers: Helpers,
    }

    fn place() -> Option<TestDisks> {
        let dir = tempfile::TempDir::with_prefix("keep-disks-").unwrap();
        let helpers = helpers(dir.path())?;
        Some(TestDisks { dir, helpers })
    }

    fn source<'a>(place: &'a TestDisks, session: &'a Path, image: &'a [PathBuf]) -> DiskSpec<'a> {
        DiskSpec {
            cache: place.dir.path(),
            helpers: &place.helpers,
            directory: session,
            image,
            size: SIZE,
            as_captured: false,
            name: "d",
        }
    }

    fn names(source: &DiskSpec<'_>) -> Vec<String> {
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
        let restored = DiskSpec { as_captured: true, ..source(&place, &ours, &image) };
        let refused = assemble(&restored).unwrap_err().to_string();
        assert!(refused.contains("after the image was captured"), "{refused}");
        // Another machine from the same image.
        let theirs = dir.join("fork");
        let forked = DiskSpec { as_captured: true, ..source(&place, &theirs, &image) };
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
            let source = DiskSpec { size: asked, ..source(&place, &ours, &image) };
            let disk = assemble(&source).unwrap();
            assert!(disk.chain.blank.ends_with(format!("{SIZE}.raw")), "{:?}", disk.chain.blank);
            assert_eq!(qcow2::size(&ours.join("0.qcow2")).unwrap(), given);
        }
    }
}
