//! Checks whether this host has what microVMs need. `keep serve` offers the driver if so;
//! `keep doctor` prints all of it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use sandkeep_core::driver::microvm::{MicrovmDriver, kernel};
use sandkeep_core::driver::{Check, Driver};
use sandkeep_core::embedded::AGENT;
use sandkeep_core::engine::{Absent, LateDrivers, agent_answers};

use crate::config::MicrovmSettings;
use crate::host;

/// How packages are installed that machines need.
pub(crate) const INSTALL: &str = "apt-get install --no-install-recommends";

/// What the driver is called.
pub(crate) const NAME: &str = "microvm";

/// Looks at everything that must be there before a machine can be tried.
pub(crate) fn needs(data: &Path, settings: &MicrovmSettings) -> Vec<Check> {
    vec![
        processor(),
        program("hypervisor", &settings.qemu, "qemu-system-x86"),
        program("packing of layers", &found("mkfs.erofs"), "erofs-utils"),
        program("disks", &found("mkfs.ext4"), "e2fsprogs"),
        prepared(data),
    ]
}

/// Why the driver cannot be offered, if it cannot.
pub(crate) fn absent(data: &Path, settings: &MicrovmSettings) -> Option<Absent> {
    if !settings.enabled {
        let reason = "it is turned off in the server's settings".to_owned();
        let fix = "set `enabled = true` under [microvm] and start the server again".to_owned();
        return Some(Absent { reason, fix: Some(fix) });
    }
    let lacking: Vec<Check> = needs(data, settings).into_iter().filter(|check| !check.ok).collect();
    if lacking.is_empty() {
        return None;
    }
    let told: Vec<&str> = lacking.iter().map(|check| check.detail.as_str()).collect();
    let fixes: Vec<&str> = lacking.iter().filter_map(|check| check.fix.as_deref()).collect();
    let fix = match fixes.is_empty() {
        true => None,
        false => Some(format!("on the server, as root: {}", fixes.join("; "))),
    };
    Some(Absent { reason: told.join("; "), fix })
}

/// The microvm driver of a server: there from the start, or as soon as the host has what it needs.
#[derive(Debug)]
pub(crate) struct LateMicrovm {
    agent: PathBuf,
    data: PathBuf,
    mark: String,
    settings: MicrovmSettings,
    driver: OnceLock<MicrovmDriver>,
}

impl LateMicrovm {
    pub(crate) fn new(agent: &Path, data: &Path, mark: &str, settings: &MicrovmSettings) -> Self {
        let (agent, data, mark) = (agent.to_path_buf(), data.to_path_buf(), mark.to_owned());
        Self { agent, data, mark, settings: settings.clone(), driver: OnceLock::new() }
    }

    /// The driver, or why it cannot be offered.
    pub(crate) fn driver(&self) -> Result<MicrovmDriver, Absent> {
        if let Some(driver) = self.driver.get() {
            return Ok(driver.clone());
        }
        if let Some(absent) = absent(&self.data, &self.settings) {
            return Err(absent);
        }
        let config =
            host::microvm_config(self.agent.clone(), &self.data, &self.mark, &self.settings);
        let driver = MicrovmDriver::new(config, agent_answers).map_err(|error| {
            let fix = Some("`keep doctor` on the server tells what is missing".to_owned());
            Absent { reason: error.to_string(), fix }
        })?;
        Ok(self.driver.get_or_init(|| driver).clone())
    }

    /// Removes what the driver needs on the host, if it was ever there; leaves what sandboxes still use.
    pub(crate) fn retire(&self) {
        if let Some(driver) = self.driver.get() {
            driver.clone().retire();
        }
    }
}

impl LateDrivers for LateMicrovm {
    fn look(&self, name: &str) -> Option<Result<Arc<dyn Driver>, Absent>> {
        let found = || self.driver().map(|driver| Arc::new(driver) as Arc<dyn Driver>);
        (name == NAME).then(found)
    }
}

fn processor() -> Check {
    let ok = cfg!(target_arch = "x86_64");
    let detail = format!("{}: machines are made for x86_64", std::env::consts::ARCH);
    Check { name: "processor", ok, detail, fix: None }
}

fn program(name: &'static str, path: &Path, package: &str) -> Check {
    let (ok, detail) = match path.is_file() {
        true => (true, path.display().to_string()),
        false => (false, format!("there is no {}", path.display())),
    };
    let install = || format!("`{INSTALL} {package}`");
    Check { name, ok, detail, fix: (!ok).then(install) }
}

/// Where a program is, or where it would be.
fn found(program: &str) -> PathBuf {
    let places = ["/usr/sbin", "/usr/bin", "/sbin", "/bin", "/usr/local/sbin", "/usr/local/bin"];
    let paths = places.map(|place| Path::new(place).join(program));
    let first = paths[0].clone();
    paths.into_iter().find(|path| path.is_file()).unwrap_or(first)
}

fn prepared(data: &Path) -> Check {
    let setup = match data == crate::locate::default_data() {
        true => "`keep microvm setup`".to_owned(),
        false => format!("`keep microvm setup --data {}`", data.display()),
    };
    let (ok, detail) = match kernel::open(&host::kernel_dir(data), &AGENT.bytes()) {
        Ok(kernel) => (true, kernel.vmlinuz.display().to_string()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            (false, "no kernel is prepared for machines".to_owned())
        }
        Err(error) => (false, format!("the kernel for machines cannot be read: {error}")),
    };
    Check { name: "kernel", ok, detail, fix: (!ok).then_some(setup) }
}

#[cfg(test)]
mod tests {
    use super::{absent, needs};
    use crate::config::MicrovmSettings;

    #[test]
    fn what_is_missing_is_told_with_what_fixes_it() {
        let data = tempfile::tempdir().unwrap();
        let settings =
            MicrovmSettings { qemu: "/no/such/qemu".into(), ..MicrovmSettings::default() };
        let told = absent(data.path(), &settings).unwrap();
        assert!(told.reason.contains("/no/such/qemu"), "{told:?}");
        assert!(told.reason.contains("no kernel is prepared"), "{told:?}");
        let fix = told.fix.unwrap();
        let setup = format!("keep microvm setup --data {}", data.path().display());
        assert!(fix.contains("qemu-system-x86") && fix.contains(&setup), "{fix}");
        let lacking = needs(data.path(), &settings).into_iter().filter(|check| !check.ok);
        assert!(lacking.into_iter().all(|check| check.fix.is_some()));
        let off = MicrovmSettings { enabled: false, ..settings };
        assert!(absent(data.path(), &off).unwrap().reason.contains("turned off"));
    }
}
