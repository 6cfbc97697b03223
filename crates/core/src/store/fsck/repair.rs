//! Repairs a data directory, on request. Nothing is ever deleted by this.
//!
//! What may name layers (sandboxes, snapshots, drives, images) stays where it is, damaged or not: a
//! collection would take what it names for unreferenced. Only an operator who names it can give it
//! up.

use std::fs;
use std::path::{Path, PathBuf};

use crate::model::{
    FORMAT, LayerId, Mode, Name, Policy, Project, ProjectNetwork, ProjectRuns, now,
};
use crate::store::fsck::problem::Problem;
use crate::store::manifest::{Durability, Manifest as _, id_of, list, sync_parent};
use crate::store::{Report, Result, Store, StoreError, blocking, io_error};

/// What a repair did.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case", tag = "repair")]
pub enum Repair {
    /// Something was moved to the quarantine.
    Quarantined {
        /// Where it was.
        from: PathBuf,
        /// Where it is.
        to: PathBuf,
    },
    /// A layer that is needed was found, and is back in its place.
    Restored {
        /// Where it was.
        from: PathBuf,
        /// The layer.
        layer: LayerId,
    },
}

impl Store {
    /// Mends what can be mended of a report.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`] when something cannot be moved; it is then where it was.
    pub async fn repair(&self, report: &Report) -> Result<Vec<Repair>> {
        let mut done = Vec::new();
        for problem in &report.problems {
            match problem {
                Problem::MissingLayer { layer, .. } => {
                    let (store, id) = (self.clone(), layer.clone());
                    let found = blocking(move || store.restore_layer(&id)).await?;
                    done.extend(found.map(|from| Repair::Restored { from, layer: layer.clone() }));
                }
                Problem::NotASandbox { path }
                | Problem::TornRecord { path }
                | Problem::Stray { path } => {
                    let to = self.quarantine(path).await?;
                    done.push(Repair::Quarantined { from: path.clone(), to });
                }
                // A record that names nothing.
                Problem::DamagedManifest { path, .. } if is_history(path) => {
                    let to = self.quarantine(path).await?;
                    done.push(Repair::Quarantined { from: path.clone(), to });
                }
                _ => {}
            }
        }
        Ok(done)
    }

    /// Looks for a layer among what was deleted or moved away, and puts it back.
    fn restore_layer(&self, id: &LayerId) -> Result<Option<PathBuf>> {
        let place = self.layer_dir(id);
        if place.exists() {
            return Ok(None);
        }
        for part in ["trash", "quarantine"] {
            for path in list(&self.data_dir().join(part))? {
                let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
                let named = name.is_some_and(|name| name.contains(id.as_str()));
                // The trash may keep it in a directory of its own.
                let inside = [path.clone(), path.join(id.as_str())];
                let is_layer = |path: &PathBuf| {
                    path.join("layer.json").is_file() && path.join("diff").is_dir()
                };
                let Some(found) = inside.into_iter().find(|path| named && is_layer(path)) else {
                    continue;
                };
                fs::rename(&found, &place).map_err(io_error("restore", &found))?;
                sync_parent(&place)?;
                sync_parent(&found)?;
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Puts an empty project that denies its sandboxes the network in the place of one whose manifest is
    /// damaged or missing. The old file goes to the quarantine.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Damaged`] when there is nothing wrong with it, and [`StoreError::TooNew`]
    /// when a later version wrote it.
    pub async fn reset_project(&self, name: &Name) -> Result<()> {
        let path = self.data_dir().join(Project::place(name));
        match self.read::<Project>(name).await {
            Ok(_) => {
                let reason = "nothing is wrong with it".to_owned();
                return Err(StoreError::Damaged { path, reason });
            }
            Err(error @ StoreError::TooNew { .. }) => return Err(error),
            Err(_) => {}
        }
        for suffix in ["", ".last", ".next"] {
            let file = PathBuf::from(format!("{}{suffix}", path.display()));
            if fs::symlink_metadata(&file).is_ok() {
                self.quarantine(&file).await?;
            }
        }
        let deny = Policy { mode: Mode::DenyAll, ..Policy::default() };
        let network = ProjectNetwork { bound: Some(deny), ..ProjectNetwork::default() };
        let (name, created_at) = (name.clone(), now());
        let (keys, runs) = (Vec::new(), ProjectRuns::default());
        let project = Project { format: FORMAT, name, created_at, keys, network, runs };
        self.write(&project, Durability::Synced).await
    }
}

/// Whether it is the record of a session or a command.
fn is_history(path: &Path) -> bool {
    let dir = path.parent().map(id_of);
    matches!(dir, Some("sessions" | "commands"))
}
