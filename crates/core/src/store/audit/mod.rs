//! The audit log on disk: chains of entries in segments, each with a signed head.
//!
//! `docs/formats/audit.md` is the format and its rules. One task of the engine writes
//! ([`AuditWriter`]); any number of readers read ([`read_audit`]) and verify ([`verify_audit`]). They
//! share nothing but the files.
//!
//! | module | decides |
//! |---|---|
//! | `line` | how an entry is written, hashed and read |
//! | `head` | what a head says, and whether it was signed here |
//! | `segments` | where chains and segments lie |
//! | `writer` | what is appended, synced, continued after a crash, and removed |
//! | `read` | which entries a reader gets |
//! | `verify` | what is wrong with a chain |

mod head;
mod line;
mod read;
mod segments;
mod verify;
mod writer;

#[cfg(test)]
mod tests;

pub use head::{AuditHead, AuditKey};
pub use read::{AuditPage, AuditPosition, last_audit_entry, read_audit};
pub use segments::audit_chains;
pub use verify::{AuditFinding, AuditReport, verify_audit};
pub use writer::{AuditResumed, AuditWriter};
