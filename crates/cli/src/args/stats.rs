//! Arguments of `stats` and `top`.

use clap::{Args, ValueEnum};
use sandkeep_client::types::Span;

/// Arguments of `stats`.
#[derive(Debug, Args)]
pub(crate) struct StatsArgs {
    /// The sandboxes [default: all that run]
    #[arg(value_name = "NAME")]
    pub(crate) names: Vec<String>,
    /// Keep printing until interrupted
    #[arg(long, short)]
    pub(crate) follow: bool,
    /// Time between two readings, which CPU load and rates are computed from
    #[arg(long, value_name = "SPAN", default_value = "1s")]
    pub(crate) interval: Span,
}

/// Arguments of `top`.
#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Time between two readings
    #[arg(long, value_name = "SPAN", default_value = "2s")]
    pub(crate) interval: Span,
    /// Order of the list
    #[arg(long, value_enum, default_value_t = TopOrder::Cpu)]
    pub(crate) sort: TopOrder,
}

/// What `top` sorts by, the largest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TopOrder {
    /// CPU load
    Cpu,
    /// Memory in use
    Memory,
    /// Bytes received and sent per second
    Network,
    /// Disk space written by the session
    Disk,
    /// Name
    Name,
}
