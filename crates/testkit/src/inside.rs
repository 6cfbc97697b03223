//! Commands inside a machine, for tests, and a root to run them in.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use sandkeep_core::driver::Link;
use sandkeep_core::guest::{Guest, OutputEvent};
use sandkeep_proto::link::Spawn;

/// The programs [`userland`] takes along.
const PROGRAMS: [&str; 27] = [
    "sh", "cat", "chmod", "chown", "cp", "dd", "echo", "env", "false", "head", "id", "ln", "ls",
    "mkdir", "mknod", "mount", "mv", "perl", "rm", "rmdir", "sleep", "stat", "sync", "touch",
    "true", "uname", "wc",
];

/// Fills a layer with a small system: this machine's own shell, basic tools and perl, and the
/// libraries they need.
///
/// # Errors
///
/// Returns which of them this machine lacks.
pub fn userland(layer: &Path) -> Result<(), String> {
    for name in PROGRAMS {
        let found = ["/bin", "/usr/bin", "/usr/sbin"]
            .iter()
            .map(|directory| Path::new(directory).join(name))
            .find(|path| path.exists())
            .ok_or_else(|| format!("this machine has no `{name}`"))?;
        take(&found, &layer.join("bin").join(name))?;
        let listed = Command::new("ldd").arg(&found).output().map_err(|e| e.to_string())?;
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        for library in listed.split_whitespace().filter(|word| word.starts_with('/')) {
            take(Path::new(library), &layer.join(library.trim_start_matches('/')))?;
        }
    }
    let etc = layer.join("etc");
    fs::create_dir_all(&etc).map_err(|e| e.to_string())?;
    let users = "root:x:0:0:root:/root:/bin/sh\nsomeone:x:1000:1000::/tmp:/bin/sh\n";
    fs::write(etc.join("passwd"), users).map_err(|e| e.to_string())?;
    fs::write(etc.join("group"), "root:x:0:\nsomeone:x:1000:\n").map_err(|e| e.to_string())
}

fn take(from: &Path, to: &Path) -> Result<(), String> {
    if to.exists() {
        return Ok(());
    }
    let parent = to.parent().map_or_else(PathBuf::new, Path::to_path_buf);
    fs::create_dir_all(parent)
        .and_then(|()| fs::copy(from, to))
        .map(drop)
        .map_err(|e| format!("`{}` could not be copied: {e}", from.display()))
}

/// The result of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandResult {
    /// Its exit code; 128 and the signal when one ended it.
    pub code: i32,
    /// What it wrote to standard output.
    pub out: String,
    /// What it wrote to standard error.
    pub err: String,
}

/// A way to run commands inside a machine.
pub struct Inside {
    guest: Guest,
}

/// How many commands were started, on whatever link: a machine knows each by its own name.
static STARTED: AtomicU32 = AtomicU32::new(0);

impl Inside {
    /// Reaches the agent of a machine that was just started.
    ///
    /// # Panics
    ///
    /// When it does not answer.
    pub async fn reach(link: &Link) -> Self {
        let patience = Duration::from_secs(10);
        let guest = match link {
            Link::Unix(socket) => Guest::connect(socket, patience).await,
            Link::Serial(socket) => Guest::connect_serial(socket, patience).await,
        };
        Self::over(guest.expect("the agent answers"))
    }

    /// Uses a link that stands.
    #[must_use]
    pub fn over(guest: Guest) -> Self {
        Self { guest }
    }

    /// The agent's link itself.
    #[must_use]
    pub fn guest(&self) -> &Guest {
        &self.guest
    }

    /// Runs a shell script as root.
    pub async fn sh(&self, script: &str) -> CommandResult {
        self.run(&["sh", "-c", script], None).await
    }

    /// Runs a perl script as root.
    pub async fn perl(&self, script: &str) -> CommandResult {
        self.run(&["perl", "-e", script], None).await
    }

    /// Runs a command as someone.
    ///
    /// # Panics
    ///
    /// When the agent cannot start it, or goes away.
    pub async fn run(&self, argv: &[&str], user: Option<&str>) -> CommandResult {
        let mut output = self.start(argv, user).await;
        let (mut out, mut err) = (Vec::new(), Vec::new());
        loop {
            match output.next().await.expect("the agent lives") {
                OutputEvent::Stdout(bytes) => {
                    output.keep(bytes.len());
                    out.extend(bytes);
                }
                OutputEvent::Stderr(bytes) => {
                    output.keep(bytes.len());
                    err.extend(bytes);
                }
                OutputEvent::Exited(exit) => {
                    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
                    return CommandResult { code: exit.code, out: text(out), err: text(err) };
                }
            }
        }
    }

    /// Starts a command and leaves it running.
    ///
    /// # Panics
    ///
    /// When the agent cannot start it.
    pub async fn start(&self, argv: &[&str], user: Option<&str>) -> sandkeep_core::guest::Output {
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let spawn = Spawn {
            command: format!("cmd-{number}"),
            argv: argv.iter().map(ToString::to_string).collect(),
            env: BTreeMap::from([("PATH".to_owned(), "/bin".to_owned())]),
            cwd: Some("/".to_owned()),
            user: user.map(ToOwned::to_owned),
            tty: None,
            stdin: false,
            sudo_from: None,
            secret_env: BTreeMap::new(),
            secret_files: Vec::new(),
        };
        self.guest.spawn(spawn).await.expect("it starts").output
    }
}
