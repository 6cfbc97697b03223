//! Who holds what, and how many hold each thing.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;

/// Holders and what they hold.
#[derive(Debug)]
pub(super) struct Ledger<H, K> {
    held: HashMap<H, Vec<K>>,
    /// How many holders each thing has.
    holders: HashMap<K, usize>,
}

impl<H, K> Default for Ledger<H, K> {
    fn default() -> Self {
        Self { held: HashMap::new(), holders: HashMap::new() }
    }
}

impl<H: Clone + Eq + Hash, K: Clone + Eq + Hash> Ledger<H, K> {
    /// Enters what somebody holds, in place of what it held.
    pub(super) fn hold<'a>(&mut self, holder: H, things: impl IntoIterator<Item = &'a K>)
    where
        K: 'a,
    {
        let now: HashSet<K> = things.into_iter().cloned().collect();
        for thing in &now {
            *self.holders.entry(thing.clone()).or_default() += 1;
        }
        let before = if now.is_empty() {
            self.held.remove(&holder)
        } else {
            self.held.insert(holder, now.into_iter().collect())
        };
        for thing in before.into_iter().flatten() {
            if let Some(count) = self.holders.get_mut(&thing) {
                *count -= 1;
                if *count == 0 {
                    self.holders.remove(&thing);
                }
            }
        }
    }

    /// Enters all holders of a kind, in place of those of that kind there were.
    pub(super) fn hold_only<'a>(&mut self, of_kind: impl Fn(&H) -> bool, now: Vec<(H, &'a [K])>)
    where
        K: 'a,
    {
        let gone: Vec<H> = self
            .held
            .keys()
            .filter(|holder| of_kind(holder) && !now.iter().any(|(kept, _)| kept == *holder))
            .cloned()
            .collect();
        for (holder, things) in now {
            self.hold(holder, things);
        }
        for holder in gone {
            self.hold(holder, []);
        }
    }

    /// Everything that somebody holds.
    pub(super) fn held(&self) -> HashSet<K> {
        self.holders.keys().cloned().collect()
    }

    /// Whether somebody holds it.
    pub(super) fn is_held(&self, thing: &K) -> bool {
        self.holders.contains_key(thing)
    }

    /// Whether exactly one holds it.
    pub(super) fn is_held_once(&self, thing: &K) -> bool {
        self.holders.get(thing) == Some(&1)
    }

    /// What one of them holds.
    pub(super) fn held_by_one(&self, holder: &H) -> Vec<K> {
        self.held.get(holder).cloned().unwrap_or_default()
    }

    /// What all holders of a kind hold.
    pub(super) fn held_by(&self, of_kind: impl Fn(&H) -> bool) -> HashSet<&K> {
        let holders = self.held.iter().filter(|(holder, _)| of_kind(holder));
        holders.flat_map(|(_, things)| things).collect()
    }
}
