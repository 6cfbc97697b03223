//! Keeps the host's reserve free: holds back the writes of sandboxes that fill its disk.
//!
//! ```text
//! calm ──free space falls so fast, or is so little, that the reserve is next──> short
//!   ^                                                                            │ every look: of all that have grown by
//!   │                                                                            │ a mebibyte since, the one that has the most
//!   └──────────── free space stops falling, and there is more than the reserve ──┘
//! ```
//!
//! | a sandbox | is stopped by |
//! |---|---|
//! | on the host's kernel | ending the processes that write the most (`disk_limits`) |
//! | with a disk of its own | holding its writes back ([`OwnDisk::limit_writes`](crate::driver::OwnDisk::limit_writes)) |
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
use std::time::Duration;

use crate::driver::WriteLimit;
use crate::engine::Result;
use crate::engine::error::error_chain;
use crate::engine::integrity::DiskLimits;
use crate::engine::integrity::disk_limits::EndsSessions;
use crate::engine::running::live::RunningSandbox;
use crate::model::{LayerId, MountMode, Sandbox};
use crate::store::FreeSpace;

/// The host is short when the reserve would be used after this many looks.
const AHEAD: u64 = 6;
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
    last: Option<u64>,
}

/// What a look at the free space says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outlook {
    Calm,
    /// The reserve is about to be used, or is being used.
    Short,
}

impl Shortage {
    /// Takes note of what is free now.
    pub(super) fn notice(&mut self, space: FreeSpace) -> Outlook {
        let FreeSpace { usable, free, reserve } = space;
        let fell = self.last.replace(free).unwrap_or(free).saturating_sub(free);
        if reserve == 0 {
            return Outlook::Calm;
        }
        // At this speed it would be gone before long.
        if fell > 0 && usable <= fell.saturating_mul(AHEAD) {
            return Outlook::Short;
        }
        if usable > 0 {
            self.base = None;
        }
        Outlook::Calm
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

impl DiskLimits {
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
fn written_layers(sandbox: &Sandbox) -> Vec<LayerId> {
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

    use super::{GREW, Outlook, Shortage};
    use crate::model::LayerId;
    use crate::store::FreeSpace;

    const RESERVE: u64 = 256 << 20;

    fn space(usable: u64) -> FreeSpace {
        FreeSpace { usable, free: usable + RESERVE, reserve: RESERVE }
    }

    #[test]
    fn it_is_short_before_the_reserve_is_used_and_not_for_other_reasons() {
        let mut shortage = Shortage::default();
        assert_eq!(shortage.notice(space(4 << 30)), Outlook::Calm);
        assert_eq!(shortage.notice(space(3 << 30)), Outlook::Short, "a gigabyte at a time");
        let mut slow = Shortage::default();
        assert_eq!(slow.notice(space(64 << 20)), Outlook::Calm);
        assert_eq!(slow.notice(space(63 << 20)), Outlook::Calm, "a mebibyte at a time");
        assert_eq!(slow.notice(space(5 << 20)), Outlook::Short);
        // No sandbox writes: none is to blame.
        assert_eq!(slow.notice(space(0)), Outlook::Short);
        assert_eq!(slow.notice(space(0)), Outlook::Calm);
        // Without a reserve there is none to keep.
        let mut none = Shortage::default();
        none.notice(FreeSpace { usable: 9, free: 9, reserve: 0 });
        assert_eq!(none.notice(FreeSpace { usable: 0, free: 0, reserve: 0 }), Outlook::Calm);
    }

    #[test]
    fn who_writes_little_at_a_time_is_found_too() {
        let layer = LayerId::fresh();
        let at = |used: u64| vec![(layer.clone(), used)];
        let mut shortage = Shortage::default();
        let free = |free: u64| FreeSpace { usable: 0, free, reserve: RESERVE };
        shortage.notice(free(RESERVE));
        assert_eq!(shortage.notice(free(RESERVE - 1000)), Outlook::Short);
        assert!(!shortage.begin(None), "who wrote when is not known yet");
        shortage.begin_with(&HashMap::from([(layer.clone(), 10 << 20)]));
        let mut used = 10 << 20;
        for look in 0..20 {
            used += GREW / 10;
            // In between nothing is written for a moment.
            let _ = shortage.notice(free(RESERVE - 2000 - look / 2));
            assert!(shortage.begin(None));
        }
        assert!(shortage.grown(&at(used)) >= GREW);
        shortage.stopped(&at(used));
        assert_eq!(shortage.grown(&at(used)), 0);
        // It is over when there is room.
        shortage.notice(space(64 << 20));
        assert!(!shortage.begin(None));
    }
}
