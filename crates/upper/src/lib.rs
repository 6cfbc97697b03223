//! Finds what changed in the upper directory of an overlay since the last look.
//!
//! A sandbox writes through overlayfs into one *upper* directory, on top of *lower* layers that never
//! change. A [`look`] walks the upper directory and compares every name with the [`Index`] of the look
//! before: inode, change time, size and kind. The result is the set of paths that were created, modified
//! and deleted *as the sandbox saw them*: a whiteout is a deletion, a file that was copied up is a
//! modification, a directory that was copied up only to hold a changed file is nothing.
//!
//! The daemon does this for containers, the agent for virtual machines. That is why it is a crate.
//!
//! ```text
//! index of the last look ─┐
//!                         ├─ look ──> index of this look, changes between the two
//! upper directory ────────┤
//! lower layers ───────────┘  asked only about names that are new in the upper directory
//! ```
//!
//! # Limits
//!
//! - The upper directory may change meanwhile. A name that vanishes is skipped; a caller that wants
//!   an exact answer looks while nothing writes.
//! - Trees are made by sandboxes and may be hostile. A look visits at most [`Limits::names`] names and
//!   [`MAX_DEPTH`] nested directories. Beyond that it stops, and says so ([`Look::complete`]).
//! - A file that is written twice within one tick of the kernel's clock, once before a look and once
//!   after it, and keeps its size, looks the same. Kernels since 6.13 have finer change times.
//! - Extended attributes of directories are not compared: overlayfs sets its own on them.

#![forbid(unsafe_code)]

mod changes;
mod index;
mod lower;
mod text;
mod walk;

pub use changes::{Change, ChangeKind, ChangeList, Changes, Under};
pub use index::{Index, Kind};
pub use lower::Lower;
pub use text::path_text;
pub use walk::{Limits, Look, MAX_DEPTH, Visited, look};
