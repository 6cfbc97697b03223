//! The engine with real containers and microVMs, by subject.

#![allow(clippy::unwrap_used)] // helpers of tests may panic as tests may

mod bytes;
mod chain;
mod changes;
mod commands;
#[cfg(feature = "failpoints")]
mod crash;
mod damage;
mod disk;
mod drives;
mod ends;
mod evidence;
mod forks;
mod full_disk;
mod guard;
mod into_drive;
mod kept;
mod life;
mod machine;
mod machine_support;
mod memory;
#[cfg(feature = "failpoints")]
mod memory_crash;
mod memory_hostile;
mod memory_resume;
mod memory_sqlite;
mod network;
mod races;
mod sessions;
mod snapshots;
mod trash;
mod unresponsive;
mod view;
#[cfg(feature = "failpoints")]
mod warm_machines;
