//! An approval: a question that holds an effect until somebody answers.
//!
//! `pending` is the only status that changes, and it changes once. What counts is [`Approval::answer`]: the
//! answer that was given, or the default of one that expired.

use std::collections::HashMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::model::governance::run::RunSandbox;
use crate::model::{
    ApprovalAnswer, ApprovalId, ApprovalPolicy, ApprovalSource, ApprovalStatus, ApprovalSubject,
    BadConfig, BadId, DomainPattern, KeyId, Name, RunId, SecretName, Span, Timestamp, WebhookId,
};

/// What the text of a webhook that answered begins with.
const WEBHOOK: &str = "webhook:";

/// How many patterns a list may have.
const MOST_PATTERNS: usize = 64;
/// How long a pattern may be.
const LONGEST_PATTERN: usize = 512;
/// How long a command line may be that is compared with patterns.
const LONGEST_LINE: usize = 64 << 10;
/// How long an approval may wait.
pub const LONGEST_WAIT: Span = Span::days(30);
/// How long it waits by default.
pub const USUAL_WAIT: Span = Span::seconds(3600);

/// Who answers an approval. As text: the id of a key, or `webhook:` and the id of a webhook.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Answerer {
    /// A caller with a key.
    Key(KeyId),
    /// The receiver of a webhook, with a link that was sent to it.
    Webhook(WebhookId),
}

impl From<Answerer> for String {
    fn from(who: Answerer) -> Self {
        match who {
            Answerer::Key(key) => key.into(),
            Answerer::Webhook(webhook) => format!("{WEBHOOK}{webhook}"),
        }
    }
}

impl TryFrom<String> for Answerer {
    type Error = BadId;

    fn try_from(text: String) -> Result<Self, BadId> {
        match text.strip_prefix(WEBHOOK) {
            Some(webhook) => webhook.parse().map(Self::Webhook),
            None => text.parse().map(Self::Key),
        }
    }
}

/// An approval.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Approval {
    /// [`FORMAT`](crate::model::FORMAT).
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
    /// What else the answer decides; absent if it decides one request alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
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
    /// Who answered.
    pub answered_by: Option<Answerer>,
    /// When, or when it expired.
    pub answered_at: Option<Timestamp>,
    /// The comment of the decision.
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
        let one = matches!(
            self.subject,
            ApprovalSubject::Command | ApprovalSubject::Host | ApprovalSubject::Secret
        );
        one && self.target.is_none()
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

/// Checks hosts that need no approval.
///
/// # Errors
///
/// Returns [`BadConfig`] that names the field.
pub fn check_hosts(field: &'static str, hosts: &[String]) -> Result<(), BadConfig> {
    let refuse = |reason: String| BadConfig { field: field.into(), reason };
    if hosts.len() > MOST_PATTERNS {
        return Err(refuse(format!("at most {MOST_PATTERNS} known hosts")));
    }
    for host in hosts {
        if host.parse::<IpAddr>().is_err() {
            host.parse::<DomainPattern>().map_err(|error| refuse(error.to_string()))?;
        }
    }
    Ok(())
}

/// Checks names of secrets whose use is held.
///
/// # Errors
///
/// Returns [`BadConfig`] that names the field.
pub fn check_secrets(field: &'static str, secrets: &[String]) -> Result<(), BadConfig> {
    let refuse = |reason: String| BadConfig { field: field.into(), reason };
    if secrets.len() > MOST_PATTERNS {
        return Err(refuse(format!("at most {MOST_PATTERNS} secrets")));
    }
    for secret in secrets {
        secret.parse::<SecretName>().map_err(|error| refuse(error.to_string()))?;
    }
    Ok(())
}

/// Whether a host needs no approval: a name in lower case, or an address.
#[must_use]
pub fn is_known(hosts: &[String], host: &str) -> bool {
    let is = |pattern: &String| match (pattern.parse::<IpAddr>(), host.parse::<IpAddr>()) {
        (Ok(known), Ok(host)) => known == host,
        (Err(_), Err(_)) => {
            pattern.parse::<DomainPattern>().is_ok_and(|pattern| pattern.matches(host))
        }
        _ => false,
    };
    hosts.iter().any(is)
}

/// Checks a policy.
///
/// # Errors
///
/// Returns [`BadConfig`] when it is wrong.
pub fn check_approval_policy(policy: &ApprovalPolicy) -> Result<(), BadConfig> {
    check_patterns("approvals", &policy.commands)?;
    check_hosts("approvals", &policy.known_hosts)?;
    check_secrets("approvals", &policy.secrets)?;
    let range = Span::seconds(1)..=LONGEST_WAIT;
    if policy.expires.is_some_and(|span| !range.contains(&span)) {
        let reason = "an approval waits between 1s and 30d".to_owned();
        return Err(BadConfig { field: "approvals".into(), reason });
    }
    Ok(())
}

/// Whether a command line is longer than what is compared with patterns.
#[must_use]
pub fn is_too_long(argv: &[String]) -> bool {
    let spaces = argv.len().saturating_sub(1);
    argv.iter().map(String::len).sum::<usize>() + spaces > LONGEST_LINE
}

/// The first pattern that a command line matches. The program counts with and without its directory. A line that
/// [is too long](is_too_long) matches every pattern.
#[must_use]
pub fn held_by<'a>(
    patterns: impl IntoIterator<Item = &'a String>,
    argv: &[String],
) -> Option<&'a str> {
    let mut patterns = patterns.into_iter().map(String::as_str);
    let program = argv.first()?;
    if is_too_long(argv) {
        return patterns.next();
    }
    let line = argv.join(" ");
    // The directory is at the beginning of the line.
    let directory = program.rfind('/').map_or(0, |at| at + 1);
    let short = &line[directory..];
    patterns.find(|pattern| matches(pattern, &line) || (directory > 0 && matches(pattern, short)))
}

/// Whether a text matches a pattern: `*` stands for any text, `?` for one character. The pieces between the stars are looked
/// for one after the other, so it takes time in proportion to the text, whatever the pattern is.
fn matches(pattern: &str, text: &str) -> bool {
    let Some((first, others)) = pattern.split_once('*') else {
        return begins(pattern, text) == Some(text.len());
    };
    let (between, last) = others.rsplit_once('*').unwrap_or(("", others));
    let Some(mut left) = begins(first, text).map(|end| &text[end..]) else { return false };
    for piece in between.split('*').filter(|piece| !piece.is_empty()) {
        match found(piece, left) {
            Some(end) => left = &left[end..],
            None => return false,
        }
    }
    let Some(count) = last.chars().count().checked_sub(1) else { return true };
    left.char_indices().nth_back(count).is_some_and(|(at, _)| begins(last, &left[at..]).is_some())
}

/// Where a piece ends that a text begins with.
fn begins(piece: &str, text: &str) -> Option<usize> {
    let mut left = text.chars();
    for wanted in piece.chars() {
        let there = left.next()?;
        if wanted != '?' && wanted != there {
            return None;
        }
    }
    Some(text.len() - left.as_str().len())
}

/// Where a piece ends the first time that it is in a text.
fn found(piece: &str, text: &str) -> Option<usize> {
    if !piece.contains('?') {
        return text.find(piece).map(|at| at + piece.len());
    }
    // One bit for each beginning of the piece: whether what was read ends with it.
    let count = piece.chars().count();
    let words = count.div_ceil(64);
    let mut any = vec![0_u64; words];
    let mut fits: HashMap<char, Vec<u64>> = HashMap::new();
    for (place, one) in piece.chars().enumerate() {
        let bits = match one {
            '?' => &mut any,
            one => fits.entry(one).or_insert_with(|| vec![0; words]),
        };
        bits[place / 64] |= 1 << (place % 64);
    }
    let mut ends = vec![0_u64; words];
    for (at, one) in text.char_indices() {
        let fit = fits.get(&one);
        let mut carry = 1;
        for (place, word) in ends.iter_mut().enumerate() {
            let next = *word >> 63;
            *word = ((*word << 1) | carry) & (any[place] | fit.map_or(0, |fit| fit[place]));
            carry = next;
        }
        if (ends[(count - 1) / 64] >> ((count - 1) % 64)) & 1 == 1 {
            return Some(at + one.len_utf8());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::{
        LONGEST_LINE, check_hosts, check_patterns, check_secrets, held_by, is_known, is_too_long,
        matches,
    };

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
            ("*?b*", "äb", true),
            ("*?b*", "b", false),
            ("*a?c*e", "xabxaöcde", true),
            ("*a?c*e", "xabxaöcd", false),
            ("ab*bc", "abc", false),
            ("ab*bc", "abbc", true),
            ("*öü", "ü", false),
            ("**", "", true),
            ("", "", true),
            ("", "a", false),
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
        // What a shell is given is text like any other, and what it starts is not seen.
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
    fn a_pattern_that_almost_matches_everywhere_takes_no_time() {
        let line = ["a".repeat(LONGEST_LINE)];
        let tail = "a".repeat(250);
        let bad = [format!("*{tail}{tail}b"), format!("*{tail}b*"), format!("*?{tail}b*")];
        let patterns: Vec<String> = bad.into_iter().cycle().take(64).collect();
        let begun = Instant::now();
        assert_eq!(held_by(&patterns, &line), None);
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    }

    #[test]
    fn a_piece_with_gaps_may_be_long() {
        let piece = format!("?{}", "ab".repeat(200));
        assert!(matches(&format!("*{piece}*"), &format!("xx{}x", "ab".repeat(200))));
        assert!(!matches(&format!("*{piece}*"), &format!("xx{}x", "ab".repeat(199))));
    }

    #[test]
    fn a_line_that_is_too_long_is_held() {
        let longest = ["x".to_owned(), "y".repeat(LONGEST_LINE - 2)];
        let longer = ["x".to_owned(), "y".repeat(LONGEST_LINE - 1)];
        let patterns = ["git push*".to_owned()];
        assert!(!is_too_long(&longest));
        assert_eq!(held_by(&patterns, &longest), None);
        assert_eq!(held_by(&patterns, &longer), Some("git push*"));
        assert_eq!(held_by(&[], &longer), None);
    }

    #[test]
    fn known_hosts_are_names_patterns_and_addresses() {
        let known = ["github.com", "*.example.org", "192.0.2.1", "2001:db8::1"].map(str::to_owned);
        check_hosts("x", &known).unwrap();
        for host in ["github.com", "packages.example.org", "192.0.2.1", "2001:db8:0::1"] {
            assert!(is_known(&known, host), "{host}");
        }
        for host in ["api.github.com", "evil-example.org", "192.0.2.2", "com"] {
            assert!(!is_known(&known, host), "{host}");
        }
        for bad in ["", "a b", "http://x", "192.0.2.0/24"] {
            assert!(check_hosts("x", &[bad.to_owned()]).is_err(), "{bad}");
        }
        assert!(check_secrets("x", &["API_KEY".to_owned()]).is_ok());
        assert!(check_secrets("x", &["API-KEY".to_owned()]).is_err());
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
