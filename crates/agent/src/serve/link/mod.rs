//! The agent's end of the link to the daemon: decides which request a frame belongs to, and what is written when.
//!
//! - `transport`: a socket of its own per connection (container), or the one serial port (microVM).
//! - `connection`: reads frames and dispatches requests.
//! - `outbound`: queues and writes frames.

pub(crate) mod connection;
pub(crate) mod outbound;
pub(crate) mod transport;
