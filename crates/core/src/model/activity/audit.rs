//! Entries of the audit log: who did what to what, from where, and how it ended.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::model::{KeyId, Name, Timestamp};

/// How many characters a detail may have.
const DETAIL_TEXT: usize = 256;
/// How many characters a target or a label may have.
const TARGET_TEXT: usize = 512;
/// How many details an entry may have.
const DETAILS: usize = 16;

/// What is recorded, before it has its place in a chain.
///
/// It has no secrets, no contents of files, no environment and no arguments of commands: the code
/// that makes one puts in names and numbers only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditRecord {
    /// When it happened.
    pub at: Timestamp,
    /// What was done: `sandbox.create`.
    pub action: String,
    /// Who did it.
    pub actor: AuditActor,
    /// The key, if a key did it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<KeyId>,
    /// The key's label.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// By which way.
    pub front: AuditFront,
    /// The caller's address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The project it was done in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub project: Option<Name>,
    /// What it was done to: `sandbox/my-app`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// How it ended.
    pub outcome: AuditOutcome,
    /// The HTTP status of the answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// The error code of the answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    /// Further facts.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub detail: BTreeMap<String, String>,
}

/// Who did something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AuditActor {
    /// A caller with a key.
    Key,
    /// The server itself.
    System,
    /// A process in a sandbox.
    Agent,
    /// The receiver of a webhook, with a link that was sent to it.
    Webhook,
    /// A caller without a valid key.
    Anonymous,
}

/// The way by which something was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AuditFront {
    /// The API over TCP.
    Api,
    /// The API for Vercel's clients.
    Vercel,
    /// A published port.
    Gateway,
    /// The API over the Unix socket.
    Socket,
    /// None: the engine did it.
    Engine,
}

/// How something ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AuditOutcome {
    /// It was done.
    Done,
    /// The caller may not do it.
    Denied,
    /// It was not done.
    Failed,
}

/// An entry of a chain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditEntry {
    /// Its number in its chain.
    pub seq: u64,
    /// The hash of the entry before it, in hex.
    pub prev: String,
    /// What is recorded.
    #[serde(flatten)]
    pub record: AuditRecord,
    /// Its own hash, in hex.
    pub hash: String,
}

/// The name of a chain of entries.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AuditChain {
    /// What concerns no project.
    Host,
    /// What was done in a project.
    Project(Name),
}

impl AuditRecord {
    /// Something that the server did by itself.
    #[must_use]
    pub fn by_system(project: Option<&Name>, action: &str, target: Option<String>) -> Self {
        Self {
            at: crate::model::now(),
            action: action.to_owned(),
            actor: AuditActor::System,
            key: None,
            label: None,
            front: AuditFront::Engine,
            address: None,
            project: project.cloned(),
            target,
            outcome: AuditOutcome::Done,
            status: None,
            code: None,
            detail: BTreeMap::new(),
        }
    }

    /// The same with one more fact.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<String>) -> Self {
        self.detail.insert(name.to_owned(), value.into());
        self
    }

    /// The chain it belongs to.
    #[must_use]
    pub fn chain(&self) -> AuditChain {
        self.project.clone().map_or(AuditChain::Host, AuditChain::Project)
    }

    /// The same, no longer than an entry may be.
    #[must_use]
    pub fn bounded(mut self) -> Self {
        for text in [&mut self.target, &mut self.label, &mut self.code, &mut self.address]
            .into_iter()
            .flatten()
        {
            truncate_chars(text, TARGET_TEXT);
        }
        truncate_chars(&mut self.action, DETAIL_TEXT);
        while self.detail.len() > DETAILS {
            self.detail.pop_last();
        }
        self.detail.retain(|name, _| name.chars().count() <= DETAIL_TEXT);
        self.detail.values_mut().for_each(|text| truncate_chars(text, DETAIL_TEXT));
        self
    }
}

fn truncate_chars(text: &mut String, most: usize) {
    if let Some((end, _)) = text.char_indices().nth(most) {
        text.truncate(end);
        text.push('…');
    }
}

impl fmt::Display for AuditChain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Project(name) => write!(f, "project/{name}"),
        }
    }
}

/// Selects entries. All given conditions must match.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AuditFilter {
    /// At this time or later.
    pub since: Option<Timestamp>,
    /// Before this time.
    pub until: Option<Timestamp>,
    /// By the key of this id or label, or by `system`, `agent`, `webhook` or `anonymous`.
    pub actor: Option<String>,
    /// Done to this target, or to something below it: `sandbox` or `sandbox/my-app`.
    pub target: Option<String>,
    /// This action, or one of this group: `sandbox` or `sandbox.create`.
    pub action: Option<String>,
}

impl AuditFilter {
    /// Whether a record matches.
    #[must_use]
    pub fn wants(&self, record: &AuditRecord) -> bool {
        self.since.is_none_or(|since| record.at >= since)
            && self.until.is_none_or(|until| record.at < until)
            && self.action.as_ref().is_none_or(|wanted| is_in(&record.action, wanted, '.'))
            && self.target.as_ref().is_none_or(|wanted| {
                record.target.as_ref().is_some_and(|target| is_in(target, wanted, '/'))
            })
            && self.actor.as_ref().is_none_or(|wanted| is_by(record, wanted))
    }
}

/// Whether a text is `wanted`, or begins with it and a separator.
fn is_in(text: &str, wanted: &str, separator: char) -> bool {
    text.strip_prefix(wanted).is_some_and(|rest| rest.is_empty() || rest.starts_with(separator))
}

fn is_by(record: &AuditRecord, wanted: &str) -> bool {
    let kind = match record.actor {
        AuditActor::Key => "key",
        AuditActor::System => "system",
        AuditActor::Agent => "agent",
        AuditActor::Webhook => "webhook",
        AuditActor::Anonymous => "anonymous",
    };
    kind == wanted
        || record.key.as_ref().is_some_and(|key| key.as_str() == wanted)
        || record.label.as_deref() == Some(wanted)
}

#[cfg(test)]
mod tests {
    use super::{AuditFilter, AuditRecord};

    #[test]
    fn a_filter_takes_groups_targets_and_actors() {
        let project = "p".parse().unwrap();
        let record = AuditRecord::by_system(
            Some(&project),
            "sandbox.expire",
            Some("sandbox/my-app".to_owned()),
        );
        let wants = |filter: AuditFilter| filter.wants(&record);
        let text = |text: &str| Some(text.to_owned());
        for (action, fits) in
            [("sandbox", true), ("sandbox.expire", true), ("sandbox.exp", false), ("sand", false)]
        {
            let filter = AuditFilter { action: text(action), ..AuditFilter::default() };
            assert_eq!(wants(filter), fits, "{action}");
        }
        for (target, fits) in
            [("sandbox", true), ("sandbox/my-app", true), ("sandbox/my", false), ("secret", false)]
        {
            let filter = AuditFilter { target: text(target), ..AuditFilter::default() };
            assert_eq!(wants(filter), fits, "{target}");
        }
        for (actor, fits) in [("system", true), ("key", false), ("key-1", false)] {
            let filter = AuditFilter { actor: text(actor), ..AuditFilter::default() };
            assert_eq!(wants(filter), fits, "{actor}");
        }
        let at = record.at;
        assert!(wants(AuditFilter { since: Some(at), ..AuditFilter::default() }));
        assert!(!wants(AuditFilter { until: Some(at), ..AuditFilter::default() }));
    }

    #[test]
    fn an_entry_is_bounded() {
        let long = "ä".repeat(100_000);
        let mut record = AuditRecord::by_system(None, &long, Some(long.clone()));
        for number in 0..1000 {
            record = record.with(&format!("detail-{number}"), long.clone());
        }
        let bounded = record.bounded();
        assert_eq!(bounded.detail.len(), 16);
        assert!(serde_json::to_string(&bounded).unwrap().len() < 16 << 10);
    }
}
