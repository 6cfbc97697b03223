//! Connections through a machine's serial port: see [`sandkeep_proto::serial`].

use std::io;
use std::time::Duration;

use bytes::BytesMut;
use sandkeep_proto::serial::{Decoder, Heard, Nonce};
use tokio::net::UnixStream;
use tokio::time::{Instant, timeout_at};

use super::GuestError;

/// How long the agent may take to begin a connection before it is asked again.
pub(super) const AGAIN: Duration = Duration::from_millis(250);

/// How long one socket is tried. A machine that printed in the very moment in which a daemon died, or while it was held, finds its
/// port *throttled*: QEMU stopped reading it when a write to the dead daemon failed, and forgets that only when another connection
/// is closed. So one that stays silent is given up and dialled again.
const ONE_SOCKET: Duration = Duration::from_secs(2);

/// What comes out of a port on which a connection has begun.
#[derive(Debug)]
pub(super) struct SerialPort {
    decoder: Decoder,
    nonce: Nonce,
    /// Whether the agent has confirmed that the connection begins.
    begun: bool,
    /// Whether any of the connection's bytes have come.
    started: bool,
}

impl SerialPort {
    /// A port whose agent was asked to begin a connection, and has not answered yet.
    pub(super) fn expecting(nonce: Nonce) -> Self {
        Self { decoder: Decoder::new(), nonce, begun: false, started: false }
    }

    /// Adds what `raw` holds of the connection to `bytes`. False when the connection is over.
    pub(super) fn take(&mut self, mut raw: &[u8], bytes: &mut BytesMut) -> bool {
        while let Some(heard) = self.decoder.next(&mut raw) {
            match heard {
                Heard::Bytes(more) if self.begun => {
                    self.started = true;
                    bytes.extend_from_slice(more);
                }
                // The answer, perhaps to one of several times it was asked.
                Heard::Begin(nonce) if nonce == self.nonce && !self.started => self.begun = true,
                Heard::Begin(_) if self.begun => return false,
                // What connections before have left.
                Heard::Begin(_) | Heard::Bytes(_) => {}
            }
        }
        !(self.begun && self.decoder.is_lost())
    }
}

/// What the next connection is known by.
pub(super) fn nonce() -> Result<Nonce, GuestError> {
    let mut random = [0; 16];
    getrandom::fill(&mut random)
        .map_err(|error| GuestError::Protocol { reason: format!("no random bytes: {error}") })?;
    Ok(Nonce::new(random))
}

/// Begins a connection, as often as it takes. None when the socket was closed, or nothing came for a while: dial again.
pub(super) async fn begin(
    socket: &UnixStream,
    deadline: Instant,
) -> Result<Option<SerialPort>, GuestError> {
    let nonce = nonce()?;
    let mut port = SerialPort::expecting(nonce);
    let given_up = Instant::now() + ONE_SOCKET;
    loop {
        let asked = timeout_at(deadline, write(socket, &nonce.mark())).await;
        if asked.map_err(|_| GuestError::Timeout)?.is_err() {
            return Ok(None);
        }
        let again = deadline.min(Instant::now() + AGAIN);
        match timeout_at(again, answer(socket, &mut port)).await {
            Ok(Ok(())) => return Ok(Some(port)),
            Ok(Err(_)) => return Ok(None),
            Err(_) if again == deadline => return Err(GuestError::Timeout),
            Err(_) if Instant::now() >= given_up => return Ok(None),
            Err(_) => {}
        }
    }
}

async fn write(socket: &UnixStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        socket.writable().await?;
        match socket.try_write(bytes) {
            Ok(written) => bytes = bytes.get(written..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Drops everything until the connection has begun. The agent sends nothing of it before it is asked something.
async fn answer(socket: &UnixStream, port: &mut SerialPort) -> io::Result<()> {
    let mut raw = vec![0; 4096];
    loop {
        // A port that always has data would keep timers from being polled.
        tokio::task::consume_budget().await;
        socket.readable().await?;
        let count = match socket.try_read(&mut raw) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(error) => return Err(error),
        };
        let mut bytes = raw.get(..count).unwrap_or_default();
        let mut begun = false;
        while let Some(heard) = port.decoder.next(&mut bytes) {
            match heard {
                Heard::Begin(nonce) => begun = nonce == port.nonce,
                Heard::Bytes(_) => begun = false,
            }
        }
        if begun {
            port.begun = true;
            return Ok(());
        }
    }
}
