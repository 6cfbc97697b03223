//! Names of sandboxes whose manifest is missing or cannot be read.
//!
//! Such a sandbox cannot be used, and its name is not given to another: a caller who asks for it by
//! name would get an empty machine and take it for their own. The names come from its snapshots,
//! which carry them; from what can still be read of the manifest; and from what the index
//! remembered of it (`quarantine/`).
//!
//! A name is free again when the manifest is back, or when everything that is left of the sandbox was deleted or says that the
//! sandbox may be gone: then a survey (`evidence`) does not find it any more.

use std::collections::HashMap;

use parking_lot::Mutex;

use crate::engine::Result;
use crate::engine::records::Records;
use crate::model::{Name, SandboxId};
use crate::store::DiskListing;

/// A sandbox that is known to have existed and cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lost {
    /// Its name.
    pub name: Name,
    /// Its id.
    pub id: SandboxId,
}

/// The names that are reserved for lost sandboxes, by project.
#[derive(Debug, Default)]
pub(in crate::engine) struct LostNames(Mutex<HashMap<(Name, Name), SandboxId>>);

impl LostNames {
    /// The lost sandbox that has this name.
    pub(in crate::engine) fn get(&self, project: &Name, name: &Name) -> Option<Lost> {
        let names = self.0.lock();
        // Usually there is none: the key is not even made.
        if names.is_empty() {
            return None;
        }
        let id = names.get(&(project.clone(), name.clone()))?;
        Some(Lost { name: name.clone(), id: id.clone() })
    }
}

impl Records {
    /// Finds the names of lost sandboxes anew.
    pub(in crate::engine) async fn find_lost_names(&self, listing: &DiskListing) -> Result<()> {
        let mut names = HashMap::new();
        let orphans = self.references.counts().known_manifests.orphans();
        for (snapshot, sandbox) in orphans {
            if listing.trashed.contains(sandbox.as_str()) {
                continue;
            }
            if let Some(snapshot) = self.db.snapshot(&snapshot).await? {
                names.insert((snapshot.project, snapshot.sandbox_name), sandbox);
            }
        }
        let unread = self.references.doubts.unread_sandboxes();
        for found in self.store.names_of_unreadable_sandboxes(unread, &listing.remembered).await? {
            names.insert((found.project, found.name), found.id);
        }
        names.retain(|_, id| !self.references.counts().known_manifests.has_sandbox(id));
        *self.lost_names.0.lock() = names;
        Ok(())
    }
}
