//! The microvm driver keeps the contract, and what only it promises.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use sandkeep_core::driver::microvm::MicrovmDriver;
use sandkeep_core::driver::{Driver, DriverError, KeepsMemory, Machine, OwnDisk, Then, mac_of};
use sandkeep_core::model::RootFs;
use sandkeep_proto::link::{Identity, Renew};
use sandkeep_testkit::driver::{
    MicrovmHost, bring_up, driver_contract, key, moment, network_contract, reach, wait_until_quiet,
};
use sandkeep_testkit::inside::{Inside, userland};
use tokio::time::{sleep, timeout};

fn host(test: &str) -> Option<MicrovmHost> {
    match MicrovmHost::new() {
        Ok(host) => Some(host),
        Err(why) => {
            sandkeep_testkit::daemon::skipped(test, &why);
            None
        }
    }
}

#[tokio::test]
async fn the_microvm_driver_keeps_the_contract() {
    let Some(host) = host("the_microvm_driver_keeps_the_contract") else { return };
    let broken = |name: &str| {
        let mut machine = host.machine(name);
        machine.root.lower = vec![PathBuf::from("no-such-layer")];
        machine
    };
    let volume = |name: &str| host.root(name, &[]);
    driver_contract(|| host.driver(), |name| host.machine(name), broken, volume).await;
    assert_eq!(fs::read_dir(&host.config().run_dir).unwrap().count(), 0, "no runtime directory");
}

/// A host with a layer that has a shell.
fn with_shell(test: &str) -> Option<MicrovmHost> {
    let host = host(test)?;
    if let Err(why) = userland(&host.layer("userland")) {
        sandkeep_testkit::daemon::skipped(test, &why);
        return None;
    }
    Some(host)
}

/// A machine with a shell.
fn machine(host: &MicrovmHost, name: &str) -> Machine {
    host.machine_on(name, host.root(name, &["userland"]))
}

fn pid_of(host: &MicrovmHost, name: &str) -> u32 {
    let record = fs::read(host.config().run_dir.join(name).join("machine.json")).unwrap();
    let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
    u32::try_from(record["pid"].as_u64().unwrap()).unwrap()
}

#[tokio::test]
async fn the_hypervisor_is_confined() {
    let Some(host) = with_shell("the_hypervisor_is_confined") else { return };
    let driver = host.driver();
    let machine = machine(&host, "box");
    let inside = Inside::over(bring_up(&driver, &machine).await);
    let proc = PathBuf::from(format!("/proc/{}", pid_of(&host, "box")));
    let status = fs::read_to_string(proc.join("status")).unwrap();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(&format!("{name}:")));
        line.unwrap().split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    let own = machine.uids.base.to_string();
    for name in ["Uid", "Gid"] {
        assert_eq!(field(name), [own.as_str(); 4], "{name}");
    }
    assert_eq!(field("Groups"), [""; 0]);
    assert_eq!((field("NoNewPrivs"), field("Seccomp")), (vec!["1".into()], vec!["2".into()]));
    for name in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(field(name), ["0000000000000000"], "{name}");
    }
    for name in ["mnt", "pid", "net", "ipc", "uts"] {
        let of = |proc: &Path| fs::read_link(proc.join("ns").join(name)).unwrap();
        assert_ne!(of(&proc), of(Path::new("/proc/self")), "{name}");
    }
    let limits = fs::read_to_string(proc.join("limits")).unwrap();
    let limit = |name: &str| -> [u64; 2] {
        let line = limits.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        let mut words = line.split_whitespace().map(|word| word.parse().unwrap_or(u64::MAX));
        [words.next().unwrap(), words.next().unwrap()]
    };
    let (disk, memory) = (machine.limits.file_size.0, machine.limits.memory.0);
    let [soft, hard] = limit("Max file size");
    assert!(soft == hard && hard >= disk, "{limits}");
    assert!(hard <= (disk + disk / 8 + (64 << 20)).max(memory), "{limits}");
    // Not 0, which a host whose `core_pattern` is a program ignores.
    assert_eq!(limit("Max core file size"), [1, 1]);
    assert!(limit("Max open files")[1] <= 4096, "{limits}");
    let routes = fs::read_to_string(proc.join("net/dev")).unwrap();
    let devices: Vec<_> =
        routes.lines().skip(2).map(|line| line.split(':').next().unwrap().trim()).collect();
    assert_eq!(devices, ["lo"], "and it is down");
    let entries = |place: &str| -> BTreeSet<String> {
        let listed = fs::read_dir(proc.join("root").join(place)).unwrap();
        listed.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    };
    let root = entries(".");
    let known = [
        "bin",
        "dev",
        "etc",
        "initramfs",
        "kernel",
        "lib",
        "lib32",
        "lib64",
        "net",
        "ram",
        "ram.so",
        "sbin",
        "usr",
    ];
    assert!(root.iter().all(|name| known.contains(&name.as_str())), "{root:?}");
    assert_eq!(entries("dev").len(), 3, "{:?}", entries("dev"));
    assert!(entries("etc").is_subset(&["ld.so.cache", "alternatives"].map(str::to_owned).into()));
    let open: BTreeSet<PathBuf> = fs::read_dir(proc.join("fd"))
        .unwrap()
        .filter_map(|entry| fs::read_link(entry.unwrap().path()).ok())
        .filter(|target| target.is_absolute())
        .collect();
    let ours = |path: &PathBuf| {
        let own = ["/ram", "/dev/null"].map(PathBuf::from);
        own.contains(path)
            || path.starts_with(machine.root.disk_dir())
            || path.starts_with(host.config().cache_dir.join("roots"))
            || path.starts_with(host.config().cache_dir.join("blank"))
            || path.starts_with(host.config().run_dir.join("box"))
    };
    assert!(open.iter().all(ours), "{open:?}");
    // It has nowhere to write: the one directory it had is taken back.
    let net = fs::metadata(host.config().run_dir.join("box/net")).unwrap();
    assert_eq!(std::os::unix::fs::MetadataExt::uid(&net), 0);
    assert_eq!(inside.sh("echo fine").await.out, "fine\n");
}

#[tokio::test]
async fn a_hypervisor_killed_from_outside_is_noticed() {
    let Some(host) = with_shell("a_hypervisor_killed_from_outside_is_noticed") else { return };
    let driver = host.driver();
    let machine = machine(&host, "box");
    driver.start(&machine).await.expect("it starts");
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid_of(&host, "box")).unwrap());
    let kill = async {
        sleep(Duration::from_millis(100)).await;
        rustix::process::kill_process(pid.unwrap(), rustix::process::Signal::KILL).unwrap();
    };
    let died = timeout(Duration::from_secs(30), driver.died(&machine.key));
    assert!(tokio::join!(died, kill).0.is_ok());
    let refused = driver.lower(&machine.key).await;
    assert!(matches!(refused, Err(DriverError::Absent { .. })), "{refused:?}");
    assert!(driver.survivors().await.unwrap().is_empty());
    assert!(machine.root.disk_dir().join("0.qcow2").exists(), "what it wrote is kept");
    driver.start(&machine).await.expect("its name is free");
}

#[tokio::test]
async fn a_machine_that_was_never_set_going_is_ended() {
    let Some(host) = host("a_machine_that_was_never_set_going_is_ended") else { return };
    let driver = host.driver();
    let machine = host.machine("half");
    driver.start(&machine).await.expect("it starts");
    // As after a daemon that died between launching it and letting it go.
    fs::remove_file(host.config().run_dir.join("half/plan.json")).unwrap();
    assert!(driver.survivors().await.unwrap().is_empty());
    assert!(!host.config().run_dir.join("half").exists());
}

#[tokio::test]
async fn garbage_at_its_sockets_does_not_disturb_a_machine() {
    let test = "garbage_at_its_sockets_does_not_disturb_a_machine";
    let Some(host) = with_shell(test) else { return };
    let driver = host.driver();
    let machine = machine(&host, "box");
    drop(bring_up(&driver, &machine).await);
    let run_dir = host.config().run_dir.join("box");
    let noise: Vec<u8> =
        (0..40_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    for socket in ["agent.sock", "qmp.sock"] {
        let mut stream = UnixStream::connect(run_dir.join(socket)).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(2))).unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        let _ = stream.write_all(&noise);
        let _ = stream.read(&mut [0; 4096]);
    }
    let card = UnixDatagram::unbound().unwrap();
    card.set_nonblocking(true).unwrap();
    for length in [0, 1, 13, 14, 15, 60, 1500, 30_000] {
        let _ = card.send_to(&noise[..length], run_dir.join("net/nic.sock"));
    }
    let (_, link) = driver.survivors().await.unwrap().remove(0);
    let inside = Inside::over(reach(&link).await);
    assert_eq!(inside.sh("echo still here").await.out, "still here\n");
    driver.go_on(&machine.key).await.expect("the hypervisor takes orders");
}

#[tokio::test]
async fn a_guest_that_floods_its_serial_port_fills_nothing() {
    let test = "a_guest_that_floods_its_serial_port_fills_nothing";
    let Some(host) = with_shell(test) else { return };
    let driver = host.driver();
    let machine = machine(&host, "box");
    let inside = Inside::over(bring_up(&driver, &machine).await);
    let flood = "mknod /tmp/port c 4 64; exec 3>/tmp/port || exec 3>/dev/ttyS0 || exit 9; echo up; \
                 while :; do echo aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa >&3; done";
    let mut flooding = inside.start(&["sh", "-c", flood], None).await;
    let first = flooding.next().await.expect("the agent lives");
    eprintln!("flooding: {first:?}");
    sleep(Duration::from_secs(3)).await;
    let run_dir = host.config().run_dir.join("box");
    let held: u64 =
        fs::read_dir(&run_dir).unwrap().map(|at| at.unwrap().metadata().unwrap().len()).sum();
    assert!(held < 64 << 10, "{held} bytes");
    assert_eq!(inside.sh("echo still here").await.out, "still here\n");
}

/// Counts in memory alone, and shows where it is.
const COUNTER: &str = "n=0; while :; do n=$((n+1)); echo $n > /dev/shm/new; mv /dev/shm/new /dev/shm/count; sleep 0.05; done";

async fn count(inside: &Inside) -> u64 {
    inside.sh("cat /dev/shm/count").await.out.trim().parse().unwrap()
}

/// What the engine does around a capture.
async fn capture(
    driver: &MicrovmDriver,
    inside: &Inside,
    machine: &Machine,
    (into, below): (&Path, &[PathBuf]),
    then: Then,
) {
    fs::create_dir_all(into).unwrap();
    inside.guest().freeze().await.expect("it freezes");
    let captured = driver.capture(&machine.key, into, below, then).await.expect("it is captured");
    eprintln!("captured {} pages, stood {:?}", captured.pages, captured.stood);
    assert!(captured.pages > 0);
    assert_eq!(captured.fingerprint, driver.fingerprint(machine).await.unwrap());
    assert_eq!(captured.roots.len(), 1, "{:?}", captured.roots);
    if then == Then::Continue {
        inside.guest().thaw().await.expect("it thaws");
    }
}

/// What the engine does to start a machine from an image.
async fn restore(driver: &MicrovmDriver, machine: &Machine, image: &[PathBuf]) -> Inside {
    let began = std::time::Instant::now();
    let link = driver.restore(machine, image, &[]).await.expect("it is restored").link;
    let restored = began.elapsed();
    let guest = reach(&link).await;
    eprintln!("restored after {restored:?}, answered after {:?}", began.elapsed());
    let identity = Identity { hostname: machine.hostname.clone(), mac: mac_of(&machine.key) };
    let renew = Renew { now: moment(), identity: Some(identity), machine_id: true };
    guest.renew(renew).await.expect("it is renewed");
    guest.thaw().await.expect("it thaws");
    Inside::over(guest)
}

#[tokio::test]
async fn memory_outlives_the_machine_and_is_many_machines_at_once() {
    let test = "memory_outlives_the_machine_and_is_many_machines_at_once";
    let Some(host) = with_shell(test) else { return };
    let driver = host.driver();
    let first = machine(&host, "first");
    let inside = Inside::over(bring_up(&driver, &first).await);
    inside.start(&["sh", "-c", COUNTER], None).await;
    sleep(Duration::from_secs(1)).await;
    inside.sh("echo one > /written").await;
    let (one, two) = (host.path().join("memory/one"), host.path().join("memory/two"));
    let before = count(&inside).await;
    capture(&driver, &inside, &first, (&one, &[]), Then::Continue).await;
    inside.sh("echo two > /written").await;
    sleep(Duration::from_millis(300)).await;
    let between = count(&inside).await;
    assert!(between > before, "it went on");
    capture(&driver, &inside, &first, (&two, std::slice::from_ref(&one)), Then::Hold).await;
    let size = |layer: &Path| fs::metadata(layer.join("pages")).unwrap().len();
    assert!(size(&two) < size(&one) / 2, "only what changed: {} of {}", size(&two), size(&one));
    driver.go_on(&first.key).await.expect("it can be let go on");
    drop(inside);
    driver.stop(&first.key).await.expect("it stops");
    for (image, written, at_least) in
        [(vec![one.clone()], "one\n", before), (vec![two.clone(), one.clone()], "two\n", between)]
    {
        let machines: Vec<Machine> =
            (0..3).map(|n| machine(&host, &format!("fork-{}-{n}", image.len()))).collect();
        let [a, b, c] = [0, 1, 2].map(|n| restore(&driver, &machines[n], &image));
        let forks = tokio::join!(a, b, c);
        for (fork, machine) in [forks.0, forks.1, forks.2].into_iter().zip(&machines) {
            let there = count(&fork).await;
            assert!(there >= at_least && there < at_least + 600, "{there} after {at_least}");
            assert_eq!(
                fork.sh("cat /written; uname -n").await.out,
                format!("{written}{}\n", machine.hostname)
            );
            fork.sh(&format!("echo {} > /written", machine.key)).await;
            sleep(Duration::from_millis(200)).await;
            assert!(count(&fork).await > there, "the process goes on");
            assert_eq!(fork.sh("cat /written").await.out, format!("{}\n", machine.key));
            network_contract(&driver, &machine.key).await;
            driver.stop(&machine.key).await.expect("it stops");
        }
    }
}

#[tokio::test]
async fn an_image_s_disk_is_booted_without_its_memory() {
    let test = "an_image_s_disk_is_booted_without_its_memory";
    let Some(host) = with_shell(test) else { return };
    let driver = host.driver();
    let first = machine(&host, "first");
    let inside = Inside::over(bring_up(&driver, &first).await);
    inside.sh("echo kept > /written").await;
    let one = host.path().join("memory/one");
    capture(&driver, &inside, &first, (&one, &[]), Then::Hold).await;
    drop(inside);
    driver.stop(&first.key).await.expect("it stops");
    let image = [one];
    let second = machine(&host, "second");
    let link = driver.boot(&second, &image).await.expect("it boots");
    let guest = reach(&link).await;
    guest.assemble(sandkeep_testkit::driver::assembly(&driver, &second).await).await.unwrap();
    let inside = Inside::over(guest);
    assert_eq!(inside.sh("cat /written").await.out, "kept\n");
    inside.sh("echo more > /written").await;
    wait_until_quiet(&driver, inside.guest()).await;
    drop(inside);
    driver.stop(&second.key).await.expect("it stops");
    // What the second session wrote is newer than the image: memory does not go with it.
    let refused = driver.restore(&second, &image, &[]).await.unwrap_err().to_string();
    assert!(refused.contains("after the image was captured"), "{refused}");
    assert!(driver.survivors().await.unwrap().is_empty());
}

#[tokio::test]
async fn a_damaged_image_starts_nothing() {
    let Some(host) = host("a_damaged_image_starts_nothing") else { return };
    let driver = host.driver();
    let first = host.machine("first");
    let guest = bring_up(&driver, &first).await;
    let one = host.path().join("memory/one");
    fs::create_dir_all(&one).unwrap();
    driver.capture(&first.key, &one, &[], Then::Hold).await.expect("it is captured");
    drop(guest);
    driver.stop(&first.key).await.expect("it stops");
    for (file, keep) in [("devices", 1000), ("pages", 4096), ("index", 40), ("disk.qcow2", 100)] {
        let path = one.join(file);
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..keep]).unwrap();
        let second = host.machine("second");
        let refused = driver.restore(&second, std::slice::from_ref(&one), &[]).await;
        fs::write(&path, &whole).unwrap();
        let error = refused.expect_err(file).to_string();
        eprintln!("{file}: {error}");
        assert!(driver.survivors().await.unwrap().is_empty(), "{file}");
        assert_eq!(fs::read_dir(&host.config().run_dir).unwrap().count(), 0, "{file}");
        assert!(!second.root.disk_dir().exists(), "{file}: no disk is left");
    }
}

#[tokio::test]
async fn layers_are_packed_once_and_forgotten_with_their_layers() {
    let test = "layers_are_packed_once_and_forgotten_with_their_layers";
    let Some(host) = with_shell(test) else { return };
    let driver = host.driver();
    fs::write(host.layer("upper").join("who"), "upper").unwrap();
    fs::write(host.layer("middle").join("who"), "middle").unwrap();
    fs::write(host.layer("middle").join("deep"), "middle").unwrap();
    let root = |name: &str, image: usize| RootFs {
        image,
        ..host.root(name, &["upper", "middle", "userland"])
    };
    let roots = || -> Vec<String> {
        let listed = fs::read_dir(host.config().cache_dir.join("roots")).unwrap();
        let names = listed.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.ends_with(".erofs")).collect()
    };
    for (name, image, devices) in [("apart", 0, 3), ("together", 3, 1), ("again", 2, 2)] {
        let machine = host.machine_on(name, root(name, image));
        let inside = Inside::over(bring_up(&driver, &machine).await);
        assert_eq!(driver.lower(&machine.key).await.unwrap(), devices, "{name}");
        assert_eq!(inside.sh("cat /who /deep").await.out, "uppermiddle", "{name}");
        driver.stop(&machine.key).await.expect("it stops");
    }
    assert_eq!(roots().len(), 5, "three by themselves, three together, two together");
    fs::remove_dir_all(host.path().join("layers/middle")).unwrap();
    fs::create_dir(host.path().join("layers/fresh")).unwrap();
    let machine = host.machine_on("fresh", host.root("fresh", &["fresh"]));
    driver.start(&machine).await.expect("it starts");
    assert_eq!(roots().len(), 3, "those of what is left: {:?}", roots());
    driver.stop(&key("fresh")).await.expect("it stops");
}

#[tokio::test]
async fn the_probe_boots_a_machine_and_remembers_what_runs_it() {
    let test = "the_probe_boots_a_machine_and_remembers_what_runs_it";
    let Some(host) = host(test) else { return };
    let checks = host.any_driver().probe().await;
    let bad: Vec<_> = checks.iter().filter(|check| !check.ok).collect();
    assert!(bad.is_empty(), "{bad:?}");
    assert!(checks.len() > 5, "{checks:?}");
    let kept = fs::read_to_string(host.config().cache_dir.join("probe.json")).unwrap();
    assert!(kept.contains("\"tcg\"") || kept.contains("\"kvm\""), "{kept}");
    assert_eq!(fs::read_dir(&host.config().run_dir).unwrap().count(), 0, "nothing is left");
}
