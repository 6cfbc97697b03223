//! A typed client of Sandkeep's `/v1` API.
//!
//! [`types`] are the words of the API, which the server uses as well.

#![forbid(unsafe_code)]

pub mod types;
