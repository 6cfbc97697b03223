//! The head of a chain: how far it goes and how much of it was removed, signed with the key of the
//! data directory.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use hmac::{Hmac, KeyInit as _, Mac as _};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use super::line::FORMAT;
use super::segments::sync_dir;
use crate::model::{AuditChain, Timestamp};

const KEY_FILE: &str = "audit.key";
const HEAD_FILE: &str = "head.json";
const NEW_HEAD_FILE: &str = "head.json.new";

/// What heads are signed with.
#[derive(Clone)]
pub struct AuditKey([u8; 32]);

impl std::fmt::Debug for AuditKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AuditKey")
    }
}

impl AuditKey {
    /// Reads the key of a data directory; nothing if it has none.
    ///
    /// # Errors
    ///
    /// Returns the system's error, and [`io::ErrorKind::InvalidData`] when the file is no key.
    pub fn read(data: &Path) -> io::Result<Option<Self>> {
        match fs::read(data.join(KEY_FILE)) {
            Ok(bytes) => {
                let damaged = || {
                    let reason = format!("`{KEY_FILE}` is {} bytes long, not 32", bytes.len());
                    io::Error::new(io::ErrorKind::InvalidData, reason)
                };
                <[u8; 32]>::try_from(bytes.as_slice()).map(Self).map(Some).map_err(|_| damaged())
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Reads the key of a data directory, which is made when there is none. A damaged one is moved aside,
    /// and the answer says where: heads that it signed cannot be checked any more.
    ///
    /// # Errors
    ///
    /// Returns the system's error.
    pub fn open(data: &Path) -> io::Result<(Self, Option<String>)> {
        match Self::read(data) {
            Ok(Some(key)) => Ok((key, None)),
            Ok(None) => Ok((Self::make(data)?, None)),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                let aside = format!("{KEY_FILE}.damaged");
                fs::rename(data.join(KEY_FILE), data.join(&aside))?;
                Ok((Self::make(data)?, Some(aside)))
            }
            Err(error) => Err(error),
        }
    }

    fn make(data: &Path) -> io::Result<Self> {
        let mut key = [0u8; 32];
        getrandom::fill(&mut key).map_err(io::Error::other)?;
        // Whole or not at all: half a key would be taken for a damaged one.
        let draft = data.join("audit.key.new");
        write_synced(&draft, &key)?;
        fs::rename(&draft, data.join(KEY_FILE))?;
        sync_dir(data)?;
        Ok(Self(key))
    }

    fn mac(&self, text: &str) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("any length is a key");
        mac.update(text.as_bytes());
        mac
    }

    fn id(&self) -> String {
        hex::encode(&self.mac("sandkeep audit key id").finalize().into_bytes()[..4])
    }
}

/// How far a chain goes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditHead {
    format: u32,
    chain: String,
    /// The number of the newest entry on stable storage; 0 if there is none.
    pub seq: u64,
    /// Its hash, in hex.
    pub hash: String,
    /// Entries up to this one were removed because the chain reached its limit.
    pub removed: u64,
    /// The hash of the last of them.
    pub removed_hash: String,
    /// When the head was written.
    pub at: Timestamp,
    key: String,
    mac: String,
}

/// Whether a head can be relied on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum HeadRead {
    /// It was signed here.
    Signed(AuditHead),
    /// There is none.
    Missing,
    /// It is not what was signed, and why.
    Changed(String),
    /// It was signed with another key. What it says is not proven.
    OtherKey(AuditHead),
}

impl AuditHead {
    pub(super) fn signed(
        key: &AuditKey,
        chain: &AuditChain,
        (seq, hash): (u64, &str),
        (removed, removed_hash): (u64, &str),
        at: Timestamp,
    ) -> Self {
        let mut head = Self {
            format: FORMAT,
            chain: chain.to_string(),
            seq,
            hash: hash.to_owned(),
            removed,
            removed_hash: removed_hash.to_owned(),
            at,
            key: key.id(),
            mac: String::new(),
        };
        head.mac = hex::encode(key.mac(&head.text()).finalize().into_bytes());
        head
    }

    fn text(&self) -> String {
        let Self { chain, seq, hash, removed, removed_hash, at, .. } = self;
        format!("sandkeep audit head 1\n{chain}\n{seq}\n{hash}\n{removed}\n{removed_hash}\n{at}\n")
    }

    /// Reads the head of the chain in `dir`.
    pub(super) fn read(dir: &Path, chain: &AuditChain, key: &AuditKey) -> io::Result<HeadRead> {
        let bytes = match fs::read(dir.join(HEAD_FILE)) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(HeadRead::Missing),
            Err(error) => return Err(error),
        };
        let head: Self = match serde_json::from_slice(&bytes) {
            Ok(head) => head,
            Err(error) => return Ok(HeadRead::Changed(format!("it cannot be read: {error}"))),
        };
        if head.format != FORMAT {
            return Ok(HeadRead::Changed(format!("it has format {}", head.format)));
        }
        if head.chain != chain.to_string() {
            return Ok(HeadRead::Changed(format!("it is the head of `{}`", head.chain)));
        }
        if head.key != key.id() {
            return Ok(HeadRead::OtherKey(head));
        }
        let mac = hex::decode(&head.mac).unwrap_or_default();
        match key.mac(&head.text()).verify_slice(&mac) {
            Ok(()) => Ok(HeadRead::Signed(head)),
            Err(_) => Ok(HeadRead::Changed("its signature is wrong".to_owned())),
        }
    }

    /// Replaces the head of the chain in `dir`. It is on stable storage when this returns.
    pub(super) fn write(&self, dir: &Path) -> io::Result<()> {
        let draft = dir.join(NEW_HEAD_FILE);
        let mut text = serde_json::to_vec(self)?;
        text.push(b'\n');
        write_synced(&draft, &text)?;
        fs::rename(&draft, dir.join(HEAD_FILE))?;
        sync_dir(dir)
    }
}

fn write_synced(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file: File =
        OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}
