//! The position of an event in the feed.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::model::Timestamp;

/// The position of an event in the feed, and its identity.
///
/// It is the time of the event in microseconds since 1970, moved ahead where two would be equal or
/// the clock went back. So ids increase over restarts and power cuts, and a time can be turned into
/// a position.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct EventId(pub u64);

impl EventId {
    /// The first position at or after a time.
    #[must_use]
    pub fn at(time: Timestamp) -> Self {
        Self(u64::try_from(time.as_microsecond()).unwrap_or(0))
    }
}

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl FromStr for EventId {
    type Err = BadEventId;
    fn from_str(text: &str) -> Result<Self, BadEventId> {
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let number = digits.then(|| text.parse().ok()).flatten();
        number.map(Self).ok_or(BadEventId)
    }
}

/// A text that is not the id of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not the id of an event; use the `id` of one that was received")]
pub struct BadEventId;
