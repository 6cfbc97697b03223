//! The words the daemon and the agent agree on.
//!
//! Five conversations, all versioned from the first byte:
//!
//! - [`cage`]: what `keep-agent` builds for the container driver before it becomes PID 1. One JSON
//!   document on standard input, one JSON document back on standard output.
//! - [`machine`]: what `keep-agent` starts for the microvm driver, in the same way, and the names
//!   of its devices.
//! - [`helper`]: programs of the host that `keep-agent` confines and runs for the daemon.
//! - [`ask`]: what programs inside a sandbox ask the agent to have answered.
//! - [`link`]: what daemon and agent say to each other while a sandbox lives, in the frames of
//!   [`frame`], over a Unix socket, or in the marks of [`serial`] over a virtio serial port.
//!
//! Both unpack archives, and read those with [`sparse`] files in the same way.
//!
//! `docs/formats/agent-link.md` describes the same with a worked example. Only serde lives here:
//! the daemon brings its own I/O and so does the agent.

#![forbid(unsafe_code)]

pub mod ask;
pub mod cage;
pub mod frame;
pub mod helper;
pub mod link;
pub mod machine;
pub mod serial;
pub mod sparse;
