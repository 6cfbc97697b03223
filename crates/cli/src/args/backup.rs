//! Arguments of `backup`.

use std::path::PathBuf;

use clap::Subcommand;

/// Subcommands of `backup`. The data directory is the global option `--data`.
#[derive(Debug, Subcommand)]
pub(crate) enum BackupCommand {
    /// Make a backup of the data directory, also while a server uses it
    ///
    /// Run it on the server's host, as root. Later backups to the same directory copy only what is new. Sandboxes that
    /// run are in it as of their last snapshot.
    Create {
        /// Directory of the backups; on another disk
        directory: PathBuf,
        /// Copy the keys of the data directory, too: whoever has the backup can then read all secrets
        #[arg(long)]
        include_keys: bool,
    },
    /// List the backups in a directory
    Ls {
        /// Directory of the backups
        directory: PathBuf,
    },
    /// Read a backup and compare every byte with its manifest
    Verify {
        /// Directory of the backups
        directory: PathBuf,
        /// The backup [default: the newest]
        #[arg(value_name = "BACKUP", conflicts_with = "all")]
        id: Option<String>,
        /// Verify all backups in the directory
        #[arg(long)]
        all: bool,
    },
    /// Delete old backups, and what only they used
    Prune {
        /// Directory of the backups
        directory: PathBuf,
        /// How many backups to keep, the newest
        #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
        keep: u32,
    },
    /// Restore a backup into the data directory, which must be empty; no server may run there
    Restore {
        /// Directory of the backups
        directory: PathBuf,
        /// The backup [default: the newest]
        #[arg(value_name = "BACKUP")]
        id: Option<String>,
    },
}
