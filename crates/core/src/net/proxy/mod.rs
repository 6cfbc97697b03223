//! HTTP requests of domains that have rules or credentials.
//!
//! ```text
//!  sandbox ──TLS by its own authority──> serve ──request──> rules ──┬─ deny, answer ──> back
//!                                                                    └─ pass, forward
//!                                                                         │ placeholders become values
//!                                                                         │ headers are set
//!  outside <──TLS verified against the real name──────────────────────────┘
//! ```
//!
//! A connection comes here when `dispatch` has read its name from its first bytes and the rules ask for its requests to be inspected. It is
//! opened, and each request on it is judged by itself:
//!
//! - It must be for the host that the connection was opened for. Otherwise a connection that is allowed would carry requests to any
//!   other host that the same server answers for.
//! - The rules in force are asked. When they change, requests in flight that they now say something else about are cut, and the
//!   connection ends after the others.
//! - What is forwarded is written anew, in both directions: nothing that two readers could
//!   understand in two ways gets through, and nothing that is meant for one hop.
//! - Bodies stream. Each side is read only as fast as the other takes; what is kept of a body is
//!   bounded.
//! - Credentials are put in last, and taken out of the answer again.
//!
//! Whatever fails outside is an answer with 502 and a line in the journal; a certificate that does not prove the real
//! name is such a failure, always.

mod answer;
mod authority;
mod body;
mod head;
mod replace;
mod request;
mod request_log;
mod secrets;
#[cfg(test)]
mod tests;
mod tunnel;
mod upstream_connection;

use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, Bytes};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{Semaphore, watch};
use tokio_rustls::TlsAcceptor;

use self::request::ProxyConnection;
use self::upstream_connection::ConnectionTasks;
use super::gate::Gate;
use super::log::{ConnectionLog, OpenFlow};
use super::rules::Rules;
use super::special_addresses::Destination;
use super::upstream::Upstream;

pub use authority::{Authority, BadAuthority};

/// How long a sandbox may take for what it has to say.
#[derive(Debug, Clone, Copy)]
struct Timeouts {
    /// For its part of a TLS handshake.
    handshake: Duration,
    /// For the head of a request, from the end of the one before.
    head: Duration,
    /// For a body that is read whole.
    body: Duration,
    /// And how long a request waits for one of the sandbox's other connections outward to end.
    outward: Duration,
}

const TIMEOUTS: Timeouts = Timeouts {
    handshake: Duration::from_secs(15),
    head: Duration::from_secs(60),
    body: Duration::from_secs(30),
    outward: Duration::from_secs(30),
};
/// How large a head may be, on either side.
const LARGEST_HEAD: u32 = 64 << 10;
/// How many requests a connection may have in flight.
const MOST_STREAMS: u32 = 128;
/// How much of a stream, and of a whole connection, may be on its way. A sandbox is near: little is enough.
const STREAM_WINDOW: u32 = 256 << 10;
const CONNECTION_WINDOW: u32 = 512 << 10;
/// How much of an answer is kept for a sandbox that does not read it.
const LARGEST_UNREAD: usize = 128 << 10;
/// How often an HTTP/2 connection is checked for a live peer.
const ASK_EVERY: Duration = Duration::from_secs(60);
/// How an HTTP/2 connection begins.
const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2";

/// A connection whose requests are judged one by one.
#[derive(Debug)]
pub(super) struct Intercept {
    /// The name that it gave: in lower case, without a final dot.
    pub(super) name: String,
    /// Where it goes; refused places never come here.
    pub(super) to: Destination,
    /// Whether that address was given out for that name. Credentials go over TLS, which proves the name by itself, or
    /// in the clear to places inside that were given out for it.
    pub(super) given: bool,
    /// Whether it is TLS.
    pub(super) tls: bool,
    /// The rules in force. When they change, requests that no longer fit are cut.
    pub(super) rules: watch::Receiver<Arc<Rules>>,
    pub(super) upstream: Arc<Upstream>,
    pub(super) authority: Arc<Authority>,
    /// Who is asked about uses of secrets.
    pub(super) gate: Arc<dyn Gate>,
    /// One for each connection and request that may be held.
    pub(super) held: Arc<Semaphore>,
    /// Where each request is written down.
    pub(super) log: Arc<ConnectionLog>,
    /// The connection itself: counts its bytes, says when it must end.
    pub(super) open: Arc<OpenFlow>,
}

/// Carries a connection to its end. `first` are the bytes that were already read off it.
pub(super) async fn serve<S>(guest: S, first: Bytes, intercept: Intercept)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let open = Arc::clone(&intercept.open);
    tokio::select! {
        () = open.is_cut() => {}
        () = receive(guest, first, intercept, TIMEOUTS) => {}
    }
}

async fn receive<S>(guest: S, first: Bytes, intercept: Intercept, patience: Timeouts)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    // Each may hold some megabytes: who opens more waits.
    let Ok(_place) = intercept.authority.places.clone().acquire_owned().await else { return };
    let is_http2 = first.starts_with(HTTP2_PREFACE);
    let guest = Rewound { first, guest };
    if !intercept.tls {
        return converse(guest, is_http2, intercept, patience).await;
    }
    let config = match intercept.authority.server(&intercept.name) {
        Ok(config) => config,
        Err(error) => return intercept.open.failed(format!("{error}")),
    };
    let handshake = TlsAcceptor::from(config).accept(guest);
    match tokio::time::timeout(patience.handshake, handshake).await {
        Ok(Ok(guest)) => {
            let is_http2 = guest.get_ref().1.alpn_protocol() == Some(b"h2");
            converse(guest, is_http2, intercept, patience).await;
        }
        // Mostly a program that does not know the sandbox's authority.
        Ok(Err(error)) => {
            intercept.open.failed(format!("the sandbox did not take our certificate: {error}"));
        }
        Err(_) => intercept.open.failed("the sandbox did not finish its TLS handshake"),
    }
}

async fn converse<S>(guest: S, is_http2: bool, intercept: Intercept, patience: Timeouts)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let mut rules = intercept.rules.clone();
    rules.mark_unchanged();
    let tasks = ConnectionTasks::default();
    let proxy = Arc::new(ProxyConnection::new(intercept, is_http2, patience, &tasks));
    // They hold the proxy, and the proxy holds them: the cycle must be broken.
    let _ends = (tasks.abort_on_drop(), proxy.tunnels.abort_on_drop());
    let builder = builder(&tasks, is_http2, patience);
    let service = {
        let proxy = Arc::clone(&proxy);
        service_fn(move |request| request::handle(Arc::clone(&proxy), request))
    };
    let mut connection = pin!(builder.serve_connection_with_upgrades(TokioIo::new(guest), service));
    let mut tunnels = pin!(proxy.tunnels.all());
    let (mut served, mut watching) = (false, true);
    loop {
        tokio::select! {
            // How it ended is on record with each request.
            _ = connection.as_mut(), if !served => served = true,
            () = tunnels.as_mut(), if served => return,
            changed = rules.changed(), if watching => {
                watching = changed.is_ok();
                if watching {
                    proxy.judge_again();
                }
                if watching && !served {
                    connection.as_mut().graceful_shutdown();
                }
            }
        }
    }
}

fn builder(
    tasks: &ConnectionTasks,
    is_http2: bool,
    patience: Timeouts,
) -> auto::Builder<ConnectionTasks> {
    let mut builder = auto::Builder::new(tasks.clone());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(patience.head)
        .max_buf_size(LARGEST_HEAD as usize);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_header_list_size(LARGEST_HEAD)
        .max_concurrent_streams(MOST_STREAMS)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buf_size(LARGEST_UNREAD)
        .keep_alive_interval(ASK_EVERY);
    if is_http2 { builder.http2_only() } else { builder.http1_only() }
}

/// A connection that is read from its beginning again.
struct Rewound<S> {
    first: Bytes,
    guest: S,
}

impl<S: AsyncRead + Unpin> AsyncRead for Rewound<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.first.is_empty() {
            return Pin::new(&mut self.guest).poll_read(context, into);
        }
        let length = self.first.len().min(into.remaining());
        into.put_slice(&self.first[..length]);
        self.first.advance(length);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Rewound<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.guest).poll_write(context, from)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.guest).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.guest).poll_shutdown(context)
    }
}
