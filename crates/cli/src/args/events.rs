//! Arguments of the commands about what happened: events, the audit log, webhooks.

use clap::{Args, Subcommand};

pub(super) const EVENTS_HELP: &str = "\
Examples:
  keep events                                  events of the last hour
  keep events my-app --since 1d                events of one sandbox, since yesterday
  keep events --follow --kind command.ended    commands that end from now on
  keep events --follow --json | jq .kind       one JSON object per line, for programs

Kinds: sandbox.created, sandbox.starting, sandbox.running, sandbox.stopping, sandbox.stopped,
sandbox.paused, sandbox.failed, sandbox.deleted, sandbox.restored, sandbox.updated,
sandbox.rolled_back, sandbox.promoted, sandbox.merged, sandbox.renamed, sandbox.writes_held,
sandbox.writes_released, sandbox.validation_failed,
session.ended, command.started, command.ended, snapshot.created, snapshot.deleted, port.published,
port.unpublished, guard.found, run.queued, run.started, run.waiting, run.resumed, run.ready,
run.accepted, run.rejected, run.failed, run.cancelled, run.expiring, run.expired, approval.asked,
approval.answered, damage.found, damage.cleared, webhook.disabled, events.lost";

/// Arguments of `events`.
#[derive(Debug, Args)]
pub(crate) struct EventsArgs {
    /// Keep printing new events until interrupted, also across restarts of the server
    #[arg(long, short)]
    pub(crate) follow: bool,
    /// Start time: how long ago, like 10m, or a time, like 2026-01-31T12:00:00Z [default: 1h ago, or now with --follow]
    #[arg(long, value_name = "TIME")]
    pub(crate) since: Option<String>,
    /// Start after the event with this id (shown by `--json`)
    #[arg(long, value_name = "ID", conflicts_with = "since")]
    pub(crate) after: Option<String>,
    /// Show only this sandbox
    #[arg(value_name = "SANDBOX")]
    pub(crate) sandbox: Option<String>,
    /// Show only sandboxes with this tag (repeatable; all must match)
    #[arg(long = "tag", value_name = "KEY=VALUE")]
    pub(crate) tags: Vec<String>,
    /// Show only this kind (`command.ended`) or group of kinds (`command`) (repeatable)
    #[arg(long = "kind", value_name = "KIND")]
    pub(crate) kinds: Vec<String>,
    /// Show all projects; needs an admin key
    #[arg(long)]
    pub(crate) all_projects: bool,
}

/// Options of `audit`.
#[derive(Debug, Clone, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct AuditArgs {
    #[command(subcommand)]
    pub(crate) command: Option<AuditCommand>,
    #[command(flatten)]
    pub(crate) filter: AuditFilterArgs,
}

/// Subcommands of `audit`.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum AuditCommand {
    /// Check that no entry was removed, changed or reordered
    ///
    /// Asks the server. With --offline, reads the data directory itself; no server is needed, and one may be running.
    Verify {
        /// Check the host's log; needs an admin key
        #[arg(long)]
        host: bool,
        /// Check that entry SEQ is still the one with this hash (or a hash that begins so), as noted earlier
        #[arg(long, value_name = "SEQ:HASH")]
        expect: Option<String>,
        /// Read the data directory (--data or SANDKEEP_DATA): all projects, or the one of --project, or --host
        #[arg(long)]
        offline: bool,
    },
}

/// Which entries `audit` shows.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct AuditFilterArgs {
    /// Keep printing new entries until interrupted, also across restarts of the server
    #[arg(long, short)]
    pub(crate) follow: bool,
    /// Start time: how long ago, like 10m, or a time, like 2026-01-31T12:00:00Z [default: 24h ago, or now with --follow]
    #[arg(long, value_name = "TIME")]
    pub(crate) since: Option<String>,
    /// End time
    #[arg(long, value_name = "TIME")]
    pub(crate) until: Option<String>,
    /// Show only what this key (id or label) did, or `system`, `agent`, `webhook` or `anonymous`
    #[arg(long, value_name = "ACTOR")]
    pub(crate) actor: Option<String>,
    /// Show only what was done to this: `sandbox/my-app`, or all of a kind: `secret`
    #[arg(long, value_name = "TARGET")]
    pub(crate) target: Option<String>,
    /// Show only this action (`sandbox.create`) or group of actions (`sandbox`)
    #[arg(long, value_name = "ACTION")]
    pub(crate) action: Option<String>,
    /// Show the host's log: projects, keys, images, callers without a key; needs an admin key
    #[arg(long)]
    pub(crate) host: bool,
}

/// Subcommands of `webhook`.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum WebhookCommand {
    /// Send events to an address, from now on
    Add {
        /// Where to send them: https://… or http://…
        // Another id than that of the option for the server's address, which every command has.
        #[arg(id = "address", value_name = "URL")]
        url: String,
        /// Kinds (`sandbox.stopped`), groups (`sandbox.*`) or `*` (repeatable, or separated by commas)
        #[arg(long, value_name = "KINDS", value_delimiter = ',', required = true)]
        events: Vec<String>,
        /// Read the secret that deliveries are signed with from standard input; otherwise one is made and shown once
        #[arg(long)]
        secret_stdin: bool,
        /// Allow private, loopback and link-local addresses; needs an admin key
        #[arg(long)]
        allow_private: bool,
        /// Let the receiver answer approvals, with a link in each `approval.asked`; needs a key that may approve
        #[arg(long)]
        answers: bool,
    },
    /// List webhooks
    Ls,
    /// Show a webhook and its last deliveries
    #[command(visible_alias = "get")]
    Show {
        /// The webhook's id
        #[arg(value_name = "WEBHOOK")]
        id: String,
    },
    /// Send a test event, once
    Test {
        /// The webhook's id
        #[arg(value_name = "WEBHOOK")]
        id: String,
    },
    /// Change the address or the events
    Set {
        /// The webhook's id
        #[arg(value_name = "WEBHOOK")]
        id: String,
        /// Where to send events
        #[arg(id = "to", long = "to", value_name = "URL")]
        url: Option<String>,
        /// Kinds, groups or `*`; replaces the list (repeatable, or separated by commas)
        #[arg(long, value_name = "KINDS", value_delimiter = ',')]
        events: Vec<String>,
        /// Whether private, loopback and link-local addresses are allowed; `true` needs an admin key
        #[arg(long, value_name = "BOOL")]
        allow_private: Option<bool>,
        /// Whether the receiver may answer approvals; `true` needs a key that may approve, and ends links sent before
        #[arg(long, value_name = "BOOL")]
        answers: Option<bool>,
    },
    /// Replace the secret; deliveries are signed with both until the next rotation
    Rotate {
        /// The webhook's id
        #[arg(value_name = "WEBHOOK")]
        id: String,
        /// Read the secret from standard input; otherwise one is made and shown once
        #[arg(long)]
        secret_stdin: bool,
        /// Forget the former secret at once
        #[arg(long)]
        only: bool,
    },
    /// Stop sending events
    Disable {
        /// The webhook's id
        #[arg(value_name = "WEBHOOK")]
        id: String,
    },
    /// Send events again, from where it stopped
    Enable {
        /// The webhook's id
        #[arg(value_name = "WEBHOOK")]
        id: String,
    },
    /// Delete webhooks
    Rm {
        /// Ids of the webhooks
        #[arg(required = true, value_name = "WEBHOOK")]
        ids: Vec<String>,
    },
}
