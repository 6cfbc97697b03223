//! Scrubbing: verifies sealed layers against their digests in the background.
//!
//! Two jobs, one layer at a time, each at a limited rate so that they delay no other work:
//!
//! - *Digests*: a layer that was sealed is read once, right afterwards, and `digest.jsonl` is written.
//!   The queue is bounded; what does not fit, or was sealed by a daemon that died, is found by listing
//!   the layers when the queue is empty.
//! - *The scrub*: every layer is compared with its digest once in an interval, the longest unverified
//!   first. Files are read from the disk and not from memory. When it was last verified is the
//!   modification time of `digest.jsonl`, so a restarted daemon continues where the last one was.
//!
//! A layer that is not what was sealed is entered in the register of damage. From then on nothing
//! starts on it: the answer names the files and offers snapshots that do not need it.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use crate::engine::Error;
use crate::engine::context::damage::DamageKind;
use crate::engine::error::error_chain;
use crate::engine::integrity::Scrubber;
use crate::model::{Layer, LayerId};
use crate::store::{DigestVerdict, NameDifference, ReadThrottle, StoreError};

/// How long after a seal its layer is read. A start right after the stop goes first.
const DELAY: Duration = Duration::from_secs(1);
/// How often it is looked for layers that were missed, or are due.
const LOOK: Duration = Duration::from_secs(600);
/// How many differences of one layer are reported.
const TOLD: usize = 5;

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

/// Starts the work, which ends with the engine.
pub(in crate::engine) fn run(this: &Arc<Scrubber>) {
    this.context.tasks.spawn(work(Arc::downgrade(this)));
}

async fn work(scrubber: Weak<Scrubber>) {
    let Some(shutdown) = scrubber.upgrade().map(|this| this.context.tasks.shutdown()) else {
        return;
    };
    let mut looked: Option<tokio::time::Instant> = None;
    loop {
        let Some(this) = scrubber.upgrade() else { return };
        let next = this.references.digests.queue.lock().pop_front();
        if let Some(layer) = next {
            if this.context.settings.scrub.digest_rate > 0 {
                this.make_digest(&layer).await;
            }
        } else if looked.is_none_or(|at| at.elapsed() >= LOOK) && !this.context.is_recovering() {
            looked = Some(tokio::time::Instant::now());
            this.look_for_work().await;
        } else {
            // Not the engine: dropping the engine must free the data directory at once.
            let wake = Arc::clone(&this.references.digests.wake);
            drop(this);
            tokio::select! {
                () = wake.notified() => {}
                () = tokio::time::sleep(Duration::from_secs(5)) => {}
                () = shutdown.cancelled() => return,
            }
            tokio::select! {
                () = tokio::time::sleep(DELAY) => {}
                () = shutdown.cancelled() => return,
            }
            continue;
        }
        drop(this);
        if shutdown.is_cancelled() {
            return;
        }
    }
}

impl Scrubber {
    fn gently(&self, rate: u64, bypass_cache: bool) -> ReadThrottle {
        ReadThrottle { rate, bypass_cache, stop: Arc::clone(&self.references.digests.stop) }
    }

    /// Reads a layer that was just sealed.
    async fn make_digest(&self, layer: &LayerId) {
        let gently = self.gently(self.context.settings.scrub.digest_rate, false);
        match self.store.record_digest(layer, Some(&gently)).await {
            Ok(DigestVerdict::Damaged(differences)) => self.layer_changed(layer, &differences),
            Ok(DigestVerdict::Intact | DigestVerdict::Unknown) | Err(StoreError::ShuttingDown) => {}
            // It was collected since.
            Err(error) if error.is_not_found() || self.store.layer(layer).await.is_err() => {}
            Err(error) => {
                tracing::warn!(%layer, error = error_chain(&Error::from(error)), "the digest of a layer was not made");
            }
        }
    }

    /// Finds layers without a digest, and verifies those whose time has come.
    async fn look_for_work(&self) {
        let layers = match self.store.scan::<Layer>().await {
            Ok(layers) => layers.good,
            Err(error) => {
                tracing::warn!(
                    error = error_chain(&Error::from(error)),
                    "layers were not verified: they cannot be listed"
                );
                return;
            }
        };
        let mut due = Vec::new();
        for layer in layers {
            match self.store.verified_at(&layer.id) {
                None => self.references.digests.add(layer.id),
                Some(at) => due.push((at, layer.id)),
            }
        }
        let Some(interval) = self.context.settings.scrub.interval else { return };
        due.sort();
        for (at, layer) in due {
            let over = SystemTime::now().duration_since(at).is_ok_and(|age| age >= interval);
            if !over || self.references.digests.stop.load(Ordering::Relaxed) {
                break;
            }
            // New layers come first.
            let new = self.references.digests.queue.lock().pop_front();
            if let Some(new) = new.filter(|_| self.context.settings.scrub.digest_rate > 0) {
                self.make_digest(&new).await;
            }
            self.scrub_layer(&layer, true).await;
        }
    }

    /// Compares a layer with its digest, and answers with what is different. One that has no digest yet gets it at once if
    /// somebody waits for the answer.
    pub(in crate::engine) async fn scrub_layer(
        &self,
        layer: &LayerId,
        gently: bool,
    ) -> Option<Vec<NameDifference>> {
        let calm = gently.then(|| self.gently(self.context.settings.scrub.rate, true));
        let verdict = match self.store.verify(layer, calm.as_ref()).await {
            Ok(DigestVerdict::Unknown) if !gently => self.store.record_digest(layer, None).await,
            verdict => verdict,
        };
        match verdict {
            Ok(DigestVerdict::Damaged(differences)) => {
                self.layer_changed(layer, &differences);
                Some(differences)
            }
            Ok(DigestVerdict::Intact) => {
                self.context.clear_damage(DamageKind::LayerChanged, &format!("layers/{layer}"));
                None
            }
            Ok(DigestVerdict::Unknown) => None,
            // It was collected since.
            Err(_) if self.store.layer(layer).await.is_err() => None,
            Err(StoreError::ShuttingDown) => None,
            Err(error) => {
                let differences = vec![NameDifference::Other(error_chain(&Error::from(error)))];
                self.layer_changed(layer, &differences);
                Some(differences)
            }
        }
    }

    fn layer_changed(&self, layer: &LayerId, differences: &[NameDifference]) {
        let mut told: Vec<String> =
            differences.iter().take(TOLD).map(ToString::to_string).collect();
        if differences.len() > TOLD {
            told.push(format!("and {} more", differences.len() - TOLD));
        }
        self.context.report_damage(
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
