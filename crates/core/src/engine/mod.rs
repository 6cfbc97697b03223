//! The engine: everything that happens to sandboxes.
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
//! | `builds` | `Builds` | which step of an image build runs next, and which was made before |
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
mod builds;
mod context;
mod error;
mod governance;
mod integrity;
mod lifecycle;
mod machine;
mod network;
mod observe;
mod operations;
mod records;
mod references;
mod running;
mod session;
mod settings;
mod snapshots;
mod tenancy;
mod webhooks;

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::DropGuard;

use crate::catalog::Catalog;
use crate::driver::Driver;
use crate::engine::builds::Builds;
use crate::engine::context::Context;
use crate::engine::context::single_flight::SingleFlight;
use crate::engine::governance::approvals::Approvals;
use crate::engine::governance::runs::Runs;
use crate::engine::integrity::Integrity;
use crate::engine::lifecycle::Lifecycle;
use crate::engine::lifecycle::lineage::comparing::Comparing;
use crate::engine::machine::Machines;
use crate::engine::network::Network;
use crate::engine::network::session_network::MakesGates;
use crate::engine::records::Records;
use crate::engine::references::References;
use crate::engine::running::turns::Turns;
use crate::engine::session::Sessions;
use crate::engine::snapshots::Storage;
use crate::engine::snapshots::snapshot_records::PinsSnapshots;
use crate::engine::tenancy::Tenancy;
use crate::engine::tenancy::secrets::Secrets;
use crate::engine::webhooks::Webhooks;
use crate::model::{AuditRecord, Span, Timestamp};
use crate::net::Upstream;
use crate::secret::Keyring;
use crate::store::Store;
use crate::store::image::Images;

pub use api::approvals::AskRequest;
pub use api::runs::Review;
pub use api::stats::Stats;
pub use api::usage::Figures;
pub use audit::{AuditBatch, AuditFollow, AuditQuery};
pub use builds::{BuildEvent, BuildRequest};
pub use context::clock::{Clock, HostClock};
pub use context::damage::{Damage, DamageKind};
pub use context::drivers::LateDrivers;
pub use error::{Error, ErrorKind, NoSuch, Result};
pub use governance::approvals::ApprovalFilter;
pub use governance::runs::{Acceptance, RunFilter};
pub use integrity::disk_probe::Unwell;
pub use integrity::scrub::ScrubSettings;
pub use lifecycle::lineage::artifacts::Artifacts;
pub use lifecycle::why::Why;
pub use network::policy::{ConnectionFilter, ConnectionHost, DestinationTraffic};
pub use observe::events::{EventBatch, EventQuery, EventScope, EventStream};
pub use observe::meters::Latency;
pub use operations::{
    Checkpoint, Create, Delete, Deleted, DiffRequest, Difference, Fork, ForkFailed, ForkFrom,
    ForkInTree, Forks, IfExists, MergeRequest, Merged, Opened, Paused, Promote, PromoteIntoDrive,
    Promoted, PromotedIntoDrive, RolledBack, SnapshotFilter, SnapshotOnStop, Stop, Stopped, Tree,
    WakeMode,
};
pub use records::lost_names::Lost;
pub use references::Sized;
pub use running::changes::Unsaved;
pub use running::live::{Hold, agent_answers};
pub use running::services::ServiceState;
pub use running::stdin::{StdinHandle, StdinProgress};
pub use session::command::{CommandOutput, Exec, OutputStream, Started};
pub use session::files::{Files, Upload};
pub use session::log::start::LogStart;
pub use session::ports::{Connected, Whose};
pub use session::retention::{CommandRetention, CommandsKept};
pub use session::services::ServiceStatus;
pub use settings::{Absent, Settings};
pub use snapshots::drives::CreateDrive;
pub use snapshots::export::SnapshotExport;
pub use snapshots::storage_usage::{HostSpace, SpaceReport};
pub use snapshots::trash::{InTrash, TrashItem};
pub use tenancy::projects::Caller;
pub use tenancy::secrets::SetSecret;
pub use tenancy::token::PortPass;
pub use webhooks::{AnswerLink, CreateWebhook, UpdateWebhook, WebhookSettings, WebhookStatus};

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
    builds: Arc<Builds>,
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
        let builds = Builds::new(&lifecycle);
        let runs = Runs::new(&lifecycle, &Approvals::new(&context, &tenancy));
        let gates: Arc<dyn MakesGates> = Arc::<Runs>::clone(&runs);
        let pins: Arc<dyn PinsSnapshots> = Arc::<Runs>::clone(&runs);
        // They are set only here.
        let _ = network.gates.set(Arc::downgrade(&gates));
        let _ = storage.snapshots.pins.set(Arc::downgrade(&pins));
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
            builds,
            runs,
            _shutdown: shutdown,
        });
        let engine = Self { parts };
        engine.begin().await?;
        Ok(engine)
    }

    /// Starts the engine's background work.
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
        self.load_runs().await?;
        self.parts.lifecycle.recover().await?;
        self.parts.webhooks.begin().await?;
        self.parts.builds.clean_up();
        self.recover_runs();
        lifecycle::reaper::run(&self.parts.lifecycle);
        integrity::scrub::run(&self.parts.integrity.scrub);
        Ok(())
    }

    /// Ends the engine's own work. Sandboxes keep running; the next daemon adopts them.
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
        self.parts.context.drivers.names()
    }
}

fn later(span: Span) -> Option<Timestamp> {
    after(crate::model::now(), span)
}

fn after(at: Timestamp, span: Span) -> Option<Timestamp> {
    let span = jiff::SignedDuration::from_millis(i64::try_from(span.0).ok()?);
    at.checked_add(span).ok()
}
