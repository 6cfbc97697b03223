//! Limits how many comparisons a project may have in progress, so that none delays the others.
//!
//! A comparison reads files as fast as it can and is over soon: one per project, and few altogether
//! (the store limits them). A patch is sent as fast as its reader takes it, and that may be slow:
//! several per project, which hold nothing that others wait for.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::engine::Result;
use crate::keyed_lock::{KeyGuard, KeyedLock};
use crate::model::Name;
use crate::store::StoreError;

/// How long a comparison waits for another one of its project.
const PATIENCE: Duration = Duration::from_secs(60);
/// How many patches are sent at a time, for a project and for all.
const PATCHES: usize = 4;
const ALL_PATCHES: usize = 32;

/// What is being compared, by project.
#[derive(Debug, Default)]
pub(in crate::engine) struct Comparing {
    turns: KeyedLock<Name>,
    patches: Arc<Mutex<HashMap<Name, usize>>>,
}

/// The right to send a patch, until this is dropped.
#[derive(Debug)]
pub(in crate::engine) struct PatchSlot {
    patches: Arc<Mutex<HashMap<Name, usize>>>,
    project: Name,
}

impl Comparing {
    /// Waits until a project may compare something.
    pub(in crate::engine) async fn turn(&self, project: &Name) -> Result<KeyGuard<Name>> {
        let turn = tokio::time::timeout(PATIENCE, self.turns.lock(project)).await;
        Ok(turn.map_err(|_| StoreError::Busy {
            why: format!(
                "project `{project}` has other comparisons under way, for more than {} s",
                PATIENCE.as_secs()
            ),
        })?)
    }

    /// Takes the right to send a patch, if there is one left.
    pub(in crate::engine) fn patch(&self, project: &Name) -> Result<PatchSlot> {
        let mut patches = self.patches.lock();
        let (own, all) =
            (patches.get(project).copied().unwrap_or(0), patches.values().sum::<usize>());
        if own >= PATCHES || all >= ALL_PATCHES {
            let why = format!(
                "{own} patches of project `{project}` are being sent, {all} of all projects"
            );
            return Err(StoreError::Busy { why }.into());
        }
        patches.insert(project.clone(), own + 1);
        Ok(PatchSlot { patches: Arc::clone(&self.patches), project: project.clone() })
    }
}

impl Drop for PatchSlot {
    fn drop(&mut self) {
        let mut patches = self.patches.lock();
        if let Some(own) = patches.get_mut(&self.project) {
            *own -= 1;
            if *own == 0 {
                patches.remove(&self.project);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_project_has_few_patches_and_all_have_a_bound() {
        let comparing = Comparing::default();
        let name = |number: usize| format!("p{number}").parse::<Name>().unwrap();
        let first: Vec<_> = (0..PATCHES).map(|_| comparing.patch(&name(0)).unwrap()).collect();
        let refused = comparing.patch(&name(0)).unwrap_err();
        assert_eq!(refused.code(), "busy", "{refused}");
        let others: Vec<_> = (PATCHES..ALL_PATCHES)
            .map(|number| comparing.patch(&name(number)).expect("another project has its own"))
            .collect();
        assert!(comparing.patch(&name(99)).is_err());
        drop(others);
        drop(first);
        assert!(comparing.patches.lock().is_empty(), "nothing is kept");
    }
}
