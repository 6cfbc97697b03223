//! Brokered secrets in requests, and what of them comes back.
//!
//! A placeholder is looked for in header values (also inside `Authorization: Basic`) and, for secrets of which that is asked, in the query
//! and in the body. The value is encoded as its position requires: percent-encoded in a query or a form, escaped in JSON. A
//! body that is compressed is left alone.
//!
//! *What comes back.* A value that a host may have is taken out of everything that this host answers: on every connection, whether or not this
//! request had the value, with or without TLS, in the status line, headers, trailers, bodies of any type and WebSocket messages. The same
//! holds for headers that request rules set for this host. So a server that repeats what it is sent (an echo, an error message), or
//! that shows later what it was sent before, does not carry a value into the sandbox as it is. A value can only be found whole and as it is: so
//! while this is done answers are asked for uncompressed and whole (no `Range`), and one that is compressed or partial all the same is
//! refused. A value that a server changes (reverses, encrypts) is not found. That is why bodies are not the default: in a header a value is a credential
//! to most servers, in a body it is data, to be given back in any form.

use base64::Engine as _;
use base64::alphabet;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig, STANDARD};
use hyper::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderName,
    HeaderValue, IF_RANGE, RANGE, SEC_WEBSOCKET_EXTENSIONS,
};
use zeroize::Zeroizing;

use super::super::rules::Brokered;
use super::replace::{Pair, Replacements};
use crate::model::{SecretPlace, secret_forms};

/// Values shorter than this are not looked for in answers: they would be found where they are not.
const SHORTEST_MASKED: usize = 4;

/// How credentials that were set as headers look when a server sends them back.
const HIDDEN: u8 = b'*';

/// The secrets of one request, by where it goes.
#[derive(Debug, Default)]
pub(super) struct RequestSecrets {
    /// Those that the host may have.
    pub(super) given: Vec<Brokered>,
    /// Those that it may not: their placeholders are sent as they are.
    pub(super) withheld: Vec<Brokered>,
}

/// What was done to the head of a request.
#[derive(Debug, Default)]
pub(super) struct Put {
    /// What is to be taken out of the answer, and of later ones.
    pub(super) masks: Replacements,
    /// What is to be taken out of this answer only. A sandbox can write `Basic` credentials in any number of ways:
    /// what is kept of them must not outlive their request.
    pub(super) once: Replacements,
    /// What is worth telling.
    pub(super) notes: Vec<String>,
    /// The names of the secrets whose values were put in.
    pub(super) used: Vec<String>,
}

impl RequestSecrets {
    /// Puts values into headers and query.
    pub(super) fn put(&self, headers: &mut HeaderMap, query: &mut Option<String>) -> Put {
        let mut put = Put::default();
        for secret in &self.withheld {
            let swap = watch(secret);
            let found = |text: &[u8]| swap.whole(text).is_some();
            if headers.iter().any(|(name, value)| {
                found(value.as_bytes()) || in_basic(name, value, &swap).is_some()
            }) || query.as_ref().is_some_and(|query| found(query.as_bytes()))
            {
                put.notes.push(withheld(&secret.name));
            }
        }
        // Who sends more than one means no good; their base64 is left alone.
        let basic = sole_basic(headers);
        for secret in &self.given {
            let plain = placed(secret, secret.value.as_bytes());
            for (name, value) in headers.iter_mut() {
                let text = plain.whole(value.as_bytes());
                let inside = || basic.as_ref().and_then(|_| in_basic(name, value, &plain));
                let Some(text) = text.or_else(inside) else { continue };
                match HeaderValue::from_bytes(&text) {
                    Ok(mut text) => {
                        text.set_sensitive(true);
                        *value = text;
                        put.used.push(secret.name.clone());
                    }
                    Err(_) => {
                        put.notes.push(format!("the value of {} fits no header", secret.name));
                    }
                }
            }
            let encoded = placed(secret, percent_encoded(&secret.value).as_bytes());
            if let Some(text) = query.as_ref().and_then(|query| encoded.whole(query.as_bytes())) {
                if secret.places.contains(&SecretPlace::Query) {
                    *query = Some(String::from_utf8_lossy(&text).into_owned());
                    put.used.push(secret.name.clone());
                } else {
                    put.notes.push(not_here(&secret.name, "query"));
                }
            }
            put.masks.extend(&masks(secret));
        }
        put.used.dedup();
        if let (Some(before), Some(after)) = (basic, sole_basic(headers))
            && before != after
        {
            put.once.extend(&Pair::new(after.as_bytes(), before.as_bytes()).into_iter().collect());
        }
        put
    }

    /// The secrets that a request uses, or may use in its body.
    pub(super) fn used(
        &self,
        headers: &HeaderMap,
        query: Option<&String>,
        has_body: bool,
    ) -> Vec<String> {
        if self.given.is_empty() {
            return Vec::new();
        }
        let (mut headers, mut query) = (headers.clone(), query.cloned());
        let mut used = self.put(&mut headers, &mut query).used;
        if has_body && !is_encoded(&headers) {
            used.extend(self.given.iter().filter(|one| in_bodies(one)).map(|one| one.name.clone()));
        }
        used.sort();
        used.dedup();
        used
    }

    /// What is put into a body with these headers; nothing if it is to be left alone.
    pub(super) fn in_body(&self, headers: &HeaderMap) -> Replacements {
        if is_encoded(headers) {
            return Replacements::default();
        }
        let kind = essence(headers);
        let written = |secret: &Brokered| {
            if is_json(&kind) {
                placed(secret, json_escaped(&secret.value).as_bytes())
            } else if kind == "application/x-www-form-urlencoded" {
                placed(secret, percent_encoded(&secret.value).as_bytes())
            } else {
                placed(secret, secret.value.as_bytes())
            }
        };
        let mut swap = Replacements::default();
        let asked = self.given.iter().filter(|secret| in_bodies(secret));
        asked.for_each(|secret| swap.extend(&written(secret)));
        swap
    }

    /// What finds the placeholders in a body that stay in it, and changes nothing.
    pub(super) fn watched(&self, headers: &HeaderMap) -> Vec<(String, Replacements)> {
        if is_encoded(headers) {
            return Vec::new();
        }
        let withheld = self.withheld.iter().map(|secret| (withheld(&secret.name), watch(secret)));
        let not_asked = self.given.iter().filter(|secret| !in_bodies(secret));
        let not_asked = not_asked.map(|secret| (not_here(&secret.name, "body"), watch(secret)));
        withheld.chain(not_asked).collect()
    }
}

/// What hides a credential that was set as a header, where its name says that it is one. A set header may as well be
/// `accept: application/json`, whose value must stay readable in answers.
pub(super) fn hides(name: &HeaderName, value: &str) -> Replacements {
    const TELLING: [&str; 7] =
        ["auth", "cookie", "credential", "key", "password", "secret", "token"];
    if !TELLING.iter().any(|word| name.as_str().contains(word)) {
        return Replacements::default();
    }
    let parts = [value, value.rsplit(' ').next().unwrap_or(value)];
    let long = parts.into_iter().filter(|part| part.len() >= 2 * SHORTEST_MASKED);
    long.filter_map(|part| Pair::new(part.as_bytes(), &vec![HIDDEN; part.len()])).collect()
}

/// Asks for an answer in which values can be found: whole and as they are.
pub(super) fn ask_for_plain(headers: &mut HeaderMap) {
    headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    // Extensions of WebSocket compress messages.
    for name in [RANGE, IF_RANGE, SEC_WEBSOCKET_EXTENSIONS] {
        headers.remove(name);
    }
}

/// Whether an answer's body is text, in which a placeholder can be read. In others a value is covered, so that their length stays.
pub(super) fn is_text(headers: &HeaderMap) -> bool {
    let kind = essence(headers);
    kind.is_empty()
        || kind.starts_with("text/")
        || is_json(&kind)
        || ["xml", "javascript", "x-www-form-urlencoded", "yaml", "graphql"]
            .iter()
            .any(|word| kind.contains(word))
}

fn in_bodies(secret: &Brokered) -> bool {
    secret.places.contains(&SecretPlace::Body)
}

fn not_here(name: &str, part: &str) -> String {
    format!("placeholder of {name} left in the {part}: it is replaced in headers only")
}

fn withheld(name: &str) -> String {
    format!("placeholder of {name} left as it is")
}

fn placed(secret: &Brokered, value: &[u8]) -> Replacements {
    Pair::new(secret.placeholder.as_bytes(), value).into_iter().collect()
}

fn watch(secret: &Brokered) -> Replacements {
    placed(secret, secret.placeholder.as_bytes())
}

/// What takes a value out of answers.
pub(super) fn masks(secret: &Brokered) -> Replacements {
    let value = &secret.value;
    let forms = [value.clone(), json_escaped(value), percent_encoded(value)];
    let long = forms.iter().filter(|form| form.len() >= SHORTEST_MASKED);
    let mut masks: Replacements =
        long.filter_map(|form| Pair::new(form.as_bytes(), secret.placeholder.as_bytes())).collect();
    // No placeholder has these forms: they are covered. Base64 is one, from other `Basic`
    // credentials.
    for form in secret_forms(value) {
        Pair::new(&form, &vec![HIDDEN; form.len()]).into_iter().for_each(|pair| masks.add(pair));
    }
    masks
}

/// What follows `Basic`, if there is one `Authorization` and it is that.
fn sole_basic(headers: &HeaderMap) -> Option<Zeroizing<String>> {
    let mut all = headers.get_all(AUTHORIZATION).iter();
    let (Some(only), None) = (all.next(), all.next()) else { return None };
    token(only).map(|(_, token)| Zeroizing::new(token.to_owned()))
}

/// The scheme as it was written, and what follows it.
fn token(value: &HeaderValue) -> Option<(&str, &str)> {
    let (scheme, token) = value.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("basic").then(|| (scheme, token.trim()))
}

/// A header's value with values put in inside the base64 of `Basic` credentials.
fn in_basic(
    name: &HeaderName,
    value: &HeaderValue,
    swap: &Replacements,
) -> Option<Zeroizing<Vec<u8>>> {
    const LENIENT: GeneralPurpose = GeneralPurpose::new(
        &alphabet::STANDARD,
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
    );
    let (scheme, sent) = token(value).filter(|_| *name == AUTHORIZATION)?;
    let plain = swap.whole(&LENIENT.decode(sent).ok()?)?;
    let encoded = Zeroizing::new(STANDARD.encode(plain.as_slice()));
    Some(Zeroizing::new(format!("{scheme} {}", *encoded).into_bytes()))
}

/// Whether a body is compressed, or encoded in another way.
pub(super) fn is_encoded(headers: &HeaderMap) -> bool {
    headers.get_all(CONTENT_ENCODING).iter().any(|value| value != "identity" && !value.is_empty())
}

/// The media type, in lower case and without its parameters.
fn essence(headers: &HeaderMap) -> String {
    let kind = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase()
}

fn is_json(kind: &str) -> bool {
    kind.ends_with("json")
}

fn json_escaped(value: &str) -> Zeroizing<String> {
    let quoted = Zeroizing::new(serde_json::Value::from(value).to_string());
    Zeroizing::new(quoted[1..quoted.len() - 1].to_owned())
}

fn percent_encoded(value: &str) -> Zeroizing<String> {
    let mut encoded = Zeroizing::new(String::with_capacity(value.len() * 3));
    for byte in value.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    use hyper::HeaderMap;
    use hyper::header::{AUTHORIZATION, CONTENT_ENCODING, CONTENT_TYPE, HeaderName, HeaderValue};
    use zeroize::Zeroizing;

    use super::super::super::rules::Brokered;
    use super::{RequestSecrets, SecretPlace, hides};

    const PLACEHOLDER: &str = "skp_0123456789abcdef0123456789ab";

    fn secrets(value: &str) -> RequestSecrets {
        let secret = |name: &str, placeholder: &str| Brokered {
            name: name.to_owned(),
            placeholder: placeholder.to_owned(),
            value: Zeroizing::new(value.to_owned()),
            hosts: vec!["example.com".parse().unwrap()],
            places: [SecretPlace::Query, SecretPlace::Body].into(),
        };
        RequestSecrets {
            given: vec![secret("KEY", PLACEHOLDER)],
            withheld: vec![secret("OTHER", "skp_other_other_other_other_othe")],
        }
    }

    fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
        let pair = |(name, value): &(&str, &str)| {
            (name.parse::<HeaderName>().unwrap(), HeaderValue::from_str(value).unwrap())
        };
        pairs.iter().map(pair).collect()
    }

    #[test]
    fn headers_and_query_have_the_value() {
        let mut sent = headers(&[
            ("x-api-key", PLACEHOLDER),
            ("authorization", &format!("Bearer {PLACEHOLDER}")),
            ("x-other", "skp_other_other_other_other_othe"),
        ]);
        let mut query = Some(format!("key={PLACEHOLDER}&b=1"));
        let put = secrets("a b&c\"d").put(&mut sent, &mut query);
        assert_eq!(sent["x-api-key"], "a b&c\"d");
        assert!(sent["x-api-key"].is_sensitive());
        assert_eq!(sent["authorization"], "Bearer a b&c\"d");
        assert_eq!(query.unwrap(), "key=a%20b%26c%22d&b=1");
        assert_eq!(sent["x-other"], "skp_other_other_other_other_othe");
        assert_eq!(put.notes, ["placeholder of OTHER left as it is"]);
        for echo in ["a b&c\"d", "a b&c\\\"d", "a%20b%26c%22d"] {
            assert_eq!(
                put.masks.whole(echo.as_bytes()).unwrap().as_slice(),
                PLACEHOLDER.as_bytes()
            );
        }
    }

    #[test]
    fn without_being_asked_only_headers_have_the_value() {
        let mut secrets = secrets("hunter2hunter2");
        secrets.given[0].places.clear();
        let mut sent = headers(&[
            ("x-api-key", PLACEHOLDER),
            ("range", "bytes=0-3"),
            ("if-range", "\"x\""),
            ("accept-encoding", "gzip"),
        ]);
        let asked = format!("key={PLACEHOLDER}");
        let mut query = Some(asked.clone());
        let put = secrets.put(&mut sent, &mut query);
        assert_eq!(sent["x-api-key"], "hunter2hunter2");
        assert_eq!(query, Some(asked));
        assert_eq!(
            put.notes,
            ["placeholder of KEY left in the query: it is replaced in headers only"]
        );
        assert!(secrets.in_body(&headers(&[])).is_empty());
        let watched = secrets.watched(&headers(&[]));
        assert!(
            watched.iter().any(|(note, _)| note.contains("KEY left in the body")),
            "{watched:?}"
        );
        super::ask_for_plain(&mut sent);
        assert_eq!(sent["accept-encoding"], "identity");
        assert!(!sent.contains_key("range") && !sent.contains_key("if-range"));
        // Whether or not a request had the value, its answer must not.
        let put = secrets.put(&mut headers(&[]), &mut None);
        let echo = put.masks.whole(b"it is hunter2hunter2").unwrap();
        assert_eq!(echo.as_slice(), format!("it is {PLACEHOLDER}").as_bytes());
        let covered = put.masks.covered();
        assert!(covered.keeps_length());
        assert_eq!(covered.whole(b"\0hunter2hunter2\0").unwrap().as_slice(), b"\0**************\0");
    }

    #[test]
    fn basic_credentials_have_the_value_inside() {
        let token = STANDARD.encode(format!("user:{PLACEHOLDER}"));
        let mut sent = headers(&[("authorization", &format!("basic {token}"))]);
        let put = secrets("hunter2!").put(&mut sent, &mut None);
        let wanted = STANDARD.encode("user:hunter2!");
        assert_eq!(sent[AUTHORIZATION], format!("basic {wanted}"));
        assert_eq!(put.once.whole(wanted.as_bytes()).unwrap().as_slice(), token.as_bytes());
        let later = put.masks.whole(wanted.as_bytes()).unwrap();
        assert!(
            later.contains(&b'*') && !later.windows(8).any(|part| part == &wanted.as_bytes()[8..])
        );
        assert_eq!(put.masks.whole(b"hunter2!").unwrap().as_slice(), PLACEHOLDER.as_bytes());
    }

    #[test]
    fn two_secrets_in_basic_credentials_are_both_taken_out_again() {
        let mut both = secrets("first-value");
        both.given.push(Brokered {
            value: Zeroizing::new("second-value".to_owned()),
            ..both.withheld.remove(0)
        });
        let token =
            STANDARD.encode(format!("{PLACEHOLDER}:{}", "skp_other_other_other_other_othe"));
        let mut sent = headers(&[("authorization", &format!("Basic {token}"))]);
        let put = both.put(&mut sent, &mut None);
        let wanted = STANDARD.encode("first-value:second-value");
        assert_eq!(sent[AUTHORIZATION], format!("Basic {wanted}"));
        assert_eq!(put.once.whole(wanted.as_bytes()).unwrap().as_slice(), token.as_bytes());
    }

    #[test]
    fn of_many_basic_credentials_none_has_the_value() {
        let one =
            |user: &str| format!("Basic {}", STANDARD.encode(format!("{user}:{PLACEHOLDER}")));
        let mut sent = headers(&[]);
        for user in ["a", "b"] {
            sent.append(AUTHORIZATION, HeaderValue::from_str(&one(user)).unwrap());
        }
        let put = secrets("hunter2!").put(&mut sent, &mut None);
        let kept: Vec<_> = sent.get_all(AUTHORIZATION).iter().collect();
        assert_eq!(kept, [one("a").as_str(), one("b").as_str()]);
        assert!(put.once.is_empty());
    }

    #[test]
    fn a_value_that_fits_no_header_is_told_and_not_sent() {
        let mut sent = headers(&[("x-api-key", PLACEHOLDER)]);
        let put = secrets("two\nlines").put(&mut sent, &mut None);
        assert_eq!(sent["x-api-key"], PLACEHOLDER);
        assert_eq!(put.notes, ["the value of KEY fits no header"]);
    }

    #[test]
    fn what_holds_no_placeholder_is_left_alone() {
        let mut sent = headers(&[("accept-encoding", "gzip"), ("authorization", "Basic !!")]);
        let put = secrets("value").put(&mut sent, &mut Some("a=b".to_owned()));
        assert_eq!(sent["accept-encoding"], "gzip");
        assert!(put.notes.is_empty());
    }

    #[test]
    fn bodies_have_the_value_as_they_write_it() {
        let value = "a\"b c";
        for (kind, wanted) in [
            ("application/json; charset=utf-8", "a\\\"b c"),
            ("application/vnd.api+json", "a\\\"b c"),
            ("application/x-www-form-urlencoded", "a%22b%20c"),
            ("multipart/form-data; boundary=x", value),
            ("", value),
        ] {
            let mut head = headers(&[]);
            if !kind.is_empty() {
                head.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
            }
            let body = secrets(value).in_body(&head).whole(PLACEHOLDER.as_bytes()).unwrap();
            assert_eq!(body.as_slice(), wanted.as_bytes(), "{kind}");
            head.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
            assert!(secrets(value).in_body(&head).is_empty());
        }
    }

    #[test]
    fn credentials_that_were_set_are_hidden_and_other_headers_are_not() {
        let hidden = |name: &str, value: &str, text: &str| {
            let found = hides(&name.parse().unwrap(), value).whole(text.as_bytes());
            found.map(|text| String::from_utf8(text.to_vec()).unwrap())
        };
        assert_eq!(
            hidden("authorization", "Bearer abcdefgh", "is abcdefgh").unwrap(),
            "is ********"
        );
        assert_eq!(hidden("x-api-key", "abcdefgh", "<abcdefgh>").unwrap(), "<********>");
        assert_eq!(hidden("accept", "application/json", "application/json"), None);
    }
}
