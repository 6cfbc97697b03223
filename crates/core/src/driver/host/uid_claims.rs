//! Claims on blocks of user ids, between all daemons of a host.
//!
//! No two sandboxes may share a uid: a process that escapes from one must find no process that it may signal or trace. Within one
//! daemon, the engine assigns ranges (`Uids` there). Between daemons, ids are claimed in *blocks*:
//!
//! ```text
//! /run/sandkeep/uids/<first id>-<count>     locked by the daemon that uses the block; contains its data directory
//! ```
//!
//! Machines outlive their daemon, its lock does not. So a block that is not locked is free only if the same data directory claimed it
//! before, if it was never claimed, or if no process on the host has an id in it. A daemon keeps
//! its blocks until it ends. The directory is shared by all data directories, and gone after a
//! reboot, like the machines.
//!
//! A daemon that starts removes the claims that protect nothing: not locked, and without a process
//! ([`UidClaims::remove_ended`]). To claim, a daemon has the directory locked with others; to remove,
//! alone. So nobody takes a file for a claim that is just being removed.
//!
//! Not covered: daemons that share a kernel but not `/run` (in containers). They need different `uid_base`s.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::FlockOperation;

/// The directory of claims, shared by every daemon on the host.
pub(crate) const CLAIMS_DIR: &str = "/run/sandkeep/uids";
/// The longest owner name in a claim, in bytes.
const LONGEST_OWNER: u64 = 8192;

/// The blocks this process holds. Engines of one process do not see each other's locks as another process would.
static HELD: LazyLock<Mutex<BTreeMap<PathBuf, HeldBlock>>> = LazyLock::new(Mutex::default);

/// The user ids that were in use when this process first asked: what daemons of versions without claims have running. Looked at once,
/// because it takes a while and a machine waits for it.
static AT_START: LazyLock<BTreeSet<u32>> = LazyLock::new(used);

struct HeldBlock {
    owner: String,
    /// How many [`UidClaims`] of that owner use it.
    users: usize,
    /// Locked.
    _file: File,
}

/// What one data directory has claimed.
#[derive(Debug)]
pub(crate) struct UidClaims {
    directory: PathBuf,
    owner: String,
    /// How many ids a block has.
    block: u32,
    ours: Mutex<BTreeSet<u32>>,
}

impl UidClaims {
    /// Those of a data directory, or of a part of it, in blocks of `block` ids.
    pub(crate) fn of(owner: &Path, block: u32) -> Self {
        Self::at(Path::new(CLAIMS_DIR), owner, block)
    }

    /// The same, with claims that only those who name this directory see.
    pub(crate) fn at(directory: &Path, owner: &Path, block: u32) -> Self {
        let owner = fs::canonicalize(owner).unwrap_or_else(|_| owner.to_owned());
        let owner = owner.to_string_lossy().into_owned();
        Self { directory: directory.to_owned(), owner, block: block.max(1), ours: Mutex::default() }
    }

    /// Removes the claims of daemons that have ended and left no machine. Another daemon that claims
    /// or removes at this moment goes first: then they stay until the next start.
    ///
    /// # Errors
    ///
    /// Returns the error of a directory that cannot be used.
    pub(crate) fn remove_ended(&self) -> io::Result<()> {
        let held = HELD.lock();
        let directory = match File::open(&self.directory) {
            Ok(directory) => directory,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        if !lock(&directory, FlockOperation::NonBlockingLockExclusive)? {
            return Ok(());
        }
        let mut in_use = None;
        for entry in fs::read_dir(&self.directory)? {
            let entry = entry?;
            let Some(ids) = claimed(&entry.file_name()) else { continue };
            if held.contains_key(&entry.path()) {
                continue;
            }
            let file = OpenOptions::new().read(true).open(entry.path())?;
            if lock(&file, FlockOperation::NonBlockingLockExclusive)?
                && in_use.get_or_insert_with(used).range(ids).next().is_none()
            {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }

    /// Whether all of these ids are ours already.
    pub(crate) fn has(&self, ids: &Range<u32>) -> bool {
        let ours = self.ours.lock();
        self.blocks(ids).all(|number| ours.contains(&number))
    }

    /// Claims the blocks that these ids are in; `false` if one of them is another daemon's.
    ///
    /// # Errors
    ///
    /// Returns the error of a directory that cannot be used.
    pub(crate) fn claim(&self, ids: &Range<u32>) -> io::Result<bool> {
        self.claim_all(ids, false)
    }

    /// Claims them as [`claim`](Self::claim) does, even if they are claimed already: for machines
    /// that run and are known to be ours.
    ///
    /// # Errors
    ///
    /// Returns the error of a directory that cannot be used.
    pub(crate) fn reclaim(&self, ids: &Range<u32>) -> io::Result<bool> {
        self.claim_all(ids, true)
    }

    /// The blocks that are ours, the lowest first.
    pub(crate) fn ours(&self) -> Vec<Range<u32>> {
        self.ours.lock().iter().map(|number| self.ids(*number)).collect()
    }

    fn ids(&self, number: u32) -> Range<u32> {
        let first = number.saturating_mul(self.block);
        first..first.saturating_add(self.block)
    }

    fn claim_all(&self, ids: &Range<u32>, known: bool) -> io::Result<bool> {
        let mut ours = self.ours.lock();
        for number in self.blocks(ids) {
            if !ours.contains(&number) {
                if !self.take(number, known)? {
                    return Ok(false);
                }
                ours.insert(number);
            }
        }
        Ok(true)
    }

    fn blocks(&self, ids: &Range<u32>) -> impl Iterator<Item = u32> + use<> {
        let last = ids.end.saturating_sub(1).max(ids.start);
        ids.start / self.block..=last / self.block
    }

    fn path(&self, number: u32) -> PathBuf {
        self.directory.join(format!("{}-{}", self.ids(number).start, self.block))
    }

    fn take(&self, number: u32, known: bool) -> io::Result<bool> {
        let path = self.path(number);
        let mut held = HELD.lock();
        if let Some(here) = held.get_mut(&path) {
            let same = here.owner == self.owner;
            here.users += usize::from(same);
            return Ok(same);
        }
        DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
        let directory = File::open(&self.directory)?;
        share(&directory)?;
        let mut file = OpenOptions::new();
        file.read(true).write(true).create(true).truncate(false).mode(0o600);
        let mut file = file.open(&path)?;
        if !lock(&file, FlockOperation::NonBlockingLockExclusive)? {
            return Ok(false);
        }
        // Somebody who clears `/run` by hand asks nobody: then the lock is on nothing.
        let there = fs::metadata(&path).is_ok_and(|there| {
            file.metadata().is_ok_and(|ours| (ours.dev(), ours.ino()) == (there.dev(), there.ino()))
        });
        if !there {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the claim was removed"));
        }
        let mut owner = String::new();
        (&mut file).take(LONGEST_OWNER).read_to_string(&mut owner)?;
        let ids = self.ids(number);
        let occupied = match owner.as_str() {
            _ if known => false,
            "" => AT_START.range(ids).next().is_some(),
            other => other != self.owner && used().range(ids).next().is_some(),
        };
        if occupied {
            return Ok(false);
        }
        if owner != self.owner {
            file.set_len(0)?;
            file.rewind()?;
            file.write_all(self.owner.as_bytes())?;
        }
        held.insert(path, HeldBlock { owner: self.owner.clone(), users: 1, _file: file });
        Ok(true)
    }
}

impl Drop for UidClaims {
    fn drop(&mut self) {
        let mut held = HELD.lock();
        for number in self.ours.lock().iter() {
            let path = self.path(*number);
            if let Some(here) = held.get_mut(&path) {
                here.users -= 1;
                if here.users == 0 {
                    held.remove(&path);
                }
            }
        }
    }
}

/// Waits until nobody removes claims, which takes milliseconds. From a daemon that was stopped in the
/// middle, it does not wait for long: a claim that was removed is noticed.
fn share(directory: &File) -> io::Result<()> {
    for _ in 0..400 {
        if lock(directory, FlockOperation::NonBlockingLockShared)? {
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Locks a file; `false` if that would have to wait.
fn lock(file: &File, how: FlockOperation) -> io::Result<bool> {
    loop {
        match rustix::fs::flock(file, how) {
            Ok(()) => return Ok(true),
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(false),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// The ids that a claim of this name is on; nothing if it is no claim.
fn claimed(name: &OsStr) -> Option<Range<u32>> {
    let (first, count) = name.to_str()?.split_once('-')?;
    let (first, count): (u32, u32) = (first.parse().ok()?, count.parse().ok()?);
    Some(first..first.saturating_add(count))
}

/// The user ids that processes on this host have. An agent's `/proc` directory belongs to the
/// host's root, so the ids are read from its status.
fn used() -> BTreeSet<u32> {
    let listed = fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes =
        listed.filter(|entry| entry.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit));
    processes
        .filter_map(|entry| fs::read_to_string(entry.path().join("status")).ok())
        .flat_map(|status| uids_of(&status).collect::<Vec<_>>())
        .collect()
}

fn uids_of(status: &str) -> impl Iterator<Item = u32> + '_ {
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap_or_default();
    line.split_whitespace().filter_map(|number| number.parse().ok())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::process::CommandExt as _;
    use std::process::{Child, Command};

    use super::{UidClaims, uids_of};

    struct Killed(Child);

    impl Drop for Killed {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn a_block_is_one_owners_until_it_ends() {
        let dir = tempfile::tempdir().expect("a directory");
        let (directory, a, b) =
            (dir.path().join("uids"), dir.path().join("a"), dir.path().join("b"));
        let of = |owner| UidClaims::at(&directory, owner, 100);
        let (first, second) = (of(&a), of(&b));
        assert!(first.claim(&(4_000_000_000..4_000_000_050)).expect("a directory"));
        assert!(first.has(&(4_000_000_050..4_000_000_100)), "the whole block");
        assert!(!second.claim(&(4_000_000_050..4_000_000_100)).expect("a directory"));
        assert!(
            !second.claim(&(4_000_000_090..4_000_000_190)).expect("a directory"),
            "a part of it"
        );
        assert!(second.claim(&(4_000_000_200..4_000_000_300)).expect("a directory"));
        // The same data directory, opened again before the first one was dropped.
        let again = of(&a);
        assert!(again.claim(&(4_000_000_000..4_000_000_100)).expect("a directory"));
        drop(first);
        assert!(
            !second.claim(&(4_000_000_000..4_000_000_100)).expect("a directory"),
            "still in use"
        );
        drop(again);
        assert!(
            second.claim(&(4_000_000_000..4_000_000_100)).expect("a directory"),
            "nobody is left"
        );
    }

    #[test]
    fn another_process_with_a_lock_keeps_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let claims = UidClaims::at(dir.path(), &dir.path().join("a"), 100);
        let path = dir.path().join("4000000000-100");
        fs::write(&path, "").expect("a claim");
        let mut flock = Command::new("flock");
        flock.arg(&path).args(["sh", "-c", "echo locked; exec sleep 100"]);
        flock.stdout(std::process::Stdio::piped()).process_group(0);
        let mut holder = Killed(flock.spawn().expect("flock runs"));
        let mut said = [0; 6];
        let out = holder.0.stdout.as_mut().expect("a pipe");
        std::io::Read::read_exact(out, &mut said).expect("it locks");
        assert!(!claims.claim(&(4_000_000_000..4_000_000_100)).expect("a directory"));
        // Its child has the lock as well.
        let group = rustix::process::Pid::from_child(&holder.0);
        rustix::process::kill_process_group(group, rustix::process::Signal::KILL).expect("killed");
        holder.0.wait().expect("it ends");
        let start = std::time::Instant::now();
        while !claims.claim(&(4_000_000_000..4_000_000_100)).expect("a directory") {
            assert!(start.elapsed().as_secs() < 20, "the lock is never let go");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    #[test]
    fn machines_that_outlived_their_daemon_keep_their_ids() {
        if !rustix::process::getuid().is_root() {
            eprintln!("SKIPPED: takes root");
            return;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        let of = |owner| UidClaims::at(dir.path(), owner, 100);
        let uid = 4_100_000_000 + std::process::id() % 1_000_000 * 100;
        let ids = uid..uid + 100;
        assert!(of(&a).claim(&ids).expect("a directory"), "claimed, and its daemon ended");
        let machine =
            Killed(Command::new("sleep").arg("100").uid(uid + 7).spawn().expect("sleeps"));
        assert!(!of(&b).claim(&ids).expect("a directory"), "somebody lives there");
        assert!(of(&a).claim(&ids).expect("a directory"), "its own daemon comes back");
        drop(machine);
        assert!(of(&b).claim(&ids).expect("a directory"));
    }

    #[test]
    fn claims_that_protect_nothing_are_removed() {
        if !rustix::process::getuid().is_root() {
            eprintln!("SKIPPED claims_that_protect_nothing_are_removed: takes root");
            return;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let directory = dir.path().join("uids");
        let of = |owner: &str| UidClaims::at(&directory, &dir.path().join(owner), 100);
        of("a").remove_ended().expect("no directory yet");
        let uid = 4_200_000_000 + std::process::id() % 500_000 * 100;
        let block = |number: u32| uid + 100 * number..uid + 100 * (number + 1);
        for number in 0..3 {
            assert!(of("a").claim(&block(number)).expect("a directory"), "its daemon ended");
        }
        let here = of("b");
        assert!(here.claim(&block(3)).expect("a directory"), "in use by this process");
        let elsewhere = directory.join(format!("{}-100", block(4).start));
        fs::write(&elsewhere, "/c").expect("a claim");
        let mut flock = Command::new("flock");
        flock.arg(&elsewhere).args(["-c", "echo locked; exec sleep 100"]);
        flock.stdout(std::process::Stdio::piped()).process_group(0);
        let mut holder = Killed(flock.spawn().expect("flock runs"));
        let mut said = [0; 6];
        let out = holder.0.stdout.as_mut().expect("a pipe");
        std::io::Read::read_exact(out, &mut said).expect("it locks");
        let machine = Command::new("sleep").arg("100").uid(block(1).start + 7).spawn();
        let _machine = Killed(machine.expect("sleeps"));
        fs::write(directory.join("notes"), "of somebody else").expect("a file");

        of("d").remove_ended().expect("a directory");
        let left = fs::read_dir(&directory).expect("there").flatten();
        let mut left: Vec<_> =
            left.map(|entry| entry.file_name().into_string().expect("text")).collect();
        left.sort();
        let claim = |number| format!("{}-100", block(number).start);
        assert_eq!(left, [claim(1), claim(3), claim(4), "notes".to_owned()]);
        assert!(of("d").claim(&block(0)).expect("a directory"), "it is free");
        assert!(!of("d").claim(&block(1)).expect("a directory"), "somebody lives there");
        assert!(of("a").claim(&block(1)).expect("a directory"), "its own daemon comes back");
        let group = rustix::process::Pid::from_child(&holder.0);
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
    }

    #[test]
    fn daemons_that_start_at_once_claim_and_remove_without_losing_a_claim() {
        let dir = tempfile::tempdir().expect("a directory");
        let directory = dir.path().join("uids");
        let uid = 4_000_000_000;
        std::thread::scope(|scope| {
            for owner in 0..4_u32 {
                let (directory, dir) = (&directory, dir.path());
                scope.spawn(move || {
                    for turn in 0..50 {
                        let claims = UidClaims::at(directory, &dir.join(owner.to_string()), 100);
                        claims.remove_ended().expect("a directory");
                        let first = uid + 100 * (owner * 50 + turn);
                        let ids = first..first + 100;
                        assert!(claims.claim(&ids).expect("a directory"), "nobody else's");
                        let path = directory.join(format!("{first}-100"));
                        assert!(path.exists(), "it stays while it is in use");
                    }
                });
            }
        });
        UidClaims::at(&directory, dir.path(), 100).remove_ended().expect("a directory");
        assert_eq!(fs::read_dir(&directory).expect("there").count(), 0);
    }

    #[test]
    fn ids_are_read_from_a_status() {
        let status = "Name:\tx\nUid:\t1\t2\t3\t4\nGid:\t5\t5\t5\t5\n";
        assert_eq!(uids_of(status).collect::<Vec<_>>(), [1, 2, 3, 4]);
        assert_eq!(uids_of("").count(), 0);
    }
}
