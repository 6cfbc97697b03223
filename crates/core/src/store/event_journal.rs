//! The event journal on disk: segments of JSON lines, one directory per project and one for the host.
//!
//! `docs/formats/events.md` is the format and its rules. One task of the engine appends
//! ([`EventWriter`]); any number of readers read ([`read_events`]). They share nothing but the files:
//! a reader gets the length that is written, and reads no further.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead as _, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::model::{Event, EventId, Name};

const FORMAT: u32 = 1;
/// How large a segment may be.
const SEGMENT_BYTES: u64 = 4 << 20;
/// How many segments a directory keeps.
const SEGMENTS: usize = 4;
/// A longer line was not written by us.
const LINE_BYTES: u64 = 64 << 10;
/// How many segments are open for writing at one time.
const OPEN: usize = 64;

/// Whose events a directory of the journal holds.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EventSource {
    /// What concerns no project.
    Host,
    /// What happened in a project.
    Project(Name),
}

impl EventSource {
    fn dir(&self, journal: &Path) -> PathBuf {
        match self {
            Self::Host => journal.join("host"),
            Self::Project(name) => journal.join("projects").join(name.as_str()),
        }
    }
}

impl From<&Event> for EventSource {
    fn from(event: &Event) -> Self {
        event.project.clone().map_or(Self::Host, Self::Project)
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Header {
    format: u32,
    before: EventId,
}

/// Appends events. There is one in a daemon.
#[derive(Debug)]
pub struct EventWriter {
    journal: PathBuf,
    segment_bytes: u64,
    open: HashMap<EventSource, JournalSegment>,
}

#[derive(Debug)]
struct JournalSegment {
    file: File,
    size: u64,
    last: EventId,
}

impl EventWriter {
    /// Opens the journal below `journal`, which is made when the first event is written.
    #[must_use]
    pub fn new(journal: PathBuf) -> Self {
        Self { journal, segment_bytes: SEGMENT_BYTES, open: HashMap::new() }
    }

    /// Appends events, which must come in the order of their ids.
    ///
    /// # Errors
    ///
    /// Returns the system's error and how many events of each source were not written.
    pub fn append(
        &mut self,
        events: &[Event],
    ) -> Result<(), (io::Error, HashMap<EventSource, u64>)> {
        let mut by_source: HashMap<EventSource, Vec<&Event>> = HashMap::new();
        for event in events {
            by_source.entry(event.into()).or_default().push(event);
        }
        let (mut lost, mut failed) = (HashMap::new(), None);
        for (source, events) in by_source {
            if let Err(error) = self.append_to(&source, &events) {
                // What is in the file now is not known; the next event begins another segment.
                self.open.remove(&source);
                lost.insert(source, u64::try_from(events.len()).unwrap_or(u64::MAX));
                failed = Some(error);
            }
        }
        failed.map_or(Ok(()), |error| Err((error, lost)))
    }

    fn append_to(&mut self, source: &EventSource, events: &[&Event]) -> io::Result<()> {
        let (Some(first), Some(last)) = (events.first(), events.last()) else { return Ok(()) };
        let mut text = Vec::new();
        for event in events {
            serde_json::to_writer(&mut text, event)?;
            text.push(b'\n');
        }
        let is_full = |open: &JournalSegment| open.size >= self.segment_bytes;
        if self.open.get(source).is_none_or(is_full) {
            let before = self.open.remove(source).map(|open| open.last);
            if self.open.len() >= OPEN {
                self.open.clear();
            }
            let begun = begin(&source.dir(&self.journal), first.id, before)?;
            self.open.insert(source.clone(), begun);
        }
        let Some(segment) = self.open.get_mut(source) else { return Ok(()) };
        segment.file.write_all(&text)?;
        segment.size += text.len() as u64;
        segment.last = last.id;
        Ok(())
    }

    /// Removes the events of a project that is gone.
    ///
    /// # Errors
    ///
    /// Returns the system's error.
    pub fn remove(&mut self, project: &Name) -> io::Result<()> {
        let source = EventSource::Project(project.clone());
        self.open.remove(&source);
        match fs::remove_dir_all(source.dir(&self.journal)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

/// Begins a segment, and removes the oldest ones beyond [`SEGMENTS`].
fn begin(dir: &Path, first: EventId, before: Option<EventId>) -> io::Result<JournalSegment> {
    fs::create_dir_all(dir)?;
    let segments = segments(dir)?;
    let before = match (before, segments.last()) {
        (Some(before), _) => before,
        (None, Some(last)) => last_id(&path_of(dir, *last))?.unwrap_or(*last),
        (None, None) => EventId(0),
    };
    for old in segments.iter().rev().skip(SEGMENTS - 1) {
        fs::remove_file(path_of(dir, *old))?;
    }
    let mut file = OpenOptions::new().create_new(true).append(true).open(path_of(dir, first))?;
    let mut header = serde_json::to_vec(&Header { format: FORMAT, before })?;
    header.push(b'\n');
    file.write_all(&header)?;
    Ok(JournalSegment { file, size: header.len() as u64, last: before })
}

fn path_of(dir: &Path, first: EventId) -> PathBuf {
    dir.join(format!("{:020}.jsonl", first.0))
}

/// The segments of a directory by the id of their first event, oldest first.
fn segments(dir: &Path) -> io::Result<Vec<EventId>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut found = Vec::new();
    for entry in entries {
        let name = entry?.file_name();
        let stem = name.to_str().and_then(|name| name.strip_suffix(".jsonl"));
        found.extend(stem.and_then(|stem| stem.parse::<EventId>().ok()));
    }
    found.sort_unstable();
    Ok(found)
}

/// The id of the last event in a segment.
fn last_id(path: &Path) -> io::Result<Option<EventId>> {
    let mut file = File::open(path)?;
    let size = file.metadata()?.len();
    file.seek(SeekFrom::Start(size.saturating_sub(2 * LINE_BYTES)))?;
    let mut tail = Vec::new();
    file.take(2 * LINE_BYTES).read_to_end(&mut tail)?;
    #[derive(Deserialize)]
    struct Id {
        id: EventId,
    }
    let ids =
        tail.rsplit(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok());
    Ok(ids.map(|Id { id }| id).next())
}

/// The sources that have events below `journal`.
///
/// # Errors
///
/// Returns the system's error when the directory cannot be read.
pub fn event_sources(journal: &Path) -> io::Result<Vec<EventSource>> {
    let mut found = vec![EventSource::Host];
    match fs::read_dir(journal.join("projects")) {
        Ok(entries) => {
            for entry in entries {
                let name = entry?.file_name();
                let name = name.to_str().and_then(|name| name.parse().ok());
                found.extend(name.map(EventSource::Project));
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    Ok(found)
}

/// The greatest id below `journal`.
///
/// # Errors
///
/// Returns the system's error when a directory cannot be read.
pub fn last_event(journal: &Path) -> io::Result<EventId> {
    let mut last = EventId(0);
    for source in event_sources(journal)? {
        let dir = source.dir(journal);
        if let Some(first) = segments(&dir)?.pop() {
            last = last.max(first).max(last_id(&path_of(&dir, first))?.unwrap_or_default());
        }
    }
    Ok(last)
}

/// Where a reader is in a directory: a segment, and the first byte in it that was not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventPosition {
    segment: EventId,
    offset: u64,
}

/// What a reader got.
#[derive(Debug, Default)]
pub struct EventChunk {
    /// The events, in order.
    pub events: Vec<Event>,
    /// Where to read on; absent when there is nothing to read yet.
    pub position: Option<EventPosition>,
    /// Whether all up to the given end was read.
    pub complete: bool,
    /// Whether events after `after` were removed before they were read.
    pub missed: bool,
}

/// Reads events of one source with ids above `after` and up to `end`, about `bytes` of them, from
/// `position` on if there is one.
///
/// # Errors
///
/// Returns the system's error when a file cannot be read.
pub fn read_events(
    journal: &Path,
    source: &EventSource,
    position: Option<EventPosition>,
    (after, end): (EventId, EventId),
    bytes: u64,
) -> io::Result<EventChunk> {
    let dir = source.dir(journal);
    let mut chunk = EventChunk { position, ..EventChunk::default() };
    let mut budget = bytes;
    loop {
        // A reader that comes from the segment before has read everything up to here.
        let follows = chunk.position.is_some();
        let at = match chunk.position {
            Some(at) => at,
            None => {
                let all = segments(&dir)?;
                let Some(oldest) = all.first() else {
                    chunk.complete = true;
                    return Ok(chunk);
                };
                let holds = all.iter().rev().find(|first| **first <= after);
                EventPosition { segment: *holds.unwrap_or(oldest), offset: 0 }
            }
        };
        let read = match read_segment(&path_of(&dir, at.segment), at.offset, (after, end), budget) {
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                // It was removed meanwhile, and some of it was perhaps not read.
                if segments(&dir)?.is_empty() {
                    return Ok(EventChunk { complete: true, position: None, ..chunk });
                }
                chunk.position = None;
                continue;
            }
            Err(error) => return Err(error),
        };
        let seen = chunk.events.last().map_or(after, |event| event.id);
        chunk.missed |= !follows && read.before.is_some_and(|before| before > seen);
        chunk.events.extend(read.events);
        chunk.position = Some(EventPosition { offset: read.offset, ..at });
        budget = budget.saturating_sub(read.offset - at.offset);
        if read.past_end {
            chunk.complete = true;
            return Ok(chunk);
        }
        if !read.at_eof || budget == 0 {
            return Ok(chunk);
        }
        match segments(&dir)?.into_iter().find(|first| *first > at.segment) {
            Some(next) if next <= end => {
                chunk.position = Some(EventPosition { segment: next, offset: 0 });
            }
            _ => {
                chunk.complete = true;
                return Ok(chunk);
            }
        }
    }
}

struct SegmentRead {
    /// The header's, when the segment was read from its beginning.
    before: Option<EventId>,
    events: Vec<Event>,
    offset: u64,
    at_eof: bool,
    past_end: bool,
}

fn read_segment(
    path: &Path,
    offset: u64,
    (after, end): (EventId, EventId),
    budget: u64,
) -> io::Result<SegmentRead> {
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(offset))?;
    let mut lines = BufReader::with_capacity(64 << 10, file);
    let mut read =
        SegmentRead { before: None, events: Vec::new(), offset, at_eof: false, past_end: false };
    let mut line = Vec::new();
    while read.offset - offset < budget {
        line.clear();
        let length = lines.by_ref().take(LINE_BYTES).read_until(b'\n', &mut line)? as u64;
        if line.last() != Some(&b'\n') {
            if length == LINE_BYTES {
                // Too long for an event: skipped, up to its end.
                read.offset += length + skip_line(&mut lines)?;
                continue;
            }
            // An incomplete line is one that is being written, or the last of a server that died.
            read.at_eof = true;
            return Ok(read);
        }
        if read.offset == 0 {
            let header = serde_json::from_slice::<Header>(&line).ok();
            if header.as_ref().is_some_and(|header| header.format > FORMAT) {
                // Of a newer version, which may mean something else by its lines.
                read.offset = fs::metadata(path)?.len();
                read.at_eof = true;
                return Ok(read);
            }
            read.before = header.map(|header| header.before);
        } else if let Ok(event) = serde_json::from_slice::<Event>(&line) {
            if event.id > end {
                read.past_end = true;
                return Ok(read);
            }
            if event.id > after {
                read.events.push(event);
            }
        }
        read.offset += length;
    }
    Ok(read)
}

/// Reads to the end of a line, and says how many bytes that were.
fn skip_line(lines: &mut impl io::BufRead) -> io::Result<u64> {
    let mut skipped = 0;
    loop {
        let buffer = lines.fill_buf()?;
        if buffer.is_empty() {
            return Ok(skipped);
        }
        let end = buffer.iter().position(|byte| *byte == b'\n');
        let taken = end.map_or(buffer.len(), |end| end + 1);
        lines.consume(taken);
        skipped += taken as u64;
        if end.is_some() {
            return Ok(skipped);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write as _;
    use std::path::Path;

    use super::{
        EventChunk, EventSource, EventWriter, SEGMENTS, event_sources, last_event, path_of,
        read_events, segments,
    };
    use crate::model::{Event, EventData, EventId, now};

    const ALL: u64 = u64::MAX;

    fn event(id: u64) -> Event {
        let project = Some("p".parse().unwrap());
        let change = EventData::SandboxFailed { reason: "x".repeat(100) };
        Event { id: EventId(id), at: now(), project, sandbox: None, change }
    }

    fn source() -> EventSource {
        EventSource::Project("p".parse().unwrap())
    }

    fn read(journal: &Path, after: u64) -> EventChunk {
        read_events(journal, &source(), None, (EventId(after), EventId(u64::MAX)), ALL).unwrap()
    }

    fn ids(chunk: &EventChunk) -> Vec<u64> {
        chunk.events.iter().map(|event| event.id.0).collect()
    }

    #[test]
    fn what_was_appended_is_read_in_order_and_from_any_position() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = EventWriter::new(dir.path().into());
        assert!(read(dir.path(), 0).complete);
        writer.append(&[event(10), event(20)]).unwrap();
        writer.append(&[event(30)]).unwrap();
        assert_eq!(ids(&read(dir.path(), 0)), [10, 20, 30]);
        assert_eq!(ids(&read(dir.path(), 10)), [20, 30]);
        assert_eq!(ids(&read(dir.path(), 15)), [20, 30]);
        assert!(ids(&read(dir.path(), 30)).is_empty());
        // Up to an end, and on from where that was.
        let range = (EventId(0), EventId(20));
        let part = read_events(dir.path(), &source(), None, range, ALL).unwrap();
        assert_eq!((ids(&part), part.complete), (vec![10, 20], true));
        writer.append(&[event(40)]).unwrap();
        let range = (EventId(20), EventId(40));
        let rest = read_events(dir.path(), &source(), part.position, range, ALL).unwrap();
        assert_eq!((ids(&rest), rest.complete), (vec![30, 40], true));
        assert_eq!(last_event(dir.path()).unwrap(), EventId(40));
        let all = event_sources(dir.path()).unwrap();
        assert_eq!(all, [EventSource::Host, source()]);
    }

    #[test]
    fn a_read_is_bounded_and_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = EventWriter { segment_bytes: 1000, ..EventWriter::new(dir.path().into()) };
        for id in 1..=20 {
            writer.append(&[event(id)]).unwrap();
        }
        assert!(segments(&source().dir(dir.path())).unwrap().len() > 1);
        let (mut position, mut seen, mut after) = (None, Vec::new(), EventId(0));
        for _ in 0..100 {
            let range = (after, EventId(20));
            let chunk = read_events(dir.path(), &source(), position, range, 500).unwrap();
            assert!(chunk.events.len() <= 6, "{}", chunk.events.len());
            position = chunk.position;
            after = chunk.events.last().map_or(after, |event| event.id);
            seen.extend(ids(&chunk));
            if chunk.complete {
                break;
            }
        }
        let oldest = seen[0];
        assert_eq!(seen, (oldest..=20).collect::<Vec<_>>());
    }

    #[test]
    fn old_segments_go_and_whoever_missed_them_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = EventWriter { segment_bytes: 500, ..EventWriter::new(dir.path().into()) };
        for id in 1..=100 {
            writer.append(&[event(id)]).unwrap();
        }
        let kept = segments(&source().dir(dir.path())).unwrap();
        assert_eq!(kept.len(), SEGMENTS);
        let all = read(dir.path(), 5);
        assert!(all.missed && all.complete);
        assert_eq!(ids(&all)[0], kept[0].0);
        assert_eq!(ids(&all).last(), Some(&100));
        assert!(!read(dir.path(), kept[0].0 - 1).missed, "nothing between was removed");
        assert!(!read(dir.path(), 100).missed);
        // A reader whose segment is removed under it.
        let range = (EventId(kept[0].0), EventId(kept[0].0));
        let slow = read_events(dir.path(), &source(), None, range, ALL).unwrap();
        for id in 101..=130 {
            writer.append(&[event(id)]).unwrap();
        }
        let range = (EventId(kept[0].0), EventId(130));
        let late = read_events(dir.path(), &source(), slow.position, range, ALL).unwrap();
        assert!(late.missed);
        assert_eq!(ids(&late).last(), Some(&130));
    }

    #[test]
    fn half_a_line_and_garbage_are_skipped() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = EventWriter::new(dir.path().into());
        writer.append(&[event(10)]).unwrap();
        let path = path_of(&source().dir(dir.path()), EventId(10));
        let mut file = fs::OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(
            b"no json\n{\"id\":11,\"at\":\"2026-01-01T00:00:00Z\",\"kind\":\"later\"}\n",
        )
        .unwrap();
        file.write_all(&[b'x'; 200_000]).unwrap();
        file.write_all(b"\n{\"id\":12,\"at\"").unwrap();
        drop(file);
        assert_eq!(ids(&read(dir.path(), 0)), [10]);
        // Another daemon continues in a segment of its own.
        let mut next = EventWriter::new(dir.path().into());
        next.append(&[event(20)]).unwrap();
        let all = read(dir.path(), 0);
        assert_eq!((ids(&all), all.missed), (vec![10, 20], false));
        next.remove(&"p".parse().unwrap()).unwrap();
        assert!(ids(&read(dir.path(), 0)).is_empty());
    }

    #[test]
    fn a_segment_of_a_newer_version_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let at = source().dir(dir.path());
        fs::create_dir_all(&at).unwrap();
        fs::write(path_of(&at, EventId(5)), "{\"format\":2,\"before\":0}\n{\"id\":5}\n").unwrap();
        EventWriter::new(dir.path().into()).append(&[event(10)]).unwrap();
        assert_eq!(ids(&read(dir.path(), 0)), [10]);
    }
}
