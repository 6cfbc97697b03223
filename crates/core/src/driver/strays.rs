//! Machines of a sandbox that no driver knows of.
//!
//! A driver finds its machines by the runtime directory and by the control group. Both carry the name of the data
//! directory, and a daemon of an earlier version named them otherwise: after an upgrade and a move at
//! once, the machine is there and not known. Its processes can still be told by their control group, which ends
//! in the sandbox's id on every host and under every name.

use std::fs;
use std::path::Path;

use rustix::process::{Pid, PidfdFlags, Signal};

use crate::model::MachineKey;

/// The processes in a control group of this name, whatever it is in.
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

/// Kills every process of a machine, and tells which those were.
pub(crate) fn end(key: &MachineKey) -> Vec<u32> {
    let mut ended = Vec::new();
    for pid in processes(key) {
        let Ok(process) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) else { continue };
        // Asked again now that it is held: the number may have become another's.
        if is_in(pid, key) && rustix::process::pidfd_send_signal(process, Signal::KILL).is_ok() {
            ended.push(pid.as_raw_nonzero().get().unsigned_abs());
        }
    }
    ended
}

#[cfg(test)]
mod tests {
    use super::names;
    use crate::model::MachineKey;

    #[test]
    fn a_group_is_told_by_its_name() {
        let key = MachineKey::parse("sbx-01").expect("a key");
        assert!(names("5:pids:/sandkeep-ab/sbx-01\n4:cpu:/\n", &key));
        assert!(names("0::/system.slice/sandkeep-ab/sbx-01/inner\n", &key));
        assert!(!names("0::/sandkeep-ab/sbx-012\n3:x:/sbx-0\n", &key));
        assert!(!names("", &key));
    }
}
