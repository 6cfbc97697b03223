//! What builds do with images: files are copied into them, steps are remembered.
//!
//! `docs/formats/build.md` says how a build works; the engine (`engine/builds`) leads it. Here is what
//! needs no sandbox. A copy is planned first (`copy`): what is taken from where, and where it goes,
//! with a digest over all of it. Only if nothing of that digest was made before is it written, as a
//! tar archive that is unpacked and sealed like a layer from anywhere else.

mod context;
mod copy;
mod names;

use std::path::PathBuf;
use std::time::Duration;

use sha2::{Digest as _, Sha256};

pub use self::context::BuildContext;
pub use self::copy::{CopyRequest, CopySource, FileOwner, InlineFile, PlannedFiles};

use super::builder::blocking;
use super::customize::archive::CustomizationTar;
use super::error::{ImageError, ImageResult};
use super::unpack::Form;
use super::{Images, STEPS, check_name, digest};
use crate::model::{BuildStep, FORMAT, Image, ImageConfig, LayerId, Name, now};
use crate::store::{Durability, LayerHold};

/// How long a step is kept that no build needs.
const UNUSED_FOR: Duration = Duration::from_secs(14 * 24 * 3600);
/// How many steps of one project are kept.
const MOST_STEPS: usize = 500;
/// The time of a use is on record to this much.
const USE_TO: Duration = Duration::from_secs(24 * 3600);

impl Images {
    /// What a step with this key has made, with its layers held; `None` if there is no such step, or
    /// its layers are not all there.
    ///
    /// # Errors
    ///
    /// Returns [`ImageError::Store`] when its record cannot be read.
    pub async fn step(&self, key: &str, hold: &LayerHold) -> ImageResult<Option<Vec<LayerId>>> {
        let store = &self.builder.store;
        let mut image = match store.read::<Image>(&step_name(key)).await {
            Ok(image) => image,
            Err(error) if error.is_not_found() => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        hold.layers(&image.layers).await;
        for layer in &image.layers {
            if store.layer(layer).await.is_err() {
                return Ok(None);
            }
        }
        if let Some(step) = image.step.as_mut().filter(|step| step.used_at < before(USE_TO)) {
            step.used_at = now();
            store.write(&image, Durability::Soon).await?;
        }
        Ok(Some(image.layers))
    }

    /// Remembers what a step has made.
    ///
    /// # Errors
    ///
    /// Returns [`ImageError::Store`] when that cannot be written, or a layer is not there.
    pub async fn keep_step(
        &self,
        project: &Name,
        key: &str,
        text: &str,
        layers: &[LayerId],
    ) -> ImageResult<()> {
        let step = BuildStep { project: project.clone(), used_at: now() };
        let image = Image {
            format: FORMAT,
            name: step_name(key),
            digest: format!("sha256:{key}"),
            layers: layers.to_vec(),
            config: ImageConfig::default(),
            created_at: now(),
            source: text.chars().take(200).collect(),
            customized: None,
            step: Some(step),
        };
        self.builder.publish(&image).await
    }

    /// Forgets steps of a project: all, or those that nobody has used for long. Answers with how many.
    ///
    /// # Errors
    ///
    /// Returns [`ImageError::Store`] when a record cannot be removed.
    pub async fn forget_steps(&self, project: &Name, all: bool) -> ImageResult<usize> {
        let images = self.builder.store.scan::<Image>().await?.good;
        let mut steps: Vec<(_, String)> = images
            .into_iter()
            .filter_map(|image| Some((image.step?, image.name)))
            .filter(|(step, _)| step.project == *project)
            .map(|(step, name)| (step.used_at, name))
            .collect();
        steps.sort_by(|a, b| b.cmp(a));
        let oldest = before(UNUSED_FOR);
        let mut forgotten = 0;
        for (at, (used_at, name)) in steps.into_iter().enumerate() {
            if all || at >= MOST_STEPS || used_at < oldest {
                self.builder.note_removed(&name);
                match self.builder.store.remove::<Image>(&name).await {
                    Err(error) if error.is_not_found() => {}
                    other => other?,
                }
                forgotten += 1;
            }
        }
        Ok(forgotten)
    }

    /// Plans to copy files into what `layers` show, the first of which is the topmost.
    ///
    /// # Errors
    ///
    /// Returns [`ImageError::BadCopy`] for what is wrong with the request.
    pub async fn plan_copy(
        &self,
        layers: &[LayerId],
        source: CopySource<'_>,
        request: CopyRequest,
    ) -> ImageResult<PlannedFiles> {
        let target = self.builder.diffs(layers);
        let (roots, of) = match source {
            CopySource::Context(context) => (vec![context.path().to_owned()], "the build context"),
            CopySource::Layers(layers) => (self.builder.diffs(layers), "the stage or image"),
        };
        let (room, tmp) = (self.builder.room()?, self.builder.store.data_dir().join("tmp"));
        let what = tmp.clone();
        blocking(&what, move || copy::plan(&target, &roots, of, request, &tmp, room)).await
    }

    /// Plans a directory, with those above it, where they are missing.
    ///
    /// # Errors
    ///
    /// Returns [`ImageError::BadCopy`] when something else is in its place.
    pub async fn plan_directory(
        &self,
        layers: &[LayerId],
        path: &str,
        owner: FileOwner,
    ) -> ImageResult<PlannedFiles> {
        let (target, path) = (self.builder.diffs(layers), path.to_owned());
        let what = PathBuf::from(&path);
        blocking(&what, move || copy::plan_directory(&target, &path, &owner)).await
    }

    /// Writes planned files as a layer on top of `layers`, and answers with all of them. They are held.
    ///
    /// # Errors
    ///
    /// Returns [`ImageError`] when they cannot be read or stored.
    pub async fn place_files(
        &self,
        layers: &[LayerId],
        planned: PlannedFiles,
        what: &str,
        hold: &LayerHold,
    ) -> ImageResult<Vec<LayerId>> {
        let mut stack = self.builder.begin().await?;
        self.builder.push_layers(&mut stack, layers).await?;
        let (parts, kept) = planned.into_parts();
        let time = u64::try_from(now().as_second()).unwrap_or(0);
        let archive = CustomizationTar::of(parts, time).map_err(ImageError::io("write", what))?;
        self.builder.add(&mut stack, archive, Form::Layer, None, what.to_owned()).await?;
        // What was unpacked for it was needed until now.
        drop(kept);
        let layers = stack.topmost_first();
        hold.layers(&layers).await;
        Ok(layers)
    }

    /// Makes an image of what a build came to.
    ///
    /// # Errors
    ///
    /// Returns [`ImageError::BadName`], or [`ImageError::Store`] when it cannot be written.
    pub async fn publish_built(
        &self,
        name: &str,
        layers: Vec<LayerId>,
        config: ImageConfig,
        source: &str,
    ) -> ImageResult<Image> {
        check_name(name)?;
        // Maps with text for keys: this cannot fail.
        let sum = serde_json::to_string(&(&layers, &config)).unwrap_or_default();
        let image = Image {
            format: FORMAT,
            name: name.to_owned(),
            digest: digest::text(&Sha256::digest(sum)),
            layers,
            config,
            created_at: now(),
            source: source.to_owned(),
            customized: None,
            step: None,
        };
        self.builder.publish(&image).await?;
        Ok(image)
    }

    /// Whether a build can have this name for its image.
    ///
    /// # Errors
    ///
    /// Returns [`ImageError::BadName`], which says why not.
    pub fn check_built_name(&self, name: &str) -> ImageResult<()> {
        check_name(name)
    }
}

fn step_name(key: &str) -> String {
    format!("{STEPS}{key}")
}

fn before(span: Duration) -> crate::model::Timestamp {
    now().checked_sub(jiff::SignedDuration::try_from(span).unwrap_or_default()).unwrap_or_default()
}
