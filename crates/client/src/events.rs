//! The event feed: reads past events and follows new ones, and connects again where a stream broke off.

use std::time::Duration;

use bytes::BytesMut;

use crate::body::Download;
use crate::query::Target;
use crate::transport::Call;
use crate::types::Event;
use crate::{Client, Error};

/// An event is far smaller; what is larger is not the answer of a server of ours.
const LONGEST: usize = 1 << 20;
/// For how long a stream that follows tries to get back to a server that is gone.
const RECONNECT_FOR: Duration = Duration::from_secs(60);
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Selects events. All given conditions must match.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EventQuery {
    /// Of the sandbox of this name.
    pub sandbox: Option<String>,
    /// Of sandboxes with these tags, each as `key=value`.
    pub tags: Vec<String>,
    /// Of one of these kinds (`command.ended`) or groups of kinds (`command`).
    pub kinds: Vec<String>,
    /// Only those after the event with this id.
    pub cursor: Option<String>,
    /// Only those since then: a time, or how long ago, like `10m`.
    pub since: Option<String>,
    /// Whether to continue with new events.
    pub follow: bool,
    /// Those of all projects and of the host; needs an admin key.
    pub all_projects: bool,
}

/// A stream of events. One that follows reconnects by itself and continues where it was.
#[derive(Debug)]
pub struct Events<'a> {
    client: &'a Client,
    query: EventQuery,
    body: Option<Download>,
    buffer: BytesMut,
}

impl Client {
    /// Opens a stream of events.
    ///
    /// # Errors
    ///
    /// Fails with what the server says ([`Error::Api`]) or with what the way there says.
    pub async fn events(&self, query: EventQuery) -> Result<Events<'_>, Error> {
        let body = self.open_events(&query).await?;
        Ok(Events { client: self, query, body: Some(body), buffer: BytesMut::new() })
    }

    async fn open_events(&self, query: &EventQuery) -> Result<Download, Error> {
        let mut target = Target::new(&["events"])
            .maybe("sandbox", query.sandbox.as_deref())
            .maybe("cursor", query.cursor.as_deref())
            .maybe("since", query.since.as_deref().filter(|_| query.cursor.is_none()))
            .maybe("follow", (!query.follow).then_some("false"))
            .flag("all_projects", query.all_projects);
        for tag in &query.tags {
            target = target.with("tag", tag);
        }
        for kind in &query.kinds {
            target = target.with("kind", kind);
        }
        let call = Call::get(target).header("accept", Some("text/event-stream"));
        self.transport.send(call).await
    }
}

impl Events<'_> {
    /// The next event; nothing when a stream that does not follow has come to its end.
    ///
    /// # Errors
    ///
    /// [`Error::Api`] or [`Error::Broken`] when the server cannot be reached for a minute.
    pub async fn next(&mut self) -> Result<Option<Event>, Error> {
        loop {
            if let Some(event) = self.parse()? {
                // What comes after a reconnect comes after this.
                self.query.cursor = Some(event.id.clone());
                match event.kind.as_str() {
                    "stream.opened" => continue,
                    "stream.closing" if self.query.follow => self.body = None,
                    _ => return Ok(Some(event)),
                }
            }
            let piece = match &mut self.body {
                Some(body) => body.next().await,
                None => Ok(None),
            };
            match piece {
                Ok(Some(bytes)) => self.buffer.extend_from_slice(&bytes),
                Ok(None) if !self.query.follow => return Ok(None),
                Err(error) if !self.query.follow => return Err(error),
                Ok(None) | Err(_) => self.reconnect().await?,
            }
        }
    }

    async fn reconnect(&mut self) -> Result<(), Error> {
        self.body = None;
        self.buffer.clear();
        let until = tokio::time::Instant::now() + RECONNECT_FOR;
        let mut pause = FIRST_PAUSE;
        loop {
            tokio::time::sleep(pause).await;
            match self.client.open_events(&self.query).await {
                Ok(body) => {
                    self.body = Some(body);
                    return Ok(());
                }
                Err(error) if !error.may_pass() || tokio::time::Instant::now() > until => {
                    return Err(error);
                }
                Err(_) => pause = (pause * 2).min(LONGEST_PAUSE),
            }
        }
    }

    /// Takes a whole message out of what has come.
    fn parse(&mut self) -> Result<Option<Event>, Error> {
        while let Some(end) = find(&self.buffer, b"\n\n") {
            let message = self.buffer.split_to(end + 2);
            let mut lines = message[..].split(|byte| *byte == b'\n');
            if let Some(data) = lines.find_map(|line| line.strip_prefix(b"data: ")) {
                let event = serde_json::from_slice(data);
                return event.map(Some).map_err(|error| Error::broken("reading an event", error));
            }
        }
        if self.buffer.len() > LONGEST {
            let error = std::io::Error::other("an event is too long");
            return Err(Error::broken("reading an event", error));
        }
        Ok(None)
    }
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}
