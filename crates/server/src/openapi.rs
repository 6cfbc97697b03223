//! The description of `/v1`, made from the routes and types themselves.

use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use sandkeep_client::types;
use std::sync::LazyLock;
use utoipa::openapi::path::Operation;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{Content, OpenApi as Document, Ref, RefOr, Response, ResponseBuilder};
use utoipa::{Modify, OpenApi, ToSchema};

use crate::api::{
    approvals, audit, commands, drives, events, exec, files, forks, guard, images, metrics,
    network, ports, runs, sandboxes, secrets, services, snapshots, tenants, trash, webhooks,
};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Sandkeep",
        description = "Named, durable, isolated machines that sleep when idle, wake on the next call and fork in milliseconds. docs/API.md tells about streams, waking, idempotency and errors.",
        license(name = "Apache-2.0", identifier = "Apache-2.0"),
    ),
    paths(
        tenants::health,
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
        sandboxes::fork,
        sandboxes::checkpoint,
        sandboxes::rollback,
        sandboxes::extend,
        forks::diff,
        forks::patch,
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
    components(schemas(types::ErrorAnswer, types::ClientMessage)),
    security(("key" = [])),
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
        for item in document.paths.paths.values_mut() {
            let methods =
                [&mut item.get, &mut item.put, &mut item.post, &mut item.patch, &mut item.delete];
            methods.into_iter().flatten().for_each(add_failure);
        }
    }
}

fn add_failure(operation: &mut Operation) {
    let schema = Ref::from_schema_name("ErrorAnswer");
    let failure: Response = ResponseBuilder::new()
        .description("What went wrong, and what to do about it.")
        .content("application/json", Content::new(Some(schema)))
        .build();
    operation.responses.responses.insert("default".to_owned(), RefOr::T(failure));
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
