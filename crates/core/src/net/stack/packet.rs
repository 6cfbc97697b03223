//! Parses and checks packets: the entrance of the stack.
//!
//! Every packet from a sandbox is checked here first, and passes only if it is whole, addressed
//! from the sandbox's own address, unfragmented, free of options and of extension headers, and has
//! correct checksums. Of refused packets only a number is kept. Answers that need no connection are
//! made here too.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use smoltcp::wire::{
    IpAddress, IpProtocol, IpRepr, Ipv4Packet, Ipv6Packet, TcpControl, TcpPacket, TcpRepr,
    TcpSeqNumber, UdpPacket, UdpRepr, checksum,
};

use super::device::PacketDevice;
use crate::net::{GUEST_V4, GUEST_V6, MTU};

/// Who speaks to whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Flow {
    /// The sandbox's end.
    pub(super) guest: SocketAddr,
    /// Whom it wants to reach.
    pub(super) to: SocketAddr,
}

/// Why a packet was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DropReason {
    /// Neither version of IP.
    NotIp,
    /// Shorter than it claims to be, or than it must be.
    Truncated,
    /// Part of a packet.
    Fragment,
    /// With options or extension headers.
    Options,
    /// Not from the sandbox's own address.
    Source,
    /// To nobody in particular, or to no port.
    Destination,
    /// Its sums are wrong.
    Checksum,
    /// Of a protocol that is not carried.
    Protocol,
    /// There is no room for what it would begin.
    Full,
    /// What looks after its connection failed over it.
    Failed,
}

impl DropReason {
    pub(super) const COUNT: usize = Self::Failed as usize + 1;
    pub(super) const ALL: [Self; Self::COUNT] = [
        Self::NotIp,
        Self::Truncated,
        Self::Fragment,
        Self::Options,
        Self::Source,
        Self::Destination,
        Self::Checksum,
        Self::Protocol,
        Self::Full,
        Self::Failed,
    ];
}

/// A packet that was taken.
#[derive(Debug)]
pub(super) enum Packet<'a> {
    Tcp(Segment<'a>),
    Udp(Datagram<'a>),
    Echo(Echo<'a>),
}

/// A piece of a TCP connection.
#[derive(Debug)]
pub(super) struct Segment<'a> {
    pub(super) flow: Flow,
    /// The whole packet.
    pub(super) raw: &'a [u8],
    pub(super) syn: bool,
    pub(super) rst: bool,
    ack: Option<TcpSeqNumber>,
    /// The number that follows it.
    next: TcpSeqNumber,
}

/// A datagram.
#[derive(Debug)]
pub(super) struct Datagram<'a> {
    pub(super) flow: Flow,
    pub(super) raw: &'a [u8],
    pub(super) payload: &'a [u8],
}

/// An echo request; its identifier stands for the sandbox's port.
#[derive(Debug)]
pub(super) struct Echo<'a> {
    pub(super) flow: Flow,
    pub(super) raw: &'a [u8],
    pub(super) sequence: u16,
    pub(super) payload: &'a [u8],
}

/// Takes a packet, or says why not.
pub(super) fn parse(raw: &[u8]) -> Result<Packet<'_>, DropReason> {
    match raw.first().ok_or(DropReason::Truncated)? >> 4 {
        4 => parse_v4(raw),
        6 => parse_v6(raw),
        _ => Err(DropReason::NotIp),
    }
}

fn parse_v4(raw: &[u8]) -> Result<Packet<'_>, DropReason> {
    let packet = Ipv4Packet::new_checked(raw).map_err(|_| DropReason::Truncated)?;
    if packet.header_len() != 20 {
        return Err(DropReason::Options);
    }
    if !packet.verify_checksum() {
        return Err(DropReason::Checksum);
    }
    if packet.more_frags() || packet.frag_offset() != 0 {
        return Err(DropReason::Fragment);
    }
    if packet.src_addr() != GUEST_V4 {
        return Err(DropReason::Source);
    }
    let raw = &raw[..usize::from(packet.total_len())];
    let payload = &raw[20..];
    let ends = Ends { guest: GUEST_V4.into(), to: packet.dst_addr().into(), raw };
    match packet.next_header() {
        IpProtocol::Tcp => ends.tcp(payload),
        IpProtocol::Udp => ends.udp(payload),
        IpProtocol::Icmp => ends.echo(payload, ECHO_V4),
        _ => Err(DropReason::Protocol),
    }
}

fn parse_v6(raw: &[u8]) -> Result<Packet<'_>, DropReason> {
    let packet = Ipv6Packet::new_checked(raw).map_err(|_| DropReason::Truncated)?;
    // The next header decides before the source: what a kernel says to its neighbours by itself comes from
    // another address, and is no forgery.
    let next = packet.next_header();
    match next {
        IpProtocol::Tcp | IpProtocol::Udp | IpProtocol::Icmpv6 => {}
        IpProtocol::Ipv6Frag => return Err(DropReason::Fragment),
        IpProtocol::HopByHop | IpProtocol::Ipv6Route | IpProtocol::Ipv6Opts => {
            return Err(DropReason::Options);
        }
        _ => return Err(DropReason::Protocol),
    }
    if packet.src_addr() != GUEST_V6 {
        return Err(DropReason::Source);
    }
    let raw = &raw[..packet.total_len()];
    let payload = &raw[40..];
    let ends = Ends { guest: GUEST_V6.into(), to: packet.dst_addr().into(), raw };
    match next {
        IpProtocol::Tcp => ends.tcp(payload),
        IpProtocol::Udp => ends.udp(payload),
        _ => ends.echo(payload, ECHO_V6),
    }
}

/// Types of echo request and reply.
const ECHO_V4: (u8, u8) = (8, 0);
const ECHO_V6: (u8, u8) = (128, 129);

/// The addresses of a packet, for what reads on.
struct Ends<'a> {
    guest: IpAddr,
    to: IpAddr,
    raw: &'a [u8],
}

impl<'a> Ends<'a> {
    fn tcp(self, payload: &'a [u8]) -> Result<Packet<'a>, DropReason> {
        let packet = TcpPacket::new_checked(payload).map_err(|_| DropReason::Truncated)?;
        if !packet.verify_checksum(&self.guest.into(), &self.to.into()) {
            return Err(DropReason::Checksum);
        }
        let flow = self.flow(packet.src_port(), packet.dst_port())?;
        if !one_host(self.to) {
            return Err(DropReason::Destination);
        }
        Ok(Packet::Tcp(Segment {
            flow,
            raw: self.raw,
            syn: packet.syn() && !packet.ack(),
            rst: packet.rst(),
            ack: packet.ack().then(|| packet.ack_number()),
            next: packet.seq_number() + packet.segment_len(),
        }))
    }

    fn udp(self, payload: &'a [u8]) -> Result<Packet<'a>, DropReason> {
        let packet = UdpPacket::new_checked(payload).map_err(|_| DropReason::Truncated)?;
        // Only the older version of IP lets a sender leave the sum out.
        let sums = if self.to.is_ipv4() {
            packet.verify_checksum(&self.guest.into(), &self.to.into())
        } else {
            packet.checksum() != 0 && packet.verify_checksum(&self.guest.into(), &self.to.into())
        };
        if !sums {
            return Err(DropReason::Checksum);
        }
        let flow = self.flow(packet.src_port(), packet.dst_port())?;
        Ok(Packet::Udp(Datagram { flow, raw: self.raw, payload: packet.payload() }))
    }

    fn echo(self, payload: &'a [u8], (request, _): (u8, u8)) -> Result<Packet<'a>, DropReason> {
        let (head, rest) = payload.split_first_chunk::<8>().ok_or(DropReason::Truncated)?;
        let sum = match (self.guest, self.to) {
            (IpAddr::V6(guest), IpAddr::V6(to)) => checksum::combine(&[
                checksum::pseudo_header_v6(&guest, &to, IpProtocol::Icmpv6, sum_length(payload)),
                checksum::data(payload),
            ]),
            _ => checksum::data(payload),
        };
        if sum != 0xffff {
            return Err(DropReason::Checksum);
        }
        // Neighbours and routers are looked for on other kinds of link, and errors are about what came from here.
        if head[0] != request || head[1] != 0 {
            return Err(DropReason::Protocol);
        }
        if !one_host(self.to) {
            return Err(DropReason::Destination);
        }
        let ident = u16::from_be_bytes([head[4], head[5]]);
        Ok(Packet::Echo(Echo {
            flow: Flow {
                guest: SocketAddr::new(self.guest, ident),
                to: SocketAddr::new(self.to, 0),
            },
            raw: self.raw,
            sequence: u16::from_be_bytes([head[6], head[7]]),
            payload: rest,
        }))
    }

    fn flow(&self, from: u16, to: u16) -> Result<Flow, DropReason> {
        if from == 0 || to == 0 || self.to.is_unspecified() {
            return Err(DropReason::Destination);
        }
        Ok(Flow { guest: SocketAddr::new(self.guest, from), to: SocketAddr::new(self.to, to) })
    }
}

/// Whether an address is that of one host.
pub(super) fn one_host(address: IpAddr) -> bool {
    let broadcast = matches!(address, IpAddr::V4(Ipv4Addr::BROADCAST));
    !address.is_multicast() && !address.is_unspecified() && !broadcast
}

/// Says that there is no such connection.
pub(super) fn reset(device: &PacketDevice, segment: &Segment<'_>) {
    // A reset is never answered with one.
    if segment.rst {
        return;
    }
    let reply = TcpRepr {
        src_port: segment.flow.to.port(),
        dst_port: segment.flow.guest.port(),
        control: TcpControl::Rst,
        seq_number: segment.ack.unwrap_or_default(),
        ack_number: if segment.ack.is_some() { None } else { Some(segment.next) },
        window_len: 0,
        window_scale: None,
        max_seg_size: None,
        sack_permitted: false,
        sack_ranges: [None; 3],
        timestamp: None,
        payload: &[],
    };
    let (from, to) = (segment.flow.to.ip(), segment.flow.guest.ip());
    compose(device, from, to, IpProtocol::Tcp, reply.buffer_len(), |body| {
        let mut packet = TcpPacket::new_unchecked(body);
        reply.emit(&mut packet, &from.into(), &to.into(), &Default::default());
    });
}

/// Delivers a datagram from outside. One that does not fit into a packet is lost.
pub(super) fn datagram(device: &PacketDevice, flow: &Flow, payload: &[u8]) {
    let header = UdpRepr { src_port: flow.to.port(), dst_port: flow.guest.port() };
    let (from, to) = (flow.to.ip(), flow.guest.ip());
    compose(device, from, to, IpProtocol::Udp, header.header_len() + payload.len(), |body| {
        let mut packet = UdpPacket::new_unchecked(body);
        header.emit(
            &mut packet,
            &from.into(),
            &to.into(),
            payload.len(),
            |into| into.copy_from_slice(payload),
            &Default::default(),
        );
    });
}

/// Answers an echo request.
pub(super) fn echo_reply(device: &PacketDevice, flow: &Flow, sequence: u16, payload: &[u8]) {
    let (protocol, kind) = match flow.to {
        SocketAddr::V4(_) => (IpProtocol::Icmp, ECHO_V4.1),
        SocketAddr::V6(_) => (IpProtocol::Icmpv6, ECHO_V6.1),
    };
    let (from, to) = (flow.to.ip(), flow.guest.ip());
    compose(device, from, to, protocol, 8 + payload.len(), |body| {
        write_echo(body, kind, flow.guest.port(), sequence, payload);
        fill_icmp_sum(body, from, to);
    });
}

/// An echo request as a socket takes it. The kernel sums up the newer version's.
pub(super) fn echo_request(v4: bool, ident: u16, sequence: u16, payload: &[u8]) -> Vec<u8> {
    let mut body = vec![0; 8 + payload.len()];
    write_echo(&mut body, if v4 { ECHO_V4.0 } else { ECHO_V6.0 }, ident, sequence, payload);
    if v4 {
        fill_icmp_sum(&mut body, Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into());
    }
    body
}

/// Reads an echo reply as a socket gives it: identifier, sequence number, payload. A raw socket of the older version
/// gives the IP header too.
pub(super) fn read_echo_reply(v4: bool, mut message: &[u8]) -> Option<(u16, u16, &[u8])> {
    if v4 && message.first().is_some_and(|first| first >> 4 == 4) {
        let header = usize::from(message[0] & 0xf) * 4;
        message = message.get(header..)?;
    }
    let (head, payload) = message.split_first_chunk::<8>()?;
    let kind = if v4 { ECHO_V4.1 } else { ECHO_V6.1 };
    (head[0] == kind && head[1] == 0).then(|| {
        (u16::from_be_bytes([head[4], head[5]]), u16::from_be_bytes([head[6], head[7]]), payload)
    })
}

/// Why something cannot be reached.
#[derive(Debug, Clone, Copy)]
pub(super) enum Unreachable {
    /// Nothing listens on the port.
    Port,
    /// It is not allowed.
    Prohibited,
}

/// Says that a packet does not reach its end. `head` is its beginning: what it takes to find who sent it.
pub(super) fn unreachable(device: &PacketDevice, flow: &Flow, head: &[u8], why: Unreachable) {
    // Multicast and broadcast get no answer.
    if !one_host(flow.to.ip()) {
        return;
    }
    let (protocol, kind, code) = match (flow.to, why) {
        (SocketAddr::V4(_), Unreachable::Port) => (IpProtocol::Icmp, 3, 3),
        (SocketAddr::V4(_), Unreachable::Prohibited) => (IpProtocol::Icmp, 3, 13),
        (SocketAddr::V6(_), Unreachable::Port) => (IpProtocol::Icmpv6, 1, 4),
        (SocketAddr::V6(_), Unreachable::Prohibited) => (IpProtocol::Icmpv6, 1, 1),
    };
    let (from, to) = (flow.to.ip(), flow.guest.ip());
    let head = &head[..head.len().min(HEAD)];
    compose(device, from, to, protocol, 8 + head.len(), |body| {
        body[..8].copy_from_slice(&[kind, code, 0, 0, 0, 0, 0, 0]);
        body[8..].copy_from_slice(head);
        fill_icmp_sum(body, from, to);
    });
}

/// How much of a packet goes back with an error: both headers.
pub(super) const HEAD: usize = 48;

fn write_echo(body: &mut [u8], kind: u8, ident: u16, sequence: u16, payload: &[u8]) {
    body[..4].copy_from_slice(&[kind, 0, 0, 0]);
    body[4..6].copy_from_slice(&ident.to_be_bytes());
    body[6..8].copy_from_slice(&sequence.to_be_bytes());
    body[8..].copy_from_slice(payload);
}

fn fill_icmp_sum(body: &mut [u8], from: IpAddr, to: IpAddr) {
    let sum = match (from, to) {
        (IpAddr::V6(from), IpAddr::V6(to)) => checksum::combine(&[
            checksum::pseudo_header_v6(&from, &to, IpProtocol::Icmpv6, sum_length(body)),
            checksum::data(body),
        ]),
        _ => checksum::data(body),
    };
    body[2..4].copy_from_slice(&(!sum).to_be_bytes());
}

fn sum_length(payload: &[u8]) -> u32 {
    u32::try_from(payload.len()).unwrap_or(u32::MAX)
}

/// Writes a packet whose body `fill` makes.
fn compose(
    device: &PacketDevice,
    from: IpAddr,
    to: IpAddr,
    protocol: IpProtocol,
    length: usize,
    fill: impl FnOnce(&mut [u8]),
) {
    let header = IpRepr::new(IpAddress::from(from), IpAddress::from(to), protocol, length, 64);
    if header.buffer_len() > MTU {
        return;
    }
    device.compose(header.buffer_len(), |packet| {
        header.emit(&mut *packet, &Default::default());
        fill(&mut packet[header.header_len()..]);
    });
}

/// The unspecified address of the same version.
pub(super) fn any_like(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    }
}
