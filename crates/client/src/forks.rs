//! Forks that come back: what differs, promote, merge, rename.

use crate::body::Download;
use crate::query::Target;
use crate::sandboxes::{IDEMPOTENCY, sandbox};
use crate::transport::Call;
use crate::types::{
    Diff, Merge, Merged, Paged, Promote, PromoteIntoDrive, Promoted, PromotedIntoDrive, Rename,
    Sandbox, TakeArtifacts,
};
use crate::{Client, Error};

/// Two points of the history of sandboxes, and which paths of them to compare.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DiffQuery {
    /// The first point: `NAME`, `NAME@saved`, `NAME@base`, `NAME@LABEL`, a snapshot's id, or `image:NAME`.
    pub from: String,
    /// The second point.
    pub to: String,
    /// Only these paths or globs; all if empty.
    pub paths: Vec<String>,
}

impl DiffQuery {
    fn target(&self, parts: &[&str]) -> Target {
        let target = Target::new(parts).with("from", &self.from).with("to", &self.to);
        self.paths.iter().fold(target, |target, path| target.with("path", path))
    }
}

/// How a patch is written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PatchFormat {
    /// Only what is below this directory, with paths relative to it.
    pub relative: Option<String>,
    /// With the contents of binary files.
    pub binary: bool,
    /// With paths in `.git` directories, which `git apply` refuses.
    pub git_dir: bool,
}

// Every call fails with what the server says (`Error::Api`) or with what the way there says.
#[allow(clippy::missing_errors_doc)]
impl Client {
    /// Compares two points. Starts neither.
    pub async fn diff(&self, query: &DiffQuery, limit: Option<u32>) -> Result<Diff, Error> {
        let limit = limit.map(|limit| limit.to_string());
        self.transport.json(Call::get(query.target(&["diff"]).maybe("limit", limit))).await
    }

    /// Streams what differs between two points as a patch in git's format.
    pub async fn patch(&self, query: &DiffQuery, format: &PatchFormat) -> Result<Download, Error> {
        let target = query.target(&["diff", "patch"]);
        let target = target.maybe("relative", format.relative.as_ref());
        let target = target.flag("binary", format.binary).flag("git_dir", format.git_dir);
        self.transport.send(Call::get(target)).await
    }

    /// Lists the forks of a sandbox, those that were made together, or both.
    pub async fn forks(
        &self,
        of: Option<&str>,
        group: Option<&str>,
    ) -> Result<Vec<Sandbox>, Error> {
        let target = Target::new(&["forks"]).maybe("of", of).maybe("group", group);
        let page: Paged<Sandbox> = self.transport.json(Call::get(target)).await?;
        Ok(page.items)
    }

    /// Gives the origin of a fork the fork's state. What it had stays as a snapshot.
    pub async fn promote(
        &self,
        name: &str,
        request: &Promote,
        idempotency: Option<&str>,
    ) -> Result<Promoted, Error> {
        let call = Call::post(sandbox(name, &["promote"])).header(IDEMPOTENCY, idempotency);
        self.transport.json(call.json(request)?).await
    }

    /// Streams chosen files that a sandbox made or changed since it was forked, as a tar archive.
    pub async fn take_artifacts(
        &self,
        name: &str,
        request: &TakeArtifacts,
    ) -> Result<Download, Error> {
        self.transport.send(Call::post(sandbox(name, &["artifacts"])).json(request)?).await
    }

    /// Puts chosen files of a sandbox into a drive, all or nothing.
    pub async fn promote_into_drive(
        &self,
        drive: &str,
        request: &PromoteIntoDrive,
    ) -> Result<PromotedIntoDrive, Error> {
        let target = Target::new(&["drives", drive, "promote"]);
        self.transport.json(Call::post(target).json(request)?).await
    }

    /// Brings the changes of a sandbox into another one, all or nothing.
    pub async fn merge(&self, name: &str, request: &Merge) -> Result<Merged, Error> {
        self.transport.json(Call::post(sandbox(name, &["merge"])).json(request)?).await
    }

    /// Gives a sandbox another name.
    pub async fn rename_sandbox(&self, name: &str, to: &str) -> Result<Sandbox, Error> {
        let request = Rename { name: to.to_owned() };
        self.transport.json(Call::post(sandbox(name, &["rename"])).json(&request)?).await
    }
}
