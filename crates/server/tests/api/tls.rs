//! HTTPS: certificates, their replacement while the server runs, and what clients see.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http_body_util::{BodyExt as _, Empty};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyPair,
};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use sandkeep_client::{Client, Error};
use sandkeep_server::{Limits, TlsFiles};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::fixture::Served;

const DAY: Duration = Duration::from_secs(24 * 3600);

/// A CA, and the files of a server.
struct Pki {
    dir: tempfile::TempDir,
    issuer: Issuer<'static, KeyPair>,
}

impl Pki {
    fn new() -> Self {
        let dir = tempfile::TempDir::with_prefix("keep-tls-").unwrap();
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, "a CA for a test");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let certificate = params.self_signed(&key).unwrap();
        std::fs::write(dir.path().join("ca.pem"), certificate.pem()).unwrap();
        let pki = Self { dir, issuer: Issuer::new(params, key) };
        pki.issue("127.0.0.1", DAY, DAY * 30);
        pki
    }

    /// A certificate in the place of the server's, which began some time ago and ends in some time.
    fn issue(&self, name: &str, age: Duration, lasts: Duration) {
        let now = SystemTime::now();
        self.issue_between(name, now - age, now + lasts);
    }

    fn issue_between(&self, name: &str, from: SystemTime, to: SystemTime) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        (params.not_before, params.not_after) = (from.into(), to.into());
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let files = self.files();
        std::fs::write(files.key, key.serialize_pem()).unwrap();
        std::fs::write(files.certificate, certificate.pem()).unwrap();
    }

    fn files(&self) -> TlsFiles {
        let at = |name: &str| self.dir.path().join(name);
        TlsFiles { certificate: at("server.pem"), key: at("server.key") }
    }

    fn ca(&self) -> std::path::PathBuf {
        self.dir.path().join("ca.pem")
    }

    fn client(&self, served: &Served) -> Client {
        let url = format!("https://{}", served.address);
        Client::trusting(url.parse().unwrap(), Some(&served.admin), &self.ca()).unwrap()
    }

    /// A connection after its handshake.
    async fn connect(&self, address: SocketAddr, alpn: &[&[u8]]) -> TlsStream<TcpStream> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(self.ca()).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
        let stream = TcpStream::connect(address).await.unwrap();
        let name = ServerName::try_from("127.0.0.1").unwrap();
        TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap()
    }
}

/// The certificate that a server shows.
fn shown(stream: &TlsStream<TcpStream>) -> Vec<u8> {
    stream.get_ref().1.peer_certificates().unwrap()[0].to_vec()
}

/// Waits for something that happens within seconds.
async fn eventually(what: &str, mut happened: impl AsyncFnMut() -> bool) {
    for _ in 0..100 {
        if happened().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("{what} did not happen within 10 s");
}

async fn hint_of(client: &Client) -> String {
    let error = client.whoami().await.unwrap_err();
    assert!(matches!(error, Error::Connect { .. }), "{error:?}");
    error.hint().unwrap().to_owned()
}

#[tokio::test]
async fn both_protocols_are_spoken_over_tls() {
    let pki = Pki::new();
    let served = Served::secured(Limits::default(), pki.files()).await;
    assert_eq!(pki.client(&served).whoami().await.unwrap().project, "main");
    let request = |version: hyper::Version| {
        hyper::Request::get(format!("https://{}/healthz", served.address))
            .version(version)
            .header("host", served.address.to_string())
            .body(Empty::<bytes::Bytes>::new())
            .unwrap()
    };
    let stream = pki.connect(served.address, &[b"h2", b"http/1.1"]).await;
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let io = TokioIo::new(stream);
    let shaken = hyper::client::conn::http2::handshake(TokioExecutor::new(), io).await;
    let (mut sender, connection) = shaken.unwrap();
    tokio::spawn(connection);
    let answer = sender.send_request(request(hyper::Version::HTTP_2)).await.unwrap();
    assert_eq!((answer.status().as_u16(), answer.version()), (200, hyper::Version::HTTP_2));
    let stream = pki.connect(served.address, &[b"http/1.1"]).await;
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]));
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let answer = sender.send_request(request(hyper::Version::HTTP_11)).await.unwrap();
    assert_eq!(answer.status(), 200);
    answer.into_body().collect().await.unwrap();
}

#[tokio::test]
async fn what_clients_are_told_about_bad_certificates_says_what_to_do() {
    let pki = Pki::new();
    let served = Served::secured(Limits::default(), pki.files()).await;
    let url = format!("https://{}", served.address);
    let unknowing = Client::new(url.parse().unwrap(), None).unwrap();
    assert!(hint_of(&unknowing).await.contains("--ca"), "an unknown CA");
    let elsewhere = Pki::new();
    let other = Client::trusting(url.parse().unwrap(), None, &elsewhere.ca()).unwrap();
    assert!(hint_of(&other).await.contains("--ca"), "another CA of the same name");
    let named = format!("https://localhost:{}", served.address.port());
    let misnamed = Client::trusting(named.parse().unwrap(), None, &pki.ca()).unwrap();
    assert!(hint_of(&misnamed).await.contains("keep tls init localhost"), "another name");
    drop(served);
    pki.issue_between(
        "127.0.0.1",
        SystemTime::now() - DAY * 30,
        SystemTime::now() - Duration::from_secs(60),
    );
    let served = Served::secured(Limits::default(), pki.files()).await;
    assert!(hint_of(&pki.client(&served)).await.contains("renew"), "an expired one");
    let plain = Served::without_machines().await;
    assert!(hint_of(&pki.client(&plain)).await.contains("use http://"), "no TLS at all");
    let missing = Client::trusting(url.parse().unwrap(), None, Path::new("/nowhere"));
    assert!(missing.unwrap_err().hint().unwrap().contains("PEM"));
    let no_ca = Client::trusting(url.parse().unwrap(), None, &pki.files().key);
    assert!(matches!(no_ca.unwrap_err(), Error::BadCa { .. }));
}

#[tokio::test]
async fn plain_text_is_told_that_this_is_https() {
    let pki = Pki::new();
    let served = Served::secured(Limits::default(), pki.files()).await;
    let url = format!("http://{}", served.address);
    let client = Client::new(url.parse().unwrap(), Some(&served.admin)).unwrap();
    let error = client.whoami().await.unwrap_err();
    assert_eq!(error.code(), Some("tls_required"), "{error:?}");
    assert!(error.hint().unwrap().contains("https://"));
}

#[tokio::test]
async fn new_files_are_used_and_bad_ones_are_not() {
    let pki = Pki::new();
    let served = Served::secured(Limits::default(), pki.files()).await;
    let mut open = pki.connect(served.address, &[b"http/1.1"]).await;
    let first = shown(&open);
    let show = async || shown(&pki.connect(served.address, &[]).await);

    pki.issue("127.0.0.1", DAY, DAY * 60);
    eventually("another certificate", async || show().await != first).await;
    let second = show().await;
    // The connection from before continues.
    let request = format!("GET /healthz HTTP/1.1\r\nhost: {}\r\n\r\n", served.address);
    open.write_all(request.as_bytes()).await.unwrap();
    let mut status = [0; 12];
    open.read_exact(&mut status).await.unwrap();
    assert_eq!(&status, b"HTTP/1.1 200");

    let files = pki.files();
    let key = std::fs::read(&files.key).unwrap();
    for (what, bad) in [("garbage", &b"garbage"[..]), ("nothing", b"")] {
        std::fs::write(&files.certificate, bad).unwrap();
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert_eq!(show().await, second, "{what}");
    }
    // Another certificate's key, and one that has ended.
    std::fs::write(&files.key, KeyPair::generate().unwrap().serialize_pem()).unwrap();
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(show().await, second, "a key that does not fit");
    std::fs::write(&files.key, &key).unwrap();
    let hour = Duration::from_secs(3600);
    pki.issue_between("127.0.0.1", SystemTime::now() - DAY, SystemTime::now() - hour);
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(show().await, second, "one that has expired");
    std::fs::remove_file(&files.key).unwrap();
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(show().await, second, "no key");

    pki.issue("127.0.0.1", DAY, DAY * 90);
    eventually("good files again", async || show().await != second).await;
}

#[tokio::test]
async fn a_server_does_not_start_with_files_that_are_no_certificate() {
    let pki = Pki::new();
    std::fs::write(pki.files().certificate, "garbage").unwrap();
    let config = sandkeep_server::ServeConfig {
        tcp: vec![SocketAddr::from(([127, 0, 0, 1], 0))],
        unix: None,
        scratch: pki.dir.path().to_owned(),
        limits: Limits::default(),
        gateway: sandkeep_server::GatewaySettings::default(),
        vercel: sandkeep_server::VercelSettings::default(),
        web: sandkeep_server::WebSettings::default(),
        tls: Some(pki.files()),
    };
    let error = sandkeep_server::Server::bind(config).await.unwrap_err();
    assert!(matches!(error, sandkeep_server::ServeError::Tls(_)), "{error:?}");
}

#[tokio::test]
async fn handshakes_have_a_place_and_a_deadline() {
    let pki = Pki::new();
    let limits = Limits {
        connections_per_address: 4,
        first_request: Duration::from_secs(3),
        ..Limits::default()
    };
    let served = Served::secured(limits, pki.files()).await;
    // Some say nothing, some only begin: they make room for each other, and for those who ask.
    let mut silent = Vec::new();
    for index in 0..16 {
        let mut stream = TcpStream::connect(served.address).await.unwrap();
        if index % 2 == 0 {
            stream.write_all(&[0x16, 0x03, 0x01]).await.unwrap();
        }
        silent.push(stream);
    }
    assert_eq!(pki.client(&served).whoami().await.unwrap().project, "main");
    // Those that made room were closed at once, the others are when their time is over.
    let all_closed = async {
        for stream in &mut silent {
            let mut rest = Vec::new();
            let _ = stream.read_to_end(&mut rest).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(8), all_closed).await.expect("all are closed");
    // A connection that is idle after its handshake counts as before.
    let mut idle = Vec::new();
    for _ in 0..6 {
        idle.push(pki.connect(served.address, &[]).await);
    }
    assert_eq!(pki.client(&served).whoami().await.unwrap().project, "main");
}
