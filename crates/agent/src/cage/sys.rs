//! The system calls no safe wrapper offers. All unsafe code of the cage is here.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::thread::Uid;
use seccompiler::BpfProgram;

/// Which side of [`split`] this is.
pub(crate) enum Side {
    /// The process that called.
    Parent {
        /// The new process, as this side numbers it.
        child: u32,
    },
    /// The new process.
    Child,
}

/// What a sandbox's processes have of their own.
pub(super) const NAMESPACES: i32 = libc::CLONE_NEWUSER
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS;

/// Makes a process in namespaces of its own, and in the version 2 control group `cgroup` if given.
pub(crate) fn split(namespaces: i32, cgroup: Option<BorrowedFd<'_>>) -> io::Result<Side> {
    // `libc` has the constant in a type it does not fit.
    const INTO_CGROUP: u64 = 0x2_0000_0000;
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

/// Sets the effective user id of a process of host root. Files are still opened as root.
pub(super) fn set_effective_uid(uid: Uid) -> io::Result<()> {
    rustix::thread::set_thread_res_uid(Uid::ROOT, uid, Uid::ROOT)?;
    // SAFETY: takes a number, touches no memory. Always allowed: root is the real id.
    unsafe { libc::setfsuid(Uid::ROOT.as_raw()) };
    Ok(())
}

/// Leaves a namespace for a new one of the same kind: `CLONE_NEWCGROUP` or `CLONE_NEWNS`, or `CLONE_NEWTIME` for children.
pub(crate) fn unshare(kind: i32) -> io::Result<()> {
    // SAFETY: takes a number, touches no memory.
    check(unsafe { libc::unshare(kind) }.into())
}

/// Shifts the owners of everything on the unattached mount `mount` by the maps of `user_ns`.
pub(crate) fn shift_owners(
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
pub(crate) fn raise_loopback() -> io::Result<()> {
    let socket = socket(libc::AF_INET)?;
    let mut request = request_for(c"lo");
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    ask(&socket, libc::SIOCSIFFLAGS, &raw mut request)
}

/// Turns a descriptor of `/dev/net/tun` into a device of the network namespace it was opened in.
///
/// The device stays when the descriptor is closed, and goes with the namespace, which the kernel takes down by itself. Otherwise
/// the process that closes the last copy waits 20 to 40 ms for the kernel to unregister it: the
/// daemon, or a process that it happened to start just then and that has copies of its descriptors
/// until it runs its program.
pub(super) fn make_tun(device: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
    let mut request = request_for(name);
    request.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI) as libc::c_short;
    ask(&device, libc::TUNSETIFF, &raw mut request)?;
    let stays: libc::c_ulong = 1;
    // SAFETY: the kernel takes a number here, and no memory.
    check(unsafe { libc::ioctl(device.as_raw_fd(), libc::TUNSETPERSIST, stays) }.into())
}

/// Gives a device its size of packet and its IPv4 address, brings it up with `flags`, and sends everything to it.
pub(super) fn raise_v4(
    name: &CStr,
    mtu: i32,
    address: Ipv4Addr,
    mask: Ipv4Addr,
    flags: i32,
) -> io::Result<()> {
    let socket = socket(libc::AF_INET)?;
    let mut request = request_for(name);
    request.ifr_ifru.ifru_mtu = mtu;
    ask(&socket, libc::SIOCSIFMTU, &raw mut request)?;
    request.ifr_ifru.ifru_addr = plain(address);
    ask(&socket, libc::SIOCSIFADDR, &raw mut request)?;
    request.ifr_ifru.ifru_netmask = plain(mask);
    ask(&socket, libc::SIOCSIFNETMASK, &raw mut request)?;
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING | flags) as libc::c_short;
    ask(&socket, libc::SIOCSIFFLAGS, &raw mut request)?;
    // SAFETY: all zeros is a valid route: numbers and empty addresses.
    let mut route: libc::rtentry = unsafe { std::mem::zeroed() };
    route.rt_dst = plain(Ipv4Addr::UNSPECIFIED);
    route.rt_genmask = plain(Ipv4Addr::UNSPECIFIED);
    route.rt_flags = libc::RTF_UP;
    route.rt_dev = name.as_ptr().cast_mut();
    ask(&socket, libc::SIOCADDRT, &raw mut route)
}

/// Gives a device that is up its IPv6 address, and sends everything to it.
pub(super) fn raise_v6(name: &CStr, address: Ipv6Addr, prefix: u32) -> io::Result<()> {
    #[repr(C)]
    struct Address {
        address: libc::in6_addr,
        prefix: u32,
        index: libc::c_int,
    }
    // The kernel's `in6_rtmsg`, whose fields `libc` keeps to itself.
    #[repr(C)]
    struct Route {
        destination: libc::in6_addr,
        source: libc::in6_addr,
        gateway: libc::in6_addr,
        kind: u32,
        destination_length: u16,
        source_length: u16,
        metric: u32,
        info: libc::c_ulong,
        flags: u32,
        index: libc::c_int,
    }
    let socket = socket(libc::AF_INET6)?;
    // SAFETY: the name lives for the call.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    if index == 0 {
        return Err(io::Error::last_os_error());
    }
    let to = |address: Ipv6Addr| libc::in6_addr { s6_addr: address.octets() };
    let mut given = Address { address: to(address), prefix, index: index as libc::c_int };
    ask(&socket, libc::SIOCSIFADDR, &raw mut given)?;
    let nowhere = to(Ipv6Addr::UNSPECIFIED);
    let mut route = Route {
        destination: nowhere,
        source: nowhere,
        gateway: nowhere,
        kind: 0,
        destination_length: 0,
        source_length: 0,
        metric: 1,
        info: 0,
        flags: libc::RTF_UP.into(),
        index: index as libc::c_int,
    };
    ask(&socket, libc::SIOCADDRT, &raw mut route)
}

pub(crate) fn socket(family: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: makes a descriptor, touches no memory.
    let socket = unsafe { libc::socket(family, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    check(socket.into())?;
    // SAFETY: the descriptor was just made and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(socket) })
}

/// A request about a device. Its name is shorter than a request's room for it.
pub(crate) fn request_for(name: &CStr) -> libc::ifreq {
    // SAFETY: all zeros is a valid request: an empty name and a union of plain numbers.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (place, byte) in request.ifr_name.iter_mut().zip(name.to_bytes()) {
        *place = *byte as libc::c_char;
    }
    request
}

fn plain(address: Ipv4Addr) -> libc::sockaddr {
    let [a, b, c, d] = address.octets();
    let mut data = [0; 14];
    // The port comes first.
    for (place, byte) in data[2..6].iter_mut().zip([a, b, c, d]) {
        *place = byte as libc::c_char;
    }
    libc::sockaddr { sa_family: libc::AF_INET as libc::sa_family_t, sa_data: data }
}

pub(crate) fn ask<T>(to: &impl AsRawFd, what: libc::Ioctl, request: *mut T) -> io::Result<()> {
    // SAFETY: `request` is what the kernel reads and writes for `what`, as the callers here pair them, and
    // lives for the call.
    check(unsafe { libc::ioctl(to.as_raw_fd(), what, request) }.into())
}

/// Installs a system call filter *without* `no_new_privs`, so that set-user-id programs still work.
/// The kernel allows that to processes that may administer the user namespace.
pub(crate) fn install_filter(program: &BpfProgram) -> io::Result<()> {
    let length = u16::try_from(program.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let filter = libc::sock_fprog { len: length, filter: program.as_ptr().cast_mut().cast() };
    // SAFETY: the kernel copies `length` instructions, which live for the call, and writes nothing.
    // `seccompiler::sock_filter` has the layout of the kernel's.
    check(unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const filter)
    })
}

/// Keeps these descriptors, from 3 on and closed on exec, and closes every other but 0, 1 and 2.
pub(super) fn keep_only<const N: usize>(kept: [OwnedFd; N]) -> io::Result<[OwnedFd; N]> {
    const FIRST: RawFd = 3;
    let beyond = FIRST + N as RawFd;
    // Out of the way first, so that none is written over.
    let copies = kept.map(|fd| {
        // SAFETY: copies a descriptor to the lowest free number above those to be kept.
        let copy = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, beyond) };
        // Its number is written over or closed below.
        std::mem::forget(fd);
        copy
    });
    let mut places = [0; N];
    for ((from, place), to) in copies.into_iter().zip(&mut places).zip(FIRST..) {
        check(from.into())?;
        // SAFETY: this process is about to close all it has; whatever was at `to` is closed here.
        check(unsafe { libc::dup3(from, to, libc::O_CLOEXEC) }.into())?;
        *place = to;
    }
    // SAFETY: closes numbers. The caller passed on or leaked every owner of a descriptor beyond.
    check(unsafe { libc::syscall(libc::SYS_close_range, beyond, u32::MAX, 0) })?;
    // SAFETY: all are open, and nothing else owns them.
    Ok(places.map(|place| unsafe { OwnedFd::from_raw_fd(place) }))
}

/// Ends this process at once, running nothing of its parent's on the way out.
pub(crate) fn leave(code: i32) -> ! {
    // SAFETY: never returns.
    unsafe { libc::_exit(code) }
}

pub(crate) fn check(answer: i64) -> io::Result<()> {
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
