//! Machines that wait for a sandbox.
//!
//! A machine that was just restored does everything for the first time, and where it is emulated the first time takes many times as long as
//! the next. So after a create from a template with an image's root another machine is started from it, is told who it is, runs one
//! command, and then stands still. The next create from that template takes it over ([`Keeper::pass_on`]) and tells it who it is
//! really. It uses no processor meanwhile, holds some 50 MB, and has been nobody's: no secret, no file, no network.
//!
//! There are as many for a template as the settings say, for the four templates that were used last, made one at a time when
//! no machine is being started. One that nobody took for a while is ended, and all of them when the engine shuts down; what a daemon
//! leaves that was killed is ended by the next. A create that cannot take one over starts as if there had been none.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sandkeep_proto::link::{Renew, Spawn};

use super::boot::{chain_of, limits};
use super::machine::{Who, identity, moment};
use super::slot::lock;
use super::{Error, Inner, Result};
use crate::driver::{Driver, Keeper, Link, Machine, READY};
use crate::failpoint;
use crate::guest::{Guest, GuestError, OutputEvent};
use crate::model::{LayerId, Limits, MachineKey, MemoryId, RootFs, Sandbox};

/// How long after the last start they are made: whoever started a machine wants to use it first.
const AFTER: Duration = Duration::from_millis(500);
/// How long one waits for a sandbox.
const AT_MOST: Duration = Duration::from_mins(15);
/// For how many templates there are some.
const KINDS: usize = 4;
/// How long a machine may take to become a sandbox's, and the command to run that it is tried with.
const WITHIN: Duration = Duration::from_secs(20);

/// Those of an engine.
#[derive(Debug, Default)]
pub(super) struct Ready {
    waiting: Mutex<Vec<Waiting>>,
    /// For which templates some are being made, or about to be.
    coming: Mutex<Vec<MemoryId>>,
    /// Held while one is being made.
    making: tokio::sync::Mutex<()>,
    starting: AtomicUsize,
    last_start: Mutex<Option<Instant>>,
}

/// A machine that is nobody's.
#[derive(Debug)]
struct Waiting {
    template: MemoryId,
    driver: String,
    machine: Machine,
    guest: Guest,
    made: Instant,
}

/// What the next one is to be like.
#[derive(Debug, Clone)]
struct Kind {
    memory: Vec<MemoryId>,
    driver: String,
    root: RootFs,
    limits: Limits,
}

impl Ready {
    /// To be held while a machine is started.
    pub(super) fn starting(&self) -> impl Drop {
        self.starting.fetch_add(1, Ordering::Relaxed);
        UnderWay(self)
    }

    /// Whether somebody waits for a machine, or has just got one.
    fn is_busy(&self) -> bool {
        self.starting.load(Ordering::Relaxed) > 0
            || lock(&self.last_start).is_some_and(|at| at.elapsed() < AFTER)
    }

    fn take(&self, template: &MemoryId) -> Option<Waiting> {
        let mut waiting = lock(&self.waiting);
        let place = waiting.iter().position(|one| one.template == *template)?;
        Some(waiting.remove(place))
    }

    /// Whether another should be made; if so it counts as coming.
    fn wants(&self, template: &MemoryId, most: usize) -> bool {
        let mut coming = lock(&self.coming);
        let there = lock(&self.waiting).iter().filter(|one| one.template == *template).count();
        let under_way = coming.iter().filter(|one| *one == template).count();
        let wanted = there + under_way < most;
        if wanted {
            coming.push(template.clone());
        }
        wanted
    }

    fn came(&self, template: &MemoryId) {
        let mut coming = lock(&self.coming);
        if let Some(place) = coming.iter().position(|one| one == template) {
            coming.remove(place);
        }
    }

    /// Takes away those that are too old, and of the others the oldest, so that no more than `most` are left.
    fn surplus(&self, age: Duration, most: usize) -> Vec<Waiting> {
        let mut waiting = lock(&self.waiting);
        let mut surplus: Vec<Waiting> =
            waiting.extract_if(.., |one| one.made.elapsed() >= age).collect();
        let too_many = waiting.len().saturating_sub(most);
        // They are in the order in which they were made.
        surplus.extend(waiting.drain(..too_many));
        surplus
    }
}

struct UnderWay<'a>(&'a Ready);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        *lock(&self.0.last_start) = Some(Instant::now());
        self.0.starting.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Inner {
    /// How many machines wait for a sandbox.
    pub(super) fn ready_machines(&self) -> usize {
        lock(&self.ready.waiting).len()
    }

    /// Makes a machine the sandbox's that waits for one, if there is one with this template. What only that one failed at is no error: then
    /// nothing is left of it.
    pub(super) async fn take_ready(
        &self,
        keeper: &dyn Keeper,
        machine: &Machine,
        sandbox: &mut Sandbox,
        template: &MemoryId,
    ) -> Result<Option<(Link, Guest)>> {
        let Some(waiting) = self.ready.take(template) else { return Ok(None) };
        let began = Instant::now();
        let identity = Some(identity(machine));
        let renew = Renew { now: moment(), identity, machine_id: false };
        // It is asked before it goes on, and finds that with the first look.
        let taken = tokio::time::timeout(WITHIN, async {
            let (renewed, link) = tokio::join!(
                waiting.guest.renew(renew),
                keeper.pass_on(&waiting.machine.key, machine)
            );
            let link = link?;
            renewed?;
            Ok::<_, Error>(link)
        });
        let taken = taken.await.unwrap_or(Err(Error::Guest(GuestError::Timeout)));
        self.forget_place(&waiting.machine).await;
        match taken {
            Ok(link) => {
                failpoint::pass("ready.taken");
                tracing::debug!(machine = %machine.key, was = %waiting.machine.key, after = ?began.elapsed(), "a machine that waited is a sandbox's");
                self.give_uids(sandbox.uids.replace(waiting.machine.uids));
                Ok(Some((link, waiting.guest)))
            }
            Err(error) => {
                tracing::warn!(sandbox = %sandbox.name, error = chain_of(&error), "a machine that waited could not be used");
                let driver = self.driver(&waiting.driver)?;
                self.end_ready(&driver, waiting.machine).await;
                self.start_over(&driver, machine, sandbox).await?;
                Ok(None)
            }
        }
    }

    /// Sees to it that the next create finds a machine that waits, when there is nothing better to do.
    pub(super) fn restock(self: &Arc<Self>, sandbox: &Sandbox, memory: Vec<MemoryId>) {
        let (most, Some(template)) = (self.settings.ready, memory.first().cloned()) else { return };
        if self.templates.has_failed(template.as_str()) || !self.ready.wants(&template, most) {
            return;
        }
        let layers = &sandbox.image_layers;
        let root = self.store.root(&LayerId::fresh(), layers);
        let kind = Kind {
            memory,
            driver: sandbox.config.driver.clone(),
            root: RootFs { image: layers.len(), ..root },
            limits: limits(sandbox),
        };
        let inner = Arc::downgrade(self);
        let mut over = self.shutdown.subscribe();
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    () = tokio::time::sleep(AFTER / 2) => {}
                    _ = over.wait_for(|over| *over) => return,
                }
                let Some(inner) = inner.upgrade() else { return };
                let _one = inner.ready.making.lock().await;
                if inner.ready.is_busy() {
                    continue;
                }
                inner.stock(kind).await;
                inner.ready.came(&template);
                inner.end_surplus(AT_MOST, most * KINDS).await;
                break;
            }
            tokio::select! {
                () = tokio::time::sleep(AT_MOST) => {}
                _ = over.wait_for(|over| *over) => return,
            }
            if let Some(inner) = inner.upgrade() {
                inner.end_surplus(AT_MOST, usize::MAX).await;
            }
        });
    }

    /// Ends all of them. None is made after that.
    pub(super) async fn end_ready_machines(&self) {
        // One that is being made is waited for: it would be left behind.
        let _one = self.ready.making.lock().await;
        self.end_surplus(Duration::ZERO, 0).await;
    }

    async fn end_surplus(&self, age: Duration, most: usize) {
        for Waiting { driver, machine, .. } in self.ready.surplus(age, most) {
            match self.driver(&driver) {
                Ok(driver) => self.end_ready(&driver, machine).await,
                Err(error) => tracing::warn!(error = chain_of(&error), "a machine is left"),
            }
        }
    }

    /// Makes one and puts it where it is found.
    async fn stock(&self, kind: Kind) {
        if *self.shutdown.borrow() {
            return;
        }
        let made = async {
            let driver = self.driver(&kind.driver)?;
            let machine = self.nobodys(&fresh_key()?, kind.root, kind.limits).await?;
            match self.make_ready(&driver, &machine, &kind.memory).await {
                Ok(guest) => Ok((machine, guest)),
                Err(error) => {
                    self.end_ready(&driver, machine).await;
                    Err(error)
                }
            }
        };
        let (driver, template) = (kind.driver.clone(), kind.memory.first().cloned());
        match (made.await, template) {
            (Ok((machine, guest)), Some(template)) => {
                let one = Waiting { template, driver, machine, guest, made: Instant::now() };
                lock(&self.ready.waiting).push(one);
            }
            (Ok(_), None) => {}
            (Err::<_, Error>(error), template) => {
                // Not at every create: an image whose `true` never ends would keep the host busy.
                template.iter().for_each(|id| self.templates.failed(id.as_str().to_owned()));
                tracing::warn!(
                    error = chain_of(&error),
                    "no machine can be kept ready for the next sandbox"
                );
            }
        }
    }

    async fn make_ready(
        &self,
        driver: &Arc<dyn Driver>,
        machine: &Machine,
        memory: &[MemoryId],
    ) -> Result<Guest> {
        let missing = || Error::invalid("driver", "it keeps no memory");
        let keeper = driver.keeper().ok_or_else(missing)?;
        let who = Who { identity: Some(identity(machine)), machine_id: false, frozen: false };
        let up = self.restore_as(driver, keeper, machine, &self.dirs(memory), who).await?;
        let tried = tokio::time::timeout(WITHIN, try_out(&up.guest)).await;
        tried.map_err(|_| GuestError::Timeout)??;
        keeper.hold(&machine.key).await?;
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
        for dir in [&place, &place.join("diff"), &place.join("work")] {
            let failed = |error| Error::invalid("place", format!("{}: {error}", dir.display()));
            tokio::fs::create_dir_all(dir).await.map_err(failed)?;
        }
        Ok(Machine {
            key: key.clone(),
            hostname: "sandkeep".to_owned(),
            root: RootFs { writable_dir: place, ..root },
            uids: self.take_uids()?,
            limits,
            mounts: Vec::new(),
        })
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
