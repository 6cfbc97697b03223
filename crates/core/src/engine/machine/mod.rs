//! How machines are described and started: uid ranges, restore from memory, templates, the warm pool, and export of files from a
//! machine's own disk.
//!
//! The files stand on each other in this order: `capabilities`, `uid_ranges`, `description`, `restore`, `unassigned`, `template`,
//! `warm_machines`, `memory_start`. `disk_export` stands on `restore`.

pub(in crate::engine) mod capabilities;
pub(in crate::engine) mod description;
pub(in crate::engine) mod disk_export;
pub(in crate::engine) mod memory_start;
pub(in crate::engine) mod restore;
pub(in crate::engine) mod template;
pub(in crate::engine) mod uid_ranges;
pub(in crate::engine) mod unassigned;
pub(in crate::engine) mod warm_machines;

use std::sync::Arc;

use crate::db::Db;
use crate::engine::context::Context;
use crate::engine::machine::template::Templates;
use crate::engine::machine::uid_ranges::Uids;
use crate::engine::machine::warm_machines::WarmMachines;
use crate::engine::records::Records;
use crate::engine::references::References;
use crate::store::Store;

/// Starts machines, and keeps some ready.
pub(in crate::engine) struct Machines {
    store: Store,
    db: Arc<dyn Db>,
    context: Arc<Context>,
    references: Arc<References>,
    records: Arc<Records>,
    uids: Uids,
    templates: Templates,
    pub(in crate::engine) warm: Arc<WarmMachines>,
    /// Bounds the boots without a waiting caller: after a power cut every machine may need one.
    boots: tokio::sync::Semaphore,
}

impl Machines {
    pub(in crate::engine) fn new(
        context: &Arc<Context>,
        references: &Arc<References>,
        records: &Arc<Records>,
    ) -> Arc<Self> {
        let settings = &context.settings;
        let cpus = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
        Arc::new(Self {
            store: context.store.clone(),
            db: Arc::clone(&context.db),
            context: Arc::clone(context),
            references: Arc::clone(references),
            records: Arc::clone(records),
            uids: Uids::new(
                &settings.uid_claims,
                context.store.data_dir(),
                settings.uid_base,
                settings.uid_ranges,
            ),
            templates: Templates::default(),
            warm: warm_machines::pool(settings.warm_vms),
            boots: tokio::sync::Semaphore::new(cpus),
        })
    }
}
