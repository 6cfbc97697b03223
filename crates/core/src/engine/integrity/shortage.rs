//! Keeps the host's reserve free: holds back the writes of sandboxes that fill its disk.
//!
//! ```text
//! calm ──at its present rate, the fall of free space reaches the reserve within AHEAD──> short ──within NEXT──> critical
//!   ^                                                                                      │ every look, of all that have grown
//!   │                                                                                      │ by a mebibyte since: the one that
//!   └──────────────── free space stops falling, and there is more than the reserve ────────┘ has the most; if critical, all that
//!                                                                                            have half of that
//! ```
//!
//! | a sandbox | is stopped by |
//! |---|---|
//! | on the host's kernel | ending the processes that write the most; if it writes on, or it is critical, all its commands ([`Remedy`]) |
//! | with a disk of its own | holding its writes back ([`OwnDisk::limit_writes`](crate::driver::OwnDisk::limit_writes)) |
//!
//! *Nobody writes while the daemon looks.* A look walks over the files of all sandboxes, which takes
//! longer the more files they have. So the containers that have just grown are frozen before it and
//! thawed after it; one whose commands are all ended stays frozen until they are killed.
//!
//! *Nothing is lost by a hold.* The guest's writes wait in its hypervisor: none fails, and none is acknowledged that is not on the
//! disk. Commands that write or sync wait with them; the rest of the machine continues. They are
//! released, one machine after the other, when there is room. What a machine had in flight goes to
//! the disk all the same, so it may grow by [`IN_FLIGHT`]; one that grows by more does not obey,
//! and its session is ended.
//!
//! *A machine that is stopped may write*: what its kernel has in its cache is what the reserve is for. Until its processes are
//! ended it does so slowly.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use crate::driver::WriteLimit;
use crate::engine::Result;
use crate::engine::error::error_chain;
use crate::engine::integrity::DiskLimits;
use crate::engine::integrity::disk_limits::EndsSessions;
use crate::engine::running::freeze_guard::FrozenProcesses;
use crate::engine::running::live::RunningSandbox;
use crate::model::{LayerId, MachineKey, MountMode, Sandbox};
use crate::store::FreeSpace;

/// The host is short when the reserve would be used within this time. Until a sandbox that starts one writer after the other
/// has lost all its commands, this passes unfrozen: a tick until it is noticed, the time in which it is watched who
/// writes, and two ticks until it is seen that others write on. Together about a third of this.
const AHEAD: Duration = Duration::from_millis(500);
/// It is critical within this time, if so much is written in a second.
const NEXT: Duration = Duration::from_millis(120);
const FAST: u64 = 32 << 20;
/// After this time without any writes, half of the rate is forgotten.
const HALVED: Duration = Duration::from_millis(300);
/// How long it is remembered what was done about a sandbox.
const REMEMBERED: Duration = Duration::from_secs(60);
/// So often all commands of a sandbox are ended by the host, before its agent is asked, and its session ended if that does not answer.
const ALL_ENDED: u32 = 4;
/// How long the freezing of containers is waited for before a look.
const FROZEN_WITHIN: Duration = Duration::from_millis(200);
/// A sandbox that grew by less is not stopped for the host's sake.
pub(super) const GREW: u64 = 1 << 20;
/// By how much the disks of a machine may grow after its writes were held back.
const IN_FLIGHT: u64 = 128 << 20;
/// How long writes are held back at least. A machine that writes as soon as it may would be held
/// and released all the time.
const AT_LEAST: Duration = Duration::from_secs(5);
/// How much space beyond the reserve there must be before writes resume: half of the reserve, but
/// no more than this.
const ROOM_AGAIN: u64 = 128 << 20;
/// With less space than this besides the reserve, or than the reserve, the trash is emptied, and how long after that again.
const TRASH_GOES: u64 = 512 << 20;
const TRASH_AGAIN: Duration = Duration::from_secs(2);
/// How fast a machine may write whose processes are being ended.
const WHILE_ENDING: u64 = 16 << 20;
/// So often in a row a machine's writes may fail to be held back before its session is ended.
const REFUSALS: u32 = 3;

/// What is known of the free space of the host's disk, between looks.
#[derive(Debug, Default)]
pub(super) struct Shortage {
    /// What layers took when it became short, or when their sandbox was last stopped from writing; absent while it is not short.
    base: Option<HashMap<LayerId, u64>>,
    /// What was free a moment ago.
    last: Option<(Instant, u64)>,
    /// How much of it is used in a second: the most of late.
    rate: u64,
    /// How often, and when last, something was done about a sandbox.
    measures: HashMap<MachineKey, (u32, Instant)>,
}

/// What a look at the free space says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outlook {
    Calm,
    /// The reserve is about to be used, or is being used.
    Short,
    /// It is used before anything less than ending all commands could help.
    Critical,
}

/// What is done about a sandbox on the host's kernel that fills the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Remedy {
    /// The processes that write the most are ended.
    Writers,
    /// The host ends all its commands, while they are frozen.
    All,
    /// Its agent must end all its commands; its session is ended if it does not.
    Agent,
}

impl Shortage {
    /// Takes note of what is free now.
    pub(super) fn notice(&mut self, space: FreeSpace, now: Instant) -> Outlook {
        let FreeSpace { usable, free, reserve } = space;
        let (then, before) = self.last.replace((now, free)).unwrap_or((now, free));
        let took = now.saturating_duration_since(then).max(Duration::from_millis(1));
        let fell = before.saturating_sub(free);
        let halves = took.as_secs_f64() / HALVED.as_secs_f64();
        self.rate = within(fell, Duration::from_secs(1).div_duration_f64(took))
            .max(within(self.rate, 0.5_f64.powf(halves)));
        if reserve == 0 {
            return Outlook::Calm;
        }
        let is_soon = self.rate > 0 && usable <= within(self.rate, AHEAD.as_secs_f64());
        if is_soon && fell > 0 {
            let next = self.rate >= FAST && usable <= within(self.rate, NEXT.as_secs_f64());
            return if next { Outlook::Critical } else { Outlook::Short };
        }
        if usable > 0 && !is_soon {
            self.base = None;
        }
        Outlook::Calm
    }

    /// Which of those that have grown by this much are stopped from writing.
    pub(super) fn chosen(grown: &[u64], outlook: Outlook) -> Vec<usize> {
        let most = grown.iter().copied().max().unwrap_or(0);
        if most < GREW || outlook == Outlook::Calm {
            return Vec::new();
        }
        let least = match outlook {
            Outlook::Critical => GREW.max(most / 2),
            Outlook::Short | Outlook::Calm => most,
        };
        let enough = grown.iter().enumerate().filter(|(_, by)| **by >= least);
        let count = if outlook == Outlook::Critical { grown.len() } else { 1 };
        enough.map(|(index, _)| index).take(count).collect()
    }

    /// What is done about a sandbox that fills the disk. An agent that writes what is uploaded is ended by nothing of this, so
    /// nothing else is ended for it either.
    pub(super) fn measure(
        &mut self,
        key: &MachineKey,
        outlook: Outlook,
        uploads: bool,
        now: Instant,
    ) -> Remedy {
        if uploads {
            return Remedy::Writers;
        }
        let recent = |at: Instant| now.saturating_duration_since(at) < REMEMBERED;
        self.measures.retain(|_, (_, at)| recent(*at));
        let (times, at) = self.measures.entry(key.clone()).or_insert((0, now));
        (*times, *at) = (*times + 1, now);
        match *times {
            1 if outlook != Outlook::Critical => Remedy::Writers,
            times if times <= ALL_ENDED => Remedy::All,
            _ => Remedy::Agent,
        }
    }

    /// What layers took when the disk became short. At the first look after that nothing is known but what they took at the
    /// look before, which shows who fills the disk only if that was just now.
    pub(super) fn begin(&mut self, before: Option<&HashMap<LayerId, u64>>) -> bool {
        if self.base.is_none() {
            self.base = before.cloned();
        }
        self.base.is_some()
    }

    /// Begins with what was found now.
    pub(super) fn begin_with(&mut self, now: &HashMap<LayerId, u64>) {
        self.base.get_or_insert_with(|| now.clone());
    }

    /// By how much layers have grown since. One that was not there then is all growth.
    pub(super) fn grown(&self, layers: &[(LayerId, u64)]) -> u64 {
        let Some(base) = &self.base else { return 0 };
        let grown = |(layer, used): &(LayerId, u64)| {
            used.saturating_sub(base.get(layer).copied().unwrap_or(0))
        };
        layers.iter().map(grown).sum()
    }

    /// Their sandbox was stopped from writing: what counts is what it writes from now on.
    pub(super) fn stopped(&mut self, layers: &[(LayerId, u64)]) {
        if let Some(base) = &mut self.base {
            base.extend(layers.iter().cloned());
        }
    }
}

fn within(amount: u64, factor: f64) -> u64 {
    (amount as f64 * factor) as u64
}

/// Containers that are frozen for a look, by their machines.
pub(super) type HeldStill = HashMap<MachineKey, FrozenProcesses>;

impl DiskLimits {
    /// Freezes containers, so that they write nothing while they are looked at.
    pub(super) async fn hold_still(&self, suspects: Vec<Arc<RunningSandbox>>) -> HeldStill {
        let mut freezing = Vec::new();
        for live in suspects {
            let (sender, receiver) = oneshot::channel();
            let context = Arc::clone(&self.context);
            // Never given up half way: one that takes longer is thawed as soon as it is frozen.
            self.context.tasks.spawn(async move {
                match FrozenProcesses::freeze(&context, &live).await {
                    Ok(frozen) => drop(sender.send((live.key.clone(), frozen))),
                    Err(error) => {
                        tracing::debug!(machine = %live.key, error = error_chain(&error), "a container was not frozen for a look at what it writes");
                    }
                }
            });
            freezing.push(receiver);
        }
        let deadline = tokio::time::Instant::now() + FROZEN_WITHIN;
        let mut held = HeldStill::new();
        for receiver in freezing {
            if let Ok(Ok((key, frozen))) = tokio::time::timeout_at(deadline, receiver).await {
                held.insert(key, frozen);
            }
        }
        held
    }

    /// Has the trash emptied before any writes are held back: what was deleted must not cost those
    /// who did not delete it.
    pub(super) fn empty_trash_in_time(self: &Arc<Self>, space: FreeSpace) {
        let enough = space.reserve.min(TRASH_GOES);
        if space.usable >= enough || self.reclaiming.swap(true, Ordering::SeqCst) {
            return;
        }
        let this = Arc::clone(self);
        self.context.tasks.spawn_until_shutdown(async move {
            // There may be nothing in it.
            let _ = this.store.check_room(enough).await;
            tokio::time::sleep(TRASH_AGAIN).await;
            this.reclaiming.store(false, Ordering::SeqCst);
        });
    }

    /// What the disks of a machine of its own take, by their layers; nothing for others.
    pub(super) async fn own_disks(&self, live: &RunningSandbox) -> Result<Vec<(LayerId, u64)>> {
        if live.driver.disk().is_none() {
            return Ok(Vec::new());
        }
        let mut all = Vec::new();
        for layer in written_layers(&live.sandbox()) {
            all.push((layer.clone(), self.store.size_of_disk(&layer).await?));
        }
        Ok(all)
    }

    /// Holds back what a machine writes. Not waited for: its hypervisor may take its time.
    pub(super) fn hold_writes(
        self: &Arc<Self>,
        sessions: &Weak<dyn EndsSessions>,
        live: &Arc<RunningSandbox>,
        used: u64,
    ) {
        if !live.writes.begin(Some(used)) {
            return;
        }
        self.held.lock().push(Arc::downgrade(live));
        let (this, sessions, live) = (Arc::clone(self), Weak::clone(sessions), Arc::clone(live));
        self.context.tasks.spawn(async move {
            let changing = live.writes.changing.lock().await;
            let Some(disk) = live.driver.disk().filter(|_| !live.is_closed()) else { return };
            let sandbox = live.sandbox();
            match disk.limit_writes(&live.key, WriteLimit::Hold).await {
                Ok(()) => {
                    tracing::warn!(sandbox = %sandbox.name, "the host's disk is about to reach its reserve; the writes of a machine are held back until there is room");
                    this.context.events.writes_held(&sandbox);
                }
                Err(error) => {
                    // Of several disks some may be held, or all if only the answer was lost:
                    // nothing else would release them.
                    let _ = disk.limit_writes(&live.key, WriteLimit::None).await;
                    drop(changing);
                    let times = live.writes.failed();
                    tracing::error!(sandbox = %sandbox.name, times, error = error_chain(&error), "the writes of a machine could not be held back");
                    if times >= REFUSALS {
                        end(&sessions, &live).await;
                    }
                }
            }
        });
    }

    /// Ends the session of a machine that writes although its writes are held.
    pub(super) fn check_obeys(
        self: &Arc<Self>,
        sessions: &Weak<dyn EndsSessions>,
        live: &Arc<RunningSandbox>,
        used: u64,
    ) {
        if live.writes.held().is_none() {
            return;
        }
        let then = live.writes.measured(used);
        if used <= then.saturating_add(IN_FLIGHT) || live.clearing.swap(true, Ordering::SeqCst) {
            return;
        }
        tracing::error!(sandbox = %live.sandbox().name, used, "a machine writes although its writes are held back; its session is ended");
        let (sessions, live) = (Weak::clone(sessions), Arc::clone(live));
        self.context.tasks.spawn(async move { end(&sessions, &live).await });
    }

    /// Notes that an earlier daemon held the writes of a machine back.
    pub(in crate::engine) fn found_running(&self, live: &Arc<RunningSandbox>) {
        let held = live.driver.disk().is_some_and(|disk| disk.holds_writes(&live.key));
        if held && live.writes.begin(None) {
            self.held.lock().push(Arc::downgrade(live));
        }
    }

    /// Lets a machine write again, if there is room: the one that waits longest, one at a time.
    pub(super) fn let_one_write(self: &Arc<Self>, space: FreeSpace) {
        let live = {
            let mut held = self.held.lock();
            held.retain(|live| {
                let live = live.upgrade();
                live.is_some_and(|live| !live.is_closed() && live.writes.held().is_some())
            });
            if space.usable <= (space.reserve / 2).min(ROOM_AGAIN) {
                return;
            }
            let waits = |live: &Arc<RunningSandbox>| {
                live.writes.held().is_some_and(|held| held.begun.elapsed() >= AT_LEAST)
            };
            let Some(live) = held.iter().filter_map(Weak::upgrade).find(waits) else { return };
            let this = Arc::downgrade(&live);
            held.retain(|one| !one.ptr_eq(&this));
            live
        };
        let this = Arc::clone(self);
        self.context.tasks.spawn(async move {
            match this.limit_writes(&live, WriteLimit::None).await {
                Ok(()) => {
                    let sandbox = live.sandbox();
                    tracing::info!(sandbox = %sandbox.name, "there is room on the host's disk again; a machine may write");
                    this.context.events.writes_released(&sandbox);
                }
                // It is tried again.
                Err(_) => this.held.lock().push(Arc::downgrade(&live)),
            }
        });
    }

    /// Lets a machine that is being stopped write what it has, slowly as long as its processes may write more.
    pub(in crate::engine) async fn drain_writes(&self, live: &RunningSandbox, processes: bool) {
        if live.writes.held().is_none() {
            return;
        }
        let limit = if processes { WriteLimit::Slow(WHILE_ENDING) } else { WriteLimit::None };
        // `limit_writes` logs the error; what the machine has not written is lost if it cannot be
        // reached, as with any machine that is killed.
        let _ = self.limit_writes(live, limit).await;
    }

    async fn limit_writes(&self, live: &RunningSandbox, limit: WriteLimit) -> Result<()> {
        let _changing = live.writes.changing.lock().await;
        if let Some(disk) = live.driver.disk()
            && let Err(error) = disk.limit_writes(&live.key, limit).await
        {
            tracing::error!(sandbox = %live.sandbox().name, error = error_chain(&error), "a machine was not told that it may write again");
            return Err(error.into());
        }
        if limit == WriteLimit::None {
            live.writes.end();
        }
        Ok(())
    }
}

/// The layers that a sandbox writes to.
pub(super) fn written_layers(sandbox: &Sandbox) -> Vec<LayerId> {
    let drives = sandbox.mounted().iter().filter(|one| one.mode == MountMode::ReadWrite);
    let drives = drives.map(|mounted| mounted.layer.clone());
    sandbox.open_layer().cloned().into_iter().chain(drives).collect()
}

async fn end(sessions: &Weak<dyn EndsSessions>, live: &Arc<RunningSandbox>) {
    let Some(sessions) = sessions.upgrade() else { return };
    if let Err(error) = sessions.end_uncontrolled(Arc::clone(live)).await {
        tracing::error!(sandbox = %live.sandbox().name, error = error_chain(&error), "the session of a machine that fills the host's disk was not ended");
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::time::{Duration, Instant};

    use super::{GREW, Outlook, Remedy, Shortage};
    use crate::model::{LayerId, MachineKey};
    use crate::store::FreeSpace;

    const RESERVE: u64 = 256 << 20;
    const TICK: Duration = Duration::from_millis(50);

    fn space(usable: u64) -> FreeSpace {
        FreeSpace { usable, free: usable + RESERVE, reserve: RESERVE }
    }

    #[test]
    fn it_is_short_before_the_reserve_is_used_and_not_for_other_reasons() {
        let begin = Instant::now();
        let mut shortage = Shortage::default();
        assert_eq!(shortage.notice(space(4 << 30), begin), Outlook::Calm);
        let gigabyte = shortage.notice(space(3 << 30), begin + 5 * TICK);
        assert_eq!(gigabyte, Outlook::Calm, "4 GiB/s, and 3 GiB are left");
        assert_eq!(shortage.notice(space(2 << 30), begin + 10 * TICK), Outlook::Short);
        let mut slow = Shortage::default();
        assert_eq!(slow.notice(space(64 << 20), begin), Outlook::Calm);
        let mebibyte = slow.notice(space(63 << 20), begin + TICK);
        assert_eq!(mebibyte, Outlook::Calm, "20 MiB/s");
        assert_eq!(slow.notice(space(9 << 20), begin + 20 * TICK), Outlook::Short);
        assert_eq!(slow.notice(space(0), begin + 21 * TICK), Outlook::Critical);
        // No sandbox writes: none is to blame.
        assert_eq!(slow.notice(space(0), begin + 22 * TICK), Outlook::Calm);
        // A little more is no emergency.
        assert_eq!(slow.notice(space(0), begin + 200 * TICK), Outlook::Calm);
        let little = FreeSpace { usable: 0, free: RESERVE - 4096, reserve: RESERVE };
        assert_eq!(slow.notice(little, begin + 201 * TICK), Outlook::Short);
        // Without a reserve there is none to keep.
        let mut none = Shortage::default();
        none.notice(FreeSpace { usable: 9, free: 9, reserve: 0 }, begin);
        let all = FreeSpace { usable: 0, free: 0, reserve: 0 };
        assert_eq!(none.notice(all, begin + TICK), Outlook::Calm);
    }

    #[test]
    fn who_writes_little_at_a_time_is_found_too() {
        let layer = LayerId::fresh();
        let mut now = Instant::now();
        let at = |used: u64| vec![(layer.clone(), used)];
        let mut shortage = Shortage::default();
        let free = |free: u64| FreeSpace { usable: 0, free, reserve: RESERVE };
        shortage.notice(free(RESERVE), now);
        assert_eq!(shortage.notice(free(RESERVE - 4000), now + TICK), Outlook::Short);
        assert!(!shortage.begin(None), "who wrote when is not known yet");
        shortage.begin_with(&HashMap::from([(layer.clone(), 10 << 20)]));
        let mut used = 10 << 20;
        for look in 2..22 {
            used += GREW / 10;
            // In between nothing is written for a moment.
            now += TICK;
            let _ = shortage.notice(free(RESERVE - 5000 - look / 2), now);
            assert!(shortage.begin(None));
        }
        assert!(shortage.grown(&at(used)) >= GREW);
        shortage.stopped(&at(used));
        assert_eq!(shortage.grown(&at(used)), 0);
        // It is over when there is room.
        shortage.notice(space(64 << 20), now + 20 * TICK);
        assert!(!shortage.begin(None));
    }

    #[test]
    fn all_commands_are_ended_if_it_is_critical_or_ending_writers_did_not_help() {
        let (mut shortage, now) = (Shortage::default(), Instant::now());
        let key = |text: &str| MachineKey::parse(text).unwrap();
        let mut measure = |name: &str, outlook, after: u64| {
            shortage.measure(&key(name), outlook, false, now + Duration::from_secs(after))
        };
        assert_eq!(measure("a", Outlook::Short, 0), Remedy::Writers);
        assert_eq!(measure("b", Outlook::Critical, 0), Remedy::All);
        // It writes a little, sleeps, and writes on.
        assert_eq!(measure("a", Outlook::Short, 40), Remedy::All);
        assert_eq!(measure("a", Outlook::Short, 41), Remedy::All);
        assert_eq!(measure("a", Outlook::Short, 42), Remedy::All);
        assert_eq!(measure("a", Outlook::Short, 43), Remedy::Agent);
        assert_eq!(measure("a", Outlook::Short, 200), Remedy::Writers, "long ago");
        let uploads = shortage.measure(&key("b"), Outlook::Critical, true, now);
        assert_eq!(uploads, Remedy::Writers);
    }

    #[test]
    fn those_that_have_grown_the_most_are_chosen() {
        let chosen = |grown: &[u64], outlook| {
            Shortage::chosen(&grown.iter().map(|by| by << 20).collect::<Vec<_>>(), outlook)
        };
        assert_eq!(chosen(&[3, 9, 5, 9], Outlook::Short), [1]);
        assert_eq!(chosen(&[3, 9, 5, 4], Outlook::Critical), [1, 2]);
        assert!(chosen(&[0, 0], Outlook::Critical).is_empty());
        assert!(chosen(&[9], Outlook::Calm).is_empty());
    }

    /// A disk and a sandbox that starts one writer after the other, as the watch sees them.
    struct Filling {
        usable: i64,
        used: u64,
        /// Bytes in a millisecond.
        rate: u64,
        now: Instant,
        is_over: bool,
    }

    impl Filling {
        fn pass(&mut self, span: Duration) {
            self.now += span;
            if !self.is_over {
                let wrote = self.rate * u64::try_from(span.as_millis()).unwrap();
                self.used += wrote;
                self.usable -= i64::try_from(wrote).unwrap();
            }
        }

        fn notice(&self, shortage: &mut Shortage) -> Outlook {
            let usable = u64::try_from(self.usable).unwrap_or(0);
            let free = u64::try_from(self.usable + (RESERVE as i64)).unwrap_or(0);
            shortage.notice(FreeSpace { usable, free, reserve: RESERVE }, self.now)
        }
    }

    /// Ending one writer does not help: at once there is another. The line holds at any rate, if everything takes as
    /// long as on a busy host.
    #[test]
    fn a_loop_of_short_writers_does_not_reach_the_reserve() {
        let (layer, key) = (LayerId::fresh(), MachineKey::parse("loop").unwrap());
        for rate in [20_u64, 300, 1000, 3000, 6000] {
            let mut shortage = Shortage::default();
            let mut disk = Filling {
                usable: 8 << 30,
                used: 0,
                rate: rate * 1000,
                now: Instant::now(),
                is_over: false,
            };
            let mut before = HashMap::new();
            let mut settles = false;
            while !disk.is_over && disk.usable > 0 {
                let slow = disk.usable >= 2 << 30;
                disk.pass(Duration::from_millis(if slow { 250 } else { 60 }));
                let outlook = disk.notice(&mut shortage);
                let layers = vec![(layer.clone(), disk.used)];
                if outlook != Outlook::Calm {
                    // Freezing takes this long; while the daemon looks nothing is written.
                    disk.pass(Duration::from_millis(15));
                    assert!(shortage.begin(Some(&before)));
                    let layers = vec![(layer.clone(), disk.used)];
                    if std::mem::take(&mut settles) {
                        shortage.stopped(&layers);
                    }
                    let by = shortage.grown(&layers);
                    if !Shortage::chosen(&[by], outlook).is_empty() {
                        shortage.stopped(&layers);
                        match shortage.measure(&key, outlook, false, disk.now) {
                            Remedy::Writers => {
                                disk.pass(Duration::from_millis(60));
                                settles = true;
                            }
                            Remedy::All | Remedy::Agent => disk.is_over = true,
                        }
                    }
                }
                before = layers.into_iter().collect();
            }
            assert!(disk.is_over && disk.usable >= 0, "{rate} MB/s: {} are left", disk.usable);
        }
    }
}
