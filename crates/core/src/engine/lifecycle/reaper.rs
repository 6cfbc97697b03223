//! Ends idle and overlong sessions, removes expired sandboxes and snapshots, and does the periodic
//! work: writing dirty data back, collecting, compacting. Disk limits are in
//! `integrity/disk_limits.rs`.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use async_trait::async_trait;

use crate::db::{Filter, Page};
use crate::engine::error::error_chain;
use crate::engine::integrity::disk_limits;
use crate::engine::integrity::disk_limits::EndsSessions;
use crate::engine::integrity::disk_probe::Health;
use crate::engine::lifecycle::Lifecycle;
use crate::engine::network::session_network::COUNTED_EVERY;
use crate::engine::running::live::{RefusedPause, RunningSandbox};
use crate::engine::{Delete, Error, Result};
use crate::model::lifecycle::Phase;
use crate::model::{AuditRecord, Ending, OnIdle, Sandbox, SessionEnd, SnapshotKind, now};
use crate::store::StoreError;

/// How often a pause may fail for the machine's own sake before it is stopped instead.
const GIVE_UP: u32 = 3;
/// How long after a pause that was refused it is tried again; twice as long every time.
const AGAIN: Duration = Duration::from_secs(30);
const AGAIN_AT_LATEST: Duration = Duration::from_secs(3600);
/// How often idle sandboxes are looked for whose layers are to be measured.
const MEASURED_EVERY: Duration = Duration::from_millis(100);
/// How often it is tried to write down what the disk had no room for.
const RECORD_AGAIN: Duration = Duration::from_secs(2);

/// Starts the engine's own work, which ends with the engine.
pub(in crate::engine) fn run(this: &Arc<Lifecycle>) {
    let tasks = &this.context.tasks;
    tasks.spawn(every(Arc::downgrade(this), this.context.settings.reap, |this| async move {
        this.reap().await;
    }));
    tasks.spawn(every(Arc::downgrade(this), this.context.settings.write_back, |this| async move {
        this.integrity.syncs.write_back().await;
    }));
    Health::watch(&this.integrity.health, this.store.data_dir());
    let store = this.store.clone();
    tasks.spawn(async move {
        if let Err(error) = store.tidy_documents().await {
            tracing::warn!(
                error = error_chain(&error),
                "replaced versions of manifests were not removed"
            );
        }
    });
    tasks.spawn(every(
        Arc::downgrade(this),
        this.context.settings.housekeeping,
        |this| async move {
            if let Err(error) = this.housekeeping().await {
                tracing::warn!(error = error_chain(&error), "housekeeping failed");
            }
        },
    ));
    tasks.spawn(every(Arc::downgrade(this), COUNTED_EVERY, |this| async move {
        this.network.count_traffic().await;
    }));
    tasks.spawn(every(Arc::downgrade(this), MEASURED_EVERY, |this| async move {
        this.storage.usage.measure_idle().await;
    }));
    tasks.spawn(every(Arc::downgrade(this), RECORD_AGAIN, |this| async move {
        this.record_pending_outcomes().await;
    }));
    let sessions: Arc<dyn EndsSessions> = Arc::<Lifecycle>::clone(this);
    tasks.spawn(disk_limits::watch(
        Arc::downgrade(&this.integrity.limits),
        Arc::downgrade(&sessions),
    ));
}

async fn every<F, W>(this: Weak<Lifecycle>, period: Duration, work: W)
where
    F: Future<Output = ()>,
    W: Fn(Arc<Lifecycle>) -> F,
{
    let Some(shutdown) = this.upgrade().map(|this| this.context.tasks.shutdown()) else {
        return;
    };
    loop {
        tokio::select! {
            () = tokio::time::sleep(period) => {}
            () = shutdown.cancelled() => return,
        }
        let Some(this) = this.upgrade() else { return };
        work(this).await;
    }
}

#[async_trait]
impl EndsSessions for Lifecycle {
    async fn end_uncontrolled(self: Arc<Self>, live: Arc<RunningSandbox>) -> Result<()> {
        let id = live.sandbox().id.clone();
        self.turn(id, move |this, slot| this.end_broken_session(slot, live)).await
    }
}

impl Lifecycle {
    async fn reap(self: &Arc<Self>) {
        self.turns.tidy_slots();
        for live in self.turns.all_live() {
            let Some(end) = self.verdict(&live) else { continue };
            let this = Arc::clone(self);
            self.context.tasks.spawn(async move {
                let name = live.sandbox().name.clone();
                match this.put_to_sleep(live, end).await {
                    // Somebody came in the meantime.
                    Ok(()) | Err(Error::SessionOver) => {}
                    Err(error) => {
                        tracing::warn!(sandbox = %name, error = error_chain(&error), "an idle sandbox was not stopped or paused");
                    }
                }
            });
        }
    }

    async fn put_to_sleep(
        self: &Arc<Self>,
        live: Arc<RunningSandbox>,
        end: SessionEnd,
    ) -> Result<()> {
        let id = live.sandbox().id.clone();
        self.turn(id.clone(), move |this, slot| async move {
            let same = slot.live().is_some_and(|now| Arc::ptr_eq(&now, &live));
            // Asked again in its turn: somebody may have come in the meantime.
            if !same || this.verdict(&live) != Some(end) {
                return Ok(());
            }
            let mut sandbox = (*live.sandbox()).clone();
            if end == SessionEnd::Idle && this.on_idle(&sandbox) == OnIdle::Pause {
                return match this.pause_session(&slot, &mut sandbox, end).await {
                    Ok(_) => {
                        this.note_ended("sandbox.pause", &sandbox, end);
                        Ok(())
                    }
                    Err(Error::SessionOver) => Ok(()),
                    // It will not be otherwise next time: then its files at least are kept, and the host has its memory back.
                    Err(error @ (Error::Driver(_) | Error::MemoryTooDeep(_)))
                        if live.pause_refused(&error) >= GIVE_UP =>
                    {
                        tracing::error!(sandbox = %sandbox.name, error = error_chain(&error), "an idle sandbox cannot be paused; it is stopped");
                        let ending = Ending::by_itself(SnapshotKind::Stop, end);
                        this.end_session(&slot, &mut sandbox, ending).await.map(drop)?;
                        this.note_ended("sandbox.stop", &sandbox, end);
                        Ok(())
                    }
                    Err(error) => {
                        live.pause_refused(&error);
                        Err(error)
                    }
                };
            }
            let ending = Ending::by_itself(SnapshotKind::Stop, end);
            if let Err(error) = this.end_session(&slot, &mut sandbox, ending).await {
                if matches!(error, Error::Store(StoreError::InDoubt { .. })) {
                    // It runs on, and is looked at again later.
                    live.pause_refused(&error);
                }
                return Err(error);
            }
            this.note_ended("sandbox.stop", &sandbox, end);
            this.storage.compaction.after_stop(&sandbox);
            Ok(())
        })
        .await
    }

    async fn housekeeping(self: &Arc<Self>) -> Result<()> {
        let broken_off = Filter { phases: vec![Phase::Deleted], ..Filter::default() };
        let mut over = self.db.sandboxes(None, &broken_off, &Page::all()).await?.items;
        let time = self.context.expiry_time();
        if let Some(time) = time {
            over.extend(self.db.expired(time).await?);
        }
        for sandbox in over {
            // One that is being worked on is looked at next time: no other waits for it.
            if self.turns.live(&sandbox.id).is_some() || self.turns.slot(&sandbox.id).is_busy() {
                continue;
            }
            let name = sandbox.name.clone();
            let erased = self.turn(sandbox.id.clone(), move |this, slot| async move {
                // Asked again in its turn: it may have been used in the meantime.
                let Some(sandbox) = this.db.sandbox_by_id(&sandbox.id).await? else { return Ok(()) };
                // What a broken session left is never thrown away for being old.
                let expired = time.is_some_and(|time| sandbox.expires_at() <= time)
                    && sandbox.open_layer().is_none();
                let deleted = sandbox.phase() == Phase::Deleted;
                if slot.live().is_none() && (expired || deleted) {
                    if deleted {
                        tracing::info!(sandbox = %sandbox.name, "an interrupted delete is continued");
                    } else {
                        tracing::warn!(sandbox = %sandbox.name, id = %sandbox.id, used_at = %sandbox.used_at,
                            "a sandbox expired; it is moved to the trash and can be restored from there");
                    }
                    let wish = Delete { expired: !deleted, ..Delete::default() };
                    let target = Some(format!("sandbox/{}", sandbox.name));
                    let (project, id) = (sandbox.project.clone(), sandbox.id.clone());
                    this.delete_sandbox(&slot, sandbox, wish).await?;
                    if !deleted {
                        let record = AuditRecord::by_system(Some(&project), "sandbox.expire", target);
                        this.context.audit.note(record.with("id", id.as_str()));
                    }
                }
                Ok(())
            });
            // What follows may free the room that this one wants for.
            if let Err(error) = erased.await {
                tracing::error!(sandbox = %name, error = error_chain(&error), "a sandbox was not deleted");
            }
        }
        if let Err(error) = self.storage.snapshots.retain_all().await {
            tracing::error!(error = error_chain(&error), "expired snapshots were not deleted");
        }
        if let Err(error) = self.sessions.retain_some_commands().await {
            tracing::warn!(error = error_chain(&error), "old commands were not removed");
        }
        self.storage.drives.free_stale_drives().await;
        self.integrity.syncs.review_doubt().await;
        self.store.forget_sync_failures().await?;
        self.secrets.forget_secrets().await?;
        let day = jiff::SignedDuration::from_hours(24);
        if let Some(before) = time.and_then(|time| time.checked_sub(day).ok()) {
            self.db.forget_answers(before).await?;
        }
        self.storage.collector.collect().await
    }

    /// Records that a session was ended because of its settings.
    fn note_ended(&self, action: &str, sandbox: &Sandbox, end: SessionEnd) {
        let target = Some(format!("sandbox/{}", sandbox.name));
        let why = match end {
            SessionEnd::Timeout => "timeout",
            _ => "idle",
        };
        let record = AuditRecord::by_system(Some(&sandbox.project), action, target);
        self.context.audit.note(record.with("reason", why));
    }

    /// Whether a session is to be ended, and why.
    fn verdict(&self, live: &Arc<RunningSandbox>) -> Option<SessionEnd> {
        if live.session().deadline.is_some_and(|at| at <= now()) {
            return Some(SessionEnd::Timeout);
        }
        let sandbox = live.sandbox();
        let idle = sandbox.config.idle_timeout?;
        let refused = live.refused.lock().as_ref().is_some_and(|it| Instant::now() < it.not_before);
        let quiet = live.quiet_for().is_some_and(|quiet| quiet >= idle.duration());
        (quiet && !refused && self.on_idle(&sandbox) != OnIdle::Run).then_some(SessionEnd::Idle)
    }
}

impl RunningSandbox {
    /// Remembers that it could not be paused, for `why`, and not to be tried again at once.
    fn pause_refused(&self, error: &Error) -> u32 {
        let mut refused = self.refused.lock();
        let times = refused.as_ref().map_or(0, |before| before.times).saturating_add(1);
        let pause = AGAIN.saturating_mul(2u32.saturating_pow(times - 1)).min(AGAIN_AT_LATEST);
        *refused = Some(RefusedPause {
            at: now(),
            not_before: Instant::now() + pause,
            times,
            reason: error_chain(error),
        });
        times
    }
}
