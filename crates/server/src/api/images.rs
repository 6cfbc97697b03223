//! Images. All projects share them, so changing them takes an admin key.

use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use futures_util::{StreamExt, stream};
use sandkeep_client::types::{self, ImageProgress};
use sandkeep_core::model;
use tempfile::TempPath;
use tokio::io::AsyncWriteExt;
use tokio::sync::mpsc;

use super::input::{self, Params, PathParam};
use super::stream::{line, ndjson};
use super::{ApiResult, App, finish, wire};
use crate::auth::{Admin, Reader};
use crate::error::ApiError;
use crate::openapi::Raw;
use sandkeep_core::engine;
use sandkeep_core::store::image::{AddedDirectory, Customization, HOST, Progress, Reporter};

/// Lists the images on this server.
#[utoipa::path(get, path = "/v1/images", tag = "images", operation_id = "list_images",
    responses((status = 200, description = "All of them on one page.", body = types::Paged<types::Image>)))]
pub(crate) async fn list(
    _: Reader,
    State(app): State<Arc<App>>,
    params: Params,
) -> ApiResult<types::Paged<types::Image>> {
    params.end()?;
    let images = app.engine.images().list().await.map_err(engine::Error::from)?;
    let mut items = Vec::with_capacity(images.len());
    for image in images {
        let size = app.engine.image_size(&image).await?;
        items.push(wire::image(image, size));
    }
    Ok(Json(types::Paged { items, next: None }))
}

/// Shows an image.
#[utoipa::path(get, path = "/v1/images/{name}", tag = "images", operation_id = "get_image",
    params(("name" = String, Path, description = "Its name; slashes need no escaping.")),
    responses((status = 200, description = "The image.", body = types::Image)))]
pub(crate) async fn get(
    _: Reader,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<String>,
    params: Params,
) -> ApiResult<types::Image> {
    params.end()?;
    let image = app.engine.images().get(&name).await.map_err(engine::Error::from)?;
    let size = app.engine.image_size(&image).await?;
    Ok(Json(wire::image(image, size)))
}

/// Removes an image. Sandboxes that were made from it keep their files.
#[utoipa::path(delete, path = "/v1/images/{name}", tag = "images", operation_id = "remove_image",
    params(("name" = String, Path, description = "Its name; slashes need no escaping.")),
    responses((status = 204, description = "It was deleted.")))]
pub(crate) async fn remove(
    _: Admin,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<String>,
    params: Params,
) -> Result<StatusCode, ApiError> {
    params.end()?;
    let engine = app.engine.clone();
    finish(&app, async move { Ok(engine.images().remove(&name).await?) }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Fetches an image from a registry; `host` is made again from this machine.
#[utoipa::path(post, path = "/v1/images/pull", tag = "images", operation_id = "pull_image",
    request_body = types::PullRequest,
    responses((status = 200, description = "NDJSON: one progress report per line.", body = ImageProgress, content_type = "application/x-ndjson")))]
pub(crate) async fn pull(
    _: Admin,
    State(app): State<Arc<App>>,
    params: Params,
    input::Body(request): input::Body<types::PullRequest>,
) -> Result<Response, ApiError> {
    params.end()?;
    crate::audit::target("image", &request.reference);
    let engine = app.engine.clone();
    Ok(reported(&app, async move |reporter| {
        let images = engine.images();
        Ok(match request.reference.as_str() {
            "host" => images.host(true, &reporter).await?,
            reference => images.pull(reference, &reporter).await?,
        })
    }))
}

/// Imports an archive: the body itself, or, as JSON, a path on the server.
#[utoipa::path(post, path = "/v1/images/import", tag = "images", operation_id = "import_image",
    params(("name" = Option<String>, Query, description = "Name of the image; required if the body is the archive.")),
    request_body(
        description = "A root tarball, an OCI layout or a docker archive; or, as JSON, the path of one on the server.",
        content((types::ImportRequest = "application/json"), (Raw = "application/x-tar"))),
    responses((status = 200, description = "NDJSON: one progress report per line.", body = ImageProgress, content_type = "application/x-ndjson")))]
pub(crate) async fn import(
    _: Admin,
    State(app): State<Arc<App>>,
    mut params: Params,
    headers: HeaderMap,
    request: Request,
) -> Result<Response, ApiError> {
    let (path, name, upload) = if input::is_json(&headers) {
        params.end()?;
        let input::Body(wish) =
            input::Body::<types::ImportRequest>::from_request(request, &app).await?;
        if let Err(error) = tokio::fs::metadata(&wish.path).await {
            return Err(ApiError::invalid(format!("path: `{}` on the server: {error}", wish.path))
                .hint(
                    "`path` is on the server's disk and needs an admin key; send the archive as the body instead",
                ));
        }
        (PathBuf::from(wish.path), wish.name, None)
    } else {
        let name = params.needed("name")?;
        params.end()?;
        let upload = receive(&app, request.into_body(), u64::MAX).await?;
        (upload.to_path_buf(), name, Some(upload))
    };
    let engine = app.engine.clone();
    Ok(reported(&app, async move |reporter| {
        let images = engine.images();
        let done = match &upload {
            Some(path) => images.import_upload(&name, path, &reporter).await,
            None => images.import(&name, &path, &reporter).await,
        };
        // The upload was only needed until now.
        drop(upload);
        Ok(done?)
    }))
}

/// Customizes an image: adds a default user, a home and `sudo`, for clients that expect them.
#[utoipa::path(post, path = "/v1/images/customize", tag = "images", operation_id = "customize_image",
    request_body = types::CustomizeRequest,
    responses((status = 200, description = "NDJSON: one progress report per line.", body = ImageProgress, content_type = "application/x-ndjson")))]
pub(crate) async fn customize(
    _: Admin,
    State(app): State<Arc<App>>,
    params: Params,
    input::Body(request): input::Body<types::CustomizeRequest>,
) -> Result<Response, ApiError> {
    params.end()?;
    let add = request
        .add
        .into_iter()
        .map(|add| AddedDirectory { from: add.from.into(), to: add.to.into() });
    let customization = Customization { add: add.collect(), env: request.env, path: request.path };
    let base = request.from.unwrap_or_else(|| HOST.to_owned());
    crate::audit::target("image", &request.name);
    let engine = app.engine.clone();
    let checked = engine.images().check_customization(&base, &request.name, &customization).await;
    checked.map_err(engine::Error::from)?;
    Ok(reported(&app, async move |_| {
        Ok(engine.images().customize(&base, &request.name, &customization).await?)
    }))
}

/// Puts an uploaded archive of at most `most` bytes on the disk, piece by piece.
pub(super) async fn receive(app: &App, body: Body, most: u64) -> Result<TempPath, ApiError> {
    let disk = |error: io::Error| {
        tracing::error!(%error, "cannot store an upload");
        if error.kind() == io::ErrorKind::StorageFull {
            let message = "not enough disk space for the upload";
            ApiError::new(StatusCode::INSUFFICIENT_STORAGE, "insufficient_storage", message)
        } else {
            ApiError::internal()
        }
    };
    let (file, path) = tempfile::NamedTempFile::with_prefix_in("upload-", &app.scratch)
        .map_err(disk)?
        .into_parts();
    let mut file = tokio::fs::File::from_std(file);
    let mut pieces = body.into_data_stream();
    let mut left = most;
    while let Some(piece) = tokio::time::timeout(app.limits.upload_pause, pieces.next())
        .await
        .map_err(|_| ApiError::invalid("the upload paused for too long"))?
    {
        let bytes = piece.map_err(|_| ApiError::invalid("the upload broke off"))?;
        left = left.checked_sub(bytes.len() as u64).ok_or_else(|| {
            let message = format!("the archive has more than {} GiB", most >> 30);
            ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message)
                .hint("leave files out with .dockerignore")
        })?;
        file.write_all(&bytes).await.map_err(disk)?;
    }
    file.flush().await.map_err(disk)?;
    Ok(path)
}

/// Runs `work` to its end, whether or not the caller stays, and streams its reports while it does.
fn reported<F>(app: &Arc<App>, work: impl FnOnce(Reporter) -> F + Send + 'static) -> Response
where
    F: Future<Output = Result<model::Image, engine::Error>> + Send + 'static,
{
    // Reports may be dropped when the caller is slow: the next one says more anyway.
    let (say, reports) = mpsc::channel::<ImageProgress>(64);
    let last_word = say.clone();
    let tasks = app.tasks.clone();
    let engine = app.engine.clone();
    let reporter = Reporter::new(move |Progress { what, done, total }| {
        let _ = say.try_send(ImageProgress::Progress { what, done, total });
    });
    let scope = crate::request_id::RequestScope::current();
    app.tasks.spawn(async move {
        let last = match tasks.spawn(scope.run(work(reporter))).await {
            Ok(Ok(image)) => {
                let size = engine.image_size(&image).await.unwrap_or_default();
                ImageProgress::Done { image: wire::image(image, size) }
            }
            Ok(Err(error)) => ImageProgress::Error { error: ApiError::from(error).into_body() },
            Err(error) => {
                tracing::error!(%error, "a task that builds an image panicked");
                ImageProgress::Error { error: ApiError::internal().into_body() }
            }
        };
        let _ = last_word.send(last).await;
    });
    let state = Some((reports, app.closing.clone()));
    let lines = stream::unfold(state, async |state| {
        let (mut reports, closing) = state?;
        let report = tokio::select! {
            biased;
            report = reports.recv() => report?,
            () = closing.cancelled() => {
                ImageProgress::Error { error: ApiError::shutting_down().into_body() }
            }
        };
        let goes_on = matches!(report, ImageProgress::Progress { .. });
        Some((Ok::<Bytes, io::Error>(line(&report)), goes_on.then_some((reports, closing))))
    });
    ndjson(Body::from_stream(lines))
}
