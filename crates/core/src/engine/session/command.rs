//! Starts commands and records their output.
//!
//! Starting, finding, signalling; `tracker.rs` follows each one while it is alive.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use sandkeep_proto::link::{Spawn, TermSize};
use tokio::sync::{mpsc, watch};

use crate::catalog::RecordKey;
use crate::engine::running::live::RunningSandbox;
use crate::engine::running::measured::Asked;
use crate::engine::running::stdin::StdinHandle;
use crate::engine::running::tracked::Tracked;
use crate::engine::session::Sessions;
use crate::engine::session::log::{LogReader, LogStream, Piece};
use crate::engine::session::starting::StartingCommand;
use crate::engine::tenancy::secrets::{Given, check_inject};
use crate::engine::{Error, ErrorKind, Result, WakeMode};
use crate::guest::GuestError;
use crate::model::{
    BadName, Command, CommandId, CommandState, FORMAT, Inject, InjectInto, Name, Sandbox,
    SandboxId, Session, Span, Timestamp, check_env_name, now,
};

/// A command to run.
#[derive(Debug, Clone, Default)]
pub struct Exec {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Environment on top of the sandbox's.
    pub env: BTreeMap<String, String>,
    /// Working directory; the sandbox's if absent.
    pub cwd: Option<String>,
    /// User; the sandbox's if absent.
    pub user: Option<String>,
    /// Run as root on behalf of `user`, as if by `sudo`, without needing one in the sandbox.
    pub sudo: bool,
    /// A terminal of this size.
    pub tty: Option<TermSize>,
    /// Whether standard input will be sent.
    pub stdin: bool,
    /// Whether the caller does not wait for it.
    pub detach: bool,
    /// How long it may take before it is killed.
    pub timeout: Option<Span>,
    /// Whether a sleeping sandbox may be woken.
    pub wake: WakeMode,
    /// Secrets it is given.
    pub inject: Vec<Inject>,
    /// Who wants it, for the record: the id of an API key, or `service`, `hook`.
    pub by: Option<String>,
    /// The id it gets, for a caller that has it on record before; a new one if absent.
    pub id: Option<CommandId>,
}

/// A command that was started.
#[derive(Debug)]
pub struct Started {
    /// Its record.
    pub command: Command,
    /// What it prints, and how it ends.
    pub events: OutputStream,
    /// Its standard input, if it was asked for.
    pub stdin: Option<StdinHandle>,
    /// Whether the sandbox was woken for it.
    pub resumed: bool,
    /// The session it runs in.
    pub session: Session,
}

/// What happens with a command.
#[allow(clippy::large_enum_variant)] // few are under way at a time, and a box would not make them fewer
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommandOutput {
    /// It printed to standard output.
    Stdout(Bytes),
    /// It printed to standard error.
    Stderr(Bytes),
    /// This many bytes were printed here and are not kept: the log is bounded, and so is the disk.
    Gap(u64),
    /// It ended; nothing comes after this.
    Exited(Command),
}

/// What a command prints, and how it ends.
#[derive(Debug)]
pub struct OutputStream(Source);

#[derive(Debug)]
pub(in crate::engine) enum Source {
    /// From the tracker, as it comes; from the log when the tracker did not wait any more.
    Attached {
        events: mpsc::Receiver<CommandOutput>,
        /// How much came so far.
        offset: u64,
        log: PathBuf,
        tracked: Arc<Tracked>,
    },
    /// From the log.
    Log {
        reader: LogReader,
        follow: Follow,
        /// When the output that came last was printed, in milliseconds since 1970.
        time: Option<u64>,
    },
    Over,
}

#[derive(Debug)]
pub(in crate::engine) enum Follow {
    /// Until the command ends.
    Running(Arc<Tracked>, watch::Receiver<u64>),
    /// It has ended; this is its record.
    Ended(Box<Command>),
    /// Only what there is.
    Snapshot,
}

impl OutputStream {
    /// What a log has.
    pub(in crate::engine) fn from_log(reader: LogReader, follow: Follow) -> Self {
        Self(Source::Log { reader, follow, time: None })
    }

    /// When the output was printed that [`next`](Self::next) returned last, if it came from a log.
    #[must_use]
    pub fn printed_at(&self) -> Option<Timestamp> {
        let Source::Log { time: Some(millis), .. } = &self.0 else { return None };
        Timestamp::from_millisecond(i64::try_from(*millis).ok()?).ok()
    }

    /// The next event; `None` when there are no more.
    pub async fn next(&mut self) -> Option<CommandOutput> {
        loop {
            match &mut self.0 {
                Source::Attached { events, offset, log, tracked } => match events.recv().await {
                    Some(event) => {
                        if let CommandOutput::Stdout(bytes) | CommandOutput::Stderr(bytes) = &event
                        {
                            *offset += bytes.len() as u64;
                        } else {
                            self.0 = Source::Over;
                        }
                        return Some(event);
                    }
                    None => {
                        let follow =
                            Follow::Running(Arc::clone(tracked), tracked.progress.subscribe());
                        let reader = LogReader::new(std::mem::take(log), *offset);
                        self.0 = Source::Log { reader, follow, time: None };
                    }
                },
                Source::Over => return None,
                Source::Log { reader, follow, time } => {
                    // Asked before reading: what is printed in between is read on the next round.
                    let ended = match follow {
                        Follow::Running(tracked, _) => tracked.outcome(),
                        Follow::Ended(command) => Some((**command).clone()),
                        Follow::Snapshot => None,
                    };
                    if let Ok(Some(piece)) = reader.next_in_turn().await {
                        *time = match &piece {
                            Piece::Record(record) => Some(record.time),
                            Piece::Gap(_) => None,
                        };
                        return Some(match piece {
                            Piece::Gap(bytes) => CommandOutput::Gap(bytes),
                            Piece::Record(record) => match record.stream {
                                LogStream::Out => CommandOutput::Stdout(record.bytes),
                                LogStream::Err => CommandOutput::Stderr(record.bytes),
                            },
                        });
                    }
                    let printed = ended.as_ref().map_or(0, |command| command.output_bytes);
                    if let Some(bytes) = reader.missing_at_end(printed) {
                        return Some(CommandOutput::Gap(bytes));
                    }
                    match (ended, follow) {
                        (Some(command), _) => {
                            self.0 = Source::Over;
                            return Some(CommandOutput::Exited(command));
                        }
                        (None, Follow::Running(_, progress)) => {
                            let _ = progress.changed().await;
                        }
                        (None, Follow::Ended(_) | Follow::Snapshot) => self.0 = Source::Over,
                    }
                }
            }
        }
    }
}

pub(in crate::engine) fn check(exec: &Exec) -> Result<()> {
    if exec.argv.first().is_none_or(String::is_empty) {
        return Err(Error::invalid("argv", "needs a program"));
    }
    if exec.argv.iter().any(|arg| arg.contains('\0')) {
        return Err(Error::invalid("argv", "no argument may hold a NUL byte"));
    }
    // Each costs its bytes and a pointer, as the kernel counts.
    if exec.argv.iter().map(|arg| arg.len() + 8).sum::<usize>() > 512 << 10 {
        return Err(Error::invalid("argv", "at most 512 KiB in all"));
    }
    for (name, value) in &exec.env {
        check_env_name(name).map_err(|error: BadName| Error::invalid("env", error.to_string()))?;
        if value.contains('\0') || value.len() > 128 << 10 {
            return Err(Error::invalid(
                "env",
                format!("the value of `{name}` has a NUL byte or is over 128 KiB"),
            ));
        }
    }
    if exec.tty.is_some_and(|size| size.cols == 0 || size.rows == 0) {
        return Err(Error::invalid("tty", "columns and rows must not be 0"));
    }
    if exec.timeout.is_some_and(|span| span.0 == 0) {
        return Err(Error::invalid("timeout", "must not be 0"));
    }
    check_inject(&exec.inject, &exec.env)
}

impl Sessions {
    pub(in crate::engine) fn tracked(
        &self,
        sandbox: &SandboxId,
        id: &CommandId,
    ) -> Option<Arc<Tracked>> {
        let live = self.turns.live(sandbox);
        let alive = live.and_then(|live| live.commands.lock().get(id).cloned());
        // Of a paused machine: its callers keep waiting.
        alive.or_else(|| self.sleeping.get(id).filter(|one| one.record().sandbox == *sandbox))
    }

    pub(in crate::engine) async fn find_command(
        &self,
        sandbox: &Sandbox,
        id: &CommandId,
    ) -> Result<Command> {
        if let Some(tracked) = self.tracked(&sandbox.id, id) {
            return Ok(tracked.record());
        }
        let found = self.db.command(id).await?.filter(|command| command.sandbox == sandbox.id);
        found.ok_or_else(|| Error::NoCommand { sandbox: sandbox.name.clone(), command: id.clone() })
    }

    /// Puts a command on record. On a full disk it runs all the same: it may be the `rm` that helps.
    async fn note_command(&self, record: &Command) -> Result<()> {
        match self.records.keep_command(record).await {
            Err(error) if error.kind() == ErrorKind::Exhausted => {
                tracing::warn!(command = %record.id, "the disk is full: a command runs that is not on record");
                Ok(())
            }
            other => other,
        }
    }

    /// Starts a process in a running sandbox.
    pub(in crate::engine) async fn launch(
        self: &Arc<Self>,
        live: &Arc<RunningSandbox>,
        exec: &Exec,
    ) -> Result<(Arc<Tracked>, OutputStream)> {
        self.launch_as(live, exec, None, Given::default()).await
    }

    /// The same with secrets besides, which are on no record.
    pub(in crate::engine) async fn launch_given(
        self: &Arc<Self>,
        live: &Arc<RunningSandbox>,
        exec: &Exec,
        besides: Given,
    ) -> Result<(Arc<Tracked>, OutputStream)> {
        self.launch_as(live, exec, None, besides).await
    }

    /// Starts a service's process in a running sandbox, which it does not keep awake.
    pub(in crate::engine) async fn launch_service(
        self: &Arc<Self>,
        live: &Arc<RunningSandbox>,
        exec: &Exec,
        service: &Name,
    ) -> Result<Arc<Tracked>> {
        self.launch_as(live, exec, Some(service), Given::default())
            .await
            .map(|(tracked, _)| tracked)
    }

    async fn launch_as(
        self: &Arc<Self>,
        live: &Arc<RunningSandbox>,
        exec: &Exec,
        service: Option<&Name>,
        besides: Given,
    ) -> Result<(Arc<Tracked>, OutputStream)> {
        let (hold, _gate) = live.enter().await?;
        let guest = live.guest().await?;
        let sandbox = live.sandbox();
        let mut env = live.trust();
        env.extend(self.secrets.placeholders(&sandbox)?);
        let mut given = self.secrets.inject(live, &exec.inject).await?;
        given.env.extend(besides.env);
        given.files.extend(besides.files);
        let (spawn, mut record) = prepare(&sandbox, &live.session(), env, exec, given);
        record.service = service.cloned();
        record.oom_kills_before = live.driver.oom_kills(&live.key);
        // On record before it runs: after a crash the next daemon asks the agent for its outcome.
        self.accounts.expect(&record);
        let starting = StartingCommand::of(self, live, exec, &record);
        if let Err(error) = self.note_command(&record).await {
            starting.over();
            self.accounts.expect_no_more(&record);
            return Err(error);
        }
        crate::failpoint::pass("exec.recorded");
        self.before_start(live, &record.id).await;
        let asked = Asked::of(live);
        let process = match asked.heard(guest.spawn(spawn).await) {
            Ok(process) => process,
            Err(error @ GuestError::Refused { .. }) => {
                // It never ran, so it is on no record.
                starting.over();
                live.changes.never_started(&record.id);
                self.accounts.expect_no_more(&record);
                let key = RecordKey::Command(&record.sandbox, &record.id);
                self.context.catalog.delete(key).await?;
                return Err(error.into());
            }
            Err(error) => {
                // It is unknown whether it runs. Its tracker finds out when the agent answers.
                tracing::warn!(command = %record.id, %error, "the agent did not say whether a command was started; it will be asked again");
                let hold = service.is_none().then_some(hold);
                starting.over();
                let tracked = self.adopt_held(live, record, hold).await;
                if service.is_none() {
                    return Err(error.into());
                }
                // A supervisor that got an error here would start a second one.
                return Ok((tracked, OutputStream(Source::Over)));
            }
        };
        self.context.events.command_started(&sandbox, &record);
        crate::failpoint::pass("exec.spawned");
        let log = self.open_log(&record).await;
        let (sender, receiver) = mpsc::channel(16);
        let caller = (!exec.detach).then_some(sender);
        let with_stdin = exec.stdin || exec.tty.is_some();
        let hold = service.is_none().then_some(hold);
        starting.over();
        let tracked = self.track(live, record, Some(process), log, None, caller, with_stdin, hold);
        let log = self.store.log_path(&sandbox.id, &tracked.id());
        let events = if exec.detach {
            let follow = Follow::Running(Arc::clone(&tracked), tracked.progress.subscribe());
            Source::Log { reader: LogReader::new(log, 0), follow, time: None }
        } else {
            Source::Attached { events: receiver, offset: 0, log, tracked: Arc::clone(&tracked) }
        };
        Ok((tracked, OutputStream(events)))
    }
}

fn prepare(
    sandbox: &Sandbox,
    session: &Session,
    mut env: BTreeMap<String, String>,
    exec: &Exec,
    given: Given,
) -> (Spawn, Command) {
    let (config, image) = (&sandbox.config, &sandbox.image_config);
    env.extend(image.env.clone());
    env.extend(config.env.clone());
    env.extend(exec.env.clone());
    let cwd = exec.cwd.clone().or_else(|| config.cwd.clone()).or_else(|| image.cwd.clone());
    let asking = exec.user.clone().or_else(|| config.user.clone()).or_else(|| image.user.clone());
    let (user, sudo_from) = match exec.sudo {
        false => (asking, None),
        true => (Some("root".to_owned()), Some(asking.unwrap_or_else(|| "root".to_owned()))),
    };
    let id = exec.id.clone().unwrap_or_else(CommandId::fresh);
    let record = Command {
        format: FORMAT,
        id: id.clone(),
        sandbox: sandbox.id.clone(),
        session: session.id.clone(),
        argv: exec.argv.clone(),
        cwd: cwd.clone(),
        user: user.clone(),
        env_names: env_names(exec),
        tty: exec.tty.is_some(),
        detached: exec.detach,
        timeout: exec.timeout,
        state: CommandState::Running,
        exit_code: None,
        end: None,
        limit: None,
        peak: None,
        oom_kills_before: 0,
        started_at: now(),
        ended_at: None,
        output_bytes: 0,
        truncated: false,
        service: None,
        secrets: exec.inject.iter().map(|inject| inject.secret.clone()).collect(),
        slept_ms: 0,
        carried: None,
        by: exec.by.clone(),
        changes: None,
    };
    let spawn = Spawn {
        command: id.to_string(),
        argv: exec.argv.clone(),
        env,
        cwd,
        user,
        tty: exec.tty,
        stdin: exec.stdin || exec.tty.is_some(),
        sudo_from,
        secret_env: given.env,
        secret_files: given.files,
    };
    (spawn, record)
}

fn env_names(exec: &Exec) -> Vec<String> {
    let injected = exec.inject.iter().filter_map(|inject| match &inject.into {
        InjectInto::Env(name) => Some(name),
        InjectInto::File(_) => None,
    });
    let mut names: Vec<String> = exec.env.keys().chain(injected).cloned().collect();
    names.sort();
    names
}
