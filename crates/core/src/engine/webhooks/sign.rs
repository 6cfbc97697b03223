//! The signature of a delivery: `docs/formats/webhooks.md`.

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;
use zeroize::Zeroizing;

/// The value of `Sandkeep-Signature`: one signature for each secret.
pub(super) fn signature(secrets: &[Zeroizing<Vec<u8>>], timestamp: i64, body: &[u8]) -> String {
    let one = |secret: &Zeroizing<Vec<u8>>| {
        let mut mac = Hmac::<Sha256>::new_from_slice(secret).expect("any length is a key");
        mac.update(timestamp.to_string().as_bytes());
        mac.update(b".");
        mac.update(body);
        format!("v1={}", hex::encode(mac.finalize().into_bytes()))
    };
    secrets.iter().map(one).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use zeroize::Zeroizing;

    use super::signature;

    #[test]
    fn the_signature_is_the_one_of_the_documentation() {
        let secrets = [Zeroizing::new(b"whsec_test".to_vec())];
        let signed = signature(&secrets, 1_767_225_600, br#"{"kind":"webhook.test"}"#);
        let vector = "77bb3936d811865705d62709c192c6045a82ea1bcb93066e736725971fe6b9e1";
        assert_eq!(signed, format!("v1={vector}"));
        let text = include_str!("../../../../../docs/formats/webhooks.md");
        assert!(text.contains(&signed), "the test vector of the documentation");
    }

    #[test]
    fn two_secrets_make_two_signatures_and_every_part_counts() {
        let secret = |text: &str| Zeroizing::new(text.as_bytes().to_vec());
        let both = signature(&[secret("new"), secret("old")], 7, b"x");
        let (new, old) = both.split_once(", ").unwrap();
        assert_eq!(new, signature(&[secret("new")], 7, b"x"));
        assert_eq!(old, signature(&[secret("old")], 7, b"x"));
        assert_ne!(new, signature(&[secret("new")], 8, b"x"));
        assert_ne!(new, signature(&[secret("new")], 7, b"y"));
    }
}
