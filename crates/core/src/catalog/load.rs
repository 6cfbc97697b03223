//! Reads the manifests when a daemon starts, and brings the index up to date.
//!
//! The manifests are the truth. What the index has and the disk has not is removed from the index; if it
//! may be lost and not deleted, a copy goes to `quarantine/` first, so that the layers it names stay.

use std::collections::HashSet;

use sandkeep_types::error_chain;
use serde::Serialize;

use super::CatalogResult;
use crate::db::{Db, Filter, Owner, Page, Tombstones};
use crate::model::{
    Command, Drive, Phase, Project, Sandbox, SandboxId, Session, Snapshot, Timestamp,
};
use crate::store::{Damaged, DiskListing, Scan, Store};

/// Everything on record.
#[derive(Debug, Default)]
pub struct Contents {
    /// All projects.
    pub projects: Vec<Project>,
    /// All snapshots, with what is left of those that were dropped.
    pub snapshots: Vec<Snapshot>,
    /// All drives.
    pub drives: Vec<Drive>,
    /// All sandboxes that can be used.
    pub sandboxes: Vec<Sandbox>,
    /// Sandboxes that are known and not among `sandboxes`: their records are damaged, unusable or missing.
    /// What their machines wrote is nowhere else, so these must not be ended.
    pub unavailable: HashSet<SandboxId>,
    /// Records that do not read.
    pub damaged: DamagedRecords,
    /// Records that read and cannot be used.
    pub unusable: Vec<Unusable>,
    /// Records that are missing and could not be noted in `quarantine/`, as paths below the data directory.
    pub missing: Vec<String>,
}

/// Records that do not read, by kind.
#[derive(Debug, Default)]
pub struct DamagedRecords {
    /// Of projects.
    pub projects: Vec<Damaged>,
    /// Of snapshots.
    pub snapshots: Vec<Damaged>,
    /// Of drives.
    pub drives: Vec<Damaged>,
    /// Of sandboxes.
    pub sandboxes: Vec<Damaged>,
}

/// A record that cannot be used, because another one has its name.
#[derive(Debug)]
pub struct Unusable {
    /// The sandbox, if it is one.
    pub sandbox: Option<Sandbox>,
    /// The drive, if it is one.
    pub drive: Option<Drive>,
    /// Its manifest, as a path below the data directory.
    pub path: String,
    /// Why, with all causes.
    pub reason: String,
}

/// Reads all manifests into the index.
pub(super) async fn all(store: &Store, index: &dyn Db) -> CatalogResult<Contents> {
    let fresh = index.is_fresh();
    let listing = store.disk_listing().await?;
    let mut contents = Contents::default();
    let Scan { good, damaged } = store.scan::<Project>().await?;
    (contents.projects, contents.damaged.projects) = (good, damaged);
    let Scan { good, damaged } = store.scan::<Snapshot>().await?;
    (contents.snapshots, contents.damaged.snapshots) = (good, damaged);
    let Scan { good: mut sandboxes, damaged } = store.scan::<Sandbox>().await?;
    contents.damaged.sandboxes = damaged;
    let Scan { good: drives, damaged } = store.scan::<Drive>().await?;
    contents.damaged.drives = damaged;
    for sandbox in &mut sandboxes {
        if sandbox.phase_at == Timestamp::UNIX_EPOCH {
            sandbox.phase_at = sandbox.used_at;
        }
    }
    for project in &contents.projects {
        index.put_project(project).await?;
    }
    enter_drives(index, drives, &mut contents).await?;
    enter_snapshots(store, index, &listing, &mut contents).await?;
    remove_stale_sandboxes(store, index, &listing, &sandboxes, &mut contents).await?;
    for sandbox in sandboxes {
        if let Err(error) = index.put_sandbox(&sandbox).await {
            // Another one has its name: a directory was copied. It is unknown which is meant.
            let path = format!("sandboxes/{}/sandbox.json", sandbox.id);
            let reason = error_chain(&error);
            contents.unusable.push(Unusable { sandbox: Some(sandbox), drive: None, path, reason });
            continue;
        }
        if fresh || sandbox.phase() != Phase::Stopped {
            history(store, index, &sandbox.id).await?;
        }
        contents.sandboxes.push(sandbox);
    }
    contents.unavailable = listing.sandboxes;
    for sandbox in &contents.sandboxes {
        contents.unavailable.remove(&sandbox.id);
    }
    index.filled().await;
    Ok(contents)
}

/// Reads the sessions and commands of a sandbox into the index.
pub(super) async fn history(store: &Store, index: &dyn Db, id: &SandboxId) -> CatalogResult<()> {
    let Scan::<Session> { good, .. } = store.scan_sessions(id).await?;
    for session in good {
        index.put_session(&session).await?;
    }
    let Scan::<Command> { good, .. } = store.scan_commands(id).await?;
    for command in good {
        index.put_command(&command).await?;
    }
    Ok(())
}

async fn enter_drives(
    index: &dyn Db,
    drives: Vec<Drive>,
    contents: &mut Contents,
) -> CatalogResult<()> {
    let known: HashSet<_> = drives.iter().map(|drive| drive.id.clone()).collect();
    for stale in index.drives(None, None, &Page::all()).await?.items {
        if !known.contains(&stale.id) {
            index.remove_drive(&stale.id).await?;
        }
    }
    for drive in drives {
        if let Err(error) = index.put_drive(&drive).await {
            let path = format!("drives/{}.json", drive.id);
            let reason = error_chain(&error);
            contents.unusable.push(Unusable { sandbox: None, drive: Some(drive), path, reason });
            continue;
        }
        contents.drives.push(drive);
    }
    Ok(())
}

async fn enter_snapshots(
    store: &Store,
    index: &dyn Db,
    listing: &DiskListing,
    contents: &mut Contents,
) -> CatalogResult<()> {
    let projects: HashSet<_> = contents.projects.iter().map(|project| &project.name).collect();
    let known: HashSet<_> = contents.snapshots.iter().map(|snapshot| &snapshot.id).collect();
    for stale in index.snapshots(Owner::Anybody, Tombstones::With, &Page::all()).await?.items {
        if known.contains(&stale.id) {
            continue;
        }
        let place = format!("snapshots/{}.json", stale.id);
        let in_use = stale.deleted_at.is_none() && projects.contains(&stale.project);
        if in_use && !listing.manifests.contains(&place) {
            contents.missing.extend(note_missing(store, place, &stale).await);
        }
        index.remove_snapshot(&stale.id).await?;
    }
    for snapshot in &contents.snapshots {
        index.put_snapshot(snapshot).await?;
    }
    Ok(())
}

async fn remove_stale_sandboxes(
    store: &Store,
    index: &dyn Db,
    listing: &DiskListing,
    sandboxes: &[Sandbox],
    contents: &mut Contents,
) -> CatalogResult<()> {
    let known: HashSet<_> = sandboxes.iter().map(|sandbox| &sandbox.id).collect();
    for stale in index.sandboxes(None, &Filter::default(), &Page::all()).await?.items {
        if known.contains(&stale.id) {
            continue;
        }
        let place = format!("sandboxes/{}/sandbox.json", stale.id);
        // A sandbox that never ran has nothing that could be lost, and may never have been on disk.
        let ran = stale.phase() != Phase::Deleted && stale.session.is_some();
        let trashed = listing.trashed.contains(stale.id.as_str());
        if ran && !trashed && !listing.manifests.contains(&place) {
            contents.missing.extend(note_missing(store, place, &stale).await);
        }
        index.remove_sandbox(&stale.id).await?;
    }
    Ok(())
}

/// Keeps what the index remembers of a manifest that the disk does not have. Answers with its path if
/// that did not work.
async fn note_missing(store: &Store, place: String, doc: &impl Serialize) -> Option<String> {
    let json = serde_json::to_vec_pretty(doc).unwrap_or_default();
    let error = store.remember_missing(&place, json).await.err()?;
    tracing::error!(
        place,
        error = error_chain(&error),
        "the index's copy of a missing manifest was not saved"
    );
    Some(place)
}
