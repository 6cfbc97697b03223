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
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use sandkeep_proto::link::{Renew, Spawn};
use tokio::sync::watch;

use super::boot::{chain_of, limits};
use super::machine::{Who, identity, moment};
use super::slot::lock;
use super::{Error, Inner, Result};
use crate::driver::{Driver, Keeper, Link, Machine, READY};
use crate::failpoint;
use crate::guest::{Guest, GuestError, OutputEvent};
use crate::model::{LayerId, Limits, MachineKey, MemoryId, RootFs, Sandbox};
use crate::store::Durability;

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
#[derive(Debug, Default)]
pub(super) struct Ready {
    /// In the order in which they were made.
    waiting: Mutex<Vec<Waiting>>,
    /// Which are being made, or about to be.
    coming: Mutex<Vec<Kind>>,
    /// Held while one is being made.
    making: tokio::sync::Mutex<()>,
    starting: AtomicUsize,
    last_start: Mutex<Option<Instant>>,
}

/// Which sandboxes a machine could be for. A control group's limits are not all part of what a template was made with.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Kind {
    template: MemoryId,
    limits: Limits,
}

/// A machine that is nobody's.
#[derive(Debug)]
struct Waiting {
    kind: Kind,
    driver: String,
    machine: Machine,
    guest: Guest,
    made: Instant,
}

/// What the next one is made from.
#[derive(Debug, Clone)]
struct Model {
    kind: Kind,
    memory: Vec<MemoryId>,
    driver: String,
    root: RootFs,
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

    fn take(&self, kind: &Kind) -> Option<Waiting> {
        let mut waiting = lock(&self.waiting);
        let place = waiting.iter().position(|one| one.kind == *kind)?;
        Some(waiting.remove(place))
    }

    /// Whether another should be made; if so it counts as coming.
    fn wants(&self, kind: &Kind, most: usize) -> bool {
        let mut coming = lock(&self.coming);
        let there = lock(&self.waiting).iter().filter(|one| one.kind == *kind).count();
        let under_way = coming.iter().filter(|one| *one == kind).count();
        let wanted = there + under_way < most;
        if wanted {
            coming.push(kind.clone());
        }
        wanted
    }

    fn came(&self, kind: &Kind) {
        let mut coming = lock(&self.coming);
        if let Some(place) = coming.iter().position(|one| one == kind) {
            coming.remove(place);
        }
    }

    /// Takes away those that are too old, and those of other kinds than the `kinds` that were made last.
    fn surplus(&self, age: Duration, kinds: usize) -> Vec<Waiting> {
        let mut waiting = lock(&self.waiting);
        let mut last: Vec<Kind> = Vec::new();
        for one in waiting.iter().rev() {
            if last.len() < kinds && !last.contains(&one.kind) {
                last.push(one.kind.clone());
            }
        }
        waiting
            .extract_if(.., |one| one.made.elapsed() >= age || !last.contains(&one.kind))
            .collect()
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

    /// Makes a machine the sandbox's that waits for one, if there is one with this template and its limits. What only that one failed at is no
    /// error: then nothing is left of it. The sandbox may have other ids than before.
    pub(super) async fn take_ready(
        &self,
        keeper: &dyn Keeper,
        machine: &Machine,
        sandbox: &mut Sandbox,
        template: &MemoryId,
    ) -> Result<Option<(Link, Guest)>> {
        let kind = Kind { template: template.clone(), limits: machine.limits };
        let Some(waiting) = self.ready.take(&kind) else { return Ok(None) };
        let driver = self.driver(&waiting.driver)?;
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
        let taken = self.make_it(&waiting, keeper, machine);
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
        keeper: &dyn Keeper,
        machine: &Machine,
    ) -> Result<Link> {
        let began = Instant::now();
        let renew = Renew { now: moment(), identity: Some(identity(machine)), machine_id: false };
        let mut told = pin!(waiting.guest.renew(renew));
        let mut passed = pin!(keeper.pass_on(&waiting.machine.key, machine));
        // It is told before it goes on, most likely, and finds that with the first look. If it does not go on, nobody waits for an answer.
        let (early, link) = tokio::select! {
            biased;
            early = &mut told => (Some(early), passed.await?),
            link = &mut passed => (None, link?),
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
        let Some(template) = memory.first().cloned() else { return };
        if self.templates.has_failed(template.as_str()) {
            return;
        }
        let layers = &sandbox.image_layers;
        let model = Model {
            kind: Kind { template, limits: limits(sandbox) },
            memory: memory.to_vec(),
            driver: sandbox.config.driver.clone(),
            root: RootFs { image: layers.len(), ..self.store.root(&LayerId::fresh(), layers) },
        };
        while self.ready.wants(&model.kind, self.settings.ready) {
            tokio::spawn(stock_when_quiet(
                Arc::downgrade(self),
                model.clone(),
                self.shutdown.subscribe(),
            ));
        }
    }

    /// Ends all of them. None is made after that.
    pub(super) async fn end_ready_machines(&self) {
        // One that is being made is waited for: it would be left behind.
        let _one = self.ready.making.lock().await;
        self.end_surplus(Duration::ZERO, 0).await;
    }

    async fn end_surplus(&self, age: Duration, kinds: usize) {
        for Waiting { driver, machine, .. } in self.ready.surplus(age, kinds) {
            match self.driver(&driver) {
                Ok(driver) => self.end_ready(&driver, machine).await,
                Err(error) => tracing::warn!(error = chain_of(&error), "a machine is left"),
            }
        }
    }

    /// Makes one and puts it where it is found.
    async fn stock(&self, Model { kind, memory, driver, root }: Model) {
        let made = async {
            let driver = self.driver(&driver)?;
            let machine = self.nobodys(&fresh_key()?, root, kind.limits).await?;
            let mut over = self.shutdown.subscribe();
            let made = tokio::select! {
                made = self.make_ready(&driver, &machine, &memory) => made.map(Some),
                // What was begun is ended below, when it has come so far.
                _ = over.wait_for(|over| *over) => Ok(None),
            };
            if let Ok(Some(guest)) = made {
                return Ok(Some((machine, guest)));
            }
            self.end_ready(&driver, machine).await;
            made.map(|_| None)
        };
        match made.await {
            Ok(Some((machine, guest))) => {
                let one = Waiting { kind, driver, machine, guest, made: Instant::now() };
                lock(&self.ready.waiting).push(one);
            }
            Ok(None) => {}
            Err::<_, Error>(error) => {
                // Not at every create: an image whose `true` never ends would keep the host busy.
                self.templates.failed(kind.template.as_str().to_owned());
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
        let tried = tokio::time::timeout(TRIED_WITHIN, try_out(&up.guest)).await;
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

/// Makes one when nobody waits for a machine, and ends it again if nobody comes for it.
async fn stock_when_quiet(inner: Weak<Inner>, model: Model, mut over: watch::Receiver<bool>) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(AFTER / 2) => {}
            _ = over.wait_for(|over| *over) => return,
        }
        let Some(inner) = inner.upgrade() else { return };
        let _one = inner.ready.making.lock().await;
        if *over.borrow() {
            return;
        }
        if inner.ready.is_busy() {
            continue;
        }
        let kind = model.kind.clone();
        inner.stock(model).await;
        inner.ready.came(&kind);
        inner.end_surplus(AT_MOST, KINDS).await;
        break;
    }
    tokio::select! {
        () = tokio::time::sleep(AT_MOST) => {}
        _ = over.wait_for(|over| *over) => return,
    }
    if let Some(inner) = inner.upgrade() {
        inner.end_surplus(AT_MOST, KINDS).await;
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
