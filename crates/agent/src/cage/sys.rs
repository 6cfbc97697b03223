//! The system calls no safe wrapper offers. All unsafe code of the cage is here.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use seccompiler::BpfProgram;

/// Which side of [`split`] this is.
pub(super) enum Side {
    /// The process that called.
    Parent {
        /// The new process, as this side numbers it.
        child: u32,
    },
    /// The new process.
    Child,
}

/// Makes a process in namespaces of its own, and in the version 2 control group `cgroup` if given.
pub(super) fn split(cgroup: Option<BorrowedFd<'_>>) -> io::Result<Side> {
    // `libc` has the constant in a type it does not fit.
    const INTO_CGROUP: u64 = 0x2_0000_0000;
    let namespaces = libc::CLONE_NEWUSER
        | libc::CLONE_NEWNS
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWNET
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUTS;
    let mut flags = namespaces as u64;
    if cgroup.is_some() {
        flags |= INTO_CGROUP;
    }
    let args = libc::clone_args {
        flags,
        pidfd: 0,
        child_tid: 0,
        parent_tid: 0,
        exit_signal: libc::SIGCHLD as u64,
        stack: 0,
        stack_size: 0,
        tls: 0,
        set_tid: 0,
        set_tid_size: 0,
        cgroup: cgroup.map_or(0, |fd| fd.as_raw_fd() as u64),
    };
    // SAFETY: without CLONE_VM this is a fork: the child has its own copy of everything. The program
    // has one thread at this point, so no lock is held by a thread the child does not have.
    let answer = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of_val(&args)) };
    match answer {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Side::Child),
        pid => Ok(Side::Parent { child: pid as u32 }),
    }
}

/// Leaves a namespace for a new one of the same kind: `CLONE_NEWCGROUP` or `CLONE_NEWNS`.
pub(super) fn unshare(kind: i32) -> io::Result<()> {
    // SAFETY: takes a number, touches no memory.
    check(unsafe { libc::unshare(kind) }.into())
}

/// Shifts the owners of everything on the unattached mount `mount` by the maps of `user_ns`.
pub(super) fn shift_owners(
    mount: BorrowedFd<'_>,
    user_ns: BorrowedFd<'_>,
    read_only: bool,
) -> io::Result<()> {
    #[repr(C)]
    struct MountAttr {
        set: u64,
        clear: u64,
        propagation: u64,
        user_ns: u64,
    }
    const RDONLY: u64 = 0x1;
    const IDMAP: u64 = 0x10_0000;
    let attr = MountAttr {
        set: IDMAP | if read_only { RDONLY } else { 0 },
        clear: 0,
        propagation: 0,
        user_ns: user_ns.as_raw_fd() as u64,
    };
    // SAFETY: the path and the attributes live for the call, and the size is theirs.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attr,
            size_of_val(&attr),
        )
    })
}

/// Brings up the loopback interface of the network namespace this process is in.
pub(super) fn raise_loopback() -> io::Result<()> {
    // SAFETY: makes a descriptor, touches no memory.
    let socket = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    check(socket.into())?;
    // SAFETY: the descriptor was just made and is nobody else's.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    // SAFETY: all zeros is a valid request: an empty name and a union of plain numbers.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_name[0] = b'l' as libc::c_char;
    request.ifr_name[1] = b'o' as libc::c_char;
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: SIOCSIFFLAGS reads one `ifreq`, which lives for the call.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) }.into())
}

/// Installs a system call filter *without* `no_new_privs`, so that set-user-id programs still work.
/// The kernel allows that to whoever may administer the user namespace.
pub(super) fn install_filter(program: &BpfProgram) -> io::Result<()> {
    let length = u16::try_from(program.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let filter = libc::sock_fprog { len: length, filter: program.as_ptr().cast_mut().cast() };
    // SAFETY: the kernel copies `length` instructions, which live for the call, and writes nothing.
    // `seccompiler::sock_filter` has the layout of the kernel's.
    check(unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const filter)
    })
}

/// Keeps two descriptors, as 3 and 4 and closed on exec, and closes every other but 0, 1 and 2.
pub(super) fn keep_only(first: OwnedFd, second: OwnedFd) -> io::Result<(OwnedFd, OwnedFd)> {
    const KEPT: [RawFd; 2] = [3, 4];
    // Out of the way first, so that neither is written over.
    let [first, second] = [first, second].map(|fd| {
        // SAFETY: copies a descriptor to the lowest free number above those to be kept.
        let copy = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, KEPT[1] + 1) };
        // Its number is written over or closed below.
        std::mem::forget(fd);
        copy
    });
    for (from, to) in [first, second].into_iter().zip(KEPT) {
        check(from.into())?;
        // SAFETY: this process is about to close all it has; whatever was at `to` is closed here.
        check(unsafe { libc::dup3(from, to, libc::O_CLOEXEC) }.into())?;
    }
    // SAFETY: closes numbers. The caller passed on or leaked every owner of a descriptor above 4.
    check(unsafe { libc::syscall(libc::SYS_close_range, KEPT[1] + 1, u32::MAX, 0) })?;
    // SAFETY: both are open, and nothing else owns them.
    Ok(unsafe { (OwnedFd::from_raw_fd(KEPT[0]), OwnedFd::from_raw_fd(KEPT[1])) })
}

/// Ends this process at once, running nothing of its parent's on the way out.
pub(super) fn leave(code: i32) -> ! {
    // SAFETY: never returns.
    unsafe { libc::_exit(code) }
}

fn check(answer: i64) -> io::Result<()> {
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
