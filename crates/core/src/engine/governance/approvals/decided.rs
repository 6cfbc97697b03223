//! Answers that are remembered, and how much of the approvals is held in memory.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;

use super::{Approvals, Key};
use crate::model::{
    Approval, ApprovalAnswer, ApprovalId, ApprovalSource, ApprovalStatus, ApprovalSubject, Name,
    RunId, RunSandbox, SandboxId, Timestamp,
};
use crate::net::Answered;

/// How much of a context stays in memory once its approval is over.
const SHORT: usize = 1 << 10;
/// What a document takes besides its long texts.
const REST: u64 = 1 << 10;

/// A sandbox in which an approval is over, and since when.
pub(in crate::engine) type EndedApproval = (Name, RunSandbox, Timestamp);

/// How much an approval takes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ApprovalSize {
    /// On disk, roughly.
    pub(super) bytes: u64,
    /// Whether its context is on disk only.
    pub(super) cut: bool,
}

/// What is held in memory of an approval: all while it is pending, later without a long context.
pub(super) fn cut(mut approval: Approval) -> (Approval, ApprovalSize) {
    let bytes = size(&approval);
    let cut = !approval.is_pending() && approval.context.len() > SHORT;
    if cut {
        approval.context = String::new();
    }
    (approval, ApprovalSize { bytes, cut })
}

fn size(approval: &Approval) -> u64 {
    let texts = [&approval.question, &approval.context, &approval.comment];
    REST + texts.iter().map(|text| text.len() as u64).sum::<u64>()
}

/// For whom an answer counts.
#[derive(Debug, Clone)]
pub(in crate::engine) struct AnswerScope {
    /// The run under way.
    pub(in crate::engine) run: Option<RunId>,
    /// Whether the sandbox's own policy asks, so that every approval in it counts.
    pub(in crate::engine) whole_sandbox: bool,
    /// When the session began.
    pub(in crate::engine) since: Timestamp,
}

type Target = (SandboxId, ApprovalSubject, String);

/// Approvals by what their answers decide.
#[derive(Debug, Default)]
pub(super) struct Decided {
    by_target: RwLock<HashMap<Target, Vec<Key>>>,
    bytes: AtomicU64,
}

fn target(approval: &Approval) -> Option<Target> {
    let target = approval.target.clone()?;
    Some((approval.sandbox.id.clone(), approval.subject, target))
}

impl Decided {
    pub(super) fn note(&self, approval: &Approval) {
        self.replace(approval, None);
    }

    /// Enters a version that replaces one of that size.
    pub(super) fn replace(&self, approval: &Approval, before: Option<ApprovalSize>) {
        self.bytes.fetch_add(size(approval), Ordering::Relaxed);
        match before {
            Some(before) => drop(self.bytes.fetch_sub(before.bytes, Ordering::Relaxed)),
            None => {
                if let Some(target) = target(approval) {
                    let key = (approval.project.clone(), approval.id.clone());
                    self.by_target.write().entry(target).or_default().push(key);
                }
            }
        }
    }

    pub(super) fn forget(&self, approval: &Approval, size: ApprovalSize) {
        self.bytes.fetch_sub(size.bytes, Ordering::Relaxed);
        let Some(target) = target(approval) else { return };
        let mut all = self.by_target.write();
        if let Some(keys) = all.get_mut(&target) {
            keys.retain(|(_, id)| *id != approval.id);
            if keys.is_empty() {
                all.remove(&target);
            }
        }
    }

    /// What all approvals take on disk, roughly.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

impl Approvals {
    /// Those with a target in a sandbox, the newest first.
    fn about(&self, sandbox: &SandboxId, subject: ApprovalSubject, target: &str) -> Vec<Approval> {
        let wanted = (sandbox.clone(), subject, target.to_owned());
        let keys = self.decided.by_target.read().get(&wanted).cloned().unwrap_or_default();
        let table = self.table.read();
        let found = keys.iter().rev().filter_map(|key| table.get(key));
        found.map(|entry| entry.approval.clone()).collect()
    }

    /// What was answered that counts now.
    pub(in crate::engine) fn decision(
        &self,
        sandbox: &SandboxId,
        subject: ApprovalSubject,
        target: &str,
        scope: &AnswerScope,
    ) -> Option<Answered> {
        self.about(sandbox, subject, target).iter().find_map(|approval| decides(approval, scope))
    }

    /// The one with this target that waits for an answer, for this run or without one.
    pub(in crate::engine) fn pending_about(
        &self,
        sandbox: &SandboxId,
        subject: ApprovalSubject,
        target: &str,
        run: Option<&RunId>,
    ) -> Option<Approval> {
        let mut all = self.about(sandbox, subject, target).into_iter();
        all.find(|one| one.is_pending() && one.run.as_ref() == run)
    }

    /// The newest with this target that belongs to a run.
    pub(in crate::engine) fn last_about(
        &self,
        sandbox: &SandboxId,
        subject: ApprovalSubject,
        target: &str,
        run: &RunId,
    ) -> Option<Approval> {
        let mut all = self.about(sandbox, subject, target).into_iter();
        all.find(|one| one.run.as_ref() == Some(run))
    }

    /// Sandboxes in which an approval ended since this was asked last.
    pub(in crate::engine) fn take_ended(&self) -> Vec<EndedApproval> {
        std::mem::take(&mut *self.ended.lock())
    }

    /// Has the next [`take_ended`](Self::take_ended) answer with one again.
    pub(in crate::engine) fn not_taken(&self, ended: EndedApproval) {
        self.ended.lock().push(ended);
    }

    /// Remembers that one is over for which a sandbox may have been paused.
    pub(super) fn note_ended(&self, approval: &Approval) {
        let waited = approval.source != ApprovalSource::Harness || approval.run.is_some();
        if waited
            && !approval.holds_a_request()
            && let Some(at) = approval.answered_at
        {
            let ended = (approval.project.clone(), approval.sandbox.clone(), at);
            self.ended.lock().push(ended);
        }
    }

    /// The sandboxes in which one waits for an answer.
    pub(in crate::engine) fn waiting_sandboxes(&self) -> HashSet<SandboxId> {
        let (waiting, table) = (self.waiting.read().clone(), self.table.read());
        let found = waiting.iter().filter_map(|key| table.get(key));
        found.map(|entry| entry.approval.sandbox.id.clone()).collect()
    }

    /// Those of a sandbox that wait for an answer.
    pub(in crate::engine) fn pending_of(
        &self,
        sandbox: &SandboxId,
    ) -> Vec<(ApprovalId, ApprovalSubject)> {
        let (waiting, table) = (self.waiting.read().clone(), self.table.read());
        let found = waiting.iter().filter_map(|key| table.get(key)).map(|entry| &entry.approval);
        let here = found.filter(|approval| approval.sandbox.id == *sandbox);
        here.map(|approval| (approval.id.clone(), approval.subject)).collect()
    }

    /// Approvals with all their texts.
    pub(in crate::engine) async fn whole(&self, mut all: Vec<Approval>) -> Vec<Approval> {
        for approval in &mut all {
            let key = (approval.project.clone(), approval.id.clone());
            let is_cut = self.table.read().get(&key).is_some_and(|entry| entry.size.cut);
            if is_cut && approval.context.is_empty() {
                // One that was removed meanwhile stays as it is.
                if let Ok(found) = self.store.read::<Approval>(&key).await {
                    *approval = found;
                }
            }
        }
        all
    }
}

/// What an approval says about a request, if anything.
fn decides(approval: &Approval, scope: &AnswerScope) -> Option<Answered> {
    let of_run = approval.run.is_some() && approval.run == scope.run;
    if approval.answer() == Some(ApprovalAnswer::Approve) {
        return (of_run || scope.whole_sandbox).then_some(Ok(()));
    }
    let of_session = approval.run.is_none() && approval.asked_at >= scope.since;
    let denied = approval.answer() == Some(ApprovalAnswer::Deny);
    (denied && (of_run || of_session)).then(|| Err(why(approval)))
}

/// Why something was not approved.
pub(super) fn why(approval: &Approval) -> String {
    let why = match (approval.status, approval.comment.as_str()) {
        (ApprovalStatus::Denied, "") => "it was denied".to_owned(),
        (ApprovalStatus::Denied, comment) => format!("it was denied: {comment}"),
        (ApprovalStatus::Expired, comment) if !comment.is_empty() => comment.to_owned(),
        _ => "it was not approved".to_owned(),
    };
    format!("{why} (approval {})", approval.id)
}

#[cfg(test)]
mod tests {
    use super::super::{beyond, cut};
    use super::{AnswerScope, decides};
    use crate::model::{
        Approval, ApprovalId, ApprovalSource, ApprovalStatus, ApprovalSubject, FORMAT, RunId,
        RunSandbox, SandboxId, Timestamp,
    };

    fn approval(status: ApprovalStatus, run: Option<&RunId>, at: i64) -> Approval {
        let time = Timestamp::from_second(at).unwrap();
        Approval {
            format: FORMAT,
            id: ApprovalId::fresh(),
            project: "p".parse().unwrap(),
            sandbox: RunSandbox { id: SandboxId::fresh(), name: "s".parse().unwrap() },
            run: run.cloned(),
            source: ApprovalSource::Policy,
            subject: ApprovalSubject::Host,
            target: Some("a.test".to_owned()),
            question: "connect to a.test".to_owned(),
            context: String::new(),
            status,
            default: None,
            asked_by: None,
            asked_at: time,
            expires_at: time,
            answered_by: None,
            answered_at: None,
            comment: String::new(),
            agent_question: None,
        }
    }

    #[test]
    fn answers_count_for_whom_they_were_given() {
        use ApprovalStatus::{Approved, Denied, Expired, Pending};
        let (run, other) = (RunId::fresh(), RunId::fresh());
        let scope = |run: Option<&RunId>, whole_sandbox| AnswerScope {
            run: run.cloned(),
            whole_sandbox,
            since: Timestamp::from_second(100).unwrap(),
        };
        let good = |approval: Approval, scope: AnswerScope| {
            decides(&approval, &scope).map(|answer| answer.is_ok())
        };
        // Of a run: for that run, and for the sandbox if that asks by itself.
        assert_eq!(good(approval(Approved, Some(&run), 1), scope(Some(&run), false)), Some(true));
        assert_eq!(good(approval(Approved, Some(&run), 1), scope(Some(&other), false)), None);
        assert_eq!(good(approval(Approved, Some(&run), 1), scope(None, true)), Some(true));
        assert_eq!(good(approval(Denied, Some(&run), 1), scope(Some(&run), true)), Some(false));
        assert_eq!(good(approval(Denied, Some(&run), 200), scope(Some(&other), true)), None);
        // Without a run an approval stays, a denial goes with its session.
        assert_eq!(good(approval(Approved, None, 1), scope(None, true)), Some(true));
        assert_eq!(good(approval(Approved, None, 1), scope(Some(&run), false)), None);
        assert_eq!(good(approval(Denied, None, 200), scope(None, true)), Some(false));
        assert_eq!(good(approval(Denied, None, 1), scope(None, true)), None);
        for undecided in [Pending, Expired] {
            assert_eq!(good(approval(undecided, Some(&run), 200), scope(Some(&run), true)), None);
        }
    }

    #[test]
    fn long_contexts_of_what_is_over_are_on_disk_only() {
        let long = |status| Approval { context: "x".repeat(16 << 10), ..approval(status, None, 1) };
        let (pending, size) = cut(long(ApprovalStatus::Pending));
        assert!(!size.cut && pending.context.len() == 16 << 10);
        let (over, size) = cut(long(ApprovalStatus::Denied));
        assert!(size.cut && over.context.is_empty());
        assert!(size.bytes > 16 << 10, "its size is that on disk");
    }

    #[test]
    fn the_oldest_go_by_number_and_by_bytes() {
        assert_eq!(beyond([1, 1, 1].into_iter(), 3, 10), 0);
        assert_eq!(beyond([1, 1, 1].into_iter(), 2, 10), 1);
        assert_eq!(beyond([5, 5, 5].into_iter(), 9, 10), 1);
        assert_eq!(beyond([11, 1].into_iter(), 9, 10), 1);
        assert_eq!(beyond([1, 11].into_iter(), 9, 10), 2);
        assert_eq!(beyond([].into_iter(), 9, 10), 0);
    }
}
