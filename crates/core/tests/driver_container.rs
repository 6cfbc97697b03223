//! The container driver keeps the contract, and what only it promises.

use std::fs;
use std::path::PathBuf;

use sandkeep_core::driver::container::probe;
use sandkeep_core::driver::{Driver, DriverError};
use sandkeep_core::model::RootFs;
use sandkeep_testkit::driver::{ContainerHost, driver_contract, key};

fn host(test: &str) -> Option<ContainerHost> {
    match ContainerHost::new() {
        Ok(host) => Some(host),
        Err(why) => {
            println!("SKIPPED {test}: {why}");
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
    driver_contract(|| host.driver(), |name| host.machine(name), broken).await;
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
