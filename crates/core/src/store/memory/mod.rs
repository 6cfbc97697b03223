//! The lifecycle of a memory layer: begun, captured into, sealed, collected.
//! `docs/formats/memory.md` describes its files.
//!
//! ```text
//!   begin ----> being written ----> sealed ----> gone
//!                     |       seal        collect
//!                     +-- discard ---------> gone
//! ```
//!
//! A driver writes into the directory; `memory.json` is the seal. One without it is of no use, and goes with the next
//! collection, unless it is being written just now.

mod disks;

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::failpoint;
use crate::model::{FORMAT, Fingerprint, MemoryId, MemoryLayer, Size, Template, Timestamp, now};
use crate::store::layer::digest::{DigestVerdict, NameDifference};
use crate::store::layer::time_of;
use crate::store::manifest::{Damaged, Durability, Manifest, id_of, list, sync_parent, to_json};
use crate::store::{Result, Store, StoreError, blocking, io_error};

/// Those whose digests are known from the beginning and checked before every use.
const SMALL: [&str; 2] = ["devices", "index"];
/// How long a template that no machine was started from stays, in days.
const TEMPLATE_DAYS: i64 = 30;

/// A capture's report about the layer it wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewMemory {
    /// What it was made with.
    pub fingerprint: Fingerprint,
    /// The machine's RAM.
    pub ram: Size,
    /// Packed layers that its root is mounted from.
    pub roots: Vec<String>,
    /// The file in it that is the machine's disk, if it has its own. Not one of [`MemoryLayer::FILES`].
    pub disk: Option<String>,
}

/// What a collection of memory removed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CollectedMemory {
    /// The layers.
    pub layers: Vec<MemoryId>,
    /// The space they took.
    pub bytes: u64,
    /// Templates that had been unused for long, by their keys.
    pub templates: Vec<String>,
    /// Templates that are still there.
    pub kept: Vec<Template>,
}

impl Manifest for MemoryLayer {
    type Key = MemoryId;
    const KIND: &'static str = "memory";
    fn key(&self) -> MemoryId {
        self.id.clone()
    }
    fn place(key: &MemoryId) -> PathBuf {
        PathBuf::from(format!("memory/{key}/memory.json"))
    }
    fn places() -> &'static [&'static str] {
        &["memory/*/memory.json"]
    }
}

impl Manifest for Template {
    type Key = String;
    const KIND: &'static str = "template";
    const KEEP_LAST: bool = true;
    fn key(&self) -> String {
        self.key.clone()
    }
    fn place(key: &String) -> PathBuf {
        PathBuf::from(format!("templates/{key}.json"))
    }
    fn places() -> &'static [&'static str] {
        &["templates/*.json"]
    }
}

impl Store {
    /// Begins a memory layer, and returns the directory to write it in.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`].
    pub async fn begin_memory(&self) -> Result<(MemoryId, PathBuf)> {
        let store = self.clone();
        blocking(move || {
            let id = MemoryId::fresh();
            let dir = store.memory_dir(&id);
            store.inner.holds.protect_new(id.as_str());
            store.inner.capturing.lock().insert(id.clone());
            let made = fs::DirBuilder::new().mode(0o700).create(&dir);
            if let Err(error) = made {
                store.inner.capturing.lock().remove(&id);
                return Err(io_error("create", &dir)(error));
            }
            failpoint::pass("store.begin_memory.done");
            Ok((id, dir))
        })
        .await
    }

    /// Where a memory layer's files lie.
    #[must_use]
    pub fn memory_dir(&self, id: &MemoryId) -> PathBuf {
        self.memories_dir().join(id.as_str())
    }

    pub(in crate::store) fn memories_dir(&self) -> PathBuf {
        self.inner.data.join("memory")
    }

    /// Seals a memory layer that nothing writes to any more. Sealing a sealed one answers with what it is.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::BadMemory`] when a file is missing, else [`StoreError::Io`]. It is not sealed then, and can
    /// be sealed again or discarded.
    pub async fn seal_memory(&self, id: &MemoryId, new: NewMemory) -> Result<MemoryLayer> {
        let (store, id) = (self.clone(), id.clone());
        blocking(move || {
            let layer = match store.get::<MemoryLayer>(&id) {
                Err(StoreError::NotFound { .. }) => store.seal_memory_now(&id, new)?,
                outcome => outcome?,
            };
            store.inner.capturing.lock().remove(&id);
            Ok(layer)
        })
        .await
    }

    fn seal_memory_now(&self, id: &MemoryId, new: NewMemory) -> Result<MemoryLayer> {
        let dir = self.memory_dir(id);
        let (mut sizes, mut digests, mut bytes) = (BTreeMap::new(), BTreeMap::new(), 0);
        for name in MemoryLayer::FILES.into_iter().chain(new.disk.as_deref()) {
            let path = dir.join(name);
            let file = match File::open(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Err(unusable(id, format!("`{name}` is missing")));
                }
                opened => opened.map_err(io_error("open", &path))?,
            };
            file.sync_all().map_err(io_error("sync", &path))?;
            let found = file.metadata().map_err(io_error("stat", &path))?;
            sizes.insert(name.to_owned(), found.len());
            bytes += found.blocks() * 512;
            if is_small(name) {
                digests.insert(name.to_owned(), digest_of(&path)?);
            }
        }
        failpoint::pass("store.seal_memory.before_manifest");
        let layer = MemoryLayer {
            format: FORMAT,
            id: id.clone(),
            fingerprint: new.fingerprint,
            ram: new.ram,
            bytes,
            sizes,
            digests,
            roots: new.roots,
            sealed_at: now(),
        };
        let place = MemoryLayer::place(id);
        // The directory's own entry comes first: with the seal the layer is complete.
        sync_parent(&dir)?;
        self.put(&place, &to_json(&layer, &place)?, Durability::Synced, false)?;
        failpoint::pass("store.seal_memory.sealed");
        Ok(layer)
    }

    /// Checks that an image, whose first layer is the topmost, can be used, and says where its layers lie. Large files are only
    /// measured. Its fingerprint decides whether it suits this host.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::BadMemory`], which names the layer and what is wrong with it.
    pub async fn check_memory(&self, chain: &[MemoryId]) -> Result<Vec<PathBuf>> {
        let (store, chain) = (self.clone(), chain.to_vec());
        blocking(move || {
            for id in &chain {
                let layer = match store.get::<MemoryLayer>(id) {
                    Ok(layer) => layer,
                    Err(StoreError::NotFound { .. }) if store.memory_dir(id).is_dir() => {
                        return Err(unusable(id, "it was never finished".to_owned()));
                    }
                    Err(StoreError::NotFound { .. }) => {
                        return Err(unusable(id, "it is not there".to_owned()));
                    }
                    Err(error) => return Err(unusable(id, error.to_string())),
                };
                if let Some(reason) = store.memory_trouble(&layer, is_small)?.into_iter().next() {
                    return Err(unusable(id, reason));
                }
            }
            Ok(chain.iter().map(|id| store.memory_dir(id)).collect())
        })
        .await
    }

    /// What is wrong with a sealed memory layer: files that are missing or of another size, and of those that are `hashed` the
    /// ones whose digest is another than the one on record.
    pub(in crate::store) fn memory_trouble(
        &self,
        layer: &MemoryLayer,
        hashed: impl Fn(&str) -> bool,
    ) -> Result<Vec<String>> {
        let mut wrong = Vec::new();
        for name in layer.files() {
            let path = self.memory_dir(&layer.id).join(name);
            let Some(size) = layer.sizes.get(name) else {
                wrong.push(format!("the size of `{name}` is not on record"));
                continue;
            };
            let found = match fs::symlink_metadata(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    wrong.push(format!("`{name}` is missing"));
                    continue;
                }
                found => found.map_err(io_error("stat", &path))?,
            };
            if !found.is_file() || found.len() != *size {
                let (is, was) = (found.len(), size);
                wrong.push(format!("`{name}` has {is} bytes and had {was}"));
                continue;
            }
            if !hashed(name) {
                continue;
            }
            match layer.digests.get(name) {
                Some(digest) if *digest != digest_of(&path)? => {
                    wrong.push(format!("`{name}` is not what was sealed"));
                }
                None if is_small(name) => {
                    wrong.push(format!("the digest of `{name}` is not on record"));
                }
                _ => {}
            }
        }
        Ok(wrong)
    }

    /// What is wrong with a sealed memory layer, without reading large files.
    pub(in crate::store) fn trouble_of(&self, layer: &MemoryLayer) -> Result<Vec<String>> {
        self.memory_trouble(layer, is_small)
    }

    /// Reads all of a sealed memory layer and compares it with its digests.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read); damage is no error but the answer. [`DigestVerdict::Unknown`] is that of a layer of which not all
    /// digests were made yet, and that has nothing wrong with it otherwise.
    pub async fn verify_memory(&self, id: &MemoryId) -> Result<DigestVerdict> {
        let (store, id) = (self.clone(), id.clone());
        blocking(move || {
            let layer = store.get::<MemoryLayer>(&id)?;
            let wrong = store.memory_trouble(&layer, |_| true)?;
            Ok(match wrong.is_empty() {
                false => {
                    DigestVerdict::Damaged(wrong.into_iter().map(NameDifference::Other).collect())
                }
                true if layer.files().all(|name| layer.digests.contains_key(name)) => {
                    DigestVerdict::Intact
                }
                true => DigestVerdict::Unknown,
            })
        })
        .await
    }

    /// Reads all of a sealed memory layer and keeps its digests. Those that are known are not made again.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError`] when it is not sealed or cannot be read.
    pub async fn record_memory_digests(&self, id: &MemoryId) -> Result<()> {
        let (store, id) = (self.clone(), id.clone());
        blocking(move || {
            let mut layer = store.get::<MemoryLayer>(&id)?;
            let unknown = layer.files().filter(|name| !layer.digests.contains_key(*name));
            let unknown: Vec<_> = unknown.map(str::to_owned).collect();
            for name in unknown {
                let digest = digest_of(&store.memory_dir(&id).join(&name))?;
                layer.digests.insert(name, digest);
            }
            let place = MemoryLayer::place(&id);
            store.put(&place, &to_json(&layer, &place)?, Durability::Synced, false)
        })
        .await
    }

    /// Throws a memory layer away that was not sealed. One that is not there is no error; a sealed one is left alone.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`].
    pub async fn discard_memory(&self, id: &MemoryId) -> Result<()> {
        let (store, id) = (self.clone(), id.clone());
        blocking(move || {
            let dir = store.memory_dir(&id);
            if !dir.join("memory.json").exists() {
                failpoint::pass("store.discard_memory.before");
                store.discard_dir(&dir, id.as_str())?;
            }
            store.inner.capturing.lock().remove(&id);
            store.inner.holds.unprotect(id.as_str());
            Ok(())
        })
        .await
    }

    /// Lists the memory layers that are neither in `live` nor being written, and are older than `begun_before`: sealed ones by
    /// when they were sealed, others by when they were begun. A layer whose manifest cannot be read is left for `fsck`.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`].
    pub async fn unheld_memory(
        &self,
        live: &HashSet<MemoryId>,
        begun_before: Timestamp,
    ) -> Result<Vec<(MemoryId, u64)>> {
        let (store, live) = (self.clone(), live.clone());
        blocking(move || {
            let mut unheld = Vec::new();
            for path in list(&store.memories_dir())? {
                let Ok(id) = id_of(&path).parse::<MemoryId>() else { continue };
                if live.contains(&id) || store.inner.capturing.lock().contains(&id) {
                    continue;
                }
                let (since, bytes) = match store.get::<MemoryLayer>(&id) {
                    Ok(layer) => (layer.sealed_at, layer.bytes),
                    Err(StoreError::NotFound { .. }) => (time_of(id.as_str()), 0),
                    Err(_) => continue,
                };
                if since < begun_before {
                    unheld.push((id, bytes));
                }
            }
            Ok(unheld)
        })
        .await
    }

    /// Removes the records of templates that were unused for a month, and returns those that stay
    /// and those that cannot be read. A damaged record is left: the template is made again when it
    /// is needed, and its record with it.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`].
    pub async fn drop_stale_templates(&self) -> Result<(CollectedMemory, Vec<Damaged>)> {
        let mut collected = CollectedMemory::default();
        let span = jiff::SignedDuration::from_hours(24 * TEMPLATE_DAYS);
        let oldest = now().checked_sub(span).unwrap_or(Timestamp::MIN);
        let templates = self.scan::<Template>().await?;
        for template in templates.good {
            if template.used_at >= oldest {
                collected.kept.push(template);
            } else {
                self.remove::<Template>(&template.key).await?;
                collected.templates.push(template.key);
            }
        }
        Ok((collected, templates.damaged))
    }

    /// Moves memory layers to the trash that are neither in `live` nor those of a template nor being written, and are older than
    /// `begun_before`, and deletes them. For who is alone with the store.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`].
    pub async fn collect_memory(
        &self,
        live: &HashSet<MemoryId>,
        begun_before: Timestamp,
    ) -> Result<CollectedMemory> {
        let (mut collected, damaged) = self.drop_stale_templates().await?;
        if !damaged.is_empty() {
            // It is unknown which layers those hold.
            return Ok(collected);
        }
        let mut held = live.clone();
        held.extend(collected.kept.iter().map(|template| template.memory.clone()));
        for (id, bytes) in self.unheld_memory(&held, begun_before).await? {
            self.inner.holds.unprotect(id.as_str());
            failpoint::pass("store.collect_memory.before");
            if self.discard_unheld(id.as_str(), || false).await? {
                collected.bytes += bytes;
                collected.layers.push(id);
            }
        }
        for trashed in self.trash().await? {
            if trashed.id.parse::<MemoryId>().is_ok() {
                self.purge(&trashed).await?;
            }
        }
        let store = self.clone();
        blocking(move || {
            store.wait_for_deletions();
            Ok(collected)
        })
        .await
    }
}

fn is_small(name: &str) -> bool {
    SMALL.contains(&name)
}

fn unusable(id: &MemoryId, reason: String) -> StoreError {
    StoreError::BadMemory { id: id.clone(), reason }
}

pub(in crate::store) fn digest_of(path: &Path) -> Result<String> {
    let mut file = File::open(path).map_err(io_error("open", path))?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0u8; 256 << 10];
    loop {
        match file.read(&mut buffer).map_err(io_error("read", path))? {
            0 => return Ok(hex::encode(hash.finalize())),
            read => hash.update(&buffer[..read]),
        }
    }
}
