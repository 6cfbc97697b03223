//! SHA-256 digests as text.

/// Writes a digest the way manifests do.
pub(super) fn text(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(bytes))
}

/// The 64 digits of a well-formed `sha256:` digest.
pub(super) fn digits(digest: &str) -> Option<&str> {
    let digits = digest.strip_prefix("sha256:")?;
    let plain = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    (digits.len() == 64 && digits.bytes().all(plain)).then_some(digits)
}
