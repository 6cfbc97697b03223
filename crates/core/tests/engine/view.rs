//! A sandbox sees its own limits, and so do the programs in it that size themselves by them.

use std::fs;
use std::path::Path;
use std::process::Command;

use sandkeep_core::engine::{Checkpoint, Create, Engine, Fork, Stop};
use sandkeep_core::model::{Patch, Size};
use sandkeep_core::store::image::{AddedDirectory, Customization};
use sandkeep_testkit::daemon::skipped;
use sandkeep_testkit::house::{House, machine, name, ok, project, small};
use sandkeep_testkit::other_kernel::{self, INSIDE};

const MEMORY: u64 = 384 << 20;

fn limits(memory: u64, millicpus: u32) -> Patch {
    Patch { memory: Some(Size(memory)), millicpus: Some(millicpus), ..Patch::default() }
}

/// A number in a file of `/proc/meminfo`'s kind, in bytes.
fn meminfo(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name}:")));
    let kilobytes = line.unwrap_or_else(|| panic!("{name} in {text}")).trim();
    kilobytes.strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
}

/// The processors that this process may run on, which are those a sandbox can have.
fn processors() -> u32 {
    let all = rustix::thread::sched_getaffinity(None).unwrap();
    all.count()
}

/// Checks what `/proc`, `/sys` and the usual tools say.
async fn sees(engine: &Engine, sandbox: &str, memory: u64, millicpus: u32) {
    let sh = async |line: &str| ok(engine, sandbox, line).await;
    let cpus = millicpus.div_ceil(1000).min(processors());
    let text = sh("cat /proc/meminfo").await;
    assert_eq!(meminfo(&text, "MemTotal"), memory, "{text}");
    for name in ["MemFree", "MemAvailable", "Cached", "AnonPages", "Active", "Inactive"] {
        assert!(meminfo(&text, name) <= memory, "{name}: {text}");
    }
    assert_eq!(meminfo(&text, "SwapTotal"), 0);

    assert_eq!(sh("nproc").await.trim(), cpus.to_string());
    let lines = async |line: &str| sh(line).await.trim().parse::<u32>().unwrap();
    assert_eq!(lines("grep -c '^processor' /proc/cpuinfo").await, cpus);
    assert_eq!(lines("grep -c '^cpu[0-9]' /proc/stat").await, cpus);
    // The same processors everywhere.
    let allowed = sh("sed -n 's/^Cpus_allowed_list:\\s*//p' /proc/self/status").await;
    assert_eq!(sh("cat /sys/devices/system/cpu/online").await, allowed);
    let first = allowed.split([',', '-', '\n']).next().unwrap();
    sh(&format!(
        "grep -q '^cpu{first} ' /proc/stat && grep -q '^processor.*: {first}$' /proc/cpuinfo"
    ))
    .await;

    let uptime = sh("cat /proc/uptime").await;
    let uptime: f64 = uptime.split(' ').next().unwrap().parse().unwrap();
    let host = fs::read_to_string("/proc/uptime").unwrap();
    let host: f64 = host.split(' ').next().unwrap().parse().unwrap();
    assert!(uptime < host, "{uptime} s, and the host {host} s");
    let booted = lines("sed -n 's/^btime //p' /proc/stat").await;
    let now = lines("date +%s").await;
    assert!(f64::from(now.abs_diff(booted)) <= uptime + 60.0, "{booted} {now} {uptime}");
    // Started after the boot, and not long ago.
    let elapsed = lines("sleep 0.1; ps -o etimes= -p $$").await;
    assert!(f64::from(elapsed) <= uptime + 60.0, "{elapsed} s of {uptime} s");
    let loads = sh("cat /proc/loadavg").await;
    let loads: Vec<&str> = loads.split_whitespace().collect();
    assert_eq!(loads.len(), 5, "{loads:?}");
    assert!(loads[..3].iter().all(|load| load.parse::<f64>().is_ok()), "{loads:?}");

    // The control groups, of either version, at the usual place.
    let v2 = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    let (limit, quota) = if v2 {
        ("memory.max", "sed 's/ .*//' /sys/fs/cgroup/cpu.max")
    } else {
        ("memory/memory.limit_in_bytes", "cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us")
    };
    assert_eq!(sh(&format!("cat /sys/fs/cgroup/{limit}")).await.trim(), memory.to_string());
    assert_eq!(lines(quota).await, millicpus * 100);
}

/// Programs that read their limits: without any of them this would prove too little.
const PROGRAMS: [&str; 8] = ["node", "java", "go", "python3", "free", "nproc", "uptime", "lscpu"];

/// Builds a program in Go that prints how many threads it will use.
fn go_program(dir: &Path) {
    fs::create_dir(dir).unwrap();
    let source = dir.join("main.go");
    let text = "package main\nimport \"runtime\"\nfunc main() { println(runtime.GOMAXPROCS(0), runtime.NumCPU()) }\n";
    fs::write(&source, text).unwrap();
    let mut go = Command::new("go");
    go.args(["build", "-o"]).arg(dir.join("threads")).arg(&source).current_dir(dir);
    go.env("GOCACHE", dir.join("cache")).env("GO111MODULE", "off").env("CGO_ENABLED", "0");
    let built = go.output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    fs::remove_dir_all(dir.join("cache")).unwrap();
}

#[tokio::test]
async fn programs_see_the_limits_of_their_sandbox() {
    const TEST: &str = "programs_see_the_limits_of_their_sandbox";
    let house = match House::new() {
        Ok(house) => house,
        Err(why) => return skipped(TEST, &why),
    };
    for program in PROGRAMS {
        let found = Path::new("/usr/bin").join(program).exists();
        assert!(found, "this test asks /usr/bin/{program}, which `./dev test` installs");
    }
    let programs = house.path().join("go");
    go_program(&programs);
    let engine = house.open().await;
    let add = vec![AddedDirectory { from: programs, to: "/opt/go".into() }];
    let customization = Customization { add, ..Customization::default() };
    engine.images().customize("host", "programs", &customization).await.unwrap();
    let patch = Patch { image: Some("programs".to_owned()), ..limits(MEMORY, 700) };
    let request = Create { name: Some(name("app")), patch, start: true, ..Create::default() };
    engine.create(&project(), request, None).await.unwrap();

    sees(&engine, "app", MEMORY, 700).await;
    let sh = async |line: &str| ok(&engine, "app", line).await;
    let megabytes = MEMORY >> 20;

    let free = sh("free -m").await;
    let row = |name: &str| {
        let line = free.lines().find_map(|line| line.strip_prefix(name));
        let words = line.unwrap_or_else(|| panic!("{free}")).split_whitespace();
        words.map(|word| word.parse::<u64>().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(row("Mem:")[0], megabytes, "{free}");
    assert!(row("Mem:").iter().all(|number| *number <= megabytes), "{free}");
    assert_eq!(row("Swap:"), [0, 0, 0], "{free}");

    let python = "import os; print(os.cpu_count(), len(os.sched_getaffinity(0)))";
    assert_eq!(sh(&format!("/usr/bin/python3 -c '{python}'")).await, "1 1\n");

    let node = "console.log(process.constrainedMemory(), os.totalmem(), os.availableParallelism(), os.cpus().length, os.freemem() <= os.totalmem())";
    let said = sh(&format!("/usr/bin/node -e '{node}'")).await;
    assert_eq!(said, format!("{MEMORY} {MEMORY} 1 1 true\n"));

    let java = sh("/usr/bin/java -XX:+PrintFlagsFinal -version 2>/dev/null").await;
    let flag = |name: &str| {
        let line = java.lines().find(|line| line.split_whitespace().nth(1) == Some(name));
        line.unwrap_or_else(|| panic!("{java}")).split_whitespace().nth(3).unwrap().to_owned()
    };
    // A quarter, or half of a small machine, rounded to its pages.
    let heap: u64 = flag("MaxHeapSize").parse().unwrap();
    assert!((MEMORY / 8..=MEMORY / 2 + (4 << 20)).contains(&heap), "{heap}");
    assert_eq!(flag("UseSerialGC"), "true", "one processor is no server");

    assert_eq!(sh("/opt/go/threads 2>&1").await, "1 1\n");

    // Tools that read the same files still work.
    let up = sh("uptime -p; uptime; lscpu; ps aux; top -bn1; vmstat").await;
    assert!(up.starts_with("up ") && up.contains("load average: "), "{up}");

    // What is used is seen, by what runs already too.
    let before = meminfo(&sh("cat /proc/meminfo").await, "MemFree");
    let hold = "import time; x = b'x' * (100 << 20); open('/tmp/held', 'w'); time.sleep(600)";
    let script = format!(
        "/usr/bin/python3 -c \"{hold}\" & for _ in $(seq 300); do sleep 0.1; \
         [ -e /tmp/held ] && [ $(awk '/^MemFree/ {{ print $2 }}' /proc/meminfo) -lt {} ] && break; \
         done; cat /proc/meminfo; kill $!",
        (before - (80 << 20)) >> 10
    );
    let during = meminfo(&sh(&script).await, "MemFree");
    assert!(during + (80 << 20) <= before, "{before} B, then {during} B");
}

#[tokio::test]
async fn other_limits_are_seen_after_a_resume_and_in_a_fork() {
    const TEST: &str = "other_limits_are_seen_after_a_resume_and_in_a_fork";
    let house = match House::new() {
        Ok(house) => house,
        Err(why) => return skipped(TEST, &why),
    };
    changes(&house).await;
}

async fn changes(house: &House) {
    let engine = house.open().await;
    let mut request = small("app");
    request.patch = Patch { image: request.patch.image, ..limits(256 << 20, 1500) };
    engine.create(&project(), request, None).await.unwrap();
    sees(&engine, "app", 256 << 20, 1500).await;
    engine.stop(&project(), &name("app"), Stop::default(), None).await.unwrap();
    engine.update(&project(), &name("app"), limits(128 << 20, 500)).await.unwrap();
    sees(&engine, "app", 128 << 20, 500).await;
    let other = Fork {
        name: Some(name("other")),
        patch: limits(192 << 20, 2000),
        start: true,
        ..Fork::default()
    };
    engine.fork(&project(), &name("app"), other, None).await.unwrap();
    sees(&engine, "other", 192 << 20, 2000).await;
    // A checkpoint puts another root under a sandbox that runs.
    engine.checkpoint(&project(), &name("app"), Checkpoint::default()).await.unwrap();
    sees(&engine, "app", 128 << 20, 500).await;

    // More than the host has is not more than the host.
    let mut request = small("large");
    request.patch = Patch { image: request.patch.image, ..limits(16 << 40, 64_000) };
    engine.create(&project(), request, None).await.unwrap();
    let host = meminfo(&fs::read_to_string("/proc/meminfo").unwrap(), "MemTotal");
    let text = ok(&engine, "large", "cat /proc/meminfo").await;
    assert_eq!(meminfo(&text, "MemTotal"), host);
    assert_eq!(ok(&engine, "large", "nproc").await.trim(), processors().to_string());
}

#[test]
fn control_groups_of_version_2_are_seen_too() {
    const TEST: &str = "control_groups_of_version_2_are_seen_too";
    if let Err(why) = other_kernel::run("view::inside", &[800 << 20], &[]) {
        skipped(TEST, &why);
    }
}

/// What the test above runs in its machine.
#[tokio::test(flavor = "multi_thread")]
async fn inside() {
    if std::env::var_os(INSIDE).is_some() {
        assert!(Path::new("/sys/fs/cgroup/cgroup.controllers").exists());
        // Memory filesystems have no id-mapped mounts there.
        for command in ["mkfs.ext4 -q -m0 /dev/vda", "mount /dev/vda /mnt"] {
            let mut words = command.split(' ');
            let ran = Command::new(words.next().unwrap()).args(words).output().unwrap();
            assert!(ran.status.success(), "{command}: {ran:?}");
        }
        changes(&House::new().unwrap().with_data("/mnt/data".into())).await;
    }
}

#[tokio::test]
async fn a_machine_of_its_own_sees_its_limits() {
    const TEST: &str = "a_machine_of_its_own_sees_its_limits";
    let house = match House::new().and_then(House::with_machines) {
        Ok(house) => house,
        Err(why) => return skipped(TEST, &why),
    };
    let engine = house.open().await;
    let request = machine("m");
    let memory = request.patch.memory.unwrap().0;
    let disk = request.patch.disk.unwrap().0;
    engine.create(&project(), request, None).await.unwrap();
    let sh = async |line: &str| ok(&engine, "m", line).await;
    assert_eq!(sh("nproc").await, "1\n");
    // The kernel of the machine takes a part.
    let total = meminfo(&sh("cat /proc/meminfo").await, "MemTotal");
    assert!((memory / 2..=memory).contains(&total), "{total} of {memory}");
    let size: u64 = sh("df --output=size -B1 / | tail -n 1").await.trim().parse().unwrap();
    assert!((disk / 2..=disk).contains(&size), "{size} of {disk}");
}
