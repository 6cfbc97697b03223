//! What sandboxes use at this moment. Nothing is woken for it.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;

use crate::driver::MachineLoad;
use crate::engine::running::live::RunningSandbox;
use crate::engine::{Engine, Result};
use crate::model::{Name, Sandbox, Session, Timestamp, now};

/// How long a machine may take to be asked, and its disk to be looked at. Others are not kept waiting.
const PATIENCE: Duration = Duration::from_secs(1);

/// What a sandbox uses at this moment.
#[derive(Debug, Clone)]
pub struct Stats {
    /// The sandbox.
    pub sandbox: Sandbox,
    /// When it was asked.
    pub at: Timestamp,
    /// The session, what its machine uses, what it has written, and how many commands run; absent if none is under way.
    pub live: Option<LiveStats>,
}

/// What a session uses at this moment.
#[derive(Debug, Clone)]
pub struct LiveStats {
    /// The session, with what it has used so far.
    pub session: Session,
    /// What its machine uses.
    pub load: MachineLoad,
    /// What it has written, if that was found out in time.
    pub written: Option<u64>,
    /// How many commands run.
    pub commands: usize,
}

impl Engine {
    /// What a sandbox uses at this moment.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSandbox`](crate::engine::Error::NoSandbox) when there is none of that name.
    pub async fn stats(&self, project: &Name, name: &Name) -> Result<Stats> {
        let sandbox = self.parts.lifecycle.find(project, name).await?;
        match self.parts.turns.live(&sandbox.id) {
            Some(live) => Ok(self.stats_of(&live).await),
            None => Ok(Stats { sandbox, at: now(), live: None }),
        }
    }

    /// What the running sandboxes of a project use at this moment, by name.
    pub async fn all_stats(&self, project: &Name) -> Vec<Stats> {
        let live = self.parts.turns.all_live();
        let ours = live.iter().filter(|live| live.sandbox().project == *project);
        let mut all = join_all(ours.map(|live| self.stats_of(live))).await;
        all.sort_by(|one, other| one.sandbox.name.cmp(&other.sandbox.name));
        all
    }

    async fn stats_of(&self, live: &Arc<RunningSandbox>) -> Stats {
        let sandbox = live.sandbox();
        let asked = tokio::time::timeout(PATIENCE, live.driver.load(&live.key));
        let written = self.parts.storage.usage.open_bytes_of(&sandbox, PATIENCE);
        let (load, written) = tokio::join!(asked, written);
        // A machine that is being stopped has no load to report.
        let load = load.ok().and_then(Result::ok).unwrap_or_default();
        let mut session = live.session();
        session.count_machine(load.used);
        session.count_wall(now());
        let commands = live.commands.lock().len();
        let live = LiveStats { session, load, written, commands };
        Stats { sandbox: (*sandbox).clone(), at: now(), live: Some(live) }
    }
}
