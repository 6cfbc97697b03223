//! The one system call no safe wrapper offers.
#![allow(unsafe_code)]

use std::io;

/// Closes every descriptor but the standard three: what the caller had open was the caller's.
pub(super) fn close_all_but_standard() -> io::Result<()> {
    // SAFETY: nothing in this program holds a descriptor from here on, other than the standard ones.
    match unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_int::MAX, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
