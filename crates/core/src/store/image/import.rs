//! Imports images from files: root tarballs, OCI layouts and what `docker save` writes.

use std::fs::File;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use super::builder::{ProgressReader, blocking};
use super::error::{ImageError, ImageResult};
use super::files::{self, ImageArchiveKind, ImageFiles};
use super::oci::{self, Descriptor, ImageOrIndex, OciManifest};
use super::progress::Reporter;
use super::unpack::Form;
use super::{Images, check_name, digest};
use crate::model::{Image, ImageConfig, LayerId};

/// A list of lists may lead to a manifest, but not further.
const MOST_STEPS: usize = 3;

impl Images {
    /// Imports whatever `path` holds: a root tarball, an OCI layout, or what `docker save` writes.
    ///
    /// # Errors
    ///
    /// Returns [`ImageError::NotAnImage`] when it is none of these, and different errors for a
    /// damaged archive, a refused one and trouble on this host.
    pub async fn import(&self, name: &str, path: &Path, progress: &Reporter) -> ImageResult<Image> {
        let shown = path.display().to_string();
        self.import_from(name, &LocalArchive { path: path.to_owned(), shown }, progress).await
    }

    /// Imports an archive that somebody sent and that lies at `path` for now. That path is
    /// internal: neither errors nor the image's source name it.
    ///
    /// # Errors
    ///
    /// As for [`import`](Self::import).
    pub async fn import_upload(
        &self,
        name: &str,
        path: &Path,
        progress: &Reporter,
    ) -> ImageResult<Image> {
        let archive = LocalArchive { path: path.to_owned(), shown: UPLOAD.to_owned() };
        self.import_from(name, &archive, progress).await
    }

    async fn import_from(
        &self,
        name: &str,
        archive: &LocalArchive,
        progress: &Reporter,
    ) -> ImageResult<Image> {
        check_name(name)?;
        let looked_at = archive.clone();
        let contents =
            blocking(&archive.path, move || files::detect(&looked_at.path, &looked_at.shown));
        let (what, wanted) = (archive.shown.clone(), name.to_owned());
        let found = match contents.await? {
            ImageArchiveKind::Root => return self.import_root(name, archive, progress).await,
            ImageArchiveKind::Layout => {
                self.look(archive, move |parts| layout(parts, &what)).await?
            }
            ImageArchiveKind::Docker => {
                self.look(archive, move |parts| docker(parts, &what, &wanted)).await?
            }
        };
        self.assemble(name, archive, found, progress).await
    }

    /// Imports a root filesystem from a tar archive, plain or packed with gzip or zstd.
    async fn import_root(
        &self,
        name: &str,
        archive: &LocalArchive,
        progress: &Reporter,
    ) -> ImageResult<Image> {
        let LocalArchive { path, shown: what } = archive;
        let file = File::open(path).map_err(ImageError::io("open", path))?;
        let total = file.metadata().map_err(ImageError::io("open", path))?.len();
        let mut stack = self.builder.begin().await?;
        let reader = ProgressReader::new(file, what, Some(total), progress);
        let unpacked = self.builder.add(&mut stack, reader, Form::Root, None, what.clone()).await?;
        if unpacked.files == 0 {
            let reason = "it is an empty archive".to_owned();
            return Err(ImageError::NotAnImage { what: what.clone(), reason });
        }
        self.finish(name, unpacked.diff_id, stack, ImageConfig::default(), what).await
    }

    /// Opens an archive or directory and finds an image in it.
    async fn look(
        &self,
        archive: &LocalArchive,
        find: impl FnOnce(&ImageFiles) -> ImageResult<DetectedImage> + Send + 'static,
    ) -> ImageResult<(DetectedImage, ImageFiles, Scratch)> {
        let id = LayerId::fresh();
        let scratch = Scratch(self.builder.store.data_dir().join(format!("tmp/import-{id}")));
        let opened = archive.clone();
        blocking(&archive.path, move || {
            let parts = ImageFiles::open(&opened.path, &opened.shown, &scratch.0)?;
            Ok((find(&parts)?, parts, scratch))
        })
        .await
    }

    async fn assemble(
        &self,
        name: &str,
        archive: &LocalArchive,
        (found, parts, _scratch): (DetectedImage, ImageFiles, Scratch),
        progress: &Reporter,
    ) -> ImageResult<Image> {
        let mut stack = self.builder.begin().await?;
        for (part, diff_id) in &found.layers {
            if self.builder.reuse(&mut stack, diff_id).await? {
                continue;
            }
            let what = format!("layer {part}");
            let reader = ProgressReader::new(parts.reader(part)?, &what, None, progress);
            self.builder.add(&mut stack, reader, Form::Layer, Some(diff_id), what).await?;
        }
        self.finish(name, found.digest, stack, found.config, &archive.shown).await
    }
}

/// What a file that somebody sent is called, in errors and as the source of an image.
const UPLOAD: &str = "the upload";

/// Where an archive lies, and what it is called.
#[derive(Debug, Clone)]
struct LocalArchive {
    path: PathBuf,
    shown: String,
}

/// An image in an archive.
struct DetectedImage {
    digest: String,
    /// The names of its layers' archives and their digests when uncompressed, the first at the bottom.
    layers: Vec<(String, String)>,
    config: ImageConfig,
}

/// A file that goes when it is no longer needed.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        // Mostly it was never made.
        let _ = std::fs::remove_file(&self.0);
    }
}

fn layout(parts: &ImageFiles, what: &str) -> ImageResult<DetectedImage> {
    let index: OciManifest = oci::read(what, &parts.document("index.json")?)?;
    let mut next = pick(what, index)?;
    for _ in 0..MOST_STEPS {
        let bytes = blob(parts, what, &next)?;
        match oci::read::<OciManifest>(what, &bytes)?.next(what)? {
            ImageOrIndex::Look(chosen) => next = chosen,
            ImageOrIndex::Image(plan) => {
                let config: oci::OciConfig = oci::read(what, &blob(parts, what, &plan.config)?)?;
                config.check(what, plan.layers.len())?;
                let names = plan.layers.iter().map(|layer| blob_name(what, layer));
                let names = names.collect::<ImageResult<Vec<String>>>()?;
                let layers =
                    names.into_iter().zip(config.rootfs.diff_ids.iter().cloned()).collect();
                return Ok(DetectedImage {
                    digest: next.digest,
                    layers,
                    config: config.settings(),
                });
            }
        }
    }
    let reason = "its manifests lead to each other".to_owned();
    Err(ImageError::NotAnImage { what: what.to_owned(), reason })
}

/// Which image of a layout is meant.
fn pick(what: &str, index: OciManifest) -> ImageResult<Descriptor> {
    if let [only] = index.manifests.as_slice() {
        return Ok(only.clone());
    }
    let names: Vec<&str> = index.manifests.iter().filter_map(Descriptor::name).collect();
    if names.len() > 1 {
        let reason = format!("it holds several images, say which: {}", names.join(", "));
        return Err(ImageError::NotAnImage { what: what.to_owned(), reason });
    }
    match index.next(what)? {
        ImageOrIndex::Look(chosen) => Ok(chosen),
        ImageOrIndex::Image(plan) => Ok(plan.config),
    }
}

/// Reads a document of a layout, and checks it.
fn blob(parts: &ImageFiles, what: &str, descriptor: &Descriptor) -> ImageResult<Vec<u8>> {
    let bytes = parts.document(&blob_name(what, descriptor)?)?;
    let found = digest::text(&Sha256::digest(&bytes));
    if found == descriptor.digest {
        return Ok(bytes);
    }
    let (what, expected) = (format!("a document of {what}"), descriptor.digest.clone());
    Err(ImageError::Digest { what, expected, found })
}

fn blob_name(what: &str, descriptor: &Descriptor) -> ImageResult<String> {
    match digest::digits(&descriptor.digest) {
        Some(digits) => Ok(format!("blobs/sha256/{digits}")),
        None => {
            let reason = format!("it has a part with the digest `{}`", descriptor.digest);
            Err(ImageError::NotAnImage { what: what.to_owned(), reason })
        }
    }
}

/// One image in `manifest.json`.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Saved {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    #[serde(default)]
    layers: Vec<String>,
}

impl Saved {
    fn tags(&self) -> impl Iterator<Item = &str> {
        self.repo_tags.iter().flatten().map(String::as_str)
    }
}

fn docker(parts: &ImageFiles, what: &str, wanted: &str) -> ImageResult<DetectedImage> {
    let wrong = |reason: String| ImageError::NotAnImage { what: what.to_owned(), reason };
    if !parts.has("manifest.json") {
        return Err(wrong("it has no `manifest.json`".to_owned()));
    }
    let saved: Vec<Saved> = oci::read(what, &parts.document("manifest.json")?)?;
    let image = match saved.as_slice() {
        [] => return Err(wrong("it holds no image".to_owned())),
        [only] => only,
        several => {
            let named = several.iter().find(|image| image.tags().any(|tag| tag == wanted));
            let names: Vec<&str> = several.iter().flat_map(Saved::tags).collect();
            named.ok_or_else(|| {
                wrong(format!("it holds several images, import under one of: {}", names.join(", ")))
            })?
        }
    };
    let bytes = parts.document(&image.config)?;
    let config: oci::OciConfig = oci::read(what, &bytes)?;
    config.check(what, image.layers.len())?;
    let layers = image.layers.iter().cloned().zip(config.rootfs.diff_ids.iter().cloned()).collect();
    let digest = digest::text(&Sha256::digest(&bytes));
    Ok(DetectedImage { digest, layers, config: config.settings() })
}
