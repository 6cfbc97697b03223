//! The `host` image: what is taken of a machine, and above all what is not.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::Path;
use std::process::Command;

use sandkeep_core::model::Size;
use sandkeep_core::store::image::{
    HostRoot, HostTree, ImageError, ImageSettings, Images, Reporter,
};
use sandkeep_core::store::{Store, StoreError};
use tempfile::TempDir;

/// A small machine with a secret in every corner.
fn machine(root: &Path) {
    let put = |name: &str, mode: u32, text: &str| {
        let path = root.join(name);
        fs::create_dir_all(path.parent().expect("a file is in a directory")).expect("a directory");
        fs::write(&path, text).expect("a file in our own directory");
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("our own file");
    };
    put("usr/bin/tool", 0o755, "tool");
    put("usr/bin/sudo", 0o4755, "sudo");
    put("usr/lib/helper", 0o4750, "helper");
    put("usr/local/bin/mine", 0o755, "mine");
    put("usr/local/etc/tool.conf", 0o644, "SECRET");
    put("usr/share/tool/data", 0o644, "data");
    put("usr/share/tool/.env", 0o644, "SECRET");
    put("usr/share/tool/private.key", 0o600, "SECRET");
    put("usr/share/closed/data", 0o644, "SECRET");
    put("usr/local/ann/notes", 0o644, "SECRET");
    put("usr/lib/modules/6.1/a.ko", 0o644, "HOST");
    put("usr/lib/sysimage/rpm/db", 0o644, "database");
    put("home/ann/.ssh/id_rsa", 0o600, "SECRET");
    put("root/.bash_history", 0o644, "SECRET");
    put("etc/profile", 0o644, "profile");
    put("etc/skel/.profile", 0o644, "fresh");
    put("etc/ssl/certs/ca.pem", 0o644, "certificate");
    put("etc/ssl/private/host.key", 0o644, "SECRET");
    put("etc/ssh/ssh_host_rsa_key", 0o600, "SECRET");
    put("etc/apt/sources.list", 0o644, "deb https://me:SECRET@repo.example/x y\n");
    put("etc/apt/auth.conf.d/repo.conf", 0o644, "SECRET");
    put("etc/npmrc", 0o644, "SECRET");
    put("etc/hostname", 0o644, "HOST");
    put("etc/hosts", 0o644, "HOST");
    put("etc/machine-id", 0o444, "HOST");
    put("etc/fstab", 0o644, "HOST");
    put("etc/environment", 0o644, "SECRET");
    put("etc/sudoers", 0o440, "ann ALL=(ALL) NOPASSWD: ALL # SECRET\n");
    put("etc/sudoers.d/ann", 0o440, "SECRET");
    put("etc/krb5.keytab", 0o644, "SECRET");
    put(
        "etc/passwd",
        0o644,
        "root:x:0:0:root:/root:/bin/bash\ndaemon:x:1:1::/:/bin/false\nann:x:1000:1000:SECRET:/usr/local/ann:/bin/bash\nnobody:x:65534:65534::/:/bin/false\n",
    );
    put("etc/group", 0o644, "root:x:0:\nsudo:x:27:ann,daemon\nshadow:x:42:\nann:x:1000:\n");
    put("etc/shadow", 0o640, "root:$6$SECRET:1:0:99999:7:::\nann:$6$SECRET:1:0:99999:7:::\n");
    put("opt/service/config", 0o644, "SECRET");
    put("var/lib/dpkg/status", 0o644, "Package: tool");
    put("var/lib/dpkg/lock", 0o640, "");
    put("var/lib/mysql/data", 0o644, "SECRET");
    put("var/log/auth.log", 0o644, "SECRET");
    put("var/cache/apt/pkgcache.bin", 0o644, "HOST");
    put("tmp/scratch", 0o644, "SECRET");
    put("data/layers/x", 0o644, "SECRET");
    symlink("usr/bin", root.join("bin")).expect("a link");
    symlink("/etc/alternatives/x", root.join("usr/bin/x")).expect("a link");
    let close = |name: &str| {
        fs::set_permissions(root.join(name), fs::Permissions::from_mode(0o700)).expect("ours");
    };
    close("usr/share/closed");
    close("root");
}

fn build(host: &HostRoot, diff: &Path) -> HostTree {
    let (never, room) = (host.root.join("data"), |_| Ok(()));
    host.build(diff, &never, &room, &Reporter::silent()).expect("the image is built")
}

/// All paths below `dir`, directories with a slash.
fn listing(dir: &Path) -> BTreeSet<String> {
    fn walk(dir: &Path, from: &Path, into: &mut BTreeSet<String>) {
        for entry in fs::read_dir(dir).expect("a directory of ours") {
            let entry = entry.expect("an entry");
            let path = entry.path();
            let name = path.strip_prefix(from).expect("below").to_string_lossy().into_owned();
            if entry.file_type().expect("a type").is_dir() {
                into.insert(format!("{name}/"));
                walk(&path, from, into);
            } else {
                into.insert(name);
            }
        }
    }
    let mut all = BTreeSet::new();
    walk(dir, dir, &mut all);
    all
}

#[test]
fn no_secret_and_nothing_of_the_host_itself_is_taken() {
    let (root, image) = (TempDir::new().expect("a directory"), TempDir::new().expect("another"));
    machine(root.path());
    let host = HostRoot { root: root.path().to_owned(), also: Vec::new() };
    build(&host, image.path());
    let all = listing(image.path());
    for name in &all {
        let Ok(text) = fs::read_to_string(image.path().join(name)) else { continue };
        assert!(!text.contains("SECRET") && !text.contains("HOST"), "{name}: {text}");
    }
    for wanted in [
        "usr/bin/tool",
        "usr/bin/x",
        "usr/lib/helper",
        "usr/local/bin/mine",
        "usr/share/tool/data",
        "usr/share/closed/",
        "usr/lib/sysimage/rpm/db",
        "bin",
        "etc/profile",
        "etc/ssl/certs/ca.pem",
        "etc/machine-id",
        "etc/sudoers",
        "etc/sudoers.d/",
        "root/.profile",
        "home/",
        "tmp/",
        "proc/",
        "var/lib/dpkg/status",
        "var/lib/apt/lists/partial/",
        "var/run",
        "var/tmp/",
        "opt/",
    ] {
        assert!(all.contains(wanted), "{wanted} is missing in {all:#?}");
    }
    let unwanted =
        ["npmrc", "ann", "lock", "modules", "service", "mysql", "scratch", "data/layers"];
    for name in &all {
        let bad = unwanted
            .iter()
            .find(|part| name.ends_with(*part) || name.ends_with(&format!("{part}/")));
        assert!(bad.is_none() || name == "run/lock/" || name == "var/lock", "{name}");
    }
}

#[test]
fn accounts_are_the_systems_and_all_are_locked() {
    let (root, image) = (TempDir::new().expect("a directory"), TempDir::new().expect("another"));
    machine(root.path());
    build(&HostRoot { root: root.path().to_owned(), also: Vec::new() }, image.path());
    let read = |name: &str| fs::read_to_string(image.path().join(name)).expect("the file is there");
    assert_eq!(
        read("etc/passwd"),
        "root:x:0:0:root:/root:/bin/bash\ndaemon:x:1:1::/:/bin/false\nnobody:x:65534:65534::/:/bin/false\n"
    );
    assert_eq!(read("etc/group"), "root:x:0:\nsudo:x:27:daemon\nshadow:x:42:\n");
    for line in read("etc/shadow").lines() {
        assert_eq!(line.split(':').nth(1), Some("*"), "{line}");
    }
    let shadow = fs::metadata(image.path().join("etc/shadow")).expect("it is there");
    assert_eq!((shadow.mode() & 0o7777, shadow.gid()), (0o640, 42));
    assert!(!read("etc/sudoers").contains("NOPASSWD"));
}

#[test]
fn programs_are_shared_and_the_hosts_files_stay_as_they_are() {
    let (root, image) = (TempDir::new().expect("a directory"), TempDir::new().expect("another"));
    machine(root.path());
    let look = |dir: &Path, name: &str| {
        let found = fs::metadata(dir.join(name)).expect("it is there");
        (found.ino(), found.mode(), found.uid(), found.mtime(), found.mtime_nsec())
    };
    let before = look(root.path(), "usr/bin/sudo");
    let tree = build(&HostRoot { root: root.path().to_owned(), also: Vec::new() }, image.path());
    assert!(tree.shared >= 4 && tree.files > tree.shared, "{tree:?}");
    assert_eq!(look(root.path(), "usr/bin/sudo"), before);
    assert_eq!(look(image.path(), "usr/bin/sudo"), before, "one inode, setuid kept");
    for copied in ["etc/profile", "var/lib/dpkg/status", "usr/lib/sysimage/rpm/db"] {
        assert_ne!(look(root.path(), copied).0, look(image.path(), copied).0, "{copied}");
    }
    fs::write(root.path().join("etc/profile"), "edited in place").expect("our own file");
    let kept = fs::read_to_string(image.path().join("etc/profile")).expect("it is there");
    assert_eq!(kept, "profile");
    let mode = |name: &str| look(image.path(), name).1 & 0o7777;
    assert_eq!((mode("tmp"), mode("root"), mode("usr/share/closed")), (0o755, 0o700, 0o700));
}

#[test]
fn the_digest_tells_whether_the_host_has_changed() {
    let root = TempDir::new().expect("a directory");
    machine(root.path());
    let host = HostRoot { root: root.path().to_owned(), also: vec!["/opt/service".into()] };
    let digest = || {
        let image = TempDir::new().expect("a directory");
        build(&host, image.path()).digest
    };
    let before = digest();
    assert_eq!(digest(), before);
    fs::write(root.path().join("usr/bin/new"), "new").expect("our own file");
    assert_ne!(digest(), before);
}

/// The real thing, on the machine the test runs on, through a store.
#[tokio::test]
async fn this_machine_makes_an_image_that_works() {
    let dir = TempDir::new().expect("a directory");
    let store = Store::open(&dir.path().join("data")).expect("a new store");
    let images = Images::new(store.clone(), ImageSettings::default());
    let begun = std::time::Instant::now();
    let image = images.host(false, &Reporter::silent()).await.expect("the image is built");
    let took = begun.elapsed();
    let layer = store.layer(&image.layers[0]).await.expect("it is sealed");
    println!("host image: {} files, {}, made in {took:?}", layer.files, Size(layer.bytes));
    assert!(layer.bytes < 1 << 30, "what is shared with the host is not counted: {layer:?}");
    let root = store.diff_dir(&layer.id);
    // Only reads: the files are the host's own.
    let tried = Command::new("chroot")
        .arg(&root)
        .args(["/bin/sh", "-c", "id -un && ls / >/dev/null && test ! -s /etc/machine-id"])
        .output()
        .expect("chroot is a program");
    assert!(tried.status.success(), "{tried:?}");
    assert_eq!(tried.stdout, b"root\n");
    let homes = fs::read_dir(root.join("home")).expect("there is /home").count();
    assert_eq!(homes, 0);
    let mut begun_with = fs::read_dir(root.join("root")).expect("there is /root").flatten();
    assert!(begun_with.all(|entry| Path::new("/etc/skel").join(entry.file_name()).exists()));
}

/// On another filesystem than the host's own everything is copied: what does not fit is refused before, with nothing written.
#[test]
fn what_must_be_copied_is_known_before_and_refused_when_it_does_not_fit() {
    let (root, image) = (TempDir::new().expect("a directory"), TempDir::new().expect("another"));
    machine(root.path());
    fs::write(root.path().join("usr/bin/large"), vec![7; 3 << 20]).expect("a large program");
    fs::write(root.path().join("etc/ssl/certs/large.pem"), vec![7; 1 << 20])
        .expect("a large setting");
    let host = HostRoot { root: root.path().to_owned(), also: Vec::new() };
    let never = root.path().join("data");
    let linked = host.measure(image.path(), &never).expect("it is measured");
    // Not on the filesystem of the temporary directory, whatever that is.
    let elsewhere = Path::new("/dev/shm");
    let device = |path: &Path| fs::metadata(path).expect("a directory").dev();
    if !elsewhere.is_dir() || device(elsewhere) == device(root.path()) {
        println!(
            "SKIPPED what_must_be_copied_is_known_before_and_refused_when_it_does_not_fit: no other filesystem at /dev/shm"
        );
    } else {
        let other = TempDir::new_in(elsewhere).expect("a directory in memory");
        let copied = host.measure(other.path(), &never).expect("it is measured");
        assert!((4 << 20..5 << 20).contains(&copied), "{copied}");
        assert!(linked + (3 << 20) <= copied, "programs are linked: {linked}");
        let room =
            |bytes: u64| match bytes {
                0..=4096 => Ok(()),
                _ => Err(StoreError::NoRoom { free: 4096, need: bytes, hint: "delete".to_owned() }
                    .into()),
            };
        let built = host.build(other.path(), &never, &room, &Reporter::silent());
        let error = built.expect_err("there is no room");
        assert!(
            matches!(error, ImageError::Store { source: StoreError::NoRoom { .. } }),
            "{error}"
        );
    }
    assert_eq!(fs::read_dir(image.path()).expect("a directory").count(), 0, "only measured");
}
