//! Sizes and spans of time, as requests, the command line and manifests write them.
//!
//! Written as a number: bytes, milliseconds. Read from a number or from text like `512M` and `30d`.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

/// The error for a text that is not a size or span.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not {what}")]
pub struct BadQuantity {
    text: String,
    what: &'static str,
}

/// A number of bytes: `512M`, `2GiB`, `10000`. K, M, G, T are powers of 1024.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct Span(pub u64);

/// A thousand years, in milliseconds: longer than any sandbox lives, and within the range of timestamps.
const LONGEST: u64 = 365_000 * 86_400_000;

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
        let span = scale(number, millis).filter(|ms| *ms <= LONGEST);
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

/// Implements reading from a number or text, and the schema that says so.
macro_rules! number_or_text {
    ($name:ident, $check:expr, $expects:literal, $schema:ident) => {
        impl From<u64> for $name {
            fn from(number: u64) -> Self {
                Self(number)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct NumberOrText;
                impl Visitor<'_> for NumberOrText {
                    type Value = $name;
                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        f.write_str($expects)
                    }
                    fn visit_u64<E: de::Error>(self, number: u64) -> Result<$name, E> {
                        let check: fn(u64) -> Result<u64, &'static str> = $check;
                        check(number).map($name).map_err(E::custom)
                    }
                    fn visit_str<E: de::Error>(self, text: &str) -> Result<$name, E> {
                        text.parse().map_err(E::custom)
                    }
                }
                deserializer.deserialize_any(NumberOrText)
            }
        }

        impl PartialSchema for $name {
            fn schema() -> RefOr<Schema> {
                $schema::schema()
            }
        }

        impl ToSchema for $name {
            fn name() -> Cow<'static, str> {
                stringify!($name).into()
            }
        }
    };
}

number_or_text!(
    Size,
    Ok,
    "a size: text like \"512M\" or \"2G\", or bytes that are not negative",
    SizeSchema
);

number_or_text!(
    Span,
    |millis| if millis <= LONGEST { Ok(millis) } else { Err("at most 365000 days") },
    "a span of time: text like \"90s\" or \"30d\", or milliseconds that are not negative",
    SpanSchema
);

/// A span of time: milliseconds, or text like `90s`, `15m`, `30d`.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
#[allow(dead_code)] // only its schema is used
enum SpanSchema {
    /// Milliseconds.
    Number(u64),
    /// A number with ms, s, m, h, d or w.
    Text(String),
}

/// A size: bytes, or text like `512M`, `2G`. K, M, G and T are powers of 1024.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
#[allow(dead_code)] // only its schema is used
enum SizeSchema {
    /// Bytes.
    Number(u64),
    /// A number with K, M, G or T.
    Text(String),
}

/// Reads a field that was given: `null` becomes `Some(None)`, so that it differs from an absent one.
pub(super) fn given<'de, T, D>(deserializer: D) -> Result<Option<Option<T>>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    Option::<T>::deserialize(deserializer).map(Some)
}

/// Reads a field that must be there, and may be `null`.
pub(super) fn present<'de, T, D>(deserializer: D) -> Result<Option<T>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    Option::<T>::deserialize(deserializer)
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

    #[test]
    fn json_is_a_number_or_text_and_is_written_as_a_number() {
        assert_eq!(serde_json::from_str::<Span>("1500").unwrap(), Span(1500));
        assert_eq!(serde_json::from_str::<Size>("\"2G\"").unwrap(), Size(2 << 30));
        assert_eq!(serde_json::to_string(&Span::seconds(2)).unwrap(), "2000");
        for bad in ["-1", "1.5", "true", "[]"] {
            let error = serde_json::from_str::<Size>(bad).unwrap_err().to_string();
            assert!(error.contains("expected a size"), "{bad}: {error}");
        }
        for bad in ["\"soon\"", "18446744073709551615"] {
            assert!(serde_json::from_str::<Span>(bad).is_err(), "{bad}");
        }
    }
}
