//! Orphaned processes: those of a sandbox's machine that no driver knows about.
//!
//! A driver finds its machines by the runtime directory and by the control group. Both contain the name of the data directory, and
//! earlier versions named them differently. After an upgrade together with a move of the data directory, a machine may run
//! unknown to its driver. Its processes are found by their control group, whose path always ends in the sandbox's id.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal};

use crate::model::MachineKey;

/// Where control groups are mounted, each controller below it under version 1.
const CGROUPS: &str = "/sys/fs/cgroup";
/// How often, and at which interval, to try to remove a group whose processes were killed.
const TRIES: u32 = 40;
const BETWEEN: Duration = Duration::from_millis(50);

/// The processes in a control group of this name, below any parent.
fn processes(key: &MachineKey) -> Vec<Pid> {
    let listed = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = listed.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers.filter_map(Pid::from_raw).filter(|pid| is_in(*pid, key)).collect()
}

fn is_in(pid: Pid, key: &MachineKey) -> bool {
    let path = format!("/proc/{}/cgroup", pid.as_raw_nonzero());
    fs::read_to_string(path).is_ok_and(|text| names(&text, key))
}

/// Whether `/proc/<pid>/cgroup` names the key.
fn names(text: &str, key: &MachineKey) -> bool {
    // 4:memory:/parent/key
    let paths = text.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    paths.flat_map(|path| Path::new(path).components()).any(|part| part.as_os_str() == key.as_str())
}

/// The path of the group of this key in a line of `/proc/<pid>/cgroup`, below where control groups are mounted.
fn group(line: &str, key: &MachineKey) -> Option<PathBuf> {
    let path = Path::new(line.splitn(3, ':').nth(2)?.trim_start_matches('/'));
    path.ancestors()
        .find(|part| part.file_name() == Some(key.as_str().as_ref()))
        .map(Path::to_owned)
}

/// The directories of all groups of a process that have this key.
fn groups(pid: Pid, key: &MachineKey) -> Vec<PathBuf> {
    let text = fs::read_to_string(format!("/proc/{}/cgroup", pid.as_raw_nonzero()));
    let text = text.unwrap_or_default();
    let found: BTreeSet<PathBuf> = text.lines().filter_map(|line| group(line, key)).collect();
    let root = Path::new(CGROUPS);
    let mounts = fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.path());
    let mounts: Vec<PathBuf> = std::iter::once(root.to_owned()).chain(mounts).collect();
    let all = found.iter().flat_map(|path| mounts.iter().map(move |mount| mount.join(path)));
    all.filter(|path| path.is_dir()).collect()
}

/// Removes empty groups, and their parent if that is empty too.
fn remove(groups: &BTreeSet<PathBuf>) {
    for _ in 0..TRIES {
        for group in groups {
            let _ = fs::remove_dir(group);
        }
        if groups.iter().all(|group| !group.exists()) {
            break;
        }
        thread::sleep(BETWEEN);
    }
    for group in groups.iter().filter_map(|group| group.parent()) {
        if group.file_name().is_some_and(|name| name.to_string_lossy().starts_with("sandkeep")) {
            let _ = fs::remove_dir(group);
        }
    }
}

/// Kills every process of a machine and removes its control groups. Returns the process ids.
pub(crate) fn kill_orphans(key: &MachineKey) -> Vec<u32> {
    let mut ended = Vec::new();
    let processes = processes(key);
    let known: BTreeSet<PathBuf> = processes.iter().flat_map(|pid| groups(*pid, key)).collect();
    for group in &known {
        // Frozen processes do not die. Each version of control groups has one of these files.
        let _ = fs::write(group.join("freezer.state"), "THAWED");
        let _ = fs::write(group.join("cgroup.freeze"), "0");
    }
    for pid in processes {
        let Ok(process) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) else { continue };
        // Checked again with the pidfd open: the process id may have been reused.
        if is_in(pid, key) && rustix::process::pidfd_send_signal(process, Signal::KILL).is_ok() {
            ended.push(pid.as_raw_nonzero().get().unsigned_abs());
        }
    }
    remove(&known);
    ended
}

#[cfg(test)]
mod tests {
    use super::{group, names};
    use crate::model::MachineKey;

    #[test]
    fn a_group_is_told_by_its_name() {
        let key = MachineKey::parse("sbx-01").expect("a key");
        assert!(names("5:pids:/sandkeep-ab/sbx-01\n4:cpu:/\n", &key));
        assert!(names("0::/system.slice/sandkeep-ab/sbx-01/inner\n", &key));
        assert!(!names("0::/sandkeep-ab/sbx-012\n3:x:/sbx-0\n", &key));
        assert!(!names("", &key));
        let path = |line| group(line, &key).map(|path| path.display().to_string());
        assert_eq!(path("5:pids:/sandkeep-ab/sbx-01").as_deref(), Some("sandkeep-ab/sbx-01"));
        assert_eq!(path("0::/a/sbx-01/inner").as_deref(), Some("a/sbx-01"));
        assert_eq!(path("0::/a/sbx-012"), None);
    }
}
