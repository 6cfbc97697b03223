//! A sandbox on record: what it is, and the state it is in.
//!
//! The [`SandboxState`] holds what only that state has, so that leaving a state drops it. Nothing outside of
//! this module can write it: [`Sandbox::transition`] asks the table in [`lifecycle`](super::lifecycle)
//! and refuses whatever the table does not know. On disk a sandbox is one flat document (`flat`).

mod change;
mod flat;
mod state;

use serde::{Deserialize, Serialize};

use super::lifecycle::{Effect, Phase};
use super::record::after;
use super::{
    Config, Decision, Ending, FORMAT, Finding, ForkOutcome, ImageConfig, LayerId, Lineage,
    MemoryId, MergePoint, Mounted, Name, Ownership, Revision, SandboxId, SessionId, SnapshotId,
    Timestamp, UidRange, Usage, Validation, now,
};

pub use change::{Change, NotAllowed};
pub use state::{Breakdown, Deletion, Ended, LastSession, OpenSession, SandboxState};

/// A named, durable machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "flat::Flat", into = "flat::Flat")]
pub struct Sandbox {
    /// [`FORMAT`].
    pub format: u32,
    /// Its id.
    pub id: SandboxId,
    /// Which version of the record this is, for saves that must not overwrite another one. The catalog
    /// writes it.
    pub revision: Revision,
    /// The node it belongs to; absent where there is only one. The catalog writes it.
    pub owner: Option<Ownership>,
    /// The project it belongs to.
    pub project: Name,
    /// Its name, unique in the project.
    pub name: Name,
    /// What was decided about it.
    pub config: Config,
    /// Whether all that it has of its own was sealed under the guard and the disk limit it has now: neither was ever changed, and
    /// it was not rolled back to a snapshot of another sandbox. Older records lack it, which counts
    /// as no.
    pub rules_as_made: bool,
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
    /// Its generation when it was last rolled back, or a fork promoted into it.
    pub rolled_back_at: Option<u64>,
    /// What it was merged into, lately.
    pub merged: Vec<MergePoint>,
    /// The outcome of its work, if it is a fork that was brought back.
    pub outcome: Option<ForkOutcome>,
    /// The session that is under way, or the last one.
    pub session: Option<SessionId>,
    /// What all sessions that have ended used together.
    pub totals: Usage,
    /// The idempotency key it was created with, so that a retry after a crash finds it.
    pub created_with: Option<String>,
    /// Whether the engine made it for itself, for a step of a build. It is not listed, and nobody finds it by name.
    pub internal: bool,
    /// When it was created.
    pub created_at: Timestamp,
    /// When its configuration or phase changed.
    pub updated_at: Timestamp,
    /// When its phase last changed. Older records lack it: the daemon that reads one takes the time
    /// of its last use.
    pub phase_at: Timestamp,
    /// When a session last began or ended.
    pub used_at: Timestamp,
    /// What the `validate` hook printed before the last stop: exit code and output.
    pub validated: Option<Validation>,
    /// Where it is, with what it has there.
    state: SandboxState,
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
            revision: Revision::NEW,
            owner: None,
            project,
            name,
            config,
            rules_as_made: true,
            generation: 0,
            current: None,
            missing: None,
            image_layers: Vec::new(),
            image_config: ImageConfig::default(),
            forked_from: None,
            rolled_back_at: None,
            merged: Vec::new(),
            outcome: None,
            session: None,
            totals: Usage::default(),
            created_with: None,
            internal: false,
            created_at: now,
            updated_at: now,
            phase_at: now,
            used_at: now,
            validated: None,
            state: SandboxState::at_rest(memory, None),
        }
    }

    /// What it would be if the session under way had not begun: at rest on its current snapshot. For copies of a data
    /// directory, which have neither the session's machine nor what it wrote. `memory`: that snapshot has some.
    #[must_use]
    pub fn without_session(mut self, memory: bool) -> Self {
        if matches!(self.phase(), Phase::Stopped | Phase::Paused) {
            return self;
        }
        if self.open_session().is_some() {
            // Its session is not in the copy either.
            self.session = None;
        }
        self.state = SandboxState::at_rest(memory, None);
        self
    }

    /// Makes it what it was, as the next version of the record: what was saved meanwhile is replaced.
    pub fn revert_to(&mut self, before: Self) {
        let (revision, owner) = (self.revision, self.owner.take());
        *self = Self { revision, owner, ..before };
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

    /// What the guard found in what the last session wrote, and what is not decided yet.
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
