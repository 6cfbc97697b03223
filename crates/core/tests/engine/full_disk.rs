//! A disk that is full: errors that say so, nothing lost, and on it goes when there is room again.

use std::fs;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::Command;

use sandkeep_core::engine::{Checkpoint, Delete, ErrorKind, Stop};
use sandkeep_core::model::lifecycle::Phase;
use sandkeep_testkit::house::{House, name, project, sh, small};

/// A filesystem of its own on a loop device; unmounted in the end, whatever happens.
struct Disk {
    point: PathBuf,
    _dir: tempfile::TempDir,
}

impl Disk {
    fn new(bytes: u64) -> Result<Self, String> {
        let dir =
            tempfile::TempDir::with_prefix("keep-disk-").map_err(|error| error.to_string())?;
        let place = dir.path();
        let image = place.join("disk.img");
        fs::File::create(&image)
            .and_then(|file| file.set_len(bytes))
            .map_err(|error| error.to_string())?;
        let point = place.join("disk");
        fs::create_dir(&point).map_err(|error| error.to_string())?;
        let run = |command: &mut Command| match command.output() {
            Ok(output) if output.status.success() => Ok(()),
            Ok(output) => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
            Err(error) => Err(error.to_string()),
        };
        run(Command::new("mkfs.ext4").args(["-q", "-m", "0"]).arg(&image))?;
        run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&point))?;
        Ok(Self { point, _dir: dir })
    }

    /// Takes all space.
    fn fill(&self) -> PathBuf {
        let path = self.point.join("ballast");
        let mut file = fs::File::create(&path).unwrap();
        for size in [1 << 20, 4096] {
            while file.write_all(&vec![1; size]).and_then(|()| file.sync_data()).is_ok() {}
        }
        path
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.point, rustix::mount::UnmountFlags::DETACH);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_costs_nothing_that_was_acknowledged() {
    let test = "a_full_disk_costs_nothing_that_was_acknowledged";
    // Made before the house, so that it goes after it.
    let disk = match Disk::new(800 << 20) {
        Ok(disk) => disk,
        Err(why) => return eprintln!("SKIPPED {test}: no filesystem of its own: {why}"),
    };
    let house = match House::new() {
        Ok(house) => house,
        Err(why) => return eprintln!("SKIPPED {test}: {why}"),
    };
    let mut house = house.with_data(disk.point.join("data"));
    // Without one, so that a sandbox can fill the disk to the last block.
    house.reserve = Some(0);
    let engine = house.open().await;
    let app = name("app");
    engine.create(&project(), small("app"), None).await.unwrap();
    sh(&engine, "app", "echo good > /work/file").await;
    engine.stop(&project(), &app, Stop::default(), None).await.unwrap();

    // Full while it runs: the command gets an error, the sandbox lives.
    sh(&engine, "app", "echo better > /work/file").await;
    let ran = sh(&engine, "app", "dd if=/dev/zero of=/work/fill bs=1M").await;
    assert_ne!(ran.command.exit_code, Some(0));
    assert!(ran.err.contains("No space left"), "{}", ran.err);
    assert_eq!(sh(&engine, "app", "cat /work/file").await.out, "better\n");

    // Full while it is to be sealed: refused before anything is touched.
    let refused =
        engine.stop(&project(), &app, Stop::default(), None).await.expect_err("there is no room");
    assert_eq!(
        (refused.kind(), refused.code()),
        (ErrorKind::Exhausted, "insufficient_storage"),
        "{refused}"
    );
    assert!(refused.hint().is_some());
    assert_eq!(engine.get(&project(), &app).await.unwrap().sandbox.phase(), Phase::Running);
    let refused = engine
        .checkpoint(&project(), &app, Checkpoint::default())
        .await
        .expect_err("there is no room");
    assert_eq!(refused.kind(), ErrorKind::Exhausted, "{refused}");
    let refused =
        engine.create(&project(), small("more"), None).await.expect_err("there is no room");
    assert_eq!(refused.kind(), ErrorKind::Exhausted, "{refused}");

    // Room again, by a command inside: on it goes.
    assert_eq!(sh(&engine, "app", "rm /work/fill").await.command.exit_code, Some(0));
    let stopped = engine.stop(&project(), &app, Stop::default(), None).await.unwrap();
    assert_eq!(stopped.sandbox.generation, 2);

    // Full while it sleeps: it cannot start, says so, and is not harmed.
    let ballast = disk.fill();
    let refused = engine.start(&project(), &app, None).await.expect_err("there is no room");
    assert_eq!(refused.kind(), ErrorKind::Exhausted, "{refused}");
    fs::remove_file(ballast).unwrap();
    assert_eq!(sh(&engine, "app", "cat /work/file").await.out, "better\n");
    engine.delete(&project(), &app, Delete::default(), None).await.unwrap();
    engine.shutdown().await;
}

impl Disk {
    /// Takes all space but a number of blocks.
    fn fill_but(&self, blocks: usize) -> PathBuf {
        let spare: Vec<PathBuf> =
            (0..blocks).map(|n| self.point.join(format!("spare-{n}"))).collect();
        for path in &spare {
            fs::write(path, [1; 4096]).unwrap();
        }
        let path = self.point.join("ballast");
        take_all(&fs::File::create(&path).unwrap());
        for path in &spare {
            fs::remove_file(path).unwrap();
        }
        rustix::fs::syncfs(fs::File::open(&self.point).unwrap()).unwrap();
        path
    }
}

/// Takes all space of a file's filesystem, at once.
fn take_all(file: &fs::File) {
    let (mut at, mut size) = (0, 256 << 20);
    while size >= 1024 {
        match rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), at, size) {
            Ok(()) => at += size,
            Err(_) => size /= 2,
        }
    }
}

/// With a few blocks left, a start is refused before anything is touched.
#[tokio::test(flavor = "multi_thread")]
async fn a_start_with_next_to_no_room_is_refused_and_leaves_nothing() {
    let test = "a_start_with_next_to_no_room_is_refused_and_leaves_nothing";
    let disk = match Disk::new(400 << 20) {
        Ok(disk) => disk,
        Err(why) => return eprintln!("SKIPPED {test}: no filesystem of its own: {why}"),
    };
    let house = match House::new() {
        Ok(house) => house,
        Err(why) => return eprintln!("SKIPPED {test}: {why}"),
    };
    let house = house.with_data(disk.point.join("data"));
    let engine = house.open().await;
    let app = name("app");
    engine.create(&project(), small("app"), None).await.unwrap();
    sh(&engine, "app", "echo good > /work/file").await;
    engine.stop(&project(), &app, Stop::default(), None).await.unwrap();
    for blocks in (0..=64).step_by(4) {
        let ballast = disk.fill_but(blocks);
        let refused = engine.start(&project(), &app, None).await.expect_err("there is no room");
        assert_eq!(
            (refused.kind(), refused.code()),
            (ErrorKind::Exhausted, "insufficient_storage"),
            "{refused}"
        );
        let phase = engine.get(&project(), &app).await.unwrap().sandbox.phase();
        assert_eq!(phase, Phase::Stopped, "{blocks} blocks");
        fs::remove_file(ballast).unwrap();
    }
    let ran = sh(&engine, "app", "cat /work/file; echo more > /work/more && cat /work/more").await;
    assert_eq!(ran.out, "good\nmore\n", "{}", ran.err);
    engine.shutdown().await;
}

/// The disk fills up in the middle of a start, at one moment or another.
#[tokio::test(flavor = "multi_thread")]
async fn a_start_on_a_disk_that_fills_up_comes_to_an_end() {
    let test = "a_start_on_a_disk_that_fills_up_comes_to_an_end";
    let disk = match Disk::new(400 << 20) {
        Ok(disk) => disk,
        Err(why) => return eprintln!("SKIPPED {test}: no filesystem of its own: {why}"),
    };
    let house = match House::new() {
        Ok(house) => house,
        Err(why) => return eprintln!("SKIPPED {test}: {why}"),
    };
    let house = house.with_data(disk.point.join("data"));
    let engine = house.open().await;
    let app = name("app");
    engine.create(&project(), small("app"), None).await.unwrap();
    sh(&engine, "app", "echo good > /work/file").await;
    engine.stop(&project(), &app, Stop::default(), None).await.unwrap();
    let (mut started, mut failed) = (0, 0);
    for round in 0..24 {
        let ballast = disk.point.join("ballast");
        let file = fs::File::create(&ballast).unwrap();
        let filler = std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(3 * round));
            take_all(&file);
        });
        let outcome = engine.start(&project(), &app, None).await;
        filler.join().unwrap();
        let phase = engine.get(&project(), &app).await.unwrap().sandbox.phase();
        match outcome {
            Ok(_) => {
                assert_eq!(phase, Phase::Running);
                started += 1;
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Exhausted, "round {round}: {error}");
                let settled = matches!(phase, Phase::Stopped | Phase::Failed);
                assert!(settled, "round {round}: {phase:?} after {error}");
                failed += 1;
            }
        }
        fs::remove_file(ballast).unwrap();
        // With room again it can be written to, whichever way that went.
        let line = format!("cat /work/file; echo {round} > /work/n && cat /work/n");
        let ran = sh(&engine, "app", &line).await;
        assert_eq!(ran.out, format!("good\n{round}\n"), "round {round}: {}", ran.err);
        engine.stop(&project(), &app, Stop::default(), None).await.unwrap();
    }
    println!("{started} started, {failed} were refused");
    engine.shutdown().await;
}

/// The driver itself: a machine that is up can write, or there is none.
#[tokio::test(flavor = "multi_thread")]
async fn a_machine_never_comes_up_on_a_root_that_cannot_be_written() {
    use sandkeep_core::driver::{Driver as _, DriverError, Machine};
    use sandkeep_core::model::{Limits, MachineKey, Size, UidRange};
    use sandkeep_core::store::Store;
    let test = "a_machine_never_comes_up_on_a_root_that_cannot_be_written";
    let disk = match Disk::new(64 << 20) {
        Ok(disk) => disk,
        Err(why) => return eprintln!("SKIPPED {test}: no filesystem of its own: {why}"),
    };
    let house = match House::new() {
        Ok(house) => house,
        Err(why) => return eprintln!("SKIPPED {test}: {why}"),
    };
    let driver = house.driver();
    let store = Store::open(&disk.point.join("data")).unwrap();
    let (mut up, mut refused) = (0, 0);
    for blocks in 0..64 {
        let open = store.begin(&[]).await.unwrap();
        let key = MachineKey::parse(&format!("full-{blocks}")).unwrap();
        let machine = Machine {
            key: key.clone(),
            hostname: "full".to_owned(),
            root: store.root(&open, &[]),
            uids: UidRange { base: house.settings.uid_base, count: 65_536 },
            limits: Limits {
                millicpus: 1000,
                memory: Size(64 << 20),
                pids: 32,
                file_size: Size(1 << 20),
            },
            mounts: Vec::new(),
        };
        let ballast = disk.fill_but(blocks);
        let outcome = driver.start(&machine).await;
        if outcome.is_ok() {
            let alive = fs::read(house.path().join("run").join(key.as_str()).join("machine.json"));
            let record: serde_json::Value = serde_json::from_slice(&alive.unwrap()).unwrap();
            let table = fs::read_to_string(format!("/proc/{}/mountinfo", record["pid"])).unwrap();
            let root = table.lines().find(|line| line.split(' ').nth(4) == Some("/")).unwrap();
            let options = root.rsplit(' ').next().unwrap();
            assert!(options.starts_with("rw"), "{blocks} blocks: {root}");
        }
        match outcome {
            Ok(_) => up += 1,
            Err(DriverError::NoRoom { .. }) => refused += 1,
            Err(error) => panic!("{blocks} blocks: {error}"),
        }
        driver.stop(&key).await.unwrap();
        fs::remove_file(ballast).unwrap();
        store.discard(&open).await.unwrap();
    }
    assert!(up > 0 && refused > 0, "{up} up, {refused} refused");
}
