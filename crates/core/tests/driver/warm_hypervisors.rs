//! Hypervisors that wait for a machine: what takes them over is a machine like any other, and none of them outlives its driver.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sandkeep_core::driver::microvm::{Accelerator, MicrovmConfig, MicrovmDriver};
use sandkeep_core::driver::{Driver, KeepsMemory, Machine, Restored, Then, mac_of};
use sandkeep_core::engine::agent_answers;
use sandkeep_proto::link::{Identity, Renew};
use sandkeep_testkit::driver::{MicrovmHost, bring_up, moment, network_contract, reach};
use sandkeep_testkit::inside::{Inside, userland};
use tokio::time::{sleep, timeout};

const COUNTER: &str = "i=0; while true; do i=$((i+1)); echo $i > /dev/shm/n; sleep 0.02; done";

fn host(test: &str) -> Option<MicrovmHost> {
    let host = MicrovmHost::new().and_then(|host| {
        userland(&host.layer("userland"))?;
        Ok(host)
    });
    host.inspect_err(|why| sandkeep_testkit::daemon::skipped(test, why)).ok()
}

fn with_a_spare(host: &MicrovmHost) -> MicrovmDriver {
    let config = MicrovmConfig { warm_hypervisors: 1, ..host.config().clone() };
    MicrovmDriver::new(config, agent_answers).unwrap().accelerated_by(Accelerator::Tcg)
}

fn machine(host: &MicrovmHost, name: &str) -> Machine {
    host.machine_on(name, host.root(name, &["userland"]))
}

/// A machine that counts in memory, captured and ended.
async fn captured(host: &MicrovmHost, driver: &MicrovmDriver) -> (Vec<PathBuf>, u64) {
    let first = machine(host, "first");
    let inside = Inside::over(bring_up(driver, &first).await);
    inside.start(&["sh", "-c", COUNTER], None).await;
    inside.sh("echo kept > /written").await;
    sleep(Duration::from_millis(500)).await;
    let count = count(&inside).await;
    let into = host.path().join("memory/one");
    fs::create_dir_all(&into).unwrap();
    inside.guest().freeze().await.unwrap();
    driver.capture(&first.key, &into, &[], Then::Hold).await.unwrap();
    drop(inside);
    driver.stop(&first.key).await.unwrap();
    (vec![into], count)
}

async fn count(inside: &Inside) -> u64 {
    for _ in 0..50 {
        // Empty for the moment in which it is written again.
        if let Ok(count) = inside.sh("cat /dev/shm/n").await.out.trim().parse() {
            return count;
        }
    }
    panic!("nobody counts")
}

/// What the engine does to start a machine from an image.
async fn restore(driver: &MicrovmDriver, machine: &Machine, image: &[PathBuf]) -> Inside {
    let Restored { link, line } =
        driver.restore(machine, image, &[]).await.expect("it is restored");
    drop(line);
    let guest = reach(&link).await;
    let identity = Identity { hostname: machine.hostname.clone(), mac: mac_of(&machine.key) };
    let renew = Renew { now: moment(), identity: Some(identity), machine_id: true };
    guest.renew(renew).await.expect("it is renewed");
    guest.thaw().await.expect("it thaws");
    Inside::over(guest)
}

async fn wait_for_a_spare(driver: &MicrovmDriver) {
    let waited = timeout(Duration::from_secs(60), async {
        while driver.waiting() == 0 {
            sleep(Duration::from_millis(20)).await;
        }
    });
    waited.await.expect("a hypervisor waits for the next machine");
}

fn record(dir: &Path) -> serde_json::Value {
    serde_json::from_slice(&fs::read(dir.join("machine.json")).unwrap()).unwrap()
}

/// Directories of hypervisors in the pool.
fn pooled(host: &MicrovmHost) -> Vec<PathBuf> {
    let listed = fs::read_dir(&host.config().run_dir).unwrap();
    let paths = listed.map(|entry| entry.unwrap().path());
    paths.filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with("spare-")).collect()
}

fn is_alive(pid: &serde_json::Value) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

async fn until_dead(pid: &serde_json::Value) {
    let died = timeout(Duration::from_secs(30), async {
        while is_alive(pid) {
            sleep(Duration::from_millis(20)).await;
        }
    });
    died.await.expect("it ends");
}

#[tokio::test]
async fn a_machine_takes_over_a_hypervisor_that_waits() {
    let Some(host) = host("a_machine_takes_over_a_hypervisor_that_waits") else { return };
    let driver = with_a_spare(&host);
    let (image, at_least) = captured(&host, &driver).await;
    assert_eq!(driver.waiting(), 0, "none before a machine was restored");
    // The first finds none; the next two do.
    let machines = ["cold", "one", "two"].map(|name| machine(&host, name));
    let mut uids = Vec::new();
    for machine in &machines {
        let is_cold = machine.key.as_str() == "cold";
        if !is_cold {
            wait_for_a_spare(&driver).await;
        }
        let waiting = pooled(&host);
        let inside = restore(&driver, machine, &image).await;
        let dir = host.config().run_dir.join(machine.key.as_str());
        let record = record(&dir);
        match record["group"].as_str() {
            None => assert!(is_cold, "{}: {record}", machine.key),
            Some(group) => {
                assert!(!is_cold && waiting[0].ends_with(group), "{group} of {waiting:?}");
                assert!(!waiting[0].exists(), "it is no spare any more");
                assert!(!dir.join("ram.sock").exists());
                let uid = record["uid"].as_u64().unwrap();
                assert!(uid >= u64::from(host.config().warm_uids) && !uids.contains(&uid));
                let status = fs::read_to_string(format!("/proc/{}/status", record["pid"])).unwrap();
                assert!(
                    status.contains(&format!("Uid:\t{uid}\t{uid}\t{uid}\t{uid}\n")),
                    "{status}"
                );
                uids.push(uid);
            }
        }
        let there = count(&inside).await;
        assert!(there >= at_least, "{there} after {at_least}");
        assert_eq!(
            inside.sh("cat /written; uname -n").await.out,
            format!("kept\n{}\n", machine.hostname)
        );
        inside.sh(&format!("echo {} > /written; sync", machine.key)).await;
        assert_eq!(inside.sh("cat /written").await.out, format!("{}\n", machine.key));
        sleep(Duration::from_millis(200)).await;
        assert!(count(&inside).await > there, "the process goes on");
        network_contract(&driver, &machine.key).await;
        assert!(driver.usage(&machine.key).await.unwrap().cpu > Duration::ZERO, "it is counted");
    }
    assert_eq!(uids.len(), 2);
    // It is captured as any other, by the daemon that finds it.
    let next = host.driver();
    let found = next.survivors().await.unwrap();
    assert_eq!(found.len(), 3, "{found:?}");
    assert_eq!(pooled(&host).len(), 0, "those of a driver that is gone are ended");
    let into = host.path().join("memory/two");
    fs::create_dir_all(&into).unwrap();
    let captured = next.capture(&machines[1].key, &into, &image, Then::Hold).await.unwrap();
    assert!(captured.pages > 0);
    for machine in &machines {
        let used = next.stop(&machine.key).await.unwrap();
        assert!(used.cpu > Duration::ZERO, "{}: {used:?}", machine.key);
    }
    let again = restore(&next, &machine(&host, "again"), &[into, image[0].clone()]).await;
    assert_eq!(again.sh("cat /written").await.out, "one\n");
    drop(again);
    next.stop(&machine(&host, "again").key).await.unwrap();
    drop(driver);
    assert_eq!(fs::read_dir(&host.config().run_dir).unwrap().count(), 0, "nothing is left");
}

#[tokio::test]
async fn a_spare_that_is_of_no_use_costs_no_machine_and_none_outlives_its_driver() {
    let test = "a_spare_that_is_of_no_use_costs_no_machine_and_none_outlives_its_driver";
    let Some(host) = host(test) else { return };
    let driver = with_a_spare(&host);
    let (image, at_least) = captured(&host, &driver).await;
    let cold = machine(&host, "cold");
    drop(restore(&driver, &cold, &image).await);
    driver.stop(&cold.key).await.unwrap();
    wait_for_a_spare(&driver).await;
    let pid = record(&pooled(&host)[0])["pid"].clone();
    let number = rustix::process::Pid::from_raw(i32::try_from(pid.as_i64().unwrap()).unwrap());
    rustix::process::kill_process(number.unwrap(), rustix::process::Signal::KILL).unwrap();
    until_dead(&pid).await;
    let next = machine(&host, "next");
    let inside = restore(&driver, &next, &image).await;
    assert!(count(&inside).await >= at_least, "it started as if there had been none");
    assert_eq!(record(&host.config().run_dir.join("next"))["group"], serde_json::Value::Null);
    drop(inside);
    driver.stop(&next.key).await.unwrap();
    // One of another size finds none.
    wait_for_a_spare(&driver).await;
    let waiting = pooled(&host);
    let mut other = machine(&host, "other");
    other.limits.millicpus += 1000;
    drop(bring_up(&driver, &other).await);
    assert_eq!((pooled(&host), driver.waiting()), (waiting.clone(), 1));
    driver.stop(&other.key).await.unwrap();
    let pid = record(&waiting[0])["pid"].clone();
    assert!(is_alive(&pid));
    drop(driver);
    until_dead(&pid).await;
    assert_eq!(fs::read_dir(&host.config().run_dir).unwrap().count(), 0, "nothing is left");
}
