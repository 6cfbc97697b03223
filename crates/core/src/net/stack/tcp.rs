//! The TCP connections of a sandbox: which there are, and how one begins.
//!
//! A connection that is to be dialled is dialled before it is accepted: the sandbox learns from its own kernel, with
//! the usual errors, whether something listens. Meanwhile the packet that asked for it is kept, and
//! its repetitions ask nothing again.
//!
//! A sandbox has a bounded number of connections, and fewer that are only half open: beyond the
//! first bound a connection is refused, beyond the second it is ignored, as by a kernel whose queue
//! is full. Who has many gets smaller buffers.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::StackLimits;
use super::connection::{TcpConnection, TcpTimeouts};
use super::device::PacketDevice;
use super::packet::{DropReason, Flow, Segment, reset};
use super::stream::Stream;
use super::tcp_state::TcpOptions;
use crate::model::Protocol;
use crate::net::MTU;
use crate::net::flow::{FlowHandler, OpenDecision};
use crate::net::log::OpenFlow;
use crate::net::sockets::SandboxSockets;

/// The largest packet that is kept until outside has answered.
pub(super) const SYN: usize = 1500;

/// Has a socket end with a reset when it is dropped: who is outside must not take half of it for the whole.
pub(super) fn end_abruptly(outside: &TcpStream) {
    // It fails only for what is no socket.
    let _ = SockRef::from(outside).set_linger(Some(Duration::ZERO));
}

/// The connections there are.
#[derive(Debug)]
pub(super) struct ConnectionTable {
    connections: Mutex<HashMap<Flow, Arc<TcpConnection>>>,
    pub(super) patience: TcpTimeouts,
    limits: StackLimits,
    free: Arc<Semaphore>,
    sockets: SandboxSockets,
    half_open: Arc<Semaphore>,
}

impl ConnectionTable {
    pub(super) fn new(limits: StackLimits, sockets: SandboxSockets) -> Self {
        Self {
            sockets,
            connections: Mutex::default(),
            patience: TcpTimeouts { handshake: limits.handshake, linger: limits.linger },
            limits,
            free: Arc::new(Semaphore::new(limits.connections)),
            half_open: Arc::new(Semaphore::new(limits.half_open)),
        }
    }

    /// Takes a packet in: for a connection there is, or to begin one.
    pub(super) fn receive(
        self: &Arc<Self>,
        segment: &Segment<'_>,
        device: &Arc<PacketDevice>,
        handler: &Arc<dyn FlowHandler>,
        tasks: &mut JoinSet<()>,
    ) {
        let known = self.connections().get(&segment.flow).cloned();
        if let Some(connection) = known {
            connection.receive(segment);
        } else if segment.syn && !segment.rst {
            self.begin(segment, device, handler, tasks);
        } else {
            reset(device, segment);
        }
    }

    fn begin(
        self: &Arc<Self>,
        segment: &Segment<'_>,
        device: &Arc<PacketDevice>,
        handler: &Arc<dyn FlowHandler>,
        tasks: &mut JoinSet<()>,
    ) {
        let Ok(half_open) = Arc::clone(&self.half_open).try_acquire_owned() else {
            return device.drop_packet(DropReason::Full);
        };
        if segment.raw.len() > SYN {
            return device.drop_packet(DropReason::Full);
        }
        let Ok(permit) = Arc::clone(&self.free).try_acquire_owned() else {
            device.drop_packet(DropReason::Full);
            return reset(device, segment);
        };
        let socket = match self.sockets.take() {
            Ok(socket) => socket,
            Err(why) => {
                device.drop_packet(DropReason::Full);
                handler.no_socket(Protocol::Tcp, segment.flow.to, why);
                return reset(device, segment);
            }
        };
        let opening = handler.open(segment.flow.to);
        if matches!(opening, OpenDecision::Refuse) {
            return reset(device, segment);
        }
        let connection = Arc::new(TcpConnection::new(segment, device, self, half_open));
        self.connections().insert(segment.flow, Arc::clone(&connection));
        let (table, handler) = (Arc::clone(self), Arc::clone(handler));
        tasks.spawn(async move {
            table.run(connection, handler, opening).await;
            drop((permit, socket));
        });
    }

    async fn run(
        &self,
        connection: Arc<TcpConnection>,
        handler: Arc<dyn FlowHandler>,
        opening: OpenDecision,
    ) {
        let outside = match opening {
            OpenDecision::Refuse => return connection.refuse(),
            OpenDecision::Serve => None,
            OpenDecision::Dial(address, open) => match self.dial(&connection, address, &open).await
            {
                Ok(outside) => Some((outside, open)),
                Err(error) => {
                    handler.unanswered(&open, &error);
                    return connection.refuse();
                }
            },
        };
        connection.accept(self.options(&connection.flow));
        let carry = async {
            if !connection.established().await {
                if let Some((outside, _)) = &outside {
                    end_abruptly(outside);
                }
                return;
            }
            let guest = Stream { connection: Arc::clone(&connection) };
            match outside {
                Some((outside, open)) => handler.relay(guest, outside, open).await,
                None => handler.serve(guest, connection.flow.to).await,
            }
        };
        tokio::join!(connection.drive(), carry);
    }

    async fn dial(
        &self,
        connection: &TcpConnection,
        address: SocketAddr,
        open: &OpenFlow,
    ) -> io::Result<TcpStream> {
        let outside = tokio::select! {
            outside = timeout(self.limits.dial, TcpStream::connect(address)) => {
                outside.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??
            }
            () = open.is_cut() => return Err(io::ErrorKind::ConnectionAborted.into()),
            () = connection.given_up() => return Err(io::ErrorKind::Interrupted.into()),
        };
        outside.set_nodelay(true)?;
        let alive = TcpKeepalive::new()
            // The kernel counts in seconds.
            .with_time(self.limits.keep_alive.max(Duration::from_secs(1)))
            .with_interval(Duration::from_secs(30))
            .with_retries(8);
        SockRef::from(&outside).set_tcp_keepalive(&alive)?;
        Ok(outside)
    }

    /// Who has few connections gets room for many packets, who has many gets less: a sandbox that opens all it may
    /// costs some 80 MiB, and only if it fills all its buffers.
    fn options(&self, flow: &Flow) -> TcpOptions {
        let headers = if flow.to.is_ipv4() { 40 } else { 60 };
        let segment = MTU - headers;
        let open = self.limits.connections - self.free.available_permits();
        let buffer = match open {
            // A whole number of full segments, so that none is cut in two where the ring ends.
            0..=16 => segment * 8,
            17..=64 => segment * 2,
            65..=256 => segment,
            _ => 16 * 1024,
        };
        TcpOptions { buffer, keep_alive: self.limits.keep_alive, dead: self.limits.dead }
    }

    pub(super) fn remove(&self, connection: &TcpConnection) {
        let mut connections = self.connections();
        // Another may have its name by now.
        if connections
            .get(&connection.flow)
            .is_some_and(|known| std::ptr::eq(Arc::as_ptr(known), connection))
        {
            connections.remove(&connection.flow);
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.connections().len()
    }

    fn connections(&self) -> MutexGuard<'_, HashMap<Flow, Arc<TcpConnection>>> {
        self.connections.lock()
    }
}
