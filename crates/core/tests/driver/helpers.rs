//! The programs that a daemon starts: there is one way to start them, and what they may do is looked at while they run.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use sandkeep_core::engine::Stop;
use sandkeep_core::model::lifecycle::Phase;
use sandkeep_core::model::{Patch, Size};
use sandkeep_testkit::daemon::skipped;
use sandkeep_testkit::house::{House, machine, name, ok, project, small};

/// Where programs are started in code that is not a test, and why not by `driver/host/helper.rs`.
const LISTED: [(&str, usize, &str); 8] = [
    (
        "cli/src/command/approvals.rs",
        1,
        "`keep ask` inside a sandbox becomes the program that asks; not in a server",
    ),
    ("core/src/driver/host/helper.rs", 1, "it is the way: the launcher that confines"),
    (
        "core/src/driver/host/builder.rs",
        1,
        "our own agent, which builds cages and confines hypervisors; environment empty",
    ),
    (
        "core/src/driver/microvm/kernel/modules.rs",
        1,
        "`xz` on the distribution's kernel modules, in `keep microvm setup`, which an operator runs; environment empty",
    ),
    (
        "core/src/store/image/registry/credentials.rs",
        1,
        "the operator's credential helper, which needs the network and the operator's files; without our variables",
    ),
    (
        "cli/src/command/microvm.rs",
        1,
        "`apt-get` and `dpkg-deb` in `keep microvm setup`, which an operator runs; environment empty but for proxies",
    ),
    (
        "cli/src/command/browser.rs",
        1,
        "the user's browser, in `keep open`; it gets the user's environment",
    ),
    (
        "cli/src/command/doctor.rs",
        1,
        "the host's `stat` and `find`, asked for what they can do, in `keep doctor`; environment empty",
    ),
];

/// What comes before the tests of a file.
fn without_tests(text: &str) -> &str {
    let tests =
        text.find("#[cfg(test)]\nmod ").or_else(|| text.find("#[cfg(test)]\npub(crate) mod "));
    tests.map_or(text, |at| &text[..at])
}

fn sources(dir: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).expect("a directory of sources").flatten() {
        let path = entry.path();
        let named = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
        if path.is_dir() && named != "tests" {
            sources(&path, into);
        } else if named.ends_with(".rs") && named != "tests.rs" {
            into.push(path);
        }
    }
}

#[test]
fn programs_are_started_in_one_place() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crates");
    let mut files = Vec::new();
    for part in ["core", "server", "cli", "client", "proto"] {
        sources(&crates.join(part).join("src"), &mut files);
    }
    assert!(files.len() > 200, "{} files", files.len());
    let mut found = BTreeMap::new();
    for path in files {
        let text = fs::read_to_string(&path).expect("a source");
        let count = without_tests(&text).matches("Command::new(").count();
        if count > 0 {
            let path = path.strip_prefix(crates).expect("below it");
            found.insert(path.to_string_lossy().into_owned(), count);
        }
    }
    let listed = LISTED.iter().map(|(path, count, _)| ((*path).to_owned(), *count));
    assert_eq!(
        found,
        listed.collect(),
        "start programs with `Confined::run` of `driver/host/helper.rs`, or list them here with a reason"
    );
}

/// A process as it was seen.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Seen {
    program: String,
    problems: Vec<String>,
}

fn status_field<'a>(status: &'a str, name: &str) -> &'a str {
    let line =
        status.lines().find(|line| line.starts_with(name) && line[name.len()..].starts_with(':'));
    line.and_then(|line| line.split_once(':')).map_or("", |(_, value)| value.trim())
}

/// What is wrong with a helper or a hypervisor, if it still is what it was when looked at twice.
fn look(process: &Path) -> Option<Seen> {
    let read = |name: &str| fs::read(process.join(name)).ok();
    let link = |name: &str| fs::read_link(process.join(name)).ok();
    let program = link("exe")?;
    let status = String::from_utf8(read("status")?).ok()?;
    let environ = read("environ")?;
    let (net, user) = (link("ns/net")?, link("ns/user")?);
    // It may have become another between two looks.
    if link("exe")? != program {
        return None;
    }
    let mut problems = Vec::new();
    let mut demand = |fine: bool, what: String| {
        if !fine {
            problems.push(what);
        }
    };
    let uids: Vec<u32> =
        status_field(&status, "Uid").split_whitespace().flat_map(str::parse).collect();
    demand(uids.len() == 4 && uids.iter().all(|uid| *uid >= 0x1_0000), format!("uids {uids:?}"));
    let own_user_ns = fs::read_link("/proc/self/ns/user").ok()? != user;
    // Reading files of any owner, in a namespace of its own.
    let most = if own_user_ns { 1 << 2 } else { 0 };
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        let held = u64::from_str_radix(status_field(&status, set), 16).unwrap_or(u64::MAX);
        demand(held & !most == 0, format!("{set} {held:x}"));
    }
    demand(status_field(&status, "NoNewPrivs") == "1", "new privileges".to_owned());
    demand(status_field(&status, "Seccomp") == "2", "no system call filter".to_owned());
    demand(status_field(&status, "Groups").is_empty(), "groups".to_owned());
    demand(fs::read_link("/proc/self/ns/net").ok()? != net, "our network".to_owned());
    let names = environ.split(|byte| *byte == 0).filter_map(|pair| {
        let name = pair.split(|byte| *byte == b'=').next().filter(|name| !name.is_empty())?;
        Some(String::from_utf8_lossy(name).into_owned())
    });
    let allowed = |name: &String| {
        ["PATH", "LANG", "MKE2FS_CONFIG", "E2FSPROGS_FAKE_TIME", "LD_PRELOAD"]
            .contains(&name.as_str())
            || name.starts_with("SANDKEEP_RAM_")
    };
    let foreign: BTreeSet<String> = names.filter(|name| !allowed(name)).collect();
    demand(foreign.is_empty(), format!("variables {foreign:?}"));
    let program = program.file_name()?.to_string_lossy().into_owned();
    Some(Seen { program, problems })
}

/// Variables that a program inside has by itself, and with luck the same.
const COMMON: [&str; 9] =
    ["PATH", "LANG", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "PWD", "SHLVL"];

/// Variables of this process that another program has been given: those of a daemon hold its secrets.
fn inherited(process: &Path) -> BTreeSet<String> {
    let environ = fs::read(process.join("environ")).unwrap_or_default();
    let pairs = environ.split(|byte| *byte == 0).map(String::from_utf8_lossy);
    let name = |pair: &str| pair.split('=').next().unwrap_or_default().to_owned();
    let ours = |pair: &str| {
        std::env::vars_os().any(|(name, value)| {
            !COMMON.iter().any(|common| name == *common)
                && pair.as_bytes()
                    == [name.as_encoded_bytes(), b"=", value.as_encoded_bytes()].concat()
        })
    };
    pairs.filter(|pair| ours(pair)).map(|pair| name(&pair)).collect()
}

/// Looks, until it is stopped, at every process that descends from this one or has an id of the
/// house's. `made_disk` is set once the shortest of them, which makes an empty disk, was seen.
fn watch(
    agent: PathBuf,
    ids: std::ops::Range<u32>,
    over: &AtomicBool,
    made_disk: &AtomicBool,
) -> BTreeSet<Seen> {
    let (own, this) = (std::process::id(), fs::read_link("/proc/self/exe").expect("ours"));
    // The last look at each counts: a hypervisor installs its own filter when it has begun.
    let mut all = BTreeMap::new();
    while !over.load(Ordering::Relaxed) {
        let mut parents = BTreeMap::new();
        for entry in fs::read_dir("/proc").expect("it is there").flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok())
            else {
                continue;
            };
            let Ok(status) = fs::read_to_string(entry.path().join("status")) else { continue };
            let number = |name: &str| {
                status_field(&status, name).split_whitespace().next()?.parse::<u32>().ok()
            };
            if let (Some(parent), Some(uid)) = (number("PPid"), number("Uid")) {
                parents.insert(pid, (parent, uid));
            }
        }
        let descends = |mut pid: u32| {
            for _ in 0..64 {
                match parents.get(&pid) {
                    Some((parent, _)) if *parent == own => return true,
                    Some((parent, _)) => pid = *parent,
                    None => return false,
                }
            }
            false
        };
        for (pid, (_, uid)) in &parents {
            if !descends(*pid) && !ids.contains(uid) {
                continue;
            }
            let process = PathBuf::from(format!("/proc/{pid}"));
            // The launcher and builder are ours, and root until they have confined what they start. What is in a cage, the agent and the
            // sandbox's own programs, is `escape.rs`'s.
            let exe = fs::read_link(process.join("exe")).unwrap_or_default();
            let mounts = fs::read_to_string(process.join("mountinfo")).unwrap_or_default();
            let caged = mounts
                .lines()
                .any(|line| line.split(' ').nth(4) == Some("/") && line.contains(" - overlay "));
            // What has not become its program yet is this test's.
            if exe == this || exe.as_os_str().is_empty() {
                continue;
            }
            if exe == agent || caged {
                let variables = inherited(&process);
                let problems = match variables.is_empty() {
                    true => Vec::new(),
                    false => vec![format!("variables of the daemon {variables:?}")],
                };
                let program = if exe == agent { "keep-agent" } else { "(in a container)" };
                // Whatever a later look finds: it may have cleared them.
                let seen = Seen { program: program.to_owned(), problems };
                let known: &mut Seen = all.entry((*pid, exe)).or_insert_with(|| seen.clone());
                if known.problems.is_empty() {
                    *known = seen;
                }
                continue;
            }
            if let Some(seen) = look(&process) {
                if seen.program == "mke2fs" {
                    made_disk.store(true, Ordering::Relaxed);
                }
                all.insert((*pid, exe), seen);
            }
        }
    }
    all.into_values().collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_program_that_a_daemon_runs_is_confined() {
    let test = "every_program_that_a_daemon_runs_is_confined";
    let house = match House::new().and_then(House::with_machines) {
        Ok(house) => house,
        Err(why) => return skipped(test, &why),
    };
    // Its image is made by programs of the test's.
    let engine = house.open().await;
    engine.create(&project(), small("c"), None).await.expect("a container");
    let over = Arc::new(AtomicBool::new(false));
    let made_disk = Arc::new(AtomicBool::new(false));
    let seen = Arc::new(Mutex::new(BTreeSet::new()));
    let watching = std::thread::spawn({
        let (over, seen) = (Arc::clone(&over), Arc::clone(&seen));
        let made_disk = Arc::clone(&made_disk);
        let agent = house.path().join("keep-agent");
        let ids = house.settings.uid_base..house.settings.uid_base + 32 * 0x1_0000;
        move || {
            let found = watch(agent, ids, &over, &made_disk);
            seen.lock().expect("nobody panics").extend(found);
        }
    });
    let work = async {
        ok(&engine, "c", "for i in $(seq 50); do echo $i > /tmp/$i; done").await;
        engine.create(&project(), machine("m"), None).await.expect("a machine");
        // Enough for the packer to be seen at work.
        let fill =
            "mkdir -p /root/many && cd /root/many && for i in $(seq 3000); do echo $i > $i; done";
        ok(&engine, "m", fill).await;
        engine.stop(&project(), &name("m"), Stop::default(), None).await.expect("it stops");
        assert_eq!(ok(&engine, "m", "ls /root/many | wc -l").await.trim(), "3000");
        engine.stop(&project(), &name("c"), Stop::default(), None).await.expect("it stops");
        assert_eq!(ok(&engine, "c", "cat /tmp/50").await, "50\n");
        // An empty disk of a size is made once, in a moment that a look can miss on a busy host. Each size is another chance.
        for gib in 2..12_u64 {
            if made_disk.load(Ordering::Relaxed) {
                break;
            }
            let mut larger = machine(&format!("d{gib}"));
            larger.patch.disk = Some(Size(gib << 30));
            engine.create(&project(), larger, None).await.expect("a machine");
            ok(&engine, &format!("d{gib}"), "true").await;
        }
        house.close(engine).await;
    };
    work.await;
    over.store(true, Ordering::Relaxed);
    watching.join().expect("it watched");
    let seen = seen.lock().expect("nobody panics").clone();
    let names: BTreeSet<&str> = seen.iter().map(|seen| seen.program.as_str()).collect();
    // `mkfs.ext4` is a name of `mke2fs`.
    for expected in ["keep-agent", "mkfs.erofs", "mke2fs", "qemu-system-x86_64"] {
        assert!(names.contains(expected), "{expected} was not seen: {names:?}");
    }
    let bad: Vec<&Seen> = seen.iter().filter(|seen| !seen.problems.is_empty()).collect();
    assert!(
        bad.is_empty(),
        "start them with `Confined::run` of `driver/host/helper.rs`, which confines: {bad:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_that_cannot_be_packed_do_not_fail_a_sandbox() {
    let test = "files_that_cannot_be_packed_do_not_fail_a_sandbox";
    let house = match House::new().and_then(House::with_machines) {
        Ok(house) => house,
        Err(why) => return skipped(test, &why),
    };
    let engine = house.open().await;
    engine.create(&project(), machine("m"), None).await.expect("a machine");
    let nest = |depth: u32| {
        format!(
            "cd /root && perl -e 'for (1..{depth}) {{ mkdir \"d\" or die; chdir \"d\" or die }} open(F, \">leaf\"); print F \"deep\\n\"'"
        )
    };
    // As deep as paths go.
    ok(&engine, "m", &nest(1900)).await;
    engine.stop(&project(), &name("m"), Stop::default(), None).await.expect("it stops");
    let path = "cd /root && perl -e 'for (1..1900) { chdir \"d\" or die $_ } open(F, \"leaf\"); print <F>'";
    assert_eq!(ok(&engine, "m", path).await, "deep\n", "it is packed and read");
    // Deeper: with a full path for each directory the agent would need more memory than the machine has.
    ok(&engine, "m", "mkdir /root/second && cd /root/second && perl -e 'for (1..10000) { mkdir \"d\" or die; chdir \"d\" or die }'").await;
    let stopped =
        engine.stop(&project(), &name("m"), Stop::default(), None).await.expect("it stops");
    let generation = stopped.sandbox.generation;
    for _ in 0..2 {
        let refused =
            engine.start(&project(), &name("m"), None).await.expect_err("it cannot be packed");
        assert_eq!(refused.code(), "unsupported_files", "{refused}");
        assert!(refused.to_string().contains("`/root/second/d/"), "{refused}");
        let now = engine.get_settled(&project(), &name("m")).await.expect("it is there");
        assert_eq!((now.sandbox.phase(), now.sandbox.generation), (Phase::Stopped, generation));
        assert_eq!(now.sandbox.failure(), None);
    }
    // Nothing is lost: the other driver has them, and once they are gone the machine starts again.
    let driver = |driver: &str| Patch { driver: Some(driver.to_owned()), ..Patch::default() };
    engine.update(&project(), &name("m"), driver("container")).await.expect("at a stop");
    assert_eq!(ok(&engine, "m", path).await, "deep\n");
    ok(&engine, "m", "rm -rf /root/second").await;
    engine.stop(&project(), &name("m"), Stop::default(), None).await.expect("it stops");
    house.close(engine).await;
}
