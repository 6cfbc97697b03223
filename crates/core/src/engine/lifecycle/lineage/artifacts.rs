//! Chosen files of a sandbox leave the server, as a tar stream.
//!
//! ```text
//! sandbox captured  →  its changes since its base, onto nothing: a new layer  →  read once, for its length
//!                   →  sent  →  the layer has no owner, and is collected
//! ```
//!
//! A layer keeps everything that an archive can say: links, modes, owners, times and attributes. It takes disk space for as long
//! as it is sent.

use std::fmt;
use std::io::{self, Write as _};
use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::{SemaphorePermit, mpsc};
use tokio_util::sync::CancellationToken;

use crate::engine::lifecycle::Lifecycle;
use crate::engine::lifecycle::lineage::merge::chosen;
use crate::engine::lifecycle::lineage::points::require_files;
use crate::engine::snapshots::Collector;
use crate::engine::snapshots::export::{MOST_EXPORTS, Sender, WhileWanted, export_turn};
use crate::engine::{Error, Result};
use crate::model::{LayerId, Name, SnapshotId};
use crate::store::{Globs, LayerHold, LeftOut, OntoChains, OntoOptions, Store, StoreError};

/// The end of an archive, and all of one that has no entries.
const EMPTY: [u8; 1024] = [0; 1024];

/// Files that are ready to be sent.
pub struct Artifacts {
    store: Store,
    /// The layer they are in; none if nothing was chosen.
    layer: Option<LayerId>,
    bytes: u64,
    left_out: LeftOut,
    snapshot: Option<SnapshotId>,
    collector: Arc<Collector>,
    hold: Option<LayerHold>,
    _turn: SemaphorePermit<'static>,
}

impl fmt::Debug for Artifacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { layer, bytes, snapshot, .. } = self;
        let mut shown = f.debug_struct("Artifacts");
        shown.field("layer", layer).field("bytes", bytes).field("snapshot", snapshot);
        shown.finish_non_exhaustive()
    }
}

impl Artifacts {
    /// The length of the stream.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What an archive cannot say.
    #[must_use]
    pub fn left_out(&self) -> &LeftOut {
        &self.left_out
    }

    /// The snapshot that they are of.
    #[must_use]
    pub fn snapshot(&self) -> Option<&SnapshotId> {
        self.snapshot.as_ref()
    }

    /// Sends them. A receiver that goes away, or takes nothing for two minutes, ends it.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Store`] when a file cannot be read.
    pub async fn send(self, into: mpsc::Sender<Bytes>) -> Result<()> {
        let Some(layer) = self.layer.clone() else {
            // Who does not receive it does not need it.
            let _ = into.send(Bytes::from_static(&EMPTY)).await;
            return Ok(());
        };
        // Its own thread, and none of those that wait for the disk: it waits for the receiver.
        let sent = tokio::task::spawn_blocking(move || {
            let into = io::BufWriter::with_capacity(64 << 10, Sender(into));
            let (mut into, _) = self.store.export_into(&layer, into)?;
            let lost =
                |source| StoreError::Io { action: "send", path: "the archive".into(), source };
            into.flush().map_err(lost)?;
            Ok(())
        });
        sent.await.map_err(|_| Error::ShuttingDown)?
    }
}

impl Drop for Artifacts {
    fn drop(&mut self) {
        // Nobody needs the layer any more.
        self.hold = None;
        if self.layer.is_some() && tokio::runtime::Handle::try_current().is_ok() {
            self.collector.collect_soon();
        }
    }
}

impl Lifecycle {
    /// Gets what a sandbox changed since its base, of the paths that match, ready to be sent. What it deleted is not in it.
    pub(in crate::engine) async fn artifacts(
        self: &Arc<Self>,
        project: &Name,
        name: &Name,
        only: Vec<String>,
    ) -> Result<Artifacts> {
        if only.is_empty() {
            return Err(Error::invalid("only", "name the paths to take; `/` is everything"));
        }
        let only = Globs::parse(&chosen(only)?)?;
        let turn = export_turn().ok_or(Error::TooManyExports(MOST_EXPORTS))?;
        let fork = self.find(project, name).await?;
        let base = self.resolve_base(&fork).await?;
        self.require_readable(&fork)?;
        let snapshot = self.capture_fork(&fork, None).await?;
        require_files(&snapshot)?;
        let theirs = self.resolve_snapshot(&snapshot.id, None).await?;
        let exclude = &fork.config.exclude;
        let exclude = (!exclude.is_empty()).then(|| Globs::parse(exclude)).transpose()?;
        let chains =
            OntoChains { from: base.layers.clone(), to: theirs.layers.clone(), onto: Vec::new() };
        let options = OntoOptions { only: Some(only), exclude, ..OntoOptions::default() };
        let turn_of_project = self.comparing.turn(&fork.project).await?;
        let outcome = self.store.put_onto(chains, options).await?;
        drop(turn_of_project);
        let collector = Arc::clone(&self.storage.collector);
        let mut artifacts = Artifacts {
            store: self.store.clone(),
            layer: None,
            bytes: EMPTY.len() as u64,
            left_out: LeftOut::default(),
            snapshot: theirs.snapshot.clone(),
            collector,
            hold: None,
            _turn: turn,
        };
        if let Some(layer) = outcome.layer {
            let hold = self.store.hold();
            hold.layers(std::slice::from_ref(&layer.id)).await;
            (artifacts.layer, artifacts.hold) = (Some(layer.id.clone()), Some(hold));
            let unwanted = CancellationToken::new();
            let _unwanted_on_drop = unwanted.clone().drop_guard();
            let (_, exported) = self.store.export(&layer.id, WhileWanted(unwanted)).await?;
            (artifacts.bytes, artifacts.left_out) = (exported.bytes, exported.left_out);
        }
        Ok(artifacts)
    }
}
