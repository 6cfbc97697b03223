//! Files that a sandbox gets by a merge or a promotion, inspected by its own guard.
//!
//! The other one sealed it under its own guard, which may be laxer, and with its own secrets.

use std::sync::Arc;

use crate::engine::error::error_chain;
use crate::engine::snapshots::SealGuard;
use crate::engine::snapshots::seal_guard::{GuardScan, GuardedPart, Inspection};
use crate::engine::{Error, Result};
use crate::model::{DriveId, LayerId, Name, OnSecret, Sandbox, Session};
use crate::store::search::{Needles, Writers};
use crate::store::{Effort, Globs};

impl SealGuard {
    /// Looks at layers that a sandbox is to get from another one, which may have a laxer guard, or was given other secrets: in
    /// these sessions. What the guard would not let the sandbox seal itself is refused.
    pub(in crate::engine) async fn guard_taken(
        &self,
        sandbox: &Sandbox,
        from: &Name,
        sessions: &[Session],
        layers: &[LayerId],
        drive: Option<&DriveId>,
    ) -> Result<()> {
        let guard = &sandbox.config.guard;
        let mut values = Vec::new();
        if guard.secrets != OnSecret::Warn {
            for session in sessions {
                match self.secrets.given_values(&sandbox.project, session) {
                    Ok(given) => values.extend(given),
                    // It was deleted since, and its value is not known any more.
                    Err(error @ Error::NoSecret(_)) => {
                        tracing::warn!(sandbox = %sandbox.name, error = error_chain(&error), "files from another sandbox are not searched for a secret");
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        let needles = Some(Needles::new(&values)).filter(|needles| !needles.is_empty());
        let needles = needles.map(Arc::new);
        let inspection = Inspection { sandbox, session: None, needles, keep: true };
        let part = |layer| GuardedPart { drive: drive.cloned(), ..GuardedPart::of_layer(layer) };
        let parts: Vec<GuardedPart> = layers.iter().map(part).collect();
        let how = (Writers::None, Effort::Foreground);
        let mut spotted = inspection.search(self, &parts, how, &mut GuardScan::default()).await?;
        spotted.extend(inspection.junk(self, &parts).await?);
        let (refused, _) = inspection.split(spotted, &parts, &Globs::parse(&[])?, |_| false);
        if refused.is_empty() {
            return Ok(());
        }
        let files = refused.len();
        let findings = self.told(&inspection, refused).await?;
        self.context.events.guard_found(sandbox, &findings, files, true);
        let (from, into) = (from.clone(), sandbox.name.clone());
        Err(Error::TakenGuarded { from, into, files, findings })
    }
}
