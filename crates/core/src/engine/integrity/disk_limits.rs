//! Enforces the disk limits of sandboxes and drives, and the host's reserve.
//!
//! | the filesystem | over the limit | over the reserve of the host |
//! |---|---|---|
//! | has project quotas | the write fails (`EDQUOT`, `ENOSPC`), the command goes on | the quota shrinks to what is left: the same |
//! | has none | the processes that write the most are ended; if it goes on growing, all commands | the same, of the one that grew the most |
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
use crate::engine::integrity::shortage::{GREW, Outlook, Shortage};
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
/// What must have been taken since the last look for the next: of bytes, and of inodes.
const FILLED: u64 = 32 << 20;
const FILLED_INODES: u64 = 8192;
/// How long a look is good for if nothing fills up.
const LOOKED: Duration = Duration::from_secs(60);
/// After this many rounds of ending those who write the most, all commands are ended.
const ROUNDS: u32 = 4;
/// What a sandbox wrote since a look longer ago than this does not show who fills the disk now.
const JUST_NOW: Duration = Duration::from_secs(1);
/// What a sandbox may always write, so that it can start and be cleaned up when there is little left.
const AT_LEAST: u64 = 8 << 20;
/// How long the agent may take to report the end of a process that was ended.
const HEARD: Duration = Duration::from_millis(250);
/// What a session may add to a full drive: mounting it, and removing files, takes a little.
const TO_CLEAN_UP: u64 = 1 << 20;

/// A limit, and how much of it is used.
struct Bound {
    layer: LayerId,
    /// What it is called: "its disk", "drive `data`".
    what: String,
    used: u64,
    inodes: u64,
    limit: u64,
    /// Whether the filesystem holds the layer to it.
    enforced: bool,
}

impl Bound {
    fn is_over(&self) -> bool {
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
    /// What had been uploaded to its sandbox.
    uploaded: u64,
    /// How often writers of its sandbox had been ended. What they wrote before their end is theirs
    /// alone: processes that run after it may be cleaning up.
    ended: u64,
}

/// A running sandbox that grows.
struct Growing {
    by: u64,
    live: Arc<RunningSandbox>,
    layers: Vec<(LayerId, u64)>,
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
    let (mut free_then, mut inodes_then) = (u64::MAX, u64::MAX);
    let (mut looked, mut tick) = (Instant::now(), TICK);
    loop {
        tokio::select! {
            () = tokio::time::sleep(tick) => {}
            () = shutdown.cancelled() => return,
        }
        let Some(this) = this.upgrade() else { return };
        let Ok(space) = this.store.usable() else { continue };
        let Ok(inodes) = this.store.free_inodes() else { continue };
        tick = if space.usable < LITTLE { SOON } else { TICK };
        let fills = space.free.saturating_add(FILLED) < free_then
            || inodes.saturating_add(FILLED_INODES) < inodes_then;
        let short = watch.shortage.notice(space) == Outlook::Short;
        this.context
            .short_of_space
            .store(space.reserve > 0 && space.usable == 0, Ordering::Relaxed);
        this.empty_trash_in_time(space);
        this.let_one_write(space);
        if !fills && !short && watch.rounds.is_empty() && looked.elapsed() < LOOKED {
            continue;
        }
        let since = looked.elapsed();
        (free_then, inodes_then, looked) = (space.free, inodes, Instant::now());
        watch.look(&this, &sessions, space.usable, short, since).await;
    }
}

impl LimitWatch {
    async fn look(
        &mut self,
        this: &Arc<DiskLimits>,
        sessions: &Weak<dyn EndsSessions>,
        usable: u64,
        short: bool,
        since: Duration,
    ) {
        let mut now = HashMap::new();
        let mut rounds = HashMap::new();
        let before: HashMap<LayerId, u64> =
            self.before.iter().map(|(layer, looked)| (layer.clone(), looked.used)).collect();
        let known = short && self.shortage.begin((since < JUST_NOW).then_some(&before));
        // Who grew the most, for when the host has nothing to spare.
        let mut grew: Option<Growing> = None;
        for live in this.turns.all_live() {
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
            live.counted(&bounds, usable);
            let disks = this.own_disks(&live).await.unwrap_or_default();
            if !disks.is_empty() {
                let used = disks.iter().map(|(_, used)| used).sum();
                this.check_obeys(sessions, &live, used);
            }
            let mut layers = Vec::new();
            let mut over: Option<&Bound> = None;
            for bound in &bounds {
                let then = self.before.get(&bound.layer).copied();
                let uploading = unwritten || then.is_none_or(|then| uploaded > then.uploaded);
                let others = clearing || then.is_none_or(|then| ended > then.ended);
                let then = then.map(|then| then.used);
                if bound.enforced {
                    this.enforce(bound, usable).await;
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
                now.insert(bound.layer.clone(), Looked { used: bound.used, uploaded, ended });
            }
            if let Some(Bound { layer, what, used, inodes, limit, .. }) = over {
                let sandbox = live.sandbox();
                tracing::warn!(sandbox = %sandbox.name, what, used, inodes, limit, "a sandbox is over its disk limit and growing; the processes that write are killed");
                let round = self.rounds.get(layer).copied().unwrap_or(0) + 1;
                rounds.insert(layer.clone(), round);
                live.over_disk(*limit, (*used).max(inodes.saturating_mul(BYTES_PER_INODE)));
                let over = Some((layer.clone(), *used));
                this.end_writers(sessions, &live, over, round > ROUNDS);
            }
            for (layer, used) in &disks {
                let looked = Looked { used: *used, uploaded, ended };
                now.entry(layer.clone()).or_insert(looked);
            }
            layers.extend(disks);
            // One whose writes are held back is no help.
            if known && live.writes.held().is_none() {
                let by = self.shortage.grown(&layers);
                if grew.as_ref().is_none_or(|most| by > most.by) {
                    grew = Some(Growing { by, live, layers });
                }
            }
        }
        if let Some(most) = grew.filter(|most| most.by >= GREW)
            && !most.layers.iter().any(|(layer, _)| rounds.contains_key(layer))
        {
            self.stop_from_writing(this, sessions, &most);
        }
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
        Growing { by, live, layers }: &Growing,
    ) {
        self.shortage.stopped(layers);
        if live.driver.disk().is_some() {
            this.hold_writes(sessions, live, layers.iter().map(|(_, used)| used).sum());
            return;
        }
        tracing::warn!(sandbox = %live.sandbox().name, growth = by, "the host's disk is about to reach its reserve; the processes that write the most are killed");
        live.over_disk(live.sandbox().config.resources.disk.0, *by);
        this.end_writers(sessions, live, None, false);
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
    async fn bounds(&self, live: &RunningSandbox) -> Result<Vec<Bound>> {
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

    /// Ends the processes of a sandbox that fill the disk, or all of its commands. It is not waited
    /// for: its agent may not answer, and the next sandbox must be checked.
    fn end_writers(
        self: &Arc<Self>,
        sessions: &Weak<dyn EndsSessions>,
        live: &Arc<RunningSandbox>,
        over: Option<(LayerId, u64)>,
        all: bool,
    ) {
        if live.clearing.swap(true, Ordering::SeqCst) {
            return;
        }
        let (this, sessions, live) = (Arc::clone(self), Weak::clone(sessions), Arc::clone(live));
        self.context.tasks.spawn(async move {
            let ended = match all {
                true => Ok(0),
                false => live.driver.end_writers(&live.key).await,
            };
            match ended {
                Ok(ended @ 1..) => {
                    tracing::warn!(sandbox = %live.sandbox().name, ended, "processes that filled the disk were ended");
                }
                // The processes that run now may be cleaning up: they must not be ended for that.
                Ok(0) if !this.shrinks(&live, over).await => this.clear(&sessions, &live).await,
                Ok(0) => {}
                Err(error) => {
                    tracing::debug!(error = error_chain(&error), "the processes that write were not found");
                    this.clear(&sessions, &live).await;
                }
            }
            // Commands that were ended report it within this time, with the disk limit as the reason. Those that still run
            // after it were not ended for that.
            live.ended_writers.fetch_add(1, Ordering::SeqCst);
            tokio::time::sleep(HEARD).await;
            live.within_disk();
            live.clearing.store(false, Ordering::SeqCst);
        });
    }

    /// Whether a layer takes less than it did, or nothing is known to be over a limit.
    async fn shrinks(&self, live: &RunningSandbox, over: Option<(LayerId, u64)>) -> bool {
        let Some((layer, then)) = over else { return true };
        let bounds = self.bounds(live).await.unwrap_or_default();
        let same = bounds.iter().find(|bound| bound.layer == layer);
        same.is_some_and(|bound| bound.used < then || !bound.is_over())
    }

    /// Ends the processes of a sandbox that is over its disk. If its agent does not do that the session is ended: a sandbox that
    /// keeps its agent from answering must not fill the disk of all.
    async fn clear(&self, sessions: &Weak<dyn EndsSessions>, live: &Arc<RunningSandbox>) {
        let ended = async {
            // What is started after this may be what cleans up: it waits until the others are gone.
            let _gate = tokio::time::timeout(Duration::from_secs(1), live.gate.write()).await;
            Ok::<_, Error>(live.guest().await?.quiesce(Duration::ZERO).await?)
        };
        let Err(error) = ended.await else { return };
        let sandbox = live.sandbox();
        tracing::error!(sandbox = %sandbox.name, error = error_chain(&error), "a sandbox is over its disk limit and its agent did not end its commands; its session is ended");
        let Some(sessions) = sessions.upgrade() else { return };
        if let Err(error) = sessions.end_uncontrolled(Arc::clone(live)).await {
            tracing::error!(sandbox = %sandbox.name, error = error_chain(&error), "the session of a sandbox over its disk limit was not ended");
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
