//! Closing what the kernel takes long to close, on a thread beside.
//!
//! The last descriptor of a network device, or of a mount namespace, takes the device or the mounts with it: the kernel unregisters
//! them and waits for all processors to have noticed (20 to 40 ms here). Nothing can be sent or written through them by then, so nobody
//! has to wait for that: neither the caller, nor the thread of the runtime it is on.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// How many are closed at the same time. The next is closed by its caller.
const MOST: usize = 64;

static UNDER_WAY: AtomicUsize = AtomicUsize::new(0);

/// A descriptor that is closed beside when it is dropped.
#[derive(Debug)]
pub(crate) struct ClosedBeside(Option<OwnedFd>);

impl ClosedBeside {
    pub(crate) fn new(descriptor: OwnedFd) -> Self {
        Self(Some(descriptor))
    }

    fn get(&self) -> &OwnedFd {
        // Only `drop` takes it.
        self.0.as_ref().expect("a descriptor until it is dropped")
    }
}

impl AsFd for ClosedBeside {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.get().as_fd()
    }
}

impl AsRawFd for ClosedBeside {
    fn as_raw_fd(&self) -> RawFd {
        self.get().as_raw_fd()
    }
}

impl Drop for ClosedBeside {
    fn drop(&mut self) {
        if let Some(descriptor) = self.0.take() {
            close(descriptor);
        }
    }
}

/// Closes a descriptor on a thread of its own. Where there is no thread to be had, at once.
pub(crate) fn close(descriptor: impl Into<OwnedFd>) {
    let descriptor = descriptor.into();
    let place = Place::take();
    if place.is_none() {
        return;
    }
    // If the thread does not start, the closure is dropped, and with it the descriptor.
    let _ =
        thread::Builder::new().name("release".to_owned()).stack_size(64 << 10).spawn(move || {
            // Not the very last: it holds locks of the kernel's for a moment.
            let _ = rustix::process::setpriority_process(None, 10);
            drop(descriptor);
            drop(place);
        });
}

/// One of those that may be closed at the same time.
struct Place;

impl Place {
    fn take() -> Option<Self> {
        let taken = UNDER_WAY.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| {
            (count < MOST).then_some(count + 1)
        });
        taken.ok().map(|_| Self)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        UNDER_WAY.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::{ClosedBeside, MOST, close};

    #[test]
    fn all_are_closed_however_many_there_are() {
        let mut others = Vec::new();
        for number in 0..MOST * 4 {
            let (ours, other) = UnixStream::pair().expect("a pair");
            match number % 2 {
                0 => close(ours),
                _ => drop(ClosedBeside::new(ours.into())),
            }
            others.push(other);
        }
        for mut other in others {
            other.set_read_timeout(Some(Duration::from_secs(30))).expect("a timeout");
            assert_eq!(other.read(&mut [0]).expect("closed"), 0);
        }
    }
}
