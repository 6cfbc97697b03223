//! The sandbox's end of a TCP connection, for its reader and writer.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::connection::TcpConnection;
use super::tcp_state::{Readable, TcpStateMachine};

/// The sandbox's end of a TCP connection.
///
/// Dropped, it ends as a socket does: what was written still arrives, then the sandbox sees the end. What it still
/// sends is thrown away for a while.
#[derive(Debug)]
pub(in crate::net) struct Stream {
    pub(super) connection: Arc<TcpConnection>,
}

impl Stream {
    /// Ends it at once: the sandbox sees a reset.
    pub(in crate::net) fn reset(self) {
        self.connection.act(|machine| machine.socket().abort());
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.connection.abandon();
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if into.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        let read = self.connection.act(|machine| match machine.readable() {
            Readable::Some => {
                // Twice: what was written around the end of the ring is in two pieces.
                for _ in 0..2 {
                    let _ = machine.socket().recv(|data| {
                        let bytes = data.len().min(into.remaining());
                        into.put_slice(&data[..bytes]);
                        (bytes, ())
                    });
                }
                Poll::Ready(Ok(()))
            }
            Readable::Nothing => {
                machine.socket().register_recv_waker(context.waker());
                Poll::Pending
            }
            Readable::End => Poll::Ready(Ok(())),
            Readable::Reset => Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())),
        });
        read.unwrap_or_else(|| Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = self.connection.act(|machine| match machine.socket().send_slice(from) {
            Ok(0) if !from.is_empty() => {
                machine.socket().register_send_waker(context.waker());
                Poll::Pending
            }
            Ok(bytes) => Poll::Ready(Ok(bytes)),
            Err(_) => Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
        });
        written.unwrap_or_else(|| Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        let closed = self.connection.act(|machine: &mut TcpStateMachine| machine.socket().close());
        match closed {
            Some(()) => Poll::Ready(Ok(())),
            None => Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
        }
    }
}
