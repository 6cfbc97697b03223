//! Health, known damage, and verification of stored data.

use std::time::Duration;

use crate::engine::context::damage::{Damage, DamageKind};
use crate::engine::integrity::disk_probe::Unwell;
use crate::engine::{Engine, Result};
use crate::model::{Layer, LayerId};
use crate::store::{NameDifference, Problem, Report};

/// How often a check of a running server looks again at what seems to be wrong.
const LOOKS: usize = 3;

impl Engine {
    /// Whether the data directory takes writes, from memory: this never waits for the disk.
    ///
    /// # Errors
    ///
    /// Returns [`Unwell`] when a write failed or has been waiting for long.
    pub fn health(&self) -> Result<(), Unwell> {
        self.parts.integrity.health.state()
    }

    /// The drivers that sandboxes can have, the default one first, and why others are absent.
    #[must_use]
    pub fn driver_states(&self) -> (Vec<&'static str>, Vec<(&'static str, String)>) {
        let context = &self.parts.context;
        let mut here = context.drivers.names();
        here.sort_by_key(|name| *name != context.settings.default_driver);
        let absent = context.settings.absent_drivers.iter();
        let absent = absent
            .filter(|(name, _)| !here.contains(name))
            .map(|(name, absent)| (*name, absent.reason.clone()))
            .collect();
        (here, absent)
    }

    /// Whether the default driver is available.
    #[must_use]
    pub fn has_default_driver(&self) -> bool {
        let context = &self.parts.context;
        context.drivers.names().contains(&context.settings.default_driver.as_str())
    }

    /// Checks all manifests and the names in all layers while the server runs. What is being changed
    /// meanwhile can look wrong, so a problem counts only if it is found several times in a row.
    ///
    /// # Errors
    ///
    /// Returns [`Error`](crate::engine::Error) when a directory cannot be listed.
    pub async fn fsck(&self) -> Result<Report> {
        let _one = self.parts.integrity.scrub.checking.lock().await;
        let mut report = self.parts.context.store.fsck().await?;
        for _ in 1..LOOKS {
            if !report.is_broken() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
            let again = self.parts.context.store.fsck().await?;
            let problems: Vec<Problem> = again
                .problems
                .iter()
                .filter(|one| report.problems.contains(one))
                .cloned()
                .collect();
            report = Report { problems, ..again };
        }
        Ok(report)
    }

    /// Reads every file of every layer now, and answers with what is not as it was sealed.
    ///
    /// # Errors
    ///
    /// Returns [`Error`](crate::engine::Error) when the layers cannot be listed.
    pub async fn scrub_now(&self) -> Result<Vec<(LayerId, Vec<NameDifference>)>> {
        let mut found = Vec::new();
        for layer in self.parts.context.store.scan::<Layer>().await?.good {
            if let Some(differences) =
                self.parts.integrity.scrub.scrub_layer(&layer.id, false).await
            {
                found.push((layer.id, differences));
            }
        }
        Ok(found)
    }

    /// Everything that is known to be wrong with stored data, at most 1,000 entries.
    #[must_use]
    pub fn damage(&self) -> Vec<Damage> {
        if let Some(reason) = self.parts.context.db.damage() {
            self.parts.context.report_damage(
                DamageKind::IndexRebuilt,
                "index.sqlite",
                reason,
                "it was built again from the disk, and nothing is lost; look for a failing disk",
            );
        }
        self.parts.context.damage.all()
    }
}
