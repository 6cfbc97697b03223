//! Any bytes as file names, as printable text, and back.

pub(super) use sandkeep_upper::path_text;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// A file name for any text: letters, digits, `_`, `-` and inner dots stay, other bytes become `%XX`,
/// and what would be too long ends in a hash.
pub(super) fn file_name_of(text: &str) -> String {
    let mut name = String::new();
    for (at, byte) in text.bytes().enumerate() {
        let plain = byte.is_ascii_alphanumeric() || b"_-".contains(&byte);
        if plain || (byte == b'.' && at > 0) {
            name.push(char::from(byte));
        } else {
            name.push_str(&format!("%{byte:02X}"));
        }
    }
    if name.len() > 200 {
        name.truncate(130);
        name.push('~');
        name.push_str(&hex::encode(super::manifest::document::sha256(text.as_bytes())));
    }
    name
}

/// Turns [`path_text`] back into bytes.
pub(super) fn path_bytes(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        if *first == b'%' {
            let digits = std::str::from_utf8(after.get(..2)?).ok()?;
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
            rest = &after[2..];
        } else {
            bytes.push(*first);
            rest = after;
        }
    }
    Some(bytes)
}

/// Bytes as a path.
pub(super) fn as_path(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::{file_name_of, path_bytes, path_text};

    #[test]
    fn names_of_images_are_safe_files() {
        assert_eq!(file_name_of("debian:12"), "debian%3A12");
        assert_eq!(file_name_of("../../etc/x"), "%2E.%2F..%2Fetc%2Fx");
        assert!(file_name_of(&"/".repeat(3000)).len() < 240);
        assert_ne!(file_name_of(&"/".repeat(3000)), file_name_of(&"/".repeat(3001)));
    }

    #[test]
    fn any_path_survives_as_text() {
        for path in [&b"a/b"[..], b"100%", b"\xff\xfe/\n\0x", "ä\u{7f}".as_bytes(), b""] {
            let text = path_text(path);
            assert!(!text.chars().any(char::is_control));
            assert_eq!(path_bytes(&text).as_deref(), Some(path), "{text}");
        }
    }
}
