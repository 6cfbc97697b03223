//! Processes that use a disk.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal};

/// How long killed processes may take to be gone.
const PATIENCE: Duration = Duration::from_secs(10);

/// Kills what uses the filesystem mounted at `at`, again and again until nothing does.
pub(super) fn kill(at: &Path) {
    let Ok(device) = fs::metadata(at).map(|found| found.dev()) else { return };
    // Nothing is mounted there: this is not the disk but the directory below it.
    if at
        .parent()
        .and_then(|above| fs::metadata(above).ok())
        .is_none_or(|above| above.dev() == device)
    {
        return;
    }
    let deadline = Instant::now() + PATIENCE;
    loop {
        let users = users(device);
        if users.is_empty() || Instant::now() > deadline {
            return;
        }
        for process in users {
            // Held, so that the number cannot come to mean another; then looked at once more.
            let Ok(handle) = rustix::process::pidfd_open(process, PidfdFlags::empty()) else {
                continue;
            };
            if uses(&directory(process), device) {
                let _ = rustix::process::pidfd_send_signal(handle, Signal::KILL);
            }
        }
        sleep(Duration::from_millis(5));
    }
}

fn directory(process: Pid) -> PathBuf {
    Path::new("/proc").join(process.as_raw_nonzero().to_string())
}

fn users(device: u64) -> Vec<Pid> {
    let ours = rustix::process::getpid();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let number = |entry: fs::DirEntry| entry.file_name().to_str()?.parse().ok();
    let processes = entries.filter_map(number).filter_map(Pid::from_raw);
    processes.filter(|process| *process != ours && uses(&directory(*process), device)).collect()
}

fn uses(process: &Path, device: u64) -> bool {
    let on_it = |path: PathBuf| fs::metadata(path).is_ok_and(|found| found.dev() == device);
    let files = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
    ["exe", "cwd", "root"].into_iter().any(|name| on_it(process.join(name)))
        || files.into_iter().any(|file| on_it(file.path()))
}
