//! Names that were probably mistyped: says which one was meant.

use std::time::Duration;

use sandkeep_client::{Error, ListSandboxes};

use super::Context;
use crate::args::Global;
use crate::failure::Failure;

/// How long the server may take to tell the names.
const DEADLINE: Duration = Duration::from_secs(2);
/// How many names are looked at.
const MOST: usize = 2000;

/// Adds to the failure of a command that named no sandbox which one may have been meant.
pub(super) async fn explained(global: &Global, failure: Failure) -> Failure {
    let Failure::Client(Error::Api { code, message, .. }) = &failure else { return failure };
    let Some(wanted) = quoted(message).filter(|_| code == "sandbox_not_found") else {
        return failure;
    };
    match tokio::time::timeout(DEADLINE, nearest(global, wanted)).await {
        Ok(Some(name)) => failure
            .with_client_hint(format!("did you mean `{name}`? `keep ls` lists all sandboxes")),
        _ => failure,
    }
}

async fn nearest(global: &Global, wanted: &str) -> Option<String> {
    let context = Context::new(global).ok()?;
    let all = context.client.sandboxes(&ListSandboxes::default()).collect(Some(MOST)).await.ok()?;
    let near = all.into_iter().map(|sandbox| (distance(wanted, &sandbox.name), sandbox.name));
    let (_, name) = near.filter(|(distance, _)| *distance <= tolerance(wanted)).min()?;
    Some(name)
}

fn quoted(message: &str) -> Option<&str> {
    message.split('`').nth(1)
}

/// How many mistakes a name may have and still be meant.
fn tolerance(wanted: &str) -> usize {
    match wanted.chars().count() {
        0..=2 => 0,
        3..=5 => 1,
        _ => 2,
    }
}

/// How many letters have to be added, left out, replaced or swapped with the next.
fn distance(one: &str, other: &str) -> usize {
    let (one, other): (Vec<char>, Vec<char>) = (one.chars().collect(), other.chars().collect());
    let mut rows: Vec<Vec<usize>> = vec![(0..=other.len()).collect()];
    for i in 1..=one.len() {
        let mut row = vec![i];
        for j in 1..=other.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(one[i - 1] != other[j - 1]);
            let mut least = replaced.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && one[i - 1] == other[j - 2] && one[i - 2] == other[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[one.len()][other.len()]
}

#[cfg(test)]
mod tests {
    use super::{distance, quoted, tolerance};

    #[test]
    fn slips_of_the_fingers_are_counted() {
        for (one, other, mistakes) in [
            ("my-app", "my-app", 0),
            ("my-ap", "my-app", 1),
            ("my-appp", "my-app", 1),
            ("ym-app", "my-app", 1),
            ("my_app", "my-app", 1),
            ("web", "db", 2),
            ("", "ab", 2),
        ] {
            assert_eq!(distance(one, other), mistakes, "{one} {other}");
        }
        assert!(distance("web", "db") > tolerance("web"), "another name, no slip");
        assert_eq!(quoted("no sandbox `my-ap`"), Some("my-ap"));
        assert_eq!(quoted("nothing"), None);
    }
}
