//! The engine's methods for fronts: [`Engine`](crate::engine::Engine), by subject.
//!
//! A call that needs a running sandbox wakes it first (`lifecycle`) and then does its work (`session`). Nothing below calls
//! anything here.

pub(in crate::engine) mod approvals;
mod audit;
mod builds;
mod commands;
mod drives;
mod events;
mod files;
mod forks;
mod health;
mod network;
mod ports;
mod projects;
pub(in crate::engine) mod runs;
mod sandboxes;
mod secrets;
mod services;
mod sessions;
mod snapshots;
pub(in crate::engine) mod stats;
mod trash;
pub(in crate::engine) mod usage;
mod webhooks;
