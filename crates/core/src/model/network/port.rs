//! Ports inside a sandbox that may be reached from outside.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Who may reach a published port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Access {
    /// Everybody who knows its name.
    Public,
    /// Holders of a key to the project, or of a token for the port.
    Private,
}

/// A published port.
///
/// On record a plain number means what it always meant: public, and requests do not wake the sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Port {
    /// Its number.
    pub number: u16,
    /// Who may reach it.
    pub access: Access,
    /// Whether a request wakes the sandbox.
    pub wake: bool,
}

impl From<u16> for Port {
    fn from(number: u16) -> Self {
        Self { number, access: Access::Public, wake: false }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum OnRecord {
    Number(u16),
    Whole { port: u16, access: Access, wake: bool },
}

impl Serialize for Port {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { number, access, wake } = *self;
        let written = match self == &Self::from(number) {
            true => OnRecord::Number(number),
            false => OnRecord::Whole { port: number, access, wake },
        };
        written.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Port {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(match OnRecord::deserialize(deserializer)? {
            OnRecord::Number(number) => number.into(),
            OnRecord::Whole { port, access, wake } => Self { number: port, access, wake },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{Access, Port};

    #[test]
    fn ports_of_before_read_and_write_as_they_did() {
        let text = r#"[3000,{"port":4000,"access":"private","wake":true}]"#;
        let ports: Vec<Port> = serde_json::from_str(text).unwrap();
        let private = Port { number: 4000, access: Access::Private, wake: true };
        assert_eq!(ports, [Port::from(3000), private]);
        assert_eq!(serde_json::to_string(&ports).unwrap(), text);
        for bad in ["[70000]", r#"["3000"]"#, r#"[{"port":1,"access":"shared","wake":true}]"#] {
            assert!(serde_json::from_str::<Vec<Port>>(bad).is_err(), "{bad}");
        }
    }
}
