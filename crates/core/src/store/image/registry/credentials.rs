//! Credentials for registries, from docker's configuration file.
//!
//! `credHelpers` for the registry comes first, then `auths`, then `credsStore`: a helper that is named
//! for one registry knows best, and a plain entry beats asking a store that may know nothing.

use std::collections::BTreeMap;
use std::process::Stdio;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use tokio::io::AsyncWriteExt as _;

use super::super::ImageSettings;
use super::super::error::{ImageError, ImageResult};
use super::super::reference::Reference;

/// How long a credential helper may think.
const HELPER_PATIENCE: Duration = Duration::from_secs(30);
/// The name under which helpers give a token instead of a password.
const TOKEN_USER: &str = "<token>";

/// What proves who we are.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Credentials {
    Anonymous,
    Password {
        user: String,
        password: String,
    },
    /// Is exchanged for access tokens.
    Identity(String),
    /// Is itself an access token.
    Access(String),
}

impl Credentials {
    /// Whom errors speak of.
    pub(super) fn who(&self) -> String {
        match self {
            Self::Anonymous => "strangers".to_owned(),
            Self::Password { user, .. } => format!("`{user}`"),
            Self::Identity(_) | Self::Access(_) => "the holder of this token".to_owned(),
        }
    }
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.who())
    }
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct DockerConfig {
    auths: BTreeMap<String, AuthEntry>,
    cred_helpers: BTreeMap<String, String>,
    creds_store: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct AuthEntry {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
    identitytoken: Option<String>,
    registrytoken: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct HelperAnswer {
    username: String,
    secret: String,
}

/// Finds the credentials for a registry. No file, or nothing in it, is no error.
pub(super) async fn find(
    settings: &ImageSettings,
    reference: &Reference,
) -> ImageResult<Credentials> {
    let Some(path) = settings.docker_config.as_deref() else { return Ok(Credentials::Anonymous) };
    let bad = |reason: String| ImageError::Credentials {
        registry: reference.registry.clone(),
        reason: format!("`{}` {reason}", path.display()),
    };
    let text = match tokio::fs::read(path).await {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Ok(Credentials::Anonymous);
        }
        Err(error) => return Err(bad(format!("cannot be read: {error}"))),
    };
    let config: DockerConfig = serde_json::from_slice(&text)
        .map_err(|error| bad(format!("is no docker configuration: {error}")))?;
    let names = reference.known_as();
    let asked = names.first().copied().unwrap_or(&reference.registry);
    let named = |key: &str| names.iter().any(|name| host_of(name) == host_of(key));
    if let Some((_, helper)) = config.cred_helpers.iter().find(|(key, _)| named(key)) {
        return ask(settings, helper, asked, reference).await;
    }
    if let Some((_, entry)) = config.auths.iter().find(|(key, _)| named(key))
        && let Some(found) = entry.credentials().map_err(bad)?
    {
        return Ok(found);
    }
    match &config.creds_store {
        Some(helper) => ask(settings, helper, asked, reference).await,
        None => Ok(Credentials::Anonymous),
    }
}

impl AuthEntry {
    fn credentials(&self) -> Result<Option<Credentials>, String> {
        let said = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        if let Some(token) = said(&self.registrytoken) {
            return Ok(Some(Credentials::Access(token)));
        }
        if let Some(token) = said(&self.identitytoken) {
            return Ok(Some(Credentials::Identity(token)));
        }
        if let Some(auth) = said(&self.auth) {
            let pair = STANDARD
                .decode(auth.trim())
                .ok()
                .and_then(|bytes| String::from_utf8(bytes).ok())
                .and_then(|text| {
                    let (user, password) = text.split_once(':')?;
                    Some((user.to_owned(), password.trim_end_matches('\0').to_owned()))
                });
            let Some((user, password)) = pair else {
                return Err("has an `auth` that is not base64 of `user:password`".to_owned());
            };
            return Ok(Some(Credentials::Password { user, password }));
        }
        Ok(said(&self.username)
            .zip(said(&self.password))
            .map(|(user, password)| Credentials::Password { user, password }))
    }
}

/// Asks the program `docker-credential-<helper>`.
async fn ask(
    settings: &ImageSettings,
    helper: &str,
    server: &str,
    reference: &Reference,
) -> ImageResult<Credentials> {
    let bad =
        |reason: String| ImageError::Credentials { registry: reference.registry.clone(), reason };
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    if !helper.bytes().all(plain) {
        return Err(bad(format!("`{helper}` cannot name a credential helper")));
    }
    let program = format!("docker-credential-{helper}");
    let asking = async {
        let mut command = tokio::process::Command::new(&program);
        command.env_clear().envs(settings.helper_env.iter().map(|(name, value)| (name, value)));
        let mut child = command
            .arg("get")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            // A helper that ends without reading says why by itself.
            let _ = stdin.write_all(server.as_bytes()).await;
        }
        child.wait_with_output().await
    };
    let output = match tokio::time::timeout(HELPER_PATIENCE, asking).await {
        Ok(Ok(output)) => output,
        Ok(Err(error)) => return Err(bad(format!("`{program}` cannot be run: {error}"))),
        Err(_) => return Err(bad(format!("`{program}` does not answer"))),
    };
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stdout);
        if said.contains("credentials not found") {
            return Ok(Credentials::Anonymous);
        }
        let said: String = said.trim().chars().take(200).collect();
        return Err(bad(format!("`{program}` says: {said}")));
    }
    let answer: HelperAnswer = serde_json::from_slice(&output.stdout)
        .map_err(|error| bad(format!("`{program}` answers with something else: {error}")))?;
    Ok(match answer {
        HelperAnswer { username, secret } if username == TOKEN_USER => {
            Credentials::Identity(secret)
        }
        HelperAnswer { username, secret } => {
            Credentials::Password { user: username, password: secret }
        }
    })
}

/// The host in `https://host/path`.
fn host_of(key: &str) -> &str {
    let rest = key.split_once("://").map_or(key, |(_, rest)| rest);
    rest.split('/').next().unwrap_or(rest)
}

#[cfg(test)]
mod tests {
    use super::{Credentials, find};
    use crate::store::image::ImageSettings;

    async fn found(config: &str, reference: &str) -> Result<Credentials, String> {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("config.json");
        std::fs::write(&path, config).expect("our own file");
        let reference = reference.parse().expect("a reference");
        let settings = ImageSettings { docker_config: Some(path), ..Default::default() };
        find(&settings, &reference).await.map_err(|error| error.to_string())
    }

    fn password(user: &str, password: &str) -> Credentials {
        Credentials::Password { user: user.to_owned(), password: password.to_owned() }
    }

    #[tokio::test]
    async fn entries_are_found_by_the_registrys_host() {
        let config = r#"{"auths": {
            "https://index.docker.io/v1/": {"auth": "YTpiOmM="},
            "http://localhost:5000": {"username": "u", "password": "p"},
            "ghcr.io": {"identitytoken": "t", "auth": "YTpi"},
            "broken.io": {"auth": "???"},
            "empty.io": {}
        }}"#;
        assert_eq!(found(config, "debian").await, Ok(password("a", "b:c")));
        assert_eq!(found(config, "localhost:5000/x").await, Ok(password("u", "p")));
        assert_eq!(found(config, "ghcr.io/x/y").await, Ok(Credentials::Identity("t".into())));
        assert_eq!(found(config, "empty.io/x").await, Ok(Credentials::Anonymous));
        assert_eq!(found(config, "other.io/x").await, Ok(Credentials::Anonymous));
        assert!(found(config, "broken.io/x").await.is_err());
        assert!(found("not json", "debian").await.is_err());
    }

    #[tokio::test]
    async fn helpers_that_cannot_be_run_are_an_error() {
        let config = r#"{"credsStore": "there-is-no-such-helper"}"#;
        let error = found(config, "debian").await.expect_err("no such program");
        assert!(error.contains("docker-credential-there-is-no-such-helper"), "{error}");
        let config = r#"{"credHelpers": {"x.io": "../../bin/sh"}}"#;
        assert!(found(config, "x.io/y").await.is_err());
        assert_eq!(found(config, "z.io/y").await, Ok(Credentials::Anonymous));
    }
}
