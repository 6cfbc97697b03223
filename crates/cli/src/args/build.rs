//! Arguments of `image build`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

pub(super) const BUILD_HELP: &str = "\
Each step runs in a sandbox of the project, under its network policy. What a step has made is kept \
for the next build. Examples:

  keep image build -t my-app .
  keep image build -t my-app --build-arg VERSION=2 --target test .
  keep image build -t my-app --secret id=npmrc,src=$HOME/.npmrc .
  keep create box --image my-app";

/// Arguments of `image build`.
#[derive(Debug, Args)]
pub(crate) struct BuildArgs {
    /// Directory with the files that the Dockerfile may copy
    pub(crate) dir: PathBuf,
    /// Name of the image [default: the directory's name]
    #[arg(short = 't', long = "tag", value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// The Dockerfile; `-` is standard input [default: DIR/Dockerfile]
    #[arg(short = 'f', long = "file", value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Value of an `ARG`; without `=`, of the environment variable of that name (repeatable)
    #[arg(long = "build-arg", value_name = "NAME=VALUE")]
    pub(crate) args: Vec<String>,
    /// Build only this stage and what it needs
    #[arg(long, value_name = "STAGE")]
    pub(crate) target: Option<String>,
    /// Secret for `RUN --mount=type=secret`: from a file or an environment variable (repeatable)
    #[arg(long = "secret", value_name = "id=ID,src=FILE|env=NAME", value_parser = secret)]
    pub(crate) secrets: Vec<SecretFrom>,
    /// Make all steps again
    #[arg(long)]
    pub(crate) no_cache: bool,
    /// How to show progress
    #[arg(long, value_enum, default_value = "auto", value_name = "HOW")]
    pub(crate) progress: ShowProgress,
}

/// How the progress of a build is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ShowProgress {
    /// Steps and their output, with colours on a terminal
    Auto,
    /// Steps and their output
    Plain,
    /// Only the result
    Quiet,
}

/// A secret, and where its value is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SecretFrom {
    pub(crate) id: String,
    pub(crate) from: SecretValue,
}

/// Where the value of a secret is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SecretValue {
    File(PathBuf),
    Env(String),
}

fn secret(text: &str) -> Result<SecretFrom, String> {
    let (mut id, mut from) = (None, None);
    for field in text.split(',') {
        match field.split_once('=') {
            Some(("id", value)) if !value.is_empty() && value.is_ascii() => {
                id = Some(value.to_owned());
            }
            Some(("src" | "source", value)) if !value.is_empty() => {
                from = Some(SecretValue::File(value.into()));
            }
            Some(("env", value)) if !value.is_empty() => {
                from = Some(SecretValue::Env(value.to_owned()));
            }
            Some(("type", "file" | "env")) => {}
            _ => {
                return Err(format!(
                    "`{field}` is not known: write id=ID,src=FILE or id=ID,env=NAME"
                ));
            }
        }
    }
    let id = id.ok_or("write id=ID,src=FILE or id=ID,env=NAME")?;
    let from = from.unwrap_or_else(|| SecretValue::Env(id.clone()));
    Ok(SecretFrom { id, from })
}
