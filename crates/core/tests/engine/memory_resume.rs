//! What resumes with memory: services over pauses and forks, and snapshots that are gone back to by
//! name.

use sandkeep_core::db::Page;
use sandkeep_core::engine::{Engine, Fork, ServiceState, ServiceStatus, WakeMode};
use sandkeep_core::model::lifecycle::Phase;
use sandkeep_core::model::{
    Command, CommandState, Patch, Restart, Service, SnapshotId, SnapshotKind,
};
use sandkeep_testkit::daemon::skipped;
use sandkeep_testkit::house::{
    House, detached, labelled, machine, name, of, ok, printed, project, until,
};

/// Counts in memory alone, prints every number, and answers with it and its process id on a port.
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
        syswrite($client, "$count $$\n");
        close($client);
    }
}
"#;

fn house(test: &str) -> Option<House> {
    let house = House::new().and_then(House::with_machines);
    house.map_err(|why| skipped(test, &why)).ok()
}

/// What the counter in a sandbox says, asked through its port, and which process it is.
async fn asked(engine: &Engine, sandbox: &str) -> Option<(u64, u32)> {
    let connected = engine.connect_port(&project(), &name(sandbox), 8080, WakeMode::Wake).await;
    let (_outgoing, mut incoming, _hold) = connected.ok()?;
    let mut text = Vec::new();
    while let Ok(Some(bytes)) = incoming.next().await {
        text.extend_from_slice(&bytes);
    }
    let text = String::from_utf8_lossy(&text).into_owned();
    let (count, pid) = text.trim().split_once(' ')?;
    Some((count.parse().expect("a number"), pid.parse().expect("a number")))
}

async fn counter(engine: &Engine, sandbox: &str) -> (u64, u32) {
    until("a counter that answers", async || asked(engine, sandbox).await).await
}

async fn commands(engine: &Engine, sandbox: &str) -> Vec<Command> {
    let all = engine.commands(&project(), &name(sandbox), &Page::all()).await;
    all.expect("commands").items
}

async fn service(engine: &Engine, sandbox: &str) -> ServiceStatus {
    let all = engine.services(&project(), &name(sandbox)).await.expect("services");
    all.into_iter().next().expect("the service")
}

fn runs(status: &ServiceStatus) -> bool {
    matches!(status.state, ServiceState::Running { .. })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_is_the_same_process_after_a_pause() {
    let Some(house) = house("a_service_is_the_same_process_after_a_pause") else { return };
    let mut engine = house.open().await;
    let web = Service {
        name: name("web"),
        argv: ["perl", "-e", COUNTER].map(str::to_owned).to_vec(),
        env: Default::default(),
        cwd: None,
        user: None,
        port: Some(8080),
        restart: Restart::Always,
        start: true,
    };
    let mut request = machine("m");
    request.patch.set_services = vec![web];
    engine.create(&project(), request, None).await.expect("a machine");
    let (mut count, pid) = counter(&engine, "m").await;
    let began = service(&engine, "m").await;
    assert!(runs(&began) && began.command.is_some(), "{began:?}");

    // The first time it is woken by this daemon, then by another.
    for again in [false, true] {
        engine.pause(&project(), &name("m"), None).await.expect("it pauses");
        assert_eq!(service(&engine, "m").await.state, ServiceState::Stopped, "it sleeps");
        if again {
            engine = house.reopen(engine).await;
        }
        // Its port wakes the machine, and the one who came for it gets the answer.
        let (now, same) = asked(&engine, "m").await.expect("an answer at the first attempt");
        assert_eq!(same, pid, "the same process");
        assert!(now > count, "{now} after {count}");
        count = now;
        let status = service(&engine, "m").await;
        assert!(runs(&status) && status.command == began.command, "{status:?}");
        assert_eq!(ok(&engine, "m", "ps -eo comm | grep -cx perl").await, "1\n");
        let all = commands(&engine, "m").await;
        let services = all.iter().filter(|command| command.service.is_some()).count();
        assert_eq!(services, 1, "it was not started a second time: {all:?}");
    }

    // In a fork it is the same process too, on a record of its own.
    let fork = Fork { name: Some(name("f")), start: true, ..Fork::default() };
    engine.fork(&project(), &name("m"), fork, None).await.expect("a fork");
    let (now, same) = counter(&engine, "f").await;
    assert!(now > count && same == pid, "{now} {same}");
    let status = service(&engine, "f").await;
    assert!(runs(&status) && status.command != began.command, "{status:?}");
    assert_eq!(ok(&engine, "f", "ps -eo comm | grep -cx perl").await, "1\n");
    engine.delete(&project(), &name("f"), Default::default(), None).await.expect("it goes");

    // It is looked after as before: one that ends is started again.
    ok(&engine, "m", &format!("kill -9 {pid}")).await;
    let fresh =
        until("a fresh one", async || asked(&engine, "m").await.filter(|(_, now)| *now != pid));
    let (_, fresh) = fresh.await;
    // And what somebody stopped by hand stays so.
    engine.stop_service(&project(), &name("m"), &name("web")).await.expect("it stops");
    engine.pause(&project(), &name("m"), None).await.expect("it pauses");
    assert_eq!(ok(&engine, "m", "ps -eo comm | grep -cx perl || true").await, "0\n", "{fresh}");
    assert_eq!(service(&engine, "m").await.state, ServiceState::Stopped);
    let status = engine.start_service(&project(), &name("m"), &name("web")).await.expect("starts");
    assert_eq!(status.service.name, name("web"));
    assert_ne!(counter(&engine, "m").await.1, fresh);
    engine.delete(&project(), &name("m"), Default::default(), None).await.expect("it goes");
}

/// The numbers a counter has printed, on whatever record.
async fn told(engine: &Engine, sandbox: &str, command: &Command) -> Vec<u64> {
    let text = printed(engine, sandbox, &command.id).await;
    let text = String::from_utf8_lossy(&text).into_owned();
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole).to_owned();
    whole.lines().map(|line| line.parse().expect("a number to a line")).collect()
}

async fn back(engine: &Engine, to: &SnapshotId) -> Option<SnapshotId> {
    let done = engine.rollback(&project(), &name("m"), to, None).await.expect("it goes back");
    assert!([Phase::Paused, Phase::Stopped].contains(&done.sandbox.phase()), "{:?}", done.sandbox);
    done.before.map(|before| before.id)
}

/// What is kept in RAM, and on the disk.
const STATE: &str = "cat /dev/shm/state /root/file";

async fn put(engine: &Engine, sandbox: &str, state: &str) {
    ok(engine, sandbox, &format!("echo {state} > /dev/shm/state; echo {state} > /root/file")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_is_gone_back_to_by_name() {
    let Some(house) = house("memory_is_gone_back_to_by_name") else { return };
    let engine = house.open().await;
    engine.create(&project(), machine("m"), None).await.expect("a machine");
    put(&engine, "m", "one").await;
    let first = detached(&engine, "m", &["perl", "-e", COUNTER]).await;
    let (_, pid) = counter(&engine, "m").await;
    let one = engine.checkpoint(&project(), &name("m"), labelled("one")).await.expect("kept").item;
    assert!(one.has_memory() && one.commands.len() == 1, "{one:?}");
    let (then, _) = counter(&engine, "m").await;
    put(&engine, "m", "two").await;
    until("a counter that counts", async || {
        (counter(&engine, "m").await.0 > then + 5).then_some(())
    })
    .await;

    // What it leaves are files: its session is ended as by a stop.
    let two = back(&engine, &one.id).await.expect("what it left");
    let left = engine.snapshot(&project(), &two).await.expect("a snapshot").item;
    assert_eq!((left.kind, left.has_memory()), (SnapshotKind::BeforeRollback, false));
    let now = engine.get(&project(), &name("m")).await.expect("it is there").sandbox;
    assert_eq!((now.phase(), now.generation), (Phase::Paused, left.generation + 1));
    let why = engine.why(&project(), &name("m")).await.expect("it is explained");
    assert!(why.reason.contains("rolled back"), "{why:?}");
    let record = engine.command(&project(), &name("m"), &first).await.expect("a record");
    assert_ne!(record.state, CommandState::Running, "it ended with its session");
    // What it goes back to is memory: the process resumes from there.
    assert_eq!(ok(&engine, "m", STATE).await, "one\none\n");
    assert_eq!(counter(&engine, "m").await.1, pid);
    let all = commands(&engine, "m").await;
    let alive: Vec<_> = all.iter().filter(|one| one.state == CommandState::Running).collect();
    assert_eq!(alive.len(), 1, "{alive:?}");
    let carried = alive[0].carried.as_ref().expect("it says what it was");
    assert_eq!(carried.from, first);
    until("numbers", async || (told(&engine, "m", alive[0]).await.len() > 3).then_some(())).await;
    let numbers = told(&engine, "m", alive[0]).await;
    // What was printed before the checkpoint is the other record's: this one begins with the number after that.
    assert!(numbers[0] <= then + 1, "{} is after the checkpoint: {then}", numbers[0]);
    assert!(numbers.windows(2).all(|two| two[0] + 1 == two[1]), "{numbers:?}");

    // The same of one that is paused, whose pause is a snapshot to go back to like any other.
    put(&engine, "m", "three").await;
    let paused = engine.pause(&project(), &name("m"), None).await.expect("it pauses");
    let three = paused.snapshot.expect("a snapshot").item.id;
    assert_eq!(back(&engine, &one.id).await, None, "there is nothing to keep but the pause");
    assert_eq!(ok(&engine, "m", STATE).await, "one\none\n");
    engine.pause(&project(), &name("m"), None).await.expect("it pauses");
    back(&engine, &three).await;
    assert_eq!(ok(&engine, "m", STATE).await, "three\nthree\n");
    assert_eq!(counter(&engine, "m").await.1, pid);

    // What a fork did, memory included, becomes its source's; who it is does not.
    let fork = Fork { name: Some(name("f")), start: true, ..Fork::default() };
    engine.fork(&project(), &name("m"), fork, None).await.expect("a fork");
    put(&engine, "f", "fork").await;
    let of_fork = engine.checkpoint(&project(), &name("f"), labelled("f")).await.expect("kept");
    back(&engine, &of_fork.item.id).await;
    assert_eq!(ok(&engine, "m", STATE).await, "fork\nfork\n");
    assert_eq!(ok(&engine, "m", "hostname").await, "m\n");
    assert_eq!(
        (ok(&engine, "f", "hostname").await, counter(&engine, "m").await.1),
        ("f\n".into(), pid)
    );
    // Undone: the files of what ran at first. No memory goes with them.
    back(&engine, &two).await;
    assert_eq!(ok(&engine, "m", "ls /dev/shm; cat /root/file").await, "two\n");
    let other = Patch { driver: Some("container".to_owned()), ..Patch::default() };
    back(&engine, &two).await;
    engine.update(&project(), &name("m"), other).await.expect("without memory it can move");
    let refused = engine.rollback(&project(), &name("m"), &one.id, None).await.unwrap_err();
    assert_eq!(refused.code(), "has_memory", "{refused}");
    for sandbox in ["f", "m"] {
        engine.delete(&project(), &name(sandbox), Default::default(), None).await.expect("gone");
    }
    assert!(house.machines_alive().await.is_empty());
    let left = engine.snapshots(&project(), of("m"), &Page::all()).await.expect("snapshots").items;
    assert!(left.is_empty(), "{left:?}");
}
