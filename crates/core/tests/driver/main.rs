//! Drivers, the agent they start, and the walls around both.

#![allow(clippy::unwrap_used)] // helpers of tests may panic as tests may

mod container;
mod disk_quota;
mod drives;
mod escape;
mod escape_microvm;
mod guest;
mod helpers;
mod limits;
mod microvm;
mod microvm_guest;
mod microvm_memory;
mod prebuilt;
mod warm_hypervisors;
