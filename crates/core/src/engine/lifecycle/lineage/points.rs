//! The layers that a point has. Nothing is started, paused or changed for it.

use crate::db::{Owner, Page, Tombstones};
use crate::engine::lifecycle::Lifecycle;
use crate::engine::{Error, Result};
use crate::model::{Config, ImageConfig, LayerId, Name, Point, Sandbox, Snapshot, SnapshotId};
use crate::store::Hold;

/// How often a sandbox that changes its layers at that moment is looked at again.
const ATTEMPTS: usize = 5;
/// How many snapshots are searched for a label at a time.
const SEARCHED: u32 = 500;

/// A point, with its layers kept in place.
#[derive(Debug)]
pub(in crate::engine) struct ResolvedPoint {
    /// The topmost first. That of a running sandbox is open.
    pub(in crate::engine) layers: Vec<LayerId>,
    /// The snapshot, if it is one.
    pub(in crate::engine) snapshot: Option<SnapshotId>,
    /// Whether files may change meanwhile.
    pub(in crate::engine) live: bool,
    /// The working directory there.
    pub(in crate::engine) cwd: Option<String>,
    _hold: Hold,
}

impl Lifecycle {
    /// Finds the layers of a point.
    pub(in crate::engine) async fn resolve_point(
        &self,
        project: &Name,
        point: &Point,
    ) -> Result<ResolvedPoint> {
        let found = match point {
            Point::Now(name) => self.resolve_now(project, name).await,
            Point::Saved(name) => {
                let sandbox = self.find(project, name).await?;
                self.resolve_saved(&sandbox).await
            }
            Point::Base(name) => {
                let sandbox = self.find(project, name).await?;
                self.resolve_base(&sandbox).await
            }
            Point::Labelled(name, label) => {
                let sandbox = self.find(project, name).await?;
                let snapshot = self.labelled(&sandbox, label).await?;
                self.resolve_snapshot(&snapshot, Some(&sandbox.config)).await
            }
            Point::Snapshot(id) => {
                let snapshot = self.storage.snapshots.find_snapshot(project, id).await?;
                self.resolve_snapshot(&snapshot.id, None).await
            }
            Point::Image(name) => {
                // One that is not there yet is not made for a comparison.
                self.images.get(name).await?;
                let (image, hold) = self.hold_image(name).await?;
                let cwd = image.config.cwd;
                let (layers, snapshot) = (image.layers, None);
                Ok(ResolvedPoint { layers, snapshot, live: false, cwd, _hold: hold })
            }
        };
        found.map_err(|error| match error {
            Error::FilesNotReadable { why, .. } => {
                Error::FilesNotReadable { point: point.to_string(), why }
            }
            error => error,
        })
    }

    async fn resolve_now(&self, project: &Name, name: &Name) -> Result<ResolvedPoint> {
        for _ in 0..ATTEMPTS {
            let sandbox = self.as_it_runs(self.find(project, name).await?);
            let Some(layers) = open_layers(&sandbox) else {
                return self.resolve_saved(&sandbox).await;
            };
            if self.context.driver(&sandbox.config.driver)?.disk().is_some() {
                let why = "it is on the disk of a virtual machine that only it can read";
                return Err(Error::FilesNotReadable { point: name.to_string(), why });
            }
            let hold = self.store.hold();
            hold.layers(&layers).await;
            // What its record names after the hold began stays while it lasts.
            let again = self.as_it_runs(self.find(project, name).await?);
            if open_layers(&again).as_ref() == Some(&layers) {
                let cwd = cwd_of(&sandbox.config, &sandbox.image_config);
                return Ok(ResolvedPoint { layers, snapshot: None, live: true, cwd, _hold: hold });
            }
        }
        Err(Error::SessionOver)
    }

    fn as_it_runs(&self, sandbox: Sandbox) -> Sandbox {
        let live = self.turns.live(&sandbox.id);
        live.map_or(sandbox, |live| (*live.sandbox()).clone())
    }

    /// What a sandbox starts from next: its last snapshot, or its image.
    pub(in crate::engine) async fn resolve_saved(
        &self,
        sandbox: &Sandbox,
    ) -> Result<ResolvedPoint> {
        self.storage.snapshots.require_snapshot(sandbox).await?;
        match &sandbox.current {
            Some(current) => self.resolve_snapshot(current, Some(&sandbox.config)).await,
            None => Ok(self.resolve_image_of(sandbox).await),
        }
    }

    pub(super) async fn resolve_base(&self, sandbox: &Sandbox) -> Result<ResolvedPoint> {
        let base = sandbox.forked_from.as_ref().and_then(|from| from.snapshot.as_ref());
        let Some(base) = base else { return Ok(self.resolve_image_of(sandbox).await) };
        let found = self.resolve_snapshot(base, Some(&sandbox.config)).await;
        found.map_err(|error| match error {
            Error::SnapshotDeleted(snapshot) => Error::AncestorDeleted { snapshot },
            error => error,
        })
    }

    /// The image of a sandbox.
    pub(in crate::engine) async fn resolve_image_of(&self, sandbox: &Sandbox) -> ResolvedPoint {
        let (hold, layers) = (self.store.hold(), sandbox.image_layers.clone());
        hold.layers(&layers).await;
        let cwd = cwd_of(&sandbox.config, &sandbox.image_config);
        ResolvedPoint { layers, snapshot: None, live: false, cwd, _hold: hold }
    }

    /// The layers of a snapshot that is files only.
    pub(in crate::engine) async fn resolve_snapshot(
        &self,
        id: &SnapshotId,
        config: Option<&Config>,
    ) -> Result<ResolvedPoint> {
        let (hold, found) = self.references.hold_snapshot(id).await?;
        let snapshot = found.ok_or_else(|| Error::SnapshotDeleted(id.clone()))?;
        require_files(&snapshot)?;
        let cwd = config.and_then(|config| config.cwd.clone());
        Ok(ResolvedPoint {
            cwd: cwd.or(snapshot.image_config.cwd),
            layers: snapshot.layers,
            snapshot: Some(snapshot.id),
            live: false,
            _hold: hold,
        })
    }

    /// The newest snapshot of a sandbox that has a label.
    async fn labelled(&self, sandbox: &Sandbox, label: &str) -> Result<SnapshotId> {
        let mut page = Page { limit: SEARCHED, ..Page::default() };
        loop {
            let owner = Owner::Sandbox(&sandbox.id);
            let found = self.db.snapshots(owner, Tombstones::Without, &page).await?;
            let labelled = found.items.into_iter().find(|one| one.label.as_deref() == Some(label));
            if let Some(snapshot) = labelled {
                return Ok(snapshot.id);
            }
            page.cursor = found.next;
            if page.cursor.is_none() {
                let (name, label) = (sandbox.name.clone(), label.to_owned());
                return Err(Error::NoLabel { name, label });
            }
        }
    }
}

/// Refuses a snapshot with memory: its files are on disks that only a machine reads.
pub(in crate::engine) fn require_files(snapshot: &Snapshot) -> Result<()> {
    if snapshot.has_memory() {
        let why = "it has memory, and its files are on the disk of a virtual machine";
        return Err(Error::FilesNotReadable { point: snapshot.id.to_string(), why });
    }
    Ok(())
}

/// The layers of an open session, if there is one.
fn open_layers(sandbox: &Sandbox) -> Option<Vec<LayerId>> {
    let open = sandbox.open_layer()?.clone();
    Some(std::iter::once(open).chain(sandbox.open_chain().iter().cloned()).collect())
}

fn cwd_of(config: &Config, image: &ImageConfig) -> Option<String> {
    config.cwd.clone().or_else(|| image.cwd.clone())
}
