//! The descriptor that packets come from and go to: one read, one packet; one write, one packet.

use std::cell::RefCell;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use smoltcp::phy::{self, Checksum, DeviceCapabilities, Medium};
use smoltcp::time::Instant as MachineTime;
use tokio::io::unix::{AsyncFd, AsyncFdReadyGuard};
use tokio::time::Instant;

use super::packet::Bad;
use crate::net::MTU;

thread_local! {
    /// Where packets are written before they go out: one for each thread that carries packets, none for each
    /// connection.
    static SCRATCH: RefCell<Vec<u8>> = RefCell::new(vec![0; MTU]);
}

/// A sandbox's device.
#[derive(Debug)]
pub(super) struct Device {
    descriptor: AsyncFd<OwnedFd>,
    began: Instant,
    dropped: [AtomicU64; Bad::COUNT],
}

impl Device {
    pub(super) fn new(descriptor: OwnedFd) -> io::Result<Self> {
        let flags = fcntl_getfl(&descriptor)?;
        fcntl_setfl(&descriptor, flags | OFlags::NONBLOCK)?;
        #[expect(
            deprecated,
            reason = "sound here: the descriptor is owned, and not closed while registered"
        )]
        let descriptor = AsyncFd::new(descriptor)?;
        Ok(Self {
            descriptor,
            began: Instant::now(),
            dropped: std::array::from_fn(|_| AtomicU64::new(0)),
        })
    }

    pub(super) async fn readable(&self) -> io::Result<AsyncFdReadyGuard<'_, OwnedFd>> {
        self.descriptor.readable().await
    }

    /// Reads one packet.
    pub(super) fn read(&self, into: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::io::read(self.descriptor.get_ref(), into)?)
    }

    /// Writes one packet. `false` when there is no room for it now; what the device does not take for another reason
    /// is lost, as packets may be.
    pub(super) fn write(&self, packet: &[u8]) -> bool {
        loop {
            match rustix::io::write(self.descriptor.get_ref(), packet) {
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
    pub(super) fn drop_packet(&self, why: Bad) {
        self.dropped[why as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// How many packets were not taken for this reason.
    pub(super) fn dropped(&self, why: Bad) -> u64 {
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

/// What a connection's machine takes for its device, for one turn: at most one packet comes in, and what goes out is
/// written at once.
#[derive(Debug)]
pub(super) struct Port<'a> {
    pub(super) device: &'a Device,
    /// The packet that came in.
    pub(super) incoming: Option<&'a [u8]>,
    /// A packet that found no room. While there is one, nothing else goes out.
    pub(super) held: &'a mut Option<Box<[u8]>>,
}

impl Port<'_> {
    /// Tries again to write what found no room.
    pub(super) fn flush(&mut self) {
        if self.held.as_ref().is_some_and(|packet| self.device.write(packet)) {
            *self.held = None;
        }
    }
}

impl phy::Device for Port<'_> {
    type RxToken<'b>
        = Incoming<'b>
    where
        Self: 'b;
    type TxToken<'b>
        = Outgoing<'b>
    where
        Self: 'b;

    fn receive(&mut self, _: MachineTime) -> Option<(Incoming<'_>, Outgoing<'_>)> {
        let packet = self.incoming.take()?;
        Some((Incoming(packet), Outgoing { device: self.device, held: self.held }))
    }

    fn transmit(&mut self, _: MachineTime) -> Option<Outgoing<'_>> {
        if self.held.is_some() {
            return None;
        }
        Some(Outgoing { device: self.device, held: self.held })
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
pub(super) struct Incoming<'a>(&'a [u8]);

impl phy::RxToken for Incoming<'_> {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, take: F) -> R {
        take(self.0)
    }
}

#[derive(Debug)]
pub(super) struct Outgoing<'a> {
    device: &'a Device,
    held: &'a mut Option<Box<[u8]>>,
}

impl phy::TxToken for Outgoing<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, length: usize, fill: F) -> R {
        SCRATCH.with_borrow_mut(|scratch| {
            // A machine makes no packet larger than the device takes.
            if scratch.len() < length {
                scratch.resize(length, 0);
            }
            let packet = &mut scratch[..length];
            let result = fill(packet);
            // An answer to what came in may find the place taken: it is lost, and made again when asked for again.
            if self.held.is_none() && !self.device.write(packet) {
                *self.held = Some(Box::from(&*packet));
            }
            result
        })
    }
}
