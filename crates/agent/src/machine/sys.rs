//! The system calls no safe wrapper offers. All unsafe code of machines is here.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use zeroize::Zeroize as _;

pub(super) use crate::cage::sys::raise_loopback;
use crate::cage::sys::{ask, check, request_for, socket};

const FIFREEZE: libc::Ioctl = 0xc004_5877_u32 as libc::Ioctl;
const FITHAW: libc::Ioctl = 0xc004_5878_u32 as libc::Ioctl;
const BLKFLSBUF: libc::Ioctl = 0x1261;
const RNDADDENTROPY: libc::Ioctl = 0x4008_5203;
const RNDRESEEDCRNG: libc::Ioctl = 0x5207;

/// How much randomness is taken in at most.
const POOL: usize = 128;

/// Writes all of a filesystem to its disk and holds back who writes more.
pub(super) fn freeze(directory: &OwnedFd) -> io::Result<()> {
    bare(directory, FIFREEZE)
}

/// Ends that.
pub(super) fn thaw(directory: &OwnedFd) -> io::Result<()> {
    bare(directory, FITHAW)
}

/// Drops the cache of an unused block device.
pub(super) fn forget_cached(device: &OwnedFd) -> io::Result<()> {
    bare(device, BLKFLSBUF)
}

fn bare(to: &OwnedFd, what: libc::Ioctl) -> io::Result<()> {
    // SAFETY: these take no argument.
    check(unsafe { libc::ioctl(to.as_raw_fd(), what, 0) }.into())
}

/// Mixes `bytes` into the kernel's randomness, as worth `bits`, and uses them from now on.
pub(super) fn add_entropy(random: &OwnedFd, bytes: &[u8], bits: usize) -> io::Result<()> {
    #[repr(C)]
    struct Pool {
        bits: libc::c_int,
        size: libc::c_int,
        bytes: [u8; POOL],
    }
    let mut pool = Pool { bits: 0, size: 0, bytes: [0; POOL] };
    let size = bytes.len().min(POOL);
    pool.bits = bits.min(size * 8) as libc::c_int;
    pool.size = size as libc::c_int;
    for (to, from) in pool.bytes.iter_mut().zip(bytes) {
        *to = *from;
    }
    ask(random, RNDADDENTROPY, &raw mut pool)?;
    pool.bytes.zeroize();
    bare(random, RNDRESEEDCRNG)
}

/// Sets the time.
pub(super) fn set_clock(unix_ns: u64) -> io::Result<()> {
    let time = libc::timespec {
        tv_sec: (unix_ns / 1_000_000_000) as libc::time_t,
        tv_nsec: (unix_ns % 1_000_000_000) as libc::c_long,
    };
    // SAFETY: the time lives for the call.
    check(unsafe { libc::clock_settime(libc::CLOCK_REALTIME, &raw const time) }.into())
}

/// Gives an Ethernet device its address.
pub(super) fn set_address(name: &CStr, mac: [u8; 6]) -> io::Result<()> {
    let socket = socket(libc::AF_INET)?;
    let mut request = request_for(name);
    let mut data = [0; 14];
    for (to, from) in data.iter_mut().zip(mac) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_hwaddr = libc::sockaddr { sa_family: libc::ARPHRD_ETHER, sa_data: data };
    ask(&socket, libc::SIOCSIFHWADDR, &raw mut request)
}

/// Gives this thread a current directory of its own.
pub(super) fn own_directory() -> io::Result<()> {
    crate::cage::sys::unshare(libc::CLONE_FS)
}
