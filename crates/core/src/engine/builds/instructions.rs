//! Carries out the instructions of a stage. What changes files is looked for in the cache first.

use std::collections::BTreeMap;

use sha2::{Digest as _, Sha256};

use super::stages::{BuildBase, ResolvedStage, global_args, named, platform_args};
use super::{Build, BuildEvent};
use crate::dockerfile::{
    CopyFiles, DockerfileError, Instruction, InstructionKind, ShellOrExec, StageText, expand,
};
use crate::engine::error::ErrorKind;
use crate::engine::{Error, Result};
use crate::model::{ImageConfig, LayerId, check_env_name};
use crate::store::image::{
    CopyRequest, CopySource, FileOwner, ImageError, InlineFile, PlannedFiles,
};

/// Incremented when the same step makes something else.
pub(super) const VERSION: u32 = 1;
/// What programs are looked for in, where an image does not say.
const USUAL_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Arguments that commands get without a declaration, and that are no part of a key.
const PROXIES: [&str; 10] = [
    "HTTP_PROXY",
    "http_proxy",
    "HTTPS_PROXY",
    "https_proxy",
    "FTP_PROXY",
    "ftp_proxy",
    "NO_PROXY",
    "no_proxy",
    "ALL_PROXY",
    "all_proxy",
];

pub(super) fn is_proxy(name: &str) -> bool {
    PROXIES.contains(&name)
}

/// What a stage has come to.
#[derive(Debug, Clone)]
pub(super) struct StageState {
    /// Stands for its files.
    pub(super) key: String,
    /// Its layers; the first is the topmost.
    pub(super) layers: Vec<LayerId>,
    pub(super) config: ImageConfig,
    /// What `ARG` has declared, with values.
    pub(super) args: BTreeMap<String, String>,
    /// Whether the command is this Dockerfile's own.
    own_cmd: bool,
}

impl StageState {
    fn begin(layers: Vec<LayerId>, mut config: ImageConfig) -> Self {
        config.env.entry("PATH".to_owned()).or_insert_with(|| USUAL_PATH.to_owned());
        let key = key_of(&("base", VERSION, &layers));
        Self { key, layers, config, args: BTreeMap::new(), own_cmd: false }
    }

    fn lookup(&self, name: &str) -> Option<String> {
        self.config.env.get(name).or_else(|| self.args.get(name)).cloned()
    }

    /// The words that begin every command for the shell.
    pub(super) fn shell(&self) -> Vec<String> {
        match self.config.shell.is_empty() {
            true => vec!["/bin/sh".to_owned(), "-c".to_owned()],
            false => self.config.shell.clone(),
        }
    }

    fn argv(&self, command: &ShellOrExec) -> Vec<String> {
        match command {
            ShellOrExec::Exec(argv) => argv.clone(),
            ShellOrExec::Shell(line) => self.shell().into_iter().chain([line.clone()]).collect(),
        }
    }

    pub(super) fn cwd(&self) -> &str {
        self.config.cwd.as_deref().unwrap_or("/")
    }

    /// A path as seen from the working directory.
    fn absolute(&self, path: &str) -> String {
        match path.starts_with('/') {
            true => path.to_owned(),
            false => format!("{}/{path}", self.cwd().trim_end_matches('/')),
        }
    }
}

/// A digest over what makes a difference.
pub(super) fn key_of(what: &impl serde::Serialize) -> String {
    // Lists and maps with text for keys: this cannot fail.
    hex::encode(Sha256::digest(serde_json::to_vec(what).unwrap_or_default()))
}

/// Says which line an error is about.
fn in_line(line: usize) -> impl Fn(Error) -> Error {
    move |error| match error {
        Error::Image(ImageError::BadCopy { reason }) => DockerfileError::at(line, reason).into(),
        Error::Dockerfile(_)
        | Error::BuildStep { .. }
        | Error::BuildStepFailed { .. }
        | Error::BuildCanceled
        | Error::ShuttingDown => error,
        other => Error::BuildStep { line, error: Box::new(other) },
    }
}

impl Build<'_> {
    pub(super) async fn stage(
        &mut self,
        stages: &[ResolvedStage],
        stage: &ResolvedStage,
        text: &StageText,
    ) -> Result<StageState> {
        let name = text.name.as_ref().map(|name| format!(" AS {name}")).unwrap_or_default();
        let from = match &stage.base {
            BuildBase::Scratch => "scratch".to_owned(),
            BuildBase::Image(image) => image.clone(),
            BuildBase::Stage(at) => {
                self.file.stages[*at].name.clone().unwrap_or_else(|| format!("stage {at}"))
            }
        };
        self.begin_step(text.line, &format!("FROM {from}{name}"), false).await?;
        let mut state = match &stage.base {
            BuildBase::Scratch => StageState::begin(Vec::new(), ImageConfig::default()),
            BuildBase::Stage(at) => match self.done.get(at) {
                Some(done) => StageState { args: BTreeMap::new(), own_cmd: false, ..done.clone() },
                None => {
                    let reason = format!("stage {at} was not built");
                    return Err(DockerfileError::at(text.line, reason).into());
                }
            },
            BuildBase::Image(image) => {
                let image = self.image(image).await.map_err(in_line(text.line))?;
                StageState::begin(image.layers, image.config)
            }
        };
        let at = stages.iter().position(|one| std::ptr::eq(one, stage)).unwrap_or_default();
        for step in &text.steps {
            self.instruction(at, &mut state, step).await.map_err(in_line(step.line))?;
        }
        Ok(state)
    }

    /// An image with its layers held. It is pulled if it is not here.
    async fn image(&self, name: &str) -> Result<crate::model::Image> {
        let lifecycle = &self.builds.lifecycle;
        let (image, hold) = match lifecycle.hold_image(name).await {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let pulled =
                    self.while_heard(lifecycle.images.pull(name, &self.reporter())).await?;
                pulled.map_err(|why| Error::Invalid {
                    what: "FROM",
                    reason: format!(
                        "there is no image `{name}` here (`keep image ls` lists them), and it cannot be \
                         pulled: {}",
                        crate::engine::error::error_chain(&why)
                    ),
                })?;
                lifecycle.hold_image(name).await?
            }
            other => other?,
        };
        self.hold.layers(&image.layers).await;
        drop(hold);
        Ok(image)
    }

    pub(super) async fn begin_step(&mut self, line: usize, text: &str, cached: bool) -> Result<()> {
        self.number += 1;
        let text = text.chars().take(1000).collect();
        let (number, total) = (self.number, self.total);
        self.tell(BuildEvent::Step { number, total, line, text, cached }).await
    }

    async fn instruction(
        &mut self,
        at: usize,
        state: &mut StageState,
        step: &Instruction,
    ) -> Result<()> {
        let escape = self.file.escape;
        let expanded = |state: &StageState, word: &str| -> Result<String> {
            let done = expand(word, escape, true, &|name| state.lookup(name));
            done.map_err(|reason| DockerfileError::at(step.line, reason).into())
        };
        let wrong = |reason: String| Error::from(DockerfileError::at(step.line, reason));
        match &step.kind {
            InstructionKind::Run { command, mounts, heredocs } => {
                return self
                    .run(state, step, &self.command(state, command, heredocs), mounts)
                    .await;
            }
            InstructionKind::Copy(copy) => return self.copy(at, state, step, copy).await,
            InstructionKind::Workdir(word) => {
                let path = clean(&state.absolute(&expanded(state, word)?));
                let owner = FileOwner { spec: state.config.user.clone() };
                let images = &self.builds.lifecycle.images;
                let planned = images.plan_directory(&state.layers, &path, owner).await?;
                state.config.cwd = Some(path);
                return self.place(state, step, planned).await;
            }
            InstructionKind::Env(pairs) => {
                // All of one instruction see the variables of before.
                let before = state.clone();
                for (name, value) in pairs {
                    let name = expanded(&before, name)?;
                    check_env_name(&name).map_err(|error| wrong(error.to_string()))?;
                    state.config.env.insert(name, expanded(&before, value)?);
                }
            }
            InstructionKind::Label(pairs) => {
                for (name, value) in pairs {
                    let (name, value) = (expanded(state, name)?, expanded(state, value)?);
                    state.config.labels.insert(name, value);
                }
            }
            InstructionKind::Arg(args) => {
                let global = global_args(self.file, self.request)?;
                for (name, default) in args {
                    let given = self.request.args.get(name).cloned();
                    let value = match (given, default) {
                        (Some(given), _) => Some(given),
                        (None, Some(default)) => Some(expanded(state, default)?),
                        (None, None) => global.get(name).or(platform_args().get(name)).cloned(),
                    };
                    match value {
                        Some(value) => state.args.insert(name.clone(), value),
                        None => state.args.remove(name),
                    };
                }
            }
            InstructionKind::User(word) => {
                let user = expanded(state, word)?;
                if user.is_empty() {
                    return Err(wrong("`USER` is empty: a variable is not set".to_owned()));
                }
                state.config.user = Some(user);
            }
            InstructionKind::Entrypoint(command) => {
                state.config.entrypoint = state.argv(command);
                if !state.own_cmd {
                    // It was meant for the program before.
                    state.config.cmd.clear();
                }
            }
            InstructionKind::Cmd(command) => {
                state.config.cmd = state.argv(command);
                state.own_cmd = true;
            }
            InstructionKind::Shell(shell) => state.config.shell.clone_from(shell),
            InstructionKind::Expose(ports) => {
                for port in ports {
                    for port in expanded(state, port)?.split_whitespace() {
                        let port = port_named(port).ok_or_else(|| {
                            wrong(format!("`{port}` is not a port, like 80, 53/udp or 8000-8010"))
                        })?;
                        state.config.exposed_ports.insert(port);
                    }
                }
            }
        }
        self.begin_step(step.line, &step.text, false).await
    }

    /// What a `RUN` runs: program and arguments, and a text that must be in a file.
    fn command(
        &self,
        state: &StageState,
        command: &ShellOrExec,
        heredocs: &[crate::dockerfile::Heredoc],
    ) -> super::run::StepCommand {
        let ShellOrExec::Shell(line) = command else {
            return super::run::StepCommand { argv: state.argv(command), script: None };
        };
        match heredocs {
            [] => super::run::StepCommand { argv: state.argv(command), script: None },
            // The text is the command.
            [only] if *line == only.word => match only.content.strip_prefix("#!") {
                Some(rest) => super::run::StepCommand {
                    argv: rest
                        .lines()
                        .next()
                        .unwrap_or_default()
                        .split_whitespace()
                        .map(str::to_owned)
                        .collect(),
                    script: Some(only.content.clone()),
                },
                None => {
                    let argv = state.shell().into_iter().chain([only.content.clone()]).collect();
                    super::run::StepCommand { argv, script: None }
                }
            },
            // The shell reads them as it reads its own.
            several => {
                let mut text = line.clone();
                for heredoc in several {
                    text.push('\n');
                    text.push_str(&heredoc.content);
                    text.push_str(&heredoc.name);
                }
                text.push('\n');
                let argv = state.shell().into_iter().chain([text]).collect();
                super::run::StepCommand { argv, script: None }
            }
        }
    }

    async fn copy(
        &mut self,
        at: usize,
        state: &mut StageState,
        step: &Instruction,
        copy: &CopyFiles,
    ) -> Result<()> {
        let wrong = |reason: String| Error::from(DockerfileError::at(step.line, reason));
        let expanded = |word: &str| -> Result<String> {
            let done = expand(word, self.file.escape, true, &|name| state.lookup(name));
            done.map_err(wrong)
        };
        let mut request = CopyRequest {
            sources: copy.sources.iter().map(|word| expanded(word)).collect::<Result<_>>()?,
            to: state.absolute(&expanded(&copy.to)?),
            owner: FileOwner { spec: copy.chown.as_deref().map(expanded).transpose()? },
            unpack: copy.add,
            ..CopyRequest::default()
        };
        if let Some(mode) = &copy.chmod {
            let text = expanded(mode)?;
            let mode = u32::from_str_radix(&text, 8).ok().filter(|mode| *mode <= 0o7777);
            let refused = || wrong(format!("`--chmod={text}` is not a mode in octal, like 755"));
            request.mode = Some(mode.ok_or_else(refused)?);
        }
        for heredoc in &copy.heredocs {
            let content = match heredoc.expand {
                false => heredoc.content.clone(),
                true => {
                    expand(&heredoc.content, self.file.escape, false, &|name| state.lookup(name))
                        .map_err(wrong)?
                }
            };
            request.inline.push(InlineFile { name: heredoc.name.clone(), content });
        }
        if let Some(empty) = request.sources.iter().position(String::is_empty) {
            return Err(wrong(format!(
                "`{}` is empty: a variable is not set",
                copy.sources[empty]
            )));
        }
        let base = match &copy.from {
            None => None,
            Some(from) => Some(named(self.file, at, &expanded(from)?, step.line)?),
        };
        let layers = match base {
            None => None,
            Some(BuildBase::Scratch) => Some(Vec::new()),
            Some(BuildBase::Stage(from)) => self.done.get(&from).map(|done| done.layers.clone()),
            Some(BuildBase::Image(image)) => Some(self.image(&image).await?.layers),
        };
        let source = match &layers {
            Some(layers) => CopySource::Layers(layers),
            None => CopySource::Context(self.context),
        };
        let images = &self.builds.lifecycle.images;
        let planned = images.plan_copy(&state.layers, source, request).await;
        let planned = planned.map_err(|error| match (error, copy.from.is_none()) {
            (ImageError::BadCopy { reason }, true)
                if reason.starts_with("there is no ") && self.context.ignored() > 0 =>
            {
                let ignored = self.context.ignored();
                ImageError::BadCopy {
                    reason: format!("{reason} (.dockerignore leaves out {ignored} entries)"),
                }
            }
            (error, _) => error,
        })?;
        self.place(state, step, planned).await
    }

    /// Puts planned files on a stage, unless that was done before.
    async fn place(
        &mut self,
        state: &mut StageState,
        step: &Instruction,
        planned: PlannedFiles,
    ) -> Result<()> {
        if planned.is_empty() {
            return self.begin_step(step.line, &step.text, false).await;
        }
        let key = key_of(&("files", VERSION, self.project, &state.key, planned.digest()));
        let _making = self.while_heard(self.builds.steps.lock(&key)).await?;
        if self.cached(state, step, &key).await? {
            return Ok(());
        }
        self.begin_step(step.line, &step.text, false).await?;
        let images = &self.builds.lifecycle.images;
        let what = format!("line {}", step.line);
        let layers = images.place_files(&state.layers, planned, &what, &self.hold).await?;
        self.made(state, step, key, layers).await
    }

    /// Takes what a step has made from the cache, if it is there.
    pub(super) async fn cached(
        &mut self,
        state: &mut StageState,
        step: &Instruction,
        key: &str,
    ) -> Result<bool> {
        if self.request.no_cache {
            return Ok(false);
        }
        let Some(layers) = self.builds.lifecycle.images.step(key, &self.hold).await? else {
            return Ok(false);
        };
        self.begin_step(step.line, &step.text, true).await?;
        state.layers = layers;
        key.clone_into(&mut state.key);
        Ok(true)
    }

    /// Remembers what a step has made.
    pub(super) async fn made(
        &self,
        state: &mut StageState,
        step: &Instruction,
        key: String,
        layers: Vec<LayerId>,
    ) -> Result<()> {
        let lifecycle = &self.builds.lifecycle;
        lifecycle.references.count_image_layers(&layers).await?;
        lifecycle.images.keep_step(self.project, &key, &step.text, &layers).await?;
        crate::failpoint::pass("build.step");
        state.layers = layers;
        state.key = key;
        Ok(())
    }
}

/// A port and its protocol.
fn port_named(text: &str) -> Option<String> {
    let (ports, protocol) = text.split_once('/').unwrap_or((text, "tcp"));
    let protocol = protocol.to_ascii_lowercase();
    let number = |text: &str| text.parse::<u16>().ok().filter(|port| *port > 0);
    let right = match ports.split_once('-') {
        Some((first, last)) => number(first)? <= number(last)?,
        None => number(ports).is_some(),
    };
    let known = ["tcp", "udp", "sctp"].contains(&protocol.as_str());
    (right && known).then(|| format!("{ports}/{protocol}"))
}

/// A path without empty, `.` and `..` parts.
fn clean(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            _ => parts.push(part),
        }
    }
    format!("/{}", parts.join("/"))
}
