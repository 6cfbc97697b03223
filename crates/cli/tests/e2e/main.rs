//! `keep` and its daemon as processes: what users type, faults, power cuts, other vendors' clients.

#![allow(clippy::unwrap_used)] // helpers of tests may panic as tests may

mod attach;
mod backups;
mod basics;
mod builds;
mod chaos;
mod conformance;
#[cfg(feature = "failpoints")]
mod crash;
mod daily;
mod disk_faults;
mod docs;
mod drives;
mod events;
mod forks;
mod full_disk;
mod microvm;
mod mistakes;
mod moved;
mod network;
mod operations;
mod packages;
mod ports;
mod runs;
mod sdk;
mod secrets;
mod vercel_conformance;
mod without_server;

sandkeep_testkit::fault_disk_process!();
