//! What is alive: the turn of each sandbox, and the state of a running one (agent, commands, services, network, disk room).
//!
//! This folder holds the state. The components above change it: `network` the network, `session` commands and services,
//! `integrity` the room on the disk, `lifecycle` everything when a session begins and ends. `freeze_guard` keeps processes
//! frozen for as long as one of them needs that.

pub(in crate::engine) mod changes;
pub(in crate::engine) mod end_cause;
pub(in crate::engine) mod freeze_guard;
pub(in crate::engine) mod live;
pub(in crate::engine) mod measured;
pub(in crate::engine) mod network;
pub(in crate::engine) mod rest;
pub(in crate::engine) mod seal_under_way;
pub(in crate::engine) mod services;
pub(in crate::engine) mod stdin;
pub(in crate::engine) mod tracked;
pub(in crate::engine) mod turns;
pub(in crate::engine) mod upload_allowance;
pub(in crate::engine) mod write_hold;
