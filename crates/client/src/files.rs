//! Files inside a sandbox, by paths as the sandbox sees them.

use hyper::Method;

use crate::body::{Download, Upload};
use crate::query::Target;
use crate::sandboxes::sandbox;
use crate::transport::Call;
use crate::types::{Entry, Listing, MakeDir, Move, Moved};
use crate::{Client, Error};

/// Which file, as whom, and whether the sandbox may be woken for it.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    /// The sandbox.
    pub sandbox: &'a str,
    /// The path in it; relative ones begin at its working directory.
    pub path: &'a str,
    /// As whom; the sandbox's user if absent.
    pub user: Option<&'a str>,
    /// Refuse with `not_running` instead of waking the sandbox.
    pub if_running: bool,
}

impl<'a> Place<'a> {
    /// A path in a sandbox, as the sandbox's own user, waking it if it sleeps.
    #[must_use]
    pub fn new(sandbox: &'a str, path: &'a str) -> Self {
        Self { sandbox, path, user: None, if_running: false }
    }

    fn target(self, rest: &[&str]) -> Target {
        let mut parts = vec!["files"];
        parts.extend(rest);
        sandbox(self.sandbox, &parts)
            .with("path", self.path)
            .maybe("user", self.user)
            .flag("if_running", self.if_running)
    }
}

/// How a file is written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WriteOptions {
    /// Permission bits of a new file.
    pub mode: Option<u32>,
    /// Whether missing parents are made.
    pub parents: bool,
    /// Whether bytes are added at the end instead of replacing the existing ones.
    pub append: bool,
}

// Every call fails with what the server says (`Error::Api`) or with what the way there says.
#[allow(clippy::missing_errors_doc)]
impl Client {
    /// Reads a file.
    pub async fn read_file(&self, place: Place<'_>) -> Result<Download, Error> {
        self.transport.send(Call::get(place.target(&[]))).await
    }

    /// Writes a file.
    pub async fn write_file(
        &self,
        place: Place<'_>,
        options: WriteOptions,
        content: Upload,
    ) -> Result<Moved, Error> {
        let target = place
            .target(&[])
            .maybe("mode", options.mode.map(|mode| format!("{mode:o}")))
            .flag("parents", options.parents)
            .flag("append", options.append);
        self.transport.json(Call::new(Method::PUT, target).stream(content)).await
    }

    /// Removes a file, or a directory with all that is in it.
    pub async fn remove_file(
        &self,
        place: Place<'_>,
        recursive: bool,
        missing_ok: bool,
    ) -> Result<(), Error> {
        let target = place.target(&[]).flag("recursive", recursive).flag("missing_ok", missing_ok);
        self.transport.done(Call::new(Method::DELETE, target)).await
    }

    /// Says what is at a path. Symlinks are not followed.
    pub async fn stat(&self, place: Place<'_>) -> Result<Entry, Error> {
        self.transport.json(Call::get(place.target(&["stat"]))).await
    }

    /// Lists a directory, from `cursor` on.
    pub async fn list_directory(
        &self,
        place: Place<'_>,
        cursor: Option<&str>,
    ) -> Result<Listing, Error> {
        self.transport.json(Call::get(place.target(&["list"]).maybe("cursor", cursor))).await
    }

    /// Makes a directory.
    pub async fn make_directory(&self, name: &str, request: &MakeDir) -> Result<(), Error> {
        self.transport.done(Call::post(sandbox(name, &["files", "mkdir"])).json(request)?).await
    }

    /// Renames something.
    pub async fn rename(&self, name: &str, request: &Move) -> Result<(), Error> {
        self.transport.done(Call::post(sandbox(name, &["files", "move"])).json(request)?).await
    }

    /// Unpacks a tar archive into a directory.
    pub async fn tar_in(&self, directory: Place<'_>, archive: Upload) -> Result<Moved, Error> {
        let call = Call::new(Method::PUT, directory.target(&["tar"])).stream(archive);
        self.transport.json(call).await
    }

    /// Packs a file or directory as a tar archive.
    pub async fn tar_out(&self, place: Place<'_>) -> Result<Download, Error> {
        self.transport.send(Call::get(place.target(&["tar"]))).await
    }
}
