//! The work of a run: its command, as often as it takes, or an outside harness that sends
//! heartbeats.
//!
//! An attempt is on disk with the id of its command and the session it is to run in before the command is started. So
//! a restarted daemon knows whether to start it, to follow it or to give it up: see
//! `docs/formats/runs.md`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::spending::Spending;
use super::{Runs, place};
use crate::engine::governance::approvals::ToAsk;
use crate::engine::session::command::Exec;
use crate::engine::{Error, ErrorKind, Result, WakeMode};
use crate::failpoint;
use crate::model::{
    Approval, ApprovalAnswer, ApprovalSource, ApprovalSubject, Command, CommandId, CommandState,
    Run, RunAttempt, RunCommand, RunEffect, Sandbox, SandboxId, Session,
};

/// How often conditions are checked that no change reports: timeouts, heartbeats.
const TICK: Duration = Duration::from_millis(250);
/// How often is looked at what a run with a spending limit has used.
const SPENT_EVERY: Duration = Duration::from_secs(1);
/// How long after a failed attempt the next begins; twice as long every time.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// How long a command may take to end after SIGTERM, and after SIGKILL.
const END_WITHIN: Duration = Duration::from_secs(5);
/// How often a session may end just before the command is started in it.
const SESSIONS: u32 = 5;

/// How an attempt ended.
struct AttemptEnd {
    exit_code: Option<i32>,
    problem: Option<String>,
    /// Whether another attempt could do better.
    again: bool,
}

impl AttemptEnd {
    fn failed(problem: impl Into<String>) -> Self {
        Self { exit_code: None, problem: Some(problem.into()), again: true }
    }
}

/// The command of a run, as it is started.
pub(super) fn exec_of(command: &RunCommand) -> Exec {
    let RunCommand { argv, env, cwd, user } = command.clone();
    Exec { argv, env, cwd, user, detach: true, ..Exec::default() }
}

fn is_working(run: &Run) -> bool {
    run.status().is_active() && run.pending == Some(RunEffect::Work)
}

impl Runs {
    pub(super) async fn work(self: &Arc<Self>, run: &Run) -> Result<()> {
        match &run.spec.command {
            Some(command) => self.run_command(run, command).await,
            None => self.attend(run).await,
        }
    }

    /// Waits for a change of any run or approval, but not for long.
    pub(super) async fn a_moment(&self) {
        let (mut runs, mut approvals) = (self.subscribe(), self.approvals.subscribe());
        let shutdown = self.context.tasks.shutdown();
        tokio::select! {
            _ = runs.changed() => {}
            _ = approvals.changed() => {}
            () = tokio::time::sleep(TICK) => {}
            () = shutdown.cancelled() => {}
        }
    }

    /// The run, if its work is still to be done.
    fn still(&self, run: &Run) -> Result<Option<Run>> {
        if self.context.tasks.is_shutdown() {
            return Err(Error::ShuttingDown);
        }
        Ok(Some(self.get(&run.project, &run.id)?).filter(is_working))
    }

    async fn run_command(self: &Arc<Self>, run: &Run, command: &RunCommand) -> Result<()> {
        let mut pause = FIRST_PAUSE;
        loop {
            let Some(run) = self.still(run)? else { return Ok(()) };
            let begun = run.attempts.last().filter(|attempt| attempt.ended_at.is_none()).cloned();
            let attempt = match begun {
                Some(attempt) => attempt,
                None => match self.begin_attempt(&run, command).await? {
                    Some(attempt) => attempt,
                    None => return Ok(()),
                },
            };
            let Some(end) = self.carry_out(&run, command, attempt).await? else { return Ok(()) };
            let (good, again) = (end.problem.is_none(), end.again);
            let problem = end.problem.clone().unwrap_or_default();
            self.change(&run.project, &run.id, |run, at| {
                if let Some(last) = run.attempts.last_mut().filter(|last| last.ended_at.is_none()) {
                    last.ended_at = Some(at);
                    last.exit_code = end.exit_code;
                    last.problem = end.problem;
                }
                if good && is_working(run) {
                    run.pending = Some(RunEffect::Finish);
                }
                Ok(())
            })
            .await?;
            if good {
                return Ok(());
            }
            let Some(run) = self.still(&run)? else { return Ok(()) };
            if !again || run.attempts.len() > run.spec.retries as usize {
                return self.fail(&run, problem).await;
            }
            let until = Instant::now() + pause;
            pause = (pause * 2).min(LONGEST_PAUSE);
            while Instant::now() < until {
                if self.still(&run)?.is_none() {
                    return Ok(());
                }
                self.a_moment().await;
            }
        }
    }

    /// Puts an attempt on record, once nothing stands in its way. `None`: the run is not to work any more.
    async fn begin_attempt(
        self: &Arc<Self>,
        run: &Run,
        command: &RunCommand,
    ) -> Result<Option<RunAttempt>> {
        let sandbox = self.sandbox_of(run).await?;
        let exec = Exec { by: Some(run.by.to_string()), ..exec_of(command) };
        let mut held = Box::pin(self.before_command(&sandbox, &exec, true));
        loop {
            tokio::select! {
                answered = &mut held => break answered?,
                () = self.a_moment() => {}
            }
            if self.still(run)?.is_none() {
                return Ok(None);
            }
        }
        drop(held);
        let Some(session) = self.approved_session(run, &sandbox).await? else { return Ok(None) };
        loop {
            let Some(now) = self.still(run)? else { return Ok(None) };
            match self.spending(&now).await? {
                Spending::Within => break,
                Spending::Waits => self.a_moment().await,
                Spending::Refused(why) => {
                    self.fail(run, why).await?;
                    return Ok(None);
                }
            }
        }
        self.prepare_questions(&sandbox).await;
        let attempt = self.change(&run.project, &run.id, |run, at| {
            if !is_working(run) {
                return Ok(None);
            }
            let attempt = RunAttempt {
                command: CommandId::fresh(),
                session: session.id.clone(),
                started_at: at,
                waited_before_ms: run.waited(at),
                ended_at: None,
                exit_code: None,
                problem: None,
            };
            run.attempts.push(attempt.clone());
            Ok(Some(attempt))
        });
        let attempt = attempt.await?;
        failpoint::pass("run.attempt");
        Ok(attempt)
    }

    /// A session in which the run may continue: one whose sandbox is as it was at its last stop, or
    /// whose difference somebody approved. `None`: the run must not continue.
    async fn approved_session(
        self: &Arc<Self>,
        run: &Run,
        sandbox: &Sandbox,
    ) -> Result<Option<Session>> {
        let mut session = self.awake(run, sandbox).await?;
        loop {
            let Some(run) = self.still(run)? else { return Ok(None) };
            let Some(approval) = self.validated(&run, sandbox, &session).await? else {
                return Ok(Some(session));
            };
            if approval.is_pending() {
                self.a_moment().await;
                continue;
            }
            if approval.answer() != Some(ApprovalAnswer::Approve) {
                let why =
                    "its sandbox is not as it was at the last stop, and that was not approved";
                self.fail(&run, why.to_owned()).await?;
                return Ok(None);
            }
            // The session may have ended while somebody thought about it. Another one is looked at anew.
            let now = self.awake(&run, sandbox).await?;
            if now.id == session.id {
                return Ok(Some(session));
            }
            session = now;
        }
    }

    async fn awake(self: &Arc<Self>, run: &Run, sandbox: &Sandbox) -> Result<Session> {
        let wake = WakeMode::Wake;
        let (live, _) = self.lifecycle.awake(&run.project, &sandbox.name, &wake).await?;
        Ok(live.session())
    }

    /// The approval that a session needs whose sandbox is not as it was at its last stop.
    async fn validated(
        self: &Arc<Self>,
        run: &Run,
        sandbox: &Sandbox,
        session: &Session,
    ) -> Result<Option<Approval>> {
        if session.valid != Some(false) {
            return Ok(None);
        }
        let all = self.approvals.of_run(&run.project, &run.id);
        let asked = all.into_iter().rev().find(|approval| {
            approval.subject == ApprovalSubject::Validation
                && approval.asked_at >= session.started_at
        });
        if let Some(approval) = asked {
            return Ok(Some(approval));
        }
        let problems = session.hooks.iter().filter(|hook| hook.hook == "validate");
        let problems: Vec<&str> = problems.filter_map(|hook| hook.problem.as_deref()).collect();
        let mut context = problems.join("\n");
        context.truncate(context.floor_char_boundary(8 << 10));
        let policy = sandbox.config.approvals.as_ref();
        let to_ask = ToAsk {
            sandbox: place(sandbox),
            run: Some(run.id.clone()),
            source: ApprovalSource::Policy,
            subject: ApprovalSubject::Validation,
            target: None,
            question: format!(
                "go on in `{}`, which is not as it was at its last stop",
                sandbox.name
            ),
            context: context.replace('\0', " "),
            default: policy.and_then(|policy| policy.default),
            expires: policy.and_then(|policy| policy.expires),
            asked_by: None,
            agent_question: None,
        };
        self.approvals.ask(&run.project, to_ask).await.map(Some)
    }

    /// Starts the command of an attempt, unless it was started, and follows it to its end. `None`: the run is not to work any
    /// more.
    async fn carry_out(
        self: &Arc<Self>,
        run: &Run,
        command: &RunCommand,
        mut attempt: RunAttempt,
    ) -> Result<Option<AttemptEnd>> {
        let sandbox = self.sandbox_of(run).await?;
        self.lifecycle.turns.recovered(&sandbox.id).await?;
        for _ in 0..SESSIONS {
            if self.sessions.find_command(&sandbox, &attempt.command).await.is_ok() {
                return self.follow(run, &sandbox, &attempt).await;
            }
            let live = self.lifecycle.turns.live(&sandbox.id);
            let Some(live) = live.filter(|live| live.session().id == attempt.session) else {
                let problem = "its session ended before the command was on record";
                return Ok(Some(AttemptEnd::failed(problem)));
            };
            let mut exec = exec_of(command);
            exec.env.insert("KEEP_RUN".to_owned(), run.id.to_string());
            exec.by = Some(run.by.to_string());
            exec.id = Some(attempt.command.clone());
            match self.sessions.launch(&live, &exec).await {
                Ok(_) => {}
                Err(Error::SessionOver) => {
                    // It was refused at the gate: nothing was started. The next session is looked at as the first was.
                    let Some(session) = self.approved_session(run, &sandbox).await? else {
                        return Ok(None);
                    };
                    let session = session.id;
                    attempt.session = session.clone();
                    self.change(&run.project, &run.id, |run, _| {
                        if let Some(last) = run.attempts.last_mut() {
                            last.session = session;
                        }
                        Ok(())
                    })
                    .await?;
                }
                Err(error) if error.kind() == ErrorKind::Invalid => {
                    let problem = Some(error.to_string());
                    return Ok(Some(AttemptEnd { exit_code: None, problem, again: false }));
                }
                Err(error) => {
                    if self.sessions.find_command(&sandbox, &attempt.command).await.is_err() {
                        return Ok(Some(AttemptEnd::failed(error.to_string())));
                    }
                }
            }
        }
        Ok(Some(AttemptEnd::failed("its sessions ended before the command was started")))
    }

    async fn follow(
        self: &Arc<Self>,
        run: &Run,
        sandbox: &Sandbox,
        attempt: &RunAttempt,
    ) -> Result<Option<AttemptEnd>> {
        let mut looked: Option<Instant> = None;
        loop {
            let Some(now) = self.still(run)? else { return Ok(None) };
            if looked.is_none_or(|looked| looked.elapsed() >= SPENT_EVERY) {
                looked = Some(Instant::now());
                if let Spending::Refused(why) = self.spending(&now).await? {
                    self.fail(run, why).await?;
                    return Ok(None);
                }
            }
            let record = self.sessions.find_command(sandbox, &attempt.command).await?;
            if record.state != CommandState::Running {
                return Ok(Some(ended(&record)));
            }
            let at = self.now();
            let waited = now.waited(at).saturating_sub(attempt.waited_before_ms);
            let took = at.as_millisecond() - attempt.started_at.as_millisecond();
            let took = u64::try_from(took).unwrap_or(0).saturating_sub(waited);
            if let Some(limit) = run.spec.timeout.filter(|limit| took > limit.0) {
                self.end_command(&sandbox.id, &attempt.command).await;
                return Ok(Some(AttemptEnd::failed(format!("it took longer than {limit}"))));
            }
            match self.sessions.tracked(&sandbox.id, &attempt.command) {
                Some(tracked) => tokio::select! {
                    () = tracked.ended() => {}
                    () = self.a_moment() => {}
                },
                None => self.a_moment().await,
            }
        }
    }

    /// Ends a command, politely first.
    pub(super) async fn end_command(&self, sandbox: &SandboxId, command: &CommandId) {
        for signal in [15, 9] {
            let Some(tracked) = self.sessions.tracked(sandbox, command) else { return };
            let Some(live) = self.lifecycle.turns.live(sandbox) else { return };
            tracked.causes().signalled(signal);
            if let Ok(guest) = live.guest().await {
                // It may have ended in the meantime.
                let _ = guest.signal(tracked.record().inside(), signal).await;
            }
            if tokio::time::timeout(END_WITHIN, tracked.ended()).await.is_ok() {
                return;
            }
        }
    }

    /// Waits for a harness to report that it is done, as long as it sends heartbeats.
    async fn attend(self: &Arc<Self>, run: &Run) -> Result<()> {
        self.heartbeats.lock().insert(run.id.clone(), Instant::now());
        if let Ok(sandbox) = self.sandbox_of(run).await {
            self.prepare_questions(&sandbox).await;
        }
        let outcome = self.attend_until_over(run).await;
        self.heartbeats.lock().remove(&run.id);
        outcome
    }

    async fn attend_until_over(self: &Arc<Self>, run: &Run) -> Result<()> {
        let limit = run.spec.heartbeat;
        let mut looked: Option<Instant> = None;
        loop {
            let Some(now) = self.still(run)? else { return Ok(()) };
            if looked.is_none_or(|looked| looked.elapsed() >= SPENT_EVERY) {
                looked = Some(Instant::now());
                if let Spending::Refused(why) = self.spending(&now).await? {
                    return self.fail(run, why).await;
                }
            }
            let last = self.heartbeats.lock().get(&run.id).copied();
            if last.is_none_or(|last| last.elapsed() > limit.duration()) {
                let why = format!("its harness was not heard of for {limit}");
                return self.fail(run, why).await;
            }
            let at = self.now();
            let began = now.started_at.unwrap_or(at);
            let took = u64::try_from(at.as_millisecond() - began.as_millisecond()).unwrap_or(0);
            let took = took.saturating_sub(now.waited(at));
            if let Some(limit) = run.spec.timeout.filter(|limit| took > limit.0) {
                return self.fail(run, format!("it took longer than {limit}")).await;
            }
            let live = run.sandbox.as_ref().and_then(|it| self.lifecycle.turns.live(&it.id));
            if let Some(live) = live {
                let found = self.validated(&now, &live.sandbox(), &live.session()).await?;
                let denied = |approval: &Approval| {
                    !approval.is_pending() && approval.answer() != Some(ApprovalAnswer::Approve)
                };
                if found.as_ref().is_some_and(denied) {
                    let why =
                        "its sandbox is not as it was at the last stop, and that was not approved";
                    return self.fail(run, why.to_owned()).await;
                }
            }
            self.a_moment().await;
        }
    }
}

/// What the end of a command means for its attempt.
fn ended(record: &Command) -> AttemptEnd {
    let problem = match (record.state, record.exit_code) {
        (CommandState::Exited, Some(0)) => None,
        (CommandState::Exited, Some(code)) => Some(format!("its command ended with {code}")),
        _ => Some("its command was lost: the session, the server or the host ended".to_owned()),
    };
    AttemptEnd { exit_code: record.exit_code, problem, again: true }
}
