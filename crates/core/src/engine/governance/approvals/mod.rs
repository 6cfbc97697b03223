//! Approvals: asked, answered, expired.
//!
//! An answer is on disk before it takes effect. Expiry uses the monotonic clock once a question was
//! asked: a wall clock that jumps gives no answers.

mod decided;
mod gate;
pub(in crate::engine) mod inside;
mod kept;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use tokio::runtime::Handle;
use tokio::sync::watch;

pub(in crate::engine) use self::decided::AnswerScope;
use self::decided::{ApprovalSize, Decided, EndedApproval, cut};
pub(in crate::engine) use self::gate::Gates;
use crate::db::{Page, Paged};
use crate::engine::context::Context;
use crate::engine::error::error_chain;
use crate::engine::tenancy::Tenancy;
use crate::engine::{Error, Result};
use crate::keyed_lock::KeyedLock;
use crate::model::approval::{LONGEST_WAIT, USUAL_WAIT};
use crate::model::{
    Answerer, Approval, ApprovalAnswer, ApprovalId, ApprovalSource, ApprovalStatus,
    ApprovalSubject, AuditRecord, EventApproval, EventData, EventSandbox, FORMAT, KeyId, Name,
    RunId, RunSandbox, SandboxId, Span, Tags, Timestamp,
};
use crate::store::{Durability, Store};

/// How many may be pending in a sandbox, and in a project.
const MOST_IN_SANDBOX: usize = 64;
const MOST_IN_PROJECT: usize = 1000;
/// How long a question, a context and a comment may be.
const QUESTION: usize = 1000;
const CONTEXT: usize = 16 << 10;
const COMMENT: usize = 4000;

/// A question to be asked.
#[derive(Debug, Clone)]
pub(in crate::engine) struct ToAsk {
    pub(in crate::engine) sandbox: RunSandbox,
    pub(in crate::engine) run: Option<RunId>,
    pub(in crate::engine) source: ApprovalSource,
    pub(in crate::engine) subject: ApprovalSubject,
    pub(in crate::engine) target: Option<String>,
    pub(in crate::engine) question: String,
    pub(in crate::engine) context: String,
    pub(in crate::engine) default: Option<ApprovalAnswer>,
    pub(in crate::engine) expires: Option<Span>,
    pub(in crate::engine) asked_by: Option<KeyId>,
    pub(in crate::engine) agent_question: Option<String>,
}

/// Who gives an answer.
#[derive(Debug, Clone)]
pub(in crate::engine) struct AnsweredBy {
    pub(in crate::engine) project: Name,
    pub(in crate::engine) who: Answerer,
    /// The key that stands behind it.
    pub(in crate::engine) key: KeyId,
}

/// Which approvals are wanted. All that is given must fit.
#[derive(Debug, Clone, Default)]
pub struct ApprovalFilter {
    /// With this status.
    pub status: Option<ApprovalStatus>,
    /// About the sandbox of this name.
    pub sandbox: Option<Name>,
    /// Of this run.
    pub run: Option<RunId>,
}

impl ApprovalFilter {
    fn takes(&self, approval: &Approval) -> bool {
        self.status.is_none_or(|status| approval.status == status)
            && self.sandbox.as_ref().is_none_or(|name| approval.sandbox.name == *name)
            && self.run.as_ref().is_none_or(|run| approval.run.as_ref() == Some(run))
    }
}

type Key = (Name, ApprovalId);

#[derive(Debug, Clone)]
struct Entry {
    approval: Approval,
    /// When it expires, on the monotonic clock.
    due: Duration,
    size: ApprovalSize,
}

/// All approvals.
pub(in crate::engine) struct Approvals {
    store: Store,
    context: Arc<Context>,
    tenancy: Arc<Tenancy>,
    table: RwLock<BTreeMap<Key, Entry>>,
    /// Those that wait for an answer.
    waiting: RwLock<BTreeSet<Key>>,
    /// Those whose answer decides more than one request.
    decided: Decided,
    /// Sandboxes in which one ended, since somebody looked.
    ended: Mutex<Vec<EndedApproval>>,
    changes: KeyedLock<Name>,
    changed: watch::Sender<u64>,
}

impl Approvals {
    pub(in crate::engine) fn new(context: &Arc<Context>, tenancy: &Arc<Tenancy>) -> Arc<Self> {
        Arc::new(Self {
            store: context.store.clone(),
            context: Arc::clone(context),
            tenancy: Arc::clone(tenancy),
            table: RwLock::default(),
            waiting: RwLock::default(),
            decided: Decided::default(),
            ended: Mutex::default(),
            changes: KeyedLock::default(),
            changed: watch::Sender::new(0),
        })
    }

    fn now(&self) -> Timestamp {
        self.context.settings.clock.wall()
    }

    /// Enters what is on disk.
    pub(in crate::engine) fn load(&self, all: Vec<Approval>) {
        let (now, clock) = (self.now(), self.context.settings.clock.monotonic());
        let (mut table, mut waiting) = (self.table.write(), self.waiting.write());
        for approval in all {
            let left = approval.expires_at.as_millisecond() - now.as_millisecond();
            let left = u64::try_from(left).unwrap_or(0).min(LONGEST_WAIT.0);
            let due = clock + Duration::from_millis(left);
            let key = (approval.project.clone(), approval.id.clone());
            if approval.is_pending() {
                waiting.insert(key.clone());
            }
            self.decided.note(&approval);
            self.note_ended(&approval);
            let (approval, size) = cut(approval);
            table.insert(key, Entry { approval, due, size });
        }
    }

    /// Closes what held a request of an earlier daemon: that request is gone.
    pub(in crate::engine) async fn close_orphans(&self) {
        let pending = self.pending();
        for approval in pending.into_iter().filter(Approval::holds_a_request) {
            self.close(&approval, "the server was restarted, and with it the request ended").await;
        }
    }

    /// Turns when any approval changed.
    pub(in crate::engine) fn subscribe(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    pub(in crate::engine) fn get(&self, project: &Name, id: &ApprovalId) -> Result<Approval> {
        let found = self.table.read().get(&(project.clone(), id.clone())).cloned();
        found.map(|entry| entry.approval).ok_or_else(|| Error::NoApproval(id.clone()))
    }

    fn pending(&self) -> Vec<Approval> {
        self.pending_entries().into_iter().map(|entry| entry.approval).collect()
    }

    fn pending_entries(&self) -> Vec<Entry> {
        let waiting: Vec<Key> = self.waiting.read().iter().cloned().collect();
        let table = self.table.read();
        waiting.iter().filter_map(|key| table.get(key)).cloned().collect()
    }

    /// The runs that wait for an answer.
    pub(in crate::engine) fn waiting_runs(&self) -> HashSet<RunId> {
        self.pending().into_iter().filter_map(|approval| approval.run).collect()
    }

    /// All of a run, oldest first.
    pub(in crate::engine) fn of_run(&self, project: &Name, run: &RunId) -> Vec<Approval> {
        let table = self.table.read();
        let all = of_project(&table, project).map(|(_, entry)| &entry.approval);
        all.filter(|approval| approval.run.as_ref() == Some(run)).cloned().collect()
    }

    /// Those of a sandbox that wait for an answer.
    pub(in crate::engine) fn pending_in(
        &self,
        project: &Name,
        sandbox: &SandboxId,
    ) -> Vec<Approval> {
        let all = self.pending().into_iter();
        all.filter(|one| one.project == *project && one.sandbox.id == *sandbox).collect()
    }

    /// What the agent of a sandbox knows by this number.
    pub(in crate::engine) fn of_agent(
        &self,
        project: &Name,
        sandbox: &SandboxId,
        question: &str,
    ) -> Option<Approval> {
        let table = self.table.read();
        let mut all = of_project(&table, project).map(|(_, entry)| &entry.approval);
        let found = all.find(|one| {
            one.sandbox.id == *sandbox && one.agent_question.as_deref() == Some(question)
        });
        found.cloned()
    }

    /// All that the agent of a sandbox asked, by its numbers.
    pub(in crate::engine) fn all_of_agent(
        &self,
        project: &Name,
        sandbox: &SandboxId,
    ) -> HashSet<String> {
        let table = self.table.read();
        let all = of_project(&table, project).map(|(_, entry)| &entry.approval);
        let here = all.filter(|one| one.sandbox.id == *sandbox);
        here.filter_map(|one| one.agent_question.clone()).collect()
    }

    /// Lists those of a project, newest first.
    pub(in crate::engine) fn list(
        &self,
        project: &Name,
        filter: &ApprovalFilter,
        page: &Page,
    ) -> Result<Paged<Approval>> {
        let before: Option<ApprovalId> = match &page.cursor {
            Some(cursor) => Some(cursor.parse().map_err(|_| {
                Error::invalid("cursor", "this is not `next` of a page of approvals")
            })?),
            None => None,
        };
        let table = self.table.read();
        let all = of_project(&table, project).rev().map(|(_, entry)| &entry.approval);
        let limit = page.limit as usize;
        let mut items: Vec<Approval> = all
            .filter(|one| before.as_ref().is_none_or(|before| one.id < *before))
            .filter(|one| filter.takes(one))
            .take(limit + 1)
            .cloned()
            .collect();
        let more = items.len() > limit;
        items.truncate(limit);
        let next = items.last().filter(|_| more).map(|last| last.id.to_string());
        Ok(Paged { items, next })
    }

    /// Asks. The question is on disk when this returns.
    pub(in crate::engine) async fn ask(
        self: &Arc<Self>,
        project: &Name,
        asked: ToAsk,
    ) -> Result<Approval> {
        check(&asked)?;
        let one = self.changes.lock(project).await;
        self.tenancy.require_project(project)?;
        self.check_room(project, &asked.sandbox)?;
        let wait = asked.expires.unwrap_or(USUAL_WAIT);
        let asked_at = self.now();
        let span = jiff::SignedDuration::from_millis(i64::try_from(wait.0).unwrap_or(i64::MAX));
        let approval = Approval {
            format: FORMAT,
            id: ApprovalId::fresh(),
            project: project.clone(),
            sandbox: asked.sandbox,
            run: asked.run,
            source: asked.source,
            subject: asked.subject,
            target: asked.target,
            question: asked.question,
            context: asked.context,
            status: ApprovalStatus::Pending,
            default: asked.default,
            asked_by: asked.asked_by,
            asked_at,
            expires_at: asked_at.checked_add(span).unwrap_or(Timestamp::MAX),
            answered_by: None,
            answered_at: None,
            comment: String::new(),
            agent_question: asked.agent_question,
        };
        let due = self.context.settings.clock.monotonic() + wait.duration();
        let this = Arc::clone(self);
        // A requester may leave at any moment. A question that is on disk is shown all the same.
        let kept = self.context.tasks.spawn(async move {
            let _one = one;
            this.keep(approval.clone(), due).await?;
            this.tell(&approval, EventData::ApprovalAsked);
            // What a caller asks is recorded where callers are seen.
            if approval.source != ApprovalSource::Harness {
                this.record(&approval, "approval.ask");
            }
            Ok::<_, Error>(approval)
        });
        kept.await.map_err(|_| Error::ShuttingDown)?
    }

    fn check_room(&self, project: &Name, sandbox: &RunSandbox) -> Result<()> {
        let mut pending = self.pending();
        pending.retain(|approval| approval.project == *project);
        let here = pending.iter().filter(|one| one.sandbox.id == sandbox.id).count();
        if here >= MOST_IN_SANDBOX {
            let of = format!("sandbox `{}`", sandbox.name);
            return Err(Error::TooManyApprovals { of, pending: here });
        }
        let all = pending.len();
        if all >= MOST_IN_PROJECT {
            let of = format!("project `{project}`");
            return Err(Error::TooManyApprovals { of, pending: all });
        }
        Ok(())
    }

    /// Answers. `starter` is who started the run it belongs to.
    pub(in crate::engine) async fn answer(
        &self,
        by: &AnsweredBy,
        id: &ApprovalId,
        answer: ApprovalAnswer,
        comment: String,
        starter: Option<&KeyId>,
    ) -> Result<Approval> {
        check_comment(&comment)?;
        let project = &by.project;
        let _one = self.changes.lock(project).await;
        let mut approval = self.get(project, id)?;
        if self.tenancy.project_runs(project)?.separate_approver {
            let askers = [approval.asked_by.as_ref(), starter];
            if askers.into_iter().flatten().any(|asker| *asker == by.key) {
                return Err(Error::SeparateApprover);
            }
        }
        if !approval.is_pending() {
            return Err(Error::ApprovalAnswered { approval: id.clone(), status: approval.status });
        }
        approval.status = match answer {
            ApprovalAnswer::Approve => ApprovalStatus::Approved,
            ApprovalAnswer::Deny => ApprovalStatus::Denied,
        };
        approval.answered_by = Some(by.who.clone());
        approval.answered_at = Some(self.now());
        approval.comment = comment;
        self.keep(approval.clone(), Duration::ZERO).await?;
        self.tell(&approval, EventData::ApprovalAnswered);
        Ok(approval)
    }

    /// Closes an approval that is not needed any more: its default does not count. An answered one
    /// stays as it is.
    pub(in crate::engine) async fn close(&self, approval: &Approval, why: &str) {
        self.end(approval, why, false).await;
    }

    async fn end(&self, approval: &Approval, why: &str, is_due: bool) {
        let _one = self.changes.lock(&approval.project).await;
        let Ok(mut approval) = self.get(&approval.project, &approval.id) else { return };
        if !approval.is_pending() {
            return;
        }
        approval.status = ApprovalStatus::Expired;
        if !is_due {
            approval.default = None;
        }
        approval.answered_at = Some(self.now());
        why.clone_into(&mut approval.comment);
        match self.keep(approval.clone(), Duration::ZERO).await {
            Ok(()) => {
                self.tell(&approval, EventData::ApprovalAnswered);
                self.record(&approval, "approval.close");
            }
            // It is tried again when it is looked at for its expiry.
            Err(error) => {
                tracing::error!(approval = %approval.id, error = error_chain(&error), "an approval was not closed");
                let key = (approval.project, approval.id);
                if let Some(entry) = self.table.write().get_mut(&key) {
                    entry.approval.default = approval.default;
                }
            }
        }
    }

    /// Waits until an approval is answered or expired.
    pub(in crate::engine) async fn answered(
        &self,
        project: &Name,
        id: &ApprovalId,
    ) -> Result<Approval> {
        let mut changed = self.changed.subscribe();
        let shutdown = self.context.tasks.shutdown();
        loop {
            let found = self.get(project, id)?;
            if !found.is_pending() {
                return Ok(found);
            }
            tokio::select! {
                _ = changed.changed() => {}
                () = shutdown.cancelled() => return Err(Error::ShuttingDown),
            }
        }
    }

    /// Asks, and waits for a yes. A caller that leaves takes the question along.
    pub(in crate::engine) async fn hold(
        self: &Arc<Self>,
        project: &Name,
        asked: ToAsk,
    ) -> Result<()> {
        let (this, of) = (Arc::clone(self), project.clone());
        // A requester that leaves meanwhile drops the answer of this task, and with it the
        // question.
        let asking = self.context.tasks.spawn(async move {
            let approval = this.ask(&of, asked).await?;
            let (id, question) = (approval.id.clone(), approval.question.clone());
            let withdraw = Withdraw { approvals: this, approval: Some(approval) };
            Ok::<_, Error>((id, question, withdraw))
        });
        let (id, question, mut withdraw) = asking.await.map_err(|_| Error::ShuttingDown)??;
        let answered = self.answered(project, &id).await?;
        withdraw.approval = None;
        if answered.answer() == Some(ApprovalAnswer::Approve) {
            return Ok(());
        }
        let why = match (answered.status, answered.comment.as_str()) {
            (ApprovalStatus::Denied, "") => "it was denied".to_owned(),
            (ApprovalStatus::Denied, comment) => format!("it was denied: {comment}"),
            (_, comment) => comment.to_owned(),
        };
        Err(Error::NotApproved { approval: id, question, why })
    }

    /// Closes approvals that were not answered in time, and removes the oldest of the answered
    /// ones.
    pub(in crate::engine) async fn tend(&self) {
        let clock = self.context.settings.clock.monotonic();
        for Entry { approval, .. } in
            self.pending_entries().into_iter().filter(|one| one.due <= clock)
        {
            self.end(&approval, "nobody answered in time", true).await;
        }
        for approval in self.surplus() {
            let key = (approval.project, approval.id);
            match self.store.remove::<Approval>(&key).await {
                Ok(()) => self.forget(&key),
                Err(error) => {
                    tracing::warn!(approval = %key.1, error = error_chain(&error), "an old approval was not removed");
                }
            }
        }
    }

    fn forget(&self, key: &Key) {
        if let Some(entry) = self.table.write().remove(key) {
            self.decided.forget(&entry.approval, entry.size);
        }
        self.waiting.write().remove(key);
    }

    /// Forgets all of a project that is deleted.
    pub(in crate::engine) async fn forget_project(&self, project: &Name) -> Result<()> {
        let _one = self.changes.lock(project).await;
        let all: Vec<Key> =
            of_project(&self.table.read(), project).map(|(key, _)| key.clone()).collect();
        for key in all {
            self.store.remove::<Approval>(&key).await?;
            self.forget(&key);
        }
        Ok(())
    }

    async fn keep(&self, approval: Approval, due: Duration) -> Result<()> {
        self.store.write(&approval, Durability::Synced).await?;
        let key = (approval.project.clone(), approval.id.clone());
        let is_pending = approval.is_pending();
        let before = self.table.read().get(&key).map(|entry| entry.size);
        self.decided.replace(&approval, before);
        self.note_ended(&approval);
        let (approval, size) = cut(approval);
        self.table.write().insert(key.clone(), Entry { approval, due, size });
        match is_pending {
            true => drop(self.waiting.write().insert(key)),
            false => drop(self.waiting.write().remove(&key)),
        }
        self.changed.send_modify(|count| *count += 1);
        Ok(())
    }

    /// Records in the audit log what happened without a caller.
    fn record(&self, approval: &Approval, action: &str) {
        let target = format!("approval/{}", approval.id);
        let mut record = AuditRecord::by_system(Some(&approval.project), action, Some(target))
            .with("sandbox", approval.sandbox.name.as_str())
            .with("source", format!("{:?}", approval.source).to_lowercase())
            .with("status", format!("{:?}", approval.status).to_lowercase());
        if let Some(run) = &approval.run {
            record = record.with("run", run.as_str());
        }
        self.context.audit.note(record);
    }

    fn tell(&self, approval: &Approval, what: impl FnOnce(EventApproval) -> EventData) {
        let sandbox = EventSandbox {
            id: approval.sandbox.id.clone(),
            name: approval.sandbox.name.clone(),
            tags: Tags::new(),
        };
        let data = EventApproval {
            approval: approval.id.clone(),
            run: approval.run.clone(),
            subject: approval.subject,
            question: approval.question.clone(),
            status: approval.status,
            expires_at: approval.expires_at,
        };
        self.context.events.emit(Some(&approval.project), Some(sandbox), what(data));
    }
}

fn of_project<'a>(
    table: &'a BTreeMap<Key, Entry>,
    project: &Name,
) -> std::collections::btree_map::Range<'a, Key, Entry> {
    let end = |digit: &str| -> Key {
        let id = format!("apr-{}", digit.repeat(26)).parse();
        (project.clone(), id.expect("an id of the first or the last moment"))
    };
    table.range(end("0")..=end("z"))
}

fn check(asked: &ToAsk) -> Result<()> {
    let ToAsk { question, context, expires, .. } = asked;
    if question.trim().is_empty()
        || question.len() > QUESTION
        || question.chars().any(char::is_control)
    {
        return Err(Error::invalid("question", format!("1 to {QUESTION} bytes, on one line")));
    }
    if context.len() > CONTEXT || context.contains('\0') {
        return Err(Error::invalid("context", format!("at most {CONTEXT} bytes, and no NUL byte")));
    }
    let range = Span::seconds(1)..=LONGEST_WAIT;
    if expires.is_some_and(|span| !range.contains(&span)) {
        return Err(Error::invalid("expires", "between 1s and 30d"));
    }
    Ok(())
}

/// How many of these, the oldest first, are more than are kept.
pub(in crate::engine) fn beyond(
    sizes: impl DoubleEndedIterator<Item = u64> + ExactSizeIterator,
    most: usize,
    most_bytes: u64,
) -> usize {
    let (mut bytes, mut kept) = (0, 0);
    let count = sizes.len();
    for size in sizes.rev().take(most) {
        bytes += size;
        if bytes > most_bytes {
            break;
        }
        kept += 1;
    }
    count - kept
}

/// Checks what somebody says about a decision.
pub(in crate::engine) fn check_comment(comment: &str) -> Result<()> {
    if comment.len() > COMMENT || comment.contains('\0') {
        return Err(Error::invalid("comment", format!("at most {COMMENT} bytes, no NUL byte")));
    }
    Ok(())
}

/// Closes a question whose asker is gone.
struct Withdraw {
    approvals: Arc<Approvals>,
    approval: Option<Approval>,
}

impl Drop for Withdraw {
    fn drop(&mut self) {
        let Some(approval) = self.approval.take() else { return };
        if Handle::try_current().is_err() {
            return;
        }
        let approvals = Arc::clone(&self.approvals);
        self.approvals.context.tasks.spawn(async move {
            approvals.close(&approval, "whoever asked is gone").await;
        });
    }
}
