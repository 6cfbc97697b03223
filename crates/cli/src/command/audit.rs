//! `keep audit`: shows who did what, follows it, and verifies that nothing of it was changed.

use std::path::Path;

use sandkeep_client::AuditQuery;
use sandkeep_client::types::{AuditEntry, AuditVerification};
use sandkeep_core::model::{AuditChain, Name};
use sandkeep_core::store::{AuditKey, AuditReport, audit_chains, verify_audit};
use serde::Serialize;

use super::Context;
use crate::args::{AuditArgs, AuditCommand, AuditFilterArgs, Global};
use crate::failure::Failure;
use crate::locate;
use crate::screen::{Paint, Screen};

/// How far back a list goes by itself.
const LIST_SINCE: &str = "24h";

pub(super) async fn audit(global: &Global, args: AuditArgs) -> Result<(), Failure> {
    match args.command {
        None => entries(&Context::new(global)?, args.filter).await,
        Some(AuditCommand::Verify { host, expect, offline: true }) => {
            offline(global, host, expect.as_deref())
        }
        Some(AuditCommand::Verify { host, expect, offline: false }) => {
            let context = Context::new(global)?;
            let found = context.client.verify_audit(host, expect.as_deref()).await?;
            told(context.screen, &[found])
        }
    }
}

async fn entries(context: &Context, args: AuditFilterArgs) -> Result<(), Failure> {
    let since = match args.follow {
        false => args.since.or_else(|| Some(LIST_SINCE.to_owned())),
        true => args.since,
    };
    let AuditFilterArgs { follow, until, actor, target, action, host, .. } = args;
    let query = AuditQuery { since, until, actor, target, action, host };
    let screen = context.screen;
    let show = |entry: &AuditEntry| match screen.json {
        true => screen.json_line(entry),
        false => screen.text(&line(screen.paint, entry)),
    };
    if follow {
        let mut found = context.client.follow_audit(query).await?;
        loop {
            show(&found.next().await?)?;
        }
    }
    let mut pages = context.client.audit(query);
    while let Some(page) = pages.next().await? {
        page.items.iter().try_for_each(show)?;
    }
    Ok(())
}

/// Verifies the chains of a data directory. A server may have it open.
fn offline(global: &Global, host: bool, expect: Option<&str>) -> Result<(), Failure> {
    let data = global.data.clone().unwrap_or_else(locate::default_data);
    let cannot = |error| {
        Failure::caused(format!("cannot read the audit log in `{}`", data.display()), error)
    };
    let Some(key) = AuditKey::read(&data).map_err(cannot)? else {
        let message = format!("`{}` has no `audit.key`", data.display());
        return Err(Failure::here(message)
            .with_hint("name the data directory with --data or SANDKEEP_DATA; a directory whose key is lost cannot be verified"));
    };
    let chains = chains(global, &data, host)?;
    let expect = expect.map(noted).transpose()?;
    if expect.is_some() && chains.len() != 1 {
        return Err(Failure::here("`--expect` is about one log")
            .with_hint("say which with --project or --host"));
    }
    let audit = data.join("audit");
    let mut found = Vec::new();
    for chain in chains {
        let report = verify_audit(&audit, &chain, &key, expect).map_err(cannot)?;
        found.push(verification(report));
    }
    told(Screen::new(global.json), &found)
}

fn chains(global: &Global, data: &Path, host: bool) -> Result<Vec<AuditChain>, Failure> {
    if host {
        return Ok(vec![AuditChain::Host]);
    }
    if let Some(project) = &global.project {
        let name: Name = project.parse().map_err(|error| {
            Failure::caused(format!("`{project}` is not a project name"), error)
        })?;
        return Ok(vec![AuditChain::Project(name)]);
    }
    let cannot = |error| Failure::caused("cannot list the audit log", error);
    audit_chains(&data.join("audit")).map_err(cannot)
}

/// An entry that somebody noted.
fn noted(text: &str) -> Result<(u64, &str), Failure> {
    let parts = text.split_once(':').and_then(|(seq, hash)| Some((seq.parse().ok()?, hash)));
    let parts = parts.filter(|(_, hash)| hash.len() >= 8);
    parts.ok_or_else(|| {
        Failure::here(format!("`{text}` is not SEQ:HASH"))
            .with_hint("`keep audit verify` prints both; the first 8 digits of the hash are enough")
    })
}

fn verification(report: AuditReport) -> AuditVerification {
    AuditVerification {
        intact: report.found == 0,
        findings: report.findings.iter().map(ToString::to_string).collect(),
        chain: report.chain,
        entries: report.entries,
        first: report.first,
        last: report.last,
        last_hash: report.last_hash,
        signed: report.signed,
        found: report.found,
    }
}

#[derive(Debug, Serialize)]
struct Logs<'a> {
    logs: &'a [AuditVerification],
    intact: bool,
}

fn told(screen: Screen, logs: &[AuditVerification]) -> Result<(), Failure> {
    let intact = logs.iter().all(|one| one.intact);
    screen.answer(&Logs { logs, intact }, |Logs { logs, .. }| {
        logs.iter().map(|one| written(screen.paint, one)).collect()
    })?;
    if intact { Ok(()) } else { Err(Failure::AuditChanged) }
}

fn written(paint: Paint, one: &AuditVerification) -> String {
    let AuditVerification { chain, entries, first, last, last_hash, signed, found, .. } = one;
    let mut text = format!("{}: {entries} entries", paint.bold(chain));
    if *entries > 0 {
        text.push_str(&format!(", {first} to {last}, last {last}:{last_hash}"));
    }
    if last > signed {
        text.push_str(&format!(", {} not signed yet", last - signed));
    }
    text.push('\n');
    for finding in &one.findings {
        text.push_str(&format!("{}  {finding}\n", paint.red("PROBLEM ")));
    }
    let more = found.saturating_sub(one.findings.len() as u64);
    if more > 0 {
        text.push_str(&format!("{}  and {more} more\n", paint.red("PROBLEM ")));
    }
    if *found == 0 {
        text.push_str("nothing was removed, changed or reordered\n");
    }
    text
}

/// An entry as one line: when, who, what, to what, how it ended, details.
fn line(paint: Paint, entry: &AuditEntry) -> String {
    let who = entry.label.as_ref().or(entry.key.as_ref()).unwrap_or(&entry.actor);
    let action = format!("{:<18}", entry.action);
    let (action, ended) = match entry.outcome.as_str() {
        "done" => (paint.cyan(&action), String::new()),
        other => {
            let code = entry.code.as_deref().map(|code| format!(": {code}")).unwrap_or_default();
            (paint.red(&action), format!("  {}", paint.red(&format!("{other}{code}"))))
        }
    };
    let target = entry.target.as_deref().unwrap_or("-");
    let from = entry.address.as_deref().unwrap_or(&entry.front);
    let details: Vec<String> =
        entry.detail.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let details = details.join(" ");
    let text = format!("{}  {action}  {target:<24}  {who}@{from}{ended}  {details}", entry.at);
    // What a guest or a caller chose must not move the cursor or change colours.
    let chosen = [target, who, from, &details].iter().any(|text| text.contains('\x1b'));
    let is_kept = |c: char| !c.is_control() || (c == '\x1b' && !chosen);
    let text: String = text.trim_end().chars().map(|c| if is_kept(c) { c } else { ' ' }).collect();
    format!("{text}\n")
}

#[cfg(test)]
mod tests {
    use sandkeep_client::types::AuditEntry;
    use sandkeep_core::model::{AuditChain, AuditRecord};
    use sandkeep_core::store::{AuditKey, AuditWriter};

    use super::{line, noted, offline};
    use crate::args::Global;
    use crate::failure::Failure;
    use crate::screen::Paint;

    fn entry() -> AuditEntry {
        AuditEntry {
            seq: 1,
            at: "2026-01-01T00:00:00Z".to_owned(),
            action: "sandbox.stop".to_owned(),
            actor: "key".to_owned(),
            key: Some("key-1".to_owned()),
            label: Some("ci".to_owned()),
            front: "api".to_owned(),
            address: Some("192.0.2.7".to_owned()),
            project: Some("default".to_owned()),
            target: Some("sandbox/my-app".to_owned()),
            outcome: "done".to_owned(),
            status: Some(200),
            code: None,
            detail: Default::default(),
            prev: String::new(),
            hash: String::new(),
        }
    }

    #[test]
    fn an_entry_is_one_line_whatever_it_has() {
        let plain = line(Paint::plain(), &entry());
        let expected =
            "2026-01-01T00:00:00Z  sandbox.stop        sandbox/my-app            ci@192.0.2.7\n";
        assert_eq!(plain, expected);
        let mut hostile = entry();
        hostile.outcome = "denied".to_owned();
        hostile.code = Some("forbidden".to_owned());
        hostile.detail.insert("path".to_owned(), "/x\u{1b}[2J\r\ny".to_owned());
        let text = line(Paint::plain(), &hostile);
        let text = text.strip_suffix('\n').unwrap();
        assert!(text.contains("denied: forbidden"), "{text}");
        assert!(!text.contains(|c: char| c.is_control()), "{text:?}");
    }

    #[test]
    fn a_noted_entry_has_a_number_and_a_hash() {
        assert_eq!(noted("7:0123456789").unwrap(), (7, "0123456789"));
        for bad in ["", "7", "7:", "7:0123", "x:0123456789"] {
            assert!(noted(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_data_directory_is_verified_without_a_server() {
        let data = tempfile::tempdir().unwrap();
        let global = Global {
            json: true,
            url: None,
            key: None,
            ca: None,
            project: None,
            data: Some(data.path().to_owned()),
        };
        let missing = offline(&global, false, None).unwrap_err();
        assert!(missing.to_string().contains("audit.key"), "{missing}");
        let (key, _) = AuditKey::open(data.path()).unwrap();
        let mut writer = AuditWriter::new(data.path().join("audit"), key, 1 << 20);
        for project in ["a", "b"] {
            let project = project.parse().unwrap();
            for number in 0..3 {
                let target = Some(format!("thing/{number}"));
                let record = AuditRecord::by_system(Some(&project), "test.done", target);
                writer.append(&AuditChain::Project(project.clone()), &[record]).unwrap();
            }
        }
        writer.flush().unwrap();
        assert!(offline(&global, false, None).is_ok());
        let path = data.path().join("audit/projects/b/00000000000000000001.jsonl");
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replace("thing/1", "thing/9")).unwrap();
        let changed = |found| matches!(found, Err(Failure::AuditChanged));
        assert!(changed(offline(&global, false, None)));
        let only = |project: &str| Global { project: Some(project.to_owned()), ..global.clone() };
        assert!(offline(&only("a"), false, None).is_ok());
        assert!(changed(offline(&only("b"), false, None)));
        assert!(changed(offline(&only("a"), false, Some("2:0123456789"))));
        assert!(offline(&global, false, Some("2:0123456789")).is_err(), "which log?");
        assert!(offline(&only("No Name"), false, None).is_err());
    }
}
