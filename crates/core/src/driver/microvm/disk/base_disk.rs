//! Blank disks: an empty ext4, made once per size, that every disk of that size stands on.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::driver::DriverResult;
use crate::driver::host::failed;
use crate::driver::host::helper::{
    DEFAULT_LIMITS, HelperLimits, HelperTask, Helpers, Input, OUTPUT,
};

/// What makes it an ext4, with a journal and times to the nanosecond, whatever the host's `mke2fs.conf` says.
const FEATURES: &str =
    "has_journal,extent,huge_file,flex_bg,uninit_bg,64bit,dir_nlink,extra_isize,ext_attr";

/// What chance would decide otherwise. Everything that was written stands on a blank disk: one that is made again must be the same.
const ID: &str = "5a4d6b65-6570-4000-8000-000000000001";

/// How many are kept.
const KEPT: usize = 64;
/// Those that were used more recently stay: a hypervisor that is started opens its disks within moments.
const UNUSED: Duration = Duration::from_mins(5);

/// The blank disk of a size; made if it is not there yet.
pub(crate) fn base_disk(helpers: &Helpers, cache: &Path, bytes: u64) -> DriverResult<PathBuf> {
    let directory = cache.join("blank");
    let path = directory.join(format!("{bytes}.raw"));
    if let Ok(there) = File::open(&path) {
        // Marks it as used; the time has no other meaning.
        let _ = there.set_modified(SystemTime::now());
        return Ok(path);
    }
    fs::create_dir_all(&directory).map_err(failed("create", &directory))?;
    remove_unused(&directory);
    // Two that make the same at once make two that are the same; the first takes the place.
    let draft = tempfile::Builder::new()
        .prefix(".blank-")
        .tempfile_in(&directory)
        .map_err(failed("write to", &directory))?;
    draft.as_file().set_len(bytes).map_err(failed("make room for", &path))?;
    format(helpers, draft.path(), bytes)?;
    draft.as_file().sync_all().map_err(failed("sync", &path))?;
    fs::set_permissions(draft.path(), Permissions::from_mode(0o444))
        .map_err(failed("close", &path))?;
    match draft.persist_noclobber(&path) {
        Err(error) if error.error.kind() != std::io::ErrorKind::AlreadyExists => {
            return Err(failed("rename", &path)(error.error));
        }
        _ => {}
    }
    File::open(&directory).and_then(|dir| dir.sync_all()).map_err(failed("sync", &directory))?;
    Ok(path)
}

/// Removes blank disks that were not used lately, if there are many: users choose the size of a
/// sandbox. A disk is made again when it is needed again, and machines that run have theirs open.
fn remove_unused(directory: &Path) {
    let Ok(listed) = fs::read_dir(directory) else { return };
    let used = |entry: fs::DirEntry| {
        let is_blank = entry.path().extension().is_some_and(|extension| extension == "raw");
        let used = entry.metadata().and_then(|about| about.modified()).ok()?;
        is_blank.then(|| (used, entry.path()))
    };
    let mut all: Vec<_> = listed.flatten().filter_map(used).collect();
    all.sort();
    let many = all.len().saturating_sub(KEPT);
    for (used, path) in all.into_iter().take(many) {
        if used.elapsed().is_ok_and(|unused| unused >= UNUSED) {
            let _ = fs::remove_file(path);
        }
    }
}

fn format(helpers: &Helpers, path: &Path, bytes: u64) -> DriverResult<()> {
    let extended =
        format!("lazy_itable_init=1,lazy_journal_init=1,nodiscard,root_owner=0:0,hash_seed={ID}");
    let task = HelperTask {
        program: "mkfs.ext4",
        // The file is all zeros already: tables need not be written, and the guest need not do it later either
        // (it mounts with `noinit_itable`).
        args: &[
            "-q", "-F", "-m", "0", "-I", "256", "-O", FEATURES, "-E", &extended, "-L", "sandkeep",
            "-U", ID, OUTPUT,
        ],
        env: &[("MKE2FS_CONFIG", "/dev/null"), ("E2FSPROGS_FAKE_TIME", "1000000000")],
        input: Input::Nothing,
        output: Some(path),
        limits: HelperLimits { file_size: bytes, ..DEFAULT_LIMITS },
    };
    helpers.run(&task).map(drop)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::time::{Duration, SystemTime};

    use super::{KEPT, base_disk};
    use crate::driver::host::helper::tests::helpers;

    #[test]
    fn one_that_is_made_again_is_the_same() {
        let dir = tempfile::TempDir::with_prefix("keep-blank-").unwrap();
        let Some(helpers) = helpers(dir.path()) else { return };
        let blank = |cache, bytes| base_disk(&helpers, cache, bytes);
        let first = blank(dir.path(), 64 << 20).unwrap();
        let bytes = fs::read(&first).unwrap();
        assert!(bytes.iter().any(|byte| *byte != 0));
        fs::remove_file(&first).unwrap();
        assert!(fs::read(blank(dir.path(), 64 << 20).unwrap()).unwrap() == bytes);
    }
    #[test]
    fn only_so_many_sizes_are_kept() {
        let dir = tempfile::TempDir::with_prefix("keep-blank-").unwrap();
        let Some(helpers) = helpers(dir.path()) else { return };
        let blanks = dir.path().join("blank");
        fs::create_dir(&blanks).unwrap();
        for number in 0..KEPT as u64 + 20 {
            let file = File::create(blanks.join(format!("{number}.raw"))).unwrap();
            // The first five are in use.
            let ago = if number < 5 { 0 } else { 10_000 - number };
            file.set_modified(SystemTime::now() - Duration::from_secs(ago)).unwrap();
        }
        base_disk(&helpers, dir.path(), 64 << 20).unwrap();
        let left = fs::read_dir(&blanks).unwrap().count();
        assert_eq!(left, KEPT + 1);
        assert!((0..5).all(|number| blanks.join(format!("{number}.raw")).exists()));
        assert!(!blanks.join("5.raw").exists(), "the one that was not used for longest");
        assert!(blanks.join(format!("{}.raw", KEPT + 19)).exists());
    }
}
