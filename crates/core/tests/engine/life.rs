//! The life of a sandbox on the real driver: what is kept, what is refused, what many callers get.

use std::sync::Arc;

use sandkeep_core::db::{Filter, Page};
use sandkeep_core::engine::{
    Checkpoint, Create, Delete, Error, Exec, Fork, ForkFrom, IfExists, Stop, WakeMode,
};
use sandkeep_core::model::lifecycle::Phase;
use sandkeep_core::model::{Class, Hook, Hooks, Patch, SessionEnd, SnapshotKind, Span, Tags};
use sandkeep_testkit::house;
use sandkeep_testkit::house::{House, labelled, name, project, sh, small};

#[tokio::test(flavor = "multi_thread")]
async fn what_was_written_is_there_after_a_stop() {
    let house = house!();
    let engine = house.open().await;
    let opened = engine.create(&project(), small("app"), None).await.unwrap();
    assert!(opened.created && !opened.resumed);
    assert_eq!(opened.sandbox.phase(), Phase::Running);
    assert_eq!(
        sh(&engine, "app", "echo kept > /work/file; echo out; echo err >&2; exit 3")
            .await
            .command
            .exit_code,
        Some(3)
    );

    let stopped = engine.stop(&project(), &name("app"), Stop::default(), None).await.unwrap();
    let snapshot = stopped.snapshot.unwrap();
    assert_eq!((snapshot.item.generation, snapshot.item.kind), (1, SnapshotKind::Stop));
    assert!(snapshot.own > 0 && snapshot.freed_if_deleted == snapshot.own, "{snapshot:?}");
    let session = stopped.session.unwrap();
    assert_eq!(session.end, Some(SessionEnd::Stopped));
    assert!(session.usage.wall_ms > 0 && session.usage.memory_peak.0 > 0, "{:?}", session.usage);
    assert!(house_is_quiet(&house).await);

    let refused = engine.files(&project(), &name("app"), WakeMode::IfRunning).await;
    assert!(matches!(refused, Err(Error::NotRunning(_))));
    assert_eq!(sh(&engine, "app", "cat /work/file").await.out, "kept\n");
    let again = engine.stop(&project(), &name("app"), Stop::default(), None).await.unwrap();
    assert_eq!(again.sandbox.generation, 1, "nothing was written, so nothing new is acknowledged");
    assert_eq!(again.snapshot.unwrap().item.id, snapshot.item.id);
}

async fn house_is_quiet(house: &House) -> bool {
    use sandkeep_core::driver::Driver as _;
    house.driver().survivors().await.expect("survivors are listed").is_empty()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_starts_where_its_source_is_and_goes_its_own_way() {
    let house = house!();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    sh(&engine, "app", "echo one > /work/file").await;
    // Of a running sandbox: checkpointed first, never something older.
    let fork = Fork { name: Some(name("try")), start: true, ..Fork::default() };
    let forked = engine.fork(&project(), &name("app"), fork, None).await.unwrap();
    assert_eq!(forked.sandbox.forked_from.as_ref().unwrap().name, name("app"));
    assert_eq!(sh(&engine, "try", "cat /work/file; echo two > /work/file").await.out, "one\n");
    assert_eq!(sh(&engine, "app", "cat /work/file").await.out, "one\n");
    engine.stop(&project(), &name("try"), Stop::default(), None).await.unwrap();
    assert_eq!(sh(&engine, "try", "cat /work/file").await.out, "two\n");

    let tree = engine.lineage(&project(), &name("try")).await.unwrap();
    assert_eq!(tree.sandboxes.len(), 2);
    assert_eq!(tree.snapshots.len(), 2);
    // The source goes; what the fork stands on stays, and what it began at, which it is compared with.
    let kept = engine
        .delete(&project(), &name("app"), Delete::default(), None)
        .await
        .unwrap()
        .snapshots_kept;
    assert_eq!(kept, [forked.sandbox.current.expect("it began at a snapshot")]);
    assert_eq!(sh(&engine, "try", "cat /work/file").await.out, "two\n");

    let stale = Fork { name: Some(name("x")), expect_generation: Some(77), ..Fork::default() };
    let refused = engine.fork(&project(), &name("try"), stale, None).await;
    assert!(matches!(refused, Err(Error::Generation { expected: 77, .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_of_what_was_kept_leaves_the_session_alone() {
    let house = house!();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    let fork = |to: &str| Fork {
        name: Some(name(to)),
        from: ForkFrom::Kept,
        start: true,
        ..Fork::default()
    };
    sh(&engine, "app", "echo old > /work/file").await;
    let bare = engine.fork(&project(), &name("app"), fork("bare"), None).await.unwrap();
    assert_eq!(bare.sandbox.current, None, "nothing was kept yet: it starts from the image");
    assert_eq!(sh(&engine, "bare", "ls /work").await.out, "");

    engine.stop(&project(), &name("app"), Stop::default(), None).await.unwrap();
    sh(&engine, "app", "echo new > /work/file").await;
    let before = engine.get(&project(), &name("app")).await.unwrap().sandbox;
    let made = engine.fork(&project(), &name("app"), fork("try"), None).await.unwrap();
    assert_eq!(made.sandbox.current, before.current);
    assert_eq!(sh(&engine, "try", "cat /work/file").await.out, "old\n");
    let after = engine.get(&project(), &name("app")).await.unwrap().sandbox;
    assert_eq!((after.generation, after.session), (before.generation, before.session));
    assert_eq!(sh(&engine, "app", "cat /work/file").await.out, "new\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_ends_nothing_and_can_be_gone_back_to() {
    let house = house!();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    sh(&engine, "app", "echo good > /work/file; echo shm > /dev/shm/x").await;
    let idle = engine.checkpoint(&project(), &name("app"), labelled("green")).await.unwrap();
    assert_eq!(idle.item.label.as_deref(), Some("green"));
    assert_eq!(
        sh(&engine, "app", "cat /dev/shm/x /work/file").await.out,
        "shm\ngood\n",
        "the session went on"
    );

    let busy = Exec {
        argv: ["sh", "-c", "while :; do date > /work/tick; sleep 0.01; done"]
            .map(str::to_owned)
            .to_vec(),
        detach: true,
        ..Exec::default()
    };
    let busy = engine.exec(&project(), &name("app"), busy).await.unwrap().command;
    sh(&engine, "app", "echo worse > /work/file; ln /work/file /work/link; rm /work/tick; true")
        .await;
    let while_busy =
        engine.checkpoint(&project(), &name("app"), Checkpoint::default()).await.unwrap();
    assert_eq!(while_busy.item.generation, idle.item.generation + 1);
    assert!(
        engine.command(&project(), &name("app"), &busy.id).await.unwrap().ended_at.is_none(),
        "it goes on"
    );
    sh(&engine, "app", "rm /work/link; echo worst > /work/file").await;
    let second = engine.checkpoint(&project(), &name("app"), Checkpoint::default()).await.unwrap();
    assert_eq!(second.item.parent.as_ref(), Some(&while_busy.item.id));

    let back = engine.rollback(&project(), &name("app"), &idle.item.id, None).await.unwrap();
    let before = back.before.unwrap();
    assert_eq!(before.kind, SnapshotKind::BeforeRollback);
    assert_eq!(sh(&engine, "app", "cat /work/file; ls /work").await.out, "good\nfile\n");
    engine.rollback(&project(), &name("app"), &while_busy.item.id, None).await.unwrap();
    assert_eq!(sh(&engine, "app", "cat /work/link").await.out, "worse\n");
    engine.rollback(&project(), &name("app"), &second.item.id, None).await.unwrap();
    assert_eq!(
        sh(&engine, "app", "cat /work/file; ls /work | grep -v tick").await.out,
        "worst\nfile\n"
    );
    engine.rollback(&project(), &name("app"), &before.id, None).await.unwrap();
    assert_eq!(
        sh(&engine, "app", "cat /work/file").await.out,
        "worst\n",
        "a rollback can be undone"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_callers_get_one_sandbox_and_one_session() {
    let house = house!();
    let engine = house.open().await;
    let creates = (0..100).map(|_| {
        let engine = engine.clone();
        tokio::spawn(async move {
            let request = Create { if_exists: IfExists::Get, ..small("one") };
            engine.create(&project(), request, None).await.unwrap()
        })
    });
    let mut made = 0;
    let mut ids = std::collections::HashSet::new();
    for create in creates.collect::<Vec<_>>() {
        let opened = create.await.unwrap();
        made += usize::from(opened.created);
        ids.insert(opened.sandbox.id);
    }
    assert_eq!((made, ids.len()), (1, 1));

    engine.stop(&project(), &name("one"), Stop::default(), None).await.unwrap();
    let execs = (0..100).map(|_| {
        let engine = engine.clone();
        tokio::spawn(async move { sh(&engine, "one", "echo hello").await })
    });
    let mut sessions = std::collections::HashSet::new();
    for exec in execs.collect::<Vec<_>>() {
        let ran = exec.await.unwrap();
        assert_eq!(ran.out, "hello\n");
        sessions.insert(ran.command.session);
    }
    assert_eq!(sessions.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_is_gone_leaves_sandboxes_running_and_the_next_adopts_them() {
    let house = house!();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    let line = "i=0; while [ $i -lt 2000 ]; do echo line $i; i=$((i+1)); done; sleep 0.5; echo done > /work/done; echo bye";
    let exec = Exec {
        argv: ["sh", "-c", line].map(str::to_owned).to_vec(),
        detach: true,
        ..Exec::default()
    };
    let command = engine.exec(&project(), &name("app"), exec).await.unwrap().command;
    let engine = house.reopen(engine).await;
    let ended = engine.wait(&project(), &name("app"), &command.id).await.unwrap();
    assert_eq!(ended.exit_code, Some(0));
    let mut events = engine.logs(&project(), &name("app"), &command.id, true).await.unwrap();
    let mut text = String::new();
    while let Some(event) = events.next().await {
        if let sandkeep_core::engine::CommandOutput::Stdout(bytes) = event {
            text.push_str(std::str::from_utf8(&bytes).unwrap());
        }
    }
    let expected: String = (0..2000).map(|i| format!("line {i}\n")).collect();
    assert_eq!(text, format!("{expected}bye\n"), "nothing lost, nothing doubled");
    assert_eq!(sh(&engine, "app", "cat /work/done").await.command.session, command.session);
}

/// The old engine's tasks release the data directory's lock a moment after it is dropped.
#[tokio::test(flavor = "multi_thread")]
async fn hooks_run_and_what_they_did_is_told() {
    let house = house!();
    let engine = house.open().await;
    let hook =
        |line: &str| Hook { argv: ["sh", "-c", line].map(str::to_owned).to_vec(), timeout: None };
    let hooks = Hooks {
        on_create: vec![hook("echo made > /work/made")],
        on_resume: vec![hook("exit 4"), hook("echo never > /work/never")],
        validate: Some(hook("cat /work/checked")),
        validate_git: None,
    };
    let mut request = small("app");
    request.patch.hooks = Some(hooks);
    let opened = engine.create(&project(), request, None).await.unwrap();
    assert_eq!(opened.session.unwrap().hooks[0].exit_code, Some(0));
    sh(&engine, "app", "echo v1 > /work/checked").await;
    engine.stop(&project(), &name("app"), Stop::default(), None).await.unwrap();
    let session = engine.start(&project(), &name("app"), None).await.unwrap().session.unwrap();
    assert_eq!(session.valid, Some(true));
    let told: Vec<_> = session.hooks.iter().map(|run| (run.hook.as_str(), run.exit_code)).collect();
    assert_eq!(
        told,
        [("validate", Some(0)), ("on_resume", Some(4))],
        "the first that fails ends the list"
    );
    assert_eq!(sh(&engine, "app", "ls /work").await.out, "checked\nmade\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_and_overlong_sessions_end_by_themselves() {
    let house = house!();
    let engine = house.open().await;
    let mut request = small("idle");
    request.patch.idle_timeout = Some(Some(Span::seconds(1)));
    engine.create(&project(), request, None).await.unwrap();
    sh(&engine, "idle", "echo x > /work/x").await;
    let mut request = small("long");
    request.patch.idle_timeout = Some(None);
    request.patch.session_timeout = Some(Some(Span::seconds(1)));
    engine.create(&project(), request, None).await.unwrap();
    for (sandbox, end) in [("idle", SessionEnd::Idle), ("long", SessionEnd::Timeout)] {
        let mut ended = None;
        for _ in 0..200 {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            ended = engine.get(&project(), &name(sandbox)).await.unwrap().session.unwrap().end;
            if ended.is_some() {
                break;
            }
        }
        assert_eq!(ended, Some(end), "{sandbox}");
    }
    assert_eq!(sh(&engine, "idle", "cat /work/x").await.out, "x\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn retries_under_one_key_do_the_work_once() {
    let house = house!();
    let engine = house.open().await;
    let key = || Some("k-1".to_owned());
    let unnamed = || Create { name: None, ..small("unused") };
    let first = engine.create(&project(), unnamed(), key()).await.unwrap();
    let again = engine.create(&project(), unnamed(), key()).await.unwrap();
    assert_eq!(first.sandbox.name, again.sandbox.name);
    assert!(matches!(
        engine.create(&project(), small("other"), key()).await,
        Err(Error::KeyReused(_))
    ));
    let sandbox = first.sandbox.name;
    let project = project();
    let stop = || engine.stop(&project, &sandbox, Stop::default(), Some("k-2".to_owned()));
    assert_eq!(stop().await.unwrap(), stop().await.unwrap());
    let delete = || engine.delete(&project, &sandbox, Delete::default(), Some("k-3".to_owned()));
    delete().await.unwrap();
    delete().await.unwrap();
    assert!(matches!(engine.get(&project, &sandbox).await, Err(Error::NoSandbox(_))));
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_wishes_are_refused_and_leave_nothing() {
    let house = house!();
    let engine = Arc::new(house.open().await);
    let with = |change: fn(&mut Patch)| {
        let mut request = small("bad");
        change(&mut request.patch);
        request
    };
    let wishes = [
        with(|p| p.image = Some("no-such".to_owned())),
        with(|p| p.driver = Some("magic".to_owned())),
        with(|p| p.pids = Some(0)),
        with(|p| p.tags = Some((0..33).map(|i| (format!("t{i}"), String::new())).collect())),
        with(|p| p.cwd = Some(Some("relative".to_owned()))),
        with(|p| (p.class, p.persistent) = (Some(Class::Ephemeral), Some(true))),
        with(|p| p.exclude = Some(vec!["[".to_owned()])),
        Create { from: Some(sandkeep_core::model::SnapshotId::fresh()), ..small("bad") },
    ];
    for wish in wishes {
        let error =
            engine.create(&project(), wish.clone(), None).await.expect_err(&format!("{wish:?}"));
        assert_ne!(error.kind(), sandkeep_core::engine::ErrorKind::Fault, "{error}");
    }
    assert_eq!(
        engine.list(&project(), &Filter::default(), &Page::default()).await.unwrap().items,
        []
    );

    engine.create(&project(), small("app"), None).await.unwrap();
    assert!(matches!(
        engine.create(&project(), small("app"), None).await,
        Err(Error::NameTaken(_))
    ));
    let missing = Exec { argv: vec!["no-such-program".to_owned()], ..Exec::default() };
    let error =
        engine.exec(&project(), &name("app"), missing).await.expect_err("there is no such program");
    assert_eq!(error.code(), "executable_not_found");
    let current =
        engine.checkpoint(&project(), &name("app"), Checkpoint::default()).await.unwrap().item.id;
    assert!(matches!(
        engine.delete_snapshot(&project(), &current, false).await,
        Err(Error::SnapshotInUse { .. })
    ));
}

#[tokio::test(flavor = "multi_thread")]
async fn sandboxes_are_found_by_all_their_tags_at_once() {
    let house = house!();
    let engine = house.open().await;
    for (n, (customer, agent)) in
        [("acme", "1"), ("acme", "2"), ("zeta", "1")].into_iter().enumerate()
    {
        let mut request = small(&format!("s{n}"));
        request.start = false;
        request.patch.tags = Some(Tags::from([
            ("customer".into(), customer.into()),
            ("agent".into(), agent.into()),
        ]));
        engine.create(&project(), request, None).await.unwrap();
    }
    let find = |tags: &[(&str, &str)]| {
        let tags = tags.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        Filter { tags, ..Filter::default() }
    };
    let names = |filter: Filter| {
        let engine = engine.clone();
        async move {
            let found = engine.list(&project(), &filter, &Page::default()).await.unwrap().items;
            found.into_iter().map(|sandbox| sandbox.name.to_string()).collect::<Vec<_>>()
        }
    };
    assert_eq!(names(find(&[("customer", "acme")])).await, ["s1", "s0"]);
    assert_eq!(names(find(&[("customer", "acme"), ("agent", "1")])).await, ["s0"]);
    let moved = Some(Tags::from([("customer".into(), "zeta".into())]));
    let patch = Patch { tags: moved, ..Patch::default() };
    engine.update(&project(), &name("s0"), patch).await.unwrap();
    assert_eq!(names(find(&[("customer", "zeta")])).await, ["s2", "s0"]);
    assert_eq!(names(find(&[("agent", "1")])).await, ["s2"]);
    let page = engine
        .list(&project(), &Filter::default(), &Page { limit: 2, ..Page::default() })
        .await
        .unwrap();
    assert_eq!(page.items.len(), 2);
    let rest = engine
        .list(
            &project(),
            &Filter::default(),
            &Page { limit: 2, cursor: page.next, ..Page::default() },
        )
        .await
        .unwrap();
    assert_eq!((rest.items.len(), rest.next), (1, None));
}

/// In tests a seal that takes what was measured ahead visits every name all the same, and panics if
/// that is not what exists.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_written_after_an_idle_time_is_sealed_too() {
    let house = house!();
    let engine = house.open().await;
    let app = name("app");
    engine.create(&project(), small("app"), None).await.unwrap();
    let idle = || tokio::time::sleep(std::time::Duration::from_secs(3));
    let project = &project();
    let stop = || engine.stop(project, &app, Stop::default(), None);
    // By a command, right before the stop.
    sh(&engine, "app", "echo one > /work/file").await;
    idle().await;
    sh(&engine, "app", "echo two > /work/file; echo new > /work/new").await;
    stop().await.unwrap();
    assert_eq!(sh(&engine, "app", "cat /work/file /work/new").await.out, "two\nnew\n");
    // By the agent.
    idle().await;
    let files = engine.files(project, &app, WakeMode::Wake).await.unwrap();
    files.make_dir("/work/dir", None, false).await.unwrap();
    drop(files);
    stop().await.unwrap();
    assert_eq!(sh(&engine, "app", "ls /work").await.out, "dir\nfile\nnew\n");
    // By a process that a command left behind.
    sh(&engine, "app", "(while :; do date +%N > /work/file; sleep 0.01; done) >/dev/null 2>&1 &")
        .await;
    idle().await;
    stop().await.unwrap();
    // Checkpoints of an idle sandbox, one after the other.
    for round in ["three", "four"] {
        sh(&engine, "app", &format!("echo {round} > /work/file")).await;
        idle().await;
        engine.checkpoint(project, &app, Checkpoint::default()).await.unwrap();
        assert_eq!(sh(&engine, "app", "cat /work/file").await.out, format!("{round}\n"));
    }
    stop().await.unwrap();
    let report = engine.fsck().await.unwrap();
    assert!(!report.is_broken(), "{report:?}");
}
