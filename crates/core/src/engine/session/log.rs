//! Command logs: the output of a command on disk, with a size limit.
//!
//! Up to the limit a log is one file. Past it, the beginning (half of the limit) stays and the end
//! (up to the other half) goes round in two further files, so that both how a command started and
//! how it ended can be read. The logs of all commands of a sandbox that run at a time share a [`LogBudget`]: the less is left of
//! it, the shorter they are. `docs/formats/command-log.md` has the layout:
//!
//! ```text
//! <command>.log        head: "SKLOG\0\0\x01", then records
//! <command>.log.tail   the newest records past the head, at most a quarter of the limit
//! <command>.log.mid    the tail before that
//!
//! record: stream u8 (1 out, 2 err), 3 zero bytes, length u32, time u64 (ms), offset u64, bytes; little endian
//! ```
//!
//! `offset` counts all the command ever printed: it shows a restarted daemon from where to attach,
//! and a reader that something is missing in between. A record is written with one call and
//! credited to the agent after; half a record at the end of a file, left by a crash, is cut off on
//! opening.

pub(in crate::engine) mod budget;
pub(in crate::engine) mod start;

use std::fs::{File, OpenOptions};
use std::io;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::Semaphore;

use crate::engine::session::log::budget::{BudgetShare, LogBudget};

const MAGIC: &[u8; 8] = b"SKLOG\0\0\x01";
const HEADER: usize = 24;

/// Which of its two streams a command printed to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine) enum LogStream {
    Out = 1,
    Err = 2,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::engine) struct LogRecord {
    pub(in crate::engine) stream: LogStream,
    pub(in crate::engine) offset: u64,
    /// When it was printed, in milliseconds since 1970.
    pub(in crate::engine) time: u64,
    pub(in crate::engine) bytes: Bytes,
}

/// Appends to a command's log.
#[derive(Debug)]
pub(in crate::engine) struct LogWriter {
    head: PathBuf,
    limit: u64,
    share: BudgetShare,
    /// What the files before the one that is written take.
    before: u64,
    /// Absent when it could not be opened: nothing is kept then.
    file: Option<File>,
    size: u64,
    in_tail: bool,
    offset: u64,
    truncated: bool,
}

fn part(head: &Path, suffix: &str) -> PathBuf {
    let mut name = head.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// The files of a log, to remove them.
pub(in crate::engine) fn files(head: &Path) -> [PathBuf; 3] {
    [head.to_owned(), part(head, ".mid"), part(head, ".tail")]
}

/// How many threads may wait for the disk with logs. A disk that hangs takes no more of them, and the rest of the daemon
/// continues; readers and writers of other logs wait without a thread.
const AT_ONCE: usize = 64;

static WRITING: Semaphore = Semaphore::const_new(AT_ONCE);

static READING: Semaphore = Semaphore::const_new(AT_ONCE);

/// Runs what may wait for the disk so that no other task waits with it.
fn beside<T>(work: impl FnOnce() -> T) -> T {
    match Handle::try_current() {
        Ok(handle) if handle.runtime_flavor() == RuntimeFlavor::MultiThread => {
            tokio::task::block_in_place(work)
        }
        _ => work(),
    }
}

impl LogWriter {
    /// Opens a log, when it is its turn to wait for the disk.
    pub(in crate::engine) async fn open_in_turn(
        head: &Path,
        limit: u64,
        budget: &Arc<LogBudget>,
    ) -> Self {
        let _turn = WRITING.acquire().await;
        Self::open(head, limit, budget)
    }

    /// Opens a log, new or left by an earlier daemon. A disk that refuses costs the log, never the
    /// command.
    fn open(head: &Path, limit: u64, budget: &Arc<LogBudget>) -> Self {
        let share = || BudgetShare::new(budget);
        beside(|| Self::try_open(head, limit, share())).unwrap_or_else(|error| {
            tracing::warn!(log = %head.display(), %error, "the log of a command cannot be opened; its output is not kept");
            Self {
                head: head.to_owned(),
                limit,
                share: share(),
                before: 0,
                file: None,
                size: 0,
                in_tail: false,
                offset: 0,
                truncated: true,
            }
        })
    }

    fn try_open(head: &Path, limit: u64, mut share: BudgetShare) -> io::Result<Self> {
        let [_, mid, tail] = files(head);
        let in_tail = tail.exists();
        let path = if in_tail { &tail } else { head };
        let mut file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        let mut size = file.metadata()?.len();
        let mut offset = 0;
        if size < MAGIC.len() as u64 {
            file.set_len(0)?;
            file.write_all(MAGIC)?;
            size = MAGIC.len() as u64;
        } else {
            let mut reader = Reader::new(file.try_clone()?);
            while let Some(record) = reader.next()? {
                offset = record.offset + record.bytes.len() as u64;
            }
            size = reader.position.max(MAGIC.len() as u64);
            file.set_len(size)?;
            file.seek(SeekFrom::Start(size))?;
        }
        if offset == 0 && in_tail {
            offset = last_offset(&mid)?.max(last_offset(head)?);
        }
        let before = if in_tail { length(head) + length(&mid) } else { 0 };
        share.set(before + size);
        Ok(Self {
            head: head.to_owned(),
            limit,
            share,
            before,
            file: Some(file),
            size,
            in_tail,
            offset,
            truncated: mid.exists(),
        })
    }

    /// How much of the command's output was taken, kept or not.
    pub(in crate::engine) fn offset(&self) -> u64 {
        self.offset
    }

    pub(in crate::engine) fn truncated(&self) -> bool {
        self.truncated
    }

    /// Takes what was printed, when it is its turn to wait for the disk.
    pub(in crate::engine) async fn append_in_turn(&mut self, stream: LogStream, bytes: &[u8]) {
        let _turn = WRITING.acquire().await;
        self.append(stream, bytes);
    }

    /// Takes what was printed.
    pub(in crate::engine) fn append(&mut self, stream: LogStream, bytes: &[u8]) {
        let at = self.offset;
        self.offset += bytes.len() as u64;
        if let Err(error) = beside(|| self.write(stream, at, bytes)) {
            if !self.truncated {
                tracing::warn!(log = %self.head.display(), %error, "the log of a command cannot be written; further output is not kept");
            }
            self.truncated = true;
            if let Some(file) = &mut self.file {
                let _ = file.set_len(self.size);
                let _ = file.seek(SeekFrom::Start(self.size));
            }
        }
    }

    fn write(&mut self, stream: LogStream, offset: u64, bytes: &[u8]) -> io::Result<()> {
        if self.file.is_none() {
            return Ok(());
        }
        let limit = self.share.limit(self.limit);
        let room = if self.in_tail { limit / 4 } else { limit / 2 };
        if self.size + (HEADER + bytes.len()) as u64 > room {
            self.rotate()?;
        }
        let mut record = Vec::with_capacity(HEADER + bytes.len());
        record.extend_from_slice(&[stream as u8, 0, 0, 0]);
        record.extend_from_slice(&u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes());
        let now = u64::try_from(jiff::Timestamp::now().as_millisecond()).unwrap_or(0);
        record.extend_from_slice(&now.to_le_bytes());
        record.extend_from_slice(&offset.to_le_bytes());
        record.extend_from_slice(bytes);
        if let Some(file) = &mut self.file {
            file.write_all(&record)?;
        }
        self.size += record.len() as u64;
        self.share.set(self.before + self.size);
        Ok(())
    }

    fn rotate(&mut self) -> io::Result<()> {
        let [_, mid, tail] = files(&self.head);
        if self.in_tail {
            self.truncated |= mid.exists();
            std::fs::rename(&tail, &mid)?;
        }
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).open(&tail)?;
        file.write_all(MAGIC)?;
        self.file = Some(file);
        self.size = MAGIC.len() as u64;
        self.in_tail = true;
        self.before = length(&self.head) + length(&mid);
        Ok(())
    }
}

fn length(path: &Path) -> u64 {
    path.metadata().map_or(0, |metadata| metadata.len())
}

/// The newest records of a log that ends at `offset`: at least as much as any value is long, in any shape.
pub(in crate::engine) async fn last_records(head: PathBuf, offset: u64) -> Vec<(LogStream, Bytes)> {
    let _turn = READING.acquire().await;
    let mut reader = LogReader::new(head, offset.saturating_sub(1 << 20));
    let mut records = Vec::new();
    beside(|| {
        while let Ok(Some(piece)) = reader.next() {
            if let Piece::Record(record) = piece {
                records.push((record.stream, record.bytes));
            }
        }
    });
    records
}

fn last_offset(path: &Path) -> io::Result<u64> {
    let Ok(file) = File::open(path) else { return Ok(0) };
    let mut reader = Reader::new(file);
    let mut offset = 0;
    while let Some(record) = reader.next()? {
        offset = record.offset + record.bytes.len() as u64;
    }
    Ok(offset)
}

/// What a reader finds next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::engine) enum Piece {
    Record(LogRecord),
    /// This many bytes were printed here and are not kept.
    Gap(u64),
}

/// Reads a log, also while it grows.
#[derive(Debug)]
pub(in crate::engine) struct LogReader {
    head: PathBuf,
    reader: Option<Reader>,
    /// Output before this was handed out.
    offset: u64,
    /// What comes after a gap that was reported.
    after_gap: Option<LogRecord>,
}

impl LogReader {
    /// Reads what was printed from `offset` on.
    pub(in crate::engine) fn new(head: PathBuf, offset: u64) -> Self {
        Self { head, reader: None, offset, after_gap: None }
    }

    /// The next piece, when it is its turn to wait for the disk.
    pub(in crate::engine) async fn next_in_turn(&mut self) -> io::Result<Option<Piece>> {
        let _turn = READING.acquire().await;
        beside(|| self.next())
    }

    /// The next piece; `None` at the present end, after which it may be asked again.
    pub(in crate::engine) fn next(&mut self) -> io::Result<Option<Piece>> {
        let record = match self.after_gap.take() {
            Some(record) => record,
            None => match self.find()? {
                None => return Ok(None),
                Some(record) if record.offset > self.offset => {
                    let gap = record.offset - self.offset;
                    self.offset = record.offset;
                    self.after_gap = Some(record);
                    return Ok(Some(Piece::Gap(gap)));
                }
                Some(record) => record,
            },
        };
        self.offset = record.offset + record.bytes.len() as u64;
        Ok(Some(Piece::Record(record)))
    }

    /// The log is read to its end, and the command printed `printed` bytes: how many of them are
    /// missing at that end. Reported once.
    pub(in crate::engine) fn missing_at_end(&mut self, printed: u64) -> Option<u64> {
        let missing = printed.checked_sub(self.offset).filter(|missing| *missing > 0)?;
        self.offset = printed;
        Some(missing)
    }

    fn find(&mut self) -> io::Result<Option<LogRecord>> {
        if self.reader.is_none() {
            self.reader = open(&self.head)?;
        }
        if let Some(record) = self.find_here()? {
            return Ok(Some(record));
        }
        let [_, mid, tail] = files(&self.head);
        if !self.is_left(&mid, &tail)? {
            return Ok(None);
        }
        // Nothing more comes to a file that was left, but something may just have come.
        if let Some(record) = self.find_here()? {
            return Ok(Some(record));
        }
        // In this order: should they go round in between, the second is never older than the one before
        // the first, so that no file between them is missed.
        let (tail, mid) = (open(&tail)?, open(&mid)?);
        let mut nearest: Option<(Reader, LogRecord)> = None;
        for mut reader in [mid, tail].into_iter().flatten() {
            if let Some(record) = reader.next_from(self.offset)?
                && nearest.as_ref().is_none_or(|(_, other)| record.offset < other.offset)
            {
                nearest = Some((reader, record));
            }
        }
        Ok(nearest.map(|(reader, record)| {
            self.reader = Some(reader);
            record
        }))
    }

    fn find_here(&mut self) -> io::Result<Option<LogRecord>> {
        let offset = self.offset;
        self.reader.as_mut().map_or(Ok(None), |reader| reader.next_from(offset))
    }

    /// Whether the writer has gone on to another file than the one that is read.
    fn is_left(&self, mid: &Path, tail: &Path) -> io::Result<bool> {
        let Some(reader) = &self.reader else { return Ok(tail.exists() || mid.exists()) };
        match tail.metadata() {
            // It is open, so its number is not given to another.
            Ok(newest) => Ok(newest.ino() != reader.file.metadata()?.ino()),
            Err(_) => Ok(mid.exists()),
        }
    }
}

fn open(path: &Path) -> io::Result<Option<Reader>> {
    match File::open(path) {
        Ok(file) => Ok(Some(Reader::new(file))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// What is before the bytes of a record.
struct RecordHeader {
    stream: LogStream,
    length: usize,
    time: u64,
    offset: u64,
}

#[derive(Debug)]
struct Reader {
    file: File,
    position: u64,
}

impl Reader {
    fn new(file: File) -> Self {
        Self { file, position: MAGIC.len() as u64 }
    }

    /// The next whole record. Half a record is the end: more of it may come.
    fn next(&mut self) -> io::Result<Option<LogRecord>> {
        self.next_from(0)
    }

    /// The next whole record at `from` or after it, or what a record has from there on; the bytes of those before it are not
    /// read.
    fn next_from(&mut self, from: u64) -> io::Result<Option<LogRecord>> {
        loop {
            let Some(RecordHeader { stream, length, time, offset }) = self.header()? else {
                return Ok(None);
            };
            let whole = (HEADER + length) as u64;
            if offset < from && offset + length as u64 <= from {
                self.position += whole;
                continue;
            }
            let mut bytes = vec![0; length];
            if !fill(&mut self.file, &mut bytes)? {
                return Ok(None);
            }
            self.position += whole;
            // Less than the record's length, so it fits.
            let had = from.saturating_sub(offset);
            let bytes = Bytes::from(bytes).slice(had as usize..);
            return Ok(Some(LogRecord { stream, offset: offset + had, time, bytes }));
        }
    }

    /// Reads the header at the present place.
    fn header(&mut self) -> io::Result<Option<RecordHeader>> {
        self.file.seek(SeekFrom::Start(self.position))?;
        let mut header = [0u8; HEADER];
        if !fill(&mut self.file, &mut header)? {
            return Ok(None);
        }
        let stream = match header[0] {
            1 => LogStream::Out,
            2 => LogStream::Err,
            _ => return Ok(None),
        };
        let length = u32::from_le_bytes([header[4], header[5], header[6], header[7]]) as usize;
        if length > sandkeep_proto::frame::MAX_PAYLOAD {
            return Ok(None);
        }
        let number = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&header[at..at + 8]);
            u64::from_le_bytes(bytes)
        };
        Ok(Some(RecordHeader { stream, length, time: number(8), offset: number(16) }))
    }
}

fn fill(file: &mut File, into: &mut [u8]) -> io::Result<bool> {
    match file.read_exact(into) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests;
