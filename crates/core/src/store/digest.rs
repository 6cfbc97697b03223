//! Knowing later that a layer still is what was sealed.
//!
//! A seal looks at every name anyway, so `layer.json` has a summary of what it saw: names, types,
//! modes, owners, sizes and times. Reading all files would make the seal slow. That is done right
//! afterwards, in the background and at a limited rate, by [`Store::fingerprint`], which compares the
//! summary first, so that what changed in between is not taken for good, and writes `digest.json`: a hash for every name, over what it is, its
//! mode, owner, time, attributes, content, and which other names are the same file. Change time,
//! access time and the number of links are left out: compaction moves them.

use std::collections::{BTreeMap, HashMap};
use std::ffi::CStr;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::{FileType, Statx};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::background::{self, Effort, with_effort};
use super::manifest::{self, Durability, Manifest as _};
use super::text::path_text;
use super::tree::{Dir, Place, Xattrs, file_type};
use super::walk::{Measure, lock, measure, visit};
use super::{Result, Store, StoreError, blocking, io_error};
use crate::model::{FORMAT, Layer, LayerId};

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
    /// first hash; one that is not what was sealed gets none. Reads as fast as it can on all
    /// processors, or `gently` on one.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError`] when the layer is not sealed or cannot be read.
    pub async fn fingerprint(&self, layer: &LayerId, gently: Option<&Gently>) -> Result<Verdict> {
        let (store, id, gently) = (self.clone(), layer.clone(), gently.cloned());
        with_effort(effort_of(gently.as_ref()), move || {
            if store.recorded(&id)?.is_some() {
                return Ok(Verdict::Intact);
            }
            let differences = store.compare_summary(&id)?;
            if !differences.is_empty() {
                return Ok(Verdict::Damaged(differences));
            }
            let entries =
                hash_tree(Place::root(&store.diff_dir(&id))?, &Pace::new(gently.as_ref()))?;
            let file = DigestFile { format: FORMAT, digest: total(&entries), entries };
            let place = PathBuf::from(format!("layers/{id}/digest.json"));
            let json = manifest::to_json(&file, &place)?;
            store.put(&place, &json, Durability::Synced, false)?;
            Ok(Verdict::Intact)
        })
        .await
    }

    /// Takes a sealed layer as it is now for good, whatever was sealed. What was on record of it is
    /// moved to `quarantine/`.
    ///
    /// # Errors
    ///
    /// As [`fingerprint`](Self::fingerprint).
    pub async fn accept_layer(&self, layer: &LayerId) -> Result<()> {
        let digest = self.layer_dir(layer).join("digest.json");
        if digest.exists() {
            self.quarantine(&digest).await?;
        }
        let (store, id) = (self.clone(), layer.clone());
        blocking(move || {
            let mut layer = store.sealed(&id)?;
            let Measure { bytes: _, files, summary } = measure(&store.diff_dir(&id))?;
            (layer.files, layer.summary) = (files, Some(hex(&summary)));
            let place = Layer::place(&id);
            store.put(&place, &manifest::to_json(&layer, &place)?, Durability::Synced, false)
        })
        .await?;
        self.fingerprint(layer, None).await.map(drop)
    }

    /// Looks at every name of a sealed layer and compares with what the seal saw; reads no files.
    ///
    /// # Errors
    ///
    /// As [`fingerprint`](Self::fingerprint).
    pub async fn verify_names(&self, layer: &LayerId) -> Result<Verdict> {
        let (store, id) = (self.clone(), layer.clone());
        blocking(move || {
            let differences = store.compare_summary(&id)?;
            let intact = differences.is_empty();
            Ok(if intact { Verdict::Intact } else { Verdict::Damaged(differences) })
        })
        .await
    }

    /// What the metadata of a sealed layer says about changes since the seal.
    pub(super) fn compare_summary(&self, id: &LayerId) -> Result<Vec<Difference>> {
        let layer = self.sealed(id)?;
        // Layers of before have none.
        let Some(sealed) = layer.summary else { return Ok(Vec::new()) };
        let now = measure(&self.diff_dir(id))?;
        if hex(&now.summary) == sealed {
            return Ok(Vec::new());
        }
        Ok(vec![Difference::Told(match now.files == layer.files {
            true => "the name, type, mode, owner, size or time of a file changed".to_owned(),
            false => format!("it has {} files, and {} were sealed", now.files, layer.files),
        })])
    }

    /// When a layer was last compared with its digest, or that was made.
    #[must_use]
    pub fn verified_at(&self, layer: &LayerId) -> Option<SystemTime> {
        fs::metadata(self.layer_dir(layer).join("digest.json")).ok()?.modified().ok()
    }

    /// Hashes a sealed layer again and compares. One that was never hashed is [`Verdict::Unknown`],
    /// unless its names are not those that were sealed: nothing is taken for good by this. Reads as
    /// fast as it can on all processors, or `gently` on one.
    ///
    /// # Errors
    ///
    /// As [`fingerprint`](Self::fingerprint); damage is no error but the answer.
    pub async fn verify(&self, layer: &LayerId, gently: Option<&Gently>) -> Result<Verdict> {
        let (store, id, gently) = (self.clone(), layer.clone(), gently.cloned());
        with_effort(effort_of(gently.as_ref()), move || {
            let Some(file) = store.recorded(&id)? else {
                let differences = store.compare_summary(&id)?;
                let unknown = differences.is_empty();
                return Ok(if unknown { Verdict::Unknown } else { Verdict::Damaged(differences) });
            };
            let root = Place::root(&store.diff_dir(&id))?;
            let differences =
                compare(&file.entries, &hash_tree(root, &Pace::new(gently.as_ref()))?);
            if !differences.is_empty() {
                return Ok(Verdict::Damaged(differences));
            }
            // The time says when it was last verified; a lost one costs a second look.
            let path = store.layer_dir(&id).join("digest.json");
            let _ = fs::File::options()
                .append(true)
                .open(&path)
                .and_then(|file| file.set_modified(SystemTime::now()));
            Ok(Verdict::Intact)
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

/// How to read files while others want the disk.
#[derive(Debug, Clone)]
pub struct Gently {
    /// How many bytes a second, at the most.
    pub rate: u64,
    /// Whether to read from the disk what is in memory, and to leave none of it there.
    pub past_cache: bool,
    /// Set by whoever wants it to end early.
    pub stop: Arc<AtomicBool>,
}

fn effort_of(gently: Option<&Gently>) -> Effort {
    if gently.is_some() { Effort::Background } else { Effort::Foreground }
}

/// How fast files are read.
#[derive(Debug)]
struct Pace<'a> {
    gently: Option<&'a Gently>,
    begun: Instant,
    read: AtomicU64,
}

impl<'a> Pace<'a> {
    fn new(gently: Option<&'a Gently>) -> Self {
        Self { gently, begun: Instant::now(), read: AtomicU64::new(0) }
    }

    /// Waits until that many more bytes may be read.
    fn take(&self, bytes: u64) -> Result<()> {
        let Some(gently) = self.gently else { return Ok(()) };
        let read = self.read.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let due = Duration::from_millis(read.saturating_mul(1000) / gently.rate.max(1));
        loop {
            if gently.stop.load(Ordering::Relaxed) {
                return Err(StoreError::ShuttingDown);
            }
            match due.checked_sub(self.begun.elapsed()) {
                None | Some(Duration::ZERO) => return Ok(()),
                Some(early) => std::thread::sleep(early.min(Duration::from_millis(200))),
            }
        }
    }

    /// Has the kernel forget what it holds of a file.
    fn forget(&self, file: &OwnedFd) {
        if self.gently.is_some_and(|gently| gently.past_cache) {
            let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
        }
    }
}

/// What a name costs beside its content, in bytes.
const NAME_COSTS: u64 = 4096;

fn hash_tree(root: Place, pace: &Pace<'_>) -> Result<BTreeMap<String, String>> {
    let entries = Mutex::new(BTreeMap::new());
    // Which names each file with several has here.
    let groups: Mutex<HashMap<u64, Vec<String>>> = Mutex::default();
    let work = |place: Place, more: &mut Vec<Place>| -> Result<()> {
        let dir = place.open()?;
        let own = hash_dir(&dir)?;
        lock(&entries).insert(path_text(&place.path()), own);
        for entry in dir.entries()? {
            pace.take(NAME_COSTS)?;
            let stat = dir.stat(&entry.name)?;
            if file_type(&stat) == FileType::Directory {
                more.push(dir.child(&entry.name));
                continue;
            }
            let path = path_text(&dir.path_of(&entry.name));
            if stat.stx_nlink > 1 {
                lock(&groups).entry(stat.stx_ino).or_default().push(path.clone());
            }
            let hash = hash_leaf(&dir, &entry.name, &stat, pace)?;
            lock(&entries).insert(path, hash);
        }
        Ok(())
    };
    visit(root, work)?;
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

fn hash_leaf(dir: &Dir, name: &CStr, stat: &Statx, pace: &Pace<'_>) -> Result<String> {
    let mut hash = begin(stat, &dir.xattrs(name)?);
    match file_type(stat) {
        FileType::RegularFile => {
            let file = dir.open_file(name)?;
            pace.forget(&file);
            let mut buffer = vec![0u8; 128 << 10];
            loop {
                background::step();
                let got = rustix::io::read(&file, &mut buffer);
                let got = got.map_err(|error| dir.failure("read", name, error))?;
                if got == 0 {
                    break;
                }
                hash.update(&buffer[..got]);
                pace.take(got as u64)?;
            }
            pace.forget(&file);
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

pub(super) fn sha256(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
