//! Arguments of the commands about what is stored: images, snapshots, drives, the trash.

use std::path::PathBuf;

use clap::Subcommand;
use sandkeep_client::types::Size;

use super::build::{BUILD_HELP, BuildArgs};
use super::sandbox::pair;

const CUSTOMIZE_HELP: &str = "\
The user is `ubuntu` with home /vercel, and commands start in /vercel/sandbox. A runtime for \
Vercel's clients is an image named vercel/RUNTIME:

  keep image pull node:24 && keep image customize vercel/node24 --from node:24
  npm install --prefix /opt/node24 node@24 npm
  keep image customize vercel/node24 --add /opt/node24:/vercel/runtimes/node24 \\
    --path /vercel/runtimes/node24/node_modules/.bin";

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
        /// The snapshot: its id, a unique beginning or end of it, or SANDBOX@LABEL
        #[arg(required_unless_present = "last")]
        id: Option<String>,
        /// The newest snapshot
        #[arg(long, conflicts_with = "id")]
        last: bool,
    },
    /// Delete snapshots
    Rm {
        /// The snapshots: ids, unique beginnings or ends of them, or SANDBOX@LABEL
        #[arg(required = true, value_name = "ID")]
        ids: Vec<String>,
        /// Delete even if sandboxes use them: stopped ones cannot start until rolled back
        #[arg(short = 'f', long)]
        force: bool,
    },
    /// Export a snapshot as an OCI image in a tar archive
    Export {
        /// The snapshot: its id, a unique beginning or end of it, or SANDBOX@LABEL
        #[arg(required_unless_present = "last")]
        id: Option<String>,
        /// The newest snapshot
        #[arg(long, conflicts_with = "id")]
        last: bool,
        /// Output file; `-` is standard output [default: -]
        #[arg(short = 'o', long, value_name = "FILE")]
        output: Option<PathBuf>,
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
        #[arg(short = 'e', long = "env", value_name = "NAME=VALUE", value_parser = pair)]
        env: Vec<(String, String)>,
        /// Prepend a directory to PATH (repeatable)
        #[arg(long, value_name = "DIR")]
        path: Vec<String>,
    },
    /// Build an image from a Dockerfile
    #[command(after_help = BUILD_HELP)]
    Build(BuildArgs),
    /// Delete what builds of the project have kept for the next one; images stay
    Prune,
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
