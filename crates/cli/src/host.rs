//! What a server takes up on its host besides the data directory.
//!
//! Several servers can live on one host, each with its own data directory; what lies outside it (the
//! runtime directory, the control group) carries a name derived from its path, so that a server that
//! is started again finds its own sandboxes and nobody else's.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use sandkeep_core::driver::AGENT;
use sandkeep_core::driver::container::ContainerConfig;
use sandkeep_core::driver::microvm::MicrovmConfig;
use sha2::{Digest as _, Sha256};

use crate::config::MicrovmSettings;
use crate::failure::Failure;

/// Where runtime directories lie; gone after a reboot, as the machines are.
const RUN: &str = "/run/sandkeep";

/// Writes the agent program into `bin`, under a name that says which one it is: sandboxes that an
/// older server started go on using theirs.
pub(crate) fn install_agent(bin: &Path) -> io::Result<PathBuf> {
    let path = bin.join(format!("keep-agent-{}", short_hash(AGENT)));
    if fs::read(&path).is_ok_and(|there| there == AGENT) {
        return Ok(path);
    }
    fs::DirBuilder::new().recursive(true).mode(0o755).create(bin)?;
    let fresh = bin.join(format!(".keep-agent-{}", std::process::id()));
    let mut file =
        fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o755).open(&fresh)?;
    file.write_all(AGENT)?;
    file.sync_all()?;
    // Closed before anybody runs it: a program that is open for writing cannot be executed.
    drop(file);
    fs::rename(&fresh, &path)?;
    Ok(path)
}

/// The first of the uids of hypervisors that are no machine's yet: behind all that sandboxes may have.
const SPARE_UIDS: u32 = 0xE000_0000;

/// Where the container driver of the server on `data` keeps things.
pub(crate) fn container_config(agent: PathBuf, data: &Path) -> ContainerConfig {
    let data = data.canonicalize().unwrap_or_else(|_| data.to_path_buf());
    let mark = short_hash(data.as_os_str().as_encoded_bytes());
    ContainerConfig {
        agent,
        run_dir: Path::new(RUN).join(&mark),
        cgroup_parent: format!("sandkeep-{mark}"),
    }
}

/// Where the microvm driver of the server on `data` keeps things.
pub(crate) fn microvm_config(
    agent: PathBuf,
    data: &Path,
    settings: &MicrovmSettings,
) -> MicrovmConfig {
    let container = container_config(agent, data);
    let beside = |name: &str| format!("{name}-microvm");
    MicrovmConfig {
        agent: container.agent,
        run_dir: PathBuf::from(beside(&container.run_dir.to_string_lossy())),
        cgroup_parent: beside(&container.cgroup_parent),
        cache_dir: data.join("microvm"),
        qemu: settings.qemu.clone(),
        spares: settings.spares,
        spare_uids: SPARE_UIDS,
    }
}

/// Where the kernel of machines is, which `keep microvm setup` prepares.
pub(crate) fn kernel_dir(data: &Path) -> PathBuf {
    data.join("microvm").join("kernel")
}

fn short_hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().take(6).map(|byte| format!("{byte:02x}")).collect()
}

/// Explains why root is needed, to whoever is not.
pub(crate) fn need_root(what: &str) -> Result<(), Failure> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let message = format!(
        "`{what}` needs root: the mounts, control groups and ranges of user ids that keep sandboxes apart are root's to give"
    );
    let hint = format!(
        "run `sudo {what}`; clients need no root. `keep doctor` tells what else this host lacks"
    );
    Err(Failure::here(message).with_hint(hint))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{container_config, install_agent};

    #[test]
    fn the_agent_is_written_once_and_runs() {
        let bin = tempfile::tempdir().unwrap();
        let path = install_agent(bin.path()).unwrap();
        let first = path.metadata().unwrap().modified().unwrap();
        assert_eq!(install_agent(bin.path()).unwrap(), path);
        assert_eq!(path.metadata().unwrap().modified().unwrap(), first);
        assert_eq!(bin.path().read_dir().unwrap().count(), 1);
    }

    #[test]
    fn servers_on_other_directories_have_other_names() {
        let of = |data: &str| container_config("/agent".into(), Path::new(data));
        assert_eq!(of("/a"), of("/a"));
        assert_ne!(of("/a").run_dir, of("/b").run_dir);
        assert_ne!(of("/a").cgroup_parent, of("/b").cgroup_parent);
    }
}
