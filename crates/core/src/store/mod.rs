//! store.

pub mod image;
