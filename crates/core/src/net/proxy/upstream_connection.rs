//! Connections outward, for the requests of one connection of a sandbox.
//!
//! Requests that go where they were going use the address that the sandbox dialled; it was decided about. Those that are
//! forwarded have their host resolved here, and every address is asked about. TLS is verified against the real name
//! with what the host trusts, always: there is no setting and no rule that makes it less.

use std::error::Error;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::Uri;
use hyper::rt::{Executor, Read, ReadBufCursor, Write};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use tower_service::Service;

use super::super::log::OpenFlow;
use super::super::rules::Rules;
use super::super::sockets::{SandboxSockets, SocketPermit};
use super::super::special_addresses::{self, Destination};
use super::super::upstream::Upstream;
use super::{LARGEST_HEAD, LARGEST_UNREAD};

/// A body on its way.
pub(super) type Body = UnsyncBoxBody<Bytes, Broken>;

/// Why a body ended early.
pub(super) type Broken = Box<dyn Error + Send + Sync>;

/// How long somebody outside may take for the TLS handshake.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(20);
/// How long a connection outward is kept for the next request.
const IDLE_FOR: Duration = Duration::from_secs(60);
/// And how many of them.
const MOST_IDLE: usize = 4;
/// How much of a stream, and of a whole connection, may be on its way.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 2 << 20;

/// Tasks of a connection. They end when the last holder is dropped.
#[derive(Debug, Clone, Default)]
pub(super) struct ConnectionTasks(Arc<Mutex<JoinSet<()>>>);

impl ConnectionTasks {
    /// Waits until all have ended.
    pub(super) async fn all(&self) {
        let mut tasks = std::mem::take(&mut *self.0.lock());
        while tasks.join_next().await.is_some() {}
    }

    /// Ends them when it is dropped.
    pub(super) fn abort_on_drop(&self) -> AbortOnDrop {
        AbortOnDrop(self.clone())
    }
}

/// Ends tasks when it is dropped, even if others still hold them.
pub(super) struct AbortOnDrop(ConnectionTasks);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.0.lock().abort_all();
    }
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for ConnectionTasks {
    fn execute(&self, task: F) {
        let mut tasks = self.0.lock();
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }
}

/// What a client is to speak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HttpVersion {
    /// What the other side likes best; over plain connections, HTTP/1.1. Many requests at once may make as many
    /// connections before the first is known to take them all.
    Any,
    Http1,
    /// HTTP/2, over plain connections too.
    Http2,
}

/// Which addresses are dialled.
#[derive(Debug, Clone, Copy)]
pub(super) enum Reach {
    /// The one that the sandbox dialled: it was decided about. Never for what is forwarded: who wrote that rule named a
    /// host, and the sandbox must not choose where that is.
    Own(Destination),
    /// Those of the host, as far as rules let it.
    Host,
    /// Those of them that are inside: what goes there in the clear does not cross other networks.
    Inside,
}

/// How many connections outward there may be.
#[derive(Clone)]
pub(super) struct Room {
    /// One for each of them.
    pub(super) connections: Arc<Semaphore>,
    /// And one for each socket of the sandbox.
    pub(super) sockets: SandboxSockets,
    /// How long one is waited for.
    pub(super) within: Duration,
}

/// What makes connections outward.
#[derive(Clone)]
pub(super) struct Dialler {
    upstream: Arc<Upstream>,
    rules: watch::Receiver<Arc<Rules>>,
    /// Where the sandbox's connection goes: whether by TLS, host, port.
    own: (bool, String, u16),
    reach: Reach,
    /// Where requests were forwarded to.
    forwarded: Arc<Mutex<Vec<(String, Destination)>>>,
    room: Room,
    /// What counts the bytes.
    open: Arc<OpenFlow>,
    tls: Arc<ClientConfig>,
    speaks: HttpVersion,
    /// The connection by which was found out what the other side speaks; the first who needs one has it.
    ready: Arc<Mutex<Option<UpstreamIo>>>,
}

impl Dialler {
    pub(super) fn new(
        upstream: &Arc<Upstream>,
        rules: &watch::Receiver<Arc<Rules>>,
        own: (bool, String, u16),
        to: Destination,
        open: &Arc<OpenFlow>,
        room: Room,
    ) -> Self {
        let (upstream, rules, open) = (Arc::clone(upstream), rules.clone(), Arc::clone(open));
        let tls = upstream.tls();
        let (reach, speaks) = (Reach::Own(to), HttpVersion::Any);
        let (forwarded, ready) = (Arc::default(), Arc::default());
        Self { upstream, rules, own, reach, forwarded, room, open, tls, speaks, ready }
            .speaking(HttpVersion::Any)
    }

    /// The same, for what is forwarded.
    pub(super) fn reaching(&self, reach: Reach) -> Self {
        Self { reach, ..self.clone() }
    }

    /// The rule against an address of `host` that requests were forwarded to, if there is one now.
    pub(super) fn against(&self, rules: &Rules, host: &str) -> Option<String> {
        let forwarded = self.forwarded.lock();
        let mut places = forwarded.iter().filter(|(known, _)| known == host);
        places.find_map(|(host, destination)| rules.forward(host, *destination).err())
    }

    fn speaking(&self, speaks: HttpVersion) -> Self {
        let mut tls = ClientConfig::clone(&self.tls);
        tls.alpn_protocols = match speaks {
            HttpVersion::Any => vec![b"h2".to_vec(), b"http/1.1".to_vec()],
            HttpVersion::Http1 => vec![b"http/1.1".to_vec()],
            HttpVersion::Http2 => vec![b"h2".to_vec()],
        };
        Self { tls: Arc::new(tls), speaks, ..self.clone() }
    }

    /// Finds out whether HTTP/2 is spoken where the sandbox's connection goes.
    pub(super) async fn probe(&self) -> io::Result<bool> {
        let (secure, host, port) = self.own.clone();
        let wire = self.clone().connect(secure, host, port).await?;
        let is_http2 = wire.is_http2;
        *self.ready.lock() = Some(wire);
        Ok(is_http2)
    }

    /// A client that keeps its connections while it lives.
    pub(super) fn client(
        &self,
        speaks: HttpVersion,
        tasks: &ConnectionTasks,
    ) -> Client<Self, Body> {
        Client::builder(tasks.clone())
            .pool_timer(TokioTimer::new())
            .timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_FOR)
            .pool_max_idle_per_host(MOST_IDLE)
            .http2_only(speaks == HttpVersion::Http2)
            .http2_initial_stream_window_size(STREAM_WINDOW)
            .http2_initial_connection_window_size(CONNECTION_WINDOW)
            .http2_max_header_list_size(LARGEST_HEAD)
            .http2_max_send_buf_size(LARGEST_UNREAD)
            .build(self.speaking(speaks))
    }

    async fn dial(self, to: Uri) -> io::Result<UpstreamIo> {
        let secure = to.scheme_str() == Some("https");
        let host = to.host().unwrap_or_default().to_owned();
        let port = to.port_u16().unwrap_or(if secure { 443 } else { 80 });
        if let Reach::Own(_) = self.reach
            && let Some(wire) = self.take_ready()
        {
            return Ok(wire);
        }
        self.connect(secure, host, port).await
    }

    fn take_ready(&self) -> Option<UpstreamIo> {
        let mut ready = self.ready.lock();
        ready.take_if(|wire| wire.is_http2 == (self.speaks == HttpVersion::Http2))
    }

    async fn connect(self, secure: bool, host: String, port: u16) -> io::Result<UpstreamIo> {
        let Room { connections, sockets, within } = &self.room;
        let too_many = || io::Error::other("the sandbox has too many connections outward");
        let room = tokio::time::timeout(*within, Arc::clone(connections).acquire_owned());
        let Ok(Ok(room)) = room.await else { return Err(too_many()) };
        let socket = sockets.take().map_err(|why| io::Error::other(why.to_string()))?;
        let stream = match self.reach {
            Reach::Own(to) => self.upstream.dial(to.real).await,
            Reach::Host => self.forward(&host, port, false).await,
            Reach::Inside => self.forward(&host, port, true).await,
        };
        let stream = stream.map_err(|error| told(&error, &host, "cannot be reached"))?;
        let open = Arc::clone(&self.open);
        let counted = CountedConnection { stream, open, _room: (room, socket) };
        if !secure {
            return Ok(UpstreamIo { io: TokioIo::new(Box::new(counted)), is_http2: false });
        }
        let bare = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(bare)
            .map_err(|_| io::Error::other(format!("{host} is no name that TLS knows")))?;
        let handshake = TlsConnector::from(Arc::clone(&self.tls)).connect(name, counted);
        let stream = tokio::time::timeout(HANDSHAKE_WITHIN, handshake)
            .await
            .map_err(|_| io::Error::other(format!("{host} did not finish its TLS handshake")))?
            .map_err(|error| told(&error, &host, "is not trusted over TLS"))?;
        let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
        Ok(UpstreamIo { io: TokioIo::new(Box::new(stream)), is_http2 })
    }

    /// Connects to where a rule forwards to.
    async fn forward(&self, host: &str, port: u16, inside: bool) -> io::Result<TcpStream> {
        let rules = Arc::clone(&self.rules.borrow());
        let asked = Mutex::new(None);
        let may = |destination: Destination| {
            if inside && special_addresses::inside(destination.real.ip()).is_none() {
                return Err("credentials go there over TLS only".to_owned());
            }
            rules.forward(host, destination)?;
            *asked.lock() = Some(destination);
            Ok(())
        };
        let stream = self.upstream.connect(host, port, may).await?;
        let asked = asked.into_inner();
        let mut forwarded = self.forwarded.lock();
        if let Some(destination) = asked
            && !forwarded.iter().any(|(known, at)| known == host && at.asked == destination.asked)
        {
            forwarded.push((host.to_owned(), destination));
        }
        Ok(stream)
    }
}

fn told(error: &io::Error, host: &str, what: &str) -> io::Error {
    io::Error::new(error.kind(), format!("{host} {what}: {error}"))
}

impl Service<Uri> for Dialler {
    type Response = UpstreamIo;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<UpstreamIo>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, to: Uri) -> Self::Future {
        Box::pin(self.clone().dial(to))
    }
}

trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// A connection outward.
pub(super) struct UpstreamIo {
    io: TokioIo<Box<dyn Duplex>>,
    is_http2: bool,
}

impl Connection for UpstreamIo {
    fn connected(&self) -> Connected {
        if self.is_http2 { Connected::new().negotiated_h2() } else { Connected::new() }
    }
}

impl Read for UpstreamIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(context, into)
    }
}

impl Write for UpstreamIo {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(context, from)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}

/// Counts what goes over the wire.
struct CountedConnection {
    stream: TcpStream,
    open: Arc<OpenFlow>,
    _room: (OwnedSemaphorePermit, SocketPermit),
}

impl AsyncRead for CountedConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = into.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(context, into);
        self.open.received((into.filled().len() - before) as u64);
        polled
    }
}

impl AsyncWrite for CountedConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(context, from);
        if let Poll::Ready(Ok(written)) = &polled {
            self.open.sent(*written as u64);
        }
        polled
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// What went wrong outside: in words, and whether a rule was against it.
pub(super) fn explain(error: &(dyn Error + 'static)) -> (String, bool) {
    let mut next = Some(error);
    let mut last = error.to_string();
    while let Some(error) = next {
        if let Some(io) = error.downcast_ref::<io::Error>()
            && io.get_ref().is_some()
        {
            return (io.to_string(), io.kind() == io::ErrorKind::PermissionDenied);
        }
        last = error.to_string();
        next = error.source();
    }
    (last, false)
}
