//! A server of its own for each test, with a real engine behind it.
//!
//! Most tests never start a machine; those get a driver that refuses to. The others ask for
//! containers and are skipped where those do not work.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Body, Frame, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use sandkeep_client::types::ErrorBody;
use sandkeep_core::catalog::DiskCatalog;
use sandkeep_core::db::Index;
use sandkeep_core::driver::{
    Device, Driver, DriverError, DriverResult, Link, Machine, MachineLoad, MachineUsage,
};
use sandkeep_core::engine::{Create, Engine, Opened, Parts, Settings};
use sandkeep_core::model::{MachineKey, Name, Patch, Scope, Span};
use sandkeep_core::store::Store;
use sandkeep_core::store::image::{ImageSettings, Images, Reporter};
use sandkeep_server::{Limits, ServeConfig, Server, TlsFiles};
use sandkeep_testkit::daemon::skipped;
use sandkeep_testkit::driver::ContainerHost;
use sandkeep_testkit::root::small_root_tar;
use serde_json::Value;
use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// A server and keys to it. Everything goes away with it.
pub(crate) struct Served {
    pub(crate) address: SocketAddr,
    pub(crate) engine: Engine,
    /// Keys to project `main`.
    pub(crate) admin: String,
    pub(crate) write: String,
    pub(crate) read: String,
    /// A key to project `other`.
    pub(crate) foreign: String,
    pub(crate) socket: std::path::PathBuf,
    stop: Option<oneshot::Sender<()>>,
    task: Option<JoinHandle<()>>,
    // Dropped in this order: machines end before their directories go.
    _host: Option<ContainerHost>,
    dir: Scratch,
}

/// An answer, read whole.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: hyper::HeaderMap,
    pub(crate) body: Bytes,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {:?}", String::from_utf8_lossy(&self.body)))
    }

    /// The error, which every answer that is not a success must carry.
    pub(crate) fn error(&self) -> ErrorBody {
        let kind = self.headers.get(CONTENT_TYPE).map(|value| value.to_str().unwrap());
        assert_eq!(kind, Some("application/json"), "{self:?}");
        serde_json::from_value(self.json()["error"].clone()).expect("an error body")
    }
}

/// A driver for tests that start nothing.
#[derive(Debug)]
struct Refuses;

#[async_trait]
impl Driver for Refuses {
    fn name(&self) -> &'static str {
        "container"
    }
    async fn start(&self, _: &Machine) -> DriverResult<Link> {
        let reason = "this test has no machines".to_owned();
        Err(DriverError::Unsupported { driver: "container", reason })
    }
    async fn stop(&self, _: &MachineKey) -> DriverResult<MachineUsage> {
        Ok(MachineUsage::default())
    }
    async fn usage(&self, _: &MachineKey) -> DriverResult<MachineUsage> {
        Ok(MachineUsage::default())
    }
    async fn load(&self, _: &MachineKey) -> DriverResult<MachineLoad> {
        Ok(MachineLoad::default())
    }
    async fn survivors(&self) -> DriverResult<Vec<(MachineKey, Link)>> {
        Ok(Vec::new())
    }
    async fn died(&self, _: &MachineKey) {}
    async fn network(&self, key: &MachineKey) -> DriverResult<Device> {
        Err(DriverError::Absent { key: key.clone() })
    }
}

impl Served {
    /// A server whose sandboxes cannot be started.
    pub(crate) async fn without_machines() -> Self {
        Self::with(Limits::default(), Settings::default(), None).await
    }

    /// A server whose sandboxes cannot be started, with an engine that behaves as `settings` has it.
    pub(crate) async fn settled(settings: Settings) -> Self {
        Self::with(Limits::default(), settings, None).await
    }

    /// A server whose sandboxes cannot be started, with limits of its own.
    pub(crate) async fn limited(limits: Limits) -> Self {
        Self::with(limits, Settings::default(), None).await
    }

    /// A server with containers, or nothing where this host has none.
    pub(crate) async fn with_machines(test: &str) -> Option<Self> {
        Self::with_machines_and(test, Limits::default()).await
    }

    /// The same with limits of its own.
    pub(crate) async fn with_machines_and(test: &str, limits: Limits) -> Option<Self> {
        Self::with_settings(test, limits, Settings::default()).await
    }

    /// The same with an engine that behaves as `settings` has it.
    pub(crate) async fn with_settings(
        test: &str,
        limits: Limits,
        settings: Settings,
    ) -> Option<Self> {
        match ContainerHost::new() {
            Ok(host) => Some(Self::with(limits, settings, Some(host)).await),
            Err(why) => {
                skipped(test, &why);
                None
            }
        }
    }

    /// A server that speaks TLS, whose sandboxes cannot be started.
    pub(crate) async fn secured(limits: Limits, tls: TlsFiles) -> Self {
        Self::with_tls(limits, Settings::default(), None, Some(tls)).await
    }

    async fn with(limits: Limits, settings: Settings, host: Option<ContainerHost>) -> Self {
        Self::with_tls(limits, settings, host, None).await
    }

    async fn with_tls(
        limits: Limits,
        settings: Settings,
        host: Option<ContainerHost>,
        tls: Option<TlsFiles>,
    ) -> Self {
        let dir = Scratch(TempDir::with_prefix("keep-api-").unwrap());
        let data = dir.0.path().join("data");
        let store = Store::open(&data).unwrap();
        let images = Images::new(store.clone(), ImageSettings::default());
        let archive = dir.0.path().join("small.tar");
        small_root_tar(&archive).unwrap();
        images.import("small", &archive, &Reporter::silent()).await.unwrap();
        let file = dir.0.path().join("index.sqlite");
        let db = Arc::new(Index::open(&file, store.clone()).await.unwrap());
        let driver: Arc<dyn Driver> = match &host {
            Some(host) => Arc::new(host.driver()),
            None => Arc::new(Refuses),
        };
        let catalog = Arc::new(DiskCatalog::new(store.clone(), db));
        let parts = Parts { store, images, catalog, drivers: vec![driver], settings };
        let engine = Engine::open(parts).await.unwrap();
        engine.recovered().await;
        let [admin, write, read, foreign] = keys(&engine).await;
        let socket = dir.0.path().join("keep.sock");
        let server = Server::bind(ServeConfig {
            tcp: vec![SocketAddr::from(([127, 0, 0, 1], 0))],
            unix: Some(socket.clone()),
            scratch: dir.0.path().to_owned(),
            limits,
            gateway: sandkeep_server::GatewaySettings {
                domain: Some("keep.test".to_owned()),
                default_project: "main".parse().unwrap(),
                wait: Duration::from_secs(10),
                ..sandkeep_server::GatewaySettings::default()
            },
            vercel: sandkeep_server::VercelSettings::default(),
            web: sandkeep_server::WebSettings {
                hosts: vec!["sandkeep".to_owned(), "x".to_owned()],
                origins: vec!["https://console.test".to_owned()],
            },
            tls,
        });
        let server = server.await.unwrap();
        let address = server.addresses()[0];
        let (stop, stopped) = oneshot::channel::<()>();
        let serving = engine.clone();
        let task = tokio::spawn(async move {
            server.run(serving, async { drop(stopped.await) }).await;
        });
        Self {
            address,
            engine,
            admin,
            write,
            read,
            foreign,
            socket,
            stop: Some(stop),
            task: Some(task),
            _host: host,
            dir,
        }
    }

    /// Its data directory.
    pub(crate) fn data(&self) -> std::path::PathBuf {
        self.dir.0.path().join("data")
    }

    /// Begins the server's shutdown, and waits until it is complete.
    pub(crate) async fn shut_down(&mut self) {
        self.begin_shutdown();
        self.shut_down_begun().await;
    }

    /// Waits until a shutdown that was begun is complete.
    pub(crate) async fn shut_down_begun(&mut self) {
        self.task.take().unwrap().await.unwrap();
    }

    /// Begins the server's shutdown.
    pub(crate) fn begin_shutdown(&mut self) {
        let _ = self.stop.take().unwrap().send(());
    }

    /// Sends a request as it is and hands the answer out unread.
    pub(crate) async fn send<B>(&self, request: Request<B>) -> Response<Incoming>
    where
        B: Body<Data = Bytes, Error = Infallible> + Send + 'static,
    {
        let stream = TcpStream::connect(self.address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        sender.send_request(request).await.unwrap()
    }

    /// A request with a key.
    pub(crate) fn request(
        &self,
        method: Method,
        path: &str,
        key: &str,
    ) -> hyper::http::request::Builder {
        let request = Request::builder().method(method).uri(path).header("host", "sandkeep");
        if key.is_empty() {
            request
        } else {
            request.header(AUTHORIZATION, format!("Bearer {key}"))
        }
    }

    /// Sends a request without a body.
    pub(crate) async fn call(&self, method: Method, path: &str, key: &str) -> Answer {
        let request = self.request(method, path, key).body(Full::new(Bytes::new())).unwrap();
        read(self.send(request).await).await
    }

    pub(crate) async fn get(&self, path: &str, key: &str) -> Answer {
        self.call(Method::GET, path, key).await
    }

    /// Sends a request with a JSON body.
    pub(crate) async fn json(&self, method: Method, path: &str, key: &str, body: &str) -> Answer {
        let request = self
            .request(method, path, key)
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body.to_owned())))
            .unwrap();
        read(self.send(request).await).await
    }

    pub(crate) async fn post(&self, path: &str, key: &str, body: &str) -> Answer {
        self.json(Method::POST, path, key, body).await
    }

    /// Makes a sandbox on the small image, as `change` has it, and starts it. Answers with the path of
    /// its session as Vercel's clients know it.
    pub(crate) async fn session(&self, name: &str, change: Patch) -> String {
        let patch = Patch { image: Some("small".to_owned()), ..change };
        let name = Some(name.parse().unwrap());
        let create = Create { name, patch, start: true, ..Create::default() };
        let opened = self.engine.create(&"main".parse().unwrap(), create, None).await.unwrap();
        session_path(&opened)
    }

    /// Makes a sandbox on the small image, and does not start it.
    pub(crate) async fn create(&self, name: &str) {
        let body = format!(r#"{{"name":"{name}","image":"small","start":false}}"#);
        let made = self.post("/v1/sandboxes", &self.write, &body).await;
        assert_eq!(made.status, StatusCode::CREATED, "{made:?}");
    }
}

/// A directory that goes when the engine may still be writing a digest to it.
struct Scratch(TempDir);

impl Drop for Scratch {
    fn drop(&mut self) {
        for _ in 0..250 {
            let _ = std::fs::remove_dir_all(self.0.path());
            if !self.0.path().exists() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
    }
}

/// The path of a sandbox's session as Vercel's clients know it.
pub(crate) fn session_path(opened: &Opened) -> String {
    let id = opened.session.as_ref().unwrap().id.to_string();
    format!("/api/v2/sandboxes/sessions/{}", id.replace("ses-", "sbx_sk"))
}

/// Reads an answer to its end.
pub(crate) async fn read(response: Response<Incoming>) -> Answer {
    let (parts, body) = response.into_parts();
    let body = tokio::time::timeout(Duration::from_secs(60), body.collect())
        .await
        .expect("an answer that ends")
        .expect("an answer that is whole");
    Answer { status: parts.status, headers: parts.headers, body: body.to_bytes() }
}

/// A body sent piece by piece, its length not announced.
pub(crate) fn pieces(
    pieces: impl IntoIterator<Item = Bytes, IntoIter: Send + 'static>,
) -> impl Body<Data = Bytes, Error = Infallible> + Send {
    let frames = pieces.into_iter().map(|piece| Ok(Frame::data(piece)));
    StreamBody::new(futures_util::stream::iter(frames))
}

async fn keys(engine: &Engine) -> [String; 4] {
    let mut secrets = Vec::new();
    for (project, scope) in [
        ("main", Scope::Admin),
        ("main", Scope::Write),
        ("main", Scope::Read),
        ("other", Scope::Write),
    ] {
        let project: Name = project.parse().unwrap();
        // The first key of a project finds it missing.
        let _ = engine.create_project(project.clone()).await;
        secrets.push(key(engine, &project, scope, None).await);
    }
    secrets.try_into().unwrap()
}

/// Makes a key.
pub(crate) async fn key(
    engine: &Engine,
    project: &Name,
    scope: Scope,
    expires: Option<Span>,
) -> String {
    engine.create_key(project, "test".to_owned(), scope, expires).await.unwrap().1
}
