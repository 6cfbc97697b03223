//! Cages that are begun before it is known whose they will be: the same as all others, bounded, and gone with their driver.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use sandkeep_core::driver::container::ContainerDriver;
use sandkeep_core::driver::{Driver, Machine};
use sandkeep_testkit::driver::{ContainerHost, driver_contract};

const PATIENCE: Duration = Duration::from_secs(30);

fn host(test: &str) -> Option<ContainerHost> {
    match ContainerHost::new() {
        Ok(host) => Some(host),
        Err(why) => {
            eprintln!("SKIPPED {test}: {why}");
            None
        }
    }
}

/// The processes that run this host's agent.
fn agents(host: &ContainerHost) -> BTreeSet<i32> {
    let agent = fs::canonicalize(&host.config().agent).unwrap();
    let listed = fs::read_dir("/proc").unwrap().flatten();
    let pids = listed.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe == agent))
        .collect()
}

/// Those of them that are in a network namespace of their own.
fn first_processes(host: &ContainerHost) -> BTreeSet<i32> {
    let of = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/net")).ok();
    let ours = of("self");
    agents(host).into_iter().filter(|pid| of(&pid.to_string()) != ours).collect()
}

fn pid_of(host: &ContainerHost, machine: &Machine) -> i32 {
    let path = host.config().run_dir.join(machine.key.as_str()).join("machine.json");
    let record: serde_json::Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    i32::try_from(record["pid"].as_i64().unwrap()).unwrap()
}

async fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Starts one machine and waits until `most` cages are ready for the next.
async fn stocked(host: &ContainerHost, name: &str, most: usize) -> ContainerDriver {
    let driver = host.driver().with_prebuilt(most);
    let machine = host.machine(name);
    driver.start(&machine).await.unwrap();
    driver.stop(&machine.key).await.unwrap();
    wait_until("cages are begun", || driver.waiting() == most).await;
    wait_until("they have their namespaces", || first_processes(host).len() == most).await;
    driver
}

#[tokio::test]
async fn a_driver_that_begins_cages_ahead_keeps_the_contract() {
    let Some(host) = host("a_driver_that_begins_cages_ahead_keeps_the_contract") else { return };
    let broken = |name: &str| {
        let mut machine = host.machine(name);
        machine.root.lower = vec![PathBuf::from("no-such-layer")];
        machine
    };
    let volume = |name: &str| host.root(name, &[]);
    // Every driver of the test begins some, and finds some.
    let driver = || host.driver().with_prebuilt(2);
    driver_contract(driver, |name| host.machine(name), broken, volume).await;
}

/// What can be seen of a process from outside, without what differs from one to the next.
fn portrait(pid: i32) -> Vec<(String, String)> {
    let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap();
    let mut seen = Vec::new();
    let status = [
        "CapInh",
        "CapPrm",
        "CapEff",
        "CapBnd",
        "CapAmb",
        "NoNewPrivs",
        "Seccomp",
        "Seccomp_filters",
        "Umask",
        "Groups",
        "NSpid",
        "Threads",
    ];
    for line in read("status").lines() {
        let (name, value) = line.split_once(':').unwrap();
        if name == "NSpid" {
            // The last is the number inside.
            let inside = value.split_whitespace().last().unwrap();
            seen.push((name.to_owned(), inside.to_owned()));
        } else if status.contains(&name) {
            seen.push((name.to_owned(), value.trim().to_owned()));
        }
    }
    let mut mounts: Vec<String> = read("mountinfo")
        .lines()
        .map(|line| {
            // Numbers and the layers' paths are of each its own.
            let (head, tail) = line.split_once(" - ").unwrap();
            let place: Vec<&str> = head.split(' ').skip(3).take(3).collect();
            let kind = tail.split(' ').next().unwrap();
            format!("{} {kind}", place.join(" "))
        })
        .collect();
    mounts.sort();
    seen.push(("mounts".to_owned(), mounts.join("\n")));
    for file in ["limits", "coredump_filter", "oom_score_adj", "uid_map", "gid_map"] {
        let text = read(file);
        // The ids on the host are each one's own.
        let text = match file.ends_with("_map") {
            true => {
                text.split_whitespace().filter(|word| word.len() < 9).collect::<Vec<_>>().join(" ")
            }
            false => text,
        };
        seen.push((file.to_owned(), text));
    }
    let namespaces = ["net", "mnt", "pid_for_children", "ipc", "uts", "user", "cgroup"];
    for name in namespaces {
        let of = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/{name}")).unwrap();
        seen.push((format!("own {name}"), (of(&pid.to_string()) != of("self")).to_string()));
    }
    let mut open: Vec<String> = fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .flatten()
        .map(|entry| fs::read_link(entry.path()).unwrap_or_default())
        // By the last name: how the path to it is shown depends on which mounts were there when it was opened.
        .map(|target| target.file_name().unwrap_or_default().to_string_lossy().into_owned())
        .map(|name| name.split(':').next().unwrap_or("").to_owned())
        .collect();
    open.sort();
    seen.push(("open".to_owned(), open.join("\n")));
    // Its own session, its own group: the same number as the process inside.
    let stat = read("stat");
    let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    let alone = [fields[2], fields[3]].iter().all(|number| *number == pid.to_string());
    seen.push(("a session of its own".to_owned(), alone.to_string()));
    for name in ["cwd", "root"] {
        let at = fs::read_link(format!("/proc/{pid}/{name}")).unwrap();
        seen.push((name.to_owned(), at.display().to_string()));
    }
    seen
}

#[tokio::test]
async fn a_cage_that_was_begun_ahead_is_like_any_other() {
    let Some(host) = host("a_cage_that_was_begun_ahead_is_like_any_other") else { return };
    let driver = stocked(&host, "first", 2).await;
    let begun = first_processes(&host);
    let (ahead, fresh) = (host.machine("ahead"), host.machine("fresh"));
    driver.start(&ahead).await.unwrap();
    let plain = host.driver();
    plain.start(&fresh).await.unwrap();
    let (taken, built) = (pid_of(&host, &ahead), pid_of(&host, &fresh));
    assert!(begun.contains(&taken), "it was begun before: {taken} of {begun:?}");
    assert!(!begun.contains(&built));
    // Both serve by then.
    for machine in [&ahead, &fresh] {
        let _device = driver.network(&machine.key).await.unwrap();
    }
    // Its own control groups are mounted in each, by their names.
    let renamed = |(what, seen): (String, String)| (what, seen.replace("/ahead ", "/fresh "));
    let portraits = || {
        let ours: Vec<_> = portrait(taken).into_iter().map(renamed).collect();
        (ours, portrait(built))
    };
    // A connection that was served is closed a moment later.
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(10) {
        let (ours, others) = portraits();
        if ours == others {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let (ours, others) = portraits();
    for (one, other) in ours.iter().zip(&others) {
        assert_eq!(one, other);
    }
    assert_eq!(ours.len(), others.len());
    let groups = |pid: i32| fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    assert_eq!(groups(taken).replace("/ahead", "/fresh"), groups(built));
    driver.stop(&ahead.key).await.unwrap();
    driver.stop(&fresh.key).await.unwrap();
}

#[tokio::test]
async fn one_that_waits_is_nobodys_and_holds_nothing() {
    let Some(host) = host("one_that_waits_is_nobodys_and_holds_nothing") else { return };
    let driver = stocked(&host, "first", 2).await;
    assert_eq!(fs::read_dir(&host.config().run_dir).unwrap().count(), 0, "no directory");
    assert!(driver.survivors().await.unwrap().is_empty());
    let ours = fs::read_link("/proc/self/ns/mnt").unwrap();
    for pid in agents(&host) {
        // One of its own would keep every filesystem mounted that the host unmounts.
        assert_eq!(fs::read_link(format!("/proc/{pid}/ns/mnt")).unwrap(), ours);
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
        assert!(!groups.contains(&host.config().cgroup_parent), "{groups}");
        let state = || {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
            stat.rsplit_once(") ").unwrap().1.chars().next()
        };
        wait_until("it sleeps", || state() == Some('S')).await;
    }
    assert_eq!(agents(&host).len(), 4, "two processes each, and no more of them");
}

#[tokio::test]
async fn they_end_with_their_driver() {
    let Some(host) = host("they_end_with_their_driver") else { return };
    let driver = stocked(&host, "first", 2).await;
    drop(driver);
    wait_until("all have ended", || agents(&host).is_empty()).await;
    let driver = stocked(&host, "second", 1).await;
    driver.clone().retire();
    wait_until("all have ended", || agents(&host).is_empty()).await;
    // A driver that was retired begins no more.
    fs::create_dir_all(&host.config().run_dir).unwrap();
    let machine = host.machine("third");
    driver.start(&machine).await.unwrap();
    driver.stop(&machine.key).await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(driver.waiting(), 0);
}

fn kill(pid: i32) {
    let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
}

#[tokio::test]
async fn a_start_does_not_depend_on_them() {
    let Some(host) = host("a_start_does_not_depend_on_them") else { return };
    let driver = stocked(&host, "first", 2).await;
    // The first processes are gone, and their builders do not know.
    first_processes(&host).into_iter().for_each(kill);
    wait_until("they are gone", || first_processes(&host).is_empty()).await;
    let machine = host.machine("second");
    driver.start(&machine).await.expect("another is built");
    let _device = driver.network(&machine.key).await.expect("it serves");
    driver.stop(&machine.key).await.unwrap();
    wait_until("more are begun", || driver.waiting() == 2).await;
    // All of it is gone.
    agents(&host).into_iter().for_each(kill);
    let machine = host.machine("third");
    driver.start(&machine).await.expect("another is built");
    driver.stop(&machine.key).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_starts_at_once_share_what_there_is() {
    let Some(host) = host("many_starts_at_once_share_what_there_is") else { return };
    let driver = stocked(&host, "first", 2).await;
    let machines: Vec<Machine> = (0..20).map(|n| host.machine(&format!("many-{n}"))).collect();
    let mut starts = tokio::task::JoinSet::new();
    for machine in machines.clone() {
        let driver = driver.clone();
        starts.spawn(async move { driver.start(&machine).await.map(drop) });
    }
    while let Some(started) = starts.join_next().await {
        started.unwrap().expect("it starts");
    }
    let pids: BTreeSet<i32> = machines.iter().map(|machine| pid_of(&host, machine)).collect();
    assert_eq!(pids.len(), machines.len(), "each has a process of its own");
    for machine in &machines {
        let pid = pid_of(&host, machine);
        let map = fs::read_to_string(format!("/proc/{pid}/uid_map")).unwrap();
        let base = map.split_whitespace().nth(1).unwrap().to_owned();
        assert_eq!(base, machine.uids.base.to_string(), "and its own ids");
        assert!(Path::new(&format!("/proc/{pid}/root")).exists());
    }
    assert!(driver.waiting() <= 2);
    for machine in &machines {
        driver.stop(&machine.key).await.unwrap();
    }
    wait_until("no more than two wait", || agents(&host).len() <= 4).await;
}
