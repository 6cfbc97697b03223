//! What happened, as `GET /v1/events` reports it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Something that happened. `docs/API.md` has the table of kinds and what their `data` holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Its position in the feed: give it as `cursor` or `Last-Event-ID` to continue after it.
    pub id: String,
    /// When it happened.
    pub at: String,
    /// What happened: `sandbox.running`, `command.ended`, ...; `stream.*` is about the stream itself.
    pub kind: String,
    /// The project it happened in; absent for what concerns the host or the stream.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub project: Option<String>,
    /// The sandbox it happened to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<EventSandbox>,
    /// Details, by kind.
    #[serde(default)]
    #[schema(value_type = Object)]
    pub data: serde_json::Map<String, serde_json::Value>,
}

/// A sandbox as it was at the time of an event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventSandbox {
    /// Its id.
    pub id: String,
    /// Its name.
    pub name: String,
    /// Its tags.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tags: BTreeMap<String, String>,
}
