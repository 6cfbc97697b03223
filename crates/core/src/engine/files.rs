//! Files inside a running sandbox, moved by its agent.

use sandkeep_proto::link::{At, Entry};

use std::sync::Arc;

use bytes::Bytes;

use super::live::{Hold, Live};
use super::{Engine, Inner, Result, WakeMode};
use crate::guest::{Guest, GuestError, Incoming, Moved, Outgoing};
use crate::model::Name;

/// A sandbox's files. It stays awake while this lives.
#[derive(Debug)]
pub struct Files {
    guest: Guest,
    bounds: Bounds,
    user: Option<String>,
    cwd: Option<String>,
    _hold: Hold,
    /// The root is not exchanged under a transfer: the agent has files of it open.
    _gate: tokio::sync::OwnedRwLockReadGuard<()>,
}

impl Engine {
    /// Opens a sandbox's files, waking it if need be.
    ///
    /// # Errors
    ///
    /// Returns [`super::Error`] when the sandbox cannot be woken, or may not.
    pub async fn files(&self, project: &Name, name: &Name, wake: WakeMode) -> Result<Files> {
        let (live, (hold, gate)) = self.inner.enter(project, name, &wake).await?;
        let guest = live.guest().await?;
        let sandbox = live.sandbox();
        let user = sandbox.config.user.clone().or_else(|| sandbox.image_config.user.clone());
        let cwd = sandbox.config.cwd.clone().or_else(|| sandbox.image_config.cwd.clone());
        let bounds = Bounds { inner: Arc::clone(&self.inner), live };
        Ok(Files { guest, bounds, user, cwd, _hold: hold, _gate: gate })
    }
}

/// Bytes on their way into a sandbox's files, as many as its disk limit and the host's disk have room for.
#[derive(Debug)]
pub struct Upload {
    out: Outgoing,
    bounds: Bounds,
}

impl Upload {
    /// Sends bytes, as fast as the agent takes them.
    ///
    /// # Errors
    ///
    /// Fails with [`GuestError::DiskLimit`] when the sandbox may not have more on its disk, and otherwise as
    /// [`Outgoing::send`].
    pub async fn send(&mut self, bytes: Bytes) -> Result<(), GuestError> {
        let Bounds { inner, live } = &self.bounds;
        inner.admit_upload(live, bytes.len() as u64).await?;
        self.out.send(bytes).await.map_err(|error| self.bounds.judge(error))
    }

    /// Says that all was sent, and waits until the agent has put it in place.
    ///
    /// # Errors
    ///
    /// As [`send`](Self::send).
    pub async fn finish(self) -> Result<Moved, GuestError> {
        let Self { out, bounds } = self;
        out.finish().await.map_err(|error| bounds.judge(error))
    }
}

/// What a sandbox is held to.
#[derive(Clone)]
struct Bounds {
    inner: Arc<Inner>,
    live: Arc<Live>,
}

impl std::fmt::Debug for Bounds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.live.fmt(f)
    }
}

impl Bounds {
    /// Says whose disk is full when the agent says that one is.
    fn judge(&self, error: GuestError) -> GuestError {
        self.inner.judge_full(&self.live, error)
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
    /// Returns [`GuestError::Refused`] when it may not be written.
    pub async fn write(
        &self,
        path: &str,
        mode: Option<u32>,
        parents: bool,
        append: bool,
    ) -> Result<Upload, GuestError> {
        self.upload(self.guest.write_file(self.at(path), mode, parents, append).await)
    }

    fn upload(&self, out: Result<Outgoing, GuestError>) -> Result<Upload, GuestError> {
        match out {
            Ok(out) => Ok(Upload { out, bounds: self.bounds.clone() }),
            Err(error) => Err(self.bounds.judge(error)),
        }
    }

    /// Makes a directory.
    ///
    /// # Errors
    ///
    /// Returns [`GuestError::Refused`] when it is there or may not be made.
    pub async fn make_dir(
        &self,
        path: &str,
        mode: Option<u32>,
        parents: bool,
    ) -> Result<(), GuestError> {
        let made = self.guest.make_dir(self.at(path), mode, parents).await;
        made.map_err(|error| self.bounds.judge(error))
    }

    /// Lists a directory; the second answer tells whether there is more.
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

    /// Tells about a path.
    ///
    /// # Errors
    ///
    /// Returns [`GuestError::Refused`] when nothing is there.
    pub async fn stat(&self, path: &str) -> Result<Entry, GuestError> {
        self.guest.stat(self.at(path)).await
    }

    /// Renames.
    ///
    /// # Errors
    ///
    /// Returns [`GuestError::Refused`] when it cannot be done.
    pub async fn rename(&self, from: &str, to: &str) -> Result<(), GuestError> {
        self.guest.rename(self.at(from), to.to_owned()).await
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
        self.guest.remove(self.at(path), recursive, missing_ok).await
    }

    /// Unpacks a tar stream below a directory.
    ///
    /// # Errors
    ///
    /// Returns [`GuestError::Refused`] when the directory cannot be written.
    pub async fn tar_in(&self, dir: &str) -> Result<Upload, GuestError> {
        self.upload(self.guest.tar_in(self.at(dir), false).await)
    }

    /// Unpacks a tar stream as if its entries were files written one by one: through links to
    /// directories that are on their way.
    ///
    /// # Errors
    ///
    /// As [`tar_in`](Self::tar_in).
    pub async fn tar_through(&self, dir: &str) -> Result<Upload, GuestError> {
        self.upload(self.guest.tar_in(self.at(dir), true).await)
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
