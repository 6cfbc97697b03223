//! The network of a sandbox: packets in, ordinary sockets out, and a decision in between.
//!
//! ```text
//!  TUN ──packets──> stack ──streams, datagrams──> dispatch ──sockets──> upstream
//!                   (smoltcp)                       │
//!                                                   ├─ rules      may it?            (pure)
//!                                                   ├─ dns        names, and what they were answered with
//!                                                   ├─ proxy      HTTP requests of domains that have rules
//!                                                   └─ log        connections and byte counts, for the journal
//! ```
//!
//! | module | decides |
//! |---|---|
//! | `stack` | which packets form a connection or a datagram flow. Knows no policy: it asks a [`FlowHandler`] about each new flow |
//! | `dispatch` | what happens to each flow: refused, relayed, or given to `proxy`. Holds the rules in force and the open flows |
//! | `rules` | whether an address, a name, a port or an HTTP request is allowed, and by which rule. Pure |
//! | `dns` | how lookups are answered; remembers which names an address was given out for |
//! | `sniff` | which name the first bytes of a connection are for (TLS server name, HTTP host) |
//! | `proxy` | what happens to HTTP requests of domains that have rules or credentials |
//! | `special_addresses` | which addresses are refused whatever the policy says, and which are private |
//! | `upstream` | how names are resolved and connections made outside; the same for all sandboxes of a daemon |
//! | `log` | what is recorded about a flow |
//! | `gate` | what of all that waits until somebody has approved it; the engine answers |
//! | `sockets` | how many sockets of the host a sandbox may have, those of a project, and all of them together |
//! | `post` | which addresses the daemon itself sends requests to that callers chose |
//!
//! Each sandbox has its own stack, dispatcher and tasks. All buffers are bounded, and data that cannot be taken now is not read:
//! a slow side slows the other down, and nothing grows.
//!
//! Everything from a sandbox is untrusted, and so is everything from outside.

mod dispatch;
mod dns;
mod flow;
mod gate;
mod log;
mod post;
mod proxy;
mod rules;
mod sniff;
mod sockets;
mod special_addresses;
mod stack;
#[cfg(test)]
mod testing;
mod upstream;

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use self::dispatch::Dispatcher;
use self::flow::FlowHandler;
use self::log::ConnectionLog;
use self::stack::Stack;
use crate::model::{Connection, Device, SessionId};

pub use gate::{Answered, Contact, Gate, OpenGate};
pub use log::{Journal, Traffic};
pub use post::{PostError, PostTarget};
pub use proxy::{Authority, BadAuthority};
pub use rules::{Brokered, Rules};
pub use sockets::ProjectSockets;
pub use upstream::{Upstream, UpstreamSettings};

pub use crate::model::MTU;

/// The sandbox's own address.
pub const GUEST_V4: Ipv4Addr = Ipv4Addr::new(100, 96, 0, 2);
/// Its gateway and name server.
pub const GATEWAY_V4: Ipv4Addr = Ipv4Addr::new(100, 96, 0, 1);
/// The sandbox's own address.
pub const GUEST_V6: Ipv6Addr = Ipv6Addr::new(0xfd73, 0x616e, 0x646b, 0, 0, 0, 0, 2);
/// Its gateway and name server.
pub const GATEWAY_V6: Ipv6Addr = Ipv6Addr::new(0xfd73, 0x616e, 0x646b, 0, 0, 0, 0, 1);

/// What a sandbox's network is made of.
#[derive(Debug)]
pub struct NetworkConfig {
    /// The machine's device.
    pub device: Device,
    /// The session it is for.
    pub session: SessionId,
    /// Where connections are written down.
    pub journal: Arc<dyn Journal>,
    /// What an earlier daemon counted in the same session.
    pub before: Traffic,
    /// What may be reached.
    pub rules: Arc<Rules>,
    /// What is outside.
    pub upstream: Arc<Upstream>,
    /// Who signs for names whose requests are judged.
    pub authority: Arc<Authority>,
    /// Who is asked about first contacts and uses of secrets.
    pub gate: Arc<dyn Gate>,
    /// How many sockets the sandboxes of its project may have together.
    pub project: Arc<ProjectSockets>,
}

/// The network of one session. It ends when this is closed or dropped.
#[derive(Debug)]
pub struct SessionNetworkStack {
    dispatcher: Arc<Dispatcher>,
    stack: Stack,
}

impl SessionNetworkStack {
    /// Begins to answer the device.
    ///
    /// # Errors
    ///
    /// Returns an error when the device cannot be used.
    pub fn start(config: NetworkConfig) -> io::Result<Self> {
        let log = ConnectionLog::new(config.session, config.journal, config.before);
        let sockets = config.authority.sockets.clone();
        sockets.belong_to(config.project);
        let NetworkConfig { rules, upstream, authority, gate, .. } = config;
        let dispatcher = Dispatcher::new(rules, upstream, authority, log, gate);
        let handler = Arc::clone(&dispatcher) as Arc<dyn FlowHandler>;
        let stack = Stack::start(config.device, handler, sockets)?;
        Ok(Self { dispatcher, stack })
    }

    /// Puts other rules in force, at once: connections that no longer fit are cut.
    pub fn set_rules(&self, rules: Arc<Rules>) {
        self.dispatcher.set_rules(rules);
    }

    /// How much went each way.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        self.dispatcher.traffic()
    }

    /// Adds what went between the sandbox and the outside by another way: connections to its ports.
    pub fn count(&self, traffic: Traffic) {
        self.dispatcher.count(traffic);
    }

    /// How many connections and requests wait for somebody's answer.
    #[must_use]
    pub fn held(&self) -> usize {
        self.dispatcher.held()
    }

    /// What is open.
    #[must_use]
    pub fn open(&self) -> Vec<Connection> {
        self.dispatcher.open_now()
    }

    /// Ends it: every connection is gone when this returns, and in the journal. Answers with how much went each way.
    pub async fn close(self) -> Traffic {
        self.stack.close().await;
        self.dispatcher.finish();
        self.dispatcher.traffic()
    }
}
