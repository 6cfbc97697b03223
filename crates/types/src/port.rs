//! Ports inside sandboxes.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Span;

/// Who may reach a port from outside.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Access {
    /// Everybody who knows its address.
    #[default]
    Public,
    /// Whoever has a key to the project or a token for the port.
    Private,
    /// Nobody.
    Off,
}

fn yes() -> bool {
    true
}

/// A published port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Port {
    /// Its number.
    pub port: u16,
    /// Who may reach it.
    #[serde(default)]
    pub access: Access,
    /// Whether a request wakes the sandbox and waits for the port to open.
    #[serde(default = "yes")]
    pub wake: bool,
}

/// How a port is to be published.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PublishPort {
    /// Who may reach it; `off` to publish it no more.
    pub access: Access,
    /// Whether a request wakes the sandbox and waits for the port to open.
    #[serde(default = "yes")]
    pub wake: bool,
}

/// A port and where it is reached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PortStatus {
    /// Its number.
    pub port: u16,
    /// Who may reach it.
    pub access: Access,
    /// Whether a request wakes the sandbox.
    pub wake: bool,
    /// Where it is reached: by name where the server has a domain and the names fit, else by path.
    pub url: String,
    /// Where it is reached by path, on the server's own address.
    pub path_url: String,
    /// The service that is meant to listen there.
    pub service: Option<String>,
}

/// A token to make for a private port.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct IssuePortToken {
    /// How long it works; 12 hours if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires: Option<Span>,
}

/// A token for one port of one sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PortToken {
    /// The token: for `Authorization: Bearer`, `X-Sandkeep-Token` or `?keep_token=`.
    pub token: String,
    /// The port's address with the token in it.
    pub url: String,
    /// When it stops working. It also ends with the key it was made with.
    #[schema(format = DateTime)]
    pub expires_at: String,
}
