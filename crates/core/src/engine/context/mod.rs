//! What every component uses: the store, the index, the drivers, the settings, the event feed, the
//! register of damage, the clock, and the tasks that the engine has started.
//!
//! Nothing here decides anything about a sandbox.

pub(in crate::engine) mod clock;
pub(in crate::engine) mod damage;
pub(in crate::engine) mod drivers;
pub(in crate::engine) mod single_flight;
pub(in crate::engine) mod tasks;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tokio::sync::watch;

use crate::catalog::Catalog;
use crate::db::Db;
use crate::driver::Driver;
use crate::engine::audit::AuditLog;
use crate::engine::observe::events::EventFeed;
use crate::engine::observe::meters::Meters;
use crate::engine::{Result, Settings};
use crate::store::Store;

/// The foundation of all components.
pub(in crate::engine) struct Context {
    /// The truth.
    pub(in crate::engine) store: Store,
    /// The records of all sandboxes. Everything on record is saved by it.
    pub(in crate::engine) catalog: Arc<dyn Catalog>,
    /// The index: what the catalog is read by.
    pub(in crate::engine) db: Arc<dyn Db>,
    pub(in crate::engine) drivers: drivers::DriverSet,
    pub(in crate::engine) settings: Settings,
    pub(in crate::engine) events: Arc<EventFeed>,
    /// How long operations took, for `/metrics`.
    pub(in crate::engine) meters: Arc<Meters>,
    /// Who did what.
    pub(in crate::engine) audit: Arc<AuditLog>,
    pub(in crate::engine) damage: damage::DamageRegister,
    clock: clock::ClockWatch,
    pub(in crate::engine) tasks: tasks::Tasks,
    /// Whether the host's disk has only its reserve left.
    pub(in crate::engine) short_of_space: Arc<AtomicBool>,
    /// How many sandboxes are still to be recovered after a restart; one more for the work that follows.
    pub(in crate::engine) recovery: watch::Sender<usize>,
}

impl Context {
    pub(in crate::engine) fn new(
        store: Store,
        catalog: Arc<dyn Catalog>,
        drivers: Vec<Arc<dyn Driver>>,
        settings: Settings,
        events: EventFeed,
        audit: AuditLog,
    ) -> Arc<Self> {
        let events = Arc::new(events);
        let watcher = Arc::downgrade(&events);
        catalog.watch(watcher);
        let absent = settings.absent_drivers.clone();
        let drivers = drivers::DriverSet::new(drivers, absent, settings.late_drivers.clone());
        Arc::new(Self {
            store,
            db: catalog.reader(),
            catalog,
            drivers,
            settings,
            events,
            meters: Arc::default(),
            audit: Arc::new(audit),
            damage: damage::DamageRegister::default(),
            clock: clock::ClockWatch::default(),
            tasks: tasks::Tasks::default(),
            short_of_space: Arc::default(),
            recovery: watch::channel(0).0,
        })
    }

    pub(in crate::engine) fn driver(&self, name: &str) -> Result<Arc<dyn Driver>> {
        self.drivers.get(name)
    }

    /// Whether some sandbox is not recovered yet.
    pub(in crate::engine) fn is_recovering(&self) -> bool {
        *self.recovery.borrow() > 1
    }
}
