//! Processes that use a disk.
//!
//! A filesystem that has given up (XFS after a write error) answers `EIO` even to `stat`. So what a process uses is read
//! from places that do not ask the filesystem: its memory map, which names devices, and the targets of its
//! links. `stat` comes on top, for what is seen in no other way.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal};

/// How long killed processes may take to be gone.
const PATIENCE: Duration = Duration::from_secs(10);

/// A filesystem, while it is mounted and well.
#[derive(Debug, Clone)]
pub(super) struct Mounted {
    at: PathBuf,
    /// Its device as the kernel's tables name it, in numbers.
    device: (u32, u32),
    /// Its device as `stat` reports it. Btrfs has another one here.
    stat: u64,
}

impl Mounted {
    /// What is mounted at `at`.
    pub(super) fn find(at: &Path) -> Option<Self> {
        let table = fs::read_to_string("/proc/self/mountinfo").ok()?;
        let here = |line: &&str| line.split(' ').nth(4).is_some_and(|point| Path::new(point) == at);
        let (major, minor) = table.lines().find(here)?.split(' ').nth(2)?.split_once(':')?;
        let device = (major.parse().ok()?, minor.parse().ok()?);
        Some(Self { at: at.to_path_buf(), device, stat: fs::metadata(at).ok()?.dev() })
    }

    /// Kills what uses it, again and again until nothing does.
    pub(super) fn kill_users(&self) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let users = self.users();
            if users.is_empty() || Instant::now() > deadline {
                return;
            }
            for process in users {
                // Held, so that the number cannot come to mean another; then looked at once more.
                let handle = rustix::process::pidfd_open(process, PidfdFlags::empty());
                let Ok(handle) = handle else { continue };
                if self.is_used_by(process) {
                    thaw(process);
                    let _ = rustix::process::pidfd_send_signal(handle, Signal::KILL);
                }
            }
            sleep(Duration::from_millis(5));
        }
    }

    fn users(&self) -> Vec<Pid> {
        let ours = rustix::process::getpid();
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let number = |entry: fs::DirEntry| entry.file_name().to_str()?.parse().ok();
        let processes = entries.filter_map(number).filter_map(Pid::from_raw);
        processes.filter(|process| *process != ours && self.is_used_by(*process)).collect()
    }

    fn is_used_by(&self, process: Pid) -> bool {
        let process = Path::new("/proc").join(process.as_raw_nonzero().to_string());
        let maps = fs::read_to_string(process.join("maps")).unwrap_or_default();
        let links = ["exe", "cwd", "root"].into_iter().map(|name| process.join(name));
        let files = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
        maps.lines().any(|line| device_of(line) == Some(self.device))
            || links.chain(files.map(|file| file.path())).any(|link| self.is_on_it(&link))
    }

    fn is_on_it(&self, link: &Path) -> bool {
        fs::read_link(link).is_ok_and(|target| target.starts_with(&self.at))
            || fs::metadata(link).is_ok_and(|found| found.dev() == self.stat)
    }
}

/// Resumes a process that its control group of version 1 has frozen: a frozen one does not die. A
/// daemon that is killed during a checkpoint leaves such processes.
fn thaw(process: Pid) {
    let groups = fs::read_to_string(format!("/proc/{}/cgroup", process.as_raw_nonzero()));
    let groups = groups.unwrap_or_default();
    let group = groups.lines().find_map(|line| line.split_once(":freezer:"));
    if let Some((_, group)) = group.filter(|(_, group)| *group != "/") {
        let state = format!("/sys/fs/cgroup/freezer{group}/freezer.state");
        // It may be gone by now.
        let _ = fs::write(state, "THAWED");
    }
}

/// The device in a line of a memory map: addresses, permissions, offset, device, inode, path.
fn device_of(line: &str) -> Option<(u32, u32)> {
    let (major, minor) = line.split_whitespace().nth(3)?.split_once(':')?;
    Some((u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?))
}

#[cfg(test)]
mod tests {
    #[test]
    fn devices_are_read_from_memory_maps() {
        let line = "00400000-00452000 r-xp 00000000 fe:1f 173521      /usr/bin/dbus-daemon";
        assert_eq!(super::device_of(line), Some((0xfe, 0x1f)));
        assert_eq!(super::device_of(""), None);
    }
}
