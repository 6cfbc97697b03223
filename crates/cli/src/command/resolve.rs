//! What people call things by: the beginning or end of an id, a label, `SANDBOX@LABEL`.
//!
//! The server wants whole ids. Whatever is not one is looked for among those that there are; what fits several is refused, with
//! the choices. Ids of one kind have the same length, and begin with the time at which they were made: those made within the
//! same minute differ at the end, so a unique end does as well.

use sandkeep_client::types::{Key, Snapshot};

use super::Context;
use crate::failure::Failure;

/// How long ids are behind their prefix.
const ID: usize = 26;
/// Fewer letters without the prefix are more likely a mistake than part of an id.
const SHORTEST: usize = 3;

/// Something with an id, and a label people gave it.
struct Candidate<'a> {
    id: &'a str,
    label: Option<&'a str>,
}

/// The id of the command that `wanted` means.
pub(super) async fn command(
    context: &Context,
    sandbox: &str,
    wanted: &str,
) -> Result<String, Failure> {
    if is_id("cmd-", wanted) {
        return Ok(wanted.to_owned());
    }
    let all = context.client.commands(sandbox, Some(1000)).collect(None).await?;
    let candidates = all.iter().map(|one| Candidate { id: &one.id, label: None });
    let advice = format!("`keep ps {sandbox} -a` lists its commands");
    choose("command", "cmd-", wanted, candidates, &advice)
}

/// The id of the snapshot that `wanted` means: of one sandbox, if one is given.
pub(super) async fn snapshot(
    context: &Context,
    sandbox: Option<&str>,
    wanted: &str,
) -> Result<String, Failure> {
    if is_id("snp-", wanted) {
        return Ok(wanted.to_owned());
    }
    let (sandbox, wanted) = match wanted.split_once('@') {
        Some((name, label)) if !name.is_empty() => (Some(name), label),
        _ => (sandbox, wanted),
    };
    let all = context.client.snapshots(sandbox).collect(None).await?;
    let advice = match sandbox {
        Some(name) => format!("`keep snapshot ls {name}` lists them"),
        None => "`keep snapshot ls` lists them".to_owned(),
    };
    // Within a sandbox a label means the newest that has it, as in `keep diff`; they come newest first.
    let labelled = |one: &&Snapshot| one.label.as_deref() == Some(wanted);
    if let Some(newest) = sandbox.and_then(|_| all.iter().find(labelled)) {
        return Ok(newest.id.clone());
    }
    if let (Some(_), "saved", Some(newest)) = (sandbox, wanted, all.first()) {
        return Ok(newest.id.clone());
    }
    let candidates = all.iter().map(|one| Candidate { id: &one.id, label: one.label.as_deref() });
    choose("snapshot", "snp-", wanted, candidates, &advice)
}

/// The id of the snapshot that was named, or of the newest of all.
pub(super) async fn snapshot_or_last(
    context: &Context,
    sandbox: Option<&str>,
    wanted: Option<&str>,
) -> Result<String, Failure> {
    if let Some(wanted) = wanted {
        return snapshot(context, sandbox, wanted).await;
    }
    let newest = context.client.snapshots(sandbox).collect(Some(1)).await?.pop();
    let newest = newest.ok_or_else(|| {
        Failure::here("there are no snapshots yet")
            .with_hint("`keep checkpoint NAME` takes one, and so does every stop")
    })?;
    Ok(newest.id)
}

/// A point of `keep diff`, with a whole id if it is a snapshot's.
pub(super) async fn point(context: &Context, point: String) -> Result<String, Failure> {
    match point.starts_with("snp-") {
        true => snapshot(context, None, &point).await,
        false => Ok(point),
    }
}

/// The id of the key that `wanted` means.
pub(super) fn key(keys: &[Key], wanted: &str) -> Result<String, Failure> {
    let candidates = keys.iter().map(|key| Candidate { id: &key.id, label: Some(&key.label) });
    choose("key", "key-", wanted, candidates, "`keep key ls` lists them")
}

fn is_id(prefix: &str, text: &str) -> bool {
    text.strip_prefix(prefix).is_some_and(|tail| tail.len() == ID)
}

fn choose<'a>(
    kind: &str,
    prefix: &str,
    wanted: &str,
    candidates: impl Iterator<Item = Candidate<'a>>,
    advice: &str,
) -> Result<String, Failure> {
    let bare = wanted.strip_prefix(prefix);
    let tail = bare.unwrap_or(wanted).to_ascii_lowercase();
    let shortest = if bare.is_some() { 1 } else { SHORTEST };
    let fits = |one: &Candidate<'_>| {
        let own = one.id.strip_prefix(prefix).unwrap_or(one.id);
        one.label == Some(wanted)
            || tail.len() >= shortest && (own.starts_with(&tail) || own.ends_with(&tail))
    };
    let all: Vec<Candidate<'a>> = candidates.collect();
    let found: Vec<&Candidate<'a>> = match all.iter().find(|one| one.id == wanted) {
        Some(exact) => vec![exact],
        None => all.iter().filter(|one| fits(one)).collect(),
    };
    match found.as_slice() {
        [one] => Ok(one.id.to_owned()),
        [] => Err(Failure::not_found(format!("no {kind} `{wanted}`"), advice)),
        several => {
            let named: Vec<&str> = several.iter().take(5).map(|one| one.id).collect();
            let more = if several.len() > named.len() { ", ..." } else { "" };
            let (count, named) = (several.len(), named.join(", "));
            Err(Failure::here(format!("`{wanted}` fits {count} {kind}s: {named}{more}"))
                .with_hint(format!("write more of the id, or its end; {advice}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Candidate, choose, is_id};

    const IDS: [&str; 3] = [
        "snp-01j8z3k5m6n7p8q9r0s1t2v3w4",
        "snp-01j8z3k5m6n7p8q9r0s1t2v3x5",
        "snp-02j8z3k5m6n7p8q9r0s1t2v3y6",
    ];

    fn chosen(wanted: &str) -> Result<String, String> {
        let labels = [Some("green"), Some("red"), Some("red")];
        let all = IDS.iter().zip(labels).map(|(id, label)| Candidate { id, label });
        choose("snapshot", "snp-", wanted, all, "look").map_err(|error| error.to_string())
    }

    #[test]
    fn unique_beginnings_ends_and_labels_are_understood() {
        for (wanted, index) in [
            (IDS[1], 1),
            ("snp-02", 2),
            ("02j", 2),
            ("02J8", 2),
            ("3w4", 0),
            ("snp-3x5", 1),
            ("green", 0),
        ] {
            assert_eq!(chosen(wanted).as_deref(), Ok(IDS[index]), "{wanted}");
        }
    }

    #[test]
    fn what_fits_several_or_none_is_refused() {
        for (wanted, told) in [
            ("snp-01j", "fits 2 snapshots: snp-01j8z3k5m6n7p8q9r0s1t2v3w4, snp-01j8"),
            ("red", "fits 2"),
            ("blue", "no snapshot `blue`"),
            ("w4", "no snapshot `w4`"),
            ("", "no snapshot"),
            ("snp-", "no snapshot"),
        ] {
            let error = chosen(wanted).unwrap_err();
            assert!(error.contains(told), "{wanted}: {error}");
        }
    }

    #[test]
    fn whole_ids_are_not_looked_for() {
        assert!(is_id("snp-", IDS[0]));
        assert!(!is_id("snp-", "snp-01j8") && !is_id("cmd-", IDS[0]));
    }
}
