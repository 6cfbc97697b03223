//! Probes whether the disk under the data directory takes writes.
//!
//! A thread of its own writes and syncs a small file again and again. If the disk hangs, that thread hangs
//! and nothing else does; callers read from memory how long it has been waiting.

use std::fs::File;
use std::io;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How long one write may take before the disk counts as hanging.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long after one write the next begins.
const PAUSE: Duration = Duration::from_secs(5);
/// The file.
const NAME: &str = "keep.probe";

/// Why the server is not well.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unwell {
    /// A code for programs.
    pub code: &'static str,
    /// What is wrong, for people.
    pub reason: String,
}

/// What the thread found.
#[derive(Debug, Default)]
pub(in crate::engine) struct Health {
    found: Mutex<ProbeState>,
}

#[derive(Debug, Default)]
struct ProbeState {
    /// When the write began that is under way.
    begun: Option<Instant>,
    failed: Option<(io::ErrorKind, String)>,
}

impl Health {
    /// Starts the probe; it runs as long as `health` is held.
    pub(in crate::engine) fn watch(health: &Arc<Self>, data: &Path) {
        let (weak, file) = (Arc::downgrade(health), data.join(NAME));
        let started = std::thread::Builder::new()
            .name("health".to_owned())
            .spawn(move || Self::look(&weak, &file));
        if let Err(error) = started {
            tracing::error!(%error, "the disk probe did not start");
        }
    }

    fn look(health: &Weak<Self>, file: &Path) {
        let mut is_there = false;
        loop {
            let Some(this) = health.upgrade() else { return };
            this.found.lock().begun = Some(Instant::now());
            drop(this);
            let outcome = probe(file, !is_there);
            is_there = !matches!(&outcome, Err(error) if error.kind() == io::ErrorKind::NotFound);
            let Some(this) = health.upgrade() else { return };
            {
                let mut found = this.found.lock();
                found.begun = None;
                let failed = outcome.err().map(|error| (error.kind(), error.to_string()));
                if failed != found.failed {
                    match &failed {
                        Some((_, reason)) => {
                            tracing::error!(reason, "the disk takes no writes");
                        }
                        None => tracing::info!("the disk takes writes again"),
                    }
                }
                found.failed = failed;
            }
            drop(this);
            std::thread::sleep(PAUSE);
        }
    }

    pub(in crate::engine) fn state(&self) -> Result<(), Unwell> {
        let found = self.found.lock();
        if let Some(waited) = found.begun.map(|begun| begun.elapsed())
            && waited > PATIENCE
        {
            let seconds = waited.as_secs();
            return Err(Unwell {
                code: "storage_not_responding",
                reason: format!("a write to the data directory has been waiting for {seconds} s"),
            });
        }
        match &found.failed {
            None => Ok(()),
            Some((kind, reason)) => Err(Unwell {
                code: match kind {
                    io::ErrorKind::ReadOnlyFilesystem => "read_only_filesystem",
                    io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                        "insufficient_storage"
                    }
                    _ => "storage_failed",
                },
                reason: format!("the data directory takes no writes: {reason}"),
            }),
        }
    }
}

fn probe(path: &Path, create: bool) -> io::Result<()> {
    let mut file =
        File::options().write(true).create(create).truncate(false).mode(0o600).open(path)?;
    file.write_all(b"ok\n")?;
    file.sync_all()
}
