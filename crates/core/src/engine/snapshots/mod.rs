//! What is kept after a session: snapshots and their retention, drives, compaction of chains, garbage collection, the trash,
//! and the guard that inspects files before they are sealed.
//!
//! Each is a component of its own; [`Storage`] lists them from the bottom to the top.

pub(in crate::engine) mod compaction;
pub(in crate::engine) mod drives;
pub(in crate::engine) mod evidence;
pub(in crate::engine) mod export;
pub(in crate::engine) mod garbage_collection;
pub(in crate::engine) mod measure_ahead;
pub(in crate::engine) mod seal_guard;
pub(in crate::engine) mod snapshot_records;
pub(in crate::engine) mod storage_usage;
pub(in crate::engine) mod trash;

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::db::Db;
use crate::engine::context::Context;
use crate::engine::records::Records;
use crate::engine::references::References;
use crate::engine::running::turns::Turns;
use crate::engine::snapshots::compaction::Chains;
use crate::engine::snapshots::snapshot_records::{PinsSnapshots, Retained};
use crate::engine::snapshots::storage_usage::Measurements;
use crate::engine::snapshots::trash::TrashContents;
use crate::engine::tenancy::Tenancy;
use crate::engine::tenancy::secrets::Secrets;
use crate::keyed_lock::KeyedLock;
use crate::model::SnapshotId;
use crate::store::Store;
use crate::store::image::Images;

/// The components of this folder.
pub(in crate::engine) struct Storage {
    pub(in crate::engine) guard: Arc<SealGuard>,
    pub(in crate::engine) snapshots: Arc<Snapshots>,
    pub(in crate::engine) compaction: Arc<Compaction>,
    pub(in crate::engine) drives: Arc<Drives>,
    pub(in crate::engine) trash: Arc<Trash>,
    pub(in crate::engine) collector: Arc<Collector>,
    pub(in crate::engine) usage: Arc<StorageUsage>,
}

/// Inspects files and memory before they are sealed.
pub(in crate::engine) struct SealGuard {
    store: Store,
    db: Arc<dyn Db>,
    context: Arc<Context>,
    secrets: Arc<Secrets>,
}

/// The records of snapshots, and their retention.
pub(in crate::engine) struct Snapshots {
    db: Arc<dyn Db>,
    context: Arc<Context>,
    turns: Arc<Turns>,
    references: Arc<References>,
    records: Arc<Records>,
    pub(in crate::engine) retained: Retained,
    /// Knows which snapshots a review needs; set once by the layer above.
    pub(in crate::engine) pins: OnceLock<Weak<dyn PinsSnapshots>>,
    pub(in crate::engine) snapshot_locks: KeyedLock<SnapshotId>,
    /// Some tombstone may still be a snapshot after a power cut.
    unsynced_tombstones: AtomicBool,
}

/// Keeps chains of layers and of memory layers short.
pub(in crate::engine) struct Compaction {
    store: Store,
    db: Arc<dyn Db>,
    context: Arc<Context>,
    references: Arc<References>,
    records: Arc<Records>,
    snapshots: Arc<Snapshots>,
    /// Which layers were merged lately.
    pub(in crate::engine) chains: Chains,
    /// Memory is merged for one snapshot at a time.
    merges: tokio::sync::Semaphore,
}

/// Drives, and how sessions mount them.
pub(in crate::engine) struct Drives {
    store: Store,
    db: Arc<dyn Db>,
    context: Arc<Context>,
    references: Arc<References>,
    guard: Arc<SealGuard>,
    compaction: Arc<Compaction>,
    /// Held while a drive's record is changed.
    pub(in crate::engine) changes: tokio::sync::Mutex<()>,
}

/// Deleted sandboxes and layers that can still be restored.
pub(in crate::engine) struct Trash {
    store: Store,
    db: Arc<dyn Db>,
    context: Arc<Context>,
    references: Arc<References>,
    records: Arc<Records>,
    tenancy: Arc<Tenancy>,
    snapshots: Arc<Snapshots>,
    guard: Arc<SealGuard>,
    contents: TrashContents,
}

/// Garbage collection of layers.
pub(in crate::engine) struct Collector {
    store: Store,
    db: Arc<dyn Db>,
    images: Images,
    context: Arc<Context>,
    references: Arc<References>,
    records: Arc<Records>,
    snapshots: Arc<Snapshots>,
    drives: Arc<Drives>,
    trash: Arc<Trash>,
    /// One collection at a time. Nothing else takes this lock.
    collecting: tokio::sync::Mutex<()>,
    /// A collection was asked for and has not begun.
    collect_asked: AtomicBool,
    /// When the last collection ended, and how long it took.
    last_collection: Mutex<Option<(Instant, Duration)>>,
}

/// Measures what takes space.
pub(in crate::engine) struct StorageUsage {
    store: Store,
    db: Arc<dyn Db>,
    context: Arc<Context>,
    turns: Arc<Turns>,
    references: Arc<References>,
    measured: Measurements,
}

impl Storage {
    pub(in crate::engine) fn new(
        context: &Arc<Context>,
        images: &Images,
        turns: &Arc<Turns>,
        references: &Arc<References>,
        records: &Arc<Records>,
        tenancy: &Arc<Tenancy>,
        secrets: &Arc<Secrets>,
    ) -> Arc<Self> {
        let (store, db) = (|| context.store.clone(), || Arc::clone(&context.db));
        let guard = Arc::new(SealGuard {
            store: store(),
            db: db(),
            context: Arc::clone(context),
            secrets: Arc::clone(secrets),
        });
        let snapshots = Arc::new(Snapshots {
            db: db(),
            context: Arc::clone(context),
            turns: Arc::clone(turns),
            references: Arc::clone(references),
            records: Arc::clone(records),
            retained: Retained::default(),
            pins: OnceLock::new(),
            snapshot_locks: KeyedLock::default(),
            unsynced_tombstones: AtomicBool::default(),
        });
        let compaction = Arc::new(Compaction {
            store: store(),
            db: db(),
            context: Arc::clone(context),
            references: Arc::clone(references),
            records: Arc::clone(records),
            snapshots: Arc::clone(&snapshots),
            chains: Chains::default(),
            merges: tokio::sync::Semaphore::new(1),
        });
        let drives = Arc::new(Drives {
            store: store(),
            db: db(),
            context: Arc::clone(context),
            references: Arc::clone(references),
            guard: Arc::clone(&guard),
            compaction: Arc::clone(&compaction),
            changes: tokio::sync::Mutex::default(),
        });
        let trash = Arc::new(Trash {
            store: store(),
            db: db(),
            context: Arc::clone(context),
            references: Arc::clone(references),
            records: Arc::clone(records),
            tenancy: Arc::clone(tenancy),
            snapshots: Arc::clone(&snapshots),
            guard: Arc::clone(&guard),
            contents: TrashContents::default(),
        });
        let collector = Arc::new(Collector {
            store: store(),
            db: db(),
            images: images.clone(),
            context: Arc::clone(context),
            references: Arc::clone(references),
            records: Arc::clone(records),
            snapshots: Arc::clone(&snapshots),
            drives: Arc::clone(&drives),
            trash: Arc::clone(&trash),
            collecting: tokio::sync::Mutex::default(),
            collect_asked: AtomicBool::default(),
            last_collection: Mutex::default(),
        });
        let usage = Arc::new(StorageUsage {
            store: store(),
            db: db(),
            context: Arc::clone(context),
            turns: Arc::clone(turns),
            references: Arc::clone(references),
            measured: Measurements::default(),
        });
        Arc::new(Self { guard, snapshots, compaction, drives, trash, collector, usage })
    }
}
