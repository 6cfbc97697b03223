//! The fast path: bytes go between a connection's ring buffers and a socket outside, with no buffer in between.
//!
//! A [`RelaySocket`] is the socket outside, attached to the connection. The holder of the
//! connection's lock moves the bytes that can be moved: the stack's task right after a packet,
//! [`relay`] when the socket is ready. `relay` itself only waits for what the relay lacks: bytes to
//! read, or room to write. A ring that is full is not read into, and a socket that takes no more
//! leaves the ring full, which closes the window: that is all the back-pressure there is, and all
//! that is needed.

use std::io;
use std::net::Shutdown;
use std::pin::pin;
use std::sync::Arc;

use socket2::SockRef;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::sync::Notify;

use super::stream::Stream;
use super::tcp::end_abruptly;
use super::tcp_state::{Readable, TcpStateMachine};
use crate::net::log::OpenFlow;

/// A socket outside that a connection is carried to.
#[derive(Debug)]
pub(super) struct RelaySocket {
    outside: Arc<TcpStream>,
    open: Arc<OpenFlow>,
    /// Something changed that [`relay`] must know.
    wake: Arc<Notify>,
    /// What [`relay`] waits for.
    awaited: SocketReadiness,
    wants: SocketReadiness,
    /// All that the sandbox had to say went out.
    sent_all: bool,
    /// All that outside had to say is in the ring.
    heard_all: bool,
    failed: Option<io::Error>,
}

/// What a relay waits for at its socket: bytes, or room for them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct SocketReadiness {
    readable: bool,
    writable: bool,
}

impl SocketReadiness {
    fn interest(self) -> Option<Interest> {
        match (self.readable, self.writable) {
            (true, true) => Some(Interest::READABLE | Interest::WRITABLE),
            (true, false) => Some(Interest::READABLE),
            (false, true) => Some(Interest::WRITABLE),
            (false, false) => None,
        }
    }
}

impl RelaySocket {
    /// Carries what can be carried now, both ways.
    pub(super) fn carry(&mut self, machine: &mut TcpStateMachine) {
        if !self.is_over() {
            self.wants = SocketReadiness::default();
            if let Err(error) = self.carry_out(machine).and_then(|()| self.carry_in(machine)) {
                self.failed = Some(error);
            }
        }
        let more = (self.wants.readable && !self.awaited.readable)
            || (self.wants.writable && !self.awaited.writable);
        if more || self.is_over() {
            self.wake.notify_one();
        }
    }

    /// [`relay`] looks at it now, and needs no wake-up.
    pub(super) fn attend(&mut self) {
        self.awaited = SocketReadiness { readable: true, writable: true };
    }

    fn is_over(&self) -> bool {
        self.failed.is_some() || (self.sent_all && self.heard_all)
    }

    fn carry_out(&mut self, machine: &mut TcpStateMachine) -> io::Result<()> {
        while !self.sent_all {
            match machine.readable() {
                Readable::Some => {}
                Readable::Nothing => return Ok(()),
                Readable::End => {
                    self.sent_all = true;
                    // A peer that is gone need not be notified.
                    let _ = SockRef::from(&*self.outside).shutdown(Shutdown::Write);
                    return Ok(());
                }
                Readable::Reset => return Err(io::ErrorKind::ConnectionReset.into()),
            }
            let outside = &self.outside;
            let written = machine.socket().recv(|data| match outside.try_write(data) {
                Ok(bytes) => (bytes, Ok(bytes)),
                Err(error) => (0, Err(error)),
            });
            match written {
                Ok(Ok(bytes)) => self.open.sent(bytes as u64),
                Ok(Err(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wants.writable = true;
                    return Ok(());
                }
                Ok(Err(error)) => return Err(error),
                Err(_) => return Err(io::ErrorKind::ConnectionReset.into()),
            }
        }
        Ok(())
    }

    fn carry_in(&mut self, machine: &mut TcpStateMachine) -> io::Result<()> {
        while !self.heard_all {
            if !machine.socket().may_send() {
                return Err(io::ErrorKind::ConnectionReset.into());
            }
            if !machine.socket().can_send() {
                return Ok(());
            }
            let outside = &self.outside;
            let read = machine.socket().send(|room| match outside.try_read(room) {
                Ok(bytes) => (bytes, Ok(bytes)),
                Err(error) => (0, Err(error)),
            });
            match read {
                Ok(Ok(0)) => {
                    self.heard_all = true;
                    machine.socket().close();
                }
                Ok(Ok(bytes)) => self.open.received(bytes as u64),
                Ok(Err(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wants.readable = true;
                    return Ok(());
                }
                Ok(Err(error)) => return Err(error),
                Err(_) => return Err(io::ErrorKind::ConnectionReset.into()),
            }
        }
        Ok(())
    }
}

/// Carries a dialled connection to its end, counting on `open`: each direction ends on its own, a slow side slows the
/// other down, and when it is cut both sides see a reset.
pub(in crate::net) async fn relay(
    guest: Stream,
    outside: TcpStream,
    open: &Arc<OpenFlow>,
) -> io::Result<()> {
    let outside = Arc::new(outside);
    let wake = Arc::new(Notify::new());
    guest.connection.attach(RelaySocket {
        outside: Arc::clone(&outside),
        open: Arc::clone(open),
        wake: Arc::clone(&wake),
        awaited: SocketReadiness::default(),
        wants: SocketReadiness::default(),
        sent_all: false,
        heard_all: false,
        failed: None,
    });
    let carried = tokio::select! {
        () = open.is_cut() => Err(io::ErrorKind::ConnectionAborted.into()),
        carried = carry(&guest, &outside, &wake) => carried,
    };
    if carried.is_err() {
        end_abruptly(&outside);
        guest.reset();
    }
    carried
}

async fn carry(guest: &Stream, outside: &TcpStream, wake: &Notify) -> io::Result<()> {
    let mut waken = pin!(wake.notified());
    loop {
        let lane = guest.connection.carry(|lane| {
            lane.awaited = lane.wants;
            (lane.is_over(), lane.failed.take(), lane.wants)
        });
        let wants = match lane {
            None => return Err(io::ErrorKind::ConnectionReset.into()),
            Some((true, None, _)) => return Ok(()),
            Some((_, Some(error), _)) => return Err(error),
            Some((false, None, wants)) => wants,
        };
        let ready = async {
            match wants.interest() {
                Some(interest) => outside.ready(interest).await.map(|_| ()),
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = waken.as_mut() => waken.set(wake.notified()),
            ready = ready => ready?,
        }
    }
}
