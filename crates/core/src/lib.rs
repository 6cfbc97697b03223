//! The engine of Sandkeep. No HTTP of its own to speak, no terminal, no environment variables.
//!
//! In reading order:
//!
//! - [`model`]: the nouns; parsed at the edge, trusted inside.
//! - [`engine`]: what happens to them: lifecycle, one task per live sandbox, commands, snapshots.
//! - [`driver`]: isolation backends, which turn a described root into running processes.
//! - [`guest`]: the host's end of the agent link.
//! - [`net`]: a sandbox's network: a user-space stack, policy, metering, credentials.
//! - [`secret`]: the server's key, what is sealed with it, and what is kept out of sight.
//! - [`store`]: layers, snapshots, images and the other manifests on disk, which are the truth.
//! - [`db`]: the index over them.
//! - [`catalog`]: the seam in front of manifests and index, through which records are saved.
//!
//! `engine` uses the other seven. `catalog` uses `store` and `db`; none of the other six sees another.

#![forbid(unsafe_code)]

pub mod catalog;
pub mod db;
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
