//! Figures about the whole engine, for operators who watch many servers.

use std::collections::BTreeMap;

use super::lifecycle::Phase;
use super::{Engine, Result};
use crate::db::{Filter, Page};

/// Figures of one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Figures {
    /// How many sandboxes are in each phase, of all projects.
    pub sandboxes: BTreeMap<&'static str, u64>,
    /// How much is known to be wrong with stored data, by kind.
    pub damage: BTreeMap<&'static str, u64>,
    /// The size of the filesystem under the data directory.
    pub disk_total: u64,
    /// What is free on it.
    pub disk_free: u64,
    /// Bytes of sealed layers, each counted once.
    pub layers: u64,
    /// Bytes in the trash.
    pub trash: u64,
    /// How many events were written since the start.
    pub events: u64,
    /// How many events were lost since the start.
    pub events_lost: u64,
}

impl Engine {
    /// Figures about the whole engine. It reads every record in memory, so it is not for every request.
    ///
    /// # Errors
    ///
    /// Returns [`Error`](super::Error) when the filesystem or the index cannot be asked.
    pub async fn figures(&self) -> Result<Figures> {
        let all = [
            Phase::Stopped,
            Phase::Starting,
            Phase::Running,
            Phase::Paused,
            Phase::Stopping,
            Phase::Failed,
        ];
        let mut sandboxes: BTreeMap<_, u64> = all.iter().map(|phase| (word(*phase), 0)).collect();
        let mut page = Page { limit: 1000, ..Page::default() };
        loop {
            let found = self.inner.db.sandboxes(None, &Filter::default(), &page).await?;
            for sandbox in &found.items {
                *sandboxes.entry(word(sandbox.phase())).or_default() += 1;
            }
            let Some(next) = found.next else { break };
            page.cursor = Some(next);
        }
        let mut damage = BTreeMap::new();
        for one in self.damage() {
            *damage.entry(one.kind.name()).or_default() += 1;
        }
        let (disk_free, disk_total) = self.inner.store.free_space()?;
        let totals = self.inner.books().totals();
        let (events, events_lost) = self.inner.events.counts();
        let (layers, trash) = (totals.bytes, totals.trash);
        Ok(Figures { sandboxes, damage, disk_total, disk_free, layers, trash, events, events_lost })
    }
}

fn word(phase: Phase) -> &'static str {
    match phase {
        Phase::Stopped => "stopped",
        Phase::Starting => "starting",
        Phase::Running => "running",
        Phase::Paused => "paused",
        Phase::Stopping => "stopping",
        Phase::Failed => "failed",
        Phase::Deleted => "deleted",
    }
}
