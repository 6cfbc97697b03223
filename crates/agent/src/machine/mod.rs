//! The first process of a machine of its own: a kernel, its devices, and this program as `/init`.
//!
//! ```text
//! init          mount /proc, /sys, /dev; load modules; open the port; let go of the initramfs; serve the link
//! assemble      mount the root and the drives, /proc, /sys and /dev, enter it, become who the machine is to be
//! renew         after a restore: the time, randomness, and who it is if that has changed
//! freeze, thaw  before and after a capture
//! export        what was written, at the end
//! ```
//!
//! Root inside is root of its own kernel: nothing is kept from it that a machine's root has, and all that keeps it from the host is
//! the machine. What this program holds (directories that are mounted nowhere) is out of sight, not out of reach.
//!
//! The first process must not end: then the kernel panics, and the machine is gone.

mod assemble;
mod attendant;
mod disks;
mod early;
mod export;
mod identity;
mod look;
mod sys;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::ExitCode;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use rustix::fs::{Dir, Mode, OFlags};
use sandkeep_proto::link::{Assemble, Failure, Identity, Moment, Request};

use crate::cage::{Step as _, StepError};
use crate::serve::{self, FileTask, RequestError};

/// What the kernel calls processes of its own.
const KERNEL_THREAD: u64 = 0x0020_0000;

/// Starts the machine and serves it.
pub(crate) fn init() -> ExitCode {
    match start() {
        Ok(machine) => serve::run_machine(&machine),
        Err(trouble) => {
            // No peer is connected; the message may be read on the console.
            eprintln!("keep-agent: could not {}: {}", trouble.step, trouble.reason);
            // The kernel panics, and is configured to end the machine then.
            ExitCode::FAILURE
        }
    }
}

fn start() -> Result<Arc<Machine>, StepError> {
    let machine = Arc::new(early::prepare()?);
    let jobs = attendant::start(&machine).step("start a thread")?;
    // It is set only here.
    let _ = machine.jobs.set(jobs);
    Ok(machine)
}

/// The machine, as this program holds it.
#[derive(Debug)]
pub(crate) struct Machine {
    port: OwnedFd,
    /// `/proc`, whatever is mounted there later.
    proc: OwnedFd,
    /// `/dev/random`, to be given randomness: looking for it would take longer than that.
    random: OwnedFd,
    state: Mutex<MachineState>,
    /// The jobs of the one thread for them.
    jobs: OnceLock<Sender<attendant::Job>>,
}

#[derive(Debug)]
enum MachineState {
    /// Not assigned to a sandbox.
    Waiting,
    /// Becoming a sandbox's. Stays if that fails: what was mounted on the way is not taken back.
    Assembling,
    /// A sandbox's.
    Whole(Arc<Whole>),
}

/// What is kept of a root once it stands.
#[derive(Debug)]
struct Whole {
    /// The root first, then the drives.
    parts: Vec<Part>,
    /// The lowest layer of the root, which has mount points and files for images that lack them; absent in a rescue.
    base: Option<OwnedFd>,
    /// What is seen as the kernel's `boot_id`; absent in a rescue.
    boot_id: Option<File>,
    disks: disks::Disks,
    looks: look::Looks,
}

/// What was written to one disk.
#[derive(Debug)]
struct Part {
    /// Absent where nothing can be written.
    upper: Option<OwnedFd>,
    /// What lies below, topmost first; not known in a rescue.
    lower: Vec<OwnedFd>,
}

/// Locks a mutex, also after a thread panicked with it: the agent continues as long as it can.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Machine {
    /// The port, for the link.
    pub(crate) fn port(&self) -> io::Result<OwnedFd> {
        self.port.try_clone()
    }

    fn state(&self) -> MutexGuard<'_, MachineState> {
        locked(&self.state)
    }

    fn whole(&self) -> Option<Arc<Whole>> {
        match &*self.state() {
            MachineState::Whole(whole) => Some(Arc::clone(whole)),
            MachineState::Waiting | MachineState::Assembling => None,
        }
    }

    /// Whether a request can be carried out as the machine is.
    pub(crate) fn allows(&self, request: &Request) -> Result<(), RequestError> {
        let always = matches!(
            request,
            Request::Hello { .. }
                | Request::Assemble(_)
                | Request::Renew(_)
                | Request::Freeze
                | Request::Thaw
        );
        match self.whole() {
            _ if always => Ok(()),
            None => Err(RequestError::new(
                Failure::Invalid,
                "the machine is not assigned to a sandbox yet",
            )),
            Some(whole) if whole.base.is_some() => Ok(()),
            Some(_) => match request {
                Request::Export { .. } | Request::Quiesce { .. } | Request::Commands => Ok(()),
                _ => Err(RequestError::new(
                    Failure::Invalid,
                    "the machine was only started for what is on its disks",
                )),
            },
        }
    }

    /// Makes it the sandbox's.
    pub(crate) fn assemble(&self, plan: &Assemble) -> Result<(), RequestError> {
        {
            let mut state = self.state();
            if !matches!(*state, MachineState::Waiting) {
                return Err(RequestError::new(
                    Failure::Exists,
                    "the machine is a sandbox's already",
                ));
            }
            *state = MachineState::Assembling;
        }
        self.take_in(&plan.now)?;
        let whole = if plan.rescue {
            assemble::rescue(plan).map_err(problem)?
        } else {
            let whole = assemble::assemble(plan).map_err(problem)?;
            identity::take_on(&plan.identity).map_err(problem)?;
            whole
        };
        *self.state() = MachineState::Whole(Arc::new(whole));
        Ok(())
    }

    /// Takes in what time it is, and randomness: a machine that was restored has what many others have.
    pub(crate) fn take_in(&self, moment: &Moment) -> Result<(), RequestError> {
        identity::take_in(moment, &self.random).map_err(problem)
    }

    /// Makes it another sandbox's than the one whose memory it has.
    pub(crate) fn become_another(
        &self,
        identity: &Identity,
        machine_id: bool,
    ) -> Result<(), RequestError> {
        // What follows is written to disks that were frozen for the capture.
        self.thaw()?;
        identity::take_on(identity).map_err(problem)?;
        match self.whole() {
            Some(whole) => whole.renew(&identity.hostname, machine_id).map_err(problem),
            None => Ok(()),
        }
    }

    /// Runs a job after the earlier ones, without delaying the caller.
    pub(crate) fn in_turn(
        &self,
        job: impl FnOnce(&Self) + Send + 'static,
    ) -> Result<(), RequestError> {
        let told = self.jobs.get().is_some_and(|jobs| jobs.send(Box::new(job)).is_ok());
        told.then_some(())
            .ok_or_else(|| RequestError::new(Failure::Fault, "nobody is there to do it"))
    }

    /// Writes everything to the disks and lets nothing more be written, for ten seconds.
    pub(crate) fn freeze(&self) -> Result<(), RequestError> {
        match self.whole() {
            Some(whole) => whole.disks.freeze().step("freeze the disks").map_err(problem),
            None => {
                rustix::fs::sync();
                Ok(())
            }
        }
    }

    /// Lets disks be written again.
    pub(crate) fn thaw(&self) -> Result<(), RequestError> {
        match self.whole() {
            Some(whole) => whole.disks.thaw().step("thaw the disks").map_err(problem),
            None => Ok(()),
        }
    }

    /// How much longer disks may stay frozen, if they are.
    fn frozen_for(&self) -> Option<Duration> {
        self.whole().and_then(|whole| whole.disks.frozen_for())
    }

    /// Packs what was written to the root, or to a drive.
    pub(crate) fn export(
        &self,
        part: u32,
        task: &mut FileTask,
    ) -> Result<sandkeep_proto::link::Done, RequestError> {
        let whole = self.whole();
        let parts = whole.as_ref().map(|whole| whole.parts.as_slice()).unwrap_or_default();
        let found = parts.get(part as usize).and_then(|part| part.upper.as_ref());
        let Some(upper) = found else {
            let message = format!("the machine has no part {part} that can be written");
            return Err(RequestError::new(Failure::NotFound, message));
        };
        export::pack(upper.as_fd(), task)
    }

    /// Looks at what changed in the root.
    pub(crate) fn look(&self, saved: bool) -> Result<sandkeep_proto::link::Looked, RequestError> {
        let none = || RequestError::new(Failure::NotFound, "the machine has no root yet");
        let whole = self.whole().ok_or_else(none)?;
        let mut found = look::look(&whole, saved)?;
        found.alone = self.is_alone();
        Ok(found)
    }

    /// Whether no process but this one is alive. The kernel's own do not count, which a signal to everybody also reaches.
    pub(crate) fn is_alone(&self) -> bool {
        let Ok(listed) = Dir::read_from(&self.proc) else { return false };
        for entry in listed {
            let Ok(entry) = entry else { return false };
            let name = entry.file_name();
            if name == c"1" || !name.to_bytes().iter().all(u8::is_ascii_digit) {
                continue;
            }
            let path = [name.to_bytes(), b"/stat"].concat();
            // One that has ended meanwhile.
            let Some(stat) = self.read(&path) else { continue };
            if !is_kernel_thread(&stat) {
                return false;
            }
        }
        true
    }

    fn read(&self, path: &[u8]) -> Option<String> {
        use std::io::Read as _;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.proc, path, flags, Mode::empty()).ok()?;
        let mut bytes = Vec::new();
        File::from(file).read_to_end(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// Whether a line of `/proc/<pid>/stat` is about one of the kernel's own.
fn is_kernel_thread(stat: &str) -> bool {
    // The second field is the program's name in parentheses and may hold anything, even `) `.
    let flags = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(6));
    flags
        .and_then(|flags| flags.parse::<u64>().ok())
        .is_some_and(|flags| flags & KERNEL_THREAD != 0)
}

fn problem(trouble: StepError) -> RequestError {
    let kind = if trouble.step == sandkeep_proto::cage::MOUNT_POINT {
        Failure::Invalid
    } else {
        Failure::Fault
    };
    RequestError::new(kind, format!("could not {}: {}", trouble.step, trouble.reason))
}

#[cfg(test)]
mod tests {
    use super::is_kernel_thread;

    #[test]
    fn the_kernels_own_are_told_from_others() {
        assert!(is_kernel_thread("2 (kthreadd) S 0 0 0 0 -1 2129984 0 0 0 0"));
        assert!(!is_kernel_thread("7 (sh) S 1 7 7 0 -1 4194304 1 0 0 0"));
        assert!(!is_kernel_thread("7 (x) S 0 0 0 0 -1 2129984) S 1 7 7 0 -1 4194304 1"));
        assert!(!is_kernel_thread("") && !is_kernel_thread("7 (sh) S"));
    }
}
