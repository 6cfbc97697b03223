//! What a sandbox may do on the network, as pure functions.
//!
//! A policy is compiled once into a [`Rules`]; every question is then answered without a clock, a lock or I/O, with
//! the rule that the answer follows from. There are up to two *sides*: the sandbox's own policy and its project's
//! upper bound. Something is allowed only if every side allows it, each for reasons of its own.
//!
//! | question | asked when | answers |
//! |---|---|---|
//! | [`Rules::address`] | a connection is wanted | yes, only by name, no |
//! | [`Rules::named`] | its first bytes told a name | pass it on, open it, no |
//! | [`Rules::unnamed`] | its first bytes tell no name, or nothing is said | yes, no |
//! | [`Rules::datagrams`] | a flow of datagrams or echo requests begins | yes, no |
//! | [`Rules::lookup`] | a name is looked up | yes, no |
//! | [`Rules::request`] | an HTTP request was read from an opened connection | what becomes of it |
//! | [`Rules::forwarded`], [`Rules::forward`] | such a request is to go elsewhere | yes, no |
//!
//! What is refused whatever the policy says is not here but in `special_addresses`: it is the operator's, not the policy's. Private
//! networks are in between: they are refused unless an `allow` entry names them, or a part of them, or the operator
//! excepted them. `allow-all` and `0.0.0.0/0` mean the world, not the networks around the host.

mod domain_index;
mod requests;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use hyper::header::HeaderName;
use hyper::{HeaderMap, Method, Uri};
use tokio::sync::watch;
use zeroize::Zeroizing;

use self::domain_index::DomainIndex;
use self::requests::{Look, Ordered};
pub(super) use self::requests::{RequestAction, RequestVerdict};
use super::special_addresses::{self, Destination};
use crate::model::{
    AddressRule, BadPolicy, Credential, DomainPattern, DomainRule, Mode, Policy, Protocol,
    SecretPlace,
};

/// A secret whose placeholder is replaced with its value in requests to some hosts.
#[derive(Clone)]
pub struct Brokered {
    /// The secret's name.
    pub name: String,
    /// What the sandbox has instead of the value.
    pub placeholder: String,
    /// The value.
    pub value: Zeroizing<String>,
    /// The hosts that may have it.
    pub hosts: Vec<DomainPattern>,
    /// Where its placeholder is replaced besides headers.
    pub places: BTreeSet<SecretPlace>,
}

impl fmt::Debug for Brokered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Brokered")
            .field("name", &self.name)
            .field("hosts", &self.hosts)
            .finish_non_exhaustive()
    }
}

/// A policy in force: the sandbox's own, within its project's bound.
#[derive(Debug)]
pub struct Rules {
    own: PolicySide,
    bound: Option<PolicySide>,
    brokered: Vec<Brokered>,
}

/// The rules that hold now. Long-lived connections check them again, or watch.
#[derive(Debug)]
pub(super) struct ActiveRules(watch::Sender<Arc<Rules>>);

impl ActiveRules {
    pub(super) fn new(rules: Arc<Rules>) -> Self {
        Self(watch::Sender::new(rules))
    }

    /// The rules that hold now.
    pub(super) fn now(&self) -> Arc<Rules> {
        self.during(Arc::clone)
    }

    /// Does something that a change of rules must not overtake: it comes wholly before or wholly after.
    pub(super) fn during<T>(&self, act: impl FnOnce(&Arc<Rules>) -> T) -> T {
        act(&self.0.borrow())
    }

    /// Returns a receiver of changes.
    pub(super) fn watch(&self) -> watch::Receiver<Arc<Rules>> {
        self.0.subscribe()
    }

    /// Puts others in force.
    pub(super) fn set(&self, rules: Arc<Rules>) {
        self.0.send_replace(rules);
    }
}

/// The decision about an address before any name is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Ruling {
    /// Allowed, by this rule.
    Allow(String),
    /// Allowed if it turns out to be for a name that is.
    ByName,
    /// Refused, by this rule.
    Deny(String),
}

/// What first bytes were.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NameSource {
    /// A TLS greeting.
    Tls,
    /// The head of an HTTP/1 request.
    Http,
}

/// The decision about a connection whose name is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Named {
    /// It passes unchanged, by this rule.
    Pass(String),
    /// It is opened, and its requests are judged one by one.
    Open(String),
    /// Refused, by this rule.
    Deny(String),
}

impl Rules {
    /// Compiles a policy, its bound and the secrets that are brokered. Header values are had from `reveal`.
    ///
    /// # Errors
    ///
    /// Returns [`BadPolicy`] when a regular expression or a header is none, or a value cannot be revealed.
    pub fn new(
        policy: &Policy,
        bound: Option<&Policy>,
        brokered: Vec<Brokered>,
        reveal: &dyn Fn(&Credential) -> Result<Zeroizing<String>, BadPolicy>,
    ) -> Result<Self, BadPolicy> {
        Ok(Self {
            own: PolicySide::new(policy, "", reveal)?,
            bound: bound
                .map(|bound| PolicySide::new(bound, "project bound: ", reveal))
                .transpose()?,
            brokered,
        })
    }

    /// The same, where the operator opened these private networks.
    #[must_use]
    pub fn excepting(mut self, opened: &[AddressRule]) -> Self {
        for side in std::iter::once(&mut self.own).chain(&mut self.bound) {
            side.excepted = opened.to_vec();
        }
        self
    }

    /// Rules that let nothing through.
    #[must_use]
    pub fn deny_all() -> Self {
        let nothing = Policy { mode: Mode::DenyAll, ..Policy::default() };
        let side = PolicySide::new(&nothing, "", &|_| Err(BadPolicy(String::new())));
        Self {
            own: side.expect("a policy without rules compiles"),
            bound: None,
            brokered: Vec::new(),
        }
    }

    /// Whether some connection may be opened, so that the sandbox must trust its authority.
    #[must_use]
    pub fn opens(&self) -> bool {
        !self.brokered.is_empty() || self.sides().any(|side| !side.requests.is_empty())
    }

    /// The decision about a connection to an address, before any of its bytes are read.
    pub(super) fn address(&self, to: Destination) -> Ruling {
        let mut all = None;
        for side in self.sides() {
            match side.address(to) {
                Ruling::Deny(rule) => return Ruling::Deny(rule),
                Ruling::ByName => all = Some(Ruling::ByName),
                // The sandbox's own rule is the one that is reported.
                Ruling::Allow(rule) => all = all.or(Some(Ruling::Allow(rule))),
            }
        }
        all.unwrap_or(Ruling::ByName)
    }

    /// Whether a connection to an address that is allowed must nevertheless be looked at, because it may be for a name
    /// whose requests are judged: any may, since addresses are known without asking for them here.
    pub(super) fn looks(&self) -> bool {
        self.opens()
    }

    /// The decision about a connection that has a name. The caller knows whether the address was
    /// given out for that name.
    pub(super) fn named(&self, to: Destination, name: &str, source: NameSource) -> Named {
        let mut told = None;
        let mut open = self.intercepts(name);
        for side in self.sides() {
            match side.named(to, name, source) {
                Named::Deny(rule) => return Named::Deny(rule),
                Named::Pass(rule) => told = told.or(Some(rule)),
                Named::Open(rule) => {
                    open = true;
                    told = told.or(Some(rule));
                }
            }
        }
        let rule = told.unwrap_or_default();
        if open { Named::Open(rule) } else { Named::Pass(rule) }
    }

    /// The decision about a connection without a name, to an address that was given out for
    /// `names`: the rule, and the name it applies to.
    pub(super) fn unnamed(
        &self,
        to: Destination,
        names: &[String],
    ) -> Result<(String, Option<String>), String> {
        let of = |name: Option<&str>| {
            let mut told = None;
            for side in self.sides() {
                let rule = side.unnamed(to, name)?;
                told = told.or(Some(rule));
            }
            Ok::<_, String>(told.unwrap_or_default())
        };
        let refused = match of(None) {
            Ok(rule) => return Ok((rule, None)),
            Err(rule) => rule,
        };
        for name in names {
            if let Ok(rule) = of(Some(name)) {
                return Ok((rule, Some(name.clone())));
            }
        }
        Err(refused)
    }

    /// The decision about datagrams or echo requests to an address that was given out for `names`.
    pub(super) fn datagrams(
        &self,
        protocol: Protocol,
        to: Destination,
        names: &[String],
    ) -> Result<String, String> {
        // HTTP goes over datagrams too, where its requests cannot be judged.
        if protocol == Protocol::Udp
            && let Some(name) = names.iter().find(|name| self.intercepts(name))
        {
            return Err(format!("requests to {name} are judged, and go by TCP only"));
        }
        match self.address(to) {
            Ruling::Allow(rule) => Ok(rule),
            Ruling::ByName => Err(format!("{NO_RULE}; {protocol:?} tells no name").to_lowercase()),
            Ruling::Deny(rule) => Err(rule),
        }
    }

    /// Whether a name may be looked up, and by which rule it is so.
    pub(super) fn lookup(&self, name: &str) -> Result<String, String> {
        let mut told = None;
        for side in self.sides() {
            let rule = side.lookup(name)?;
            told = told.or(Some(rule));
        }
        Ok(told.unwrap_or_default())
    }

    /// Whether requests to a name are judged, or given credentials, one by one, if it may be reached at all.
    pub(super) fn intercepts(&self, name: &str) -> bool {
        self.sides().any(|side| side.requests.iter().any(|rule| rule.domain.matches(name)))
            || self.brokered(name).next().is_some()
    }

    /// The secrets that a host may have.
    pub(super) fn brokered<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Brokered> {
        self.brokered.iter().filter(|secret| secret.hosts.iter().any(|host| host.matches(name)))
    }

    /// The headers that some rule may set in requests to a host.
    pub(super) fn set_headers<'a>(
        &'a self,
        name: &'a str,
    ) -> impl Iterator<Item = (&'a HeaderName, &'a Zeroizing<String>)> {
        let rules = self.sides().flat_map(|side| &side.requests);
        rules.filter(move |rule| rule.domain.matches(name)).flat_map(Ordered::headers)
    }

    /// The secrets that a host may not have.
    pub(super) fn withheld<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Brokered> {
        self.brokered.iter().filter(|secret| !secret.hosts.iter().any(|host| host.matches(name)))
    }

    /// What becomes of a request to `name` at `to`. The caller has made sure that the request's own host is `name`.
    pub(super) fn request(
        &self,
        name: &str,
        to: Destination,
        method: &Method,
        uri: &Uri,
        headers: &HeaderMap,
    ) -> RequestVerdict<'_> {
        let look = Look::new(method, uri, headers);
        let own = self.own.request(name, to, &look);
        match &self.bound {
            None => own,
            Some(bound) => own.within(bound.request(name, to, &look)),
        }
    }

    /// Whether a request that the sandbox's own rule forwards may be sent as what it became: the
    /// bound's request rules for where it goes must let it pass. What they leave to addresses is
    /// checked when those are known, by [`Rules::forward`].
    pub(super) fn forwarded(
        &self,
        host: &str,
        port: u16,
        method: &Method,
        uri: &Uri,
        headers: &HeaderMap,
    ) -> Result<(), String> {
        match &self.bound {
            None => Ok(()),
            Some(bound) => {
                bound.forwarded(host.trim_end_matches('.'), port, &Look::new(method, uri, headers))
            }
        }
    }

    /// Whether a request may be forwarded to `host` at `to`: the sandbox's own rule allows it, so
    /// only the bound and the denied destinations are checked.
    pub(super) fn forward(&self, host: &str, to: Destination) -> Result<(), String> {
        // A rule that forwards to an address names it, and so opens it.
        let literal = host.trim_matches(['[', ']']).parse::<std::net::IpAddr>().is_ok();
        let denied = if literal { self.own.listed(to) } else { self.own.denied(to) };
        if let Some(rule) = denied {
            return Err(rule);
        }
        let host = host.trim_end_matches('.');
        match self.bound.as_ref().map(|bound| bound.named(to, host, NameSource::Http)) {
            Some(Named::Deny(rule)) => Err(rule),
            _ => Ok(()),
        }
    }

    fn sides(&self) -> impl Iterator<Item = &PolicySide> {
        std::iter::once(&self.own).chain(&self.bound)
    }
}

const NO_RULE: &str = "no rule allows it";
const PRIVATE: &str = "a private network, and no rule opens it";

/// One policy.
#[derive(Debug)]
struct PolicySide {
    mode: Mode,
    /// How its rules are named in reports.
    whose: &'static str,
    domains: DomainIndex,
    allow: Vec<AddressRule>,
    deny: Vec<AddressRule>,
    /// Private networks that the operator opened.
    excepted: Vec<AddressRule>,
    requests: Vec<Ordered>,
}

impl PolicySide {
    fn new(
        policy: &Policy,
        whose: &'static str,
        reveal: &dyn Fn(&Credential) -> Result<Zeroizing<String>, BadPolicy>,
    ) -> Result<Self, BadPolicy> {
        let requests = policy.requests.iter().enumerate();
        Ok(Self {
            mode: policy.mode,
            whose,
            domains: DomainIndex::new(policy.domains.clone()),
            allow: policy.allow.clone(),
            deny: policy.deny.clone(),
            excepted: Vec::new(),
            requests: requests
                .map(|(index, rule)| Ordered::new(index, rule, whose, reveal))
                .collect::<Result<_, _>>()?,
        })
    }

    fn address(&self, to: Destination) -> Ruling {
        if let Some(rule) = self.denied(to) {
            return Ruling::Deny(rule);
        }
        match self.mode {
            Mode::DenyAll => Ruling::Deny(self.rule("deny-all")),
            Mode::AllowAll => Ruling::Allow(self.rule("allow-all")),
            Mode::Custom => match self.allowed(to) {
                Some(rule) => Ruling::Allow(rule),
                None if !self.requests.is_empty() || self.domains.any_on(to.asked.port()) => {
                    Ruling::ByName
                }
                None => Ruling::Deny(self.rule(NO_RULE)),
            },
        }
    }

    fn named(&self, to: Destination, name: &str, source: NameSource) -> Named {
        if let Some(rule) = self.denied(to) {
            return Named::Deny(rule);
        }
        match self.mode {
            Mode::DenyAll => Named::Deny(self.rule("deny-all")),
            Mode::AllowAll => Named::Pass(self.rule("allow-all")),
            Mode::Custom => {
                if let Some(rule) = self.allowed(to) {
                    Named::Pass(rule)
                } else if let Some(rule) = self.domain(name, to.asked.port()) {
                    // The next request on the same connection may be for another host.
                    let rule = self.rule(format!("domain {rule}"));
                    if source == NameSource::Http { Named::Open(rule) } else { Named::Pass(rule) }
                } else if let Some(rule) =
                    self.requests.iter().find(|rule| rule.domain.matches(name))
                {
                    Named::Open(self.rule(format!("requests to {}", rule.domain)))
                } else {
                    Named::Deny(self.rule(NO_RULE))
                }
            }
        }
    }

    fn unnamed(&self, to: Destination, name: Option<&str>) -> Result<String, String> {
        if let Some(rule) = self.denied(to) {
            return Err(rule);
        }
        match self.mode {
            Mode::DenyAll => Err(self.rule("deny-all")),
            Mode::AllowAll => Ok(self.rule("allow-all")),
            Mode::Custom => {
                let port = to.asked.port();
                let explicit = |name| {
                    self.domains.matching(name).find(|rule| rule.ports.contains(&port)).cloned()
                };
                self.allowed(to)
                    .or_else(|| Some(self.rule(format!("domain {}", name.and_then(explicit)?))))
                    .ok_or_else(|| self.rule(format!("{NO_RULE}; it told no name")))
            }
        }
    }

    fn lookup(&self, name: &str) -> Result<String, String> {
        match self.mode {
            Mode::DenyAll => Err(self.rule("deny-all")),
            Mode::AllowAll => Ok(self.rule("allow-all")),
            Mode::Custom => {
                let domain = self.domains.matching(name).next().map(ToString::to_string);
                let request = || self.requests.iter().find(|rule| rule.domain.matches(name));
                domain
                    .or_else(|| request().map(|rule| rule.domain.to_string()))
                    .map(|domain| self.rule(format!("domain {domain}")))
                    .ok_or_else(|| self.rule(NO_RULE))
            }
        }
    }

    fn request(&self, name: &str, to: Destination, look: &Look<'_>) -> RequestVerdict<'_> {
        if let Some(rule) = self.denied(to) {
            return RequestVerdict::deny(rule);
        }
        if self.mode == Mode::DenyAll {
            return RequestVerdict::deny(self.rule("deny-all"));
        }
        if let Some(rule) = self.requests.iter().find(|rule| rule.matches(name, look)) {
            return rule.verdict();
        }
        if self.mode == Mode::AllowAll {
            return RequestVerdict::pass(self.rule("allow-all"));
        }
        let domain = || {
            let rule = self.domain(name, to.asked.port())?;
            Some(self.rule(format!("domain {rule}")))
        };
        match self.allowed(to).or_else(domain) {
            Some(rule) => RequestVerdict::pass(rule),
            None => RequestVerdict::deny(self.rule(NO_RULE)),
        }
    }

    fn forwarded(&self, host: &str, port: u16, look: &Look<'_>) -> Result<(), String> {
        if let Some(rule) = self.requests.iter().find(|rule| rule.matches(host, look)) {
            let RequestVerdict { rule, action, .. } = rule.verdict();
            return if action == RequestAction::Pass { Ok(()) } else { Err(rule) };
        }
        let spoken_of = self.requests.iter().any(|rule| rule.domain.matches(host));
        match self.mode {
            Mode::DenyAll => Err(self.rule("deny-all")),
            Mode::Custom if spoken_of && self.domain(host, port).is_none() => {
                Err(self.rule(NO_RULE))
            }
            Mode::AllowAll | Mode::Custom => Ok(()),
        }
    }

    fn domain<'a>(&'a self, name: &'a str, port: u16) -> Option<&'a DomainRule> {
        self.domains.matching(name).find(|rule| rule.ports.is_empty() || rule.ports.contains(&port))
    }

    fn allowed(&self, to: Destination) -> Option<String> {
        let rule = self.allow.iter().find(|rule| to.forms().any(|form| rule.covers(form)))?;
        Some(self.rule(format!("allow {rule}")))
    }

    fn denied(&self, to: Destination) -> Option<String> {
        let closed = || (!self.is_open(to)).then(|| self.rule(PRIVATE));
        self.listed(to).or_else(closed)
    }

    /// Whether it is outside private networks, or in one that is opened.
    fn is_open(&self, to: Destination) -> bool {
        let named = |rule: &AddressRule| {
            special_addresses::is_private_net(&rule.net) && to.forms().any(|form| rule.covers(form))
        };
        !special_addresses::is_private(to.asked.ip())
            || self.allow.iter().any(named)
            || self.excepted.iter().any(|rule| rule.covers(to.real))
    }

    /// The rule by which it is denied, if one speaks of it.
    fn listed(&self, to: Destination) -> Option<String> {
        let rule = self.deny.iter().find(|rule| to.disguises().any(|form| rule.covers(form)))?;
        Some(self.rule(format!("deny {rule}")))
    }

    fn rule(&self, text: impl fmt::Display) -> String {
        format!("{}{text}", self.whose)
    }
}

#[cfg(test)]
mod tests;
