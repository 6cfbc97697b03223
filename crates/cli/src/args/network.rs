//! Arguments of the commands about what sandboxes may reach.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use sandkeep_core::model::{AddressRule, DomainRule};

/// What a sandbox may reach; nothing written means the default, or no change.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Network")]
pub(crate) struct NetworkSettings {
    /// What it may reach; allowing something below means `custom`
    #[arg(long, value_name = "MODE", value_enum)]
    pub(crate) network: Option<ModeArg>,
    /// A name it may reach, like `example.com`, `*.example.com` or `example.com:443`; may be repeated
    #[arg(long, value_name = "NAME[:PORTS]", value_parser = domain)]
    pub(crate) allow_domain: Vec<String>,
    /// Addresses it may reach, like `10.0.0.0/8` or `192.0.2.7:5432`; may be repeated
    #[arg(long, value_name = "CIDR[:PORTS]", value_parser = address)]
    pub(crate) allow_cidr: Vec<String>,
    /// Addresses it may not reach, whatever allows them; may be repeated
    #[arg(long, value_name = "CIDR[:PORTS]", value_parser = address)]
    pub(crate) deny_cidr: Vec<String>,
    /// A policy in JSON, request rules included; the options above are added to it; `-` is standard input
    #[arg(long, value_name = "FILE")]
    pub(crate) network_file: Option<PathBuf>,
}

/// What holds where nothing else is said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ModeArg {
    /// Everything that is not always refused
    AllowAll,
    /// Nothing, names included
    DenyAll,
    /// What is allowed, and nothing else
    Custom,
    /// What the project says
    Default,
}

/// Arguments of `network`.
#[derive(Debug, Args)]
#[command(after_help = NETWORK_HELP)]
pub(crate) struct NetworkArgs {
    /// The sandbox
    pub(crate) name: String,
    /// Add what is named to what it may reach already
    #[arg(long, conflicts_with_all = ["remove", "default", "network", "network_file"])]
    pub(crate) add: bool,
    /// Take what is named away from what it may reach
    #[arg(long, conflicts_with_all = ["default", "network", "network_file"])]
    pub(crate) remove: bool,
    /// Go back to what the project says: short for --network default
    #[arg(long, conflicts_with = "network")]
    pub(crate) default: bool,
    #[command(flatten)]
    pub(crate) settings: NetworkSettings,
}

const NETWORK_HELP: &str = "\
Without options it shows what the sandbox may reach. A change holds at once: connections that no longer fit are cut.

  keep network my-app --network deny-all
  keep network my-app --allow-domain '*.example.com' --allow-domain github.com:22,443
  keep network my-app --add --allow-cidr 10.1.0.0/16
  keep network my-app --json >policy.json     # its field `network` may be edited and given back
  keep network my-app --network-file policy.json";

/// Arguments of `net`.
#[derive(Debug, Args)]
pub(crate) struct NetArgs {
    /// The sandbox
    pub(crate) name: String,
    /// Only what was refused
    #[arg(long)]
    pub(crate) denied: bool,
    /// Only what is open
    #[arg(long)]
    pub(crate) open: bool,
    /// Only of this session
    #[arg(long, value_name = "SESSION")]
    pub(crate) session: Option<String>,
    /// Only to this name, names like `*.example.com`, or this address
    #[arg(long, value_name = "HOST")]
    pub(crate) host: Option<String>,
    /// Only what had not ended before: a time, or a span before now, like 1h
    #[arg(long, value_name = "WHEN")]
    pub(crate) since: Option<String>,
    /// At most so many, the newest
    #[arg(short = 'n', long, value_name = "COUNT", default_value_t = 50)]
    pub(crate) limit: u32,
    /// Go on, and show what ends or is refused as it happens
    #[arg(short = 'f', long, conflicts_with_all = ["summary", "open"])]
    pub(crate) follow: bool,
    /// Sum up by destination
    #[arg(long)]
    pub(crate) summary: bool,
}

fn domain(text: &str) -> Result<String, String> {
    text.parse::<DomainRule>().map(|rule| rule.to_string()).map_err(|error| error.to_string())
}

fn address(text: &str) -> Result<String, String> {
    text.parse::<AddressRule>().map(|rule| rule.to_string()).map_err(|error| error.to_string())
}
