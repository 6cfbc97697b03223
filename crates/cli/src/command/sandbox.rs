//! Commands about sandboxes: their life, their settings, their sessions.

use std::collections::BTreeMap;

use sandkeep_client::ListSandboxes;
use sandkeep_client::types::{
    Checkpoint, CommandsKept, CreateSandbox, Delete, Extend, Finding, Fork, ForkFailed, Forks,
    HookRun, IfExists, OnAccept, Opened, Pause, Paused, Rollback, Sandbox, Session, SessionChanges,
    Snapshot, Start, State, Stop, Stopped, UpdateSandbox, Why,
};

use super::guard::findings_text;
use super::{Context, bytes, facts, for_each, history, or_dash, pairs, patiently, resolve, word};
use crate::args::{
    CheckpointArgs, CreateArgs, ForkArgs, IfExistsArg, ListArgs, OnAcceptArg, PauseArgs, PhaseArg,
    RemoveArgs, RollbackArgs, SessionsArgs, StartArgs, StopArgs, UpdateArgs,
};
use crate::failure::Failure;
use crate::screen::{Paint, Table, note, state_colour};
use crate::settings::{self, change};
use crate::when;

pub(super) async fn create(context: &Context, args: CreateArgs) -> Result<(), Failure> {
    let settings = UpdateSandbox { image: args.image, ..change(args.settings)? };
    let from = match &args.from {
        Some(wanted) => Some(resolve::snapshot(context, None, wanted).await?),
        None => None,
    };
    let if_exists = match args.get || args.if_exists == IfExistsArg::Get {
        true => IfExists::Get,
        false => IfExists::Fail,
    };
    let request = CreateSandbox {
        name: args.name,
        if_exists,
        start: Some(!args.no_start),
        from,
        ..CreateSandbox::default()
    }
    .with_settings(settings);
    let creating = context.client.create(&request, args.idempotency_key.as_deref());
    let opened = patiently(creating).await?;
    tell_session(&opened.sandbox.name, opened.session.as_ref());
    context.screen.answer(&opened, |opened| {
        let done = if opened.created { "created" } else { "exists" };
        opened_line(opened, done)
    })?;
    match failed_hook(&opened.sandbox.name, opened.session.as_ref()) {
        Some(failure) => Err(failure),
        None => Ok(()),
    }
}

/// The failure of a creation whose hooks went wrong. [`tell_session`] has said which.
pub(super) fn failed_hook(name: &str, session: Option<&Session>) -> Option<Failure> {
    let hooks = session.map(|session| session.hooks.as_slice()).unwrap_or_default();
    let failed = hooks.iter().find(|run| run.hook == "on_create" && went_wrong(run))?;
    let what = failed.argv.last().map_or("", String::as_str);
    let advice = format!(
        "`keep sh {name}` looks around in it; `keep rm {name}` deletes it, so that it can be created again"
    );
    let message = format!("`{name}` was created, but its on_create hook `{what}` failed");
    Some(Failure::here(message).with_hint(advice))
}

fn went_wrong(run: &HookRun) -> bool {
    run.exit_code != Some(0) || run.problem.is_some()
}

fn opened_line(opened: &Opened, done: &str) -> String {
    let Sandbox { name, state, generation, .. } = &opened.sandbox;
    format!("{name}  {done}, {}, generation {generation}\n", word(state))
}

/// Says on standard error that memory was lost, which hooks went wrong and whether `validate` was content.
pub(super) fn tell_session(name: &str, session: Option<&Session>) {
    let Some(session) = session else { return };
    let paint = Paint::for_errors();
    if let Some(why) = &session.fallback {
        let (warning, generation) = (paint.yellow("warning:"), session.generation);
        note(&format!(
            "{warning} {name} started from its files at generation {generation}, without its memory and processes: {why}"
        ));
    }
    for run in session.hooks.iter().filter(|run| went_wrong(run)) {
        let HookRun { hook, argv, exit_code, problem, command } = run;
        let how = match (problem, exit_code) {
            (Some(problem), _) => problem.clone(),
            (None, Some(code)) => format!("exit code {code}"),
            (None, None) => "the hook could not be started".to_owned(),
        };
        let what = argv.last().map_or("", String::as_str);
        note(&format!("{} {hook} hook `{what}`: {how}", paint.yellow("warning:")));
        if let Some(command) = command {
            let hint = paint.cyan("hint:");
            note(&format!("{hint} `keep logs {name} {command}` shows what it printed"));
        }
    }
    if session.valid == Some(false) {
        let warning = paint.yellow("warning:");
        note(&format!("{warning} the output of the validate hook differs from the last stop"));
    }
}

pub(super) async fn start(context: &Context, args: &StartArgs) -> Result<(), Failure> {
    let request = Start { expect_generation: args.expect_generation };
    let opened = context.client.start(&args.name, &request).await?;
    tell_session(&opened.sandbox.name, opened.session.as_ref());
    context.screen.answer(&opened, |opened| {
        opened_line(opened, if opened.resumed { "woken" } else { "awake already" })
    })
}

pub(super) async fn stop(context: &Context, args: StopArgs) -> Result<(), Failure> {
    let StopArgs { names, all, all_projects, redact, discard, promote, drop, accept_doubtful } =
        args;
    let request = Stop { redact, discard, promote, drop, accept_doubtful };
    if all {
        return stop_all(context, all_projects, &request).await;
    }
    stop_each(context, &names, &request).await
}

async fn stop_each(context: &Context, names: &[String], request: &Stop) -> Result<(), Failure> {
    for_each(context, names, async |name| {
        let stopped = context.client.stop_deciding(&name, request, None).await?;
        context.screen.answer(&stopped, |stopped| stopped_text(context.screen.paint, stopped))
    })
    .await
}

/// Stops whatever runs, in one project or in all of them. One that does not stop keeps no other from it.
async fn stop_all(context: &Context, everywhere: bool, request: &Stop) -> Result<(), Failure> {
    let mut places = vec![Context { client: context.client.clone(), screen: context.screen }];
    if everywhere {
        places.clear();
        for project in context.client.projects().await? {
            let client = context.client.for_project(&project.name)?;
            places.push(Context { client, screen: context.screen });
        }
    }
    let mut outcome = Ok(());
    for place in &places {
        let mut names = Vec::new();
        for state in [State::Running, State::Starting] {
            let filter = ListSandboxes { state: Some(state), ..ListSandboxes::default() };
            let found = place.client.sandboxes(&filter).collect(None).await?;
            names.extend(found.into_iter().map(|sandbox| sandbox.name));
        }
        let stopped = stop_each(place, &names, request).await;
        if let (Err(_), Err(earlier)) = (&stopped, &outcome) {
            Failure::tell(earlier, context.screen.json, Failure::exit_code(earlier));
        }
        outcome = stopped.and(outcome);
    }
    outcome
}

fn stopped_text(paint: Paint, stopped: &Stopped) -> String {
    let name = &stopped.sandbox.name;
    let Some(usage) = stopped.usage else {
        return format!("{name}  stopped already, generation {}\n", stopped.sandbox.generation);
    };
    let kept = match &stopped.snapshot {
        Some(snapshot) => format!("{}  {}", snapshot.id, own_size(snapshot)),
        None if stopped.sandbox.persistent => "nothing was written".to_owned(),
        None => "none: not persistent".to_owned(),
    };
    let network =
        format!("{} in, {} out", bytes(usage.network_in_bytes), bytes(usage.network_out_bytes));
    let heading = format!("{name}  stopped, generation {}\n", stopped.sandbox.generation);
    let found = found_text(&stopped.findings);
    heading
        + &facts(
            paint,
            &[
                ("  snapshot", kept),
                ("  active CPU", when::exact(usage.active_cpu_ms)),
                ("  memory peak", bytes(usage.memory_peak_bytes)),
                ("  network", network),
                ("  wall time", when::exact(usage.wall_ms)),
            ],
        )
        + &found
}

pub(super) fn own_size(snapshot: &Snapshot) -> String {
    or_dash(snapshot.size.map(|size| bytes(size.own_bytes)))
}

pub(super) async fn fork(context: &Context, args: ForkArgs) -> Result<(), Failure> {
    let mut settings = change(args.settings)?;
    settings.expires = args.ttl.or(settings.expires);
    if settings.tags.is_some() || settings.env.is_some() {
        // The API replaces a map as a whole; on the command line a tag is added to the source's.
        let source = context.client.sandbox(&args.source).await?;
        settings.tags = added(source.tags, settings.tags, &[]);
        settings.env = added(source.env, settings.env, &[]);
    }
    let from = match &args.from {
        Some(wanted) => Some(resolve::snapshot(context, Some(&args.source), wanted).await?),
        None => None,
    };
    let request = Fork {
        name: args.name,
        count: args.count,
        from,
        expect_generation: args.expect_generation,
        start: args.start,
        on_accept: match args.on_accept {
            OnAcceptArg::Keep => OnAccept::Keep,
            OnAcceptArg::Delete => OnAccept::Delete,
        },
        ..Fork::default()
    }
    .with_settings(settings);
    let key = args.idempotency_key.as_deref();
    if args.count.is_some() {
        let forks = context.client.fork_many(&args.source, &request, key).await?;
        return many_forks(context, &args.source, &forks);
    }
    let opened = context.client.fork(&args.source, &request, key).await?;
    tell_session(&opened.sandbox.name, opened.session.as_ref());
    context.screen.answer(&opened, |opened| forked_line(opened, &args.source))
}

fn many_forks(context: &Context, source: &str, forks: &Forks) -> Result<(), Failure> {
    for opened in &forks.made {
        tell_session(&opened.sandbox.name, opened.session.as_ref());
    }
    context.screen.answer(forks, |forks| {
        forks.made.iter().map(|opened| forked_line(opened, source)).collect()
    })?;
    if forks.failed.is_empty() {
        return Ok(());
    }
    let paint = Paint::for_errors();
    // As JSON, the answer has listed them.
    for ForkFailed { name, reason, .. } in forks.failed.iter().filter(|_| !context.screen.json) {
        note(&format!("{} {name}: {reason}", paint.red("error:")));
    }
    let (failed, made) = (forks.failed.len(), forks.made.len());
    Err(Failure::Some { failed, all: failed + made, code: 1 })
}

fn forked_line(opened: &Opened, source: &str) -> String {
    let from = opened.sandbox.forked_from.as_ref();
    let at = from.map_or(String::new(), |from| format!(" at generation {}", from.generation));
    opened_line(opened, &format!("forked from {source}{at}"))
}

pub(super) async fn pause(context: &Context, args: &PauseArgs) -> Result<(), Failure> {
    let request = Pause { expect_generation: args.expect_generation };
    for_each(context, &args.names, async |name| {
        let paused = context.client.pause(&name, &request).await?;
        context.screen.answer(&paused, |paused| paused_text(context.screen.paint, paused))
    })
    .await
}

fn paused_text(paint: Paint, paused: &Paused) -> String {
    let Sandbox { name, generation, .. } = &paused.sandbox;
    let kept = paused.snapshot.as_ref();
    let memory = kept.and_then(|snapshot| snapshot.memory).and_then(|memory| memory.bytes);
    let mut lines = vec![
        ("  snapshot", or_dash(kept.map(|snapshot| snapshot.id.clone()))),
        ("  memory", or_dash(memory.map(bytes))),
    ];
    if let Some(session) = &paused.session {
        lines.extend([
            ("  active CPU", when::exact(session.usage.active_cpu_ms)),
            ("  wall time", when::exact(session.usage.wall_ms)),
        ]);
    }
    let found = kept.map_or_else(String::new, |snapshot| found_text(&snapshot.findings));
    format!("{name}  paused, generation {generation}\n") + &facts(paint, &lines) + &found
}

/// What the guard found and let pass.
fn found_text(findings: &[Finding]) -> String {
    match findings {
        [] => String::new(),
        found => format!("  found\n{}", findings_text(found)),
    }
}

pub(super) async fn why(context: &Context, names: &[String]) -> Result<(), Failure> {
    for_each(context, names, async |name| {
        let why = context.client.why(&name).await?;
        context.screen.answer(&why, |why| why_text(context.screen.paint, &name, why))
    })
    .await
}

fn why_text(paint: Paint, name: &str, why: &Why) -> String {
    let state = state_colour(paint, &word(why.state));
    let mut text = format!("{name}  {state} since {}: {}\n", when::ago(&why.since), why.reason);
    let next = match why.state {
        State::Running | State::Starting => "until",
        _ => "woken by",
    };
    for (heading, lines) in [("what goes on in it", &why.holding), (next, &why.waking)] {
        if !lines.is_empty() {
            text.push_str(&format!("  {}\n", paint.bold(heading)));
        }
        for line in lines {
            text.push_str(&format!("    {line}\n"));
        }
    }
    for notice in &why.notices {
        text.push_str(&format!("  {} {notice}\n", paint.yellow("note:")));
    }
    text
}

/// Lays `more` over the existing ones and removes `gone`; nothing if that changes nothing.
fn added(
    there: BTreeMap<String, String>,
    more: Option<BTreeMap<String, String>>,
    gone: &[String],
) -> Option<BTreeMap<String, String>> {
    if more.is_none() && gone.is_empty() {
        return None;
    }
    let mut all = there;
    all.extend(more.unwrap_or_default());
    all.retain(|key, _| !gone.contains(key));
    Some(all)
}

pub(super) async fn checkpoint(context: &Context, args: CheckpointArgs) -> Result<(), Failure> {
    let request = Checkpoint { label: args.label };
    let snapshot = context.client.checkpoint(&args.name, &request).await?;
    context.screen.answer(&snapshot, |snapshot| {
        let Snapshot { id, generation, .. } = snapshot;
        let found = found_text(&snapshot.findings);
        format!("{id}  generation {generation}, {}\n{found}", own_size(snapshot))
    })
}

pub(super) async fn rollback(context: &Context, args: RollbackArgs) -> Result<(), Failure> {
    let to = resolve::snapshot_or_last(context, Some(&args.name), args.snapshot.as_deref()).await?;
    let request = Rollback { to, expect_generation: args.expect_generation };
    let answer = context.client.rollback(&args.name, &request).await?;
    context.screen.answer(&answer, |answer| {
        let Sandbox { name, generation, .. } = &answer.sandbox;
        let undo = match &answer.before {
            Some(before) => format!("to undo: keep rollback {name} {}\n", before.id),
            None => String::new(),
        };
        format!("{name}  rolled back to {}, generation {generation}\n{undo}", request.to)
    })
}

pub(super) async fn list(context: &Context, args: ListArgs) -> Result<(), Failure> {
    let filter = ListSandboxes {
        tags: args.tags,
        state: args.state.map(|state| match state {
            PhaseArg::Stopped => State::Stopped,
            PhaseArg::Starting => State::Starting,
            PhaseArg::Running => State::Running,
            PhaseArg::Paused => State::Paused,
            PhaseArg::Stopping => State::Stopping,
            PhaseArg::Failed => State::Failed,
        }),
        class: args.class,
        name_prefix: args.prefix,
        limit: None,
    };
    let all = context.client.sandboxes(&filter).collect(None).await?;
    if args.quiet && !context.screen.json {
        let names: String = all.iter().map(|sandbox| format!("{}\n", sandbox.name)).collect();
        return context.screen.text(&names);
    }
    context.screen.answer(&all, |all| {
        let mut table = Table::new(&[
            "NAME", "STATE", "CLASS", "IMAGE", ">GEN", ">LOGS", "USED", "EXPIRES", "TAGS",
            "PURPOSE",
        ]);
        for sandbox in all {
            table.row(vec![
                sandbox.name.clone(),
                word(sandbox.state),
                word(sandbox.class),
                sandbox.image.clone(),
                sandbox.generation.to_string(),
                or_dash(sandbox.commands.map(|commands| bytes(commands.bytes))),
                when::ago(&sandbox.used_at),
                when::ago(&sandbox.expires_at),
                pairs(&sandbox.tags),
                sandbox.purpose.clone(),
            ]);
        }
        context.screen.table(&table)
    })
}

pub(super) async fn show(context: &Context, names: &[String]) -> Result<(), Failure> {
    for_each(context, names, async |name| {
        let sandbox = context.client.sandbox(&name).await?;
        context.screen.answer(&sandbox, |sandbox| described(context.screen.paint, sandbox))
    })
    .await
}

/// What the commands of a sandbox keep on disk.
fn commands(sandbox: &Sandbox) -> String {
    let told = |kept: CommandsKept| format!("{} on record, {}", kept.count, bytes(kept.bytes));
    or_dash(sandbox.commands.map(told))
}

/// When it was last saved, and what would be lost.
fn saved(sandbox: &Sandbox) -> String {
    let at = sandbox.saved_at.as_deref().map_or("never".to_owned(), when::ago);
    match &sandbox.unsaved {
        Some(unsaved) if unsaved.files > 0 => {
            let files = if unsaved.files == 1 { "file" } else { "files" };
            let (count, bytes) = (unsaved.files, bytes(unsaved.bytes));
            format!("{at}; {count} {files} ({bytes}) changed since")
        }
        Some(_) => format!("{at}; nothing changed since"),
        None => at,
    }
}

/// What was changed in its session.
fn session_changed(changes: &SessionChanges) -> String {
    let least = if changes.complete { "" } else { " (at least: not everything was seen)" };
    format!(
        "changed {}{least}",
        history::counts(changes.created, changes.modified, changes.deleted, changes.bytes)
    )
}

fn described(paint: Paint, sandbox: &Sandbox) -> String {
    let from = sandbox.forked_from.as_ref();
    let mut lines = vec![
        ("name", sandbox.name.clone()),
        ("id", sandbox.id.clone()),
        ("project", sandbox.project.clone()),
        ("state", state_colour(paint, &word(sandbox.state))),
    ];
    lines.extend(sandbox.failure.clone().map(|failure| ("failure", paint.red(&failure))));
    lines.extend(sandbox.fallback.as_ref().map(|why| {
        let text = format!("could not be used; the sandbox started from its files: {why}");
        ("memory", paint.yellow(&text))
    }));
    lines.extend(sandbox.valid.filter(|valid| !valid).map(|_| {
        let text = "differs: it was not as at its last stop when it was resumed";
        ("validation", paint.yellow(text))
    }));
    lines.extend([
        ("generation", sandbox.generation.to_string()),
        ("snapshot", or_dash(sandbox.current_snapshot.clone())),
        ("saved", saved(sandbox)),
        ("session", or_dash(sandbox.session_changes.as_ref().map(session_changed))),
        (
            "forked from",
            from.map_or("-".to_owned(), |from| {
                format!("{} at generation {}", from.name, from.generation)
            }),
        ),
        ("commands", commands(sandbox)),
        ("created", when::ago(&sandbox.created_at)),
        ("used", when::ago(&sandbox.used_at)),
        ("expires", when::ago(&sandbox.expires_at)),
    ]);
    lines.extend(settings::described(sandbox));
    facts(paint, &lines)
}

pub(super) async fn remove(context: &Context, args: &RemoveArgs) -> Result<(), Failure> {
    for_each(context, &args.names, async |name| {
        let wish = Delete { keep_snapshots: args.keep_snapshots, force: args.force };
        let deleted = context.client.delete_as(&name, wish, None).await?;
        context.screen.answer(&deleted, |deleted| {
            let kept = match deleted.snapshots_kept.len() {
                0 => String::new(),
                1 if args.keep_snapshots => "; 1 snapshot stays".to_owned(),
                count if args.keep_snapshots => format!("; {count} snapshots stay"),
                1 => "; 1 snapshot stays, others stand on it".to_owned(),
                count => format!("; {count} snapshots stay, others stand on them"),
            };
            let lost = match deleted.drives_lost.as_slice() {
                [] => String::new(),
                drives => format!("; what it wrote to {} is lost", drives.join(", ")),
            };
            format!("{name}  deleted{kept}{lost}\n")
        })
    })
    .await
}

pub(super) async fn update(context: &Context, args: UpdateArgs) -> Result<(), Failure> {
    let UpdateArgs { name, extend, untag, unset_env, unpublish, settings } = args;
    let mut settings = change(settings)?;
    if settings.tags.is_some()
        || settings.env.is_some()
        || !untag.is_empty()
        || !unset_env.is_empty()
    {
        let there = context.client.sandbox(&name).await?;
        settings.tags = added(there.tags, settings.tags, &untag);
        settings.env = added(there.env, settings.env, &unset_env);
    }
    if settings.ports.is_some() || !unpublish.is_empty() {
        let mut ports = context.client.sandbox(&name).await?.ports;
        let more = settings.ports.take().unwrap_or_default();
        let again = |port: u16| more.iter().any(|more| more.port == port);
        ports.retain(|there| !unpublish.contains(&there.port) && !again(there.port));
        ports.extend(more);
        settings.ports = Some(ports);
    }
    if let Some(by) = extend {
        let request = Extend { by };
        let session = context.client.extend(&name, &request).await?;
        if settings == UpdateSandbox::default() {
            return context.screen.answer(&session, |session| {
                format!("{name}  its session ends {}\n", when::until(session.deadline.as_deref()))
            });
        }
    }
    if settings == UpdateSandbox::default() {
        let hint = "`keep update --help` lists all settings";
        return Err(Failure::here("no setting given").with_hint(hint));
    }
    let sandbox = context.client.update(&name, &settings).await?;
    context.screen.answer(&sandbox, |sandbox| described(context.screen.paint, sandbox))
}

pub(super) async fn sessions(context: &Context, args: &SessionsArgs) -> Result<(), Failure> {
    let limit = usize::try_from(args.limit).ok();
    let all = context.client.sessions(&args.name, Some(args.limit)).collect(limit).await?;
    context.screen.answer(&all, |all| {
        let mut table = Table::new(&[
            "SESSION", "STATE", ">GEN", "STARTED", ">WALL", ">CPU", ">MEMORY", ">NET IN",
            ">NET OUT", "CHANGED", "SNAPSHOT",
        ]);
        for session in all {
            let usage = &session.usage;
            table.row(vec![
                session.id.clone(),
                session.end.map_or("running".to_owned(), word),
                session.generation.to_string(),
                when::ago(&session.started_at),
                when::between(&session.started_at, session.ended_at.as_deref()),
                when::exact(usage.active_cpu_ms),
                bytes(usage.memory_peak_bytes),
                bytes(usage.network_in_bytes),
                bytes(usage.network_out_bytes),
                or_dash(session.changes.as_ref().map(history::session_shown)),
                or_dash(session.snapshot.clone()),
            ]);
        }
        let mut text = context.screen.table(&table);
        let counts = || all.iter().filter_map(|session| session.changes.as_ref());
        if counts().any(|counts| !counts.complete) {
            text.push_str(history::AT_LEAST);
        }
        text
    })
}
