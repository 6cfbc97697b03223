//! Finds what this host can and cannot do, by doing it.
//!
//! A kernel's version says little: distributions switch features off, backport them, or lack them
//! on one filesystem. So a small machine is started on the data directory's own filesystem, and the
//! step at which that fails shows what is missing. `keep doctor` shows the result.

use std::fs;
use std::path::Path;
use std::process::id;

use sandkeep_proto::cage::TUN;

use super::{ContainerConfig, ContainerDriver, Driver, DriverError, DriverResult, NAME};
use crate::driver::host::failed;
use crate::driver::{Check, Machine};
use crate::model::{Limits, MachineKey, RootFs, Size, UidRange};

/// What a machine's start needs, in the order it needs it: the check's name, how the step is called
/// that fails without it, and what to do.
const NEEDS: [(&str, &[&str], &str); 7] = [
    (
        "user namespaces",
        &["make the namespaces", "write the namespace's id maps"],
        "run `keep serve` as root; allow user namespaces: `sysctl user.max_user_namespaces=100000`",
    ),
    (
        "network devices",
        &[TUN, "make the network device", "raise the network device"],
        "load the module (`modprobe tun`), and see that /dev/net/tun is there",
    ),
    (
        "id-mapped mounts",
        &["copy the mount", "shift the"],
        "put the data directory on ext4, xfs or btrfs, and use Linux 5.19 or later",
    ),
    (
        "overlay mounts",
        &["mount the stage", "attach the layers", "stack the layers", "enter the root"],
        "load the module (`modprobe overlay`), and use Linux 5.19 or later",
    ),
    (
        "/proc and /sys",
        &["mount /proc", "mount /sys", "mask", "make parts of /proc", "show the"],
        "the kernel allows this only where all of /proc and /sys can be seen: run on the host, or in \
         a container that masks neither",
    ),
    (
        "devices and terminals",
        &["mount /dev", "mount /run", "make"],
        "mount devtmpfs on /dev, and use a kernel with CONFIG_DEVPTS_FS or CONFIG_UNIX98_PTYS",
    ),
    (
        "system call filters",
        &["install the system call filter"],
        "use a kernel with CONFIG_SECCOMP_FILTER",
    ),
];

/// Finds out what the container driver can do here, with `data_dir`'s filesystem under the layers.
pub async fn probe(config: &ContainerConfig, data_dir: &Path) -> Vec<Check> {
    let key = format!("probe-{}", id());
    let config = ContainerConfig {
        run_dir: config.run_dir.join(".probe").join(&key),
        cgroup_parent: format!("{}-{key}", config.cgroup_parent),
        ..config.clone()
    };
    let driver = match ContainerDriver::new(config.clone()) {
        Ok(driver) => driver,
        Err(error) => {
            let detail = error.to_string();
            let fix = Some("mount the control group filesystem, and run as root".to_owned());
            return vec![Check { name: "control groups", ok: false, detail, fix }];
        }
    };
    let found = driver.host.groups.describe();
    let mut checks = vec![Check { name: "control groups", ok: true, detail: found, fix: None }];
    let scratch = data_dir.join(format!(".{key}"));
    let outcome = try_a_machine(&driver, &key, &scratch).await;
    let _ = fs::remove_dir_all(&scratch);
    let _ = fs::remove_dir_all(&config.run_dir);
    let _ = fs::remove_dir(config.run_dir.parent().unwrap_or(&config.run_dir));
    checks.extend(read_outcome(&outcome));
    checks
}

async fn try_a_machine(driver: &ContainerDriver, key: &str, scratch: &Path) -> DriverResult<()> {
    let Some(key) = MachineKey::parse(key) else {
        return Err(DriverError::Unsupported { driver: NAME, reason: "a bad name".to_owned() });
    };
    for part in ["layers/empty", "writable/upper", "writable/work"] {
        let path = scratch.join(part);
        fs::create_dir_all(&path).map_err(failed("create", &path))?;
    }
    let machine = Machine {
        key: key.clone(),
        hostname: "probe".to_owned(),
        root: RootFs {
            layers_dir: scratch.join("layers"),
            lower: vec!["empty".into()],
            writable_dir: scratch.join("writable"),
            upper: "upper".into(),
            work: "work".into(),
            image: 0,
        },
        uids: UidRange { base: 2_000_000_000, count: 65_536 },
        limits: Limits {
            millicpus: 1000,
            memory: Size(64 << 20),
            pids: 32,
            file_size: Size(1 << 20),
        },
        mounts: Vec::new(),
    };
    let started = driver.start(&machine).await.map(drop);
    let stopped = driver.stop(&key).await.map(drop);
    started.and(stopped)
}

/// Every step before the failed one works; the failed step does not; the result of the later steps
/// is unknown and is not reported.
fn read_outcome(outcome: &DriverResult<()>) -> Vec<Check> {
    let works =
        |name: &'static str| Check { name, ok: true, detail: "works".to_owned(), fix: None };
    let Err(error) = outcome else {
        let all = NEEDS.iter().map(|(name, _, _)| works(name));
        return all.chain([works("starting and stopping a container")]).collect();
    };
    let step = match error {
        DriverError::Build { step, .. } => step.as_str(),
        _ => "",
    };
    let at = NEEDS.iter().position(|(_, steps, _)| steps.iter().any(|s| step.starts_with(s)));
    let detail = error.to_string();
    let Some(at) = at else {
        let name = "starting and stopping a container";
        return vec![Check { name, ok: false, detail, fix: None }];
    };
    let (name, _, fix) = NEEDS[at];
    let mut checks: Vec<Check> = NEEDS[..at].iter().map(|(name, _, _)| works(name)).collect();
    checks.push(Check { name, ok: false, detail, fix: Some(fix.to_owned()) });
    checks
}

#[cfg(test)]
mod tests {
    use super::{NEEDS, TUN, read_outcome};
    use crate::driver::DriverError;

    #[test]
    fn the_step_that_fails_tells_what_is_missing() {
        let failed = |step: &str| {
            let (step, reason) = (step.to_owned(), "Invalid argument".to_owned());
            read_outcome(&Err(DriverError::Build { step, reason }))
        };
        let checks = failed("shift the layers' owners");
        let (last, before) = checks.split_last().expect("something was looked at");
        assert!(before.len() == 2 && before.iter().all(|check| check.ok) && !last.ok);
        assert_eq!(last.name, "id-mapped mounts");
        assert!(last.fix.as_deref().unwrap_or("").contains("ext4"));
        let checks = failed(TUN);
        assert_eq!(
            checks.last().map(|check| (check.name, check.ok)),
            Some(("network devices", false))
        );

        let unknown = failed("dance");
        assert_eq!(unknown.len(), 1);
        assert!(!unknown[0].ok);
        assert_eq!(read_outcome(&Ok(())).len(), NEEDS.len() + 1);
    }
}
