//! What was written in a machine comes out of it as a layer.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::ffi::OsStringExt as _;
use std::path::Path;
use std::process::Command;

use sandkeep_core::guest::Guest;
use sandkeep_proto::link::{Assemble, AssembleMount, Spawn};
use sandkeep_testkit::inside::Inside;
use sandkeep_testkit::tree::{Overlay, assert_same, describe, nasty};

use crate::microvm_guest::life::files;
use crate::microvm_guest::machine::{Files, assemble};

pub(crate) fn spawn(command: &str, argv: &[&str]) -> Spawn {
    Spawn {
        command: command.to_owned(),
        argv: argv.iter().map(|&arg| arg.to_owned()).collect(),
        env: BTreeMap::new(),
        cwd: None,
        user: None,
        tty: None,
        stdin: false,
        sudo_from: None,
        secret_env: BTreeMap::new(),
        secret_files: Vec::new(),
    }
}

/// What a session does to the tree below it: every kind of change a layer can hold.
const UPSET: &str = "set -e
    cp -a /odd /copy
    cd /odd
    rm -r gone swap dir; echo file > swap
    rm tofile; mkdir tofile; echo x > tofile/in
    mkdir -p dir/deep; echo new > dir/deep/new
    rm kept/b; ln kept/a kept/again
    echo more >> setuid
    mkdir /made; chown 1000:3000000 /made; chmod 1770 /made; mknod /made/pipe p; ln -s nowhere /made/link
    ln /made/link /made/again
    perl -e 'socket(S, 1, 1, 0) or die $!; bind(S, pack(\"Sa*\", 1, \"/made/socket\")) or die $!'
    dd if=/dev/zero of=/made/holes bs=1 count=1 seek=300000000 2>/dev/null
    perl -e 'for (\"n\", \"\\xe9\") { open F, \">\", \"/made/\" . ($_ x 255) or die $!; print F \"long\" }'
    d=/made; for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18; do d=$d/$(perl -e 'print \"d\" x 250'); mkdir $d || break; done
    touch -d 1969-12-31T23:59:58.25Z /made/old
    touch -d 2001-02-03T04:05:06.789012345Z /made";

fn drives() -> Vec<AssembleMount> {
    let drive = |target: &str, lower, read_only, owner: Option<&str>| AssembleMount {
        target: target.to_owned(),
        lower,
        read_only,
        owner: owner.map(ToOwned::to_owned),
    };
    vec![
        drive("/data", false, false, Some("someone")),
        drive("/books/old", true, true, None),
        drive("/books/new", true, false, None),
    ]
}

fn with_drives(rescue: bool) -> Assemble {
    Assemble { mounts: drives(), rescue, ..assemble(2) }
}

/// Unpacks an export, as GNU tar understands it.
async fn unpack(guest: &Guest, part: u32, into: &Path) {
    let archive = into.with_extension("tar");
    let mut file = File::create(&archive).expect("room");
    let mut export = guest.export(part).await.expect("there is such a part");
    while let Some(bytes) = export.next().await.expect("whole") {
        file.write_all(&bytes).expect("room");
    }
    let _ = fs::remove_dir_all(into);
    fs::create_dir(into).expect("room");
    let mut tar = Command::new("tar");
    tar.args([
        "--extract",
        "--preserve-permissions",
        "--same-owner",
        "--numeric-owner",
        "--xattrs",
        "--xattrs-include=*",
    ]);
    let ran = tar.arg("-f").arg(&archive).arg("-C").arg(into).output().expect("tar runs");
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    assert!(fs::metadata(&archive).expect("there").len() < 100 << 20, "holes were packed");
}

/// The files of a machine with one of everything on its topmost layer, and drives.
fn prepared(test: &str) -> Option<Files> {
    let mut files = files(test)?;
    let dir = files.dir.path().to_owned();
    let odd = dir.join("odd-layer");
    fs::create_dir_all(odd.join("odd")).expect("room");
    nasty(&odd.join("odd"));
    // Old packers of images cannot do with these; the machine can, and makes some of its own.
    for entry in fs::read_dir(odd.join("odd/odd")).expect("a directory").flatten() {
        if entry.file_name().len() == 255 {
            fs::remove_file(entry.path()).expect("our own");
        }
    }
    // What was the topmost is below it now.
    files.rename("lower-0", "lower-1");
    files.lower("lower-0", &odd);
    let books = dir.join("books");
    fs::create_dir(&books).expect("room");
    fs::write(books.join("book"), "once\n").expect("room");
    files.disk("mount-0-disk", 64 << 20);
    files.lower("mount-1-lower", &books);
    files.lower("mount-2-lower", &books);
    files.disk("mount-2-disk", 64 << 20);
    Some(files)
}

#[tokio::test]
async fn what_was_written_comes_out() {
    let Some(files) = prepared("what_was_written_comes_out") else { return };
    let dir = files.dir.path().to_owned();
    let mut machine = files.boot();
    let inside = Inside::over(machine.connect().await);
    inside.guest().assemble(with_drives(false)).await.expect("assembled");
    let ran = inside.sh(UPSET).await;
    assert_eq!(ran.code, 0, "{ran:?}");
    on_drives(&inside).await;
    inside.guest().quiesce(std::time::Duration::from_secs(2)).await.expect("all end");
    let out = dir.join("out");
    unpack(inside.guest(), 0, &out).await;
    as_written(&dir, &out);
    let (data, books) = (dir.join("data"), dir.join("new-books"));
    unpack(inside.guest(), 1, &data).await;
    unpack(inside.guest(), 3, &books).await;
    assert!(inside.guest().export(2).await.is_err() && inside.guest().export(4).await.is_err());
    drives_as_written(&data, &books);
    assert_eq!(inside.sh("sync").await.code, 0);
    drop((inside, machine));

    // The machine was killed. Another one finds what it had written to its disks.
    let mut machine = files.boot();
    let guest = machine.connect().await;
    guest.assemble(with_drives(true)).await.expect("mounted");
    assert!(guest.spawn(spawn("cmd-1", &["true"])).await.is_err());
    let rescued = dir.join("rescued");
    unpack(&guest, 0, &rescued).await;
    assert_same("rescued", &describe(&out), &describe(&rescued));
    unpack(&guest, 1, &rescued).await;
    assert_same("rescued drive", &describe(&data), &describe(&rescued));
}

async fn on_drives(inside: &Inside) {
    let ran = inside
        .run(&["sh", "-c", "echo mine > /data/file; echo no > /books/old/book"], Some("someone"))
        .await;
    assert!(ran.err.contains("ead-only") || ran.err.contains("ermission"), "{ran:?}");
    let ran = inside.sh("echo no > /books/old/x; cat /books/old/book; echo twice > /books/new/book; mkdir /books/new/d").await;
    assert!(ran.err.contains("ead-only"), "{ran:?}");
    assert_eq!(ran.out, "once\n");
    let ran = inside.sh("stat -c '%a %u' /data; stat -c %u /data/file").await;
    assert_eq!(ran.out, "777 1000\n1000\n");
}

fn drives_as_written(data: &Path, books: &Path) {
    assert_eq!(fs::read_to_string(data.join("file")).expect("there"), "mine\n");
    assert_eq!(fs::read_to_string(books.join("book")).expect("there"), "twice\n");
    assert!(books.join("d").is_dir());
    let names = |path: &Path| fs::read_dir(path).expect("a directory").count();
    assert_eq!((names(data), names(books)), (1, 2));
}

/// Compares what was exported with what the same changes make of the same tree here.
fn as_written(dir: &Path, out: &Path) {
    use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
    let copied = describe(&out.join("copy"));
    let mut original = describe(&dir.join("odd-layer/odd"));
    // What only the host's root may set is not taken from a guest.
    original.values_mut().for_each(|text| *text = text.replace(" trusted.mark=t", ""));
    assert_same("a copy", &original, &copied);
    let meta = |name: &str| fs::symlink_metadata(out.join(name)).expect(name);
    for deleted in ["odd/gone", "odd/kept/b"] {
        assert!(
            meta(deleted).file_type().is_char_device() && meta(deleted).rdev() == 0,
            "{deleted}"
        );
    }
    assert_eq!(meta("made/link").ino(), meta("made/again").ino());
    assert_eq!(meta("made/holes").len(), 300_000_001);
    assert!(meta("made/holes").blocks() < 1000);
    assert_eq!((meta("made/old").mtime(), meta("made/old").mtime_nsec()), (-2, 250_000_000));
    assert_eq!((meta("made").mtime(), meta("made").mtime_nsec()), (981_173_106, 789_012_345));
    let long = [vec![b'n'; 255], vec![0xe9; 255]].map(OsString::from_vec);
    for name in long {
        assert_eq!(fs::read(out.join("made").join(name)).expect("there"), b"long");
    }
    assert!(!out.join("made/socket").exists());
    assert!(!out.join("base").exists() && !out.join("proc").exists());
    // On the layers it was written on, it shows the same files.
    let merged = Overlay::readable(&dir.join("merged"), &[out.to_owned(), dir.join("odd-layer")]);
    let merged = merged.expect("a stack");
    let odd = |name: &str| merged.path().join("odd").join(name);
    assert!(!odd("gone").exists() && !odd("kept/b").exists() && !odd("dir/plain").exists());
    let read = |name: &str| fs::read_to_string(odd(name)).expect(name);
    assert_eq!((read("swap"), read("tofile/in")), ("file\n".to_owned(), "x\n".to_owned()));
    assert_eq!(
        (read("dir/deep/new"), read("setuid")),
        ("new\n".to_owned(), "#!/bin/sh\nmore\n".to_owned())
    );
    let names: Vec<_> = fs::read_dir(odd("dir")).expect("a directory").flatten().collect();
    assert_eq!(names.len(), 1, "an opaque directory: {names:?}");
    assert!(odd("kept/again").exists() && odd("empty").exists());
}
