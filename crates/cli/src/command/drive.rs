//! `keep drive`: creates, lists, shows, forks and deletes drives.

use sandkeep_client::types::{CreateDrive, Drive, ForkDrive, IfExists};

use super::{Context, bytes, facts, for_each, or_dash};
use crate::args::DriveCommand;
use crate::failure::Failure;
use crate::screen::{Paint, Table};
use crate::when;

pub(super) async fn drive(context: &Context, command: DriveCommand) -> Result<(), Failure> {
    match command {
        DriveCommand::Create { name, max_size, get } => {
            let if_exists = if get { IfExists::Get } else { IfExists::Fail };

            let request = CreateDrive { name, max_size, if_exists };
            let drive = context.client.create_drive(&request).await?;
            context.screen.answer(&drive, |drive| format!("{}  ready\n", drive.name))
        }
        DriveCommand::Ls { prefix } => {
            let all = context.client.drives(prefix.as_deref()).collect(None).await?;
            context.screen.answer(&all, |all| context.screen.table(&table(all)))
        }
        DriveCommand::Show { name } => {
            let drive = context.client.drive(&name).await?;
            context.screen.answer(&drive, |found| described(context.screen.paint, found))
        }
        DriveCommand::Fork { source, name } => {
            let fork = context.client.fork_drive(&source, &ForkDrive { name }).await?;
            context.screen.answer(&fork, |fork| format!("{}  forked from {source}\n", fork.name))
        }
        DriveCommand::Rm { names } => {
            for_each(context, &names, async |name| {
                let gone = context.client.delete_drive(&name).await?;
                context.screen.answer(&gone, |_| format!("{name}  deleted\n"))
            })
            .await
        }
    }
}

fn table(drives: &[Drive]) -> Table {
    let mut table = Table::new(&["DRIVE", ">SIZE", ">MAX", "ATTACHED TO", "CREATED", "CHANGED"]);
    for drive in drives {
        table.row(vec![
            drive.name.clone(),
            bytes(drive.size_bytes),
            bytes(drive.max_size_bytes),
            attached_to(drive),
            when::ago(&drive.created_at),
            when::ago(&drive.updated_at),
        ]);
    }
    table
}

fn described(paint: Paint, drive: &Drive) -> String {
    let attached = drive.attached.as_ref();
    let lines = [
        ("name", drive.name.clone()),
        ("id", drive.id.clone()),
        ("project", drive.project.clone()),
        ("size", bytes(drive.size_bytes)),
        ("max size", bytes(drive.max_size_bytes)),
        ("written to", if drive.initialized { "yes" } else { "never" }.to_owned()),
        ("generation", drive.generation.to_string()),
        ("attached to", attached_to(drive)),
        ("session", or_dash(attached.map(|attached| attached.session.clone()))),
        ("parent", or_dash(drive.parent.clone())),
        ("created", when::ago(&drive.created_at)),
        ("changed", when::ago(&drive.updated_at)),
    ];
    facts(paint, &lines)
}

fn attached_to(drive: &Drive) -> String {
    or_dash(drive.attached.as_ref().map(|attached| attached.sandbox.clone()))
}
