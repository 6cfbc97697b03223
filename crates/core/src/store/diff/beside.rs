//! Resolves conflicts by keeping both versions: the target's in place, the source's beside it.
//!
//! The source's version of `d/f` is written as `d/f.from-SOURCE`. Where the target has no directory `d`, or something
//! else in its place, all that the source changed in `d` goes to `d.from-SOURCE`: the target's version is never turned
//! into a directory, and a directory that was removed does not come back.

use std::collections::{BTreeMap, BTreeSet};

use super::budget::Budget;
use super::lookup::Lookup;
use super::merge::{Conflict, MergePlan, PathAction, ancestors};
use super::walk::{Side, ends, name_of};
use crate::store::Result;
use crate::store::tree::{LONGEST, join};

/// The longest name of a file.
const LONGEST_NAME: usize = 255;

/// Where the version of the source goes.
struct Beside {
    /// How much of the path is replaced.
    length: usize,
    /// By what.
    by: Vec<u8>,
}

impl MergePlan {
    /// Writes the source's version of each conflict beside the target's. Conflicts stay that have none, or where the name for
    /// it is taken.
    pub(super) fn keep_both(
        &mut self,
        source: &str,
        ours: &mut Lookup,
        theirs: &mut Lookup,
        budget: &Budget,
    ) -> Result<()> {
        let mut left = Vec::new();
        // Directories of the target that the source has replaced by something else: they stay with all that is in them.
        let mut replaced: BTreeSet<Vec<u8>> = BTreeSet::new();
        // Names that were found to be free, or not.
        let mut free: BTreeMap<Vec<u8>, bool> = BTreeMap::new();
        for conflict in std::mem::take(&mut self.conflicts) {
            budget.time()?;
            let Some(side) = conflict.theirs.clone() else {
                if !ancestors(&conflict.path).any(|dir| replaced.contains(dir)) {
                    left.push(conflict);
                }
                continue;
            };
            if ours.is_dir(&conflict.path)? {
                if side.is_dir() {
                    // Only attributes differ, and there is nothing that could be written beside.
                    continue;
                }
                replaced.insert(conflict.path.clone());
            }
            let Some(beside) = place(&conflict.path, source, ours)? else {
                let reason = "the name for the other version would be too long";
                left.push(Conflict { reason, ..conflict });
                continue;
            };
            let is_free = match free.get(&beside.by) {
                Some(is_free) => *is_free,
                None => ours.find(&beside.by)?.is_none() && !self.actions.contains_key(&beside.by),
            };
            free.insert(beside.by.clone(), is_free);
            if !is_free {
                let reason = "the name for the other version is taken: <name>.from-<source>";
                left.push(Conflict { reason, ..conflict });
                continue;
            }
            self.write_beside(&conflict.path, side, &beside, theirs)?;
        }
        let stays = |path: &[u8]| ancestors(path).any(|dir| replaced.contains(dir));
        self.actions
            .retain(|path, action| matches!(action, PathAction::Write { .. }) || !stays(path));
        self.taken.retain(|one| one.to.is_some() || !stays(&one.path));
        self.conflicts = left;
        Ok(())
    }

    /// Writes a version, and the directories it is in.
    fn write_beside(
        &mut self,
        path: &[u8],
        side: Side,
        beside: &Beside,
        theirs: &mut Lookup,
    ) -> Result<()> {
        let moved = |path: &[u8]| [&beside.by[..], &path[beside.length..]].concat();
        for end in ends(path).filter(|end| (beside.length..path.len()).contains(end)) {
            let new = moved(&path[..end]);
            if !self.actions.contains_key(&new)
                && let Some(dir) = theirs.find(&path[..end])?
            {
                self.add(new, dir)?;
            }
        }
        let new = moved(path);
        match self.actions.contains_key(&new) {
            // A directory that was needed for something else.
            true => Ok(()),
            false => self.add(new, side),
        }
    }
}

/// Where the source's version of a path goes; `None` if the name would be too long.
fn place(path: &[u8], source: &str, ours: &mut Lookup) -> Result<Option<Beside>> {
    let mut length = path.len();
    for end in ends(path).filter(|end| *end < path.len()) {
        if !ours.is_dir(&path[..end])? {
            length = end;
            break;
        }
    }
    let name = [name_of(&path[..length]).as_bytes(), b".from-", source.as_bytes()].concat();
    let start = path[..length].iter().rposition(|byte| *byte == b'/').unwrap_or(0);
    let by = join(&path[..start], &name);
    let fits = name.len() <= LONGEST_NAME && by.len() + path.len() - length <= LONGEST;
    Ok(fits.then_some(Beside { length, by }))
}
