//! `keep microvm setup`: prepares the kernel that machines of their own run. Needs no server, and
//! prints what it does.

use std::fs;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use sandkeep_core::driver::microvm::kernel;
use sandkeep_core::embedded::AGENT;
use serde::Serialize;

use super::doctor::{self, Finding, Scratch};
use super::{bytes, facts};
use crate::args::{Global, SetupArgs};
use crate::failure::Failure;
use crate::host;
use crate::locate;
use crate::screen::{Screen, note};

/// What Debian calls the kernel that is made for machines, whatever its version is.
const PACKAGE: &str = "linux-image-cloud-amd64";
/// How its kernels' names end.
const FLAVOUR: &str = "-cloud-amd64";
/// The hint for hosts without such a kernel.
const OTHERWISE: &str = "name a kernel of yours with --kernel <vmlinuz> and --modules <dir>";

const NEXT: &str = "
Try it: keep create vm --driver microvm. A running server needs no restart.
";

/// The checks of how machines run that are printed also when all is well.
const TOLD: [&str; 2] = ["acceleration", "booting a machine"];

/// A kernel that was found, and the temporary place it lies in, if it does.
struct GuestKernel {
    kernel: PathBuf,
    modules: PathBuf,
    _scratch: Option<Scratch>,
}

/// What was written.
#[derive(Debug, Serialize)]
struct SetupReport {
    release: String,
    vmlinuz: PathBuf,
    vmlinuz_bytes: u64,
    initramfs: PathBuf,
    initramfs_bytes: u64,
    digest: String,
    /// How machines run here.
    findings: Vec<Finding>,
}

pub(super) async fn setup(global: &Global, args: &SetupArgs) -> Result<(), Failure> {
    host::need_root("keep microvm setup")?;
    if !cfg!(target_arch = "x86_64") {
        return Err(Failure::here("microVMs need a host with an x86-64 processor"));
    }
    let data = global.data.clone().unwrap_or_else(locate::default_data);
    let data = std::path::absolute(data)
        .map_err(|error| Failure::caused("cannot determine the working directory", error))?;
    // As the server makes it: other users may not read what is below.
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&data).map_err(|error| {
        Failure::caused(format!("cannot use `{}`", data.display()), error)
            .with_hint("choose another directory with --data")
    })?;
    let found = match (&args.kernel, &args.modules) {
        (Some(kernel), Some(modules)) => given(kernel, modules)?,
        _ => match newest(Path::new("/")) {
            Some(found) => found,
            None => downloaded(&data)?,
        },
    };
    let prepared =
        kernel::prepare(&found.kernel, &found.modules, &AGENT.bytes(), &host::kernel_dir(&data))
            .map_err(|error| {
                Failure::caused("cannot prepare the guest kernel", error).with_hint(OTHERWISE)
            })?;
    let release = found.modules.file_name().unwrap_or_default().to_string_lossy().into_owned();
    // The first machine would have to wait for it otherwise.
    note("trying whether machines run here, and under KVM; this takes up to half a minute");
    let findings = doctor::microvm(&data).await;
    let size = |path: &Path| fs::metadata(path).map_or(0, |file| file.len());
    let answer = SetupReport {
        vmlinuz_bytes: size(&prepared.vmlinuz),
        initramfs_bytes: size(&prepared.initramfs),
        release,
        vmlinuz: prepared.vmlinuz,
        initramfs: prepared.initramfs,
        digest: prepared.digest,
        findings,
    };
    let screen = Screen::new(global.json);
    screen.answer(&answer, |answer| {
        let written = |path: &Path, size| format!("{}  {}", path.display(), bytes(size));
        let mut lines = vec![
            ("release", answer.release.clone()),
            ("kernel", written(&answer.vmlinuz, answer.vmlinuz_bytes)),
            ("initramfs", written(&answer.initramfs, answer.initramfs_bytes)),
            ("digest", answer.digest.clone()),
        ];
        for finding in &answer.findings {
            let name = finding.name.strip_prefix("microvm: ").unwrap_or(&finding.name);
            match &finding.fix {
                Some(fix) => lines.push((name, format!("{}; {fix}", finding.detail))),
                None if TOLD.contains(&name) => lines.push((name, finding.detail.clone())),
                None => {}
            }
        }
        facts(screen.paint, &lines) + NEXT
    })
}

/// What was named on the command line.
fn given(kernel: &Path, modules: &Path) -> Result<GuestKernel, Failure> {
    if !kernel.is_file() {
        return Err(Failure::here(format!("there is no kernel `{}`", kernel.display()))
            .with_hint("--kernel is a file like /boot/vmlinuz-6.1.0-13-cloud-amd64"));
    }
    if !modules.join("kernel").is_dir() {
        return Err(Failure::here(format!("`{}` has no modules", modules.display()))
            .with_hint("--modules is a directory like /lib/modules/6.1.0-13-cloud-amd64"));
    }
    let (kernel, modules) = (kernel.to_path_buf(), modules.to_path_buf());
    Ok(GuestKernel { kernel, modules, _scratch: None })
}

/// The newest kernel of the right kind below `root` that has its modules there too.
fn newest(root: &Path) -> Option<GuestKernel> {
    let names = fs::read_dir(root.join("boot")).ok()?;
    let mut versions: Vec<String> = names
        .filter_map(|entry| {
            let name = entry.ok()?.file_name().into_string().ok()?;
            let version = name.strip_prefix("vmlinuz-")?.to_owned();
            let modules = root.join("lib/modules").join(&version).join("kernel");
            (version.ends_with(FLAVOUR) && modules.is_dir()).then_some(version)
        })
        .collect();
    versions.sort_by_key(|version| numbers(version));
    let version = versions.pop()?;
    Some(GuestKernel {
        kernel: root.join(format!("boot/vmlinuz-{version}")),
        modules: root.join("lib/modules").join(version),
        _scratch: None,
    })
}

/// 6.10 is newer than 6.9.
fn numbers(version: &str) -> Vec<u64> {
    version.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect()
}

/// Fetches the distribution's kernel and unpacks it where it is forgotten again.
fn downloaded(data: &Path) -> Result<GuestKernel, Failure> {
    let package = package()?;
    note(&format!(
        "no suitable kernel found; downloading `{package}` to extract one. Nothing is installed."
    ));
    let scratch = Scratch(data.join("tmp").join(format!("microvm-setup-{}", std::process::id())));
    fs::create_dir_all(&scratch.0)
        .map_err(|error| Failure::caused("cannot create a temporary directory", error))?;
    run(program("apt-get").args(["download", "-q", &package]).current_dir(&scratch.0))?;
    let archive = fs::read_dir(&scratch.0)
        .ok()
        .and_then(|mut entries| entries.find_map(|entry| Some(entry.ok()?.path())))
        .ok_or_else(|| Failure::here("apt-get downloaded nothing").with_hint(OTHERWISE))?;
    let root = scratch.0.join("root");
    run(program("dpkg-deb").arg("-x").arg(&archive).arg(&root))?;
    // Debian has moved modules below /usr, where they are found through a link that a package does not bring.
    if !root.join("lib").exists() {
        let _ = std::os::unix::fs::symlink("usr/lib", root.join("lib"));
    }
    let found = newest(&root)
        .ok_or_else(|| Failure::here(format!("`{package}` has no kernel")).with_hint(OTHERWISE))?;
    Ok(GuestKernel { _scratch: Some(scratch), ..found })
}

/// The package that has the kernel; [`PACKAGE`] only depends on it.
fn package() -> Result<String, Failure> {
    let listed = run(program("apt-cache").args(["depends", PACKAGE]))?;
    let named = listed.lines().find_map(|line| line.trim().strip_prefix("Depends: "));
    named.filter(|name| name.starts_with("linux-image-")).map(str::to_owned).ok_or_else(|| {
        Failure::here(format!("apt has no package `{PACKAGE}`"))
            .with_hint(format!("run `apt-get update` and try again; or {OTHERWISE}"))
    })
}

/// A program of the distribution, without the variables of this one: secrets may be among them.
fn program(name: &str) -> Command {
    let mut command = Command::new(name);
    command.env_clear().env("LC_ALL", "C").stdin(Stdio::null());
    // How to reach a mirror is the operator's to say.
    for kept in ["PATH", "http_proxy", "https_proxy", "ftp_proxy", "no_proxy", "all_proxy"] {
        if let Some(value) = std::env::var_os(kept) {
            command.env(kept, value);
        }
    }
    command
}

/// Runs a program of the distribution and answers with what it printed.
fn run(command: &mut Command) -> Result<String, Failure> {
    let name = command.get_program().to_string_lossy().into_owned();
    let done = command.output().map_err(|error| {
        Failure::caused(format!("cannot run `{name}`"), error)
            .with_hint(format!("on a host without apt-get, {OTHERWISE}"))
    })?;
    if !done.status.success() {
        let said = String::from_utf8_lossy(&done.stderr).trim().to_owned();
        return Err(Failure::caused(format!("`{name}` failed"), said)
            .with_hint(format!("run `apt-get update` and try again; or {OTHERWISE}")));
    }
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::{given, newest};

    fn installed(root: &Path, version: &str, modules: bool) {
        fs::create_dir_all(root.join("boot")).unwrap();
        fs::write(root.join(format!("boot/vmlinuz-{version}")), b"").unwrap();
        if modules {
            fs::create_dir_all(root.join("lib/modules").join(version).join("kernel")).unwrap();
        }
    }

    #[test]
    fn the_newest_kernel_that_is_whole_and_of_the_right_kind_is_taken() {
        let root = tempfile::tempdir().unwrap();
        assert!(newest(root.path()).is_none());
        for (version, modules) in [
            ("6.1.0-9-cloud-amd64", true),
            ("6.1.0-10-cloud-amd64", true),
            ("6.1.0-54-cloud-amd64", false),
            ("6.12.0-1-amd64", true),
        ] {
            installed(root.path(), version, modules);
        }
        let found = newest(root.path()).unwrap();
        assert_eq!(found.kernel, root.path().join("boot/vmlinuz-6.1.0-10-cloud-amd64"));
        assert_eq!(found.modules, root.path().join("lib/modules/6.1.0-10-cloud-amd64"));
    }

    #[test]
    fn what_was_named_and_is_not_there_is_told() {
        let root = tempfile::tempdir().unwrap();
        installed(root.path(), "1-cloud-amd64", true);
        let (kernel, modules) = (
            root.path().join("boot/vmlinuz-1-cloud-amd64"),
            root.path().join("lib/modules/1-cloud-amd64"),
        );
        assert!(given(&kernel, &modules).is_ok());
        let missing = root.path().join("no");
        let told = given(&missing, &modules).err().unwrap();
        assert!(told.to_string().contains("no kernel") && told.hint().is_some(), "{told}");
        let told = given(&kernel, &missing).err().unwrap();
        assert!(told.to_string().contains("no modules") && told.hint().is_some(), "{told}");
    }
}
