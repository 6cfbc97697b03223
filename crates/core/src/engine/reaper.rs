//! What goes by itself: idle and overlong sessions, expired sandboxes and snapshots; and what is done now and
//! then: writing dirty data back, collecting, compacting. Sandboxes are held to their disk in `disk`.

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
use crate::model::{Ending, OnIdle, SessionEnd, SnapshotKind, now};
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
    tokio::spawn(super::disk::watch(Arc::downgrade(inner)));
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
                    && sandbox.open_layer().is_none();
                let deleted = sandbox.phase() == Phase::Deleted;
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
