//! What sandboxes use at this moment.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::State;

/// What a sandbox uses at this moment. Asking never wakes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SandboxStats {
    /// The sandbox.
    pub name: String,
    /// Its state.
    pub state: State,
    /// When this was read, in milliseconds since 1970.
    pub at_ms: u64,
    /// The session; absent if none is under way. What follows is about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// What the session uses; absent if none is under way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<LiveUsage>,
}

/// What a session uses at this moment, and its limits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LiveUsage {
    /// CPU time used since the session began. Two readings tell the load.
    pub cpu_ms: u64,
    /// How many CPUs it may use, in thousandths.
    pub cpu_limit_millis: u32,
    /// Memory in use now, page cache included; for a microVM what its hypervisor takes on the host.
    pub memory_bytes: u64,
    /// The most memory at one time.
    pub memory_peak_bytes: u64,
    /// How much it may use.
    pub memory_limit_bytes: u64,
    /// Processes and threads; absent for a microVM, where only its own kernel knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processes: Option<u64>,
    /// How many it may have.
    pub processes_limit: u32,
    /// Bytes received from outside since the session began.
    pub network_in_bytes: u64,
    /// Bytes sent outside since the session began.
    pub network_out_bytes: u64,
    /// Disk space that the session has written so far; absent if that takes too long to find out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_bytes: Option<u64>,
    /// How much it may write.
    pub disk_limit_bytes: u64,
    /// Commands that run now.
    pub commands: u64,
    /// How long the session lasts so far.
    pub wall_ms: u64,
}
