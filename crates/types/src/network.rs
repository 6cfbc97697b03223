//! What a sandbox may reach, and what it reached.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What a sandbox may reach. `docs/NETWORK.md` tells what each part means.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// What holds where nothing else is said.
    pub mode: NetworkMode,
    /// Names that may be reached, under `custom`: `example.com`, `*.example.com`, `www.*.com:443,8443`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub domains: Vec<String>,
    /// Addresses that may be reached, under `custom`: `10.0.0.0/8`, `192.0.2.7:5432`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allow: Vec<String>,
    /// Addresses that may not be reached, whatever allows them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub deny: Vec<String>,
    /// What happens to HTTP requests; the first that matches decides.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub requests: Vec<RequestRule>,
}

/// What holds where nothing else is said.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum NetworkMode {
    /// Everything that is not always refused.
    #[default]
    AllowAll,
    /// Nothing, names included.
    DenyAll,
    /// What the rules say.
    Custom,
}

/// What happens to some HTTP requests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RequestRule {
    /// Requests to these names.
    pub domain: String,
    /// Of those, the ones that look like this; all if absent.
    #[serde(default, rename = "match", skip_serializing_if = "RequestMatch::says_nothing")]
    pub matches: RequestMatch,
    /// What is done.
    pub action: RequestAction,
}

/// Conditions on a request. All must hold.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RequestMatch {
    /// One of these methods.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub methods: Vec<String>,
    /// The path, without the query.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<TextMatch>,
    /// For each of these, some parameter of the query.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub query: Vec<PairMatch>,
    /// For each of these, some header.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub headers: Vec<PairMatch>,
}

impl RequestMatch {
    fn says_nothing(&self) -> bool {
        *self == Self::default()
    }
}

/// A condition on a text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum TextMatch {
    /// Equal to this text.
    Exact(String),
    /// With this prefix.
    Prefix(String),
    /// Matching this regular expression.
    Regex(String),
}

/// Conditions on a key and its value.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PairMatch {
    /// The key; any if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<TextMatch>,
    /// The value; any if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<TextMatch>,
}

/// What is done with a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RequestAction {
    /// Send the request unchanged.
    Allow,
    /// Answer 403.
    Deny,
    /// Answer without sending the request.
    Answer(DirectAnswer),
    /// Send the request to another URL; its path and query are appended.
    Forward(Forward),
    /// It goes on with these headers set. A value is never told back: answers say `null`. In a change, `null`
    /// leaves the value that a rule for the same domain has.
    Headers(BTreeMap<String, Option<String>>),
}

/// An answer to a request that is never sent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DirectAnswer {
    /// 200 to 599.
    pub status: u16,
    /// Headers.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, String>,
    /// The body.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub body: String,
}

/// Another place for a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Forward {
    /// An `http` or `https` URL.
    pub url: String,
    /// How the headers begin that tell where it was meant to go; `x-forwarded-` if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix: Option<String>,
}

/// A change of what a sandbox may reach, at once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetNetwork {
    /// What it may reach from now on; `null` for what its project says.
    #[serde(deserialize_with = "super::quantity::present")]
    pub network: Option<Network>,
}

/// What a sandbox may reach, and where that comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SandboxNetwork {
    /// What it may reach.
    pub network: Network,
    /// Whether that is its own; it is the project's default otherwise.
    pub own: bool,
    /// The bound of the project: no sandbox reaches more than this.
    pub bound: Option<Network>,
}

/// The network policies of a project.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ProjectNetwork {
    /// The policy of sandboxes without their own.
    pub default: Network,
    /// The bound: no sandbox reaches more than this; no bound if absent or null.
    #[serde(default)]
    pub bound: Option<Network>,
    /// How many outbound connections and flows the project's sandboxes may have open together. Half of what the server allows
    /// all sandboxes, if absent or null.
    #[serde(default)]
    #[schema(minimum = 1)]
    pub max_connections: Option<u32>,
}

/// What kind of traffic it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// A TCP connection.
    Tcp,
    /// A flow of datagrams.
    Udp,
    /// Echo requests.
    Icmp,
    /// A lookup that was refused.
    Dns,
    /// One HTTP request that rules were applied to.
    Http,
}

/// The outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// It was let through.
    Allowed,
    /// A rule was against it.
    Denied,
    /// It was let through and then cut, because the policy changed.
    Cut,
    /// It was let through, and nobody answered outside.
    Failed,
}

/// A network connection of a sandbox, allowed or refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Connection {
    /// The session it was in.
    pub session: String,
    /// A number that grows within the session.
    pub id: u64,
    /// When it began.
    #[schema(format = DateTime)]
    pub at: String,
    /// When it ended; null while it is open.
    #[schema(format = DateTime)]
    pub ended_at: Option<String>,
    /// How long it lasted, or has lasted.
    pub duration_ms: u64,
    /// What it was.
    pub protocol: Protocol,
    /// The address and port the sandbox asked for; null for a lookup.
    pub to: Option<String>,
    /// The host name, if known.
    pub name: Option<String>,
    /// What was decided, or how it went.
    pub verdict: Verdict,
    /// The rule it follows from.
    pub rule: String,
    /// Bytes received from outside.
    pub bytes_in: u64,
    /// Bytes sent outside.
    pub bytes_out: u64,
    /// More details: a request and its status, or why the destination was not reached.
    pub detail: Option<String>,
}

/// All that went to one place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Destination {
    /// The host name, or the address if no name is known.
    pub host: String,
    /// How many connections, those that were refused included.
    pub connections: u64,
    /// How many of them were refused.
    pub denied: u64,
    /// Bytes received from there.
    pub bytes_in: u64,
    /// Bytes sent there.
    pub bytes_out: u64,
    /// When something last began.
    #[schema(format = DateTime)]
    pub last_at: String,
}

/// What went over a sandbox's network, by destination.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NetworkSummary {
    /// Where to, the most bytes first.
    pub destinations: Vec<Destination>,
    /// How many connections, those that were refused included.
    pub connections: u64,
    /// How many of them were refused.
    pub denied: u64,
    /// Bytes received from outside.
    pub bytes_in: u64,
    /// Bytes sent outside.
    pub bytes_out: u64,
}

#[cfg(test)]
mod tests {
    use super::{Network, SetNetwork};

    #[test]
    fn policies_read_as_they_are_written() {
        for text in [
            r#"{"mode":"allow-all"}"#,
            r#"{"mode":"custom","domains":["*.example.com:443"],"allow":["10.0.0.0/8"],"deny":["10.1.0.0/16"]}"#,
            r#"{"mode":"custom","requests":[{"domain":"a.com","match":{"methods":["GET"],"path":{"prefix":"/v1/"},"query":[{"key":{"exact":"k"}}]},"action":"deny"}]}"#,
            r#"{"mode":"custom","requests":[{"domain":"a.com","action":{"answer":{"status":404,"headers":{"a":"b"},"body":"x"}}}]}"#,
            r#"{"mode":"custom","requests":[{"domain":"a.com","action":{"forward":{"url":"https://b.com","prefix":"p-"}}}]}"#,
            r#"{"mode":"custom","requests":[{"domain":"a.com","action":{"headers":{"authorization":null,"x":"y"}}}]}"#,
        ] {
            let read: Network = serde_json::from_str(text).unwrap();
            assert_eq!(serde_json::to_string(&read).unwrap(), text);
        }
    }

    #[test]
    fn a_change_says_what_it_wants() {
        assert!(serde_json::from_str::<SetNetwork>("{}").is_err());
        let back = serde_json::from_str::<SetNetwork>(r#"{"network":null}"#).unwrap();
        assert_eq!(back.network, None);
    }
}
