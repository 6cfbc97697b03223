//! The dispatcher: decides about every flow of one sandbox, and carries the flows whose first bytes must be read.
//!
//! ```text
//! open ──refused, denied──────────────────────────────────────────────> reset, on record
//!   ├──allowed by address, and nobody's requests are judged there────> the stack dials, then relay
//!   └──else──> accepted, first bytes read:
//!                 a name ──denied, or the address is not that name's──> reset, on record
//!                        ├─its requests are judged────────────────────> proxy
//!                        └─else───────────────────────────────────────> dial, relay
//!                 no name, or silence ──may go without────────────────> dial, relay
//!                                      └─may not──────────────────────> reset, on record
//! ```
//!
//! A connection that may continue without a name, and sends nothing for a moment, is dialled: in
//! some protocols the server speaks first. The sandbox's first bytes are inspected all the same,
//! whenever they come: waiting is no way around a rule, and servers of HTTP/2 greet first.
//!
//! Every decision to let something through is taken, and the [`OpenFlow`] that stands for it listed, while the rules
//! cannot change ([`ActiveRules::during`]). So a change of rules finds everything that the old ones let through, judges it again, and
//! cuts what no longer fits.

mod hear;
mod hold;

use std::fmt;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use self::hear::{Heard, hear, hear_both};
use super::dns::NameServer;
use super::flow::{Datagrams, FlowHandler, OpenDecision};
use super::gate::Gate;
use super::log::{ConnectionLog, FlowInfo, OpenFlow, Refusals, Traffic};
use super::proxy::{self, Authority, Intercept};
use super::rules::{ActiveRules, NameSource, Named, Rules, Ruling};
use super::sniff::Sniffed;
use super::sockets::NoSocket;
use super::special_addresses::Destination;
use super::stack::{self, Stream};
use super::upstream::Upstream;
use super::{GATEWAY_V4, GATEWAY_V6};
use crate::model::{Connection, Protocol};

/// How long one that needs no name may be silent before it is dialled.
const QUIET: Duration = Duration::from_millis(300);

const NAMESERVER: u16 = 53;

/// The dispatcher of one sandbox.
pub(super) struct Dispatcher {
    rules: Arc<ActiveRules>,
    upstream: Arc<Upstream>,
    authority: Arc<Authority>,
    log: Arc<ConnectionLog>,
    refusals: Arc<Refusals>,
    names: NameServer,
    gate: Arc<dyn Gate>,
    /// One for each that may be held.
    held: Arc<Semaphore>,
    live: Mutex<Vec<(Weak<OpenFlow>, Basis)>>,
}

impl fmt::Debug for Dispatcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dispatcher").field("rules", &self.rules).finish_non_exhaustive()
    }
}

/// What something was let through for. `names` are those that its address had been given out for.
#[derive(Debug, Clone)]
enum Basis {
    /// A connection that was not inspected.
    Unseen {
        to: Destination,
        names: Vec<String>,
    },
    /// A connection without a name.
    Unnamed {
        to: Destination,
        names: Vec<String>,
        kind: UnnamedKind,
    },
    /// A connection with a name; `given` if its address was given out for it, `opened` if its
    /// requests are judged.
    Named {
        to: Destination,
        name: String,
        source: NameSource,
        given: bool,
        opened: bool,
    },
    Datagrams {
        protocol: Protocol,
        to: Destination,
        names: Vec<String>,
    },
}

/// What a connection without a name is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum UnnamedKind {
    /// The sandbox has not sent anything; when it does, that is inspected.
    Silent,
    /// Neither TLS nor HTTP.
    Other,
    /// TLS or HTTP, or on the way to be, that keeps its name to itself.
    Nameless,
}

/// The sandbox's end of a connection.
pub(super) trait GuestStream: AsyncRead + AsyncWrite + Send + Unpin + 'static {
    /// Ends it at once.
    fn reset(self);

    /// Carries it to and from a connection outside, to its end.
    fn relay(
        self,
        outside: TcpStream,
        open: &Arc<OpenFlow>,
    ) -> impl Future<Output = io::Result<()>> + Send;
}

impl GuestStream for Stream {
    fn reset(self) {
        Self::reset(self);
    }

    async fn relay(self, outside: TcpStream, open: &Arc<OpenFlow>) -> io::Result<()> {
        stack::relay(self, outside, open).await
    }
}

/// What is done with a connection that was looked at.
enum FlowDecision {
    Relay(Arc<OpenFlow>),
    Judge { open: Arc<OpenFlow>, name: String, source: NameSource, given: bool },
    Refuse { name: Option<String>, rule: String },
}

impl Dispatcher {
    pub(super) fn new(
        rules: Arc<Rules>,
        upstream: Arc<Upstream>,
        authority: Arc<Authority>,
        log: Arc<ConnectionLog>,
        gate: Arc<dyn Gate>,
    ) -> Arc<Self> {
        let rules = Arc::new(ActiveRules::new(rules));
        let refusals = Refusals::new(Arc::clone(&log));
        let names = NameServer::new(
            Arc::clone(&upstream),
            Arc::clone(&rules),
            Arc::clone(&refusals),
            Arc::clone(&gate),
        );
        let (held, live) = (Arc::new(Semaphore::new(hold::MOST_HELD)), Mutex::default());
        Arc::new(Self { rules, upstream, authority, log, refusals, names, gate, held, live })
    }

    /// Puts other rules in force, and cuts what they do not allow.
    pub(super) fn set_rules(&self, rules: Arc<Rules>) {
        self.rules.set(Arc::clone(&rules));
        let live = self.live.lock().clone();
        for (open, basis) in live {
            if let Some(open) = open.upgrade()
                && let Err(rule) = basis.holds(&rules)
            {
                open.cut(rule);
            }
        }
    }

    pub(super) fn traffic(&self) -> Traffic {
        self.log.traffic()
    }

    pub(super) fn count(&self, traffic: Traffic) {
        self.log.count(traffic);
    }

    pub(super) fn open_now(&self) -> Vec<Connection> {
        self.log.open().iter().map(|open| open.record()).collect()
    }

    /// Writes the counts that are not logged yet.
    pub(super) fn finish(&self) {
        self.refusals.flush();
        self.log.flush();
    }

    /// Lists something that is let through. Called only while the rules cannot change.
    fn begin(&self, rule: String, name: Option<String>, basis: Basis) -> Arc<OpenFlow> {
        let (protocol, to) = match &basis {
            Basis::Unseen { to, .. } | Basis::Unnamed { to, .. } | Basis::Named { to, .. } => {
                (Protocol::Tcp, to.asked)
            }
            Basis::Datagrams { protocol, to, .. } => (*protocol, to.asked),
        };
        let open = self.log.begin(FlowInfo { protocol, to: Some(to), name, rule });
        let mut live = self.live.lock();
        if live.len() == live.capacity() {
            live.retain(|(open, _)| open.strong_count() > 0);
        }
        live.push((Arc::downgrade(&open), basis));
        open
    }

    /// More is known now of something that was let through.
    fn learn(&self, open: &Arc<OpenFlow>, rule: String, name: Option<String>, basis: Basis) {
        open.learn(name, rule);
        let mut live = self.live.lock();
        let this = Arc::downgrade(open);
        if let Some(listed) = live.iter_mut().find(|(open, _)| open.ptr_eq(&this)) {
            listed.1 = basis;
        }
    }

    fn refuse(&self, protocol: Protocol, to: Destination, name: Option<String>, rule: String) {
        self.refusals.add(FlowInfo { protocol, to: Some(to.asked), name, rule });
    }

    /// Carries a connection that was accepted to its end.
    async fn carry<G: GuestStream>(self: Arc<Self>, mut guest: G, to: SocketAddr) {
        if is_gateway(to.ip()) && to.port() == NAMESERVER {
            return self.names.stream(guest).await;
        }
        let mut first = Vec::new();
        let to = match self.names.stand_in(to.ip()) {
            None => Destination::new(to),
            Some(name) => match self.approach(&mut guest, &mut first, to.port(), &name).await {
                Ok(place) => place,
                Err(held) => return self.end_held(guest, &first, Destination::new(to), held).await,
            },
        };
        let names = self.names.of(to.asked.ip());
        let quiet = self.rules.now().unnamed(to, &names).is_ok();
        let heard = loop {
            let heard = hear(&mut guest, &mut first, quiet.then_some(QUIET)).await;
            if heard == Heard::Gone || (heard == Heard::Nothing && !quiet) {
                let told_nothing = "it ended before it told a name".to_owned();
                return self.refuse(Protocol::Tcp, to, None, told_nothing);
            }
            if let Err(held) = self.meet_host(&mut guest, &mut first, to, &names, &heard).await {
                return self.end_held(guest, &first, to, held).await;
            }
            // What was silent may have spoken while it was held.
            if heard != Heard::Silence || first.is_empty() {
                break heard;
            }
        };
        if heard == Heard::Silence {
            return self.meet(guest, to, names).await;
        }
        match self.decide(to, &names, heard, None).await {
            FlowDecision::Relay(open) => match self.dial(&open, to).await {
                Some(outside) => relay(guest, &first, outside, open).await,
                None => guest.reset(),
            },
            decision => self.end(guest, first, to, decision).await,
        }
    }

    /// Carries a connection whose sandbox sends nothing: the server may.
    async fn meet<G: GuestStream>(
        self: Arc<Self>,
        mut guest: G,
        to: Destination,
        names: Vec<String>,
    ) {
        let begun = self.rules.during(|rules| {
            let (rule, name) = rules.unnamed(to, &names)?;
            let name = name.or_else(|| names.first().cloned());
            let basis = Basis::Unnamed { to, names: names.clone(), kind: UnnamedKind::Silent };
            Ok(self.begin(rule, name, basis))
        });
        let open = match begun {
            Ok(open) => open,
            Err(rule) => return self.end_refused(guest, to, None, rule),
        };
        let Some(mut outside) = self.dial(&open, to).await else { return guest.reset() };
        let mut first = Vec::new();
        let heard = tokio::select! {
            () = open.is_cut() => return guest.reset(),
            heard = hear_both(&mut guest, &mut outside, &mut first, &open) => heard,
        };
        let heard = match heard {
            Ok(Some(heard)) => heard,
            Ok(None) => return relay(guest, &[], outside, open).await,
            Err(_) => return guest.reset(),
        };
        if let Err(held) = self.meet_host(&mut guest, &mut first, to, &names, &heard).await {
            drop(outside);
            open.denied(held.why.clone(), "its host was not approved");
            return guest.reset();
        }
        match self.decide(to, &names, heard, Some(open)).await {
            FlowDecision::Relay(open) => relay(guest, &first, outside, open).await,
            decision => {
                drop(outside);
                self.end(guest, first, to, decision).await;
            }
        }
    }

    /// Decides about a connection by what was read from it. `open` is set if it was already let
    /// through.
    async fn decide(
        &self,
        to: Destination,
        names: &[String],
        heard: Heard,
        open: Option<Arc<OpenFlow>>,
    ) -> FlowDecision {
        let (name, source) = match heard {
            Heard::Bytes(Sniffed::Tls(Some(name))) => (name, NameSource::Tls),
            Heard::Bytes(Sniffed::Http(Some(name))) => (name, NameSource::Http),
            heard => return self.decide_unnamed(to, names, &heard, open),
        };
        let refuse = |rule: String| FlowDecision::Refuse { name: Some(name.clone()), rule };
        // A name that may not be reached is not looked up either.
        if let Named::Deny(rule) = self.rules.now().named(to, &name, source) {
            return refuse(rule);
        }
        let given = self.names.gave(to.asked.ip(), &name).await;
        self.rules.during(|rules| {
            let (rule, opened) = match fits_named(rules, to, &name, source, given) {
                Ok(fits) => fits,
                Err(rule) => return refuse(rule),
            };
            // While hosts need an approval, the next request may be for one that has none.
            let opened = opened || (source == NameSource::Http && self.gate.holds_hosts());
            let basis = Basis::Named { to, name: name.clone(), source, given, opened };
            let told = Some(name.clone());
            let open = match open {
                Some(open) => {
                    self.learn(&open, rule, told, basis);
                    open
                }
                None => self.begin(rule, told, basis),
            };
            if opened {
                FlowDecision::Judge { open, name: name.clone(), source, given }
            } else {
                FlowDecision::Relay(open)
            }
        })
    }

    fn decide_unnamed(
        &self,
        to: Destination,
        names: &[String],
        heard: &Heard,
        open: Option<Arc<OpenFlow>>,
    ) -> FlowDecision {
        let kind = kind_of(heard);
        self.rules.during(|rules| {
            let (rule, name) = match fits_unnamed(rules, to, names, kind) {
                Ok(allowed) => allowed,
                Err(rule) => return FlowDecision::Refuse { name: None, rule },
            };
            let name = name.or_else(|| names.first().cloned());
            let basis = Basis::Unnamed { to, names: names.to_vec(), kind };
            FlowDecision::Relay(match open {
                Some(open) => {
                    self.learn(&open, rule, name, basis);
                    open
                }
                None => self.begin(rule, name, basis),
            })
        })
    }

    /// Carries what is not relayed.
    async fn end<G: GuestStream>(
        &self,
        guest: G,
        first: Vec<u8>,
        to: Destination,
        decision: FlowDecision,
    ) {
        match decision {
            FlowDecision::Relay(_) => {}
            FlowDecision::Refuse { name, rule } => self.end_refused(guest, to, name, rule),
            FlowDecision::Judge { open, name, source, given } => {
                let intercept = Intercept {
                    name,
                    to,
                    given,
                    tls: source == NameSource::Tls,
                    rules: self.rules.watch(),
                    upstream: Arc::clone(&self.upstream),
                    authority: Arc::clone(&self.authority),
                    log: Arc::clone(&self.log),
                    gate: Arc::clone(&self.gate),
                    held: Arc::clone(&self.held),
                    open,
                };
                proxy::serve(guest, first.into(), intercept).await;
            }
        }
    }

    fn end_refused<G: GuestStream>(
        &self,
        guest: G,
        to: Destination,
        name: Option<String>,
        rule: String,
    ) {
        self.refuse(Protocol::Tcp, to, name, rule);
        guest.reset();
    }

    async fn dial(&self, open: &OpenFlow, to: Destination) -> Option<TcpStream> {
        let dialled = tokio::select! {
            () = open.is_cut() => return None,
            dialled = self.upstream.dial(to.real) => dialled,
        };
        dialled.inspect_err(|error| open.failed(error.to_string())).ok()
    }
}

/// Relays a connection, what was read of it first.
async fn relay<G: GuestStream>(
    guest: G,
    first: &[u8],
    mut outside: TcpStream,
    open: Arc<OpenFlow>,
) {
    if !first.is_empty() {
        let sent = tokio::select! {
            () = open.is_cut() => return guest.reset(),
            sent = outside.write_all(first) => sent,
        };
        if let Err(error) = sent {
            open.failed(error.to_string());
            return guest.reset();
        }
        open.sent(first.len() as u64);
    }
    if let Err(error) = guest.relay(outside, &open).await {
        tracing::trace!(%error, "a connection broke off");
    }
}

/// The kind of a connection that has no name.
fn kind_of(heard: &Heard) -> UnnamedKind {
    match heard {
        Heard::Nothing | Heard::Silence => UnnamedKind::Silent,
        Heard::Bytes(Sniffed::Other) => UnnamedKind::Other,
        _ => UnnamedKind::Nameless,
    }
}

/// Whether rules let a connection through that has a name: the rule, and whether its requests are
/// judged.
fn fits_named(
    rules: &Rules,
    to: Destination,
    name: &str,
    source: NameSource,
    given: bool,
) -> Result<(String, bool), String> {
    let fits = match rules.named(to, name, source) {
        Named::Deny(rule) => return Err(rule),
        Named::Open(rule) => (rule, true),
        Named::Pass(rule) => (rule, false),
    };
    if !given && !matches!(rules.address(to), Ruling::Allow(_)) {
        return Err(format!("{} was not given out for this name", to.asked.ip()));
    }
    Ok(fits)
}

/// Whether rules let a connection through that has no name: the rule, and the name it speaks of.
fn fits_unnamed(
    rules: &Rules,
    to: Destination,
    names: &[String],
    kind: UnnamedKind,
) -> Result<(String, Option<String>), String> {
    let fits = rules.unnamed(to, names)?;
    if kind == UnnamedKind::Nameless && !matches!(rules.address(to), Ruling::Allow(_)) {
        return Err("no rule allows it; it told no name".to_owned());
    }
    // Where HTTP is at home, what is none is taken for a form of it that only the server knows.
    let is_http = kind == UnnamedKind::Nameless
        || (kind == UnnamedKind::Other && matches!(to.asked.port(), 80 | 443));
    match names.iter().find(|name| rules.intercepts(name)) {
        Some(judged) if is_http => Err(format!("requests to {judged} are judged; it told no name")),
        _ => Ok(fits),
    }
}

fn is_gateway(ip: IpAddr) -> bool {
    ip == IpAddr::V4(GATEWAY_V4) || ip == IpAddr::V6(GATEWAY_V6)
}

impl Basis {
    /// Whether it would be let through by these rules too; if not, the rule against it.
    fn holds(&self, rules: &Rules) -> Result<(), String> {
        let judged = |name: &str| Err(format!("requests to {name} are judged now"));
        match self {
            Self::Unseen { to, names } => match rules.address(*to) {
                Ruling::Deny(rule) => Err(rule),
                Ruling::ByName => Err("no rule allows it; nobody looked at its name".to_owned()),
                Ruling::Allow(_) if !rules.looks() => Ok(()),
                Ruling::Allow(_) => match names.iter().find(|name| rules.intercepts(name)) {
                    Some(name) => judged(name),
                    None => Err("requests are judged now; it was not looked at".to_owned()),
                },
            },
            Self::Unnamed { to, names, kind } => fits_unnamed(rules, *to, names, *kind).map(drop),
            Self::Named { to, name, source, given, opened } => {
                match fits_named(rules, *to, name, *source, *given)? {
                    (_, true) if !opened => judged(name),
                    _ => Ok(()),
                }
            }
            Self::Datagrams { protocol, to, names } => {
                rules.datagrams(*protocol, *to, names).map(drop)
            }
        }
    }
}

#[async_trait]
impl FlowHandler for Dispatcher {
    fn open(&self, to: SocketAddr) -> OpenDecision {
        if is_gateway(to.ip()) && to.port() == NAMESERVER {
            return OpenDecision::Serve;
        }
        if self.names.stand_in(to.ip()).is_some() {
            return OpenDecision::Serve;
        }
        let to = Destination::new(to);
        if let Some(why) = self.upstream.refused(to) {
            self.refuse(Protocol::Tcp, to, None, format!("always refused: {why}"));
            return OpenDecision::Refuse;
        }
        let names = self.names.of(to.asked.ip());
        self.rules.during(|rules| match rules.address(to) {
            Ruling::Deny(rule) => {
                self.refuse(Protocol::Tcp, to, names.first().cloned(), rule);
                OpenDecision::Refuse
            }
            Ruling::Allow(rule) if !rules.looks() && !self.gate.holds_hosts() => {
                let name = names.first().cloned();
                let basis = Basis::Unseen { to, names };
                OpenDecision::Dial(to.real, self.begin(rule, name, basis))
            }
            Ruling::Allow(_) | Ruling::ByName => OpenDecision::Serve,
        })
    }

    fn no_socket(&self, protocol: Protocol, to: SocketAddr, why: NoSocket) {
        let to = Destination::new(to);
        let name = self.names.of(to.asked.ip()).into_iter().next();
        self.refuse(protocol, to, name, why.to_string());
    }

    fn unanswered(&self, open: &OpenFlow, error: &io::Error) {
        open.failed(error.to_string());
    }

    async fn relay(self: Arc<Self>, guest: Stream, outside: TcpStream, open: Arc<OpenFlow>) {
        relay(guest, &[], outside, open).await;
    }

    async fn serve(self: Arc<Self>, guest: Stream, to: SocketAddr) {
        self.carry(guest, to).await;
    }

    fn datagrams(&self, protocol: Protocol, to: SocketAddr) -> Option<Datagrams> {
        if self.refuses_datagrams(protocol, to) {
            return None;
        }
        let to = Destination::new(to);
        if let Some(why) = self.upstream.refused(to) {
            self.refuse(protocol, to, None, format!("always refused: {why}"));
            return None;
        }
        let names = self.names.of(to.asked.ip());
        let name = names.first().cloned();
        self.rules.during(|rules| match rules.datagrams(protocol, to, &names) {
            Ok(rule) => {
                let open = self.begin(rule, name, Basis::Datagrams { protocol, to, names });
                Some(Datagrams { to: to.real, open })
            }
            Err(rule) => {
                self.refuse(protocol, to, name, rule);
                None
            }
        })
    }

    async fn lookup(self: Arc<Self>, query: Vec<u8>) -> Option<Vec<u8>> {
        self.names.datagram(&query).await
    }
}

#[cfg(test)]
mod tests;
