//! Follows a running command until it ends.
//!
//! Every command has one task here, its *tracker*: it takes output from the agent, appends it to the
//! log, hands it to the caller who started the command and waits for the result, and only then
//! credits the agent. So what was credited is on disk, and a restarted daemon attaches from where
//! the log ends. The caller who started a command is waited for, like a pipe's reader would be;
//! everybody else reads the log and never slows the command down. Two things do not wait for a slow
//! caller: the command's timeout and the end of its session. Then the caller is left behind and
//! finds the rest in the log.
//!
//! *A connection that is lost costs no command.* The tracker attaches again, as often as it takes, until
//! the session ends. A command is `lost` only when its machine is gone or the agent says that it
//! does not know the command any more. A command whose start was not answered in time is followed in
//! the same way: whether it runs is found out when the agent answers.
//!
//! Secrets that the session was given are masked on the way ([`Masker`]). What is held back meanwhile
//! is neither in the log nor credited, so a restarted daemon gets it again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::{Buf as _, Bytes};
use parking_lot::Mutex;
use sandkeep_proto::frame::WINDOW;
use sandkeep_proto::link::{Exit, Failure};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::engine::Error;
use crate::engine::running::live::{Hold, RunningSandbox};
use crate::engine::running::stdin::Input;
use crate::engine::running::tracked::Tracked;
use crate::engine::session::Sessions;
use crate::engine::session::command::CommandOutput;
use crate::engine::session::log::{LogStream, LogWriter, last_records};
use crate::guest::{GuestError, Output, OutputEvent, Process};
use crate::model::{Command, CommandEnd, CommandState, now};
use crate::secret::{MaskedStream, Masker};

impl From<LogStream> for MaskedStream {
    fn from(stream: LogStream) -> Self {
        match stream {
            LogStream::Out => Self::Out,
            LogStream::Err => Self::Err,
        }
    }
}

impl From<MaskedStream> for LogStream {
    fn from(side: MaskedStream) -> Self {
        match side {
            MaskedStream::Out => Self::Out,
            MaskedStream::Err => Self::Err,
        }
    }
}

impl Sessions {
    /// Adopts a command that an earlier daemon started, or that ran when its machine was paused.
    /// Its tracker attaches to it, however long that takes; this waits for it a moment.
    pub(in crate::engine) async fn adopt(
        self: &Arc<Self>,
        live: &Arc<RunningSandbox>,
        record: Command,
    ) {
        // A service keeps nothing awake.
        let hold = record.service.is_none().then(|| live.hold());
        live.changes.adopted(&record.id);
        self.adopt_held(live, record, hold).await.attached_soon().await;
    }

    /// The same, without waiting.
    pub(in crate::engine) async fn adopt_held(
        self: &Arc<Self>,
        live: &Arc<RunningSandbox>,
        record: Command,
        hold: Option<Hold>,
    ) -> Arc<Tracked> {
        let log = self.open_log(&record).await;
        let mut masker = live.mask().map(Masker::new);
        if let Some(masker) = &mut masker {
            // What was released before may have been the beginning of a value.
            let path = self.store.log_path(&record.sandbox, &record.id);
            for (stream, bytes) in last_records(path, log.offset()).await {
                masker.recall(stream.into(), &bytes);
            }
        }
        match self.sleeping.take(&record.id) {
            // A caller has waited for it since before it was paused, and keeps waiting.
            Some(tracked) => {
                tracked.stdin.detach();
                *tracked.record.lock() = record;
                self.follow(live, &tracked, None, log, masker, None, hold);
                tracked
            }
            None => self.track(live, record, None, log, masker, None, true, hold),
        }
    }

    /// Opens a command's log; without one, on a full disk, its output goes to the caller only.
    pub(in crate::engine) async fn open_log(&self, record: &Command) -> LogWriter {
        let limit = self.context.settings.log_limit.0;
        let budget =
            self.accounts.running_logs(&record.sandbox, limit, &self.context.short_of_space);
        let path = self.store.log_path(&record.sandbox, &record.id);
        LogWriter::open_in_turn(&path, limit, &budget).await
    }

    #[allow(clippy::too_many_arguments)] // all of them are the command
    pub(in crate::engine) fn track(
        self: &Arc<Self>,
        live: &Arc<RunningSandbox>,
        record: Command,
        process: Option<Process>,
        log: LogWriter,
        masker: Option<Masker>,
        caller: Option<mpsc::Sender<CommandOutput>>,
        with_stdin: bool,
        hold: Option<Hold>,
    ) -> Arc<Tracked> {
        let (output, stdin) = match process {
            Some(Process { output, stdin, .. }) => (Some(output), Some(stdin)),
            None => (None, None),
        };
        let tracked = Arc::new(Tracked {
            record: Mutex::new(record),
            progress: watch::channel(0).0,
            printed: AtomicU64::new(0),
            over: AtomicBool::new(false),
            causes: Mutex::default(),
            stdin: Input::new(stdin, with_stdin, self.context.settings.guest.reply),
        });
        self.follow(live, &tracked, output, log, masker, caller, hold);
        tracked
    }

    #[allow(clippy::too_many_arguments)] // all of them are the command
    fn follow(
        self: &Arc<Self>,
        live: &Arc<RunningSandbox>,
        tracked: &Arc<Tracked>,
        output: Option<Output>,
        log: LogWriter,
        masker: Option<Masker>,
        caller: Option<mpsc::Sender<CommandOutput>>,
        hold: Option<Hold>,
    ) {
        let record = tracked.record();
        let deadline = record.timeout.and_then(|span| {
            let ran = now().as_millisecond() - record.started_at.as_millisecond();
            let ran = u64::try_from(ran).unwrap_or(0).saturating_sub(record.slept_ms);
            Instant::now().checked_add(span.duration().saturating_sub(Duration::from_millis(ran)))
        });
        live.commands.lock().insert(record.id, Arc::clone(tracked));
        tracked.printed.store(log.offset(), Ordering::SeqCst);
        let tracker = Tracker {
            sessions: Arc::clone(self),
            live: Arc::clone(live),
            tracked: Arc::clone(tracked),
            log,
            masker,
            held_until: None,
            seen: 0,
            caller,
            deadline,
            shutdown: self.context.tasks.shutdown(),
        };
        self.context.tasks.spawn(async move {
            tracker.run(output).await;
            drop(hold);
        });
    }
}

/// How long a possible beginning of a secret is held back.
const HELD_BACK: Duration = Duration::from_millis(200);
/// How soon an agent that did not answer is asked again; twice as long every time.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// How soon a command that outlived its timeout is killed again, because the agent did not answer or it did not end.
const KILL_AGAIN: Duration = Duration::from_secs(10);

struct EndReason {
    end: CommandEnd,
    limit: Option<u64>,
    peak: Option<u64>,
}

struct Tracker {
    sessions: Arc<Sessions>,
    live: Arc<RunningSandbox>,
    tracked: Arc<Tracked>,
    log: LogWriter,
    masker: Option<Masker>,
    /// When what the masker holds back is released.
    held_until: Option<Instant>,
    /// How much comes again on a new connection that the masker has already.
    seen: usize,
    caller: Option<mpsc::Sender<CommandOutput>>,
    /// When it is to be killed, unless it was.
    deadline: Option<Instant>,
    /// Turns true when the daemon ends.
    shutdown: CancellationToken,
}

async fn due(deadline: Option<Instant>) {
    match deadline {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Waits until the value is true.
async fn turned(over: &mut watch::Receiver<bool>) {
    let _ = over.wait_for(|over| *over).await;
}

/// Whether the agent has reported that it cannot continue a command: it does not know the command,
/// or no longer has its output.
fn is_final(error: &GuestError) -> bool {
    matches!(error.failure(), Some(Failure::NotFound | Failure::Invalid))
}

impl Tracker {
    async fn run(mut self, output: Option<Output>) {
        let exit = self.follow(output).await;
        if exit.is_none() && (self.live.is_paused() || self.shutdown.is_cancelled()) {
            // It resumes with its machine, and its callers keep waiting; or the next daemon adopts
            // it. What is held back comes again.
            return;
        }
        if let Some(masker) = &mut self.masker {
            // The session ended under it, and nothing is left that would send it again.
            masker.decide();
            while let Some((side, bytes)) = masker.pop() {
                self.log.append_in_turn(side.into(), &bytes).await;
            }
        }
        let why = self.why(exit).await;
        let ended = {
            let mut record = self.tracked.record.lock();
            (record.end, record.limit, record.peak) = (Some(why.end), why.limit, why.peak);
            record.ended_at = Some(now());
            record.output_bytes = self.log.offset();
            record.truncated = self.log.truncated();
            match exit {
                Some(exit) => {
                    record.state = CommandState::Exited;
                    record.exit_code = Some(exit.code);
                }
                None => record.state = CommandState::Lost,
            }
            record.clone()
        };
        // The caller gets the answer first, and the disk right after: should the daemon die in
        // between, the agent still knows how it ended.
        self.tracked.over.store(true, Ordering::SeqCst);
        if let Some(caller) = self.caller.take() {
            // One that is slow finds the end where the log ends.
            let _ = caller.try_send(CommandOutput::Exited(ended.clone()));
        }
        let mut ended = ended;
        let changes = self.sessions.after_end(&self.live, &ended.id).await;
        let known = changes.is_some();
        if let Some(changes) = changes {
            self.sessions.keep_changes(&mut ended, changes).await;
            self.tracked.record.lock().changes = ended.changes.clone();
        }
        if let Err(error) = self.sessions.records.keep_command(&ended).await {
            tracing::error!(command = %ended.id, %error, "the end of a command was not written to disk");
        }
        self.sessions.context.events.command_ended(&self.live.sandbox(), &ended);
        self.sessions.accounts.expect(&ended);
        self.live.commands.lock().remove(&ended.id);
        self.tracked.progress.send_modify(|_| {});
        self.tracked.stdin.over();
        match known {
            true => self.live.changes.recorded(&ended.id),
            false => self.sessions.complete_later(&self.live, ended.clone()),
        }
        self.sessions.count_command(&ended).await;
        if exit.is_some() {
            // This changes nothing in the sandbox, so it does not count as a use unless the connection was lost.
            let guest = match self.live.guest_at_rest().await {
                Ok(guest) => Ok(guest),
                Err(_) => self.live.guest().await,
            };
            if let Ok(guest) = guest {
                let _ = guest.forget(ended.inside()).await;
            }
        }
    }

    /// Why it ended, with the limit that it ran into and how much it used.
    async fn why(&self, exit: Option<Exit>) -> EndReason {
        let record = self.tracked.record();
        let killed = exit.is_some_and(|exit| exit.is_kill());
        let oom = killed && self.live.driver.oom_kills(&self.live.key) > record.oom_kills_before;
        let end = self.tracked.causes().why(exit, oom);
        let (limit, peak) = match end {
            CommandEnd::TimedOut => (record.timeout.map(|span| span.0), None),
            CommandEnd::OutOfMemory => {
                let limit = self.live.sandbox().config.resources.memory.0;
                // Of a machine with a kernel of its own the host sees what the machine uses, not what its programs do.
                let peak = match self.live.driver.usage(&self.live.key).await {
                    Ok(usage) if oom => Some(usage.memory_peak.0),
                    _ => None,
                };
                (Some(limit), peak)
            }
            CommandEnd::OutOfDisk => self.tracked.causes().disk_limit().unzip(),
            _ => (None, None),
        };
        EndReason { end, limit, peak }
    }

    /// Takes output until the command ends; `None` when its session ended under it, or the agent does not know it.
    async fn follow(&mut self, output: Option<Output>) -> Option<Exit> {
        let record = self.tracked.record();
        let (id, inside) = (&record.id, record.inside());
        let shutdown = self.shutdown.clone();
        let mut output = match output {
            Some(output) => output,
            None => self.attach(&record).await?,
        };
        loop {
            let event = tokio::select! {
                biased;
                () = due(self.deadline) => {
                    self.deadline = Some(Instant::now() + KILL_AGAIN);
                    self.tracked.causes().timed_out();
                    if let Ok(guest) = self.live.guest().await {
                        let _ = guest.signal(inside, 9).await;
                    }
                    continue;
                }
                () = due(self.held_until), if self.seen == 0 => {
                    self.decide(&output).await;
                    continue;
                }
                () = shutdown.cancelled() => return None,
                event = output.next() => event,
            };
            match event {
                Ok(OutputEvent::Stdout(bytes)) => self.take(LogStream::Out, bytes, &output).await,
                Ok(OutputEvent::Stderr(bytes)) => self.take(LogStream::Err, bytes, &output).await,
                Ok(OutputEvent::Exited(exit)) => {
                    self.decide(&output).await;
                    return Some(exit);
                }
                Err(error) => {
                    // The connection broke, not the command: take it up again, unless the machine is gone.
                    tracing::debug!(command = %id, %error, "the connection of a command was lost");
                    output = self.attach(&record).await?;
                    self.seen = self.masker.as_ref().map_or(0, Masker::waiting);
                }
            }
        }
    }

    /// Attaches to the command from the first byte that is not in the log, as often as it takes. `None` when the session or
    /// the daemon ends, and when the agent has no such command.
    async fn attach(&self, record: &Command) -> Option<Output> {
        let (mut closing, shutdown) = (self.live.closing(), self.shutdown.clone());
        let from = record.printed_before() + self.log.offset();
        let mut pause = FIRST_PAUSE;
        loop {
            let attempt = async {
                let guest = self.live.guest().await?;
                guest.attach(record.inside(), from, 0).await.map_err(Error::from)
            };
            let attempt = tokio::select! {
                attempt = attempt => attempt,
                () = shutdown.cancelled() => return None,
            };
            match attempt {
                Ok(process) => {
                    self.tracked.stdin.renew(process.stdin).await;
                    return Some(process.output);
                }
                Err(Error::SessionOver) => return None,
                Err(Error::Guest(error)) if is_final(&error) => {
                    tracing::warn!(command = %record.id, %error, "the agent cannot continue a command; it is killed");
                    if let Ok(guest) = self.live.guest().await {
                        let _ = guest.signal(record.inside(), 9).await;
                        let _ = guest.forget(record.inside()).await;
                    }
                    return None;
                }
                Err(error) => {
                    tracing::debug!(command = %record.id, %error, "a command is not attached to yet");
                }
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = turned(&mut closing) => return None,
                () = shutdown.cancelled() => return None,
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Takes what came, masks it and keeps what is not held back.
    async fn take(&mut self, stream: LogStream, mut bytes: Bytes, output: &Output) {
        let again = bytes.len().min(self.seen);
        self.seen -= again;
        bytes.advance(again);
        match (&mut self.masker, self.live.mask()) {
            (None, None) => return self.keep(stream, bytes, output).await,
            (None, Some(mask)) => self.masker.insert(Masker::new(mask)),
            (Some(masker), mask) => {
                mask.inspect(|mask| masker.renew(mask));
                masker
            }
        }
        .push(stream.into(), &bytes);
        if self.seen == 0 {
            self.let_go(output).await;
        }
    }

    /// Holds nothing back any longer.
    async fn decide(&mut self, output: &Output) {
        if let Some(masker) = &mut self.masker {
            masker.decide();
            self.let_go(output).await;
        }
    }

    /// Keeps what the masker does not hold back.
    async fn let_go(&mut self, output: &Output) {
        let mut went = false;
        while let Some((side, bytes)) = self.masker.as_mut().and_then(Masker::pop) {
            went = true;
            self.keep(side.into(), bytes.into(), output).await;
        }
        let waiting = self.masker.as_ref().map_or(0, Masker::waiting);
        self.held_until = match self.held_until {
            _ if waiting == 0 => None,
            // The agent sends no more than a window of what is not credited.
            _ if waiting > WINDOW / 2 => Some(Instant::now()),
            Some(until) if !went => Some(until),
            _ => Some(Instant::now() + HELD_BACK),
        };
    }

    async fn keep(&mut self, stream: LogStream, bytes: Bytes, output: &Output) {
        {
            // What is taken while memory is captured would be missing from what the captured agent sends again.
            let _moves = self.live.still.read().await;
            self.log.append_in_turn(stream, &bytes).await;
            output.keep(bytes.len());
            self.tracked.printed.store(self.log.offset(), Ordering::SeqCst);
        }
        self.tracked.progress.send_replace(self.log.offset());
        if let Some(caller) = &self.caller {
            let event = match stream {
                LogStream::Out => CommandOutput::Stdout(bytes),
                LogStream::Err => CommandOutput::Stderr(bytes),
            };
            let keeps_up = tokio::select! {
                biased;
                sent = caller.send(event) => sent.is_ok(),
                () = output.lost() => false,
                () = due(self.deadline) => false,
                () = self.shutdown.cancelled() => false,
            };
            if !keeps_up {
                self.caller = None;
            }
        }
    }
}
