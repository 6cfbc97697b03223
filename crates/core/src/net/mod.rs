//! The network of a sandbox: packets in, ordinary sockets out, and a decision in between.
//!
//! ```text
//!  TUN ──packets──> stack ──streams, datagrams──> switch ──sockets──> outside
//!                   (smoltcp)                       │
//!                                                   ├─ rules      may it?            (pure)
//!                                                   ├─ dns        names, and what they were answered with
//!                                                   ├─ proxy      HTTP requests of domains that have rules
//!                                                   └─ journal    what was, and how much
//! ```
//!
//! - `rules` decide, purely: an address, a name, a port, in; a verdict and the rule it follows from, out.
//! - `stack` turns packets into streams and datagrams. It knows no policy: it asks a [`Switch`] what to do with each
//!   new flow, and drops what is no packet.
//! - `switch` is that: it holds the rules in force, the names given out, the connections open.
//! - `dns` answers lookups; `sniff` reads a name off a connection's first bytes; `proxy` opens HTTP.
//!
//! Each sandbox has a stack, a switch and tasks of its own. Buffers are bounded everywhere, and what cannot be
//! taken now is not read: a slow side slows the other down, nothing grows.
//!
//! What comes from a sandbox is hostile until shown otherwise, and so is what comes from outside.

mod dns;
mod flow;
mod fold;
mod ledger;
mod outside;
mod proxy;
mod reserved;
mod rules;
mod sniff;
mod stack;
mod switch;
#[cfg(test)]
mod testing;

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use self::flow::Switch;
use self::ledger::Ledger;
use self::stack::Stack;
use self::switch::Switchboard;
use crate::model::{Connection, Device, SessionId};

pub use ledger::{Journal, Traffic};
pub use outside::{Outside, OutsideSettings};
pub use proxy::{Authority, BadAuthority};
pub use rules::{Brokered, Rules};

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
pub struct Start {
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
    pub outside: Arc<Outside>,
    /// Who signs for names whose requests are judged.
    pub authority: Arc<Authority>,
}

/// The network of one session. It ends when this is closed or dropped.
#[derive(Debug)]
pub struct Network {
    switch: Arc<Switchboard>,
    stack: Stack,
}

impl Network {
    /// Begins to answer the device.
    ///
    /// # Errors
    ///
    /// Returns an error when the device cannot be used.
    pub fn start(start: Start) -> io::Result<Self> {
        let ledger = Ledger::new(start.session, start.journal, start.before);
        let switch = Switchboard::new(start.rules, start.outside, start.authority, ledger);
        let stack = Stack::start(start.device, Arc::clone(&switch) as Arc<dyn Switch>)?;
        Ok(Self { switch, stack })
    }

    /// Puts other rules in force, at once: connections that no longer fit are cut.
    pub fn set_rules(&self, rules: Arc<Rules>) {
        self.switch.set_rules(rules);
    }

    /// How much went each way.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        self.switch.traffic()
    }

    /// Adds what went between the sandbox and the outside by another way: connections to its ports.
    pub fn count(&self, traffic: Traffic) {
        self.switch.count(traffic);
    }

    /// What is open.
    #[must_use]
    pub fn open(&self) -> Vec<Connection> {
        self.switch.open_now()
    }

    /// Ends it: every connection is gone when this returns, and in the journal. Answers with how much went each way.
    pub async fn close(self) -> Traffic {
        self.stack.close().await;
        self.switch.finish();
        self.switch.traffic()
    }
}
