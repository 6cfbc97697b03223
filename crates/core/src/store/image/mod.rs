//! Images: what a sandbox starts from when it has no snapshot.
//!
//! An image is a manifest, `images/<name>.json`, that names a chain of sealed layers and says how
//! commands run on them. It is made in one of five ways: [`Images::host`] makes one of this
//! machine, [`Images::pull`] gets one from a registry, [`Images::import`] reads one from a file,
//! and [`Images::customize`] adds a layer to another. Builds make theirs step by step (`build`). What a name stood for before is replaced.
//! `docs/formats/image.md` has the rules in full.
//!
//! What holds, whatever is pulled or imported:
//!
//! - An image exists whole or not at all. Each layer is unpacked into an open layer and sealed when
//!   it is complete and its digest is right; the manifest is written last. A failure leaves layers
//!   that nothing references, which the store collects, and partial downloads, which the next pull
//!   uses.
//! - Layers are shared: one with the same uncompressed digest is unpacked once. A layer that had to
//!   look at what lies below it (see [`unpack`]) is shared only on the same layers below.
//! - A sandbox keeps the layers it started from. Replacing or removing an image changes none.
//! - Archives and registries are not trusted; see [`unpack`] and [`registry`].

mod attributes;
mod build;
mod builder;
mod customize;
mod digest;
mod error;
mod files;
mod host;
mod import;
mod oci;
mod progress;
mod reference;
mod registry;
mod runtimes;
mod unpack;

use std::collections::HashSet;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use futures_util::StreamExt as _;

use super::{Store, StoreError};
use crate::model::{FORMAT, Image, ImageConfig, LayerId, Size, now};

pub use build::{BuildContext, CopyRequest, CopySource, FileOwner, InlineFile, PlannedFiles};
pub use customize::{AddedDirectory, Customization};
pub use error::{ImageError, ImageResult};
pub use host::{HostRoot, HostTree, RoomCheck};
pub use progress::{Progress, Reporter};
pub use reference::Reference;
pub use unpack::{Form, UnpackRoom, Unpacked, unpack_layer};

use self::builder::{LayerBuilder, LayerStack};
use self::registry::Registry;

/// What the image of this machine is called.
pub const HOST: &str = "host";

/// How the names of images begin that are steps of builds.
const STEPS: &str = "build-step/";

/// How many layers are downloaded at a time.
const DOWNLOADS: usize = 3;

/// How images are had on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageSettings {
    /// What the `host` image is made of.
    pub host: HostRoot,
    /// The most one layer may take when it is unpacked.
    pub largest_layer: Size,
    /// Docker's configuration file, for credentials: usually `~/.docker/config.json`.
    pub docker_config: Option<PathBuf>,
    /// The environment of `docker-credential-…` programs, which find credentials by the operator's variables. They are looked for in
    /// its `PATH`.
    pub helper_env: Vec<(OsString, OsString)>,
    /// Registries spoken to without TLS, as `host:port`. Those on this machine always are.
    pub insecure_registries: Vec<String>,
}

impl Default for ImageSettings {
    fn default() -> Self {
        Self {
            host: HostRoot::default(),
            largest_layer: Size(64 << 30),
            docker_config: None,
            helper_env: Vec::new(),
            insecure_registries: Vec::new(),
        }
    }
}

/// The images of one store. Clones are the same.
#[derive(Debug, Clone)]
pub struct Images {
    builder: Arc<LayerBuilder>,
}

impl Images {
    /// Images kept in `store`.
    #[must_use]
    pub fn new(store: Store, settings: ImageSettings) -> Self {
        Self { builder: Arc::new(LayerBuilder::new(store, settings)) }
    }

    /// All images, by name.
    ///
    /// # Errors
    ///
    /// Returns [`ImageError::Store`]. Manifests that cannot be read are left out; `fsck` reports
    /// them.
    pub async fn list(&self) -> ImageResult<Vec<Image>> {
        let mut images = self.builder.store.scan::<Image>().await?.good;
        images.retain(|image| image.step.is_none());
        images.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(images)
    }

    /// The image of that name. A reference finds what it was pulled as, however it is written.
    ///
    /// # Errors
    ///
    /// Returns [`ImageError::NotFound`], which lists what there is.
    pub async fn get(&self, name: &str) -> ImageResult<Image> {
        match self.find(name).await? {
            Some(image) => Ok(image),
            None => {
                let known = self.list().await?.into_iter().map(|image| image.name).collect();
                Err(ImageError::NotFound { name: name.chars().take(120).collect(), known })
            }
        }
    }

    async fn find(&self, name: &str) -> ImageResult<Option<Image>> {
        let short = name.parse::<Reference>().ok().map(|reference| reference.to_string());
        for name in [Some(name.to_owned()), short].into_iter().flatten() {
            if name.starts_with(STEPS) {
                continue;
            }
            match self.builder.store.read::<Image>(&name).await {
                Ok(image) => return Ok(Some(image)),
                Err(error) if error.is_not_found() => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(None)
    }

    /// The image of this machine, which is made when it is not there; with `refresh` also when it is.
    ///
    /// # Errors
    ///
    /// Returns [`ImageError::Io`] for the first file that could not be taken.
    pub async fn host(&self, refresh: bool, progress: &Reporter) -> ImageResult<Image> {
        let _one_at_a_time = self.builder.lock(HOST).await;
        if !refresh && let Some(image) = self.find(HOST).await? {
            return Ok(image);
        }
        let mut stack = self.builder.begin().await?;
        let tree = self.builder.add_host(&mut stack, progress).await?;
        self.finish(HOST, tree.digest, stack, ImageConfig::default(), HOST).await
    }

    /// Pulls an image from its registry. A broken pull is taken up where it broke off.
    ///
    /// # Errors
    ///
    /// Returns different errors for an unknown image, missing rights, an unreachable registry, an
    /// image for other machines and damaged content.
    pub async fn pull(&self, reference: &str, progress: &Reporter) -> ImageResult<Image> {
        let reference: Reference = reference.parse()?;
        let name = reference.to_string();
        check_name(&name)?;
        let registry = Registry::open(&self.builder.settings, &reference).await?;
        let described = registry.describe().await?;
        let mut stack = self.builder.begin().await?;
        let layers: Vec<WantedLayer> = described
            .plan
            .layers
            .into_iter()
            .zip(&described.config.rootfs.diff_ids)
            .map(|(blob, diff_id)| WantedLayer {
                here: self.builder.may_have(&stack, diff_id),
                diff_id: diff_id.clone(),
                blob,
            })
            .collect();
        let need = layers.iter().filter(|layer| !layer.here).map(|layer| layer.blob.size).sum();
        self.builder.store.check_room(need).await?;
        let partial = self.builder.partial_dir().await?;
        // Downloads run ahead; unpacking goes from the bottom up, one by one. A layer's lock is held
        // for one of the two at a time, so that pulls of images with layers in another order never
        // wait for each other.
        let (builder, registry, partial) = (&self.builder, &registry, &partial);
        let mut downloads = futures_util::stream::iter(layers)
            .map(|layer| async move {
                if !layer.here {
                    let _alone = builder.lock(&layer.blob.digest).await;
                    if !builder.has_made(&layer.diff_id) {
                        registry.fetch(&layer.blob, partial, progress).await?;
                    }
                }
                ImageResult::Ok(layer)
            })
            .buffered(DOWNLOADS);
        while let Some(layer) = downloads.next().await {
            let layer = layer?;
            let _alone = builder.lock(&layer.blob.digest).await;
            if builder.reuse(&mut stack, &layer.diff_id).await? {
                continue;
            }
            // What was here may be of no use on these layers below, and another pull may have used
            // the download up.
            let path = match registry.fetched(&layer.blob, partial) {
                Some(path) => path,
                None => registry.fetch(&layer.blob, partial, progress).await?,
            };
            builder
                .add_blob(&mut stack, path, &layer.diff_id, &layer.blob.digest, progress)
                .await?;
        }
        drop(downloads);
        let config = described.config.settings();
        self.finish(&name, described.digest, stack, config, &name).await
    }

    /// Removes an image by name. Its layers go when nothing stands on them.
    ///
    /// # Errors
    ///
    /// Returns [`ImageError::NotFound`], which lists what there is.
    pub async fn remove(&self, name: &str) -> ImageResult<()> {
        let image = self.get(name).await?;
        self.builder.note_removed(&image.name);
        Ok(self.builder.store.remove::<Image>(&image.name).await?)
    }

    /// Whether this process removed the image of exactly that name.
    #[must_use]
    pub fn was_removed(&self, name: &str) -> bool {
        self.builder.was_removed(name)
    }

    /// Layers that a pull or import under way is counting on, and that must not be collected.
    #[must_use]
    pub fn in_use(&self) -> HashSet<LayerId> {
        self.builder.store.held_layers()
    }

    async fn finish(
        &self,
        name: &str,
        digest: String,
        stack: LayerStack,
        config: ImageConfig,
        source: &str,
    ) -> ImageResult<Image> {
        let image = Image {
            format: FORMAT,
            name: name.to_owned(),
            digest,
            layers: stack.topmost_first(),
            config,
            created_at: now(),
            source: source.to_owned(),
            customized: None,
            step: None,
        };
        self.builder.publish(&image).await?;
        Ok(image)
    }
}

/// A layer of an image that is being pulled.
struct WantedLayer {
    blob: oci::Descriptor,
    diff_id: String,
    /// Whether it may be here already.
    here: bool,
}

impl From<StoreError> for ImageError {
    fn from(source: StoreError) -> Self {
        Self::Store { source }
    }
}

/// Refuses names that are taken by the system or could not be typed.
fn check_name(name: &str) -> ImageResult<()> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-/:@".contains(c);
    let reason = if name == HOST {
        "it is the image of this machine"
    } else if name.starts_with(STEPS) {
        "names that begin like this are for steps of builds"
    } else if name.is_empty() || name.len() > 255 {
        "it must have 1 to 255 characters"
    } else if !name.chars().all(plain) {
        "use letters, digits and `.`, `_`, `-`, `/`, `:`, `@`"
    } else {
        return Ok(());
    };
    let name = name.chars().take(120).collect();
    Err(ImageError::BadName { name, reason: reason.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::{Images, Reporter};

    /// Servers run these on any thread; that they may is decided here and not there.
    #[test]
    fn operations_can_move_between_threads() {
        fn can_move(_: impl Send) {}
        fn all(images: &Images, progress: &Reporter) {
            let path = std::path::Path::new("x");
            can_move(images.host(false, progress));
            can_move(images.pull("x", progress));
            can_move(images.import("x", path, progress));
            can_move(images.customize("x", "y", &super::Customization::default()));
        }
        let _ = all;
    }
}
