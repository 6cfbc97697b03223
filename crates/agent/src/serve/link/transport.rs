//! What a connection goes through: a socket of its own, or the machine's one serial port.
//!
//! A port is shared by all connections, one after the other: see [`sandkeep_proto::serial`]. What is read from it beyond the
//! beginning of the next connection is kept for that one.
//!
//! The kernel calls a port with nobody at its other end *hung up*, which the runtime takes for the
//! end of the stream. So it is watched by an `epoll` of our own, which only reports changes, and
//! the runtime watches that.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::rc::Rc;
use std::time::Duration;

use rustix::event::epoll;
use rustix::io::Errno;
use sandkeep_proto::serial::{Decoder, Heard, Nonce, escaped};
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;
use tokio::sync::Notify;

use crate::serve::command::launch;

/// How much is read from a port at one time; it gives no more than a page.
const READ: usize = 4 << 10;

/// Where a connection's bytes come from and go to.
#[derive(Debug)]
pub(crate) enum Transport {
    Socket(UnixStream),
    Port(Rc<Port>),
}

impl Transport {
    /// Adds bytes to what is to be written, in the form in which they are.
    pub(crate) fn add(&self, queue: &mut Vec<u8>, bytes: &[u8]) {
        match self {
            Self::Socket(_) => queue.extend_from_slice(bytes),
            Self::Port(_) => escaped(bytes).for_each(|piece| queue.extend_from_slice(piece)),
        }
    }

    pub(crate) async fn readable(&self) -> io::Result<()> {
        match self {
            Self::Socket(socket) => socket.readable().await,
            Self::Port(port) => {
                port.wait(&port.can_read).await;
                Ok(())
            }
        }
    }

    pub(crate) async fn writable(&self) -> io::Result<()> {
        match self {
            Self::Socket(socket) => socket.writable().await,
            Self::Port(port) => {
                port.wait(&port.can_write).await;
                Ok(())
            }
        }
    }

    /// Reads what there is; nothing when the connection is over.
    pub(crate) fn try_read(&self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Socket(socket) => socket.try_read(into),
            Self::Port(port) => port.try_read(into),
        }
    }

    pub(crate) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Socket(socket) => socket.try_write(bytes),
            Self::Port(port) => port.try_write(bytes),
        }
    }
}

/// A virtio serial port, open and not blocking.
#[derive(Debug)]
pub(crate) struct Port {
    device: OwnedFd,
    changes: AsyncFd<OwnedFd>,
    /// Whether trying may be worth while.
    can_read: Cell<bool>,
    can_write: Cell<bool>,
    changed: Notify,
    incoming: RefCell<Incoming>,
}

#[derive(Debug, Default)]
struct Incoming {
    decoder: Decoder,
    /// What was read and not looked at.
    raw: Vec<u8>,
    used: usize,
    /// What begins next.
    begun: Option<Nonce>,
}

impl Port {
    /// Takes over an open port. To be called inside the runtime.
    pub(crate) fn new(device: OwnedFd) -> io::Result<Rc<Self>> {
        let changes = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let all = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
        epoll::add(&changes, &device, epoll::EventData::new_u64(0), all)?;
        Ok(Rc::new(Self {
            device,
            changes: launch::watch(changes, tokio::io::Interest::READABLE)?,
            can_read: Cell::new(true),
            can_write: Cell::new(true),
            changed: Notify::new(),
            incoming: RefCell::default(),
        }))
    }

    /// Notifies the waiting tasks that something has changed, for as long as the agent lives.
    pub(crate) async fn watch(self: Rc<Self>) {
        loop {
            let Ok(mut ready) = self.changes.readable().await else {
                tokio::time::sleep(Duration::from_millis(10)).await;
                continue;
            };
            ready.clear_ready();
            let mut events = [epoll::Event {
                flags: epoll::EventFlags::empty(),
                data: epoll::EventData::new_u64(0),
            }];
            let at_once = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
            // An event only means that it is worth a try.
            let _ = epoll::wait(self.changes.get_ref().as_fd(), &mut events, Some(&at_once));
            self.can_read.set(true);
            self.can_write.set(true);
            self.changed.notify_waiters();
        }
    }

    async fn wait(&self, may: &Cell<bool>) {
        while !may.get() {
            self.changed.notified().await;
        }
    }

    fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        rustix::io::write(&self.device, bytes).map_err(|error| {
            if error == Errno::AGAIN {
                self.can_write.set(false);
            }
            error.into()
        })
    }

    fn try_read(&self, into: &mut [u8]) -> io::Result<usize> {
        let incoming = &mut *self.incoming.borrow_mut();
        if incoming.begun.is_some() {
            return Ok(0);
        }
        loop {
            let Incoming { decoder, raw, used, begun } = incoming;
            let mut rest = raw.get(*used..).unwrap_or_default();
            // The end of what is decoded at one time must fit.
            let most = rest.len().min(into.len());
            rest = rest.get(..most).unwrap_or_default();
            let before = rest.len();
            match decoder.next(&mut rest) {
                Some(Heard::Bytes(bytes)) => {
                    *used += before - rest.len();
                    into.get_mut(..bytes.len()).unwrap_or_default().copy_from_slice(bytes);
                    return Ok(bytes.len());
                }
                Some(Heard::Begin(nonce)) => {
                    *used += before - rest.len();
                    *begun = Some(nonce);
                    return Ok(0);
                }
                None => *used += before,
            }
            if *used < raw.len() {
                continue;
            }
            if decoder.is_lost() {
                return Ok(0);
            }
            if !incoming.fill(&self.device, &self.can_read)? {
                return Ok(0);
            }
        }
    }

    /// Waits until a connection begins.
    pub(crate) async fn begin(&self) -> Nonce {
        loop {
            if let Some(nonce) = self.heard() {
                return nonce;
            }
            self.wait(&self.can_read).await;
        }
    }

    /// The connection that begins next, as far as can be read. Everything else is dropped.
    fn heard(&self) -> Option<Nonce> {
        let incoming = &mut *self.incoming.borrow_mut();
        loop {
            if let Some(nonce) = incoming.begun.take().filter(|nonce| *nonce != Nonce::NONE) {
                return Some(nonce);
            }
            let Incoming { decoder, raw, used, begun } = incoming;
            let mut rest = raw.get(*used..).unwrap_or_default();
            while let Some(heard) = decoder.next(&mut rest) {
                if let Heard::Begin(nonce) = heard {
                    *begun = Some(nonce);
                    break;
                }
            }
            *used = raw.len() - rest.len();
            if begun.is_some() {
                continue;
            }
            match incoming.fill(&self.device, &self.can_read) {
                Ok(true) => {}
                // No peer is connected: a change when one connects.
                Ok(false) => {
                    self.can_read.set(false);
                    return None;
                }
                Err(_) => return None,
            }
        }
    }

    /// Drops what still comes of the connection that was, and says so, unless another has begun.
    pub(crate) fn give_up(&self) {
        let incoming = &mut *self.incoming.borrow_mut();
        if incoming.begun.is_none() {
            incoming.decoder.give_up();
            // Only to end a wait sooner: if it is not taken, or in part, the next mark is understood all the same.
            let _ = self.try_write(&Nonce::NONE.mark());
        }
    }
}

impl Incoming {
    /// Reads more, when all was looked at. False when nobody is at the other end.
    fn fill(&mut self, device: &OwnedFd, can_read: &Cell<bool>) -> io::Result<bool> {
        // It may have held secrets, and memory may be kept.
        self.raw.fill(0);
        self.used = 0;
        self.raw.resize(READ, 0);
        let read = rustix::io::read(device, self.raw.as_mut_slice());
        self.raw.truncate(read.unwrap_or(0));
        match read {
            Ok(count) => Ok(count > 0),
            Err(Errno::INTR) => Ok(true),
            Err(error) => {
                can_read.set(false);
                Err(if error == Errno::AGAIN {
                    io::ErrorKind::WouldBlock.into()
                } else {
                    error.into()
                })
            }
        }
    }
}
