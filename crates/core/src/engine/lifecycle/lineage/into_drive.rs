//! Puts chosen files of a fork into a drive.
//!
//! ```text
//! fork captured  →  its changes since its base, onto the drive's layers: a new layer  →  guard
//!                →  under the drives' lock: nobody attached, still that generation  →  drive's manifest: layer on top
//! ```
//!
//! The drive's manifest is the commit point. A daemon that dies before leaves a layer that nothing
//! references; after it, a repeated request finds nothing left to do, and reports that it is done.

use std::sync::Arc;

use crate::engine::lifecycle::Lifecycle;
use crate::engine::lifecycle::lineage::merge::{NAMED, chosen};
use crate::engine::lifecycle::lineage::points::{ResolvedPoint, require_files};
use crate::engine::{Error, PromoteIntoDrive, PromotedIntoDrive, Result};
use crate::failpoint;
use crate::model::{Drive, LayerId, Name, Sandbox, now};
use crate::store::{Durability, Globs, MergeOutcome, OntoChains, OntoOptions, StoreError};

/// How often it is begun anew when the drive's contents change meanwhile.
const ATTEMPTS: usize = 3;
/// How long the directory in the drive may be.
const LONGEST_PATH: usize = 1024;

impl Lifecycle {
    pub(in crate::engine) async fn promote_into_drive(
        self: &Arc<Self>,
        project: &Name,
        name: &Name,
        request: PromoteIntoDrive,
    ) -> Result<PromotedIntoDrive> {
        if request.only.is_empty() {
            return Err(Error::invalid("only", "name the paths to promote; `/` is everything"));
        }
        let only = chosen(request.only)?;
        let under = directory(&request.path)?;
        let fork = self.find(project, name).await?;
        let drive = self.free_drive(project, &request.drive).await?;
        let base = self.resolve_base(&fork).await?;
        let theirs = if request.dry_run {
            self.resolve_point(project, &crate::model::Point::Now(name.clone())).await?
        } else {
            self.require_readable(&fork)?;
            // Most refusals are known before anything is captured.
            require_drive_generation(&drive, request.expect_generation, true)?;
            let snapshot = self.capture_fork(&fork, None).await?;
            require_files(&snapshot)?;
            self.resolve_snapshot(&snapshot.id, None).await?
        };
        failpoint::pass("drive_promote.captured");
        let wanted = WantedFiles { only, under, dry_run: request.dry_run };
        for _ in 0..ATTEMPTS {
            let drive = self.free_drive(project, &request.drive).await?;
            let outcome = self.put_into(&fork, &drive, (&base, &theirs), &wanted).await?;
            let (snapshot, dry_run) = (theirs.snapshot.clone(), request.dry_run);
            if !outcome.conflicts.is_empty() && !dry_run {
                return Err(conflicts(&fork, &drive, &outcome));
            }
            let is_done = outcome.layer.is_none() && outcome.conflicts.is_empty();
            require_drive_generation(&drive, request.expect_generation, is_done && !dry_run)?;
            let Some(layer) = &outcome.layer else {
                return Ok(PromotedIntoDrive { drive, outcome, snapshot });
            };
            self.references.count_layer(layer);
            self.guard_for(&fork, &theirs, &drive, &layer.id).await?;
            failpoint::pass("drive_promote.built");
            if let Some(drive) = self.add_to_drive(&drive, &layer.id).await? {
                failpoint::pass("drive_promote.kept");
                self.storage.drives.compact_drive_soon(&drive);
                return Ok(PromotedIntoDrive { drive, outcome, snapshot });
            }
        }
        let why = format!("drive `{}` was written to again and again meanwhile", request.drive);
        Err(StoreError::Busy { why }.into())
    }

    /// A drive without a writer.
    async fn free_drive(&self, project: &Name, name: &Name) -> Result<Drive> {
        let _drives = self.storage.drives.changes.lock().await;
        let mut drive = self.storage.drives.find_drive(project, name).await?;
        self.storage.drives.free_if_stale(&mut drive).await?;
        match &drive.attached {
            Some(attached) => {
                let sandbox = attached.name.clone();
                Err(Error::DriveAttached { drive: drive.name, sandbox })
            }
            None => Ok(drive),
        }
    }

    async fn put_into(
        &self,
        fork: &Sandbox,
        drive: &Drive,
        (base, theirs): (&ResolvedPoint, &ResolvedPoint),
        wanted: &WantedFiles,
    ) -> Result<MergeOutcome> {
        if let Some(reason) = self.references.missing_layer(&drive.layers).await {
            return Err(Error::DriveBroken { drive: drive.name.clone(), reason });
        }
        let hold = self.store.hold();
        hold.layers(&drive.layers).await;
        let globs = |globs: &[String]| match globs.is_empty() {
            true => Ok(None),
            false => Globs::parse(globs).map(Some),
        };
        let size = self.references.counts().bytes_of(&drive.layers);
        let options = OntoOptions {
            only: globs(&wanted.only)?,
            // What the fork leaves out of its snapshots is not there, which does not mean that it was deleted.
            exclude: globs(&fork.config.exclude)?,
            under: wanted.under.clone(),
            most_bytes: Some(drive.max_size.0.saturating_sub(size)),
            dry_run: wanted.dry_run,
        };
        let chains = OntoChains {
            from: base.layers.clone(),
            to: theirs.layers.clone(),
            onto: drive.layers.clone(),
        };
        let _turn = self.comparing.turn(&fork.project).await?;
        match self.store.put_onto(chains, options).await {
            Err(StoreError::OverLimit { need, .. }) => {
                let (need, limit) = (need.saturating_add(size), drive.max_size.0);
                Err(StoreError::OverLimit { need, limit }.into())
            }
            put => Ok(put?),
        }
    }

    /// What the fork's guard would not let it write to a drive does not get there this way either.
    async fn guard_for(
        &self,
        fork: &Sandbox,
        theirs: &ResolvedPoint,
        drive: &Drive,
        layer: &LayerId,
    ) -> Result<()> {
        let sessions = self.sessions_of(fork, theirs.snapshot.as_ref(), None).await?;
        let (layers, into) = (std::slice::from_ref(layer), Some(&drive.id));
        let guarded =
            self.storage.guard.guard_taken(fork, &fork.name, &sessions, layers, into).await;
        guarded.map_err(|error| match error {
            Error::TakenGuarded { from, files, findings, .. } => {
                Error::DriveGuarded { from, drive: drive.name.clone(), files, findings }
            }
            error => error,
        })
    }

    /// Puts a layer on top of a drive. `None` if its contents have changed since the layer was built.
    async fn add_to_drive(&self, planned: &Drive, layer: &LayerId) -> Result<Option<Drive>> {
        let drives = &self.storage.drives;
        let _drives = drives.changes.lock().await;
        let found = self.db.drive_by_id(&planned.id).await?;
        let mut drive = found.ok_or_else(|| Error::NoDrive(planned.name.to_string()))?;
        if let Some(attached) = drive.attached {
            return Err(Error::DriveAttached { drive: drive.name, sandbox: attached.name });
        }
        // Layers may have been made one meanwhile, with the same contents.
        if drive.generation != planned.generation {
            return Ok(None);
        }
        drive.layers.insert(0, layer.clone());
        drive.generation += 1;
        drive.updated_at = now();
        drives.keep_drive(&mut drive, Durability::Synced).await?;
        Ok(Some(drive))
    }
}

/// What is promoted, and where.
struct WantedFiles {
    only: Vec<String>,
    under: Vec<u8>,
    dry_run: bool,
}

/// The directory of a drive, from its root, without slashes around it.
fn directory(path: &str) -> Result<Vec<u8>> {
    let refuse = |why: &str| Err(Error::invalid("path", why));
    let parts: Vec<&str> =
        path.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    if parts.contains(&"..") || path.contains('\0') {
        return refuse("a directory of the drive, without `..`");
    }
    if path.len() > LONGEST_PATH || parts.iter().any(|part| part.len() > 255) {
        return refuse("at most 1,024 bytes, and 255 for each name");
    }
    Ok(parts.join("/").into_bytes())
}

/// Refuses a drive at another generation. A drive that has everything already may be at the next:
/// it was promoted before.
fn require_drive_generation(drive: &Drive, expected: Option<u64>, is_done: bool) -> Result<()> {
    match expected {
        Some(expected)
            if drive.generation != expected && !(is_done && drive.generation == expected + 1) =>
        {
            let (drive, found) = (drive.name.clone(), drive.generation);
            Err(Error::DriveGeneration { drive, expected, found })
        }
        _ => Ok(()),
    }
}

fn conflicts(fork: &Sandbox, drive: &Drive, outcome: &MergeOutcome) -> Error {
    let conflicts = outcome.conflicts.clone();
    let named = conflicts.iter().take(NAMED);
    let named: Vec<String> = named.map(|one| format!("{} ({})", one.path, one.reason)).collect();
    Error::DriveConflicts {
        from: fork.name.clone(),
        drive: drive.name.clone(),
        count: outcome.counts.conflicts,
        named: named.join("; "),
        conflicts,
    }
}
