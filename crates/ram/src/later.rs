//! RAM that is decided on when the hypervisor has started already.
//!
//! A thread waits at a socket for one message: a byte, and with it the descriptors of a map and of the map's files, in their order.
//! It empties RAM, applies the map and answers with a byte. The machine is suspended until then:
//! the sender of the map has not resumed it yet. A second byte says that the hypervisor is on
//! record as a machine's.
//!
//! If the other end is closed before that, the process ends: a hypervisor must not wait for a
//! daemon which is gone.

use std::ffi::{c_int, c_void};
use std::mem::{MaybeUninit, size_of};
use std::sync::Mutex;

use crate::map::{self, FILES, Given};
use crate::{FAILED, errno, fail, private};

/// A map, and its files.
const DESCRIPTORS: usize = 1 + FILES;
/// Room for them in a message, and for its head.
const CONTROL: usize = 64 + DESCRIPTORS * size_of::<c_int>();

#[derive(Clone, Copy)]
struct Expected {
    socket: c_int,
    ram: usize,
    length: usize,
    protection: c_int,
}

static EXPECTED: Mutex<Option<Expected>> = Mutex::new(None);

/// Starts waiting.
pub(crate) fn expect(socket: c_int, ram: *mut c_void, length: usize, protection: c_int) {
    let expected = Expected { socket, ram: ram as usize, length, protection };
    if let Ok(mut place) = EXPECTED.lock() {
        *place = Some(expected);
    }
    let mut thread = MaybeUninit::uninit();
    let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: the sets are filled in before they are read. The hypervisor's signals are for its own threads: a thread begins with what is
    // blocked where it is made.
    let made = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        let made =
            libc::pthread_create(thread.as_mut_ptr(), std::ptr::null(), wait, std::ptr::null_mut());
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut());
        made
    };
    if made != 0 {
        fail("nobody can wait for the map of RAM", made);
    }
}

extern "C" fn wait(_: *mut c_void) -> *mut c_void {
    let expected = EXPECTED.lock().ok().and_then(|mut place| place.take());
    let Some(Expected { socket, ram, length, protection }) = expected else {
        fail("no map of RAM is expected", 0);
    };
    let mut given = [0; DESCRIPTORS];
    let count = receive(socket, &mut given);
    let Some((map, files)) = given[..count].split_first() else {
        fail("the map of RAM came without descriptors", 0);
    };
    let ram = ram as *mut c_void;
    // SAFETY: this is RAM, from its beginning to its end, and no processor of the machine runs.
    let emptied = unsafe { private(ram, length, protection, libc::MAP_FIXED) };
    if emptied == FAILED {
        fail("RAM cannot be mapped", errno());
    }
    map::apply(*map, Given::These(files), ram, length, protection);
    let mut byte = [1_u8];
    // SAFETY: the byte lives as long as the calls take; nothing else has the descriptor.
    unsafe {
        libc::write(socket, byte.as_ptr().cast(), 1);
        loop {
            match libc::read(socket, byte.as_mut_ptr().cast(), 1) {
                1 => break,
                -1 if errno() == libc::EINTR => {}
                _ => libc::_exit(0),
            }
        }
        libc::close(socket);
    }
    std::ptr::null_mut()
}

/// Takes descriptors from the one message, and says how many there were.
fn receive(socket: c_int, given: &mut [c_int; DESCRIPTORS]) -> usize {
    let mut byte = [0_u8; 1];
    let mut part = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    // Aligned as the head of a control message wants to be.
    let mut control = [0_u64; CONTROL.div_ceil(8)];
    // SAFETY: all zeros are a message without anything.
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of::<[u64; CONTROL.div_ceil(8)]>();
    let got = loop {
        // SAFETY: the message points to what lives as long as the call takes.
        let got = unsafe { libc::recvmsg(socket, &raw mut message, libc::MSG_CMSG_CLOEXEC) };
        if got >= 0 || errno() != libc::EINTR {
            break got;
        }
    };
    if got == 0 {
        // SAFETY: it does not return, and runs nothing of the hypervisor's.
        unsafe { libc::_exit(0) }
    }
    if got < 0 || message.msg_flags & libc::MSG_CTRUNC != 0 {
        fail("the map of RAM did not arrive", errno());
    }
    // SAFETY: the kernel filled the message in.
    let head = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    if head.is_null() {
        return 0;
    }
    // SAFETY: it is one that the kernel wrote, with as many descriptors behind it as it says.
    unsafe {
        let ours = (*head).cmsg_level == libc::SOL_SOCKET && (*head).cmsg_type == libc::SCM_RIGHTS;
        let bytes = (*head).cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
        let count = if ours { (bytes / size_of::<c_int>()).min(DESCRIPTORS) } else { 0 };
        let from = libc::CMSG_DATA(head).cast::<c_int>();
        for (place, descriptor) in given[..count].iter_mut().enumerate() {
            *descriptor = from.add(place).read_unaligned();
        }
        count
    }
}
