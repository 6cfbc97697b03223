//! Knowing later that a layer still is what was sealed.
//!
//! Sealing must be quick, so a layer's content is hashed afterwards, in the background, by
//! [`Store::fingerprint`], which writes `digest.json`: a hash for every name, over what it is, its
//! mode, owner, time, attributes, content, and which other names are the same file. Change time,
//! access time and the number of links are left out: compaction moves them.

use std::collections::{BTreeMap, HashMap};
use std::ffi::CStr;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use rustix::fs::{FileType, Statx};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::manifest::{self, Durability};
use super::text::path_text;
use super::tree::{Dir, Place, Xattrs, file_type};
use super::walk::{lock, visit};
use super::{Result, Store, blocking, io_error};
use crate::model::{FORMAT, LayerId};

/// What came of a check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It is what was sealed.
    Intact,
    /// It is not.
    Damaged(Vec<Difference>),
    /// There is no `digest.json` to compare with yet.
    Unknown,
}

/// One name that is not as it was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "difference", content = "path")]
pub enum Difference {
    /// It is gone.
    Missing(String),
    /// It was not there.
    Extra(String),
    /// It is another, or has other attributes or another content.
    Changed(String),
    /// Something about a memory layer, as a sentence.
    Told(String),
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Missing(path) => write!(f, "`{path}` is gone"),
            Self::Extra(path) => write!(f, "`{path}` was not there"),
            Self::Changed(path) => write!(f, "`{path}` is not what was sealed"),
            Self::Told(what) => f.write_str(what),
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct DigestFile {
    format: u32,
    /// Over all entries.
    digest: String,
    /// Hashes by path; the root's path is empty.
    entries: BTreeMap<String, String>,
}

impl Store {
    /// Hashes a sealed layer and keeps the result beside it. One that was hashed before keeps its
    /// first hash. Returns the digest over the whole.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError`](super::StoreError) when the layer is not sealed or cannot be read.
    pub async fn fingerprint(&self, layer: &LayerId) -> Result<String> {
        let (store, id) = (self.clone(), layer.clone());
        blocking(move || {
            store.sealed(&id)?;
            if let Some(file) = store.recorded(&id)? {
                return Ok(file.digest);
            }
            let entries = hash_tree(Place::root(&store.diff_dir(&id))?)?;
            let file = DigestFile { format: FORMAT, digest: total(&entries), entries };
            let place = PathBuf::from(format!("layers/{id}/digest.json"));
            let json = manifest::to_json(&file, &place)?;
            store.put(&place, &json, Durability::Synced, false)?;
            Ok(file.digest)
        })
        .await
    }

    /// Hashes a sealed layer again and compares.
    ///
    /// # Errors
    ///
    /// As [`fingerprint`](Self::fingerprint); damage is no error but the answer.
    pub async fn verify(&self, layer: &LayerId) -> Result<Verdict> {
        let (store, id) = (self.clone(), layer.clone());
        blocking(move || {
            store.sealed(&id)?;
            let Some(file) = store.recorded(&id)? else { return Ok(Verdict::Unknown) };
            let differences =
                compare(&file.entries, &hash_tree(Place::root(&store.diff_dir(&id))?)?);
            let intact = differences.is_empty();
            Ok(if intact { Verdict::Intact } else { Verdict::Damaged(differences) })
        })
        .await
    }

    fn recorded(&self, id: &LayerId) -> Result<Option<DigestFile>> {
        let path = self.layer_dir(id).join("digest.json");
        match fs::read(&path) {
            Ok(bytes) => manifest::parse(&path, &bytes).map(Some),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(io_error("read", &path)(error)),
        }
    }
}

fn compare(before: &BTreeMap<String, String>, now: &BTreeMap<String, String>) -> Vec<Difference> {
    let mut differences = Vec::new();
    for (path, hash) in before {
        match now.get(path) {
            None => differences.push(Difference::Missing(path.clone())),
            Some(found) if found != hash => differences.push(Difference::Changed(path.clone())),
            Some(_) => {}
        }
    }
    let extra = now.keys().filter(|path| !before.contains_key(*path));
    differences.extend(extra.map(|path| Difference::Extra(path.clone())));
    differences
}

fn total(entries: &BTreeMap<String, String>) -> String {
    let mut hash = Sha256::new();
    for (path, entry) in entries {
        hash.update(path.as_bytes());
        hash.update(b"\n");
        hash.update(entry.as_bytes());
        hash.update(b"\n");
    }
    format!("sha256:{}", hex(&hash.finalize()))
}

fn hash_tree(root: Place) -> Result<BTreeMap<String, String>> {
    let entries = Mutex::new(BTreeMap::new());
    // Which names each file with several has here.
    let groups: Mutex<HashMap<u64, Vec<String>>> = Mutex::default();
    visit(root, |place, more| {
        let dir = place.open()?;
        let own = hash_dir(&dir)?;
        lock(&entries).insert(path_text(&place.path()), own);
        for entry in dir.entries()? {
            let stat = dir.stat(&entry.name)?;
            if file_type(&stat) == FileType::Directory {
                more.push(dir.child(&entry.name));
                continue;
            }
            let path = path_text(&dir.path_of(&entry.name));
            if stat.stx_nlink > 1 {
                lock(&groups).entry(stat.stx_ino).or_default().push(path.clone());
            }
            let hash = hash_leaf(&dir, &entry.name, &stat)?;
            lock(&entries).insert(path, hash);
        }
        Ok(())
    })?;
    let mut entries = entries.into_inner().unwrap_or_else(PoisonError::into_inner);
    for mut group in groups.into_inner().unwrap_or_else(PoisonError::into_inner).into_values() {
        group.sort();
        for path in group.iter().skip(1) {
            if let Some(hash) = entries.get_mut(path) {
                *hash = format!("{hash} = {}", group[0]);
            }
        }
    }
    Ok(entries)
}

fn hash_dir(dir: &Dir) -> Result<String> {
    let hash = begin(&dir.own_stat()?, &dir.own_xattrs()?);
    Ok(hex(&hash.finalize()))
}

fn hash_leaf(dir: &Dir, name: &CStr, stat: &Statx) -> Result<String> {
    let mut hash = begin(stat, &dir.xattrs(name)?);
    match file_type(stat) {
        FileType::RegularFile => {
            let file = dir.open_file(name)?;
            hash_content(&file, &mut hash).map_err(|error| dir.failure("read", name, error))?;
        }
        FileType::Symlink => hash.update(dir.link_target(name)?.as_bytes()),
        _ => {}
    }
    Ok(hex(&hash.finalize()))
}

fn begin(stat: &Statx, xattrs: &Xattrs) -> Sha256 {
    let mut hash = Sha256::new();
    let size = match file_type(stat) {
        FileType::Directory => 0,
        _ => stat.stx_size,
    };
    let modified = stat.stx_mtime;
    hash.update(format!(
        "{:o} {} {} {size} {}.{} {}:{}\n",
        stat.stx_mode,
        stat.stx_uid,
        stat.stx_gid,
        modified.tv_sec,
        modified.tv_nsec,
        stat.stx_rdev_major,
        stat.stx_rdev_minor
    ));
    for (key, value) in xattrs {
        hash.update(key.as_bytes());
        hash.update(format!("={}:", value.len()));
        hash.update(value);
    }
    hash.update(b"\n");
    hash
}

fn hash_content(file: &OwnedFd, hash: &mut Sha256) -> Result<(), rustix::io::Errno> {
    let mut buffer = vec![0u8; 128 << 10];
    loop {
        let got = rustix::io::read(file, &mut buffer)?;
        if got == 0 {
            return Ok(());
        }
        hash.update(&buffer[..got]);
    }
}

pub(super) fn sha256(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
