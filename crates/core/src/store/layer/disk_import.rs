//! Imports the contents of a VM's disk into its open layer.
//!
//! While `layers/<id>/disk/` exists, the contents of an open layer are on that disk. The VM's export is
//! unpacked into `filling/`, synced, and exchanged with `diff/` in one step. Then the disk is removed. If the
//! daemon is killed in between, the layer still has its disk, and the next export replaces this one.
//!
//! *The size of an export is limited.* An export is not trusted: a guest that has tampered with its kernel or
//! filesystem can send files without end. [`export_limit`] limits the bytes that need space, the bytes of the
//! stream, zeros and headers included, and the number of files. It is computed from the limit that the disk
//! was made with and the size of its files here, doubled, because limits can be changed while a session runs
//! and a guest's cache may not be on its disk yet. A regular disk that is full of the smallest files stays
//! below three quarters of it.

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use rustix::fs::{CWD, RenameFlags};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::mpsc::{self, Receiver};

use crate::failpoint;
use crate::model::LayerId;
use crate::store::image::{Form, ImageError, UnpackRoom, Unpacked, unpack_layer};
use crate::store::manifest::{list, sync_parent};
use crate::store::{Result, Store, StoreError, blocking, io_error};

/// How much is read of a stream at a time, and how many of these may wait to be unpacked.
const CHUNK: usize = 256 << 10;
const WAITING: usize = 8;

/// What an export takes in headers and blocks that are not full, however small the disk is.
const SPARE: u64 = 64 << 20;
/// There is a file at most for as many bytes. A disk has an inode for every 8 KiB; names of one inode are several.
const PER_FILE: u64 = 2048;

/// The largest export that is accepted from a disk with this limit, whose files have these bytes.
#[must_use]
pub fn export_limit(limit: u64, bytes: u64) -> u64 {
    limit.saturating_add(bytes).saturating_mul(2).saturating_add(SPARE)
}

/// What was imported.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ImportedDisk {
    /// Files, directories, links and whiteouts.
    pub files: u64,
    /// Bytes of their contents.
    pub bytes: u64,
    /// Device nodes and extended attributes that a layer on this host cannot have.
    pub left_out: u64,
}

impl Store {
    /// Whether what was written to an open layer is on a machine's disk.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`] when the disk cannot be looked at.
    pub fn has_disk(&self, open: &LayerId) -> Result<bool> {
        let disk = self.layer_dir(open).join("disk");
        disk.try_exists().map_err(io_error("look at", &disk))
    }

    /// Replaces the contents of an open layer by a VM's export, and removes its disk. The import is on
    /// stable storage before that. After an error the layer is as it was, disk included, and another export
    /// can be imported. Nothing may write to the disk any more. More than `most` ([`export_limit`]) is
    /// refused.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::BadExport`] for a stream that is cut short, tries to reach outside or does not end,
    /// [`StoreError::ExportLost`] if it fails as aborted or timed out, [`StoreError::NoRoom`], or [`StoreError::Io`].
    pub async fn import_disk(
        &self,
        open: &LayerId,
        mut export: impl AsyncRead + Unpin + Send,
        most: u64,
    ) -> Result<ImportedDisk> {
        let (store, id) = (self.clone(), open.clone());
        let (chunks, waiting) = mpsc::channel(WAITING);
        let unpacking = blocking(move || store.import_disk_now(&id, waiting, most));
        let reading = async move {
            let mut left = most;
            loop {
                let mut chunk = Vec::with_capacity(CHUNK);
                let chunk = match export.read_buf(&mut chunk).await {
                    Ok(0) => return,
                    Ok(read) => match left.checked_sub(read as u64) {
                        Some(rest) => {
                            left = rest;
                            Ok(chunk)
                        }
                        None => Err(io::Error::new(io::ErrorKind::InvalidData, "it does not end")),
                    },
                    Err(error) => Err(error),
                };
                let failed = chunk.is_err();
                // The unpacking side has failed already, and its error is returned.
                if chunks.send(chunk).await.is_err() || failed {
                    return;
                }
            }
        };
        tokio::join!(unpacking, reading).0
    }

    fn import_disk_now(
        &self,
        id: &LayerId,
        export: Receiver<io::Result<Vec<u8>>>,
        most: u64,
    ) -> Result<ImportedDisk> {
        let dir = self.layer_dir(id);
        let (diff, filling) = (dir.join("diff"), dir.join("filling"));
        self.discard_dir(&filling, "filling")?;
        fs::create_dir(&filling).map_err(io_error("create", &filling))?;
        fs::set_permissions(&filling, fs::Permissions::from_mode(0o700))
            .map_err(io_error("restrict", &filling))?;
        failpoint::pass("store.fill.begun");
        let chunks = ChunkReader { export, rest: Vec::new(), at: 0 };
        let unpacked = self.unpack(id, chunks, &filling, most);
        let Unpacked { files, bytes, devices, attributes, .. } = match unpacked {
            Ok(unpacked) => unpacked,
            Err(error) => {
                self.discard_dir(&filling, "filling")?;
                return Err(error);
            }
        };
        if attributes > 0 {
            tracing::warn!(layer = %id, attributes, "extended attributes of a VM's export that a layer cannot have were dropped");
        }
        failpoint::pass("store.fill.unpacked");
        self.sync_now()?;
        // What was exported came from the disk, which goes.
        self.refuse_doubt_now(id)?;
        failpoint::pass("store.fill.synced");
        rustix::fs::renameat_with(CWD, &filling, CWD, &diff, RenameFlags::EXCHANGE)
            .map_err(|error| io_error("replace", &diff)(error.into()))?;
        sync_parent(&diff)?;
        failpoint::pass("store.fill.replaced");
        self.discard_dir(&dir.join("disk"), "disk")?;
        sync_parent(&diff)?;
        failpoint::pass("store.fill.done");
        // What `diff` was before.
        self.discard_dir(&filling, "filling")?;
        Ok(ImportedDisk { files, bytes, left_out: devices + attributes })
    }

    fn unpack(
        &self,
        id: &LayerId,
        export: ChunkReader,
        into: &Path,
        most: u64,
    ) -> Result<Unpacked> {
        let free = self.room_to_import()?;
        let entries = most / PER_FILE;
        let room = if free < most {
            UnpackRoom { bytes: free, entries, why: "that the disk has left" }
        } else {
            UnpackRoom { bytes: most, entries, why: "that can be on its disk" }
        };
        unpack_layer("what the machine wrote", export, Form::Upper, into, &[], room).map_err(
            |error| match error {
                ImageError::TooLarge { .. } if free < most => {
                    match self.refuse_beyond(free, u64::MAX) {
                        Err(error) => error,
                        Ok(()) => StoreError::BadExport { id: id.clone(), source: Box::new(error) },
                    }
                }
                ImageError::Io { action, path, source } => StoreError::Io { action, path, source },
                ImageError::Damaged { source, .. } if is_lost(&source) => {
                    StoreError::ExportLost { id: id.clone(), source }
                }
                error => StoreError::BadExport { id: id.clone(), source: Box::new(error) },
            },
        )
    }

    /// How large the disk of an open layer is here, by the lengths of its files, captured ones included.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`] when the disk's files cannot be read.
    pub fn length_of_disk(&self, open: &LayerId) -> Result<u64> {
        let mut bytes = 0;
        for path in list(&self.layer_dir(open).join("disk"))? {
            bytes += fs::symlink_metadata(&path).map_err(io_error("stat", &path))?.len();
        }
        Ok(bytes)
    }

    /// What the disk of an open layer takes now; nothing if it has none.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`] when the disk's files cannot be read.
    pub async fn size_of_disk(&self, open: &LayerId) -> Result<u64> {
        let (store, open) = (self.clone(), open.clone());
        blocking(move || store.usage_of_disk(&open)).await
    }

    /// What the disk of an open layer takes: files that a memory layer has as well are that one's.
    pub(in crate::store) fn usage_of_disk(&self, open: &LayerId) -> Result<u64> {
        let mut bytes = 0;
        for path in list(&self.layer_dir(open).join("disk"))? {
            match fs::symlink_metadata(&path) {
                Ok(found) if found.nlink() == 1 => bytes += found.blocks() * 512,
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(io_error("stat", &path)(error));
                }
                _ => {}
            }
        }
        Ok(bytes)
    }
}

/// Whether an export did not come to its end because of who sends it, and not of what was sent.
fn is_lost(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::TimedOut)
}

/// Reads chunks of a stream on a thread that may block.
struct ChunkReader {
    export: Receiver<io::Result<Vec<u8>>>,
    rest: Vec<u8>,
    at: usize,
}

impl Read for ChunkReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.at == self.rest.len() {
            match self.export.blocking_recv() {
                Some(chunk) => (self.rest, self.at) = (chunk?, 0),
                None => return Ok(0),
            }
        }
        let most = into.len().min(self.rest.len() - self.at);
        into[..most].copy_from_slice(&self.rest[self.at..self.at + most]);
        self.at += most;
        Ok(most)
    }
}
