//! `keep project`, `keep key` and `keep usage`: projects, API keys, and what takes disk space.

use sandkeep_client::types::{CreateKey, CreateProject, Key, Scope};

use super::{Context, bytes, facts, for_each, network, resolve, word};
use crate::args::{KeyCommand, ProjectCommand, ProjectRunsArgs, ScopeArg};
use crate::failure::Failure;
use crate::screen::{Table, note};
use crate::when;

pub(super) async fn project(context: &Context, command: ProjectCommand) -> Result<(), Failure> {
    match command {
        ProjectCommand::Ls => {
            let all = context.client.projects().await?;
            context.screen.answer(&all, |all| {
                let mut table = Table::new(&["PROJECT", ">KEYS", "CREATED"]);
                for project in all {
                    let keys = project.keys.len().to_string();
                    table.row(vec![project.name.clone(), keys, when::ago(&project.created_at)]);
                }
                context.screen.table(&table)
            })
        }
        ProjectCommand::Create { name } => {
            let project = context.client.create_project(&CreateProject { name }).await?;
            context.screen.answer(&project, |project| {
                let name = &project.name;
                format!(
                    "{name}  created; make a key with `keep key create LABEL --project {name}`\n"
                )
            })
        }
        ProjectCommand::Governance(args) => governance(context, &args).await,
        ProjectCommand::Network(args) => network::of_project(context, &args).await,
        ProjectCommand::Rm { name } => {
            context.client.delete_project(&name).await?;
            context.screen.answer(&serde_json::json!({}), |_| format!("{name}  deleted\n"))
        }
    }
}

async fn governance(context: &Context, args: &ProjectRunsArgs) -> Result<(), Failure> {
    let ProjectRunsArgs { name, running, queued, separate_approver } = args;
    let mut runs = context.client.project_runs(name).await?;
    if running.is_some() || queued.is_some() || separate_approver.is_some() {
        runs.running = running.unwrap_or(runs.running);
        runs.queued = queued.unwrap_or(runs.queued);
        runs.separate_approver = separate_approver.unwrap_or(runs.separate_approver);
        runs = context.client.set_project_runs(name, &runs).await?;
    }
    context.screen.answer(&runs, |runs| {
        let lines = [
            ("running runs", runs.running.to_string()),
            ("queued runs", runs.queued.to_string()),
            ("separate approver", runs.separate_approver.to_string()),
        ];
        facts(context.screen.paint, &lines)
    })
}

pub(super) async fn key(
    context: &Context,
    command: KeyCommand,
    project: Option<String>,
) -> Result<(), Failure> {
    let project = match project {
        Some(name) => name,
        None => context.client.whoami().await?.project,
    };
    match command {
        KeyCommand::Create { label, scope, approve, expires } => {
            let scope = match scope {
                ScopeArg::Read => Scope::Read,
                ScopeArg::Write => Scope::Write,
                ScopeArg::Admin => Scope::Admin,
            };

            let request = CreateKey { label, scope, approve, expires };
            let made = context.client.create_key(&project, &request).await?;
            if !context.screen.json {
                note(&format!(
                    "key {} of project {project}; its secret is shown this once:",
                    made.key.id
                ));
            }
            context.screen.answer(&made, |made| format!("{}\n", made.secret))
        }
        KeyCommand::Ls => {
            let all = context.client.keys(&project).await?;
            context.screen.answer(&all, |all| context.screen.table(&key_table(all)))
        }
        KeyCommand::Revoke { ids } => {
            let all = context.client.keys(&project).await?;
            for_each(context, &ids, async |id| {
                let id = resolve::key(&all, &id)?;
                context.client.revoke_key(&project, &id).await?;
                context.screen.answer(&serde_json::json!({}), |_| format!("{id}  revoked\n"))
            })
            .await
        }
    }
}

fn key_table(keys: &[Key]) -> Table {
    let mut table = Table::new(&["KEY", "SCOPE", "APPROVES", "CREATED", "EXPIRES", "LABEL"]);
    for key in keys {
        table.row(vec![
            key.id.clone(),
            word(key.scope),
            if key.approve { "yes" } else { "no" }.to_owned(),
            when::ago(&key.created_at),
            when::until(key.expires_at.as_deref()),
            key.label.clone(),
        ]);
    }
    table
}

pub(super) async fn usage(context: &Context) -> Result<(), Failure> {
    let usage = context.client.usage().await?;
    context.screen.answer(&usage, |usage| {
        let mut told: Vec<(&str, String)> = Vec::new();
        told.extend(usage.project.clone().map(|project| ("project", project)));
        let mut tell = |name, sum: Option<u64>| told.extend(sum.map(|sum| (name, bytes(sum))));
        tell("disk", usage.total_bytes);
        tell("free", usage.free_bytes);
        tell("snapshots", Some(usage.snapshots_bytes));
        tell("drives", Some(usage.drives_bytes));
        tell("images", usage.images_bytes);
        tell("quarantine", Some(usage.quarantine_bytes));
        tell("open sessions", Some(usage.open_bytes));
        tell("commands", Some(usage.commands_bytes));
        tell("trash", Some(usage.trash_bytes));
        facts(context.screen.paint, &told)
    })
}
