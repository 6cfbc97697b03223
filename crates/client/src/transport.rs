//! Exchanges with the server: where it listens, connections that are kept alive, WebSockets.
//!
//! A connection serves one exchange at a time. It goes back to the pool when the answer's body was
//! read to its end, and is closed when a body is dropped before that: the server then knows that
//! nobody listens any more. A pooled connection that the server closed meanwhile is noticed when
//! the request is handed to it, before anything was sent, and another is opened.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::header::{AUTHORIZATION, CONNECTION, HOST, HeaderValue, UPGRADE, USER_AGENT};
use hyper::upgrade::Upgraded;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::{TcpStream, UnixStream};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;

use crate::Error;
use crate::body::{Download, Outgoing, Upload, whole};
use crate::tls::Trust;
use crate::wire::{HeardOut, Wire};

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// Plain HTTP. For anything but the own machine, use TLS.
    Tcp {
        /// `host:port`.
        authority: String,
    },
    /// HTTPS.
    Tls {
        /// `host:port`.
        authority: String,
    },
    /// A socket file.
    Unix {
        /// Its path.
        path: PathBuf,
    },
}

impl FromStr for Endpoint {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let bad = || Error::BadUrl { text: text.to_owned() };
        if let Some(path) = text.strip_prefix("unix://") {
            return match path.starts_with('/') && path.len() > 1 {
                true => Ok(Self::Unix { path: PathBuf::from(path) }),
                false => Err(bad()),
            };
        }
        let (rest, usual_port) = match text.strip_prefix("https://") {
            Some(rest) => (rest, Some(443)),
            None => (text.strip_prefix("http://").ok_or_else(bad)?, None),
        };
        let authority = rest.strip_suffix('/').unwrap_or(rest);
        let parsed: hyper::http::uri::Authority = authority.parse().map_err(|_| bad())?;
        if parsed.host().is_empty() || authority.contains('@') {
            return Err(bad());
        }
        let authority = match parsed.port() {
            Some(_) => authority.to_owned(),
            None => format!("{authority}:{}", usual_port.unwrap_or(80)),
        };
        Ok(match usual_port {
            Some(_) => Self::Tls { authority },
            None => Self::Tcp { authority },
        })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { authority } => write!(f, "http://{authority}"),
            Self::Tls { authority } => write!(f, "https://{authority}"),
            Self::Unix { path } => write!(f, "unix://{}", path.display()),
        }
    }
}

/// The header that says for which project an admin key acts.
const PROJECT: &str = "sandkeep-project";

/// A connection that serves one exchange at a time.
pub(crate) type Connection = http1::SendRequest<Outgoing>;

/// Connections that serve none.
pub(crate) type Idle = Arc<Mutex<Vec<Connection>>>;

/// The connections to one server, and the key to it.
pub(crate) struct Transport {
    endpoint: Endpoint,
    bearer: Option<HeaderValue>,
    project: Option<HeaderValue>,
    /// For TLS endpoints.
    trust: Arc<Trust>,
    // Held only to push and pop, never across an await.
    idle: Idle,
}

impl fmt::Debug for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transport").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}

/// One exchange to be made.
pub(crate) struct Call {
    method: Method,
    target: String,
    headers: Vec<(&'static str, String)>,
    body: Outgoing,
    /// Whether the body is a stream, which a server may refuse before it has read it.
    uploads: bool,
}

impl Call {
    pub(crate) fn new(method: Method, target: impl Into<String>) -> Self {
        Self {
            method,
            target: target.into(),
            headers: Vec::new(),
            body: whole(Bytes::new()),
            uploads: false,
        }
    }

    pub(crate) fn get(target: impl Into<String>) -> Self {
        Self::new(Method::GET, target)
    }

    pub(crate) fn post(target: impl Into<String>) -> Self {
        Self::new(Method::POST, target)
    }

    pub(crate) fn header(mut self, name: &'static str, value: Option<&str>) -> Self {
        self.headers.extend(value.map(|value| (name, value.to_owned())));
        self
    }

    /// Sends `value` as JSON. Our own types always can be written as JSON.
    pub(crate) fn json<T: Serialize>(mut self, value: &T) -> Result<Self, Error> {
        let text = serde_json::to_vec(value).map_err(|error| Error::protocol(error.to_string()))?;
        self.body = whole(Bytes::from(text));
        self.headers.push(("content-type", "application/json".to_owned()));
        Ok(self)
    }

    /// Sends bytes as they come.
    pub(crate) fn stream(mut self, upload: Upload) -> Self {
        self.body = upload.body;
        self.uploads = true;
        self.headers.push(("content-type", "application/octet-stream".to_owned()));
        self
    }
}

impl Transport {
    pub(crate) fn new(endpoint: Endpoint, key: Option<&str>, trust: Trust) -> Result<Self, Error> {
        let bearer = match key {
            None => None,
            Some(key) => {
                let mut value = HeaderValue::try_from(format!("Bearer {key}"))
                    .map_err(|_| Error::protocol("the key has characters no key has"))?;
                value.set_sensitive(true);
                Some(value)
            }
        };
        let trust = Arc::new(trust);
        Ok(Self { endpoint, bearer, project: None, trust, idle: Arc::default() })
    }

    /// The same, for another project. Connections are shared.
    pub(crate) fn for_project(&self, project: &str) -> Result<Self, Error> {
        let value = HeaderValue::try_from(project)
            .map_err(|_| Error::protocol("the project has characters no name has"))?;
        Ok(Self {
            endpoint: self.endpoint.clone(),
            bearer: self.bearer.clone(),
            project: Some(value),
            trust: Arc::clone(&self.trust),
            idle: Arc::clone(&self.idle),
        })
    }

    pub(crate) fn has_key(&self) -> bool {
        self.bearer.is_some()
    }

    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Makes an exchange whose answer is a JSON document.
    pub(crate) async fn json<T: DeserializeOwned>(&self, call: Call) -> Result<T, Error> {
        let body = self.send(call).await?.collect().await?;
        serde_json::from_slice(&body)
            .map_err(|error| Error::protocol(format!("not the JSON we know: {error}")))
    }

    /// Makes an exchange whose answer has nothing to say.
    pub(crate) async fn done(&self, call: Call) -> Result<(), Error> {
        self.send(call).await?.collect().await.map(drop)
    }

    /// Makes an exchange, and returns its answer when its head has come and is no error.
    pub(crate) async fn send(&self, call: Call) -> Result<Download, Error> {
        let uploads = call.uploads;
        let request = self.request(call)?;
        let (answer, connection, idle) = if uploads {
            let mut sender = self.open(true).await?;
            let answer = sender.send_request(request).await;
            (answer.map_err(|error| Error::broken("asking it", error))?, sender, None)
        } else {
            let (answer, sender) = self.exchange(request).await?;
            (answer, sender, Some(Arc::clone(&self.idle)))
        };
        let status = answer.status();
        let download = Download::new(answer, connection, idle);
        if status.is_success() {
            return Ok(download);
        }
        Err(Error::from_answer(status.as_u16(), &download.collect().await?))
    }

    /// Makes an exchange that turns a connection of its own into a stream of bytes.
    pub(crate) async fn upgrade(
        &self,
        call: Call,
        protocol: &'static str,
    ) -> Result<Upgraded, Error> {
        let mut request = self.request(call)?;
        request.headers_mut().insert(CONNECTION, HeaderValue::from_static("upgrade"));
        request.headers_mut().insert(UPGRADE, HeaderValue::from_static(protocol));
        let mut sender = self.open(false).await?;
        let answer = sender.send_request(request).await;
        let answer = answer.map_err(|error| Error::broken("asking it", error))?;
        let status = answer.status();
        if status == StatusCode::SWITCHING_PROTOCOLS {
            let upgraded = hyper::upgrade::on(answer).await;
            return upgraded.map_err(|error| Error::broken("opening a stream", error));
        }
        let answer = Download::new(answer, sender, Some(Arc::clone(&self.idle)));
        Err(Error::from_answer(status.as_u16(), &answer.collect().await?))
    }

    /// Opens a WebSocket at `target`.
    pub(crate) async fn socket(&self, target: &str) -> Result<WebSocketStream<Wire>, Error> {
        let url = format!("ws://{}{target}", self.authority());
        let mut request =
            url.into_client_request().map_err(|error| Error::protocol(error.to_string()))?;
        if let Some(bearer) = &self.bearer {
            request.headers_mut().insert(AUTHORIZATION, bearer.clone());
        }
        if let Some(project) = &self.project {
            request.headers_mut().insert(PROJECT, project.clone());
        }
        let wire = self.connect().await?;
        match tokio_tungstenite::client_async(request, wire).await {
            Ok((socket, _answer)) => Ok(socket),
            Err(tungstenite::Error::Http(answer)) => {
                let body = answer.body().as_deref().unwrap_or_default();
                Err(Error::from_answer(answer.status().as_u16(), body))
            }
            Err(error) => Err(Error::broken("opening a WebSocket", error)),
        }
    }

    fn request(&self, call: Call) -> Result<Request<Outgoing>, Error> {
        let mut request = Request::builder()
            .method(call.method)
            .uri(call.target)
            .header(HOST, self.authority())
            .header(USER_AGENT, concat!("sandkeep-client/", env!("CARGO_PKG_VERSION")));
        if let Some(bearer) = &self.bearer {
            request = request.header(AUTHORIZATION, bearer.clone());
        }
        if let Some(project) = &self.project {
            request = request.header(PROJECT, project.clone());
        }
        for (name, value) in call.headers {
            request = request.header(name, value);
        }
        request.body(call.body).map_err(|error| Error::protocol(error.to_string()))
    }

    async fn exchange(
        &self,
        mut request: Request<Outgoing>,
    ) -> Result<(Response<Incoming>, Connection), Error> {
        loop {
            let (mut sender, used) = match self.take_idle().await {
                Some(sender) => (sender, true),
                None => (self.open(false).await?, false),
            };
            match sender.try_send_request(request).await {
                Ok(answer) => return Ok((answer, sender)),
                Err(mut failed) => match failed.take_message() {
                    Some(unsent) if used => request = unsent,
                    _ => return Err(Error::broken("asking it", failed.into_error())),
                },
            }
        }
    }

    async fn take_idle(&self) -> Option<Connection> {
        loop {
            let mut sender = self.idle.lock().pop()?;
            if !sender.is_closed() && sender.ready().await.is_ok() {
                return Some(sender);
            }
        }
    }

    /// Opens a connection. One for an `upload` is for one exchange alone: see [`HeardOut`].
    async fn open(&self, upload: bool) -> Result<Connection, Error> {
        let wire = TokioIo::new(HeardOut::new(self.connect().await?, upload));
        let (sender, connection) =
            http1::handshake(wire).await.map_err(|error| Error::broken("greeting it", error))?;
        // Ends when the sender is dropped or the server hangs up; its errors reach the sender.
        tokio::spawn(async move {
            let _ = connection.with_upgrades().await;
        });
        Ok(sender)
    }

    async fn connect(&self) -> Result<Wire, Error> {
        let failed = |source: io::Error| Error::Connect {
            url: self.endpoint.to_string(),
            hint: connect_hint(&self.endpoint, source.kind()),
            source,
        };
        match &self.endpoint {
            Endpoint::Tcp { authority } => {
                let stream = dial(authority).await.map_err(failed)?;
                // Keystrokes and short requests should not wait for company.
                let _ = stream.set_nodelay(true);
                Ok(Wire::Tcp(stream))
            }
            Endpoint::Tls { authority } => {
                let stream = dial(authority).await.map_err(failed)?;
                let _ = stream.set_nodelay(true);
                self.trust.handshake(&self.endpoint, authority, stream).await
            }
            Endpoint::Unix { path } => {
                UnixStream::connect(path).await.map(Wire::Unix).map_err(failed)
            }
        }
    }

    fn authority(&self) -> &str {
        match &self.endpoint {
            Endpoint::Tcp { authority } | Endpoint::Tls { authority } => authority,
            Endpoint::Unix { .. } => "localhost",
        }
    }
}

/// How long a server may take to take a connection.
const DIAL: Duration = Duration::from_secs(10);

async fn dial(authority: &str) -> io::Result<TcpStream> {
    match tokio::time::timeout(DIAL, TcpStream::connect(authority)).await {
        Ok(connected) => connected,
        Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "no answer within 10 seconds")),
    }
}

fn connect_hint(endpoint: &Endpoint, kind: io::ErrorKind) -> String {
    match (endpoint, kind) {
        (Endpoint::Unix { .. }, io::ErrorKind::PermissionDenied) => {
            "the socket belongs to another user; run this as the user who runs `keep serve`".into()
        }
        (_, io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound) => {
            "is the server running? start it with `keep serve`".into()
        }
        _ => "check the address in --url or SANDKEEP_URL, and the network to it".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::Endpoint;

    #[test]
    fn addresses_as_people_write_them() {
        let read = |text: &str| text.parse::<Endpoint>().map(|found| found.to_string()).ok();
        for (text, meant) in [
            ("http://127.0.0.1:7777", "http://127.0.0.1:7777"),
            ("http://127.0.0.1:7777/", "http://127.0.0.1:7777"),
            ("http://keep.example", "http://keep.example:80"),
            ("http://[::1]:7777", "http://[::1]:7777"),
            ("https://keep.example", "https://keep.example:443"),
            ("https://[::1]:7777/", "https://[::1]:7777"),
            ("unix:///run/keep.sock", "unix:///run/keep.sock"),
        ] {
            assert_eq!(read(text).as_deref(), Some(meant), "{text}");
        }
        for text in
            ["", "localhost:7777", "https://", "unix://", "unix://a", "http://", "http://a/b"]
        {
            assert_eq!(read(text), None, "{text}");
        }
    }
}
