//! The descriptor that packets come from and go to: one read, one packet; one write, one packet.
//!
//! A machine with a network card sends Ethernet frames instead. All that is between it and us is one card and no wire, so the
//! header is taken off and put on here, and nothing else knows of it.

use std::cell::RefCell;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use smoltcp::phy::{self, Checksum, DeviceCapabilities, Medium};
use smoltcp::time::Instant as MachineTime;
use tokio::io::unix::{AsyncFd, AsyncFdReadyGuard};
use tokio::time::Instant;

use super::packet::DropReason;
use crate::model::Device;
use crate::net::MTU;

thread_local! {
    /// Where packets are written before they go out: one for each thread that carries packets, none for each
    /// connection.
    static SCRATCH: RefCell<Vec<u8>> = RefCell::new(vec![0; MTU]);
}

/// The address that frames to a card come from.
const GATEWAY_MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 1];
/// Bytes of an Ethernet header: to whom, from whom, what.
const HEADER: usize = 14;
const IPV4: [u8; 2] = [0x08, 0x00];
const IPV6: [u8; 2] = [0x86, 0xdd];

/// A sandbox's device.
#[derive(Debug)]
pub(super) struct PacketDevice {
    descriptor: AsyncFd<OwnedFd>,
    /// The card's address, if packets come in Ethernet frames.
    card: Option<[u8; 6]>,
    began: Instant,
    dropped: [AtomicU64; DropReason::COUNT],
}

impl PacketDevice {
    pub(super) fn new(device: Device) -> io::Result<Self> {
        let (descriptor, card) = match device {
            Device::Tun(descriptor) => (descriptor, None),
            Device::Ethernet { socket, mac } => (socket, Some(mac)),
        };
        let flags = fcntl_getfl(&descriptor)?;
        fcntl_setfl(&descriptor, flags | OFlags::NONBLOCK)?;
        #[expect(
            deprecated,
            reason = "sound here: the descriptor is owned, and not closed while registered"
        )]
        let descriptor = AsyncFd::new(descriptor)?;
        Ok(Self {
            descriptor,
            card,
            began: Instant::now(),
            dropped: std::array::from_fn(|_| AtomicU64::new(0)),
        })
    }

    pub(super) async fn readable(&self) -> io::Result<AsyncFdReadyGuard<'_, OwnedFd>> {
        self.descriptor.readable().await
    }

    /// Reads one packet. A frame that has none in it is [`io::ErrorKind::Interrupted`]: continue
    /// with the next.
    pub(super) fn read(&self, into: &mut [u8]) -> io::Result<usize> {
        let descriptor = self.descriptor.get_ref();
        if self.card.is_none() {
            return Ok(rustix::io::read(descriptor, into)?);
        }
        let mut header = [0; HEADER];
        let mut parts = [IoSliceMut::new(&mut header), IoSliceMut::new(into)];
        let length = rustix::io::readv(descriptor, &mut parts)?;
        let kind = [header[12], header[13]];
        if length <= HEADER || (kind != IPV4 && kind != IPV6) {
            self.drop_packet(DropReason::NotIp);
            return Err(io::ErrorKind::Interrupted.into());
        }
        Ok(length - HEADER)
    }

    /// Writes one packet. `false` when there is no room for it now; what the device does not take for another reason
    /// is lost, as packets may be.
    pub(super) fn write(&self, packet: &[u8]) -> bool {
        let descriptor = self.descriptor.get_ref();
        loop {
            let written = match self.card {
                None => rustix::io::write(descriptor, packet),
                Some(card) => {
                    let header = header(card, packet);
                    let parts = [IoSlice::new(&header), IoSlice::new(packet)];
                    rustix::io::writev(descriptor, &parts)
                }
            };
            match written {
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return false,
                Ok(_) | Err(_) => return true,
            }
        }
    }

    /// Has `fill` make a packet of `length` bytes, and writes it.
    pub(super) fn compose(&self, length: usize, fill: impl FnOnce(&mut [u8])) {
        SCRATCH.with_borrow_mut(|scratch| {
            if let Some(packet) = scratch.get_mut(..length) {
                fill(packet);
                self.write(packet);
            }
        });
    }

    /// Resolves when a packet may be written again.
    pub(super) async fn writable(&self) {
        if let Ok(mut ready) = self.descriptor.writable().await {
            // It is asked for only after a write found no room, so what was known of it is out of date.
            ready.clear_ready();
        }
    }

    /// Counts a packet that was not taken.
    pub(super) fn drop_packet(&self, why: DropReason) {
        self.dropped[why as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// How many packets were not taken for this reason.
    pub(super) fn dropped(&self, why: DropReason) -> u64 {
        self.dropped[why as usize].load(Ordering::Relaxed)
    }

    /// The time that machines go by.
    pub(super) fn now(&self) -> MachineTime {
        MachineTime::from_micros(
            i64::try_from(self.began.elapsed().as_micros()).unwrap_or(i64::MAX),
        )
    }

    /// When that is on the runtime's clock.
    pub(super) fn at(&self, time: MachineTime) -> Instant {
        self.began + Duration::from_micros(u64::try_from(time.total_micros()).unwrap_or(0))
    }
}

/// What is before a packet in a frame for a card.
fn header(card: [u8; 6], packet: &[u8]) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..6].copy_from_slice(&card);
    header[6..12].copy_from_slice(&GATEWAY_MAC);
    let is_v6 = packet.first().is_some_and(|first| first >> 4 == 6);
    header[12..].copy_from_slice(if is_v6 { &IPV6 } else { &IPV4 });
    header
}

/// What a connection's machine takes for its device, for one turn: at most one packet comes in, and what goes out is
/// written at once.
#[derive(Debug)]
pub(super) struct PacketPort<'a> {
    pub(super) device: &'a PacketDevice,
    /// The packet that came in.
    pub(super) incoming: Option<&'a [u8]>,
    /// A packet that found no room. While there is one, nothing else goes out.
    pub(super) held: &'a mut Option<Box<[u8]>>,
}

impl PacketPort<'_> {
    /// Tries again to write what found no room.
    pub(super) fn flush(&mut self) {
        if self.held.as_ref().is_some_and(|packet| self.device.write(packet)) {
            *self.held = None;
        }
    }
}

impl phy::Device for PacketPort<'_> {
    type RxToken<'b>
        = RxPacket<'b>
    where
        Self: 'b;
    type TxToken<'b>
        = TxPacket<'b>
    where
        Self: 'b;

    fn receive(&mut self, _: MachineTime) -> Option<(RxPacket<'_>, TxPacket<'_>)> {
        let packet = self.incoming.take()?;
        Some((RxPacket(packet), TxPacket { device: self.device, held: self.held }))
    }

    fn transmit(&mut self, _: MachineTime) -> Option<TxPacket<'_>> {
        if self.held.is_some() {
            return None;
        }
        Some(TxPacket { device: self.device, held: self.held })
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = MTU;
        // What comes in was checked at the door.
        capabilities.checksum.ipv4 = Checksum::Tx;
        capabilities.checksum.tcp = Checksum::Tx;
        capabilities
    }
}

#[derive(Debug)]
pub(super) struct RxPacket<'a>(&'a [u8]);

impl phy::RxToken for RxPacket<'_> {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, take: F) -> R {
        take(self.0)
    }
}

#[derive(Debug)]
pub(super) struct TxPacket<'a> {
    device: &'a PacketDevice,
    held: &'a mut Option<Box<[u8]>>,
}

impl phy::TxToken for TxPacket<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, length: usize, fill: F) -> R {
        SCRATCH.with_borrow_mut(|scratch| {
            // A machine makes no packet larger than the device takes.
            if scratch.len() < length {
                scratch.resize(length, 0);
            }
            let packet = &mut scratch[..length];
            let result = fill(packet);
            // An answer to what came in may find the buffer full: it is lost, and sent again when the sandbox repeats its packet.
            if self.held.is_none() && !self.device.write(packet) {
                *self.held = Some(Box::from(&*packet));
            }
            result
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixDatagram;

    use super::{Device, DropReason, PacketDevice};

    const CARD: [u8; 6] = [2, 1, 2, 3, 4, 5];

    #[tokio::test]
    async fn frames_are_unwrapped_and_wrapped() {
        let (ours, card) = UnixDatagram::pair().unwrap();
        card.set_nonblocking(true).unwrap();
        let device =
            PacketDevice::new(Device::Ethernet { socket: ours.into(), mac: CARD }).unwrap();
        let mut frame = [0; 100];
        for (first, kind) in [(0x45, [0x08, 0x00]), (0x60, [0x86, 0xdd])] {
            assert!(device.write(&[first, 1, 2, 3]));
            let length = card.recv(&mut frame).unwrap();
            assert_eq!(frame[..6], CARD);
            assert_eq!((&frame[12..14], &frame[14..length]), (&kind[..], &[first, 1, 2, 3][..]));
            card.send(&frame[..length]).unwrap();
            let mut packet = [0; 100];
            assert_eq!(device.read(&mut packet).unwrap(), 4);
            assert_eq!(packet[..4], [first, 1, 2, 3]);
        }
    }

    #[tokio::test]
    async fn what_is_no_packet_is_skipped_and_never_the_end() {
        let (ours, card) = UnixDatagram::pair().unwrap();
        let device =
            PacketDevice::new(Device::Ethernet { socket: ours.into(), mac: CARD }).unwrap();
        let mut arp = [0; 42];
        arp[12..14].copy_from_slice(&[0x08, 0x06]);
        let mut bare = [0; 14];
        bare[12] = 0x08;
        let odd: [&[u8]; 4] = [&[], &[1, 2, 3], &arp, &bare];
        let mut packet = [0; 100];
        for frame in odd {
            rustix::net::send(card.as_fd(), frame, rustix::net::SendFlags::empty()).unwrap();
            let error = device.read(&mut packet).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::Interrupted, "{frame:?}");
        }
        assert_eq!(device.dropped(DropReason::NotIp), odd.len() as u64);
        assert_eq!(device.read(&mut packet).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }
}
