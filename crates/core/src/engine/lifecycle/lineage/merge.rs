//! Merge: the changes of one sandbox get into another one.
//!
//! ```text
//! source captured  →  target still running: conflicts? refused, and its session goes on
//!                  →  target stopped  →  merged layer built  →  snapshot with it committed  →  noted at the source
//! ```
//!
//! The merged layer goes on top of the target's current snapshot, in the target's turn. A daemon that dies before
//! the commit leaves a layer that nobody names; after it, a source that does not remember the merge, so that the
//! next one begins at an older ancestor and finds that both sides changed to the same.

use std::sync::Arc;

use crate::engine::lifecycle::Lifecycle;
use crate::engine::lifecycle::lineage::ancestor::Ancestor;
use crate::engine::lifecycle::lineage::points::{ResolvedPoint, require_files};
use crate::engine::lifecycle::sandbox::expect_generation;
use crate::engine::lifecycle::stop::SnapshotOptions;
use crate::engine::running::turns::Slot;
use crate::engine::{Error, MergeRequest, Merged, Result};
use crate::failpoint;
use crate::model::{
    BroughtBack, Ending, ForkOutcome, LayerId, MergePoint, Method, Name, Point, Sandbox, SandboxId,
    SessionEnd, Snapshot, SnapshotId, SnapshotKind, now,
};
use crate::store::{Globs, MergeChains, MergeOptions, MergeOutcome};

/// How many merges a sandbox remembers. Of an older one the next merge begins at an older ancestor.
const REMEMBERED: usize = 32;
/// How many conflicts an error names.
const NAMED: usize = 5;

impl Lifecycle {
    pub(in crate::engine) async fn merge(
        self: &Arc<Self>,
        project: &Name,
        name: &Name,
        request: MergeRequest,
    ) -> Result<Merged> {
        Globs::parse(&request.only)?;
        let source = self.find(project, name).await?;
        let target = match (&request.into, &source.forked_from) {
            (Some(into), _) => self.find(project, into).await?,
            (None, Some(from)) => self.origin_of(&source, from).await?,
            (None, None) => return Err(Error::NoOrigin { fork: name.clone() }),
        };
        if source.id == target.id {
            return Err(Error::invalid("into", "a sandbox cannot be merged into itself"));
        }
        expect_generation(&target, request.expect_generation)?;
        self.common_ancestor(&source, &target).await?;
        // A dry run leaves the source alone.
        let (theirs, taken) = if request.dry_run {
            (self.resolve_point(project, &Point::Now(name.clone())).await?, None)
        } else {
            let snapshot = self.capture_source(&source).await?;
            require_files(&snapshot)?;
            let resolved = self.resolve_snapshot(&snapshot.id, None).await?;
            (resolved, Some(snapshot))
        };
        failpoint::pass("merge.captured");
        let (id, into, from) = (target.id.clone(), target.name.clone(), source.clone());
        let work = self.turn(target.id.clone(), move |this, slot| async move {
            let mut target = this.reread(&slot, &id, &into).await?;
            expect_generation(&target, request.expect_generation)?;
            this.merge_into(&slot, &mut target, &from, &theirs, &request).await
        });
        let merged = work.await?;
        failpoint::pass("merge.committed");
        if let Some(taken) = taken
            && request_took_all(&merged)
        {
            self.note_merge(&source, &target.id, &taken.id, &merged).await?;
        }
        Ok(merged)
    }

    /// The source as it is, as a snapshot.
    async fn capture_source(self: &Arc<Self>, source: &Sandbox) -> Result<Snapshot> {
        let (id, name) = (source.id.clone(), source.name.clone());
        self.turn(source.id.clone(), move |this, slot| async move {
            let mut source = this.reread(&slot, &id, &name).await?;
            let (kind, wanted) = (SnapshotKind::Checkpoint, SnapshotOptions::default());
            match this.snapshot_now(&slot, &mut source, kind, wanted.clone()).await? {
                Some(snapshot) => Ok(snapshot),
                None => this.snapshot_image(&mut source, kind, wanted).await,
            }
        })
        .await
    }

    async fn merge_into(
        self: &Arc<Self>,
        slot: &Arc<Slot>,
        target: &mut Sandbox,
        source: &Sandbox,
        theirs: &ResolvedPoint,
        request: &MergeRequest,
    ) -> Result<Merged> {
        let base = self.base_of(source, target).await?;
        let options = |dry_run| -> Result<MergeOptions> {
            let only = match request.only.is_empty() {
                true => None,
                false => Some(Globs::parse(&request.only)?),
            };
            let keep_both = request.keep_both.then(|| source.name.to_string());
            Ok(MergeOptions { only, keep_both, dry_run })
        };
        let chains = |ours: Vec<LayerId>| MergeChains {
            base: base.layers.clone(),
            ours,
            theirs: theirs.layers.clone(),
        };
        let runs = target.open_layer().is_some();
        if runs || request.dry_run {
            // Nobody's session is ended for a merge that is refused then.
            let point = Point::Now(target.name.clone());
            let ours = match self.resolve_point(&target.project, &point).await {
                Ok(ours) => Some(ours),
                // Only a stop makes its files readable.
                Err(Error::FilesNotReadable { .. }) if !request.dry_run => None,
                Err(error) => return Err(error),
            };
            if let Some(ours) = ours {
                let trial =
                    self.store.merge_trees(chains(ours.layers.clone()), options(true)?).await?;
                if request.dry_run {
                    return Ok(Merged {
                        outcome: trial,
                        sandbox: target.clone(),
                        snapshot: None,
                        all: request.only.is_empty(),
                    });
                }
                refuse_conflicts(target, source, &trial)?;
            }
        }
        if runs || target.phase() == crate::model::Phase::Paused {
            self.stop_for_merge(slot, target).await?;
        }
        let ours = self.resolve_saved(target).await?;
        let outcome = self.store.merge_trees(chains(ours.layers.clone()), options(false)?).await?;
        refuse_conflicts(target, source, &outcome)?;
        let mut snapshot = None;
        if let Some(layer) = &outcome.layer {
            self.references.count_layer(layer);
            failpoint::pass("merge.built");
            let layers: Vec<LayerId> =
                std::iter::once(layer.id.clone()).chain(ours.layers.iter().cloned()).collect();
            let wanted = SnapshotOptions { method: Method::Manual, ..SnapshotOptions::default() };
            let id = SnapshotId::of_layer(&layer.id);
            let new = self.new_snapshot(target, id, layers, SnapshotKind::Merge, wanted);
            self.commit(target, &new).await?;
            self.context.events.merged(target, &source.name);
            self.storage.snapshots.try_to_retain(target).await;
            self.storage.compaction.after_stop(target);
            snapshot = Some(new);
        }
        let all = request.only.is_empty();
        Ok(Merged { outcome, sandbox: target.clone(), snapshot, all })
    }

    async fn base_of(&self, source: &Sandbox, target: &Sandbox) -> Result<ResolvedPoint> {
        // Its record is read again: another merge may have been noted meanwhile.
        let source = self.db.sandbox_by_id(&source.id).await?.unwrap_or_else(|| source.clone());
        match self.common_ancestor(&source, target).await? {
            Ancestor::Snapshot(id) => self.resolve_snapshot(&id, None).await,
            Ancestor::Image => Ok(self.resolve_image_of(target).await),
        }
    }

    /// Stops the target as if somebody had asked for it.
    async fn stop_for_merge(
        self: &Arc<Self>,
        slot: &Arc<Slot>,
        target: &mut Sandbox,
    ) -> Result<()> {
        if target.phase() == crate::model::Phase::Paused {
            // Its files are on a disk that only its own kernel reads.
            let live = self.start_session(slot, target.clone(), false).await?;
            *target = (*live.sandbox()).clone();
        }
        let ending =
            Ending { always: true, ..Ending::by_itself(SnapshotKind::Stop, SessionEnd::Stopped) };
        self.end_session(slot, target, ending).await?;
        Ok(())
    }

    async fn note_merge(
        self: &Arc<Self>,
        source: &Sandbox,
        into: &SandboxId,
        taken: &SnapshotId,
        merged: &Merged,
    ) -> Result<()> {
        let outcome = ForkOutcome {
            how: BroughtBack::Merged,
            into: merged.sandbox.name.clone(),
            generation: merged.sandbox.generation,
            at: now(),
        };
        let point = MergePoint { into: into.clone(), snapshot: taken.clone() };
        self.note_brought_back(source, outcome, move |source| {
            source.merged.retain(|merge| merge.into != point.into);
            source.merged.push(point);
            let surplus = source.merged.len().saturating_sub(REMEMBERED);
            source.merged.drain(..surplus);
        })
        .await
    }
}

/// Whether the target has all that the source had. After a merge of chosen paths the next one begins where this one did.
fn request_took_all(merged: &Merged) -> bool {
    merged.all
}

fn refuse_conflicts(target: &Sandbox, source: &Sandbox, outcome: &MergeOutcome) -> Result<()> {
    if outcome.conflicts.is_empty() {
        return Ok(());
    }
    let conflicts = outcome.conflicts.clone();
    let named: Vec<String> = conflicts
        .iter()
        .take(NAMED)
        .map(|conflict| format!("{} ({})", conflict.path, conflict.reason))
        .collect();
    Err(Error::MergeConflicts {
        from: source.name.clone(),
        into: target.name.clone(),
        count: outcome.counts.conflicts,
        named: named.join("; "),
        conflicts,
    })
}
