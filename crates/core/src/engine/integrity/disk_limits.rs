//! Enforces the disk limits of sandboxes and drives, and the host's reserve.
//!
//! | the filesystem | over the limit | over the reserve of the host |
//! |---|---|---|
//! | has project quotas | the write fails (`EDQUOT`, `ENOSPC`), the command goes on | the quota shrinks to what is left: the same |
//! | has none | the processes that write the most are ended; if it goes on growing, all commands | the same, of the one that grew the most (`shortage`) |
//! | is a machine's own | the guest's own: the write fails | the writes of the one that grew the most wait (`shortage`) |
//!
//! Where there are no quotas what sandboxes write is counted: often while the disk fills quickly, and seldom otherwise. Counted are blocks of
//! files, also of those that were removed and are still open, and inodes, each as [`PER_INODE`] bytes; there is a limit for their number
//! too ([`inodes_for`]). What was written stays, so that somebody can look and clean up. Between two looks a sandbox can go over its limit
//! by what it writes meanwhile; a single file cannot (`RLIMIT_FSIZE`).
//!
//! *Uploads* are written by the agent, which is not ended. They are counted as they are sent, and
//! refused from where the limit is. During an upload, and until the agent has written what it was
//! sent, no process is ended for what the disk takes: it may be the upload, which is refused from
//! then on.
//!
//! How processes are ended, and how their commands come to say why, is in `ending`.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use sandkeep_proto::link::Failure;

use crate::driver::Unnamed;
use crate::engine::error::error_chain;
use crate::engine::integrity::DiskLimits;
use crate::engine::integrity::ending::{DiskKill, KillMeans};
use crate::engine::integrity::fill_meter::FillMeter;
use crate::engine::integrity::shortage::{HeldStill, Outlook, Remedy, Shortage, written_layers};
use crate::engine::running::end_cause::DiskCause;
use crate::engine::running::live::RunningSandbox;
use crate::engine::running::upload_allowance::Sent;
use crate::engine::{Error, Result};
use crate::guest::GuestError;
use crate::model::{LayerId, MountMode, Sandbox, Size};
use crate::store::{BYTES_PER_INODE, FreeSpace, LayerUsage, inodes_for};

/// What is counted for an inode besides its blocks: what filesystems take for it, and for its name.
const PER_INODE: u64 = 512;
/// How often the disk is looked at, and how often when little more than the reserve is left.
const TICK: Duration = Duration::from_millis(250);
const SOON: Duration = Duration::from_millis(50);
const LITTLE: u64 = 2 << 30;
/// How often while the reserve is about to be used.
const AT_ONCE: Duration = Duration::from_millis(20);
/// Containers are frozen for a look no longer than this and what one of them takes to count.
const LONGEST_FREEZE: Duration = Duration::from_secs(2);
/// How long a look is good for if nothing fills up.
const LOOKED: Duration = Duration::from_secs(60);
/// After this many rounds of ending those who write the most, all commands are ended.
const ROUNDS: u32 = 4;
/// What a sandbox wrote since a look longer ago than this does not show who fills the disk now.
const JUST_NOW: Duration = Duration::from_secs(1);
/// What a sandbox may always write, so that it can start and be cleaned up when there is little left.
const AT_LEAST: u64 = 8 << 20;
/// What a session may add to a full drive: mounting it, and removing files, takes a little.
const TO_CLEAN_UP: u64 = 1 << 20;

/// A limit, and how much of it is used.
pub(super) struct Bound {
    pub(super) layer: LayerId,
    /// What it is called: "its disk", "drive `data`".
    what: String,
    pub(super) used: u64,
    inodes: u64,
    limit: u64,
    /// Whether the filesystem holds the layer to it.
    enforced: bool,
}

impl Bound {
    pub(super) fn is_over(&self) -> bool {
        self.used > self.limit || self.inodes > inodes_for(self.limit)
    }

    fn left(&self) -> Sent {
        let inodes = inodes_for(self.limit).saturating_sub(self.inodes);
        Sent::new(self.limit.saturating_sub(self.used), inodes)
    }

    /// Why something does not fit. The files of an archive are not known yet: an upload continues
    /// as long as there may be more.
    fn refuses(&self, more: Sent) -> Option<String> {
        let left = self.left();
        if left.inodes < more.made() {
            let most = inodes_for(self.limit);
            return Some(format!("{} may have {most} files and directories", self.what));
        }
        (left.bytes < more.bytes).then(|| format!("{} may take {}", self.what, Size(self.limit)))
    }
}

/// What the watch remembers between looks.
#[derive(Default)]
struct LimitWatch {
    /// What was found of layers at the last look.
    before: HashMap<LayerId, Looked>,
    /// How often writers were ended, of sandboxes that are over a limit.
    rounds: HashMap<LayerId, u32>,
    /// Whether the host runs short of space.
    shortage: Shortage,
}

/// What was found at a look.
#[derive(Debug, Clone, Copy)]
struct Looked {
    /// What the layer took.
    used: u64,
    /// Whether that was more than at the look before.
    grew: bool,
    /// Whether the filesystem holds it to its limit.
    enforced: bool,
    /// What had been uploaded to its sandbox.
    uploaded: u64,
    /// How often writers of its sandbox had been ended. What they wrote before their end is theirs
    /// alone: processes that run after it may be cleaning up.
    ended: u64,
}

/// A running sandbox, and by how much it has grown since the disk became short.
struct Growing {
    by: u64,
    live: Arc<RunningSandbox>,
    layers: Vec<(LayerId, u64)>,
    uploads: bool,
}

/// What is known of the free space at a look.
#[derive(Debug, Clone, Copy)]
struct SpaceSight {
    usable: u64,
    outlook: Outlook,
    /// Whether the last look shows who fills the disk now.
    fresh: bool,
    now: Instant,
}

/// Ends the session of a machine that cannot be controlled any more, and keeps what it wrote.
#[async_trait]
pub(in crate::engine) trait EndsSessions: Send + Sync {
    async fn end_uncontrolled(self: Arc<Self>, live: Arc<RunningSandbox>) -> Result<()>;
}

/// Looks at what sandboxes write until the engine ends.
pub(in crate::engine) async fn watch(this: Weak<DiskLimits>, sessions: Weak<dyn EndsSessions>) {
    let Some(shutdown) = this.upgrade().map(|this| this.context.tasks.shutdown()) else {
        return;
    };
    let mut watch = LimitWatch::default();
    let mut fills = FillMeter::default();
    let (mut looked, mut tick) = (Instant::now(), TICK);
    loop {
        tokio::select! {
            () = tokio::time::sleep(tick) => {}
            () = shutdown.cancelled() => return,
        }
        let Some(this) = this.upgrade() else { return };
        let Ok(space) = this.store.usable() else { continue };
        let Ok(inodes) = this.store.free_inodes() else { continue };
        let now = Instant::now();
        fills.note(space.free, inodes);
        let outlook = watch.shortage.notice(space, now);
        tick = match outlook {
            Outlook::Calm if space.usable >= LITTLE => TICK,
            Outlook::Calm => SOON,
            Outlook::Short | Outlook::Critical => AT_ONCE,
        };
        this.context
            .short_of_space
            .store(space.reserve > 0 && space.usable == 0, Ordering::Relaxed);
        this.empty_trash_in_time(space);
        this.let_one_write(space);
        let short = outlook != Outlook::Calm;
        if !fills.is_due() && !short && watch.rounds.is_empty() && looked.elapsed() < LOOKED {
            continue;
        }
        // Since the last look little changed but in this tick, or it was just now.
        let fresh = fills.is_due() || looked.elapsed() < JUST_NOW;
        let sight = SpaceSight { usable: space.usable, outlook, fresh, now };
        fills.looked();
        looked = now;
        let held = match short {
            true => this.hold_still(watch.suspects(&this, fresh)).await,
            false => HeldStill::new(),
        };
        watch.look(&this, &sessions, sight, held).await;
    }
}

impl LimitWatch {
    /// The containers that may be writing: those that have just grown, or all if that is not known.
    fn suspects(&self, this: &DiskLimits, fresh: bool) -> Vec<Arc<RunningSandbox>> {
        let may_write = |layer: &LayerId| {
            self.before.get(layer).is_none_or(|looked| !looked.enforced && (looked.grew || !fresh))
        };
        let mut all = this.turns.all_live();
        all.retain(|live| {
            live.driver.relayer().is_some()
                && !live.is_closed()
                && written_layers(&live.sandbox()).iter().any(may_write)
        });
        all
    }

    async fn look(
        &mut self,
        this: &Arc<DiskLimits>,
        sessions: &Weak<dyn EndsSessions>,
        sight: SpaceSight,
        mut held: HeldStill,
    ) {
        let short = sight.outlook != Outlook::Calm;
        let mut now = HashMap::new();
        let mut rounds = HashMap::new();
        let before: HashMap<LayerId, u64> =
            self.before.iter().map(|(layer, looked)| (layer.clone(), looked.used)).collect();
        let known = short && self.shortage.begin(sight.fresh.then_some(&before));
        // Who grew by how much, for when the host has nothing to spare.
        let mut grew: Vec<Growing> = Vec::new();
        for live in this.turns.all_live() {
            if sight.now.elapsed() > LONGEST_FREEZE {
                thaw_all(&mut held).await;
            }
            // Before it is counted: what is uploaded meanwhile is then seen at the next look.
            let (uploaded, unwritten) = {
                let room = live.room.lock();
                (room.total(), room.is_being_written())
            };
            let ended = live.ended_writers.load(Ordering::SeqCst);
            let clearing = live.clearing.load(Ordering::SeqCst);
            let bounds = match this.bounds(&live).await {
                Ok(bounds) => bounds,
                Err(error) => {
                    tracing::debug!(
                        error = error_chain(&error),
                        "could not tell how much a session wrote"
                    );
                    continue;
                }
            };
            live.counted(&bounds, sight.usable);
            let disks = this.own_disks(&live).await.unwrap_or_default();
            if !disks.is_empty() {
                let used = disks.iter().map(|(_, used)| used).sum();
                this.check_obeys(sessions, &live, used);
            }
            let mut layers = Vec::new();
            let mut over: Option<&Bound> = None;
            let (mut uploads, mut settles) = (unwritten, false);
            for bound in &bounds {
                let then = self.before.get(&bound.layer).copied();
                let uploading = unwritten || then.is_none_or(|then| uploaded > then.uploaded);
                let others = clearing || then.is_none_or(|then| ended > then.ended);
                uploads |= then.is_some_and(|then| uploaded > then.uploaded);
                settles |= then.is_some_and(|then| ended > then.ended);
                let then = then.map(|then| then.used);
                if bound.enforced {
                    this.enforce(bound, sight.usable).await;
                } else if disks.is_empty() {
                    layers.push((bound.layer.clone(), bound.used));
                }
                if !bound.enforced && bound.is_over() {
                    match then {
                        Some(then) if bound.used > then && !uploading && !others => {
                            over = Some(bound);
                        }
                        Some(_) if !uploading && !others => {}
                        // Whether it grows, and by whom, is not known yet: soon it is.
                        _ => {
                            let round = self.rounds.get(&bound.layer).copied().unwrap_or(0);
                            rounds.insert(bound.layer.clone(), round);
                        }
                    }
                }
                let (used, enforced) = (bound.used, bound.enforced);
                let grew = then.is_none_or(|then| used > then);
                now.insert(bound.layer.clone(), Looked { used, grew, enforced, uploaded, ended });
            }
            if let Some(Bound { layer, what, used, inodes, limit, .. }) = over {
                let sandbox = live.sandbox();
                tracing::warn!(sandbox = %sandbox.name, what, used, inodes, limit, "a sandbox is over its disk limit and growing; the processes that write are killed");
                let round = self.rounds.get(layer).copied().unwrap_or(0) + 1;
                rounds.insert(layer.clone(), round);
                let over = Some((layer.clone(), *used));
                let used = (*used).max(inodes.saturating_mul(BYTES_PER_INODE));
                let cause = DiskCause::OverLimit { limit: *limit, used };
                let means = if round > ROUNDS { KillMeans::Agent } else { KillMeans::Writers };
                this.end_processes(sessions, &live, DiskKill { over, cause, means });
            }
            for (layer, used) in &disks {
                let grew = before.get(layer).is_none_or(|then| used > then);
                let looked = Looked { used: *used, grew, enforced: false, uploaded, ended };
                now.entry(layer.clone()).or_insert(looked);
            }
            layers.extend(disks);
            if settles {
                // What those wrote that have just been ended is theirs alone.
                self.shortage.stopped(&layers);
            }
            let critical = sight.outlook == Outlook::Critical;
            let ending = layers.iter().any(|(layer, _)| rounds.contains_key(layer)) || clearing;
            // One whose writes are held back is no help, and one whose writers are just being ended only if there is no time.
            if known && live.writes.held().is_none() && (critical || !ending) {
                let by = self.shortage.grown(&layers);
                grew.push(Growing { by, live, layers, uploads });
            }
        }
        let grown: Vec<u64> = grew.iter().map(|one| one.by).collect();
        for index in Shortage::chosen(&grown, sight.outlook) {
            self.stop_from_writing(this, sessions, &grew[index], sight, &mut held);
        }
        thaw_all(&mut held).await;
        if short {
            let used = now.iter().map(|(layer, looked)| (layer.clone(), looked.used)).collect();
            self.shortage.begin_with(&used);
        }
        (self.before, self.rounds) = (now, rounds);
    }

    /// For the sake of the host's reserve.
    fn stop_from_writing(
        &mut self,
        this: &Arc<DiskLimits>,
        sessions: &Weak<dyn EndsSessions>,
        Growing { by, live, layers, uploads }: &Growing,
        sight: SpaceSight,
        held: &mut HeldStill,
    ) {
        self.shortage.stopped(layers);
        if live.driver.disk().is_some() {
            this.hold_writes(sessions, live, layers.iter().map(|(_, used)| used).sum());
            return;
        }
        let measure = self.shortage.measure(&live.key, sight.outlook, *uploads, sight.now);
        tracing::warn!(sandbox = %live.sandbox().name, growth = by, ?measure, "the host's disk is about to reach its reserve; processes of the sandbox that fills it are killed");
        let means = match measure {
            Remedy::Writers => KillMeans::Writers,
            Remedy::All => KillMeans::Host(held.remove(&live.key)),
            Remedy::Agent => KillMeans::Agent,
        };
        this.end_processes(
            sessions,
            live,
            DiskKill { over: None, cause: DiskCause::HostReserve, means },
        );
    }
}

async fn thaw_all(held: &mut HeldStill) {
    for (machine, frozen) in held.drain() {
        if let Err(error) = frozen.thaw().await {
            // It is tried again.
            tracing::warn!(%machine, error = error_chain(&error), "a container was not thawed after a look at what it writes");
        }
    }
}

impl RunningSandbox {
    /// Remembers what may still be uploaded.
    fn counted(&self, bounds: &[Bound], spare: u64) {
        let lefts = bounds.iter().map(Bound::left);
        let left = lefts.fold(Sent::new(spare, u64::MAX), |least, left| {
            Sent::new(least.bytes.min(left.bytes), least.inodes.min(left.inodes))
        });
        self.room.lock().counted(left);
    }
}

impl DiskLimits {
    /// Holds the layers of a machine that is to be started to their limits, where the filesystem does that.
    pub(in crate::engine) async fn limit_layers(&self, sandbox: &Sandbox) {
        if self.context.driver(&sandbox.config.driver).is_ok_and(|one| one.disk().is_some()) {
            // What it writes is on disks, which are in no project; its drives are counted.
            return;
        }
        if let Some(open) = sandbox.open_layer() {
            self.limit_layer(open, sandbox.config.resources.disk.0).await;
        }
        for mounted in sandbox.mounted().iter().filter(|one| one.mode == MountMode::ReadWrite) {
            if let Ok(Some(drive)) = self.db.drive_by_id(&mounted.drive).await {
                let held = self.references.counts().bytes_of(&drive.layers);
                let left = drive.max_size.0.saturating_sub(held).max(TO_CLEAN_UP);
                self.limit_layer(&mounted.layer, left).await;
            }
        }
    }

    /// Holds a layer that was just begun to its limit, where the filesystem does that. A layer it does not do that for is counted.
    pub(in crate::engine) async fn limit_layer(&self, layer: &LayerId, limit: u64) {
        let limited = async {
            let usable = self.store.usable()?.usable.max(AT_LEAST);
            self.store.limit_open(layer, limit.min(usable), inodes_for(limit)).await
        };
        if let Err(error) = limited.await {
            tracing::warn!(%layer, error = error_chain(&error), "the quota of an open layer was not set");
        }
    }

    /// Holds a running sandbox to limits that have changed.
    pub(in crate::engine) async fn limits_changed(&self, live: &RunningSandbox) {
        let (Ok(bounds), Ok(FreeSpace { usable, .. })) =
            (self.bounds(live).await, self.store.usable())
        else {
            return;
        };
        live.counted(&bounds, usable);
        for bound in bounds.iter().filter(|bound| bound.enforced) {
            self.enforce(bound, usable).await;
        }
    }

    /// Every limit of a running sandbox, and how much of it is used.
    pub(super) async fn bounds(&self, live: &RunningSandbox) -> Result<Vec<Bound>> {
        let sandbox = live.sandbox();
        let mut unnamed = None;
        let mut bounds = Vec::new();
        // The disk of a machine of its own is as large as it may be; its kernel holds it to that.
        if let Some(open) = sandbox.open_layer().filter(|_| live.driver.disk().is_none()) {
            let limit = sandbox.config.resources.disk.0;
            let used = self.used(live, open, Path::new("/"), &mut unnamed).await?;
            bounds.push(Bound::new(open, "its disk".to_owned(), used, 0, limit));
        }
        for mounted in sandbox.mounted().iter().filter(|one| one.mode == MountMode::ReadWrite) {
            let Some(drive) = self.db.drive_by_id(&mounted.drive).await? else { continue };
            let held = self.references.counts().bytes_of(&drive.layers);
            let place = Path::new(&mounted.path);
            let used = self.used(live, &mounted.layer, place, &mut unnamed).await?;
            let what = format!("drive `{}`", drive.name);
            bounds.push(Bound::new(&mounted.layer, what, used, held, drive.max_size.0));
        }
        Ok(bounds)
    }

    /// What is written to an open layer that is mounted at `place`.
    async fn used(
        &self,
        live: &RunningSandbox,
        open: &LayerId,
        place: &Path,
        unnamed: &mut Option<Vec<Unnamed>>,
    ) -> Result<LayerUsage> {
        let mut used = self.store.usage_of_open(open).await?;
        if used.enforced {
            return Ok(used);
        }
        if unnamed.is_none() {
            // One that is ending has no processes to ask.
            *unnamed = Some(live.driver.unnamed(&live.key).await.unwrap_or_default());
        }
        for one in unnamed.iter().flatten().filter(|one| one.mount == place) {
            used.bytes += one.bytes;
            used.inodes += one.files;
        }
        used.bytes = used.bytes.saturating_add(used.inodes.saturating_mul(PER_INODE));
        Ok(used)
    }

    /// Keeps a quota to the limit, which may have changed, and to what the host has to usable.
    async fn enforce(&self, bound: &Bound, usable: u64) {
        let limit = bound.limit.min(bound.used.saturating_add(usable).max(AT_LEAST));
        let set = self.store.limit_open(&bound.layer, limit, inodes_for(bound.limit)).await;
        if let Err(error) = set {
            tracing::debug!(layer = %bound.layer, error = error_chain(&error), "the quota of an open layer was not set");
        }
    }

    /// Lets a part of an upload through, or says which limit it is beyond.
    pub(in crate::engine) async fn admit_upload(
        &self,
        live: &RunningSandbox,
        more: Sent,
    ) -> Result<(), GuestError> {
        let no_room = || {
            let message = "the disk of the host has no room".to_owned();
            Err(GuestError::Refused { kind: Failure::NoSpace, message })
        };
        if live.driver.disk().is_some() {
            let is_full = live.writes.held().is_some()
                || self.store.usable().is_ok_and(|space| space.usable < more.bytes);
            return if is_full { no_room() } else { Ok(()) };
        }
        if live.room.lock().admit(more) {
            return Ok(());
        }
        // One at a time counts for a sandbox, however many upload.
        let _one = live.counting.lock().await;
        if live.room.lock().admit(more) {
            return Ok(());
        }
        let counted = async {
            let usable = self.store.usable()?.usable;
            Ok::<_, Error>((self.bounds(live).await?, usable))
        };
        let (bounds, usable) = match counted.await {
            Ok(counted) => counted,
            Err(error) => {
                // Then it is the watch that holds it to its limit.
                tracing::debug!(
                    error = error_chain(&error),
                    "could not tell how much a session wrote"
                );
                return Ok(());
            }
        };
        live.counted(&bounds, usable);
        if let Some(message) = bounds.iter().find_map(|bound| bound.refuses(more)) {
            return Err(GuestError::DiskLimit { message });
        }
        if usable < more.bytes {
            return no_room();
        }
        live.room.lock().admit_counted(more);
        Ok(())
    }

    /// Says that it is the sandbox's limit that is reached when its agent found no space, and not the host's disk.
    pub(in crate::engine) fn judge_full(
        &self,
        live: &RunningSandbox,
        error: GuestError,
    ) -> GuestError {
        let GuestError::Refused { kind: Failure::NoSpace, message } = error else { return error };
        match self.store.usable() {
            Ok(FreeSpace { usable: 1.., .. }) => {
                let limit = live.sandbox().config.resources.disk;
                GuestError::DiskLimit { message: format!("{message}; its disk may take {limit}") }
            }
            _ => GuestError::Refused { kind: Failure::NoSpace, message },
        }
    }
}

impl Bound {
    fn new(layer: &LayerId, what: String, used: LayerUsage, held: u64, limit: u64) -> Self {
        let LayerUsage { bytes, inodes, enforced } = used;
        // A quota is for what is added.
        let (used, limit) = match enforced {
            true => (bytes, limit.saturating_sub(held).max(TO_CLEAN_UP)),
            false => (bytes.saturating_add(held), limit),
        };
        Self { layer: layer.clone(), what, used, inodes, limit, enforced }
    }
}
