//! Reference counts: who refers to what, and how many refer to each thing.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;

/// Holders and the things they refer to.
#[derive(Debug)]
pub(in crate::store) struct HoldersByKey<H, K> {
    held: HashMap<H, Vec<K>>,
    /// How many holders each thing has.
    holders: HashMap<K, usize>,
}

impl<H, K> Default for HoldersByKey<H, K> {
    fn default() -> Self {
        Self { held: HashMap::new(), holders: HashMap::new() }
    }
}

impl<H: Clone + Eq + Hash, K: Clone + Eq + Hash> HoldersByKey<H, K> {
    /// Sets what a holder refers to.
    pub(in crate::store) fn hold<'a>(&mut self, holder: H, things: impl IntoIterator<Item = &'a K>)
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

    /// Replaces all holders of a kind.
    pub(in crate::store) fn hold_only<'a>(
        &mut self,
        of_kind: impl Fn(&H) -> bool,
        now: Vec<(H, &'a [K])>,
    ) where
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

    /// Everything that has a holder.
    pub(in crate::store) fn held(&self) -> HashSet<K> {
        self.holders.keys().cloned().collect()
    }

    /// Whether it has a holder.
    pub(in crate::store) fn is_held(&self, thing: &K) -> bool {
        self.holders.contains_key(thing)
    }

    /// Whether it has exactly one holder.
    pub(in crate::store) fn is_held_once(&self, thing: &K) -> bool {
        self.holders.get(thing) == Some(&1)
    }

    /// Whether it has this many holders.
    pub(in crate::store) fn is_held_by(&self, thing: &K, holders: usize) -> bool {
        self.holders.get(thing) == Some(&holders)
    }

    /// What a holder refers to.
    pub(in crate::store) fn held_by_one(&self, holder: &H) -> Vec<K> {
        self.held.get(holder).cloned().unwrap_or_default()
    }

    /// What all holders of a kind refer to.
    pub(in crate::store) fn held_by(&self, of_kind: impl Fn(&H) -> bool) -> HashSet<&K> {
        let holders = self.held.iter().filter(|(holder, _)| of_kind(holder));
        holders.flat_map(|(_, things)| things).collect()
    }
}
