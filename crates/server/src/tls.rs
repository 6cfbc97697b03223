//! TLS on the TCP listeners: certificate and key from files, loaded again when they change.
//!
//! ```text
//! listener ──> plaintext? answer 400 ──> handshake with the certificate of this moment ──> HTTP/1.1 or HTTP/2 by ALPN
//!                                                   ▲
//! files on disk ── changed, and stable for one look ──┘   bad files: the former certificate stays
//! ```
//!
//! Open connections keep the certificate they began with; nothing is closed for a new one. Files that cannot be used are
//! logged once, and named by [`Tls::problem`] until they are good again. A handshake happens in the connection's own task, on
//! its place among the connections, within the time that a first request may take.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use parking_lot::{Mutex, RwLock};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use sandkeep_client::types::error_chain;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::connections::{Counted, Slot};

/// How often the files are looked at.
const LOOK: Duration = Duration::from_secs(1);
/// How long before its end a certificate is reported as a problem.
const ENDS_SOON: Duration = Duration::from_secs(7 * 24 * 3600);
/// How much of a request in plain text is read before it is answered.
const HEAD: usize = 8 << 10;

/// Where the certificate and its key are, in PEM form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate, followed by those of the CAs between it and the root.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// Why certificate and key cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot read `{path}`", path = path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The certificate file holds none.
    #[error("`{path}` holds no certificate in PEM form", path = path.display())]
    NoCertificate {
        /// Which.
        path: PathBuf,
    },
    /// The key file holds none.
    #[error("`{path}` holds no private key in PEM form", path = path.display())]
    NoKey {
        /// Which.
        path: PathBuf,
    },
    /// The certificate cannot be parsed.
    #[error("the certificate in `{path}` is damaged", path = path.display())]
    Damaged {
        /// Which.
        path: PathBuf,
    },
    /// The certificate has ended.
    #[error("the certificate in `{path}` expired at {at}", path = path.display())]
    Expired {
        /// Which.
        path: PathBuf,
        /// When.
        at: Timestamp,
    },
    /// The key is another certificate's, or of a kind that is not supported.
    #[error("`{certificate}` and `{key}` cannot be used together", certificate = certificate.display(), key = key.display())]
    Unfit {
        /// The certificate.
        certificate: PathBuf,
        /// The key.
        key: PathBuf,
        /// Why.
        source: rustls::Error,
    },
}

/// The certificate that new connections get.
#[derive(Debug)]
struct Certificate(RwLock<Arc<CertifiedKey>>);

impl ResolvesServerCert for Certificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0.read()))
    }
}

/// TLS with the certificate of this moment.
pub(crate) struct Tls {
    files: TlsFiles,
    acceptor: TlsAcceptor,
    certificate: Arc<Certificate>,
    state: Mutex<TlsState>,
}

struct TlsState {
    /// What was loaded, or refused, last.
    seen: Option<Fingerprint>,
    /// When the certificate in use ends.
    ends: Timestamp,
    /// Why the files on disk are not the ones in use.
    refused: Option<String>,
}

/// What changes when files are replaced: device, inode, size, and both times of each.
type Fingerprint = [(u64, u64, u64, i64, i64, i64, i64); 2];

struct Loaded {
    key: CertifiedKey,
    ends: Timestamp,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").field("files", &self.files).finish_non_exhaustive()
    }
}

impl Tls {
    /// Loads the files. A certificate that has expired is used all the same: a server that does not
    /// start is no better.
    pub(crate) fn load(files: TlsFiles) -> Result<Arc<Self>, TlsError> {
        let seen = fingerprint(&files).ok();
        let loaded = read(&files)?;
        let ends = loaded.ends;
        let certificate = Arc::new(Certificate(RwLock::new(Arc::new(loaded.key))));
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let unfit = |source| TlsError::Unfit {
            certificate: files.certificate.clone(),
            key: files.key.clone(),
            source,
        };
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(unfit)?
            .with_no_client_auth()
            .with_cert_resolver(Arc::clone(&certificate) as Arc<dyn ResolvesServerCert>);
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let state = Mutex::new(TlsState { seen, ends, refused: None });
        let tls = Self { files, acceptor, certificate, state };
        if let Some(problem) = tls.problem() {
            tracing::error!(problem, "the TLS certificate needs attention");
        }
        Ok(Arc::new(tls))
    }

    /// Loads the files again whenever they change. Runs until it is dropped.
    pub(crate) async fn watch(self: Arc<Self>) {
        let mut before = self.state.lock().seen;
        loop {
            tokio::time::sleep(LOOK).await;
            let tls = Arc::clone(&self);
            // A file that is being written is read when it has stayed the same from one look to the next.
            let looked = tokio::task::spawn_blocking(move || {
                let now = fingerprint(&tls.files).ok();
                if now == before && now != tls.state.lock().seen {
                    tls.reload(now);
                }
                now
            });
            if let Ok(now) = looked.await {
                before = now;
            }
        }
    }

    fn reload(&self, seen: Option<Fingerprint>) {
        let loaded = read(&self.files).and_then(|loaded| {
            let ended = loaded.ends <= Timestamp::now();
            let expired =
                || TlsError::Expired { path: self.files.certificate.clone(), at: loaded.ends };
            if ended { Err(expired()) } else { Ok(loaded) }
        });
        let mut state = self.state.lock();
        state.seen = seen;
        match loaded {
            Ok(Loaded { key, ends }) => {
                *self.certificate.0.write() = Arc::new(key);
                state.ends = ends;
                state.refused = None;
                tracing::info!(expires = %ends, "loaded the new TLS certificate");
            }
            Err(error) => {
                let error = error_chain(&error);
                tracing::error!(
                    error,
                    "cannot use the new TLS certificate and key; continuing with the former ones"
                );
                state.refused = Some(error);
            }
        }
    }

    /// When the certificate in use ends.
    pub(crate) fn ends(&self) -> Timestamp {
        self.state.lock().ends
    }

    /// What an operator must do something about.
    pub(crate) fn problem(&self) -> Option<String> {
        let state = self.state.lock();
        if let Some(refused) = &state.refused {
            return Some(format!("the new certificate is not in use: {refused}"));
        }
        let now = Timestamp::now();
        if state.ends <= now {
            return Some(format!("the certificate expired at {}", state.ends));
        }
        let soon = state.ends.duration_since(now) <= ENDS_SOON.try_into().unwrap_or_default();
        soon.then(|| format!("the certificate expires at {}", state.ends))
    }

    /// Makes a connection a TLS connection. `Ok(None)` if it spoke HTTP in plain text and was
    /// answered.
    pub(crate) async fn accept(
        &self,
        mut stream: TcpStream,
        slot: Arc<Slot>,
    ) -> io::Result<Option<TlsStream<Counted<TcpStream>>>> {
        let mut first = [0];
        if stream.peek(&mut first).await? == 1 && first[0].is_ascii_uppercase() {
            return tell_plain(&mut stream).await.map(|()| None);
        }
        self.acceptor.accept(Counted::new(stream, slot)).await.map(Some)
    }
}

/// Answers a request in plain text. Its key has crossed the network already, so it says that, too.
async fn tell_plain(stream: &mut TcpStream) -> io::Result<()> {
    const BODY: &str = r#"{"error":{"code":"tls_required","message":"this server speaks HTTPS on this address","hint":"use https:// instead of http://; a key that was sent without TLS may have been read: replace it"}}"#;
    let mut head = Vec::new();
    while head.len() < HEAD && !head.windows(4).any(|end| end == b"\r\n\r\n") {
        if stream.read_buf(&mut head).await? == 0 {
            break;
        }
    }
    let answer = format!(
        "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n\
         content-length: {}\r\n\r\n{BODY}",
        BODY.len()
    );
    stream.write_all(answer.as_bytes()).await?;
    stream.shutdown().await
}

fn fingerprint(files: &TlsFiles) -> io::Result<Fingerprint> {
    let of = |path: &Path| {
        let stat = fs::metadata(path)?;
        let (mtime, ctime) = ((stat.mtime(), stat.mtime_nsec()), (stat.ctime(), stat.ctime_nsec()));
        Ok::<_, io::Error>((
            stat.dev(),
            stat.ino(),
            stat.size(),
            mtime.0,
            mtime.1,
            ctime.0,
            ctime.1,
        ))
    };
    Ok([of(&files.certificate)?, of(&files.key)?])
}

fn read(files: &TlsFiles) -> Result<Loaded, TlsError> {
    let bytes = |path: &Path| {
        fs::read(path).map_err(|source| TlsError::Read { path: path.to_path_buf(), source })
    };
    let path = &files.certificate;
    let text = bytes(path)?;
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let chain = chain.map_err(|_| TlsError::Damaged { path: path.clone() })?;
    let Some(leaf) = chain.first() else {
        return Err(TlsError::NoCertificate { path: path.clone() });
    };
    let ends = ends(leaf).ok_or_else(|| TlsError::Damaged { path: path.clone() })?;
    let text = zeroize::Zeroizing::new(bytes(&files.key)?);
    let key = PrivateKeyDer::from_pem_slice(&text)
        .map_err(|_| TlsError::NoKey { path: files.key.clone() })?;
    let provider = rustls::crypto::aws_lc_rs::default_provider();
    let key = CertifiedKey::from_der(chain, key, &provider).map_err(|source| TlsError::Unfit {
        certificate: path.clone(),
        key: files.key.clone(),
        source,
    })?;
    Ok(Loaded { key, ends })
}

/// Reads when a certificate ends, and nothing else of it. In DER it begins with the sequences
/// `Certificate` and `TBSCertificate`, and in the latter with `[0] version`, `serialNumber`,
/// `signature`, `issuer` and `Validity { notBefore, notAfter }`.
fn ends(certificate: &[u8]) -> Option<Timestamp> {
    const SEQUENCE: u8 = 0x30;
    const VERSION: u8 = 0xa0;
    let (SEQUENCE, certificate, _) = element(certificate)? else { return None };
    let (SEQUENCE, mut rest, _) = element(certificate)? else { return None };
    if let (VERSION, _, after) = element(rest)? {
        rest = after;
    }
    for _ in ["serialNumber", "signature", "issuer"] {
        rest = element(rest)?.2;
    }
    let (SEQUENCE, validity, _) = element(rest)? else { return None };
    let (kind, text, _) = element(element(validity)?.2)?;
    time(kind, str::from_utf8(text).ok()?)
}

/// The tag, the contents and what follows of the first element in DER. Tags and lengths of more than a certificate has are
/// refused.
fn element(der: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&[tag, length], rest) = der.split_first_chunk()?;
    let (length, rest) = match length {
        0..=0x7f => (usize::from(length), rest),
        0x81..=0x84 => {
            let (digits, rest) = rest.split_at_checked(usize::from(length & 0x7f))?;
            (digits.iter().fold(0, |sum, digit| (sum << 8) | usize::from(*digit)), rest)
        }
        _ => return None,
    };
    let (contents, rest) = rest.split_at_checked(length)?;
    Some((tag, contents, rest))
}

/// `YYMMDDHHMMSSZ`, or with four digits of the year.
fn time(kind: u8, text: &str) -> Option<Timestamp> {
    const SHORT: u8 = 0x17;
    const LONG: u8 = 0x18;
    let full = match kind {
        // As RFC 5280 has it: from 1950 to 2049.
        SHORT if text.get(..2)? >= "50" => format!("19{text}"),
        SHORT => format!("20{text}"),
        LONG => text.to_owned(),
        _ => return None,
    };
    let digits = full.strip_suffix('Z').filter(|digits| digits.len() == 14 && digits.is_ascii())?;
    let (date, hour) = digits.split_at(8);
    let date = format!("{}-{}-{}", &date[..4], &date[4..6], &date[6..]);
    format!("{date}T{}:{}:{}Z", &hour[..2], &hour[2..4], &hour[4..]).parse().ok()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use rcgen::{CertificateParams, KeyPair};

    use super::{element, ends, time};

    #[test]
    fn the_end_of_a_certificate_is_read_from_it() {
        for seconds in [1_000_000_000, 1_900_000_000, 2_524_607_999, 2_524_608_000, 4_000_000_000] {
            let key = KeyPair::generate().unwrap();
            let mut params = CertificateParams::new(vec!["a.test".to_owned()]).unwrap();
            let end = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
            params.not_before = (end - Duration::from_secs(86400)).into();
            params.not_after = end.into();
            let der = params.self_signed(&key).unwrap().der().to_vec();
            assert_eq!(ends(&der).map(|at| at.as_second().unsigned_abs()), Some(seconds));
            for length in 0..der.len().min(300) {
                // Cut anywhere it is no certificate, and no panic.
                assert_eq!(ends(&der[..length]), None, "{length}");
            }
        }
    }

    #[test]
    fn what_is_no_der_is_refused() {
        for bad in [&b""[..], b"0", b"0\x85", b"0\x80\0\0", b"0\x84\xff\xff\xff\xff", b"0\x05abc"] {
            assert_eq!(element(bad), None, "{bad:?}");
        }
        for (kind, bad) in
            [(0x17, "x"), (0x18, "20260101000000"), (0x18, "20261301000000Z"), (4, "")]
        {
            assert_eq!(time(kind, bad), None, "{bad}");
        }
    }
}
