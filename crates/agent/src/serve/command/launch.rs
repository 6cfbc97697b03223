//! Starts a process.
//!
//! By `clone` with shared memory, the parent waiting until the child has executed: no page tables
//! are copied, and why a step failed is simply written where the parent reads it. The price is that
//! the child, between `clone` and `execve`, may only do system calls: it allocates nothing, takes no
//! lock, and everything it needs was laid out before.

#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use std::ptr;

use rustix::thread::CpuSet;
use sandkeep_proto::link::{Failure, Hidden};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use zeroize::Zeroizing;

use crate::cage::Expendable;
use crate::cage::inside::SAVED_UID;
use crate::serve::command::user::Identity;
use crate::serve::error::{RequestError, kind_of, say};

/// Room for the child until it has executed; it calls nothing deep.
const STACK: usize = 64 << 10;

/// How many signals the kernel knows, and how many bytes a set of them takes.
const SIGNALS: c_int = 64;
const SIGSET: usize = 8;

/// A process to be started, everything looked up that can be.
#[derive(Debug)]
pub(crate) struct Plan<'a> {
    pub(crate) argv: &'a [String],
    pub(crate) env: &'a [(String, String)],
    /// More of it, of which nothing stays here.
    pub(crate) secret_env: &'a BTreeMap<String, Hidden>,
    pub(crate) identity: &'a Identity,
    /// The working directory that was asked for.
    pub(crate) cwd: Option<&'a str>,
    /// Standard input, output and error; none of them below 3.
    pub(crate) stdio: [BorrowedFd<'a>; 3],
    /// Whether standard input is a terminal to be controlled by.
    pub(crate) tty: bool,
    /// How many files it may open, as it was before the agent allowed itself more.
    pub(crate) files: libc::rlimit,
    /// The processors it runs on, if not all.
    pub(crate) cpus: Option<CpuSet>,
}

/// The steps of a child that can fail, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LaunchStep {
    Session,
    User,
    Directory,
    Execute,
}

/// What the child needs, as plain pointers and numbers.
struct Child {
    programs: Vec<*const c_char>,
    argv: Vec<*const c_char>,
    /// `argv` for a script without `#!`: the shell, the script, the arguments.
    script: Vec<*const c_char>,
    env: Vec<*const c_char>,
    groups: Vec<libc::gid_t>,
    uid: libc::uid_t,
    gid: libc::gid_t,
    cwd: *const c_char,
    cwd_asked: bool,
    stdio: [RawFd; 3],
    tty: bool,
    files: libc::rlimit,
    cpus: Option<CpuSet>,
    failed: Option<(LaunchStep, c_int)>,
}

const SHELL: *const c_char = c"/bin/sh".as_ptr();
const ROOT: *const c_char = c"/".as_ptr();

/// Starts it and returns its process id, which is also its process group and session.
pub(crate) fn launch(plan: &Plan<'_>) -> Result<i32, RequestError> {
    let text = |text: &str| {
        CString::new(text).map_err(|_| {
            RequestError::new(Failure::Invalid, "arguments and environment cannot hold a zero byte")
        })
    };
    let Some(program) = plan.argv.first().filter(|program| !program.is_empty()) else {
        return Err(RequestError::new(Failure::Invalid, "there is no program to run"));
    };
    let argv = plan.argv.iter().map(|arg| text(arg)).collect::<Result<Vec<_>, _>>()?;
    let hidden = |name: &str| plan.secret_env.contains_key(name);
    let env = plan.env.iter().filter(|(name, _)| !hidden(name));
    let env = env.map(|(name, value)| text(&format!("{name}={value}")));
    let env = env.collect::<Result<Vec<_>, _>>()?;
    let secret_env = plan.secret_env.iter().map(|(name, value)| {
        let whole = Zeroizing::new(format!("{name}={}", value.reveal()));
        text(&whole).map(Zeroizing::new)
    });
    let secret_env = secret_env.collect::<Result<Vec<_>, _>>()?;
    let path = plan.env.iter().find(|(name, _)| name == "PATH").map_or("", |(_, path)| path);
    let programs = candidates(program, path);
    let programs = programs.iter().map(|program| text(program)).collect::<Result<Vec<_>, _>>()?;
    let cwd = text(plan.cwd.unwrap_or(&plan.identity.home))?;

    let pointers = |list: &[CString]| -> Vec<*const c_char> {
        list.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect()
    };
    let secret_pointers = secret_env.iter().map(|text| text.as_ptr());
    let all_env = secret_pointers.chain(pointers(&env)).collect();
    // Its second place is for whichever program turns out to be a script.
    let script = [SHELL, ptr::null()].into_iter().chain(pointers(&argv).into_iter().skip(1));
    let mut child = Child {
        programs: pointers(&programs),
        script: script.collect(),
        argv: pointers(&argv),
        env: all_env,
        groups: plan.identity.groups.clone(),
        uid: plan.identity.uid,
        gid: plan.identity.gid,
        cwd: cwd.as_ptr(),
        cwd_asked: plan.cwd.is_some(),
        stdio: plan.stdio.map(|fd| fd.as_raw_fd()),
        tty: plan.tty,
        files: plan.files,
        cpus: plan.cpus,
        failed: None,
    };
    let _first_to_go = Expendable::mark();
    let pid = clone_and_wait(&mut child).map_err(|error| {
        RequestError::new(kind_of(&error), format!("could not start a process: {}", say(&error)))
    })?;
    match child.failed {
        None => Ok(pid),
        Some((step, errno)) => {
            // SAFETY: `pid` is our child, which has ended; nothing else can have waited for it,
            // since all waiting happens on this thread.
            unsafe { libc::waitpid(pid, ptr::null_mut(), 0) };
            Err(explain(plan, step, &io::Error::from_raw_os_error(errno)))
        }
    }
}

/// Where a program may be: as it is if it names a path, in every directory of PATH otherwise.
fn candidates(program: &str, path: &str) -> Vec<String> {
    if program.contains('/') {
        return vec![program.to_owned()];
    }
    let place =
        |dir: &str| if dir.is_empty() { program.to_owned() } else { format!("{dir}/{program}") };
    path.split(':').map(place).collect()
}

fn explain(plan: &Plan<'_>, step: LaunchStep, error: &io::Error) -> RequestError {
    let program = plan.argv.first().map_or("", String::as_str);
    match step {
        LaunchStep::Session => RequestError::new(
            kind_of(error),
            format!("could not give the process a session of its own: {}", say(error)),
        ),
        LaunchStep::User => RequestError::new(
            Failure::NoUser,
            format!(
                "could not become user {} with group {}: {}",
                plan.identity.uid,
                plan.identity.gid,
                say(error)
            ),
        ),
        LaunchStep::Directory => RequestError {
            kind: Failure::NoDirectory,
            ..RequestError::io(
                "enter the working directory",
                Path::new(plan.cwd.unwrap_or("/")),
                error,
            )
        },
        LaunchStep::Execute => match error.raw_os_error() {
            Some(libc::ENOENT) if !program.contains('/') => {
                let message = format!("there is no program `{program}` on the PATH of the command");
                RequestError::new(Failure::NoExecutable, message)
            }
            Some(libc::E2BIG) => RequestError::new(
                Failure::Invalid,
                "the arguments and the environment together are too long".to_owned(),
            ),
            Some(libc::ENOMEM | libc::EAGAIN) => {
                RequestError::io("execute", Path::new(program), error)
            }
            Some(libc::ENOENT | libc::ENOTDIR) => RequestError {
                kind: Failure::NoExecutable,
                ..RequestError::io("execute", Path::new(program), error)
            },
            _ => RequestError {
                kind: Failure::NotExecutable,
                ..RequestError::io("execute", Path::new(program), error)
            },
        },
    }
}

/// Runs [`run`] in a new process that borrows our memory, and returns when it has executed or ended.
fn clone_and_wait(child: &mut Child) -> io::Result<i32> {
    // A fresh stack of 16-byte elements, so that its top is aligned as the machine wants it.
    let mut stack = vec![0_u128; STACK / size_of::<u128>()];
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    // SAFETY: all signals are blocked around the clone, so no handler of ours runs in the child on
    // shared memory. The child runs on its own stack, which outlives it because CLONE_VFORK holds
    // this thread until the child has executed or ended; for the same time it alone uses `child`.
    unsafe {
        let mut all = std::mem::zeroed();
        let mut before = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let top = stack.as_mut_ptr().add(stack.len()).cast::<c_void>();
        let pid = libc::clone(run, top, flags, ptr::from_mut(child).cast());
        let error = io::Error::last_os_error();
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut());
        if pid < 0 { Err(error) } else { Ok(pid) }
    }
}

/// The child's whole life until it executes.
extern "C" fn run(argument: *mut c_void) -> c_int {
    // SAFETY: `clone_and_wait` passes a `Child` that nothing else touches meanwhile. Everything
    // below is a system call or plain reads and writes of that memory.
    unsafe {
        let child = &mut *argument.cast::<Child>();
        let step = prepare(child);
        let failed = step.err().unwrap_or_else(|| (LaunchStep::Execute, execute(child)));
        child.failed = Some(failed);
        libc::_exit(127)
    }
}

/// Turns the child into the command, except for executing it.
unsafe fn prepare(child: &Child) -> Result<(), (LaunchStep, c_int)> {
    // SAFETY: system calls on the child's own copies of descriptors and signal actions. The ids are
    // set by raw calls: the C library's wrappers would try to change the agent's other threads,
    // too.
    unsafe {
        let check = |step: LaunchStep, result: libc::c_long| {
            if result < 0 { Err((step, *libc::__errno_location())) } else { Ok(()) }
        };
        check(LaunchStep::Session, libc::setsid().into())?;
        if child.tty {
            let [terminal, ..] = child.stdio;
            check(LaunchStep::Session, libc::ioctl(terminal, libc::TIOCSCTTY, 0).into())?;
        }
        for (to, from) in (0..).zip(child.stdio) {
            check(LaunchStep::Session, libc::dup2(from, to).into())?;
        }
        // Everything of ours closes on exec; this is for what a library forgot.
        libc::syscall(libc::SYS_close_range, 3, c_int::MAX, libc::CLOSE_RANGE_CLOEXEC);
        libc::setrlimit(libc::RLIMIT_NOFILE, &raw const child.files);
        if let Some(cpus) = &child.cpus {
            // The limit of CPU time holds without it.
            let _ = rustix::thread::sched_setaffinity(None, cpus);
        }

        let groups = child.groups.as_ptr();
        check(LaunchStep::User, libc::syscall(libc::SYS_setgroups, child.groups.len(), groups))?;
        check(
            LaunchStep::User,
            libc::syscall(libc::SYS_setresgid, child.gid, child.gid, child.gid),
        )?;
        check(
            LaunchStep::User,
            libc::syscall(libc::SYS_setresuid, child.uid, child.uid, child.uid),
        )?;

        if libc::chdir(child.cwd) < 0 {
            let errno = *libc::__errno_location();
            if child.cwd_asked {
                return Err((LaunchStep::Directory, errno));
            }
            check(LaunchStep::Directory, libc::chdir(ROOT).into())?;
        }

        // The kernel's own form of "default", all zeros: the C library's wrapper would leave out
        // the two signals it uses itself, and they may have been ignored before us.
        let default = [0_u64; 4];
        for signal in 1..=SIGNALS {
            // The two that cannot be set return an error, and need not be.
            let nowhere = ptr::null_mut::<c_void>();
            libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), nowhere, SIGSET);
        }
        let mut none = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
        Ok(())
    }
}

/// Executes the first candidate that can be; returns only when none can, with the reason that says
/// most: a file that exists but may not be executed beats one that does not exist.
unsafe fn execute(child: &mut Child) -> c_int {
    let mut reason = libc::ENOENT;
    let mut at = 0;
    while let Some(&program) = child.programs.get(at).filter(|program| !program.is_null()) {
        at += 1;
        // SAFETY: `execve` on zero-terminated strings in null-terminated arrays.
        let errno = unsafe {
            libc::execve(program, child.argv.as_ptr(), child.env.as_ptr());
            *libc::__errno_location()
        };
        match errno {
            libc::ENOENT | libc::ENOTDIR => {}
            libc::EACCES => reason = errno,
            // A script without `#!` is the shell's, as everywhere.
            libc::ENOEXEC => {
                if let Some(place) = child.script.get_mut(1) {
                    *place = program;
                }
                // SAFETY: as above.
                unsafe {
                    libc::execve(SHELL, child.script.as_ptr(), child.env.as_ptr());
                }
                return errno;
            }
            _ => return errno,
        }
    }
    reason
}

/// Raises the agent's own limit of open files as far as it may, and returns what it was before,
/// which commands get.
pub(crate) fn raise_file_limit() -> libc::rlimit {
    let mut before = libc::rlimit { rlim_cur: 1024, rlim_max: 4096 };
    // SAFETY: plain system calls on a struct of ours.
    unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut before);
        let raised = libc::rlimit { rlim_cur: before.rlim_max, ..before };
        libc::setrlimit(libc::RLIMIT_NOFILE, &raw const raised);
    }
    before
}

/// Makes this thread, and only this thread, act as `identity` from here on.
pub(crate) fn become_on_this_thread(identity: &Identity) -> io::Result<()> {
    let groups = identity.groups.as_slice();
    let (uid, gid) = (identity.uid, identity.gid);
    let check =
        |result: libc::c_long| if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) };
    // SAFETY: raw system calls, which change the credentials of the calling thread alone.
    unsafe {
        check(libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()))?;
        check(libc::syscall(libc::SYS_setresgid, gid, gid, gid))?;
        check(libc::syscall(libc::SYS_setresuid, uid, uid, SAVED_UID))
    }
}

/// Signals every process but this one. Only for the first process of a machine.
pub(crate) fn signal_all(signal: c_int) -> io::Result<()> {
    // SAFETY: a plain system call.
    match unsafe { libc::kill(-1, signal) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Signals a process group.
pub(crate) fn signal_group(group: i32, signal: c_int) -> io::Result<()> {
    // SAFETY: a plain system call; `group` is a process id, so positive.
    match unsafe { libc::kill(-group, signal) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Lets the runtime say when a descriptor is ready.
pub(crate) fn watch(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` that nothing can reach mutably in there names the same open file until
    // it is dropped, which is after it was deregistered.
    unsafe { AsyncFd::register_with_interest(fd, interest) }.map_err(|error| error.into_parts().1)
}

/// How many bytes wait in a pipe.
pub(crate) fn waiting(fd: BorrowedFd<'_>) -> usize {
    let mut count: c_int = 0;
    // SAFETY: FIONREAD writes one int.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), libc::FIONREAD, &raw mut count) };
    if result < 0 { 0 } else { usize::try_from(count).unwrap_or(0) }
}

#[cfg(test)]
mod tests {
    use super::candidates;

    #[test]
    fn a_program_is_looked_for_as_a_shell_would() {
        assert_eq!(candidates("./x", "/bin"), ["./x"]);
        assert_eq!(candidates("x", "/bin::/usr/bin"), ["/bin/x", "x", "/usr/bin/x"]);
        assert_eq!(candidates("x", ""), ["x"]);
    }
}
