//! Files and directories.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use bytes::Bytes;
use sandkeep_core::guest::Guest;
use sandkeep_proto::link::{At, EntryKind, Failure};

use crate::guest::machine::{Machine, all, at, at_as, failure, put};

async fn write(guest: &Guest, at: At, text: &str) {
    let outgoing = guest.write_file(at, None, false, false).await.expect("it can be written");
    let moved = put(outgoing, text.as_bytes()).await.expect("it is written");
    assert_eq!((moved.bytes, moved.files), (text.len() as u64, 1));
}

async fn read(guest: &Guest, at: At) -> String {
    let (_, mut incoming) = guest.read_file(at, 0, None).await.expect("it can be read");
    String::from_utf8(all(&mut incoming).await.expect("it is read")).expect("text")
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir)
        .expect("a directory")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[tokio::test]
async fn files_are_written_and_read() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let work = machine.work();
    let file = work.join("a/b/file");
    let refused = guest.write_file(at(&file), None, false, false).await;
    assert_eq!(failure(refused), Failure::NotFound);
    let outgoing = guest.write_file(at(&file), Some(0o640), true, false).await.expect("made");
    let big: Vec<u8> = (0..700_000_u32).flat_map(u32::to_le_bytes).collect();
    put(outgoing, &big).await.expect("it is written");
    assert_eq!(fs::metadata(&file).expect("there").mode() & 0o7777, 0o640);
    let (entry, mut incoming) = guest.read_file(at(&file), 0, None).await.expect("readable");
    assert_eq!((entry.size, entry.mode, entry.kind), (big.len() as u64, 0o640, EntryKind::File));
    assert!(all(&mut incoming).await.expect("it is read") == big);
    let (_, mut part) = guest.read_file(at(&file), 5, Some(7)).await.expect("readable");
    assert_eq!(all(&mut part).await.expect("it is read"), big[5..12]);
    let (_, mut past) = guest.read_file(at(&file), 1 << 40, Some(7)).await.expect("readable");
    assert_eq!(all(&mut past).await.expect("it is read"), b"");
    // Replaced, it keeps its mode; added to, it keeps what it had.
    write(&guest, at(&file), "short").await;
    assert_eq!(fs::metadata(&file).expect("there").mode() & 0o7777, 0o640);
    let outgoing = guest.write_file(at(&file), None, false, true).await.expect("made");
    put(outgoing, b"er").await.expect("it is written");
    assert_eq!(read(&guest, at(&file)).await, "shorter");
    assert_eq!(names(&work.join("a/b")), ["file"], "no temporary name stays");
}

#[tokio::test]
async fn relative_paths_start_where_they_are_told() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let work = machine.work();
    let cwd = Some(work.to_str().expect("plain").to_owned());
    write(&guest, At { path: "x".to_owned(), cwd: cwd.clone(), user: None }, "here").await;
    assert_eq!(fs::read_to_string(work.join("x")).expect("there"), "here");
    let moved = At { path: "x".to_owned(), cwd, user: None };
    guest.rename(moved, "y".to_owned()).await.expect("it moves");
    assert_eq!(names(&work), ["y"]);
    for bad in ["", "a\0b"] {
        let bad = At { path: bad.to_owned(), cwd: None, user: None };
        assert_eq!(failure(guest.stat(bad).await), Failure::Invalid);
    }
}

#[tokio::test]
async fn writing_goes_through_links_and_replaces_nothing_else() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let work = machine.work();
    fs::create_dir(work.join("dir")).expect("our own");
    symlink("dir/target", work.join("link")).expect("our own");
    write(&guest, at(&work.join("link")), "through").await;
    assert!(fs::symlink_metadata(work.join("link")).expect("there").is_symlink());
    assert_eq!(fs::read_to_string(work.join("dir/target")).expect("there"), "through");
    symlink("loop", work.join("loop")).expect("our own");
    let looped = guest.write_file(at(&work.join("loop")), None, false, false).await;
    assert_eq!(failure(looped), Failure::Invalid);
    let dir = guest.write_file(at(&work.join("dir")), None, false, false).await;
    assert_eq!(failure(dir), Failure::Invalid);
    let dir = guest.read_file(at(&work.join("dir")), 0, None).await;
    assert_eq!(failure(dir.map(|_| ())), Failure::Invalid);
    let device = guest.write_file(at(Path::new("/dev/null")), None, false, false).await;
    assert_eq!(failure(device), Failure::Invalid);
    rustix::fs::mknodat(
        rustix::fs::CWD,
        work.join("fifo"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RWXU,
        0,
    )
    .expect("our own");
    let fifo = guest.read_file(at(&work.join("fifo")), 0, None).await;
    assert_eq!(failure(fifo.map(|_| ())), Failure::Invalid, "and does not wait for a writer");
}

#[tokio::test]
async fn a_broken_off_write_changes_nothing() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let work = machine.work();
    let file = work.join("file");
    fs::write(&file, "old").expect("our own");
    let mut outgoing =
        guest.write_file(at(&file), None, false, false).await.expect("it can be written");
    outgoing.send(Bytes::from_static(b"new")).await.expect("it is taken");
    drop(outgoing);
    // Whatever is asked next may overtake the cleaning up, so ask until it is done.
    for _ in 0..500 {
        if names(&work) == ["file"] {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    assert_eq!(names(&work), ["file"]);
    assert_eq!(fs::read_to_string(&file).expect("there"), "old");
}

#[tokio::test]
async fn the_kernel_checks_the_user() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let work = machine.work();
    let secret = work.join("secret");
    fs::write(&secret, "x").expect("our own");
    fs::set_permissions(&secret, PermissionsExt::from_mode(0o600)).expect("our own");
    let read = guest.read_file(at_as(&secret, "nobody"), 0, None).await;
    assert_eq!(failure(read.map(|_| ())), Failure::Denied);
    let file = work.join("file");
    let refused = guest.write_file(at_as(&file, "nobody"), None, false, false).await;
    assert_eq!(failure(refused), Failure::Denied, "it may not write to root's directory");
    let open = work.join("open");
    fs::create_dir(&open).expect("our own");
    fs::set_permissions(&open, PermissionsExt::from_mode(0o1777)).expect("our own");
    let file = open.join("file");
    write(&guest, at_as(&file, "nobody"), "mine").await;
    let meta = fs::metadata(&file).expect("there");
    assert_eq!((meta.uid(), meta.gid(), meta.mode() & 0o7777), (65534, 65534, 0o644));
    // Root edits it, and it still belongs to `nobody`.
    write(&guest, at(&file), "edited").await;
    assert_eq!(fs::metadata(&file).expect("there").uid(), 65534);
    // Read-only for its owner: a rename could, but the file says no.
    fs::set_permissions(&file, PermissionsExt::from_mode(0o444)).expect("our own");
    let refused = guest.write_file(at_as(&file, "nobody"), None, false, false).await;
    assert_eq!(failure(refused), Failure::Denied);
    // Its own file in a directory it may not write to is overwritten in place.
    let own = work.join("own");
    fs::write(&own, "before").expect("our own");
    std::os::unix::fs::chown(&own, Some(65534), Some(65534)).expect("our own");
    write(&guest, at_as(&own, "nobody"), "after").await;
    assert_eq!(fs::read_to_string(&own).expect("there"), "after");
    let nobody = guest.stat(at_as(&own, "no-such-user")).await;
    assert_eq!(failure(nobody), Failure::NoUser);
    let root_again = guest.stat(at(&secret)).await.expect("other threads are still root");
    assert_eq!(root_again.uid, 0);
}

#[tokio::test]
async fn directories_are_made_listed_and_removed() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let work = machine.work();
    let deep = work.join("a/b/c");
    assert_eq!(failure(guest.make_dir(at(&deep), None, false).await), Failure::NotFound);
    guest.make_dir(at(&deep), Some(0o1777), true).await.expect("made");
    assert_eq!(fs::metadata(&deep).expect("there").mode() & 0o7777, 0o1777);
    guest.make_dir(at(&deep), None, true).await.expect("there already");
    assert_eq!(failure(guest.make_dir(at(&deep), None, false).await), Failure::Exists);
    fs::write(work.join("z"), "12345").expect("our own");
    symlink("/etc", work.join("etc")).expect("our own");
    let odd = std::ffi::OsString::from_encoded(b"odd\xff\n");
    fs::write(work.join(&odd), "").expect("our own");
    let (entries, more) = guest.list_dir(at(&work), None).await.expect("a list");
    assert!(!more);
    let seen: Vec<_> = entries.iter().map(|entry| (entry.name.as_str(), entry.kind)).collect();
    assert_eq!(
        seen,
        [
            ("a", EntryKind::Directory),
            ("etc", EntryKind::Symlink),
            ("odd\u{fffd}\n", EntryKind::File),
            ("z", EntryKind::File)
        ]
    );
    assert_eq!(entries[1].target.as_deref(), Some("/etc"));
    assert_eq!(entries[2].raw_name.as_deref(), Some("b2Rk/wo="));
    assert_eq!(entries[3].size, 5);
    let (rest, _) = guest.list_dir(at(&work), Some("etc".to_owned())).await.expect("a list");
    assert_eq!(rest.len(), 2);

    assert_eq!(failure(guest.remove(at(&work.join("a")), false, false).await), Failure::Exists);
    guest.remove(at(&work.join("a")), true, false).await.expect("gone");
    guest.remove(at(&work.join("etc")), true, false).await.expect("the link, not what it names");
    assert!(Path::new("/etc/passwd").exists());
    assert_eq!(failure(guest.remove(at(&work.join("a")), true, false).await), Failure::NotFound);
    guest.remove(at(&work.join("a")), true, true).await.expect("fine");
    assert_eq!(failure(guest.list_dir(at(&work.join("a")), None).await), Failure::NotFound);
    assert_eq!(failure(guest.list_dir(at(&work.join("z")), None).await), Failure::Invalid);
}

trait FromEncoded {
    fn from_encoded(bytes: &[u8]) -> Self;
}

impl FromEncoded for std::ffi::OsString {
    fn from_encoded(bytes: &[u8]) -> Self {
        std::os::unix::ffi::OsStringExt::from_vec(bytes.to_vec())
    }
}

#[tokio::test]
async fn a_large_directory_comes_in_pages() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let work = machine.work();
    let long = "n".repeat(200);
    for n in 0..5_000 {
        fs::write(work.join(format!("{long}-{n:05}")), "").expect("our own");
    }
    let mut seen = Vec::new();
    let mut after = None;
    let mut pages = 0;
    loop {
        let (entries, more) = guest.list_dir(at(&work), after).await.expect("a page");
        pages += 1;
        seen.extend(entries.into_iter().map(|entry| entry.name));
        if !more {
            break;
        }
        after = seen.last().cloned();
    }
    assert_eq!(seen, names(&work));
    assert!(pages > 1, "they do not fit one frame");
}

#[tokio::test]
async fn moving_works_across_filesystems_too() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let work = machine.work();
    let Ok(other) = tempfile::TempDir::new_in("/dev/shm") else {
        println!("SKIPPED moving_works_across_filesystems_too: there is no /dev/shm");
        return;
    };
    let from = work.join("tree");
    fs::create_dir_all(from.join("sub")).expect("our own");
    fs::write(from.join("sub/file"), "text").expect("our own");
    fs::hard_link(from.join("sub/file"), from.join("twin")).expect("our own");
    symlink("/nowhere", from.join("link")).expect("our own");
    fs::set_permissions(from.join("sub"), PermissionsExt::from_mode(0o711)).expect("our own");
    std::os::unix::fs::chown(from.join("twin"), Some(7), Some(8)).expect("our own");
    let to = other.path().join("moved");
    guest.rename(at(&from), to.to_str().expect("plain").to_owned()).await.expect("it moves");
    assert!(!from.exists());
    assert_eq!(names(&to), ["link", "sub", "twin"]);
    assert_eq!(names(other.path()), ["moved"], "no temporary name stays");
    let twin = fs::metadata(to.join("twin")).expect("there");
    assert_eq!((twin.uid(), twin.gid(), twin.nlink()), (7, 8, 2));
    assert_eq!(fs::metadata(to.join("sub")).expect("there").mode() & 0o7777, 0o711);
    let missing = guest.rename(at(&from), "/dev/shm/x".to_owned()).await;
    assert_eq!(failure(missing), Failure::NotFound);
}
