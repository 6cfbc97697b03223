//! Arguments of `runs`, `approvals` and `ask`.

use clap::{Args, Subcommand, ValueEnum};
use sandkeep_client::types::{Size, Span, SpendingKind, SpendingLimit};

use super::sandbox::variable;

pub(super) const RUNS_HELP: &str = "\
Examples:
  keep runs start --sandbox my-app --fork --repo acme/api --purpose \"upgrade deps\" \\
      --approve 'git push*' --keep 14d -- ./agent.sh
  keep runs ls --status waiting_for_approval
  keep runs review RUN ; keep runs accept RUN";

const START_HELP: &str = "\
Without a command a harness drives the run: it runs commands in the sandbox with `keep exec`, calls \
`keep runs heartbeat`, and `keep runs finish` when the work is done.

A pattern of --approve sees the whole command line of commands that are started through the API, with \
`*` for any text and `?` for one character. It does not see what those commands start: a script that \
pushes is one command, `./agent.sh`. --approve-hosts and --approve-secret hold what programs do on the \
network, whoever started them.";

/// Subcommands of `runs`.
#[derive(Debug, Subcommand)]
pub(crate) enum RunsCommand {
    /// Start a run, in a sandbox, in a fork of it, or in a new one
    #[command(after_help = START_HELP)]
    Start(Box<StartRunArgs>),
    /// List runs
    #[command(visible_alias = "list")]
    Ls(ListRunsArgs),
    /// Show runs
    Show {
        /// Ids of runs
        #[arg(required = true, value_name = "RUN")]
        runs: Vec<String>,
    },
    /// Print the output of the command of a run
    Logs {
        /// The run
        run: String,
        /// Keep printing until the command ends
        #[arg(short = 'f', long)]
        follow: bool,
        /// Which attempt, counted from 1 [default: the last]
        #[arg(long, value_name = "NUMBER")]
        attempt: Option<usize>,
    },
    /// Wait until a run waits for somebody or is over
    ///
    /// Exits with 0 if it is ready for review or accepted, with 1 if it failed, was cancelled, rejected or expired, and with
    /// 2 if it waits for an approval.
    Wait {
        /// The run
        run: String,
    },
    /// End runs that are queued or under way
    Cancel {
        /// Ids of runs
        #[arg(required = true, value_name = "RUN")]
        runs: Vec<String>,
        /// Why, for people
        #[arg(short = 'm', long, value_name = "TEXT", default_value = "")]
        comment: String,
    },
    /// Tell the server that the harness of a run is alive
    Heartbeat {
        /// The run
        run: String,
        /// What it has cost so far, in a unit of your own
        #[arg(long, value_name = "NUMBER")]
        cost: Option<f64>,
    },
    /// Tell the server that the work of a harness is done
    Finish {
        /// The run
        run: String,
        /// The work failed, for this reason
        #[arg(long, value_name = "REASON")]
        failure: Option<String>,
        /// What it has cost, in a unit of your own
        #[arg(long, value_name = "NUMBER")]
        cost: Option<f64>,
    },
    /// Approve what a run waits for
    Approve(AnswerRunArgs),
    /// Deny what a run waits for
    Deny(AnswerRunArgs),
    /// Show what a run changed, did and was in contact with
    Review {
        /// The run
        run: String,
        /// Review what its sandbox is now: it has changed since
        #[arg(long)]
        again: bool,
    },
    /// Accept the result of a run; needs a key that may approve
    ///
    /// The origin of a fork gets the fork's state, unless the run or --how says otherwise.
    Accept {
        /// The run
        run: String,
        /// What to do with the result [default: what the run says]
        #[arg(long, value_enum, value_name = "HOW")]
        how: Option<AcceptRuleArg>,
        /// What there is to say about it
        #[arg(short = 'm', long, value_name = "TEXT", default_value = "")]
        comment: String,
        /// Delete the sandbox that was made for the run; it stays in the trash for a while
        #[arg(long)]
        rm: bool,
    },
    /// Reject the result of a run and delete its fork; needs a key that may approve
    Reject {
        /// The run
        run: String,
        /// What there is to say about it
        #[arg(short = 'm', long, value_name = "TEXT", default_value = "")]
        comment: String,
    },
}

/// Arguments of `runs start`.
#[derive(Debug, Args)]
pub(crate) struct StartRunArgs {
    /// Sandbox to work in, or with --fork to fork
    #[arg(long, value_name = "NAME", required_unless_present = "fresh", conflicts_with = "fresh")]
    pub(crate) sandbox: Option<String>,
    /// Work in a fork of the sandbox
    #[arg(long, requires = "sandbox")]
    pub(crate) fork: bool,
    /// Work in a new sandbox
    #[arg(long)]
    pub(crate) fresh: bool,
    /// Image of the new sandbox [default: host]
    #[arg(long, value_name = "IMAGE", requires = "fresh")]
    pub(crate) image: Option<String>,
    /// Name of the fork or the new sandbox; generated if absent
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Repository, for people
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub(crate) repo: String,
    /// Owner, for people [default: the project]
    #[arg(long, value_name = "OWNER", default_value = "", hide_default_value = true)]
    pub(crate) owner: String,
    /// Purpose, for people
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub(crate) purpose: String,
    /// Kind of work, for people
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub(crate) class: String,
    /// Runs with a higher number start first, between -100 and 100
    #[arg(long, value_name = "NUMBER", default_value_t = 0, allow_hyphen_values = true)]
    pub(crate) priority: i32,
    /// Hold commands that match until somebody approves (repeatable)
    #[arg(long, value_name = "PATTERN")]
    pub(crate) approve: Vec<String>,
    /// Hold the first contact with each host until somebody approves
    #[arg(long)]
    pub(crate) approve_hosts: bool,
    /// Host that needs no approval: a name, `*.example.com`, or an address (repeatable)
    #[arg(long, value_name = "HOST", requires = "approve_hosts")]
    pub(crate) known_host: Vec<String>,
    /// Hold the use of a secret until somebody approves: at each host, and for each command that is given it
    /// (repeatable)
    #[arg(long, value_name = "SECRET")]
    pub(crate) approve_secret: Vec<String>,
    /// Wait for an approval beyond this: `cpu=10m`, `time=2h`, `network=1GiB` or `cost=5`; an approval allows as much
    /// again, or with `cpu=10m+5m` so much more (repeatable)
    #[arg(long, value_name = "WHAT=LIMIT[+STEP]", value_parser = spending)]
    pub(crate) spending_limit: Vec<SpendingLimit>,
    /// What acceptance does [default: promote a fork, keep a sandbox]
    #[arg(long, value_enum, value_name = "HOW")]
    pub(crate) on_accept: Option<AcceptRuleArg>,
    /// How long the result waits for a review [default: 14d]
    #[arg(long, value_name = "SPAN")]
    pub(crate) keep: Option<Span>,
    /// End an attempt after this long, time spent waiting for approvals not counted
    #[arg(long, value_name = "SPAN")]
    pub(crate) timeout: Option<Span>,
    /// How often to start the command again if it does not end with 0
    #[arg(long, value_name = "COUNT", default_value_t = 0)]
    pub(crate) retries: u32,
    /// How long a harness may be silent [default: 60s]
    #[arg(long, value_name = "SPAN", conflicts_with = "argv")]
    pub(crate) heartbeat: Option<Span>,
    /// Environment variable; NAME alone copies the local value (repeatable)
    #[arg(short = 'e', long = "env", value_name = "NAME=VALUE", value_parser = variable)]
    pub(crate) env: Vec<(String, String)>,
    /// Working directory
    #[arg(short = 'C', long, value_name = "DIR")]
    pub(crate) cwd: Option<String>,
    /// User, as USER or USER:GROUP
    #[arg(short = 'u', long, value_name = "USER")]
    pub(crate) user: Option<String>,
    /// Wait until the run waits for somebody or is over; exits like `keep runs wait`
    #[arg(long)]
    pub(crate) wait: bool,
    /// Program and arguments; without them a harness drives the run
    #[arg(last = true, value_name = "ARGV")]
    pub(crate) argv: Vec<String>,
}

/// Reads `cpu=10m+5m`.
fn spending(text: &str) -> Result<SpendingLimit, String> {
    let wrong =
        || "write WHAT=LIMIT[+STEP], like `cpu=10m`, `network=1GiB` or `cost=5+2`".to_owned();
    let (what, amounts) = text.split_once('=').ok_or_else(wrong)?;
    let what = match what {
        "cpu" => SpendingKind::Cpu,
        "time" => SpendingKind::Time,
        "network" => SpendingKind::Network,
        "cost" => SpendingKind::Cost,
        _ => return Err(wrong()),
    };
    let amount = |text: &str| -> Result<f64, String> {
        let number = match what {
            SpendingKind::Cpu | SpendingKind::Time => {
                let span: Span = text.parse().map_err(|error| format!("{error}"))?;
                count(span.0) / 1000.0
            }
            SpendingKind::Network => {
                let size: Size = text.parse().map_err(|error| format!("{error}"))?;
                count(size.0)
            }
            SpendingKind::Cost => text.parse().map_err(|_| wrong())?,
        };
        if number.is_finite() && number > 0.0 { Ok(number) } else { Err(wrong()) }
    };
    let (limit, step) = match amounts.split_once('+') {
        Some((limit, step)) => (amount(limit)?, Some(amount(step)?)),
        None => (amount(amounts)?, None),
    };
    Ok(SpendingLimit { what, limit, step })
}

#[expect(clippy::cast_precision_loss, reason = "the server takes numbers with a fraction")]
fn count(number: u64) -> f64 {
    number as f64
}

/// Arguments of `runs ls`.
#[derive(Debug, Args)]
pub(crate) struct ListRunsArgs {
    /// Only with this status, like `ready_for_review` (repeatable)
    #[arg(long, value_enum, value_name = "STATUS")]
    pub(crate) status: Vec<RunStatusArg>,
    /// Only in this sandbox
    #[arg(long, value_name = "NAME")]
    pub(crate) sandbox: Option<String>,
    /// Only of this owner
    #[arg(long, value_name = "OWNER")]
    pub(crate) owner: Option<String>,
    /// Only on this repository
    #[arg(long, value_name = "TEXT")]
    pub(crate) repo: Option<String>,
    /// Maximum number, newest first
    #[arg(short = 'n', long, value_name = "COUNT", default_value_t = 50)]
    pub(crate) limit: u32,
    /// Print ids only
    #[arg(short = 'q', long)]
    pub(crate) quiet: bool,
}

/// Arguments of `runs approve` and `runs deny`.
#[derive(Debug, Args)]
pub(crate) struct AnswerRunArgs {
    /// The run
    pub(crate) run: String,
    /// Answer all that the run waits for; otherwise it must be one approval
    #[arg(long)]
    pub(crate) all: bool,
    /// What there is to say about it
    #[arg(short = 'm', long, value_name = "TEXT", default_value = "")]
    pub(crate) comment: String,
}

/// What acceptance does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum AcceptRuleArg {
    /// Give the origin the state of the fork
    Promote,
    /// Merge the changes into the origin
    Merge,
    /// Print the changes as a patch
    Patch,
    /// Leave the sandbox as it is
    Keep,
}

/// The status of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum RunStatusArg {
    Queued,
    Running,
    WaitingForApproval,
    ReadyForReview,
    Accepted,
    Rejected,
    Failed,
    Cancelled,
    Expired,
}

/// Subcommands of `approvals`.
#[derive(Debug, Subcommand)]
pub(crate) enum ApprovalsCommand {
    /// List approvals that wait for an answer
    #[command(visible_alias = "list")]
    Ls {
        /// List those that were answered or have expired, too
        #[arg(long)]
        all: bool,
        /// Only about this sandbox
        #[arg(long, value_name = "NAME")]
        sandbox: Option<String>,
        /// Only of this run
        #[arg(long, value_name = "RUN")]
        run: Option<String>,
        /// Maximum number, newest first
        #[arg(short = 'n', long, value_name = "COUNT", default_value_t = 50)]
        limit: u32,
    },
    /// Show approvals
    Show {
        /// Ids of approvals
        #[arg(required = true, value_name = "APPROVAL")]
        ids: Vec<String>,
    },
    /// Ask for an approval about a sandbox, and wait for the answer
    ///
    /// Exits with 0 if it was approved, with 1 if it was denied, and with 2 if nobody answered in time.
    Ask {
        /// The sandbox
        sandbox: String,
        /// The question
        question: String,
        /// What there is to know before answering
        #[arg(long, value_name = "TEXT", default_value = "")]
        context: String,
        /// How long to wait [default: 1h]
        #[arg(long, value_name = "SPAN")]
        expires: Option<Span>,
        /// The answer that counts if nobody answers in time
        #[arg(long, value_enum, value_name = "ANSWER")]
        default: Option<AnswerArg>,
    },
    /// Approve; needs a key that may approve
    Approve(AnswerArgs),
    /// Deny; needs a key that may approve
    Deny(AnswerArgs),
}

/// Arguments of `approvals approve` and `approvals deny`.
#[derive(Debug, Args)]
pub(crate) struct AnswerArgs {
    /// Ids of approvals
    #[arg(required = true, value_name = "APPROVAL")]
    pub(crate) ids: Vec<String>,
    /// What there is to say about it
    #[arg(short = 'm', long, value_name = "TEXT", default_value = "")]
    pub(crate) comment: String,
}

/// An answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum AnswerArg {
    /// Yes
    Approve,
    /// No
    Deny,
}

/// Arguments of `ask`, which are those of the program inside.
#[derive(Debug, Args)]
pub(crate) struct AskArgs {
    /// The question, with `--context TEXT`, `--default approve|deny` and `--timeout SECONDS` before it
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "QUESTION"
    )]
    pub(crate) words: Vec<String>,
}

/// Arguments of `project governance`.
#[derive(Debug, Args)]
pub(crate) struct ProjectRunsArgs {
    /// The project
    pub(crate) name: String,
    /// How many runs may work at the same time
    #[arg(long, value_name = "COUNT")]
    pub(crate) running: Option<u32>,
    /// How many runs may be queued
    #[arg(long, value_name = "COUNT")]
    pub(crate) queued: Option<u32>,
    /// Whether nobody may approve or accept what the same key asked for
    #[arg(long, value_name = "BOOL")]
    pub(crate) separate_approver: Option<bool>,
}
