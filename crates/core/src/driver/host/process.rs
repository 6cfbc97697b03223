//! The first process of a machine: whether it is alive, and waiting for its end.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::FlockOperation;
use rustix::process::{Pid, PidfdFlags};
use sandkeep_proto::cage::{Record, start_time};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::{Host, lock, on_thread};
use crate::model::MachineKey;

/// Waits until a machine is no longer alive.
pub(crate) async fn died(host: &Arc<Host>, key: &MachineKey) {
    // The directory appears before the record does, so this waits for a builder's outcome.
    let found = key.clone();
    let process = on_thread(host, host.run_dir(), move |host: &Host| {
        let _lock = lock(&host.directory(&found), FlockOperation::LockExclusive)?;
        Ok(host.alive(&found).map(|(_, process)| process))
    })
    .await;
    if let Ok(Some(process)) = process
        && let Ok(process) = watch(process)
    {
        // Readable means ended; an error would mean the runtime is going down.
        let _ = process.readable().await;
    }
}

#[expect(
    deprecated,
    reason = "its successor is unsafe, for types that may change their descriptor"
)]
fn watch(process: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(process, Interest::READABLE)
}

/// Waits for a process to end. A process that is only waiting to be reaped has ended.
pub(super) fn ended(process: &OwnedFd, patience: Option<&Timespec>) -> bool {
    loop {
        let mut watched = [PollFd::new(process, PollFlags::IN)];
        match rustix::event::poll(&mut watched, patience) {
            Err(rustix::io::Errno::INTR) => {}
            Ok(ready) => return ready > 0,
            Err(_) => return false,
        }
    }
}

/// A hold on the first process of a machine, if it lives.
pub(super) fn process_of(record: &Record) -> Option<OwnedFd> {
    let pid = i32::try_from(record.pid).ok().and_then(Pid::from_raw)?;
    let process = rustix::process::pidfd_open(pid, PidfdFlags::NONBLOCK).ok()?;
    // Read after opening: if the times agree now, the descriptor is that process.
    let stat = fs::read_to_string(format!("/proc/{}/stat", record.pid)).ok()?;
    let same = start_time(&stat) == Some(record.started);
    (same && !ended(&process, Some(&Timespec::default()))).then_some(process)
}
