//! The identity of a data directory, also after a move.
//!
//! `format.json` holds 32 random hex digits. What a daemon has outside of its data directory, runtime directories and
//! control groups, is named after the first twelve, so that it finds its machines again after the directory was moved.
//!
//! Earlier versions named those after the path. A directory of theirs gets an identity that begins as that name did, so that
//! machines which run while the daemon is upgraded are found.
//!
//! A copy has the identity of the original. An operator who needs to distinguish the names outside
//! gives the copy another one ([`Store::renew_identity`]).

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;

use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use super::manifest::document::check_format;
use super::manifest::sync_parent;
use super::{Result, Store, StoreError, blocking, io_error};
use crate::model::FORMAT;

const NAME: &str = "format.json";
/// How many digits of an identity are part of names on the host.
const MARK: usize = 12;
const DIGITS: usize = 32;

#[derive(Deserialize)]
struct Format {
    format: u32,
    #[serde(default)]
    identity: Option<String>,
}

/// What is known of a directory.
pub(super) struct Identity {
    pub(super) text: String,
    /// Whether that is on record.
    kept: bool,
    /// Whether another one would be drawn next time that serves as well.
    made_from_path: bool,
}

impl Store {
    /// Names this data directory on this host: what a daemon has outside of it is called after this. It stays the same when
    /// the directory is moved.
    #[must_use]
    pub fn mark(&self) -> String {
        self.identity().chars().take(MARK).collect()
    }

    /// Which data directory this is: 32 hex digits.
    #[must_use]
    pub fn identity(&self) -> String {
        self.inner.identity.lock().clone()
    }

    /// Gives the directory another identity: it is a copy, and the original has this one.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`] when that cannot be kept.
    pub async fn renew_identity(&self) -> Result<()> {
        let store = self.clone();
        blocking(move || {
            let text = draw(DIGITS);
            write(&store.inner.data, &text)?;
            *store.inner.identity.lock() = text;
            Ok(())
        })
        .await
    }
}

/// Finds out which directory `data` is; a new one is given an identity.
pub(super) fn find(data: &Path) -> Result<Identity> {
    let path = data.join(NAME);
    let known = match fs::read(&path) {
        Ok(bytes) => Some(read(&path, &bytes)?),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(io_error("read", &path)(error)),
    };
    Ok(match known {
        None => Identity { text: draw(DIGITS), kept: false, made_from_path: false },
        Some(Format { identity: Some(text), format }) => {
            let hex = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c);
            if text.len() != DIGITS || !text.chars().all(hex) {
                let reason = format!("`{text}` is no identity");
                return Err(StoreError::Damaged { path, reason });
            }
            Identity { text, kept: format == FORMAT, made_from_path: false }
        }
        Some(Format { identity: None, .. }) => {
            let text = format!("{}{}", mark_of_path(data), draw(DIGITS - MARK));
            Identity { text, kept: false, made_from_path: true }
        }
    })
}

/// Reads `format.json`, which has no checksum: it says which formats have one.
fn read(path: &Path, bytes: &[u8]) -> Result<Format> {
    check_format(path, bytes)?;
    serde_json::from_slice(bytes)
        .map_err(|error| StoreError::Damaged { path: path.to_owned(), reason: error.to_string() })
}

/// Puts it on record. From then on there may be things in here that earlier daemons would collect.
pub(super) fn keep(data: &Path, identity: &Identity) -> Result<()> {
    if identity.kept {
        return Ok(());
    }
    match write(data, &identity.text) {
        // On a full disk the daemon must start all the same. The part that counts is the same next time.
        Err(error) if identity.made_from_path && error.is_no_room() => Ok(()),
        written => written,
    }
}

fn write(data: &Path, identity: &str) -> Result<()> {
    let path = data.join(NAME);
    let bytes = format!("{{\"format\":{FORMAT},\"identity\":\"{identity}\"}}\n");
    let temporary = data.join("tmp").join(NAME);
    let mut file = File::create(&temporary).map_err(io_error("create", &temporary))?;
    file.write_all(bytes.as_bytes())
        .and_then(|()| file.sync_all())
        .map_err(io_error("write", &temporary))?;
    fs::rename(&temporary, &path).map_err(io_error("create", &path))?;
    sync_parent(&path)
}

/// What earlier versions called things outside, after the path of the data directory.
fn mark_of_path(data: &Path) -> String {
    hex::encode(&Sha256::digest(data.as_os_str().as_encoded_bytes())[..MARK / 2])
}

fn draw(digits: usize) -> String {
    let mut bytes = vec![0; digits / 2];
    // The kernel's generator does not fail once the host has booted.
    if getrandom::fill(&mut bytes).is_err() {
        let text = format!("{}{:?}", std::process::id(), std::time::SystemTime::now());
        bytes.copy_from_slice(&Sha256::digest(text)[..digits / 2]);
    }
    hex::encode(bytes)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::mark_of_path;
    use crate::store::{Store, StoreError};

    #[tokio::test]
    async fn an_identity_stays_when_the_directory_is_moved() {
        let dir = tempfile::tempdir().expect("a directory");
        let [from, to] = ["from", "to"].map(|name| dir.path().join(name));
        let first = Store::open(&from).expect("opened").identity();
        assert_eq!(first.len(), 32);
        assert_eq!(Store::open(&from).expect("opened").identity(), first);
        fs::rename(&from, &to).expect("moved");
        let store = Store::open(&to).expect("opened");
        assert_eq!((store.identity(), store.mark()), (first.clone(), first[..12].to_owned()));
        assert_ne!(Store::open(&from).expect("a new one").identity(), first);
        store.renew_identity().await.expect("renewed");
        let renewed = store.identity();
        drop(store);
        assert_ne!(renewed, first);
        assert_eq!(Store::open(&to).expect("opened").identity(), renewed);
    }

    #[test]
    fn a_directory_of_an_earlier_version_keeps_its_names() {
        let dir = tempfile::tempdir().expect("a directory");
        let data = dir.path().canonicalize().expect("there");
        drop(Store::open(&data).expect("opened"));
        fs::write(data.join("format.json"), "{\"format\":4}\n").expect("written");
        let mark = Store::open(&data).expect("opened").mark();
        assert_eq!(mark, mark_of_path(&data));
        let text = fs::read_to_string(data.join("format.json")).expect("there");
        assert!(text.contains(&format!("\"identity\":\"{mark}")), "{text}");
        fs::write(data.join("format.json"), "{\"format\":4,\"identity\":\"../x\"}")
            .expect("written");
        assert!(matches!(Store::open(&data), Err(StoreError::Damaged { .. })));
    }
}
