//! Machines that are not assigned to a sandbox: those that templates are made from, and those of the warm pool.

use std::path::PathBuf;
use std::sync::Arc;

use crate::driver::{Driver, Machine};
use crate::engine::machine::Machines;
use crate::engine::{Error, Result};
use crate::model::{Limits, MachineKey, RootFs};

impl Machines {
    /// An unassigned machine, with a directory of its own. No manifest names what it writes, so that is not a layer: what is left of it is removed when a
    /// daemon starts.
    pub(in crate::engine) async fn prepare_unassigned(
        &self,
        key: &MachineKey,
        root: RootFs,
        limits: Limits,
    ) -> Result<Machine> {
        let place = self.unassigned_dir(key);
        let machine = Machine {
            key: key.clone(),
            hostname: "sandkeep".to_owned(),
            root: RootFs { writable_dir: place.clone(), ..root },
            uids: self.take_uids()?,
            limits,
            mounts: Vec::new(),
        };
        for dir in [&place, &place.join("diff"), &place.join("work")] {
            if let Err(error) = tokio::fs::create_dir_all(dir).await {
                self.release_uids(Some(machine.uids));
                self.remove_unassigned_dir(&machine).await;
                return Err(Error::invalid("place", format!("{}: {error}", dir.display())));
            }
        }
        Ok(machine)
    }

    fn unassigned_dir(&self, key: &MachineKey) -> PathBuf {
        self.store.data_dir().join("tmp").join(key.as_str())
    }

    pub(in crate::engine) async fn remove_unassigned_dir(&self, machine: &Machine) {
        let _ = tokio::fs::remove_dir_all(self.unassigned_dir(&machine.key)).await;
    }

    /// Removes an unassigned machine and everything of it.
    pub(in crate::engine) async fn end_unassigned(
        &self,
        driver: &Arc<dyn Driver>,
        machine: Machine,
    ) -> Result<()> {
        // One that may be alive keeps its ids and its files.
        driver.stop(&machine.key).await?;
        self.release_uids(Some(machine.uids));
        self.remove_unassigned_dir(&machine).await;
        Ok(())
    }
}
