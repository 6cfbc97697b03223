//! The forms in which the value of a secret appears when it is not printed as it is.

use base64::Engine as _;
use base64::alphabet::{STANDARD, URL_SAFE};
use base64::engine::GeneralPurpose;
use base64::engine::general_purpose::NO_PAD;
use zeroize::Zeroizing;

/// A value and the shapes it is searched for in, each once: as it is, with the line ends of a terminal, in
/// JSON, percent-encoded, and in base64 wherever it begins in the text that was encoded. Shapes
/// that are too short to be distinguished from other text are left out.
#[must_use]
pub fn secret_forms(value: &str) -> Vec<Zeroizing<Vec<u8>>> {
    let mut forms: Vec<Zeroizing<Vec<u8>>> = Vec::new();
    let mut add = |form: Vec<u8>| {
        let form = Zeroizing::new(form);
        if form.len() >= crate::model::SHORTEST_SECRET && !forms.contains(&form) {
            forms.push(form);
        }
    };
    add(value.as_bytes().to_vec());
    if value.contains('\n') {
        add(value.replace('\n', "\r\n").into_bytes());
    }
    if let Ok(json) = serde_json::to_string(value) {
        let json = Zeroizing::new(json);
        add(json[1..json.len() - 1].as_bytes().to_vec());
    }
    add(percent_encoded(value, false, b"0123456789ABCDEF"));
    add(percent_encoded(value, false, b"0123456789abcdef"));
    add(percent_encoded(value, true, b"0123456789ABCDEF"));
    for alphabet in [&STANDARD, &URL_SAFE] {
        for before in 0..3 {
            add(base64_inside(value.as_bytes(), before, &GeneralPurpose::new(alphabet, NO_PAD)));
        }
    }
    forms
}

fn percent_encoded(value: &str, plus: bool, digits: &[u8; 16]) -> Vec<u8> {
    let mut text = Vec::with_capacity(value.len());
    for byte in value.bytes() {
        match byte {
            b' ' if plus => text.push(b'+'),
            _ if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) => text.push(byte),
            _ => {
                text.extend([b'%', digits[usize::from(byte >> 4)], digits[usize::from(byte & 15)]]);
            }
        }
    }
    text
}

/// Those characters of base64 that follow from the value alone when `before` bytes, counted in threes,
/// stand in front of it and anything may stand behind.
fn base64_inside(value: &[u8], before: usize, engine: &GeneralPurpose) -> Vec<u8> {
    let mut bytes = Zeroizing::new(vec![0; before]);
    bytes.extend_from_slice(value);
    let text = Zeroizing::new(engine.encode(&*bytes));
    // A character holds six bits: those with bits of what stands before or behind are not ours.
    let first = (before * 8).div_ceil(6);
    let last = bytes.len() * 8 / 6;
    text.as_bytes()[first.min(last)..last].to_vec()
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};

    use super::secret_forms;

    fn found(value: &str, text: &str) -> bool {
        secret_forms(value)
            .iter()
            .any(|form| text.as_bytes().windows(form.len()).any(|window| window == form.as_slice()))
    }

    #[test]
    fn a_value_is_found_in_what_was_made_of_it() {
        for value in ["hunter2hunter2", "s3cr3t", "a/b+c?d=e&f g\"h\\i", "naïve ☃ pässword"] {
            for before in ["", "x", "xy", "xyz", "user:"] {
                for after in ["", "!", "!!", "!!!"] {
                    let text = format!("{before}{value}{after}");
                    assert!(found(value, &text));
                    assert!(found(value, &STANDARD.encode(&text)), "{text}");
                    assert!(found(value, &URL_SAFE_NO_PAD.encode(&text)), "{text}");
                }
            }
            assert!(found(value, &serde_json::to_string(value).unwrap()));
        }
        assert!(found("a b/c d", "q=a+b%2Fc+d&x=1"));
        assert!(found("a b/c d", "q=a%20b%2fc%20d"));
        assert!(found("one\ntwo\n", "one\r\ntwo\r\n"));
        assert!(!found("hunter2hunter2", "hunter2hunter"));
    }

    #[test]
    fn no_shape_is_there_twice() {
        let forms = secret_forms("plain1");
        assert_eq!(forms.iter().filter(|form| form.as_slice() == b"plain1").count(), 1);
    }
}
