//! What a server uses on its host besides the data directory.
//!
//! Several servers can live on one host, each with its own data directory; what lies outside it (the
//! runtime directory, the control group) carries the *mark* of the directory, the beginning of its
//! identity, so that a restarted server finds its own sandboxes only, also when the directory was
//! moved.
//!
//! A copy of a data directory has the same mark, and must not take the original's machines for its own: the layers they
//! write to are others. So the user of a mark writes to `<mark>.owner` which directory it is, by
//! device and inode, which a move does not change, and has that file locked. A server that finds
//! another one there gives its directory a new identity.

use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use sandkeep_core::driver::any_alive;
use sandkeep_core::driver::container::ContainerConfig;
use sandkeep_core::driver::microvm::MicrovmConfig;
use sandkeep_core::embedded::AGENT;
use sandkeep_core::model::Reserve;
use sandkeep_core::store::Store;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::config::MicrovmSettings;
use crate::failure::Failure;

/// Where runtime directories lie; gone after a reboot, as the machines are.
const RUN: &str = "/run/sandkeep";

/// Writes the agent program into `bin`, under a name that says which one it is: sandboxes that an
/// older server started keep using theirs.
pub(crate) fn install_agent(bin: &Path) -> io::Result<PathBuf> {
    let agent = AGENT.bytes();
    let path = bin.join(format!("keep-agent-{}", short_hash(&agent)));
    if fs::read(&path).is_ok_and(|there| there == agent) {
        return Ok(path);
    }
    fs::DirBuilder::new().recursive(true).mode(0o755).create(bin)?;
    let fresh = bin.join(format!(".keep-agent-{}", std::process::id()));
    let mut file =
        fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o755).open(&fresh)?;
    file.write_all(&agent)?;
    file.sync_all()?;
    // Closed before it is run: a program that is open for writing cannot be executed.
    drop(file);
    fs::rename(&fresh, &path)?;
    Ok(path)
}

/// The first of the uids of hypervisors that are no machine's yet: behind all that sandboxes may have.
const WARM_HYPERVISOR_UIDS: u32 = 0xE000_0000;

/// Which data directory uses a mark.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Owner {
    device: u64,
    inode: u64,
    path: PathBuf,
}

impl Owner {
    fn of(data: &Path) -> io::Result<Self> {
        let found = fs::metadata(data)?;
        Ok(Self { device: found.dev(), inode: found.ino(), path: data.to_path_buf() })
    }

    fn is(&self, other: &Self) -> bool {
        (self.device, self.inode) == (other.device, other.inode)
    }

    /// Whether the directory is still where it was.
    fn is_there(&self) -> bool {
        Self::of(&self.path).is_ok_and(|found| found.is(self))
    }
}

/// A mark that is this server's as long as this lives.
#[derive(Debug)]
pub(crate) struct Claim {
    mark: String,
    run: PathBuf,
    _lock: File,
}

impl Claim {
    /// The mark.
    pub(crate) fn mark(&self) -> &str {
        &self.mark
    }

    /// Gives it up, unless sandboxes still use it.
    pub(crate) fn retire(self) {
        if !in_use(&self.run, &self.mark) {
            let _ = fs::remove_file(owner_file(&self.run, &self.mark));
        }
    }
}

/// How long a server that is ending may still hold the lock of a data directory that it has
/// released.
const LETTING_GO: Duration = Duration::from_secs(10);

/// Takes the mark of a data directory. A copy of one that is in use is given another identity.
pub(crate) async fn claim(store: &Store) -> Result<Claim, Failure> {
    claim_in(Path::new(RUN), store).await
}

async fn claim_in(run: &Path, store: &Store) -> Result<Claim, Failure> {
    let failed = |error| Failure::caused(format!("cannot use `{}`", run.display()), error);
    fs::DirBuilder::new().recursive(true).mode(0o700).create(run).map_err(failed)?;
    let own = Owner::of(store.data_dir()).map_err(failed)?;
    for _ in 0..3 {
        let mark = store.mark();
        let path = owner_file(run, &mark);
        let alive = directories(run, &mark).iter().any(|dir| any_alive(dir));
        match take(&path, &own, alive).await.map_err(failed)? {
            Ok(lock) => return Ok(Claim { mark, run: run.to_path_buf(), _lock: lock }),
            Err(original) => {
                tracing::warn!(original = %original.path.display(), "this data directory is a copy of one that is in use on this host; it gets an id of its own, and running sandboxes of the original are not touched");
                store.renew_identity().await.map_err(|error| {
                    Failure::caused("cannot give the copied data directory an id of its own", error)
                        .with_hint("free some space, or make the data directory writable")
                })?;
            }
        }
    }
    Err(Failure::here("cannot find a name for this server that is not in use"))
}

/// Locks the file that says whose a mark is. `Err` within: it is another's.
async fn take(path: &Path, own: &Owner, alive: bool) -> io::Result<Result<File, Owner>> {
    let begun = Instant::now();
    loop {
        let mut file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)?;
        let locked = rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive);
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        let there: Option<Owner> = serde_json::from_str(&text).ok();
        let other = there.filter(|there| !there.is(own));
        match (locked, other) {
            (Err(Errno::WOULDBLOCK), Some(other)) => return Ok(Err(other)),
            (Err(Errno::WOULDBLOCK), None) if begun.elapsed() < LETTING_GO => {
                // Of this very directory, whose lock we have: its server is just ending.
                tokio::time::sleep(Duration::from_millis(20)).await;
                continue;
            }
            (Err(error), _) => return Err(error.into()),
            // What dead machines left is no reason: a filesystem that is mounted again may be another device.
            (Ok(()), Some(other)) if alive || other.is_there() => return Ok(Err(other)),
            (Ok(()), _) => {}
        }
        // It may have been given up between opening and locking it.
        let same = fs::metadata(path).is_ok_and(|there| {
            file.metadata().is_ok_and(|held| (held.dev(), held.ino()) == (there.dev(), there.ino()))
        });
        if same {
            file.set_len(0)?;
            file.rewind()?;
            file.write_all(&serde_json::to_vec(own)?)?;
            return Ok(Ok(file));
        }
    }
}

fn owner_file(run: &Path, mark: &str) -> PathBuf {
    run.join(format!("{mark}.owner"))
}

/// Where machines under a mark have their directories.
fn directories(run: &Path, mark: &str) -> [PathBuf; 2] {
    [run.join(mark), run.join(format!("{mark}-microvm"))]
}

/// Whether there are machines under a mark, or what they left.
fn in_use(run: &Path, mark: &str) -> bool {
    directories(run, mark)
        .iter()
        .any(|dir| fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_some()))
}

/// Where the container driver of a server keeps things.
pub(crate) fn container_config(agent: PathBuf, mark: &str) -> ContainerConfig {
    ContainerConfig {
        agent,
        run_dir: Path::new(RUN).join(mark),
        cgroup_parent: format!("sandkeep-{mark}"),
    }
}

/// A mark for what is not a server's, and is over soon.
pub(crate) fn scratch_mark(path: &Path) -> String {
    short_hash(path.as_os_str().as_encoded_bytes())
}

/// Where the microvm driver of the server on `data` keeps things.
pub(crate) fn microvm_config(
    agent: PathBuf,
    data: &Path,
    mark: &str,
    settings: &MicrovmSettings,
) -> MicrovmConfig {
    let container = container_config(agent, mark);
    let beside = |name: &str| format!("{name}-microvm");
    MicrovmConfig {
        agent: container.agent,
        run_dir: PathBuf::from(beside(&container.run_dir.to_string_lossy())),
        cgroup_parent: beside(&container.cgroup_parent),
        cache_dir: data.join("microvm"),
        qemu: settings.qemu.clone(),
        warm_hypervisors: settings.warm_hypervisors,
        warm_uids: WARM_HYPERVISOR_UIDS,
        reserve: Reserve::default(),
    }
}

/// Where the kernel of machines is, which `keep microvm setup` prepares.
pub(crate) fn kernel_dir(data: &Path) -> PathBuf {
    data.join("microvm").join("kernel")
}

fn short_hash(bytes: &[u8]) -> String {
    hex::encode(&Sha256::digest(bytes)[..6])
}

/// Explains why root is needed, to other users.
pub(crate) fn need_root(what: &str) -> Result<(), Failure> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let message = format!(
        "`{what}` needs root: the mounts, control groups and ranges of user ids that keep sandboxes apart are root's to give"
    );
    let hint = format!(
        "run `sudo {what}`; clients need no root. `keep doctor` tells what else this host lacks"
    );
    Err(Failure::here(message).with_hint(hint))
}

#[cfg(test)]
mod tests {
    use sandkeep_core::store::Store;

    use super::{claim_in, container_config, install_agent};

    #[test]
    fn the_agent_is_written_once_and_runs() {
        let bin = tempfile::tempdir().unwrap();
        let path = install_agent(bin.path()).unwrap();
        let first = path.metadata().unwrap().modified().unwrap();
        assert_eq!(install_agent(bin.path()).unwrap(), path);
        assert_eq!(path.metadata().unwrap().modified().unwrap(), first);
        assert_eq!(bin.path().read_dir().unwrap().count(), 1);
    }

    #[tokio::test]
    async fn a_copy_is_told_from_what_was_moved() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("run");
        let [first, moved, copy] = ["first", "moved", "copy"].map(|name| dir.path().join(name));
        let store = Store::open(&first).unwrap();
        let claim = claim_in(&run, &store).await.unwrap();
        let mark = claim.mark().to_owned();
        assert_eq!(mark, store.mark());
        // While its server runs, and when only its sandboxes do.
        let copied = std::process::Command::new("cp").arg("-a").arg(&first).arg(&copy).status();
        assert!(copied.unwrap().success());
        let other = Store::open(&copy).unwrap();
        assert_eq!(other.mark(), mark);
        let taken = claim_in(&run, &other).await.unwrap();
        assert_ne!(taken.mark(), mark);
        assert_eq!(taken.mark(), other.mark());
        drop((claim, store, taken, other));
        std::fs::create_dir_all(run.join(&mark).join("sbx-1")).unwrap();
        std::fs::rename(&first, &moved).unwrap();
        let store = Store::open(&moved).unwrap();
        let claim = claim_in(&run, &store).await.unwrap();
        assert_eq!(claim.mark(), mark, "its sandboxes are found");
        claim.retire();
        assert!(run.join(format!("{mark}.owner")).exists(), "they go on using it");
        // Mounted again it is another device. Nothing that lives is left of the machine.
        let owner = format!("{{\"device\":1,\"inode\":2,\"path\":{first:?}}}");
        std::fs::write(run.join(format!("{mark}.owner")), owner).unwrap();
        assert_eq!(claim_in(&run, &store).await.unwrap().mark(), mark);
        std::fs::remove_dir(run.join(&mark).join("sbx-1")).unwrap();
        claim_in(&run, &store).await.unwrap().retire();
        assert!(!run.join(format!("{mark}.owner")).exists());
    }

    #[test]
    fn marks_are_part_of_all_names() {
        let of = |mark: &str| container_config("/agent".into(), mark);
        assert_ne!(of("a").run_dir, of("b").run_dir);
        assert_ne!(of("a").cgroup_parent, of("b").cgroup_parent);
    }
}
