//! Merge: brings the changes of one sandbox into another.
//!
//! ```text
//! source captured  →  target still running: conflicts? refused, and its session goes on
//!                  →  target stopped  →  merged layer built  →  snapshot with it committed  →  noted at the source
//! ```
//!
//! The merged layer goes on top of the target's current snapshot, in the target's turn. A daemon that dies before
//! the commit leaves a layer that nothing references; after it, a source whose record lacks the
//! merge. The snapshot has it, so the next merge begins there, and a repeated request reports that
//! the merge was done.

use std::collections::BTreeSet;
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
    BroughtBack, Ending, ForkOutcome, Layer, LayerId, MergePoint, MergeSource, Method, Name, Phase,
    Point, RunId, Sandbox, SandboxId, SessionEnd, Snapshot, SnapshotId, SnapshotKind, now,
};
use crate::store::{Globs, MergeChains, MergeOptions, MergeOutcome};

/// How many merges a sandbox remembers, and how many into the same one. Of an older one the next merge begins at an older
/// ancestor.
const REMEMBERED: usize = 32;
const REMEMBERED_OF_ONE: usize = 3;
/// How many conflicts an error names.
pub(super) const NAMED: usize = 5;
/// How many globs there may be, and how long they are together.
const MOST_GLOBS: usize = 1_000;
const LONGEST_GLOBS: usize = 64 << 10;
/// How many snapshots are passed to find one whose files can be read.
const PASSED: usize = 10_000;

/// What the result of a run was at its review.
#[derive(Debug, Clone)]
pub(in crate::engine) struct Reviewed {
    pub(in crate::engine) run: RunId,
    pub(in crate::engine) sandbox: SandboxId,
    pub(in crate::engine) snapshot: Option<SnapshotId>,
}

impl Reviewed {
    fn changed(&self, sandbox: &Sandbox) -> Error {
        Error::RunChanged { run: self.run.clone(), sandbox: sandbox.name.clone() }
    }
}

/// Refuses a sandbox that is not what was reviewed.
pub(in crate::engine) fn require_reviewed(
    reviewed: Option<&Reviewed>,
    sandbox: &Sandbox,
) -> Result<()> {
    match reviewed {
        Some(reviewed)
            if sandbox.id != reviewed.sandbox
                || sandbox.open_layer().is_some()
                || sandbox.current != reviewed.snapshot =>
        {
            Err(reviewed.changed(sandbox))
        }
        _ => Ok(()),
    }
}

impl Lifecycle {
    pub(in crate::engine) async fn merge(
        self: &Arc<Self>,
        project: &Name,
        name: &Name,
        request: MergeRequest,
    ) -> Result<Merged> {
        self.merge_reviewed(project, name, request, None).await
    }

    /// The same with a source that is still what was reviewed.
    pub(in crate::engine) async fn merge_reviewed(
        self: &Arc<Self>,
        project: &Name,
        name: &Name,
        request: MergeRequest,
        reviewed: Option<Reviewed>,
    ) -> Result<Merged> {
        let request = MergeRequest { only: chosen(request.only)?, ..request };
        let source = self.find(project, name).await?;
        require_reviewed(reviewed.as_ref(), &source)?;
        let target = match (&request.into, &source.forked_from) {
            (Some(into), _) => self.find(project, into).await?,
            (None, Some(from)) => self.origin_of(&source, from).await?,
            (None, None) => return Err(Error::NoOrigin { fork: name.clone() }),
        };
        if source.id == target.id {
            return Err(Error::invalid("into", "a sandbox cannot be merged into itself"));
        }
        let saved = source.current.clone();
        if self.merged_before(&target, &source, saved.as_ref(), &request).await?.is_none() {
            expect_generation(&target, request.expect_generation)?;
        }
        self.common_ancestor(&source, &target).await?;
        // A dry run leaves the source alone.
        let (theirs, taken) = if request.dry_run {
            (self.resolve_point(project, &Point::Now(name.clone())).await?, None)
        } else {
            self.require_readable(&source)?;
            let snapshot = self.capture_fork(&source, reviewed).await?;
            require_files(&snapshot)?;
            let resolved = self.resolve_snapshot(&snapshot.id, None).await?;
            (resolved, Some(snapshot))
        };
        failpoint::pass("merge.captured");
        let (id, into, from) = (target.id.clone(), target.name.clone(), source.clone());
        let work = self.turn(target.id.clone(), move |this, slot| async move {
            let mut target = this.reread(&slot, &id, &into).await?;
            let theirs_is = theirs.snapshot.as_ref();
            if let Some(done) = this.merged_before(&target, &from, theirs_is, &request).await? {
                return Ok(done);
            }
            expect_generation(&target, request.expect_generation)?;
            this.merge_into(&slot, &mut target, &from, &theirs, &request).await
        });
        let merged = work.await?;
        failpoint::pass("merge.committed");
        if let Some(taken) = taken.filter(|_| merged.all) {
            self.note_merge(&source, &target.id, &taken.id, &merged).await?;
        }
        Ok(merged)
    }

    /// The requested merge, if it was done before and its caller never got the answer: the target's
    /// generation is the one after the expected one, with all that the source's snapshot has.
    async fn merged_before(
        &self,
        target: &Sandbox,
        source: &Sandbox,
        theirs: Option<&SnapshotId>,
        request: &MergeRequest,
    ) -> Result<Option<Merged>> {
        let is_next = request.expect_generation.is_some_and(|at| at + 1 == target.generation);
        if !is_next || request.dry_run || !request.only.is_empty() {
            return Ok(None);
        }
        let current = self.records.current_snapshot(target).await?;
        let is_it = |snapshot: &Snapshot| {
            let merged = snapshot.merged.as_ref();
            merged.is_some_and(|one| one.sandbox == source.id && Some(&one.snapshot) == theirs)
        };
        let (sandbox, outcome) = (target.clone(), MergeOutcome::default());
        let snapshot = current.filter(is_it);
        Ok(snapshot.map(|one| Merged { outcome, sandbox, snapshot: Some(one), all: true }))
    }

    /// Refuses a source whose files only a virtual machine can read, before anything is captured of it.
    pub(super) fn require_readable(&self, source: &Sandbox) -> Result<()> {
        let in_machine =
            self.turns.live(&source.id).is_some_and(|live| live.driver.disk().is_some());
        match in_machine {
            true => Err(Error::FilesNotReadable {
                point: source.name.to_string(),
                why: "it is on the disk of a virtual machine that only it can read",
            }),
            false => Ok(()),
        }
    }

    /// The source as it is, as a snapshot; only if it is what was reviewed.
    pub(in crate::engine) async fn capture_fork(
        self: &Arc<Self>,
        source: &Sandbox,
        reviewed: Option<Reviewed>,
    ) -> Result<Snapshot> {
        let (id, name) = (source.id.clone(), source.name.clone());
        self.turn(source.id.clone(), move |this, slot| async move {
            let mut source = this.reread(&slot, &id, &name).await?;
            if let Some(reviewed) = &reviewed {
                require_reviewed(Some(reviewed), &source)?;
                // Nothing changes it during this turn.
                if slot.live().is_some() {
                    return Err(reviewed.changed(&source));
                }
            }
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
        let base = self.base_of(source, theirs, target).await?;
        let most_bytes = Some(target.config.resources.disk.0);
        // What the source leaves out of its snapshots is not there, which does not mean that it was deleted.
        let excluded = target.config.exclude.iter().chain(&source.config.exclude);
        let exclude: BTreeSet<String> = excluded.cloned().collect();
        let exclude: Vec<String> = exclude.into_iter().collect();
        let options = |dry_run| -> Result<MergeOptions> {
            let globs = |globs: &[String]| match globs.is_empty() {
                true => Ok(None),
                false => Globs::parse(globs).map(Some),
            };
            let (only, exclude) = (globs(&request.only)?, globs(&exclude)?);
            let keep_both = request.keep_both.then(|| source.name.to_string());
            Ok(MergeOptions { only, exclude, keep_both, most_bytes, dry_run })
        };
        let chains = |ours: Vec<LayerId>| MergeChains {
            base: base.layers.clone(),
            ours,
            theirs: theirs.layers.clone(),
        };
        let is_at_rest = target.open_layer().is_none() && target.phase() != Phase::Paused;
        if !is_at_rest || request.dry_run {
            // No session is ended, and no machine started, for a merge that is refused then.
            let point = Point::Now(target.name.clone());
            let ours = match self.resolve_point(&target.project, &point).await {
                // Only a stop makes its files readable. Its earlier state shows nearly as much.
                Err(Error::FilesNotReadable { .. }) if !request.dry_run => {
                    self.last_readable(target).await?
                }
                ours => ours?,
            };
            let trial = self.compare(target, chains(ours.layers.clone()), options(true)?).await?;
            let all = request.only.is_empty();
            if request.dry_run {
                let sandbox = target.clone();
                return Ok(Merged { outcome: trial, sandbox, snapshot: None, all });
            }
            refuse_conflicts(target, source, &trial)?;
        }
        if !is_at_rest {
            self.stop_for_merge(slot, target).await?;
        }
        let ours = self.resolve_saved(target).await?;
        let outcome = self.compare(target, chains(ours.layers.clone()), options(false)?).await?;
        refuse_conflicts(target, source, &outcome)?;
        let all = request.only.is_empty();
        let snapshot = match &outcome.layer {
            Some(layer) => {
                Some(self.keep_merged(target, source, (theirs, &ours), layer, all).await?)
            }
            None => None,
        };
        Ok(Merged { outcome, sandbox: target.clone(), snapshot, all })
    }

    /// Makes the merged layer, on top of what the target has, its next snapshot.
    async fn keep_merged(
        &self,
        target: &mut Sandbox,
        source: &Sandbox,
        (theirs, ours): (&ResolvedPoint, &ResolvedPoint),
        layer: &Layer,
        all: bool,
    ) -> Result<Snapshot> {
        self.references.count_layer(layer);
        // If it is refused, it is an unreferenced layer, which is collected.
        let sessions = self.sessions_of(source, theirs.snapshot.as_ref(), Some(&target.id)).await?;
        let new = std::slice::from_ref(&layer.id);
        self.storage.guard.guard_taken(target, &source.name, &sessions, new, None).await?;
        failpoint::pass("merge.built");
        let layers = new.iter().chain(&ours.layers).cloned().collect();
        let wanted = SnapshotOptions { method: Method::Manual, ..SnapshotOptions::default() };
        let id = SnapshotId::of_layer(&layer.id);
        let mut snapshot = self.new_snapshot(target, id, layers, SnapshotKind::Merge, wanted);
        let merged = theirs.snapshot.clone().filter(|_| all);
        let sandbox = source.id.clone();
        snapshot.merged = merged.map(|snapshot| MergeSource { sandbox, snapshot });
        self.commit(target, &snapshot).await?;
        self.context.events.merged(target, &source.name);
        self.storage.snapshots.try_to_retain(target).await;
        self.storage.compaction.after_stop(target);
        Ok(snapshot)
    }

    async fn compare(
        &self,
        target: &Sandbox,
        chains: MergeChains,
        options: MergeOptions,
    ) -> Result<MergeOutcome> {
        let _turn = self.comparing.turn(&target.project).await?;
        Ok(self.store.merge_trees(chains, options).await?)
    }

    /// The newest snapshot of a sandbox whose files can be read, or its image.
    async fn last_readable(&self, sandbox: &Sandbox) -> Result<ResolvedPoint> {
        let mut at = sandbox.current.clone();
        for _ in 0..PASSED {
            let Some(id) = at else { break };
            let Some(record) = self.db.snapshot_record(&id).await? else { break };
            if record.deleted_at.is_none() && !record.has_memory() {
                return self.resolve_snapshot(&id, None).await;
            }
            at = record.parent;
        }
        Ok(self.resolve_image_of(sandbox).await)
    }

    async fn base_of(
        &self,
        source: &Sandbox,
        theirs: &ResolvedPoint,
        target: &Sandbox,
    ) -> Result<ResolvedPoint> {
        // Its record is read again: another merge may have been noted meanwhile.
        let mut source = self.db.sandbox_by_id(&source.id).await?.unwrap_or_else(|| source.clone());
        // What it has done since it was captured may be in the target already, and is not to be undone there.
        if theirs.snapshot.is_some() {
            source.current.clone_from(&theirs.snapshot);
        }
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
        if target.phase() == Phase::Paused {
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
            into_id: Some(merged.sandbox.id.clone()),
            generation: merged.sandbox.generation,
            at: now(),
            group_id: None,
        };
        let point = MergePoint {
            into: into.clone(),
            snapshot: taken.clone(),
            result: merged.sandbox.current.clone(),
            generation: merged.sandbox.generation,
            at: now(),
        };
        // Where all was there already, it was brought back before.
        let keeps = merged.snapshot.is_none();
        self.note_brought_back(source, outcome, keeps, move |source| {
            // After a rollback of the target an earlier one may be true again.
            let of_one = source.merged.iter().filter(|merge| merge.into == point.into).count();
            let mut surplus = (of_one + 1).saturating_sub(REMEMBERED_OF_ONE);
            source.merged.retain(|merge| {
                let goes = surplus > 0 && merge.into == point.into;
                surplus -= usize::from(goes);
                !goes
            });
            source.merged.push(point);
            let surplus = source.merged.len().saturating_sub(REMEMBERED);
            source.merged.drain(..surplus);
        })
        .await
    }
}

/// The globs of the paths to take; none for all.
pub(super) fn chosen(only: Vec<String>) -> Result<Vec<String>> {
    if only.len() > MOST_GLOBS || only.iter().map(String::len).sum::<usize>() > LONGEST_GLOBS {
        let most = format!("at most {MOST_GLOBS} patterns of {LONGEST_GLOBS} bytes together");
        return Err(Error::invalid("only", most));
    }
    if only.iter().any(String::is_empty) {
        return Err(Error::invalid("only", "a pattern cannot be empty; omit it to take all paths"));
    }
    // The root, with all that is in it.
    if only.iter().any(|glob| glob.trim_matches('/').is_empty()) {
        return Ok(Vec::new());
    }
    Globs::parse(&only)?;
    Ok(only)
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
