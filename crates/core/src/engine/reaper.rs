//! What goes by itself: idle and overlong sessions, expired sandboxes and snapshots, sandboxes over
//! their disk; and what is done now and then: writing dirty data back, collecting, compacting.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::boot::chain_of;
use super::health::Health;
use super::lifecycle::Phase;
use super::live::{Live, RefusedPause};
use super::slot::lock;
use super::uplink::COUNTED_EVERY;
use super::{Delete, Error, Inner, Result};
use crate::db::{Filter, Page};
use crate::model::{Ending, LayerId, MountMode, OnIdle, SessionEnd, SnapshotKind, now};
use crate::store::StoreError;

/// How often a pause may fail for the machine's own sake before it is stopped instead.
const GIVE_UP: u32 = 3;
/// How long after a pause that was refused it is tried again; twice as long every time.
const AGAIN: Duration = Duration::from_secs(30);
const AGAIN_AT_LATEST: Duration = Duration::from_secs(3600);

/// How often it is tried to write down what the disk had no room for.
const RECORD_AGAIN: Duration = Duration::from_secs(2);

/// Starts the engine's own work, which ends with the engine.
pub(super) fn run(inner: &Arc<Inner>) {
    tokio::spawn(every(Arc::downgrade(inner), inner.settings.reap, |inner| async move {
        inner.reap().await;
    }));
    tokio::spawn(every(Arc::downgrade(inner), inner.settings.write_back, |inner| async move {
        inner.write_back().await;
    }));
    Health::watch(&inner.health, inner.store.data_dir());
    let store = inner.store.clone();
    tokio::spawn(async move {
        if let Err(error) = store.tidy_documents().await {
            tracing::warn!(
                error = chain_of(&error),
                "older versions of documents are left beside them"
            );
        }
    });
    tokio::spawn(every(Arc::downgrade(inner), inner.settings.housekeeping, |inner| async move {
        if let Err(error) = inner.housekeeping().await {
            tracing::warn!(error = chain_of(&error), "housekeeping broke off");
        }
    }));
    tokio::spawn(every(Arc::downgrade(inner), COUNTED_EVERY, |inner| async move {
        inner.count_traffic().await;
    }));
    tokio::spawn(every(Arc::downgrade(inner), RECORD_AGAIN, |inner| async move {
        inner.record_what_is_left().await;
    }));
    tokio::spawn(watch_disk(Arc::downgrade(inner)));
}

async fn every<F, W>(inner: Weak<Inner>, period: Duration, work: W)
where
    F: Future<Output = ()>,
    W: Fn(Arc<Inner>) -> F,
{
    let Some(mut shutdown) = inner.upgrade().map(|inner| inner.shutdown.subscribe()) else {
        return;
    };
    loop {
        tokio::select! {
            () = tokio::time::sleep(period) => {}
            _ = shutdown.wait_for(|over| *over) => return,
        }
        let Some(inner) = inner.upgrade() else { return };
        work(inner).await;
    }
}

impl Inner {
    async fn reap(self: &Arc<Self>) {
        self.tidy_slots();
        for live in self.all_live() {
            let Some(end) = self.verdict(&live) else { continue };
            let inner = Arc::clone(self);
            tokio::spawn(async move {
                let name = live.sandbox().name.clone();
                match inner.put_to_sleep(live, end).await {
                    // Somebody came in the meantime.
                    Ok(()) | Err(Error::SessionOver) => {}
                    Err(error) => {
                        tracing::warn!(sandbox = %name, error = chain_of(&error), "was not put to sleep");
                    }
                }
            });
        }
    }

    async fn put_to_sleep(self: &Arc<Self>, live: Arc<Live>, end: SessionEnd) -> Result<()> {
        let id = live.sandbox().id.clone();
        self.turn(id.clone(), move |inner, slot| async move {
            let same = slot.live().is_some_and(|now| Arc::ptr_eq(&now, &live));
            // Asked again in its turn: somebody may have come in the meantime.
            if !same || inner.verdict(&live) != Some(end) {
                return Ok(());
            }
            let mut sandbox = (*live.sandbox()).clone();
            if end == SessionEnd::Idle && inner.on_idle(&sandbox) == OnIdle::Pause {
                return match inner.put_away(&slot, &mut sandbox, end).await {
                    Ok(_) => Ok(()),
                    Err(Error::SessionOver) => Ok(()),
                    // It will not be otherwise next time: then its files at least are kept, and the host has its memory back.
                    Err(error @ (Error::Driver(_) | Error::MemoryTooDeep(_)))
                        if live.pause_refused(&error) >= GIVE_UP =>
                    {
                        tracing::error!(sandbox = %sandbox.name, error = chain_of(&error), "cannot be paused; it is stopped");
                        let ending = Ending::by_itself(SnapshotKind::Stop, end);
                        inner.settle(&slot, &mut sandbox, ending).await.map(drop)
                    }
                    Err(error) => {
                        live.pause_refused(&error);
                        Err(error)
                    }
                };
            }
            let ending = Ending::by_itself(SnapshotKind::Stop, end);
            if let Err(error) = inner.settle(&slot, &mut sandbox, ending).await {
                if matches!(error, Error::Store(StoreError::InDoubt { .. })) {
                    // It runs on, and is looked at again later.
                    live.pause_refused(&error);
                }
                return Err(error);
            }
            inner.after_stop(&sandbox);
            Ok(())
        })
        .await
    }

    async fn housekeeping(self: &Arc<Self>) -> Result<()> {
        let broken_off = Filter { phases: vec![Phase::Deleted], ..Filter::default() };
        let mut over = self.db.sandboxes(None, &broken_off, &Page::all()).await?.items;
        let time = self.expiry_time();
        if let Some(time) = time {
            over.extend(self.db.expired(time).await?);
        }
        for sandbox in over {
            // One that is being worked on is looked at next time: no other waits for it.
            if self.live(&sandbox.id).is_some() || self.slot(&sandbox.id).is_busy() {
                continue;
            }
            let name = sandbox.name.clone();
            let erased = self.turn(sandbox.id.clone(), move |inner, slot| async move {
                // Asked again in its turn: it may have been used in the meantime.
                let Some(sandbox) = inner.db.sandbox_by_id(&sandbox.id).await? else { return Ok(()) };
                // What a broken session left is never thrown away for being old.
                let expired = time.is_some_and(|time| sandbox.expires_at() <= time)
                    && sandbox.open_layer.is_none();
                let deleted = sandbox.phase == Phase::Deleted;
                if slot.live().is_none() && (expired || deleted) {
                    if deleted {
                        tracing::info!(sandbox = %sandbox.name, "was deleted before, and not to the end");
                    } else {
                        tracing::warn!(sandbox = %sandbox.name, id = %sandbox.id, used_at = %sandbox.used_at,
                            "expired; it is moved to the trash and can be restored from there");
                    }
                    let wish = Delete { expired: !deleted, ..Delete::default() };
                    inner.erase(&slot, sandbox, wish).await?;
                }
                Ok(())
            });
            // What follows may free the room that this one wants for.
            if let Err(error) = erased.await {
                tracing::error!(sandbox = %name, error = chain_of(&error), "could not be erased");
            }
        }
        if let Err(error) = self.retain_all().await {
            tracing::error!(error = chain_of(&error), "snapshots that have expired are left");
        }
        if let Err(error) = self.retain_commands_by_and_by().await {
            tracing::warn!(error = chain_of(&error), "old commands are left");
        }
        self.free_stale_drives().await;
        self.review_doubt().await;
        self.store.forget_sync_failures().await?;
        self.forget_secrets().await?;
        let day = jiff::SignedDuration::from_hours(24);
        if let Some(before) = time.and_then(|time| time.checked_sub(day).ok()) {
            self.db.forget_answers(before).await?;
        }
        self.collect().await
    }
}

impl Inner {
    /// Whether a session is to be ended, and why.
    fn verdict(&self, live: &Arc<Live>) -> Option<SessionEnd> {
        if live.session().deadline.is_some_and(|at| at <= now()) {
            return Some(SessionEnd::Timeout);
        }
        let sandbox = live.sandbox();
        let idle = sandbox.config.idle_timeout?;
        let refused = lock(&live.refused).as_ref().is_some_and(|it| Instant::now() < it.not_before);
        let quiet = live.quiet_for().is_some_and(|quiet| quiet >= idle.duration());
        (quiet && !refused && self.on_idle(&sandbox) != OnIdle::Run).then_some(SessionEnd::Idle)
    }
}

impl Live {
    /// Remembers that it could not be paused, for `why`, and not to be tried again at once.
    fn pause_refused(&self, error: &Error) -> u32 {
        let mut refused = lock(&self.refused);
        let times = refused.as_ref().map_or(0, |before| before.times).saturating_add(1);
        let pause = AGAIN.saturating_mul(2u32.saturating_pow(times - 1)).min(AGAIN_AT_LATEST);
        *refused = Some(RefusedPause {
            at: now(),
            not_before: Instant::now() + pause,
            times,
            reason: chain_of(error),
        });
        times
    }
}

/// Holds sandboxes to their disk, and drives to their size.
///
/// The kernel bounds the size of each file (the driver sets it); the sum is looked at here, often
/// while the disk fills quickly and seldom otherwise. A sandbox that is over its limit and still
/// growing loses its commands; what it wrote stays, so that somebody can look and clean up. A drive's sum
/// is that of its layers and what the session adds.
async fn watch_disk(inner: Weak<Inner>) {
    let mut before: HashMap<LayerId, u64> = HashMap::new();
    let mut free_then = u64::MAX;
    let mut looked = Instant::now();
    let Some(mut shutdown) = inner.upgrade().map(|inner| inner.shutdown.subscribe()) else {
        return;
    };
    loop {
        tokio::select! {
            () = tokio::time::sleep(Duration::from_millis(250)) => {}
            _ = shutdown.wait_for(|over| *over) => return,
        }
        let Some(inner) = inner.upgrade() else { return };
        let Ok((free, _)) = inner.store.free_space() else { continue };
        let fills = free.saturating_add(32 << 20) < free_then;
        if !fills && looked.elapsed() < Duration::from_secs(60) {
            continue;
        }
        (free_then, looked) = (free, Instant::now());
        let mut now = HashMap::new();
        for live in inner.all_live() {
            match inner.hold_to_disk(&live, &before).await {
                Ok(used) => now.extend(used),
                Err(error) => tracing::debug!(
                    error = chain_of(&error),
                    "could not tell how much a session wrote"
                ),
            }
        }
        before = now;
    }
}

impl Inner {
    async fn hold_to_disk(
        self: &Arc<Self>,
        live: &Arc<Live>,
        before: &HashMap<LayerId, u64>,
    ) -> Result<Vec<(LayerId, u64)>> {
        let sandbox = live.sandbox();
        let mut bounds = Vec::new();
        // The disk of a machine of its own is as large as it may be; its kernel holds it to that.
        let root = sandbox.open_layer.clone().filter(|_| live.driver.keeper().is_none());
        bounds.extend(root.map(|open| (open, 0, sandbox.config.resources.disk)));
        for mounted in sandbox.mounted.iter().filter(|one| one.mode == MountMode::ReadWrite) {
            let Some(drive) = self.db.drive_by_id(&mounted.drive).await? else { continue };
            let held = self.books().bytes_of(&drive.layers);
            bounds.push((mounted.layer.clone(), held, drive.max_size));
        }
        let mut written = Vec::new();
        let mut over = None;
        for (open, held, limit) in bounds {
            let used = held + self.store.usage_of_open(&open).await?;
            if used > limit.0 && before.get(&open).is_none_or(|before| used > *before) {
                tracing::warn!(sandbox = %sandbox.name, used, limit = limit.0, "over its disk, or a drive's, and growing; its commands are ended");
                over = Some((limit.0, used));
            }
            written.push((open, used));
        }
        if let Some((limit, used)) = over
            && !live.clearing.swap(true, Ordering::SeqCst)
        {
            live.over_disk(limit, used);
            // Not waited for: its agent may not answer, and the next sandbox is to be looked at.
            let (inner, live) = (Arc::clone(self), Arc::clone(live));
            tokio::spawn(async move {
                inner.clear(&live).await;
                live.clearing.store(false, Ordering::SeqCst);
            });
        }
        Ok(written)
    }

    /// Ends the processes of a sandbox that is over its disk. If its agent does not do that the session is ended: a sandbox that
    /// keeps its agent from answering must not fill the disk of all.
    async fn clear(self: &Arc<Self>, live: &Arc<Live>) {
        let ended = async {
            // What is started after this may be what cleans up: it waits until the others are gone.
            let _gate = tokio::time::timeout(Duration::from_secs(1), live.gate.write()).await;
            Ok::<_, Error>(live.guest().await?.quiesce(Duration::ZERO).await?)
        };
        let Err(error) = ended.await else { return };
        let sandbox = live.sandbox();
        tracing::error!(sandbox = %sandbox.name, error = chain_of(&error), "is over its disk, and its agent did not end its commands; its session is ended");
        let dead = Arc::clone(live);
        let ended = self.turn(sandbox.id.clone(), move |inner, slot| inner.bury(slot, dead)).await;
        if let Err(error) = ended {
            tracing::error!(sandbox = %sandbox.name, error = chain_of(&error), "its session is not ended yet");
        }
    }
}
