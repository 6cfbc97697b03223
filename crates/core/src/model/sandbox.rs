//! A sandbox on record: what it is, and the state it is in.
//!
//! The [`SandboxState`] holds what only that state has, so that leaving a state drops it. Nothing outside of
//! this module can write it: [`Sandbox::transition`] asks the table in [`lifecycle`](super::lifecycle)
//! and refuses whatever the table does not know. On disk a sandbox is one flat document (`flat`).

mod flat;

use serde::{Deserialize, Serialize};

use super::lifecycle::{self, Command, Effect, Phase, Report};
use super::record::after;
use super::{
    Config, Decision, Ending, FORMAT, Finding, ImageConfig, LayerId, Lineage, MemoryId, Mounted,
    Name, OnDelete, SandboxId, SessionEnd, SessionId, SnapshotId, Timestamp, UidRange, Usage,
    Validation, now,
};

/// A named, durable machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "flat::Flat", into = "flat::Flat")]
pub struct Sandbox {
    /// [`FORMAT`].
    pub format: u32,
    /// Its id.
    pub id: SandboxId,
    /// The project it belongs to.
    pub project: Name,
    /// Its name, unique in the project.
    pub name: Name,
    /// What was decided about it.
    pub config: Config,
    /// How many snapshots were acknowledged.
    pub generation: u64,
    /// What the next session starts from; the image if absent.
    pub current: Option<SnapshotId>,
    /// The snapshot it stood on, which was deleted all the same. It does not start until it is rolled
    /// back to another one, or a session still under way leaves a new one: never from the image.
    pub missing: Option<SnapshotId>,
    /// Layers of the image it was created from, topmost first: a name that is later moved to another
    /// image does not move this sandbox.
    pub image_layers: Vec<LayerId>,
    /// What the image says about commands.
    pub image_config: ImageConfig,
    /// Where it was forked from.
    pub forked_from: Option<Lineage>,
    /// The session that is under way, or the last one.
    pub session: Option<SessionId>,
    /// What all sessions that have ended used together.
    pub totals: Usage,
    /// The idempotency key it was created with, so that a retry after a crash finds it.
    pub created_with: Option<String>,
    /// When it was created.
    pub created_at: Timestamp,
    /// When its configuration or phase changed.
    pub updated_at: Timestamp,
    /// When its phase last changed. Records of before do not tell: the daemon that reads one takes
    /// when it was last used.
    pub phase_at: Timestamp,
    /// When a session last began or ended.
    pub used_at: Timestamp,
    /// What the `validate` hook printed before the last stop: exit code and output.
    pub validated: Option<Validation>,
    /// Where it is, with what it has there.
    state: SandboxState,
}

/// Where a sandbox is, with what only a sandbox in that state has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SandboxState {
    /// Files only.
    Stopped(Option<Ended>),
    /// The driver was asked to boot it.
    Starting(OpenSession),
    /// The agent inside answers.
    Running(OpenSession),
    /// Memory, processes and files are kept in a snapshot.
    Paused(Option<Ended>),
    /// It is being ended and its files sealed.
    Stopping {
        /// Absent when a failed start left nothing to seal.
        session: Option<OpenSession>,
        /// How the session is to end, so that a daemon that comes back ends it the same way.
        ending: Ending,
        /// What had gone wrong before, if it was `failed`.
        failure: Breakdown,
    },
    /// Something broke.
    Failed {
        /// What is left of the last session.
        last: LastSession,
        /// The effect that did not succeed and may have left something behind.
        pending: Option<Effect>,
    },
    /// It is being removed.
    Deleted {
        /// What is left of the last session.
        last: LastSession,
        /// How it is removed.
        deletion: Deletion,
    },
}

/// A session whose files are not sealed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenSession {
    /// The layer that it writes to.
    pub layer: LayerId,
    /// What that layer stands on, topmost first. Kept apart from [`Sandbox::current`], which a
    /// checkpoint moves while the session goes on.
    pub chain: Vec<LayerId>,
    /// The layer right under the open one, while it is being sealed under a session that goes on.
    pub unsealed: Option<LayerId>,
    /// The memory image that it was started from, or whose disks it was booted on, topmost first.
    pub memory: Vec<MemoryId>,
    /// How many of the lowest layers are an image's, if the memory that it began with says so.
    pub image: Option<usize>,
    /// What was captured of it, topmost first. Written down before a capture begins, so that none is
    /// forgotten: what a capture took of the disk is part of every image of this session from then on.
    pub captured: Vec<MemoryId>,
    /// The drives that it has.
    pub mounted: Vec<Mounted>,
    /// The uid range it runs in. Absent when none was free: then it did not start.
    pub uids: Option<UidRange>,
    /// What was decided about what the guard found, for the end of this session.
    pub decision: Decision,
}

impl OpenSession {
    /// A session that writes to `layer` on top of `chain`, and has nothing else yet.
    #[must_use]
    pub fn new(layer: LayerId, chain: Vec<LayerId>) -> Self {
        Self {
            layer,
            chain,
            unsealed: None,
            memory: Vec::new(),
            image: None,
            captured: Vec::new(),
            mounted: Vec::new(),
            uids: None,
            decision: Decision::default(),
        }
    }
}

/// How the last session ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// As it was asked for.
    pub ending: Ending,
    /// What was decided about what the guard found.
    pub decision: Decision,
}

/// What is left of a session that broke off, or that a deleted sandbox had.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LastSession {
    /// The session, if its files are not sealed.
    pub session: Option<OpenSession>,
    /// How the session was to end.
    pub ending: Option<Ending>,
    /// What went wrong.
    pub failure: Breakdown,
}

/// What went wrong with a sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Breakdown {
    /// Why, for people. Absent when nothing is known but that there is no machine.
    pub why: Option<String>,
    /// What the guard found in what the last session wrote. It is down and not sealed, and stays so
    /// until somebody decides.
    pub guarded: Vec<Finding>,
}

/// How a sandbox is removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Deletion {
    /// What becomes of its snapshots.
    pub on_delete: OnDelete,
    /// Whether it goes even if what it wrote to drives is lost with it.
    pub forced: bool,
    /// Whether it is deleted because it expired, and nobody asked for it.
    pub expired: bool,
}

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
    /// The files of its last session are lost, and a rollback goes on without them.
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

/// What was decided where there is nothing to decide about.
static NOTHING_DECIDED: Decision = Decision {
    redact: false,
    discard: false,
    promote: Vec::new(),
    drop: Vec::new(),
    accept_doubtful: false,
};

impl Sandbox {
    /// A sandbox that never ran, on an empty image. `memory`: it is to stand on a snapshot with memory.
    #[must_use]
    pub fn new(project: Name, name: Name, config: Config, memory: bool) -> Self {
        let now = now();
        Self {
            format: FORMAT,
            id: SandboxId::fresh(),
            project,
            name,
            config,
            generation: 0,
            current: None,
            missing: None,
            image_layers: Vec::new(),
            image_config: ImageConfig::default(),
            forked_from: None,
            session: None,
            totals: Usage::default(),
            created_with: None,
            created_at: now,
            updated_at: now,
            phase_at: now,
            used_at: now,
            validated: None,
            state: SandboxState::at_rest(memory, None),
        }
    }

    /// When it goes away: its expiry after its last use.
    #[must_use]
    pub fn expires_at(&self) -> Timestamp {
        after(self.used_at, self.config.expires)
    }

    /// Changes the state, and remembers since when it is in its phase. Answers with what must be done
    /// now.
    ///
    /// # Errors
    ///
    /// Returns [`NotAllowed`] and changes nothing when the lifecycle does not know such a change.
    pub fn transition(&mut self, change: Change) -> Result<Option<Effect>, NotAllowed> {
        let phase = self.phase();
        let refused = NotAllowed { phase, change: change.name() };
        let (next, effect) = change.allowed_in(phase).ok_or(refused)?;
        let after = self.state.clone().after(change);
        self.state = after.filter(|after| after.phase() == next).ok_or(refused)?;
        if phase != next {
            self.phase_at = now();
        }
        Ok(effect)
    }

    /// Where it is, with what it has there.
    #[must_use]
    pub fn state(&self) -> &SandboxState {
        &self.state
    }

    /// Where it is.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.state.phase()
    }

    /// What was begun and is not completed.
    #[must_use]
    pub fn pending_effect(&self) -> Option<Effect> {
        match &self.state {
            SandboxState::Stopped(_) | SandboxState::Running(_) | SandboxState::Paused(_) => None,
            SandboxState::Starting(_) => Some(Effect::Boot),
            SandboxState::Stopping { .. } => Some(Effect::Seal),
            SandboxState::Failed { pending, .. } => *pending,
            SandboxState::Deleted { .. } => Some(Effect::Erase),
        }
    }

    /// The session whose files are not sealed: under way, or what is left of it.
    #[must_use]
    pub fn open_session(&self) -> Option<&OpenSession> {
        match &self.state {
            SandboxState::Stopped(_) | SandboxState::Paused(_) => None,
            SandboxState::Starting(session) | SandboxState::Running(session) => Some(session),
            SandboxState::Stopping { session, .. } => session.as_ref(),
            SandboxState::Failed { last, .. } | SandboxState::Deleted { last, .. } => {
                last.session.as_ref()
            }
        }
    }

    /// The same, to be changed.
    pub fn open_session_mut(&mut self) -> Option<&mut OpenSession> {
        match &mut self.state {
            SandboxState::Stopped(_) | SandboxState::Paused(_) => None,
            SandboxState::Starting(session) | SandboxState::Running(session) => Some(session),
            SandboxState::Stopping { session, .. } => session.as_mut(),
            SandboxState::Failed { last, .. } | SandboxState::Deleted { last, .. } => {
                last.session.as_mut()
            }
        }
    }

    /// The layer that its open session writes to.
    #[must_use]
    pub fn open_layer(&self) -> Option<&LayerId> {
        self.open_session().map(|session| &session.layer)
    }

    /// What that layer stands on, topmost first.
    #[must_use]
    pub fn open_chain(&self) -> &[LayerId] {
        self.open_session().map_or(&[], |session| &session.chain)
    }

    /// The layer right under the open one, while it is being sealed.
    #[must_use]
    pub fn unsealed(&self) -> Option<&LayerId> {
        self.open_session().and_then(|session| session.unsealed.as_ref())
    }

    /// The memory image that its open session was started from, topmost first.
    #[must_use]
    pub fn open_memory(&self) -> &[MemoryId] {
        self.open_session().map_or(&[], |session| &session.memory)
    }

    /// What was captured of its open session, topmost first.
    #[must_use]
    pub fn captured(&self) -> &[MemoryId] {
        self.open_session().map_or(&[], |session| &session.captured)
    }

    /// The drives that its open session has.
    #[must_use]
    pub fn mounted(&self) -> &[Mounted] {
        self.open_session().map_or(&[], |session| &session.mounted)
    }

    /// The uid range its open session runs in.
    #[must_use]
    pub fn uids(&self) -> Option<UidRange> {
        self.open_session().and_then(|session| session.uids)
    }

    /// How its session ended, is to end, or was to end when something broke.
    #[must_use]
    pub fn ending(&self) -> Option<Ending> {
        match &self.state {
            SandboxState::Stopped(ended) | SandboxState::Paused(ended) => {
                ended.as_ref().map(|ended| ended.ending)
            }
            SandboxState::Starting(_) | SandboxState::Running(_) => None,
            SandboxState::Stopping { ending, .. } => Some(*ending),
            SandboxState::Failed { last, .. } | SandboxState::Deleted { last, .. } => last.ending,
        }
    }

    /// What was decided about what the guard found, for the end of its session.
    #[must_use]
    pub fn decision(&self) -> &Decision {
        let ended = match &self.state {
            SandboxState::Stopped(ended) | SandboxState::Paused(ended) => ended.as_ref(),
            _ => None,
        };
        let open = || self.open_session().map(|session| &session.decision);
        ended.map(|ended| &ended.decision).or_else(open).unwrap_or(&NOTHING_DECIDED)
    }

    /// Why it failed, for people. Kept while it is stopped or deleted after that.
    #[must_use]
    pub fn failure(&self) -> Option<&str> {
        self.state.failure().and_then(|failure| failure.why.as_deref())
    }

    /// What the guard found in what the last session wrote, and nobody has decided about.
    #[must_use]
    pub fn guarded(&self) -> &[Finding] {
        self.state.failure().map_or(&[], |failure| &failure.guarded)
    }

    /// How it is deleted, if it is.
    #[must_use]
    pub fn deletion(&self) -> Option<Deletion> {
        match &self.state {
            SandboxState::Deleted { deletion, .. } => Some(*deletion),
            _ => None,
        }
    }
}

impl SandboxState {
    fn at_rest(memory: bool, ended: Option<Ended>) -> Self {
        if memory { Self::Paused(ended) } else { Self::Stopped(ended) }
    }

    fn phase(&self) -> Phase {
        match self {
            Self::Stopped(_) => Phase::Stopped,
            Self::Starting(_) => Phase::Starting,
            Self::Running(_) => Phase::Running,
            Self::Paused(_) => Phase::Paused,
            Self::Stopping { .. } => Phase::Stopping,
            Self::Failed { .. } => Phase::Failed,
            Self::Deleted { .. } => Phase::Deleted,
        }
    }

    fn failure(&self) -> Option<&Breakdown> {
        match self {
            Self::Stopped(_) | Self::Starting(_) | Self::Running(_) | Self::Paused(_) => None,
            Self::Stopping { failure, .. } => Some(failure),
            Self::Failed { last, .. } | Self::Deleted { last, .. } => Some(&last.failure),
        }
    }

    /// What is left of the session when nothing more is done about it.
    fn last(self) -> LastSession {
        match self {
            Self::Stopped(ended) | Self::Paused(ended) => {
                LastSession { ending: ended.map(|ended| ended.ending), ..LastSession::default() }
            }
            Self::Starting(session) | Self::Running(session) => {
                LastSession { session: Some(session), ..LastSession::default() }
            }
            Self::Stopping { session, ending, failure } => {
                LastSession { session, ending: Some(ending), failure }
            }
            Self::Failed { last, .. } | Self::Deleted { last, .. } => last,
        }
    }

    /// The state after a change; `None` when this state has not what the change needs, or would lose a
    /// session that is not sealed.
    fn after(self, change: Change) -> Option<Self> {
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

impl LastSession {
    /// A decision holds for one attempt.
    fn undecided(mut self) -> Self {
        if let Some(session) = &mut self.session {
            session.decision = Decision::default();
        }
        self
    }

    fn broke(self, why: String, guarded: Vec<Finding>) -> Self {
        let guarded = if guarded.is_empty() { self.failure.guarded } else { guarded };
        Self { failure: Breakdown { why: Some(why), guarded }, ..self }
    }
}

impl Change {
    /// What the table says about it.
    fn allowed_in(&self, phase: Phase) -> Option<(Phase, Option<Effect>)> {
        let report = match self {
            Self::Start(_) => return lifecycle::command(phase, Command::Start).ok(),
            Self::Delete(_) => return lifecycle::command(phase, Command::Delete).ok(),
            Self::End(Ending { end: SessionEnd::Interrupted, .. })
                if matches!(phase, Phase::Starting | Phase::Running) =>
            {
                Report::Died
            }
            Self::End(_) => return lifecycle::command(phase, Command::Stop).ok(),
            Self::Up => Report::Up,
            Self::StartBroke { .. } | Self::Broke { .. } => Report::Broke,
            Self::Undone { paused } => Report::Undone { paused: *paused },
            Self::Down => Report::Down,
            Self::Captured(_) => Report::Captured,
            Self::Lost => Report::Lost,
            Self::GiveUp => Report::GivenUp,
            Self::RolledBack { memory } => Report::RolledBack { memory: *memory },
            Self::Restored { memory } => Report::Restored { memory: *memory },
        };
        lifecycle::report(phase, report)
    }

    fn name(&self) -> &'static str {
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

    use super::{Change, Deletion, NotAllowed, OpenSession, Sandbox, SandboxState};
    use crate::model::lifecycle::{Effect, Phase};
    use crate::model::{
        Config, Decision, Ending, Expiry, Finding, FindingKind, LayerId, Method, OnDelete,
        SessionEnd, SnapshotKind,
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

    /// No change loses a session that may have written something, but those that say so.
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
