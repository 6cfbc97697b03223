//! Malicious sandboxes.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use smoltcp::wire::{IpProtocol, IpRepr, TcpControl};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};

use super::guest::{
    Fields, SYN, TcpSegment, assert_silence, datagram, next, parse_segment, read, segment, write,
};
use super::{FakeHandler, Say, StackLimits, outside, pattern, start, start_with};
use crate::net::sockets::{NoSocket, SandboxSockets};
use crate::net::stack::device::PacketDevice;
use crate::net::stack::packet::DropReason;
use crate::net::{GUEST_V4, GUEST_V6};

/// A connection written by hand.
struct ByHand {
    end: OwnedFd,
    port: u16,
    to: SocketAddr,
    /// What the sandbox sends next.
    seq: i32,
    /// What it has of the other side.
    ack: i32,
    window: u16,
}

impl ByHand {
    async fn open(end: OwnedFd, port: u16, to: SocketAddr, window: u16) -> Self {
        write(&end, &segment(port, to, Fields { window, ..SYN }));
        let answer = parse_segment(&next(&end).await);
        assert_eq!(answer.control, TcpControl::Syn);
        assert_eq!(answer.ack, Some(SYN.seq + 1));
        let seq = SYN.seq + 1;
        let hand = Self { end, port, to, seq, ack: answer.seq + 1, window };
        hand.send(hand.seq, TcpControl::None, &[]);
        hand
    }

    fn send(&self, seq: i32, control: TcpControl, payload: &[u8]) {
        let fields = Fields { control, seq, ack: Some(self.ack), window: self.window, payload };
        write(&self.end, &segment(self.port, self.to, fields));
    }

    async fn next(&self) -> TcpSegment {
        parse_segment(&next(&self.end).await)
    }
}

async fn dialled(
    limits: StackLimits,
) -> (super::Stack, Arc<PacketDevice>, OwnedFd, TcpListener, Arc<FakeHandler>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let handler = FakeHandler::new();
    for v4 in [true, false] {
        handler.say(outside(v4, 443), Say::Dial(listener.local_addr().unwrap()));
    }
    let (stack, device, end) = start(limits, &handler);
    (stack, device, end, listener, handler)
}

async fn exactly(stream: &mut TcpStream, length: usize) -> Vec<u8> {
    let mut got = vec![0; length];
    tokio::time::timeout(Duration::from_secs(20), stream.read_exact(&mut got))
        .await
        .unwrap()
        .unwrap();
    got
}

/// An IP packet with this for a body.
fn ip(to: SocketAddr, protocol: IpProtocol, body: &[u8]) -> Vec<u8> {
    let from = if to.is_ipv4() { GUEST_V4.into() } else { GUEST_V6.into() };
    let header = IpRepr::new(from, to.ip().into(), protocol, body.len(), 64);
    let mut packet = vec![0; header.buffer_len()];
    header.emit(&mut packet, &Default::default());
    packet[header.header_len()..].copy_from_slice(body);
    packet
}

/// Sums an IPv4 header up again after it was changed.
fn summed(mut packet: Vec<u8>) -> Vec<u8> {
    smoltcp::wire::Ipv4Packet::new_unchecked(&mut packet[..]).fill_checksum();
    packet
}

fn changed(packet: &[u8], at: usize, to: &[u8]) -> Vec<u8> {
    let mut packet = packet.to_vec();
    packet[at..at + to.len()].copy_from_slice(to);
    packet
}

#[tokio::test]
async fn what_is_no_packet_is_dropped_and_counted() {
    let (_stack, device, end, ..) = dialled(StackLimits::default()).await;
    let (v4, v6) = (outside(true, 443), outside(false, 443));
    let syn4 = segment(5000, v4, SYN);
    let syn6 = segment(5000, v6, SYN);
    let udp4 = datagram(5000, v4, b"hello");
    let udp6 = datagram(5000, v6, b"hello");
    let nobody: SocketAddr = "0.0.0.0:443".parse().unwrap();
    let crowd: SocketAddr = "224.0.0.1:443".parse().unwrap();
    let all: SocketAddr = "255.255.255.255:443".parse().unwrap();
    let crowd6: SocketAddr = "[ff02::1]:443".parse().unwrap();
    let mut with_options = changed(&syn4, 0, &[0x46]);
    with_options.splice(20..20, [1, 1, 1, 1]);
    let length = u16::try_from(with_options.len()).unwrap().to_be_bytes();
    let with_options = changed(&with_options, 2, &length);

    let cases: Vec<(&str, Vec<u8>, DropReason)> = vec![
        ("one byte", vec![0x45], DropReason::Truncated),
        ("neither version", vec![0; 60], DropReason::NotIp),
        ("noise", vec![0xff; 1500], DropReason::NotIp),
        ("half a header", syn4[..12].to_vec(), DropReason::Truncated),
        ("half a header, v6", syn6[..30].to_vec(), DropReason::Truncated),
        (
            "claims more than there is",
            summed(changed(&syn4, 2, &[0xff, 0xff])),
            DropReason::Truncated,
        ),
        ("claims more than there is, v6", changed(&syn6, 4, &[0xff, 0xff]), DropReason::Truncated),
        ("claims less than its header", summed(changed(&syn4, 2, &[0, 19])), DropReason::Truncated),
        ("claims a short header", changed(&syn4, 0, &[0x44]), DropReason::Truncated),
        ("claims a long header", changed(&syn4, 0, &[0x4f]), DropReason::Truncated),
        ("options", summed(with_options), DropReason::Options),
        ("the header's sum", changed(&syn4, 10, &[1, 2]), DropReason::Checksum),
        ("the first of several", summed(changed(&syn4, 6, &[0x20, 0])), DropReason::Fragment),
        ("the last of several", summed(changed(&syn4, 6, &[0, 9])), DropReason::Fragment),
        ("from elsewhere", summed(changed(&syn4, 12, &[10, 0, 0, 1])), DropReason::Source),
        ("from elsewhere, v6", changed(&syn6, 8, &[0x20, 1]), DropReason::Source),
        ("the segment's sum", changed(&syn4, 36, &[1, 2]), DropReason::Checksum),
        ("the segment's sum, v6", changed(&syn6, 56, &[1, 2]), DropReason::Checksum),
        ("the datagram's sum", changed(&udp4, 26, &[1, 2]), DropReason::Checksum),
        ("a datagram without a sum, v6", changed(&udp6, 46, &[0, 0]), DropReason::Checksum),
        (
            "a datagram longer than its packet",
            changed(&udp4, 24, &[0xff, 0xff]),
            DropReason::Truncated,
        ),
        ("a datagram shorter than its header", changed(&udp4, 24, &[0, 3]), DropReason::Truncated),
        ("a short segment", ip(v4, IpProtocol::Tcp, &[0; 10]), DropReason::Truncated),
        ("an empty segment", ip(v4, IpProtocol::Tcp, &[]), DropReason::Truncated),
        ("a short datagram", ip(v6, IpProtocol::Udp, &[0; 4]), DropReason::Truncated),
        ("a short echo", ip(v4, IpProtocol::Icmp, &[8, 0, 0]), DropReason::Truncated),
        (
            "no echo",
            ip(v4, IpProtocol::Icmp, &[13, 0, 0xf2, 0xff, 0, 0, 0, 0]),
            DropReason::Protocol,
        ),
        ("another protocol", ip(v4, IpProtocol::Unknown(132), &[0; 32]), DropReason::Protocol),
        ("groups", ip(crowd, IpProtocol::Igmp, &[0; 8]), DropReason::Protocol),
        ("hop by hop", ip(v6, IpProtocol::HopByHop, &syn6[40..]), DropReason::Options),
        ("a route", ip(v6, IpProtocol::Ipv6Route, &[6, 0, 0, 0, 0, 0, 0, 0]), DropReason::Options),
        ("destination options", ip(v6, IpProtocol::Ipv6Opts, &[6; 16]), DropReason::Options),
        ("part of a packet, v6", ip(v6, IpProtocol::Ipv6Frag, &[6; 16]), DropReason::Fragment),
        ("no next header", ip(v6, IpProtocol::Ipv6NoNxt, &[]), DropReason::Protocol),
        ("a segment to nobody", segment(5000, nobody, SYN), DropReason::Destination),
        ("a segment to a crowd", segment(5000, crowd, SYN), DropReason::Destination),
        ("a segment to all", segment(5000, all, SYN), DropReason::Destination),
        ("a segment to a crowd, v6", segment(5000, crowd6, SYN), DropReason::Destination),
        ("a segment to no port", segment(5000, outside(true, 0), SYN), DropReason::Destination),
        ("a segment from no port", segment(0, v4, SYN), DropReason::Destination),
        ("a datagram to no port", datagram(5000, outside(false, 0), b"x"), DropReason::Destination),
    ];
    for (what, packet, why) in cases {
        let before: Vec<u64> = DropReason::ALL.map(|why| device.dropped(why)).to_vec();
        write(&end, &packet);
        assert_silence(&end, what).await;
        let after = DropReason::ALL.map(|why| device.dropped(why));
        for (at, one) in DropReason::ALL.into_iter().enumerate() {
            let expected = before[at] + u64::from(one == why);
            assert_eq!(after[at], expected, "{what}: counted as {one:?}, must be as {why:?}");
        }
    }
}

#[tokio::test]
async fn strays_are_reset_and_resets_are_not_answered() {
    let (_stack, _, end, ..) = dialled(StackLimits::default()).await;
    for v4 in [true, false] {
        let to = outside(v4, 443);
        let stray = Fields { control: TcpControl::None, ack: Some(77), payload: b"data", ..SYN };
        write(&end, &segment(5000, to, stray));
        let answer = parse_segment(&next(&end).await);
        assert_eq!((answer.control, answer.seq, answer.ack), (TcpControl::Rst, 77, None));

        let end_of_one = Fields { control: TcpControl::Fin, ack: None, ..SYN };
        write(&end, &segment(5000, to, end_of_one));
        let answer = parse_segment(&next(&end).await);
        assert_eq!((answer.control, answer.ack), (TcpControl::Rst, Some(SYN.seq + 1)));

        for ack in [None, Some(5)] {
            let reset = Fields { control: TcpControl::Rst, ack, ..SYN };
            write(&end, &segment(5000, to, reset));
        }
        assert_silence(&end, "a reset").await;
    }
}

#[tokio::test]
async fn a_repeated_question_is_asked_once() {
    let (_stack, _, end, listener, handler) = dialled(StackLimits::default()).await;
    for _ in 0..20 {
        write(&end, &segment(5000, outside(true, 443), SYN));
    }
    let first = parse_segment(&next(&end).await);
    assert_eq!(first.control, TcpControl::Syn);
    listener.accept().await.unwrap();
    assert_eq!(handler.asked(), 1);
}

#[tokio::test]
async fn a_question_that_is_repeated_at_length_is_not_kept() {
    let (_stack, device, end, listener, _switch) = dialled(StackLimits::default()).await;
    let payload = [b'x'; 2000];
    // Both are taken in before the dial has a turn.
    write(&end, &segment(5000, outside(true, 443), SYN));
    write(&end, &segment(5000, outside(true, 443), Fields { payload: &payload, ..SYN }));
    assert_eq!(parse_segment(&next(&end).await).control, TcpControl::Syn);
    listener.accept().await.unwrap();
    assert_eq!(device.dropped(DropReason::Full), 1);
}

#[tokio::test]
async fn half_open_connections_are_bounded_and_end() {
    let limits =
        StackLimits { half_open: 8, handshake: Duration::from_secs(3), ..StackLimits::default() };
    let (_stack, device, end, _listener, handler) = dialled(limits).await;
    for port in 0..200 {
        write(&end, &segment(5000 + port, outside(true, 443), SYN));
        // The pair that stands for the device has a short queue.
        if port % 10 == 9 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        while read(&end).is_some() {}
    }
    assert_eq!(handler.asked(), 8);
    assert_eq!(device.dropped(DropReason::Full), 192);

    tokio::time::sleep(Duration::from_millis(3500)).await;
    while read(&end).is_some() {}
    write(&end, &segment(9000, outside(true, 443), SYN));
    assert_eq!(parse_segment(&next(&end).await).control, TcpControl::Syn, "there is room again");
}

#[tokio::test]
async fn connections_are_bounded() {
    let limits = StackLimits { connections: 4, ..StackLimits::default() };
    let (_stack, device, end, _listener, _) = dialled(limits).await;
    let mut end = Some(end);
    for port in 0..4 {
        let hand = ByHand::open(end.take().unwrap(), 5000 + port, outside(true, 443), 1000).await;
        end = Some(hand.end);
    }
    let end = end.unwrap();
    write(&end, &segment(6000, outside(true, 443), SYN));
    assert_eq!(parse_segment(&next(&end).await).control, TcpControl::Rst);
    assert_eq!(device.dropped(DropReason::Full), 1);
}

#[tokio::test]
async fn sockets_of_the_host_are_bounded() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let handler = FakeHandler::new();
    handler.say(outside(true, 443), Say::Dial(listener.local_addr().unwrap()));
    handler.say(outside(true, 53), Say::Dial(server.local_addr().unwrap()));
    let sockets = SandboxSockets::few(3);
    let (_stack, device, end) = start_with(StackLimits::default(), &handler, sockets.clone());
    let heard = async || {
        let mut bytes = [0; 64];
        let (length, _) = server.recv_from(&mut bytes).await.unwrap();
        bytes[..length].to_vec()
    };
    write(&end, &datagram(7000, outside(true, 53), b"one"));
    assert_eq!(heard().await, b"one");
    let first = ByHand::open(end, 5000, outside(true, 443), 1000).await;
    let second = ByHand::open(first.end, 5001, outside(true, 443), 1000).await;
    write(&second.end, &segment(6000, outside(true, 443), SYN));
    assert_eq!(parse_segment(&next(&second.end).await).control, TcpControl::Rst);
    assert_eq!(device.dropped(DropReason::Full), 1);
    // Of datagrams the flow that was silent longest makes room, for the next one.
    write(&second.end, &datagram(7001, outside(true, 53), b"dropped"));
    let began = std::time::Instant::now();
    loop {
        write(&second.end, &datagram(7001, outside(true, 53), b"two"));
        if let Ok(heard) = tokio::time::timeout(Duration::from_millis(50), heard()).await {
            break assert_eq!(heard, b"two");
        }
        assert!(began.elapsed() < Duration::from_secs(20), "its socket is there again");
    }
    assert!(sockets.take().is_err());
    assert!(handler.no_socket.lock().unwrap().contains(&NoSocket::Sandbox));
}

#[tokio::test]
async fn pieces_in_any_order_and_twice_are_put_together() {
    for v4 in [true, false] {
        let (_stack, _, end, listener, _) = dialled(StackLimits::default()).await;
        let hand = ByHand::open(end, 5000, outside(v4, 443), 60_000).await;
        let (mut stream, _) = listener.accept().await.unwrap();
        let data = pattern(1000);
        for at in [700, 100, 100, 400, 0, 0, 300, 200, 600, 500, 900, 800, 100] {
            let seq = hand.seq + i32::try_from(at).unwrap();
            hand.send(seq, TcpControl::Psh, &data[at..at + 100]);
        }
        assert_eq!(exactly(&mut stream, 1000).await, data);
        // What was acknowledged already, and what no window ever allowed.
        hand.send(hand.seq - 500, TcpControl::Psh, &[9; 100]);
        hand.send(hand.seq.wrapping_add(1 << 30), TcpControl::Psh, &[9; 100]);
        hand.send(hand.seq + 1000, TcpControl::Psh, b"end");
        assert_eq!(exactly(&mut stream, 3).await, b"end");
    }
}

#[tokio::test]
async fn resets_that_do_not_fit_reset_nothing() {
    let (_stack, _, end, listener, _) = dialled(StackLimits::default()).await;
    let hand = ByHand::open(end, 5000, outside(true, 443), 60_000).await;
    let (mut stream, _) = listener.accept().await.unwrap();
    for at in 0..2000_i32 {
        let seq = hand.seq.wrapping_sub(1 + at * 1000);
        hand.send(seq, TcpControl::Rst, &[]);
        if at % 20 == 0 {
            tokio::task::yield_now().await;
            while read(&hand.end).is_some() {}
        }
    }
    hand.send(hand.seq, TcpControl::Psh, b"still there");
    assert_eq!(exactly(&mut stream, 11).await, b"still there");
    hand.send(hand.seq + 11, TcpControl::Rst, &[]);
    let read = tokio::time::timeout(Duration::from_secs(10), stream.read(&mut [0; 1])).await;
    assert_eq!(read.unwrap().unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn a_closed_window_holds_up_and_a_tiny_one_goes_on() {
    let (_stack, _, end, listener, handler) = dialled(StackLimits::default()).await;
    let mut hand = ByHand::open(end, 5000, outside(true, 443), 0).await;
    let (mut stream, _) = listener.accept().await.unwrap();
    stream.write_all(&pattern(5000)).await.unwrap();
    // It is asked now and then whether the window is open, with a byte that is not taken.
    for _ in 0..2 {
        let probe = hand.next().await;
        assert_eq!(probe.payload.len(), 1);
        hand.send(hand.seq, TcpControl::None, &[]);
    }
    assert!(handler.log.traffic().received <= 5000);

    hand.window = 10;
    hand.send(hand.seq, TcpControl::None, &[]);
    let mut got = Vec::new();
    while got.len() < 500 {
        let piece = hand.next().await;
        assert!(piece.payload.len() <= 10, "{} bytes into a window of 10", piece.payload.len());
        let at = usize::try_from(piece.seq.wrapping_sub(hand.ack)).unwrap_or(usize::MAX);
        if at == 0 && !piece.payload.is_empty() {
            hand.ack += i32::try_from(piece.payload.len()).unwrap();
            got.extend_from_slice(&piece.payload);
            hand.send(hand.seq, TcpControl::None, &[]);
        }
    }
    assert_eq!(got[..500], pattern(5000)[..500]);
}

#[tokio::test]
async fn who_gives_up_while_outside_is_dialled_is_forgotten() {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.bind(&"127.0.0.1:0".parse::<SocketAddr>().unwrap().into()).unwrap();
    socket.listen(0).unwrap();
    let full = socket.local_addr().unwrap().as_socket().unwrap();
    let mut more = Vec::new();
    let short = Duration::from_millis(50);
    while let Ok(Ok(stream)) = tokio::time::timeout(short, TcpStream::connect(full)).await {
        more.push(stream);
        assert!(more.len() < 16, "the backlog fills");
    }
    let handler = FakeHandler::new();
    handler.say(outside(true, 443), Say::Dial(full));
    let (_stack, _, end) = start(StackLimits::default(), &handler);
    write(&end, &segment(5000, outside(true, 443), SYN));
    let reset = Fields { control: TcpControl::Rst, seq: SYN.seq + 1, ..SYN };
    write(&end, &segment(5000, outside(true, 443), reset));
    let began = std::time::Instant::now();
    while !handler.log.open().is_empty() || handler.asked() == 0 {
        assert!(began.elapsed() < Duration::from_secs(10), "it is still dialled");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_silence(&end, "nobody wants an answer").await;
}
