//! Builds of images from Dockerfiles. Their steps belong to the project of the call, and the image is for all of them, so a
//! build takes an admin key.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::HeaderMap;
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::stream;
use sandkeep_client::types::{self, BuildProgress};
use sandkeep_proto::link::Hidden;
use tokio::sync::mpsc;

use super::images::receive;
use super::input::Params;
use super::stream::{line, ndjson};
use super::{ApiResult, App, wire};
use crate::auth::AdminCaller;
use crate::error::ApiError;
use crate::openapi::Raw;
use sandkeep_core::engine::{BuildEvent, BuildRequest};
use sandkeep_core::model::Image;

/// The largest context, packed.
const LARGEST: u64 = 16 << 30;
/// The header that brings a secret.
const SECRET: &str = "sandkeep-build-secret";

/// Builds an image from a Dockerfile. The body is the build context.
///
/// The build ends when the caller leaves. What it has finished is in the cache, and the same call goes on from there.
#[utoipa::path(post, path = "/v1/images/build", tag = "images", operation_id = "build_image",
    params(
        ("name" = String, Query, description = "Name of the image."),
        ("dockerfile" = Option<String>, Query, description = "The Dockerfile's path in the context; `Dockerfile` if absent."),
        ("arg" = Option<Vec<String>>, Query, description = "Value of an `ARG`, as `NAME=VALUE`; may be repeated."),
        ("target" = Option<String>, Query, description = "The stage to build; the last if absent."),
        ("no_cache" = Option<bool>, Query, description = "Whether steps are made that are in the cache."),
        ("Sandkeep-Build-Secret" = Option<String>, Header, description = "A secret for `RUN --mount=type=secret`: `ID=` and the value in base64; may be repeated."),
    ),
    request_body(
        description = "The build context: a tar archive, plain or packed with gzip or zstd.",
        content((Raw = "application/x-tar"))),
    responses((status = 200, description = "NDJSON: steps, their output and progress; then `done` or `error`.", body = BuildProgress, content_type = "application/x-ndjson")))]
pub(crate) async fn build(
    AdminCaller(caller): AdminCaller,
    State(app): State<Arc<App>>,
    mut params: Params,
    headers: HeaderMap,
    request: Request,
) -> Result<Response, ApiError> {
    let name = params.needed("name")?;
    let dockerfile = params.text("dockerfile")?.unwrap_or_else(|| "Dockerfile".to_owned());
    let target = params.text("target")?;
    let no_cache = params.flag("no_cache")?;
    let mut args = BTreeMap::new();
    for arg in params.all("arg") {
        let Some((name, value)) = arg.split_once('=').filter(|(name, _)| !name.is_empty()) else {
            return Err(ApiError::invalid(format!("`arg`: `{arg}` is not NAME=VALUE")));
        };
        args.insert(name.to_owned(), value.to_owned());
    }
    params.end()?;
    let secrets = secrets(&headers)?;
    crate::audit::target("image", &name);
    let context = receive(&app, request.into_body(), LARGEST).await?;
    let request = BuildRequest {
        context: context.to_path_buf(),
        dockerfile,
        name,
        args,
        target,
        secrets,
        no_cache,
        by: Some(caller.key.to_string()),
    };
    let (events, heard) = mpsc::channel(64);
    let (engine, project) = (app.engine.clone(), caller.project);
    let scope = crate::request_id::RequestScope::current();
    let built = app.tasks.spawn(scope.run(async move {
        let built = engine.build_image(&project, request, events).await;
        // The context was needed until now.
        drop(context);
        let image = built?;
        let size = engine.image_size(&image).await.unwrap_or_default();
        Ok((image, size))
    }));
    let state = Some(BuildFollow { heard, built, closing: app.closing.clone() });
    let lines = stream::unfold(state, async |state| {
        let (report, state) = state?.next().await;
        Some((Ok::<Bytes, io::Error>(line(&report)), state))
    });
    Ok(ndjson(Body::from_stream(lines)))
}

/// Removes what builds of the project have kept for the next one. Images stay.
#[utoipa::path(post, path = "/v1/images/prune", tag = "images", operation_id = "prune_builds",
    responses((status = 200, description = "How much was removed.", body = types::PrunedBuilds)))]
pub(crate) async fn prune(
    AdminCaller(caller): AdminCaller,
    State(app): State<Arc<App>>,
    params: Params,
) -> ApiResult<types::PrunedBuilds> {
    params.end()?;
    let steps = app.engine.prune_builds(&caller.project).await?;
    Ok(Json(types::PrunedBuilds { steps: steps as u64 }))
}

fn secrets(headers: &HeaderMap) -> Result<BTreeMap<String, Hidden>, ApiError> {
    let mut secrets = BTreeMap::new();
    let wrong = || ApiError::invalid("Sandkeep-Build-Secret: use `ID=` and the value in base64");
    for header in headers.get_all(SECRET) {
        // Several headers of one name may arrive as one.
        for one in header.to_str().map_err(|_| wrong())?.split(',') {
            let (id, value) = one.trim().split_once('=').ok_or_else(wrong)?;
            let value = STANDARD.decode(value).map_err(|_| wrong())?;
            let value = String::from_utf8(value).map_err(|_| {
                ApiError::invalid(format!("the secret `{id}` is not text in UTF-8"))
            })?;
            if id.is_empty() || value.contains('\0') {
                let message = "a secret needs an id, and a value without NUL bytes";
                return Err(ApiError::invalid(message));
            }
            secrets.insert(id.to_owned(), Hidden::new(&value));
        }
    }
    Ok(secrets)
}

type Built = Result<(Image, (u64, u64)), sandkeep_core::engine::Error>;

/// A build, for as long as its caller hears of it. When this is dropped, the build ends.
struct BuildFollow {
    heard: mpsc::Receiver<BuildEvent>,
    built: tokio::task::JoinHandle<Built>,
    closing: tokio_util::sync::CancellationToken,
}

impl BuildFollow {
    async fn next(mut self) -> (BuildProgress, Option<Self>) {
        let event = tokio::select! {
            biased;
            event = self.heard.recv() => event,
            () = self.closing.cancelled() => {
                let error = ApiError::shutting_down().into_body();
                return (BuildProgress::Error { error }, None);
            }
        };
        let report = match event {
            Some(BuildEvent::Step { number, total, line, text, cached }) => BuildProgress::Step {
                number: number as u64,
                total: total as u64,
                line: line as u64,
                text,
                cached,
            },
            Some(BuildEvent::Output(bytes)) => {
                BuildProgress::Output { text: String::from_utf8_lossy(&bytes).into_owned() }
            }
            Some(BuildEvent::Progress(progress)) => BuildProgress::Progress {
                what: progress.what,
                done: progress.done,
                total: progress.total,
            },
            Some(BuildEvent::Warning(text)) => BuildProgress::Warning { text },
            None => return (self.last().await, None),
        };
        (report, Some(self))
    }

    async fn last(self) -> BuildProgress {
        match self.built.await {
            Ok(Ok((image, size))) => BuildProgress::Done { image: wire::image(image, size) },
            Ok(Err(error)) => BuildProgress::Error { error: ApiError::from(error).into_body() },
            Err(error) => {
                tracing::error!(%error, "a task that builds an image panicked");
                BuildProgress::Error { error: ApiError::internal().into_body() }
            }
        }
    }
}
