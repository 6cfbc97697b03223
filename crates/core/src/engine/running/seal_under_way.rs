//! Stops visits to the names of an open layer when its seal begins.
//!
//! A look at what commands changed and a measurement ahead of the seal each visit every name of a layer. If a stop or a checkpoint
//! comes meanwhile, it visits them too, and somebody waits for it: looks pause until it is done, and a measurement ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the open layer of a running sandbox is being sealed.
#[derive(Debug, Default)]
pub(in crate::engine) struct SealUnderWay(Arc<AtomicBool>);

impl SealUnderWay {
    /// A seal begins. It is over when the guard is dropped.
    pub(in crate::engine) fn begin(&self) -> SealRunning {
        self.0.store(true, Ordering::Relaxed);
        SealRunning(Arc::clone(&self.0))
    }

    /// True while it is under way.
    pub(in crate::engine) fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.0)
    }
}

/// A seal that is under way. There is one at a time: it has the turn of its sandbox.
#[derive(Debug)]
pub(in crate::engine) struct SealRunning(Arc<AtomicBool>);

impl Drop for SealRunning {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}
