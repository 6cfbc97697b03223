//! The part of the runs that is held in memory: unfinished ones completely, the others without long
//! texts; and the snapshots that a review needs.

use std::collections::HashMap;

use parking_lot::Mutex;

use super::{RunKey, Runs};
use crate::engine::Result;
use crate::engine::snapshots::snapshot_records::PinsSnapshots;
use crate::model::{Name, Run, RunCommand, RunId, RunSpec, RunStatus, SnapshotId};

/// How much text of a run stays in memory once it is over.
const SHORT: u64 = 1 << 10;
/// What a document takes besides it.
const REST: u64 = 2 << 10;

/// How much a run takes.
#[derive(Debug, Clone, Copy)]
pub(super) struct RunSize {
    /// On disk, roughly.
    pub(super) bytes: u64,
    /// Whether its texts are on disk only.
    cut: bool,
}

/// The long texts of what was asked for.
pub(super) fn text_of(spec: &RunSpec) -> u64 {
    let lists = spec.approve.iter().chain(&spec.known_hosts).chain(&spec.approve_secrets);
    text_of_command(spec) + lists.map(|text| text.len() as u64 + 8).sum::<u64>()
}

/// Those of its command.
pub(super) fn text_of_command(spec: &RunSpec) -> u64 {
    let Some(command) = &spec.command else { return 0 };
    let env = command.env.iter().flat_map(|(name, value)| [name, value]);
    command.argv.iter().chain(env).map(|text| text.len() as u64 + 8).sum()
}

/// Whether a run is queued, works, or has something pending.
pub(super) fn is_unfinished(run: &Run) -> bool {
    run.status() == RunStatus::Queued || run.status().is_active() || run.pending.is_some()
}

/// What is held in memory of a run.
fn cut(mut run: Run) -> (Run, RunSize) {
    let text = text_of(&run.spec);
    let cut = !is_unfinished(&run) && text > SHORT;
    if cut {
        let spec = &mut run.spec;
        // Callers also look at whether a finished run has a command.
        spec.command = spec.command.as_ref().map(|_| RunCommand::default());
        spec.approve = Vec::new();
        spec.known_hosts = Vec::new();
        spec.approve_secrets = Vec::new();
    }
    (run, RunSize { bytes: REST + text, cut })
}

/// How much runs take, and which snapshots they need.
#[derive(Debug, Default)]
pub(super) struct Kept {
    extents: Mutex<HashMap<RunId, RunSize>>,
    pins: Mutex<ReviewPins>,
}

#[derive(Debug, Default)]
struct ReviewPins {
    by_run: HashMap<RunId, Vec<SnapshotId>>,
    counts: HashMap<SnapshotId, usize>,
}

impl ReviewPins {
    fn set(&mut self, run: &RunId, snapshots: Vec<SnapshotId>) {
        for snapshot in &snapshots {
            *self.counts.entry(snapshot.clone()).or_default() += 1;
        }
        let before = match snapshots.is_empty() {
            true => self.by_run.remove(run),
            false => self.by_run.insert(run.clone(), snapshots),
        };
        for snapshot in before.into_iter().flatten() {
            if let Some(count) = self.counts.get_mut(&snapshot) {
                *count -= 1;
                if *count == 0 {
                    self.counts.remove(&snapshot);
                }
            }
        }
    }
}

impl Kept {
    /// Returns what is held in memory of a run; the one on disk is complete.
    pub(super) fn enter(&self, run: Run) -> Run {
        let over = run.status().is_final() && run.pending.is_none();
        let pinned = run.first.iter().chain(&run.last).filter(|_| !over);
        self.pins.lock().set(&run.id, pinned.cloned().collect());
        let (run, extent) = cut(run);
        self.extents.lock().insert(run.id.clone(), extent);
        run
    }

    pub(super) fn forget(&self, run: &RunId) {
        self.pins.lock().set(run, Vec::new());
        self.extents.lock().remove(run);
    }

    pub(super) fn bytes_of(&self, run: &RunId) -> u64 {
        self.extents.lock().get(run).map_or(REST, |extent| extent.bytes)
    }

    /// What all runs take on disk, roughly.
    pub(super) fn bytes(&self) -> u64 {
        self.extents.lock().values().map(|extent| extent.bytes).sum()
    }
}

impl PinsSnapshots for Runs {
    fn is_pinned(&self, snapshot: &SnapshotId) -> bool {
        self.kept.pins.lock().counts.contains_key(snapshot)
    }
}

impl Runs {
    /// A run with all its texts.
    pub(in crate::engine) async fn whole(&self, project: &Name, id: &RunId) -> Result<Run> {
        let run = self.get(project, id)?;
        let is_cut = self.kept.extents.lock().get(id).is_some_and(|extent| extent.cut);
        if !is_cut {
            return Ok(run);
        }
        let key: RunKey = (project.clone(), id.clone());
        match self.store.read::<Run>(&key).await {
            Ok(run) => Ok(run),
            // It was removed meanwhile.
            Err(error) if error.is_not_found() => self.get(project, id),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Kept, text_of};
    use crate::model::{
        AcceptRule, KeyId, Run, RunChange, RunCommand, RunEffect, RunPlace, RunSpec, SnapshotId,
        Span, now,
    };

    fn run(argument: usize) -> Run {
        let spec = RunSpec {
            place: RunPlace::Existing { sandbox: "app".parse().unwrap() },
            command: Some(RunCommand { argv: vec!["x".repeat(argument)], ..RunCommand::default() }),
            repository: String::new(),
            owner: String::new(),
            purpose: String::new(),
            class: String::new(),
            priority: 0,
            approve: vec!["git *".to_owned()],
            approve_hosts: false,
            known_hosts: Vec::new(),
            approve_secrets: Vec::new(),
            spending: Vec::new(),
            on_accept: AcceptRule::Keep,
            keep: Span::days(1),
            timeout: None,
            retries: 0,
            heartbeat: Span::seconds(60),
        };
        Run::new("p".parse().unwrap(), spec, KeyId::fresh())
    }

    #[test]
    fn long_texts_of_runs_that_are_over_are_on_disk_only() {
        let kept = Kept::default();
        let queued = run(60_000);
        assert!(text_of(&queued.spec) > 60_000);
        assert_eq!(kept.enter(queued.clone()), queued, "it is needed");
        let mut over = queued;
        over.apply(RunChange::Cancel, now()).unwrap();
        over.pending = Some(RunEffect::Stop);
        assert_eq!(kept.enter(over.clone()), over, "it is still needed");
        over.pending = None;
        let held = kept.enter(over.clone());
        assert_eq!(held.spec.command, Some(RunCommand::default()));
        assert!(held.spec.approve.is_empty());
        assert!(kept.bytes_of(&over.id) > 60_000, "its size is that on disk");
        let mut short = run(10);
        short.apply(RunChange::Cancel, now()).unwrap();
        assert_eq!(kept.enter(short.clone()), short);
        kept.forget(&short.id);
        kept.forget(&over.id);
        assert_eq!(kept.bytes(), 0);
    }

    #[test]
    fn snapshots_are_pinned_as_long_as_a_run_can_be_reviewed() {
        let kept = Kept::default();
        let pinned = |id: &SnapshotId| kept.pins.lock().counts.contains_key(id);
        let (first, last) = (SnapshotId::fresh(), SnapshotId::fresh());
        let (mut one, mut two) = (run(1), run(1));
        one.first = Some(first.clone());
        two.first = Some(first.clone());
        kept.enter(one.clone());
        kept.enter(two.clone());
        one.apply(RunChange::Start, now()).unwrap();
        one.apply(RunChange::Finish, now()).unwrap();
        one.last = Some(last.clone());
        kept.enter(one.clone());
        assert!(pinned(&first) && pinned(&last));
        one.apply(RunChange::Reject, now()).unwrap();
        one.pending = Some(RunEffect::Discard);
        kept.enter(one.clone());
        assert!(pinned(&last), "something is still to be done with it");
        one.pending = None;
        kept.enter(one);
        assert!(pinned(&first) && !pinned(&last));
        kept.forget(&two.id);
        assert!(!pinned(&first));
    }
}
