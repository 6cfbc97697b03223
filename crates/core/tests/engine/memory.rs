//! What only machines that keep their memory can do, on real ones.
//!
//! A cold boot takes seconds where guests are emulated, so a house has one template and a test does as much with it as belongs
//! together.

use std::fs;
use std::path::Path;

use sandkeep_core::engine::{Engine, Error, Fork, Opened, Stop};
use sandkeep_core::model::lifecycle::Phase;
use sandkeep_core::model::{
    CommandId, CommandState, OnIdle, Patch, SessionEnd, SnapshotKind, Span,
};
use sandkeep_testkit::daemon::skipped;
use sandkeep_testkit::house::{
    House, detached, machine, name, of, ok, printed, project, sh, small, until,
};

/// Counts in memory alone, prints every number, and answers with it on a port.
const COUNTER: &str = r#"
$| = 1;
socket(my $server, 2, 1, 0) or die "socket: $!";
setsockopt($server, 1, 2, pack('i', 1));
bind($server, pack('S n a4 x8', 2, 8080, "\0\0\0\0")) or die "bind: $!";
listen($server, 8) or die "listen: $!";
my $count = 0;
while (1) {
    $count++;
    print "$count\n";
    my $ready = ''; vec($ready, fileno($server), 1) = 1;
    if (select($ready, undef, undef, 0.1) > 0) {
        accept(my $client, $server) or next;
        syswrite($client, "$count\n");
        close($client);
    }
}
"#;

fn house(test: &str) -> Option<House> {
    let house = House::new().and_then(House::with_machines);
    house.map_err(|why| skipped(test, &why)).ok()
}

async fn get(engine: &Engine, sandbox: &str) -> Opened {
    engine.get_settled(&project(), &name(sandbox)).await.expect("it is there")
}

/// What the counter in a sandbox is at, asked through its port.
async fn count(engine: &Engine, sandbox: &str) -> u64 {
    let (_outgoing, mut incoming, _hold) = engine
        .connect_port(&project(), &name(sandbox), 8080, sandkeep_core::engine::WakeMode::Wake)
        .await
        .expect("the server listens");
    let mut text = Vec::new();
    while let Ok(Some(bytes)) = incoming.next().await {
        text.extend_from_slice(&bytes);
    }
    String::from_utf8_lossy(&text).trim().parse().expect("a number")
}

/// All numbers a counter printed so far.
async fn told(engine: &Engine, sandbox: &str, command: &CommandId) -> Vec<u64> {
    let text = printed(engine, sandbox, command).await;
    let text = String::from_utf8_lossy(&text).into_owned();
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    whole.lines().map(|line| line.parse().expect("a number to a line")).collect()
}

fn no_gaps(numbers: &[u64]) {
    assert!(numbers.windows(2).all(|two| two[0] + 1 == two[1]), "{numbers:?}");
}

async fn counts(engine: &Engine, sandbox: &str, command: &CommandId, more_than: usize) {
    until("a counter that counts", async || {
        (told(engine, sandbox, command).await.len() > more_than).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_counts_in_memory_goes_on_over_pauses_daemons_and_forks() {
    let test = "what_counts_in_memory_goes_on_over_pauses_daemons_and_forks";
    let Some(house) = house(test) else { return };
    let mut engine = house.open().await;
    engine.create(&project(), machine("m"), None).await.expect("a machine");
    ok(&engine, "m", "echo kept > /root/file").await;
    let counter = detached(&engine, "m", &["perl", "-e", COUNTER]).await;
    counts(&engine, "m", &counter, 3).await;
    let before = count(&engine, "m").await;

    let paused = engine.pause(&project(), &name("m"), None).await.expect("it pauses");
    let snapshot = paused.snapshot.clone().expect("a snapshot").item;
    assert_eq!((paused.sandbox.phase(), snapshot.kind), (Phase::Paused, SnapshotKind::Pause));
    assert!(snapshot.has_memory() && snapshot.commands.len() == 1, "{snapshot:?}");
    assert_eq!(paused.session.and_then(|session| session.end), Some(SessionEnd::Paused));
    assert!(house.machines_alive().await.is_empty(), "nothing of it is on the host");
    let record = engine.command(&project(), &name("m"), &counter).await.expect("a record");
    assert_eq!(record.state, CommandState::Running);
    let again = engine.pause(&project(), &name("m"), None).await.expect("twice is once");
    assert_eq!(again.snapshot.map(|snapshot| snapshot.item.id), Some(snapshot.id.clone()));
    let why = engine.why(&project(), &name("m")).await.expect("it is explained");
    assert!(why.phase == Phase::Paused && why.reason.contains("paused"), "{why:?}");
    let other = Patch { driver: Some("container".to_owned()), ..Patch::default() };
    let refused = engine.update(&project(), &name("m"), other).await.unwrap_err();
    assert_eq!(refused.code(), "has_memory", "{refused}");

    engine = house.reopen(engine).await;
    let after = count(&engine, "m").await;
    assert!(after > before, "{after} after {before}");
    let now = get(&engine, "m").await;
    assert_eq!(now.sandbox.generation, snapshot.generation);
    assert_eq!(now.session.and_then(|session| session.fallback), None);
    let all = told(&engine, "m", &counter).await;
    counts(&engine, "m", &counter, all.len() + 3).await;
    no_gaps(&told(&engine, "m", &counter).await);
    assert_eq!(ok(&engine, "m", "cat /root/file").await, "kept\n");

    // A daemon that is gone while it runs costs it nothing either.
    engine = house.reopen(engine).await;
    assert!(count(&engine, "m").await > after);

    let fork = Fork { name: Some(name("try")), start: true, count: Some(2), ..Fork::default() };
    let forks = engine.fork_many(&project(), &name("m"), fork, None).await.expect("forks");
    assert!(forks.failed.is_empty() && forks.made.len() == 2, "{:?}", forks.failed);
    let source = count(&engine, "m").await;
    let mut boots = vec![ok(&engine, "m", "cat /proc/sys/kernel/random/boot_id").await];
    let mut random = vec![ok(&engine, "m", "head -c 16 /dev/urandom | od -An -tx1").await];
    for fork in ["try-1", "try-2"] {
        assert_eq!(ok(&engine, fork, "hostname").await.trim(), fork);
        boots.push(ok(&engine, fork, "cat /proc/sys/kernel/random/boot_id").await);
        random.push(ok(&engine, fork, "head -c 16 /dev/urandom | od -An -tx1").await);
        ok(&engine, fork, &format!("echo {fork} > /root/file")).await;
        let page = sandkeep_core::db::Page::all();
        let alive = engine.commands(&project(), &name(fork), &page).await.expect("commands").items;
        let carried = alive.into_iter().find(|command| command.carried.is_some()).expect("carried");
        assert_eq!(carried.state, CommandState::Running);
        counts(&engine, fork, &carried.id, 3).await;
        no_gaps(&told(&engine, fork, &carried.id).await);
        assert!(count(&engine, fork).await > before);
    }
    boots.sort();
    boots.dedup();
    random.sort();
    random.dedup();
    assert_eq!((boots.len(), random.len()), (3, 3), "{boots:?} {random:?}");
    // They diverge: one is asked to end, the others count on.
    engine.stop(&project(), &name("try-1"), Stop::default(), None).await.expect("it stops");
    assert_eq!(ok(&engine, "m", "cat /root/file").await, "kept\n");
    assert_eq!(ok(&engine, "try-1", "cat /root/file").await, "try-1\n");
    assert!(count(&engine, "m").await > source && count(&engine, "try-2").await > before);
    for sandbox in ["m", "try-1", "try-2"] {
        let gone = engine.delete(&project(), &name(sandbox), Default::default(), None).await;
        gone.expect("it goes");
    }
    assert!(house.machines_alive().await.is_empty());
}

/// Changes the record of the topmost memory layer of a paused sandbox.
fn memory_dir(house: &House, memory: &sandkeep_core::model::MemoryId) -> std::path::PathBuf {
    house.data().join("memory").join(memory.as_str())
}

fn edit(path: &Path, change: impl FnOnce(&mut serde_json::Value)) {
    let mut value: serde_json::Value =
        serde_json::from_slice(&fs::read(path).expect("a record")).expect("JSON");
    change(&mut value);
    // Without a checksum it is a document of an older format.
    value["format"] = 4.into();
    value.as_object_mut().expect("a record").remove("checksum");
    fs::write(path, serde_json::to_vec_pretty(&value).expect("JSON")).expect("written");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_that_cannot_be_used_is_told_and_files_are_never_older() {
    let test = "memory_that_cannot_be_used_is_told_and_files_are_never_older";
    let Some(house) = house(test) else { return };
    let engine = house.open().await;
    engine.create(&project(), machine("m"), None).await.expect("a machine");
    type Damage<'a> = (&'a str, &'a dyn Fn(&Path));
    let damages: [Damage<'_>; 2] = [
        ("hypervisor", &|dir| {
            edit(&dir.join("memory.json"), |layer| {
                layer["fingerprint"]["hypervisor"] = "another one".into();
            });
        }),
        ("pages", &|dir| {
            let pages = fs::OpenOptions::new().write(true).open(dir.join("pages")).expect("pages");
            pages.set_len(4096).expect("shorter");
        }),
    ];
    for (what, damage) in damages {
        ok(&engine, "m", &format!("echo {what} > /root/file")).await;
        let sleeper = detached(&engine, "m", &["sleep", "1000"]).await;
        let paused = engine.pause(&project(), &name("m"), None).await.expect("it pauses");
        let snapshot = paused.snapshot.expect("a snapshot").item;
        damage(&memory_dir(&house, &snapshot.memory[0]));
        assert_eq!(ok(&engine, "m", "cat /root/file").await, format!("{what}\n"));
        let now = get(&engine, "m").await;
        assert_eq!(now.sandbox.generation, snapshot.generation, "the same, and no other");
        let fallback = now.session.and_then(|session| session.fallback).expect("it is told");
        assert!(fallback.contains(what), "{fallback}");
        let lost = engine.command(&project(), &name("m"), &sleeper).await.expect("a record");
        assert_eq!(lost.state, CommandState::Lost);
        let why = engine.why(&project(), &name("m")).await.expect("it is explained");
        assert!(why.notices.iter().any(|notice| notice.contains(what)), "{why:?}");
    }
    engine.delete(&project(), &name("m"), Default::default(), None).await.expect("it goes");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_survive_a_machine_that_is_killed_and_move_between_drivers() {
    let test = "files_survive_a_machine_that_is_killed_and_move_between_drivers";
    let Some(house) = house(test) else { return };
    let mut engine = house.open().await;
    engine.create(&project(), machine("m"), None).await.expect("a machine");
    ok(
        &engine,
        "m",
        "mkdir -p /work/tree/deep && cd /work/tree && echo one > a && ln a b && ln -s a c && mkfifo p \
         && echo x > \"$(printf 'odd\\303\\251 name')\" && chmod 4711 a && chown 1000:1000 deep \
         && setfattr -n user.k -v v a && touch -d '2001-02-03 04:05:06.789' deep && rm -rf /home/user && sync",
    )
    .await;
    let shape = "cd /work/tree && find . -type d -printf 'd %p %m %U %G %T@\\n' -o -printf '%y %p %m %U %G %n %s %l %T@\\n' | sort && getfattr -d a && sha256sum a b c && test ! -e /home/user";
    let seen = ok(&engine, "m", shape).await;

    // Killed under a running daemon.
    house.kill_machines().await;
    let recovered = until("a recovered snapshot", async || {
        let now = get(&engine, "m").await.sandbox;
        (now.phase() == Phase::Stopped).then_some(now)
    })
    .await;
    assert_eq!(recovered.generation, 1);
    assert_eq!(ok(&engine, "m", shape).await, seen);

    // And under one that is not.
    ok(&engine, "m", "echo two > /work/tree/two && sync").await;
    house.kill_machines().await;
    engine = house.reopen(engine).await;
    assert_eq!(ok(&engine, "m", "cat /work/tree/two").await, "two\n");
    ok(&engine, "m", "rm /work/tree/two && touch -d '2001-02-03 04:05:06.789' /work/tree").await;
    let seen = ok(&engine, "m", shape).await;
    assert_eq!(
        engine
            .update(&project(), &name("m"), driver("container"))
            .await
            .map_err(|error| error.code())
            .unwrap_err(),
        "driver_in_use"
    );
    for other in ["container", "microvm"] {
        engine.stop(&project(), &name("m"), Stop::default(), None).await.expect("it stops");
        engine.update(&project(), &name("m"), driver(other)).await.expect("it moves");
        assert_eq!(ok(&engine, "m", shape).await, seen, "{other}");
    }
    engine.delete(&project(), &name("m"), Default::default(), None).await.expect("it goes");
}

fn driver(driver: &str) -> Patch {
    Patch { driver: Some(driver.to_owned()), ..Patch::default() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_writer_forks_clean_and_idle_machines_pause() {
    let test = "a_writer_forks_clean_and_idle_machines_pause";
    let Some(house) = house(test) else { return };
    let engine = house.open().await;
    engine.create(&project(), machine("m"), None).await.expect("a machine");
    // Records with checksums, each synced, replaced whole: a torn one would show.
    let writer = "n=0; while :; do n=$((n+1)); seq $n $((n+2000)) > /work/new; \
                  sha256sum < /work/new > /work/new.sum; sync; mv /work/new /work/data; mv /work/new.sum /work/sum; \
                  cat /work/data >> /work/all; done";
    detached(&engine, "m", &["sh", "-c", writer]).await;
    until("a first record", async || {
        (sh(&engine, "m", "test -s /work/sum").await.command.exit_code == Some(0)).then_some(())
    })
    .await;
    let fork = Fork { name: Some(name("f")), start: true, count: Some(2), ..Fork::default() };
    let forks = engine.fork_many(&project(), &name("m"), fork, None).await.expect("forks");
    assert!(forks.failed.is_empty(), "{:?}", forks.failed);
    for fork in ["f-1", "f-2"] {
        ok(&engine, fork, "for p in $(ps -eo pid,args | grep 'n=0;' | grep -v grep | sed 's/^ *//' | cut -d' ' -f1); do kill -9 $p; done; true").await;
        ok(&engine, fork, "test -s /work/all").await;
        engine.stop(&project(), &name(fork), Stop::default(), None).await.expect("it stops");
        let whole = "cd /work && s=$(sha256sum < data); grep -q \"$s\" sum || test -e new.sum";
        ok(&engine, fork, whole).await;
        engine.delete(&project(), &name(fork), Default::default(), None).await.expect("gone");
    }
    ok(&engine, "m", "kill -9 -1 || true").await;
    let on_idle = Patch {
        on_idle: Some(Some(OnIdle::Pause)),
        idle_timeout: Some(Some(Span::seconds(1))),
        ..Patch::default()
    };
    engine.update(&project(), &name("m"), on_idle).await.expect("a policy");
    let paused = until("an idle pause", async || {
        let now = get(&engine, "m").await;
        (now.sandbox.phase() == Phase::Paused).then_some(now)
    })
    .await;
    assert_eq!(paused.session.and_then(|session| session.end), Some(SessionEnd::Idle));
    // Stopping what is paused keeps its files as a layer, and lets go of its memory.
    let stopped = engine.stop(&project(), &name("m"), Stop::default(), None).await.expect("stops");
    assert!(!stopped.snapshot.expect("a snapshot").item.has_memory());
    let page = sandkeep_core::db::Page::all();
    let all = engine.snapshots(&project(), of("m"), &page).await.expect("snapshots").items;
    assert!(all.iter().any(|snapshot| snapshot.item.has_memory()), "the pause can be gone back to");
    let plain = small("c");
    engine.create(&project(), plain, None).await.expect("a container");
    let refused = engine.pause(&project(), &name("c"), None).await.unwrap_err();
    assert!(matches!(refused, Error::NoMemory { .. }) && refused.hint().is_some(), "{refused}");
    let wish = Patch { on_idle: Some(Some(OnIdle::Pause)), ..Patch::default() };
    assert_eq!(engine.update(&project(), &name("c"), wish).await.unwrap_err().code(), "invalid");
}

/// The memory layers of what a sandbox stands on.
async fn chain(engine: &Engine, sandbox: &str) -> Vec<String> {
    let current = get(engine, sandbox).await.sandbox.current.expect("a snapshot");
    let page = sandkeep_core::db::Page::all();
    let all = engine.snapshots(&project(), of(sandbox), &page).await.expect("snapshots").items;
    let found = all.into_iter().find(|snapshot| snapshot.item.id == current).expect("it is there");
    found.item.memory.iter().map(ToString::to_string).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_machine_that_is_paused_often_keeps_a_short_chain() {
    let Some(mut house) = house("a_machine_that_is_paused_often_keeps_a_short_chain") else {
        return;
    };
    house.settings.memory_limit = 4;
    let engine = house.open().await;
    engine.create(&project(), machine("m"), None).await.expect("a machine");
    let counter = detached(&engine, "m", &["perl", "-e", COUNTER]).await;
    for round in 0..9 {
        let write = format!(
            "seq {round} 30000 > /root/f{round}; rm -f /root/f$(({round} - 3)); echo {round} >> /root/log"
        );
        ok(&engine, "m", &write).await;
        engine.pause(&project(), &name("m"), None).await.expect("it pauses");
        // Each pause adds one: without merging there were eleven in the end.
        until("a short chain", async || (chain(&engine, "m").await.len() <= 5).then_some(())).await;
        let before = told(&engine, "m", &counter).await.len();
        counts_again(&engine, &counter, before).await;
    }
    assert_eq!(ok(&engine, "m", "echo $(cat /root/log)").await, "0 1 2 3 4 5 6 7 8\n");
    let sums = ok(&engine, "m", "cd /root; sha256sum f? log").await;
    let fork = Fork { name: Some(name("f")), start: true, ..Fork::default() };
    engine.fork(&project(), &name("m"), fork, None).await.expect("a fork");
    assert_eq!(ok(&engine, "f", "cd /root; sha256sum f? log").await, sums);
    no_gaps(&told(&engine, "m", &counter).await);

    // Without its memory the disks alone are booted on: all of them exist.
    engine.pause(&project(), &name("m"), None).await.expect("it pauses");
    until("a short chain", async || (chain(&engine, "m").await.len() <= 5).then_some(())).await;
    let top = house.data().join("memory").join(&chain(&engine, "m").await[0]);
    fs::write(top.join("index"), "damaged").expect("damage");
    assert_eq!(ok(&engine, "m", "cd /root; sha256sum f? log").await, sums);
    let fallback = get(&engine, "m").await.session.and_then(|session| session.fallback);
    assert!(fallback.is_some(), "it was restored");
}

async fn counts_again(engine: &Engine, counter: &CommandId, before: usize) {
    ok(engine, "m", "true").await;
    let now = get(engine, "m").await;
    assert_eq!(now.session.and_then(|session| session.fallback), None);
    counts(engine, "m", counter, before + 1).await;
}
