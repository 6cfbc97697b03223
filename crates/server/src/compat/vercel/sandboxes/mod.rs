//! Sandboxes: create, get with resume, list, update, delete, fork.

pub(crate) mod machine;
pub(crate) mod races;
pub(crate) mod settings;
pub(crate) mod source;

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::{Path, State};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use sandkeep_core::db::{By, Direction, Filter, Order, Page};
use sandkeep_core::engine::{
    Caller, Create, Delete, Error, ErrorKind, Fork, ForkFrom, IfExists, OnDelete, Opened,
};
use sandkeep_core::model::lifecycle::Phase;
use sandkeep_core::model::{Name, OnAccept, Patch, Sandbox, SnapshotId, Tags};
use serde_json::{Value, json};
use tokio::time::Instant;

use self::races::Missed;
use self::settings::{DAY, IMAGE, RUNTIME, RequestedSettings, Source};
use super::protocol::auth::{Acts, Looks, choose};
use super::protocol::error::VercelError;
use super::protocol::ids::Foreign as _;
use super::protocol::input::{Fields, QueryParams, Reached};
use super::protocol::wire;
use super::protocol::wire::HERE;
use super::{Answer, done};
use crate::api::App;
use crate::connections::Via;
use crate::listen::Peer;

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new()
        // Which machine is meant, the request says; 2 differs from 3 in where a repository goes.
        .route("/v2/sandboxes", get(list).post(create_2))
        .route("/v3/sandboxes", post(create_3))
        .route("/v4/sandboxes", post(create_4))
        .route("/v2/sandboxes/{name}", get(open).patch(update).delete(remove))
        .route("/v2/sandboxes/{name}/fork", post(fork))
}

/// What the versions of the create endpoint differ in.
struct Version {
    runtime: bool,
    /// A repository goes into the working directory itself.
    here: bool,
    /// How long snapshots stay by default.
    snapshots: Option<u64>,
    keep_last: Option<u32>,
}

async fn create_2(
    who: Acts,
    app: State<Arc<App>>,
    host: Reached,
    from: Extension<Peer>,
    fields: Fields,
) -> Answer {
    let version = Version { runtime: true, here: true, snapshots: None, keep_last: None };
    create(who, app, host, from, fields, version).await
}

async fn create_3(
    who: Acts,
    app: State<Arc<App>>,
    host: Reached,
    from: Extension<Peer>,
    fields: Fields,
) -> Answer {
    let version = Version { runtime: true, here: false, snapshots: None, keep_last: None };
    create(who, app, host, from, fields, version).await
}

async fn create_4(
    who: Acts,
    app: State<Arc<App>>,
    host: Reached,
    from: Extension<Peer>,
    fields: Fields,
) -> Answer {
    let version =
        Version { runtime: false, here: false, snapshots: Some(7 * DAY), keep_last: Some(1) };
    create(who, app, host, from, fields, version).await
}

async fn create(
    Acts(caller): Acts,
    State(app): State<Arc<App>>,
    Reached(host): Reached,
    Extension(peer): Extension<Peer>,
    mut fields: Fields,
    version: Version,
) -> Answer {
    let caller = choose(&app.engine, caller, fields.text("projectId")?.as_deref())?;
    let name = name(&mut fields)?;
    let source = settings::source(&mut fields, version.here)?;
    let runtime = fields.text("runtime")?;
    if runtime.is_some() && !version.runtime {
        return Err(VercelError::bad("should NOT have additional property `runtime`."));
    }
    let image = fields.text("image")?;
    let mut wishes =
        RequestedSettings::read(&mut fields, &app.vercel)?.with_defaults(version.snapshots);
    fields.end()?;
    wishes.check_regions(&BTreeMap::new(), HERE)?;
    if let Some(count) = version.keep_last
        && wishes.patch.keep_last == Some(None)
    {
        wishes.patch.keep_last = Some(Some(count));
    }
    let from = match &source {
        Source::Image | Source::Fetched(_) => {
            let ground = machine::choose(&app, runtime.as_deref(), image.as_deref()).await?;
            wishes.patch.image = Some(ground.image);
            wishes.note(RUNTIME, Some(ground.runtime));
            wishes.note(IMAGE, ground.reference);
            None
        }
        Source::Snapshot(_) if image.is_some() => {
            return Err(VercelError::bad("`image` should NOT be given with a snapshot."));
        }
        Source::Snapshot(id) => {
            let snapshot = find_snapshot(&app, &caller, id).await?;
            inherit(&app, &caller, &snapshot, runtime, &mut wishes).await?;
            Some(snapshot)
        }
    };
    let patch = wishes.patch;
    let create = Create { name, patch, if_exists: IfExists::Fail, start: true, from };
    let made = make(&app, &caller, peer, create).await?;
    if let Source::Fetched(fetched) = source
        && made.created
    {
        fetched.into(&app, &caller, &made).await?;
    }
    crate::audit::target("sandbox", &made.sandbox.name);
    Ok(Json(wire::opened(&app, host.as_deref(), &made)))
}

/// Makes a sandbox, or hands out the one that an earlier try of the same request made; see [`self::races`].
async fn make(
    app: &App,
    caller: &Caller,
    peer: Peer,
    create: Create,
) -> Result<Opened, VercelError> {
    let (engine, project) = (app.engine.clone(), caller.project.clone());
    let Some(name) = create.name.clone() else {
        return done(&app.tasks, async move { engine.create(&project, create, None).await }).await;
    };
    // What a repeated request has in common with the first.
    let wishes = format!("{:?} {peer:?} {create:?}", caller.key);
    let (running, mut race) = app.vercel_races.begin(&project, &name, &wishes);
    let work = async move {
        let made = engine.create(&project, create, None).await;
        drop(running);
        Ok(made)
    };
    match done(&app.tasks, work).await? {
        Err(Error::NameTaken(_)) if race.answered() => resume(app, caller, &name).await,
        made => {
            race.answered();
            Ok(made?)
        }
    }
}

fn name(fields: &mut Fields) -> Result<Option<Name>, VercelError> {
    let Some(name) = fields.text("name")? else { return Ok(None) };
    let wrong = || VercelError::bad("`name` should match pattern \"^[a-zA-Z0-9_-]{1,128}$\".");
    name.parse().map(Some).map_err(|_| wrong())
}

/// A snapshot of the project that can be started from.
pub(super) async fn find_snapshot(
    app: &App,
    caller: &Caller,
    id: &str,
) -> Result<SnapshotId, VercelError> {
    let id = SnapshotId::read(id).ok_or_else(|| VercelError::not_found("Snapshot"))?;
    let found = app.engine.snapshot_record(&caller.project, &id).await?;
    if found.item.deleted_at.is_some() {
        return Err(VercelError::snapshot_deleted(&id));
    }
    Ok(id)
}

/// A sandbox made from a snapshot is of the runtime the snapshot was taken of.
async fn inherit(
    app: &App,
    caller: &Caller,
    snapshot: &SnapshotId,
    runtime: Option<String>,
    wishes: &mut RequestedSettings,
) -> Result<(), VercelError> {
    let found = app.engine.snapshot(&caller.project, snapshot).await?;
    let source = match app.engine.get(&caller.project, &found.item.sandbox_name).await {
        Ok(source) => Some(source),
        // Snapshots outlive their sandbox.
        Err(Error::NoSandbox(_)) => None,
        Err(error) => return Err(error.into()),
    };
    let source = source.filter(|source| source.sandbox.id == found.item.sandbox);
    let noted = source.as_ref().and_then(|source| source.sandbox.config.notes.get(RUNTIME));
    wishes.note(RUNTIME, noted.cloned().or(runtime).or(Some("snapshot".to_owned())));
    if let Some(source) = source {
        wishes.patch.image = Some(source.sandbox.config.image);
        // As in a fork: what somebody has to approve there has to be approved here, too.
        wishes.patch.approvals = source.sandbox.config.approvals.map(Some);
    }
    Ok(())
}

async fn open(
    Looks(caller): Looks,
    State(app): State<Arc<App>>,
    Reached(host): Reached,
    Extension(via): Extension<Via>,
    Path(name): Path<String>,
    asked: QueryParams,
) -> Answer {
    let name = existing(&name)?;
    let found = look(&app, &caller, &name, &via).await;
    let opened = if asked.flag("resume")? {
        crate::auth::may_wake(&caller, &sandkeep_core::engine::WakeMode::Wake)?;
        let opened = resume(&app, &caller, &name).await?;
        if opened.resumed {
            crate::audit::action("sandbox.start");
        }
        opened
    } else {
        app.engine.with_usage(found?).await
    };
    Ok(Json(wire::opened(&app, host.as_deref(), &opened)))
}

/// Finds a sandbox. One that somebody is about to create is waited for; see [`self::races`].
async fn look(app: &App, caller: &Caller, name: &Name, via: &Via) -> Result<Opened, Error> {
    let since = Instant::now();
    loop {
        let found = match app.engine.get(&caller.project, name).await {
            // It is just being made: its first session is what is asked for.
            Ok(found) if found.session.is_none() => {
                app.engine.get_settled(&caller.project, name).await
            }
            other => other,
        };
        let Err(Error::NoSandbox(_)) = found else { return found };
        match app.vercel_races.missed(&caller.project, name, since, via) {
            Missed::Tell => return found,
            Missed::Wait(changed) => changed.wait().await,
        }
    }
}

/// Wakes a sandbox, after whatever is being done to it just now.
pub(super) async fn resume(app: &App, caller: &Caller, name: &Name) -> Result<Opened, VercelError> {
    let (engine, project, name) = (app.engine.clone(), caller.project.clone(), name.clone());
    done(&app.tasks, async move { engine.resume(&project, &name).await }).await
}

/// A name of a path; one that cannot be is of no sandbox.
pub(super) fn existing(name: &str) -> Result<Name, VercelError> {
    name.parse().map_err(|_| VercelError::not_found("Sandbox"))
}

pub(super) const DIRECTIONS: [(&str, Direction); 2] =
    [("asc", Direction::Ascending), ("desc", Direction::Descending)];

/// A page of a list, as all of theirs are asked for.
pub(super) fn page(asked: &QueryParams, by: By, default: Direction) -> Result<Page, VercelError> {
    let limit = asked.number("limit", 1..=50)?.unwrap_or(20);
    let direction = asked.word("sortOrder", &DIRECTIONS)?.unwrap_or(default);
    let cursor = asked.text("cursor").map(ToOwned::to_owned);
    Ok(Page { limit, cursor, order: Order { by, direction } })
}

/// A page as theirs end.
pub(super) fn pagination(count: usize, next: Option<String>) -> Value {
    json!({ "count": count, "next": next })
}

async fn list(Looks(caller): Looks, State(app): State<Arc<App>>, asked: QueryParams) -> Answer {
    let words = [
        ("createdAt", By::Created),
        ("name", By::Name),
        ("statusUpdatedAt", By::PhaseChanged),
        ("currentSnapshotId", By::Snapshot),
    ];
    let by = asked.word("sortBy", &words)?.unwrap_or(By::Created);
    let page = page(&asked, by, Direction::Descending)?;
    let prefix = asked.text("namePrefix");
    if prefix.is_some() && by != By::Name {
        return Err(VercelError::bad("`namePrefix` should be given with `sortBy=name` only."));
    }
    let states: [(&str, &[Phase]); 3] = [
        ("running", &[Phase::Running]),
        ("stopping", &[Phase::Stopping]),
        ("stopped", &[Phase::Stopped, Phase::Paused, Phase::Failed]),
    ];
    let phases = asked.word("status", &states)?;
    if phases.is_some() && by != By::Created {
        return Err(VercelError::bad("`status` should be given with `sortBy=createdAt` only."));
    }
    let (tags, tag_texts) = tags(&asked)?;
    let filter = Filter {
        tags,
        tag_texts,
        phases: phases.unwrap_or_default().to_vec(),
        name_prefix: prefix.map(ToOwned::to_owned),
        class: None,
    };
    let found = app.engine.list(&caller.project, &filter, &page).await?;
    let mut sandboxes = Vec::with_capacity(found.items.len());
    for sandbox in &found.items {
        // Only a running one has an end time.
        let session = match sandbox.phase() {
            Phase::Running => match app.engine.get(&caller.project, &sandbox.name).await {
                Ok(opened) => opened.session,
                // Deleted since the list was made.
                Err(Error::NoSandbox(_)) => None,
                Err(error) => return Err(error.into()),
            },
            _ => None,
        };
        sandboxes.push(wire::sandbox(&app, sandbox, session.as_ref()));
    }
    let pagination = pagination(sandboxes.len(), found.next);
    Ok(Json(json!({ "sandboxes": sandboxes, "pagination": pagination })))
}

/// `tags=key:value`, any number of them; all must fit. With further colons it does not say where the key ends.
fn tags(asked: &QueryParams) -> Result<(Tags, Vec<String>), VercelError> {
    let (mut tags, mut texts) = (Tags::new(), Vec::new());
    for tag in asked.all("tags") {
        let Some((key, value)) = tag.split_once(':') else {
            return Err(VercelError::bad("`tags` should be `key:value`."));
        };
        if value.contains(':') {
            texts.push(tag.to_owned());
            continue;
        }
        if tags.insert(key.to_owned(), value.to_owned()).is_some_and(|before| before != value) {
            return Err(VercelError::bad(format!("`tags` names two values for `{key}`.")));
        }
    }
    Ok((tags, texts))
}

async fn update(
    Acts(caller): Acts,
    State(app): State<Arc<App>>,
    Reached(host): Reached,
    Path(name): Path<String>,
    asked: QueryParams,
    mut fields: Fields,
) -> Answer {
    let name = existing(&name)?;
    let before = app.engine.get(&caller.project, &name).await?.sandbox;
    let target = match fields.text("currentSnapshotId")? {
        Some(id) => Some(find_snapshot(&app, &caller, &id).await?),
        None => None,
    };
    same_runtime(&app, &before, fields.text("runtime")?).await?;
    let mut wishes = RequestedSettings::read(&mut fields, &app.vercel)?;
    fields.end()?;
    wishes.check_regions(&before.config.notes, HERE)?;
    if let Some(persistent) = wishes.patch.persistent {
        wishes.patch.expires = Some(settings::lifetime(persistent));
    }
    let ports_changed = wishes.patch.ports.is_some();
    let (tagged, mounted) = (wishes.patch.tags.is_some(), wishes.patch.mounts.is_some());
    // Clients give the session under way more time by themselves.
    let patch = Patch { next_session: true, ..wishes.patch };
    let (engine, project, changed) = (app.engine.clone(), caller.project.clone(), name.clone());
    let mut sandbox = done(&app.tasks, async move {
        // First what may fail. A session under way ends with it, and what it had is kept.
        if let Some(target) = target.filter(|target| before.current.as_ref() != Some(target)) {
            engine.rollback(&project, &changed, &target, None).await?;
        }
        engine.update(&project, &changed, patch).await
    })
    .await?;
    if asked.flag("resume")? {
        sandbox = resume(&app, &caller, &name).await?.sandbox;
    }
    let session = app.engine.get(&caller.project, &name).await?.session;
    let mut answer = json!({ "sandbox": wire::sandbox(&app, &sandbox, session.as_ref()) });
    // Removed tags are returned: absent would mean as before to a client that keeps what it knew.
    if tagged && sandbox.config.tags.is_empty() {
        answer["sandbox"]["tags"] = json!({});
    }
    if mounted && sandbox.config.mounts.is_empty() {
        answer["sandbox"]["mounts"] = json!({});
    }
    if ports_changed {
        answer["routes"] = json!(wire::routes(&app, host.as_deref(), &sandbox));
    }
    Ok(Json(answer))
}

/// What a sandbox starts from is decided when it is created.
async fn same_runtime(
    app: &App,
    sandbox: &Sandbox,
    runtime: Option<String>,
) -> Result<(), VercelError> {
    let Some(runtime) = runtime else { return Ok(()) };
    let ground = machine::choose(app, Some(&runtime), None).await?;
    if ground.image == sandbox.config.image {
        return Ok(());
    }
    let message = format!(
        "`runtime`: `{}` was made from another image than `{runtime}` stands for; create a new sandbox for it.",
        sandbox.name
    );
    Err(VercelError::refused(message))
}

async fn remove(
    Acts(caller): Acts,
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    asked: QueryParams,
) -> Answer {
    let name = existing(&name)?;
    let orphans = asked.flag("deleteOrphanSnapshots")?;
    let snapshots = if orphans { OnDelete::Drop } else { OnDelete::Keep };
    let (engine, project) = (app.engine.clone(), caller.project);
    let gone = done(&app.tasks, async move {
        let mut found = engine.get(&project, &name).await?;
        if found.sandbox.config.persistent && found.sandbox.phase() == Phase::Running && !orphans {
            // Snapshots outlive their sandbox, so what the session under way wrote is kept as well.
            match engine.stop(&project, &name, Default::default(), None).await {
                Ok(stopped) => found.sandbox = stopped.sandbox,
                Err(Error::NoSandbox(_)) => {}
                // Deleting is what makes room, and there is none for a last snapshot.
                Err(error) if error.kind() == ErrorKind::Exhausted => {
                    tracing::warn!(sandbox = %name, "deleted without a last snapshot: the disk is full");
                }
                Err(error) => return Err(error),
            }
        }
        engine.delete(&project, &name, Delete { snapshots, ..Delete::default() }, None).await?;
        Ok(found)
    })
    .await?;
    Ok(Json(json!({ "sandbox": wire::deleted(&app, &gone.sandbox) })))
}

async fn fork(
    Acts(caller): Acts,
    State(app): State<Arc<App>>,
    Reached(host): Reached,
    Path(source): Path<String>,
    mut fields: Fields,
) -> Answer {
    let source = existing(&source)?;
    let caller = choose(&app.engine, caller, fields.text("projectId")?.as_deref())?;
    let name = name(&mut fields)?;
    let original = app.engine.get(&caller.project, &source).await?.sandbox;
    if fields.text("image")?.is_some_and(|image| {
        original.config.notes.get(IMAGE) != Some(&image) && original.config.image != image
    }) {
        return Err(VercelError::refused(
            "`image`: a fork goes on from its source's files, so it has its source's image.",
        ));
    }
    let wishes = RequestedSettings::read(&mut fields, &app.vercel)?;
    fields.end()?;
    wishes.check_regions(&original.config.notes, HERE)?;
    let mut patch = wishes.patch;
    if let Some(persistent) = patch.persistent {
        patch.expires = Some(settings::lifetime(persistent));
    }
    // Their command line announces to a user who forks a running sandbox that the last snapshot is
    // used.
    let fork = Fork {
        name,
        patch,
        from: ForkFrom::Kept,
        expect_generation: None,
        start: true,
        count: None,
        on_accept: OnAccept::Keep,
    };
    let (engine, project) = (app.engine.clone(), caller.project.clone());
    let made =
        done(&app.tasks, async move { engine.fork(&project, &source, fork, None).await }).await?;
    Ok(Json(wire::opened(&app, host.as_deref(), &made)))
}
