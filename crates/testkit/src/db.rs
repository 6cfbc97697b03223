//! The contract every index is held to.

use std::time::Duration;

use sandkeep_core::db::{Db, DriveOrder, DriveQuery, Filter, Page, Remembered};
use sandkeep_core::engine::lifecycle::Phase;
use sandkeep_core::model::{
    Config, DRIVE_SIZE, Drive, DriveId, FORMAT, ImageConfig, LayerId, Name, Project, Sandbox,
    SandboxId, SessionId, Snapshot, SnapshotId, SnapshotKind, Span, Tags, Timestamp, now,
};

/// A sandbox as it is on record before it has ever run.
///
/// # Panics
///
/// When the name cannot be one.
#[must_use]
pub fn sandbox(project: &str, name: &str) -> Sandbox {
    Sandbox {
        format: FORMAT,
        id: SandboxId::fresh(),
        project: project.parse().expect("a name fit for tests"),
        name: name.parse().expect("a name fit for tests"),
        config: Config::default(),
        phase: Phase::Stopped,
        debt: None,
        generation: 0,
        current: None,
        image_layers: Vec::new(),
        image_config: ImageConfig::default(),
        forked_from: None,
        session: None,
        open_layer: None,
        open_chain: Vec::new(),
        unsealed: None,
        mounted: Vec::new(),
        uids: None,
        created_with: None,
        created_at: now(),
        updated_at: now(),
        used_at: now(),
        failure: None,
        validated: None,
    }
}

fn snapshot(of: &Sandbox, generation: u64) -> Snapshot {
    Snapshot {
        format: FORMAT,
        id: SnapshotId::fresh(),
        project: of.project.clone(),
        sandbox: of.id.clone(),
        sandbox_name: of.name.clone(),
        session: SessionId::fresh(),
        generation,
        parent: None,
        kind: SnapshotKind::Stop,
        label: None,
        layers: vec![LayerId::fresh()],
        created_at: now(),
        expires_at: None,
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
    answers_are_kept_by_project(db).await;
    drives_have_names_and_an_order(db).await;
    db.clear().await.expect("it empties");
    let left = db.sandboxes(None, &Filter::default(), &Page::all()).await.expect("it lists").items;
    assert_eq!(left, [], "cleared");
    let left = db.drives(None, &DriveQuery::default(), &Page::all()).await.expect("it lists").items;
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
    first.phase = Phase::Running;
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
        ]);
        if name == "two" {
            sandbox.phase = Phase::Running;
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
    let running = Filter { phase: Some(Phase::Running), ..Filter::default() };
    assert_eq!(list(&running, &Page::all()).await.0, ["two"]);
    let prefixed = Filter { name_prefix: Some("o".to_owned()), ..Filter::default() };
    assert_eq!(list(&prefixed, &Page::all()).await.0.len(), 2, "one, other");
    let (all, none) = list(&Filter::default(), &Page::all()).await;
    assert_eq!((all.len(), none), (3, None));
    let (first, next) = list(&Filter::default(), &Page { limit: 2, cursor: None }).await;
    let (rest, end) = list(&Filter::default(), &Page { limit: 2, cursor: next }).await;
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
    assert!(!db.remove_snapshot(&new.id, None).await.expect("it answers"), "somebody stands on it");
    assert_eq!(
        db.snapshot(&new.id).await.expect("it finds"),
        Some(new.clone()),
        "and it is still there"
    );
    assert!(db.remove_snapshot(&old.id, None).await.expect("it answers"), "nobody does");
    assert!(
        db.remove_snapshot(&new.id, Some(&holder.id)).await.expect("it answers"),
        "only the one who lets go"
    );
    let left = db.snapshots(None, Some(&holder.id), &Page::all()).await.expect("it lists").items;
    assert_eq!(left, []);
}

/// A drive that nobody has written to.
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
    let names = async |query: &DriveQuery| {
        let mut names: Vec<String> = Vec::new();
        let mut page = Page { limit: 1, cursor: None };
        loop {
            let found = db.drives(Some(&project), query, &page).await.expect("it lists");
            names.extend(found.items.iter().map(|drive| drive.name.to_string()));
            page.cursor = found.next;
            if page.cursor.is_none() {
                return names;
            }
        }
    };
    let query = |order, ascending| DriveQuery { order, ascending, name_prefix: None };
    assert_eq!(names(&query(DriveOrder::Created, true)).await, ["b", "a-2", "a", "a_3"]);
    assert_eq!(names(&DriveQuery::default()).await, ["a_3", "a", "a-2", "b"], "newest first");
    assert_eq!(names(&query(DriveOrder::Updated, true)).await, ["a-2", "a_3", "a", "b"]);
    assert_eq!(names(&query(DriveOrder::Name, true)).await, ["a", "a-2", "a_3", "b"]);
    assert_eq!(names(&query(DriveOrder::Name, false)).await, ["b", "a_3", "a-2", "a"]);
    let prefix = DriveQuery { name_prefix: Some("a_".to_owned()), ..DriveQuery::default() };
    assert_eq!(names(&prefix).await, ["a_3"], "no character stands for another");

    let mut changed = made.remove(1);
    changed.layers = vec![LayerId::fresh()];
    changed.updated_at = now();
    db.put_drive(&changed).await.expect("it keeps");
    assert_eq!(db.drive_by_id(&changed.id).await.expect("it finds"), Some(changed.clone()));
    assert_eq!(db.drive(&project, &changed.name).await.expect("it finds"), Some(changed.clone()));
    assert_eq!(names(&query(DriveOrder::Updated, false)).await[0], "a-2");
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
    let project =
        Project { format: FORMAT, name: mine.clone(), created_at: now(), keys: Vec::new() };
    db.put_project(&project).await.expect("it keeps");
    assert_eq!(db.projects().await.expect("it lists"), [project]);
    db.remove_project(&mine).await.expect("it forgets");
    assert_eq!(
        db.recall(&mine, "k").await.expect("it recalls"),
        None,
        "with all that was answered to it"
    );
}
