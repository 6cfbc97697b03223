//! Builds the layers of images, and finds those that were built before.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};

use super::super::{Durability, LayerHold, SealOptions, Store};
use super::error::{ImageError, ImageResult};
use super::host::{HostRoot, HostTree};
use super::progress::Reporter;
use super::runtimes::RuntimeCache;
use super::unpack::{Form, OPAQUE, UnpackRoom, Unpacked, unpack_layer};
use super::{ImageSettings, digest};
use crate::keyed_lock::{KeyGuard, KeyedLock};
use crate::model::{Image, Layer, LayerId, LayerKind};

/// How long half a download is worth keeping.
const STALE: Duration = Duration::from_secs(7 * 24 * 3600);

/// Where a root tarball's layer belongs.
const ROOT: &str = "root";

/// The store, seen as a place for images.
#[derive(Debug)]
pub(super) struct LayerBuilder {
    pub(super) store: Store,
    pub(super) settings: ImageSettings,
    /// One at a time for each name: two pulls of one layer share the download.
    locks: KeyedLock<String>,
    /// Layers made since the daemon started, by their keys.
    made: Mutex<BTreeMap<String, LayerId>>,
    /// Images that were removed since the daemon started: their manifests are not missing.
    removed: Mutex<HashSet<String>>,
    /// What images were found to have.
    pub(super) runtimes: RuntimeCache,
}

/// An image's layers as they come together, from the bottom up.
#[derive(Debug)]
pub(super) struct LayerStack {
    layers: Vec<LayerId>,
    /// Names all layers so far: OCI's chain id.
    chain: String,
    /// Layers there were when it was begun, by what stands for them: [`Layer::diff_id`].
    known: BTreeMap<String, LayerId>,
    held: LayerHold,
}

impl LayerStack {
    pub(super) fn topmost_first(&self) -> Vec<LayerId> {
        self.layers.iter().rev().cloned().collect()
    }

    fn push(&mut self, id: LayerId, diff: &Path) {
        // The top directory of a layer may hide all that is below, which overlayfs does not read
        // there: such a layer is the bottom.
        if xattr::get(diff, OPAQUE).ok().flatten().is_some() {
            self.layers.clear();
        }
        self.layers.push(id);
    }

    fn extend_chain(&mut self, diff_id: &str) {
        self.chain = if self.chain.is_empty() {
            diff_id.to_owned()
        } else {
            digest::text(&Sha256::digest(format!("{} {diff_id}", self.chain)))
        };
    }
}

impl LayerBuilder {
    pub(super) fn new(store: Store, settings: ImageSettings) -> Self {
        Self {
            store,
            settings,
            locks: KeyedLock::default(),
            made: Mutex::default(),
            removed: Mutex::default(),
            runtimes: RuntimeCache::default(),
        }
    }

    pub(super) fn note_removed(&self, name: &str) {
        self.removed.lock().insert(name.to_owned());
    }

    pub(super) fn was_removed(&self, name: &str) -> bool {
        self.removed.lock().contains(name)
    }

    /// Waits until no other caller holds `name`.
    pub(super) async fn lock(&self, name: &str) -> KeyGuard<String> {
        self.locks.lock(&name.to_owned()).await
    }

    /// Begins an image.
    pub(super) async fn begin(&self) -> ImageResult<LayerStack> {
        let layers = self.store.scan::<Layer>().await?.good;
        let known = layers
            .into_iter()
            .filter(|layer| layer.kind == LayerKind::Image)
            .filter_map(|layer| Some((layer.diff_id?, layer.id)))
            .collect();
        let held = self.store.hold();
        Ok(LayerStack { layers: Vec::new(), chain: String::new(), known, held })
    }

    /// Puts all of an image's layers on a stack that is empty.
    pub(super) async fn push_image(&self, stack: &mut LayerStack, base: &Image) -> ImageResult<()> {
        self.push_layers(stack, &base.layers).await
    }

    /// The same for layers of which the first is the topmost.
    pub(super) async fn push_layers(
        &self,
        stack: &mut LayerStack,
        layers: &[LayerId],
    ) -> ImageResult<()> {
        for id in layers.iter().rev() {
            // Held first and looked at then: a collection in between is seen.
            stack.held.layers(std::slice::from_ref(id)).await;
            self.store.layer(id).await?;
            stack.layers.push(id.clone());
            stack.extend_chain(id.as_str());
        }
        Ok(())
    }

    /// Where a chain's files lie, the topmost first.
    pub(super) fn diffs(&self, layers: &[LayerId]) -> Vec<PathBuf> {
        layers.iter().map(|id| self.store.diff_dir(id)).collect()
    }

    /// Whether a layer may not have to be unpacked again.
    pub(super) fn may_have(&self, stack: &LayerStack, diff_id: &str) -> bool {
        let somewhere = only_on(diff_id, "");
        let mut after = stack.known.range(somewhere.clone()..);
        stack.known.contains_key(diff_id)
            || after.next().is_some_and(|(key, _)| key.starts_with(&somewhere))
    }

    /// Puts an existing layer on the stack.
    pub(super) async fn reuse(&self, stack: &mut LayerStack, diff_id: &str) -> ImageResult<bool> {
        for key in [diff_id.to_owned(), only_on(diff_id, &stack.chain)] {
            if self.reuse_key(stack, &key).await? {
                stack.extend_chain(diff_id);
                return Ok(true);
            }
        }
        Ok(false)
    }

    async fn reuse_key(&self, stack: &mut LayerStack, key: &str) -> ImageResult<bool> {
        let made = self.made.lock().get(key).cloned();
        for id in [stack.known.get(key).cloned(), made].into_iter().flatten() {
            // Held first and looked at then: a collection in between is seen.
            stack.held.layers(std::slice::from_ref(&id)).await;
            if self.store.layer(&id).await.is_ok() {
                let diff = self.store.diff_dir(&id);
                stack.push(id, &diff);
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether a layer was made by another pull meanwhile.
    pub(super) fn has_made(&self, diff_id: &str) -> bool {
        self.made.lock().contains_key(diff_id)
    }

    /// Unpacks a downloaded blob, which is removed when that has succeeded.
    pub(super) async fn add_blob(
        &self,
        stack: &mut LayerStack,
        path: PathBuf,
        diff_id: &str,
        blob: &str,
        progress: &Reporter,
    ) -> ImageResult<()> {
        let file = File::open(&path).map_err(ImageError::io("open", &path))?;
        let total = file.metadata().map_err(ImageError::io("read", &path))?.len();
        let what = format!("layer {blob}");
        let reader = ProgressReader::new(file, &what, Some(total), progress);
        self.add(stack, reader, Form::Layer, Some(diff_id), what).await?;
        tokio::fs::remove_file(&path).await.map_err(ImageError::io("remove", &path))
    }

    /// Unpacks an archive as the next layer.
    pub(super) async fn add(
        &self,
        stack: &mut LayerStack,
        archive: impl Read + Send + 'static,
        form: Form,
        expected: Option<&str>,
        what: String,
    ) -> ImageResult<Unpacked> {
        let chain = stack.topmost_first();
        let open = self.store.begin(&chain).await?;
        stack.held.layers(std::slice::from_ref(&open)).await;
        let outcome = self.fill(stack, &open, archive, form, expected, what).await;
        if outcome.is_err() {
            self.discard(&open).await;
        }
        outcome
    }

    async fn fill(
        &self,
        stack: &mut LayerStack,
        open: &LayerId,
        archive: impl Read + Send + 'static,
        form: Form,
        expected: Option<&str>,
        what: String,
    ) -> ImageResult<Unpacked> {
        let diff = self.store.diff_dir(open);
        let below = self.diffs(&stack.topmost_first());
        let room = self.room()?;
        let (name, into) = (what.clone(), diff.clone());
        let unpacked =
            blocking(&diff, move || unpack_layer(&name, archive, form, &into, &below, room))
                .await?;
        if let Some(expected) = expected
            && expected != unpacked.diff_id
        {
            let (expected, found) = (expected.to_owned(), unpacked.diff_id);
            return Err(ImageError::Digest { what, expected, found });
        }
        let key = match form {
            Form::Root => only_on(&unpacked.diff_id, ROOT),
            Form::Layer if unpacked.borrowed => only_on(&unpacked.diff_id, &stack.chain),
            Form::Layer | Form::Upper => unpacked.diff_id.clone(),
        };
        if self.reuse_key(stack, &key).await? {
            self.discard(open).await;
        } else {
            self.seal(stack, open, Some(key), 0).await?;
        }
        stack.extend_chain(&unpacked.diff_id);
        Ok(unpacked)
    }

    /// Makes this machine's layer.
    pub(super) async fn add_host(
        &self,
        stack: &mut LayerStack,
        progress: &Reporter,
    ) -> ImageResult<HostTree> {
        let open = self.store.begin(&[]).await?;
        stack.held.layers(std::slice::from_ref(&open)).await;
        let diff = self.store.diff_dir(&open);
        let (host, never) = (self.settings.host.clone(), self.store.data_dir().to_owned());
        let built = self.build_host(&diff, host, never, progress).await;
        let outcome = match built {
            Ok(tree) => self.seal(stack, &open, None, tree.shared_bytes).await.map(|()| tree),
            Err(error) => Err(error),
        };
        if outcome.is_err() {
            self.discard(&open).await;
        }
        outcome
    }

    async fn build_host(
        &self,
        diff: &Path,
        host: HostRoot,
        never: PathBuf,
        progress: &Reporter,
    ) -> ImageResult<HostTree> {
        let (measured, into, but) = (host.clone(), diff.to_owned(), never.clone());
        let need = blocking(diff, move || measured.measure(&into, &but)).await?;
        self.store.check_room(need).await?;
        let (into, reporter, store) = (diff.to_owned(), progress.clone(), self.store.clone());
        blocking(diff, move || {
            let room = move |bytes: u64| Ok(store.refuse_beyond(store.usable()?.usable, bytes)?);
            host.build(&into, &never, &room, &reporter)
        })
        .await
    }

    async fn seal(
        &self,
        stack: &mut LayerStack,
        open: &LayerId,
        key: Option<String>,
        foreign: u64,
    ) -> ImageResult<()> {
        let diff = self.store.diff_dir(open);
        let (kind, diff_id) = (LayerKind::Image, key.clone());
        let options = SealOptions { kind, diff_id, foreign, ..Default::default() };
        // An empty layer makes none, and changes nothing about the image.
        if let Some(layer) = self.store.seal(open, &options).await? {
            if let Some(key) = key {
                self.made.lock().insert(key, layer.id.clone());
            }
            stack.push(layer.id, &diff);
        } else {
            self.discard(open).await;
        }
        Ok(())
    }

    async fn discard(&self, open: &LayerId) {
        if let Err(error) = self.store.discard(open).await {
            tracing::warn!(layer = %open, %error, "could not discard a layer; it will be collected");
        }
    }

    /// Writes the manifest, when all that it names exists.
    pub(super) async fn publish(&self, image: &Image) -> ImageResult<()> {
        self.store.write(image, Durability::Synced).await?;
        for id in &image.layers {
            if let Err(error) = self.store.layer(id).await {
                self.store.remove::<Image>(&image.name).await?;
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// The directory of partial downloads, without abandoned ones.
    pub(super) async fn partial_dir(&self) -> ImageResult<PathBuf> {
        let dir = self.store.data_dir().join("blobs/partial");
        let path = dir.clone();
        blocking(&dir, move || {
            std::fs::create_dir_all(&path).map_err(ImageError::io("create", &path))?;
            let entries = std::fs::read_dir(&path).map_err(ImageError::io("read", &path))?;
            for entry in entries.flatten() {
                let age = entry.metadata().and_then(|found| found.modified()).ok();
                let age = age.and_then(|time| SystemTime::now().duration_since(time).ok());
                if age.is_some_and(|age| age > STALE) {
                    // Another pull may have removed it just now.
                    let _ = std::fs::remove_file(entry.path());
                }
            }
            Ok(())
        })
        .await?;
        Ok(dir)
    }

    pub(super) fn room(&self) -> ImageResult<UnpackRoom> {
        let free = self.store.usable()?.usable;
        let largest = self.settings.largest_layer.0;
        Ok(if free < largest {
            UnpackRoom { bytes: free, entries: u64::MAX, why: "that the disk has left" }
        } else {
            UnpackRoom { bytes: largest, entries: u64::MAX, why: "that a layer may take" }
        })
    }
}

/// What stands for a layer that would be another one elsewhere: one that looked at those below is
/// known by both, and a root filesystem is not read as a layer is.
fn only_on(diff_id: &str, place: &str) -> String {
    format!("{diff_id}@{place}")
}

/// Runs `work` where it may block.
pub(super) async fn blocking<T, F>(path: &Path, work: F) -> ImageResult<T>
where
    T: Send + 'static,
    F: FnOnce() -> ImageResult<T> + Send + 'static,
{
    match tokio::task::spawn_blocking(work).await {
        Ok(outcome) => outcome,
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        Err(error) => Err(ImageError::io("go on with", path)(std::io::Error::other(error))),
    }
}

/// A reader that reports its progress.
pub(super) struct ProgressReader<R> {
    inner: R,
    what: String,
    done: u64,
    reported: u64,
    total: Option<u64>,
    progress: Reporter,
}

impl<R> ProgressReader<R> {
    pub(super) fn new(inner: R, what: &str, total: Option<u64>, progress: &Reporter) -> Self {
        let what = format!("unpacking {what}");
        Self { inner, what, done: 0, reported: 0, total, progress: progress.clone() }
    }
}

impl<R: Read> Read for ProgressReader<R> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let read = self.inner.read(into)?;
        self.done += read as u64;
        if self.done - self.reported >= 1 << 20 || (read == 0 && self.reported < self.done) {
            self.reported = self.done;
            self.progress.say(&self.what, self.done, self.total);
        }
        Ok(read)
    }
}
