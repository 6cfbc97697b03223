//! How fast a machine may write to its disks.
//!
//! The hypervisor holds writes back before they reach a file (`block_set_io_throttle`), so the
//! guest sees no error. It continues with everything that needs no write. The limit is the
//! hypervisor's: it stays when the daemon dies, and a restored machine begins without. A file in
//! the machine's directory records the limit for the next daemon.
//!
//! What stops the hypervisor for a moment (a capture) lets the requests through that it has taken already: as many as its queues
//! hold.

use std::fs::{self, File};
use std::io;

use rustix::fs::FlockOperation;
use sandkeep_proto::machine::{DISK, MOUNT_SLOTS, mount_disk};
use serde_json::json;

use super::Microvm;
use super::qemu::Qmp;
use crate::driver::host::{broken, failed, lock};
use crate::driver::{DriverResult, WriteLimit};
use crate::model::MachineKey;

/// In a machine's directory while its writes are limited.
const LIMITED: &str = "writes-limited";

impl Microvm {
    pub(super) fn limit_writes(&self, key: &MachineKey, limit: WriteLimit) -> DriverResult<()> {
        let run_dir = self.host.directory(key);
        let _lock = lock(&run_dir, FlockOperation::LockShared)?;
        self.demand(key)?;
        let mark = run_dir.join(LIMITED);
        if limit != WriteLimit::None {
            // First: a daemon that dies in between leaves one that can be found.
            File::create(&mark).map_err(failed("create", &mark))?;
        }
        let bytes = match limit {
            WriteLimit::None => 0,
            WriteLimit::Slow(bytes) => bytes.max(1),
            // The least there is. It lets one request through, and the next when that is paid for: after days.
            WriteLimit::Hold => 1,
        };
        let disks = std::iter::once(DISK.to_owned()).chain((0..MOUNT_SLOTS).map(mount_disk));
        let limited = Qmp::connect(&run_dir).and_then(|mut qmp| {
            for disk in disks {
                let rates = json!({
                    "id": disk, "bps": 0, "bps_rd": 0, "bps_wr": bytes, "iops": 0, "iops_rd": 0, "iops_wr": 0,
                });
                qmp.ask("block_set_io_throttle", rates)?;
            }
            Ok(())
        });
        limited.map_err(|error| broken("limit what the machine writes", &error))?;
        if limit == WriteLimit::None {
            match fs::remove_file(&mark) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(failed("remove", &mark)(error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    pub(super) fn holds_writes(&self, key: &MachineKey) -> bool {
        self.host.directory(key).join(LIMITED).exists()
    }
}
