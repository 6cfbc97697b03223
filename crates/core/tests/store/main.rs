//! The store: manifests, layers, memory images, damage, with crashes and failing disks.

#![allow(clippy::unwrap_used)] // helpers of tests may panic as tests may

#[cfg(feature = "failpoints")]
mod crash;
mod db_sqlite;
mod diff;
mod digest;
mod disk_import;
mod faults;
mod fsck_damage;
mod layers;
mod manifests;
mod memory;
#[cfg(feature = "failpoints")]
mod memory_crash;
mod merge;
mod onto;
mod store_world;
mod tree_model;

sandkeep_testkit::fault_disk_process!();
