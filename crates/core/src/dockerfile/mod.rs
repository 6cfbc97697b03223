//! Dockerfiles: what they say, as data. Nothing here reads a file or runs a command.
//!
//! [`parse`] takes the text of a Dockerfile and checks all that can be checked without a build:
//! every instruction is known, complete and supported. What depends on the build (variables, files,
//! images) is expanded and checked when its turn comes; [`expand`] does the former. `lines` joins
//! lines and collects heredocs, `instruction` reads one instruction, `ignore` is `.dockerignore`.
//!
//! Every node knows its line, and every error names one. The text comes from anybody: garbage is an
//! error and never a panic, and what is kept is bounded by the text's length.

mod expand;
mod flags;
mod ignore;
mod instruction;
mod lines;
mod pattern;

pub use expand::{EXPANDED, expand};
pub use flags::{CacheMount, RunMount, SecretMount};
pub use ignore::{IgnoreFile, IgnoreVerdict};
pub use instruction::{
    CopyFiles, Instruction, InstructionKind, ShellOrExec, StageSource, StageText,
};
pub use lines::Heredoc;
pub use pattern::FilePattern;

use instruction::Parsed;

/// The largest Dockerfile.
const LARGEST: usize = 1 << 20;
/// How many instructions one may have.
const MOST_INSTRUCTIONS: usize = 2000;

/// What is wrong with a Dockerfile, and in which line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {reason}")]
pub struct DockerfileError {
    /// The line, counted from 1.
    pub line: usize,
    /// What is wrong, and what to do.
    pub reason: String,
}

impl DockerfileError {
    pub(crate) fn at(line: usize, reason: impl Into<String>) -> Self {
        Self { line, reason: reason.into() }
    }
}

/// A Dockerfile that was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dockerfile {
    /// The character that escapes: `\`, or what the directive `escape` says.
    pub escape: char,
    /// `ARG` instructions before the first `FROM`: names and defaults, with their lines.
    pub args: Vec<(usize, String, Option<String>)>,
    /// The stages, in order; at least one.
    pub stages: Vec<StageText>,
}

/// Reads a Dockerfile.
///
/// # Errors
///
/// Returns [`DockerfileError`] for the first thing that is wrong or not supported.
pub fn parse(text: &str) -> Result<Dockerfile, DockerfileError> {
    if text.len() > LARGEST {
        return Err(DockerfileError::at(1, "a Dockerfile of more than 1 MiB is not supported"));
    }
    let (escape, lines) = lines::read(text)?;
    let mut file = Dockerfile { escape, args: Vec::new(), stages: Vec::new() };
    if lines.len() > MOST_INSTRUCTIONS {
        let line = lines[MOST_INSTRUCTIONS].line;
        let reason = format!("more than {MOST_INSTRUCTIONS} instructions are not supported");
        return Err(DockerfileError::at(line, reason));
    }
    for line in lines {
        let at = line.line;
        match (instruction::read(line, escape)?, file.stages.last_mut()) {
            (Parsed::From(stage), _) => add_stage(&mut file.stages, stage)?,
            (Parsed::Step(step), Some(stage)) => stage.steps.push(step),
            (Parsed::Step(Instruction { kind: InstructionKind::Arg(args), .. }), None) => {
                file.args.extend(args.into_iter().map(|(name, value)| (at, name, value)));
            }
            (Parsed::Step(step), None) => {
                let reason = format!(
                    "`{}` comes before the first `FROM`; only `ARG` may",
                    step.text.split_whitespace().next().unwrap_or_default()
                );
                return Err(DockerfileError::at(at, reason));
            }
        }
    }
    if file.stages.is_empty() {
        return Err(DockerfileError::at(1, "there is no `FROM`: it must say what to begin with"));
    }
    Ok(file)
}

fn add_stage(stages: &mut Vec<StageText>, stage: StageText) -> Result<(), DockerfileError> {
    let same = |other: &&StageText| stage.name.is_some() && other.name == stage.name;
    if let (Some(other), Some(name)) = (stages.iter().find(same), &stage.name) {
        let reason = format!("there is a stage `{name}` already, in line {}", other.line);
        return Err(DockerfileError::at(stage.line, reason));
    }
    stages.push(stage);
    Ok(())
}

#[cfg(test)]
mod tests;
