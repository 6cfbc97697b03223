//! Keeps our credentials out of requests to ports, in whatever form they come.
//!
//! The owner of a server inside a sandbox could use a credential of ours that it is sent. So before
//! a request is forwarded, every word of every header and of the query is looked at: as it is,
//! percent-decoded, and, where it is base64, decoded. A value with a credential of ours in it is
//! not forwarded; other values, and other cookies in the same header, are. What the server inside
//! has as its own (a bearer of somebody else, a password) goes through unchanged.

use axum::http::header::{COOKIE, HeaderMap, HeaderValue};
use axum::http::uri::PathAndQuery;
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD};

/// Distinguishes our credentials from other words.
pub(super) struct Ours<F>(pub(super) F);

impl<F: Fn(&str) -> bool> Ours<F> {
    /// The credentials in a text, each once.
    pub(super) fn find(&self, text: &str) -> Vec<String> {
        let mut found = Vec::new();
        self.look(text, &mut found, 0);
        found
    }

    fn look(&self, text: &str, found: &mut Vec<String>, depth: usize) {
        let plain = decoded(text);
        for text in [Some(text), plain.as_deref()].into_iter().flatten() {
            for word in words(text) {
                if (self.0)(word) && !found.iter().any(|one| one == word) {
                    found.push(word.to_owned());
                }
            }
            // A password that is a key, as `Basic` writes it.
            for word in text.split(|c: char| !is_base64(c)).filter(|word| word.len() >= 24) {
                if depth == 0
                    && let Some(inner) = from_base64(word)
                {
                    self.look(&inner, found, depth + 1);
                }
            }
        }
    }

    /// Takes out of headers every value that has one in it.
    pub(super) fn strip(&self, headers: &mut HeaderMap) {
        let names: Vec<_> = headers.keys().cloned().collect();
        for name in names {
            let values: Vec<HeaderValue> = headers.get_all(&name).iter().cloned().collect();
            let clean: Vec<HeaderValue> = match name == COOKIE {
                true => values.iter().filter_map(|value| self.cookies(value)).collect(),
                false => values.iter().filter(|value| self.is_clean(value)).cloned().collect(),
            };
            if clean != values {
                headers.remove(&name);
                for value in clean {
                    headers.append(&name, value);
                }
            }
        }
    }

    fn is_clean(&self, value: &HeaderValue) -> bool {
        self.find(&String::from_utf8_lossy(value.as_bytes())).is_empty()
    }

    /// The cookies of a header that have none in them.
    fn cookies(&self, value: &HeaderValue) -> Option<HeaderValue> {
        if self.is_clean(value) {
            return Some(value.clone());
        }
        let text = String::from_utf8_lossy(value.as_bytes());
        let clean = text.split(';').filter(|pair| self.find(pair).is_empty()).map(str::trim);
        let left = clean.collect::<Vec<_>>().join("; ");
        HeaderValue::try_from(left).ok().filter(|left| !left.is_empty())
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

/// Keys and tokens are made of these, and nothing else.
fn words(text: &str) -> impl Iterator<Item = &str> {
    let part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    text.split(move |c| !part(c)).filter(|word| !word.is_empty())
}

fn is_base64(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '+' | '/' | '-' | '_')
}

fn from_base64(word: &str) -> Option<String> {
    let bytes = STANDARD_NO_PAD.decode(word).or_else(|_| URL_SAFE_NO_PAD.decode(word)).ok()?;
    String::from_utf8(bytes).ok()
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
    use axum::http::{HeaderMap, HeaderName, HeaderValue};
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;

    use super::Ours;

    const KEY: &str = "skp_abcdefghijklmnopqrstuvwxyz0123456789-_ABCD";

    fn left(said: &[(&str, &str)]) -> Vec<String> {
        let mut headers = HeaderMap::new();
        for (name, value) in said {
            let name: HeaderName = name.parse().expect("a name");
            headers.append(name, HeaderValue::from_str(value).expect("a value"));
        }
        Ours(|word: &str| word == KEY).strip(&mut headers);
        let text = |value: &HeaderValue| value.to_str().expect("text").to_owned();
        headers.iter().map(|(name, value)| format!("{name}: {}", text(value))).collect()
    }

    #[test]
    fn a_credential_does_not_go_on_in_any_form() {
        let bearer = format!("Bearer {KEY}");
        let basic = format!("Basic {}", STANDARD.encode(format!("user:{KEY}")));
        for value in [
            bearer.clone(),
            format!("bearer   {KEY}"),
            format!("Basic dXNlcjpwYXNz, Bearer {KEY}"),
            format!("Bearer {KEY}, Basic dXNlcjpwYXNz"),
            format!("Bearer {KEY} Bearer other"),
            format!("Digest token=\"{KEY}\""),
            KEY.to_owned(),
            KEY.replace('_', "%5F"),
            basic,
        ] {
            for name in
                ["authorization", "proxy-authorization", "x-api-key", "sec-websocket-protocol"]
            {
                assert!(left(&[(name, &value)]).is_empty(), "{name}: {value}");
            }
        }
        let others = "authorization: Basic dXNlcjpwYXNz";
        let two = [("authorization", "Basic dXNlcjpwYXNz"), ("authorization", bearer.as_str())];
        assert_eq!(left(&two), [others]);
        assert_eq!(left(&[two[1], two[0]]), [others]);
        let cookies = format!("a=1; mine={KEY}; b=2");
        assert_eq!(left(&[("cookie", &cookies)]), ["cookie: a=1; b=2"]);
    }

    #[test]
    fn what_is_not_ours_is_not_touched() {
        for said in ["Bearer skp_other", "Basic dXNlcjpwYXNz", "a, b;c=\"d\"", "%zz %", "%5F"] {
            assert_eq!(left(&[("authorization", said)]), [format!("authorization: {said}")]);
        }
    }

    #[test]
    fn parameters_with_a_credential_go_out_of_the_query() {
        let ours = Ours(|word: &str| word == KEY);
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
