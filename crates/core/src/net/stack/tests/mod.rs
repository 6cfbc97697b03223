//! A stack between a simulated sandbox and the host's real loopback.
//!
//! A pair of sockets that keep messages apart stands for the device. At its other end is either a second smoltcp, for
//! a sandbox that behaves, or packets written by hand, for one that does not.

mod datagrams;
mod fuzz;
mod guest;
mod hostile;
mod tcp;

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::device::PacketDevice;
use super::{Stack, StackLimits, Stream, relay};
use crate::model::Device;
use crate::model::{Connection, Protocol, SessionId};
use crate::net::flow::{Datagrams, FlowHandler, OpenDecision};
use crate::net::log::{ConnectionLog, FlowInfo, Journal, OpenFlow, Traffic};
use crate::net::sockets::{NoSocket, SandboxSockets};

/// Both ends of a device.
fn device() -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
}

/// The handler's answer about an address.
#[derive(Debug, Clone, Copy)]
enum Say {
    Dial(SocketAddr),
    /// Accepted, and everything is sent back.
    Echo,
    /// Accepted, and answered without reading the request.
    Answer(&'static [u8]),
}

/// A handler that gives preset answers, and remembers what it was asked.
#[derive(Debug)]
struct FakeHandler {
    say: Mutex<HashMap<SocketAddr, Say>>,
    log: Arc<ConnectionLog>,
    asked: AtomicUsize,
    unanswered: Mutex<Vec<io::ErrorKind>>,
    no_socket: Mutex<Vec<NoSocket>>,
    carried: Mutex<Vec<Arc<OpenFlow>>>,
}

#[derive(Debug, Default)]
struct Lines(Mutex<Vec<Connection>>);

impl Journal for Lines {
    fn write(&self, connection: Connection) {
        self.0.lock().unwrap().push(connection);
    }
}

impl FakeHandler {
    fn new() -> Arc<Self> {
        let journal = Arc::new(Lines::default());
        let log = ConnectionLog::new(SessionId::fresh(), journal, Traffic::default());
        Arc::new(Self {
            say: Mutex::default(),
            log,
            asked: AtomicUsize::new(0),
            unanswered: Mutex::default(),
            no_socket: Mutex::default(),
            carried: Mutex::default(),
        })
    }

    fn say(&self, to: SocketAddr, say: Say) {
        self.say.lock().unwrap().insert(to, say);
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }

    fn open(&self, protocol: Protocol, to: SocketAddr) -> Arc<OpenFlow> {
        let info = FlowInfo { protocol, to: Some(to), name: None, rule: "told".into() };
        self.log.begin(info)
    }
}

#[async_trait]
impl FlowHandler for FakeHandler {
    fn open(&self, to: SocketAddr) -> OpenDecision {
        self.asked.fetch_add(1, Ordering::Relaxed);
        match self.say.lock().unwrap().get(&to) {
            None => OpenDecision::Refuse,
            Some(Say::Dial(address)) => {
                OpenDecision::Dial(*address, FakeHandler::open(self, Protocol::Tcp, to))
            }
            Some(Say::Echo | Say::Answer(_)) => OpenDecision::Serve,
        }
    }

    fn no_socket(&self, _: Protocol, _: SocketAddr, why: NoSocket) {
        self.no_socket.lock().unwrap().push(why);
    }

    fn unanswered(&self, _: &OpenFlow, error: &io::Error) {
        self.unanswered.lock().unwrap().push(error.kind());
    }

    async fn relay(self: Arc<Self>, guest: Stream, outside: TcpStream, open: Arc<OpenFlow>) {
        self.carried.lock().unwrap().push(Arc::clone(&open));
        let _ = relay(guest, outside, &open).await;
        self.carried.lock().unwrap().retain(|one| !Arc::ptr_eq(one, &open));
    }

    async fn serve(self: Arc<Self>, mut guest: Stream, to: SocketAddr) {
        let say = self.say.lock().unwrap().get(&to).copied();
        match say {
            Some(Say::Answer(answer)) => guest.write_all(answer).await.unwrap(),
            _ => {
                let mut buffer = vec![0; 32 * 1024];
                while let Ok(bytes @ 1..) = guest.read(&mut buffer).await {
                    if guest.write_all(&buffer[..bytes]).await.is_err() {
                        return;
                    }
                }
                let _ = guest.shutdown().await;
            }
        }
    }

    fn datagrams(&self, protocol: Protocol, to: SocketAddr) -> Option<Datagrams> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        match self.say.lock().unwrap().get(&to) {
            Some(Say::Dial(address)) => {
                let open = FakeHandler::open(self, protocol, to);
                self.carried.lock().unwrap().push(Arc::clone(&open));
                Some(Datagrams { to: *address, open })
            }
            _ => None,
        }
    }

    async fn lookup(self: Arc<Self>, query: Vec<u8>) -> Option<Vec<u8>> {
        (!query.is_empty()).then(|| query.iter().rev().copied().collect())
    }
}

/// A stack with its device's other end.
fn start(limits: StackLimits, handler: &Arc<FakeHandler>) -> (Stack, Arc<PacketDevice>, OwnedFd) {
    start_with(limits, handler, SandboxSockets::few(10_000))
}

/// A stack with a limit of sockets on the host.
fn start_with(
    limits: StackLimits,
    handler: &Arc<FakeHandler>,
    sockets: SandboxSockets,
) -> (Stack, Arc<PacketDevice>, OwnedFd) {
    let (ours, theirs) = device();
    let device = Arc::new(PacketDevice::new(Device::Tun(ours)).unwrap());
    let handler: Arc<dyn FlowHandler> = Arc::clone(handler) as Arc<dyn FlowHandler>;
    (Stack::with(limits, Arc::clone(&device), handler, sockets), device, theirs)
}

/// An address outside that does not answer until the handler says otherwise.
fn outside(v4: bool, port: u16) -> SocketAddr {
    let ip: IpAddr = if v4 { "192.0.2.7" } else { "2001:db8::7" }.parse().unwrap();
    SocketAddr::new(ip, port)
}

/// Bytes that differ by where they are.
fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|at| u8::try_from((at * 7 + at / 251) % 256).unwrap()).collect()
}
