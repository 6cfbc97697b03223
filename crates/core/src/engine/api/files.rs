//! Files inside a sandbox: wakes the sandbox and keeps its root in place during a transfer.

use std::sync::Arc;

use crate::engine::session::files::{Bounds, Files, Writes};
use crate::engine::{Engine, Result, WakeMode};
use crate::model::Name;

impl Engine {
    /// Opens a sandbox's files, waking it if need be.
    ///
    /// # Errors
    ///
    /// Returns [`crate::engine::Error`] when the sandbox cannot be woken, or may not.
    pub async fn files(&self, project: &Name, name: &Name, wake: WakeMode) -> Result<Files> {
        let (live, (hold, gate)) = self.parts.lifecycle.enter(project, name, &wake).await?;
        let guest = live.guest().await?;
        let sandbox = live.sandbox();
        let user = sandbox.config.user.clone().or_else(|| sandbox.image_config.user.clone());
        let cwd = sandbox.config.cwd.clone().or_else(|| sandbox.image_config.cwd.clone());
        let limits = Arc::clone(&self.parts.integrity.limits);
        let bounds = Bounds { limits, live };
        let writes = Writes::new(&self.parts.sessions, &bounds.live);
        Ok(Files { guest, bounds, user, cwd, _hold: hold, writes, _gate: gate })
    }
}
