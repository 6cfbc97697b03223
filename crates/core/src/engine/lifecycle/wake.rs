//! Wakes a sandbox once for all callers that want one of its ports at the same time.

use std::sync::Arc;
use std::time::Duration;

use crate::engine::lifecycle::Lifecycle;
use crate::engine::lifecycle::sandbox::WakeFrom;
use crate::engine::{Error, Result};
use crate::model::Sandbox;

/// How long a failed attempt to wake a sandbox counts for those that come after it.
const FAILURE_COUNTS: Duration = Duration::from_secs(1);

impl Lifecycle {
    /// Wakes a sandbox together with all who want that now. They share one attempt and its failure.
    pub(in crate::engine) async fn wake_together(
        self: &Arc<Self>,
        sandbox: &Sandbox,
    ) -> Result<(), Arc<Error>> {
        let (mut outcome, tell) = self.wakes.join(&sandbox.id);
        if let Some(tell) = tell {
            let (this, id, name) = (Arc::clone(self), sandbox.id.clone(), sandbox.name.clone());
            self.context.tasks.spawn(async move {
                let woken = this.wake(&id, &name, None, WakeFrom::Any).await;
                let failed = woken.is_err();
                tell.send_replace(Some(woken.map(drop).map_err(Arc::new)));
                if failed {
                    this.context.tasks.sleep(FAILURE_COUNTS).await;
                }
                this.wakes.finish(&id);
            });
        }
        let outcome = outcome.wait_for(Option::is_some).await;
        // An attempt without an outcome ended with the engine.
        let outcome = outcome.ok().and_then(|outcome| outcome.clone());
        outcome.unwrap_or_else(|| Err(Error::ShuttingDown.into()))
    }
}
