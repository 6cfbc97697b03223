//! A snapshot as an OCI image: one tar stream, in the OCI layout, that other tools load.
//!
//! Layers are not compressed, so a blob's digest is its diff id. A tar header has name and size
//! before the bytes, so each layer is read twice: once to know its digest and length, and once to
//! send it. Nothing is written to the disk: the holes of sparse files are zeros in an export, and a
//! copy of it could be any times larger than the snapshot.

use std::io;
use std::io::Write;
use std::time::Duration;

use bytes::Bytes;
use serde_json::json;
use sha2::{Digest, Sha256};
use tokio::sync::{Semaphore, SemaphorePermit, mpsc};
use tokio_util::sync::CancellationToken;

use crate::engine::{Error, Result};
use crate::model::{ImageConfig, LayerId, Snapshot};
use crate::store::{Exported, LayerHold, LeftOut, Store, StoreError};

/// How many exports the server has in progress at the most, of all callers.
pub(in crate::engine) const MOST_EXPORTS: usize = 16;
static EXPORTS: Semaphore = Semaphore::const_new(MOST_EXPORTS);

/// How long the receiver of a stream may take for one piece.
const PATIENCE: Duration = Duration::from_secs(120);

/// Takes the right to export something, if there is one left.
pub(in crate::engine) fn export_turn() -> Option<SemaphorePermit<'static>> {
    EXPORTS.try_acquire().ok()
}

/// A snapshot that is ready to be sent.
#[derive(Debug)]
pub struct SnapshotExport {
    store: Store,
    archive: Archive,
    left_out: LeftOut,
    _hold: LayerHold,
    _turn: SemaphorePermit<'static>,
}

impl SnapshotExport {
    /// Reads all layers of a snapshot, which `hold` keeps. Ends when no caller waits for it any
    /// more.
    pub(in crate::engine) async fn prepare(
        store: &Store,
        snapshot: &Snapshot,
        hold: LayerHold,
    ) -> Result<Self> {
        let turn = export_turn().ok_or(Error::TooManyExports(MOST_EXPORTS))?;
        let unwanted = CancellationToken::new();
        let _unwanted_on_drop = unwanted.clone().drop_guard();
        let (mut blobs, mut left_out) = (Vec::new(), LeftOut::default());
        // OCI lists layers from the bottom.
        for layer in snapshot.layers.iter().rev() {
            let (_, exported) = store.export(layer, WhileWanted(unwanted.clone())).await?;
            let Exported { diff_id, bytes, left_out: of_layer } = exported;
            left_out.extend(of_layer);
            blobs.push(Blob { layer: layer.clone(), digest: diff_id, bytes });
        }
        let archive = Archive::new(snapshot, blobs, &left_out);
        Ok(Self { store: store.clone(), archive, left_out, _hold: hold, _turn: turn })
    }

    /// The length of the stream.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.archive.bytes()
    }

    /// What the archive cannot say.
    #[must_use]
    pub fn left_out(&self) -> &LeftOut {
        &self.left_out
    }

    /// Sends it. A receiver that goes away, or takes nothing for two minutes, ends it.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Store`] when a layer cannot be read, or is not what it was.
    pub async fn send(self, into: mpsc::Sender<Bytes>) -> Result<()> {
        // Its own thread, and none of those that wait for the disk: it waits for the receiver.
        let sent = tokio::task::spawn_blocking(move || {
            let into = io::BufWriter::with_capacity(64 << 10, Sender(into));
            self.archive.write(into, |layer, into| Ok(self.store.export_into(layer, into)?.1))
        });
        sent.await.map_err(|_| Error::ShuttingDown)?
    }
}

/// Takes bytes and keeps none, until nobody waits for the sum any more.
pub(in crate::engine) struct WhileWanted(pub(in crate::engine) CancellationToken);

impl Write for WhileWanted {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.is_cancelled() { Err(io::ErrorKind::BrokenPipe.into()) } else { Ok(bytes.len()) }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A layer of an archive.
#[derive(Debug)]
struct Blob {
    layer: LayerId,
    digest: String,
    bytes: u64,
}

/// The files of an archive, in their order.
#[derive(Debug)]
struct Archive(Vec<(String, ExportContent)>);

#[derive(Debug)]
enum ExportContent {
    Document(Vec<u8>),
    Layer(Blob),
}

impl Archive {
    fn new(snapshot: &Snapshot, blobs: Vec<Blob>, left_out: &LeftOut) -> Self {
        let layers: Vec<_> = blobs
            .iter()
            .map(|blob| json!({"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": blob.digest, "size": blob.bytes}))
            .collect();
        let diff_ids: Vec<&str> = blobs.iter().map(|blob| blob.digest.as_str()).collect();
        let (config, config_file) = document(&json!({
            "architecture": if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" },
            "os": "linux",
            "created": snapshot.created_at.to_string(),
            "config": command_config(&snapshot.image_config),
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        }));
        let mut manifest = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": config.0, "size": config.1},
            "layers": layers,
        });
        if left_out.count > 0 {
            manifest["annotations"] = json!({
                "sandkeep.left-out.count": left_out.count.to_string(),
                "sandkeep.left-out.paths": left_out.paths.join("\n"),
            });
        }
        let (manifest, manifest_file) = document(&manifest);
        let index = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": [{
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "digest": manifest.0,
                "size": manifest.1,
                "annotations": {"org.opencontainers.image.ref.name": snapshot.sandbox_name.as_str()},
            }],
        });
        let mut files = vec![config_file, manifest_file];
        let layer = |blob: Blob| (blob_path(&blob.digest), ExportContent::Layer(blob));
        files.extend(blobs.into_iter().map(layer));
        let layout = json!({"imageLayoutVersion": "1.0.0"});
        for (name, content) in [("index.json", index), ("oci-layout", layout)] {
            files
                .push((name.to_owned(), ExportContent::Document(content.to_string().into_bytes())));
        }
        Self(files)
    }

    /// How long it is: each file has a header, and is filled up to whole blocks of 512; two more blocks end it.
    fn bytes(&self) -> u64 {
        let files = self.0.iter().map(|(_, content)| 512 + content.bytes().next_multiple_of(512));
        files.sum::<u64>() + 1024
    }

    /// Writes it; `export` writes a layer.
    fn write<W: Write>(
        &self,
        mut into: W,
        mut export: impl FnMut(&LayerId, &mut W) -> Result<Exported>,
    ) -> Result<()> {
        let lost = |source| StoreError::Io { action: "send", path: "the archive".into(), source };
        for (name, content) in &self.0 {
            let header = header(name, content.bytes()).map_err(lost)?;
            into.write_all(header.as_bytes()).map_err(lost)?;
            match content {
                ExportContent::Document(text) => into.write_all(text).map_err(lost)?,
                ExportContent::Layer(blob) => {
                    let Exported { diff_id, bytes, .. } = export(&blob.layer, &mut into)?;
                    if diff_id != blob.digest || bytes != blob.bytes {
                        let reason = "it changed while it was exported".to_owned();
                        let path = format!("layers/{}", blob.layer).into();
                        return Err(StoreError::Damaged { path, reason }.into());
                    }
                }
            }
            let rest = content.bytes().next_multiple_of(512) - content.bytes();
            let rest = usize::try_from(rest).unwrap_or(0);
            into.write_all(&[0; 512][..rest]).map_err(lost)?;
        }
        into.write_all(&[0; 1024]).and_then(|()| into.flush()).map_err(lost)?;
        Ok(())
    }
}

impl ExportContent {
    fn bytes(&self) -> u64 {
        match self {
            Self::Document(text) => text.len() as u64,
            Self::Layer(blob) => blob.bytes,
        }
    }
}

fn command_config(config: &ImageConfig) -> serde_json::Value {
    let env: Vec<String> =
        config.env.iter().map(|(name, value)| format!("{name}={value}")).collect();
    json!({"Env": env, "User": config.user.clone().unwrap_or_default(), "WorkingDir": config.cwd.clone().unwrap_or_default()})
}

/// A document as a blob: its digest and size, and the file.
fn document(value: &serde_json::Value) -> ((String, usize), (String, ExportContent)) {
    let text = value.to_string().into_bytes();
    let digest = format!("sha256:{}", hex::encode(Sha256::digest(&text)));
    let path = blob_path(&digest);
    ((digest, text.len()), (path, ExportContent::Document(text)))
}

fn blob_path(digest: &str) -> String {
    format!("blobs/{}", digest.replacen(':', "/", 1))
}

fn header(name: &str, size: u64) -> io::Result<tar::Header> {
    let mut header = tar::Header::new_gnu();
    header.set_path(name)?;
    header.set_entry_type(tar::EntryType::Regular);
    header.set_mode(0o644);
    // Strict readers take an empty field for damage.
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(size);
    header.set_cksum();
    Ok(header)
}

/// Sends what is written, in pieces as it comes. Waits for the receiver, but not for long; on a thread that may block.
pub(in crate::engine) struct Sender(pub(in crate::engine) mpsc::Sender<Bytes>);

impl Write for Sender {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let piece = self.0.send_timeout(Bytes::copy_from_slice(bytes), PATIENCE);
        match tokio::runtime::Handle::current().block_on(piece) {
            Ok(()) => Ok(bytes.len()),
            Err(mpsc::error::SendTimeoutError::Timeout(_)) => Err(io::ErrorKind::TimedOut.into()),
            Err(mpsc::error::SendTimeoutError::Closed(_)) => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use bytes::Bytes;
    use tokio::sync::mpsc;
    use tokio_util::sync::CancellationToken;

    use super::{Sender, WhileWanted};

    #[tokio::test]
    async fn reading_and_sending_end_when_nobody_waits() {
        let unwanted = CancellationToken::new();
        let dropped = unwanted.clone().drop_guard();
        let reading = tokio::task::spawn_blocking(move || {
            // A sparse file has any number of zeros.
            io::copy(&mut io::repeat(0), &mut WhileWanted(unwanted))
        });
        let (into, mut pieces) = mpsc::channel::<Bytes>(1);
        let sending =
            tokio::task::spawn_blocking(move || io::copy(&mut io::repeat(0), &mut Sender(into)));
        pieces.recv().await.expect("a piece");
        drop((dropped, pieces));
        for ended in [reading, sending] {
            let error = ended.await.expect("no panic").expect_err("it has no end of its own");
            assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
        }
    }
}
