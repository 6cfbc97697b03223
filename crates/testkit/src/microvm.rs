//! A kernel that machines of tests can be started with, as `keep microvm setup` leaves one.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use sandkeep_core::driver::microvm::kernel::{self, Kernel};
use sandkeep_core::embedded::AGENT;
use tempfile::TempDir;

use crate::machine::test_kernel;

/// A kernel with the agent of this build, in a directory of its own.
#[derive(Debug)]
pub struct Prepared {
    /// The kernel.
    pub kernel: Kernel,
    /// The frequency of this host's time stamp counter, which an emulated machine must get:
    /// `tsc_early_khz`.
    pub tsc_khz: u64,
    // Removed with this.
    _dir: TempDir,
}

/// Prepares the kernel for machines of tests.
///
/// # Errors
///
/// Returns what this host lacks.
pub fn kernel() -> Result<Prepared, String> {
    let found = test_kernel()?;
    let dir = tempfile::Builder::new().prefix("keep-kernel-").tempdir();
    let dir = dir.map_err(|error| error.to_string())?;
    let kernel = kernel::prepare(&found.vmlinuz, &found.modules, &AGENT.bytes(), dir.path());
    let kernel = kernel.map_err(|error| error.to_string())?;
    Ok(Prepared { kernel, tsc_khz: tsc_khz(dir.path())?, _dir: dir })
}

fn tsc_khz(dir: &Path) -> Result<u64, String> {
    let agent = dir.join("keep-agent");
    fs::write(&agent, AGENT.bytes()).map_err(|error| error.to_string())?;
    fs::set_permissions(&agent, PermissionsExt::from_mode(0o755))
        .map_err(|error| error.to_string())?;
    let said = Command::new(&agent).arg("tsc").output().map_err(|error| error.to_string())?;
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    said.trim().parse().map_err(|_| "this host's time stamp counter cannot be measured".to_owned())
}
