//! A line of a segment: how it is written, hashed and read.

use std::io::{self, BufRead, Read as _};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::model::{AuditChain, AuditRecord, Timestamp};

/// The version of segments and heads.
pub(super) const FORMAT: u32 = 1;
/// A longer line was not written by us.
pub(super) const LINE_BYTES: u64 = 32 << 10;
/// What precedes the hash of a line.
const HASH: &[u8] = b",\"hash\":\"";
/// How many digits a hash has.
const DIGITS: usize = 64;

/// The first line of a segment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SegmentHeader {
    pub(super) format: u32,
    pub(super) chain: String,
    pub(super) first: u64,
    pub(super) prev: String,
    pub(super) at: Timestamp,
}

/// What of a line links it to the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct EntryLink {
    pub(super) seq: u64,
    pub(super) prev: String,
    /// What it says its hash is.
    pub(super) hash: String,
    /// What its hash is.
    pub(super) found: String,
}

/// The hash that stands before the first entry of a chain.
pub(super) fn genesis(chain: &AuditChain) -> String {
    hex::encode(Sha256::digest(format!("sandkeep audit 1 {chain}")))
}

/// Writes an entry as a line, and answers with its hash.
pub(super) fn encode(seq: u64, prev: &str, record: &AuditRecord) -> io::Result<(Vec<u8>, String)> {
    let body = serde_json::to_string(record)?;
    let fields = body.strip_prefix('{').and_then(|body| body.strip_suffix('}'));
    let fields = fields.ok_or_else(|| io::Error::other("a record is no JSON object"))?;
    let mut line = format!("{{\"seq\":{seq},\"prev\":\"{prev}\",{fields}").into_bytes();
    let hash = hex::encode(Sha256::digest(&line));
    line.extend_from_slice(HASH);
    line.extend_from_slice(hash.as_bytes());
    line.extend_from_slice(b"\"}\n");
    Ok((line, hash))
}

/// Reads what links a line, which has no newline; nothing if it is no entry.
pub(super) fn link(line: &[u8]) -> Option<EntryLink> {
    #[derive(Deserialize)]
    struct Numbered {
        seq: u64,
        prev: String,
        hash: String,
    }
    let Numbered { seq, prev, hash } = serde_json::from_slice(line).ok()?;
    // Where the hash does not stand at the end, nothing can have been hashed to it.
    let end = line.len().checked_sub(HASH.len() + DIGITS + 2);
    let hashed = end.filter(|end| line[*end..].starts_with(HASH)).map_or(line, |end| &line[..end]);
    Some(EntryLink { seq, prev, hash, found: hex::encode(Sha256::digest(hashed)) })
}

/// What was read of a segment.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum LineRead {
    /// A whole line, in the buffer without its newline.
    Line,
    /// The rest of the file has no newline; that many bytes.
    Unfinished(u64),
    /// A line that is too long; that many bytes, its newline included.
    TooLong(u64),
    /// Nothing is left.
    End,
}

/// Reads a line into `line`.
pub(super) fn read_line(file: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<LineRead> {
    line.clear();
    let length = file.by_ref().take(LINE_BYTES).read_until(b'\n', line)? as u64;
    if length == 0 {
        return Ok(LineRead::End);
    }
    if line.last() == Some(&b'\n') {
        line.pop();
        return Ok(LineRead::Line);
    }
    if length < LINE_BYTES {
        return Ok(LineRead::Unfinished(length));
    }
    let mut skipped = length;
    loop {
        let buffer = file.fill_buf()?;
        if buffer.is_empty() {
            return Ok(LineRead::Unfinished(skipped));
        }
        let end = buffer.iter().position(|byte| *byte == b'\n');
        let taken = end.map_or(buffer.len(), |end| end + 1);
        file.consume(taken);
        skipped += taken as u64;
        if end.is_some() {
            return Ok(LineRead::TooLong(skipped));
        }
    }
}
