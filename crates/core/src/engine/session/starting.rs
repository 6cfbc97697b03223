//! A command whose caller may leave while it is being started.
//!
//! It is on record by then, and the agent may have been asked already: whether it runs is not known. So it is adopted, as after a
//! restart of the daemon. If nobody was to go on without the caller, it is ended as one is whose caller leaves later.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;

use crate::engine::running::live::RunningSandbox;
use crate::engine::session::Sessions;
use crate::engine::session::command::Exec;
use crate::model::Command;

/// The signals of a terminal that hangs up, and of the end, and how long each is waited for.
const HANG_UP: [(i32, Duration); 2] = [(1, Duration::from_secs(5)), (9, Duration::from_secs(5))];

/// Held while a command is started. Dropped before [`over`](Self::over), it has the command adopted.
pub(super) struct StartingCommand {
    sessions: Arc<Sessions>,
    live: Arc<RunningSandbox>,
    record: Option<Command>,
}

impl StartingCommand {
    /// Of a command that is about to be on record. One with an id of its caller's is found again by its caller.
    pub(super) fn of(
        sessions: &Arc<Sessions>,
        live: &Arc<RunningSandbox>,
        exec: &Exec,
        record: &Command,
    ) -> Self {
        let record = exec.id.is_none().then(|| record.clone());
        Self { sessions: Arc::clone(sessions), live: Arc::clone(live), record }
    }

    /// It was started or refused, and somebody else sees to it.
    pub(super) fn over(mut self) {
        self.record = None;
    }
}

impl Drop for StartingCommand {
    fn drop(&mut self) {
        let Some(record) = self.record.take() else { return };
        // Without a runtime the daemon is gone, and the next one adopts it.
        if Handle::try_current().is_err() {
            return;
        }
        let (sessions, live) = (Arc::clone(&self.sessions), Arc::clone(&self.live));
        let tasks = &self.sessions.context.tasks;
        tasks.spawn(async move { sessions.take_over(&live, record).await });
    }
}

impl Sessions {
    async fn take_over(self: &Arc<Self>, live: &Arc<RunningSandbox>, record: Command) {
        let goes_on = record.detached || record.service.is_some();
        let (sandbox, id) = (record.sandbox.clone(), record.id.clone());
        tracing::debug!(command = %id, "the caller of a command left while it was started");
        self.adopt(live, record).await;
        let Some(tracked) = self.tracked(&sandbox, &id).filter(|_| !goes_on) else { return };
        for (signal, patience) in HANG_UP {
            if tracked.outcome().is_some() {
                return;
            }
            tracked.causes().signalled(signal);
            let Ok(guest) = live.guest().await else { return };
            // One that has ended meanwhile hears nothing.
            let _ = guest.signal(tracked.record().inside(), signal).await;
            let _ = tokio::time::timeout(patience, tracked.ended()).await;
        }
    }
}
