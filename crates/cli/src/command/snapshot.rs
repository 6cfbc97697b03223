//! `keep snapshot`: lists, shows, deletes and exports snapshots.

use std::path::Path;

use sandkeep_client::types::Snapshot;

use super::sandbox::own_size;
use super::{Context, bytes, facts, for_each, or_dash, resolve, word};
use crate::args::SnapshotCommand;
use crate::failure::Failure;
use crate::screen::{Paint, Table, note};
use crate::when;

pub(super) async fn snapshot(context: &Context, command: SnapshotCommand) -> Result<(), Failure> {
    match command {
        SnapshotCommand::Ls { name } => list(context, name.as_deref()).await,
        SnapshotCommand::Show { id, last: _ } => {
            let id = resolve::snapshot_or_last(context, None, id.as_deref()).await?;
            let snapshot = context.client.snapshot(&id).await?;
            context.screen.answer(&snapshot, |found| described(context.screen.paint, found))
        }
        SnapshotCommand::Rm { ids, force } => {
            for_each(context, &ids, async |id| {
                let id = resolve::snapshot(context, None, &id).await?;
                let deleted = context.client.delete_snapshot(&id, force).await?;
                context.screen.answer(&deleted, |deleted| {
                    format!("{id}  deleted, {} freed\n", bytes(deleted.freed_bytes))
                })
            })
            .await
        }
        SnapshotCommand::Export { id, last: _, output } => {
            let id = resolve::snapshot_or_last(context, None, id.as_deref()).await?;
            export(context, &id, output.as_deref()).await
        }
    }
}

async fn list(context: &Context, name: Option<&str>) -> Result<(), Failure> {
    let all = context.client.snapshots(name).collect(None).await?;
    context.screen.answer(&all, |all| {
        let mut table = Table::new(&[
            "SNAPSHOT", "SANDBOX", ">GEN", "KIND", ">OWN", ">SHARED", ">MEMORY", "CREATED",
            "EXPIRES", "LABEL",
        ]);
        for snapshot in all {
            table.row(vec![
                snapshot.id.clone(),
                snapshot.sandbox.clone(),
                snapshot.generation.to_string(),
                word(snapshot.kind),
                own_size(snapshot),
                or_dash(snapshot.size.map(|size| bytes(size.shared_bytes))),
                or_dash(snapshot.memory.and_then(|memory| memory.bytes).map(bytes)),
                when::ago(&snapshot.created_at),
                when::until(snapshot.expires_at.as_deref()),
                snapshot.label.clone().unwrap_or_default(),
            ]);
        }
        context.screen.table(&table)
    })
}

fn described(paint: Paint, snapshot: &Snapshot) -> String {
    let mut lines = vec![
        ("id", snapshot.id.clone()),
        ("label", or_dash(snapshot.label.clone())),
        ("sandbox", snapshot.sandbox.clone()),
        ("generation", snapshot.generation.to_string()),
        ("kind", word(snapshot.kind)),
        ("parent", or_dash(snapshot.parent.clone())),
        ("session", snapshot.session.clone()),
        ("layers", snapshot.layers.to_string()),
    ];
    if let Some(size) = snapshot.size {
        lines.extend([
            ("own size", bytes(size.own_bytes)),
            ("shared size", bytes(size.shared_bytes)),
            ("freed if deleted", bytes(size.freed_if_deleted_bytes)),
            ("export size", format!("about {}", bytes(size.export_bytes))),
        ]);
    }
    if let Some(memory) = snapshot.memory {
        lines.extend([
            ("memory size", or_dash(memory.bytes.map(bytes))),
            ("memory layers", memory.layers.to_string()),
        ]);
    }
    lines.extend([
        ("created", when::ago(&snapshot.created_at)),
        ("expires", when::until(snapshot.expires_at.as_deref())),
    ]);
    facts(paint, &lines)
}

async fn export(context: &Context, id: &str, output: Option<&Path>) -> Result<(), Failure> {
    let snapshot = context.client.snapshot(id).await?;
    if let Some(size) = snapshot.size {
        let (layers, about) = (snapshot.layers, bytes(size.export_bytes));
        note(&format!(
            "exporting {layers} layers, those of the image included: about {about} on disk"
        ));
    }
    let mut download = context.client.export_snapshot(id).await?;
    if let Some(length) = download.length() {
        note(&format!("the archive has {}", bytes(length)));
    }
    let left_out = download.header("sandkeep-left-out").filter(|count| *count != "0");
    if let Some(count) = left_out {
        note(&format!(
            "{count} files are left out, which an OCI archive cannot hold: sockets, and names that begin with `.wh.`"
        ));
    }
    let Some(path) = output.filter(|path| *path != Path::new("-")) else {
        while let Some(piece) = download.next().await? {
            context.screen.bytes(&piece)?;
        }
        return Ok(());
    };
    let cannot = |error| Failure::caused(format!("cannot write `{}`", path.display()), error);
    // Written under another name first: a broken export must not look like a whole one.
    let partial = path.with_added_extension("partial");
    let mut file = tokio::fs::File::create(&partial).await.map_err(cannot)?;
    let copied = download.copy_to(&mut file).await;
    let done = match copied {
        Ok(count) => tokio::fs::rename(&partial, path).await.map(|()| count).map_err(cannot),
        Err(error) => Err(Failure::from(error)),
    };
    if done.is_err() {
        let _ = tokio::fs::remove_file(&partial).await;
    }
    note(&format!("{} written to {}", bytes(done?), path.display()));
    Ok(())
}
