//! Packets to streams and datagrams, and back.

use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::flow::Switch;
use super::ledger::Open;

/// The TCP/IP stack of one sandbox. When it is dropped, all it carries ends.
#[derive(Debug)]
pub(super) struct Stack;

impl Stack {
    /// Answers the packets of `device`, and asks `switch` about every new flow.
    pub(super) fn start(_device: OwnedFd, _switch: Arc<dyn Switch>) -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Ends all it carries, and returns when nothing of it runs any more.
    pub(super) async fn close(self) {}
}

/// The sandbox's end of a TCP connection. Dropped, it ends like a socket does: what was written still arrives.
#[derive(Debug)]
pub(super) struct Stream;

impl Stream {
    /// Ends it at once; the sandbox sees a reset.
    pub(super) fn reset(self) {}
}

/// Carries a dialled connection to its end, counting on `open`: each direction ends on its own, a slow side slows the
/// other down, and when it is cut both sides see a reset.
pub(super) async fn relay(
    _guest: Stream,
    _outside: TcpStream,
    _open: &Arc<Open>,
) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        _context: &mut Context<'_>,
        _into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Poll::Ready(Err(io::ErrorKind::Unsupported.into()))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        _context: &mut Context<'_>,
        _from: &[u8],
    ) -> Poll<io::Result<usize>> {
        Poll::Ready(Err(io::ErrorKind::Unsupported.into()))
    }

    fn poll_flush(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
