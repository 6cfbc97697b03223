//! Rewrites the addresses and cookies in a port's answers for clients outside.
//!
//! A server that is reached under a path thinks that it has the whole origin. Where it sends clients
//! to, and for what paths it sets cookies, gets the path in front. Cookies never reach further than
//! the host they came from, nor may a port set the one that opens ports.

use axum::http::header::{CONTENT_LOCATION, HOST, HeaderMap, HeaderValue, LOCATION, SET_COOKIE};

use super::access::COOKIE;

/// What is needed to know the outside of a port.
#[derive(Debug, Clone)]
pub(super) struct Outside {
    prefix: Option<String>,
    host: Option<String>,
    port: u16,
}

impl Outside {
    pub(super) fn new(prefix: Option<String>, headers: &HeaderMap, port: u16) -> Self {
        let host = headers.get(HOST).and_then(|host| host.to_str().ok()).map(str::to_owned);
        Self { prefix, host, port }
    }

    /// Puts an answer's headers right.
    pub(super) fn rewrite(&self, headers: &mut HeaderMap) {
        if self.prefix.is_some() {
            for name in [LOCATION, CONTENT_LOCATION] {
                let said = headers.get(&name).and_then(|value| value.to_str().ok());
                let place = said.and_then(|said| self.place(said));
                if let Some(place) = place.and_then(|place| HeaderValue::try_from(place).ok()) {
                    headers.insert(name, place);
                }
            }
            // They would reach others on an origin that all sandboxes share.
            headers.remove("service-worker-allowed");
            headers.remove("clear-site-data");
        }
        let cookies: Vec<HeaderValue> = headers
            .get_all(SET_COOKIE)
            .iter()
            .filter_map(|cookie| match cookie.to_str() {
                Ok(text) => self.cookie(text).and_then(|text| HeaderValue::try_from(text).ok()),
                // What is no text has no attributes that could be read; it is not forwarded.
                Err(_) => None,
            })
            .collect();
        headers.remove(SET_COOKIE);
        for cookie in cookies {
            headers.append(SET_COOKIE, cookie);
        }
    }

    /// A place on the port as it is called outside, if that is another.
    fn place(&self, said: &str) -> Option<String> {
        let prefix = self.prefix.as_deref()?;
        let path = match said.split_once("://") {
            Some((scheme, rest)) if scheme == "http" || scheme == "https" => {
                let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
                let (authority, path) = rest.split_at(end);
                let inside = [("localhost", self.port), ("127.0.0.1", self.port)]
                    .iter()
                    .any(|(host, port)| authority == format!("{host}:{port}"));
                let here = self.host.as_deref() == Some(authority) || inside;
                here.then(|| match path.starts_with('/') {
                    true => path.to_owned(),
                    false => format!("/{path}"),
                })?
            }
            _ if said.starts_with('/') && !said.starts_with("//") => said.to_owned(),
            _ => return None,
        };
        // A server that knows its prefix adds it itself.
        let knows = path.strip_prefix(prefix).is_some_and(begins_anew);
        Some(if knows { path } else { format!("{prefix}{path}") })
    }

    /// A cookie as it is set outside; `None` for ours.
    fn cookie(&self, said: &str) -> Option<String> {
        let mut parts = said.split(';');
        let pair = parts.next().unwrap_or_default();
        if pair.split('=').next().is_some_and(|name| name.trim() == COOKIE) {
            return None;
        }
        let mut cookie = pair.to_owned();
        for part in parts {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let (name, value) = (name.trim(), value.trim());
            if name.eq_ignore_ascii_case("domain") {
                continue;
            }
            let path = name.eq_ignore_ascii_case("path") && value.starts_with('/');
            match &self.prefix {
                Some(prefix) if path && !value.strip_prefix(prefix).is_some_and(begins_anew) => {
                    let value = if value == "/" { "" } else { value };
                    cookie.push_str(&format!("; Path={prefix}{value}"));
                }
                _ => {
                    cookie.push(';');
                    cookie.push_str(part);
                }
            }
        }
        Some(cookie)
    }
}

fn begins_anew(rest: &str) -> bool {
    rest.is_empty() || rest.starts_with(['/', '?', '#'])
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderMap, HeaderValue};

    use super::Outside;

    fn outside(prefix: Option<&str>) -> Outside {
        Outside { prefix: prefix.map(str::to_owned), host: Some("here:77".to_owned()), port: 3000 }
    }

    fn passed(outside: &Outside, name: &'static str, value: &str) -> Vec<String> {
        let mut headers = HeaderMap::new();
        headers.insert(name, HeaderValue::from_str(value).unwrap());
        outside.rewrite(&mut headers);
        headers.get_all(name).iter().map(|value| value.to_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn places_lead_back_to_the_port() {
        let under = outside(Some("/_port/p/a/3000"));
        for (said, told) in [
            ("/", "/_port/p/a/3000/"),
            ("/login?next=/x", "/_port/p/a/3000/login?next=/x"),
            ("http://here:77/x", "/_port/p/a/3000/x"),
            ("https://here:77", "/_port/p/a/3000/"),
            ("http://localhost:3000/x", "/_port/p/a/3000/x"),
            ("/_port/p/a/3000/x", "/_port/p/a/3000/x"),
            ("/_port/p/a/30001/x", "/_port/p/a/3000/_port/p/a/30001/x"),
            ("x/y", "x/y"),
            ("//elsewhere/x", "//elsewhere/x"),
            ("https://elsewhere/x", "https://elsewhere/x"),
            ("http://localhost:4000/x", "http://localhost:4000/x"),
            ("mailto:a@b", "mailto:a@b"),
        ] {
            assert_eq!(passed(&under, "location", said), [told], "{said}");
            assert_eq!(passed(&outside(None), "location", said), [said], "it has the whole host");
        }
    }

    #[test]
    fn cookies_stay_where_they_came_from() {
        let under = outside(Some("/_port/p/a/3000"));
        for (said, there, on_host) in [
            ("a=b", "a=b", "a=b"),
            (
                "a=b; Path=/; HttpOnly",
                "a=b; Path=/_port/p/a/3000; HttpOnly",
                "a=b; Path=/; HttpOnly",
            ),
            ("a=b; path=/x;Secure", "a=b; Path=/_port/p/a/3000/x;Secure", "a=b; path=/x;Secure"),
            (
                "a=b; Path=/_port/p/a/3000/x",
                "a=b; Path=/_port/p/a/3000/x",
                "a=b; Path=/_port/p/a/3000/x",
            ),
            ("a=b; Domain=keep.test; Path=x", "a=b; Path=x", "a=b; Path=x"),
        ] {
            assert_eq!(passed(&under, "set-cookie", said), [there], "{said}");
            assert_eq!(passed(&outside(None), "set-cookie", said), [on_host], "{said}");
        }
        assert!(passed(&under, "set-cookie", "sandkeep_port=x; Path=/").is_empty());
        assert!(passed(&outside(None), "set-cookie", " sandkeep_port =x").is_empty());
    }

    #[test]
    fn an_answer_does_not_reach_others_on_a_shared_origin() {
        for name in ["service-worker-allowed", "clear-site-data"] {
            assert!(passed(&outside(Some("/_port/p/a/3000")), name, "x").is_empty());
            assert_eq!(passed(&outside(None), name, "x"), ["x"]);
        }
    }
}
