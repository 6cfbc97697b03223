//! Request rules: which of them a request matches, and the action that follows.
//!
//! A path can be written in many ways (`/%61dmin`, `/a/../admin`, `//admin`), and servers differ in which they take for
//! the same. So a rule is held against the path as it was sent and in its plainest form: one that refuses needs
//! either to match, all others need both.

use hyper::header::{HeaderName, HeaderValue};
use hyper::{HeaderMap, Method, Uri};
use regex::Regex;
use zeroize::Zeroizing;

use crate::model::{
    Action, Answer, BadPolicy, Credential, DomainPattern, PairMatch, RequestRule, TextMatch, regex,
};

/// What becomes of a request, and the rule it follows from.
#[derive(Debug)]
pub(in crate::net) struct RequestVerdict<'a> {
    pub(in crate::net) rule: String,
    pub(in crate::net) action: RequestAction<'a>,
    /// Whether the action is the bound's own.
    pub(in crate::net) by_bound: bool,
    /// Headers that are set on the way; later ones replace earlier ones of the same name.
    pub(in crate::net) set: Vec<(&'a HeaderName, &'a Zeroizing<String>)>,
}

/// Where a request goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::net) enum RequestAction<'a> {
    /// Where it was going.
    Pass,
    /// Nowhere: it is answered with 403.
    Deny,
    /// Nowhere: it is answered with this.
    Answer(&'a Answer),
    /// To another destination; its path and query are appended.
    /// [`Rules::forward`](super::Rules::forward) checks the address.
    Forward {
        url: &'a str,
        /// The prefix of the headers with its original destination.
        prefix: Option<&'a str>,
    },
}

impl<'a> RequestVerdict<'a> {
    pub(super) fn pass(rule: String) -> Self {
        Self { rule, action: RequestAction::Pass, by_bound: false, set: Vec::new() }
    }

    pub(super) fn deny(rule: String) -> Self {
        Self { rule, action: RequestAction::Deny, by_bound: false, set: Vec::new() }
    }

    /// The verdict under a bound: whatever keeps the request from going on wins, then the bound's own action.
    pub(super) fn within(mut self, bound: Self) -> Self {
        let weight = |action: &RequestAction<'_>| match action {
            RequestAction::Deny => 3,
            RequestAction::Answer(_) => 2,
            RequestAction::Forward { .. } => 1,
            RequestAction::Pass => 0,
        };
        let stricter = weight(&bound.action).max(weight(&self.action));
        if stricter > 0 && weight(&bound.action) == stricter {
            self.rule = bound.rule;
            self.action = bound.action;
            self.by_bound = true;
        }
        self.set.extend(bound.set);
        self
    }
}

/// One request, as far as rules look at it.
pub(super) struct Look<'a> {
    method: &'a str,
    sent: &'a str,
    plain: String,
    query: Vec<(String, String)>,
    headers: &'a HeaderMap,
}

impl<'a> Look<'a> {
    pub(super) fn new(method: &'a Method, uri: &'a Uri, headers: &'a HeaderMap) -> Self {
        let pairs = uri.query().unwrap_or_default().split('&').filter(|pair| !pair.is_empty());
        let decoded = |text: &str| decode(&text.replace('+', " "));
        Self {
            method: method.as_str(),
            sent: uri.path(),
            plain: plain(uri.path()),
            query: pairs
                .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
                .map(|(key, value)| (decoded(key), decoded(value)))
                .collect(),
            headers,
        }
    }
}

/// A request rule that was compiled.
#[derive(Debug)]
pub(super) struct Ordered {
    pub(super) domain: DomainPattern,
    rule: String,
    methods: Vec<String>,
    path: Option<Text>,
    query: Vec<PairPattern>,
    headers: Vec<PairPattern>,
    act: Act,
}

#[derive(Debug)]
enum Act {
    Allow,
    Deny,
    Answer(Answer),
    Forward { url: String, prefix: Option<String> },
    Headers(Vec<(HeaderName, Hidden)>),
}

struct Hidden(Zeroizing<String>);

impl std::fmt::Debug for Hidden {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("..")
    }
}

#[derive(Debug)]
enum Text {
    Exact(String),
    Prefix(String),
    Regex(Regex),
}

#[derive(Debug)]
struct PairPattern {
    key: Option<Text>,
    value: Option<Text>,
}

impl Ordered {
    pub(super) fn new(
        index: usize,
        rule: &RequestRule,
        whose: &str,
        reveal: &dyn Fn(&Credential) -> Result<Zeroizing<String>, BadPolicy>,
    ) -> Result<Self, BadPolicy> {
        let (verb, act) = match &rule.action {
            Action::Allow => ("allow", Act::Allow),
            Action::Deny => ("deny", Act::Deny),
            Action::Answer(answer) => ("answer", Act::Answer(answer.clone())),
            Action::Forward { url, prefix } => {
                ("forward", Act::Forward { url: url.clone(), prefix: prefix.clone() })
            }
            Action::Headers(headers) => {
                let mut set = Vec::with_capacity(headers.len());
                for (name, value) in headers {
                    let value = reveal(value)?;
                    if HeaderValue::from_str(&value).is_err() {
                        return Err(BadPolicy(format!("the value of `{name}` is no header value")));
                    }
                    let name = name
                        .parse::<HeaderName>()
                        .map_err(|_| BadPolicy(format!("`{name}` is no header name")))?;
                    set.push((name, Hidden(value)));
                }
                ("headers", Act::Headers(set))
            }
        };
        let looks = &rule.matches;
        Ok(Self {
            domain: rule.domain.clone(),
            rule: format!("{whose}requests[{index}]: {verb} {}", rule.domain),
            methods: looks.methods.iter().map(|method| method.to_ascii_uppercase()).collect(),
            path: looks.path.as_ref().map(Text::new).transpose()?,
            query: looks.query.iter().map(PairPattern::new).collect::<Result<_, _>>()?,
            headers: looks.headers.iter().map(PairPattern::header).collect::<Result<_, _>>()?,
            act,
        })
    }

    pub(super) fn matches(&self, name: &str, look: &Look<'_>) -> bool {
        let path = |text: &Text| match self.act {
            Act::Deny => text.matches(look.sent) || text.matches(&look.plain),
            _ => text.matches(look.sent) && text.matches(&look.plain),
        };
        let in_query =
            |pair: &PairPattern| look.query.iter().any(|(key, value)| pair.matches(key, value));
        let in_headers = |pair: &PairPattern| {
            look.headers.iter().any(|(key, value)| {
                pair.matches(key.as_str(), &String::from_utf8_lossy(value.as_bytes()))
            })
        };
        // Some servers take `delete` for `DELETE`.
        let method = |method: &String| match self.act {
            Act::Deny => method.eq_ignore_ascii_case(look.method),
            _ => method == look.method,
        };
        self.domain.matches(name)
            && (self.methods.is_empty() || self.methods.iter().any(method))
            && self.path.as_ref().is_none_or(path)
            && self.query.iter().all(in_query)
            && self.headers.iter().all(in_headers)
    }

    /// The headers it sets.
    pub(super) fn headers(&self) -> impl Iterator<Item = (&HeaderName, &Zeroizing<String>)> {
        let headers = match &self.act {
            Act::Headers(headers) => headers.as_slice(),
            _ => &[],
        };
        headers.iter().map(|(name, value)| (name, &value.0))
    }

    pub(super) fn verdict(&self) -> RequestVerdict<'_> {
        let mut set = Vec::new();
        let action = match &self.act {
            Act::Allow => RequestAction::Pass,
            Act::Deny => RequestAction::Deny,
            Act::Answer(answer) => RequestAction::Answer(answer),
            Act::Forward { url, prefix } => {
                RequestAction::Forward { url, prefix: prefix.as_deref() }
            }
            Act::Headers(_) => {
                set = self.headers().collect();
                RequestAction::Pass
            }
        };
        RequestVerdict { rule: self.rule.clone(), action, by_bound: false, set }
    }
}

impl Text {
    fn new(text: &TextMatch) -> Result<Self, BadPolicy> {
        Ok(match text {
            TextMatch::Exact(text) => Self::Exact(text.clone()),
            TextMatch::Prefix(text) => Self::Prefix(text.clone()),
            TextMatch::Regex(text) => Self::Regex(regex(text)?),
        })
    }

    fn matches(&self, text: &str) -> bool {
        match self {
            Self::Exact(wanted) => text == wanted,
            Self::Prefix(wanted) => text.starts_with(wanted),
            Self::Regex(wanted) => wanted.is_match(text),
        }
    }
}

impl PairPattern {
    fn new(pair: &PairMatch) -> Result<Self, BadPolicy> {
        Ok(Self {
            key: pair.key.as_ref().map(Text::new).transpose()?,
            value: pair.value.as_ref().map(Text::new).transpose()?,
        })
    }

    /// Keys of headers are compared in lower case.
    fn header(pair: &PairMatch) -> Result<Self, BadPolicy> {
        let mut pair = Self::new(pair)?;
        if let Some(Text::Exact(key) | Text::Prefix(key)) = &mut pair.key {
            key.make_ascii_lowercase();
        }
        Ok(pair)
    }

    fn matches(&self, key: &str, value: &str) -> bool {
        self.key.as_ref().is_none_or(|wanted| wanted.matches(key))
            && self.value.as_ref().is_none_or(|wanted| wanted.matches(value))
    }
}

fn decode(text: &str) -> String {
    let digit = |byte: Option<&u8>| char::from(*byte?).to_digit(16);
    let bytes = text.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let pair = (digit(bytes.get(at + 1)), digit(bytes.get(at + 2)));
        if let (b'%', (Some(high), Some(low))) = (bytes[at], pair) {
            decoded.push(u8::try_from(high * 16 + low).unwrap_or(b'?'));
            at += 3;
        } else {
            decoded.push(bytes[at]);
            at += 1;
        }
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

/// A path with nothing encoded, no empty segments and no dots.
fn plain(path: &str) -> String {
    let decoded = decode(path).replace('\\', "/");
    let mut segments = Vec::new();
    for segment in decoded.split('/') {
        match segment {
            "" | "." => {}
            ".." => {
                segments.pop();
            }
            segment => segments.push(segment),
        }
    }
    let mut plain = format!("/{}", segments.join("/"));
    if plain.len() > 1 && ["/", "/.", "/.."].iter().any(|end| decoded.ends_with(end)) {
        plain.push('/');
    }
    plain
}
