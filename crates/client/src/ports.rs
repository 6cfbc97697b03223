//! Ports inside sandboxes: how they are published, tokens for them, and raw connections.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::sandboxes::sandbox;
use crate::transport::Call;
use crate::types::{IssuePortToken, Paged, PortStatus, PortToken, PublishPort};
use crate::{Client, Error};

/// A TCP connection to a port inside a sandbox. Either side may close its own direction and
/// continue to read. The sandbox stays awake while it is open.
pub struct PortStream(TokioIo<Upgraded>);

impl fmt::Debug for PortStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PortStream").finish_non_exhaustive()
    }
}

impl AsyncRead for PortStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buffer)
    }
}

impl AsyncWrite for PortStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

// Every call fails with what the server says (`Error::Api`) or with what the way there says.
#[allow(clippy::missing_errors_doc)]
impl Client {
    /// Lists the ports that a sandbox publishes, and where they are reached.
    pub async fn ports(&self, name: &str) -> Result<Vec<PortStatus>, Error> {
        let page: Paged<PortStatus> =
            self.transport.json(Call::get(sandbox(name, &["ports"]))).await?;
        Ok(page.items)
    }

    /// Publishes a port, changes how it is published, or publishes it no more.
    pub async fn publish(
        &self,
        name: &str,
        port: u16,
        request: &PublishPort,
    ) -> Result<PortStatus, Error> {
        let target = sandbox(name, &["ports", &port.to_string()]);
        self.transport.json(Call::new(hyper::Method::PUT, target).json(request)?).await
    }

    /// Makes a token for a private port.
    pub async fn port_token(
        &self,
        name: &str,
        port: u16,
        request: &IssuePortToken,
    ) -> Result<PortToken, Error> {
        let target = sandbox(name, &["ports", &port.to_string(), "token"]);
        self.transport.json(Call::post(target).json(request)?).await
    }

    /// Connects to a port inside a sandbox, published or not, waking it if it sleeps.
    pub async fn connect_port(&self, name: &str, port: u16) -> Result<PortStream, Error> {
        let target = sandbox(name, &["ports", &port.to_string(), "connect"]);
        let upgraded = self.transport.upgrade(Call::get(target), "tcp").await?;
        Ok(PortStream(TokioIo::new(upgraded)))
    }
}
