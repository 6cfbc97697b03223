//! What a look says, compared with what a sandbox sees: random edits through real overlay mounts.

#![allow(clippy::unwrap_used)] // helpers of tests may panic as tests may

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use rustix::mount::{MountFlags, UnmountFlags};
use sandkeep_upper::{ChangeKind, Index, Limits, Look, Lower, look};
use tempfile::TempDir;

/// An overlay of two lower layers and an upper one, mounted as long as it lives.
struct World {
    dir: TempDir,
}

impl World {
    /// `None` where mounts are not allowed.
    fn new(fill: impl FnOnce(&Path)) -> Option<Self> {
        let dir = TempDir::with_prefix("keep-upper-").unwrap();
        for part in ["low", "mid", "upper", "work", "work2", "merged"] {
            fs::create_dir(dir.path().join(part)).unwrap();
        }
        let world = Self { dir };
        // The layer in the middle has whiteouts and opaque directories as the kernel makes them.
        populate(&world.at("low"));
        world.mount("low", "mid", "work2")?;
        fill(&world.at("merged"));
        world.unmount();
        world.mount("mid:low", "upper", "work")?;
        Some(world)
    }

    fn at(&self, part: &str) -> PathBuf {
        self.dir.path().join(part)
    }

    fn mount(&self, lower: &str, upper: &str, work: &str) -> Option<()> {
        let lower: Vec<String> =
            lower.split(':').map(|part| self.at(part).display().to_string()).collect();
        let options = format!(
            "userxattr,volatile,lowerdir={},upperdir={},workdir={}",
            lower.join(":"),
            self.at(upper).display(),
            self.at(work).display()
        );
        let options = std::ffi::CString::new(options).unwrap();
        let at = self.at("merged");
        match rustix::mount::mount("overlay", at, "overlay", MountFlags::empty(), Some(&*options)) {
            Ok(()) => Some(()),
            // As root they are: a test that does nothing would pass.
            Err(rustix::io::Errno::PERM) if fs::metadata("/proc/self").unwrap().uid() != 0 => None,
            Err(error) => panic!("mount: {error}"),
        }
    }

    fn unmount(&self) {
        let _ = rustix::mount::unmount(self.at("merged"), UnmountFlags::DETACH);
    }

    fn look(&self, before: &Index) -> Look {
        let upper = fs::File::open(self.at("upper")).unwrap();
        let lower = Lower::open(&[self.at("mid"), self.at("low")]).unwrap();
        let limits = Limits { names: 100_000, go_on: &|| true };
        look(upper.as_fd(), &lower, before, &limits, &mut |_| {}).unwrap().unwrap()
    }

    fn view(&self) -> View {
        let mut view = View::new();
        see(&self.at("merged"), "", &mut view);
        view
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.unmount();
    }
}

/// What a sandbox sees: for a directory its mode, for everything else when it last changed, and its inode and size.
type View = BTreeMap<String, (bool, u32, (i64, i64, u64))>;

fn see(dir: &Path, prefix: &str, view: &mut View) {
    for entry in fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let path = match prefix {
            "" => entry.file_name().into_string().unwrap(),
            prefix => format!("{prefix}/{}", entry.file_name().into_string().unwrap()),
        };
        let meta = fs::symlink_metadata(entry.path()).unwrap();
        let version = match meta.is_dir() {
            true => (0, 0, 0),
            false => (meta.ctime(), meta.ctime_nsec(), meta.size()),
        };
        view.insert(path.clone(), (meta.is_dir(), meta.mode(), version));
        if meta.is_dir() {
            see(&entry.path(), &path, view);
        }
    }
}

/// The difference of two views, as a look returns it.
fn difference(before: &View, after: &View) -> BTreeMap<String, ChangeKind> {
    let mut found = BTreeMap::new();
    for (path, now) in after {
        match before.get(path) {
            None => drop(found.insert(path.clone(), ChangeKind::Created)),
            Some(old) if old != now => drop(found.insert(path.clone(), ChangeKind::Modified)),
            Some(_) => {}
        }
    }
    for path in before.keys().filter(|path| !after.contains_key(*path)) {
        found.insert(path.clone(), ChangeKind::Deleted);
    }
    found
}

fn told(look: &Look) -> BTreeMap<String, ChangeKind> {
    let list = &look.changes.list;
    assert!(list.more.is_empty());
    let told: BTreeMap<String, ChangeKind> = list
        .paths
        .iter()
        .map(|change| (String::from_utf8(change.path.clone()).unwrap(), change.kind))
        .collect();
    assert_eq!(told.len(), list.paths.len(), "a path is told twice: {list:?}");
    told
}

fn populate(root: &Path) {
    for dir in ["a", "a/b", "a/b/c", "d", "d/e"] {
        fs::create_dir_all(root.join(dir)).unwrap();
        for file in ["f", "g"] {
            fs::write(root.join(dir).join(file), dir).unwrap();
        }
    }
    fs::write(root.join("f"), "root").unwrap();
    symlink("/etc", root.join("a/link")).unwrap();
}

#[derive(Debug, Clone)]
enum Edit {
    Write(String, usize),
    Mode(String, u32),
    Remove(String),
    Dir(String),
    Rename(String, String),
    Link(String, String),
    Symlink(String),
}

fn path() -> impl Strategy<Value = String> {
    prop::collection::vec(prop::sample::select(vec!["a", "b", "c", "d", "e", "f", "n"]), 1..4)
        .prop_map(|parts| parts.join("/"))
}

fn edit() -> impl Strategy<Value = Edit> {
    prop_oneof![
        4 => (path(), 0usize..3).prop_map(|(path, size)| Edit::Write(path, size)),
        1 => (path(), prop::sample::select(vec![0o600, 0o755])).prop_map(|(p, m)| Edit::Mode(p, m)),
        3 => path().prop_map(Edit::Remove),
        3 => path().prop_map(Edit::Dir),
        2 => (path(), path()).prop_map(|(from, to)| Edit::Rename(from, to)),
        1 => (path(), path()).prop_map(|(from, to)| Edit::Link(from, to)),
        1 => path().prop_map(Edit::Symlink),
    ]
}

/// What cannot be done is not done.
fn apply(root: &Path, edit: &Edit) {
    let at = |path: &String| root.join(path);
    let _ = match edit {
        Edit::Write(path, size) => fs::write(at(path), "x".repeat(*size)),
        Edit::Mode(path, mode) if !at(path).is_symlink() => {
            fs::set_permissions(at(path), fs::Permissions::from_mode(*mode))
        }
        Edit::Mode(..) => Ok(()),
        Edit::Remove(path) => match at(path).is_dir() && !at(path).is_symlink() {
            true => fs::remove_dir_all(at(path)),
            false => fs::remove_file(at(path)),
        },
        Edit::Dir(path) => fs::create_dir(at(path)),
        Edit::Rename(from, to) => fs::rename(at(from), at(to)),
        Edit::Link(from, to) => fs::hard_link(at(from), at(to)),
        Edit::Symlink(path) => symlink("nowhere", at(path)),
    };
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn a_look_tells_what_the_sandbox_sees(
        below in prop::collection::vec(edit(), 0..12),
        rounds in prop::collection::vec(prop::collection::vec(edit(), 0..12), 1..4),
    ) {
        let fill = |merged: &Path| below.iter().for_each(|edit| apply(merged, edit));
        let Some(world) = World::new(fill) else {
            eprintln!("SKIPPED a_look_tells_what_the_sandbox_sees: mounts are not allowed");
            return Ok(());
        };
        let mut before = world.view();
        let mut index = Index::default();
        for edits in rounds {
            edits.iter().for_each(|edit| apply(&world.at("merged"), edit));
            let after = world.view();
            let look = world.look(&index);
            prop_assert!(look.complete);
            prop_assert_eq!(told(&look), difference(&before, &after), "after {:?}", edits);
            // Nothing happened since.
            index = look.index.unwrap();
            let again = world.look(&index);
            prop_assert!(again.changes.is_empty(), "{:?}", again.changes);
            prop_assert_eq!(again.index.as_ref(), Some(&index));
            before = after;
        }
    }
}

#[test]
fn deep_and_wide_trees_are_bounded_and_a_look_can_be_ended() {
    let dir = TempDir::with_prefix("keep-upper-").unwrap();
    let upper = dir.path().join("upper");
    fs::create_dir(&upper).unwrap();
    for number in 0..500 {
        fs::write(upper.join(format!("f{number}")), "").unwrap();
    }
    let lower = Lower::new(Vec::new());
    let at = fs::File::open(&upper).unwrap();
    let few = Limits { names: 100, go_on: &|| true };
    let cut = look(at.as_fd(), &lower, &Index::default(), &few, &mut |_| {}).unwrap().unwrap();
    assert!(!cut.complete && cut.index.is_none());

    let all = Limits { names: 10_000, go_on: &|| true };
    let seen = look(at.as_fd(), &lower, &Index::default(), &all, &mut |_| {}).unwrap().unwrap();
    assert_eq!((seen.complete, seen.changes.created), (true, 500));

    let mut deep = upper.clone();
    for _ in 0..400 {
        deep.push("d");
        // Paths grow too long for one call.
        if fs::create_dir(&deep).is_err() {
            break;
        }
    }
    let cut = look(at.as_fd(), &lower, &seen.index.unwrap(), &all, &mut |_| {}).unwrap().unwrap();
    assert!(!cut.complete && cut.changes.deleted == 0, "{:?}", cut.changes);

    let ended = Limits { names: 10_000, go_on: &|| false };
    assert!(look(at.as_fd(), &lower, &Index::default(), &ended, &mut |_| {}).unwrap().is_none());
}
