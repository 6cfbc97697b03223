//! A disk that is full: errors that say so, nothing lost, and on it goes when there is room again.

#![allow(clippy::unwrap_used)] // helpers of tests may panic as tests may

use std::fs;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::Command;

use sandkeep_core::engine::lifecycle::Phase;
use sandkeep_core::engine::{Checkpoint, Delete, ErrorKind, Stop};
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

    /// Takes up all room.
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
    let house = house.with_data(disk.point.join("data"));
    let engine = house.open().await;
    let app = name("app");
    engine.create(&project(), small("app"), None).await.unwrap();
    sh(&engine, "app", "echo good > /work/file").await;
    engine.stop(&project(), &app, Stop::default(), None).await.unwrap();

    // Full while it runs: the command is told, the sandbox lives.
    sh(&engine, "app", "echo better > /work/file").await;
    let ran = sh(&engine, "app", "dd if=/dev/zero of=/work/fill bs=1M").await;
    assert_ne!(ran.command.exit_code, Some(0));
    assert!(ran.err.contains("No space left"), "{}", ran.err);
    assert_eq!(sh(&engine, "app", "cat /work/file").await.out, "better\n");

    // Full while it is to be sealed: refused before anything is touched.
    let refused =
        engine.stop(&project(), &app, Stop::default(), None).await.expect_err("there is no room");
    assert_eq!((refused.kind(), refused.code()), (ErrorKind::Exhausted, "no_room"), "{refused}");
    assert!(refused.hint().is_some());
    assert_eq!(engine.get(&project(), &app).await.unwrap().sandbox.phase, Phase::Running);
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
