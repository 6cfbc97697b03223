//! The interface between `stack`, which carries flows, and `dispatch`, which decides about them.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use async_trait::async_trait;
use tokio::net::TcpStream;

use super::log::OpenFlow;
use super::sockets::NoSocket;
use super::stack::Stream;
use crate::model::Protocol;

/// The decision about a connection that a sandbox wants to open.
#[derive(Debug, Clone)]
pub(super) enum OpenDecision {
    /// It is reset.
    Refuse,
    /// The stack dials this address; when it answers, the connection is accepted inside and given
    /// to [`FlowHandler::relay`]. When it does not, the connection is reset.
    Dial(SocketAddr, Arc<OpenFlow>),
    /// It is accepted at once and given to [`FlowHandler::serve`]: what it is for shows in its first bytes.
    Serve,
}

/// A flow of datagrams, or of echo requests, that may go out.
#[derive(Debug, Clone)]
pub(super) struct Datagrams {
    /// Where they really go.
    pub(super) to: SocketAddr,
    /// What counts them, and says when they must end.
    pub(super) open: Arc<OpenFlow>,
}

/// Decides about flows and carries those that are not the stack's own business.
///
/// Every method is called from the stack's own tasks and must not block. `to` is always what the sandbox
/// wrote into its packet.
#[async_trait]
pub(super) trait FlowHandler: Send + Sync + 'static {
    /// The sandbox wants to open a connection. Called once for each, not for repeated packets.
    fn open(&self, to: SocketAddr) -> OpenDecision;

    /// A flow was not opened: there is no socket for it.
    fn no_socket(&self, protocol: Protocol, to: SocketAddr, why: NoSocket);

    /// The address that was to be dialled did not answer.
    fn unanswered(&self, open: &OpenFlow, error: &io::Error);

    /// Carries a connection that was dialled to its end.
    async fn relay(self: Arc<Self>, guest: Stream, outside: TcpStream, open: Arc<OpenFlow>);

    /// Carries a connection that was accepted, to its end.
    async fn serve(self: Arc<Self>, guest: Stream, to: SocketAddr);

    /// A flow of datagrams begins; `None` when it may not. For echo requests the port is 0.
    fn datagrams(&self, protocol: Protocol, to: SocketAddr) -> Option<Datagrams>;

    /// Answers a lookup that came as a datagram to the gateway; `None` when there is nothing to say.
    async fn lookup(self: Arc<Self>, query: Vec<u8>) -> Option<Vec<u8>>;
}
