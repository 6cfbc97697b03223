//! Secrets, and how sandboxes and commands use them. No answer holds a value.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A named value of a project.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Secret {
    /// Its name, unique in the project.
    pub name: String,
    /// The project it belongs to.
    pub project: String,
    /// The number of the value in use.
    pub version: u64,
    /// The values that are kept, oldest first.
    pub versions: Vec<SecretVersion>,
    /// The hosts that may have it when it is brokered.
    pub hosts: Vec<String>,
    /// Parts of a request in which its placeholder is replaced when it is brokered.
    #[serde(default)]
    pub places: Vec<SecretPlace>,
    /// Only sandboxes that have all of these tags may use it.
    pub tags: BTreeMap<String, String>,
    /// When it was first set.
    #[schema(format = DateTime)]
    pub created_at: String,
    /// When it was last set.
    #[schema(format = DateTime)]
    pub updated_at: String,
}

/// A part of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum SecretPlace {
    /// The values of headers. Always replaced.
    Header,
    /// The query of the URL.
    Query,
    /// The body.
    Body,
}

/// One value of a secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SecretVersion {
    /// Its number.
    pub version: u64,
    /// When it was set.
    #[schema(format = DateTime)]
    pub created_at: String,
}

/// A value to be set.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetSecret {
    /// The value: text of 6 bytes to 64 KiB, without NUL.
    pub value: String,
    /// The hosts that may have it when it is brokered, like `api.example.com` and `*.example.com`; as before
    /// if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hosts: Option<Vec<String>>,
    /// Where in a request its placeholder is replaced when it is brokered, besides headers; as before if absent, and nowhere else at
    /// first. What is in a body can be read back wherever the host shows what it was sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub places: Option<Vec<SecretPlace>>,
    /// Only sandboxes that have all of these tags may use it; as before if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tags: Option<BTreeMap<String, String>>,
}

impl fmt::Debug for SetSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { value: _, hosts, places, tags } = self;
        f.debug_struct("SetSecret")
            .field("hosts", hosts)
            .field("places", places)
            .field("tags", tags)
            .finish_non_exhaustive()
    }
}

/// A secret that a sandbox's commands have a placeholder of, which the network puts in its place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SecretUse {
    /// The secret.
    pub secret: String,
    /// The variable that holds the placeholder; named like the secret if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env: Option<String>,
}

/// A secret that one command is given: in a variable, or in a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Inject {
    /// The secret.
    pub secret: String,
    /// The variable; named like the secret if there is no `file` either.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env: Option<String>,
    /// A file below `/run` or `/dev/shm`, which are in memory. It is gone when the command ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
}

/// A secret that a session was given.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SecretGiven {
    /// The secret.
    pub name: String,
    /// Which value of it.
    pub version: u64,
    /// How.
    pub how: SecretHow,
}

/// How a session was given a secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum SecretHow {
    /// The network puts it into requests; it never entered the sandbox.
    Brokered,
    /// In the environment of a command.
    Env,
    /// In a file of a command.
    File,
}
