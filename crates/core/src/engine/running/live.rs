//! A running sandbox: its agent, its session, and who is using it.
//!
//! *Idle* means: no command is alive that was started through the engine, services apart, and
//! nothing holds the sandbox (an open file transfer, a connection to a port). Both are counted
//! here, in the daemon; nothing inside the sandbox can add to the count or take from it.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use tokio::sync::{OwnedRwLockReadGuard, watch};

use crate::driver::{Driver, Link};
use crate::engine::running::changes::ChangeTracking;
use crate::engine::running::end_cause::DiskCause;
use crate::engine::running::measured::MeasuredAhead;
use crate::engine::running::network::SessionNetwork;
use crate::engine::running::rest::Rest;
use crate::engine::running::seal_under_way::SealUnderWay;
use crate::engine::running::services::Services;
use crate::engine::running::tracked::Tracked;
use crate::engine::running::upload_allowance::UploadAllowance;
use crate::engine::running::write_hold::WriteHold;
use crate::engine::{Error, Result};
use crate::guest::{Deadlines, Guest, GuestError};
use crate::model::{CommandId, MachineKey, Revision, Sandbox, Session, Timestamp, now};
use crate::net::Traffic;
use crate::secret::Mask;
use crate::store::LiveCopy;

/// How long one attempt to connect to an agent again may take. Callers that need the agent for
/// longer try again.
const RECONNECT: Duration = Duration::from_secs(2);

/// A pause without a request that was refused.
#[derive(Debug, Clone)]
pub(in crate::engine) struct RefusedPause {
    pub(in crate::engine) at: Timestamp,
    pub(in crate::engine) not_before: Instant,
    pub(in crate::engine) times: u32,
    pub(in crate::engine) reason: String,
}

pub(crate) struct RunningSandbox {
    pub(in crate::engine) key: MachineKey,
    pub(in crate::engine) driver: Arc<dyn Driver>,
    pub(in crate::engine) link: Link,
    sandbox: RwLock<Arc<Sandbox>>,
    session: Mutex<Session>,
    guest: tokio::sync::RwLock<Guest>,
    /// When the last attempt to connect again failed.
    unreachable: Mutex<Option<Instant>>,
    /// Held for reading while the agent is asked to touch the root, for writing while the root is
    /// exchanged under it.
    pub(in crate::engine) gate: Arc<tokio::sync::RwLock<()>>,
    pub(in crate::engine) commands: Mutex<HashMap<CommandId, Arc<Tracked>>>,
    /// Held for reading while output is kept and credited, for writing while memory is captured: what the daemon has of a
    /// command's output is then what the agent in that memory thinks it has, or less.
    pub(in crate::engine) still: tokio::sync::RwLock<()>,
    /// The last pause without a request that was refused: when, how often, and why.
    pub(in crate::engine) refused: Mutex<Option<RefusedPause>>,
    /// What the last checkpoint of this session copied, so that the next copies only what changed.
    pub(in crate::engine) copied: tokio::sync::Mutex<Option<LiveCopy>>,
    /// Its network, while it is online.
    pub(in crate::engine) network: Mutex<Option<SessionNetwork>>,
    /// What is masked in what its commands print.
    mask: RwLock<Option<Arc<Mask>>>,
    /// Its processes are being ended, because it is over its disk.
    pub(in crate::engine) clearing: AtomicBool,
    /// What may still be uploaded into it.
    pub(in crate::engine) room: Mutex<UploadAllowance>,
    /// How often processes of its were ended because of that.
    pub(in crate::engine) ended_writers: AtomicU64,
    /// How many rounds of ending processes because of a disk have begun.
    disk_rounds: AtomicU64,
    /// How many guards keep its processes frozen, and held while the driver freezes or thaws them:
    /// the first freezes, the last thaws.
    pub(in crate::engine) freezes: tokio::sync::Mutex<u32>,
    /// Whether what it writes is held back.
    pub(in crate::engine) writes: WriteHold,
    /// Held while what it takes on the disk is counted for an upload.
    pub(in crate::engine) counting: tokio::sync::Mutex<()>,
    /// The session is being ended: no new operation begins.
    closed: watch::Sender<bool>,
    /// It ends with its memory kept: commands continue in the next session.
    paused: AtomicBool,
    pub(in crate::engine) services: Services,
    holders: AtomicUsize,
    /// Those of them that are connections to ports.
    port_holders: AtomicUsize,
    quiet_since: Mutex<Instant>,
    /// Counts whatever may let the agent or a process change files: see `measure_ahead`.
    uses: AtomicU64,
    pub(in crate::engine) measured: Mutex<MeasuredAhead>,
    /// The agent was asked to change files and did not report the end: it may still be changing
    /// them, whatever is counted.
    pub(in crate::engine) unheard: AtomicBool,
    /// Which commands changed which files.
    pub(in crate::engine) changes: ChangeTracking,
    /// Whether its open layer is being sealed.
    pub(in crate::engine) seal: SealUnderWay,
    /// Whether it is suspended while somebody considers a question of it.
    pub(in crate::engine) rest: Rest,
}

impl std::fmt::Debug for RunningSandbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RunningSandbox").field("key", &self.key).finish_non_exhaustive()
    }
}

impl RunningSandbox {
    pub(in crate::engine) fn new(
        driver: Arc<dyn Driver>,
        key: MachineKey,
        link: Link,
        guest: Guest,
        sandbox: Sandbox,
        session: Session,
    ) -> Arc<Self> {
        Arc::new(Self {
            key,
            driver,
            link,
            sandbox: RwLock::new(Arc::new(sandbox)),
            session: Mutex::new(session),
            guest: tokio::sync::RwLock::new(guest),
            unreachable: Mutex::default(),
            gate: Arc::default(),
            commands: Mutex::default(),
            still: tokio::sync::RwLock::default(),
            refused: Mutex::default(),
            copied: tokio::sync::Mutex::default(),
            network: Mutex::default(),
            mask: RwLock::default(),
            clearing: AtomicBool::new(false),
            room: Mutex::default(),
            ended_writers: AtomicU64::new(0),
            disk_rounds: AtomicU64::new(0),
            freezes: tokio::sync::Mutex::default(),
            writes: WriteHold::default(),
            counting: tokio::sync::Mutex::default(),
            closed: watch::Sender::new(false),
            paused: AtomicBool::new(false),
            services: Services::default(),
            holders: AtomicUsize::new(0),
            port_holders: AtomicUsize::new(0),
            quiet_since: Mutex::new(Instant::now()),
            uses: AtomicU64::new(0),
            measured: Mutex::default(),
            unheard: AtomicBool::new(false),
            changes: ChangeTracking::default(),
            seal: SealUnderWay::default(),
            rest: Rest::default(),
        })
    }

    pub(in crate::engine) fn sandbox(&self) -> Arc<Sandbox> {
        Arc::clone(&self.sandbox.read())
    }

    pub(in crate::engine) fn set_sandbox(&self, sandbox: Sandbox) {
        *self.sandbox.write() = Arc::new(sandbox);
    }

    /// Notes the revision of a version of the record that this does not show.
    pub(in crate::engine) fn saved(&self, revision: Revision) {
        let mut sandbox = self.sandbox.write();
        Arc::make_mut(&mut sandbox).revision = revision;
    }

    pub(in crate::engine) fn session(&self) -> Session {
        let mut session = self.session.lock().clone();
        if let Some(traffic) = self.traffic() {
            session.usage.count(traffic);
        }
        session.changes = self.changes.session().or(session.changes);
        session
    }

    pub(in crate::engine) fn change_session(&self, change: impl FnOnce(&mut Session)) -> Session {
        let mut session = self.session.lock();
        change(&mut session);
        session.clone()
    }

    /// What is masked in what its commands print, if anything.
    pub(in crate::engine) fn mask(&self) -> Option<Arc<Mask>> {
        self.mask.read().clone()
    }

    pub(in crate::engine) fn set_mask(&self, mask: Option<Mask>) {
        *self.mask.write() = mask.map(Arc::new);
    }

    /// Lets no new operation begin.
    pub(in crate::engine) fn close(&self) {
        self.closed.send_replace(true);
    }

    /// Lets no new operation begin, because its memory is kept.
    pub(in crate::engine) fn close_paused(&self) {
        self.paused.store(true, Ordering::SeqCst);
        self.close();
    }

    /// Notes for every command that its session is being ended.
    pub(in crate::engine) fn session_ends(&self) {
        for tracked in self.commands.lock().values() {
            tracked.causes().session_ends();
        }
    }

    /// Notes for every command that processes are being ended because of a disk, and answers with the
    /// round's number.
    pub(in crate::engine) fn begin_disk_round(&self, cause: DiskCause) -> u64 {
        let round = self.disk_rounds.fetch_add(1, Ordering::SeqCst);
        for tracked in self.commands.lock().values() {
            tracked.causes().disk_round(round, cause);
        }
        round
    }

    /// Notes for every command that is still there that this round did not end it.
    pub(in crate::engine) fn end_disk_round(&self, round: u64) {
        for tracked in self.commands.lock().values() {
            tracked.causes().disk_round_over(round);
        }
    }

    /// Whether its memory was kept, and commands are not at their end.
    pub(in crate::engine) fn is_paused(&self) -> bool {
        self.paused.load(Ordering::SeqCst)
    }

    /// Turns true when no new operation may begin any more.
    pub(in crate::engine) fn closing(&self) -> watch::Receiver<bool> {
        self.closed.subscribe()
    }

    /// Whether the session is being ended.
    pub(in crate::engine) fn is_closed(&self) -> bool {
        *self.closed.borrow()
    }

    /// Holds the root still while the agent is asked to touch it; refused when the session is over.
    pub(in crate::engine) async fn enter(
        self: &Arc<Self>,
    ) -> Result<(Hold, OwnedRwLockReadGuard<()>)> {
        let hold = self.hold();
        let gate = Arc::clone(&self.gate).read_owned().await;
        if *self.closed.borrow() {
            return Err(Error::SessionOver);
        }
        Ok((hold, gate))
    }

    /// The connection to the agent; a new one if the last was lost while the machine lives.
    ///
    /// Callers that wait for the same attempt to connect share its failure: otherwise the last of a
    /// hundred commands would wait a hundred times as long.
    pub(in crate::engine) async fn guest(&self) -> Result<Guest> {
        self.uses.fetch_add(1, Ordering::SeqCst);
        self.rouse().await;
        let asked = Instant::now();
        let guest = self.guest.read().await.clone();
        if !guest.is_lost() {
            return Ok(guest);
        }
        if *self.closed.borrow() {
            return Err(Error::SessionOver);
        }
        let mut place = self.guest.write().await;
        if place.is_lost() {
            if self.unreachable.lock().is_some_and(|failed| failed >= asked) {
                return Err(GuestError::Timeout.into());
            }
            *place = match reach(&self.link, RECONNECT, place.deadlines()).await {
                Ok(guest) => guest,
                Err(error) => {
                    *self.unreachable.lock() = Some(Instant::now());
                    return Err(error.into());
                }
            };
        }
        Ok(place.clone())
    }

    /// The connection to the agent, for questions that change nothing in the sandbox; fails if it was lost.
    pub(in crate::engine) async fn guest_at_rest(&self) -> Result<Guest> {
        self.rouse().await;
        self.guest_as_it_is().await
    }

    /// The same, also while the sandbox is suspended: then it answers later.
    pub(in crate::engine) async fn guest_as_it_is(&self) -> Result<Guest> {
        let guest = self.guest.read().await.clone();
        if guest.is_lost() { Err(Error::SessionOver) } else { Ok(guest) }
    }

    /// Keeps the sandbox awake while the answer lives.
    pub(in crate::engine) fn hold(self: &Arc<Self>) -> Hold {
        self.uses.fetch_add(1, Ordering::SeqCst);
        self.holders.fetch_add(1, Ordering::SeqCst);
        Hold { live: Arc::clone(self), is_port: false }
    }

    /// How often it was used so far. While this number is unchanged, the agent got no request.
    pub(in crate::engine) fn uses(&self) -> u64 {
        self.uses.load(Ordering::SeqCst)
    }

    /// When it was last used: now, while somebody uses it.
    pub(in crate::engine) fn used_at(&self) -> Timestamp {
        let quiet = self.quiet_for().unwrap_or_default();
        let quiet = jiff::SignedDuration::try_from(quiet).unwrap_or(jiff::SignedDuration::MAX);
        now().checked_sub(quiet).unwrap_or_else(|_| now())
    }

    /// Counts what a connection to one of its ports carried.
    pub(in crate::engine) fn count_traffic(&self, traffic: Traffic) {
        if let Some(network) = self.network.lock().as_ref() {
            return network.count(traffic);
        }
        // Without a network its session counts alone.
        let mut session = self.session.lock();
        session.usage.network_in = session.usage.network_in.saturating_add(traffic.received);
        session.usage.network_out = session.usage.network_out.saturating_add(traffic.sent);
    }

    /// How many hold it: commands, transfers, connections.
    pub(in crate::engine) fn holders(&self) -> usize {
        self.holders.load(Ordering::SeqCst)
    }

    /// How many connections to its ports hold it.
    pub(in crate::engine) fn port_holders(&self) -> usize {
        self.port_holders.load(Ordering::SeqCst)
    }

    /// How long it has been unused; `None` while it is in use.
    pub(in crate::engine) fn quiet_for(&self) -> Option<Duration> {
        let since = self.quiet_since.lock();
        (self.holders.load(Ordering::SeqCst) == 0).then(|| since.elapsed())
    }
}

/// Dials the agent, wherever it is.
pub(in crate::engine) async fn reach(
    link: &Link,
    patience: Duration,
    deadlines: Deadlines,
) -> Result<Guest, GuestError> {
    let guest = match link {
        Link::Unix(socket) => Guest::connect(socket, patience).await?,
        Link::Serial(socket) => Guest::connect_serial(socket, patience).await?,
    };
    Ok(guest.with_deadlines(deadlines))
}

/// Waits until the agent behind a link answers: for a driver that tries its host out (`driver::microvm::Answers`).
#[must_use]
pub fn agent_answers(
    link: Link,
    patience: Duration,
) -> Pin<Box<dyn Future<Output = Result<(), String>> + Send>> {
    Box::pin(async move {
        let reached = reach(&link, patience, Deadlines::default()).await;
        reached.map(drop).map_err(|error| error.to_string())
    })
}

/// Keeps a sandbox awake while it lives.
#[derive(Debug)]
pub struct Hold {
    live: Arc<RunningSandbox>,
    /// Whether it is for a connection to a port.
    is_port: bool,
}

impl Hold {
    /// The same, for a connection to a port.
    pub(in crate::engine) fn for_port(mut self) -> Self {
        self.is_port = true;
        self.live.port_holders.fetch_add(1, Ordering::SeqCst);
        self
    }

    /// Counts bytes that a connection to one of the sandbox's ports carried, as part of its session's traffic:
    /// `received` by the sandbox, `sent` by it.
    pub fn count_traffic(&self, received: u64, sent: u64) {
        self.live.count_traffic(Traffic { received, sent });
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if self.is_port {
            self.live.port_holders.fetch_sub(1, Ordering::SeqCst);
        }
        let mut since = self.live.quiet_since.lock();
        if self.live.holders.fetch_sub(1, Ordering::SeqCst) == 1 {
            *since = Instant::now();
        }
    }
}
