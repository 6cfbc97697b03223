//! Ports inside sandboxes, for everybody.
//!
//! ```text
//! http://sb-<26 characters of the sandbox's id>-<port>.<any domain>/...
//! http://<this server>/_route/sb-<26 characters>-<port>/...
//! ```
//!
//! Only ports that a sandbox publishes are reachable, by anyone who knows the name: that is what
//! publishing means. Names last as long as the sandbox does, and a fork has others. A request does not
//! wake a sandbox and keeps one that runs awake.
//!
//! Each request gets a connection of its own to the port. Both sides speak HTTP through the same parser,
//! which decides where a request ends; what one side says about the connection itself is not passed on
//! to the other. Bodies stream both ways, and an upgraded connection is a pipe. When nobody is there
//! any more to hear what a port says, its connection goes, whether the process inside sees to it or not.
//!
//! What is served under `/_route/` shares its origin with this server and with all other sandboxes, so
//! nothing here may ever depend on cookies or on storage of that origin, and no answer may claim the
//! origin for a service worker or clear it. Where that matters, give ports a domain of their own.

use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::{
    ACCEPT, CONNECTION, CONTENT_TYPE, EXPECT, FORWARDED, HOST, HeaderName, PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use axum::http::uri::PathAndQuery;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, Version};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hyper::client::conn::http1;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use sandkeep_core::engine::{Error, Hold};
use sandkeep_core::guest::{GuestError, Incoming, Outgoing};
use sandkeep_core::model::SandboxId;
use sandkeep_proto::link::Failure;
use serde_json::json;
use tokio::io::{
    AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, DuplexStream, ReadBuf,
};
use tokio::sync::oneshot;

use crate::api::App;
use crate::compat::vercel::Settings;
use crate::listen::{Peer, closed};

/// The path under which every port has a place.
const PREFIX: &str = "/_route/";
/// How much may be under way between the connection and the agent.
const BUFFER: usize = 64 << 10;
/// How long a process may take to see that nobody is there any more, before its connection goes.
const LINGER: Duration = Duration::from_secs(2);
/// How a sandbox's id begins, which its public name leaves out.
const ID: &str = "sbx-";

/// The public name of a sandbox's port: a label fit for a host name.
pub(crate) fn subdomain(sandbox: &SandboxId, port: u16) -> String {
    let tail = sandbox.as_str().strip_prefix(ID).unwrap_or(sandbox.as_str());
    format!("sb-{tail}-{port}")
}

/// Where clients find a port of that name.
pub(crate) fn route_url(app: &App, host: Option<&str>, sub: &str) -> String {
    address(&app.vercel, host, sub)
}

fn address(settings: &Settings, host: Option<&str>, sub: &str) -> String {
    let base = base_url(settings, host);
    let Some(domain) = &settings.domain else { return format!("{base}{PREFIX}{sub}") };
    let (scheme, host) = base.split_once("://").unwrap_or(("http", &base));
    // The port is the server's; the host is not.
    let port = host.rsplit_once(':').filter(|(_, port)| port.bytes().all(|b| b.is_ascii_digit()));
    match port {
        Some((_, port)) if !domain.contains(':') => format!("{scheme}://{sub}.{domain}:{port}"),
        _ => format!("{scheme}://{sub}.{domain}"),
    }
}

/// Where clients reach this server: as configured, or as they did.
pub(crate) fn base_url(settings: &Settings, host: Option<&str>) -> String {
    match &settings.public_url {
        Some(url) => url.trim_end_matches('/').to_owned(),
        None => format!("http://{}", host.unwrap_or("localhost")),
    }
}

/// A port that a request is for, and what it asks of it.
#[derive(Debug, PartialEq, Eq)]
struct Target {
    sandbox: SandboxId,
    port: u16,
    path: PathAndQuery,
    /// What was cut off the front of the path.
    prefix: Option<String>,
}

/// Reads a public name.
fn parse(sub: &str) -> Option<(SandboxId, u16)> {
    let (tail, port) = sub.strip_prefix("sb-")?.split_at_checked(26)?;
    let port = port.strip_prefix('-')?;
    if port.starts_with('0') || !port.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    Some((format!("{ID}{tail}").parse().ok()?, port.parse().ok()?))
}

/// Whether a request is for a port; `Some(None)` if it is for one that cannot be.
fn target(uri: &Uri, headers: &HeaderMap) -> Option<Option<Target>> {
    let whole = uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
    let host = uri.host().or_else(|| headers.get(HOST).and_then(|host| host.to_str().ok()));
    let label = host.and_then(|host| host.split_once('.')).map(|(label, _)| label);
    // Host names are the same in capitals.
    if let Some((sandbox, port)) = label.and_then(|label| parse(&label.to_ascii_lowercase())) {
        return Some(Some(Target { sandbox, port, path: whole, prefix: None }));
    }
    let rest = whole.as_str().strip_prefix(PREFIX)?;
    let end = rest.find(['/', '?']).unwrap_or(rest.len());
    let (sub, path) = rest.split_at(end);
    let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
    let found = parse(sub).and_then(|(sandbox, port)| {
        let path = path.parse().ok()?;
        Some(Target { sandbox, port, path, prefix: Some(format!("{PREFIX}{sub}")) })
    });
    Some(found)
}

/// Takes requests for ports out of the way of everything else: their paths are none of ours.
pub(crate) async fn serve(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let accept = request.headers().get(ACCEPT).cloned();
    let answer = match target(request.uri(), request.headers()) {
        None => return next.run(request).await,
        Some(None) => Err(Refusal::UNKNOWN),
        Some(Some(target)) => forward(&app, target, request).await,
    };
    answer.unwrap_or_else(|refusal| refusal.page(accept.as_ref()))
}

async fn forward(app: &Arc<App>, target: Target, request: Request) -> Result<Response, Refusal> {
    if request.method() == Method::CONNECT {
        return Err(Refusal::UNKNOWN);
    }
    let (out, incoming, hold) = app
        .engine
        .connect_published(&target.sandbox, target.port)
        .await
        .map_err(|error| Refusal::of(&error))?;
    let (stream, theirs) = tokio::io::duplex(BUFFER);
    let (present, gone) = oneshot::channel();
    let ours = Held { stream, _present: present };
    tokio::spawn(carry(theirs, out, incoming, hold, gone));
    let (mut sender, connection) = http1::Builder::new()
        .preserve_header_case(true)
        .handshake(TokioIo::new(ours))
        .await
        .map_err(|_| Refusal::SILENT)?;
    tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(error = crate::error::chain(&error), "a published port broke off");
        }
    });
    let (request, upgrade) = outwards(app, &target, request);
    let response = sender.send_request(request).await.map_err(|_| Refusal::SILENT)?;
    Ok(inwards(app, &target, response, upgrade))
}

/// The request as the port gets it, and the client's side of an upgrade if it asks for one.
fn outwards(app: &App, target: &Target, mut request: Request) -> (Request, Option<OnUpgrade>) {
    let upgrades = request.headers().get(UPGRADE).cloned().filter(|_| {
        let connection = request.headers().get_all(CONNECTION).iter();
        connection
            .filter_map(|value| value.to_str().ok())
            .any(|value| value.split(',').any(|word| word.trim().eq_ignore_ascii_case("upgrade")))
    });
    let upgrade = upgrades.as_ref().map(|_| hyper::upgrade::on(&mut request));
    let peer = request.extensions().get::<Peer>().and_then(|peer| peer.0);
    let (mut parts, body) = request.into_parts();
    // Of the other side's HTTP/2 there is no header: the host is in the address.
    if !parts.headers.contains_key(HOST)
        && let Some(host) = parts.uri.authority()
        && let Ok(host) = HeaderValue::from_str(host.as_str())
    {
        parts.headers.insert(HOST, host);
    }
    strip(&mut parts.headers);
    // Answered by this server, which reads the body.
    parts.headers.remove(EXPECT);
    if let Some(protocol) = upgrades {
        parts.headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        parts.headers.insert(UPGRADE, protocol);
    }
    forwarded(&app.vercel, target, peer, &mut parts.headers);
    parts.uri = Uri::from(target.path.clone());
    parts.version = Version::HTTP_11;
    parts.extensions.clear();
    (Request::from_parts(parts, body), upgrade)
}

fn forwarded(settings: &Settings, target: &Target, peer: Option<IpAddr>, headers: &mut HeaderMap) {
    // What a client says of this is not true.
    for name in [FORWARDED, HeaderName::from_static("x-forwarded-prefix")] {
        headers.remove(name);
    }
    let secure = settings.public_url.as_ref().is_some_and(|url| url.starts_with("https:"));
    let scheme = HeaderValue::from_static(if secure { "https" } else { "http" });
    headers.insert("x-forwarded-proto", scheme);
    if let Some(host) = headers.get(HOST).cloned() {
        headers.insert("x-forwarded-host", host);
    }
    if let Some(prefix) = target.prefix.as_ref().and_then(|text| HeaderValue::from_str(text).ok()) {
        headers.insert("x-forwarded-prefix", prefix);
    }
    let Some(peer) = peer else { return };
    let before = headers.get("x-forwarded-for").and_then(|value| value.to_str().ok());
    let all = before.map_or_else(|| peer.to_string(), |before| format!("{before}, {peer}"));
    if let Ok(all) = HeaderValue::from_str(&all) {
        headers.insert("x-forwarded-for", all);
    }
}

/// The port's answer as the client gets it. An upgrade that both agreed on becomes a pipe.
fn inwards(
    app: &Arc<App>,
    target: &Target,
    mut response: hyper::Response<hyper::body::Incoming>,
    upgrade: Option<OnUpgrade>,
) -> Response {
    let switching = response.status() == StatusCode::SWITCHING_PROTOCOLS;
    let protocol = response.headers().get(UPGRADE).cloned();
    let port = switching.then(|| hyper::upgrade::on(&mut response));
    let (mut parts, body) = response.into_parts();
    strip(&mut parts.headers);
    if target.prefix.is_some() {
        keep_to_itself(&mut parts.headers);
    }
    parts.extensions.clear();
    parts.version = Version::HTTP_11;
    match (port, upgrade, protocol) {
        (None, _, _) => Response::from_parts(parts, Body::new(body)),
        (Some(port), Some(client), Some(protocol)) => {
            parts.headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
            parts.headers.insert(UPGRADE, protocol);
            let (app, alive) = (Arc::clone(app), app.alive.enter());
            tokio::spawn(async move {
                let _alive = alive;
                let mut closing = app.closing.subscribe();
                tokio::select! {
                    () = pipe(client, port) => {}
                    () = closed(&mut closing) => {}
                }
            });
            Response::from_parts(parts, Body::empty())
        }
        // Nobody asked for it.
        (Some(_), _, _) => Refusal::SILENT.page(None),
    }
}

async fn pipe(client: OnUpgrade, port: OnUpgrade) {
    if let (Ok(client), Ok(port)) = tokio::join!(client, port) {
        let (mut client, mut port) = (TokioIo::new(client), TokioIo::new(port));
        // Either side may leave as it likes.
        let _ = tokio::io::copy_bidirectional(&mut client, &mut port).await;
    }
}

/// Takes away what is about one connection only.
fn strip(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    let always = [
        CONNECTION,
        PROXY_AUTHENTICATE,
        PROXY_AUTHORIZATION,
        TE,
        TRAILER,
        TRANSFER_ENCODING,
        UPGRADE,
        HeaderName::from_static("keep-alive"),
        HeaderName::from_static("proxy-connection"),
    ];
    for name in named.into_iter().chain(always) {
        headers.remove(name);
    }
}

/// Takes away what would reach others on an origin that all sandboxes share.
fn keep_to_itself(headers: &mut HeaderMap) {
    for name in ["service-worker-allowed", "clear-site-data"] {
        headers.remove(name);
    }
}

/// Our end of a connection to a port, upgraded or not. The other end learns when it goes.
struct Held {
    stream: DuplexStream,
    _present: oneshot::Sender<()>,
}

impl AsyncRead for Held {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Held {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Carries bytes between a connection and the agent until both directions are done, or a little
/// longer than our end is there: a process that hangs does not see that it is gone.
async fn carry(
    stream: DuplexStream,
    mut out: Outgoing,
    mut incoming: Incoming,
    hold: Hold,
    gone: oneshot::Receiver<()>,
) {
    let _awake = hold;
    let (mut read, mut write) = tokio::io::split(stream);
    let to_port = async {
        loop {
            let mut buffer = bytes::BytesMut::with_capacity(16 << 10);
            if read.read_buf(&mut buffer).await? == 0 {
                break;
            }
            out.send(buffer.freeze()).await.map_err(io::Error::other)?;
        }
        out.end();
        Ok::<_, io::Error>(())
    };
    let from_port = async {
        while let Some(bytes) = incoming.next().await.map_err(io::Error::other)? {
            write.write_all(&bytes).await?;
        }
        write.shutdown().await
    };
    let left = async {
        let _ = gone.await;
        tokio::time::sleep(LINGER).await;
    };
    // An answer may be whole before the request is: then whoever waits for it hangs up.
    tokio::select! {
        carried = async { tokio::try_join!(to_port, from_port) } => if let Err(error) = carried {
            tracing::debug!(%error, "a published port's connection broke");
        },
        () = left => tracing::debug!("a published port does not hang up"),
    }
}

/// Why a request did not get to its port.
#[derive(Debug, Clone, Copy)]
struct Refusal {
    status: StatusCode,
    code: &'static str,
    title: &'static str,
    message: &'static str,
}

impl Refusal {
    const UNKNOWN: Self = Self {
        status: StatusCode::NOT_FOUND,
        code: "NOT_FOUND",
        title: "Nothing here",
        message: "No sandbox publishes a port under this name.",
    };
    const STOPPED: Self = Self {
        status: StatusCode::GONE,
        code: "SANDBOX_STOPPED",
        title: "The sandbox is stopped",
        message: "Resume the sandbox and start its server again.",
    };
    const NOT_LISTENING: Self = Self {
        status: StatusCode::BAD_GATEWAY,
        code: "SANDBOX_NOT_LISTENING",
        title: "Nothing listens",
        message: "The sandbox runs, and no process in it listens on this port.",
    };
    const SILENT: Self = Self {
        status: StatusCode::BAD_GATEWAY,
        code: "SANDBOX_NO_RESPONSE",
        title: "No answer",
        message: "The process that listens on this port did not answer in HTTP.",
    };
    const BROKEN: Self = Self {
        status: StatusCode::INTERNAL_SERVER_ERROR,
        code: "INTERNAL",
        title: "Something went wrong",
        message: "This server could not look after the request; its log says why.",
    };

    fn of(error: &Error) -> Self {
        match error {
            Error::NoSandbox(_) | Error::NoPort { .. } => Self::UNKNOWN,
            Error::NotRunning(_) | Error::SessionOver | Error::SessionEnded { .. } => Self::STOPPED,
            Error::Guest(GuestError::Lost) => Self::STOPPED,
            Error::Guest(GuestError::Refused { kind: Failure::Refused, .. }) => Self::NOT_LISTENING,
            error => {
                tracing::error!(error = crate::error::chain(error), "a published port failed");
                Self::BROKEN
            }
        }
    }

    fn page(self, accept: Option<&HeaderValue>) -> Response {
        let Self { status, code, title, message } = self;
        let accept = accept.and_then(|value| value.to_str().ok()).unwrap_or_default();
        let browser = accept.contains("text/html");
        let (kind, text) = if browser {
            let style =
                "font:16px system-ui,sans-serif;max-width:34em;margin:15vh auto;padding:0 1em";
            let page = format!(
                "<!doctype html><meta charset=utf-8><title>{title}</title><body style=\"{style}\">\
                 <h1>{title}</h1><p>{message}<p><code>{code}</code>"
            );
            ("text/html; charset=utf-8", page)
        } else {
            let error = json!({ "code": code, "message": format!("{title}. {message}") });
            ("application/json", json!({ "error": error }).to_string())
        };
        (status, [(CONTENT_TYPE, kind)], text).into_response()
    }
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderMap, HeaderValue, Uri};

    use super::{Settings, forwarded, keep_to_itself, parse, strip, subdomain, target};

    const TAIL: &str = "01k00000000000000000000000";

    fn host(value: &str) -> HeaderMap {
        HeaderMap::from_iter([(super::HOST, HeaderValue::from_str(value).unwrap())])
    }

    #[test]
    fn names_come_back_as_they_went() {
        let id = format!("sbx-{TAIL}").parse().unwrap();
        let sub = subdomain(&id, 3000);
        assert_eq!(sub, format!("sb-{TAIL}-3000"));
        assert!(sub.len() <= 63, "a label of a host name");
        assert_eq!(parse(&sub), Some((id, 3000)));
        for bad in ["", "sb-", "sb-x-1", &format!("sb-{TAIL}"), &format!("sb-{TAIL}-")] {
            assert_eq!(parse(bad), None, "{bad}");
        }
        for port in ["0", "080", "65536", "+80", "80-1", "\u{e9}"] {
            assert_eq!(parse(&format!("sb-{TAIL}-{port}")), None, "{port}");
        }
    }

    #[test]
    fn requests_find_their_port_by_host_and_by_path() {
        let sub = format!("sb-{TAIL}-3000");
        let by_host = |host_name: &str, path: &str| {
            target(&path.parse::<Uri>().unwrap(), &host(host_name)).flatten()
        };
        let found =
            by_host(&format!("{}.example.com:80", sub.to_uppercase()), "/v1/a%2Fb?c=1").unwrap();
        assert_eq!((found.path.as_str(), found.port), ("/v1/a%2Fb?c=1", 3000));
        for (path, rest) in [
            (format!("/_route/{sub}"), "/"),
            (format!("/_route/{sub}?x=1"), "/?x=1"),
            (format!("/_route/{sub}/a//b%2f..?x"), "/a//b%2f..?x"),
        ] {
            let found = by_host("localhost", &path).unwrap();
            assert_eq!(found.path.as_str(), rest, "{path}");
        }
        let uri = "/_route/other/x".parse::<Uri>().unwrap();
        assert_eq!(target(&uri, &host("localhost")), Some(None));
        for path in ["/v1/sandboxes", "/_router", "/"] {
            assert_eq!(target(&path.parse::<Uri>().unwrap(), &host("localhost:80")), None);
        }
    }

    #[test]
    fn the_address_of_a_port_is_one_that_clients_can_reach() {
        let settings = |url: Option<&str>, domain: Option<&str>| Settings {
            public_url: url.map(str::to_owned),
            domain: domain.map(str::to_owned),
            ..Settings::default()
        };
        for (url, domain, address) in [
            (None, None, "http://here:7777/_route/s"),
            (Some("https://keep.example.com/"), None, "https://keep.example.com/_route/s"),
            (None, Some("run.test"), "http://s.run.test:7777"),
            (Some("https://keep.example.com"), Some("run.test"), "https://s.run.test"),
        ] {
            assert_eq!(super::address(&settings(url, domain), Some("here:7777"), "s"), address);
        }
    }

    #[test]
    fn a_port_hears_from_this_server_how_it_was_reached() {
        let sub = format!("sb-{TAIL}-3000");
        for (uri, prefix) in
            [("/x".to_owned(), None), (format!("/_route/{sub}/x"), Some(format!("/_route/{sub}")))]
        {
            let mut headers = host(&format!("{sub}.run.test"));
            if prefix.is_some() {
                headers = host("here");
            }
            for name in ["forwarded", "x-forwarded-prefix", "x-forwarded-proto", "x-forwarded-host"]
            {
                headers.append(name, HeaderValue::from_static("forged"));
                headers.append(name, HeaderValue::from_static("forged"));
            }
            let target = target(&uri.parse::<Uri>().unwrap(), &headers).unwrap().unwrap();
            let peer = Some([10, 0, 0, 1].into());
            forwarded(&Settings::default(), &target, peer, &mut headers);
            assert!(!headers.values().any(|value| value == "forged"), "{headers:?}");
            let said = headers.get("x-forwarded-prefix").map(|value| value.to_str().unwrap());
            assert_eq!(said, prefix.as_deref());
        }
    }

    #[test]
    fn an_answer_does_not_reach_others_on_a_shared_origin() {
        let names = ["service-worker-allowed", "clear-site-data", "set-cookie"];
        let mut headers = HeaderMap::new();
        for name in names {
            headers.insert(name, HeaderValue::from_static("x"));
        }
        keep_to_itself(&mut headers);
        assert_eq!(headers.keys().map(|name| name.as_str()).collect::<Vec<_>>(), ["set-cookie"]);
    }

    #[test]
    fn what_is_about_one_connection_stays_on_it() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "close, X-Secret"),
            ("x-secret", "1"),
            ("keep-alive", "5"),
            ("transfer-encoding", "chunked"),
            ("te", "trailers"),
            ("upgrade", "h2c"),
            ("accept", "*/*"),
        ] {
            headers.insert(name, HeaderValue::from_static(value));
        }
        strip(&mut headers);
        assert_eq!(headers.keys().map(|name| name.as_str()).collect::<Vec<_>>(), ["accept"]);
    }
}
