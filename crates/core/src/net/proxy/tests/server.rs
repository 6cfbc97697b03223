//! A server that reports what it was sent, and the authority that vouches for it.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures_util::stream;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{
    CONNECTION, CONTENT_ENCODING, CONTENT_TYPE, RANGE, SEC_WEBSOCKET_EXTENSIONS, UPGRADE,
};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustls::ServerConfig;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use super::super::upstream_connection::{Body, Broken};

const DAY: Duration = Duration::from_secs(86_400);

/// Who vouches for servers outside.
pub(super) struct Authorities {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

/// What a server's certificate is like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Proof {
    Good,
    Expired,
    SelfSigned,
    OtherName,
}

impl Authorities {
    pub(super) fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "the outside");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        Self { pem, issuer: Issuer::new(params, key) }
    }

    pub(super) fn pem(&self) -> &str {
        &self.pem
    }

    fn prove(&self, name: &str, proof: Proof) -> ServerConfig {
        let key = KeyPair::generate().unwrap();
        let name = if proof == Proof::OtherName { "wrong.example" } else { name };
        let mut params = CertificateParams::new([name.to_owned()]).unwrap();
        let end = match proof {
            Proof::Expired => SystemTime::now() - DAY,
            _ => SystemTime::now() + DAY,
        };
        (params.not_before, params.not_after) = ((end - 3 * DAY).into(), end.into());
        let certificate = match proof {
            Proof::SelfSigned => params.self_signed(&key),
            _ => params.signed_by(&key, &self.issuer),
        };
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate.unwrap().der().clone()], key)
            .unwrap()
    }
}

/// A server; ends when it is dropped.
pub(super) struct Server {
    pub(super) address: SocketAddr,
    state: Arc<State>,
    _task: JoinSet<()>,
}

struct State {
    connections: AtomicUsize,
    seen: Mutex<Vec<String>>,
    /// What `/store` was sent.
    stored: Mutex<Vec<u8>>,
    /// What `/events` and `/download` may still send.
    more: Semaphore,
    made: AtomicUsize,
}

impl Server {
    /// One that speaks these protocols over TLS, or plain HTTP if there are none.
    pub(super) async fn start(authorities: &Authorities, protocols: &[&str]) -> Self {
        Self::proving(authorities, protocols, Proof::Good).await
    }

    pub(super) async fn proving(
        authorities: &Authorities,
        protocols: &[&str],
        proof: Proof,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut config = authorities.prove(super::NAME, proof);
        config.alpn_protocols = protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
        let acceptor = (!protocols.is_empty()).then(|| TlsAcceptor::from(Arc::new(config)));
        let state = Arc::new(State {
            connections: AtomicUsize::new(0),
            seen: Mutex::default(),
            stored: Mutex::default(),
            more: Semaphore::new(0),
            made: AtomicUsize::new(0),
        });
        let mut task = JoinSet::new();
        task.spawn(accept(listener, acceptor, Arc::clone(&state)));
        Self { address, state, _task: task }
    }

    pub(super) fn connections(&self) -> usize {
        self.state.connections.load(Ordering::Relaxed)
    }

    /// What it was sent, as it was: method, URL, headers, body.
    pub(super) fn seen(&self) -> Vec<String> {
        self.state.seen.lock().unwrap().clone()
    }

    pub(super) fn send_more(&self, pieces: usize) {
        self.state.more.add_permits(pieces);
    }

    /// How many pieces of `/download` were asked for.
    pub(super) fn made(&self) -> usize {
        self.state.made.load(Ordering::Relaxed)
    }
}

async fn accept(listener: TcpListener, acceptor: Option<TlsAcceptor>, state: Arc<State>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let (acceptor, state) = (acceptor.clone(), Arc::clone(&state));
        connections.spawn(async move {
            let service = {
                let state = Arc::clone(&state);
                service_fn(move |request| answer(Arc::clone(&state), request))
            };
            let builder = auto::Builder::new(TokioExecutor::new());
            match acceptor {
                Some(acceptor) => {
                    let Ok(stream) = acceptor.accept(stream).await else { return };
                    state.connections.fetch_add(1, Ordering::Relaxed);
                    let stream = TokioIo::new(stream);
                    let _ = builder.serve_connection_with_upgrades(stream, service).await;
                }
                None => {
                    state.connections.fetch_add(1, Ordering::Relaxed);
                    let stream = TokioIo::new(stream);
                    let _ = builder.serve_connection_with_upgrades(stream, service).await;
                }
            }
        });
    }
}

async fn answer(
    state: Arc<State>,
    mut request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    let path = request.uri().path().to_owned();
    if request.headers().contains_key(UPGRADE) {
        return Ok(upgraded(&mut request));
    }
    Ok(match path.trim_start_matches("/base") {
        "/events" => events(state),
        "/download" => download(state),
        "/trailers" => trailers(request),
        "/early" => Response::new(text("early")),
        "/store" => store(&state, &request),
        "/show" => show(&state, &request),
        "/halves" => halves(state),
        _ => told(&state, request).await,
    })
}

/// Returns what it was sent, in the body and in a header.
async fn told(state: &State, request: Request<Incoming>) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let Ok(body) = body.collect().await else { return Response::new(text("")) };
    let body = body.to_bytes();
    let headers: serde_json::Map<_, _> = parts
        .headers
        .iter()
        .map(|(name, value)| {
            let value = String::from_utf8_lossy(value.as_bytes()).into_owned();
            (name.to_string(), value.into())
        })
        .collect();
    let shown = if body.len() > 4096 { Bytes::new() } else { body.clone() };
    let sent = serde_json::json!({
        "method": parts.method.as_str(),
        "version": format!("{:?}", parts.version),
        "uri": parts.uri.to_string(),
        "headers": headers,
        "body": String::from_utf8_lossy(&shown),
        "length": body.len(),
    });
    let text_of_it = sent.to_string();
    state.seen.lock().unwrap().push(text_of_it.clone());
    let mut response = Response::new(text(&text_of_it));
    response.headers_mut().insert(CONTENT_TYPE, "application/json".parse().unwrap());
    if let Some(key) = parts.headers.get("x-api-key") {
        response.headers_mut().insert("x-echo", key.clone());
    }
    response.headers_mut().insert("alt-svc", "h3=\":443\"".parse().unwrap());
    response.headers_mut().insert("keep-alive", "timeout=5".parse().unwrap());
    response
}

/// Keeps the key it is sent.
fn store(state: &State, request: &Request<Incoming>) -> Response<Body> {
    let key = request.headers().get("x-api-key").map(|key| key.as_bytes().to_vec());
    *state.stored.lock().unwrap() = key.unwrap_or_default();
    Response::new(text("kept"))
}

/// Shows the key it keeps: as what it is asked to call it, in part if that is asked for.
fn show(state: &State, request: &Request<Incoming>) -> Response<Body> {
    let header = |name: &str| request.headers().get(name).cloned();
    state.seen.lock().unwrap().push(format!("{:?}", request.headers()));
    let stored = String::from_utf8(state.stored.lock().unwrap().clone()).unwrap();
    let whole = format!("stored {stored} here");
    let part = header(RANGE.as_str()).map(|_| &whole[7..13]);
    let mut response = Response::new(text(part.unwrap_or(&whole)));
    let kind = header("x-kind").unwrap_or("text/plain".parse().unwrap());
    response.headers_mut().insert(CONTENT_TYPE, kind);
    if request.headers().contains_key("x-partial") {
        *response.status_mut() = StatusCode::PARTIAL_CONTENT;
    }
    if request.headers().contains_key("x-reason") {
        let reason = hyper::ext::ReasonPhrase::try_from(whole.as_bytes()).unwrap();
        response.extensions_mut().insert(reason);
    }
    if let Some(packed) = header("x-packed") {
        response.headers_mut().insert(CONTENT_ENCODING, packed);
    }
    response
}

/// Shows the key it keeps in two halves, the second one when there is a permit.
fn halves(state: Arc<State>) -> Response<Body> {
    let stored = state.stored.lock().unwrap().clone();
    let halves = stream::unfold((state, stored, 0), |(state, stored, index)| async move {
        let half = match index {
            0 => Bytes::copy_from_slice(&stored[..stored.len() / 2]),
            1 => {
                state.more.acquire().await.unwrap().forget();
                Bytes::copy_from_slice(&stored[stored.len() / 2..])
            }
            _ => return None,
        };
        Some((Ok::<_, Broken>(Frame::data(half)), (state, stored, index + 1)))
    });
    Response::new(StreamBody::new(halves).boxed_unsync())
}

/// Sends an event for each permit.
fn events(state: Arc<State>) -> Response<Body> {
    let events = stream::unfold((state, 0), |(state, index)| async move {
        state.more.acquire().await.unwrap().forget();
        let event = Bytes::from(format!("data: {index}\n\n"));
        Some((Ok::<_, Broken>(Frame::data(event)), (state, index + 1)))
    });
    let mut response = Response::new(StreamBody::new(events).boxed_unsync());
    response.headers_mut().insert(CONTENT_TYPE, "text/event-stream".parse().unwrap());
    response
}

pub(super) const PIECE: usize = 64 << 10;
pub(super) const PIECES: usize = 800;

fn download(state: Arc<State>) -> Response<Body> {
    let pieces = stream::unfold((state, 0), |(state, index)| async move {
        state.made.fetch_add(1, Ordering::Relaxed);
        let piece = Bytes::from(vec![u8::try_from(index % 251).unwrap(); PIECE]);
        (index < PIECES).then(|| (Ok::<_, Broken>(Frame::data(piece)), (state, index + 1)))
    });
    let mut response = Response::new(StreamBody::new(pieces).boxed_unsync());
    response.headers_mut().insert(CONTENT_TYPE, "application/octet-stream".parse().unwrap());
    response
}

/// Sends back the body of a request, and its trailers; a key it was sent becomes one.
fn trailers(request: Request<Incoming>) -> Response<Body> {
    if let Some(key) = request.headers().get("x-api-key") {
        let told = hyper::HeaderMap::from_iter([("x-sum".parse().unwrap(), key.clone())]);
        let frames = [Frame::data(Bytes::from_static(b"call")), Frame::trailers(told)];
        let body = StreamBody::new(stream::iter(frames.map(Ok::<_, Broken>)));
        let mut response = Response::new(body.boxed_unsync());
        // No text: what is found in it is covered.
        response.headers_mut().insert(CONTENT_TYPE, "application/grpc".parse().unwrap());
        return response;
    }
    let body = request.into_body().map_err(Broken::from).boxed_unsync();
    let mut response = Response::new(body);
    response.headers_mut().insert("trailer", "x-sum".parse().unwrap());
    response
}

/// Becomes an echo of bytes, if that is asked for.
fn upgraded(request: &mut Request<Incoming>) -> Response<Body> {
    let switched = hyper::upgrade::on(&mut *request);
    tokio::spawn(async move {
        let Ok(stream) = switched.await else { return };
        let mut stream = TokioIo::new(stream);
        let mut bytes = vec![0; 1024];
        while let Ok(length @ 1..) = stream.read(&mut bytes).await {
            if stream.write_all(&bytes[..length]).await.is_err() {
                return;
            }
        }
    });
    let mut response = Response::new(text(""));
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    response.headers_mut().insert(CONNECTION, "upgrade".parse().unwrap());
    response.headers_mut().insert(UPGRADE, request.headers()[UPGRADE].clone());
    if let Some(offered) = request.headers().get(SEC_WEBSOCKET_EXTENSIONS) {
        response.headers_mut().insert(SEC_WEBSOCKET_EXTENSIONS, offered.clone());
    }
    response
}

fn text(text: &str) -> Body {
    Full::new(Bytes::from(text.to_owned())).map_err(|never| match never {}).boxed_unsync()
}
