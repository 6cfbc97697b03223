//! Reports the server's state to the service manager, as `sd_notify(3)` describes: `Type=notify` in
//! a unit waits for it.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Where the service manager listens, if there is one.
const SOCKET: &str = "NOTIFY_SOCKET";

/// The server answers requests.
pub(crate) const READY: &str = "READY=1";
/// The server is shutting down.
pub(crate) const STOPPING: &str = "STOPPING=1";

/// Reports to the service manager, if there is one.
pub(crate) fn tell(state: &str) {
    let Some(socket) = std::env::var_os(SOCKET).filter(|socket| !socket.is_empty()) else { return };
    if let Err(error) = send(&socket, state) {
        tracing::warn!(%error, "cannot tell the service manager `{state}`");
    }
}

fn send(socket: &OsStr, state: &str) -> io::Result<()> {
    let address = match socket.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        path => SocketAddr::from_pathname(OsStr::from_bytes(path))?,
    };
    let sender = UnixDatagram::unbound()?;
    // A manager that does not read must not hold up the server.
    sender.set_nonblocking(true)?;
    sender.send_to_addr(state.as_bytes(), &address).map(drop)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::os::linux::net::SocketAddrExt as _;
    use std::os::unix::net::{SocketAddr, UnixDatagram};

    use super::{READY, send};

    #[test]
    fn a_manager_is_told_at_a_path_and_at_an_abstract_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let name = format!("sandkeep-notify-{}", std::process::id());
        let abstract_name = SocketAddr::from_abstract_name(&name).unwrap();
        for (manager, socket) in [
            (UnixDatagram::bind(&path).unwrap(), path.into_os_string()),
            (UnixDatagram::bind_addr(&abstract_name).unwrap(), OsString::from(format!("@{name}"))),
        ] {
            send(&socket, READY).unwrap();
            let mut told = [0; 64];
            let length = manager.recv(&mut told).unwrap();
            assert_eq!(&told[..length], b"READY=1");
        }
        assert!(send("/no/such/socket".as_ref(), READY).is_err());
    }
}
