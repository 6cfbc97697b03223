//! QEMU, the hypervisor: decides how it is started and how it is controlled.
//!
//! - `command_line`: the arguments and open files of a QEMU process. Pure.
//! - `qmp`: the client of its control socket (QEMU Machine Protocol).
//! - `warm_hypervisors`: QEMU processes that are started before a machine needs them.
//!
//! What a machine is and which files it gets is decided above, in `lifecycle` and `disk`.

pub(super) mod command_line;
pub(super) mod qmp;
pub(super) mod warm_hypervisors;

pub use self::command_line::Accelerator;
pub(super) use self::command_line::{
    Beginning, Chain, DeviceSlot, INITRAMFS, KERNEL, LATER_FD, LAYOUT, LINK_FD, Layout,
    MountDevices, QMP_FD, Shape, command_line, slots,
};
pub(super) use self::qmp::Qmp;
