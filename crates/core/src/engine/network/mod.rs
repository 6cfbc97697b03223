//! What sandboxes may reach: policies, the network of a session from start to end, and reading the journal of connections.

pub(in crate::engine) mod policy;
pub(in crate::engine) mod session_network;

use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use crate::engine::audit::AuditLog;
use crate::engine::context::Context;
use crate::engine::network::session_network::MakesGates;
use crate::engine::observe::meters::Meters;
use crate::engine::records::Records;
use crate::engine::running::turns::Turns;
use crate::engine::tenancy::Tenancy;
use crate::engine::tenancy::secrets::Secrets;
use crate::model::{Name, ProjectNetwork};
use crate::net::{ProjectSockets, Upstream};
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
    /// Makes the gates of sessions; set once by the layer above.
    pub(in crate::engine) gates: OnceLock<Weak<dyn MakesGates>>,
    /// Of projects that had a session online.
    sockets: Mutex<HashMap<Name, Arc<ProjectSockets>>>,
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
            gates: OnceLock::new(),
            sockets: Mutex::default(),
        })
    }

    /// The sockets that the sandboxes of a project share.
    fn sockets_of(&self, project: &Name) -> Arc<ProjectSockets> {
        let mut all = self.sockets.lock();
        let most = self.tenancy.project_network(project).ok().and_then(|it| it.max_connections);
        // Of deleted projects, no session has any.
        all.retain(|_, sockets| Arc::strong_count(sockets) > 1);
        Arc::clone(all.entry(project.clone()).or_insert_with(|| ProjectSockets::new(most)))
    }

    /// A project's sandboxes may have another number of sockets from now on.
    pub(in crate::engine) fn project_sockets_changed(
        &self,
        project: &Name,
        network: &ProjectNetwork,
    ) {
        if let Some(sockets) = self.sockets.lock().get(project) {
            sockets.set(network.max_connections);
        }
    }

    /// The network outside.
    pub(in crate::engine) fn outside(&self) -> Arc<Upstream> {
        Arc::clone(&self.outside)
    }
}
