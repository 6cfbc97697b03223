//! `[tls]`: the certificate of the server's addresses.

use std::path::PathBuf;

use sandkeep_server::TlsFiles;
use serde::Deserialize;

use crate::failure::Failure;

/// What a settings file says about HTTPS.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TlsFile {
    /// The certificate, followed by those between it and the root, in PEM form.
    certificate: Option<PathBuf>,
    /// Its private key, in PEM form.
    key: Option<PathBuf>,
}

/// The files of the certificate; none if the section is empty.
pub(super) fn tls(file: TlsFile) -> Result<Option<TlsFiles>, Failure> {
    let (certificate, key) = match (file.certificate, file.key) {
        (Some(certificate), Some(key)) => (certificate, key),
        (None, None) => return Ok(None),
        _ => {
            return Err(Failure::here("[tls] needs both `certificate` and `key`")
                .with_hint("name two files in PEM form; `keep tls init` makes them"));
        }
    };
    let absolute = |path: PathBuf| {
        std::path::absolute(path)
            .map_err(|error| Failure::caused("cannot determine the working directory", error))
    };
    Ok(Some(TlsFiles { certificate: absolute(certificate)?, key: absolute(key)? }))
}

#[cfg(test)]
mod tests {
    use super::{TlsFile, tls};

    #[test]
    fn both_files_are_needed() {
        let read = |text: &str| toml::from_str::<TlsFile>(text).expect("it reads");
        assert!(tls(read("certificate = '/a'\nkey = '/b'")).expect("both are there").is_some());
        assert!(tls(read("")).expect("it is empty").is_none());
        assert!(tls(read("certificate = '/a'")).is_err());
        assert!(tls(read("key = '/b'")).is_err());
    }
}
