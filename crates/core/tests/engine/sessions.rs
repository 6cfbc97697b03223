//! Sessions that are meant by their id, how they end, and what they leave.

use std::time::Duration;

use sandkeep_core::db::{By, Direction, Filter, Order, Page};
use sandkeep_core::engine::{
    Checkpoint, Create, Delete, Engine, Error, ErrorKind, Method, SnapshotOnStop, Stop,
};
use sandkeep_core::model::lifecycle::Phase;
use sandkeep_core::model::{Patch, Sandbox, SessionEnd, SessionId, Span};
use sandkeep_testkit::house;
use sandkeep_testkit::house::{name, of, project, sh, small};

async fn app(engine: &Engine) -> Sandbox {
    engine.get(&project(), &name("app")).await.unwrap().sandbox
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_means_one_session_and_takes_a_snapshot_if_it_must() {
    let house = house!();
    let engine = house.open().await;
    let first = engine.create(&project(), small("app"), None).await.unwrap().session.unwrap().id;
    let always = |session: &SessionId| Stop {
        session: Some(session.clone()),
        snapshot: SnapshotOnStop::Always,
        method: Method::Manual,
        expires: Some(None),
        ..Stop::default()
    };
    let stop = async |stop: Stop| engine.stop(&project(), &name("app"), stop, None).await;
    let one = stop(always(&first)).await.unwrap();
    let snapshot = one.snapshot.unwrap().item;
    assert_eq!((snapshot.generation, snapshot.method), (1, Method::Manual), "nothing was written");
    assert_eq!((snapshot.expires_at(), snapshot.expiry_given), (None, true));
    assert!(one.session.as_ref().unwrap().requested_stop_at.is_some());

    let second = engine.start(&project(), &name("app"), None).await.unwrap().session.unwrap();
    assert_eq!(second.from.as_ref(), Some(&snapshot.id));
    sh(&engine, "app", "echo kept > /work/file").await;
    let late = stop(always(&first)).await.unwrap();
    assert_eq!(late.session.unwrap(), one.session.unwrap(), "that one is over");
    assert_eq!(late.snapshot.unwrap().item.id, snapshot.id);
    assert_eq!(app(&engine).await.phase(), Phase::Running, "and this one is not");
    let nobody = stop(always(&SessionId::fresh())).await;
    assert!(matches!(nobody, Err(Error::NoSession(_))), "{nobody:?}");

    let two = stop(Stop::default()).await.unwrap().snapshot.unwrap().item;
    assert_eq!((two.parent.as_ref(), two.method), (Some(&snapshot.id), Method::Automatic));
    let third = engine.start(&project(), &name("app"), None).await.unwrap().session.unwrap();
    let three = stop(always(&third.id)).await.unwrap().snapshot.unwrap().item;
    assert_ne!(three.id, two.id, "its own, of the same files");
    assert_eq!((&three.layers, three.parent.as_ref()), (&two.layers, Some(&two.id)));
    assert_eq!(sh(&engine, "app", "cat /work/file").await.out, "kept\n");
    let configured = stop(Stop::default()).await.unwrap().snapshot.unwrap().item;
    assert_eq!(configured.id, three.id, "as before, nothing new is no snapshot");

    let wrong = Stop { expires: Some(Some(Span::seconds(1))), ..Stop::default() };
    assert_eq!(stop(wrong).await.unwrap_err().kind(), ErrorKind::Invalid);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_end_gives_a_snapshot_where_that_was_asked_for() {
    let house = house!();
    let engine = house.open().await;
    let patch = Patch {
        snapshot_always: Some(true),
        session_timeout: Some(Some(Span::seconds(1))),
        ..small("app").patch
    };
    let request = Create { patch, ..small("app") };
    let session = engine.create(&project(), request, None).await.unwrap().session.unwrap();
    let ended = wait_for_end(&engine, &session.id).await;
    assert_eq!(ended, Some(SessionEnd::Timeout));
    let (sandbox, session) = engine.session(&project(), &session.id).await.unwrap();
    assert!(sandbox.current.is_some() && session.snapshot == sandbox.current, "{session:?}");

    // One that is not persistent has none by itself, and one if asked; it then starts from that.
    let patch = Patch { persistent: Some(false), snapshot_always: Some(true), ..small("x").patch };
    engine.create(&project(), Create { patch, ..small("brief") }, None).await.unwrap();
    sh(&engine, "brief", "echo one > /work/file").await;
    let stop = |snapshot| Stop { snapshot, ..Stop::default() };
    let stopped =
        engine.stop(&project(), &name("brief"), stop(SnapshotOnStop::Always), None).await.unwrap();
    assert!(stopped.snapshot.is_some());
    sh(&engine, "brief", "echo two > /work/file").await;
    let stopped = engine
        .stop(&project(), &name("brief"), stop(SnapshotOnStop::Configured), None)
        .await
        .unwrap();
    assert_eq!(stopped.session.unwrap().snapshot, None, "this session left none");
    assert_eq!(sh(&engine, "brief", "cat /work/file").await.out, "one\n");
}

async fn wait_for_end(engine: &Engine, id: &SessionId) -> Option<SessionEnd> {
    for _ in 0..200 {
        let (_, session) = engine.session(&project(), id).await.unwrap();
        if session.ended_at.is_some() {
            return session.end;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    None
}

#[tokio::test(flavor = "multi_thread")]
async fn checkpoints_and_extensions_mean_one_session_too() {
    let house = house!();
    let engine = house.open().await;
    let patch = Patch { session_timeout: Some(Some(Span::seconds(600))), ..small("app").patch };
    let request = Create { patch, ..small("app") };
    let session = engine.create(&project(), request, None).await.unwrap().session.unwrap();
    let app = name("app");
    let stranger = SessionId::fresh();
    let by = Span(61_001);
    let extended =
        engine.extend(&project(), &app, by, Some(session.id.clone())).await.unwrap().deadline;
    let more = extended.unwrap().as_millisecond() - session.deadline.unwrap().as_millisecond();
    assert_eq!(more, 61_001, "by exactly that");
    let refused = engine.extend(&project(), &app, by, Some(stranger.clone())).await;
    assert!(matches!(refused, Err(Error::SessionEnded { .. })), "{refused:?}");
    let refused = engine.extend(&project(), &app, Span(u64::MAX), None).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused}");

    let of = |session: &SessionId| Checkpoint {
        session: Some(session.clone()),
        method: Method::Manual,
        expires: Some(Some(Span::days(1))),
        ..Checkpoint::default()
    };
    let one = engine.checkpoint(&project(), &app, of(&session.id)).await.unwrap().item;
    assert_eq!((one.method, one.expires_after), (Method::Manual, Some(Span::days(1))));
    let refused = engine.checkpoint(&project(), &app, of(&stranger)).await;
    assert!(matches!(refused, Err(Error::SessionEnded { .. })), "{refused:?}");
    engine.stop(&project(), &app, Stop::default(), None).await.unwrap();
    let refused = engine.checkpoint(&project(), &app, of(&session.id)).await;
    assert!(matches!(refused, Err(Error::SessionEnded { .. })), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn totals_are_the_sum_of_all_sessions() {
    let house = house!();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    let mut phase_at = app(&engine).await.phase_at;
    for _ in 0..3 {
        sh(&engine, "app", "i=0; while [ $i -lt 30000 ]; do i=$((i+1)); done").await;
        engine.stop(&project(), &name("app"), Stop::default(), None).await.unwrap();
        let stopped = app(&engine).await;
        assert!(stopped.phase_at > phase_at, "it changed");
        engine.update(&project(), &name("app"), Patch::default()).await.unwrap();
        phase_at = app(&engine).await.phase_at;
        assert_eq!(phase_at, stopped.phase_at, "and now it did not");
    }
    let totals = app(&engine).await.totals;
    let sessions = engine.sessions(&project(), &name("app"), &Page::all()).await.unwrap().items;
    let sum = |of: fn(&sandkeep_core::model::Usage) -> u64| -> u64 {
        sessions.iter().map(|session| of(&session.usage)).sum()
    };
    assert_eq!(sessions.len(), 3);
    assert_eq!(totals.wall_ms, sum(|usage| usage.wall_ms));
    assert_eq!(totals.active_cpu_ms, sum(|usage| usage.active_cpu_ms));
    assert!(totals.active_cpu_ms > 0 && totals.memory_peak.0 > 0, "{totals:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_starts_while_it_stops_waits_and_resumes() {
    let house = house!();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    for round in 0..5 {
        let before = engine.get(&project(), &name("app")).await.unwrap().session.unwrap().id;
        sh(&engine, "app", &format!("echo {round} > /work/round")).await;
        let stopper = engine.clone();
        let stop = tokio::spawn(async move {
            let wish = Stop { snapshot: SnapshotOnStop::Always, ..Stop::default() };
            stopper.stop(&project(), &name("app"), wish, None).await.unwrap()
        });
        while engine.get(&project(), &name("app")).await.unwrap().sandbox.phase() == Phase::Running
        {
            tokio::task::yield_now().await;
        }
        let starts: Vec<_> = (0..4)
            .map(|_| {
                let engine = engine.clone();
                tokio::spawn(
                    async move { engine.start(&project(), &name("app"), None).await.unwrap() },
                )
            })
            .collect();
        let mut resumed = 0;
        for start in starts {
            let opened = start.await.unwrap();
            assert_ne!(opened.session.unwrap().id, before, "a new session");
            resumed += usize::from(opened.resumed);
        }
        assert_eq!(resumed, 1, "started once");
        let stopped = stop.await.unwrap();
        assert_eq!(stopped.session.unwrap().id, before);
        let written = sh(&engine, "app", "cat /work/round").await.out;
        assert_eq!(written, format!("{round}\n"), "from what the stop kept");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_and_commands_are_found_by_id_and_in_order() {
    let house = house!();
    let engine = house.open().await;
    let mut ids = Vec::new();
    for text in ["app", "other"] {
        for _ in 0..2 {
            let request = Create { if_exists: sandkeep_core::engine::IfExists::Get, ..small(text) };
            let opened = engine.create(&project(), request, None).await.unwrap();
            ids.push(opened.session.unwrap().id);
            sh(&engine, text, "true").await;
            engine.stop(&project(), &name(text), Stop::default(), None).await.unwrap();
        }
    }
    let oldest_first = Order { direction: Direction::Ascending, ..Order::default() };
    let mut page = Page { limit: 3, cursor: None, order: oldest_first };
    let first = engine.project_sessions(&project(), None, &page).await.unwrap();
    page.cursor = first.next;
    let rest = engine.project_sessions(&project(), None, &page).await.unwrap();
    let listed: Vec<_> = first.items.into_iter().chain(rest.items).map(|item| item.id).collect();
    assert_eq!(listed, ids);
    let other = engine.project_sessions(&project(), Some(&name("other")), &Page::all()).await;
    assert_eq!(other.unwrap().items.len(), 2);
    let misread = engine.project_sessions(&project(), Some(&name("app")), &page).await;
    assert_eq!(misread.unwrap_err().kind(), ErrorKind::Invalid, "the cursor of another list");
    let by_name = Order { by: By::Name, ..Order::default() };
    let unsorted = Page { order: by_name, ..Page::default() };
    let refused = engine.project_sessions(&project(), None, &unsorted).await;
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Invalid);
    let listed = engine.list(&project(), &Filter::default(), &unsorted).await.unwrap().items;
    assert_eq!(listed[0].name, name("other"), "sandboxes can be");

    let (sandbox, _) = engine.session(&project(), &ids[2]).await.unwrap();
    assert_eq!(sandbox.name, name("other"));
    let ran = engine.session_commands(&project(), &ids[2], &Page::all()).await.unwrap().items;
    assert_eq!(ran.len(), 1);
    assert_eq!(ran[0].session, ids[2]);
    let foreign = engine.session(&name("elsewhere"), &ids[2]).await;
    assert!(matches!(foreign, Err(Error::NoSession(_))), "{foreign:?}");
    engine.delete(&project(), &name("other"), Delete::default(), None).await.unwrap();
    let gone = engine.session_commands(&project(), &ids[2], &Page::all()).await;
    assert!(matches!(gone, Err(Error::NoSession(_))), "{gone:?}");
    assert_eq!(
        engine.project_sessions(&project(), None, &Page::all()).await.unwrap().items.len(),
        2
    );
    assert!(
        engine.snapshots(&project(), of("other"), &Page::all()).await.unwrap().items.is_empty()
    );
}

/// A host that froze under load has many machines that do not answer, and the daemon is to be there before it has waited for each of them.
#[tokio::test(flavor = "multi_thread")]
async fn machines_that_do_not_answer_are_waited_for_together() {
    let mut house = house!();
    house.settings.patience = Duration::from_secs(6);
    let engine = house.open().await;
    let names = ["one", "two", "three", "four", "five"];
    for sandbox in names {
        engine.create(&project(), small(sandbox), None).await.unwrap();
        sh(&engine, sandbox, "echo kept > /work/file").await;
    }
    engine.shutdown().await;
    drop(engine);
    house.hang_agents().await;
    let began = std::time::Instant::now();
    let engine = house.open_when_free().await;
    let took = began.elapsed();
    assert!(took >= house.settings.patience, "they answered: {took:?}");
    assert!(took < house.settings.patience * 4, "one after the other: {took:?}");
    for sandbox in names {
        let now = engine.get_settled(&project(), &name(sandbox)).await.unwrap().sandbox;
        assert_eq!(now.phase(), Phase::Stopped, "{sandbox}");
        assert_eq!(sh(&engine, sandbox, "cat /work/file").await.out, "kept\n", "{sandbox}");
    }
}
