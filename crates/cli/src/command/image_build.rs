//! `keep image build`: packs a build context, sends it, and shows what the build does.

use std::collections::HashMap;
use std::io::{IsTerminal as _, Read as _, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use sandkeep_client::types::{BuildProgress, Image};
use sandkeep_client::{BuildOptions, Error, Upload};
use sandkeep_core::dockerfile::{IgnoreFile, IgnoreVerdict};

use super::image::bar_if;
use super::{Context, bytes};
use crate::args::{BuildArgs, SecretFrom, SecretValue, ShowProgress};
use crate::failure::Failure;
use crate::screen::{Paint, note};

/// How the Dockerfile is called in the archive, wherever it is, and what it ignores.
const DOCKERFILE: &str = ".keep-build.Dockerfile";
/// For how long a server that went away is waited for.
const BACK_WITHIN: Duration = Duration::from_secs(120);
/// How often it may go away during one build.
const MOST_RETURNS: usize = 20;
const BETWEEN_TRIES: Duration = Duration::from_millis(500);
/// What all secrets of a build may have together: they travel in headers.
const MOST_SECRET: usize = 8 << 10;

pub(super) async fn build(context: &Context, args: BuildArgs) -> Result<(), Failure> {
    let packing = ContextArchive::of(&args)?;
    let options = options(&args)?;
    let mut shown = BuildScreen::new(args.progress);
    let (mut away_since, mut returns) = (None, 0);
    loop {
        match attempt(context, &packing, &options, &mut shown).await {
            Ok(image) => {
                return context.screen.answer(&image, |image| {
                    let size = bytes(image.size_bytes + image.host_bytes);
                    format!("{}  {} layers, {size}\n", image.name, image.layers)
                });
            }
            // The server is being restarted. What was built so far is in its cache.
            Err(error) if shown.ever && is_away(&error) && returns < MOST_RETURNS => {
                if std::mem::take(&mut shown.heard) {
                    note("the server went away; the build goes on when it is back");
                    away_since = None;
                    returns += 1;
                }
                if away_since.get_or_insert_with(Instant::now).elapsed() > BACK_WITHIN {
                    return Err(error.into());
                }
                tokio::time::sleep(BETWEEN_TRIES).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Whether the server is not there, for now.
fn is_away(error: &Error) -> bool {
    match error {
        Error::Connect { .. } | Error::Broken { .. } => true,
        error => matches!(error.code(), Some("shutting_down")),
    }
}

async fn attempt(
    context: &Context,
    packing: &ContextArchive,
    options: &BuildOptions,
    shown: &mut BuildScreen,
) -> Result<Image, Error> {
    let bar = bar_if(shown.how != ShowProgress::Quiet, None);
    bar.set_message("context");
    let archive = Upload::channel(packing.pack(bar.clone()));
    let building = context.client.build_image(options, archive).await;
    bar.finish_and_clear();
    let mut building = building?;
    while let Some(news) = building.next().await? {
        shown.heard = true;
        shown.ever = true;
        if let BuildProgress::Done { image } = news {
            return Ok(image);
        }
        shown.show(news);
    }
    Err(Error::Broken { doing: "building", source: "it ended before the result".into() })
}

/// What is sent.
struct ContextArchive {
    dir: PathBuf,
    dockerfile: Vec<u8>,
    ignore: Vec<u8>,
    rules: IgnoreFile,
}

impl ContextArchive {
    fn of(args: &BuildArgs) -> Result<Self, Failure> {
        let dir = &args.dir;
        if !dir.is_dir() {
            let failure = Failure::here(format!("`{}` is no directory", dir.display()));
            return Err(
                failure.with_hint("name the directory with the files of the build, like `.`")
            );
        }
        let path = args.file.clone().unwrap_or_else(|| dir.join("Dockerfile"));
        let cannot = |error| {
            Failure::caused(format!("cannot read the Dockerfile `{}`", path.display()), error)
                .with_hint("name it with `-f`")
        };
        let dockerfile = if path == Path::new("-") {
            let mut text = Vec::new();
            std::io::stdin().read_to_end(&mut text).map_err(cannot)?;
            text
        } else {
            std::fs::read(&path).map_err(cannot)?
        };
        let mut own = path.clone().into_os_string();
        own.push(".dockerignore");
        let mut ignore = Vec::new();
        for path in [PathBuf::from(own), dir.join(".dockerignore")] {
            match std::fs::read(&path) {
                Ok(text) => {
                    ignore = text;
                    break;
                }
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => {
                    let message = format!("cannot read `{}`", path.display());
                    return Err(Failure::caused(message, error));
                }
            }
        }
        let text = String::from_utf8_lossy(&ignore);
        let rules = IgnoreFile::parse(&text).map_err(|(line, reason)| {
            Failure::here(format!(".dockerignore, line {line}: {reason}"))
        })?;
        Ok(Self { dir: dir.clone(), dockerfile, ignore, rules })
    }

    fn pack(
        &self,
        bar: indicatif::ProgressBar,
    ) -> tokio::sync::mpsc::Receiver<std::io::Result<::bytes::Bytes>> {
        let rules = self.rules.clone();
        let mut directories: HashMap<PathBuf, IgnoreVerdict> = HashMap::new();
        let choose = move |path: &Path, is_dir: bool| {
            let above = path.parent().and_then(|above| directories.get(above));
            let verdict = rules
                .judge(path.as_os_str().as_bytes(), above.unwrap_or(&IgnoreVerdict::default()));
            let taken = !verdict.ignored || (is_dir && rules.brings_back());
            if is_dir && taken {
                directories.insert(path.to_owned(), verdict);
            }
            taken
        };
        let besides = vec![
            (DOCKERFILE.to_owned(), self.dockerfile.clone()),
            (format!("{DOCKERFILE}.dockerignore"), self.ignore.clone()),
        ];
        super::tar::pack_chosen(self.dir.clone(), bar, choose, besides)
    }
}

fn options(args: &BuildArgs) -> Result<BuildOptions, Failure> {
    let name = match &args.name {
        Some(name) => name.clone(),
        None => directory_name(&args.dir)?,
    };
    let mut values = Vec::new();
    for arg in &args.args {
        match arg.split_once('=') {
            Some((name, value)) => values.push((name.to_owned(), value.to_owned())),
            // One that is not set is as if it was not given.
            None => values.extend(std::env::var(arg).ok().map(|value| (arg.clone(), value))),
        }
    }
    let secrets: Vec<(String, String)> =
        args.secrets.iter().map(secret).collect::<Result<_, _>>()?;
    if secrets.iter().map(|(id, value)| id.len() + value.len()).sum::<usize>() > MOST_SECRET {
        return Err(Failure::here("the secrets of a build may have 8 KiB together"));
    }
    Ok(BuildOptions {
        name,
        dockerfile: Some(DOCKERFILE.to_owned()),
        args: values,
        target: args.target.clone(),
        secrets,
        no_cache: args.no_cache,
    })
}

/// What an image is called that was given no name.
fn directory_name(dir: &Path) -> Result<String, Failure> {
    let full = std::fs::canonicalize(dir).ok();
    let name = full.as_deref().and_then(Path::file_name).map(|name| name.to_string_lossy());
    let name = name.unwrap_or_default().to_lowercase();
    let name: String =
        name.chars().filter(|c| c.is_ascii_alphanumeric() || "._-".contains(*c)).collect();
    match name.trim_matches(['.', '-', '_']) {
        "" | "host" => {
            Err(Failure::here("the image needs a name").with_hint("give one with `-t NAME`"))
        }
        name => Ok(name.to_owned()),
    }
}

fn secret(secret: &SecretFrom) -> Result<(String, String), Failure> {
    let value = match &secret.from {
        SecretValue::File(path) => std::fs::read_to_string(path).map_err(|error| {
            let message =
                format!("cannot read the secret `{}` from `{}`", secret.id, path.display());
            Failure::caused(message, error)
        })?,
        SecretValue::Env(name) => std::env::var(name).map_err(|_| {
            Failure::here(format!("the environment has no `{name}` for the secret `{}`", secret.id))
                .with_hint("name a file: --secret id=ID,src=FILE")
        })?,
    };
    Ok((secret.id.clone(), value))
}

/// What the caller sees.
struct BuildScreen {
    how: ShowProgress,
    paint: Paint,
    /// Whether this attempt came so far that the server said something, and whether any did.
    heard: bool,
    ever: bool,
    /// Whether the last output ended its line.
    at_start: bool,
}

impl BuildScreen {
    fn new(how: ShowProgress) -> Self {
        let colours = how == ShowProgress::Auto && std::io::stderr().is_terminal();
        let paint = Paint::of(colours);
        Self { how, paint, heard: false, ever: false, at_start: true }
    }

    fn show(&mut self, news: BuildProgress) {
        if self.how == ShowProgress::Quiet {
            return;
        }
        match news {
            BuildProgress::Step { number, total, line, text, cached } => {
                let cached = if cached { "  (cached)" } else { "" };
                let head = self.paint.bold(&format!("[{number}/{total}] line {line}: {text}"));
                self.line(&format!("{head}{}", self.paint.dim(cached)));
            }
            BuildProgress::Output { text } => {
                // Nothing can be done if standard error is gone.
                let _ = write!(std::io::stderr(), "{text}");
                self.at_start = text.ends_with('\n');
            }
            BuildProgress::Warning { text } => {
                let line = format!("{} {text}", self.paint.yellow("warning:"));
                self.line(&line);
            }
            BuildProgress::Progress { .. }
            | BuildProgress::Done { .. }
            | BuildProgress::Error { .. } => {}
        }
    }

    fn line(&mut self, text: &str) {
        if !self.at_start {
            note("");
        }
        note(text);
        self.at_start = true;
    }
}
