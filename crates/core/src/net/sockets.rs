//! How many sockets sandboxes may have on the host.
//!
//! A flow of a sandbox is a socket of the daemon, and takes a descriptor that the daemon needs for its own work too: logs, layers,
//! machines, connections of its API. So all sandboxes together have a fourth of the descriptors that the process may have (the API
//! has up to half of them), the sandboxes of one project half of those, or as many as it is set to ([`ProjectSockets`]), and one
//! sandbox a fourth: one tenant cannot take what the others need.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

use parking_lot::Mutex;
use rustix::process::{Resource, getrlimit};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The part of the process's descriptors that sandboxes have, and the part of that which one may have.
const OF_PROCESS: usize = 4;
const OF_ALL: usize = 4;
/// The part of them that the sandboxes of one project have together, unless it is set to another number.
const OF_PROJECT: usize = 2;
/// However few there are.
const AT_LEAST: usize = 16;
/// More are of no use, and a semaphore has bounds.
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
    project: usize,
}

impl SocketBudget {
    fn new(descriptors: usize) -> Self {
        let all = (descriptors / OF_PROCESS).clamp(AT_LEAST * OF_ALL, AT_MOST);
        Self { all: Arc::new(Semaphore::new(all)), share: all / OF_ALL, project: all / OF_PROJECT }
    }

    fn sandbox(&self) -> SandboxSockets {
        let own = Arc::new(Semaphore::new(self.share));
        SandboxSockets { all: Arc::clone(&self.all), project: Arc::default(), own }
    }
}

/// The sockets of all sandboxes of one project.
#[derive(Debug)]
pub struct ProjectSockets {
    most: AtomicUsize,
    taken: AtomicUsize,
}

impl ProjectSockets {
    /// For a project whose sandboxes may have `most` together; by default half of all that
    /// sandboxes may have.
    #[must_use]
    pub fn new(most: Option<u32>) -> Arc<Self> {
        let sockets = Self { most: AtomicUsize::new(0), taken: AtomicUsize::new(0) };
        sockets.set(most);
        Arc::new(sockets)
    }

    /// Sets another number. Sockets beyond it stay open; no more are opened until there are fewer.
    pub fn set(&self, most: Option<u32>) {
        let most = most.map_or(ALL.project, |most| usize::try_from(most).unwrap_or(usize::MAX));
        self.most.store(most, Ordering::Relaxed);
    }

    fn take(self: &Arc<Self>) -> Result<ProjectPermit, NoSocket> {
        let most = self.most.load(Ordering::Relaxed);
        let more = |taken: usize| (taken < most).then_some(taken + 1);
        match self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more) {
            Ok(_) => Ok(ProjectPermit(Arc::clone(self))),
            Err(_) => Err(NoSocket::Project(most)),
        }
    }
}

/// One of a project's sockets, until it is dropped.
#[derive(Debug)]
struct ProjectPermit(Arc<ProjectSockets>);

impl Drop for ProjectPermit {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Why there is no socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoSocket {
    /// The sandbox has all that it may have.
    Sandbox,
    /// Those of its project have all that they may have together.
    Project(usize),
    /// All sandboxes have all that they may have together.
    Server,
}

/// As the journal prints it.
impl fmt::Display for NoSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sandbox => f.write_str("too many connections: the sandbox has all it may have"),
            Self::Project(most) => {
                write!(f, "too many connections: the project's sandboxes may have {most}")
            }
            Self::Server => {
                f.write_str("too many connections: the server's sandboxes have all they may have")
            }
        }
    }
}

/// The sockets of one sandbox.
#[derive(Debug, Clone)]
pub(super) struct SandboxSockets {
    all: Arc<Semaphore>,
    /// Of its project, as soon as that is known.
    project: Arc<Mutex<Option<Arc<ProjectSockets>>>>,
    own: Arc<Semaphore>,
}

/// A socket, until it is dropped.
#[derive(Debug)]
pub(super) struct SocketPermit {
    _all: OwnedSemaphorePermit,
    _project: Option<ProjectPermit>,
    _own: OwnedSemaphorePermit,
}

impl SandboxSockets {
    /// Those of another sandbox of this process.
    pub(super) fn new() -> Self {
        ALL.sandbox()
    }

    /// Says which project it is of.
    pub(super) fn belong_to(&self, project: Arc<ProjectSockets>) {
        *self.project.lock() = Some(project);
    }

    /// Takes one, or says why there is none left.
    pub(super) fn take(&self) -> Result<SocketPermit, NoSocket> {
        let own = Arc::clone(&self.own).try_acquire_owned().map_err(|_| NoSocket::Sandbox)?;
        let project = self.project.lock().clone();
        let project = project.map(|project| project.take()).transpose()?;
        let all = Arc::clone(&self.all).try_acquire_owned().map_err(|_| NoSocket::Server)?;
        Ok(SocketPermit { _all: all, _project: project, _own: own })
    }
}

/// Tests with sandboxes that have few.
#[cfg(test)]
impl SandboxSockets {
    pub(super) fn few(count: usize) -> Self {
        let all = Arc::new(Semaphore::new(count));
        let own = Arc::clone(&all);
        Self { own, project: Arc::default(), all: Arc::new(Semaphore::new(count)) }
    }
}

#[cfg(test)]
mod tests {
    use super::{NoSocket, ProjectSockets, SocketBudget};

    #[test]
    fn one_sandbox_does_not_take_what_the_others_need() {
        let budget = SocketBudget::new(4096);
        let (first, second) = (budget.sandbox(), budget.sandbox());
        let mut held: Vec<_> = std::iter::from_fn(|| first.take().ok()).collect();
        assert_eq!(held.len(), 256);
        assert!(second.take().is_ok());
        held.pop();
        assert!(first.take().is_ok(), "what is dropped is there again");
        // Many together have no more than their part.
        let many: Vec<_> = (0..20).map(|_| budget.sandbox()).collect();
        held.extend(many.iter().flat_map(|one| std::iter::from_fn(|| one.take().ok())));
        assert_eq!(held.len(), 1024);
        assert_eq!(second.take().unwrap_err(), NoSocket::Server);
    }

    #[test]
    fn one_project_does_not_take_what_the_others_need() {
        let budget = SocketBudget::new(4096);
        let (mine, theirs) = (ProjectSockets::new(Some(300)), ProjectSockets::new(Some(300)));
        let many = |project: &std::sync::Arc<ProjectSockets>| {
            let sandbox = budget.sandbox();
            sandbox.belong_to(project.clone());
            sandbox
        };
        let mut held = Vec::new();
        let sandboxes: Vec<_> = (0..10).map(|_| many(&mine)).collect();
        held.extend(sandboxes.iter().flat_map(|one| std::iter::from_fn(|| one.take().ok())));
        assert_eq!(held.len(), 300);
        let refused = sandboxes[9].take().unwrap_err();
        assert_eq!(refused, NoSocket::Project(300));
        assert!(refused.to_string().contains("the project's sandboxes may have 300"), "{refused}");
        assert!(many(&theirs).take().is_ok());
        // Another number holds from now on; what is open stays open.
        mine.set(Some(250));
        held.truncate(260);
        assert!(sandboxes[9].take().is_err());
        held.truncate(249);
        held.push(sandboxes[9].take().expect("one is free"));
        assert!(sandboxes[9].take().is_err());
        // Those of other projects do not count, and half of all is the default.
        held.clear();
        mine.set(None);
        assert!(sandboxes[9].take().is_ok());
        assert_eq!(SocketBudget::new(4096).project, 512);
    }
}
