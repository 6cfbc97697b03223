//! Arguments of the commands about sandboxes.

use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use sandkeep_client::types::{Mount, MountMode, Port, SecretUse};
use sandkeep_core::model::{Size, Span};

use super::NetworkSettings;
use super::port::published;

/// One or more sandboxes.
#[derive(Debug, Args)]
pub(crate) struct NameArgs {
    /// Names of sandboxes
    #[arg(required = true, value_name = "NAME")]
    pub(crate) names: Vec<String>,
}

/// Sandboxes to be stopped, and what was decided about what the guard finds.
#[derive(Debug, Args)]
pub(crate) struct StopArgs {
    /// Names of sandboxes
    #[arg(required = true, value_name = "NAME")]
    pub(crate) names: Vec<String>,
    /// Mask the values of secrets in the files that hold them
    #[arg(long)]
    pub(crate) redact: bool,
    /// Give up all that the session wrote
    #[arg(long, conflicts_with_all = ["redact", "promote", "drop", "accept_doubtful"])]
    pub(crate) discard: bool,
    /// Keep large files and junk that match; may be repeated
    #[arg(long, value_name = "GLOB")]
    pub(crate) promote: Vec<String>,
    /// Leave files that match out of the snapshot; may be repeated
    #[arg(long, value_name = "GLOB")]
    pub(crate) drop: Vec<String>,
    /// Keep files that a failing disk put in doubt as they can be read now
    #[arg(long)]
    pub(crate) accept_doubtful: bool,
}

/// What the guard keeps aside.
#[derive(Debug, Subcommand)]
pub(crate) enum GuardCommand {
    /// List files that were taken out of snapshots because they hold secrets
    Ls,
    /// Remove such files for good
    Rm {
        /// Ids as `keep guard ls` shows them
        #[arg(required = true, value_name = "ID")]
        ids: Vec<String>,
    },
}

/// Sandboxes to be deleted.
#[derive(Debug, Args)]
pub(crate) struct RemoveArgs {
    /// Names of sandboxes
    #[arg(required = true, value_name = "NAME")]
    pub(crate) names: Vec<String>,
    /// Leave their snapshots, until they are deleted or expire
    #[arg(long)]
    pub(crate) keep_snapshots: bool,
    /// Even if what they wrote to drives cannot be had from their disks any more, and is lost
    #[arg(long)]
    pub(crate) force: bool,
}

/// What a sandbox is asked to be; absent means the default, or no change.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Settings")]
pub(crate) struct Settings {
    /// Isolation backend: container, or microvm for a machine of its own that keeps its memory
    #[arg(long, value_name = "DRIVER")]
    pub(crate) driver: Option<String>,
    /// ephemeral (never snapshotted), resumable (kept for days) or workspace (kept on purpose)
    #[arg(long, value_enum)]
    pub(crate) class: Option<ClassArg>,
    /// Take no snapshot when it stops
    #[arg(long, overrides_with = "persistent")]
    pub(crate) non_persistent: bool,
    /// Take a snapshot when it stops (the default)
    #[arg(long)]
    pub(crate) persistent: bool,
    /// Who answers for it
    #[arg(long, value_name = "WHO")]
    pub(crate) owner: Option<String>,
    /// What it is for
    #[arg(long, value_name = "TEXT")]
    pub(crate) purpose: Option<String>,
    /// How long after its last use it goes away, like 12h or 30d
    #[arg(long, value_name = "SPAN")]
    pub(crate) expires: Option<Span>,
    /// A label to find it by; may be repeated
    #[arg(long = "tag", value_name = "KEY=VALUE", value_parser = pair)]
    pub(crate) tags: Vec<(String, String)>,
    /// A variable for every command; NAME alone takes the value from here; may be repeated
    #[arg(short = 'e', long = "env", value_name = "NAME=VALUE", value_parser = variable)]
    pub(crate) env: Vec<(String, String)>,
    /// Working directory of commands; `image` for the image's own
    #[arg(short = 'C', long, value_name = "DIR")]
    pub(crate) cwd: Option<String>,
    /// User of commands, as USER or USER:GROUP; `image` for the image's own
    #[arg(short = 'u', long, value_name = "USER")]
    pub(crate) user: Option<String>,
    /// CPUs, like 2 or 0.5
    #[arg(long, value_name = "COUNT", value_parser = millicpus)]
    pub(crate) vcpus: Option<u32>,
    /// Memory, like 512M or 4G
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Option<Size>,
    /// Processes and threads
    #[arg(long, value_name = "COUNT")]
    pub(crate) pids: Option<u32>,
    /// What one session may add to the disk, like 10G
    #[arg(long, value_name = "SIZE")]
    pub(crate) disk: Option<Size>,
    /// How long one session may last, or `never`
    #[arg(long, value_name = "SPAN", value_parser = span_or_never)]
    pub(crate) timeout: Option<Limit>,
    /// How long a session lasts with no command alive and no connection open, or `never`
    #[arg(long, value_name = "SPAN", value_parser = span_or_never)]
    pub(crate) idle_timeout: Option<Limit>,
    /// What happens after that; `auto` is pause where the driver keeps memory, else stop
    #[arg(long, value_enum, value_name = "WHAT")]
    pub(crate) on_idle: Option<OnIdleArg>,
    /// Shell command to run once, after creation; may be repeated
    #[arg(long, value_name = "COMMAND")]
    pub(crate) on_create: Vec<String>,
    /// Shell command to run at every resume; may be repeated
    #[arg(long, value_name = "COMMAND")]
    pub(crate) on_resume: Vec<String>,
    /// Shell command whose output must be the same before a stop and after the resume
    #[arg(long, value_name = "COMMAND")]
    pub(crate) validate: Option<String>,
    /// How long a snapshot is kept, or `never` to keep it for good
    #[arg(long, value_name = "SPAN", value_parser = span_or_never)]
    pub(crate) snapshot_expires: Option<Limit>,
    /// How many snapshots are kept, or `all`
    #[arg(long, value_name = "COUNT", value_parser = count_or_all)]
    pub(crate) keep_last: Option<Count>,
    /// A glob of paths that never enter a snapshot, like `tmp/**`; may be repeated
    #[arg(long, value_name = "GLOB")]
    pub(crate) exclude: Vec<String>,
    /// What a secret in a file means when a session ends: block (nothing is kept until somebody decides),
    /// quarantine (the file is kept aside) or warn
    #[arg(long, value_enum, value_name = "POLICY")]
    pub(crate) guard: Option<GuardArg>,
    /// What a large file or junk means when a session ends
    #[arg(long, value_enum, value_name = "POLICY")]
    pub(crate) large_files: Option<LargeFilesArg>,
    /// From what size on a file is large, like 256M
    #[arg(long, value_name = "SIZE")]
    pub(crate) large_size: Option<Size>,
    /// A glob of what is junk, like `.cache`; may be repeated, and replaces all there were
    #[arg(long, value_name = "GLOB")]
    pub(crate) junk: Vec<String>,
    /// A drive to mount, from the next session on; MODE is read-write or snapshot (read-only, as it
    /// was when the session started); may be repeated, and replaces all there were
    #[arg(long = "mount", value_name = "DRIVE:/PATH[:MODE]", value_parser = mount)]
    pub(crate) mounts: Vec<(String, Mount)>,
    /// Mount no drives
    #[arg(long, conflicts_with = "mounts")]
    pub(crate) no_mounts: bool,
    /// A secret to use: its commands find a placeholder in the variable ENV, and the network puts the value
    /// in its place, towards the hosts of the secret; may be repeated, and replaces all there were
    #[arg(long = "secret", value_name = "NAME[=ENV]", value_parser = secret_use)]
    pub(crate) secrets: Vec<SecretUse>,
    /// Use no secrets
    #[arg(long, conflicts_with = "secrets")]
    pub(crate) no_secrets: bool,
    /// A port to reach from outside, by everybody or with a token only; may be repeated
    #[arg(long = "publish", value_name = "PORT[:private]", value_parser = published)]
    pub(crate) publish: Vec<Port>,
    /// Requests for its ports wake it (the default)
    #[arg(long, overrides_with = "no_wake_on_request")]
    pub(crate) wake_on_request: bool,
    /// Requests for its ports do not wake it
    #[arg(long)]
    pub(crate) no_wake_on_request: bool,
    #[command(flatten)]
    pub(crate) network: NetworkSettings,
}

/// What a secret in a file means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum GuardArg {
    Block,
    Quarantine,
    Warn,
}

/// What a large file or junk means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LargeFilesArg {
    Off,
    Warn,
    PromoteOrDrop,
}

/// What becomes of a sandbox that nobody uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnIdleArg {
    /// It goes on running
    Run,
    /// Memory, processes and files are kept
    Pause,
    /// Files are kept
    Stop,
    /// What the driver does best
    Auto,
}

/// How a sandbox is governed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ClassArg {
    Ephemeral,
    Resumable,
    Workspace,
}

/// A span, or none at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Limit {
    Never,
    After(Span),
}

/// A number, or no bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Count {
    All,
    Only(u32),
}

/// Arguments of `create`.
#[derive(Debug, Args)]
pub(crate) struct CreateArgs {
    /// Its name; readable words are chosen if absent
    #[arg(value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Image to start from: `host`, or a name from `keep image ls`
    #[arg(long, value_name = "IMAGE")]
    pub(crate) image: Option<String>,
    /// Snapshot to start from instead of an image
    #[arg(long, value_name = "SNAPSHOT", conflicts_with = "image")]
    pub(crate) from: Option<String>,
    /// What to do when the name is taken
    #[arg(long, value_enum, default_value_t = IfExistsArg::Fail)]
    pub(crate) if_exists: IfExistsArg,
    /// Return the sandbox if it exists already, else create it: short for --if-exists get
    #[arg(long, conflicts_with = "if_exists")]
    pub(crate) get: bool,
    /// Do not start it yet
    #[arg(long)]
    pub(crate) no_start: bool,
    /// Makes a retry with the same key harmless
    #[arg(long, value_name = "KEY")]
    pub(crate) idempotency_key: Option<String>,
    #[command(flatten)]
    pub(crate) settings: Settings,
}

/// What to do when a name is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum IfExistsArg {
    /// Refuse
    Fail,
    /// Return what is there
    Get,
}

pub(super) fn secret_use(text: &str) -> Result<SecretUse, String> {
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
    /// Fail unless this is its generation
    #[arg(long, value_name = "GENERATION")]
    pub(crate) expect_generation: Option<u64>,
}

/// Sandboxes to be paused.
#[derive(Debug, Args)]
pub(crate) struct PauseArgs {
    /// Names of sandboxes
    #[arg(required = true, value_name = "NAME")]
    pub(crate) names: Vec<String>,
    /// Fail unless this is its generation
    #[arg(long, value_name = "GENERATION")]
    pub(crate) expect_generation: Option<u64>,
}

/// Arguments of `fork`.
#[derive(Debug, Args)]
pub(crate) struct ForkArgs {
    /// The sandbox to fork
    pub(crate) source: String,
    /// Name of the new one; readable words are chosen if absent
    pub(crate) name: Option<String>,
    /// Make so many, all from one snapshot: NAME-1, NAME-2 and so on
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) count: Option<u32>,
    /// Fork from this snapshot rather than from the present state
    #[arg(long, value_name = "SNAPSHOT")]
    pub(crate) from: Option<String>,
    /// Fail unless this is the source's generation
    #[arg(long, value_name = "GENERATION")]
    pub(crate) expect_generation: Option<u64>,
    /// Start the fork at once
    #[arg(long)]
    pub(crate) start: bool,
    /// Makes a retry with the same key harmless
    #[arg(long, value_name = "KEY")]
    pub(crate) idempotency_key: Option<String>,
    #[command(flatten)]
    pub(crate) settings: Settings,
}

/// Arguments of `checkpoint`.
#[derive(Debug, Args)]
pub(crate) struct CheckpointArgs {
    /// The sandbox
    pub(crate) name: String,
    /// What to call it
    #[arg(short = 'l', long, value_name = "TEXT")]
    pub(crate) label: Option<String>,
}

/// Arguments of `rollback`.
#[derive(Debug, Args)]
pub(crate) struct RollbackArgs {
    /// The sandbox
    pub(crate) name: String,
    /// The snapshot to go back to
    pub(crate) snapshot: String,
    /// Fail unless this is its generation
    #[arg(long, value_name = "GENERATION")]
    pub(crate) expect_generation: Option<u64>,
}

/// Arguments of `ls`.
#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Only those whose name begins like this
    pub(crate) prefix: Option<String>,
    /// Only those with this tag; may be repeated, all must match
    #[arg(long = "tag", value_name = "KEY=VALUE", value_parser = pair)]
    pub(crate) tags: Vec<(String, String)>,
    /// Only those in this state
    #[arg(long, value_enum)]
    pub(crate) state: Option<PhaseArg>,
    /// Only those of this class
    #[arg(long, value_enum)]
    pub(crate) class: Option<ClassArg>,
    /// Only the names
    #[arg(short = 'q', long)]
    pub(crate) quiet: bool,
}

/// Where a sandbox is.
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
    after_help = "A path in a sandbox is written NAME:/path. `keep cp -r ./src my-app:/work/src` makes /work/src;
a source that ends in `/.` copies what is in the directory. `-` is standard input or output."
)]
pub(crate) struct CopyArgs {
    /// Copy directories with all that is in them
    #[arg(short = 'r', long)]
    pub(crate) recursive: bool,
    /// As this user of the sandbox
    #[arg(short = 'u', long, value_name = "USER")]
    pub(crate) user: Option<String>,
    /// Fail if the sandbox sleeps, rather than wake it
    #[arg(long)]
    pub(crate) if_running: bool,
    /// Show no progress
    #[arg(short = 'q', long)]
    pub(crate) quiet: bool,
    /// What to copy: PATH or NAME:PATH
    pub(crate) from: String,
    /// Where to: PATH or NAME:PATH
    pub(crate) to: String,
}

/// Arguments of `update`.
#[derive(Debug, Args)]
pub(crate) struct UpdateArgs {
    /// The sandbox
    pub(crate) name: String,
    /// Give the session under way this much more time
    #[arg(long, value_name = "SPAN")]
    pub(crate) extend: Option<Span>,
    /// Take this tag away; may be repeated
    #[arg(long, value_name = "KEY")]
    pub(crate) untag: Vec<String>,
    /// Take this variable away; may be repeated
    #[arg(long, value_name = "NAME")]
    pub(crate) unset_env: Vec<String>,
    /// Publish this port no more; may be repeated
    #[arg(long, value_name = "PORT")]
    pub(crate) unpublish: Vec<u16>,
    #[command(flatten)]
    pub(crate) settings: Settings,
}

fn mount(text: &str) -> Result<(String, Mount), String> {
    let mut parts = text.splitn(3, ':');
    let (drive, path) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let mode = match parts.next() {
        None | Some("read-write") => MountMode::ReadWrite,
        Some("snapshot") => MountMode::Snapshot,
        Some(other) => return Err(format!("`{other}` is no mode; write read-write or snapshot")),
    };
    if drive.is_empty() || !path.starts_with('/') {
        return Err("write DRIVE:/PATH, or DRIVE:/PATH:snapshot".to_owned());
    }
    Ok((path.to_owned(), Mount { drive: drive.to_owned(), mode }))
}

pub(super) fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("write KEY=VALUE".to_owned()),
    }
}

pub(super) fn variable(text: &str) -> Result<(String, String), String> {
    if text.contains('=') {
        return pair(text).map_err(|_| "write NAME=VALUE or NAME".to_owned());
    }
    match std::env::var(text) {
        Ok(value) => Ok((text.to_owned(), value)),
        Err(_) => Err(format!("`{text}` is not set here; write NAME=VALUE")),
    }
}

fn millicpus(text: &str) -> Result<u32, String> {
    let bad = || "write a number of CPUs, like 2 or 0.5".to_owned();
    let count: f64 = text.parse().map_err(|_| bad())?;
    if !(0.001..=1024.0).contains(&count) {
        return Err(bad());
    }
    Duration::try_from_secs_f64(count)
        .ok()
        .and_then(|count| u32::try_from(count.as_millis()).ok())
        .ok_or_else(bad)
}

fn span_or_never(text: &str) -> Result<Limit, String> {
    match text {
        "never" => Ok(Limit::Never),
        _ => text.parse().map(Limit::After).map_err(|error| format!("{error}; or `never`")),
    }
}

fn count_or_all(text: &str) -> Result<Count, String> {
    match text {
        "all" => Ok(Count::All),
        _ => text.parse().map(Count::Only).map_err(|_| "write a number, or `all`".to_owned()),
    }
}
