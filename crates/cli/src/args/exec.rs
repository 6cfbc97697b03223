//! Arguments of the commands that run and inspect commands in sandboxes.

use clap::Args;
use sandkeep_client::types::{Inject, Span};

use super::sandbox::{secret_use, variable};
use crate::settings::Settings;

/// Arguments of `exec`.
#[derive(Debug, Args)]
pub(crate) struct ExecArgs {
    #[command(flatten)]
    pub(crate) how: ExecOptions,
    /// Run in the background and print the command's id
    #[arg(short = 'd', long, conflicts_with_all = ["interactive", "tty"])]
    pub(crate) detach: bool,
    /// Fail if the sandbox is not running, instead of starting it
    #[arg(long)]
    pub(crate) if_running: bool,
    /// The sandbox
    pub(crate) name: String,
    /// Program and arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "ARGV"
    )]
    pub(crate) argv: Vec<String>,
}

/// How a command is run.
#[derive(Debug, Default, Args)]
pub(crate) struct ExecOptions {
    /// Forward standard input
    #[arg(short = 'i', long)]
    pub(crate) interactive: bool,
    /// Allocate a terminal
    #[arg(short = 't', long)]
    pub(crate) tty: bool,
    /// Environment variable; NAME alone copies the local value (repeatable)
    #[arg(short = 'e', long = "env", value_name = "NAME=VALUE", value_parser = variable)]
    pub(crate) env: Vec<(String, String)>,
    /// Working directory
    #[arg(short = 'C', long, value_name = "DIR")]
    pub(crate) cwd: Option<String>,
    /// User, as USER or USER:GROUP
    #[arg(short = 'u', long, value_name = "USER")]
    pub(crate) user: Option<String>,
    /// Kill the command after this long, like 30s
    #[arg(long, value_name = "SPAN")]
    pub(crate) timeout: Option<Span>,
    /// How long to try to reconnect if the server restarts; `0s` for not at all [default: 60s]
    #[arg(long, value_name = "SPAN")]
    pub(crate) reconnect: Option<Span>,
    /// Pass a secret in the environment variable ENV (repeatable)
    #[arg(long, value_name = "NAME[=ENV]", value_parser = inject)]
    pub(crate) inject: Vec<Inject>,
    /// Pass a secret in a file below /run or /dev/shm, deleted when the command ends (repeatable)
    #[arg(long, value_name = "NAME=PATH", value_parser = inject_file)]
    pub(crate) inject_file: Vec<Inject>,
}

/// Arguments of `run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Delete the sandbox when the command ends
    #[arg(long)]
    pub(crate) rm: bool,
    /// Forward standard input
    #[arg(short = 'i', long)]
    pub(crate) interactive: bool,
    /// Allocate a terminal
    #[arg(short = 't', long)]
    pub(crate) tty: bool,
    /// Name of the sandbox; a readable name is generated if absent
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Image to start from: `host`, or a name from `keep image ls` [default: host]
    #[arg(long, value_name = "IMAGE")]
    pub(crate) image: Option<String>,
    #[command(flatten)]
    pub(crate) settings: Settings,
    /// Program and arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "ARGV"
    )]
    pub(crate) argv: Vec<String>,
}

/// Arguments of `sh`.
#[derive(Debug, Args)]
pub(crate) struct ShellArgs {
    /// Environment variable of the shell; NAME alone copies the local value (repeatable)
    #[arg(short = 'e', long = "env", value_name = "NAME=VALUE", value_parser = variable)]
    pub(crate) env: Vec<(String, String)>,
    /// Working directory
    #[arg(short = 'C', long, value_name = "DIR")]
    pub(crate) cwd: Option<String>,
    /// User, as USER or USER:GROUP
    #[arg(short = 'u', long, value_name = "USER")]
    pub(crate) user: Option<String>,
    /// The sandbox
    pub(crate) name: String,
}

/// Arguments of `ps`.
#[derive(Debug, Args)]
pub(crate) struct PsArgs {
    /// The sandbox [default: all that run]
    #[arg(required_if_eq("all", "true"))]
    pub(crate) name: Option<String>,
    /// Show commands that have ended, too
    #[arg(short = 'a', long)]
    pub(crate) all: bool,
    /// Maximum number, newest first
    #[arg(short = 'n', long, value_name = "COUNT", default_value_t = 50)]
    pub(crate) limit: u32,
}

/// Arguments of `sessions`.
#[derive(Debug, Args)]
pub(crate) struct SessionsArgs {
    /// The sandbox
    pub(crate) name: String,
    /// Maximum number, newest first
    #[arg(short = 'n', long, value_name = "COUNT", default_value_t = 50)]
    pub(crate) limit: u32,
}

pub(super) const PS_HELP: &str = "\
Examples:
  keep ps                    commands that run, in all sandboxes
  keep ps my-app             commands that run in my-app
  keep ps my-app -a -n 10    its ten newest commands, ended ones too";

pub(super) const LOGS_HELP: &str = "\
Examples:
  keep logs my-app                       all that the newest command printed
  keep logs my-app --tail 20 -f          its last 20 lines, then what comes
  keep logs my-app cmd-01k --since 10m   of the command whose id begins so
  keep logs my-app --timestamps          with the time of each line";

pub(super) const HISTORY_HELP: &str = "\
CHANGED counts paths: `+` created, `~` modified, `-` deleted, then the disk space of the created \
and modified files. `*` marks a command that did not run alone: the counts are of all that ran at \
the same time. `?` marks counts that are too low, for example because the server was restarted \
meanwhile. Drives and mounts in memory, such as /tmp in some images, do not count.

Examples:
  keep history my-app --changed        only commands that changed something
  keep history my-app --json           counts, and ids for `keep changes my-app --command ID`";

/// Arguments of `history`.
#[derive(Debug, Args)]
pub(crate) struct HistoryArgs {
    /// The sandbox
    pub(crate) name: String,
    /// Only commands that changed something, or of which that is not known
    #[arg(long)]
    pub(crate) changed: bool,
    /// Maximum number, newest first
    #[arg(short = 'n', long, value_name = "COUNT", default_value_t = 50)]
    pub(crate) limit: u32,
}

/// Arguments of `logs`.
#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    /// The sandbox
    pub(crate) name: String,
    /// Id of the command, or a unique beginning or end of it [default: the newest]
    pub(crate) command: Option<String>,
    /// The newest command (the default)
    #[arg(long, conflicts_with = "command")]
    pub(crate) last: bool,
    /// Keep printing until the command ends
    #[arg(short = 'f', long)]
    pub(crate) follow: bool,
    /// Print only the last lines
    #[arg(long, value_name = "LINES", value_parser = clap::value_parser!(u32).range(0..=100_000))]
    pub(crate) tail: Option<u32>,
    /// Print only what was printed since a time (2026-01-31T12:00:00Z) or since how long ago (10m)
    #[arg(long, value_name = "TIME", value_parser = since)]
    pub(crate) since: Option<String>,
    /// Begin each line with the time when it was printed
    #[arg(short = 't', long)]
    pub(crate) timestamps: bool,
}

/// Arguments of `kill`.
#[derive(Debug, Args)]
pub(crate) struct KillArgs {
    /// The sandbox
    pub(crate) name: String,
    /// Id of the command, or a unique beginning or end of it
    #[arg(required_unless_present = "last")]
    pub(crate) command: Option<String>,
    /// The newest command that runs
    #[arg(long, conflicts_with = "command")]
    pub(crate) last: bool,
    /// Signal, by name or number
    #[arg(short = 's', long, default_value = "TERM", value_parser = signal)]
    pub(crate) signal: i32,
}

fn since(text: &str) -> Result<String, String> {
    let is_time = text.parse::<jiff::Timestamp>().is_ok() || text.parse::<Span>().is_ok();
    is_time
        .then(|| text.to_owned())
        .ok_or_else(|| "write a time like `2026-01-31T12:00:00Z`, or a span like `10m`".to_owned())
}

fn inject(text: &str) -> Result<Inject, String> {
    secret_use(text).map(|used| Inject { secret: used.secret, env: used.env, file: None })
}

fn inject_file(text: &str) -> Result<Inject, String> {
    match text.split_once('=') {
        Some((secret, path)) if !secret.is_empty() && path.starts_with('/') => {
            Ok(Inject { secret: secret.to_owned(), env: None, file: Some(path.to_owned()) })
        }
        _ => Err("write NAME=PATH, with a PATH that begins with `/`".to_owned()),
    }
}

/// Signals people send by name, as Linux numbers them.
const SIGNALS: [(&str, i32); 12] = [
    ("HUP", 1),
    ("INT", 2),
    ("QUIT", 3),
    ("ABRT", 6),
    ("KILL", 9),
    ("USR1", 10),
    ("USR2", 12),
    ("TERM", 15),
    ("CONT", 18),
    ("STOP", 19),
    ("TSTP", 20),
    ("WINCH", 28),
];

fn signal(text: &str) -> Result<i32, String> {
    if let Ok(number) = text.parse() {
        return match number {
            1..=64 => Ok(number),
            _ => Err("signals are numbered 1 to 64".to_owned()),
        };
    }
    let upper = text.to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    let found = SIGNALS.iter().find(|(known, _)| *known == name);
    found.map(|(_, number)| *number).ok_or_else(|| {
        let known: Vec<&str> = SIGNALS.iter().map(|(name, _)| *name).collect();
        format!("write a number, or one of {}", known.join(", "))
    })
}
