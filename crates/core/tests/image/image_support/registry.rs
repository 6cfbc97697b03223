//! Registries on this machine: the real one where it is installed, and one that misbehaves on order.

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::{architecture, config, digest};

/// A user and a password, and how a registry wants to have them written down.
pub(crate) const USER: (&str, &str) = ("ann", "secret");
const HTPASSWD: &str = "ann:$2b$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a\n";

/// Debian's `docker-registry`, on a port of its own, for as long as this lives.
pub(crate) struct RealRegistry {
    child: Child,
    pub(crate) address: SocketAddr,
    dir: TempDir,
    auth: bool,
}

impl Drop for RealRegistry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl RealRegistry {
    /// Starts one, if the program exists.
    #[allow(clippy::print_stdout, reason = "a test that cannot run says so")]
    pub(crate) async fn start(test: &str, auth: bool) -> Option<Self> {
        const PROGRAM: &str = "/usr/bin/docker-registry";
        if !Path::new(PROGRAM).exists() {
            println!("SKIPPED {test}: docker-registry is not installed");
            return None;
        }
        let dir = TempDir::new().expect("a directory");
        // Another process may take the port before the registry does; then it is tried again.
        for _ in 0..10 {
            let address = TcpListener::bind("127.0.0.1:0")
                .and_then(|listener| listener.local_addr())
                .expect("a free port");
            let mut text = format!(
                "version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {}}}}}\nhttp: {{addr: '{address}'}}\n",
                dir.path().join("storage").display()
            );
            if auth {
                let users = dir.path().join("htpasswd");
                fs::write(&users, HTPASSWD).expect("ours");
                text +=
                    &format!("auth: {{htpasswd: {{realm: test, path: {}}}}}\n", users.display());
            }
            let settings = dir.path().join("config.yml");
            fs::write(&settings, text).expect("ours");
            let mut child = Command::new(PROGRAM)
                .arg("serve")
                .arg(&settings)
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("it is a program");
            let give_up = Instant::now() + Duration::from_secs(30);
            while Instant::now() < give_up && child.try_wait().expect("ours").is_none() {
                if TcpStream::connect(address).await.is_ok() {
                    return Some(Self { child, address, dir, auth });
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            let _ = child.kill();
            let _ = child.wait();
        }
        panic!("docker-registry does not start");
    }

    fn request(&self, method: reqwest::Method, url: &str) -> reqwest::RequestBuilder {
        let request = reqwest::Client::new().request(method, url);
        if self.auth { request.basic_auth(USER.0, Some(USER.1)) } else { request }
    }

    /// Uploads a blob, and describes it.
    pub(crate) async fn push_blob(&self, repository: &str, bytes: &[u8]) -> serde_json::Value {
        let url = format!("http://{}/v2/{repository}/blobs/uploads/", self.address);
        let begun = self.request(reqwest::Method::POST, &url).send().await.expect("it listens");
        let place = begun.headers()["location"].to_str().expect("text").to_owned();
        let sum = digest(bytes);
        let joint = if place.contains('?') { '&' } else { '?' };
        let url = format!("{place}{joint}digest={sum}");
        let put = self.request(reqwest::Method::PUT, &url).body(bytes.to_vec());
        let done = put.send().await.expect("it listens");
        assert!(done.status().is_success(), "{done:?}");
        serde_json::json!({
            "digest": sum,
            "size": bytes.len(),
            "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip",
        })
    }

    /// Uploads a manifest and gives its digest.
    pub(crate) async fn push_manifest(
        &self,
        repository: &str,
        tag: &str,
        kind: &str,
        manifest: &serde_json::Value,
    ) -> String {
        let url = format!("http://{}/v2/{repository}/manifests/{tag}", self.address);
        let text = manifest.to_string();
        let sum = digest(text.as_bytes());
        let put = self.request(reqwest::Method::PUT, &url).header("content-type", kind).body(text);
        let done = put.send().await.expect("it listens");
        assert!(done.status().is_success(), "{:?}", done.text().await);
        sum
    }

    /// Uploads an image of packed layers, and gives its manifest's digest.
    pub(crate) async fn push(
        &self,
        repository: &str,
        tag: &str,
        layers: &[(&[u8], Vec<u8>)],
        architecture: &str,
    ) -> String {
        const KIND: &str = "application/vnd.oci.image.manifest.v1+json";
        let plain: Vec<&[u8]> = layers.iter().map(|(plain, _)| *plain).collect();
        let mut config = self.push_blob(repository, &config(&plain, architecture)).await;
        config["mediaType"] = "application/vnd.oci.image.config.v1+json".into();
        let mut blobs = Vec::new();
        for (_, packed) in layers {
            blobs.push(self.push_blob(repository, packed).await);
        }
        let manifest = serde_json::json!({
            "schemaVersion": 2, "mediaType": KIND, "config": config, "layers": blobs,
        });
        self.push_manifest(repository, tag, KIND, &manifest).await
    }

    /// Changes a blob behind the registry's back, without changing its length.
    pub(crate) fn tamper(&self, sum: &str) {
        let digits = &sum[7..];
        let path = self.dir.path().join("storage/docker/registry/v2/blobs/sha256");
        let path = path.join(&digits[..2]).join(digits).join("data");
        let mut bytes = fs::read(&path).expect("it is there");
        let middle = bytes.len() / 2;
        bytes[middle] ^= 0xff;
        fs::write(&path, bytes).expect("ours");
    }
}

/// Stands before a registry and cuts connections when its budget of bytes is used up.
pub(crate) struct Cutter {
    pub(crate) address: SocketAddr,
    /// How many bytes it lets through before it cuts; below zero it cuts at once.
    pub(crate) budget: Arc<AtomicI64>,
    /// What was asked for with `Range`.
    pub(crate) ranges: Arc<Mutex<Vec<String>>>,
    /// Bytes that went through.
    pub(crate) passed: Arc<AtomicI64>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Cutter {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Cutter {
    /// `each`: the budget is for every connection anew, not for all together.
    pub(crate) async fn before(registry: SocketAddr, budget: i64, each: bool) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let left = Arc::new(AtomicI64::new(budget));
        let (ranges, passed) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicI64::new(0)));
        let shared = (Arc::clone(&left), Arc::clone(&ranges), Arc::clone(&passed));
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (left, ranges, passed) =
                    (Arc::clone(&shared.0), Arc::clone(&shared.1), Arc::clone(&shared.2));
                let left = if each { Arc::new(AtomicI64::new(budget)) } else { left };
                tokio::spawn(async move {
                    let Ok(server) = TcpStream::connect(registry).await else { return };
                    let (mut from_client, mut to_client) = client.into_split();
                    let (mut from_server, mut to_server) = server.into_split();
                    let asking = tokio::spawn(async move {
                        let mut buffer = vec![0; 16 << 10];
                        while let Ok(read @ 1..) = from_client.read(&mut buffer).await {
                            let text = String::from_utf8_lossy(&buffer[..read]).to_lowercase();
                            let asked =
                                text.lines().filter_map(|line| line.strip_prefix("range: "));
                            ranges.lock().expect("whole").extend(asked.map(str::to_owned));
                            if to_server.write_all(&buffer[..read]).await.is_err() {
                                return;
                            }
                        }
                    });
                    let mut buffer = vec![0; 16 << 10];
                    while let Ok(read @ 1..) = from_server.read(&mut buffer).await {
                        if left.fetch_sub(read as i64, Ordering::SeqCst) < read as i64
                            || to_client.write_all(&buffer[..read]).await.is_err()
                        {
                            break;
                        }
                        passed.fetch_add(read as i64, Ordering::SeqCst);
                    }
                    asking.abort();
                });
            }
        });
        Self { address, budget: left, ranges, passed, task }
    }
}

/// A request to a [`Script`].
pub(crate) struct Request {
    pub(crate) method: String,
    pub(crate) path: String,
    /// The `Authorization` header.
    pub(crate) authorization: String,
    pub(crate) body: String,
}

/// What a [`Script`] answers: status, headers, body.
pub(crate) type Answer = (u16, Vec<(&'static str, String)>, Vec<u8>);

/// A registry with the answers that a test gives it.
pub(crate) struct Script {
    pub(crate) address: SocketAddr,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Script {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Script {
    pub(crate) async fn start(
        answer: impl Fn(SocketAddr, &Request) -> Answer + Send + Sync + 'static,
    ) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let answer = Arc::new(answer);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let answer = Arc::clone(&answer);
                tokio::spawn(async move {
                    // A client that hangs up is part of the play.
                    let _ = serve(stream, |request| answer(address, request)).await;
                });
            }
        });
        Self { address, task }
    }
}

async fn serve(mut stream: TcpStream, answer: impl Fn(&Request) -> Answer) -> std::io::Result<()> {
    let mut seen = Vec::new();
    let end = loop {
        if let Some(at) = seen.windows(4).position(|part| part == b"\r\n\r\n") {
            break at + 4;
        }
        if stream.read_buf(&mut seen).await? == 0 {
            return Ok(());
        }
    };
    let head = String::from_utf8_lossy(&seen[..end]).into_owned();
    let field = |name: &str| {
        head.lines()
            .find_map(|line| {
                let (key, value) = line.split_once(": ")?;
                key.eq_ignore_ascii_case(name).then(|| value.to_owned())
            })
            .unwrap_or_default()
    };
    let length: usize = field("content-length").parse().unwrap_or(0);
    while seen.len() < end + length {
        if stream.read_buf(&mut seen).await? == 0 {
            return Ok(());
        }
    }
    let mut words = head.split(' ');
    let request = Request {
        method: words.next().unwrap_or_default().to_owned(),
        path: words.next().unwrap_or_default().to_owned(),
        authorization: field("authorization"),
        body: String::from_utf8_lossy(&seen[end..]).into_owned(),
    };
    let (status, headers, body) = answer(&request);
    let mut text = format!("HTTP/1.1 {status} Said\r\nConnection: close\r\n");
    if !headers.iter().any(|(name, _)| *name == "Content-Length") {
        text += &format!("Content-Length: {}\r\n", body.len());
    }
    for (name, value) in headers {
        text += &format!("{name}: {value}\r\n");
    }
    stream.write_all(format!("{text}\r\n").as_bytes()).await?;
    stream.write_all(&body).await?;
    stream.shutdown().await
}

/// An image with one packed layer, as a [`Script`] can serve it: what lies at which path.
pub(crate) fn served(plain: &[u8], packed: &[u8]) -> Vec<(String, Vec<u8>)> {
    let config = config(&[plain], architecture());
    let manifest = serde_json::json!({
        "schemaVersion": 2,
        "config": {"digest": digest(&config), "size": config.len(), "mediaType": "x"},
        "layers": [{"digest": digest(packed), "size": packed.len(), "mediaType": "tar"}],
    });
    vec![
        ("/v2/app/manifests/1".to_owned(), manifest.to_string().into_bytes()),
        (format!("/v2/app/blobs/{}", digest(&config)), config),
        (format!("/v2/app/blobs/{}", digest(packed)), packed.to_vec()),
    ]
}
