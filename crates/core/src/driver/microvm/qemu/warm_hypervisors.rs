//! The warm pool of hypervisors: QEMU processes that are started before a machine needs them.
//!
//! Most of the time that a restore takes is spent in the hypervisor: a large program is loaded, confined, and creates its devices. None of
//! that depends on the machine, only on its *kind*: its size and accelerator. So after a restore another hypervisor of that kind is
//! started, with empty devices and no memory. The next restore takes it over:
//!
//! ```text
//! warm hypervisor                         receives over its sockets
//!   devices without a medium       <---   descriptors of the disks, and which device shows which (QMP `qom-set`)
//!   empty RAM                      <---   a map and the page files (`ram.so`, thread `later`)
//!   initial device state           <---   the device state of the image, as in any restore
//! its sockets and its record       --->   are moved to the machine's directory; the record last
//! ```
//!
//! It is confined like every hypervisor, with a uid from a range that no sandbox has, in a control group with the limits of its kind, which
//! it keeps. Until the record has moved it is unassigned. From then on it belongs to the machine;
//! every call that finds one that was not resumed ends it. If anything fails before that, it is
//! ended and the machine starts without it.
//!
//! *Cost.* About 20 MB each. The [`WarmPool`] bounds their number. All of them end with the daemon, even if it is killed, because the
//! socket for their memory closes.

use std::fs::{self, File};
use std::io::{self, IoSlice, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use rustix::fs::FlockOperation;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use sandkeep_proto::cage::RECORD;
use sandkeep_proto::machine::{NET_DIR, QMP_SOCKET, RAM_AT, RAM_SOCKET, SOCKET};
use serde_json::json;

use super::{Accelerator, Beginning, DeviceSlot, Layout, Qmp, slots};
use crate::driver::host::{WARM_HYPERVISOR, broken, failed, lock, on_thread};
use crate::driver::microvm::lifecycle::{self, LOG, MachineOwner, Prepared};
use crate::driver::microvm::{Microvm, MicrovmDriver};
use crate::driver::{DriverResult, Machine};
use crate::model::{Fingerprint, Limits, MachineKey, Size};
use crate::warm_pool::{Maker, PoolLimits, WarmPool};

/// How long after the last start hypervisors are started: the machine that was just started comes first.
const AFTER: Duration = Duration::from_millis(200);
/// How long one is kept.
const AT_MOST: Duration = Duration::from_mins(15);
/// How many uids there are for warm hypervisors.
const UIDS: u32 = 1 << 16;
/// How many of them a daemon claims at once, see [`crate::driver::host::uid_claims`].
pub(crate) const CLAIMED_UIDS: u32 = 1 << 8;
/// How long one may take to map its RAM.
const PATIENCE: Duration = Duration::from_secs(20);
/// How many kinds are kept.
const KINDS: usize = 4;
/// The files that move to the machine's directory, before the record does.
const MOVED: [&str; 5] = [LOG, RAM_AT, QMP_SOCKET, SOCKET, NET_DIR];
/// The most descriptors in one message.
const DESCRIPTORS: usize = 65;

/// Which machines can use a hypervisor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HypervisorKind {
    /// The hypervisor, the kernel, the processor and the size.
    fingerprint: String,
    accelerator: Accelerator,
    millicpus: u32,
    memory: Size,
    disk: u64,
}

impl HypervisorKind {
    pub(crate) fn of(limits: &Limits, accelerator: Accelerator, fingerprint: &Fingerprint) -> Self {
        Self {
            fingerprint: fingerprint.key(),
            accelerator,
            millicpus: limits.millicpus,
            memory: limits.memory,
            disk: Microvm::disk_size(limits),
        }
    }

    fn limits(&self) -> Limits {
        let Self { millicpus, memory, disk, .. } = *self;
        Limits { millicpus, memory, pids: 0, file_size: Size(disk) }
    }
}

/// A hypervisor that is not assigned to a machine.
#[derive(Debug)]
pub(crate) struct WarmHypervisor {
    key: MachineKey,
    qmp: Qmp,
    /// The serial port of the machine to be.
    line: UnixStream,
    /// The connection over which it gets its RAM, and which keeps it alive until then.
    ram: UnixStream,
}

/// The warm hypervisors of a driver.
#[derive(Debug)]
pub(crate) struct HypervisorPool {
    pub(crate) pool: Arc<WarmPool<HypervisorKind, WarmHypervisor>>,
    /// The prefix of the keys of this pool.
    mark: String,
    count: AtomicUsize,
    /// The block of uids to try first.
    first_block: u32,
}

impl HypervisorPool {
    /// A pool of up to `most` of each kind.
    pub(crate) fn new(most: usize) -> Self {
        // Process ids repeat: that of a daemon in a container is always the same.
        let mut random = [0; 6];
        getrandom::fill(&mut random).expect("the kernel gives random bytes");
        let mark = hex::encode(random);
        Self {
            pool: WarmPool::new(PoolLimits {
                per_kind: most,
                kinds: KINDS,
                quiet: AFTER,
                idle: AT_MOST,
            }),
            mark: format!("{WARM_HYPERVISOR}{mark}-"),
            count: AtomicUsize::default(),
            // Their uids go by it: not everybody's begin with the same.
            first_block: u32::from(random[0]),
        }
    }

    /// Whether a key is of this pool.
    pub(crate) fn is_ours(&self, key: &MachineKey) -> bool {
        key.as_str().starts_with(&self.mark)
    }
}

impl MicrovmDriver {
    /// How many hypervisors are in the warm pool.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.inner.warm.pool.waiting()
    }
}

#[async_trait]
impl Maker<HypervisorKind, WarmHypervisor> for Microvm {
    async fn make(self: Arc<Self>, kind: HypervisorKind) -> Option<WarmHypervisor> {
        let work = move |microvm: &Self| microvm.make_warm(&kind);
        let made = on_thread(&self, self.host.run_dir(), work).await;
        made.inspect_err(|error| {
            tracing::warn!(%error, "could not start a hypervisor for the warm pool");
        })
        .ok()
    }

    async fn discard(self: Arc<Self>, warm: WarmHypervisor) {
        let work = move |microvm: &Self| {
            microvm.stop_all(&[warm]);
            Ok(())
        };
        let _ = on_thread(&self, self.host.run_dir(), work).await;
    }
}

impl Microvm {
    /// Closes the pool and ends all hypervisors in it.
    pub(crate) fn close_warm_pool(&self) {
        self.stop_all(&self.warm.pool.close_within(PATIENCE));
    }

    fn stop_all(&self, hypervisors: &[WarmHypervisor]) {
        for WarmHypervisor { key, .. } in hypervisors {
            if let Err(error) = self.stop(key) {
                tracing::warn!(warm = %key, %error, "could not stop a warm hypervisor");
            }
        }
    }

    fn make_warm(&self, kind: &HypervisorKind) -> DriverResult<WarmHypervisor> {
        let number = self.warm.count.fetch_add(1, Ordering::Relaxed);
        let key = MachineKey::parse(&format!("{}{number}", self.warm.mark));
        let key = key.ok_or_else(|| broken("name a warm hypervisor", &"the key is invalid"))?;
        let lock = self.host.claim(&key)?;
        let made = self.launch_warm(&key, number, kind);
        if made.is_err() {
            drop(lock);
            let _ = self.stop(&key);
            // It was not assigned to a machine.
            let _ = self.host.groups.remove(&key);
        }
        made
    }

    fn launch_warm(
        &self,
        key: &MachineKey,
        number: usize,
        kind: &HypervisorKind,
    ) -> DriverResult<WarmHypervisor> {
        let (run_dir, limits) = (self.host.directory(key), kind.limits());
        let calls = listen(&run_dir).map_err(failed("listen in", &run_dir))?;
        let layout = Layout {
            shape: Self::shape(&limits, kind.accelerator),
            // The MAC address of the machine is part of its memory.
            mac: [2, 0, 0, 0, 0, 0],
            disk: None,
            lower: Vec::new(),
            mounts: Vec::new(),
            ram_at: run_dir.join(RAM_AT),
            beginning: Beginning::Later,
        };
        let uid = self.warm_uid(number)?;
        let owner = MachineOwner { key, hostname: "spare", uid, limits: &limits };
        let (_log, launched) = self.hypervisor_of(&owner, &layout)?;
        let ready = launched.and_then(|(mut qmp, line)| {
            qmp.await_machine()?;
            // It connected before it was confined.
            let (ram, _) = calls.accept()?;
            ram.set_read_timeout(Some(PATIENCE))?;
            Ok(WarmHypervisor { key: key.clone(), qmp, line, ram })
        });
        ready.map_err(|error| broken("start a warm hypervisor", &error))
    }

    /// A uid that no hypervisor on this host has, and that none of this pool had recently.
    fn warm_uid(&self, number: usize) -> DriverResult<u32> {
        let taken: Vec<u32> =
            self.host.records().into_iter().filter_map(|record| record.uid).collect();
        let number = u32::try_from(number % CLAIMED_UIDS as usize).unwrap_or_default();
        let blocks = UIDS / CLAIMED_UIDS;
        for block in (0..blocks).map(|next| (self.warm.first_block + next) % blocks) {
            let start = self.config.warm_uids + block * CLAIMED_UIDS;
            let ids = start..start.saturating_add(CLAIMED_UIDS);
            if !self
                .uids
                .claim(&ids)
                .map_err(|error| broken("claim uids for warm hypervisors", &error))?
            {
                continue;
            }
            let mut all = (0..CLAIMED_UIDS).map(|next| start + (number + next) % CLAIMED_UIDS);
            if let Some(free) = all.find(|uid| !taken.contains(uid)) {
                return Ok(free);
            }
        }
        Err(broken("start a warm hypervisor", &"all uids for warm hypervisors are in use"))
    }

    /// Uses a warm hypervisor for the machine, if there is one, and returns its serial port. An error means that the machine cannot
    /// start. A failure of the warm hypervisor alone is `None`.
    pub(crate) fn use_warm(
        &self,
        machine: &Machine,
        image: &[PathBuf],
        first: &[u8],
        prepared: &Prepared,
    ) -> DriverResult<Option<UnixStream>> {
        let Beginning::Memory { map, pages } = &prepared.layout.beginning else { return Ok(None) };
        let (Some(top), true) = (image.first(), machine.mounts.is_empty()) else {
            return Ok(None);
        };
        let accelerator = prepared.layout.shape.accelerator;
        let kind = HypervisorKind::of(&machine.limits, accelerator, &prepared.plan.fingerprint);
        let Some(mut warm) = self.warm.pool.take(&kind) else { return Ok(None) };
        let began = Instant::now();
        let theirs = self.host.directory(&warm.key);
        let Ok(Some(held)) = lock(&theirs, FlockOperation::LockShared) else { return Ok(None) };
        let (mut disks, mut ram) = (Duration::ZERO, Duration::ZERO);
        let prepared_vm = attach_disks(&mut warm.qmp, &slots(&prepared.layout))
            .inspect(|()| disks = began.elapsed())
            .and_then(|()| send_ram(&warm.ram, map, pages))
            .inspect(|()| ram = began.elapsed())
            .and_then(|()| lifecycle::load(&mut warm.qmp, &top.join("devices")));
        let devices = began.elapsed();
        let ours = self.host.directory(&machine.key);
        let handed = prepared_vm.and_then(|()| hand_over(&theirs, &ours));
        if let Err(error) = handed {
            tracing::warn!(machine = %machine.key, error = %error, "could not use a warm hypervisor");
            drop(held);
            if let Err(error) = self.stop(&warm.key) {
                tracing::error!(warm = %warm.key, error = %error, "could not stop a warm hypervisor");
            }
            remove_moved(&ours);
            return Ok(None);
        }
        // From here on it belongs to the machine.
        let going = (&warm.ram)
            .write_all(b"g")
            .and_then(|()| (&warm.line).write_all(first))
            .and_then(|()| lifecycle::set_going(&mut warm.qmp, &ours, &prepared.plan));
        tracing::debug!(machine = %machine.key, warm = %warm.key, ?disks, ?ram, ?devices, going = ?began.elapsed(), "assigned a warm hypervisor");
        going.map(|()| Some(warm.line)).map_err(failed("hand a hypervisor over to", &ours))
    }
}

impl Drop for Microvm {
    fn drop(&mut self) {
        self.close_warm_pool();
    }
}

/// Attaches disks to the empty devices.
fn attach_disks(qmp: &mut Qmp, slots: &[DeviceSlot]) -> io::Result<()> {
    for slot in slots {
        let mut sets = Vec::new();
        for (number, path) in (1..).zip(&slot.files) {
            let write = slot.write && number == slot.files.len();
            let file = File::options().read(true).write(write).open(path)?;
            sets.push(qmp.take(file.as_fd())?);
        }
        qmp.ask("blockdev-add", slot.options(&sets))?;
        let path = format!("/machine/peripheral/{}", slot.serial);
        qmp.ask("qom-set", json!({"path": path, "property": "drive", "value": slot.node}))?;
    }
    Ok(())
}

/// Sends a warm hypervisor the map and the page files of its RAM.
fn send_ram(mut ram: &UnixStream, map: &Path, pages: &[PathBuf]) -> io::Result<()> {
    let mut files = vec![File::open(map)?];
    for path in pages {
        files.push(File::open(path)?);
    }
    let descriptors: Vec<BorrowedFd<'_>> = files.iter().map(|file| file.as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(io::Error::other("the image has too many layers"));
    }
    rustix::net::sendmsg(ram, &[IoSlice::new(b"m")], &mut control, SendFlags::NOSIGNAL)?;
    let mut answer = [0];
    ram.read_exact(&mut answer)
}

/// Moves the files of a warm hypervisor to the machine's directory. It belongs to the machine once its record has moved.
pub(crate) fn hand_over(theirs: &Path, ours: &Path) -> io::Result<()> {
    for name in MOVED.iter().chain(&[RECORD]) {
        fs::rename(theirs.join(name), ours.join(name))?;
    }
    // Best effort: an empty directory does no harm.
    let _ = fs::remove_dir_all(theirs);
    Ok(())
}

/// Removes the files of a warm hypervisor from the directory of a machine that could not use it.
fn remove_moved(ours: &Path) {
    for name in MOVED {
        let path = ours.join(name);
        let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir_all(&path));
    }
}

/// Listens for the connection over which a warm hypervisor receives its RAM.
fn listen(run_dir: &Path) -> io::Result<UnixListener> {
    // Not by the path itself: it may be longer than a socket's address can be.
    let directory = File::open(run_dir)?;
    UnixListener::bind(format!("/proc/self/fd/{}/{RAM_SOCKET}", directory.as_raw_fd()))
}
