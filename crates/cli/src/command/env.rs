//! `keep env`: prints the settings with which a shell uses this server for other vendors' clients,
//! unchanged.
//!
//! Their clients have their service's address built in. What turns them (a file that Node loads first,
//! a module for Python) is part of this program and written out when it is asked for, so that nothing
//! has to be installed. The files are the same for every server; where it is stands in a variable.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use sandkeep_client::types::{Audience, IssueToken};

use super::Context;
use crate::args::{ClientsArg, EnvArgs, Global};
use crate::failure::Failure;
use crate::locate;

const PRELOAD: &str = include_str!("../../../../sdk/vercel-preload/index.mjs");
const PYTHON: &str = include_str!("../../../../sdk/vercel-python/sandkeep_vercel.py");
const PYTHON_START: &str = include_str!("../../../../sdk/vercel-python/sitecustomize.py");

/// Where their clients look for credentials. A program that is not redirected would send what it
/// finds there to the other service, so the token is exported under a name of ours, and what turns
/// clients sets these.
const THEIRS: [&str; 5] = [
    "VERCEL_OIDC_TOKEN",
    "VERCEL_AUTH_TOKEN",
    "VERCEL_TOKEN",
    "VERCEL_TEAM_ID",
    "VERCEL_PROJECT_ID",
];

pub(super) async fn env(context: &Context, global: &Global, args: &EnvArgs) -> Result<(), Failure> {
    let ClientsArg::Vercel = args.clients;
    let url = locate::http_url(global)?;
    let request =
        IssueToken { audience: Audience::Vercel, scope: None, expires: Some(args.expires) };
    let made = context.client.issue_token(&request).await?;
    let home = helpers()?;
    let preload = place(&home.join("vercel-preload.mjs"), PRELOAD)?;
    place(&home.join("python/sandkeep_vercel.py"), PYTHON)?;
    place(&home.join("python/sitecustomize.py"), PYTHON_START)?;
    // Node takes this beside the system's. What Python has replaces them, so that is left to the user.
    let ca = locate::ca(global).filter(|_| url.starts_with("https:"));
    let ca = ca.map(|path| text(&path));
    let mut variables = vec![
        ("SANDKEEP_URL", url),
        ("SANDKEEP_VERCEL_TOKEN", made.token),
        ("NODE_OPTIONS", with(std::env::var("NODE_OPTIONS").ok(), " ", &import_of(&preload))),
        ("PYTHONPATH", with(std::env::var("PYTHONPATH").ok(), ":", &text(&home.join("python")))),
        ("VERCEL_TELEMETRY_DISABLED", "1".to_owned()),
        ("VERCEL_SANDBOX_TELEMETRY_DISABLED", "1".to_owned()),
        ("SANDBOX_SKIP_VERSION_CHECK", "1".to_owned()),
    ];
    if let Some(ca) = ca {
        variables.push(("NODE_EXTRA_CA_CERTS", ca));
    }
    let map: std::collections::BTreeMap<_, _> = variables.iter().cloned().collect();
    context.screen.answer(&map, |_| {
        let line = |(name, value): &(&str, String)| format!("export {name}={}\n", quoted(value));
        // Those of an account elsewhere would be taken instead of the token.
        let mut text = format!("unset {}\n", THEIRS.join(" "));
        text.extend(variables.iter().map(line));
        text
    })
}

/// The existing value with something put before it, once: a shell may be prepared twice. First,
/// because Python takes the first `sitecustomize` it finds; ours loads the next one too.
fn with(there: Option<String>, between: &str, more: &str) -> String {
    match there.filter(|there| !there.is_empty()) {
        None => more.to_owned(),
        Some(there) => {
            let others = there.split(between).filter(|part| *part != more);
            std::iter::once(more).chain(others).collect::<Vec<_>>().join(between)
        }
    }
}

/// Node takes a URL there, in which a space cannot end the option.
fn import_of(preload: &Path) -> String {
    let mut url = String::from("--import=file://");
    for byte in text(preload).bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'-' | b'_' | b'.' | b'~' => {
                url.push(char::from(byte));
            }
            other => url.push_str(&format!("%{other:02X}")),
        }
    }
    url
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

/// Safe for a shell, whatever it holds.
fn quoted(value: &str) -> String {
    format!("'{}'", value.replace('\'', r"'\''"))
}

/// Where a user's programs keep their files.
fn helpers() -> Result<PathBuf, Failure> {
    let set =
        |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let data = set("XDG_DATA_HOME").or_else(|| set("HOME").map(|home| home.join(".local/share")));
    data.map(|data| data.join("sandkeep")).ok_or_else(|| {
        Failure::here("no directory for the files that redirect clients")
            .with_hint("set HOME or XDG_DATA_HOME")
    })
}

/// Writes a file whole, unless it exists with that content.
fn place(path: &Path, content: &str) -> Result<PathBuf, Failure> {
    let write = || -> io::Result<()> {
        if fs::read_to_string(path).is_ok_and(|found| found == content) {
            return Ok(());
        }
        let parent = path.parent().unwrap_or(Path::new("/"));
        fs::create_dir_all(parent)?;
        // Beside it first: a program that starts meanwhile never loads half of it.
        let draft = parent.join(format!(".new.{}", std::process::id()));
        fs::write(&draft, content)?;
        fs::rename(&draft, path)
    };
    let cannot = |error| Failure::caused(format!("cannot write `{}`", path.display()), error);
    write().map_err(cannot)?;
    Ok(path.to_owned())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{import_of, place, quoted, with};

    #[test]
    fn a_shell_reads_back_what_was_written() {
        assert_eq!(quoted("it's $HOME"), r"'it'\''s $HOME'");
        assert_eq!(import_of(Path::new("/a b/%x.mjs")), "--import=file:///a%20b/%25x.mjs");
    }

    #[test]
    fn what_is_set_already_stays_and_nothing_comes_twice() {
        assert_eq!(with(None, " ", "--a"), "--a");
        assert_eq!(with(Some("--b".into()), " ", "--a"), "--a --b");
        assert_eq!(with(Some("--b --a".into()), " ", "--a"), "--a --b");
    }

    #[test]
    fn files_are_written_once_and_mended_when_they_are_old() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/file");
        place(&path, "new").unwrap();
        std::fs::write(&path, "old").unwrap();
        place(&path, "new").unwrap();
        assert_eq!(std::fs::read_to_string(path).unwrap(), "new");
    }
}
