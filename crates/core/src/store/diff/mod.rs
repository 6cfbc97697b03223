//! What differs between two chains of layers, and a merge of three.
//!
//! A chain is compared as the kernel would show it: [`merged`] finds what a name is in a stack of layers.
//! [`walk`] compares two stacks directory by directory and leaves out what both have in common, so that the
//! cost is that of what differs. [`content`] compares files, [`renames`] pairs files that were removed with
//! files that were added, [`patch`] writes differences in git's format, [`merge`] decides about every path of a
//! three-way merge, [`beside`] where the other version of a conflict goes, [`onto`] about paths that are put onto a
//! chain without a common ancestor, and [`apply`] builds the layer that has the result. [`budget`] bounds all of it.
//!
//! The chain of a running sandbox has an open layer on top, whose files may change during a comparison: what
//! vanishes meanwhile counts as absent.
//!
//! `docs/FORKS.md` has the rules and the limits.

mod apply;
mod beside;
mod budget;
mod content;
mod lookup;
mod merge;
mod merged;
mod onto;
mod patch;
mod renames;
mod walk;

use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::time::Instant;

use self::budget::{Budget, LONGEST, LONGEST_MERGE};
use self::walk::{Selection, Wanted};
use crate::model::{DiffCounts, DiffEntry, DiffKind, Layer, LayerId, MergeConflict, MergeCounts};
use crate::store::layer::exclude::Globs;
use crate::store::{Result, Store, StoreError, blocking};

pub use self::patch::{PatchOptions, PreparedPatch};
pub(super) use self::walk::PathDiff;

/// How many names one directory has at most.
const MOST_IN_DIR: usize = 500_000;

/// How many changes, and how many conflicts, of a merge are listed.
const MOST_LISTED: usize = 1_000;

/// How much of a patch is written before it is sent.
const PIECE: usize = 256 << 10;
/// How long a receiver may take for all of it.
const PATCH_TAKEN: Duration = Duration::from_secs(600);

/// Selects differences.
#[derive(Debug)]
pub struct DiffOptions {
    /// Only these paths and what is below them; all if `None`.
    pub only: Option<Globs>,
    /// How many paths are listed.
    pub limit: usize,
    /// Whether renamed files are found.
    pub renames: bool,
}

impl Default for DiffOptions {
    fn default() -> Self {
        Self { only: None, limit: 10_000, renames: true }
    }
}

/// What differs between two chains.
#[derive(Debug, Clone, Default)]
pub struct TreeDiff {
    /// How many paths differ, listed or not.
    pub counts: DiffCounts,
    /// The paths, sorted.
    pub(super) paths: Vec<PathDiff>,
    /// Whether there are more than are listed.
    pub truncated: bool,
}

impl TreeDiff {
    /// The paths, for callers.
    #[must_use]
    pub fn entries(&self) -> Vec<DiffEntry> {
        self.paths.iter().map(PathDiff::entry).collect()
    }

    /// Whether nothing differs.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let DiffCounts { added, removed, modified, renamed, bytes: _ } = self.counts;
        added + removed + modified + renamed == 0
    }
}

/// The chains of a merge, topmost first.
#[derive(Debug, Clone)]
pub struct MergeChains {
    /// What both were.
    pub base: Vec<LayerId>,
    /// Into which.
    pub ours: Vec<LayerId>,
    /// From which.
    pub theirs: Vec<LayerId>,
}

/// The chains of a change that is put onto another chain, topmost first.
#[derive(Debug, Clone)]
pub struct OntoChains {
    /// What it was before.
    pub from: Vec<LayerId>,
    /// What it is now.
    pub to: Vec<LayerId>,
    /// What gets the difference.
    pub onto: Vec<LayerId>,
}

/// How a change is put onto another chain.
#[derive(Debug, Default)]
pub struct OntoOptions {
    /// Only these paths and what is below them; all if `None`.
    pub only: Option<Globs>,
    /// Not these paths, and not what is below them.
    pub exclude: Option<Globs>,
    /// The directory that all goes below; from the root, without slashes around it.
    pub under: Vec<u8>,
    /// How much the files that are written may take.
    pub most_bytes: Option<u64>,
    /// Decide, and build nothing.
    pub dry_run: bool,
}

/// How to merge.
#[derive(Debug, Default)]
pub struct MergeOptions {
    /// Only these paths and what is below them; all if `None`.
    pub only: Option<Globs>,
    /// Not these paths, and not what is below them.
    pub exclude: Option<Globs>,
    /// Write the other side's version of a conflict beside ours, under a name with this ending.
    pub keep_both: Option<String>,
    /// How much the files that are written may take.
    pub most_bytes: Option<u64>,
    /// Decide, and build nothing.
    pub dry_run: bool,
}

/// What a merge did, or would do.
#[derive(Debug, Clone, Default)]
pub struct MergeOutcome {
    /// How many paths.
    pub counts: MergeCounts,
    /// What changes in the target, sorted; not all if `truncated`.
    pub changes: Vec<DiffEntry>,
    /// What cannot be merged, sorted; not all if `truncated`.
    pub conflicts: Vec<MergeConflict>,
    /// Whether there is more than is listed.
    pub truncated: bool,
    /// The layer with the result, for the top of the target's chain. None if there are conflicts, or nothing changes.
    pub layer: Option<Layer>,
}

impl Store {
    /// Compares two chains of layers, topmost first. The topmost layer of either may be open.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::DiffTooLarge`] beyond the limits, [`StoreError::Busy`] when too much is compared at that
    /// moment, [`StoreError::Io`] when a layer is not there.
    pub async fn diff(
        &self,
        from: &[LayerId],
        to: &[LayerId],
        options: DiffOptions,
    ) -> Result<TreeDiff> {
        let _turn = budget::comparison().await?;
        let (store, from, to) = (self.clone(), from.to_vec(), to.to_vec());
        blocking(move || store.diff_now(&from, &to, &options)).await
    }

    /// Whether two chains of layers differ in anything. Ends at the first difference.
    ///
    /// # Errors
    ///
    /// As [`diff`](Self::diff).
    pub async fn differ(&self, from: &[LayerId], to: &[LayerId]) -> Result<bool> {
        let _turn = budget::comparison().await?;
        let (store, from, to) = (self.clone(), from.to_vec(), to.to_vec());
        blocking(move || {
            let wanted = Wanted { paths: Selection::default(), limit: 0, first: true };
            let diff = walk::compare(&store, &from, &to, &wanted, &mut Budget::new(LONGEST))?;
            Ok(!diff.is_empty())
        })
        .await
    }

    fn diff_now(
        &self,
        from: &[LayerId],
        to: &[LayerId],
        options: &DiffOptions,
    ) -> Result<TreeDiff> {
        let mut budget = Budget::new(LONGEST);
        let paths = Selection { only: options.only.as_ref(), ..Selection::default() };
        let wanted = Wanted { paths, limit: options.limit, first: false };
        let mut diff = walk::compare(self, from, to, &wanted, &mut budget)?;
        if options.renames && !diff.truncated {
            renames::find(&mut diff)?;
        }
        Ok(diff)
    }

    /// Compares two chains for a patch in git's format, which [`send_patch`](Self::send_patch) writes.
    ///
    /// # Errors
    ///
    /// As [`diff`](Self::diff). A patch with more paths than `options.limit` is refused.
    pub async fn prepare_patch(
        &self,
        from: &[LayerId],
        to: &[LayerId],
        options: DiffOptions,
        how: PatchOptions,
    ) -> Result<PreparedPatch> {
        let limit = options.limit;
        let diff = self.diff(from, to, options).await?;
        if diff.truncated {
            return Err(StoreError::DiffTooLarge {
                why: format!("more than {limit} paths differ"),
            });
        }
        Ok(PreparedPatch::new(diff, how))
    }

    /// Sends a patch. While the receiver takes its time, nothing is held that others wait for.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::NotTaken`] when the receiver goes away or is too slow.
    pub async fn send_patch(
        &self,
        mut patch: PreparedPatch,
        into: mpsc::Sender<Bytes>,
    ) -> Result<()> {
        let (deadline, piece_taken) = (Instant::now() + PATCH_TAKEN, patch.patience);
        let not_taken = |why: &str| StoreError::NotTaken { why: why.to_owned() };
        loop {
            let turn = budget::piece().await?;
            let written = blocking(move || patch.next(PIECE).map(|piece| (patch, piece)));
            let (rest, piece) = written.await?;
            drop(turn);
            patch = rest;
            let Some(piece) = piece else { return Ok(()) };
            if Instant::now() > deadline {
                return Err(not_taken("it takes too long"));
            }
            if piece.is_empty() {
                continue;
            }
            let patience = deadline.min(Instant::now() + piece_taken);
            match tokio::time::timeout_at(patience, into.send(Bytes::from(piece))).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return Err(not_taken("the receiver is gone")),
                Err(_) => return Err(not_taken("the receiver is too slow")),
            }
        }
    }

    /// Merges what `theirs` changed since `base` into `ours`. The result is a new layer that nothing names yet.
    ///
    /// # Errors
    ///
    /// As [`diff`](Self::diff), and when there is no space. Conflicts are no error but part of the outcome.
    pub async fn merge_trees(
        &self,
        chains: MergeChains,
        options: MergeOptions,
    ) -> Result<MergeOutcome> {
        let turn = budget::comparison().await?;
        let (store, dry_run, most) = (self.clone(), options.dry_run, options.most_bytes);
        let ours = chains.ours.clone();
        let plan =
            blocking(move || store.plan_merge(&chains, &options, Budget::new(LONGEST_MERGE)));
        let plan = plan.await?;
        drop(turn);
        self.carry_out(ours, plan, most, dry_run).await
    }

    /// Builds the layer that a plan asks for, if it has no conflicts and is to be carried out.
    async fn carry_out(
        &self,
        ours: Vec<LayerId>,
        plan: merge::MergePlan,
        most: Option<u64>,
        dry_run: bool,
    ) -> Result<MergeOutcome> {
        let mut outcome = plan.outcome();
        if !plan.conflicts.is_empty() || plan.is_empty() {
            return Ok(outcome);
        }
        if let Some(most) = most.filter(|most| plan.bytes() > *most) {
            return Err(StoreError::OverLimit { need: plan.bytes(), limit: most });
        }
        if !dry_run {
            self.check_room(plan.bytes()).await?;
            let _turn = budget::build().await?;
            let store = self.clone();
            outcome.layer = Some(blocking(move || store.build_merge(&ours, &plan)).await?);
        }
        Ok(outcome)
    }
}

impl merge::MergePlan {
    /// How much the files take that are written.
    fn bytes(&self) -> u64 {
        let sizes = self.taken.iter().filter_map(|one| one.to.as_ref());
        sizes.fold(0, |sum, to| sum.saturating_add(to.size).saturating_add(4096))
    }

    fn outcome(&self) -> MergeOutcome {
        let mut counts =
            MergeCounts { conflicts: self.conflicts.len() as u64, ..MergeCounts::default() };
        for one in &self.taken {
            match one.kind() {
                _ if self.merged.contains(&one.path) => counts.merged += 1,
                DiffKind::Added => counts.added += 1,
                DiffKind::Removed => counts.removed += 1,
                DiffKind::Modified | DiffKind::Renamed => counts.modified += 1,
            }
        }
        let conflicts = self
            .conflicts
            .iter()
            .take(MOST_LISTED)
            .map(|one| MergeConflict { path: one.path(), reason: one.reason.to_owned() });
        MergeOutcome {
            counts,
            changes: self.taken.iter().take(MOST_LISTED).map(PathDiff::entry).collect(),
            conflicts: conflicts.collect(),
            truncated: self.taken.len().max(self.conflicts.len()) > MOST_LISTED,
            layer: None,
        }
    }
}
