//! Verifies a chain and reports what is wrong with it.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, BufReader};
use std::path::Path;

use serde::Serialize;

use super::head::{AuditHead, AuditKey, HeadRead};
use super::line::{EntryLink, LineRead, genesis, link, read_line};
use super::segments::{dir_of, list_segments, path_of};
use super::writer::next_header;
use crate::model::{AuditChain, AuditEntry, Timestamp};

/// How many findings a report lists.
const FINDINGS: usize = 100;
/// How often a chain is read again because a server removed segments of it meanwhile.
const ATTEMPTS: usize = 5;

/// What is known of a chain after all of it was read.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct AuditReport {
    /// The chain: `host` or `project/default`.
    pub chain: String,
    /// How many entries there are.
    pub entries: u64,
    /// The number of the first entry that is expected to be there: those before were removed because the
    /// chain reached its limit.
    pub first: u64,
    /// The number and the hash of the last existing entry.
    pub last: u64,
    /// The hash of it.
    pub last_hash: String,
    /// The number of the last entry that the head was signed for.
    pub signed: u64,
    /// How many bytes follow the last entry and are none: an append that was not finished.
    pub unfinished_bytes: u64,
    /// What is wrong; the first of them.
    pub findings: Vec<AuditFinding>,
    /// How many there are.
    pub found: u64,
}

/// One thing that is wrong with a chain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[allow(missing_docs)] // the messages say it
pub enum AuditFinding {
    Changed { seq: u64, segment: u64, line: u64 },
    Replaced { seq: u64, by: String },
    Missing { from: u64, to: u64, segment: bool },
    Reordered { seq: u64, after: u64 },
    Repeated { seq: u64, segment: u64, line: u64 },
    Unreadable { segment: u64, line: u64 },
    Header { segment: u64, reason: String },
    Cut { last: u64, signed: u64 },
    HeadMissing,
    HeadChanged { reason: String },
    HeadOtherKey,
    NotAsNoted { seq: u64 },
    Damaged { seq: u64, at: Timestamp, found: String },
}

impl fmt::Display for AuditFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Changed { seq, segment, line } => {
                write!(f, "entry {seq} was changed (line {line} of `{segment:020}.jsonl`)")
            }
            Self::Replaced { seq, by } => {
                write!(f, "entry {seq} is not the one that {by} was made after")
            }
            Self::Missing { from, to, segment } => {
                match from == to {
                    true => write!(f, "entry {from} is missing")?,
                    false => write!(f, "entries {from} to {to} are missing")?,
                }
                if *segment {
                    f.write_str(": the end of a segment, or a whole segment")
                } else {
                    Ok(())
                }
            }
            Self::Reordered { seq, after } => write!(f, "entry {seq} comes after entry {after}"),
            Self::Repeated { seq, segment, line } => {
                write!(f, "entry {seq} is there again (line {line} of `{segment:020}.jsonl`)")
            }
            Self::Unreadable { segment, line } => {
                write!(f, "line {line} of `{segment:020}.jsonl` is not an entry")
            }
            Self::Header { segment, reason } => {
                write!(f, "the header of `{segment:020}.jsonl` {reason}")
            }
            Self::Cut { last, signed } => {
                write!(
                    f,
                    "the end was cut off: it goes to entry {last}, and was signed up to entry {signed}"
                )
            }
            Self::HeadMissing => f.write_str("the signed head is missing: the end may be cut off"),
            Self::HeadChanged { reason } => {
                write!(f, "the signed head was changed ({reason}): the end may be cut off")
            }
            Self::HeadOtherKey => {
                f.write_str("the head was signed with another key than `audit.key`")
            }
            Self::Damaged { seq, at, found } => {
                write!(f, "entry {seq}: at {at} the server found that {found}")
            }
            Self::NotAsNoted { seq } => {
                write!(f, "entry {seq} is not the one that was noted, or is not there any more")
            }
        }
    }
}

impl AuditReport {
    /// How many entries follow those that the head was signed for.
    #[must_use]
    pub fn unsigned(&self) -> u64 {
        self.last.saturating_sub(self.signed)
    }

    fn add(&mut self, finding: AuditFinding) {
        self.found += 1;
        if self.findings.len() < FINDINGS {
            self.findings.push(finding);
        }
    }
}

/// Reads all of a chain below `audit` and says what is wrong with it. `noted` is an entry that somebody wrote
/// down: its number and its hash, or the beginning of it.
///
/// # Errors
///
/// Returns the system's error when a file cannot be read.
pub fn verify_audit(
    audit: &Path,
    chain: &AuditChain,
    key: &AuditKey,
    noted: Option<(u64, &str)>,
) -> io::Result<AuditReport> {
    let dir = dir_of(audit, chain);
    let mut attempt = 0;
    loop {
        attempt += 1;
        match verify_once(&dir, chain, key, noted) {
            // A server that writes removed a segment since they were listed.
            Err(error) if error.kind() == io::ErrorKind::NotFound && attempt < ATTEMPTS => {}
            outcome => return outcome,
        }
    }
}

fn verify_once(
    dir: &Path,
    chain: &AuditChain,
    key: &AuditKey,
    noted: Option<(u64, &str)>,
) -> io::Result<AuditReport> {
    // Before the segments: what is written meanwhile follows what this head is for.
    let read = AuditHead::read(dir, chain, key)?;
    let mut segments = list_segments(dir)?;
    let mut report = AuditReport { chain: chain.to_string(), ..AuditReport::default() };
    let head = match read {
        HeadRead::Signed(head) => Some(head),
        HeadRead::Missing => {
            if !segments.is_empty() {
                report.add(AuditFinding::HeadMissing);
            }
            None
        }
        HeadRead::Changed(reason) => {
            report.add(AuditFinding::HeadChanged { reason });
            None
        }
        HeadRead::OtherKey(head) => {
            report.add(AuditFinding::HeadOtherKey);
            Some(head)
        }
    };
    let removed = head.as_ref().map_or(0, |head| head.removed);
    // What the head says was removed exists until a server gets to removing it, also after a crash.
    while segments.len() > 1 && segments[1] <= removed + 1 {
        segments.remove(0);
    }
    let mut walk = ChainWalk::new(chain, head, segments.first().copied(), noted, report);
    let count = segments.len();
    for (at, first) in segments.into_iter().enumerate() {
        walk.segment(&path_of(dir, first), first, at + 1 == count)?;
    }
    Ok(walk.finish())
}

/// Where the reading is.
struct ChainWalk<'a> {
    chain: &'a AuditChain,
    head: Option<AuditHead>,
    noted: Option<(u64, &'a str)>,
    noted_seen: bool,
    /// The number of the next entry.
    next: u64,
    /// The hashes that the entry before it may have; empty where that is not known.
    before: Vec<String>,
    /// Entries that were not where they should be, by the first of each range, with its last and whether a segment was to have
    /// them.
    missing: BTreeMap<u64, (u64, bool)>,
    /// Lines at the end that are no entries: where they are and how long.
    tail: Vec<(AuditFinding, u64)>,
    signed_hash: Option<String>,
    report: AuditReport,
}

impl<'a> ChainWalk<'a> {
    fn new(
        chain: &'a AuditChain,
        head: Option<AuditHead>,
        oldest: Option<u64>,
        noted: Option<(u64, &'a str)>,
        mut report: AuditReport,
    ) -> Self {
        let (next, before) = match &head {
            Some(head) if oldest.is_none_or(|oldest| oldest > head.removed) => {
                (head.removed + 1, head.removed_hash.clone())
            }
            // One that is to be removed still exists, or it is unknown what was removed.
            _ => (oldest.unwrap_or(1), String::new()),
        };
        let before = match next {
            1 => vec![genesis(chain)],
            _ if before.is_empty() => Vec::new(),
            _ => vec![before],
        };
        report.first = next;
        report.signed = head.as_ref().map_or(0, |head| head.seq);
        report.last = next.saturating_sub(1);
        let signed_hash = head
            .as_ref()
            .filter(|head| head.seq < next)
            .and_then(|head| (head.seq == head.removed).then(|| head.removed_hash.clone()));
        Self {
            chain,
            head,
            noted,
            noted_seen: false,
            next,
            before,
            missing: BTreeMap::new(),
            tail: Vec::new(),
            signed_hash,
            report,
        }
    }

    fn segment(&mut self, path: &Path, first: u64, newest: bool) -> io::Result<()> {
        self.end_of_tail();
        let file = File::open(path)?;
        let size = file.metadata()?.len();
        let mut file = BufReader::with_capacity(64 << 10, file);
        match next_header(&mut file)? {
            None if newest && self.head.as_ref().is_some_and(|head| first == head.seq + 1) => {
                // A segment that was begun by a server that died.
                self.report.unfinished_bytes += size;
                return Ok(());
            }
            None => self.header(first, "cannot be read"),
            Some((header, _)) if header.chain != self.chain.to_string() => {
                self.header(first, &format!("is of chain `{}`", header.chain));
            }
            Some((header, _)) if header.first != first => {
                self.header(first, &format!("is of the segment that begins with {}", header.first));
            }
            Some((header, _)) => {
                if first > self.next {
                    self.gap(first, true);
                    self.before = vec![header.prev.clone()];
                }
                let fits = self.before.is_empty() || self.before.contains(&header.prev);
                if first == self.next && !fits {
                    self.header(first, "is not of a segment that follows the one before");
                }
            }
        }
        let mut line = Vec::new();
        let mut number = 1;
        loop {
            number += 1;
            let length = match read_line(&mut file, &mut line)? {
                LineRead::End => return Ok(()),
                LineRead::Line => line.len() as u64 + 1,
                LineRead::Unfinished(length) | LineRead::TooLong(length) => {
                    line.clear();
                    length
                }
            };
            match link(&line) {
                Some(link) => {
                    let is_intact = link.hash == link.found;
                    self.entry(link, (first, number), length);
                    if is_intact {
                        self.damage(&line);
                    }
                }
                None => {
                    let finding = AuditFinding::Unreadable { segment: first, line: number };
                    self.tail.push((finding, length));
                }
            }
        }
    }

    fn header(&mut self, segment: u64, reason: &str) {
        self.report.add(AuditFinding::Header { segment, reason: reason.to_owned() });
    }

    /// What a server wrote down of a chain that was not as it was left. What is missing may show nowhere else: where the
    /// head was gone, the server could not know up to where the chain went.
    fn damage(&mut self, line: &[u8]) {
        const ACTION: &[u8] = b"\"audit.damaged\"";
        if !line.windows(ACTION.len()).any(|part| part == ACTION) {
            return;
        }
        let entry = serde_json::from_slice::<AuditEntry>(line).ok();
        let Some(entry) = entry.filter(|entry| entry.record.action == "audit.damaged") else {
            return;
        };
        let AuditEntry { seq, mut record, .. } = entry;
        let found = record.detail.remove("found").unwrap_or_else(|| "it was damaged".to_owned());
        self.report.add(AuditFinding::Damaged { seq, at: record.at, found });
    }

    fn entry(&mut self, link: EntryLink, (segment, line): (u64, u64), length: u64) {
        let is_signed = self.head.as_ref().is_none_or(|head| link.seq <= head.seq);
        let is_good = link.seq == self.next
            && link.hash == link.found
            && (self.before.is_empty() || self.before.contains(&link.prev));
        if !is_signed && (!is_good || !self.tail.is_empty()) {
            // After the head: what a power cut left of an append that was never reported as done.
            self.tail.push((AuditFinding::Unreadable { segment, line }, length));
            return;
        }
        self.end_of_tail();
        let EntryLink { seq, prev, hash, found } = link;
        if hash != found {
            self.report.add(AuditFinding::Changed { seq, segment, line });
        }
        if seq < self.next {
            match self.take_missing(seq) {
                true => {
                    let after = self.next - 1;
                    self.report.entries += 1;
                    self.report.add(AuditFinding::Reordered { seq, after });
                }
                false => self.report.add(AuditFinding::Repeated { seq, segment, line }),
            }
            return;
        }
        if seq > self.next {
            self.gap(seq, false);
        } else if !self.before.is_empty() && !self.before.contains(&prev) && hash == found {
            let by = format!("entry {seq}");
            self.report.add(AuditFinding::Replaced { seq: seq.saturating_sub(1), by });
        }
        self.report.entries += 1;
        self.report.last = seq;
        self.report.last_hash.clone_from(&found);
        self.next = seq + 1;
        if let Some((noted, beginning)) = self.noted
            && noted == seq
        {
            self.noted_seen = !beginning.is_empty() && found.starts_with(beginning);
        }
        if self.head.as_ref().is_some_and(|head| head.seq == seq) {
            // A changed one was reported already.
            self.signed_hash = Some(if hash == found { hash.clone() } else { String::new() });
        }
        // The entry after a changed one was made after it as it was.
        self.before = vec![hash, found];
    }

    /// Entries from the next one up to `seq` are not where they should be.
    fn gap(&mut self, seq: u64, segment: bool) {
        self.missing.insert(self.next, (seq - 1, segment));
        self.next = seq;
        self.before.clear();
    }

    /// Whether an entry is among the missing ones. It is not from here on.
    fn take_missing(&mut self, seq: u64) -> bool {
        let range = self.missing.range(..=seq).next_back().map(|(from, to)| (*from, *to));
        let Some((from, (to, segment))) = range.filter(|(_, (to, _))| *to >= seq) else {
            return false;
        };
        self.missing.remove(&from);
        if from < seq {
            self.missing.insert(from, (seq - 1, segment));
        }
        if seq < to {
            self.missing.insert(seq + 1, (to, segment));
        }
        true
    }

    /// Lines that are no entries are not at the end: something follows them.
    fn end_of_tail(&mut self) {
        for (finding, _) in std::mem::take(&mut self.tail) {
            self.report.add(finding);
        }
    }

    fn finish(mut self) -> AuditReport {
        let signed = self.report.signed;
        if self.report.last < signed {
            self.end_of_tail();
        } else {
            self.report.unfinished_bytes += self.tail.iter().map(|(_, length)| length).sum::<u64>();
        }
        for (from, (to, segment)) in std::mem::take(&mut self.missing) {
            self.report.add(AuditFinding::Missing { from, to, segment });
        }
        if let Some(head) = self.head.take() {
            if self.report.last < signed {
                self.report.add(AuditFinding::Cut { last: self.report.last, signed });
            } else if let Some(hash) = self.signed_hash.take()
                && !hash.is_empty()
                && hash != head.hash
            {
                let by = "the signed head".to_owned();
                self.report.add(AuditFinding::Replaced { seq: signed, by });
            }
        }
        if let Some((seq, _)) = self.noted
            && !self.noted_seen
        {
            self.report.add(AuditFinding::NotAsNoted { seq });
        }
        self.report
    }
}
