//! The optional power of a driver whose machines have a kernel and a disk of their own.

use std::path::PathBuf;

use async_trait::async_trait;

#[cfg(doc)]
use super::{Driver, DriverError, KeepsMemory};
use super::{DriverResult, Link, Machine};
use crate::model::{MachineKey, RootFs};

/// Runs machines that write to a disk of their own, with a kernel of their own, instead of the host's directories.
///
/// Reached through [`Driver::disk`]. Without it, what a machine writes is in [`RootFs::upper`] and the host's kernel holds it to
/// its limits.
///
/// # Terms
///
/// - *disk*: a chain of files in [`RootFs::disk_dir`], in a format that only the driver knows. As
///   long as that directory exists, the disk holds what was written, and `upper` does not.
/// - *packed root*: the lower directories of a root, made into read-only devices.
/// - *assemble*: the first message to the agent: which devices make its root, and its identity. A
///   machine without a restored image that was captured after this waits for it.
/// - *export*: the agent's stream of what is on the disk, which the store turns into a layer.
///
/// # Lifecycle
///
/// ```text
/// Driver::start, boot    the disk is made, or found: the machine waits for `assemble`
/// ...                    writes go to the disk
/// export, Driver::stop   the store has the files; it removes the disk
/// boot, export           the same, for a machine that died before its files were exported
/// ```
///
/// # What every driver with this power promises
///
/// - The guest's kernel keeps the disk within [`Machine::limits`]; the engine counts only for the sake of the host, and has
///   writes held back ([`limit_writes`](Self::limit_writes)) when that runs short of space.
/// - A disk that was written to is never replaced: [`boot`](Self::boot) continues with the one it
///   finds.
/// - Only one live machine writes to a disk.
/// - Packing a root changes nothing in its layers, and packing it again is cheap.
///
/// With [`KeepsMemory`], a memory layer holds the part of the disk that was written since the layer below, so an image is
/// enough to [`boot`](Self::boot) from, even where its memory is of no use.
#[async_trait]
pub trait OwnDisk: Send + Sync {
    /// The name that the disk has in a memory layer.
    fn disk_file(&self) -> &'static str;

    /// Packs a root, and names what it is made of. An image that was captured with other names is of no use for this root.
    ///
    /// # Errors
    ///
    /// [`DriverError::Unpackable`] when the layers hold what cannot be packed.
    async fn roots(&self, root: &RootFs) -> DriverResult<Vec<String>>;

    /// Boots a machine on the disks of an image, which may have no layers, and on the disk that a session left in
    /// [`RootFs::disk_dir`]. [`Driver::start`] boots on a blank disk.
    async fn boot(&self, machine: &Machine, image: &[PathBuf]) -> DriverResult<Link>;

    /// How many devices make the root of a live machine.
    async fn lower(&self, key: &MachineKey) -> DriverResult<u32>;

    /// Says how fast a live machine may write to its disks from now on. Writes that are held back wait, and are carried out
    /// later: the guest's kernel sees no error. It reads, computes and talks meanwhile. What the driver had begun to
    /// write when this is called still goes to the disk.
    ///
    /// It stays so when the daemon dies, and ends with the machine.
    async fn limit_writes(&self, key: &MachineKey, limit: WriteLimit) -> DriverResult<()>;

    /// Whether a machine's writes were limited last. Reads no more than a file's attributes.
    fn holds_writes(&self, key: &MachineKey) -> bool;
}

/// How fast a machine may write to its disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteLimit {
    /// As fast as the disk takes it.
    None,
    /// A limit in bytes per second.
    Slow(u64),
    /// Not at all.
    Hold,
}
