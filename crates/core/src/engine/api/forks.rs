//! Comparing forks and bringing them back: compare, promote, merge, rename.

use std::collections::{BTreeSet, HashMap};

use bytes::Bytes;
use tokio::sync::mpsc;

use crate::db::{Filter, Page};
use crate::engine::error::error_chain;
use crate::engine::lifecycle::lineage::points::ResolvedPoint;
use crate::engine::{
    Delete, DiffRequest, Difference, Engine, Error, ForkFailed, ForkInTree, MergeRequest, Merged,
    PatchOptions, Promote, Promoted, Result,
};
use crate::model::{
    BroughtBack, ForkFate, Name, OnAccept, Point, Sandbox, SandboxId, Snapshot, SnapshotId,
};
use crate::store::{DiffOptions, Globs};

/// The largest number of paths in a patch.
const MOST_IN_PATCH: usize = 100_000;
/// How many paths may be named.
const MOST_PATHS: usize = 1_000;
/// How long they are together.
const LONGEST_PATHS: usize = 64 << 10;

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
        let _turn = self.parts.lifecycle.comparing.turn(project).await?;
        let tree = self.parts.context.store.diff(&from.layers, &to.layers, options).await?;
        let seen = |point: ResolvedPoint| (point.snapshot, point.live);
        Ok(Difference { from: seen(from), to: seen(to), tree })
    }

    /// Sends the differences of two points as a patch in git's format. A receiver that goes away or takes nothing for a while ends
    /// it.
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
        let comparing = &self.parts.lifecycle.comparing;
        let _slot = comparing.patch(project)?;
        let (from, to) = self.both_points(project, &request.from, &request.to).await?;
        let only = only(&request.paths, &to)?;
        let options = DiffOptions { only, limit: MOST_IN_PATCH, renames: true };
        let store = &self.parts.context.store;
        let turn = comparing.turn(project).await?;
        let patch = store.prepare_patch(&from.layers, &to.layers, options, how).await?;
        drop(turn);
        Ok(store.send_patch(patch, into).await?)
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
        self.promote_as_asked(project, name, request, idempotency, "").await
    }

    /// The same as a part of a request for more. Another request under the same idempotency key is refused, so `more` says what
    /// else it asks for.
    ///
    /// # Errors
    ///
    /// As [`promote`](Self::promote).
    pub async fn promote_as_asked(
        &self,
        project: &Name,
        name: &Name,
        request: Promote,
        idempotency: Option<String>,
        more: &str,
    ) -> Result<Promoted> {
        let expected = request.expect_generation.map(|at| at.to_string()).unwrap_or_default();
        let asked = format!("promote {name} expect_generation={expected} {more}");
        let work = self.parts.lifecycle.promote(project, name, request);
        self.parts.tenancy.idempotent(project, idempotency, asked, work).await
    }

    /// The other forks that were made together with one.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSandbox`] when there is none of that name.
    pub async fn group_of(&self, project: &Name, name: &Name) -> Result<Vec<(Name, SandboxId)>> {
        let fork = self.parts.lifecycle.find(project, name).await?;
        let all = self.forks(project, None, None).await?;
        let others =
            all.into_iter().filter(|one| one.id != fork.id && were_made_together(&fork, one));
        Ok(others.map(|one| (one.name, one.id)).collect())
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
        let mut forks: Vec<Sandbox> =
            with_current_names(all).into_iter().filter(is_wanted).collect();
        // `try-2` before `try-10`.
        forks.sort_by_cached_key(|one| (one.name.as_str().len(), one.name.clone()));
        Ok(forks)
    }

    /// Deletes a fork that was accepted, if its maker or this caller asked for that. A fork that
    /// has more than what was accepted, because it runs and kept writing, stays. Answers as
    /// [`delete_forks`](Self::delete_forks).
    pub async fn clear_accepted(
        &self,
        project: &Name,
        name: &Name,
        wanted: bool,
    ) -> (Vec<Name>, Vec<ForkFailed>) {
        let nothing = (Vec::new(), Vec::new());
        let Ok(fork) = self.parts.lifecycle.find(project, name).await else { return nothing };
        let (Some(outcome), Some(from)) = (&fork.outcome, &fork.forked_from) else {
            return nothing;
        };
        if !wanted && from.on_accept != OnAccept::Delete {
            return nothing;
        }
        let accepted = match outcome.how {
            BroughtBack::Promoted => from.snapshot.clone(),
            BroughtBack::Merged => fork.merged.last().map(|merge| merge.snapshot.clone()),
        };
        let Some(accepted) = accepted else { return nothing };
        let only =
            Delete { only: Some(fork.id.clone()), only_at: Some(accepted), ..Delete::default() };
        let (mut deleted, mut failed) = nothing;
        self.delete_fork(project, name.clone(), only, &mut deleted, &mut failed).await;
        (deleted, failed)
    }

    /// What has become of the forks of these sandboxes, those in the trash included.
    pub(super) fn forks_in_tree(
        &self,
        project: &Name,
        related: &BTreeSet<SandboxId>,
        all: &[Sandbox],
        snapshots: &[Snapshot],
    ) -> Vec<ForkInTree> {
        let names: HashMap<&SandboxId, &Name> =
            all.iter().map(|one| (&one.id, &one.name)).collect();
        // What others stand on stays when its sandbox is deleted.
        let mut held: HashMap<&SnapshotId, Vec<&SandboxId>> = HashMap::new();
        for one in all {
            let base = one.forked_from.as_ref().and_then(|from| from.snapshot.as_ref());
            let merged = one.merged.iter().map(|merge| &merge.snapshot);
            for id in one.current.iter().chain(base).chain(merged) {
                held.entry(id).or_default().push(&one.id);
            }
        }
        let counts = self.parts.references.counts();
        let shown = |one: &Sandbox, expired: Option<bool>| {
            let from = one.forked_from.as_ref().filter(|from| related.contains(&from.sandbox))?;
            let going = |snapshot: &&Snapshot| {
                snapshot.sandbox == one.id
                    && held.get(&snapshot.id).is_none_or(|by| by.iter().all(|id| **id == one.id))
            };
            let own: Vec<SnapshotId> =
                snapshots.iter().filter(going).map(|one| one.id.clone()).collect();
            Some(ForkInTree {
                id: one.id.clone(),
                name: one.name.clone(),
                origin: names.get(&from.sandbox).map_or(&from.name, |name| *name).clone(),
                fate: match (&one.outcome, expired) {
                    (Some(outcome), _) if outcome.how == BroughtBack::Promoted => {
                        ForkFate::Promoted
                    }
                    (Some(_), _) => ForkFate::Merged,
                    (None, None) => ForkFate::Alive,
                    (None, Some(true)) => ForkFate::Expired,
                    (None, Some(false)) => ForkFate::Rejected,
                },
                freed: match expired {
                    None => counts.freed_with(&one.id, &own),
                    Some(_) => counts.freed_by_trashed(&one.id),
                },
                in_trash: expired.is_some(),
            })
        };
        let mut forks: Vec<ForkInTree> = all.iter().filter_map(|one| shown(one, None)).collect();
        let gone = self.parts.storage.trash.forks(project);
        forks.extend(gone.iter().filter_map(|(one, expired)| shown(one, Some(*expired))));
        // Forks of one call are as old as each other: by name, `try-2` before `try-10`.
        forks.sort_by_cached_key(|one| (one.name.as_str().len(), one.name.clone(), one.id.clone()));
        forks
    }

    /// Deletes forks after another one was promoted. Answers with those that are gone, and those that are not.
    pub async fn delete_forks(
        &self,
        project: &Name,
        forks: Vec<(Name, SandboxId)>,
    ) -> (Vec<Name>, Vec<ForkFailed>) {
        let (mut deleted, mut failed) = (Vec::new(), Vec::new());
        for (name, id) in forks {
            // Somebody may have given the name to something else meanwhile.
            let only = Delete { only: Some(id), ..Delete::default() };
            self.delete_fork(project, name, only, &mut deleted, &mut failed).await;
        }
        (deleted, failed)
    }

    async fn delete_fork(
        &self,
        project: &Name,
        name: Name,
        request: Delete,
        deleted: &mut Vec<Name>,
        failed: &mut Vec<ForkFailed>,
    ) {
        match self.delete(project, &name, request, None).await {
            Ok(_) | Err(Error::NoSandbox(_)) => deleted.push(name),
            Err(error) => failed.push(ForkFailed {
                name,
                code: error.code().to_owned(),
                reason: error_chain(&error),
            }),
        }
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

/// Sandboxes with the names that those have now which they come from and were brought back into.
pub(super) fn with_current_names(mut all: Vec<Sandbox>) -> Vec<Sandbox> {
    let names: HashMap<SandboxId, Name> =
        all.iter().map(|one| (one.id.clone(), one.name.clone())).collect();
    for one in &mut all {
        if let Some(from) = &mut one.forked_from
            && let Some(name) = names.get(&from.sandbox)
        {
            from.name.clone_from(name);
        }
        if let Some(outcome) = &mut one.outcome
            && let Some(name) = outcome.into_id.as_ref().and_then(|id| names.get(id))
        {
            outcome.into.clone_from(name);
        }
    }
    all
}

/// Whether another fork was made by the same call. One that was promoted before still has those it was made with.
fn were_made_together(fork: &Sandbox, other: &Sandbox) -> bool {
    let Some(from) = &other.forked_from else { return false };
    let own = fork.forked_from.as_ref().filter(|own| own.group.is_some());
    let promoted = fork.outcome.as_ref().and_then(|outcome| outcome.group_id.as_ref());
    match (own, promoted) {
        (Some(own), _) if own.group_id.is_some() => from.group_id == own.group_id,
        // A record of before: forks of one name from one state.
        (Some(own), _) => {
            from.group_id.is_none()
                && (&from.group, &from.sandbox, &from.snapshot, from.generation)
                    == (&own.group, &own.sandbox, &own.snapshot, own.generation)
        }
        (None, Some(promoted)) => from.group_id.as_ref() == Some(promoted),
        (None, None) => false,
    }
}

/// Which paths are compared: those that were named, from the working directory of the second point on.
fn only(paths: &[String], to: &ResolvedPoint) -> Result<Option<Globs>> {
    if paths.len() > MOST_PATHS {
        return Err(Error::invalid("paths", format!("at most {MOST_PATHS}")));
    }
    if paths.iter().map(String::len).sum::<usize>() > LONGEST_PATHS {
        return Err(Error::invalid("paths", format!("at most {LONGEST_PATHS} bytes together")));
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
