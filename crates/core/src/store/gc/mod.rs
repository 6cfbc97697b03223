//! Garbage collection of layers: what is referenced, what may be collected, and how it is deleted.
//!
//! The engine decides when to collect. It asks here, in this order:
//!
//! - [`accounting`]: which snapshots, images, drives and sandboxes refer to a layer, and what its deletion
//!   would free. [`references`] counts.
//! - [`known_manifests`] and [`disk_listing`]: whether every manifest on disk is known in memory. One that
//!   is not could refer to any layer.
//! - [`holds`]: which layers somebody is about to refer to.
//! - [`trash`]: where a layer stays for a grace period, and can be restored from.
//! - [`remove`]: how a tree is deleted for good, slowly and in the background.

pub mod accounting;
pub(super) mod disk_listing;
pub(super) mod holds;
pub mod known_manifests;
pub(super) mod references;
pub(super) mod remove;
pub(super) mod trash;
