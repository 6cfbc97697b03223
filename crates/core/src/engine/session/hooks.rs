//! Commands the server runs at turning points of a sandbox's life.
//!
//! A hook that fails is reported with the session and hides nothing: the sandbox is there, and
//! whoever gets it sees what went wrong. `validate` runs before every stop and after every resume;
//! when it prints something else, or ends otherwise, than at the last stop, the resume's answer says
//! so before any work goes on.

use std::sync::Arc;
use std::time::Duration;

use sha2::{Digest, Sha256};

use crate::engine::error::error_chain;
use crate::engine::running::live::RunningSandbox;
use crate::engine::session::Sessions;
use crate::engine::session::command::{CommandOutput, Exec};
use crate::engine::{Error, Result};
use crate::guest::GuestError;
use crate::model::{CommandEnd, CommandId, Hook, HookRun, Span, Validation};

const PATIENCE: Span = Span::seconds(60);
/// How much of what `validate` prints is kept for people.
const EXCERPT: usize = 2000;

struct Ran {
    end: Option<CommandEnd>,
    command: CommandId,
    exit_code: Option<i32>,
    output: Vec<u8>,
}

/// What the `validate` hook said before a stop.
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
        if !created && let (Some(hook), Some(before)) = (&hooks.validate, &sandbox.validated) {
            let (run, valid) = self.validate(live, hook, before).await;
            runs.push(run);
            live.change_session(|session| session.valid = Some(valid));
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
        let Some(hook) = sandbox.config.hooks.validate.as_ref() else {
            return BeforeStop { validated: None, answers: true };
        };
        match self.run_hook(live, hook).await {
            Ok(ran) => BeforeStop { validated: Some(verdict(&ran)), answers: true },
            Err(error) => {
                tracing::warn!(sandbox = %sandbox.name, error = error_chain(&error), "the validate hook did not run before a stop");
                let answers = !matches!(error, Error::Guest(GuestError::Timeout));
                BeforeStop { validated: None, answers }
            }
        }
    }

    async fn validate(
        self: &Arc<Self>,
        live: &Arc<RunningSandbox>,
        hook: &Hook,
        before: &Validation,
    ) -> (HookRun, bool) {
        let outcome = self.run_hook(live, hook).await;
        let now = outcome.as_ref().ok().map(verdict);
        let same = now.as_ref() == Some(before);
        let mut run = report("validate", hook, outcome);
        run.problem = match now {
            _ if same => None,
            Some(now) => Some(format!(
                "at the last stop it ended with {} and printed `{}`; now it ends with {} and prints `{}`",
                before.exit_code, before.excerpt, now.exit_code, now.excerpt
            )),
            None => run.problem,
        };
        (run, same)
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
        // It was killed at its timeout: an agent that does not tell of that does not answer.
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
                Some(code) => Some(format!("it ended with {code}")),
                None => Some("the session ended under it".to_owned()),
            };
            (Some(ran.command), ran.exit_code, problem)
        }
        Err(error) => (None, None, Some(error_chain(&error))),
    };
    HookRun { hook: name.to_owned(), argv: hook.argv.clone(), command, exit_code, problem }
}

fn verdict(ran: &Ran) -> Validation {
    let hash = Sha256::digest(&ran.output);
    let excerpt: String = String::from_utf8_lossy(&ran.output).chars().take(EXCERPT).collect();
    Validation { exit_code: ran.exit_code.unwrap_or(-1), output_hash: hex::encode(hash), excerpt }
}
