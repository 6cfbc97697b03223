//! The current revision of each sandbox, for a catalog that one process has to itself.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::OwnedMutexGuard;

use super::{CatalogError, CatalogResult};
use crate::model::{Revision, Sandbox, SandboxId};

/// The revisions of all sandboxes, in memory. Of each sandbox, one version is saved at a time.
#[derive(Debug, Default)]
pub struct Versions(Mutex<HashMap<SandboxId, Arc<tokio::sync::Mutex<Revision>>>>);

/// The right to save the next version of a sandbox.
#[derive(Debug)]
#[must_use]
pub struct Next {
    current: OwnedMutexGuard<Revision>,
}

impl Versions {
    /// Enters a sandbox that was read, claimed or restored.
    pub fn enter(&self, sandbox: &Sandbox) {
        let version = Arc::new(tokio::sync::Mutex::new(sandbox.revision));
        self.0.lock().insert(sandbox.id.clone(), version);
    }

    /// Removes a sandbox that is gone. A caller that still has a copy cannot save it.
    pub fn strike(&self, id: &SandboxId) {
        self.0.lock().remove(id);
    }

    /// Waits until no other caller saves this sandbox, and compares its revision with the expected
    /// one.
    ///
    /// # Errors
    ///
    /// Returns [`CatalogError::Conflict`] when it is another one, [`CatalogError::NotFound`] when the
    /// sandbox is not on record.
    pub async fn next(&self, sandbox: &Sandbox) -> CatalogResult<Next> {
        let gone = || CatalogError::NotFound { kind: "sandbox", key: sandbox.id.to_string() };
        let version = self.0.lock().get(&sandbox.id).cloned().ok_or_else(gone)?;
        let current = version.lock_owned().await;
        // It may have been removed meanwhile.
        if !self.0.lock().contains_key(&sandbox.id) {
            return Err(gone());
        }
        if *current != sandbox.revision {
            return Err(CatalogError::Conflict {
                sandbox: sandbox.id.clone(),
                expected: sandbox.revision,
                found: *current,
            });
        }
        Ok(Next { current })
    }
}

impl Next {
    /// The revision to save.
    #[must_use]
    pub fn revision(&self) -> Revision {
        self.current.next()
    }

    /// The next version is saved.
    pub fn saved(mut self) {
        *self.current = self.current.next();
    }
}
