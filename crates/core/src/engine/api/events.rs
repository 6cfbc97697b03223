//! Reading the event feed: what happened, from an event or a time on.

use crate::engine::observe::events::{EventQuery, EventStream};
use crate::engine::{Engine, Result};

impl Engine {
    /// Opens a stream of events.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Invalid`](crate::engine::Error::Invalid) when `after` is an id that no event has had yet.
    pub fn events(&self, query: EventQuery) -> Result<EventStream> {
        let context = &self.parts.context;
        EventStream::open(&context.events, context.tasks.shutdown(), query)
    }
}
