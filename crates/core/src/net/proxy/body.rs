//! Streams bodies in both directions, and keeps no more of them than the beginning of a possible match.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::HeaderMap;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use tokio::time::Sleep;

use super::replace::{Replacements, StreamReplacer};
use super::request_log::{InFlightRequest, RequestRecord};
use super::upstream_connection::{Body, Broken};

/// A body in which texts are replaced, and others looked for.
pub(super) struct ReplacedBody {
    inner: Body,
    stream: StreamReplacer,
    /// The name to report when a text is found, and what finds it.
    watched: Vec<(String, StreamReplacer)>,
    record: Option<Arc<RequestRecord>>,
    trailers: Option<HeaderMap>,
    ended: bool,
    /// Runs while something is held back, where somebody may wait for it.
    waits: Option<Pin<Box<Sleep>>>,
    impatient: bool,
}

/// How long the first bytes of a text are held back when nothing follows: the other side may wait for them, with what follows.
pub(super) const HELD_BACK: Duration = Duration::from_millis(200);

impl ReplacedBody {
    pub(super) fn new(inner: Body, swap: &Replacements) -> Self {
        let stream = swap.stream();
        Self {
            inner,
            stream,
            watched: Vec::new(),
            record: None,
            trailers: None,
            ended: false,
            waits: None,
            impatient: false,
        }
    }

    /// Holds the first few bytes of a text back only for a moment, as somebody may wait for them. More of it is held
    /// until it is clear what it becomes.
    pub(super) fn impatient(mut self) -> Self {
        self.impatient = true;
        self
    }

    /// What was held back for too long.
    fn overdue(&mut self, context: &mut Context<'_>) -> Option<Bytes> {
        if !self.impatient || !self.stream.may_release() {
            self.waits = None;
            return None;
        }
        let waits = self.waits.get_or_insert_with(|| Box::pin(tokio::time::sleep(HELD_BACK)));
        if waits.as_mut().poll(context).is_pending() {
            return None;
        }
        self.waits = None;
        Some(self.stream.release()).filter(|piece| !piece.is_empty())
    }

    /// Looks for other texts too, and notes them.
    pub(super) fn watching(
        mut self,
        watched: &[(String, Replacements)],
        record: &Arc<RequestRecord>,
    ) -> Self {
        self.watched = watched.iter().map(|(note, swap)| (note.clone(), swap.stream())).collect();
        self.record = Some(Arc::clone(record));
        self
    }

    fn watch(&mut self, piece: &Bytes) {
        let record = self.record.as_ref();
        self.watched.retain_mut(|(note, stream)| {
            stream.push(piece.clone());
            let found = stream.hits() > 0;
            if let (true, Some(record)) = (found, record) {
                record.note(note);
            }
            !found
        });
    }
}

impl HttpBody for ReplacedBody {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        loop {
            if self.ended {
                return Poll::Ready(self.trailers.take().map(|map| Ok(Frame::trailers(map))));
            }
            let polled = match Pin::new(&mut self.inner).poll_frame(context) {
                Poll::Ready(polled) => polled,
                Poll::Pending => match self.overdue(context) {
                    Some(piece) => return Poll::Ready(Some(Ok(Frame::data(piece)))),
                    None => return Poll::Pending,
                },
            };
            self.waits = None;
            let piece = match polled {
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(piece) => {
                        self.watch(&piece);
                        self.stream.push(piece)
                    }
                    Err(frame) => {
                        self.ended = true;
                        self.trailers = frame.into_trailers().ok();
                        self.stream.finish()
                    }
                },
                None => {
                    self.ended = true;
                    self.stream.finish()
                }
            };
            if !piece.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(piece))));
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match self.ended {
            true => self.trailers.is_none(),
            // What is held back is still to come.
            false => self.inner.is_end_stream() && !self.stream.holds(),
        }
    }
}

/// The body of an answer, while its request is on record as open. Ends when the request is cut.
pub(super) struct CountedBody {
    inner: Body,
    /// What is taken out of its trailers.
    masks: Replacements,
    cut: Pin<Box<dyn Future<Output = ()> + Send>>,
    _flight: InFlightRequest,
}

impl CountedBody {
    pub(super) fn new(inner: Body, flight: InFlightRequest, masks: &Replacements) -> Self {
        let open = Arc::clone(&flight.record.open);
        let cut = Box::pin(async move { open.is_cut().await });
        Self { inner, masks: masks.clone(), cut, _flight: flight }
    }
}

impl HttpBody for CountedBody {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        if self.cut.as_mut().poll(context).is_ready() {
            return Poll::Ready(Some(Err("the policy changed".into())));
        }
        let mut polled = Pin::new(&mut self.inner).poll_frame(context);
        if let Poll::Ready(Some(Ok(frame))) = &mut polled
            && let Some(trailers) = frame.trailers_mut()
        {
            self.masks.headers(trailers);
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
