//! Fixtures and contract suites.

pub mod daemon;
pub mod driver;
pub mod root;
