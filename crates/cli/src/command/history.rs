//! `keep history`: the commands of a sandbox, and what each changed.

use sandkeep_client::types::{Command, CommandChanges, SessionChanges};

use super::{Context, or_dash, word};
use crate::args::HistoryArgs;
use crate::failure::Failure;
use crate::screen::Table;
use crate::when;

pub(super) async fn history(context: &Context, args: &HistoryArgs) -> Result<(), Failure> {
    let changed = |command: &Command| {
        let counts = command.changes.as_ref();
        counts.is_none_or(|counts| counts.created + counts.modified + counts.deleted > 0)
    };
    let most = usize::try_from(args.limit).unwrap_or(usize::MAX);
    let mut pages = context.client.commands(&args.name, Some(args.limit.min(1000)));
    let mut all = Vec::new();
    while all.len() < most
        && let Some(page) = pages.next().await?
    {
        all.extend(page.items.into_iter().filter(|one| !args.changed || changed(one)));
    }
    all.truncate(most);
    let session = match context.screen.json {
        true => None,
        false => context.client.sandbox(&args.name).await?.session_changes,
    };
    context.screen.answer(&all, |all| {
        let mut table =
            Table::new(&["COMMAND", "WHO", "STARTED", ">TOOK", "END", "CHANGED", "ARGV"]);
        for command in all {
            let end = command.end.map_or_else(|| word(command.state), word);
            let end = match command.exit_code {
                Some(code) if code != 0 => format!("{end} {code}"),
                _ => end,
            };
            table.row(vec![
                command.id.clone(),
                or_dash(command.by.clone()),
                when::ago(&command.started_at),
                when::between(&command.started_at, command.ended_at.as_deref()),
                end,
                or_dash(command.changes.as_ref().map(shown)),
                command.argv.join(" "),
            ]);
        }
        let mut text = context.screen.table(&table);
        let counts = || all.iter().filter_map(|command| command.changes.as_ref());
        if counts().any(|counts| !counts.exact) {
            text.push_str("* together with something that ran at the same time\n");
        }
        if counts().any(|counts| !counts.complete) {
            text.push_str(AT_LEAST);
        }
        if let Some(session) = &session {
            text.push_str(&format!("last session: {}\n", session_shown(session)));
        }
        text
    })
}

/// What a `?` means.
pub(super) const AT_LEAST: &str = "? at least: not everything was seen\n";

/// What was changed in a session: `+3 ~2 -1, 4.1 MiB`.
pub(super) fn session_shown(changes: &SessionChanges) -> String {
    let mut text = counts(changes.created, changes.modified, changes.deleted, changes.bytes);
    if !changes.complete {
        text.push_str(" ?");
    }
    text
}

/// `+3 ~2 -1, 4.1 MiB`, or that nothing was changed.
pub(super) fn counts(created: u64, modified: u64, deleted: u64, size: u64) -> String {
    let signed = [('+', created), ('~', modified), ('-', deleted)];
    let parts = signed.into_iter().filter(|(_, count)| *count > 0);
    let mut text =
        parts.map(|(sign, count)| format!("{sign}{count}")).collect::<Vec<_>>().join(" ");
    if size > 0 {
        text.push_str(&format!(", {}", super::bytes(size)));
    }
    if text.is_empty() {
        text.push_str("nothing");
    }
    text
}

/// `+3 ~2 -1, 4.1 MiB`.
pub(super) fn shown(changes: &CommandChanges) -> String {
    let mut text = counts(changes.created, changes.modified, changes.deleted, changes.bytes);
    for (mark, is_marked) in [(" *", !changes.exact), (" ?", !changes.complete)] {
        if is_marked {
            text.push_str(mark);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_short() {
        let exact = CommandChanges { exact: true, complete: true, ..CommandChanges::default() };
        assert_eq!(shown(&exact), "nothing");
        let some = CommandChanges { created: 3, deleted: 1, bytes: 4 << 20, ..exact.clone() };
        assert_eq!(shown(&some), "+3 -1, 4.0 MiB");
        let session = SessionChanges { created: 2, complete: false, ..SessionChanges::default() };
        assert_eq!(session_shown(&session), "+2 ?");
        let shared = CommandChanges { modified: 2, exact: false, complete: false, ..exact };
        assert_eq!(shown(&shared), "~2 * ?");
    }
}
