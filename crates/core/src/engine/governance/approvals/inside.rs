//! Questions from inside a sandbox: fetched from its agent, put on record as approvals, and answered.
//!
//! A task per session does that while the sandbox has an approval policy or a run works in it. The agent keeps a question
//! until it is answered, so a daemon that dies between the two finds it again, and finds by its number that it is on record.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sandkeep_proto::ask::{InsideAnswer, PROGRAM};
use sandkeep_proto::link::{At, Failure, InsideQuestion};

use crate::embedded::AGENT;
use crate::engine::error::error_chain;
use crate::engine::governance::approvals::{Approvals, ToAsk};
use crate::engine::governance::runs::{Runs, place};
use crate::engine::running::live::RunningSandbox;
use crate::engine::{Error, Result};
use crate::guest::{Guest, GuestError};
use crate::keyed_lock::KeyedLock;
use crate::model::approval::LONGEST_WAIT;
use crate::model::{
    Approval, ApprovalAnswer, ApprovalSource, ApprovalSubject, Sandbox, SandboxId, SessionId, Span,
};

/// How long the agent waits for a question before it says that there is none.
const WAIT: Duration = Duration::from_secs(20);
/// How long until an agent that did not answer is asked again.
const AGAIN: Duration = Duration::from_secs(1);
/// How long it may take to put the program there.
const PREPARED_WITHIN: Duration = Duration::from_secs(10);

/// How long it takes at least until an agent is asked again, whatever it answers.
const ROUND: Duration = Duration::from_millis(100);
/// How long the number of a question may be. The agent runs inside: it may say anything.
const LONGEST_ID: usize = 64;
/// How many new questions are taken from one answer of the agent, and how many open ones are looked at.
const MOST_NEW: usize = 32;
const MOST_OPEN: usize = 128;
/// How many new questions a sandbox may have in a minute.
const MOST_IN_A_MINUTE: u32 = 30;
const MINUTE: Duration = Duration::from_secs(60);

/// Sessions whose questions are fetched, and those that have the program.
#[derive(Debug, Default)]
pub(in crate::engine) struct Watched {
    /// Since when questions of a sandbox are counted, and how many there were.
    counted: Mutex<HashMap<SandboxId, (Instant, u32)>>,
    fetched: Mutex<HashSet<SessionId>>,
    prepared: Mutex<HashSet<SessionId>>,
    preparing: KeyedLock<SessionId>,
}

impl Watched {
    /// Whether a sandbox may have another question at this time.
    fn count(&self, sandbox: &SandboxId, now: Instant) -> bool {
        let mut counted = self.counted.lock();
        let (since, count) = counted.entry(sandbox.clone()).or_insert((now, 0));
        if now.saturating_duration_since(*since) >= MINUTE {
            (*since, *count) = (now, 0);
        }
        *count += 1;
        *count <= MOST_IN_A_MINUTE
    }

    fn forget_counts(&self, now: Instant) {
        self.counted.lock().retain(|_, (since, _)| now.saturating_duration_since(*since) < MINUTE);
    }
}

impl Runs {
    /// Whether programs in a sandbox may ask.
    pub(in crate::engine) fn hears(&self, sandbox: &Sandbox) -> bool {
        sandbox.config.approvals.is_some() || self.active_in(&sandbox.id).is_some()
    }

    /// Fetches the questions of all sandboxes whose programs may ask.
    pub(in crate::engine) fn watch_questions(self: &Arc<Self>) {
        let mut alive = HashSet::new();
        for live in self.lifecycle.turns.all_live() {
            alive.insert(live.session().id);
            if self.hears(&live.sandbox()) {
                self.watch_session(&live);
            }
        }
        self.watched.forget_counts(Instant::now());
        for sessions in [&self.watched.fetched, &self.watched.prepared] {
            sessions.lock().retain(|session| alive.contains(session));
        }
    }

    fn watch_session(self: &Arc<Self>, live: &Arc<RunningSandbox>) {
        let session = live.session().id;
        if live.is_closed() || !self.watched.fetched.lock().insert(session.clone()) {
            return;
        }
        let (this, live) = (Arc::clone(self), Arc::clone(live));
        self.context.tasks.spawn(async move {
            if let Err(error) = this.fetch_questions(&live).await {
                tracing::warn!(session = %session, error = error_chain(&error), "questions from inside a sandbox are not heard");
            }
        });
    }

    /// Prepares a running sandbox for questions before a command is started in it. If that fails,
    /// the command runs all the same.
    pub(in crate::engine) async fn prepare_questions(self: &Arc<Self>, sandbox: &Sandbox) {
        let Some(live) = self.lifecycle.turns.live(&sandbox.id) else { return };
        self.watch_session(&live);
        let prepared = tokio::time::timeout(PREPARED_WITHIN, self.put_program(&live)).await;
        let problem = match prepared {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error_chain(&error),
            Err(_) => "its agent does not answer".to_owned(),
        };
        tracing::warn!(sandbox = %sandbox.name, problem, "programs in a sandbox cannot ask questions");
    }

    /// Puts `keep ask` there, and has the agent listen for it; once in a session.
    async fn put_program(&self, live: &RunningSandbox) -> Result<()> {
        let session = live.session().id;
        if self.watched.prepared.lock().contains(&session) {
            return Ok(());
        }
        let _one = self.watched.preparing.lock(&session).await;
        if self.watched.prepared.lock().contains(&session) {
            return Ok(());
        }
        let guest = live.guest().await?;
        let at = At { path: PROGRAM.to_owned(), cwd: None, user: None };
        let mut file = guest.write_file(at, Some(0o755), true, false).await?;
        file.send(AGENT.bytes().into()).await?;
        file.finish().await?;
        guest.questions(0, Duration::ZERO).await?;
        self.watched.prepared.lock().insert(session);
        Ok(())
    }

    async fn fetch_questions(self: &Arc<Self>, live: &Arc<RunningSandbox>) -> Result<()> {
        let (mut closing, shutdown) = (live.closing(), self.context.tasks.shutdown());
        let mut known = 0;
        let mut open: Vec<InsideQuestion> = Vec::new();
        loop {
            if live.is_closed() {
                self.withdraw_all(live).await;
                return Ok(());
            }
            let mut changed = self.approvals.subscribe();
            self.answer_questions(live, &open).await;
            tokio::select! {
                () = tokio::time::sleep(ROUND) => {}
                () = shutdown.cancelled() => return Ok(()),
            }
            let mut resting = live.rest.changes();
            if *resting.borrow_and_update() {
                // Its agent is frozen with it.
                tokio::select! {
                    _ = resting.changed() => {}
                    _ = closing.changed() => {}
                    () = shutdown.cancelled() => return Ok(()),
                }
                continue;
            }
            let asked = async {
                let guest = match live.guest_as_it_is().await {
                    Ok(guest) => guest,
                    Err(_) => live.guest().await?,
                };
                Ok::<_, Error>(guest.questions(known, WAIT).await?)
            };
            let listed = tokio::select! {
                listed = asked => listed,
                // Somebody answered, maybe one of these.
                _ = changed.changed() => continue,
                _ = closing.changed() => continue,
                _ = resting.changed() => continue,
                () = shutdown.cancelled() => return Ok(()),
            };
            match listed {
                Ok((version, mut questions)) => {
                    questions.retain(|question| question.id.len() <= LONGEST_ID);
                    let more = version != known && self.take_in(live, &questions).await;
                    questions.truncate(MOST_OPEN);
                    // What is left is taken in with the next answer, which comes at once.
                    (known, open) = (if more { 0 } else { version }, questions);
                }
                Err(Error::Guest(GuestError::Refused { kind: Failure::Invalid, message })) => {
                    tracing::info!(sandbox = %live.sandbox().name, message, "an agent of an earlier version hears no questions");
                    return Ok(());
                }
                Err(_) => tokio::select! {
                    () = tokio::time::sleep(AGAIN) => {}
                    _ = closing.changed() => {}
                    () = shutdown.cancelled() => return Ok(()),
                },
            }
        }
    }

    /// Puts new questions on record, and closes those that were withdrawn. Says whether there are more new ones.
    async fn take_in(&self, live: &RunningSandbox, questions: &[InsideQuestion]) -> bool {
        let sandbox = live.sandbox();
        let (project, id) = (&sandbox.project, &sandbox.id);
        let known = self.approvals.all_of_agent(project, id);
        let mut new = questions.iter().filter(|question| !known.contains(&question.id));
        for question in new.by_ref().take(MOST_NEW) {
            let refused = match self.watched.count(id, Instant::now()) {
                true => {
                    let asked = self.approvals.ask(project, self.to_ask(&sandbox, question)).await;
                    asked.err().map(|error| error.to_string())
                }
                false => Some(format!("more than {MOST_IN_A_MINUTE} questions in a minute")),
            };
            // The requester gets the refusal, and may ask again.
            if let Some(comment) = refused
                && let Ok(guest) = live.guest().await
            {
                let none = InsideAnswer::Expired;
                let _ = guest.answer_question(&question.id, none, &comment).await;
            }
        }
        let more = new.next().is_some();
        for approval in self.approvals.pending_in(project, id) {
            let Some(number) = &approval.agent_question else { continue };
            if !questions.iter().any(|question| question.id == *number) {
                self.approvals.close(&approval, "whoever asked is gone").await;
            }
        }
        more
    }

    fn to_ask(&self, sandbox: &Sandbox, question: &InsideQuestion) -> ToAsk {
        let policy = sandbox.config.approvals.as_ref();
        let asked = &question.asked;
        let default = asked.default.map(|yes| match yes {
            true => ApprovalAnswer::Approve,
            false => ApprovalAnswer::Deny,
        });
        let expires = asked.timeout_ms.map(|millis| Span(millis.clamp(1000, LONGEST_WAIT.0)));
        ToAsk {
            sandbox: place(sandbox),
            run: self.active_in(&sandbox.id).map(|run| run.id),
            source: ApprovalSource::Agent,
            subject: ApprovalSubject::Question,
            target: None,
            question: asked.question.clone(),
            context: asked.context.clone(),
            default: default.or(policy.and_then(|policy| policy.default)),
            expires: expires.or(policy.and_then(|policy| policy.expires)),
            asked_by: None,
            agent_question: Some(question.id.clone()),
        }
    }

    /// Brings answers inside.
    async fn answer_questions(&self, live: &RunningSandbox, open: &[InsideQuestion]) {
        let sandbox = live.sandbox();
        for question in open {
            let found = self.approvals.of_agent(&sandbox.project, &sandbox.id, &question.id);
            let Some(approval) = found.filter(|approval| !approval.is_pending()) else { continue };
            let Ok(guest) = live.guest().await else { return };
            if let Err(error) = answer_inside(&guest, &question.id, &approval).await {
                tracing::debug!(approval = %approval.id, %error, "an answer was not heard inside; it is said again");
            }
        }
    }

    /// The session is over, and with it every program that asked in it. In a paused one they are
    /// suspended.
    async fn withdraw_all(&self, live: &RunningSandbox) {
        if live.is_paused() {
            return;
        }
        let sandbox = live.sandbox();
        for approval in self.approvals.pending_in(&sandbox.project, &sandbox.id) {
            if approval.agent_question.is_some() {
                self.approvals.close(&approval, "the session of whoever asked has ended").await;
            }
        }
    }
}

async fn answer_inside(
    guest: &Guest,
    question: &str,
    approval: &Approval,
) -> Result<(), GuestError> {
    let answer = match approval.answer() {
        Some(ApprovalAnswer::Approve) => InsideAnswer::Approved,
        Some(ApprovalAnswer::Deny) => InsideAnswer::Denied,
        None => InsideAnswer::Expired,
    };
    guest.answer_question(question, answer, &approval.comment).await
}

impl Approvals {
    /// Pending questions from inside.
    pub(in crate::engine) fn asked_inside(&self) -> Vec<Approval> {
        let pending = self.pending().into_iter();
        pending.filter(|approval| approval.agent_question.is_some()).collect()
    }

    /// Closes questions from inside whose sandbox does not run any more, when a daemon starts.
    pub(in crate::engine) async fn close_unheard(&self, hears: impl Fn(&Approval) -> bool) {
        for approval in self.pending() {
            if approval.agent_question.is_some() && !hears(&approval) {
                self.close(&approval, "the session of whoever asked has ended").await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::{MINUTE, MOST_IN_A_MINUTE, Watched};
    use crate::model::SandboxId;

    #[test]
    fn a_sandbox_has_so_many_questions_in_a_minute() {
        let (watched, now) = (Watched::default(), Instant::now());
        let (one, other) = (SandboxId::fresh(), SandboxId::fresh());
        for _ in 0..MOST_IN_A_MINUTE {
            assert!(watched.count(&one, now));
        }
        assert!(!watched.count(&one, now));
        assert!(watched.count(&other, now));
        watched.forget_counts(now);
        assert!(!watched.count(&one, now));
        assert!(watched.count(&one, now + MINUTE));
        watched.forget_counts(now + MINUTE * 2);
        assert!(watched.counted.lock().is_empty());
    }
}
