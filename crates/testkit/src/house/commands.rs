//! Commands in the sandboxes of a house.

use sandkeep_core::engine::{CommandOutput, Engine, Exec};
use sandkeep_core::model::{Command, CommandId};

use super::{name, project};

/// What a command did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ran {
    /// Its record.
    pub command: Command,
    /// What it printed to standard output.
    pub out: String,
    /// What it printed to standard error.
    pub err: String,
}

/// Runs a shell line to its end.
///
/// # Panics
///
/// When it cannot be started.
pub async fn sh(engine: &Engine, sandbox: &str, line: &str) -> Ran {
    let argv = ["sh", "-c", line].map(str::to_owned).to_vec();
    let exec = Exec { argv, ..Exec::default() };
    let mut started = engine.exec(&project(), &name(sandbox), exec).await.expect("a shell starts");
    let (mut out, mut err) = (Vec::new(), Vec::new());
    while let Some(event) = started.events.next().await {
        match event {
            CommandOutput::Stdout(bytes) => out.extend_from_slice(&bytes),
            CommandOutput::Stderr(bytes) => err.extend_from_slice(&bytes),
            CommandOutput::Gap(bytes) => panic!("{bytes} bytes of output are missing"),
            CommandOutput::Exited(command) => {
                let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
                return Ran { command, out: text(&out), err: text(&err) };
            }
        }
    }
    panic!("a command whose end was not told");
}

/// Runs a shell line that must succeed, and returns what it printed.
///
/// # Panics
///
/// When it does not.
pub async fn ok(engine: &Engine, sandbox: &str, line: &str) -> String {
    let ran = sh(engine, sandbox, line).await;
    assert_eq!(ran.command.exit_code, Some(0), "{line}: {} {}", ran.out, ran.err);
    ran.out
}

/// Starts a program without waiting for it.
///
/// # Panics
///
/// When it does not start.
pub async fn detached(engine: &Engine, sandbox: &str, program: &[&str]) -> CommandId {
    let argv = program.iter().map(|word| (*word).to_owned()).collect();
    let exec = Exec { argv, detach: true, ..Exec::default() };
    engine.exec(&project(), &name(sandbox), exec).await.expect("it starts").command.id
}

/// All that a command has printed so far.
///
/// # Panics
///
/// When some of it is missing.
pub async fn printed(engine: &Engine, sandbox: &str, command: &CommandId) -> Vec<u8> {
    let mut events = engine.logs(&project(), &name(sandbox), command, false).await.expect("a log");
    let mut text = Vec::new();
    while let Some(event) = events.next().await {
        match event {
            CommandOutput::Stdout(bytes) => text.extend_from_slice(&bytes),
            CommandOutput::Gap(bytes) => panic!("{bytes} bytes are missing"),
            CommandOutput::Stderr(_) | CommandOutput::Exited(_) => {}
        }
    }
    text
}
