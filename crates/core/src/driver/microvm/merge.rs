//! Merging consecutive memory layers into one layer.
//!
//! Every capture adds a layer, and every later machine has the disk of each layer open. A machine that is paused and resumed for
//! weeks would have hundreds. Sealed layers never change, because other images may be based on them: the merged layer is written
//! as a new layer and replaces the merged ones in a chain.
//!
//! ```text
//! devices      of the topmost layer
//! pages        per page, the topmost layer that has it; zeros that hide a page below are kept
//! disk.qcow2   per cluster, the topmost layer that has it; other clusters are left to the layers below
//! ```

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::disk::{self, LAYER_DISK};
use super::memory::merge_pages;

/// Merges `run`, the topmost layer first, into an empty directory.
pub(super) fn merge(run: &[PathBuf], into: &Path) -> io::Result<()> {
    let top = run.first().ok_or(io::ErrorKind::InvalidInput)?;
    fs::copy(top.join("devices"), into.join("devices"))?;
    merge_pages(run, into)?;
    let disks: Vec<PathBuf> = run.iter().map(|layer| layer.join(LAYER_DISK)).collect();
    disk::merge::merge_disks(&disks, &into.join(LAYER_DISK))
}
