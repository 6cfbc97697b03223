//! Unpacking layers: what archives say, what they leave open, and what they try.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::image_support::{Archive, Meta, PLAIN, digest, drawn, gzip, picture, zstd};
use proptest::prelude::*;
use sandkeep_core::store::image::{Form, ImageError, UnpackRoom, Unpacked, unpack_layer};
use tar::EntryType;
use tempfile::TempDir;

const AMPLE: UnpackRoom = UnpackRoom { bytes: 1 << 30, entries: u64::MAX, why: "in tests" };

/// A place to unpack in, next to which lies something that must stay as it is.
struct Bench {
    dir: TempDir,
}

impl Bench {
    fn new() -> Self {
        let dir = TempDir::new().expect("a directory");
        fs::create_dir(dir.path().join("diff")).expect("a directory");
        fs::create_dir(dir.path().join("outside")).expect("a directory");
        fs::write(dir.path().join("outside/precious"), "precious").expect("a file");
        Self { dir }
    }

    fn diff(&self) -> PathBuf {
        self.dir.path().join("diff")
    }

    fn unpack(&self, bytes: &[u8]) -> Result<Unpacked, ImageError> {
        unpack_layer("it", bytes, Form::Layer, &self.diff(), &[], AMPLE)
    }

    fn outside_is_untouched(&self) -> bool {
        let names: Vec<String> = picture(self.dir.path())
            .into_iter()
            .filter(|(name, _)| !name.starts_with("diff/"))
            .map(|(name, what)| format!("{name}: {what}"))
            .collect();
        names == ["diff: dir 755", "outside: dir 755", "outside/precious: 644 precious"]
    }
}

fn unpacked(bytes: &[u8]) -> Bench {
    let bench = Bench::new();
    bench.unpack(bytes).expect("a good archive");
    bench
}

#[test]
fn owners_modes_times_links_and_attributes_are_kept() {
    const CAPABILITY: [u8; 20] = [1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let odd = Meta { mode: 0o4751, uid: 1234, gid: 70000, mtime: 1_234_567_890 };
    let long = "x".repeat(120) + "/" + &"y".repeat(200);
    let bench = unpacked(
        &Archive::new()
            .dir("./", 0o711)
            .dir("tmp/", 0o1777)
            .pax(&[
                ("mtime", b"1234567890.25"),
                ("SCHILY.xattr.user.note", b"a\nb=c"),
                ("SCHILY.xattr.security.capability", &CAPABILITY),
                ("SCHILY.xattr.user.overlay.opaque", b"y"),
                ("SCHILY.xattr.trusted.overlay.redirect", b"/"),
                ("SCHILY.xattr.security.selinux", b"label"),
            ])
            .entry(EntryType::Regular, "tmp/tool", "", &odd, b"content")
            .hard_link("tmp/same", "tmp/tool")
            .symlink("tmp/link", "/anywhere/../at/all")
            .entry(EntryType::Fifo, "tmp/pipe", "", &PLAIN, b"")
            .file(&long, "long")
            .pax(&[("path", "namen/ü\n".as_bytes())])
            .file("short", "odd")
            .end(),
    );
    let diff = bench.diff();
    let tool = fs::metadata(diff.join("tmp/tool")).expect("it is there");
    assert_eq!((tool.mode() & 0o7777, tool.uid(), tool.gid()), (0o4751, 1234, 70000));
    assert_eq!((tool.mtime(), tool.mtime_nsec()), (1_234_567_890, 250_000_000));
    assert_eq!(fs::metadata(diff.join("tmp/same")).expect("it is there").ino(), tool.ino());
    let mut names: Vec<_> = xattr::list(diff.join("tmp/tool")).expect("readable").collect();
    names.sort();
    assert_eq!(names, ["security.capability", "user.note"]);
    let value = xattr::get(diff.join("tmp/tool"), "user.note").expect("readable");
    assert_eq!(value.as_deref(), Some(&b"a\nb=c"[..]));
    let times = |name: &str| fs::symlink_metadata(diff.join(name)).expect("it is there").mtime();
    assert_eq!(
        (times("tmp"), times("tmp/link"), times("")),
        (1_000_000_000, 1_000_000_000, 1_000_000_000)
    );
    assert_eq!(fs::metadata(&diff).expect("it is there").mode() & 0o7777, 0o711);
    assert_eq!(fs::read_to_string(diff.join(&long)).expect("it is there"), "long");
    let all = picture(&diff);
    assert_eq!(all["tmp"], "dir 1777");
    assert_eq!(all["tmp/link"], "-> /anywhere/../at/all");
    assert_eq!(all["tmp/pipe"], "pipe 644");
    assert_eq!(all["namen/ü\n"], "644 odd");
}

#[test]
fn whiteouts_hide_what_is_below_and_nothing_of_their_own_layer() {
    let archive = Archive::new()
        .dir("etc", 0o755)
        .file("etc/.wh.gone", "")
        .file("etc/.wh.replaced", "")
        .file("etc/replaced", "new")
        .file("etc/kept", "kept")
        .file("etc/.wh.kept", "")
        .dir("over", 0o755)
        .file("over/new", "new")
        .file("over/.wh..wh..opq", "")
        .file(".wh.tree", "")
        .dir("tree", 0o700)
        .file("tree/new", "new")
        .dir("tree2", 0o755)
        .file(".wh.tree2", "")
        .file("implied/.wh.x", "")
        .file(".wh..wh.plnk", "")
        .end();
    insta::assert_snapshot!(drawn(&unpacked(&archive).diff()), @r"
    etc: dir 755
    etc/gone: ~
    etc/kept: 644 kept
    etc/replaced: 644 new
    implied: dir 755
    implied/x: ~
    over: dir 755 !
    over/new: 644 new
    tree: dir 700 !
    tree/new: 644 new
    tree2: dir 755 !
    ");
}

#[test]
fn in_a_root_filesystem_such_names_are_just_names() {
    let bench = Bench::new();
    let archive = Archive::new().file(".wh.x", "text").end();
    unpack_layer("it", &archive[..], Form::Root, &bench.diff(), &[], AMPLE).expect("unpacks");
    assert_eq!(drawn(&bench.diff()), ".wh.x: 644 text\n");
}

#[test]
fn the_last_entry_of_a_name_counts() {
    let archive = Archive::new()
        .file("a", "first")
        .file("a", "second")
        .dir("b", 0o700)
        .file("b/c", "inside")
        .file("b", "now a file")
        .file("d", "a file")
        .dir("d", 0o711)
        .file("e", "a file")
        .file("e/f", "needs a directory")
        .dir("g", 0o755)
        .symlink("g", "d")
        .file("g/h", "through the link")
        .hard_link("a", "a")
        .end();
    insta::assert_snapshot!(drawn(&unpacked(&archive).diff()), @r"
    a: 644 second
    b: 644 now a file
    d: dir 711
    d/h: 644 through the link
    e: dir 755
    e/f: 644 needs a directory
    g: -> d
    ");
}

#[test]
fn nothing_is_written_outside() {
    let bench = Bench::new();
    let outside = bench.dir.path().join("outside");
    let outside = outside.to_str().expect("plain");
    let up = "../outside";
    let cases: Vec<(&str, Vec<u8>, bool)> = vec![
        ("absolute", Archive::new().file("/outside/x", "x").end(), true),
        ("dots", Archive::new().file("../outside/x", "x").end(), false),
        ("dots inside", Archive::new().file("a/../../outside/x", "x").end(), false),
        (
            "dots in pax",
            Archive::new().pax(&[("path", b"../outside/x")]).file("a", "x").end(),
            false,
        ),
        ("absolute link", Archive::new().symlink("l", outside).file("l/x", "x").end(), true),
        ("relative link", Archive::new().symlink("l", up).file("l/x", "x").end(), true),
        (
            "link to link",
            Archive::new().symlink("a", up).symlink("b", "a").dir("b/x", 0o777).end(),
            true,
        ),
        (
            "overwritten through a link",
            Archive::new().symlink("l", outside).file("l/precious", "x").end(),
            true,
        ),
        (
            "removed through a link",
            Archive::new().symlink("l", outside).file("l/.wh.precious", "").end(),
            true,
        ),
        ("attributes through a link", Archive::new().symlink("l", up).dir("l", 0o777).end(), true),
        ("link to itself", Archive::new().symlink("l", "l").file("l/x", "x").end(), false),
        (
            "hard link through a link",
            Archive::new().symlink("l", outside).hard_link("x", "l/precious").end(),
            false,
        ),
        ("hard link with dots", Archive::new().hard_link("x", "../outside/precious").end(), false),
        (
            "hard link from the top",
            Archive::new().hard_link("x", &format!("{outside}/precious")).end(),
            false,
        ),
        (
            "hard link to a link, then written",
            Archive::new()
                .symlink("l", &format!("{outside}/precious"))
                .hard_link("x", "l")
                .file("x", "overwritten")
                .end(),
            true,
        ),
        (
            "hard link to a directory",
            Archive::new().dir("d", 0o755).hard_link("x", "d").end(),
            false,
        ),
        ("a whiteout of ..", Archive::new().file("a/.wh...", "").end(), false),
        ("a whiteout of nothing", Archive::new().file("a/.wh.", "").end(), false),
        ("the top as a link", Archive::new().symlink("./", up).end(), false),
        ("the top as a file", Archive::new().file(".", "x").end(), false),
        ("too deep", Archive::new().file(&"a/".repeat(2000), "x").end(), false),
        ("too long a part", Archive::new().file(&"a".repeat(300), "x").end(), false),
    ];
    for (case, bytes, fits) in cases {
        fs::remove_dir_all(bench.diff()).expect("ours");
        fs::create_dir(bench.diff()).expect("ours");
        let outcome = bench.unpack(&bytes);
        assert_eq!(outcome.is_ok(), fits, "{case}: {outcome:?}");
        assert!(bench.outside_is_untouched(), "{case}: {}", drawn(bench.dir.path()));
    }
}

#[test]
fn names_and_links_that_are_too_long_are_the_archives_fault() {
    let long = "n".repeat(256);
    let fits = "n".repeat(255);
    let far = format!("{}t", "d/".repeat(2048));
    let entries: [(&str, EntryType, &str, &str); 8] = [
        (&long, EntryType::Regular, "", "a part of its name is longer than 255 bytes"),
        (
            &format!("a/{long}/b"),
            EntryType::Regular,
            "",
            "a part of its name is longer than 255 bytes",
        ),
        (&long, EntryType::Directory, "", "a part of its name is longer than 255 bytes"),
        (&long, EntryType::Symlink, "x", "a part of its name is longer than 255 bytes"),
        ("s", EntryType::Symlink, &far, "it is a symlink to a path of more than 4,095 bytes"),
        ("s", EntryType::Symlink, "", "it is a symlink to nothing"),
        ("h", EntryType::Link, &long, "it is a hard link to a name of more than 255 bytes"),
        ("h", EntryType::Link, &far, "it is a hard link to something that is not there"),
    ];
    for (name, kind, link, wanted) in entries {
        for form in [Form::Layer, Form::Root] {
            let bench = Bench::new();
            let archive = raw(name, kind, link);
            let refused = unpack_layer("it", &archive[..], form, &bench.diff(), &[], AMPLE)
                .expect_err("it does not fit");
            let ImageError::Refused { entry, reason } = &refused else {
                panic!("{kind:?} {wanted}: {refused}");
            };
            assert!(name.starts_with(entry.as_str()), "{entry}");
            assert!(reason.contains(wanted), "{kind:?}: {reason}");
            assert!(!refused.to_string().contains(&*bench.diff().to_string_lossy()));
        }
    }
    let fine = raw("s", EntryType::Symlink, &format!("{}/{}", "d".repeat(255), "d/".repeat(1900)));
    unpacked(&fine);
    unpacked(&raw(&fits, EntryType::Regular, ""));
}

/// An archive of one entry, with its names in PAX records.
fn raw(name: &str, kind: EntryType, link: &str) -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    let pairs = [("path", name.as_bytes()), ("linkpath", link.as_bytes())];
    let pairs = pairs.into_iter().filter(|(_, value)| !value.is_empty());
    archive.append_pax_extensions(pairs).expect("in memory");
    let mut header = tar::Header::new_ustar();
    header.set_path("cut").expect("short");
    header.set_entry_type(kind);
    header.set_mode(0o644);
    header.set_size(0);
    header.set_cksum();
    archive.append(&header, std::io::empty()).expect("in memory");
    archive.into_inner().expect("in memory")
}

#[test]
fn device_nodes_are_left_out_and_counted() {
    let bench = Bench::new();
    let archive = Archive::new()
        .entry(EntryType::Char, "null", "", &PLAIN, b"")
        .entry(EntryType::Block, "disk", "", &PLAIN, b"")
        .file("x", "x")
        .end();
    let unpacked = bench.unpack(&archive).expect("unpacks");
    assert_eq!((unpacked.devices, unpacked.files), (2, 1));
    assert_eq!(drawn(&bench.diff()), "x: 644 x\n");
}

/// A layer below, with a file, a directory that others may not enter and one behind a link.
fn below(dir: &Path) -> Vec<PathBuf> {
    let (upper, lower) = (dir.join("upper"), dir.join("lower"));
    for (path, archive) in [
        (
            &lower,
            Archive::new()
                .dir("private", 0o700)
                .file("private/file", "below")
                .entry(
                    EntryType::Regular,
                    "usr/bin/tool",
                    "",
                    &Meta { mode: 0o4755, ..PLAIN },
                    b"tool",
                )
                .symlink("bin", "usr/bin")
                .file("gone", "gone")
                .end(),
        ),
        (&upper, Archive::new().file(".wh.gone", "").file("private/other", "x").end()),
    ] {
        fs::create_dir(path).expect("ours");
        unpack_layer("it", &archive[..], Form::Layer, path, &[], AMPLE).expect("unpacks");
    }
    fs::set_permissions(upper.join("private"), std::os::unix::fs::PermissionsExt::from_mode(0o711))
        .expect("ours");
    vec![upper, lower]
}

#[test]
fn directories_that_are_not_described_look_as_they_do_below() {
    let bench = Bench::new();
    let others = TempDir::new().expect("a directory");
    let below = below(others.path());
    let archive = Archive::new().file("private/new", "x").file("fresh/new", "x").end();
    let unpacked = unpack_layer("it", &archive[..], Form::Layer, &bench.diff(), &below, AMPLE)
        .expect("unpacks");
    assert!(unpacked.borrowed);
    let all = picture(&bench.diff());
    assert_eq!((&*all["private"], &*all["fresh"]), ("dir 711", "dir 755"));
}

#[test]
fn hard_links_reach_into_the_layers_below() {
    let bench = Bench::new();
    let others = TempDir::new().expect("a directory");
    let below = below(others.path());
    let unpack = |archive: Vec<u8>| {
        unpack_layer("it", &archive[..], Form::Layer, &bench.diff(), &below, AMPLE)
    };
    let unpacked = unpack(Archive::new().hard_link("copy", "bin/tool").end()).expect("unpacks");
    assert!(unpacked.borrowed);
    let diff = bench.diff();
    let ino = |path: &Path| fs::metadata(path).expect("it is there").ino();
    assert_eq!(ino(&diff.join("copy")), ino(&diff.join("bin/tool")), "one file in this layer");
    assert_ne!(ino(&diff.join("copy")), ino(&below[1].join("usr/bin/tool")), "not that below");
    assert_eq!(picture(&diff)["copy"], "4755 tool");
    for target in ["gone", "nowhere", "private"] {
        let refused = unpack(Archive::new().hard_link("x", target).end());
        assert!(matches!(refused, Err(ImageError::Refused { .. })), "{target}: {refused:?}");
    }
}

#[test]
fn all_packings_give_the_same_layer() {
    let plain = Archive::new().file("a", "text").end();
    let twice = [gzip(&plain[..512]), gzip(&plain[512..])].concat();
    for bytes in [plain.clone(), gzip(&plain), zstd(&plain), twice] {
        let bench = Bench::new();
        let unpacked = bench.unpack(&bytes).expect("unpacks");
        assert_eq!(unpacked.diff_id, digest(&plain));
        assert_eq!(drawn(&bench.diff()), "a: 644 text\n");
    }
}

#[test]
fn what_is_no_archive_is_told_from_what_is_damaged() {
    let plain = Archive::new().file("a", &"text ".repeat(1000)).file("b", "x").end();
    let no_end = Archive::new().file("a", "x").without_end();
    let mut wrong_sum = Archive::new().file("a", "x").file("b", "x").end();
    wrong_sum[1024 + 5] ^= 1;
    let mut lying = tar::Header::new_gnu();
    for set in [tar::Header::set_uid, tar::Header::set_gid, tar::Header::set_mtime] {
        set(&mut lying, 0);
    }
    lying.set_mode(0o644);
    lying.as_mut_bytes()[0] = b'a';
    lying.set_size(1 << 50);
    lying.set_cksum();
    let lying = Archive::new().bytes_of_header(lying.as_bytes()).end();
    let mut long_name = tar::Header::new_gnu();
    long_name.set_entry_type(EntryType::GNULongName);
    long_name.set_size(1 << 40);
    long_name.set_cksum();
    let long_name = Archive::new().bytes_of_header(long_name.as_bytes()).end();
    let packed = gzip(&plain);
    let cases: [(&str, &[u8], &str); 14] = [
        ("nothing", b"", "cannot be imported: it is empty"),
        ("text", b"hello", "no tar archive"),
        ("much text", &[b'x'; 5000], "no tar archive"),
        ("packed text", &gzip(b"hello"), "no tar archive"),
        ("xz", b"\xfd7zXZ\0 and so on", "packed with xz"),
        ("cut in a file", &plain[..2000], "damaged"),
        ("cut in a header", &plain[..5820], "damaged"),
        ("cut gzip", &packed[..packed.len() - 20], "damaged"),
        ("cut zstd", &zstd(&plain)[..60], "damaged"),
        ("no end", &no_end, "damaged"),
        ("a wrong checksum", &wrong_sum, "damaged"),
        ("a size that is a lie", &lying, "more than the 1.0 GiB in tests"),
        ("a name of a terabyte", &long_name, "damaged"),
        (
            "an unknown kind",
            &Archive::new().entry(EntryType::new(b'V'), "v", "", &PLAIN, b"").end(),
            "no kind",
        ),
    ];
    for (case, bytes, message) in cases {
        let bench = Bench::new();
        let outcome = unpack_layer("it", bytes, Form::Root, &bench.diff(), &[], AMPLE);
        let said = outcome.expect_err(case).to_string();
        assert!(said.contains(message), "{case}: {said}");
    }
}

#[test]
fn what_does_not_fit_is_stopped() {
    let small = UnpackRoom { bytes: 10_000, entries: u64::MAX, why: "that the disk has left" };
    let many = (0..100).fold(Archive::new(), |archive, n| archive.file(&format!("f{n}"), ""));
    let bomb = gzip(&[Archive::new().file("a", "x").end(), vec![0; 200 << 20]].concat());
    for (case, bytes) in [
        ("bytes", Archive::new().file("a", &"x".repeat(20_000)).end()),
        ("files", many.end()),
        ("a bomb behind the end", bomb),
    ] {
        let bench = Bench::new();
        let outcome = unpack_layer("it", &bytes[..], Form::Layer, &bench.diff(), &[], small);
        assert!(matches!(outcome, Err(ImageError::TooLarge { .. })), "{case}: {outcome:?}");
    }
}

#[test]
fn zeros_become_holes() {
    let content = [vec![0; 1 << 20], b"end".to_vec(), vec![0; 1 << 20]].concat();
    let bench =
        unpacked(&Archive::new().entry(EntryType::Regular, "a", "", &PLAIN, &content).end());
    let path = bench.diff().join("a");
    assert!(fs::read(&path).expect("it is there") == content, "the same bytes");
    assert!(fs::metadata(&path).expect("it is there").blocks() <= 32, "but not on disk");
}

#[test]
fn archives_of_gnu_tar_are_read_with_their_sparse_files() {
    for options in [
        &["--format=gnu"][..],
        &["--format=posix", "--sparse-version=0.0"],
        &["--format=posix", "--sparse-version=0.1"],
        &["--format=posix", "--sparse-version=1.0"],
    ] {
        sparse_files_are_read(options);
    }
}

fn sparse_files_are_read(options: &[&str]) {
    let from = TempDir::new().expect("a directory");
    let file = fs::File::create(from.path().join("sparse")).expect("ours");
    for at in 0..10u64 {
        std::os::unix::fs::FileExt::write_at(&file, b"data", at << 20).expect("ours");
    }
    file.set_len(20 << 20).expect("ours");
    fs::write(from.path().join("after"), "it").expect("ours");
    let archive = from.path().join("archive.tar");
    let status = Command::new("tar")
        .arg("--sparse")
        .args(options)
        .arg("-cf")
        .arg(&archive)
        .arg("-C")
        .arg(from.path())
        .args(["sparse", "after"])
        .status()
        .expect("tar is a program");
    assert!(status.success());
    let archive = fs::read(archive).expect("ours");
    assert!(archive.len() < 1 << 20, "tar wrote it sparse");
    let bench = unpacked(&archive);
    let same = fs::read(bench.diff().join("sparse")).expect("it is there")
        == fs::read(from.path().join("sparse")).expect("ours");
    assert!(same, "{options:?}");
    assert_eq!(fs::read(bench.diff().join("after")).expect("it is there"), b"it", "{options:?}");
    assert_eq!(bench.diff().read_dir().expect("ours").count(), 2, "{options:?}");
}

/// What overlayfs makes of it, as the kernel shows it.
#[test]
fn the_kernel_reads_whiteouts_and_opaque_directories() {
    let others = TempDir::new().expect("a directory");
    let (lower, upper) = (others.path().join("lower"), others.path().join("upper"));
    let bottom =
        Archive::new().file("a/x", "x").file("b/x", "x").file("c", "c").file("d/x", "x").end();
    let top = Archive::new()
        .file("a/y", "y")
        .file("b/.wh..wh..opq", "")
        .file("b/y", "y")
        .file(".wh.c", "")
        .file(".wh.d", "")
        .dir("d", 0o755)
        .end();
    for (path, archive) in [(&lower, bottom), (&upper, top)] {
        fs::create_dir(path).expect("ours");
        unpack_layer("it", &archive[..], Form::Layer, path, &[], AMPLE).expect("unpacks");
    }
    let merged = others.path().join("merged");
    fs::create_dir(&merged).expect("ours");
    // In a mount namespace of its own, which goes with the process.
    let script = format!(
        "mount -t overlay overlay -o userxattr,lowerdir={}:{} {m} && cd {m} && find . | sort",
        upper.display(),
        lower.display(),
        m = merged.display()
    );
    let output = Command::new("unshare").args(["--mount", "sh", "-c", &script]).output();
    let output = output.expect("unshare is a program");
    if !output.status.success() {
        println!(
            "SKIPPED the_kernel_reads_whiteouts_and_opaque_directories: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        return;
    }
    assert_eq!(String::from_utf8_lossy(&output.stdout), ".\n./a\n./a/x\n./a/y\n./b\n./b/y\n./d\n");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever names and links an archive has, in whatever order, it stays inside.
    #[test]
    fn no_archive_reaches_outside(entries in proptest::collection::vec(
        (0..5u8, "(/|\\./|\\.\\./)?(a|b|l|outside|\\.wh\\.(a|l))(/(a|b|l|precious|\\.\\.|\\.wh\\..wh\\..opq)){0,3}/?",
         "(/|\\.\\./|\\.\\./\\.\\./)?(a|b|l|outside|outside/precious|\\.\\.)"),
        1..12,
    )) {
        let bench = Bench::new();
        let mut archive = Archive::new();
        for (kind, name, link) in &entries {
            archive = match kind {
                0 => archive.dir(name, 0o777),
                1 => archive.symlink(name, link),
                2 => archive.hard_link(name, link),
                _ => archive.file(name.trim_end_matches('/'), "text"),
            };
        }
        // It may be refused; it may not reach out.
        let _ = bench.unpack(&archive.end());
        prop_assert!(bench.outside_is_untouched());
    }

    /// Bytes that are no archive, or one that was tampered with, are an error and never a panic.
    #[test]
    fn no_bytes_make_it_panic(at in 0usize..2048, with in any::<u8>(), cut in 0usize..4096) {
        let mut bytes = Archive::new()
            .pax(&[("mtime", b"1.5"), ("SCHILY.xattr.user.a", b"b")])
            .file("a", "text")
            .symlink("b", "a")
            .end();
        let length = bytes.len();
        bytes[at % length] = with;
        bytes.truncate(cut.min(length));
        let bench = Bench::new();
        let _ = bench.unpack(&bytes);
        prop_assert!(bench.outside_is_untouched());
    }
}

/// An archive of directories inside each other, made as it is read: each entry has the whole path, so together they are large.
struct Nested {
    depth: usize,
    /// How many are made.
    made: usize,
    ready: std::io::Cursor<Vec<u8>>,
    ended: bool,
}

impl Nested {
    fn new(depth: usize) -> Self {
        Self { depth, made: 0, ready: std::io::Cursor::default(), ended: false }
    }

    fn directory(path: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut long = tar::Header::new_gnu();
        long.set_entry_type(EntryType::GNULongName);
        long.set_path("././@LongLink").expect("a short name");
        long.set_size(path.len() as u64 + 1);
        long.set_cksum();
        bytes.extend_from_slice(long.as_bytes());
        bytes.extend_from_slice(path);
        bytes.resize(bytes.len() + 512 - path.len() % 512, 0);
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(EntryType::Directory);
        header.set_path("d").expect("a short name");
        header.set_mode(0o755);
        header.set_mtime(1_000_000_000);
        header.set_size(0);
        header.set_uid(0);
        header.set_gid(0);
        header.set_cksum();
        bytes.extend_from_slice(header.as_bytes());
        bytes
    }
}

impl std::io::Read for Nested {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let read = self.ready.read(into)?;
        if read > 0 || self.ended {
            return Ok(read);
        }
        let bytes = if self.made > self.depth {
            self.ended = true;
            vec![0; 1024]
        } else {
            let path = if self.made == 0 { b"./".to_vec() } else { b"d/".repeat(self.made) };
            self.made += 1;
            Self::directory(&path)
        };
        self.ready = std::io::Cursor::new(bytes);
        self.ready.read(into)
    }
}

/// The most memory this process had so far.
fn memory_peak() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("readable");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a line");
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().expect("a number") << 10
}

/// Removes what no path can name.
fn remove_deep(dir: &Path) {
    let done = Command::new("rm").arg("-rf").arg(dir).status().expect("rm runs");
    assert!(done.success());
}

#[test]
fn what_a_machine_nests_takes_memory_by_its_names_and_not_by_its_paths() {
    let bench = Bench::new();
    let depth = 6_000;
    let before = memory_peak();
    let unpacked = unpack_layer("it", Nested::new(depth), Form::Upper, &bench.diff(), &[], AMPLE)
        .expect("it unpacks");
    let took = memory_peak() - before;
    assert_eq!(unpacked.files, depth as u64);
    // Whole paths as lists of names took a gigabyte.
    assert!(took < 100 << 20, "{took}");
    // The times are those of the archive, also of the deepest: setting them is the last thing that is done.
    let script = "n=0; while [ -d d ]; do cd -P d || exit 1; n=$((n+1)); done; stat -c \"%Y $n\" .";
    let said = Command::new("sh").args(["-c", script]).current_dir(bench.diff()).output();
    let said = String::from_utf8_lossy(&said.expect("sh runs").stdout).into_owned();
    assert_eq!(said.trim(), format!("1000000000 {depth}"));
    remove_deep(&bench.diff());
}

#[test]
fn what_a_machine_nests_too_deep_is_refused() {
    let bench = Bench::new();
    let archive: Vec<u8> =
        [Nested::directory(b"./"), Nested::directory(&b"d/".repeat(16_385)), vec![0; 1024]]
            .concat();
    let refused =
        unpack_layer("it", archive.as_slice(), Form::Upper, &bench.diff(), &[], AMPLE).unwrap_err();
    assert!(refused.to_string().contains("nested deeper than 16,384"), "{refused}");
    assert!(matches!(refused, ImageError::Refused { .. }), "{refused:?}");
    assert!(fs::read_dir(bench.diff()).expect("readable").next().is_none(), "nothing was made");
}

#[test]
fn siblings_after_a_deep_tree_are_found_again() {
    let bench = Bench::new();
    let mut archive = Nested::directory(b"./");
    let paths =
        ["a/", "a/b/", "a/b/c/", "a/b/c/d/", "a/b/e/", "a/be/", "a/be/f/", "g/", "a/b/c/h/"];
    for path in paths {
        archive.extend(Nested::directory(path.as_bytes()));
    }
    archive.extend([0; 1024]);
    unpack_layer("it", archive.as_slice(), Form::Upper, &bench.diff(), &[], AMPLE)
        .expect("it unpacks");
    let found = picture(&bench.diff());
    let mut wanted: Vec<String> = paths.map(|path| path.trim_end_matches('/').to_owned()).to_vec();
    wanted.sort();
    assert_eq!(found.keys().cloned().collect::<Vec<_>>(), wanted);
    for path in paths {
        let metadata = fs::metadata(bench.diff().join(path)).expect("it is there");
        assert_eq!(metadata.mtime(), 1_000_000_000, "{path}");
    }
}
