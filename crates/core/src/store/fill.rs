//! Taking over what a machine wrote to a disk of its own.
//!
//! While `layers/<id>/disk/` is there it is the truth about an open layer. What the machine exports is unpacked into `filling/`,
//! synced, and put in the place of `diff/` in one step; then the disk goes. Killed in between, a layer has its disk still, and
//! the next export is taken instead.
//!
//! *No more comes out of a disk than fits into it.* Whoever exports is believed in nothing: a kernel or a filesystem that its guest has
//! tampered with can send files without end. So there is a most ([`most_from`]): of bytes that take room, of the stream's
//! bytes, zeros and headers included, and of files. It follows from the limit the disk was made with and from how large its
//! files are here, twice over, because limits can be changed while a session runs and what is in a guest's cache is not on its disk yet.
//! An honest disk that is full of the smallest files stays below three quarters of it.

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use rustix::fs::{CWD, RenameFlags};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::mpsc::{self, Receiver};

use super::image::{Form, ImageError, Room, Unpacked, unpack_layer};
use super::manifest::{list, sync_parent};
use super::{Result, Store, StoreError, blocking, io_error};
use crate::failpoint;
use crate::model::LayerId;

/// How much is read of a stream at a time, and how many of these may wait to be unpacked.
const CHUNK: usize = 256 << 10;
const WAITING: usize = 8;

/// What an export takes in headers and blocks that are not full, however small the disk is.
const SPARE: u64 = 64 << 20;
/// There is a file at most for as many bytes. A disk has an inode for every 8 KiB; names of one inode are several.
const PER_FILE: u64 = 2048;

/// The most that may come out of a disk with this limit whose files have these bytes.
#[must_use]
pub fn most_from(limit: u64, bytes: u64) -> u64 {
    limit.saturating_add(bytes).saturating_mul(2).saturating_add(SPARE)
}

/// What was taken over.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Filled {
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
    /// Returns [`StoreError::Io`] when that cannot be told.
    pub fn has_disk(&self, open: &LayerId) -> Result<bool> {
        let disk = self.layer_dir(open).join("disk");
        disk.try_exists().map_err(io_error("look at", &disk))
    }

    /// Fills an open layer with what a machine exports, in place of whatever is in it, and removes its disk. What was taken over
    /// is on stable storage before that. After an error the layer is as it was, disk included, and another export can be
    /// taken. Nothing may write to the disk any more. More than `most` ([`most_from`]) is refused.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::BadExport`] for a stream that breaks off, tries to reach outside or does not end,
    /// [`StoreError::NoRoom`], or [`StoreError::Io`].
    pub async fn fill(
        &self,
        open: &LayerId,
        mut export: impl AsyncRead + Unpin + Send,
        most: u64,
    ) -> Result<Filled> {
        let (store, id) = (self.clone(), open.clone());
        let (pieces, waiting) = mpsc::channel(WAITING);
        let unpacking = tokio::spawn(blocking(move || store.fill_now(&id, waiting, most)));
        let mut left = most;
        loop {
            let mut piece = Vec::with_capacity(CHUNK);
            let piece = match export.read_buf(&mut piece).await {
                Ok(0) => break,
                Ok(read) => match left.checked_sub(read as u64) {
                    Some(rest) => {
                        left = rest;
                        Ok(piece)
                    }
                    None => Err(io::Error::new(io::ErrorKind::InvalidData, "it does not end")),
                },
                Err(error) => Err(error),
            };
            let failed = piece.is_err();
            // Who does not take any more has an answer already.
            if pieces.send(piece).await.is_err() || failed {
                break;
            }
        }
        drop(pieces);
        unpacking.await.unwrap_or(Err(StoreError::ShuttingDown))
    }

    fn fill_now(
        &self,
        id: &LayerId,
        export: Receiver<io::Result<Vec<u8>>>,
        most: u64,
    ) -> Result<Filled> {
        let dir = self.layer_dir(id);
        let (diff, filling) = (dir.join("diff"), dir.join("filling"));
        self.discard_dir(&filling, "filling")?;
        fs::create_dir(&filling).map_err(io_error("create", &filling))?;
        fs::set_permissions(&filling, fs::Permissions::from_mode(0o700))
            .map_err(io_error("restrict", &filling))?;
        failpoint::pass("store.fill.begun");
        let pieces = Pieces { export, rest: Vec::new(), at: 0 };
        let unpacked = self.unpack(id, pieces, &filling, most);
        let Unpacked { files, bytes, devices, attributes, .. } = match unpacked {
            Ok(unpacked) => unpacked,
            Err(error) => {
                self.discard_dir(&filling, "filling")?;
                return Err(error);
            }
        };
        if attributes > 0 {
            tracing::warn!(layer = %id, attributes, "extended attributes that a layer cannot have were left out of a machine's export");
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
        Ok(Filled { files, bytes, left_out: devices + attributes })
    }

    fn unpack(&self, id: &LayerId, export: Pieces, into: &Path, most: u64) -> Result<Unpacked> {
        let free = self.free_space()?.0;
        let entries = most / PER_FILE;
        let room = if free < most {
            Room { bytes: free, entries, why: "that the disk has left" }
        } else {
            Room { bytes: most, entries, why: "that can be on its disk" }
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
                error => StoreError::BadExport { id: id.clone(), source: Box::new(error) },
            },
        )
    }

    /// How large the disk of an open layer is here, by the lengths of its files, captured ones included.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`] when that cannot be told.
    pub fn length_of_disk(&self, open: &LayerId) -> Result<u64> {
        let mut bytes = 0;
        for path in list(&self.layer_dir(open).join("disk"))? {
            bytes += fs::symlink_metadata(&path).map_err(io_error("stat", &path))?.len();
        }
        Ok(bytes)
    }

    /// What the disk of an open layer takes: files that a memory layer has as well are that one's.
    pub(super) fn usage_of_disk(&self, open: &LayerId) -> Result<u64> {
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

/// The stream, where it may be waited for.
struct Pieces {
    export: Receiver<io::Result<Vec<u8>>>,
    rest: Vec<u8>,
    at: usize,
}

impl Read for Pieces {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.at == self.rest.len() {
            match self.export.blocking_recv() {
                Some(piece) => (self.rest, self.at) = (piece?, 0),
                None => return Ok(0),
            }
        }
        let most = into.len().min(self.rest.len() - self.at);
        into[..most].copy_from_slice(&self.rest[self.at..self.at + most]);
        self.at += most;
        Ok(most)
    }
}
