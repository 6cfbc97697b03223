//! Removes old backups, and what only they used.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::collect::lock;
use super::manifest::{backups, read};
use super::{Result, archive_path, io_error, object_path};

/// What was removed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PrunedBackups {
    /// The backups that were removed, the oldest first.
    pub removed: Vec<String>,
    /// How many backups there are now.
    pub kept: usize,
    /// The bytes that were freed.
    pub freed: u64,
}

/// Removes all but the newest `keep` backups of a directory, then every file that no other backup names.
///
/// The manifests go first: whatever ends this early leaves files that nothing names, which the next one removes.
///
/// # Errors
///
/// [`BackupError`](super::BackupError) when there are none, when another backup is being written, or when the manifest of
/// a backup that stays is damaged: what it needs is not known then, and nothing is removed.
pub fn prune_backups(root: &Path, keep: usize) -> Result<PrunedBackups> {
    let mut ids = backups(root)?;
    let _lock = lock(root)?;
    let kept = ids.split_off(ids.len().saturating_sub(keep));
    let mut needed: BTreeSet<PathBuf> = BTreeSet::new();
    for id in &kept {
        let manifest = read(root, Some(id))?;
        needed.extend(manifest.files.iter().map(|file| object_path(root, &file.sha256)));
        for (kind, archives) in [("layers", &manifest.layers), ("memory", &manifest.memory)] {
            for archive in archives {
                let path = archive_path(root, kind, &archive.id);
                needed.insert(path.with_extension("json"));
                needed.insert(path);
            }
        }
    }
    let mut freed = 0;
    let manifests = root.join("backups");
    for id in &ids {
        freed += remove(&manifests.join(format!("{id}.json")))?;
    }
    let dir = File::open(&manifests).map_err(io_error("open", &manifests))?;
    dir.sync_all().map_err(io_error("sync", &manifests))?;
    for part in ["objects", "layers", "memory"] {
        freed += sweep(&root.join(part), &needed)?;
    }
    Ok(PrunedBackups { removed: ids, kept: kept.len(), freed })
}

/// Removes all files below a directory that are not needed, and answers with how much they took.
fn sweep(dir: &Path, needed: &BTreeSet<PathBuf>) -> Result<u64> {
    let listed = match fs::read_dir(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(0),
        listed => listed.map_err(io_error("list", dir))?,
    };
    let mut freed = 0;
    for entry in listed {
        let entry = entry.map_err(io_error("list", dir))?;
        let path = entry.path();
        let kind = entry.file_type().map_err(io_error("read", &path))?;
        if kind.is_dir() {
            freed += sweep(&path, needed)?;
        } else if !needed.contains(&path) {
            freed += remove(&path)?;
        }
    }
    Ok(freed)
}

fn remove(path: &Path) -> Result<u64> {
    let bytes = fs::symlink_metadata(path).map_or(0, |found| found.len());
    fs::remove_file(path).map_err(io_error("remove", path))?;
    Ok(bytes)
}
