//! Reading the event feed: a stream follows the files of the journal at its own speed.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::Arc;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{EventFeed, READ_BYTES};
use crate::engine::{Error, Result};
use crate::model::{Event, EventFilter, EventId, Name, Timestamp};
use crate::store::{EventPosition, EventSource, event_sources, read_events};

/// Selects events by project.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EventScope {
    /// A project's.
    Project(Name),
    /// A project's, and those of the host.
    ProjectAndHost(Name),
    /// All.
    Everything,
}

/// Selects events, and where to begin.
#[derive(Debug, Clone)]
pub struct EventQuery {
    /// Whose.
    pub scope: EventScope,
    /// Which.
    pub filter: EventFilter,
    /// Only those after this one.
    pub after: Option<EventId>,
    /// Only those at this time or later; ignored with `after`.
    pub since: Option<Timestamp>,
    /// Whether the stream continues with new events. Without `after` and `since` it then begins
    /// now.
    pub follow: bool,
}

/// Events, as they are read.
#[derive(Debug)]
pub struct EventStream {
    feed: Arc<EventFeed>,
    query: EventQuery,
    written: watch::Receiver<EventId>,
    sources: BTreeMap<EventSource, SourceCursor>,
    /// Where every source that was not there before is read from.
    start: EventId,
    /// All up to here was handed out.
    cursor: EventId,
    /// Whether it counts that events before the first that is read were removed.
    strict: bool,
    shutdown: CancellationToken,
}

#[derive(Debug)]
struct SourceCursor {
    position: Option<EventPosition>,
    /// All events up to here are in `waiting` or were handed out.
    read: EventId,
    waiting: VecDeque<Event>,
}

/// A part of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventBatch {
    /// The events, in order.
    pub events: Vec<Event>,
    /// Whether events before these were removed before this stream could read them.
    pub missed: bool,
    /// The stream can be continued after this position.
    pub cursor: EventId,
}

impl EventStream {
    pub(in crate::engine) fn open(
        feed: &Arc<EventFeed>,
        shutdown: CancellationToken,
        query: EventQuery,
    ) -> Result<Self> {
        let written = feed.written.subscribe();
        let newest = feed.state.lock().last.max(EventId::at(Timestamp::now()));
        if query.after.is_some_and(|after| after > newest) {
            let reason = "it is later than every event; use the `id` of an event of this server";
            return Err(Error::invalid("cursor", reason));
        }
        let start = match (query.after, query.since) {
            (Some(after), _) => after,
            (None, Some(since)) => EventId(EventId::at(since).0.saturating_sub(1)),
            (None, None) if query.follow => *written.borrow(),
            (None, None) => EventId(0),
        };
        Ok(Self {
            feed: Arc::clone(feed),
            strict: query.after.is_some(),
            query,
            written,
            sources: BTreeMap::new(),
            start,
            cursor: start,
            shutdown,
        })
    }

    /// The stream can be continued after this position.
    #[must_use]
    pub fn cursor(&self) -> EventId {
        self.cursor
    }

    /// The next events. `None` when there are no more: the stream does not follow, or the daemon
    /// goes down. Nothing is lost when the future is dropped.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Io`] when the journal cannot be read.
    pub async fn next(&mut self) -> Result<Option<EventBatch>> {
        loop {
            let end = *self.written.borrow_and_update();
            while self.cursor < end {
                let missed = self.read(end).await?;
                let batch = self.take();
                if !batch.events.is_empty() || missed {
                    return Ok(Some(EventBatch { missed, ..batch }));
                }
            }
            if !self.query.follow || self.shutdown.is_cancelled() {
                return Ok(None);
            }
            tokio::select! {
                changed = self.written.changed() => if changed.is_err() { return Ok(None) },
                () = self.shutdown.cancelled() => {}
            }
        }
    }

    /// Reads more of the sources of which everything was handed out. Says whether some was missed.
    async fn read(&mut self, end: EventId) -> Result<bool> {
        let journal = self.feed.journal.clone();
        let reading = Arc::clone(&self.feed.reading);
        let Ok(_permit) = reading.acquire().await else { return Ok(false) };
        let (scope, start) = (self.query.scope.clone(), self.start.max(self.cursor));
        let known: Vec<_> = self
            .sources
            .iter()
            .map(|(source, at)| (source.clone(), at.position, at.read, at.waiting.is_empty()))
            .collect();
        let work = move || {
            let wanted = match scope {
                EventScope::Project(name) => vec![EventSource::Project(name)],
                EventScope::ProjectAndHost(name) => {
                    vec![EventSource::Host, EventSource::Project(name)]
                }
                EventScope::Everything => event_sources(&journal)?,
            };
            let share = READ_BYTES / u64::try_from(wanted.len()).unwrap_or(1).max(1);
            let mut chunks = Vec::new();
            for source in wanted {
                let at = known.iter().find(|(known, ..)| *known == source);
                let (position, read) =
                    at.map_or((None, start), |(_, position, read, _)| (*position, *read));
                let is_empty = at.is_none_or(|(.., is_empty)| *is_empty);
                if is_empty && read < end {
                    let chunk =
                        read_events(&journal, &source, position, (read, end), share.max(8 << 10))?;
                    chunks.push((source, read, chunk));
                }
            }
            Ok::<_, io::Error>(chunks)
        };
        let chunks = match tokio::task::spawn_blocking(work).await {
            Ok(chunks) => chunks.map_err(Error::EventJournal)?,
            Err(_) => return Ok(false),
        };
        let mut missed = false;
        for (source, read, chunk) in chunks {
            missed |= chunk.missed;
            let last = chunk.events.last().map_or(read, |event| event.id);
            let read = if chunk.complete { end } else { last };
            let waiting = chunk.events.into();
            self.sources.insert(source, SourceCursor { position: chunk.position, read, waiting });
        }
        Ok(std::mem::replace(&mut self.strict, true) && missed)
    }

    /// Hands out what comes before everything that was not read.
    fn take(&mut self) -> EventBatch {
        let horizon = self.sources.values().map(|source| source.read).min();
        // A project that has no events has nothing to wait for.
        let horizon = horizon.unwrap_or(*self.written.borrow());
        let mut events = Vec::new();
        for source in self.sources.values_mut() {
            let ready = source.waiting.partition_point(|event| event.id <= horizon);
            events.extend(source.waiting.drain(..ready));
        }
        events.retain(|event| self.query.filter.wants(event));
        events.sort_by_key(|event| event.id);
        self.cursor = self.cursor.max(horizon);
        EventBatch { events, missed: false, cursor: self.cursor }
    }
}
