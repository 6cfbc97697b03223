//! Projects, keys, and what a key can learn about itself and the server.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Span;

/// What a key may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Look at sandboxes, never wake or change one.
    Read,
    /// Everything inside the project, but for its keys.
    Write,
    /// Everything, in every project: images, projects and keys included.
    Admin,
}

/// A tenant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Project {
    /// Its name, which is its identity.
    pub name: String,
    /// When it was made.
    #[schema(format = DateTime)]
    pub created_at: String,
    /// Who may act for it.
    pub keys: Vec<Key>,
}

/// A project to create.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateProject {
    /// Its name.
    pub name: String,
}

/// An API key, without its secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Key {
    /// Its id, which is no secret.
    pub id: String,
    /// A label, for people.
    pub label: String,
    /// What it may do.
    pub scope: Scope,
    /// Whether it may approve, and accept runs; an admin key may anyway.
    #[serde(default)]
    pub approve: bool,
    /// When it was made.
    #[schema(format = DateTime)]
    pub created_at: String,
    /// When it stops working.
    #[schema(format = DateTime)]
    pub expires_at: Option<String>,
}

/// A key to create.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateKey {
    /// A label, for people.
    #[serde(default)]
    pub label: String,
    /// What it may do.
    pub scope: Scope,
    /// Whether it may approve, and accept runs; an admin key may anyway.
    #[serde(default)]
    pub approve: bool,
    /// Its lifetime; unlimited if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires: Option<Span>,
}

/// A key that was just made. The secret is shown this once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NewKey {
    /// The key.
    pub key: Key,
    /// What to send as `Authorization: Bearer …`.
    pub secret: String,
}

/// A token to be made from the key that asks. It ends with the key, or sooner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct IssueToken {
    /// Whose clients it is for; their claims are in it.
    #[serde(rename = "for")]
    pub audience: Audience,
    /// How far it reaches, never further than the key; `write` if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope: Option<Scope>,
    /// How long it works; 90 days if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires: Option<Span>,
}

/// Whose clients a token is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Audience {
    /// Vercel Sandbox's.
    Vercel,
}

/// A token that was just made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Token {
    /// What to send as `Authorization: Bearer …`.
    pub token: String,
    /// The project it acts for, as those clients write it.
    pub project: String,
    /// The team it belongs to, as those clients write it.
    pub team: String,
}

/// The calling key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WhoAmI {
    /// The project the key acts for.
    pub project: String,
    /// What it may do.
    pub scope: Scope,
    /// Its id.
    pub key: String,
    /// The server's version.
    pub server_version: String,
}

/// Disk usage: of the key's project, or with an admin key of all.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SpaceUsage {
    /// The project that the sums are of; absent if they are of all.
    #[serde(default)]
    pub project: Option<String>,
    /// The size of the filesystem; for admin keys.
    pub total_bytes: Option<u64>,
    /// What is free on it; for admin keys.
    pub free_bytes: Option<u64>,
    /// What snapshots take.
    pub snapshots_bytes: u64,
    /// What drives take.
    #[serde(default)]
    pub drives_bytes: u64,
    /// What images take, which all projects share; for admin keys.
    pub images_bytes: Option<u64>,
    /// Disk space of quarantined files.
    #[serde(default)]
    pub quarantine_bytes: u64,
    /// What sessions under way have written.
    pub open_bytes: u64,
    /// What records and logs of commands take.
    #[serde(default)]
    pub commands_bytes: u64,
    /// Disk space of the trash, which becomes free when its grace period is over or space is needed. Not part of any other sum.
    #[serde(default)]
    pub trash_bytes: u64,
}

/// One thing that is wrong with stored data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Damage {
    /// What is wrong: `unreadable_manifest`, `missing`, `sync_failed`, `layer_in_doubt`,
    /// `layer_changed`, `collection_stopped`, `clock_jumped`, `index_rebuilt` or `security_config`.
    pub kind: String,
    /// What it is wrong with: a path below the data directory, or an id.
    pub subject: String,
    /// What was found.
    pub detail: String,
    /// What it means, and what to do.
    pub consequence: String,
    /// When it was first found.
    pub since: String,
}

/// A check of the data directory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FsckRequest {
    /// Whether to read every file of every layer, too.
    #[serde(default)]
    pub verify: bool,
}

/// What a check of the data directory found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Fsck {
    /// Whether something that was acknowledged is damaged.
    pub broken: bool,
    /// What was found.
    pub problems: Vec<FsckProblem>,
}

/// One thing that a check found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FsckProblem {
    /// Whether it is merely in the way, and nothing that was acknowledged is damaged.
    pub leftover: bool,
    /// What it is, as a sentence.
    pub text: String,
}

/// The server takes work.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Readiness {
    /// The server's version.
    pub version: String,
    /// What was looked at: `recovery`, `disk`, `drivers`, and `tls` if this server speaks it.
    pub checks: Vec<ReadinessCheck>,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReadinessCheck {
    /// What.
    pub name: String,
    /// How it is.
    pub state: CheckState,
    /// What was found; empty for a caller without a key.
    pub detail: String,
}

/// How a check came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum CheckState {
    /// As it should be.
    Ok,
    /// It works, and somebody should do something about it.
    Warning,
}

/// The server is up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Health {
    /// `ok`.
    pub status: String,
    /// The server's version.
    pub version: String,
    /// How many sandboxes it still has to recover after a restart. Requests for those wait; all others are served.
    #[serde(default)]
    pub recovering: u64,
}
