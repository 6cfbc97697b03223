//! A guard for frozen machines: they are thawed when it is dropped, whatever happens.
//!
//! A checkpoint freezes the processes of a sandbox, a pause holds its machine. Between that and the end of it there is disk
//! work, which can fail, panic or be cancelled. So both are guards: dropping one resumes the
//! sandbox, in a background task that a shutdown waits for. A daemon that dies leaves it to the
//! next, which resumes every sandbox that it adopts.
//!
//! Several guards may keep the same processes frozen, for reasons that know nothing of each other. They
//! are counted: the first freezes, the last thaws.

use std::sync::Arc;
use std::time::Duration;

use crate::engine::context::Context;
use crate::engine::error::error_chain;
use crate::engine::running::live::RunningSandbox;
use crate::engine::{Error, Result};
use crate::model::Sandbox;

/// How long after each failure the resume is tried again.
const AGAIN: [Duration; 3] =
    [Duration::from_millis(100), Duration::from_secs(1), Duration::from_secs(10)];

/// The processes of a sandbox, frozen while this lives; or the machine they are in, if that has a kernel of its own.
pub(in crate::engine) struct FrozenProcesses {
    /// Absent once they have resumed.
    live: Option<Arc<RunningSandbox>>,
    context: Arc<Context>,
}

impl FrozenProcesses {
    pub(in crate::engine) async fn freeze(
        context: &Arc<Context>,
        live: &Arc<RunningSandbox>,
    ) -> Result<Self> {
        let mut freezes = live.freezes.lock().await;
        // Counted first: a freeze that is given up half way counts.
        *freezes += 1;
        let frozen = Self { live: Some(Arc::clone(live)), context: Arc::clone(context) };
        if *freezes > 1 {
            return Ok(frozen);
        }
        match (live.driver.relayer(), live.driver.memory()) {
            (Some(relayer), _) => relayer.freeze(&live.key).await?,
            (None, Some(memory)) => memory.hold(&live.key).await?,
            (None, None) => {}
        }
        Ok(frozen)
    }

    /// Resumes them. After an error it is tried again in the background.
    pub(in crate::engine) async fn thaw(mut self) -> Result<()> {
        if let Some(live) = &self.live {
            thaw(live).await?;
        }
        self.live = None;
        Ok(())
    }
}

impl Drop for FrozenProcesses {
    fn drop(&mut self) {
        let Some(live) = self.live.take() else { return };
        let context = Arc::clone(&self.context);
        in_background(&self.context, async move {
            let mut pauses = AGAIN.into_iter();
            while let Err(error) = thaw(&live).await {
                tracing::error!(machine = %live.key, error = error_chain(&error), "the processes of a sandbox are still frozen: thawing failed");
                let Some(pause) = pauses.next() else { return };
                // The next daemon thaws what it adopts.
                if !context.tasks.sleep(pause).await {
                    return;
                }
            }
        });
    }
}

async fn thaw(live: &RunningSandbox) -> Result<()> {
    let mut freezes = live.freezes.lock().await;
    if *freezes == 1 {
        match (live.driver.relayer(), live.driver.memory()) {
            (Some(relayer), _) => relayer.thaw(&live.key).await?,
            (None, Some(memory)) => memory.go_on(&live.key).await?,
            (None, None) => {}
        }
    }
    *freezes = freezes.saturating_sub(1);
    Ok(())
}

/// A machine that is held, or about to be, until its memory is on record.
pub(in crate::engine) struct SuspendedMachine {
    /// Absent once it has resumed, or must not.
    live: Option<Arc<RunningSandbox>>,
    context: Arc<Context>,
}

impl SuspendedMachine {
    pub(in crate::engine) fn new(context: &Arc<Context>, live: &Arc<RunningSandbox>) -> Self {
        Self { live: Some(Arc::clone(live)), context: Arc::clone(context) }
    }

    /// Its memory is on record: it must not resume.
    pub(in crate::engine) fn keep(mut self) {
        self.live = None;
    }

    /// Resumes it.
    pub(in crate::engine) async fn release(mut self) {
        if let Some(live) = self.live.take() {
            resume_machine(&live).await;
        }
    }
}

impl Drop for SuspendedMachine {
    fn drop(&mut self) {
        let Some(live) = self.live.take() else { return };
        in_background(&self.context, async move { resume_machine(&live).await });
    }
}

/// Runs `work` in a task that a shutdown waits for. When the runtime itself ends, the next daemon does it.
fn in_background(context: &Context, work: impl Future<Output = ()> + Send + 'static) {
    if tokio::runtime::Handle::try_current().is_ok() {
        context.tasks.spawn(work);
    }
}

/// How long filesystems may take to be frozen. One that does not answer is captured all the same: its kernel keeps a journal.
const FREEZE_WITHIN: Duration = Duration::from_secs(2);

/// Freezes the filesystems of a machine. One that does not answer is captured all the same.
pub(in crate::engine) async fn freeze_filesystems(
    live: &RunningSandbox,
    sandbox: &Sandbox,
) -> bool {
    let frozen = async { live.guest().await?.freeze().await.map_err(Error::from) };
    let problem = match tokio::time::timeout(FREEZE_WITHIN, frozen).await {
        Ok(Ok(())) => return true,
        Ok(Err(error)) => error_chain(&error),
        Err(_) => "its agent does not answer".to_owned(),
    };
    tracing::warn!(sandbox = %sandbox.name, problem, "the filesystems of a VM could not be frozen; its disk is used as it is");
    // It may come to it yet.
    true
}

pub(in crate::engine) async fn thaw_filesystems(live: &RunningSandbox) {
    let thawed = async { live.guest().await?.thaw().await.map_err(Error::from) };
    if !matches!(tokio::time::timeout(FREEZE_WITHIN, thawed).await, Ok(Ok(()))) {
        // The agent thaws by itself after a while.
        tracing::warn!(machine = %live.key, "the filesystems of a VM were not thawed; its agent thaws them later");
    }
}

/// Resumes a machine that was held.
pub(in crate::engine) async fn resume_machine(live: &RunningSandbox) {
    if let Some(memory) = live.driver.memory()
        && let Err(error) = memory.go_on(&live.key).await
    {
        tracing::error!(machine = %live.key, error = error_chain(&error), "a suspended machine was not resumed");
    }
    thaw_filesystems(live).await;
}
