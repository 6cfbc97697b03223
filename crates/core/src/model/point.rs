//! Points in the history of sandboxes, as people write them.
//!
//! | point | means |
//! |---|---|
//! | `my-app` | the sandbox as it is now |
//! | `my-app@saved` | its last snapshot |
//! | `my-app@base` | what it started from |
//! | `my-app@LABEL` | its newest snapshot with that label |
//! | `snp-...` | a snapshot |
//! | `image:NAME` | an image |

use std::fmt;
use std::str::FromStr;

use super::{Name, SnapshotId};

/// Something that can be compared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Point {
    /// A sandbox as it is now.
    Now(Name),
    /// The last snapshot of a sandbox.
    Saved(Name),
    /// What a sandbox started from: a snapshot of its origin, or its image.
    Base(Name),
    /// The newest snapshot of a sandbox with this label.
    Labelled(Name, String),
    /// A snapshot.
    Snapshot(SnapshotId),
    /// An image.
    Image(String),
}

/// A text that is no point.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no point: write NAME, NAME@saved, NAME@base, NAME@LABEL, a snapshot's id, or image:NAME"
)]
pub struct BadPoint(String);

impl Point {
    /// The sandbox it is about, if it is about one.
    #[must_use]
    pub fn sandbox(&self) -> Option<&Name> {
        match self {
            Self::Now(name) | Self::Saved(name) | Self::Base(name) | Self::Labelled(name, _) => {
                Some(name)
            }
            Self::Snapshot(_) | Self::Image(_) => None,
        }
    }
}

impl FromStr for Point {
    type Err = BadPoint;

    fn from_str(text: &str) -> Result<Self, BadPoint> {
        let bad = || BadPoint(text.chars().take(300).collect());
        if let Some(image) = text.strip_prefix("image:") {
            return if image.is_empty() { Err(bad()) } else { Ok(Self::Image(image.to_owned())) };
        }
        if text.starts_with("snp-") && !text.contains('@') {
            // A sandbox may have such a name, which is no id then.
            if let Ok(id) = text.parse() {
                return Ok(Self::Snapshot(id));
            }
        }
        let (name, at) = text.split_once('@').map_or((text, None), |(name, at)| (name, Some(at)));
        let name: Name = name.parse().map_err(|_| bad())?;
        match at {
            None => Ok(Self::Now(name)),
            Some("saved") => Ok(Self::Saved(name)),
            Some("base") => Ok(Self::Base(name)),
            Some("") => Err(bad()),
            Some(label) => Ok(Self::Labelled(name, label.to_owned())),
        }
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Now(name) => write!(f, "{name}"),
            Self::Saved(name) => write!(f, "{name}@saved"),
            Self::Base(name) => write!(f, "{name}@base"),
            Self::Labelled(name, label) => write!(f, "{name}@{label}"),
            Self::Snapshot(id) => write!(f, "{id}"),
            Self::Image(image) => write!(f, "image:{image}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Point;

    #[test]
    fn points_are_read_and_written_alike() {
        for text in [
            "my-app",
            "my-app@saved",
            "my-app@base",
            "my-app@tests green",
            "my-app@a@b",
            "snp-01k00000000000000000000000",
            "image:debian:12",
        ] {
            let point: Point = text.parse().expect("a point");
            assert_eq!(point.to_string(), text, "{point:?}");
        }
        let snapshot: Point = "snp-01k00000000000000000000000".parse().expect("a point");
        assert!(matches!(snapshot, Point::Snapshot(_)));
        assert!(matches!("snp-app".parse(), Ok(Point::Now(_))));
    }

    #[test]
    fn what_is_no_point_is_refused() {
        for text in ["", "@base", "my app", "my-app@", "image:", "a/b"] {
            let refused = text.parse::<Point>().expect_err("no point").to_string();
            assert!(refused.contains("NAME@LABEL"), "{refused}");
        }
    }
}
