//! A real agent for one test: the first process of its own pid namespace, so that nothing it
//! started outlives the test.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use bytes::Bytes;
use sandkeep_core::embedded::AGENT;
use sandkeep_core::guest::{Guest, GuestError, Incoming, Outgoing, Output, OutputEvent, Process};
use sandkeep_proto::link::{At, Exit, Failure, Spawn};
use tempfile::TempDir;

/// How long a test waits for what must happen at some time.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) struct Machine {
    dir: TempDir,
    agent: Child,
}

impl Machine {
    pub(crate) fn start() -> Self {
        let dir = TempDir::new().expect("a temporary directory");
        // Users other than root work in it too.
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).expect("our own");
        let program = dir.path().join("keep-agent");
        std::fs::write(&program, AGENT.bytes()).expect("our own directory");
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).expect("our own");
        let agent = Command::new("unshare")
            .args(["--pid", "--fork", "--kill-child", "--mount-proc"])
            .arg(&program)
            .arg("serve")
            .arg(dir.path().join("link"))
            .stdin(Stdio::null())
            .spawn()
            .expect("unshare runs");
        Self { dir, agent }
    }

    pub(crate) fn link(&self) -> PathBuf {
        self.dir.path().join("link")
    }

    pub(crate) async fn connect(&self) -> Guest {
        Guest::connect(&self.link(), PATIENCE).await.expect("the agent answers")
    }

    /// A directory of its own for the test's files, as seen from both sides.
    pub(crate) fn work(&self) -> PathBuf {
        let work = self.dir.path().join("work");
        std::fs::create_dir_all(&work).expect("our own directory");
        work
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // `unshare` takes its child, and with it the whole namespace, along.
        let _ = self.agent.kill();
        let _ = self.agent.wait();
    }
}

pub(crate) fn spawn(command: &str, argv: &[&str]) -> Spawn {
    Spawn {
        command: command.to_owned(),
        argv: argv.iter().map(|&arg| arg.to_owned()).collect(),
        env: BTreeMap::new(),
        cwd: None,
        user: None,
        tty: None,
        stdin: false,
        sudo_from: None,
        secret_env: BTreeMap::new(),
        secret_files: Vec::new(),
    }
}

pub(crate) fn shell(command: &str, script: &str) -> Spawn {
    spawn(command, &["/bin/sh", "-c", script])
}

/// All a command printed, and how it ended.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Heard {
    pub(crate) out: Vec<u8>,
    pub(crate) err: Vec<u8>,
    pub(crate) exit: Option<Exit>,
}

impl Heard {
    pub(crate) fn code(&self) -> i32 {
        self.exit.expect("it ended").code
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.out).into_owned()
    }
}

/// Listens to the end, keeping everything at once.
pub(crate) async fn hear(output: &mut Output) -> Result<Heard, GuestError> {
    let mut heard = Heard::default();
    loop {
        let event = tokio::time::timeout(PATIENCE, output.next()).await;
        match event.unwrap_or_else(|_| panic!("silence after {heard:?}"))? {
            OutputEvent::Stdout(bytes) => {
                output.keep(bytes.len());
                heard.out.extend_from_slice(&bytes);
            }
            OutputEvent::Stderr(bytes) => {
                output.keep(bytes.len());
                heard.err.extend_from_slice(&bytes);
            }
            OutputEvent::Exited(exit) => {
                heard.exit = Some(exit);
                return Ok(heard);
            }
        }
    }
}

pub(crate) async fn run(guest: &Guest, spawn: Spawn) -> Heard {
    let mut process = guest.spawn(spawn).await.expect("it starts");
    hear(&mut process.output).await.expect("the connection holds")
}

/// Reads output until `wanted` has come by.
pub(crate) async fn wait_for(process: &mut Process, wanted: &str) -> String {
    let mut seen = String::new();
    let waiting = async {
        while !seen.contains(wanted) {
            match process.output.next().await.expect("the connection holds") {
                OutputEvent::Stdout(bytes) | OutputEvent::Stderr(bytes) => {
                    process.output.keep(bytes.len());
                    seen.push_str(&String::from_utf8_lossy(&bytes));
                }
                OutputEvent::Exited(exit) => panic!("it ended with {exit:?} after {seen:?}"),
            }
        }
    };
    let waited = tokio::time::timeout(PATIENCE, waiting).await;
    assert!(waited.is_ok(), "no {wanted:?} in {seen:?}");
    seen
}

pub(crate) fn at(path: &Path) -> At {
    At { path: path.to_str().expect("plain").to_owned(), cwd: None, user: None }
}

pub(crate) fn at_as(path: &Path, user: &str) -> At {
    At { user: Some(user.to_owned()), ..at(path) }
}

pub(crate) async fn all(incoming: &mut Incoming) -> Result<Vec<u8>, GuestError> {
    let mut bytes = Vec::new();
    while let Some(more) = incoming.next().await? {
        bytes.extend_from_slice(&more);
    }
    Ok(bytes)
}

/// Sends everything and waits for the outcome.
pub(crate) async fn put(
    mut outgoing: Outgoing,
    bytes: &[u8],
) -> Result<sandkeep_core::guest::TransferSummary, GuestError> {
    outgoing.send(Bytes::copy_from_slice(bytes)).await?;
    outgoing.finish().await
}

/// The agent's kind of failure; panics when there was none.
pub(crate) fn failure<T: std::fmt::Debug>(result: Result<T, GuestError>) -> Failure {
    let error = result.expect_err("it must not work");
    error.failure().unwrap_or_else(|| panic!("not refused: {error:?}"))
}
