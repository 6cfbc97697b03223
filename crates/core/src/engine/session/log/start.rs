//! Where to begin reading a log: at its last lines, or at a time.

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use tokio::time::Instant;

use super::{LogReader, LogRecord, Piece};
use crate::model::Timestamp;

/// How long the beginning is looked for in a log that grows meanwhile.
const PATIENCE: Duration = Duration::from_secs(10);

/// The part of a log that is wanted.
#[derive(Debug, Clone, Default)]
pub struct LogStart {
    /// Leave out this many bytes, counted over both streams and gaps.
    pub offset: u64,
    /// Only this many lines at the end, counted over both streams.
    pub tail: Option<u32>,
    /// Only what was printed at this time or later.
    pub since: Option<Timestamp>,
}

/// The offset at which the wanted part of a log begins.
pub(in crate::engine) async fn beginning(head: PathBuf, wanted: &LogStart) -> io::Result<u64> {
    if wanted.tail.is_none() && wanted.since.is_none() {
        return Ok(wanted.offset);
    }
    let mut reader = LogReader::new(head, wanted.offset);
    let mut search = LogSearch::new(wanted);
    let deadline = Instant::now() + PATIENCE;
    while let Some(piece) = reader.next_in_turn().await? {
        match piece {
            Piece::Gap(bytes) => search.gap(bytes),
            Piece::Record(record) => search.record(&record),
        }
        if Instant::now() > deadline {
            break;
        }
    }
    Ok(search.found())
}

/// Looks at a log from its beginning to its end.
#[derive(Debug)]
struct LogSearch {
    since: Option<u64>,
    tail: Option<usize>,
    /// Where the last lines begin, at most as many as are wanted.
    lines: VecDeque<u64>,
    in_line: bool,
    /// Where the first piece begins that is not too old.
    fresh: Option<u64>,
    end: u64,
}

impl LogSearch {
    fn new(wanted: &LogStart) -> Self {
        let millis = |time: Timestamp| u64::try_from(time.as_millisecond()).unwrap_or(0);
        Self {
            since: wanted.since.map(millis),
            tail: wanted.tail.map(|lines| usize::try_from(lines).unwrap_or(usize::MAX)),
            lines: VecDeque::new(),
            in_line: false,
            fresh: None,
            end: wanted.offset,
        }
    }

    fn gap(&mut self, bytes: u64) {
        self.end += bytes;
        self.in_line = false;
    }

    fn record(&mut self, record: &LogRecord) {
        let end = record.offset + record.bytes.len() as u64;
        let too_old = self.fresh.is_none() && self.since.is_some_and(|since| record.time < since);
        self.end = end;
        if too_old {
            return;
        }
        self.fresh.get_or_insert(record.offset);
        if self.tail.is_none() {
            return;
        }
        let mut at = record.offset;
        for line in record.bytes.split_inclusive(|byte| *byte == b'\n') {
            if !self.in_line {
                self.line(at);
            }
            at += line.len() as u64;
            self.in_line = !line.ends_with(b"\n");
        }
    }

    fn line(&mut self, at: u64) {
        self.lines.push_back(at);
        if self.tail.is_some_and(|most| self.lines.len() > most) {
            self.lines.pop_front();
        }
    }

    fn found(&self) -> u64 {
        let first = match self.tail {
            Some(_) => self.lines.front().copied(),
            None => self.fresh,
        };
        first.unwrap_or(self.end)
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::super::{LogRecord, LogStream};
    use super::{LogSearch, LogStart};
    use crate::model::Timestamp;

    /// Where reading begins in a log of pieces printed a second apart, from second 1 on.
    fn found(pieces: &[&'static str], tail: Option<u32>, since: Option<i64>) -> u64 {
        let since = since.map(|second| Timestamp::from_second(second).unwrap());
        let mut search = LogSearch::new(&LogStart { offset: 0, tail, since });
        let (mut offset, mut time) = (0, 0);
        for piece in pieces {
            time += 1000;
            let bytes = Bytes::from_static(piece.as_bytes());
            search.record(&LogRecord { stream: LogStream::Out, offset, time, bytes });
            offset += piece.len() as u64;
        }
        search.found()
    }

    #[test]
    fn the_last_lines_are_found_in_pieces_of_any_size() {
        for pieces in [&["a\nbb\nccc\n"][..], &["a\nb", "b\nc", "cc", "\n"], &["a\n", "bb\nccc\n"]]
        {
            for (tail, begin) in [(0, 9), (1, 5), (2, 2), (3, 0), (9, 0)] {
                assert_eq!(found(pieces, Some(tail), None), begin, "{pieces:?} {tail}");
            }
        }
        assert_eq!(found(&["a\nunfinished"], Some(1), None), 2);
        assert_eq!(found(&[], Some(3), None), 0);
    }

    #[test]
    fn what_is_older_than_the_time_is_left_out() {
        let pieces = ["a\n", "b\n", "c\nd\n"];
        for (since, begin) in [(0, 0), (1, 0), (2, 2), (3, 4), (4, 8)] {
            assert_eq!(found(&pieces, None, Some(since)), begin, "{since}");
        }
        assert_eq!(found(&pieces, Some(1), Some(2)), 6, "both hold");
        assert_eq!(found(&pieces, Some(9), Some(3)), 4, "both hold");
    }
}
