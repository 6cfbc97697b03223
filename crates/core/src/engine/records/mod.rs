//! Writes records of sandboxes, sessions and commands: the catalog first, then the reference counts.
//! Knows outcomes that the disk had no room for, and names that belong to lost sandboxes.

pub(in crate::engine) mod lost_names;

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::catalog::{CatalogError, Record};
use crate::db::Db;
use crate::driver::MachineUsage;
use crate::engine::Result;
use crate::engine::context::Context;
use crate::engine::records::lost_names::LostNames;
use crate::engine::references::References;
use crate::model::{Command, Sandbox, SandboxId, Session, SessionEnd, Snapshot, now};
use crate::store::{Durability, Store};

/// The records of sandboxes, their sessions and commands.
pub(in crate::engine) struct Records {
    store: Store,
    db: Arc<dyn Db>,
    context: Arc<Context>,
    references: Arc<References>,
    /// What the disk had no room for yet.
    pub(in crate::engine) unrecorded: Mutex<HashMap<SandboxId, Unrecorded>>,
    pub(in crate::engine) lost_names: LostNames,
}

impl Records {
    pub(in crate::engine) fn new(
        context: &Arc<Context>,
        references: &Arc<References>,
    ) -> Arc<Self> {
        Arc::new(Self {
            store: context.store.clone(),
            db: Arc::clone(&context.db),
            context: Arc::clone(context),
            references: Arc::clone(references),
            unrecorded: Mutex::default(),
            lost_names: LostNames::default(),
        })
    }

    pub(in crate::engine) async fn keep_command(&self, command: &Command) -> Result<()> {
        Ok(self.context.catalog.put(Record::Command(command), Durability::Soon).await?)
    }

    /// Saves the next version of the sandbox's record.
    pub(in crate::engine) async fn record(
        &self,
        sandbox: &mut Sandbox,
        durability: Durability,
    ) -> Result<()> {
        sandbox.updated_at = now();
        let saved = self.context.catalog.save(sandbox, durability).await;
        if matches!(saved, Err(CatalogError::Index(_))) {
            // Readers do not see it, but what it names is on record.
            self.references.counts().hold_sandbox(sandbox);
        }
        saved?;
        self.recorded(sandbox);
        Ok(())
    }

    /// The next version of the sandbox's record is saved.
    pub(in crate::engine) fn recorded(&self, sandbox: &Sandbox) {
        self.references.counts().hold_sandbox(sandbox);
        // What was not on record is outdated.
        let mut unrecorded = self.unrecorded.lock();
        if let Some(outcome) = unrecorded.get_mut(&sandbox.id) {
            outcome.sandbox = None;
        }
    }

    pub(in crate::engine) async fn keep_session(&self, session: &Session) -> Result<()> {
        Ok(self.context.catalog.put(Record::Session(session), Durability::Soon).await?)
    }

    pub(in crate::engine) async fn current_snapshot(
        &self,
        sandbox: &Sandbox,
    ) -> Result<Option<Snapshot>> {
        match &sandbox.current {
            Some(id) => Ok(self.db.snapshot(id).await?),
            None => Ok(None),
        }
    }
}

impl Session {
    pub(in crate::engine) fn close(&mut self, ended: crate::model::Timestamp, end: SessionEnd) {
        self.ended_at = Some(ended);
        self.end = Some(end);
        self.count_wall(ended);
    }

    pub(in crate::engine) fn count_wall(&mut self, until: crate::model::Timestamp) {
        self.usage.wall_ms =
            u64::try_from(until.as_millisecond() - self.started_at.as_millisecond()).unwrap_or(0);
    }

    /// Takes over what the machine has used; what it used before a daemon died counts already.
    pub(in crate::engine) fn count_machine(&mut self, usage: MachineUsage) {
        let cpu = u64::try_from(usage.cpu.as_millis()).unwrap_or(u64::MAX);
        self.usage.active_cpu_ms = self.usage.active_cpu_ms.max(cpu);
        self.usage.memory_peak = self.usage.memory_peak.max(usage.memory_peak);
        self.usage.oom_kills = self.usage.oom_kills.max(usage.oom_kills);
    }
}

/// What is to be done when there is room.
#[derive(Debug)]
pub(in crate::engine) struct Unrecorded {
    /// What the sandbox is; absent when something later is on record.
    pub(in crate::engine) sandbox: Option<Sandbox>,
    /// What it held, which is removed when no record references it.
    pub(in crate::engine) held: Option<Sandbox>,
}

impl Records {
    /// A sandbox as the index has it, or its outcome that could not be written down.
    pub(in crate::engine) fn as_known(&self, sandbox: Sandbox) -> Sandbox {
        let known = self.unrecorded.lock().get(&sandbox.id).and_then(|it| it.sandbox.clone());
        known.unwrap_or(sandbox)
    }
}
