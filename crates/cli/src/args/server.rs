//! Arguments of the commands about the server, its images, projects, keys and data directory.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use sandkeep_client::types::{Size, Span};

use super::sandbox::pair;

pub(super) const EVENTS_HELP: &str = "\
Examples:
  keep events                                  events of the last hour
  keep events my-app --since 1d                events of one sandbox, since yesterday
  keep events --follow --kind command.ended    commands that end from now on
  keep events --follow --json | jq .kind       one JSON object per line, for programs

Kinds: sandbox.created, sandbox.starting, sandbox.running, sandbox.stopping, sandbox.stopped,
sandbox.paused, sandbox.failed, sandbox.deleted, sandbox.restored, sandbox.updated,
sandbox.rolled_back, sandbox.promoted, sandbox.merged, sandbox.renamed, session.ended,
command.started, command.ended, snapshot.created, snapshot.deleted, port.published,
port.unpublished, guard.found, damage.found, damage.cleared, events.lost";

pub(super) const SERVE_HELP: &str = "\
Needs root, for mounts, cgroups and user id ranges. Sandboxes keep running when the server stops; \
it finds them again when it starts.

Settings can also be in a TOML file given by --config. Options and environment variables take \
precedence:

  data = \"/var/lib/sandkeep\"
  listen = \"127.0.0.1:7777\"       # or \"off\"
  unix_socket = \"/run/keep.sock\"  # default: keep.sock in the data directory; or \"off\"
  log = \"info\"
  host_image = true               # build the image `host` at the first start

  [gateway]                       # published ports of sandboxes
  domain = \"keep.example.com\"     # ports are 3000-my-app.keep.example.com
  public_url = \"https://keep.example.com\"  # URL of this server from outside
  wait = \"30s\"                    # longest wait of a request for a sandbox and its port

  [api]                           # access to this server
  hosts = [\"keep.lan\"]            # host names accepted over loopback, besides localhost
  origins = [\"https://console.example.com\"]  # origins of web pages that may use the API
  connections = 8192              # at most half of the open file limit
  connections_per_address = 2048
  connections_per_key = 2048

  [network]                       # network of all sandboxes
  except = [\"127.0.0.1:8080\"]     # exempt from what is always denied; policies apply
  resolvers = [\"10.0.0.53\"]       # instead of the host's /etc/resolv.conf
  hosts.\"git.internal\" = [\"10.0.0.5\"]  # fixed DNS answers
  ca = \"/etc/ssl/corp.pem\"        # additional CA certificates for outgoing TLS

  [defaults]                      # defaults of new sandboxes
  driver = \"container\"            # or \"microvm\"

  [storage]
  trash_grace = \"1h\"              # how long deleted sandboxes can be restored
  commands_kept = 2000            # records of commands per sandbox
  command_logs = \"256MiB\"         # their disk space per sandbox, including logs
  record_changes = true           # record what each command and session changes
  audit_log = \"256MiB\"            # disk space of the audit log, per project

  [secrets]
  key_file = \"/etc/sandkeep/key\"  # key that encrypts secrets

  [microvm]                       # microVMs; `keep microvm setup` prepares this host
  enabled = true                  # used if this host meets the requirements
  qemu = \"/usr/bin/qemu-system-x86_64\"
  warm_hypervisors = 1            # warm pool: hypervisors started in advance, 20 MB each
  warm_vms = 1                    # warm pool: VMs booted in advance, 50 MB each

  [vercel]                        # API of Vercel Sandbox
  default_image = \"host\"          # image of the default machine
  max_timeout = \"24h\"             # longest session
  public_url = \"https://keep.example.com\"  # URL for these clients [default: the gateway's]
  domain = \"keep.example.com\"     # domain of ports [default: the gateway's]
  runtimes.node24 = \"node:24\"     # image of a runtime
  images.\"vercel/sandbox/node:24\" = \"vercel/node24\"  # image for an image name
  images.\"team/project/repo\" = \"my-image:1\"";

const SETUP_HELP: &str = "\
Run it on the server's host, as root. It uses the newest kernel in /boot whose name ends in \
`-cloud-amd64`. If there is none, it downloads the package of `linux-image-cloud-amd64` with \
apt-get and unpacks it into a temporary directory. Nothing is installed, and the host's kernel does \
not change. The result is `microvm/kernel` in the data directory; `keep serve` uses it from its \
next start.";

const CUSTOMIZE_HELP: &str = "\
The user is `ubuntu` with home /vercel, and commands start in /vercel/sandbox. A runtime for \
Vercel's clients is an image named vercel/RUNTIME:

  keep image pull node:24 && keep image customize vercel/node24 --from node:24
  npm install --prefix /opt/node24 node@24 npm
  keep image customize vercel/node24 --add /opt/node24:/vercel/runtimes/node24 \\
    --path /vercel/runtimes/node24/node_modules/.bin";

/// A directory of the server, and its path in the image.
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
    /// HTTP address, or `off` [default: 127.0.0.1:7777]
    #[arg(long, env = "SANDKEEP_LISTEN", value_name = "ADDR:PORT", hide_env_values = true)]
    pub(crate) listen: Option<String>,
    /// HTTP socket file, or `off` [default: keep.sock in the data directory]
    #[arg(long, env = "SANDKEEP_UNIX_SOCKET", value_name = "PATH", hide_env_values = true)]
    pub(crate) unix_socket: Option<String>,
    /// Settings file in TOML
    #[arg(long, env = "SANDKEEP_CONFIG", value_name = "FILE", hide_env_values = true)]
    pub(crate) config: Option<PathBuf>,
    /// Log level (error, warn, info, debug, trace) or a filter like `sandkeep_core=debug` [default: info]
    #[arg(long, env = "SANDKEEP_LOG", value_name = "FILTER", hide_env_values = true)]
    pub(crate) log: Option<String>,
    /// Build the image `host` when a sandbox first uses it, not at the start
    #[arg(long)]
    pub(crate) no_host_image: bool,
}

/// Subcommands of `microvm`.
#[derive(Debug, Subcommand)]
pub(crate) enum MicrovmCommand {
    /// Prepare the guest kernel, from the distribution's packages
    #[command(after_help = SETUP_HELP)]
    Setup(SetupArgs),
}

/// Arguments of `microvm setup`. The data directory is the global option `--data`.
#[derive(Debug, Args)]
pub(crate) struct SetupArgs {
    /// Kernel to use instead, as a bzImage
    #[arg(long, value_name = "VMLINUZ", requires = "modules")]
    pub(crate) kernel: Option<PathBuf>,
    /// Directory of its modules, like /lib/modules/6.1.0-13-cloud-amd64
    #[arg(long, value_name = "DIR", requires = "kernel")]
    pub(crate) modules: Option<PathBuf>,
}

/// Subcommands of `snapshot`.
#[derive(Debug, Subcommand)]
pub(crate) enum SnapshotCommand {
    /// List snapshots
    Ls {
        /// Show only snapshots of this sandbox
        name: Option<String>,
    },
    /// Show details of a snapshot
    Show {
        /// The snapshot
        id: String,
    },
    /// Delete snapshots
    Rm {
        /// The snapshots
        #[arg(required = true, value_name = "ID")]
        ids: Vec<String>,
        /// Delete even if sandboxes use them: stopped ones cannot start until rolled back
        #[arg(short = 'f', long)]
        force: bool,
    },
    /// Export a snapshot as an OCI image in a tar archive
    Export {
        /// The snapshot
        id: String,
        /// Output file; `-` is standard output [default: -]
        #[arg(short = 'o', long, value_name = "FILE")]
        output: Option<PathBuf>,
    },
}

/// The part of a request in which a placeholder is replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum PlaceArg {
    /// Headers (always replaced)
    Header,
    /// The query of the URL
    Query,
    /// The body
    Body,
}

/// Subcommands of `secret`.
#[derive(Debug, Subcommand)]
pub(crate) enum SecretCommand {
    /// Set a secret, from standard input or a prompt
    Set {
        /// Name: letters, digits and `_`
        name: String,
        /// Host that may receive it from sandboxes, like `api.example.com` or `*.example.com`; replaces the
        /// list (repeatable)
        #[arg(long = "host", value_name = "HOST")]
        hosts: Vec<String>,
        /// Part of a request, besides headers, in which the placeholder is replaced; replaces the list
        /// (repeatable). A host that echoes requests reveals a value in a query or body to the sandbox
        #[arg(long = "in", value_name = "PLACE")]
        places: Vec<PlaceArg>,
        /// Tag that sandboxes must have to use it; replaces the list (repeatable)
        #[arg(long = "tag", value_name = "KEY=VALUE", value_parser = pair)]
        tags: Vec<(String, String)>,
        /// Keep a newline at the end of the value
        #[arg(long)]
        keep_newline: bool,
    },
    /// List secrets, without values
    Ls,
    /// Show details of a secret, without its value
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

/// Arguments of `events`.
#[derive(Debug, Args)]
pub(crate) struct EventsArgs {
    /// Keep printing new events until interrupted, also across restarts of the server
    #[arg(long, short)]
    pub(crate) follow: bool,
    /// Start time: how long ago, like 10m, or a time, like 2026-01-31T12:00:00Z [default: 1h ago, or now with --follow]
    #[arg(long, value_name = "TIME")]
    pub(crate) since: Option<String>,
    /// Start after the event with this id (shown by `--json`)
    #[arg(long, value_name = "ID", conflicts_with = "since")]
    pub(crate) after: Option<String>,
    /// Show only this sandbox
    #[arg(value_name = "SANDBOX")]
    pub(crate) sandbox: Option<String>,
    /// Show only sandboxes with this tag (repeatable; all must match)
    #[arg(long = "tag", value_name = "KEY=VALUE")]
    pub(crate) tags: Vec<String>,
    /// Show only this kind (`command.ended`) or group of kinds (`command`) (repeatable)
    #[arg(long = "kind", value_name = "KIND")]
    pub(crate) kinds: Vec<String>,
    /// Show all projects; needs an admin key
    #[arg(long)]
    pub(crate) all_projects: bool,
}

/// Options of `audit`.
#[derive(Debug, Clone, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct AuditArgs {
    #[command(subcommand)]
    pub(crate) command: Option<AuditCommand>,
    #[command(flatten)]
    pub(crate) filter: AuditFilterArgs,
}

/// Subcommands of `audit`.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum AuditCommand {
    /// Check that no entry was removed, changed or reordered
    ///
    /// Asks the server. With --offline, reads the data directory itself; no server is needed, and one may be running.
    Verify {
        /// Check the host's log; needs an admin key
        #[arg(long)]
        host: bool,
        /// Check that entry SEQ is still the one with this hash (or a hash that begins so), as noted earlier
        #[arg(long, value_name = "SEQ:HASH")]
        expect: Option<String>,
        /// Read the data directory (--data or SANDKEEP_DATA): all projects, or the one of --project, or --host
        #[arg(long)]
        offline: bool,
    },
}

/// Which entries `audit` shows.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct AuditFilterArgs {
    /// Keep printing new entries until interrupted, also across restarts of the server
    #[arg(long, short)]
    pub(crate) follow: bool,
    /// Start time: how long ago, like 10m, or a time, like 2026-01-31T12:00:00Z [default: 24h ago, or now with --follow]
    #[arg(long, value_name = "TIME")]
    pub(crate) since: Option<String>,
    /// End time
    #[arg(long, value_name = "TIME")]
    pub(crate) until: Option<String>,
    /// Show only what this key (id or label) did, or `system`, `agent` or `anonymous`
    #[arg(long, value_name = "ACTOR")]
    pub(crate) actor: Option<String>,
    /// Show only what was done to this: `sandbox/my-app`, or all of a kind: `secret`
    #[arg(long, value_name = "TARGET")]
    pub(crate) target: Option<String>,
    /// Show only this action (`sandbox.create`) or group of actions (`sandbox`)
    #[arg(long, value_name = "ACTION")]
    pub(crate) action: Option<String>,
    /// Show the host's log: projects, keys, images, callers without a key; needs an admin key
    #[arg(long)]
    pub(crate) host: bool,
}

/// Subcommands of `webhook`.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum WebhookCommand {
    /// Send events to an address, from now on
    Add {
        /// Where to send them: https://… or http://…
        url: String,
        /// Kinds (`sandbox.stopped`), groups (`sandbox.*`) or `*` (repeatable, or separated by commas)
        #[arg(long, value_name = "KINDS", value_delimiter = ',', required = true)]
        events: Vec<String>,
        /// Read the secret that deliveries are signed with from standard input; otherwise one is made and shown once
        #[arg(long)]
        secret_stdin: bool,
        /// Allow private, loopback and link-local addresses; needs an admin key
        #[arg(long)]
        allow_private: bool,
    },
    /// List webhooks
    Ls,
    /// Show a webhook and its last deliveries
    #[command(visible_alias = "get")]
    Show {
        /// The webhook's id
        #[arg(value_name = "WEBHOOK")]
        id: String,
    },
    /// Send a test event, once
    Test {
        /// The webhook's id
        #[arg(value_name = "WEBHOOK")]
        id: String,
    },
    /// Change the address or the events
    Set {
        /// The webhook's id
        #[arg(value_name = "WEBHOOK")]
        id: String,
        /// Where to send events
        #[arg(long)]
        url: Option<String>,
        /// Kinds, groups or `*`; replaces the list (repeatable, or separated by commas)
        #[arg(long, value_name = "KINDS", value_delimiter = ',')]
        events: Vec<String>,
        /// Whether private, loopback and link-local addresses are allowed; `true` needs an admin key
        #[arg(long, value_name = "BOOL")]
        allow_private: Option<bool>,
    },
    /// Replace the secret; deliveries are signed with both until the next rotation
    Rotate {
        /// The webhook's id
        #[arg(value_name = "WEBHOOK")]
        id: String,
        /// Read the secret from standard input; otherwise one is made and shown once
        #[arg(long)]
        secret_stdin: bool,
        /// Forget the former secret at once
        #[arg(long)]
        only: bool,
    },
    /// Stop sending events
    Disable {
        /// The webhook's id
        #[arg(value_name = "WEBHOOK")]
        id: String,
    },
    /// Send events again, from where it stopped
    Enable {
        /// The webhook's id
        #[arg(value_name = "WEBHOOK")]
        id: String,
    },
    /// Delete webhooks
    Rm {
        /// Ids of the webhooks
        #[arg(required = true, value_name = "WEBHOOK")]
        ids: Vec<String>,
    },
}

/// Subcommands of `trash`.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum TrashCommand {
    /// List the sandboxes in the trash
    Ls,
    /// Restore a sandbox with its snapshots
    Restore {
        /// Id or name; if several have the name, the one deleted last
        sandbox: String,
        /// Name of the restored sandbox [default: its old name]
        #[arg(long)]
        name: Option<String>,
    },
    /// Permanently delete everything of the project that is in the trash
    Empty,
}

/// Subcommands of `drive`.
#[derive(Debug, Subcommand)]
pub(crate) enum DriveCommand {
    /// Create a drive; mount it with `keep create --mount DRIVE:/PATH`
    Create {
        /// The name
        name: String,
        /// Maximum size, like 10G [default: 1T]
        #[arg(long, value_name = "SIZE")]
        max_size: Option<Size>,
        /// Return the drive if it exists
        #[arg(long)]
        get: bool,
    },
    /// List drives
    Ls {
        /// Show only names with this prefix
        prefix: Option<String>,
    },
    /// Show details of a drive
    #[command(visible_alias = "get")]
    Show {
        /// The drive
        name: String,
    },
    /// Copy a drive, as of when it was last detached
    Fork {
        /// The drive to copy
        source: String,
        /// Name of the new drive
        name: String,
    },
    /// Delete drives and their contents
    Rm {
        /// The drives
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
}

/// Subcommands of `image`.
#[derive(Debug, Subcommand)]
pub(crate) enum ImageCommand {
    /// List images
    Ls,
    /// Pull an image from a registry
    Pull {
        /// Reference, like `debian:12` or `ghcr.io/org/name@sha256:...`
        reference: String,
        /// Do not show progress
        #[arg(short = 'q', long)]
        quiet: bool,
    },
    /// Import an image from a root tarball, an OCI layout or a docker archive
    Import {
        /// Name of the image
        name: String,
        /// Archive, compressed or not; `-` is standard input
        file: PathBuf,
        /// Do not show progress
        #[arg(short = 'q', long)]
        quiet: bool,
    },
    /// Customize an image for clients of other vendors: default user, home, `sudo`
    #[command(alias = "dress", after_help = CUSTOMIZE_HELP)]
    Customize {
        /// Name of the image
        name: String,
        /// Image to start from
        #[arg(long, value_name = "IMAGE", default_value = "host")]
        from: String,
        /// Add a directory of the server (repeatable)
        #[arg(long, value_name = "DIR:PATH", value_parser = addition)]
        add: Vec<(PathBuf, String)>,
        /// Environment variable of all commands (repeatable)
        #[arg(short = 'e', long = "env", value_name = "NAME=VALUE", value_parser = super::sandbox::pair)]
        env: Vec<(String, String)>,
        /// Prepend a directory to PATH (repeatable)
        #[arg(long, value_name = "DIR")]
        path: Vec<String>,
    },
    /// Delete images; sandboxes that use them keep working
    Rm {
        /// The images
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
    /// Show details of an image
    #[command(visible_alias = "show")]
    Inspect {
        /// The image
        name: String,
    },
}

/// Subcommands of `project`.
#[derive(Debug, Subcommand)]
pub(crate) enum ProjectCommand {
    /// List projects
    Ls,
    /// Create a project
    Create {
        /// The name
        name: String,
    },
    /// Show or set the network policy of a project
    Network(ProjectNetworkArgs),
    /// Show or set what a project allows its runs
    Governance(super::ProjectRunsArgs),
    /// Delete a project that has no sandboxes and no drives
    Rm {
        /// The name
        name: String,
    },
}

/// Arguments of `project network`.
#[derive(Debug, Args)]
pub(crate) struct ProjectNetworkArgs {
    /// The project
    pub(crate) name: String,
    /// Default policy of its sandboxes; use --default-file for any other policy
    #[arg(long, value_name = "MODE", value_enum)]
    pub(crate) default: Option<super::DefaultModeArg>,
    /// Default policy of its sandboxes, as a JSON file; `-` is standard input
    #[arg(long, value_name = "FILE", conflicts_with = "default")]
    pub(crate) default_file: Option<PathBuf>,
    /// Upper bound for all policies of its sandboxes, as a JSON file
    #[arg(long, value_name = "FILE")]
    pub(crate) bound_file: Option<PathBuf>,
    /// Remove the upper bound
    #[arg(long, conflicts_with = "bound_file")]
    pub(crate) no_bound: bool,
}

/// Subcommands of `key`.
#[derive(Debug, Subcommand)]
pub(crate) enum KeyCommand {
    /// Create a key and print it; it is not shown again
    Create {
        /// Label that `keep key ls` shows
        label: String,
        /// Permissions
        #[arg(long, value_enum, default_value_t = ScopeArg::Write)]
        scope: ScopeArg,
        /// Let it approve, and accept runs; an admin key may anyway
        #[arg(long)]
        approve: bool,
        /// Lifetime, like 30d [default: unlimited]
        #[arg(long, value_name = "SPAN")]
        expires: Option<Span>,
    },
    /// List keys
    Ls,
    /// Revoke keys permanently
    Revoke {
        /// Ids from `keep key ls`
        #[arg(required = true, value_name = "ID")]
        ids: Vec<String>,
    },
}

/// The permissions of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ScopeArg {
    /// Read only: never starts or changes a sandbox
    Read,
    /// Everything in the project except keys
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
    /// Rebuild the database from the manifests
    #[arg(long)]
    pub(crate) rebuild: bool,
    /// Read every file of every layer and compare its digest
    #[arg(long)]
    pub(crate) verify: bool,
    /// With --verify: record digests of layers that have none
    #[arg(long, requires = "verify")]
    pub(crate) record: bool,
    /// Restore missing layers from trash and quarantine, and move leftovers to the quarantine; deletes nothing
    #[arg(long)]
    pub(crate) repair: bool,
    /// Move a damaged manifest or directory to the quarantine and give up its object (repeatable)
    #[arg(long, value_name = "PATH")]
    pub(crate) give_up: Vec<PathBuf>,
    /// Accept the current contents of a layer although its digest differs (repeatable)
    #[arg(long, value_name = "LAYER")]
    pub(crate) accept_layer: Vec<String>,
    /// Replace the damaged or missing manifest of a project: without keys, network deny-all (repeatable)
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
    /// Vendor
    #[arg(value_enum)]
    pub(crate) clients: ClientsArg,
    /// Lifetime of the token
    #[arg(long, value_name = "SPAN", default_value = "90d")]
    pub(crate) expires: Span,
}

const ENV_HELP: &str = "\
Examples:
  eval \"$(keep env vercel)\"
  sandbox create --name my-app     # Vercel's own CLI, now on this server

The token has the permissions of the key that created it, and is revoked with it. The files that \
redirect Node and Python programs are written to the user's data directory \
(~/.local/share/sandkeep).";

/// Supported vendors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ClientsArg {
    /// Vercel Sandbox: @vercel/sandbox, the CLI `sandbox`, and vercel-sandbox for Python
    Vercel,
}
