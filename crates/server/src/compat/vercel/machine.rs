//! What a new sandbox stands on: which image a runtime, an image or nothing at all means.

use super::error::VercelError;
use crate::api::App;

/// What a sandbox is made from.
#[derive(Debug)]
pub(super) struct Ground {
    /// The engine's name of the image.
    pub(super) image: String,
    /// What to call it: clients of 2.x insist on a runtime.
    pub(super) runtime: String,
    /// The image that was asked for, with its digest.
    pub(super) reference: Option<String>,
}

pub(super) async fn choose(
    app: &App,
    runtime: Option<&str>,
    image: Option<&str>,
) -> Result<Ground, VercelError> {
    let settings = &app.vercel;
    let found = match (runtime, image) {
        (Some(runtime), _) => settings.runtimes.get(runtime).cloned(),
        (None, Some(image)) => {
            Some(settings.images.get(image).cloned().unwrap_or(image.to_owned()))
        }
        (None, None) => Some(settings.default_image.clone().unwrap_or_else(|| "host".to_owned())),
    };
    let Some(found) = found else {
        let there: Vec<&str> = settings.runtimes.keys().map(String::as_str).collect();
        return Err(VercelError::bad(format!("`runtime` should be one of {there:?}.")));
    };
    let runtime = runtime.unwrap_or("universal").to_owned();
    Ok(Ground { image: found, runtime, reference: image.map(ToOwned::to_owned) })
}
