//! Sandboxes are held to their disk limit where the filesystem has no quotas: what they write is counted, whatever form it has.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use bytes::Bytes;
use sandkeep_core::engine::{Engine, Error, ErrorKind, Stop, WakeMode};
use sandkeep_core::guest::GuestError;
use sandkeep_core::model::{CommandEnd, CommandState, Patch, Size};
use sandkeep_testkit::house;
use sandkeep_testkit::house::{House, detached, name, ok, project, sh, small};

const LIMIT: u64 = 50 << 20;

/// An engine with a sandbox `app` whose disk limit is [`LIMIT`].
async fn limited(house: &House) -> Engine {
    let engine = house.open().await;
    let mut request = small("app");
    request.patch.disk = Some(Size(LIMIT));
    engine.create(&project(), request, None).await.unwrap();
    engine
}

/// What the open layers of a house take on the disk, by names.
fn on_disk(house: &House) -> u64 {
    let layers = house.data().join("layers");
    let open = fs::read_dir(layers).unwrap().flatten().map(|entry| entry.path());
    open.filter(|layer| layer.join("open.json").exists())
        .map(|layer| blocks(&layer.join("diff")))
        .sum()
}

fn blocks(dir: &Path) -> u64 {
    let du = Command::new("du").args(["-s", "--block-size=1"]).arg(dir).output().unwrap();
    String::from_utf8_lossy(&du.stdout).split_whitespace().next().unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn removed_files_that_are_open_or_mapped_count() {
    let house = house!();
    let engine = limited(&house).await;
    // 800 MB in files without a name: held open, and, on x86-64, mapped with the descriptor closed.
    let open = r#"for my $n (1..20) { open(my $f, '>', "/work/f$n") or die; unlink "/work/f$n"; push @kept, $f;
        syswrite($f, 'x' x (1 << 20)) for (1..40); select(undef, undef, undef, 0.1) } print 'done'"#;
    let mapped = r#"for my $n (1..20) { open(my $f, '+>', "/work/m$n") or die; syswrite($f, 'x' x (1 << 20)) for (1..40);
        syscall(9, 0, 40 << 20, 1, 1, fileno $f, 0) == -1 and die "mmap: $!"; unlink "/work/m$n"; close $f;
        select(undef, undef, undef, 0.1) } print 'done'"#;
    let scripts: &[&str] = if cfg!(target_arch = "x86_64") { &[open, mapped] } else { &[open] };
    for script in scripts {
        let ran =
            sh(&engine, "app", &format!("exec perl -e '{}'", script.replace('\'', "\""))).await;
        assert_eq!((ran.command.exit_code, ran.out.as_str()), (Some(137), ""), "{ran:?}");
        // What it held is free with it.
        assert_eq!(ok(&engine, "app", "echo on").await, "on\n");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn inodes_count_and_are_bounded() {
    let house = house!();
    let engine = limited(&house).await;
    let files = r#"for my $d (1..400) { mkdir "/work/d$d"; for my $n (1..1000) { open(my $f, ">", "/work/d$d/$n") } select(undef, undef, undef, 0.01) } print "done""#;
    let ran = sh(&engine, "app", &format!("exec perl -e '{files}'")).await;
    assert_eq!((ran.command.exit_code, ran.out.as_str()), (Some(137), ""), "{ran:?}");
    ok(&engine, "app", "rm -rf /work/d*").await;
    ok(&engine, "app", "seq 1 1000 | while read n; do echo $n > /work/$n; done").await;
    engine.stop(&project(), &name("app"), Stop::default(), None).await.unwrap();
}

/// What a writer wrote until it was ended is not held against who runs next.
#[tokio::test(flavor = "multi_thread")]
async fn who_cleans_up_at_once_is_not_ended() {
    let house = house!();
    let engine = limited(&house).await;
    let files = r#"for my $d (1..400) { mkdir "/work/d$d"; for my $n (1..1000) { open(my $f, ">", "/work/d$d/$n") } } print "done""#;
    for round in 0..3 {
        let ran = sh(&engine, "app", &format!("exec perl -e '{files}'")).await;
        assert_eq!((ran.command.exit_code, ran.out.as_str()), (Some(137), ""), "{ran:?}");
        // Reported as what a file costs of the limit: more than that.
        assert!(ran.command.peak > ran.command.limit, "{:?}", ran.command);
        let ran = sh(&engine, "app", "rm -rf /work/d*; echo $?").await;
        assert_eq!(ran.out, "0\n", "{round}: {ran:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_those_who_write_are_ended() {
    let house = house!();
    let engine = limited(&house).await;
    let quiet = detached(&engine, "app", &["sh", "-c", "exec 3>/work/log; exec sleep 1000"]).await;
    let writer = r#"for my $n (1..400) { open(my $f, ">", "/work/f$n"); syswrite($f, "x" x (10 << 20)); select(undef, undef, undef, 0.02) } print "done""#;
    let ran = sh(&engine, "app", &format!("exec perl -e '{writer}'")).await;
    assert_eq!((ran.command.exit_code, ran.out.as_str()), (Some(137), ""), "{ran:?}");
    let command = engine.command(&project(), &name("app"), &quiet).await.unwrap();
    assert_eq!(command.state, CommandState::Running, "it wrote nothing");
    // What was written exists and can be cleaned up.
    ok(&engine, "app", "test -e /work/f1 && rm /work/f*").await;
}

/// Uploads an archive, in pieces as a server would.
async fn upload(engine: &Engine, archive: &[u8]) -> Result<(), GuestError> {
    let files = engine.files(&project(), &name("app"), WakeMode::default()).await.unwrap();
    let mut out = files.tar_in("/work").await?;
    for piece in archive.chunks(256 << 10) {
        out.send(Bytes::copy_from_slice(piece)).await?;
    }
    out.finish().await.map(drop)
}

fn refused(error: GuestError) {
    assert!(matches!(error, GuestError::DiskLimit { .. }), "{error:?}");
    let error = Error::from(error);
    assert_eq!((error.kind(), error.code()), (ErrorKind::OverLimit, "disk_limit"));
    assert!(error.to_string().contains("the disk limit is reached"), "{error}");
    assert!(error.hint().is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_over_the_limit_ends_no_command() {
    let house = house!();
    let engine = limited(&house).await;
    let sleeper =
        detached(&engine, "app", &["sh", "-c", "exec 3>/work/log; exec sleep 1000"]).await;
    // A block and an inode each on the disk, and a quarter of that in the archive.
    let mut archive = tar::Builder::new(Vec::new());
    for number in 0..40_000 {
        let mut header = tar::Header::new_gnu();
        header.set_size(1);
        header.set_mode(0o644);
        header.set_cksum();
        archive.append_data(&mut header, format!("file-{number}"), &b"x"[..]).unwrap();
    }
    let archive = archive.into_inner().unwrap();
    for _ in 0..2 {
        refused(upload(&engine, &archive).await.expect_err("it is 180 MB on the disk"));
        // Longer than the watch takes to look twice.
        tokio::time::sleep(Duration::from_millis(600)).await;
        let command = engine.command(&project(), &name("app"), &sleeper).await.unwrap();
        assert_eq!(command.state, CommandState::Running, "it uploaded nothing: {command:?}");
    }
    ok(&engine, "app", "rm -f /work/file-*").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn directories_and_empty_files_are_bounded_too() {
    let house = house!();
    let engine = limited(&house).await;
    // All but a few of the inodes that 50 MB may have.
    let fill = "mkdir /work/many && cd /work/many && i=0 && while [ $i -lt 6300 ]; do : > $i; i=$((i+1)); done";
    ok(&engine, "app", fill).await;
    let files = engine.files(&project(), &name("app"), WakeMode::default()).await.unwrap();
    let dir = async |name: &str| files.make_dir(name, None, false).await;
    let empty =
        async |name: &str| files.write(name, None, false, false).await?.finish().await.map(drop);
    // A fourth of what was left when it was counted last is let through before it is counted again.
    let mut made = 0;
    while dir(&format!("/work/d{made}")).await.is_ok() {
        made += 1;
        assert!(made < 2000, "more than there may be were made");
    }
    for refusal in [dir("/work/d").await, empty("/work/f").await] {
        let refusal = refusal.expect_err("there is no room");
        assert!(refusal.to_string().contains("files and directories"), "{refusal}");
        refused(refusal);
    }
    // Many names at once count as many.
    let deep = "/work".to_owned() + &"/d".repeat(200);
    refused(files.make_dir(&deep, None, true).await.expect_err("there is no room"));
    ok(&engine, "app", "rm -r /work/many").await;
    files.make_dir(&deep, None, true).await.expect("now there is");
}

#[tokio::test(flavor = "multi_thread")]
async fn uploads_are_cut_at_the_limit() {
    let house = house!();
    let engine = limited(&house).await;
    let mut archive = tar::Builder::new(Vec::new());
    for number in 0..20 {
        let mut header = tar::Header::new_gnu();
        header.set_size(10 << 20);
        header.set_mode(0o644);
        header.set_cksum();
        let contents = vec![number + 1; 10 << 20];
        archive.append_data(&mut header, format!("file-{number}"), &contents[..]).unwrap();
    }
    let archive = archive.into_inner().unwrap();
    for _ in 0..2 {
        refused(upload(&engine, &archive).await.expect_err("it is 200 MB"));
        assert!(on_disk(&house) <= LIMIT + (2 << 20), "{}", on_disk(&house));
    }
    // The sandbox lives, and nothing else was ended or lost.
    assert_eq!(
        ok(&engine, "app", "head -c 1 /work/file-0 | od -An -tu1; rm /work/file-*").await.trim(),
        "1"
    );

    // A file by itself, written and then added to.
    let write = async |bytes: usize, append: bool| -> Result<(), GuestError> {
        let files = engine.files(&project(), &name("app"), WakeMode::default()).await.unwrap();
        let mut out = files.write("/work/one", None, true, append).await?;
        for _ in 0..bytes >> 20 {
            out.send(Bytes::from(vec![7; 1 << 20])).await?;
        }
        out.finish().await.map(drop)
    };
    write(30 << 20, false).await.unwrap();
    refused(write(30 << 20, true).await.expect_err("together they are 60 MB"));
    ok(&engine, "app", "rm /work/one").await;
    write(30 << 20, false).await.unwrap();

    // With a higher limit there is more room at once.
    let patch = Patch { disk: Some(Size(400 << 20)), ..Patch::default() };
    engine.update(&project(), &name("app"), patch).await.unwrap();
    upload(&engine, &archive).await.unwrap();
    engine.stop(&project(), &name("app"), Stop::default(), None).await.unwrap();
}

/// Makes a tar archive of files that are nearly all holes.
fn sparse(files: u64, length: u64) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    for number in 0..files {
        let mut file = fs::File::create(dir.path().join(format!("sparse-{number}"))).unwrap();
        file.write_all(b"begin").unwrap();
        file.set_len(length).unwrap();
    }
    let packed = Command::new("tar")
        .args(["--sparse", "--format=gnu", "-cf", "-", "-C"])
        .arg(dir.path())
        .arg(".")
        .output()
        .unwrap();
    assert!(packed.status.success());
    packed.stdout
}

#[tokio::test(flavor = "multi_thread")]
async fn holes_of_an_upload_stay_holes() {
    let house = house!();
    let engine = limited(&house).await;
    let archive = sparse(40, LIMIT - 1);
    assert!(archive.len() < 1 << 20);
    upload(&engine, &archive).await.unwrap();
    assert!(on_disk(&house) < 4 << 20, "2 GB of holes take {}", on_disk(&house));
    let shown = ok(
        &engine,
        "app",
        "stat -c %s /work/sparse-39; head -c 5 /work/sparse-39; ls /work | wc -l",
    )
    .await;
    assert_eq!(shown, format!("{}\nbegin40\n", LIMIT - 1));
    // No file may be longer than the limit, not even one of holes.
    refused(upload(&engine, &sparse(1, LIMIT + 1)).await.expect_err("too long"));
}

/// A filesystem of its own on a loop device; unmounted in the end, whatever happens.
pub(crate) struct Disk {
    pub(crate) point: std::path::PathBuf,
    _dir: tempfile::TempDir,
}

impl Disk {
    pub(crate) fn new(bytes: u64) -> Self {
        let dir = tempfile::TempDir::with_prefix("keep-disk-").unwrap();
        let (image, point) = (dir.path().join("disk.img"), dir.path().join("disk"));
        fs::File::create(&image).and_then(|file| file.set_len(bytes)).unwrap();
        fs::create_dir(&point).unwrap();
        for command in [
            Command::new("mkfs.ext4").args(["-q", "-m", "0"]).arg(&image),
            Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&point),
        ] {
            let ran = command.output().unwrap();
            assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
        }
        Self { point, _dir: dir }
    }

    pub(crate) fn free(&self) -> u64 {
        let stat = rustix::fs::statvfs(&self.point).unwrap();
        stat.f_bavail * stat.f_frsize
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.point, rustix::mount::UnmountFlags::DETACH);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_reserve_of_the_host_is_not_used_up() {
    // Made before the house, so that it goes after it.
    let disk = Disk::new(1200 << 20);
    let mut house = house!().with_data(disk.point.join("data"));
    let reserve = 300 << 20;
    house.reserve = Some(reserve);
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    let quiet = detached(&engine, "app", &["sleep", "1000"]).await;
    // Its own limit is far away. As fast as most disks, so that the test says the same on all of them.
    let writer = r#"for my $n (1..300) { open(my $f, ">", "/work/f$n"); syswrite($f, "x" x (4 << 20)); select(undef, undef, undef, 0.01) } print "done""#;
    let ran = sh(&engine, "app", &format!("exec perl -e '{writer}'")).await;
    assert_eq!((ran.command.exit_code, ran.out.as_str()), (Some(137), ""), "{ran:?}");
    assert!(disk.free() >= reserve - (16 << 20), "{} are left of {reserve}", disk.free());
    let command = engine.command(&project(), &name("app"), &quiet).await.unwrap();
    assert_eq!(command.state, CommandState::Running);
    // An upload is refused for the host's sake, and says so.
    if disk.free() < reserve + (1 << 20) {
        let error = upload(&engine, &vec![1; 64 << 20]).await.expect_err("no room");
        assert_eq!(Error::from(error).code(), "insufficient_storage");
    }
    engine.shutdown().await;
}

/// Ending one writer does not help where a loop starts the next: the reserve is kept all the same, and the command says why it
/// ended.
#[tokio::test(flavor = "multi_thread")]
async fn a_loop_of_short_writers_does_not_use_up_the_reserve() {
    let disk = Disk::new(1600 << 20);
    let mut house = house!().with_data(disk.point.join("data"));
    let reserve = 256 << 20;
    house.reserve = Some(reserve);
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    let least = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(u64::MAX));
    let (point, seen) = (disk.point.clone(), std::sync::Arc::clone(&least));
    let (watching, watched) = tokio::sync::oneshot::channel::<()>();
    let watch = std::thread::spawn(move || {
        let mut watched = watched;
        while matches!(watched.try_recv(), Err(tokio::sync::oneshot::error::TryRecvError::Empty)) {
            let stat = rustix::fs::statvfs(&point).unwrap();
            let free = stat.f_bavail * stat.f_frsize;
            seen.fetch_min(free, std::sync::atomic::Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    let line = "for i in $(seq 60); do dd if=/dev/zero of=/root/b$i bs=1M count=50 2>/dev/null; done; echo survived";
    let ran = sh(&engine, "app", line).await;
    drop(watching);
    watch.join().unwrap();
    let least = least.load(std::sync::atomic::Ordering::Relaxed);
    assert_eq!((ran.command.exit_code, ran.out.as_str()), (Some(137), ""), "{ran:?}");
    assert_eq!(ran.command.end, Some(CommandEnd::HostDiskFull), "{ran:?}");
    assert_eq!((ran.command.limit, ran.command.peak), (None, None), "no limit of its own ended it");
    assert!(least >= reserve - (16 << 20), "{least} were left of {reserve}");
    // It goes on.
    assert_eq!(ok(&engine, "app", "rm /root/b*; echo on").await, "on\n");
    engine.shutdown().await;
}

/// What a killed process held is freed before its command ends, which takes a while. It does not hide the reason.
#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_frees_much_after_its_end_says_why_it_ended() {
    let house = house!();
    let engine = limited(&house).await;
    let script = r#"for my $n (1..60) { open(my $f, ">", "/work/f$n") or die; unlink "/work/f$n"; push @kept, $f;
        syswrite($f, "x" x (1 << 20)) for (1..30) } print "done""#;
    let ran = sh(&engine, "app", &format!("exec perl -e '{script}'")).await;
    assert_eq!(ran.command.end, Some(CommandEnd::OutOfDisk), "{ran:?}");
    assert_eq!(ran.command.limit, Some(LIMIT));
    engine.shutdown().await;
}

/// Space that one sandbox frees does not hide what another writes.
#[tokio::test(flavor = "multi_thread")]
async fn a_limit_holds_after_space_was_freed_elsewhere() {
    let house = house!();
    let engine = limited(&house).await;
    engine.create(&project(), small("other"), None).await.unwrap();
    let freed = "dd if=/dev/zero of=/root/big bs=1M count=600 2>/dev/null; sleep 1; rm /root/big";
    ok(&engine, "other", freed).await;
    let line = "for i in $(seq 12); do dd if=/dev/zero of=/root/b$i bs=1M count=45 2>/dev/null; sleep 0.3; done; echo survived";
    sh(&engine, "app", line).await;
    assert!(on_disk(&house) < 400 << 20, "{} were written", on_disk(&house));
    engine.shutdown().await;
}
