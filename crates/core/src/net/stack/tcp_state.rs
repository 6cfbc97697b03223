//! The state machine of one TCP connection: a smoltcp interface that knows a single socket.
//!
//! smoltcp looks for the socket of each packet by asking all of them, and sends by going through all of them. With a
//! machine for each connection a packet costs the same whether one connection is open or a thousand, each has a
//! lock of its own, and what a hostile packet does to one it does to no other.

use smoltcp::iface::{Config, Interface, PollResult, SocketHandle, SocketSet};
use smoltcp::socket::tcp::{RecvError, Socket, SocketBuffer, State};
use smoltcp::time::{Duration as MachineDuration, Instant as MachineTime};
use smoltcp::wire::{HardwareAddress, IpListenEndpoint};
use std::fmt;
use std::time::Duration;

use super::device::{PacketDevice, PacketPort};
use super::packet::Flow;

/// How a connection behaves towards the sandbox.
#[derive(Debug, Clone, Copy)]
pub(super) struct TcpOptions {
    /// Bytes that are kept each way.
    pub(super) buffer: usize,
    /// After how long a silence the sandbox is asked whether it is still there.
    pub(super) keep_alive: Duration,
    /// After how long a silence it is not.
    pub(super) dead: Duration,
}

/// One TCP connection.
pub(super) struct TcpStateMachine {
    interface: Interface,
    sockets: SocketSet<'static>,
    handle: SocketHandle,
    held: Option<Box<[u8]>>,
}

/// What there is to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Readable {
    /// Something.
    Some,
    /// Nothing yet.
    Nothing,
    /// Nothing more: the sandbox has sent everything.
    End,
    /// Nothing more: the connection was reset.
    Reset,
}

impl TcpStateMachine {
    /// A connection that waits for the packet which opens it.
    pub(super) fn new(device: &PacketDevice, flow: &Flow, options: TcpOptions) -> Self {
        let mut held = None;
        let mut port = PacketPort { device, incoming: None, held: &mut held };
        let mut config = Config::new(HardwareAddress::Ip);
        config.random_seed = seed();
        let mut interface = Interface::new(config, &mut port, device.now());
        interface.set_any_ip(true);

        let buffer = || SocketBuffer::new(vec![0; options.buffer]);
        let mut socket = Socket::new(buffer(), buffer());
        socket.set_nagle_enabled(false);
        // A packet carries up to 64 KiB here: to answer each costs less than a timer.
        socket.set_ack_delay(None);
        socket.set_keep_alive(Some(machine_duration(options.keep_alive)));
        socket.set_timeout(Some(machine_duration(options.dead)));
        let to = IpListenEndpoint { addr: Some(flow.to.ip().into()), port: flow.to.port() };
        // Refused only for port 0, which no flow has, and for sockets that are in use.
        let listening = socket.listen(to);
        debug_assert!(listening.is_ok(), "a new socket listens");

        let mut sockets = SocketSet::new(Vec::with_capacity(1));
        let handle = sockets.add(socket);
        Self { interface, sockets, handle, held }
    }

    pub(super) fn socket(&mut self) -> &mut Socket<'static> {
        self.sockets.get_mut(self.handle)
    }

    pub(super) fn state(&self) -> State {
        self.sockets.get::<Socket<'_>>(self.handle).state()
    }

    /// Takes a packet in.
    pub(super) fn receive(&mut self, device: &PacketDevice, packet: &[u8]) {
        let mut port = PacketPort { device, incoming: Some(packet), held: &mut self.held };
        self.interface.poll_ingress_single(device.now(), &mut port, &mut self.sockets);
    }

    /// Sends what there is to send: bounded by what is buffered, and by what the sandbox takes.
    pub(super) fn send(&mut self, device: &PacketDevice) {
        let now = device.now();
        let mut port = PacketPort { device, incoming: None, held: &mut self.held };
        port.flush();
        while port.held.is_none()
            && self.interface.poll_egress(now, &mut port, &mut self.sockets) != PollResult::None
        {
        }
    }

    /// When it must be looked at again if nothing happens.
    pub(super) fn next(&mut self, device: &PacketDevice) -> Option<MachineTime> {
        self.interface.poll_at(device.now(), &self.sockets)
    }

    /// Whether a packet waits for room in the device.
    pub(super) fn holds(&self) -> bool {
        self.held.is_some()
    }

    /// Whether the sandbox and we have agreed on a connection, and it is not over.
    pub(super) fn is_established(&self) -> bool {
        !matches!(self.state(), State::Listen | State::SynReceived | State::Closed)
    }

    /// Whether nothing more will happen to it. Received data can still be read.
    pub(super) fn is_over(&self) -> bool {
        // Back in `Listen`, it was reset while it opened. `TimeWait` exists for networks where
        // packets arrive late; here a late one is answered with a reset, which changes nothing for
        // a peer that has received everything.
        matches!(self.state(), State::Closed | State::Listen | State::TimeWait)
    }

    pub(super) fn readable(&mut self) -> Readable {
        match self.socket().recv(|data| (0, !data.is_empty())) {
            Ok(true) => Readable::Some,
            Ok(false) => Readable::Nothing,
            Err(RecvError::Finished) => Readable::End,
            Err(RecvError::InvalidState) => Readable::Reset,
        }
    }

    /// Discards received data; returns how much.
    pub(super) fn discard(&mut self) -> usize {
        let mut thrown = 0;
        while let Ok(bytes @ 1..) = self.socket().recv(|data| (data.len(), data.len())) {
            thrown += bytes;
        }
        thrown
    }
}

impl fmt::Debug for TcpStateMachine {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("TcpStateMachine")
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}

fn machine_duration(duration: Duration) -> MachineDuration {
    MachineDuration::from_micros(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX))
}

/// The initial sequence number: the sandbox cannot guess it.
fn seed() -> u64 {
    getrandom::u64().unwrap_or_else(|_| {
        // Without a source of randomness the numbers are merely different.
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.map_or(0, |since| u64::from(since.subsec_nanos()) ^ since.as_secs())
    })
}
