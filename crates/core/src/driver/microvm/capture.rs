//! Captures: a machine's memory, devices and disk at one moment.
//!
//! ```text
//! sync the topmost disk                while it runs, so that there is less to do when it stands
//! stop
//! pages and index                      what differs from the layers below
//! put a fresh disk on top, then link the one below it
//! devices
//! cont, or hold
//! sync everything
//! ```
//!
//! The fresh disk is the one step that cannot be taken back. What can fail for want of room comes before it: pages are
//! written, and room for the devices is set aside. Only then is the disk linked into the layer: one that has two names is never
//! written again. If a later step fails all the same, the machine continues on two disks that no
//! image has. A layer has room for one of them, so later captures are refused until the machine has
//! been stopped.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, FlockOperation};
use sandkeep_proto::machine::{DISK, RAM_AT};
use serde_json::{Value, json};

use super::disk::{self, LAYER_DISK, qcow2};
use super::memory::{PagesWritten, capture_pages, is_whole};
use super::qemu::Qmp;
use super::{MachinePlan, Microvm};
use crate::driver::host::{broken, lock};
use crate::driver::{Captured, DriverError, DriverResult, Then};
use crate::model::{MachineKey, Reserve, Size};

/// Far more than devices take.
const DEVICES: u64 = 4 << 20;

/// A machine that is being captured.
struct Subject<'a> {
    pid: u32,
    run_dir: PathBuf,
    plan: &'a MachinePlan,
    below: &'a [PathBuf],
    into: &'a Path,
    reserve: Reserve,
}

impl Microvm {
    pub(super) fn capture(
        &self,
        key: &MachineKey,
        into: &Path,
        below: &[PathBuf],
        then: Then,
    ) -> DriverResult<Captured> {
        let run_dir = self.host.directory(key);
        let _lock = lock(&run_dir, FlockOperation::LockShared)?;
        let (record, plan, _process) = self.demand(key)?;
        let reserve = self.config.reserve;
        let subject = Subject { pid: record.pid, run_dir, plan: &plan, below, into, reserve };
        let (pages, stood) = subject.take(then).map_err(|error| match error.kind() {
            io::ErrorKind::StorageFull => DriverError::NoRoom { reason: error.to_string() },
            _ => broken("capture the machine", &error),
        })?;
        Ok(Captured {
            ram: plan.fingerprint.memory,
            fingerprint: plan.fingerprint,
            pages,
            stood,
            roots: plan.roots,
        })
    }
}

impl Subject<'_> {
    fn take(&self, then: Then) -> io::Result<(u64, Duration)> {
        let devices = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(self.into.join("devices"))?;
        // Where the filesystem cannot set room aside, the capture may fail later.
        let _ = rustix::fs::fallocate(&devices, FallocateFlags::KEEP_SIZE, 0, DEVICES);
        let mut qmp = Qmp::connect(&self.run_dir)?;
        let top = self.top(&mut qmp)?;
        File::open(&top.path)?.sync_data()?;
        let ran = qmp.is_running()?;
        let began = Instant::now();
        let mut stopped =
            SuspendedForCapture { qmp: Some(qmp), run_dir: &self.run_dir, resume: ran };
        let captured = match &mut stopped.qmp {
            Some(qmp) => {
                qmp.ask("stop", json!({})).and_then(|_| self.standing(qmp, &top, &devices))
            }
            None => Err(io::ErrorKind::NotConnected.into()),
        };
        let resumed = match then == Then::Continue || captured.is_err() {
            true => stopped.resume(),
            false => {
                stopped.resume = false;
                Ok(())
            }
        };
        let stood = began.elapsed();
        let pages = captured?;
        resumed?;
        pages.sync()?;
        // What was set aside and not used is given back.
        devices.set_len(devices.metadata()?.len())?;
        devices.sync_all()?;
        File::open(self.into.join(LAYER_DISK))?.sync_all()?;
        File::open(&self.plan.disk_dir)?.sync_all()?;
        File::open(self.into)?.sync_all()?;
        Ok((pages.pages, stood))
    }

    /// The steps that run while the machine is suspended.
    fn standing(&self, qmp: &mut Qmp, top: &Top, devices: &File) -> io::Result<PagesWritten> {
        let mut at = String::new();
        // The hypervisor can write to it, so no more is believed of it than it should hold.
        File::open(self.run_dir.join(RAM_AT))?.take(32).read_to_string(&mut at)?;
        let at = u64::from_str_radix(at.trim(), 16).map_err(io::Error::other)?;
        // A machine that was booted has nothing in common with the memory of the image whose disk it was booted on.
        let own = self.below.len().saturating_sub(self.plan.image);
        let of_memory = match self.plan.restored {
            true => self.below,
            false => whole(&self.below[..own])?,
        };
        let Size(ram) = self.plan.fingerprint.memory;
        let pages = capture_pages(self.pid, at, ram, of_memory, self.into, self.reserve)?;
        self.put_on_top(qmp, top)?;
        fs::hard_link(&top.path, self.into.join(LAYER_DISK))?;
        qmp.leave_ram()?;
        qmp.ask_with("getfd", json!({"fdname": "devices"}), devices.as_fd())?;
        qmp.ask("migrate", json!({"uri": "fd:devices"}))?;
        qmp.migrated()?;
        Ok(pages)
    }

    /// The disk that the machine writes to now, if it can be captured.
    fn top(&self, qmp: &mut Qmp) -> io::Result<Top> {
        let listed = qmp.ask("query-block", json!({}))?;
        let ours = |entry: &&Value| {
            let owner = entry["qdev"].as_str().unwrap_or_default();
            owner == DISK || owner.split('/').any(|part| part == DISK)
        };
        let entry = listed.as_array().and_then(|list| list.iter().find(ours));
        let node = entry.and_then(|entry| entry["inserted"]["node-name"].as_str());
        let number = node.and_then(|node| node.strip_prefix("disk-")?.parse().ok());
        let number = number.ok_or_else(|| io::Error::other("its disk is not known"))?;
        let mut captured = Vec::new();
        for layer in self.below {
            captured.push(disk::inode(&layer.join(LAYER_DISK))?);
        }
        for (other, path) in disk::session(&self.plan.disk_dir)? {
            if other < number && !captured.contains(&disk::inode(&path)?) {
                let why = "an earlier capture broke off, or the session it goes on with did: \
                           it can be captured again after a stop";
                return Err(io::Error::other(why));
            }
        }
        let path = self.plan.disk_dir.join(disk::file(number));
        Ok(Top { number, size: qcow2::size(&path)?, path })
    }

    /// Has the machine write to a fresh disk from now on.
    fn put_on_top(&self, qmp: &mut Qmp, top: &Top) -> io::Result<()> {
        let (number, below) = (top.number + 1, disk::node("disk", top.number));
        let path = self.plan.disk_dir.join(disk::file(number));
        // One that a daemon made, and did not live to put there.
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        qcow2::create(&path, top.size)?;
        // After an error it stays: the hypervisor may have it in use, and an empty one does no
        // harm.
        self.attach(qmp, &path, &disk::node("disk", number), &below)
    }

    fn attach(&self, qmp: &mut Qmp, path: &Path, node: &str, below: &str) -> io::Result<()> {
        let file = File::options().read(true).write(true).open(path)?;
        let set = qmp.take(file.as_fd())?;
        let file =
            json!({"driver": "file", "filename": format!("/dev/fdset/{set}"), "locking": "off"});
        let fresh = json!({"driver": "qcow2", "node-name": node, "file": file, "backing": null,
                           "discard": "unmap"});
        qmp.ask("blockdev-add", fresh)?;
        let put = qmp.ask("blockdev-snapshot", json!({"node": below, "overlay": node}));
        if put.is_err() {
            let _ = qmp.ask("blockdev-del", json!({"node-name": node}));
        }
        put.map(drop)
    }
}

/// A machine that was stopped to be captured. It resumes when this is dropped, also by a panic:
/// nothing else knows that it is stopped.
struct SuspendedForCapture<'a> {
    qmp: Option<Qmp>,
    run_dir: &'a Path,
    /// Whether it ran before.
    resume: bool,
}

impl SuspendedForCapture<'_> {
    fn resume(&mut self) -> io::Result<()> {
        if !std::mem::take(&mut self.resume) {
            return Ok(());
        }
        let told = self.qmp.take().map(|mut qmp| qmp.ask("cont", json!({})));
        match told {
            Some(Ok(_)) => Ok(()),
            // An answer may be half read. The hypervisor serves one at a time: the first connection is closed by now.
            _ => Qmp::connect(self.run_dir)?.ask("cont", json!({})).map(drop),
        }
    }
}

impl Drop for SuspendedForCapture<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.resume() {
            tracing::error!(machine = %self.run_dir.display(), %error, "a VM was not resumed after a capture");
        }
    }
}

/// The layers, if all pages of theirs are in them. Of a machine that was booted the first capture has everything; until there is one
/// that was kept, the next has to have it.
fn whole(layers: &[PathBuf]) -> io::Result<&[PathBuf]> {
    for layer in layers {
        if is_whole(layer)? {
            return Ok(layers);
        }
    }
    Ok(&[])
}

/// The disk that a machine writes to.
struct Top {
    number: u32,
    size: u64,
    path: PathBuf,
}
