//! From an unassigned machine to a sandbox's, over a link that breaks, to its end.

use std::time::{Duration, Instant};

use sandkeep_core::guest::{Guest, OutputEvent};
use sandkeep_proto::link::{At, Failure, Spawn};
use sandkeep_testkit::daemon::skipped;
use sandkeep_testkit::inside::{Inside, userland};
use sandkeep_testkit::microvm;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;

use crate::microvm_guest::machine::{Files, PATIENCE, assemble, identity, renew};

/// A machine's files with a small system on its only layer; nothing, and the reason printed, where
/// there can be none.
pub(crate) fn files(test: &str) -> Option<Files> {
    let kernel = match microvm::kernel() {
        Ok(kernel) => kernel,
        Err(why) => {
            skipped(test, &why);
            return None;
        }
    };
    let mut files = Files::new(kernel);
    let tree = files.dir.path().join("tree");
    if let Err(why) = userland(&tree) {
        skipped(test, &why);
        return None;
    }
    std::fs::write(tree.join("etc/machine-id"), "0123456789abcdef0123456789abcdef\n")
        .expect("room");
    std::fs::create_dir(tree.join("root")).expect("room");
    files.lower("lower-0", &tree);
    files.disk("disk", 1 << 30);
    Some(files)
}

fn at(path: &str) -> At {
    At { path: path.to_owned(), cwd: None, user: None }
}

fn failure<T: std::fmt::Debug>(result: Result<T, sandkeep_core::guest::GuestError>) -> Failure {
    let error = result.expect_err("it must not work");
    error.failure().unwrap_or_else(|| panic!("not refused: {error:?}"))
}

#[tokio::test]
async fn a_machine_lives() {
    let Some(files) = files("a_machine_lives") else { return };
    let mut machine = files.boot();
    let guest = machine.connect().await;
    nobodys(&guest).await;
    guest.assemble(assemble(1)).await.expect("assembled");
    assert_eq!(failure(guest.assemble(assemble(1)).await), Failure::Exists);
    let first = Inside::over(guest);
    its_own(&first).await;
    files_and_commands(&first).await;
    standing_still(&first).await;
    another(&first).await;
    drop(first);
    over_broken_links(&mut machine).await;
    everybody_ends(&Inside::over(machine.connect().await)).await;
}

async fn nobodys(guest: &Guest) {
    assert_eq!(failure(guest.stat(at("/")).await), Failure::Invalid);
    assert_eq!(failure(guest.export(0).await), Failure::Invalid);
    let spawn = Spawn {
        command: "cmd-early".to_owned(),
        argv: vec!["/init".to_owned()],
        env: Default::default(),
        cwd: None,
        user: None,
        tty: None,
        stdin: false,
        sudo_from: None,
        secret_env: Default::default(),
        secret_files: Vec::new(),
    };
    assert_eq!(failure(guest.spawn(spawn).await), Failure::Invalid);
    guest.freeze().await.expect("harmless");
    guest.thaw().await.expect("harmless");
    let before = guest.generation().to_owned();
    assert_ne!(guest.renew(renew(None)).await.expect("harmless"), before);
}

async fn its_own(inside: &Inside) {
    let said = inside.sh("uname -n; cat /etc/hostname /etc/resolv.conf /sys/class/net/eth0/address /sys/class/net/eth0/mtu").await;
    assert_eq!(
        said.out,
        "first\nfirst\nnameserver 100.96.0.1\noptions timeout:5 attempts:2\n02:00:00:00:00:01\n65520\n",
        "{said:?}"
    );
    let clock = inside.perl("print time").await.out.parse::<u64>().expect("a number");
    let here =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970");
    assert!(clock.abs_diff(here.as_secs()) < 60, "{clock}");
    // Nothing of what the root was made from can be named.
    let mounts = inside.sh("cat /proc/mounts").await.out;
    for hidden in ["ext4", "erofs", "/parts", "/stage"] {
        let lines = mounts.lines().filter(|line| !line.starts_with("overlay / "));
        assert!(lines.into_iter().all(|line| !line.contains(hidden)), "{hidden} in {mounts}");
    }
    assert_eq!(
        inside.sh("ls /").await.out,
        "bin\ndev\netc\nlib\nlib64\nproc\nroot\nrun\nsys\ntmp\n"
    );
    let said = inside.sh("echo hi > /dev/null; ls /dev/fd /dev/pts/ptmx /sys/fs/cgroup/cgroup.procs; cat /dev/shm/x").await;
    assert!(said.err.contains("/dev/shm/x") && !said.err.contains("cgroup"), "{said:?}");
    // Root of its own kernel: it may mount.
    assert_eq!(inside.sh("mount -t tmpfs x /tmp").await.code, 0);
}

async fn files_and_commands(inside: &Inside) {
    let guest = inside.guest();
    let bytes = bytes::Bytes::from((0..700_000_u32).flat_map(u32::to_le_bytes).collect::<Vec<_>>());
    let mut sending = guest.write_file(at("/root/big"), None, true, false).await.expect("room");
    sending.send(bytes.clone()).await.expect("taken");
    assert_eq!(sending.finish().await.expect("written").bytes, bytes.len() as u64);
    let (entry, mut reading) = guest.read_file(at("/root/big"), 0, None).await.expect("there");
    assert_eq!(entry.size, bytes.len() as u64);
    let mut back = Vec::new();
    while let Some(more) = reading.next().await.expect("whole") {
        back.extend_from_slice(&more);
    }
    assert!(back == bytes, "the bytes of a file changed on the way");
    let ran = inside.run(&["id", "-u"], Some("someone")).await;
    assert_eq!(ran.out, "1000\n", "{ran:?}");
    assert_eq!(inside.sh("kill -9 $$").await.code, 137);
    // The bound of processes holds for root, and leaves room for what it is a bound of.
    let bomb =
        inside.sh("n=0; while [ $n -lt 300 ]; do sleep 20 & n=$((n+1)); done; echo $n").await;
    assert!(bomb.err.contains("fork") || bomb.err.contains("Resource"), "{bomb:?}");
    guest.quiesce(Duration::from_secs(1)).await.expect("all end");
    assert_eq!(inside.sh("ulimit -f").await.out, format!("{}\n", (1_u64 << 30) / 512));
}

async fn standing_still(inside: &Inside) {
    let guest = inside.guest();
    guest.freeze().await.expect("frozen");
    guest.freeze().await.expect("it is");
    let mut output = inside.start(&["sh", "-c", "echo x > /root/late; echo written"], None).await;
    let early = tokio::time::timeout(Duration::from_secs(2), output.next()).await;
    assert!(early.is_err(), "{early:?}");
    guest.thaw().await.expect("thawed");
    guest.thaw().await.expect("it is");
    let said = tokio::time::timeout(PATIENCE, output.next()).await.expect("it goes on");
    assert_eq!(said.expect("the link holds"), OutputEvent::Stdout("written\n".into()));
    // Without a thaw it lasts ten seconds.
    guest.freeze().await.expect("frozen");
    let start = Instant::now();
    assert_eq!(inside.sh("echo x > /root/later; echo written").await.out, "written\n");
    assert!(start.elapsed() > Duration::from_secs(5), "{:?}", start.elapsed());
}

async fn another(inside: &Inside) {
    let guest = inside.guest();
    let boot_id = "cat /proc/sys/kernel/random/boot_id";
    let before = inside.sh(boot_id).await.out;
    assert_eq!(before.len(), 37, "{before}");
    let same = guest.renew(renew(None)).await.expect("renewed");
    assert_ne!(same, guest.generation());
    assert_eq!(inside.sh(boot_id).await.out, before);
    assert_eq!(inside.sh("uname -n").await.out, "first\n");
    // As after a restore: disks are frozen.
    guest.freeze().await.expect("frozen");
    let other = guest.renew(renew(Some(identity("second", 9)))).await.expect("renewed");
    assert_ne!(other, same);
    assert_ne!(inside.sh(boot_id).await.out, before);
    let said = inside
        .sh("uname -n; cat /etc/hostname /sys/class/net/eth0/address; wc -c < /etc/machine-id")
        .await;
    assert_eq!(said.out, "second\nsecond\n02:00:00:00:00:09\n33\n", "{said:?}");
    assert!(!inside.sh("cat /etc/machine-id").await.out.starts_with("0123"));
    assert!(inside.sh("cat /etc/hosts").await.out.contains("localhost second"));
}

/// Output is neither lost nor doubled when connections are cut in the middle of it, and invalid
/// bytes on the port do no harm.
async fn over_broken_links(machine: &mut crate::microvm_guest::machine::Machine) {
    let script = "n=0; while [ $n -lt 20000 ]; do echo line-$n; n=$((n+1)); done; exit 7";
    let mut kept = Vec::new();
    let mut exit = None;
    let mut rounds = 0;
    while exit.is_none() {
        rounds += 1;
        assert!(rounds < 50, "{} bytes after 50 connections", kept.len());
        let guest = machine.connect().await;
        let process = if rounds == 1 {
            let spawn = crate::microvm_guest::written::spawn("cmd-long", &["sh", "-c", script]);
            guest.spawn(spawn).await
        } else {
            guest.attach("cmd-long", kept.len() as u64, 0).await
        };
        let mut output = process.expect("it is known").output;
        // A few times it is cut off; in the end it may finish.
        let mut left = if rounds < 5 { 20_000 } else { usize::MAX };
        while left > 0 && exit.is_none() {
            match tokio::time::timeout(PATIENCE, output.next()).await.expect("it goes on") {
                Ok(OutputEvent::Stdout(bytes)) => {
                    kept.extend_from_slice(&bytes);
                    output.keep(bytes.len());
                    left = left.saturating_sub(bytes.len());
                }
                Ok(OutputEvent::Exited(how)) => exit = Some(how.code),
                other => panic!("{other:?}"),
            }
        }
        drop((output, guest));
        if rounds < 4 {
            rubbish(&machine.link).await;
        }
    }
    assert_eq!(exit, Some(7));
    let expected: String = (0..20_000).map(|n| format!("line-{n}\n")).collect();
    assert!(kept == expected.as_bytes(), "output was lost or doubled: {} bytes", kept.len());
    assert!(rounds >= 5);
}

/// Says things on the port that are no link.
async fn rubbish(link: &std::path::Path) {
    let nonce = sandkeep_proto::serial::Nonce::new([3; 16]);
    let mut noise: Vec<u8> = (0..5000_u32).map(|n| ((n * n) >> 3) as u8).collect();
    noise.extend_from_slice(&nonce.mark());
    // A connection that breaks the rules at once, and one that is cut off in its mark.
    noise.extend_from_slice(&[0xff; 64]);
    noise.extend_from_slice(&nonce.mark()[..7]);
    let none = sandkeep_proto::serial::Nonce::NONE.mark();
    // QEMU may throttle a port and hold bytes back until it is dialled again, as the daemon does.
    for _ in 0..4 {
        let mut socket = UnixStream::connect(link).await.expect("QEMU listens");
        socket.write_all(&noise).await.expect("taken");
        let mut said = Vec::new();
        let hearing = async {
            let mut some = [0; 1000];
            while !said.windows(none.len()).any(|part| part == none) {
                let count = socket.read(&mut some).await.expect("QEMU lives");
                assert!(count > 0, "QEMU hung up");
                said.extend_from_slice(&some[..count]);
            }
        };
        if tokio::time::timeout(PATIENCE / 4, hearing).await.is_ok() {
            return;
        }
    }
    panic!("the agent never says that it gave up");
}

async fn everybody_ends(inside: &Inside) {
    let _running =
        inside.start(&["sh", "-c", "(sleep 1000 & sleep 1000) & sleep 1000"], None).await;
    inside.guest().quiesce(Duration::ZERO).await.expect("all end");
    let left = inside.perl("opendir D, '/proc'; for (readdir D) { next unless /^\\d+$/; print \"$_ \" if readlink \"/proc/$_/exe\" }").await;
    assert_eq!(
        left.out.split_whitespace().count(),
        2,
        "the agent and the one that looks: {left:?}"
    );
}

#[tokio::test]
async fn a_machine_that_panics_ends() {
    let Some(files) = files("a_machine_that_panics_ends") else { return };
    let mut machine = files.boot();
    let inside = Inside::over(machine.connect().await);
    inside.guest().assemble(assemble(1)).await.expect("assembled");
    let _lost = inside.start(&["sh", "-c", "echo c > /proc/sysrq-trigger"], None).await;
    tokio::time::timeout(PATIENCE, inside.guest().lost()).await.expect("the link is gone");
    machine.ended();
}

#[tokio::test]
async fn a_machine_that_reboots_ends() {
    let Some(files) = files("a_machine_that_reboots_ends") else { return };
    let mut machine = files.boot();
    let inside = Inside::over(machine.connect().await);
    inside.guest().assemble(assemble(1)).await.expect("assembled");
    // reboot(2), as any program calls it.
    let _lost = inside
        .start(&["perl", "-e", "syscall(169, 0xfee1dead, 672274793, 0x01234567, 0)"], None)
        .await;
    tokio::time::timeout(PATIENCE, inside.guest().lost()).await.expect("the link is gone");
    assert!(machine.ended().success());
}
