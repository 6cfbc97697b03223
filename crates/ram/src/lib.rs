//! `ram.so`: loaded into a hypervisor before anything else, it decides what the machine's RAM is.
//!
//! The hypervisor believes that RAM is a shared mapping of a file, the *placeholder*, and so leaves RAM out of what it saves.
//! Its call of `mmap` is answered with private memory: anonymous, and where a map says so, pieces of page files that are copied
//! when they are written to. `docs/MICROVM.md` says why, `docs/formats/memory.md` what a map looks
//! like.
//!
//! Its environment configures it:
//!
//! - `SANDKEEP_RAM`: the placeholder's path; `/ram` if absent.
//! - `SANDKEEP_RAM_MAP`: the descriptor of a map; if absent, all RAM is empty. It and the page files are closed after use.
//! - `SANDKEEP_RAM_PAGES`: the descriptor of the map's first file; the others have the next ones.
//! - `SANDKEEP_RAM_LATER`: the descriptor of a socket that a map will come over, see `later`.
//! - `SANDKEEP_RAM_AT`: a descriptor that the address is written to, as 16 hexadecimal digits.
//!
//! A machine must never run on other memory than its map names: every failure ends the process,
//! with a line on its standard error. Nothing here allocates, and all other calls of `mmap` go
//! straight to the kernel.

mod later;
mod map;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use libc::{off_t, size_t};

/// Whether RAM is mapped: it is, once.
static DONE: AtomicBool = AtomicBool::new(false);

/// Where it is, and where it ends.
static RAM: [AtomicUsize; 2] = [AtomicUsize::new(0), AtomicUsize::new(0)];

const FAILED: *mut c_void = libc::MAP_FAILED;

/// The C library's `mmap`, but for the placeholder.
///
/// # Safety
///
/// As the C library's.
#[cfg(not(test))]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    address: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    file: c_int,
    offset: off_t,
) -> *mut c_void {
    // SAFETY: what the caller vouches for is passed on.
    unsafe { either(address, length, protection, flags, file, offset) }
}

/// The same, by the name that programs use which were built for large files.
///
/// # Safety
///
/// As the C library's.
#[cfg(not(test))]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    address: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    file: c_int,
    offset: off_t,
) -> *mut c_void {
    // SAFETY: what the caller vouches for is passed on.
    unsafe { either(address, length, protection, flags, file, offset) }
}

/// The C library's `madvise`, but for a wish to have RAM in large pages: each page that a machine writes is to be one of its own.
///
/// # Safety
///
/// As the C library's.
#[cfg(not(test))]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(address: *mut c_void, length: size_t, advice: c_int) -> c_int {
    let [start, end] = &RAM;
    let ram = start.load(Ordering::Relaxed)..end.load(Ordering::Relaxed);
    if advice == libc::MADV_HUGEPAGE && ram.contains(&(address as usize)) {
        return 0;
    }
    // SAFETY: the caller's own request; what it answers is an int.
    unsafe { libc::syscall(libc::SYS_madvise, address, length, advice as libc::c_long) as c_int }
}

#[cfg_attr(test, allow(dead_code))]
unsafe fn either(
    address: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    file: c_int,
    offset: off_t,
) -> *mut c_void {
    let shared = matches!(flags & libc::MAP_TYPE, libc::MAP_SHARED | libc::MAP_SHARED_VALIDATE);
    if file < 0 || !shared || flags & libc::MAP_ANONYMOUS != 0 || !is_placeholder(file) {
        // SAFETY: the caller's own request.
        return unsafe { kernel(address, length, protection, flags, file, offset) };
    }
    if offset != 0 || DONE.swap(true, Ordering::SeqCst) {
        fail("RAM is asked for in pieces", 0);
    }
    // SAFETY: the caller asked for a mapping of this length at this place, if at any.
    let ram = unsafe { private(address, length, protection, flags & libc::MAP_FIXED) };
    if ram == FAILED {
        fail("RAM cannot be mapped", errno());
    }
    RAM[0].store(ram as usize, Ordering::Relaxed);
    RAM[1].store(ram as usize + length, Ordering::Relaxed);
    if let Some(map) = descriptor(c"SANDKEEP_RAM_MAP") {
        let first = descriptor(c"SANDKEEP_RAM_PAGES").unwrap_or(map + 1);
        map::apply(map, map::Given::From(first), ram, length, protection);
    }
    if let Some(descriptor) = descriptor(c"SANDKEEP_RAM_AT") {
        tell(descriptor, ram as u64);
    }
    if let Some(socket) = descriptor(c"SANDKEEP_RAM_LATER") {
        later::expect(socket, ram, length, protection);
    }
    ram
}

/// Maps anonymous memory that is neither promised nor merged into large pages: each page that a machine writes is one of its own.
unsafe fn private(
    address: *mut c_void,
    length: size_t,
    protection: c_int,
    fixed: c_int,
) -> *mut c_void {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | fixed;
    // SAFETY: as the caller's request, with other flags.
    let ram = unsafe { kernel(address, length, protection, flags, -1, 0) };
    if ram != FAILED {
        // SAFETY: the range was mapped just now. A kernel without large pages returns an error,
        // which is ignored: there is nothing to disable.
        unsafe { libc::syscall(libc::SYS_madvise, ram, length, libc::MADV_NOHUGEPAGE) };
    }
    ram
}

unsafe fn kernel(
    address: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    file: c_int,
    offset: off_t,
) -> *mut c_void {
    // SAFETY: a plain system call, with what the caller gave; every argument is as wide as a register.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mmap,
            address,
            length,
            protection as libc::c_long,
            flags as libc::c_long,
            file as libc::c_long,
            offset,
        )
    };
    result as *mut c_void
}

/// Whether a descriptor is the placeholder. There may be no /proc to ask for its name.
fn is_placeholder(file: c_int) -> bool {
    let path = variable(c"SANDKEEP_RAM").unwrap_or(c"/ram");
    let Some(there) = status(|into| {
        // SAFETY: the path ends with a NUL, and there is room for the result.
        unsafe { libc::stat(path.as_ptr(), into) }
    }) else {
        return false;
    };
    status_of(file).is_some_and(|here| (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino))
}

fn status_of(file: c_int) -> Option<libc::stat> {
    // SAFETY: there is room for the result; a bad descriptor is answered with an error.
    status(|into| unsafe { libc::fstat(file, into) })
}

fn status(call: impl FnOnce(*mut libc::stat) -> c_int) -> Option<libc::stat> {
    let mut found = std::mem::MaybeUninit::<libc::stat>::uninit();
    if call(found.as_mut_ptr()) != 0 {
        return None;
    }
    // SAFETY: the kernel filled it in.
    Some(unsafe { found.assume_init() })
}

fn variable(name: &CStr) -> Option<&'static CStr> {
    // SAFETY: the name ends with a NUL; nothing changes the environment of a hypervisor while it
    // maps RAM.
    let value: *const c_char = unsafe { libc::getenv(name.as_ptr()) };
    if value.is_null() {
        return None;
    }
    // SAFETY: a string of the environment ends with a NUL.
    Some(unsafe { CStr::from_ptr(value) })
}

/// The descriptor that a variable names.
fn descriptor(name: &CStr) -> Option<c_int> {
    let text = variable(name)?;
    match text.to_str().ok().and_then(|text| text.parse().ok()) {
        Some(number) if number >= 0 => Some(number),
        _ => fail("a variable names no descriptor", 0),
    }
}

fn tell(descriptor: c_int, address: u64) {
    let mut text = [0u8; 16];
    for (place, digit) in text.iter_mut().enumerate() {
        *digit = b"0123456789abcdef"[(address >> (60 - 4 * place)) as usize & 15];
    }
    // SAFETY: the bytes live as long as the call takes.
    let written = unsafe { libc::pwrite(descriptor, text.as_ptr().cast(), text.len(), 0) };
    if written != text.len() as isize {
        fail("the place of RAM cannot be told", errno());
    }
}

pub(crate) fn errno() -> c_int {
    // SAFETY: the C library's own, for this thread.
    unsafe { *libc::__errno_location() }
}

/// Ends the process: a machine must not run on wrong memory.
pub(crate) fn fail(reason: &str, error: c_int) -> ! {
    let mut number = [0u8; 10];
    let (mut rest, mut start) = (error.unsigned_abs(), number.len());
    while start > 0 && (rest > 0 || start == number.len()) {
        start -= 1;
        number[start] = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    let parts: [&[u8]; 5] = [b"ram.so: ", reason.as_bytes(), b" (error ", &number[start..], b")\n"];
    for part in parts {
        // SAFETY: the bytes live as long as the call takes; where nothing listens nothing is lost.
        unsafe { libc::write(2, part.as_ptr().cast(), part.len()) };
    }
    // SAFETY: it does not return.
    unsafe { libc::abort() }
}
