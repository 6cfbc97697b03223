//! Waits a while before it releases the mounts of a dead machine, on a thread of its own.
//!
//! The last descriptor of a mount namespace takes its mounts with it: the kernel forgets every file that was looked at through the
//! overlay, syncs the filesystem below it and waits for all processors to have noticed (20 to 40 ms here). Nothing can be written through
//! them by then, so nothing has to wait for that: neither the caller, nor the thread of the runtime
//! it is on. It is also delayed: right after a machine ended its files are sealed, and the two
//! would share processors and the filesystem's journal.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// How many are waiting or being closed at the same time. The next is closed by its caller.
const MOST: usize = 64;
/// How long mounts are kept: longer than a stop takes.
const LATER: Duration = Duration::from_millis(100);

static UNDER_WAY: AtomicUsize = AtomicUsize::new(0);

/// Closes a descriptor a while later, on a thread of its own. Where there is no thread to be had, at once.
pub(crate) fn close_later(descriptor: impl Into<OwnedFd>) {
    let descriptor = descriptor.into();
    let permit = Permit::take();
    if permit.is_none() {
        return;
    }
    // If the thread does not start, the closure is dropped, and with it the descriptor.
    let _ =
        thread::Builder::new().name("release".to_owned()).stack_size(64 << 10).spawn(move || {
            // Not the very last: it holds locks of the kernel's for a moment.
            let _ = rustix::process::setpriority_process(None, 10);
            thread::sleep(LATER);
            drop(descriptor);
            drop(permit);
        });
}

/// One of those that may be closed at the same time.
struct Permit;

impl Permit {
    fn take() -> Option<Self> {
        let taken = UNDER_WAY.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| {
            (count < MOST).then_some(count + 1)
        });
        taken.ok().map(|_| Self)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        UNDER_WAY.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::{MOST, close_later};

    #[test]
    fn all_are_closed_however_many_there_are() {
        let mut others = Vec::new();
        for _ in 0..MOST * 4 {
            let (ours, other) = UnixStream::pair().expect("a pair");
            close_later(ours);
            others.push(other);
        }
        for mut other in others {
            other.set_read_timeout(Some(Duration::from_secs(30))).expect("a timeout");
            assert_eq!(other.read(&mut [0]).expect("closed"), 0);
        }
    }
}
