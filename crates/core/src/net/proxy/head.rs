//! Heads of requests and answers: checks them, and strips what must not pass.

use hyper::header::{
    ALT_SVC, CONNECTION, CONTENT_LENGTH, COOKIE, EXPECT, HOST, HeaderMap, HeaderName, HeaderValue,
    PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRANSFER_ENCODING, UPGRADE,
};
use hyper::http::request::Parts;
use hyper::http::uri::{Authority, PathAndQuery};
use hyper::{Method, StatusCode, Uri, Version};

/// Why a request is refused before any rule is asked.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct BadHead {
    pub(super) status: StatusCode,
    pub(super) why: String,
}

fn unfit(status: StatusCode, why: impl Into<String>) -> BadHead {
    BadHead { status, why: why.into() }
}

/// Makes sure that a request is for the host that the connection was opened for, and can be read in one way only.
pub(super) fn check(parts: &Parts, name: &str, port: u16) -> Result<(), BadHead> {
    // The one would carry what cannot be judged, the other shows a sender the headers that were set
    // on the way.
    if parts.method == Method::CONNECT || parts.method == Method::TRACE {
        let why = format!("{} is not passed on", parts.method);
        return Err(unfit(StatusCode::METHOD_NOT_ALLOWED, why));
    }
    let mut hosts = parts.headers.get_all(HOST).iter();
    let host = hosts.next();
    if hosts.next().is_some() {
        return Err(unfit(StatusCode::BAD_REQUEST, "it names more than one host"));
    }
    let told = host.map(|host| {
        let text = host.to_str().ok().and_then(|text| text.parse::<Authority>().ok());
        text.ok_or_else(|| unfit(StatusCode::BAD_REQUEST, "its host is no name"))
    });
    let told = told.transpose()?;
    let mut all = told.iter().chain(parts.uri.authority()).peekable();
    if all.peek().is_none() {
        return Err(unfit(StatusCode::BAD_REQUEST, "it names no host"));
    }
    for other in all {
        let same = other.host().trim_end_matches('.').eq_ignore_ascii_case(name);
        if !same || other.port_u16().is_some_and(|other| other != port) {
            let why = format!("it is for {}, its connection for {name}:{port}", other.as_str());
            return Err(unfit(StatusCode::MISDIRECTED_REQUEST, why));
        }
    }
    Ok(())
}

/// The other protocol that a request asks for on its connection. Other forms of HTTP and TLS do not count: what they
/// would carry could not be judged, and a client must do without.
pub(super) fn upgrade(parts: &Parts) -> Option<HeaderValue> {
    let asked = parts.headers.get(UPGRADE).filter(|_| parts.version == Version::HTTP_11)?;
    let text = asked.to_str().ok()?.to_ascii_lowercase();
    let hidden = |protocol: &str| {
        ["h2", "http", "tls"].iter().any(|other| protocol.trim().starts_with(other))
    };
    let named = connection_options(&parts.headers).any(|option| option == "upgrade");
    (named && !text.split(',').any(hidden)).then(|| asked.clone())
}

/// Takes off what is for the next hop to say, of a request.
pub(super) fn strip_request(parts: &mut Parts) {
    // Calls over HTTP/2 that end in trailers need it.
    let trailers = parts.version == Version::HTTP_2
        && parts.headers.get(TE).is_some_and(|te| te == "trailers");
    strip(&mut parts.headers);
    parts.headers.remove(HOST);
    // Our side asks for the body when it needs it.
    parts.headers.remove(EXPECT);
    if parts.version == Version::HTTP_2 {
        join_cookies(&mut parts.headers);
    }
    if trailers {
        parts.headers.insert(TE, HeaderValue::from_static("trailers"));
    }
}

/// HTTP/2 may send cookies one by one, HTTP/1.1 may not.
fn join_cookies(headers: &mut HeaderMap) {
    let cookies: Vec<_> = headers.get_all(COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if cookies.len() > 1
        && let Ok(joined) = HeaderValue::from_bytes(&cookies.join(&b"; "[..]))
    {
        headers.insert(COOKIE, joined);
    }
}

/// Takes off what is for the next hop to say, of an answer.
pub(super) fn strip_answer(headers: &mut HeaderMap) {
    strip(headers);
    // It would lead to where requests cannot be judged.
    headers.remove(ALT_SVC);
}

fn strip(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = connection_options(headers)
        .filter_map(|option| option.parse().ok())
        .filter(|name| *name != CONTENT_LENGTH)
        .collect();
    for name in named {
        headers.remove(name);
    }
    if headers.contains_key(TRANSFER_ENCODING) {
        headers.remove(CONTENT_LENGTH);
    }
    for name in
        [CONNECTION, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRANSFER_ENCODING, UPGRADE]
    {
        headers.remove(name);
    }
    for name in ["keep-alive", "proxy-connection"] {
        headers.remove(name);
    }
}

fn connection_options(headers: &HeaderMap) -> impl Iterator<Item = String> {
    let values = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(|option| option.trim().to_ascii_lowercase())
}

/// Where a request goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) secure: bool,
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) path: String,
    pub(super) query: Option<String>,
}

impl Target {
    /// Where it was going.
    pub(super) fn own(secure: bool, host: &str, port: u16, uri: &Uri) -> Self {
        let path = match uri.path() {
            "" => "/",
            path => path,
        };
        Self {
            secure,
            host: host.to_owned(),
            port,
            path: path.to_owned(),
            query: uri.query().map(str::to_owned),
        }
    }

    /// Where a rule sends it: below the path of `url`, with the query of both.
    pub(super) fn forwarded(&self, url: &str) -> Option<Self> {
        let uri: Uri = url.parse().ok()?;
        let secure = match uri.scheme_str()? {
            "https" => true,
            "http" => false,
            _ => return None,
        };
        let query = match (uri.query(), self.query.as_deref()) {
            (Some(first), Some(second)) => Some(format!("{first}&{second}")),
            (first, second) => first.or(second).map(str::to_owned),
        };
        Some(Self {
            secure,
            host: uri.host()?.to_ascii_lowercase(),
            port: uri.port_u16().unwrap_or(if secure { 443 } else { 80 }),
            path: format!("{}{}", uri.path().trim_end_matches('/'), self.path),
            query,
        })
    }

    /// As a client dials it; with the port only if it is not the usual one.
    pub(super) fn uri(&self) -> Option<Uri> {
        let usual = if self.secure { 443 } else { 80 };
        let authority = match self.port {
            port if port == usual => self.host.clone(),
            port => format!("{}:{port}", self.host),
        };
        Uri::builder()
            .scheme(self.scheme())
            .authority(authority)
            .path_and_query(PathAndQuery::try_from(self.path_and_query()).ok()?)
            .build()
            .ok()
    }

    /// Adds where a request was going to the headers for the forwarding target; drops what the
    /// sandbox claims about that.
    pub(super) fn tell(&self, headers: &mut HeaderMap, prefix: Option<&str>) {
        let (prefix, scheme) = match prefix {
            Some(prefix) => (prefix, "scheme"),
            None => ("x-forwarded-", "proto"),
        };
        let told = [
            ("host", self.host.clone()),
            (scheme, self.scheme().to_owned()),
            ("port", self.port.to_string()),
            ("path", self.path_and_query()),
        ];
        for (name, value) in told {
            let name = format!("{prefix}{name}").parse::<HeaderName>();
            if let (Ok(name), Ok(value)) = (name, HeaderValue::from_str(&value)) {
                headers.insert(name, value);
            }
        }
    }

    fn scheme(&self) -> &'static str {
        if self.secure { "https" } else { "http" }
    }

    fn path_and_query(&self) -> String {
        match &self.query {
            Some(query) => format!("{}?{query}", self.path),
            None => self.path.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use hyper::http::request::Parts;
    use hyper::{HeaderMap, Request, StatusCode};

    use super::{Target, check, strip_request, upgrade};

    fn parts(method: &str, uri: &str, headers: &[(&str, &str)]) -> Parts {
        let mut request = Request::builder().method(method).uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    #[test]
    fn requests_are_for_the_host_of_their_connection() {
        let fits = |uri: &str, headers: &[(&str, &str)]| {
            check(&parts("GET", uri, headers), "a.example", 443).map_err(|unfit| unfit.status)
        };
        let misdirected = Err(StatusCode::MISDIRECTED_REQUEST);
        let bad = Err(StatusCode::BAD_REQUEST);
        for (uri, headers, wanted) in [
            ("/", &[("host", "a.example")][..], Ok(())),
            ("/", &[("host", "A.Example.:443")], Ok(())),
            ("https://a.example/", &[], Ok(())),
            ("/", &[("host", "b.example")], misdirected),
            ("/", &[("host", "a.example:80")], misdirected),
            ("http://b.example/", &[("host", "a.example")], misdirected),
            ("http://a.example/", &[("host", "b.example")], misdirected),
            ("/", &[], bad),
            ("/", &[("host", "a.example"), ("host", "a.example")], bad),
            ("/", &[("host", "a b")], bad),
        ] {
            assert_eq!(fits(uri, headers), wanted, "{uri} {headers:?}");
        }
        for method in ["CONNECT", "TRACE"] {
            let unfit = check(&parts(method, "a.example:443", &[]), "a.example", 443).unwrap_err();
            assert_eq!(unfit.status, StatusCode::METHOD_NOT_ALLOWED);
        }
    }

    #[test]
    fn what_is_for_one_hop_stays_on_it() {
        let mut sent = parts(
            "GET",
            "/",
            &[
                ("host", "a.example"),
                ("connection", "keep-alive, X-Mine"),
                ("x-mine", "1"),
                ("keep-alive", "5"),
                ("proxy-authorization", "Basic x"),
                ("te", "gzip"),
                ("expect", "100-continue"),
                ("accept", "*/*"),
            ],
        );
        strip_request(&mut sent);
        let names: Vec<_> = sent.headers.keys().map(hyper::header::HeaderName::as_str).collect();
        assert_eq!(names, ["accept"]);
    }

    #[test]
    fn cookies_of_http2_are_sent_together() {
        let mut sent = parts("GET", "https://a.example/", &[("cookie", "a=1"), ("cookie", "b=2")]);
        sent.version = hyper::Version::HTTP_2;
        strip_request(&mut sent);
        let cookies: Vec<_> = sent.headers.get_all("cookie").iter().collect();
        assert_eq!(cookies, ["a=1; b=2"]);
    }

    #[test]
    fn only_protocols_that_are_not_http_are_upgraded_to() {
        for (asked, connection, wanted) in [
            ("websocket", "Upgrade", true),
            ("WebSocket", "keep-alive, upgrade", true),
            ("websocket", "keep-alive", false),
            ("h2c", "upgrade", false),
            ("websocket, HTTP/2.0", "upgrade", false),
            ("TLS/1.2", "upgrade", false),
        ] {
            let sent = parts("GET", "/", &[("upgrade", asked), ("connection", connection)]);
            assert_eq!(upgrade(&sent).is_some(), wanted, "{asked} {connection}");
        }
    }

    #[test]
    fn forwarding_keeps_path_and_query() {
        let own = Target::own(true, "a.example", 8443, &"/v1/x?a=1".parse().unwrap());
        for (url, wanted) in [
            ("https://proxy.example", "https://proxy.example/v1/x?a=1"),
            ("http://proxy.example:8080/base/", "http://proxy.example:8080/base/v1/x?a=1"),
            ("https://proxy.example/b?k=2", "https://proxy.example/b/v1/x?k=2&a=1"),
        ] {
            let target = own.forwarded(url).unwrap();
            assert_eq!(target.uri().unwrap().to_string(), wanted);
        }
        assert_eq!(own.forwarded("ftp://proxy.example"), None);
        let mut headers = HeaderMap::new();
        own.tell(&mut headers, None);
        own.tell(&mut headers, Some("vercel-forwarded-"));
        assert_eq!(headers["x-forwarded-host"], "a.example");
        assert_eq!(headers["x-forwarded-proto"], "https");
        assert_eq!(headers["x-forwarded-port"], "8443");
        assert_eq!(headers["vercel-forwarded-scheme"], "https");
        assert_eq!(headers["vercel-forwarded-path"], "/v1/x?a=1");
    }
}
