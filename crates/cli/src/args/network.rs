//! Arguments of the commands about the network of sandboxes.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use sandkeep_core::model::{AddressRule, DomainRule};

/// Options for a network policy. Without any, the default or the current policy stays.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Network")]
pub(crate) struct NetworkSettings {
    /// Network policy; the --allow options imply `custom` [default: the project's]
    #[arg(long, value_name = "MODE", value_enum)]
    pub(crate) network: Option<ModeArg>,
    /// Allow a domain, like `example.com`, `*.example.com` or `example.com:443` (repeatable)
    #[arg(long, value_name = "NAME[:PORTS]", value_parser = domain)]
    pub(crate) allow_domain: Vec<String>,
    /// Allow addresses, like `10.0.0.0/8` or `192.0.2.7:5432` (repeatable)
    #[arg(long, value_name = "CIDR[:PORTS]", value_parser = address)]
    pub(crate) allow_cidr: Vec<String>,
    /// Deny addresses, even if another rule allows them (repeatable)
    #[arg(long, value_name = "CIDR[:PORTS]", value_parser = address)]
    pub(crate) deny_cidr: Vec<String>,
    /// Policy file in JSON, for example with request rules; `-` is standard input. The options above are added
    #[arg(long, value_name = "FILE")]
    pub(crate) network_file: Option<PathBuf>,
}

/// The mode of a policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ModeArg {
    /// Everything, except addresses that are always denied
    AllowAll,
    /// Nothing, not even DNS
    DenyAll,
    /// Only what is allowed
    Custom,
    /// The default of the project
    Default,
}

/// The default policy of a project, as far as it is one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DefaultModeArg {
    /// Everything, except addresses that are always denied
    AllowAll,
    /// Nothing, not even DNS
    DenyAll,
}

/// Arguments of `network`.
#[derive(Debug, Args)]
#[command(after_help = NETWORK_HELP)]
pub(crate) struct NetworkArgs {
    /// The sandbox
    pub(crate) name: String,
    /// Add to the current policy
    #[arg(long, conflicts_with_all = ["remove", "default", "network", "network_file"])]
    pub(crate) add: bool,
    /// Remove from the current policy
    #[arg(long, conflicts_with_all = ["default", "network", "network_file"])]
    pub(crate) remove: bool,
    /// Use the default of the project: short for --network default
    #[arg(long, conflicts_with = "network")]
    pub(crate) default: bool,
    #[command(flatten)]
    pub(crate) settings: NetworkSettings,
}

const NETWORK_HELP: &str = "\
Without options, shows the policy. A change applies immediately: connections that it denies are \
closed.

  keep network my-app --network deny-all
  keep network my-app --allow-domain '*.example.com' --allow-domain github.com:22,443
  keep network my-app --add --allow-cidr 10.1.0.0/16
  keep network my-app --json >policy.json     # edit its field `network` and use it below
  keep network my-app --network-file policy.json";

/// Arguments of `net`.
#[derive(Debug, Args)]
pub(crate) struct NetArgs {
    /// The sandbox
    pub(crate) name: String,
    /// Show only denied connections
    #[arg(long)]
    pub(crate) denied: bool,
    /// Show only open connections
    #[arg(long)]
    pub(crate) open: bool,
    /// Show only this session
    #[arg(long, value_name = "SESSION")]
    pub(crate) session: Option<String>,
    /// Show only this host: a domain, a pattern like `*.example.com`, or an address
    #[arg(long, value_name = "HOST")]
    pub(crate) host: Option<String>,
    /// Skip connections that ended earlier: a time, or how long ago, like 1h
    #[arg(long, value_name = "WHEN")]
    pub(crate) since: Option<String>,
    /// Maximum number, newest first
    #[arg(short = 'n', long, value_name = "COUNT", default_value_t = 50)]
    pub(crate) limit: u32,
    /// Keep printing connections as they end or are denied
    #[arg(short = 'f', long, conflicts_with_all = ["summary", "open"])]
    pub(crate) follow: bool,
    /// Summarize by destination
    #[arg(long)]
    pub(crate) summary: bool,
}

fn domain(text: &str) -> Result<String, String> {
    text.parse::<DomainRule>().map(|rule| rule.to_string()).map_err(|error| error.to_string())
}

fn address(text: &str) -> Result<String, String> {
    text.parse::<AddressRule>().map(|rule| rule.to_string()).map_err(|error| error.to_string())
}
