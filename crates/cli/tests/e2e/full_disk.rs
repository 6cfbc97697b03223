//! A daemon on a disk that is full to the last block: it starts, says what is wrong, and room can be made through it.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::Command;

use rustix::fs::FallocateFlags;
use sandkeep_testkit::daemon::{Daemon, SMALL, skipped, unfit};

/// A small filesystem; unmounted in the end.
pub(crate) struct Disk {
    pub(crate) point: PathBuf,
    _dir: tempfile::TempDir,
}

impl Disk {
    pub(crate) fn new(bytes: u64) -> Self {
        let dir = tempfile::TempDir::with_prefix("keep-disk-").unwrap();
        let (image, point) = (dir.path().join("disk.img"), dir.path().join("disk"));
        File::create(&image).unwrap().set_len(bytes).unwrap();
        fs::create_dir(&point).unwrap();
        let run = |command: &mut Command| {
            let output = command.output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        };
        run(Command::new("mkfs.ext4").args(["-q", "-m", "0"]).arg(&image));
        run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&point));
        Self { point, _dir: dir }
    }

    /// Takes all space.
    pub(crate) fn fill(&self) -> PathBuf {
        let path = self.point.join("filler");
        let file = File::create(&path).unwrap();
        let mut at = 0;
        let mut size: u64 = 256 << 20;
        while size >= 1024 {
            match rustix::fs::fallocate(&file, FallocateFlags::empty(), at, size) {
                Ok(()) => at += size,
                Err(_) => size /= 2,
            }
        }
        path
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.point, rustix::mount::UnmountFlags::DETACH);
    }
}

#[test]
fn a_daemon_starts_on_a_full_disk_and_room_can_be_made() {
    if let Some(why) = unfit() {
        return skipped("a_daemon_starts_on_a_full_disk_and_room_can_be_made", why);
    }
    let disk = Disk::new(900 << 20);
    let mut daemon = Daemon::start_at(env!("CARGO_BIN_EXE_keep"), disk.point.join("data"), &[]);
    daemon.import_small();
    for name in ["app", "big"] {
        daemon.ok(["create", name, "--image", SMALL]);
    }
    daemon.sh("app", "echo kept > /work/file");
    daemon.sh("big", "dd if=/dev/urandom of=/work/fill bs=1M count=24 2>/dev/null");
    for name in ["app", "big"] {
        daemon.ok(["stop", name]);
    }
    // Once without the space that is set aside for this: then the index is given up.
    for set_aside in [false, true] {
        let ballast = daemon.data().join("ballast");
        for _ in 0..300 {
            if ballast.exists() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        daemon.kill();
        if !set_aside {
            fs::remove_file(&ballast).unwrap();
        }
        let filler = disk.fill();
        daemon.launch();
        let (_, said) = daemon.fails(["start", "app"]);
        assert!(said.contains("are free") && said.contains("delete"), "{said}");
        assert_eq!(daemon.json(["show", "app"])["state"], "stopped");
        if set_aside {
            fs::remove_file(filler).unwrap();
            assert_eq!(daemon.sh("app", "cat /work/file"), "kept\n");
            daemon.ok(["stop", "app"]);
        } else {
            // Room is made through the daemon.
            daemon.ok(["rm", "big"]);
            let mut tries = 0;
            while !daemon.keep(["start", "app"]).status.success() {
                tries += 1;
                assert!(tries < 100, "the room does not come back");
                std::thread::sleep(std::time::Duration::from_millis(200));
            }
            assert_eq!(daemon.sh("app", "cat /work/file; echo more > /work/more"), "kept\n");
            fs::remove_file(filler).unwrap();
            daemon.ok(["stop", "app"]);
        }
    }
}
