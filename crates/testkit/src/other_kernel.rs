//! Runs a test of the program that asks in a virtual machine, under the kernel that machines of tests have: for what the host's own
//! kernel was built without, or what only one version of something shows.
//!
//! The machine has the program itself, the programs and libraries it needs of this host, control groups of version 2, and empty disks.
//! It is emulated, so it takes its time.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::machine::test_kernel;
use crate::root::{SMALL_ROOT, needed_libraries, on_path, small_root_with};

/// Set inside of the machine.
pub const INSIDE: &str = "SANDKEEP_TEST_INSIDE";
/// How long it may take.
const PATIENCE: Duration = Duration::from_secs(600);
/// What the test and the script that starts it use.
const PROGRAMS: [&str; 14] = [
    "sh",
    "cat",
    "chroot",
    "cp",
    "du",
    "ls",
    "mkdir",
    "mkfs.ext4",
    "mkfs.xfs",
    "mount",
    "tar",
    "umount",
    "perl",
    "env",
];
/// What the kernel has as modules.
const MODULES: [&str; 7] =
    ["virtio_pci", "virtio_blk", "overlay", "tun", "quota_v2", "xfs", "loop"];

/// Runs the test `name` of this program, with its module (`view::inside`), in a machine with disks of these sizes, as `/dev/vda` and so on, and with more programs in
/// its `small` image. Returns what it printed.
///
/// # Errors
///
/// Returns why there can be no such machine here, to be printed as `SKIPPED`.
///
/// # Panics
///
/// When the test fails, or does not come to its end.
pub fn run(name: &str, disks: &[u64], more: &[&str]) -> Result<String, String> {
    let kernel = test_kernel()?;
    let dir = TempDir::with_prefix("keep-inside-").map_err(|error| error.to_string())?;
    let root = dir.path().join("root");
    prepare_root(&root, &kernel.modules, name, more)
        .map_err(|error| format!("a root for the machine: {error}"))?;
    let initramfs = dir.path().join("initramfs");
    pack(&root, &initramfs).map_err(|error| format!("an initramfs: {error}"))?;
    let mut qemu = Command::new("qemu-system-x86_64");
    qemu.args(["-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", "2048"])
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
        .args(["-serial", "stdio", "-append", "console=ttyS0 panic=-1 quiet mitigations=off"])
        .arg("-kernel")
        .arg(&kernel.vmlinuz)
        .arg("-initrd")
        .arg(&initramfs);
    for (number, size) in disks.iter().enumerate() {
        let path = dir.path().join(format!("disk-{number}"));
        fs::File::create(&path)
            .and_then(|file| file.set_len(*size))
            .map_err(|error| error.to_string())?;
        qemu.arg("-drive")
            .arg(format!("file={},format=raw,if=virtio,cache=unsafe", path.display()));
    }
    let log = dir.path().join("log");
    let into = fs::File::create(&log).map_err(|error| error.to_string())?;
    qemu.stdin(Stdio::null()).stdout(into).stderr(Stdio::inherit());
    let mut machine = KernelRun(qemu.spawn().map_err(|error| format!("QEMU: {error}"))?);
    let deadline = Instant::now() + PATIENCE;
    let printed = loop {
        let over = machine.0.try_wait().expect("it can be asked").is_some();
        let printed = String::from_utf8_lossy(&fs::read(&log).expect("its log")).into_owned();
        if over || printed.contains("INSIDE ") {
            break printed;
        }
        assert!(Instant::now() < deadline, "it does not end: {printed}");
        std::thread::sleep(Duration::from_millis(100));
    };
    assert!(printed.contains("INSIDE 0"), "the test failed inside: {printed}");
    assert!(printed.contains("1 passed"), "no such test: {printed}");
    Ok(printed)
}

/// Ends with the test.
struct KernelRun(Child);

impl Drop for KernelRun {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn prepare_root(root: &Path, modules: &Path, name: &str, more: &[&str]) -> io::Result<()> {
    for part in ["bin", "dev", "etc", "lib", "lib64", "modules", "new", "proc", "run", "sys", "tmp"]
    {
        fs::create_dir_all(root.join(part))?;
    }
    let mut libraries = BTreeSet::new();
    let own = std::env::current_exe()?;
    let programs =
        PROGRAMS.iter().filter_map(|program| Some(((*program).to_owned(), on_path(program)?)));
    for (program, found) in programs.chain([("own-test".to_owned(), own)]) {
        libraries.extend(needed_libraries(&found)?);
        let to = root.join("bin").join(&program);
        fs::copy(&found, &to)?;
        if program == "own-test" {
            // What is for a debugger is most of it.
            let _ = Command::new("strip").arg(&to).status();
        }
    }
    for library in libraries {
        let to = root.join(library.strip_prefix("/").unwrap_or(&library));
        fs::create_dir_all(to.parent().unwrap_or(root))?;
        fs::copy(&library, &to)?;
    }
    let mut loaded = Vec::new();
    let files = files_of(modules)?;
    for module in MODULES {
        load(module, &files, &mut loaded)?;
    }
    let mut script = String::from(
        "#!/bin/sh\nexport PATH=/bin\nmount -t proc proc /proc\nmount -t sysfs sys /sys\nmount -t devtmpfs dev /dev\n",
    );
    for module in &loaded {
        fs::copy(&files[module], root.join("modules").join(module))?;
        // `finit_module`: not every host has `insmod`.
        script.push_str(&format!("perl -e 'open F, \"/modules/{module}\"; $o = \"\"; syscall(313, fileno F, $o, 0) == 0 or warn \"{module}: $!\"'\n"));
    }
    // The root of an initramfs cannot be pivoted away from: one in memory is mounted on top of it.
    // The last line keeps the kernel from panicking before the serial port has sent the line before
    // it.
    script.push_str(&format!(
        "mount -t tmpfs -o size=90% new /new\ncp -a /bin /etc /lib /lib64 /small.tar /new/\ncd /new\n\
         mkdir dev proc run sys tmp mnt usr usr/bin\nfor p in dev proc sys; do mount --move /$p $p; done\n\
         mount --move . /\nexec chroot . /bin/sh -c '\n\
         mkdir -p /dev/pts /dev/shm; mount -t devpts devpts /dev/pts; mount -t tmpfs tmp /tmp; mount -t tmpfs run /run\n\
         mount -t cgroup2 cgroup2 /sys/fs/cgroup\n\
         export {INSIDE}=1 {SMALL_ROOT}=/small.tar RUST_BACKTRACE=1\n\
         own-test --exact {name} --nocapture 2>&1\necho INSIDE $?\nperl -e \"sleep 60\"\n'\n",
    ));
    let init = root.join("init");
    fs::write(&init, script)?;
    fs::set_permissions(&init, fs::Permissions::from_mode(0o755))?;
    small_root_with(&root.join("small.tar"), more)
}

/// The files of a kernel's modules, by the names modules have.
fn files_of(modules: &Path) -> io::Result<BTreeMap<String, PathBuf>> {
    let mut files = BTreeMap::new();
    let mut left = vec![modules.to_owned()];
    while let Some(dir) = left.pop() {
        for entry in fs::read_dir(dir)? {
            let path = entry?.path();
            if path.is_dir() && !path.is_symlink() {
                left.push(path);
            } else if let Some(name) =
                path.file_name().and_then(|name| name.to_str()?.strip_suffix(".ko"))
            {
                files.insert(name.replace('-', "_"), path.clone());
            }
        }
    }
    Ok(files)
}

/// Adds a module behind all it depends on. One that there is no file of is part of the kernel.
fn load(name: &str, files: &BTreeMap<String, PathBuf>, loaded: &mut Vec<String>) -> io::Result<()> {
    let name = name.replace('-', "_");
    let Some(file) = files.get(&name).filter(|_| !loaded.contains(&name)) else { return Ok(()) };
    let bytes = fs::read(file)?;
    let mark = b"\0depends=";
    let depends = bytes.windows(mark.len()).position(|window| window == mark).map(|at| {
        let text = &bytes[at + mark.len()..];
        let end = text.iter().position(|byte| *byte == 0).unwrap_or(0);
        String::from_utf8_lossy(&text[..end]).into_owned()
    });
    for other in depends.unwrap_or_default().split(',').filter(|other| !other.is_empty()) {
        load(other, files, loaded)?;
    }
    loaded.push(name);
    Ok(())
}

/// Packs a tree as the kernel reads it: cpio, in its newer form.
fn pack(root: &Path, into: &Path) -> io::Result<()> {
    let mut out = io::BufWriter::new(fs::File::create(into)?);
    let mut left = vec![root.to_owned()];
    let mut at = 0;
    while let Some(path) = left.pop() {
        let name = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
        if path.is_dir() {
            for entry in fs::read_dir(&path)? {
                left.push(entry?.path());
            }
            if !name.is_empty() {
                write_entry(&mut out, &mut at, &name, 0o040_755, &[])?;
            }
        } else {
            write_entry(&mut out, &mut at, &name, 0o100_755, &fs::read(&path)?)?;
        }
    }
    write_entry(&mut out, &mut at, "TRAILER!!!", 0, &[])?;
    out.flush()
}

fn write_entry(
    out: &mut impl io::Write,
    number: &mut u32,
    name: &str,
    mode: u32,
    bytes: &[u8],
) -> io::Result<()> {
    *number += 1;
    let size = bytes.len();
    let (links, length) = (if bytes.is_empty() { 2 } else { 1 }, name.len() + 1);
    let head = format!(
        "070701{number:08x}{mode:08x}{:08x}{:08x}{links:08x}{:08x}{size:08x}{:08x}{:08x}{:08x}{:08x}{length:08x}{:08x}",
        0, 0, 0, 0, 0, 0, 0, 0
    );
    let pad = |length: usize| [0; 4][..(4 - length % 4) % 4].to_vec();
    out.write_all(head.as_bytes())?;
    out.write_all(name.as_bytes())?;
    out.write_all(&[0])?;
    out.write_all(&pad(head.len() + length))?;
    out.write_all(bytes)?;
    out.write_all(&pad(size))
}
