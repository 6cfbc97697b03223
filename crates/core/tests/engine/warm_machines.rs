//! Machines that wait for a sandbox, real ones: who takes one over has a machine of its own, and one that is of no use costs nothing.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use sandkeep_core::engine::{Engine, Fork, Stop};
use sandkeep_core::model::MachineKey;
use sandkeep_core::model::lifecycle::Phase;
use sandkeep_testkit::daemon::skipped;
use sandkeep_testkit::house::{House, machine, name, ok, project, until};
use sandkeep_testkit::victim;
use serde_json::Value;

fn house(test: &str) -> Option<House> {
    let mut house =
        House::new().and_then(House::with_machines).map_err(|why| skipped(test, &why)).ok()?;
    house.settings.warm_vms = 1;
    Some(house)
}

/// The machine that waits, once it does.
async fn waiting(house: &House, engine: &Engine) -> MachineKey {
    until("a warm VM", async || (engine.waiting_warm_vms() == 1).then_some(())).await;
    let alive = house.machines_alive().await;
    alive.into_iter().find(|key| key.as_str().starts_with("ready-")).expect("it is alive")
}

fn run_dir(house: &House) -> PathBuf {
    house.path().join("machines")
}

/// What is on record of a sandbox's machine on the host.
async fn record(house: &House, engine: &Engine, sandbox: &str) -> (Value, Value) {
    let found = engine.get_settled(&project(), &name(sandbox)).await.unwrap();
    let dir = run_dir(house).join(found.sandbox.id.as_str());
    let read = |name: &str| serde_json::from_slice(&fs::read(dir.join(name)).unwrap()).unwrap();
    (read("machine.json"), read("plan.json"))
}

/// What distinguishes machines.
async fn who(engine: &Engine, sandbox: &str) -> [String; 4] {
    let line = "hostname; cat /sys/class/net/eth0/address /proc/sys/kernel/random/boot_id; \
                head -c 16 /dev/urandom | od -An -tx1";
    let told = ok(engine, sandbox, line).await;
    let lines: Vec<String> = told.lines().map(|line| line.trim().to_owned()).collect();
    lines.try_into().expect("four lines")
}

fn left_in_tmp(house: &House) -> Vec<String> {
    let listed = fs::read_dir(house.data().join("tmp")).unwrap();
    let names = listed.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.starts_with("ready-")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_create_takes_over_a_machine_that_waits() {
    let Some(house) = house("a_create_takes_over_a_machine_that_waits") else { return };
    let mut engine = house.open().await;
    engine.create(&project(), machine("one"), None).await.unwrap();
    let first = waiting(&house, &engine).await;
    engine.create(&project(), machine("two"), None).await.unwrap();
    let (on_host, plan) = record(&house, &engine, "two").await;
    assert_eq!(on_host["group"], first.as_str(), "it was not taken over: {on_host}");
    assert_ne!(plan["used_before"]["nanos"], 0, "what it used before is not the sandbox's: {plan}");
    assert!(!run_dir(&house).join(first.as_str()).exists(), "nothing is left of what it was");

    let second = waiting(&house, &engine).await;
    assert_ne!(first, second);
    engine.create(&project(), machine("three"), None).await.unwrap();
    let all = [who(&engine, "one").await, who(&engine, "two").await, who(&engine, "three").await];
    for part in 0..4 {
        let mut different: Vec<&String> = all.iter().map(|who| &who[part]).collect();
        different.sort();
        different.dedup();
        assert_eq!(different.len(), 3, "{all:?}");
    }
    assert_eq!([&all[1][0], &all[2][0]], ["two", "three"]);
    let off = ok(&engine, "two", "date +%s").await.trim().parse::<i64>().unwrap()
        - jiff::Timestamp::now().as_second();
    assert!(off.abs() <= 2, "its clock is {off} s off");
    // Nothing of its trial run is visible.
    let known = engine.commands(&project(), &name("three"), &Default::default()).await.unwrap();
    assert!(known.items.iter().all(|command| command.argv.first().unwrap() == "sh"), "{known:?}");
    let processes = "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; done";
    assert!(!ok(&engine, "three", processes).await.contains("true"));

    // It is captured, continues, is forked live and stopped like any other.
    ok(&engine, "two", "echo kept > /root/file; echo $$ > /dev/shm/memory").await;
    let memory = ok(&engine, "two", "cat /dev/shm/memory").await;
    engine.pause(&project(), &name("two"), None).await.unwrap();
    assert_eq!(
        ok(&engine, "two", "cat /root/file /dev/shm/memory").await,
        format!("kept\n{memory}")
    );
    let fork = Fork { name: Some(name("fork")), ..Fork::default() };
    engine.fork(&project(), &name("three"), fork, None).await.unwrap();
    assert_eq!(who(&engine, "fork").await[0], "fork");
    engine.stop(&project(), &name("two"), Stop::default(), None).await.unwrap();
    assert_eq!(ok(&engine, "two", "cat /root/file; ls /dev/shm").await, "kept\n");

    // One that runs is adopted by the next daemon, and one that waits is not left to it.
    waiting(&house, &engine).await;
    engine.shutdown().await;
    let alive = house.machines_alive().await;
    assert!(alive.iter().all(|key| key.sandbox().is_ok()), "{alive:?}");
    assert_eq!(left_in_tmp(&house), [""; 0]);
    engine = house.reopen(engine).await;
    assert_eq!(ok(&engine, "three", "hostname").await, "three\n");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_machine_that_died_waiting_costs_nothing() {
    let Some(house) = house("a_machine_that_died_waiting_costs_nothing") else { return };
    let engine = house.open().await;
    engine.create(&project(), machine("one"), None).await.unwrap();
    let key = waiting(&house, &engine).await;
    let text = fs::read(run_dir(&house).join(key.as_str()).join("machine.json")).unwrap();
    let record: Value = serde_json::from_slice(&text).unwrap();
    let pid = i32::try_from(record["pid"].as_i64().unwrap()).unwrap();
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    engine.create(&project(), machine("two"), None).await.unwrap();
    assert_eq!(ok(&engine, "two", "hostname").await, "two\n");
    assert!(!run_dir(&house).join(key.as_str()).exists(), "what is left of it is gone");
    // Another one waits for the next.
    let next = waiting(&house, &engine).await;
    assert_ne!(next, key);
    assert_eq!(left_in_tmp(&house), [next.as_str()]);
    // Of another size it is of no use, nor for one that may use less of a processor, although that has the same template.
    let mut slower = machine("slower");
    slower.patch.millicpus = Some(500);
    engine.create(&project(), slower, None).await.unwrap();
    let mut larger = machine("larger");
    larger.patch.memory = Some(sandkeep_core::model::Size(320 << 20));
    engine.create(&project(), larger, None).await.unwrap();
    let there = house.machines_alive().await;
    assert!(there.contains(&next), "{there:?}");
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn as_many_wait_as_the_settings_say() {
    let Some(mut house) = house("as_many_wait_as_the_settings_say") else { return };
    house.settings.warm_vms = 2;
    let engine = house.open().await;
    engine.create(&project(), machine("one"), None).await.unwrap();
    until("two warm VMs", async || (engine.waiting_warm_vms() == 2).then_some(())).await;
    let project = project();
    let (two, three) = tokio::join!(
        engine.create(&project, machine("two"), None),
        engine.create(&project, machine("three"), None)
    );
    two.and(three).unwrap();
    for sandbox in ["two", "three"] {
        let (on_host, _) = record(&house, &engine, sandbox).await;
        assert!(on_host["group"].as_str().unwrap().starts_with("ready-"), "{on_host}");
        assert_eq!(ok(&engine, sandbox, "hostname").await, format!("{sandbox}\n"));
    }
    until("two more", async || (engine.waiting_warm_vms() == 2).then_some(())).await;
    engine.shutdown().await;
}

/// What the process that dies does. Without a house it is not that process and does nothing.
#[tokio::test(flavor = "multi_thread")]
async fn victim() {
    let Some(house) = House::lent() else { return };
    let mut house = house.with_machines().unwrap();
    house.settings.warm_vms = 1;
    let engine = house.open().await;
    let sandbox = std::env::var("SANDKEEP_TEST_DEED").unwrap();
    engine.create(&project(), machine(&format!("before-{sandbox}")), None).await.unwrap();
    waiting(&house, &engine).await;
    engine.create(&project(), machine(&sandbox), None).await.unwrap();
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_dies_while_a_machine_is_taken_over_leaves_nothing() {
    let test = "a_daemon_that_dies_while_a_machine_is_taken_over_leaves_nothing";
    let Some(mut house) = house(test) else { return };
    house.settings.warm_vms = 0;
    let mut engine = house.open().await;
    for (number, point) in ["adopt.disks", "adopt.moved", "ready.taken"].iter().enumerate() {
        let sandbox = format!("app-{number}");
        engine = house.cut(engine, victim!(), &sandbox, point).await;
        let alive = house.machines_alive().await;
        assert!(alive.iter().all(|key| key.sandbox().is_ok()), "{point}: {alive:?}");
        assert_eq!(left_in_tmp(&house), [""; 0], "{point}");
        let now = engine.get_settled(&project(), &name(&sandbox)).await.unwrap();
        assert_ne!(now.sandbox.phase(), Phase::Running, "{point}: nobody was told that it runs");
        assert_eq!(ok(&engine, &sandbox, "hostname").await, format!("{sandbox}\n"), "{point}");
        for gone in [sandbox.clone(), format!("before-{sandbox}")] {
            engine.delete(&project(), &name(&gone), Default::default(), None).await.unwrap();
        }
    }
    assert!(house.machines_alive().await.is_empty());
}
