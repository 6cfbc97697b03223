//! Ids: a prefix that says what it names, then 26 characters that sort by time.
//!
//! `sbx-01k…`: a ULID in lowercase, that is 48 bits of milliseconds and 80 random bits in base32
//! without i, l, o, u.
//! Lowercase letters, digits and a hyphen are safe as file, cgroup and host names.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use ulid::Ulid;

/// Why a text is no id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a {what} id; those look like `{prefix}-` and 26 letters and digits")]
pub struct BadId {
    text: String,
    what: &'static str,
    prefix: &'static str,
}

macro_rules! id_type {
    ($(#[$doc:meta])* $name:ident, $prefix:literal, $what:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// Makes an id that was never used before.
            #[must_use]
            pub fn fresh() -> Self {
                Self(format!("{}-{}", $prefix, fresh_tail()))
            }

            /// The id as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = BadId;
            fn from_str(text: &str) -> Result<Self, BadId> {
                let good = text
                    .strip_prefix(concat!($prefix, "-"))
                    .is_some_and(is_tail);
                if good {
                    Ok(Self(text.to_owned()))
                } else {
                    let text = text.chars().take(80).collect();
                    Err(BadId { text, what: $what, prefix: $prefix })
                }
            }
        }

        impl TryFrom<String> for $name {
            type Error = BadId;
            fn try_from(text: String) -> Result<Self, BadId> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

id_type!(
    /// Names a webhook.
    WebhookId,
    "whk",
    "webhook"
);

id_type!(
    /// Names a sandbox for the machine; people use its [`super::Name`].
    SandboxId, "sbx", "sandbox"
);
id_type!(
    /// Names one waking period of a sandbox.
    SessionId, "ses", "session"
);
id_type!(
    /// Names one process started in a session.
    CommandId, "cmd", "command"
);
id_type!(
    /// Names a point a sandbox can be resumed or forked from.
    SnapshotId, "snp", "snapshot"
);
id_type!(
    /// Names an immutable set of file changes.
    LayerId, "lay", "layer"
);
id_type!(
    /// Names a layer of a memory image.
    MemoryId, "mem", "memory layer"
);
id_type!(
    /// Names a drive for the machine; people use its [`super::Name`].
    DriveId, "drv", "drive"
);
id_type!(
    /// Names forks that were made together.
    GroupId, "grp", "group"
);
id_type!(
    /// Names an API key; not the secret itself.
    KeyId, "key", "key"
);

id_type!(
    /// Names a run.
    RunId, "run", "run"
);
id_type!(
    /// Names an approval.
    ApprovalId, "apr", "approval"
);

impl SnapshotId {
    /// The id of the snapshot that is made of this layer. One layer makes one snapshot, so a daemon
    /// that died between writing the two writes the same snapshot again and not a second one.
    #[must_use]
    pub fn of_layer(layer: &LayerId) -> Self {
        Self(format!("snp-{}", &layer.0[4..]))
    }

    /// The same of a layer of memory.
    #[must_use]
    pub fn of_memory(memory: &MemoryId) -> Self {
        Self(format!("snp-{}", &memory.0[4..]))
    }
}

/// Whether a text is what [`fresh_tail`] makes. Uppercase letters are not: an id is a file name, and
/// there is one way to write it.
fn is_tail(text: &str) -> bool {
    const LETTERS: &[u8] = b"abcdefghjkmnpqrstvwxyz";
    text.len() == ulid::ULID_LEN
        && text.bytes().all(|byte| byte.is_ascii_digit() || LETTERS.contains(&byte))
}

fn fresh_tail() -> String {
    let millis = u64::try_from(jiff::Timestamp::now().as_millisecond()).unwrap_or(0);
    let mut random = [0; 16];
    // The kernel's random source does not fail once the machine is up.
    getrandom::fill(&mut random).expect("the kernel gives random bytes");
    Ulid::from_parts(millis, u128::from_be_bytes(random)).to_string().to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::{LayerId, SandboxId};

    #[test]
    fn ids_sort_by_time_and_survive_text() {
        let first = SandboxId::fresh();
        std::thread::sleep(std::time::Duration::from_millis(3));
        let second = SandboxId::fresh();
        assert!(first < second);
        assert_eq!(first.as_str().parse(), Ok(first.clone()));
    }

    #[test]
    fn what_is_no_id_is_refused() {
        for text in
            ["", "sbx-", "lay-../../../../etc/passwd00", "sbx-01K00000000000000000000000", "../x"]
        {
            assert!(text.parse::<LayerId>().is_err(), "{text}");
        }
    }
}
