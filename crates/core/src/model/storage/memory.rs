//! Memory images on record.
//!
//! `docs/formats/memory.md` describes what lies beside these records, `docs/MICROVM.md` how images
//! come about.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::model::{MemoryId, Size, Timestamp};

/// A layer of a memory image: what a capture wrote.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryLayer {
    /// [`crate::model::FORMAT`].
    pub format: u32,
    /// Its id.
    pub id: MemoryId,
    /// What it was made with; it is of use only where that is the same.
    pub fingerprint: Fingerprint,
    /// RAM of the machine.
    pub ram: Size,
    /// Disk space of its files, each inode once.
    pub bytes: u64,
    /// Bytes of each file. Checked before every use.
    pub sizes: BTreeMap<String, u64>,
    /// SHA-256 of files, in hex. Those of `devices` and `index` are always there, and checked before every use.
    pub digests: BTreeMap<String, String>,
    /// Packed layers that its root is mounted from, by their names in the driver's cache.
    pub roots: Vec<String>,
    /// When it was made.
    pub sealed_at: Timestamp,
}

impl MemoryLayer {
    /// The files that every memory layer has. One more is the disk of a machine that has its own, under a name its driver chose.
    pub const FILES: [&str; 3] = ["devices", "index", "pages"];

    /// The file that is the machine's disk, and its size. Absent if the machine's files are not part of the image.
    #[must_use]
    pub fn disk(&self) -> Option<(&str, u64)> {
        let disk = self.sizes.iter().find(|(name, _)| !Self::FILES.contains(&name.as_str()));
        disk.map(|(name, size)| (name.as_str(), *size))
    }

    /// The names of all its files.
    pub fn files(&self) -> impl Iterator<Item = &str> {
        Self::FILES.into_iter().chain(self.disk().map(|(name, _)| name))
    }
}

/// The memory image that machines of one fingerprint begin with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Template {
    /// [`crate::model::FORMAT`].
    pub format: u32,
    /// [`Fingerprint::key`].
    pub key: String,
    /// The image, a single layer.
    pub memory: MemoryId,
    /// When a machine was last started from it, to the day.
    pub used_at: Timestamp,
}

/// What decides whether a memory image is of use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint {
    /// The driver.
    pub driver: String,
    /// Program and version.
    pub hypervisor: String,
    /// `kvm` or `tcg`.
    pub accelerator: String,
    /// The processor the guest sees.
    pub cpu: String,
    /// Digest of the kernel and of its first filesystem.
    pub kernel: String,
    /// RAM.
    pub memory: Size,
    /// Processors.
    pub cpus: u32,
    /// Its disk.
    pub disk: Size,
}

impl Fingerprint {
    /// A short name for all of it, safe as a file name.
    #[must_use]
    pub fn key(&self) -> String {
        use sha2::Digest as _;
        let text = format!("{self:?}");
        hex::encode(&sha2::Sha256::digest(text)[..16])
    }

    /// The first thing in which an image differs from what is here, as a sentence for people.
    #[must_use]
    pub fn difference(&self, here: &Self) -> Option<String> {
        let parts = [
            ("driver", self.driver.clone(), here.driver.clone()),
            ("hypervisor", self.hypervisor.clone(), here.hypervisor.clone()),
            ("accelerator", self.accelerator.clone(), here.accelerator.clone()),
            ("processor", self.cpu.clone(), here.cpu.clone()),
            ("kernel", self.kernel.clone(), here.kernel.clone()),
            ("memory", self.memory.to_string(), here.memory.to_string()),
            ("number of processors", self.cpus.to_string(), here.cpus.to_string()),
            ("disk size", self.disk.to_string(), here.disk.to_string()),
        ];
        let (what, then, now) = parts.into_iter().find(|(_, then, now)| then != now)?;
        Some(format!("the {what} was {then} and is {now} now"))
    }
}
