//! The audit log: who did what.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// An entry of the audit log. Its hash covers the entry as it is in the file (`docs/formats/audit.md`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AuditEntry {
    /// Its number in its chain.
    pub seq: u64,
    /// When it happened.
    #[schema(format = DateTime)]
    pub at: String,
    /// What was done: `sandbox.create`. `docs/AUDIT.md` has the table.
    pub action: String,
    /// Who did it: `key`, `system`, `agent` (a process in a sandbox) or `anonymous` (a caller without a valid key).
    pub actor: String,
    /// The id of the key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The key's label.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// By which way: `api`, `vercel`, `gateway`, `socket` or `engine`.
    pub front: String,
    /// The caller's address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The project it was done in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub project: Option<String>,
    /// What it was done to: `sandbox/my-app`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// How it ended: `done`, `denied` or `failed`.
    pub outcome: String,
    /// The HTTP status of the response.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// The error code of the response.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    /// Further facts.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub detail: BTreeMap<String, String>,
    /// The hash of the entry before it.
    pub prev: String,
    /// Its own hash.
    pub hash: String,
}

/// What verification found in a chain of the audit log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AuditVerification {
    /// The chain: `host`, or `project/` and a name.
    pub chain: String,
    /// Whether nothing is missing and nothing was changed.
    pub intact: bool,
    /// How many entries there are.
    pub entries: u64,
    /// The number of the first one: those before were removed because the log reached its limit.
    pub first: u64,
    /// The number of the last one.
    pub last: u64,
    /// The hash of the last one. Keep number and hash elsewhere, and give them as `expect` later.
    pub last_hash: String,
    /// The number of the last entry that the head was signed for.
    pub signed: u64,
    /// What is wrong; the first 100.
    pub findings: Vec<String>,
    /// How much is wrong.
    pub found: u64,
}
