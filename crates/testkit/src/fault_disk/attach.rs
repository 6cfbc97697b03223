//! A filesystem on a file: loop device, mkfs, mount. All by the system's own programs, because a thread
//! that hangs in `mount` or `umount` must not be one of the process that serves the disk.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::protocol::Filesystem;

/// Programs this needs, and the Debian packages that have them.
const PROGRAMS: [(&str, &str); 6] = [
    ("losetup", "mount"),
    ("mount", "mount"),
    ("umount", "mount"),
    ("mkfs.ext4", "e2fsprogs"),
    ("mkfs.xfs", "xfsprogs"),
    ("mkfs.btrfs", "btrfs-progs"),
];

/// Why fault disks cannot be made on this host, if they cannot.
pub(super) fn lacking() -> Option<String> {
    for (program, package) in PROGRAMS {
        if !on_path(program) {
            return Some(format!("fault disks need `{program}`: install {package}"));
        }
    }
    for device in ["/dev/fuse", "/dev/loop-control"] {
        if !Path::new(device).exists() {
            return Some(format!("fault disks need {device}"));
        }
    }
    None
}

fn on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(usual).any(|place| place.join(program).is_file())
}

/// Attaches a loop device to `file` and returns its path. Direct I/O: a page cache below the loop device
/// would answer reads that the disk should see.
pub(super) fn attach(file: &Path) -> Result<PathBuf, String> {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let options = ["--find", "--show", "--direct-io=on"].map(OsStr::new);
        match run("losetup", options.into_iter().chain([file.as_os_str()])) {
            Ok(device) => return Ok(PathBuf::from(device.trim())),
            // Another test took the free one first.
            Err(error) if Instant::now() > deadline => return Err(error),
            Err(_) => sleep(Duration::from_millis(50)),
        }
    }
}

/// Lets go of a loop device, now or when its filesystem is unmounted.
pub(super) fn detach(device: &Path) {
    let _ = run("losetup", [OsStr::new("--detach"), device.as_os_str()]);
}

/// Whether a loop device still has a file below `place`.
pub(super) fn is_attached(device: &Path, place: &Path) -> bool {
    let Some(name) = device.file_name() else { return false };
    let file = Path::new("/sys/block").join(name).join("loop/backing_file");
    fs::read_to_string(file).is_ok_and(|text| Path::new(text.trim()).starts_with(place))
}

pub(super) fn make(filesystem: Filesystem, device: &Path) -> Result<(), String> {
    // Nothing is left to be done in the background after the mount: it would blur what tests see.
    let (program, options): (&str, &[&str]) = match filesystem {
        Filesystem::Ext4 | Filesystem::Ext4NoAutoDaAlloc => (
            "mkfs.ext4",
            &["-q", "-F", "-m", "0", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0"],
        ),
        Filesystem::Xfs => ("mkfs.xfs", &["-q", "-f", "-K"]),
        Filesystem::Btrfs => ("mkfs.btrfs", &["-q", "-f", "-K"]),
    };
    let options = options.iter().map(OsStr::new);
    run(program, options.chain([device.as_os_str()])).map(drop)
}

/// Mounts a device; replays the filesystem's journal. Repairs it first if it cannot be mounted otherwise, as a host
/// does when it boots.
pub(super) fn mount(filesystem: Filesystem, device: &Path, at: &Path) -> Result<(), String> {
    let (kind, options) = match filesystem {
        Filesystem::Ext4 => ("ext4", "errors=remount-ro"),
        Filesystem::Ext4NoAutoDaAlloc => ("ext4", "errors=remount-ro,noauto_da_alloc"),
        // After a cut the instance from before it may not be gone yet.
        Filesystem::Xfs => ("xfs", "nouuid"),
        Filesystem::Btrfs => ("btrfs", "nodiscard"),
    };
    let args = ["-t", kind, "-o", options].map(OsStr::new);
    let mount = || run("mount", args.into_iter().chain([device.as_os_str(), at.as_os_str()]));
    let Err(error) = mount() else { return Ok(()) };
    if kind == "ext4" {
        // Its exit code says what was repaired; the next mount says whether that was enough.
        let repair = ["-f", "-y"].map(OsStr::new);
        let _ = run("e2fsck", repair.into_iter().chain([device.as_os_str()]));
        return mount().map(drop).map_err(|again| format!("{error}; after a repair: {again}"));
    }
    Err(error)
}

/// Unmounts, in good order if nothing uses it after `patience`, otherwise from sight only. Says which.
pub(super) fn unmount(at: &Path, patience: Duration) -> bool {
    let deadline = Instant::now() + patience;
    while is_mounted(at) {
        if run("umount", [at.as_os_str()]).is_ok() {
            continue;
        }
        if Instant::now() > deadline {
            let _ = run("umount", [OsStr::new("--lazy"), at.as_os_str()]);
            return false;
        }
        sleep(Duration::from_millis(20));
    }
    true
}

pub(super) fn is_mounted(at: &Path) -> bool {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    table.lines().filter_map(|line| line.split(' ').nth(4)).any(|point| Path::new(point) == at)
}

fn run<'a>(program: &str, args: impl IntoIterator<Item = &'a OsStr>) -> Result<String, String> {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null());
    let output = command.output().map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(format!("{program}: {}: {said}", output.status))
}
