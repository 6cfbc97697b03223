//! Tests that need no root and no machine: the engine on a fake host, records in memory, sources and documents.

#![allow(clippy::unwrap_used)] // helpers of tests may panic as tests may

mod answer_links;
mod approvals;
mod catalog;
mod documents;
mod drivers;
mod engine;
mod layering;
mod runs;
mod shape;
mod spawns;
mod waiting;
mod webhooks;
