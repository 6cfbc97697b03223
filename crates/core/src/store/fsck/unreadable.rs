//! Project and name of a sandbox whose manifest is missing or damaged, as far as they can still be read.

use std::fs;
use std::path::PathBuf;

use serde::Deserialize;

use crate::model::{Name, SandboxId};
use crate::store::manifest::versions_of;
use crate::store::{Result, Store, blocking};

/// The part of a manifest that says which sandbox it is about.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct UnreadableSandbox {
    /// Its id.
    pub id: SandboxId,
    /// Its project.
    pub project: Name,
    /// Its name.
    pub name: Name,
}

impl Store {
    /// Reads names from what is left of the manifests of some sandboxes, and from what the index remembered of others (`places` below
    /// the data directory). One of which nothing can be read is left out.
    ///
    /// # Errors
    ///
    /// Returns an error when the daemon shuts down.
    pub async fn names_of_unreadable_sandboxes(
        &self,
        unread: Vec<SandboxId>,
        remembered: &[String],
    ) -> Result<Vec<UnreadableSandbox>> {
        let data = self.data_dir().to_owned();
        let places: Vec<String> =
            remembered.iter().filter(|place| place.starts_with("sandboxes/")).cloned().collect();
        if unread.is_empty() && places.is_empty() {
            return Ok(Vec::new());
        }
        let remembered =
            places.iter().map(|place| data.join(crate::store::gc::disk_listing::remembered(place)));
        let files: Vec<PathBuf> = unread
            .iter()
            .flat_map(|id| versions_of(&data.join(format!("sandboxes/{id}/sandbox.json"))))
            .chain(remembered)
            .collect();
        blocking(move || {
            let texts = files.iter().filter_map(|path| fs::read(path).ok());
            Ok(texts.filter_map(|text| serde_json::from_slice(&text).ok()).collect())
        })
        .await
    }
}
