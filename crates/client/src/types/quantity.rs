//! Spans and sizes as requests may write them: a number, or text for people.

use std::fmt;

use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

macro_rules! quantity {
    ($(#[$doc:meta])* $name:ident, $expects:literal, $number:literal, $text:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
        #[serde(untagged)]
        pub enum $name {
            #[doc = $number]
            Number(u64),
            #[doc = $text]
            Text(String),
        }

        impl From<u64> for $name {
            fn from(number: u64) -> Self {
                Self::Number(number)
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                Self::Text(text.to_owned())
            }
        }

        impl From<String> for $name {
            fn from(text: String) -> Self {
                Self::Text(text)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Reads;
                impl Visitor<'_> for Reads {
                    type Value = $name;
                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        f.write_str($expects)
                    }
                    fn visit_u64<E: de::Error>(self, number: u64) -> Result<$name, E> {
                        Ok($name::Number(number))
                    }
                    fn visit_str<E: de::Error>(self, text: &str) -> Result<$name, E> {
                        Ok($name::Text(text.to_owned()))
                    }
                }
                deserializer.deserialize_any(Reads)
            }
        }
    };
}

quantity!(
    /// A span of time: milliseconds, or text like `90s`, `15m`, `30d`.
    Span,
    "a span of time: text like \"90s\" or \"30d\", or milliseconds that are not negative",
    "Milliseconds.",
    "A number with ms, s, m, h, d or w."
);

quantity!(
    /// A size: bytes, or text like `512M`, `2G`. K, M, G and T are powers of 1024.
    Size,
    "a size: text like \"512M\" or \"2G\", or bytes that are not negative",
    "Bytes.",
    "A number with K, M, G or T."
);

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
    fn numbers_and_text() {
        assert_eq!(serde_json::from_str::<Span>("1500").unwrap(), Span::Number(1500));
        assert_eq!(serde_json::from_str::<Size>("\"2G\"").unwrap(), Size::from("2G"));
        for bad in ["-1", "1.5", "true", "[]"] {
            let error = serde_json::from_str::<Size>(bad).unwrap_err().to_string();
            assert!(error.contains("expected a size"), "{bad}: {error}");
        }
    }
}
