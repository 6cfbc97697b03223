//! Documents that are written but not synced yet.
//!
//! Every write with [`Durability::Soon`](crate::store::Durability::Soon) is listed here until a sync of the
//! whole filesystem that began after it has succeeded. Then a `.next` takes the place of the synced
//! version. When a sync fails, the kernel may have dropped what was to be written and will not
//! report it again, so everything that is listed is written again, synced, before a later sync
//! counts as good.
//!
//! The list's lock is held over every rename of a document: a `.next` that was synced must not take the
//! place of a version that was written after it.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::store::manifest::{self, Durability, last_of, next_of, parse, write_file};
use crate::store::{Result, Store, StoreError, io_error};

/// How many unsynced documents there may be before the next writer waits for a sync.
const MOST: usize = 10_000;

/// Documents that were written since the last sync.
#[derive(Debug, Default)]
pub(in crate::store) struct UnsyncedDocuments {
    /// Counts writes.
    count: u64,
    written: HashMap<PathBuf, UnsyncedDocument>,
}

#[derive(Debug, Clone, Copy)]
struct UnsyncedDocument {
    /// Which write it was.
    number: u64,
    /// Whether it lies in `.next`.
    in_next: bool,
    /// Whether a sync failed since.
    in_doubt: bool,
}

impl UnsyncedDocument {
    fn file(self, path: &Path) -> PathBuf {
        if self.in_next { next_of(path) } else { path.to_owned() }
    }
}

impl Store {
    /// Puts a synced file in the place of a document and of whatever was not synced of it. The directory
    /// is not synced.
    pub(in crate::store) fn put_synced(
        &self,
        path: &Path,
        temporary: &Path,
        keep_last: bool,
    ) -> Result<()> {
        let mut unsynced = self.inner.unsynced.lock();
        fs::rename(temporary, path).map_err(io_error("replace", path))?;
        unsynced.written.remove(path);
        if keep_last {
            remove_if_there(&next_of(path))?;
            remove_if_there(&last_of(path))?;
        }
        Ok(())
    }

    /// Puts a file that is not synced in the place of a document.
    pub(in crate::store) fn put_unsynced(
        &self,
        path: &Path,
        temporary: &Path,
        keep_last: bool,
    ) -> Result<()> {
        let many = {
            let mut unsynced = self.inner.unsynced.lock();
            let in_next = keep_last && fs::symlink_metadata(path).is_ok();
            unsynced.count += 1;
            let written = UnsyncedDocument { number: unsynced.count, in_next, in_doubt: false };
            let target = written.file(path);
            fs::rename(temporary, &target).map_err(io_error("replace", &target))?;
            unsynced.written.insert(path.to_owned(), written);
            unsynced.written.len() > MOST
        };
        if many { self.sync_now() } else { Ok(()) }
    }

    /// A document is where it belongs and was not synced.
    pub(in crate::store) fn note_unsynced(&self, path: &Path) {
        let mut unsynced = self.inner.unsynced.lock();
        unsynced.count += 1;
        let written = UnsyncedDocument { number: unsynced.count, in_next: false, in_doubt: false };
        unsynced.written.insert(path.to_owned(), written);
    }

    /// Removes all versions of a document. The directory is not synced.
    pub(in crate::store) fn unlink(&self, path: &Path) -> Result<()> {
        let mut unsynced = self.inner.unsynced.lock();
        unsynced.written.remove(path);
        // What lists look for goes last.
        for path in [&next_of(path), &last_of(path), path] {
            remove_if_there(path)?;
        }
        Ok(())
    }

    /// Whether there are documents that are not synced.
    #[must_use]
    pub fn has_unsynced(&self) -> bool {
        !self.inner.unsynced.lock().written.is_empty()
    }

    /// Writes again what a failed sync may have lost, and answers with the number of the last write. What
    /// was written up to it is on stable storage when a sync that begins now succeeds.
    pub(in crate::store) fn write_doubtful_again(&self) -> Result<u64> {
        let mut unsynced = self.inner.unsynced.lock();
        let doubtful: Vec<(PathBuf, UnsyncedDocument)> = unsynced
            .written
            .iter()
            .filter(|(_, written)| written.in_doubt)
            .map(|(path, written)| (path.clone(), *written))
            .collect();
        for (path, written) in doubtful {
            let file = written.file(&path);
            let bytes = match fs::read(&file) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    // Its directory was moved or removed.
                    unsynced.written.remove(&path);
                    continue;
                }
                read => read.map_err(io_error("read", &file))?,
            };
            let temporary = self.fresh_tmp("again");
            let put = write_file(&temporary, &bytes, Durability::Synced)
                .and_then(|()| fs::rename(&temporary, &file).map_err(io_error("replace", &file)));
            if let Err(error) = put {
                let _ = fs::remove_file(&temporary);
                return Err(error);
            }
            unsynced.written.insert(path, UnsyncedDocument { in_doubt: false, ..written });
        }
        Ok(unsynced.count)
    }

    /// A sync has succeeded that began after write number `until`.
    pub(in crate::store) fn now_synced(&self, until: u64) {
        let mut unsynced = self.inner.unsynced.lock();
        let done: Vec<(PathBuf, UnsyncedDocument)> = unsynced
            .written
            .iter()
            .filter(|(_, written)| written.number <= until)
            .map(|(path, written)| (path.clone(), *written))
            .collect();
        for (path, written) in done {
            if written.in_next
                && let Err(error) = fs::rename(next_of(&path), &path)
                && error.kind() != io::ErrorKind::NotFound
            {
                // It is read from where it is.
                tracing::warn!(path = %path.display(), %error, "could not rename a synced document");
            }
            unsynced.written.remove(&path);
        }
    }

    /// A sync has failed: whatever is listed may be lost.
    pub(in crate::store) fn sync_failed_for_all(&self) {
        self.inner.unsynced.lock().written.values_mut().for_each(|written| written.in_doubt = true);
    }

    /// Tidies up what an earlier daemon left beside documents, after a sync of everything it wrote.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`].
    pub async fn tidy_documents(&self) -> Result<()> {
        let store = self.clone();
        crate::store::blocking(move || {
            store.sync_now()?;
            let kinds =
                ["projects", "snapshots", "drives", "templates", "secrets/*", "sandboxes/*"];
            for dir in manifest::list_places(store.data_dir(), &kinds)? {
                for file in manifest::list(&dir)? {
                    let name = file.as_os_str().to_string_lossy();
                    let Some((path, suffix)) = name.rsplit_once('.') else { continue };
                    if path.ends_with(".json") && ["next", "last"].contains(&suffix) {
                        store.tidy(Path::new(path), &file, suffix == "next")?;
                    }
                }
            }
            Ok(())
        })
        .await
    }

    fn tidy(&self, path: &Path, file: &Path, is_next: bool) -> Result<()> {
        let unsynced = self.inner.unsynced.lock();
        if unsynced.written.contains_key(path) {
            return Ok(());
        }
        match (is_next, state_of(file), state_of(path)) {
            (true, DocumentState::Good, _) => {
                fs::rename(file, path).map_err(io_error("replace", path))
            }
            // Nobody reads it.
            (true, DocumentState::Damaged, DocumentState::Good)
            | (false, _, DocumentState::Good) => remove_if_there(file),
            _ => Ok(()),
        }
    }
}

enum DocumentState {
    Good,
    Damaged,
    /// Not there, not readable, or of a later version.
    Unknown,
}

fn state_of(path: &Path) -> DocumentState {
    match fs::read(path).map(|bytes| parse::<serde_json::Value>(path, &bytes)) {
        Ok(Ok(_)) => DocumentState::Good,
        Ok(Err(StoreError::Damaged { .. })) => DocumentState::Damaged,
        _ => DocumentState::Unknown,
    }
}

fn remove_if_there(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(io_error("remove", path)(error))
        }
        _ => Ok(()),
    }
}
