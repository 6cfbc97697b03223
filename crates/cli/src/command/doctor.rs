//! `keep doctor`: what this host can and cannot do, and how to fix it. Needs no server.

use std::path::{Path, PathBuf};

use sandkeep_client::Error;
use sandkeep_client::types::{CheckState, Damage, error_chain};
use sandkeep_core::driver::Check;
use sandkeep_core::driver::container::probe;
use sandkeep_core::driver::microvm::{MicrovmConfig, MicrovmDriver};
use sandkeep_core::engine::agent_answers;
use sandkeep_core::store::{Enforcement, enforcement};
use serde::Serialize;

use super::bytes;
use crate::args::{DoctorArgs, Global};
use crate::config::MicrovmSettings;
use crate::failure::Failure;
use crate::host;
use crate::locate;
use crate::machines;
use crate::screen::{Paint, Screen};

/// How a check came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Verdict {
    /// As it should be.
    Ok,
    /// Works, but less well than it could.
    Weak,
    /// `keep serve` needs this.
    Missing,
    /// Nothing depends on it.
    Absent,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    /// What.
    pub(crate) name: String,
    /// How it is.
    pub(crate) verdict: Verdict,
    /// What was found.
    pub(crate) detail: String,
    /// What to do about it.
    pub(crate) fix: Option<String>,
}

impl Finding {
    fn new(name: &str, verdict: Verdict, detail: impl Into<String>, fix: Option<&str>) -> Self {
        let (name, fix) = (name.to_owned(), fix.map(str::to_owned));
        Self { name, verdict, detail: detail.into(), fix }
    }
}

#[derive(Debug, Serialize)]
struct Report {
    data: PathBuf,
    fit: bool,
    findings: Vec<Finding>,
}

pub(super) async fn doctor(global: &Global, args: &DoctorArgs) -> Result<(), Failure> {
    let data = global.data.clone().unwrap_or_else(locate::default_data);
    let mut findings = vec![user(), kernel(), control_groups()];
    findings.extend(filesystem(&data));
    findings.extend(disk_limits(&data));
    findings.extend(container(&data).await);
    findings.extend(microvm(&data).await);
    findings.extend([resolver(), machine(), languages(), gvisor()]);
    findings.extend(server(global).await);
    findings.extend(damage(global).await);
    let fit = findings.iter().all(|finding| finding.verdict != Verdict::Missing);
    let report = Report { data, fit, findings };
    let screen = Screen::new(global.json);
    screen.answer(&report, |report| written(screen.paint, report))?;
    match args.strict && !report.fit {
        true => Err(Failure::HostRequirements),
        false => Ok(()),
    }
}

fn written(paint: Paint, report: &Report) -> String {
    let mut text = String::new();
    let width = report.findings.iter().map(|finding| finding.name.len()).max().unwrap_or(0);
    for Finding { name, verdict, detail, fix } in &report.findings {
        let mark = match verdict {
            Verdict::Ok => paint.green("ok     "),
            Verdict::Weak => paint.yellow("weak   "),
            Verdict::Missing => paint.red("MISSING"),
            Verdict::Absent => paint.dim("absent "),
        };
        text.push_str(&format!("{mark}  {name:width$}  {detail}\n"));
        if let Some(fix) = fix {
            text.push_str(&format!("         {:width$}  {} {fix}\n", "", paint.cyan("fix:")));
        }
    }
    text.push_str(match report.fit {
        true => "\nThis host can run `keep serve`.\n",
        false => "\nThis host cannot run `keep serve` until what is MISSING is fixed.\n",
    });
    text
}

fn user() -> Finding {
    match rustix::process::geteuid().is_root() {
        true => Finding::new("user", Verdict::Ok, "root", None),
        false => Finding::new(
            "user",
            Verdict::Missing,
            "not root: mounts, cgroups and ranges of user ids are root's to give",
            Some("run `keep serve` as root; clients need no root"),
        ),
    }
}

fn kernel() -> Finding {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(['.', '-']).map(|part| part.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    match version >= (5, 19) {
        true => Finding::new("kernel", Verdict::Ok, format!("Linux {release}"), None),
        false => Finding::new(
            "kernel",
            Verdict::Missing,
            format!("Linux {release}: overlay on id-mapped layers came with 5.19"),
            Some("boot Linux 5.19 or later"),
        ),
    }
}

/// The resolver for sandboxes, unless the settings name another.
fn resolver() -> Finding {
    const NAME: &str = "name servers";
    let text = std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
    let servers: Vec<&str> = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("nameserver")?.split_whitespace().next())
        .filter(|server| server.parse::<std::net::IpAddr>().is_ok())
        .collect();
    match servers.is_empty() {
        false => Finding::new(NAME, Verdict::Ok, servers.join(", "), None),
        true => Finding::new(
            NAME,
            Verdict::Weak,
            "/etc/resolv.conf names none: sandboxes cannot look names up",
            Some("name some there, or set `resolvers` under [network]"),
        ),
    }
}

/// What clients of other services expect to find in a sandbox on the image of this host.
fn machine() -> Finding {
    const NAME: &str = "default machine";
    let place = |program: &str| {
        ["/usr/bin", "/usr/sbin", "/bin", "/sbin"]
            .iter()
            .map(|directory| Path::new(directory).join(program))
            .find(|path| path.is_file())
    };
    let wanted = ["bash", "useradd", "groupadd", "usermod", "gpasswd", "stat", "find"];
    let mut lacking: Vec<&str> =
        wanted.into_iter().filter(|program| place(program).is_none()).collect();
    // Others than GNU's have these programs without these words.
    for (program, words) in [
        ("stat", &["-c", "%s|%f|%u|%g|%X|%Y|%Z|%W|%h|%i|%d|%B|%b", "/"][..]),
        ("find", &["/", "-maxdepth", "0", "-printf", "%f|%y"]),
    ] {
        let Some(path) = place(program) else { continue };
        let ran = std::process::Command::new(path).args(words).env_clear().output();
        let works = ran.is_ok_and(|ran| ran.status.success() && ran.stdout.contains(&b'|'));
        if !works {
            lacking.push(if program == "stat" { "GNU coreutils" } else { "GNU findutils" });
        }
    }
    if lacking.is_empty() {
        let sudo = if place("sudo").is_some() { "the host's" } else { "Sandkeep's own" };
        let detail = format!("bash, GNU tools, useradd and the like; sudo is {sudo}");
        return Finding::new(NAME, Verdict::Ok, detail, None);
    }
    Finding::new(
        NAME,
        Verdict::Weak,
        format!("sandboxes on the image `host` lack {}", lacking.join(", ")),
        Some("install them, then `keep image pull host`; or set `default_image` under [vercel]"),
    )
}

/// The languages that code written for other services starts by these names in a sandbox on the image of this host.
fn languages() -> Finding {
    const NAME: &str = "languages";
    let there = |program: &str| {
        let places = ["/usr/local/bin", "/usr/bin", "/bin"];
        places.iter().any(|place| Path::new(place).join(program).is_file())
    };
    let lacking: Vec<&str> = ["node", "python"].into_iter().filter(|name| !there(name)).collect();
    if lacking.is_empty() {
        return Finding::new(NAME, Verdict::Ok, "node and python".to_owned(), None);
    }
    let fix = match lacking.as_slice() {
        ["python"] if there("python3") => {
            "`apt-get install python-is-python3`, then `keep image pull host`"
        }
        _ => {
            "install them (`python` comes with python-is-python3), then `keep image pull host`; or set `default_image` \
             under [vercel]"
        }
    };
    let detail = format!(
        "sandboxes on the image `host` have no program `{}`, which the original of the default machine has",
        lacking.join("` and no `")
    );
    Finding::new(NAME, Verdict::Weak, detail, Some(fix))
}

/// cgroup v2 is one tree with a list of controllers; v1 is one tree for each.
fn control_groups() -> Finding {
    control_groups_in(Path::new("/sys/fs/cgroup"))
}

fn control_groups_in(root: &Path) -> Finding {
    let wanted = ["cpu", "memory", "pids"];
    let unified = std::fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
    let in_v2 = |name: &&str| unified.split_whitespace().any(|found| found == *name);
    let in_v1 = |name: &&str| root.join(name).join("cgroup.procs").exists();
    let lacking: Vec<&str> =
        wanted.into_iter().filter(|name| !in_v2(name) && !in_v1(name)).collect();
    let kind = if unified.is_empty() { "v1" } else { "v2" };
    // Version 2 counts what sockets queue as memory. Version 1 has a limit for it, but not in every kernel.
    let memory = root.join("memory");
    let counts_sockets = in_v2(&"memory") || memory.join("memory.kmem.tcp.limit_in_bytes").exists();
    if lacking.is_empty() && !counts_sockets {
        return Finding::new(
            "cgroups",
            Verdict::Weak,
            format!(
                "{kind} with cpu, memory, pids; this kernel has no `memory.kmem.tcp.limit_in_bytes`, so what the sockets of a \
                 sandbox queue is not limited"
            ),
            Some("boot with systemd.unified_cgroup_hierarchy=1: there it counts as memory"),
        );
    }
    if lacking.is_empty() {
        return Finding::new(
            "cgroups",
            Verdict::Ok,
            format!("{kind} with cpu, memory, pids"),
            None,
        );
    }
    Finding::new(
        "cgroups",
        Verdict::Missing,
        format!("{kind} without {}", lacking.join(", ")),
        Some("boot with systemd.unified_cgroup_hierarchy=1, or mount the controllers"),
    )
}

/// Looks at the filesystem of the data directory, or of the nearest directory above it that exists.
/// How sandboxes are held to their disk limits.
fn disk_limits(data: &Path) -> Option<Finding> {
    const NAME: &str = "disk limits";
    let there = data.ancestors().find(|place| place.exists())?;
    Some(match enforcement(there).ok()? {
        Enforcement::Projects => Finding::new(
            NAME,
            Verdict::Ok,
            "project quotas: a write beyond a sandbox's limit fails",
            None,
        ),
        Enforcement::Counted { reason, fix } => Finding {
            name: NAME.to_owned(),
            verdict: Verdict::Weak,
            detail: format!("counted: {reason}; processes of a sandbox over its limit are ended"),
            fix,
        },
    })
}

fn filesystem(data: &Path) -> Vec<Finding> {
    let there = data.ancestors().find(|place| place.exists()).unwrap_or(Path::new("/"));
    let Ok(found) = rustix::fs::statfs(there) else {
        let detail = format!("cannot look at `{}`", there.display());
        return vec![Finding::new("data directory", Verdict::Missing, detail, None)];
    };
    let place = data.display();
    // The numbers are the kernel's magic numbers for filesystems; see statfs(2).
    let kind = match found.f_type {
        0xef53 => Finding::new(
            "data directory",
            Verdict::Ok,
            format!("{place} on ext4: works; checkpoints of busy sandboxes copy what changed"),
            None,
        ),
        0x5846_5342 => Finding::new(
            "data directory",
            Verdict::Ok,
            format!("{place} on xfs: clones files"),
            None,
        ),
        0x9123_683e => Finding::new(
            "data directory",
            Verdict::Ok,
            format!("{place} on btrfs: clones files"),
            None,
        ),
        0x0102_1994 => Finding::new(
            "data directory",
            Verdict::Weak,
            format!("{place} on tmpfs: nothing there survives a reboot"),
            Some("choose a directory on a disk with --data"),
        ),
        0x794c_7630 => Finding::new(
            "data directory",
            Verdict::Missing,
            format!("{place} on overlayfs: layers cannot be stacked on it"),
            Some(
                "choose a directory on ext4, xfs or btrfs with --data; in a container, mount a volume",
            ),
        ),
        0x6969 | 0xff53_4d42 | 0x6573_5546 => Finding::new(
            "data directory",
            Verdict::Missing,
            format!("{place} on a network or user-space filesystem"),
            Some("choose a directory on ext4, xfs or btrfs with --data"),
        ),
        other => Finding::new(
            "data directory",
            Verdict::Weak,
            format!("{place} on a filesystem that was never tried (magic {other:#x})"),
            Some("ext4, xfs and btrfs are known to work"),
        ),
    };
    let block = u64::try_from(found.f_bsize).unwrap_or(4096);
    let (free, total) = (found.f_bavail * block, found.f_blocks * block);
    let detail = format!("{} of {}", bytes(free), bytes(total));
    let space = match free {
        0..0x4000_0000 => {
            let fix = "free some space: below 1 GiB snapshots are soon refused";
            Finding::new("free space", Verdict::Weak, detail, Some(fix))
        }
        _ => Finding::new("free space", Verdict::Ok, detail, None),
    };
    vec![kind, space]
}

/// Looks at what machines of their own need, and boots one to see whether guests run under KVM.
/// Users of containers alone need none of it.
pub(super) async fn microvm(data: &Path) -> Vec<Finding> {
    let settings = MicrovmSettings::default();
    let finding = |check: Check| Finding {
        name: format!("microvm: {}", check.name),
        verdict: match (check.ok, &check.fix) {
            (true, None) => Verdict::Ok,
            // It works, and would work better otherwise: machines that are emulated.
            (true, Some(_)) => Verdict::Weak,
            (false, _) => Verdict::Absent,
        },
        detail: check.detail,
        fix: check.fix,
    };
    let needs = machines::needs(data, &settings);
    if !needs.iter().all(|check| check.ok) || !rustix::process::geteuid().is_root() {
        return needs.into_iter().map(finding).collect();
    }
    let scratch = Scratch(data.join(format!(".keep-doctor-microvm-{}", std::process::id())));
    let driver = host::install_agent(&scratch.0)
        .map_err(|error| error.to_string())
        .and_then(|agent| trial(agent, data, &scratch.0, &settings));
    match driver {
        Ok(driver) => {
            let checks = driver.probe().await;
            driver.retire();
            checks.into_iter().map(finding).collect()
        }
        Err(problem) => vec![Finding::new("microvm driver", Verdict::Absent, problem, None)],
    }
}

/// A driver beside the server's own, which may be running: only the cache is the same, so that what it finds is known to both.
fn trial(
    agent: PathBuf,
    data: &Path,
    scratch: &Path,
    settings: &MicrovmSettings,
) -> Result<MicrovmDriver, String> {
    let config = host::microvm_config(agent, scratch, &host::scratch_mark(scratch), settings);
    let config = MicrovmConfig { cache_dir: data.join("microvm"), warm_hypervisors: 0, ..config };
    MicrovmDriver::new(config, agent_answers).map_err(|error| error.to_string())
}

fn gvisor() -> Finding {
    let detail = match on_path("runsc") {
        true => "runsc is there; this version has no gvisor driver yet",
        false => "no runsc; this version has no gvisor driver yet",
    };
    Finding::new("gvisor driver", Verdict::Absent, detail, None)
}

fn on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|place| place.join(program).is_file())
}

async fn server(global: &Global) -> Vec<Finding> {
    let none = |detail: String| {
        vec![Finding::new("server", Verdict::Absent, detail, Some("start one: `keep serve`"))]
    };
    let client = match locate::client(global) {
        Ok(client) => client,
        Err(failure) => return none(failure.to_string()),
    };
    let up = |version: &str| {
        let detail = format!("version {version} at {}", client.endpoint());
        Finding::new("server", Verdict::Ok, detail, None)
    };
    match client.ready().await {
        Ok(ready) => {
            let warnings = ready.checks.iter().filter(|check| check.state == CheckState::Warning);
            let warned = warnings.map(|check| {
                let name = format!("server: {}", check.name);
                let fix = match check.name.as_str() {
                    "tls" => "see `[tls]` in its settings; `keep tls init` makes new files",
                    _ => "see its log",
                };
                Finding::new(&name, Verdict::Weak, check.detail.clone(), Some(fix))
            });
            std::iter::once(up(&ready.version)).chain(warned).collect()
        }
        Err(error @ Error::Connect { .. }) => {
            let hint = error.hint().unwrap_or("start one: `keep serve`").to_owned();
            vec![Finding::new("server", Verdict::Absent, error_chain(&error), Some(&hint))]
        }
        // The server exists, and does not take work now, or is of a version without this question.
        Err(error) => match client.health().await {
            Ok(health) => {
                let hint = error.hint().unwrap_or("see its log").to_owned();
                let detail = format!("not ready: {error}");
                let unready = Finding::new("server: ready", Verdict::Weak, detail, Some(&hint));
                vec![up(&health.version), unready]
            }
            Err(error) => none(error.to_string()),
        },
    }
}

/// Lists what the running server knows to be wrong with its data.
async fn damage(global: &Global) -> Vec<Finding> {
    let Ok(client) = locate::client(global) else { return Vec::new() };
    let found = match client.damage().await {
        Ok(found) => found,
        // Without a server there is `keep fsck`.
        Err(Error::Connect { .. }) => return Vec::new(),
        Err(error) => {
            let fix = "use a key of scope `admin`";
            return vec![Finding::new("data", Verdict::Absent, error.to_string(), Some(fix))];
        }
    };
    if found.is_empty() {
        return vec![Finding::new("data", Verdict::Ok, "no damage known", None)];
    }
    let finding = |damage: Damage| Finding {
        name: format!("data: {}", damage.kind.replace('_', " ")),
        verdict: Verdict::Weak,
        detail: format!("{}: {}", damage.subject, damage.detail),
        fix: Some(damage.consequence),
    };
    found.into_iter().map(finding).collect()
}

/// Starts a machine to see what the container driver can do. As another user than root that would
/// only say the same again.
async fn container(data: &Path) -> Vec<Finding> {
    if !rustix::process::geteuid().is_root() {
        return Vec::new();
    }
    let there = data.ancestors().find(|place| place.is_dir()).unwrap_or(Path::new("/"));
    let scratch = Scratch(there.join(format!(".keep-doctor-{}", std::process::id())));
    let agent = match host::install_agent(&scratch.0) {
        Ok(agent) => agent,
        Err(error) => {
            let detail = format!("cannot write to `{}`: {error}", there.display());
            let fix = "choose another directory with --data";
            return vec![Finding::new("container driver", Verdict::Missing, detail, Some(fix))];
        }
    };
    // Not the server's own places: it may be running.
    let config = host::container_config(agent, &host::scratch_mark(&scratch.0));
    let checks = probe(&config, there).await;
    let _ = std::fs::remove_dir(&config.run_dir);
    let finding = |check: Check| Finding {
        name: format!("container: {}", check.name),
        verdict: if check.ok { Verdict::Ok } else { Verdict::Missing },
        detail: check.detail,
        fix: check.fix,
    };
    checks.into_iter().map(finding).collect()
}

/// A directory that goes away however the check, or the setup, ends.
pub(super) struct Scratch(pub(super) PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        // What is left is named so that people can see whose it was.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::{Finding, Report, Verdict, control_groups_in, written};
    use crate::screen::Paint;

    #[test]
    fn a_kernel_that_does_not_limit_sockets_is_told() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["cpu", "memory", "pids"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
            std::fs::write(dir.path().join(name).join("cgroup.procs"), "").unwrap();
        }
        let weak = control_groups_in(dir.path());
        assert_eq!(weak.verdict, Verdict::Weak);
        assert!(weak.detail.contains("sockets"), "{}", weak.detail);
        let limit = dir.path().join("memory/memory.kmem.tcp.limit_in_bytes");
        std::fs::write(&limit, "").unwrap();
        assert_eq!(control_groups_in(dir.path()).verdict, Verdict::Ok);
        std::fs::remove_file(limit).unwrap();
        std::fs::write(dir.path().join("cgroup.controllers"), "cpu memory pids").unwrap();
        assert_eq!(control_groups_in(dir.path()).verdict, Verdict::Ok, "version 2 counts it");
    }

    #[test]
    fn a_fix_stands_below_what_it_fixes() {
        let findings = vec![
            Finding::new("user", Verdict::Ok, "root", None),
            Finding::new("kernel", Verdict::Missing, "Linux 4.4", Some("boot a newer one")),
        ];
        let report = Report { data: "/d".into(), fit: false, findings };
        assert_eq!(
            written(Paint::plain(), &report),
            "\
ok       user    root
MISSING  kernel  Linux 4.4
                 fix: boot a newer one

This host cannot run `keep serve` until what is MISSING is fixed.
"
        );
    }
}
