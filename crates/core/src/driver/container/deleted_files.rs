//! The disk usage of a machine's processes as the host sees it: for filesystems without limits on
//! directories.
//!
//! A file that was removed and is still open, or mapped, takes up room that no walk over directories finds. Those are looked for
//! among the descriptors and mappings of the machine's processes. The work is bounded, and shared out evenly: a machine with a million descriptors hides
//! some of its files, and does not keep the daemon busy. What no process has open (a descriptor that waits in a socket) is not
//! found either. Quotas of the filesystem have neither gap (`store/layer/quota.rs`).

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use rustix::fs::{FileType, Stat};
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::driver::host::Host;
use crate::driver::{DriverResult, EndedProcesses, Unnamed};
use crate::model::MachineKey;

/// How many descriptors and how much text about mappings are looked at, over all processes of a machine.
const DESCRIPTORS: usize = 100_000;
const MAPPINGS: u64 = 16 << 20;
/// How long processes are watched to see which of them write.
const WATCHED: Duration = Duration::from_millis(50);
/// How often it is looked for processes that were started while others were killed.
const ROUNDS: u32 = 4;
/// The filesystem of shared memory, from `linux/magic.h`: what is in it counts as memory.
const TMPFS: u64 = 0x0102_1994;

/// The deleted files that take space.
pub(super) fn unnamed(host: &Host, key: &MachineKey) -> DriverResult<Vec<Unnamed>> {
    let (record, _process) = host.demand(key)?;
    let mut held = DeletedFiles::among(record.pid);
    let processes = host.groups.processes(key)?;
    for pid in &processes {
        held.look_at(*pid, processes.len());
    }
    let mut sums: HashMap<PathBuf, Unnamed> = HashMap::new();
    for (mount, bytes) in held.found.into_values() {
        let sum = sums.entry(mount.clone()).or_insert(Unnamed { mount, bytes: 0, files: 0 });
        sum.bytes += bytes;
        sum.files += 1;
    }
    Ok(sums.into_values().collect())
}

/// Ends the processes that write the most, or, when none is seen to write, those that hold the most without a name. The agent
/// is not among them.
pub(super) fn end_writers(host: &Host, key: &MachineKey) -> DriverResult<EndedProcesses> {
    let (record, _process) = host.demand(key)?;
    let before: HashMap<u32, u64> = all_but(host, key, record.pid)?
        .into_iter()
        .filter_map(|pid| Some((pid, written(pid)?)))
        .collect();
    sleep(WATCHED);
    let processes = all_but(host, key, record.pid)?;
    let wrote = |pid: &u32| {
        let then = before.get(pid).copied().unwrap_or(0);
        Some((*pid, written(*pid)?.saturating_sub(then)))
    };
    let mut chosen = most(processes.iter().filter_map(wrote).collect(), 1);
    if chosen.is_empty() {
        let holds = |pid: &u32| {
            let mut held = DeletedFiles::among(record.pid);
            held.look_at(*pid, processes.len());
            (*pid, held.found.into_values().map(|(_, bytes)| bytes).sum())
        };
        chosen = most(processes.iter().map(holds).collect(), 1 << 20);
    }
    Ok(EndedProcesses::new(kill(host, key, record.pid, chosen)?))
}

/// Ends all processes but the agent. More than once: those that run may start others.
pub(super) fn end_all(host: &Host, key: &MachineKey) -> DriverResult<EndedProcesses> {
    let (record, _process) = host.demand(key)?;
    let mut ended = Vec::new();
    let mut known = HashSet::new();
    for _ in 0..ROUNDS {
        let fresh: Vec<u32> =
            all_but(host, key, record.pid)?.into_iter().filter(|pid| known.insert(*pid)).collect();
        if fresh.is_empty() {
            break;
        }
        ended.extend(kill(host, key, record.pid, fresh)?);
    }
    Ok(EndedProcesses::new(ended))
}

/// The processes of a machine without its first.
fn all_but(host: &Host, key: &MachineKey, first: u32) -> DriverResult<Vec<u32>> {
    let mut processes = host.groups.processes(key)?;
    processes.retain(|pid| *pid != first);
    Ok(processes)
}

/// Kills those that are still among the processes of a machine.
fn kill(host: &Host, key: &MachineKey, first: u32, chosen: Vec<u32>) -> DriverResult<Vec<OwnedFd>> {
    // Opened before the list of processes is read again: by then a number may belong to another process.
    let opened: Vec<(u32, OwnedFd)> = chosen
        .into_iter()
        .filter_map(|number| {
            let pid = i32::try_from(number).ok().and_then(Pid::from_raw)?;
            let process = rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok()?;
            Some((number, process))
        })
        .collect();
    let there: HashSet<u32> = all_but(host, key, first)?.into_iter().collect();
    let mut killed = Vec::new();
    for (number, process) in opened {
        if there.contains(&number)
            && rustix::process::pidfd_send_signal(&process, Signal::KILL).is_ok()
        {
            killed.push(process);
        }
    }
    Ok(killed)
}

/// Those with at least half of what the first of them has, and no less than `least`.
fn most(amounts: Vec<(u32, u64)>, least: u64) -> Vec<u32> {
    let top = amounts.iter().map(|(_, amount)| *amount).max().unwrap_or(0);
    let enough = |amount: u64| amount >= least && amount >= top.div_ceil(2);
    amounts.into_iter().filter(|(_, amount)| enough(*amount)).map(|(pid, _)| pid).collect()
}

/// What a process has had written to storage, or will have: the kernel counts when a page becomes dirty, by a call or in a mapping.
fn written(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/io")).ok()?;
    text.lines().find_map(|line| line.strip_prefix("write_bytes: ")?.trim().parse().ok())
}

/// Files without a name that processes of a machine hold.
struct DeletedFiles {
    /// Where the machine has mounted the stacks of layers, by their devices.
    mounts: HashMap<u64, PathBuf>,
    /// By inode number: the same for a file and for what it is in the layer below, which mappings of older kernels show.
    found: HashMap<u64, (PathBuf, u64)>,
    seen: HashSet<(u64, u64)>,
    text_left: u64,
}

impl DeletedFiles {
    /// For processes that see what the machine's first process sees.
    fn among(first: u32) -> Self {
        let text = fs::read_to_string(format!("/proc/{first}/mountinfo")).unwrap_or_default();
        let mut mounts: HashMap<u64, PathBuf> = HashMap::new();
        for (device, place) in text.lines().filter_map(overlay) {
            let shorter = |known: &PathBuf| known.as_os_str().len() > place.as_os_str().len();
            if mounts.get(&device).is_none_or(shorter) {
                mounts.insert(device, place);
            }
        }
        Self { mounts, found: HashMap::new(), seen: HashSet::new(), text_left: MAPPINGS }
    }

    /// Looks at one of `of` processes. One that ends meanwhile holds nothing.
    fn look_at(&mut self, pid: u32, of: usize) {
        let share = (DESCRIPTORS / of.max(1)).max(16);
        if let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) {
            for descriptor in descriptors.flatten().take(share) {
                let Ok(stat) = rustix::fs::stat(descriptor.path()) else { continue };
                if is_unnamed(&stat) && self.mounts.contains_key(&stat.st_dev) {
                    self.add(&stat);
                }
            }
        }
        if let Err(error) = self.look_at_mappings(pid, of) {
            tracing::trace!(pid, %error, "could not be looked at");
        }
    }

    fn look_at_mappings(&mut self, pid: u32, of: usize) -> io::Result<()> {
        let share = (MAPPINGS / of.max(1) as u64).max(64 << 10).min(self.text_left);
        let mut text = Vec::new();
        fs::File::open(format!("/proc/{pid}/maps"))?.take(share).read_to_end(&mut text)?;
        self.text_left -= text.len() as u64;
        // 7f00-7f01 rw-s 00000000 fe:00 1234   /work/file (deleted)
        for line in text.split(|byte| *byte == b'\n').filter(|line| line.ends_with(b" (deleted)")) {
            let line = String::from_utf8_lossy(line);
            let Some(range) = line.split(' ').next() else { continue };
            let path = format!("/proc/{pid}/map_files/{range}");
            let Ok(stat) = rustix::fs::stat(&path) else { continue };
            if !is_unnamed(&stat) || !self.seen.insert((stat.st_dev, stat.st_ino)) {
                continue;
            }
            if self.mounts.contains_key(&stat.st_dev) || !is_memory(Path::new(&path)) {
                self.add(&stat);
            }
        }
        Ok(())
    }

    fn add(&mut self, stat: &Stat) {
        let root = PathBuf::from("/");
        let mount = self.mounts.get(&stat.st_dev).cloned().unwrap_or(root);
        let bytes = u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
        self.found.entry(stat.st_ino).or_insert((mount, bytes));
    }
}

fn is_unnamed(stat: &Stat) -> bool {
    stat.st_nlink == 0 && FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
}

fn is_memory(path: &Path) -> bool {
    rustix::fs::statfs(path).map_or(true, |stat| stat.f_type as u64 == TMPFS)
}

/// The device and the place of an overlay, from a line of `mountinfo`.
fn overlay(line: &str) -> Option<(u64, PathBuf)> {
    let (before, after) = line.split_once(" - ")?;
    if after.split(' ').next() != Some("overlay") {
        return None;
    }
    let mut fields = before.split(' ');
    let (major, minor) = fields.nth(2)?.split_once(':')?;
    let device = rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?);
    Some((device, PathBuf::from(fields.nth(1)?)))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::{most, overlay};

    #[test]
    fn overlays_are_found_among_mounts() {
        let line = "36 35 0:42 / /data rw,nosuid - overlay overlay rw,lowerdir=a";
        assert_eq!(overlay(line), Some((42, PathBuf::from("/data"))));
        assert_eq!(overlay("36 35 0:43 / /proc rw - proc proc rw"), None);
        assert_eq!(overlay("nonsense"), None);
    }

    #[test]
    fn those_are_chosen_that_have_the_most() {
        assert_eq!(most(vec![(1, 100), (2, 49), (3, 50)], 1), [1, 3]);
        assert!(most(vec![(1, 0), (2, 0)], 1).is_empty());
        assert!(most(Vec::new(), 1).is_empty());
    }
}
