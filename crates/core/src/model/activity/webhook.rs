//! Webhooks: where the events of a project are sent, and how far that has come.

use serde::{Deserialize, Serialize};

use crate::model::{EventData, EventFilter, EventId, KeyId, Name, Timestamp, WebhookId};

/// How many patterns of events a webhook may have.
const PATTERNS: usize = 32;

/// A webhook.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Webhook {
    /// The version of the document.
    pub format: u32,
    /// Its id.
    pub id: WebhookId,
    /// The project whose events it gets.
    pub project: Name,
    /// Where they are sent.
    pub url: String,
    /// Which: kinds, groups (`run.*`) or `*`.
    pub events: Vec<String>,
    /// Whether private, loopback and link-local addresses may be dialled.
    #[serde(default)]
    pub allow_private: bool,
    /// Whether its receiver may answer approvals, with links in deliveries.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answers: Option<WebhookAnswers>,
    /// What deliveries are signed with; the newest last.
    pub secrets: Vec<WebhookSecret>,
    /// When it was made.
    pub created_at: Timestamp,
    /// The key it was made with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_by: Option<KeyId>,
    /// Why nothing is sent, if nothing is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disabled: Option<WebhookDisabled>,
}

/// What a receiver may answer approvals with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WebhookAnswers {
    /// The key that allowed it. Links work for as long as this key may approve.
    pub allowed_by: KeyId,
    /// What the tokens of links are made with, sealed. Another one ends all links before it.
    pub sealed: String,
}

/// A secret of a webhook.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WebhookSecret {
    /// Counts up with every secret that it gets.
    pub version: u64,
    /// The value, sealed.
    pub sealed: String,
}

/// Why a webhook sends nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WebhookDisabled {
    /// Since when.
    pub at: Timestamp,
    /// Why.
    pub reason: String,
}

/// How far a webhook has delivered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WebhookCursor {
    /// The version of the document.
    pub format: u32,
    /// The webhook.
    pub webhook: WebhookId,
    /// Its project.
    pub project: Name,
    /// All events up to this one were delivered, or do not match.
    pub after: EventId,
    /// Later ones that were delivered.
    #[serde(default)]
    pub done: Vec<EventId>,
    /// Since when deliveries fail.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failing_since: Option<Timestamp>,
    /// The last attempts, oldest first.
    #[serde(default)]
    pub deliveries: Vec<WebhookDelivery>,
}

/// An attempt to deliver an event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WebhookDelivery {
    /// The event.
    pub event: EventId,
    /// Its kind.
    pub kind: String,
    /// When.
    pub at: Timestamp,
    /// Which attempt it was.
    pub attempt: u32,
    /// What the receiver answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// Why it did not, or why that is a failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// How long it took.
    pub duration_ms: u64,
}

/// The kinds of a filter for events, from patterns: `*`, `run.*`, `run` or `run.finished`.
///
/// # Errors
///
/// Returns what is wrong with them.
pub fn webhook_kinds(patterns: &[String]) -> Result<Vec<String>, String> {
    if patterns.is_empty() {
        return Err("name at least one kind, like `sandbox.stopped`, or `*` for all".to_owned());
    }
    if patterns.len() > PATTERNS {
        return Err(format!("at most {PATTERNS}"));
    }
    let mut kinds = Vec::new();
    for pattern in patterns {
        if pattern == "*" {
            return Ok(Vec::new());
        }
        let kind = pattern.strip_suffix(".*").unwrap_or(pattern);
        if !EventFilter::knows_kind(kind) {
            let unknown: String = pattern.chars().take(80).collect();
            let known = EventData::KINDS.join(", ");
            return Err(format!(
                "there is no kind `{unknown}`; use `*`, `sandbox.*` or one of {known}"
            ));
        }
        kinds.push(kind.to_owned());
    }
    Ok(kinds)
}

#[cfg(test)]
mod tests {
    use super::webhook_kinds;

    #[test]
    fn patterns_are_kinds_groups_or_all() {
        let kinds = |patterns: &[&str]| {
            let patterns: Vec<_> = patterns.iter().map(|one| (*one).to_owned()).collect();
            webhook_kinds(&patterns)
        };
        assert_eq!(kinds(&["sandbox.*", "command.ended"]).unwrap(), ["sandbox", "command.ended"]);
        assert_eq!(kinds(&["port"]).unwrap(), ["port"]);
        assert!(kinds(&["sandbox.stopped", "*"]).unwrap().is_empty());
        assert!(
            kinds(&[]).is_err() && kinds(&["nothing.*"]).is_err() && kinds(&["sand*"]).is_err()
        );
        assert!(kinds(&["port"; 33]).is_err());
    }
}
