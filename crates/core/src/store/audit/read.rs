//! Reads entries of a chain, oldest first.

use std::fs::File;
use std::io::{self, BufReader, Seek as _, SeekFrom};
use std::path::Path;

use super::line::{LineRead, link, read_line};
use super::segments::{dir_of, list_segments, path_of};
use crate::model::{AuditChain, AuditEntry, AuditFilter, Timestamp};

/// How much the clock may have gone back, for what is skipped because it was written before a time.
const CLOCK: jiff::SignedDuration = jiff::SignedDuration::from_hours(24);

/// Where a reader is: a segment, and the first byte in it that was not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AuditPosition {
    segment: u64,
    offset: u64,
}

/// What a reader got.
#[derive(Debug, Default)]
pub struct AuditPage {
    /// The entries, in order.
    pub entries: Vec<AuditEntry>,
    /// Where to read on; absent when there is nothing to read yet.
    pub position: Option<AuditPosition>,
    /// The number of the last entry that was looked at.
    pub last: u64,
    /// Whether everything that exists was looked at.
    pub complete: bool,
}

/// Reads entries that `filter` wants, with numbers above `after`, at most `count`, and looks at about `bytes`
/// bytes, from `position` on if there is one. Lines that are no entries are skipped: verification
/// reports them.
///
/// # Errors
///
/// Returns the system's error when a file cannot be read.
pub fn read_audit(
    audit: &Path,
    chain: &AuditChain,
    position: Option<AuditPosition>,
    after: u64,
    filter: &AuditFilter,
    (count, bytes): (usize, u64),
) -> io::Result<AuditPage> {
    let dir = dir_of(audit, chain);
    let mut page = AuditPage { position, last: after, ..AuditPage::default() };
    let mut budget = bytes;
    loop {
        let segments = list_segments(&dir)?;
        let at = match page.position {
            Some(at) => at,
            None => match begin(&dir, &segments, after, filter.since)? {
                Some(segment) => AuditPosition { segment, offset: 0 },
                None => {
                    page.complete = true;
                    return Ok(page);
                }
            },
        };
        let file = match File::open(path_of(&dir, at.segment)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                // It was removed meanwhile: reading continues with the oldest that exists.
                page.position = segments
                    .iter()
                    .find(|first| **first > at.segment)
                    .map(|segment| AuditPosition { segment: *segment, offset: 0 });
                if page.position.is_none() {
                    page.complete = true;
                    return Ok(page);
                }
                continue;
            }
            Err(error) => return Err(error),
        };
        let at_end = read_segment(file, at, filter, (count, &mut budget), after, &mut page)?;
        if !at_end {
            return Ok(page);
        }
        match segments.into_iter().find(|first| *first > at.segment) {
            Some(segment) => page.position = Some(AuditPosition { segment, offset: 0 }),
            None => {
                page.complete = true;
                return Ok(page);
            }
        }
    }
}

/// The number of the last entry of a chain; 0 if it has none.
///
/// # Errors
///
/// Returns the system's error when a file cannot be read.
pub fn last_audit_entry(audit: &Path, chain: &AuditChain) -> io::Result<u64> {
    let dir = dir_of(audit, chain);
    let Some(newest) = list_segments(&dir)?.pop() else { return Ok(0) };
    let mut file = BufReader::with_capacity(64 << 10, File::open(path_of(&dir, newest))?);
    let (mut line, mut last) = (Vec::new(), newest.saturating_sub(1));
    loop {
        match read_line(&mut file, &mut line)? {
            LineRead::End | LineRead::Unfinished(_) => return Ok(last),
            LineRead::Line => last = link(&line).map_or(last, |link| last.max(link.seq)),
            LineRead::TooLong(_) => {}
        }
    }
}

/// Reads on in a segment. Says whether its end was reached.
fn read_segment(
    mut file: File,
    at: AuditPosition,
    filter: &AuditFilter,
    (count, budget): (usize, &mut u64),
    after: u64,
    page: &mut AuditPage,
) -> io::Result<bool> {
    file.seek(SeekFrom::Start(at.offset))?;
    let mut file = BufReader::with_capacity(64 << 10, file);
    let (mut offset, mut line) = (at.offset, Vec::new());
    loop {
        page.position = Some(AuditPosition { segment: at.segment, offset });
        if page.entries.len() >= count || *budget == 0 {
            return Ok(false);
        }
        let length = match read_line(&mut file, &mut line)? {
            // An unfinished line is one that is being written.
            LineRead::End | LineRead::Unfinished(_) => return Ok(true),
            LineRead::Line => line.len() as u64 + 1,
            LineRead::TooLong(length) => {
                line.clear();
                length
            }
        };
        offset += length;
        *budget = budget.saturating_sub(length);
        let Ok(entry) = serde_json::from_slice::<AuditEntry>(&line) else { continue };
        if entry.seq > after {
            page.last = page.last.max(entry.seq);
            if filter.wants(&entry.record) {
                page.entries.push(entry);
            }
        }
    }
}

/// The segment to begin with.
fn begin(
    dir: &Path,
    segments: &[u64],
    after: u64,
    since: Option<Timestamp>,
) -> io::Result<Option<u64>> {
    let mut from = segments.partition_point(|first| *first <= after + 1).saturating_sub(1);
    if let Some(since) = since.and_then(|since| since.checked_sub(CLOCK).ok()) {
        while let Some(next) = segments.get(from + 1) {
            let first = match first_at(&path_of(dir, *next)) {
                Ok(first) => first,
                Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                Err(error) => return Err(error),
            };
            // Everything in a segment was written before the next one was begun.
            if first.is_none_or(|first| first >= since) {
                break;
            }
            from += 1;
        }
    }
    Ok(segments.get(from).copied())
}

/// When the first entry of a segment was made; nothing if it is not as it was written. The header says when the segment
/// was begun, but no hash covers that.
fn first_at(path: &Path) -> io::Result<Option<Timestamp>> {
    let mut file = BufReader::new(File::open(path)?);
    let mut line = Vec::new();
    for _ in 0..2 {
        if read_line(&mut file, &mut line)? != LineRead::Line {
            return Ok(None);
        }
    }
    if link(&line).is_none_or(|link| link.hash != link.found) {
        return Ok(None);
    }
    let entry = serde_json::from_slice::<AuditEntry>(&line).ok();
    Ok(entry.map(|entry| entry.record.at))
}
