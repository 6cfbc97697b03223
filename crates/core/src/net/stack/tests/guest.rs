//! A well-behaved sandbox, and a raw device to write packets with.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{self, DeviceCapabilities, Medium};
use smoltcp::socket::tcp::{Socket, SocketBuffer, State};
use smoltcp::time::Instant as MachineTime;
use smoltcp::wire::{
    HardwareAddress, IpCidr, IpProtocol, IpRepr, TcpControl, TcpPacket, TcpRepr, TcpSeqNumber,
    UdpPacket, UdpRepr,
};

use crate::net::{GATEWAY_V4, GATEWAY_V6, GUEST_V4, GUEST_V6, MTU};

/// Nothing here takes longer, or it hangs.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

/// A sandbox that behaves.
pub(super) struct FakeGuest {
    wire: Wire,
    interface: Interface,
    pub(super) sockets: SocketSet<'static>,
    next_port: u16,
}

impl FakeGuest {
    pub(super) fn new(end: OwnedFd) -> Self {
        let mut wire = Wire { end, began: Instant::now() };
        let config = Config::new(HardwareAddress::Ip);
        let mut interface = Interface::new(config, &mut wire, MachineTime::ZERO);
        interface.update_ip_addrs(|addresses| {
            addresses.push(IpCidr::new(GUEST_V4.into(), 30)).unwrap();
            addresses.push(IpCidr::new(GUEST_V6.into(), 64)).unwrap();
        });
        interface.routes_mut().add_default_ipv4_route(GATEWAY_V4).unwrap();
        interface.routes_mut().add_default_ipv6_route(GATEWAY_V6).unwrap();
        Self { wire, interface, sockets: SocketSet::new(Vec::new()), next_port: 40_000 }
    }

    pub(super) fn connect(&mut self, to: SocketAddr, buffer: usize) -> SocketHandle {
        let ring = || SocketBuffer::new(vec![0; buffer]);
        let mut socket = Socket::new(ring(), ring());
        socket.set_nagle_enabled(false);
        self.next_port += 1;
        socket.connect(self.interface.context(), to, self.next_port).unwrap();
        self.sockets.add(socket)
    }

    pub(super) fn socket(&mut self, handle: SocketHandle) -> &mut Socket<'static> {
        self.sockets.get_mut(handle)
    }

    pub(super) fn state(&mut self, handle: SocketHandle) -> State {
        self.socket(handle).state()
    }

    /// Lives until `done`.
    pub(super) async fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let began = Instant::now();
        loop {
            self.interface.poll(self.wire.now(), &mut self.wire, &mut self.sockets);
            if done(self) {
                self.interface.poll(self.wire.now(), &mut self.wire, &mut self.sockets);
                return;
            }
            assert!(began.elapsed() < PATIENCE, "{what} took too long");
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
    }

    /// Lives for a while.
    pub(super) async fn rest(&mut self, time: Duration) {
        let began = Instant::now();
        self.until("rest", |_| began.elapsed() > time).await;
    }

    /// Sends all of this, reading what comes meanwhile; returns what came when the other side has
    /// sent everything.
    pub(super) async fn exchange(&mut self, handle: SocketHandle, data: &[u8]) -> Vec<u8> {
        let (mut sent, mut got, mut closed) = (0, Vec::new(), false);
        self.until("exchange", |guest| {
            let socket = guest.socket(handle);
            if socket.may_send() && sent < data.len() {
                sent += socket.send_slice(&data[sent..]).unwrap();
            }
            if sent == data.len() && !closed && socket.may_send() {
                socket.close();
                closed = true;
            }
            take(socket, &mut got);
            closed && !socket.may_recv()
        })
        .await;
        got
    }
}

/// Reads what has arrived.
pub(super) fn take(socket: &mut Socket<'_>, into: &mut Vec<u8>) {
    while let Ok(1..) = socket.recv(|data| {
        into.extend_from_slice(data);
        (data.len(), data.len())
    }) {}
}

/// The sandbox's end of the device.
struct Wire {
    end: OwnedFd,
    began: Instant,
}

impl Wire {
    fn now(&self) -> MachineTime {
        MachineTime::from_micros(i64::try_from(self.began.elapsed().as_micros()).unwrap())
    }
}

impl phy::Device for Wire {
    type RxToken<'a> = Received;
    type TxToken<'a> = Sent<'a>;

    fn receive(&mut self, _: MachineTime) -> Option<(Received, Sent<'_>)> {
        let packet = read(&self.end)?;
        Some((Received(packet), Sent(&self.end)))
    }

    fn transmit(&mut self, _: MachineTime) -> Option<Sent<'_>> {
        // A kernel does not lose what its queue has no room for.
        let mut poll = [rustix::event::PollFd::new(&self.end, rustix::event::PollFlags::OUT)];
        let ready = rustix::event::poll(&mut poll, Some(&rustix::event::Timespec::default()));
        (ready == Ok(1)).then_some(Sent(&self.end))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = MTU;
        capabilities
    }
}

struct Received(Vec<u8>);

impl phy::RxToken for Received {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, take: F) -> R {
        take(&self.0)
    }
}

struct Sent<'a>(&'a OwnedFd);

impl phy::TxToken for Sent<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, length: usize, fill: F) -> R {
        let mut packet = vec![0; length];
        let result = fill(&mut packet);
        let _ = rustix::io::write(self.0, &packet);
        result
    }
}

/// Reads a packet, if there is one.
pub(super) fn read(end: &OwnedFd) -> Option<Vec<u8>> {
    let mut packet = vec![0; MTU];
    let length = rustix::io::read(end, &mut packet).ok()?;
    packet.truncate(length);
    (length > 0).then_some(packet)
}

/// Waits for a packet.
pub(super) async fn next(end: &OwnedFd) -> Vec<u8> {
    let began = Instant::now();
    loop {
        if let Some(packet) = read(end) {
            return packet;
        }
        assert!(began.elapsed() < PATIENCE, "no packet came");
        tokio::time::sleep(Duration::from_micros(200)).await;
    }
}

/// Waits as long as packets take, and says that none came.
pub(super) async fn assert_silence(end: &OwnedFd, why: &str) {
    tokio::time::sleep(Duration::from_millis(30)).await;
    assert_eq!(read(end), None, "{why}: nothing must come");
}

pub(super) fn write(end: &OwnedFd, packet: &[u8]) {
    rustix::io::write(end, packet).unwrap();
}

/// A TCP packet from a sandbox.
pub(super) fn segment(from: u16, to: SocketAddr, fields: Fields<'_>) -> Vec<u8> {
    let guest = if to.is_ipv4() { GUEST_V4.into() } else { GUEST_V6.into() };
    let tcp = TcpRepr {
        src_port: from,
        dst_port: to.port(),
        control: fields.control,
        seq_number: TcpSeqNumber(fields.seq),
        ack_number: fields.ack.map(TcpSeqNumber),
        window_len: fields.window,
        window_scale: None,
        max_seg_size: (fields.control == TcpControl::Syn).then_some(1460),
        sack_permitted: false,
        sack_ranges: [None; 3],
        timestamp: None,
        payload: fields.payload,
    };
    let header = IpRepr::new(guest, to.ip().into(), IpProtocol::Tcp, tcp.buffer_len(), 64);
    let mut packet = vec![0; header.buffer_len()];
    header.emit(&mut packet, &Default::default());
    let mut body = TcpPacket::new_unchecked(&mut packet[header.header_len()..]);
    tcp.emit(&mut body, &guest, &to.ip().into(), &Default::default());
    packet
}

/// What differs between segments.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a> {
    pub(super) control: TcpControl,
    pub(super) seq: i32,
    pub(super) ack: Option<i32>,
    pub(super) window: u16,
    pub(super) payload: &'a [u8],
}

pub(super) const SYN: Fields<'static> =
    Fields { control: TcpControl::Syn, seq: 1000, ack: None, window: 65_000, payload: &[] };

/// A datagram from a sandbox.
pub(super) fn datagram(from: u16, to: SocketAddr, payload: &[u8]) -> Vec<u8> {
    let guest = if to.is_ipv4() { GUEST_V4.into() } else { GUEST_V6.into() };
    let udp = UdpRepr { src_port: from, dst_port: to.port() };
    let length = udp.header_len() + payload.len();
    let header = IpRepr::new(guest, to.ip().into(), IpProtocol::Udp, length, 64);
    let mut packet = vec![0; header.buffer_len()];
    header.emit(&mut packet, &Default::default());
    let mut body = UdpPacket::new_unchecked(&mut packet[header.header_len()..]);
    udp.emit(
        &mut body,
        &guest,
        &to.ip().into(),
        payload.len(),
        |into| into.copy_from_slice(payload),
        &Default::default(),
    );
    packet
}

/// The parts of a TCP packet that came.
#[derive(Debug)]
pub(super) struct TcpSegment {
    pub(super) control: TcpControl,
    pub(super) seq: i32,
    pub(super) ack: Option<i32>,
    pub(super) payload: Vec<u8>,
}

pub(super) fn parse_segment(packet: &[u8]) -> TcpSegment {
    let header = if packet[0] >> 4 == 4 { 20 } else { 40 };
    let address = |at: usize| -> smoltcp::wire::IpAddress {
        if header == 20 {
            let octets: [u8; 4] = packet[12 + at * 4..][..4].try_into().unwrap();
            std::net::Ipv4Addr::from(octets).into()
        } else {
            let octets: [u8; 16] = packet[8 + at * 16..][..16].try_into().unwrap();
            std::net::Ipv6Addr::from(octets).into()
        }
    };
    let body = TcpPacket::new_checked(&packet[header..]).unwrap();
    let repr = TcpRepr::parse(&body, &address(0), &address(1), &Default::default()).unwrap();
    TcpSegment {
        control: repr.control,
        seq: repr.seq_number.0,
        ack: repr.ack_number.map(|number| number.0),
        payload: repr.payload.to_vec(),
    }
}
