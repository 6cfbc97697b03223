//! What a sandbox may reach, and what it reached. `docs/NETWORK.md` describes each part.

pub(super) mod device;
pub(super) mod policy;
pub(super) mod port;

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use super::{SandboxId, SessionId, Timestamp};

/// What a sandbox may reach.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    /// The default for everything that no rule covers.
    pub mode: Mode,
    /// Names that may be reached, under [`Mode::Custom`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub domains: Vec<DomainRule>,
    /// Addresses that may be reached, under [`Mode::Custom`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allow: Vec<AddressRule>,
    /// Addresses that may not be reached, whatever allows them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub deny: Vec<AddressRule>,
    /// What happens to HTTP requests; the first that matches decides.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub requests: Vec<RequestRule>,
}

/// The default for everything that no rule covers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Everything that is not always refused.
    #[default]
    AllowAll,
    /// Nothing, names included.
    DenyAll,
    /// What the rules say.
    Custom,
}

/// Names, and optionally ports.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct DomainRule {
    /// The names.
    pub pattern: DomainPattern,
    /// The ports; all if empty.
    pub ports: Vec<u16>,
}

/// Names: `example.com`, `*.example.com`, `www.*.com`, `*`. Lower case, without a final dot.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DomainPattern(String);

/// Addresses, and optionally ports.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct AddressRule {
    /// The addresses.
    pub net: IpNet,
    /// The ports; all if empty.
    pub ports: Vec<u16>,
}

/// What happens to some HTTP requests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RequestRule {
    /// Requests to these names.
    pub domain: DomainPattern,
    /// Of those, the ones that look like this.
    #[serde(default, rename = "match")]
    pub matches: RequestMatch,
    /// What is done.
    pub action: Action,
}

/// How a request looks. All given conditions must hold; an empty list is no condition.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RequestMatch {
    /// One of these methods.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub methods: Vec<String>,
    /// The path, without the query, as it was sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<TextMatch>,
    /// For each of these, some parameter of the query, decoded.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub query: Vec<PairMatch>,
    /// For each of these, some header; keys are compared in lower case.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub headers: Vec<PairMatch>,
}

/// How a text looks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TextMatch {
    /// Just so.
    Exact(String),
    /// Beginning so.
    Prefix(String),
    /// With a match of this regular expression, anchored nowhere.
    Regex(String),
}

/// How a key and its value look.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
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
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// It passes unchanged.
    Allow,
    /// It is answered with 403 and recorded as denied.
    Deny,
    /// It is answered here.
    Answer(Answer),
    /// It goes to another place, an `http` or `https` URL; its path and query are kept and appended.
    Forward {
        /// Where.
        url: String,
        /// The prefix of the headers with its original destination: `<prefix>host`,
        /// `<prefix>scheme`, `<prefix>port`, `<prefix>path` (with the query). If absent,
        /// `x-forwarded-host`, `x-forwarded-proto`, `x-forwarded-port` and `x-forwarded-path` do.
        /// Headers of these names that the sandbox sent are dropped.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        prefix: Option<String>,
    },
    /// It passes with these headers set.
    Headers(BTreeMap<String, Credential>),
}

/// An answer to a request that is never sent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Answer {
    /// 200 to 599.
    pub status: u16,
    /// Headers.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, String>,
    /// The body.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub body: String,
}

/// The value of a header that is set on the way; may name secrets as `${secret:NAME}`.
///
/// At rest only [`Sealed`](Self::Sealed) exists: the engine seals what callers send before it is recorded, and
/// serializing a plain one fails.
#[derive(Clone, PartialEq, Eq)]
pub enum Credential {
    /// As a caller sent it.
    Plain(Zeroizing<String>),
    /// Encrypted under the server's key.
    Sealed(String),
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credential(..)")
    }
}

impl Serialize for Credential {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Sealed(text) => serializer.serialize_str(text),
            Self::Plain(_) => Err(serde::ser::Error::custom("a credential is not sealed yet")),
        }
    }
}

impl<'de> Deserialize<'de> for Credential {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(Self::Sealed)
    }
}

/// What is wrong with a part of a policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadPolicy(pub String);

fn bad(reason: impl Into<String>) -> BadPolicy {
    BadPolicy(reason.into())
}

impl DomainPattern {
    /// Whether a name, in lower case and without a final dot, is one of these.
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        if self.0 == "*" {
            return !name.is_empty();
        }
        let mut wanted: Vec<&str> = self.0.split('.').collect();
        let mut labels: Vec<&str> = name.split('.').collect();
        if wanted.first() == Some(&"*") {
            wanted.remove(0);
            if labels.len() <= wanted.len() {
                return false;
            }
            labels.drain(..labels.len() - wanted.len());
        }
        labels.len() == wanted.len()
            && labels.iter().zip(&wanted).all(|(label, wanted)| *wanted == "*" || label == wanted)
    }

    /// Its text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for DomainPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for DomainPattern {
    type Err = BadPolicy;

    fn from_str(text: &str) -> Result<Self, BadPolicy> {
        let name = text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase();
        if name.parse::<IpAddr>().is_ok() {
            return Err(bad(format!(
                "`{text}` is an address, not a name; put it under the allowed addresses"
            )));
        }
        if name.len() > 253 {
            return Err(bad("a name has at most 253 characters"));
        }
        for label in name.split('.') {
            let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
            let fine = label == "*"
                || ((1..=63).contains(&label.len())
                    && label.bytes().all(plain)
                    && !label.starts_with('-')
                    && !label.ends_with('-'));
            if !fine {
                return Err(bad(format!(
                    "`{text}` is no name; write `example.com`, `*.example.com` or `www.*.com` (a `*` stands for whole labels)"
                )));
            }
        }
        Ok(Self(name))
    }
}

impl AddressRule {
    /// Whether it speaks of this address and port.
    #[must_use]
    pub fn covers(&self, to: SocketAddr) -> bool {
        self.net.contains(&to.ip()) && (self.ports.is_empty() || self.ports.contains(&to.port()))
    }
}

fn ports(text: &str) -> Result<Vec<u16>, BadPolicy> {
    let mut ports = Vec::new();
    for port in text.split(',') {
        match port.parse() {
            Ok(port) if port != 0 => ports.push(port),
            _ => return Err(bad(format!("`{port}` is no port; write a number from 1 to 65535"))),
        }
    }
    Ok(ports)
}

fn write_ports(f: &mut fmt::Formatter<'_>, ports: &[u16]) -> fmt::Result {
    for (index, port) in ports.iter().enumerate() {
        write!(f, "{}{port}", if index == 0 { ':' } else { ',' })?;
    }
    Ok(())
}

impl FromStr for DomainRule {
    type Err = BadPolicy;

    fn from_str(text: &str) -> Result<Self, BadPolicy> {
        match text.split_once(':') {
            Some((name, list)) => Ok(Self { pattern: name.parse()?, ports: ports(list)? }),
            None => Ok(Self { pattern: text.parse()?, ports: Vec::new() }),
        }
    }
}

impl fmt::Display for DomainRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.pattern)?;
        write_ports(f, &self.ports)
    }
}

impl FromStr for AddressRule {
    type Err = BadPolicy;

    fn from_str(text: &str) -> Result<Self, BadPolicy> {
        let (net, list) = match text.strip_prefix('[') {
            Some(rest) => {
                let (net, list) =
                    rest.split_once(']').ok_or_else(|| bad("a `[` without its `]`"))?;
                let list = match list {
                    "" => None,
                    list => {
                        Some(list.strip_prefix(':').ok_or_else(|| bad("write `[address]:port`"))?)
                    }
                };
                (net, list)
            }
            // Of IPv6 without brackets, colons are part of the address.
            None if text.matches(':').count() > 1 => (text, None),
            None => match text.split_once(':') {
                Some((net, list)) => (net, Some(list)),
                None => (text, None),
            },
        };
        let parsed = net.parse::<IpNet>().or_else(|_| net.parse::<IpAddr>().map(IpNet::from));
        let net = parsed.map_err(|_| {
            bad(format!("`{text}` is no address; write `10.0.0.0/8`, `192.0.2.7:443` or `[2001:db8::/32]:443`"))
        })?;
        Ok(Self { net: net.trunc(), ports: list.map_or_else(|| Ok(Vec::new()), ports)? })
    }
}

impl fmt::Display for AddressRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.net {
            IpNet::V6(net) if !self.ports.is_empty() => write!(f, "[{net}]")?,
            net => write!(f, "{net}")?,
        }
        write_ports(f, &self.ports)
    }
}

macro_rules! as_text {
    ($($type:ty),*) => {$(
        impl Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
            }
        }
    )*};
}

as_text!(DomainPattern, DomainRule, AddressRule);

/// A project's word on the network of its sandboxes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProjectNetwork {
    /// What holds for sandboxes that have no policy of their own.
    #[serde(default)]
    pub default: Policy,
    /// What no sandbox gets beyond.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bound: Option<Policy>,
    /// How many connections and flows outward its sandboxes may have open together; half of the server's if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_connections: Option<u32>,
}

/// A sandbox's certificate authority, kept beside its record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptAuthority {
    /// The version of the document.
    pub format: u32,
    /// Whose it is.
    pub sandbox: SandboxId,
    /// The certificate, in PEM.
    pub certificate: String,
    /// Its key, sealed.
    pub key: String,
}

/// Something that went over a sandbox's network, or was kept from it. One line of the session's journal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connection {
    /// The session it was in.
    pub session: SessionId,
    /// A number that grows within the session.
    pub id: u64,
    /// When it began.
    pub at: Timestamp,
    /// When it ended; absent while it is open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<Timestamp>,
    /// What it was.
    pub protocol: Protocol,
    /// The address and port the sandbox asked for; absent for a lookup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<SocketAddr>,
    /// The name, if one is known: from TLS, from HTTP, from the lookup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What was decided, or how it went.
    pub verdict: Verdict,
    /// The rule it follows from, as its owner wrote it: `domain *.example.com`, `always refused: metadata`.
    pub rule: String,
    /// Bytes received from outside.
    pub bytes_in: u64,
    /// Bytes sent outside.
    pub bytes_out: u64,
    /// What else is worth telling: `GET /v1/models 200`, why a dial failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

/// What kind of traffic it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)] // each is what it says
pub enum Protocol {
    Tcp,
    Udp,
    Icmp,
    /// A lookup; only refused ones are recorded.
    Dns,
    /// One HTTP request that rules were applied to.
    Http,
}

/// Its outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// It was let through.
    Allowed,
    /// A rule was against it.
    Denied,
    /// It was let through and then cut, because the policy changed.
    Cut,
    /// It was let through, and got no answer outside.
    Failed,
}

#[cfg(test)]
mod tests {
    use super::{AddressRule, DomainPattern, DomainRule};

    #[test]
    fn names_match_as_the_page_says() {
        let matches =
            |pattern: &str, name: &str| pattern.parse::<DomainPattern>().unwrap().matches(name);
        for (pattern, name) in [
            ("example.com", "example.com"),
            ("EXAMPLE.com.", "example.com"),
            ("*.example.com", "a.example.com"),
            ("*.example.com", "a.b.example.com"),
            ("www.*.com", "www.example.com"),
            ("*.*.com", "a.b.c.com"),
            ("*", "anything"),
        ] {
            assert!(matches(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [
            ("example.com", "a.example.com"),
            ("example.com", "example.com.evil.org"),
            ("*.example.com", "example.com"),
            ("*.example.com", "badexample.com"),
            ("www.*.com", "www.a.b.com"),
            ("www.*.com", "www.com"),
            ("*", ""),
        ] {
            assert!(!matches(pattern, name), "{pattern} {name}");
        }
    }

    #[test]
    fn rules_read_as_they_are_written() {
        for text in ["example.com", "*.example.com:443", "a.b:22,443"] {
            assert_eq!(text.parse::<DomainRule>().unwrap().to_string(), text);
        }
        for text in ["10.0.0.0/8", "192.0.2.7/32:5432,5433", "2001:db8::/32", "[2001:db8::/32]:443"]
        {
            assert_eq!(text.parse::<AddressRule>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "a..b",
            "-a.com",
            "a*.com",
            "10.0.0.1",
            "::1",
            "exa mple.com",
            "a.com:0",
            "a.com:x",
            "https://a.com",
        ] {
            assert!(text.parse::<DomainRule>().is_err(), "{text}");
        }
        for text in
            ["", "10.0.0.0/33", "10.0.0.256", "example.com", "[::1", "[::1]443", "10.0.0.1:"]
        {
            assert!(text.parse::<AddressRule>().is_err(), "{text}");
        }
    }
}
