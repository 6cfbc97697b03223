//! The engine of Sandkeep. It has no HTTP, no terminal and no environment variables.
//!
//! In reading order:
//!
//! - [`model`]: the nouns; parsed at the edge, trusted inside.
//! - [`engine`]: what happens to them, in components: lifecycle, commands, snapshots, network, tenancy. One operation at a time
//!   changes a sandbox.
//! - [`catalog`]: the only writer of records: saves them in the store and in the index.
//! - [`store`]: the data directory: manifests, which are the truth, layers, memory, images; garbage collection and fsck.
//! - [`db`]: the index over the manifests.
//! - [`driver`]: isolation backends, which turn a described root into running processes: containers and microVMs.
//! - [`guest`]: the host's end of the agent link.
//! - [`net`]: a sandbox's network: a user-space stack, policy, metering, credentials.
//! - [`secret`]: the server's key, what is sealed with it, and what is kept out of sight.
//!
//! Small modules that all of them may use: [`dockerfile`] (what Dockerfiles say), [`embedded`] (the agent and other programs that are part of this one), [`failpoint`]
//! (where tests kill the daemon), `keyed_lock`, `release` (unmounts in the background), `warm_pool`.
//!
//! `engine` uses all others. `catalog` uses `store` and `db`; none of the other six sees another. A table in
//! `docs/ARCHITECTURE.md` says so, and `tests/fast/layering.rs` checks it.

#![forbid(unsafe_code)]

pub mod catalog;
pub mod db;
pub mod dockerfile;
pub mod driver;
pub mod embedded;
pub mod engine;
pub mod failpoint;
pub mod guest;
mod keyed_lock;
pub mod model;
pub mod net;
mod release;
pub mod secret;
pub mod store;
mod warm_pool;
