//! What sandboxes may reach: policies, the network of a session from start to end, and reading the journal of connections.

pub(in crate::engine) mod policy;
pub(in crate::engine) mod session_network;

use std::sync::Arc;

use crate::engine::audit::AuditLog;
use crate::engine::context::Context;
use crate::engine::observe::meters::Meters;
use crate::engine::records::Records;
use crate::engine::running::turns::Turns;
use crate::engine::tenancy::Tenancy;
use crate::engine::tenancy::secrets::Secrets;
use crate::net::Upstream;
use crate::secret::Keyring;
use crate::store::Store;

/// The networks of sandboxes.
pub(in crate::engine) struct Network {
    store: Store,
    audit: Arc<AuditLog>,
    meters: Arc<Meters>,
    turns: Arc<Turns>,
    records: Arc<Records>,
    tenancy: Arc<Tenancy>,
    secrets: Arc<Secrets>,
    keyring: Arc<Keyring>,
    outside: Arc<Upstream>,
}

impl Network {
    pub(in crate::engine) fn new(
        context: &Context,
        turns: &Arc<Turns>,
        records: &Arc<Records>,
        tenancy: &Arc<Tenancy>,
        secrets: &Arc<Secrets>,
        keyring: &Arc<Keyring>,
        outside: Upstream,
    ) -> Arc<Self> {
        Arc::new(Self {
            store: context.store.clone(),
            audit: Arc::clone(&context.audit),
            meters: Arc::clone(&context.meters),
            turns: Arc::clone(turns),
            records: Arc::clone(records),
            tenancy: Arc::clone(tenancy),
            secrets: Arc::clone(secrets),
            keyring: Arc::clone(keyring),
            outside: Arc::new(outside),
        })
    }

    /// The network outside.
    pub(in crate::engine) fn outside(&self) -> Arc<Upstream> {
        Arc::clone(&self.outside)
    }
}
