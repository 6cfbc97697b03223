//! Evidence for garbage collection: whether everything that can name layers was read.
//!
//! Garbage collection may take a layer only when everything that could name it was read. So before each collection the names on disk
//! are compared with what memory knows, and everything that does not fit is a *doubt*:
//!
//! | found | why it is a doubt |
//! |---|---|
//! | a manifest that does not read | it names something, and nobody knows what |
//! | a manifest that memory knows and the disk does not have | the next daemon would not know what it names |
//! | a manifest that memory does not know | somebody put it there; it is taken up if it can be |
//! | a sandbox's directory that holds something, without a manifest | the manifest is missing |
//! | a snapshot whose sandbox is not there, and that does not say the sandbox was deleted | the sandbox's manifest is missing |
//! | a sandbox that stands on a snapshot without a record | the snapshot's manifest is missing |
//! | a layer that is named and not there | the name may be damaged, and mean another layer |
//! | a manifest that the index remembered and the disk does not have | the same |
//!
//! What a doubt can name is bounded by time: a manifest that this daemon never read was written by an earlier one, and can only name
//! layers that were there when this daemon started. Those stay while there is any doubt; layers made since are collected as ever.
//! Whatever documents in `quarantine/` name stays in any case.
//!
//! Doubts are looked for anew each time, so they end when what was missing is back.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Duration;

use crate::catalog::UnreadKey;
use crate::db::Unless;
use crate::engine::context::damage::DamageKind;
use crate::engine::error::error_chain;
use crate::engine::references::doubts::UncertainRecord;
use crate::engine::snapshots::Collector;
use crate::engine::{Error, Result};
use crate::model::lifecycle::Phase;
use crate::model::{DriveId, Image, SandboxId, SnapshotId, now};
use crate::store::{Damaged, DiskListing, Durability, StoreError};

/// How often something that does not fit is looked at again before it counts: manifests are written to disk first and
/// entered in memory a moment later, or the other way round.
const LOOKS: u32 = 6;
const BETWEEN_LOOKS: Duration = Duration::from_millis(150);

/// Something that does not fit.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Doubt {
    kind: DamageKind,
    detail: String,
}

type FoundDoubts = BTreeMap<String, Doubt>;

impl Collector {
    /// Looks for doubts, reports them, and notes which layers must stay for them.
    pub(in crate::engine) async fn survey(self: &Arc<Self>) -> Result<()> {
        let mut listing = self.context.catalog.listing().await?;
        let mut found = self.compare(&listing).await?;
        for _ in 1..LOOKS {
            if found.is_empty() {
                break;
            }
            tokio::time::sleep(BETWEEN_LOOKS).await;
            listing = self.context.catalog.listing().await?;
            let again = self.compare(&listing).await?;
            found = again.into_iter().filter(|(subject, _)| found.contains_key(subject)).collect();
        }
        self.adopt_manifests(&mut found).await;
        found.extend(self.look_at_images().await?);
        self.report(&found);
        self.records.find_lost_names(&listing).await?;
        for place in &listing.returned {
            if self.references.counts().known_manifests.manifests().contains(place) {
                self.store.forget_missing(place).await?;
            }
        }
        let mut protected = listing.quarantined;
        let mut state = self.references.doubts.0.lock();
        if !found.is_empty() {
            protected.extend(state.at_start.iter().cloned());
        }
        state.protected = Some(protected);
        Ok(())
    }

    /// Everything on disk that does not fit what memory knows.
    async fn compare(self: &Arc<Self>, listing: &DiskListing) -> Result<FoundDoubts> {
        self.restore_named_layers(listing).await?;
        let unread = self.reread_damaged(listing).await;
        let mut found = FoundDoubts::new();
        let mut doubt = |kind, subject: String, detail: String| {
            found.entry(subject).or_insert(Doubt { kind, detail });
        };
        let (orphans, dangling, known) = {
            let counts = self.references.counts();
            (
                counts.known_manifests.orphans(),
                counts.known_manifests.dangling(&listing.layers),
                counts.known_manifests.manifests(),
            )
        };
        for (path, reason) in unread {
            doubt(DamageKind::UnreadableManifest, path, reason);
        }
        for path in known.difference(&listing.manifests) {
            let detail = "it was there, and is not any more".to_owned();
            doubt(DamageKind::Missing, path.clone(), detail);
        }
        for path in listing.manifests.difference(&known) {
            let detail = "it was not there when the daemon started".to_owned();
            doubt(DamageKind::UnreadableManifest, path.clone(), detail);
        }
        for dir in &listing.bare {
            let detail = "its directory holds sessions, commands or other files".to_owned();
            doubt(DamageKind::Missing, format!("{dir}/sandbox.json"), detail);
        }
        for (snapshot, sandbox) in orphans {
            if listing.trashed.contains(sandbox.as_str()) {
                // A restore that broke off. The copy in the trash is as good.
                let _ =
                    self.snapshots.delete_record(&snapshot, Unless::Held, Durability::Synced).await;
                continue;
            }
            let detail =
                format!("snapshots/{snapshot}.json is a snapshot of it, and it was never deleted");
            doubt(DamageKind::Missing, format!("sandboxes/{sandbox}/sandbox.json"), detail);
        }
        for dangling in dangling {
            let detail = format!("{} names it", dangling.named_by);
            doubt(DamageKind::Missing, dangling.missing, detail);
        }
        for path in &listing.remembered {
            let detail = "the index remembered it; what it knew is in `quarantine/`, and can be removed there \
                          to give it up"
                .to_owned();
            doubt(DamageKind::Missing, path.clone(), detail);
        }
        Ok(found)
    }

    /// Takes layers out of the trash that some manifest names after all.
    async fn restore_named_layers(&self, listing: &DiskListing) -> Result<()> {
        let dangling = self.references.counts().known_manifests.dangling(&listing.layers);
        let ids = dangling
            .iter()
            .filter_map(|one| one.missing.split_once('/'))
            .filter(|(part, _)| ["layers", "memory"].contains(part))
            .map(|(_, id)| id.to_owned());
        let ids: Vec<String> = ids.collect();
        if ids.is_empty() {
            return Ok(());
        }
        self.references.restore_from_trash(ids).await
    }

    /// Reads what did not read once more. What reads now is no longer known as damaged, and is taken up like anything
    /// else that memory does not know.
    async fn reread_damaged(&self, listing: &DiskListing) -> BTreeMap<String, String> {
        let unread = self.references.doubts.0.lock().unread.clone();
        let mut still = BTreeMap::new();
        for (path, reason) in unread {
            let quarantined = path.replace('/', "+");
            let moved = listing.quarantine.iter().any(|name| name.starts_with(&quarantined));
            if moved && !self.store.data_dir().join(&path).exists() {
                continue;
            }
            match self.try_to_read(&path).await {
                Ok(()) => self.context.clear_damage(DamageKind::UnreadableManifest, &path),
                Err(now) => drop(still.insert(path, now.unwrap_or(reason))),
            }
        }
        self.references.doubts.0.lock().unread.clone_from(&still);
        still
    }

    /// Whether a manifest can be read by now; why not, if that is known.
    async fn try_to_read(&self, path: &str) -> Result<(), Option<String>> {
        let told = |error: StoreError| Some(error_chain(&error));
        match UncertainRecord::parse(path) {
            Some(named) => {
                let key = match &named {
                    UncertainRecord::Sandbox(id) => UnreadKey::Sandbox(id),
                    UncertainRecord::Snapshot(id) => UnreadKey::Snapshot(id),
                    UncertainRecord::Drive(id) => UnreadKey::Drive(id),
                };
                self.context.catalog.verify(key).await.map_err(|error| Some(error_chain(&error)))
            }
            None if path.starts_with("images/") => {
                let scan = self.store.scan::<Image>().await.map_err(told)?;
                let damaged = scan.damaged.into_iter().find(|one| one.path.ends_with(path));
                damaged.map_or(Ok(()), |one| Err(Some(one.reason)))
            }
            None => Err(None),
        }
    }

    /// Takes manifests up that were put there while the daemon runs.
    async fn adopt_manifests(self: &Arc<Self>, found: &mut FoundDoubts) {
        let subjects: Vec<String> = found.keys().cloned().collect();
        for path in subjects {
            let unknown = found.get(&path).is_some_and(|doubt| {
                doubt.kind == DamageKind::UnreadableManifest
                    && !self.references.doubts.0.lock().unread.contains_key(&path)
            });
            let Some(named) = UncertainRecord::parse(&path).filter(|_| unknown) else { continue };
            let taken = match &named {
                UncertainRecord::Sandbox(id) => self.adopt_sandbox(id).await,
                UncertainRecord::Snapshot(id) => self.adopt_snapshot(id).await,
                UncertainRecord::Drive(id) => self.adopt_drive(id).await,
            };
            match taken {
                Ok(None) => {
                    tracing::warn!(
                        path,
                        "a manifest appeared while the daemon runs; it is adopted"
                    );
                    found.remove(&path);
                }
                Ok(Some(reason)) => {
                    found.insert(
                        path,
                        Doubt { kind: DamageKind::UnreadableManifest, detail: reason },
                    );
                }
                Err(error) => {
                    let detail = error_chain(&error);
                    found.insert(path, Doubt { kind: DamageKind::UnreadableManifest, detail });
                }
            }
        }
    }

    async fn adopt_sandbox(&self, id: &SandboxId) -> Result<Option<String>> {
        let gone = || Error::Store(StoreError::NotFound { kind: "sandbox", key: id.to_string() });
        let sandbox = self.context.catalog.load(id).await?.ok_or_else(gone)?;
        let rests = matches!(sandbox.phase(), Phase::Stopped | Phase::Paused | Phase::Failed);
        if !rests || sandbox.open_layer().is_some() {
            return Ok(Some("it is about a session under way; start the daemon again".to_owned()));
        }
        if !self.context.catalog.adopt_sandbox(&sandbox).await? {
            let reason = format!("another sandbox is called `{}` by now", sandbox.name);
            return Ok(Some(reason));
        }
        self.references.counts().hold_sandbox(&sandbox);
        Ok(None)
    }

    async fn adopt_snapshot(&self, id: &SnapshotId) -> Result<Option<String>> {
        let _record = self.snapshots.snapshot_locks.lock(id).await;
        let snapshot = self.context.catalog.adopt_snapshot(id).await?;
        if snapshot.deleted_at.is_none() {
            self.references.counts().hold_snapshot(&snapshot);
        } else {
            self.references.counts().known_manifests.mark_snapshot_deleted(id);
        }
        Ok(None)
    }

    async fn adopt_drive(&self, id: &DriveId) -> Result<Option<String>> {
        let _drives = self.drives.changes.lock().await;
        let (drive, claimed) = self.context.catalog.adopt_drive(id).await?;
        if !claimed {
            return Ok(Some(format!("another drive is called `{}` by now", drive.name)));
        }
        self.references.counts().hold_drive(&drive);
        Ok(None)
    }

    /// Enters the existing images, and finds those that cannot be read or are missing though nobody
    /// removed them.
    async fn look_at_images(&self) -> Result<FoundDoubts> {
        let scan = self.store.scan::<Image>().await?;
        let mut found = FoundDoubts::new();
        for Damaged { path, reason, .. } in scan.damaged {
            let subject = self.store.below(&path);
            let kind = DamageKind::UnreadableManifest;
            found.insert(subject, Doubt { kind, detail: reason });
        }
        let names: HashSet<String> = scan.good.iter().map(|image| image.name.clone()).collect();
        {
            let mut state = self.references.doubts.0.lock();
            for gone in state.images.difference(&names) {
                let place = self.store.below(&self.store.data_dir().join(place_of_image(gone)));
                if !self.images.was_removed(gone) && !found.contains_key(&place) {
                    let detail = format!("image `{gone}` was there, and nobody removed it");
                    found.insert(place, Doubt { kind: DamageKind::Missing, detail });
                }
            }
            let images = &self.images;
            state.images.retain(|name| !images.was_removed(name));
            state.images.extend(names);
        }
        for image in &scan.good {
            self.references.count_image_layers(&image.layers).await?;
            let place = place_of_image(&image.name).display().to_string();
            for layer in image.layers.iter().filter(|layer| !self.references.counts().knows(layer))
            {
                let detail = format!("{place} names it");
                let kind = DamageKind::Missing;
                found.insert(format!("layers/{layer}"), Doubt { kind, detail });
            }
        }
        if found.is_empty() {
            self.references.counts().hold_images(&scan.good);
        } else {
            // Those that are gone or do not read keep what they held.
            let mut counts = self.references.counts();
            scan.good.iter().for_each(|image| counts.hold_image(image));
        }
        Ok(found)
    }

    /// Reports doubts, and clears those that are over.
    fn report(&self, found: &FoundDoubts) {
        let now_found: BTreeSet<(DamageKind, String)> =
            found.iter().map(|(subject, doubt)| (doubt.kind, subject.clone())).collect();
        let before =
            std::mem::replace(&mut self.references.doubts.0.lock().reported, now_found.clone());
        for (kind, subject) in before.difference(&now_found) {
            self.context.clear_damage(*kind, subject);
        }
        for (subject, Doubt { kind, detail }) in found {
            self.context.report_damage(
                *kind,
                subject.clone(),
                detail.clone(),
                "nothing that it might name is deleted; put it back, or see `keep fsck`",
            );
        }
        const SUBJECT: &str = "layers";
        match found.iter().next() {
            None => self.context.clear_damage(DamageKind::CollectionStopped, SUBJECT),
            Some((subject, _)) => self.context.report_damage(
                DamageKind::CollectionStopped,
                SUBJECT,
                format!(
                    "{} manifests or layers are missing or do not read; the first is {subject}",
                    found.len()
                ),
                "layers from before the daemon started are not collected, whoever names them",
            ),
        }
    }

    /// Marks snapshots of deleted sandboxes that an earlier version left unmarked: those that some sandbox stands on. That
    /// version dropped all others every 30 seconds, so another one is no snapshot of a deleted sandbox but of a lost one.
    pub(in crate::engine) async fn mark_left_behind(&self) -> Result<()> {
        let orphans = self.references.counts().known_manifests.orphans();
        for (id, sandbox) in orphans {
            if self.db.sandboxes_on(&id).await?.is_empty() {
                continue;
            }
            tracing::info!(snapshot = %id, %sandbox, "a snapshot is marked: an earlier version deleted its sandbox");
            self.snapshots
                .change_snapshot(&id, Durability::Soon, |snapshot| {
                    snapshot.sandbox_deleted_at = Some(now());
                })
                .await?;
        }
        Ok(())
    }
}

fn place_of_image(name: &str) -> std::path::PathBuf {
    <Image as crate::store::Manifest>::place(&name.to_owned())
}
