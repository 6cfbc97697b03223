//! Compaction of memory layers.
//!
//! A pause adds a layer to the image it was woken from, and a layer is a disk that every later machine has open. So when a pause has
//! made a chain longer than [`Settings::memory_limit`](crate::engine::Settings), some of its topmost layers are merged into one (`KeepsMemory::merge`),
//! and the snapshot names that one instead: the same memory and files, under the same id, generation and lineage.
//!
//! - *Which.* Half the limit at least, and whatever is below that is no larger than all above it together: so a layer is written again
//!   only when as much was added, and what is left are layers that each are larger than all above them, which cannot be many. Never the
//!   lowest, which decides what the disks stand on, and no template, which all machines of a kind share.
//! - *When.* In the background and not in the sandbox's turn: a start meanwhile uses the layers as
//!   they are, which are only read. A sandbox that is always woken too soon would never be
//!   compacted, so from [`URGENT`] layers on the pause does it before it answers.
//! - *What if not.* A daemon that dies over it leaves a layer that nothing references. A disk that
//!   cannot be merged stays as it is, and the chain keeps growing, up to what `pause` allows.
//!
//! Other snapshots and machines that stand on the layers hold them; who does not name them any more does not. Nothing is collected between
//! sealing what a run became and naming it, and a start holds the chain it reads (`references`).

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::driver::KeepsMemory;
use crate::engine::Result;
use crate::engine::error::error_chain;
use crate::engine::snapshots::Compaction;
use crate::failpoint;
use crate::model::{MemoryId, MemoryLayer, Sandbox, Snapshot, SnapshotId, Template};
use crate::store::{Durability, NewMemory};

/// From how many layers on it does not wait.
const URGENT: usize = DEEPEST_DISKS * 3 / 4;

impl Compaction {
    /// Checks the length of the chain that a pause left.
    pub(in crate::engine) async fn after_pause(
        self: &Arc<Self>,
        sandbox: &Sandbox,
        snapshot: &Snapshot,
    ) {
        let length = snapshot.memory.len();
        if length <= self.context.settings.memory_limit {
            return;
        }
        let (this, driver) = (Arc::clone(self), sandbox.config.driver.clone());
        let id = snapshot.id.clone();
        let work = async move {
            if let Err(error) = this.compact_memory(&driver, &id).await {
                tracing::warn!(snapshot = %id, error = error_chain(&error), "compaction of a snapshot's memory layers failed");
            }
        };
        if length >= URGENT {
            work.await;
        } else {
            let context = Arc::clone(&self.context);
            self.context.tasks.spawn(async move {
                // A caller that wakes it right away has the host to itself.
                if context.tasks.sleep(Duration::from_secs(1)).await {
                    work.await;
                }
            });
        }
    }

    /// Merges the topmost layers of a snapshot's memory.
    async fn compact_memory(&self, driver: &str, id: &SnapshotId) -> Result<()> {
        let driver = self.context.driver(driver)?;
        let Some(memory) = driver.memory() else { return Ok(()) };
        let _one = self.merges.acquire().await;
        let Some(snapshot) = self.db.snapshot(id).await? else { return Ok(()) };
        let templates = self.store.scan::<Template>().await?.good;
        let mut layers = Vec::new();
        for id in &snapshot.memory {
            layers.push(self.store.read::<MemoryLayer>(id).await?);
        }
        let own = |layer: &&MemoryLayer| templates.iter().all(|one| one.memory != layer.id);
        let own = layers.iter().take_while(own).count().min(layers.len().saturating_sub(1));
        let sizes: Vec<u64> = layers[..own].iter().map(|layer| layer.bytes).collect();
        let run = run_of(&sizes, self.context.settings.memory_limit / 2);
        if run < 2 {
            return Ok(());
        }
        let chain: Vec<MemoryId> = snapshot.memory[..run].to_vec();
        // It may be written once more in full, which nothing that is needed more must have to wait for.
        self.store.check_room(sizes[..run].iter().sum()).await?;
        let (merged, dir) = self.store.begin_memory().await?;
        let named = self.merge(memory, id, &chain, &layers[0], (&merged, &dir)).await;
        if named.is_err() {
            self.store.discard_memory(&merged).await?;
        }
        let length = named?.map_or(0, |snapshot| snapshot.memory.len());
        tracing::info!(snapshot = %id, merged = run, length, "memory layers of a snapshot were compacted");
        Ok(())
    }

    /// Writes what a run is together, and has the snapshot name it.
    async fn merge(
        &self,
        memory: &dyn KeepsMemory,
        snapshot: &SnapshotId,
        run: &[MemoryId],
        top: &MemoryLayer,
        (id, dir): (&MemoryId, &Path),
    ) -> Result<Option<Snapshot>> {
        let hold = self.store.hold();
        hold.memory(run).await;
        memory.merge(&self.references.memory_dirs(run), dir).await?;
        let disk = top.disk().map(|(name, _)| name.to_owned());
        let MemoryLayer { fingerprint, ram, roots, .. } = top.clone();
        let new = NewMemory { fingerprint, ram, roots, disk };
        let merged = self.store.seal_memory(id, new).await?;
        self.references.count_memory_layer(&merged);
        failpoint::pass("memory_compaction.sealed");
        let changed = self.snapshots.change_snapshot(snapshot, Durability::Synced, |snapshot| {
            if snapshot.memory.starts_with(run) {
                snapshot.memory.splice(..run.len(), [merged.id]);
            }
        });
        let changed = changed.await?;
        failpoint::pass("memory_compaction.done");
        Ok(changed)
    }
}

/// How many of the topmost layers are merged, by their sizes.
fn run_of(sizes: &[u64], least: usize) -> usize {
    let mut run = least.min(sizes.len());
    let mut together: u64 = sizes[..run].iter().sum();
    while let Some(below) = sizes.get(run).filter(|below| **below <= together) {
        together += below;
        run += 1;
    }
    run
}

/// How many captures a disk may stand on. Each is a file that every later machine has open. Pauses merge them (`compact_memory`), a stop makes
/// them one; what is captured of a machine that runs on is not merged under it.
pub(in crate::engine) const DEEPEST_DISKS: usize = 64;

#[cfg(test)]
mod tests {
    use super::run_of;

    #[test]
    fn what_is_large_is_written_seldom() {
        assert_eq!(run_of(&[], 8), 0);
        assert_eq!(run_of(&[1; 20], 8), 20);
        assert_eq!(run_of(&[1, 1, 1, 1, 100, 1], 4), 4);
        assert_eq!(run_of(&[1, 1, 2, 4, 8, 17], 2), 5);
        // A hundred thousand pauses: the chain stays short, and little is written more than a few times.
        let (mut chain, mut written, mut longest) = (Vec::new(), 0u64, 0);
        for _ in 0..100_000 {
            chain.insert(0, 10u64);
            if chain.len() > 16 {
                let run = run_of(&chain, 8);
                let merged: u64 = chain[..run].iter().sum();
                written += merged;
                chain.splice(..run, [merged]);
            }
            longest = longest.max(chain.len());
        }
        assert!(longest <= 24, "{longest}");
        assert!(written / 1_000_000 <= 20, "{written}");
    }
}
