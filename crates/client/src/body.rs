//! What travels in requests and answers: whole, as a stream of bytes, or as lines of JSON.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Frame, Incoming};
use hyper::header::CONTENT_TYPE;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::sync::mpsc;

use crate::Error;
use crate::transport::{Connection, Idle};

/// What a request carries.
pub(crate) type Outgoing = UnsyncBoxBody<Bytes, io::Error>;

/// Bytes to be sent.
pub struct Upload {
    pub(crate) body: Outgoing,
}

impl fmt::Debug for Upload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Upload").finish_non_exhaustive()
    }
}

impl Upload {
    /// Sends what `reader` yields, while it is read.
    pub fn reader(reader: impl AsyncRead + Send + 'static) -> Self {
        let reader = Box::pin(reader);
        Self { body: ReadBody { reader, buffer: BytesMut::new() }.boxed_unsync() }
    }

    /// Sends what comes through `channel`, until its other end is dropped. An error breaks the
    /// upload off, and the server sees that it is not whole.
    #[must_use]
    pub fn channel(channel: mpsc::Receiver<io::Result<Bytes>>) -> Self {
        Self { body: ChannelBody { channel }.boxed_unsync() }
    }
}

impl From<Bytes> for Upload {
    fn from(bytes: Bytes) -> Self {
        Self { body: whole(bytes) }
    }
}

/// The body of an answer, as it comes.
pub struct Download {
    body: Option<Incoming>,
    headers: hyper::HeaderMap,
    // The connection, and where it goes when the body has come to its end.
    home: Option<(Connection, Option<Idle>)>,
}

impl fmt::Debug for Download {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Download").field("ended", &self.body.is_none()).finish_non_exhaustive()
    }
}

impl Download {
    pub(crate) fn new(
        answer: hyper::Response<Incoming>,
        connection: Connection,
        idle: Option<Idle>,
    ) -> Self {
        let (head, body) = answer.into_parts();
        Self { body: Some(body), headers: head.headers, home: Some((connection, idle)) }
    }

    /// Returns the next piece, or nothing at the end.
    ///
    /// # Errors
    ///
    /// [`Error::Broken`] if the connection ends before the body does.
    pub async fn next(&mut self) -> Result<Option<Bytes>, Error> {
        while let Some(body) = &mut self.body {
            match body.frame().await {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
                Some(Err(error)) => {
                    self.body = None;
                    return Err(Error::broken("receiving its answer", error));
                }
                None => self.finish(),
            }
        }
        Ok(None)
    }

    /// Reads all of it into memory.
    ///
    /// # Errors
    ///
    /// As [`next`](Self::next).
    pub async fn collect(mut self) -> Result<Bytes, Error> {
        let Some(first) = self.next().await? else { return Ok(Bytes::new()) };
        let mut all = BytesMut::from(first);
        while let Some(more) = self.next().await? {
            all.extend_from_slice(&more);
        }
        Ok(all.freeze())
    }

    /// Writes all of it to `writer` and returns how much that was.
    ///
    /// # Errors
    ///
    /// As [`next`](Self::next), or [`Error::Local`] if `writer` fails.
    pub async fn copy_to(mut self, writer: &mut (impl AsyncWrite + Unpin)) -> Result<u64, Error> {
        let local = |source| Error::Local { action: "write what was received", source };
        let mut total = 0;
        while let Some(piece) = self.next().await? {
            writer.write_all(&piece).await.map_err(local)?;
            total += piece.len() as u64;
        }
        writer.flush().await.map_err(local)?;
        Ok(total)
    }

    /// How long the body will be, if the server knew when it began.
    #[must_use]
    pub fn length(&self) -> Option<u64> {
        self.header("content-length")?.parse().ok()
    }

    /// A header of the answer.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// Whether the answer is of this media type.
    pub(crate) fn is_type(&self, media: &str) -> bool {
        self.header(CONTENT_TYPE.as_str()).is_some_and(|found| found.starts_with(media))
    }

    fn finish(&mut self) {
        self.body = None;
        if let Some((sender, Some(idle))) = self.home.take() {
            idle.lock().push(sender);
        }
    }
}

/// A body of JSON documents, one to a line.
pub struct Lines<T> {
    download: Download,
    buffer: BytesMut,
    silence: Option<Duration>,
    of: std::marker::PhantomData<fn() -> T>,
}

impl<T> fmt::Debug for Lines<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lines").field("download", &self.download).finish_non_exhaustive()
    }
}

impl<T: DeserializeOwned> Lines<T> {
    pub(crate) fn of(download: Download) -> Result<Self, Error> {
        if !download.is_type("application/x-ndjson") {
            let found = download.header("content-type").unwrap_or("nothing").to_owned();
            return Err(Error::protocol(format!("expected application/x-ndjson, got {found}")));
        }
        let (buffer, of) = (BytesMut::new(), std::marker::PhantomData);
        Ok(Self { download, buffer, silence: None, of })
    }

    /// Takes a connection on which nothing comes for this long for broken.
    pub(crate) fn never_silent_for(mut self, silence: Duration) -> Self {
        self.silence = Some(silence);
        self
    }

    async fn piece(&mut self) -> Result<Option<Bytes>, Error> {
        let Some(silence) = self.silence else { return self.download.next().await };
        match tokio::time::timeout(silence, self.download.next()).await {
            Ok(piece) => piece,
            Err(elapsed) => Err(Error::broken("receiving its answer", elapsed)),
        }
    }

    /// Returns the next document, or nothing at the end.
    ///
    /// # Errors
    ///
    /// [`Error::Broken`] if the connection ends early, [`Error::Protocol`] for a line we cannot read.
    pub async fn next(&mut self) -> Result<Option<T>, Error> {
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line = self.buffer.split_to(end + 1);
                if line.len() > 1 {
                    return read_line(&line).map(Some);
                }
                continue;
            }
            match self.piece().await? {
                Some(piece) => self.buffer.extend_from_slice(&piece),
                None if self.buffer.is_empty() => return Ok(None),
                None => {
                    let rest = self.buffer.split();
                    return read_line(&rest).map(Some);
                }
            }
        }
    }
}

fn read_line<T: DeserializeOwned>(line: &[u8]) -> Result<T, Error> {
    serde_json::from_slice(line)
        .map_err(|error| Error::protocol(format!("a line that is not the JSON we know: {error}")))
}

/// A request body read from somewhere while it is being sent.
struct ReadBody {
    reader: Pin<Box<dyn AsyncRead + Send>>,
    buffer: BytesMut,
}

/// How much of a stream travels in one piece.
const PIECE: usize = 64 << 10;

impl Body for ReadBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let this = self.get_mut();
        this.buffer.resize(PIECE, 0);
        let mut space = ReadBuf::new(&mut this.buffer);
        if let Err(error) = ready!(this.reader.as_mut().poll_read(cx, &mut space)) {
            return Poll::Ready(Some(Err(error)));
        }
        let read = space.filled().len();
        if read == 0 {
            return Poll::Ready(None);
        }
        Poll::Ready(Some(Ok(Frame::data(this.buffer.split_to(read).freeze()))))
    }
}

/// A request body that another task makes while it is being sent.
struct ChannelBody {
    channel: mpsc::Receiver<io::Result<Bytes>>,
}

impl Body for ChannelBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let piece = ready!(self.get_mut().channel.poll_recv(cx));
        Poll::Ready(piece.map(|piece| piece.map(Frame::data)))
    }
}

pub(crate) fn whole(bytes: Bytes) -> Outgoing {
    Full::new(bytes).map_err(|never| match never {}).boxed_unsync()
}
