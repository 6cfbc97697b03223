//! What happens to sandboxes.
//!
//! ```text
//! fronts ──> Engine ──turn──> one piece of work at a time per sandbox
//!               │                 boot, seal, checkpoint, rollback, erase
//!               │                 record intent → carry out → record outcome → answer
//!               └──live──────> commands, files: straight to the agent of a running sandbox
//! ```
//!
//! - [`lifecycle`] decides, purely, what may happen to a sandbox in each phase;
//!   [`Sandbox::transition`] asks it and is the only writer of a phase.
//! - `slot` gives each sandbox its *turn*: work that changes its phase runs one at a time, in the
//!   order it was asked for, in a task of its own, so that a caller who goes away ends nothing.
//! - `sandbox` is what callers ask for. `create`, `boot`, `seal`, `checkpoint`, `branch` (fork and
//!   rollback) and `erase` are that work. Each records what it is about to do in the
//!   sandbox's manifest first. A daemon that dies in between finds the pending effect when it comes
//!   back (`recover`) and completes it.
//! - `drive` are volumes that outlive sandboxes; `attach` is how a session comes to have them and what
//!   becomes of what it wrote.
//! - `live` is a running sandbox: its agent, its session, who is using it.
//! - `guard` looks at what a session wrote before it is sealed.
//! - `machine` starts machines that keep their memory: from what was kept, from a template, or by booting. `rescue`
//!   takes files out of their disks, `carry` has their commands go on.
//! - `pause` keeps the memory of a machine, `why` explains where a sandbox is and what would change that.
//! - `hooks` are the commands the server runs by itself at a start and a stop.
//! - `command` runs processes, `track` follows them and keeps what they print (`log`), `stdin` feeds
//!   them; `files` moves files; `export` makes an OCI image of a snapshot.
//! - `ports` is the way to a port inside; `services` are commands that are there again after every resume.
//! - `session` finds sessions and what ran in them; `snapshots` keeps snapshots, and what is left of those
//!   that went.
//! - `space` says who holds which layers and drops what is held by nobody; `chain` keeps chains short.
//! - `network` is what sandboxes may reach and what they reached; `journal` keeps the latter.
//! - `uplink` is a session's network, `network` what callers ask of it, `journal` what is on record of it.
//! - `unrecorded` are outcomes that a full disk had no room for.
//! - `reaper` ends what is idle, over its time or over its disk, and what has expired.
//! - `doubt` is what becomes of what a failed sync may have lost, `health` whether the disk takes writes.
//! - `evidence` finds what could name layers and was not read; `trash` keeps what was deleted for a while; `clock` says which
//!   time things expire by.
//! - `lost` keeps the names of sandboxes whose manifest is missing or does not read.
//! - `scrub` verifies layers while the server runs.
//! - `events` is the feed of what happened, for those who watch.
//! - `figures` counts what operators watch.
//! - `damage` is the register of everything that is known to be wrong with stored data.
//! - `secrets` keeps values of projects and gives them to sessions.
//! - `tenant` knows projects and keys, `token` what speaks for a key; `once` makes retries harmless.
//!
//! *Acknowledged is durable*: an answer that names a snapshot or a new sandbox is given after its
//! layer, its manifest and the sandbox's manifest are on stable storage, in that order. The
//! sandbox's manifest is the commit point: before it, the old generation stands.

mod attach;
mod boot;
mod branch;
mod carry;
mod cause;
mod chain;
mod checkpoint;
mod clock;
mod command;
mod create;
mod damage;
mod disk;
mod doubt;
mod drive;
mod erase;
mod error;
mod events;
mod evidence;
mod export;
mod figures;
mod files;
mod guard;
mod health;
mod hooks;
mod journal;
mod kept;
mod live;
mod log;
mod lost;
mod machine;
mod manifests;
mod network;
mod once;
mod pause;
mod ports;
mod ready;
mod reaper;
mod recover;
mod rescue;
mod sandbox;
mod scrub;
mod seal;
mod secrets;
mod services;
mod session;
mod shorten;
mod slot;
mod snapshots;
mod space;
mod standstill;
mod stdin;
mod template;
mod tenant;
mod token;
mod track;
mod trash;
mod uids;
mod unrecorded;
mod uplink;
mod usage;
mod why;

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::db::Db;
use crate::driver::Driver;
use crate::guest::Deadlines;
use crate::model::{
    Config, Decision, Finding, LayerId, Name, Patch, Sandbox, SandboxId, Session, SessionId, Size,
    Snapshot, SnapshotId, Span, Timestamp,
};
use crate::net::{Outside, OutsideSettings};
use crate::secret::{KeySource, Keyring};
use crate::store::Store;
use crate::store::accounting::Books;
use crate::store::image::Images;

pub use clock::{Clock, HostClock};
pub use command::{Event, Events, Exec, Started};
pub use damage::{Damage, DamageKind};
pub use drive::CreateDrive;
pub use error::{Error, ErrorKind, NoSuch, Result};
pub use events::{EventBatch, EventQuery, EventScope, EventStream};
pub use figures::Figures;
pub use files::{Files, Upload};
pub use health::Unwell;
pub use kept::{CommandRetention, CommandsKept};
pub use live::{Hold, agent_answers};
pub use lost::Lost;
pub use network::{ConnectionFilter, Destination, Host};
pub use ports::{Connected, Whose};
pub use scrub::ScrubSettings;
pub use secrets::SetSecret;
pub use services::{ServiceState, ServiceStatus};
pub use space::Sized;
pub use stdin::{StdinHandle, StdinProgress};
pub use tenant::Caller;
pub use token::PortPass;
pub use trash::{InTrash, TrashItem};
pub use usage::{HostSpace, SpaceReport};
pub use why::Why;

pub use crate::model::{Method, OnDelete, lifecycle};

/// What the engine is made of.
#[derive(Debug)]
pub struct Parts {
    /// The truth.
    pub store: Store,
    /// What sandboxes start from.
    pub images: Images,
    /// The index.
    pub db: Arc<dyn Db>,
    /// Isolation backends.
    pub drivers: Vec<Arc<dyn Driver>>,
    /// How it behaves.
    pub settings: Settings,
}

/// How the engine behaves on this host.
#[derive(Debug, Clone)]
pub struct Settings {
    /// How much of a command's output is kept on disk.
    pub log_limit: Size,
    /// How much of its commands a sandbox keeps.
    pub commands: CommandRetention,
    /// The first of the host's uids that sandboxes may use.
    pub uid_base: u32,
    /// How many sandboxes can run at once, as far as uids go; each takes 65,536.
    pub uid_ranges: u32,
    /// How long processes may take to end by themselves at a stop.
    pub grace: Duration,
    /// How long a machine may take to come up.
    pub patience: Duration,
    /// How long the agent inside a machine may take to answer.
    pub guest: Deadlines,
    /// How long a request waits for a sandbox that is being recovered after a restart.
    pub recovery: Duration,
    /// How many layers of its own a chain may have before some of them are merged in the background.
    pub chain_limit: usize,
    /// How many it may have at the most: from here on nothing is added before some are merged.
    pub chain_bound: usize,
    /// How many layers a memory image may have before some of them are merged.
    pub memory_limit: usize,
    /// How often dirty data is written back while sandboxes run.
    pub write_back: Duration,
    /// How often the reaper looks.
    pub reap: Duration,
    /// How often expiry, retention and collection are looked at.
    pub housekeeping: Duration,
    /// How long what was deleted stays in the trash.
    pub trash_grace: Duration,
    /// What time it is.
    pub clock: Arc<dyn Clock>,
    /// How long the wall clock must agree with the monotonic one before anything expires by it.
    pub clock_settle: Duration,
    /// Where the key comes from that secrets are sealed with.
    pub secrets_key: KeySource,
    /// What an operator says about the network outside.
    pub network: OutsideSettings,
    /// The driver of sandboxes that ask for none.
    pub default_driver: String,
    /// Drivers that this version has and this host cannot use.
    pub absent_drivers: BTreeMap<&'static str, Absent>,
    /// How many machines wait for the next sandbox, for each of the templates that were used last.
    pub ready: usize,
    /// How layers are verified.
    pub scrub: ScrubSettings,
}

/// Why a driver cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Absent {
    /// What is missing.
    pub reason: String,
    /// What to do about it.
    pub fix: Option<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            log_limit: Size(64 << 20),
            commands: CommandRetention::default(),
            uid_base: 0x7000_0000,
            uid_ranges: 0x7000,
            grace: Duration::from_secs(2),
            patience: Duration::from_secs(20),
            guest: Deadlines::default(),
            recovery: Duration::from_secs(60),
            chain_limit: 24,
            chain_bound: 64,
            memory_limit: 16,
            write_back: Duration::from_millis(500),
            reap: Duration::from_millis(500),
            housekeeping: Duration::from_secs(30),
            trash_grace: Duration::from_secs(3600),
            clock: Arc::new(HostClock::default()),
            clock_settle: Duration::from_secs(15 * 60),
            secrets_key: KeySource::default(),
            network: OutsideSettings::default(),
            default_driver: Config::default().driver,
            absent_drivers: BTreeMap::new(),
            ready: 0,
            scrub: ScrubSettings::default(),
        }
    }
}

/// The heart of Sandkeep. Clones are the same engine.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("data", &self.inner.store.data_dir()).finish_non_exhaustive()
    }
}

pub(crate) struct Inner {
    store: Store,
    images: Images,
    db: Arc<dyn Db>,
    drivers: BTreeMap<&'static str, Arc<dyn Driver>>,
    settings: Settings,
    slots: Mutex<HashMap<SandboxId, Arc<slot::Slot>>>,
    tenants: tenant::Tenants,
    signer: token::Signer,
    keyring: Keyring,
    outside: Arc<Outside>,
    secrets: secrets::Secrets,
    once: once::Once,
    damage: damage::DamageRegister,
    events: Arc<events::EventFeed>,
    doubt: doubt::Reported,
    health: Arc<health::Health>,
    books: Arc<Mutex<Books>>,
    scrub: scrub::Scrub,
    uids: uids::Uids,
    /// Held while a drive's record is changed.
    drives: tokio::sync::Mutex<()>,
    /// One collection at a time. Nobody else takes it.
    collecting: tokio::sync::Mutex<()>,
    /// A collection was asked for and has not begun.
    collect_asked: AtomicBool,
    /// When the last collection ended, and how long it took.
    last_collection: Mutex<Option<(Instant, Duration)>>,
    trash: trash::Trash,
    /// Layers that no record names any more, once what was written is synced.
    unnamed: Mutex<Vec<LayerId>>,
    clock: clock::Watch,
    measured: usage::Measurements,
    accounts: kept::Accounts,
    doubts: evidence::Doubts,
    lost_names: lost::LostNames,
    retained: snapshots::Retained,
    snapshot_locks: snapshots::Locks,
    /// Which layers were merged lately.
    chains: chain::Chains,
    /// What the disk had no room for yet.
    unrecorded: Mutex<HashMap<SandboxId, unrecorded::Unrecorded>>,
    /// Some tombstone may still be a snapshot after a power cut.
    unsynced_tombstones: AtomicBool,
    /// Commands of paused machines that somebody waits for.
    asleep: carry::Asleep,
    /// One at a time makes the template of a kind of machine; the others wait for it.
    templates: template::Templates,
    ready: Arc<ready::Ready>,
    /// How many boot at one time that nobody may be waiting for: after a power cut it could be all there are.
    boots: tokio::sync::Semaphore,
    /// Memory is merged for one snapshot at a time.
    merges: tokio::sync::Semaphore,
    /// Attempts to wake a sandbox that those who want its ports share.
    wakes: Mutex<HashMap<SandboxId, ports::Attempt>>,
    shutdown: watch::Sender<bool>,
    /// How much of the recovery after a restart is left to do: see `recover`.
    recovery: watch::Sender<usize>,
}

impl Engine {
    /// Opens the engine: reads what is on disk, and starts to recover what an earlier daemon left. Machines that are still alive
    /// are adopted, sessions that broke off are sealed, in the background and each sandbox in its own turn. So nothing
    /// here waits for a guest, and a request waits for its own sandbox alone. [`recovered`](Self::recovered) waits for all.
    ///
    /// # Errors
    ///
    /// Returns [`Error`] when the data directory or the index cannot be read.
    pub async fn open(parts: Parts) -> Result<Self> {
        let Parts { store, images, db, drivers, settings } = parts;
        let (signer, bad_signer) = token::Signer::open(store.data_dir()).map_err(Error::Secret)?;
        let keyring = Keyring::open(store.data_dir(), &settings.secrets_key)?;
        let outside = Outside::new(settings.network.clone()).map_err(Error::Outside)?;
        let drivers = drivers.into_iter().map(|driver| (driver.name(), driver)).collect();
        let events = events::EventFeed::start(store.data_dir().join("events")).await;
        let uids = uids::Uids::new(store.data_dir(), settings.uid_base, settings.uid_ranges);
        let ready = ready::pool(settings.ready);
        let inner = Arc::new(Inner {
            store,
            images,
            db,
            drivers,
            settings,
            slots: Mutex::default(),
            tenants: tenant::Tenants::default(),
            signer,
            keyring,
            outside: Arc::new(outside),
            secrets: secrets::Secrets::default(),
            once: once::Once::default(),
            damage: damage::DamageRegister::default(),
            events: Arc::new(events),
            doubt: doubt::Reported::default(),
            health: Arc::default(),
            books: Arc::default(),
            scrub: scrub::Scrub::default(),
            uids,
            drives: tokio::sync::Mutex::default(),
            collecting: tokio::sync::Mutex::default(),
            collect_asked: AtomicBool::new(false),
            last_collection: Mutex::default(),
            trash: trash::Trash::default(),
            unnamed: Mutex::default(),
            clock: clock::Watch::default(),
            measured: usage::Measurements::default(),
            accounts: kept::Accounts::default(),
            doubts: evidence::Doubts::default(),
            lost_names: lost::LostNames::default(),
            retained: snapshots::Retained::default(),
            snapshot_locks: snapshots::Locks::default(),
            chains: chain::Chains::default(),
            unrecorded: Mutex::default(),
            unsynced_tombstones: AtomicBool::default(),
            asleep: carry::Asleep::default(),
            templates: template::Templates::default(),
            ready,
            merges: tokio::sync::Semaphore::new(1),
            boots: tokio::sync::Semaphore::new(
                std::thread::available_parallelism().map_or(2, std::num::NonZero::get),
            ),
            wakes: Mutex::default(),
            shutdown: watch::channel(false).0,
            recovery: watch::channel(0).0,
        });
        if let Some(aside) = bad_signer {
            inner.report_damage(
                DamageKind::SecurityConfig,
                "token.key",
                format!("it was not 32 bytes, and is kept as `{aside}`"),
                "another one was made: tokens from before are refused",
            );
        }
        let relief = Arc::downgrade(&inner);
        inner.store.relieved_by(Box::new(move || {
            let inner = relief.upgrade();
            Box::pin(async move {
                match inner {
                    Some(inner) => inner.free_some().await,
                    None => false,
                }
            })
        }));
        inner.recover().await?;
        reaper::run(&inner);
        scrub::run(&inner);
        Ok(Self { inner })
    }

    /// Ends the engine's own work. Sandboxes go on running; the next daemon adopts them.
    pub async fn shutdown(&self) {
        self.inner.shutdown.send_replace(true);
        self.inner.scrub.stop();
        // Operations that have begun run to completion, but not for longer than this all together.
        let slots: Vec<_> = self.inner.slots().values().cloned().collect();
        let idle = join_all(slots.iter().map(|slot| slot.idle()));
        let _ = tokio::time::timeout(Duration::from_secs(30), idle).await;
        self.inner.all_offline().await;
        // A disk that hangs must not keep the daemon.
        match tokio::time::timeout(Duration::from_secs(30), self.inner.sync_and_discard()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::error!(error = boot::chain_of(&error), "not everything was synced");
            }
            Err(_) => tracing::error!("the disk does not answer; not everything was synced"),
        }
        self.inner.end_ready_machines().await;
        self.inner.events.finish().await;
        self.inner.db.close().await;
    }

    /// How much is left to recover of what an earlier daemon left: 0 when all of it is done.
    #[must_use]
    pub fn recovering(&self) -> usize {
        *self.inner.recovery.borrow()
    }

    /// Waits until everything that an earlier daemon left is recovered.
    pub async fn recovered(&self) {
        let mut left = self.inner.recovery.subscribe();
        let _ = left.wait_for(|left| *left == 0).await;
    }

    /// How many machines wait for a sandbox.
    #[must_use]
    pub fn ready_machines(&self) -> usize {
        self.inner.ready_machines()
    }

    /// What sandboxes can start from.
    #[must_use]
    pub fn images(&self) -> &Images {
        &self.inner.images
    }

    /// The names of the drivers this host has.
    #[must_use]
    pub fn drivers(&self) -> Vec<&'static str> {
        self.inner.drivers.keys().copied().collect()
    }
}

/// A sandbox to be made, or got if it is there.
#[derive(Debug, Clone, Default)]
pub struct Create {
    /// Its name; a readable one is made up if absent.
    pub name: Option<Name>,
    /// What it is to be, on top of the defaults.
    pub patch: Patch,
    /// What to do if there is one of that name.
    pub if_exists: IfExists,
    /// Whether to start it at once.
    pub start: bool,
    /// A snapshot to start from instead of the image.
    pub from: Option<SnapshotId>,
}

/// What to do if a name is taken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum IfExists {
    /// Say so.
    #[default]
    Fail,
    /// Hand out the one that is there.
    Get,
}

/// Whether a sleeping sandbox may be woken.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum WakeMode {
    /// It is woken.
    #[default]
    Wake,
    /// It is left alone, and the answer is [`Error::NotRunning`].
    IfRunning,
    /// Only this session will do: when it has ended, or is about to, the answer is
    /// [`Error::SessionEnded`], whether or not another one runs.
    Session(SessionId),
}

impl WakeMode {
    /// A session that ended before it was asked is no failure where the next one is as good.
    fn may_try_again(&self, error: Error) -> Result<()> {
        match (self, error) {
            (Self::Session(id), Error::SessionOver) => {
                Err(Error::SessionEnded { session: id.clone() })
            }
            (Self::Wake | Self::IfRunning, Error::SessionOver) => Ok(()),
            (_, error) => Err(error),
        }
    }
}

/// A sandbox that was made, got, started or forked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opened {
    /// The sandbox.
    pub sandbox: Sandbox,
    /// Its session, if it has had one.
    pub session: Option<Session>,
    /// Whether this call made it.
    pub created: bool,
    /// Whether this call woke it.
    pub resumed: bool,
}

/// How a session is to be ended.
#[derive(Debug, Clone, Default)]
pub struct Stop {
    /// The session that is meant. If it is over, its record is the answer and nothing is touched.
    pub session: Option<SessionId>,
    /// Whether there is to be a snapshot.
    pub snapshot: Wish,
    /// Who wants it.
    pub method: Method,
    /// How long after its last use that snapshot goes, `Some(None)` for never; as the sandbox's retention
    /// says if absent.
    pub expires: Option<Option<Span>>,
    /// What was decided about what the guard finds.
    pub decision: Decision,
}

/// Whether the end of a session makes a snapshot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Wish {
    /// As the sandbox is configured, and if something was written.
    #[default]
    Configured,
    /// Whatever its configuration says, and even if nothing was written.
    Always,
}

/// A checkpoint to be taken.
#[derive(Debug, Clone, Default)]
pub struct Checkpoint {
    /// What people call it.
    pub label: Option<String>,
    /// Who wants it.
    pub method: Method,
    /// How long after its last use it goes, `Some(None)` for never; as the sandbox's retention says if
    /// absent.
    pub expires: Option<Option<Span>>,
    /// The session that is meant; whichever is under way if absent.
    pub session: Option<SessionId>,
}

/// How a sandbox is to be deleted.
#[derive(Debug, Clone, Copy, Default)]
pub struct Delete {
    /// What becomes of its snapshots.
    pub snapshots: OnDelete,
    /// Whether it goes even if what it wrote to drives cannot be had from its disks, and is lost.
    pub force: bool,
    /// Whether it skips the trash.
    pub at_once: bool,
    /// Whether nobody asked for it: its time is up.
    pub expired: bool,
}

/// Which snapshots are wanted.
#[derive(Debug, Clone, Default)]
pub struct SnapshotFilter {
    /// Of sandboxes of this name, deleted ones included.
    pub sandbox: Option<Name>,
    /// Whether those that were deleted or have expired are wanted too.
    pub deleted: bool,
}

/// A sandbox that was stopped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stopped {
    /// The sandbox.
    pub sandbox: Sandbox,
    /// The session that ended, or the last one.
    pub session: Option<Session>,
    /// What it is resumed from.
    pub snapshot: Option<Sized<Snapshot>>,
    /// What the guard found and let pass, or kept aside.
    #[serde(default)]
    pub findings: Vec<Finding>,
}

/// A sandbox that was deleted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deleted {
    /// Snapshots of it that were kept: those others stand on, or all if that was asked for.
    pub snapshots_kept: Vec<SnapshotId>,
    /// Drives of which what its last session wrote is lost, because the delete was forced.
    #[serde(default)]
    pub drives_lost: Vec<Name>,
}

/// A fork to be made.
#[derive(Debug, Clone, Default)]
pub struct Fork {
    /// The new sandbox's name; a readable one is made up if absent.
    pub name: Option<Name>,
    /// What is to be different from the source.
    pub patch: Patch,
    /// What of the source it is to start from.
    pub from: ForkFrom,
    /// The generation the source must be at.
    pub expect_generation: Option<u64>,
    /// Whether to start it at once.
    pub start: bool,
    /// How many, for [`Engine::fork_many`]: they are called `<name>-1` and so on.
    pub count: Option<u32>,
}

/// Forks that were made from one capture.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Forks {
    /// Those that are there, in order.
    pub made: Vec<Opened>,
    /// Those that are not, and why.
    pub failed: Vec<ForkFailed>,
}

/// A fork that was not made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForkFailed {
    /// What it was to be called.
    pub name: Name,
    /// [`Error::code`].
    pub code: String,
    /// Why not, for people.
    pub reason: String,
}

/// A sandbox that was paused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Paused {
    /// The sandbox.
    pub sandbox: Sandbox,
    /// The session that ended, or the last one.
    pub session: Option<Session>,
    /// What it wakes from.
    pub snapshot: Option<Sized<Snapshot>>,
}

/// What of its source a fork starts from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ForkFrom {
    /// What the source is now; one that runs is checkpointed for it.
    #[default]
    Now,
    /// The snapshot the source stands on, or its image if it has none: what a running session has
    /// done since is left out, and the session is not touched.
    Kept,
    /// A snapshot.
    Snapshot(SnapshotId),
}

/// A sandbox that was rolled back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RolledBack {
    /// The sandbox, which now stands on the snapshot that was asked for.
    pub sandbox: Sandbox,
    /// Where it was before, if a session had to be ended for it.
    pub before: Option<Snapshot>,
}

/// Sandboxes and snapshots that hang together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tree {
    /// The sandboxes, oldest first.
    pub sandboxes: Vec<Sandbox>,
    /// The snapshots, oldest first.
    pub snapshots: Vec<Snapshot>,
}

fn later(span: Span) -> Option<Timestamp> {
    after(crate::model::now(), span)
}

fn after(at: Timestamp, span: Span) -> Option<Timestamp> {
    let span = jiff::SignedDuration::from_millis(i64::try_from(span.0).ok()?);
    at.checked_add(span).ok()
}
