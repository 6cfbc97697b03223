//! Compares a layer with its digest, entry by entry.

use std::collections::BTreeSet;

use super::NameDifference;
use super::file::{DigestFile, Recorded};
use super::hash::{HashedEntry, TreeHasher};
use super::links::{HardLinkName, LinkGroups, Links};
use crate::store::{Result, Store};

/// How many differences are listed.
const LISTED: usize = 10_000;
/// How long their paths are together. The first is listed however long it is.
const LISTED_BYTES: usize = 1 << 20;

/// The differences between a digest and the tree that `hasher` reads.
pub(super) fn compare(
    store: &Store,
    recorded: &DigestFile,
    hasher: TreeHasher<'_>,
) -> Result<Vec<NameDifference>> {
    recorded.check()?;
    let mut comparison = DigestComparison {
        hasher,
        current: None,
        entry: 0,
        differences: Differences::default(),
        changed: BTreeSet::new(),
        groups: LinkGroups::new(store.fresh_tmp("links")),
    };
    let mut recorded_links = Links::new(store.fresh_tmp("links"));
    comparison.advance()?;
    recorded.read(|item| match item {
        Recorded::Entry { path, hash } => comparison.entry(path, hash),
        Recorded::Link(link) => recorded_links.push(link),
    })?;
    while let Some(extra) = comparison.current.take() {
        comparison.differences.add(NameDifference::Extra(extra.path));
        comparison.advance()?;
    }
    let DigestComparison { mut differences, changed, groups, .. } = comparison;
    if differences.omitted > 0 {
        return Ok(differences.finish());
    }
    let links = groups.finish(store.fresh_tmp("links"))?;
    let relinked = different_links(recorded_links, links, &changed)?;
    differences.omitted += relinked.omitted;
    if !relinked.entries.is_empty() {
        let mut number = 0;
        recorded.read(|item| {
            if let Recorded::Entry { path, .. } = item {
                if relinked.entries.contains(&number) {
                    differences.add(NameDifference::Changed(path.to_owned()));
                }
                number += 1;
            }
            Ok(())
        })?;
    }
    Ok(differences.finish())
}

struct DigestComparison<'a> {
    hasher: TreeHasher<'a>,
    /// The first name of the tree that was not compared yet.
    current: Option<HashedEntry>,
    /// The number of the recorded entry.
    entry: u64,
    differences: Differences,
    /// Entries that were listed as changed or missing.
    changed: BTreeSet<u64>,
    /// Names of the tree that were recorded, by the numbers of their entries.
    groups: LinkGroups,
}

impl DigestComparison<'_> {
    fn advance(&mut self) -> Result<()> {
        self.current = self.hasher.next()?;
        Ok(())
    }

    fn entry(&mut self, path: &str, hash: &str) -> Result<()> {
        while let Some(extra) = self.current.take_if(|current| current.path.as_str() < path) {
            self.differences.add(NameDifference::Extra(extra.path));
            self.advance()?;
        }
        match self.current.take_if(|current| current.path == path) {
            Some(found) => {
                if found.hash != hash {
                    self.add(NameDifference::Changed(found.path));
                }
                if let Some(inode) = found.linked_inode {
                    self.groups.add(inode, self.entry, path)?;
                }
                self.advance()?;
            }
            None => self.add(NameDifference::Missing(path.to_owned())),
        }
        self.entry += 1;
        Ok(())
    }

    fn add(&mut self, difference: NameDifference) {
        if self.differences.add(difference) {
            self.changed.insert(self.entry);
        }
    }
}

/// Entries that are names of other files than recorded, although nothing else about them changed.
#[derive(Debug, Default)]
struct Relinked {
    entries: BTreeSet<u64>,
    omitted: u64,
}

fn different_links(recorded: Links, found: Links, listed: &BTreeSet<u64>) -> Result<Relinked> {
    let (mut recorded, mut found) = (recorded.sorted()?, found.sorted()?);
    let (mut before, mut now) = (recorded.next()?, found.next()?);
    let mut relinked = Relinked::default();
    let entry = |link: &Option<HardLinkName>| link.map_or(u64::MAX, |link| link.entry);
    while before.is_some() || now.is_some() {
        let number = entry(&before).min(entry(&now));
        if before != now && !listed.contains(&number) {
            if relinked.entries.len() < LISTED {
                relinked.entries.insert(number);
            } else {
                relinked.omitted += 1;
            }
        }
        let (is_before, is_now) = (entry(&before) == number, entry(&now) == number);
        if is_before {
            before = recorded.next()?;
        }
        if is_now {
            now = found.next()?;
        }
    }
    Ok(relinked)
}

#[derive(Debug, Default)]
struct Differences {
    list: Vec<NameDifference>,
    bytes: usize,
    omitted: u64,
}

impl Differences {
    /// Lists a difference, or counts it. Answers whether it was listed.
    fn add(&mut self, difference: NameDifference) -> bool {
        let (NameDifference::Missing(text)
        | NameDifference::Extra(text)
        | NameDifference::Changed(text)
        | NameDifference::Other(text)) = &difference;
        let bytes = self.bytes + text.len();
        if self.list.len() >= LISTED || (bytes > LISTED_BYTES && !self.list.is_empty()) {
            self.omitted += 1;
            return false;
        }
        self.bytes = bytes;
        self.list.push(difference);
        true
    }

    fn finish(mut self) -> Vec<NameDifference> {
        if self.omitted > 0 {
            self.list.push(NameDifference::Other(format!("{} more names differ", self.omitted)));
        }
        self.list
    }
}
