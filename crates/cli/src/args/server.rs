//! Arguments of the commands about the server and its data directory.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use sandkeep_client::types::Span;

use crate::logging::LogFormat;

/// The text of the settings, too: `reference` makes the settings file of it.
pub(crate) const SERVE_HELP: &str = "\
Needs root, for mounts, cgroups and user id ranges. Sandboxes keep running when the server stops; \
it finds them again when it starts.

Settings can also be in a TOML file given by --config. Options and environment variables take \
precedence:

  data = \"/var/lib/sandkeep\"       # data directory
  listen = \"127.0.0.1:7777\"       # HTTP address, or \"off\"
  unix_socket = \"/var/lib/sandkeep/keep.sock\"  # HTTP socket file, in the data directory; or \"off\"
  log = \"info\"                    # error, warn, info, debug, trace, or a filter
  log_format = \"text\"             # or \"json\": one object per line
  host_image = true               # build the image `host` at the first start

  [gateway]                       # published ports of sandboxes
  domain = \"keep.example.com\"     # none by default; ports are 3000-my-app.keep.example.com
  public_url = \"https://keep.example.com\"  # none by default; URL of this server from outside
  wait = \"30s\"                    # longest wait of a request for a sandbox and its port

  [api]                           # access to this server
  hosts = [\"keep.lan\"]            # none by default; host names accepted over loopback, besides localhost
  origins = [\"https://console.example.com\"]  # none by default; origins of web pages that may use the API
  connections = 8192              # at most half of the open file limit
  connections_per_address = 2048  # connections from one address
  connections_per_key = 2048      # connections with one API key

  [tls]                           # HTTPS instead of HTTP; new files are loaded without a restart
  certificate = \"/var/lib/sandkeep/tls/server.pem\"  # none by default; `keep tls init` makes one
  key = \"/var/lib/sandkeep/tls/server.key\"  # none by default; its private key

  [network]                       # network of all sandboxes
  except = [\"127.0.0.1:8080\"]     # none by default; exempt from what is always denied; policies apply
  resolvers = [\"10.0.0.53\"]       # none by default; instead of the host's /etc/resolv.conf
  hosts.\"git.internal\" = [\"10.0.0.5\"]  # none by default; fixed DNS answers
  ca = \"/etc/ssl/corp.pem\"        # none by default; additional CA certificates for outgoing TLS

  [defaults]                      # defaults of new sandboxes
  driver = \"container\"            # or \"microvm\"

  [storage]                       # what is kept, and for how long
  trash_grace = \"1h\"              # how long deleted sandboxes can be restored
  commands_kept = 2000            # records of commands per sandbox
  command_logs = \"256MiB\"         # their disk space per sandbox, including logs
  record_changes = true           # record what each command and session changes
  audit_log = \"256MiB\"            # disk space of the audit log, per project

  [secrets]                       # secrets of projects
  key_file = \"/etc/sandkeep/key\"  # none by default; key that encrypts secrets, instead of one in the data directory

  [microvm]                       # microVMs; `keep microvm setup` prepares this host
  enabled = true                  # used if this host meets the requirements
  qemu = \"/usr/bin/qemu-system-x86_64\"  # the hypervisor
  warm_hypervisors = 1            # warm pool: hypervisors started in advance, 20 MB each
  warm_vms = 1                    # warm pool: VMs booted in advance, 50 MB each

  [vercel]                        # API of Vercel Sandbox
  default_image = \"host\"          # image of the default machine
  max_timeout = \"24h\"             # longest session
  public_url = \"https://keep.example.com\"  # none by default; URL for these clients, instead of the gateway's
  domain = \"keep.example.com\"     # none by default; domain of ports, instead of the gateway's
  runtimes.node24 = \"node:24\"     # none by default; image of a runtime
  images.\"vercel/sandbox/node:24\" = \"vercel/node24\"  # none by default; image for an image name
  images.\"team/project/repo\" = \"my-image:1\"  # none by default; the same, for an image of your own\n\n\
A setting that is `none by default` is shown with an example. `keep config` prints all of this as a file to edit, \
`keep config check` checks one.";

const SETUP_HELP: &str = "\
Run it on the server's host, as root. It uses the newest kernel in /boot whose name ends in \
`-cloud-amd64`. If there is none, it downloads the package of `linux-image-cloud-amd64` with \
apt-get and unpacks it into a temporary directory. Nothing is installed, and the host's kernel does \
not change. The result is `microvm/kernel` in the data directory. A server that runs uses it at once.";

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
    /// Format of the log [default: text]
    #[arg(long, env = "SANDKEEP_LOG_FORMAT", value_name = "FORMAT", hide_env_values = true)]
    pub(crate) log_format: Option<LogFormat>,
    /// Build the image `host` when a sandbox first uses it, not at the start
    #[arg(long)]
    pub(crate) no_host_image: bool,
}

const CONFIG_HELP: &str = "\
Examples:
  keep config > /etc/sandkeep/config.toml     all settings, commented out, with their defaults
  keep config check                           check /etc/sandkeep/config.toml
  keep config check my.toml                   check another file";

/// Arguments of `config`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, after_help = CONFIG_HELP)]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    pub(crate) command: Option<ConfigCommand>,
}

/// Subcommands of `config`.
#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Check a settings file, without a server
    Check {
        /// The file [default: /etc/sandkeep/config.toml]
        file: Option<PathBuf>,
    },
}

/// Arguments of `man`.
#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// Directory to write the pages to; made if absent
    pub(crate) dir: PathBuf,
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

pub(super) const COMPLETIONS_HELP: &str = "\
The scripts complete commands and options, and ask the server for the names of sandboxes, snapshots \
and commands. Without a server they complete the rest.

  bash   keep completions bash > /etc/bash_completion.d/keep
  zsh    keep completions zsh > \"${fpath[1]}/_keep\"
  fish   keep completions fish > ~/.config/fish/completions/keep.fish";

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
