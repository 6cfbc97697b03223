//! The container driver's description of what `keep-agent` builds.
//!
//! `keep-agent cage` reads one [`Cage`] on standard input, builds it, and answers with one line, an
//! [`Outcome`], on standard output; `keep-agent cage ahead` does what it can before there is something to read. `keep-agent swap-root` does the same with a [`Swap`]. Driver and
//! agent come from the same build, so [`VERSION`] only guards against a wrong file on disk.
//!
//! The one thing that outlives both is [`Record`]: the file `machine.json` in a machine's runtime
//! directory, by which a later daemon finds the machine again.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The version both sides must speak.
pub const VERSION: u32 = 1;
/// The socket the agent listens on, in the machine's runtime directory.
pub const SOCKET: &str = "agent.sock";
/// Where the agent hands over its network device, in the same directory: every peer that connects
/// is sent one byte and, with it, the descriptor of the TUN device (raw IP packets, no header
/// before them, not blocking).
pub const NETWORK_SOCKET: &str = "net.sock";
/// The step that fails when the host has no TUN devices.
pub const TUN: &str = "open /dev/net/tun";
/// The step that fails when the machine's own files are in the way of a [`Mount`]: the user can
/// choose another target.
pub const MOUNT_POINT: &str = "use a mount point";
/// The step that fails when the disk is too full for a machine to be able to write.
pub const NO_ROOM: &str = "make room for what the machine writes";
/// The file that describes the machine for a later daemon, in the same directory.
pub const RECORD: &str = "machine.json";

/// How many mounts a cage may have that is begun before it is known what to build.
pub const MOST_MOUNTS_AHEAD: usize = 16;

/// A cage to be built.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cage {
    /// [`VERSION`].
    pub version: u32,
    /// The machine's own runtime directory, made by the driver and empty.
    pub run_dir: PathBuf,
    /// What the machine calls itself.
    pub hostname: String,
    /// Its root filesystem.
    pub root: Root,
    /// The host's user and group ids that are its own.
    pub ids: Ids,
    /// Where its processes are counted and limited.
    pub cgroup: Cgroup,
    /// The largest file a process may write, in bytes.
    pub file_size: u64,
    /// The memory it is shown to have, in bytes.
    pub memory: u64,
    /// The most processors it runs on.
    pub cpus: u32,
    /// What else is mounted in it.
    pub mounts: Vec<Mount>,
}

/// A stack of directories to be seen at a place below the root.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mount {
    /// Where: an absolute path in the machine, made if it is missing.
    pub target: PathBuf,
    /// What.
    pub root: Root,
    /// Whether nothing can be written to it.
    pub read_only: bool,
    /// Who is given its topmost directory, open to all, by a name that the machine knows.
    pub owner: Option<String>,
}

/// A stack of directories with a writable one on top; see the engine's `RootFs`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Root {
    /// The directory all of `lower` are in.
    pub layers_dir: PathBuf,
    /// Directories that are never written, relative to `layers_dir`; the first is the topmost.
    pub lower: Vec<PathBuf>,
    /// The directory `upper` and `work` are in. The agent adds `base` beside them.
    pub writable_dir: PathBuf,
    /// Where writes go, relative to `writable_dir`.
    pub upper: PathBuf,
    /// Room for the kernel, relative to `writable_dir`.
    pub work: PathBuf,
}

/// A range of ids: `0..count` inside is `base..base + count` on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ids {
    /// What the machine's root is on the host.
    pub base: u32,
    /// How many ids there are.
    pub count: u32,
}

/// The control groups a machine's first process is to join, made by the driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cgroup {
    /// The directory of each controller; the same for those that are mounted together.
    V1(BTreeMap<String, PathBuf>),
    /// The one directory.
    V2(PathBuf),
}

/// Another root for a machine that lives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Swap {
    /// [`VERSION`].
    pub version: u32,
    /// The machine's own runtime directory.
    pub run_dir: PathBuf,
    /// The machine.
    pub machine: Record,
    /// What goes under it.
    pub root: Root,
}

/// How it went.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The machine lives, or stands on its new root.
    Done(Record),
    /// Nothing was left behind.
    Failed {
        /// What was being done, as a verb phrase.
        step: String,
        /// The system's error.
        reason: String,
    },
}

/// A machine that lives, as `machine.json` holds it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// [`VERSION`].
    pub version: u32,
    /// The host's number for its first process.
    pub pid: u32,
    /// When that process was started, in the kernel's ticks: numbers are reused, this pair is not.
    pub started: u64,
    /// What the machine calls itself.
    pub hostname: String,
    /// The key by which its control group is known, if that is not its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Whose its first process is on the host, where that was not for the machine to say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
}

/// Reads a process's start time out of `/proc/<pid>/stat`.
#[must_use]
pub fn start_time(stat: &str) -> Option<u64> {
    // The second field is the program's name in parentheses and may hold anything, even `) `.
    let (_, after_name) = stat.rsplit_once(") ")?;
    after_name.split(' ').nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::start_time;

    #[test]
    fn the_start_time_is_found_behind_any_name() {
        let tail = "S 1 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 4242 1 2 3";
        for name in ["keep-agent", "a) b", ") S 1 2 3", ""] {
            assert_eq!(start_time(&format!("17 ({name}) {tail}")), Some(4242), "{name}");
        }
        assert_eq!(start_time("17 (short) S 1"), None);
        assert_eq!(start_time(""), None);
    }
}
