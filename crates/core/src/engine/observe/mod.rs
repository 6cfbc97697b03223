//! What operators and watchers see: the event feed and the journal of network connections.

pub(in crate::engine) mod events;
pub(in crate::engine) mod network_journal;
