//! Tokens: signed strings that act for a key.
//!
//! Some clients insist on a token of three parts (a JWT) and read claims out of it. Such a token is
//! made *from* a key and is worth nothing without it: it carries the key's id, reaches no further
//! than the key does, and ends with it. Nothing of it is stored, so making one leaves no trace and
//! revoking the key ends them all.
//!
//! The signature is HMAC-SHA-256 with 256 random bits that lie in the data directory, in `token.key`,
//! readable by its owner alone. Removing the file ends every token there is; the next daemon makes
//! another.
//!
//! `aud` says what a token is for. One that opens a terminal ([`Tenancy::sign`]) or a port
//! ([`Tenancy::issue_port_token`]) is refused as a key, and the other way round.

use std::io;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::Sha256;

use crate::engine::tenancy::Tenancy;
use crate::engine::{Caller, Error, Result, later};
use crate::model::{KeyId, Name, Sandbox, SandboxId, Scope, Span, Timestamp, now};

const FILE: &str = "token.key";
/// What every token begins with, encoded.
pub(super) const HEADER: &str = r#"{"alg":"HS256","typ":"JWT"}"#;
/// What a token that stands for a key is for.
const FOR_CALLS: &str = "sandkeep";
/// What a token that opens a port is for.
const FOR_A_PORT: &str = "sandkeep-port";

/// What tokens are signed with.
pub(in crate::engine) struct Signer([u8; 32]);

impl std::fmt::Debug for Signer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Signer")
    }
}

impl Signer {
    /// Reads the secret of this data directory, which is made when there is none. A damaged one is
    /// moved aside, and the answer says where: with another secret every token is refused.
    pub(in crate::engine) fn open(data: &Path) -> io::Result<(Self, Option<String>)> {
        let path = data.join(FILE);
        match std::fs::read(&path) {
            Ok(bytes) => match <[u8; 32]>::try_from(bytes) {
                Ok(secret) => Ok((Self(secret), None)),
                Err(_) => {
                    let aside = format!("{FILE}.damaged");
                    std::fs::rename(&path, data.join(&aside))?;
                    Ok((Self::open(data)?.0, Some(aside)))
                }
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let mut secret = [0u8; 32];
                getrandom::fill(&mut secret).map_err(io::Error::other)?;
                // Whole or not at all: half a secret would always be refused.
                let draft = data.join("token.key.new");
                let _ = std::fs::remove_file(&draft);
                let mut open = std::fs::OpenOptions::new();
                let mut file = open.write(true).create_new(true).mode(0o600).open(&draft)?;
                file.write_all(&secret)?;
                file.sync_all()?;
                std::fs::rename(&draft, &path)?;
                std::fs::File::open(data)?.sync_all()?;
                Ok((Self(secret), None))
            }
            Err(error) => Err(error),
        }
    }

    fn mac(&self, text: &str) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("any length is a key");
        mac.update(text.as_bytes());
        mac
    }

    fn sign(&self, claims: &impl Serialize) -> String {
        let claims = serde_json::to_vec(claims).unwrap_or_default();
        let text = format!("{}.{}", URL_SAFE_NO_PAD.encode(HEADER), URL_SAFE_NO_PAD.encode(claims));
        let signature = URL_SAFE_NO_PAD.encode(self.mac(&text).finalize().into_bytes());
        format!("{text}.{signature}")
    }

    /// The claims of a token that we signed and that has not expired.
    fn verify(&self, token: &str) -> Option<Value> {
        self.claims(token).filter(|claims| !expired(claims))
    }

    /// The claims of a token that we signed.
    fn claims(&self, token: &str) -> Option<Value> {
        let (text, signature) = token.rsplit_once('.')?;
        let (header, claims) = text.split_once('.')?;
        // One algorithm only: what the header says is compared, not obeyed.
        if URL_SAFE_NO_PAD.decode(header).ok()? != HEADER.as_bytes() {
            return None;
        }
        let signature = URL_SAFE_NO_PAD.decode(signature).ok()?;
        self.mac(text).verify_slice(&signature).ok()?;
        serde_json::from_slice(&URL_SAFE_NO_PAD.decode(claims).ok()?).ok()
    }
}

fn expired(claims: &Value) -> bool {
    claims.get("exp").and_then(Value::as_i64).is_none_or(|exp| exp <= now().as_second())
}

/// What a token for a port says.
#[derive(Debug, Serialize, Deserialize)]
struct PortClaims {
    aud: String,
    /// The key it was made with.
    sub: KeyId,
    sandbox: SandboxId,
    port: u16,
    exp: i64,
}

/// What a token is worth at a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortPass {
    /// It opens it, until then.
    Opens(Timestamp),
    /// It did once: it has expired, or its key has gone.
    Ended,
    /// It is not for this port, or not a token of this server.
    Unknown,
}

#[derive(Debug, Serialize, Deserialize)]
struct Claims {
    aud: String,
    /// The key it speaks for.
    sub: KeyId,
    /// The project it is for.
    sandkeep_project: Name,
    /// How far it reaches; never further than the key.
    sandkeep_scope: Scope,
    iat: i64,
    exp: i64,
    /// What a front wants its clients to read.
    #[serde(flatten)]
    more: Map<String, Value>,
}

impl Tenancy {
    /// Makes a token that speaks for the caller's key in the caller's project. `more` are claims for
    pub(in crate::engine) fn issue_token(
        &self,
        caller: &Caller,
        scope: Scope,
        expires: Span,
        more: Map<String, Value>,
    ) -> Result<String> {
        self.require_project(&caller.project)?;
        let far = || Error::invalid("expires", "too far away");
        let expires = later(expires).ok_or_else(far)?;
        // A token that was made with a token ends with it: its holder cannot prolong it.
        let expires = caller.until.map_or(expires, |until| until.min(expires));
        let claims = Claims {
            aud: FOR_CALLS.to_owned(),
            sub: caller.key.clone(),
            sandkeep_project: caller.project.clone(),
            sandkeep_scope: scope.min(caller.scope),
            iat: now().as_second(),
            exp: expires.as_second(),
            more,
        };
        Ok(self.signer.sign(&claims))
    }

    /// Makes a token that opens one private port of one sandbox, and nothing else. It ends with the
    pub(in crate::engine) fn issue_port_token(
        &self,
        caller: &Caller,
        sandbox: &SandboxId,
        port: u16,
        expires: Span,
    ) -> Result<(String, Timestamp)> {
        let far = || Error::invalid("expires", "too far away");
        let expires = later(expires).ok_or_else(far)?;
        let expires = caller.until.map_or(expires, |until| until.min(expires));
        let claims = PortClaims {
            aud: FOR_A_PORT.to_owned(),
            sub: caller.key.clone(),
            sandbox: sandbox.clone(),
            port,
            exp: expires.as_second(),
        };
        let expires = Timestamp::from_second(claims.exp).unwrap_or(expires);
        Ok((self.signer.sign(&claims), expires))
    }

    /// Whether a token was made here, valid or not any more.
    pub(super) fn has_signed(&self, token: &str) -> bool {
        self.signer.claims(token).is_some()
    }

    /// Returns the access that a token gives to a port of a sandbox.
    pub(in crate::engine) fn port_pass(
        &self,
        token: &str,
        sandbox: &Sandbox,
        port: u16,
    ) -> PortPass {
        let Some(claims) = self.signer.claims(token) else {
            return PortPass::Unknown;
        };
        let over = expired(&claims);
        let claims = match serde_json::from_value::<PortClaims>(claims) {
            Ok(claims) if claims.aud == FOR_A_PORT => claims,
            _ => return PortPass::Unknown,
        };
        if claims.sandbox != sandbox.id || claims.port != port {
            return PortPass::Unknown;
        }
        let key = self.key(&claims.sub);
        let reaches = key.is_some_and(|(home, key)| {
            let own = home == sandbox.project && key.scope >= Scope::Write;
            own || key.scope == Scope::Admin
        });
        match Timestamp::from_second(claims.exp) {
            Ok(until) if reaches && !over => PortPass::Opens(until),
            _ => PortPass::Ended,
        }
    }

    /// Finds out for which key a token speaks.
    pub(in crate::engine) fn bearer_of(&self, token: &str) -> Result<Caller> {
        let claims = self.signer.verify(token).ok_or(Error::BadKey)?;
        let claims: Claims = serde_json::from_value(claims).map_err(|_| Error::BadKey)?;
        if claims.aud != FOR_CALLS {
            return Err(Error::BadKey);
        }
        let (home, key) = self.key(&claims.sub).ok_or(Error::BadKey)?;
        // Only an admin's key reaches other projects than its own.
        if home != claims.sandkeep_project && key.scope != Scope::Admin {
            return Err(Error::BadKey);
        }
        self.require_project(&claims.sandkeep_project).map_err(|_| Error::BadKey)?;
        Ok(Caller {
            project: claims.sandkeep_project,
            scope: key.scope.min(claims.sandkeep_scope),
            key: key.id,
            // A token is for programs.
            approve: false,
            until: Timestamp::from_second(claims.exp).ok(),
        })
    }

    /// Signs a value that a front end wants to get back later, for this purpose only.
    pub(in crate::engine) fn sign(
        &self,
        purpose: &str,
        expires: Span,
        what: &impl Serialize,
    ) -> String {
        let exp = later(expires).unwrap_or_else(now).as_second();
        self.signer.sign(&serde_json::json!({ "aud": purpose, "exp": exp, "what": what }))
    }

    /// What was signed for this purpose, if it was and has not expired.
    pub(in crate::engine) fn signed<T: DeserializeOwned>(
        &self,
        purpose: &str,
        token: &str,
    ) -> Option<T> {
        let mut claims = self.signer.verify(token)?;
        if claims.get("aud").and_then(Value::as_str) != Some(purpose)
            || [FOR_CALLS, FOR_A_PORT].contains(&purpose)
        {
            return None;
        }
        serde_json::from_value(claims.get_mut("what")?.take()).ok()
    }
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    use serde_json::json;

    use super::Signer;
    use crate::model::now;

    fn good() -> serde_json::Value {
        json!({ "aud": "x", "exp": now().as_second() + 60 })
    }

    #[test]
    fn what_was_signed_here_is_known_again_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let signer = Signer::open(dir.path()).unwrap().0;
        let token = signer.sign(&good());
        assert_eq!(Signer::open(dir.path()).unwrap().0.verify(&token), Some(good()));
        let elsewhere = tempfile::tempdir().unwrap();
        assert_eq!(Signer::open(elsewhere.path()).unwrap().0.verify(&token), None);
        let parts: Vec<&str> = token.split('.').collect();
        let none = URL_SAFE_NO_PAD.encode(r#"{"alg":"none","typ":"JWT"}"#);
        let richer = URL_SAFE_NO_PAD.encode(json!({ "aud": "y", "exp": 1_i64 << 40 }).to_string());
        for forged in [
            format!("{none}.{}.", parts[1]),
            format!("{none}.{}.{}", parts[1], parts[2]),
            format!("{}.{richer}.{}", parts[0], parts[2]),
            format!("{}.{}.", parts[0], parts[1]),
            format!("{}.{}", parts[0], parts[1]),
            format!("{}.{}.{}A", parts[0], parts[1], parts[2]),
            "..".to_owned(),
            String::new(),
        ] {
            assert_eq!(signer.verify(&forged), None, "{forged}");
        }
    }

    #[test]
    fn a_token_ends() {
        let dir = tempfile::tempdir().unwrap();
        let signer = Signer::open(dir.path()).unwrap().0;
        for claims in [json!({ "exp": now().as_second() - 1 }), json!({}), json!({ "exp": "9" })] {
            assert_eq!(signer.verify(&signer.sign(&claims)), None, "{claims}");
        }
    }

    #[test]
    fn the_secret_is_its_owners_alone() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        Signer::open(dir.path()).unwrap();
        let mode = std::fs::metadata(dir.path().join("token.key")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        std::fs::write(dir.path().join("token.key"), b"short").unwrap();
        let (_, aside) = Signer::open(dir.path()).unwrap();
        let aside = std::fs::read(dir.path().join(aside.unwrap())).unwrap();
        assert_eq!(aside, b"short", "a damaged one is kept and another takes its place");
        assert!(Signer::open(dir.path()).unwrap().1.is_none());
    }
}
