//! Whether stored data and the disk can be trusted: failed syncs, verification of layers, a probe of the disk; and disk limits.

pub(in crate::engine) mod disk_limits;
pub(in crate::engine) mod disk_probe;
mod ending;
pub(in crate::engine) mod failed_syncs;
mod fill_meter;
pub(in crate::engine) mod scrub;
mod shortage;

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::db::Db;
use crate::engine::context::Context;
use crate::engine::integrity::disk_probe::Health;
use crate::engine::integrity::failed_syncs::Reported;
use crate::engine::references::References;
use crate::engine::running::live::RunningSandbox;
use crate::engine::running::turns::Turns;
use crate::store::Store;

/// The components of this folder.
pub(in crate::engine) struct Integrity {
    pub(in crate::engine) syncs: Arc<FailedSyncs>,
    pub(in crate::engine) scrub: Arc<Scrubber>,
    pub(in crate::engine) limits: Arc<DiskLimits>,
    pub(in crate::engine) health: Arc<Health>,
}

/// What becomes of files that a failed sync may have lost.
pub(in crate::engine) struct FailedSyncs {
    store: Store,
    db: Arc<dyn Db>,
    context: Arc<Context>,
    turns: Arc<Turns>,
    references: Arc<References>,
    reported: Reported,
}

/// Verifies layers while the server runs.
pub(in crate::engine) struct Scrubber {
    store: Store,
    context: Arc<Context>,
    references: Arc<References>,
    /// One check of everything at a time.
    pub(in crate::engine) checking: tokio::sync::Mutex<()>,
}

/// Holds sandboxes and drives to their disk limits.
pub(in crate::engine) struct DiskLimits {
    store: Store,
    db: Arc<dyn Db>,
    context: Arc<Context>,
    turns: Arc<Turns>,
    references: Arc<References>,
    /// Machines whose writes are held back, the one that waits longest first.
    held: Mutex<Vec<Weak<RunningSandbox>>>,
    /// Whether the trash is being emptied because there is little space.
    reclaiming: AtomicBool,
}

impl Integrity {
    pub(in crate::engine) fn new(
        context: &Arc<Context>,
        turns: &Arc<Turns>,
        references: &Arc<References>,
    ) -> Arc<Self> {
        Arc::new(Self {
            syncs: Arc::new(FailedSyncs {
                store: context.store.clone(),
                db: Arc::clone(&context.db),
                context: Arc::clone(context),
                turns: Arc::clone(turns),
                references: Arc::clone(references),
                reported: Reported::default(),
            }),
            scrub: Arc::new(Scrubber {
                store: context.store.clone(),
                context: Arc::clone(context),
                references: Arc::clone(references),
                checking: tokio::sync::Mutex::default(),
            }),
            limits: Arc::new(DiskLimits {
                store: context.store.clone(),
                db: Arc::clone(&context.db),
                context: Arc::clone(context),
                turns: Arc::clone(turns),
                references: Arc::clone(references),
                held: Mutex::default(),
                reclaiming: AtomicBool::new(false),
            }),
            health: Arc::default(),
        })
    }
}
