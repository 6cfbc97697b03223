//! Appends to chains, syncs them, continues them after a crash, and removes what is over the limit.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use super::head::{AuditHead, AuditKey, HeadRead};
use super::line::{FORMAT, LineRead, SegmentHeader, encode, genesis, link, read_line};
use super::segments::{dir_of, list_segments, path_of, sync_dir};
use crate::model::{AuditChain, AuditRecord, now};

/// How large a segment may be.
const SEGMENT_BYTES: u64 = 4 << 20;
/// The least that a segment may be, whatever the limit of a chain.
const LEAST_SEGMENT_BYTES: u64 = 16 << 10;
/// How many chains are open at one time.
pub(super) const OPEN: usize = 512;
/// How much may wait for a sync before it is synced without being asked.
const UNSYNCED_BYTES: usize = 1 << 20;

/// Appends entries. There is one in a daemon.
#[derive(Debug)]
pub struct AuditWriter {
    audit: PathBuf,
    key: AuditKey,
    limit: u64,
    segment_bytes: u64,
    open: HashMap<AuditChain, OpenChain>,
    /// How often something was appended.
    appends: u64,
}

#[derive(Debug)]
struct OpenChain {
    dir: PathBuf,
    /// The newest segment, and the number of its first entry.
    file: File,
    first: u64,
    size: u64,
    /// The number and the hash of the last entry.
    last: (u64, String),
    head: AuditHead,
    /// What was appended since the last sync. It is kept because a failed sync drops it from the page cache.
    unsynced: Vec<u8>,
    /// Whether a sync has failed, so that `unsynced` is to be written again.
    rewrite: bool,
    /// Which append was the last to it.
    used: u64,
}

/// What was found when a chain of an earlier daemon was opened.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AuditResumed {
    /// How many entries were there after those that the head was signed for.
    pub unsigned: u64,
    /// How many bytes of an unfinished append were removed.
    pub dropped_bytes: u64,
    /// What is missing or was changed, if the chain is not as it was left.
    pub damage: Option<String>,
}

impl AuditWriter {
    /// Opens the chains below `audit`, which is made when the first entry is written. A chain takes about
    /// `limit` bytes.
    #[must_use]
    pub fn new(audit: PathBuf, key: AuditKey, limit: u64) -> Self {
        let segment_bytes = (limit / 4).clamp(LEAST_SEGMENT_BYTES, SEGMENT_BYTES);
        Self { audit, key, limit, segment_bytes, open: HashMap::new(), appends: 0 }
    }

    /// Appends records to a chain, and returns what was found if it was opened for that and was not
    /// as a daemon leaves it. They are on stable storage after the next [`flush`](Self::flush).
    ///
    /// # Errors
    ///
    /// Returns the system's error; none of the records is in the chain then, as far as that can be known.
    pub fn append(
        &mut self,
        chain: &AuditChain,
        records: &[AuditRecord],
    ) -> io::Result<Option<AuditResumed>> {
        let mut resumed = None;
        if !self.open.contains_key(chain) {
            if self.open.len() >= OPEN {
                self.close_one();
            }
            let (mut opened, found) = self.open_chain(chain)?;
            if let Some(found) = found {
                self.append_to(&mut opened, chain, &[found.record(chain)])?;
                if found.damage.is_some() {
                    // No head is signed for the existing entries before the entry that reports the
                    // damage is one of them.
                    opened.flush(chain, &self.key)?;
                }
                resumed = Some(found);
            }
            self.open.insert(chain.clone(), opened);
        }
        let Some(mut open) = self.open.remove(chain) else { return Ok(resumed) };
        self.appends += 1;
        open.used = self.appends;
        let before = (open.size, open.last.clone(), open.unsynced.len());
        let (first, head) = (open.first, open.head.clone());
        match self.append_to(&mut open, chain, records) {
            Ok(()) => {
                self.open.insert(chain.clone(), open);
                Ok(resumed)
            }
            Err(error) => {
                let (size, last, unsynced) = before;
                // Where some of it was synced meanwhile, the chain is opened again from what is on disk.
                let is_same = open.first == first && open.head == head;
                if is_same && open.file.set_len(size).is_ok() {
                    (open.size, open.last) = (size, last);
                    open.unsynced.truncate(unsynced);
                    self.open.insert(chain.clone(), open);
                }
                Err(error)
            }
        }
    }

    fn append_to(
        &self,
        open: &mut OpenChain,
        chain: &AuditChain,
        records: &[AuditRecord],
    ) -> io::Result<()> {
        let mut text = Vec::new();
        for record in records {
            let (seq, prev) = (open.last.0 + 1, &open.last.1);
            let (line, hash) = encode(seq, prev, record)?;
            let size = open.size + text.len() as u64;
            let is_full = size + line.len() as u64 > self.segment_bytes;
            if is_full && seq > open.first {
                open.write(&text)?;
                text.clear();
                self.next_segment(open, chain)?;
            }
            text.extend_from_slice(&line);
            open.last = (seq, hash);
        }
        open.write(&text)?;
        if open.unsynced.len() > UNSYNCED_BYTES {
            open.flush(chain, &self.key)?;
        }
        Ok(())
    }

    /// Closes the chain that was not used for the longest time. What cannot be synced of it stays in its file, and is
    /// found there when it is opened again: other chains must not wait for it.
    fn close_one(&mut self) {
        let oldest = self.open.iter().min_by_key(|(_, open)| open.used);
        let Some(chain) = oldest.map(|(chain, _)| chain.clone()) else { return };
        let Some(mut open) = self.open.remove(&chain) else { return };
        if let Err(error) = open.flush(&chain, &self.key) {
            tracing::error!(%chain, %error, "a chain of the audit log was closed without a sync");
        }
    }

    /// Syncs all chains, and signs heads for what they have. Where that fails, the others are synced all the
    /// same, and what failed is tried again the next time.
    ///
    /// # Errors
    ///
    /// Returns the first of the system's errors.
    pub fn flush(&mut self) -> io::Result<()> {
        let mut failed = None;
        self.open.retain(|chain, open| match open.flush(chain, &self.key) {
            Ok(()) => true,
            Err(error) => {
                failed.get_or_insert(error);
                // Without its file it could never be synced; it is opened again from what exists.
                path_of(&open.dir, open.first).exists()
            }
        });
        failed.map_or(Ok(()), Err)
    }

    /// Whether something waits for a [`flush`](Self::flush).
    #[must_use]
    pub fn is_dirty(&self) -> bool {
        self.open.values().any(|open| open.last.0 > open.head.seq)
    }

    /// Ends a segment, begins the next one, and removes the oldest ones beyond the limit.
    fn next_segment(&self, open: &mut OpenChain, chain: &AuditChain) -> io::Result<()> {
        open.flush(chain, &self.key)?;
        let first = open.last.0 + 1;
        (open.file, open.size) = begin_segment(&open.dir, chain, first, &open.last.1)?;
        open.first = first;
        let segments = list_segments(&open.dir)?;
        let mut sizes = Vec::with_capacity(segments.len());
        for first in &segments {
            sizes.push(fs::metadata(path_of(&open.dir, *first))?.len());
        }
        // The one that was just begun will be as large as the others.
        let mut total = sizes.iter().sum::<u64>() + self.segment_bytes;
        let mut keep_from = 0;
        while total > self.limit && keep_from + 2 < segments.len() {
            total -= sizes[keep_from];
            keep_from += 1;
        }
        if keep_from == 0 {
            return Ok(());
        }
        let kept = segments[keep_from];
        let before = read_header(&path_of(&open.dir, kept))?.map(|header| header.prev);
        let removed = (kept - 1, before.unwrap_or_default());
        open.head = AuditHead::signed(
            &self.key,
            chain,
            (open.head.seq, &open.head.hash),
            (removed.0, &removed.1),
            now(),
        );
        // The head first: what it says was removed may be there or not.
        open.head.write(&open.dir)?;
        for first in &segments[..keep_from] {
            fs::remove_file(path_of(&open.dir, *first))?;
        }
        Ok(())
    }

    fn open_chain(&self, chain: &AuditChain) -> io::Result<(OpenChain, Option<AuditResumed>)> {
        let dir = dir_of(&self.audit, chain);
        make_dirs(&self.audit, &dir)?;
        let segments = list_segments(&dir)?;
        let head = match AuditHead::read(&dir, chain, &self.key)? {
            HeadRead::Signed(head) => head,
            HeadRead::Missing if segments.is_empty() => {
                let start = genesis(chain);
                let head = AuditHead::signed(&self.key, chain, (0, &start), (0, &start), now());
                // Before the first segment: a chain with segments must have a head.
                head.write(&dir)?;
                let begun = begin_segment(&dir, chain, 1, &start)?;
                return Ok((OpenChain::new(dir, 1, begun, (0, start), head), None));
            }
            HeadRead::Missing => return self.without_head(dir, chain, "its head is missing"),
            HeadRead::Changed(why) => {
                return self.without_head(dir, chain, &format!("its head was changed: {why}"));
            }
            HeadRead::OtherKey(_) => {
                return self.without_head(dir, chain, "its head was signed with another key");
            }
        };
        self.after_head(dir, chain, head, segments)
    }

    /// Opens a chain whose head can be relied on.
    fn after_head(
        &self,
        dir: PathBuf,
        chain: &AuditChain,
        head: AuditHead,
        mut segments: Vec<u64>,
    ) -> io::Result<(OpenChain, Option<AuditResumed>)> {
        while segments.len() > 1 && segments[1] <= head.removed + 1 {
            fs::remove_file(path_of(&dir, segments.remove(0)))?;
        }
        let mut scanned = None;
        if let Some(newest) = segments.last().copied() {
            let found = SegmentScan::of(&path_of(&dir, newest), chain, newest, head.seq)?;
            if found.header.is_none() && newest == head.seq + 1 {
                // It was begun by a daemon that died. Nothing can be in it.
                fs::remove_file(path_of(&dir, newest))?;
                segments.pop();
            } else {
                scanned = Some((newest, found));
            }
        }
        let expected = (head.seq, head.hash.clone());
        let Some((newest, found)) = scanned else {
            let is_new = segments.is_empty() && head.seq == head.removed;
            // The segment before was complete and synced, with a head, before the next one was begun.
            if is_new || self.ends_with(&dir, chain, &segments, &expected)? {
                let first = expected.0 + 1;
                let begun = begin_segment(&dir, chain, first, &expected.1)?;
                return Ok((OpenChain::new(dir, first, begun, expected, head), None));
            }
            return self.continue_damaged(dir, chain, head, "its entries are not there".to_owned());
        };
        if let Some(damage) = found.damage(&head) {
            return self.continue_damaged(dir, chain, head, damage);
        }
        let file = open_segment(&path_of(&dir, newest))?;
        let resumed = AuditResumed {
            unsigned: found.last.0 - head.seq,
            dropped_bytes: found.trailing,
            damage: None,
        };
        if found.trailing > 0 {
            file.set_len(found.good)?;
            file.sync_all()?;
        }
        let is_clean = resumed == AuditResumed::default();
        let mut open = OpenChain::new(dir, newest, (file, found.good), found.last, head);
        if !is_clean {
            // What was not synced when the daemon died may be in the page cache only.
            open.flush(chain, &self.key)?;
        }
        Ok((open, (!is_clean).then_some(resumed)))
    }

    /// Whether the newest of `segments` ends with an entry.
    fn ends_with(
        &self,
        dir: &Path,
        chain: &AuditChain,
        segments: &[u64],
        entry: &(u64, String),
    ) -> io::Result<bool> {
        let Some(newest) = segments.last().copied() else { return Ok(false) };
        let found = SegmentScan::of(&path_of(dir, newest), chain, newest, entry.0)?;
        Ok(found.header.is_some() && found.trailing == 0 && found.last == *entry)
    }

    /// Continues a chain that does not have what its head was signed for. Nothing of it is touched.
    fn continue_damaged(
        &self,
        dir: PathBuf,
        chain: &AuditChain,
        head: AuditHead,
        damage: String,
    ) -> io::Result<(OpenChain, Option<AuditResumed>)> {
        let last = (head.seq, head.hash.clone());
        let first = last.0 + 1;
        let path = path_of(&dir, first);
        if path.exists() {
            let time = now().as_millisecond();
            fs::rename(&path, path.with_extension(format!("damaged-{time}")))?;
        }
        let begun = begin_segment(&dir, chain, first, &last.1)?;
        let resumed = AuditResumed { damage: Some(damage), ..AuditResumed::default() };
        Ok((OpenChain::new(dir, first, begun, last, head), Some(resumed)))
    }

    /// Continues a chain that has no head that can be relied on, after the last existing entry.
    fn without_head(
        &self,
        dir: PathBuf,
        chain: &AuditChain,
        damage: &str,
    ) -> io::Result<(OpenChain, Option<AuditResumed>)> {
        let segments = list_segments(&dir)?;
        let mut last = (0, genesis(chain));
        if let Some(newest) = segments.last().copied() {
            let found = SegmentScan::of(&path_of(&dir, newest), chain, newest, 0)?;
            last = if found.header.is_none() { (newest, String::new()) } else { found.last };
        }
        let mut removed = (0, genesis(chain));
        if let Some(oldest) = segments.first().copied().filter(|first| *first > 1) {
            let header = read_header(&path_of(&dir, oldest))?;
            removed = (oldest - 1, header.map(|header| header.prev).unwrap_or_default());
        }
        // Not written yet: the first head on disk is for the entry that reports the damage, too.
        let head =
            AuditHead::signed(&self.key, chain, (last.0, &last.1), (removed.0, &removed.1), now());
        self.continue_damaged(dir, chain, head, damage.to_owned())
    }
}

impl OpenChain {
    fn new(
        dir: PathBuf,
        first: u64,
        (file, size): (File, u64),
        last: (u64, String),
        head: AuditHead,
    ) -> Self {
        Self { dir, file, first, size, last, head, unsynced: Vec::new(), rewrite: false, used: 0 }
    }

    fn write(&mut self, text: &[u8]) -> io::Result<()> {
        self.file.write_all(text)?;
        self.size += text.len() as u64;
        self.unsynced.extend_from_slice(text);
        Ok(())
    }

    /// Syncs the entries, then signs and replaces the head.
    fn flush(&mut self, chain: &AuditChain, key: &AuditKey) -> io::Result<()> {
        if self.last.0 == self.head.seq {
            return Ok(());
        }
        if self.rewrite {
            // After a failed sync the kernel may take pages for clean that are not on disk.
            let begin = self.size - self.unsynced.len() as u64;
            // Without `O_APPEND`, which would move what is written to the end.
            let file = OpenOptions::new().write(true).open(path_of(&self.dir, self.first))?;
            file.write_all_at(&self.unsynced, begin)?;
        }
        self.rewrite = true;
        self.file.sync_data()?;
        let head = AuditHead::signed(
            key,
            chain,
            (self.last.0, &self.last.1),
            (self.head.removed, &self.head.removed_hash),
            now(),
        );
        head.write(&self.dir)?;
        self.head = head;
        self.unsynced.clear();
        self.rewrite = false;
        Ok(())
    }
}

impl AuditResumed {
    fn record(&self, chain: &AuditChain) -> AuditRecord {
        let project = match chain {
            AuditChain::Host => None,
            AuditChain::Project(name) => Some(name),
        };
        let record = |action| AuditRecord::by_system(project, action, Some("audit".to_owned()));
        match &self.damage {
            Some(damage) => record("audit.damaged").with("found", damage.clone()),
            None => record("audit.resumed")
                .with("unsigned_entries", self.unsigned.to_string())
                .with("dropped_bytes", self.dropped_bytes.to_string()),
        }
        .bounded()
    }
}

/// What a segment has, up to the first line that does not continue it.
#[derive(Debug)]
struct SegmentScan {
    header: Option<SegmentHeader>,
    /// The number and the hash of the last entry; of the one before the segment if it has none.
    last: (u64, String),
    /// The hash of the entry that the head is for, if the segment has it or begins after it.
    signed: Option<String>,
    /// Up to where it is good, and how many bytes follow.
    good: u64,
    trailing: u64,
}

impl SegmentScan {
    fn of(path: &Path, chain: &AuditChain, first: u64, head: u64) -> io::Result<Self> {
        let file = File::open(path)?;
        let size = file.metadata()?.len();
        let mut file = BufReader::with_capacity(64 << 10, file);
        let mut scan =
            Self { header: None, last: (0, String::new()), signed: None, good: 0, trailing: size };
        let Some((header, length)) = next_header(&mut file)? else { return Ok(scan) };
        if header.first != first || header.chain != chain.to_string() {
            return Ok(scan);
        }
        scan.good = length;
        scan.last = (first.saturating_sub(1), header.prev.clone());
        scan.header = Some(header);
        let mut line = Vec::new();
        loop {
            if scan.last.0 == head {
                scan.signed = Some(scan.last.1.clone());
            }
            if read_line(&mut file, &mut line)? != LineRead::Line {
                break;
            }
            let follows = link(&line).filter(|link| {
                link.seq == scan.last.0 + 1 && link.prev == scan.last.1 && link.hash == link.found
            });
            let Some(link) = follows else { break };
            scan.good += line.len() as u64 + 1;
            scan.last = (link.seq, link.hash);
        }
        scan.trailing = size - scan.good;
        Ok(scan)
    }

    /// What of that which the head was signed for is not there.
    fn damage(&self, head: &AuditHead) -> Option<String> {
        if self.header.is_none() {
            return Some("its newest segment has no header that fits it".to_owned());
        }
        if self.last.0 < head.seq {
            let (last, seq) = (self.last.0, head.seq);
            return Some(format!("it goes to entry {last}, and was signed up to entry {seq}"));
        }
        match &self.signed {
            Some(hash) if *hash == head.hash => None,
            Some(_) => Some(format!("entry {} is not the one that was signed", head.seq)),
            None => Some(format!("it continues after entry {}, which is not there", head.seq)),
        }
    }
}

pub(super) fn read_header(path: &Path) -> io::Result<Option<SegmentHeader>> {
    let mut file = BufReader::new(File::open(path)?);
    Ok(next_header(&mut file)?.map(|(header, _)| header))
}

/// Reads the header of a segment, and says how long its line is.
pub(super) fn next_header(file: &mut impl BufRead) -> io::Result<Option<(SegmentHeader, u64)>> {
    let mut line = Vec::new();
    if read_line(file, &mut line)? != LineRead::Line {
        return Ok(None);
    }
    let header = serde_json::from_slice::<SegmentHeader>(&line).ok();
    let header = header.filter(|header| header.format == FORMAT);
    Ok(header.map(|header| (header, line.len() as u64 + 1)))
}

fn begin_segment(
    dir: &Path,
    chain: &AuditChain,
    first: u64,
    prev: &str,
) -> io::Result<(File, u64)> {
    let header = SegmentHeader {
        format: FORMAT,
        chain: chain.to_string(),
        first,
        prev: prev.to_owned(),
        at: now(),
    };
    let mut line = serde_json::to_vec(&header)?;
    line.push(b'\n');
    let path = path_of(dir, first);
    let mut file = OpenOptions::new().create_new(true).append(true).mode(0o600).open(&path)?;
    let begun = file.write_all(&line).and_then(|()| file.sync_all()).and_then(|()| sync_dir(dir));
    if let Err(error) = begun {
        // Otherwise nothing could be begun here any more.
        let _ = fs::remove_file(&path);
        return Err(error);
    }
    Ok((file, line.len() as u64))
}

fn open_segment(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).open(path)
}

/// Makes the directory of a chain, and makes it durable.
fn make_dirs(audit: &Path, dir: &Path) -> io::Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    let mut at = dir;
    while let Some(parent) = at.parent() {
        sync_dir(parent)?;
        if at == audit {
            break;
        }
        at = parent;
    }
    Ok(())
}
