//! The description of `/v1`, generated from the routes and types.

mod examples;
mod failures;

use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use sandkeep_client::types;
use std::sync::LazyLock;
use utoipa::openapi::schema::ArrayItems;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{Object, OpenApi as Document, Ref, RefOr, Schema};
use utoipa::{Modify, OpenApi, ToSchema};

use crate::api::{
    approvals, audit, builds, commands, drives, events, exec, files, forks, guard, health, images,
    metrics, network, ports, runs, sandboxes, secrets, services, snapshots, stats, tenants, trash,
    webhooks,
};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Sandkeep",
        description = "Named, durable, isolated machines that sleep when idle, wake on the next call and fork in milliseconds. docs/API.md tells about streams, waking, idempotency and errors.",
        license(name = "Apache-2.0", identifier = "Apache-2.0"),
    ),
    paths(
        health::health,
        health::ready,
        tenants::who_am_i,
        tenants::issue_token,
        tenants::usage,
        tenants::damage,
        events::stream,
        audit::entries,
        audit::verify,
        metrics::metrics,
        trash::list,
        trash::restore,
        trash::empty,
        tenants::fsck,
        sandboxes::list,
        sandboxes::create,
        sandboxes::get,
        sandboxes::update,
        sandboxes::remove,
        sandboxes::start,
        sandboxes::stop,
        sandboxes::pause,
        sandboxes::why,
        stats::get,
        stats::list,
        sandboxes::fork,
        sandboxes::checkpoint,
        sandboxes::rollback,
        sandboxes::extend,
        forks::diff,
        forks::patch,
        forks::artifacts,
        forks::list,
        forks::promote,
        forks::merge,
        forks::rename,
        sandboxes::sessions,
        sandboxes::tree,
        exec::exec,
        exec::web_socket,
        commands::list,
        commands::get,
        commands::changes,
        commands::logs,
        commands::signal,
        commands::resize,
        commands::stdin,
        files::read,
        files::write,
        files::remove,
        files::stat,
        files::list,
        files::make_dir,
        files::rename,
        files::tar_out,
        files::tar_in,
        ports::list,
        ports::publish,
        ports::issue_token,
        ports::connect,
        ports::web_socket,
        network::get,
        network::set,
        network::connections,
        network::summary,
        services::list,
        services::set,
        services::remove,
        services::start,
        services::stop,
        snapshots::list,
        snapshots::of_sandbox,
        snapshots::get,
        snapshots::remove,
        snapshots::export,
        secrets::list,
        secrets::set,
        secrets::get,
        secrets::remove,
        webhooks::list,
        webhooks::create,
        webhooks::get,
        webhooks::update,
        webhooks::rotate,
        webhooks::test,
        webhooks::remove,
        guard::list,
        guard::remove,
        drives::list,
        drives::create,
        drives::get,
        drives::fork,
        drives::remove,
        forks::promote_into_drive,
        images::list,
        images::get,
        images::remove,
        images::pull,
        images::import,
        images::customize,
        builds::build,
        builds::prune,
        tenants::projects,
        tenants::create_project,
        tenants::delete_project,
        tenants::keys,
        tenants::create_key,
        tenants::revoke_key,
        network::of_project,
        network::set_for_project,
        runs::of_project,
        runs::set_for_project,
        runs::start,
        runs::list,
        runs::get,
        runs::cancel,
        runs::heartbeat,
        runs::finish_run,
        runs::review,
        runs::pin_again,
        runs::accept,
        runs::reject,
        approvals::ask,
        approvals::list,
        approvals::get,
        approvals::answer,
    ),
    components(schemas(types::ErrorAnswer)),
    security(("key" = [])),
    servers((url = "http://127.0.0.1:7777", description = "Where `keep serve` listens by default.")),
    tags(
        (name = "server", description = "The server itself: health, the caller's key, disk space, damage."),
        (name = "sandboxes", description = "Create, start, stop, pause, fork, checkpoint, roll back and delete sandboxes."),
        (name = "commands", description = "Run commands, follow their output, send input and signals."),
        (name = "files", description = "Read and write files of a sandbox."),
        (name = "forks", description = "Compare sandboxes and snapshots; promote and merge forks."),
        (name = "snapshots", description = "List, export and delete snapshots."),
        (name = "runs", description = "Queue agents' work and review its result."),
        (name = "approvals", description = "Questions that somebody answers before work goes on."),
        (name = "ports", description = "Publish and connect to ports of a sandbox."),
        (name = "services", description = "Programs that are started with every session of a sandbox."),
        (name = "network", description = "Network policies and the journal of connections."),
        (name = "secrets", description = "Secrets of a project, which sandboxes use and responses never contain."),
        (name = "drives", description = "Volumes that outlive sandboxes."),
        (name = "images", description = "Images that sandboxes start from."),
        (name = "events", description = "What happens, as a stream."),
        (name = "webhooks", description = "Events, sent to an address of yours."),
        (name = "audit", description = "The log of who did what."),
        (name = "guard", description = "Files that the guard moved aside."),
        (name = "projects", description = "Projects, their keys and tokens."),
        (name = "trash", description = "Deleted sandboxes that can be restored."),
    ),
    modifiers(&Common),
)]
struct Described;

/// Raw bytes.
#[derive(ToSchema)]
#[schema(value_type = String, format = Binary)]
pub(crate) struct Raw(#[allow(dead_code)] Vec<u8>);

/// What holds for every route and would otherwise be repeated at each.
struct Common;

impl Modify for Common {
    fn modify(&self, document: &mut Document) {
        let key = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).description(Some(
            "A key, `skp_…`, of scope `read`, `write` or `admin`. `keep key create` makes one.",
        ));
        let components = document.components.get_or_insert_default();
        components.add_security_scheme("key", SecurityScheme::Http(key.build()));
        components.responses.extend(failures::responses());
        let names: Vec<String> = components.schemas.keys().cloned().collect();
        for (name, schema) in &mut components.schemas {
            let item =
                name.strip_prefix("Paged_").filter(|item| names.iter().any(|one| one == item));
            if let (Some(item), RefOr::T(Schema::Object(page))) = (item, schema) {
                refer_to_items(page, item);
            }
        }
        for (path, item) in &mut document.paths.paths {
            let changes =
                [&mut item.put, &mut item.post, &mut item.patch, &mut item.delete].into_iter();
            for operation in changes.flatten() {
                failures::add(operation, path, true);
                examples::add(operation);
            }
            if let Some(operation) = &mut item.get {
                failures::add(operation, path, false);
                examples::add(operation);
            }
        }
    }
}

/// Describes the items of a page by the name of their schema, which would otherwise be written out in each of them.
fn refer_to_items(page: &mut Object, item: &str) {
    if let Some(RefOr::T(Schema::Array(items))) = page.properties.get_mut("items") {
        let reference = RefOr::Ref(Ref::from_schema_name(item));
        items.items = ArrayItems::RefOrSchema(Box::new(reference));
    }
}

/// The document, as pretty JSON.
#[must_use]
pub fn json() -> String {
    let mut text = Described::openapi().to_pretty_json().unwrap_or_default();
    text.push('\n');
    text
}

pub(crate) async fn document() -> impl IntoResponse {
    static TEXT: LazyLock<String> = LazyLock::new(json);
    ([(CONTENT_TYPE, "application/json")], TEXT.as_str())
}
