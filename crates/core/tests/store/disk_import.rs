//! What a machine exports of its own disk becomes the layer, as if it had been written there; or nothing of it does.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::process::Command;

use crate::store_world::World;
use sandkeep_core::model::LayerId;
use sandkeep_core::store::{SealOptions, StoreError, export_limit};
use sandkeep_testkit::tree::{assert_same, churn, describe, nasty, set_xattr, upset};
use tar::{EntryType, Header};

/// As much as the disk could hold.
const AMPLE: u64 = 1 << 30;

/// An upper directory as an archive, as the agent writes it.
fn exported(upper: &Path) -> Vec<u8> {
    let output = Command::new("tar")
        .args(["--create", "--format=posix", "--numeric-owner", "--xattrs", "--xattrs-include=*"])
        .args(["--warning=none", "--directory"])
        .arg(upper)
        .arg(".")
        .output()
        .expect("tar runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// A layer whose truth is on a disk, with something else in its directory.
async fn on_disk(world: &World, chain: &[LayerId]) -> LayerId {
    let open = world.store.begin(chain).await.expect("begun");
    let dir = world.store.diff_dir(&open).with_file_name("disk");
    fs::create_dir(&dir).expect("a directory");
    fs::write(dir.join("0.img"), vec![1; 100_000]).expect("a disk");
    fs::write(world.store.diff_dir(&open).join("stale"), "not the truth").expect("a file");
    open
}

#[tokio::test]
async fn an_export_is_the_layer_byte_for_byte() {
    let world = World::new();
    let image = world.image(nasty).await;
    for seed in 0..3 {
        // What the kernel writes to an upper directory is what a guest's kernel would.
        let guest = world.store.begin(std::slice::from_ref(&image)).await.expect("begun");
        let mount = world.mount(&guest, std::slice::from_ref(&image));
        upset(mount.path());
        churn(mount.path(), seed, 60);
        set_xattr(&mount.path().join("tofile"), "system.posix_acl_access", &acl());
        let _ = rustix::fs::lremovexattr(mount.path().join("setuid"), "trusted.mark");
        let seen = describe(mount.path());
        drop(mount);
        let upper = world.store.diff_dir(&guest);
        forget_the_stack(&upper);
        let (mut expected, archive) = (describe(&upper), exported(&upper));

        let open = on_disk(&world, std::slice::from_ref(&image)).await;
        assert!(world.store.has_disk(&open).expect("looked"));
        assert!(!world.store.is_untouched(&open).await.expect("looked"));
        assert!(world.store.usage_of_open(&open).await.expect("measured").bytes > 100_000);
        let sealing = world.store.seal(&open, &SealOptions::default()).await;
        assert!(matches!(sealing, Err(StoreError::OnDisk { .. })), "{sealing:?}");

        let filled = world.store.import_disk(&open, &archive[..], AMPLE).await.expect("filled");
        assert_eq!(filled.left_out, 0);
        assert!(filled.files > 10, "{filled:?}");
        assert!(!world.store.has_disk(&open).expect("looked"));
        assert!(!world.store.diff_dir(&open).with_file_name("filling").exists());
        let mut found = describe(&world.store.diff_dir(&open));
        // Archives have no sockets, and tar makes each whiteout by itself.
        for tree in [&mut expected, &mut found] {
            tree.retain(|_, what| !what.contains("socket"));
            for what in tree.values_mut().filter(|what| what.contains("device 0")) {
                what.truncate(what.find(" same as").unwrap_or(what.len()));
            }
        }
        assert_same("the upper directory", &expected, &found);
        let layer = world.store.seal(&open, &SealOptions::default()).await.expect("sealed");
        let chain = [layer.expect("something was written").id, image.clone()];
        assert_same("what it shows", &seen, &world.view(&chain));
        let sparse = world.store.diff_dir(&chain[0]).join("sparse");
        if let Ok(found) = fs::metadata(sparse) {
            assert!(found.blocks() * 512 < 1 << 20, "holes stay holes");
        }
    }
}

/// Removes marks of the kernel's that mean something on the stack they were made on alone.
fn forget_the_stack(dir: &Path) {
    for mark in ["user.overlay.origin", "user.overlay.impure", "user.overlay.uuid"] {
        let _ = rustix::fs::lremovexattr(dir, mark);
    }
    if fs::symlink_metadata(dir).expect("there").is_dir() {
        for entry in fs::read_dir(dir).expect("a directory").flatten() {
            forget_the_stack(&entry.path());
        }
    }
}

/// What root of a machine wrote below its own overlay, or an agent that it has taken over into the stream.
#[tokio::test]
async fn an_export_brings_no_attributes_that_are_the_hosts_or_overlayfs_own() {
    let world = World::new();
    let upper = world.store.begin(&[]).await.expect("begun");
    let dir = world.store.diff_dir(&upper);
    fs::create_dir(dir.join("dir")).expect("a directory");
    fs::create_dir(dir.join("hides")).expect("a directory");
    fs::write(dir.join("file"), "content").expect("a file");
    std::os::unix::fs::symlink("file", dir.join("link")).expect("a link");
    let capability = [1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    for name in ["dir", "file"] {
        let path = dir.join(name);
        for attribute in [
            "user.overlay.redirect",
            "user.overlay.metacopy",
            "user.overlay.origin",
            "user.overlay.upper",
            "user.overlay.nlink",
            "trusted.overlay.opaque",
            "trusted.overlay.redirect",
            "trusted.mark",
            "security.selinux",
            "security.ima",
            "security.made-up",
            "user.kept",
        ] {
            // What this host's kernel does not know is not there to be exported.
            let _ = rustix::fs::lsetxattr(&path, attribute, b"y", rustix::fs::XattrFlags::empty());
        }
    }
    set_xattr(&dir.join("link"), "trusted.mark", b"y");
    set_xattr(&dir.join("file"), "user.overlay.opaque", b"y");
    set_xattr(&dir.join("hides"), "user.overlay.opaque", b"y");
    set_xattr(&dir.join("file"), "security.capability", &capability);
    set_xattr(&dir.join("dir"), "system.posix_acl_access", &acl());
    let archive = exported(&dir);

    let open = on_disk(&world, &[]).await;
    let filled = world.store.import_disk(&open, &archive[..], AMPLE).await.expect("filled");
    assert!(filled.left_out >= 7, "{filled:?}");
    let names = |name: &str| {
        let found = xattr::list(world.store.diff_dir(&open).join(name)).expect("readable");
        let mut found: Vec<_> = found.map(|name| name.into_string().expect("text")).collect();
        found.sort();
        found
    };
    assert_eq!(names("dir"), ["system.posix_acl_access", "user.kept"]);
    assert_eq!(names("file"), ["security.capability", "user.kept"]);
    assert_eq!(names("hides"), ["user.overlay.opaque"]);
    assert_eq!(names("link"), [""; 0]);
}

/// An access list that lets user 1000 read.
fn acl() -> Vec<u8> {
    let mut bytes = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in [
        (1u16, 6u16, u32::MAX),
        (2, 4, 1000),
        (4, 4, u32::MAX),
        (16, 4, u32::MAX),
        (32, 4, u32::MAX),
    ] {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(permissions.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

#[tokio::test]
async fn nothing_written_is_no_layer() {
    let world = World::new();
    let image = world.image(nasty).await;
    let open = on_disk(&world, std::slice::from_ref(&image)).await;
    let upper = world.store.begin(std::slice::from_ref(&image)).await.expect("begun");
    let archive = exported(&world.store.diff_dir(&upper));
    world.store.import_disk(&open, &archive[..], AMPLE).await.expect("filled");
    assert!(world.store.is_untouched(&open).await.expect("looked"));
    let sealed = world.store.seal(&open, &SealOptions::default()).await.expect("sealed");
    assert_eq!(sealed, None);
}

#[tokio::test]
async fn deep_trees_and_many_whiteouts_pass() {
    let world = World::new();
    let upper = world.store.begin(&[]).await.expect("begun");
    let dir = world.store.diff_dir(&upper);
    // Deeper than a path can be named at once.
    let script = "n=$(printf 'd%.0s' $(seq 100)); for i in $(seq 60); do mkdir $n && cd -P $n || exit 1; done; echo deep > leaf";
    let made = Command::new("bash").args(["-c", script]).current_dir(&dir).status();
    assert!(made.expect("bash runs").success());
    // The kernel makes all whiteouts of one inode.
    let first = dir.join("gone-0");
    let node = rustix::fs::mknodat(
        rustix::fs::CWD,
        &first,
        rustix::fs::FileType::CharacterDevice,
        rustix::fs::Mode::empty(),
        0,
    );
    node.expect("a whiteout");
    for number in 1..5 {
        fs::hard_link(&first, dir.join(format!("gone-{number}"))).expect("another name");
    }
    let archive = exported(&dir);
    let open = on_disk(&world, &[]).await;
    let filled = world.store.import_disk(&open, &archive[..], AMPLE).await.expect("filled");
    assert_eq!((filled.files, filled.left_out), (66, 0));
    let found = world.store.diff_dir(&open);
    for number in 0..5 {
        let node = fs::symlink_metadata(found.join(format!("gone-{number}"))).expect("a whiteout");
        assert!(node.file_type().is_char_device() && node.rdev() == 0);
    }
}

fn entry(path: &str, kind: EntryType, link: &str, content: &[u8]) -> Vec<u8> {
    let mut header = Header::new_ustar();
    let block = header.as_mut_bytes();
    block[..path.len()].copy_from_slice(path.as_bytes());
    block[157..157 + link.len()].copy_from_slice(link.as_bytes());
    header.set_entry_type(kind);
    header.set_mode(0o755);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(1);
    header.set_size(content.len() as u64);
    if kind.is_character_special() {
        header.set_device_major(1).expect("a number");
        header.set_device_minor(3).expect("a number");
    }
    header.set_cksum();
    let mut bytes = header.as_bytes().to_vec();
    bytes.extend_from_slice(content);
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

#[tokio::test]
async fn hostile_and_broken_streams_change_nothing() {
    let world = World::new();
    let precious = world.dir().join("precious");
    fs::write(&precious, "precious").expect("a file");
    let open = on_disk(&world, &[]).await;
    let top = entry("./", EntryType::Directory, "", b"");
    let file = entry("./f", EntryType::Regular, "", b"content");
    let end = vec![0; 1024];
    let outside = world.dir().to_str().expect("text").to_owned();
    let link = entry("./out", EntryType::Symlink, &outside, b"");
    for (name, parts) in [
        ("no end", vec![top.clone(), file.clone()]),
        ("cut", vec![top.clone(), file[..600].to_vec()]),
        ("nothing", vec![]),
        ("garbage", vec![vec![7; 5000]]),
        ("no top", vec![file.clone(), end.clone()]),
        ("climbs", vec![top.clone(), entry("./../x", EntryType::Regular, "", b"x"), end.clone()]),
        (
            "through a link",
            vec![
                top.clone(),
                link.clone(),
                entry("./out/precious", EntryType::Regular, "", b"x"),
                end.clone(),
            ],
        ),
        (
            "a hard link out",
            vec![
                top.clone(),
                link,
                entry("./h", EntryType::Link, "./out/precious", b""),
                end.clone(),
            ],
        ),
        (
            "a hard link to nothing",
            vec![top.clone(), entry("./h", EntryType::Link, "/etc/passwd", b""), end.clone()],
        ),
        ("top is a file", vec![entry(".", EntryType::Regular, "", b""), end.clone()]),
        (
            "unknown kind",
            vec![top.clone(), entry("./u", EntryType::new(b'Z'), "", b""), end.clone()],
        ),
    ] {
        let outcome = world.store.import_disk(&open, &parts.concat()[..], AMPLE).await;
        let refused = matches!(outcome, Err(StoreError::BadExport { .. } | StoreError::Io { .. }));
        assert!(refused, "{name}: {outcome:?}");
        assert!(world.store.has_disk(&open).expect("looked"), "{name}: the disk stays");
        let diff = world.store.diff_dir(&open);
        assert_eq!(fs::read_to_string(diff.join("stale")).expect(name), "not the truth");
        assert!(!diff.with_file_name("filling").exists(), "{name}: nothing is left");
        assert_eq!(fs::read_to_string(&precious).expect("it is there"), "precious", "{name}");
    }
    // What is merely odd passes: a device is left out, and the good one after all the bad ones is taken.
    let device = entry("./null", EntryType::Char, "", b"");
    let good = [top, device, file, end].concat();
    let filled = world.store.import_disk(&open, &good[..], AMPLE).await.expect("filled");
    assert_eq!((filled.files, filled.bytes, filled.left_out), (1, 7, 1));
    assert!(!world.store.diff_dir(&open).join("stale").exists());
}

#[tokio::test]
async fn a_reader_that_fails_or_goes_away_changes_nothing() {
    let world = World::new();
    let open = on_disk(&world, &[]).await;
    let top = entry("./", EntryType::Directory, "", b"");
    let broken = tokio_test_reader(top.clone(), std::io::ErrorKind::ConnectionReset);
    let outcome = world.store.import_disk(&open, broken, AMPLE).await;
    assert!(matches!(outcome, Err(StoreError::BadExport { .. })), "{outcome:?}");
    // Its agent died: nothing is wrong with what it wrote.
    let died = tokio_test_reader(top.clone(), std::io::ErrorKind::ConnectionAborted);
    let outcome = world.store.import_disk(&open, died, AMPLE).await;
    assert!(matches!(outcome, Err(StoreError::ExportLost { .. })), "{outcome:?}");
    assert!(world.store.has_disk(&open).expect("looked"), "the disk stays");
    // One that hangs, and is given up.
    let (mut writer, reader) = tokio::io::duplex(1024);
    tokio::io::AsyncWriteExt::write_all(&mut writer, &top).await.expect("written");
    let waiting = tokio::time::timeout(
        std::time::Duration::from_millis(100),
        world.store.import_disk(&open, reader, AMPLE),
    );
    assert!(waiting.await.is_err(), "it waits");
    let archive = [top, vec![0; 1024]].concat();
    let mut tries = 0;
    // The one that was given up may still be putting its things away.
    while let Err(error) = world.store.import_disk(&open, &archive[..], AMPLE).await {
        tries += 1;
        assert!(tries < 50, "{error:?}");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    assert!(!world.store.has_disk(&open).expect("looked"));
}

/// Reads what it is given, and then fails.
fn tokio_test_reader(
    bytes: Vec<u8>,
    kind: std::io::ErrorKind,
) -> impl tokio::io::AsyncRead + Unpin + Send {
    struct Failing(Vec<u8>, std::io::ErrorKind);
    impl tokio::io::AsyncRead for Failing {
        fn poll_read(
            mut self: std::pin::Pin<&mut Self>,
            _: &mut std::task::Context<'_>,
            into: &mut tokio::io::ReadBuf<'_>,
        ) -> std::task::Poll<std::io::Result<()>> {
            if self.0.is_empty() {
                return std::task::Poll::Ready(Err(self.1.into()));
            }
            into.put_slice(&std::mem::take(&mut self.0));
            std::task::Poll::Ready(Ok(()))
        }
    }
    Failing(bytes, kind)
}

/// A stream with a given beginning that never ends.
struct Endless {
    begin: std::io::Cursor<Vec<u8>>,
    again: Vec<u8>,
    at: usize,
}

impl tokio::io::AsyncRead for Endless {
    fn poll_read(
        mut self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
        into: &mut tokio::io::ReadBuf<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        let mut piece = vec![0; into.remaining()];
        let read = std::io::Read::read(&mut self.begin, &mut piece).expect("memory reads");
        if read > 0 {
            into.put_slice(&piece[..read]);
            return std::task::Poll::Ready(Ok(()));
        }
        let this = &mut *self;
        let most = into.remaining().min(this.again.len() - this.at);
        into.put_slice(&this.again[this.at..this.at + most]);
        this.at = (this.at + most) % this.again.len();
        std::task::Poll::Ready(Ok(()))
    }
}

#[tokio::test]
async fn no_more_comes_out_of_a_disk_than_fits_into_it() {
    let world = World::new();
    let open = on_disk(&world, &[]).await;
    let top = entry("./", EntryType::Directory, "", b"");
    let end = vec![0; 1024];
    let mut huge = entry("./f", EntryType::Regular, "", b"");
    let mut header = Header::from_byte_slice(&huge).clone();
    header.set_size(1 << 50);
    header.set_cksum();
    huge[..512].copy_from_slice(header.as_bytes());
    let most = export_limit(0, world.store.length_of_disk(&open).expect("measured"));
    for (name, begin, again) in [
        ("content", [top.clone(), huge.clone()].concat(), vec![7; 4096]),
        ("zeros, which take no room", [top.clone(), huge].concat(), vec![0; 4096]),
        ("files", top.clone(), entry("./e", EntryType::Regular, "", b"")),
        ("after its end", [top.clone(), end.clone()].concat(), vec![0; 512]),
    ] {
        let endless = Endless { begin: std::io::Cursor::new(begin), again, at: 0 };
        let outcome = world.store.import_disk(&open, endless, most).await;
        assert!(matches!(outcome, Err(StoreError::BadExport { .. })), "{name}: {outcome:?}");
        assert!(world.store.has_disk(&open).expect("looked"), "{name}: the disk stays");
        let diff = world.store.diff_dir(&open);
        assert_eq!(fs::read_to_string(diff.join("stale")).expect(name), "not the truth");
        assert!(!diff.with_file_name("filling").exists(), "{name}: nothing is left");
    }
    let good = [top, entry("./f", EntryType::Regular, "", b"content"), end].concat();
    world.store.import_disk(&open, &good[..], most).await.expect("filled");
}
