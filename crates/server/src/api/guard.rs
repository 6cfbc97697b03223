//! The seal guard in the API's types, and its quarantine.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use sandkeep_client::types;
use sandkeep_core::model::{self, SnapshotId};

use super::input::{Params, PathParam};
use super::{ApiResult, App};
use crate::auth::Admin;

/// Lists quarantined files, newest first. For operators.
#[utoipa::path(get, path = "/v1/quarantine", tag = "guard", operation_id = "list_quarantine",
    responses((status = 200, description = "All of it.", body = types::Paged<types::Quarantine>)))]
pub(crate) async fn list(
    _: Admin,
    State(app): State<Arc<App>>,
    params: Params,
) -> ApiResult<types::Paged<types::Quarantine>> {
    params.end()?;
    let all = app.engine.quarantines().await?;
    Ok(Json(types::Paged { items: all.into_iter().map(quarantine).collect(), next: None }))
}

/// Deletes quarantined files permanently. For operators.
#[utoipa::path(delete, path = "/v1/quarantine/{id}", tag = "guard", operation_id = "delete_quarantine",
    params(("id" = String, Path, description = "The snapshot from which the files were removed.")),
    responses((status = 200, description = "It was deleted.", body = types::Quarantine)))]
pub(crate) async fn remove(
    _: Admin,
    State(app): State<Arc<App>>,
    PathParam(id): PathParam<SnapshotId>,
    params: Params,
) -> ApiResult<types::Quarantine> {
    params.end()?;
    Ok(Json(quarantine(app.engine.remove_quarantine(&id).await?)))
}

fn quarantine(quarantine: model::Quarantine) -> types::Quarantine {
    let id = quarantine.id;
    let file = |file: model::Aside| types::QuarantinedFile {
        path: file.shown,
        kept_at: format!("aside/{id}/{}", file.kept_as),
        size_bytes: file.size,
    };
    types::Quarantine {
        project: quarantine.project.into(),
        sandbox: quarantine.sandbox_name.into(),
        drive_id: quarantine.drive.map(Into::into),
        at: quarantine.at.to_string(),
        files: quarantine.files.into_iter().map(file).collect(),
        findings: findings(quarantine.findings),
        id: id.into(),
    }
}

pub(super) fn guard(guard: model::Guard) -> types::Guard {
    types::Guard {
        secrets: guard.secrets,
        junk: guard.junk,
        large_bytes: guard.large.0,
        globs: guard.globs,
    }
}

pub(super) fn decision(stop: types::Stop) -> model::Decision {
    let types::Stop { redact, discard, promote, drop, accept_doubtful } = stop;
    model::Decision { redact, discard, promote, drop, accept_doubtful }
}

pub(crate) fn findings(findings: Vec<model::Finding>) -> Vec<types::Finding> {
    findings.into_iter().map(finding).collect()
}

fn finding(finding: model::Finding) -> types::Finding {
    let suspect = |suspect: model::Suspect| types::Suspect {
        command: suspect.command.into(),
        argv: suspect.argv,
        because: match suspect.because {
            model::Because::Given => types::Because::Given,
            model::Because::Running => types::Because::Running,
            model::Because::GivenAndRunning => types::Because::GivenAndRunning,
        },
    };
    types::Finding {
        kind: match finding.kind {
            model::FindingKind::Secret => types::FindingKind::Secret,
            model::FindingKind::Large => types::FindingKind::Large,
            model::FindingKind::Junk => types::FindingKind::Junk,
            model::FindingKind::CoreDump => types::FindingKind::CoreDump,
            model::FindingKind::Unsearched => types::FindingKind::Unsearched,
            model::FindingKind::Doubtful => types::FindingKind::Doubtful,
        },
        path: finding.path,
        size_bytes: finding.size,
        secret: finding.secret,
        place: finding.place.map(|place| match place {
            model::Place::Contents => types::FindingPlace::Contents,
            model::Place::Name => types::FindingPlace::Name,
            model::Place::Link => types::FindingPlace::Link,
            model::Place::Attribute => types::FindingPlace::Attribute,
            model::Place::Member => types::FindingPlace::Member,
        }),
        encoding: finding.encoding.map(|encoding| match encoding {
            model::Encoding::Plain => types::ValueEncoding::Plain,
            model::Encoding::Json => types::ValueEncoding::Json,
            model::Encoding::Url => types::ValueEncoding::Url,
            model::Encoding::Base64 => types::ValueEncoding::Base64,
            model::Encoding::Hex => types::ValueEncoding::Hex,
        }),
        offset: finding.offset,
        detail: finding.detail,
        commands: finding.commands.into_iter().map(suspect).collect(),
    }
}
