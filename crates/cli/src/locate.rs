//! Finding the server, and the data directory it works in.
//!
//! A client connects, in this order, to the configured server (`--url`, `SANDKEEP_URL`), and to the
//! server whose `client.json` it can read in `--data` or `SANDKEEP_DATA`, else in the data
//! directories a server uses by default. `keep serve` writes that file for its owner only: it holds
//! a key.
//!
//! The file says which directory it was written in. One that was copied along with the directory
//! speaks of the original's server, and a user who names the copy does not mean that one: it counts
//! as absent until a server of the copy writes its own.

use std::fs;
use std::io;
use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use sandkeep_client::{Client, Endpoint};
use serde::{Deserialize, Serialize};

use crate::args::Global;
use crate::failure::Failure;

/// Where root's server keeps its data, unless [`SYSTEM_CONFIG`] says otherwise.
pub(crate) const SYSTEM_DATA: &str = "/var/lib/sandkeep";

/// The settings of an installed server.
pub(crate) const SYSTEM_CONFIG: &str = "/etc/sandkeep/config.toml";

/// The file by which a server makes itself known to clients on the same machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ClientFile {
    /// Its HTTP address, if it listens on one.
    pub(crate) url: Option<String>,
    /// Its socket file, if it listens on one.
    pub(crate) unix_socket: Option<PathBuf>,
    /// A key that may do everything.
    pub(crate) key: String,
    /// The CA certificates to trust for its HTTPS address, if the system does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ca: Option<PathBuf>,
}

/// A directory, whatever its path is: a move keeps this, a copy has another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct DirectoryId {
    device: u64,
    inode: u64,
}

impl DirectoryId {
    fn of(path: &Path) -> io::Result<Self> {
        let stat = fs::metadata(path)?;
        Ok(Self { device: stat.dev(), inode: stat.ino() })
    }
}

/// The file as it is on disk.
#[derive(Debug, Serialize, Deserialize)]
struct StoredClientFile {
    #[serde(flatten)]
    file: ClientFile,
    /// The data directory it was written in; servers up to 0.1 did not say.
    directory: Option<DirectoryId>,
}

impl ClientFile {
    const NAME: &str = "client.json";

    pub(crate) fn read(data: &Path) -> io::Result<Self> {
        let text = fs::read(data.join(Self::NAME))?;
        let stored: StoredClientFile = serde_json::from_slice(&text)?;
        match stored.directory {
            Some(directory) if directory != DirectoryId::of(data)? => {
                Err(io::Error::new(io::ErrorKind::NotFound, "it was copied from another directory"))
            }
            _ => Ok(stored.file),
        }
    }

    /// Whether a server wrote one, readable or not.
    pub(crate) fn is_in(data: &Path) -> bool {
        fs::symlink_metadata(data.join(Self::NAME)).is_ok()
    }

    /// Writes it so that only its owner can ever read it, and no reader sees half of it.
    pub(crate) fn write(&self, data: &Path) -> io::Result<()> {
        let fresh = data.join(".client.json.new");
        match fs::remove_file(&fresh) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file =
            fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&fresh)?;
        let stored =
            StoredClientFile { file: self.clone(), directory: Some(DirectoryId::of(data)?) };
        file.write_all(&serde_json::to_vec_pretty(&stored)?)?;
        file.sync_all()?;
        fs::rename(&fresh, data.join(Self::NAME))
    }

    /// Prefers the socket file: it needs no port and cannot be another program's.
    fn endpoint(&self) -> Option<Endpoint> {
        let socket = self.unix_socket.as_ref().filter(|path| path.exists());
        match (socket, &self.url) {
            (Some(path), _) => Some(Endpoint::Unix { path: path.clone() }),
            (None, Some(url)) => url.parse().ok(),
            (None, None) => None,
        }
    }
}

/// Finds the server and the key to it.
pub(crate) fn client(global: &Global) -> Result<Client, Failure> {
    let places = data_places(global.data.as_deref());
    let file = places
        .iter()
        .map(|place| (place, ClientFile::read(place)))
        .find(|(_, read)| !matches!(read, Err(error) if error.kind() == io::ErrorKind::NotFound));
    if let Some(url) = &global.url {
        let endpoint: Endpoint = url.parse()?;
        // A key found on this machine is for this machine's server, and goes to no other.
        let local = file.and_then(|(_, read)| read.ok());
        let local = local.filter(|local| local.url.as_deref() == Some(url) || {
            matches!(&endpoint, Endpoint::Unix { path } if local.unix_socket.as_ref() == Some(path))
        });
        let (local_key, local_ca) = local.map(|local| (local.key, local.ca)).unzip();
        let key = global.key.clone().or(local_key);
        return to(endpoint, key.as_deref(), global.ca.as_deref(), local_ca.flatten().as_deref());
    }
    match file {
        Some((_, Ok(local))) => {
            let endpoint = local.endpoint().ok_or_else(|| nowhere(&places))?;
            let key = global.key.as_deref().unwrap_or(&local.key);
            to(endpoint, Some(key), global.ca.as_deref(), local.ca.as_deref())
        }
        Some((place, Err(error))) => {
            let message = format!("cannot read `{}`", place.join(ClientFile::NAME).display());
            let hint = match error.kind() {
                io::ErrorKind::PermissionDenied => {
                    "run this as the user who runs `keep serve` (an installed service: `sudo keep ...`); or let that user make you a key \
                     with `keep key create NAME`, and set SANDKEEP_URL and SANDKEEP_KEY"
                }
                _ => "restart `keep serve`, which writes the file anew",
            };
            Err(Failure::caused(message, error).with_hint(hint))
        }
        None => Err(nowhere(&places)),
    }
}

/// A client that trusts the given CA certificates, else those that the local server names, else the
/// system's alone.
fn to(
    endpoint: Endpoint,
    key: Option<&str>,
    given: Option<&Path>,
    local: Option<&Path>,
) -> Result<Client, Failure> {
    let is_tls = matches!(endpoint, Endpoint::Tls { .. });
    match given.or(local.filter(|path| is_tls && path.exists())) {
        Some(ca) => Ok(Client::trusting(endpoint, key, ca)?),
        None => Ok(Client::new(endpoint, key)?),
    }
}

/// The CA certificates that clients of the server's HTTP address need, if the system's do not do.
pub(crate) fn ca(global: &Global) -> Option<PathBuf> {
    let places = data_places(global.data.as_deref());
    let known = || places.iter().find_map(|place| ClientFile::read(place).ok()?.ca);
    global.ca.clone().or_else(known)
}

/// The server's HTTP address, for clients that cannot use a socket file.
pub(crate) fn http_url(global: &Global) -> Result<String, Failure> {
    if let Some(url) = global.url.as_ref().filter(|url| url.starts_with("http")) {
        return Ok(url.trim_end_matches('/').to_owned());
    }
    let places = data_places(global.data.as_deref());
    let known = places.iter().find_map(|place| ClientFile::read(place).ok()?.url);
    known.ok_or_else(|| {
        Failure::here("the server has no HTTP address")
            .with_hint("start it with --listen, or give its address with --url http://host:port")
    })
}

fn nowhere(places: &[PathBuf]) -> Failure {
    let looked: Vec<String> = places.iter().map(|place| place.display().to_string()).collect();
    Failure::NoServer { looked: looked.join(", ") }
}

/// Where a server's data may be, the likeliest first.
fn data_places(told: Option<&Path>) -> Vec<PathBuf> {
    if let Some(told) = told {
        return vec![told.to_path_buf()];
    }
    user_data().into_iter().chain([system_data(Path::new(SYSTEM_CONFIG))]).collect()
}

/// The data directory that is meant when none is named.
pub(crate) fn default_data() -> PathBuf {
    let system = || system_data(Path::new(SYSTEM_CONFIG));
    match rustix::process::geteuid().is_root() {
        true => system(),
        false => user_data().unwrap_or_else(system),
    }
}

/// Where an installed server keeps its data. What else is in its settings, and whether it is right, is the server's to say.
fn system_data(config: &Path) -> PathBuf {
    #[derive(Deserialize)]
    struct Data {
        data: Option<PathBuf>,
    }
    let text = fs::read_to_string(config).unwrap_or_default();
    let told = toml::from_str::<Data>(&text).ok().and_then(|file| file.data);
    told.filter(|data| data.is_absolute()).unwrap_or_else(|| PathBuf::from(SYSTEM_DATA))
}

fn user_data() -> Option<PathBuf> {
    let from =
        |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    from("XDG_DATA_HOME")
        .or_else(|| from("HOME").map(|home| home.join(".local/share")))
        .map(|share| share.join("sandkeep"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::PathBuf;

    use super::{ClientFile, SYSTEM_DATA, client, system_data};
    use crate::args::Global;

    fn global(data: &std::path::Path, url: Option<&str>) -> Global {
        Global {
            json: false,
            url: url.map(str::to_owned),
            key: None,
            project: None,
            ca: None,
            data: Some(data.to_path_buf()),
        }
    }

    fn file() -> ClientFile {
        ClientFile {
            url: Some("http://127.0.0.1:7001".to_owned()),
            unix_socket: Some(PathBuf::from("/nowhere/keep.sock")),
            key: "skp_x".to_owned(),
            ca: None,
        }
    }

    #[test]
    fn the_servers_file_is_for_its_owner_only_and_is_found() {
        let data = tempfile::tempdir().unwrap();
        file().write(data.path()).unwrap();
        file().write(data.path()).unwrap();
        let mode = data.path().join("client.json").metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(ClientFile::read(data.path()).unwrap(), file());
        let found = client(&global(data.path(), None)).unwrap();
        assert_eq!(found.endpoint().to_string(), "http://127.0.0.1:7001");
        assert!(found.has_key());
    }

    #[test]
    fn a_copied_file_does_not_lead_to_the_originals_server() {
        let data = tempfile::tempdir().unwrap();
        let original = data.path().join("original");
        std::fs::create_dir(&original).unwrap();
        file().write(&original).unwrap();
        let moved = data.path().join("moved");
        std::fs::rename(&original, &moved).unwrap();
        assert_eq!(ClientFile::read(&moved).unwrap(), file());
        let copy = data.path().join("copy");
        std::fs::create_dir(&copy).unwrap();
        std::fs::copy(moved.join("client.json"), copy.join("client.json")).unwrap();
        assert_eq!(client(&global(&copy, None)).unwrap_err().exit_code(), 3);
    }

    #[test]
    fn the_local_key_goes_to_the_local_server_only() {
        let data = tempfile::tempdir().unwrap();
        file().write(data.path()).unwrap();
        let to = |url| client(&global(data.path(), Some(url))).unwrap();
        assert!(to("http://127.0.0.1:7001").has_key());
        assert!(!to("http://203.0.113.9:7001").has_key());
    }

    #[test]
    fn clients_look_where_the_installed_server_keeps_its_data() {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("config.toml");
        let usual = PathBuf::from(SYSTEM_DATA);
        assert_eq!(system_data(&config), usual, "there is none");
        for (text, data) in [
            ("data = '/srv/keep'\n[gateway]\nwait = '1s'", PathBuf::from("/srv/keep")),
            ("listen = 'off'", usual.clone()),
            ("data = 'relative'", usual.clone()),
            ("data = ", usual.clone()),
        ] {
            std::fs::write(&config, text).unwrap();
            assert_eq!(system_data(&config), data, "{text}");
        }
    }

    #[test]
    fn no_server_is_told_with_advice() {
        let data = tempfile::tempdir().unwrap();
        let failure = client(&global(data.path(), None)).unwrap_err();
        assert_eq!(failure.exit_code(), 3);
        assert!(failure.hint().is_some_and(|hint| hint.contains("keep serve")), "{failure:?}");
    }
}
