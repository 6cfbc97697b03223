//! An approval: a question that holds an effect until somebody answers.
//!
//! `pending` is the only status that changes, and it changes once. What counts is [`Approval::answer`]: the
//! answer that was given, or the default of one that expired.

use serde::{Deserialize, Serialize};

use super::run::RunSandbox;
use super::{
    ApprovalAnswer, ApprovalId, ApprovalPolicy, ApprovalSource, ApprovalStatus, ApprovalSubject,
    BadConfig, KeyId, Name, RunId, Span, Timestamp,
};

/// How many patterns a list may have.
const MOST_PATTERNS: usize = 64;
/// How long a pattern may be.
const LONGEST_PATTERN: usize = 512;
/// How long an approval may wait.
pub const LONGEST_WAIT: Span = Span::days(30);
/// How long it waits if nobody says.
pub const USUAL_WAIT: Span = Span::seconds(3600);

/// An approval.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Approval {
    /// [`FORMAT`](super::FORMAT).
    pub format: u32,
    /// Its id.
    pub id: ApprovalId,
    /// The project it belongs to.
    pub project: Name,
    /// The sandbox it is about.
    pub sandbox: RunSandbox,
    /// The run it belongs to.
    pub run: Option<RunId>,
    /// Who asks.
    pub source: ApprovalSource,
    /// What is held.
    pub subject: ApprovalSubject,
    /// The question.
    pub question: String,
    /// What there is to know before answering.
    pub context: String,
    /// Its status.
    pub status: ApprovalStatus,
    /// The answer that counts when it expires.
    pub default: Option<ApprovalAnswer>,
    /// The key that asked.
    pub asked_by: Option<KeyId>,
    /// When.
    pub asked_at: Timestamp,
    /// When it expires.
    pub expires_at: Timestamp,
    /// The key that answered.
    pub answered_by: Option<KeyId>,
    /// When, or when it expired.
    pub answered_at: Option<Timestamp>,
    /// What was said about it.
    pub comment: String,
    /// What the agent inside knows the question by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_question: Option<String>,
}

impl Approval {
    /// The answer that counts; `None` while it is pending, and of one that expired without a default.
    #[must_use]
    pub fn answer(&self) -> Option<ApprovalAnswer> {
        match self.status {
            ApprovalStatus::Pending => None,
            ApprovalStatus::Approved => Some(ApprovalAnswer::Approve),
            ApprovalStatus::Denied => Some(ApprovalAnswer::Deny),
            ApprovalStatus::Expired => self.default,
        }
    }

    /// Whether it waits for an answer.
    #[must_use]
    pub fn is_pending(&self) -> bool {
        self.status == ApprovalStatus::Pending
    }

    /// Whether what it holds is a request, which ends with the server.
    #[must_use]
    pub fn holds_a_request(&self) -> bool {
        matches!(
            self.subject,
            ApprovalSubject::Command | ApprovalSubject::Host | ApprovalSubject::Secret
        )
    }
}

/// Checks patterns of command lines.
///
/// # Errors
///
/// Returns [`BadConfig`] that names the field.
pub fn check_patterns(field: &'static str, patterns: &[String]) -> Result<(), BadConfig> {
    let refuse = |reason: String| BadConfig { field: field.into(), reason };
    if patterns.len() > MOST_PATTERNS {
        return Err(refuse(format!("at most {MOST_PATTERNS} patterns")));
    }
    for pattern in patterns {
        if pattern.trim().is_empty()
            || pattern.len() > LONGEST_PATTERN
            || pattern.chars().any(char::is_control)
        {
            return Err(refuse(format!(
                "a pattern has 1 to {LONGEST_PATTERN} bytes, on one line; `*` stands for any text"
            )));
        }
    }
    Ok(())
}

/// Checks a policy.
///
/// # Errors
///
/// Returns [`BadConfig`] when it is wrong.
pub fn check_approval_policy(policy: &ApprovalPolicy) -> Result<(), BadConfig> {
    check_patterns("approvals", &policy.commands)?;
    let range = Span::seconds(1)..=LONGEST_WAIT;
    if policy.expires.is_some_and(|span| !range.contains(&span)) {
        let reason = "an approval waits between 1s and 30d".to_owned();
        return Err(BadConfig { field: "approvals".into(), reason });
    }
    Ok(())
}

/// The first pattern that a command line matches. The program counts with and without its directory.
#[must_use]
pub fn held_by<'a>(
    patterns: impl IntoIterator<Item = &'a String>,
    argv: &[String],
) -> Option<&'a str> {
    let (program, rest) = argv.split_first()?;
    let line = argv.join(" ");
    let base = program.rsplit('/').next().unwrap_or(program);
    let mut short = vec![base];
    short.extend(rest.iter().map(String::as_str));
    let short = short.join(" ");
    let found =
        patterns.into_iter().find(|pattern| matches(pattern, &line) || matches(pattern, &short));
    found.map(String::as_str)
}

/// Whether a text matches a pattern: `*` stands for any text, `?` for one character.
fn matches(pattern: &str, text: &str) -> bool {
    let (pattern, text): (Vec<char>, Vec<char>) =
        (pattern.chars().collect(), text.chars().collect());
    let (mut at, mut place) = (0, 0);
    // Where the last star is, and how much of the text it has taken.
    let mut star: Option<(usize, usize)> = None;
    while at < text.len() {
        match pattern.get(place) {
            Some('*') => {
                star = Some((place, at));
                place += 1;
            }
            Some(one) if *one == '?' || *one == text[at] => {
                place += 1;
                at += 1;
            }
            _ => match star {
                Some((back, taken)) => {
                    star = Some((back, taken + 1));
                    place = back + 1;
                    at = taken + 1;
                }
                None => return false,
            },
        }
    }
    pattern[place..].iter().all(|one| *one == '*')
}

#[cfg(test)]
mod tests {
    use super::{check_patterns, held_by, matches};

    #[test]
    fn patterns_match_whole_command_lines() {
        for (pattern, text, expected) in [
            ("git push*", "git push origin main", true),
            ("git push*", "git pull", false),
            ("git push", "git push origin", false),
            ("*rm -rf*", "sh -c rm -rf /srv", true),
            ("*", "", true),
            ("?", "", false),
            ("a?c", "abc", true),
            ("*a*b*c", "xxaxxbxxbxc", true),
            ("*a*b*c", "xxaxxbxxbxcd", false),
            ("a*/b", "a/x/y/b", true),
            ("ä?*", "äöü", true),
        ] {
            assert_eq!(matches(pattern, text), expected, "{pattern} {text}");
        }
    }

    #[test]
    fn the_program_counts_with_and_without_its_directory() {
        let argv = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let patterns = ["git push*".to_owned(), "/usr/bin/npm publish".to_owned()];
        assert_eq!(held_by(&patterns, &argv("/usr/bin/git push x")), Some("git push*"));
        assert_eq!(held_by(&patterns, &argv("/usr/bin/npm publish")), Some("/usr/bin/npm publish"));
        assert_eq!(held_by(&patterns, &argv("npm publish")), None);
        // What a shell is told is text like any other, and what it starts is not seen.
        assert_eq!(held_by(&patterns, &argv("sh -c git push")), None);
        assert_eq!(
            held_by(&["*git push*".to_owned()], &argv("sh -c git push")),
            Some("*git push*")
        );
        assert_eq!(held_by(&patterns, &[]), None);
    }

    #[test]
    fn many_stars_take_no_time() {
        let pattern = "*a".repeat(250);
        assert!(!matches(&pattern, &"ab".repeat(20_000)));
    }

    #[test]
    fn bad_patterns_are_refused() {
        assert!(check_patterns("approve", &["git *".to_owned()]).is_ok());
        for bad in ["", " ", "a\nb", &"x".repeat(513)] {
            assert!(check_patterns("approve", &[bad.to_owned()]).is_err(), "{bad}");
        }
        assert!(check_patterns("approve", &vec!["x".to_owned(); 65]).is_err());
    }
}
