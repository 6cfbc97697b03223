//! Reads everything that a backup names, and compares it with what the manifest says.

use std::fmt;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::manifest::{BackupManifest, read};
use super::open::{is_archive_id, is_digest, open_below};
use super::{BackupProgress, Result, archive_path, object_path};

/// What is wrong with a backup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BackupProblem {
    /// The file of the backup.
    pub path: PathBuf,
    /// What it was made of.
    pub of: String,
    /// What is wrong.
    pub problem: String,
}

impl fmt::Display for BackupProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` ({}) {}", self.path.display(), self.of, self.problem)
    }
}

/// What came out of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Verified {
    /// The backup.
    pub id: String,
    /// How many files were read.
    pub files: usize,
    /// How many bytes.
    pub bytes: u64,
    /// What is wrong.
    pub problems: Vec<BackupProblem>,
}

/// Compares a backup, the newest if none is named, with its manifest, byte for byte.
///
/// # Errors
///
/// [`BackupError`](super::BackupError) when there is none, or its manifest is damaged.
pub fn verify_backup(
    root: &Path,
    id: Option<&str>,
    mut progress: impl FnMut(BackupProgress),
) -> Result<Verified> {
    let manifest = read(root, id)?;
    let parts = parts(root, &manifest);
    let (all, mut bytes, mut problems) = (parts.len(), 0, Vec::new());
    for (done, part) in parts.iter().enumerate() {
        progress(BackupProgress { done, all });
        bytes += part.bytes;
        problems.extend(part.problem(root));
    }
    Ok(Verified { id: manifest.id, files: all, bytes, problems })
}

/// A file of a backup.
pub(super) struct BackupPart {
    pub(super) path: PathBuf,
    of: String,
    bytes: u64,
    sha256: String,
    /// Whether its names in the manifest are such as a backup writes.
    is_named_well: bool,
}

/// Everything that a backup consists of.
pub(super) fn parts(root: &Path, manifest: &BackupManifest) -> Vec<BackupPart> {
    let archives = [("layers", &manifest.layers), ("memory", &manifest.memory)];
    let archives =
        archives.into_iter().flat_map(|(kind, all)| all.iter().map(move |one| (kind, one)));
    let mut parts: Vec<BackupPart> = archives
        .map(|(kind, one)| BackupPart {
            path: archive_path(root, kind, &one.id),
            of: one.id.clone(),
            bytes: one.bytes,
            sha256: one.sha256.clone(),
            is_named_well: is_archive_id(&one.id),
        })
        .collect();
    parts.extend(manifest.files.iter().map(|file| BackupPart {
        path: object_path(root, &file.sha256),
        of: file.path.clone(),
        bytes: file.bytes,
        sha256: file.sha256.clone(),
        is_named_well: is_digest(&file.sha256),
    }));
    parts
}

impl BackupPart {
    /// What is wrong with it.
    pub(super) fn problem(&self, root: &Path) -> Option<BackupProblem> {
        let problem = match hash(root, &self.path) {
            _ if !self.is_named_well => {
                "has a name that no backup gives: the manifest is damaged".to_owned()
            }
            Ok((_, bytes)) if bytes != self.bytes => {
                format!("has {bytes} bytes instead of {}", self.bytes)
            }
            Ok((sha256, _)) if sha256 != self.sha256 => "was changed".to_owned(),
            Ok(_) => return None,
            Err(error) if error.kind() == io::ErrorKind::NotFound => "is missing".to_owned(),
            Err(error) => format!("cannot be read: {error}"),
        };
        Some(BackupProblem { path: self.path.clone(), of: self.of.clone(), problem })
    }
}

/// The SHA-256 of a file and its length.
fn hash(root: &Path, path: &Path) -> io::Result<(String, u64)> {
    let mut file = open_below(root, path)?;
    let (mut hash, mut bytes, mut piece) = (Sha256::new(), 0, vec![0; 256 << 10]);
    loop {
        match file.read(&mut piece)? {
            0 => return Ok((hex::encode(hash.finalize()), bytes)),
            got => {
                hash.update(&piece[..got]);
                bytes += got as u64;
            }
        }
    }
}
