//! Connecting to a socket file with a deadline.

use std::io;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::sockopt::Timeout;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Connects to a socket file. The listener may have been stopped, and with enough connections
/// waiting for it the kernel lets the next wait too: no longer than `patience`.
pub(crate) fn connect(path: &str, patience: Duration) -> io::Result<UnixStream> {
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    rustix::net::sockopt::set_socket_timeout(&socket, Timeout::Send, Some(patience))?;
    match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
        Ok(()) => {}
        Err(rustix::io::Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
        Err(error) => return Err(error.into()),
    }
    rustix::net::sockopt::set_socket_timeout(&socket, Timeout::Send, None)?;
    Ok(UnixStream::from(socket))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::time::Duration;

    #[test]
    fn a_listener_that_never_accepts_is_not_waited_for_without_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let _listener = UnixListener::bind(&path).unwrap();
        let path = path.to_str().unwrap();
        let mut held = Vec::new();
        // More than the kernel lets wait for a listener.
        let refused =
            (0..10_000).find_map(|_| match super::connect(path, Duration::from_millis(50)) {
                Ok(socket) => {
                    held.push(socket);
                    None
                }
                Err(error) => Some(error),
            });
        assert_eq!(refused.map(|error| error.kind()), Some(std::io::ErrorKind::TimedOut));
    }
}
