//! The initial content of a new sandbox: a repository or an archive, fetched *inside* it, under its
//! own policy.
//!
//! Credentials must not rest there. They are in the environment of one command, as a header for one address, so
//! neither `.git/config` nor a command line nor our record has them. A sandbox whose source cannot be fetched is
//! deleted again: its creator gets the reason and may try again under the same name.

use std::collections::BTreeMap;

use axum::http::StatusCode;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use sandkeep_core::engine::{Caller, CommandOutput, Delete, Exec, OnDelete, Opened, WakeMode};
use sandkeep_core::model::Span;

use crate::api::App;
use crate::compat::vercel::protocol::error::VercelError;
use crate::compat::vercel::protocol::input::Fields;

/// How long fetching may take.
const WITHIN: Span = Span(600_000);
/// How much of the output of a failed fetch is returned.
const TOLD: usize = 2000;
/// What a program that is not there exits with.
const NOT_THERE: i32 = 127;

const CLONE: &str = r#"set -e
command -v git >/dev/null 2>&1 || { echo "there is no git in this image" >&2; exit 127; }
url=$1 depth=$2 revision=$3 name=$4
if [ -z "$name" ]; then
  name=${url%/}; name=${name##*/}; name=${name%.git}
  [ -n "$name" ] || { echo "the address names no repository" >&2; exit 1; }
fi
export GIT_TERMINAL_PROMPT=0
if [ -z "$revision" ] && [ -z "$(ls -A -- "$name" 2>/dev/null)" ]; then
  exec git clone -q ${depth:+--depth "$depth"} -- "$url" "$name"
fi
git init -q -- "$name"
cd -- "$name"
git remote add origin "$url"
if [ -z "$revision" ]; then
  # What is there already stays, unless the repository has a file of that name: then it fails.
  git fetch -q ${depth:+--depth "$depth"} origin
  git remote set-head origin -a >/dev/null
  branch=$(git symbolic-ref --short refs/remotes/origin/HEAD)
  exec git checkout -q "${branch#origin/}" --
fi
if ! git fetch -q ${depth:+--depth "$depth"} origin "$revision"; then
  # A server may not hand out what no name points to: then everything is fetched and looked through.
  git fetch -q origin '+refs/heads/*:refs/remotes/origin/*' --tags
  exec git checkout -q "$revision" --
fi
exec git checkout -q FETCH_HEAD --"#;

const UNPACK: &str = r#"set -e
file=$(mktemp)
trap 'rm -f "$file"' EXIT
if command -v curl >/dev/null 2>&1; then
  curl -fsSL -o "$file" -- "$1"
elif command -v wget >/dev/null 2>&1; then
  wget -q -O "$file" -- "$1"
elif command -v python3 >/dev/null 2>&1; then
  python3 -c 'import sys, urllib.request; urllib.request.urlretrieve(sys.argv[1], sys.argv[2])' "$1" "$file"
else
  echo "there is neither curl nor wget nor python3 in this image" >&2; exit 127
fi
tar -xf "$file""#;

/// What is fetched, and from where.
#[derive(Debug)]
pub(crate) enum Fetched {
    Repository {
        url: String,
        depth: Option<u64>,
        revision: Option<String>,
        login: Option<(String, String)>,
        /// Into the working directory itself, not a directory of the repository's name in it.
        here: bool,
    },
    Archive {
        url: String,
    },
}

/// Reads a source of type `git`, which goes into the working directory itself or below it.
pub(crate) fn repository(source: &mut Fields, here: bool) -> Result<Fetched, VercelError> {
    let url = address(source)?;
    let depth = source.number("depth", 1..=1 << 31)?;
    let revision = source.text("revision")?;
    if revision.as_ref().is_some_and(|it| it.starts_with('-') || it.contains(char::is_control)) {
        return Err(VercelError::bad("`source.revision` should be a branch, a tag or a commit."));
    }
    let (username, password) = (source.text("username")?, source.text("password")?);
    let login = match (username, password) {
        (None, None) => None,
        (Some(name), Some(_)) if name.contains(':') => {
            return Err(VercelError::bad("`source.username` should have no colon."));
        }
        (Some(name), Some(password)) => Some((name, password)),
        _ => {
            return Err(VercelError::bad(
                "`source.username` and `source.password` should be given together.",
            ));
        }
    };
    let revision = revision.filter(|it| !it.is_empty());
    Ok(Fetched::Repository { url, depth, revision, login, here })
}

/// Reads a source of type `tarball`.
pub(crate) fn archive(source: &mut Fields) -> Result<Fetched, VercelError> {
    Ok(Fetched::Archive { url: address(source)? })
}

fn address(source: &mut Fields) -> Result<String, VercelError> {
    let url = source.needed("url")?;
    let rest = url.strip_prefix("https://").or_else(|| url.strip_prefix("http://"));
    let Some(rest) = rest.filter(|_| !url.contains(|c: char| c.is_control() || c == ' ')) else {
        return Err(VercelError::bad("`source.url` should be an http or https URL."));
    };
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    if authority.contains('@') {
        // It would be on record in .git/config.
        return Err(VercelError::bad(
            "`source.url` should hold no credentials; give `username` and `password`.",
        ));
    }
    if authority.is_empty() {
        return Err(VercelError::bad("`source.url` should name a host."));
    }
    Ok(url)
}

impl Fetched {
    fn command(&self) -> Exec {
        let text = |text: &str| text.to_owned();
        let shell = |script: &str| vec![text("sh"), text("-c"), text(script), text("sh")];
        let (mut argv, mut env) = (shell(UNPACK), BTreeMap::new());
        match self {
            Self::Archive { url } => argv.push(url.clone()),
            Self::Repository { url, depth, revision, login, here } => {
                argv = shell(CLONE);
                argv.push(url.clone());
                argv.push(depth.map_or(String::new(), |depth| depth.to_string()));
                argv.push(revision.clone().unwrap_or_default());
                argv.push(text(if *here { "." } else { "" }));
                if let Some((name, password)) = login {
                    let basic = STANDARD.encode(format!("{name}:{password}"));
                    // For this address and what is below it, wherever else it may be sent on to.
                    env.insert(text("GIT_CONFIG_COUNT"), text("1"));
                    env.insert(text("GIT_CONFIG_KEY_0"), format!("http.{url}.extraHeader"));
                    env.insert(text("GIT_CONFIG_VALUE_0"), format!("Authorization: Basic {basic}"));
                }
            }
        }
        Exec { argv, env, timeout: Some(WITHIN), ..Exec::default() }
    }

    fn url(&self) -> &str {
        match self {
            Self::Repository { url, .. } | Self::Archive { url } => url,
        }
    }

    /// Fetches it into a sandbox that was just made; one for which that fails is deleted again.
    pub(crate) async fn into(
        self,
        app: &App,
        caller: &Caller,
        made: &Opened,
    ) -> Result<(), VercelError> {
        let Err(problem) = self.fetch(app, caller, made).await else { return Ok(()) };
        let delete = Delete { snapshots: OnDelete::Drop, ..Delete::default() };
        let gone = app.engine.delete(&caller.project, &made.sandbox.name, delete, None).await;
        if let Err(error) = gone {
            tracing::warn!(sandbox = %made.sandbox.name, %error, "cannot delete a sandbox whose source could not be loaded");
        }
        Err(problem)
    }

    async fn fetch(&self, app: &App, caller: &Caller, made: &Opened) -> Result<(), VercelError> {
        let session = made.session.as_ref().ok_or_else(VercelError::stopped)?;
        let (wake, by) = (WakeMode::Session(session.id.clone()), Some(caller.key.to_string()));
        let exec = Exec { wake, by, ..self.command() };
        let (project, name) = (&made.sandbox.project, &made.sandbox.name);
        let mut events = app.engine.exec(project, name, exec).await?.events;
        let mut said = Vec::new();
        let code = loop {
            match events.next().await {
                Some(CommandOutput::Stdout(bytes) | CommandOutput::Stderr(bytes)) => {
                    said.extend_from_slice(&bytes);
                    said.drain(..said.len().saturating_sub(TOLD));
                }
                Some(CommandOutput::Gap(_)) => {}
                Some(CommandOutput::Exited(command)) => break command.exit_code,
                None => break None,
            }
        };
        if code == Some(0) {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&said);
        let why = match said.trim() {
            "" if code == Some(137) => "it took too long, or the sandbox has ended",
            "" => "it did not say why",
            said => said,
        };
        let hint = match code {
            Some(NOT_THERE) => " Choose another image, or write the files.",
            _ => "",
        };
        let message = format!("`source`: `{}` could not be fetched: {why}{hint}", self.url());
        Err(VercelError::new(StatusCode::BAD_REQUEST, "bad_request", message))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{archive, repository};
    use crate::compat::vercel::protocol::input::Fields;

    #[test]
    fn credentials_are_in_the_environment_and_nowhere_else() {
        let mut source = Fields::of(
            "source",
            json!({ "url": "https://example.com/a/b.git", "depth": 1, "username": "u", "password": "s3cret" }),
        )
        .unwrap();
        let command = repository(&mut source, true).unwrap().command();
        assert!(!format!("{:?}", command.argv).contains("s3cret"));
        assert_eq!(command.env["GIT_CONFIG_KEY_0"], "http.https://example.com/a/b.git.extraHeader");
        assert_eq!(command.env["GIT_CONFIG_VALUE_0"], "Authorization: Basic dTpzM2NyZXQ=");
    }

    #[test]
    fn sources_that_are_none() {
        for (source, told) in [
            (json!({}), "source.url"),
            (json!({ "url": "git@example.com:a/b.git" }), "http or https"),
            (json!({ "url": "file:///etc" }), "http or https"),
            (json!({ "url": "--upload-pack=x" }), "http or https"),
            (json!({ "url": "https://u:p@example.com/a" }), "no credentials"),
            (json!({ "url": "https:///a" }), "a host"),
            (json!({ "url": "https://a.com/b", "depth": 0 }), "source.depth"),
            (json!({ "url": "https://a.com/b", "revision": "--force" }), "source.revision"),
            (json!({ "url": "https://a.com/b", "username": "u" }), "together"),
            (json!({ "url": "https://a.com/b", "username": "a:b", "password": "p" }), "colon"),
        ] {
            let mut fields = Fields::of("source", source.clone()).unwrap();
            let error = repository(&mut fields, false).expect_err(&source.to_string());
            assert!(error.message().contains(told), "{source}: {}", error.message());
        }
        let mut fields = Fields::of("source", json!({ "url": "https://a.com/b.tgz" })).unwrap();
        archive(&mut fields).unwrap();
    }
}
