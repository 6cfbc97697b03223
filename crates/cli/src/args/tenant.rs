//! Arguments of the commands about projects, keys and secrets.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use sandkeep_client::types::Span;

use super::sandbox::pair;

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
    /// How many outbound connections its sandboxes may have open together
    #[arg(long, value_name = "NUMBER")]
    pub(crate) max_connections: Option<std::num::NonZeroU32>,
    /// Remove that limit: half of what the server allows all sandboxes
    #[arg(long, conflicts_with = "max_connections")]
    pub(crate) no_max_connections: bool,
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
        /// Ids from `keep key ls`, unique beginnings or ends of them, or labels
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

/// The part of a request in which a placeholder is replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PlaceArg {
    /// Headers (always replaced)
    Header,
    /// The query of the URL
    Query,
    /// The body
    Body,
}
