//! Machines whose insides do what they should not: nothing of the host's is lost or waits for them.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use sandkeep_core::engine::{Create, CreateDrive, Delete, Engine, Error, Exec, SetSecret, Stop};
use sandkeep_core::model::lifecycle::Phase;
use sandkeep_core::model::{Inject, InjectInto, Mount, MountMode, Name, Size};
use sandkeep_testkit::daemon::skipped;
use sandkeep_testkit::house::{House, name, project, sh, small};
use zeroize::Zeroizing;

const VALUE: &str = "tok_0123456789abcdef-QRS";

/// Freezes the agent for good: a machine's root may do that to its own first process.
const HANG: &str = "mkdir /sys/fs/cgroup/x; echo 1 > /sys/fs/cgroup/x/cgroup.procs; echo 1 > /sys/fs/cgroup/x/cgroup.freeze";

fn machine() -> Create {
    let mut request = small("m");
    request.patch.driver = Some("microvm".to_owned());
    request.patch.memory = Some(Size(256 << 20));
    request.patch.millicpus = Some(1000);
    request.patch.disk = Some(Size(128 << 20));
    request
}

async fn detached(engine: &Engine, argv: &[&str], inject: Vec<Inject>) {
    let argv = argv.iter().map(|word| (*word).to_owned()).collect();
    let exec = Exec { argv, detach: true, inject, ..Exec::default() };
    engine.exec(&project(), &name("m"), exec).await.unwrap();
}

async fn out(engine: &Engine, line: &str) -> String {
    sh(engine, "m", line).await.out
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_misbehaves_harms_itself_alone() {
    let house = match House::new().and_then(House::with_machines) {
        Ok(house) => house,
        Err(why) => return skipped("a_machine_that_misbehaves_harms_itself_alone", &why),
    };
    let engine = house.open().await;
    let set = SetSecret {
        value: Zeroizing::new(VALUE.to_owned()),
        hosts: None,
        places: None,
        tags: None,
    };
    engine.set_secret(&project(), "TOKEN".parse().unwrap(), set).await.unwrap();
    engine.create(&project(), machine(), None).await.unwrap();

    // A disk that is full is the guest's own matter.
    let full =
        out(&engine, "dd if=/dev/zero of=/root/big bs=1M count=400 2>&1; df -k / | tail -1").await;
    assert!(full.to_lowercase().contains("no space"), "{full}");
    assert_eq!(
        out(&engine, "rm /root/big; echo kept > /root/file; sync; cat /root/file").await,
        "kept\n"
    );

    // What a process was given is in its memory: that is not kept, and the machine continues.
    let into = InjectInto::Env("TOKEN".to_owned());
    let inject = vec![Inject { secret: "TOKEN".parse().unwrap(), into }];
    detached(&engine, &["sh", "-c", "while :; do sleep 1; done"], inject).await;
    let refused = engine.pause(&project(), &name("m"), None).await.unwrap_err();
    assert!(matches!(refused, Error::Guarded { goes_on: true, .. }), "{refused:?}");
    assert!(!format!("{refused:?}").contains(VALUE));
    assert_eq!(out(&engine, "cat /root/file").await, "kept\n");
    assert_eq!(
        sandkeep_testkit::house::holding(&house.data().join("memory"), VALUE),
        Vec::<String>::new()
    );

    // One that never answers again is ended, and its files are kept all the same.
    detached(&engine, &["sh", "-c", HANG], Vec::new()).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let silent = tokio::time::timeout(Duration::from_secs(3), out(&engine, "echo here")).await;
    assert!(silent.is_err(), "it answers: {silent:?}");
    let began = Instant::now();
    let stopped = engine.stop(&project(), &name("m"), Stop::default(), None).await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(300), "{:?}", began.elapsed());
    assert_eq!(stopped.sandbox.phase(), Phase::Stopped);
    assert_eq!(out(&engine, "cat /root/file").await, "kept\n");
    engine.delete(&project(), &name("m"), Default::default(), None).await.unwrap();
    assert_eq!(house.machines_alive().await, []);
}

fn with_drive(mut request: Create) -> Create {
    let mount = Mount { drive: name("data"), mode: MountMode::ReadWrite };
    request.patch.mounts = Some([("/data".to_owned(), mount)].into());
    request
}

/// The disk that what is written to the drive is on just now.
async fn disk_of_drive(house: &House, engine: &Engine) -> PathBuf {
    let drive = engine.drive(&project(), &name("data")).await.unwrap();
    let layer = drive.attached.unwrap().layer;
    house.data().join("layers").join(layer.as_str()).join("disk/0.qcow2")
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_written_to_a_drive_is_given_up_by_force_alone() {
    let house = match House::new().and_then(House::with_machines) {
        Ok(house) => house,
        Err(why) => {
            return skipped("what_was_written_to_a_drive_is_given_up_by_force_alone", &why);
        }
    };
    let engine = house.open().await;
    let drive = CreateDrive { name: name("data"), max_size: None, notes: Default::default() };
    engine.create_drive(&project(), drive).await.unwrap();
    engine.create(&project(), with_drive(machine()), None).await.unwrap();
    assert_eq!(out(&engine, "echo one > /data/file; sync; cat /data/file").await, "one\n");

    // No machine can be booted on this disk.
    let disk = disk_of_drive(&house, &engine).await;
    let file = fs::File::options().read(true).write(true).open(&disk).unwrap();
    let mut head = [0; 512];
    file.read_exact_at(&mut head, 0).unwrap();
    file.write_all_at(&[0xff; 512], 0).unwrap();
    house.kill_machines().await;
    let refused = engine.delete(&project(), &name("m"), Delete::default(), None).await.unwrap_err();
    assert_eq!(refused.code(), "drives_unsaved", "{refused}");
    assert!(refused.to_string().contains("drive `data`"), "{refused}");
    assert!(refused.hint().unwrap().contains("keep rm m --force"), "{:?}", refused.hint());
    let now = engine.get(&project(), &name("m")).await.unwrap().sandbox;
    assert_eq!(now.phase(), Phase::Failed);
    assert!(now.failure().unwrap().contains("drive `data`"));
    // Nor is it lost by a daemon that comes back, and nothing else was.
    let engine = house.reopen(engine).await;
    assert!(disk.exists());
    file.write_all_at(&head, 0).unwrap();
    let deleted = engine.delete(&project(), &name("m"), Delete::default(), None).await.unwrap();
    assert_eq!(deleted.drives_lost, Vec::<Name>::new());

    engine.create(&project(), with_drive(machine()), None).await.unwrap();
    let seen = out(&engine, "cat /data/file; echo two > /data/file; sync").await;
    assert_eq!(seen, "one\n");
    let disk = disk_of_drive(&house, &engine).await;
    let file = fs::File::options().write(true).open(&disk).unwrap();
    file.write_all_at(&[0xff; 512], 0).unwrap();
    house.kill_machines().await;
    let force = Delete { force: true, ..Delete::default() };
    let deleted = engine.delete(&project(), &name("m"), force, None).await.unwrap();
    assert_eq!(deleted.drives_lost, [name("data")]);
    engine.create(&project(), with_drive(small("m")), None).await.unwrap();
    assert_eq!(out(&engine, "cat /data/file").await, "one\n");
    assert_eq!(house.machines_alive().await, []);
}
