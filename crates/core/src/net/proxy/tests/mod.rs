//! Real servers with TLS on loopback, real clients that trust the sandbox's authority, and the proxy between them.

mod greedy;
mod hostile;
mod passing;
mod server;
mod telling;

use std::io::Write as _;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;
use zeroize::Zeroizing;

use self::server::{Authorities, Server};
use super::super::gate::Gate;
use super::super::log::{ConnectionLog, FlowInfo, Journal, Traffic};
use super::super::rules::{Brokered, Rules};
use super::super::special_addresses::{Destination, alias};
use super::super::testing;
use super::super::upstream::{Upstream, UpstreamSettings};
use super::{Authority, Intercept, TIMEOUTS, Timeouts, receive, serve};
use crate::model::{Connection, Credential, Policy, Protocol, SecretPlace, SessionId};

const NAME: &str = "api.example";
const PLACEHOLDER: &str = "skp_0123456789abcdef0123456789ab";
/// As long as its placeholder.
const VALUE: &str = "the-real-value-of-32-characters!";
const SHORT: &str = "s\"hort";

#[derive(Debug, Default)]
struct Lines(Mutex<Vec<Connection>>);

impl Journal for Lines {
    fn write(&self, connection: Connection) {
        self.0.lock().unwrap().push(connection);
    }
}

/// A sandbox as the proxy sees it.
struct Sandbox {
    authorities: Authorities,
    authority: Arc<Authority>,
    upstream: Arc<Upstream>,
    rules: watch::Sender<Arc<Rules>>,
    log: Arc<ConnectionLog>,
    lines: Arc<Lines>,
    given: bool,
    patience: Timeouts,
    gate: Arc<dyn Gate>,
    held: Arc<Semaphore>,
}

fn rules(policy: serde_json::Value, brokered: Vec<Brokered>) -> Arc<Rules> {
    bounded(policy, None, brokered)
}

fn bounded(
    policy: serde_json::Value,
    bound: Option<serde_json::Value>,
    brokered: Vec<Brokered>,
) -> Arc<Rules> {
    let policy: Policy = serde_json::from_value(policy).unwrap();
    let bound: Option<Policy> = bound.map(|bound| serde_json::from_value(bound).unwrap());
    // In a test the stored value is the plain value.
    let reveal = |credential: &Credential| match credential {
        Credential::Plain(text) => Ok(text.clone()),
        Credential::Sealed(text) => Ok(Zeroizing::new(text.clone())),
    };
    Arc::new(Rules::new(&policy, bound.as_ref(), brokered, &reveal).unwrap())
}

fn secret(name: &str, value: &str, host: &str) -> Brokered {
    Brokered {
        name: name.to_owned(),
        placeholder: PLACEHOLDER.to_owned(),
        value: Zeroizing::new(value.to_owned()),
        hosts: vec![host.parse().unwrap()],
        places: [SecretPlace::Query, SecretPlace::Body].into(),
    }
}

/// One that is replaced in headers alone, as secrets are unless more is asked for.
fn in_headers(name: &str, value: &str, host: &str) -> Brokered {
    Brokered { places: std::collections::BTreeSet::new(), ..secret(name, value, host) }
}

impl Sandbox {
    fn new(policy: serde_json::Value, brokered: Vec<Brokered>) -> Self {
        let authorities = Authorities::new();
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(authorities.pem().as_bytes()).unwrap();
        let settings = UpstreamSettings {
            except: vec!["127.0.0.1".parse().unwrap()],
            ca: Some(file.path().to_owned()),
            hosts: [
                (NAME, &["127.0.0.1"][..]),
                ("other.example", &["127.0.0.1"]),
                // The first answers: the second, which is not inside, is never dialled.
                ("mixed.example", &["127.0.0.1", "93.184.215.14"]),
            ]
            .map(|(name, ips)| {
                (name.to_owned(), ips.iter().map(|ip| ip.parse().unwrap()).collect())
            })
            .into(),
            ..UpstreamSettings::default()
        };
        let lines = Arc::<Lines>::default();
        let journal = Arc::clone(&lines) as Arc<dyn Journal>;
        Self {
            authorities,
            authority: Arc::new(Authority::generate("test").unwrap()),
            upstream: Arc::new(Upstream::new(settings).unwrap()),
            rules: watch::channel(rules(policy, brokered)).0,
            log: ConnectionLog::new(SessionId::fresh(), journal, Traffic::default()),
            lines,
            given: true,
            patience: TIMEOUTS,
            gate: testing::open_gate(),
            held: Arc::new(Semaphore::new(1)),
        }
    }

    fn allow_all(brokered: Vec<Brokered>) -> Self {
        Self::new(serde_json::json!({"mode": "allow-all"}), brokered)
    }

    /// The sandbox's end of a connection to `server`, before anything was sent.
    fn dial(&self, server: SocketAddr, tls: bool) -> (DuplexStream, JoinHandle<()>) {
        let asked = SocketAddr::new(alias(server.ip()).unwrap(), server.port());
        let info = FlowInfo {
            protocol: Protocol::Tcp,
            to: Some(asked),
            name: Some(NAME.to_owned()),
            rule: "allow-all".to_owned(),
        };
        let intercept = Intercept {
            name: NAME.to_owned(),
            to: Destination::new(asked),
            given: self.given,
            tls,
            rules: self.rules.subscribe(),
            upstream: Arc::clone(&self.upstream),
            authority: Arc::clone(&self.authority),
            log: Arc::clone(&self.log),
            gate: Arc::clone(&self.gate),
            held: Arc::clone(&self.held),
            open: self.log.begin(info),
        };
        let (inside, guest) = tokio::io::duplex(64 << 10);
        let patience = self.patience;
        let task = tokio::spawn(async move {
            if patience.head == TIMEOUTS.head {
                serve(guest, Bytes::new(), intercept).await;
            } else {
                receive(guest, Bytes::new(), intercept, patience).await;
            }
        });
        (inside, task)
    }

    fn tls(&self, protocol: &str) -> ClientConfig {
        let mut roots = RootCertStore::empty();
        let pem = self.authority.certificate().as_bytes();
        roots.add(CertificateDer::from_pem_slice(pem).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
        config
    }

    /// A connection with TLS, as a program in the sandbox has it.
    async fn open(&self, server: &Server, protocol: &str) -> impl AsyncRead + AsyncWrite + use<> {
        let (inside, _) = self.dial(server.address, true);
        let connector = TlsConnector::from(Arc::new(self.tls(protocol)));
        connector.connect(ServerName::try_from(NAME).unwrap(), inside).await.unwrap()
    }

    /// One in the clear.
    async fn plain(&self, to: SocketAddr) -> http1::SendRequest<Full<Bytes>> {
        let (inside, _) = self.dial(to, false);
        let (sender, connection) = http1::handshake(TokioIo::new(inside)).await.unwrap();
        tokio::spawn(connection.with_upgrades());
        sender
    }

    async fn http1(&self, server: &Server) -> http1::SendRequest<Full<Bytes>> {
        let stream = TokioIo::new(Box::pin(self.open(server, "http/1.1").await));
        let (sender, connection) = http1::handshake(stream).await.unwrap();
        tokio::spawn(connection.with_upgrades());
        sender
    }

    async fn http2(&self, server: &Server) -> http2::SendRequest<Full<Bytes>> {
        let stream = TokioIo::new(Box::pin(self.open(server, "h2").await));
        let (sender, connection) = http2::handshake(TokioExecutor::new(), stream).await.unwrap();
        tokio::spawn(connection);
        sender
    }

    /// Sends one request over HTTP/1.1 and reads its answer.
    async fn fetch(&self, server: &Server, request: Request<Full<Bytes>>) -> Answered {
        let mut client = self.http1(server).await;
        Answered::read(client.send_request(request).await.unwrap()).await
    }

    /// Lines of the journal about requests, once there are `count` of them.
    async fn requests(&self, count: usize) -> Vec<Connection> {
        self.lines(count, Protocol::Http).await
    }

    async fn lines(&self, count: usize, protocol: Protocol) -> Vec<Connection> {
        for _ in 0..500 {
            let lines: Vec<_> = self.lines.0.lock().unwrap().clone();
            let lines: Vec<_> =
                lines.into_iter().filter(|line| line.protocol == protocol).collect();
            if lines.len() >= count {
                return lines;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("the journal never had {count} lines: {:?}", self.lines);
    }
}

struct Answered {
    status: u16,
    headers: hyper::HeaderMap,
    body: String,
}

impl Answered {
    async fn read(response: Response<Incoming>) -> Self {
        let (parts, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        Self {
            status: parts.status.as_u16(),
            headers: parts.headers,
            body: String::from_utf8_lossy(&body).into_owned(),
        }
    }

    /// What the server says it was sent.
    fn sent(&self) -> serde_json::Value {
        serde_json::from_str(&self.body)
            .unwrap_or_else(|_| panic!("{}: {}", self.status, self.body))
    }
}

fn get(path: &str) -> Request<Full<Bytes>> {
    with(path, "", &[])
}

/// A request of HTTP/1.1 with a body, if it is not empty.
fn with(path: &str, body: &str, headers: &[(&str, &str)]) -> Request<Full<Bytes>> {
    let method = if body.is_empty() { "GET" } else { "POST" };
    let mut request = Request::builder().method(method).uri(path).header("host", NAME);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(Full::new(Bytes::from(body.to_owned()))).unwrap()
}

/// The same for HTTP/2, which names its host in the URL.
fn over_http2(server: &Server, path: &str, body: &str) -> Request<Full<Bytes>> {
    let method = if body.is_empty() { "GET" } else { "POST" };
    let uri = format!("https://{NAME}:{}{path}", server.address.port());
    let request = Request::builder().method(method).uri(uri);
    request.body(Full::new(Bytes::from(body.to_owned()))).unwrap()
}
