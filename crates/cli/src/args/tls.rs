//! Arguments of `tls`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

const INIT_HELP: &str = "\
Examples:
  keep tls init                          localhost, this host's name, loopback addresses
  keep tls init keep.lan 192.0.2.10      these names and addresses as well

Run it again to renew the certificate or to change its names: the CA stays, so clients need nothing new, \
and a running server loads the files within seconds. The CA's key (ca.key) signs certificates that your \
clients trust: keep it away from others, or off this host.";

/// Subcommands of `tls`.
#[derive(Debug, Subcommand)]
pub(crate) enum TlsCommand {
    /// Make a local CA and a server certificate
    #[command(after_help = INIT_HELP)]
    Init(TlsInitArgs),
}

/// Arguments of `tls init`. The data directory is the global option `--data`.
#[derive(Debug, Args)]
pub(crate) struct TlsInitArgs {
    /// Names and addresses of the server, besides localhost, this host's name and loopback addresses
    #[arg(value_name = "NAME")]
    pub(crate) names: Vec<String>,
    /// Directory of the files [default: tls in the data directory]
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: Option<PathBuf>,
    /// Days until the server certificate expires
    #[arg(long, value_name = "DAYS", default_value_t = 397, value_parser = clap::value_parser!(u32).range(1..=825))]
    pub(crate) days: u32,
    /// Make a new CA, too; clients must trust it anew
    #[arg(long)]
    pub(crate) new_ca: bool,
}
