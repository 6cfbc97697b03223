//! Records what was copied, so that a restarted daemon continues from it.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{CopiedNames, EntryState, LiveCopy};
use crate::model::{FORMAT, LayerId};
use crate::store::manifest::{parse, to_json};
use crate::store::path_text::{path_bytes, path_text};

/// [`LiveCopy`] as a file beside the open layer: a convenience that may be lost at any time.
#[derive(Debug, Serialize, Deserialize)]
struct CopiesFile {
    format: u32,
    layers: Vec<LayerId>,
    /// Whether `layers` are all there are. Those of an older version are the copies alone, without the chain.
    #[serde(default)]
    whole: bool,
    taken: (i64, u32),
    root: Option<EntryState>,
    /// Paths and names as printable text.
    dirs: BTreeMap<String, BTreeMap<String, EntryState>>,
}

impl CopiesFile {
    fn new(layers: &[LayerId], seen: &CopiedNames) -> Self {
        let text = |names: &HashMap<Vec<u8>, EntryState>| {
            names.iter().map(|(name, mark)| (path_text(name), *mark)).collect()
        };
        let dirs = seen.dirs.iter().map(|(path, names)| (path_text(path), text(names))).collect();
        let (taken, root) = (seen.taken, seen.root);
        Self { format: FORMAT, layers: layers.to_vec(), whole: true, taken, root, dirs }
    }

    fn into_copy(self, chain: &[LayerId]) -> Option<LiveCopy> {
        let bytes = |names: BTreeMap<String, EntryState>| -> Option<HashMap<Vec<u8>, EntryState>> {
            names.into_iter().map(|(name, mark)| Some((path_bytes(&name)?, mark))).collect()
        };
        let dirs: Option<HashMap<_, _>> = self
            .dirs
            .into_iter()
            .map(|(path, names)| Some((path_bytes(&path)?, bytes(names)?)))
            .collect();
        let seen = CopiedNames { taken: self.taken, root: self.root, dirs: dirs? };
        let mut layers = self.layers;
        if !self.whole {
            layers.extend_from_slice(chain);
        }
        Some(LiveCopy { layers, seen: Some(Arc::new(seen)) })
    }
}

/// Writes a copy's record, unless the layer was sealed or discarded meanwhile. Without a record the
/// first copy after a restart is a whole one.
pub(super) fn remember(path: &Path, temporary: &Path, copy: &LiveCopy) {
    let Some(seen) = &copy.seen else { return };
    let Ok(bytes) = to_json(&CopiesFile::new(&copy.layers, seen), path) else { return };
    let written = fs::write(temporary, bytes).and_then(|()| fs::rename(temporary, path));
    if let Err(error) = written {
        tracing::debug!(path = %path.display(), %error, "could not record a copy; the next one will be complete");
        let _ = fs::remove_file(temporary);
    }
}

pub(super) fn recall(path: &Path, chain: &[LayerId]) -> Option<LiveCopy> {
    let bytes = fs::read(path).ok()?;
    parse::<CopiesFile>(path, &bytes).ok()?.into_copy(chain)
}
