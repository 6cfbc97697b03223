//! Finds the domain rules that match a name, without trying each.

use std::collections::HashMap;

use crate::model::DomainRule;

/// Domain rules, by the names they speak of.
#[derive(Debug, Default)]
pub(super) struct DomainIndex {
    rules: Vec<DomainRule>,
    /// `example.com`.
    exact: HashMap<String, Vec<usize>>,
    /// `*.example.com`, by what follows the first dot.
    below: HashMap<String, Vec<usize>>,
    /// All that have a `*` elsewhere.
    other: Vec<usize>,
}

impl DomainIndex {
    pub(super) fn new(rules: Vec<DomainRule>) -> Self {
        let mut names = Self::default();
        for (index, rule) in rules.iter().enumerate() {
            let pattern = rule.pattern.as_str();
            match pattern.strip_prefix("*.") {
                Some(suffix) if !suffix.contains('*') => {
                    names.below.entry(suffix.to_owned()).or_default().push(index);
                }
                _ if pattern.contains('*') => names.other.push(index),
                _ => names.exact.entry(pattern.to_owned()).or_default().push(index),
            }
        }
        names.rules = rules;
        names
    }

    /// The rules that speak of a name, in no order that means anything.
    pub(super) fn matching<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a DomainRule> {
        let parents = name.match_indices('.').map(|(dot, _)| &name[dot + 1..]);
        let exact = self.exact.get(name).into_iter().flatten();
        let below = parents.filter_map(|parent| self.below.get(parent)).flatten();
        let other = self.other.iter().filter(|&&index| self.rules[index].pattern.matches(name));
        exact.chain(below).chain(other).map(|&index| &self.rules[index])
    }

    /// Whether any rule speaks of this port.
    pub(super) fn any_on(&self, port: u16) -> bool {
        self.rules.iter().any(|rule| rule.ports.is_empty() || rule.ports.contains(&port))
    }
}
