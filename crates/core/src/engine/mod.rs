//! What happens to sandboxes.
//!
//! ```text
//! fronts ──> Engine (api) ──> Lifecycle ──turn──> one operation at a time per sandbox
//!                  │                                record intent → carry out → record outcome → answer
//!                  └────────> Sessions ─────────> commands, files, ports: straight to the agent of a running sandbox
//! ```
//!
//! The engine is made of components: structs with their own state that name what they use as fields. Each uses only what is
//! below it. [`Engine::open`] creates them from the bottom to the top; nothing else knows all of them.
//!
//! | folder | component | decides |
//! |---|---|---|
//! | `observe` | `EventFeed` | nothing: it tells what happened |
//! | `audit` | `AuditLog` | nothing: it records who did what |
//! | `context` | `Context` | nothing about a sandbox: store, index, drivers, settings, damage, clock, tasks |
//! | `running` | `Turns` | whose operation runs next; holds the state of running sandboxes |
//! | `references` | `References` | whether a layer may be discarded |
//! | `records` | `Records` | in which order a record is written |
//! | `tenancy` | `Tenancy`, `Secrets` | who may call, and which secrets a session gets |
//! | `network` | `Network` | what a session may reach |
//! | `snapshots` | `Storage` and its seven | what is kept, merged and deleted |
//! | `integrity` | `Integrity` and its three | whether data on disk can be trusted, and how much a sandbox may write |
//! | `machine` | `Machines` | how a machine comes up |
//! | `session` | `Sessions` | how a command runs and is followed |
//! | `webhooks` | `Webhooks` | which events are sent where, and when again |
//! | `lifecycle` | `Lifecycle` | when the phase of a sandbox changes |
//! | `governance` | `Runs`, `Approvals` | whose work runs next, and what waits for an answer |
//! | `api` | [`Engine`] | nothing: it lists what fronts may ask |
//!
//! Which folder may use which is a table in `docs/ARCHITECTURE.md`, which `tests/fast/layering.rs` checks.
//!
//! - [`lifecycle`](crate::model::lifecycle) decides, purely, what may happen to a sandbox in each phase;
//!   [`Sandbox::transition`] asks it and is the only writer of a phase.
//! - *Acknowledged is durable*: an answer that names a snapshot or a new sandbox is given after its
//!   layer, its manifest and the sandbox's manifest are on stable storage, in that order. The
//!   sandbox's manifest is the commit point: before it, the old generation stands.

mod api;
mod audit;
mod context;
mod error;
mod governance;
mod integrity;
mod lifecycle;
mod machine;
mod network;
mod observe;
mod records;
mod references;
mod running;
mod session;
mod snapshots;
mod tenancy;
mod webhooks;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio_util::sync::DropGuard;

use crate::catalog::Catalog;
use crate::driver::Driver;
use crate::engine::context::Context;
use crate::engine::context::single_flight::SingleFlight;
use crate::engine::governance::approvals::Approvals;
use crate::engine::governance::runs::Runs;
use crate::engine::integrity::Integrity;
use crate::engine::lifecycle::Lifecycle;
use crate::engine::lifecycle::lineage::comparing::Comparing;
use crate::engine::machine::Machines;
use crate::engine::network::Network;
use crate::engine::records::Records;
use crate::engine::references::References;
use crate::engine::running::turns::Turns;
use crate::engine::session::Sessions;
use crate::engine::snapshots::Storage;
use crate::engine::tenancy::Tenancy;
use crate::engine::tenancy::secrets::Secrets;
use crate::engine::webhooks::Webhooks;
use crate::guest::Deadlines;
use crate::model::{
    AuditRecord, Config, Decision, Drive, Finding, ForkFate, Name, OnAccept, Patch, Point, Sandbox,
    SandboxId, Session, SessionId, Size, Snapshot, SnapshotId, Span, Timestamp,
};
use crate::net::{Upstream, UpstreamSettings};
use crate::secret::{KeySource, Keyring};
use crate::store::image::Images;
use crate::store::{MergeOutcome, Store, TreeDiff};

pub use api::approvals::AskRequest;
pub use api::runs::Review;
pub use api::usage::Figures;
pub use audit::{AuditBatch, AuditFollow, AuditQuery};
pub use context::clock::{Clock, HostClock};
pub use context::damage::{Damage, DamageKind};
pub use error::{Error, ErrorKind, NoSuch, Result};
pub use governance::approvals::ApprovalFilter;
pub use governance::runs::{Acceptance, RunFilter};
pub use integrity::disk_probe::Unwell;
pub use integrity::scrub::ScrubSettings;
pub use lifecycle::why::Why;
pub use network::policy::{ConnectionFilter, ConnectionHost, Destination};
pub use observe::events::{EventBatch, EventQuery, EventScope, EventStream};
pub use records::lost_names::Lost;
pub use references::Sized;
pub use running::changes::Unsaved;
pub use running::live::{Hold, agent_answers};
pub use running::services::ServiceState;
pub use running::stdin::{StdinHandle, StdinProgress};
pub use session::command::{CommandOutput, Exec, OutputStream, Started};
pub use session::files::{Files, Upload};
pub use session::ports::{Connected, Whose};
pub use session::retention::{CommandRetention, CommandsKept};
pub use session::services::ServiceStatus;
pub use snapshots::drives::CreateDrive;
pub use snapshots::export::SnapshotExport;
pub use snapshots::storage_usage::{HostSpace, SpaceReport};
pub use snapshots::trash::{InTrash, TrashItem};
pub use tenancy::projects::Caller;
pub use tenancy::secrets::SetSecret;
pub use tenancy::token::PortPass;
pub use webhooks::{CreateWebhook, UpdateWebhook, WebhookSettings, WebhookStatus};

pub use crate::model::{Method, OnDelete};
pub use crate::store::{LeftOut, PatchOptions};

/// What the engine is made of.
#[derive(Debug)]
pub struct Parts {
    /// The truth.
    pub store: Store,
    /// What sandboxes start from.
    pub images: Images,
    /// The records of all sandboxes.
    pub catalog: Arc<dyn Catalog>,
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
    /// Whether it is recorded what commands and sessions change.
    pub record_changes: bool,
    /// The first of the host's uids that sandboxes may use.
    pub uid_base: u32,
    /// Where daemons of this host claim uids. The same for all whose machines share a kernel.
    pub uid_claims: PathBuf,
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
    pub network: UpstreamSettings,
    /// The driver of sandboxes that ask for none.
    pub default_driver: String,
    /// Drivers that this version has and this host cannot use.
    pub absent_drivers: BTreeMap<&'static str, Absent>,
    /// How many VMs are booted in advance, for each of the templates that were used last.
    pub warm_vms: usize,
    /// How layers are verified.
    pub scrub: ScrubSettings,
    /// How much the audit log of a project may take on disk. The oldest entries go first.
    pub audit_limit: Size,
    /// How webhooks behave.
    pub webhooks: WebhookSettings,
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
            record_changes: true,
            uid_base: 0x7000_0000,
            uid_claims: crate::driver::CLAIMS_DIR.into(),
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
            network: UpstreamSettings::default(),
            default_driver: Config::default().driver,
            absent_drivers: BTreeMap::new(),
            warm_vms: 0,
            scrub: ScrubSettings::default(),
            audit_limit: Size(256 << 20),
            webhooks: WebhookSettings::default(),
        }
    }
}

/// The engine. Clones are the same engine. What fronts may ask of it is in `api`.
#[derive(Clone)]
pub struct Engine {
    parts: Arc<Components>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let data = self.parts.context.store.data_dir();
        f.debug_struct("Engine").field("data", &data).finish_non_exhaustive()
    }
}

/// The components, from the bottom to the top.
struct Components {
    context: Arc<Context>,
    turns: Arc<Turns>,
    references: Arc<References>,
    tenancy: Arc<Tenancy>,
    secrets: Arc<Secrets>,
    network: Arc<Network>,
    storage: Arc<Storage>,
    integrity: Arc<Integrity>,
    machines: Arc<Machines>,
    sessions: Arc<Sessions>,
    lifecycle: Arc<Lifecycle>,
    webhooks: Arc<Webhooks>,
    runs: Arc<Runs>,
    /// Ends all tasks of an engine that is dropped and was not shut down.
    _shutdown: DropGuard,
}

/// How long the shutdown waits for operations that have begun, all together.
const OPERATIONS_WITHIN: Duration = Duration::from_secs(30);
/// How long it waits for the disk.
const SYNC_WITHIN: Duration = Duration::from_secs(30);
/// How long it waits for the tasks in the background.
const TASKS_WITHIN: Duration = Duration::from_secs(5);

impl Engine {
    /// Opens the engine: reads what is on disk, and starts to recover what an earlier daemon left. Machines that are still alive
    /// are adopted, sessions that broke off are sealed, in the background and each sandbox in its own turn. So nothing
    /// here waits for a guest, and a request waits for its own sandbox alone. [`recovered`](Self::recovered) waits for all.
    ///
    /// # Errors
    ///
    /// Returns [`Error`] when the data directory or the index cannot be read.
    pub async fn open(parts: Parts) -> Result<Self> {
        let Parts { store, images, catalog, drivers, settings } = parts;
        let (signer, bad_signer) =
            tenancy::token::Signer::open(store.data_dir()).map_err(Error::Secret)?;
        let keyring = Arc::new(Keyring::open(store.data_dir(), &settings.secrets_key)?);
        let outside = Upstream::new(settings.network.clone()).map_err(Error::Outside)?;
        let events = observe::events::EventFeed::start(store.data_dir().join("events")).await;
        let (audit, bad_audit_key) =
            audit::AuditLog::start(store.data_dir(), settings.audit_limit.0)
                .map_err(Error::AuditLog)?;
        let context = Context::new(store, catalog, drivers, settings, events, audit);
        if let Some(aside) = bad_audit_key {
            context.report_damage(
                DamageKind::SecurityConfig,
                "audit.key",
                format!("it was not 32 bytes, and is kept as `{aside}`"),
                "another one was made: what the audit log's heads were signed for is not proven",
            );
        }
        if let Some(aside) = bad_signer {
            context.report_damage(
                DamageKind::SecurityConfig,
                "token.key",
                format!("it was not 32 bytes, and is kept as `{aside}`"),
                "another one was made: tokens from before are refused",
            );
        }
        let turns = Turns::new(&context);
        let references = References::new(&context);
        let records = Records::new(&context, &references);
        let tenancy = Tenancy::new(&context, &references, signer);
        let secrets = Secrets::new(&context, &turns, &keyring);
        let network =
            Network::new(&context, &turns, &records, &tenancy, &secrets, &keyring, outside);
        let storage =
            Storage::new(&context, &images, &turns, &references, &records, &tenancy, &secrets);
        let integrity = Integrity::new(&context, &turns, &references);
        let machines = Machines::new(&context, &references, &records);
        let sessions = Sessions::new(&context, &turns, &records, &secrets);
        let webhooks = Webhooks::new(&context, &keyring, network.outside());
        let lifecycle = Arc::new(Lifecycle {
            store: context.store.clone(),
            db: Arc::clone(&context.db),
            images,
            context: Arc::clone(&context),
            turns: Arc::clone(&turns),
            references: Arc::clone(&references),
            records,
            tenancy: Arc::clone(&tenancy),
            secrets: Arc::clone(&secrets),
            network: Arc::clone(&network),
            storage: Arc::clone(&storage),
            integrity: Arc::clone(&integrity),
            machines: Arc::clone(&machines),
            sessions: Arc::clone(&sessions),
            wakes: SingleFlight::default(),
            comparing: Comparing::default(),
        });
        let runs = Runs::new(&lifecycle, &Approvals::new(&context, &tenancy));
        let shutdown = context.tasks.shutdown().drop_guard();
        let parts = Arc::new(Components {
            context,
            turns,
            references,
            tenancy,
            secrets,
            network,
            storage,
            integrity,
            machines,
            sessions,
            lifecycle,
            webhooks,
            runs,
            _shutdown: shutdown,
        });
        let engine = Self { parts };
        engine.begin().await?;
        Ok(engine)
    }

    /// Begins what the engine does by itself.
    async fn begin(&self) -> Result<()> {
        let trash = Arc::downgrade(&self.parts.storage.trash);
        self.parts.context.store.set_space_reclaimer(Box::new(move || {
            let trash = trash.upgrade();
            Box::pin(async move {
                match trash {
                    Some(trash) => trash.free_space_early().await,
                    None => false,
                }
            })
        }));
        let version = env!("CARGO_PKG_VERSION");
        let started = AuditRecord::by_system(None, "server.start", None).with("version", version);
        self.parts.context.audit.note(started);
        self.parts.lifecycle.recover().await?;
        self.parts.webhooks.begin().await?;
        self.recover_runs().await?;
        lifecycle::reaper::run(&self.parts.lifecycle);
        integrity::scrub::run(&self.parts.integrity.scrub);
        Ok(())
    }

    /// Ends the engine's own work. Sandboxes go on running; the next daemon adopts them.
    pub async fn shutdown(&self) {
        let Components { context, turns, references, network, machines, .. } = &*self.parts;
        context.tasks.begin_shutdown();
        references.digests.stop();
        // Operations that have begun run to completion, but not for longer than this all together.
        let _ = tokio::time::timeout(OPERATIONS_WITHIN, turns.all_idle()).await;
        network.disconnect_all().await;
        // A disk that hangs must not keep the daemon.
        match tokio::time::timeout(SYNC_WITHIN, references.sync_and_discard()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::error!(
                    error = error::error_chain(&error),
                    "shutdown: not everything was synced"
                );
            }
            Err(_) => {
                tracing::error!("shutdown: the disk does not answer; not everything was synced");
            }
        }
        machines.end_warm_machines().await;
        let left = context.tasks.join(TASKS_WITHIN).await;
        if left > 0 {
            tracing::warn!(left, "shutdown: some background tasks have not ended");
        }
        context.events.finish().await;
        context.audit.note(AuditRecord::by_system(None, "server.stop", None));
        context.audit.finish().await;
        context.catalog.close().await;
    }

    /// How much is left to recover of what an earlier daemon left: 0 when all of it is done.
    #[must_use]
    pub fn recovering(&self) -> usize {
        *self.parts.context.recovery.borrow()
    }

    /// Waits until everything that an earlier daemon left is recovered.
    pub async fn recovered(&self) {
        let mut left = self.parts.context.recovery.subscribe();
        let _ = left.wait_for(|left| *left == 0).await;
    }

    /// How many machines wait for a sandbox.
    #[must_use]
    pub fn waiting_warm_vms(&self) -> usize {
        self.parts.machines.waiting_warm_vms()
    }

    /// What sandboxes can start from.
    #[must_use]
    pub fn images(&self) -> &Images {
        &self.parts.lifecycle.images
    }

    /// The names of the drivers this host has.
    #[must_use]
    pub fn drivers(&self) -> Vec<&'static str> {
        self.parts.context.drivers.keys().copied().collect()
    }
}

/// A sandbox to create, or to get if it exists.
#[derive(Debug, Clone, Default)]
pub struct Create {
    /// Its name. If absent, a readable one is generated.
    pub name: Option<Name>,
    /// Its settings, where they differ from the defaults.
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
    /// Fail with [`Error::NameTaken`].
    #[default]
    Fail,
    /// Return the existing one.
    Get,
}

/// Whether a sleeping sandbox may be woken.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum WakeMode {
    /// It is woken.
    #[default]
    Wake,
    /// It stays asleep, and the call fails with [`Error::NotRunning`].
    IfRunning,
    /// Only this session may be used. If it has ended, or is ending, the call fails with [`Error::SessionEnded`], also when another one
    /// runs.
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
    /// Whether this call created it.
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
    pub snapshot: SnapshotOnStop,
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
pub enum SnapshotOnStop {
    /// As the sandbox is configured, and if something was written.
    #[default]
    Configured,
    /// Whatever its configuration says, and even if nothing was written.
    Always,
}

/// A checkpoint to be taken.
#[derive(Debug, Clone, Default)]
pub struct Checkpoint {
    /// A label, for people.
    pub label: Option<String>,
    /// Whether somebody asked for it, or the engine takes it by itself.
    pub method: Method,
    /// How long after its last use the snapshot expires, `Some(None)` for never. If absent, the sandbox's retention decides.
    pub expires: Option<Option<Span>>,
    /// The session to take it of. If absent, the current one.
    pub session: Option<SessionId>,
}

/// How a sandbox is to be deleted.
#[derive(Debug, Clone, Default)]
pub struct Delete {
    /// What happens to its snapshots.
    pub snapshots: OnDelete,
    /// Whether it is deleted even if its writes to drives cannot be recovered from its disks and are lost.
    pub force: bool,
    /// Whether it skips the trash.
    pub at_once: bool,
    /// Whether it is deleted because it expired, not because somebody asked for it.
    pub expired: bool,
    /// Refused if it runs, or was used after this.
    pub unused_since: Option<Timestamp>,
    /// Refused if this is not the sandbox that has the name.
    pub only: Option<SandboxId>,
    /// Refused if it has more than this snapshot.
    pub only_at: Option<SnapshotId>,
}

/// Filters a list of snapshots.
#[derive(Debug, Clone, Default)]
pub struct SnapshotFilter {
    /// Of sandboxes of this name, deleted ones included.
    pub sandbox: Option<Name>,
    /// Whether to include those that were deleted or have expired.
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
    /// What becomes of the fork once it is accepted.
    pub on_accept: OnAccept,
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

/// A fork whose state its origin is to get.
#[derive(Debug, Clone, Copy, Default)]
pub struct Promote {
    /// The generation the origin must be at; the one it was forked at if absent.
    pub expect_generation: Option<u64>,
}

/// An origin that got the state of a fork.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Promoted {
    /// The origin.
    pub sandbox: Sandbox,
    /// What it stands on now.
    pub snapshot: Snapshot,
    /// What it stood on before; its image if absent.
    pub before: Option<Snapshot>,
}

/// Changes to be brought into another sandbox.
#[derive(Debug, Clone, Default)]
pub struct MergeRequest {
    /// The sandbox that gets them; the origin if absent.
    pub into: Option<Name>,
    /// Globs of the paths to take; all if empty.
    pub only: Vec<String>,
    /// Whether both versions of a conflict are kept, side by side.
    pub keep_both: bool,
    /// Whether nothing is to be changed.
    pub dry_run: bool,
    /// The generation the target must be at.
    pub expect_generation: Option<u64>,
}

/// What a merge did, or would do.
#[derive(Debug, Clone)]
pub struct Merged {
    /// Paths and conflicts.
    pub outcome: MergeOutcome,
    /// The target.
    pub sandbox: Sandbox,
    /// The snapshot with the result, if something was changed.
    pub snapshot: Option<Snapshot>,
    /// Whether all paths were considered.
    pub all: bool,
}

/// Chosen files of a sandbox to be put into a drive.
#[derive(Debug, Clone)]
pub struct PromoteIntoDrive {
    /// The drive.
    pub drive: Name,
    /// The directory in it; empty for its root.
    pub path: String,
    /// Globs of the paths.
    pub only: Vec<String>,
    /// The generation the drive must be at.
    pub expect_generation: Option<u64>,
    /// Whether nothing is to be changed.
    pub dry_run: bool,
}

/// What was put into a drive, or would be.
#[derive(Debug, Clone)]
pub struct PromotedIntoDrive {
    /// The drive.
    pub drive: Drive,
    /// Paths, as they are in the drive.
    pub outcome: MergeOutcome,
    /// What the sandbox was; absent if it was looked at as it runs, or is its image.
    pub snapshot: Option<SnapshotId>,
}

/// Which differences of two points are wanted.
#[derive(Debug, Clone)]
pub struct DiffRequest {
    /// The first point.
    pub from: Point,
    /// The second point.
    pub to: Point,
    /// Paths or globs; all if empty. Without a leading slash they are below the working directory.
    pub paths: Vec<String>,
    /// How many paths are listed.
    pub limit: usize,
}

/// What differs between two points.
#[derive(Debug)]
pub struct Difference {
    /// The snapshots that were compared, where they are some, and whether files may change meanwhile.
    pub from: (Option<SnapshotId>, bool),
    /// The same of the second point.
    pub to: (Option<SnapshotId>, bool),
    /// The differences.
    pub tree: TreeDiff,
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
    /// The sandbox, which now continues from the chosen snapshot.
    pub sandbox: Sandbox,
    /// The snapshot of its former state, if a session had to be ended.
    pub before: Option<Snapshot>,
}

/// A sandbox's relatives: all sandboxes that are connected with it by forks, and their snapshots.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tree {
    /// The sandboxes, oldest first.
    pub sandboxes: Vec<Sandbox>,
    /// The snapshots, oldest first.
    pub snapshots: Vec<Snapshot>,
    /// What has become of each fork, in the order in which they were made.
    pub forks: Vec<ForkInTree>,
}

/// A fork of one of the sandboxes of a lineage. It may be in the trash.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForkInTree {
    /// Its id.
    pub id: SandboxId,
    /// Its name.
    pub name: Name,
    /// The name of its origin.
    pub origin: Name,
    /// What has become of it.
    pub fate: ForkFate,
    /// What deleting it for good would free.
    pub freed: u64,
    /// Whether it is in the trash.
    pub in_trash: bool,
}

fn later(span: Span) -> Option<Timestamp> {
    after(crate::model::now(), span)
}

fn after(at: Timestamp, span: Span) -> Option<Timestamp> {
    let span = jiff::SignedDuration::from_millis(i64::try_from(span.0).ok()?);
    at.checked_add(span).ok()
}
