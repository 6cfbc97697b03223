//! The manifest of a backup: the list of its files.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{BackupError, Result, io_error};
use crate::model::Timestamp;
use crate::store::manifest::document::parse;

/// What a backup consists of. Written last: without it there is no backup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackupManifest {
    /// As in all documents.
    pub format: u32,
    /// Its id, which sorts by time.
    pub id: String,
    /// When it was begun.
    pub created_at: Timestamp,
    /// Which data directory it is of.
    pub identity: String,
    /// The version that made it.
    pub version: String,
    /// How many sandboxes are in it.
    pub sandboxes: u64,
    /// How many snapshots are in it.
    pub snapshots: u64,
    /// The key that secrets are sealed with.
    pub secrets_key: BackupKey,
    /// Files of the data directory.
    pub files: Vec<BackupFile>,
    /// Layers.
    pub layers: Vec<BackupArchive>,
    /// Memory layers.
    pub memory: Vec<BackupArchive>,
    /// What some document names and the data directory did not have, or what could not be read.
    pub missing: Vec<String>,
}

/// The key that secrets are sealed with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackupKey {
    /// Whether the keys of the data directory are part of the backup.
    pub included: bool,
    /// The beginning of the SHA-256 of the key of the data directory, to recognize it; absent if the operator supplies the
    /// key in another way, or there are no secrets.
    pub fingerprint: Option<String>,
}

/// A file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackupFile {
    /// Its path in the data directory.
    pub path: String,
    /// Its content, which is its name among the objects.
    pub sha256: String,
    /// Its length.
    pub bytes: u64,
    /// Its mode.
    pub mode: u32,
}

/// The archive of a layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackupArchive {
    /// As in all documents; that of the note beside the archive counts.
    pub format: u32,
    /// The layer.
    pub id: String,
    /// The SHA-256 of the archive, compressed as it is.
    pub sha256: String,
    /// Its length.
    pub bytes: u64,
}

/// What a backup is, in short.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BackupSummary {
    /// Its id.
    pub id: String,
    /// When it was begun.
    pub created_at: Timestamp,
    /// How many sandboxes are in it.
    pub sandboxes: u64,
    /// How many snapshots are in it.
    pub snapshots: u64,
    /// The bytes that it consists of, shared ones included.
    pub bytes: u64,
    /// The bytes that were written for it.
    pub written: u64,
    /// The key that its secrets are sealed with, if it needs one.
    pub secrets_key: BackupKey,
    /// What was missing when it was made.
    pub missing: Vec<String>,
}

impl BackupManifest {
    pub(super) fn summary(&self, written: u64) -> BackupSummary {
        let archives = self.layers.iter().chain(&self.memory).map(|one| one.bytes);
        let bytes = archives.chain(self.files.iter().map(|file| file.bytes)).sum();
        BackupSummary {
            id: self.id.clone(),
            created_at: self.created_at,
            sandboxes: self.sandboxes,
            snapshots: self.snapshots,
            bytes,
            written,
            secrets_key: self.secrets_key.clone(),
            missing: self.missing.clone(),
        }
    }
}

/// The ids of the backups in a directory, the oldest first.
///
/// # Errors
///
/// [`BackupError::Store`] when the directory cannot be read, [`BackupError::NoBackup`] when it has no backups.
pub fn backups(root: &Path) -> Result<Vec<String>> {
    let path = root.join("backups");
    let none = || BackupError::NoBackup { path: root.to_owned(), id: None };
    let listed = match fs::read_dir(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Err(none()),
        listed => listed.map_err(io_error("list", &path))?,
    };
    let id =
        |entry: fs::DirEntry| Some(entry.file_name().to_str()?.strip_suffix(".json")?.to_owned());
    let mut ids: Vec<String> = listed.flatten().filter_map(id).collect();
    ids.retain(|id| !id.starts_with('.'));
    ids.sort();
    if ids.is_empty() { Err(none()) } else { Ok(ids) }
}

/// What a backup is, in short.
///
/// # Errors
///
/// [`BackupError`] when there is none of that id, or its manifest is damaged.
pub fn backup_summary(root: &Path, id: &str) -> Result<BackupSummary> {
    Ok(read(root, Some(id))?.summary(0))
}

/// The manifest of a backup: the newest, if none is named.
pub(super) fn read(root: &Path, id: Option<&str>) -> Result<BackupManifest> {
    let all = backups(root)?;
    let id = match id {
        Some(id) => all.into_iter().find(|known| known == id).ok_or_else(|| {
            BackupError::NoBackup { path: root.to_owned(), id: Some(id.to_owned()) }
        })?,
        None => all.into_iter().next_back().unwrap_or_default(),
    };
    let path = root.join("backups").join(format!("{id}.json"));
    let bytes = fs::read(&path).map_err(io_error("read", &path))?;
    Ok(parse(&path, &bytes)?)
}
