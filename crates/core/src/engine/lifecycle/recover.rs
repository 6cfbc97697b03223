//! Recovery after a restart: reads what is on disk, completes pending effects, adopts live machines.
//!
//! The catalog reads all records and brings its index up to date. After that every sandbox is brought
//! to a phase that can be explained:
//!
//! | found | machine | then |
//! |---|---|---|
//! | `running` | alive | adopted: session, commands and logs go on |
//! | `running` | gone | what it wrote is sealed as `recovered`; the session was `interrupted` |
//! | `running`, root being exchanged | alive | ended and both layers sealed: only the agent was alive |
//! | `starting` | any | ended; what hooks may have written is sealed |
//! | `running`, being captured | alive | let go on, thawed, adopted: until the capture is on record it runs |
//! | `paused` | alive | ended: all of it is kept |
//! | `stopping` | any | the stop is finished |
//! | `deleted` | any | the delete is finished |
//! | none | alive | ended: nobody owns it |
//!
//! A machine with disks of its own that is gone is booted once more for what it wrote (`export_by_rescue_boot`), after this, in its
//! sandbox's turn.
//!
//! *Recovery never delays the start.* [`Lifecycle::recover`] reads the disk, learns which machines are alive, which uids are taken and
//! who holds which layers, and takes the turn of every sandbox. All else happens in a task per sandbox after the server listens:
//! an agent that does not answer, or a layer that takes long to seal, delays only callers that need
//! that sandbox. Agents are waited for by all these tasks at the same time; what is heavy on the
//! disk is done by [`AT_ONCE`] of them. Until its task is done a sandbox is listed as it was found:
//! `running` if its machine is alive, `stopping` if what it wrote is still to be sealed.
//!
//! Nothing is collected as garbage until all of them are done.
//!
//! Drives follow their sandboxes; one that is attached to an unknown session is freed last.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use sandkeep_proto::link::Known;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::db::Page;
use crate::driver::{Driver, Link, WARM_VM};
use crate::engine::context::damage::DamageKind;
use crate::engine::error::error_chain;
use crate::engine::lifecycle::Lifecycle;
use crate::engine::machine::capabilities::pausing;
use crate::engine::machine::template::TEMPLATE;
use crate::engine::running::live::{RunningSandbox, reach};
use crate::engine::running::turns::Recovering;
use crate::engine::{Delete, Error, Result};
use crate::guest::Guest;
use crate::model::lifecycle::Phase;
use crate::model::{
    Change, CommandEnd, CommandState, Ending, Image, Layer, MachineKey, MemoryLayer, Sandbox,
    SandboxId, SandboxState, Secret, Template,
};
use crate::store::{Damaged, Durability};

/// How many sandboxes are sealed or erased at a time.
const AT_ONCE: usize = 32;
/// How long the end of machines without a sandbox is waited for. They may write to drives of other sandboxes.
const UNOWNED_WITHIN: Duration = Duration::from_secs(10);

/// The sandboxes on record.
struct RecordedSandboxes {
    sandboxes: Vec<Sandbox>,
    /// Those whose records cannot be used.
    unavailable: HashSet<SandboxId>,
}

/// A sandbox to be recovered, in its turn.
struct ToRecover {
    sandbox: Sandbox,
    link: Option<Link>,
    recovering: Recovering,
}

impl Lifecycle {
    /// Reads what is on disk and begins to recover it. Waits for no guest.
    pub(in crate::engine) async fn recover(self: &Arc<Self>) -> Result<()> {
        let RecordedSandboxes { mut sandboxes, unavailable } = self.reindex().await?;
        self.secrets.check_secrets_key(&sandboxes).await?;
        let mut alive = self.survivors().await?;
        for sandbox in &mut sandboxes {
            self.context.events.learn(sandbox);
            let is_alive = alive.contains_key(&sandbox.id);
            self.machines.adopt_uids(sandbox, is_alive);
        }
        let mut found = Vec::with_capacity(sandboxes.len());
        for sandbox in sandboxes {
            let link = alive.remove(&sandbox.id);
            if link.is_none() && sandbox.phase() == Phase::Running {
                // In the index alone: what is on disk says what is to be done. A start that broke off stays `starting`: that it never
                // took commands must still be known when this recovery fails and a later call completes it.
                let mut shown = sandbox.clone();
                shown.transition(Change::End(Ending::broken()))?;
                shown.phase_at = sandbox.phase_at;
                self.context.catalog.show(&shown).await?;
            }
            let recovering = self.turns.slot(&sandbox.id).recover().await;
            found.push(ToRecover { sandbox, link, recovering });
        }
        // One is what comes after all sandboxes.
        self.context.recovery.send_replace(found.len() + 1);
        // What these wrote is nowhere else.
        let (left, unowned): (Vec<_>, Vec<_>) =
            alive.into_keys().partition(|id| unavailable.contains(id));
        for id in left {
            tracing::error!(machine = %id, "a machine is left running: the record of its sandbox cannot be used");
        }
        self.end_unowned(unowned).await;
        let this = Arc::clone(self);
        self.context.tasks.spawn(async move { this.recover_all(found).await });
        Ok(())
    }

    async fn recover_all(self: Arc<Self>, found: Vec<ToRecover>) {
        let heavy = Arc::new(Semaphore::new(AT_ONCE));
        let mut under_way = JoinSet::new();
        for one in found {
            let (this, heavy) = (Arc::clone(&self), Arc::clone(&heavy));
            under_way.spawn(async move {
                let name = one.sandbox.name.clone();
                match this.recover_one(one, &heavy).await {
                    // The next daemon finishes it.
                    Ok(()) | Err(Error::ShuttingDown) => {}
                    Err(error) => tracing::error!(sandbox = %name, error = error_chain(&error), "a sandbox was not recovered; start or delete it"),
                }
            });
        }
        while let Some(ended) = under_way.join_next().await {
            if let Err(error) = ended {
                tracing::error!(%error, "the recovery of a sandbox panicked; start or delete it");
            }
            self.context.recovery.send_modify(|left| *left -= 1);
        }
        if !self.context.tasks.is_shutdown() {
            self.storage.drives.free_stale_drives().await;
            let tidied = async {
                self.secrets.forget_secrets().await?;
                self.storage.collector.collect().await
            };
            if let Err(error) = tidied.await {
                tracing::error!(error = error_chain(&error), "cleanup after recovery failed");
            }
            tracing::info!("recovery is complete");
        }
        self.context.recovery.send_replace(0);
    }

    /// Ends machines that belong to no sandbox, side by side.
    async fn end_unowned(&self, unowned: Vec<SandboxId>) {
        let ended = unowned.iter().map(|id| async move {
            tracing::warn!(machine = %id, "a machine without a sandbox is stopped");
            for driver in self.context.drivers.all() {
                if let Err(error) = driver.stop(&MachineKey::from(id)).await {
                    tracing::error!(machine = %id, error = error_chain(&error), "a machine without a sandbox was not stopped");
                }
            }
        });
        if tokio::time::timeout(UNOWNED_WITHIN, join_all(ended)).await.is_err() {
            tracing::error!("some machines without a sandbox have not stopped yet");
        }
    }

    /// Reads everything on record, enters it in the accounts, and answers with the sandboxes.
    async fn reindex(&self) -> Result<RecordedSandboxes> {
        self.references.doubts.started_with(self.store.disk_listing().await?.layers);
        let contents = self.context.catalog.open().await?;
        let layers = self.store.scan::<Layer>().await?;
        let images = self.store.scan::<Image>().await?;
        self.report_unreadable(&layers.damaged);
        let damaged = &contents.damaged;
        for holders in [&damaged.snapshots, &damaged.sandboxes, &images.damaged, &damaged.drives] {
            self.doubt(holders);
        }
        for place in contents.missing {
            self.references
                .doubts
                .unread(place, "it is missing, and the index remembered it".to_owned());
        }
        contents.projects.into_iter().for_each(|project| self.tenancy.projects.put(project));
        let secrets = self.store.scan::<Secret>().await?;
        self.report_unreadable(&secrets.damaged);
        let unusable = contents.unusable.iter();
        let drives = unusable.clone().filter_map(|one| one.drive.as_ref()).chain(&contents.drives);
        let sandboxes = unusable.filter_map(|one| one.sandbox.as_ref()).chain(&contents.sandboxes);
        let kept = contents.snapshots.iter().filter(|snapshot| snapshot.deleted_at.is_none());
        let named = sandboxes
            .clone()
            .map(|sandbox| &sandbox.project)
            .chain(kept.map(|snapshot| &snapshot.project))
            .chain(secrets.good.iter().map(|secret| &secret.project))
            .chain(drives.clone().map(|drive| &drive.project));
        self.tenancy.lock_unknown_projects(&damaged.projects, named.cloned());
        self.secrets.check_keyring(&secrets.good);
        secrets.good.into_iter().for_each(|secret| self.secrets.learn_secret(secret));
        layers.good.iter().for_each(|layer| self.references.count_layer(layer));
        self.reindex_memory().await?;
        {
            let mut counts = self.references.counts();
            drives.for_each(|drive| counts.hold_drive(drive));
            for snapshot in &contents.snapshots {
                match snapshot.deleted_at {
                    None => counts.hold_snapshot(snapshot),
                    Some(_) => counts.known_manifests.mark_snapshot_deleted(&snapshot.id),
                }
            }
            sandboxes.for_each(|sandbox| counts.hold_sandbox(sandbox));
        }
        for unusable in &contents.unusable {
            self.context.report_damage(
                DamageKind::UnreadableManifest,
                unusable.path.clone(),
                unusable.reason.clone(),
                "it is left as it is, and what it describes is not available",
            );
        }
        for sandbox in &contents.sandboxes {
            if sandbox.phase() == Phase::Deleted {
                // What is about to be in the trash.
                let kept = self.store.kept_for_trash(&sandbox.id).await?;
                self.storage.trash.hold_trashed(sandbox, &kept);
            }
        }
        self.storage.trash.read_trash().await?;
        if self.store.found_format().is_some_and(|format| format < crate::store::ALL_PARTS) {
            self.storage.collector.mark_left_behind().await?;
        }
        self.records.find_lost_names(&self.context.catalog.listing().await?).await?;
        Ok(RecordedSandboxes { sandboxes: contents.sandboxes, unavailable: contents.unavailable })
    }

    /// Enters memory layers, and the templates that hold some.
    async fn reindex_memory(&self) -> Result<()> {
        let layers = self.store.scan::<MemoryLayer>().await?;
        self.report_unreadable(&layers.damaged);
        layers.good.iter().for_each(|layer| self.references.count_memory_layer(layer));
        let templates = self.store.scan::<Template>().await?;
        self.report_unreadable(&templates.damaged);
        self.references.counts().hold_templates(&templates.good);
        Ok(())
    }

    /// Reports manifests that cannot be read. The reference counts lack what such a manifest names,
    /// and it must not be collected for that.
    fn doubt(&self, damaged: &[Damaged]) {
        self.report_unreadable(damaged);
        for Damaged { path, reason, .. } in damaged {
            self.references.doubts.unread(self.store.below(path), reason.clone());
        }
    }

    pub(in crate::engine) fn report_unreadable(&self, damaged: &[Damaged]) {
        for Damaged { path, reason, .. } in damaged {
            let path = path.strip_prefix(self.store.data_dir()).unwrap_or(path);
            self.context.report_damage(
                DamageKind::UnreadableManifest,
                path.display().to_string(),
                reason,
                "it is left as it is, and what it describes is not available; `keep fsck` tells more",
            );
        }
    }

    async fn survivors(&self) -> Result<HashMap<SandboxId, Link>> {
        let mut alive = HashMap::new();
        for driver in self.context.drivers.all() {
            for (key, link) in driver.survivors().await? {
                match key.sandbox() {
                    Ok(id) => drop(alive.insert(id, link)),
                    Err(_)
                        if [TEMPLATE, WARM_VM]
                            .iter()
                            .any(|mark| key.as_str().starts_with(mark)) =>
                    {
                        tracing::warn!(machine = %key, "stopping a machine that an earlier daemon had not assigned to a sandbox");
                        let driver = Arc::clone(&driver);
                        self.context.tasks.spawn(async move {
                            if let Err(error) = driver.stop(&key).await {
                                tracing::error!(machine = %key, error = error_chain(&error), "a machine without a sandbox was not stopped");
                            }
                        });
                    }
                    Err(error) => {
                        tracing::warn!(%error, "a machine of another owner is ignored");
                    }
                }
            }
        }
        Ok(alive)
    }

    async fn recover_one(self: &Arc<Self>, found: ToRecover, heavy: &Semaphore) -> Result<()> {
        let ToRecover { mut sandbox, link, recovering } = found;
        if self.storage.snapshots.lost_snapshot(&sandbox).await? {
            sandbox.lose_snapshot();
            self.records.record(&mut sandbox, Durability::Synced).await?;
        }
        match (sandbox.state(), link) {
            (SandboxState::Running(open), Some(link)) if open.unsealed.is_none() => {
                match self.adopt_machine(&mut sandbox, link).await {
                    Ok(live) => {
                        recovering.slot.set_live(Some(Arc::clone(&live)));
                        self.watch_machine(&live);
                        return Ok(());
                    }
                    // The next daemon adopts it.
                    Err(Error::ShuttingDown) => return Ok(()),
                    Err(error) => {
                        tracing::error!(sandbox = %sandbox.name, error = error_chain(&error), "the agent of a sandbox does not answer; its session is ended and its files are kept");
                    }
                }
                self.finish_session_end(recovering, sandbox, Ending::broken(), heavy).await?;
            }
            (SandboxState::Stopping { ending, .. }, _) => {
                let ending = *ending;
                self.finish_session_end(recovering, sandbox, ending, heavy).await?;
            }
            (SandboxState::Running(_) | SandboxState::Starting(_), _) => {
                self.finish_session_end(recovering, sandbox, Ending::broken(), heavy).await?;
            }
            (SandboxState::Deleted { .. }, _) => {
                self.finish_delete(recovering, sandbox, heavy).await?;
            }
            (
                SandboxState::Stopped(_) | SandboxState::Paused(_) | SandboxState::Failed { .. },
                link,
            ) => {
                if link.is_some() {
                    let driver = self.context.driver(&sandbox.config.driver)?;
                    driver.stop(&MachineKey::from(&sandbox.id)).await?;
                }
                self.finish_session(&sandbox).await?;
            }
        }
        Ok(())
    }

    /// Ends what is left of a session. Exporting a machine's disks takes a boot: that does not
    /// delay the recovery of the others, and callers that need this sandbox wait for its turn.
    async fn finish_session_end(
        self: &Arc<Self>,
        recovering: Recovering,
        mut sandbox: Sandbox,
        ending: Ending,
        heavy: &Semaphore,
    ) -> Result<()> {
        let slot = Arc::clone(&recovering.slot);
        if !self.is_on_disks(&sandbox)? {
            let _few = heavy.acquire().await;
            self.stop_for_shutdown()?;
            return self.end_session(&slot, &mut sandbox, ending).await.map(drop);
        }
        let (this, turn) = (Arc::clone(self), recovering.into_turn());
        self.context.tasks.spawn(async move {
            let _turn = turn;
            if let Err(error) = this.end_session(&slot, &mut sandbox, ending).await {
                tracing::error!(sandbox = %sandbox.name, error = error_chain(&error), "the session of a sandbox could not be ended; start or delete the sandbox");
            }
        });
        Ok(())
    }

    /// Continues a delete, in the same way.
    async fn finish_delete(
        self: &Arc<Self>,
        recovering: Recovering,
        sandbox: Sandbox,
        heavy: &Semaphore,
    ) -> Result<()> {
        let slot = Arc::clone(&recovering.slot);
        if !self.is_on_disks(&sandbox)? {
            let _few = heavy.acquire().await;
            self.stop_for_shutdown()?;
            return self.delete_sandbox(&slot, sandbox, Delete::default()).await.map(drop);
        }
        let (this, turn) = (Arc::clone(self), recovering.into_turn());
        self.context.tasks.spawn(async move {
            let _turn = turn;
            let name = sandbox.name.clone();
            if let Err(error) = this.delete_sandbox(&slot, sandbox, Delete::default()).await {
                tracing::error!(sandbox = %name, error = error_chain(&error), "an interrupted delete is not complete");
            }
        });
        Ok(())
    }

    /// Refuses to begin what the next daemon can do as well.
    fn stop_for_shutdown(&self) -> Result<()> {
        if self.context.tasks.is_shutdown() { Err(Error::ShuttingDown) } else { Ok(()) }
    }

    /// Whether what its session wrote has to be taken out of a machine's disks.
    fn is_on_disks(&self, sandbox: &Sandbox) -> Result<bool> {
        let drives = sandbox.mounted().iter().map(|one| &one.layer);
        let layers = sandbox.open_layer().into_iter().chain(drives);
        let mut on_disk = false;
        for layer in layers {
            on_disk |= self.store.has_disk(layer)?;
        }
        Ok(on_disk)
    }

    /// Writes down how the last session ended, if the daemon died after the sandbox's record said so
    /// and before the session's did. The sandbox's totals have it already.
    async fn finish_session(&self, sandbox: &Sandbox) -> Result<()> {
        let (SandboxState::Stopped(Some(ended)) | SandboxState::Paused(Some(ended)), Some(id)) =
            (sandbox.state(), &sandbox.session)
        else {
            return Ok(());
        };
        let ending = ended.ending;
        let paused = sandbox.phase() == Phase::Paused;
        let session = self.db.session(id).await?;
        let Some(mut session) = session.filter(|session| session.ended_at.is_none()) else {
            return Ok(());
        };
        session.close(sandbox.used_at, ending.end);
        self.session_over(sandbox, session, paused || ending.keeps(sandbox), None).await
    }

    async fn adopt_machine(
        self: &Arc<Self>,
        sandbox: &mut Sandbox,
        link: Link,
    ) -> Result<Arc<RunningSandbox>> {
        let driver = self.context.driver(&sandbox.config.driver)?;
        let key = MachineKey::from(&sandbox.id);
        if let Some(memory) = driver.memory() {
            // A daemon that died over a capture may have left it held.
            memory.go_on(&key).await?;
        }
        if let Some(powers) = pausing(&*driver) {
            self.finish_captures(powers, sandbox).await?;
        }
        if let Some(relayer) = driver.relayer() {
            // A daemon that died during a checkpoint may have left it frozen.
            relayer.thaw(&key).await?;
        }
        let shutdown = self.context.tasks.shutdown();
        let (guest, known) = tokio::select! {
            found = self.reach_again(&driver, sandbox, &link) => found?,
            () = shutdown.cancelled() => return Err(Error::ShuttingDown),
        };
        let session = match &sandbox.session {
            Some(id) => self.db.session(id).await?,
            None => None,
        };
        let missing = || {
            crate::engine::Error::invalid("session", "the record of the session under way is gone")
        };
        let session = session.ok_or_else(missing)?;
        let all = self.db.commands(&sandbox.id, &Page::all()).await?.items;
        let changes = self.sessions.changes_on_record(&session).await?;
        let live = RunningSandbox::new(driver, key, link, guest, sandbox.clone(), session);
        if let Some(changes) = changes.filter(|_| self.context.settings.record_changes) {
            live.changes.begin_session(changes);
        }
        self.integrity.limits.found_running(&live);
        tokio::select! {
            () = self.network.reconnect_session(&live) => {}
            () = shutdown.cancelled() => return Err(Error::ShuttingDown),
        }
        self.secrets.mask_again(&live);
        let mut adopted = Vec::new();
        // Those of an earlier session were suspended, and resume in this one.
        let running = all.iter().filter(|command| command.state == CommandState::Running);
        for mut command in running.cloned() {
            if known.iter().any(|known| known.command == command.inside()) {
                adopted.push(self.sessions.adopt(&live, command));
                continue;
            }
            // It was written down and never started.
            command.state = CommandState::Lost;
            command.end = Some(CommandEnd::Lost);
            if let Err(error) = self.records.keep_command(&command).await {
                tracing::error!(command = %command.id, error = error_chain(&error), "a command that was never started was not recorded as lost");
            }
        }
        join_all(adopted).await;
        self.sessions.adopt_services(&live, &all);
        self.sessions.look_soon(&live);
        Ok(live)
    }

    /// Connects to the agent of a machine that an earlier daemon started, and asks for its commands.
    async fn reach_again(
        &self,
        driver: &Arc<dyn Driver>,
        sandbox: &Sandbox,
        link: &Link,
    ) -> Result<(Guest, Vec<Known>)> {
        let guest =
            reach(link, self.context.settings.patience, self.context.settings.guest).await?;
        if driver.disk().is_some() {
            // One that is not thawed now thaws by itself.
            if let Err(error) = guest.thaw().await {
                tracing::warn!(sandbox = %sandbox.name, error = error_chain(&error), "the filesystems of a VM were not thawed; its agent thaws them later");
            }
        }
        let known = guest.commands().await?;
        Ok((guest, known))
    }
}
