//! Packets to streams and datagrams, and back: the TCP/IP stack of one sandbox.
//!
//! ```text
//!             ┌ parse: whole? from the sandbox? sums up? ── no ──> counted, forgotten
//!  device ──> │
//!             ├ TCP    table ──> connection (a smoltcp machine each) ──> stream, or relay
//!             ├ UDP    flows ──> a connected socket each;  gateway:53 ──> lookup
//!             └ ICMP   the gateway's echo is ours, others' go out as flows
//! ```
//!
//! Any address outside is answered for: the [`FlowHandler`] says what becomes of a flow, and the stack knows no policy.
//! One task reads the device and takes packets in, and each connection and each flow has one. What can be
//! done about a packet is done at once in the task that read it; see [`connection`]. After a batch of packets the
//! task lets others run, so that a sandbox that floods its device slows down nobody but itself.
//!
//! Everything is bounded: connections, those half open, flows, lookups, what is buffered for each, and the host's sockets of a
//! project's and of all sandboxes together ([`SandboxSockets`]). There is no
//! queue of packets: what cannot be taken now is dropped if it is a datagram, and not acknowledged if it
//! belongs to a stream.

mod connection;
mod datagrams;
mod device;
mod packet;
mod relay;
mod stream;
mod tcp;
mod tcp_state;
#[cfg(test)]
mod tests;

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, Semaphore};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{MissedTickBehavior, interval};

use self::datagrams::Flows;
use self::device::PacketDevice;
use self::packet::{Datagram, DropReason, Packet, Unreachable};
pub(super) use self::relay::relay;
pub(super) use self::stream::Stream;
use self::tcp::ConnectionTable;
use super::flow::FlowHandler;
use super::sockets::SandboxSockets;
use super::{GATEWAY_V4, GATEWAY_V6, MTU};
use crate::model::Device;

/// How many packets are taken in before others get their turn.
const BATCH: usize = 64;

/// How much a sandbox may have at once, and how long things may take.
#[derive(Debug, Clone, Copy)]
struct StackLimits {
    connections: usize,
    /// Connections that are not open yet.
    half_open: usize,
    /// Flows of datagrams and of echo requests.
    datagrams: usize,
    lookups: usize,
    /// Until somebody outside answers.
    dial: Duration,
    /// Until the sandbox has opened what it asked for.
    handshake: Duration,
    /// Until what is left has arrived, without progress.
    linger: Duration,
    /// Silence after which a keep-alive is sent to the sandbox.
    keep_alive: Duration,
    /// Silence after which it is not.
    dead: Duration,
    /// Silence after which a flow ends.
    flow: Duration,
    /// The same for lookups and echo requests, which are over when they are answered.
    brief_flow: Duration,
    /// How long a refusal is repeated without asking.
    refusal: Duration,
}

impl Default for StackLimits {
    fn default() -> Self {
        Self {
            connections: 1024,
            half_open: 512,
            datagrams: 512,
            lookups: 64,
            dial: Duration::from_secs(15),
            handshake: Duration::from_secs(10),
            linger: Duration::from_secs(20),
            keep_alive: Duration::from_secs(60),
            dead: Duration::from_secs(300),
            flow: Duration::from_secs(60),
            brief_flow: Duration::from_secs(10),
            refusal: Duration::from_secs(3),
        }
    }
}

/// The TCP/IP stack of one sandbox. When it is dropped, all it carries ends.
#[derive(Debug)]
pub(super) struct Stack {
    task: JoinHandle<()>,
    close: Arc<Notify>,
}

impl Stack {
    /// Answers the packets of `device`, and asks `handler` about every new flow.
    pub(super) fn start(
        device: Device,
        handler: Arc<dyn FlowHandler>,
        sockets: SandboxSockets,
    ) -> io::Result<Self> {
        Ok(Self::with(
            StackLimits::default(),
            Arc::new(PacketDevice::new(device)?),
            handler,
            sockets,
        ))
    }

    fn with(
        limits: StackLimits,
        device: Arc<PacketDevice>,
        handler: Arc<dyn FlowHandler>,
        sockets: SandboxSockets,
    ) -> Self {
        let close = Arc::new(Notify::new());
        let carrier = StackTask {
            lookups: Arc::new(Semaphore::new(limits.lookups)),
            table: Arc::new(ConnectionTable::new(limits, sockets.clone())),
            flows: Flows::new(limits, sockets),
            tasks: JoinSet::new(),
            device,
            handler,
        };
        let task = tokio::spawn(carrier.run(Arc::clone(&close)));
        Self { task, close }
    }

    /// Ends all it carries, and returns when nothing of it runs any more.
    pub(super) async fn close(mut self) {
        self.close.notify_one();
        let _ = (&mut self.task).await;
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What the stack's task holds.
struct StackTask {
    device: Arc<PacketDevice>,
    handler: Arc<dyn FlowHandler>,
    table: Arc<ConnectionTable>,
    flows: Flows,
    lookups: Arc<Semaphore>,
    /// One for each connection, flow and lookup. They end with this.
    tasks: JoinSet<()>,
}

impl StackTask {
    async fn run(mut self, close: Arc<Notify>) {
        let mut buffer = vec![0; MTU];
        let mut sweep = interval(Duration::from_secs(1));
        sweep.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let device = Arc::clone(&self.device);
        loop {
            let mut readable = tokio::select! {
                () = close.notified() => break,
                _ = sweep.tick() => {
                    self.flows.sweep(&self.device);
                    continue;
                }
                Some(_) = self.tasks.join_next() => continue,
                readable = device.readable() => match readable {
                    Ok(readable) => readable,
                    Err(_) => break,
                },
            };
            match self.take_batch(&mut buffer) {
                Ok(()) => tokio::task::yield_now().await,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => readable.clear_ready(),
                // The device is gone, and the sandbox with it.
                Err(error) => {
                    tracing::debug!(%error, "a sandbox's device ended");
                    break;
                }
            }
        }
        self.tasks.shutdown().await;
        for why in DropReason::ALL {
            let packets = self.device.dropped(why);
            if packets > 0 {
                tracing::debug!(?why, packets, "packets of a sandbox were dropped");
            }
        }
    }

    /// Takes packets in until there are none, or others must have their turn.
    fn take_batch(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        for _ in 0..BATCH {
            let length = match self.device.read(buffer) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(length) => length,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            self.take(&buffer[..length]);
        }
        Ok(())
    }

    fn take(&mut self, raw: &[u8]) {
        match packet::parse(raw) {
            Err(why) => self.device.drop_packet(why),
            Ok(Packet::Tcp(segment)) => {
                self.table.receive(&segment, &self.device, &self.handler, &mut self.tasks);
            }
            Ok(Packet::Udp(datagram)) if is_gateway(datagram.flow.to.ip()) => {
                self.ask_gateway(&datagram);
            }
            Ok(Packet::Udp(datagram)) => {
                self.flows.datagram(&datagram, &self.device, &self.handler, &mut self.tasks);
            }
            Ok(Packet::Echo(echo)) if is_gateway(echo.flow.to.ip()) => {
                packet::echo_reply(&self.device, &echo.flow, echo.sequence, echo.payload);
            }
            Ok(Packet::Echo(echo)) => {
                self.flows.echo(&echo, &self.device, &self.handler, &mut self.tasks);
            }
        }
    }

    /// The gateway answers lookups, and nothing else.
    fn ask_gateway(&mut self, datagram: &Datagram<'_>) {
        let flow = datagram.flow;
        if flow.to.port() != 53 {
            return packet::unreachable(&self.device, &flow, datagram.raw, Unreachable::Port);
        }
        let Ok(permit) = Arc::clone(&self.lookups).try_acquire_owned() else {
            return self.device.drop_packet(DropReason::Full);
        };
        let (device, handler) = (Arc::clone(&self.device), Arc::clone(&self.handler));
        let query = datagram.payload.to_vec();
        self.tasks.spawn(async move {
            if let Some(answer) = handler.lookup(query).await {
                packet::datagram(&device, &flow, &answer);
            }
            drop(permit);
        });
    }
}

fn is_gateway(address: IpAddr) -> bool {
    address == IpAddr::V4(GATEWAY_V4) || address == IpAddr::V6(GATEWAY_V6)
}
