//! TLS to the server: whose certificates are trusted, and what to do about one that is not.

use std::io;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{CertificateError, ClientConfig, InvalidMessage, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::wire::Wire;
use crate::{Endpoint, Error};

/// How long a server may take for the handshake.
const HANDSHAKE: Duration = Duration::from_secs(20);

/// Which CAs are trusted: the system's, and those of a file.
#[derive(Debug, Default)]
pub(crate) struct Trust {
    own: Vec<CertificateDer<'static>>,
    config: OnceLock<Arc<ClientConfig>>,
}

impl Trust {
    /// Trusts the certificates in a file as well.
    pub(crate) fn with_ca(path: &Path) -> Result<Self, Error> {
        let bad = |source| Error::BadCa { path: path.to_path_buf(), source };
        let text = std::fs::read(path).map_err(bad)?;
        let own: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
        let own = own.map_err(|error| bad(io::Error::other(error.to_string())))?;
        let mut roots = RootCertStore::empty();
        let (added, _) = roots.add_parsable_certificates(own.iter().cloned());
        if added == 0 {
            return Err(bad(io::Error::other("it holds no certificate")));
        }
        Ok(Self { own, config: OnceLock::new() })
    }

    /// Makes a connection a TLS connection to the server that `authority` names.
    pub(crate) async fn handshake(
        &self,
        endpoint: &Endpoint,
        authority: &str,
        stream: TcpStream,
    ) -> Result<Wire, Error> {
        let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let name = ServerName::try_from(bare.to_owned())
            .map_err(|_| Error::BadUrl { text: endpoint.to_string() })?;
        let failed = |source: io::Error| {
            let url = endpoint.to_string();
            let hint = hint(&source, authority);
            Error::Connect { url, hint, source }
        };
        let connecting = TlsConnector::from(self.config()).connect(name, stream);
        match tokio::time::timeout(HANDSHAKE, connecting).await {
            Ok(Ok(stream)) => Ok(Wire::Tls(Box::new(stream))),
            Ok(Err(error)) => Err(failed(error)),
            Err(_) => Err(failed(io::ErrorKind::TimedOut.into())),
        }
    }

    fn config(&self) -> Arc<ClientConfig> {
        let config = self.config.get_or_init(|| {
            let mut roots = RootCertStore::empty();
            let (_, _) = roots.add_parsable_certificates(self.own.iter().cloned());
            let (_, _) =
                roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
            let mut config = ClientConfig::builder_with_provider(provider)
                .with_safe_default_protocol_versions()
                .expect("the provider has the default versions")
                .with_root_certificates(roots)
                .with_no_client_auth();
            config.alpn_protocols = vec![b"http/1.1".to_vec()];
            Arc::new(config)
        });
        Arc::clone(config)
    }
}

/// What to do about a handshake that failed.
fn hint(error: &io::Error, authority: &str) -> String {
    let tls = error.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>());
    match tls {
        Some(rustls::Error::InvalidCertificate(reason)) => certificate_hint(reason, authority),
        Some(rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType)) => {
            "the server does not speak TLS on this address: use http:// instead of https://".into()
        }
        _ => "check the address in SANDKEEP_URL, and whether the server speaks TLS there".into(),
    }
}

fn certificate_hint(reason: &CertificateError, authority: &str) -> String {
    let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
    match reason {
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            "nobody this machine trusts has signed the server's certificate; give the CA's certificate with \
             --ca FILE or SANDKEEP_CA (`keep tls init` wrote it as tls/ca.pem in the server's data directory)"
                .into()
        }
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "renew the certificate on the server, for example with `keep tls init`; it takes effect without \
             a restart. If it is not expired, check this machine's clock"
                .into()
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "check the clocks of this machine and of the server".into()
        }
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            format!(
                "use a name that the certificate has, or add this one on the server: `keep tls init {host}`"
            )
        }
        _ => "the server needs another certificate; `keep tls init` makes one".into(),
    }
}
