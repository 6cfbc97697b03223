//! Pairs files that were removed with files of the same content that were added.
//!
//! A content that was removed twice, or added twice, is paired with nothing: it would be a guess.

use std::collections::HashMap;
use std::time::Duration;

use sha2::{Digest as _, Sha256};

use super::TreeDiff;
use super::budget::Budget;
use super::content::{fill, shown_xattrs};
use super::walk::{PathDiff, Side};
use crate::model::DiffAspect;
use crate::store::tree::Xattrs;
use crate::store::walk::vanished;
use crate::store::{Result, StoreError};

/// How many added and how many removed files are looked at.
const MOST_FILES: usize = 1_000;
/// How many bytes are read for it, and how long.
const MOST_BYTES: u64 = 64 << 20;
const LONGEST: Duration = Duration::from_secs(5);

/// Turns pairs of an added and a removed file into renamed ones. If that takes long, they stay added and removed.
pub(super) fn find(diff: &mut TreeDiff) -> Result<()> {
    match pair(diff, &Budget::new(LONGEST)) {
        Err(StoreError::DiffTooLarge { .. }) => Ok(()),
        paired => paired,
    }
}

fn pair(diff: &mut TreeDiff, budget: &Budget) -> Result<()> {
    let of = |is_added: bool| -> Vec<usize> {
        let chosen = diff.paths.iter().enumerate().filter(|(_, one)| {
            let (there, gone) = if is_added { (&one.to, &one.from) } else { (&one.from, &one.to) };
            gone.is_none() && there.as_ref().is_some_and(|side| side.is_file() && side.size > 0)
        });
        chosen.map(|(at, _)| at).collect()
    };
    let (added, removed) = (of(true), of(false));
    if added.is_empty()
        || removed.is_empty()
        || added.len() > MOST_FILES
        || removed.len() > MOST_FILES
    {
        return Ok(());
    }
    let size = |at: &usize| {
        let one = &diff.paths[*at];
        one.to.as_ref().or(one.from.as_ref()).map_or(0, |side| side.size)
    };
    let mut by_size: HashMap<u64, (Vec<usize>, Vec<usize>)> = HashMap::new();
    added.iter().for_each(|at| by_size.entry(size(at)).or_default().0.push(*at));
    removed.iter().for_each(|at| by_size.entry(size(at)).or_default().1.push(*at));
    let mut left = MOST_BYTES;
    let mut pairs = Vec::new();
    for (size, (added, removed)) in by_size {
        if added.is_empty() || removed.is_empty() {
            continue;
        }
        let cost = size.saturating_mul((added.len() + removed.len()) as u64);
        let Some(rest) = left.checked_sub(cost) else { continue };
        left = rest;
        let mut by_hash: HashMap<[u8; 32], (Vec<usize>, Vec<usize>)> = HashMap::new();
        for at in added {
            if let Some(hash) = hash_of(&diff.paths[at], budget)? {
                by_hash.entry(hash).or_default().0.push(at);
            }
        }
        for at in removed {
            if let Some(hash) = hash_of(&diff.paths[at], budget)? {
                by_hash.entry(hash).or_default().1.push(at);
            }
        }
        for pair in by_hash.into_values() {
            if let ([added], [removed]) = (&pair.0[..], &pair.1[..]) {
                pairs.push((*added, *removed));
            }
        }
    }
    for (added, removed) in &pairs {
        let (old_path, from) =
            (diff.paths[*removed].path.clone(), diff.paths[*removed].from.clone());
        let one = &mut diff.paths[*added];
        if let (Some(from), Some(to)) = (&from, &one.to) {
            if from.mode != to.mode {
                one.what.push(DiffAspect::Mode);
            }
            if (from.uid, from.gid) != (to.uid, to.gid) {
                one.what.push(DiffAspect::Owner);
            }
            if xattrs_of(from)? != xattrs_of(to)? {
                one.what.push(DiffAspect::Xattrs);
            }
            diff.counts.bytes -= to.size;
        }
        (one.old_path, one.from) = (Some(old_path), from);
        diff.counts.added -= 1;
        diff.counts.removed -= 1;
        diff.counts.renamed += 1;
    }
    let mut gone: Vec<usize> = pairs.into_iter().map(|(_, removed)| removed).collect();
    gone.sort_unstable();
    for at in gone.into_iter().rev() {
        diff.paths.remove(at);
    }
    Ok(())
}

/// The attributes of a file; none if it is gone.
fn xattrs_of(side: &Side) -> Result<Xattrs> {
    match side.dir.open().and_then(|dir| dir.xattrs(&side.name)) {
        Err(error) if vanished(&error) => Ok(Xattrs::new()),
        found => found.map(shown_xattrs),
    }
}

/// The hash of a file; `None` if it is gone.
fn hash_of(one: &PathDiff, budget: &Budget) -> Result<Option<[u8; 32]>> {
    let Some(side) = one.to.as_ref().or(one.from.as_ref()) else { return Ok(None) };
    let file = match side.dir.open().and_then(|dir| dir.open_file(&side.name)) {
        Err(error) if vanished(&error) => return Ok(None),
        opened => opened?,
    };
    let mut hash = Sha256::new();
    let mut buffer = vec![0u8; 128 << 10];
    loop {
        let read = fill(&file, &mut buffer)?;
        if read == 0 {
            return Ok(Some(hash.finalize().into()));
        }
        hash.update(&buffer[..read]);
        budget.time()?;
    }
}
