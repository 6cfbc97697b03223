//! The warm pool of containers: builders that have made namespaces before a sandbox needs them.
//!
//! A prebuilt container has its namespaces, network device and system call filter, and waits for its description
//! (`crates/agent/src/cage/prebuild.rs`). The next start takes it and saves about half of the work. It is unassigned: it has no
//! directory, no control group, no uids and no files, and runs nothing.
//!
//! *Cost.* Two sleeping processes each, about 1 MB together. [`limits`] says how many there are, and for how long. They end with
//! the daemon, even if it is killed, because their standard input closes. So the next daemon finds none.
//!
//! A start that finds none, or whose prebuilt container fails, builds one from scratch.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::driver::host::{Builder, Host, on_thread};
use crate::warm_pool::{Maker, PoolLimits, WarmPool};

/// Prebuilt containers. All are of one kind.
pub(super) type Builders = WarmPool<(), Builder>;

/// The limits of a pool of up to `most`.
pub(super) fn limits(most: usize) -> PoolLimits {
    PoolLimits {
        per_kind: most,
        kinds: 1,
        quiet: Duration::from_millis(5),
        idle: Duration::from_mins(5),
    }
}

/// Takes one that is still alive, if there is any.
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
            // With cgroup v2 a process must be created in its group: only the builder is started.
            let born_in = host.groups.are_born_in();
            host.builder(if born_in { &["cage"] } else { &["cage", "ahead"] })
        };
        let made = on_thread(&self, self.run_dir(), work).await;
        made.inspect_err(|error| {
            tracing::warn!(%error, "could not prebuild a container for the next start");
        })
        .ok()
    }

    async fn discard(self: Arc<Self>, builder: Builder) {
        // It ends by itself when its standard input closes.
        drop(builder);
    }
}
