//! The server's key.
//!
//! 32 bytes: in `secrets.key` of the data directory, where they are made at first use; in a file of the
//! operator's; or passed by the code that starts the engine. Nothing is sealed with the key itself:
//! the keys that seal and derive, and the mark that identifies the key, are made from it by
//! HMAC-SHA-256, so that none of them reveals anything about another.
//!
//! A sealed text is `sk1.<key id>.<base64url of nonce, ciphertext and tag>`: AES-256-GCM with a random
//! nonce. The context is authenticated, not stored. The key id makes the difference between "somebody
//! tampered with this" and "this server was started with another key", which is the usual mishap.

use std::fmt;
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aws_lc_rs::aead::{AES_256_GCM, Aad, Nonce, RandomizedNonceKey};
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use hmac::{Hmac, KeyInit as _, Mac as _};
use parking_lot::Mutex;
use sha2::Sha256;
use zeroize::{Zeroize as _, Zeroizing};

const FILE: &str = "secrets.key";
const VERSION: &str = "sk1";
const KEY: usize = 32;
const NONCE: usize = 12;

/// Where the server's key comes from.
#[derive(Clone, Default, PartialEq, Eq)]
pub enum KeySource {
    /// `secrets.key` in the data directory, made at first use.
    #[default]
    DataDirectory,
    /// A file of the operator's, which must be there: 32 bytes, as they are or in base64.
    File(PathBuf),
    /// These bytes.
    Given(Zeroizing<[u8; KEY]>),
}

impl KeySource {
    /// Takes a key from text: 32 bytes in base64.
    ///
    /// # Errors
    ///
    /// Returns [`BadKey::NotAKey`] when it is anything else; the text is not repeated.
    pub fn from_text(text: &str) -> Result<Self, BadKey> {
        decode(text.trim().as_bytes()).map(Self::Given).ok_or(BadKey::NotAKey)
    }
}

impl fmt::Debug for KeySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DataDirectory => f.write_str("DataDirectory"),
            Self::File(path) => f.debug_tuple("File").field(path).finish(),
            Self::Given(_) => f.write_str("Given"),
        }
    }
}

/// Why there is no key to work with.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say it
pub enum BadKey {
    #[error("the key for secrets is not 32 bytes in base64")]
    NotAKey,
    #[error("`{}` is no key for secrets: it must hold 32 bytes, as they are or in base64", .0.display())]
    NotAKeyFile(PathBuf),
    #[error("others than its owner can read the key for secrets in `{}`", .0.display())]
    Open(PathBuf),
    #[error("the key for secrets is locked: {0}")]
    Locked(String),
    #[error("the key for secrets in `{}` cannot be read", .path.display())]
    Io { path: PathBuf, source: io::Error },
}

/// Why something could not be sealed or revealed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say it
pub enum SealError {
    #[error(transparent)]
    Key(#[from] BadKey),
    #[error(
        "it was sealed with another key (`{found}`; this server has {})",
        .have.as_ref().map_or("none".to_owned(), |id| format!("`{id}`"))
    )]
    OtherKey { found: String, have: Option<String> },
    #[error("it is damaged, or was sealed for another place")]
    Damaged,
    #[error("nothing can be encrypted here")]
    Cipher,
}

/// What seals and reveals. Clones are the same keyring.
#[derive(Clone)]
pub struct Keyring {
    /// Where a missing key is made.
    file: PathBuf,
    keys: Arc<Mutex<Option<Arc<Keys>>>>,
    /// Why none may be made.
    locked: Arc<Mutex<Option<String>>>,
}

impl fmt::Debug for Keyring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Keyring")
    }
}

/// What is made from the key.
struct Keys {
    id: String,
    cipher: RandomizedNonceKey,
    derive: Zeroizing<[u8; KEY]>,
}

impl Keyring {
    /// Takes the key from its source. A data directory that has none yet gets one at first use; with
    /// one that is damaged the keyring is [locked](Self::lock).
    ///
    /// # Errors
    ///
    /// Returns [`BadKey`] when what the operator gave is no key, when a key cannot be read, or when
    /// others can read it.
    pub fn open(data: &Path, source: &KeySource) -> Result<Self, BadKey> {
        let file = data.join(FILE);
        let mut locked = None;
        let key = match source {
            KeySource::Given(key) => Some(key.clone()),
            KeySource::File(path) => Some(read(path)?),
            KeySource::DataDirectory => match read(&file) {
                Err(BadKey::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => None,
                Err(error @ BadKey::NotAKeyFile(_)) => {
                    locked = Some(error.to_string());
                    None
                }
                found => Some(found?),
            },
        };
        let keys = key.map(|key| Arc::new(Keys::from(&key)));
        let locked = Arc::new(Mutex::new(locked));
        Ok(Self { file, keys: Arc::new(Mutex::new(keys)), locked })
    }

    /// Whether there is a key.
    #[must_use]
    pub fn has_key(&self) -> bool {
        self.keys.lock().is_some()
    }

    /// Why no key may be made, if none may.
    #[must_use]
    pub fn locked(&self) -> Option<String> {
        self.locked.lock().clone()
    }

    /// Keeps a key from being made in the place of one that is lost: what was sealed with that one
    /// would look as if it had been tampered with, and a backup of the key would not fit any more.
    pub fn lock(&self, reason: String) {
        *self.locked.lock() = Some(reason);
    }

    /// Seals something for a place: `project/p/secret/NAME/3`. It opens again only with the same context.
    ///
    /// # Errors
    ///
    /// Returns [`SealError::Key`] when the key that this needed first could not be made.
    pub fn seal(&self, context: &str, plain: &[u8]) -> Result<String, SealError> {
        let keys = self.keys()?;
        let mut text = Zeroizing::new(Vec::with_capacity(plain.len() + AES_256_GCM.tag_len()));
        text.extend_from_slice(plain);
        let nonce = keys
            .cipher
            .seal_in_place_append_tag(Aad::from(context.as_bytes()), &mut *text)
            .map_err(|_| SealError::Cipher)?;
        let whole = [nonce.as_ref().as_slice(), &text].concat();
        Ok(format!("{VERSION}.{}.{}", keys.id, URL_SAFE_NO_PAD.encode(whole)))
    }

    /// Reveals what was sealed for a place.
    ///
    /// # Errors
    ///
    /// Returns [`SealError::OtherKey`] when this server's key is not the one it was sealed with, and
    /// [`SealError::Damaged`] when it is not what was sealed, or was sealed with another context.
    pub fn reveal(&self, context: &str, sealed: &str) -> Result<Zeroizing<Vec<u8>>, SealError> {
        let mut parts = sealed.splitn(3, '.');
        let (Some(VERSION), Some(id), Some(text)) = (parts.next(), parts.next(), parts.next())
        else {
            return Err(SealError::Damaged);
        };
        let keys = self.keys.lock().clone();
        let Some(keys) = keys.as_ref().filter(|keys| keys.id == id) else {
            let have = keys.map(|keys| keys.id.clone());
            return Err(SealError::OtherKey { found: id.to_owned(), have });
        };
        let mut whole = Zeroizing::new(Vec::new());
        URL_SAFE_NO_PAD.decode_vec(text, &mut whole).map_err(|_| SealError::Damaged)?;
        let (nonce, text) = whole.split_at_mut_checked(NONCE).ok_or(SealError::Damaged)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).map_err(|_| SealError::Damaged)?;
        let plain = keys
            .cipher
            .open_in_place(nonce, Aad::from(context.as_bytes()), text)
            .map_err(|_| SealError::Damaged)?;
        Ok(Zeroizing::new(plain.to_vec()))
    }

    /// 32 bytes that follow from the key and the context, and reveal nothing about either.
    ///
    /// # Errors
    ///
    /// As [`seal`](Self::seal).
    pub fn derive(&self, context: &str) -> Result<[u8; 32], SealError> {
        Ok(*mac(&self.keys()?.derive, context))
    }

    fn keys(&self) -> Result<Arc<Keys>, BadKey> {
        let mut keys = self.keys.lock();
        if let Some(keys) = &*keys {
            return Ok(Arc::clone(keys));
        }
        if let Some(reason) = self.locked() {
            return Err(BadKey::Locked(reason));
        }
        let made = Arc::new(Keys::from(&*make(&self.file)?));
        *keys = Some(Arc::clone(&made));
        Ok(made)
    }
}

impl Keys {
    fn from(key: &[u8; KEY]) -> Self {
        let id = mac(key, "sandkeep key id");
        Self {
            id: hex::encode(&id[..4]),
            cipher: RandomizedNonceKey::new(&AES_256_GCM, &*mac(key, "sandkeep seal"))
                .expect("32 bytes are a key of this cipher"),
            derive: mac(key, "sandkeep derive"),
        }
    }
}

fn mac(key: &[u8; KEY], text: &str) -> Zeroizing<[u8; KEY]> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("any length is a key");
    mac.update(text.as_bytes());
    Zeroizing::new(mac.finalize().into_bytes().into())
}

fn decode(text: &[u8]) -> Option<Zeroizing<[u8; KEY]>> {
    let mut bytes = Zeroizing::new(Vec::with_capacity(text.len()));
    STANDARD
        .decode_vec(text, &mut bytes)
        .or_else(|_| {
            bytes.zeroize();
            bytes.clear();
            URL_SAFE_NO_PAD.decode_vec(text, &mut bytes)
        })
        .ok()?;
    exact(&bytes)
}

fn exact(bytes: &[u8]) -> Option<Zeroizing<[u8; KEY]>> {
    bytes.try_into().ok().map(Zeroizing::new)
}

/// Reads a key file, which only its owner may be able to read.
fn read(path: &Path) -> Result<Zeroizing<[u8; KEY]>, BadKey> {
    let failed = |source| BadKey::Io { path: path.to_owned(), source };
    let bytes = Zeroizing::new(std::fs::read(path).map_err(failed)?);
    if std::fs::metadata(path).map_err(failed)?.permissions().mode() & 0o077 != 0 {
        return Err(BadKey::Open(path.to_owned()));
    }
    exact(&bytes)
        .or_else(|| decode(bytes.trim_ascii()))
        .ok_or_else(|| BadKey::NotAKeyFile(path.to_owned()))
}

/// Makes a key and writes it down for good: what is sealed with a key that a power cut takes is lost.
fn make(path: &Path) -> Result<Zeroizing<[u8; KEY]>, BadKey> {
    let mut key = Zeroizing::new([0u8; KEY]);
    let mut write = || -> io::Result<()> {
        getrandom::fill(&mut *key).map_err(io::Error::other)?;
        // Whole or not at all: half a key would always be refused.
        let draft = path.with_extension("key.new");
        let _ = std::fs::remove_file(&draft);
        let mut open = std::fs::OpenOptions::new();
        let mut file = open.write(true).create_new(true).mode(0o600).open(&draft)?;
        file.write_all(&*key)?;
        file.sync_all()?;
        std::fs::rename(&draft, path)?;
        let parent = path.parent().unwrap_or(Path::new("."));
        std::fs::File::open(parent)?.sync_all()
    };
    write().map_err(|source| BadKey::Io { path: path.to_owned(), source })?;
    Ok(key)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;

    use super::{BadKey, KeySource, Keyring, SealError};

    fn given(byte: u8) -> KeySource {
        KeySource::from_text(&STANDARD.encode([byte; 32])).unwrap()
    }

    #[test]
    fn what_is_sealed_opens_in_its_place_only() {
        let dir = tempfile::tempdir().unwrap();
        let keyring = Keyring::open(dir.path(), &given(1)).unwrap();
        let sealed = keyring.seal("project/p/secret/A/1", b"hunter2hunter2").unwrap();
        assert!(!sealed.contains("hunter2"), "{sealed}");
        assert_eq!(
            *keyring.reveal("project/p/secret/A/1", &sealed).unwrap(),
            b"hunter2hunter2".to_vec()
        );
        assert_ne!(sealed, keyring.seal("project/p/secret/A/1", b"hunter2hunter2").unwrap());
        let empty = keyring.seal("", b"").unwrap();
        assert!(keyring.reveal("", &empty).unwrap().is_empty());
        for (context, text) in [
            ("project/p/secret/A/2", sealed.clone()),
            ("project/p/secret/A/1", sealed[..sealed.len() - 2].to_owned()),
            ("project/p/secret/A/1", sealed.replacen("sk1", "sk2", 1)),
            ("project/p/secret/A/1", format!("{}.", &sealed[..12])),
            ("project/p/secret/A/1", String::new()),
            ("project/p/secret/A/1", "hunter2hunter2".to_owned()),
        ] {
            let refused = keyring.reveal(context, &text);
            assert!(matches!(refused, Err(SealError::Damaged)), "{context} {text} {refused:?}");
        }
    }

    #[test]
    fn every_bit_counts() {
        let dir = tempfile::tempdir().unwrap();
        let keyring = Keyring::open(dir.path(), &given(1)).unwrap();
        let sealed = keyring.seal("c", b"some value").unwrap();
        let start = sealed.rfind('.').unwrap() + 1;
        for at in start..sealed.len() {
            let mut bytes = sealed.clone().into_bytes();
            bytes[at] = if bytes[at] == b'A' { b'Q' } else { b'A' };
            let text = String::from_utf8(bytes).unwrap();
            if text != sealed {
                assert!(keyring.reveal("c", &text).is_err(), "{at}");
            }
        }
    }

    #[test]
    fn another_key_is_told_from_damage() {
        let dir = tempfile::tempdir().unwrap();
        let sealed = Keyring::open(dir.path(), &given(1)).unwrap().seal("c", b"value").unwrap();
        let other = Keyring::open(dir.path(), &given(2)).unwrap();
        let refused = other.reveal("c", &sealed).unwrap_err();
        assert!(refused.to_string().contains("sealed with another key"), "{refused}");
        let none = Keyring::open(dir.path(), &KeySource::DataDirectory).unwrap();
        let refused = none.reveal("c", &sealed).unwrap_err();
        assert!(refused.to_string().contains("this server has none"), "{refused}");
        assert!(!dir.path().join("secrets.key").exists(), "looking makes no key");
    }

    #[test]
    fn a_key_is_made_once_and_for_its_owner_alone() {
        let dir = tempfile::tempdir().unwrap();
        let keyring = Keyring::open(dir.path(), &KeySource::DataDirectory).unwrap();
        let sealed = keyring.seal("c", b"value").unwrap();
        let path = dir.path().join("secrets.key");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read(&path).unwrap().len(), 32);
        let again = Keyring::open(dir.path(), &KeySource::DataDirectory).unwrap();
        assert_eq!(*again.reveal("c", &sealed).unwrap(), b"value".to_vec());
        assert_eq!(again.derive("x").unwrap(), keyring.derive("x").unwrap());
        assert_ne!(again.derive("x").unwrap(), keyring.derive("y").unwrap());
    }

    #[test]
    fn key_files_of_an_operator() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let source = KeySource::File(path.clone());
        let put = |bytes: &[u8], mode: u32| {
            // One that only root may write is in the way of other users.
            let _ = fs::remove_file(&path);
            fs::write(&path, bytes).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        };
        assert!(matches!(Keyring::open(dir.path(), &source), Err(BadKey::Io { .. })));
        put(&[7; 32], 0o600);
        let raw = Keyring::open(dir.path(), &source).unwrap();
        put(format!("{}\n", STANDARD.encode([7; 32])).as_bytes(), 0o400);
        let text = Keyring::open(dir.path(), &source).unwrap();
        assert_eq!(raw.derive("x").unwrap(), text.derive("x").unwrap());
        put(&[7; 32], 0o640);
        assert!(matches!(Keyring::open(dir.path(), &source), Err(BadKey::Open(_))));
        for bad in [&[][..], &[7; 31], b"not a key", &[7; 33]] {
            put(bad, 0o600);
            assert!(matches!(Keyring::open(dir.path(), &source), Err(BadKey::NotAKeyFile(_))));
        }
        for bad in ["", "AAAA", "not base64!"] {
            let refused = KeySource::from_text(bad).unwrap_err();
            assert!(matches!(refused, BadKey::NotAKey), "{bad}");
        }
    }
}
