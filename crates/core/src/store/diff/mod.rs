//! What differs between two chains of layers, and a merge of three.
//!
//! A chain is compared as the kernel would show it: [`merged`] finds what a name is in a stack of layers.
//! [`walk`] compares two stacks directory by directory and leaves out what both have in common, so that the
//! cost is that of what differs. [`content`] compares files, [`renames`] pairs files that were removed with
//! files that were added, [`patch`] writes differences in git's format, [`merge`] decides about every path of a
//! three-way merge and [`apply`] builds the layer that has its result.
//!
//! The chain of a running sandbox has an open layer on top, whose files may change during a comparison: what
//! vanishes meanwhile counts as absent.
//!
//! `docs/FORKS.md` has the rules and the limits.

mod apply;
mod content;
mod merge;
mod merged;
mod patch;
mod renames;
mod walk;

use std::time::{Duration, Instant};

use tokio::sync::Semaphore;

use crate::model::{DiffCounts, DiffEntry, DiffKind, Layer, LayerId, MergeConflict, MergeCounts};
use crate::store::layer::exclude::Globs;
use crate::store::{Result, Store, StoreError, blocking};

pub use self::patch::PatchOptions;
pub(super) use self::walk::PathDiff;

/// How long a comparison takes at the most.
const LONGEST: Duration = Duration::from_secs(60);
/// How many names are visited at the most.
const MOST_NAMES: u64 = 2_000_000;
/// How many names one directory has at the most.
const MOST_IN_DIR: usize = 500_000;

/// How many changes, and how many conflicts, of a merge are listed.
const MOST_LISTED: usize = 1_000;

/// How many comparisons run at the same time. Others wait.
static AT_ONCE: Semaphore = Semaphore::const_new(2);

/// Which differences are wanted.
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

/// How to merge.
#[derive(Debug, Default)]
pub struct MergeOptions {
    /// Only these paths and what is below them; all if `None`.
    pub only: Option<Globs>,
    /// Write the other side's version of a conflict beside ours, under a name with this ending.
    pub keep_both: Option<String>,
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

/// Bounds the work of one comparison.
#[derive(Debug)]
struct Budget {
    deadline: Instant,
    names: u64,
}

impl Budget {
    fn new() -> Self {
        Self { deadline: Instant::now() + LONGEST, names: 0 }
    }

    fn names(&mut self, count: usize) -> Result<()> {
        self.names += count as u64;
        if self.names > MOST_NAMES {
            return Err(StoreError::DiffTooLarge {
                why: format!("more than {MOST_NAMES} names would be compared"),
            });
        }
        self.time()
    }

    fn time(&self) -> Result<()> {
        match Instant::now() > self.deadline {
            true => Err(StoreError::DiffTooLarge {
                why: format!("it takes longer than {} s", LONGEST.as_secs()),
            }),
            false => Ok(()),
        }
    }
}

impl Store {
    /// Compares two chains of layers, topmost first. The topmost layer of either may be open.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::DiffTooLarge`] beyond the limits, [`StoreError::Io`] when a layer is not there.
    pub async fn diff(
        &self,
        from: &[LayerId],
        to: &[LayerId],
        options: DiffOptions,
    ) -> Result<TreeDiff> {
        let _turn = AT_ONCE.acquire().await.map_err(|_| StoreError::ShuttingDown)?;
        let (store, from, to) = (self.clone(), from.to_vec(), to.to_vec());
        blocking(move || store.diff_now(&from, &to, &options)).await
    }

    pub(super) fn diff_now(
        &self,
        from: &[LayerId],
        to: &[LayerId],
        options: &DiffOptions,
    ) -> Result<TreeDiff> {
        let mut budget = Budget::new();
        let mut diff = walk::compare(self, from, to, options, &mut budget)?;
        if options.renames && !diff.truncated {
            renames::find(&mut diff, &budget)?;
        }
        Ok(diff)
    }

    /// Writes the differences of two chains to `into` as a patch in git's format.
    ///
    /// # Errors
    ///
    /// As [`diff`](Self::diff), and when `into` fails. A patch with more paths than `options.limit` is refused.
    pub async fn write_patch<W>(
        &self,
        from: &[LayerId],
        to: &[LayerId],
        options: DiffOptions,
        how: PatchOptions,
        mut into: W,
    ) -> Result<()>
    where
        W: std::io::Write + Send + 'static,
    {
        let _turn = AT_ONCE.acquire().await.map_err(|_| StoreError::ShuttingDown)?;
        let (store, from, to) = (self.clone(), from.to_vec(), to.to_vec());
        blocking(move || {
            let diff = store.diff_now(&from, &to, &options)?;
            if diff.truncated {
                return Err(StoreError::DiffTooLarge {
                    why: format!("more than {} paths differ", options.limit),
                });
            }
            patch::write(&diff, &how, &mut into)?;
            into.flush().map_err(|source| StoreError::Io {
                action: "write",
                path: "the patch".into(),
                source,
            })
        })
        .await
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
        let _turn = AT_ONCE.acquire().await.map_err(|_| StoreError::ShuttingDown)?;
        let (store, dry_run) = (self.clone(), options.dry_run);
        let ours = chains.ours.clone();
        let plan = blocking(move || {
            let MergeChains { base, ours, theirs } = &chains;
            let mut plan = store.plan_merge(base, ours, theirs, options.only.as_ref())?;
            if let Some(source) = &options.keep_both {
                plan.keep_both(source, |path| walk::is_there(&store, ours, path))?;
            }
            Ok(plan)
        });
        let plan = plan.await?;
        let mut outcome = plan.outcome();
        if plan.conflicts.is_empty() && !plan.is_empty() && !dry_run {
            self.check_room(plan.bytes()).await?;
            let store = self.clone();
            outcome.layer = Some(blocking(move || store.build_merge(&ours, &plan)).await?);
        }
        Ok(outcome)
    }
}

impl merge::MergePlan {
    /// How much the files take that are written.
    fn bytes(&self) -> u64 {
        self.taken.iter().filter_map(|one| one.to.as_ref()).map(|to| to.size + 4096).sum()
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
