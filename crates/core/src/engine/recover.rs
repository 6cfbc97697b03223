//! Coming back: reading what is on disk, paying what was owed, adopting what is alive.
//!
//! The disk is the truth. Sandboxes, snapshots and projects are read from their manifests and put
//! into the index, which is emptied first if it is of another version; sessions and commands too,
//! then, or else only those of sandboxes that were not at rest. After that every sandbox is brought
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
//! A machine with disks of its own that is gone is booted once more for what it wrote (`rescue`), after this, in its
//! sandbox's turn.
//!
//! *Recovery never delays the start.* [`Inner::recover`] reads the disk, learns which machines are alive, which uids are taken and
//! who holds which layers, and takes the turn of every sandbox. All else happens in a task per sandbox after the server listens:
//! an agent that does not answer, or a layer that takes long to seal, is waited for by nobody but whoever wants that
//! sandbox. Agents are waited for by all these tasks at the same time; what is heavy on the disk is done by [`AT_ONCE`] of
//! them. Until its task is done a sandbox is listed as it was found: `running` if its machine is alive,
//! `stopping` if what it wrote is still to be sealed.
//!
//! Nothing is collected as garbage until all of them are done.
//!
//! Drives follow their sandboxes; one that is attached to a session nobody knows is freed last.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use sandkeep_proto::link::Known;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::boot::chain_of;
use super::damage::DamageKind;
use super::lifecycle::Phase;
use super::live::{Live, reach};
use super::machine::pausing;
use super::slot::Recovering;
use super::template::TEMPLATE;
use super::{Delete, Error, Inner, Result};
use crate::db::{Filter, Owner, Page, Tombstones};
use crate::driver::{Driver, Link, READY};
use crate::guest::Guest;
use crate::model::{
    Change, CommandEnd, CommandState, Drive, Ending, Image, Layer, MachineKey, MemoryLayer, Name,
    Project, Sandbox, SandboxId, SandboxState, Secret, Snapshot, Template, Timestamp,
};
use crate::store::{Damaged, Durability};

/// How many sandboxes are sealed or erased at a time.
const AT_ONCE: usize = 32;
/// How long the end of machines without a sandbox is waited for. They may write to drives of other sandboxes.
const UNOWNED_WITHIN: Duration = Duration::from_secs(10);

/// A sandbox to be recovered, in its turn.
struct Found {
    sandbox: Sandbox,
    link: Option<Link>,
    recovering: Recovering,
}

impl Inner {
    /// Reads what is on disk and begins to recover it. Waits for no guest.
    pub(super) async fn recover(self: &Arc<Self>) -> Result<()> {
        let mut sandboxes = self.reindex().await?;
        self.check_secrets_key(&sandboxes).await?;
        let mut alive = self.survivors().await?;
        for sandbox in &mut sandboxes {
            self.events.learn(sandbox);
            let is_alive = alive.contains_key(&sandbox.id);
            self.adopt_uids(sandbox, is_alive);
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
                self.db.put_sandbox(&shown).await?;
            }
            let recovering = self.slot(&sandbox.id).recover().await;
            found.push(Found { sandbox, link, recovering });
        }
        // One is what comes after all sandboxes.
        self.recovery.send_replace(found.len() + 1);
        // One whose manifest does not read is left running: what it wrote is nowhere else.
        let data = self.store.data_dir().join("sandboxes");
        let (damaged, unowned): (Vec<_>, Vec<_>) =
            alive.into_keys().partition(|id| data.join(id.as_str()).is_dir());
        for id in damaged {
            tracing::error!(machine = %id, "its sandbox's manifest cannot be used; it is left running");
        }
        self.end_unowned(unowned).await;
        let inner = Arc::clone(self);
        tokio::spawn(async move { inner.recover_all(found).await });
        Ok(())
    }

    /// Whether some sandbox is not recovered yet.
    pub(super) fn is_recovering(&self) -> bool {
        *self.recovery.borrow() > 1
    }

    async fn recover_all(self: Arc<Self>, found: Vec<Found>) {
        let heavy = Arc::new(Semaphore::new(AT_ONCE));
        let mut under_way = JoinSet::new();
        for one in found {
            let (inner, heavy) = (Arc::clone(&self), Arc::clone(&heavy));
            under_way.spawn(async move {
                let name = one.sandbox.name.clone();
                match inner.recover_one(one, &heavy).await {
                    // The next daemon finishes it.
                    Ok(()) | Err(Error::ShuttingDown) => {}
                    Err(error) => tracing::error!(sandbox = %name, error = chain_of(&error), "could not be recovered; it can be started again or deleted"),
                }
            });
        }
        while let Some(ended) = under_way.join_next().await {
            if let Err(error) = ended {
                tracing::error!(%error, "a sandbox was not recovered; it can be started again or deleted");
            }
            self.recovery.send_modify(|left| *left -= 1);
        }
        if !*self.shutdown.borrow() {
            self.free_stale_drives().await;
            let tidied = async {
                self.forget_secrets().await?;
                self.collect().await
            };
            if let Err(error) = tidied.await {
                tracing::error!(error = chain_of(&error), "what is not needed any more is left");
            }
            tracing::info!("recovery is complete");
        }
        self.recovery.send_replace(0);
    }

    /// Ends machines that belong to no sandbox, side by side.
    async fn end_unowned(&self, unowned: Vec<SandboxId>) {
        let ended = unowned.iter().map(|id| async move {
            tracing::warn!(machine = %id, "a machine that belongs to no sandbox is ended");
            for driver in self.drivers.values() {
                if let Err(error) = driver.stop(&MachineKey::from(id)).await {
                    tracing::error!(machine = %id, error = chain_of(&error), "it is left");
                }
            }
        });
        if tokio::time::timeout(UNOWNED_WITHIN, join_all(ended)).await.is_err() {
            tracing::error!("some machines that belong to no sandbox are not gone yet");
        }
    }

    /// Reads the manifests into the index, and answers with the sandboxes.
    async fn reindex(&self) -> Result<Vec<Sandbox>> {
        let fresh = self.db.is_fresh();
        let listing = self.store.listing().await?;
        self.doubts.started_with(listing.layers);
        let projects = self.store.scan::<Project>().await?;
        let snapshots = self.store.scan::<Snapshot>().await?;
        let mut sandboxes = self.store.scan::<Sandbox>().await?;
        for sandbox in &mut sandboxes.good {
            if sandbox.phase_at == Timestamp::UNIX_EPOCH {
                sandbox.phase_at = sandbox.used_at;
            }
        }
        let layers = self.store.scan::<Layer>().await?;
        let images = self.store.scan::<Image>().await?;
        self.report_unreadable(&layers.damaged);
        for holders in [&snapshots.damaged, &sandboxes.damaged, &images.damaged] {
            self.doubt(holders);
        }
        for project in projects.good {
            self.db.put_project(&project).await?;
            self.tenants.put(project);
        }
        let secrets = self.store.scan::<Secret>().await?;
        self.report_unreadable(&secrets.damaged);
        let drives = self.reindex_drives().await?;
        let sandbox_projects = sandboxes.good.iter().map(|sandbox| &sandbox.project);
        let kept = snapshots.good.iter().filter(|snapshot| snapshot.deleted_at.is_none());
        let named = sandbox_projects
            .chain(kept.map(|snapshot| &snapshot.project))
            .chain(secrets.good.iter().map(|secret| &secret.project))
            .chain(&drives);
        self.lock_unknown_projects(&projects.damaged, named.cloned());
        self.check_keyring(&secrets.good);
        secrets.good.into_iter().for_each(|secret| self.learn_secret(secret));
        layers.good.iter().for_each(|layer| self.book(layer));
        self.reindex_memory().await?;
        let known: HashSet<_> = snapshots.good.iter().map(|snapshot| snapshot.id.clone()).collect();
        let (everybody, tombstones) = (Owner::Anybody, Tombstones::With);
        for stale in self.db.snapshots(everybody, tombstones, &Page::all()).await?.items {
            if !known.contains(&stale.id) {
                let place = format!("snapshots/{}.json", stale.id);
                let project = self.tenants.get(&stale.project).is_some();
                if stale.deleted_at.is_none() && project && !listing.manifests.contains(&place) {
                    self.remember_missing(place, &stale).await;
                }
                self.db.remove_snapshot(&stale.id).await?;
            }
        }
        for snapshot in &snapshots.good {
            self.db.put_snapshot(snapshot).await?;
            if snapshot.deleted_at.is_none() {
                self.books().hold_snapshot(snapshot);
            } else {
                self.books().roster.bury(&snapshot.id);
            }
        }
        let known: HashSet<_> = sandboxes.good.iter().map(|sandbox| sandbox.id.clone()).collect();
        for stale in self.db.sandboxes(None, &Filter::default(), &Page::all()).await?.items {
            if !known.contains(&stale.id) {
                let place = format!("sandboxes/{}/sandbox.json", stale.id);
                // One that never ran has nothing that could be lost, and may never have been on disk.
                let ran = stale.phase() != Phase::Deleted && stale.session.is_some();
                let trashed = listing.trashed.contains(stale.id.as_str());
                if ran && !trashed && !listing.manifests.contains(&place) {
                    self.remember_missing(place, &stale).await;
                }
                self.db.remove_sandbox(&stale.id).await?;
            }
        }
        let mut indexed = Vec::with_capacity(sandboxes.good.len());
        for sandbox in sandboxes.good {
            self.books().hold_sandbox(&sandbox);
            if let Err(error) = self.db.put_sandbox(&sandbox).await {
                // Another one has its name: a directory was copied. Nobody can tell which is meant.
                self.report_damage(
                    DamageKind::UnreadableManifest,
                    format!("sandboxes/{}/sandbox.json", sandbox.id),
                    chain_of(&error),
                    "it is left as it is, and this sandbox is not available",
                );
                continue;
            }
            if fresh || !matches!(sandbox.phase(), Phase::Stopped) {
                self.reindex_history(&sandbox.id).await?;
            }
            if sandbox.phase() == Phase::Deleted {
                // What is about to be in the trash.
                let kept = self.store.kept_for_trash(&sandbox.id).await?;
                self.hold_trashed(&sandbox, &kept);
            }
            indexed.push(sandbox);
        }
        self.read_trash().await?;
        if self.store.found_format().is_some_and(|format| format < crate::store::ALL_PARTS) {
            self.mark_left_behind().await?;
        }
        self.find_lost_names(&self.store.listing().await?).await?;
        self.db.filled().await;
        Ok(indexed)
    }

    /// Enters memory layers, and the templates that hold some.
    async fn reindex_memory(&self) -> Result<()> {
        let layers = self.store.scan::<MemoryLayer>().await?;
        self.report_unreadable(&layers.damaged);
        layers.good.iter().for_each(|layer| self.book_memory(layer));
        let templates = self.store.scan::<Template>().await?;
        self.report_unreadable(&templates.damaged);
        self.books().hold_templates(&templates.good);
        Ok(())
    }

    /// Tells of manifests that do not read. What they name is held by nobody in the books, and must not
    /// be collected for that.
    fn doubt(&self, damaged: &[Damaged]) {
        self.report_unreadable(damaged);
        for Damaged { path, reason, .. } in damaged {
            self.doubts.unread(self.store.below(path), reason.clone());
        }
    }

    fn report_unreadable(&self, damaged: &[Damaged]) {
        for Damaged { path, reason, .. } in damaged {
            let path = path.strip_prefix(self.store.data_dir()).unwrap_or(path);
            self.report_damage(
                DamageKind::UnreadableManifest,
                path.display().to_string(),
                reason,
                "it is left as it is, and what it describes is not available; `keep fsck` tells more",
            );
        }
    }

    /// Enters the drives, and answers with the projects they belong to.
    async fn reindex_drives(&self) -> Result<Vec<Name>> {
        let drives = self.store.scan::<Drive>().await?;
        self.doubt(&drives.damaged);
        let known: HashSet<_> = drives.good.iter().map(|drive| drive.id.clone()).collect();
        for stale in self.db.drives(None, None, &Page::all()).await?.items {
            if !known.contains(&stale.id) {
                self.db.remove_drive(&stale.id).await?;
            }
        }
        for drive in &drives.good {
            self.books().hold_drive(drive);
            if let Err(error) = self.db.put_drive(drive).await {
                self.report_damage(
                    DamageKind::UnreadableManifest,
                    format!("drives/{}.json", drive.id),
                    chain_of(&error),
                    "it is left as it is, and this drive is not available",
                );
            }
        }
        Ok(drives.good.into_iter().map(|drive| drive.project).collect())
    }

    pub(super) async fn reindex_history(&self, id: &SandboxId) -> Result<()> {
        for session in self.store.scan_sessions(id).await?.good {
            self.db.put_session(&session).await?;
        }
        for command in self.store.scan_commands(id).await?.good {
            self.db.put_command(&command).await?;
        }
        Ok(())
    }

    async fn survivors(&self) -> Result<HashMap<SandboxId, Link>> {
        let mut alive = HashMap::new();
        for driver in self.drivers.values() {
            for (key, link) in driver.survivors().await? {
                match key.sandbox() {
                    Ok(id) => drop(alive.insert(id, link)),
                    Err(_)
                        if [TEMPLATE, READY].iter().any(|mark| key.as_str().starts_with(mark)) =>
                    {
                        tracing::warn!(machine = %key, "was not assigned to a sandbox yet; it is ended");
                        let driver = Arc::clone(driver);
                        tokio::spawn(async move {
                            if let Err(error) = driver.stop(&key).await {
                                tracing::error!(machine = %key, error = chain_of(&error), "it is left");
                            }
                        });
                    }
                    Err(error) => {
                        tracing::warn!(%error, "a machine that is not ours is left alone");
                    }
                }
            }
        }
        Ok(alive)
    }

    async fn recover_one(self: &Arc<Self>, found: Found, heavy: &Semaphore) -> Result<()> {
        let Found { mut sandbox, link, recovering } = found;
        if self.lost_ground(&sandbox).await? {
            sandbox.lose_ground();
            self.record(&mut sandbox, Durability::Synced).await?;
        }
        match (sandbox.state(), link) {
            (SandboxState::Running(open), Some(link)) if open.unsealed.is_none() => {
                match self.adopt_machine(&mut sandbox, link).await {
                    Ok(live) => {
                        recovering.slot.set_live(Some(Arc::clone(&live)));
                        self.watch_death(&live);
                        return Ok(());
                    }
                    // The next daemon adopts it.
                    Err(Error::ShuttingDown) => return Ok(()),
                    Err(error) => {
                        tracing::error!(sandbox = %sandbox.name, error = chain_of(&error), "its agent does not answer; it is ended and what it wrote is kept");
                    }
                }
                self.bring_to_rest(recovering, sandbox, Ending::broken(), heavy).await?;
            }
            (SandboxState::Stopping { ending, .. }, _) => {
                let ending = *ending;
                self.bring_to_rest(recovering, sandbox, ending, heavy).await?;
            }
            (SandboxState::Running(_) | SandboxState::Starting(_), _) => {
                self.bring_to_rest(recovering, sandbox, Ending::broken(), heavy).await?;
            }
            (SandboxState::Deleted { .. }, _) => {
                self.finish_erasing(recovering, sandbox, heavy).await?;
            }
            (
                SandboxState::Stopped(_) | SandboxState::Paused(_) | SandboxState::Failed { .. },
                link,
            ) => {
                if link.is_some() {
                    let driver = self.driver(&sandbox.config.driver)?;
                    driver.stop(&MachineKey::from(&sandbox.id)).await?;
                }
                self.finish_session(&sandbox).await?;
            }
        }
        Ok(())
    }

    /// Ends what is left of a session. What is on the disks of a machine takes a boot to have: the recovery of the others
    /// is not held up by that, and whoever wants this sandbox waits for its turn.
    async fn bring_to_rest(
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
            return self.settle(&slot, &mut sandbox, ending).await.map(drop);
        }
        let (inner, turn) = (Arc::clone(self), recovering.into_turn());
        tokio::spawn(async move {
            let _turn = turn;
            if let Err(error) = inner.settle(&slot, &mut sandbox, ending).await {
                tracing::error!(sandbox = %sandbox.name, error = chain_of(&error), "could not be brought to rest; it can be started again or deleted");
            }
        });
        Ok(())
    }

    /// Goes on with a delete, in the same way.
    async fn finish_erasing(
        self: &Arc<Self>,
        recovering: Recovering,
        sandbox: Sandbox,
        heavy: &Semaphore,
    ) -> Result<()> {
        let slot = Arc::clone(&recovering.slot);
        if !self.is_on_disks(&sandbox)? {
            let _few = heavy.acquire().await;
            self.stop_for_shutdown()?;
            return self.erase(&slot, sandbox, Delete::default()).await.map(drop);
        }
        let (inner, turn) = (Arc::clone(self), recovering.into_turn());
        tokio::spawn(async move {
            let _turn = turn;
            let name = sandbox.name.clone();
            if let Err(error) = inner.erase(&slot, sandbox, Delete::default()).await {
                tracing::error!(sandbox = %name, error = chain_of(&error), "a delete that broke off is not finished");
            }
        });
        Ok(())
    }

    /// Refuses to begin what the next daemon can do as well.
    fn stop_for_shutdown(&self) -> Result<()> {
        if *self.shutdown.borrow() { Err(Error::ShuttingDown) } else { Ok(()) }
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
        self.session_over(sandbox, session, paused || ending.keeps(sandbox), !paused).await
    }

    async fn adopt_machine(
        self: &Arc<Self>,
        sandbox: &mut Sandbox,
        link: Link,
    ) -> Result<Arc<Live>> {
        let driver = self.driver(&sandbox.config.driver)?;
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
        let mut shutdown = self.shutdown.subscribe();
        let (guest, known) = tokio::select! {
            found = self.reach_again(&driver, sandbox, &link) => found?,
            _ = shutdown.wait_for(|over| *over) => return Err(Error::ShuttingDown),
        };
        let session = match &sandbox.session {
            Some(id) => self.db.session(id).await?,
            None => None,
        };
        let missing =
            || super::Error::invalid("session", "the record of the session under way is gone");
        let session = session.ok_or_else(missing)?;
        let all = self.db.commands(&sandbox.id, &Page::all()).await?.items;
        let live = Live::new(driver, key, link, guest, sandbox.clone(), session);
        tokio::select! {
            () = self.go_online_again(&live) => {}
            _ = shutdown.wait_for(|over| *over) => return Err(Error::ShuttingDown),
        }
        self.mask_again(&live);
        let mut adopted = Vec::new();
        // Those of an earlier session slept, and go on in this one.
        let running = all.iter().filter(|command| command.state == CommandState::Running);
        for mut command in running.cloned() {
            if known.iter().any(|known| known.command == command.inside()) {
                adopted.push(self.adopt(&live, command));
                continue;
            }
            // It was written down and never started.
            command.state = CommandState::Lost;
            command.end = Some(CommandEnd::Lost);
            if let Err(error) = self.keep_command(&command).await {
                tracing::error!(command = %command.id, error = chain_of(&error), "that a command was never started is not on record");
            }
        }
        join_all(adopted).await;
        self.adopt_services(&live, &all);
        Ok(live)
    }

    /// Connects to the agent of a machine that an earlier daemon started, and asks for its commands.
    async fn reach_again(
        &self,
        driver: &Arc<dyn Driver>,
        sandbox: &Sandbox,
        link: &Link,
    ) -> Result<(Guest, Vec<Known>)> {
        let guest = reach(link, self.settings.patience, self.settings.guest).await?;
        if driver.disk().is_some() {
            // One that is not thawed now thaws by itself.
            if let Err(error) = guest.thaw().await {
                tracing::warn!(sandbox = %sandbox.name, error = chain_of(&error), "was not thawed");
            }
        }
        let known = guest.commands().await?;
        Ok((guest, known))
    }
}
