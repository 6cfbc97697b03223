//! Authentication: the owner of a key, and the reach of its scope.
//!
//! A handler says what it needs by its first argument, [`Reader`], [`Writer`] or [`Admin`], so that
//! nothing of a request is looked at before its key was. The same place counts requests per key.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::FromRequestParts;
use axum::http::header::AUTHORIZATION;
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use sandkeep_core::model::{Name, Scope};

use crate::api::App;
use crate::audit;
use crate::connections::Via;
use crate::error::ApiError;
use sandkeep_core::engine::{Caller, WakeMode};

/// A caller that may look.
#[derive(Debug)]
pub(crate) struct Reader(pub(crate) Caller);

/// A caller that may change what its project has.
#[derive(Debug)]
pub(crate) struct Writer(pub(crate) Caller);

/// A caller that may approve, and accept runs.
#[derive(Debug)]
pub(crate) struct Approver(pub(crate) Caller);

/// A caller that may change what all projects share.
#[derive(Debug)]
pub(crate) struct Admin;

/// The same, where it matters for which project it acts.
#[derive(Debug)]
pub(crate) struct AdminCaller(pub(crate) Caller);

macro_rules! needs {
    ($name:ident, $scope:ident) => {
        impl FromRequestParts<Arc<App>> for $name {
            type Rejection = ApiError;
            async fn from_request_parts(
                parts: &mut Parts,
                app: &Arc<App>,
            ) -> Result<Self, ApiError> {
                caller(parts, app, Scope::$scope).map(Self)
            }
        }
    };
}

needs!(Reader, Read);
needs!(Writer, Write);
needs!(AdminCaller, Admin);

impl FromRequestParts<Arc<App>> for Approver {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, ApiError> {
        let caller = caller(parts, app, Scope::Write)?;
        may_approve(&caller)?;
        Ok(Self(caller))
    }
}

/// Refuses a caller that may not approve.
pub(crate) fn may_approve(caller: &Caller) -> Result<(), ApiError> {
    if caller.approve {
        return Ok(());
    }
    Err(ApiError::forbidden("this needs a key that may approve, and this one may not").hint(
        "an admin may; `keep key create LABEL --scope write --approve` makes such a key for others",
    ))
}

impl FromRequestParts<Arc<App>> for Admin {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, ApiError> {
        caller(parts, app, Scope::Admin).map(|_| Self)
    }
}

fn caller(parts: &Parts, app: &App, needed: Scope) -> Result<Caller, ApiError> {
    let mut caller = authorize(parts, app, needed)?;
    if let Some(project) = parts.headers.get("sandkeep-project") {
        caller.project = chosen(&caller, project.as_bytes())?;
        audit::project(&caller.project);
    }
    Ok(caller)
}

/// Whose key it is, if its scope reaches so far; counts the request and its connection.
pub(crate) fn authorize(parts: &Parts, app: &App, needed: Scope) -> Result<Caller, ApiError> {
    let caller = app.engine.authenticate(secret(&parts.headers)?)?;
    audit::caller(&caller);
    if parts.extensions.get::<Via>().is_some_and(|via| via.charge(&caller.key).is_err()) {
        return Err(ApiError::new(
            StatusCode::TOO_MANY_REQUESTS,
            "too_many_connections",
            "too many connections use this key",
        )
        .hint("use fewer at a time, or several requests on one connection")
        .retry_after(1));
    }
    app.rate.take(&caller.key, Instant::now()).map_err(|seconds| {
        ApiError::new(
            StatusCode::TOO_MANY_REQUESTS,
            "rate_limited",
            "too many requests with this key",
        )
        .hint(format!("wait {seconds} s and make fewer at a time"))
        .retry_after(seconds)
    })?;
    if caller.scope < needed {
        return Err(too_narrow(caller.scope, needed));
    }
    Ok(caller)
}

fn secret(headers: &HeaderMap) -> Result<&str, ApiError> {
    let refuse = |message: &str| {
        ApiError::new(StatusCode::UNAUTHORIZED, "unauthorized", message)
            .hint("send `Authorization: Bearer <key>`; the CLI reads SANDKEEP_KEY")
    };
    let value = headers.get(AUTHORIZATION).ok_or_else(|| refuse("no key was sent"))?;
    let text = value.to_str().map_err(|_| refuse("the Authorization header is not text"))?;
    let (scheme, secret) = text.split_once(' ').unwrap_or((text, ""));
    if scheme.eq_ignore_ascii_case("bearer") && !secret.trim().is_empty() {
        Ok(secret.trim())
    } else {
        Err(refuse("the Authorization header is not `Bearer <key>`"))
    }
}

/// The project an admin key wants to act for.
fn chosen(caller: &Caller, asked: &[u8]) -> Result<Name, ApiError> {
    let text = String::from_utf8_lossy(asked);
    let project: Name =
        text.parse().map_err(|error| ApiError::invalid(format!("Sandkeep-Project: {error}")))?;
    if project == caller.project || caller.scope == Scope::Admin {
        Ok(project)
    } else {
        Err(ApiError::forbidden(format!("this key acts for project `{}` only", caller.project))
            .hint("use a key of the other project, or an admin key"))
    }
}

fn too_narrow(has: Scope, needed: Scope) -> ApiError {
    let word = |scope| match scope {
        Scope::Read => "read",
        Scope::Write => "write",
        Scope::Admin => "admin",
    };
    let (has, needed) = (word(has), word(needed));
    ApiError::forbidden(format!("this needs a key of scope `{needed}`, and this one has `{has}`"))
        .hint(format!("create one with `keep key create --scope {needed}` and an admin key"))
}

/// Refuses to wake a sandbox for a key that may only look.
pub(crate) fn may_wake(caller: &Caller, wake: &WakeMode) -> Result<(), ApiError> {
    if caller.scope == Scope::Read && matches!(wake, WakeMode::Wake) {
        return Err(ApiError::forbidden("a key of scope `read` cannot wake a sandbox")
            .hint("add `?if_running=true`, or use a key of scope `write`"));
    }
    Ok(())
}
