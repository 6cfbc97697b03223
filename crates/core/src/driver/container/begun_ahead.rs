//! Cages that are begun before it is known whose they will be.
//!
//! A builder that was started ahead has its namespaces, network device and filter, and waits for what to build
//! (`crates/agent/src/cage/ahead.rs`). The next start takes it, so that it is spared about half of the work. Such a builder is unassigned: it
//! has no directory, no control group, no user ids and no file, and runs nothing.
//!
//! *What they cost.* Two processes each, about 1 MB together, that sleep. How many there are, and for how long, is [`limits`] of a
//! [`WarmPool`]. They end with the daemon, however that ends: their standard input is closed then. So the next daemon finds none.
//!
//! A start that finds none, or one that fails, builds as if there had been none.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::driver::host::{Builder, Host, on_thread};
use crate::warm_pool::{Maker, PoolLimits, WarmPool};

/// Builders that wait. All are alike.
pub(super) type Builders = WarmPool<(), Builder>;

/// Up to `most` of them.
pub(super) fn limits(most: usize) -> PoolLimits {
    PoolLimits {
        per_kind: most,
        kinds: 1,
        quiet: Duration::from_millis(5),
        idle: Duration::from_mins(5),
    }
}

/// One that still waits, if there is any.
pub(super) fn take(builders: &Builders) -> Option<Builder> {
    loop {
        let mut builder = builders.take(&())?;
        if builder.is_waiting() {
            return Some(builder);
        }
    }
}

#[async_trait]
impl Maker<(), Builder> for Host {
    async fn make(self: Arc<Self>, (): ()) -> Option<Builder> {
        let work = |host: &Self| {
            // Where processes are born in their group, only the builder is started.
            let born_in = host.groups.are_born_in();
            host.builder(if born_in { &["cage"] } else { &["cage", "ahead"] })
        };
        let made = on_thread(&self, self.run_dir(), work).await;
        made.inspect_err(|error| {
            tracing::warn!(%error, "no cage can be begun ahead of the next start");
        })
        .ok()
    }

    async fn discard(self: Arc<Self>, builder: Builder) {
        // It ends by itself when there is nothing to read any more.
        drop(builder);
    }
}
