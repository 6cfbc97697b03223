//! Manifests: documents that are replaced as a whole, and how a write survives a power cut.
//!
//! A new version is written to `tmp/`, synced, renamed over the old one, and the directory is synced.
//! [`Durability::Soon`] leaves the syncs to the next [`Store::sync`], for what may be lost without
//! breaking a promise.
//!
//! Of a file that was renamed without a sync, a power cut may leave an empty one under the new name.
//! For documents that hold what was acknowledged (`KEEP_LAST`) the new version therefore goes to
//! `….json.next`, and `….json` stays the last synced one. Readers take `.next` when it reads, else
//! `….json`. A synced write removes `.next` before it syncs the directory, so that an older `.next`
//! cannot come back after the answer was given. No filesystem has to keep the order of anything that
//! is not synced. After a sync of the whole filesystem `.next` is renamed to `….json` ([`unsynced`]).
//!
//! Earlier versions kept the synced version as `….json.last` instead. It is read when neither of the
//! others does, and removed by the next synced write.
//!
//! [`document`] is the form of a document with its checksum, [`kinds`] lists all manifests and their
//! places, [`unsynced`] tracks versions that are not synced yet, and [`commit`] writes several manifests
//! that become valid together. [`command_files`] measures and removes records and logs of commands.

pub(super) mod command_files;
mod commit;
pub(super) mod document;
mod kinds;
pub(super) mod unsynced;

use std::ffi::OsStr;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::failpoint;
use crate::model::{Command, CommandId, SandboxId, Session};
use crate::store::manifest::document::{check_format, refuse_later};
use crate::store::{Result, Store, StoreError, blocking, io_error};

pub(in crate::store) use crate::store::manifest::document::{parse, to_json};

/// A document with a place of its own in the data directory.
pub trait Manifest: Serialize + DeserializeOwned + Send + Sync + 'static {
    /// What names one.
    type Key: Clone + fmt::Debug + PartialEq + Send + Sync + 'static;
    /// What people call it.
    const KIND: &'static str;
    /// Whether a version that is not synced leaves the last synced one in its place.
    const KEEP_LAST: bool = false;
    /// Whether it makes the directory it lies in, which others share. Those are refused before it
    /// exists, and after it is gone.
    const FOUNDS_DIRECTORY: bool = false;

    /// Its own key.
    fn key(&self) -> Self::Key;

    /// Where it lies in the data directory.
    fn place(key: &Self::Key) -> PathBuf;

    /// Where all of the kind may lie; `*` stands for any one directory.
    fn places() -> &'static [&'static str];
}

/// When a write must survive a power cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// Before the call returns.
    Synced,
    /// With the next sync. A killed daemon loses nothing either way.
    Soon,
}

/// All documents of a kind.
#[derive(Debug)]
pub struct Scan<M> {
    /// Those that could be read.
    pub good: Vec<M>,
    /// Those that could not.
    pub damaged: Vec<Damaged>,
}

/// A document that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damaged {
    /// The file.
    pub path: PathBuf,
    /// What is wrong.
    pub reason: String,
    /// Whether a later version wrote it, so that nothing is broken but this version too old.
    pub too_new: bool,
}

impl Store {
    /// Writes a document, in place of the one before.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`]; the old version is then still there. What belongs to a sandbox is
    /// refused with [`StoreError::NotFound`] when the sandbox is gone: a late write does not bring it back.
    pub async fn write<M: Manifest>(&self, manifest: &M, durability: Durability) -> Result<()> {
        let place = M::place(&manifest.key());
        let bytes = to_json(manifest, &place)?;
        let store = self.clone();
        blocking(move || {
            if M::FOUNDS_DIRECTORY && !store.data_dir().join(&place).with_file_name("").is_dir() {
                return store.found(&place, &bytes, durability);
            }
            let made = ensure_parent(store.data_dir(), &place)?;
            store.put(&place, &bytes, durability, M::KEEP_LAST)?;
            if durability == Durability::Synced {
                for dir in made {
                    sync_parent(&dir)?;
                }
            }
            Ok(())
        })
        .await
    }

    /// Brings to stable storage a document that founded its directory without a sync: it is written
    /// again, synced, and the directory's own name with it.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write).
    pub async fn write_founded<M: Manifest>(&self, manifest: &M) -> Result<()> {
        self.write(manifest, Durability::Synced).await?;
        let path = self.data_dir().join(M::place(&manifest.key()));
        blocking(move || path.parent().map_or(Ok(()), sync_parent)).await
    }

    /// Reads a document.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::NotFound`], [`StoreError::TooNew`] or [`StoreError::Damaged`].
    pub async fn read<M: Manifest>(&self, key: &M::Key) -> Result<M> {
        let key = key.clone();
        let store = self.clone();
        blocking(move || store.get(&key)).await
    }

    /// Removes a document. One that is not there is no error.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`].
    pub async fn remove<M: Manifest>(&self, key: &M::Key) -> Result<()> {
        let path = self.data_dir().join(M::place(key));
        let store = self.clone();
        blocking(move || {
            failpoint::pass("store.remove.before");
            refuse_later(&path)?;
            refuse_later(&next_of(&path))?;
            store.unlink(&path)?;
            failpoint::pass("store.remove.before_sync");
            sync_parent(&path)
        })
        .await
    }

    /// Reads all documents of a kind.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`] when directories cannot be listed; documents that cannot be read
    /// are part of the answer.
    pub async fn scan<M: Manifest>(&self) -> Result<Scan<M>> {
        let store = self.clone();
        blocking(move || scan_files(list_places(store.data_dir(), M::places())?)).await
    }

    /// Reads all commands of one sandbox.
    ///
    /// # Errors
    ///
    /// As [`scan`](Self::scan).
    pub async fn scan_commands(&self, sandbox: &SandboxId) -> Result<Scan<Command>> {
        let dir = self.sandbox_dir(sandbox).join("commands");
        blocking(move || scan_files(json_files(&dir)?)).await
    }

    /// Reads all sessions of one sandbox.
    ///
    /// # Errors
    ///
    /// As [`scan`](Self::scan).
    pub async fn scan_sessions(&self, sandbox: &SandboxId) -> Result<Scan<Session>> {
        let dir = self.sandbox_dir(sandbox).join("sessions");
        blocking(move || scan_files(json_files(&dir)?)).await
    }

    /// Where a command's log lies. The directory exists once the command has been written.
    #[must_use]
    pub fn log_path(&self, sandbox: &SandboxId, command: &CommandId) -> PathBuf {
        self.sandbox_dir(sandbox).join("commands").join(format!("{command}.log"))
    }

    /// Where a sandbox's network journals lie. The directory may not be there.
    #[must_use]
    pub fn network_dir(&self, sandbox: &SandboxId) -> PathBuf {
        self.sandbox_dir(sandbox).join("network")
    }

    /// Moves all that is on record about a sandbox to the trash: its manifest, sessions, commands and logs.
    /// All of it goes at once, by one rename.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`]; the sandbox is then still there whole.
    pub async fn remove_sandbox_dir(&self, id: &SandboxId) -> Result<()> {
        let dir = self.sandbox_dir(id);
        let store = self.clone();
        blocking(move || {
            failpoint::pass("store.remove_sandbox.before");
            store.move_to_trash(&dir, id_of(&dir))?;
            failpoint::pass("store.remove_sandbox.before_sync");
            sync_parent(&store.trash_dir().join("x"))?;
            sync_parent(&dir)
        })
        .await
    }

    fn sandbox_dir(&self, id: &SandboxId) -> PathBuf {
        self.data_dir().join("sandboxes").join(id.as_str())
    }

    /// Reads the newest version of a document that can be read.
    pub(in crate::store) fn get<M: Manifest>(&self, key: &M::Key) -> Result<M> {
        let path = self.data_dir().join(M::place(key));
        let found: M = read_newest(&path)?;
        if found.key() == *key {
            Ok(found)
        } else {
            Err(StoreError::Damaged { path, reason: format!("it is about {:?}", found.key()) })
        }
    }

    /// Writes a file of the data directory, in an existing directory.
    pub(in crate::store) fn put(
        &self,
        place: &Path,
        bytes: &[u8],
        durability: Durability,
        keep_last: bool,
    ) -> Result<()> {
        let path = self.data_dir().join(place);
        refuse_later(&path)?;
        if keep_last {
            refuse_later(&next_of(&path))?;
        }
        let temporary = self.fresh_tmp("manifest");
        let outcome = self.replace(&path, &temporary, bytes, durability, keep_last);
        if outcome.is_err() {
            // It would be swept at the next start; on a full disk every block counts now.
            let _ = fs::remove_file(&temporary);
        }
        outcome?;
        failpoint::pass("store.write.done");
        Ok(())
    }

    fn replace(
        &self,
        path: &Path,
        temporary: &Path,
        bytes: &[u8],
        durability: Durability,
        keep_last: bool,
    ) -> Result<()> {
        failpoint::pass("store.write.before");
        write_file(temporary, bytes, durability)?;
        failpoint::pass("store.write.before_rename");
        match durability {
            Durability::Synced => {
                self.put_synced(path, temporary, keep_last)?;
                failpoint::pass("store.write.renamed");
                sync_parent(path)
            }
            Durability::Soon => self.put_unsynced(path, temporary, keep_last),
        }
    }

    /// Writes a document together with the directory it lies in. One rename makes both visible, so
    /// that every reader that finds the directory finds the document in it.
    fn found(&self, place: &Path, bytes: &[u8], durability: Durability) -> Result<()> {
        let path = self.data_dir().join(place);
        let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(io_error("create", &path)(io::ErrorKind::InvalidInput.into()));
        };
        let temporary = self.fresh_tmp("found");
        let made = || {
            fs::create_dir(&temporary).map_err(io_error("create", &temporary))?;
            let file_path = temporary.join(name);
            write_file(&file_path, bytes, durability)?;
            if durability == Durability::Synced {
                sync_parent(&file_path)?;
            }
            failpoint::pass("store.found.before_rename");
            fs::rename(&temporary, dir).map_err(io_error("create", dir))
        };
        let outcome = made();
        if outcome.is_err() {
            let _ = fs::remove_dir_all(&temporary);
        }
        outcome?;
        if durability == Durability::Synced {
            failpoint::pass("store.found.renamed");
            sync_parent(dir)?;
        } else {
            self.note_unsynced(&path);
        }
        Ok(())
    }

    /// Removes empty directories of sandboxes. A create that was cut short by a power cut leaves
    /// such a one; that sandbox was never reported to anybody.
    pub(in crate::store) fn remove_empty_sandboxes(&self) -> Result<()> {
        for dir in list(&self.data_dir().join("sandboxes"))? {
            // Refused by the kernel if anything is in it.
            if fs::remove_dir(&dir).is_ok() {
                tracing::warn!(path = %dir.display(), "removed the empty directory of a sandbox whose creation did not finish");
            }
        }
        Ok(())
    }

    /// A name in `tmp/` that nothing else uses.
    pub(in crate::store) fn fresh_tmp(&self, what: &str) -> PathBuf {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        self.tmp_dir().join(format!("{what}.{}.{count}", std::process::id()))
    }
}

/// Refuses a data directory of a later version. Answers with its format; `None` when it has none yet.
pub(in crate::store) fn check_directory_format(data: &Path) -> Result<Option<u32>> {
    let path = data.join("format.json");
    match fs::read(&path) {
        Ok(bytes) => check_format(&path, &bytes).map(Some),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(io_error("read", &path)(error)),
    }
}

fn read_file<M: Manifest>(path: &Path) -> Result<M> {
    match fs::read(path) {
        Ok(bytes) => parse(path, &bytes),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let key = id_of(path);
            let key = if key == M::KIND { id_of(path.parent().unwrap_or(path)) } else { key };
            Err(StoreError::NotFound { kind: M::KIND, key: key.to_owned() })
        }
        Err(error) => Err(io_error("read", path)(error)),
    }
}

/// Reads a document in the newest version that reads.
pub(in crate::store) fn read_newest<M: Manifest>(path: &Path) -> Result<M> {
    if !M::KEEP_LAST {
        return read_file(path);
    }
    match read_file(&next_of(path)) {
        // What a power cut left of it, if anything, does not read.
        Err(StoreError::Damaged { .. } | StoreError::NotFound { .. } | StoreError::Io { .. }) => {}
        outcome => return outcome,
    }
    let synced = read_file(path);
    if matches!(
        synced,
        Err(StoreError::Damaged { .. } | StoreError::NotFound { .. } | StoreError::Io { .. })
    ) && let Ok(last) = read_file(&last_of(path))
    {
        return Ok(last);
    }
    synced
}

/// Writes a new file.
pub(in crate::store) fn write_file(
    path: &Path,
    bytes: &[u8],
    durability: Durability,
) -> Result<()> {
    let mut file = File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(io_error("create", path))?;
    file.write_all(bytes).map_err(io_error("write", path))?;
    match durability {
        Durability::Synced => file.sync_all().map_err(io_error("sync", path)),
        Durability::Soon => Ok(()),
    }
}

/// Every file that may hold a version of a document.
pub(in crate::store) fn versions_of(path: &Path) -> [PathBuf; 3] {
    [next_of(path), path.to_owned(), last_of(path)]
}

fn scan_files<M: Manifest>(files: Vec<PathBuf>) -> Result<Scan<M>> {
    let mut scan = Scan { good: Vec::with_capacity(files.len()), damaged: Vec::new() };
    for path in files {
        let refused = match read_newest::<M>(&path) {
            Ok(found) if path.ends_with(M::place(&found.key())) => {
                scan.good.push(found);
                continue;
            }
            Ok(found) => {
                let reason = format!("it is about {:?}", found.key());
                Damaged { path, reason, too_new: false }
            }
            // It was removed since the directory was listed, or its directory is only half made.
            Err(StoreError::NotFound { .. }) => continue,
            Err(StoreError::Damaged { path, reason }) => Damaged { path, reason, too_new: false },
            Err(error @ StoreError::TooNew { .. }) => {
                Damaged { path, reason: error.to_string(), too_new: true }
            }
            Err(StoreError::Io { source, .. }) => {
                Damaged { path, reason: source.to_string(), too_new: false }
            }
            Err(other) => return Err(other),
        };
        scan.damaged.push(refused);
    }
    Ok(scan)
}

/// Lists the files that patterns like `sandboxes/*/commands` or `sandboxes/*/sandbox.json` stand for.
pub(in crate::store) fn list_places(data: &Path, patterns: &[&str]) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for pattern in patterns {
        let mut found = vec![data.to_owned()];
        for part in pattern.split('/') {
            let mut next = Vec::new();
            for dir in found {
                match part {
                    "*" => next.extend(list(&dir)?),
                    "*.json" => next.extend(json_files(&dir)?),
                    name => next.push(dir.join(name)),
                }
            }
            found = next;
        }
        files.extend(found);
    }
    Ok(files)
}

fn json_files(dir: &Path) -> Result<Vec<PathBuf>> {
    let is_json = |path: &PathBuf| path.extension() == Some(OsStr::new("json"));
    Ok(list(dir)?.into_iter().filter(is_json).collect())
}

/// What is in a directory, sorted; nothing when there is no such directory.
pub(in crate::store) fn list(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error)
            if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
        {
            return Ok(Vec::new());
        }
        Err(error) => return Err(io_error("list", dir)(error)),
    };
    let mut paths = Vec::new();
    for entry in entries {
        paths.push(entry.map_err(io_error("list", dir))?.path());
    }
    paths.sort();
    Ok(paths)
}

/// Where a version lies that is not synced yet.
pub(in crate::store) fn next_of(path: &Path) -> PathBuf {
    with_suffix(path, ".next")
}

/// Where earlier versions kept the last synced one.
pub(in crate::store) fn last_of(path: &Path) -> PathBuf {
    with_suffix(path, ".last")
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// The part of a path that names what lies there.
pub(in crate::store) fn id_of(path: &Path) -> &str {
    path.file_stem().and_then(OsStr::to_str).unwrap_or_default()
}

/// Makes the directory a document goes into, and returns which had to be made: the entry of each is
/// to be synced as well. The directory of a sandbox is never made here: see [`Store::found`].
pub(in crate::store) fn ensure_parent(data: &Path, place: &Path) -> Result<Vec<PathBuf>> {
    let path = data.join(place);
    let missing: Vec<PathBuf> =
        path.ancestors().skip(1).take_while(|dir| !dir.is_dir()).map(Path::to_owned).collect();
    let sandboxes = data.join("sandboxes");
    for dir in missing.iter().rev() {
        if dir.parent() == Some(&sandboxes) {
            return Err(StoreError::NotFound { kind: "sandbox", key: id_of(dir).to_owned() });
        }
        match fs::create_dir(dir) {
            // Its sandbox was removed just now.
            Err(error)
                if error.kind() == io::ErrorKind::NotFound && dir.starts_with(&sandboxes) =>
            {
                let key = dir.parent().map(id_of).unwrap_or_default().to_owned();
                return Err(StoreError::NotFound { kind: "sandbox", key });
            }
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(io_error("create", dir)(error));
            }
            _ => {}
        }
    }
    Ok(missing)
}

pub(in crate::store) fn sync_parent(path: &Path) -> Result<()> {
    let Some(parent) = path.parent() else { return Ok(()) };
    match File::open(parent) {
        Ok(dir) => dir.sync_all().map_err(io_error("sync", parent)),
        // A directory that is gone has nothing left to sync.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(io_error("open", parent)(error)),
    }
}
