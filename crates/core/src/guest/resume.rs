//! Connecting to the agent of a machine that was resumed from captured memory.
//!
//! A machine that was just restored is slow to answer, especially where it is emulated: nothing it
//! does has been translated yet, and it does much else first. So it does not get one request after
//! the other. Everything it needs to know and to answer lies in its serial port before it resumes,
//! all in one piece ([`ResumeHandshake`]), and is found there with the first look.

use std::os::unix::net::UnixStream as Line;
use std::path::Path;
use std::time::Duration;

use sandkeep_proto::frame::{FrameKind, Header};
use sandkeep_proto::link::{Known, Renew, Reply, Request, VERSION};
use sandkeep_proto::serial::{Nonce, escaped};
use tokio::net::UnixStream;
use tokio::time::{Instant, timeout_at};
use zeroize::Zeroizing;

use super::connection::{AgentConnection, Handle};
use super::serial::{self, SerialPort};
use super::stream::unexpected;
use super::{Deadlines, Guest, GuestError, HELLO, greeted};

/// What an agent finds when its machine resumes: a connection begins, a greeting, and the requests
/// to it.
#[derive(Debug)]
pub struct ResumeHandshake {
    nonce: Nonce,
    /// It holds randomness that must stay secret.
    bytes: Zeroizing<Vec<u8>>,
    renews: bool,
}

/// An agent that was woken.
#[derive(Debug)]
pub struct ResumedGuest {
    /// The connection.
    pub guest: Guest,
    /// The commands it knows, once it has taken in what changed. Absent if neither was asked in the handshake, or if it was lost on the way: then
    /// both are still to be done.
    pub commands: Option<Vec<Known>>,
}

impl ResumeHandshake {
    /// A greeting; and, of a machine that knows its root, what changed and a question for its commands.
    ///
    /// # Errors
    ///
    /// Fails when the system has no random bytes.
    pub fn new(renew: Option<Renew>) -> Result<Self, GuestError> {
        let nonce = serial::nonce()?;
        let renews = renew.is_some();
        let mut requests = vec![Request::Hello { version: VERSION }];
        requests.extend(renew.into_iter().flat_map(|it| [Request::Renew(it), Request::Commands]));
        let mut bytes = Zeroizing::new(nonce.mark().to_vec());
        for (stream, request) in (1..).zip(&requests) {
            let json = serde_json::to_vec(request).map(Zeroizing::new);
            let json = json.map_err(|error| GuestError::Protocol { reason: error.to_string() })?;
            let header = Header { length: json.len(), stream, kind: FrameKind::Open }.encode();
            for part in [header.as_slice(), json.as_slice()] {
                escaped(part).for_each(|piece| bytes.extend_from_slice(piece));
            }
        }
        Ok(Self { nonce, bytes, renews })
    }

    /// The bytes to be written to the serial port before the machine resumes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

impl Guest {
    /// Reads an agent's answer to a handshake that was written to `line`. An agent that gave that
    /// connection up is dialled and greeted again.
    ///
    /// # Errors
    ///
    /// As [`connect_serial`](Self::connect_serial), and with [`GuestError::Refused`] when what changed could not be taken in.
    pub async fn resume(
        line: Line,
        socket: &Path,
        handshake: ResumeHandshake,
        patience: Duration,
    ) -> Result<ResumedGuest, GuestError> {
        let deadline = Instant::now() + patience;
        let failed = |source| GuestError::Io { path: socket.to_owned(), source };
        line.set_nonblocking(true).map_err(failed)?;
        let line = UnixStream::from_std(line).map_err(failed)?;
        match Self::hear(line, &handshake, deadline).await {
            Err(GuestError::Timeout | GuestError::Lost) if Instant::now() < deadline => {}
            woken => return woken,
        }
        let guest = Self::begin_serial(socket, deadline).await?;
        Ok(ResumedGuest { guest, commands: None })
    }

    async fn hear(
        line: UnixStream,
        handshake: &ResumeHandshake,
        deadline: Instant,
    ) -> Result<ResumedGuest, GuestError> {
        let asked = if handshake.renews { 3 } else { 1 };
        let (owner, handles) =
            AgentConnection::go_on(line, SerialPort::expecting(handshake.nonce), asked);
        let mut handles = handles.into_iter();
        let mut answer = async |until| -> Result<Reply, GuestError> {
            let handle: Handle = handles.next().ok_or(GuestError::Lost)?;
            let reply = timeout_at(until, handle.reply()).await.map_err(|_| GuestError::Timeout)?;
            handle.forget();
            reply
        };
        let hello = answer(deadline.min(Instant::now() + HELLO)).await?;
        let deadlines = Deadlines::default();
        let guest = Self { owner, generation: greeted(hello)?.into(), deadlines };
        if !handshake.renews {
            return Ok(ResumedGuest { guest, commands: None });
        }
        // It answers; what it does now may take its time.
        let until = Instant::now() + deadlines.reply;
        let Reply::Hello { .. } = answer(until).await? else { return Err(unexpected()) };
        let Reply::Commands { commands } = answer(until).await? else {
            return Err(unexpected());
        };
        Ok(ResumedGuest { guest, commands: Some(commands) })
    }
}
