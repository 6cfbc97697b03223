//! What operators and watchers see: the event feed and the journal of network connections.
//!
//! Figures for `/metrics` are counted in memory (`meters`).
//!
//! The feed and the journal are written by a task of their own each. Callers put their reports in a
//! bounded queue and never wait for the disk; what does not fit is counted as lost. They decide
//! nothing and use no other component, so all others may use them.

pub(in crate::engine) mod events;
pub(in crate::engine) mod meters;
pub(in crate::engine) mod network_journal;
