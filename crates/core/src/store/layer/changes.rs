//! What changed in an open layer since the last look, and the list of a command's changes on disk.
//!
//! `docs/formats/changes.md` describes the file.

use std::fs;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use sandkeep_upper::{ChangeKind, Changes, Index, Limits, Look, Lower, look};
use serde::{Deserialize, Serialize};

use crate::model::{ChangedPath, CommandId, Layer, LayerId, MoreChanges, PathChange, SandboxId};
use crate::store::layer::MeasuredLayer;
use crate::store::layer::junk::JunkRules;
use crate::store::manifest::Manifest as _;
use crate::store::path_text::path_text;
use crate::store::tree::stat_of;
use crate::store::walk::Measuring;
use crate::store::{Result, Store, StoreError, blocking, io_error};

/// How many names of a layer are looked at. The index of a layer with more takes too much memory.
const MOST_NAMES: u64 = 250_000;
/// How much text the listed paths of a command take, all together.
const MOST_TEXT: usize = 512 << 10;
/// The largest file of changes that is read.
const LARGEST: u64 = 4 << 20;

/// The paths that a command changed: all of them, or some and where the others are.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedChanges {
    /// Paths, sorted.
    pub paths: Vec<ChangedPath>,
    /// Directories with more changed paths than are listed, sorted.
    pub more: Vec<MoreChanges>,
}

fn as_path_change(kind: ChangeKind) -> PathChange {
    match kind {
        ChangeKind::Created => PathChange::Created,
        ChangeKind::Modified => PathChange::Modified,
        ChangeKind::Deleted => PathChange::Deleted,
    }
}

fn more_below(under: String) -> MoreChanges {
    MoreChanges { under, created: 0, modified: 0, deleted: 0 }
}

impl ListedChanges {
    /// The list of what a look found.
    #[must_use]
    pub fn new(changes: &Changes) -> Self {
        let rooted = |path: &[u8]| format!("/{}", path_text(path));
        let mut list = Self::default();
        let mut rest = more_below("/".to_owned());
        let mut room = MOST_TEXT;
        for one in &changes.list.paths {
            let path = rooted(&one.path);
            let change = as_path_change(one.kind);
            if path.len() > room {
                match change {
                    PathChange::Created => rest.created += 1,
                    PathChange::Modified => rest.modified += 1,
                    PathChange::Deleted => rest.deleted += 1,
                }
                continue;
            }
            room -= path.len();
            list.paths.push(ChangedPath { path, change, dir: one.dir, bytes: one.bytes });
        }
        for one in &changes.list.more {
            let under = match one.path.is_empty() {
                true => "/".to_owned(),
                false => format!("{}/", rooted(&one.path)),
            };
            let (created, modified, deleted) = (one.created, one.modified, one.deleted);
            if under == "/" || under.len() > room {
                rest.created += created;
                rest.modified += modified;
                rest.deleted += deleted;
                continue;
            }
            room -= under.len();
            list.more.push(MoreChanges { under, created, modified, deleted });
        }
        if rest != more_below("/".to_owned()) {
            list.more.insert(0, rest);
        }
        list
    }

    fn to_lines(&self) -> serde_json::Result<Vec<u8>> {
        let mut text = b"{\"format\":1}\n".to_vec();
        for path in &self.paths {
            serde_json::to_writer(&mut text, path)?;
            text.push(b'\n');
        }
        for more in &self.more {
            serde_json::to_writer(&mut text, more)?;
            text.push(b'\n');
        }
        Ok(text)
    }

    /// Reads what it can: a line that was cut off by a crash is left out.
    fn from_lines(text: &str) -> Self {
        let mut list = Self::default();
        for line in text.lines().skip(1) {
            if let Ok(path) = serde_json::from_str(line) {
                list.paths.push(path);
            } else if let Ok(more) = serde_json::from_str(line) {
                list.more.push(more);
            }
        }
        list
    }
}

/// How long a look waits for a seal of the same layer at most.
const SEAL_WITHIN: Duration = Duration::from_secs(5);

/// Lets a seal that is under way go first, because somebody waits for it.
fn wait_for_seal(seal: &AtomicBool) -> bool {
    let begun = Instant::now();
    while seal.load(Ordering::Relaxed) && begun.elapsed() < SEAL_WITHIN {
        thread::sleep(Duration::from_millis(2));
    }
    true
}

impl Store {
    /// Compares an open layer with the index of the last look, and measures it on the way if `measures`. Waits while `seal`
    /// is true. The measurement is worth something if nothing wrote to the layer meanwhile.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::NotFound`] when the layer is not there, and [`StoreError::Io`] when one below it is not.
    pub async fn look_at_open(
        &self,
        open: &LayerId,
        chain: &[LayerId],
        before: Arc<Index>,
        seal: Arc<AtomicBool>,
        measures: Option<Option<JunkRules>>,
    ) -> Result<(Look, Option<MeasuredLayer>)> {
        let (upper, key) = (self.diff_dir(open), open.to_string());
        let lower: Vec<PathBuf> = chain.iter().map(|layer| self.diff_dir(layer)).collect();
        blocking(move || {
            let failed = |source: Errno| StoreError::Io {
                action: "look at the changes in",
                path: upper.clone(),
                source: source.into(),
            };
            let opened = match fs::File::open(&upper) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Err(StoreError::NotFound { kind: Layer::KIND, key });
                }
                opened => opened.map_err(io_error("open", &upper))?,
            };
            let lower = Lower::open(&lower).map_err(failed)?;
            let limits = Limits { names: MOST_NAMES, go_on: &|| wait_for_seal(&seal) };
            let opened = OwnedFd::from(opened);
            let root = stat_of(&opened).map_err(failed)?;
            let mut measuring =
                measures.as_ref().map(|rules| Measuring::new(&root, rules.as_ref()));
            let found = look(opened.as_fd(), &lower, &before, &limits, &mut |name| {
                if let Some(measuring) = &mut measuring {
                    measuring.add(name.dir, name.path, name.stat);
                }
            });
            let found = found.map_err(failed)?.ok_or_else(|| failed(Errno::CANCELED))?;
            let whole = found.complete && !found.skipped && found.index.is_some();
            let measured = measuring.filter(|_| whole);
            Ok((found, measured.map(MeasuredLayer::from)))
        })
        .await
    }

    /// Keeps the paths that a command changed.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`].
    pub async fn write_changes(
        &self,
        sandbox: &SandboxId,
        command: &CommandId,
        list: ListedChanges,
    ) -> Result<()> {
        let path = self.changes_path(sandbox, command);
        blocking(move || {
            let text = list.to_lines().map_err(|error| io_error("write", &path)(error.into()))?;
            fs::write(&path, text).map_err(io_error("write", &path))
        })
        .await
    }

    /// The paths that a command changed; `None` if none are on record.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`].
    pub async fn read_changes(
        &self,
        sandbox: &SandboxId,
        command: &CommandId,
    ) -> Result<Option<ListedChanges>> {
        let path = self.changes_path(sandbox, command);
        blocking(move || {
            use io::Read as _;
            let file = match fs::File::open(&path) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(error) => return Err(io_error("open", &path)(error)),
            };
            let mut text = Vec::new();
            file.take(LARGEST).read_to_end(&mut text).map_err(io_error("read", &path))?;
            Ok(Some(ListedChanges::from_lines(&String::from_utf8_lossy(&text))))
        })
        .await
    }

    fn changes_path(&self, sandbox: &SandboxId, command: &CommandId) -> PathBuf {
        self.log_path(sandbox, command).with_extension("changes")
    }
}
