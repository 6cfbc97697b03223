//! How many sockets sandboxes may have on the host.
//!
//! A flow of a sandbox is a socket of the daemon, and takes a descriptor that the daemon needs for its own work too: logs, layers,
//! machines, connections of its API. So all sandboxes together have a fourth of the descriptors that the process may have (the API
//! has up to half of them), and one sandbox a fourth of that at the most: one cannot take what the others need.

use std::sync::{Arc, LazyLock};

use rustix::process::{Resource, getrlimit};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The part of the process's descriptors that sandboxes have, and the part of that which one may have.
const OF_PROCESS: usize = 4;
const OF_ALL: usize = 4;
/// However few there are.
const AT_LEAST: usize = 16;
/// More are not of use to anybody, and a semaphore has bounds.
const AT_MOST: usize = 1 << 20;

static ALL: LazyLock<SocketBudget> = LazyLock::new(|| {
    // Tests of this crate make sandboxes side by side in one process.
    let descriptors = getrlimit(Resource::Nofile).current.filter(|_| !cfg!(test));
    SocketBudget::new(descriptors.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX))
});

#[derive(Debug)]
struct SocketBudget {
    all: Arc<Semaphore>,
    share: usize,
}

impl SocketBudget {
    fn new(descriptors: usize) -> Self {
        let all = (descriptors / OF_PROCESS).clamp(AT_LEAST * OF_ALL, AT_MOST);
        Self { all: Arc::new(Semaphore::new(all)), share: all / OF_ALL }
    }

    fn sandbox(&self) -> SandboxSockets {
        let own = Arc::new(Semaphore::new(self.share));
        SandboxSockets { all: Arc::clone(&self.all), own }
    }
}

/// The sockets of one sandbox.
#[derive(Debug, Clone)]
pub(super) struct SandboxSockets {
    all: Arc<Semaphore>,
    own: Arc<Semaphore>,
}

/// A socket, until it is dropped.
#[derive(Debug)]
pub(super) struct SocketPermit {
    _all: OwnedSemaphorePermit,
    _own: OwnedSemaphorePermit,
}

impl SandboxSockets {
    /// Those of another sandbox of this process.
    pub(super) fn new() -> Self {
        ALL.sandbox()
    }

    /// Takes one, if there is one left.
    pub(super) fn take(&self) -> Option<SocketPermit> {
        let own = Arc::clone(&self.own).try_acquire_owned().ok()?;
        let all = Arc::clone(&self.all).try_acquire_owned().ok()?;
        Some(SocketPermit { _all: all, _own: own })
    }
}

/// Tests with sandboxes that have few.
#[cfg(test)]
impl SandboxSockets {
    pub(super) fn few(count: usize) -> Self {
        let all = Arc::new(Semaphore::new(count));
        Self { own: Arc::clone(&all), all: Arc::new(Semaphore::new(count)) }
    }
}

#[cfg(test)]
mod tests {
    use super::SocketBudget;

    #[test]
    fn one_sandbox_does_not_take_what_the_others_need() {
        let budget = SocketBudget::new(4096);
        let (first, second) = (budget.sandbox(), budget.sandbox());
        let mut held: Vec<_> = std::iter::from_fn(|| first.take()).collect();
        assert_eq!(held.len(), 256);
        assert!(second.take().is_some());
        held.pop();
        assert!(first.take().is_some(), "what is dropped is there again");
        // Many together have no more than their part.
        let many: Vec<_> = (0..20).map(|_| budget.sandbox()).collect();
        held.extend(many.iter().flat_map(|one| std::iter::from_fn(|| one.take())));
        assert_eq!(held.len(), 1024);
        assert!(second.take().is_none());
    }
}
