//! A catalog in memory, stricter than the real ones.
//!
//! It stands for a database that several nodes share: it outlives engines, and nothing of it is in the
//! data directory but what the engine itself keeps there (logs, layers, the trash). So an engine that
//! reads records from its disk, or writes them there, does not work with it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::{Arc, Weak};

use async_trait::async_trait;
use parking_lot::{Mutex, MutexGuard};
use sandkeep_core::catalog::{
    Catalog, CatalogError, CatalogResult, CatalogWatcher, CatalogWatchers, Contents, Next, Record,
    RecordKey, SnapshotDrop, UnreadKey, Versions,
};
use sandkeep_core::db::{Db, SqliteDb, Unless};
use sandkeep_core::model::{
    Command, CommandId, Drive, DriveId, Layer, Name, Project, Sandbox, SandboxId, Session,
    SessionId, Snapshot, SnapshotId,
};
use sandkeep_core::store::{DiskListing, Durability, Manifest as _, Store, Trashed};

/// The records, which outlive [`MemoryCatalog`]s as a database outlives daemons.
#[derive(Debug, Clone, Default)]
pub struct Records(Arc<Mutex<Tables>>);

#[derive(Debug, Default)]
struct Tables {
    projects: BTreeMap<Name, Project>,
    sandboxes: BTreeMap<SandboxId, Sandbox>,
    sessions: BTreeMap<SessionId, Session>,
    commands: BTreeMap<CommandId, Command>,
    snapshots: BTreeMap<SnapshotId, Snapshot>,
    drives: BTreeMap<DriveId, Drive>,
    /// Sandboxes that were claimed and not saved yet.
    claimed: BTreeSet<SandboxId>,
    /// Sandboxes whose records do not read.
    damaged: BTreeSet<SandboxId>,
    /// How many of the next saves fail.
    failing: usize,
    /// How many of the next saves find that another save was faster.
    overtaken: usize,
}

impl Records {
    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.0.lock()
    }

    /// Has another node save a sandbox right before each of the next `times` saves, so that those find
    /// another revision than they expect.
    pub fn overtake(&self, times: usize) {
        self.tables().overtaken = times;
    }

    /// Sets whether the record of a sandbox does not read when a catalog is opened.
    pub fn set_damaged(&self, sandbox: &SandboxId, damaged: bool) {
        let mut tables = self.tables();
        match damaged {
            true => tables.damaged.insert(sandbox.clone()),
            false => tables.damaged.remove(sandbox),
        };
    }

    /// Has the next `times` saves fail as on a disk that takes no writes.
    pub fn fail(&self, times: usize) {
        self.tables().failing = times;
    }
}

/// [`Catalog`] in memory, for one node.
#[derive(Debug)]
pub struct MemoryCatalog {
    store: Store,
    index: Arc<SqliteDb>,
    records: Records,
    versions: Versions,
    watchers: CatalogWatchers,
}

impl MemoryCatalog {
    /// A catalog over these records, for the node whose data directory is `store`.
    ///
    /// # Panics
    ///
    /// When there is no memory for an index.
    pub async fn new(store: Store, records: Records) -> Self {
        let index = Arc::new(SqliteDb::in_memory().await.expect("an index in memory"));
        let (versions, watchers) = (Versions::default(), CatalogWatchers::default());
        Self { store, index, records, versions, watchers }
    }

    /// What a save is up to before it begins: a failure that was asked for, or another node.
    async fn disturb(&self, sandbox: &Sandbox) -> CatalogResult<()> {
        let overtaken = {
            let mut tables = self.records.tables();
            if tables.failing > 0 {
                tables.failing -= 1;
                return Err(unwritable());
            }
            let overtaken = tables.overtaken > 0;
            tables.overtaken = tables.overtaken.saturating_sub(1);
            overtaken
        };
        if overtaken {
            let found = self.load(&sandbox.id).await?;
            let mut other = found.expect("only a sandbox that was saved can be overtaken");
            let next = self.versions.next(&other).await?;
            self.write(&mut other, next).await?;
        }
        Ok(())
    }

    async fn write(&self, sandbox: &mut Sandbox, next: Next) -> CatalogResult<()> {
        sandbox.revision = next.revision();
        {
            let mut tables = self.records.tables();
            tables.claimed.remove(&sandbox.id);
            // What a record says must be what a document can say.
            tables.sandboxes.insert(sandbox.id.clone(), as_document(sandbox));
        }
        // Where this node keeps logs and journals of the sandbox.
        let dir = self.store.data_dir().join("sandboxes").join(sandbox.id.as_str());
        fs::create_dir_all(dir.join("commands")).expect("a directory for logs");
        self.index.put_sandbox(sandbox).await?;
        next.saved();
        Ok(())
    }

    async fn show_history(&self, id: &SandboxId) -> CatalogResult<()> {
        let (sessions, commands) = {
            let tables = self.records.tables();
            let sessions = tables.sessions.values().filter(|one| one.sandbox == *id).cloned();
            let commands = tables.commands.values().filter(|one| one.sandbox == *id).cloned();
            (sessions.collect::<Vec<_>>(), commands.collect::<Vec<_>>())
        };
        for session in sessions {
            self.index.put_session(&session).await?;
        }
        for command in commands {
            self.index.put_command(&command).await?;
        }
        Ok(())
    }
}

/// A record after it was written and read.
fn as_document<T: serde::Serialize + serde::de::DeserializeOwned>(record: &T) -> T {
    let text = serde_json::to_string(record).expect("a document");
    serde_json::from_str(&text).expect("it reads")
}

fn unwritable() -> CatalogError {
    let source = std::io::Error::other("a test asked for it");
    CatalogError::Store(sandkeep_core::store::StoreError::Io {
        action: "write",
        path: "records".into(),
        source,
    })
}

fn gone(kind: &'static str, key: impl ToString) -> CatalogError {
    CatalogError::NotFound { kind, key: key.to_string() }
}

#[async_trait]
impl Catalog for MemoryCatalog {
    fn reader(&self) -> Arc<dyn Db> {
        Arc::clone(&self.index) as Arc<dyn Db>
    }

    async fn open(&self) -> CatalogResult<Contents> {
        let contents = {
            let mut tables = self.records.tables();
            // A claim without a save is of a daemon that died.
            tables.claimed.clear();
            let sandboxes = tables.sandboxes.values();
            let usable = sandboxes.filter(|sandbox| !tables.damaged.contains(&sandbox.id));
            Contents {
                projects: tables.projects.values().cloned().collect(),
                snapshots: tables.snapshots.values().cloned().collect(),
                drives: tables.drives.values().cloned().collect(),
                sandboxes: usable.cloned().collect(),
                unavailable: tables.damaged.iter().cloned().collect(),
                ..Contents::default()
            }
        };
        for project in &contents.projects {
            self.index.put_project(project).await?;
        }
        for drive in &contents.drives {
            self.index.put_drive(drive).await?;
        }
        for snapshot in &contents.snapshots {
            self.index.put_snapshot(snapshot).await?;
        }
        for sandbox in &contents.sandboxes {
            self.versions.enter(sandbox);
            self.index.put_sandbox(sandbox).await?;
            self.show_history(&sandbox.id).await?;
        }
        Ok(contents)
    }

    async fn close(&self) {}

    async fn load(&self, id: &SandboxId) -> CatalogResult<Option<Sandbox>> {
        Ok(self.records.tables().sandboxes.get(id).cloned())
    }

    async fn claim(&self, sandbox: &Sandbox) -> CatalogResult<bool> {
        let claimed = self.index.claim(sandbox).await?;
        if claimed {
            self.versions.enter(sandbox);
            self.records.tables().claimed.insert(sandbox.id.clone());
        }
        Ok(claimed)
    }

    async fn release(&self, id: &SandboxId) -> CatalogResult<()> {
        assert!(self.records.tables().claimed.remove(id), "{id} was saved, or never claimed");
        self.versions.strike(id);
        Ok(self.index.remove_sandbox(id).await?)
    }

    async fn rename(&self, id: &SandboxId, name: &Name) -> CatalogResult<bool> {
        Ok(self.index.rename(id, name).await?)
    }

    async fn save(&self, sandbox: &mut Sandbox, _: Durability) -> CatalogResult<()> {
        self.disturb(sandbox).await?;
        let next = self.versions.next(sandbox).await?;
        self.write(sandbox, next).await?;
        self.watchers.saved(sandbox, None);
        Ok(())
    }

    async fn sync_new(&self, sandbox: &Sandbox) -> CatalogResult<()> {
        let _same = self.versions.next(sandbox).await?;
        let saved = self.load(&sandbox.id).await?;
        assert_eq!(saved.as_ref(), Some(sandbox), "only what was saved is synced");
        Ok(())
    }

    async fn commit(
        &self,
        layers: &[Layer],
        snapshot: Option<&Snapshot>,
        sandbox: &mut Sandbox,
    ) -> CatalogResult<()> {
        self.disturb(sandbox).await?;
        let next = self.versions.next(sandbox).await?;
        for layer in layers {
            // Layers are of this node, whichever node has the records.
            self.store.write(layer, Durability::Synced).await?;
        }
        if let Some(snapshot) = snapshot {
            self.put(Record::Snapshot(snapshot), Durability::Synced).await?;
        }
        self.write(sandbox, next).await?;
        self.watchers.saved(sandbox, snapshot);
        Ok(())
    }

    async fn show(&self, sandbox: &Sandbox) -> CatalogResult<()> {
        Ok(self.index.put_sandbox(sandbox).await?)
    }

    async fn remove(&self, sandbox: &Sandbox) -> CatalogResult<()> {
        let last = self.versions.next(sandbox).await?;
        // The trash is of this node, and takes documents.
        self.store.write(sandbox, Durability::Synced).await?;
        let (sessions, commands) = {
            let mut tables = self.records.tables();
            tables.sandboxes.remove(&sandbox.id);
            let sessions = tables.sessions.extract_if(.., |_, one| one.sandbox == sandbox.id);
            let sessions: Vec<_> = sessions.collect();
            let commands = tables.commands.extract_if(.., |_, one| one.sandbox == sandbox.id);
            (sessions, commands.collect::<Vec<_>>())
        };
        for (_, session) in sessions {
            self.store.write(&session, Durability::Soon).await?;
        }
        for (_, command) in commands {
            self.store.write(&command, Durability::Soon).await?;
        }
        self.store.remove_sandbox_dir(&sandbox.id).await?;
        self.versions.strike(&sandbox.id);
        drop(last);
        self.index.remove_sandbox(&sandbox.id).await?;
        self.watchers.removed(sandbox);
        Ok(())
    }

    async fn keep_for_trash(&self, id: &SandboxId, snapshot: &Snapshot) -> CatalogResult<()> {
        self.store.write(snapshot, Durability::Synced).await?;
        self.store.keep_for_trash(id, &snapshot.id).await?;
        Ok(self.store.remove::<Snapshot>(&snapshot.id).await?)
    }

    async fn restore(&self, trashed: &Trashed, sandbox: &mut Sandbox) -> CatalogResult<()> {
        let next = self.versions.next(sandbox).await?;
        self.store.restore_sandbox(trashed, sandbox).await?;
        let sessions = self.store.scan_sessions(&sandbox.id).await?.good;
        let commands = self.store.scan_commands(&sandbox.id).await?.good;
        let dir = self.store.data_dir().join(Sandbox::place(&sandbox.id));
        fs::remove_file(dir).expect("its document is there");
        self.write(sandbox, next).await?;
        self.watchers.saved(sandbox, None);
        for session in sessions {
            self.put(Record::Session(&session), Durability::Soon).await?;
        }
        for command in commands {
            self.put(Record::Command(&command), Durability::Soon).await?;
        }
        Ok(())
    }

    async fn put(&self, record: Record<'_>, _: Durability) -> CatalogResult<()> {
        let known = |id: &SandboxId| match self.records.tables().sandboxes.contains_key(id) {
            true => Ok(()),
            false => Err(gone("sandbox", id)),
        };
        match record {
            Record::Session(session) => {
                known(&session.sandbox)?;
                self.records.tables().sessions.insert(session.id.clone(), as_document(session));
                self.index.put_session(session).await?;
            }
            Record::Command(command) => {
                known(&command.sandbox)?;
                self.records.tables().commands.insert(command.id.clone(), as_document(command));
                self.index.put_command(command).await?;
            }
            Record::Snapshot(snapshot) => {
                let document = as_document(snapshot);
                self.records.tables().snapshots.insert(snapshot.id.clone(), document);
                self.index.put_snapshot(snapshot).await?;
            }
            Record::Drive(drive) => {
                self.records.tables().drives.insert(drive.id.clone(), as_document(drive));
                self.index.put_drive(drive).await?;
            }
            Record::Project(project) => {
                self.records.tables().projects.insert(project.name.clone(), as_document(project));
                self.index.put_project(project).await?;
            }
        }
        Ok(())
    }

    async fn delete(&self, key: RecordKey<'_>) -> CatalogResult<()> {
        match key {
            RecordKey::Command(_, command) => {
                self.records.tables().commands.remove(command);
                self.index.remove_command(command).await?;
            }
            RecordKey::Snapshot(snapshot) => {
                self.records.tables().snapshots.remove(snapshot);
                self.index.remove_snapshot(snapshot).await?;
            }
            RecordKey::Drive(drive) => {
                self.records.tables().drives.remove(drive);
                self.index.remove_drive(drive).await?;
            }
            RecordKey::Project(project) => {
                self.records.tables().projects.remove(project);
                self.index.remove_project(project).await?;
            }
        }
        Ok(())
    }

    async fn remove_commands(&self, id: &SandboxId, commands: &[CommandId]) -> CatalogResult<()> {
        for command in commands {
            self.delete(RecordKey::Command(id, command)).await?;
        }
        Ok(self.store.remove_commands(id, commands).await?)
    }

    async fn claim_drive(&self, drive: &Drive) -> CatalogResult<bool> {
        Ok(self.index.claim_drive(drive).await?)
    }

    async fn replace_by_tombstone(
        &self,
        snapshot: &Snapshot,
        tombstone: &Snapshot,
        unless: Unless<'_>,
        _: Durability,
    ) -> CatalogResult<SnapshotDrop> {
        assert_eq!(snapshot.id, tombstone.id, "a tombstone is of its snapshot");
        if !self.index.put_tombstone(tombstone, unless).await? {
            return Ok(SnapshotDrop::Not);
        }
        self.records.tables().snapshots.insert(tombstone.id.clone(), as_document(tombstone));
        Ok(SnapshotDrop::Tombstone)
    }

    async fn verify(&self, key: UnreadKey<'_>) -> CatalogResult<()> {
        unreachable!("all that is in memory reads: {key:?}")
    }

    async fn adopt_sandbox(&self, sandbox: &Sandbox) -> CatalogResult<bool> {
        let claimed = self.claim(sandbox).await?;
        if claimed {
            self.show_history(&sandbox.id).await?;
        }
        Ok(claimed)
    }

    async fn adopt_snapshot(&self, id: &SnapshotId) -> CatalogResult<Snapshot> {
        let found = self.records.tables().snapshots.get(id).cloned();
        let snapshot = found.ok_or_else(|| gone("snapshot", id))?;
        self.index.put_snapshot(&snapshot).await?;
        Ok(snapshot)
    }

    async fn adopt_drive(&self, id: &DriveId) -> CatalogResult<(Drive, bool)> {
        let found = self.records.tables().drives.get(id).cloned();
        let drive = found.ok_or_else(|| gone("drive", id))?;
        let claimed = self.index.claim_drive(&drive).await?;
        Ok((drive, claimed))
    }

    async fn listing(&self) -> CatalogResult<DiskListing> {
        let mut listing = self.store.disk_listing().await?;
        assert!(listing.manifests.is_empty(), "written to disk: {:?}", listing.manifests);
        let tables = self.records.tables();
        let known = |dir: &String| {
            let id = dir.trim_start_matches("sandboxes/").parse();
            id.is_ok_and(|id| tables.sandboxes.contains_key(&id))
        };
        listing.bare.retain(|dir| !known(dir));
        let places = tables.sandboxes.keys().map(Sandbox::place);
        let places = places.chain(tables.snapshots.keys().map(Snapshot::place));
        let places = places.chain(tables.drives.keys().map(Drive::place));
        listing.manifests.extend(places.map(|place| place.display().to_string()));
        Ok(listing)
    }

    fn watch(&self, watcher: Weak<dyn CatalogWatcher>) {
        self.watchers.add(watcher);
    }
}
