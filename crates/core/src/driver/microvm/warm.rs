//! Hypervisors that wait for a machine.
//!
//! Most of the time it takes to restore a machine is its hypervisor's: a large program is loaded, confined, and makes its
//! devices. None of that depends on the machine, only on its *kind*: its size, and what it is run by. So after a machine was
//! restored another hypervisor of its kind is started, with empty devices and no memory, and the next one takes it over:
//!
//! ```text
//! spare                                   what it is told, over its sockets
//!   devices with nothing in them   <---   descriptors of the disks, and which device shows which (QMP `qom-set`)
//!   RAM that is empty              <---   a map and the files of pages (`ram.so`, thread `later`)
//!   devices' state                 <---   the image's, as always
//! its sockets and its record       --->   are moved to the machine's directory; the record last
//! ```
//!
//! It is confined as all hypervisors are, as a user of its own from a range that no sandbox has, in a control group with the limits of its
//! kind, which it keeps. Until the record has moved it is nobody's; from then on it is the machine's, and one that was not set
//! going is ended by whoever finds it. If anything fails before, it is ended and the machine starts as if there had been none.
//!
//! *What they cost.* A spare holds about 20 MB. They are in a [`WarmPool`], which bounds their number. All of them end with the
//! daemon, however that ends: their memory's socket is closed then.

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

use super::life::{self, LOG, Owner, Prepared};
use super::qemu::{Accelerator, Beginning, Layout, Slot, slots};
use super::qmp::Qmp;
use super::{Microvm, MicrovmDriver};
use crate::driver::host::{SPARE, broken, failed, lock, on_thread};
use crate::driver::{DriverResult, Machine};
use crate::model::{Fingerprint, Limits, MachineKey, Size};
use crate::warm_pool::{Maker, PoolLimits, WarmPool};

/// How long after the last start spares are made: whoever started a machine wants to use it first.
const AFTER: Duration = Duration::from_millis(200);
/// How long one waits for a machine.
const AT_MOST: Duration = Duration::from_mins(15);
/// How many uids there are for them.
const UIDS: u32 = 1 << 16;
/// How many of them a daemon claims at once, see [`crate::driver::uids`].
pub(super) const CLAIMED_UIDS: u32 = 1 << 8;
/// How long a spare may take to map its RAM.
const PATIENCE: Duration = Duration::from_secs(20);
/// Of how many kinds there are spares.
const KINDS: usize = 4;
/// What moves from a spare's directory to a machine's, before the record does.
const MOVED: [&str; 5] = [LOG, RAM_AT, QMP_SOCKET, SOCKET, NET_DIR];
/// The most descriptors in one message.
const DESCRIPTORS: usize = 65;

/// Which machines a hypervisor could be for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Kind {
    /// The hypervisor, the kernel, the processor and the size.
    fingerprint: String,
    accelerator: Accelerator,
    millicpus: u32,
    memory: Size,
    disk: u64,
}

impl Kind {
    pub(super) fn of(limits: &Limits, accelerator: Accelerator, fingerprint: &Fingerprint) -> Self {
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

/// A hypervisor without a machine.
#[derive(Debug)]
pub(super) struct Spare {
    key: MachineKey,
    qmp: Qmp,
    /// The serial port of the machine to be.
    line: UnixStream,
    /// What tells it its RAM, and keeps it alive until then.
    ram: UnixStream,
}

/// Those of a driver.
#[derive(Debug)]
pub(super) struct Spares {
    pub(super) pool: Arc<WarmPool<Kind, Spare>>,
    /// What the keys of ours begin with.
    mark: String,
    count: AtomicUsize,
    /// Where the search for uids begins.
    first_block: u32,
}

impl Spares {
    /// Up to `most` of a kind.
    pub(super) fn new(most: usize) -> Self {
        // Process ids repeat: that of a daemon in a container is always the same.
        let mut random = [0; 6];
        getrandom::fill(&mut random).expect("the kernel gives random bytes");
        let mark: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
        Self {
            pool: WarmPool::new(PoolLimits {
                per_kind: most,
                kinds: KINDS,
                quiet: AFTER,
                idle: AT_MOST,
            }),
            mark: format!("{SPARE}{mark}-"),
            count: AtomicUsize::default(),
            // Their uids go by it: not everybody's begin with the same.
            first_block: u32::from(random[0]),
        }
    }

    /// Whether one was made by this driver.
    pub(super) fn is_ours(&self, key: &MachineKey) -> bool {
        key.as_str().starts_with(&self.mark)
    }
}

impl MicrovmDriver {
    /// How many hypervisors wait for a machine.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.inner.spares.pool.waiting()
    }
}

#[async_trait]
impl Maker<Kind, Spare> for Microvm {
    async fn make(self: Arc<Self>, kind: Kind) -> Option<Spare> {
        let work = move |microvm: &Self| microvm.make_spare(&kind);
        let made = on_thread(&self, self.host.run_dir(), work).await;
        made.inspect_err(|error| {
            tracing::warn!(%error, "no hypervisor can be kept ready for the next machine");
        })
        .ok()
    }

    async fn discard(self: Arc<Self>, spare: Spare) {
        let work = move |microvm: &Self| {
            microvm.end_all(&[spare]);
            Ok(())
        };
        let _ = on_thread(&self, self.host.run_dir(), work).await;
    }
}

impl Microvm {
    /// Ends all of them, for good.
    pub(super) fn close_spares(&self) {
        self.end_all(&self.spares.pool.close_within(PATIENCE));
    }

    fn end_all(&self, spares: &[Spare]) {
        for Spare { key, .. } in spares {
            if let Err(error) = self.stop(key) {
                tracing::warn!(spare = %key, %error, "a hypervisor that waited for a machine is left");
            }
        }
    }

    fn make_spare(&self, kind: &Kind) -> DriverResult<Spare> {
        let number = self.spares.count.fetch_add(1, Ordering::Relaxed);
        let key = MachineKey::parse(&format!("{}{number}", self.spares.mark));
        let key = key.ok_or_else(|| broken("name a spare", &"it has no name"))?;
        let lock = self.host.claim(&key)?;
        let made = self.launch_spare(&key, number, kind);
        if made.is_err() {
            drop(lock);
            let _ = self.stop(&key);
            // It has not become any machine's.
            let _ = self.host.groups.remove(&key);
        }
        made
    }

    fn launch_spare(&self, key: &MachineKey, number: usize, kind: &Kind) -> DriverResult<Spare> {
        let (run_dir, limits) = (self.host.directory(key), kind.limits());
        let calls = listen(&run_dir).map_err(failed("listen in", &run_dir))?;
        let layout = Layout {
            shape: Self::shape(&limits, kind.accelerator),
            // What a machine's address is comes with its memory.
            mac: [2, 0, 0, 0, 0, 0],
            disk: None,
            lower: Vec::new(),
            mounts: Vec::new(),
            ram_at: run_dir.join(RAM_AT),
            beginning: Beginning::Later,
        };
        let uid = self.spare_uid(number)?;
        let owner = Owner { key, hostname: "spare", uid, limits: &limits };
        let (_log, launched) = self.hypervisor_of(&owner, &layout)?;
        let ready = launched.and_then(|(mut qmp, line)| {
            qmp.await_machine()?;
            // It connected before it was confined.
            let (ram, _) = calls.accept()?;
            ram.set_read_timeout(Some(PATIENCE))?;
            Ok(Spare { key: key.clone(), qmp, line, ram })
        });
        ready.map_err(|error| broken("start a spare", &error))
    }

    /// A uid that no hypervisor on this host has, and none of ours had lately.
    fn spare_uid(&self, number: usize) -> DriverResult<u32> {
        let taken: Vec<u32> =
            self.host.records().into_iter().filter_map(|record| record.uid).collect();
        let number = u32::try_from(number % CLAIMED_UIDS as usize).unwrap_or_default();
        let blocks = UIDS / CLAIMED_UIDS;
        for block in (0..blocks).map(|next| (self.spares.first_block + next) % blocks) {
            let start = self.config.spare_uids + block * CLAIMED_UIDS;
            let ids = start..start.saturating_add(CLAIMED_UIDS);
            if !self.uids.claim(&ids).map_err(|error| broken("claim uids for spares", &error))? {
                continue;
            }
            let mut all = (0..CLAIMED_UIDS).map(|next| start + (number + next) % CLAIMED_UIDS);
            if let Some(free) = all.find(|uid| !taken.contains(uid)) {
                return Ok(free);
            }
        }
        Err(broken("start a spare", &"all uids for spares are taken"))
    }

    /// Makes a spare the machine, if there is one, and answers with its serial port. An error means that the machine cannot
    /// start; what only the spare failed at is no error.
    pub(super) fn take_over(
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
        let kind = Kind::of(&machine.limits, accelerator, &prepared.plan.fingerprint);
        let Some(mut spare) = self.spares.pool.take(&kind) else { return Ok(None) };
        let began = Instant::now();
        let theirs = self.host.directory(&spare.key);
        let Ok(Some(held)) = lock(&theirs, FlockOperation::LockShared) else { return Ok(None) };
        let (mut disks, mut ram) = (Duration::ZERO, Duration::ZERO);
        let furnished = furnish(&mut spare.qmp, &slots(&prepared.layout))
            .inspect(|()| disks = began.elapsed())
            .and_then(|()| tell_ram(&spare.ram, map, pages))
            .inspect(|()| ram = began.elapsed())
            .and_then(|()| life::load(&mut spare.qmp, &top.join("devices")));
        let devices = began.elapsed();
        let ours = self.host.directory(&machine.key);
        let handed = furnished.and_then(|()| hand_over(&theirs, &ours));
        if let Err(error) = handed {
            tracing::warn!(machine = %machine.key, error = %error, "a spare hypervisor could not be used");
            drop(held);
            if let Err(error) = self.stop(&spare.key) {
                tracing::error!(spare = %spare.key, error = %error, "it is left");
            }
            take_back(&ours);
            return Ok(None);
        }
        // From here on it is the machine's.
        let going = (&spare.ram)
            .write_all(b"g")
            .and_then(|()| (&spare.line).write_all(first))
            .and_then(|()| life::set_going(&mut spare.qmp, &ours, &prepared.plan));
        tracing::debug!(machine = %machine.key, spare = %spare.key, ?disks, ?ram, ?devices, going = ?began.elapsed(), "a hypervisor that waited is a machine's");
        going.map(|()| Some(spare.line)).map_err(failed("hand a hypervisor over to", &ours))
    }
}

impl Drop for Microvm {
    fn drop(&mut self) {
        self.close_spares();
    }
}

/// Gives devices what they are to show.
fn furnish(qmp: &mut Qmp, slots: &[Slot]) -> io::Result<()> {
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

/// Has a spare's RAM be what a map says.
fn tell_ram(mut ram: &UnixStream, map: &Path, pages: &[PathBuf]) -> io::Result<()> {
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

/// Makes what is in a spare's directory the machine's. It is the machine's when its record has moved.
pub(super) fn hand_over(theirs: &Path, ours: &Path) -> io::Result<()> {
    for name in MOVED.iter().chain(&[RECORD]) {
        fs::rename(theirs.join(name), ours.join(name))?;
    }
    // What is left of it is in nobody's way.
    let _ = fs::remove_dir_all(theirs);
    Ok(())
}

/// Leaves nothing of a spare in a machine's directory that it did not become.
fn take_back(ours: &Path) {
    for name in MOVED {
        let path = ours.join(name);
        let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir_all(&path));
    }
}

/// Listens for a spare's memory.
fn listen(run_dir: &Path) -> io::Result<UnixListener> {
    // Not by the path itself: it may be longer than a socket's address can be.
    let directory = File::open(run_dir)?;
    UnixListener::bind(format!("/proc/self/fd/{}/{RAM_SOCKET}", directory.as_raw_fd()))
}
