//! Knowing that what was sealed is still what is on disk, while the server runs.
//!
//! Two jobs, one layer at a time, each at a limited rate so that nobody waits for them:
//!
//! - *Digests*: a layer that was sealed is read once, right afterwards, and `digest.json` is written.
//!   The queue is bounded; what does not fit, or was sealed by a daemon that died, is found by listing
//!   the layers when the queue is empty.
//! - *The scrub*: every layer is compared with its digest once in an interval, the longest unverified
//!   first. Files are read from the disk and not from memory. When it was last verified is the
//!   modification time of `digest.json`, so a restarted daemon goes on where the last one was.
//!
//! A layer that is not what was sealed is entered in the register of damage. From then on nothing
//! starts on it: the answer names the files and offers snapshots that do not need it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, SystemTime};

use tokio::sync::Notify;

use super::boot::chain_of;
use super::damage::DamageKind;
use super::slot::lock;
use super::{Engine, Error, Inner, Result};
use crate::model::{Layer, LayerId};
use crate::store::{Difference, Gently, Problem, Report, Verdict};

/// How many layers wait for their digest in memory.
const QUEUE: usize = 1_000;
/// How long after a seal its layer is read. Whoever resumes right away goes first.
const DELAY: Duration = Duration::from_secs(1);
/// How often it is looked for layers that were missed, or are due.
const LOOK: Duration = Duration::from_secs(600);
/// How many differences are told of one layer.
const TOLD: usize = 5;
/// How often a check of a running server looks again at what seems to be wrong.
const LOOKS: usize = 3;

/// How layers are verified while the server runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScrubSettings {
    /// How many bytes a second are read to make digests; no digests are made if it is 0.
    pub digest_rate: u64,
    /// How often each layer is compared with its digest; never if absent.
    pub interval: Option<Duration>,
    /// How many bytes a second are read for that.
    pub rate: u64,
}

impl Default for ScrubSettings {
    fn default() -> Self {
        Self {
            digest_rate: 64 << 20,
            interval: Some(Duration::from_secs(7 * 24 * 3600)),
            rate: 8 << 20,
        }
    }
}

/// What waits to be read.
#[derive(Debug, Default)]
pub(super) struct Scrub {
    queue: Mutex<VecDeque<LayerId>>,
    wake: Arc<Notify>,
    stop: Arc<AtomicBool>,
    /// One check of everything at a time.
    checking: tokio::sync::Mutex<()>,
}

impl Scrub {
    /// Has the digest of a layer made soon.
    pub(super) fn add(&self, layer: LayerId) {
        let mut queue = lock(&self.queue);
        if queue.len() < QUEUE {
            queue.push_back(layer);
        }
        drop(queue);
        self.wake.notify_one();
    }

    /// Ends what is being read.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.wake.notify_one();
    }
}

impl Engine {
    /// Checks all manifests and the names in all layers while the server runs. What is being changed
    /// meanwhile can look wrong, so a problem counts only if it is there several times in a row.
    ///
    /// # Errors
    ///
    /// Returns [`Error`] when a directory cannot be listed.
    pub async fn fsck(&self) -> Result<Report> {
        let _one = self.inner.scrub.checking.lock().await;
        let mut report = self.inner.store.fsck().await?;
        for _ in 1..LOOKS {
            if !report.is_broken() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
            let again = self.inner.store.fsck().await?;
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
    /// Returns [`Error`] when the layers cannot be listed.
    pub async fn scrub_now(&self) -> Result<Vec<(LayerId, Vec<Difference>)>> {
        let mut found = Vec::new();
        for layer in self.inner.store.scan::<Layer>().await?.good {
            if let Some(differences) = self.inner.scrub_layer(&layer.id, false).await {
                found.push((layer.id, differences));
            }
        }
        Ok(found)
    }
}

/// Starts the work, which ends with the engine.
pub(super) fn run(inner: &Arc<Inner>) {
    tokio::spawn(work(Arc::downgrade(inner)));
}

async fn work(engine: Weak<Inner>) {
    let Some(mut shutdown) = engine.upgrade().map(|inner| inner.shutdown.subscribe()) else {
        return;
    };
    let mut looked: Option<tokio::time::Instant> = None;
    loop {
        let Some(inner) = engine.upgrade() else { return };
        let next = lock(&inner.scrub.queue).pop_front();
        if let Some(layer) = next {
            if inner.settings.scrub.digest_rate > 0 {
                inner.make_digest(&layer).await;
            }
        } else if looked.is_none_or(|at| at.elapsed() >= LOOK) && !inner.is_recovering() {
            looked = Some(tokio::time::Instant::now());
            inner.look_for_work().await;
        } else {
            // Not the engine: whoever drops it gets the data directory back at once.
            let wake = Arc::clone(&inner.scrub.wake);
            drop(inner);
            tokio::select! {
                () = wake.notified() => {}
                () = tokio::time::sleep(Duration::from_secs(5)) => {}
                _ = shutdown.wait_for(|over| *over) => return,
            }
            tokio::select! {
                () = tokio::time::sleep(DELAY) => {}
                _ = shutdown.wait_for(|over| *over) => return,
            }
            continue;
        }
        drop(inner);
        if *shutdown.borrow() {
            return;
        }
    }
}

impl Inner {
    fn gently(&self, rate: u64, past_cache: bool) -> Gently {
        Gently { rate, past_cache, stop: Arc::clone(&self.scrub.stop) }
    }

    /// Reads a layer that was just sealed.
    async fn make_digest(&self, layer: &LayerId) {
        let gently = self.gently(self.settings.scrub.digest_rate, false);
        match self.store.fingerprint(layer, Some(&gently)).await {
            Ok(Verdict::Damaged(differences)) => self.layer_changed(layer, &differences),
            Ok(Verdict::Intact | Verdict::Unknown) => {}
            // It was collected since.
            Err(error) if error.is_not_found() || self.store.layer(layer).await.is_err() => {}
            Err(error) => {
                tracing::warn!(%layer, error = chain_of(&Error::from(error)), "its digest was not made");
            }
        }
    }

    /// Finds layers without a digest, and verifies those whose time has come.
    async fn look_for_work(&self) {
        let layers = match self.store.scan::<Layer>().await {
            Ok(layers) => layers.good,
            Err(error) => {
                tracing::warn!(error = chain_of(&Error::from(error)), "layers were not verified");
                return;
            }
        };
        let mut due = Vec::new();
        for layer in layers {
            match self.store.verified_at(&layer.id) {
                None => self.scrub.add(layer.id),
                Some(at) => due.push((at, layer.id)),
            }
        }
        let Some(interval) = self.settings.scrub.interval else { return };
        due.sort();
        for (at, layer) in due {
            let over = SystemTime::now().duration_since(at).is_ok_and(|age| age >= interval);
            if !over || self.scrub.stop.load(Ordering::Relaxed) {
                break;
            }
            // New layers come first.
            let new = lock(&self.scrub.queue).pop_front();
            if let Some(new) = new.filter(|_| self.settings.scrub.digest_rate > 0) {
                self.make_digest(&new).await;
            }
            self.scrub_layer(&layer, true).await;
        }
    }

    /// Compares a layer with its digest, and answers with what is different. One that has no digest yet gets it at once if
    /// somebody waits for the answer.
    async fn scrub_layer(&self, layer: &LayerId, gently: bool) -> Option<Vec<Difference>> {
        let calm = gently.then(|| self.gently(self.settings.scrub.rate, true));
        let verdict = match self.store.verify(layer, calm.as_ref()).await {
            Ok(Verdict::Unknown) if !gently => self.store.fingerprint(layer, None).await,
            verdict => verdict,
        };
        match verdict {
            Ok(Verdict::Damaged(differences)) => {
                self.layer_changed(layer, &differences);
                Some(differences)
            }
            Ok(Verdict::Intact) => {
                self.clear_damage(DamageKind::LayerChanged, &format!("layers/{layer}"));
                None
            }
            Ok(Verdict::Unknown) => None,
            // It was collected since.
            Err(_) if self.store.layer(layer).await.is_err() => None,
            Err(crate::store::StoreError::ShuttingDown) => None,
            Err(error) => {
                let differences = vec![Difference::Told(chain_of(&Error::from(error)))];
                self.layer_changed(layer, &differences);
                Some(differences)
            }
        }
    }

    fn layer_changed(&self, layer: &LayerId, differences: &[Difference]) {
        let mut told: Vec<String> =
            differences.iter().take(TOLD).map(ToString::to_string).collect();
        if differences.len() > TOLD {
            told.push(format!("and {} more", differences.len() - TOLD));
        }
        self.report_damage(
            DamageKind::LayerChanged,
            format!("layers/{layer}"),
            told.join("; "),
            format!(
                "nothing starts on this layer. Roll back to, or fork from, a snapshot that does not need it, bring the \
                 files back from a backup, or take the layer as it is with `keep fsck --accept-layer {layer}`"
            ),
        );
    }
}
