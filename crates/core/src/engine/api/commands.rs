//! Running, finding and signalling commands.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sandkeep_proto::link::TermSize;
use sha2::{Digest as _, Sha256};

use crate::db::{Page, Paged};
use crate::engine::observe::meters::Operation;
use crate::engine::running::changes::Unsaved;
use crate::engine::running::live::RunningSandbox;
use crate::engine::running::stdin::StdinHandle;
use crate::engine::running::tracked::Tracked;
use crate::engine::session::command::{Exec, Follow, OutputStream, Started, check};
use crate::engine::session::log::LogReader;
use crate::engine::session::log::start::{LogStart, beginning};
use crate::engine::session::retention::CommandsKept;
use crate::engine::{Engine, Error, Result, WakeMode};
use crate::model::lifecycle::Phase;
use crate::model::{Command, CommandId, CommandState, Name, Sandbox, SandboxId, Timestamp};
use crate::store::ListedChanges;

/// How long a command may be on record as running that nothing follows any more: its session has just
/// ended, and its end is being written.
const END_IS_WRITTEN: Duration = Duration::from_secs(5);
const ASK_AGAIN: Duration = Duration::from_millis(20);

impl Engine {
    /// Runs a command, waking the sandbox if need be.
    ///
    /// # Errors
    ///
    /// Returns [`Error`] when the sandbox cannot be woken or the program cannot be started, and
    /// [`Error::NotApproved`] when somebody had to approve it and did not.
    pub async fn exec(&self, project: &Name, name: &Name, exec: Exec) -> Result<Started> {
        let sandbox = self.exec_approved(project, name, &exec).await?;
        self.exec_now(project, name, &sandbox, exec).await
    }

    /// Runs a command once for all calls with the same idempotency key. A later call gets the command that the first one
    /// started, and all it printed, also after a restart of the daemon; while the first is still starting it, the later one waits.
    ///
    /// The command's id is on record under the key before the command is started, and the command is on record before it runs.
    ///
    /// # Errors
    ///
    /// As [`exec`](Self::exec), and [`Error::KeyReused`] when the key was used for another call.
    pub async fn exec_once(
        &self,
        project: &Name,
        name: &Name,
        key: String,
        mut exec: Exec,
    ) -> Result<Started> {
        check(&exec)?;
        let sandbox = self.parts.lifecycle.find(project, name).await?;
        // What it gets as input and environment may be secret, and is not kept for a day in the index.
        // A retry with another key, because the first was replaced, is the same call.
        let asked = format!("{} {:?}", sandbox.id, Exec { by: None, ..exec.clone() });
        let asked = format!("exec {}", hex::encode(Sha256::digest(asked)));
        let tenancy = &self.parts.tenancy;
        let (_starting, id) = tenancy.decide_once(project, key, asked, CommandId::fresh).await?;
        self.parts.turns.recovered(&sandbox.id).await?;
        match self.parts.sessions.find_command(&sandbox, &id).await {
            Ok(command) => {
                let left = self.follow_left(&sandbox, &id).await;
                let stdin = left.filter(|_| exec.stdin).map(StdinHandle::new);
                let (_, session) =
                    self.parts.sessions.find_session(project, &command.session).await?;
                let events = self.logs(project, name, &id, true).await?;
                let session = self.parts.sessions.with_usage(session).await;
                Ok(Started { command, events, stdin, resumed: false, session })
            }
            Err(Error::NoCommand { .. }) => {
                exec.id = Some(id);
                self.exec(project, name, exec).await
            }
            Err(error) => Err(error),
        }
    }

    /// Adopts a command whose caller left while it was being started: nobody follows it yet, and it
    /// got no input. Under its key no other call starts it meanwhile.
    async fn follow_left(&self, sandbox: &Sandbox, id: &CommandId) -> Option<Arc<Tracked>> {
        let sessions = &self.parts.sessions;
        if sessions.tracked(&sandbox.id, id).is_some() {
            return None;
        }
        // It has no follower any more, so its record shows whether it has ended.
        let command = sessions.find_command(sandbox, id).await.ok()?;
        let live = self.parts.turns.live(&sandbox.id)?;
        if command.state != CommandState::Running || live.session().id != command.session {
            return None;
        }
        sessions.adopt(&live, command).await;
        sessions.tracked(&sandbox.id, id)
    }

    /// Waits until a command may be started: at once, unless somebody has to approve it. A caller that gives up waiting
    /// withdraws the question. The answer is the sandbox it was about.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NotApproved`] when it was not approved.
    pub async fn exec_approved(
        &self,
        project: &Name,
        name: &Name,
        exec: &Exec,
    ) -> Result<SandboxId> {
        check(exec)?;
        let sandbox = self.parts.lifecycle.find(project, name).await?;
        self.parts.runs.before_command(&sandbox, exec, false).await?;
        Ok(sandbox.id)
    }

    /// Runs a command that [`exec_approved`](Self::exec_approved) has let through in that sandbox, as [`exec`](Self::exec) does.
    ///
    /// # Errors
    ///
    /// Returns [`Error`] when the sandbox cannot be woken or the program cannot be started, and
    /// [`Error::SandboxReplaced`] when another one has that name now.
    pub async fn exec_now(
        &self,
        project: &Name,
        name: &Name,
        approved: &SandboxId,
        exec: Exec,
    ) -> Result<Started> {
        let mut timing = self.parts.context.meters.time(Operation::Exec, "");
        let mut tries = 0;
        loop {
            // Another sandbox of that name is not woken for it.
            if self.parts.lifecycle.find(project, name).await?.id != *approved {
                return Err(Error::SandboxReplaced(name.clone()));
            }
            let (live, resumed) = self.parts.lifecycle.awake(project, name, &exec.wake).await?;
            if live.sandbox().id != *approved {
                return Err(Error::SandboxReplaced(name.clone()));
            }
            timing.of(live.driver.name());
            if self.parts.runs.hears(&live.sandbox()) {
                self.parts.runs.prepare_questions(&live.sandbox()).await;
            }
            let session = self.parts.sessions.with_usage(live.session()).await;
            // Nothing is waited for after it: a caller that left then would leave a command behind.
            match self.parts.sessions.launch(&live, &exec).await {
                Err(error) => {
                    tries += 1;
                    exec.wake.may_try_again(error)?;
                    if tries > 5 {
                        return Err(Error::SessionOver);
                    }
                }
                Ok((tracked, events)) => {
                    let stdin = exec.stdin.then(|| StdinHandle::new(Arc::clone(&tracked)));
                    let command = tracked.record();
                    timing.ok();
                    return Ok(Started { command, events, stdin, resumed, session });
                }
            }
        }
    }

    /// Finds a command.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoCommand`] when the sandbox has none of that id.
    pub async fn command(&self, project: &Name, name: &Name, id: &CommandId) -> Result<Command> {
        let sandbox = self.parts.lifecycle.find(project, name).await?;
        self.parts.sessions.find_command(&sandbox, id).await
    }

    /// Waits until a command has ended.
    ///
    /// # Errors
    ///
    /// As [`command`](Self::command).
    pub async fn wait(&self, project: &Name, name: &Name, id: &CommandId) -> Result<Command> {
        let sandbox = self.parts.lifecycle.find(project, name).await?;
        self.parts.turns.recovered(&sandbox.id).await?;
        let mut deadline = Instant::now() + END_IS_WRITTEN;
        loop {
            if let Some(tracked) = self.parts.sessions.tracked(&sandbox.id, id) {
                tracked.ended().await;
                deadline = Instant::now() + END_IS_WRITTEN;
            }
            self.parts.sessions.looked(&sandbox.id, Some(id)).await;
            let command = self.parts.sessions.find_command(&sandbox, id).await?;
            if command.state != CommandState::Running || Instant::now() >= deadline {
                return Ok(command);
            }
            tokio::time::sleep(ASK_AGAIN).await;
        }
    }

    /// Lists a sandbox's commands, newest first.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSandbox`] when there is none of that name.
    pub async fn commands(
        &self,
        project: &Name,
        name: &Name,
        page: &Page,
    ) -> Result<Paged<Command>> {
        let sandbox = self.parts.lifecycle.find(project, name).await?;
        self.parts.sessions.looked(&sandbox.id, None).await;
        Ok(self.parts.context.db.commands(&sandbox.id, page).await?)
    }

    /// What a command changed: its record, and the paths. Of one that runs: so far. Never wakes.
    ///
    /// # Errors
    ///
    /// As [`command`](Self::command).
    pub async fn command_changes(
        &self,
        project: &Name,
        name: &Name,
        id: &CommandId,
    ) -> Result<(Command, ListedChanges)> {
        let sandbox = self.parts.lifecycle.find(project, name).await?;
        self.parts.sessions.changes_of(&sandbox, id).await
    }

    /// Looks at what a running sandbox has changed, if that is not known as of now and takes a moment only. Before it is shown.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSandbox`] when there is none of that name.
    pub async fn look(&self, project: &Name, name: &Name) -> Result<()> {
        let sandbox = self.parts.lifecycle.find(project, name).await?;
        self.parts.sessions.look_before_shown(&sandbox.id).await;
        Ok(())
    }

    /// When the snapshot was taken that a sandbox stands on, and what it has written since.
    ///
    /// # Errors
    ///
    /// Returns [`Error`] when the index cannot be read.
    pub async fn saved(&self, sandbox: &Sandbox) -> Result<(Option<Timestamp>, Option<Unsaved>)> {
        let current = self.parts.lifecycle.records.current_snapshot(sandbox).await?;
        Ok((current.map(|current| current.created_at), self.unsaved(&sandbox.id)))
    }

    /// What a running sandbox has written since its last snapshot, as of the last command that ended. `None` if that is not known.
    #[must_use]
    pub fn unsaved(&self, sandbox: &SandboxId) -> Option<Unsaved> {
        self.parts.turns.live(sandbox)?.changes.unsaved()
    }

    /// What a command printed, from the beginning, and with `follow` until it ends. Never wakes.
    ///
    /// # Errors
    ///
    /// As [`command`](Self::command).
    pub async fn logs(
        &self,
        project: &Name,
        name: &Name,
        id: &CommandId,
        follow: bool,
    ) -> Result<OutputStream> {
        self.logs_from(project, name, id, follow, &LogStart::default()).await
    }

    /// The same, of a part of the log.
    ///
    /// # Errors
    ///
    /// As [`command`](Self::command).
    pub async fn logs_from(
        &self,
        project: &Name,
        name: &Name,
        id: &CommandId,
        follow: bool,
        wanted: &LogStart,
    ) -> Result<OutputStream> {
        let sandbox = self.parts.lifecycle.find(project, name).await?;
        if follow {
            self.parts.turns.recovered(&sandbox.id).await?;
        }
        let follow = match self.parts.sessions.tracked(&sandbox.id, id) {
            Some(tracked) if follow => {
                let progress = tracked.progress.subscribe();
                Follow::Running(tracked, progress)
            }
            // Its caller has the result already, though the record may not be written yet.
            Some(tracked) if tracked.outcome().is_some() => {
                Follow::Ended(Box::new(tracked.record()))
            }
            Some(_) => Follow::Snapshot,
            None => Follow::Ended(Box::new(self.parts.sessions.find_command(&sandbox, id).await?)),
        };
        let head = self.parts.context.store.log_path(&sandbox.id, id);
        // What cannot be read is told by the reader, as a gap.
        let offset = beginning(head.clone(), wanted).await.unwrap_or(wanted.offset);
        let reader = LogReader::new(head, offset);
        Ok(OutputStream::from_log(reader, follow))
    }

    /// Sends a signal to a command.
    ///
    /// # Errors
    ///
    /// Returns [`Error::CommandEnded`] when it is not alive.
    pub async fn signal(
        &self,
        project: &Name,
        name: &Name,
        id: &CommandId,
        signal: i32,
    ) -> Result<Command> {
        if !(1..=64).contains(&signal) {
            return Err(Error::invalid("signal", "a number from 1 to 64"));
        }
        let (live, tracked) = self.alive(project, name, id).await?;
        tracked.causes().signalled(signal);
        live.guest().await?.signal(tracked.record().inside(), signal).await?;
        Ok(tracked.record())
    }

    /// Changes the size of a command's terminal.
    ///
    /// # Errors
    ///
    /// Returns [`Error::CommandEnded`] when it is not alive.
    pub async fn resize(
        &self,
        project: &Name,
        name: &Name,
        id: &CommandId,
        size: TermSize,
    ) -> Result<()> {
        let (live, tracked) = self.alive(project, name, id).await?;
        Ok(live.guest().await?.resize(tracked.record().inside(), size).await?)
    }

    /// The standard input of a command that was started with one.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoStdin`] or [`Error::CommandEnded`].
    pub async fn stdin(&self, project: &Name, name: &Name, id: &CommandId) -> Result<StdinHandle> {
        let (_, tracked) = self.alive(project, name, id).await?;
        if tracked.stdin.attached {
            Ok(StdinHandle::new(tracked))
        } else {
            Err(Error::NoStdin(id.clone()))
        }
    }

    /// A command that is alive; one in a paused machine is woken for a caller that needs it.
    async fn alive(
        &self,
        project: &Name,
        name: &Name,
        id: &CommandId,
    ) -> Result<(Arc<RunningSandbox>, Arc<Tracked>)> {
        let sandbox = self.parts.lifecycle.find(project, name).await?;
        self.parts.turns.recovered(&sandbox.id).await?;
        if let Some(live) = self.parts.turns.live(&sandbox.id) {
            let tracked = live.commands.lock().get(id).cloned();
            if let Some(tracked) = tracked {
                return Ok((live, tracked));
            }
        }
        let command = self.parts.sessions.find_command(&sandbox, id).await?;
        if sandbox.phase() == Phase::Paused && command.state == CommandState::Running {
            let (live, _) = self.parts.lifecycle.awake(project, name, &WakeMode::Wake).await?;
            let tracked = live.commands.lock().get(id).cloned();
            return tracked.map(|tracked| (live, tracked)).ok_or(Error::CommandEnded(command.id));
        }
        Err(Error::CommandEnded(command.id))
    }

    /// What the commands of a sandbox take, if that was measured since the start.
    #[must_use]
    pub fn commands_kept_known(&self, sandbox: &SandboxId) -> Option<CommandsKept> {
        self.parts.sessions.accounts.known(sandbox)
    }

    /// What the commands of a sandbox take.
    ///
    /// # Errors
    ///
    /// Returns [`Error`](crate::engine::Error) when the disk cannot be asked.
    pub async fn commands_kept(&self, sandbox: &SandboxId) -> Result<CommandsKept> {
        self.parts.sessions.commands_kept(sandbox).await
    }
}
