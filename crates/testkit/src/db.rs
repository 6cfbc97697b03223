//! The contract every index is held to.

use std::time::Duration;

use sandkeep_core::db::{
    By, Db, DbError, Direction, Filter, Order, Owner, Page, Remembered, Tombstones, Unless,
};
use sandkeep_core::model::lifecycle::Phase;
use sandkeep_core::model::{
    Change, Command, CommandId, CommandState, Config, DRIVE_SIZE, Drive, DriveId, FORMAT,
    ImageConfig, LayerId, Method, Name, OpenSession, Project, ProjectNetwork, Sandbox, Session,
    SessionId, Snapshot, SnapshotId, SnapshotKind, Span, Tags, Timestamp, Usage, now,
};

/// A sandbox as it is on record before it has ever run.
///
/// # Panics
///
/// When the name cannot be one.
#[must_use]
pub fn sandbox(project: &str, name: &str) -> Sandbox {
    let [project, name] = [project, name].map(|text| text.parse().expect("a name fit for tests"));
    Sandbox::new(project, name, Config::default(), false)
}

/// The same as if it ran, with a layer that is nowhere.
fn running(mut sandbox: Sandbox) -> Sandbox {
    let open = OpenSession::new(LayerId::fresh(), Vec::new());
    for change in [Change::Start(open), Change::Up] {
        sandbox.transition(change).expect("it can be started");
    }
    sandbox
}

/// A snapshot of a sandbox, of a layer that is nowhere.
#[must_use]
pub fn snapshot(of: &Sandbox, generation: u64) -> Snapshot {
    Snapshot {
        format: FORMAT,
        id: SnapshotId::fresh(),
        project: of.project.clone(),
        sandbox: of.id.clone(),
        sandbox_name: of.name.clone(),
        session: SessionId::fresh(),
        generation,
        parent: None,
        merged: None,
        kind: SnapshotKind::Stop,
        label: None,
        layers: vec![LayerId::fresh()],
        memory: Vec::new(),
        secrets: Vec::new(),
        identity_of: None,
        image: None,
        commands: Vec::new(),
        created_at: now(),
        method: Method::Automatic,
        used_at: None,
        expires_after: None,
        expiry_given: false,
        kept: None,
        expires_on: None,
        outlives: false,
        sandbox_deleted_at: None,
        deleted_at: None,
        findings: Vec::new(),
        image_config: ImageConfig::default(),
    }
}

/// Holds an empty `db` to what [`Db`] promises.
///
/// # Panics
///
/// When it does not keep it.
pub async fn db_contract(db: &dyn Db) {
    names_are_claimed_once(db).await;
    lists_are_filtered_and_paged(db).await;
    a_snapshot_goes_only_when_nobody_stands_on_it(db).await;
    snapshots_are_found_by_owner_and_expiry(db).await;
    snapshots_are_found_by_generation(db).await;
    sandboxes_are_sorted_and_paged(db).await;
    sessions_and_commands_go_with_their_sandbox(db).await;
    answers_are_kept_by_project(db).await;
    drives_have_names_and_an_order(db).await;
    db.clear().await.expect("it empties");
    let left = db.sandboxes(None, &Filter::default(), &Page::all()).await.expect("it lists").items;
    assert_eq!(left, [], "cleared");
    let left = db.drives(None, None, &Page::all()).await.expect("it lists").items;
    assert_eq!(left, [], "cleared");
}

async fn names_are_claimed_once(db: &dyn Db) {
    let mut first = sandbox("a", "app");
    first.created_with = Some("key".to_owned());
    assert!(db.claim(&first).await.expect("it claims"), "a free name");
    assert!(!db.claim(&sandbox("a", "app")).await.expect("it claims"), "a name that is taken");
    assert!(
        db.claim(&sandbox("b", "app")).await.expect("it claims"),
        "the same in another project"
    );
    let found = db.sandbox(&first.project, &first.name).await.expect("it finds");
    assert_eq!(found.as_ref(), Some(&first));
    first = running(first);
    db.put_sandbox(&first).await.expect("it keeps");
    assert_eq!(db.sandbox_by_id(&first.id).await.expect("it finds"), Some(first.clone()));
    let by_key = db.sandbox_created_with(&first.project, "key").await.expect("it finds");
    assert_eq!(by_key.map(|sandbox| sandbox.id), Some(first.id.clone()));
    db.remove_sandbox(&first.id).await.expect("it forgets");
    assert_eq!(db.sandbox(&first.project, &first.name).await.expect("it finds"), None);
    assert!(db.claim(&sandbox("a", "app")).await.expect("it claims"), "the name is free again");
}

async fn lists_are_filtered_and_paged(db: &dyn Db) {
    let project: Name = "lists".parse().expect("a name");
    for (place, (name, customer)) in
        [("one", "acme"), ("two", "acme"), ("other", "zeta")].into_iter().enumerate()
    {
        let mut sandbox = sandbox("lists", name);
        sandbox.config.tags = Tags::from([
            ("customer".to_owned(), customer.to_owned()),
            ("place".to_owned(), place.to_string()),
            (format!("team:{name}"), "a:b".to_owned()),
        ]);
        if name == "two" {
            sandbox = running(sandbox);
            sandbox.config.expires = Span(0);
        }
        assert!(db.claim(&sandbox).await.expect("it claims"));
    }
    let list = async |filter: &Filter, page: &Page| {
        let found = db.sandboxes(Some(&project), filter, page).await.expect("it lists");
        let names: Vec<String> =
            found.items.iter().map(|sandbox| sandbox.name.to_string()).collect();
        (names, found.next)
    };
    let tagged = |tags: &[(&str, &str)]| Filter {
        tags: tags.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
        ..Filter::default()
    };
    assert_eq!(list(&tagged(&[("customer", "acme")]), &Page::all()).await.0.len(), 2);
    assert_eq!(
        list(&tagged(&[("customer", "acme"), ("place", "0")]), &Page::all()).await.0,
        ["one"],
        "all of them"
    );
    assert_eq!(list(&tagged(&[("customer", "nobody")]), &Page::all()).await.0, [""; 0]);
    let texts = |texts: &[&str]| Filter {
        tag_texts: texts.iter().map(|text| (*text).to_owned()).collect(),
        ..Filter::default()
    };
    assert_eq!(list(&texts(&["team:one:a:b"]), &Page::all()).await.0, ["one"]);
    assert_eq!(list(&texts(&["customer:acme", "place:1"]), &Page::all()).await.0, ["two"]);
    assert_eq!(list(&texts(&["team:one"]), &Page::all()).await.0, [""; 0]);
    let running = Filter { phases: vec![Phase::Running], ..Filter::default() };
    assert_eq!(list(&running, &Page::all()).await.0, ["two"]);
    let prefixed = Filter { name_prefix: Some("o".to_owned()), ..Filter::default() };
    assert_eq!(list(&prefixed, &Page::all()).await.0.len(), 2, "one, other");
    let (all, none) = list(&Filter::default(), &Page::all()).await;
    assert_eq!((all.len(), none), (3, None));
    let (first, next) = list(&Filter::default(), &Page { limit: 2, ..Page::default() }).await;
    let (rest, end) =
        list(&Filter::default(), &Page { limit: 2, cursor: next, ..Page::default() }).await;
    assert_eq!([first, rest].concat(), all, "pages join without a gap");
    assert_eq!(end, None);
    let expired = db.expired(now()).await.expect("it lists");
    assert!(expired.iter().any(|sandbox| sandbox.name.as_str() == "two"), "its time is up");
}

async fn a_snapshot_goes_only_when_nobody_stands_on_it(db: &dyn Db) {
    let mut holder = sandbox("snapshots", "holder");
    let (old, new) = (snapshot(&holder, 1), snapshot(&holder, 2));
    db.put_snapshot(&old).await.expect("it keeps");
    db.put_snapshot(&new).await.expect("it keeps");
    holder.current = Some(new.id.clone());
    assert!(db.claim(&holder).await.expect("it claims"));
    assert_eq!(db.sandboxes_on(&new.id).await.expect("it lists").len(), 1);
    let buried = |snapshot: &Snapshot| Snapshot {
        layers: Vec::new(),
        deleted_at: Some(now()),
        ..snapshot.clone()
    };
    let bury = async |snapshot: &Snapshot, unless: Unless<'_>| {
        db.put_tombstone(&buried(snapshot), unless).await.expect("it answers")
    };
    assert!(!bury(&new, Unless::Held).await, "somebody stands on it");
    assert_eq!(
        db.snapshot(&new.id).await.expect("it finds"),
        Some(new.clone()),
        "and it is still there"
    );
    assert!(bury(&old, Unless::Held).await, "nobody does");
    assert!(!bury(&old, Unless::Never).await, "it is one already");
    assert!(bury(&new, Unless::HeldByOther(&holder.id)).await, "only the one who lets go");
    let list = async |tombstones: Tombstones| {
        let owner = Owner::Sandbox(&holder.id);
        let found = db.snapshots(owner, tombstones, &Page::all()).await.expect("it lists").items;
        found.into_iter().map(|snapshot| snapshot.id).collect::<Vec<_>>()
    };
    assert_eq!(list(Tombstones::Without).await, [], "who does not ask for tombstones sees none");
    assert_eq!(db.snapshot(&old.id).await.expect("it finds"), None);
    assert_eq!(list(Tombstones::With).await.len(), 2);
    let record = db.snapshot_record(&old.id).await.expect("it finds").expect("a tombstone");
    assert!(record.deleted_at.is_some() && record.layers.is_empty());
    let old_ones = db.old_tombstones(later(1), 100).await.expect("it lists");
    assert!(old_ones.contains(&old.id) && old_ones.contains(&new.id));
    assert_eq!(db.old_tombstones(later(-60), 100).await.expect("it lists"), []);
    assert_eq!(db.old_tombstones(later(-60), 1).await.expect("it lists").len(), 1, "too many");
    db.remove_snapshot(&old.id).await.expect("it forgets");
    assert_eq!(db.snapshot_record(&old.id).await.expect("it finds"), None);
    let third = snapshot(&holder, 3);
    db.put_snapshot(&third).await.expect("it keeps");
    holder.current = Some(third.id.clone());
    db.put_sandbox(&holder).await.expect("it keeps");
    assert!(bury(&third, Unless::Never).await, "whoever stands on it");
}

fn later(seconds: i64) -> Timestamp {
    Timestamp::from_millisecond(now().as_millisecond() + seconds * 1000).expect("a time")
}

async fn snapshots_are_found_by_owner_and_expiry(db: &dyn Db) {
    let (project, app): (Name, Name) =
        ("owners".parse().expect("a name"), "app".parse().expect("a name"));
    let (first, second) = (sandbox("owners", "app"), sandbox("owners", "app"));
    let other = sandbox("owners", "other");
    let mut all = Vec::new();
    for (place, of) in [&first, &second, &other].into_iter().enumerate() {
        let mut made = snapshot(of, 1);
        made.created_at = later(i64::try_from(place).expect("a small number") * -10);
        made.expires_after = (place == 1).then_some(Span::seconds(5));
        db.put_snapshot(&made).await.expect("it keeps");
        all.push(made.id);
    }
    let list = async |owner: Owner<'_>, page: &Page| {
        let found = db.snapshots(owner, Tombstones::Without, page).await.expect("it lists");
        (found.items.into_iter().map(|item| item.id).collect::<Vec<_>>(), found.next)
    };
    let named = Owner::Name(&project, &app);
    assert_eq!(list(named, &Page::all()).await.0, all[..2], "of both that had the name");
    assert_eq!(list(Owner::Sandbox(&other.id), &Page::all()).await.0, all[2..]);
    assert_eq!(list(Owner::Project(&project), &Page::all()).await.0, all, "newest first");
    let order = Order { direction: Direction::Ascending, ..Order::default() };
    let mut page = Page { limit: 2, cursor: None, order };
    let (mut oldest_first, next) = list(Owner::Project(&project), &page).await;
    page.cursor = next;
    oldest_first.extend(list(Owner::Project(&project), &page).await.0);
    oldest_first.reverse();
    assert_eq!(oldest_first, all, "oldest first, in pages");
    let foreign = db.snapshots(named, Tombstones::Without, &page).await;
    assert!(matches!(foreign, Err(DbError::Cursor)), "{foreign:?}");
    let by_name = Page { order: Order { by: By::Name, ..order }, ..Page::default() };
    let unsorted = db.snapshots(named, Tombstones::Without, &by_name).await;
    assert!(matches!(unsorted, Err(DbError::Order)), "{unsorted:?}");
    let expired = db.expired_snapshots(now()).await.expect("it lists");
    assert_eq!(expired.into_iter().map(|item| item.id).collect::<Vec<_>>(), [all[1].clone()]);
}

async fn snapshots_are_found_by_generation(db: &dyn Db) {
    let owner = sandbox("generations", "app");
    let mut all: Vec<Snapshot> = (0..5).map(|generation| snapshot(&owner, generation)).collect();
    // A clock that went back: the generation counts.
    all[4].created_at = Timestamp::UNIX_EPOCH;
    all[1].expires_after = Some(Span(0));
    all[2].deleted_at = Some(now());
    for one in &all {
        db.put_snapshot(one).await.expect("it keeps");
    }
    let found = async |skip, limit| {
        let found = db.newest_snapshots(&owner.id, skip, limit).await.expect("it lists");
        found.into_iter().map(|one| one.generation).collect::<Vec<_>>()
    };
    assert_eq!(found(0, u32::MAX).await, [4, 3, 1, 0], "without tombstones");
    assert_eq!(found(1, 2).await, [3, 1]);
    let expired = db.expired_snapshots_of(&owner.id, now()).await.expect("it lists");
    assert_eq!(expired.into_iter().map(|one| one.generation).collect::<Vec<_>>(), [1]);
    for one in &all {
        db.remove_snapshot(&one.id).await.expect("it forgets");
    }
}

async fn sandboxes_are_sorted_and_paged(db: &dyn Db) {
    let project: Name = "sorted".parse().expect("a name");
    let layer = |n: u8| -> SnapshotId { format!("snp-{n:026}").parse().expect("an id") };
    // Name, when made, when its phase changed, when it changed, what it stands on. Some are equal.
    let start = now().as_millisecond();
    let at = |place: i64| Timestamp::from_millisecond(start + place * 10).expect("a time");
    for (place, (name, made, phase, changed, on)) in [
        ("c", 1, 9, 5, Some(2)),
        ("a", 2, 9, 6, None),
        ("d", 3, 7, 7, Some(1)),
        ("b", 3, 8, 4, None),
        ("e", 3, 9, 8, Some(3)),
    ]
    .into_iter()
    .enumerate()
    {
        let mut made_up = sandbox("sorted", name);
        made_up.id = format!("sbx-{place:026}").parse().expect("an id");
        made_up.created_at = at(made);
        made_up.phase_at = at(phase);
        made_up.updated_at = at(changed);
        made_up.current = on.map(layer);
        if let Some(id) = &made_up.current {
            db.put_snapshot(&Snapshot { id: id.clone(), ..snapshot(&made_up, 1) })
                .await
                .expect("it keeps");
        }
        assert!(db.claim(&made_up).await.expect("it claims"));
    }
    let walk = async |by: By, direction: Direction| {
        let mut page = Page { limit: 2, cursor: None, order: Order { by, direction } };
        let mut names = String::new();
        loop {
            let found = db.sandboxes(Some(&project), &Filter::default(), &page).await;
            let found = found.expect("it lists");
            names.extend(found.items.iter().map(|sandbox| sandbox.name.to_string()));
            page.cursor = found.next;
            if page.cursor.is_none() {
                return names;
            }
        }
    };
    for (by, ascending) in [
        (By::Name, "abcde"),
        (By::Created, "cadbe"),
        (By::PhaseChanged, "dbcae"),
        (By::Updated, "bcade"),
        (By::Snapshot, "abdce"),
    ] {
        assert_eq!(walk(by, Direction::Ascending).await, ascending, "{by:?}");
        let descending: String = ascending.chars().rev().collect();
        assert_eq!(walk(by, Direction::Descending).await, descending, "{by:?}");
    }
    let page = Page { limit: 2, ..Page::default() };
    let none = Filter::default();
    let next = db.sandboxes(Some(&project), &none, &page).await.expect("it lists").next;
    let page = Page { cursor: next, ..page };
    let ascending = Order { direction: Direction::Ascending, ..Order::default() };
    let prefixed = Filter { name_prefix: Some("a".to_owned()), ..Filter::default() };
    for (what, refused) in [
        (
            "another order",
            db.sandboxes(Some(&project), &none, &Page { order: ascending, ..page.clone() }).await,
        ),
        ("another filter", db.sandboxes(Some(&project), &prefixed, &page).await),
        ("another project", db.sandboxes(None, &none, &page).await),
    ] {
        assert!(matches!(refused, Err(DbError::Cursor)), "{what}: {refused:?}");
    }
}

async fn sessions_and_commands_go_with_their_sandbox(db: &dyn Db) {
    let project: Name = "sessions".parse().expect("a name");
    let (one, two) = (sandbox("sessions", "one"), sandbox("sessions", "two"));
    let mut sessions = Vec::new();
    for of in [&one, &two] {
        assert!(db.claim(of).await.expect("it claims"));
        let session = session(of);
        db.put_session(&session).await.expect("it keeps");
        db.put_command(&command(&session)).await.expect("it keeps");
        sessions.push(session);
    }
    let all = db.project_sessions(&project, &Page::all()).await.expect("it lists").items;
    assert_eq!(all.len(), 2);
    let of_one = db.sessions(&one.id, &Page::all()).await.expect("it lists").items;
    assert_eq!(of_one, [sessions[0].clone()]);
    let ran = async |session: &Session| {
        db.session_commands(&session.id, &Page::all()).await.expect("it lists").items.len()
    };
    assert_eq!((ran(&sessions[0]).await, ran(&sessions[1]).await), (1, 1));
    db.remove_sandbox(&one.id).await.expect("it forgets");
    assert_eq!((ran(&sessions[0]).await, ran(&sessions[1]).await), (0, 1));
    let left = db.project_sessions(&project, &Page::all()).await.expect("it lists").items;
    assert_eq!(left, [sessions[1].clone()]);
}

/// A session of a sandbox.
#[must_use]
pub fn session(of: &Sandbox) -> Session {
    Session {
        format: FORMAT,
        id: SessionId::fresh(),
        sandbox: of.id.clone(),
        from: None,
        generation: 0,
        started_at: now(),
        requested_stop_at: None,
        ended_at: None,
        end: None,
        snapshot: None,
        usage: Usage::default(),
        deadline: None,
        hooks: Vec::new(),
        valid: None,
        services: Default::default(),
        secrets: Vec::new(),
        fallback: None,
        changes: None,
    }
}

/// A command of a session.
#[must_use]
pub fn command(session: &Session) -> Command {
    Command {
        format: FORMAT,
        id: CommandId::fresh(),
        sandbox: session.sandbox.clone(),
        session: session.id.clone(),
        argv: vec!["true".to_owned()],
        cwd: None,
        user: None,
        env_names: Vec::new(),
        tty: false,
        detached: false,
        timeout: None,
        state: CommandState::Exited,
        end: None,
        limit: None,
        peak: None,
        oom_kills_before: 0,
        exit_code: Some(0),
        started_at: now(),
        ended_at: Some(now()),
        output_bytes: 0,
        truncated: false,
        service: None,
        secrets: Vec::new(),
        slept_ms: 0,
        carried: None,
        by: None,
        changes: None,
    }
}

/// A drive that was never written to.
///
/// # Panics
///
/// When a name cannot be one.
#[must_use]
pub fn drive(project: &str, name: &str) -> Drive {
    Drive {
        format: FORMAT,
        id: DriveId::fresh(),
        project: project.parse().expect("a name fit for tests"),
        name: name.parse().expect("a name fit for tests"),
        max_size: DRIVE_SIZE,
        layers: Vec::new(),
        generation: 0,
        attached: None,
        parent: None,
        root: None,
        notes: std::collections::BTreeMap::new(),
        created_at: now(),
        updated_at: now(),
    }
}

async fn drives_have_names_and_an_order(db: &dyn Db) {
    let mut made = Vec::new();
    // The last two were made in the same millisecond, and their names sort apart from their ids.
    for (name, created, updated) in [("b", 1, 9), ("a-2", 2, 5), ("a", 3, 7), ("a_3", 3, 6)] {
        let at = |millis| Timestamp::from_millisecond(millis).expect("a time");
        let drive = Drive { created_at: at(created), updated_at: at(updated), ..drive("d", name) };
        assert!(db.claim_drive(&drive).await.expect("it claims"));
        made.push(drive);
        // Ids of one millisecond are in no order.
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert!(!db.claim_drive(&drive("d", "a")).await.expect("it claims"), "a name that is taken");
    assert!(db.claim_drive(&drive("e", "a")).await.expect("it claims"), "in another project");
    let project = made[0].project.clone();
    let names = async |prefix: Option<&str>, by: By, direction: Direction| {
        let mut names: Vec<String> = Vec::new();
        let mut page = Page { limit: 1, cursor: None, order: Order { by, direction } };
        loop {
            let found = db.drives(Some(&project), prefix, &page).await.expect("it lists");
            names.extend(found.items.iter().map(|drive| drive.name.to_string()));
            page.cursor = found.next;
            if page.cursor.is_none() {
                return names;
            }
        }
    };
    let (up, down) = (Direction::Ascending, Direction::Descending);
    assert_eq!(names(None, By::Created, up).await, ["b", "a-2", "a", "a_3"]);
    assert_eq!(names(None, By::Created, down).await, ["a_3", "a", "a-2", "b"]);
    assert_eq!(names(None, By::Updated, up).await, ["a-2", "a_3", "a", "b"]);
    assert_eq!(names(None, By::Name, up).await, ["a", "a-2", "a_3", "b"]);
    assert_eq!(names(None, By::Name, down).await, ["b", "a_3", "a-2", "a"]);
    assert_eq!(names(Some("a_"), By::Name, up).await, ["a_3"], "no character stands for another");
    let order = Order { by: By::Snapshot, direction: up };
    let refused = db.drives(None, None, &Page { order, ..Page::all() }).await;
    assert!(matches!(refused, Err(DbError::Order)), "they stand on none: {refused:?}");

    let mut changed = made.remove(1);
    changed.layers = vec![LayerId::fresh()];
    changed.updated_at = now();
    db.put_drive(&changed).await.expect("it keeps");
    assert_eq!(db.drive_by_id(&changed.id).await.expect("it finds"), Some(changed.clone()));
    assert_eq!(db.drive(&project, &changed.name).await.expect("it finds"), Some(changed.clone()));
    assert_eq!(names(None, By::Updated, down).await[0], "a-2");
    db.remove_drive(&changed.id).await.expect("it forgets");
    assert_eq!(db.drive(&project, &changed.name).await.expect("it finds"), None);
}

async fn answers_are_kept_by_project(db: &dyn Db) {
    let (mine, theirs): (Name, Name) =
        ("mine".parse().expect("a name"), "theirs".parse().expect("a name"));
    let answer = Remembered { request: "create".to_owned(), answer: "{}".to_owned() };
    db.remember(&mine, "k", &answer).await.expect("it keeps");
    assert_eq!(db.recall(&mine, "k").await.expect("it recalls"), Some(answer));
    assert_eq!(db.recall(&theirs, "k").await.expect("it recalls"), None);
    let project = Project {
        format: FORMAT,
        name: mine.clone(),
        created_at: now(),
        keys: Vec::new(),
        network: ProjectNetwork::default(),
        runs: Default::default(),
    };
    db.put_project(&project).await.expect("it keeps");
    assert_eq!(db.projects().await.expect("it lists"), [project]);
    db.remove_project(&mine).await.expect("it forgets");
    assert_eq!(
        db.recall(&mine, "k").await.expect("it recalls"),
        None,
        "with all that was answered to it"
    );
}
