//! Forks that come back: compare, promote, merge, rename.

use std::io::BufWriter;

use bytes::Bytes;
use tokio::sync::mpsc;

use crate::db::{Filter, Page};
use crate::engine::error::error_chain;
use crate::engine::lifecycle::lineage::points::ResolvedPoint;
use crate::engine::snapshots::export::Sender;
use crate::engine::{
    Delete, DiffRequest, Difference, Engine, Error, ForkFailed, MergeRequest, Merged, PatchOptions,
    Promote, Promoted, Result,
};
use crate::model::{Name, Point, Sandbox};
use crate::store::{DiffOptions, Globs};

/// How many paths a patch has at the most.
const MOST_IN_PATCH: usize = 100_000;
/// How many paths may be named.
const MOST_PATHS: usize = 1_000;

impl Engine {
    /// Compares two points. Neither is started.
    ///
    /// # Errors
    ///
    /// Returns [`Error::FilesNotReadable`] for files that only a virtual machine can read, and
    /// [`StoreError::DiffTooLarge`](crate::store::StoreError::DiffTooLarge) when there is more to compare than the limits allow.
    pub async fn diff(&self, project: &Name, request: DiffRequest) -> Result<Difference> {
        let (from, to) = self.both_points(project, &request.from, &request.to).await?;
        let options =
            DiffOptions { only: only(&request.paths, &to)?, limit: request.limit, renames: true };
        let tree = self.parts.context.store.diff(&from.layers, &to.layers, options).await?;
        let seen = |point: ResolvedPoint| (point.snapshot, point.live);
        Ok(Difference { from: seen(from), to: seen(to), tree })
    }

    /// Sends the differences of two points as a patch in git's format. A receiver that goes away ends it.
    ///
    /// # Errors
    ///
    /// As [`diff`](Self::diff).
    pub async fn write_patch(
        &self,
        project: &Name,
        request: DiffRequest,
        how: PatchOptions,
        into: mpsc::Sender<Bytes>,
    ) -> Result<()> {
        let (from, to) = self.both_points(project, &request.from, &request.to).await?;
        let only = only(&request.paths, &to)?;
        let options = DiffOptions { only, limit: MOST_IN_PATCH, renames: true };
        let into = BufWriter::with_capacity(64 << 10, Sender(into));
        let store = &self.parts.context.store;
        Ok(store.write_patch(&from.layers, &to.layers, options, how, into).await?)
    }

    async fn both_points(
        &self,
        project: &Name,
        from: &Point,
        to: &Point,
    ) -> Result<(ResolvedPoint, ResolvedPoint)> {
        let lifecycle = &self.parts.lifecycle;
        let from = lifecycle.resolve_point(project, from).await?;
        Ok((from, lifecycle.resolve_point(project, to).await?))
    }

    /// Gives the origin of a fork the fork's state. What it had stays as a snapshot.
    ///
    /// # Errors
    ///
    /// Returns [`Error::OriginMovedOn`] when the origin has changed since, and changes nothing.
    pub async fn promote(
        &self,
        project: &Name,
        name: &Name,
        request: Promote,
        idempotency: Option<String>,
    ) -> Result<Promoted> {
        let asked = format!("promote {name} {request:?}");
        let work = self.parts.lifecycle.promote(project, name, request);
        self.parts.tenancy.idempotent(project, idempotency, asked, work).await
    }

    /// The other forks that were made together with one.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSandbox`] when there is none of that name.
    pub async fn group_of(&self, project: &Name, name: &Name) -> Result<Vec<Name>> {
        let fork = self.parts.lifecycle.find(project, name).await?;
        let group = fork.forked_from.as_ref().and_then(|from| from.group.as_ref());
        let Some(group) = group else { return Ok(Vec::new()) };
        let all = self.forks(project, None, Some(group)).await?;
        Ok(all.into_iter().map(|one| one.name).filter(|other| other != name).collect())
    }

    /// The forks of a sandbox, or those that were made together under a name, or both.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSandbox`] when there is no sandbox `of`.
    pub async fn forks(
        &self,
        project: &Name,
        of: Option<&Name>,
        group: Option<&Name>,
    ) -> Result<Vec<Sandbox>> {
        let origin = match of {
            Some(of) => Some(self.parts.lifecycle.find(project, of).await?.id),
            None => None,
        };
        let (filter, page) = (Filter::default(), Page::all());
        let all = self.parts.context.db.sandboxes(Some(project), &filter, &page).await?.items;
        let is_wanted = |one: &Sandbox| {
            let Some(from) = &one.forked_from else { return false };
            one.deletion().is_none()
                && origin.as_ref().is_none_or(|origin| from.sandbox == *origin)
                && (group.is_none() || from.group.as_ref() == group)
        };
        let mut forks: Vec<Sandbox> = all.into_iter().filter(is_wanted).collect();
        // `try-2` before `try-10`.
        forks.sort_by_cached_key(|one| (one.name.as_str().len(), one.name.clone()));
        Ok(forks)
    }

    /// Deletes forks after another one was promoted. Answers with those that are gone, and those that are not.
    pub async fn delete_forks(
        &self,
        project: &Name,
        names: Vec<Name>,
    ) -> (Vec<Name>, Vec<ForkFailed>) {
        let (mut deleted, mut failed) = (Vec::new(), Vec::new());
        for name in names {
            match self.delete(project, &name, Delete::default(), None).await {
                Ok(_) | Err(Error::NoSandbox(_)) => deleted.push(name),
                Err(error) => failed.push(ForkFailed {
                    name,
                    code: error.code().to_owned(),
                    reason: error_chain(&error),
                }),
            }
        }
        (deleted, failed)
    }

    /// Brings the changes of a sandbox into another one.
    ///
    /// # Errors
    ///
    /// Returns [`Error::MergeConflicts`] or [`Error::Unrelated`] and changes nothing.
    pub async fn merge(
        &self,
        project: &Name,
        name: &Name,
        request: MergeRequest,
    ) -> Result<Merged> {
        self.parts.lifecycle.merge(project, name, request).await
    }

    /// Gives a sandbox another name.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NameTaken`] and changes nothing when another sandbox has it.
    pub async fn rename(&self, project: &Name, name: &Name, to: Name) -> Result<Sandbox> {
        self.parts.lifecycle.rename(project, name, to).await
    }
}

/// Which paths are compared: those that were named, from the working directory of the second point on.
fn only(paths: &[String], to: &ResolvedPoint) -> Result<Option<Globs>> {
    if paths.len() > MOST_PATHS {
        return Err(Error::invalid("paths", format!("at most {MOST_PATHS}")));
    }
    let cwd = to.cwd.as_deref().unwrap_or("/").trim_end_matches('/');
    let mut globs = Vec::new();
    for path in paths {
        let path = path.trim_end_matches('/');
        let full = match path {
            "" if paths.iter().any(|one| one.is_empty()) => {
                return Err(Error::invalid("paths", "a path cannot be empty"));
            }
            "" => "/".to_owned(),
            "." => cwd.to_owned(),
            path if path.starts_with('/') => path.to_owned(),
            path => format!("{cwd}/{}", path.trim_start_matches("./")),
        };
        if full.is_empty() || full == "/" {
            // The root: everything.
            return Ok(None);
        }
        globs.push(full);
    }
    match globs.is_empty() {
        true => Ok(None),
        false => Ok(Some(Globs::parse(&globs)?)),
    }
}
