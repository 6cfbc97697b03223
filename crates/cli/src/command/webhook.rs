//! `keep webhook`: has events sent to an address outside.

use std::io::{self, Read as _};

use sandkeep_client::types::{
    CreateWebhook, NewWebhook, RotateWebhookSecret, UpdateWebhook, Webhook, WebhookDelivery,
};

use super::{Context, facts, for_each, or_dash};
use crate::args::WebhookCommand;
use crate::failure::Failure;
use crate::screen::{Paint, Table, note};
use crate::when;

/// The most that is read as a secret.
const MOST: u64 = 1024;

pub(super) async fn webhook(context: &Context, command: WebhookCommand) -> Result<(), Failure> {
    let (client, screen) = (&context.client, context.screen);
    match command {
        WebhookCommand::Add { url, events, secret_stdin, allow_private, answers } => {
            let secret = secret_stdin.then(read_secret).transpose()?;
            let given = secret.is_some();
            let request = CreateWebhook { url, events, secret, allow_private, answers };
            let made = client.create_webhook(&request).await?;
            screen.answer(&made, |made| new(made, given))
        }
        WebhookCommand::Ls => {
            let all = client.webhooks().await?;
            screen.answer(&all, |all| screen.table(&table(all)))
        }
        WebhookCommand::Show { id } => {
            let found = client.webhook(&id).await?;
            screen.answer(&found, |found| described(context, found))
        }
        WebhookCommand::Test { id } => {
            let sent = client.test_webhook(&id).await?;
            screen.answer(&sent, |sent| format!("{}\n", came_of(screen.paint, sent)))?;
            match sent.delivered {
                true => Ok(()),
                false => Err(Failure::here("the receiver did not take the test event").with_hint(
                    "a receiver must answer 2xx within 10 seconds; see docs/WEBHOOKS.md",
                )),
            }
        }
        WebhookCommand::Set { id, url, events, allow_private, answers } => {
            let events = Some(events).filter(|events| !events.is_empty());
            let request = UpdateWebhook { url, events, allow_private, answers, enabled: None };
            let changed = client.update_webhook(&id, &request).await?;
            screen.answer(&changed, |changed| described(context, changed))
        }
        WebhookCommand::Rotate { id, secret_stdin, only } => {
            let secret = secret_stdin.then(read_secret).transpose()?;
            let given = secret.is_some();
            let request = RotateWebhookSecret { secret, only };
            let changed = client.rotate_webhook_secret(&id, &request).await?;
            screen.answer(&changed, |changed| new(changed, given))
        }
        WebhookCommand::Disable { id } => enable(context, &id, false).await,
        WebhookCommand::Enable { id } => enable(context, &id, true).await,
        WebhookCommand::Rm { ids } => {
            for_each(context, &ids, async |id| {
                client.delete_webhook(&id).await?;
                screen
                    .answer(&serde_json::json!({ "deleted": &id }), |_| format!("{id}  deleted\n"))
            })
            .await
        }
    }
}

async fn enable(context: &Context, id: &str, enabled: bool) -> Result<(), Failure> {
    let request = UpdateWebhook { enabled: Some(enabled), ..UpdateWebhook::default() };
    let changed = context.client.update_webhook(id, &request).await?;
    let word = if enabled { "enabled" } else { "disabled" };
    context.screen.answer(&changed, |changed| format!("{}  {word}\n", changed.id))
}

fn read_secret() -> Result<String, Failure> {
    let mut secret = String::new();
    let read = io::stdin().lock().take(MOST).read_to_string(&mut secret);
    read.map_err(|error| Failure::caused("cannot read the secret", error))?;
    Ok(secret.trim_end_matches(['\r', '\n']).to_owned())
}

fn new(made: &NewWebhook, given: bool) -> String {
    if given {
        return format!("{}\n", made.webhook.id);
    }
    note("the secret is shown this once; receivers check signatures with it");
    format!("{}  secret {}\n", made.webhook.id, made.secret)
}

fn table(webhooks: &[Webhook]) -> Table {
    let mut table = Table::new(&["WEBHOOK", "STATE", "EVENTS", "URL", "LAST"]);
    for webhook in webhooks {
        let last = webhook.deliveries.first();
        table.row(vec![
            webhook.id.clone(),
            state(webhook).to_owned(),
            webhook.events.join(","),
            webhook.url.clone(),
            last.map_or_else(|| "-".to_owned(), |last| when::ago(&last.at)),
        ]);
    }
    table
}

fn state(webhook: &Webhook) -> &'static str {
    match (webhook.enabled, &webhook.failing_since) {
        (false, _) => "disabled",
        (true, Some(_)) => "failing",
        (true, None) => "ok",
    }
}

fn described(context: &Context, webhook: &Webhook) -> String {
    let paint = context.screen.paint;
    let mut text = facts(
        paint,
        &[
            ("webhook", webhook.id.clone()),
            ("url", webhook.url.clone()),
            ("events", webhook.events.join(", ")),
            ("state", state(webhook).to_owned()),
            ("why", or_dash(webhook.disabled_reason.clone())),
            ("failing since", or_dash(webhook.failing_since.clone())),
            (
                "private addresses",
                if webhook.allow_private { "allowed" } else { "refused" }.to_owned(),
            ),
            ("answers approvals", if webhook.answers { "yes" } else { "no" }.to_owned()),
            ("secrets", webhook.secrets.to_string()),
            ("created", webhook.created_at.clone()),
        ],
    );
    for delivery in &webhook.deliveries {
        text.push_str(&format!("{}\n", came_of(paint, delivery)));
    }
    text
}

/// The result of a delivery, in a line.
fn came_of(paint: Paint, one: &WebhookDelivery) -> String {
    let outcome = match (&one.error, one.status) {
        (None, Some(status)) => paint.green(&status.to_string()),
        (None, None) => paint.green("delivered"),
        (Some(error), _) => paint.red(&error.replace(|c: char| c.is_control(), " ")),
    };
    let tries = if one.attempt > 1 { format!("  attempt {}", one.attempt) } else { String::new() };
    format!("{}  {:<18}  {} ms  {outcome}{tries}", one.at, one.kind, one.duration_ms)
}
