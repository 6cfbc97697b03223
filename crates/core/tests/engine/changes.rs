//! What each command changed.

use sandkeep_core::db::Page;
use sandkeep_core::engine::{Checkpoint, Engine, Exec, Stop, WakeMode};
use sandkeep_core::model::{CommandChanges, CommandId, Patch, PathChange, Session, SessionChanges};
use sandkeep_core::store::ListedChanges;
use sandkeep_testkit::daemon::skipped;
use sandkeep_testkit::house;
use sandkeep_testkit::house::{House, detached, machine, name, ok, project, sh, small, until};

/// Counts, whether they are exact, and the paths as `+/path`.
type Seen = ((u64, u64, u64), bool, Vec<String>);

async fn changes(engine: &Engine, id: &CommandId) -> (CommandChanges, ListedChanges) {
    let (command, list) = engine.command_changes(&project(), &name("app"), id).await.unwrap();
    (command.changes.expect("they are known"), list)
}

async fn seen(engine: &Engine, id: &CommandId) -> Seen {
    let (counts, list) = changes(engine, id).await;
    let paths = list.paths.iter().map(|path| {
        let sign = match path.change {
            PathChange::Created => '+',
            PathChange::Modified => '~',
            PathChange::Deleted => '-',
        };
        format!("{sign}{}", path.path)
    });
    ((counts.created, counts.modified, counts.deleted), counts.exact, paths.collect())
}

async fn ran(engine: &Engine, line: &str) -> Seen {
    let command = sh(engine, "app", line).await.command;
    assert_eq!(command.exit_code, Some(0), "{line}");
    seen(engine, &command.id).await
}

fn exactly(counts: (u64, u64, u64), paths: &[&str]) -> Seen {
    (counts, true, paths.iter().map(|path| (*path).to_owned()).collect())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_command_tells_what_it_changed() {
    let house = house!();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    assert_eq!(ran(&engine, "true").await, exactly((0, 0, 0), &[]));
    let made = ran(&engine, "mkdir /work/d; echo one > /work/d/a; echo two > /work/b").await;
    assert_eq!(made, exactly((3, 0, 0), &["+/work/b", "+/work/d", "+/work/d/a"]));
    let appended = ran(&engine, "echo more >> /work/b; chmod 600 /work/d/a").await;
    assert_eq!(appended, exactly((0, 2, 0), &["~/work/b", "~/work/d/a"]));
    let read = ran(&engine, "cat /work/b /work/d/a > /dev/null; ls -R /work > /dev/null").await;
    assert_eq!(read, exactly((0, 0, 0), &[]));

    // What lies below counts as what the sandbox sees: after a stop it is in a layer of its own.
    engine.stop(&project(), &name("app"), Stop::default(), None).await.unwrap();
    let changed = ran(&engine, "echo again > /work/b; echo new > /work/c; rm /work/d/a").await;
    assert_eq!(changed, exactly((1, 1, 1), &["~/work/b", "+/work/c", "-/work/d/a"]));
    // In the same session after a checkpoint too.
    engine.checkpoint(&project(), &name("app"), Checkpoint::default()).await.unwrap();
    let gone = ran(&engine, "rm -r /work/d; rm /work/c; mkdir /work/c").await;
    assert_eq!(gone, exactly((0, 1, 1), &["~/work/c", "-/work/d"]));

    // Everything is still known after a restart, and without waking the sandbox.
    engine.stop(&project(), &name("app"), Stop::default(), None).await.unwrap();
    let engine = house.reopen(engine).await;
    let all = engine.commands(&project(), &name("app"), &Page::default()).await.unwrap().items;
    let counts = |changes: &CommandChanges| (changes.created, changes.modified, changes.deleted);
    let counts: Vec<_> = all.iter().map(|one| one.changes.as_ref().map(counts).unwrap()).collect();
    assert_eq!(counts, [(0, 1, 1), (1, 1, 1), (0, 0, 0), (0, 2, 0), (3, 0, 0), (0, 0, 0)]);
    assert_eq!(seen(&engine, &all[0].id).await, gone);
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_that_run_at_the_same_time_share_their_changes() {
    let house = house!();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    let server = detached(&engine, "app", &["sh", "-c", "while :; do sleep 0.05; done"]).await;
    let short = sh(&engine, "app", "echo 1 > /work/short").await.command;
    let (counts, list) = changes(&engine, &short.id).await;
    assert_eq!((counts.created, counts.exact, list.paths.len()), (1, false, 1));
    assert_eq!(counts.with, [server.to_string()]);
    // So far: it still runs.
    let (counts, _) = changes(&engine, &server).await;
    assert_eq!((counts.created, counts.exact), (1, false));
    assert_eq!(counts.with, [short.id.to_string()]);
    engine.signal(&project(), &name("app"), &server, 9).await.unwrap();
    engine.wait(&project(), &name("app"), &server).await.unwrap();

    // A process that a command leaves behind may write at any time.
    let left = sh(&engine, "app", "(sleep 0.4; echo 2 > /work/later) > /dev/null 2>&1 &").await;
    assert!(!changes(&engine, &left.command.id).await.0.exact);
    let next = sh(&engine, "app", "sleep 0.8").await.command;
    let (counts, _) = changes(&engine, &next.id).await;
    assert_eq!((counts.created, counts.exact), (1, false));
    assert_eq!(ran(&engine, "echo 3 > /work/last").await, exactly((1, 0, 0), &["+/work/last"]));
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn uploads_are_not_taken_for_changes_of_a_command() {
    let house = house!();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    ok(&engine, "app", "true").await;
    // On a busy host a command may start before the upload was looked at, and says so.
    until("an exact record", async || {
        let files = engine.files(&project(), &name("app"), WakeMode::default()).await.unwrap();
        let _ = files.make_dir("/work/up", None, true).await;
        let mut upload = files.write("/work/up/file", None, false, false).await.unwrap();
        upload.send("text".into()).await.unwrap();
        upload.finish().await.unwrap();
        drop(files);
        let command = sh(&engine, "app", "rm -f /work/own; echo 1 > /work/own").await.command;
        let (counts, list) = changes(&engine, &command.id).await;
        let own = list.paths.iter().all(|path| path.path == "/work/own");
        assert!(own || !counts.exact, "{counts:?} {list:?}");
        counts.exact.then_some(())
    })
    .await;
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn long_lists_are_cut_and_counts_are_not() {
    let house = house!();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    let line = "mkdir -p /work/many/deep; cd /work/many/deep; for i in $(seq 5000); do : > f$i; done; echo x > /work/one";
    let command = sh(&engine, "app", line).await.command;
    let (counts, list) = changes(&engine, &command.id).await;
    assert_eq!((counts.created, counts.exact, counts.complete), (5003, true, true));
    assert!(list.paths.len() <= 1000 && list.paths.iter().any(|path| path.path == "/work/one"));
    let more: u64 = list.more.iter().map(|more| more.created).sum();
    assert_eq!(list.paths.len() as u64 + more, 5003);
    assert_eq!(list.more[0].under, "/work/many/deep/");
    // They go with the command.
    let files = house.path().join("data/sandboxes").join(command.sandbox.as_str()).join("commands");
    assert!(files.join(format!("{}.changes", command.id)).exists());
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_outlives_its_daemon_says_that_not_all_is_known() {
    let house = house!();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    let line = "echo 1 > /work/early; sleep 2; echo 2 > /work/late";
    let exec = Exec {
        argv: ["sh", "-c", line].map(str::to_owned).to_vec(),
        detach: true,
        ..Exec::default()
    };
    let id = engine.exec(&project(), &name("app"), exec).await.unwrap().command.id;
    let engine = house.reopen(engine).await;
    engine.wait(&project(), &name("app"), &id).await.unwrap();
    let (counts, _) = changes(&engine, &id).await;
    assert!(!counts.exact && !counts.complete, "{counts:?}");
    // The next one is exact again.
    assert_eq!(ran(&engine, "rm /work/late").await, exactly((0, 0, 1), &["-/work/late"]));
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_in_a_snapshot_yet_is_known() {
    let house = house!();
    let engine = house.open().await;
    let id = engine.create(&project(), small("app"), None).await.unwrap().sandbox.id;
    let unsaved = async |line: &str| {
        ran(&engine, line).await;
        let unsaved = engine.unsaved(&id).expect("it was looked at");
        (unsaved.files, unsaved.bytes)
    };
    assert_eq!(unsaved("true").await, (0, 0));
    assert_eq!(unsaved("head -c 10000 /dev/zero > /work/a").await, (1, 10_000));
    assert_eq!(unsaved("echo 12345 > /work/b; echo 12 > /work/a").await, (2, 9));
    // With the root exchanged, and with a process alive.
    engine.checkpoint(&project(), &name("app"), Checkpoint::default()).await.unwrap();
    assert_eq!(engine.unsaved(&id), None);
    assert_eq!(unsaved("rm /work/b").await, (1, 0));
    detached(&engine, "app", &["sleep", "1000"]).await;
    engine.checkpoint(&project(), &name("app"), Checkpoint::default()).await.unwrap();
    assert_eq!(unsaved("true").await, (0, 0));
    assert_eq!(unsaved("echo 123 > /work/c").await, (1, 4));
    engine.shutdown().await;
}

async fn last_session(engine: &Engine) -> Session {
    let page = Page { limit: 1, ..Page::default() };
    engine.sessions(&project(), &name("app"), &page).await.unwrap().items.remove(0)
}

async fn session_changes(engine: &Engine) -> SessionChanges {
    last_session(engine).await.changes.expect("they are recorded")
}

/// What was changed in the last session, once all of it is known.
async fn settled(engine: &Engine) -> SessionChanges {
    until("a session whose changes were all seen", async || {
        let session = last_session(engine).await;
        session.changes.filter(|changes| changes.complete && session.ended_at.is_some())
    })
    .await
}

fn counted(changes: SessionChanges) -> (u64, u64, u64, bool) {
    (changes.created, changes.modified, changes.deleted, changes.complete)
}

async fn upload(engine: &Engine, path: &str) {
    let files = engine.files(&project(), &name("app"), WakeMode::default()).await.unwrap();
    let mut upload = files.write(path, None, false, false).await.unwrap();
    upload.send("text".into()).await.unwrap();
    upload.finish().await.unwrap();
}

async fn stop(engine: &Engine) {
    engine.stop(&project(), &name("app"), Stop::default(), None).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_tells_what_was_changed_in_it() {
    let house = house!();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    ran(&engine, "echo 12345 > /work/a; echo 1 > /work/b").await;
    ran(&engine, "rm /work/b; chmod 600 /work/a").await;
    let now = session_changes(&engine).await;
    assert_eq!(counted(now), (2, 1, 1, true), "while it runs");
    assert_eq!(now.bytes, 14);
    // What was uploaded counts, also if no command runs afterwards, and if a checkpoint comes first.
    upload(&engine, "/work/before").await;
    engine.checkpoint(&project(), &name("app"), Checkpoint::default()).await.unwrap();
    upload(&engine, "/work/after").await;
    stop(&engine).await;
    assert_eq!(counted(settled(&engine).await), (4, 1, 1, true));

    // So does what a process writes that is alive until the end.
    let line = "while :; do echo x >> /work/log; sleep 0.05; done";
    detached(&engine, "app", &["sh", "-c", line]).await;
    until("the first line", async || {
        sh(&engine, "app", "test -s /work/log").await.command.exit_code.filter(|code| *code == 0)
    })
    .await;
    stop(&engine).await;
    let changes = settled(&engine).await;
    assert_eq!((changes.created, changes.deleted), (1, 0), "{changes:?}");

    // A session that changed nothing says so, and all of it is known after a restart, without waking the sandbox.
    ok(&engine, "app", "true").await;
    stop(&engine).await;
    assert_eq!(counted(settled(&engine).await), (0, 0, 0, true));
    let engine = house.reopen(engine).await;
    let all = engine.sessions(&project(), &name("app"), &Page::default()).await.unwrap().items;
    let all: Vec<_> = all.iter().map(|one| one.changes.unwrap()).map(counted).collect();
    assert_eq!((all[0], all[2]), ((0, 0, 0, true), (4, 1, 1, true)));
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_outlives_its_daemon_tells_what_is_known_at_least() {
    let house = house!();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    ran(&engine, "echo 1 > /work/a; echo 2 > /work/b").await;
    let engine = house.reopen(engine).await;
    assert_eq!(counted(session_changes(&engine).await), (2, 0, 0, false));
    // What is found first after a restart may be of before.
    ok(&engine, "app", "true").await;
    engine.commands(&project(), &name("app"), &Page::default()).await.unwrap();
    ran(&engine, "rm /work/a").await;
    assert_eq!(counted(session_changes(&engine).await), (2, 0, 1, false));
    stop(&engine).await;
    assert_eq!(counted(session_changes(&engine).await), (2, 0, 1, false));
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_right_after_a_command_does_not_hide_what_it_changed() {
    let house = house!();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    // A look at that many takes a while, and so does the rest after it.
    let many = "mkdir -p /work/many; cd /work/many; for i in $(seq 20000); do : > f$i; done";
    sh(&engine, "app", many).await;
    let command = sh(&engine, "app", "echo 1 > /work/one").await.command;
    engine.checkpoint(&project(), &name("app"), Checkpoint::default()).await.unwrap();
    until("the record of the command", async || {
        let (app, id) = (name("app"), &command.id);
        let (command, _) = engine.command_changes(&project(), &app, id).await.unwrap();
        command.changes
    })
    .await;
    let (counts, list) = changes(&engine, &command.id).await;
    assert!(list.paths.iter().any(|path| path.path == "/work/one"), "{counts:?}");
    assert!(counts.complete, "{counts:?}");
    let counts = counted(session_changes(&engine).await);
    assert_eq!(counts, (20_002, 0, 0, true));
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_recorded_where_it_is_switched_off() {
    let mut house = house!();
    house.settings.record_changes = false;
    let engine = house.open().await;
    let id = engine.create(&project(), small("app"), None).await.unwrap().sandbox.id;
    let command = sh(&engine, "app", "echo 1 > /work/a").await.command;
    let (command, list) =
        engine.command_changes(&project(), &name("app"), &command.id).await.unwrap();
    assert_eq!((command.changes, list.paths.len()), (None, 0));
    assert_eq!((engine.unsaved(&id), last_session(&engine).await.changes), (None, None));
    stop(&engine).await;
    assert_eq!(last_session(&engine).await.changes, None);
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_sandbox_leaves_out_of_its_snapshots_is_not_taken_for_deleted() {
    let house = house!();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    let patch = Patch { exclude: Some(vec!["/work/cache".to_owned()]), ..Patch::default() };
    engine.update(&project(), &name("app"), patch).await.unwrap();
    ran(&engine, "mkdir /work/cache; echo 1 > /work/cache/a; echo 1 > /work/b").await;
    let command = detached(&engine, "app", &["sh", "-c", "sleep 100"]).await;
    stop(&engine).await;
    let (counts, _) = changes(&engine, &command).await;
    assert_eq!(counts.deleted, 0, "{counts:?}");
    let session = session_changes(&engine).await;
    assert_eq!((session.created, session.deleted), (3, 0), "{session:?}");
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_microvm_tells_what_its_commands_changed() {
    let house = match House::new().and_then(House::with_machines) {
        Ok(house) => house,
        Err(why) => return skipped("a_microvm_tells_what_its_commands_changed", &why),
    };
    let engine = house.open().await;
    let id = engine.create(&project(), machine("app"), None).await.unwrap().sandbox.id;
    let counts = async |line: &str| {
        let command = sh(&engine, "app", line).await.command;
        // Guests are slow where they are emulated: what is exact depends on how soon the next command comes.
        let (counts, list) = changes(&engine, &command.id).await;
        assert!(counts.complete, "{counts:?}");
        let paths: Vec<String> = list.paths.into_iter().map(|path| path.path).collect();
        ((counts.created, counts.modified, counts.deleted), paths)
    };
    let text = |paths: &[&str]| paths.iter().map(|path| (*path).to_owned()).collect::<Vec<_>>();
    assert_eq!(counts("true").await, ((0, 0, 0), Vec::new()));
    let made = counts("mkdir /work/d; echo 1 > /work/d/a; echo 2 > /work/b").await;
    assert_eq!(made, ((3, 0, 0), text(&["/work/b", "/work/d", "/work/d/a"])));
    assert_eq!(engine.unsaved(&id).map(|unsaved| (unsaved.files, unsaved.bytes)), Some((2, 4)));
    // What the agent knows goes with its memory.
    engine.pause(&project(), &name("app"), None).await.unwrap();
    let changed = counts("echo 3 >> /work/b; rm -r /work/d").await;
    assert_eq!(changed, ((0, 1, 2), text(&["/work/b", "/work/d", "/work/d/a"])));
    engine.stop(&project(), &name("app"), Stop::default(), None).await.unwrap();
    assert_eq!(counts("rm /work/b").await, ((0, 0, 1), text(&["/work/b"])));
    // What a process writes that a command left behind, and nobody looked at before the stop, is in the session's count.
    let late = "(sleep 1; echo late > /work/late; sleep 100) > /dev/null 2>&1 < /dev/null &";
    sh(&engine, "app", late).await;
    tokio::time::sleep(std::time::Duration::from_secs(3)).await;
    engine.stop(&project(), &name("app"), Stop::default(), None).await.unwrap();
    let sessions = engine.sessions(&project(), &name("app"), &Page::all()).await.unwrap().items;
    let last = sessions[0].changes.expect("changes are recorded");
    assert_eq!((last.created, last.deleted, last.complete), (1, 1, true), "{last:?}");
    engine.shutdown().await;
}
