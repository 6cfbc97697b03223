//! Fixtures and contract suites.

pub mod driver;
