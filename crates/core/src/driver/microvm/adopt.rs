//! Assigns a machine of the warm pool to a sandbox.
//!
//! On the host a machine consists of two parts: its directory (sockets, record, plan) and its disks. Both are moved, the record last;
//! from then on the machine belongs to the sandbox. The process, its user and its control group stay as they are: the record names the
//! group, and the plan the CPU time that was used before. After a failure on the way, recovery ends the machine under both names.

use std::fs;
use std::path::Path;

use rustix::fs::FlockOperation;
use sandkeep_proto::cage::RECORD;
use serde::Serialize;
use serde_json::json;

use super::qemu::{Qmp, warm_hypervisors};
use super::{Microvm, PLAN};
use crate::driver::host::{broken, failed, lock};
use crate::driver::{DriverError, DriverResult, Link, Machine, MachineLoad, MachineUsage};
use crate::failpoint;
use crate::model::MachineKey;

impl Microvm {
    /// Suspends a machine.
    pub(super) fn hold(&self, key: &MachineKey) -> DriverResult<()> {
        let held =
            Qmp::connect(&self.host.directory(key)).and_then(|mut qmp| qmp.ask("stop", json!({})));
        held.map(drop).map_err(|error| broken("hold the machine", &error))
    }

    /// Makes the machine `from` the machine `to`, and resumes it.
    pub(super) fn adopt(&self, from: &MachineKey, to: &Machine) -> DriverResult<Link> {
        let _ours_held = self.host.claim(&to.key)?;
        let (theirs, ours) = (self.host.directory(from), self.host.directory(&to.key));
        let absent = || DriverError::Absent { key: from.clone() };
        let held = lock(&theirs, FlockOperation::LockShared)?.ok_or_else(absent)?;
        let (mut record, mut plan, _process) = self.demand(from)?;
        plan.used_before += self.usage(from).cpu;
        let disks = to.root.disk_dir();
        fs::rename(&plan.disk_dir, &disks).map_err(failed("move disks to", &disks))?;
        plan.disk_dir = disks;
        failpoint::pass("adopt.disks");
        record.group.get_or_insert_with(|| from.as_str().to_owned());
        replace(&theirs, RECORD, &record)?;
        replace(&ours, PLAN, &plan)?;
        warm_hypervisors::hand_over(&theirs, &ours).map_err(failed("move a machine to", &ours))?;
        drop(held);
        failpoint::pass("adopt.moved");
        self.go_on(&to.key)?;
        Ok(self.link(&to.key))
    }

    /// What a machine has used since it is somebody's.
    pub(super) fn usage(&self, key: &MachineKey) -> MachineUsage {
        let usage = self.host.usage(key);
        let before = self.plan(key).map(|plan| plan.used_before).unwrap_or_default();
        MachineUsage { cpu: usage.cpu.saturating_sub(before), ..usage }
    }

    /// What a machine uses at this moment. Only its own kernel knows its processes.
    pub(super) fn load(&self, key: &MachineKey) -> MachineLoad {
        MachineLoad { used: self.usage(key), processes: None, ..self.host.load(key) }
    }
}

/// Writes a file anew, so that it is either the old or the new one.
fn replace(directory: &Path, name: &str, what: &impl Serialize) -> DriverResult<()> {
    let (path, fresh) = (directory.join(name), directory.join(format!("{name}.new")));
    let text = serde_json::to_vec(what).map_err(|error| broken("describe the machine", &error))?;
    let written = fs::write(&fresh, text).and_then(|()| fs::rename(&fresh, &path));
    written.map_err(failed("write", &path))
}
