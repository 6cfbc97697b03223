//! Starting machines that keep their memory.
//!
//! ```text
//! snapshot has memory ── it can be used ──> restored, told what changed, thawed; its commands go on
//!        │                    └── no, or that failed ──> booted on the disks of the same image (*fallback*)
//!        └── none ──> one that waits is taken over (`ready.rs`)
//!                └── there is none ──> restored from the template of its image, told who it is (*furnished*: its root is mounted)
//!                          └── it has files of its own or drives, or that failed ──> restored from the template of its size, assembled
//!                                    └── there is none and none can be made ──> booted on a blank disk, assembled
//! ```
//!
//! A fallback is never to anything older, and it is said: in the session, in the log, by `why`. What ran is lost then, and
//! marked so.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine as _;
use sandkeep_proto::link::{Assemble, AssembleMount, Hidden, Identity, Known, Moment, Renew};

use super::boot::chain_of;
use super::live::reach;
use super::{Error, Inner, Result};
use crate::driver::{Driver, DriverError, KeepsMemory, Link, Machine, OwnDisk, Restored, mac_of};
use crate::failpoint;
use crate::guest::{Guest, GuestError, Opening, Woken};
use crate::model::{
    CommandEnd, Fingerprint, LayerId, MemoryId, MemoryLayer, RootFs, Sandbox, Session, Snapshot,
};
use crate::store::Durability;

/// How long a kernel may take to boot, where it is emulated and the host is busy.
pub(super) const BOOT_WITHIN: Duration = Duration::from_secs(120);
/// How long an agent may take to mount its root.
pub(super) const ASSEMBLE_WITHIN: Duration = Duration::from_secs(60);
/// How long an agent may take to find out that it was restored.
const RENEW_WITHIN: Duration = Duration::from_secs(20);
/// By how much a machine's clock may be behind.
const LATE: Duration = Duration::from_millis(250);

/// What a machine begins with.
#[derive(Debug)]
pub(super) struct Begin {
    /// The image, topmost first.
    pub(super) memory: Vec<MemoryId>,
    pub(super) how: How,
}

#[derive(Debug)]
pub(super) enum How {
    /// Its memory, as it was captured with this snapshot.
    Memory(Box<Snapshot>),
    /// The image's disks alone; this is why.
    Disks(String),
    /// Memory that belongs to nobody.
    Template,
    /// The same, with the root of an image mounted already: only who it is has to be told.
    Furnished,
    /// Nothing.
    Blank,
}

impl Begin {
    /// Whether it is what the sandbox's snapshot has.
    pub(super) fn is_of_snapshot(&self) -> bool {
        matches!(self.how, How::Memory(_) | How::Disks(_))
    }

    /// The image that a sandbox's like this one would begin with, if that has the root mounted.
    pub(super) fn template(&self) -> Option<Vec<MemoryId>> {
        matches!(self.how, How::Furnished).then(|| self.memory.clone())
    }

    /// How many layers were an image's for the machine that was captured.
    pub(super) fn image(&self) -> Option<usize> {
        match &self.how {
            How::Memory(snapshot) => snapshot.image,
            How::Disks(_) | How::Template | How::Furnished | How::Blank => None,
        }
    }
}

/// Who a machine becomes that is restored.
pub(super) struct Who {
    /// Absent if it is who it was.
    pub(super) identity: Option<Identity>,
    /// Whether its `/etc/machine-id` is another, too.
    pub(super) machine_id: bool,
    /// Whether its disks were frozen when it was captured.
    pub(super) frozen: bool,
}

/// A machine that is up.
pub(super) struct Up {
    pub(super) link: Link,
    pub(super) guest: Guest,
    /// The snapshot whose memory goes on in it, and the commands that do.
    pub(super) restored: Option<(Box<Snapshot>, Vec<Known>)>,
}

/// A machine that goes on, and knows what changed meanwhile.
pub(super) struct Awake {
    link: Link,
    pub(super) guest: Guest,
    /// What is alive in it.
    commands: Vec<Known>,
}

/// The powers of a driver that pausing takes.
#[derive(Clone, Copy)]
pub(super) struct Pausing<'a> {
    pub(super) memory: &'a dyn KeepsMemory,
    pub(super) disk: &'a dyn OwnDisk,
}

/// Whether sandboxes of a driver can be paused, and with what. The files of a paused sandbox are in its memory image, on the machine's
/// disk. For a driver that keeps memory and has no disks, a pause would have to seal the open layer together with the memory,
/// and a start to restore on a root of layers: until the engine does that, sandboxes of such a driver are stopped instead.
pub(super) fn pausing(driver: &dyn Driver) -> Option<Pausing<'_>> {
    Some(Pausing { memory: driver.memory()?, disk: driver.disk()? })
}

impl Inner {
    /// What the next session of a sandbox begins with, checked to be of use; nothing for drivers without memory.
    pub(super) async fn begin(
        &self,
        driver: &Arc<dyn Driver>,
        sandbox: &Sandbox,
    ) -> Result<Option<Begin>> {
        let Some(powers) = pausing(&**driver) else { return Ok(None) };
        // Only what decides about images is asked of it: where its files are does not.
        let machine = self.unplaced(sandbox);
        let here = powers.memory.fingerprint(&machine).await?;
        let current = self.current_snapshot(sandbox).await?;
        if let Some(snapshot) = current.filter(Snapshot::has_memory) {
            let memory = snapshot.memory.clone();
            let how = match self.use_of(&snapshot, sandbox, powers.disk, &here).await {
                Ok(()) => How::Memory(Box::new(snapshot)),
                Err(reason) => {
                    if let Err(error) = self.store.check_disks(&memory).await {
                        let (name, snapshot) = (sandbox.name.clone(), snapshot.id);
                        let (reason, offers) = (chain_of(&error), Vec::new());
                        return Err(Error::Unresumable { name, snapshot, reason, offers });
                    }
                    How::Disks(reason)
                }
            };
            return Ok(Some(Begin { memory, how }));
        }
        let memory = match self.template(driver, powers, machine.clone(), &here).await {
            Ok(memory) => memory,
            Err(error) => {
                tracing::warn!(sandbox = %sandbox.name, error = chain_of(&error), "there is no template of its size; it is booted");
                return Ok(Some(Begin { memory: Vec::new(), how: How::Blank }));
            }
        };
        Ok(Some(match self.furnished(driver, powers, sandbox, machine, &here, &memory).await {
            Ok(Some(furnished)) => Begin { memory: vec![furnished, memory], how: How::Furnished },
            Ok(None) => Begin { memory: vec![memory], how: How::Template },
            Err(error) => {
                tracing::warn!(sandbox = %sandbox.name, error = chain_of(&error), "there is no template with its image's root");
                Begin { memory: vec![memory], how: How::Template }
            }
        }))
    }

    /// Whether a snapshot's memory can be used here and now, or why not.
    async fn use_of(
        &self,
        snapshot: &Snapshot,
        sandbox: &Sandbox,
        disk: &dyn OwnDisk,
        here: &Fingerprint,
    ) -> Result<(), String> {
        if !sandbox.config.mounts.is_empty() {
            return Err("it was given drives, which its memory does not know".to_owned());
        }
        self.store.check_memory(&snapshot.memory).await.map_err(|error| chain_of(&error))?;
        let Some(top) = snapshot.memory.first() else { return Err("it is empty".to_owned()) };
        let top = self.store.read::<MemoryLayer>(top).await.map_err(|error| chain_of(&error))?;
        if let Some(difference) = top.fingerprint.difference(here) {
            return Err(difference);
        }
        let image = snapshot.image.unwrap_or_default();
        let root = RootFs { image, ..self.store.root(&LayerId::fresh(), &snapshot.layers) };
        match disk.roots(&root).await {
            Ok(roots) if roots == top.roots => Ok(()),
            Ok(_) => Err("its files were packed for machines again since then".to_owned()),
            Err(error) => Err(chain_of(&error)),
        }
    }

    /// Brings a machine up, by what it begins with or by what comes after that.
    pub(super) async fn bring_up_machine(
        &self,
        driver: &Arc<dyn Driver>,
        sandbox: &mut Sandbox,
        session: &mut Session,
        begin: Begin,
    ) -> Result<Up> {
        let powers = pausing(&**driver).ok_or_else(|| no_memory(sandbox))?;
        let Pausing { memory, disk } = powers;
        let mut machine = self.machine(sandbox)?;
        let mut begin = begin;
        if let How::Furnished = begin.how {
            // It has been nobody's: what the image calls the machine is as good for this one as for any.
            let who = Who { identity: Some(identity(&machine)), machine_id: false, frozen: false };
            let image = self.dirs(&begin.memory);
            if let Some((link, guest)) =
                self.take_ready(memory, &machine, sandbox, &begin.memory).await?
            {
                return Ok(Up { link, guest, restored: None });
            }
            // The ids may be others.
            machine = self.machine(sandbox)?;
            match self.restore_as(driver, memory, &machine, &image, who).await {
                Ok(Awake { link, guest, .. }) => return Ok(Up { link, guest, restored: None }),
                Err(error) => {
                    tracing::error!(sandbox = %sandbox.name, error = chain_of(&error), "could not be started with its image's root; it is mounted");
                    self.start_over(driver, &machine, sandbox).await?;
                    begin = Begin { memory: begin.memory.split_off(1), how: How::Template };
                    if let Some(open) = sandbox.open_session_mut() {
                        open.memory.clone_from(&begin.memory);
                    }
                    self.record(sandbox, Durability::Soon).await?;
                }
            }
        }
        let image = self.dirs(&begin.memory);
        let reason = match begin.how {
            How::Memory(snapshot) => {
                let mut tried =
                    self.restore(driver, memory, &machine, &image, &snapshot, sandbox).await;
                if let Err(Error::Guest(error)) = &tried {
                    // A host that is overloaded for a moment is no reason to give memory up.
                    tracing::warn!(sandbox = %sandbox.name, error = chain_of(error), "does not answer; it is restored once more");
                    self.start_over(driver, &machine, sandbox).await?;
                    tried =
                        self.restore(driver, memory, &machine, &image, &snapshot, sandbox).await;
                }
                match tried {
                    Ok(Awake { link, guest, commands }) => {
                        return Ok(Up { link, guest, restored: Some((snapshot, commands)) });
                    }
                    Err(error @ (Error::Guest(_) | Error::Driver(DriverError::Build { .. }))) => {
                        chain_of(&error)
                    }
                    // It has to do with the host, not with the image, which stays what the sandbox stands on.
                    Err(error) => return Err(error),
                }
            }
            How::Template | How::Furnished => match self
                .begin_from_template(driver, powers, &machine, &image)
                .await
            {
                Ok((link, guest)) => return Ok(Up { link, guest, restored: None }),
                // It has to do with the drive, not with the template.
                Err(error @ Error::Driver(DriverError::MountPoint { .. })) => return Err(error),
                Err(error) => {
                    tracing::error!(sandbox = %sandbox.name, error = chain_of(&error), "could not be started from a template; it is booted");
                    self.start_over(driver, &machine, sandbox).await?;
                    if let Some(open) = sandbox.open_session_mut() {
                        open.memory.clear();
                    }
                    self.record(sandbox, Durability::Soon).await?;
                    let (link, guest) = self.boot_machine(driver, disk, &machine, &[]).await?;
                    return Ok(Up { link, guest, restored: None });
                }
            },
            How::Blank => {
                let (link, guest) = self.boot_machine(driver, disk, &machine, &[]).await?;
                return Ok(Up { link, guest, restored: None });
            }
            How::Disks(reason) => reason,
        };
        tracing::error!(sandbox = %sandbox.name, reason, "its memory cannot be used; it is booted on its files, of the same generation");
        self.start_over(driver, &machine, sandbox).await?;
        session.fallback = Some(reason);
        self.keep_session(session).await?;
        failpoint::pass("boot.fallback");
        let image = self.store.check_disks(&begin.memory).await?;
        let (link, guest) = self.boot_machine(driver, disk, &machine, &image).await?;
        self.commands_lost(&sandbox.id, CommandEnd::Lost).await?;
        Ok(Up { link, guest, restored: None })
    }

    /// Leaves nothing of an attempt: nobody has been told of anything it did.
    pub(super) async fn start_over(
        &self,
        driver: &Arc<dyn Driver>,
        machine: &Machine,
        sandbox: &Sandbox,
    ) -> Result<()> {
        driver.stop(&machine.key).await?;
        let drives = sandbox.mounted().iter().map(|mounted| &mounted.layer);
        for layer in sandbox.open_layer().into_iter().chain(drives) {
            self.store.clear_disk(layer).await?;
        }
        Ok(())
    }

    async fn restore(
        &self,
        driver: &Arc<dyn Driver>,
        memory: &dyn KeepsMemory,
        machine: &Machine,
        image: &[PathBuf],
        snapshot: &Snapshot,
        sandbox: &Sandbox,
    ) -> Result<Awake> {
        let whose = snapshot.identity_of.as_ref().unwrap_or(&snapshot.sandbox);
        let identity = (*whose != sandbox.id).then(|| identity(machine));
        let who = Who { machine_id: identity.is_some(), identity, frozen: true };
        self.restore_as(driver, memory, machine, image, who).await
    }

    /// Starts a machine from memory in which its root is mounted, and tells it who it is if that is another.
    pub(super) async fn restore_as(
        &self,
        driver: &Arc<dyn Driver>,
        memory: &dyn KeepsMemory,
        machine: &Machine,
        image: &[PathBuf],
        Who { identity, machine_id, frozen }: Who,
    ) -> Result<Awake> {
        let renew = || Renew { now: moment(), identity: identity.clone(), machine_id };
        let mut began = Instant::now();
        let (link, woken) = self.restored(driver, memory, machine, image, Some(renew())).await?;
        let Woken { guest, commands } = woken;
        let commands = match commands {
            Some(commands) => commands,
            // It did not find what it was to find first.
            None => {
                began = Instant::now();
                let renewed = tokio::time::timeout(RENEW_WITHIN, guest.renew(renew())).await;
                renewed.map_err(|_| GuestError::Timeout)??;
                guest.commands().await?
            }
        };
        self.tell_time(&guest, began).await?;
        if frozen {
            self.thaw_soon(machine, guest.clone());
        }
        Ok(Awake { link, guest, commands })
    }

    /// Tells a machine the time once more, if it was told it long ago: it was on its way for as long as everything took.
    pub(super) async fn tell_time(&self, guest: &Guest, told: Instant) -> Result<()> {
        if told.elapsed() > LATE {
            guest.renew(Renew { now: moment(), identity: None, machine_id: false }).await?;
        }
        Ok(())
    }

    /// Lets a machine write again. Nobody waits for it: whoever writes does, for a moment. If it is not heard, the machine thaws itself ten
    /// seconds after it was frozen.
    fn thaw_soon(&self, machine: &Machine, guest: Guest) {
        let key = machine.key.clone();
        tokio::spawn(async move {
            if let Err(error) = guest.thaw().await {
                tracing::error!(machine = %key, error = chain_of(&error), "could not be told to write again; it will by itself");
            }
        });
    }

    /// Starts a machine from memory and reaches its agent.
    async fn restored(
        &self,
        driver: &Arc<dyn Driver>,
        memory: &dyn KeepsMemory,
        machine: &Machine,
        image: &[PathBuf],
        renew: Option<Renew>,
    ) -> Result<(Link, Woken)> {
        let began = Instant::now();
        let opening = Opening::new(renew)?;
        let first = opening.bytes();
        let started =
            self.afresh(driver, machine, || memory.restore(machine, image, first)).await?;
        failpoint::pass("boot.restored");
        let going = began.elapsed();
        let Restored { link, line } = started;
        let patience = self.settings.patience;
        let woken = match &link {
            Link::Unix(_) => {
                Woken { guest: reach(&link, patience, self.settings.guest).await?, commands: None }
            }
            Link::Serial(socket) => {
                let Woken { guest, commands } =
                    Guest::wake(line, socket, opening, patience).await?;
                Woken { guest: guest.with_deadlines(self.settings.guest), commands }
            }
        };
        tracing::debug!(machine = %machine.key, ?going, woken = ?began.elapsed(), "restored");
        Ok((link, woken))
    }

    pub(super) async fn begin_from_template(
        &self,
        driver: &Arc<dyn Driver>,
        powers: Pausing<'_>,
        machine: &Machine,
        image: &[PathBuf],
    ) -> Result<(Link, Guest)> {
        let (link, Woken { guest, .. }) =
            self.restored(driver, powers.memory, machine, image, None).await?;
        self.assemble(powers.disk, machine, &guest).await?;
        Ok((link, guest))
    }

    async fn boot_machine(
        &self,
        driver: &Arc<dyn Driver>,
        disk: &dyn OwnDisk,
        machine: &Machine,
        image: &[PathBuf],
    ) -> Result<(Link, Guest)> {
        let link = self.afresh(driver, machine, || disk.boot(machine, image)).await?;
        let guest = reach(&link, BOOT_WITHIN, self.settings.guest).await?;
        self.assemble(disk, machine, &guest).await?;
        Ok((link, guest))
    }

    /// Starts a machine, and one that a pause left behind is ended first.
    pub(super) async fn afresh<F, T>(
        &self,
        driver: &Arc<dyn Driver>,
        machine: &Machine,
        start: impl Fn() -> F + Send + Sync,
    ) -> Result<T>
    where
        F: Future<Output = Result<T, DriverError>> + Send,
    {
        match start().await {
            Err(DriverError::Alive { .. }) => {
                driver.stop(&machine.key).await?;
                Ok(start().await?)
            }
            outcome => Ok(outcome?),
        }
    }

    async fn assemble(&self, disk: &dyn OwnDisk, machine: &Machine, guest: &Guest) -> Result<()> {
        let assemble = self.assembly(disk, machine, false).await?;
        let assembled = tokio::time::timeout(ASSEMBLE_WITHIN, guest.assemble(assemble)).await;
        assembled.map_err(|_| GuestError::Timeout)??;
        failpoint::pass("boot.assembled");
        Ok(())
    }

    /// What a machine is to be.
    pub(super) async fn assembly(
        &self,
        disk: &dyn OwnDisk,
        machine: &Machine,
        rescue: bool,
    ) -> Result<Assemble> {
        let mounts = machine.mounts.iter().map(|mount| AssembleMount {
            target: mount.target.to_string_lossy().into_owned(),
            lower: !mount.root.lower.is_empty(),
            read_only: mount.read_only,
            owner: mount.owner.clone(),
        });
        Ok(Assemble {
            lower: disk.lower(&machine.key).await?,
            mounts: mounts.collect(),
            identity: identity(machine),
            now: moment(),
            file_size: machine.limits.file_size.0,
            pids: machine.limits.pids,
            rescue,
        })
    }

    /// Where the layers of an image lie.
    pub(super) fn dirs(&self, memory: &[MemoryId]) -> Vec<PathBuf> {
        memory.iter().map(|id| self.store.memory_dir(id)).collect()
    }
}

pub(super) fn no_memory(sandbox: &Sandbox) -> Error {
    Error::NoMemory { name: sandbox.name.clone(), driver: sandbox.config.driver.clone() }
}

pub(super) fn identity(machine: &Machine) -> Identity {
    Identity { hostname: machine.hostname.clone(), mac: mac_of(&machine.key) }
}

/// The time, and randomness that nobody else has.
pub(super) fn moment() -> Moment {
    let mut entropy = zeroize::Zeroizing::new([0u8; 64]);
    // The kernel's random source does not fail once the machine is up.
    getrandom::fill(&mut entropy[..]).expect("the kernel gives random bytes");
    let text = zeroize::Zeroizing::new(base64::engine::general_purpose::STANDARD.encode(*entropy));
    let unix_ns = jiff::Timestamp::now().as_nanosecond();
    Moment { unix_ns: u64::try_from(unix_ns).unwrap_or(0), entropy: Hidden::new(&text) }
}
