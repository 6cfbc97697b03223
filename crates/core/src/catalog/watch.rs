//! The watchers of a catalog's saves: see "Watching" at [`Catalog`](super::Catalog).

use std::fmt;
use std::sync::Weak;

use parking_lot::RwLock;

use crate::model::{Sandbox, Snapshot};

/// Is notified of what a catalog saves. Called while the save is in progress, so it must not block.
pub trait CatalogWatcher: fmt::Debug + Send + Sync {
    /// A sandbox was saved, and with it the snapshot of a [`commit`](super::Catalog::commit).
    fn saved(&self, sandbox: &Sandbox, snapshot: Option<&Snapshot>);

    /// A sandbox was removed; this was its last version.
    fn removed(&self, sandbox: &Sandbox);
}

/// The watchers of a catalog. Part of every implementation.
#[derive(Debug, Default)]
pub struct CatalogWatchers(RwLock<Vec<Weak<dyn CatalogWatcher>>>);

impl CatalogWatchers {
    /// Adds one, until it is dropped.
    pub fn add(&self, watcher: Weak<dyn CatalogWatcher>) {
        let mut watchers = self.0.write();
        watchers.retain(|watcher| watcher.strong_count() > 0);
        watchers.push(watcher);
    }

    /// Notifies the watchers that a sandbox was saved.
    pub fn saved(&self, sandbox: &Sandbox, snapshot: Option<&Snapshot>) {
        self.0.read().iter().filter_map(Weak::upgrade).for_each(|it| it.saved(sandbox, snapshot));
    }

    /// Notifies the watchers that a sandbox was removed.
    pub fn removed(&self, sandbox: &Sandbox) {
        self.0.read().iter().filter_map(Weak::upgrade).for_each(|it| it.removed(sandbox));
    }
}
