//! Names people choose, and what may stand in them.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Why a text cannot be a name, a tag or a variable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadName {
    /// Not a sandbox or project name.
    #[error("`{0}` cannot be a name: use 1 to 128 letters, digits, `-` and `_`")]
    Name(String),
    /// Not a tag key or value.
    #[error(
        "`{0}` cannot be a tag: keys are 1 to 256 characters without `=`, values up to 256, without control characters"
    )]
    Tag(String),
    /// More tags than a sandbox may carry.
    #[error("{0} tags are too many: a sandbox carries at most 32")]
    TooManyTags(usize),
    /// Not the name of a secret.
    #[error("`{0}` cannot name a secret: use 1 to 128 letters, digits and `_`, no digit first")]
    Secret(String),
    /// Not the name of an environment variable.
    #[error(
        "`{0}` cannot name an environment variable: use 1 to 1024 characters without `=` and NUL"
    )]
    Env(String),
}

/// The name of a sandbox or project: 1 to 128 of `[a-zA-Z0-9_-]`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(String);

impl Name {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Makes a readable name for a request without one: two words and four random characters.
    #[must_use]
    pub fn generate() -> Self {
        const HOW: [&str; 32] = [
            "amber", "bold", "brisk", "calm", "clear", "coral", "crisp", "dawn", "deep", "early",
            "fair", "fleet", "fresh", "glad", "golden", "jade", "keen", "light", "lucid", "mild",
            "noble", "north", "prime", "quick", "quiet", "rapid", "sharp", "solid", "still",
            "swift", "vivid", "warm",
        ];
        const WHAT: [&str; 32] = [
            "anchor", "arch", "bay", "beacon", "bridge", "brook", "castle", "cedar", "cliff",
            "cove", "dune", "falcon", "field", "fjord", "garden", "grove", "harbor", "heron",
            "isle", "jay", "keep", "lagoon", "maple", "meadow", "oak", "otter", "reef", "ridge",
            "river", "shore", "tower", "wren",
        ];
        const TAIL: &[u8; 32] = b"23456789abcdefghjkmnpqrstuvwxyz0";
        let mut random = [0u8; 6];
        getrandom::fill(&mut random).expect("the kernel gives random bytes");
        let tail: String =
            random[2..].iter().map(|b| char::from(TAIL[usize::from(b & 31)])).collect();
        Self(format!(
            "{}-{}-{tail}",
            HOW[usize::from(random[0] & 31)],
            WHAT[usize::from(random[1] & 31)]
        ))
    }
}

impl FromStr for Name {
    type Err = BadName;
    fn from_str(text: &str) -> Result<Self, BadName> {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
        if (1..=128).contains(&text.len()) && text.bytes().all(plain) {
            Ok(Self(text.to_owned()))
        } else {
            Err(BadName::Name(text.chars().take(140).collect()))
        }
    }
}

impl TryFrom<String> for Name {
    type Error = BadName;
    fn try_from(text: String) -> Result<Self, BadName> {
        text.parse()
    }
}

impl From<Name> for String {
    fn from(name: Name) -> String {
        name.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Labels to find sandboxes by: at most 32, each `key=value`.
pub type Tags = BTreeMap<String, String>;

/// Checks one tag.
///
/// # Errors
///
/// Returns [`BadName::Tag`] and the key that is wrong.
pub fn check_tag(key: &str, value: &str) -> Result<(), BadName> {
    let fits = |text: &str| text.chars().count() <= 256 && !text.chars().any(char::is_control);
    if !key.is_empty() && !key.contains('=') && fits(key) && fits(value) {
        Ok(())
    } else {
        Err(BadName::Tag(key.chars().take(80).collect()))
    }
}

/// Checks the name of an environment variable.
///
/// # Errors
///
/// Returns [`BadName::Env`].
pub fn check_env_name(name: &str) -> Result<(), BadName> {
    // What a shell exports, functions included, goes through; the kernel minds nothing else.
    if (1..=1024).contains(&name.len()) && !name.contains(['=', '\0']) {
        Ok(())
    } else {
        Err(BadName::Env(name.chars().take(80).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::{Name, check_env_name, check_tag};

    #[test]
    fn names() {
        for good in ["a", "my-app", "A_9", &"x".repeat(128)] {
            assert!(good.parse::<Name>().is_ok(), "{good}");
        }
        for bad in ["", "a b", "../x", "é", "a/b", "a.b", &"x".repeat(129), "a\n"] {
            assert!(bad.parse::<Name>().is_err(), "{bad}");
        }
        let made = Name::generate();
        assert_eq!(made.as_str().parse(), Ok(made.clone()));
    }

    #[test]
    fn tags_and_variables() {
        assert!(check_tag("customer", "acme & sons").is_ok());
        assert!(check_tag("team name", "x").is_ok());
        assert!(check_tag("", "x").is_err());
        assert!(check_tag("a=b", "x").is_err());
        assert!(check_tag("k", "a\nb").is_err());
        assert!(check_env_name("_PATH9").is_ok());
        assert!(check_env_name("BASH_FUNC_which%%").is_ok());
        for bad in ["", "A=B", "=", "A\0", &"x".repeat(1025)] {
            assert!(check_env_name(bad).is_err(), "{bad}");
        }
    }
}
