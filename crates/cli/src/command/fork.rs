//! Commands that compare forks and bring them back: `diff`, `changes`, `promote`, `pick`, `merge`,
//! `rename`, `prune`.

use std::time::Duration;

use jiff::Timestamp;
use sandkeep_client::types::{
    ChangedPath, CommandChangeList, Diff, DiffCounts, DiffEntry, DiffKind, ForkFailed, Merge,
    MergeCounts, Merged, OnConflict, PathChange, Promote, PromoteIntoDrive, Promoted,
    PromotedIntoDrive, Sandbox, State,
};
use sandkeep_client::{DiffQuery, PatchFormat};
use serde::Serialize;

use super::{Context, artifacts, bytes, conflicts_text, history, or_dash, resolve, word};
use crate::args::{
    ChangesArgs, ConflictsArg, DiffArgs, DriveDir, MergeArgs, PickArgs, PromoteArgs, PruneArgs,
    RenameArgs,
};
use crate::failure::Failure;
use crate::screen::{Paint, Table, note};
use crate::when;

pub(super) async fn diff(context: &Context, args: DiffArgs) -> Result<(), Failure> {
    if let Some(group) = &args.group {
        return compare_group(context, group, &args.paths).await;
    }
    let (from, to) = match args.points.as_slice() {
        [one] if one.contains('@') || one.starts_with("snp-") || one.starts_with("image:") => {
            let hint = "write two points, or the name of a sandbox";
            return Err(Failure::here(format!("`{one}` is compared with what?")).with_hint(hint));
        }
        [name] => (format!("{name}@base"), name.clone()),
        [from, to] => (from.clone(), to.clone()),
        _ => return Err(Failure::here("give one or two points")),
    };
    let from = resolve::point(context, from).await?;
    let to = resolve::point(context, to).await?;
    let query = DiffQuery { from, to, paths: args.paths };
    if args.patch {
        let DiffArgs { relative, binary, git_dir, .. } = args;
        let format = PatchFormat { relative, binary, git_dir };
        let mut patch = context.client.patch(&query, &format).await?;
        while let Some(piece) = patch.next().await? {
            context.screen.bytes(&piece)?;
        }
        return Ok(());
    }
    let diff = context.client.diff(&query, args.limit).await?;
    context.screen.answer(&diff, |diff| match (args.stat, args.name_only) {
        (true, _) => format!("{}\n", counts_text(&diff.counts)),
        (_, true) => diff.changes.iter().map(|one| format!("{}\n", one.path)).collect(),
        _ => diff_text(context.screen.paint, diff),
    })
}

fn diff_text(paint: Paint, diff: &Diff) -> String {
    let mut text: String = diff.changes.iter().map(|one| change_line(paint, one)).collect();
    if diff.truncated {
        text.push_str("... and more; name paths to see less at a time\n");
    }
    text.push_str(&format!("{}\n", counts_text(&diff.counts)));
    text
}

/// `M /srv/app.conf  content, mode`.
pub(super) fn change_line(paint: Paint, entry: &DiffEntry) -> String {
    let DiffEntry { path, change, old_path, what, .. } = entry;
    let (letter, path) = match (change, old_path) {
        (DiffKind::Added, _) => (paint.green("A"), path.clone()),
        (DiffKind::Removed, _) => (paint.red("D"), path.clone()),
        (DiffKind::Modified, _) => (paint.yellow("M"), path.clone()),
        (DiffKind::Renamed, Some(old)) => (paint.cyan("R"), format!("{old} -> {path}")),
        (DiffKind::Renamed, None) => (paint.cyan("R"), path.clone()),
    };
    let what: Vec<String> = what.iter().map(word).collect();
    match what.as_slice() {
        [] => format!("{letter} {path}\n"),
        what => format!("{letter} {path}{}\n", paint.dim(&format!("  {}", what.join(", ")))),
    }
}

/// `+3 ~2 -1, 1 renamed, 4.1 MiB`, or that nothing differs.
pub(super) fn counts_text(counts: &DiffCounts) -> String {
    let DiffCounts { added, removed, modified, renamed, bytes: size } = *counts;
    let signed = [('+', added), ('~', modified), ('-', removed)];
    let parts = signed.into_iter().filter(|(_, count)| *count > 0);
    let mut text: Vec<String> = Vec::new();
    let parts: Vec<String> = parts.map(|(sign, count)| format!("{sign}{count}")).collect();
    if !parts.is_empty() {
        text.push(parts.join(" "));
    }
    if renamed > 0 {
        text.push(format!("{renamed} renamed"));
    }
    if text.is_empty() {
        return "no differences".to_owned();
    }
    if size > 0 {
        text.push(bytes(size));
    }
    text.join(", ")
}

/// One fork of a group, as JSON.
#[derive(Debug, Serialize)]
struct Compared {
    sandbox: Sandbox,
    #[serde(skip_serializing_if = "Option::is_none")]
    counts: Option<DiffCounts>,
    /// Why it could not be compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

async fn compare_group(context: &Context, group: &str, paths: &[String]) -> Result<(), Failure> {
    let forks = context.client.forks(None, Some(group)).await?;
    if forks.is_empty() {
        let hint = "`keep fork NAME GROUP --count N` makes a group of forks";
        return Err(Failure::here(format!("no forks in group `{group}`")).with_hint(hint));
    }
    let mut all = Vec::new();
    for sandbox in forks {
        let from = format!("{}@base", sandbox.name);
        let query = DiffQuery { from, to: sandbox.name.clone(), paths: paths.to_vec() };
        let (counts, problem) = match context.client.diff(&query, None).await {
            Ok(diff) => (Some(diff.counts), None),
            Err(error) => (None, Some(error.to_string())),
        };
        all.push(Compared { sandbox, counts, problem });
    }
    context.screen.answer(&all, |all| {
        let mut table = Table::new(&["FORK", "STATE", "FATE", "CHANGED", "USED"]);
        for one in all {
            let counts = one.counts.as_ref().map(counts_text);
            table.row(vec![
                one.sandbox.name.clone(),
                word(one.sandbox.state),
                or_dash(fate(&one.sandbox)),
                or_dash(counts.or_else(|| one.problem.clone())),
                when::ago(&one.sandbox.used_at),
            ]);
        }
        context.screen.table(&table)
    })
}

/// The outcome of a fork: `promoted into my-app`; nothing while it is not decided.
pub(super) fn fate(sandbox: &Sandbox) -> Option<String> {
    let outcome = sandbox.outcome.as_ref()?;
    Some(format!("{} into {}", word(outcome.how), outcome.into))
}

pub(super) async fn changes(context: &Context, args: &ChangesArgs) -> Result<(), Failure> {
    let name = &args.name;
    if let Some(id) = &args.command {
        let id = resolve::command(context, name, id).await?;
        let list = context.client.command_changes(name, &id).await?;
        return context.screen.answer(&list, command_changes_text);
    }
    let query = DiffQuery { from: format!("{name}@saved"), to: name.clone(), paths: Vec::new() };
    let diff = context.client.diff(&query, None).await?;
    context.screen.answer(&diff, |diff| diff_text(context.screen.paint, diff))
}

fn command_changes_text(list: &CommandChangeList) -> String {
    let mut text = String::new();
    for ChangedPath { path, change, dir, .. } in &list.paths {
        let letter = match change {
            PathChange::Created => 'A',
            PathChange::Modified => 'M',
            PathChange::Deleted => 'D',
        };
        let slash = if *dir { "/" } else { "" };
        text.push_str(&format!("{letter} {path}{slash}\n"));
    }
    for more in &list.more {
        let count = more.created + more.modified + more.deleted;
        text.push_str(&format!("... {count} more under {}\n", more.under));
    }
    let counts = list.changes.as_ref();
    let counts = counts.map_or("what it changed is not known".to_owned(), history::shown);
    text.push_str(&format!("{counts}\n"));
    text
}

pub(super) async fn promote(context: &Context, args: &PromoteArgs) -> Result<(), Failure> {
    if let Some(out) = &args.out {
        return artifacts::take_out(context, args, out).await;
    }
    if let Some(to) = &args.to {
        return into_drive(context, args, to).await;
    }
    if !args.only.is_empty() {
        let chosen = MergeArgs {
            source: args.fork.clone(),
            into: None,
            dry_run: false,
            conflicts: ConflictsArg::Refuse,
            only: args.only.clone(),
            expect_generation: args.expect_generation,
        };
        return merge(context, chosen).await;
    }
    let request = Promote {
        expect_generation: args.expect_generation,
        delete_fork: args.rm,
        ..Promote::default()
    };
    let promoted = context.client.promote(&args.fork, &request, None).await?;
    promoted_answer(context, &args.fork, &promoted)
}

async fn into_drive(context: &Context, args: &PromoteArgs, to: &DriveDir) -> Result<(), Failure> {
    let request = PromoteIntoDrive {
        from: args.fork.clone(),
        only: args.only.clone(),
        path: to.path.clone(),
        expect_generation: args.expect_generation,
        dry_run: args.dry_run,
    };
    let promoted = context.client.promote_into_drive(&to.drive, &request).await?;
    let PromoteArgs { fork, dry_run, .. } = args;
    context.screen.answer(&promoted, |promoted| {
        let PromotedIntoDrive { drive, counts, conflicts, changes, truncated, .. } = promoted;
        let mut text = String::new();
        if *dry_run {
            let paint = context.screen.paint;
            text.extend(changes.iter().map(|one| change_line(paint, one)));
            text.push_str(&conflicts_text(conflicts));
        }
        if *dry_run && *truncated {
            text.push_str("... and more\n");
        }
        let (name, said) = (&drive.name, merge_counts_text(counts));
        let is_nothing = *counts == MergeCounts::default();
        text + &match (is_nothing, *dry_run) {
            (true, _) => format!("drive {name}  has these files of {fork} already\n"),
            (_, true) => format!("drive {name}  would get from {fork}: {said}\n"),
            (_, false) => {
                format!(
                    "drive {name}  has files of {fork}, generation {}: {said}\n",
                    drive.generation
                )
            }
        }
    })
}

pub(super) async fn pick(context: &Context, args: &PickArgs) -> Result<(), Failure> {
    let request = Promote {
        expect_generation: args.expect_generation,
        delete_group: true,
        ..Promote::default()
    };
    let promoted = context.client.promote(&args.fork, &request, None).await?;
    promoted_answer(context, &args.fork, &promoted)
}

fn promoted_answer(context: &Context, fork: &str, promoted: &Promoted) -> Result<(), Failure> {
    context.screen.answer(promoted, |promoted| {
        let Sandbox { name, generation, .. } = &promoted.sandbox;
        let mut text = format!("{name}  promoted from {fork}, generation {generation}\n");
        if let Some(before) = &promoted.before {
            text.push_str(&format!("to undo: keep rollback {name} {before}\n"));
        }
        if !promoted.deleted.is_empty() {
            let deleted = promoted.deleted.join(", ");
            text.push_str(&format!("deleted: {deleted} (`keep trash ls` has them for a while)\n"));
        }
        text
    })?;
    told_failed(context, &promoted.failed, promoted.deleted.len())
}

/// Reports which forks were not deleted.
fn told_failed(context: &Context, failed: &[ForkFailed], deleted: usize) -> Result<(), Failure> {
    if failed.is_empty() {
        return Ok(());
    }
    for one in failed.iter().filter(|_| !context.screen.json) {
        let error = Paint::for_errors().red("error:");
        note(&format!("{error} {} was not deleted: {}", one.name, one.reason));
    }
    let all = failed.len() + deleted;
    Err(Failure::Some { failed: failed.len(), all, code: 1 })
}

pub(super) async fn merge(context: &Context, args: MergeArgs) -> Result<(), Failure> {
    let MergeArgs { source, into, dry_run, conflicts, only, expect_generation } = args;
    let conflicts = match conflicts {
        ConflictsArg::Refuse => OnConflict::Refuse,
        ConflictsArg::Keep => OnConflict::Keep,
    };
    let request = Merge { into, dry_run, conflicts, only, expect_generation };
    let merged = context.client.merge(&source, &request).await?;
    context
        .screen
        .answer(&merged, |merged| merged_text(context.screen.paint, merged, &source, dry_run))?;
    told_failed(context, &merged.failed, merged.deleted.len())
}

fn merged_text(paint: Paint, merged: &Merged, source: &str, dry_run: bool) -> String {
    let Merged { sandbox, generation, counts, conflicts, changes, truncated, .. } = merged;
    let mut text = String::new();
    if dry_run {
        text.extend(changes.iter().map(|one| change_line(paint, one)));
        text.push_str(&conflicts_text(conflicts));
        if *truncated {
            text.push_str("... and more\n");
        }
    }
    let counts_said = merge_counts_text(counts);
    text.push_str(&match (dry_run, &merged.snapshot) {
        (true, _) if counts.conflicts > 0 => {
            format!("{sandbox}  {source} cannot be merged: {counts_said}\n")
        }
        (true, _) => format!("{sandbox}  {source} can be merged: {counts_said}\n"),
        (_, Some(_)) => {
            format!("{sandbox}  merged from {source}, generation {generation}: {counts_said}\n")
        }
        (_, None) => format!("{sandbox}  has all that {source} changed already\n"),
    });
    if !merged.deleted.is_empty() {
        let deleted = merged.deleted.join(", ");
        text.push_str(&format!("deleted: {deleted} (`keep trash ls` has it for a while)\n"));
    }
    text
}

fn merge_counts_text(counts: &MergeCounts) -> String {
    let MergeCounts { added, removed, modified, merged, conflicts } = *counts;
    let said = [
        ("added", added),
        ("removed", removed),
        ("modified", modified),
        ("merged by lines", merged),
        ("in conflict", conflicts),
    ];
    let said = said.into_iter().filter(|(_, count)| *count > 0);
    let said: Vec<String> = said.map(|(word, count)| format!("{count} {word}")).collect();
    match said.is_empty() {
        true => "nothing to do".to_owned(),
        false => said.join(", "),
    }
}

pub(super) async fn rename(context: &Context, args: &RenameArgs) -> Result<(), Failure> {
    let sandbox = context.client.rename_sandbox(&args.name, &args.to).await?;
    context.screen.answer(&sandbox, |sandbox| format!("{}  was {}\n", sandbox.name, args.name))
}

/// What a prune did, as JSON.
#[derive(Debug, Default, Serialize)]
struct Pruned {
    deleted: Vec<String>,
    /// Forks that stay, and why.
    kept: Vec<(String, String)>,
}

pub(super) async fn prune(context: &Context, args: &PruneArgs) -> Result<(), Failure> {
    let forks = context.client.forks(Some(&args.name), None).await?;
    let all = context.client.forks(None, None).await?;
    let (mut pruned, mut failed) = (Pruned::default(), 0);
    for fork in &forks {
        let older = args.older.map(|span| span.duration());
        let origin_of = |one: &&Sandbox| {
            one.forked_from.as_ref().is_some_and(|from| from.sandbox_id == fork.id)
        };
        let why = stays(fork, older, Timestamp::now()).or_else(|| {
            let own = all.iter().find(origin_of)?;
            Some(format!("it is the origin of {}", own.name))
        });
        if let Some(why) = why {
            pruned.kept.push((fork.name.clone(), why));
            continue;
        }
        let done = match args.dry_run {
            true => Ok(()),
            // Somebody may have begun to use it since it was listed.
            false => context.client.delete_unused(&fork.name, &fork.used_at).await.map(drop),
        };
        match done {
            Ok(()) => pruned.deleted.push(fork.name.clone()),
            Err(error) => {
                failed += 1;
                pruned.kept.push((fork.name.clone(), error.to_string()));
            }
        }
    }
    context.screen.answer(&pruned, |pruned| pruned_text(pruned, &args.name, args.dry_run))?;
    match failed {
        0 => Ok(()),
        failed => Err(Failure::Some { failed, all: forks.len(), code: 1 }),
    }
}

/// Why a fork is not pruned.
fn stays(fork: &Sandbox, older: Option<Duration>, now: Timestamp) -> Option<String> {
    if !matches!(fork.state, State::Stopped | State::Failed) {
        return Some(format!("it is {}", word(fork.state)));
    }
    let older = older?;
    let Ok(used) = fork.used_at.parse::<Timestamp>() else {
        return Some(format!("it is not known when it was used: `{}`", fork.used_at));
    };
    let idle = now.as_millisecond() - used.as_millisecond();
    match u128::try_from(idle) {
        Ok(idle) if idle >= older.as_millis() => None,
        _ => Some(format!("it was used {}", when::ago(&fork.used_at))),
    }
}

fn pruned_text(pruned: &Pruned, name: &str, dry_run: bool) -> String {
    let mut text = String::new();
    for fork in &pruned.deleted {
        let done = if dry_run { "would be deleted" } else { "deleted" };
        text.push_str(&format!("{fork}  {done}\n"));
    }
    for (fork, why) in &pruned.kept {
        text.push_str(&format!("{fork}  stays: {why}\n"));
    }
    if text.is_empty() {
        text.push_str(&format!("{name} has no forks\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use sandkeep_client::types::{DiffAspect, DiffCounts, DiffEntry, DiffKind, MergeCounts};

    use super::{change_line, counts_text, merge_counts_text};
    use crate::screen::Paint;

    #[test]
    fn counts_are_short() {
        let counts = DiffCounts { added: 3, modified: 2, bytes: 4 << 20, ..DiffCounts::default() };
        assert_eq!(counts_text(&counts), "+3 ~2, 4.0 MiB");
        assert_eq!(counts_text(&DiffCounts::default()), "no differences");
        let renamed = DiffCounts { renamed: 1, ..DiffCounts::default() };
        assert_eq!(counts_text(&renamed), "1 renamed");
        let merged = MergeCounts { added: 1, conflicts: 2, ..MergeCounts::default() };
        assert_eq!(merge_counts_text(&merged), "1 added, 2 in conflict");
        assert_eq!(merge_counts_text(&MergeCounts::default()), "nothing to do");
    }

    #[test]
    fn a_line_tells_what_of_a_path_differs() {
        let entry = DiffEntry {
            path: "/b".to_owned(),
            change: DiffKind::Modified,
            old_path: None,
            what: vec![DiffAspect::Content, DiffAspect::Mode],
            from: None,
            to: None,
        };
        assert_eq!(change_line(Paint::plain(), &entry), "M /b  content, mode\n");
        let old_path = Some("/a".to_owned());
        let renamed = DiffEntry { change: DiffKind::Renamed, old_path, what: vec![], ..entry };
        assert_eq!(change_line(Paint::plain(), &renamed), "R /a -> /b\n");
    }
}
