//! Machines with a kernel of their own. `docs/MICROVM.md` is their design.

pub mod kernel;
pub mod memory;
