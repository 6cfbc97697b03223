//! HTTP requests of domains that have rules or credentials.

mod authority;

pub use authority::{Authority, BadAuthority};
