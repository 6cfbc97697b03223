//! Digests: whether a sealed layer still is what was sealed.
//!
//! A seal looks at every name anyway, so `layer.json` has a summary of what it saw: names, types,
//! modes, owners, sizes and times. Reading all files would make the seal slow. That is done right
//! afterwards, in the background and at a limited rate, by [`Store::record_digest`]. It compares the
//! summary first, so that a change in between is not accepted, and writes `digest.jsonl`: a hash for
//! every name, over its type, mode, owner, time, attributes and content, and which names are the same
//! file. Change time, access time and the number of links are left out: compaction changes them.
//!
//! A layer has as many names as a sandbox likes to make, so none of this holds a layer in memory: names
//! are visited in a fixed order ([`ordered_walk`]), hashed ([`hash`]) and written or compared one by
//! one ([`file`], [`compare`]). Names of the same file are found by sorting ([`links`]).

mod compare;
mod file;
mod hash;
mod links;
mod ordered_walk;

use std::fs;
use std::time::SystemTime;

use serde::Serialize;

use self::file::DigestFile;
use self::hash::TreeHasher;
use crate::model::{Layer, LayerId};
use crate::store::background::background_until;
use crate::store::manifest::{self, Durability, Manifest as _};
use crate::store::tree::TreeDir;
use crate::store::walk::{Measure, measure};
use crate::store::{Result, Store, blocking};

pub use self::hash::ReadThrottle;

/// The result of a check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DigestVerdict {
    /// It is what was sealed.
    Intact,
    /// It is not.
    Damaged(Vec<NameDifference>),
    /// There is no digest to compare with yet.
    Unknown,
}

/// One name that is not as it was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "difference", content = "path")]
pub enum NameDifference {
    /// It is gone.
    Missing(String),
    /// It was not there.
    Extra(String),
    /// It is another, or has other attributes or another content.
    Changed(String),
    /// Anything else, as a sentence.
    #[serde(rename = "told")]
    Other(String),
}

impl std::fmt::Display for NameDifference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Missing(path) => write!(f, "`{path}` is gone"),
            Self::Extra(path) => write!(f, "`{path}` was not there"),
            Self::Changed(path) => write!(f, "`{path}` is not what was sealed"),
            Self::Other(what) => f.write_str(what),
        }
    }
}

impl Store {
    /// Hashes a sealed layer and keeps the result beside it. One that was hashed before keeps its
    /// first hash; one that is not what was sealed gets none. Reads as fast as it can on all
    /// processors, or throttled on one.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError`] when the layer is not sealed or cannot be read.
    pub async fn record_digest(
        &self,
        layer: &LayerId,
        throttle: Option<&ReadThrottle>,
    ) -> Result<DigestVerdict> {
        let (store, id, throttle) = (self.clone(), layer.clone(), throttle.cloned());
        as_throttled(throttle.clone(), move || {
            if let Some(recorded) = DigestFile::find(&store.layer_dir(&id))? {
                return recorded.check().map(|()| DigestVerdict::Intact);
            }
            let differences = store.compare_summary(&id)?;
            if !differences.is_empty() {
                return Ok(DigestVerdict::Damaged(differences));
            }
            let hasher = TreeHasher::new(TreeDir::root(&store.diff_dir(&id))?, throttle.as_ref());
            file::write(&store, &store.layer_dir(&id), hasher)?;
            Ok(DigestVerdict::Intact)
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
        for name in [file::LINES, file::DOCUMENT] {
            let digest = self.layer_dir(layer).join(name);
            if digest.exists() {
                self.quarantine(&digest).await?;
            }
        }
        let (store, id) = (self.clone(), layer.clone());
        blocking(move || {
            let mut layer = store.sealed(&id)?;
            let Measure { bytes: _, files, summary } = measure(&store.diff_dir(&id))?;
            (layer.files, layer.summary) = (files, Some(hex::encode(summary)));
            let place = Layer::place(&id);
            store.put(&place, &manifest::to_json(&layer, &place)?, Durability::Synced, false)
        })
        .await?;
        self.record_digest(layer, None).await.map(drop)
    }

    /// Looks at every name of a sealed layer and compares with what the seal saw; reads no files.
    ///
    /// # Errors
    ///
    /// As [`fingerprint`](Self::fingerprint).
    pub async fn verify_names(&self, layer: &LayerId) -> Result<DigestVerdict> {
        let (store, id) = (self.clone(), layer.clone());
        blocking(move || {
            let differences = store.compare_summary(&id)?;
            let intact = differences.is_empty();
            Ok(if intact { DigestVerdict::Intact } else { DigestVerdict::Damaged(differences) })
        })
        .await
    }

    /// What the metadata of a sealed layer says about changes since the seal.
    pub(in crate::store) fn compare_summary(&self, id: &LayerId) -> Result<Vec<NameDifference>> {
        let layer = self.sealed(id)?;
        // Layers of before have none.
        let Some(sealed) = layer.summary else { return Ok(Vec::new()) };
        let now = measure(&self.diff_dir(id))?;
        if hex::encode(now.summary) == sealed {
            return Ok(Vec::new());
        }
        Ok(vec![NameDifference::Other(match now.files == layer.files {
            true => "the name, type, mode, owner, size or time of a file changed".to_owned(),
            false => format!("it has {} files, and {} were sealed", now.files, layer.files),
        })])
    }

    /// When a layer was last compared with its digest, or that was made.
    #[must_use]
    pub fn verified_at(&self, layer: &LayerId) -> Option<SystemTime> {
        let digest = DigestFile::find(&self.layer_dir(layer)).ok()??;
        fs::metadata(&digest.path).ok()?.modified().ok()
    }

    /// Hashes a sealed layer again and compares. One that was never hashed is [`DigestVerdict::Unknown`],
    /// unless its names are not those that were sealed: nothing is taken for good by this. Reads as
    /// fast as it can on all processors, or throttled on one.
    ///
    /// # Errors
    ///
    /// As [`fingerprint`](Self::fingerprint); damage is no error but the answer.
    pub async fn verify(
        &self,
        layer: &LayerId,
        throttle: Option<&ReadThrottle>,
    ) -> Result<DigestVerdict> {
        let (store, id, throttle) = (self.clone(), layer.clone(), throttle.cloned());
        as_throttled(throttle.clone(), move || {
            let Some(recorded) = DigestFile::find(&store.layer_dir(&id))? else {
                let differences = store.compare_summary(&id)?;
                let unknown = differences.is_empty();
                return Ok(if unknown {
                    DigestVerdict::Unknown
                } else {
                    DigestVerdict::Damaged(differences)
                });
            };
            let hasher = TreeHasher::new(TreeDir::root(&store.diff_dir(&id))?, throttle.as_ref());
            let differences = compare::compare(&store, &recorded, hasher)?;
            if !differences.is_empty() {
                return Ok(DigestVerdict::Damaged(differences));
            }
            // The time says when it was last verified. If it is lost, the layer is verified again.
            let _ = fs::File::options()
                .append(true)
                .open(&recorded.path)
                .and_then(|file| file.set_modified(SystemTime::now()));
            Ok(DigestVerdict::Intact)
        })
        .await
    }
}

/// Runs `work` as fast as it goes, or in the background until the throttle's stop flag is set.
async fn as_throttled<T, F>(throttle: Option<ReadThrottle>, work: F) -> Result<T>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T> + Send + 'static,
{
    match throttle {
        Some(throttle) => background_until(throttle.stop, work).await,
        None => blocking(work).await,
    }
}
