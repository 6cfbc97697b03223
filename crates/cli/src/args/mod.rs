//! The arguments of all commands.
//!
//! These types only parse; the modules under `command` act on them. `docs/CLI.md` is generated from the help
//! texts here, and a test compares it. [`command`] is what the program parses with: the definitions of
//! [`Keep`], with commands in groups and defaults shown only where they apply.

mod backup;
mod build;
mod events;
mod exec;
mod fork;
mod network;
mod port;
mod runs;
mod sandbox;
mod server;
mod stats;
mod stored;
mod tenant;
mod tls;

use std::path::PathBuf;

use clap::{Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

pub(crate) use backup::BackupCommand;
pub(crate) use build::{BuildArgs, SecretFrom, SecretValue, ShowProgress};
pub(crate) use events::{AuditArgs, AuditCommand, AuditFilterArgs, EventsArgs, WebhookCommand};
pub(crate) use exec::{
    ExecArgs, ExecOptions, HistoryArgs, KillArgs, LogsArgs, PsArgs, RunArgs, SessionsArgs,
    ShellArgs,
};
pub(crate) use fork::{
    ChangesArgs, ConflictsArg, DiffArgs, DriveDir, MergeArgs, PickArgs, PromoteArgs, PruneArgs,
    RenameArgs,
};
pub(crate) use network::{DefaultModeArg, ModeArg, NetArgs, NetworkArgs, NetworkSettings};
pub(crate) use port::{
    AccessArg, ForwardArgs, OpenArgs, PortsArgs, RestartArg, ServiceCommand, SetServiceArgs,
    published,
};
pub(crate) use runs::{
    AcceptRuleArg, AnswerArg, AnswerRunArgs, ApprovalsCommand, AskArgs, ListRunsArgs,
    ProjectRunsArgs, RunStatusArg, RunsCommand, StartRunArgs,
};
pub(crate) use sandbox::{
    CheckpointArgs, CopyArgs, CreateArgs, ForkArgs, GuardCommand, IfExistsArg, ListArgs, NameArgs,
    OnAcceptArg, PauseArgs, PhaseArg, RemoveArgs, RollbackArgs, StartArgs, StopArgs, UpdateArgs,
    pair, secret_use, variable,
};
pub(crate) use server::{
    ClientsArg, CompletionsArgs, ConfigArgs, ConfigCommand, DoctorArgs, EnvArgs, FsckArgs, ManArgs,
    MicrovmCommand, SERVE_HELP, ServeArgs, SetupArgs,
};
pub(crate) use stats::{StatsArgs, TopArgs, TopOrder};
pub(crate) use stored::{DriveCommand, ImageCommand, SnapshotCommand, TrashCommand};
pub(crate) use tenant::{
    KeyCommand, PlaceArg, ProjectCommand, ProjectNetworkArgs, ScopeArg, SecretCommand,
};
pub(crate) use tls::{TlsCommand, TlsInitArgs};

const EXIT_CODES: &str = "\
Exit codes:
  0    success
  1    the server rejected the request or failed
  2    invalid arguments
  3    cannot reach a server
  4    not found
  5    conflict: name taken, busy, not running, or another generation than expected
`exec`, `run` and `sh` exit with the code of the remote command, or with
  124  the remote command timed out
  125  keep itself failed
  126  the program cannot be executed
  127  the program was not found
  128+ a signal ended the remote command: 128 plus its number

Environment:
  SANDKEEP_URL      address of the server: http://host:port, https://host:port or unix:///path
  SANDKEEP_KEY      the API key
  SANDKEEP_CA       file of CA certificates to trust for an https:// address
  SANDKEEP_PROJECT  the project to use, with an admin key
  SANDKEEP_DATA     data directory of the local server; clients read its address and key there
  SANDKEEP_SECRETS_KEY  for `serve`: the key that encrypts secrets, 32 bytes in base64
  NO_COLOR          disables colours";

/// Persistent sandboxes for AI agents: named machines that stop, resume, fork and roll back.
#[derive(Debug, Parser)]
#[command(name = "keep", version, after_long_help = EXIT_CODES, after_help = "`keep --help` also lists exit codes and environment variables.")]
#[command(propagate_version = true, subcommand_required = true, arg_required_else_help = true)]
#[command(disable_help_subcommand = true)]
pub(crate) struct Keep {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Options of every command.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Global {
    /// Print the response of the API as JSON; errors are one line of JSON on standard error
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// Address of the server: http://host:port, https://host:port or unix:///path
    #[arg(long, global = true, env = "SANDKEEP_URL", value_name = "URL", hide_env_values = true)]
    pub(crate) url: Option<String>,
    /// API key
    #[arg(long, global = true, env = "SANDKEEP_KEY", value_name = "KEY", hide_env_values = true)]
    pub(crate) key: Option<String>,
    /// CA certificates (PEM) to trust for an https:// address, besides the system's
    #[arg(long, global = true, env = "SANDKEEP_CA", value_name = "FILE", hide_env_values = true)]
    pub(crate) ca: Option<PathBuf>,
    /// Project to use; needs an admin key [default: the key's own]
    #[arg(
        long,
        global = true,
        env = "SANDKEEP_PROJECT",
        value_name = "NAME",
        hide_env_values = true
    )]
    pub(crate) project: Option<String>,
    /// Data directory of the local server; clients read its address and key there
    #[arg(long, global = true, env = "SANDKEEP_DATA", value_name = "DIR", hide_env_values = true)]
    pub(crate) data: Option<PathBuf>,
}

/// All commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the server
    #[command(after_long_help = server::SERVE_HELP)]
    Serve(ServeArgs),
    /// Create a sandbox
    Create(Box<CreateArgs>),
    /// Run a command in a sandbox, starting it if needed
    Exec(ExecArgs),
    /// Run a command in a new ephemeral sandbox
    Run(Box<RunArgs>),
    /// Open a shell in a sandbox
    Sh(ShellArgs),
    /// Start a stopped or paused sandbox
    Start(StartArgs),
    /// Stop sandboxes and save their files as snapshots
    Stop(StopArgs),
    /// Pause sandboxes and save memory and processes (microvm)
    Pause(PauseArgs),
    /// Copy a sandbox, once or many times
    Fork(Box<ForkArgs>),
    /// Take a snapshot of a running sandbox
    Checkpoint(CheckpointArgs),
    /// Return a sandbox to an earlier snapshot
    ///
    /// The current files are saved as a snapshot first, so that a rollback can be undone. If the snapshot has
    /// memory, its processes continue. The memory of a running VM is not saved: pause it first to keep it.
    Rollback(RollbackArgs),
    /// Compare two states: sandboxes, snapshots, images
    ///
    /// Shared layers are skipped, so the time depends on what differs.
    #[command(after_long_help = fork::DIFF_HELP)]
    Diff(DiffArgs),
    /// Show what a session changed so far, or one command
    Changes(ChangesArgs),
    /// Give the origin of a fork the fork's state
    ///
    /// Refused if the origin has changed since. What it had stays as a snapshot. A running fork is checkpointed
    /// first, a running origin is stopped.
    Promote(PromoteArgs),
    /// Promote one fork of a group and delete the others
    Pick(PickArgs),
    /// Bring the changes of a sandbox into another one
    ///
    /// A three-way merge with the state that both come from. Text that changed on both sides is merged by lines.
    /// With a conflict nothing is changed. A running target is stopped first.
    Merge(MergeArgs),
    /// Give a sandbox another name
    Rename(RenameArgs),
    /// Delete forks of a sandbox that are not used any more
    Prune(PruneArgs),
    /// List sandboxes
    #[command(visible_alias = "list")]
    Ls(ListArgs),
    /// Show settings and state of sandboxes
    Show(NameArgs),
    /// Explain the state of sandboxes: why, what keeps them running, what wakes them
    Why(NameArgs),
    /// Show the lineage of sandboxes: snapshots and forks
    Tree(NameArgs),
    /// List the commands that run, in one sandbox or in all
    #[command(visible_alias = "commands", after_help = exec::PS_HELP)]
    Ps(PsArgs),
    /// List the commands of a sandbox with what each changed
    #[command(after_long_help = exec::HISTORY_HELP)]
    History(HistoryArgs),
    /// Print the output of a command, also after it ended
    #[command(after_help = exec::LOGS_HELP)]
    Logs(LogsArgs),
    /// Show events: sandboxes, commands, snapshots, ports, findings, damage
    #[command(after_long_help = events::EVENTS_HELP)]
    Events(EventsArgs),
    /// Show the audit log: who did what, when, from where
    Audit(AuditArgs),
    /// Send a signal to a command
    Kill(KillArgs),
    /// Copy files into or out of a sandbox
    Cp(CopyArgs),
    /// Delete sandboxes
    #[command(visible_alias = "delete")]
    Rm(RemoveArgs),
    /// Change the settings of a sandbox
    Update(Box<UpdateArgs>),
    /// Show what running sandboxes use: CPU, memory, processes, network, disk
    ///
    /// Nothing is woken: a stopped sandbox uses nothing.
    Stats(StatsArgs),
    /// Show what running sandboxes use, live
    Top(TopArgs),
    /// List the sessions of a sandbox and their resource usage
    Sessions(SessionsArgs),
    /// List, publish or unpublish ports of a sandbox
    Ports(PortsArgs),
    /// Open a port in the browser, publishing it if needed
    Open(OpenArgs),
    /// Forward a local port to a port in a sandbox
    Forward(ForwardArgs),
    /// Manage services: commands that run in every session
    #[command(subcommand)]
    Service(ServiceCommand),
    /// Show or change the network policy of a sandbox
    Network(Box<NetworkArgs>),
    /// Show the network connections of a sandbox
    Net(NetArgs),
    /// Start, follow, review and accept runs
    #[command(subcommand, after_help = runs::RUNS_HELP)]
    Runs(RunsCommand),
    /// List and answer approvals
    #[command(subcommand)]
    Approvals(ApprovalsCommand),
    /// Ask for an approval, from inside a sandbox
    ///
    /// Waits for the answer: exits with 0 if it was approved, with 1 if it was denied, and with 2 if nobody answered in
    /// time or it could not be asked. Inside a sandbox without `keep` this command is there, too.
    Ask(AskArgs),
    /// Manage quarantined files; needs an admin key
    #[command(subcommand)]
    Guard(GuardCommand),
    /// Manage snapshots
    #[command(subcommand)]
    Snapshot(SnapshotCommand),
    /// Manage secrets
    #[command(subcommand)]
    Secret(SecretCommand),
    /// Restore deleted and expired sandboxes, or empty the trash
    #[command(subcommand)]
    Trash(TrashCommand),
    /// Send events to an address of yours
    #[command(subcommand)]
    Webhook(WebhookCommand),
    /// Manage drives: volumes that outlive sandboxes
    #[command(subcommand)]
    Drive(DriveCommand),
    /// Manage images
    #[command(subcommand)]
    Image(ImageCommand),
    /// Manage projects
    #[command(subcommand)]
    Project(ProjectCommand),
    /// Manage API keys
    #[command(subcommand)]
    Key(KeyCommand),
    /// Print shell settings for clients of other vendors
    Env(EnvArgs),
    /// Show disk usage
    #[command(visible_alias = "df")]
    Usage,
    /// Back up and restore the data directory
    #[command(subcommand)]
    Backup(BackupCommand),
    /// Make certificates for HTTPS
    #[command(subcommand)]
    Tls(TlsCommand),
    /// Prepare this host for the microvm driver
    #[command(subcommand)]
    Microvm(MicrovmCommand),
    /// Check this host: what works, what is missing, how to fix it
    Doctor(DoctorArgs),
    /// Check and repair the data directory of a stopped server
    Fsck(FsckArgs),
    /// Print a settings file with all settings, or check one
    Config(ConfigArgs),
    /// Print a shell completion script
    #[command(after_help = server::COMPLETIONS_HELP)]
    Completions(CompletionsArgs),
    /// Write the manual pages
    Man(ManArgs),
    /// Print the versions of client and server
    Version,
}

/// The commands as `keep --help` lists them, by what a user wants to do.
const GROUPS: [(&str, &[&str]); 8] = [
    ("Run commands", &["create", "run", "exec", "sh", "cp", "ps", "logs", "kill"]),
    (
        "Manage sandboxes",
        &[
            "ls", "show", "why", "start", "stop", "pause", "update", "rm", "trash", "sessions",
            "stats", "top", "events",
        ],
    ),
    ("Copy and go back", &["fork", "checkpoint", "rollback", "tree", "history", "snapshot"]),
    ("Compare and bring back", &["diff", "changes", "promote", "pick", "merge", "rename", "prune"]),
    ("Govern the work of agents", &["runs", "approvals", "ask"]),
    ("Ports and network", &["ports", "open", "forward", "service", "network", "net"]),
    (
        "Images, data and access",
        &["image", "drive", "secret", "guard", "project", "key", "audit", "webhook", "env"],
    ),
    (
        "Run a server",
        &[
            "serve",
            "config",
            "doctor",
            "tls",
            "backup",
            "microvm",
            "usage",
            "fsck",
            "version",
            "completions",
            "man",
        ],
    ),
];

/// What the program parses with.
pub(crate) fn command() -> clap::Command {
    let keep = Keep::command();
    let template = format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{}Options of every command:\n{{options}}{{after-help}}",
        grouped(&keep)
    );
    keep.help_template(template)
        .mut_subcommand("fork", |fork| fork.mut_args(without_default))
        .mut_subcommand("update", |update| update.mut_args(without_default))
        .mut_subcommand("run", |run| {
            run.mut_arg("class", |class| class.help(RUN_CLASS))
                .mut_arg("persistent", |persistent| {
                    persistent.help("Take a snapshot at every stop")
                })
                .mut_arg("non_persistent", |no| no.help("Do not take snapshots (the default)"))
        })
}

const RUN_CLASS: &str = "Lifetime: `ephemeral` (never snapshotted, expires after 1d), `resumable` (30d) or \
    `workspace` (365d) [default: ephemeral]";

/// Parses the arguments of the process.
pub(crate) fn parse() -> Result<Keep, clap::Error> {
    Keep::from_arg_matches(&command().try_get_matches()?)
}

/// The list of commands in groups.
fn grouped(keep: &clap::Command) -> String {
    let mut text = String::new();
    for (group, names) in GROUPS {
        text.push_str(&format!("{group}:\n"));
        for name in names {
            let Some(command) = keep.find_subcommand(name) else { continue };
            let about = command.get_about().map(ToString::to_string).unwrap_or_default();
            let aliases: Vec<&str> = command.get_visible_aliases().collect();
            let alias = match aliases.as_slice() {
                [] => String::new(),
                names => format!(" [alias: {}]", names.join(", ")),
            };
            text.push_str(&format!("  {name:<12} {about}{alias}\n"));
        }
        text.push('\n');
    }
    text
}

/// Removes the default from the help of an option: absent options keep the value.
fn without_default(arg: clap::Arg) -> clap::Arg {
    let help = arg.get_help().map(ToString::to_string);
    match help.as_deref().and_then(|help| help.split_once(" [default: ")) {
        Some((help, _)) => arg.help(help.to_owned()),
        None => match help.as_deref().and_then(|help| help.strip_suffix(" (the default)")) {
            Some(help) => arg.help(help.to_owned()),
            None => arg,
        },
    }
}

#[cfg(test)]
mod tests;
