//! `keep service`: sets, lists, starts, stops and removes services of a sandbox, and prints their logs.

use sandkeep_client::types::{Restart, ServiceState, ServiceStatus, SetService};

use super::{Context, exec, or_dash, word};
use crate::args::{RestartArg, ServiceCommand, SetServiceArgs};
use crate::failure::Failure;
use crate::screen::Table;
use crate::when;

pub(super) async fn service(context: &Context, command: ServiceCommand) -> Result<(), Failure> {
    let client = &context.client;
    let tell = |status: &ServiceStatus| {
        context
            .screen
            .answer(status, |status| format!("{}  {}\n", status.service.name, standing(status)))
    };
    match command {
        ServiceCommand::Set(args) => {
            let SetServiceArgs { port, restart, no_start, env, cwd, user, name, service, argv } =
                *args;
            let restart = match restart {
                RestartArg::Never => Restart::Never,
                RestartArg::OnFailure => Restart::OnFailure,
                RestartArg::Always => Restart::Always,
            };
            let env = env.into_iter().collect();
            let request = SetService { argv, env, cwd, user, port, restart, start: !no_start };
            tell(&client.set_service(&name, &service, &request).await?)
        }
        ServiceCommand::Ls { name } => {
            let all = client.services(&name).await?;
            context.screen.answer(&all, |all| context.screen.table(&table(all)))
        }
        ServiceCommand::Rm { name, service } => {
            client.remove_service(&name, &service).await?;
            let gone = serde_json::json!({});
            context.screen.answer(&gone, |_| format!("{service}  gone\n"))
        }
        ServiceCommand::Start { name, service } => {
            tell(&client.start_service(&name, &service).await?)
        }
        ServiceCommand::Stop { name, service } => {
            tell(&client.stop_service(&name, &service).await?)
        }
        ServiceCommand::Logs { name, service, follow } => {
            let all = client.services(&name).await?;
            let found = all.into_iter().find(|status| status.service.name == service);
            let none = || {
                Failure::here(format!("`{name}` has no service `{service}`"))
                    .with_hint(format!("`keep service ls {name}` lists what there is"))
            };
            let never = || Failure::here(format!("`{service}` was never started"));
            let command = found.ok_or_else(none)?.command.ok_or_else(never)?;
            exec::print_log(context, &name, &command, follow).await
        }
    }
}

fn table(services: &[ServiceStatus]) -> Table {
    let mut table =
        Table::new(&["SERVICE", "STATE", ">PORT", "RESTART", "START", "COMMAND", "ARGV"]);
    for status in services {
        let service = &status.service;
        table.row(vec![
            service.name.clone(),
            standing(status),
            or_dash(service.port.map(|port| port.to_string())),
            word(service.restart),
            if service.start { "every session" } else { "by hand" }.to_owned(),
            or_dash(status.command.clone()),
            service.argv.join(" "),
        ]);
    }
    table
}

fn standing(status: &ServiceStatus) -> String {
    let problem = status.problem.as_deref().unwrap_or_default();
    let times = match status.failures {
        1 => "once".to_owned(),
        times => format!("{times} times"),
    };
    match status.state {
        ServiceState::Running => match &status.since {
            Some(since) => format!("running for {}", when::between(since, None)),
            None => "running".to_owned(),
        },
        ServiceState::Restarting => {
            let at = when::until(status.restarts_at.as_deref());
            format!("restarting {at}, failed {times}: {problem}")
        }
        ServiceState::Exited => {
            format!("exited with {}", or_dash(status.exit_code.map(|code| code.to_string())))
        }
        ServiceState::Failed => format!("failed {times}: {problem}"),
        ServiceState::Starting | ServiceState::Stopped => word(status.state),
    }
}
