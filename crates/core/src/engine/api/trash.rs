//! Deleted sandboxes, and files that the guard quarantined.

use std::sync::Arc;

use crate::engine::snapshots::trash::TrashItem;
use crate::engine::{Engine, Error, Result};
use crate::model::{Name, Quarantine, Sandbox, SnapshotId};

impl Engine {
    /// Lists the sandboxes in the trash, the latest first; of every project if none is named.
    #[must_use]
    pub fn trash(&self, project: Option<&Name>) -> Vec<TrashItem> {
        self.parts.storage.trash.items(project)
    }

    /// Brings a sandbox back from the trash, by its id or its name; of several of one name, the one that was deleted last. It is at rest
    /// then, and has the snapshots it had. It is called `name` if that is given.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NotInTrash`], or [`Error::NameTaken`] when there is a sandbox of that name by now.
    pub async fn restore(
        &self,
        project: &Name,
        which: &str,
        name: Option<Name>,
    ) -> Result<Sandbox> {
        let item = self.trash(Some(project)).into_iter();
        let item =
            item.into_iter().find(|item| item.id.as_str() == which || item.name.as_str() == which);
        let id = item.ok_or_else(|| Error::NotInTrash(which.to_owned()))?.id;
        let (which, turn) = (which.to_owned(), id.clone());
        let trash = Arc::clone(&self.parts.storage.trash);
        let work = move |_slot| async move { trash.restore(&id, which, name).await };
        self.parts.turns.turn(turn, work).await
    }

    /// Deletes everything in the trash for good, of one project or of all. Layers that no manifest names belong to no project and go with
    /// all. Says how many sandboxes that were; the space is free a little later.
    ///
    /// # Errors
    ///
    /// Returns [`Error`] when something could not be deleted.
    pub async fn empty_trash(&self, project: Option<&Name>) -> Result<usize> {
        self.parts.storage.trash.empty(project).await
    }

    /// What is kept aside, newest first.
    ///
    /// # Errors
    ///
    /// Returns [`Error`] when the store cannot be read.
    pub async fn quarantines(&self) -> Result<Vec<Quarantine>> {
        let mut all = self.parts.context.store.scan::<Quarantine>().await?.good;
        all.sort_by(|a, b| (b.at, &b.id).cmp(&(a.at, &a.id)));
        Ok(all)
    }

    /// Removes what is kept aside, for good.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoQuarantine`] when there is none of that id.
    pub async fn remove_quarantine(&self, id: &SnapshotId) -> Result<Quarantine> {
        let known = self.parts.context.store.scan::<Quarantine>().await?.good;
        let found = known.into_iter().find(|known| known.id == *id);
        let found = found.ok_or_else(|| Error::NoQuarantine(id.clone()))?;
        self.parts.context.store.remove_quarantine(id).await?;
        Ok(found)
    }
}
