//! The services of a running sandbox and their states.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::watch;

use crate::model::{CommandId, Name, Service, Timestamp};

/// How a service stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServiceState {
    /// It was not started, or somebody stopped it, or its sandbox is not running.
    Stopped,
    /// It is about to run.
    Starting,
    /// It runs.
    Running {
        /// Since when.
        since: Timestamp,
    },
    /// It ended and is about to be started again.
    Restarting {
        /// When.
        at: Timestamp,
        /// Why it ended.
        problem: String,
    },
    /// It ended and is left so.
    Exited {
        /// Its exit code.
        code: i32,
    },
    /// It ended too often, or could not be started, and is left so.
    Failed {
        /// What went wrong the last time.
        problem: String,
    },
}

#[derive(Debug, Clone)]
pub(in crate::engine) struct ServiceStanding {
    pub(in crate::engine) state: ServiceState,
    pub(in crate::engine) failures: u32,
    pub(in crate::engine) command: Option<CommandId>,
}

#[derive(Debug)]
pub(in crate::engine) struct Supervised {
    pub(in crate::engine) service: Service,
    pub(in crate::engine) standing: Mutex<ServiceStanding>,
    /// Turns true once, when it is to end.
    pub(in crate::engine) unwanted: watch::Sender<bool>,
    /// Turns true once, when its supervisor has gone.
    pub(in crate::engine) over: watch::Sender<bool>,
}

impl Supervised {
    pub(in crate::engine) fn new(service: Service) -> Arc<Self> {
        let standing =
            ServiceStanding { state: ServiceState::Starting, failures: 0, command: None };
        Arc::new(Self {
            service,
            standing: Mutex::new(standing),
            unwanted: watch::Sender::new(false),
            over: watch::Sender::new(false),
        })
    }

    pub(in crate::engine) fn set(&self, state: ServiceState) {
        self.standing.lock().state = state;
    }

    pub(in crate::engine) fn is_over(&self) -> bool {
        *self.over.borrow()
    }

    pub(in crate::engine) async fn ended(&self) {
        let _ = self.over.subscribe().wait_for(|over| *over).await;
    }
}

/// The services of a running sandbox.
#[derive(Debug, Default)]
pub(in crate::engine) struct Services(pub(in crate::engine) Mutex<BTreeMap<Name, Arc<Supervised>>>);

impl Services {
    /// Whether a service that runs, or is about to, is meant to listen on a port.
    pub(in crate::engine) fn expects(&self, port: u16) -> bool {
        let hopeful = |one: &Arc<Supervised>| {
            let state = one.standing.lock().state.clone();
            let lives = matches!(
                state,
                ServiceState::Starting
                    | ServiceState::Running { .. }
                    | ServiceState::Restarting { .. }
            );
            one.service.port == Some(port) && lives
        };
        self.0.lock().values().any(hopeful)
    }

    pub(in crate::engine) fn get(&self, name: &Name) -> Option<Arc<Supervised>> {
        self.0.lock().get(name).cloned()
    }
}
