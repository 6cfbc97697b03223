//! Snapshots: list, get, delete, and the tree they form.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;

use axum::extract::{Path, State};
use axum::routing::get;
use axum::{Json, Router};
use sandkeep_core::db::{By, Direction, Page};
use sandkeep_core::engine::{Caller, Sized, SnapshotFilter};
use sandkeep_core::model::{Snapshot, SnapshotId};
use serde_json::{Value, json};

use super::protocol::auth::{Acts, Looks};
use super::protocol::error::VercelError;
use super::protocol::ids::Foreign as _;
use super::protocol::input::QueryParams;
use super::protocol::wire;
use super::sandboxes::{DIRECTIONS, page, pagination};
use super::{Answer, done};
use crate::api::App;

/// How many siblings of a node are shown; all are counted.
const SIBLINGS: usize = 10;

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/v2/sandboxes/snapshots", get(list))
        .route("/v2/sandboxes/snapshots/tree", get(tree))
        .route("/v2/sandboxes/snapshots/{id}", get(look).delete(remove))
}

async fn list(Looks(caller): Looks, State(app): State<Arc<App>>, asked: QueryParams) -> Answer {
    let page = page(&asked, By::Created, Direction::Descending)?;
    let sandbox = match asked.text("name") {
        // Snapshots outlive their sandbox, so an unused name is no mistake.
        Some(name) => match name.parse() {
            Ok(name) => Some(name),
            Err(_) => {
                return Ok(Json(json!({ "snapshots": [], "pagination": pagination(0, None) })));
            }
        },
        None => None,
    };
    let filter = SnapshotFilter { sandbox, deleted: true };
    let found = app.engine.snapshots(&caller.project, filter, &page).await?;
    let snapshots: Vec<_> = found.items.iter().map(wire::snapshot).collect();
    let pagination = pagination(snapshots.len(), found.next);
    Ok(Json(json!({ "snapshots": snapshots, "pagination": pagination })))
}

async fn find(app: &App, caller: &Caller, id: &str) -> Result<Sized<Snapshot>, VercelError> {
    let id = SnapshotId::read(id).ok_or_else(|| VercelError::not_found("Snapshot"))?;
    Ok(app.engine.snapshot_record(&caller.project, &id).await?)
}

async fn look(Looks(caller): Looks, State(app): State<Arc<App>>, Path(id): Path<String>) -> Answer {
    let found = find(&app, &caller, &id).await?;
    Ok(Json(json!({ "snapshot": wire::snapshot(&found) })))
}

/// Deletes a snapshot, also one that a stopped sandbox stands on: that is what was asked for, and the
/// sandbox says so when it is resumed.
async fn remove(Acts(caller): Acts, State(app): State<Arc<App>>, Path(id): Path<String>) -> Answer {
    let found = find(&app, &caller, &id).await?;
    if found.item.deleted_at.is_none() {
        let (engine, project, id) = (app.engine.clone(), caller.project.clone(), found.item.id);
        done(&app.tasks, async move { engine.delete_snapshot(&project, &id, true).await }).await?;
    }
    let gone = find(&app, &caller, &id).await?;
    Ok(Json(json!({ "snapshot": wire::snapshot(&gone) })))
}

/// Walks from a snapshot to its ancestors (`desc`) or its descendants (`asc`). The snapshot itself is
/// the `anchor`; the next page is anchored on the last node of this one.
async fn tree(Looks(caller): Looks, State(app): State<Arc<App>>, asked: QueryParams) -> Answer {
    let Some(anchor) = asked.text("snapshotId") else {
        return Err(VercelError::bad("missing required property `snapshotId`."));
    };
    let limit = asked.number("limit", 1..=10)?.unwrap_or(10) as usize;
    let direction = asked.word("sortOrder", &DIRECTIONS)?.unwrap_or(Direction::Descending);
    let anchor = find(&app, &caller, anchor).await?;
    let filter = SnapshotFilter { sandbox: None, deleted: true };
    let all = app.engine.snapshots(&caller.project, filter, &Page::all()).await?.items;
    let family = Family::new(&all);
    let mut at = &anchor.item;
    let mut nodes = Vec::new();
    let mut more = false;
    while let Some(next) = family.step(at, direction) {
        if nodes.len() == limit {
            more = true;
            break;
        }
        nodes.push(family.node(next));
        at = &next.item;
    }
    let next = more.then(|| at.id.out());
    let count = nodes.len();
    Ok(Json(json!({
        "snapshots": nodes,
        "anchor": family.node(&anchor),
        "pagination": pagination(count, next),
    })))
}

/// Snapshots of a project, by parent.
struct Family<'a> {
    by_id: HashMap<&'a SnapshotId, &'a Sized<Snapshot>>,
    children: HashMap<&'a SnapshotId, Vec<&'a Sized<Snapshot>>>,
}

impl<'a> Family<'a> {
    fn new(all: &'a [Sized<Snapshot>]) -> Self {
        let by_id = all.iter().map(|one| (&one.item.id, one)).collect();
        let mut children: HashMap<_, Vec<_>> = HashMap::new();
        for one in all {
            if let Some(parent) = &one.item.parent {
                children.entry(parent).or_default().push(one);
            }
        }
        for brood in children.values_mut() {
            brood.sort_by_key(|one| Reverse((one.item.created_at, one.item.id.clone())));
        }
        Self { by_id, children }
    }

    /// The parent, or the newest child.
    fn step(&self, from: &Snapshot, direction: Direction) -> Option<&'a Sized<Snapshot>> {
        match direction {
            Direction::Descending => self.by_id.get(from.parent.as_ref()?).copied(),
            Direction::Ascending => self.children.get(&from.id)?.first().copied(),
        }
    }

    fn node(&self, one: &Sized<Snapshot>) -> Value {
        let brood = one.item.parent.as_ref().and_then(|parent| self.children.get(parent));
        let siblings: Vec<_> = brood
            .into_iter()
            .flatten()
            .filter(|other| other.item.id != one.item.id)
            .map(|other| wire::snapshot(other))
            .collect();
        let count = (siblings.len() + 1).to_string();
        let shown: Vec<_> = siblings.into_iter().take(SIBLINGS).collect();
        json!({ "snapshot": wire::snapshot(one), "siblings": shown, "count": count })
    }
}
