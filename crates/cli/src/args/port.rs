//! Arguments of the commands about ports and services.

use std::net::IpAddr;

use clap::{Args, Subcommand, ValueEnum};
use sandkeep_client::types::{Access, Port, Span};

use super::sandbox::variable;

/// Arguments of `ports`.
#[derive(Debug, Args)]
pub(crate) struct PortsArgs {
    /// The sandbox
    pub(crate) name: String,
    /// Port to publish, or to change
    #[arg(requires = "access", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) port: Option<u16>,
    /// Who can reach the port
    #[arg(value_enum)]
    pub(crate) access: Option<AccessArg>,
    /// Do not let requests to this port wake the sandbox
    #[arg(long, requires = "access")]
    pub(crate) no_wake: bool,
}

/// Who can reach a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum AccessArg {
    /// Everybody who knows the URL
    Public,
    /// Requests with a key of the project or a token for the port
    Private,
    /// Nobody: stop publishing
    Off,
}

/// Arguments of `open`.
#[derive(Debug, Args)]
pub(crate) struct OpenArgs {
    /// The sandbox
    pub(crate) name: String,
    /// The port
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) port: u16,
    /// Publish it for everybody who knows the URL
    #[arg(long)]
    pub(crate) public: bool,
    /// Print the URL and open no browser
    #[arg(long)]
    pub(crate) print: bool,
    /// Lifetime of the token in the URL [default: 12h]
    #[arg(long, value_name = "SPAN", conflicts_with = "public")]
    pub(crate) expires: Option<Span>,
}

/// Arguments of `forward`.
#[derive(Debug, Args)]
pub(crate) struct ForwardArgs {
    /// The sandbox
    pub(crate) name: String,
    /// The port in the sandbox, published or not
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) port: u16,
    /// Local port; 0 for any free port [default: the same]
    #[arg(long, value_name = "PORT")]
    pub(crate) local: Option<u16>,
    /// Local address to listen on
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1")]
    pub(crate) address: IpAddr,
}

/// Subcommands of `service`.
#[derive(Debug, Subcommand)]
pub(crate) enum ServiceCommand {
    /// Add or change a service; applies immediately in a running sandbox
    Set(Box<SetServiceArgs>),
    /// List the services of a sandbox and their state
    #[command(visible_alias = "list")]
    Ls {
        /// The sandbox
        name: String,
    },
    /// Stop and remove a service
    #[command(visible_alias = "delete")]
    Rm {
        /// The sandbox
        name: String,
        /// The service
        service: String,
    },
    /// Start a service, and its sandbox if needed
    Start {
        /// The sandbox
        name: String,
        /// The service
        service: String,
    },
    /// Stop a service until the next session or `service start`
    Stop {
        /// The sandbox
        name: String,
        /// The service
        service: String,
    },
    /// Print the output of the last run of a service
    Logs {
        /// The sandbox
        name: String,
        /// The service
        service: String,
        /// Keep printing until it ends
        #[arg(short = 'f', long)]
        follow: bool,
    },
}

/// Arguments of `service set`.
#[derive(Debug, Args)]
pub(crate) struct SetServiceArgs {
    /// Port of the service: requests to it wait until the service listens
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) port: Option<u16>,
    /// When to restart the service
    #[arg(long, value_enum, default_value_t = RestartArg::OnFailure)]
    pub(crate) restart: RestartArg,
    /// Do not start it automatically, only with `service start`
    #[arg(long)]
    pub(crate) no_start: bool,
    /// Environment variable; NAME alone copies the local value (repeatable)
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
    /// The service
    pub(crate) service: String,
    /// Program and arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "ARGV"
    )]
    pub(crate) argv: Vec<String>,
}

/// When a service is restarted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum RestartArg {
    /// Never
    Never,
    /// If its exit code is not 0
    OnFailure,
    /// Whenever it ends
    Always,
}

/// Reads `3000`, `3000:private` or `3000:public`.
pub(crate) fn published(text: &str) -> Result<Port, String> {
    let (port, access) = match text.split_once(':') {
        None => (text, Access::Public),
        Some((port, "public")) => (port, Access::Public),
        Some((port, "private")) => (port, Access::Private),
        Some((_, other)) => return Err(format!("`{other}` is not `public` or `private`")),
    };
    match port.parse() {
        Ok(port) if port > 0 => Ok(Port { port, access, wake: true }),
        _ => Err("write a port, like 3000 or 3000:private".to_owned()),
    }
}
