//! What tests of machines of their own need of a host.

use std::fs;
use std::path::PathBuf;

/// The variable with the directory that `./dev` unpacks a kernel's package into.
pub const TEST_KERNEL: &str = "SANDKEEP_TEST_KERNEL";

/// The kernel that machines of tests run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TestKernel {
    /// The kernel.
    pub vmlinuz: PathBuf,
    /// The directory with its modules.
    pub modules: PathBuf,
}

/// The kernel for machines of tests, on a host that has all else they need.
///
/// # Errors
///
/// Returns why tests with machines cannot run here. Say so with [`skipped`](crate::daemon::skipped).
pub fn test_kernel() -> Result<TestKernel, String> {
    if let Some(why) = crate::daemon::unfit() {
        return Err(why.to_owned());
    }
    for (program, package) in [
        ("qemu-system-x86_64", "qemu-system-x86"),
        ("mkfs.erofs", "erofs-utils"),
        ("mkfs.ext4", "e2fsprogs"),
    ] {
        if !on_path(program) {
            return Err(format!("machines need `{program}`: install {package}"));
        }
    }
    let Some(dir) = std::env::var_os(TEST_KERNEL) else {
        return Err(format!("{TEST_KERNEL} names no kernel; `./dev test` sets it"));
    };
    let dir = PathBuf::from(dir);
    let only = |place: &str, prefix: &str| {
        let entries = fs::read_dir(dir.join(place)).ok()?;
        let named = |path: &PathBuf| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix))
        };
        entries.flatten().map(|entry| entry.path()).find(named)
    };
    match (only("boot", "vmlinuz-"), only("lib/modules", "")) {
        (Some(vmlinuz), Some(modules)) => Ok(TestKernel { vmlinuz, modules }),
        _ => Err(format!("there is no kernel in `{}`", dir.display())),
    }
}

fn on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(usual).any(|place| place.join(program).is_file())
}
