//! One thread for work that may wait for the machine's disks: freezing, thawing, taking another
//! identity.
//!
//! It exists from the beginning and never ends. A thread that began or ended with each freeze would
//! be captured in the middle of that, and every machine that is restored would first have to finish
//! it.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};

use super::Machine;

/// Something to do, in its turn.
pub(super) type Job = Box<dyn FnOnce(&Machine) + Send>;

/// Starts it.
pub(super) fn start(machine: &Arc<Machine>) -> std::io::Result<Sender<Job>> {
    let (jobs, heard) = channel();
    let machine = Arc::clone(machine);
    std::thread::Builder::new().spawn(move || attend(&machine, &heard))?;
    Ok(jobs)
}

fn attend(machine: &Machine, jobs: &Receiver<Job>) {
    loop {
        let next = match machine.frozen_for() {
            Some(left) => jobs.recv_timeout(left),
            None => jobs.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match next {
            Ok(job) => job(machine),
            // No thaw came. A filesystem that cannot be thawed now cannot be thawed later.
            Err(RecvTimeoutError::Timeout) => drop(machine.thaw()),
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}
