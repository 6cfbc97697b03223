//! Project quotas: where the filesystem has them a write beyond a sandbox's limit fails, and the
//! process that wrote continues.
//!
//! Few kernels of machines that tests run on have them built in, so this runs under the kernel that machines of tests have.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use bytes::Bytes;
use sandkeep_core::engine::{CreateDrive, Engine, Error, Stop, WakeMode};
use sandkeep_core::guest::GuestError;
use sandkeep_core::model::{Mount, MountMode, Patch, Size};
use sandkeep_core::store::{Enforcement, enforcement};
use sandkeep_testkit::house::{House, labelled, name, ok, project, sh, small};
use sandkeep_testkit::other_kernel::{self, INSIDE};

const LIMIT: u64 = 50 << 20;

#[test]
fn quotas_hold_sandboxes_to_their_disk() {
    let disks = [1200 << 20, 1200 << 20];
    match other_kernel::run("disk_quota::inside", &disks, &["df"]) {
        Ok(printed) => {
            for filesystem in ["ext4", "xfs"] {
                assert!(printed.contains(&format!("{filesystem} holds")), "{printed}");
            }
        }
        Err(why) => eprintln!("SKIPPED quotas_hold_sandboxes_to_their_disk: {why}"),
    }
}

/// What the test above runs in its machine.
#[tokio::test(flavor = "multi_thread")]
async fn inside() {
    if std::env::var_os(INSIDE).is_none() {
        return;
    }
    for (filesystem, device, make, option) in [
        (
            "ext4",
            "/dev/vda",
            &["mkfs.ext4", "-q", "-m0", "-Oproject,quota", "-Equotatype=prjquota"][..],
            "prjquota",
        ),
        ("xfs", "/dev/vdb", &["mkfs.xfs", "-q"][..], "pquota"),
    ] {
        let point = format!("/mnt/{filesystem}");
        std::fs::create_dir_all(&point).unwrap();
        run(Command::new(make[0]).args(&make[1..]).arg(device));
        // Without the option there are none, and that is found out too.
        run(Command::new("mount").args(["-t", filesystem, device, &point]));
        let found = enforcement(Path::new(&point)).unwrap();
        assert!(matches!(&found, Enforcement::Counted { fix: Some(_), .. }), "{found:?}");
        run(Command::new("umount").arg(&point));
        run(Command::new("mount").args(["-t", filesystem, "-o", option, device, &point]));
        assert_eq!(enforcement(Path::new(&point)).unwrap(), Enforcement::Projects);
        holds(&Path::new(&point).join("data")).await;
        println!("{filesystem} holds");
    }
}

fn run(command: &mut Command) {
    let ran = command.output().unwrap();
    assert!(ran.status.success(), "{command:?}: {}", String::from_utf8_lossy(&ran.stderr));
}

/// Writes files until that fails, and says how much was written and why no more.
fn write(megabytes: u64, prefix: &str) -> String {
    let script = r#"my $sum = 0; N: for my $n (1..MB) { open(my $f, ">", "PREFIX$n") or last;
        for (1..16) { my $w = syswrite($f, "x" x 65536); last N unless defined $w; $sum += $w } close $f or last } print $sum, " ", $!+0"#;
    let script = script.replace("MB", &megabytes.to_string()).replace("PREFIX", prefix);
    format!("exec perl -e '{script}'")
}

fn numbers(text: &str) -> (u64, i32) {
    let (sum, errno) = text.split_once(' ').unwrap_or_else(|| panic!("{text}"));
    (sum.parse().unwrap(), errno.parse().unwrap())
}

fn is_full(errno: i32) -> bool {
    // ENOSPC, EDQUOT
    errno == 28 || errno == 122
}

async fn holds(data: &Path) {
    let house = House::new().unwrap().with_data(data.to_owned());
    let engine = house.open().await;
    let max_size = Some(Size(20 << 20));
    let drive = CreateDrive { name: name("vault"), max_size, notes: BTreeMap::new() };
    engine.create_drive(&project(), drive).await.unwrap();
    let mut request = small("app");
    request.patch.disk = Some(Size(LIMIT));
    let mount = Mount { drive: name("vault"), mode: MountMode::ReadWrite };
    request.patch.mounts = Some(BTreeMap::from([("/vault".to_owned(), mount)]));
    engine.create(&project(), request, None).await.unwrap();

    // It sees its limit, and the drive's.
    let df = ok(&engine, "app", "df --output=size -B1M / /vault | tail -n +2").await;
    let sizes: Vec<u64> = df.split_whitespace().map(|size| size.parse().unwrap()).collect();
    assert_eq!(sizes, [50, 20], "{df}");

    // A write beyond the limit fails; the command continues.
    let ran = sh(&engine, "app", &write(200, "/work/f")).await;
    let (written, errno) = numbers(&ran.out);
    assert_eq!(ran.command.exit_code, Some(0), "{ran:?}");
    assert!(is_full(errno) && (40 << 20..=LIMIT).contains(&written), "{ran:?}");
    let (written, errno) = numbers(&ok(&engine, "app", &write(200, "/vault/f")).await);
    assert!(is_full(errno) && (10 << 20..=20 << 20).contains(&written), "{written} {errno}");
    ok(&engine, "app", "rm /work/f*").await;

    // Files without a name count.
    let held = r#"my $sum = 0; N: for my $n (1..200) { open(my $f, ">", "/work/h") or last; unlink "/work/h"; push @kept, $f;
        for (1..16) { my $w = syswrite($f, "x" x 65536); last N unless defined $w; $sum += $w } } print $sum, " ", $!+0"#;
    let (written, errno) = numbers(&ok(&engine, "app", &format!("exec perl -e '{held}'")).await);
    assert!(is_full(errno) && written <= LIMIT, "{written} {errno}");

    // So do inodes.
    let many = r#"mkdir "/work/many"; my $sum = 0; for my $n (1..400000) { open(my $f, ">", "/work/many/$n") or last; $sum++ } print $sum, " ", $!+0"#;
    let (made, errno) = numbers(&ok(&engine, "app", &format!("exec perl -e '{many}'")).await);
    assert!(is_full(errno) && (1000..=6400).contains(&made), "{made} {errno}");
    ok(&engine, "app", "rm -r /work/many").await;

    // An upload is refused with the reason.
    let error = upload(&engine).await.expect_err("100 MB");
    assert!(matches!(error, GuestError::DiskLimit { .. }), "{error:?}");
    assert_eq!(Error::from(error).code(), "disk_limit");
    ok(&engine, "app", "rm -f /work/up").await;

    // Root inside cannot leave its project, nor turn inheritance off: FS_IOC_FSSETXATTR.
    let leave = r#"open(my $d, "<", "/work"); my $b = "\0" x 28; ioctl($d, 0x801c581f, $b); substr($b, 12, 4) = pack("L", 0); substr($b, 0, 4) = pack("L", 0);
        print ioctl($d, 0x401c5820, $b) ? "left" : "refused""#;
    ok(&engine, "app", "mkdir -p /work/own").await;
    assert_eq!(ok(&engine, "app", &format!("exec perl -e '{leave}'")).await, "refused");

    // A higher limit counts at once.
    let patch = Patch { disk: Some(Size(2 * LIMIT)), ..Patch::default() };
    engine.update(&project(), &name("app"), patch).await.unwrap();
    let (written, errno) = numbers(&ok(&engine, "app", &write(200, "/work/g")).await);
    assert!(
        is_full(errno) && (LIMIT + (20 << 20)..=2 * LIMIT).contains(&written),
        "{written} {errno}"
    );

    // What was written is kept; after a checkpoint, and in the next session, there is as much room again.
    ok(&engine, "app", "rm /work/g1? /work/g2?").await;
    engine.checkpoint(&project(), &name("app"), labelled("one")).await.unwrap();
    let (written, _) = numbers(&ok(&engine, "app", &write(60, "/work/i")).await);
    assert_eq!(written, 60 << 20);
    engine.stop(&project(), &name("app"), Stop::default(), None).await.unwrap();
    let (written, _) = numbers(&ok(&engine, "app", &write(60, "/work/j")).await);
    assert_eq!(written, 60 << 20);
    assert_eq!(ok(&engine, "app", "ls /work/i1 /work/j1 /vault/f1 | wc -l").await.trim(), "3");
    engine.stop(&project(), &name("app"), Stop::default(), None).await.unwrap();
    engine.shutdown().await;
}

async fn upload(engine: &Engine) -> Result<(), GuestError> {
    let files = engine.files(&project(), &name("app"), WakeMode::default()).await.unwrap();
    let mut out = files.write("/work/up", None, true, false).await?;
    for _ in 0..100 {
        out.send(Bytes::from(vec![7; 1 << 20])).await?;
    }
    out.finish().await.map(drop)
}
