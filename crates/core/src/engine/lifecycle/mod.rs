//! What changes the phase of a sandbox: create, start, stop, pause, checkpoint, fork, roll back, delete; and what happens without
//! a caller: recovery after a restart, idle and expiry timers.
//!
//! Each operation runs in the sandbox's turn (`running/turns.rs`). It writes what it is about to do into the sandbox's manifest,
//! does it, and writes the outcome. A daemon that dies in between leaves the pending effect to the
//! next one, which completes it (`recover`).

pub(in crate::engine) mod checkpoint;
pub(in crate::engine) mod create;
pub(in crate::engine) mod delete;
pub(in crate::engine) mod fork;
pub(in crate::engine) mod lineage;
pub(in crate::engine) mod pause;
pub(in crate::engine) mod reaper;
pub(in crate::engine) mod recover;
pub(in crate::engine) mod sandbox;
pub(in crate::engine) mod start;
pub(in crate::engine) mod stop;
pub(in crate::engine) mod unrecorded;
pub(in crate::engine) mod wake;
pub(in crate::engine) mod why;

use std::sync::Arc;

use crate::db::Db;
use crate::engine::context::Context;
use crate::engine::context::single_flight::SingleFlight;
use crate::engine::integrity::Integrity;
use crate::engine::lifecycle::lineage::comparing::Comparing;
use crate::engine::machine::Machines;
use crate::engine::network::Network;
use crate::engine::records::Records;
use crate::engine::references::References;
use crate::engine::running::turns::{Slot, Turns};
use crate::engine::session::Sessions;
use crate::engine::snapshots::Storage;
use crate::engine::tenancy::Tenancy;
use crate::engine::tenancy::secrets::Secrets;
use crate::engine::{Error, Result};
use crate::model::SandboxId;
use crate::store::Store;
use crate::store::image::Images;

/// The operations that change a sandbox's phase. It stands on all other components, and only the calls of fronts stand on it.
pub(in crate::engine) struct Lifecycle {
    pub(in crate::engine) store: Store,
    pub(in crate::engine) db: Arc<dyn Db>,
    pub(in crate::engine) images: Images,
    pub(in crate::engine) context: Arc<Context>,
    pub(in crate::engine) turns: Arc<Turns>,
    pub(in crate::engine) references: Arc<References>,
    pub(in crate::engine) records: Arc<Records>,
    pub(in crate::engine) tenancy: Arc<Tenancy>,
    pub(in crate::engine) secrets: Arc<Secrets>,
    pub(in crate::engine) network: Arc<Network>,
    pub(in crate::engine) storage: Arc<Storage>,
    pub(in crate::engine) integrity: Arc<Integrity>,
    pub(in crate::engine) machines: Arc<Machines>,
    pub(in crate::engine) sessions: Arc<Sessions>,
    /// Attempts to wake a sandbox that those who want its ports share.
    pub(in crate::engine) wakes: SingleFlight<SandboxId, Result<(), Arc<Error>>>,
    /// What each project has compared at the moment.
    pub(in crate::engine) comparing: Comparing,
}

impl Lifecycle {
    /// Runs `work` in the sandbox's turn, to its end whatever becomes of the caller.
    pub(in crate::engine) async fn turn<T, F, W>(
        self: &Arc<Self>,
        id: SandboxId,
        work: W,
    ) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
        W: FnOnce(Arc<Self>, Arc<Slot>) -> F + Send + 'static,
    {
        let this = Arc::clone(self);
        self.turns.turn(id, move |slot| work(this, slot)).await
    }
}
