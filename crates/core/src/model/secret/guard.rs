//! What must not enter a snapshot unseen: the guard's policy, its findings, and what somebody decided.
//!
//! `docs/SECRETS.md` describes each. A finding never holds a secret's value: paths that contain one
//! are masked before they get here.

use serde::{Deserialize, Serialize};

use crate::model::spec::refuse;
use crate::model::{
    BadConfig, CommandId, DriveId, GuardPatch, Name, OnJunk, OnSecret, SandboxId, Size, SnapshotId,
    Timestamp,
};

/// What is done about what should not be in a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Guard {
    /// When a file holds a secret the session was given.
    pub secrets: OnSecret,
    /// When a file is large or junk.
    pub junk: OnJunk,
    /// From what size on a file is large.
    pub large: Size,
    /// What is junk, as globs like those of `exclude`.
    pub globs: Vec<String>,
}

impl Default for Guard {
    fn default() -> Self {
        let globs = [
            ".cache",
            "**/.npm/_cacache",
            "**/.gradle/caches",
            "**/.cargo/registry",
            "**/go/pkg/mod/cache",
            "/var/cache/apt/archives",
        ];
        Self {
            secrets: OnSecret::Block,
            junk: OnJunk::Warn,
            large: Size(256 << 20),
            globs: globs.map(str::to_owned).to_vec(),
        }
    }
}

impl Guard {
    /// Checks what serde cannot.
    pub(in crate::model) fn check(&self) -> Result<(), BadConfig> {
        if self.large.0 < 1 << 20 {
            return Err(refuse("guard.large", "at least 1M"));
        }
        check_globs("guard.globs", &self.globs)
    }
}

fn check_globs(field: &'static str, globs: &[String]) -> Result<(), BadConfig> {
    if globs.len() > 256 {
        return Err(refuse(field, "at most 256 globs"));
    }
    for glob in globs {
        if glob.is_empty() || glob.len() > 1024 {
            return Err(refuse(field, "a glob has 1 to 1024 characters"));
        }
        globset::Glob::new(glob).map_err(|error| refuse(field, error.to_string()))?;
    }
    Ok(())
}

/// Applies a change to a guard: absent fields stay as they are.
pub(in crate::model) fn apply_guard(change: GuardPatch, guard: &mut Guard) {
    guard.secrets = change.secrets.unwrap_or(guard.secrets);
    guard.junk = change.junk.unwrap_or(guard.junk);
    guard.large = change.large.unwrap_or(guard.large);
    if let Some(globs) = change.globs {
        guard.globs = globs;
    }
}

/// What somebody decided about findings, for one end of a session.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Decision {
    /// Values are masked in the files that hold them.
    pub redact: bool,
    /// What the session wrote is given up.
    pub discard: bool,
    /// Large files and junk to keep, as globs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub promote: Vec<String>,
    /// Files that do not enter the snapshot, as globs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub drop: Vec<String>,
    /// Files that a failing disk put in doubt are kept as they can be read.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub accept_doubtful: bool,
}

impl Decision {
    /// Whether nothing was decided.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// Validates it.
    ///
    /// # Errors
    ///
    /// Returns [`BadConfig`] for what contradicts itself, and for a glob that is none.
    pub fn check(&self) -> Result<(), BadConfig> {
        let keeps = self.redact || self.accept_doubtful;
        if self.discard && (keeps || !self.promote.is_empty() || !self.drop.is_empty()) {
            return Err(refuse("discard", "gives up everything: it goes with nothing else"));
        }
        check_globs("promote", &self.promote)?;
        check_globs("drop", &self.drop)
    }
}

/// Something the guard found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// What it is.
    pub kind: FindingKind,
    /// The file, as the sandbox sees it. Where a name holds a secret it is masked.
    pub path: String,
    /// How large it is; of a directory, all that is in it.
    pub size: u64,
    /// The secret's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<String>,
    /// Where in the file: `contents`, `name`, `link`, `attribute`, or `member` of an archive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<Place>,
    /// How the value is written there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encoding: Option<Encoding>,
    /// How far into the contents, or into the archive's member.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
    /// More: the archive's member, the attribute, the glob, why it was not searched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// Commands that may have done it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub commands: Vec<Suspect>,
}

/// What a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FindingKind {
    /// A secret's value.
    Secret,
    /// A large file.
    Large,
    /// What a glob calls junk.
    Junk,
    /// What a process left when it crashed.
    CoreDump,
    /// A file that could not be searched to its end.
    Unsearched,
    /// A file that the disk may have lost, or part of it, and that was kept as it could be read.
    Doubtful,
}

impl FindingKind {
    /// Whether somebody has to choose between promoting and dropping it.
    #[must_use]
    pub fn is_junk(self) -> bool {
        matches!(self, Self::Large | Self::Junk | Self::CoreDump)
    }
}

/// Where in a file a value is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// In its contents.
    Contents,
    /// In its name.
    Name,
    /// In what a symbolic link says.
    Link,
    /// In an extended attribute.
    Attribute,
    /// In a file inside it, which is an archive or compressed.
    Member,
}

/// How a value is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Encoding {
    /// As it is.
    Plain,
    /// As a string of JSON.
    Json,
    /// Percent-encoded.
    Url,
    /// In base64, of either alphabet.
    Base64,
    /// In hexadecimal.
    Hex,
}

/// A command that may have written what was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Suspect {
    /// The command.
    pub command: CommandId,
    /// What was run.
    pub argv: Vec<String>,
    /// Why it is named.
    pub because: Because,
}

/// Why a command is named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Because {
    /// It was given the secret.
    Given,
    /// It ran when the file last changed.
    Running,
    /// Both.
    GivenAndRunning,
}

/// Files that were taken out of a layer, and are kept aside for an operator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quarantine {
    /// [`FORMAT`](crate::model::FORMAT).
    pub format: u32,
    /// The snapshot they are not in; for a drive, the id a snapshot of its layer would have.
    pub id: SnapshotId,
    /// The project.
    pub project: Name,
    /// The sandbox whose session wrote them.
    pub sandbox: SandboxId,
    /// Its name.
    pub sandbox_name: Name,
    /// The drive they were written to; the sandbox's own root if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drive: Option<DriveId>,
    /// When.
    pub at: Timestamp,
    /// Why.
    pub findings: Vec<Finding>,
    /// Each file: where it was and where it is.
    pub files: Vec<Aside>,
}

impl Quarantine {
    /// What they take.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.size).sum()
    }
}

/// One file that is kept aside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Aside {
    /// Where it was in the layer: text, with bytes that are none escaped.
    pub path: String,
    /// Where it was in the sandbox, as it may be shown: a value in a name is masked.
    pub shown: String,
    /// Its name in the quarantine's directory.
    pub kept_as: String,
    /// How large it is.
    pub size: u64,
    /// Whether something older of that path lies below, which must not show instead.
    pub hides: bool,
}
