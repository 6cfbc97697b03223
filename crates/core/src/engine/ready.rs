//! Machines that wait for a sandbox.
//!
//! A machine that was just restored does everything for the first time, and where it is emulated the first time takes many times as long as
//! the next. So after a create from a template with an image's root another machine is started from it, is told who it is, runs one
//! command, and then stands still. The next create from that template takes it over ([`KeepsMemory::adopt`]) and tells it who it is
//! really. It uses no processor meanwhile, holds some 50 MB, and has been nobody's: no secret, no file, no network.
//!
//! They are in a [`WarmPool`], as many for a template as the settings say. All of them are ended when the engine shuts down; what a
//! daemon leaves that was killed is ended by the next. A create that cannot take one over starts as if there had been none.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use sandkeep_proto::link::{Renew, Spawn};

use super::boot::{chain_of, limits};
use super::machine::{Who, identity, moment};
use super::{Error, Inner, Result};
use crate::driver::{Driver, KeepsMemory, Link, Machine, READY};
use crate::failpoint;
use crate::guest::{Guest, GuestError, OutputEvent};
use crate::model::{LayerId, Limits, MachineKey, MemoryId, RootFs, Sandbox};
use crate::store::Durability;
use crate::warm_pool::{Maker, PoolLimits, WarmPool};

/// How long after the last start they are made: whoever started a machine wants to use it first.
const AFTER: Duration = Duration::from_millis(500);
/// How long one waits for a sandbox.
const AT_MOST: Duration = Duration::from_mins(15);
/// For how many templates there are some.
const KINDS: usize = 4;
/// How long a machine may take to become a sandbox's: not much longer than it takes to start another.
const TAKEN_WITHIN: Duration = Duration::from_secs(5);
/// How long the command may take that it is tried with.
const TRIED_WITHIN: Duration = Duration::from_secs(20);

/// Those of an engine.
pub(super) type Ready = WarmPool<Kind, Waiting>;

/// So many for each template.
pub(super) fn pool(most: usize) -> Arc<Ready> {
    WarmPool::new(PoolLimits { per_kind: most, kinds: KINDS, quiet: AFTER, idle: AT_MOST })
}

/// Which sandboxes a machine could be for, and what it is made from. A control group's limits are not all part of what a template
/// was made with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Kind {
    limits: Limits,
    /// The template, topmost first.
    memory: Vec<MemoryId>,
    driver: String,
    layers: Vec<LayerId>,
}

impl Kind {
    fn of(sandbox: &Sandbox, memory: &[MemoryId]) -> Self {
        Self {
            limits: limits(sandbox),
            memory: memory.to_vec(),
            driver: sandbox.config.driver.clone(),
            layers: sandbox.image_layers.clone(),
        }
    }
}

/// A machine that is nobody's.
#[derive(Debug)]
pub(super) struct Waiting {
    driver: Arc<dyn Driver>,
    machine: Machine,
    guest: Guest,
}

impl Inner {
    /// How many machines wait for a sandbox.
    pub(super) fn ready_machines(&self) -> usize {
        self.ready.waiting()
    }

    /// Makes a machine the sandbox's that waits for one, if there is one with this template and its limits. What only that one failed at is no
    /// error: then nothing is left of it. The sandbox may have other ids than before.
    pub(super) async fn take_ready(
        &self,
        memory: &dyn KeepsMemory,
        machine: &Machine,
        sandbox: &mut Sandbox,
        template: &[MemoryId],
    ) -> Result<Option<(Link, Guest)>> {
        let Some(waiting) = self.ready.take(&Kind::of(sandbox, template)) else { return Ok(None) };
        let driver = Arc::clone(&waiting.driver);
        if waiting.guest.is_lost() {
            self.end_ready(&driver, waiting.machine).await;
            return Ok(None);
        }
        // Its ids become the sandbox's, on record before it does: a daemon that finds the two must not take either for free.
        let before = sandbox.replace_uids(Some(waiting.machine.uids));
        if let Err(error) = self.record(sandbox, Durability::Soon).await {
            sandbox.replace_uids(before);
            self.end_ready(&driver, waiting.machine).await;
            return Err(error);
        }
        self.give_uids(before);
        let began = Instant::now();
        let taken = self.make_it(&waiting, memory, machine);
        let taken = tokio::time::timeout(TAKEN_WITHIN, taken).await;
        match taken.unwrap_or(Err(Error::Guest(GuestError::Timeout))) {
            Ok(link) => {
                failpoint::pass("ready.taken");
                tracing::debug!(machine = %machine.key, was = %waiting.machine.key, after = ?began.elapsed(), "a machine that waited is a sandbox's");
                self.forget_place(&waiting.machine).await;
                self.sync_soon(machine);
                Ok(Some((link, waiting.guest)))
            }
            Err(error) => {
                tracing::warn!(sandbox = %sandbox.name, error = chain_of(&error), "a machine that waited could not be used");
                // It may be under either name. Whoever is alive keeps the ids.
                self.start_over(&driver, machine, sandbox).await?;
                driver.stop(&waiting.machine.key).await?;
                self.forget_place(&waiting.machine).await;
                Ok(None)
            }
        }
    }

    /// Makes a machine that waits the machine of a sandbox, and tells it so.
    async fn make_it(
        &self,
        waiting: &Waiting,
        memory: &dyn KeepsMemory,
        machine: &Machine,
    ) -> Result<Link> {
        let began = Instant::now();
        let renew = Renew { now: moment(), identity: Some(identity(machine)), machine_id: false };
        let mut told = pin!(waiting.guest.renew(renew));
        let mut adopted = pin!(memory.adopt(&waiting.machine.key, machine));
        // It is told before it goes on, most likely, and finds that with the first look. If it does not go on, nobody waits for an answer.
        let (early, link) = tokio::select! {
            biased;
            early = &mut told => (Some(early), adopted.await?),
            link = &mut adopted => (None, link?),
        };
        match early {
            Some(early) => early?,
            None => told.await?,
        };
        self.tell_time(&waiting.guest, began).await?;
        Ok(link)
    }

    /// Has it on stable storage that the disks of a machine have moved. Nobody waits for it: a create is answered after its record is synced,
    /// which was written later. A first start that is no create is as exposed to a power cut in this moment as any that just began.
    fn sync_soon(&self, machine: &Machine) {
        let place = machine.root.writable_dir.clone();
        let key = machine.key.clone();
        tokio::task::spawn_blocking(move || {
            if let Err(error) = std::fs::File::open(&place).and_then(|dir| dir.sync_all()) {
                tracing::error!(machine = %key, %error, "where its disks are is not on stable storage");
            }
        });
    }

    /// Sees to it that the next create finds a machine that waits, when there is nothing better to do.
    pub(super) fn restock(self: &Arc<Self>, sandbox: &Sandbox, memory: &[MemoryId]) {
        if !memory.iter().take(1).any(|template| self.templates.has_failed(template.as_str())) {
            self.ready.restock(self, &Kind::of(sandbox, memory));
        }
    }

    /// Ends all of them. None is made after that.
    pub(super) async fn end_ready_machines(&self) {
        for waiting in self.ready.close().await {
            self.end_ready(&waiting.driver, waiting.machine).await;
        }
    }

    /// Makes one, unless the engine shuts down meanwhile.
    async fn stock(&self, kind: &Kind) -> Result<Option<Waiting>> {
        let Kind { limits, memory, driver, layers } = kind;
        let driver = self.driver(driver)?;
        let root = RootFs { image: layers.len(), ..self.store.root(&LayerId::fresh(), layers) };
        let machine = self.nobodys(&fresh_key()?, root, *limits).await?;
        let mut over = self.shutdown.subscribe();
        let made = tokio::select! {
            made = self.make_ready(&driver, &machine, memory) => made.map(Some),
            // What was begun is ended below, when it has come so far.
            _ = over.wait_for(|over| *over) => Ok(None),
        };
        if let Ok(Some(guest)) = made {
            return Ok(Some(Waiting { driver, machine, guest }));
        }
        self.end_ready(&driver, machine).await;
        made.map(|_| None)
    }

    async fn make_ready(
        &self,
        driver: &Arc<dyn Driver>,
        machine: &Machine,
        image: &[MemoryId],
    ) -> Result<Guest> {
        let missing = || Error::invalid("driver", "it keeps no memory");
        let memory = driver.memory().ok_or_else(missing)?;
        let who = Who { identity: Some(identity(machine)), machine_id: false, frozen: false };
        let up = self.restore_as(driver, memory, machine, &self.dirs(image), who).await?;
        let tried = tokio::time::timeout(TRIED_WITHIN, try_out(&up.guest)).await;
        tried.map_err(|_| GuestError::Timeout)??;
        memory.hold(&machine.key).await?;
        Ok(up.guest)
    }

    /// A machine that is nobody's, with a place of its own. Nobody names what it writes, so that is not a layer: what is left of it goes when a
    /// daemon starts.
    pub(super) async fn nobodys(
        &self,
        key: &MachineKey,
        root: RootFs,
        limits: Limits,
    ) -> Result<Machine> {
        let place = self.place_of(key);
        let machine = Machine {
            key: key.clone(),
            hostname: "sandkeep".to_owned(),
            root: RootFs { writable_dir: place.clone(), ..root },
            uids: self.take_uids()?,
            limits,
            mounts: Vec::new(),
        };
        for dir in [&place, &place.join("diff"), &place.join("work")] {
            if let Err(error) = tokio::fs::create_dir_all(dir).await {
                self.give_uids(Some(machine.uids));
                self.forget_place(&machine).await;
                return Err(Error::invalid("place", format!("{}: {error}", dir.display())));
            }
        }
        Ok(machine)
    }

    fn place_of(&self, key: &MachineKey) -> PathBuf {
        self.store.data_dir().join("tmp").join(key.as_str())
    }

    async fn forget_place(&self, machine: &Machine) {
        let _ = tokio::fs::remove_dir_all(self.place_of(&machine.key)).await;
    }

    /// Leaves nothing of a machine that was nobody's.
    pub(super) async fn end_nobodys(
        &self,
        driver: &Arc<dyn Driver>,
        machine: Machine,
    ) -> Result<()> {
        // One that may be alive keeps its ids and its files.
        driver.stop(&machine.key).await?;
        self.give_uids(Some(machine.uids));
        self.forget_place(&machine).await;
        Ok(())
    }

    async fn end_ready(&self, driver: &Arc<dyn Driver>, machine: Machine) {
        let key = machine.key.clone();
        if let Err(error) = self.end_nobodys(driver, machine).await {
            tracing::warn!(machine = %key, error = chain_of(&error), "a machine that waited for a sandbox is left");
        }
    }
}

#[async_trait]
impl Maker<Kind, Waiting> for Inner {
    async fn make(self: Arc<Self>, kind: Kind) -> Option<Waiting> {
        if *self.shutdown.borrow() {
            return None;
        }
        self.stock(&kind).await.unwrap_or_else(|error| {
            // Not at every create: an image whose `true` never ends would keep the host busy.
            if let Some(template) = kind.memory.first() {
                self.templates.failed(template.as_str().to_owned());
            }
            tracing::warn!(
                error = chain_of(&error),
                "no machine can be kept ready for the next sandbox"
            );
            None
        })
    }

    async fn discard(self: Arc<Self>, waiting: Waiting) {
        self.end_ready(&waiting.driver, waiting.machine).await;
    }
}

/// Runs a command: the next one then finds everything done once.
async fn try_out(guest: &Guest) -> Result<(), GuestError> {
    let command = "try-out";
    let spawn = Spawn {
        command: command.to_owned(),
        argv: vec!["true".to_owned()],
        env: BTreeMap::new(),
        cwd: None,
        user: None,
        tty: None,
        stdin: false,
        sudo_from: None,
        secret_env: BTreeMap::new(),
        secret_files: Vec::new(),
    };
    match guest.spawn(spawn).await {
        Ok(mut process) => while !matches!(process.output.next().await?, OutputEvent::Exited(_)) {},
        // An image need not have any program.
        Err(GuestError::Refused { .. }) => return Ok(()),
        Err(error) => return Err(error),
    }
    guest.forget(command).await
}

fn fresh_key() -> Result<MachineKey> {
    let mut random = [0_u8; 8];
    getrandom::fill(&mut random).map_err(|error| Error::invalid("machine", error.to_string()))?;
    let key = format!("{READY}{:016x}", u64::from_le_bytes(random));
    MachineKey::parse(&key).ok_or_else(|| Error::invalid("machine", "its key is no machine's"))
}
