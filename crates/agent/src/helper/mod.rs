//! Confines a program of the host that works on files that sandboxes wrote, and waits for it.
//!
//! ```text
//! launcher (host root)                       the helper
//!
//!  1 end when the daemon does
//!  2 copy the mounts of what it reads and writes
//!  3 clone with new namespaces  ------------>  4 wait
//!  5 map its ids, shift the copies' owners,
//!    open the gate  ------------------------>  6 become root of the namespace
//!                                              7 a root of a few read-only directories, enter it
//!                                              8 limits, capabilities, no new privileges, system call filter
//!  9 wait until it ends or is to end  <------  exec
//! 10 say how it ended
//! ```
//!
//! What a helper that was taken over by what it reads finds: itself, as a user of the host that owns nothing; the host's `/usr`, which everyone may
//! read; its input, read-only; one file to write; no other process, no network, no way to gain a privilege.
//!
//! *Why a user namespace.* A layer has files that only their owner may read, of any owner, and what packs them must see the owners' numbers as they
//! are. So the helper is root of a namespace in which the layers' owners are mapped, and has one capability there, `DAC_READ_SEARCH`: over
//! files whose owners are mapped in that namespace, of which its root shows no others than the layers. On the host it has none.

mod root;
mod sys;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::ExitCode;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::pipe::PipeFlags;
use rustix::process::{Pid, PidfdFlags, Resource, Rlimit, Signal, WaitOptions};
use rustix::thread::{CapabilitySet, CapabilitySets};
use sandkeep_proto::helper::{End, Helper, Input, MARK, SHIFTED, VERSION};

use crate::cage::inside::{CORE_SIZE, become_root};
use crate::cage::{self, Side, Step, StepError, filter, read_plan, wait_for, wrong_version};
use crate::vmm::sys as launch;

/// How many files a helper may have open. The packer has one for each directory it is in.
const FILES: u64 = 8192;
/// How many processes and threads of its user there may be.
const PROCESSES: u64 = 256;

const NAMESPACES: i32 = libc::CLONE_NEWUSER
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWCGROUP;

/// Runs the program described on standard input.
pub(crate) fn confine() -> ExitCode {
    let plan = read_plan().and_then(|helper: Helper| {
        if helper.version == VERSION { Ok(helper) } else { Err(wrong_version(helper.version)) }
    });
    let end = match plan.and_then(|helper| run(&helper)) {
        Ok(end) => end,
        Err(StepError { step, reason }) => End::Failed { step, reason },
    };
    let line = serde_json::to_string(&end).unwrap_or_default();
    // On a line of its own, whatever the program left behind.
    let _ = write!(std::io::stderr(), "\n{MARK}{line}\n");
    ExitCode::SUCCESS
}

fn run(helper: &Helper) -> Result<End, StepError> {
    sys::end_with_parent().step("stay with the daemon")?;
    let command = launch::Program::new(&helper.program, &helper.argv, &helper.env)?;
    let mounts = root::DetachedMounts::copy(helper)?;
    let (gate, gate_key) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).step("make a pipe")?;
    let (news, teller) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).step("make a pipe")?;
    match cage::split(NAMESPACES, None).step("make the namespaces")? {
        Side::Child => {
            drop((gate_key, news));
            let mut teller = File::from(teller);
            let trouble = match become_helper(helper, mounts, gate) {
                Ok(()) => StepError::new("run the program", command.exec()),
                Err(trouble) => trouble,
            };
            let _ = write!(teller, "{}\n{}", trouble.step, trouble.reason);
            cage::leave(1)
        }
        Side::Parent { child } => {
            drop((gate, teller));
            let pid = i32::try_from(child).ok().and_then(Pid::from_raw);
            let pid =
                pid.ok_or_else(|| StepError::new("make the namespaces", "no such process"))?;
            let ended = admit(helper, child, &mounts, gate_key).and_then(|()| {
                drop(mounts);
                hear(news)?;
                wait(pid, helper.limits.deadline)
            });
            if ended.is_err() {
                let _ = rustix::process::kill_process(pid, Signal::KILL);
                let _ = rustix::process::waitpid(Some(pid), WaitOptions::empty());
            }
            ended
        }
    }
}

/// Does for the waiting child what only the host's root can do, then resumes it.
fn admit(
    helper: &Helper,
    child: u32,
    mounts: &root::DetachedMounts,
    gate: OwnedFd,
) -> Result<(), StepError> {
    let proc = Path::new("/proc").join(child.to_string());
    let map = map_of(helper.uid);
    for name in ["uid_map", "gid_map"] {
        // The kernel takes a map in one write, once.
        fs::write(proc.join(name), &map).step("write the namespace's id maps")?;
    }
    let user_ns = File::open(proc.join("ns/user")).step("open the user namespace")?;
    mounts.shift(user_ns.as_fd())?;
    File::from(gate).write_all(b"g").step(cage::OPEN_THE_GATE)
}

/// The first ids are the helper's own, all others stay what they are: a machine with a kernel of its own writes files of any owner.
fn map_of(uid: u32) -> String {
    let after = uid.saturating_add(SHIFTED);
    let mut map = format!("0 {uid} {SHIFTED}\n");
    for (from, to) in [(SHIFTED, uid), (after, u32::MAX)] {
        if from < to {
            map.push_str(&format!("{from} {from} {}\n", to - from));
        }
    }
    map
}

/// Waits until the child has become the program, or says what went wrong.
fn hear(news: OwnedFd) -> Result<(), StepError> {
    let mut said = String::new();
    File::from(news).read_to_string(&mut said).step("hear from the helper")?;
    match said.split_once('\n') {
        Some((step, reason)) => Err(StepError::new(step, reason)),
        None => Ok(()),
    }
}

/// Waits until it ends, or ends it. All its processes end with the first.
fn wait(pid: Pid, deadline: u64) -> Result<End, StepError> {
    let step = "wait for the helper";
    let process = rustix::process::pidfd_open(pid, PidfdFlags::empty()).step(step)?;
    let patience = Timespec { tv_sec: i64::try_from(deadline).unwrap_or(i64::MAX), tv_nsec: 0 };
    let ended = loop {
        match rustix::event::poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&patience)) {
            Err(Errno::INTR) => {}
            ended => break ended.step(step)? > 0,
        }
    };
    if !ended {
        rustix::process::kill_process(pid, Signal::KILL).step(step)?;
    }
    let status = loop {
        match rustix::process::waitpid(Some(pid), WaitOptions::empty()) {
            Err(Errno::INTR) => {}
            ended => break ended.step(step)?,
        }
    };
    let Some((_, status)) = status else { return Err(StepError::new(step, "it is gone")) };
    Ok(match (ended, status.exit_status(), status.terminating_signal()) {
        (false, ..) => End::TimedOut,
        (true, Some(code), _) => End::Exited(code),
        (true, None, signal) => End::Signalled(signal.unwrap_or_default()),
    })
}

fn become_helper(
    helper: &Helper,
    mounts: root::DetachedMounts,
    gate: OwnedFd,
) -> Result<(), StepError> {
    // A session of its own: no terminal of the host's, no signal meant for the daemon's group.
    rustix::process::setsid().step("start a session")?;
    // When the host is short of memory, helpers go before what runs them.
    fs::write("/proc/self/oom_score_adj", "300")
        .step("set its standing for times without memory")?;
    // Its memory holds what sandboxes wrote.
    let _ = fs::write("/proc/self/coredump_filter", "0");
    let filter = filter::compile_for_helper()?;
    wait_for(gate)?;
    become_root()?;
    rustix::system::sethostname(b"helper").step("set the host name")?;
    root::enter(helper, mounts)?;
    let null = File::options().read(true).open("/dev/null").step("open /dev/null")?;
    rustix::stdio::dup2_stdin(&null).step("let go of standard input")?;
    limit(helper)?;
    drop_capabilities(&helper.input)?;
    rustix::thread::set_no_new_privs(true).step("forgo new privileges")?;
    // After the change of user, which would clear it.
    sys::end_with_parent().step("stay with the launcher")?;
    launch::close_on_exec().step("close what was inherited")?;
    cage::sys::install_filter(&filter).step("install the system call filter")
}

fn limit(helper: &Helper) -> Result<(), StepError> {
    let limits = helper.limits;
    launch::ignore_too_large_files().step("set the resource limits")?;
    for (resource, most) in [
        (Resource::As, limits.memory),
        (Resource::Stack, limits.stack),
        (Resource::Cpu, limits.cpu),
        (Resource::Fsize, limits.file_size),
        (Resource::Nofile, FILES),
        (Resource::Nproc, PROCESSES),
        (Resource::Core, CORE_SIZE),
    ] {
        let most = rustix::process::getrlimit(resource).maximum.map_or(most, |host| most.min(host));
        let limit = Rlimit { current: Some(most), maximum: Some(most) };
        rustix::process::setrlimit(resource, limit).step("set the resource limits")?;
    }
    Ok(())
}

/// Keeps what reading layers takes, and nothing otherwise. Root of a namespace is given by an exec what the bounding set has.
fn drop_capabilities(input: &Input) -> Result<(), StepError> {
    let kept = match input {
        Input::Layers { .. } => CapabilitySet::DAC_READ_SEARCH,
        Input::Nothing | Input::File(_) => CapabilitySet::empty(),
    };
    for number in 0..64 {
        let capability = CapabilitySet::from_bits_retain(1 << number);
        if kept.contains(capability) {
            continue;
        }
        match rustix::thread::remove_capability_from_bounding_set(capability) {
            Ok(()) => {}
            // The first number this kernel has no capability for.
            Err(Errno::INVAL) => break,
            Err(error) => return Err(StepError::new("drop capabilities", error)),
        }
    }
    rustix::thread::clear_ambient_capability_set().step("drop capabilities")?;
    let sets =
        CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    rustix::thread::set_capabilities(None, sets).step("drop capabilities")
}

#[cfg(test)]
mod tests {
    use super::map_of;

    #[test]
    fn every_id_is_mapped_once_and_root_never() {
        let map = map_of(0xF000_0000);
        let extents: Vec<Vec<u64>> = map
            .lines()
            .map(|line| line.split(' ').map(|number| number.parse().expect("a number")).collect())
            .collect();
        let last = u64::from(u32::MAX);
        assert_eq!(
            extents,
            [
                vec![0, 0xF000_0000, 65_536],
                vec![65_536, 65_536, 0xF000_0000 - 65_536],
                vec![0xF001_0000, 0xF001_0000, last - 0xF001_0000],
            ]
        );
        assert!(extents.iter().all(|extent| extent[1] >= 65_536), "no user of the host's system");
    }
}
