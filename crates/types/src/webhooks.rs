//! Webhooks: events sent to addresses outside.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A webhook to create.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateWebhook {
    /// Where events are sent: `https://…`, or `http://…`.
    pub url: String,
    /// Which events: kinds (`sandbox.stopped`), groups (`sandbox.*`), or `*` for all.
    pub events: Vec<String>,
    /// What deliveries are signed with, 16 to 256 bytes; made up if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<String>,
    /// Whether private, loopback and link-local addresses may be dialled; needs an admin key.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub allow_private: bool,
    /// Whether the receiver may answer approvals: `approval.asked` then has a link, `answer_url`, that answers once without a
    /// key. Needs a key that may approve, and an address with `https://`, unless private addresses are allowed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub answers: bool,
}

/// Changes of a webhook. What is absent stays as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct UpdateWebhook {
    /// Where events are sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// Which events.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub events: Option<Vec<String>>,
    /// Whether private addresses may be dialled; needs an admin key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow_private: Option<bool>,
    /// Whether the receiver may answer approvals. `true`, and another address of a webhook that may, need a key that may
    /// approve, and end all links that were sent before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answers: Option<bool>,
    /// Whether anything is sent. One that is enabled again continues where it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
}

/// Another secret for a webhook.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RotateWebhookSecret {
    /// The secret; made up if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<String>,
    /// Whether the secret before is forgotten at once. Otherwise deliveries are signed with both.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub only: bool,
}

/// A webhook, without its secrets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Webhook {
    /// Its id.
    pub id: String,
    /// Where events are sent.
    pub url: String,
    /// Which events.
    pub events: Vec<String>,
    /// Whether private, loopback and link-local addresses may be dialled.
    pub allow_private: bool,
    /// Whether the receiver may answer approvals.
    #[serde(default)]
    pub answers: bool,
    /// The id of the key that allowed that. Links work for as long as it may approve.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answers_allowed_by: Option<String>,
    /// How many secrets deliveries are signed with: 1, or 2 during a rotation.
    pub secrets: u32,
    /// When it was made.
    #[schema(format = DateTime)]
    pub created_at: String,
    /// Whether events are sent.
    pub enabled: bool,
    /// Why nothing is sent.
    pub disabled_reason: Option<String>,
    /// Since when nothing is sent.
    #[schema(format = DateTime)]
    pub disabled_at: Option<String>,
    /// Since when deliveries fail, if they do.
    #[schema(format = DateTime)]
    pub failing_since: Option<String>,
    /// The last attempts, the newest first.
    pub deliveries: Vec<WebhookDelivery>,
}

/// A webhook that has a new secret, which is shown this once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NewWebhook {
    /// The webhook.
    pub webhook: Webhook,
    /// What deliveries are signed with.
    pub secret: String,
}

/// An attempt to deliver an event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WebhookDelivery {
    /// The event's id.
    pub event: String,
    /// Its kind.
    pub kind: String,
    /// When.
    #[schema(format = DateTime)]
    pub at: String,
    /// Which attempt it was.
    pub attempt: u32,
    /// Whether the receiver took it.
    pub delivered: bool,
    /// What the receiver answered.
    pub status: Option<u16>,
    /// Why it was not delivered.
    pub error: Option<String>,
    /// How long it took.
    pub duration_ms: u64,
}
