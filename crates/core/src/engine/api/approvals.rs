//! Approvals: ask, list, answer.

use crate::db::{Page, Paged};
use crate::engine::governance::approvals::{AnsweredBy, ApprovalFilter, ToAsk};
use crate::engine::governance::runs::place;
use crate::engine::webhooks::AnswerLink;
use crate::engine::{Caller, Engine, Error, Result};
use crate::model::{
    Answerer, Approval, ApprovalAnswer, ApprovalId, ApprovalSource, ApprovalSubject, Name, Scope,
    Span,
};

/// A question of a caller.
#[derive(Debug, Clone, Default)]
pub struct AskRequest {
    /// The question.
    pub question: String,
    /// What there is to know before answering.
    pub context: String,
    /// How long to wait.
    pub expires: Option<Span>,
    /// The answer that counts when it expires.
    pub default: Option<ApprovalAnswer>,
}

impl Engine {
    /// Asks for an approval about a sandbox. The run under way in it waits for the answer.
    ///
    /// # Errors
    ///
    /// Returns [`Error::TooManyApprovals`] when too many wait already.
    pub async fn ask_approval(
        &self,
        caller: &Caller,
        name: &Name,
        request: AskRequest,
    ) -> Result<Approval> {
        let sandbox = self.parts.lifecycle.find(&caller.project, name).await?;
        let to_ask = ToAsk {
            sandbox: place(&sandbox),
            run: self.parts.runs.active_in(&sandbox.id).map(|run| run.id),
            source: ApprovalSource::Harness,
            subject: ApprovalSubject::Question,
            target: None,
            question: request.question,
            context: request.context,
            default: request.default,
            expires: request.expires,
            asked_by: Some(caller.key.clone()),
            agent_question: None,
        };
        self.parts.runs.approvals.ask(&caller.project, to_ask).await
    }

    /// Finds an approval.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoApproval`] when the project has none of that id.
    pub fn approval(&self, project: &Name, id: &ApprovalId) -> Result<Approval> {
        self.parts.runs.approvals.get(project, id)
    }

    /// Approvals with all their texts: of those that are over, lists and [`approval`](Self::approval) have only short
    /// ones.
    pub async fn whole_approvals(&self, all: Vec<Approval>) -> Vec<Approval> {
        self.parts.runs.approvals.whole(all).await
    }

    /// Waits until an approval is answered or expired.
    ///
    /// # Errors
    ///
    /// As [`approval`](Self::approval).
    pub async fn approval_answered(&self, project: &Name, id: &ApprovalId) -> Result<Approval> {
        self.parts.runs.approvals.answered(project, id).await
    }

    /// Lists approvals, newest first.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Invalid`] for a cursor that is none.
    pub fn approvals(
        &self,
        project: &Name,
        filter: &ApprovalFilter,
        page: &Page,
    ) -> Result<Paged<Approval>> {
        self.parts.runs.approvals.list(project, filter, page)
    }

    /// Answers an approval. The caller must be one that may approve.
    ///
    /// # Errors
    ///
    /// Returns [`Error::ApprovalAnswered`] when it does not wait any more, and
    /// [`Error::SeparateApprover`] when somebody else has to answer.
    pub async fn answer_approval(
        &self,
        caller: &Caller,
        id: &ApprovalId,
        answer: ApprovalAnswer,
        comment: String,
    ) -> Result<Approval> {
        let who = Answerer::Key(caller.key.clone());
        let by = AnsweredBy { project: caller.project.clone(), who, key: caller.key.clone() };
        self.answer_as(&by, id, answer, comment).await
    }

    /// Whose link this token is: one that a webhook got for this approval.
    ///
    /// # Errors
    ///
    /// Returns [`Error::AnswerLink`] when it is nobody's, or not any more.
    pub fn answer_link(&self, token: &str, id: &ApprovalId) -> Result<AnswerLink> {
        let link = self.parts.webhooks.answer_link(token, id)?;
        let key = self.parts.tenancy.key(&link.allowed_by);
        let may = key.is_some_and(|(home, key)| {
            key.scope == Scope::Admin || (key.approve && home == link.project)
        });
        if !may {
            return Err(Error::AnswerLink(
                "the key that allowed the webhook to answer was revoked, has expired or may not approve any more",
            ));
        }
        Ok(link)
    }

    /// Answers an approval with a link that a webhook got. The link works until the approval is answered or expires.
    ///
    /// # Errors
    ///
    /// As [`answer_approval`](Self::answer_approval) and [`answer_link`](Self::answer_link).
    pub async fn answer_by_link(
        &self,
        token: &str,
        id: &ApprovalId,
        answer: ApprovalAnswer,
        comment: String,
    ) -> Result<Approval> {
        let AnswerLink { webhook, project, allowed_by } = self.answer_link(token, id)?;
        let by = AnsweredBy { project, who: Answerer::Webhook(webhook), key: allowed_by };
        self.answer_as(&by, id, answer, comment).await
    }

    async fn answer_as(
        &self,
        by: &AnsweredBy,
        id: &ApprovalId,
        answer: ApprovalAnswer,
        comment: String,
    ) -> Result<Approval> {
        let runs = &self.parts.runs;
        let approval = runs.approvals.get(&by.project, id)?;
        let run = approval.run.and_then(|run| runs.get(&by.project, &run).ok());
        let starter = run.map(|run| run.by);
        runs.approvals.answer(by, id, answer, comment, starter.as_ref()).await
    }
}
