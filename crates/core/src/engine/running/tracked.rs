//! A command that is alive, as the daemon sees it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use crate::engine::running::end_cause::Causes;
use crate::engine::running::stdin::Input;
use crate::model::{Command, CommandId};

/// A command that is alive, as the daemon sees it.
#[derive(Debug)]
pub(in crate::engine) struct Tracked {
    pub(in crate::engine) record: Mutex<Command>,
    /// Output bytes taken so far; closed by the end.
    pub(in crate::engine) progress: watch::Sender<u64>,
    /// The same, up to where the agent may have got an acknowledgement.
    pub(in crate::engine) printed: AtomicU64,
    pub(in crate::engine) over: AtomicBool,
    pub(in crate::engine) causes: Mutex<Causes>,
    pub(in crate::engine) stdin: Input,
}

impl Tracked {
    pub(in crate::engine) fn id(&self) -> CommandId {
        self.record.lock().id.clone()
    }

    pub(in crate::engine) fn record(&self) -> Command {
        self.record.lock().clone()
    }

    /// What the daemon did to it that may be why it ends.
    pub(in crate::engine) fn causes(&self) -> MutexGuard<'_, Causes> {
        self.causes.lock()
    }

    pub(in crate::engine) fn outcome(&self) -> Option<Command> {
        self.over.load(Ordering::SeqCst).then(|| self.record())
    }

    /// It is over without having ended: what it lived in is gone.
    pub(in crate::engine) fn lose(&self, record: Command) {
        *self.record.lock() = record;
        self.over.store(true, Ordering::SeqCst);
        self.progress.send_modify(|_| {});
        self.stdin.over();
    }

    /// Waits until the agent has reported it, or it is over, but not for long.
    pub(in crate::engine) async fn attached_soon(&self) {
        let _ = tokio::time::timeout(ATTACHED_SOON, self.stdin.attached()).await;
    }

    /// Waits until it has ended.
    pub(in crate::engine) async fn ended(&self) {
        let mut progress = self.progress.subscribe();
        while !self.over.load(Ordering::SeqCst) {
            let _ = progress.changed().await;
        }
    }
}

/// How long the adoption of a command waits for its agent.
const ATTACHED_SOON: Duration = Duration::from_secs(2);
