//! Keeps our credentials out of requests to ports, in whatever form they come.
//!
//! The owner of a server inside a sandbox could use a credential of ours that it is sent. So before
//! a request is forwarded, every header, trailer and the query is searched: as it is,
//! percent-decoded, and, where it has base64, decoded. A credential is found wherever it stands
//! within a text. A value with one in it is not forwarded; of cookies and of the protocols that a
//! WebSocket offers, only those that have one are left out. What the server inside has as its own (a
//! bearer of somebody else, a password) goes through unchanged.

use axum::body::Body;
use axum::http::header::{COOKIE, HeaderMap, HeaderValue, SEC_WEBSOCKET_PROTOCOL};
use axum::http::uri::PathAndQuery;
use http_body_util::BodyExt as _;

/// Shorter runs of base64 hold no credential.
const SHORTEST_BASE64: usize = 48;

/// Finds our credentials in a text that is not encoded.
pub(super) struct Ours<F>(pub(super) F);

impl<F: Fn(&str) -> Vec<String>> Ours<F> {
    /// The credentials in a text, each once.
    pub(super) fn find(&self, text: &str) -> Vec<String> {
        let mut found = Vec::new();
        self.look(text, &mut found);
        // A password that is a key, as `Basic` writes it.
        for text in base64_in(text).chain(decoded(text).iter().flat_map(|text| base64_in(text))) {
            self.look(&text, &mut found);
        }
        found
    }

    fn look(&self, text: &str, found: &mut Vec<String>) {
        let plain = decoded(text);
        for text in [Some(text), plain.as_deref()].into_iter().flatten() {
            for one in (self.0)(text) {
                if !found.contains(&one) {
                    found.push(one);
                }
            }
        }
    }

    /// Takes out of headers, or trailers, all that has one in it.
    pub(super) fn strip(&self, headers: &mut HeaderMap) {
        let names: Vec<_> = headers.keys().cloned().collect();
        for name in names {
            let values: Vec<HeaderValue> = headers.get_all(&name).iter().cloned().collect();
            let cookies = (name == COOKIE).then_some(("; ", ';'));
            let listed = cookies.or((name == SEC_WEBSOCKET_PROTOCOL).then_some((", ", ',')));
            let clean = values.iter().filter_map(|value| self.clean(value, listed));
            let clean: Vec<HeaderValue> = clean.collect();
            if clean != values {
                headers.remove(&name);
                for value in clean {
                    headers.append(&name, value);
                }
            }
        }
    }

    /// A value without those elements of its list that have one in them; nothing if none is left,
    /// or if it is no list and has one.
    fn clean(&self, value: &HeaderValue, listed: Option<(&str, char)>) -> Option<HeaderValue> {
        let text = String::from_utf8_lossy(value.as_bytes());
        if self.find(&text).is_empty() {
            return Some(value.clone());
        }
        let (joint, separator) = listed?;
        let clean = text.split(separator).filter(|one| self.find(one).is_empty()).map(str::trim);
        let left = clean.collect::<Vec<_>>().join(joint);
        // Elements that are harmless alone could be parts of one that is not.
        let harmless = !left.is_empty() && self.find(&left).is_empty();
        harmless.then(|| HeaderValue::try_from(left).ok()).flatten()
    }

    /// A body that has none in its trailers.
    pub(super) fn strip_trailers(self, body: Body) -> Body
    where
        F: Send + 'static,
    {
        Body::new(body.map_frame(move |mut frame| {
            if let Some(trailers) = frame.trailers_mut() {
                self.strip(trailers);
            }
            frame
        }))
    }

    /// A path without the parameters that have one in them; `None` if it has none.
    pub(super) fn clean_query(&self, path: &PathAndQuery) -> Option<PathAndQuery> {
        let query = path.query()?;
        let clean: Vec<&str> = query.split('&').filter(|pair| self.find(pair).is_empty()).collect();
        if clean.len() == query.split('&').count() {
            return None;
        }
        let left = match clean.is_empty() {
            true => path.path().to_owned(),
            false => format!("{}?{}", path.path(), clean.join("&")),
        };
        left.parse().ok()
    }
}

/// What the base64 in a text says. Where it begins is not known (`Basic` may stand right before
/// it), so it is read from each of the four places that a group of four may begin at.
fn base64_in(text: &str) -> impl Iterator<Item = String> {
    let runs = text.as_bytes().split(|byte| sextet(*byte).is_none());
    let long = runs.filter(|run| run.len() >= SHORTEST_BASE64);
    long.flat_map(|run| (0..4).map(move |skipped| from_base64(&run[skipped..])))
}

fn from_base64(run: &[u8]) -> String {
    let mut bytes = Vec::with_capacity(run.len() / 4 * 3 + 3);
    for group in run.chunks(4) {
        let bits = group.iter().filter_map(|byte| sextet(*byte));
        let bits = bits.fold(0u32, |bits, six| bits << 6 | six) << (6 * (4 - group.len()));
        bytes.extend_from_slice(&bits.to_be_bytes()[1..group.len()]);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// What a character of base64 stands for, in either of its two alphabets.
fn sextet(byte: u8) -> Option<u32> {
    let six = match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' | b'-' => 62,
        b'/' | b'_' => 63,
        _ => return None,
    };
    Some(six.into())
}

/// What a text says with its `%xx`; `None` if it has none.
fn decoded(text: &str) -> Option<String> {
    if !text.contains('%') {
        return None;
    }
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, more)) = rest.split_first() {
        let hex = more.get(..2).and_then(|two| std::str::from_utf8(two).ok());
        match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) if *first == b'%' => {
                bytes.push(byte);
                rest = &more[2..];
            }
            _ => {
                bytes.push(*first);
                rest = more;
            }
        }
    }
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use axum::body::{Body, Bytes};
    use axum::http::{HeaderMap, HeaderName, HeaderValue};
    use base64::Engine as _;
    use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
    use http_body_util::{BodyExt as _, Full};

    use super::Ours;

    const KEY: &str = "skp_abcdefghijklmnopqrstuvwxyz0123456789-_ABCDE";

    fn ours() -> Ours<impl Fn(&str) -> Vec<String>> {
        Ours(|text: &str| text.match_indices(KEY).map(|(_, key)| key.to_owned()).collect())
    }

    fn left(said: &[(&str, &str)]) -> Vec<String> {
        let mut headers = HeaderMap::new();
        for (name, value) in said {
            let name: HeaderName = name.parse().expect("a name");
            headers.append(name, HeaderValue::from_str(value).expect("a value"));
        }
        ours().strip(&mut headers);
        let text = |value: &HeaderValue| value.to_str().expect("text").to_owned();
        headers.iter().map(|(name, value)| format!("{name}: {}", text(value))).collect()
    }

    #[test]
    fn a_credential_does_not_go_on_in_any_form() {
        let bearer = format!("Bearer {KEY}");
        let basic = STANDARD.encode(format!("user:{KEY}"));
        for value in [
            bearer.clone(),
            format!("bearer   {KEY}"),
            format!("Bearer{KEY}"),
            format!("bearer.{KEY}"),
            format!("foo{KEY}.bar"),
            format!("foo{KEY}bar"),
            format!("foo{}.bar", KEY.replace('_', "%5F")),
            format!("Basic dXNlcjpwYXNz, Bearer {KEY}"),
            format!("Bearer {KEY}, Basic dXNlcjpwYXNz"),
            format!("Bearer {KEY} Bearer other"),
            format!("Digest token=\"{KEY}\""),
            KEY.to_owned(),
            KEY.replace('_', "%5F"),
            format!("Basic {basic}"),
            format!("Basic{basic}"),
            format!("Basic {}", basic.replace('=', "%3D")),
            format!("Basic {}", STANDARD.encode(format!("u:x{KEY}"))),
            format!("Basic {}", STANDARD.encode(format!("{KEY}.x:"))),
            format!("Basic {}", STANDARD.encode([&b"\xff:"[..], KEY.as_bytes()].concat())),
            format!("Basic {}", STANDARD.encode(format!("u:{}", KEY.replace('_', "%5F")))),
            format!("bearer.{}", URL_SAFE_NO_PAD.encode(KEY)),
        ] {
            for name in ["authorization", "proxy-authorization", "x-api-key", "x-a", "referer"] {
                assert!(left(&[(name, &value)]).is_empty(), "{name}: {value}");
            }
        }
        let others = "authorization: Basic dXNlcjpwYXNz";
        let two = [("authorization", "Basic dXNlcjpwYXNz"), ("authorization", bearer.as_str())];
        assert_eq!(left(&two), [others]);
        assert_eq!(left(&[two[1], two[0]]), [others]);
        let cookies = format!("a=1; mine=x{KEY}; b=2");
        assert_eq!(left(&[("cookie", &cookies)]), ["cookie: a=1; b=2"]);
    }

    #[test]
    fn a_websocket_loses_only_the_protocols_that_have_a_credential() {
        let name = "sec-websocket-protocol";
        let encoded = URL_SAFE_NO_PAD.encode(KEY);
        for carries in [
            format!("bearer.{KEY}"),
            KEY.to_owned(),
            format!("base64url.bearer.authorization.{encoded}"),
        ] {
            for (offered, stays) in [
                (carries.clone(), vec![]),
                (format!("chat, {carries}"), vec!["chat"]),
                (format!("{carries},chat,  v2"), vec!["chat, v2"]),
            ] {
                let stays: Vec<_> = stays.iter().map(|left| format!("{name}: {left}")).collect();
                assert_eq!(left(&[(name, &offered)]), stays, "{offered}");
            }
            let lines = [(name, carries.as_str()), (name, "chat")];
            assert_eq!(left(&lines), [format!("{name}: chat")]);
        }
    }

    #[tokio::test]
    async fn trailers_do_not_carry_one_either() {
        let value = |text: &str| HeaderValue::from_str(text).expect("a value");
        let trailers = HeaderMap::from_iter(
            [("x-key", format!("x{KEY}")), ("x-sum", "1".to_owned())]
                .map(|(name, text)| (HeaderName::from_static(name), value(&text))),
        );
        let whole = Full::new(Bytes::from_static(b"whole"));
        let sent = whole.with_trailers(std::future::ready(Some(Ok(trailers))));
        let body = ours().strip_trailers(Body::new(sent)).collect().await.expect("a body");
        let left = body.trailers().cloned().expect("trailers");
        assert_eq!(left, HeaderMap::from_iter([(HeaderName::from_static("x-sum"), value("1"))]));
        assert_eq!(body.to_bytes(), "whole");
    }

    #[test]
    fn a_long_value_takes_no_longer_for_its_form() {
        let start = Instant::now();
        for part in ["a", "a,", "%5F", "skp_", "Basic ", "%"] {
            let value = part.repeat((256 << 10) / part.len());
            assert_eq!(left(&[("sec-websocket-protocol", &value)]).len(), 1, "{part}");
        }
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    }

    #[test]
    fn what_is_not_ours_is_not_touched() {
        for said in ["Bearer skp_other", "Basic dXNlcjpwYXNz", "a, b;c=\"d\"", "%zz %", "%5F"] {
            assert_eq!(left(&[("authorization", said)]), [format!("authorization: {said}")]);
        }
    }

    #[test]
    fn parameters_with_a_credential_go_out_of_the_query() {
        let ours = ours();
        let clean = |path: &str| {
            let path = path.parse().expect("a path");
            ours.clean_query(&path).map(|path| path.to_string())
        };
        assert_eq!(clean(&format!("/a?x=1&key={KEY}&y")), Some("/a?x=1&y".to_owned()));
        assert_eq!(
            clean(&format!("/a?keep%5Ftoken={}", KEY.replace('_', "%5f"))),
            Some("/a".to_owned())
        );
        assert_eq!((clean("/a?x=1"), clean("/a")), (None, None));
    }
}
