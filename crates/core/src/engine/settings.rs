//! How the engine behaves on this host.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::engine::{
    Clock, CommandRetention, HostClock, LateDrivers, ScrubSettings, WebhookSettings,
};
use crate::guest::Deadlines;
use crate::model::{Config, Size};
use crate::net::UpstreamSettings;
use crate::secret::KeySource;

/// How the engine behaves on this host.
#[derive(Debug, Clone)]
pub struct Settings {
    /// How much of a command's output is kept on disk.
    pub log_limit: Size,
    /// How much of its commands a sandbox keeps.
    pub commands: CommandRetention,
    /// Whether it is recorded what commands and sessions change.
    pub record_changes: bool,
    /// The first of the host's uids that sandboxes may use.
    pub uid_base: u32,
    /// Where daemons of this host claim uids. The same for all whose machines share a kernel.
    pub uid_claims: PathBuf,
    /// How many sandboxes can run at once, as far as uids go; each takes 65,536.
    pub uid_ranges: u32,
    /// How long processes may take to end by themselves at a stop.
    pub grace: Duration,
    /// How long a machine may take to come up.
    pub patience: Duration,
    /// How long the agent inside a machine may take to answer.
    pub guest: Deadlines,
    /// How long a request waits for a sandbox that is being recovered after a restart.
    pub recovery: Duration,
    /// How many layers of its own a chain may have before some of them are merged in the background.
    pub chain_limit: usize,
    /// How many it may have at most: from here on nothing is added before some are merged.
    pub chain_bound: usize,
    /// How many layers a memory image may have before some of them are merged.
    pub memory_limit: usize,
    /// How often dirty data is written back while sandboxes run.
    pub write_back: Duration,
    /// How often the reaper looks.
    pub reap: Duration,
    /// How often expiry, retention and collection are looked at.
    pub housekeeping: Duration,
    /// How long what was deleted stays in the trash.
    pub trash_grace: Duration,
    /// What time it is.
    pub clock: Arc<dyn Clock>,
    /// How long the wall clock must agree with the monotonic one before anything expires by it.
    pub clock_settle: Duration,
    /// Where the key comes from that secrets are sealed with.
    pub secrets_key: KeySource,
    /// What an operator says about the network outside.
    pub network: UpstreamSettings,
    /// The driver of sandboxes that ask for none.
    pub default_driver: String,
    /// Drivers that this version has and this host cannot use.
    pub absent_drivers: BTreeMap<&'static str, Absent>,
    /// Who looks again for a driver that was absent, when somebody asks for it.
    pub late_drivers: Option<Arc<dyn LateDrivers>>,
    /// How many VMs are booted in advance, for each of the templates that were used last.
    pub warm_vms: usize,
    /// How layers are verified.
    pub scrub: ScrubSettings,
    /// How much the audit log of a project may take on disk. The oldest entries go first.
    pub audit_limit: Size,
    /// How webhooks behave.
    pub webhooks: WebhookSettings,
}

/// Why a driver cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Absent {
    /// What is missing.
    pub reason: String,
    /// What to do about it.
    pub fix: Option<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            log_limit: Size(64 << 20),
            commands: CommandRetention::default(),
            record_changes: true,
            uid_base: 0x7000_0000,
            uid_claims: crate::driver::CLAIMS_DIR.into(),
            uid_ranges: 0x7000,
            grace: Duration::from_secs(2),
            patience: Duration::from_secs(20),
            guest: Deadlines::default(),
            recovery: Duration::from_secs(60),
            chain_limit: 24,
            chain_bound: 64,
            memory_limit: 16,
            write_back: Duration::from_millis(500),
            reap: Duration::from_millis(500),
            housekeeping: Duration::from_secs(30),
            trash_grace: Duration::from_secs(3600),
            clock: Arc::new(HostClock::default()),
            clock_settle: Duration::from_secs(15 * 60),
            secrets_key: KeySource::default(),
            network: UpstreamSettings::default(),
            default_driver: Config::default().driver,
            absent_drivers: BTreeMap::new(),
            late_drivers: None,
            warm_vms: 0,
            scrub: ScrubSettings::default(),
            audit_limit: Size(256 << 20),
            webhooks: WebhookSettings::default(),
        }
    }
}
