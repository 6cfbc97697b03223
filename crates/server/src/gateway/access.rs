//! Who may reach a port.
//!
//! A public port is open to everybody. A private one opens to a key of the project that may change
//! things, to an admin's, and to a token that was made for it: in `Authorization: Bearer`, in
//! `X-Sandkeep-Token`, or, tokens only, in the query as `keep_token`, which becomes a cookie and
//! goes out of the address at once. None of these reaches the server inside, whether they opened
//! anything or not.

use std::time::Instant;

use axum::http::header::{AUTHORIZATION, COOKIE as COOKIES, HeaderMap, HeaderValue, UPGRADE};
use axum::http::uri::PathAndQuery;
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use sandkeep_core::engine::PortPass;
use sandkeep_core::model::{Access, Port, Sandbox, Scope, Timestamp, now};

use super::address::Target;
use super::credentials::Ours;
use super::page::Refusal;
use crate::api::App;

/// The cookie that opens private ports.
pub(super) const COOKIE: &str = "sandkeep_port";
const HEADER: &str = "x-sandkeep-token";
const PARAMETER: &str = "keep_token";

/// What a request carried for us. It carries none of it any more.
#[derive(Debug, Default)]
pub(super) struct PresentedCredentials {
    /// Keys or tokens, from headers.
    shown: Vec<String>,
    in_query: Option<String>,
    in_cookie: Option<String>,
    asks_for_page: bool,
}

impl PresentedCredentials {
    /// Takes all that is ours out of a request.
    pub(super) fn take(
        app: &App,
        method: &Method,
        headers: &mut HeaderMap,
        target: &mut Target,
    ) -> Self {
        let mut carried = Self {
            asks_for_page: matches!(*method, Method::GET | Method::HEAD)
                && !headers.contains_key(UPGRADE),
            ..Self::default()
        };
        let text = |value: &HeaderValue| value.to_str().ok().map(str::to_owned);
        carried.shown.extend(headers.get_all(HEADER).iter().filter_map(text));
        headers.remove(HEADER);
        // The server inside may have keys of its own; only ours are kept from it.
        let ours = Ours(|text: &str| app.engine.credentials_in(text));
        for value in headers.get_all(AUTHORIZATION) {
            carried.shown.extend(bearer(value));
            carried.shown.extend(ours.find(&String::from_utf8_lossy(value.as_bytes())));
        }
        carried.in_cookie = take_cookie(headers);
        if let Some((path, token)) = take_parameter(&target.path) {
            target.path = path;
            carried.in_query = Some(token);
        }
        ours.strip(headers);
        if let Some(path) = ours.clean_query(&target.path) {
            target.path = path;
        }
        carried
    }

    /// Decides. `Ok(Some)` is an answer instead of the port's: the way without the token.
    pub(super) fn admit(
        &self,
        app: &App,
        sandbox: &Sandbox,
        port: &Port,
        target: &Target,
    ) -> Result<Option<Response>, Refusal> {
        if port.access == Access::Public {
            return Ok(None);
        }
        let mut ended = false;
        let mut opens = |token: &str| match app.engine.port_pass(token, sandbox, port.number) {
            PortPass::Opens(until) => Some(until),
            PortPass::Ended => {
                ended = true;
                None
            }
            PortPass::Unknown => None,
        };
        if let Some(token) = &self.in_query
            && let Some(until) = opens(token)
        {
            return Ok(self.asks_for_page.then(|| remember(app, target, token, until)));
        }
        let known = self.shown.iter().chain(&self.in_cookie).any(|token| opens(token).is_some());
        if known || self.shown.iter().any(|secret| key_opens(app, sandbox, secret)) {
            return Ok(None);
        }
        Err(if ended { Refusal::ENDED } else { Refusal::UNKNOWN })
    }
}

fn bearer(value: &HeaderValue) -> Option<String> {
    let (scheme, secret) = value.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| secret.trim().to_owned())
}

fn key_opens(app: &App, sandbox: &Sandbox, secret: &str) -> bool {
    app.engine.authenticate(secret).is_ok_and(|caller| {
        let own = caller.project == sandbox.project && caller.scope >= Scope::Write;
        let opens = (own || caller.scope == Scope::Admin)
            && app.rate.take(&caller.key, Instant::now()).is_ok();
        if opens {
            crate::audit::port_key(&caller.key);
        }
        opens
    })
}

/// Takes our cookie out of those that a request has.
fn take_cookie(headers: &mut HeaderMap) -> Option<String> {
    let mut ours = None;
    let mut others = Vec::new();
    let mut readable = true;
    for value in headers.get_all(COOKIES) {
        let Ok(text) = value.to_str() else {
            readable = false;
            continue;
        };
        for pair in text.split(';').map(str::trim).filter(|pair| !pair.is_empty()) {
            match pair.split_once('=') {
                Some((name, value)) if name.trim() == COOKIE => ours = Some(value.to_owned()),
                _ => others.push(pair.to_owned()),
            }
        }
    }
    if ours.is_some() || !readable || headers.get_all(COOKIES).iter().count() > 1 {
        headers.remove(COOKIES);
        if let Ok(value) = HeaderValue::try_from(others.join("; "))
            && !others.is_empty()
        {
            headers.insert(COOKIES, value);
        }
    }
    ours
}

/// Takes the token out of a query, if there is one.
fn take_parameter(path: &PathAndQuery) -> Option<(PathAndQuery, String)> {
    let query = path.query()?;
    let of_token = |pair: &&str| pair.split('=').next() == Some(PARAMETER);
    let token = query.split('&').find(of_token)?.split_once('=').map_or("", |(_, token)| token);
    let rest: Vec<&str> = query.split('&').filter(|pair| !of_token(pair)).collect();
    let path = match rest.is_empty() {
        true => path.path().to_owned(),
        false => format!("{}?{}", path.path(), rest.join("&")),
    };
    Some((path.parse().ok()?, token.to_owned()))
}

/// Sends a browser where it was, without the token in the address and with it in a cookie.
fn remember(app: &App, target: &Target, token: &str, until: Timestamp) -> Response {
    let prefix = target.prefix.as_deref().unwrap_or_default();
    let path = target.path.as_str();
    // Two slashes at the front would lead to another host.
    let place = match prefix.is_empty() && path.starts_with("//") {
        true => format!("/.{path}"),
        false => format!("{prefix}{path}"),
    };
    let scope = if prefix.is_empty() { "/" } else { prefix };
    let lasts = (until.as_second() - now().as_second()).max(0);
    let secure = if app.gateway.is_secure() { "; Secure" } else { "" };
    let cookie =
        format!("{COOKIE}={token}; Path={scope}; Max-Age={lasts}; HttpOnly; SameSite=Lax{secure}");
    let headers = [
        ("location", place),
        ("set-cookie", cookie),
        ("cache-control", "no-store".to_owned()),
        ("referrer-policy", "no-referrer".to_owned()),
    ];
    (StatusCode::SEE_OTHER, headers).into_response()
}

#[cfg(test)]
mod tests {
    use axum::http::header::COOKIE;
    use axum::http::{HeaderMap, HeaderValue};

    use super::{take_cookie, take_parameter};

    #[test]
    fn a_token_goes_out_of_the_query_and_the_rest_stays() {
        for (path, rest, token) in [
            ("/?keep_token=t", "/", "t"),
            ("/a?x=1&keep_token=t&y", "/a?x=1&y", "t"),
            ("/a?keep_token=t&keep_token=u", "/a", "t"),
            ("/a?keep_token", "/a", ""),
        ] {
            let (left, found) = take_parameter(&path.parse().unwrap()).unwrap();
            assert_eq!((left.as_str(), found.as_str()), (rest, token), "{path}");
        }
        for path in ["/", "/?x=keep_token", "/keep_token=t", "/?keep_tokens=t"] {
            assert_eq!(take_parameter(&path.parse().unwrap()), None, "{path}");
        }
    }

    #[test]
    fn our_cookie_is_taken_and_others_are_left() {
        for (said, ours, left) in [
            (vec!["a=1; sandkeep_port=t; b=2"], Some("t"), Some("a=1; b=2")),
            (vec!["sandkeep_port=t"], Some("t"), None),
            (vec!["a=1", "sandkeep_port=t", "b=2"], Some("t"), Some("a=1; b=2")),
            (vec!["a=1;b=2"], None, Some("a=1;b=2")),
            (vec![], None, None),
        ] {
            let mut headers = HeaderMap::new();
            for value in &said {
                headers.append(COOKIE, HeaderValue::from_static(value));
            }
            assert_eq!(take_cookie(&mut headers).as_deref(), ours, "{said:?}");
            let now = headers.get(COOKIE).map(|value| value.to_str().unwrap());
            assert_eq!(now, left, "{said:?}");
        }
    }
}
