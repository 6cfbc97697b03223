//! What must not enter a snapshot unseen: see `docs/SECRETS.md`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Size;

/// What a secret's value in a file means when a session ends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum OnSecret {
    /// Nothing is sealed until somebody decides.
    #[default]
    Block,
    /// The file is kept aside for an operator, and the rest sealed.
    Quarantine,
    /// It is sealed, and told.
    Warn,
}

/// What a large file or junk means when a session ends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum OnJunk {
    /// Nothing: nobody looks.
    Off,
    /// It is sealed, and told.
    #[default]
    Warn,
    /// Nothing is sealed until somebody has decided about each.
    PromoteOrDrop,
}

/// A change to a sandbox's guard. Absent fields stay as they are.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetGuard {
    /// When a file holds a secret the session was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secrets: Option<OnSecret>,
    /// When a file is large or junk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub junk: Option<OnJunk>,
    /// From what size on a file is large.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub large: Option<Size>,
    /// What is junk, as globs: `.cache`, `**/*.iso`; replaces all there were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub globs: Option<Vec<String>>,
}

/// A sandbox's guard.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Guard {
    /// When a file holds a secret the session was given.
    pub secrets: OnSecret,
    /// When a file is large or junk.
    pub junk: OnJunk,
    /// From what size on a file is large.
    pub large_bytes: u64,
    /// What is junk.
    pub globs: Vec<String>,
}

/// A stop, with what was decided about what the guard finds. An empty body will do.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Stop {
    /// Mask the values of secrets in the files that hold them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub redact: bool,
    /// Give up all that the session wrote. Goes with none of the others.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub discard: bool,
    /// Large files and junk that are wanted, as globs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub promote: Vec<String>,
    /// Files that do not enter the snapshot, as globs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drop: Vec<String>,
    /// Keep files that a failing disk put in doubt (`sync_failed`) as they can be read now.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub accept_doubtful: bool,
}

/// What a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
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

/// Where in a file a value is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FindingPlace {
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ValueEncoding {
    /// As it is.
    Plain,
    /// As a string of JSON.
    Json,
    /// Percent-encoded.
    Url,
    /// In base64.
    Base64,
    /// In hexadecimal.
    Hex,
}

/// Why a command is named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Because {
    /// It was given the secret.
    Given,
    /// It ran when the file last changed.
    Running,
    /// Both.
    GivenAndRunning,
}

/// A command that may have written what was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Suspect {
    /// The command's id.
    pub command: String,
    /// What was run.
    pub argv: Vec<String>,
    /// Why it is named.
    pub because: Because,
}

/// Something the guard found. Never holds a secret's value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Finding {
    /// What it is.
    pub kind: FindingKind,
    /// The file, as the sandbox sees it; a value in a name is masked.
    pub path: String,
    /// How large it is; of a directory, all that is in it.
    pub size_bytes: u64,
    /// The secret's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<String>,
    /// Where in the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<FindingPlace>,
    /// How the value is written there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encoding: Option<ValueEncoding>,
    /// How far into the contents, or into the archive's member.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
    /// The archive's member, the attribute, or why it was not searched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// Commands that may have done it, the likeliest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub commands: Vec<Suspect>,
}

/// A quarantined file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct QuarantinedFile {
    /// Where it was, as the sandbox saw it; a value in a name is masked.
    pub path: String,
    /// Where it is, in the server's data directory.
    pub kept_at: String,
    /// How large it is.
    pub size_bytes: u64,
}

/// Files that were taken out of a snapshot, and are kept aside for an operator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Quarantine {
    /// The snapshot they are not in.
    pub id: String,
    /// The project.
    pub project: String,
    /// The name of the sandbox whose session wrote them.
    pub sandbox: String,
    /// The drive they were written to; the sandbox's own root if null.
    pub drive_id: Option<String>,
    /// When.
    #[schema(format = DateTime)]
    pub at: String,
    /// The files.
    pub files: Vec<QuarantinedFile>,
    /// Why.
    pub findings: Vec<Finding>,
}
