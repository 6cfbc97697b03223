//! `keep approvals` and `keep ask`: questions that hold an effect until somebody answers.

use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, ExitCode};

use sandkeep_client::ApprovalQuery;
use sandkeep_client::types::{
    AnswerApproval, Approval, ApprovalAnswer, ApprovalStatus, AskApproval,
};

use super::{Context, facts, for_each, or_dash, word};
use crate::args::{AnswerArg, ApprovalsCommand, AskArgs};
use crate::failure::Failure;
use crate::screen::{Table, note};
use crate::when;

/// How long one request waits for an answer.
const WAIT: u64 = 30;
/// The program that asks, inside a sandbox.
const INSIDE: &str = "/run/sandkeep/bin/keep";

pub(super) async fn approvals(
    context: &Context,
    command: ApprovalsCommand,
) -> Result<ExitCode, Failure> {
    match command {
        ApprovalsCommand::Ls { all, sandbox, run, limit } => {
            let status = (!all).then_some(ApprovalStatus::Pending);
            let query = ApprovalQuery { status, sandbox, run };
            let most = usize::try_from(limit).unwrap_or(usize::MAX);
            let found = context.client.approvals(&query, Some(limit.clamp(1, 1000)));
            let found = found.collect(Some(most)).await?;
            context.screen.answer(&found, |found| context.screen.table(&table(found)))?;
        }
        ApprovalsCommand::Show { ids } => {
            for_each(context, &ids, async |id| {
                let found = context.client.approval(&id, None).await?;
                context
                    .screen
                    .answer(&found, |found| facts(context.screen.paint, &described(found)))
            })
            .await?;
        }
        ApprovalsCommand::Ask { sandbox, question, context: about, expires, default } => {
            let default = default.map(answer_of);
            let request = AskApproval { question, context: about, expires, default };
            return ask_and_wait(context, &sandbox, &request).await;
        }
        ApprovalsCommand::Approve(args) => {
            answer_all(context, &args.ids, ApprovalAnswer::Approve, &args.comment).await?;
        }
        ApprovalsCommand::Deny(args) => {
            answer_all(context, &args.ids, ApprovalAnswer::Deny, &args.comment).await?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn answer_of(answer: AnswerArg) -> ApprovalAnswer {
    match answer {
        AnswerArg::Approve => ApprovalAnswer::Approve,
        AnswerArg::Deny => ApprovalAnswer::Deny,
    }
}

async fn ask_and_wait(
    context: &Context,
    sandbox: &str,
    request: &AskApproval,
) -> Result<ExitCode, Failure> {
    let asked = context.client.ask_approval(sandbox, request).await?;
    if !context.screen.json {
        note(&format!("{}  waits for an answer", asked.id));
    }
    loop {
        let now = context.client.approval(&asked.id, Some(WAIT)).await?;
        let default = match now.default {
            Some(ApprovalAnswer::Approve) => 0,
            Some(ApprovalAnswer::Deny) => 1,
            None => 2,
        };
        let code = match now.status {
            ApprovalStatus::Pending => continue,
            ApprovalStatus::Approved => 0,
            ApprovalStatus::Denied => 1,
            ApprovalStatus::Expired => default,
        };
        context.screen.answer(&now, approval_text)?;
        return Ok(ExitCode::from(code));
    }
}

/// Gives one answer to several approvals.
pub(super) async fn answer_all(
    context: &Context,
    ids: &[String],
    answer: ApprovalAnswer,
    comment: &str,
) -> Result<(), Failure> {
    for_each(context, ids, async |id| {
        let request = AnswerApproval { answer, comment: comment.to_owned() };
        let answered = context.client.answer_approval(&id, &request).await?;
        context.screen.answer(&answered, approval_text)
    })
    .await
}

/// `apr-…  approved: deploy to prod?`.
pub(super) fn approval_text(approval: &Approval) -> String {
    let said = match approval.comment.as_str() {
        "" => String::new(),
        comment => format!(" ({})", comment.replace(char::is_control, " ")),
    };
    format!("{}  {}: {}{said}\n", approval.id, word(approval.status), approval.question)
}

fn table(approvals: &[Approval]) -> Table {
    let mut table = Table::new(&[
        "APPROVAL", "STATUS", "SANDBOX", "HELD", "FROM", "ASKED", "EXPIRES", "QUESTION",
    ]);
    for approval in approvals {
        let pending = approval.status == ApprovalStatus::Pending;
        let until = when::until(Some(&approval.expires_at).filter(|_| pending).map(String::as_str));
        table.row(vec![
            approval.id.clone(),
            word(approval.status),
            approval.sandbox.clone(),
            word(approval.subject),
            word(approval.source),
            when::ago(&approval.asked_at),
            until,
            approval.question.clone(),
        ]);
    }
    table
}

fn described(approval: &Approval) -> Vec<(&'static str, String)> {
    vec![
        ("approval", approval.id.clone()),
        ("status", word(approval.status)),
        ("question", approval.question.clone()),
        ("context", approval.context.clone()),
        ("sandbox", approval.sandbox.clone()),
        ("run", or_dash(approval.run.clone())),
        ("from", word(approval.source)),
        ("held", word(approval.subject)),
        ("decides", or_dash(approval.target.clone())),
        ("asked by", or_dash(approval.asked_by.clone())),
        ("asked", when::ago(&approval.asked_at)),
        ("expires", approval.expires_at.clone()),
        ("default", or_dash(approval.default.map(word))),
        ("answered by", or_dash(approval.answered_by.clone())),
        ("answered", or_dash(approval.answered_at.clone())),
        ("comment", approval.comment.clone()),
    ]
}

/// Asks from inside a sandbox: the program that does so exists there.
pub(super) fn ask(args: &AskArgs) -> Failure {
    if !Path::new(INSIDE).exists() {
        let hint = "outside, `keep approvals ask SANDBOX QUESTION` asks about a sandbox";
        let problem =
            "this is not the inside of a sandbox with an approval policy or a run under way";
        return Failure::here(problem).with_hint(hint);
    }
    let error = Command::new(INSIDE).arg("ask").args(&args.words).exec();
    Failure::caused("cannot start the program that asks", error)
}
