//! Packets to streams and datagrams, and back.

/// The sandbox's end of a TCP connection.
#[derive(Debug)]
pub(super) struct Stream;
