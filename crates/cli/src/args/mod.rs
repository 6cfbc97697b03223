//! What can be written on the command line.
//!
//! These types only say what was written; the modules under `command` say what it means. The help
//! texts are the reference, `docs/CLI.md` is generated from them and held by a test.

mod exec;
mod network;
mod port;
mod sandbox;
mod server;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

pub(crate) use exec::{ExecArgs, ExecOptions, KillArgs, LogsArgs, PsArgs, RunArgs, ShellArgs};
pub(crate) use network::{ModeArg, NetArgs, NetworkArgs, NetworkSettings};
pub(crate) use port::{
    AccessArg, ForwardArgs, OpenArgs, PortsArgs, RestartArg, ServiceCommand, SetServiceArgs,
};
pub(crate) use sandbox::{
    CheckpointArgs, ClassArg, CopyArgs, Count, CreateArgs, ForkArgs, GuardArg, GuardCommand,
    IfExistsArg, LargeFilesArg, Limit, ListArgs, NameArgs, OnIdleArg, PauseArgs, PhaseArg,
    RemoveArgs, RollbackArgs, Settings, StartArgs, StopArgs, UpdateArgs,
};
pub(crate) use server::{
    ClientsArg, CompletionsArgs, DoctorArgs, DriveCommand, EnvArgs, EventsArgs, FsckArgs,
    ImageCommand, KeyCommand, MicrovmCommand, PlaceArg, ProjectCommand, ProjectNetworkArgs,
    ScopeArg, SecretCommand, ServeArgs, SetupArgs, SnapshotCommand, TrashCommand,
};

const EXIT_CODES: &str = "\
Exit codes:
  0    done
  1    the server refused, or failed at, what was asked
  2    the command line makes no sense
  3    no server could be reached
  4    what was named does not exist
  5    it is in a state that does not allow this (taken, busy, not running, other generation)
`exec`, `run` and `sh` exit with the code of the remote command, and with
  124  the remote command ran into its timeout
  125  keep itself failed
  126  the program cannot be executed
  127  the program does not exist
  128+ a signal ended the remote command: 128 and its number

Environment:
  SANDKEEP_URL      address of the server: http://host:port or unix:///path
  SANDKEEP_KEY      the API key
  SANDKEEP_PROJECT  the project to act for, with a key that may do everything
  SANDKEEP_DATA     data directory, in which clients find the local server and its key
  SANDKEEP_SECRETS_KEY  for `serve`: the key that secrets are sealed with, 32 bytes in base64
  NO_COLOR          no colours, whatever the terminal can do";

/// Persistent sandboxes for AI agents: named machines that sleep, wake, fork and roll back.
#[derive(Debug, Parser)]
#[command(name = "keep", version, after_long_help = EXIT_CODES, after_help = "`keep --help` also tells the exit codes and environment variables.")]
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
    /// Print the API's answer as JSON; a failure is one line of JSON on standard error
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// Address of the server: http://host:port or unix:///path
    #[arg(long, global = true, env = "SANDKEEP_URL", value_name = "URL", hide_env_values = true)]
    pub(crate) url: Option<String>,
    /// API key
    #[arg(long, global = true, env = "SANDKEEP_KEY", value_name = "KEY", hide_env_values = true)]
    pub(crate) key: Option<String>,
    /// The project to act for; needs a key that may do everything [default: the key's own]
    #[arg(
        long,
        global = true,
        env = "SANDKEEP_PROJECT",
        value_name = "NAME",
        hide_env_values = true
    )]
    pub(crate) project: Option<String>,
    /// Data directory, in which clients find the local server and its key
    #[arg(long, global = true, env = "SANDKEEP_DATA", value_name = "DIR", hide_env_values = true)]
    pub(crate) data: Option<PathBuf>,
}

/// What `keep` can do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the server
    #[command(after_long_help = server::SERVE_HELP)]
    Serve(ServeArgs),
    /// Create a sandbox
    Create(Box<CreateArgs>),
    /// Run a command in a sandbox, waking it if it sleeps
    Exec(ExecArgs),
    /// Run a command in a fresh sandbox that is never snapshotted
    Run(Box<RunArgs>),
    /// Open a login shell in a sandbox
    Sh(ShellArgs),
    /// Wake a sandbox
    Start(StartArgs),
    /// Stop a sandbox and keep what it wrote as a snapshot
    Stop(StopArgs),
    /// Pause a sandbox and keep its memory: processes go on where they were on the next call that needs it
    Pause(PauseArgs),
    /// Make a new sandbox from the present state of another, or several
    Fork(Box<ForkArgs>),
    /// Take a snapshot without stopping anything
    Checkpoint(CheckpointArgs),
    /// Go back to a snapshot; the present state is kept as a snapshot first
    ///
    /// A snapshot that has memory is gone back to with its processes. What is kept of a machine that runs are its files: pause
    /// it first if its memory is to be kept too.
    Rollback(RollbackArgs),
    /// List sandboxes
    #[command(visible_alias = "list")]
    Ls(ListArgs),
    /// Show everything about a sandbox
    Show(NameArgs),
    /// Tell why a sandbox is in the state it is in, what keeps it awake and what would wake it
    Why(NameArgs),
    /// Draw the lineage of a sandbox: snapshots, forks and what they stand on
    Tree(NameArgs),
    /// List the commands of a sandbox
    #[command(visible_alias = "commands")]
    Ps(PsArgs),
    /// Print what a command wrote, also after it ended and after the sandbox stopped
    Logs(LogsArgs),
    /// Show what happened: sandboxes, commands, snapshots, ports, findings, damage
    #[command(after_long_help = server::EVENTS_HELP)]
    Events(EventsArgs),
    /// Send a signal to a command
    Kill(KillArgs),
    /// Copy files into or out of a sandbox
    Cp(CopyArgs),
    /// Delete sandboxes
    #[command(visible_alias = "delete")]
    Rm(RemoveArgs),
    /// Change the settings of a sandbox
    Update(Box<UpdateArgs>),
    /// List the sessions of a sandbox and what they used
    Sessions(PsArgs),
    /// List the ports that a sandbox publishes, or publish one
    Ports(PortsArgs),
    /// Print the address of a port in a sandbox, published for it if need be
    Open(OpenArgs),
    /// Listen here and carry connections to a port in a sandbox, waking it if it sleeps
    Forward(ForwardArgs),
    /// Look after services: commands that are there again after every resume
    #[command(subcommand)]
    Service(ServiceCommand),
    /// Show or change what a sandbox may reach
    Network(Box<NetworkArgs>),
    /// Show what went over a sandbox's network, and what was refused
    Net(NetArgs),
    /// Look after what the guard keeps aside; needs a key that may do everything
    #[command(subcommand)]
    Guard(GuardCommand),
    /// Look after snapshots
    #[command(subcommand)]
    Snapshot(SnapshotCommand),
    /// Look after secrets: values that sandboxes use and nobody sees
    #[command(subcommand)]
    Secret(SecretCommand),
    /// Show, restore or delete what is in the trash: sandboxes that were deleted or expired
    #[command(subcommand)]
    Trash(TrashCommand),
    /// Look after drives: volumes that outlive sandboxes
    #[command(subcommand)]
    Drive(DriveCommand),
    /// Look after images
    #[command(subcommand)]
    Image(ImageCommand),
    /// Look after projects
    #[command(subcommand)]
    Project(ProjectCommand),
    /// Look after API keys
    #[command(subcommand)]
    Key(KeyCommand),
    /// Print what a shell needs so that other vendors' clients come here
    Env(EnvArgs),
    /// Show what takes up the disk
    #[command(visible_alias = "df")]
    Usage,
    /// Prepare this host for machines of their own: the microvm driver
    #[command(subcommand)]
    Microvm(MicrovmCommand),
    /// Explain what this host can and cannot do, and how to fix it
    Doctor(DoctorArgs),
    /// Check the data directory, with the server stopped
    Fsck(FsckArgs),
    /// Print a completion script for a shell
    Completions(CompletionsArgs),
    /// Print the versions of client and server
    Version,
}

#[cfg(test)]
mod tests;
