//! The server's key, and values that are encrypted with it.
//!
//! - `keyring` seals what must not lie on disk as it is: values of secrets, credentials in policies, the
//!   private keys of sandboxes' authorities.
//! - `mask` keeps values out of what commands print.
//!
//! A caller that reveals something says what it takes it for (its *context*). A sealed text that
//! was moved to another place, or swapped for an older one, does not open there.

mod keyring;
mod mask;

pub use keyring::{BadKey, KeySource, Keyring, SealError};
pub use mask::{Mask, MaskedStream, Masker};
