//! The host's reserve and the disks of microVMs: a machine that fills the host's disk waits, and nothing is lost by it.

use std::fs::File;
use std::time::Duration;

use rustix::fs::FallocateFlags;
use sandkeep_core::engine::{Engine, Stop};
use sandkeep_core::model::{CommandId, CommandState, Size};
use sandkeep_testkit::daemon::skipped;
use sandkeep_testkit::house::{
    House, detached, machine, name, ok, printed, project, sh, small, until,
};

use crate::disk::Disk;

const RESERVE: u64 = 300 << 20;
/// How much there is to write, in mebibytes.
const PIECES: usize = 160;
/// Writes pieces of a mebibyte, and prints each that is on the disk.
const WRITER: &str = r#"$| = 1;
for my $n (1..160) {
    open(my $f, '>', "/root/piece-$n") or die "open: $!";
    syswrite($f, chr(65 + $n % 26) x (1 << 20)) == 1 << 20 or die "write: $!";
    syscall(74, fileno $f) == 0 or die "fsync: $!";
    close $f;
    print "$n\n";
}"#;

async fn is_held(engine: &Engine, sandbox: &str) -> bool {
    let why = engine.why(&project(), &name(sandbox)).await.expect("it is explained");
    why.notices.iter().any(|notice| notice.contains("is held back since"))
}

/// How many pieces were reported to be on the disk.
async fn pieces(engine: &Engine, command: &CommandId) -> usize {
    let text = String::from_utf8_lossy(&printed(engine, "m", command).await).into_owned();
    let numbers: Vec<usize> = text.lines().map(|line| line.parse().expect(line)).collect();
    assert!(numbers.iter().copied().eq(1..=numbers.len()), "{text}");
    numbers.len()
}

/// Takes all space but `left` bytes.
fn fill_but(disk: &Disk, left: u64) -> std::path::PathBuf {
    let path = disk.point.join("ballast");
    let file = File::create(&path).expect("a file");
    let length = disk.free().checked_sub(left).expect("there is that much");
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, length).expect("room for it");
    path
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_machine_that_fills_the_hosts_disk_waits_and_goes_on() {
    let test = "a_machine_that_fills_the_hosts_disk_waits_and_goes_on";
    // Made before the house, so that it goes after it.
    let disk = Disk::new(3 << 30);
    let house = House::new().map(|house| house.with_data(disk.point.join("data")));
    let mut house = match house.and_then(House::with_machines) {
        Ok(house) => house,
        Err(why) => return skipped(test, &why),
    };
    house.reserve = Some(RESERVE);
    let mut engine = house.open().await;
    let mut large = machine("m");
    large.patch.disk = Some(Size(8 << 30));
    engine.create(&project(), large, None).await.expect("a machine");
    engine.create(&project(), small("app"), None).await.expect("a sandbox");
    // Read once: the first read after a change writes the access time.
    ok(&engine, "m", "echo before > /root/before && cat /root/before && sync").await;
    ok(&engine, "app", "true").await;

    let ballast = fill_but(&disk, RESERVE + (72 << 20));
    // How fast that was is forgotten, so that the machine is judged by what it writes itself.
    tokio::time::sleep(Duration::from_secs(5)).await;
    let writer = detached(&engine, "m", &["perl", "-e", WRITER]).await;
    until("writes that wait", async || is_held(&engine, "m").await.then_some(())).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let (free, told) = (disk.free(), pieces(&engine, &writer).await);
    assert!(free >= RESERVE - (8 << 20), "{free} are left of {RESERVE}");
    // With so little to spare, a burst at the beginning is enough.
    assert!(told < PIECES, "{told} pieces");
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert!(disk.free() + (4 << 20) >= free, "{} after {free}: it writes", disk.free());
    assert!(is_held(&engine, "m").await, "it is not let go for nothing");
    // It answers, and others write: as little as is left.
    let read = ok(&engine, "m", "cat /root/before");
    let read = tokio::time::timeout(Duration::from_secs(60), read).await;
    assert_eq!(read.expect("it answers"), "before\n");
    assert_eq!(ok(&engine, "app", "echo x > /work/x && cat /work/x").await, "x\n");

    // The next daemon finds it as it is.
    engine = house.reopen(engine).await;
    assert!(is_held(&engine, "m").await, "{}", disk.free());
    assert_eq!(pieces(&engine, &writer).await, told, "nothing was told that is not on the disk");

    std::fs::remove_file(&ballast).expect("the ballast goes");
    until("a machine that goes on", async || {
        (!is_held(&engine, "m").await && pieces(&engine, &writer).await == PIECES).then_some(())
    })
    .await;
    let done = engine.wait(&project(), &name("m"), &writer).await.expect("it ends");
    assert_eq!((done.state, done.exit_code), (CommandState::Exited, Some(0)));

    // A stop of one that waits lets it write what it has.
    let ballast = fill_but(&disk, RESERVE + (48 << 20));
    let more =
        "i=0; while :; do i=$((i+1)); head -c 4194304 /dev/zero | tr '\\0' x > /root/more-$i; done";
    let _endless = detached(&engine, "m", &["sh", "-c", more]).await;
    until("writes that wait again", async || is_held(&engine, "m").await.then_some(())).await;
    std::fs::remove_file(&ballast).expect("the ballast goes");
    let stopped = engine.stop(&project(), &name("m"), Stop::default(), None).await;
    stopped.expect("its files are kept");
    let check = "cat /root/before; for n in $(seq 160); do [ $(wc -c < /root/piece-$n) = 1048576 ] || echo $n; done";
    assert_eq!(ok(&engine, "m", check).await, "before\n", "every piece is whole");
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_writes_slowly_does_not_use_the_reserve_either() {
    let disk = Disk::new(900 << 20);
    let house = House::new().map(|house| house.with_data(disk.point.join("data")));
    let mut house = match house {
        Ok(house) => house,
        Err(why) => {
            return skipped("who_writes_slowly_does_not_use_the_reserve_either", &why);
        }
    };
    house.reserve = Some(RESERVE);
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    engine.create(&project(), small("quiet"), None).await.unwrap();
    ok(&engine, "app", "true").await;
    let quiet = detached(&engine, "quiet", &["sleep", "1000"]).await;
    fill_but(&disk, RESERVE + (12 << 20));
    // Far less at a time than between two looks is worth a look.
    let writer = r#"open(my $f, ">", "/work/slow"); for my $n (1..400) { syswrite($f, "x" x (1 << 18)); select(undef, undef, undef, 0.05) } print "done""#;
    let ran = sh(&engine, "app", &format!("exec perl -e '{writer}'")).await;
    assert_eq!((ran.command.exit_code, ran.out.as_str()), (Some(137), ""), "{ran:?}");
    assert!(disk.free() >= RESERVE - (12 << 20), "{} are left of {RESERVE}", disk.free());
    let command = engine.command(&project(), &name("quiet"), &quiet).await.unwrap();
    assert_eq!(command.state, CommandState::Running, "it wrote nothing");
    engine.shutdown().await;
}
