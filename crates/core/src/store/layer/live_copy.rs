//! Copies a layer while it is written to.
//!
//! A checkpoint of a busy sandbox cannot seal the layer under its processes. They are frozen, the
//! layer is copied into a new sealed one, and they resume. The first copy of a session is whole.
//! Each later one holds only what changed since the one before and stands on top of it, so that
//!
//! ```text
//!   chain + copy 1 + copy 2 + … + copy n   shows what   chain + open layer   showed at copy n.
//! ```
//!
//! To know what changed, a copy remembers inode, change time, size and kind of every name. Three
//! things could deceive it, and are dealt with:
//!
//! - A write in the same tick of the clock as the copy leaves the change time equal. Files changed in
//!   the last moments before a copy are therefore copied again by the next.
//! - A write through a memory mapping only moves the change time when the page was clean. Every copy
//!   ends with a sync while all is frozen, after which all pages are clean.
//! - A hard link made or broken shows in the change time of all its names; a directory moved as a
//!   whole does not. Names that were skipped are linked in the end when their file was copied.
//!
//! A first copy may be large, and would freeze the writers for seconds. So it can be made *ahead*,
//! while the writers continue ([`Store::copy_ahead`]). Such a copy may be torn, which does no harm:
//! it begins with a sync, and whatever changed since before that sync is copied again by the copy
//! that is made on top of it with the writers frozen.
//!
//! What vanished from the layer leaves a whiteout in the copy. That is right because overlayfs leaves
//! a whiteout itself where a lower layer has the name. The one case that has no such answer, a
//! whiteout that vanished, makes the copy a whole one.

mod copier;
mod record;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::failpoint;
use crate::model::{Layer, LayerId, LayerKind, Timestamp};
use crate::store::background::background;
use crate::store::layer::live_copy::copier::copy_into;
use crate::store::layer::live_copy::record::{recall, remember};
use crate::store::walk::{measure, measure_moving};
use crate::store::{Result, Store, blocking};

/// How much there must be to copy for it to be worth another layer to begin ahead.
const WORTH_AHEAD: u64 = 4 << 20;

/// Whether somebody may change the layer while it is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LayerWriters {
    Frozen,
    /// What changed after `since` is not to be believed.
    Busy {
        since: Timestamp,
    },
}

/// What was copied of an open layer so far.
#[derive(Debug, Clone)]
pub struct LiveCopy {
    layers: Vec<LayerId>,
    seen: Option<Arc<CopiedNames>>,
}

impl LiveCopy {
    /// The layers that together show what the open layer and the chain it stands on showed, topmost first.
    #[must_use]
    pub fn layers(&self) -> &[LayerId] {
        &self.layers
    }

    /// Names other layers that show the same: some of those it had were made one.
    pub fn set_layers(&mut self, layers: Vec<LayerId>) {
        self.layers = layers;
    }
}

/// Everything that was in the layer when it was copied.
#[derive(Debug, Default, PartialEq, Eq)]
struct CopiedNames {
    /// When, in seconds and nanoseconds.
    taken: (i64, u32),
    /// The root itself.
    root: Option<EntryState>,
    /// What each directory held.
    dirs: HashMap<Vec<u8>, HashMap<Vec<u8>, EntryState>>,
}

/// What must stay equal for a name to be unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct EntryState {
    inode: u64,
    changed: (i64, u32),
    size: u64,
    kind: EntryKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum EntryKind {
    File,
    Whiteout,
    Dir,
    OpaqueDir,
}

impl EntryKind {
    fn is_dir(self) -> bool {
        matches!(self, Self::Dir | Self::OpaqueDir)
    }
}

impl Store {
    /// Copies an open layer that stands on `chain`, and whose writers the caller has frozen, into a new sealed one.
    /// With `base`, the copy made before in the same session, only what changed since is copied; without a
    /// change there is no layer.
    ///
    /// # Errors
    ///
    /// Returns [`NoRoom`](crate::store::StoreError::NoRoom) or another error that [`is_no_room`](crate::store::StoreError::is_no_room);
    /// nothing is left of the copy then.
    pub async fn copy_live(
        &self,
        open: &LayerId,
        chain: &[LayerId],
        base: Option<&LiveCopy>,
    ) -> Result<(Option<Layer>, LiveCopy)> {
        let (store, id, chain, base) = (self.clone(), open.clone(), chain.to_vec(), base.cloned());
        let (layer, copy) = blocking(move || store.copy_now(&id, &chain, base.as_ref())).await?;
        let (path, temporary) =
            (self.layer_dir(open).join("copies.json"), self.fresh_tmp("copies"));
        let kept = copy.clone();
        // The caller's sandbox is frozen: remembering can wait until it is not.
        self.inner.deletion_threads.run(Box::new(move || remember(&path, &temporary, &kept)));
        Ok((layer, copy))
    }

    /// Makes a first copy of an open layer while it is being written to, for
    /// [`copy_live`](Self::copy_live) to stand on. `None` when there is too little to be worth it.
    ///
    /// # Errors
    ///
    /// As [`copy_live`](Self::copy_live).
    pub async fn copy_ahead(
        &self,
        open: &LayerId,
        chain: &[LayerId],
    ) -> Result<Option<(Layer, LiveCopy)>> {
        let (store, diff, id) = (self.clone(), self.diff_dir(open), open.clone());
        let chain = chain.to_vec();
        background(move || {
            let bytes = measure_moving(&diff)?.bytes;
            if bytes < WORTH_AHEAD {
                return Ok(None);
            }
            store.refuse_beyond(store.usable()?.usable, bytes)?;
            let taken = Timestamp::now();
            store.sync_now()?;
            let copied = store.copy_tree(&diff, None, LayerWriters::Busy { since: taken })?;
            let Some((Some(layer), seen)) = copied else { return Ok(None) };
            store.refuse_doubt_now(&id)?;
            let layers = std::iter::once(layer.id.clone()).chain(chain).collect();
            Ok(Some((layer, LiveCopy { layers, seen })))
        })
        .await
    }

    /// What an earlier daemon copied of an open layer. When there is nothing to be found, the next
    /// copy is a whole one.
    pub async fn live_copy(&self, open: &LayerId, chain: &[LayerId]) -> Option<LiveCopy> {
        let (path, chain) = (self.layer_dir(open).join("copies.json"), chain.to_vec());
        blocking(move || Ok(recall(&path, &chain))).await.ok().flatten()
    }

    fn copy_now(
        &self,
        open: &LayerId,
        chain: &[LayerId],
        base: Option<&LiveCopy>,
    ) -> Result<(Option<Layer>, LiveCopy)> {
        let copied = self.copy_changes(open, chain, base)?;
        // Everything was synced by now. What was read of a file in doubt may not be what was written.
        self.refuse_doubt_now(open)?;
        Ok(copied)
    }

    fn copy_changes(
        &self,
        open: &LayerId,
        chain: &[LayerId],
        base: Option<&LiveCopy>,
    ) -> Result<(Option<Layer>, LiveCopy)> {
        let diff = self.diff_dir(open);
        let usable = base.filter(|base| base.layers.iter().all(|id| self.sealed(id).is_ok()));
        if let Some(base) = usable
            && let Some(seen) = &base.seen
            && let Some((layer, seen)) = self.copy_tree(&diff, Some(seen), LayerWriters::Frozen)?
        {
            let newest = layer.iter().map(|layer| layer.id.clone());
            let layers = newest.chain(base.layers.iter().cloned()).collect();
            return Ok((layer, LiveCopy { layers, seen }));
        }
        if self.is_untouched_now(open)? {
            self.sync_now()?;
            return Ok((None, LiveCopy { layers: chain.to_vec(), seen: None }));
        }
        // A copy is new work: the session continues without it.
        self.refuse_beyond(self.usable()?.usable, measure(&diff)?.bytes)?;
        let (layer, seen) = self.copy_tree(&diff, None, LayerWriters::Frozen)?.unwrap_or_default();
        let copied = layer.iter().map(|layer| layer.id.clone());
        let layers = copied.chain(chain.iter().cloned()).collect();
        Ok((layer, LiveCopy { layers, seen }))
    }

    /// Copies what is not as it was in `old`, and answers with what it saw; `None` when only a whole
    /// copy will do.
    fn copy_tree(
        &self,
        diff: &Path,
        old: Option<&CopiedNames>,
        writers: LayerWriters,
    ) -> Result<Option<Stored>> {
        let (id, staging) = self.stage()?;
        let outcome = copy_into(self, diff, &staging.join("diff"), old, writers);
        failpoint::pass("store.copy_live.copied");
        let layer = match &outcome {
            Ok(Some((true, _))) => self.publish(&id, &staging, LayerKind::Checkpoint).map(Some),
            _ => Ok(None),
        };
        if !matches!(layer, Ok(Some(_))) {
            self.discard_dir(&staging, id.as_str())?;
        }
        let layer = layer?;
        if layer.is_none() {
            // Nothing new to store, but the pages must be clean for the next copy to be believed.
            self.sync_now()?;
        }
        Ok(outcome?.map(|(_, seen)| (layer, seen)))
    }
}

/// The result of a copy: the layer, if there was anything to copy, and what was seen.
type Stored = (Option<Layer>, Option<Arc<CopiedNames>>);

/// What was copied: whether there was anything, and what was seen.
type Copied = (bool, Option<Arc<CopiedNames>>);
