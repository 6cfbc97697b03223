//! Validates a policy, and names the field that is wrong.

use hyper::Uri;
use hyper::header::{HeaderName, HeaderValue};
use ipnet::IpNet;
use regex::{Regex, RegexBuilder};

use crate::model::network::{
    Action, AddressRule, Answer, BadPolicy, Credential, Mode, PairMatch, Policy, ProjectNetwork,
    RequestMatch, RequestRule, TextMatch,
};
use crate::model::spec::BadConfig;

const RULES: usize = 1000;
const REQUESTS: usize = 256;
const PORTS: usize = 64;
const PAIRS: usize = 32;
const TEXT: usize = 4096;
const BODY: usize = 64 << 10;
const CREDENTIAL: usize = 16 << 10;

/// Headers that describe the transport of a request. No rule may set them.
const CARRIED: [&str; 9] = [
    "connection",
    "content-length",
    "host",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

impl ProjectNetwork {
    /// Checks both policies, and the number of connections.
    ///
    /// # Errors
    ///
    /// Returns [`BadConfig`] for the first field that is wrong, such as `network.bound.domains[2]`.
    pub fn check(&self) -> Result<(), BadConfig> {
        self.default.check("network.default")?;
        if self.max_connections == Some(0) {
            let reason = "at least 1; `--default deny-all` and a bound close the network";
            return Err(bad("network.max_connections".to_owned(), reason));
        }
        self.bound.as_ref().map_or(Ok(()), |bound| bound.check("network.bound"))
    }
}

impl Policy {
    /// Checks what its parts cannot know by themselves. `field` is where it stands.
    ///
    /// # Errors
    ///
    /// Returns [`BadConfig`] for the first field that is wrong, such as `network.domains[2]`.
    pub fn check(&self, field: &str) -> Result<(), BadConfig> {
        let refuse = |part: &str, reason: &str| Err(bad(format!("{field}.{part}"), reason));
        let only_custom = "only a custom policy lists what may be reached";
        if self.mode != Mode::Custom && !self.domains.is_empty() {
            return refuse("domains", only_custom);
        }
        if self.mode == Mode::AllowAll {
            // A user who lists the world there means that nothing else is allowed.
            let closed = self.allow.iter().position(|rule| !is_private(&rule.net));
            if let Some(index) = closed {
                let reason = "it is no private network, and in the mode allow-all an entry opens one of those and nothing else: \
                              what is public is open already, and the host, its neighbours on the link and multicast never are. \
                              To allow only what is listed, use the mode custom";
                return refuse(&format!("allow[{index}]"), reason);
            }
        }
        if self.mode == Mode::DenyAll {
            if !self.allow.is_empty() {
                return refuse("allow", only_custom);
            }
            if !self.deny.is_empty() {
                return refuse("deny", "where all is denied there is nothing left to deny");
            }
            if !self.requests.is_empty() {
                return refuse("requests", "where all is denied there are no requests");
            }
        }
        if self.domains.len() > RULES {
            return refuse("domains", "at most 1000");
        }
        for (index, rule) in self.domains.iter().enumerate() {
            ports(&rule.ports, || format!("{field}.domains[{index}]"))?;
        }
        for (part, rules) in [("allow", &self.allow), ("deny", &self.deny)] {
            if rules.len() > RULES {
                return refuse(part, "at most 1000");
            }
            for (index, AddressRule { ports: list, .. }) in rules.iter().enumerate() {
                ports(list, || format!("{field}.{part}[{index}]"))?;
            }
        }
        if self.requests.len() > REQUESTS {
            return refuse("requests", "at most 256");
        }
        for (index, rule) in self.requests.iter().enumerate() {
            request(rule, &format!("{field}.requests[{index}]"))?;
        }
        Ok(())
    }
}

/// Private networks, which are closed until an entry opens them or a part of them. In IPv6 also those behind NAT64.
fn is_private(net: &IpNet) -> bool {
    const PRIVATE: [&str; 12] = [
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "100.64.0.0/10",
        "198.18.0.0/15",
        "192.0.0.0/24",
        "fc00::/7",
        "fec0::/10",
        "64:ff9b::a00:0/104",
        "64:ff9b::ac10:0/108",
        "64:ff9b::c0a8:0/112",
        "64:ff9b::6440:0/106",
    ];
    PRIVATE.iter().filter_map(|text| text.parse::<IpNet>().ok()).any(|known| known.contains(net))
}

fn bad(field: String, reason: impl Into<String>) -> BadConfig {
    BadConfig { field: field.into(), reason: reason.into() }
}

fn ports(ports: &[u16], field: impl Fn() -> String) -> Result<(), BadConfig> {
    let mut sorted = ports.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    if ports.len() > PORTS || sorted.len() < ports.len() || sorted.first() == Some(&0) {
        return Err(bad(field(), "at most 64 ports, between 1 and 65535, none of them twice"));
    }
    Ok(())
}

fn request(rule: &RequestRule, field: &str) -> Result<(), BadConfig> {
    matches(&rule.matches, &format!("{field}.match"))?;
    let action = format!("{field}.action");
    match &rule.action {
        Action::Allow | Action::Deny => Ok(()),
        Action::Answer(given) => answer(given, &format!("{action}.answer")),
        Action::Forward { url, prefix } => {
            forward(url, &format!("{action}.forward.url"))?;
            let fine = |prefix: &String| {
                prefix.len() <= 64 && format!("{prefix}x").parse::<HeaderName>().is_ok()
            };
            if prefix.as_ref().is_some_and(|prefix| prefix.is_empty() || !fine(prefix)) {
                let field = format!("{action}.forward.prefix");
                return Err(bad(field, "the beginning of a header's name, such as `x-forwarded-`"));
            }
            Ok(())
        }
        Action::Headers(headers) => {
            if headers.is_empty() || headers.len() > PAIRS {
                return Err(bad(format!("{action}.headers"), "between 1 and 32 headers"));
            }
            for (name, value) in headers {
                let field = format!("{action}.headers.{name}");
                header_name(name, &field)?;
                credential(value, &field)?;
            }
            Ok(())
        }
    }
}

fn matches(looks: &RequestMatch, field: &str) -> Result<(), BadConfig> {
    for (index, method) in looks.methods.iter().enumerate() {
        let token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
        if method.is_empty() || method.len() > 32 || !method.bytes().all(token) {
            return Err(bad(format!("{field}.methods[{index}]"), "a method, such as `GET`"));
        }
    }
    if looks.methods.len() > PAIRS {
        return Err(bad(format!("{field}.methods"), "at most 32"));
    }
    if let Some(path) = &looks.path {
        text(path, &format!("{field}.path"))?;
        if let TextMatch::Exact(path) | TextMatch::Prefix(path) = path
            && !path.starts_with('/')
        {
            return Err(bad(format!("{field}.path"), "a path begins with `/`"));
        }
    }
    for (part, pairs) in [("query", &looks.query), ("headers", &looks.headers)] {
        if pairs.len() > PAIRS {
            return Err(bad(format!("{field}.{part}"), "at most 32"));
        }
        for (index, PairMatch { key, value }) in pairs.iter().enumerate() {
            for (half, wanted) in [("key", key), ("value", value)] {
                if let Some(wanted) = wanted {
                    text(wanted, &format!("{field}.{part}[{index}].{half}"))?;
                }
            }
        }
    }
    Ok(())
}

fn text(wanted: &TextMatch, field: &str) -> Result<(), BadConfig> {
    let (TextMatch::Exact(text) | TextMatch::Prefix(text) | TextMatch::Regex(text)) = wanted;
    if text.len() > TEXT {
        return Err(bad(field.to_owned(), "at most 4096 characters"));
    }
    if let TextMatch::Regex(text) = wanted {
        regex(text).map_err(|error| bad(field.to_owned(), error.to_string()))?;
    }
    Ok(())
}

/// A regular expression of bounded size.
///
/// # Errors
///
/// Returns [`BadPolicy`] when it is none, or too large.
pub(crate) fn regex(text: &str) -> Result<Regex, BadPolicy> {
    RegexBuilder::new(text)
        .size_limit(1 << 20)
        .dfa_size_limit(1 << 20)
        .build()
        .map_err(|error| BadPolicy(format!("`{text}` is no regular expression: {error}")))
}

fn answer(answer: &Answer, field: &str) -> Result<(), BadConfig> {
    if !(200..=599).contains(&answer.status) {
        return Err(bad(format!("{field}.status"), "between 200 and 599"));
    }
    if answer.headers.len() > PAIRS {
        return Err(bad(format!("{field}.headers"), "at most 32"));
    }
    for (name, value) in &answer.headers {
        let field = format!("{field}.headers.{name}");
        header_name(name, &field)?;
        if HeaderValue::from_str(value).is_err() || value.len() > CREDENTIAL {
            return Err(bad(field, "the value is one line of at most 16 KiB"));
        }
    }
    if answer.body.len() > BODY {
        return Err(bad(format!("{field}.body"), "at most 64 KiB"));
    }
    Ok(())
}

fn forward(url: &str, field: &str) -> Result<(), BadConfig> {
    let refuse = |reason: &str| Err(bad(field.to_owned(), format!("`{url}`: {reason}")));
    let Ok(uri) = url.parse::<Uri>() else {
        return refuse("this is no URL");
    };
    if !matches!(uri.scheme_str(), Some("http" | "https")) {
        return refuse("write a whole URL, with `http://` or `https://`");
    }
    match uri.authority() {
        Some(authority) if authority.host().is_empty() => return refuse("it names no host"),
        Some(authority) if authority.as_str().contains('@') => {
            return refuse("a user and a password do not belong here; set a header");
        }
        Some(_) => {}
        None => return refuse("it names no host"),
    }
    if uri.query().is_some() || url.contains('#') || url.len() > TEXT {
        return refuse("the query is the request's own; leave it out");
    }
    Ok(())
}

fn header_name(name: &str, field: &str) -> Result<(), BadConfig> {
    let Ok(parsed) = name.parse::<HeaderName>() else {
        return Err(bad(field.to_owned(), format!("`{name}` is no name of a header")));
    };
    if CARRIED.contains(&parsed.as_str()) {
        return Err(bad(
            field.to_owned(),
            "this header tells how a request is carried; it cannot be set",
        ));
    }
    Ok(())
}

fn credential(value: &Credential, field: &str) -> Result<(), BadConfig> {
    // What is sealed was checked before it was.
    let Credential::Plain(value) = value else { return Ok(()) };
    if HeaderValue::from_str(value).is_err() || value.is_empty() || value.len() > CREDENTIAL {
        return Err(bad(field.to_owned(), "the value is one line of at most 16 KiB"));
    }
    let mut rest = value.as_str();
    while let Some((_, after)) = rest.split_once("${secret:") {
        let Some((name, after)) = after.split_once('}') else {
            return Err(bad(field.to_owned(), "a `${secret:` without its `}`"));
        };
        if name.is_empty() {
            return Err(bad(field.to_owned(), "write `${secret:NAME}`"));
        }
        rest = after;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{Policy, ProjectNetwork};
    use crate::model::{Action, Credential};

    fn policy(json: &str) -> Policy {
        serde_json::from_str(json).unwrap_or_else(|error| panic!("{json}: {error}"))
    }

    #[test]
    fn addresses_that_are_never_allowed_are_not_said_to_be_open() {
        for net in ["169.254.0.0/16", "127.0.0.0/8", "224.0.0.0/4", "203.0.113.0/24"] {
            let json = format!(r#"{{"mode": "allow-all", "allow": ["{net}"]}}"#);
            let refused = policy(&json).check("network").expect_err(net).to_string();
            assert!(refused.contains("network.allow[0]"), "{refused}");
            assert!(refused.contains("it is no private network"), "{refused}");
            assert!(!refused.contains("allows it"), "{refused}");
        }
    }

    #[test]
    fn what_makes_sense_passes() {
        for json in [
            r#"{"mode": "allow-all"}"#,
            r#"{"mode": "deny-all"}"#,
            r#"{"mode": "allow-all", "allow": ["10.1.0.0/16", "192.168.7.1:5432", "fd00:1::/32", "64:ff9b::10.1.2.3"]}"#,
            r#"{"mode": "allow-all", "deny": ["10.0.0.0/8", "192.0.2.1:80,443"]}"#,
            r#"{"mode": "custom", "domains": ["*.example.com:443", "*"], "allow": ["::/0"]}"#,
            r#"{"mode": "custom", "requests": [{"domain": "a.example", "action": "allow",
                "match": {"methods": ["GET"], "path": {"regex": "^/v[0-9]/"},
                "query": [{"key": {"exact": "q"}}], "headers": [{}]}}]}"#,
            r#"{"mode": "allow-all", "requests": [{"domain": "*", "action":
                {"forward": {"url": "http://192.0.2.1:8080/base", "prefix": "vercel-forwarded-"}}}]}"#,
        ] {
            policy(json).check("network").unwrap_or_else(|error| panic!("{json}: {error}"));
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let many = |count: usize, one: &str| vec![one; count].join(",");
        let ports = (1..=65).map(|port| port.to_string()).collect::<Vec<_>>().join(",");
        let request = |rest: &str| {
            format!(r#"{{"mode": "custom", "requests": [{{"domain": "a.example", {rest}}}]}}"#)
        };
        let action = |action: &str| request(&format!(r#""action": {action}"#));
        let look = |look: &str| request(&format!(r#""action": "deny", "match": {look}"#));
        for (field, json) in [
            ("domains", r#"{"mode": "allow-all", "domains": ["a.example"]}"#.to_owned()),
            (
                "allow[1]",
                r#"{"mode": "allow-all", "allow": ["10.0.0.0/8", "192.0.2.1"]}"#.to_owned(),
            ),
            ("allow[0]", r#"{"mode": "allow-all", "allow": ["0.0.0.0/0"]}"#.to_owned()),
            ("allow[0]", r#"{"mode": "allow-all", "allow": ["10.0.0.0/7"]}"#.to_owned()),
            ("allow", r#"{"mode": "deny-all", "allow": ["192.0.2.1"]}"#.to_owned()),
            ("deny", r#"{"mode": "deny-all", "deny": ["192.0.2.1"]}"#.to_owned()),
            ("domains", format!(r#"{{"mode": "custom", "domains": [{}]}}"#, many(1001, "\"a.b\""))),
            ("allow", format!(r#"{{"mode": "custom", "allow": [{}]}}"#, many(1001, "\"::/0\""))),
            ("domains[1]", format!(r#"{{"mode": "custom", "domains": ["a.b", "a.b:{ports}"]}}"#)),
            ("deny[0]", r#"{"mode": "custom", "deny": ["192.0.2.1:80,80"]}"#.to_owned()),
            ("requests[0].match.methods[0]", look(r#"{"methods": ["G ET"]}"#)),
            ("requests[0].match.path", look(r#"{"path": {"exact": "x"}}"#)),
            ("requests[0].match.path", look(r#"{"path": {"regex": "("}}"#)),
            ("requests[0].match.path", look(r#"{"path": {"regex": "(a{9999}){9999}"}}"#)),
            (
                "requests[0].match.query[1].value",
                look(r#"{"query": [{}, {"value": {"regex": "["}}]}"#),
            ),
            ("requests[0].action.answer.status", action(r#"{"answer": {"status": 100}}"#)),
            (
                "requests[0].action.answer.headers.a b",
                action(r#"{"answer": {"status": 200, "headers": {"a b": ""}}}"#),
            ),
            ("requests[0].action.forward.url", action(r#"{"forward": {"url": "ftp://a"}}"#)),
            ("requests[0].action.forward.url", action(r#"{"forward": {"url": "/path"}}"#)),
            ("requests[0].action.forward.url", action(r#"{"forward": {"url": "http://u:p@a/"}}"#)),
            ("requests[0].action.forward.url", action(r#"{"forward": {"url": "http://a/?q"}}"#)),
            (
                "requests[0].action.forward.prefix",
                action(r#"{"forward": {"url": "http://a/", "prefix": "a b"}}"#),
            ),
            ("requests[0].action.headers", action(r#"{"headers": {}}"#)),
            ("requests[0].action.headers.Host", action(r#"{"headers": {"Host": "x"}}"#)),
        ] {
            let error = policy(&json).check("network").expect_err(&json);
            assert_eq!(error.field, format!("network.{field}"), "{json}: {error}");
        }
    }

    #[test]
    fn a_credential_is_one_line_and_names_secrets_whole() {
        let with = |value: &str| {
            let mut policy = policy(
                r#"{"mode": "custom", "requests": [{"domain": "a.example", "action": {"headers": {"x-key": ""}}}]}"#,
            );
            let value = Credential::Plain(value.to_owned().into());
            policy.requests[0].action = Action::Headers([("x-key".to_owned(), value)].into());
            ProjectNetwork { bound: Some(policy), ..ProjectNetwork::default() }.check()
        };
        with("Bearer ${secret:KEY}").unwrap();
        for value in ["", "two\nlines", "${secret:KEY", "${secret:}", "${secret:A} ${secret:"] {
            let error = with(value).unwrap_err();
            assert_eq!(error.field, "network.bound.requests[0].action.headers.x-key", "{value}");
        }
    }
}
