//! What [`Store::fsck`](crate::store::Store::fsck) can find, and its messages.

use std::path::PathBuf;

use serde::Serialize;

use crate::model::{LayerId, MemoryId, Name, SandboxId, Size, SnapshotId};

/// Something that is not as it should be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "problem")]
pub enum Problem {
    /// A document cannot be read.
    DamagedManifest {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A later version wrote it; nothing is broken, this version is too old.
    TooNew {
        /// The file.
        path: PathBuf,
    },
    /// A layer that is needed is not there, or not sealed.
    MissingLayer {
        /// Who needs it: `snapshot …`, `image …`, `drive …` or `sandbox …`.
        needed_by: String,
        /// The layer.
        layer: LayerId,
    },
    /// A snapshot that is needed is not there.
    MissingSnapshot {
        /// The sandbox that stands on it.
        sandbox: SandboxId,
        /// The snapshot.
        snapshot: SnapshotId,
    },
    /// A directory of the layout is not there: it is not mounted, or a restore was partial.
    MissingPart {
        /// The directory.
        path: PathBuf,
    },
    /// A project has things and no manifest.
    MissingProject {
        /// The project.
        project: Name,
        /// Something that belongs to it.
        needed_by: String,
    },
    /// A sandbox has a snapshot, and there is neither a manifest of it nor a reason for that.
    MissingSandbox {
        /// The sandbox.
        sandbox: SandboxId,
        /// One of its snapshots.
        snapshot: SnapshotId,
    },
    /// A directory of a sandbox that lived has no manifest.
    LostManifest {
        /// The directory.
        path: PathBuf,
    },
    /// A sandbox's manifest is older than its snapshots: an old copy was put in its place.
    OldManifest {
        /// The sandbox.
        sandbox: SandboxId,
        /// The generation in its manifest.
        generation: u64,
        /// The highest generation that one of its snapshots has.
        newest: u64,
    },
    /// A layer is not what was sealed.
    ChangedLayer {
        /// The layer.
        layer: LayerId,
        /// What is different.
        difference: String,
    },
    /// A record of a session or a command that a power cut tore. Such records are not synced at once.
    TornRecord {
        /// The file.
        path: PathBuf,
    },
    /// A layer has a manifest and no files.
    MissingFiles {
        /// The layer.
        layer: LayerId,
    },
    /// A directory that should hold a sandbox holds none, and never did: a create broke off.
    NotASandbox {
        /// The directory.
        path: PathBuf,
    },
    /// A layer that was begun and not sealed, and that no session writes to.
    AbandonedLayer {
        /// The layer.
        layer: LayerId,
    },
    /// A sealed layer that nothing needs.
    UnheldLayer {
        /// The layer.
        layer: LayerId,
        /// The space it takes.
        bytes: u64,
    },
    /// A memory layer that is needed is not there, or not sealed.
    MissingMemory {
        /// Who needs it: `snapshot …` or `sandbox …`.
        needed_by: String,
        /// The layer.
        memory: MemoryId,
    },
    /// A memory layer that is needed is not what was sealed. Sandboxes that stand on it fall back to its disk, if that is whole.
    DamagedMemory {
        /// The layer.
        memory: MemoryId,
        /// What is wrong with it.
        reason: String,
    },
    /// A memory layer that was begun and not sealed.
    AbandonedMemory {
        /// The layer.
        memory: MemoryId,
    },
    /// A sealed memory layer that nothing needs.
    UnheldMemory {
        /// The layer.
        memory: MemoryId,
        /// The space it takes.
        bytes: u64,
    },
    /// Something else that does not belong there.
    Stray {
        /// The file or directory.
        path: PathBuf,
    },
}

impl Problem {
    /// Whether it is merely in the way; a collection removes it.
    #[must_use]
    pub fn is_leftover(&self) -> bool {
        matches!(
            self,
            Self::AbandonedLayer { .. }
                | Self::UnheldLayer { .. }
                | Self::AbandonedMemory { .. }
                | Self::UnheldMemory { .. }
                | Self::NotASandbox { .. }
                | Self::TornRecord { .. }
                | Self::Stray { .. }
        )
    }
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = match self {
            Self::DamagedManifest { path, reason } => {
                format!("`{}` does not read: {reason}", path.display())
            }
            Self::TooNew { path } => {
                format!("`{}` was written by a later version of keep", path.display())
            }
            Self::MissingLayer { needed_by, layer } => {
                format!("layer {layer} is gone, and {needed_by} needs it")
            }
            Self::MissingSnapshot { sandbox, snapshot } => {
                format!("snapshot {snapshot} is gone, and sandbox {sandbox} stands on it")
            }
            Self::MissingMemory { needed_by, memory } => {
                format!("memory layer {memory} is gone, and {needed_by} needs it")
            }
            Self::DamagedMemory { memory, reason } => format!("memory layer {memory}: {reason}"),
            Self::AbandonedMemory { memory } => {
                format!("memory layer {memory} was begun and never finished")
            }
            Self::UnheldMemory { memory, bytes: size } => {
                format!("memory layer {memory}, {}, is needed by nobody", Size(*size))
            }
            Self::MissingPart { path } => {
                format!(
                    "`{}` is missing: it is not mounted, or a restore was partial",
                    path.display()
                )
            }
            Self::MissingProject { project, needed_by } => {
                format!(
                    "the manifest of project {project} is missing, and {needed_by} belongs to it"
                )
            }
            Self::MissingSandbox { sandbox, snapshot } => {
                format!(
                    "the manifest of sandbox {sandbox} is missing, and snapshot {snapshot} is one of its own"
                )
            }
            Self::LostManifest { path } => {
                format!(
                    "`{}` holds what a sandbox did, and its manifest is missing",
                    path.display()
                )
            }
            Self::OldManifest { sandbox, generation, newest } => format!(
                "the manifest of sandbox {sandbox} is an old copy: it is of generation {generation}, and there is a snapshot of {newest}"
            ),
            Self::ChangedLayer { layer, difference } => {
                format!("layer {layer} is not what was sealed: {difference}")
            }
            Self::TornRecord { path } => {
                format!("`{}` was being written when the power went", path.display())
            }
            Self::MissingFiles { layer } => format!("layer {layer} has lost its files"),
            Self::NotASandbox { path } => format!("`{}` holds no sandbox", path.display()),
            Self::AbandonedLayer { layer } => format!("layer {layer} was begun and never finished"),
            Self::UnheldLayer { layer, bytes: size } => {
                format!("layer {layer}, {}, is needed by nobody", Size(*size))
            }
            Self::Stray { path } => format!("`{}` does not belong there", path.display()),
        };
        f.write_str(&text)
    }
}
