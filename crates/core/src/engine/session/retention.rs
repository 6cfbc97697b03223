//! Retention of command records and logs.
//!
//! A log may have 64 MiB, and an agent runs thousands of commands: without a limit they fill the
//! disk and appear nowhere. So a sandbox keeps a bounded number of records and bytes
//! ([`CommandRetention`]). When it has more, those that ended first go, a tenth of the bound at a
//! time, record and log together. A command that runs always stays, and so does the one that ended
//! last.
//!
//! The logs of commands that run share a bound of their own ([`LogBudget`]).
//!
//! What they take is counted in memory as commands end, and measured once after a start: when a command ends, when somebody
//! asks, or over time in housekeeping, which also covers unused sandboxes.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::db::{Filter, Page};
use crate::engine::Result;
use crate::engine::error::error_chain;
use crate::engine::session::Sessions;
use crate::engine::session::log::budget::LogBudget;
use crate::model::{Command, CommandId, CommandState, Name, SandboxId, Size};
use crate::store::CommandFiles;

/// How many sandboxes housekeeping measures at a time.
const BY_AND_BY: usize = 32;

/// How much of its commands a sandbox keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommandRetention {
    /// How many records.
    pub count: u64,
    /// How much disk space, logs and records together.
    pub bytes: Size,
}

impl Default for CommandRetention {
    fn default() -> Self {
        Self { count: 2_000, bytes: Size(256 << 20) }
    }
}

/// What the commands of a sandbox take.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandsKept {
    /// How many there are.
    pub count: u64,
    /// The disk space that records and logs take.
    pub bytes: u64,
}

/// What is known of all sandboxes.
#[derive(Debug, Default)]
pub(in crate::engine) struct Accounts(Mutex<HashMap<SandboxId, Arc<Account>>>);

#[derive(Debug, Default)]
struct Account {
    /// Of commands that run.
    logs: OnceLock<Arc<LogBudget>>,
    known: Mutex<Known>,
    /// Held while it is measured, or commands are removed.
    busy: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct Known {
    kept: Option<CommandsKept>,
    /// Commands that are counted when they have ended: from before their record is on disk until then.
    expected: HashSet<CommandId>,
    /// What the last measurement found of commands that were not counted yet, so that they are not counted twice.
    included: HashMap<CommandId, u64>,
}

impl Accounts {
    fn of(&self, sandbox: &SandboxId) -> Arc<Account> {
        Arc::clone(self.0.lock().entry(sandbox.clone()).or_default())
    }

    /// What the logs of a sandbox's running commands share.
    pub(in crate::engine) fn running_logs(
        &self,
        sandbox: &SandboxId,
        limit: u64,
        short: &Arc<AtomicBool>,
    ) -> Arc<LogBudget> {
        Arc::clone(self.of(sandbox).logs.get_or_init(|| LogBudget::new(limit, short)))
    }

    /// What is known of a sandbox without asking the disk.
    pub(in crate::engine) fn known(&self, sandbox: &SandboxId) -> Option<CommandsKept> {
        self.0.lock().get(sandbox).and_then(|account| account.known.lock().kept)
    }

    /// A command is about to be on record, or has ended, and [`count_command`](Sessions::count_command) will follow.
    pub(in crate::engine) fn expect(&self, command: &Command) {
        self.of(&command.sandbox).known.lock().expected.insert(command.id.clone());
    }

    /// It was not started after all.
    pub(in crate::engine) fn expect_no_more(&self, command: &Command) {
        self.of(&command.sandbox).known.lock().expected.remove(&command.id);
    }
}

impl Sessions {
    pub(in crate::engine) async fn commands_kept(
        &self,
        sandbox: &SandboxId,
    ) -> Result<CommandsKept> {
        let account = self.accounts.of(sandbox);
        if let Some(kept) = account.known.lock().kept {
            return Ok(kept);
        }
        let _busy = account.busy.lock().await;
        self.measure_commands(sandbox, &account).await.map(|(kept, _)| kept)
    }

    /// What the commands of all sandboxes of a project take, or of all.
    pub(in crate::engine) async fn command_bytes(&self, project: Option<&Name>) -> Result<u64> {
        let all = self.db.sandboxes(project, &Filter::default(), &Page::all()).await?.items;
        let mut bytes = 0;
        for sandbox in all {
            bytes += self.commands_kept(&sandbox.id).await?.bytes;
        }
        Ok(bytes)
    }

    async fn measure_commands(
        &self,
        sandbox: &SandboxId,
        account: &Account,
    ) -> Result<(CommandsKept, HashMap<CommandId, CommandFiles>)> {
        let files = self.store.command_files(sandbox).await?;
        let bytes = files.values().map(|files| files.bytes).sum();
        let kept = CommandsKept { count: files.len() as u64, bytes };
        let mut known = account.known.lock();
        let counted_later =
            |id: &CommandId| known.expected.contains(id) || self.tracked(sandbox, id).is_some();
        let included = files.iter().filter(|(id, _)| counted_later(id));
        let included = included.map(|(id, files)| (id.clone(), files.bytes)).collect();
        (known.kept, known.included) = (Some(kept), included);
        drop(known);
        Ok((kept, files))
    }

    /// Counts a command that has ended, and removes old ones where there are too many.
    pub(in crate::engine) async fn count_command(&self, ended: &Command) {
        let counted = async {
            let account = self.accounts.of(&ended.sandbox);
            let bytes = self.store.files_of_command(&ended.sandbox, &ended.id).await;
            let kept = {
                let mut known = account.known.lock();
                known.expected.remove(&ended.id);
                let included = known.included.remove(&ended.id);
                let bytes = bytes?;
                if let Some(kept) = known.kept.as_mut() {
                    kept.count += u64::from(included.is_none());
                    kept.bytes = (kept.bytes + bytes).saturating_sub(included.unwrap_or(0));
                }
                known.kept
            };
            match kept {
                Some(kept) if !self.is_over(kept) => Ok(()),
                _ => self.retain_commands(&ended.sandbox).await,
            }
        };
        if let Err(error) = counted.await {
            tracing::warn!(sandbox = %ended.sandbox, error = error_chain(&error), "old commands were not removed");
        }
    }

    fn is_over(&self, kept: CommandsKept) -> bool {
        let CommandRetention { count, bytes } = self.context.settings.commands;
        kept.count > count || kept.bytes > bytes.0
    }

    /// Measures what the commands of a sandbox take, and removes those that ended first where that is too much.
    pub(in crate::engine) async fn retain_commands(&self, sandbox: &SandboxId) -> Result<()> {
        let account = self.accounts.of(sandbox);
        let _one = account.busy.lock().await;
        let (kept, files) = self.measure_commands(sandbox, &account).await?;
        if !self.is_over(kept) {
            return Ok(());
        }
        let records = self.db.commands(sandbox, &Page::all()).await?.items;
        let alive = |id: &CommandId| self.tracked(sandbox, id).is_some();
        let going = self.going(kept, &files, &records, alive);
        if going.is_empty() {
            return Ok(());
        }
        self.context.catalog.remove_commands(sandbox, &going).await?;
        let freed: u64 = going.iter().filter_map(|id| files.get(id)).map(|files| files.bytes).sum();
        tracing::info!(%sandbox, commands = going.len(), freed, "old commands were removed");
        if let Some(kept) = account.known.lock().kept.as_mut() {
            kept.count = kept.count.saturating_sub(going.len() as u64);
            kept.bytes = kept.bytes.saturating_sub(freed);
        }
        Ok(())
    }

    /// Which commands go: files of none first, then those that ended first.
    fn going(
        &self,
        mut kept: CommandsKept,
        files: &HashMap<CommandId, CommandFiles>,
        records: &[Command],
        alive: impl Fn(&CommandId) -> bool,
    ) -> Vec<CommandId> {
        let CommandRetention { count, bytes } = self.context.settings.commands;
        let (count, bytes) = (count - count / 10, bytes.0 - bytes.0 / 10);
        let recorded: HashMap<&CommandId, &Command> =
            records.iter().map(|record| (&record.id, record)).collect();
        let stray = files.iter().filter(|(id, one)| one.settled && !recorded.contains_key(id));
        let mut going: Vec<CommandId> =
            stray.map(|(id, _)| id.clone()).filter(|id| !alive(id)).collect();
        let mut ended: Vec<&Command> = records
            .iter()
            .filter(|record| record.state != CommandState::Running && !alive(&record.id))
            .collect();
        ended.sort_by_key(|record| (record.ended_at, record.id.clone()));
        ended.pop();
        let size = |id: &CommandId| files.get(id).map_or(0, |files| files.bytes);
        for id in &going {
            kept.count = kept.count.saturating_sub(1);
            kept.bytes = kept.bytes.saturating_sub(size(id));
        }
        for record in ended {
            if kept.count <= count && kept.bytes <= bytes {
                break;
            }
            kept.count = kept.count.saturating_sub(1);
            kept.bytes = kept.bytes.saturating_sub(size(&record.id));
            going.push(record.id.clone());
        }
        going
    }

    /// Measures some sandboxes that were not measured since the start, so that unused ones are
    /// within bounds too.
    pub(in crate::engine) async fn retain_some_commands(&self) -> Result<()> {
        let all = self.db.sandboxes(None, &Filter::default(), &Page::all()).await?.items;
        let there: HashSet<&SandboxId> = all.iter().map(|sandbox| &sandbox.id).collect();
        self.accounts.0.lock().retain(|id, _| there.contains(id));
        let unknown = all.iter().filter(|sandbox| self.accounts.known(&sandbox.id).is_none());
        for sandbox in unknown.take(BY_AND_BY) {
            self.retain_commands(&sandbox.id).await?;
        }
        Ok(())
    }
}
