//! The container driver keeps the contract, and what only it promises.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use sandkeep_core::driver::container::probe;
use sandkeep_core::driver::{Driver, DriverError, Machine, Relayer};
use sandkeep_core::model::RootFs;
use sandkeep_testkit::driver::{ContainerHost, driver_contract, key};
use sandkeep_testkit::inside::{Inside, userland};

fn host(test: &str) -> Option<ContainerHost> {
    match ContainerHost::new() {
        Ok(host) => Some(host),
        Err(why) => {
            eprintln!("SKIPPED {test}: {why}");
            None
        }
    }
}

#[tokio::test]
async fn the_container_driver_keeps_the_contract() {
    let Some(host) = host("the_container_driver_keeps_the_contract") else { return };
    let broken = |name: &str| {
        let mut machine = host.machine(name);
        machine.root.lower = vec![PathBuf::from("no-such-layer")];
        machine
    };
    let volume = |name: &str| host.root(name, &[]);
    driver_contract(|| host.driver(), |name| host.machine(name), broken, volume).await;
}

#[tokio::test]
async fn a_session_that_does_nothing_leaves_nothing() {
    let Some(host) = host("a_session_that_does_nothing_leaves_nothing") else { return };
    let driver = host.driver();
    let machine = host.machine("idle");
    driver.start(&machine).await.expect("it starts");
    driver.stop(&machine.key).await.expect("it stops");
    let upper = machine.root.writable_dir.join("upper");
    assert_eq!(fs::read_dir(&upper).unwrap().count(), 0, "the upper is empty");
    assert_eq!(fs::read_dir(&host.config().run_dir).unwrap().count(), 0, "no runtime directory");
}

#[tokio::test]
async fn a_failed_start_says_which_step() {
    let Some(host) = host("a_failed_start_says_which_step") else { return };
    let driver = host.driver();
    let mut missing = host.machine("missing");
    missing.root.lower = vec![PathBuf::from("gone")];
    let mut odd = host.machine("odd");
    odd.root = RootFs { upper: PathBuf::from("../upper"), ..odd.root };
    fs::remove_file(host.layer("file").join("proc")).unwrap_or_default();
    fs::write(host.layer("file").join("proc"), "no directory").unwrap();
    let file = host.machine_on("file", host.root("file", &["file"]));
    for (machine, expected) in [
        (missing, "stack the layers"),
        (odd, "name the layers"),
        (file, "use the image's `/proc`, which must be a directory"),
    ] {
        match driver.start(&machine).await {
            Err(DriverError::Build { step, .. }) => assert_eq!(step, expected),
            other => panic!("{expected}: {other:?}"),
        }
        assert!(driver.survivors().await.unwrap().is_empty());
    }
}

#[tokio::test]
async fn remains_of_the_dead_are_cleared() {
    let Some(host) = host("remains_of_the_dead_are_cleared") else { return };
    let driver = host.driver();
    // A daemon that died right after making the directory, and one whose machine is long gone and
    // has its number used by another process: this one.
    let run_dir = &host.config().run_dir;
    fs::create_dir(run_dir.join("stillborn")).unwrap();
    fs::create_dir(run_dir.join("reused")).unwrap();
    let record =
        format!(r#"{{"version":1,"pid":{},"started":1,"hostname":"x"}}"#, std::process::id());
    fs::write(run_dir.join("reused/machine.json"), record).unwrap();
    assert!(driver.survivors().await.unwrap().is_empty());
    assert_eq!(fs::read_dir(run_dir).unwrap().count(), 0);
    driver.stop(&key("reused")).await.expect("and this process was not killed");
}

#[tokio::test]
async fn the_doctor_finds_this_host_fit_and_leaves_nothing() {
    let Some(host) = host("the_doctor_finds_this_host_fit_and_leaves_nothing") else { return };
    let checks = probe(host.config(), host.path()).await;
    let bad: Vec<_> = checks.iter().filter(|check| !check.ok).collect();
    assert!(bad.is_empty(), "{bad:?}");
    assert!(checks.len() > 5, "{checks:?}");
    assert_eq!(fs::read_dir(&host.config().run_dir).unwrap().count(), 0);
}

/// A machine with a shell.
async fn shell(test: &str) -> Option<(ContainerHost, Machine, Inside)> {
    let host = host(test)?;
    if let Err(why) = userland(&host.layer("userland")) {
        eprintln!("SKIPPED {test}: {why}");
        return None;
    }
    let machine = host.machine_on("box", host.root("first", &["userland"]));
    let link = host.driver().start(&machine).await.expect("it starts");
    let inside = Inside::reach(&link).await;
    Some((host, machine, inside))
}

#[tokio::test]
async fn a_swapped_root_keeps_memory_and_frees_the_old_upper() {
    let test = "a_swapped_root_keeps_memory_and_frees_the_old_upper";
    let Some((host, machine, inside)) = shell(test).await else { return };
    let driver = host.driver();
    inside.sh("echo one > /kept; echo r > /run/r; echo s > /dev/shm/s").await;
    let mounts = inside.sh("cat /proc/self/mounts | wc -l").await.out;
    let mut current = machine.root.clone();
    for round in 0..5 {
        // What a checkpoint does: the upper becomes a layer, and a fresh upper is put on top.
        let sealed = host.path().join("layers").join(format!("sealed-{round}"));
        let mut next = host.root(&format!("next-{round}"), &[]);
        // The agent stands on the old upper until the swap, so it is copied here, not moved.
        copy_tree(&current.writable_dir.join("upper"), &sealed);
        next.lower = current.lower.clone();
        next.lower.insert(0, PathBuf::from(format!("sealed-{round}")));
        driver.swap_root(&machine.key, &next).await.expect("the root is swapped");
        let before = listing(&current.writable_dir);
        let script =
            format!("echo {round} > /new-{round}; cat /kept /run/r /dev/shm/s; echo x >/dev/null");
        assert_eq!(inside.sh(&script).await.out, "one\nr\ns\n", "round {round}");
        assert_eq!(listing(&current.writable_dir), before, "nothing is written to the old one");
        assert!(next.writable_dir.join("upper").join(format!("new-{round}")).exists());
        // No mount of the old root is left anywhere, so its directory can go.
        fs::remove_dir_all(&current.writable_dir).unwrap();
        current = next;
    }
    assert_eq!(
        inside.sh("cat /proc/self/mounts | wc -l").await.out,
        mounts,
        "no mount is left over"
    );
    assert_eq!(inside.sh("ls / | wc -l").await.out.trim(), "15", "all that was written is there");
    assert_eq!(inside.sh("echo x > /proc/sys/kernel/hostname").await.code, 2, "masks are kept");
    driver.stop(&machine.key).await.expect("it stops");
}

#[tokio::test]
async fn a_root_is_not_swapped_under_running_commands() {
    let test = "a_root_is_not_swapped_under_running_commands";
    let Some((host, machine, inside)) = shell(test).await else { return };
    let driver = host.driver();
    let mut running = inside.start(&["sh", "-c", "echo up; exec sleep 1000"], None).await;
    running.next().await.expect("it is up");
    assert!(!driver.alone(&machine.key).await.unwrap());
    let other = host.root("other", &["userland"]);
    let refused = driver.swap_root(&machine.key, &other).await;
    assert!(matches!(refused, Err(DriverError::NotAlone { .. })), "{refused:?}");
    assert_eq!(inside.sh("echo on").await.out, "on\n", "it goes on, thawed");
    inside.guest().quiesce(std::time::Duration::ZERO).await.expect("commands end");
    assert!(driver.alone(&machine.key).await.unwrap());
    driver.swap_root(&machine.key, &other).await.expect("and now it can be swapped");
}

#[tokio::test]
async fn the_frozen_do_nothing_and_the_stopped_write_nothing() {
    let test = "the_frozen_do_nothing_and_the_stopped_write_nothing";
    let Some((host, machine, inside)) = shell(test).await else { return };
    let driver = host.driver();
    let busy = "for my $n (1..4) { last if fork } open(my $f, '>>', \"/log-$$\"); $| = 1; \
                print 'up'; while (1) { syswrite $f, 'x' x 100 }";
    let mut running = inside.start(&["perl", "-e", busy], None).await;
    running.next().await.expect("it is up");
    let upper = machine.root.writable_dir.join("upper");
    let still = async |when: &str| {
        let before = listing(&upper);
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        assert_eq!(listing(&upper), before, "{when}");
        before
    };
    driver.freeze(&machine.key).await.expect("it freezes");
    let frozen = still("frozen").await;
    driver.thaw(&machine.key).await.expect("it thaws");
    while listing(&upper) == frozen {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    driver.freeze(&machine.key).await.expect("it freezes");
    driver.stop(&machine.key).await.expect("what is frozen can be stopped");
    still("stopped").await;

    // The same directories serve again at once.
    fs::write(upper.join("from-outside"), "seen").unwrap();
    let link = driver.start(&machine).await.expect("it starts on the same upper");
    let inside = Inside::reach(&link).await;
    let ran = inside.sh("cat /from-outside; cat /log-* | wc -c; echo more > /more").await;
    assert!(ran.out.starts_with("seen") && ran.code == 0, "{ran:?}");
    driver.stop(&machine.key).await.expect("it stops");
    assert_eq!(fs::read_to_string(upper.join("more")).unwrap(), "more\n");
}

#[tokio::test]
async fn files_belong_to_the_ids_the_sandbox_knows() {
    let test = "files_belong_to_the_ids_the_sandbox_knows";
    let Some((host, machine, inside)) = shell(test).await else { return };
    inside.sh("echo r > /by-root; mkdir -m 777 /open").await;
    inside.run(&["sh", "-c", "echo s > /open/by-someone"], Some("someone")).await;
    inside.sh("echo w > /tmp/w; rm /bin/wc; ln -s /etc/passwd /link; chown 1000:1000 /link").await;
    let upper = machine.root.writable_dir.join("upper");
    let owner = |name: &str| {
        let about = fs::symlink_metadata(upper.join(name)).unwrap();
        (about.uid(), about.gid())
    };
    assert_eq!(owner("by-root"), (0, 0));
    assert_eq!(owner("open/by-someone"), (1000, 1000));
    let whiteout = fs::symlink_metadata(upper.join("bin/wc")).unwrap();
    assert_eq!((whiteout.mode() & 0o170_000, whiteout.rdev()), (0o020_000, 0), "a removed file");
    assert_eq!(inside.run(&["stat", "-c", "%u", "/open/by-someone"], None).await.out, "1000\n");
    let hosts = inside.sh("cat /etc/hosts /etc/hostname; uname -n").await.out;
    assert!(hosts.contains("127.0.0.1\tlocalhost box") && hosts.ends_with("box\nbox\n"), "{hosts}");
    host.driver().stop(&machine.key).await.expect("it stops");
}

#[tokio::test]
async fn a_first_process_killed_from_outside_is_noticed() {
    let test = "a_first_process_killed_from_outside_is_noticed";
    let Some((host, machine, _inside)) = shell(test).await else { return };
    let driver = host.driver();
    let record = host.config().run_dir.join("box/machine.json");
    let record: serde_json::Value = serde_json::from_slice(&fs::read(record).unwrap()).unwrap();
    let pid = record["pid"].as_i64().and_then(|pid| rustix::process::Pid::from_raw(pid as i32));
    let kill = async {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        rustix::process::kill_process(pid.unwrap(), rustix::process::Signal::KILL).unwrap();
    };
    tokio::join!(driver.died(&machine.key), kill);
    let refused = driver.alone(&machine.key).await;
    assert!(matches!(refused, Err(DriverError::Absent { .. })), "{refused:?}");
    assert!(driver.survivors().await.unwrap().is_empty());
    driver.start(&machine).await.expect("its name is free");
}

fn copy_tree(from: &Path, to: &Path) {
    let copied = std::process::Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap();
    assert!(copied.success());
}

/// Every file below a directory, with its size.
fn listing(directory: &Path) -> Vec<(PathBuf, u64)> {
    let mut found = Vec::new();
    let mut todo = vec![directory.to_owned()];
    while let Some(directory) = todo.pop() {
        for entry in fs::read_dir(directory).unwrap().map(Result::unwrap) {
            let about = entry.metadata().unwrap();
            if about.is_dir() {
                todo.push(entry.path());
            }
            found.push((entry.path(), about.len()));
        }
    }
    found.sort();
    found
}
