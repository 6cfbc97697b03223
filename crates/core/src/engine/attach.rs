//! How a session comes to have drives, and lets go of them.
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
//! to the sandbox's, so that nobody takes what is about to be mounted for stale. It is not held while
//! a session's layer is sealed: a sync may take long.

use std::sync::Arc;

use super::boot::chain_of;
use super::{Error, Inner, Result};
use crate::db::Page;
use crate::driver::MachineMount;
use crate::failpoint;
use crate::model::{Attachment, Drive, DriveId, LayerId, MountMode, Mounted, Sandbox, SessionId};
use crate::store::{Durability, SealOptions};

impl Inner {
    /// Attaches all drives of a sandbox whose session is about to start; all or nothing. Whoever calls
    /// this has the drives' lock, and keeps it until the answer is in the sandbox's manifest.
    pub(super) async fn attach(
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
                self.let_go(one).await?;
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
        if let Some(reason) = self.missing_layer(&drive.layers).await {
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

    /// What the driver is to mount.
    pub(super) fn machine_mounts(&self, sandbox: &Sandbox) -> Vec<MachineMount> {
        let user = sandbox.config.user.as_ref().or(sandbox.image_config.user.as_ref());
        let owner = user.map_or("root", String::as_str);
        let described = |mounted: &Mounted| MachineMount {
            target: mounted.path.clone().into(),
            root: self.store.root(&mounted.layer, &mounted.chain),
            read_only: mounted.mode == MountMode::Snapshot,
            owner: mounted.chain.is_empty().then(|| owner.to_owned()),
        };
        sandbox.mounted().iter().map(described).collect()
    }

    /// Keeps what a session that is over wrote to its drives, and frees them. Done again after a
    /// failure or a crash, it does what is left to do.
    pub(super) async fn detach(self: &Arc<Self>, sandbox: &Sandbox) -> Result<()> {
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
            let _drives = self.drives.lock().await;
            let empty = sealed.is_none();
            let drive = self.pay(mounted, sealed).await?;
            failpoint::pass("drive.detached");
            if empty {
                self.store.discard(&mounted.layer).await?;
            }
            if let Some(drive) = &drive {
                self.shorten_drive_soon(drive);
            }
        }
        Ok(())
    }

    /// Undoes an attachment of a session that never started, under the drives' lock.
    async fn let_go(&self, mounted: &Mounted) -> Result<()> {
        self.store.discard(&mounted.layer).await?;
        if mounted.mode == MountMode::ReadWrite {
            self.pay(mounted, None).await?;
        }
        Ok(())
    }

    /// Adds a sealed layer to the drive it was written for, if that was not done before, under the
    /// drives' lock. Answers with what the drive is now.
    async fn pay(&self, mounted: &Mounted, sealed: Option<LayerId>) -> Result<Option<Drive>> {
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
            drive.layers.splice(..0, sealed);
            drive.attached = None;
            self.keep_drive(&mut drive, Durability::Synced).await?;
        }
        Ok(Some(drive))
    }

    /// Frees a drive that is attached to a session its sandbox does not know of, under the drives' lock.
    pub(super) async fn free_if_stale(&self, drive: &mut Drive) -> Result<()> {
        let Some(attached) = &drive.attached else { return Ok(()) };
        let sandbox = self.db.sandbox_by_id(&attached.sandbox).await?;
        let listed = |sandbox: &Sandbox| {
            sandbox.mounted().iter().any(|mounted| mounted.layer == attached.layer)
        };
        if sandbox.as_ref().is_some_and(listed) {
            return Ok(());
        }
        tracing::warn!(drive = %drive.name, sandbox = %attached.name, "was left attached; what was written to it is kept");
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
            self.guard_drive(sandbox, Some(session), &mounted).await?;
        }
        let sealed = self.seal_open(&attached.layer, &SealOptions::default()).await?;
        drive.layers.splice(..0, sealed);
        drive.attached = None;
        self.keep_drive(drive, Durability::Synced).await
    }

    /// Frees all drives that nobody has, whatever they say. One that cannot be freed, for want of room
    /// say, is in nobody's way but its own: the next who comes for it tries again.
    pub(super) async fn free_stale_drives(&self) {
        let all = match self.db.drives(None, None, &Page::all()).await {
            Ok(all) => all.items,
            Err(error) => {
                tracing::error!(%error, "drives that nobody has were not looked for");
                return;
            }
        };
        for drive in all.into_iter().filter(|drive| drive.attached.is_some()) {
            if let Err(error) = self.free_stale_drive(&drive.id).await {
                tracing::error!(drive = %drive.name, error = chain_of(&error), "a drive that nobody has could not be freed");
            }
        }
    }

    async fn free_stale_drive(&self, id: &DriveId) -> Result<()> {
        let _drives = self.drives.lock().await;
        // Asked again under the lock: it may have been attached anew.
        if let Some(mut drive) = self.db.drive_by_id(id).await? {
            self.free_if_stale(&mut drive).await?;
        }
        Ok(())
    }
}
