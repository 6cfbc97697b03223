//! One HTTP exchange with a port.
//!
//! Each request gets a connection of its own to the port: HTTP/1.1, or HTTP/2 for gRPC, which knows
//! nothing else. Both sides speak HTTP through the same parser, which decides where a request ends;
//! what one side says about the connection itself is not forwarded to the other. Bodies and trailers
//! stream both ways, and an upgraded connection is a pipe.

use std::net::IpAddr;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::Request;
use axum::http::header::{
    CONNECTION, CONTENT_TYPE, EXPECT, FORWARDED, HOST, HeaderName, PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION, TE, TRANSFER_ENCODING, UPGRADE,
};
use axum::http::uri::{PathAndQuery, Scheme};
use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri, Version};
use axum::response::Response;
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use sandkeep_client::types::error_chain;
use sandkeep_core::engine::Connected;
use tokio_util::task::TaskTracker;

use super::credentials::Ours;
use super::page::Refusal;
use super::relay::{PortConnection, relayed};
use super::rewrite::Outside;
use super::{GatewaySettings, Target};
use crate::api::App;
use crate::listen::{Peer, TrackedTasks};

/// Passes a request on and its answer back.
pub(super) async fn exchange(
    app: &Arc<App>,
    target: &Target,
    connected: Connected,
    request: Request,
) -> Result<Response, Refusal> {
    let grpc = request.headers().get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let grpc = grpc.is_some_and(is_grpc);
    let (request, upgrade) = outwards(&app.gateway, target, request);
    let mut request = request.map(|body| {
        let app = Arc::clone(app);
        Ours(move |text: &str| app.engine.credentials_in(text)).strip_trailers(body)
    });
    let outside = Outside::new(target.prefix.clone(), request.headers(), target.port);
    let port = relayed(&app.tasks, connected);
    let response = match grpc {
        false => over_http1(&app.tasks, port, request).await,
        true => {
            to_http2(&mut request)?;
            over_http2(&app.tasks, port, request).await
        }
    };
    Ok(inwards(app, &outside, response?, upgrade))
}

/// Whether a content type is gRPC's own. gRPC-Web goes over HTTP/1.1 like everything else.
pub(super) fn is_grpc(kind: &str) -> bool {
    let kind = kind.trim().to_ascii_lowercase();
    kind.strip_prefix("application/grpc")
        .is_some_and(|rest| rest.is_empty() || rest.starts_with(['+', ';', ' ']))
}

async fn over_http1(
    tasks: &TaskTracker,
    port: PortConnection,
    request: Request,
) -> Result<hyper::Response<Incoming>, Refusal> {
    let (mut sender, connection) = http1::Builder::new()
        .preserve_header_case(true)
        .handshake(TokioIo::new(port))
        .await
        .map_err(|_| Refusal::SILENT)?;
    tasks.spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(error = error_chain(&error), "a published port broke off");
        }
    });
    sender.send_request(request).await.map_err(|_| Refusal::SILENT)
}

async fn over_http2(
    tasks: &TaskTracker,
    port: PortConnection,
    request: Request,
) -> Result<hyper::Response<Incoming>, Refusal> {
    let (mut sender, connection) = http2::Builder::new(TrackedTasks(tasks.clone()))
        .handshake(TokioIo::new(port))
        .await
        .map_err(|_| Refusal::SILENT)?;
    tasks.spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(error = error_chain(&error), "a published port broke off");
        }
    });
    // The stream continues when the sender has gone; the connection ends with it.
    sender.send_request(request).await.map_err(|_| Refusal::SILENT)
}

/// The request as a server of HTTP/2 wants it.
fn to_http2(request: &mut Request) -> Result<(), Refusal> {
    let host = request.headers_mut().remove(HOST);
    let host = host.as_ref().and_then(|host| host.to_str().ok()).unwrap_or("localhost");
    let path = request.uri().path_and_query().cloned();
    let uri = Uri::builder().scheme(Scheme::HTTP).authority(host);
    let uri = uri.path_and_query(path.unwrap_or_else(|| PathAndQuery::from_static("/")));
    *request.uri_mut() = uri.build().map_err(|_| Refusal::UNKNOWN)?;
    *request.version_mut() = Version::HTTP_2;
    request.headers_mut().remove(CONNECTION);
    request.headers_mut().remove(UPGRADE);
    Ok(())
}

/// The request as the port gets it, and the client's side of an upgrade if it asks for one.
fn outwards(
    settings: &GatewaySettings,
    target: &Target,
    mut request: Request,
) -> (Request, Option<OnUpgrade>) {
    let upgrades = request.headers().get(UPGRADE).cloned();
    let upgrades = upgrades.filter(|protocol| {
        // HTTP/2 in the clear would be a way around everything that is done to headers here.
        let plain = protocol.to_str().is_ok_and(|text| !text.to_ascii_lowercase().contains("h2c"));
        plain && says(request.headers(), &CONNECTION, "upgrade")
    });
    let trailers = says(request.headers(), &TE, "trailers");
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
    if trailers {
        parts.headers.insert(TE, HeaderValue::from_static("trailers"));
        parts.headers.insert(CONNECTION, HeaderValue::from_static("te"));
    }
    if let Some(protocol) = upgrades {
        parts.headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        parts.headers.insert(UPGRADE, protocol);
    }
    forwarded(settings, target, peer, &mut parts.headers);
    parts.uri = Uri::from(target.path.clone());
    parts.version = Version::HTTP_11;
    parts.extensions.clear();
    (Request::from_parts(parts, body), upgrade)
}

/// Whether a header that lists words has this one.
fn says(headers: &HeaderMap, name: &HeaderName, word: &str) -> bool {
    headers
        .get_all(name)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .any(|value| value.split(',').any(|said| said.trim().eq_ignore_ascii_case(word)))
}

fn forwarded(
    settings: &GatewaySettings,
    target: &Target,
    peer: Option<IpAddr>,
    headers: &mut HeaderMap,
) {
    // What a client says of this is not true.
    for name in [FORWARDED, HeaderName::from_static("x-forwarded-prefix")] {
        headers.remove(name);
    }
    let scheme = HeaderValue::from_static(if settings.is_secure() { "https" } else { "http" });
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
    outside: &Outside,
    mut response: hyper::Response<Incoming>,
    upgrade: Option<OnUpgrade>,
) -> Response {
    let switching = response.status() == StatusCode::SWITCHING_PROTOCOLS;
    let protocol = response.headers().get(UPGRADE).cloned();
    let port = switching.then(|| hyper::upgrade::on(&mut response));
    let (mut parts, body) = response.into_parts();
    strip(&mut parts.headers);
    outside.rewrite(&mut parts.headers);
    parts.extensions.clear();
    parts.version = Version::HTTP_11;
    match (port, upgrade, protocol) {
        (None, _, _) => Response::from_parts(parts, Body::new(body)),
        (Some(port), Some(client), Some(protocol)) => {
            parts.headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
            parts.headers.insert(UPGRADE, protocol);
            let closing = app.closing.clone();
            app.tasks.spawn(async move {
                tokio::select! {
                    () = pipe(client, port) => {}
                    () = closing.cancelled() => {}
                }
            });
            Response::from_parts(parts, Body::empty())
        }
        // It was not asked for.
        (Some(_), _, _) => Refusal::SILENT.page(super::page::PageFormat::Program),
    }
}

async fn pipe(client: OnUpgrade, port: OnUpgrade) {
    if let (Ok(client), Ok(port)) = tokio::join!(client, port) {
        let (mut client, mut port) = (TokioIo::new(client), TokioIo::new(port));
        // Either side may close the connection.
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
        TRANSFER_ENCODING,
        UPGRADE,
        HeaderName::from_static("http2-settings"),
        HeaderName::from_static("keep-alive"),
        HeaderName::from_static("proxy-connection"),
    ];
    for name in named.into_iter().chain(always) {
        headers.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::extract::Request;
    use axum::http::header::HOST;
    use axum::http::{HeaderMap, HeaderValue, Uri};

    use super::super::GatewaySettings;
    use super::super::address::{Target, target};
    use super::{forwarded, is_grpc, outwards, strip, to_http2};

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pair = |(name, value): &(&'static str, &'static str)| {
            (name.parse().unwrap(), HeaderValue::from_static(value))
        };
        pairs.iter().map(pair).collect()
    }

    fn found(uri: &str, host: &'static str) -> Target {
        let uri = uri.parse::<Uri>().unwrap();
        target(&GatewaySettings::default(), &uri, &headers(&[("host", host)])).unwrap().unwrap()
    }

    #[test]
    fn a_port_hears_from_this_server_how_it_was_reached() {
        for (uri, host, prefix) in
            [("/x", "80-a.localhost", None), ("/_port/p/a/80/x", "here", Some("/_port/p/a/80"))]
        {
            let mut headers = headers(&[("host", host)]);
            for name in ["forwarded", "x-forwarded-prefix", "x-forwarded-proto", "x-forwarded-host"]
            {
                headers.append(name, HeaderValue::from_static("forged"));
                headers.append(name, HeaderValue::from_static("forged"));
            }
            let peer = Some([10, 0, 0, 1].into());
            forwarded(&GatewaySettings::default(), &found(uri, host), peer, &mut headers);
            assert!(!headers.values().any(|value| value == "forged"), "{headers:?}");
            let said = headers.get("x-forwarded-prefix").map(|value| value.to_str().unwrap());
            assert_eq!(said, prefix);
        }
    }

    #[test]
    fn what_is_about_one_connection_stays_on_it() {
        let mut headers = headers(&[
            ("connection", "close, X-Secret"),
            ("x-secret", "1"),
            ("keep-alive", "5"),
            ("transfer-encoding", "chunked"),
            ("te", "trailers"),
            ("upgrade", "h2c"),
            ("http2-settings", "AAAA"),
            ("accept", "*/*"),
        ]);
        strip(&mut headers);
        assert_eq!(headers.keys().map(|name| name.as_str()).collect::<Vec<_>>(), ["accept"]);
    }

    #[test]
    fn nobody_upgrades_around_the_gateway() {
        for (protocol, connection, passed) in [
            ("websocket", "keep-alive, Upgrade", true),
            ("h2c", "Upgrade, HTTP2-Settings", false),
            ("websocket, H2C", "upgrade", false),
            ("websocket", "keep-alive", false),
        ] {
            let mut request = Request::new(Body::empty());
            *request.headers_mut() =
                headers(&[("host", "here"), ("upgrade", protocol), ("connection", connection)]);
            let target = found("/_port/p/a/80/", "here");
            let (request, upgrade) = outwards(&GatewaySettings::default(), &target, request);
            assert_eq!(request.headers().contains_key("upgrade"), passed, "{protocol}");
            assert_eq!(upgrade.is_some(), passed);
        }
    }

    #[test]
    fn grpc_is_told_from_the_rest() {
        for kind in ["application/grpc", "Application/gRPC+proto", "application/grpc; x=y"] {
            assert!(is_grpc(kind), "{kind}");
        }
        for kind in ["application/grpc-web", "application/grpcx", "application/json", ""] {
            assert!(!is_grpc(kind), "{kind}");
        }
        let mut request = Request::new(Body::empty());
        *request.headers_mut() = headers(&[("host", "a.test:1"), ("connection", "te")]);
        *request.uri_mut() = "/pkg.S/M".parse().unwrap();
        to_http2(&mut request).unwrap();
        assert_eq!(request.uri().to_string(), "http://a.test:1/pkg.S/M");
        assert!(request.headers().get(HOST).is_none());
    }
}
