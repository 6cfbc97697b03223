//! Secrets. Values come in and never go out.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use sandkeep_client::types;
use sandkeep_core::engine::SetSecret;
use sandkeep_core::model::{
    Inject, InjectInto, Secret, SecretGiven, SecretHow, SecretName, SecretPlace, SecretUse,
};
use zeroize::Zeroizing;

use super::input::{Body, Params, PathParam, parsed};
use super::{ApiResult, App, finish};
use crate::auth::{Reader, Writer};
use crate::error::ApiError;

fn out(secret: Secret) -> types::Secret {
    types::Secret {
        version: secret.version(),
        versions: secret
            .versions
            .iter()
            .map(|version| types::SecretVersion {
                version: version.version,
                created_at: version.created_at.to_string(),
            })
            .collect(),
        name: secret.name.into(),
        project: secret.project.into(),
        hosts: secret.hosts.iter().map(ToString::to_string).collect(),
        places: places_out(&secret.places),
        tags: secret.tags,
        created_at: secret.created_at.to_string(),
        updated_at: secret.updated_at.to_string(),
    }
}

/// All places, headers among them.
fn places_out(places: &BTreeSet<SecretPlace>) -> Vec<types::SecretPlace> {
    let more = places.iter().map(|place| match place {
        SecretPlace::Query => types::SecretPlace::Query,
        SecretPlace::Body => types::SecretPlace::Body,
    });
    std::iter::once(types::SecretPlace::Header).chain(more).collect()
}

/// The places besides headers, which always are one.
fn places_in(places: &[types::SecretPlace]) -> BTreeSet<SecretPlace> {
    let more = places.iter().filter_map(|place| match place {
        types::SecretPlace::Header => None,
        types::SecretPlace::Query => Some(SecretPlace::Query),
        types::SecretPlace::Body => Some(SecretPlace::Body),
    });
    more.collect()
}

/// What a sandbox uses, as the model checks it.
pub(super) fn uses_in(uses: Vec<types::SecretUse>) -> Result<Vec<SecretUse>, ApiError> {
    let used = |used: types::SecretUse| {
        let secret: SecretName = parsed("secrets", &used.secret)?;
        Ok(SecretUse { env: used.env.unwrap_or_else(|| secret.to_string()), secret })
    };
    uses.into_iter().map(used).collect()
}

pub(super) fn use_out(used: SecretUse) -> types::SecretUse {
    types::SecretUse { secret: used.secret.into(), env: Some(used.env) }
}

pub(super) fn given_out(given: SecretGiven) -> types::SecretGiven {
    let how = match given.how {
        SecretHow::Brokered => types::SecretHow::Brokered,
        SecretHow::Env => types::SecretHow::Env,
        SecretHow::File => types::SecretHow::File,
    };
    types::SecretGiven { name: given.name.into(), version: given.version, how }
}

/// What a command is given, as the engine checks it.
pub(super) fn inject_in(inject: Vec<types::Inject>) -> Result<Vec<Inject>, ApiError> {
    let one = |inject: types::Inject| {
        let secret: SecretName = parsed("inject", &inject.secret)?;
        let into = match (inject.env, inject.file) {
            (Some(_), Some(_)) => {
                let reason = format!("inject: `{secret}` goes into `env` or into a `file`");
                return Err(ApiError::invalid(reason));
            }
            (None, Some(path)) => InjectInto::File(path),
            (env, None) => InjectInto::Env(env.unwrap_or_else(|| secret.to_string())),
        };
        Ok(Inject { secret, into })
    };
    inject.into_iter().map(one).collect()
}

/// Lists the secrets of a project by name, without values.
#[utoipa::path(get, path = "/v1/secrets", tag = "secrets", operation_id = "list_secrets",
    responses((status = 200, description = "All of them.", body = Vec<types::Secret>)))]
pub(crate) async fn list(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    params: Params,
) -> ApiResult<Vec<types::Secret>> {
    params.end()?;
    Ok(Json(app.engine.secrets(&caller.project).into_iter().map(out).collect()))
}

/// Sets a secret: creates it, or gives it a new value that is used from then on.
#[utoipa::path(put, path = "/v1/secrets/{name}", tag = "secrets", operation_id = "set_secret",
    params(("name" = String, Path, description = "Its name: letters, digits and `_`, no digit first.")),
    request_body = types::SetSecret,
    responses(
        (status = 201, description = "The secret was created.", body = types::Secret),
        (status = 200, description = "The secret has a new version.", body = types::Secret),
    ))]
pub(crate) async fn set(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<SecretName>,
    params: Params,
    Body(request): Body<types::SetSecret>,
) -> Result<(StatusCode, Json<types::Secret>), ApiError> {
    params.end()?;
    let types::SetSecret { value, hosts, places, tags } = request;
    let value = Zeroizing::new(value);
    let host = |(at, host): (usize, &String)| {
        host.parse().map_err(|error| ApiError::invalid(format!("hosts[{at}]: {error}")))
    };
    let hosts = hosts.map(|hosts| hosts.iter().enumerate().map(host).collect()).transpose()?;
    let engine = app.engine.clone();
    let places = places.as_deref().map(places_in);
    let set = SetSecret { value, hosts, places, tags };
    let work = async move { engine.set_secret(&caller.project, name, set).await };
    let secret = finish(&app, work).await?;
    let new = secret.created_at == secret.updated_at;
    Ok((if new { StatusCode::CREATED } else { StatusCode::OK }, Json(out(secret))))
}

/// Shows a secret, without its value.
#[utoipa::path(get, path = "/v1/secrets/{name}", tag = "secrets", operation_id = "get_secret",
    params(("name" = String, Path, description = "Its name.")),
    responses((status = 200, description = "The secret.", body = types::Secret)))]
pub(crate) async fn get(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<SecretName>,
    params: Params,
) -> ApiResult<types::Secret> {
    params.end()?;
    Ok(Json(out(app.engine.secret(&caller.project, &name)?)))
}

/// Deletes a secret, with all its values.
#[utoipa::path(delete, path = "/v1/secrets/{name}", tag = "secrets", operation_id = "delete_secret",
    params(("name" = String, Path, description = "Its name.")),
    responses((status = 200, description = "The deleted secret.", body = types::Secret)))]
pub(crate) async fn remove(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<SecretName>,
    params: Params,
) -> ApiResult<types::Secret> {
    params.end()?;
    let engine = app.engine.clone();
    let work = async move {
        let was = engine.secret(&caller.project, &name)?;
        engine.delete_secret(&caller.project, &name).await?;
        Ok(was)
    };
    Ok(Json(out(finish(&app, work).await?)))
}
