//! `keep tls init`: a local CA and a certificate for this server. Needs no server.

use std::fs;
use std::io;
use std::io::Write as _;
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, PublicKeyData as _,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use serde::Serialize;

use crate::args::{Global, TlsInitArgs};
use crate::failure::Failure;
use crate::locate;
use crate::screen::Screen;

const DAY: Duration = Duration::from_secs(24 * 3600);
const CA_DAYS: u32 = 3653;
/// The name of every CA that is made here. Clients distinguish them by their keys.
const CA_NAME: &str = "Sandkeep local CA";

/// What was made.
#[derive(Debug, Serialize)]
struct Made {
    ca: PathBuf,
    certificate: PathBuf,
    key: PathBuf,
    names: Vec<String>,
    days: u32,
    new_ca: bool,
}

pub(super) fn init(global: &Global, args: &TlsInitArgs) -> Result<(), Failure> {
    let data = global.data.clone().unwrap_or_else(locate::default_data);
    let folder = args.dir.clone().unwrap_or_else(|| data.join("tls"));
    let folder = std::path::absolute(&folder)
        .map_err(|error| Failure::caused("cannot determine the working directory", error))?;
    let names = names(&args.names)?;
    let cannot = |error: io::Error| {
        Failure::caused(format!("cannot write to `{}`", folder.display()), error)
            .with_hint("run this as the user who runs `keep serve`, or choose another --dir")
    };
    fs::create_dir_all(&folder).map_err(cannot)?;
    let made = make(&folder, names, args.days, args.new_ca)?;
    let (new, host) = (made.new_ca, made.names.first().cloned().unwrap_or_default());
    Screen::new(global.json).answer(&made, |made| {
        let (ca, certificate) = (made.ca.display(), made.certificate.display());
        let names = made.names.join(", ");
        let renewed = match new {
            true => "Clients trust it when they have the CA's certificate:",
            false => "It is from the same CA as before. Clients that do not have its certificate yet:",
        };
        format!(
            "Made a certificate for {names}; it expires in {days} days.

In the settings of the server (`keep serve --config FILE`); a running server with these loads new files by itself:
  [tls]
  certificate = \"{certificate}\"
  key = \"{key}\"

{renewed}
  keep --ca {ca} --url https://{host}:7777 ls    # or SANDKEEP_CA={ca}
  curl --cacert {ca} https://{host}:7777/healthz
  cp {ca} /usr/local/share/ca-certificates/sandkeep.crt && update-ca-certificates   # all programs of a Debian host
  NODE_EXTRA_CA_CERTS={ca} REQUESTS_CA_BUNDLE={ca}                # Node and Python programs
",
            days = made.days,
            key = made.key.display(),
        )
    })
}

/// The names of the certificate: those that were given first, then those that every server has.
fn names(given: &[String]) -> Result<Vec<String>, Failure> {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let usual = ["localhost".to_owned(), host, "127.0.0.1".to_owned(), "::1".to_owned()];
    let mut names: Vec<String> = Vec::new();
    for name in given {
        let bare = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
        if !is_name(bare) {
            let hint =
                "write a host name, an address or a wildcard: keep.lan, 192.0.2.10, '*.keep.lan'";
            return Err(
                Failure::here(format!("`{name}` is no name for a certificate")).with_hint(hint)
            );
        }
        names.push(bare.to_ascii_lowercase());
    }
    names.extend(usual.into_iter().filter(|name| is_name(name)));
    let mut seen = std::collections::BTreeSet::new();
    names.retain(|name| seen.insert(name.clone()));
    Ok(names)
}

fn is_name(name: &str) -> bool {
    let label = |label: &str| {
        !label.is_empty()
            && label.len() <= 63
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
    };
    let host = name.strip_prefix("*.").unwrap_or(name);
    name.parse::<IpAddr>().is_ok() || (name.len() <= 253 && host.split('.').all(label))
}

fn make(folder: &Path, names: Vec<String>, days: u32, new_ca: bool) -> Result<Made, Failure> {
    let cannot = |error: rcgen::Error| Failure::caused("cannot make the certificate", error);
    let (ca_file, ca_key_file) = (folder.join("ca.pem"), folder.join("ca.key"));
    let is_new = new_ca || !ca_file.exists();
    let (issuer, ca) = match is_new {
        true => {
            let (issuer, certificate, key) = new_authority().map_err(cannot)?;
            write(&ca_key_file, &key, 0o600)?;
            write(&ca_file, &certificate, 0o644)?;
            (issuer, certificate)
        }
        false => authority(&ca_file, &ca_key_file)?,
    };
    let key = KeyPair::generate().map_err(cannot)?;
    let mut params = CertificateParams::new(names.clone()).map_err(cannot)?;
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, "Sandkeep server");
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params.use_authority_key_identifier_extension = true;
    lasts(&mut params, days);
    let certificate = params.signed_by(&key, &issuer).map_err(cannot)?;
    let made = Made {
        ca: ca_file,
        certificate: folder.join("server.pem"),
        key: folder.join("server.key"),
        names,
        days,
        new_ca: is_new,
    };
    write(&made.key, &key.serialize_pem(), 0o600)?;
    write(&made.certificate, &format!("{}{ca}", certificate.pem()), 0o644)?;
    Ok(made)
}

type Authority = Issuer<'static, KeyPair>;

fn ca_params() -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, CA_NAME);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    lasts(&mut params, CA_DAYS);
    params
}

fn new_authority() -> Result<(Authority, String, String), rcgen::Error> {
    let key = KeyPair::generate()?;
    let params = ca_params();
    let certificate = params.self_signed(&key)?.pem();
    let text = key.serialize_pem();
    Ok((Issuer::new(params, key), certificate, text))
}

/// The CA that was made before.
fn authority(file: &Path, key_file: &Path) -> Result<(Authority, String), Failure> {
    let hint = "put the CA's key back, or make a new CA with --new-ca; clients must trust it anew";
    let read = |path: &Path| {
        fs::read_to_string(path).map_err(|error| {
            Failure::caused(format!("cannot read `{}`", path.display()), error).with_hint(hint)
        })
    };
    let bad = |path: &Path, problem: &str| {
        Failure::here(format!("cannot use `{}`: {problem}", path.display())).with_hint(hint)
    };
    let (certificate, key) = (read(file)?, read(key_file)?);
    let key = KeyPair::from_pem(&key).map_err(|_| bad(key_file, "it is no private key"))?;
    let der = CertificateDer::from_pem_slice(certificate.as_bytes())
        .map_err(|_| bad(file, "it is no certificate"))?;
    let has = |part: &[u8]| der.windows(part.len()).any(|window| window == part);
    // All CAs made here have one name, and the rest of it is in its key.
    if !has(CA_NAME.as_bytes()) {
        return Err(bad(file, "it is not the certificate of a CA that `keep tls init` made"));
    }
    if !has(&key.subject_public_key_info()) {
        return Err(bad(key_file, "it is the key of another CA"));
    }
    Ok((Issuer::new(ca_params(), key), certificate))
}

/// Begins yesterday: clocks differ.
fn lasts(params: &mut CertificateParams, days: u32) {
    let now = SystemTime::now();
    params.not_before = (now - DAY).into();
    params.not_after = (now + DAY * days).into();
}

/// Replaces a file in one step, so that no reader sees half of it.
fn write(path: &Path, text: &str, mode: u32) -> Result<(), Failure> {
    let fresh = path.with_extension("new");
    let written = || -> io::Result<()> {
        match fs::remove_file(&fresh) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file =
            fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(&fresh)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&fresh, path)
    };
    written().map_err(|error| Failure::caused(format!("cannot write `{}`", path.display()), error))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::{make, names};

    #[test]
    fn names_are_checked_and_the_usual_ones_are_added() {
        let given = ["Keep.LAN".to_owned(), "192.0.2.1".to_owned(), "[2001:db8::1]".to_owned()];
        let made = names(&given).unwrap();
        assert_eq!(made[..3], ["keep.lan", "192.0.2.1", "2001:db8::1"]);
        for usual in ["localhost", "127.0.0.1", "::1"] {
            assert!(made.iter().any(|name| name == usual), "{made:?}");
        }
        for bad in ["", "a b", "https://keep.lan", "keep.lan:7777", "*.*.lan"] {
            assert!(names(&[bad.to_owned()]).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_ca_stays_and_keys_are_private() {
        let folder = tempfile::tempdir().unwrap();
        let names = || vec!["localhost".to_owned()];
        let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
        assert!(make(folder.path(), names(), 10, false).unwrap().new_ca);
        let (ca, server) = (read("ca.pem"), read("server.pem"));
        assert!(!make(folder.path(), names(), 10, false).unwrap().new_ca);
        assert_eq!(read("ca.pem"), ca);
        assert_ne!(read("server.pem"), server);
        assert!(read("server.pem").ends_with(&ca), "the chain is whole");
        for key in ["ca.key", "server.key"] {
            let mode = folder.path().join(key).metadata().unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{key}");
        }
        std::fs::remove_file(folder.path().join("ca.key")).unwrap();
        assert!(make(folder.path(), names(), 10, false).is_err(), "no silent new CA");
        assert!(make(folder.path(), names(), 10, true).unwrap().new_ca);
        assert_ne!(read("ca.pem"), ca);
    }
}
