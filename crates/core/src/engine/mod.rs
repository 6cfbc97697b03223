//! What happens to sandboxes.

pub mod lifecycle;
