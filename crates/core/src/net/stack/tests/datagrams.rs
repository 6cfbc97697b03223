//! Datagrams, lookups and echo requests.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::Duration;

use smoltcp::wire::checksum;
use tokio::net::UdpSocket;
use tokio::time::timeout;

use super::guest::{assert_silence, datagram, next, write};
use super::{FakeHandler, Say, StackLimits, outside, start};
use crate::net::stack::packet::{DropReason, echo_request};
use crate::net::{GATEWAY_V4, GATEWAY_V6, GUEST_V4, GUEST_V6};

const PATIENCE: Duration = Duration::from_secs(10);

/// The body of a packet, behind both headers if there are two.
fn body(packet: &[u8], header: usize) -> &[u8] {
    &packet[if packet[0] >> 4 == 4 { 20 } else { 40 } + header..]
}

fn icmp_kind(packet: &[u8]) -> (u8, u8) {
    let body = body(packet, 0);
    if packet[0] >> 4 == 4 {
        assert_eq!(checksum::data(body), 0xffff, "its sum is wrong");
    }
    (body[0], body[1])
}

/// An echo request from a sandbox.
fn echo(to: IpAddr, ident: u16, sequence: u16, payload: &[u8]) -> Vec<u8> {
    use smoltcp::wire::{IpProtocol, IpRepr};
    let mut body = echo_request(to.is_ipv4(), ident, sequence, payload);
    let (from, protocol) = match to {
        IpAddr::V4(_) => (GUEST_V4.into(), IpProtocol::Icmp),
        IpAddr::V6(_) => (GUEST_V6.into(), IpProtocol::Icmpv6),
    };
    if let IpAddr::V6(to) = to {
        let length = u32::try_from(body.len()).unwrap();
        let pseudo = checksum::pseudo_header_v6(&GUEST_V6, &to, protocol, length);
        let sum = !checksum::combine(&[pseudo, checksum::data(&body)]);
        body[2..4].copy_from_slice(&sum.to_be_bytes());
    }
    let header = IpRepr::new(from, to.into(), protocol, body.len(), 64);
    let mut packet = vec![0; header.buffer_len()];
    header.emit(&mut packet, &Default::default());
    packet[header.header_len()..].copy_from_slice(&body);
    packet
}

async fn socket(v4: bool) -> (UdpSocket, SocketAddr) {
    let socket = UdpSocket::bind(if v4 { "127.0.0.1:0" } else { "[::1]:0" }).await.unwrap();
    let address = socket.local_addr().unwrap();
    (socket, address)
}

/// Reads a datagram and sends it back twice as long.
async fn answer(socket: &UdpSocket) -> SocketAddr {
    let mut buffer = vec![0; 65_536];
    let (length, from) = timeout(PATIENCE, socket.recv_from(&mut buffer)).await.unwrap().unwrap();
    socket.send_to(&buffer[..length].repeat(2), from).await.unwrap();
    from
}

#[tokio::test]
async fn datagrams_go_out_and_come_back() {
    for v4 in [true, false] {
        let (server, address) = socket(v4).await;
        let handler = FakeHandler::new();
        handler.say(outside(v4, 123), Say::Dial(address));
        let (stack, _, end) = start(StackLimits::default(), &handler);

        let mut from = Vec::new();
        for length in [0, 1, 1200, 30_000] {
            let payload = super::pattern(length);
            write(&end, &datagram(7000, outside(v4, 123), &payload));
            from.push(answer(&server).await);
            let came = next(&end).await;
            assert_eq!(body(&came, 8), payload.repeat(2));
            assert_eq!(body(&came, 0)[..4], [0, 123, 0x1b, 0x58], "the ports are turned round");
        }
        from.dedup();
        assert_eq!(from.len(), 1, "one flow is one socket");
        assert_eq!(handler.asked(), 1);
        assert_eq!(handler.log.traffic().sent, 31_201);
        assert_eq!(handler.log.traffic().received, 62_402);

        // Datagrams of other senders do not come in.
        let (stranger, _) = socket(v4).await;
        stranger.send_to(b"let me in", from[0]).await.unwrap();
        assert_silence(&end, "a stranger").await;
        stack.close().await;
    }
}

#[tokio::test]
async fn refused_datagrams_are_answered_so_and_asked_about_once() {
    let handler = FakeHandler::new();
    let (_stack, _, end) = start(StackLimits::default(), &handler);
    for (v4, kind) in [(true, (3, 13)), (false, (1, 1))] {
        for _ in 0..5 {
            let sent = datagram(7000, outside(v4, 123), b"hello");
            write(&end, &sent);
            let came = next(&end).await;
            assert_eq!(icmp_kind(&came), kind);
            let head = body(&came, 8);
            assert_eq!(head, &sent[..head.len()], "it says which packet it is about");
        }
    }
    assert_eq!(handler.asked(), 2);
    // Multicast gets no answer.
    write(&end, &datagram(7000, "224.0.0.251:5353".parse().unwrap(), b"who is there"));
    write(&end, &datagram(7000, "[ff02::fb]:5353".parse().unwrap(), b"who is there"));
    assert_silence(&end, "a crowd").await;
}

#[tokio::test]
async fn a_port_where_nobody_is_answers_so() {
    let (server, address) = socket(true).await;
    drop(server);
    let handler = FakeHandler::new();
    handler.say(outside(true, 123), Say::Dial(address));
    let (_stack, _, end) = start(StackLimits::default(), &handler);
    write(&end, &datagram(7000, outside(true, 123), b"hello"));
    assert_eq!(icmp_kind(&next(&end).await), (3, 3));
}

#[tokio::test]
async fn flows_are_bounded_and_the_silent_one_goes() {
    let (server, address) = socket(true).await;
    let handler = FakeHandler::new();
    for port in 1..=20 {
        handler.say(outside(true, port), Say::Dial(address));
    }
    let (_stack, _, end) = start(StackLimits { datagrams: 4, ..StackLimits::default() }, &handler);
    for port in 1..=20 {
        write(&end, &datagram(7000, outside(true, port), b"x"));
        answer(&server).await;
        next(&end).await;
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    handler.carried.lock().unwrap().clear();
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(handler.log.open().len(), 4);
    assert_eq!(handler.asked(), 20);
    // The last four are sent without a question.
    for port in 17..=20 {
        write(&end, &datagram(7000, outside(true, port), b"x"));
        answer(&server).await;
        next(&end).await;
    }
    assert_eq!(handler.asked(), 20);
}

#[tokio::test]
async fn silent_and_cut_flows_end() {
    let (server, address) = socket(true).await;
    let handler = FakeHandler::new();
    handler.say(outside(true, 123), Say::Dial(address));
    let limits = StackLimits { flow: Duration::from_millis(1200), ..StackLimits::default() };
    let (_stack, _, end) = start(limits, &handler);
    let ask = || write(&end, &datagram(7000, outside(true, 123), b"x"));

    ask();
    answer(&server).await;
    next(&end).await;
    handler.carried.lock().unwrap().pop().unwrap().cut("no longer".into());
    tokio::time::sleep(Duration::from_millis(30)).await;
    ask();
    answer(&server).await;
    next(&end).await;
    assert_eq!(handler.asked(), 2, "after a cut it is asked again");

    handler.carried.lock().unwrap().clear();
    assert_eq!(handler.log.open().len(), 1);
    tokio::time::sleep(Duration::from_millis(3500)).await;
    assert_eq!(handler.log.open().len(), 0, "a silent flow ends by itself");
}

#[tokio::test]
async fn the_gateway_answers_lookups_and_nothing_else() {
    let handler = FakeHandler::new();
    let (_stack, _, end) = start(StackLimits::default(), &handler);
    for (gateway, port) in [(IpAddr::V4(GATEWAY_V4), (3, 3)), (IpAddr::V6(GATEWAY_V6), (1, 4))] {
        write(&end, &datagram(7000, SocketAddr::new(gateway, 53), b"question"));
        assert_eq!(body(&next(&end).await, 8), b"noitseuq");
        write(&end, &datagram(7000, SocketAddr::new(gateway, 123), b"what time is it"));
        assert_eq!(icmp_kind(&next(&end).await), port);
    }
    assert_eq!(handler.asked(), 0);
}

#[tokio::test]
async fn lookups_are_bounded() {
    let handler = FakeHandler::new();
    let (_stack, device, end) =
        start(StackLimits { lookups: 0, ..StackLimits::default() }, &handler);
    write(&end, &datagram(7000, SocketAddr::new(GATEWAY_V4.into(), 53), b"question"));
    assert_silence(&end, "no room").await;
    assert_eq!(device.dropped(DropReason::Full), 1);
}

#[tokio::test]
async fn echo_requests_are_answered_by_who_is_asked() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("SKIPPED: the host lets only root send echo requests");
    }
    let handler = FakeHandler::new();
    handler.say(outside(true, 0), Say::Dial("127.0.0.1:0".parse().unwrap()));
    handler.say(outside(false, 0), Say::Dial("[::1]:0".parse().unwrap()));
    let (_stack, _, end) = start(StackLimits::default(), &handler);
    for v4 in [true, false] {
        let gateway = if v4 { GATEWAY_V4.into() } else { GATEWAY_V6.into() };
        let reply = if v4 { (0, 0) } else { (129, 0) };
        for to in [gateway, outside(v4, 0).ip()] {
            for sequence in [1, 2, 700] {
                write(&end, &echo(to, 0x1234, sequence, b"are you there"));
                let came = next(&end).await;
                assert_eq!(icmp_kind(&came), reply, "{to}");
                assert_eq!(
                    body(&came, 4)[..2],
                    [0x12, 0x34],
                    "{to}: the identifier is the asker's"
                );
                assert_eq!(body(&came, 6)[..2], sequence.to_be_bytes());
                assert_eq!(body(&came, 8), b"are you there");
            }
        }
    }
    assert_eq!(handler.asked(), 2, "once for each flow, and never for the gateway");
    let elsewhere = "198.51.100.9".parse().unwrap();
    write(&end, &echo(elsewhere, 1, 1, b"may I"));
    assert_eq!(icmp_kind(&next(&end).await), (3, 13));
}

#[tokio::test]
async fn a_device_that_ends_ends_the_stack() {
    let handler = FakeHandler::new();
    let (stack, _, end): (_, _, OwnedFd) = start(StackLimits::default(), &handler);
    drop(end);
    let began = std::time::Instant::now();
    while !stack.task.is_finished() {
        assert!(began.elapsed() < PATIENCE, "it goes on without a device");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
