//! Quarantine: files that are moved out of a layer before it is sealed.
//!
//! `aside/<snapshot>/` in the data directory holds files that were taken out of a layer before it
//! was sealed, and `aside.json`, which says what each was. That document is written first: a daemon
//! that dies while it moves files finds in it what is left to do, and doing it twice changes nothing.
//! Where something older lies below a file that is moved, a whiteout takes its place, so that what is
//! sealed shows neither.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

use crate::failpoint;
use crate::model::{Aside, LayerId, Quarantine, SnapshotId};
use crate::store::manifest::{Durability, Manifest, sync_parent, to_json};
use crate::store::path_text::{path_bytes, path_text};
use crate::store::search::parent;
use crate::store::tree::TreeDir;
use crate::store::walk::vanished;
use crate::store::{Result, Store, StoreError, blocking, io_error};

impl Manifest for Quarantine {
    type Key = SnapshotId;
    const KIND: &'static str = "quarantine";
    fn key(&self) -> SnapshotId {
        self.id.clone()
    }
    fn place(key: &SnapshotId) -> PathBuf {
        PathBuf::from(format!("aside/{key}/aside.json"))
    }
    fn places() -> &'static [&'static str] {
        &["aside/*/aside.json"]
    }
}

/// A file that is to be quarantined.
#[derive(Debug, Clone)]
pub struct FileToQuarantine {
    /// Where it is, from the layer's root.
    pub path: Vec<u8>,
    /// The same, as it may be shown.
    pub shown: String,
    /// How large it is.
    pub size: u64,
}

impl Store {
    /// Takes files out of an open layer that stands on `chain`, and keeps them as `quarantine` says. What
    /// was kept aside of that layer before stays there.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`]; asked again, it does what is left to do.
    pub async fn set_aside(
        &self,
        open: &LayerId,
        chain: &[LayerId],
        quarantine: Quarantine,
        leaving: Vec<FileToQuarantine>,
    ) -> Result<Quarantine> {
        let (store, open, chain) = (self.clone(), open.clone(), chain.to_vec());
        blocking(move || {
            let mut quarantine = match store.get::<Quarantine>(&quarantine.id) {
                Ok(known) => {
                    Quarantine { findings: [known.findings, quarantine.findings].concat(), ..known }
                }
                Err(StoreError::NotFound { .. }) => quarantine,
                Err(error) => return Err(error),
            };
            for FileToQuarantine { path, shown, size } in leaving {
                let text = path_text(&path);
                let hides = store.lies_below(&chain, &path)?;
                let kept_as = quarantine.files.len().to_string();
                quarantine.files.push(Aside { path: text, shown, kept_as, size, hides });
            }
            let dir = store.quarantine_dir(&quarantine.id);
            match fs::DirBuilder::new().mode(0o700).create(&dir) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(io_error("create", &dir)(error));
                }
                _ => {}
            }
            sync_parent(&dir)?;
            let place = Quarantine::place(&quarantine.id);
            let document = to_json(&quarantine, &place)?;
            store.put(&place, &document, Durability::Synced, false)?;
            failpoint::pass("guard.recorded");
            store.move_aside(&open, &quarantine)?;
            Ok(quarantine)
        })
        .await
    }

    /// Finishes what [`set_aside`](Self::set_aside) had begun with a layer, if anything.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`].
    pub async fn finish_setting_aside(&self, open: &LayerId) -> Result<Option<Quarantine>> {
        let (store, open) = (self.clone(), open.clone());
        blocking(move || match store.get::<Quarantine>(&SnapshotId::of_layer(&open)) {
            Ok(quarantine) => {
                store.move_aside(&open, &quarantine)?;
                Ok(Some(quarantine))
            }
            Err(StoreError::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        })
        .await
    }

    fn move_aside(&self, open: &LayerId, quarantine: &Quarantine) -> Result<()> {
        let root = TreeDir::root(&self.diff_dir(open))?;
        let aside = TreeDir::root(&self.quarantine_dir(&quarantine.id))?.open()?;
        for file in &quarantine.files {
            let (Some(path), Ok(kept_as)) = (path_bytes(&file.path), CString::new(&*file.kept_as))
            else {
                continue;
            };
            let (dir, name) = match parent(&root, &path) {
                Ok(Some(found)) => found,
                // It went with a directory it was in.
                Err(error) if vanished(&error) => continue,
                Ok(None) => continue,
                Err(error) => return Err(error),
            };
            if aside.stat(&kept_as).is_err() {
                match dir.move_to(&name, &aside, &kept_as) {
                    Err(error) if vanished(&error) => {}
                    moved => moved?,
                }
                failpoint::pass("guard.moved");
            }
            if file.hides && dir.stat(&name).is_err() {
                dir.make_whiteout(&name)?;
            }
        }
        Ok(())
    }

    /// Removes what is kept aside, for good.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::NotFound`] when there is nothing of that id.
    pub async fn remove_quarantine(&self, id: &SnapshotId) -> Result<()> {
        let (store, id) = (self.clone(), id.clone());
        blocking(move || {
            let dir = store.quarantine_dir(&id);
            if !dir.is_dir() {
                return Err(StoreError::NotFound { kind: Quarantine::KIND, key: id.to_string() });
            }
            store.discard_dir(&dir, id.as_str())
        })
        .await
    }

    fn quarantine_dir(&self, id: &SnapshotId) -> PathBuf {
        self.data_dir().join(format!("aside/{id}"))
    }
}
