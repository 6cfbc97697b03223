//! How a session ends, and the options of the snapshot that is taken then.

use crate::model::{Ending, Expiry, Finding, Method, Sandbox, SessionEnd, Snapshot, SnapshotKind};

/// The options of a request for a snapshot.
#[derive(Debug, Clone, Default)]
pub(in crate::engine) struct SnapshotOptions {
    pub(in crate::engine) label: Option<String>,
    pub(in crate::engine) method: Method,
    pub(in crate::engine) expiry: Expiry,
    /// What the guard found in it and let pass.
    pub(in crate::engine) findings: Vec<Finding>,
}

impl SnapshotOptions {
    /// Whether an existing snapshot of the same files is enough, or another one must be made.
    pub(in crate::engine) fn fits(&self, snapshot: &Snapshot) -> bool {
        self.expiry == Expiry::Retention && (self.label.is_none() || self.label == snapshot.label)
    }
}

impl From<Ending> for SnapshotOptions {
    fn from(ending: Ending) -> Self {
        Self { label: None, method: ending.method, expiry: ending.expiry, findings: Vec::new() }
    }
}

impl Ending {
    /// The options of a snapshot that a session's end takes without a request.
    pub(in crate::engine) fn by_itself(kind: SnapshotKind, end: SessionEnd) -> Self {
        Self { end, kind, always: false, method: Method::Automatic, expiry: Expiry::Retention }
    }

    /// A session that broke off.
    pub(in crate::engine) fn broken() -> Self {
        Self::by_itself(SnapshotKind::Recovered, SessionEnd::Interrupted)
    }

    /// Whether what the session wrote is kept.
    pub(in crate::engine) fn keeps(&self, sandbox: &Sandbox) -> bool {
        let kept = self.always || sandbox.config.persistent;
        (kept || self.kind == SnapshotKind::BeforeRollback) && !sandbox.decision().discard
    }

    /// Whether a caller waits who can get the error that it cannot be done.
    pub(super) fn is_asked_for(&self) -> bool {
        matches!(self.end, SessionEnd::Stopped | SessionEnd::RolledBack)
    }
}
