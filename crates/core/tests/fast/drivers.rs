//! A driver that is absent when the engine is opened and comes while it runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use sandkeep_core::driver::{Driver, DriverResult, Link, Machine, MachineLoad, MachineUsage};
use sandkeep_core::engine::{Absent, Create, Delete, LateDrivers};
use sandkeep_core::model::{Device, MachineKey, Patch, Phase};
use sandkeep_testkit::fake::{FakeDriver, FakeHost, FakeHouse, small};
use sandkeep_testkit::house::{name, project};

/// The fake driver under another name.
#[derive(Debug)]
struct Late(FakeDriver);

#[async_trait]
impl Driver for Late {
    fn name(&self) -> &'static str {
        "late"
    }

    async fn start(&self, machine: &Machine) -> DriverResult<Link> {
        self.0.start(machine).await
    }

    async fn stop(&self, key: &MachineKey) -> DriverResult<MachineUsage> {
        self.0.stop(key).await
    }

    async fn usage(&self, key: &MachineKey) -> DriverResult<MachineUsage> {
        self.0.usage(key).await
    }

    async fn load(&self, key: &MachineKey) -> DriverResult<MachineLoad> {
        self.0.load(key).await
    }

    async fn survivors(&self) -> DriverResult<Vec<(MachineKey, Link)>> {
        self.0.survivors().await
    }

    async fn died(&self, key: &MachineKey) {
        self.0.died(key).await;
    }

    async fn network(&self, key: &MachineKey) -> DriverResult<Device> {
        self.0.network(key).await
    }
}

/// What the host lacks until somebody sets it up.
#[derive(Debug)]
struct SetUp {
    host: Arc<FakeHost>,
    ready: AtomicBool,
    looks: AtomicUsize,
}

impl LateDrivers for SetUp {
    fn look(&self, name: &str) -> Option<Result<Arc<dyn Driver>, Absent>> {
        (name == "late").then(|| {
            self.looks.fetch_add(1, Ordering::SeqCst);
            match self.ready.load(Ordering::SeqCst) {
                true => Ok(Arc::new(Late(self.host.driver())) as Arc<dyn Driver>),
                false => {
                    Err(Absent { reason: "no kernel".to_owned(), fix: Some("setup".to_owned()) })
                }
            }
        })
    }
}

fn asking(sandbox: &str, driver: &str) -> Create {
    let patch = Patch { driver: Some(driver.to_owned()), ..small(sandbox).patch };
    Create { patch, ..small(sandbox) }
}

#[tokio::test]
async fn a_driver_that_comes_later_is_used_without_a_restart() {
    let mut house = FakeHouse::new();
    let host = Arc::clone(house.host());
    let set_up =
        Arc::new(SetUp { host, ready: AtomicBool::default(), looks: AtomicUsize::default() });
    house.settings.late_drivers = Some(set_up.clone());
    let engine = house.open().await;
    assert_eq!(engine.drivers(), ["fake"]);
    for _ in 0..20 {
        let refused = engine.create(&project(), asking("box", "late"), None).await;
        let refused = refused.expect_err("it is absent");
        assert_eq!(refused.code(), "driver_not_available", "{refused}");
        assert!(refused.to_string().contains("no kernel"), "{refused}");
    }
    // However many ask, the host is looked at now and then.
    assert!(set_up.looks.load(Ordering::SeqCst) < 10, "{:?}", set_up.looks);
    let unknown = engine.create(&project(), asking("box", "warp"), None).await.expect_err("none");
    assert_eq!(unknown.code(), "unknown_driver");

    set_up.ready.store(true, Ordering::SeqCst);
    tokio::time::sleep(Duration::from_millis(600)).await;
    let made = engine.create(&project(), asking("box", "late"), None).await.expect("it has come");
    assert_eq!(made.sandbox.phase(), Phase::Running);
    assert_eq!(engine.drivers(), ["fake", "late"]);
    let looks = set_up.looks.load(Ordering::SeqCst);
    engine.create(&project(), asking("other", "late"), None).await.expect("it is still there");
    assert_eq!(set_up.looks.load(Ordering::SeqCst), looks, "nobody looks again");
    for sandbox in ["box", "other"] {
        let gone = engine.delete(&project(), &name(sandbox), Delete::default(), None).await;
        gone.expect("it is deleted");
    }
}
