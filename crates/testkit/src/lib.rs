//! What tests share: fixtures, contract suites, faults.
//!
//! - Contracts that every implementation is held to: [`driver`], [`catalog`], [`db`]; strict fakes of them in [`fake`].
//! - Engines and servers to test: [`house`] has an engine with real containers or microVMs, [`daemon`] a server process,
//!   [`microvm`] and [`machine`] what microVMs need, [`inside`] runs commands in a machine without an engine.
//! - Faults: [`fault_disk`] is a disk that loses power, fails, hangs and fills up; [`chaos`] runs campaigns of faults
//!   against a server; [`other_kernel`] runs a test on another kernel.
//! - [`bench`](mod@bench) measures against a yardstick; [`random`], [`root`] and [`tree`] are helpers.

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
