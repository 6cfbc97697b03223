//! Error responses, and the codes that were renamed.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Finding, MergeConflict};

/// The body of every response that is not a success.
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
    /// Former names of the code. They are removed one release after the code was renamed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// What happened, for people.
    pub message: String,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// What the guard found, when that is why (`secret_found`, `decision_needed`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub findings: Vec<Finding>,
    /// Paths that cannot be merged, when that is why (`merge_conflicts`); at most 1,000.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conflicts: Vec<MergeConflict>,
    /// The id of the request, as in `X-Request-Id` and in the server's log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
}

/// An error with all its causes, in one line. A cause that the text before it contains is left out: transparent wrappers, and some
/// libraries, repeat their causes.
#[must_use]
pub fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

/// Error codes that were renamed: the former code and the present one.
pub const RENAMED_CODES: [(&str, &str); 10] = [
    ("no_room", "insufficient_storage"),
    ("keeps_no_memory", "memory_not_supported"),
    ("holds_memory", "has_memory"),
    ("memory_too_deep", "too_many_captures"),
    ("nothing_kept", "no_snapshot"),
    ("drive_differs", "drive_mismatch"),
    ("files_unpackable", "unsupported_files"),
    ("no_such_route", "route_not_found"),
    ("too_many_at_once", "too_many_concurrent_requests"),
    ("sealed", "decryption_failed"),
];

/// The former names of an error code.
#[must_use]
pub fn former_codes(code: &str) -> Vec<String> {
    let renamed = RENAMED_CODES.iter().filter(|(_, present)| *present == code);
    renamed.map(|(former, _)| (*former).to_owned()).collect()
}

/// The present name of an error code, which may be a former name from a server of an earlier release.
#[must_use]
pub fn present_code(code: &str) -> &str {
    let renamed = RENAMED_CODES.iter().find(|(former, _)| *former == code);
    renamed.map_or(code, |(_, present)| present)
}

#[cfg(test)]
mod tests {
    use std::fmt;

    use super::{RENAMED_CODES, error_chain, former_codes, present_code};

    #[derive(Debug)]
    struct Layered(&'static str, Option<Box<Layered>>);

    impl fmt::Display for Layered {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }
    }

    impl std::error::Error for Layered {
        fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
            self.1.as_deref().map(|cause| cause as _)
        }
    }

    #[test]
    fn causes_are_named_once() {
        let of = |texts: &[&'static str]| {
            let wrap = |cause, text: &&'static str| Some(Box::new(Layered(text, cause)));
            error_chain(&*texts.iter().rev().fold(None, wrap).unwrap())
        };
        assert_eq!(of(&["cannot start"]), "cannot start");
        assert_eq!(of(&["cannot start", "no disk", "EIO"]), "cannot start: no disk: EIO");
        assert_eq!(of(&["no disk", "no disk", "EIO"]), "no disk: EIO", "a transparent wrapper");
        assert_eq!(of(&["failed (EIO) twice", "EIO"]), "failed (EIO) twice");
    }

    #[test]
    fn renamed_codes_are_found_by_either_name() {
        assert_eq!(former_codes("insufficient_storage"), ["no_room"]);
        assert_eq!(former_codes("invalid"), Vec::<String>::new());
        assert_eq!(present_code("no_room"), "insufficient_storage");
        assert_eq!(present_code("invalid"), "invalid");
        for (former, present) in RENAMED_CODES {
            assert_eq!(present_code(present), present, "`{former}` was renamed to a former code");
        }
    }
}
