//! Relays bytes between a connection and a port.

use std::io;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use sandkeep_core::engine::Connected;
use tokio::io::{
    AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, DuplexStream, ReadBuf,
};
use tokio::sync::oneshot;
use tokio_util::task::TaskTracker;

/// How much may be under way between the connection and the agent.
const BUFFER: usize = 64 << 10;
/// How long a process may take to see that no client is left, before its connection is closed.
const LINGER: Duration = Duration::from_secs(2);
/// How long a port may be silent after the client sent its last byte. The client may be gone for
/// good, which looks the same.
const HALF_OPEN: Duration = Duration::from_secs(15 * 60);

/// Our end of a connection to a port, upgraded or not. The other end learns when it goes.
pub(super) struct PortConnection {
    stream: DuplexStream,
    _present: oneshot::Sender<()>,
}

/// Has a connection carried by a task among `tasks`, and answers with our end of it.
pub(super) fn relayed(tasks: &TaskTracker, connected: Connected) -> PortConnection {
    let (stream, theirs) = tokio::io::duplex(BUFFER);
    let (present, gone) = oneshot::channel();
    let left = async move {
        let _ = gone.await;
        tokio::time::sleep(LINGER).await;
    };
    tasks.spawn(relay(theirs, connected, left));
    PortConnection { stream, _present: present }
}

impl AsyncRead for PortConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for PortConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Carries bytes between a connection and the agent until both directions are done, or until `left`:
/// a process that hangs does not see that the other side is gone.
pub(crate) async fn relay<S>(stream: S, connected: Connected, left: impl Future<Output = ()>)
where
    S: AsyncRead + AsyncWrite,
{
    // The sandbox stays awake as long as the connection lasts.
    let (mut out, mut incoming, awake) = connected;
    let (mut read, mut write) = tokio::io::split(stream);
    let said_all = AtomicBool::new(false);
    let to_port = async {
        loop {
            let mut buffer = bytes::BytesMut::with_capacity(16 << 10);
            if read.read_buf(&mut buffer).await? == 0 {
                break;
            }
            let count = buffer.len() as u64;
            out.send(buffer.freeze()).await.map_err(io::Error::other)?;
            awake.count_traffic(count, 0);
        }
        out.end();
        said_all.store(true, Ordering::Relaxed);
        Ok::<_, io::Error>(())
    };
    let from_port = async {
        loop {
            let mut next = pin!(incoming.next());
            let piece = loop {
                match tokio::time::timeout(HALF_OPEN, &mut next).await {
                    Ok(piece) => break piece.map_err(io::Error::other)?,
                    Err(_) if said_all.load(Ordering::Relaxed) => break None,
                    Err(_) => {}
                }
            };
            let Some(bytes) = piece else { break };
            awake.count_traffic(0, bytes.len() as u64);
            write.write_all(&bytes).await?;
            write.flush().await?;
        }
        write.shutdown().await
    };
    // An answer may be whole before the request is: then the client that waits for it hangs up.
    tokio::select! {
        carried = async { tokio::try_join!(to_port, from_port) } => if let Err(error) = carried {
            tracing::debug!(%error, "a connection to a port broke");
        },
        () = left => tracing::debug!("a connection to a port did not close in time"),
    }
}
