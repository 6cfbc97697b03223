//! The guard's findings in lines for people, and its quarantine.

use sandkeep_client::types::{
    Because, Finding, FindingKind, FindingPlace, Quarantine, ValueEncoding,
};

use super::{Context, bytes, for_each};
use crate::args::GuardCommand;
use crate::failure::Failure;
use crate::screen::Table;
use crate::when;

pub(super) async fn guard(context: &Context, command: GuardCommand) -> Result<(), Failure> {
    match command {
        GuardCommand::Ls => {
            let all = context.client.quarantine().await?;
            context.screen.answer(&all, |all| context.screen.table(&table(all)))
        }
        GuardCommand::Rm { ids } => {
            for_each(context, &ids, async |id| {
                let gone = context.client.delete_quarantine(&id).await?;
                context
                    .screen
                    .answer(&gone, |gone| format!("{id}  {} files removed\n", gone.files.len()))
            })
            .await
        }
    }
}

fn table(all: &[Quarantine]) -> Table {
    let mut table = Table::new(&["ID", "PROJECT", "SANDBOX", "FILE", "SIZE", "KEPT AT", "SINCE"]);
    for one in all {
        for file in &one.files {
            table.row(vec![
                one.id.clone(),
                one.project.clone(),
                one.sandbox.clone(),
                file.path.clone(),
                bytes(file.size_bytes),
                file.kept_at.clone(),
                when::ago(&one.at),
            ]);
        }
    }
    table
}

/// A line for every find, and one for every command that may have done it.
pub(crate) fn findings_text(findings: &[Finding]) -> String {
    let mut text = String::new();
    for found in findings {
        text.push_str(&format!("  {}  {}\n", found.path, what(found)));
        for suspect in &found.commands {
            let because = match suspect.because {
                Because::Given => "was given it",
                Because::Running => "ran when the file changed",
                Because::GivenAndRunning => "was given it and ran when the file changed",
            };
            let argv = suspect.argv.join(" ");
            text.push_str(&format!("      {}  {argv}  ({because})\n", suspect.command));
        }
    }
    text
}

fn what(found: &Finding) -> String {
    let size = bytes(found.size_bytes);
    let detail = found.detail.as_deref().unwrap_or_default();
    match found.kind {
        FindingKind::Large => format!("is large: {size}"),
        FindingKind::Junk => format!("is junk: {size}"),
        FindingKind::CoreDump => format!("is a core dump: {size}"),
        FindingKind::Doubtful => format!("may have been lost in part by a failing disk: {size}"),
        FindingKind::Unsearched => format!("was not searched: {detail}"),
        FindingKind::Secret => {
            let secret = found.secret.as_deref().unwrap_or_default();
            let encoding = match found.encoding {
                None | Some(ValueEncoding::Plain) => "",
                Some(ValueEncoding::Json) => ", as JSON",
                Some(ValueEncoding::Url) => ", URL-encoded",
                Some(ValueEncoding::Base64) => ", in base64",
                Some(ValueEncoding::Hex) => ", in hexadecimal",
            };
            let place = match found.place {
                Some(FindingPlace::Name) => "in its name".to_owned(),
                Some(FindingPlace::Link) => "in what the link says".to_owned(),
                Some(FindingPlace::Attribute) => format!("in attribute {detail}"),
                Some(FindingPlace::Member) if detail.is_empty() => "compressed inside".to_owned(),
                Some(FindingPlace::Member) => format!("inside, in {detail}"),
                Some(FindingPlace::Contents) | None => {
                    format!("at byte {}", found.offset.unwrap_or_default())
                }
            };
            format!("holds {secret} {place}{encoding}")
        }
    }
}

#[cfg(test)]
mod tests {
    use sandkeep_client::types::{
        Because, Finding, FindingKind, FindingPlace, Suspect, ValueEncoding,
    };

    use super::findings_text;

    #[test]
    fn files_and_commands_are_named_plainly() {
        let found = Finding {
            kind: FindingKind::Secret,
            path: "/work/a.tar.gz".to_owned(),
            size_bytes: 2048,
            secret: Some("API_KEY".to_owned()),
            place: Some(FindingPlace::Member),
            encoding: Some(ValueEncoding::Base64),
            offset: Some(7),
            detail: Some("x/.env".to_owned()),
            commands: vec![Suspect {
                command: "cmd-1".to_owned(),
                argv: vec!["tar".to_owned(), "czf".to_owned()],
                because: Because::Running,
            }],
        };
        let large = Finding {
            kind: FindingKind::Large,
            secret: None,
            commands: Vec::new(),
            path: "/big".to_owned(),
            ..found.clone()
        };
        assert_eq!(
            findings_text(&[found, large]),
            "  /work/a.tar.gz  holds API_KEY inside, in x/.env, in base64\n      \
             cmd-1  tar czf  (ran when the file changed)\n  /big  is large: 2.0 KiB\n"
        );
    }
}
