//! Programs in a real sandbox, whose requests to a server on this host are judged and given credentials.

use std::convert::Infallible;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::ServerConfig;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use sandkeep_core::engine::{ConnectionFilter, Create, Engine, SetSecret};
use sandkeep_core::model::{
    Action, Answer, Connection, Credential, Mode, Patch, Policy, Protocol, RequestMatch,
    RequestRule, SecretPlace, TextMatch, Verdict,
};
use sandkeep_core::net::UpstreamSettings;
use sandkeep_core::store::image::Reporter;
use sandkeep_testkit::house;
use sandkeep_testkit::house::{name, project, sh};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use zeroize::Zeroizing;

const HOST: &str = "api.internal";
const VALUE: &str = "a \"short\" value";
const CREDENTIAL: &str = "Bearer a-credential-of-the-rule";

/// A server with TLS that answers with what it was sent.
struct Server {
    address: SocketAddr,
    authority: String,
    seen: Arc<Mutex<Vec<String>>>,
    _tasks: JoinSet<()>,
}

impl Server {
    async fn start() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = params.self_signed(&key).unwrap().pem();
        let issuer = Issuer::new(params, key);
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new([HOST.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &issuer).unwrap();
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], key)
            .unwrap();
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::<Mutex<Vec<String>>>::default();
        let mut tasks = JoinSet::new();
        tasks.spawn(accept(listener, TlsAcceptor::from(Arc::new(config)), Arc::clone(&seen)));
        Self { address, authority, seen, _tasks: tasks }
    }

    fn last(&self) -> String {
        self.seen.lock().unwrap().last().cloned().unwrap_or_default()
    }
}

async fn accept(listener: TcpListener, acceptor: TlsAcceptor, seen: Arc<Mutex<Vec<String>>>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let (acceptor, seen) = (acceptor.clone(), Arc::clone(&seen));
        connections.spawn(async move {
            let Ok(stream) = acceptor.accept(stream).await else { return };
            let service = service_fn(move |request| answer(Arc::clone(&seen), request));
            let builder = auto::Builder::new(TokioExecutor::new());
            let _ = builder.serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

async fn answer(
    seen: Arc<Mutex<Vec<String>>>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let body = if body.len() > 1024 {
        format!("{} bytes", body.len())
    } else {
        String::from_utf8_lossy(&body).into_owned()
    };
    let text = format!("{} {}\n{:?}\n{body}\n", parts.method, parts.uri.path(), parts.headers);
    seen.lock().unwrap().push(text.clone());
    Ok(Response::new(Full::new(Bytes::from(text))))
}

/// Programs that speak HTTP, as this machine has them, on top of a small system.
fn clients(root: &Path) -> Vec<&'static str> {
    sandkeep_testkit::inside::userland(root).unwrap();
    fs::write(root.join("etc/nsswitch.conf"), "passwd: files\ngroup: files\nhosts: files dns\n")
        .unwrap();
    for directory in ["dev", "proc", "run", "sys", "tmp", "work", "root"] {
        fs::create_dir_all(root.join(directory)).unwrap();
    }
    let mut found = Vec::new();
    for (program, path) in
        [("curl", "/usr/bin/curl"), ("python3", "/usr/bin/python3"), ("node", "/usr/bin/node")]
    {
        if !Path::new(path).exists() {
            sandkeep_testkit::daemon::skipped("net_proxy", &format!("this machine has no {path}"));
            continue;
        }
        found.push(program);
        take(root, &fs::canonicalize(path).unwrap(), &root.join("bin").join(program));
    }
    if found.contains(&"python3") {
        let told = Command::new("/usr/bin/python3")
            .args([
                "-c",
                "import sysconfig, _ssl; print(sysconfig.get_path('stdlib')); print(_ssl.__file__)",
            ])
            .output()
            .unwrap();
        let told = String::from_utf8(told.stdout).unwrap();
        let (library, tls) = told.trim().split_once('\n').unwrap();
        let to = root.join(library.trim_start_matches('/'));
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        let copied = Command::new("cp").arg("-rL").arg(library).arg(&to).output().unwrap();
        assert!(to.join("urllib").exists(), "{copied:?}");
        libraries(root, Path::new(tls));
    }
    found
}

fn take(root: &Path, from: &Path, to: &Path) {
    fs::copy(from, to).unwrap();
    libraries(root, from);
}

fn libraries(root: &Path, of: &Path) {
    let listed = Command::new("ldd").arg(of).output().unwrap();
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    for library in listed.split_whitespace().filter(|word| word.starts_with('/')) {
        let to = root.join(library.trim_start_matches('/'));
        if !to.exists() {
            fs::create_dir_all(to.parent().unwrap()).unwrap();
            fs::copy(library, to).unwrap();
        }
    }
}

fn rule(path: &str, action: Action) -> RequestRule {
    let path = (!path.is_empty()).then(|| TextMatch::Prefix(path.to_owned()));
    RequestRule {
        domain: HOST.parse().unwrap(),
        matches: RequestMatch { path, ..RequestMatch::default() },
        action,
    }
}

fn policy() -> Policy {
    let credential = Credential::Plain(Zeroizing::new(CREDENTIAL.to_owned()));
    Policy {
        mode: Mode::Custom,
        requests: vec![
            rule("/private", Action::Deny),
            rule(
                "/canned",
                Action::Answer(Answer {
                    status: 201,
                    headers: [("x-canned".to_owned(), "yes".to_owned())].into(),
                    body: "canned\n".to_owned(),
                }),
            ),
            rule("", Action::Headers([("authorization".to_owned(), credential)].into())),
        ],
        ..Policy::default()
    }
}

/// Lines about requests, once there are `count` of them.
async fn requests(engine: &Engine, count: usize) -> Vec<Connection> {
    for _ in 0..200 {
        let filter = ConnectionFilter::default();
        let page = engine.connections(&project(), &name("app"), &filter, 500, None).await.unwrap();
        let mut lines = page.items;
        lines.retain(|line| line.protocol == Protocol::Http && line.ended_at.is_some());
        if lines.len() >= count {
            lines.reverse();
            return lines;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("the journal never had {count} requests");
}

#[tokio::test(flavor = "multi_thread")]
async fn programs_trust_the_authority_and_rules_judge_their_requests() {
    let mut house = house!();
    let server = Server::start().await;
    let port = server.address.port();
    let authority = house.path().join("outside.pem");
    fs::write(&authority, &server.authority).unwrap();
    house.settings.network = UpstreamSettings {
        except: vec![format!("127.0.0.1:{port}").parse().unwrap()],
        hosts: [(HOST.to_owned(), vec!["127.0.0.1".parse().unwrap()])].into(),
        ca: Some(authority),
        ..UpstreamSettings::default()
    };
    let engine = house.open().await;
    let (root, tar) = (house.path().join("clients"), house.path().join("clients.tar"));
    let programs = clients(&root);
    let trusted = root.join("etc/ssl/certs/ca-certificates.crt");
    fs::create_dir_all(trusted.parent().unwrap()).unwrap();
    fs::write(trusted, &server.authority).unwrap();
    let packed = Command::new("tar").arg("-C").arg(&root).arg("-cf").arg(&tar).arg(".").output();
    assert!(packed.unwrap().status.success());
    engine.images().import("clients", &tar, &Reporter::silent()).await.unwrap();
    let set = SetSecret {
        value: Zeroizing::new(VALUE.to_owned()),
        hosts: Some(vec![HOST.parse().unwrap()]),
        places: Some([SecretPlace::Body].into()),
        tags: None,
    };
    engine.set_secret(&project(), "API_KEY".parse().unwrap(), set).await.unwrap();
    let patch = Patch {
        image: Some("clients".to_owned()),
        secrets: Some(vec!["API_KEY".parse().unwrap()]),
        network: Some(Some(policy())),
        ..Patch::default()
    };
    let create = Create { name: Some(name("app")), patch, start: true, ..Create::default() };
    engine.create(&project(), create, None).await.unwrap();
    let url = format!("https://{HOST}:{port}");
    let run = async |line: String| sh(&engine, "app", &line).await;

    assert!(programs.contains(&"curl"), "this test needs curl");
    for version in ["--http1.1", "--http2"] {
        let ran = run(format!(
            "curl -sS -m 20 {version} -w '%{{http_version}} %{{http_code}}' {url}/hello?a=b"
        ))
        .await;
        assert_eq!(ran.command.exit_code, Some(0), "{ran:?}");
        assert!(ran.out.contains("GET /hello"), "{ran:?}");
        let wanted = if version == "--http2" { "2 200" } else { "1.1 200" };
        assert!(ran.out.ends_with(wanted), "{ran:?}");
        // The server got the credential and repeats it; the sandbox does not get it.
        assert!(server.last().contains(CREDENTIAL), "{}", server.last());
        assert!(!ran.out.contains("a-credential"), "{ran:?}");
    }
    let before = server.seen.lock().unwrap().len();
    let ran = run(format!("curl -sS -m 20 -w '%{{http_code}}' {url}/private/x")).await;
    assert!(
        ran.out.contains("requests[0]: deny api.internal") && ran.out.ends_with("403"),
        "{ran:?}"
    );
    let ran = run(format!("curl -sS -m 20 -w '%{{http_code}}' {url}/canned")).await;
    assert_eq!(ran.out, "canned\n201");
    let ran = run(format!(
        "curl -sS -m 20 -o /dev/null -w '%{{http_code}}' -H 'Host: other.internal' {url}/"
    ))
    .await;
    assert_eq!(ran.out, "421");
    assert_eq!(server.seen.lock().unwrap().len(), before);
    let upload = format!("head -c 30000000 /dev/zero | curl -sS -m 60 -T - {url}/upload");
    let ran = run(upload).await;
    assert!(ran.out.contains("30000000 bytes"), "{ran:?}");
    // Who trusts the server but not the sandbox's authority is not let in on its requests, nor past it.
    let ran = run(format!("env -u CURL_CA_BUNDLE -u SSL_CERT_FILE curl -sS -m 20 {url}/")).await;
    assert_eq!(ran.command.exit_code, Some(60), "{ran:?}");
    let ran = run(format!(
        "curl -sS -m 20 http://example.com/; curl -sS -m 20 https://127.0.0.1:{port}/"
    ))
    .await;
    assert!(ran.out.is_empty(), "{ran:?}");

    // The server gets the value; what it repeats is the placeholder again when it is inside.
    let sent = format!(
        "curl -sS -m 20 -H \"x-api-key: $API_KEY\" -H 'content-type: application/json' -d '{{\"k\":\"'$API_KEY'\"}}' {url}/brokered"
    );
    let ran = run(format!(
        "out=$({sent}); echo \"$out\"; case \"$out\" in *\"$API_KEY\"*) echo masked;; esac"
    ))
    .await;
    assert!(ran.out.contains("POST /brokered") && ran.out.ends_with("masked\n"), "{ran:?}");
    assert!(!ran.out.contains("short"), "{ran:?}");
    let heard = server.last();
    assert!(heard.contains(r#"{"k":"a \"short\" value"}"#), "{heard}");
    assert_eq!(heard.matches("short").count(), 2, "{heard}");

    if programs.contains(&"python3") {
        let script = format!(
            "import urllib.request as r; print(r.urlopen('{url}/python', timeout=20).read().decode())"
        );
        let ran = run(format!("python3 -c \"{script}\"")).await;
        assert!(ran.out.contains("GET /python"), "{ran:?}");
    }
    if programs.contains(&"node") {
        let script = format!(
            "fetch('{url}/node', {{method: 'POST', body: 'of node'}}).then(r => r.text()).then(console.log)"
        );
        let ran = run(format!("node -e \"{script}\"")).await;
        assert!(ran.out.contains("POST /node") && ran.out.contains("of node"), "{ran:?}");
    }

    let lines = requests(&engine, 7).await;
    let told = |index: usize| (lines[index].verdict, lines[index].detail.as_deref().unwrap());
    assert_eq!(told(0), (Verdict::Allowed, "GET /hello 200"));
    assert_eq!(told(2), (Verdict::Denied, "GET /private/x 403"));
    assert_eq!(told(3), (Verdict::Allowed, "GET /canned 201"));
    assert_eq!(told(4), (Verdict::Denied, "GET / 421"));
    assert_eq!(told(5), (Verdict::Allowed, "PUT /upload 200"));
    assert_eq!(told(6).1, "POST /brokered 200");
    assert!(
        !format!("{lines:?}").contains("a-credential") && !format!("{lines:?}").contains("short")
    );

    // A policy that is now against it applies to what is under way.
    let deny =
        Policy { requests: vec![rule("", Action::Deny)], mode: Mode::Custom, ..Policy::default() };
    engine.set_network(&project(), &name("app"), Some(deny)).await.unwrap();
    let ran = run(format!("curl -sS -m 20 -o /dev/null -w '%{{http_code}}' {url}/hello")).await;
    assert_eq!(ran.out, "403");
}
