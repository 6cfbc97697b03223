//! What happens in a running sandbox: commands, their output and input, files, ports, services and hooks.
//!
//! Everything here expects that the sandbox runs. Waking it is the caller's part (`api`).

pub(in crate::engine) mod changes;
pub(in crate::engine) mod command;
pub(in crate::engine) mod files;
pub(in crate::engine) mod hooks;
pub(in crate::engine) mod log;
pub(in crate::engine) mod ports;
pub(in crate::engine) mod resume_commands;
pub(in crate::engine) mod retention;
pub(in crate::engine) mod services;
pub(in crate::engine) mod sessions;
mod starting;
pub(in crate::engine) mod tracker;

use std::sync::Arc;

use tokio::sync::Semaphore;

use crate::db::Db;
use crate::engine::context::Context;
use crate::engine::records::Records;
use crate::engine::running::turns::Turns;
use crate::engine::session::resume_commands::SleepingCommands;
use crate::engine::session::retention::Accounts;
use crate::engine::tenancy::secrets::Secrets;
use crate::store::Store;

/// Commands, services and hooks of running sandboxes.
pub(in crate::engine) struct Sessions {
    store: Store,
    db: Arc<dyn Db>,
    context: Arc<Context>,
    turns: Arc<Turns>,
    records: Arc<Records>,
    secrets: Arc<Secrets>,
    pub(in crate::engine) accounts: Accounts,
    /// Commands of paused machines that somebody waits for.
    pub(in crate::engine) sleeping: SleepingCommands,
    /// Looks at changed files: how many may be under way.
    looks: Semaphore,
}

impl Sessions {
    pub(in crate::engine) fn new(
        context: &Arc<Context>,
        turns: &Arc<Turns>,
        records: &Arc<Records>,
        secrets: &Arc<Secrets>,
    ) -> Arc<Self> {
        Arc::new(Self {
            store: context.store.clone(),
            db: Arc::clone(&context.db),
            context: Arc::clone(context),
            turns: Arc::clone(turns),
            records: Arc::clone(records),
            secrets: Arc::clone(secrets),
            accounts: Accounts::default(),
            sleeping: SleepingCommands::default(),
            looks: Semaphore::new(changes::LOOKS_AT_ONCE),
        })
    }
}
