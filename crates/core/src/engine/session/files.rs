//! Files inside a running sandbox, moved by its agent.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use sandkeep_proto::link::{At, Entry};

use crate::engine::Result;
use crate::engine::integrity::DiskLimits;
use crate::engine::running::live::{Hold, RunningSandbox};
use crate::engine::running::measured::Asked;
use crate::engine::running::upload_allowance::Sent;
use crate::engine::session::Sessions;
use crate::guest::{Guest, GuestError, Incoming, Outgoing, TransferSummary};

/// A sandbox's files. It stays awake while this lives.
#[derive(Debug)]
pub struct Files {
    pub(in crate::engine) guest: Guest,
    pub(in crate::engine) bounds: Bounds,
    pub(in crate::engine) user: Option<String>,
    pub(in crate::engine) cwd: Option<String>,
    pub(in crate::engine) _hold: Hold,
    pub(in crate::engine) writes: Writes,
    /// The root is not exchanged under a transfer: the agent has files of it open.
    pub(in crate::engine) _gate: tokio::sync::OwnedRwLockReadGuard<()>,
}

/// Makes sure that files which were written here are not taken for changes of the next command.
pub(in crate::engine) struct Writes {
    sessions: Arc<Sessions>,
    live: Arc<RunningSandbox>,
    wrote: AtomicBool,
}

impl std::fmt::Debug for Writes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.live.fmt(f)
    }
}

impl Writes {
    pub(in crate::engine) fn new(sessions: &Arc<Sessions>, live: &Arc<RunningSandbox>) -> Self {
        let (sessions, live) = (Arc::clone(sessions), Arc::clone(live));
        Self { sessions, live, wrote: AtomicBool::new(false) }
    }

    fn begin(&self) -> Asked {
        self.live.changes.uploaded();
        self.wrote.store(true, Ordering::Relaxed);
        Asked::of(&self.live)
    }
}

impl Drop for Writes {
    fn drop(&mut self) {
        if self.wrote.load(Ordering::Relaxed) {
            // Once more: a look meanwhile saw only a part.
            self.live.changes.uploaded();
            self.sessions.look_soon(&self.live);
        }
    }
}

/// Bytes on their way into a sandbox's files, as many as its disk limit and the host's disk have room for.
#[derive(Debug)]
pub struct Upload {
    out: Outgoing,
    bounds: Bounds,
    kind: UploadKind,
    asked: Asked,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum UploadKind {
    /// The contents of one file.
    File,
    /// Files and directories, as many as it has entries.
    Archive,
}

impl Upload {
    /// Sends bytes, as fast as the agent takes them.
    ///
    /// # Errors
    ///
    /// Fails with [`GuestError::DiskLimit`] when the sandbox may not have more on its disk, and otherwise as
    /// [`Outgoing::send`].
    pub async fn send(&mut self, bytes: Bytes) -> Result<(), GuestError> {
        let length = bytes.len() as u64;
        let sent = match self.kind {
            UploadKind::File => Sent::new(length, 0),
            UploadKind::Archive => Sent::archive(length),
        };
        self.bounds.admit(sent).await?;
        self.out.send(bytes).await.map_err(|error| self.bounds.judge(error))
    }

    /// Says that all was sent, and waits until the agent has put it in place.
    ///
    /// # Errors
    ///
    /// As [`send`](Self::send).
    pub async fn finish(self) -> Result<TransferSummary, GuestError> {
        let Self { out, bounds, asked, .. } = self;
        asked.heard(out.finish().await).map_err(|error| bounds.judge(error))
    }
}

/// What a sandbox is held to.
#[derive(Clone)]
pub(in crate::engine) struct Bounds {
    pub(in crate::engine) limits: Arc<DiskLimits>,
    pub(in crate::engine) live: Arc<RunningSandbox>,
}

impl std::fmt::Debug for Bounds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.live.fmt(f)
    }
}

impl Bounds {
    async fn admit(&self, sent: Sent) -> Result<(), GuestError> {
        self.limits.admit_upload(&self.live, sent).await
    }

    /// Says whose disk is full when the agent says that one is.
    fn judge(&self, error: GuestError) -> GuestError {
        self.limits.judge_full(&self.live, error)
    }
}

impl Files {
    /// Acts as another user than the sandbox's own.
    #[must_use]
    pub fn as_user(mut self, user: Option<String>) -> Self {
        if user.is_some() {
            self.user = user;
        }
        self
    }

    fn at(&self, path: &str) -> At {
        At { path: path.to_owned(), cwd: self.cwd.clone(), user: self.user.clone() }
    }

    /// Reads a file.
    ///
    /// # Errors
    ///
    /// Returns [`GuestError::Refused`] when it is not there or may not be read.
    pub async fn read(
        &self,
        path: &str,
        offset: u64,
        limit: Option<u64>,
    ) -> Result<(Entry, Incoming), GuestError> {
        self.guest.read_file(self.at(path), offset, limit).await
    }

    /// Writes a file.
    ///
    /// # Errors
    ///
    /// Returns [`GuestError::Refused`] when it may not be written, and [`GuestError::DiskLimit`] when the sandbox may have no more files.
    pub async fn write(
        &self,
        path: &str,
        mode: Option<u32>,
        parents: bool,
        append: bool,
    ) -> Result<Upload, GuestError> {
        self.bounds.admit(made(path, parents)).await?;
        let asked = self.writes.begin();
        let out = self.guest.write_file(self.at(path), mode, parents, append).await;
        self.upload(UploadKind::File, asked, out)
    }

    fn upload(
        &self,
        kind: UploadKind,
        asked: Asked,
        out: Result<Outgoing, GuestError>,
    ) -> Result<Upload, GuestError> {
        match out {
            Ok(out) => Ok(Upload { out, bounds: self.bounds.clone(), kind, asked }),
            Err(error) => asked.heard(Err(error)).map_err(|error| self.bounds.judge(error)),
        }
    }

    /// Makes a directory.
    ///
    /// # Errors
    ///
    /// Returns [`GuestError::Refused`] when it exists or may not be made, and
    /// [`GuestError::DiskLimit`] when the sandbox may have no more files and directories.
    pub async fn make_dir(
        &self,
        path: &str,
        mode: Option<u32>,
        parents: bool,
    ) -> Result<(), GuestError> {
        self.bounds.admit(made(path, parents)).await?;
        let asked = self.writes.begin();
        let made = asked.heard(self.guest.make_dir(self.at(path), mode, parents).await);
        made.map_err(|error| self.bounds.judge(error))
    }

    /// Lists a directory; the second value is whether there is more.
    ///
    /// # Errors
    ///
    /// Returns [`GuestError::Refused`] when it is not there.
    pub async fn list(
        &self,
        path: &str,
        after: Option<String>,
    ) -> Result<(Vec<Entry>, bool), GuestError> {
        self.guest.list_dir(self.at(path), after).await
    }

    /// Returns the metadata of a path.
    ///
    /// # Errors
    ///
    /// Returns [`GuestError::Refused`] when nothing exists there.
    pub async fn stat(&self, path: &str) -> Result<Entry, GuestError> {
        self.guest.stat(self.at(path)).await
    }

    /// Renames.
    ///
    /// # Errors
    ///
    /// Returns [`GuestError::Refused`] when it cannot be done.
    pub async fn rename(&self, from: &str, to: &str) -> Result<(), GuestError> {
        let asked = self.writes.begin();
        asked.heard(self.guest.rename(self.at(from), to.to_owned()).await)
    }

    /// Removes.
    ///
    /// # Errors
    ///
    /// Returns [`GuestError::Refused`] when it cannot be done.
    pub async fn remove(
        &self,
        path: &str,
        recursive: bool,
        missing_ok: bool,
    ) -> Result<(), GuestError> {
        let asked = self.writes.begin();
        asked.heard(self.guest.remove(self.at(path), recursive, missing_ok).await)
    }

    /// Unpacks a tar stream below a directory.
    ///
    /// # Errors
    ///
    /// Returns [`GuestError::Refused`] when the directory cannot be written.
    pub async fn tar_in(&self, dir: &str) -> Result<Upload, GuestError> {
        let asked = self.writes.begin();
        self.upload(UploadKind::Archive, asked, self.guest.tar_in(self.at(dir), false).await)
    }

    /// Unpacks a tar stream as if its entries were files written one by one: through links to
    /// directories that are on their way.
    ///
    /// # Errors
    ///
    /// As [`tar_in`](Self::tar_in).
    pub async fn tar_through(&self, dir: &str) -> Result<Upload, GuestError> {
        let asked = self.writes.begin();
        self.upload(UploadKind::Archive, asked, self.guest.tar_in(self.at(dir), true).await)
    }

    /// Packs a file or directory as a tar stream.
    ///
    /// # Errors
    ///
    /// Returns [`GuestError::Refused`] when it is not there.
    pub async fn tar_out(&self, path: &str) -> Result<(Entry, Incoming), GuestError> {
        self.guest.tar_out(self.at(path)).await
    }
}

/// What making something at a path makes at most.
fn made(path: &str, parents: bool) -> Sent {
    let names = path.split('/').filter(|name| !name.is_empty()).count() as u64;
    Sent::new(0, if parents { names.max(1) } else { 1 })
}
