//! Sockets, connections and their shutdown.
//!
//! One accept loop for each socket and one task for each connection. How many there may be is `connections`' business. When the shutdown future
//! resolves, listeners close at once, idle connections too; streams end with a line that says why;
//! requests in progress may finish within [`Limits::drain`], and the rest is cut off then. The
//! engine is not shut down here: that is up to its owner.

use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::Router;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use crate::api::{self, App};
use crate::connections::{Counted, Slot, Via, turn_away, turn_away_local};
use crate::limits::Limits;
use crate::tls::{Tls, TlsError, TlsFiles};
use sandkeep_client::types::error_chain;
use sandkeep_core::engine::Engine;

/// Where and how to serve.
#[derive(Debug, Clone)]
pub struct ServeConfig {
    /// Addresses to listen on.
    pub tcp: Vec<SocketAddr>,
    /// A Unix socket to listen on, which only its owner can open.
    pub unix: Option<PathBuf>,
    /// Where uploaded archives lie while they are imported; must be roomy.
    pub scratch: PathBuf,
    /// What callers may do.
    pub limits: Limits,
    /// How ports inside sandboxes are reached.
    pub gateway: crate::GatewaySettings,
    /// How Vercel's clients are served.
    pub vercel: crate::VercelSettings,
    /// Which names and web pages may reach the API.
    pub web: crate::WebSettings,
    /// Certificate and key, if the addresses speak TLS.
    pub tls: Option<TlsFiles>,
}

/// Why the server could not listen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// An address cannot be had.
    #[error("could not listen on {address}")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        source: io::Error,
    },
    /// The Unix socket cannot be made.
    #[error("could not listen on `{path}`", path = path.display())]
    Socket {
        /// Where.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Another server answers on the Unix socket.
    #[error("another server listens on `{path}`", path = path.display())]
    InUse {
        /// Where.
        path: PathBuf,
    },
    /// Certificate and key cannot be used.
    #[error("cannot load the TLS certificate")]
    Tls(#[from] TlsError),
}

/// Listens as `config` says and serves until `shutdown`.
///
/// # Errors
///
/// Returns [`ServeError`] when a socket cannot be had; nothing was served then.
pub async fn serve(
    engine: Engine,
    config: ServeConfig,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), ServeError> {
    Server::bind(config).await?.run(engine, shutdown).await;
    Ok(())
}

/// Sockets that are open and not yet served.
#[derive(Debug)]
pub struct Server {
    tcp: Vec<TcpListener>,
    unix: Option<Socket>,
    scratch: PathBuf,
    limits: Limits,
    gateway: crate::GatewaySettings,
    vercel: crate::VercelSettings,
    web: crate::WebSettings,
    tls: Option<Arc<Tls>>,
}

impl Server {
    /// Opens all sockets.
    ///
    /// # Errors
    ///
    /// Returns [`ServeError`] when one cannot be had.
    pub async fn bind(config: ServeConfig) -> Result<Self, ServeError> {
        let tls = config.tls.map(Tls::load).transpose()?;
        let mut tcp = Vec::with_capacity(config.tcp.len());
        for address in config.tcp {
            let listener = TcpListener::bind(address).await;
            tcp.push(listener.map_err(|source| ServeError::Bind { address, source })?);
        }
        let unix = match config.unix {
            Some(path) => Some(Socket::bind(path).await?),
            None => None,
        };
        let ServeConfig { scratch, limits, gateway, vercel, web, .. } = config;
        Ok(Self { tcp, unix, scratch, limits, gateway, vercel, web, tls })
    }

    /// The addresses that were got; of use when a port was left to the system.
    #[must_use]
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.tcp.iter().filter_map(|listener| listener.local_addr().ok()).collect()
    }

    /// Serves until `shutdown`.
    pub async fn run(self, engine: Engine, shutdown: impl Future<Output = ()> + Send) {
        crate::compat::vercel::network::adopt_notes(&engine).await;
        let drain = self.limits.drain;
        let local = self.addresses().first().copied();
        let web = self.web.with(&self.gateway, &self.vercel);
        let gateway = crate::GatewaySettings { tls: self.tls.is_some(), ..self.gateway };
        let app = App::new(engine, self.limits, self.scratch, gateway, self.vercel);
        let app = Arc::new(App { local, web, tls: self.tls, ..app });
        if let Some(tls) = &app.tls {
            app.spawn_until_shutdown(Arc::clone(tls).watch());
        }
        let router = api::router(Arc::clone(&app));
        let mut loops = tokio::task::JoinSet::new();
        for listener in self.tcp {
            loops.spawn(accept_tcp(listener, router.clone(), Arc::clone(&app)));
        }
        let socket = self.unix.map(|unix| {
            loops.spawn(accept_unix(unix.listener, router.clone(), Arc::clone(&app)));
            unix.file
        });
        shutdown.await;
        app.closing.cancel();
        app.tasks.close();
        while loops.join_next().await.is_some() {}
        drop(socket);
        if tokio::time::timeout(drain, app.tasks.wait()).await.is_err() {
            let unfinished = app.tasks.len();
            tracing::warn!(unfinished, "requests did not finish in time and were cut off");
        }
    }
}

async fn accept_tcp(listener: TcpListener, router: Router, app: Arc<App>) {
    let closing = app.closing.clone();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = closing.cancelled() => return,
        };
        match accepted {
            Ok((stream, peer)) => {
                let Ok(slot) = app.connections.admit(Some(peer.ip())) else {
                    // A TLS client cannot be answered: that would take a handshake.
                    if app.tls.is_none() {
                        turn_away(stream);
                    }
                    continue;
                };
                // Small answers must not wait for the kernel to gather more.
                let _ = stream.set_nodelay(true);
                notice_the_dead(&stream);
                let (peer, of) = (Peer(Some(peer.ip())), Arc::clone(&app));
                app.tasks.spawn(tcp_connection(stream, slot, peer, router.clone(), of));
                while app.connections.is_busy_closing() && !closing.is_cancelled() {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
            Err(error) => pause(&error).await,
        }
    }
}

async fn accept_unix(listener: UnixListener, router: Router, app: Arc<App>) {
    let closing = app.closing.clone();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = closing.cancelled() => return,
        };
        match accepted {
            Ok((stream, _)) => {
                let Ok(slot) = app.connections.admit(None) else {
                    turn_away_local(stream);
                    continue;
                };
                let by = Instant::now() + app.limits.first_request;
                // The stream has the place from here on, wherever an upgrade takes it.
                let stream = Counted::new(stream, Arc::clone(&slot));
                let of = Arc::clone(&app);
                app.tasks.spawn(connection(stream, slot, Peer(None), by, router.clone(), of));
            }
            Err(error) => pause(&error).await,
        }
    }
}

/// A peer that vanished without closing must not hold a connection, and keep a sandbox awake,
/// without end.
fn notice_the_dead(stream: &TcpStream) {
    use rustix::net::sockopt;
    let asked = sockopt::set_socket_keepalive(stream, true)
        .and_then(|()| sockopt::set_tcp_keepidle(stream, Duration::from_secs(60)))
        .and_then(|()| sockopt::set_tcp_keepintvl(stream, Duration::from_secs(15)))
        .and_then(|()| sockopt::set_tcp_keepcnt(stream, 4));
    if let Err(error) = asked {
        tracing::debug!(%error, "cannot enable TCP keepalive on a connection");
    }
}

/// A failed accept is the peer's doing, or we are out of files: then it helps to wait.
async fn pause(error: &io::Error) {
    let by_peer = matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionRefused
    );
    if !by_peer {
        tracing::warn!(%error, "could not accept a connection");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// How long a peer may take to say what it wants next.
const HEAD: Duration = Duration::from_secs(60);
/// How much an HTTP/2 peer may send as headers of one request, in bytes.
const HEADERS: u32 = 64 << 10;
/// How many requests an HTTP/2 peer may have under way on one connection.
const STREAMS: u32 = 256;

/// Who is at the other end of a connection; every request carries it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer(pub(crate) Option<IpAddr>);

/// Runs the tasks of an HTTP/2 connection among those that a shutdown waits for.
#[derive(Clone)]
pub(crate) struct TrackedTasks(pub(crate) TaskTracker);

impl<F> hyper::rt::Executor<F> for TrackedTasks
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    fn execute(&self, work: F) {
        self.0.spawn(work);
    }
}

/// Serves a TCP connection, after the handshake if this server speaks TLS.
async fn tcp_connection(
    stream: TcpStream,
    slot: Arc<Slot>,
    peer: Peer,
    router: Router,
    app: Arc<App>,
) {
    let by = Instant::now() + app.limits.first_request;
    let Some(tls) = app.tls.clone() else {
        let stream = Counted::new(stream, Arc::clone(&slot));
        return connection(stream, slot, peer, by, router, app).await;
    };
    let secured = tokio::select! {
        secured = tls.accept(stream, Arc::clone(&slot)) => secured,
        () = slot.cut() => return,
        () = app.closing.cancelled() => return,
        () = tokio::time::sleep_until(by) => return,
    };
    match secured {
        Ok(Some(stream)) => connection(stream, slot, peer, by, router, app).await,
        Ok(None) => {}
        Err(error) => {
            app.http.handshakes_failed.fetch_add(1, Ordering::Relaxed);
            tracing::debug!(%error, "a TLS handshake failed");
        }
    }
}

/// Serves a connection whose first request must have come `by` then.
async fn connection<S>(
    stream: S,
    slot: Arc<Slot>,
    peer: Peer,
    by: Instant,
    router: Router,
    app: Arc<App>,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let closing = app.closing.clone();
    let mut builder = Builder::new(TrackedTasks(app.tasks.clone()));
    // A peer that never finishes its headers does not hold a connection for long.
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_header_list_size(HEADERS)
        .max_concurrent_streams(STREAMS)
        .keep_alive_interval(HEAD)
        .keep_alive_timeout(HEAD / 2);
    let service = TowerToHyperService::new(router);
    let asked = Arc::new(Notify::new());
    let first = Arc::clone(&asked);
    let place = Arc::clone(&slot);
    let service = service_fn(move |mut request: hyper::Request<hyper::body::Incoming>| {
        first.notify_one();
        let under_way = place.request();
        request.extensions_mut().insert(peer);
        request.extensions_mut().insert(Via::new(&place));
        let answer = service.call(request);
        async move { answer.await.map(|response| under_way.answered(response)) }
    });
    let serving = builder.serve_connection_with_upgrades(TokioIo::new(stream), service);
    tokio::pin!(serving);
    // The first bytes show the version of HTTP, and nothing else limits the time for those.
    let ended = tokio::select! {
        ended = serving.as_mut() => Some(ended),
        () = asked.notified() => None,
        () = closing.cancelled() => None,
        () = slot.cut() => return,
        () = tokio::time::sleep_until(by) => return,
    };
    let ended = match ended {
        Some(ended) => ended,
        None => tokio::select! {
            ended = serving.as_mut() => ended,
            () = slot.cut() => return,
            () = closing.cancelled() => {
                serving.as_mut().graceful_shutdown();
                serving.await
            }
        },
    };
    if let Err(error) = ended {
        tracing::debug!(error = error_chain(error.as_ref()), "a connection broke");
    }
}

/// A Unix socket and its file.
#[derive(Debug)]
struct Socket {
    listener: UnixListener,
    file: SocketFile,
}

/// The file of a socket; goes away with it, unless another server has put its own in its place.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    inode: u64,
}

impl Socket {
    /// Makes the socket in a directory that is closed to others and renames it to its place: no
    /// other user can open it, not even for a moment, and one that a dead server left is replaced.
    async fn bind(path: PathBuf) -> Result<Self, ServeError> {
        if UnixStream::connect(&path).await.is_ok() {
            return Err(ServeError::InUse { path });
        }
        match place(&path) {
            Ok((listener, inode)) => Ok(Self { listener, file: SocketFile { path, inode } }),
            Err(source) => Err(ServeError::Socket { path, source }),
        }
    }
}

fn place(path: &Path) -> io::Result<(UnixListener, u64)> {
    let parent = path.parent().unwrap_or(Path::new("/"));
    let private = tempfile::Builder::new().prefix(".sock").tempdir_in(parent)?;
    let beside = private.path().join("s");
    let listener = UnixListener::bind(&beside)?;
    std::fs::set_permissions(&beside, std::fs::Permissions::from_mode(0o600))?;
    let inode = std::fs::metadata(&beside)?.ino();
    std::fs::rename(&beside, path)?;
    Ok((listener, inode))
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if std::fs::metadata(&self.path).is_ok_and(|found| found.ino() == self.inode) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
