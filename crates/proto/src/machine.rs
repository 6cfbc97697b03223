//! What the microvm driver, its launcher and the agent in a machine of its own agree on.
//!
//! `keep-agent vmm` reads one [`Vmm`] on standard input, confines itself, answers with one line, a
//! [`crate::cage::Outcome`], on standard output, and becomes the hypervisor. What the machine then shows to the agent
//! inside is known by the names here: devices are found by their serials, never by their order.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::cage::Cgroup;

/// The version both sides must speak.
pub const VERSION: u32 = 2;

/// How many read-only devices there are for the root's layers, in every machine.
pub const LOWER_SLOTS: u32 = 8;
/// How many drives a machine has room for.
pub const MOUNT_SLOTS: u32 = 4;
/// How large every device seems but the root's disk, in bytes. Machines are restored onto other files than they were
/// captured with, and a device cannot change its size on the way.
pub const SLOT: u64 = 256 << 30;

/// The name of the virtio serial port that the link goes through.
pub const PORT: &str = "link";
/// The serial of the disk that the root's upper directory is on.
pub const DISK: &str = "disk";
/// The directory of a disk that is the upper one of its overlay.
pub const UPPER: &str = "upper";
/// The directory of a disk that is the kernel's, beside [`UPPER`].
pub const WORK: &str = "work";

/// The serial of a device of the root's layers; 0 is the topmost.
#[must_use]
pub fn lower(number: u32) -> String {
    format!("lower-{number}")
}

/// The serial of the device with a drive's layers.
#[must_use]
pub fn mount_lower(number: u32) -> String {
    format!("mount-{number}-lower")
}

/// The serial of the disk that a drive's upper directory is on.
#[must_use]
pub fn mount_disk(number: u32) -> String {
    format!("mount-{number}-disk")
}

/// The socket of the serial port, in the machine's runtime directory.
pub const SOCKET: &str = crate::cage::SOCKET;
/// The hypervisor's control socket, in the same directory.
pub const QMP_SOCKET: &str = "qmp.sock";
/// A directory in the same directory, which the confined root has as `/net`. Until the machine runs for the first time it is the
/// hypervisor's, which binds its socket there.
pub const NET_DIR: &str = "net";
/// Where the hypervisor takes Ethernet frames for the machine, in [`NET_DIR`].
pub const NIC_SOCKET: &str = "nic.sock";
/// Where it sends those that the machine sends: bound by the daemon, in [`NET_DIR`].
pub const HOST_SOCKET: &str = "host.sock";
/// Where `ram.so` writes the address at which it put the machine's memory, in the same directory.
pub const RAM_AT: &str = "ram.at";

/// The file that the hypervisor believes its machine's memory is in: empty, in the confined root.
pub const RAM_FILE: &str = "/ram";
/// Where the confined root has [`Vmm::ram_so`].
pub const RAM_SO: &str = "/ram.so";
/// The variable with the number of the descriptor of the memory's map; absent: all memory is new.
pub const RAM_MAP_FD: &str = "SANDKEEP_RAM_MAP";
/// The variable with the number of the descriptor of the map's first file; the others come after it.
pub const RAM_PAGES_FD: &str = "SANDKEEP_RAM_PAGES";
/// The variable with the number of the descriptor of a socket that a map comes over, later than the hypervisor starts.
pub const RAM_LATER_FD: &str = "SANDKEEP_RAM_LATER";
/// Where the driver listens for that socket, in the machine's runtime directory.
pub const RAM_SOCKET: &str = "ram.sock";
/// The variable with the number of the descriptor that `ram.so` writes the address to, as 16 hexadecimal digits.
pub const RAM_AT_FD: &str = "SANDKEEP_RAM_AT";

/// A hypervisor to be confined and started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vmm {
    /// [`VERSION`].
    pub version: u32,
    /// The machine's own runtime directory, made by the driver; `machine.json` goes there.
    pub run_dir: PathBuf,
    /// What the machine calls itself, for the record.
    pub hostname: String,
    /// The program, by its absolute path, and its arguments, the program's name first.
    pub program: PathBuf,
    /// See `program`.
    pub argv: Vec<String>,
    /// The whole environment.
    pub env: BTreeMap<String, String>,
    /// What is opened for it before it is confined.
    pub files: Vec<VmmFile>,
    /// Sockets that are bound for it before it is confined.
    pub sockets: Vec<VmmSocket>,
    /// Sockets that others listen on and that are connected to for it.
    pub calls: Vec<VmmSocket>,
    /// Device nodes of the host that the confined root has too, besides `/dev/null`, `/dev/zero` and `/dev/urandom`.
    pub devices: Vec<PathBuf>,
    /// Files of the host that the confined root has too, to be read.
    pub shown: Vec<VmmShown>,
    /// The library that is put at [`RAM_SO`].
    pub ram_so: PathBuf,
    /// How large a file may become by its hand.
    pub file_size: u64,
    /// Whose it is on the host.
    pub uid: u32,
    /// Its only group.
    pub gid: u32,
    /// Where it is counted and limited.
    pub cgroup: Cgroup,
    /// By which key, where that is not the machine's: for the record.
    pub group: Option<String>,
}

/// A file that is open when the hypervisor starts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmmFile {
    /// The number of its descriptor. 1 and 2 are where the hypervisor's own messages go.
    pub fd: u32,
    /// Which file. One that is opened for writing is made if it is missing; a pipe does not block.
    pub path: PathBuf,
    /// For reading and writing, instead of reading alone.
    pub write: bool,
}

/// A file that the hypervisor can only be given by a path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmmShown {
    /// Which file.
    pub path: PathBuf,
    /// Where it is seen.
    pub at: PathBuf,
}

/// A Unix stream socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmmSocket {
    /// The number of its descriptor.
    pub fd: u32,
    /// Where. An existing file is removed before one is bound.
    pub path: PathBuf,
}

#[cfg(test)]
mod tests {
    use super::{lower, mount_disk, mount_lower};

    #[test]
    fn serials_fit_a_device() {
        // virtio-blk has room for twenty bytes.
        for serial in [lower(99), mount_lower(99), mount_disk(99)] {
            assert!(serial.len() <= 20, "{serial}");
        }
    }
}
