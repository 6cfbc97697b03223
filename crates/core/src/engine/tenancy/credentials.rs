//! Finds keys and tokens of this server inside any other text.
//!
//! Both begin in a fixed way and have a length that is known from there, so they are found wherever
//! they stand (`Bearer<key>`, `bearer.<token>`, `foo<key>.bar`), in time linear in the text: what
//! follows a beginning is at most one key long, and the claims of a token end at the next dot.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use crate::engine::tenancy::Tenancy;
use crate::engine::tenancy::projects::KEY_PREFIX;
use crate::engine::tenancy::token::HEADER;

/// The length of 32 bytes in base64: of the random part of a key, and of a signature.
const ENCODED: usize = 43;
/// A part this long behind the prefix is taken for a key, although ours are longer.
const SHORTEST_KEY: usize = 32;
/// How many credentials a text is said to have at most.
const MOST: usize = 16;

impl Tenancy {
    /// The keys and tokens of this server in a text, valid or not any more, each once: they must
    /// not be sent elsewhere. Of more than 16, the first ones.
    pub(in crate::engine) fn credentials_in(&self, text: &str) -> Vec<String> {
        let ours = tokens(text).filter(|token| self.has_signed(token));
        let mut found: Vec<String> = Vec::new();
        for one in keys(text).chain(ours) {
            if found.len() == MOST {
                break;
            }
            if !found.iter().any(|known| known == one) {
                found.push(one.to_owned());
            }
        }
        found
    }
}

/// The parts of a text that have the form of a key.
fn keys(text: &str) -> impl Iterator<Item = &str> {
    text.match_indices(KEY_PREFIX).filter_map(|(at, _)| {
        let random = run(&text[at + KEY_PREFIX.len()..], ENCODED);
        (random >= SHORTEST_KEY).then(|| &text[at..at + KEY_PREFIX.len() + random])
    })
}

/// The parts of a text that have the form of a token.
fn tokens(text: &str) -> impl Iterator<Item = &str> {
    let header = URL_SAFE_NO_PAD.encode(HEADER) + ".";
    let starts: Vec<usize> = text.match_indices(&header).map(|(at, _)| at).collect();
    starts.into_iter().filter_map(move |at| {
        let claims = at + header.len();
        let dot = claims + run(&text[claims..], usize::MAX);
        let signature = text[dot..].strip_prefix('.')?;
        (run(signature, ENCODED) == ENCODED).then(|| &text[at..=dot + ENCODED])
    })
}

/// How many characters of base64 a text begins with, at most `most`.
fn run(text: &str, most: usize) -> usize {
    let base64 = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    text.bytes().take(most).take_while(base64).count()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::{HEADER, URL_SAFE_NO_PAD, keys, tokens};
    use base64::Engine as _;

    const KEY: &str = "skp_abcdefghijklmnopqrstuvwxyz0123456789-_ABCDE";

    fn token() -> String {
        let header = URL_SAFE_NO_PAD.encode(HEADER);
        format!("{header}.{}.{}", URL_SAFE_NO_PAD.encode("{}"), "s".repeat(43))
    }

    #[test]
    fn a_key_is_found_wherever_it_stands() {
        for (before, after) in [
            ("", ""),
            ("Bearer", ""),
            ("bearer.", ""),
            ("foo", ".bar"),
            ("skp_", "="),
            ("é", "xyz"),
        ] {
            let text = format!("{before}{KEY}{after}");
            assert!(keys(&text).any(|found| found == KEY), "{text}");
        }
        for text in ["skp_", "skp_short", "skp_0123456789abcdef0123456789ab", "SKP_abc", ""] {
            assert_eq!(keys(text).count(), 0, "{text}");
        }
    }

    #[test]
    fn a_token_is_found_wherever_it_stands() {
        let token = token();
        for (before, after) in [("", ""), ("Bearer", ""), ("bearer.", ".x"), ("foo", "bar")] {
            let text = format!("{before}{token}{after}");
            assert_eq!(tokens(&text).collect::<Vec<_>>(), [token.as_str()], "{text}");
        }
        let header = URL_SAFE_NO_PAD.encode(HEADER);
        for text in [header.as_str(), &token[..token.len() - 1], "a.b.c", "..", ""] {
            assert_eq!(tokens(text).count(), 0, "{text}");
        }
    }

    #[test]
    fn a_long_text_takes_no_longer_for_its_form() {
        let header = URL_SAFE_NO_PAD.encode(HEADER);
        let start = Instant::now();
        let dotted = format!("{header}.");
        for part in ["skp_", "skp_skp", header.as_str(), dotted.as_str(), "."] {
            let text = part.repeat((1 << 20) / part.len());
            let _ = (keys(&text).count(), tokens(&text).count());
        }
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    }
}
