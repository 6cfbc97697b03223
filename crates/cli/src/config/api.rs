//! `[api]`: who may reach the server, and with how many connections.

use sandkeep_server::{Limits, WebSettings};
use serde::Deserialize;

use crate::failure::Failure;

/// What a settings file says about the API.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ApiFile {
    /// Names that this server is called by, beside `localhost`, addresses and those of other settings.
    #[serde(default)]
    hosts: Vec<String>,
    /// Origins whose web pages may use the API.
    #[serde(default)]
    origins: Vec<String>,
    /// How many TCP connections there may be.
    connections: Option<usize>,
    /// How many of them from one address.
    connections_per_address: Option<usize>,
    /// How many may use one key.
    connections_per_key: Option<usize>,
}

/// Who may reach the server, and with how many connections.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ApiSettings {
    pub(crate) web: WebSettings,
    connections: Option<usize>,
    connections_per_address: Option<usize>,
    connections_per_key: Option<usize>,
}

impl ApiSettings {
    /// The limits that this server has.
    pub(crate) fn limits(&self) -> Limits {
        let usual = Limits::default();
        Limits {
            connections: self.connections.unwrap_or(usual.connections),
            connections_per_address: self
                .connections_per_address
                .unwrap_or(usual.connections_per_address),
            connections_per_key: self.connections_per_key.unwrap_or(usual.connections_per_key),
            ..usual
        }
    }
}

pub(super) fn api(file: ApiFile) -> Result<ApiSettings, Failure> {
    let wrong = |field: &str, text: &str, hint: &str| {
        Err(Failure::here(format!("[api] {field}: invalid value `{text}`")).with_hint(hint))
    };
    for host in &file.hosts {
        let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_');
        if host.is_empty() || !host.bytes().all(plain) {
            return wrong("hosts", host, "write a name like `keep.example.com`");
        }
    }
    for origin in &file.origins {
        let place = origin.split_once("://").map(|(_, place)| place);
        let whole = place.is_some_and(|place| !place.is_empty() && !place.contains('/'));
        if origin != "*" && !whole {
            return wrong("origins", origin, "write it like `https://console.example.com`");
        }
    }
    for (field, number) in [
        ("connections", file.connections),
        ("connections_per_address", file.connections_per_address),
        ("connections_per_key", file.connections_per_key),
    ] {
        if number == Some(0) {
            return wrong(field, "0", "write at least 1");
        }
    }
    Ok(ApiSettings {
        web: WebSettings { hosts: file.hosts, origins: file.origins },
        connections: file.connections,
        connections_per_address: file.connections_per_address,
        connections_per_key: file.connections_per_key,
    })
}

#[cfg(test)]
mod tests {
    use super::{ApiFile, api};

    #[test]
    fn settings_are_checked() {
        let read = |text: &str| toml::from_str::<ApiFile>(text).expect("it reads");
        let good = "hosts = ['keep.lan']\norigins = ['https://a.example']\nconnections = 10";
        let settings = api(read(good)).expect("good");
        assert_eq!(settings.web.hosts, ["keep.lan"]);
        assert_eq!(settings.limits().connections, 10);
        for bad in ["hosts = ['https://a']", "origins = ['a.example']", "connections = 0"] {
            assert!(api(read(bad)).is_err(), "{bad}");
        }
    }
}
