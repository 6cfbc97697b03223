//! Arguments of the commands about the server and what it owns.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use sandkeep_core::model::{Size, Span};

use super::sandbox::pair;

pub(super) const EVENTS_HELP: &str = "\
Examples:
  keep events                                  what happened in the last hour
  keep events my-app --since 1d                to one sandbox, since yesterday
  keep events --follow --kind command.ended    every command that ends from now on
  keep events --follow --json | jq .kind       for programs: one JSON object per line

Kinds: sandbox.created, sandbox.starting, sandbox.running, sandbox.stopping, sandbox.stopped,
sandbox.paused, sandbox.failed, sandbox.deleted, sandbox.restored, sandbox.updated,
sandbox.rolled_back, session.ended, command.started, command.ended, snapshot.created,
snapshot.deleted, port.published, port.unpublished, guard.found, damage.found, damage.cleared,
events.lost";

pub(super) const SERVE_HELP: &str = "\
Needs root: building the walls around a sandbox (mounts, cgroups, ranges of user ids) is root's work.
Sandboxes go on running when the server ends, and are found again when it starts.

Settings may also stand in a TOML file given by --config; options and variables win over it:

  data = \"/var/lib/sandkeep\"
  listen = \"127.0.0.1:7777\"       # or \"off\"
  unix_socket = \"/run/keep.sock\"  # keep.sock in the data directory if absent, or \"off\"
  log = \"info\"
  host_image = true               # make the image `host` at the first start

  [gateway]                       # the way from outside to ports inside sandboxes
  domain = \"keep.example.com\"     # its subdomains lead there: 3000-my-app.keep.example.com
  public_url = \"https://keep.example.com\"  # where this server is reached from outside
  wait = \"30s\"                    # how long a request waits for a sandbox and its port

  [api]                           # who may reach this server, and with how many connections
  hosts = [\"keep.lan\"]            # names it answers to over loopback, beside localhost
  origins = [\"https://console.example.com\"]  # whose web pages may use the API
  connections = 8192              # never more than half of its open files
  connections_per_address = 2048
  connections_per_key = 2048

  [network]                       # what sandboxes share of the world outside
  except = [\"127.0.0.1:8080\"]     # reachable although always refused; policies still apply
  resolvers = [\"10.0.0.53\"]       # instead of the host's /etc/resolv.conf
  hosts.\"git.internal\" = [\"10.0.0.5\"]  # names that are answered here
  ca = \"/etc/ssl/corp.pem\"        # trusted outward, beside the host's own store

  [defaults]                      # what sandboxes are that do not say
  driver = \"container\"            # or \"microvm\"

  [storage]
  trash_grace = \"1h\"              # how long what was deleted can be restored; its space is free after it, or when needed
  commands_kept = 2000            # how many commands a sandbox keeps on record
  command_logs = \"256MiB\"         # and how much disk space they take, logs included

  [microvm]                       # machines of their own; `keep microvm setup` prepares this host
  enabled = true                  # offered where this host has what they need
  qemu = \"/usr/bin/qemu-system-x86_64\"
  spares = 1                      # hypervisors that wait for the next machine; 20 MB each
  ready = 1                       # machines that wait for the next sandbox; 50 MB each

  [vercel]                        # what Vercel's clients get; of domain and public_url, the gateway's if absent
  default_image = \"host\"          # what their default machine is made of
  max_timeout = \"24h\"             # the longest a session may last
  public_url = \"https://keep.example.com\"  # where they reach this server from outside
  domain = \"keep.example.com\"     # and their subdomains for ports
  runtimes.node24 = \"node:24\"     # which image a runtime stands for
  images.\"vercel/sandbox/node:24\" = \"vercel/node24\"  # and an image
  images.\"team/project/repo\" = \"my-image:1\"";

const SETUP_HELP: &str = "\
Run it on the server's host, as root. It takes the newest kernel in /boot whose name ends in `-cloud-amd64`; if there is
none, the package that `linux-image-cloud-amd64` stands for is downloaded with apt-get and unpacked into a temporary
directory. Nothing is installed, and this host's own kernel stays what it is. What machines need of it is written to
`microvm/kernel` in the data directory; `keep serve` takes it from there when it is started the next time.";

const DRESS_HELP: &str = "\
The user is `ubuntu`, its home /vercel, and commands begin in /vercel/sandbox. A runtime for Vercel's clients is
an image called vercel/RUNTIME:

  keep image pull node:24 && keep image dress vercel/node24 --from node:24
  npm install --prefix /opt/node24 node@24 npm
  keep image dress vercel/node24 --add /opt/node24:/vercel/runtimes/node24 \\
    --path /vercel/runtimes/node24/node_modules/.bin";

/// A directory here, or on the server where that is elsewhere, and where it goes.
fn addition(text: &str) -> Result<(PathBuf, String), String> {
    match text.rsplit_once(':') {
        Some((from, to)) if !from.is_empty() && to.starts_with('/') => {
            let from = std::path::absolute(from).map_err(|error| error.to_string())?;
            Ok((from, to.to_owned()))
        }
        _ => Err("write DIR:PATH, with a PATH that begins with `/`".to_owned()),
    }
}

/// Arguments of `serve`. The data directory is the global option `--data`.
#[derive(Debug, Default, Args)]
pub(crate) struct ServeArgs {
    /// Address for HTTP, or `off` [default: 127.0.0.1:7777]
    #[arg(long, env = "SANDKEEP_LISTEN", value_name = "ADDR:PORT", hide_env_values = true)]
    pub(crate) listen: Option<String>,
    /// Socket file for HTTP, or `off` [default: keep.sock in the data directory]
    #[arg(long, env = "SANDKEEP_UNIX_SOCKET", value_name = "PATH", hide_env_values = true)]
    pub(crate) unix_socket: Option<String>,
    /// File with settings
    #[arg(long, env = "SANDKEEP_CONFIG", value_name = "FILE", hide_env_values = true)]
    pub(crate) config: Option<PathBuf>,
    /// What is logged: error, warn, info, debug, trace, or a filter like `sandkeep_core=debug`
    #[arg(long, env = "SANDKEEP_LOG", value_name = "FILTER", hide_env_values = true)]
    pub(crate) log: Option<String>,
    /// Do not make the image `host` at the start; the first sandbox that wants it does
    #[arg(long)]
    pub(crate) no_host_image: bool,
}

/// What can be done about machines of their own.
#[derive(Debug, Subcommand)]
pub(crate) enum MicrovmCommand {
    /// Prepare the kernel that machines run, from what the distribution has
    #[command(after_help = SETUP_HELP)]
    Setup(SetupArgs),
}

/// Arguments of `microvm setup`. The data directory is the global option `--data`.
#[derive(Debug, Args)]
pub(crate) struct SetupArgs {
    /// A kernel to take instead, as a bzImage
    #[arg(long, value_name = "VMLINUZ", requires = "modules")]
    pub(crate) kernel: Option<PathBuf>,
    /// The directory with its modules, like /lib/modules/6.1.0-13-cloud-amd64
    #[arg(long, value_name = "DIR", requires = "kernel")]
    pub(crate) modules: Option<PathBuf>,
}

/// What can be done with snapshots.
#[derive(Debug, Subcommand)]
pub(crate) enum SnapshotCommand {
    /// List snapshots
    Ls {
        /// Only those of this sandbox
        name: Option<String>,
    },
    /// Show everything about a snapshot
    Show {
        /// The snapshot
        id: String,
    },
    /// Delete snapshots
    Rm {
        /// The snapshots
        #[arg(required = true, value_name = "ID")]
        ids: Vec<String>,
        /// Even if sandboxes stand on them: those that sleep cannot be started until rolled back
        #[arg(short = 'f', long)]
        force: bool,
    },
    /// Write a snapshot as an OCI image in a tar archive
    Export {
        /// The snapshot
        id: String,
        /// Where to; standard output if absent or `-`
        #[arg(short = 'o', long, value_name = "FILE")]
        output: Option<PathBuf>,
    },
}

/// Where in a request a placeholder is replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum PlaceArg {
    /// Headers, as always
    Header,
    /// The query of the URL
    Query,
    /// The body
    Body,
}

/// What can be done with secrets.
#[derive(Debug, Subcommand)]
pub(crate) enum SecretCommand {
    /// Set a secret to what comes by standard input, or is typed unseen
    Set {
        /// Its name: letters, digits and `_`
        name: String,
        /// A host that may have it when it is brokered, like `api.example.com` or `*.example.com`; may be
        /// repeated, and replaces all there were
        #[arg(long = "host", value_name = "HOST")]
        hosts: Vec<String>,
        /// Replace its placeholder in the query or the body of requests too, and not in headers alone; may be
        /// repeated, and replaces all there were. What is in a body can be read back where the host shows it
        #[arg(long = "in", value_name = "PLACE")]
        places: Vec<PlaceArg>,
        /// A tag that sandboxes must have to use it; may be repeated, and replaces all there were
        #[arg(long = "tag", value_name = "KEY=VALUE", value_parser = pair)]
        tags: Vec<(String, String)>,
        /// Keep the newline at the end, if there is one
        #[arg(long)]
        keep_newline: bool,
    },
    /// List secrets; values are not told
    Ls,
    /// Show everything about a secret but its value
    #[command(visible_alias = "get")]
    Show {
        /// The secret
        name: String,
    },
    /// Delete secrets
    Rm {
        /// The secrets
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
}

/// Which events to show.
#[derive(Debug, Args)]
pub(crate) struct EventsArgs {
    /// Go on with what happens, until interrupted; survives a restart of the server
    #[arg(long, short)]
    pub(crate) follow: bool,
    /// Since when: how long ago, like 10m, or a time, like 2026-01-31T12:00:00Z [default: 1h ago, or now with --follow]
    #[arg(long, value_name = "TIME")]
    pub(crate) since: Option<String>,
    /// After the event with this id, which `--json` shows
    #[arg(long, value_name = "ID", conflicts_with = "since")]
    pub(crate) after: Option<String>,
    /// Only of this sandbox
    #[arg(value_name = "SANDBOX")]
    pub(crate) sandbox: Option<String>,
    /// Only of sandboxes with this tag; may be repeated, and all must match
    #[arg(long = "tag", value_name = "KEY=VALUE")]
    pub(crate) tags: Vec<String>,
    /// Only of this kind (`command.ended`) or group of kinds (`command`); may be repeated
    #[arg(long = "kind", value_name = "KIND")]
    pub(crate) kinds: Vec<String>,
    /// Of all projects; needs a key that may do everything
    #[arg(long)]
    pub(crate) all_projects: bool,
}

#[derive(Debug, Clone, Subcommand)]
pub(crate) enum TrashCommand {
    /// List the sandboxes in the trash
    Ls,
    /// Bring a sandbox back, with the snapshots it had
    Restore {
        /// Its id or its name; of several of one name, the one that was deleted last
        sandbox: String,
        /// What it is to be called [default: what it was called]
        #[arg(long)]
        name: Option<String>,
    },
    /// Delete everything of the project in the trash, for good
    Empty,
}

/// What can be done with drives.
#[derive(Debug, Subcommand)]
pub(crate) enum DriveCommand {
    /// Make a drive; `keep create --mount DRIVE:/PATH` mounts it
    Create {
        /// Its name
        name: String,
        /// What it may hold, like 10G [default: 1T]
        #[arg(long, value_name = "SIZE")]
        max_size: Option<Size>,
        /// Return the drive if it exists already
        #[arg(long)]
        get: bool,
    },
    /// List drives
    Ls {
        /// Only those whose names begin with this
        prefix: Option<String>,
    },
    /// Show everything about a drive
    #[command(visible_alias = "get")]
    Show {
        /// The drive
        name: String,
    },
    /// Make a new drive that holds what another one held when it was last detached
    Fork {
        /// The source
        source: String,
        /// The new drive's name
        name: String,
    },
    /// Delete drives, with all that is in them
    Rm {
        /// The drives
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
}

/// What can be done with images.
#[derive(Debug, Subcommand)]
pub(crate) enum ImageCommand {
    /// List images
    Ls,
    /// Fetch an image from a registry
    Pull {
        /// What to fetch, like `debian:12` or `ghcr.io/org/name@sha256:...`
        reference: String,
        /// Show no progress
        #[arg(short = 'q', long)]
        quiet: bool,
    },
    /// Make an image from a root tarball, an OCI layout or a docker archive, packed or not
    Import {
        /// What to call it
        name: String,
        /// The archive; `-` is standard input
        file: PathBuf,
        /// Show no progress
        #[arg(short = 'q', long)]
        quiet: bool,
    },
    /// Make an image of another, with a default user, a home and `sudo`, as some clients expect it
    #[command(after_help = DRESS_HELP)]
    Dress {
        /// What to call it
        name: String,
        /// The image it is made of
        #[arg(long, value_name = "IMAGE", default_value = "host")]
        from: String,
        /// Put a directory of the server into it
        #[arg(long, value_name = "DIR:PATH", value_parser = addition)]
        add: Vec<(PathBuf, String)>,
        /// Set a variable for all commands
        #[arg(short = 'e', long = "env", value_name = "NAME=VALUE", value_parser = super::sandbox::pair)]
        env: Vec<(String, String)>,
        /// Put a directory in front of PATH
        #[arg(long, value_name = "DIR")]
        path: Vec<String>,
    },
    /// Delete images; sandboxes that stand on them keep what they need
    Rm {
        /// The images
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
    /// Show everything about an image
    #[command(visible_alias = "show")]
    Inspect {
        /// The image
        name: String,
    },
}

/// What can be done with projects.
#[derive(Debug, Subcommand)]
pub(crate) enum ProjectCommand {
    /// List projects
    Ls,
    /// Make a project
    Create {
        /// Its name
        name: String,
    },
    /// Show or set what its sandboxes may reach
    Network(ProjectNetworkArgs),
    /// Delete a project that has no sandboxes and no drives
    Rm {
        /// Its name
        name: String,
    },
}

/// Arguments of `project network`.
#[derive(Debug, Args)]
pub(crate) struct ProjectNetworkArgs {
    /// The project
    pub(crate) name: String,
    /// What holds for sandboxes that have no policy of their own: allow-all or deny-all
    #[arg(long, value_name = "MODE", value_enum)]
    pub(crate) default: Option<super::ModeArg>,
    /// The same, as a policy in JSON; `-` is standard input
    #[arg(long, value_name = "FILE", conflicts_with = "default")]
    pub(crate) default_file: Option<PathBuf>,
    /// What no sandbox of the project gets beyond, as a policy in JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) bound_file: Option<PathBuf>,
    /// Take the bound away
    #[arg(long, conflicts_with = "bound_file")]
    pub(crate) no_bound: bool,
}

/// What can be done with keys.
#[derive(Debug, Subcommand)]
pub(crate) enum KeyCommand {
    /// Make a key and print its secret, which is shown only this once
    Create {
        /// What to call it
        label: String,
        /// What it may do
        #[arg(long, value_enum, default_value_t = ScopeArg::Write)]
        scope: ScopeArg,
        /// How long it works; for good if absent
        #[arg(long, value_name = "SPAN")]
        expires: Option<Span>,
    },
    /// List keys
    Ls,
    /// Make a key stop working, at once and for good
    Revoke {
        /// Ids of keys
        #[arg(required = true, value_name = "ID")]
        ids: Vec<String>,
    },
}

/// What a key may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ScopeArg {
    /// Look, never wake or change
    Read,
    /// Everything in the project but keys
    Write,
    /// Everything in every project
    Admin,
}

/// Arguments of `doctor`. The data directory is the global option `--data`.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Exit with 1 if something needed is missing
    #[arg(long)]
    pub(crate) strict: bool,
}

/// Arguments of `fsck`. The data directory is the global option `--data`.
#[derive(Debug, Args)]
pub(crate) struct FsckArgs {
    /// Recreate the database from what is on disk
    #[arg(long)]
    pub(crate) rebuild: bool,
    /// Read every file of every layer and compare it with what was sealed
    #[arg(long)]
    pub(crate) verify: bool,
    /// With --verify: take layers that were never read before as they are now
    #[arg(long, requires = "verify")]
    pub(crate) record: bool,
    /// Bring missing layers back from the trash and the quarantine, and move leftovers to the quarantine; nothing is deleted
    #[arg(long)]
    pub(crate) repair: bool,
    /// Move this damaged file or directory to the quarantine, and give up what it described
    #[arg(long, value_name = "PATH")]
    pub(crate) give_up: Vec<PathBuf>,
    /// Take this layer as it is now, although it is not what was sealed
    #[arg(long, value_name = "LAYER")]
    pub(crate) accept_layer: Vec<String>,
    /// Replace the damaged or missing manifest of this project: without keys, and with a network that denies everything
    #[arg(long, value_name = "PROJECT")]
    pub(crate) reset_project: Vec<String>,
}

/// Arguments of `completions`.
#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub(crate) shell: clap_complete::Shell,
}

/// `keep env`.
#[derive(Debug, Args)]
#[command(after_long_help = ENV_HELP)]
pub(crate) struct EnvArgs {
    /// Whose clients
    #[arg(value_enum)]
    pub(crate) clients: ClientsArg,
    /// How long the token in it works
    #[arg(long, value_name = "SPAN", default_value = "90d")]
    pub(crate) expires: String,
}

const ENV_HELP: &str = "\
Examples:
  eval \"$(keep env vercel)\"
  sandbox create --name my-app     # Vercel's own CLI, now on this server

The token speaks for the key that made it and ends with it. The files that point Node and Python
programs here are written to the user's data directory (~/.local/share/sandkeep).";

/// Vendors whose clients are served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ClientsArg {
    /// Vercel Sandbox: @vercel/sandbox, the CLI `sandbox`, and vercel-sandbox for Python
    Vercel,
}
