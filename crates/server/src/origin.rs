//! Refuses requests from web pages of other origins.
//!
//! A browser on the host can reach a server on loopback, and so can any page that is open in it. Two checks keep pages out:
//!
//! - *Host.* A page can point a name of its own at 127.0.0.1 (DNS rebinding); the browser then takes this server for the page's
//!   own. So what comes over loopback must be for a name that is known here: `localhost`, an address, or a name that the
//!   settings have, or one that begins with the id and port of a sandbox: that leads to the port, never to the API. Anything
//!   else is answered 421. An address cannot be rebound, and on other interfaces the name is the
//!   operator's affair.
//! - *Origin.* A browser says from where a request comes (`Sec-Fetch-Site`, `Origin`). For the API it must come from this
//!   server's own origin or one that the settings allow, or it is answered 403. Programs send neither.
//!
//! What ports serve is left to the servers inside, apart from the first check.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::{HOST, ORIGIN};
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::api::App;
use crate::error::ApiError;
use crate::listen::Peer;
use crate::{GatewaySettings, VercelSettings};

/// Which names and pages may reach the API, besides those that always may.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WebSettings {
    /// Names that this server is called by.
    pub hosts: Vec<String>,
    /// Origins whose pages may use the API, such as `https://console.example.com`.
    pub origins: Vec<String>,
}

/// The name by which a sandbox knows its host.
const FROM_SANDBOXES: &str = "host.sandkeep.internal";

impl WebSettings {
    /// The same with the names that other settings have.
    pub(crate) fn with(mut self, gateway: &GatewaySettings, vercel: &VercelSettings) -> Self {
        let urls = gateway.public_url.iter().chain(&vercel.public_url);
        let places = urls.filter_map(|url| url.split_once("://")).map(|(_, rest)| rest);
        let places = places.map(|rest| rest.split('/').next().unwrap_or_default());
        let domains = gateway.domain.iter().chain(&vercel.domain).map(String::as_str);
        let known: Vec<String> =
            places.chain(domains).map(|place| name_of(place).to_ascii_lowercase()).collect();
        self.hosts = self.hosts.iter().map(|host| name_of(host).to_ascii_lowercase()).collect();
        self.hosts.extend(known.into_iter().filter(|host| !host.is_empty()));
        self
    }

    /// Whether a `Host` is this server's.
    fn knows(&self, host: &str) -> bool {
        let name = name_of(host).trim_end_matches('.').to_ascii_lowercase();
        let bare = name.strip_prefix('[').and_then(|name| name.strip_suffix(']'));
        let below = |known: &String| {
            name.strip_suffix(known.as_str())
                .is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        };
        bare.unwrap_or(&name).parse::<IpAddr>().is_ok()
            || name == "localhost"
            || name.ends_with(".localhost")
            || name == FROM_SANDBOXES
            || self.hosts.iter().any(below)
            || crate::gateway::is_port_by_id(&name)
    }

    fn allows(&self, origin: &str) -> bool {
        self.origins.iter().any(|known| known == "*" || known.eq_ignore_ascii_case(origin))
    }
}

/// A host without its port.
fn name_of(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => host,
    }
}

/// Answers only to names that this server has, where a browser on this host may be asking.
pub(crate) async fn known_host(
    State(app): State<Arc<App>>,
    request: Request,
    next: Next,
) -> Response {
    let local = request.extensions().get::<Peer>().and_then(|peer| peer.0);
    if local.is_some_and(|peer| peer.to_canonical().is_loopback())
        && hosts(request.uri(), request.headers()).iter().any(|host| !app.web.knows(host))
    {
        return ApiError::new(
            StatusCode::MISDIRECTED_REQUEST,
            "unknown_host",
            "unknown host name",
        )
        .hint(
            "use localhost or an address, or list the name: `[api] hosts = [\"keep.example.com\"]`",
        )
        .into_response();
    }
    next.run(request).await
}

/// What a request says the server is called: both, if they differ.
fn hosts(uri: &Uri, headers: &HeaderMap) -> Vec<String> {
    let named = headers.get_all(HOST).iter();
    let named = named.map(|host| String::from_utf8_lossy(host.as_bytes()).into_owned());
    uri.authority().map(ToString::to_string).into_iter().chain(named).collect()
}

/// Keeps pages of other origins from the API.
pub(crate) async fn own_origin(
    State(app): State<Arc<App>>,
    request: Request,
    next: Next,
) -> Response {
    if may(&app.web, request.uri(), request.headers()) {
        return next.run(request).await;
    }
    ApiError::new(
        StatusCode::FORBIDDEN,
        "cross_origin",
        "pages of other origins may not use the API",
    )
    .hint("list the origin to allow it: `[api] origins = [\"https://console.example.com\"]`")
    .into_response()
}

fn may(web: &WebSettings, uri: &Uri, headers: &HeaderMap) -> bool {
    let text =
        |value: &axum::http::HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
    let origins: Vec<String> = headers.get_all(ORIGIN).iter().map(text).collect();
    if !origins.is_empty() && origins.iter().all(|origin| web.allows(origin)) {
        return true;
    }
    let sites: Vec<String> = headers.get_all("sec-fetch-site").iter().map(text).collect();
    if !sites.is_empty() {
        return sites.iter().all(|site| site == "same-origin" || site == "none");
    }
    let own = hosts(uri, headers);
    let is_own = |origin: &String| {
        let place = origin.split_once("://").map(|(_, place)| place);
        place.is_some_and(|place| own.iter().any(|host| host.eq_ignore_ascii_case(place)))
    };
    origins.iter().all(is_own)
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderMap, HeaderValue, Uri};

    use super::{WebSettings, may};
    use crate::{GatewaySettings, VercelSettings};

    #[test]
    fn a_name_is_known_or_it_is_not() {
        let gateway = GatewaySettings {
            domain: Some("keep.example.com:8443".to_owned()),
            public_url: Some("https://api.example.org/base".to_owned()),
            ..GatewaySettings::default()
        };
        let web = WebSettings { hosts: vec!["Box.lan".to_owned()], origins: Vec::new() };
        let web = web.with(&gateway, &VercelSettings::default());
        for known in [
            "localhost",
            "localhost:7777",
            "LOCALHOST",
            "127.0.0.1:7777",
            "[::1]:7777",
            "[::1]",
            "192.0.2.7",
            "keep.example.com",
            "3000-x.keep.example.com",
            "api.example.org",
            "box.lan:1",
            "app.localhost",
            "localhost.",
            "host.sandkeep.internal:7777",
        ] {
            assert!(web.knows(known), "{known}");
        }
        for unknown in [
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "xkeep.example.com",
            "",
            "example.com",
            "evil.example:7777",
            "127.0.0.1@evil.example",
        ] {
            assert!(!web.knows(unknown), "{unknown}");
        }
    }

    #[test]
    fn pages_of_other_origins_are_told_from_programs() {
        let web =
            WebSettings { hosts: Vec::new(), origins: vec!["https://console.test".to_owned()] };
        for (headers, allowed) in [
            (&[][..], true),
            (&[("sec-fetch-mode", "cors")][..], true),
            (&[("origin", "http://localhost:7777")], true),
            (&[("origin", "https://localhost:7777")], true),
            (&[("origin", "http://localhost:8888")], false),
            (&[("origin", "null")], false),
            (&[("origin", "https://evil.example")], false),
            (&[("origin", "https://console.test")], true),
            (&[("origin", "https://console.test"), ("sec-fetch-site", "cross-site")], true),
            (&[("origin", "https://console.test"), ("origin", "https://evil.example")], false),
            (&[("sec-fetch-site", "cross-site")], false),
            (&[("sec-fetch-site", "same-site")], false),
            (&[("sec-fetch-site", "same-origin")], true),
            (&[("sec-fetch-site", "none")], true),
        ] {
            let mut map = HeaderMap::new();
            map.insert("host", HeaderValue::from_static("localhost:7777"));
            for (name, value) in headers {
                map.append(*name, HeaderValue::from_static(value));
            }
            assert_eq!(may(&web, &Uri::from_static("/v1/whoami"), &map), allowed, "{headers:?}");
        }
    }
}
