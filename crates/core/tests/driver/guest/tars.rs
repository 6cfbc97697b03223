//! Tar streams, friendly and hostile.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use sandkeep_core::guest::{Guest, GuestError, TransferSummary};
use sandkeep_proto::link::{At, EntryKind, Failure};
use tar::{Archive, Builder, EntryType, Header};

use crate::guest::machine::{Machine, all, at, at_as, failure, put};

/// An entry with whatever name and link target, which the tar library would refuse to write.
fn raw(builder: &mut Builder<Vec<u8>>, kind: EntryType, name: &[u8], link: &[u8], data: &[u8]) {
    let mut header = Header::new_gnu();
    header.as_old_mut().name[..name.len()].copy_from_slice(name);
    header.as_old_mut().linkname[..link.len()].copy_from_slice(link);
    header.set_entry_type(kind);
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(1_000_000_000);
    header.set_size(data.len() as u64);
    header.set_cksum();
    builder.append(&header, data).expect("memory");
}

/// Kind, name, link target, content.
type Piece<'a> = (EntryType, &'a [u8], &'a [u8], &'a [u8]);

fn archive(entries: &[Piece<'_>]) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    for (kind, name, link, data) in entries {
        raw(&mut builder, *kind, name, link, data);
    }
    builder.into_inner().expect("memory")
}

async fn unpack(guest: &Guest, at: At, bytes: &[u8]) -> Result<TransferSummary, GuestError> {
    put(guest.tar_in(at, false).await?, bytes).await
}

async fn pack(guest: &Guest, at: At) -> Vec<u8> {
    let (_, mut incoming) = guest.tar_out(at).await.expect("it can be packed");
    all(&mut incoming).await.expect("it is packed")
}

/// Everything below a directory that a copy must have kept.
fn describe(dir: &Path) -> BTreeMap<Vec<u8>, String> {
    let mut seen = BTreeMap::new();
    let mut todo = vec![dir.to_owned()];
    while let Some(path) = todo.pop() {
        let meta = fs::symlink_metadata(&path).expect("there");
        let name = path.strip_prefix(dir).expect("below").as_os_str().as_bytes().to_vec();
        let content = if meta.is_symlink() {
            format!("{:?}", fs::read_link(&path).expect("a link"))
        } else if meta.is_file() {
            format!("{:?}", fs::read(&path).expect("readable"))
        } else {
            todo.extend(fs::read_dir(&path).expect("readable").map(|e| e.expect("entry").path()));
            String::new()
        };
        let links = if meta.is_dir() { 0 } else { meta.nlink() };
        let traits = (meta.mode(), meta.uid(), meta.gid(), meta.mtime(), links);
        let attribute = xattr::get(&path, "user.colour").unwrap_or_default();
        seen.insert(name, format!("{traits:?} {attribute:?} {content}"));
    }
    seen
}

#[tokio::test]
async fn a_tree_survives_the_round_trip() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let tree = machine.work().join("tree");
    fs::create_dir_all(tree.join("sub/empty")).expect("our own");
    fs::write(tree.join("sub/file"), vec![7; 300_000]).expect("our own");
    fs::hard_link(tree.join("sub/file"), tree.join("twin")).expect("our own");
    symlink("../a//b/./c/", tree.join("link")).expect("our own");
    symlink("x".repeat(500), tree.join("long-link")).expect("our own");
    fs::write(tree.join("n".repeat(255)), "long").expect("our own");
    fs::write(tree.join(OsStr::from_bytes(b"odd\xff\nname")), "odd").expect("our own");
    fs::write(tree.join("sub/setuid"), "s").expect("our own");
    std::os::unix::fs::chown(tree.join("sub/setuid"), Some(12), Some(34)).expect("our own");
    fs::set_permissions(tree.join("sub/setuid"), PermissionsExt::from_mode(0o6755)).expect("own");
    fs::set_permissions(tree.join("sub/empty"), PermissionsExt::from_mode(0o500)).expect("own");
    let _ = xattr::set(tree.join("sub/file"), "user.colour", b"blue\0\xff");
    let _socket = std::os::unix::net::UnixListener::bind(tree.join("socket")).expect("our own");

    let bytes = pack(&guest, at(&tree)).await;
    let into = machine.work().join("into");
    let moved = unpack(&guest, at(&into), &bytes).await.expect("it is unpacked");
    // Directories do not count.
    let mut content = 0;
    for entry in Archive::new(bytes.as_slice()).entries().expect("an archive") {
        content += entry.expect("an entry").size();
    }
    assert_eq!((moved.bytes, moved.files), (content, 7));
    fs::remove_file(tree.join("socket")).expect("our own");
    let (before, after) = (describe(&tree), describe(&into.join("tree")));
    // Taking the socket away has changed the directory's own time.
    for (name, seen) in &before {
        if !name.is_empty() {
            assert_eq!(after.get(name), Some(seen), "{:?}", OsStr::from_bytes(name));
        }
    }
    assert_eq!(before.len(), after.len());
}

#[tokio::test]
async fn a_single_file_and_a_missing_one() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let file = machine.work().join("file");
    fs::write(&file, "text").expect("our own");
    let (entry, mut incoming) = guest.tar_out(at(&file)).await.expect("it can be packed");
    assert_eq!(entry.kind, EntryKind::File);
    let bytes = all(&mut incoming).await.expect("it is packed");
    let mut archive = Archive::new(bytes.as_slice());
    let mut entries = archive.entries().expect("an archive");
    let mut only = entries.next().expect("an entry").expect("sound");
    assert_eq!(only.path().expect("a name").as_ref(), Path::new("file"));
    let mut text = String::new();
    only.read_to_string(&mut text).expect("text");
    assert_eq!(text, "text");
    let missing = guest.tar_out(at(Path::new("/no/such"))).await;
    assert_eq!(failure(missing.map(|_| ())), Failure::NotFound);
}

#[tokio::test]
async fn hostile_entries_are_refused_and_touch_nothing_outside() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let work = machine.work();
    let outside = work.join("outside");
    fs::create_dir(&outside).expect("our own");
    fs::write(outside.join("kept"), "kept").expect("our own");
    let outside_name = outside.to_str().expect("plain").as_bytes();
    let absolute = [outside_name, b"/x"].concat();
    let kept = [outside_name, b"/kept"].concat();
    let (file, link, hard) = (EntryType::Regular, EntryType::Symlink, EntryType::Link);
    type Entries<'a> = Vec<(EntryType, &'a [u8], &'a [u8], &'a [u8])>;
    let cases: Vec<(&str, Entries<'_>)> = vec![
        ("dots", vec![(file, b"../x", b"", b"x")]),
        ("dots inside", vec![(file, b"a/../../x", b"", b"x")]),
        ("absolute", vec![(file, &absolute, b"", b"x")]),
        ("through a link", vec![(link, b"l", outside_name, b""), (file, b"l/x", b"", b"x")]),
        (
            "through two links",
            vec![
                (link, b"l", b"m", b""),
                (link, b"m", b"../outside", b""),
                (file, b"l/x", b"", b"x"),
            ],
        ),
        (
            "a directory through a link",
            vec![(link, b"l", outside_name, b""), (EntryType::Directory, b"l/d/", b"", b"")],
        ),
        ("a hard link to outside", vec![(hard, b"h", &kept, b"")]),
        ("a hard link upwards", vec![(hard, b"h", b"../outside/kept", b"")]),
        (
            "a hard link through a link",
            vec![(link, b"l", outside_name, b""), (hard, b"h", b"l/kept", b"")],
        ),
        ("a device", vec![(EntryType::Char, b"null", b"", b"")]),
        ("a block device", vec![(EntryType::Block, b"sda", b"", b"")]),
        ("a link to nowhere", vec![(link, b"l", b"", b"")]),
        ("an unknown kind", vec![(EntryType::new(b'Z'), b"z", b"", b"")]),
    ];
    for (case, entries) in cases {
        let into = work.join("into");
        let outcome = unpack(&guest, at(&into), &archive(&entries)).await;
        let error = outcome.expect_err(case);
        assert_eq!(error.failure(), Some(Failure::Invalid), "{case}: {error}");
        let left: Vec<_> = fs::read_dir(&outside).expect("there").collect();
        assert_eq!(left.len(), 1, "{case}: nothing was put outside");
        assert_eq!(fs::metadata(outside.join("kept")).expect("there").nlink(), 1, "{case}");
        assert!(!work.join("x").exists(), "{case}");
        fs::remove_dir_all(&into).expect("our own");
    }
}

#[tokio::test]
async fn what_stands_in_the_way_is_replaced_and_not_written_through() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let work = machine.work();
    let (outside, into) = (work.join("outside"), work.join("into"));
    fs::create_dir(&into).expect("our own");
    fs::write(&outside, "kept").expect("our own");
    symlink(&outside, into.join("link")).expect("our own");
    fs::hard_link(&outside, into.join("twin")).expect("our own");
    symlink(&work, into.join("dir")).expect("our own");
    let bytes = archive(&[
        (EntryType::Regular, b"./link", b"", b"new"),
        (EntryType::Regular, b"twin", b"", b"new"),
        (EntryType::Directory, b"dir/", b"", b""),
        (EntryType::Regular, b"dir/x", b"", b"x"),
        (EntryType::Regular, b"made/on/the/way", b"", b"x"),
    ]);
    unpack(&guest, at(&into), &bytes).await.expect("it is unpacked");
    assert_eq!(fs::read_to_string(&outside).expect("there"), "kept");
    for name in ["link", "twin"] {
        assert_eq!(fs::read_to_string(into.join(name)).expect("there"), "new");
    }
    assert!(fs::symlink_metadata(into.join("dir")).expect("there").is_dir());
    assert!(into.join("made/on/the/way").exists());
    assert!(!work.join("x").exists());
}

#[tokio::test]
async fn others_own_what_they_unpack() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let open = machine.work().join("open");
    fs::create_dir(&open).expect("our own");
    fs::set_permissions(&open, PermissionsExt::from_mode(0o777)).expect("our own");
    let mut builder = Builder::new(Vec::new());
    let mut header = Header::new_gnu();
    header.set_uid(12);
    header.set_gid(34);
    header.set_mode(0o4755);
    header.set_size(1);
    builder.append_data(&mut header, "file", &b"x"[..]).expect("memory");
    let bytes = builder.into_inner().expect("memory");
    unpack(&guest, at_as(&open, "nobody"), &bytes).await.expect("it is unpacked");
    let meta = fs::metadata(open.join("file")).expect("there");
    assert_eq!((meta.uid(), meta.gid(), meta.mode() & 0o7777), (65534, 65534, 0o4755));
    let mine = machine.work().join("mine");
    let refused = unpack(&guest, at_as(&mine, "nobody"), &bytes).await;
    assert_eq!(failure(refused), Failure::Denied);
    unpack(&guest, at(&mine), &bytes).await.expect("it is unpacked");
    let meta = fs::metadata(mine.join("file")).expect("there");
    assert_eq!((meta.uid(), meta.gid(), meta.mode() & 0o7777), (12, 34, 0o4755));
}

#[tokio::test]
async fn what_is_no_archive_is_refused() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let into = machine.work().join("into");
    let garbage: Vec<u8> =
        (0..600_000_u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    assert_eq!(failure(unpack(&guest, at(&into), &garbage).await), Failure::Invalid);
    let whole = archive(&[(EntryType::Regular, b"file", b"", &[1; 5000])]);
    assert_eq!(failure(unpack(&guest, at(&into), &whole[..3000]).await), Failure::Invalid);
    // Headers without end are not collected in memory.
    let mut endless = Header::new_gnu();
    endless.set_entry_type(EntryType::GNULongName);
    endless.set_size(1 << 30);
    endless.set_cksum();
    let mut bytes = endless.as_bytes().to_vec();
    bytes.extend(vec![b'a'; 8 << 20]);
    assert_eq!(failure(unpack(&guest, at(&into), &bytes).await), Failure::Invalid);
    assert_eq!(unpack(&guest, at(&into), &[]).await.expect("an empty stream is empty").files, 0);
    let there = guest.stat(at(&into)).await.expect("the agent is well");
    assert_eq!(there.kind, EntryKind::Directory);
}

#[tokio::test]
async fn sparse_files_of_posix_archives_are_unpacked_as_they_were() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let from = machine.work().join("from");
    fs::create_dir(&from).expect("our own directory");
    let file = fs::File::create(from.join("holes")).expect("our own directory");
    for at in 0..100_u64 {
        std::os::unix::fs::FileExt::write_at(&file, b"data", at << 16).expect("our own");
    }
    file.set_len(20 << 20).expect("our own");
    fs::write(from.join("after"), "it").expect("our own");
    for options in [
        &["--format=gnu"][..],
        &["--format=posix", "--sparse-version=0.0"],
        &["--format=posix", "--sparse-version=0.1"],
        &["--format=posix", "--sparse-version=1.0"],
    ] {
        let mut tar = Command::new("tar");
        tar.arg("--sparse").args(options).args(["-cf", "-", "-C"]).arg(&from);
        let archive = tar.args(["holes", "after"]).output().expect("tar is a program").stdout;
        assert!(archive.len() < 2 << 20, "{options:?}: tar wrote it sparse");
        let into = machine.work().join("into");
        let moved = unpack(&guest, at(&into), &archive).await.expect("it is unpacked");
        assert_eq!((moved.bytes, moved.files), ((20 << 20) + 2, 2), "{options:?}");
        for name in ["holes", "after"] {
            let same = fs::read(from.join(name)).expect("ours")
                == fs::read(into.join(name)).expect("there");
            assert!(same, "{options:?}: {name}");
        }
        assert!(into.join("holes").metadata().expect("there").blocks() < 4 << 11, "{options:?}");
        assert_eq!(into.read_dir().expect("there").count(), 2, "{options:?}");
        fs::remove_dir_all(into).expect("our own");
    }
    // A map that says more than there is.
    let mut builder = Builder::new(Vec::new());
    let map = [("GNU.sparse.size", &b"10"[..]), ("GNU.sparse.map", &b"0,9"[..])];
    builder.append_pax_extensions(map).expect("memory");
    raw(&mut builder, EntryType::Regular, b"wrong", b"", b"data");
    let archive = builder.into_inner().expect("memory");
    let refused = unpack(&guest, at(&machine.work()), &archive).await.expect_err("it is wrong");
    let told = refused.to_string();
    assert!(told.contains("`wrong`") && told.contains("sparse"), "{told}");
}

#[tokio::test]
async fn a_stream_that_is_no_tar_is_refused_in_plain_words() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let archive = archive(&[(EntryType::Regular, b"a", b"", b"x")]);
    for (format, magic) in [
        ("gzip", &b"\x1f\x8b\x08"[..]),
        ("bzip2", &b"BZh9"[..]),
        ("xz", &b"\xfd7zXZ\0"[..]),
        ("zstd", &b"\x28\xb5\x2f\xfd"[..]),
    ] {
        let sent = [magic, &archive].concat();
        let refused = unpack(&guest, at(&machine.work()), &sent).await.expect_err("no tar");
        assert!(refused.to_string().contains(&format!("compressed with {format}")), "{refused}");
    }
    let binary: Vec<u8> = (0..=255).cycle().skip(128).take(4096).collect();
    let told = unpack(&guest, at(&machine.work()), &binary).await.expect_err("no tar").to_string();
    assert!(told.chars().all(|c| !c.is_control() && c != '\u{fffd}'), "{told:?}");
}

#[tokio::test]
async fn files_written_one_by_one_go_through_links_and_over_no_directory() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let (work, real) = (machine.work(), machine.work().join("real"));
    fs::create_dir_all(real.join("empty")).expect("our own directory");
    fs::write(real.join("target"), "long before").expect("our own directory");
    symlink("real", work.join("linked")).expect("our own directory");
    symlink("target", real.join("link")).expect("our own directory");
    let unpack = async |entries: &[Piece<'_>]| {
        let outgoing = guest.tar_in(at(&work), true).await?;
        put(outgoing, &archive(entries)).await
    };
    let file = EntryType::Regular;
    let entries: [Piece<'_>; 3] = [
        (EntryType::Directory, b"linked", b"", b""),
        (file, b"linked/new", b"", b"new"),
        (file, b"linked/link", b"", b"after"),
    ];
    unpack(&entries).await.expect("as any program would");
    assert!(fs::symlink_metadata(work.join("linked")).expect("there").is_symlink());
    assert_eq!(fs::read(real.join("new")).expect("through the link"), b"new");
    assert_eq!(fs::read(real.join("target")).expect("through the link"), b"after");
    for name in [&b"linked/empty"[..], b"real", b"", b"."] {
        let refused = unpack(&[(file, name, b"", b"x")]).await;
        assert_eq!(failure(refused), Failure::Invalid, "{}", String::from_utf8_lossy(name));
    }
    assert!(real.join("empty").is_dir() && real.is_dir(), "what was there stays");
    for name in [&b"../out"[..], b"/out", b"linked/../../out"] {
        assert_eq!(failure(unpack(&[(file, name, b"", b"x")]).await), Failure::Invalid);
    }
}
