//! The system calls no safe wrapper offers. All unsafe code of helpers is here.
#![allow(unsafe_code)]

use std::io;

/// Has the kernel end this process when the one that started it ends.
pub(super) fn end_with_parent() -> io::Result<()> {
    // SAFETY: sets a number, touches no memory.
    let answer = unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) };
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
