//! The network device of a machine: drivers hand it out, `net` reads and writes it.

use std::os::fd::OwnedFd;

/// How large a packet may be, on the device and in the stack.
pub const MTU: usize = 65_520;

/// A machine's network device, seen from outside.
#[derive(Debug)]
pub enum Device {
    /// A TUN device: each read and each write is one IP packet. Does not block.
    Tun(OwnedFd),
    /// A datagram socket to a network card: each read and each write is one Ethernet frame. Does not block.
    Ethernet {
        /// The socket.
        socket: OwnedFd,
        /// The card's address.
        mac: [u8; 6],
    },
}
