//! A disk with a volatile write cache that loses power, returns errors, hangs and fills up on demand.
//!
//! ```text
//! test ── control socket ── process that serves the disk
//!                              │ FUSE: one file, a durable base and unflushed writes (medium.rs)
//!                           loop device, direct I/O: the kernel's flushes arrive as fsync
//!                              │
//!                           ext4, XFS or Btrfs, mounted at [`FaultDisk::path`]
//! ```
//!
//! The disk is served by a process of its own: a test that hangs on its disk, panics or is killed cannot
//! take the disk's server with it, and the server takes the mounts, the loop device and the
//! directories down when the test is gone. That process is the test's own program, started again:
//! every test file that uses fault disks has the line
//!
//! ```ignore
//! sandkeep_testkit::fault_disk_process!();
//! ```
//!
//! and other programs call [`serve_if_asked`] first thing in `main`.
//!
//! A power cut takes three steps, in this order: [`FaultDisk::cut`] freezes the disk at that instant; the
//! test kills whatever used it; [`FaultDisk::power_on`] mounts what is left. Filesystems from before the
//! cut, should anything still hold them, get nothing but `EIO` and cannot change the disk any more.

mod attach;
mod medium;
mod protocol;
mod server;
mod service;
mod users;

use std::fs;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::fs::FallocateFlags;
use tempfile::TempDir;

pub use medium::Cut;
pub use protocol::{Fault, FaultId, Filesystem, Stats};

use protocol::{Reply, Request};
use users::Mounted;

/// Asks a program that is started to serve a disk, by its standard input.
const ASKED: &str = "SANDKEEP_FAULT_DISK";
/// The name of the test that [`fault_disk_process`](crate::fault_disk_process) adds.
const TEST: &str = "fault_disk_process";
/// Where the FUSE filesystem is mounted.
const FUSE_DIR: &str = "fuse";
/// Where the disk's own filesystem is mounted.
const FILESYSTEM_DIR: &str = "fs";
/// The file that fills the disk.
const BALLAST: &str = ".ballast";
/// How long the process may take for an answer. Far longer than it takes.
const PATIENCE: Duration = Duration::from_secs(120);
/// How large a disk is by default. Memory is only taken by what is written.
pub const DEFAULT_SIZE: u64 = 512 << 20;

/// Lets this test file have fault disks: adds the entry point of the process that serves them. Use it at
/// the root of the file.
#[macro_export]
macro_rules! fault_disk_process {
    () => {
        #[test]
        fn fault_disk_process() {
            $crate::fault_disk::serve_if_asked();
        }
    };
}

/// Serves a disk and returns true when it is over, if this process was started to do that. Returns false
/// at once otherwise.
///
/// # Panics
///
/// Panics when the test at the other end cannot be understood.
pub fn serve_if_asked() -> bool {
    if std::env::var_os(ASKED).is_none() {
        return false;
    }
    let control = rustix::io::dup(rustix::stdio::stdin()).expect("the control socket");
    server::serve(UnixStream::from(control)).expect("a test that speaks our protocol");
    true
}

/// Why fault disks cannot be made here, if they cannot. Say so with [`skipped`](crate::daemon::skipped).
#[must_use]
pub fn unfit() -> Option<String> {
    match rustix::process::geteuid().is_root() {
        true => attach::lacking(),
        false => Some("fault disks need root".to_owned()),
    }
}

/// A disk with a filesystem on it. Dropping it takes everything down.
#[derive(Debug)]
pub struct FaultDisk {
    filesystem: Filesystem,
    place: PathBuf,
    path: PathBuf,
    control: Mutex<Control>,
    mounted: Mutex<Option<Mounted>>,
}

#[derive(Debug)]
struct Control {
    process: Child,
    requests: UnixStream,
    replies: BufReader<UnixStream>,
}

impl FaultDisk {
    /// Makes a disk of [`DEFAULT_SIZE`] with a filesystem, and mounts it.
    ///
    /// # Panics
    ///
    /// Panics when it cannot be made; see [`unfit`].
    #[must_use]
    pub fn new(filesystem: Filesystem) -> Self {
        Self::with_size(filesystem, DEFAULT_SIZE)
    }

    /// Makes a disk of this size.
    ///
    /// # Panics
    ///
    /// Panics when it cannot be made; see [`unfit`].
    #[must_use]
    pub fn with_size(filesystem: Filesystem, size: u64) -> Self {
        let place = TempDir::with_prefix("keep-fault-").expect("a temporary directory").keep();
        let place = place.canonicalize().expect("our own directory");
        let control = Mutex::new(Control::start().expect("a process for the disk"));
        let path = place.join(FILESYSTEM_DIR);
        let mounted = Mutex::new(None);
        let disk = Self { filesystem, place: place.clone(), path, control, mounted };
        disk.done(&Request::Create { place, filesystem, size });
        disk.look();
        disk
    }

    /// Where the filesystem is mounted.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Which filesystem it is.
    #[must_use]
    pub const fn filesystem(&self) -> Filesystem {
        self.filesystem
    }

    /// Freezes the disk at this instant, and loses a random part of what was not flushed. Whatever hangs is
    /// released; from now on every request fails. Kill what uses the disk, then call
    /// [`power_on`](Self::power_on).
    pub fn cut(&self, seed: u64) -> Cut {
        match self.ask(&Request::Cut { seed }) {
            Reply::Cut(cut) => cut,
            other => panic!("cut: {other:?}"),
        }
    }

    /// Mounts the disk after a [`cut`](Self::cut), at the same path and without faults.
    pub fn power_on(&self) {
        self.done(&Request::PowerOn);
        self.look();
    }

    /// Kills every process but this one that runs from the disk or has a file of it open, and waits until
    /// they are gone. A sandbox's first process runs a program from its data directory, so this
    /// ends sandboxes too.
    pub fn kill_users(&self) {
        let mounted = self.mounted.lock().clone();
        if let Some(mounted) = mounted {
            mounted.kill_users();
        }
    }

    /// Remembers what is mounted, while it can be asked.
    fn look(&self) {
        let mounted = Mounted::find(&self.path);
        *self.mounted.lock() = mounted;
    }

    /// The whole of a power cut: [`cut`](Self::cut), [`kill_users`](Self::kill_users) and
    /// [`power_on`](Self::power_on).
    pub fn power_cut(&self, seed: u64) -> Cut {
        let cut = self.cut(seed);
        self.kill_users();
        self.power_on();
        cut
    }

    /// Unmounts the filesystem in good order and mounts it again, so that nothing is read from the page
    /// cache. Faults are healed.
    pub fn remount(&self) {
        self.done(&Request::Remount);
        self.look();
    }

    /// Lets something be wrong with the disk.
    pub fn inject(&self, fault: Fault) -> FaultId {
        match self.ask(&Request::Inject(fault)) {
            Reply::Injected(id) => id,
            other => panic!("inject: {other:?}"),
        }
    }

    /// Ends one fault; what hangs because of it continues.
    pub fn heal(&self, fault: FaultId) {
        self.done(&Request::Heal(fault));
    }

    /// Ends all faults.
    pub fn heal_all(&self) {
        self.done(&Request::HealAll);
    }

    /// What the disk has seen so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        match self.ask(&Request::Stats) {
            Reply::Stats(stats) => stats,
            other => panic!("stats: {other:?}"),
        }
    }

    /// Fills the filesystem up but for about `free` bytes.
    ///
    /// # Errors
    ///
    /// Returns what the system says, but for a disk that is full.
    pub fn fill(&self, free: u64) -> io::Result<()> {
        let ballast =
            fs::File::options().create(true).append(true).open(self.path.join(BALLAST))?;
        let mut step = 64 << 20;
        loop {
            let room = rustix::fs::statvfs(&self.path)?;
            let room = room.f_bavail * room.f_frsize;
            let more = room.saturating_sub(free).min(step);
            if more < 4096 {
                return Ok(());
            }
            let length = ballast.metadata()?.len();
            match rustix::fs::fallocate(&ballast, FallocateFlags::empty(), length, more) {
                Ok(()) => {}
                Err(rustix::io::Errno::NOSPC) => step = more / 2,
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Frees what [`fill`](Self::fill) took.
    ///
    /// # Errors
    ///
    /// Returns what the system says.
    pub fn empty(&self) -> io::Result<()> {
        match fs::remove_file(self.path.join(BALLAST)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn done(&self, request: &Request) {
        match self.ask(request) {
            Reply::Done => {}
            other => panic!("{request:?}: {other:?}"),
        }
    }

    fn ask(&self, request: &Request) -> Reply {
        let mut control = self.control.lock();
        match control.ask(request) {
            Ok(reply) => reply,
            Err(error) => panic!("{request:?}: {error}"),
        }
    }
}

impl Drop for FaultDisk {
    fn drop(&mut self) {
        let control = self.control.get_mut();
        // Processes that wait for the disk cannot be killed.
        let _ = control.ask(&Request::HealAll);
        self.kill_users();
        let control = self.control.get_mut();
        let closed = control.ask(&Request::Close);
        let _ = control.requests.shutdown(std::net::Shutdown::Both);
        let deadline = Instant::now() + Duration::from_secs(10);
        while Instant::now() < deadline && matches!(control.process.try_wait(), Ok(None)) {
            sleep(Duration::from_millis(5));
        }
        if matches!(control.process.try_wait(), Ok(None)) {
            let _ = control.process.kill();
            let _ = control.process.wait();
        }
        match closed {
            Ok(Reply::Closed(left)) if left.is_empty() => {}
            other => {
                let place = self.place.display();
                let _ = writeln!(io::stderr(), "fault disk {place} not all taken down: {other:?}");
                for at in [&self.path, &self.place.join(FUSE_DIR)] {
                    attach::unmount(at, Duration::ZERO);
                    let _ = fs::remove_dir(at);
                }
                let _ = fs::remove_dir(&self.place);
            }
        }
    }
}

impl Control {
    fn start() -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_read_timeout(Some(PATIENCE))?;
        ours.set_write_timeout(Some(PATIENCE))?;
        let process = Command::new(std::env::current_exe()?)
            .args(["--exact", TEST, "--nocapture", "--test-threads=1"])
            .env(ASKED, "1")
            // Under nextest it would be counted as a run of its own.
            .env_remove("NEXTEST_EXECUTION_MODE")
            // Outlives a test that is ended with its process group, and then cleans up.
            .process_group(0)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .spawn()?;
        let replies = BufReader::new(ours.try_clone()?);
        Ok(Self { process, requests: ours, replies })
    }

    fn ask(&mut self, request: &Request) -> io::Result<Reply> {
        let text = serde_json::to_string(request).map_err(io::Error::other)?;
        writeln!(self.requests, "{text}")?;
        let mut line = String::new();
        if self.replies.read_line(&mut line)? == 0 {
            let hint = "the disk's process ended; is `fault_disk_process!()` at the root of this test program?";
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, hint));
        }
        serde_json::from_str(&line).map_err(io::Error::other)
    }
}
