//! Runs and approvals: pieces of work that somebody reviews, and questions that hold an effect until somebody answers.
//!
//! `docs/formats/runs.md` describes what is on disk and what happens after a crash. Documents are held in memory as they are
//! on disk; a change is on disk before it is in memory, and in memory before it is acted on.

pub(in crate::engine) mod approvals;
pub(in crate::engine) mod runs;
