//! Commands about secrets. A value comes in by standard input and by no other way: what is on a command
//! line is seen by everybody on the machine, and stays in the shell's history.

use std::io::{self, BufRead as _, Read as _};

use sandkeep_client::types::{Secret, SecretPlace, SetSecret};
use zeroize::{Zeroize as _, Zeroizing};

use super::{Context, facts, for_each};
use crate::args::{PlaceArg, SecretCommand};
use crate::failure::Failure;
use crate::screen::{Paint, Table, note};
use crate::terminal::{self, Silent};
use crate::when;

/// The most that is read: whatever is longer is refused by the server, and need not be read to its end.
const MOST: u64 = 1 << 20;

pub(super) async fn secret(context: &Context, command: SecretCommand) -> Result<(), Failure> {
    match command {
        SecretCommand::Set { name, hosts, places, tags, keep_newline } => {
            let value = read(&name, keep_newline)?;
            let mut request = SetSecret {
                value: value.to_string(),
                hosts: Some(hosts).filter(|hosts| !hosts.is_empty()),
                places: Some(places.into_iter().map(place).collect())
                    .filter(|places: &Vec<_>| !places.is_empty()),
                tags: Some(tags.into_iter().collect())
                    .filter(|tags: &std::collections::BTreeMap<_, _>| !tags.is_empty()),
            };
            let answer = context.client.set_secret(&name, &request).await;
            request.value.zeroize();
            context.screen.answer(&answer?, |secret| {
                format!("{}  set, version {}\n", secret.name, secret.version)
            })
        }
        SecretCommand::Ls => {
            let all = context.client.secrets().await?;
            context.screen.answer(&all, |all| context.screen.table(&table(all)))
        }
        SecretCommand::Show { name } => {
            let secret = context.client.secret(&name).await?;
            context.screen.answer(&secret, |found| described(context.screen.paint, found))
        }
        SecretCommand::Rm { names } => {
            for_each(context, &names, async |name| {
                let gone = context.client.delete_secret(&name).await?;
                context.screen.answer(&gone, |_| format!("{name}  deleted\n"))
            })
            .await
        }
    }
}

/// Reads a value; at a terminal, one line that is not shown.
fn read(name: &str, keep_newline: bool) -> Result<Zeroizing<String>, Failure> {
    let cannot = |error| Failure::caused("cannot read the value", error);
    let mut value = Zeroizing::new(String::new());
    if terminal::is_interactive() {
        note(&format!("value of {name} (not shown):"));
        let _silent = Silent::enter();
        io::stdin().lock().read_line(&mut value).map_err(cannot)?;
    } else {
        io::stdin().lock().take(MOST).read_to_string(&mut value).map_err(cannot)?;
    }
    if !keep_newline && value.ends_with('\n') {
        value.pop();
        if value.ends_with('\r') {
            value.pop();
        }
    }
    if value.is_empty() {
        let hint = format!("give it by standard input: `keep secret set {name} < file`");
        return Err(Failure::here("the value is empty").with_hint(hint));
    }
    Ok(value)
}

fn table(secrets: &[Secret]) -> Table {
    let mut table = Table::new(&["SECRET", ">VERSION", "HOSTS", "TAGS", "CREATED", "SET"]);
    for secret in secrets {
        table.row(vec![
            secret.name.clone(),
            secret.version.to_string(),
            secret.hosts.join(" "),
            tags(secret),
            when::ago(&secret.created_at),
            when::ago(&secret.updated_at),
        ]);
    }
    table
}

fn described(paint: Paint, secret: &Secret) -> String {
    let mut lines = vec![
        ("name", secret.name.clone()),
        ("project", secret.project.clone()),
        ("hosts", secret.hosts.join(" ")),
        ("replaced in", places(secret)),
        ("tags", tags(secret)),
        ("created", when::ago(&secret.created_at)),
    ];
    for version in &secret.versions {
        let set = format!("{}, set {}", version.version, when::ago(&version.created_at));
        lines.push(("version", set));
    }
    facts(paint, &lines)
}

fn place(place: PlaceArg) -> SecretPlace {
    match place {
        PlaceArg::Header => SecretPlace::Header,
        PlaceArg::Query => SecretPlace::Query,
        PlaceArg::Body => SecretPlace::Body,
    }
}

fn places(secret: &Secret) -> String {
    let named = secret.places.iter().map(|place| match place {
        SecretPlace::Header => "headers",
        SecretPlace::Query => "query",
        SecretPlace::Body => "body",
    });
    named.collect::<Vec<_>>().join(", ")
}

fn tags(secret: &Secret) -> String {
    let pairs: Vec<_> = secret.tags.iter().map(|(key, value)| format!("{key}={value}")).collect();
    pairs.join(" ")
}
