//! Adopts commands that were alive when memory was captured.
//!
//! - *Pause and resume.* A command that runs when its machine is paused stays `running` on record. When the machine wakes it is
//!   attached to from the byte the log has, under the same id; its callers keep waiting meanwhile.
//! - *Forks, and rollbacks to a snapshot.* The process is alive in captured memory, and its record
//!   belongs to another sandbox, or to a command that ended long ago. It gets a record of its own
//!   with a fresh id, which names the earlier one ([`Carried`]); its log begins where the capture
//!   was made. Nobody reads its output otherwise, and it would block as soon as its pipe is full.
//!
//! So a snapshot with memory names the commands that were alive, and how much of their output the daemon had. That number must
//! fit what the captured agent thinks the daemon has: nothing is credited while memory is captured (`RunningSandbox::still`).
//!
//! A command the agent knows and no record does was being started in that very moment. It is ended.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use futures_util::future::join_all;
use parking_lot::Mutex;
use sandkeep_proto::link::Known;

use crate::db::Page;
use crate::engine::Result;
use crate::engine::running::live::RunningSandbox;
use crate::engine::running::tracked::Tracked;
use crate::engine::session::Sessions;
use crate::guest::{Guest, GuestError};
use crate::model::{
    Carried, Command, CommandEnd, CommandId, CommandState, Sandbox, SandboxId, Session, Snapshot,
    now,
};

/// Commands of paused machines that somebody waits for.
#[derive(Debug, Default)]
pub(in crate::engine) struct SleepingCommands(Mutex<HashMap<CommandId, Weak<Tracked>>>);

impl SleepingCommands {
    pub(in crate::engine) fn put(&self, tracked: &Arc<Tracked>) {
        let mut all = self.0.lock();
        all.retain(|_, waited_for| waited_for.strong_count() > 0);
        all.insert(tracked.id(), Arc::downgrade(tracked));
    }

    pub(in crate::engine) fn get(&self, id: &CommandId) -> Option<Arc<Tracked>> {
        self.0.lock().get(id).and_then(Weak::upgrade)
    }

    pub(in crate::engine) fn take(&self, id: &CommandId) -> Option<Arc<Tracked>> {
        self.0.lock().remove(id).and_then(|waited_for| waited_for.upgrade())
    }
}

impl RunningSandbox {
    /// The commands that are alive, each with all that was taken of its output. While [`RunningSandbox::still`] is held.
    pub(in crate::engine) fn running(&self) -> Vec<Command> {
        let alive = self.commands.lock();
        let alive = alive.values().filter(|tracked| tracked.outcome().is_none());
        let mut all: Vec<Command> = alive
            .map(|tracked| {
                let record = tracked.record();
                let output_bytes = record.printed_before() + tracked.printed.load(Ordering::SeqCst);
                Command { output_bytes, ..record }
            })
            .collect();
        all.sort_by(|a, b| a.id.cmp(&b.id));
        all
    }
}

impl Sessions {
    /// Adopts the commands that are alive in restored memory.
    pub(in crate::engine) async fn resume_commands(
        self: &Arc<Self>,
        live: &Arc<RunningSandbox>,
        snapshot: &Snapshot,
        known: Vec<Known>,
    ) -> Result<()> {
        let (sandbox, session) = (live.sandbox(), live.session());
        let guest = live.guest().await?;
        let all = self.db.commands(&sandbox.id, &Page::all()).await?.items;
        let mut own: HashMap<String, Command> = all
            .into_iter()
            .filter(|command| command.state == CommandState::Running)
            .map(|command| (command.inside().to_owned(), command))
            .collect();
        let slept = now().as_millisecond() - snapshot.created_at.as_millisecond();
        let slept = u64::try_from(slept).unwrap_or(0);
        let (mut adopted, mut answers) = (Vec::new(), true);
        for known in known {
            let then = snapshot.commands.iter().find(|then| then.inside() == known.command);
            let record = match (own.remove(&known.command), then) {
                (Some(own), _) => Command { slept_ms: own.slept_ms + slept, ..own },
                (None, Some(then)) => resumed_copy(then, &sandbox, &session, slept),
                (None, None) => {
                    // An agent may list any number of them: one that does not answer is not asked again.
                    answers = answers && end_unknown(&guest, &known.command).await;
                    continue;
                }
            };
            self.records.keep_command(&record).await?;
            adopted.push(self.adopt(live, record));
        }
        join_all(adopted).await;
        for gone in own.into_values() {
            self.lose(gone, CommandEnd::Lost).await?;
        }
        Ok(())
    }

    /// Marks all that is on record as alive in a sandbox whose machine is gone.
    pub(in crate::engine) async fn commands_lost(
        &self,
        sandbox: &SandboxId,
        why: CommandEnd,
    ) -> Result<()> {
        let all = self.db.commands(sandbox, &Page::all()).await?.items;
        for command in all.into_iter().filter(|one| one.state == CommandState::Running) {
            self.lose(command, why).await?;
        }
        Ok(())
    }

    /// Marks a command whose process is gone, and notifies its waiting callers.
    async fn lose(&self, mut command: Command, why: CommandEnd) -> Result<()> {
        command.state = CommandState::Lost;
        command.end = Some(why);
        command.ended_at = Some(now());
        self.records.keep_command(&command).await?;
        if let Some(sandbox) = self.db.sandbox_by_id(&command.sandbox).await? {
            self.context.events.command_ended(&sandbox, &command);
        }
        if let Some(waited_for) = self.sleeping.take(&command.id) {
            waited_for.lose(command);
        }
        Ok(())
    }
}

/// Ends a command that is on no record. False when the agent does not answer.
async fn end_unknown(guest: &Guest, command: &str) -> bool {
    let _ = guest.signal(command, 9).await;
    matches!(guest.forget(command).await, Ok(()) | Err(GuestError::Refused { .. }))
}

/// The record of a command in memory that was captured elsewhere, or before.
fn resumed_copy(then: &Command, sandbox: &Sandbox, session: &Session, slept: u64) -> Command {
    let inside = then.carried.as_ref().map_or(&then.id, |carried| &carried.inside);
    Command {
        id: CommandId::fresh(),
        sandbox: sandbox.id.clone(),
        session: session.id.clone(),
        state: CommandState::Running,
        detached: true,
        exit_code: None,
        end: None,
        limit: None,
        peak: None,
        oom_kills_before: 0,
        ended_at: None,
        output_bytes: 0,
        truncated: false,
        slept_ms: then.slept_ms + slept,
        carried: Some(Carried {
            from: then.id.clone(),
            inside: inside.clone(),
            printed: then.output_bytes,
        }),
        ..then.clone()
    }
}
