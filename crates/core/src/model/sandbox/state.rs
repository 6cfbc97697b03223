//! The states of a sandbox, with what only a sandbox in that state has.

use crate::model::lifecycle::{Effect, Phase};
use crate::model::{Decision, Ending, Finding, LayerId, MemoryId, Mounted, OnDelete, UidRange};

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
        /// How the session is to end, so that a restarted daemon ends it the same way.
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
    /// checkpoint moves while the session continues.
    pub chain: Vec<LayerId>,
    /// The layer right under the open one, while it is being sealed under a session that continues.
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
    /// Whether it is deleted because it expired, without a request.
    pub expired: bool,
}

impl SandboxState {
    pub(super) fn at_rest(memory: bool, ended: Option<Ended>) -> Self {
        if memory { Self::Paused(ended) } else { Self::Stopped(ended) }
    }

    pub(super) fn phase(&self) -> Phase {
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

    pub(super) fn failure(&self) -> Option<&Breakdown> {
        match self {
            Self::Stopped(_) | Self::Starting(_) | Self::Running(_) | Self::Paused(_) => None,
            Self::Stopping { failure, .. } => Some(failure),
            Self::Failed { last, .. } | Self::Deleted { last, .. } => Some(&last.failure),
        }
    }

    /// What is left of the session when nothing more is done about it.
    pub(super) fn last(self) -> LastSession {
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
}

impl LastSession {
    /// A decision holds for one attempt.
    pub(super) fn undecided(mut self) -> Self {
        if let Some(session) = &mut self.session {
            session.decision = Decision::default();
        }
        self
    }

    pub(super) fn broke(self, why: String, guarded: Vec<Finding>) -> Self {
        let guarded = if guarded.is_empty() { self.failure.guarded } else { guarded };
        Self { failure: Breakdown { why: Some(why), guarded }, ..self }
    }
}
