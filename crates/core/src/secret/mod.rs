//! What is kept from everybody: the server's key, and what is sealed with it.
//!
//! - `keyring` seals what must not lie on disk as it is: values of secrets, credentials in policies, the
//!   private keys of sandboxes' authorities.
//! - `forms` are the shapes a value is searched for in, by whoever must find it again.
//! - `mask` keeps values out of what commands print.
//!
//! Whoever asks to reveal something says what they take it for (its *context*). A sealed text that was
//! moved to another place, or swapped for an older one, does not open there.

mod forms;
mod keyring;
mod mask;

pub use forms::forms;
pub use keyring::{BadKey, KeySource, Keyring, SealError};
pub use mask::{Mask, Masker, Side};

/// The shortest value a secret may have. What is shorter turns up by chance, so it can neither be masked
/// nor searched for.
pub const SHORTEST: usize = 6;
/// The longest value a secret may have.
pub const LONGEST: usize = 64 << 10;
