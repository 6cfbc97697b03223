//! The sandbox's network device, and its name resolution.
//!
//! The device is a TUN made in the new network namespace while the host's `/dev/net/tun` can still be opened. The
//! packets are the daemon's business: the first process holds the descriptor, hands a copy to every
//! peer that connects to `net.sock` (only the host's root can), and never reads from it. So the
//! device outlives a daemon, and the next one gets it again.
//!
//! All sandboxes have the same addresses: each has a stack of its own in the daemon. `docs/NETWORK.md` says which.
//!
//! Names are looked up where `/etc/resolv.conf` says. The base layer has one, for images that bring none. One that an
//! image or an earlier session left is covered by a file in memory, mounted over it, so that it stays what it is in the
//! layers. Where it is a link into `/run`, which is empty in every sandbox, the file is put there. Paths are looked up
//! like a drive's: no link on the way is followed.

use std::ffi::CStr;
use std::fs;
use std::io::{self, IoSlice};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Component, Path};

use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::mount::{MoveMountFlags, OpenTreeFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use sandkeep_proto::cage::TUN;

use super::{Step, StepError, sys};

const DEVICE: &CStr = c"eth0";
const MTU: i32 = 65_520;
const V4: Ipv4Addr = Ipv4Addr::new(100, 96, 0, 2);
const V4_MASK: Ipv4Addr = Ipv4Addr::new(255, 255, 255, 252);
const V6: Ipv6Addr = Ipv6Addr::new(0xfd73, 0x616e, 0x646b, 0, 0, 0, 0, 2);

/// What `/etc/resolv.conf` says.
pub(crate) const RESOLV: &str = "nameserver 100.96.0.1\noptions timeout:5 attempts:2\n";
/// Where the covering file is, below `/run`.
const COVER: &str = "sandkeep/resolv.conf";

/// Makes the device in the network namespace this process is in.
pub(super) fn make_device() -> Result<OwnedFd, StepError> {
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let device = rustix::fs::open("/dev/net/tun", flags, Mode::empty()).step(TUN)?;
    sys::make_tun(device.as_fd(), DEVICE).step("make the network device")?;
    sys::raise_v4(DEVICE, MTU, V4, V4_MASK, 0).step("raise the network device")?;
    raise_v6(DEVICE)?;
    Ok(device)
}

fn raise_v6(device: &CStr) -> Result<(), StepError> {
    match sys::raise_v6(device, V6, 64) {
        Ok(()) => Ok(()),
        // A kernel that was booted without IPv6, or has it switched off for new namespaces.
        Err(error) if no_v6(&error) => Ok(()),
        Err(error) => Err(StepError::new("raise the network device for IPv6", error)),
    }
}

/// Brings up a network card with the addresses that every sandbox has. It does not look up
/// neighbours: all packets go to the one at the other end.
pub(crate) fn raise_ethernet(device: &CStr) -> Result<(), StepError> {
    let step = "raise the network device";
    let mut raised = Ok(());
    for mtu in [MTU, 9000, 1500] {
        raised = sys::raise_v4(device, mtu, V4, V4_MASK, libc::IFF_NOARP);
        // A card that takes no packets of that size.
        if !matches!(&raised, Err(error) if error.raw_os_error() == Some(libc::EINVAL)) {
            break;
        }
    }
    raised.step(step)?;
    raise_v6(device)
}

fn no_v6(error: &io::Error) -> bool {
    let codes =
        [libc::EAFNOSUPPORT, libc::EOPNOTSUPP, libc::ENOPROTOOPT, libc::EACCES, libc::EPERM];
    error.raw_os_error().is_some_and(|code| codes.contains(&code))
}

/// Lets everybody inside send echo requests and listen on low ports: there is nothing to protect
/// from that. Not every kernel has these; without them root still can.
pub(crate) fn relax() {
    let _ = fs::write("/proc/sys/net/ipv4/ping_group_range", "0 65535");
    let _ = fs::write("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0");
}

/// Hands the device to a connected peer.
pub(crate) fn hand_over(device: BorrowedFd<'_>, to: &UnixStream) -> io::Result<()> {
    let descriptors = [device];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    rustix::net::sendmsg(to, &[IoSlice::new(b"n")], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Listens where the device is handed over; see [`super::listen`].
pub(super) fn listen() -> Result<UnixListener, StepError> {
    UnixListener::bind(sandkeep_proto::cage::NETWORK_SOCKET).step("listen on the network's socket")
}

/// Makes sure that names are looked up at the gateway. Expects the sandbox's root as the current
/// directory, with `/run` mounted and empty.
pub(crate) fn cover_resolv_conf() -> Result<(), StepError> {
    let step = "cover /etc/resolv.conf";
    rustix::fs::mkdir("run/sandkeep", Mode::from_raw_mode(0o755)).step(step)?;
    let cover = Path::new("run").join(COVER);
    fs::write(&cover, RESOLV).step(step)?;
    match find(Path::new("etc/resolv.conf"))? {
        ResolvConf::File(file) => {
            // The base layer's shows through, most likely. What was found without a link is read by its name.
            if fs::read("etc/resolv.conf").is_ok_and(|text| text == RESOLV.as_bytes()) {
                return Ok(());
            }
            let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
            let copy = rustix::mount::open_tree(CWD, &cover, flags).step(step)?;
            attach(&copy, &file)
        }
        ResolvConf::LinkInto(run) => {
            if let Some(parent) = run.parent() {
                fs::create_dir_all(parent).step(step)?;
            }
            fs::write(&run, RESOLV).step(step)
        }
        ResolvConf::Other => Ok(()),
    }
}

/// Whether a line of a machine's table of mounts is the cover that is mounted in its root.
pub(super) fn is_cover(root_of_mount: &[u8]) -> bool {
    root_of_mount.strip_prefix(b"/").is_some_and(|path| path == COVER.as_bytes())
}

/// Puts a copy of the cover over the `etc/resolv.conf` of the root that is the current directory.
pub(super) fn cover_again(copy: &OwnedFd) -> Result<(), StepError> {
    match find(Path::new("etc/resolv.conf"))? {
        ResolvConf::File(file) => attach(copy, &file),
        ResolvConf::LinkInto(_) | ResolvConf::Other => Ok(()),
    }
}

fn attach(copy: &OwnedFd, file: &OwnedFd) -> Result<(), StepError> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    rustix::mount::move_mount(copy, "", file, "", flags).step("cover /etc/resolv.conf")
}

enum ResolvConf {
    /// A plain file, reached without a link.
    File(OwnedFd),
    /// A link to this path, which is in `/run`; relative to the root.
    LinkInto(std::path::PathBuf),
    /// Nothing, or something to leave alone.
    Other,
}

fn find(path: &Path) -> Result<ResolvConf, StepError> {
    let step = "find /etc/resolv.conf";
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut here = rustix::fs::open(".", flags | OFlags::DIRECTORY, Mode::empty()).step(step)?;
    for name in path.iter() {
        match rustix::fs::openat(&here, name, flags, Mode::empty()) {
            Ok(next) => here = next,
            Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => {
                return Ok(ResolvConf::Other);
            }
            Err(error) => return Err(StepError::new(step, error)),
        }
    }
    let kind = FileType::from_raw_mode(rustix::fs::fstat(&here).step(step)?.st_mode);
    Ok(match kind {
        FileType::RegularFile => ResolvConf::File(here),
        FileType::Symlink => {
            let target = rustix::fs::readlinkat(&here, "", Vec::new()).step(step)?;
            into_run(Path::new(std::ffi::OsStr::from_bytes(target.as_bytes())))
        }
        _ => ResolvConf::Other,
    })
}

/// Where in `/run` a link from `/etc` leads, if it leads there by plain names.
fn into_run(target: &Path) -> ResolvConf {
    let absolute = Path::new("/etc").join(target);
    let mut names = Vec::new();
    for part in absolute.components() {
        match part {
            Component::Normal(name) => names.push(name),
            Component::ParentDir => {
                names.pop();
            }
            Component::RootDir | Component::CurDir => {}
            Component::Prefix(_) => return ResolvConf::Other,
        }
    }
    // Everywhere `/var/run` is a link to `/run`.
    let names = match names.as_slice() {
        [var, rest @ ..] if *var == "var" => rest,
        all => all,
    };
    match names {
        [run, _, ..] if *run == "run" => ResolvConf::LinkInto(names.iter().collect()),
        _ => ResolvConf::Other,
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::{ResolvConf, into_run, is_cover};

    #[test]
    fn links_into_run_are_told_from_others() {
        for (target, place) in [
            ("/run/systemd/resolve/stub-resolv.conf", "run/systemd/resolve/stub-resolv.conf"),
            ("../run/resolvconf/resolv.conf", "run/resolvconf/resolv.conf"),
            ("../../var/run/x", "run/x"),
        ] {
            match into_run(Path::new(target)) {
                ResolvConf::LinkInto(path) => assert_eq!(path, PathBuf::from(place)),
                ResolvConf::File(_) | ResolvConf::Other => panic!("{target}"),
            }
        }
        for target in ["/proc/x", "resolv.conf.d/x", "/run", "/", ""] {
            assert!(matches!(into_run(Path::new(target)), ResolvConf::Other), "{target}");
        }
        assert!(is_cover(b"/sandkeep/resolv.conf"));
        assert!(!is_cover(b"/") && !is_cover(b"/other/resolv.conf"));
    }
}
