//! Images, and requests to pull, import and customize them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::ErrorBody;

/// What a sandbox can start from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Image {
    /// What it is called: `host`, `debian:12`, a name given at import.
    pub name: String,
    /// SHA-256 of its manifest or archive, as `sha256:…`.
    pub digest: String,
    /// How many layers it has.
    pub layers: u64,
    /// Disk space they take.
    pub size_bytes: u64,
    /// Disk space of files that they share with the host by hard links; not part of `size_bytes`.
    #[serde(default)]
    pub host_bytes: u64,
    /// The user of commands.
    pub user: Option<String>,
    /// The working directory of commands.
    pub cwd: Option<String>,
    /// The environment of commands.
    pub env: BTreeMap<String, String>,
    /// The program, for those who ask: sandboxes run what their callers say.
    #[serde(default)]
    pub entrypoint: Vec<String>,
    /// Its arguments, or the whole command.
    #[serde(default)]
    pub cmd: Vec<String>,
    /// Labels.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Ports that its programs listen on, like `80/tcp`.
    #[serde(default)]
    pub exposed_ports: Vec<String>,
    /// Where it came from: `host`, a path, a registry reference, the image it was customized from.
    pub source: String,
    /// Whether it was made by customizing another image.
    #[serde(default)]
    pub customized: bool,
    /// The former name of `customized`. It goes with the next release.
    #[serde(default)]
    #[schema(deprecated)]
    pub dressed: bool,
    /// When it was made here.
    #[schema(format = DateTime)]
    pub created_at: String,
}

/// An image to fetch from a registry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PullRequest {
    /// By tag or digest: `debian:12`, `ghcr.io/owner/name@sha256:…`; `host` is made again from the
    /// server's own machine.
    pub reference: String,
}

/// An archive on the server's own disk to import: a root tarball, an OCI layout or a docker archive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ImportRequest {
    /// Its path on the server.
    pub path: String,
    /// What to call the image.
    pub name: String,
}

/// An image to customize: a default user, a home and `sudo` are added.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CustomizeRequest {
    /// Name of the new image.
    pub name: String,
    /// The image to start from; `host` if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// Directories of the server to add.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub add: Vec<AddDirectory>,
    /// Additional environment variables of commands.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Directories to prepend to `PATH`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub path: Vec<String>,
}

/// A directory of the server to be added to an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AddDirectory {
    /// Its path on the server.
    pub from: String,
    /// Its path in the image.
    pub to: String,
}

/// One line of the answer to a pull, an import or a customization.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ImageProgress {
    /// How far a part of the work has come.
    Progress {
        /// What is being done, for people; also what tells several bars apart.
        what: String,
        /// How much is done: bytes, or files where `total` is absent.
        done: u64,
        /// How much there is, where that is known.
        total: Option<u64>,
    },
    /// The image is there. The last line.
    Done {
        /// The image.
        image: Image,
    },
    /// It did not work. The last line.
    Error {
        /// Why.
        error: ErrorBody,
    },
}

/// One line of the answer to a build.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum BuildProgress {
    /// A step begins, or was found in the cache.
    Step {
        /// Which, counted from 1.
        number: u64,
        /// How many there are.
        total: u64,
        /// Its line in the Dockerfile.
        line: u64,
        /// The instruction.
        text: String,
        /// Whether its result was in the cache.
        cached: bool,
    },
    /// A step printed something.
    Output {
        /// What: text, or the replacement character for what is none.
        text: String,
    },
    /// How far a pull has come.
    Progress {
        /// What is being done, for people; also what tells several bars apart.
        what: String,
        /// How much is done: bytes, or files where `total` is absent.
        done: u64,
        /// How much there is, where that is known.
        total: Option<u64>,
    },
    /// Something that may not be as it was meant.
    Warning {
        /// What.
        text: String,
    },
    /// The image is there. The last line.
    Done {
        /// The image.
        image: Image,
    },
    /// It did not work. The last line.
    Error {
        /// Why.
        error: ErrorBody,
    },
}

/// What was removed from the cache of builds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PrunedBuilds {
    /// How many steps.
    pub steps: u64,
}
