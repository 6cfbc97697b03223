//! `keep trash`: lists deleted sandboxes, restores one, and empties the trash.

use sandkeep_client::types::{Restore, TrashItem};

use super::{Context, bytes};
use crate::args::TrashCommand;
use crate::failure::Failure;
use crate::screen::Table;
use crate::when;

pub(super) async fn trash(context: &Context, command: TrashCommand) -> Result<(), Failure> {
    match command {
        TrashCommand::Ls => {
            let all = context.client.trash().await?;
            context.screen.answer(&all, |all| context.screen.table(&table(all)))
        }
        TrashCommand::Restore { sandbox, name } => {
            let restored = context.client.restore(&sandbox, &Restore { name }).await?;
            context.screen.answer(&restored, |found| format!("{}  restored\n", found.name))
        }
        TrashCommand::Empty => {
            let gone = context.client.empty_trash().await?;
            context
                .screen
                .answer(&gone, |gone| format!("{} sandboxes deleted for good\n", gone.sandboxes))
        }
    }
}

fn table(items: &[TrashItem]) -> Table {
    let mut table =
        Table::new(&["SANDBOX", "ID", "DELETED", "WHY", ">SNAPSHOTS", ">FREED", ">STAYS FOR"]);
    for item in items {
        table.row(vec![
            item.name.clone(),
            item.id.clone(),
            when::ago(&item.deleted_at),
            if item.expired { "expired" } else { "deleted" }.to_owned(),
            item.snapshots.to_string(),
            bytes(item.freed_if_deleted_bytes),
            when::ahead(item.stays_for_ms),
        ]);
    }
    table
}
