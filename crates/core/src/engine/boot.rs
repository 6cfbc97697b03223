//! Bringing a sandbox up: from its current snapshot, or from its image.
//!
//! Intent first: the manifest says `starting`, with the layer, the session and the uid range, before
//! the driver is asked for anything. A start that fails leaves `failed` and the snapshot it came
//! from; it never falls back to something older or to a fresh image by itself.

use std::sync::Arc;
use std::time::Duration;

use sandkeep_proto::link::Known;

use super::damage::DamageKind;
use super::lifecycle::{self, Command as Wish};
use super::live::{Live, reach};
use super::machine::{Begin, How, pausing};
use super::slot::{Slot, lock};
use super::uids::IDS;
use super::{Absent, Error, ErrorKind, Inner, Result, after};
use crate::db::{Owner, Page, Tombstones};
use crate::driver::{Driver, DriverError, Machine};
use crate::failpoint::{self, step};
use crate::model::{
    Change, Ending, FORMAT, LayerId, Limits, MachineKey, OpenSession, RootFs, Sandbox, Session,
    SessionEnd, SessionId, Snapshot, UidRange, Usage, now,
};
use crate::store::Durability;

impl Inner {
    /// Starts the sandbox in its turn. Of a running one: hands it out.
    pub(super) async fn boot(
        self: &Arc<Self>,
        slot: &Arc<Slot>,
        mut sandbox: Sandbox,
        created: bool,
    ) -> Result<Arc<Live>> {
        if let Some(live) = slot.live() {
            return Ok(live);
        }
        lifecycle::command(sandbox.phase(), Wish::Start)
            .map_err(|_| Error::Gone(sandbox.name.clone()))?;
        // What it may reach is part of its project's manifest.
        self.require_project(&sandbox.project)?;
        if sandbox.open_session().is_some() {
            // A broken session left files behind. They are kept before anything new is written.
            let ending = sandbox.ending().unwrap_or_else(Ending::broken);
            self.settle(slot, &mut sandbox, ending).await?;
        }
        let driver = self.driver(&sandbox.config.driver)?;
        step("boot.begun");
        let _under_way = self.ready.starting();
        // Nothing is on record yet: a sandbox whose secrets are gone stays as it was.
        self.check_secret_uses(&sandbox.project, &sandbox.config)?;
        self.brokered(&sandbox)?;
        let mut session = fresh_session(&sandbox);
        self.require_ground(&sandbox).await?;
        self.store.wait_for_room_to_start().await?;
        self.bound_start(&sandbox).await?;
        self.require_packable(&driver, &sandbox).await?;
        step("boot.checked");
        let mut begin = self.begin(&driver, &sandbox).await?;
        if let Some(begin) = &begin {
            self.carry_over(begin, &sandbox, &mut session).await?;
        }
        {
            // From reading what it stands on until that is on record, none of it may be collected.
            let hold = self.store.hold();
            let mut chain = self.chain(&sandbox).await?;
            loop {
                hold.layers(&chain).await;
                // What is still on record after the hold began was never unnamed.
                let now = self.current_snapshot(&sandbox).await?;
                if now.is_none_or(|now| now.layers == chain) {
                    break;
                }
                chain = self.chain(&sandbox).await?;
            }
            let layer = self.store.begin(&chain).await?;
            let mut open = OpenSession::new(layer, chain);
            step("boot.layer");
            let mut held = None;
            if let Some(begin) = begin.as_mut().filter(|begin| begin.is_of_snapshot()) {
                let (hold, now) = self.hold_current(&sandbox).await?;
                if let Some(now) = now {
                    // It may have been shortened meanwhile.
                    begin.memory = now.memory;
                }
                held = Some(hold);
            } else if let Some(begin) = &begin {
                hold.memory(&begin.memory).await;
            }
            open.memory = begin.as_ref().map(|begin| begin.memory.clone()).unwrap_or_default();
            open.image = begin.as_ref().and_then(Begin::image);
            // One that mounts nothing waits for nobody's drive.
            let drives = match sandbox.config.mounts.is_empty() {
                true => None,
                false => Some(self.drives.lock().await),
            };
            match self.attach(&sandbox, &session.id).await {
                Ok(mounted) => open.mounted = mounted,
                Err(error) => {
                    // Nothing is on record yet: it stays as it was.
                    self.store.discard(&open.layer).await?;
                    return Err(error);
                }
            }
            let uids = self.take_uids();
            open.uids = uids.as_ref().ok().copied();
            sandbox.transition(Change::Start(open))?;
            sandbox.session = Some(session.id.clone());
            sandbox.used_at = session.started_at;
            let recorded = match uids {
                Ok(_) => self.record(&mut sandbox, Durability::Soon).await,
                Err(error) => Err(error),
            };
            drop((drives, held, hold));
            if let Err(error) = recorded {
                return Err(self.start_failed(&driver, sandbox, session, error).await);
            }
        }
        failpoint::pass("boot.recorded");
        if driver.disk().is_none() {
            self.limit_layers(&sandbox).await;
        }
        step("boot.limited");
        let template = begin.as_ref().and_then(Begin::template);
        let from = sandbox.current.clone();
        let (up, ()) = tokio::join!(
            self.bring_up(&driver, &mut sandbox, session.clone(), begin, created),
            self.note_use(from.as_ref())
        );
        match up {
            Ok((live, restored)) => {
                slot.set_live(Some(Arc::clone(&live)));
                // What a project or a secret became while it started did not find it yet.
                self.rules_changed(&live).await;
                self.watch_death(&live);
                if let Some(memory) = template {
                    self.restock(&live.sandbox(), &memory);
                }
                // Services that go on in memory are there already.
                if restored {
                    self.adopt_services(&live, &[]);
                } else {
                    self.start_services(&live);
                }
                Ok(live)
            }
            Err(error) => Err(self.start_failed(&driver, sandbox, session, error).await),
        }
    }

    async fn bring_up(
        self: &Arc<Self>,
        driver: &Arc<dyn Driver>,
        sandbox: &mut Sandbox,
        session: Session,
        begin: Option<Begin>,
        created: bool,
    ) -> Result<(Arc<Live>, bool)> {
        // A new name is acknowledged with the answer to this, so it must last; a resume changes nothing
        // that the last stop did not already make last. A power cut ends every machine, so that a record
        // that says `starting` is as good as one that says `running`, and it can be synced while the
        // machine is made. Not where a start that came to no end is taken back.
        let early = created && pausing(&**driver).is_none();
        let starting = sandbox.clone();
        let (up, synced) = tokio::join!(self.power_up(driver, sandbox, session, begin), async {
            match early {
                true => self.store.write_founded(&starting).await,
                false => Ok(()),
            }
        });
        let (live, restored) = up?;
        synced?;
        failpoint::pass("boot.up");
        sandbox.transition(Change::Up)?;
        live.set_sandbox(sandbox.clone());
        let goes_on = restored.is_some();
        if let Some((snapshot, commands)) = restored {
            self.mask_again(&live);
            self.take_up(&live, &snapshot, commands).await?;
        }
        self.give_brokered(&live).await?;
        self.run_start_hooks(&live, created).await;
        step("boot.hooks");
        self.keep_session(&live.session()).await?;
        step("boot.session");
        let durability = if created && !early { Durability::Synced } else { Durability::Soon };
        self.record(sandbox, durability).await?;
        failpoint::pass("boot.done");
        live.set_sandbox(sandbox.clone());
        Ok((live, goes_on))
    }

    /// What a session knows from the one whose memory it goes on with: which secrets may be in there, and which services
    /// somebody started or stopped by hand.
    async fn carry_over(
        &self,
        begin: &Begin,
        sandbox: &Sandbox,
        session: &mut Session,
    ) -> Result<()> {
        let How::Memory(snapshot) = &begin.how else { return Ok(()) };
        for given in snapshot.secrets.clone() {
            session.secrets.push(given);
            if let Err(error) = self.given_values(&sandbox.project, session) {
                session.secrets.pop();
                tracing::error!(sandbox = %sandbox.name, error = chain_of(&error), "its memory may hold a value that nobody can look for any more");
            }
        }
        if snapshot.sandbox == sandbox.id
            && let Some(before) = self.db.session(&snapshot.session).await?
        {
            session.services = before.services;
        }
        Ok(())
    }

    async fn power_up(
        &self,
        driver: &Arc<dyn Driver>,
        sandbox: &mut Sandbox,
        mut session: Session,
        begin: Option<Begin>,
    ) -> Result<(Arc<Live>, Option<(Box<Snapshot>, Vec<Known>)>)> {
        let key = MachineKey::from(&sandbox.id);
        let rules = self.rules(sandbox)?;
        let (link, guest, device, restored) = match begin {
            Some(begin) => {
                let up = self.bring_up_machine(driver, sandbox, &mut session, begin).await?;
                failpoint::pass("boot.started");
                (up.link, Ok(up.guest), driver.network(&key).await, up.restored)
            }
            None => {
                let link = driver.start(&self.machine(sandbox)?).await?;
                failpoint::pass("boot.started");
                let (guest, device) = tokio::join!(
                    reach(&link, self.settings.patience, self.settings.guest),
                    driver.network(&key)
                );
                (link, guest, device, None)
            }
        };
        step("boot.reached");
        let live = Live::new(Arc::clone(driver), key, link, guest?, sandbox.clone(), session);
        self.go_online(&live, device?, rules).await?;
        Ok((live, restored))
    }

    /// A machine of a sandbox as it would be, wherever its files are.
    pub(super) fn unplaced(&self, sandbox: &Sandbox) -> Machine {
        Machine {
            key: MachineKey::from(&sandbox.id),
            hostname: hostname(sandbox.name.as_str()),
            root: self.store.root(&LayerId::fresh(), &[]),
            uids: UidRange { base: self.settings.uid_base, count: IDS },
            limits: limits(sandbox),
            mounts: Vec::new(),
        }
    }

    pub(super) fn machine(&self, sandbox: &Sandbox) -> Result<Machine> {
        let missing = || Error::invalid("sandbox", "its record names no open layer");
        let open = sandbox.open_session().ok_or_else(missing)?;
        Ok(Machine {
            key: MachineKey::from(&sandbox.id),
            hostname: hostname(sandbox.name.as_str()),
            root: RootFs {
                image: image_layers(sandbox),
                ..self.store.root(&open.layer, &open.chain)
            },
            uids: open.uids.ok_or_else(missing)?,
            limits: limits(sandbox),
            mounts: self.machine_mounts(sandbox),
        })
    }

    /// Leaves nothing of a start that failed but the reason.
    async fn start_failed(
        self: &Arc<Self>,
        driver: &Arc<dyn Driver>,
        mut sandbox: Sandbox,
        mut session: Session,
        error: Error,
    ) -> Error {
        let reason = chain_of(&error);
        tracing::error!(sandbox = %sandbox.name, reason, "a sandbox did not start");
        let held = sandbox.clone();
        let gone = match driver.stop(&MachineKey::from(&sandbox.id)).await {
            Ok(_) => true,
            // What may be alive keeps its layers and its ids; the next start ends it first.
            Err(error) => {
                tracing::error!(sandbox = %sandbox.name, error = chain_of(&error), "a failed start left something behind");
                false
            }
        };
        let changed = sandbox.transition(Change::StartBroke { why: reason.clone(), gone });
        if let Err(error) = &changed {
            tracing::error!(sandbox = %sandbox.name, %error, "that it did not start is not on record");
        }
        session.ended_at = Some(now());
        session.end = Some(SessionEnd::StartFailed);
        if let Err(error) = self.keep_session(&session).await {
            tracing::warn!(session = %session.id, error = chain_of(&error), "how a session ends is not on record yet");
        }
        // Only what no record names any more is taken away.
        let unnamed = gone && changed.is_ok();
        self.record_outcome(&mut sandbox, unnamed.then_some(held)).await;
        match error.kind() {
            // The disk, or where a drive was to be mounted, not the sandbox: the caller is told that.
            ErrorKind::Exhausted => error,
            _ if matches!(
                error,
                Error::Driver(DriverError::MountPoint { .. } | DriverError::Unpackable { .. })
            ) =>
            {
                error
            }
            _ => Error::StartFailed { name: sandbox.name, reason },
        }
    }

    /// Frees what a start that failed had taken.
    pub(super) async fn clear_away(self: &Arc<Self>, held: &Sandbox) {
        self.discard_when_synced(held.open_layer().cloned());
        for mounted in held.mounted() {
            // A session that never began wrote nothing that anybody was told of.
            if let Err(error) = self.store.clear_disk(&mounted.layer).await {
                tracing::warn!(%error, "the disk of a drive is left");
            }
        }
        // A drive that cannot be freed now is freed when the next comes for it.
        if let Err(error) = self.detach(held).await {
            tracing::error!(sandbox = %held.name, error = chain_of(&error), "a failed start left drives attached");
        }
        self.give_uids(held.uids());
    }

    /// Refuses a start that must fail because of what the sandbox wrote, before anything of it is on record. Packs what has to be packed.
    async fn require_packable(&self, driver: &Arc<dyn Driver>, sandbox: &Sandbox) -> Result<()> {
        let Some(disk) = driver.disk() else { return Ok(()) };
        let chain = self.chain(sandbox).await?;
        let kept = self.current_snapshot(sandbox).await?.filter(Snapshot::has_memory);
        let image = kept.and_then(|kept| kept.image);
        let image = image.unwrap_or_else(|| own_image(&chain, sandbox));
        let root = RootFs { image, ..self.store.root(&LayerId::fresh(), &chain) };
        match disk.roots(&root).await {
            Err(error @ DriverError::Unpackable { .. }) => Err(error.into()),
            // What else is wrong shows when the machine is started, and is on record then.
            _ => Ok(()),
        }
    }

    /// What the next session stands on, checked to be all there.
    async fn chain(&self, sandbox: &Sandbox) -> Result<Vec<LayerId>> {
        self.require_ground(sandbox).await?;
        let Some(id) = &sandbox.current else {
            return match self.missing_layer(&sandbox.image_layers).await {
                None => Ok(sandbox.image_layers.clone()),
                Some(reason) => Err(Error::ImageDamaged { name: sandbox.name.clone(), reason }),
            };
        };
        let problem = match self.db.snapshot(id).await? {
            None => "it is not in the store".to_owned(),
            Some(snapshot) => match self.missing_layer(&snapshot.layers).await {
                None => return Ok(snapshot.layers),
                Some(reason) => reason,
            },
        };
        let mut offers = Vec::new();
        let owner = Owner::Sandbox(&sandbox.id);
        let others = self.db.snapshots(owner, Tombstones::Without, &Page::all()).await?;
        for other in others.items.into_iter().filter(|other| other.id != *id) {
            if self.missing_layer(&other.layers).await.is_none() {
                offers.push(other.id);
            }
        }
        Err(Error::Unresumable {
            name: sandbox.name.clone(),
            snapshot: id.clone(),
            reason: problem,
            offers,
        })
    }

    pub(super) async fn missing_layer(&self, layers: &[LayerId]) -> Option<String> {
        if self.store.has_layers(layers).await {
            return layers.iter().find_map(|layer| self.changed_layer(layer));
        }
        for layer in layers {
            let mut found = self.store.layer(layer).await;
            if found.as_ref().is_err_and(crate::store::StoreError::is_not_found) {
                // It may be in the trash, by mistake or by hand.
                if let Err(error) = self.untrash(vec![layer.to_string()]).await {
                    tracing::error!(%layer, error = chain_of(&error), "was not taken out of the trash");
                }
                found = self.store.layer(layer).await;
            }
            if let Err(error) = found {
                return Some(error.to_string());
            }
            if !self.store.diff_dir(layer).is_dir() {
                return Some(format!("the files of layer {layer} are gone"));
            }
            if let Some(changed) = self.changed_layer(layer) {
                return Some(changed);
            }
        }
        None
    }

    fn changed_layer(&self, layer: &LayerId) -> Option<String> {
        let changed = self.damage.detail(DamageKind::LayerChanged, &format!("layers/{layer}"))?;
        Some(format!("layer {layer} is not what was sealed: {changed}"))
    }

    /// Notices when a machine ends by itself, and keeps what it had written.
    pub(super) fn watch_death(self: &Arc<Self>, live: &Arc<Live>) {
        let (inner, live) = (Arc::downgrade(self), Arc::downgrade(live));
        tokio::spawn(async move {
            let Some((driver, key)) =
                live.upgrade().map(|live| (Arc::clone(&live.driver), live.key.clone()))
            else {
                return;
            };
            driver.died(&key).await;
            // A full disk may be in the way; what it wrote must be kept all the same, later.
            loop {
                let (Some(inner), Some(dead)) = (inner.upgrade(), live.upgrade()) else { return };
                let id = dead.sandbox().id.clone();
                match inner.turn(id, move |inner, slot| inner.bury(slot, dead)).await {
                    Ok(()) | Err(Error::ShuttingDown) => return,
                    Err(error) => {
                        tracing::error!(
                            error = chain_of(&error),
                            "a session that broke off is not sealed yet"
                        );
                    }
                }
                tokio::time::sleep(Duration::from_secs(5)).await;
            }
        });
    }

    /// Ends the session of a machine that ended by itself or cannot be controlled, and seals what it had written, unless that is
    /// done already.
    pub(super) async fn bury(self: Arc<Self>, slot: Arc<Slot>, dead: Arc<Live>) -> Result<()> {
        if !slot.live().is_some_and(|live| Arc::ptr_eq(&live, &dead)) {
            return Ok(());
        }
        let mut sandbox = (*dead.sandbox()).clone();
        tracing::warn!(sandbox = %sandbox.name, "its session breaks off; what it wrote is kept");
        self.settle(&slot, &mut sandbox, Ending::broken()).await?;
        Ok(())
    }

    pub(super) fn driver(&self, name: &str) -> Result<Arc<dyn Driver>> {
        let missing = || match self.settings.absent_drivers.get(name).cloned() {
            Some(Absent { reason, fix }) => {
                Error::AbsentDriver { asked: name.to_owned(), reason, fix }
            }
            None => Error::NoDriver {
                asked: name.to_owned(),
                have: self.drivers.keys().copied().collect(),
            },
        };
        self.drivers.get(name).cloned().ok_or_else(missing)
    }

    /// Writes the sandbox down: disk first, then the index.
    pub(super) async fn record(&self, sandbox: &mut Sandbox, durability: Durability) -> Result<()> {
        sandbox.updated_at = now();
        self.store.write(sandbox, durability).await?;
        self.recorded(sandbox).await
    }

    /// The sandbox's record is on disk.
    pub(super) async fn recorded(&self, sandbox: &Sandbox) -> Result<()> {
        self.books().hold_sandbox(sandbox);
        self.db.put_sandbox(sandbox).await?;
        // What was not on record is outdated.
        let mut unrecorded = lock(&self.unrecorded);
        if let Some(outcome) = unrecorded.get_mut(&sandbox.id) {
            outcome.sandbox = None;
        }
        drop(unrecorded);
        self.events.recorded(sandbox);
        Ok(())
    }

    pub(super) async fn keep_session(&self, session: &Session) -> Result<()> {
        self.store.write(session, Durability::Soon).await?;
        self.db.put_session(session).await?;
        Ok(())
    }
}

/// How many of the lowest layers of its chain are an image's.
pub(super) fn image_layers(sandbox: &Sandbox) -> usize {
    let said = sandbox.open_session().and_then(|open| open.image);
    said.unwrap_or_else(|| own_image(sandbox.open_chain(), sandbox))
}

/// How many of the lowest layers of a chain are of the image that a sandbox was made from.
fn own_image(chain: &[LayerId], sandbox: &Sandbox) -> usize {
    match chain.ends_with(&sandbox.image_layers) {
        true => sandbox.image_layers.len(),
        false => 0,
    }
}

pub(super) fn limits(sandbox: &Sandbox) -> Limits {
    let resources = sandbox.config.resources;
    Limits {
        millicpus: resources.millicpus,
        memory: resources.memory,
        pids: resources.pids,
        file_size: resources.disk,
    }
}

fn fresh_session(sandbox: &Sandbox) -> Session {
    let started_at = now();
    Session {
        format: FORMAT,
        id: SessionId::fresh(),
        sandbox: sandbox.id.clone(),
        from: sandbox.current.clone(),
        generation: sandbox.generation,
        started_at,
        requested_stop_at: None,
        ended_at: None,
        end: None,
        snapshot: None,
        usage: Usage::default(),
        deadline: sandbox.config.session_timeout.and_then(|span| after(started_at, span)),
        hooks: Vec::new(),
        valid: None,
        services: Default::default(),
        secrets: Vec::new(),
        fallback: None,
    }
}

/// A name that hosts may have: no underscores, at most 63 characters.
fn hostname(name: &str) -> String {
    let plain: String = name.chars().take(63).map(|c| if c == '_' { '-' } else { c }).collect();
    let trimmed = plain.trim_matches('-');
    if trimmed.is_empty() { "sandbox".to_owned() } else { trimmed.to_owned() }
}

/// An error with all its causes, for logs and records.
pub(super) fn chain_of(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        // Transparent wrappers say the same thing twice.
        if !text.ends_with(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}
