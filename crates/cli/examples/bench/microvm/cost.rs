//! What machines use on the host.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::Outcome;

/// The machines of one daemon.
pub(super) struct Machines {
    data: PathBuf,
}

/// Memory of processes, in bytes.
#[derive(Default)]
pub(super) struct Memory {
    /// What they have to themselves.
    pub(super) private: u64,
    /// Their share of what they have, private or not.
    pub(super) share: u64,
}

impl Machines {
    /// Those of the daemon on this data directory.
    pub(super) fn new(data: &Path) -> Self {
        Self { data: data.canonicalize().unwrap_or_else(|_| data.to_path_buf()) }
    }

    /// The hypervisors that run a machine now: those with a file of the daemon's data open. One that waits for a machine has none.
    pub(super) fn pids(&self) -> BTreeSet<u32> {
        let Ok(entries) = fs::read_dir("/proc") else { return BTreeSet::new() };
        let names = entries.flatten().map(|entry| entry.file_name());
        let numbers = names.filter_map(|name| name.to_str()?.parse::<u32>().ok());
        numbers.filter(|pid| is_hypervisor(*pid) && self.is_ours(*pid)).collect()
    }

    fn is_ours(&self, pid: u32) -> bool {
        let Ok(open) = fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
        let mut targets = open.flatten().filter_map(|entry| fs::read_link(entry.path()).ok());
        targets.any(|target| target.starts_with(&self.data))
    }

    /// Disk space of everything in the data directory, each inode once.
    pub(super) fn disk(&self) -> Outcome<u64> {
        // What was written and not yet placed on the disk has no blocks.
        rustix::fs::sync();
        let mut seen = BTreeSet::new();
        let mut blocks = 0;
        let mut left = vec![self.data.join("memory"), self.data.join("layers")];
        while let Some(place) = left.pop() {
            let Ok(entries) = fs::read_dir(&place) else { continue };
            for entry in entries.flatten() {
                let Ok(found) = entry.path().symlink_metadata() else { continue };
                if found.is_dir() {
                    left.push(entry.path());
                }
                if seen.insert(found.ino()) {
                    blocks += found.blocks();
                }
            }
        }
        Ok(blocks * 512)
    }
}

fn is_hypervisor(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.starts_with("qemu"))
}

/// What processes have of the host's memory.
pub(super) fn memory(pids: &[u32]) -> Outcome<Memory> {
    let mut sum = Memory::default();
    for pid in pids {
        let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse::<u64>().ok()
        };
        sum.private += field("Private_Dirty:").ok_or("no Private_Dirty in smaps_rollup")? * 1024;
        sum.share += field("Pss:").ok_or("no Pss in smaps_rollup")? * 1024;
    }
    Ok(sum)
}

pub(super) fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
