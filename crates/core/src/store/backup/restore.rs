//! Makes a data directory out of a backup.

use std::fs::{self, File};
use std::io::{self, BufReader};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Component, Path, PathBuf};

use serde::Serialize;

use super::archive::unpack;
use super::manifest::{BackupSummary, read};
use super::open::open_below;
use super::verify::parts;
use super::{BackupError, BackupProgress, Result, archive_path, io_error, object_path};
use crate::store::{PARTS, StoreError};

/// What was restored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RestoredBackup {
    /// The backup.
    pub backup: BackupSummary,
    /// The data directory.
    pub data: PathBuf,
}

/// Restores a backup, the newest if none is named, into `data`, which must be empty or absent.
///
/// Everything is compared with the manifest first. Until it is complete, it is in a directory
/// beside `data`.
///
/// # Errors
///
/// [`BackupError::Damaged`] when part of it is missing or was changed, [`BackupError::NotEmpty`] when `data` is not empty.
/// Nothing was restored then.
pub fn restore_backup(
    root: &Path,
    id: Option<&str>,
    data: &Path,
    mut progress: impl FnMut(BackupProgress),
) -> Result<RestoredBackup> {
    let manifest = read(root, id)?;
    if fs::read_dir(data).is_ok_and(|mut listed| listed.next().is_some()) {
        return Err(BackupError::NotEmpty { path: data.to_owned() });
    }
    if let Some(problem) = parts(root, &manifest).iter().find_map(|part| part.problem(root)) {
        return Err(BackupError::Damaged { problem });
    }
    let name = data.file_name().and_then(|name| name.to_str()).unwrap_or("data");
    let fresh = data.with_file_name(format!(".{name}.restoring"));
    match fs::remove_dir_all(&fresh) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(io_error("remove", &fresh)(error));
        }
        _ => {}
    }
    for part in [""].into_iter().chain(PARTS) {
        let path = fresh.join(part);
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true).mode(0o700).create(&path).map_err(io_error("create", &path))?;
    }
    // Before the archives: as long as there are only files and directories, no path leads through a link.
    for file in &manifest.files {
        let place = fresh.join(inside(&file.path)?);
        if let Some(dir) = place.parent() {
            let mut builder = fs::DirBuilder::new();
            builder.recursive(true).mode(0o700).create(dir).map_err(io_error("create", dir))?;
        }
        let path = object_path(root, &file.sha256);
        let mut from = open_below(root, &path).map_err(io_error("open", &path))?;
        let mut options = File::options();
        let into = options.write(true).create_new(true).mode(file.mode & 0o7777).open(&place);
        let mut into = into.map_err(io_error("create", &place))?;
        io::copy(&mut from, &mut into).map_err(io_error("write", &place))?;
    }
    let archives = [("layers", &manifest.layers), ("memory", &manifest.memory)];
    let all = manifest.layers.len() + manifest.memory.len();
    let mut done = 0;
    for (kind, archives) in archives {
        for archive in archives {
            progress(BackupProgress { done, all });
            done += 1;
            let place = fresh.join(kind).join(name_of(&archive.id)?);
            let path = archive_path(root, kind, &archive.id);
            let file = open_below(root, &path).map_err(io_error("open", &path))?;
            let packed = zstd::Decoder::new(file).map_err(io_error("read", &path))?;
            unpack(&mut BufReader::with_capacity(256 << 10, packed), &place)?;
        }
    }
    let top = File::open(&fresh).map_err(io_error("open", &fresh))?;
    rustix::fs::syncfs(&top).map_err(|error| io_error("sync", &fresh)(error.into()))?;
    // An empty directory in its place is replaced.
    fs::rename(&fresh, data).map_err(io_error("rename", &fresh))?;
    if let Some(parent) = data.parent().and_then(|parent| File::open(parent).ok()) {
        parent.sync_all().map_err(io_error("sync", data))?;
    }
    Ok(RestoredBackup { backup: manifest.summary(0), data: data.to_owned() })
}

/// A path that stays below the directory it is appended to.
fn inside(path: &str) -> Result<&Path> {
    let found = Path::new(path);
    let plain = found.components().all(|part| matches!(part, Component::Normal(_)));
    if plain && !path.is_empty() {
        return Ok(found);
    }
    let reason = "it leads out of the data directory".to_owned();
    Err(StoreError::Damaged { path: found.to_owned(), reason }.into())
}

/// The name of a directory right where it is put.
fn name_of(id: &str) -> Result<&Path> {
    let found = inside(id)?;
    if found.components().count() == 1 && !id.contains('/') {
        return Ok(found);
    }
    let reason = "it is the name of no layer".to_owned();
    Err(StoreError::Damaged { path: found.to_owned(), reason }.into())
}

#[cfg(test)]
mod tests {
    use super::{inside, name_of};

    #[test]
    fn names_stay_where_they_are_put() {
        for bad in ["", "/etc", "..", "a/../b", "a/..", "./a"] {
            assert!(inside(bad).is_err(), "{bad}");
            assert!(name_of(bad).is_err(), "{bad}");
        }
        assert!(inside("sandboxes/a/sandbox.json").is_ok());
        // Through a link in a layer that was restored before, this would lead anywhere.
        for bad in ["lay-1/diff/link", "lay-1/"] {
            assert!(name_of(bad).is_err(), "{bad}");
        }
        assert!(name_of("lay-1").is_ok());
    }
}
