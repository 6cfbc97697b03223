//! What happened, and who is notified: events, the audit log, webhooks.

pub(super) mod audit;
pub(super) mod event;
pub(super) mod webhook;
