//! Versions of a record, and who may write the next one.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::Name;

/// Counts the saved versions of a record. A record that was never saved has revision 0, and so have
/// records of daemons that did not count.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Revision(u64);

impl Revision {
    /// That of a record that was never saved.
    pub const NEW: Self = Self(0);

    /// The one after this.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }

    /// The number.
    #[must_use]
    pub fn number(self) -> u64 {
        self.0
    }

    /// Whether it was never saved.
    #[must_use]
    pub fn is_new(&self) -> bool {
        *self == Self::NEW
    }
}

impl From<u64> for Revision {
    fn from(number: u64) -> Self {
        Self(number)
    }
}

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The node that may run a sandbox and save its record.
///
/// The node's lease, and until when it holds, are kept once per node and not here: renewing a lease
/// must not write every record of the node. A node whose lease ran out can be replaced by another
/// one, which writes its own name here with a higher epoch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ownership {
    /// The node.
    pub node: Name,
    /// How often the sandbox has changed hands. A save with an older epoch is refused.
    pub epoch: u64,
}
