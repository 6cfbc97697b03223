//! The optional power of a driver to keep the memory of its machines.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;

#[cfg(doc)]
use super::{Driver, OwnDisk, WARM_VM};
use super::{DriverResult, Link, Machine};
use crate::model::{Fingerprint, MachineKey, Size};

/// Captures the memory of live machines and starts machines from it.
///
/// Reached through [`Driver::memory`]. It says nothing about where the files of a machine are: that is [`OwnDisk`], which a
/// driver may have or lack independently of this.
///
/// # Terms
///
/// - *image*: the state of one machine at one moment. A chain of memory layers, given as directories, the topmost first.
/// - *memory layer*: what one capture wrote. Files `devices`, `index` and `pages`, as in `docs/formats/memory.md`, and for a driver
///   with [`OwnDisk`] also [`OwnDisk::disk_file`].
/// - *fingerprint*: everything that must be the same for an image to be of use: hypervisor, processor, kernel, sizes.
/// - *held*: alive, and executing nothing.
///
/// # Lifecycle
///
/// ```text
///            restore                capture(Hold), hold
///   absent ----------> alive ------------------------------> held
///      ^                 ^  |  capture(Continue)               |
///      |                 |  +--> alive                         |
///      |                 +------------- go_on, adopt ----------+
///      +------- Driver::stop ------ from every state ----------+
/// ```
///
/// # What every driver with this power promises
///
/// - An image is only read. Any number of machines can be started from it, at the same time.
/// - `capture` is all or nothing: after an error the machine runs, and nothing in `into` counts. After success everything is on
///   stable storage.
/// - The driver remembers no captures. The engine passes the layers below to every capture, and keeps every layer that a later
///   one stands on.
/// - A held machine stays held when the daemon dies. [`go_on`](Self::go_on) of a running machine does nothing, so the next daemon
///   calls it for every machine that it finds.
#[async_trait]
pub trait KeepsMemory: Send + Sync {
    /// What an image must have been made with to be of use for this machine, on this host, now.
    async fn fingerprint(&self, machine: &Machine) -> DriverResult<Fingerprint>;

    /// Starts a machine where an image was captured: memory, devices and, with [`OwnDisk`], its disk. The machine finds `first` in
    /// its serial port when it resumes.
    async fn restore(
        &self,
        machine: &Machine,
        image: &[PathBuf],
        first: &[u8],
    ) -> DriverResult<Restored>;

    /// Captures a live machine into an empty directory, as the layer above `below`: the image the machine was started from, and on
    /// top of it what was captured of the machine since. Only pages that differ from those of `below` are written.
    ///
    /// With [`OwnDisk`] the topmost disk is linked into the layer, and the machine continues with a
    /// fresh one above it. That cannot be undone, so at least the disk of every successful capture
    /// must stay in `below`.
    async fn capture(
        &self,
        key: &MachineKey,
        into: &Path,
        below: &[PathBuf],
        then: Then,
    ) -> DriverResult<Captured>;

    /// Merges adjacent layers of an image, the topmost first, into one, in an empty directory. In their place it is the same
    /// image. The layers are only read; machines may be using them. After an error nothing in `into` counts.
    async fn merge(&self, run: &[PathBuf], into: &Path) -> DriverResult<()>;

    /// Holds a machine until [`go_on`](Self::go_on).
    async fn hold(&self, key: &MachineKey) -> DriverResult<()>;

    /// Resumes a held machine.
    async fn go_on(&self, key: &MachineKey) -> DriverResult<()>;

    /// Renames the live machine `from` to `to`, and resumes it. `from` must begin with [`WARM_VM`];
    /// `to` has the same limits and the same root but for what is written. What `from` wrote moves
    /// to the root of `to`; what it used until now is not counted for `to`. After an error parts of
    /// both may be left, for [`Driver::stop`].
    async fn adopt(&self, from: &MachineKey, to: &Machine) -> DriverResult<Link>;
}

/// What becomes of a machine that was captured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// It continues at once.
    Continue,
    /// It is held, for [`Driver::stop`] or [`KeepsMemory::go_on`].
    Hold,
}

/// What a capture wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Captured {
    /// What the image was made with.
    pub fingerprint: Fingerprint,
    /// The machine's RAM.
    pub ram: Size,
    /// Pages written.
    pub pages: u64,
    /// How long the machine was suspended.
    pub stood: Duration,
    /// What its root was made of, as [`OwnDisk::roots`] returns it; empty without that power.
    pub roots: Vec<String>,
}

/// A machine that resumed where an image was captured.
#[derive(Debug)]
pub struct Restored {
    /// Where its agent is reached.
    pub link: Link,
    /// A connection to its serial port from before it resumed. There was a listener when the
    /// machine was captured; a machine that sees the port closed, and a moment later open again,
    /// may read the first while it answers the second.
    pub line: UnixStream,
}
