//! How things that went wrong are told.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Finding;

/// The body of every answer that is not a success.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorAnswer {
    /// What went wrong.
    pub error: ErrorBody,
}

/// What went wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// What kind it is, for programs: `not_found`, `name_taken`, `invalid`. `docs/API.md` lists them.
    pub code: String,
    /// What happened, for people.
    pub message: String,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// What the guard found, when that is why (`secret_found`, `decision_needed`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub findings: Vec<Finding>,
}
