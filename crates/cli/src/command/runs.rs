//! `keep runs`: start, follow, review, decide.

use std::process::ExitCode;

use sandkeep_client::types::{
    AcceptRule, AcceptRun, ApprovalAnswer, ApprovalStatus, CancelRun, FinishRun, RejectRun, Run,
    RunAccepted, RunCommand, RunHeartbeat, RunPlace, RunReview, RunSpending, RunStatus,
    SpendingKind, StartRun,
};
use sandkeep_client::{ApprovalQuery, DiffQuery, PatchFormat, RunQuery};

use super::approvals::{answer_all, approval_text};
use super::fork::{change_line, counts_text};
use super::{Context, bytes, exec, facts, for_each, history, or_dash, word};
use crate::args::{
    AcceptRuleArg, AnswerRunArgs, ListRunsArgs, RunStatusArg, RunsCommand, StartRunArgs,
};
use crate::failure::Failure;
use crate::screen::{Paint, Table, note};
use crate::when;

/// How long one request waits for a run.
const WAIT: u64 = 30;

pub(super) async fn runs(context: &Context, command: RunsCommand) -> Result<ExitCode, Failure> {
    let client = &context.client;
    let shown = |run: &Run| shown(context, run);
    match command {
        RunsCommand::Start(args) => return start(context, *args).await,
        RunsCommand::Wait { run } => return wait(context, &run).await,
        RunsCommand::Ls(args) => list(context, args).await?,
        RunsCommand::Show { runs } => {
            for_each(context, &runs, async |id| shown(&client.run(&id, None).await?)).await?;
        }
        RunsCommand::Logs { run, follow, attempt } => logs(context, &run, follow, attempt).await?,
        RunsCommand::Cancel { runs, comment } => {
            for_each(context, &runs, async |id| {
                let request = CancelRun { comment: comment.clone() };
                in_short(context, &client.cancel_run(&id, &request).await?)
            })
            .await?;
        }
        RunsCommand::Heartbeat { run, cost } => {
            in_short(context, &client.run_heartbeat(&run, &RunHeartbeat { cost }).await?)?;
        }
        RunsCommand::Finish { run, failure, cost } => {
            let request = FinishRun { failure, cost };
            in_short(context, &client.finish_run(&run, &request).await?)?;
        }
        RunsCommand::Approve(args) => answer(context, args, ApprovalAnswer::Approve).await?,
        RunsCommand::Deny(args) => answer(context, args, ApprovalAnswer::Deny).await?,
        RunsCommand::Review { run, again } => {
            let review = match again {
                true => client.pin_run_again(&run).await?,
                false => client.review_run(&run).await?,
            };
            context.screen.answer(&review, |review| review_text(context, review))?;
        }
        RunsCommand::Accept { run, how, comment, rm } => {
            let how = how.map(on_accept);
            accept(context, &run, &AcceptRun { how, comment, delete_sandbox: rm }).await?;
        }
        RunsCommand::Reject { run, comment } => {
            in_short(context, &client.reject_run(&run, &RejectRun { comment }).await?)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn on_accept(how: AcceptRuleArg) -> AcceptRule {
    match how {
        AcceptRuleArg::Promote => AcceptRule::Promote,
        AcceptRuleArg::Merge => AcceptRule::Merge,
        AcceptRuleArg::Patch => AcceptRule::Patch,
        AcceptRuleArg::Keep => AcceptRule::Keep,
    }
}

fn status(status: RunStatusArg) -> RunStatus {
    match status {
        RunStatusArg::Queued => RunStatus::Queued,
        RunStatusArg::Running => RunStatus::Running,
        RunStatusArg::WaitingForApproval => RunStatus::WaitingForApproval,
        RunStatusArg::ReadyForReview => RunStatus::ReadyForReview,
        RunStatusArg::Accepted => RunStatus::Accepted,
        RunStatusArg::Rejected => RunStatus::Rejected,
        RunStatusArg::Failed => RunStatus::Failed,
        RunStatusArg::Cancelled => RunStatus::Cancelled,
        RunStatusArg::Expired => RunStatus::Expired,
    }
}

async fn start(context: &Context, args: StartRunArgs) -> Result<ExitCode, Failure> {
    let place = match (args.sandbox, args.fork) {
        (Some(sandbox), true) => RunPlace::Fork { sandbox, name: args.name },
        (Some(_), false) if args.name.is_some() => {
            return Err(Failure::here("--name needs --fork or --fresh"));
        }
        (Some(sandbox), false) => RunPlace::Existing { sandbox },
        (None, _) => RunPlace::Fresh { image: args.image, name: args.name },
    };
    let command = (!args.argv.is_empty()).then(|| RunCommand {
        argv: args.argv,
        env: args.env.into_iter().collect(),
        cwd: args.cwd,
        user: args.user,
    });
    let request = StartRun {
        place,
        command,
        repository: args.repo,
        owner: args.owner,
        purpose: args.purpose,
        class: args.class,
        priority: args.priority,
        approve: args.approve,
        approve_hosts: args.approve_hosts,
        known_hosts: args.known_host,
        approve_secrets: args.approve_secret,
        spending: args.spending_limit,
        on_accept: args.on_accept.map(on_accept),
        keep: args.keep,
        timeout: args.timeout,
        retries: args.retries,
        heartbeat: args.heartbeat,
    };
    let run = context.client.start_run(&request).await?;
    if args.wait {
        if !context.screen.json {
            note(&format!("{}  started", run.id));
        }
        return wait(context, &run.id).await;
    }
    context.screen.answer(&run, |run| format!("{}\n", run.id))?;
    Ok(ExitCode::SUCCESS)
}

async fn wait(context: &Context, id: &str) -> Result<ExitCode, Failure> {
    loop {
        let run = context.client.run(id, Some(WAIT)).await?;
        let code = match run.status {
            RunStatus::Queued | RunStatus::Running => continue,
            RunStatus::ReadyForReview | RunStatus::Accepted => 0,
            RunStatus::WaitingForApproval => 2,
            RunStatus::Rejected | RunStatus::Failed | RunStatus::Cancelled | RunStatus::Expired => {
                1
            }
        };
        in_short(context, &run)?;
        return Ok(ExitCode::from(code));
    }
}

fn in_short(context: &Context, run: &Run) -> Result<(), Failure> {
    context.screen.answer(run, |run| {
        let why = run.why.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
        let mut text = format!("{}  {}{why}\n", run.id, word(run.status));
        for approval in &run.pending_approvals {
            text.push_str(&format!(
                "waits for {approval}; `keep runs approve {}` or deny\n",
                run.id
            ));
        }
        text
    })
}

async fn list(context: &Context, args: ListRunsArgs) -> Result<(), Failure> {
    let query = RunQuery {
        statuses: args.status.into_iter().map(status).collect(),
        sandbox: args.sandbox,
        owner: args.owner,
        repository: args.repo,
    };
    let most = usize::try_from(args.limit).unwrap_or(usize::MAX);
    let all = context.client.runs(&query, Some(args.limit.clamp(1, 1000))).collect(Some(most));
    let all = all.await?;
    context.screen.answer(&all, |all| {
        if args.quiet {
            return all.iter().map(|run| format!("{}\n", run.id)).collect();
        }
        let mut table =
            Table::new(&["RUN", "STATUS", "SANDBOX", "QUEUED", "OWNER", "REPOSITORY", "PURPOSE"]);
        for run in all {
            table.row(vec![
                run.id.clone(),
                word(run.status),
                or_dash(run.sandbox.clone()),
                when::ago(&run.queued_at),
                run.owner.clone(),
                run.repository.clone(),
                run.purpose.clone(),
            ]);
        }
        context.screen.table(&table)
    })
}

fn shown(context: &Context, run: &Run) -> Result<(), Failure> {
    context.screen.answer(run, |run| described(context.screen.paint, run))
}

/// What somebody has to approve.
fn held(run: &Run) -> String {
    let mut held = run.approve.clone();
    if run.approve_hosts {
        held.push(match run.known_hosts.as_slice() {
            [] => "new hosts".to_owned(),
            known => format!("new hosts, but for {}", known.join(" ")),
        });
    }
    held.extend(run.approve_secrets.iter().map(|secret| format!("secret {secret}")));
    held.join(", ")
}

fn spending(limit: &RunSpending) -> String {
    let amount = |number: f64| match limit.what {
        SpendingKind::Cpu | SpendingKind::Time => format!("{number}s"),
        SpendingKind::Network => bytes(whole(number)),
        SpendingKind::Cost => number.to_string(),
    };
    format!("{} {} (+{})", word(limit.what), amount(limit.allowed), amount(limit.step))
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "it is shown to people"
)]
fn whole(number: f64) -> u64 {
    number as u64
}

fn described(paint: Paint, run: &Run) -> String {
    let place = match &run.place {
        RunPlace::Existing { sandbox } => format!("in {sandbox}"),
        RunPlace::Fork { sandbox, .. } => format!("a fork of {sandbox}"),
        RunPlace::Fresh { .. } => "a new sandbox".to_owned(),
    };
    let command = run
        .command
        .as_ref()
        .map_or("(a harness drives it)".to_owned(), |command| command.argv.join(" "));
    let mut lines = vec![
        ("run", run.id.clone()),
        ("status", word(run.status)),
        ("why", or_dash(run.why.clone())),
        ("place", place),
        ("sandbox", or_dash(run.sandbox.clone())),
        ("command", command),
        ("purpose", run.purpose.clone()),
        ("owner", run.owner.clone()),
        ("repository", run.repository.clone()),
        ("started by", run.by.clone()),
        ("on accept", word(run.on_accept)),
        ("held", held(run)),
        ("may use", run.spending.iter().map(spending).collect::<Vec<_>>().join(", ")),
        ("waits for", run.pending_approvals.join(", ")),
        ("first snapshot", or_dash(run.first_snapshot.clone())),
        ("last snapshot", or_dash(run.last_snapshot.clone())),
        ("queued", when::ago(&run.queued_at)),
        ("review until", when::until(run.review_by.as_deref())),
    ];
    if let Some(started) = &run.started_at {
        lines.push(("took", when::between(started, run.finished_at.as_deref())));
    }
    if let Some(usage) = &run.usage {
        let (cpu, sent) = (when::exact(usage.active_cpu_ms), bytes(usage.network_out_bytes));
        lines.push(("used", format!("{cpu} of CPU, {sent} sent")));
    }
    lines.extend(run.cost.map(|cost| ("cost", cost.to_string())));
    if let Some(decision) = &run.decision {
        let what = if decision.accepted { "accepted" } else { "rejected" };
        let how = decision.how.map(|how| format!(" ({})", word(how))).unwrap_or_default();
        let said = format!("{what}{how} by {}: {}", decision.by, decision.comment);
        lines.push(("decision", said.trim_end_matches([':', ' ']).to_owned()));
    }
    let mut text = facts(paint, &lines);
    for (number, attempt) in (1..).zip(&run.attempts) {
        let end = match (&attempt.problem, attempt.exit_code) {
            (Some(problem), _) => problem.clone(),
            (None, Some(code)) => format!("ended with {code}"),
            (None, None) => "running".to_owned(),
        };
        text.push_str(&format!("attempt {number}: {}  {end}\n", attempt.command));
    }
    text
}

async fn logs(
    context: &Context,
    id: &str,
    follow: bool,
    attempt: Option<usize>,
) -> Result<(), Failure> {
    let run = context.client.run(id, None).await?;
    let found = match attempt {
        Some(number) => number.checked_sub(1).and_then(|at| run.attempts.get(at)),
        None => run.attempts.last(),
    };
    let none = || Failure::here(format!("run `{id}` has started no such command"));
    let (Some(attempt), Some(sandbox)) = (found, &run.sandbox) else { return Err(none()) };
    exec::print_log(context, sandbox, &attempt.command, follow).await
}

async fn answer(
    context: &Context,
    args: AnswerRunArgs,
    answer: ApprovalAnswer,
) -> Result<(), Failure> {
    let status = Some(ApprovalStatus::Pending);
    let query = ApprovalQuery { status, run: Some(args.run.clone()), ..ApprovalQuery::default() };
    let pending = context.client.approvals(&query, None).collect(None).await?;
    let ids: Vec<String> = pending.iter().map(|approval| approval.id.clone()).collect();
    match ids.len() {
        0 => {
            let hint = format!("`keep runs show {}` tells how it stands", args.run);
            let failure = Failure::here(format!("run `{}` waits for no approval", args.run));
            Err(failure.with_hint(hint))
        }
        1 => answer_all(context, &ids, answer, &args.comment).await,
        _ if args.all => answer_all(context, &ids, answer, &args.comment).await,
        count => {
            let named: Vec<String> =
                pending.iter().map(|one| format!("{} ({})", one.id, one.question)).collect();
            let failure = Failure::here(format!(
                "run `{}` waits for {count} approvals: {}",
                args.run,
                named.join(", ")
            ));
            let hint = "answer one with `keep approvals approve ID` or deny, or all with --all";
            Err(failure.with_hint(hint))
        }
    }
}

fn review_text(context: &Context, review: &RunReview) -> String {
    let paint = context.screen.paint;
    let mut text = described(paint, &review.run);
    let heading = |title: &str| format!("\n{}\n", paint.bold(title));
    if !review.current {
        let run = &review.run.id;
        text.push_str(&format!(
            "\nThe sandbox has changed since this was pinned: `keep runs review {run} --again` pins what it is now.\n"
        ));
    }
    text.push_str(&heading(&format!("Changes from {} to {}", review.from, review.to)));
    text.extend(review.changes.iter().map(|change| change_line(paint, change)));
    match (&review.counts, &review.problem) {
        (Some(counts), _) => text.push_str(&format!("{}\n", counts_text(counts))),
        (None, problem) => text.push_str(&format!("{}\n", or_dash(problem.clone()))),
    }
    if !review.commands.is_empty() {
        text.push_str(&heading("Commands that changed something, newest first"));
        for command in &review.commands {
            let changed = command.changes.as_ref().map_or("?".to_owned(), history::shown);
            text.push_str(&format!("{}  {}  {changed}\n", command.id, command.argv.join(" ")));
        }
    }
    if !review.network.is_empty() {
        text.push_str(&heading("Network"));
        for place in &review.network {
            let denied = match place.denied {
                0 => String::new(),
                denied => format!(", {denied} denied"),
            };
            let (got, sent) = (bytes(place.bytes_in), bytes(place.bytes_out));
            text.push_str(&format!(
                "{}  {} connections{denied}, {got} received, {sent} sent\n",
                place.host, place.connections
            ));
        }
    }
    if !review.findings.is_empty() {
        text.push_str(&heading("Findings of the guard"));
        text.push_str(&super::guard::findings_text(&review.findings));
    }
    if !review.approvals.is_empty() {
        text.push_str(&heading("Approvals"));
        text.extend(review.approvals.iter().map(approval_text));
    }
    text
}

async fn accept(context: &Context, id: &str, request: &AcceptRun) -> Result<(), Failure> {
    let accepted: RunAccepted = context.client.accept_run(id, request).await?;
    let how = accepted.run.decision.as_ref().and_then(|decision| decision.how);
    if how == Some(AcceptRule::Patch) && !context.screen.json {
        note(&format!("{id}  accepted; the patch follows"));
        let query = DiffQuery { from: accepted.from, to: accepted.to, paths: Vec::new() };
        let mut patch = context.client.patch(&query, &PatchFormat::default()).await?;
        while let Some(piece) = patch.next().await? {
            context.screen.bytes(&piece)?;
        }
        return Ok(());
    }
    context.screen.answer(&accepted, |accepted| {
        let mut text = format!("{id}  accepted\n");
        if let Some(promoted) = &accepted.promoted {
            let (name, generation) = (&promoted.sandbox.name, promoted.sandbox.generation);
            text.push_str(&format!("{name}  promoted, generation {generation}\n"));
            if let Some(before) = &promoted.before {
                text.push_str(&format!("to undo: keep rollback {name} {before}\n"));
            }
        }
        text
    })
}
