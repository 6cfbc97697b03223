//! The queue of sealed layers whose digest is still to be computed (by `integrity/scrub.rs`).

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::model::LayerId;

/// How many layers wait for their digest in memory.
const QUEUE: usize = 1_000;

/// The layers whose digests are still to be read.
#[derive(Debug, Default)]
pub(in crate::engine) struct DigestQueue {
    pub(in crate::engine) queue: Mutex<VecDeque<LayerId>>,
    pub(in crate::engine) wake: Arc<Notify>,
    pub(in crate::engine) stop: Arc<AtomicBool>,
}

impl DigestQueue {
    /// Has the digest of a layer made soon.
    pub(in crate::engine) fn add(&self, layer: LayerId) {
        let mut queue = self.queue.lock();
        if queue.len() < QUEUE {
            queue.push_back(layer);
        }
        drop(queue);
        self.wake.notify_one();
    }

    /// Ends what is being read.
    pub(in crate::engine) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.wake.notify_one();
    }
}
