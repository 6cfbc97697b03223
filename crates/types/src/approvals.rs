//! Approvals: questions that hold an effect until somebody answers.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Span;

/// The status of an approval.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ApprovalStatus {
    /// It waits for an answer.
    Pending,
    /// The answer was yes.
    Approved,
    /// The answer was no.
    Denied,
    /// Nobody answered in time, or whoever asked is gone. The default answer counts.
    Expired,
}

/// An answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ApprovalAnswer {
    /// Yes.
    Approve,
    /// No.
    Deny,
}

/// Who asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ApprovalSource {
    /// A caller of the API.
    Harness,
    /// A program inside the sandbox, with `keep ask`.
    Agent,
    /// The policy of the sandbox or of its run.
    Policy,
}

/// What is held until there is an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ApprovalSubject {
    /// Whatever the one who asks makes of it.
    Question,
    /// The start of a command.
    Command,
    /// Connections to a host.
    Host,
    /// The use of a secret.
    Secret,
    /// A run that reached a spending limit.
    Spending,
    /// A run whose sandbox is not as it was at the last stop.
    Validation,
}

/// An approval.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Approval {
    /// Its id.
    pub id: String,
    /// The project it belongs to.
    pub project: String,
    /// The sandbox it is about.
    pub sandbox: String,
    /// The run it belongs to.
    pub run: Option<String>,
    /// Who asks.
    pub source: ApprovalSource,
    /// What is held.
    pub subject: ApprovalSubject,
    /// What the answer decides, if it is more than one request: the host, the secret and the host, or the limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// The question.
    pub question: String,
    /// What there is to know before answering.
    pub context: String,
    /// Its status.
    pub status: ApprovalStatus,
    /// The answer that counts when it expires; if absent the effect does not happen.
    pub default: Option<ApprovalAnswer>,
    /// The id of the key that asked, if one did.
    pub asked_by: Option<String>,
    /// When it was asked.
    #[schema(format = DateTime)]
    pub asked_at: String,
    /// When it expires.
    #[schema(format = DateTime)]
    pub expires_at: String,
    /// Who answered: the id of a key, or `webhook:` and the id of the webhook whose receiver did.
    pub answered_by: Option<String>,
    /// When it was answered, or expired.
    #[schema(format = DateTime)]
    pub answered_at: Option<String>,
    /// What was said about it.
    pub comment: String,
}

/// A question to be asked.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AskApproval {
    /// The question, on one line.
    pub question: String,
    /// What there is to know before answering.
    #[serde(default)]
    pub context: String,
    /// How long to wait for an answer; an hour if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires: Option<Span>,
    /// The answer that counts when it expires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default: Option<ApprovalAnswer>,
}

/// An answer to be given.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AnswerApproval {
    /// The answer.
    pub answer: ApprovalAnswer,
    /// What there is to say about it.
    #[serde(default)]
    pub comment: String,
}

/// What somebody has to approve in a sandbox. While a sandbox has this setting, programs inside can also ask with
/// `keep ask`. Only a key that may approve can change or remove it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ApprovalPolicy {
    /// Commands that are held: patterns with `*` and `?` for the whole command line. They apply to commands started
    /// through the API, not to what those start.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub commands: Vec<String>,
    /// Whether the first contact with each host is held. An approved host stays approved for the sandbox.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hosts: bool,
    /// Hosts that need no approval: names, `*.example.com`, or addresses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub known_hosts: Vec<String>,
    /// Secrets whose use is held: the first request that has it to each host, and each command that is given it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub secrets: Vec<String>,
    /// How long to wait for an answer; an hour if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires: Option<Span>,
    /// The answer that counts when an approval expires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default: Option<ApprovalAnswer>,
}
