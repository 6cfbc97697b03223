//! `keep backup`: copies of the data directory. Needs no server; a running one is no obstacle.

use std::path::{Path, PathBuf};

use sandkeep_core::store::{
    BackupError, BackupOptions, BackupProgress, BackupSummary, Verified, backup_summary, backups,
    create_backup, prune_backups, restore_backup, verify_backup,
};

use super::bytes;
use crate::args::{BackupCommand, Global};
use crate::failure::Failure;
use crate::host;
use crate::locate;
use crate::screen::{Screen, Table, note};

pub(super) fn backup(global: &Global, command: BackupCommand) -> Result<(), Failure> {
    let data = global.data.clone().unwrap_or_else(locate::default_data);
    let screen = Screen::new(global.json);
    match command {
        BackupCommand::Create { directory, include_keys } => {
            host::need_root("keep backup create")?;
            create(&screen, &absolute(&data)?, &absolute(&directory)?, include_keys)
        }
        BackupCommand::Ls { directory } => list(&screen, &directory),
        BackupCommand::Verify { directory, id, all } => verify(&screen, &directory, id, all),
        BackupCommand::Prune { directory, keep } => prune(&screen, &directory, keep),
        BackupCommand::Restore { directory, id } => {
            host::need_root("keep backup restore")?;
            restore(&screen, &directory, id.as_deref(), &absolute(&data)?)
        }
    }
}

fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    std::path::absolute(path)
        .map_err(|error| Failure::caused("cannot determine the working directory", error))
}

fn create(screen: &Screen, data: &Path, directory: &Path, keys: bool) -> Result<(), Failure> {
    if resolved(directory).starts_with(resolved(data)) {
        return Err(Failure::here("the backup would be inside the data directory")
            .with_hint("choose a directory elsewhere, best on another disk"));
    }
    let made = create_backup(data, directory, BackupOptions { keys }, progress("copied"));
    let made = made.map_err(failed)?;
    let where_ = directory.display();
    screen.answer(&made, |made| {
        format!(
            "{} in {where_}: {} sandboxes, {} snapshots, {}; {} new\n{}",
            made.id,
            made.sandboxes,
            made.snapshots,
            bytes(made.bytes),
            bytes(made.written),
            key_text(made),
        )
    })?;
    if made.missing.is_empty() {
        return Ok(());
    }
    for one in &made.missing {
        note(&format!("not in the backup, because it is missing or damaged: {one}"));
    }
    Err(Failure::here(format!("the backup lacks {} things that are named", made.missing.len()))
        .with_hint(
            "`keep doctor` and `keep fsck` say more; the rest of the backup can be restored",
        ))
}

/// A path without links, as far as it is there.
fn resolved(path: &Path) -> PathBuf {
    let mut rest = Vec::new();
    let mut there = path;
    loop {
        match (there.canonicalize(), there.parent(), there.file_name()) {
            (Ok(mut found), ..) => {
                found.extend(rest.iter().rev());
                return found;
            }
            (Err(_), Some(parent), Some(name)) => {
                rest.push(name);
                there = parent;
            }
            (Err(_), ..) => return path.to_owned(),
        }
    }
}

fn prune(screen: &Screen, directory: &Path, keep: u32) -> Result<(), Failure> {
    let keep = usize::try_from(keep).unwrap_or(usize::MAX);
    let pruned = prune_backups(directory, keep).map_err(failed)?;
    screen.answer(&pruned, |pruned| {
        let removed: String = pruned.removed.iter().map(|id| format!("{id}  deleted\n")).collect();
        format!("{removed}{} backups stay, {} freed\n", pruned.kept, bytes(pruned.freed))
    })
}

/// What is needed besides the backup.
fn key_text(made: &BackupSummary) -> String {
    let key = &made.secrets_key;
    match (&key.fingerprint, key.included) {
        (Some(print), true) => {
            format!("The keys are in it (secrets.key {print}): keep it as you keep secrets.\n")
        }
        (Some(print), false) => format!(
            "Secrets are encrypted in it. For a restore, keep copies of secrets.key (fingerprint {print}), token.key and \
             audit.key elsewhere.\n"
        ),
        (None, _) => {
            "Secrets, if there are any, are encrypted with the key that you give to the server.\n"
                .to_owned()
        }
    }
}

fn list(screen: &Screen, directory: &Path) -> Result<(), Failure> {
    let ids = backups(directory).map_err(failed)?;
    let all: Result<Vec<BackupSummary>, _> =
        ids.iter().map(|id| backup_summary(directory, id)).collect();
    screen.answer(&all.map_err(failed)?, |all| {
        let mut table = Table::new(&["BACKUP", "CREATED", ">SANDBOXES", ">SNAPSHOTS", ">SIZE"]);
        for one in all {
            table.row(vec![
                one.id.clone(),
                one.created_at.to_string(),
                one.sandboxes.to_string(),
                one.snapshots.to_string(),
                bytes(one.bytes),
            ]);
        }
        screen.table(&table)
    })
}

fn verify(screen: &Screen, directory: &Path, id: Option<String>, all: bool) -> Result<(), Failure> {
    let ids: Vec<Option<String>> = match all {
        true => backups(directory).map_err(failed)?.into_iter().map(Some).collect(),
        false => vec![id],
    };
    let mut found: Vec<Verified> = Vec::with_capacity(ids.len());
    for id in ids {
        found.push(verify_backup(directory, id.as_deref(), progress("verified")).map_err(failed)?);
    }
    let problems: usize = found.iter().map(|one| one.problems.len()).sum();
    screen.answer(&found, |found| {
        let mut text = String::new();
        for one in found {
            for problem in &one.problems {
                text.push_str(&format!("{problem}\n"));
            }
            let verdict = match one.problems.len() {
                0 => "good".to_owned(),
                count => format!("DAMAGED, {count} problems"),
            };
            let (id, files, size) = (&one.id, one.files, bytes(one.bytes));
            text.push_str(&format!("{id}: {verdict}; {files} files, {size}\n"));
        }
        text
    })?;
    if problems == 0 { Ok(()) } else { Err(Failure::BackupDamaged) }
}

fn restore(
    screen: &Screen,
    directory: &Path,
    id: Option<&str>,
    data: &Path,
) -> Result<(), Failure> {
    let done = restore_backup(directory, id, data, progress("restored")).map_err(failed)?;
    screen.answer(&done, |done| {
        let data = done.data.display();
        let key = match (&done.backup.secrets_key.fingerprint, done.backup.secrets_key.included) {
            (Some(print), false) => format!(
                "Before the first start, put the keys of the original there, with mode 600: {data}/secrets.key (fingerprint \
                 {print}; secrets stay encrypted without it), token.key (tokens stop working without it), audit.key \
                 (the audit log so far counts as changed without it).\n"
            ),
            (None, false) => format!(
                "Before the first start, put token.key and audit.key of the original into {data}, with mode 600.\n"
            ),
            (_, true) => String::new(),
        };
        format!(
            "restored {} into {data}: {} sandboxes, {} snapshots\n{key}Start it: keep serve --data {data}\n",
            done.backup.id, done.backup.sandboxes, done.backup.snapshots,
        )
    })
}

/// Prints the progress on standard error, now and then.
fn progress(verb: &'static str) -> impl FnMut(BackupProgress) {
    use std::io::IsTerminal as _;
    let shown = std::io::stderr().is_terminal();
    let mut last: Option<std::time::Instant> = None;
    move |BackupProgress { done, all }| {
        let due = last.is_none_or(|last| last.elapsed() > std::time::Duration::from_secs(5));
        if shown && due && done > 0 {
            note(&format!("{verb} {done} of {all}"));
            last = Some(std::time::Instant::now());
        } else if last.is_none() {
            last = Some(std::time::Instant::now());
        }
    }
}

fn failed(error: BackupError) -> Failure {
    let hint = match &error {
        BackupError::NoData { .. } => "name the data directory with --data or SANDKEEP_DATA",
        BackupError::NoBackup { .. } => "`keep backup ls DIRECTORY` lists what is there",
        BackupError::Busy { .. } => "wait until it is done; an interrupted one leaves no lock",
        BackupError::NotEmpty { .. } => {
            "choose another one with --data, or move what is there away"
        }
        BackupError::Damaged { .. } => {
            "`keep backup verify` shows all of it; an earlier backup may be whole: `keep backup ls`"
        }
        _ => "see the message; nothing that was there before was changed",
    };
    match error {
        BackupError::Store(error) => Failure::caused("the backup failed", error),
        error => Failure::here(error.to_string()),
    }
    .with_hint(hint)
}
