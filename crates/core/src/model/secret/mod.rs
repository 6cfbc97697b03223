//! Secrets, and how sandboxes and commands come to use them. `docs/SECRETS.md` describes each way.

pub(super) mod forms;
pub(super) mod guard;

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{BadName, DomainPattern, Name, Tags, Timestamp, check_env_name};

/// The shortest value a secret may have. What is shorter turns up by chance, so it can neither be masked
/// nor searched for.
pub const SHORTEST_SECRET: usize = 6;
/// The longest value a secret may have.
pub const LONGEST_SECRET: usize = 64 << 10;

/// The name of a secret, which is also what its variable is called unless somebody says otherwise: 1 to
/// 128 letters, digits and `_`, no digit first.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SecretName(String);

impl SecretName {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for SecretName {
    type Err = BadName;
    fn from_str(text: &str) -> Result<Self, BadName> {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
        let digit_first = text.bytes().next().is_some_and(|b| b.is_ascii_digit());
        if (1..=128).contains(&text.len()) && text.bytes().all(plain) && !digit_first {
            Ok(Self(text.to_owned()))
        } else {
            Err(BadName::Secret(text.chars().take(140).collect()))
        }
    }
}

impl TryFrom<String> for SecretName {
    type Error = BadName;
    fn try_from(text: String) -> Result<Self, BadName> {
        text.parse()
    }
}

impl From<SecretName> for String {
    fn from(name: SecretName) -> String {
        name.0
    }
}

impl fmt::Display for SecretName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A named value of a project.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Secret {
    /// [`FORMAT`](super::FORMAT).
    pub format: u32,
    /// Whose it is.
    pub project: Name,
    /// Its name, unique in the project.
    pub name: SecretName,
    /// Its values, oldest first; the last is the one in use. Never empty.
    pub versions: Vec<SecretVersion>,
    /// The hosts that may have it when it is brokered.
    #[serde(default)]
    pub hosts: Vec<DomainPattern>,
    /// Where its placeholder is replaced besides headers, when it is brokered.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub places: BTreeSet<SecretPlace>,
    /// Only sandboxes that have all of these may use it.
    #[serde(default)]
    pub tags: Tags,
    /// When it was first set.
    pub created_at: Timestamp,
    /// When it was last set.
    pub updated_at: Timestamp,
    /// When it was deleted. It stays until no session is left whose files may hold it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deleted_at: Option<Timestamp>,
}

/// A part of a request, besides headers, in which a placeholder is replaced if that is asked for.
///
/// Not by default: a server keeps what it is sent in a body and gives it back, in whatever form it is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SecretPlace {
    /// The query of the URL.
    Query,
    /// The body.
    Body,
}

/// One value of a secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecretVersion {
    /// Its number; they are counted from 1.
    pub version: u64,
    /// The value, sealed.
    pub sealed: String,
    /// When it was set.
    pub created_at: Timestamp,
}

impl Secret {
    /// The number of the value in use.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.versions.last().map_or(0, |last| last.version)
    }

    /// Whether a sandbox with these tags may use it.
    #[must_use]
    pub fn allows(&self, tags: &Tags) -> bool {
        self.tags.iter().all(|(key, value)| tags.get(key) == Some(value))
    }
}

/// A secret that a sandbox's commands have a placeholder of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecretUse {
    /// The secret.
    pub secret: SecretName,
    /// The variable that holds the placeholder.
    pub env: String,
}

impl FromStr for SecretUse {
    type Err = BadName;
    /// Reads `NAME` or `NAME=VARIABLE`.
    fn from_str(text: &str) -> Result<Self, BadName> {
        let (secret, env) = text.split_once('=').unwrap_or((text, text));
        check_env_name(env)?;
        Ok(Self { secret: secret.parse()?, env: env.to_owned() })
    }
}

/// A secret that one command is given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inject {
    /// The secret.
    pub secret: SecretName,
    /// Where the command finds it.
    pub into: InjectInto,
}

/// Where a command finds a secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InjectInto {
    /// In this variable of its environment.
    Env(String),
    /// In this file, which is in memory and gone when the command ends.
    File(String),
}

/// A secret that a session was given.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SecretGiven {
    /// The secret.
    pub name: SecretName,
    /// Which value of it.
    pub version: u64,
    /// How.
    pub how: SecretHow,
}

/// How a session was given a secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SecretHow {
    /// The network puts it into requests; it never entered the sandbox.
    Brokered,
    /// In the environment of a command.
    Env,
    /// In a file of a command.
    File,
}

#[cfg(test)]
mod tests {
    use super::{SecretName, SecretUse};

    #[test]
    fn names_and_uses() {
        for good in ["A", "_x", "OPENAI_API_KEY", "a1", &"x".repeat(128)] {
            assert!(good.parse::<SecretName>().is_ok(), "{good}");
        }
        for bad in ["", "1A", "A-B", "a b", "a/b", "..", "é", "A=B", &"x".repeat(129)] {
            assert!(bad.parse::<SecretName>().is_err(), "{bad}");
        }
        let named: SecretUse = "KEY=OTHER".parse().unwrap();
        assert_eq!((named.secret.as_str(), named.env.as_str()), ("KEY", "OTHER"));
        let plain: SecretUse = "KEY".parse().unwrap();
        assert_eq!((plain.secret.as_str(), plain.env.as_str()), ("KEY", "KEY"));
        for bad in ["", "=A", "KEY=", "K-Y=A"] {
            assert!(bad.parse::<SecretUse>().is_err(), "{bad}");
        }
    }
}
