//! The warm pool: machines that are started before a sandbox needs them.
//!
//! A machine that was just restored does everything for the first time, and where it is emulated the first time takes many times as long as
//! the next. So after a create from a template with an image's root another machine is started from
//! it, gets an identity, runs one command, and is then held. The next create from that template
//! takes it over ([`KeepsMemory::adopt`]) and sends it its real identity. It uses no processor
//! meanwhile, holds some 50 MB, and was never assigned: no secret, no file, no network.
//!
//! They are in a [`WarmPool`], as many for a template as the settings say. All of them are ended when the engine shuts down; what a
//! daemon leaves that was killed is ended by the next. A create that cannot take one over starts as if there had been none.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use sandkeep_proto::link::{Renew, Spawn};

use crate::driver::{Driver, KeepsMemory, Link, Machine, WARM_VM};
use crate::engine::error::error_chain;
use crate::engine::machine::Machines;
use crate::engine::machine::description::limits;
use crate::engine::machine::restore::{RestoreAs, identity, moment};
use crate::engine::{Error, Result};
use crate::failpoint;
use crate::guest::{Guest, GuestError, OutputEvent};
use crate::model::{LayerId, Limits, MachineKey, MemoryId, RootFs, Sandbox};
use crate::store::Durability;
use crate::warm_pool::{Maker, PoolLimits, WarmPool};

/// How long after the last start they are made: the user of a machine that just started goes first.
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
pub(in crate::engine) type WarmMachines = WarmPool<MachineKind, WarmMachine>;

/// With `most` for each template.
pub(in crate::engine) fn pool(most: usize) -> Arc<WarmMachines> {
    WarmPool::new(PoolLimits { per_kind: most, kinds: KINDS, quiet: AFTER, idle: AT_MOST })
}

/// Which sandboxes a machine could be for, and what it is made from. A control group's limits are not all part of what a template
/// was made with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::engine) struct MachineKind {
    limits: Limits,
    /// The template, topmost first.
    memory: Vec<MemoryId>,
    driver: String,
    layers: Vec<LayerId>,
}

impl MachineKind {
    fn of(sandbox: &Sandbox, memory: &[MemoryId]) -> Self {
        Self {
            limits: limits(sandbox),
            memory: memory.to_vec(),
            driver: sandbox.config.driver.clone(),
            layers: sandbox.image_layers.clone(),
        }
    }
}

/// A machine that is not assigned to a sandbox yet.
#[derive(Debug)]
pub(in crate::engine) struct WarmMachine {
    driver: Arc<dyn Driver>,
    machine: Machine,
    guest: Guest,
}

impl Machines {
    /// How many machines wait for a sandbox.
    pub(in crate::engine) fn waiting_warm_vms(&self) -> usize {
        self.warm.waiting()
    }

    /// Makes a machine the sandbox's that waits for one, if there is one with this template and its limits. What only that one failed at is no
    /// error: then nothing is left of it. The sandbox may have other ids than before.
    pub(in crate::engine) async fn take_warm_machine(
        &self,
        memory: &dyn KeepsMemory,
        machine: &Machine,
        sandbox: &mut Sandbox,
        template: &[MemoryId],
    ) -> Result<Option<(Link, Guest)>> {
        let Some(waiting) = self.warm.take(&MachineKind::of(sandbox, template)) else {
            return Ok(None);
        };
        let driver = Arc::clone(&waiting.driver);
        if waiting.guest.is_lost() {
            self.end_warm_machine(&driver, waiting.machine).await;
            return Ok(None);
        }
        // Its ids become the sandbox's, on record before it does: a daemon that finds the two must not take either for free.
        let before = sandbox.replace_uids(Some(waiting.machine.uids));
        if let Err(error) = self.records.record(sandbox, Durability::Soon).await {
            sandbox.replace_uids(before);
            self.end_warm_machine(&driver, waiting.machine).await;
            return Err(error);
        }
        self.release_uids(before);
        let began = Instant::now();
        let taken = self.assign(&waiting, memory, machine);
        let taken = tokio::time::timeout(TAKEN_WITHIN, taken).await;
        match taken.unwrap_or(Err(Error::Guest(GuestError::Timeout))) {
            Ok(link) => {
                failpoint::pass("ready.taken");
                tracing::debug!(machine = %machine.key, was = %waiting.machine.key, after = ?began.elapsed(), "a warm machine was assigned to a sandbox");
                self.remove_unassigned_dir(&waiting.machine).await;
                self.sync_soon(machine);
                Ok(Some((link, waiting.guest)))
            }
            Err(error) => {
                tracing::warn!(sandbox = %sandbox.name, error = error_chain(&error), "a warm machine could not be assigned");
                // It may be under either name. The machine that is alive keeps the ids.
                self.start_over(&driver, machine, sandbox).await?;
                driver.stop(&waiting.machine.key).await?;
                self.remove_unassigned_dir(&waiting.machine).await;
                Ok(None)
            }
        }
    }

    /// Makes a machine of the warm pool the machine of a sandbox, and notifies it.
    async fn assign(
        &self,
        waiting: &WarmMachine,
        memory: &dyn KeepsMemory,
        machine: &Machine,
    ) -> Result<Link> {
        let began = Instant::now();
        let renew = Renew { now: moment(), identity: Some(identity(machine)), machine_id: false };
        let mut told = pin!(waiting.guest.renew(renew));
        let mut adopted = pin!(memory.adopt(&waiting.machine.key, machine));
        // The message most likely arrives before it resumes, and it finds it with the first look.
        // If it does not resume, the answer is not waited for.
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

    /// Syncs in the background that the disks of a machine have moved. No caller waits for it: a
    /// create is answered after its record is synced, which was written later. A first start that
    /// is no create is as exposed to a power cut in this moment as any that just began.
    fn sync_soon(&self, machine: &Machine) {
        let place = machine.root.writable_dir.clone();
        let key = machine.key.clone();
        self.context.tasks.spawn_blocking(move || {
            if let Err(error) = std::fs::File::open(&place).and_then(|dir| dir.sync_all()) {
                tracing::error!(machine = %key, %error, "the move of a machine's disks is not synced; a power cut now may lose it");
            }
        });
    }

    /// Makes sure, when there is nothing better to do, that the next create finds a machine in the
    /// warm pool.
    pub(in crate::engine) fn restock(self: &Arc<Self>, sandbox: &Sandbox, memory: &[MemoryId]) {
        if !memory.iter().take(1).any(|template| self.templates.has_failed(template.as_str())) {
            self.warm.restock(self, &MachineKind::of(sandbox, memory));
        }
    }

    /// Ends all of them. None is made after that.
    pub(in crate::engine) async fn end_warm_machines(&self) {
        for waiting in self.warm.close().await {
            self.end_warm_machine(&waiting.driver, waiting.machine).await;
        }
    }

    /// Makes one, unless the engine shuts down meanwhile.
    async fn make_warm_machine(&self, kind: &MachineKind) -> Result<Option<WarmMachine>> {
        let MachineKind { limits, memory, driver, layers } = kind;
        let driver = self.context.driver(driver)?;
        let root = RootFs { image: layers.len(), ..self.store.root(&LayerId::fresh(), layers) };
        let machine = self.prepare_unassigned(&fresh_key()?, root, *limits).await?;
        let over = self.context.tasks.shutdown();
        let made = tokio::select! {
            made = self.prepare_warm_machine(&driver, &machine, memory) => made.map(Some),
            // What was begun is ended below, when it has come so far.
            () = over.cancelled() => Ok(None),
        };
        if let Ok(Some(guest)) = made {
            return Ok(Some(WarmMachine { driver, machine, guest }));
        }
        self.end_warm_machine(&driver, machine).await;
        made.map(|_| None)
    }

    async fn prepare_warm_machine(
        &self,
        driver: &Arc<dyn Driver>,
        machine: &Machine,
        image: &[MemoryId],
    ) -> Result<Guest> {
        let missing = || Error::invalid("driver", "it keeps no memory");
        let memory = driver.memory().ok_or_else(missing)?;
        let who = RestoreAs { identity: Some(identity(machine)), machine_id: false, frozen: false };
        let up = self
            .restore_as(driver, memory, machine, &self.references.memory_dirs(image), who)
            .await?;
        let tried = tokio::time::timeout(TRIED_WITHIN, try_out(&up.guest)).await;
        tried.map_err(|_| GuestError::Timeout)??;
        memory.hold(&machine.key).await?;
        Ok(up.guest)
    }

    async fn end_warm_machine(&self, driver: &Arc<dyn Driver>, machine: Machine) {
        let key = machine.key.clone();
        if let Err(error) = self.end_unassigned(driver, machine).await {
            tracing::warn!(machine = %key, error = error_chain(&error), "a warm machine was not removed");
        }
    }
}

#[async_trait]
impl Maker<MachineKind, WarmMachine> for Machines {
    async fn make(self: Arc<Self>, kind: MachineKind) -> Option<WarmMachine> {
        if self.context.tasks.is_shutdown() {
            return None;
        }
        self.make_warm_machine(&kind).await.unwrap_or_else(|error| {
            // Not at every create: an image whose `true` never ends would keep the host busy.
            if let Some(template) = kind.memory.first() {
                self.templates.failed(template.as_str().to_owned());
            }
            tracing::warn!(error = error_chain(&error), "no warm machine could be started");
            None
        })
    }

    async fn discard(self: Arc<Self>, waiting: WarmMachine) {
        self.end_warm_machine(&waiting.driver, waiting.machine).await;
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
    let key = format!("{WARM_VM}{:016x}", u64::from_le_bytes(random));
    MachineKey::parse(&key).ok_or_else(|| Error::invalid("machine", "its key is no machine's"))
}
