//! A database that is written to as fast as it can be, forked live: every fork keeps writing on its
//! own and is consistent, and so is what a fork finds that has nothing but the disk.
//!
//! The database is SQLite as people have it, once with a write-ahead log and once with a rollback journal. What is in it can be
//! checked: every transaction adds an entry that is chained to the one before by its digest, changes an older one, and keeps
//! count of both. What was acknowledged is what the writer printed after a commit.

use std::fs;
use std::path::Path;

use sandkeep_core::db::Page;
use sandkeep_core::engine::{Engine, Fork};
use sandkeep_core::model::{Command, CommandId, CommandState, Snapshot};
use sandkeep_core::store::image::Reporter;
use sandkeep_testkit::daemon::skipped;
use sandkeep_testkit::house::{House, detached, machine, name, ok, printed, project, until};
use sandkeep_testkit::root::small_root_with;

/// The databases, by their journals.
const JOURNALS: [&str; 2] = ["wal", "delete"];

const SCHEMA: &str =
    "CREATE TABLE entry (n INTEGER PRIMARY KEY, who, body BLOB, chain, touched DEFAULT 0);
    CREATE TABLE ledger (count, touched, chain); INSERT INTO ledger VALUES (0, 0, '');
    CREATE TABLE name (who); INSERT INTO name VALUES ('m');";

/// One transaction, on one line; its number is printed when it is committed.
const TRANSACTION: &str = "BEGIN IMMEDIATE; \
    WITH new(body) AS MATERIALIZED (SELECT randomblob(200)) INSERT INTO entry \
        SELECT count + 1, who, body, hex(sha3(chain || hex(body), 256)), 0 FROM ledger, name, new; \
    UPDATE entry SET touched = touched + 1 WHERE n = (SELECT 1 + abs(random() % (count + 1)) FROM ledger); \
    UPDATE ledger SET touched = touched + changes(); \
    UPDATE ledger SET count = count + 1, chain = (SELECT chain FROM entry WHERE n = count + 1); \
    COMMIT; SELECT count FROM ledger;";

/// Sound, kept count of, chained, how many there are, and who wrote them: `ok`, 1, 0, the number and names.
const CHECK: &str = "BEGIN; PRAGMA integrity_check; \
    SELECT (SELECT count(*) FROM entry) = count AND (SELECT total(touched) FROM entry) = touched \
        AND chain = (SELECT chain FROM entry WHERE n = count) FROM ledger; \
    SELECT count(*) FROM (SELECT chain IS NOT \
        hex(sha3(lag(chain, 1, '') OVER (ORDER BY n) || hex(body), 256)) AS broken FROM entry) WHERE broken; \
    SELECT count FROM ledger; SELECT group_concat(who) FROM (SELECT DISTINCT who FROM entry); COMMIT;";

fn house(test: &str) -> Option<House> {
    let with_sqlite = Path::new("/usr/bin/sqlite3").exists();
    let sqlite = with_sqlite.then_some(()).ok_or("there is no `sqlite3`".to_owned());
    let house = sqlite.and_then(|()| House::new()).and_then(House::with_machines);
    house.map_err(|why| skipped(test, &why)).ok()
}

/// The command that queries a database, with a long wait for locks: another process writes to it
/// all the time.
fn sqlite(journal: &str) -> String {
    format!("sqlite3 -bail -cmd '.timeout 60000' /work/{journal}.db")
}

/// Says something to both databases, and returns the answers.
async fn ask(engine: &Engine, sandbox: &str, statements: &str) -> [Vec<String>; 2] {
    let line = JOURNALS.map(|journal| format!("{} \"{statements}\"", sqlite(journal)));
    let told = ok(engine, sandbox, &line.join(" && echo --- && ")).await;
    let (first, second) = told.split_once("---\n").expect("two answers");
    [first, second].map(|told| told.lines().map(str::to_owned).collect())
}

/// Checks both databases, and returns how many transactions are in them.
async fn consistent(engine: &Engine, sandbox: &str, writers: &str) -> [u64; 2] {
    ask(engine, sandbox, CHECK).await.map(|told| {
        assert_eq!(told[..3], ["ok", "1", "0"], "{sandbox}: {told:?}");
        assert_eq!(told[4], writers, "{sandbox}: it is its own");
        told[3].parse().expect("a number")
    })
}

/// The last transaction in what a writer printed.
fn acknowledged(printed: &[u8]) -> u64 {
    let text = String::from_utf8_lossy(printed);
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    whole.lines().last().map_or(0, |line| line.parse().expect("a number to a line"))
}

/// Waits until a writer has done `more` more than it has.
async fn writes(engine: &Engine, sandbox: &str, writer: &CommandId, more: u64) {
    let before = acknowledged(&printed(engine, sandbox, writer).await);
    until("a writer that writes", async || {
        let now = acknowledged(&printed(engine, sandbox, writer).await);
        (now >= before + more).then_some(())
    })
    .await;
}

/// The snapshot a fork stands on.
async fn ground(engine: &Engine, fork: &str) -> Snapshot {
    let fork = engine.get(&project(), &name(fork)).await.expect("it is there").sandbox;
    let id = fork.current.expect("it stands on a snapshot");
    engine.snapshot(&project(), &id).await.expect("the snapshot").item
}

/// What the source's writers had acknowledged to the outside when it was captured, by their journals.
async fn at_capture(engine: &Engine, snapshot: &Snapshot, writers: &[CommandId]) -> Vec<u64> {
    let mut all = Vec::new();
    for writer in writers {
        let then = snapshot.commands.iter().find(|then| then.id == *writer).expect("it was alive");
        let told = printed(engine, "m", writer).await;
        let had = usize::try_from(then.output_bytes).expect("a small number");
        assert!(had > 0 && had <= told.len(), "{had} of {}", told.len());
        all.push(acknowledged(&told[..had]));
    }
    all
}

/// Checks that a fork's writers continue on their own, in databases of their own.
async fn goes_on(engine: &Engine, fork: &str, writers: &[CommandId], at_least: &[u64]) {
    let all = engine.commands(&project(), &name(fork), &Page::all()).await.expect("commands").items;
    let own = writers.iter().map(|writer| {
        let from = |command: &&Command| {
            command.carried.as_ref().is_some_and(|carried| carried.from == *writer)
        };
        all.iter().find(from).expect("its writer was carried over")
    });
    ask(engine, fork, &format!("UPDATE name SET who = '{fork}'")).await;
    for own in own {
        assert_eq!(own.state, CommandState::Running, "{fork}");
        writes(engine, fork, &own.id, 5).await;
        let told = String::from_utf8_lossy(&printed(engine, fork, &own.id).await).into_owned();
        // The first line may be the end of one that began before the capture, the last the beginning of one.
        let told: Vec<u64> = told.lines().skip(1).filter_map(|line| line.parse().ok()).collect();
        let whole = &told[..told.len().saturating_sub(1)];
        assert!(whole.windows(2).all(|two| two[0] + 1 == two[1]), "{fork}: {told:?}");
    }
    let there = consistent(engine, fork, &format!("m,{fork}")).await;
    assert!(there.iter().zip(at_least).all(|(there, least)| there > least), "{fork}: {there:?}");
}

async fn fork(engine: &Engine, stem: &str, start: bool) -> Snapshot {
    let request = Fork { name: Some(name(stem)), start, count: Some(3), ..Fork::default() };
    let forks = engine.fork_many(&project(), &name("m"), request, None).await.expect("forks");
    assert!(forks.failed.is_empty() && forks.made.len() == 3, "{:?}", forks.failed);
    ground(engine, &format!("{stem}-1")).await
}

async fn gone(engine: &Engine, sandbox: &str) {
    engine.delete(&project(), &name(sandbox), Default::default(), None).await.expect("it goes");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_under_heavy_writing_is_consistent_in_every_fork() {
    let test = "a_database_under_heavy_writing_is_consistent_in_every_fork";
    let Some(house) = house(test) else { return };
    let engine = house.open().await;
    let tar = house.path().join("sqlite.tar");
    small_root_with(&tar, &["sqlite3"]).expect("a root with a database");
    engine.images().import("sqlite", &tar, &Reporter::silent()).await.expect("it is imported");
    let mut request = machine("m");
    request.patch.image = Some("sqlite".to_owned());
    engine.create(&project(), request, None).await.expect("a machine");
    let mut writers = Vec::new();
    for journal in JOURNALS {
        let make = format!("{} \"PRAGMA journal_mode = {journal}; {SCHEMA}\"", sqlite(journal));
        assert_eq!(ok(&engine, "m", &make).await, format!("{journal}\n"));
        let line = format!("while :; do echo \"{TRANSACTION}\"; done | {}", sqlite(journal));
        writers.push(detached(&engine, "m", &["sh", "-c", &line]).await);
    }
    for writer in &writers {
        writes(&engine, "m", writer, 30).await;
    }

    let snapshot = fork(&engine, "f", true).await;
    let acknowledged = at_capture(&engine, &snapshot, &writers).await;
    for one in ["f-1", "f-2", "f-3"] {
        goes_on(&engine, one, &writers, &acknowledged).await;
        gone(&engine, one).await;
    }

    // The source went on meanwhile, and does over the next capture.
    for writer in &writers {
        writes(&engine, "m", writer, 10).await;
    }
    let snapshot = fork(&engine, "g", false).await;
    let acknowledged = at_capture(&engine, &snapshot, &writers).await;
    engine.start(&project(), &name("g-1"), None).await.expect("it starts");
    goes_on(&engine, "g-1", &writers, &acknowledged).await;
    gone(&engine, "g-1").await;
    // Its memory is not of this world: there is only the disk, as it was at that moment.
    let record = house.data().join("memory").join(snapshot.memory[0].as_str()).join("memory.json");
    let text = fs::read_to_string(&record).expect("a record");
    let mut layer: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    layer["fingerprint"]["hypervisor"] = "another one".into();
    // Without a checksum it is a document of an older format.
    layer["format"] = 4.into();
    layer.as_object_mut().expect("a record").remove("checksum");
    fs::write(&record, layer.to_string()).expect("written");
    let there = consistent(&engine, "g-2", "m").await;
    let all = there.iter().zip(&acknowledged).all(|(there, least)| there >= least);
    assert!(all, "{there:?} of {acknowledged:?} acknowledged");
    let fallen = engine.get(&project(), &name("g-2")).await.expect("it is there");
    assert!(fallen.session.and_then(|session| session.fallback).is_some(), "without its memory");
    for writer in &writers {
        writes(&engine, "m", writer, 3).await;
    }
    consistent(&engine, "m", "m").await;
    for one in ["g-2", "g-3", "m"] {
        gone(&engine, one).await;
    }
    assert!(house.machines_alive().await.is_empty());
}
