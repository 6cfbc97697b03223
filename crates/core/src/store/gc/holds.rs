//! Holds: keep layers from garbage collection until a manifest names them.
//!
//! Garbage collection removes layers that no manifest references. Between reading a chain and
//! writing the manifest that references it, a layer may be referenced by nothing; a [`LayerHold`]
//! keeps it in place for that time. No lock is held meanwhile: a copy, a compaction or a start
//! keeps only its hold, and the collector works on everything else.
//!
//! - A hold is *registered first*, and then its owner checks that the layer is still referenced or
//!   still exists. The collector marks a layer as *leaving* before it moves it, and looks for holds
//!   again after. So an owner that registers too late waits for at most two renames, and finds the
//!   layer back in its place.
//! - A layer that this process makes is *new* from before its directory exists until the collector sees that a
//!   manifest names it. A new layer that never was named, because the work that made it failed, stops being new
//!   after [`NEW_FOR`].

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use crate::model::{LayerId, MemoryId};
use crate::store::Store;

/// How long a layer that was never named by a manifest stays protected, on the monotonic clock.
const NEW_FOR: Duration = Duration::from_secs(3600);
/// How long a hold waits for a layer that is being moved. A move is two renames.
const MOVED_WITHIN: Duration = Duration::from_secs(10);

/// All holds of a store. The ids of layers and of memory layers differ.
#[derive(Debug, Default)]
pub(in crate::store) struct Holds {
    state: Mutex<HoldState>,
    /// Something that was leaving has left or is back.
    moved: Notify,
}

#[derive(Debug, Default)]
struct HoldState {
    held: HashMap<String, usize>,
    new: HashMap<String, Instant>,
    leaving: HashSet<String>,
}

impl HoldState {
    fn is_held(&self, id: &str) -> bool {
        self.held.contains_key(id)
            || self.new.get(id).is_some_and(|since| since.elapsed() < NEW_FOR)
    }
}

impl Holds {
    fn state(&self) -> MutexGuard<'_, HoldState> {
        self.state.lock()
    }

    /// Protects a layer that is about to be made.
    pub(in crate::store) fn protect_new(&self, id: &str) {
        self.state().new.insert(id.to_owned(), Instant::now());
    }

    /// Ends that: a manifest names the layer, or it was discarded.
    pub(in crate::store) fn unprotect(&self, id: &str) {
        self.state().new.remove(id);
    }

    /// Marks a layer as leaving, unless somebody holds it.
    pub(in crate::store) fn begin_move(&self, id: &str) -> bool {
        let mut state = self.state();
        let free = !state.is_held(id);
        if free {
            state.leaving.insert(id.to_owned());
        }
        free
    }

    /// Whether somebody holds it.
    pub(in crate::store) fn is_held(&self, id: &str) -> bool {
        self.state().is_held(id)
    }

    /// Says that a layer has left, or is back.
    pub(in crate::store) fn end_move(&self, id: &str) {
        self.state().leaving.remove(id);
        self.moved.notify_waiters();
    }
}

/// Keeps layers from being collected while it lives.
#[derive(Debug)]
pub struct LayerHold {
    holds: Arc<Holds>,
    mine: Mutex<Vec<String>>,
}

impl LayerHold {
    /// Holds layers. When this returns, a layer that existed exists, and stays.
    pub async fn layers(&self, layers: &[LayerId]) {
        self.register(layers.iter().map(LayerId::as_str)).await;
    }

    /// Holds memory layers.
    pub async fn memory(&self, layers: &[MemoryId]) {
        self.register(layers.iter().map(MemoryId::as_str)).await;
    }

    async fn register(&self, ids: impl Iterator<Item = &str>) {
        let ids: Vec<String> = ids.map(str::to_owned).collect();
        {
            let mut state = self.holds.state();
            for id in &ids {
                *state.held.entry(id.clone()).or_default() += 1;
            }
        }
        self.mine.lock().extend(ids.iter().cloned());
        let moved = async {
            loop {
                let wait = self.holds.moved.notified();
                tokio::pin!(wait);
                // Registered before the look: what is moved in between is noticed.
                wait.as_mut().enable();
                if !ids.iter().any(|id| self.holds.state().leaving.contains(id)) {
                    return;
                }
                wait.await;
            }
        };
        if tokio::time::timeout(MOVED_WITHIN, moved).await.is_err() {
            tracing::error!("moving a layer to or from the trash has taken longer than 10 s");
        }
    }
}

impl Drop for LayerHold {
    fn drop(&mut self) {
        let mut state = self.holds.state();
        for id in self.mine.get_mut() {
            if let Some(count) = state.held.get_mut(id) {
                *count -= 1;
                if *count == 0 {
                    state.held.remove(id);
                }
            }
        }
    }
}

impl Store {
    /// A hold on nothing yet.
    #[must_use]
    pub fn hold(&self) -> LayerHold {
        LayerHold { holds: Arc::clone(&self.inner.holds), mine: Mutex::default() }
    }

    /// Layers that somebody holds at this moment.
    #[must_use]
    pub fn held_layers(&self) -> HashSet<LayerId> {
        self.inner.holds.state().held.keys().filter_map(|id| id.parse().ok()).collect()
    }

    /// Everything that is held or new at this moment.
    #[must_use]
    pub fn pending(&self) -> HashSet<String> {
        let state = self.inner.holds.state();
        let new = state.new.iter().filter(|(_, since)| since.elapsed() < NEW_FOR);
        state.held.keys().chain(new.map(|(id, _)| id)).cloned().collect()
    }

    /// Says that manifests name these layers: they are new no longer.
    pub fn named<'a>(&self, ids: impl IntoIterator<Item = &'a str>) {
        let mut state = self.inner.holds.state();
        if !state.new.is_empty() {
            for id in ids {
                state.new.remove(id);
            }
            state.new.retain(|_, since| since.elapsed() < NEW_FOR);
        }
    }
}
