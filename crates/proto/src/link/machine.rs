//! What a machine of its own gets when it becomes a sandbox's, or continues from memory.

use serde::{Deserialize, Serialize};

use super::{Hidden, is_false};

/// What a machine of its own is to be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Assemble {
    /// How many of the devices `lower-0`, `lower-1`, ... make the root; the first is the topmost.
    pub lower: u32,
    /// Drives, in the order of their devices.
    pub mounts: Vec<AssembleMount>,
    /// Who it is.
    pub identity: Identity,
    /// What time it is.
    pub now: Moment,
    /// The largest file a process may write, in bytes.
    pub file_size: u64,
    /// How many processes there may be.
    pub pids: u32,
    /// Mounts disks that may not be clean and starts nothing: what was written is to be exported, nothing else.
    #[serde(default, skip_serializing_if = "is_false")]
    pub rescue: bool,
}

/// A drive: devices `mount-N-lower` and `mount-N-disk`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AssembleMount {
    /// Where, made if it is missing; links are not followed.
    pub target: String,
    /// Whether there is anything in the lower device.
    pub lower: bool,
    /// Whether nothing can be written to it; there is no disk then.
    pub read_only: bool,
    /// Who is given its topmost directory.
    pub owner: Option<String>,
}

/// What a restored machine gets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Renew {
    /// What time it is.
    pub now: Moment,
    /// Who it is from now on, if that is another sandbox than the one whose memory this is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<Identity>,
    /// Whether its `/etc/machine-id` becomes another with that, where there is one: not if no
    /// machine has used this memory yet.
    #[serde(default)]
    pub machine_id: bool,
}

/// Who a machine is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// What it calls itself.
    pub hostname: String,
    /// The address of its network device.
    pub mac: [u8; 6],
}

/// The time, and fresh randomness.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Moment {
    /// Nanoseconds since 1970.
    pub unix_ns: u64,
    /// 64 bytes, base64.
    pub entropy: Hidden,
}
