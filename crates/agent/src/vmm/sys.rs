//! The system calls no safe wrapper offers. All unsafe code of the launcher is here.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::cage::{Step, StepError};

/// A program to become, in the form the kernel takes it.
pub(crate) struct Program {
    program: CString,
    argv: Vec<CString>,
    env: Vec<CString>,
}

impl Program {
    pub(crate) fn new(
        program: &Path,
        argv: &[String],
        env: &BTreeMap<String, String>,
    ) -> Result<Self, StepError> {
        let text = |text: &[u8]| CString::new(text).step("read the arguments");
        Ok(Self {
            program: text(program.as_os_str().as_bytes())?,
            argv: argv.iter().map(|word| text(word.as_bytes())).collect::<Result<_, _>>()?,
            env: env
                .iter()
                .map(|(name, value)| text(format!("{name}={value}").as_bytes()))
                .collect::<Result<_, _>>()?,
        })
    }

    /// Executes it. Returns only on an error, with its cause.
    pub(crate) fn exec(&self) -> io::Error {
        let pointers = |words: &[CString]| -> Vec<*const libc::c_char> {
            words.iter().map(|word| word.as_ptr()).chain([std::ptr::null()]).collect()
        };
        let (argv, env) = (pointers(&self.argv), pointers(&self.env));
        // SAFETY: both lists end with a null pointer, and they and all they point to live for the call.
        unsafe { libc::execve(self.program.as_ptr(), argv.as_ptr(), env.as_ptr()) };
        io::Error::last_os_error()
    }
}

/// Has writes beyond the limit of a file's size fail, also in the program that this one becomes.
pub(crate) fn ignore_too_large_files() -> io::Result<()> {
    // SAFETY: no handler is installed, and no memory is touched.
    match unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) } {
        libc::SIG_ERR => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// A copy of a descriptor at `above` or higher, closed on exec.
pub(crate) fn out_of_the_way(fd: BorrowedFd<'_>, above: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: makes a descriptor, touches no memory.
    let copy = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, above) };
    check(copy.into())?;
    // SAFETY: it was just made and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

/// Puts descriptors at their numbers, all below `above`, and `null` at those of 0, 1 and 2 that are not among them. Nothing
/// else is open after the next exec.
pub(crate) fn place(null: OwnedFd, given: Vec<(RawFd, OwnedFd)>, above: RawFd) -> io::Result<()> {
    // SAFETY: marks descriptors to be closed on exec, touches no memory.
    check(unsafe { libc::syscall(libc::SYS_close_range, 0, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) })?;
    let mut placed = Vec::with_capacity(given.len() + 3);
    for at in (0..3).filter(|at| given.iter().all(|(taken, _)| taken != at)) {
        placed.push((at, out_of_the_way(null.as_fd(), above)?));
    }
    // Its number, like those of the others, may be one that is written over.
    std::mem::forget(null);
    for (at, fd) in given {
        placed.push((at, out_of_the_way(fd.as_fd(), above)?));
        std::mem::forget(fd);
    }
    for (at, fd) in &placed {
        // SAFETY: what was at this number has no owner any more: it was forgotten above, or is one of the three that
        // belong to the process.
        check(unsafe { libc::dup2(fd.as_raw_fd(), *at) }.into())?;
    }
    Ok(())
}

/// Has every descriptor but 0, 1 and 2 closed by the next exec.
pub(crate) fn close_on_exec() -> io::Result<()> {
    // SAFETY: marks descriptors to be closed on exec, touches no memory.
    check(unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) })
}

/// Makes a mount and all below it read-only, without devices and without set-user-id programs.
pub(crate) fn lock_mounts(path: &Path) -> io::Result<()> {
    #[repr(C)]
    struct MountAttr {
        set: u64,
        clear: u64,
        propagation: u64,
        user_ns: u64,
    }
    const RDONLY: u64 = 0x1;
    const NOSUID: u64 = 0x2;
    const NODEV: u64 = 0x4;
    let attr = MountAttr { set: RDONLY | NOSUID | NODEV, clear: 0, propagation: 0, user_ns: 0 };
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: the path and the attributes live for the call, and the size is theirs.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            libc::AT_FDCWD,
            path.as_ptr(),
            libc::AT_RECURSIVE,
            &raw const attr,
            size_of_val(&attr),
        )
    })
}

fn check(answer: i64) -> io::Result<()> {
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
