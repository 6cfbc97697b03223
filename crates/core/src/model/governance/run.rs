//! A run: one piece of work in a sandbox, from its request to its review.
//!
//! ```text
//! Queued --Start--> Running <--Answered-- WaitingForApproval
//!                   Running ----Ask-----> WaitingForApproval
//!                   Running, WaitingForApproval --Finish--> ReadyForReview
//! Queued, Running, WaitingForApproval --Fail----> Failed
//! Queued, Running, WaitingForApproval --Cancel--> Cancelled
//! ReadyForReview --Accept--> Accepted
//! ReadyForReview --Reject--> Rejected
//! ReadyForReview --Expire--> Expired
//! ```
//!
//! [`next_status`] is the whole of it: no clock, no I/O. [`Run::apply`] is the only writer of a status. What
//! follows from a status is a [`RunEffect`], which is on record with it before it is carried out; a server
//! that starts completes what is pending. `docs/formats/runs.md` describes the document.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::model::record::after;
use crate::model::{
    AcceptRule, CommandId, KeyId, Name, RunCommand, RunId, RunStatus, SandboxId, SessionId,
    SnapshotId, Span, SpendingKind, SpendingLimit, Timestamp, Usage, now,
};

/// What happens to a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunChange {
    /// It leaves the queue.
    Start,
    /// A question about it waits for an answer.
    Ask,
    /// No question waits any more.
    Answered,
    /// Its work is done, and its snapshot is pinned.
    Finish,
    /// It cannot continue.
    Fail,
    /// Somebody does not want it any more.
    Cancel,
    /// Its result was accepted.
    Accept,
    /// Its result was rejected.
    Reject,
    /// It was not reviewed in time.
    Expire,
}

impl RunChange {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Start,
        Self::Ask,
        Self::Answered,
        Self::Finish,
        Self::Fail,
        Self::Cancel,
        Self::Accept,
        Self::Reject,
        Self::Expire,
    ];
}

/// A change that a run in this status does not take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a run that is {} cannot change like that: {change:?}", status_word(*.status))]
pub struct RunRefused {
    /// The status.
    pub status: RunStatus,
    /// The change.
    pub change: RunChange,
}

/// A status as the API writes it.
#[must_use]
pub fn status_word(status: RunStatus) -> &'static str {
    match status {
        RunStatus::Queued => "queued",
        RunStatus::Running => "running",
        RunStatus::WaitingForApproval => "waiting_for_approval",
        RunStatus::ReadyForReview => "ready_for_review",
        RunStatus::Accepted => "accepted",
        RunStatus::Rejected => "rejected",
        RunStatus::Failed => "failed",
        RunStatus::Cancelled => "cancelled",
        RunStatus::Expired => "expired",
    }
}

/// The status after a change.
///
/// # Errors
///
/// Returns [`RunRefused`] for a change that the status does not take.
pub fn next_status(status: RunStatus, change: RunChange) -> Result<RunStatus, RunRefused> {
    use RunStatus as S;
    let under_way = matches!(status, S::Queued | S::Running | S::WaitingForApproval);
    let next = match change {
        RunChange::Start if status == S::Queued => S::Running,
        RunChange::Ask if status.is_active() => S::WaitingForApproval,
        RunChange::Answered if status.is_active() => S::Running,
        RunChange::Finish if status.is_active() => S::ReadyForReview,
        RunChange::Fail if under_way => S::Failed,
        RunChange::Cancel if under_way => S::Cancelled,
        RunChange::Accept if status == S::ReadyForReview => S::Accepted,
        RunChange::Reject if status == S::ReadyForReview => S::Rejected,
        RunChange::Expire if status == S::ReadyForReview => S::Expired,
        _ => return Err(RunRefused { status, change }),
    };
    Ok(next)
}

/// What is begun and not done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RunEffect {
    /// Its sandbox is to be made, or its first state to be kept.
    Prepare,
    /// Its command is to be run, or its harness to be waited for.
    Work,
    /// Its sandbox is to be stopped, and the snapshot pinned.
    Finish,
    /// Its command is to be ended, and its sandbox stopped.
    Stop,
    /// Its result is to be brought back.
    Accept,
    /// Its sandbox is to be deleted.
    Discard,
}

/// Where a run works.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "how", rename_all = "lowercase")]
pub enum RunPlace {
    /// In an existing sandbox.
    Existing {
        /// Its name when the run was asked for.
        sandbox: Name,
    },
    /// In a fork.
    Fork {
        /// The sandbox that is forked.
        sandbox: Name,
        /// What the fork is called; a name that is made of the run if absent.
        name: Option<Name>,
    },
    /// In a new sandbox.
    Fresh {
        /// The image.
        image: Option<String>,
        /// What it is called.
        name: Option<Name>,
    },
}

impl RunPlace {
    /// What acceptance does by default.
    #[must_use]
    pub fn on_accept(&self) -> AcceptRule {
        match self {
            Self::Fork { .. } => AcceptRule::Promote,
            Self::Existing { .. } | Self::Fresh { .. } => AcceptRule::Keep,
        }
    }
}

/// What was asked for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunSpec {
    /// Where it works.
    pub place: RunPlace,
    /// The command; absent if a harness drives it.
    pub command: Option<RunCommand>,
    /// The repository, for people.
    pub repository: String,
    /// Who answers for it.
    pub owner: String,
    /// What it is for.
    pub purpose: String,
    /// A kind of work.
    pub class: String,
    /// Higher ones start first.
    pub priority: i32,
    /// Patterns of commands that are held.
    pub approve: Vec<String>,
    /// Whether the first contact with each host is held.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub approve_hosts: bool,
    /// Hosts that need no approval.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub known_hosts: Vec<String>,
    /// Secrets whose use is held.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub approve_secrets: Vec<String>,
    /// What may be used before somebody has to approve more.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub spending: Vec<SpendingLimit>,
    /// What acceptance does.
    pub on_accept: AcceptRule,
    /// How long the result waits for a review.
    pub keep: Span,
    /// How long one attempt may work.
    pub timeout: Option<Span>,
    /// How often the command is started again.
    pub retries: u32,
    /// How long a harness may be silent.
    pub heartbeat: Span,
}

/// One attempt to run the command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunAttempt {
    /// The id of the command, which is on record before the command is started.
    pub command: CommandId,
    /// The session it is started in.
    pub session: SessionId,
    /// When it was begun.
    pub started_at: Timestamp,
    /// For how long the run had waited for approvals by then.
    pub waited_before_ms: u64,
    /// When it ended.
    pub ended_at: Option<Timestamp>,
    /// The exit code.
    pub exit_code: Option<i32>,
    /// Why it counts as failed.
    pub problem: Option<String>,
}

/// The sandbox of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunSandbox {
    /// Its id.
    pub id: SandboxId,
    /// Its name at the time.
    pub name: Name,
}

/// What was decided about a result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunDecision {
    /// What acceptance does; absent if it was rejected.
    pub how: Option<AcceptRule>,
    /// Who decided.
    pub by: KeyId,
    /// When.
    pub at: Timestamp,
    /// The comment of the decision.
    pub comment: String,
    /// Whether a sandbox of its own is deleted afterwards.
    pub discard: bool,
}

/// A run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// [`FORMAT`](crate::model::FORMAT).
    pub format: u32,
    /// Its id.
    pub id: RunId,
    /// The project it belongs to.
    pub project: Name,
    /// What was asked for.
    pub spec: RunSpec,
    /// Who asked.
    pub by: KeyId,
    status: RunStatus,
    /// What is begun and not done.
    pub pending: Option<RunEffect>,
    /// Where it works, once that is known.
    pub sandbox: Option<RunSandbox>,
    /// Whether that sandbox was made for it.
    pub own: bool,
    /// The snapshot it began with.
    pub first: Option<SnapshotId>,
    /// The snapshot to be reviewed.
    pub last: Option<SnapshotId>,
    /// The attempts to run the command.
    pub attempts: Vec<RunAttempt>,
    /// What the harness says it cost.
    pub cost: Option<f64>,
    /// What the sandbox had used before.
    pub usage_before: Usage,
    /// What it used.
    pub usage: Option<Usage>,
    /// What was decided about it.
    pub decision: Option<RunDecision>,
    /// Why it failed, was cancelled or expired.
    pub why: Option<String>,
    /// When it was asked for.
    pub queued_at: Timestamp,
    /// When it left the queue.
    pub started_at: Option<Timestamp>,
    /// When its work was done, or given up.
    pub finished_at: Option<Timestamp>,
    /// When it got its last status.
    pub ended_at: Option<Timestamp>,
    /// For how long it waited for approvals.
    pub waited_ms: u64,
    /// Since when it waits for one.
    pub waiting_since: Option<Timestamp>,
    /// Whether it was announced that it expires.
    pub noticed: bool,
    /// How often each spending limit was raised.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub raised: BTreeMap<SpendingKind, u32>,
}

impl Run {
    /// A run that was just asked for.
    #[must_use]
    pub fn new(project: Name, spec: RunSpec, by: KeyId) -> Self {
        Self {
            format: crate::model::FORMAT,
            id: RunId::fresh(),
            project,
            spec,
            by,
            status: RunStatus::Queued,
            pending: None,
            sandbox: None,
            own: false,
            first: None,
            last: None,
            attempts: Vec::new(),
            cost: None,
            usage_before: Usage::default(),
            usage: None,
            decision: None,
            why: None,
            queued_at: now(),
            started_at: None,
            finished_at: None,
            ended_at: None,
            waited_ms: 0,
            waiting_since: None,
            noticed: false,
            raised: BTreeMap::new(),
        }
    }

    /// How much it may use now by one of its limits.
    #[must_use]
    pub fn allowed(&self, limit: &SpendingLimit) -> f64 {
        let raised = self.raised.get(&limit.what).copied().unwrap_or(0);
        f64::from(raised).mul_add(limit.step.unwrap_or(limit.limit), limit.limit)
    }

    /// Its status.
    #[must_use]
    pub fn status(&self) -> RunStatus {
        self.status
    }

    /// Changes the status, with the times that belong to it.
    ///
    /// # Errors
    ///
    /// Returns [`RunRefused`] and changes nothing.
    pub fn apply(&mut self, change: RunChange, at: Timestamp) -> Result<(), RunRefused> {
        let (before, next) = (self.status, next_status(self.status, change)?);
        self.status = next;
        if next == RunStatus::WaitingForApproval && before != next {
            self.waiting_since = Some(at);
        } else if next != RunStatus::WaitingForApproval
            && let Some(since) = self.waiting_since.take()
        {
            self.waited_ms = self.waited_ms.saturating_add(millis(since, at));
        }
        match next {
            RunStatus::Running => {
                self.started_at.get_or_insert(at);
            }
            RunStatus::ReadyForReview | RunStatus::Failed | RunStatus::Cancelled => {
                self.finished_at.get_or_insert(at);
            }
            _ => {}
        }
        if next.is_final() {
            self.ended_at.get_or_insert(at);
        }
        Ok(())
    }

    /// For how long it has waited for approvals, until `at`.
    #[must_use]
    pub fn waited(&self, at: Timestamp) -> u64 {
        let waiting = self.waiting_since.map_or(0, |since| millis(since, at));
        self.waited_ms.saturating_add(waiting)
    }

    /// Until when it has to be reviewed.
    #[must_use]
    pub fn review_by(&self) -> Option<Timestamp> {
        let finished = self.finished_at.filter(|_| self.status == RunStatus::ReadyForReview)?;
        Some(after(finished, self.spec.keep))
    }

    /// When its expiry is announced: a day before, or when a tenth of the time is left.
    #[must_use]
    pub fn notice_at(&self) -> Option<Timestamp> {
        const DAY: u64 = 24 * 3600 * 1000;
        let ahead = (self.spec.keep.0 / 10).min(DAY);
        let span = jiff::SignedDuration::from_millis(i64::try_from(ahead).unwrap_or(0));
        self.review_by()?.checked_sub(span).ok()
    }
}

fn millis(from: Timestamp, to: Timestamp) -> u64 {
    u64::try_from(to.as_millisecond() - from.as_millisecond()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::{Run, RunChange, RunPlace, RunSpec, next_status, status_word};
    use crate::model::{AcceptRule, KeyId, RunStatus, Span, Timestamp};

    pub(super) fn spec() -> RunSpec {
        RunSpec {
            place: RunPlace::Existing { sandbox: "app".parse().unwrap() },
            command: None,
            repository: String::new(),
            owner: String::new(),
            purpose: String::new(),
            class: String::new(),
            priority: 0,
            approve: Vec::new(),
            approve_hosts: false,
            known_hosts: Vec::new(),
            approve_secrets: Vec::new(),
            spending: Vec::new(),
            on_accept: AcceptRule::Keep,
            keep: Span::days(10),
            timeout: None,
            retries: 0,
            heartbeat: Span::seconds(60),
        }
    }

    /// The whole table: what is not listed is refused.
    #[test]
    fn every_change_in_every_status() {
        let mut table = String::new();
        for status in RunStatus::ALL {
            for change in RunChange::ALL {
                if let Ok(next) = next_status(status, change) {
                    let (from, to) = (status_word(status), status_word(next));
                    writeln!(table, "{from} + {change:?} -> {to}").unwrap();
                }
            }
        }
        assert_eq!(
            table,
            "\
queued + Start -> running
queued + Fail -> failed
queued + Cancel -> cancelled
running + Ask -> waiting_for_approval
running + Answered -> running
running + Finish -> ready_for_review
running + Fail -> failed
running + Cancel -> cancelled
waiting_for_approval + Ask -> waiting_for_approval
waiting_for_approval + Answered -> running
waiting_for_approval + Finish -> ready_for_review
waiting_for_approval + Fail -> failed
waiting_for_approval + Cancel -> cancelled
ready_for_review + Accept -> accepted
ready_for_review + Reject -> rejected
ready_for_review + Expire -> expired
"
        );
    }

    #[test]
    fn final_statuses_take_nothing_and_every_other_leads_to_one() {
        for status in RunStatus::ALL {
            let taken =
                RunChange::ALL.iter().filter(|change| next_status(status, **change).is_ok());
            assert_eq!(taken.count() == 0, status.is_final(), "{status:?}");
        }
    }

    /// The table of the format's page is this one.
    #[test]
    fn the_document_has_the_same_table() {
        let page = include_str!("../../../../../docs/formats/runs.md");
        let table = page.split("| change | from | to |\n|---|---|---|\n").nth(1).unwrap();
        let mut listed = Vec::new();
        for row in table.lines().take_while(|line| line.starts_with('|')) {
            let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
            for from in cells[1].split(", ") {
                let plain = |text: &str| text.trim_matches('`').to_owned();
                listed.push((plain(from), cells[0].to_owned(), plain(cells[2])));
            }
        }
        let mut known = Vec::new();
        for status in RunStatus::ALL {
            for change in RunChange::ALL {
                if let Ok(next) = next_status(status, change) {
                    let change = format!("{change:?}").to_lowercase();
                    known.push((
                        status_word(status).to_owned(),
                        change,
                        status_word(next).to_owned(),
                    ));
                }
            }
        }
        listed.sort();
        known.sort();
        assert_eq!(listed, known);
    }

    #[test]
    fn time_spent_waiting_is_counted_and_times_are_kept() {
        let at = |seconds| Timestamp::from_second(seconds).unwrap();
        let mut run = Run::new("p".parse().unwrap(), spec(), KeyId::fresh());
        run.apply(RunChange::Start, at(10)).unwrap();
        run.apply(RunChange::Ask, at(20)).unwrap();
        run.apply(RunChange::Ask, at(25)).unwrap();
        assert_eq!(run.waited(at(30)), 10_000);
        run.apply(RunChange::Answered, at(30)).unwrap();
        run.apply(RunChange::Ask, at(40)).unwrap();
        run.apply(RunChange::Finish, at(45)).unwrap();
        assert_eq!((run.waited(at(99)), run.waiting_since), (15_000, None));
        assert_eq!((run.started_at, run.finished_at), (Some(at(10)), Some(at(45))));
        assert_eq!(run.review_by(), Some(at(45 + 10 * 24 * 3600)));
        assert_eq!(run.notice_at(), Some(at(45 + 9 * 24 * 3600)));
        assert!(run.apply(RunChange::Cancel, at(50)).is_err());
        run.apply(RunChange::Accept, at(60)).unwrap();
        assert_eq!((run.ended_at, run.review_by()), (Some(at(60)), None));
        let text = serde_json::to_string(&run).unwrap();
        assert_eq!(serde_json::from_str::<Run>(&text).unwrap(), run);
    }
}
