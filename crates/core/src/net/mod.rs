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

mod flow;
mod ledger;
mod proxy;
mod stack;

use std::net::{Ipv4Addr, Ipv6Addr};

pub use ledger::{Journal, Traffic};
pub use proxy::{Authority, BadAuthority};

/// The sandbox's own address.
pub const GUEST_V4: Ipv4Addr = Ipv4Addr::new(100, 96, 0, 2);
/// Its gateway and name server.
pub const GATEWAY_V4: Ipv4Addr = Ipv4Addr::new(100, 96, 0, 1);
/// The sandbox's own address.
pub const GUEST_V6: Ipv6Addr = Ipv6Addr::new(0xfd73, 0x616e, 0x646b, 0, 0, 0, 0, 2);
/// Its gateway and name server.
pub const GATEWAY_V6: Ipv6Addr = Ipv6Addr::new(0xfd73, 0x616e, 0x646b, 0, 0, 0, 0, 1);
/// How large a packet may be, on the device and in the stack.
pub const MTU: usize = 65_520;
