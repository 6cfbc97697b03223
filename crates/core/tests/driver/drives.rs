//! Drives in the container driver's machines: what is written where, and who can be led astray.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};

use sandkeep_core::driver::{Driver, DriverError, Machine, MachineMount, Relayer};
use sandkeep_core::model::RootFs;
use sandkeep_testkit::driver::ContainerHost;
use sandkeep_testkit::inside::{Inside, userland};

fn host(test: &str) -> Option<ContainerHost> {
    let made = ContainerHost::new().and_then(|host| {
        userland(&host.layer("userland"))?;
        Ok(host)
    });
    made.inspect_err(|why| eprintln!("SKIPPED {test}: {why}")).ok()
}

fn mount(target: &str, root: RootFs) -> MachineMount {
    MachineMount { target: PathBuf::from(target), root, read_only: false, owner: None }
}

fn machine(host: &ContainerHost, name: &str, mounts: Vec<MachineMount>) -> Machine {
    Machine { mounts, ..host.machine_on(name, host.root(name, &["userland"])) }
}

fn upper(root: &RootFs) -> PathBuf {
    root.writable_dir.join(&root.upper)
}

async fn start(host: &ContainerHost, machine: &Machine) -> Inside {
    Inside::reach(&host.driver().start(machine).await.expect("it starts")).await
}

#[tokio::test]
async fn what_is_written_to_a_drive_is_in_the_drive() {
    let Some(host) = host("what_is_written_to_a_drive_is_in_the_drive") else { return };
    let drive = host.root("drive", &[]);
    let fresh =
        MachineMount { owner: Some("someone".to_owned()), ..mount("/home/data", drive.clone()) };
    let one = machine(&host, "one", vec![fresh]);
    let inside = start(&host, &one).await;
    assert_eq!(inside.sh("stat -c '%a %u:%g' /home/data").await.out, "777 1000:1000\n");
    let wrote = inside.run(&["sh", "-c", "echo mine > /home/data/file"], Some("someone")).await;
    assert_eq!(wrote.code, 0, "{wrote:?}");
    inside.sh("mkdir /home/data/dir; echo deep > /home/data/dir/deep").await;
    let options =
        "while read _ at _ how _; do [ $at = /home/data ] && echo $how; done < /proc/self/mounts";
    let options = inside.sh(options).await.out;
    assert!(options.contains("nosuid") && options.contains("nodev"), "{options}");
    let moved = inside.sh("rmdir /home/data; mv /home/data /elsewhere").await;
    assert_ne!(moved.code, 0, "a mount point stays");
    host.driver().stop(&one.key).await.expect("it stops");
    let file = upper(&drive).join("file");
    assert_eq!(fs::read_to_string(&file).unwrap(), "mine\n");
    assert_eq!(fs::metadata(&file).unwrap().uid(), 1000, "owned as the sandbox saw it");
    let kept = fs::read_dir(upper(&one.root).join("home/data")).unwrap().count();
    assert_eq!(kept, 0, "the root has the mount point and nothing of the drive");

    // Another machine, other ids on the host: the first one's upper is now a layer.
    fs::rename(upper(&drive), host.path().join("layers/first")).unwrap();
    let (again, before) = (host.root("again", &["first"]), host.root("before", &["first"]));
    let snapshot = MachineMount { read_only: true, ..mount("/before", before.clone()) };
    let two = machine(&host, "two", vec![mount("/data", again.clone()), snapshot]);
    let inside = start(&host, &two).await;
    assert_eq!(inside.sh("cat /data/file /before/dir/deep").await.out, "mine\ndeep\n");
    assert_eq!(inside.sh("stat -c %u /data/file /before/file").await.out, "1000\n1000\n");
    let script = "rm -r /data/dir; echo more >> /data/file; echo x > /before/x; cat /before/file";
    assert_eq!(inside.sh(script).await.out, "mine\n", "a snapshot does not follow");
    let refused = inside.sh("rm /before/file || touch /before/x || chmod 700 /before").await;
    assert_ne!(refused.code, 0);
    assert!(refused.err.contains("Read-only file system"), "{refused:?}");
    host.driver().stop(&two.key).await.expect("it stops");
    assert_eq!(fs::read_to_string(upper(&again).join("file")).unwrap(), "mine\nmore\n");
    assert_eq!(fs::read_dir(upper(&before)).unwrap().count(), 0, "nothing was written");
    assert_eq!(fs::read_to_string(host.path().join("layers/first/dir/deep")).unwrap(), "deep\n");
}

#[tokio::test]
async fn a_swapped_root_has_the_drives_where_they_were() {
    let Some(host) = host("a_swapped_root_has_the_drives_where_they_were") else { return };
    let driver = host.driver();
    let (data, odd) = (host.root("data", &[]), host.root("odd", &[]));
    let mounts = vec![mount("/work/data", data.clone()), mount("/an odd\\place", odd.clone())];
    let machine = machine(&host, "box", mounts);
    let inside = start(&host, &machine).await;
    inside.sh("echo one > /work/data/file; echo two > '/an odd\\place/file'; mv /work /play").await;
    let mounts = inside.sh("cat /proc/self/mounts | wc -l").await.out;
    let mut current = machine.root.clone();
    for round in 0..3 {
        let sealed = host.path().join("layers").join(format!("sealed-{round}"));
        // The agent is alone and does nothing, so a copy is what it sees.
        let mut copy = std::process::Command::new("cp");
        assert!(copy.arg("-a").arg(upper(&current)).arg(&sealed).status().unwrap().success());
        let mut next = host.root(&format!("next-{round}"), &[]);
        next.lower.clone_from(&current.lower);
        next.lower.insert(0, PathBuf::from(format!("sealed-{round}")));
        driver.swap_root(&machine.key, &next).await.expect("the root is swapped");
        let script =
            format!("cat /play/data/file '/an odd\\place/file'; echo > /play/data/{round}");
        assert_eq!(inside.sh(&script).await.out, "one\ntwo\n", "round {round}");
        assert!(upper(&data).join(round.to_string()).exists(), "it is still the drive");
        fs::remove_dir_all(&current.writable_dir).unwrap();
        current = next;
    }
    assert_eq!(inside.sh("cat /proc/self/mounts | wc -l").await.out, mounts, "none is left over");
    driver.stop(&machine.key).await.expect("it stops");
}

#[tokio::test]
async fn what_a_sandbox_left_leads_no_mount_astray() {
    let Some(host) = host("what_a_sandbox_left_leads_no_mount_astray") else { return };
    let evil = host.layer("evil");
    let outside = host.path().join("outside");
    fs::create_dir(&outside).unwrap();
    symlink(&outside, evil.join("absolute")).unwrap();
    symlink("../../../../../..", evil.join("relative")).unwrap();
    symlink("proc", evil.join("inner")).unwrap();
    symlink("nowhere", evil.join("dangling")).unwrap();
    fs::write(evil.join("file"), "no directory").unwrap();
    fs::create_dir(evil.join("deep")).unwrap();
    symlink("/etc", evil.join("deep/link")).unwrap();
    for (number, target) in [
        "/absolute",
        "/absolute/new",
        "/relative/etc",
        "/inner",
        "/inner/1",
        "/dangling",
        "/file",
        "/file/below",
        "/deep/link",
        "/deep/link/new",
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("evil-{number}");
        let root = host.root(&name, &["evil"]);
        let mounts = vec![mount(target, host.root(&format!("drive-{number}"), &[]))];
        let machine = Machine { mounts, ..host.machine_on(&name, root) };
        match host.driver().start(&machine).await {
            Err(DriverError::MountPoint { reason }) => assert!(reason.contains(target), "{reason}"),
            other => panic!("{target}: {other:?}"),
        }
    }
    assert!(host.driver().survivors().await.unwrap().is_empty());
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 0, "nothing was made outside");
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!table.contains(host.path().to_str().unwrap()), "nothing is mounted on the host");
    assert!(!Path::new("/etc/new").exists());
}
