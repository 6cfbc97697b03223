//! Getting rid of trees, however deep, without making anyone wait.
//!
//! A tree to be removed is renamed into `tmp/`, which is one step and cannot be half done, and then
//! deleted by a thread of its own. What that thread has not done when the daemon ends is done
//! when the store is next opened.
//!
//! *Deletion is slow on purpose.* Every unlink is part of a transaction of the filesystem's journal, and whoever syncs waits
//! for all of it. So it is done in the background ([`super::background`]). Other chores have a thread of their own and wait for no
//! deletion.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};

use rustix::fs::{AtFlags, FileType};

use super::background;
use super::manifest::list;
use super::tree::{Place, file_type};
use super::{Result, Store, io_error};

/// The threads that delete, and do what else can wait.
#[derive(Debug)]
pub(super) struct Chores {
    /// Taken when the store closes.
    deletions: Option<Sender<Order>>,
    /// Taken when the store closes.
    errands: Option<Sender<Order>>,
    closing: Arc<AtomicBool>,
    workers: Vec<JoinHandle<()>>,
}

enum Order {
    Delete(PathBuf),
    Run(Chore),
    /// Say when all before it is done.
    Tell(Sender<()>),
    Then(tokio::sync::oneshot::Sender<()>),
}

/// Something that can wait, and need not happen at all when the store closes first.
pub(super) type Chore = Box<dyn FnOnce() + Send>;

impl Chores {
    pub(super) fn start() -> io::Result<Self> {
        let closing = Arc::new(AtomicBool::new(false));
        let mut workers = Vec::new();
        let mut start = |name: &str| -> io::Result<Sender<Order>> {
            let (orders, receiver) = mpsc::channel();
            let seen = Arc::clone(&closing);
            let worker = thread::Builder::new().name(name.to_owned());
            workers.push(worker.spawn(move || work_off(&receiver, &seen))?);
            Ok(orders)
        };
        let (deletions, errands) = (Some(start("keep-delete")?), Some(start("keep-chores")?));
        Ok(Self { deletions, errands, closing, workers })
    }

    /// Has `chore` done some time later. It must not hold the store, which waits for it to close.
    pub(super) fn run(&self, chore: Chore) {
        if let Some(orders) = &self.errands {
            // The worker only ends after the store.
            let _ = orders.send(Order::Run(chore));
        }
    }

    fn send(&self, order: Order) {
        if let Some(orders) = &self.deletions {
            // The worker only ends after the store.
            let _ = orders.send(order);
        }
    }
}

impl Drop for Chores {
    fn drop(&mut self) {
        self.closing.store(true, Ordering::Relaxed);
        (self.deletions, self.errands) = (None, None);
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

fn work_off(orders: &Receiver<Order>, closing: &AtomicBool) {
    background::enter();
    for order in orders {
        match order {
            Order::Delete(path) if !closing.load(Ordering::Relaxed) => {
                if let Err(error) = remove_slowly(&path, closing) {
                    tracing::warn!(path = %path.display(), error = &error as &dyn std::error::Error,
                        "could not delete all of it; it is tried again at the next start");
                }
            }
            Order::Run(chore) if !closing.load(Ordering::Relaxed) => chore(),
            Order::Delete(_) | Order::Run(_) => {}
            Order::Tell(done) => {
                let _ = done.send(());
            }
            Order::Then(done) => {
                let _ = done.send(());
            }
        }
    }
}

impl Store {
    /// Orders everything in `tmp/` deleted.
    pub(super) fn empty_tmp(&self) -> Result<()> {
        for path in list(&self.tmp_dir())? {
            self.inner.chores.send(Order::Delete(path));
        }
        Ok(())
    }

    /// Makes `dir` vanish at once; the space comes back a little later.
    pub(super) fn discard_dir(&self, dir: &Path, label: &str) -> Result<()> {
        let grave = self.fresh_tmp(label);
        match fs::rename(dir, &grave) {
            Ok(()) => self.inner.chores.send(Order::Delete(grave)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(io_error("remove", dir)(error)),
        }
        Ok(())
    }

    /// Waits until everything discarded so far has been deleted, without a thread.
    pub async fn deletions_done(&self) {
        let (done, told) = tokio::sync::oneshot::channel();
        self.inner.chores.send(Order::Then(done));
        let _ = told.await;
    }

    /// Waits until everything discarded so far has been deleted.
    ///
    /// Only for who is alone with the store, or has nowhere to put what it is about to write.
    pub(super) fn await_chores(&self) {
        let (done, told) = mpsc::channel();
        self.inner.chores.send(Order::Tell(done));
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
    empty(Place::root(path)?, closing)?;
    if closing.load(Ordering::Relaxed) {
        return Ok(());
    }
    fs::remove_dir(path).map_err(io_error("remove", path))
}

/// Deletes everything in a directory.
pub(super) fn empty(root: Place, closing: &AtomicBool) -> Result<()> {
    enum Step {
        Enter(Place),
        Leave(Place),
    }
    // The root itself stays: only what is below it is left by removal.
    let mut steps = Vec::new();
    let mut next = Some(Step::Enter(root));
    while let Some(step) = next.take().or_else(|| steps.pop()) {
        if closing.load(Ordering::Relaxed) {
            return Ok(());
        }
        let place = match step {
            Step::Leave(place) => {
                place.remove()?;
                background::step();
                continue;
            }
            Step::Enter(place) => place,
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
                steps.push(Step::Leave(child.clone()));
                steps.push(Step::Enter(child));
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
