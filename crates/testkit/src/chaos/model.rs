//! What must be true, as far as the server has acknowledged it.
//!
//! Every client of a campaign has sandboxes of its own and a model of them. The model distinguishes three things:
//!
//! - *durable*: the files as of the last snapshot that was acknowledged. No fault may change them.
//! - *expected*: the files after every command that was acknowledged since. A power cut may take them
//!   away, the end of the daemon alone may not.
//! - *unsure*: paths and sandboxes that a request without an answer was about.

use std::collections::{BTreeMap, BTreeSet};

use sha2::{Digest as _, Sha256};

use super::report::Operation;

/// What every file of a campaign contains, so that a fault can be about them alone.
pub const MARK: &str = "CHAOSDATA";

/// The content of a file: one line again and again, cut off at a length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) id: u64,
    pub(super) length: usize,
}

impl Content {
    pub(super) fn line(self) -> String {
        format!("{MARK} {:016x}", self.id)
    }

    pub(super) fn digest(self) -> String {
        let line = self.line() + "\n";
        let bytes: Vec<u8> = line.bytes().cycle().take(self.length).collect();
        hex::encode(Sha256::digest(&bytes))
    }
}

/// Files by their paths below `/work`, with the digests of their contents.
pub(super) type Files = BTreeMap<String, String>;

#[derive(Debug, Default)]
pub(super) struct Sandbox {
    /// Whether its creation was acknowledged.
    pub(super) created: bool,
    /// Whether a request to delete it had no answer.
    pub(super) deleting: bool,
    /// Whether anything but its files is open. No operation uses it until it was checked.
    pub(super) unsettled: bool,
    /// The highest generation it was seen at.
    pub(super) generation: u64,
    pub(super) durable: Files,
    pub(super) expected: Files,
    /// Paths that changed since what is durable.
    pub(super) touched: BTreeSet<String>,
    /// Paths whose content is unknown.
    pub(super) unsure: BTreeSet<String>,
    /// What a rollback or a fork without an answer may have made of the files.
    pub(super) alternatives: Vec<Snapshot>,
}

#[derive(Debug, Clone)]
pub(super) struct Snapshot {
    pub(super) sandbox: String,
    pub(super) files: Files,
    pub(super) unsure: BTreeSet<String>,
    /// What acknowledged it.
    pub(super) made_by: Operation,
    /// Whether it was resumed and compared at least once.
    pub(super) compared: bool,
}

impl Sandbox {
    pub(super) fn is_usable(&self) -> bool {
        self.created && !self.deleting && !self.unsettled
    }

    /// Its files as a snapshot that was just acknowledged.
    pub(super) fn kept(&mut self, name: &str, made_by: Operation) -> Snapshot {
        self.durable = self.expected.clone();
        self.touched = self.unsure.clone();
        self.as_it_is(name, made_by)
    }

    pub(super) fn as_it_is(&self, name: &str, made_by: Operation) -> Snapshot {
        let (files, unsure) = (self.expected.clone(), self.unsure.clone());
        Snapshot { sandbox: name.to_owned(), files, unsure, made_by, compared: false }
    }

    /// Says what is wrong with the files that were found, if `lossy` faults may have hit what was not durable.
    pub(super) fn judge(&self, found: &Files, lossy: bool) -> Option<String> {
        let (must, mut open) = match lossy {
            true => (&self.durable, self.touched.clone()),
            false => (&self.expected, BTreeSet::new()),
        };
        open.extend(self.unsure.iter().cloned());
        let wrong = differences(must, found, &open)?;
        let other = |snapshot: &Snapshot| differences(&snapshot.files, found, &snapshot.unsure);
        match self.alternatives.iter().any(|snapshot| other(snapshot).is_none()) {
            true => None,
            false => Some(wrong),
        }
    }

    /// Takes what was found for what exists.
    pub(super) fn adopt(&mut self, found: &Files, known: &BTreeSet<String>) {
        if !self.alternatives.is_empty() {
            // What is durable is one of several; only what is in all of them is certain.
            for snapshot in std::mem::take(&mut self.alternatives) {
                let same =
                    |path: &String, digest: &String| snapshot.files.get(path) == Some(digest);
                self.touched.extend(snapshot.files.keys().cloned());
                self.touched.extend(snapshot.unsure);
                let differs = self.durable.iter().filter(|(path, digest)| !same(path, digest));
                let differs: Vec<String> = differs.map(|(path, _)| path.clone()).collect();
                self.touched.extend(differs);
            }
        }
        self.touched.extend(std::mem::take(&mut self.unsure));
        for path in self.durable.keys().chain(found.keys()) {
            if self.durable.get(path) != found.get(path) {
                self.touched.insert(path.clone());
            }
        }
        let (good, torn): (Vec<_>, Vec<_>) =
            found.iter().partition(|(_, digest)| known.contains(*digest));
        self.unsure = torn.into_iter().map(|(path, _)| path.clone()).collect();
        self.expected =
            good.into_iter().map(|(path, digest)| (path.clone(), digest.clone())).collect();
        self.unsettled = false;
        self.deleting = false;
        self.created = true;
    }
}

impl Snapshot {
    pub(super) fn judge(&self, found: &Files) -> Option<String> {
        differences(&self.files, found, &self.unsure)
    }
}

/// What differs, except at paths that may.
fn differences(must: &Files, found: &Files, open: &BTreeSet<String>) -> Option<String> {
    let paths: BTreeSet<&String> = must.keys().chain(found.keys()).collect();
    let mut wrong = Vec::new();
    for path in paths.into_iter().filter(|path| !open.contains(*path)) {
        match (must.get(path), found.get(path)) {
            (Some(one), Some(other)) if one == other => {}
            (Some(_), Some(other)) if *other == empty() => wrong.push(format!("{path} is empty")),
            (Some(_), Some(_)) => wrong.push(format!("{path} differs")),
            (Some(_), None) => wrong.push(format!("{path} is missing")),
            (None, _) => wrong.push(format!("{path} should not be there")),
        }
    }
    let total = must.len();
    (!wrong.is_empty()).then(|| format!("of {total} files: {}", wrong.join(", ")))
}

fn empty() -> String {
    Content { id: 0, length: 0 }.digest()
}

/// All a client knows.
#[derive(Debug, Default)]
pub(super) struct Model {
    pub(super) sandboxes: BTreeMap<String, Sandbox>,
    pub(super) snapshots: BTreeMap<String, Snapshot>,
    /// Digests of everything that was ever written.
    pub(super) known: BTreeSet<String>,
    /// Sandboxes whose deletion was acknowledged and that were not looked for since.
    pub(super) deleted: BTreeSet<String>,
    /// Snapshots, in the same way.
    pub(super) dropped: BTreeSet<String>,
}

#[cfg(test)]
mod tests {
    use super::{Content, Sandbox};
    use crate::chaos::report::Operation;

    fn with(paths: &[(&str, u64)]) -> Sandbox {
        let digest = |id: u64| Content { id, length: 100 }.digest();
        let expected = paths.iter().map(|(path, id)| ((*path).to_owned(), digest(*id))).collect();
        Sandbox { created: true, expected, ..Sandbox::default() }
    }

    #[test]
    fn what_is_durable_must_be_there_after_every_fault() {
        let mut sandbox = with(&[("a", 1), ("b", 2)]);
        sandbox.kept("box", Operation::Stop);
        let mut found = sandbox.expected.clone();
        assert_eq!(sandbox.judge(&found, true), None);
        found.remove("a");
        assert!(sandbox.judge(&found, true).is_some_and(|wrong| wrong.contains("a is missing")));
    }

    #[test]
    fn a_power_cut_may_take_what_was_not_snapshotted_and_a_kill_may_not() {
        let mut sandbox = with(&[("a", 1)]);
        sandbox.kept("box", Operation::Checkpoint);
        let found = sandbox.expected.clone();
        sandbox.expected = with(&[("a", 1), ("b", 2)]).expected;
        sandbox.touched.insert("b".to_owned());
        assert_eq!(sandbox.judge(&found, true), None);
        assert!(sandbox.judge(&found, false).is_some());
    }

    #[test]
    fn a_fork_without_an_answer_is_absent_or_has_the_files_of_its_source() {
        let source = with(&[("a", 1), ("b", 2)]);
        let alternatives = vec![source.as_it_is("source", Operation::Fork)];
        let fork = Sandbox { unsettled: true, alternatives, ..Sandbox::default() };
        let mut found = source.expected;
        assert_eq!(fork.judge(&found, false), None);
        assert_eq!(fork.judge(&found, true), None);
        found.remove("a");
        assert!(fork.judge(&found, true).is_some());
    }

    #[test]
    fn torn_files_are_open_until_they_are_written_again() {
        let mut sandbox = with(&[("a", 1)]);
        let mut found = sandbox.expected.clone();
        let known = found.values().cloned().collect();
        found.insert("b".to_owned(), "torn".to_owned());
        sandbox.adopt(&found, &known);
        assert!(sandbox.unsure.contains("b") && !sandbox.expected.contains_key("b"));
        assert_eq!(sandbox.judge(&found, false), None);
    }
}
