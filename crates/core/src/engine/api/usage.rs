//! Disk usage and metrics.

use std::collections::BTreeMap;

use crate::db::{Filter, Page};
use crate::engine::observe::meters::Latency;
use crate::engine::snapshots::storage_usage::SpaceReport;
use crate::engine::{Engine, Result};
use crate::model::lifecycle::Phase;
use crate::model::{Image, Name};

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
    /// Bytes that sandboxes received, since the start.
    pub network_received: u64,
    /// Bytes that sandboxes sent, since the start.
    pub network_sent: u64,
    /// The machines in the warm pools, by pool.
    pub warm_pools: BTreeMap<&'static str, u64>,
}

impl Engine {
    /// What takes space in a project, or on the whole host.
    ///
    /// # Errors
    ///
    /// Returns [`Error`](crate::engine::Error) when the filesystem or the index cannot be asked.
    pub async fn usage(&self, project: Option<&Name>) -> Result<SpaceReport> {
        let mut report = match project {
            Some(project) => self.parts.storage.usage.sealed_of(project).await?,
            None => self.parts.storage.usage.sealed_of_all()?,
        };
        let trash: u64 = self.trash(project).iter().map(|item| item.bytes).sum();
        report.trash += trash;
        if project.is_none() {
            // What only sandboxes in the trash name is still among the layers.
            report.snapshots = report.snapshots.saturating_sub(trash);
        }
        let ours = |of: &Name| project.is_none_or(|project| of == project);
        report.quarantine = self.parts.storage.usage.quarantined(project).await?;
        report.open = self.parts.storage.usage.open_bytes(ours).await?;
        report.commands = self.parts.sessions.command_bytes(project).await?;
        Ok(report)
    }

    /// The disk space that an image's layers take, and the space of the files they share with the host.
    ///
    /// # Errors
    ///
    /// Returns [`Error`] when one of them cannot be read.
    pub async fn image_size(&self, image: &Image) -> Result<(u64, u64)> {
        self.parts.references.count_image_layers(&image.layers).await?;
        let counts = self.parts.references.counts();
        Ok((counts.bytes_of(&image.layers), counts.foreign_of(&image.layers)))
    }

    /// Figures about the whole engine. It reads every record in memory, so it is not for every request.
    ///
    /// # Errors
    ///
    /// Returns [`Error`](crate::engine::Error) when the filesystem or the index cannot be asked.
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
            let found = self.parts.context.db.sandboxes(None, &Filter::default(), &page).await?;
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
        let (disk_free, disk_total) = self.parts.context.store.free_space()?;
        let totals = self.parts.references.counts().totals();
        let (events, events_lost) = self.parts.context.events.counts();
        let (layers, trash) = (totals.bytes, totals.trash);
        let mut traffic = self.parts.context.meters.traffic();
        for live in self.parts.turns.all_live() {
            let Some(more) = live.traffic() else { continue };
            traffic.received = traffic.received.saturating_add(more.received);
            traffic.sent = traffic.sent.saturating_add(more.sent);
        }
        let mut warm_pools = BTreeMap::from([("vm", self.parts.machines.warm.waiting() as u64)]);
        for driver in self.parts.context.drivers.all() {
            warm_pools.extend(driver.warm().map(|(pool, count)| (pool, count as u64)));
        }
        Ok(Figures {
            sandboxes,
            damage,
            disk_total,
            disk_free,
            layers,
            trash,
            events,
            events_lost,
            network_received: traffic.received,
            network_sent: traffic.sent,
            warm_pools,
        })
    }

    /// How long operations took since the start.
    #[must_use]
    pub fn latencies(&self) -> Vec<Latency> {
        self.parts.context.meters.latencies()
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
