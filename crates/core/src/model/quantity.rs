//! Sizes and spans of time as people write them.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Why a text is no size or span.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not {what}")]
pub struct BadQuantity {
    text: String,
    what: &'static str,
}

/// A number of bytes: `512M`, `2GiB`, `10000`. K, M, G, T are powers of 1024.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Size(pub u64);

const SIZE: &str = "a size; write bytes, or a number with K, M, G or T, like `512M` or `2G`";

impl FromStr for Size {
    type Err = BadQuantity;
    fn from_str(text: &str) -> Result<Self, BadQuantity> {
        let bad = || BadQuantity { text: text.chars().take(40).collect(), what: SIZE };
        let trimmed = text.trim();
        let digits =
            trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(digits);
        let shift = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 0,
            "k" | "kb" | "kib" => 10,
            "m" | "mb" | "mib" => 20,
            "g" | "gb" | "gib" => 30,
            "t" | "tb" | "tib" => 40,
            _ => return Err(bad()),
        };
        scale(number, 1u64 << shift).map(Self).ok_or_else(bad)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, shift) in [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)] {
            if self.0 >= 1 << shift {
                let tenths = (u128::from(self.0) * 10) >> shift;
                return write!(f, "{}.{} {unit}", tenths / 10, tenths % 10);
            }
        }
        write!(f, "{} B", self.0)
    }
}

/// A span of time: `90s`, `15m`, `12h`, `30d`, `2w`, `250ms`. Stored as milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Span(pub u64);

const SPAN: &str = "a span of time; write a number with ms, s, m, h, d or w, like `90s` or `30d`";

impl Span {
    /// So many days.
    #[must_use]
    pub const fn days(days: u64) -> Self {
        Self(days * 86_400_000)
    }

    /// So many seconds.
    #[must_use]
    pub const fn seconds(seconds: u64) -> Self {
        Self(seconds * 1000)
    }

    /// The same as the standard library says it.
    #[must_use]
    pub const fn duration(self) -> Duration {
        Duration::from_millis(self.0)
    }
}

impl FromStr for Span {
    type Err = BadQuantity;
    fn from_str(text: &str) -> Result<Self, BadQuantity> {
        let bad = || BadQuantity { text: text.chars().take(40).collect(), what: SPAN };
        let trimmed = text.trim();
        let digits = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(bad)?;
        let (number, unit) = trimmed.split_at(digits);
        let millis = match unit.trim() {
            "ms" => 1,
            "s" | "sec" => 1000,
            "m" | "min" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            "w" => 7 * 86_400_000,
            _ => return Err(bad()),
        };
        // A thousand years is beyond any sandbox, and within what timestamps can say.
        let span = scale(number, millis).filter(|ms| *ms <= 365_000 * 86_400_000);
        span.map(Self).ok_or_else(bad)
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, millis) in [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)] {
            if self.0 >= millis && self.0.is_multiple_of(millis) {
                return write!(f, "{}{unit}", self.0 / millis);
            }
        }
        write!(f, "{}ms", self.0)
    }
}

/// Multiplies a decimal number, exactly where it has no fraction.
fn scale(number: &str, unit: u64) -> Option<u64> {
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(unit);
    }
    let (whole, fraction) = number.split_once('.')?;
    if fraction.is_empty() || fraction.len() > 6 {
        return None;
    }
    let whole: u64 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
    let part: u64 = fraction.parse().ok()?;
    let ten = 10u64.pow(u32::try_from(fraction.len()).ok()?);
    whole.checked_mul(unit)?.checked_add(part.checked_mul(unit)? / ten)
}

#[cfg(test)]
mod tests {
    use super::{Size, Span};

    #[test]
    fn sizes_as_people_write_them() {
        let read = |text: &str| text.parse::<Size>().map(|size| size.0).ok();
        assert_eq!(read("10000"), Some(10_000));
        assert_eq!(read("512M"), Some(512 << 20));
        assert_eq!(read("1.5GiB"), Some(3 << 29));
        for bad in ["", "-1", "1e9", "lots", "9999999999999T", "1.", "1.1234567G", "NaN"] {
            assert_eq!(read(bad), None, "{bad}");
        }
        assert_eq!(Size(344 << 20).to_string(), "344.0 MiB");
    }

    #[test]
    fn spans_as_people_write_them() {
        let read = |text: &str| text.parse::<Span>().map(|span| span.0).ok();
        assert_eq!(read("30d"), Some(30 * 86_400_000));
        assert_eq!(read("1.5h"), Some(5_400_000));
        for bad in ["", "30", "-3d", "d", "9999999999w", "1y"] {
            assert_eq!(read(bad), None, "{bad}");
        }
        assert_eq!(Span::days(14).to_string(), "14d");
        assert_eq!(Span(90_000).to_string(), "90s");
    }
}
