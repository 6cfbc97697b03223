//! The certificate authority of one sandbox.
//!
//! It signs what the daemon shows a sandbox instead of the certificates of domains whose requests are looked at.
//! Each sandbox has its own, trusted inside that sandbox alone: a leaked key opens no other
//! sandbox's connections, and the key itself never enters a sandbox. Leaf certificates last a
//! month, share one key that lives as long as this value, and are made when a name is first asked
//! for.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::{Mutex, MutexGuard};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PublicKeyData,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{RootCertStore, ServerConfig};
use tokio::sync::Semaphore;
use zeroize::Zeroizing;

use super::super::sockets::SandboxSockets;

const DAY: Duration = Duration::from_secs(24 * 3600);
const AUTHORITY_LASTS: Duration = DAY.saturating_mul(3653);
const LEAF_LASTS: Duration = DAY.saturating_mul(30);
/// A leaf is made anew well before it ends: connections that began with it may last.
const LEAF_IS_USED: Duration = DAY.saturating_mul(15);
/// How many names have their leaf kept. Making one takes less than a millisecond.
const KEPT: usize = 256;
/// How many connections of one sandbox are opened at the same time.
const PLACES: usize = 512;
/// How many connections outward they have together.
const OUTWARD: usize = 256;
/// How many bodies of one sandbox are read whole at the same time. Others are sent without a
/// length.
const READ_WHOLE: usize = 16;
/// How long a common name may be.
const LONGEST_NAME: usize = 64;
const TITLE: &str = "Sandkeep authority of ";

/// Signs certificates that one sandbox trusts.
pub struct Authority {
    certificate: String,
    der: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
    leaf_key: KeyPair,
    leaves: Mutex<HashMap<String, Leaf>>,
    /// Taken by connections of the sandbox that are opened, one each.
    pub(super) places: Arc<Semaphore>,
    /// Taken by connections outward of those, one each: a sandbox must not use up the host's descriptors.
    pub(super) outward: Arc<Semaphore>,
    /// Those of all its flows.
    pub(in crate::net) sockets: SandboxSockets,
    /// Taken by bodies while they are read whole.
    pub(super) read_whole: Semaphore,
}

struct Leaf {
    config: Arc<ServerConfig>,
    made: Instant,
    used: Instant,
}

/// Why there is no authority, or no certificate by it.
#[derive(Debug, thiserror::Error)]
pub enum BadAuthority {
    /// What was kept is no certificate and key of an authority.
    #[error("the sandbox's certificate authority is damaged: {0}")]
    Damaged(&'static str),
    /// A certificate could not be made.
    #[error("could not make a certificate")]
    Make(#[from] rcgen::Error),
    /// TLS does not take the certificate.
    #[error("could not use a certificate")]
    Use(#[from] rustls::Error),
}

impl Authority {
    /// Makes one. Its name includes `sandbox`, for people who look at it.
    ///
    /// # Errors
    ///
    /// When the system gives no randomness.
    pub fn generate(sandbox: &str) -> Result<Self, BadAuthority> {
        let key = KeyPair::generate()?;
        let fits: String = sandbox.chars().filter(char::is_ascii_graphic).collect();
        let title = format!("{TITLE}{fits}");
        let params = authority_params(&title[..title.len().min(LONGEST_NAME)]);
        let certificate = params.self_signed(&key)?;
        let (pem, der) = (certificate.pem(), certificate.der().clone());
        Self::assemble(pem, der, Issuer::new(params, key))
    }

    /// Takes one up again.
    ///
    /// # Errors
    ///
    /// When these are not what [`to_pem`](Self::to_pem) returned.
    pub fn from_pem(certificate: &str, key: &str) -> Result<Self, BadAuthority> {
        let der = CertificateDer::from_pem_slice(certificate.as_bytes())
            .map_err(|_| BadAuthority::Damaged("no certificate"))?;
        let key = KeyPair::from_pem(key).map_err(|_| BadAuthority::Damaged("no key"))?;
        let mut anchors = RootCertStore::empty();
        anchors
            .add(der.clone())
            .map_err(|_| BadAuthority::Damaged("no authority's certificate"))?;
        let anchor = anchors.roots.first().ok_or(BadAuthority::Damaged("no certificate"))?;
        if !key.subject_public_key_info().ends_with(anchor.subject_public_key_info.as_ref()) {
            return Err(BadAuthority::Damaged("the key is another certificate's"));
        }
        let title = common_name(anchor.subject.as_ref()).ok_or(BadAuthority::Damaged("no name"))?;
        let params = authority_params(title);
        Self::assemble(certificate.to_owned(), der, Issuer::new(params, key))
    }

    fn assemble(
        certificate: String,
        der: CertificateDer<'static>,
        issuer: Issuer<'static, KeyPair>,
    ) -> Result<Self, BadAuthority> {
        let leaf_key = KeyPair::generate()?;
        let places = Arc::new(Semaphore::new(PLACES));
        Ok(Self {
            certificate,
            der,
            issuer,
            leaf_key,
            leaves: Mutex::default(),
            places,
            outward: Arc::new(Semaphore::new(OUTWARD)),
            sockets: SandboxSockets::new(),
            read_whole: Semaphore::new(READ_WHOLE),
        })
    }

    /// Its certificate and its key, to be kept. The key is the daemon's own: no sandbox may see it.
    #[must_use]
    pub fn to_pem(&self) -> (String, Zeroizing<String>) {
        (self.certificate.clone(), Zeroizing::new(self.issuer.key().serialize_pem()))
    }

    /// What the sandbox is to trust, in PEM.
    #[must_use]
    pub fn certificate(&self) -> &str {
        &self.certificate
    }

    /// The TLS configuration to answer as `name`.
    pub(super) fn server(&self, name: &str) -> Result<Arc<ServerConfig>, BadAuthority> {
        let now = Instant::now();
        if let Some(leaf) = self.leaves().get_mut(name)
            && now.duration_since(leaf.made) < LEAF_IS_USED
        {
            leaf.used = now;
            return Ok(Arc::clone(&leaf.config));
        }
        // Made without the lock: two concurrent callers make it twice, and none waits.
        let config = self.make(name)?;
        let mut leaves = self.leaves();
        if leaves.len() >= KEPT
            && let Some(oldest) =
                leaves.iter().min_by_key(|(_, leaf)| leaf.used).map(|(name, _)| name.clone())
        {
            leaves.remove(&oldest);
        }
        leaves.insert(name.to_owned(), Leaf { config: Arc::clone(&config), made: now, used: now });
        Ok(config)
    }

    fn make(&self, name: &str) -> Result<Arc<ServerConfig>, BadAuthority> {
        let mut params = CertificateParams::new([name.to_owned()])?;
        params.distinguished_name = rcgen::DistinguishedName::new();
        // Clients look at the alternative name. The common one is for people, and bounded.
        if name.len() <= LONGEST_NAME {
            params.distinguished_name.push(DnType::CommonName, name);
        }
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        lasts(&mut params, LEAF_LASTS);
        let leaf = params.signed_by(&self.leaf_key, &self.issuer)?;
        let key = PrivatePkcs8KeyDer::from(self.leaf_key.serialized_der().to_vec());
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(
                vec![leaf.der().clone(), self.der.clone()],
                PrivateKeyDer::Pkcs8(key),
            )?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }

    fn leaves(&self) -> MutexGuard<'_, HashMap<String, Leaf>> {
        self.leaves.lock()
    }
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Authority(..)")
    }
}

fn authority_params(title: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, title);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    lasts(&mut params, AUTHORITY_LASTS);
    params
}

/// Begins yesterday: the clocks of a sandbox's programs need not agree with ours.
fn lasts(params: &mut CertificateParams, length: Duration) {
    let now = SystemTime::now();
    params.not_before = (now - DAY).into();
    params.not_after = (now + length).into();
}

/// The common name, of a subject that [`authority_params`] made: one part, in UTF-8.
fn common_name(subject: &[u8]) -> Option<&str> {
    const COMMON_NAME: [u8; 5] = [0x06, 0x03, 0x55, 0x04, 0x03];
    // SET, SEQUENCE, OID, string: all short, so that every length is one byte.
    let [0x31, _, 0x30, _, rest @ ..] = subject else { return None };
    let [0x0c, length, text @ ..] = rest.strip_prefix(&COMMON_NAME)? else { return None };
    (usize::from(*length) == text.len()).then(|| str::from_utf8(text).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{Authority, BadAuthority, KEPT};

    #[test]
    fn what_is_kept_signs_for_the_same_certificate() {
        let made = Authority::generate("my-app").unwrap();
        let (certificate, key) = made.to_pem();
        let again = Authority::from_pem(&certificate, &key).unwrap();
        assert_eq!(again.certificate(), made.certificate());
        for authority in [&made, &again] {
            let config = authority.server("api.example.com").unwrap();
            assert_eq!(config.alpn_protocols, [b"h2".to_vec(), b"http/1.1".to_vec()]);
            assert!(Arc::ptr_eq(&config, &authority.server("api.example.com").unwrap()));
        }
        assert_eq!(made.issuer.key().serialized_der(), again.issuer.key().serialized_der());
    }

    #[test]
    fn names_of_any_kind_have_an_authority_that_is_read_again() {
        for name in ["", "ü", "a", &"long".repeat(60)] {
            let (certificate, key) = Authority::generate(name).unwrap().to_pem();
            Authority::from_pem(&certificate, &key).unwrap();
        }
    }

    #[test]
    fn what_is_damaged_is_refused() {
        let (certificate, key) = Authority::generate("a").unwrap().to_pem();
        let (other, _) = Authority::generate("a").unwrap().to_pem();
        for (certificate, key) in
            [("", key.as_str()), (&certificate, ""), (&other, &key), (&key, &certificate)]
        {
            let error = Authority::from_pem(certificate, key).unwrap_err();
            assert!(matches!(error, BadAuthority::Damaged(_)), "{error}");
        }
    }

    #[test]
    fn few_leaves_are_kept() {
        let authority = Authority::generate("a").unwrap();
        for index in 0..KEPT + 10 {
            authority.server(&format!("{index}.example.com")).unwrap();
            authority.server("often.example.com").unwrap();
        }
        assert_eq!(authority.leaves().len(), KEPT);
        assert!(authority.leaves().contains_key("often.example.com"));
    }
}
