//! The trash: what was deleted, until its grace period ends.
//!
//! Unreferenced layers, memory layers and directories of deleted sandboxes are renamed to
//! `trash/<id>.<time>`, where the time is that of the deletion, in milliseconds since 1970. A
//! rename cannot be half done, and can be undone. To delete something for good, it is renamed once
//! more, into `tmp/`, and deleted there at a limited rate.
//!
//! The store moves; the engine decides what and when. Deletion never depends on the time in a name: the engine counts on the
//! monotonic clock for how long it has seen something lie here.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::failpoint;
use crate::model::{
    Layer, LayerId, MemoryId, MemoryLayer, Sandbox, SandboxId, Snapshot, SnapshotId, Timestamp, now,
};
use crate::store::manifest::{
    Durability, Manifest, id_of, list, parse, read_newest, sync_parent, to_json,
};
use crate::store::{Result, Store, StoreError, blocking, io_error};

/// Something in the trash.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Trashed {
    /// When it was put there, by the wall clock of then.
    pub at: Timestamp,
    /// What it was: the id of a layer, a memory layer or a sandbox.
    pub id: String,
    /// Where it lies.
    pub path: PathBuf,
}

impl Trashed {
    fn parse(path: PathBuf) -> Option<Self> {
        let name = path.file_name()?.to_str()?;
        let (id, millis) = name.rsplit_once('.')?;
        let known = id.parse::<LayerId>().is_ok()
            || id.parse::<MemoryId>().is_ok()
            || id.parse::<SandboxId>().is_ok();
        let at = Timestamp::from_millisecond(millis.parse().ok()?).ok()?;
        known.then(|| Self { at, id: id.to_owned(), path: path.clone() })
    }

    /// The sandbox it was, if it was one.
    #[must_use]
    pub fn sandbox(&self) -> Option<SandboxId> {
        self.id.parse().ok()
    }

    /// The layer it was, if it was one.
    #[must_use]
    pub fn layer(&self) -> Option<LayerId> {
        self.id.parse().ok()
    }
}

/// A sandbox in the trash.
#[derive(Debug, Clone)]
pub struct TrashedSandbox {
    /// Its record.
    pub sandbox: Sandbox,
    /// The snapshots that were deleted with it.
    pub snapshots: Vec<Snapshot>,
}

impl Store {
    pub(in crate::store) fn trash_dir(&self) -> PathBuf {
        self.inner.data.join("trash")
    }

    /// Moves a layer of either sort to the trash, unless somebody came to hold it. `named` is asked once more
    /// after the move. False when it stays.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`]; it is then where it was.
    pub(in crate::store) fn trash_layer(&self, id: &str, named: impl Fn() -> bool) -> Result<bool> {
        let place = self.place_of(id);
        let outcome = self.move_to_trash(&place, id);
        let back = match &outcome {
            Ok(Some(trashed)) if self.inner.holds.is_held(id) || named() => {
                fs::rename(trashed, &place).map_err(io_error("restore", &place)).map(|()| true)
            }
            _ => Ok(false),
        };
        self.inner.holds.end_move(id);
        Ok(outcome?.is_some() && !back?)
    }

    /// Renames something into the trash; `None` when it is not there.
    pub(in crate::store) fn move_to_trash(&self, path: &Path, id: &str) -> Result<Option<PathBuf>> {
        let mut millis = now().as_millisecond();
        loop {
            let trashed = self.trash_dir().join(format!("{id}.{millis}"));
            if trashed.symlink_metadata().is_ok() {
                millis += 1;
                continue;
            }
            failpoint::pass("store.trash.before");
            return match fs::rename(path, &trashed) {
                Ok(()) => {
                    failpoint::pass("store.trash.moved");
                    Ok(Some(trashed))
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
                Err(error) => Err(io_error("move to the trash", path)(error)),
            };
        }
    }

    fn place_of(&self, id: &str) -> PathBuf {
        let part = match id.split_once('-') {
            Some(("mem", _)) => "memory",
            Some(("sbx", _)) => "sandboxes",
            _ => "layers",
        };
        self.inner.data.join(part).join(id)
    }

    /// What is in the trash, oldest first.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`].
    pub async fn trash(&self) -> Result<Vec<Trashed>> {
        let store = self.clone();
        blocking(move || store.trash_now()).await
    }

    fn trash_now(&self) -> Result<Vec<Trashed>> {
        let mut all: Vec<_> =
            list(&self.trash_dir())?.into_iter().filter_map(Trashed::parse).collect();
        all.sort();
        Ok(all)
    }

    /// Puts layers back that are in the trash and not in their place. Answers with those that were.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`].
    pub async fn untrash(&self, ids: Vec<String>) -> Result<Vec<String>> {
        let store = self.clone();
        blocking(move || {
            let mut back = Vec::new();
            let missing: Vec<_> =
                ids.into_iter().filter(|id| !store.place_of(id).exists()).collect();
            if missing.is_empty() {
                return Ok(back);
            }
            let trash = store.trash_now()?;
            for id in missing {
                let Some(found) = trash.iter().rev().find(|trashed| trashed.id == id) else {
                    continue;
                };
                let place = store.place_of(&id);
                fs::rename(&found.path, &place).map_err(io_error("restore", &place))?;
                sync_parent(&place)?;
                back.push(id);
            }
            Ok(back)
        })
        .await
    }

    /// What a layer in the trash is, if it was sealed.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError`] when its manifest does not read.
    pub async fn layer_in_trash(
        &self,
        trashed: &Trashed,
    ) -> Result<(Option<Layer>, Option<MemoryLayer>)> {
        let path = trashed.path.clone();
        blocking(move || {
            Ok((
                read_if_there(&path.join("layer.json"))?,
                read_if_there(&path.join("memory.json"))?,
            ))
        })
        .await
    }

    /// Deletes something in the trash for good, a little later and at a limited rate.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`].
    pub async fn purge(&self, trashed: &Trashed) -> Result<()> {
        let (store, path) = (self.clone(), trashed.path.clone());
        blocking(move || {
            failpoint::pass("store.purge.before");
            store.discard_dir(&path, id_of(&path))
        })
        .await
    }

    /// Keeps a copy of a snapshot's manifest with the sandbox it is about to be deleted with.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`].
    pub async fn keep_for_trash(&self, sandbox: &SandboxId, snapshot: &SnapshotId) -> Result<()> {
        let dir = self.place_of(sandbox.as_str()).join("snapshots");
        let from = self.inner.data.join(<Snapshot as Manifest>::place(snapshot));
        let to = dir.join(format!("{snapshot}.json"));
        blocking(move || {
            if to.exists() {
                return Ok(());
            }
            fs::create_dir_all(&dir).map_err(io_error("create", &dir))?;
            // Manifests are replaced and never changed in place, so a link is a copy, and needs no room for its data.
            match fs::hard_link(&from, &to) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                outcome => outcome.map_err(io_error("keep", &from)),
            }
        })
        .await
    }

    /// What was kept of a sandbox's snapshots, of one that is being deleted.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`] when the directory cannot be listed.
    pub async fn kept_for_trash(&self, sandbox: &SandboxId) -> Result<Vec<Snapshot>> {
        let dir = self.place_of(sandbox.as_str());
        blocking(move || kept_in(&dir)).await
    }

    /// Reads a sandbox in the trash.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError`] when its record does not read.
    pub async fn trashed_sandbox(&self, trashed: &Trashed) -> Result<TrashedSandbox> {
        let path = trashed.path.clone();
        blocking(move || {
            let sandbox: Sandbox = read_newest(&path.join("sandbox.json"))?;
            Ok(TrashedSandbox { sandbox, snapshots: kept_in(&path)? })
        })
        .await
    }

    /// Puts a sandbox's directory back in its place, with `sandbox` as its record.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`]; it is then still in the trash.
    pub async fn restore_sandbox(&self, trashed: &Trashed, sandbox: &Sandbox) -> Result<()> {
        let (store, path) = (self.clone(), trashed.path.clone());
        let place = self.place_of(sandbox.id.as_str());
        let record = Path::new("trash").join(path.file_name().unwrap_or_default());
        let record = record.join("sandbox.json");
        let bytes = to_json(sandbox, &record)?;
        blocking(move || {
            store.put(&record, &bytes, Durability::Synced, true)?;
            failpoint::pass("store.restore.recorded");
            if place.symlink_metadata().is_ok() {
                return Err(StoreError::Damaged {
                    path: place,
                    reason: "it is in the way of what is to be restored".to_owned(),
                });
            }
            fs::rename(&path, &place).map_err(io_error("restore", &place))?;
            sync_parent(&place)?;
            sync_parent(&path)
        })
        .await
    }

    /// Removes the copies that were kept for the trash.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`].
    pub async fn forget_kept(&self, sandbox: &SandboxId) -> Result<()> {
        let (store, dir) = (self.clone(), self.place_of(sandbox.as_str()).join("snapshots"));
        blocking(move || store.discard_dir(&dir, "kept")).await
    }
}

fn read_if_there<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    match fs::read(path) {
        Ok(bytes) => parse(path, &bytes).map(Some),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(io_error("read", path)(error)),
    }
}

/// The snapshots that were kept in a sandbox's directory. One that does not read is left out: it cannot be restored.
fn kept_in(dir: &Path) -> Result<Vec<Snapshot>> {
    let mut kept = Vec::new();
    for path in list(&dir.join("snapshots"))? {
        let read = fs::read(&path).map_err(io_error("read", &path));
        match read.and_then(|bytes| parse::<Snapshot>(&path, &bytes)) {
            Ok(snapshot) => kept.push(snapshot),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "could not read a snapshot in the trash");
            }
        }
    }
    Ok(kept)
}
