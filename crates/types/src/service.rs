//! Services: commands that belong to a sandbox and are there again after every resume.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Whether a service that has ended is restarted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Restart {
    /// It stays ended.
    Never,
    /// It is started again unless it ended with 0.
    #[default]
    OnFailure,
    /// It is started again.
    Always,
}

fn yes() -> bool {
    true
}

/// A command that belongs to a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Service {
    /// Its name, unique in the sandbox.
    pub name: String,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Environment on top of the sandbox's.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Working directory; the sandbox's if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// User; the sandbox's if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The port it listens on: requests for it wait until it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Whether it is restarted when it has ended.
    #[serde(default)]
    pub restart: Restart,
    /// Whether it is started with every session.
    #[serde(default = "yes")]
    pub start: bool,
}

/// A service to be declared, under the name in the path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetService {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Environment on top of the sandbox's.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Working directory; the sandbox's if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// User; the sandbox's if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The port it listens on: requests for it wait until it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Whether it is restarted when it has ended.
    #[serde(default)]
    pub restart: Restart,
    /// Whether it is started with every session, and now if the sandbox runs.
    #[serde(default = "yes")]
    pub start: bool,
}

impl SetService {
    /// The service, under a name.
    #[must_use]
    pub fn named(self, name: String) -> Service {
        let Self { argv, env, cwd, user, port, restart, start } = self;
        Service { name, argv, env, cwd, user, port, restart, start }
    }
}

/// The state of a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ServiceState {
    /// It was not started, or somebody stopped it, or its sandbox sleeps.
    Stopped,
    /// It is about to run.
    Starting,
    /// It runs.
    Running,
    /// It ended and is about to be started again.
    Restarting,
    /// It ended and is left so.
    Exited,
    /// It ended too often, or could not be started, and is left so.
    Failed,
}

/// A service and its state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ServiceStatus {
    /// What it is meant to be.
    pub service: Service,
    /// Its state.
    pub state: ServiceState,
    /// Since when it runs.
    #[schema(format = DateTime)]
    pub since: Option<String>,
    /// When it is started again.
    #[schema(format = DateTime)]
    pub restarts_at: Option<String>,
    /// Its exit code, once it has exited.
    pub exit_code: Option<i32>,
    /// Why it does not run.
    pub problem: Option<String>,
    /// How often it has failed in a row.
    pub failures: u32,
    /// Its command that runs, or the last one; its log is the service's.
    pub command: Option<String>,
}
