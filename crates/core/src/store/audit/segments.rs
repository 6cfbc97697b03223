//! Where chains and their segments lie.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use crate::model::AuditChain;

/// The directory of a chain below `audit/`.
pub(super) fn dir_of(audit: &Path, chain: &AuditChain) -> PathBuf {
    match chain {
        AuditChain::Host => audit.join("host"),
        AuditChain::Project(name) => audit.join("projects").join(name.as_str()),
    }
}

/// The chains below `audit/`.
///
/// # Errors
///
/// Returns the system's error when a directory cannot be read.
pub fn audit_chains(audit: &Path) -> io::Result<Vec<AuditChain>> {
    let mut found = Vec::new();
    if dir_of(audit, &AuditChain::Host).is_dir() {
        found.push(AuditChain::Host);
    }
    for name in names(&audit.join("projects"))? {
        found.extend(name.parse().ok().map(AuditChain::Project));
    }
    found.sort();
    Ok(found)
}

pub(super) fn path_of(dir: &Path, first: u64) -> PathBuf {
    dir.join(format!("{first:020}.jsonl"))
}

/// The segments of a chain by the number of their first entry, in order.
pub(super) fn list_segments(dir: &Path) -> io::Result<Vec<u64>> {
    let mut found = Vec::new();
    for name in names(dir)? {
        found.extend(name.strip_suffix(".jsonl").and_then(|stem| stem.parse::<u64>().ok()));
    }
    found.sort_unstable();
    Ok(found)
}

fn names(dir: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut found = Vec::new();
    for entry in entries {
        found.extend(entry?.file_name().into_string().ok());
    }
    Ok(found)
}

/// Makes the entries of a directory durable.
pub(super) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}
