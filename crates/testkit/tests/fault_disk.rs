//! The disk that tests break on purpose behaves as configured, and leaves nothing behind.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

use sandkeep_testkit::daemon::skipped;
use sandkeep_testkit::fault_disk::{Fault, FaultDisk, Filesystem, unfit};

sandkeep_testkit::fault_disk_process!();

const PATIENCE: Duration = Duration::from_secs(30);

fn fit(test: &str) -> bool {
    let why = unfit();
    if let Some(why) = &why {
        skipped(test, why);
    }
    why.is_none()
}

fn write_synced(path: &Path, content: &[u8]) {
    let mut file = File::create(path).expect("a file");
    file.write_all(content).expect("written");
    file.sync_all().expect("synced");
    File::open(path.parent().expect("a directory")).expect("it").sync_all().expect("synced");
}

fn a_sync_survives_cuts(filesystem: Filesystem) {
    if !fit(filesystem.name()) {
        return;
    }
    let disk = FaultDisk::new(filesystem);
    let mut lost = false;
    for seed in 0..6_u64 {
        let content = format!("synced {seed} ").repeat(2000);
        write_synced(&disk.path().join(format!("kept-{seed}")), content.as_bytes());
        let volatile = disk.path().join("volatile");
        fs::write(&volatile, vec![b'v'; 300_000]).expect("written");
        disk.power_cut(seed);
        for earlier in 0..=seed {
            let expected = format!("synced {earlier} ").repeat(2000);
            let found = fs::read_to_string(disk.path().join(format!("kept-{earlier}")));
            assert_eq!(found.expect("there"), expected, "after cut {seed}");
        }
        lost |= fs::read(&volatile).is_ok_and(|found| found != vec![b'v'; 300_000])
            || !volatile.exists();
        let _ = fs::remove_file(&volatile);
    }
    assert!(lost, "no cut lost what was not synced");
}

#[test]
fn a_sync_survives_cuts_on_ext4() {
    a_sync_survives_cuts(Filesystem::Ext4);
}

#[test]
fn a_sync_survives_cuts_on_ext4_without_flush_at_rename() {
    a_sync_survives_cuts(Filesystem::Ext4NoAutoDaAlloc);
}

#[test]
fn a_sync_survives_cuts_on_xfs() {
    a_sync_survives_cuts(Filesystem::Xfs);
}

#[test]
fn a_sync_survives_cuts_on_btrfs() {
    a_sync_survives_cuts(Filesystem::Btrfs);
}

#[test]
fn nothing_old_writes_into_the_disk_after_a_cut() {
    if !fit("nothing_old_writes_into_the_disk_after_a_cut") {
        return;
    }
    let disk = FaultDisk::new(Filesystem::Ext4);
    let path = disk.path().join("file");
    write_synced(&path, &[b'a'; 8192]);
    let mut held = File::options().write(true).open(&path).expect("open");
    disk.power_cut(1);
    // The instance from before the cut is still there, because of the descriptor.
    let _ = held.write_all(&[b'b'; 8192]);
    assert!(held.sync_all().is_err(), "the old disk takes no writes");
    drop(held);
    disk.remount();
    assert_eq!(fs::read(&path).expect("there"), [b'a'; 8192]);
}

#[test]
fn failed_writes_are_reported_and_heal() {
    if !fit("failed_writes_are_reported_and_heal") {
        return;
    }
    let disk = FaultDisk::new(Filesystem::Ext4);
    let path = disk.path().join("file");
    write_synced(&path, b"before");
    let fault = disk.inject(Fault::writes().containing(*b"POISON"));
    let mut file = File::create(disk.path().join("poisoned")).expect("a file");
    file.write_all(&b"POISON".repeat(1000)).expect("into the page cache");
    assert!(file.sync_all().is_err(), "the write that fails is told");
    drop(file);
    write_synced(&disk.path().join("other"), b"other content is written");
    disk.heal(fault);
    write_synced(&disk.path().join("again"), &b"POISON".repeat(1000));
    assert!(disk.stats().failed > 0);
    disk.remount();
    assert_eq!(fs::read(&path).expect("there"), b"before");
    assert_eq!(fs::read(disk.path().join("again")).expect("there"), b"POISON".repeat(1000));
}

#[test]
fn faults_end_after_a_time_or_a_number_of_requests() {
    if !fit("faults_end_after_a_time_or_a_number_of_requests") {
        return;
    }
    let disk = FaultDisk::new(Filesystem::Xfs);
    let synced = |name: &str| {
        let mut file = File::create(disk.path().join(name)).expect("a file");
        file.write_all(&b"POISON".repeat(10)).expect("into the page cache");
        file.sync_all()
    };
    disk.inject(Fault::writes().containing(*b"POISON").times(1));
    assert!(synced("a").is_err());
    assert!(synced("b").is_ok());
    disk.inject(Fault::writes().containing(*b"POISON").lasting(Duration::from_millis(300)));
    assert!(synced("c").is_err());
    let deadline = Instant::now() + PATIENCE;
    while synced("d").is_err() {
        assert!(Instant::now() < deadline, "the fault goes on");
        sleep(Duration::from_millis(50));
    }
}

#[test]
fn reads_fail_by_region() {
    if !fit("reads_fail_by_region") {
        return;
    }
    let disk = FaultDisk::new(Filesystem::Ext4);
    let path = disk.path().join("file");
    write_synced(&path, &vec![b'x'; 1 << 20]);
    disk.remount();
    let fault = disk.inject(Fault::reads().in_region(0, u64::MAX));
    assert!(fs::read(&path).is_err());
    disk.heal(fault);
    assert_eq!(fs::read(&path).expect("healed").len(), 1 << 20);
}

#[test]
fn hanging_writes_hang_until_they_are_released_and_reads_go_on() {
    if !fit("hanging_writes_hang_until_they_are_released_and_reads_go_on") {
        return;
    }
    let disk = FaultDisk::new(Filesystem::Ext4);
    let path = disk.path().join("file");
    write_synced(&path, &vec![b'x'; 1 << 20]);
    disk.remount();
    let fault = disk.inject(Fault::writes().hang());
    let (done, wait) = mpsc::channel();
    let other = disk.path().join("other");
    let writer = spawn(move || {
        write_synced(&other, b"late");
        let _ = done.send(());
    });
    let deadline = Instant::now() + PATIENCE;
    while disk.stats().hanging == 0 {
        assert!(Instant::now() < deadline, "nothing hangs");
        sleep(Duration::from_millis(5));
    }
    assert_eq!(fs::read(&path).expect("reads go on").len(), 1 << 20);
    assert!(wait.try_recv().is_err(), "the sync returned");
    disk.heal(fault);
    wait.recv_timeout(PATIENCE).expect("the write goes on");
    writer.join().expect("no panic");
    assert_eq!(disk.stats().hanging, 0);
}

#[test]
fn a_cut_releases_what_hangs() {
    if !fit("a_cut_releases_what_hangs") {
        return;
    }
    let disk = FaultDisk::new(Filesystem::Ext4);
    disk.inject(Fault::everything().hang());
    let path = disk.path().join("file");
    let writer = spawn(move || {
        let mut file = File::create(path)?;
        file.write_all(b"x")?;
        file.sync_all()
    });
    let deadline = Instant::now() + PATIENCE;
    while disk.stats().hanging == 0 {
        assert!(Instant::now() < deadline, "nothing hangs");
        sleep(Duration::from_millis(5));
    }
    disk.cut(3);
    assert!(writer.join().expect("no panic").is_err());
    disk.power_on();
    write_synced(&disk.path().join("after"), b"x");
}

fn what_uses_the_disk_can_be_killed(filesystem: Filesystem) {
    if !fit(filesystem.name()) {
        return;
    }
    let disk = FaultDisk::new(filesystem);
    let program = disk.path().join("program");
    fs::copy("/bin/sleep", &program).expect("copied");
    let mut runs = Command::new(&program).arg("60").spawn().expect("it starts");
    let open = File::create(disk.path().join("file")).expect("a file");
    let mut holds = Command::new("/bin/sleep").arg("60").stdout(open).spawn().expect("it starts");
    let mut other = Command::new("/bin/sleep").arg("60").spawn().expect("it starts");
    disk.cut(1);
    // Lets the filesystem find out that its disk is gone.
    let _ = fs::write(disk.path().join("late"), b"x");
    rustix::fs::sync();
    disk.kill_users();
    disk.power_on();
    assert!(matches!(runs.try_wait(), Ok(Some(_))));
    assert!(matches!(holds.try_wait(), Ok(Some(_))));
    assert!(matches!(other.try_wait(), Ok(None)));
    other.kill().expect("ours");
    other.wait().expect("ours");
}

#[test]
fn what_uses_a_disk_with_ext4_can_be_killed() {
    what_uses_the_disk_can_be_killed(Filesystem::Ext4);
}

/// It refuses even `stat` once it has given up.
#[test]
fn what_uses_a_disk_with_xfs_can_be_killed() {
    what_uses_the_disk_can_be_killed(Filesystem::Xfs);
}

#[test]
fn what_uses_a_disk_with_btrfs_can_be_killed() {
    what_uses_the_disk_can_be_killed(Filesystem::Btrfs);
}

#[test]
fn a_disk_fills_up_and_can_be_emptied() {
    if !fit("a_disk_fills_up_and_can_be_emptied") {
        return;
    }
    for filesystem in Filesystem::ALL {
        let disk = FaultDisk::with_size(filesystem, 320 << 20);
        disk.fill(1 << 20).expect("filled");
        let full = fs::write(disk.path().join("big"), vec![b'x'; 8 << 20]);
        let full = full.and_then(|()| File::open(disk.path().join("big"))?.sync_all());
        assert!(full.is_err(), "{}", filesystem.name());
        disk.empty().expect("emptied");
        let name = filesystem.name();
        fs::write(disk.path().join("big"), vec![b'x'; 8 << 20])
            .unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

/// What of this directory is still on the host.
fn left_of(place: &Path) -> Vec<String> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("ours");
    let name = place.to_str().expect("a plain path");
    let mut left: Vec<String> =
        mounts.lines().filter(|line| line.contains(name)).map(str::to_owned).collect();
    for device in fs::read_dir("/sys/block").expect("sysfs").flatten() {
        let file = device.path().join("loop/backing_file");
        let text = fs::read_to_string(file).unwrap_or_default();
        if text.contains(name) {
            left.push(text);
        }
    }
    if place.exists() {
        left.push(name.to_owned());
    }
    left
}

#[test]
fn nothing_is_left_behind() {
    if !fit("nothing_is_left_behind") {
        return;
    }
    let disk = FaultDisk::new(Filesystem::Ext4);
    let place = disk.path().parent().expect("a directory").to_path_buf();
    assert!(!left_of(&place).is_empty(), "the check sees what is there");
    disk.power_cut(1);
    disk.inject(Fault::writes().hang());
    fs::write(disk.path().join("file"), b"dirty").expect("into the page cache");
    drop(disk);
    assert_eq!(left_of(&place), Vec::<String>::new());
}

/// Run as a child by the next test: makes a disk, prints where it is, and waits to be killed.
#[test]
fn victim() {
    let Some(tell) = std::env::var_os("FAULT_DISK_VICTIM").map(PathBuf::from) else { return };
    let disk = FaultDisk::new(Filesystem::Ext4);
    disk.inject(Fault::writes().hang());
    fs::write(disk.path().join("file"), b"dirty").expect("into the page cache");
    fs::write(&tell, disk.path().to_str().expect("a plain path")).expect("our own file");
    sleep(PATIENCE);
}

#[test]
fn nothing_is_left_behind_by_a_test_that_is_killed() {
    if !fit("nothing_is_left_behind_by_a_test_that_is_killed") {
        return;
    }
    let home = tempfile::tempdir().expect("a directory");
    let tell = home.path().join("told");
    let mut victim = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "victim"])
        .env("FAULT_DISK_VICTIM", &tell)
        .stdout(Stdio::null())
        .spawn()
        .expect("it starts");
    let deadline = Instant::now() + PATIENCE;
    let path = loop {
        match fs::read_to_string(&tell) {
            Ok(text) if !text.is_empty() => break PathBuf::from(text),
            _ => assert!(Instant::now() < deadline, "the victim makes no disk"),
        }
        sleep(Duration::from_millis(10));
    };
    let place = path.parent().expect("a directory");
    assert!(!left_of(place).is_empty());
    victim.kill().expect("ours");
    victim.wait().expect("ours");
    while !left_of(place).is_empty() {
        assert!(Instant::now() < deadline, "{:?}", left_of(place));
        sleep(Duration::from_millis(20));
    }
}
