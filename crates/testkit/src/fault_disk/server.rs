//! The process that serves one disk, until its test lets go of it.

use std::fs;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

use fuser::{BackgroundSession, Config, MountOption};

use super::medium::Medium;
use super::protocol::{Filesystem, Reply, Request};
use super::service::Service;
use super::{FILESYSTEM_DIR, FUSE_DIR, attach};

/// How long a filesystem may be busy before it is detached instead.
const BUSY: Duration = Duration::from_secs(5);
/// The same after a cut: nothing is lost by detaching then.
const BUSY_AFTER_CUT: Duration = Duration::from_secs(1);

/// The unit in which writes tear. Btrfs relies on blocks of 4 KiB, as all disks sold today have.
const fn sector(filesystem: Filesystem) -> usize {
    match filesystem {
        Filesystem::Ext4 | Filesystem::Ext4NoAutoDaAlloc | Filesystem::Xfs => 512,
        Filesystem::Btrfs => 4096,
    }
}

/// Serves the disk that the process at the other end of `control` asks for, and takes everything down when
/// that process says so or is gone.
pub(super) fn serve(control: UnixStream) -> io::Result<()> {
    let mut answers = control.try_clone()?;
    let mut disk = None;
    for line in BufReader::new(control).lines() {
        let Ok(line) = line else { break };
        let request = serde_json::from_str(&line).map_err(io::Error::other)?;
        let closing = matches!(request, Request::Close);
        let reply = handle(&mut disk, request).unwrap_or_else(Reply::Failed);
        let text = serde_json::to_string(&reply).map_err(io::Error::other)?;
        if writeln!(answers, "{text}").is_err() || closing {
            break;
        }
    }
    if let Some(disk) = disk.take() {
        let _ = disk.close();
    }
    Ok(())
}

fn handle(disk: &mut Option<Disk>, request: Request) -> Result<Reply, String> {
    if let Request::Create { place, filesystem, size } = request {
        let made = disk.insert(Disk::new(place, filesystem, size)?);
        return made.begin(true).map(|()| Reply::Done);
    }
    if matches!(request, Request::Close) {
        let left = disk.take().map(Disk::close).unwrap_or_default();
        return Ok(Reply::Closed(left));
    }
    let Some(disk) = disk else { return Err("there is no disk yet".to_owned()) };
    match request {
        Request::Cut { seed } => {
            disk.service.cut(seed).map(Reply::Cut).map_err(|error| error.to_string())
        }
        Request::PowerOn => {
            disk.service.power_off();
            attach::unmount(&disk.filesystem_dir(), BUSY_AFTER_CUT);
            disk.begin(false).map(|()| Reply::Done)
        }
        Request::Remount => disk.remount().map(|()| Reply::Done),
        Request::Inject(fault) => Ok(Reply::Injected(disk.service.inject(fault))),
        Request::Heal(which) => {
            disk.service.heal(|id| id == which);
            Ok(Reply::Done)
        }
        Request::HealAll => {
            disk.service.heal(|_| true);
            Ok(Reply::Done)
        }
        Request::Stats => Ok(Reply::Stats(disk.service.stats())),
        Request::Create { .. } | Request::Close => Ok(Reply::Done),
    }
}

struct Disk {
    place: PathBuf,
    filesystem: Filesystem,
    service: Service,
    /// Serves the file while it exists.
    session: BackgroundSession,
    /// Loop devices of all generations.
    devices: Vec<PathBuf>,
}

impl Disk {
    fn new(place: PathBuf, filesystem: Filesystem, size: u64) -> Result<Self, String> {
        let said = |error: io::Error| error.to_string();
        for name in [FUSE_DIR, FILESYSTEM_DIR] {
            fs::create_dir(place.join(name)).map_err(said)?;
        }
        let service = Service::new(Medium::new(size, sector(filesystem)).map_err(said)?);
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("keep-fault-disk".to_owned())];
        let session = fuser::spawn_mount(service.clone(), place.join(FUSE_DIR), &config);
        let session = session.map_err(|error| format!("mount of FUSE: {error}"))?;
        let clock = service.clone();
        spawn(move || {
            loop {
                sleep(Duration::from_millis(10));
                clock.expire();
            }
        });
        Ok(Self { place, filesystem, service, session, devices: Vec::new() })
    }

    fn filesystem_dir(&self) -> PathBuf {
        self.place.join(FILESYSTEM_DIR)
    }

    /// Powers the disk on and mounts it.
    fn begin(&mut self, new: bool) -> Result<(), String> {
        let file = self.place.join(FUSE_DIR).join(self.service.power_on());
        let device = attach::attach(&file)?;
        self.devices.push(device.clone());
        let mounted = (if new { attach::make(self.filesystem, &device) } else { Ok(()) })
            .and_then(|()| attach::mount(self.filesystem, &device, &self.filesystem_dir()));
        // It goes with the mount from now on, whatever becomes of this process.
        attach::detach(&device);
        mounted
    }

    fn remount(&mut self) -> Result<(), String> {
        let in_order = attach::unmount(&self.filesystem_dir(), BUSY);
        self.service.power_off();
        if !in_order {
            return Err("the filesystem is in use".to_owned());
        }
        self.begin(false)
    }

    /// Takes everything down and says what is left.
    fn close(self) -> Vec<String> {
        let (filesystem, fuse) = (self.filesystem_dir(), self.place.join(FUSE_DIR));
        self.service.heal(|_| true);
        attach::unmount(&filesystem, BUSY);
        // Users that still have it open must not wait for a process that is no more.
        self.service.power_off();
        let deadline = Instant::now() + Duration::from_secs(5);
        let held = |device: &&PathBuf| attach::is_attached(device, &self.place);
        while self.devices.iter().any(|device| held(&device)) && Instant::now() < deadline {
            sleep(Duration::from_millis(10));
        }
        let held = self.devices.iter().filter(held);
        let mut left: Vec<String> = held.map(|device| device.display().to_string()).collect();
        attach::unmount(&fuse, BUSY_AFTER_CUT);
        for place in [&filesystem, &fuse, &self.place] {
            if let Err(error) = fs::remove_dir(place) {
                left.push(format!("{}: {error}", place.display()));
            }
        }
        drop(self.session);
        left
    }
}
