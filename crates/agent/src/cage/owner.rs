//! The user that creates, and so owns, the user namespace of a sandbox.
//!
//! The kernel charges some resources twice: to the user inside the namespace, and to the user who created the namespace. If host root
//! created all of them, every sandbox would draw from the one allowance of host root, and a single one could use it up:
//!
//! | resource | limit of the creator |
//! |---|---|
//! | inotify instances and watches | `fs.inotify.max_user_instances` (128 by default), `max_user_watches` |
//! | POSIX message queues | `RLIMIT_MSGQUEUE` (800 KiB by default) |
//! | queued signals, locked shared memory | `RLIMIT_SIGPENDING`, `RLIMIT_MEMLOCK` |
//!
//! A limit in the new namespace (`user.max_inotify_instances`) is no remedy: it holds for each of the 65,536 users inside. So the builder
//! creates each namespace as a user of its own, drawn at random, as which no process ever runs. Then the limits above hold per sandbox.
//!
//! Only the effective id changes, and only while the namespaces are made. File access stays that of host root, on both sides: the
//! first process still needs it, until it becomes root of the namespace. An owner has all capabilities over its namespace, but
//! only from outside of it; inside, ids are those of the sandbox's range.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::thread::Uid;

use super::sys::{self, Side};

/// The first of the ids, and a mask of how many there are. Helpers have ids below, and no sandbox has such high ones by default.
const FIRST: u32 = 0xF200_0000;
const MASK: u32 = 0x00FF_FFFF;

/// Makes a process in namespaces of its own, as [`sys::split`] does, that belong to a user of their own.
pub(super) fn split_as_owner(namespaces: i32, cgroup: Option<BorrowedFd<'_>>) -> io::Result<Side> {
    let mut random = [0; 4];
    crate::serve::random(&mut random)?;
    let owner = FIRST | (u32::from_ne_bytes(random) & MASK);
    match sys::set_effective_uid(Uid::from_raw(owner)) {
        Ok(()) => {}
        // The daemon is itself in a user namespace, and this one does not know the id: host root's limits do not apply to it.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            return sys::split(namespaces, cgroup);
        }
        Err(error) => return Err(error),
    }
    let split = sys::split(namespaces, cgroup);
    if !matches!(split, Ok(Side::Child)) {
        sys::set_effective_uid(Uid::ROOT)?;
    }
    split
}
