//! Why a sandbox is where it is, and what would change that.

use serde::{Deserialize, Serialize};

use super::lifecycle::Phase;
use super::{Engine, Result};
use crate::model::{Name, Timestamp};

/// Where a sandbox is and why, in sentences for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Why {
    /// Where it is.
    pub phase: Phase,
    /// Since when.
    pub since: Timestamp,
    /// How it came there.
    pub reason: String,
    /// What would wake it, or, while it runs, what would put it to sleep and when.
    pub waking: Vec<String>,
    /// What keeps it awake now.
    pub holding: Vec<String>,
    /// What somebody should know: memory that could not be used, a pause that was refused, a failure.
    pub notices: Vec<String>,
}

impl Engine {
    /// Explains where a sandbox is. Never wakes it.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSandbox`](super::Error::NoSandbox) when there is none of that name.
    pub async fn why(&self, project: &Name, name: &Name) -> Result<Why> {
        let sandbox = self.inner.find(project, name).await?;
        Ok(Why {
            phase: sandbox.phase,
            since: sandbox.phase_at,
            reason: String::new(),
            waking: Vec::new(),
            holding: Vec::new(),
            notices: sandbox.failure.into_iter().collect(),
        })
    }
}
