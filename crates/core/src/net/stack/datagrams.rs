//! Datagrams and echo requests: flows that begin with a packet and end in silence.
//!
//! A flow has a connected socket of its own, so the kernel lets in only what comes from where the sandbox sent to. What
//! comes is delivered by a task of the flow. A flow that was refused is kept for a moment, so that who repeats
//! himself asks nothing again; flows are bounded, and the one that was silent longest makes room.
//!
//! Echo requests go out over the kernel's own echo sockets, which need no right, or over raw ones where the host has
//! switched those off.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, UdpSocket as BlockingUdpSocket};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::net::{RecvFlags, recv};
use socket2::{Domain, SockRef, Socket, Type};
use tokio::io::Interest;
use tokio::net::UdpSocket;
use tokio::task::{AbortHandle, JoinSet};

use super::StackLimits;
use super::device::PacketDevice;
use super::packet::{
    Datagram, DropReason, Echo, Flow, HEAD, Unreachable, any_like, datagram, echo_reply,
    echo_request, read_echo_reply, unreachable,
};
use crate::model::Protocol;
use crate::net::flow::{Datagrams, FlowHandler};
use crate::net::log::OpenFlow;
use crate::net::sockets::{SandboxSockets, SocketPermit};

/// How many datagrams a flow delivers before it lets others.
const BATCH: usize = 32;

thread_local! {
    static RECEIVED: RefCell<Vec<u8>> = RefCell::new(vec![0; 65_536]);
}

/// The flows there are.
#[derive(Debug)]
pub(super) struct Flows {
    flows: HashMap<(Protocol, Flow), FlowEntry>,
    limits: StackLimits,
    sockets: SandboxSockets,
}

#[derive(Debug)]
enum FlowEntry {
    /// When it was refused.
    Refused(u64),
    Open(Arc<DatagramFlow>, AbortHandle),
}

/// A flow that is carried.
#[derive(Debug)]
struct DatagramFlow {
    flow: Flow,
    socket: UdpSocket,
    _permit: SocketPermit,
    open: Arc<OpenFlow>,
    device: Arc<PacketDevice>,
    kind: DatagramKind,
    /// When something last went either way, in milliseconds of the device's time.
    last: AtomicU64,
    ended: AtomicBool,
    /// The beginning of the first packet, to answer its sender that nothing listens there.
    head: Vec<u8>,
}

#[derive(Debug, Clone, Copy)]
enum DatagramKind {
    Udp,
    /// Over the kernel's echo socket, or a raw one with an identifier of ours.
    Echo {
        ident: Option<u16>,
    },
}

/// What came from the sandbox.
enum GuestMessage<'a> {
    Datagram(&'a [u8]),
    Echo(u16, &'a [u8]),
}

impl Flows {
    pub(super) fn new(limits: StackLimits, sockets: SandboxSockets) -> Self {
        Self { flows: HashMap::new(), limits, sockets }
    }

    /// Carries a datagram out.
    pub(super) fn datagram(
        &mut self,
        packet: &Datagram<'_>,
        device: &Arc<PacketDevice>,
        handler: &Arc<dyn FlowHandler>,
        tasks: &mut JoinSet<()>,
    ) {
        let key = (Protocol::Udp, packet.flow);
        if let Some(carried) = self.find(key, packet.raw, device, handler, tasks) {
            carried.send(&GuestMessage::Datagram(packet.payload));
        }
    }

    /// Carries an echo request out.
    pub(super) fn echo(
        &mut self,
        packet: &Echo<'_>,
        device: &Arc<PacketDevice>,
        handler: &Arc<dyn FlowHandler>,
        tasks: &mut JoinSet<()>,
    ) {
        let key = (Protocol::Icmp, packet.flow);
        if let Some(carried) = self.find(key, packet.raw, device, handler, tasks) {
            carried.send(&GuestMessage::Echo(packet.sequence, packet.payload));
        }
    }

    /// Forgets what was silent for too long. To be called every second or so.
    pub(super) fn sweep(&mut self, device: &PacketDevice) {
        let (now, limits) = (milliseconds(device), self.limits);
        self.flows.retain(|key, state| {
            let keep = state.is_live(now, key, &limits);
            if let (false, FlowEntry::Open(_, task)) = (keep, &state) {
                task.abort();
            }
            keep
        });
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.flows.len()
    }

    fn find(
        &mut self,
        key: (Protocol, Flow),
        raw: &[u8],
        device: &Arc<PacketDevice>,
        handler: &Arc<dyn FlowHandler>,
        tasks: &mut JoinSet<()>,
    ) -> Option<Arc<DatagramFlow>> {
        let now = milliseconds(device);
        match self.flows.get(&key) {
            Some(state) if !state.is_live(now, &key, &self.limits) => {}
            Some(FlowEntry::Open(carried, _)) => return Some(Arc::clone(carried)),
            Some(FlowEntry::Refused(_)) => {
                unreachable(device, &key.1, raw, Unreachable::Prohibited);
                return None;
            }
            None => {}
        }
        self.forget(&key);
        if self.flows.len() >= self.limits.datagrams {
            self.forget_silent();
        }
        let permit = match self.sockets.take() {
            Ok(permit) => permit,
            Err(why) => {
                match self.flows.is_empty() {
                    // Others have all of them.
                    true => handler.no_socket(key.0, key.1.to, why),
                    // Its socket is closed when its task has ended: there is one for the next packet.
                    false => self.forget_silent(),
                }
                device.drop_packet(DropReason::Full);
                return None;
            }
        };
        let Some(Datagrams { to, open }) = handler.datagrams(key.0, key.1.to) else {
            unreachable(device, &key.1, raw, Unreachable::Prohibited);
            self.flows.insert(key, FlowEntry::Refused(now));
            return None;
        };
        let carried = match DatagramFlow::new(key, to, open, device, raw, permit) {
            Ok(carried) => Arc::new(carried),
            Err(error) => {
                tracing::debug!(%to, %error, "a flow of datagrams has no socket");
                unreachable(device, &key.1, raw, Unreachable::Port);
                return None;
            }
        };
        let task = tasks.spawn(Arc::clone(&carried).deliver());
        self.flows.insert(key, FlowEntry::Open(Arc::clone(&carried), task));
        Some(carried)
    }

    /// Makes room: the flow that was silent longest goes.
    fn forget_silent(&mut self) {
        let silent = self.flows.iter().min_by_key(|(_, state)| state.last()).map(|(key, _)| *key);
        silent.inspect(|key| self.forget(key));
    }

    fn forget(&mut self, key: &(Protocol, Flow)) {
        if let Some(FlowEntry::Open(_, task)) = self.flows.remove(key) {
            task.abort();
        }
    }
}

impl FlowEntry {
    fn last(&self) -> u64 {
        match self {
            Self::Refused(at) => *at,
            Self::Open(carried, _) => carried.last.load(Ordering::Relaxed),
        }
    }

    fn is_live(&self, now: u64, (protocol, flow): &(Protocol, Flow), limits: &StackLimits) -> bool {
        let silence = match self {
            Self::Open(carried, _) if carried.ended.load(Ordering::Relaxed) => return false,
            Self::Refused(_) => limits.refusal,
            Self::Open(..) if *protocol == Protocol::Icmp || flow.to.port() == 53 => {
                limits.brief_flow
            }
            Self::Open(..) => limits.flow,
        };
        u128::from(now.saturating_sub(self.last())) < silence.as_millis()
    }
}

impl DatagramFlow {
    fn new(
        (protocol, flow): (Protocol, Flow),
        to: SocketAddr,
        open: Arc<OpenFlow>,
        device: &Arc<PacketDevice>,
        raw: &[u8],
        permit: SocketPermit,
    ) -> io::Result<Self> {
        let (socket, kind) = match protocol {
            Protocol::Icmp => echo_socket(to)?,
            _ => (datagram_socket(to)?, DatagramKind::Udp),
        };
        Ok(Self {
            flow,
            socket,
            _permit: permit,
            open,
            device: Arc::clone(device),
            kind,
            last: AtomicU64::new(milliseconds(device)),
            ended: AtomicBool::new(false),
            head: raw[..raw.len().min(HEAD)].to_vec(),
        })
    }

    /// Sends now or never: who sends datagrams expects no more.
    fn send(&self, message: &GuestMessage<'_>) {
        self.touch();
        // Straight to the kernel: the runtime does not know yet whether a new socket is writable.
        let socket = SockRef::from(&self.socket);
        let sent = match (message, self.kind) {
            (GuestMessage::Echo(sequence, payload), DatagramKind::Echo { ident }) => {
                let v4 = self.flow.to.is_ipv4();
                socket.send(&echo_request(v4, ident.unwrap_or(0), *sequence, payload))
            }
            (GuestMessage::Datagram(payload) | GuestMessage::Echo(_, payload), _) => {
                socket.send(payload)
            }
        };
        match sent {
            Ok(bytes) => self.open.sent(bytes as u64),
            Err(error) => self.failed(&error),
        }
    }

    /// Delivers what comes until it is cut; who forgets the flow aborts this.
    async fn deliver(self: Arc<Self>) {
        tokio::select! {
            () = self.open.is_cut() => {}
            () = self.deliver_all() => {}
        }
        self.ended.store(true, Ordering::Relaxed);
    }

    async fn deliver_all(&self) {
        // A closed port comes as an error, with nothing to read.
        while let Ok(ready) = self.socket.ready(Interest::READABLE | Interest::ERROR).await {
            let more = RECEIVED.with_borrow_mut(|buffer| {
                if ready.is_error() {
                    self.deliver_one(Interest::ERROR, buffer);
                }
                (0..BATCH).all(|_| self.deliver_one(Interest::READABLE, buffer))
            });
            if more {
                tokio::task::yield_now().await;
            }
        }
    }

    /// Whether there may be more.
    fn deliver_one(&self, interest: Interest, buffer: &mut [u8]) -> bool {
        let received = self
            .socket
            .try_io(interest, || Ok(recv(&self.socket, &mut *buffer, RecvFlags::empty())?.0));
        match received {
            Ok(bytes) => {
                self.receive(&buffer[..bytes]);
                true
            }
            Err(error) => {
                self.failed(&error);
                false
            }
        }
    }

    fn receive(&self, message: &[u8]) {
        match self.kind {
            DatagramKind::Udp => datagram(&self.device, &self.flow, message),
            DatagramKind::Echo { ident } => {
                let reply = read_echo_reply(self.flow.to.is_ipv4(), message);
                // A raw socket gets everybody's replies.
                let Some((_, sequence, payload)) =
                    reply.filter(|(theirs, ..)| ident.is_none_or(|ours| ours == *theirs))
                else {
                    return;
                };
                echo_reply(&self.device, &self.flow, sequence, payload);
            }
        }
        self.touch();
        self.open.received(message.len() as u64);
    }

    fn failed(&self, error: &io::Error) {
        if error.kind() == io::ErrorKind::ConnectionRefused {
            unreachable(&self.device, &self.flow, &self.head, Unreachable::Port);
        }
    }

    fn touch(&self) {
        self.last.store(milliseconds(&self.device), Ordering::Relaxed);
    }
}

fn datagram_socket(to: SocketAddr) -> io::Result<UdpSocket> {
    let socket = BlockingUdpSocket::bind(SocketAddr::new(any_like(to.ip()), 0))?;
    socket.connect(to)?;
    socket.set_nonblocking(true)?;
    UdpSocket::from_std(socket)
}

fn echo_socket(to: SocketAddr) -> io::Result<(UdpSocket, DatagramKind)> {
    let (domain, protocol) = match to {
        SocketAddr::V4(_) => (Domain::IPV4, socket2::Protocol::ICMPV4),
        SocketAddr::V6(_) => (Domain::IPV6, socket2::Protocol::ICMPV6),
    };
    let (socket, ident) = match Socket::new(domain, Type::DGRAM, Some(protocol)) {
        Ok(socket) => (socket, None),
        Err(_) => {
            let ident = getrandom::u32().map_err(io::Error::other)?.to_be_bytes();
            let ident = u16::from_be_bytes([ident[0], ident[1]]);
            (Socket::new(domain, Type::RAW, Some(protocol))?, Some(ident))
        }
    };
    socket.connect(&SocketAddr::new(to.ip(), 0).into())?;
    socket.set_nonblocking(true)?;
    // Sending, receiving and readiness are the same for every kind of socket that keeps messages apart.
    let socket = BlockingUdpSocket::from(OwnedFd::from(socket));
    Ok((UdpSocket::from_std(socket)?, DatagramKind::Echo { ident }))
}

fn milliseconds(device: &PacketDevice) -> u64 {
    u64::try_from(device.now().total_millis()).unwrap_or(0)
}
