//! Snapshots on record, and when they expire.

use serde::{Deserialize, Serialize};

use crate::model::record::{Command, ImageConfig, MergeSource, after};
use crate::model::{
    Finding, LayerId, MemoryId, Name, SandboxId, SecretGiven, SessionId, SnapshotId, Span,
    Timestamp,
};

/// A point a sandbox can be resumed or forked from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// [`FORMAT`].
    pub format: u32,
    /// Its id.
    pub id: SnapshotId,
    /// The project it belongs to.
    pub project: Name,
    /// The sandbox it was made of. It may be gone by now.
    pub sandbox: SandboxId,
    /// That sandbox's name.
    pub sandbox_name: Name,
    /// The session it was made in.
    pub session: SessionId,
    /// That sandbox's generation with this snapshot.
    pub generation: u64,
    /// The snapshot before it.
    pub parent: Option<SnapshotId>,
    /// Whose changes it got, if it is the result of a merge of all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merged: Option<MergeSource>,
    /// How it came about.
    pub kind: SnapshotKind,
    /// What people call it.
    pub label: Option<String>,
    /// All layers, the image's included; the first is the topmost.
    pub layers: Vec<LayerId>,
    /// The memory image, topmost first; empty if it has none. Its disks then hold what was written on top of `layers`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memory: Vec<MemoryId>,
    /// How many of the lowest layers were an image's for the machine whose memory this is: its root is mounted from them
    /// together, and another machine must have it the same way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<usize>,
    /// The commands that were alive in that memory, each with what it had printed by then.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub commands: Vec<Command>,
    /// The secrets that may be in its memory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub secrets: Vec<SecretGiven>,
    /// Which sandbox its memory takes itself for; the one it was made of if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity_of: Option<SandboxId>,
    /// When it was made.
    pub created_at: Timestamp,
    /// What caused it.
    #[serde(default)]
    pub method: Method,
    /// When a session, a fork or a new sandbox last started from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_at: Option<Timestamp>,
    /// How long after its last use it goes away, unless it is some sandbox's current one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_after: Option<Span>,
    /// Whether the request for it set the expiry; retention then does not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub expiry_given: bool,
    /// How long instead, while it is one of the newest that retention keeps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept: Option<Span>,
    /// When it goes away whatever its use: records of before have this.
    #[serde(default, rename = "expires_at", skip_serializing_if = "Option::is_none")]
    pub expires_on: Option<Timestamp>,
    /// Whether it stays although its sandbox was deleted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub outlives: bool,
    /// When its sandbox was deleted, of a snapshot that only stays because other sandboxes stand on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_deleted_at: Option<Timestamp>,
    /// When it was deleted or expired. What is left then is this record, without layers: a
    /// *tombstone*, for lists to show until it goes too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deleted_at: Option<Timestamp>,
    /// What the guard found in it and let pass, or took out of it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub findings: Vec<Finding>,
    /// The image's settings for commands, so that a fork needs no image.
    pub image_config: ImageConfig,
}

impl Snapshot {
    /// Whether it holds the memory of a machine, and not its files alone.
    #[must_use]
    pub fn has_memory(&self) -> bool {
        !self.memory.is_empty()
    }

    /// When it goes away, unless it is some sandbox's current one.
    #[must_use]
    pub fn expires_at(&self) -> Option<Timestamp> {
        let span =
            if self.expiry_given { self.expires_after } else { self.kept.or(self.expires_after) };
        let used = self.used_at.unwrap_or(self.created_at);
        span.map(|span| after(used, span)).or(self.expires_on)
    }
}

/// How a snapshot came about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SnapshotKind {
    /// At a stop.
    Stop,
    /// While the session went on, because somebody asked.
    Checkpoint,
    /// While the session went on, before a fork.
    Fork,
    /// Before a rollback, so that it can be undone.
    BeforeRollback,
    /// From what a session that broke off had written.
    Recovered,
    /// At a pause: with memory.
    Pause,
    /// From a merge of another sandbox's changes.
    Merge,
}

/// Whether somebody asked for a snapshot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// Taken at the end of a session, without a request.
    #[default]
    Automatic,
    /// Somebody asked for it.
    Manual,
}

/// How long a snapshot is kept, as its maker asked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Expiry {
    /// Nothing: the sandbox's retention decides.
    #[default]
    Retention,
    /// For good.
    Never,
    /// So long after its last use.
    After(Span),
}

impl From<Option<Option<Span>>> for Expiry {
    fn from(given: Option<Option<Span>>) -> Self {
        match given {
            None => Self::Retention,
            Some(None) => Self::Never,
            Some(Some(span)) => Self::After(span),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Snapshot;
    use crate::model::{Span, Timestamp};

    const SNAPSHOT: &str = r#"{
        "format": 1, "id": "snp-01k00000000000000000000000", "project": "p",
        "sandbox": "sbx-01k00000000000000000000000", "sandbox_name": "app",
        "session": "ses-01k00000000000000000000000", "generation": 3, "parent": null, "kind": "stop",
        "label": null, "layers": ["lay-01k00000000000000000000000"],
        "created_at": "2026-01-01T00:00:00Z", "expires_at": "2026-01-08T00:00:00Z",
        "image_config": {"user": null, "cwd": null, "env": {}}
    }"#;

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    #[test]
    fn a_snapshot_of_before_expires_when_it_would_have() {
        let snapshot: Snapshot = serde_json::from_str(SNAPSHOT).unwrap();
        assert_eq!(snapshot.expires_at(), Some(at("2026-01-08T00:00:00Z")));
        assert!(!snapshot.outlives && snapshot.deleted_at.is_none());
        let again: Snapshot =
            serde_json::from_str(&serde_json::to_string(&snapshot).unwrap()).unwrap();
        assert_eq!(again, snapshot);
    }

    #[test]
    fn who_decides_when_a_snapshot_expires() {
        let mut snapshot: Snapshot = serde_json::from_str(SNAPSHOT).unwrap();
        snapshot.expires_on = None;
        assert_eq!(snapshot.expires_at(), None, "nobody");
        snapshot.expires_after = Some(Span::days(1));
        assert_eq!(snapshot.expires_at(), Some(at("2026-01-02T00:00:00Z")));
        snapshot.kept = Some(Span::days(9));
        assert_eq!(snapshot.expires_at(), Some(at("2026-01-10T00:00:00Z")), "one of the newest");
        snapshot.used_at = Some(at("2026-02-01T00:00:00Z"));
        assert_eq!(snapshot.expires_at(), Some(at("2026-02-10T00:00:00Z")), "after its last use");
        snapshot.expiry_given = true;
        assert_eq!(snapshot.expires_at(), Some(at("2026-02-02T00:00:00Z")), "whoever asked for it");
        snapshot.expires_after = None;
        assert_eq!(snapshot.expires_at(), None, "for good");
    }
}
