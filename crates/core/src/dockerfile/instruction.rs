//! Reads one instruction.

use super::flags::{self, RunMount};
use super::lines::{Heredoc, LogicalLine, words};
use super::{DockerfileError, expand};

/// A stage: what it begins with, and its steps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageText {
    /// The line of its `FROM`.
    pub line: usize,
    /// What it begins with.
    pub from: StageSource,
    /// What others call it.
    pub name: Option<String>,
    /// Its instructions.
    pub steps: Vec<Instruction>,
}

/// What `FROM` says, variables not expanded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageSource {
    /// An image, an earlier stage, or `scratch`.
    pub image: String,
    /// The platform it must be for.
    pub platform: Option<String>,
}

/// An instruction of a stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instruction {
    /// Its line.
    pub line: usize,
    /// Its text in one line, for people.
    pub text: String,
    /// What it says. Words are as written: variables and quotes are for [`expand`].
    pub kind: InstructionKind,
}

/// What an instruction says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InstructionKind {
    /// Run a command.
    Run {
        /// The command.
        command: ShellOrExec,
        /// What it has besides its files.
        mounts: Vec<RunMount>,
        /// Texts that it announces.
        heredocs: Vec<Heredoc>,
    },
    /// Copy files: `COPY` and `ADD`.
    Copy(CopyFiles),
    /// Set variables of commands.
    Env(Vec<(String, String)>),
    /// Declare variables of the build.
    Arg(Vec<(String, Option<String>)>),
    /// Set the working directory.
    Workdir(String),
    /// Set the user.
    User(String),
    /// Set the program of sandboxes.
    Entrypoint(ShellOrExec),
    /// Set the command of sandboxes.
    Cmd(ShellOrExec),
    /// Set the shell.
    Shell(Vec<String>),
    /// Add labels.
    Label(Vec<(String, String)>),
    /// Name ports.
    Expose(Vec<String>),
}

/// A command, for the shell or as arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ShellOrExec {
    /// One line for the shell.
    Shell(String),
    /// Program and arguments.
    Exec(Vec<String>),
}

/// What `COPY` or `ADD` says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyFiles {
    /// Whether it is `ADD`: archives are unpacked.
    pub add: bool,
    /// A stage or an image that the files come from; the context if absent.
    pub from: Option<String>,
    /// The owner.
    pub chown: Option<String>,
    /// The permission bits.
    pub chmod: Option<String>,
    /// The files, as words.
    pub sources: Vec<String>,
    /// Files that are in the Dockerfile itself.
    pub heredocs: Vec<Heredoc>,
    /// Where they go, as a word.
    pub to: String,
}

pub(super) enum Parsed {
    From(StageText),
    Step(Instruction),
}

pub(super) fn read(line: LogicalLine, escape: char) -> Result<Parsed, DockerfileError> {
    let at = line.line;
    read_line(line, escape).map_err(|reason| DockerfileError::at(at, reason))
}

fn read_line(line: LogicalLine, escape: char) -> Result<Parsed, String> {
    let LogicalLine { line, text, heredocs } = line;
    let (name, rest) = text.split_once(char::is_whitespace).unwrap_or((&text, ""));
    let name = name.to_ascii_uppercase();
    let rest = rest.trim();
    if rest.is_empty() {
        return Err(match is_known(&name) {
            true => format!("`{name}` needs an argument"),
            false => unknown(&name),
        });
    }
    let kind = match name.as_str() {
        "FROM" => return from(line, rest).map(Parsed::From),
        "RUN" => run(rest, heredocs)?,
        "COPY" | "ADD" => InstructionKind::Copy(copy(name == "ADD", rest, heredocs, escape)?),
        "ENV" => InstructionKind::Env(pairs(&name, rest, escape)?),
        "LABEL" => InstructionKind::Label(pairs(&name, rest, escape)?),
        "ARG" => InstructionKind::Arg(args(rest, escape)?),
        "WORKDIR" => InstructionKind::Workdir(rest.to_owned()),
        "USER" => InstructionKind::User(single(&name, rest, escape)?),
        "ENTRYPOINT" => InstructionKind::Entrypoint(command(rest)?),
        "CMD" => InstructionKind::Cmd(command(rest)?),
        "SHELL" => match command(rest)? {
            ShellOrExec::Exec(shell) if !shell.is_empty() => InstructionKind::Shell(shell),
            _ => return Err("`SHELL` needs a list: SHELL [\"/bin/bash\", \"-c\"]".to_owned()),
        },
        "EXPOSE" => InstructionKind::Expose(words(rest, escape)),
        _ => return Err(unknown(&name)),
    };
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    Ok(Parsed::Step(Instruction { line, text, kind }))
}

fn is_known(name: &str) -> bool {
    const KNOWN: [&str; 13] = [
        "FROM",
        "RUN",
        "COPY",
        "ADD",
        "ENV",
        "LABEL",
        "ARG",
        "WORKDIR",
        "USER",
        "ENTRYPOINT",
        "CMD",
        "SHELL",
        "EXPOSE",
    ];
    KNOWN.contains(&name)
}

fn unknown(name: &str) -> String {
    let name: String = name.chars().take(40).collect();
    match name.as_str() {
        "VOLUME" => {
            "`VOLUME` is not supported; mount a drive with `keep create --mount`".to_owned()
        }
        "HEALTHCHECK" => {
            "`HEALTHCHECK` is not supported; a service has a check: `keep service set`".to_owned()
        }
        "MAINTAINER" => "`MAINTAINER` is not supported; use `LABEL`".to_owned(),
        "STOPSIGNAL" | "ONBUILD" => format!("`{name}` is not supported"),
        _ => format!("unknown instruction `{name}`"),
    }
}

fn from(line: usize, rest: &str) -> Result<StageText, String> {
    let (flags, rest) = flags::take(rest)?;
    let mut platform = None;
    for (name, value) in flags {
        match name.as_str() {
            "platform" => platform = Some(flags::valued(&name, value)?),
            _ => return Err(format!("`FROM --{name}` is not supported")),
        }
    }
    let words: Vec<&str> = rest.split_whitespace().collect();
    let (image, name) = match words[..] {
        [image] => (image, None),
        [image, with, name] if with.eq_ignore_ascii_case("as") => (image, Some(name)),
        _ => return Err("write `FROM IMAGE` or `FROM IMAGE AS NAME`".to_owned()),
    };
    let name = name.map(str::to_ascii_lowercase);
    if let Some(name) = &name {
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "_.-".contains(c);
        let begins = name.starts_with(|c: char| c.is_ascii_lowercase());
        if !begins || !name.chars().all(plain) {
            return Err(format!(
                "`{name}` cannot name a stage: begin with a letter; use letters, digits, `_`, `.`, `-`"
            ));
        }
    }
    let from = StageSource { image: image.to_owned(), platform };
    Ok(StageText { line, from, name, steps: Vec::new() })
}

fn run(rest: &str, heredocs: Vec<Heredoc>) -> Result<InstructionKind, String> {
    let (flags, rest) = flags::take(rest)?;
    let mut mounts = Vec::new();
    for (name, value) in flags {
        match (name.as_str(), value.as_deref()) {
            ("mount", Some(value)) => mounts.push(flags::mount(value)?),
            ("network", Some("default")) | ("security", Some("sandbox")) => {}
            ("network", _) => {
                return Err(
                    "`RUN --network` is not supported; the project's network policy applies"
                        .to_owned(),
                );
            }
            _ => return Err(format!("`RUN --{name}` is not supported")),
        }
    }
    if rest.is_empty() {
        return Err("`RUN` needs a command".to_owned());
    }
    Ok(InstructionKind::Run { command: command(rest)?, mounts, heredocs })
}

/// A list in JSON is program and arguments; anything else is for the shell.
fn command(rest: &str) -> Result<ShellOrExec, String> {
    match rest.starts_with('[').then(|| serde_json::from_str::<Vec<String>>(rest)) {
        Some(Ok(argv)) if argv.is_empty() => Err("the list is empty".to_owned()),
        Some(Ok(argv)) if argv.iter().any(|arg| arg.contains('\0')) => {
            Err("an argument has a NUL byte".to_owned())
        }
        Some(Ok(argv)) => Ok(ShellOrExec::Exec(argv)),
        Some(Err(_)) | None => Ok(ShellOrExec::Shell(rest.to_owned())),
    }
}

fn copy(add: bool, rest: &str, heredocs: Vec<Heredoc>, escape: char) -> Result<CopyFiles, String> {
    let what = if add { "ADD" } else { "COPY" };
    let (flags, rest) = flags::take(rest)?;
    let (mut from, mut chown, mut chmod) = (None, None, None);
    for (name, value) in flags {
        match name.as_str() {
            "from" if !add => from = Some(flags::valued(&name, value)?),
            "chown" => chown = Some(flags::valued(&name, value)?),
            "chmod" => chmod = Some(flags::valued(&name, value)?),
            // A layer never depends on those below more than it must.
            "link" => drop(flags::switch(&name, value.as_deref())?),
            _ => return Err(format!("`{what} --{name}` is not supported")),
        }
    }
    let list = rest.starts_with('[').then(|| serde_json::from_str::<Vec<String>>(rest));
    let mut sources = match list {
        // Words of a list are in quotes already.
        Some(Ok(list)) => list.iter().map(|word| quoted(word, escape)).collect(),
        Some(Err(_)) | None => words(rest, escape),
    };
    let to = sources.pop().filter(|_| !sources.is_empty());
    let to = to.ok_or_else(|| format!("`{what}` needs a source and a target"))?;
    sources.retain(|source| !heredocs.iter().any(|heredoc| heredoc.word == *source));
    if from.is_some() && !heredocs.is_empty() {
        return Err("`COPY --from` cannot have heredocs".to_owned());
    }
    for source in &sources {
        let remote = ["http://", "https://", "git@", "git://"];
        if remote.iter().any(|scheme| source.starts_with(scheme)) {
            return Err(format!(
                "`{what}` of an address is not supported; use `RUN` with curl or git, so that the \
                 network policy applies"
            ));
        }
    }
    Ok(CopyFiles { add, from, chown, chmod, sources, heredocs, to })
}

/// A word that means the text as it is, but for variables.
fn quoted(text: &str, escape: char) -> String {
    let mut word = String::from("\"");
    for c in text.chars() {
        if c == '"' || c == escape {
            word.push(escape);
        }
        word.push(c);
    }
    word.push('"');
    word
}

/// `NAME=value …`, or in the old form `NAME value`.
fn pairs(what: &str, rest: &str, escape: char) -> Result<Vec<(String, String)>, String> {
    let all = words(rest, escape);
    let first = all.first().map(String::as_str).unwrap_or_default();
    let checked = |name: String| match name.is_empty() {
        true => Err(format!("`{what}`: a name is missing before `=`")),
        false => Ok(name),
    };
    if !first.contains('=') {
        let (name, value) = rest
            .split_once(char::is_whitespace)
            .ok_or_else(|| format!("`{what} {rest}` has no value: write `{what} NAME=VALUE`"))?;
        return Ok(vec![(checked(name.to_owned())?, value.trim_start().to_owned())]);
    }
    let pair = |word: String| match word.split_once('=') {
        Some((name, value)) => Ok((checked(name.to_owned())?, value.to_owned())),
        None => Err(format!("`{what}`: `{word}` is not NAME=VALUE; quote values with blanks")),
    };
    all.into_iter().map(pair).collect()
}

fn args(rest: &str, escape: char) -> Result<Vec<(String, Option<String>)>, String> {
    let one = |word: String| {
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
            None => (word, None),
        };
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let begins = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
        if !begins || !name.chars().all(plain) {
            return Err(format!("`{name}` cannot name a build argument"));
        }
        Ok((name, value))
    };
    words(rest, escape).into_iter().map(one).collect()
}

fn single(what: &str, rest: &str, escape: char) -> Result<String, String> {
    // The word is checked for quotes that are not closed.
    expand::expand(rest, escape, true, &|_| None)?;
    match &words(rest, escape)[..] {
        [word] => Ok(word.clone()),
        _ => Err(format!("`{what}` needs exactly one argument")),
    }
}
