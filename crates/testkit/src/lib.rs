//! Fixtures and contract suites.

pub mod bench;
pub mod catalog;
pub mod chaos;
pub mod daemon;
pub mod db;
pub mod driver;
pub mod fake;
pub mod fault_disk;
pub mod house;
pub mod inside;
pub mod machine;
pub mod microvm;
pub mod other_kernel;
pub mod random;
pub mod root;
pub mod tree;
