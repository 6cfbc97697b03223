//! A small root filesystem made from this host's own programs, for tests that need one fast.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Programs tests use inside a sandbox. Those the host lacks are left out.
const PROGRAMS: &[&str] = &[
    "sh",
    "bash",
    "cat",
    "chmod",
    "chown",
    "cp",
    "cut",
    "date",
    "dd",
    "df",
    "du",
    "echo",
    "env",
    "expr",
    "false",
    "find",
    "getent",
    "getfattr",
    "grep",
    "head",
    "hostname",
    "id",
    "kill",
    "ln",
    "ls",
    "md5sum",
    "mkdir",
    "mkfifo",
    "mknod",
    "mktemp",
    "mount",
    "mv",
    "nproc",
    "od",
    // Its built-in sockets are the one way here to listen on a port.
    "perl",
    "printf",
    "ps",
    "pwd",
    "readlink",
    "rm",
    "rmdir",
    "sed",
    "seq",
    "setfattr",
    "sha256sum",
    "sleep",
    "sort",
    "stat",
    "stty",
    "sync",
    "tail",
    "tar",
    "tee",
    "test",
    "timeout",
    "touch",
    "tr",
    "true",
    "truncate",
    "tty",
    "umount",
    "uname",
    "unshare",
    "wc",
    "whoami",
    "yes",
];

const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home/user:/bin/sh\n\
nobody:x:65534:65534:nobody:/:/bin/false\n";
const GROUP: &str = "root:x:0:\ntty:x:5:\nuser:x:1000:\nnogroup:x:65534:\n";

/// Names a tarball that was made on another machine, which is then taken as it is.
pub(crate) const SMALL_ROOT: &str = "SANDKEEP_TEST_SMALL_ROOT";

/// Writes a root tarball of some 15 MB to `path`: a shell, the core utilities and their libraries, the
/// users `root`, `user` (1000) and `nobody`, and the usual directories.
///
/// # Errors
///
/// Returns what the system says when `path` cannot be written or a program cannot be read.
pub fn small_root_tar(path: &Path) -> io::Result<()> {
    if let Some(made) = std::env::var_os(SMALL_ROOT) {
        return fs::copy(made, path).map(drop);
    }
    small_root_with(path, &[])
}

/// The same with more programs, those that the host has.
///
/// # Errors
///
/// As [`small_root_tar`].
pub fn small_root_with(path: &Path, more: &[&str]) -> io::Result<()> {
    let mut builder = tar::Builder::new(io::BufWriter::new(fs::File::create(path)?));
    for (name, mode) in [
        ("bin", 0o755),
        ("dev", 0o755),
        ("etc", 0o755),
        ("home", 0o755),
        ("lib", 0o755),
        ("lib64", 0o755),
        ("proc", 0o555),
        ("root", 0o700),
        ("run", 0o755),
        ("sys", 0o555),
        ("tmp", 0o1777),
        ("usr", 0o755),
        ("var", 0o755),
        ("work", 0o777),
    ] {
        directory(&mut builder, name, mode, 0)?;
    }
    directory(&mut builder, "home/user", 0o755, 1000)?;
    text(&mut builder, "etc/passwd", PASSWD)?;
    text(&mut builder, "etc/group", GROUP)?;
    text(&mut builder, "etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n")?;
    let mut libraries = BTreeSet::new();
    for program in PROGRAMS.iter().chain(more) {
        let Some(found) = on_path(program) else { continue };
        libraries.extend(needed_libraries(&found)?);
        copy(&mut builder, &found, &Path::new("bin").join(program), 0o755)?;
    }
    for library in libraries {
        let inside = library.strip_prefix("/").unwrap_or(&library).to_path_buf();
        copy(&mut builder, &library, &inside, 0o755)?;
    }
    builder.into_inner()?.into_inner().map_err(io::IntoInnerError::into_error)?;
    Ok(())
}

pub(crate) fn on_path(program: &str) -> Option<PathBuf> {
    ["/bin", "/usr/bin", "/sbin", "/usr/sbin"]
        .iter()
        .map(|place| Path::new(place).join(program))
        .find(|path| path.is_file())
}

/// The libraries of a program and its loader, as `ldd` finds them.
pub(crate) fn needed_libraries(program: &Path) -> io::Result<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(program).output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    // `libc.so.6 => /lib/…/libc.so.6 (0x…)` or `/lib64/ld-linux-x86-64.so.2 (0x…)`.
    let path =
        |line: &str| line.split_whitespace().find(|word| word.starts_with('/')).map(PathBuf::from);
    Ok(text.lines().filter_map(path).collect())
}

type Builder = tar::Builder<io::BufWriter<fs::File>>;

fn header(kind: tar::EntryType, mode: u32, size: u64, owner: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    header.set_uid(owner);
    header.set_gid(owner);
    header.set_mtime(1_700_000_000);
    header
}

fn directory(builder: &mut Builder, name: &str, mode: u32, owner: u64) -> io::Result<()> {
    let mut header = header(tar::EntryType::Directory, mode, 0, owner);
    builder.append_data(&mut header, format!("{name}/"), io::empty())
}

fn text(builder: &mut Builder, name: &str, text: &str) -> io::Result<()> {
    let mut header = header(tar::EntryType::Regular, 0o644, text.len() as u64, 0);
    builder.append_data(&mut header, name, text.as_bytes())
}

fn copy(builder: &mut Builder, from: &Path, to: &Path, mode: u32) -> io::Result<()> {
    let content = fs::read(from)?;
    let mut header = header(tar::EntryType::Regular, mode, content.len() as u64, 0);
    builder.append_data(&mut header, to, content.as_slice())
}
