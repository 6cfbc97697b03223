//! Images: what a sandbox starts from when it has no snapshot.

mod attributes;
mod digest;
mod error;
mod host;
mod progress;

pub use error::{ImageError, ImageResult};
pub use host::{Host, HostTree};
pub use progress::{Progress, Reporter};
