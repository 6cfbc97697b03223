//! Deletes trees in the background.
//!
//! A tree is renamed into `tmp/`, which is atomic, and then deleted by a thread of its own. What is left when
//! the daemon ends is deleted after the store is next opened.
//!
//! *Deletion is slow on purpose.* Every unlink is part of a transaction of the filesystem's journal, and every
//! sync waits for all of it. So deletion is throttled ([`crate::store::background`]). Other tasks have a thread
//! of their own and do not wait for deletions.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};

use rustix::fs::{AtFlags, FileType};

use crate::store::background;
use crate::store::manifest::list;
use crate::store::tree::{TreeDir, file_type};
use crate::store::{Result, Store, io_error};

/// Threads for deletions and for other tasks that can wait.
#[derive(Debug)]
pub(in crate::store) struct DeletionThreads {
    /// Taken when the store closes.
    deletions: Option<Sender<Request>>,
    /// Taken when the store closes.
    tasks: Option<Sender<Request>>,
    closing: Arc<AtomicBool>,
    workers: Vec<JoinHandle<()>>,
}

enum Request {
    Delete(PathBuf),
    Run(Task),
    /// Say when all before it is done.
    Tell(Sender<()>),
    Then(tokio::sync::oneshot::Sender<()>),
}

/// Work that can wait. It is dropped if the store closes first.
pub(in crate::store) type Task = Box<dyn FnOnce() + Send>;

impl DeletionThreads {
    pub(in crate::store) fn start() -> io::Result<Self> {
        let closing = Arc::new(AtomicBool::new(false));
        let mut workers = Vec::new();
        let mut start = |name: &str| -> io::Result<Sender<Request>> {
            let (requests, receiver) = mpsc::channel();
            let seen = Arc::clone(&closing);
            let worker = thread::Builder::new().name(name.to_owned());
            workers.push(worker.spawn(move || run_requests(&receiver, &seen))?);
            Ok(requests)
        };
        let (deletions, tasks) = (Some(start("keep-delete")?), Some(start("keep-tasks")?));
        Ok(Self { deletions, tasks, closing, workers })
    }

    /// Has `task` done some time later. It must not hold the store, which waits for it to close.
    pub(in crate::store) fn run(&self, task: Task) {
        if let Some(requests) = &self.tasks {
            // The worker only ends after the store.
            let _ = requests.send(Request::Run(task));
        }
    }

    fn send(&self, request: Request) {
        if let Some(requests) = &self.deletions {
            // The worker only ends after the store.
            let _ = requests.send(request);
        }
    }
}

impl Drop for DeletionThreads {
    fn drop(&mut self) {
        self.closing.store(true, Ordering::Relaxed);
        (self.deletions, self.tasks) = (None, None);
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

fn run_requests(requests: &Receiver<Request>, closing: &AtomicBool) {
    background::enter();
    for request in requests {
        match request {
            Request::Delete(path) if !closing.load(Ordering::Relaxed) => {
                if let Err(error) = remove_slowly(&path, closing) {
                    tracing::warn!(path = %path.display(), error = &error as &dyn std::error::Error,
                        "could not delete a tree completely; retrying at the next start");
                }
            }
            Request::Run(task) if !closing.load(Ordering::Relaxed) => task(),
            Request::Delete(_) | Request::Run(_) => {}
            Request::Tell(done) => {
                let _ = done.send(());
            }
            Request::Then(done) => {
                let _ = done.send(());
            }
        }
    }
}

impl Store {
    /// Deletes everything in `tmp/`, in the background.
    pub(in crate::store) fn empty_tmp(&self) -> Result<()> {
        for path in list(&self.tmp_dir())? {
            self.inner.deletion_threads.send(Request::Delete(path));
        }
        Ok(())
    }

    /// Removes `dir` at once; its space is freed later.
    pub(in crate::store) fn discard_dir(&self, dir: &Path, label: &str) -> Result<()> {
        let doomed = self.fresh_tmp(label);
        match fs::rename(dir, &doomed) {
            Ok(()) => self.inner.deletion_threads.send(Request::Delete(doomed)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(io_error("remove", dir)(error)),
        }
        Ok(())
    }

    /// Waits until everything discarded so far has been deleted, without a thread.
    pub async fn deletions_done(&self) {
        let (done, told) = tokio::sync::oneshot::channel();
        self.inner.deletion_threads.send(Request::Then(done));
        let _ = told.await;
    }

    /// Waits until everything discarded so far has been deleted.
    ///
    /// Only for who is alone with the store, or has nowhere to put what it is about to write.
    pub(in crate::store) fn wait_for_deletions(&self) {
        let (done, told) = mpsc::channel();
        self.inner.deletion_threads.send(Request::Tell(done));
        let _ = told.recv();
    }
}

/// Deletes a file or a tree, with rests. Stops early when `closing` becomes true.
fn remove_slowly(path: &Path, closing: &AtomicBool) -> Result<()> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => {}
        Ok(_) => return fs::remove_file(path).map_err(io_error("remove", path)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(io_error("stat", path)(error)),
    }
    empty(TreeDir::root(path)?, closing)?;
    if closing.load(Ordering::Relaxed) {
        return Ok(());
    }
    fs::remove_dir(path).map_err(io_error("remove", path))
}

/// Deletes everything in a directory.
pub(in crate::store) fn empty(root: TreeDir, closing: &AtomicBool) -> Result<()> {
    enum RemovalStep {
        Enter(TreeDir),
        Leave(TreeDir),
    }
    // The root itself stays: only what is below it is left by removal.
    let mut steps = Vec::new();
    let mut next = Some(RemovalStep::Enter(root));
    while let Some(step) = next.take().or_else(|| steps.pop()) {
        if closing.load(Ordering::Relaxed) {
            return Ok(());
        }
        let place = match step {
            RemovalStep::Leave(place) => {
                place.remove()?;
                background::step();
                continue;
            }
            RemovalStep::Enter(place) => place,
        };
        let dir = place.open()?;
        for entry in dir.entries()? {
            if closing.load(Ordering::Relaxed) {
                return Ok(());
            }
            let is_dir = match entry.kind {
                FileType::Unknown => file_type(&dir.stat(&entry.name)?) == FileType::Directory,
                kind => kind == FileType::Directory,
            };
            if is_dir {
                let child = dir.child(&entry.name);
                steps.push(RemovalStep::Leave(child.clone()));
                steps.push(RemovalStep::Enter(child));
                continue;
            }
            match rustix::fs::unlinkat(dir.fd(), entry.name.as_c_str(), AtFlags::empty()) {
                Ok(()) | Err(rustix::io::Errno::NOENT) => background::step(),
                Err(error) => return Err(dir.failure("remove", &entry.name, error)),
            }
        }
    }
    Ok(())
}
