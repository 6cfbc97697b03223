//! Fills an index from the manifests.

use sandkeep_types::error_chain;

use super::{Manifests, is_unusable};
use crate::db::{Db as _, DbError, DbResult, SqliteDb};
use crate::model::Timestamp;

/// Reads everything that is on disk into an empty index. What cannot be read is left out.
pub(super) async fn fill(db: &SqliteDb, manifests: &dyn Manifests) -> DbResult<()> {
    let unread = |source| DbError::Query { action: "be filled from the disk", source };
    for project in manifests.projects().await.map_err(unread)? {
        db.put_project(&project).await?;
    }
    for snapshot in manifests.snapshots().await.map_err(unread)? {
        db.put_snapshot(&snapshot).await?;
    }
    for drive in manifests.drives().await.map_err(unread)? {
        db.put_drive(&drive).await?;
    }
    for mut sandbox in manifests.sandboxes().await.map_err(unread)? {
        if sandbox.phase_at == Timestamp::UNIX_EPOCH {
            sandbox.phase_at = sandbox.used_at;
        }
        match db.put_sandbox(&sandbox).await {
            // One of that name exists: a manifest was copied. Only that one is left out.
            Err(error) if !is_unusable(&error) => {
                tracing::error!(sandbox = %sandbox.id, error = error_chain(&error), "a sandbox was left out of the index");
                continue;
            }
            done => done?,
        }
        for session in manifests.sessions(&sandbox.id).await.map_err(unread)? {
            db.put_session(&session).await?;
        }
        for command in manifests.commands(&sandbox.id).await.map_err(unread)? {
            db.put_command(&command).await?;
        }
    }
    Ok(())
}
