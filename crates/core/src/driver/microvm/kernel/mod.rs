//! The kernel that machines run, and what it starts: an initramfs with the agent and a few modules.
//!
//! ```text
//! kernel/vmlinuz        as it was given
//! kernel/head           the beginning of it, which is all that the hypervisor of a restored machine looks at
//! kernel/modules.cpio   the modules that a machine needs, and the order in which they are loaded
//! kernel/initramfs      modules.cpio, then the agent: the kernel unpacks one after the other
//! kernel/kernel.json    what they are
//! ```
//!
//! The modules are kept by themselves so that a daemon with another agent than the one that was set up can write the initramfs
//! again, long after the modules it came from are gone.

mod cpio;
mod modules;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

const FORMAT: u32 = 1;
const RECORD: &str = "kernel.json";
const MODULES: &str = "modules.cpio";

/// A kernel that machines can be started with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// The kernel.
    pub vmlinuz: PathBuf,
    /// The first part of it: enough to be taken for a kernel where none is started.
    pub head: PathBuf,
    /// What it starts.
    pub initramfs: PathBuf,
    /// SHA-256 of both, in hexadecimal: a machine's memory is of no use with another kernel or agent.
    pub digest: String,
}

/// `kernel.json`.
#[derive(Debug, Serialize, Deserialize)]
struct KernelRecord {
    format: u32,
    /// Of `vmlinuz` and `initramfs`, one after the other.
    digest: String,
    /// Of the agent in the initramfs.
    agent: String,
    /// What the modules are, in the order in which they are loaded.
    modules: Vec<String>,
}

/// Makes the directory `into` a kernel's, from a kernel and the directory with its modules. `into` has the old or the new kernel if this
/// breaks off, or none: `kernel.json` is written last.
///
/// # Errors
///
/// Fails when something cannot be read or written, or when the kernel lacks something a machine needs, and says what.
pub fn prepare(vmlinuz: &Path, modules: &Path, agent: &[u8], into: &Path) -> io::Result<Kernel> {
    let found = modules::closure(modules)?;
    let mut archive = cpio::CpioArchive::new();
    archive.directory("modules");
    let mut order = String::new();
    for module in &found {
        archive.file(&format!("modules/{}.ko", module.name), 0o644, &module.image)?;
        order.push_str(&module.name);
        order.push_str(".ko\n");
    }
    archive.file("modules/order", 0o644, order.as_bytes())?;
    fs::create_dir_all(into).map_err(|error| at(into, &error))?;
    // Without a record, the existing files do not count.
    match fs::remove_file(into.join(RECORD)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(at(&into.join(RECORD), &error));
        }
        _ => {}
    }
    save(&into.join("vmlinuz"), &read(vmlinuz)?)?;
    save(&into.join(MODULES), &archive.finish())?;
    write_initramfs(into, agent, found.into_iter().map(|module| module.name).collect())
}

/// The kernel in a directory, with this agent: if it has another one, its initramfs is written again.
///
/// # Errors
///
/// Fails with [`io::ErrorKind::NotFound`] when no kernel was prepared there, and when it cannot be read or written.
pub fn open(dir: &Path, agent: &[u8]) -> io::Result<Kernel> {
    let path = dir.join(RECORD);
    let text = read(&path)?;
    let record: KernelRecord = serde_json::from_slice(&text)
        .map_err(|error| at(&path, &io::Error::new(io::ErrorKind::InvalidData, error)))?;
    if record.format != FORMAT {
        let error = format!("format {} is not known here", record.format);
        return Err(at(&path, &io::Error::new(io::ErrorKind::InvalidData, error)));
    }
    if record.agent == hex::encode(Sha256::digest(agent)) {
        return kernel(dir, record.digest);
    }
    write_initramfs(dir, agent, record.modules)
}

/// Writes the initramfs and the record.
fn write_initramfs(dir: &Path, agent: &[u8], modules: Vec<String>) -> io::Result<Kernel> {
    let mut initramfs = read(&dir.join(MODULES))?;
    let mut archive = cpio::CpioArchive::new();
    archive.directory("dev");
    // What the kernel opens for its first process, before anything is mounted.
    archive.device("dev/console", 0o600, (5, 1));
    archive.file("init", 0o755, agent)?;
    initramfs.extend(archive.finish());
    save(&dir.join("initramfs"), &initramfs)?;
    let mut digest = Sha256::new();
    digest.update(read(&dir.join("vmlinuz"))?);
    digest.update(&initramfs);
    let digest = hex::encode(digest.finalize());
    let agent = hex::encode(Sha256::digest(agent));
    let record = KernelRecord { format: FORMAT, digest: digest.clone(), agent, modules };
    let text = serde_json::to_vec_pretty(&record).map_err(io::Error::other)?;
    save(&dir.join(RECORD), &text)?;
    kernel(dir, digest)
}

fn kernel(dir: &Path, digest: String) -> io::Result<Kernel> {
    let (vmlinuz, head) = (dir.join("vmlinuz"), dir.join("head"));
    let bytes = head_of(&vmlinuz).map_err(|error| at(&vmlinuz, &error))?;
    if fs::read(&head).ok().as_ref() != Some(&bytes) {
        save(&head, &bytes)?;
    }
    Ok(Kernel { vmlinuz, head, initramfs: dir.join("initramfs"), digest })
}

/// The part of a bzImage that runs in real mode, whose length is in its header, and a page of what
/// follows.
fn head_of(vmlinuz: &Path) -> io::Result<Vec<u8>> {
    const SECTOR: u64 = 512;
    const SETUP_SECTORS: usize = 0x1f1;
    use std::io::Read as _;
    let mut file = fs::File::open(vmlinuz)?;
    let mut bytes = Vec::new();
    file.by_ref().take(2 * SECTOR).read_to_end(&mut bytes)?;
    // In the oldest protocol, zero means four.
    let sectors = bytes.get(SETUP_SECTORS).copied().filter(|sectors| *sectors > 0).unwrap_or(4);
    let length = (u64::from(sectors) + 1) * SECTOR + 4096;
    let rest = length.max(16 << 10).saturating_sub(bytes.len() as u64);
    file.take(rest).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    fs::read(path).map_err(|error| at(path, &error))
}

/// Writes a file whole or not at all. Machines that run have the old one open.
fn save(path: &Path, bytes: &[u8]) -> io::Result<()> {
    use std::io::Write as _;
    let write = || {
        let parent = path.parent().unwrap_or(Path::new("."));
        let mut draft = tempfile::NamedTempFile::new_in(parent)?;
        draft.write_all(bytes)?;
        draft.as_file().set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644))?;
        draft.as_file().sync_all()?;
        draft.persist(path)?;
        fs::File::open(parent)?.sync_all()
    };
    write().map_err(|error| at(path, &error))
}

fn at(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("`{}`: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::modules::tests::module;
    use super::{open, prepare};

    #[test]
    fn another_agent_makes_another_initramfs() {
        let dir = tempfile::tempdir().expect("a directory");
        let (modules, into) = (dir.path().join("modules"), dir.path().join("kernel"));
        fs::create_dir_all(modules.join("kernel")).expect("a directory");
        for name in super::modules::NEEDED {
            fs::write(modules.join(format!("kernel/{name}.ko")), module("")).expect("a file");
        }
        let vmlinuz = dir.path().join("vmlinuz");
        fs::write(&vmlinuz, b"kernel").expect("a file");
        assert!(open(&into, b"one").is_err());
        let one = prepare(&vmlinuz, &modules, b"one", &into).expect("a kernel");
        assert_eq!(open(&into, b"one").expect("the same"), one);
        let first = fs::read(&one.initramfs).expect("a file");
        fs::remove_dir_all(&modules).expect("no longer needed");
        let two = open(&into, b"two").expect("the same kernel");
        assert_ne!(two.digest, one.digest);
        assert_ne!(fs::read(&two.initramfs).expect("a file"), first);
        assert_eq!(open(&into, b"one").expect("back").digest, one.digest);
        assert_eq!(fs::read(&one.initramfs).expect("a file"), first);
    }
}
