//! Renames a sandbox.
//!
//! The index decides who gets a name, atomically. A daemon that dies before the record is saved finds the former
//! name in the record: the rename was not acknowledged then.

use std::sync::Arc;

use crate::engine::error::error_chain;
use crate::engine::lifecycle::Lifecycle;
use crate::engine::{Error, Result};
use crate::failpoint;
use crate::model::{Name, Sandbox};
use crate::store::Durability;

impl Lifecycle {
    pub(in crate::engine) async fn rename(
        self: &Arc<Self>,
        project: &Name,
        name: &Name,
        to: Name,
    ) -> Result<Sandbox> {
        if let Some(lost) = self.records.lost_names.get(project, &to) {
            return Err(Error::Lost(lost));
        }
        let id = self.find(project, name).await?.id;
        let name = name.clone();
        self.turn(id.clone(), move |this, slot| async move {
            let mut sandbox = this.reread(&slot, &id, &name).await?;
            if sandbox.name == to {
                return Ok(sandbox);
            }
            if sandbox.name != name {
                // Another call renamed it meanwhile.
                return Err(this.no_such(&sandbox.project, &name));
            }
            if !this.context.catalog.rename(&id, &to).await? {
                return Err(Error::NameTaken(to));
            }
            failpoint::pass("rename.reserved");
            sandbox.name = to;
            if let Err(error) = this.records.record(&mut sandbox, Durability::Synced).await {
                if let Err(error) = this.context.catalog.rename(&id, &name).await {
                    let error: &dyn std::error::Error = &error;
                    tracing::error!(sandbox = %name, error = error_chain(error), "the former name of a sandbox could not be reserved again after a failed rename; the next start of the server reserves it");
                }
                return Err(error);
            }
            this.context.events.renamed(&sandbox, &name);
            if let Some(live) = slot.live() {
                live.set_sandbox(sandbox.clone());
            }
            Ok(sandbox)
        })
        .await
    }
}
