//! Makes a backup.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, Write};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest as _, Sha256};

use super::archive::pack;
use super::manifest::{BackupArchive, BackupFile, BackupKey, BackupManifest, BackupSummary};
use super::{BackupError, BackupProgress, Result, archive_path, io_error, object_path};
use crate::model::lifecycle::Phase;
use crate::model::{Drive, FORMAT, Image, LayerId, MemoryId, Sandbox, SessionId, Snapshot, now};
use crate::store::manifest::document::{parse, to_json};

/// How often a sandbox's record is read again when its snapshot is not the one that it names.
const TRIES: usize = 20;
/// Directories of which every file is copied as it is.
const WHOLE: [&str; 8] =
    ["projects", "secrets", "runs", "approvals", "webhooks", "aside", "events", "audit"];
/// Keys of the data directory.
const KEYS: [&str; 3] = ["secrets.key", "token.key", "audit.key"];
/// How hard archives are compressed: little, because the disk is to be the limit.
const LEVEL: i32 = 1;

/// How a backup is made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BackupOptions {
    /// Whether the keys of the data directory are part of it.
    pub keys: bool,
}

/// Makes a backup of `data` in `root`, which may have earlier ones. A daemon may use `data` meanwhile.
///
/// # Errors
///
/// [`BackupError`] when `data` cannot be read or `root` cannot be written. What is missing or damaged in `data` does not end
/// it: the summary names it.
pub fn create_backup(
    data: &Path,
    root: &Path,
    options: BackupOptions,
    mut progress: impl FnMut(BackupProgress),
) -> Result<BackupSummary> {
    let format = data.join("format.json");
    let identity = fs::read(&format)
        .ok()
        .and_then(|bytes| serde_json::from_slice::<serde_json::Value>(&bytes).ok())
        .and_then(|found| Some(found["identity"].as_str()?.to_owned()))
        .ok_or_else(|| BackupError::NoData { path: data.to_owned() })?;
    for part in ["layers", "memory", "objects", "backups"] {
        let path = root.join(part);
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true).mode(0o700).create(&path).map_err(io_error("create", &path))?;
    }
    let _lock = lock(root)?;
    let mut collector = BackupCollector {
        data,
        root,
        written: 0,
        files: Vec::new(),
        layers: BTreeSet::new(),
        memory: BTreeSet::new(),
        current: BTreeSet::new(),
        missing: Vec::new(),
    };
    let created_at = now();
    collector.file("format.json")?;
    let (sandboxes, snapshots) = collector.documents()?;
    for part in WHOLE {
        collector.tree(Path::new(part))?;
    }
    let secrets_key = collector.keys(options.keys)?;
    let (layers, memory) =
        (std::mem::take(&mut collector.layers), std::mem::take(&mut collector.memory));
    let (mut done, all) = (0, layers.len() + memory.len());
    let mut archives = |kind: &str, ids: BTreeSet<String>, collector: &mut BackupCollector<'_>| {
        let mut found = Vec::new();
        for id in ids {
            progress(BackupProgress { done, all });
            done += 1;
            found.extend(collector.archive(kind, &id)?);
        }
        Ok::<_, BackupError>(found)
    };
    let layers = archives("layers", layers, &mut collector)?;
    let memory = archives("memory", memory, &mut collector)?;
    // Everything that the manifest is going to name is on stable storage before it.
    let top = File::open(root).map_err(io_error("open", root))?;
    rustix::fs::syncfs(&top).map_err(|error| io_error("sync", root)(error.into()))?;
    let id = format!("bak-{}", created_at.strftime("%Y%m%dT%H%M%S%3fZ"));
    let manifest = BackupManifest {
        format: FORMAT,
        id: id.clone(),
        created_at,
        identity,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        sandboxes,
        snapshots,
        secrets_key,
        files: collector.files,
        layers,
        memory,
        missing: collector.missing,
    };
    write_document(&root.join("backups").join(format!("{id}.json")), &manifest)?;
    Ok(manifest.summary(collector.written))
}

/// Whoever has this is the only one that writes there.
pub(super) fn lock(root: &Path) -> Result<File> {
    let path = root.join("lock");
    let lock = File::create(&path).map_err(io_error("create", &path))?;
    rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive)
        .map_err(|_| BackupError::Busy { path: root.to_owned() })?;
    Ok(lock)
}

struct BackupCollector<'a> {
    data: &'a Path,
    root: &'a Path,
    written: u64,
    files: Vec<BackupFile>,
    layers: BTreeSet<String>,
    memory: BTreeSet<String>,
    /// Names of the current snapshots of sandboxes: those are in the backup already.
    current: BTreeSet<String>,
    missing: Vec<String>,
}

impl BackupCollector<'_> {
    /// Sandboxes with their snapshots, drives and images. Answers with how many sandboxes and snapshots there are.
    fn documents(&mut self) -> Result<(u64, u64)> {
        let mut sandboxes: Vec<Sandbox> = Vec::new();
        for id in self.names("sandboxes")? {
            sandboxes.extend(self.sandbox(&id)?);
        }
        let mut snapshots = self.current.len() as u64;
        for name in self.names("snapshots")? {
            let path = PathBuf::from("snapshots").join(&name);
            if path.extension().is_none_or(|end| end != "json") || self.current.contains(&name) {
                continue;
            }
            let Some((snapshot, bytes)) = self.document::<Snapshot>(&path)? else { continue };
            let of = sandboxes.iter().find(|sandbox| sandbox.id == snapshot.sandbox);
            // One that its sandbox got after its record was read is not part of this backup.
            if of.is_some_and(|sandbox| snapshot.generation > sandbox.generation) {
                continue;
            }
            if snapshot.deleted_at.is_none() {
                snapshots += 1;
                self.names_of(&snapshot.layers, &snapshot.memory);
            }
            self.content(&path, &bytes, 0o600)?;
        }
        for name in self.names("drives")? {
            let path = PathBuf::from("drives").join(&name);
            if path.extension().is_none_or(|end| end != "json") {
                continue;
            }
            let Some((mut drive, _)) = self.document::<Drive>(&path)? else { continue };
            // What a session under way writes to it is not sealed.
            drive.attached = None;
            self.names_of(&drive.layers, &[]);
            let bytes = to_json(&drive, &path)?;
            self.content(&path, &bytes, 0o600)?;
        }
        for name in self.names("images")? {
            let path = PathBuf::from("images").join(&name);
            let Some((image, bytes)) = self.document::<Image>(&path)? else { continue };
            self.names_of(&image.layers, &[]);
            self.content(&path, &bytes, 0o600)?;
        }
        Ok((sandboxes.len() as u64, snapshots))
    }

    /// The directory of a sandbox: its record as it would be without the session under way, and what is over of its
    /// sessions and commands.
    fn sandbox(&mut self, id: &str) -> Result<Option<Sandbox>> {
        let dir = PathBuf::from("sandboxes").join(id);
        let path = dir.join("sandbox.json");
        let mut tries = 0;
        let (sandbox, session, current) = loop {
            let Some((sandbox, _)) = self.document::<Sandbox>(&path)? else { return Ok(None) };
            if sandbox.phase() == Phase::Deleted {
                return Ok(None);
            }
            let session = sandbox.open_session().and(sandbox.session.clone());
            let current =
                sandbox.current.as_ref().and_then(|id| self.live_snapshot(&id.to_string()));
            let stands = sandbox.current.is_none() || current.is_some();
            tries += 1;
            if stands || tries == TRIES {
                if !stands {
                    self.missing
                        .push(format!("the current snapshot of sandbox `{}`", sandbox.name));
                }
                break (sandbox, session, current);
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
        };
        let memory = current.as_ref().is_some_and(|(snapshot, _)| !snapshot.memory.is_empty());
        if let Some((snapshot, bytes)) = current {
            // Now: it may be deleted as soon as the sandbox has another one. Its layers are in the trash then.
            let name = format!("{}.json", snapshot.id);
            if self.current.insert(name.clone()) {
                self.names_of(&snapshot.layers, &snapshot.memory);
                self.content(&PathBuf::from("snapshots").join(name), &bytes, 0o600)?;
            }
        }
        self.names_of(&sandbox.image_layers, &[]);
        let at_rest = sandbox.without_session(memory);
        let bytes = to_json(&at_rest, &path)?;
        self.content(&path, &bytes, 0o600)?;
        if self.data.join(&dir).join("authority.json").exists() {
            self.file(dir.join("authority.json"))?;
        }
        for part in ["sessions", "commands", "network"] {
            self.records(&dir.join(part), session.as_ref())?;
        }
        Ok(Some(at_rest))
    }

    /// A snapshot that exists and was not deleted, and its document.
    fn live_snapshot(&self, id: &str) -> Option<(Snapshot, Vec<u8>)> {
        let path = self.data.join(format!("snapshots/{id}.json"));
        let bytes = fs::read(&path).ok()?;
        let snapshot = parse::<Snapshot>(&path, &bytes).ok()?;
        snapshot.deleted_at.is_none().then_some((snapshot, bytes))
    }

    /// Files about sessions and commands, without those of the session under way.
    fn records(&mut self, dir: &Path, without: Option<&SessionId>) -> Result<()> {
        let mut skipped: BTreeSet<String> = without.map(ToString::to_string).into_iter().collect();
        let names = self.names(dir)?;
        if let Some(session) = without
            && dir.ends_with("commands")
        {
            // A record says which session it is of; its log and its changes go by its name.
            let of = format!("\"{session}\"");
            for name in names.iter().filter(|name| name.ends_with(".json")) {
                let text = fs::read_to_string(self.data.join(dir).join(name)).unwrap_or_default();
                if text.contains(&of) {
                    skipped.extend(name.split('.').next().map(str::to_owned));
                }
            }
        }
        for name in names {
            let stem = name.split('.').next().unwrap_or_default();
            if !skipped.contains(stem) && !name.ends_with(".next") {
                self.file(dir.join(&name))?;
            }
        }
        Ok(())
    }

    /// The keys of the data directory, if they are to be included, and the mark that identifies the
    /// one for secrets.
    fn keys(&mut self, included: bool) -> Result<BackupKey> {
        let key = fs::read(self.data.join(KEYS[0])).ok();
        let fingerprint = key.map(|key| {
            let mut digits =
                hex::encode(Sha256::digest([b"sandkeep secrets key".as_slice(), &key].concat()));
            digits.truncate(16);
            digits
        });
        for name in KEYS.iter().filter(|name| included && self.data.join(name).exists()) {
            self.file(name)?;
        }
        Ok(BackupKey { included, fingerprint })
    }

    fn names_of(&mut self, layers: &[LayerId], memory: &[MemoryId]) {
        self.layers.extend(layers.iter().map(ToString::to_string));
        self.memory.extend(memory.iter().map(ToString::to_string));
    }

    /// What is in a directory, in order; nothing if it is not there.
    fn names(&self, dir: impl AsRef<Path>) -> Result<Vec<String>> {
        let path = self.data.join(dir);
        let listed = match fs::read_dir(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            listed => listed.map_err(io_error("list", &path))?,
        };
        let name = |entry: io::Result<fs::DirEntry>| entry.ok()?.file_name().into_string().ok();
        let mut names: Vec<String> = listed.filter_map(name).collect();
        names.sort();
        Ok(names)
    }

    /// Reads a document: the last version that was synced, which is what was acknowledged. One that is gone meanwhile is no
    /// part of the backup, a damaged one is named.
    fn document<T: DeserializeOwned>(&mut self, path: &Path) -> Result<Option<(T, Vec<u8>)>> {
        let whole = self.data.join(path);
        let next = whole.with_extension("json.next");
        let bytes = match fs::read(&whole).or_else(|_| fs::read(&next)) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(io_error("read", &whole)(error)),
        };
        match parse(&whole, &bytes) {
            Ok(document) => Ok(Some((document, bytes))),
            Err(error) => {
                self.missing.push(format!("{}: {error}", path.display()));
                Ok(None)
            }
        }
    }

    /// Every file below a directory, but versions of documents that are not synced.
    fn tree(&mut self, dir: &Path) -> Result<()> {
        for name in self.names(dir)? {
            let path = dir.join(&name);
            match fs::symlink_metadata(self.data.join(&path)) {
                Ok(found) if found.is_dir() => self.tree(&path)?,
                Ok(found) if found.is_file() && !name.ends_with(".next") => self.file(&path)?,
                _ => {}
            }
        }
        Ok(())
    }

    /// A file as it is, however long. One that is gone meanwhile is no part of the backup.
    fn file(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let whole = self.data.join(path.as_ref());
        let opened = File::open(&whole).and_then(|file| Ok((file.metadata()?, file)));
        let (found, mut file) = match opened {
            Ok((found, file)) => (found, file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(io_error("read", &whole)(error)),
        };
        let mode = found.permissions().mode() & 0o7777;
        // Files only grow while this runs: what came after its length was read is the next backup's.
        let mut digest = HashedArchive { file: io::sink(), hash: Sha256::new(), bytes: 0 };
        io::copy(&mut (&mut file).take(found.size()), &mut digest)
            .map_err(io_error("read", &whole))?;
        let (length, sha256) = (digest.bytes, hex::encode(digest.hash.finalize()));
        let object = object_path(self.root, &sha256);
        if fs::metadata(&object).is_ok_and(|found| found.size() == length) {
            return self.named(path.as_ref(), sha256, length, mode);
        }
        file.rewind().map_err(io_error("read", &whole))?;
        let fresh = self.root.join("objects").join("copy.new");
        let into = File::create(&fresh).map_err(io_error("create", &fresh))?;
        let mut copy = HashedArchive { file: into, hash: Sha256::new(), bytes: 0 };
        io::copy(&mut file.take(length), &mut copy).map_err(io_error("write", &fresh))?;
        // It is named by what was copied, should it have been replaced in between.
        let (length, sha256) = (copy.bytes, hex::encode(copy.hash.finalize()));
        let object = object_path(self.root, &sha256);
        let dir = object.parent().unwrap_or(self.root);
        fs::create_dir_all(dir).map_err(io_error("create", dir))?;
        fs::rename(&fresh, &object).map_err(io_error("rename", &fresh))?;
        self.written += length;
        self.named(path.as_ref(), sha256, length, mode)
    }

    /// A file with this content, which is written if no earlier backup has it.
    fn content(&mut self, path: &Path, bytes: &[u8], mode: u32) -> Result<()> {
        let sha256 = hex::encode(Sha256::digest(bytes));
        let object = object_path(self.root, &sha256);
        let length = bytes.len() as u64;
        // One that a crash cut short has another length.
        if fs::metadata(&object).is_ok_and(|found| found.size() == length) {
            return self.named(path, sha256, length, mode);
        }
        let dir = object.parent().unwrap_or(self.root);
        fs::create_dir_all(dir).map_err(io_error("create", dir))?;
        let fresh = object.with_extension("new");
        fs::write(&fresh, bytes).map_err(io_error("write", &fresh))?;
        fs::rename(&fresh, &object).map_err(io_error("rename", &fresh))?;
        self.written += length;
        self.named(path, sha256, length, mode)
    }

    fn named(&mut self, path: &Path, sha256: String, bytes: u64, mode: u32) -> Result<()> {
        let Some(path) = path.to_str().map(str::to_owned) else {
            self.missing.push(format!("{}: its name is not text", path.display()));
            return Ok(());
        };
        self.files.push(BackupFile { path, sha256, bytes, mode });
        Ok(())
    }

    /// The archive of a layer or of memory, which is written if no earlier backup has it.
    fn archive(&mut self, kind: &str, id: &str) -> Result<Option<BackupArchive>> {
        let path = archive_path(self.root, kind, id);
        let note = path.with_extension("json");
        let known =
            fs::read(&note).ok().and_then(|bytes| parse::<BackupArchive>(&note, &bytes).ok());
        if let Some(known) = known
            && fs::metadata(&path).is_ok_and(|found| found.size() == known.bytes)
        {
            return Ok(Some(known));
        }
        let Some(dir) = self.sealed(kind, id)? else {
            self.missing.push(format!("{kind}/{id}"));
            return Ok(None);
        };
        let fresh = path.with_extension("new");
        let file = File::create(&fresh).map_err(io_error("create", &fresh))?;
        let into = HashedArchive { file, hash: Sha256::new(), bytes: 0 };
        let mut packed = zstd::Encoder::new(into, LEVEL).map_err(io_error("write", &fresh))?;
        let done = pack(&dir, &mut packed);
        // A directory is renamed before anything in it is deleted: one that is still where it was, or in the trash, was whole.
        if self.sealed(kind, id)?.is_none() {
            fs::remove_file(&fresh).map_err(io_error("remove", &fresh))?;
            self.missing.push(format!("{kind}/{id}"));
            return Ok(None);
        }
        done?;
        let HashedArchive { file, hash, bytes } =
            packed.finish().map_err(io_error("write", &fresh))?;
        file.sync_all().map_err(io_error("sync", &fresh))?;
        fs::rename(&fresh, &path).map_err(io_error("rename", &fresh))?;
        self.written += bytes;
        let sha256 = hex::encode(hash.finalize());
        let made = BackupArchive { format: FORMAT, id: id.to_owned(), sha256, bytes };
        write_document(&note, &made)?;
        Ok(Some(made))
    }

    /// Where a sealed layer or memory image is: in its place, or in the trash, if the daemon removed it meanwhile.
    fn sealed(&self, kind: &str, id: &str) -> Result<Option<PathBuf>> {
        let seal = if kind == "layers" { "layer.json" } else { "memory.json" };
        let is_sealed = |path: &PathBuf| path.join(seal).is_file();
        let place = self.data.join(kind).join(id);
        if is_sealed(&place) {
            return Ok(Some(place));
        }
        let names = self.names("trash")?;
        let mut trashed = names.iter().filter(|name| name.split('.').next() == Some(id));
        let trashed = trashed.next_back().map(|name| self.data.join("trash").join(name));
        // It may have been renamed back between the two looks.
        Ok(trashed.filter(is_sealed).or(Some(place).filter(is_sealed)))
    }
}

/// Writes a file, and knows what was written.
struct HashedArchive<W> {
    file: W,
    hash: Sha256,
    bytes: u64,
}

impl<W: Write> Write for HashedArchive<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.hash.update(&bytes[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Writes a document so that it is on stable storage, whole or not at all.
fn write_document<T: Serialize>(path: &Path, document: &T) -> Result<()> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let fresh = path.with_file_name(format!(".{name}.new"));
    let bytes = to_json(document, path)?;
    let written = || -> io::Result<()> {
        let mut file = File::create(&fresh)?;
        file.write_all(&bytes)?;
        file.sync_all()?;
        fs::rename(&fresh, path)?;
        File::open(path.parent().unwrap_or(path))?.sync_all()
    };
    written().map_err(io_error("write", path))
}
