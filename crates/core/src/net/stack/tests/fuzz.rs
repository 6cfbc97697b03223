//! Whatever bytes a sandbox writes: nothing panics, nothing grows.

use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::*;
use smoltcp::wire::{Ipv4Packet, TcpControl, TcpPacket};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::guest::{Fields, SYN, datagram, parse_segment, read, segment};
use super::{FakeHandler, Say, StackLimits, device, outside};
use crate::model::Device;
use crate::net::flow::FlowHandler;
use crate::net::sockets::SandboxSockets;
use crate::net::stack::datagrams::Flows;
use crate::net::stack::device::PacketDevice;
use crate::net::stack::packet::{DropReason, parse};
use crate::net::stack::tcp::ConnectionTable;
use crate::net::stack::{StackTask, packet};
use crate::net::{GUEST_V4, GUEST_V6};

const LIMITS: (usize, usize, usize) = (16, 8, 8);

/// A stack whose packets are put in by hand, and its device's other end.
fn stack_task(handler: &Arc<FakeHandler>) -> (StackTask, std::os::fd::OwnedFd) {
    let (ours, theirs) = device();
    let (connections, half_open, datagrams) = LIMITS;
    let limits = StackLimits { connections, half_open, datagrams, ..StackLimits::default() };
    let stack_task = StackTask {
        device: Arc::new(PacketDevice::new(Device::Tun(ours)).unwrap()),
        handler: Arc::clone(handler) as Arc<dyn FlowHandler>,
        table: Arc::new(ConnectionTable::new(limits, SandboxSockets::few(1000))),
        flows: Flows::new(limits, SandboxSockets::few(1000)),
        lookups: Arc::new(Semaphore::new(limits.lookups)),
        tasks: JoinSet::new(),
    };
    (stack_task, theirs)
}

fn handler() -> Arc<FakeHandler> {
    let handler = FakeHandler::new();
    for v4 in [true, false] {
        handler.say(outside(v4, 7), Say::Echo);
        handler.say(outside(v4, 8), Say::Answer(b"answer"));
    }
    handler
}

/// Sums a TCP packet up, so that it passes the door.
fn sum_up(packet: &mut [u8]) {
    if packet.len() < 20 {
        return;
    }
    if packet[0] >> 4 == 4 {
        packet[0] = 0x45;
        let length = u16::try_from(packet.len()).unwrap_or(u16::MAX);
        packet[2..4].copy_from_slice(&length.to_be_bytes());
        packet[6..8].copy_from_slice(&[0, 0]);
        packet[9] = 6;
        packet[12..16].copy_from_slice(&GUEST_V4.octets());
        packet[16..20].copy_from_slice(&[192, 0, 2, 7]);
        Ipv4Packet::new_unchecked(&mut packet[..]).fill_checksum();
    }
    let header = if packet[0] >> 4 == 4 { 20 } else { 40 };
    if packet.len() < header + 20 {
        return;
    }
    let ends = if header == 20 {
        (GUEST_V4.into(), outside(true, 7).ip().into())
    } else {
        packet[6] = 6;
        let length = u16::try_from(packet.len() - 40).unwrap_or(u16::MAX);
        packet[4..6].copy_from_slice(&length.to_be_bytes());
        packet[8..24].copy_from_slice(&GUEST_V6.octets());
        if let std::net::IpAddr::V6(to) = outside(false, 7).ip() {
            packet[24..40].copy_from_slice(&to.octets());
        }
        (GUEST_V6.into(), outside(false, 7).ip().into())
    };
    TcpPacket::new_unchecked(&mut packet[header..]).fill_checksum(&ends.0, &ends.1);
}

/// Something a hostile sandbox does.
#[derive(Debug, Clone)]
enum Move {
    Noise(Vec<u8>),
    /// A good packet with some bytes changed, with right or wrong sums.
    Changed {
        good: usize,
        changes: Vec<(usize, u8)>,
        cut: usize,
        summed: bool,
    },
    /// A segment of a connection, with whatever numbers.
    Segment {
        v4: bool,
        port: u16,
        flags: u8,
        seq: i32,
        ack: i32,
        window: u16,
        payload: usize,
    },
    Wait,
}

fn moves() -> impl Strategy<Value = Move> {
    let changed = (0..6_usize, vec((0..80_usize, any::<u8>()), 0..6), 0..90_usize, any::<bool>());
    // Near to what is expected, where mistakes are made.
    let near = prop_oneof![Just(0), -3..3_i32, any::<i32>(), Just(i32::MAX), Just(i32::MIN)];
    let numbers = (any::<u8>(), near.clone(), near, any::<u16>(), 0..3000_usize);
    prop_oneof![
        2 => vec(any::<u8>(), 0..200).prop_map(Move::Noise),
        4 => changed.prop_map(|(good, changes, cut, summed)| Move::Changed { good, changes, cut, summed }),
        12 => (any::<bool>(), 0..4_u16, numbers).prop_map(
            |(v4, port, (flags, seq, ack, window, payload))| Move::Segment {
                v4, port, flags, seq, ack, window, payload,
            }
        ),
        1 => Just(Move::Wait),
    ]
}

fn good(which: usize) -> Vec<u8> {
    let v4 = which.is_multiple_of(2);
    match which / 2 {
        0 => segment(5000, outside(v4, 7), SYN),
        1 => segment(5000, outside(v4, 7), Fields { ack: Some(1), payload: b"data", ..SYN }),
        _ => datagram(5000, outside(v4, 7), b"datagram"),
    }
}

/// What the sandbox knows of its connections, so that its packets are near to what is expected.
#[derive(Default)]
struct Known([(i32, i32); 8]);

impl Known {
    fn hear(&mut self, packet: &[u8]) {
        let v4 = packet[0] >> 4 == 4;
        if packet[if v4 { 9 } else { 6 }] != 6 {
            return;
        }
        let port = u16::from_be_bytes(packet[if v4 { 22 } else { 42 }..][..2].try_into().unwrap());
        let Some(known) = self.0.get_mut(usize::from(port % 4) + 4 * usize::from(v4)) else {
            return;
        };
        let parse_segment = parse_segment(packet);
        let fin = matches!(parse_segment.control, TcpControl::Syn | TcpControl::Fin);
        let length = i32::try_from(parse_segment.payload.len()).unwrap() + i32::from(fin);
        *known = (parse_segment.ack.unwrap_or(0), parse_segment.seq.wrapping_add(length));
    }
}

fn packet_of(one: &Move, known: &Known) -> Vec<u8> {
    match one {
        Move::Noise(bytes) => bytes.clone(),
        Move::Changed { good: which, changes, cut, summed } => {
            let mut packet = good(*which);
            for (at, to) in changes {
                let length = packet.len();
                packet[at % length] = *to;
            }
            packet.truncate(packet.len().max(90) - cut);
            if *summed {
                sum_up(&mut packet);
            }
            packet
        }
        Move::Segment { v4, port, flags, seq, ack, window, payload } => {
            let (next, heard) = known.0[usize::from(*port) + 4 * usize::from(*v4)];
            let fields = Fields {
                control: [TcpControl::None, TcpControl::Syn, TcpControl::Fin, TcpControl::Rst]
                    [usize::from(flags & 3)],
                seq: next.wrapping_add(*seq),
                ack: (flags & 12 != 0).then(|| heard.wrapping_add(*ack)),
                window: *window,
                payload: &vec![0x55; if flags & 16 == 0 { *payload } else { 0 }],
            };
            // Ports that leave the same remainder are the same connection to it.
            let mut packet = segment(5000 + port, outside(*v4, 7 + port % 2), fields);
            // Every combination of flags, urgent pointers and the rest of it.
            if flags & 32 != 0 {
                packet[if *v4 { 33 } else { 53 }] = *flags;
                let header = if *v4 { 20 } else { 40 };
                let guest = if *v4 { GUEST_V4.into() } else { GUEST_V6.into() };
                TcpPacket::new_unchecked(&mut packet[header..])
                    .fill_checksum(&guest, &outside(*v4, 7).ip().into());
            }
            packet
        }
        Move::Wait => Vec::new(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn the_door_never_panics(bytes in vec(any::<u8>(), 0..300)) {
        let _ = parse(&bytes);
        let _ = packet::read_echo_reply(true, &bytes);
        let _ = packet::read_echo_reply(false, &bytes);
        let mut summed = bytes;
        sum_up(&mut summed);
        let _ = parse(&summed);
    }

    #[test]
    fn a_hostile_sandbox_breaks_nothing_and_grows_nothing(all in vec(moves(), 1..120)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let handler = handler();
            let (mut stack_task, end) = stack_task(&handler);
            let mut known = Known::default();
            for one in &all {
                stack_task.take(&packet_of(one, &known));
                if matches!(one, Move::Wait) {
                    tokio::task::yield_now().await;
                }
                while let Some(packet) = read(&end) {
                    known.hear(&packet);
                }
            }
            let (connections, _, datagrams) = LIMITS;
            assert!(stack_task.table.len() <= connections);
            assert!(stack_task.flows.len() <= datagrams);
            assert!(stack_task.tasks.len() <= connections + datagrams + 64 + all.len());
            assert_eq!(stack_task.device.dropped(DropReason::Failed), 0, "a machine panicked");
            stack_task.tasks.shutdown().await;
        });
    }
}
