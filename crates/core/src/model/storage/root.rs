//! A root filesystem as data: the store describes it, a driver mounts it.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::model::{BadId, SandboxId, Size};

/// The engine's name for one machine on this host, safe as a file and cgroup name.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MachineKey(String);

impl MachineKey {
    /// Accepts 1 to 40 lowercase letters, digits and hyphens.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        ((1..=40).contains(&text.len()) && text.bytes().all(plain)).then(|| Self(text.to_owned()))
    }

    /// The key as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The sandbox it belongs to.
    ///
    /// # Errors
    ///
    /// Returns [`BadId`] when the key was not made from a sandbox's id.
    pub fn sandbox(&self) -> Result<SandboxId, BadId> {
        self.0.parse()
    }
}

impl From<&SandboxId> for MachineKey {
    fn from(id: &SandboxId) -> Self {
        Self(id.as_str().to_owned())
    }
}

impl std::fmt::Display for MachineKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// A stack of directories with a writable one on top. On disk, owners are as the sandbox sees them
/// (root is 0); a driver shifts them to the sandbox's own range while it mounts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RootFs {
    /// The directory all of `lower` are in.
    pub layers_dir: PathBuf,
    /// Directories that are never written, relative to `layers_dir`; the first is the topmost.
    pub lower: Vec<PathBuf>,
    /// A directory that holds `upper`, `work` and a driver's `disk`.
    pub writable_dir: PathBuf,
    /// Where writes go, relative to `writable_dir`.
    pub upper: PathBuf,
    /// Room for the kernel, relative to `writable_dir`.
    pub work: PathBuf,
    /// How many of the lowest of `lower` are an image's, which many roots have in common.
    pub image: usize,
}

impl RootFs {
    /// Where a driver whose machines have disks keeps this root's. As long as it exists, the disk
    /// holds what was written, and `upper` does not: see `docs/MICROVM.md`.
    #[must_use]
    pub fn disk_dir(&self) -> PathBuf {
        self.writable_dir.join("disk")
    }
}

/// A range of user and group ids on the host that belongs to one sandbox while it lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct UidRange {
    /// What the sandbox's root is on the host.
    pub base: u32,
    /// How many ids there are.
    pub count: u32,
}

/// What a machine may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// CPUs, in thousandths of one.
    pub millicpus: u32,
    /// Memory.
    pub memory: Size,
    /// Processes and threads.
    pub pids: u32,
    /// The largest file that can be written.
    pub file_size: Size,
}
