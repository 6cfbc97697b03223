//! Arguments of the commands about sandboxes.

use clap::{Args, Subcommand, ValueEnum};
use sandkeep_client::types::{Class, SecretUse, Span};

use crate::settings::{Settings, class};

/// One or more sandboxes.
#[derive(Debug, Args)]
pub(crate) struct NameArgs {
    /// Names of sandboxes
    #[arg(required = true, value_name = "NAME")]
    pub(crate) names: Vec<String>,
}

/// Arguments of `stop`: the sandboxes, and decisions about findings of the guard.
#[derive(Debug, Args)]
pub(crate) struct StopArgs {
    /// Names of sandboxes
    #[arg(required_unless_present = "all", value_name = "NAME")]
    pub(crate) names: Vec<String>,
    /// Stop all sandboxes of the project that run
    #[arg(long, conflicts_with = "names")]
    pub(crate) all: bool,
    /// With --all: of all projects; needs an admin key
    #[arg(long, requires = "all", conflicts_with = "names")]
    pub(crate) all_projects: bool,
    /// Mask the values of secrets in files that contain them
    #[arg(long)]
    pub(crate) redact: bool,
    /// Discard all changes of the session
    #[arg(long, conflicts_with_all = ["redact", "promote", "drop", "accept_doubtful"])]
    pub(crate) discard: bool,
    /// Keep large and junk files that match (repeatable)
    #[arg(long, value_name = "GLOB")]
    pub(crate) promote: Vec<String>,
    /// Leave files that match out of the snapshot (repeatable)
    #[arg(long, value_name = "GLOB")]
    pub(crate) drop: Vec<String>,
    /// Accept the current contents of files that may be damaged after a disk error
    #[arg(long)]
    pub(crate) accept_doubtful: bool,
}

/// Subcommands of `guard`.
#[derive(Debug, Subcommand)]
pub(crate) enum GuardCommand {
    /// List files that were moved out of snapshots because they contain secrets
    Ls,
    /// Delete quarantined files permanently
    Rm {
        /// Ids from `keep guard ls`
        #[arg(required = true, value_name = "ID")]
        ids: Vec<String>,
    },
}

/// Arguments of `rm`.
#[derive(Debug, Args)]
pub(crate) struct RemoveArgs {
    /// Names of sandboxes
    #[arg(required = true, value_name = "NAME")]
    pub(crate) names: Vec<String>,
    /// Keep their snapshots until they are deleted or expire
    #[arg(long)]
    pub(crate) keep_snapshots: bool,
    /// Delete even if writes to drives cannot be recovered from the sandbox's disks and are lost
    #[arg(long)]
    pub(crate) force: bool,
}

const CREATION: &str = "Creation";

const CREATE_HELP: &str = "\
Examples:
  keep create my-app                                     with defaults, on the image `host`
  keep create my-app --image debian:12 --memory 8G --publish 3000
  keep create my-app --driver microvm --network deny-all --allow-domain github.com
  keep create my-app --class workspace --mount data:/data --exclude 'tmp/**'";

/// Arguments of `create`.
#[derive(Debug, Args)]
#[command(after_help = CREATE_HELP)]
pub(crate) struct CreateArgs {
    /// Name of the sandbox; a readable name is generated if absent
    #[arg(value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Image to start from: `host`, or a name from `keep image ls` [default: host]
    #[arg(long, value_name = "IMAGE")]
    pub(crate) image: Option<String>,
    /// Return the sandbox if it exists, otherwise create it: short for --if-exists get
    #[arg(long, conflicts_with = "if_exists")]
    pub(crate) get: bool,
    #[command(flatten)]
    pub(crate) settings: Settings,
    /// Snapshot to start from, instead of an image: id, beginning or end of it, or SANDBOX@LABEL
    #[arg(long, value_name = "SNAPSHOT", conflicts_with = "image", help_heading = CREATION)]
    pub(crate) from: Option<String>,
    /// Action if the name is taken
    #[arg(long, value_enum, default_value_t = IfExistsArg::Fail, help_heading = CREATION)]
    pub(crate) if_exists: IfExistsArg,
    /// Do not start the sandbox yet; it starts on first use
    #[arg(long, help_heading = CREATION)]
    pub(crate) no_start: bool,
    /// Key that makes retries of the same request safe
    #[arg(long, value_name = "KEY", help_heading = CREATION)]
    pub(crate) idempotency_key: Option<String>,
}

/// The action if a name is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum IfExistsArg {
    /// Fail with an error
    Fail,
    /// Return the existing sandbox
    Get,
}

pub(crate) fn secret_use(text: &str) -> Result<SecretUse, String> {
    let (secret, env) = text.split_once('=').map_or((text, None), |(name, env)| (name, Some(env)));
    if secret.is_empty() || env == Some("") {
        return Err("write NAME or NAME=VARIABLE".to_owned());
    }
    Ok(SecretUse { secret: secret.to_owned(), env: env.map(str::to_owned) })
}

/// Arguments of `start`.
#[derive(Debug, Args)]
pub(crate) struct StartArgs {
    /// The sandbox
    pub(crate) name: String,
    /// Fail unless the sandbox is at this generation
    #[arg(long, value_name = "GENERATION")]
    pub(crate) expect_generation: Option<u64>,
}

/// Arguments of `pause`.
#[derive(Debug, Args)]
pub(crate) struct PauseArgs {
    /// Names of sandboxes
    #[arg(required = true, value_name = "NAME")]
    pub(crate) names: Vec<String>,
    /// Fail unless the sandbox is at this generation
    #[arg(long, value_name = "GENERATION")]
    pub(crate) expect_generation: Option<u64>,
}

/// Arguments of `fork`.
#[derive(Debug, Args)]
#[command(after_help = "Settings that are not given are copied from the source; drives are not.")]
pub(crate) struct ForkArgs {
    /// The sandbox to fork
    pub(crate) source: String,
    /// Name of the new sandbox; a readable name is generated if absent
    pub(crate) name: Option<String>,
    /// Number of forks, all from one snapshot: NAME-1, NAME-2 and so on
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) count: Option<u32>,
    /// Snapshot to fork from: id, beginning or end of it, or label [default: the current state]
    #[arg(long, value_name = "SNAPSHOT")]
    pub(crate) from: Option<String>,
    /// Fail unless the source is at this generation
    #[arg(long, value_name = "GENERATION")]
    pub(crate) expect_generation: Option<u64>,
    /// Start the fork immediately
    #[arg(long)]
    pub(crate) start: bool,
    /// Delete the fork if it is not used for this long, like 7d; the same as --expires
    #[arg(long, value_name = "SPAN", conflicts_with = "expires")]
    pub(crate) ttl: Option<Span>,
    /// What becomes of the fork once it is promoted, or all of it merged
    #[arg(long, value_name = "WHAT", default_value = "keep")]
    pub(crate) on_accept: OnAcceptArg,
    /// Key that makes retries of the same request safe
    #[arg(long, value_name = "KEY")]
    pub(crate) idempotency_key: Option<String>,
    #[command(flatten)]
    pub(crate) settings: Settings,
}

/// What becomes of a fork once it is accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum OnAcceptArg {
    /// It stays
    Keep,
    /// It is deleted; the trash has it for a while
    Delete,
}

/// Arguments of `checkpoint`.
#[derive(Debug, Args)]
pub(crate) struct CheckpointArgs {
    /// The sandbox
    pub(crate) name: String,
    /// Label of the snapshot
    #[arg(short = 'l', long, value_name = "TEXT")]
    pub(crate) label: Option<String>,
}

/// Arguments of `rollback`.
#[derive(Debug, Args)]
pub(crate) struct RollbackArgs {
    /// The sandbox
    pub(crate) name: String,
    /// The snapshot: its id, a unique beginning or end of it, or its label
    #[arg(required_unless_present = "last")]
    pub(crate) snapshot: Option<String>,
    /// The newest snapshot
    #[arg(long, conflicts_with = "snapshot")]
    pub(crate) last: bool,
    /// Fail unless the sandbox is at this generation
    #[arg(long, value_name = "GENERATION")]
    pub(crate) expect_generation: Option<u64>,
}

/// Arguments of `ls`.
#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Show only names with this prefix
    pub(crate) prefix: Option<String>,
    /// Show only sandboxes with this tag (repeatable; all must match)
    #[arg(long = "tag", value_name = "KEY=VALUE", value_parser = pair)]
    pub(crate) tags: Vec<(String, String)>,
    /// Show only sandboxes in this state
    #[arg(long, value_enum)]
    pub(crate) state: Option<PhaseArg>,
    /// Show only sandboxes of this class
    #[arg(long, value_parser = class())]
    pub(crate) class: Option<Class>,
    /// Print names only
    #[arg(short = 'q', long)]
    pub(crate) quiet: bool,
}

/// The state of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PhaseArg {
    Stopped,
    Starting,
    Running,
    Paused,
    Stopping,
    Failed,
}

/// Arguments of `cp`.
#[derive(Debug, Args)]
#[command(
    after_help = "A path in a sandbox is written NAME:/path. `keep cp -r ./src my-app:/work/src` makes \
                  /work/src; a source that ends in `/.` copies the contents of the directory. `-` is \
                  standard input or output."
)]
pub(crate) struct CopyArgs {
    /// Copy directories recursively
    #[arg(short = 'r', long)]
    pub(crate) recursive: bool,
    /// User of the sandbox to read and write as
    #[arg(short = 'u', long, value_name = "USER")]
    pub(crate) user: Option<String>,
    /// Fail if the sandbox is not running, instead of starting it
    #[arg(long)]
    pub(crate) if_running: bool,
    /// Do not show progress
    #[arg(short = 'q', long)]
    pub(crate) quiet: bool,
    /// Source: PATH or NAME:PATH
    pub(crate) from: String,
    /// Destination: PATH or NAME:PATH
    pub(crate) to: String,
}

/// Arguments of `update`.
#[derive(Debug, Args)]
#[command(after_help = "Settings that are not given stay as they are.")]
pub(crate) struct UpdateArgs {
    /// The sandbox
    pub(crate) name: String,
    /// Extend the current session by this long, like 1h
    #[arg(long, value_name = "SPAN")]
    pub(crate) extend: Option<Span>,
    /// Remove a tag (repeatable)
    #[arg(long, value_name = "KEY")]
    pub(crate) untag: Vec<String>,
    /// Remove an environment variable (repeatable)
    #[arg(long, value_name = "NAME")]
    pub(crate) unset_env: Vec<String>,
    /// Stop publishing a port (repeatable)
    #[arg(long, value_name = "PORT")]
    pub(crate) unpublish: Vec<u16>,
    #[command(flatten)]
    pub(crate) settings: Settings,
}

pub(crate) fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("write KEY=VALUE".to_owned()),
    }
}

pub(crate) fn variable(text: &str) -> Result<(String, String), String> {
    if text.contains('=') {
        return pair(text).map_err(|_| "write NAME=VALUE or NAME".to_owned());
    }
    match std::env::var(text) {
        Ok(value) => Ok((text.to_owned(), value)),
        Err(_) => Err(format!("`{text}` is not set here; write NAME=VALUE")),
    }
}
