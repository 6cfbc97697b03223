//! Ends processes that fill a disk, and lets their commands say so.
//!
//! A command that is killed for this says why when it ends. Until then its process frees what it held, which takes seconds
//! for some gigabytes in removed files. So every command of the sandbox is marked before anything is killed, and the mark
//! of a round is taken away only when all that was killed in it is gone and has had time to be reported.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::driver::{DriverResult, EndedProcesses};
use crate::engine::Error;
use crate::engine::error::error_chain;
use crate::engine::integrity::DiskLimits;
use crate::engine::integrity::disk_limits::EndsSessions;
use crate::engine::running::end_cause::DiskCause;
use crate::engine::running::freeze_guard::FrozenProcesses;
use crate::engine::running::live::RunningSandbox;
use crate::model::LayerId;

/// How long the agent may take to report the end of a process that is gone.
const HEARD: Duration = Duration::from_millis(250);
/// How often it is looked whether what was killed is gone, and for how long at most.
const GONE_LOOK: Duration = Duration::from_millis(50);
const GONE_WITHIN: Duration = Duration::from_secs(600);

/// What is to be ended, and why.
pub(super) struct DiskKill {
    /// The layer that is over its limit, and what it took; absent if it is for the host's sake.
    pub(super) over: Option<(LayerId, u64)>,
    pub(super) cause: DiskCause,
    pub(super) means: KillMeans,
}

pub(super) enum KillMeans {
    /// The host ends the processes that write the most.
    Writers,
    /// The host ends all but the agent while they are frozen, which they may be already.
    Host(Option<FrozenProcesses>),
    /// The agent ends all commands.
    Agent,
}

impl DiskLimits {
    /// Ends processes of a sandbox that fill the disk. It is not waited for: its agent may not answer, and the next sandbox
    /// must be checked. While writers are being ended, only all can be.
    pub(super) fn end_processes(
        self: &Arc<Self>,
        sessions: &Weak<dyn EndsSessions>,
        live: &Arc<RunningSandbox>,
        ending: DiskKill,
    ) {
        let is_clearing = live.clearing.swap(true, Ordering::SeqCst);
        if is_clearing && !matches!(ending.means, KillMeans::Host(_)) {
            return;
        }
        let (this, sessions, live) = (Arc::clone(self), Weak::clone(sessions), Arc::clone(live));
        let DiskKill { over, cause, means } = ending;
        let round = live.begin_disk_round(cause);
        self.context.tasks.spawn(async move {
            let ended = match means {
                KillMeans::Writers => live.driver.end_writers(&live.key).await,
                KillMeans::Host(frozen) => this.end_frozen(&live, frozen).await,
                KillMeans::Agent => {
                    this.clear(&sessions, &live).await;
                    Ok(EndedProcesses::default())
                }
            };
            let ended = match ended {
                Ok(ended) if ended.count() > 0 => {
                    tracing::warn!(sandbox = %live.sandbox().name, ended = ended.count(), "processes that filled the disk were ended");
                    ended
                }
                Ok(none) => {
                    // The processes that run now may be cleaning up: they must not be ended for that.
                    if !this.shrinks(&live, over).await {
                        this.clear(&sessions, &live).await;
                    }
                    none
                }
                Err(error) => {
                    tracing::debug!(error = error_chain(&error), "the processes that write were not found");
                    this.clear(&sessions, &live).await;
                    EndedProcesses::default()
                }
            };
            live.ended_writers.fetch_add(1, Ordering::SeqCst);
            live.clearing.store(false, Ordering::SeqCst);
            this.wait_until_gone(&live, &ended).await;
            // Commands that were ended report it within this time. Those that still run after it were not ended for that.
            tokio::time::sleep(HEARD).await;
            live.end_disk_round(round);
        });
    }

    /// Ends all processes but the agent, before any of them writes another byte.
    async fn end_frozen(
        &self,
        live: &Arc<RunningSandbox>,
        frozen: Option<FrozenProcesses>,
    ) -> DriverResult<EndedProcesses> {
        let frozen = match frozen {
            Some(frozen) => Ok(frozen),
            None => FrozenProcesses::freeze(&self.context, live).await,
        };
        let ended = live.driver.end_all(&live.key).await;
        match frozen {
            Ok(frozen) => {
                if let Err(error) = frozen.thaw().await {
                    // It is tried again.
                    tracing::warn!(machine = %live.key, error = error_chain(&error), "a container whose commands were ended was not thawed");
                }
            }
            // They were ended all the same.
            Err(error) => {
                tracing::debug!(machine = %live.key, error = error_chain(&error), "a container was not frozen to end its commands");
            }
        }
        ended
    }

    async fn wait_until_gone(&self, live: &RunningSandbox, ended: &EndedProcesses) {
        let begun = Instant::now();
        while !ended.are_gone() && !live.is_closed() && begun.elapsed() < GONE_WITHIN {
            if !self.context.tasks.sleep(GONE_LOOK).await {
                return;
            }
        }
    }

    /// Whether a layer takes less than it did, or nothing is known to be over a limit.
    async fn shrinks(&self, live: &RunningSandbox, over: Option<(LayerId, u64)>) -> bool {
        let Some((layer, then)) = over else { return true };
        let bounds = self.bounds(live).await.unwrap_or_default();
        let same = bounds.iter().find(|bound| bound.layer == layer);
        same.is_some_and(|bound| bound.used < then || !bound.is_over())
    }

    /// Has the agent end all commands. If it does not do that the session is ended: a sandbox that
    /// keeps its agent from answering must not fill the disk of all.
    async fn clear(&self, sessions: &Weak<dyn EndsSessions>, live: &Arc<RunningSandbox>) {
        let ended = async {
            // What is started after this may be what cleans up: it waits until the others are gone.
            let _gate = tokio::time::timeout(Duration::from_secs(1), live.gate.write()).await;
            Ok::<_, Error>(live.guest().await?.quiesce(Duration::ZERO).await?)
        };
        let Err(error) = ended.await else { return };
        let sandbox = live.sandbox();
        tracing::error!(sandbox = %sandbox.name, error = error_chain(&error), "a sandbox fills the disk and its agent did not end its commands; its session is ended");
        let Some(sessions) = sessions.upgrade() else { return };
        if let Err(error) = sessions.end_uncontrolled(Arc::clone(live)).await {
            tracing::error!(sandbox = %sandbox.name, error = error_chain(&error), "the session of a sandbox that fills the disk was not ended");
        }
    }
}
