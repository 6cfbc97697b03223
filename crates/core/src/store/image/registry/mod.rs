//! Registries: manifests and blobs over HTTP.
//!
//! The protocol is the OCI distribution specification, the reading half of it. It is spoken here and
//! not by a library because of what must hold when things go wrong: bodies are bounded, a blob
//! continues where it broke off, tokens are renewed in the middle of a pull, identity tokens work,
//! and every failure has an error of its own (unknown image, not allowed, out of reach, damaged).
//!
//! Nothing a registry says is believed before its digest was checked. Credentials go to the registry
//! and to the token service it names, never elsewhere, and never in the clear to a service on another
//! machine unless the registry itself is spoken to in the clear.

mod blob;
mod credentials;

use std::time::Duration;

use reqwest::header::{ACCEPT, AUTHORIZATION, HeaderMap, RANGE, WWW_AUTHENTICATE};
use reqwest::{Response, StatusCode, Url};
use sandkeep_types::error_chain;
use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use tokio::sync::Mutex;

use self::credentials::Credentials;
use super::error::{ImageError, ImageResult};
use super::oci::{self, Descriptor, ImageOrIndex, OciManifest, Plan};
use super::reference::Reference;
use super::{ImageSettings, digest};

const CONNECT_PATIENCE: Duration = Duration::from_secs(20);
/// How long a registry may be silent.
const READ_PATIENCE: Duration = Duration::from_secs(60);
const USER_AGENT: &str = concat!("sandkeep/", env!("CARGO_PKG_VERSION"));
/// A list leads to a manifest; one more step is allowed, for lists of lists.
const MOST_STEPS: usize = 3;

/// One repository of a registry.
pub(super) struct Registry {
    http: reqwest::Client,
    base: Url,
    reference: Reference,
    credentials: Credentials,
    /// The `Authorization` header that was last accepted.
    authorization: Mutex<Option<String>>,
}

/// An image as the registry describes it.
pub(super) struct Described {
    /// The digest of the manifest that was asked for.
    pub(super) digest: String,
    pub(super) plan: Plan,
    pub(super) config: oci::OciConfig,
}

impl Registry {
    pub(super) async fn open(settings: &ImageSettings, reference: &Reference) -> ImageResult<Self> {
        let wrong = |reason: String| ImageError::Unreachable {
            registry: reference.registry.clone(),
            reason,
        };
        let in_clear =
            reference.is_loopback() || settings.insecure_registries.contains(&reference.registry);
        let scheme = if in_clear { "http" } else { "https" };
        let base = Url::parse(&format!("{scheme}://{}/v2/", reference.host()))
            .map_err(|error| wrong(error.to_string()))?;
        let http = reqwest::Client::builder()
            .connect_timeout(CONNECT_PATIENCE)
            .read_timeout(READ_PATIENCE)
            .user_agent(USER_AGENT)
            .build()
            .map_err(|error| wrong(error_chain(&error)))?;
        let credentials = credentials::find(settings, reference).await?;
        let authorization = Mutex::new(None);
        Ok(Self { http, base, reference: reference.clone(), credentials, authorization })
    }

    /// Finds the image for this machine.
    pub(super) async fn describe(&self) -> ImageResult<Described> {
        let what = self.reference.to_string();
        let mut wanted = self.reference.wanted().to_owned();
        let mut digest = None;
        for _ in 0..MOST_STEPS {
            let bytes = self.manifest(&wanted).await?;
            let found = digest::text(&Sha256::digest(&bytes));
            if digest::digits(&wanted).is_some() && wanted != found {
                return Err(ImageError::Digest { what, expected: wanted, found });
            }
            digest.get_or_insert(found);
            match oci::read::<OciManifest>(&what, &bytes)?.next(&what)? {
                ImageOrIndex::Look(chosen) => wanted = chosen.digest,
                ImageOrIndex::Image(plan) => {
                    let bytes = self.document(&plan.config).await?;
                    let config: oci::OciConfig = oci::read(&what, &bytes)?;
                    config.check(&what, plan.layers.len())?;
                    return Ok(Described { digest: digest.unwrap_or_default(), plan, config });
                }
            }
        }
        let reason = "its manifests lead to each other".to_owned();
        Err(ImageError::NotAnImage { what, reason })
    }

    async fn manifest(&self, wanted: &str) -> ImageResult<Vec<u8>> {
        let response = self.get(&format!("manifests/{wanted}"), 0).await?;
        self.body(response).await
    }

    /// A small blob, checked.
    async fn document(&self, blob: &Descriptor) -> ImageResult<Vec<u8>> {
        let what = format!("the configuration of {}", self.reference);
        if digest::digits(&blob.digest).is_none() {
            let reason = format!("its digest is `{}`", blob.digest);
            return Err(ImageError::NotAnImage { what, reason });
        }
        let response = self.get(&format!("blobs/{}", blob.digest), 0).await?;
        let bytes = self.body(response).await?;
        let found = digest::text(&Sha256::digest(&bytes));
        if found == blob.digest {
            Ok(bytes)
        } else {
            Err(ImageError::Digest { what, expected: blob.digest.clone(), found })
        }
    }

    async fn body(&self, mut response: Response) -> ImageResult<Vec<u8>> {
        let mut bytes = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|error| self.lost(&error))? {
            if (bytes.len() + chunk.len()) as u64 > oci::LARGEST {
                return Err(self.odd("a document of more than 16 MiB"));
            }
            bytes.extend_from_slice(&chunk);
        }
        Ok(bytes)
    }

    /// Asks for something in the repository, from byte `from` on.
    async fn get(&self, path: &str, from: u64) -> ImageResult<Response> {
        let url = self
            .base
            .join(&format!("{}/{path}", self.reference.repository))
            .map_err(|error| self.odd(&error.to_string()))?;
        let known = self.authorization.lock().await.clone();
        let response = self.send(&url, from, known.as_deref()).await?;
        if response.status() != StatusCode::UNAUTHORIZED {
            return self.judge(response).await;
        }
        // Not known yet, or a token that has run out in the middle of a pull.
        let fresh = self.authorize(response.headers()).await?;
        let response = self.send(&url, from, Some(&fresh)).await?;
        *self.authorization.lock().await = Some(fresh);
        self.judge(response).await
    }

    async fn send(&self, url: &Url, from: u64, known: Option<&str>) -> ImageResult<Response> {
        let mut request = self.http.get(url.clone()).header(ACCEPT, oci::ACCEPT);
        if from > 0 {
            request = request.header(RANGE, format!("bytes={from}-"));
        }
        if let Some(known) = known {
            request = request.header(AUTHORIZATION, known);
        }
        request.send().await.map_err(|error| self.lost(&error))
    }

    async fn judge(&self, response: Response) -> ImageResult<Response> {
        let registry = self.reference.registry.clone();
        let reference = self.reference.to_string();
        match response.status() {
            status if status.is_success() || status == StatusCode::RANGE_NOT_SATISFIABLE => {
                Ok(response)
            }
            StatusCode::NOT_FOUND => Err(ImageError::Unknown { registry, reference }),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                Err(ImageError::Denied { registry, reference, who: self.credentials.who() })
            }
            StatusCode::TOO_MANY_REQUESTS => {
                Err(self.odd("it is asked too often; wait, or log in with `docker login`"))
            }
            status => {
                let body = self.body(response).await.unwrap_or_default();
                let said: String = String::from_utf8_lossy(&body).chars().take(200).collect();
                Err(self.odd(&format!("{status} {}", said.trim())))
            }
        }
    }

    /// Finds out what the registry wants to see, and gets it.
    async fn authorize(&self, headers: &HeaderMap) -> ImageResult<String> {
        if let Credentials::Access(token) = &self.credentials {
            return Ok(format!("Bearer {token}"));
        }
        let challenges: Vec<Challenge> = headers
            .get_all(WWW_AUTHENTICATE)
            .iter()
            .filter_map(|value| Challenge::parse(value.to_str().ok()?))
            .collect();
        if let Some(Challenge::Bearer { realm, service, scope }) =
            challenges.iter().find(|challenge| matches!(challenge, Challenge::Bearer { .. }))
        {
            return self.token(realm, service.as_deref(), scope.as_deref()).await;
        }
        match &self.credentials {
            Credentials::Password { user, password } if !challenges.is_empty() => {
                Ok(basic(user, password))
            }
            _ => Err(ImageError::Denied {
                registry: self.reference.registry.clone(),
                reference: self.reference.to_string(),
                who: self.credentials.who(),
            }),
        }
    }

    /// Gets an access token from the service the registry trusts.
    async fn token(
        &self,
        realm: &str,
        service: Option<&str>,
        scope: Option<&str>,
    ) -> ImageResult<String> {
        let mut url = Url::parse(realm).map_err(|_| self.odd("a token service without address"))?;
        if url.scheme() != "https" && self.base.scheme() == "https" {
            return Err(self.odd("a token service that would be told credentials in the clear"));
        }
        let pull = format!("repository:{}:pull", self.reference.repository);
        let mut fields: Vec<(&str, &str)> = vec![("scope", scope.unwrap_or(&pull))];
        fields.extend(service.map(|service| ("service", service)));
        let request = match &self.credentials {
            Credentials::Identity(token) => {
                fields.extend([
                    ("grant_type", "refresh_token"),
                    ("client_id", "sandkeep"),
                    ("refresh_token", token),
                ]);
                let form = url::form(&fields);
                self.http
                    .post(url)
                    .header("content-type", "application/x-www-form-urlencoded")
                    .body(form)
            }
            Credentials::Password { user, password } => {
                url.query_pairs_mut().extend_pairs(&fields);
                self.http.get(url).header(AUTHORIZATION, basic(user, password))
            }
            Credentials::Anonymous | Credentials::Access(_) => {
                url.query_pairs_mut().extend_pairs(&fields);
                self.http.get(url)
            }
        };
        let response = request.send().await.map_err(|error| self.lost(&error))?;
        if matches!(response.status(), StatusCode::BAD_REQUEST) {
            // This is how token services say that a refresh token is worth nothing.
            return Err(ImageError::Denied {
                registry: self.reference.registry.clone(),
                reference: self.reference.to_string(),
                who: self.credentials.who(),
            });
        }
        let body = self.body(self.judge(response).await?).await?;
        let token: Token = serde_json::from_slice(&body)
            .map_err(|_| self.odd("a token service that gives no token"))?;
        match token.access_token.or(token.token) {
            Some(token) => Ok(format!("Bearer {token}")),
            None => Err(self.odd("a token service that gives no token")),
        }
    }

    fn lost(&self, error: &reqwest::Error) -> ImageError {
        ImageError::Unreachable {
            registry: self.reference.registry.clone(),
            reason: error_chain(error),
        }
    }

    fn odd(&self, reason: &str) -> ImageError {
        ImageError::Registry {
            registry: self.reference.registry.clone(),
            reason: reason.to_owned(),
        }
    }
}

#[derive(Deserialize)]
struct Token {
    token: Option<String>,
    access_token: Option<String>,
}

/// What a registry wants to see.
#[derive(Debug, PartialEq, Eq)]
enum Challenge {
    Basic,
    Bearer { realm: String, service: Option<String>, scope: Option<String> },
}

impl Challenge {
    fn parse(header: &str) -> Option<Self> {
        let (scheme, rest) = header.trim().split_once(' ').unwrap_or((header.trim(), ""));
        if scheme.eq_ignore_ascii_case("basic") {
            return Some(Self::Basic);
        }
        if !scheme.eq_ignore_ascii_case("bearer") {
            return None;
        }
        let field = |wanted: &str| {
            let mut rest = rest;
            while let Some((name, after)) = rest.split_once('=') {
                let name = name.trim_matches([' ', ',']);
                let (value, next) = match after.strip_prefix('"') {
                    Some(quoted) => quoted.split_once('"')?,
                    None => after.split_once(',').unwrap_or((after, "")),
                };
                if name.eq_ignore_ascii_case(wanted) {
                    return Some(value.to_owned());
                }
                rest = next;
            }
            None
        };
        Some(Self::Bearer {
            realm: field("realm")?,
            service: field("service"),
            scope: field("scope"),
        })
    }
}

fn basic(user: &str, password: &str) -> String {
    use base64::Engine as _;
    let pair = format!("{user}:{password}");
    format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(pair))
}

mod url {
    /// Writes fields the way HTML forms are sent.
    pub(super) fn form(fields: &[(&str, &str)]) -> String {
        let mut url = reqwest::Url::parse("http://form/").expect("a constant");
        url.query_pairs_mut().extend_pairs(fields);
        url.query().unwrap_or_default().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::Challenge;

    #[test]
    fn challenges_are_read() {
        let bearer = |realm: &str, service: Option<&str>, scope: Option<&str>| {
            Some(Challenge::Bearer {
                realm: realm.to_owned(),
                service: service.map(str::to_owned),
                scope: scope.map(str::to_owned),
            })
        };
        for (header, read) in [
            ("Basic realm=\"x\"", Some(Challenge::Basic)),
            (
                "Bearer realm=\"https://a/token\",service=\"s\",scope=\"repository:a/b:pull,push\"",
                bearer("https://a/token", Some("s"), Some("repository:a/b:pull,push")),
            ),
            ("bearer Realm=https://a/token, service=s", bearer("https://a/token", Some("s"), None)),
            ("Bearer service=\"s\"", None),
            ("Bearer realm=\"open", None),
            ("Negotiate", None),
        ] {
            assert_eq!(Challenge::parse(header), read, "{header}");
        }
    }
}
