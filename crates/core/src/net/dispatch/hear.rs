//! Reads the first bytes of a connection, to find out what it is.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::GuestStream;
use crate::net::log::OpenFlow;
use crate::net::sniff::{self, Sniffed};

/// How long a connection may take to send its name.
const TELL_WITHIN: Duration = Duration::from_secs(10);

/// What was read from a connection.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Heard {
    Bytes(Sniffed),
    /// Nothing, for a moment.
    Silence,
    /// Too little, for too long.
    Stalled,
    /// All of it, which is nothing: it may still listen.
    Nothing,
    /// It broke off before it sent anything.
    Gone,
}

/// Reads until the bytes so far show what they are. With `quiet`, waits no longer than that for the
/// first of them.
pub(super) async fn hear<G: GuestStream>(
    guest: &mut G,
    first: &mut Vec<u8>,
    quiet: Option<Duration>,
) -> Heard {
    let deadline = Instant::now() + TELL_WITHIN;
    let quiet = quiet.map(|quiet| Instant::now() + quiet);
    loop {
        match sniff::look(first) {
            Sniffed::More => {}
            told => return Heard::Bytes(told),
        }
        let silent = first.is_empty();
        let until = quiet.filter(|_| silent).unwrap_or(deadline);
        let mut piece = [0; 4096];
        let room = piece.len().min(sniff::MOST - first.len());
        match timeout_at(until, guest.read(&mut piece[..room])).await {
            Err(_) if silent && quiet.is_some() => return Heard::Silence,
            Err(_) => return Heard::Stalled,
            Ok(Ok(0)) if silent => return Heard::Nothing,
            Ok(Err(_)) if silent => return Heard::Gone,
            // All it had to say.
            Ok(Ok(0) | Err(_)) => return Heard::Bytes(sniff::look_at_all(first)),
            Ok(Ok(count)) => first.extend_from_slice(&piece[..count]),
        }
    }
}

/// As [`hear`], for a connection that was dialled: what the server sends meanwhile is forwarded.
/// `None` if there is nothing to wait for, because one of them will send no more.
pub(super) async fn hear_both<G: GuestStream>(
    guest: &mut G,
    outside: &mut TcpStream,
    first: &mut Vec<u8>,
    open: &OpenFlow,
) -> io::Result<Option<Heard>> {
    let mut served = vec![0; 16 << 10];
    let mut piece = [0; 4096];
    let (mut spoke, mut ended) = (false, false);
    let mut until = Instant::now();
    loop {
        match sniff::look(first) {
            Sniffed::More => {}
            told => return Ok(Some(Heard::Bytes(after(told, spoke)))),
        }
        let room = piece.len().min(sniff::MOST - first.len());
        tokio::select! {
            () = sleep_until(until), if !first.is_empty() => return Ok(Some(Heard::Stalled)),
            count = outside.read(&mut served), if !ended => match count? {
                0 if first.is_empty() => return Ok(None),
                0 => ended = true,
                count => {
                    spoke = true;
                    open.received(count as u64);
                    guest.write_all(&served[..count]).await?;
                }
            },
            count = guest.read(&mut piece[..room]) => match count? {
                0 if first.is_empty() => return Ok(None),
                0 => return Ok(Some(Heard::Bytes(after(sniff::look_at_all(first), spoke)))),
                count => {
                    if first.is_empty() {
                        until = Instant::now() + TELL_WITHIN;
                    }
                    first.extend_from_slice(&piece[..count]);
                }
            },
        }
    }
}

/// What first bytes are after the server `spoke`: no server of TLS does so before it is greeted, and in other protocols
/// the same bytes are a length.
fn after(told: Sniffed, spoke: bool) -> Sniffed {
    if spoke && told == Sniffed::Tls(None) { Sniffed::Other } else { told }
}
