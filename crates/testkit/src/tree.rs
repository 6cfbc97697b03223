//! Trees that are hard to keep: built, changed at random, described byte for byte, and stacked.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CString, OsStr, OsString};
use std::fmt::Write as _;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hasher};
use std::io::{self, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{
    FileExt, FileTypeExt, MetadataExt, PermissionsExt, chown, lchown, symlink,
};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, XattrFlags};
use rustix::mount::{MountFlags, UnmountFlags};

/// Fills `root` with one of everything a sandbox may leave behind.
///
/// # Panics
///
/// Panics when it is not allowed to: it needs root and a filesystem with extended attributes.
pub fn nasty(root: &Path) {
    let at = |name: &str| root.join(name);
    let file = |name: &str, content: &[u8]| fs::write(at(name), content).expect("a file");
    for dir in ["dir/deep/er", "empty", "gone/inner", "swap", "kept", "odd"] {
        fs::create_dir_all(at(dir)).expect("a directory");
    }
    file("dir/plain", b"plain\n");
    file("dir/deep/er/leaf", &[7; 5000]);
    file("gone/inner/x", b"to be deleted");
    file("swap/file", b"dir to become a file");
    file("tofile", b"file to become a dir");
    file("kept/a", b"linked");
    fs::hard_link(at("kept/a"), at("kept/b")).expect("a link");
    fs::hard_link(at("kept/a"), at("dir/c")).expect("a link");
    symlink("../dir/plain", at("kept/link")).expect("a symlink");
    symlink("/etc/passwd", at("absolute")).expect("a symlink");
    symlink("x".repeat(200), at("dangling")).expect("a symlink");
    let sparse = File::create(at("sparse")).expect("a file");
    sparse.write_all_at(b"far", 3 << 20).expect("room");
    sparse.set_len(8 << 20).expect("room");
    file("setuid", b"#!/bin/sh\n");
    chown(at("setuid"), Some(1000), Some(1001)).expect("root");
    fs::set_permissions(at("setuid"), fs::Permissions::from_mode(0o6755)).expect("root");
    fs::set_permissions(at("empty"), fs::Permissions::from_mode(0o1777)).expect("root");
    lchown(at("dangling"), Some(70_000), Some(3_000_000)).expect("root");
    fs::write(root.join(odd_name(b"new\nline")), b"1").expect("a file");
    fs::write(root.join(odd_name(b"bad\xff\xfeutf8")), b"2").expect("a file");
    fs::write(root.join("odd").join("n".repeat(255)), b"3").expect("a file");
    fs::write(root.join("odd").join(OsString::from_vec(vec![0xe9; 255])), b"4").expect("a file");
    fs::write(root.join("odd/ spaces %41 \\ \t"), b"5").expect("a file");
    set_xattr(&at("dir/plain"), "user.note", b"bytes \0 and more");
    set_xattr(&at("dir"), "user.dirnote", &[1; 300]);
    set_xattr(&at("setuid"), "trusted.mark", b"t");
    rustix::fs::mknodat(CWD, at("pipe"), FileType::Fifo, Mode::RUSR, 0).expect("a pipe");
    for name in ["dir/plain", "kept", "sparse"] {
        set_time(&at(name), 1_000_000_000, 123_456_789);
    }
}

fn odd_name(bytes: &[u8]) -> PathBuf {
    Path::new("odd").join(OsStr::from_bytes(bytes))
}

/// Sets an extended attribute.
///
/// # Panics
///
/// Panics when the filesystem refuses.
pub fn set_xattr(path: &Path, name: &str, value: &[u8]) {
    rustix::fs::lsetxattr(path, name, value, XattrFlags::empty()).expect("extended attributes");
}

fn set_time(path: &Path, seconds: i64, nanos: i64) {
    let time = rustix::fs::Timespec { tv_sec: seconds, tv_nsec: nanos };
    let times = rustix::fs::Timestamps { last_access: time, last_modification: time };
    rustix::fs::utimensat(CWD, path, &times, rustix::fs::AtFlags::SYMLINK_NOFOLLOW).expect("times");
}

/// Deletes and replaces parts of what [`nasty`] made, as a session would through its root.
///
/// # Panics
///
/// Panics when it cannot.
pub fn upset(root: &Path) {
    let at = |name: &str| root.join(name);
    fs::remove_dir_all(at("gone")).expect("gone");
    fs::remove_dir_all(at("swap")).expect("swap");
    fs::write(at("swap"), b"now a file").expect("a file");
    fs::remove_file(at("tofile")).expect("tofile");
    fs::create_dir(at("tofile")).expect("a directory");
    fs::write(at("tofile/in"), b"now a dir").expect("a file");
    fs::remove_dir_all(at("dir")).expect("dir");
    fs::create_dir_all(at("dir/deep")).expect("a directory");
    fs::write(at("dir/deep/new"), b"in a new dir of an old name").expect("a file");
    fs::remove_file(at("kept/b")).expect("kept/b");
    fs::hard_link(at("kept/a"), at("kept/again")).expect("a link");
    fs::remove_file(root.join(odd_name(b"bad\xff\xfeutf8"))).expect("an odd file");
    let mut log = File::options().append(true).open(at("setuid")).expect("setuid");
    log.write_all(b"more").expect("room");
    set_xattr(&at("kept/a"), "user.late", b"1");
    set_time(&at("kept/again"), 5, 6);
}

/// Does `steps` random things to a small set of names under `root`. What fails, fails: a name may be
/// taken, or a directory on its way not there.
pub fn churn(root: &Path, seed: u64, steps: usize) {
    let mut random = TreeRandom(seed.wrapping_mul(2).wrapping_add(0x9e37_79b9_7f4a_7c15));
    for _ in 0..steps {
        let _ = change(root, &mut random);
    }
}

fn change(root: &Path, random: &mut TreeRandom) -> io::Result<()> {
    let path = random.path(root);
    let other = random.path(root);
    match random.below(16) {
        0..=3 => {
            let length = random.below(3) * 3000;
            fs::write(&path, vec![random.below(256) as u8; length + 1])
        }
        4 | 5 => fs::create_dir_all(&path),
        6 => fs::remove_dir_all(&path),
        7 => fs::remove_file(&path),
        8 => fs::rename(&path, &other),
        9 => fs::hard_link(&path, &other),
        10 => symlink(random.below(9).to_string(), &path),
        11 => {
            let mode = [0o644, 0o4755, 0o700, 0o1777][random.below(4)];
            fs::set_permissions(&path, fs::Permissions::from_mode(mode))
        }
        12 => lchown(&path, Some(random.below(3) as u32), Some(random.below(3) as u32)),
        13 => {
            let value = random.below(9).to_string();
            let set = rustix::fs::lsetxattr(&path, "user.k", value.as_bytes(), XattrFlags::empty());
            Ok(set?)
        }
        14 => {
            let file = File::options().write(true).open(&path)?;
            file.write_all_at(b"!", random.below(5000) as u64)
        }
        _ => {
            fs::remove_dir_all(&path)?;
            fs::create_dir(&path)?;
            fs::write(path.join("a"), b"new")
        }
    }
}

/// Numbers that are the same for the same seed.
struct TreeRandom(u64);

impl TreeRandom {
    fn below(&mut self, bound: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }

    fn path(&mut self, root: &Path) -> PathBuf {
        let mut path = root.to_owned();
        for _ in 0..=self.below(3) {
            path.push(["a", "b", "c", "d"][self.below(4)]);
        }
        path
    }
}

/// Everything a process could see in a tree, by path: what each name is, its mode, owner, time,
/// attributes and content, and which names are the same file.
///
/// # Panics
///
/// Panics when something cannot be read.
#[must_use]
pub fn describe(root: &Path) -> BTreeMap<String, String> {
    let mut seen = BTreeMap::new();
    let mut first_of = HashMap::new();
    let mut waiting = vec![PathBuf::new()];
    while let Some(below) = waiting.pop() {
        let path = root.join(&below);
        let found = fs::symlink_metadata(&path).expect("a name that was listed");
        let name = below.as_os_str().as_bytes().escape_ascii().to_string();
        if found.is_dir() {
            let mut names: Vec<OsString> = fs::read_dir(&path)
                .expect("a directory")
                .map(|entry| entry.expect("an entry").file_name())
                .collect();
            names.sort();
            waiting.extend(names.into_iter().rev().map(|name| below.join(name)));
        }
        let mut text = description(&path, &found);
        if !found.is_dir() && found.nlink() > 1 {
            let first = first_of.entry(found.ino()).or_insert_with(|| name.clone());
            if *first != name {
                let _ = write!(text, " same as {first}");
            }
        }
        seen.insert(name, text);
    }
    seen
}

fn description(path: &Path, found: &fs::Metadata) -> String {
    let kind = found.file_type();
    let mut text = format!(
        "{:o} {}:{} {}.{:09}",
        found.mode(),
        found.uid(),
        found.gid(),
        found.mtime(),
        found.mtime_nsec()
    );
    if kind.is_symlink() {
        let _ = write!(text, " -> {:?}", fs::read_link(path).expect("a link"));
    } else if kind.is_file() {
        let mut hasher = DefaultHasher::new();
        hasher.write(&fs::read(path).expect("a file"));
        let _ = write!(text, " {} bytes {:016x}", found.len(), hasher.finish());
    } else if kind.is_char_device() || kind.is_block_device() {
        let _ = write!(text, " device {}", found.rdev());
    }
    for (key, value) in xattrs(path) {
        let _ = write!(text, " {}={}", key.to_string_lossy(), value.escape_ascii());
    }
    text
}

fn xattrs(path: &Path) -> Vec<(CString, Vec<u8>)> {
    let mut buffer = vec![0; 64 << 10];
    let length = rustix::fs::llistxattr(path, &mut buffer[..]).unwrap_or(0);
    let mut found = Vec::new();
    for name in buffer[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let name = CString::new(name).expect("split at NUL");
        let mut value = vec![0; 64 << 10];
        let length =
            rustix::fs::lgetxattr(path, name.as_c_str(), &mut value[..]).expect("an attribute");
        value.truncate(length);
        found.push((name, value));
    }
    found.sort();
    found
}

/// Fails and says which names differ, unless both trees are the same.
///
/// # Panics
///
/// Panics when they differ.
pub fn assert_same(
    what: &str,
    expected: &BTreeMap<String, String>,
    found: &BTreeMap<String, String>,
) {
    let mut differences = String::new();
    for (path, text) in expected {
        match found.get(path) {
            None => writeln!(differences, "missing `{path}`: {text}"),
            Some(other) if other != text => {
                writeln!(differences, "`{path}`:\n  expected {text}\n  found    {other}")
            }
            Some(_) => Ok(()),
        }
        .expect("a string takes text");
    }
    for (path, text) in found.iter().filter(|(path, _)| !expected.contains_key(*path)) {
        writeln!(differences, "extra `{path}`: {text}").expect("a string takes text");
    }
    assert!(differences.is_empty(), "{what}:\n{differences}");
}

/// Layers stacked by the kernel; taken apart when dropped.
#[derive(Debug)]
pub struct Overlay {
    at: PathBuf,
}

impl Overlay {
    /// Stacks `lower`, topmost first, and lets writes go to `upper`.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    pub fn writable(at: &Path, lower: &[PathBuf], upper: &Path, work: &Path) -> io::Result<Self> {
        let writes = format!(",upperdir={},workdir={}", upper.display(), work.display());
        Self::mount(at, lower, &writes)
    }

    /// Stacks `lower`, topmost first, for reading. There must be two at least.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    pub fn readable(at: &Path, lower: &[PathBuf]) -> io::Result<Self> {
        Self::mount(at, lower, "")
    }

    fn mount(at: &Path, lower: &[PathBuf], more: &str) -> io::Result<Self> {
        let lower: Vec<String> = lower.iter().map(|path| path.display().to_string()).collect();
        let options = format!("userxattr,lowerdir={}{more}", lower.join(":"));
        let options = CString::new(options).expect("paths have no NUL");
        fs::create_dir_all(at)?;
        rustix::mount::mount("overlay", at, "overlay", MountFlags::empty(), options.as_c_str())?;
        Ok(Self { at: at.to_owned() })
    }

    /// Where it is mounted.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.at
    }
}

impl Drop for Overlay {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.at, UnmountFlags::DETACH);
    }
}

/// A small filesystem in memory; gone when dropped.
#[derive(Debug)]
pub struct SmallDisk {
    at: PathBuf,
}

impl SmallDisk {
    /// Mounts a filesystem of `bytes` at `at`.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    pub fn mount(at: &Path, bytes: u64) -> io::Result<Self> {
        fs::create_dir_all(at)?;
        let options = CString::new(format!("size={bytes}")).expect("no NUL");
        rustix::mount::mount("tmpfs", at, "tmpfs", MountFlags::empty(), options.as_c_str())?;
        Ok(Self { at: at.to_owned() })
    }

    /// Where it is mounted.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.at
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.at, UnmountFlags::DETACH);
    }
}
