//! What a driver must be able to do for pause: keep memory, and have disks of its own.

use crate::driver::{Driver, KeepsMemory, OwnDisk};
use crate::engine::Error;
use crate::model::Sandbox;

/// The powers of a driver that pausing takes.
#[derive(Clone, Copy)]
pub(in crate::engine) struct Pausing<'a> {
    pub(in crate::engine) memory: &'a dyn KeepsMemory,
    pub(in crate::engine) disk: &'a dyn OwnDisk,
}

/// Whether sandboxes of a driver can be paused, and with what. The files of a paused sandbox are in its memory image, on the machine's
/// disk. For a driver that keeps memory and has no disks, a pause would have to seal the open layer together with the memory,
/// and a start to restore on a root of layers: until the engine does that, sandboxes of such a driver are stopped instead.
pub(in crate::engine) fn pausing(driver: &dyn Driver) -> Option<Pausing<'_>> {
    Some(Pausing { memory: driver.memory()?, disk: driver.disk()? })
}

pub(in crate::engine) fn no_memory(sandbox: &Sandbox) -> Error {
    Error::NoMemory { name: sandbox.name.clone(), driver: sandbox.config.driver.clone() }
}
