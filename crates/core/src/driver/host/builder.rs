//! Runs `keep-agent` to build a machine: sends it a description, reads the outcome.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;

use sandkeep_proto::cage::{self, Outcome, Record};
use serde::Serialize;

use super::{Host, broken, failed};
use crate::driver::{DriverError, DriverResult};

impl Host {
    /// Starts `keep-agent`, which waits for what to build.
    pub(crate) fn builder(&self, mode: &[&str]) -> DriverResult<Builder> {
        let agent = &self.agent;
        let process = Command::new(agent)
            .args(mode)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Signals to the daemon's group are not meant for it.
            .process_group(0)
            .spawn()
            .map_err(failed("run", agent))?;
        Ok(Builder { process: Some(process), agent: agent.clone() })
    }

    /// Runs `keep-agent`, passes it what `plan` makes, and returns its result.
    pub(crate) fn agent<T: Serialize>(
        &self,
        mode: &str,
        plan: impl FnOnce() -> DriverResult<T>,
    ) -> DriverResult<Record> {
        self.builder(&[mode])?.build(plan)
    }
}

/// A `keep-agent` that waits for what to build. One that is dropped ends, and with it what it has begun.
#[derive(Debug)]
pub(crate) struct Builder {
    process: Option<Child>,
    agent: PathBuf,
}

impl Builder {
    /// Whether it still waits.
    pub(crate) fn is_waiting(&mut self) -> bool {
        self.process.as_mut().is_some_and(|process| matches!(process.try_wait(), Ok(None)))
    }

    /// Passes it what `plan` makes, and returns its result.
    pub(crate) fn build<T: Serialize>(
        mut self,
        plan: impl FnOnce() -> DriverResult<T>,
    ) -> DriverResult<Record> {
        let agent = std::mem::take(&mut self.agent);
        let Some(mut builder) = self.process.take() else {
            return Err(broken("build the machine", &"its builder has ended"));
        };
        let text = plan().and_then(|plan| {
            serde_json::to_vec(&plan).map_err(|e| broken("describe the machine", &e))
        });
        // Without a description the builder reads an empty one, and ends.
        let told = match (builder.stdin.take(), &text) {
            (Some(mut stdin), Ok(text)) => stdin.write_all(text),
            _ => Ok(()),
        };
        let mut line = String::new();
        let heard = builder
            .stdout
            .take()
            .map_or(Ok(0), |stdout| BufReader::new(stdout).read_line(&mut line));
        let answer = serde_json::from_str(&line);
        if let Ok(Outcome::Done(record)) = answer {
            tokio::task::spawn_blocking(move || builder.wait());
            return Ok(record);
        }
        let status = builder.wait().map_err(failed("wait for", &agent))?;
        text?;
        heard.map_err(failed("hear from", &agent))?;
        match answer {
            Ok(Outcome::Done(record)) => Ok(record),
            Ok(Outcome::Failed { step, reason }) if step == cage::MOUNT_POINT => {
                Err(DriverError::MountPoint { reason })
            }
            Ok(Outcome::Failed { step, reason }) if step == cage::NO_ROOM => {
                Err(DriverError::NoRoom { reason })
            }
            Ok(Outcome::Failed { step, reason }) => Err(DriverError::Build { step, reason }),
            Err(_) => {
                told.map_err(failed("talk to", &agent))?;
                Err(broken("build the machine", &format!("the builder ended with {status}")))
            }
        }
    }
}

impl Drop for Builder {
    fn drop(&mut self) {
        let Some(mut process) = self.process.take() else { return };
        // It ends when there is nothing to read any more, a moment later: what it has begun goes first.
        drop((process.stdin.take(), process.stdout.take()));
        let reap = thread::Builder::new().name("builder".to_owned());
        let _ = reap.spawn(move || process.wait());
    }
}
