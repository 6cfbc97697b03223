//! Attaches drives to a session and detaches them.
//!
//! ```text
//! attach   drive's manifest: attached, layer  →  sandbox's manifest: mounted  →  the machine starts
//! detach   the machine is gone  →  layer sealed and synced  →  drive's manifest: layer on top,
//!          nobody attached  →  sandbox's manifest: stopped  →  answer
//! ```
//!
//! Two manifests, and a daemon may die between them. Whose word counts:
//!
//! - A sandbox that lists a drive as mounted owes it the layer, until the drive no longer says that
//!   it is attached to that layer. Paying twice changes nothing.
//! - A drive that is attached to a layer no sandbox lists is *stale*: what is in the layer is kept and
//!   the drive is free. Recovery, housekeeping and the next who wants the drive see to it.
//!
//! All changes to a drive's record happen under one lock. A start holds it from the drive's manifest
//! to the sandbox's, so that no other call takes what is about to be mounted for stale. It is not
//! held while a session's layer is sealed: a sync may take long.

use std::sync::Arc;

use crate::db::Page;
use crate::engine::error::error_chain;
use crate::engine::snapshots::Drives;
use crate::engine::snapshots::compaction::{effort, may_go_on, replace};
use crate::engine::{Error, Result};
use crate::failpoint;
use crate::model::{Attachment, Drive, DriveId, LayerId, MountMode, Mounted, Sandbox, SessionId};
use crate::store::{Durability, SealOptions};

impl Drives {
    /// Attaches all drives of a sandbox whose session is about to start; all or nothing. The caller
    /// holds the drives' lock, and keeps it until the answer is in the sandbox's manifest.
    pub(in crate::engine) async fn attach(
        &self,
        sandbox: &Sandbox,
        session: &SessionId,
    ) -> Result<Vec<Mounted>> {
        let mut mounted: Vec<Mounted> = Vec::new();
        let mut outcome = Ok(());
        for (path, mount) in &sandbox.config.mounts {
            let wanted = self.find_drive(&sandbox.project, &mount.drive).await;
            let attached = match wanted {
                Ok(drive) => self.attach_one(sandbox, session, path, drive, mount.mode).await,
                Err(error) => Err(error),
            };
            match attached {
                Ok(one) => mounted.push(one),
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            }
        }
        if outcome.is_err() {
            for one in &mounted {
                self.detach_unused(one).await?;
            }
        }
        outcome.map(|()| mounted)
    }

    async fn attach_one(
        &self,
        sandbox: &Sandbox,
        session: &SessionId,
        path: &str,
        mut drive: Drive,
        mode: MountMode,
    ) -> Result<Mounted> {
        match mode {
            MountMode::Snapshot if !drive.is_initialised() => {
                return Err(drive.not_initialised());
            }
            MountMode::Snapshot => {}
            MountMode::ReadWrite => {
                self.free_if_stale(&mut drive).await?;
                if let Some(attached) = drive.attached {
                    return Err(Error::DriveAttached { drive: drive.name, sandbox: attached.name });
                }
            }
        }
        if let Some(reason) = self.references.missing_layer(&drive.layers).await {
            return Err(Error::DriveBroken { drive: drive.name, reason });
        }
        let layer = self.store.begin(&drive.layers).await?;
        let chain = drive.layers.clone();
        let mounted = Mounted {
            path: path.to_owned(),
            drive: drive.id.clone(),
            mode,
            layer: layer.clone(),
            chain,
        };
        if mode == MountMode::ReadWrite {
            drive.attached = Some(Attachment {
                sandbox: sandbox.id.clone(),
                name: sandbox.name.clone(),
                session: session.clone(),
                layer,
            });
            self.keep_drive(&mut drive, Durability::Soon).await?;
            failpoint::pass("drive.attached");
        }
        Ok(mounted)
    }

    /// Keeps what a session that is over wrote to its drives, and frees them. Done again after a
    /// failure or a crash, it does what is left to do.
    pub(in crate::engine) async fn detach(self: &Arc<Self>, sandbox: &Sandbox) -> Result<()> {
        for mounted in sandbox.mounted() {
            if mounted.mode == MountMode::Snapshot {
                self.store.discard(&mounted.layer).await?;
                continue;
            }
            let sealed = match sandbox.decision().discard {
                // Given up, with all else the session wrote.
                true => None,
                false => self.seal_open(&mounted.layer, &SealOptions::default()).await?,
            };
            failpoint::pass("drive.sealed");
            let _drives = self.changes.lock().await;
            let empty = sealed.is_none();
            let drive = self.complete_detach(mounted, sealed).await?;
            failpoint::pass("drive.detached");
            if empty {
                self.store.discard(&mounted.layer).await?;
            }
            if let Some(drive) = &drive {
                self.compact_drive_soon(drive);
            }
        }
        Ok(())
    }

    /// Undoes an attachment of a session that never started, under the drives' lock.
    async fn detach_unused(&self, mounted: &Mounted) -> Result<()> {
        self.store.discard(&mounted.layer).await?;
        if mounted.mode == MountMode::ReadWrite {
            self.complete_detach(mounted, None).await?;
        }
        Ok(())
    }

    /// Adds a sealed layer to the drive it was written for, if that was not done before, under the
    /// drives' lock. Answers with what the drive is now.
    async fn complete_detach(
        &self,
        mounted: &Mounted,
        sealed: Option<LayerId>,
    ) -> Result<Option<Drive>> {
        let Some(mut drive) = self.db.drive_by_id(&mounted.drive).await? else {
            tracing::error!(drive = %mounted.drive, "a drive that was mounted is gone");
            return Ok(None);
        };
        let owed = match &drive.attached {
            Some(attached) => attached.layer == mounted.layer,
            // A power cut may have taken the record of the attachment, but never the chain.
            None => drive.layers == mounted.chain,
        };
        if owed {
            drive.generation += u64::from(sealed.is_some());
            drive.layers.splice(..0, sealed);
            drive.attached = None;
            self.keep_drive(&mut drive, Durability::Synced).await?;
        }
        Ok(Some(drive))
    }

    /// Frees a drive that is attached to a session its sandbox does not know of, under the drives' lock.
    pub(in crate::engine) async fn free_if_stale(&self, drive: &mut Drive) -> Result<()> {
        let Some(attached) = &drive.attached else { return Ok(()) };
        let sandbox = self.db.sandbox_by_id(&attached.sandbox).await?;
        let listed = |sandbox: &Sandbox| {
            sandbox.mounted().iter().any(|mounted| mounted.layer == attached.layer)
        };
        if sandbox.as_ref().is_some_and(listed) {
            return Ok(());
        }
        tracing::warn!(drive = %drive.name, sandbox = %attached.name, "a drive was attached to a session that does not exist; its files are kept");
        if let Some(sandbox) = &sandbox
            && let Some(session) = self.db.session(&attached.session).await?
        {
            let mounted = Mounted {
                path: String::new(),
                drive: drive.id.clone(),
                mode: MountMode::ReadWrite,
                layer: attached.layer.clone(),
                chain: drive.layers.clone(),
            };
            self.guard.guard_drive(sandbox, Some(session), &mounted).await?;
        }
        let sealed = self.seal_open(&attached.layer, &SealOptions::default()).await?;
        drive.generation += u64::from(sealed.is_some());
        drive.layers.splice(..0, sealed);
        drive.attached = None;
        self.keep_drive(drive, Durability::Synced).await
    }

    /// Frees all drives that no session has, whatever their records say. One that cannot be freed,
    /// for example for want of room, blocks only itself: the next caller that wants it tries again.
    pub(in crate::engine) async fn free_stale_drives(&self) {
        let all = match self.db.drives(None, None, &Page::all()).await {
            Ok(all) => all.items,
            Err(error) => {
                tracing::error!(%error, "drives cannot be listed; stale ones are not detached");
                return;
            }
        };
        for drive in all.into_iter().filter(|drive| drive.attached.is_some()) {
            if let Err(error) = self.free_stale_drive(&drive.id).await {
                tracing::error!(drive = %drive.name, error = error_chain(&error), "a stale drive was not detached");
            }
        }
    }

    async fn free_stale_drive(&self, id: &DriveId) -> Result<()> {
        let _drives = self.changes.lock().await;
        // Asked again under the lock: it may have been attached anew.
        if let Some(mut drive) = self.db.drive_by_id(id).await? {
            self.free_if_stale(&mut drive).await?;
        }
        Ok(())
    }

    /// The same for all that a drive has. The next session may be writing on top of it meanwhile: what it stands on is in its
    /// sandbox's record, and its layer goes on top of the merged one all the same.
    pub(in crate::engine) async fn compact_drive(&self, id: &DriveId, urgent: bool) -> Result<()> {
        let Some(drive) = self.db.drive_by_id(id).await? else { return Ok(()) };
        let Some(run) = self.compaction.run_of(&drive.layers, urgent).await? else { return Ok(()) };
        let run = drive.layers[..run].to_vec();
        let hold = self.store.hold();
        hold.layers(&run).await;
        let merged = self.store.compact(&run, effort(urgent)).await?;
        self.references.count_layer(&merged);
        let _drives = self.changes.lock().await;
        let Some(mut drive) = self.db.drive_by_id(id).await? else { return Ok(()) };
        if replace(&mut drive.layers, &run, &merged.id) {
            self.keep_drive(&mut drive, Durability::Synced).await?;
        }
        Ok(())
    }

    pub(in crate::engine) fn compact_drive_soon(self: &Arc<Self>, drive: &Drive) {
        if drive.layers.len() <= self.context.settings.chain_limit {
            return;
        }
        let (this, id) = (Arc::clone(self), drive.id.clone());
        self.context.tasks.spawn(async move {
            let Ok(_few) = this.compaction.chains.few.acquire().await else { return };
            if let Err(error) = this.compact_drive(&id, false).await {
                tracing::warn!(drive = %id, error = error_chain(&error), "compaction of a drive's layer chain failed");
            }
        });
    }

    /// Seals the layer of a drive. `None`: nothing was written to it. So it is with one that is not
    /// there any more: a drive lets go of an empty one before the sandbox's record does, and a daemon
    /// that dies right after that comes this way again.
    pub(in crate::engine) async fn seal_open(
        &self,
        layer: &LayerId,
        options: &SealOptions,
    ) -> Result<Option<LayerId>> {
        match self.store.seal(layer, options).await {
            Ok(sealed) => {
                sealed.iter().for_each(|layer| self.references.count_layer(layer));
                Ok(sealed.map(|layer| layer.id))
            }
            Err(error) if error.is_not_found() => {
                tracing::warn!(%layer, "the open layer of a drive is missing; it was empty when an earlier attempt sealed it");
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Makes sure that the drives that a session is about to mount can be mounted.
    pub(in crate::engine) async fn bound_start(&self, sandbox: &Sandbox) -> Result<()> {
        for mount in sandbox.config.mounts.values() {
            let Ok(drive) = self.find_drive(&sandbox.project, &mount.drive).await else { continue };
            if drive.layers.len() >= self.context.settings.chain_bound {
                let compacted = self.compact_drive(&drive.id, true).await;
                may_go_on(compacted, &drive.layers)?;
            }
        }
        Ok(())
    }
}
