//! What can happen to a sandbox, and which state follows.
//!
//! [`lifecycle`] says which changes a phase allows. [`SandboxState::after`] says what becomes of the
//! data of the state that is left, and refuses a change that would drop an open session.

use super::state::{Breakdown, Deletion, Ended, LastSession, OpenSession, SandboxState};
use crate::model::lifecycle::{self, Effect, LifecycleCommand, LifecycleReport, Phase};
use crate::model::{Decision, Ending, Finding, SessionEnd};

/// What happens to a sandbox, with what it has from then on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// It is started, and this is its session.
    Start(OpenSession),
    /// The agent answers.
    Up,
    /// It did not start.
    StartBroke {
        /// Why, for people.
        why: String,
        /// Whether its machine is gone, so that nothing is left of the session.
        gone: bool,
    },
    /// A start was rolled back: the sandbox is what it was before.
    Undone {
        /// Whether it was paused.
        paused: bool,
    },
    /// Its session ends because somebody asked, its time was up, or it broke off.
    End(Ending),
    /// Its session is down and sealed.
    Down,
    /// Its memory is on record.
    Captured(Ending),
    /// The end of its session, or its deletion, did not succeed.
    Broke {
        /// Why, for people.
        why: String,
        /// What the guard found. Empty: what was found before still holds.
        guarded: Vec<Finding>,
    },
    /// The record says that something is under way, and there is no machine.
    Lost,
    /// The files of its last session are lost, and a rollback continues without them.
    GiveUp,
    /// It stands on another snapshot.
    RolledBack {
        /// Whether that has memory.
        memory: bool,
    },
    /// It is deleted. Deleting it again can only add to how it is deleted.
    Delete(Deletion),
    /// It was taken out of the trash.
    Restored {
        /// Whether its snapshot has memory.
        memory: bool,
    },
}

/// A change that the state of a sandbox does not allow. Nothing was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("`{change}` is not possible while a sandbox is {phase:?}")]
pub struct NotAllowed {
    /// Where the sandbox is.
    pub phase: Phase,
    /// The change.
    pub change: &'static str,
}

impl SandboxState {
    /// The state after a change; `None` when this state has not what the change needs, or would lose a
    /// session that is not sealed.
    pub(super) fn after(self, change: Change) -> Option<Self> {
        Some(match (self, change) {
            (
                Self::Stopped(_)
                | Self::Paused(_)
                | Self::Failed { last: LastSession { session: None, .. }, .. },
                Change::Start(session),
            ) => Self::Starting(session),
            (Self::Starting(session), Change::Up) => Self::Running(session),
            (
                Self::Starting(session) | Self::Running(session),
                Change::StartBroke { why, gone },
            ) => {
                let failure = Breakdown { why: Some(why), guarded: Vec::new() };
                let session = Some(session).filter(|_| !gone);
                // What is left of it is of a session that never began.
                let pending = session.as_ref().map(|_| Effect::Boot);
                Self::Failed { last: LastSession { session, ending: None, failure }, pending }
            }
            (
                Self::Starting(_) | Self::Failed { pending: Some(Effect::Boot), .. },
                Change::Undone { paused },
            ) => Self::at_rest(paused, None),
            (
                before @ (Self::Starting(_)
                | Self::Running(_)
                | Self::Stopping { .. }
                | Self::Failed { .. }),
                Change::End(ending),
            ) => {
                let LastSession { session, failure, .. } = before.last();
                Self::Stopping { session, ending, failure }
            }
            (Self::Stopping { session, ending, .. }, Change::Down) => {
                let decision = session.map(|session| session.decision).unwrap_or_default();
                Self::Stopped(Some(Ended { ending, decision }))
            }
            (Self::Running(_), Change::Captured(ending)) => {
                Self::Paused(Some(Ended { ending, decision: Decision::default() }))
            }
            (Self::Stopping { session, ending, failure }, Change::Broke { why, guarded }) => {
                let last = LastSession { session, ending: Some(ending), failure };
                Self::Failed { last: last.undecided().broke(why, guarded), pending: None }
            }
            (Self::Deleted { last, .. }, Change::Broke { why, guarded }) => {
                Self::Failed { last: last.broke(why, guarded), pending: None }
            }
            (
                before @ (Self::Starting(_) | Self::Running(_) | Self::Stopping { .. }),
                Change::Lost,
            ) => {
                let pending = match &before {
                    Self::Starting(_) => Some(Effect::Boot),
                    Self::Stopping { .. } => Some(Effect::Seal),
                    _ => None,
                };
                Self::Failed { last: before.last(), pending }
            }
            (Self::Failed { last, .. }, Change::GiveUp) => {
                let failure = Breakdown { guarded: Vec::new(), ..last.failure };
                let last = LastSession { session: None, failure, ..last };
                Self::Failed { last, pending: None }
            }
            (Self::Stopped(ended) | Self::Paused(ended), Change::RolledBack { memory }) => {
                Self::at_rest(memory, ended)
            }
            (
                Self::Failed { last: LastSession { session: None, ending, .. }, .. },
                Change::RolledBack { memory },
            ) => {
                let decision = Decision::default();
                Self::at_rest(memory, ending.map(|ending| Ended { ending, decision }))
            }
            (Self::Deleted { last, deletion }, Change::Delete(more)) => {
                let forced = deletion.forced | more.forced;
                let expired = deletion.expired | more.expired;
                Self::Deleted { last, deletion: Deletion { forced, expired, ..deletion } }
            }
            (before, Change::Delete(deletion)) => Self::Deleted { last: before.last(), deletion },
            (Self::Deleted { .. }, Change::Restored { memory }) => Self::at_rest(memory, None),
            _ => return None,
        })
    }
}

impl Change {
    /// What the table says about it.
    pub(super) fn allowed_in(&self, phase: Phase) -> Option<(Phase, Option<Effect>)> {
        let report = match self {
            Self::Start(_) => return lifecycle::command(phase, LifecycleCommand::Start).ok(),
            Self::Delete(_) => return lifecycle::command(phase, LifecycleCommand::Delete).ok(),
            Self::End(Ending { end: SessionEnd::Interrupted, .. })
                if matches!(phase, Phase::Starting | Phase::Running) =>
            {
                LifecycleReport::Died
            }
            Self::End(_) => return lifecycle::command(phase, LifecycleCommand::Stop).ok(),
            Self::Up => LifecycleReport::Up,
            Self::StartBroke { .. } | Self::Broke { .. } => LifecycleReport::Broke,
            Self::Undone { paused } => LifecycleReport::Undone { paused: *paused },
            Self::Down => LifecycleReport::Down,
            Self::Captured(_) => LifecycleReport::Captured,
            Self::Lost => LifecycleReport::Lost,
            Self::GiveUp => LifecycleReport::GivenUp,
            Self::RolledBack { memory } => LifecycleReport::RolledBack { memory: *memory },
            Self::Restored { memory } => LifecycleReport::Restored { memory: *memory },
        };
        lifecycle::report(phase, report)
    }

    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Start(_) => "start",
            Self::Up => "up",
            Self::StartBroke { .. } => "start failed",
            Self::Undone { .. } => "start undone",
            Self::End(_) => "end session",
            Self::Down => "session ended",
            Self::Captured(_) => "pause",
            Self::Broke { .. } => "failed",
            Self::Lost => "machine lost",
            Self::GiveUp => "give up session",
            Self::RolledBack { .. } => "roll back",
            Self::Delete(_) => "delete",
            Self::Restored { .. } => "restore",
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::{Change, NotAllowed};
    use crate::model::lifecycle::{Effect, Phase};
    use crate::model::{
        Config, Decision, Deletion, Ending, Expiry, Finding, FindingKind, LayerId, Method,
        OnDelete, OpenSession, Sandbox, SandboxState, SessionEnd, SnapshotKind,
    };

    fn ending(end: SessionEnd) -> Ending {
        let (method, expiry) = (Method::Automatic, Expiry::Retention);
        Ending { end, kind: SnapshotKind::Stop, always: false, method, expiry }
    }

    fn open() -> OpenSession {
        let decision = Decision { redact: true, ..Decision::default() };
        OpenSession { decision, ..OpenSession::new(LayerId::fresh(), vec![LayerId::fresh()]) }
    }

    fn found() -> Finding {
        Finding {
            kind: FindingKind::Secret,
            path: "/work/a".to_owned(),
            size: 3,
            secret: None,
            place: None,
            encoding: None,
            offset: None,
            detail: None,
            commands: Vec::new(),
        }
    }

    fn broke(why: &str, guarded: Vec<Finding>) -> Change {
        Change::Broke { why: why.to_owned(), guarded }
    }

    /// A sandbox that went through these changes.
    fn after(changes: impl IntoIterator<Item = Change>) -> Sandbox {
        let name = |text: &str| text.parse().expect("a name");
        let mut sandbox = Sandbox::new(name("p"), name("app"), Config::default(), false);
        for change in changes {
            sandbox.transition(change).expect("it is allowed");
        }
        sandbox
    }

    /// Every state there is, with and without a session where both can be.
    fn states() -> Vec<(&'static str, Sandbox)> {
        let start = || Change::Start(open());
        let stop = || Change::End(ending(SessionEnd::Stopped));
        let failed = |gone| Change::StartBroke { why: "no".to_owned(), gone };
        vec![
            ("stopped", after([])),
            ("starting", after([start()])),
            ("running", after([start(), Change::Up])),
            ("paused", after([start(), Change::Up, Change::Captured(ending(SessionEnd::Paused))])),
            ("stopping", after([start(), Change::Up, stop()])),
            ("stopping, nothing open", after([start(), failed(true), stop()])),
            ("failed at the start", after([start(), failed(false)])),
            ("failed, nothing open", after([start(), failed(true)])),
            ("failed at the end", after([start(), Change::Up, stop(), broke("no", vec![])])),
            ("deleted", after([start(), Change::Up, Change::Delete(Deletion::default())])),
        ]
    }

    fn changes() -> Vec<Change> {
        vec![
            Change::Start(open()),
            Change::Up,
            Change::StartBroke { why: "no".to_owned(), gone: false },
            Change::StartBroke { why: "no".to_owned(), gone: true },
            Change::Undone { paused: false },
            Change::Undone { paused: true },
            Change::End(ending(SessionEnd::Stopped)),
            Change::End(ending(SessionEnd::Interrupted)),
            Change::Down,
            Change::Captured(ending(SessionEnd::Idle)),
            broke("no", vec![found()]),
            Change::Lost,
            Change::GiveUp,
            Change::RolledBack { memory: false },
            Change::RolledBack { memory: true },
            Change::Delete(Deletion::default()),
            Change::Restored { memory: false },
            Change::Restored { memory: true },
        ]
    }

    /// All that is allowed, so that a change to one arm shows as a one-line diff. What is not in here is
    /// refused and changes nothing; nothing is allowed that the table of the lifecycle does not know.
    #[test]
    fn every_change_in_every_state() {
        let mut table = String::new();
        for (name, before) in states() {
            for change in changes() {
                let (what, listed) = (change.name(), change.allowed_in(before.phase()));
                let shown = match &change {
                    Change::End(ending) => format!("{what} ({:?})", ending.end),
                    Change::Undone { .. } | Change::RolledBack { .. } | Change::Restored { .. } => {
                        format!("{change:?}")
                    }
                    Change::StartBroke { gone: true, .. } => format!("{what}, machine gone"),
                    _ => what.to_owned(),
                };
                let mut sandbox = before.clone();
                match sandbox.transition(change) {
                    Ok(effect) => {
                        assert_eq!(Some((sandbox.phase(), effect)), listed, "{name} + {shown}");
                        let open = sandbox.open_session().map_or("", |_| ", open");
                        writeln!(table, "{name} + {shown} -> {:?}{open}", sandbox.phase())
                            .expect("a string takes text");
                    }
                    Err(refused) => {
                        assert_eq!(refused, NotAllowed { phase: before.phase(), change: what });
                        assert_eq!(sandbox, before, "{name} + {shown}");
                    }
                }
            }
        }
        insta::assert_snapshot!(table, @r"
        stopped + start -> Starting, open
        stopped + RolledBack { memory: false } -> Stopped
        stopped + RolledBack { memory: true } -> Paused
        stopped + delete -> Deleted
        starting + up -> Running, open
        starting + start failed -> Failed, open
        starting + start failed, machine gone -> Failed
        starting + Undone { paused: false } -> Stopped
        starting + Undone { paused: true } -> Paused
        starting + end session (Interrupted) -> Stopping, open
        starting + machine lost -> Failed, open
        starting + delete -> Deleted, open
        running + start failed -> Failed, open
        running + start failed, machine gone -> Failed
        running + end session (Stopped) -> Stopping, open
        running + end session (Interrupted) -> Stopping, open
        running + pause -> Paused
        running + machine lost -> Failed, open
        running + delete -> Deleted, open
        paused + start -> Starting, open
        paused + RolledBack { memory: false } -> Stopped
        paused + RolledBack { memory: true } -> Paused
        paused + delete -> Deleted
        stopping + end session (Stopped) -> Stopping, open
        stopping + end session (Interrupted) -> Stopping, open
        stopping + session ended -> Stopped
        stopping + failed -> Failed, open
        stopping + machine lost -> Failed, open
        stopping + delete -> Deleted, open
        stopping, nothing open + end session (Stopped) -> Stopping
        stopping, nothing open + end session (Interrupted) -> Stopping
        stopping, nothing open + session ended -> Stopped
        stopping, nothing open + failed -> Failed
        stopping, nothing open + machine lost -> Failed
        stopping, nothing open + delete -> Deleted
        failed at the start + Undone { paused: false } -> Stopped
        failed at the start + Undone { paused: true } -> Paused
        failed at the start + end session (Stopped) -> Stopping, open
        failed at the start + end session (Interrupted) -> Stopping, open
        failed at the start + give up session -> Failed
        failed at the start + delete -> Deleted, open
        failed, nothing open + start -> Starting, open
        failed, nothing open + end session (Stopped) -> Stopping
        failed, nothing open + end session (Interrupted) -> Stopping
        failed, nothing open + give up session -> Failed
        failed, nothing open + RolledBack { memory: false } -> Stopped
        failed, nothing open + RolledBack { memory: true } -> Paused
        failed, nothing open + delete -> Deleted
        failed at the end + end session (Stopped) -> Stopping, open
        failed at the end + end session (Interrupted) -> Stopping, open
        failed at the end + give up session -> Failed
        failed at the end + delete -> Deleted, open
        deleted + failed -> Failed, open
        deleted + delete -> Deleted, open
        deleted + Restored { memory: false } -> Stopped
        deleted + Restored { memory: true } -> Paused
        ");
    }

    /// Only the changes that are marked so drop a session that may have written something.
    #[test]
    fn an_open_session_is_never_dropped_by_the_way() {
        for (name, before) in states() {
            let Some(open) = before.open_session() else { continue };
            for change in changes() {
                let mut sandbox = before.clone();
                let what = change.name();
                let ends = matches!(
                    change,
                    Change::Down
                        | Change::Captured(_)
                        | Change::StartBroke { gone: true, .. }
                        | Change::Undone { .. }
                        | Change::GiveUp
                        | Change::Restored { .. }
                );
                if sandbox.transition(change).is_ok() && !ends {
                    let layer = sandbox.open_session().map(|open| &open.layer);
                    assert_eq!(layer, Some(&open.layer), "{name} + {what}");
                }
            }
        }
    }

    #[test]
    fn an_end_keeps_how_it_was_asked_for_and_nothing_else() {
        let stop = ending(SessionEnd::Timeout);
        let mut sandbox = after([Change::Start(open()), Change::Up, Change::End(stop)]);
        assert_eq!(sandbox.pending_effect(), Some(Effect::Seal));
        assert_eq!(sandbox.ending(), Some(stop));
        sandbox.transition(Change::Down).expect("it is stopping");
        assert_eq!((sandbox.ending(), sandbox.decision().redact), (Some(stop), true));
        assert_eq!((sandbox.open_session(), sandbox.pending_effect()), (None, None));
        sandbox.transition(Change::Start(OpenSession::new(LayerId::fresh(), vec![]))).expect("up");
        assert_eq!((sandbox.ending(), sandbox.decision().redact), (None, false));
    }

    #[test]
    fn what_the_guard_found_stays_until_the_session_ends() {
        let stop = || Change::End(ending(SessionEnd::Stopped));
        let begin = [Change::Start(open()), Change::Up, stop(), broke("secret", vec![found()])];
        let mut sandbox = after(begin);
        assert_eq!((sandbox.failure(), sandbox.guarded().len()), (Some("secret"), 1));
        assert!(sandbox.decision().is_none(), "a decision holds for one attempt");
        for change in [stop(), broke("disk", vec![])] {
            sandbox.transition(change).expect("it is allowed");
            assert_eq!((sandbox.guarded().len(), sandbox.open_session().is_some()), (1, true));
        }
        assert_eq!(sandbox.failure(), Some("disk"));
        for change in [stop(), Change::Down] {
            sandbox.transition(change).expect("it is allowed");
        }
        assert_eq!((sandbox.failure(), sandbox.guarded().len()), (None, 0));
    }

    #[test]
    fn a_second_delete_can_only_add_to_the_first() {
        let first = Deletion { on_delete: OnDelete::Keep, forced: false, expired: true };
        let mut sandbox = after([Change::Delete(first)]);
        let phase_at = sandbox.phase_at;
        let second = Deletion { forced: true, ..Deletion::default() };
        assert_eq!(sandbox.transition(Change::Delete(second)), Ok(None));
        assert_eq!(sandbox.deletion(), Some(Deletion { forced: true, ..first }));
        assert_eq!(sandbox.phase_at, phase_at);
        sandbox.transition(Change::Restored { memory: true }).expect("it is deleted");
        assert_eq!(sandbox.state(), &SandboxState::Paused(None));
        assert_eq!(sandbox.phase(), Phase::Paused);
    }
}
