//! Starts a sandbox from its current snapshot, or from its image.
//!
//! Intent first: the manifest says `starting`, with the layer, the session and the uid range, before
//! the driver is asked for anything. A start that fails leaves `failed` and the snapshot it came
//! from; it never falls back to something older or to a fresh image by itself.

use std::sync::Arc;
use std::time::Duration;

use sandkeep_proto::link::Known;

use crate::db::{Owner, Page, Tombstones};
use crate::driver::{Driver, DriverError};
use crate::engine::error::error_chain;
use crate::engine::lifecycle::Lifecycle;
use crate::engine::machine::capabilities::pausing;
use crate::engine::machine::description::own_image;
use crate::engine::machine::memory_start::{StartMethod, StartPlan};
use crate::engine::observe::meters::Operation;
use crate::engine::running::live::{RunningSandbox, reach};
use crate::engine::running::turns::Slot;
use crate::engine::{Error, ErrorKind, Result, after};
use crate::failpoint;
use crate::failpoint::step;
use crate::model::lifecycle::LifecycleCommand;
use crate::model::{
    Change, CommandEnd, Ending, FORMAT, LayerId, MachineKey, OpenSession, RootFs, Sandbox, Session,
    SessionChanges, SessionEnd, SessionId, Snapshot, Usage, lifecycle, now,
};
use crate::store::Durability;

impl Lifecycle {
    /// Starts the sandbox in its turn. Of a running one: hands it out.
    pub(in crate::engine) async fn start_session(
        self: &Arc<Self>,
        slot: &Arc<Slot>,
        mut sandbox: Sandbox,
        created: bool,
    ) -> Result<Arc<RunningSandbox>> {
        if let Some(live) = slot.live() {
            return Ok(live);
        }
        let timing = self.context.meters.time(Operation::Start, &sandbox.config.driver);
        lifecycle::command(sandbox.phase(), LifecycleCommand::Start)
            .map_err(|_| Error::Gone(sandbox.name.clone()))?;
        // What it may reach is part of its project's manifest.
        self.tenancy.require_project(&sandbox.project)?;
        if sandbox.open_session().is_some() {
            // A broken session left files behind. They are kept before anything new is written.
            let ending = sandbox.ending().unwrap_or_else(Ending::broken);
            self.end_session(slot, &mut sandbox, ending).await?;
        }
        let driver = self.context.driver(&sandbox.config.driver)?;
        step("boot.begun");
        let _under_way = self.machines.warm.starting();
        // Nothing is on record yet: a sandbox whose secrets are gone stays as it was.
        self.secrets.check_secret_uses(&sandbox.project, &sandbox.config)?;
        self.secrets.brokered(&sandbox)?;
        let mut session = fresh_session(&sandbox);
        self.storage.snapshots.require_snapshot(&sandbox).await?;
        self.store.wait_for_room_to_start().await?;
        self.storage.drives.bound_start(&sandbox).await?;
        self.storage.compaction.bound_start(&sandbox).await?;
        self.require_packable(&driver, &sandbox).await?;
        step("boot.checked");
        let mut begin = self.machines.plan_start(&driver, &sandbox).await?;
        if let Some(begin) = &begin {
            self.inherit_from_snapshot(begin, &sandbox, &mut session).await?;
        }
        {
            // From reading what it stands on until that is on record, none of it may be collected.
            let hold = self.store.hold();
            let mut chain = self.chain(&sandbox).await?;
            loop {
                hold.layers(&chain).await;
                // What is still on record after the hold began was never unnamed.
                let now = self.records.current_snapshot(&sandbox).await?;
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
                let (hold, now) = self.references.hold_current(&sandbox).await?;
                if let Some(now) = now {
                    // It may have been compacted meanwhile.
                    begin.memory = now.memory;
                }
                held = Some(hold);
            } else if let Some(begin) = &begin {
                hold.memory(&begin.memory).await;
            }
            open.memory = begin.as_ref().map(|begin| begin.memory.clone()).unwrap_or_default();
            open.image = begin.as_ref().and_then(StartPlan::image);
            // A sandbox without drives does not wait for the drives of others.
            let drives = match sandbox.config.mounts.is_empty() {
                true => None,
                false => Some(self.storage.drives.changes.lock().await),
            };
            match self.storage.drives.attach(&sandbox, &session.id).await {
                Ok(mounted) => open.mounted = mounted,
                Err(error) => {
                    // Nothing is on record yet: it stays as it was.
                    self.store.discard(&open.layer).await?;
                    return Err(error);
                }
            }
            let uids = self.machines.take_uids();
            open.uids = uids.as_ref().ok().copied();
            sandbox.transition(Change::Start(open))?;
            sandbox.session = Some(session.id.clone());
            sandbox.used_at = session.started_at;
            let recorded = match uids {
                Ok(_) => self.records.record(&mut sandbox, Durability::Soon).await,
                Err(error) => Err(error),
            };
            drop((drives, held, hold));
            if let Err(error) = recorded {
                return Err(self.start_failed(&driver, sandbox, session, error).await);
            }
        }
        failpoint::pass("boot.recorded");
        if driver.disk().is_none() {
            self.integrity.limits.limit_layers(&sandbox).await;
        }
        step("boot.limited");
        let template = begin.as_ref().and_then(StartPlan::template);
        let from = sandbox.current.clone();
        let (up, ()) = tokio::join!(
            self.start_and_record(&driver, &mut sandbox, session.clone(), begin, created),
            self.storage.snapshots.note_use(from.as_ref())
        );
        match up {
            Ok((live, restored)) => {
                slot.set_live(Some(Arc::clone(&live)));
                // What a project or a secret became while it started did not find it yet.
                self.network.rules_changed(&live).await;
                self.watch_machine(&live);
                if let Some(memory) = template {
                    self.machines.restock(&live.sandbox(), &memory);
                }
                // Services that resume in memory exist already.
                if restored {
                    self.sessions.adopt_services(&live, &[]);
                } else {
                    self.sessions.start_services(&live);
                }
                timing.ok();
                Ok(live)
            }
            Err(error) => Err(self.start_failed(&driver, sandbox, session, error).await),
        }
    }

    async fn start_and_record(
        self: &Arc<Self>,
        driver: &Arc<dyn Driver>,
        sandbox: &mut Sandbox,
        session: Session,
        begin: Option<StartPlan>,
        created: bool,
    ) -> Result<(Arc<RunningSandbox>, bool)> {
        // A new name is acknowledged with the answer to this, so it must last; a resume changes nothing
        // that the last stop did not already make last. A power cut ends every machine, so that a record
        // that says `starting` is as good as one that says `running`, and it can be synced while the
        // machine is made. Not where a start that came to no end is taken back.
        let early = created && pausing(&**driver).is_none();
        let starting = sandbox.clone();
        let (up, synced, kept) = tokio::join!(
            self.start_machine(driver, sandbox, session.clone(), begin),
            async {
                match early {
                    true => self.context.catalog.sync_new(&starting).await,
                    false => Ok(()),
                }
            },
            self.records.keep_session(&session)
        );
        let (live, restored) = up?;
        synced?;
        kept?;
        failpoint::pass("boot.up");
        sandbox.transition(Change::Up)?;
        live.set_sandbox(sandbox.clone());
        let goes_on = restored.is_some();
        if let Some((snapshot, commands)) = restored {
            self.secrets.mask_again(&live);
            self.sessions.resume_commands(&live, &snapshot, commands).await?;
        }
        self.secrets.give_brokered(&live).await?;
        self.sessions.run_start_hooks(&live, created).await;
        step("boot.hooks");
        let now = live.session();
        if now != session {
            self.records.keep_session(&now).await?;
        }
        step("boot.session");
        let durability = if created && !early { Durability::Synced } else { Durability::Soon };
        self.records.record(sandbox, durability).await?;
        failpoint::pass("boot.done");
        live.set_sandbox(sandbox.clone());
        Ok((live, goes_on))
    }

    /// Takes over what the session knew whose memory this one resumes: which secrets may be in
    /// there, and which services somebody started or stopped by hand.
    async fn inherit_from_snapshot(
        &self,
        begin: &StartPlan,
        sandbox: &Sandbox,
        session: &mut Session,
    ) -> Result<()> {
        let StartMethod::Memory(snapshot) = &begin.how else { return Ok(()) };
        for given in snapshot.secrets.clone() {
            session.secrets.push(given);
            if let Err(error) = self.secrets.given_values(&sandbox.project, session) {
                session.secrets.pop();
                tracing::error!(sandbox = %sandbox.name, error = error_chain(&error), "the memory of a sandbox may contain a secret whose value is not available any more");
            }
        }
        if snapshot.sandbox == sandbox.id
            && let Some(before) = self.db.session(&snapshot.session).await?
        {
            session.services = before.services;
        }
        Ok(())
    }

    async fn start_machine(
        &self,
        driver: &Arc<dyn Driver>,
        sandbox: &mut Sandbox,
        mut session: Session,
        begin: Option<StartPlan>,
    ) -> Result<(Arc<RunningSandbox>, Option<(Box<Snapshot>, Vec<Known>)>)> {
        let key = MachineKey::from(&sandbox.id);
        let rules = self.network.rules(sandbox)?;
        let (link, guest, device, restored, authority) = match begin {
            Some(begin) => {
                let authority = self.network.authority(sandbox).await?;
                let up =
                    self.machines.bring_up_machine(driver, sandbox, &mut session, begin).await?;
                if up.commands_lost {
                    self.sessions.commands_lost(&sandbox.id, CommandEnd::Lost).await?;
                }
                failpoint::pass("boot.started");
                (up.link, Ok(up.guest), driver.network(&key).await, up.restored, authority)
            }
            None => {
                let machine = self.machines.machine(sandbox)?;
                let (link, authority) =
                    tokio::join!(driver.start(&machine), self.network.authority(sandbox));
                let link = link?;
                failpoint::pass("boot.started");
                let (guest, device) = tokio::join!(
                    reach(&link, self.context.settings.patience, self.context.settings.guest),
                    driver.network(&key)
                );
                (link, guest, device, None, authority?)
            }
        };
        step("boot.reached");
        let live =
            RunningSandbox::new(Arc::clone(driver), key, link, guest?, sandbox.clone(), session);
        if let Some(layer) = sandbox.open_layer() {
            if self.context.settings.record_changes {
                live.changes.begin_session(SessionChanges::default());
            }
            live.changes.begin_layer(layer, driver.relayer().is_none());
        }
        self.network.connect_session(&live, device?, rules, authority).await?;
        Ok((live, restored))
    }

    /// Leaves nothing of a start that failed but the reason.
    async fn start_failed(
        self: &Arc<Self>,
        driver: &Arc<dyn Driver>,
        mut sandbox: Sandbox,
        mut session: Session,
        error: Error,
    ) -> Error {
        let reason = error_chain(&error);
        tracing::error!(sandbox = %sandbox.name, reason, "a sandbox did not start");
        let held = sandbox.clone();
        let gone = match driver.stop(&MachineKey::from(&sandbox.id)).await {
            Ok(_) => true,
            // What may be alive keeps its layers and its ids; the next start ends it first.
            Err(error) => {
                tracing::error!(sandbox = %sandbox.name, error = error_chain(&error), "the machine of a failed start was not removed");
                false
            }
        };
        let changed = sandbox.transition(Change::StartBroke { why: reason.clone(), gone });
        if let Err(error) = &changed {
            tracing::error!(sandbox = %sandbox.name, %error, "the failed start was not recorded");
        }
        session.ended_at = Some(now());
        session.end = Some(SessionEnd::StartFailed);
        if let Err(error) = self.records.keep_session(&session).await {
            tracing::warn!(session = %session.id, error = error_chain(&error), "the end of a session is not written to disk yet");
        }
        // Only what no record references any more is removed.
        let unnamed = gone && changed.is_ok();
        self.record_outcome(&mut sandbox, unnamed.then_some(held)).await;
        match error.kind() {
            // The disk, or where a drive was to be mounted, not the sandbox: the caller gets that
            // error.
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
    pub(in crate::engine) async fn release_start(self: &Arc<Self>, held: &Sandbox) {
        self.references.discard_when_synced(held.open_layer().cloned());
        for mounted in held.mounted() {
            // A session that never began wrote nothing that was reported to anybody.
            if let Err(error) = self.store.clear_disk(&mounted.layer).await {
                tracing::warn!(%error, "the disk of a drive was not removed after a failed start");
            }
        }
        // A drive that cannot be freed now is freed when the next comes for it.
        if let Err(error) = self.storage.drives.detach(held).await {
            tracing::error!(sandbox = %held.name, error = error_chain(&error), "a failed start left drives attached");
        }
        self.machines.release_uids(held.uids());
    }

    /// Refuses a start that must fail because of what the sandbox wrote, before anything of it is on record. Packs what has to be packed.
    async fn require_packable(&self, driver: &Arc<dyn Driver>, sandbox: &Sandbox) -> Result<()> {
        let Some(disk) = driver.disk() else { return Ok(()) };
        let chain = self.chain(sandbox).await?;
        let kept = self.records.current_snapshot(sandbox).await?.filter(Snapshot::has_memory);
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
        self.storage.snapshots.require_snapshot(sandbox).await?;
        let Some(id) = &sandbox.current else {
            return match self.references.missing_layer(&sandbox.image_layers).await {
                None => Ok(sandbox.image_layers.clone()),
                Some(reason) => Err(Error::ImageDamaged { name: sandbox.name.clone(), reason }),
            };
        };
        let problem = match self.db.snapshot(id).await? {
            None => "it is not in the store".to_owned(),
            Some(snapshot) => match self.references.missing_layer(&snapshot.layers).await {
                None => return Ok(snapshot.layers),
                Some(reason) => reason,
            },
        };
        let mut offers = Vec::new();
        let owner = Owner::Sandbox(&sandbox.id);
        let others = self.db.snapshots(owner, Tombstones::Without, &Page::all()).await?;
        for other in others.items.into_iter().filter(|other| other.id != *id) {
            if self.references.missing_layer(&other.layers).await.is_none() {
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

    /// Notices when a machine ends by itself, and keeps what it had written.
    pub(in crate::engine) fn watch_machine(self: &Arc<Self>, live: &Arc<RunningSandbox>) {
        let (this, live) = (Arc::downgrade(self), Arc::downgrade(live));
        self.context.tasks.spawn_until_shutdown(async move {
            let Some((driver, key)) =
                live.upgrade().map(|live| (Arc::clone(&live.driver), live.key.clone()))
            else {
                return;
            };
            driver.died(&key).await;
            // A full disk may be in the way; what it wrote must be kept all the same, later.
            loop {
                let (Some(this), Some(dead)) = (this.upgrade(), live.upgrade()) else { return };
                let id = dead.sandbox().id.clone();
                match this.turn(id, move |this, slot| this.end_broken_session(slot, dead)).await {
                    Ok(()) | Err(Error::ShuttingDown) => return,
                    Err(error) => {
                        tracing::error!(
                            error = error_chain(&error),
                            "a session that ended unexpectedly is not sealed yet"
                        );
                    }
                }
                tokio::time::sleep(Duration::from_secs(5)).await;
            }
        });
    }

    /// Ends the session of a machine that ended by itself or cannot be controlled, and seals what it had written, unless that is
    /// done already.
    pub(in crate::engine) async fn end_broken_session(
        self: Arc<Self>,
        slot: Arc<Slot>,
        dead: Arc<RunningSandbox>,
    ) -> Result<()> {
        if !slot.live().is_some_and(|live| Arc::ptr_eq(&live, &dead)) {
            return Ok(());
        }
        let mut sandbox = (*dead.sandbox()).clone();
        tracing::warn!(sandbox = %sandbox.name, "the session of a sandbox ended unexpectedly; its files are kept");
        self.end_session(&slot, &mut sandbox, Ending::broken()).await?;
        Ok(())
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
        changes: None,
    }
}
