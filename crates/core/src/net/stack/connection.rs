//! One TCP connection of a sandbox, from the packet that asks for it to the last.
//!
//! ```text
//! Dialling ──somebody answers──> OpenDecision ──handshake──> OpenFlow ──owner lets go──> Lingering ──> Over
//!     └── nobody does, cut, given up inside ──> Over        └── reset, dead ──────────────────^
//! ```
//!
//! Three things touch a connection, each under its lock and for a moment: the stack's task, with a
//! packet; its owner, with bytes; and its own [`TcpConnection::drive`], when a timer runs out. Each
//! of them finishes its turn: moves the bytes that can be moved, sends what is to be sent, and says
//! when to look again. So no packet waits for a task to be scheduled.
//!
//! A connection whose owner dropped it *lingers*: what was written still goes to the sandbox, what
//! comes from there is thrown away, up to a bound and only while there is progress. So an answer
//! that was given before a request was read to its end arrives, and a sandbox cannot keep an
//! abandoned connection.

use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Notify, OwnedSemaphorePermit};
use tokio::time::{Instant, sleep_until};

use super::device::PacketDevice;
use super::packet::{DropReason, Flow, Packet, Segment, parse, reset};
use super::relay::RelaySocket;
use super::tcp::{ConnectionTable, SYN};
use super::tcp_state::{TcpOptions, TcpStateMachine};

/// How much unwanted data is discarded before the connection is reset.
const DISCARD: usize = 1 << 20;

#[derive(Debug)]
pub(super) struct TcpConnection {
    pub(super) flow: Flow,
    pub(super) device: Arc<PacketDevice>,
    /// Weak: the table holds it.
    table: Weak<ConnectionTable>,
    patience: TcpTimeouts,
    inner: Mutex<Inner>,
    /// Something happened that [`TcpConnection::drive`] must know.
    changed: Notify,
}

#[derive(Debug)]
pub(super) struct Inner {
    /// `None` while outside is dialled.
    machine: Option<TcpStateMachine>,
    /// The packet that asked for the connection, while outside is dialled.
    syn: Vec<u8>,
    /// Given back when it is open, or over.
    half_open: Option<OwnedSemaphorePermit>,
    /// By when it must be open.
    open_by: Option<Instant>,
    lingering: Option<Lingering>,
    /// Who carries it without a copy.
    pub(super) lane: Option<RelaySocket>,
    /// When [`TcpConnection::drive`] looks again.
    armed: Option<Instant>,
    /// The sandbox gave up before outside answered, or nothing more happens.
    over: bool,
}

#[derive(Debug)]
struct Lingering {
    until: Instant,
    unsent: usize,
    discarded: usize,
}

/// Time that a connection is given.
#[derive(Debug, Clone, Copy)]
pub(super) struct TcpTimeouts {
    /// To open.
    pub(super) handshake: Duration,
    /// To send what is left after its owner dropped it.
    pub(super) linger: Duration,
}

impl TcpConnection {
    pub(super) fn new(
        segment: &Segment<'_>,
        device: &Arc<PacketDevice>,
        table: &Arc<ConnectionTable>,
        half_open: OwnedSemaphorePermit,
    ) -> Self {
        Self {
            flow: segment.flow,
            device: Arc::clone(device),
            table: Arc::downgrade(table),
            patience: table.patience,
            inner: Mutex::new(Inner {
                machine: None,
                syn: segment.raw.to_vec(),
                half_open: Some(half_open),
                open_by: None,
                lingering: None,
                lane: None,
                armed: None,
                over: false,
            }),
            changed: Notify::new(),
        }
    }

    /// Takes a packet in.
    pub(super) fn receive(&self, segment: &Segment<'_>) {
        let mut inner = self.inner();
        if inner.machine.is_some() {
            self.turn(&mut inner, |machine, device| machine.receive(device, segment.raw));
        } else if segment.rst {
            self.end(&mut inner);
        } else if segment.syn && segment.raw.len() > SYN {
            self.device.drop_packet(DropReason::Full);
        } else if segment.syn {
            inner.syn = segment.raw.to_vec();
        }
    }

    /// Opens it towards the sandbox, with the packet that asked for it.
    pub(super) fn accept(&self, options: TcpOptions) {
        let mut inner = self.inner();
        if inner.over {
            return;
        }
        let syn = std::mem::take(&mut inner.syn);
        inner.open_by = Some(Instant::now() + self.patience.handshake);
        inner.machine = Some(TcpStateMachine::new(&self.device, &self.flow, options));
        self.turn(&mut inner, |machine, device| machine.receive(device, &syn));
    }

    /// Answers the sandbox that nothing listens.
    pub(super) fn refuse(&self) {
        let mut inner = self.inner();
        if !inner.over
            && let Ok(Packet::Tcp(segment)) = parse(&inner.syn)
        {
            reset(&self.device, &segment);
        }
        self.end(&mut inner);
    }

    /// Resolves when the sandbox gave up before it was accepted.
    pub(super) async fn given_up(&self) {
        while !self.inner().over {
            self.changed.notified().await;
        }
    }

    /// Resolves when it is open: `true`, or will never be: `false`.
    pub(super) async fn established(&self) -> bool {
        poll_fn(|context| {
            let mut inner = self.inner();
            let over = inner.over;
            match &mut inner.machine {
                Some(machine) if machine.is_established() => Poll::Ready(true),
                Some(machine) if !over => {
                    machine.socket().register_send_waker(context.waker());
                    Poll::Pending
                }
                _ => Poll::Ready(false),
            }
        })
        .await
    }

    /// Looks after its timers until it is over.
    pub(super) async fn drive(&self) {
        loop {
            let (next, holds) = {
                let mut inner = self.inner();
                self.turn(&mut inner, |_, _| {});
                if inner.over {
                    return;
                }
                let holds = inner.machine.as_ref().is_some_and(TcpStateMachine::holds);
                inner.armed = self.next(&mut inner);
                (inner.armed, holds)
            };
            // A machine that asks to be looked at now, and has nothing to do, gets no more than its share.
            let soon = Instant::now() + Duration::from_millis(1);
            let next = next.map_or(soon + Duration::from_secs(3600), |next| next.max(soon));
            tokio::select! {
                () = self.changed.notified() => {}
                () = sleep_until(next) => {}
                () = self.device.writable(), if holds => {}
            }
        }
    }

    /// Acts on the machine and does what follows from that; `None` when there is no machine.
    pub(super) fn act<R>(&self, act: impl FnOnce(&mut TcpStateMachine) -> R) -> Option<R> {
        let mut inner = self.inner();
        self.turn(&mut inner, |machine, _| act(machine))
    }

    /// Moves what can be moved between the connection and its relay socket, then looks at that socket with `look`.
    pub(super) fn carry<R>(&self, look: impl FnOnce(&mut RelaySocket) -> R) -> Option<R> {
        let mut inner = self.inner();
        if let Some(lane) = &mut inner.lane {
            lane.attend();
        }
        self.turn(&mut inner, |_, _| {});
        inner.lane.as_mut().map(look)
    }

    /// Gives it to who carries it without a copy.
    pub(super) fn attach(&self, lane: RelaySocket) {
        self.inner().lane = Some(lane);
    }

    /// Its owner lets go of it.
    pub(super) fn abandon(&self) {
        let mut inner = self.inner();
        inner.lane = None;
        let until = Instant::now() + self.patience.linger;
        let unsent = inner.machine.as_mut().map_or(0, |machine| machine.socket().send_queue());
        inner.lingering = Some(Lingering { until, unsent, discarded: 0 });
        self.turn(&mut inner, |machine, _| machine.socket().close());
        // It has a shorter time now than was known.
        self.changed.notify_one();
    }

    pub(super) fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// One turn of the machine, and what follows from it.
    ///
    /// The machine is given what a hostile sandbox makes up. Should it ever panic over that, it costs the
    /// sandbox this connection and nothing else.
    fn turn<R>(
        &self,
        inner: &mut Inner,
        act: impl FnOnce(&mut TcpStateMachine, &PacketDevice) -> R,
    ) -> Option<R> {
        inner.machine.as_ref()?;
        let turned = catch_unwind(AssertUnwindSafe(|| {
            let result = inner.machine.as_mut().map(|machine| act(machine, &self.device));
            self.update(inner);
            result
        }));
        turned.unwrap_or_else(|_| {
            self.device.drop_packet(DropReason::Failed);
            tracing::error!(flow = ?self.flow, "the TCP state machine of a connection panicked; the connection is reset");
            let woken = catch_unwind(AssertUnwindSafe(|| {
                if let Some(machine) = &mut inner.machine {
                    machine.socket().abort();
                }
            }));
            if woken.is_err() {
                inner.machine = None;
            }
            self.end(inner);
            None
        })
    }

    fn update(&self, inner: &mut Inner) {
        let Some(machine) = &mut inner.machine else { return };
        if let Some(lane) = &mut inner.lane {
            lane.carry(machine);
        }
        // What the sandbox sent before the end can still be read.
        if inner.over {
            return;
        }
        let now = Instant::now();
        if let Some(lingering) = &mut inner.lingering {
            lingering.discarded += machine.discard();
            let unsent = machine.socket().send_queue();
            if unsent < lingering.unsent {
                lingering.unsent = unsent;
                lingering.until = now + self.patience.linger;
            }
            if lingering.until <= now || lingering.discarded > DISCARD {
                machine.socket().abort();
            }
        }
        if inner.open_by.is_some() && machine.is_established() {
            inner.open_by = None;
            inner.half_open = None;
        }
        if inner.open_by.is_some_and(|by| by <= now) {
            machine.socket().abort();
        }
        machine.send(&self.device);

        if machine.is_over() && !machine.holds() {
            self.end(inner);
            return;
        }
        let next = self.next(inner);
        if next.is_some_and(|next| inner.armed.is_none_or(|armed| next < armed)) {
            // Noted, so that the next packet does not ask for the same.
            inner.armed = next;
            self.changed.notify_one();
        }
    }

    fn next(&self, inner: &mut Inner) -> Option<Instant> {
        let machine = inner.machine.as_mut()?;
        // A packet that waits for room in the device is woken when there is room.
        let timer = if machine.holds() { None } else { machine.next(&self.device) };
        let timer = timer.map(|time| self.device.at(time));
        let lingering = inner.lingering.as_ref().map(|lingering| lingering.until);
        [timer, lingering, inner.open_by].into_iter().flatten().min()
    }

    fn end(&self, inner: &mut Inner) {
        inner.over = true;
        inner.half_open = None;
        if let (Some(lane), Some(machine)) = (&mut inner.lane, &mut inner.machine) {
            lane.carry(machine);
        }
        if let Some(table) = self.table.upgrade() {
            table.remove(self);
        }
        self.changed.notify_one();
    }
}
