//! Arguments of the commands about ports and services.

use std::net::IpAddr;

use clap::{Args, Subcommand, ValueEnum};
use sandkeep_client::types::{Access, Port};
use sandkeep_core::model::Span;

use super::sandbox::variable;

/// Arguments of `ports`.
#[derive(Debug, Args)]
pub(crate) struct PortsArgs {
    /// The sandbox
    pub(crate) name: String,
    /// A port to publish, or to publish otherwise
    #[arg(requires = "access", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) port: Option<u16>,
    /// Who may reach it
    #[arg(value_enum)]
    pub(crate) access: Option<AccessArg>,
    /// Requests for it do not wake the sandbox
    #[arg(long, requires = "access")]
    pub(crate) no_wake: bool,
}

/// Who may reach a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum AccessArg {
    /// Everybody who knows its address
    Public,
    /// Whoever has a key to the project or a token for the port
    Private,
    /// Nobody
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
    /// Let everybody in who knows the address
    #[arg(long)]
    pub(crate) public: bool,
    /// How long the token in the address works [default: 12h]
    #[arg(long, value_name = "SPAN", conflicts_with = "public")]
    pub(crate) expires: Option<Span>,
}

/// Arguments of `forward`.
#[derive(Debug, Args)]
pub(crate) struct ForwardArgs {
    /// The sandbox
    pub(crate) name: String,
    /// The port in it, published or not
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) port: u16,
    /// The port here; 0 for any that is free [default: the same]
    #[arg(long, value_name = "PORT")]
    pub(crate) local: Option<u16>,
    /// The address to listen on here
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1")]
    pub(crate) address: IpAddr,
}

/// What can be done with services.
#[derive(Debug, Subcommand)]
pub(crate) enum ServiceCommand {
    /// Declare a service, or declare it otherwise; in a running sandbox that takes effect at once
    Set(Box<SetServiceArgs>),
    /// List the services of a sandbox and how they stand
    #[command(visible_alias = "list")]
    Ls {
        /// The sandbox
        name: String,
    },
    /// End a service and take it away
    #[command(visible_alias = "delete")]
    Rm {
        /// The sandbox
        name: String,
        /// The service
        service: String,
    },
    /// Start a service, waking its sandbox if it sleeps
    Start {
        /// The sandbox
        name: String,
        /// The service
        service: String,
    },
    /// Stop a service until the next session, or until it is started by hand
    Stop {
        /// The sandbox
        name: String,
        /// The service
        service: String,
    },
    /// Print what a service wrote, the last time it was started
    Logs {
        /// The sandbox
        name: String,
        /// The service
        service: String,
        /// Go on until it ends
        #[arg(short = 'f', long)]
        follow: bool,
    },
}

/// Arguments of `service set`.
#[derive(Debug, Args)]
pub(crate) struct SetServiceArgs {
    /// The port it listens on: requests for it wait until it does
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) port: Option<u16>,
    /// What becomes of it when it has ended
    #[arg(long, value_enum, default_value_t = RestartArg::OnFailure)]
    pub(crate) restart: RestartArg,
    /// Do not start it with every session, only by hand
    #[arg(long)]
    pub(crate) no_start: bool,
    /// A variable for it; NAME alone takes the value from here; may be repeated
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

/// What becomes of a service that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum RestartArg {
    /// It stays ended
    Never,
    /// It is started again unless it ended with 0
    OnFailure,
    /// It is started again
    Always,
}

/// Reads `3000`, `3000:private` or `3000:public`.
pub(super) fn published(text: &str) -> Result<Port, String> {
    let (port, access) = match text.split_once(':') {
        None => (text, Access::Public),
        Some((port, "public")) => (port, Access::Public),
        Some((port, "private")) => (port, Access::Private),
        Some((_, other)) => return Err(format!("`{other}` is neither public nor private")),
    };
    match port.parse() {
        Ok(port) if port > 0 => Ok(Port { port, access, wake: true }),
        _ => Err("write a port, like 3000 or 3000:private".to_owned()),
    }
}
