//! Questions from inside a sandbox: fetched from its agent, put on record as approvals, and answered.
//!
//! A task per session does that while the sandbox has an approval policy or a run works in it. The agent keeps a question
//! until it is answered, so a daemon that dies between the two finds it again, and finds by its number that it is on record.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

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
    Approval, ApprovalAnswer, ApprovalSource, ApprovalSubject, Sandbox, SessionId, Span,
};

/// How long the agent waits for a question before it says that there is none.
const WAIT: Duration = Duration::from_secs(20);
/// How long until an agent that did not answer is asked again.
const AGAIN: Duration = Duration::from_secs(1);
/// How long it may take to put the program there.
const PREPARED_WITHIN: Duration = Duration::from_secs(10);

/// Sessions whose questions are fetched, and those that have the program.
#[derive(Debug, Default)]
pub(in crate::engine) struct Watched {
    fetched: Mutex<HashSet<SessionId>>,
    prepared: Mutex<HashSet<SessionId>>,
    preparing: KeyedLock<SessionId>,
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

    /// Has a running sandbox ready for questions before a command is started in it. Without that the command runs all the same.
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
            let asked = async {
                let guest = match live.guest_at_rest().await {
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
                () = shutdown.cancelled() => return Ok(()),
            };
            match listed {
                Ok((version, questions)) => {
                    if version != known {
                        self.take_in(live, &questions).await;
                    }
                    (known, open) = (version, questions);
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

    /// Puts new questions on record, and closes those that were withdrawn.
    async fn take_in(&self, live: &RunningSandbox, questions: &[InsideQuestion]) {
        let sandbox = live.sandbox();
        let (project, id) = (&sandbox.project, &sandbox.id);
        for question in questions {
            if self.approvals.of_agent(project, id, &question.id).is_some() {
                continue;
            }
            let asked = self.approvals.ask(project, self.to_ask(&sandbox, question)).await;
            if let Err(error) = asked {
                // Whoever asked is told, and may ask again.
                let comment = error.to_string();
                if let Ok(guest) = live.guest().await {
                    let none = InsideAnswer::Expired;
                    let _ = guest.answer_question(&question.id, none, &comment).await;
                }
            }
        }
        for approval in self.approvals.pending_in(project, id) {
            let Some(number) = &approval.agent_question else { continue };
            if !questions.iter().any(|question| question.id == *number) {
                self.approvals.close(&approval, "whoever asked is gone").await;
            }
        }
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

    /// The session is over, and with it whoever asked in it. Of a paused one they sleep.
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
