//! Compaction: keeps chains of layers short, so that every acknowledged snapshot can be mounted.
//!
//! Every checkpoint and every stop adds a layer. The kernel limits their number
//! (`agent/src/overlay.rs`), and a name is looked up in all of them. So some of the topmost layers
//! of a chain are made one now and then (`store/layer/compact.rs`), and the snapshot names that one
//! instead: the same files under the same id, generation and lineage. Older snapshots keep the
//! layers they name.
//!
//! - *Which.* A quarter of [`chain_limit`](crate::engine::Settings::chain_limit) at least, and whatever is below that holds less
//!   than twice as many names as all above it together. So a name is linked again only after as many were added, which is
//!   a logarithmic number of times, and what is left are layers that each are at least twice as large as the one above,
//!   which cannot be many. Layers of the image are shared with others and stay, unless there are too many of them for an old kernel.
//! - *When.* In the background, after a snapshot with more than `chain_limit` layers of its own; layers are never changed, so
//!   neither the sandbox's turn nor any lock is held meanwhile. When that does not keep up, a checkpoint or a
//!   start that finds [`chain_bound`](crate::engine::Settings::chain_bound) layers does it itself, before it begins. So no chain is
//!   ever longer than `chain_bound` and one, which every supported kernel can mount.
//! - *A session under way* stands on the layers it was mounted with. Which of them were made one since is remembered
//!   ([`Chains`]): the next checkpoint that exchanges the root mounts the shorter chain, and snapshots name it.
//! - *A crash of the daemon* during it leaves an unreferenced layer. What was remembered is lost
//!   with it, and chains grow until one of the bounds is met again.

pub(in crate::engine) mod memory;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::engine::error::error_chain;
use crate::engine::snapshots::Compaction;
use crate::engine::{Error, Result};
use crate::failpoint;
use crate::keyed_lock::{KeyGuard, KeyedLock};
use crate::model::{LayerId, Sandbox, SandboxId, Snapshot, SnapshotId};
use crate::store::{Durability, Effort, LayerHold};

/// How many layers a chain may have with its image's: what Linux before 6.8 can mount.
const MOST_LAYERS: usize = 100;
/// How many merges are remembered for a session.
const REMEMBERED: usize = 16;
/// How many merges run in the background at one time.
const AT_ONCE: usize = 2;

/// Layers that were made one.
#[derive(Debug, Clone, PartialEq, Eq)]
struct MergedRun {
    run: Vec<LayerId>,
    into: LayerId,
}

/// What was merged lately, and for whom something is being merged.
#[derive(Debug)]
pub(in crate::engine) struct Chains {
    merged: Mutex<HashMap<SandboxId, VecDeque<MergedRun>>>,
    /// The chain of a sandbox is compacted by one task at a time.
    merging: KeyedLock<SandboxId>,
    pub(in crate::engine) few: tokio::sync::Semaphore,
}

impl Default for Chains {
    fn default() -> Self {
        let few = tokio::sync::Semaphore::new(AT_ONCE);
        Self { merged: Mutex::default(), merging: KeyedLock::default(), few }
    }
}

impl Chains {
    /// The same files in fewer layers, as far as is known, and which merges that takes.
    fn compacted(&self, id: &SandboxId, layers: &[LayerId]) -> (Vec<LayerId>, Vec<LayerId>) {
        let mut short = layers.to_vec();
        let mut used = Vec::new();
        for MergedRun { run, into } in self.merged.lock().get(id).into_iter().flatten() {
            if replace(&mut short, run, into) {
                used.push(into.clone());
            }
        }
        (short, used)
    }

    fn remember(&self, id: &SandboxId, run: Vec<LayerId>, into: LayerId) {
        let mut merged = self.merged.lock();
        let known = merged.entry(id.clone()).or_default();
        if known.len() >= REMEMBERED {
            known.pop_front();
        }
        known.push_back(MergedRun { run, into });
    }

    fn forget_merge(&self, id: &SandboxId, into: &LayerId) {
        if let Some(known) = self.merged.lock().get_mut(id) {
            known.retain(|merged| merged.into != *into);
        }
    }

    /// Nothing needs to be known of a sandbox any more: it has no session.
    pub(in crate::engine) fn forget(&self, id: &SandboxId) {
        self.merged.lock().remove(id);
    }
}

impl Compaction {
    /// How many of the topmost layers of a chain may be merged.
    fn own_layers(sandbox: &Sandbox, layers: &[LayerId]) -> usize {
        // There are more than an old kernel can mount: then those of the image are merged as well.
        if layers.len() >= MOST_LAYERS {
            return layers.len();
        }
        layers.iter().take_while(|layer| !sandbox.image_layers.contains(layer)).count()
    }

    /// A chain with all that was merged since it was put together. The merged layers in it exist,
    /// and stay as long as `hold` lives.
    pub(in crate::engine) async fn compacted_chain(
        &self,
        hold: &LayerHold,
        id: &SandboxId,
        layers: &[LayerId],
    ) -> Vec<LayerId> {
        'again: loop {
            let (short, used) = self.chains.compacted(id, layers);
            hold.layers(&used).await;
            for into in used {
                if self.store.layer(&into).await.is_err() {
                    // The snapshot that named it is gone, and it was collected.
                    self.chains.forget_merge(id, &into);
                    continue 'again;
                }
            }
            return short;
        }
    }

    /// Compacts the chain of a snapshot in the background, after the snapshot was acknowledged, and then the chains of
    /// snapshots that were taken meanwhile.
    pub(in crate::engine) fn after_snapshot(
        self: &Arc<Self>,
        sandbox: &Sandbox,
        snapshot: &Snapshot,
    ) {
        if !self.is_too_long(sandbox, snapshot) {
            return;
        }
        let Some(turn) = self.chains.merging.try_lock(&sandbox.id) else {
            return; // Whoever has it looks at the newest snapshot when it is done.
        };
        let (this, sandbox, id) = (Arc::clone(self), sandbox.clone(), snapshot.id.clone());
        self.context.tasks.spawn(async move {
            let Ok(few) = this.chains.few.acquire().await else { return };
            let compacted = this.compact_snapshot(&turn, &sandbox, &id, false).await;
            // The locks go first: a snapshot that comes after the look below finds them free.
            drop((turn, few));
            match compacted {
                Ok(shorter) => this.after_compaction(&sandbox, &id, shorter).await,
                Err(error) => {
                    tracing::warn!(snapshot = %id, error = error_chain(&error), "compaction of a snapshot's layer chain failed");
                }
            }
        });
    }

    fn is_too_long(&self, sandbox: &Sandbox, snapshot: &Snapshot) -> bool {
        let own = Self::own_layers(sandbox, &snapshot.layers);
        own > self.context.settings.chain_limit && !snapshot.has_memory()
    }

    /// Continues with the snapshot that a sandbox has now: a newer one, or one that became shorter
    /// and is still too long.
    async fn after_compaction(self: &Arc<Self>, sandbox: &Sandbox, id: &SnapshotId, shorter: bool) {
        let newest = async {
            let Some(sandbox) = self.context.db.sandbox_by_id(&sandbox.id).await? else {
                return Ok(());
            };
            match self.records.current_snapshot(&sandbox).await? {
                Some(newest) if shorter || newest.id != *id => {
                    self.after_snapshot(&sandbox, &newest);
                }
                _ => {}
            }
            Ok::<_, Error>(())
        };
        if let Err(error) = newest.await {
            tracing::warn!(sandbox = %sandbox.name, error = error_chain(&error), "the newest snapshot of a sandbox cannot be read, and is not compacted");
        }
    }

    /// The same some time after a stop, when no caller waits.
    pub(in crate::engine) fn after_stop(self: &Arc<Self>, sandbox: &Sandbox) {
        let (this, sandbox) = (Arc::clone(self), sandbox.clone());
        self.context.tasks.spawn(async move {
            // A caller that wakes it right away goes first.
            if !this.context.tasks.sleep(Duration::from_secs(1)).await {
                return;
            }
            if let Ok(Some(snapshot)) = this.records.current_snapshot(&sandbox).await {
                this.after_snapshot(&sandbox, &snapshot);
            }
        });
    }

    /// Makes sure that a session under way can take one more layer. Before anything else is done about it.
    pub(in crate::engine) async fn bound_session(
        &self,
        sandbox: &Sandbox,
        copied: Option<&[LayerId]>,
    ) -> Result<()> {
        let bound = self.context.settings.chain_bound;
        for layers in [Some(sandbox.open_chain()), copied].into_iter().flatten() {
            let (short, _) = self.chains.compacted(&sandbox.id, layers);
            if Self::own_layers(sandbox, &short) < bound {
                continue;
            }
            // What is being merged in the background may be enough.
            let _turn = self.chains.merging.lock(&sandbox.id).await;
            let hold = self.store.hold();
            let short = self.compacted_chain(&hold, &sandbox.id, layers).await;
            let own = Self::own_layers(sandbox, &short);
            if own < bound {
                continue;
            }
            tracing::info!(sandbox = %sandbox.name, layers = own, "compacting a layer chain before a checkpoint");
            let Some(run) = self.run_of(&short[..own], true).await? else { continue };
            let merged = self.store.compact(&short[..run], Effort::Foreground).await?;
            self.references.count_layer(&merged);
            self.chains.remember(&sandbox.id, short[..run].to_vec(), merged.id);
        }
        Ok(())
    }

    /// Makes sure that what a session is about to start from can be mounted.
    pub(in crate::engine) async fn bound_start(&self, sandbox: &Sandbox) -> Result<()> {
        let Some(snapshot) = self.records.current_snapshot(sandbox).await? else { return Ok(()) };
        let own = Self::own_layers(sandbox, &snapshot.layers);
        // A machine in memory has its root mounted from these very layers.
        if own < self.context.settings.chain_bound || snapshot.has_memory() {
            return Ok(());
        }
        let turn = self.chains.merging.lock(&sandbox.id).await;
        tracing::info!(sandbox = %sandbox.name, layers = own, "compacting a layer chain before a start");
        let compacted = self.compact_snapshot(&turn, sandbox, &snapshot.id, true).await;
        may_go_on(compacted, &snapshot.layers)
    }

    /// Merges the topmost layers of a snapshot. Answers whether its chain is shorter now.
    async fn compact_snapshot(
        &self,
        _turn: &KeyGuard<SandboxId>,
        sandbox: &Sandbox,
        id: &SnapshotId,
        urgent: bool,
    ) -> Result<bool> {
        // The layers that are read stay, and so does the one that is made: it is new until a manifest names it.
        let (_hold, snapshot) = self.references.hold_snapshot(id).await?;
        let Some(snapshot) = snapshot else { return Ok(false) };
        let own = Self::own_layers(sandbox, &snapshot.layers);
        let Some(run) = self.run_of(&snapshot.layers[..own], urgent).await? else {
            return Ok(false);
        };
        let run = snapshot.layers[..run].to_vec();
        // No lock is held: this may take long.
        let merged = self.store.compact(&run, effort(urgent)).await?;
        failpoint::pass("compaction.merged");
        self.references.count_layer(&merged);
        let mut named = false;
        let changed = self.snapshots.change_snapshot(id, Durability::Synced, |snapshot| {
            named = snapshot.layers.starts_with(&run) && !snapshot.has_memory();
            if named {
                snapshot.layers.splice(..run.len(), [merged.id.clone()]);
            }
        });
        let changed = changed.await?;
        failpoint::pass("compaction.done");
        if named && let Some(snapshot) = changed {
            let (merged_layers, left) = (run.len(), snapshot.layers.len());
            tracing::debug!(snapshot = %id, merged_layers, left, "its layer chain was compacted");
            self.chains.remember(&sandbox.id, run, merged.id);
        }
        Ok(named)
    }

    /// How many of the topmost of these layers are to be merged, if any.
    pub(in crate::engine) async fn run_of(
        &self,
        layers: &[LayerId],
        urgent: bool,
    ) -> Result<Option<usize>> {
        let limit = self.context.settings.chain_limit;
        if layers.len() <= limit {
            return Ok(None);
        }
        let mut names = Vec::with_capacity(layers.len());
        for layer in layers {
            names.push(self.store.layer(layer).await?.files + 1);
        }
        let run = run_of(&names, limit / 4, if urgent { limit } else { usize::MAX });
        Ok((run >= 2).then_some(run))
    }
}

/// With which effort layers are merged: somebody waits for what is urgent.
pub(in crate::engine) fn effort(urgent: bool) -> Effort {
    if urgent { Effort::Foreground } else { Effort::Background }
}

/// A failed compaction does not matter as long as the chain can still be mounted.
pub(in crate::engine) fn may_go_on<T>(compacted: Result<T>, layers: &[LayerId]) -> Result<()> {
    match compacted {
        Err(error) if layers.len() <= MOST_LAYERS => {
            tracing::warn!(error = error_chain(&error), "compaction of a layer chain failed");
            Ok(())
        }
        compacted => compacted.map(|_| ()),
    }
}

/// Puts `into` in the place of `run`, if that exists.
pub(in crate::engine) fn replace(
    layers: &mut Vec<LayerId>,
    run: &[LayerId],
    into: &LayerId,
) -> bool {
    let Some(first) = run.first() else { return false };
    let Some(at) = layers.iter().position(|layer| layer == first) else { return false };
    if !layers[at..].starts_with(run) {
        return false;
    }
    layers.splice(at..at + run.len(), [into.clone()]);
    true
}

/// How many of the topmost layers are merged, by how many names they hold: `least`, and what is not much larger than those, and
/// as many as it takes for `most` to be left.
fn run_of(names: &[u64], least: usize, most: usize) -> usize {
    let mut run = least.max(2).min(names.len());
    let mut together = names[..run].iter().fold(0u64, |sum, names| sum.saturating_add(*names));
    while let Some(next) = names.get(run) {
        if *next >= together.saturating_mul(2) && names.len() - run < most {
            break;
        }
        together = together.saturating_add(*next);
        run += 1;
    }
    run
}

#[cfg(test)]
mod tests {
    use super::{Chains, replace, run_of};
    use crate::model::{LayerId, SandboxId};

    /// Takes a snapshot after every write of `names(n)` names, and merges as the engine does.
    fn simulate(snapshots: u64, names: impl Fn(u64) -> u64) -> (usize, u64, u64) {
        let (mut chain, mut longest, mut linked, mut written): (Vec<u64>, _, _, _) =
            (Vec::new(), 0, 0, 0);
        for n in 0..snapshots {
            chain.insert(0, names(n));
            written += names(n);
            longest = longest.max(chain.len());
            if chain.len() > 24 {
                let run = run_of(&chain, 6, usize::MAX);
                let sum = chain[..run].iter().sum();
                linked += sum;
                chain.splice(..run, [sum]);
            }
        }
        (longest, linked, written)
    }

    #[test]
    fn chains_stay_short_and_names_are_linked_few_times() {
        for (what, names) in [
            ("one file each", (|_| 2) as fn(u64) -> u64),
            ("growing", |n| n + 1),
            ("shrinking", |n| 100_000 - n),
            ("a large one now and then", |n| if n % 97 == 0 { 50_000 } else { 3 }),
            ("doubling", |n| 1 << (n % 30)),
        ] {
            let (longest, linked, written) = simulate(20_000, names);
            assert!(longest <= 32, "{what}: {longest} layers");
            let times = linked / written.max(1);
            assert!(times <= 20, "{what}: each name was linked {times} times");
        }
    }

    #[test]
    fn what_must_be_shorter_becomes_so() {
        // Each more than twice as large as all above: nothing would be merged but for the bound.
        let names: Vec<u64> = (0..60).map(|n| 4u64.saturating_pow(n.min(31))).collect();
        assert_eq!(run_of(&names, 6, usize::MAX), 6);
        let run = run_of(&names, 6, 24);
        assert!(names.len() - run < 24, "{run}");
        assert_eq!(run_of(&[1; 5000], 6, 24), 5000);
        assert_eq!(run_of(&[1], 6, 24), 1);
    }

    #[test]
    fn merges_are_applied_in_their_order() {
        let ids: Vec<LayerId> = (0..5).map(|_| LayerId::fresh()).collect();
        let [one, two] = [0; 2].map(|_| LayerId::fresh());
        let (chains, sandbox) = (Chains::default(), SandboxId::fresh());
        chains.remember(&sandbox, ids[1..3].to_vec(), one.clone());
        chains.remember(&sandbox, vec![ids[0].clone(), one.clone()], two.clone());
        let (short, used) = chains.compacted(&sandbox, &ids);
        assert_eq!(short, [two.clone(), ids[3].clone(), ids[4].clone()]);
        assert_eq!(used, [one, two.clone()]);
        // Another chain, which has only some of them in a row.
        let other = vec![ids[1].clone(), ids[4].clone()];
        assert_eq!(chains.compacted(&sandbox, &other).0, other);
        assert_eq!(chains.compacted(&SandboxId::fresh(), &ids).0, ids);
        chains.forget_merge(&sandbox, &two);
        assert_eq!(chains.compacted(&sandbox, &ids).0.len(), 4);
        assert!(!replace(&mut Vec::new(), &ids, &two));
    }
}
