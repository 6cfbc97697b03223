//! The changes of a catalog, for whoever follows them. Nobody does yet: see "Watching" at [`Catalog`](super::Catalog).

use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;

use crate::model::{Revision, SandboxId};

/// How many changes a watcher may be behind before it loses the oldest.
const KEPT: usize = 1024;

/// A change of a sandbox's record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CatalogChange {
    /// The sandbox.
    pub sandbox: SandboxId,
    /// The revision that it is at; of one that was removed, the last it had.
    pub revision: Revision,
    /// Whether it was removed.
    pub removed: bool,
}

/// What a watcher is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CatalogEvent {
    /// A record changed.
    Changed(CatalogChange),
    /// The watcher fell behind, and this many changes are lost to it. It has to read everything again.
    Missed(u64),
}

/// Tells watchers what changes. Part of every catalog.
#[derive(Debug)]
pub struct CatalogFeed(broadcast::Sender<CatalogChange>);

impl Default for CatalogFeed {
    fn default() -> Self {
        Self::keeping(KEPT)
    }
}

impl CatalogFeed {
    /// One whose watchers may be `kept` changes behind.
    #[must_use]
    pub fn keeping(kept: usize) -> Self {
        Self(broadcast::Sender::new(kept))
    }

    /// Tells that a sandbox was saved or restored.
    pub fn saved(&self, sandbox: &SandboxId, revision: Revision) {
        self.tell(sandbox, revision, false);
    }

    /// Tells that a sandbox was removed.
    pub fn removed(&self, sandbox: &SandboxId, revision: Revision) {
        self.tell(sandbox, revision, true);
    }

    /// A watcher of what comes from now on.
    #[must_use]
    pub fn watch(&self) -> CatalogWatch {
        CatalogWatch(self.0.subscribe())
    }

    fn tell(&self, sandbox: &SandboxId, revision: Revision, removed: bool) {
        // Usually nobody watches: then nothing is made.
        if self.0.receiver_count() > 0 {
            let sandbox = sandbox.clone();
            let _ = self.0.send(CatalogChange { sandbox, revision, removed });
        }
    }
}

/// Follows the changes of a catalog.
#[derive(Debug)]
pub struct CatalogWatch(broadcast::Receiver<CatalogChange>);

impl CatalogWatch {
    /// Waits for the next event; `None` when the catalog is gone.
    pub async fn next(&mut self) -> Option<CatalogEvent> {
        match self.0.recv().await {
            Ok(change) => Some(CatalogEvent::Changed(change)),
            Err(RecvError::Lagged(missed)) => Some(CatalogEvent::Missed(missed)),
            Err(RecvError::Closed) => None,
        }
    }
}
