//! The least a sandbox can cost: new namespaces, an overlay, `pivot_root`, one program.
//!
//! `yardstick <lower> <scratch> <program>` does it once and prints the microseconds it took until
//! the program had ended. No limits, no filter, no mapping of owners, nothing kept: the benchmark
//! puts it beside what we do.

#![allow(unsafe_code)] // fork and unshare, and nothing else

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::Instant;

use rustix::fs::CWD;
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<_> = std::env::args_os().skip(1).collect();
    let [lower, scratch, program] = args.as_slice() else {
        return Err("usage: yardstick <lower> <scratch> <program>".into());
    };
    let scratch = Path::new(scratch);
    let program = CString::new(program.as_bytes())?;
    let began = Instant::now();
    let (upper, work, root) = (scratch.join("upper"), scratch.join("work"), scratch.join("root"));
    for dir in [&upper, &work, &root] {
        std::fs::create_dir_all(dir)?;
    }
    let options = CString::new(format!(
        "lowerdir={},upperdir={},workdir={}",
        Path::new(lower).display(),
        upper.display(),
        work.display()
    ))?;
    let namespaces = libc::CLONE_NEWNS
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWNET
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUTS;
    // SAFETY: this process has one thread and holds no locks; unshare takes only flags.
    if unsafe { libc::unshare(namespaces) } != 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    // SAFETY: one thread, so the child may do whatever the parent could.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let entered = enter(&root, &options);
        if entered.is_ok() {
            let argv = [program.as_ptr(), std::ptr::null()];
            // SAFETY: both arrays end with a null pointer and outlive the call.
            unsafe { libc::execv(program.as_ptr(), argv.as_ptr()) };
        }
        // SAFETY: ends the child without running what belongs to the parent.
        unsafe { libc::_exit(127) };
    }
    let mut status = 0;
    // SAFETY: waits for our own child; the pointer is to a local.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    if status != 0 {
        return Err(format!("the program ended with status {status}").into());
    }
    use std::io::Write as _;
    writeln!(std::io::stdout(), "{}", began.elapsed().as_micros())?;
    Ok(())
}

fn enter(root: &Path, options: &CString) -> rustix::io::Result<()> {
    rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    rustix::mount::mount("overlay", root, "overlay", MountFlags::empty(), options.as_c_str())?;
    rustix::process::chdir(root)?;
    rustix::process::pivot_root(".", ".")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH)?;
    rustix::fs::accessat(CWD, "/", rustix::fs::Access::EXISTS, rustix::fs::AtFlags::empty())
}
