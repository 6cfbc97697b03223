//! Applies the changes of one chain to an unrelated one: chosen files of a sandbox into a drive.
//!
//! There is no common ancestor, so nothing is merged. What was changed replaces what exists under
//! the same path; what was removed is removed. Where a directory would have to make way for
//! something else, or the other way round, that is a conflict, unless the same was done between the
//! two points: nothing that has another origin is lost with a directory.
//!
//! A path that is already as it is to be is left out. So a repeated request finds nothing to do.

use std::collections::BTreeSet;

use super::budget::{self, Budget, LONGEST_MERGE};
use super::lookup::Lookup;
use super::merge::{
    Conflict, MOST_CHANGES, MergePlan, PathAction, PathAttributes, PathContent, ancestors,
};
use super::walk::{self, PathDiff, Selection, Side, Wanted, differences};
use super::{MergeOutcome, OntoChains, OntoOptions};
use crate::model::DiffAspect;
use crate::store::layer::exclude::Globs;
use crate::store::tree::{LONGEST, Xattrs, join};
use crate::store::{Result, Store, StoreError, blocking};

/// The mode of directories that only make a place: who comes next may be anybody, as in the root of a drive.
const OPEN_TO_ALL: u32 = 0o777;

impl Store {
    /// Puts what changed between two chains onto a third one. The result is a new layer that nothing names yet.
    ///
    /// # Errors
    ///
    /// As [`merge_trees`](Self::merge_trees). Conflicts are no error but part of the outcome.
    pub async fn put_onto(&self, chains: OntoChains, options: OntoOptions) -> Result<MergeOutcome> {
        let turn = budget::comparison().await?;
        let (store, dry_run, most) = (self.clone(), options.dry_run, options.most_bytes);
        let onto = chains.onto.clone();
        let plan = blocking(move || store.plan_onto(&chains, &options, Budget::new(LONGEST_MERGE)));
        let plan = plan.await?;
        drop(turn);
        self.carry_out(onto, plan, most, dry_run).await
    }

    fn plan_onto(
        &self,
        chains: &OntoChains,
        options: &OntoOptions,
        mut budget: Budget,
    ) -> Result<MergePlan> {
        let OntoChains { from, to, onto } = chains;
        let paths = Selection { only: options.only.as_ref(), ..Selection::default() };
        let wanted = Wanted { paths, limit: MOST_CHANGES, first: false };
        let diff = walk::compare(self, from, to, &wanted, &mut budget)?;
        if diff.truncated {
            let why = format!("more than {MOST_CHANGES} of the chosen paths changed");
            return Err(StoreError::DiffTooLarge { why });
        }
        let is_out =
            |globs: &Option<Globs>, path: &[u8]| globs.as_ref().is_some_and(|one| one.covers(path));
        let chosen: Vec<PathDiff> = diff
            .paths
            .into_iter()
            .filter(|one| !one.path.is_empty() && !is_out(&options.exclude, &one.path))
            .map(|one| PathDiff { path: join(&options.under, &one.path), ..one })
            .collect();
        if let Some(long) = chosen.iter().find(|one| one.path.len() > LONGEST) {
            return Err(walk::too_long(&long.path));
        }
        let gone = |one: &&PathDiff| !one.to.as_ref().is_some_and(Side::is_dir);
        let mut placing = Placing {
            gone: chosen.iter().filter(gone).map(|one| one.path.clone()).collect(),
            there: Lookup::new(self, onto)?,
            plan: MergePlan::default(),
            budget,
        };
        for one in chosen {
            placing.budget.time()?;
            placing.place(one)?;
        }
        placing.parents(&options.under, &mut Lookup::new(self, to)?)?;
        let mut plan = placing.plan;
        if onto.is_empty() && !plan.is_empty() {
            // Its first session would have made the root of the drive.
            let root = Lookup::new(self, to)?.root()?;
            plan.actions.insert(Vec::new(), directory(&root));
        }
        plan.taken.sort_by(|one, other| one.path.cmp(&other.path));
        plan.conflicts.sort_by(|one, other| one.path.cmp(&other.path));
        Ok(plan)
    }
}

/// A directory that only makes a place.
fn directory(like: &Side) -> PathAction {
    let attributes = PathAttributes { mode: OPEN_TO_ALL, uid: 0, gid: 0, xattrs: Xattrs::new() };
    PathAction::Write { content: PathContent::Side(like.clone()), attributes }
}

struct Placing {
    /// Paths that are no directories afterwards.
    gone: BTreeSet<Vec<u8>>,
    there: Lookup,
    plan: MergePlan,
    budget: Budget,
}

impl Placing {
    fn place(&mut self, one: PathDiff) -> Result<()> {
        let found = self.there.find(&one.path)?;
        let Some(to) = &one.to else {
            let Some(found) = found else { return Ok(()) };
            // Something else under the name is not what was removed.
            let is_it = one.from.as_ref().is_some_and(|from| from.is_dir() == found.is_dir());
            if is_it && (!found.is_dir() || self.is_emptied(&one.path)?) {
                self.act(PathDiff { what: Vec::new(), ..one }, Some(found), PathAction::Remove);
            }
            return Ok(());
        };
        let mut what = Vec::new();
        if let Some(found) = &found {
            let was_dir = one.from.as_ref().is_some_and(Side::is_dir);
            match (found.is_dir(), to.is_dir()) {
                (true, false) if !was_dir || !self.is_emptied(&one.path)? => {
                    self.conflict(one, "the drive has a directory there");
                    return Ok(());
                }
                (false, true) if one.from.is_none() || was_dir => {
                    self.conflict(one, "the drive has something else than a directory there");
                    return Ok(());
                }
                (found_dir, to_dir) if found_dir == to_dir => {
                    let budget = &self.budget;
                    what = differences(found, to, || budget.time())?;
                    if what.is_empty() {
                        return Ok(());
                    }
                }
                _ => what.push(DiffAspect::Type),
            }
        }
        let action = PathAction::write(to)?;
        self.act(PathDiff { what, ..one }, found, action);
        Ok(())
    }

    fn act(&mut self, one: PathDiff, found: Option<Side>, action: PathAction) {
        self.plan.actions.insert(one.path.clone(), action);
        self.plan.taken.push(PathDiff { from: found, old_path: None, ..one });
    }

    fn conflict(&mut self, one: PathDiff, reason: &'static str) {
        self.plan.conflicts.push(Conflict { path: one.path, reason, theirs: one.to });
    }

    /// Whether all that is in a directory of the drive goes, too.
    fn is_emptied(&mut self, dir: &[u8]) -> Result<bool> {
        let mut dirs = vec![dir.to_vec()];
        while let Some(dir) = dirs.pop() {
            let names = self.there.names(&dir)?;
            self.budget.names(names.len())?;
            for (name, is_dir) in names {
                let path = join(&dir, &name);
                if !self.gone.contains(&path) {
                    return Ok(false);
                }
                if is_dir {
                    dirs.push(path);
                }
            }
        }
        Ok(true)
    }

    /// Makes sure that every path has a parent directory.
    fn parents(&mut self, under: &[u8], source: &mut Lookup) -> Result<()> {
        let is_written = |action: &PathAction| matches!(action, PathAction::Write { .. });
        let written = self.plan.actions.iter().filter(|(_, action)| is_written(action));
        let written: Vec<Vec<u8>> = written.map(|(path, _)| path.clone()).collect();
        let (mut known, mut dropped) = (BTreeSet::new(), BTreeSet::new());
        for path in written {
            self.budget.time()?;
            for parent in ancestors(&path) {
                let is_made = self.plan.actions.get(parent).is_some_and(PathAction::makes_dir);
                if is_made || known.contains(parent) {
                    continue;
                }
                match self.there.find(parent)? {
                    Some(found) if found.is_dir() => {
                        known.insert(parent.to_vec());
                    }
                    None => self.make(parent, under, source)?,
                    Some(_) => {
                        let reason = "the drive has something else than the directory it is in";
                        self.plan.actions.remove(&path);
                        let (path, theirs) = (path.clone(), None);
                        self.plan.conflicts.push(Conflict { path: path.clone(), reason, theirs });
                        dropped.insert(path);
                        break;
                    }
                }
            }
        }
        self.plan.taken.retain(|one| !dropped.contains(&one.path));
        Ok(())
    }

    /// Makes a directory as the source has it. Above that there is none.
    fn make(&mut self, path: &[u8], under: &[u8], source: &mut Lookup) -> Result<()> {
        let inner = path.strip_prefix(under).filter(|rest| !rest.is_empty());
        let inner = inner.map(|rest| rest.strip_prefix(b"/").unwrap_or(rest));
        let found = match inner {
            Some(inner) => source.find(inner)?.filter(Side::is_dir),
            None => None,
        };
        match found {
            Some(side) => self.plan.add(path.to_vec(), side),
            None => {
                let like = source.root()?;
                self.plan.actions.insert(path.to_vec(), directory(&like));
                let (path, to) = (path.to_vec(), Some(Side { mode: OPEN_TO_ALL, ..like }));
                self.plan.taken.push(PathDiff {
                    path,
                    from: None,
                    to,
                    what: Vec::new(),
                    old_path: None,
                });
                Ok(())
            }
        }
    }
}
