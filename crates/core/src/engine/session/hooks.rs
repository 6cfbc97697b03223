//! Hooks: commands that the server runs when a sandbox is created, resumed or stopped.
//!
//! A hook that fails is reported with the session and hides nothing: the sandbox exists, and its
//! caller sees what went wrong. `validate` runs before every stop and after every resume; when it
//! prints something else, or ends otherwise, than at the last stop, the resume's answer says so
//! before any work continues. `validate_git` is a validator of our own: it prints the commit of a
//! repository and what differs from it.

use std::sync::Arc;
use std::time::Duration;

use sha2::{Digest, Sha256};

use crate::engine::error::error_chain;
use crate::engine::running::live::RunningSandbox;
use crate::engine::session::Sessions;
use crate::engine::session::command::{CommandOutput, Exec};
use crate::engine::{Error, Result};
use crate::guest::GuestError;
use crate::model::{CommandEnd, CommandId, Hook, HookRun, Hooks, Span, Validation};

const PATIENCE: Span = Span::seconds(60);
/// How much of what `validate` prints is kept for people.
const EXCERPT: usize = 2000;

#[derive(Debug, Clone)]
struct Ran {
    end: Option<CommandEnd>,
    command: CommandId,
    exit_code: Option<i32>,
    output: Vec<u8>,
}

/// The output of the `validate` hook before a stop.
pub(in crate::engine) struct BeforeStop {
    /// Its outcome, if it ran.
    pub(in crate::engine) validated: Option<Validation>,
    /// Whether the agent can be expected to answer to anything else.
    pub(in crate::engine) answers: bool,
}

impl Sessions {
    /// Runs what the configuration asks for at a start, and notes it with the session.
    pub(in crate::engine) async fn run_start_hooks(
        self: &Arc<Self>,
        live: &Arc<RunningSandbox>,
        created: bool,
    ) {
        let sandbox = live.sandbox();
        let hooks = &sandbox.config.hooks;
        let mut runs = Vec::new();
        let validators = validators(hooks);
        if !created
            && !validators.is_empty()
            && let Some(before) = &sandbox.validated
        {
            let (validated, problem) = self.validate(live, &validators, before).await;
            runs.extend(validated);
            let session = live.change_session(|session| session.valid = Some(problem.is_none()));
            if let Some(problem) = problem {
                self.context.events.validation_failed(&sandbox, session.id, &problem);
            }
        }
        let (name, list) =
            if created { ("on_create", &hooks.on_create) } else { ("on_resume", &hooks.on_resume) };
        for hook in list {
            let run = report(name, hook, self.run_hook(live, hook).await);
            let failed = run.problem.is_some();
            runs.push(run);
            if failed {
                break;
            }
        }
        if !runs.is_empty() {
            live.change_session(|session| session.hooks = runs);
        }
    }

    /// Runs `validate` before a stop. A hook that cannot be run, or does not come to an end, never keeps a session from ending.
    pub(in crate::engine) async fn validate_before_stop(
        self: &Arc<Self>,
        live: &Arc<RunningSandbox>,
    ) -> BeforeStop {
        let sandbox = live.sandbox();
        let mut ran = Vec::new();
        let outcome = async {
            for hook in validators(&sandbox.config.hooks) {
                ran.push(self.run_hook(live, &hook).await?);
            }
            Ok(())
        };
        match outcome.await {
            Ok(()) => BeforeStop { validated: verdict(&ran), answers: true },
            Err(error) => {
                tracing::warn!(sandbox = %sandbox.name, error = error_chain(&error), "the validate hook did not run before a stop");
                let answers = !matches!(error, Error::Guest(GuestError::Timeout));
                BeforeStop { validated: None, answers }
            }
        }
    }

    /// Runs the validators of a sandbox. The second answer says what differs from the last stop, if anything does.
    async fn validate(
        self: &Arc<Self>,
        live: &Arc<RunningSandbox>,
        validators: &[Hook],
        before: &Validation,
    ) -> (Vec<HookRun>, Option<String>) {
        let (mut runs, mut ran) = (Vec::new(), Vec::new());
        for hook in validators {
            let outcome = self.run_hook(live, hook).await;
            let (kept, outcome) = match outcome {
                Ok(one) => (Some(one.clone()), Ok(one)),
                Err(error) => (None, Err(error)),
            };
            ran.extend(kept);
            runs.push(report("validate", hook, outcome));
        }
        let now = verdict(&ran).filter(|_| ran.len() == validators.len());
        if now.as_ref() == Some(before) {
            runs.iter_mut().for_each(|run| run.problem = None);
            return (runs, None);
        }
        let problem = match now {
            Some(now) => format!(
                "at the last stop it ended with {} and printed `{}`; now it ends with {} and prints `{}`",
                before.exit_code, before.excerpt, now.exit_code, now.excerpt
            ),
            None => {
                let told = runs.iter().find_map(|run| run.problem.clone());
                told.unwrap_or_else(|| "it did not come to its end".to_owned())
            }
        };
        if let Some(last) = runs.last_mut() {
            last.problem = Some(problem.clone());
        }
        (runs, Some(problem))
    }

    async fn run_hook(self: &Arc<Self>, live: &Arc<RunningSandbox>, hook: &Hook) -> Result<Ran> {
        let timeout = hook.timeout.unwrap_or(PATIENCE);
        let exec = Exec {
            argv: hook.argv.clone(),
            timeout: Some(timeout),
            by: Some("hook".to_owned()),
            ..Exec::default()
        };
        let (_, mut events) = self.launch(live, &exec).await?;
        let mut output = Vec::new();
        let mut ended = None;
        let patience = timeout.duration() + Duration::from_secs(5);
        let drained = tokio::time::timeout(patience, async {
            while let Some(event) = events.next().await {
                match event {
                    CommandOutput::Stdout(bytes) | CommandOutput::Stderr(bytes) => {
                        let room = (1usize << 20).saturating_sub(output.len());
                        output.extend_from_slice(&bytes[..bytes.len().min(room)]);
                    }
                    CommandOutput::Gap(_) => {}
                    CommandOutput::Exited(command) => ended = Some(command),
                }
            }
        });
        // It was killed at its timeout: an agent that does not report its end does not answer.
        drained.await.map_err(|_| GuestError::Timeout)?;
        let command = ended.ok_or(GuestError::Lost)?;
        Ok(Ran { end: command.end, command: command.id, exit_code: command.exit_code, output })
    }
}

fn report(name: &str, hook: &Hook, outcome: Result<Ran>) -> HookRun {
    let (command, exit_code, problem) = match outcome {
        Ok(ran) => {
            let problem = match ran.exit_code {
                Some(0) => None,
                _ if ran.end == Some(CommandEnd::TimedOut) => Some(format!(
                    "it took longer than {} and was killed",
                    hook.timeout.unwrap_or(PATIENCE)
                )),
                _ if ran.end == Some(CommandEnd::OutOfMemory) => {
                    Some("it was killed: the sandbox was out of memory".to_owned())
                }
                _ if ran.end == Some(CommandEnd::OutOfDisk) => {
                    Some("it was killed: the sandbox was over its disk limit".to_owned())
                }
                _ if ran.end == Some(CommandEnd::HostDiskFull) => {
                    Some("it was killed: the disk of the host is nearly full".to_owned())
                }
                Some(code) => Some(format!("it ended with {code}")),
                None => Some("the session ended under it".to_owned()),
            };
            (Some(ran.command), ran.exit_code, problem)
        }
        Err(error) => (None, None, Some(error_chain(&error))),
    };
    HookRun { hook: name.to_owned(), argv: hook.argv.clone(), command, exit_code, problem }
}

/// The output of all validators together.
fn verdict(ran: &[Ran]) -> Option<Validation> {
    let (first, more) = ran.split_first()?;
    let text = |output: &[u8]| -> String {
        String::from_utf8_lossy(output).chars().take(EXCERPT).collect()
    };
    let mut hash = Sha256::new_with_prefix(&first.output);
    let mut exit_code = first.exit_code.unwrap_or(-1);
    let mut excerpt = text(&first.output);
    for one in more {
        let code = one.exit_code.unwrap_or(-1);
        hash.update(code.to_le_bytes());
        hash.update(&one.output);
        excerpt.push_str(&text(&one.output));
        exit_code = if exit_code == 0 { code } else { exit_code };
    }
    let output_hash = hex::encode(hash.finalize());
    Some(Validation { exit_code, output_hash, excerpt })
}

/// What is run before a stop and after a resume, to be compared.
fn validators(hooks: &Hooks) -> Vec<Hook> {
    let git = hooks.validate_git.as_deref().map(git_validator);
    hooks.validate.iter().cloned().chain(git).collect()
}

/// Prints the commit that a repository is at, and which files differ from it.
fn git_validator(path: &str) -> Hook {
    const SCRIPT: &str =
        "cd \"$1\" && git rev-parse HEAD && git status --porcelain=v1 --untracked-files=all";
    let argv = ["sh", "-c", SCRIPT, "validate_git", path].map(str::to_owned);
    Hook { argv: argv.to_vec(), timeout: None }
}
