//! A snapshot as an OCI image: one tar stream, in the OCI layout, that other tools load.
//!
//! Layers are not compressed, so a blob's digest is its diff id. A tar header tells the size before
//! the bytes, so each layer is written to a nameless file in the data directory first; the room for
//! it is asked for before anything begins.

use std::fs::File;
use std::io;
use std::io::Write;

use bytes::Bytes;
use serde_json::json;
use sha2::{Digest, Sha256};
use tokio::sync::mpsc;

use crate::model::{ImageConfig, Snapshot};

pub(in crate::engine) struct Blob {
    pub(in crate::engine) digest: String,
    pub(in crate::engine) bytes: u64,
    pub(in crate::engine) file: File,
}

pub(in crate::engine) fn pack(
    snapshot: &Snapshot,
    blobs: Vec<Blob>,
    into: mpsc::Sender<Bytes>,
) -> io::Result<()> {
    let mut archive = tar::Builder::new(io::BufWriter::with_capacity(64 << 10, Sender(into)));
    let layers: Vec<_> = blobs
        .iter()
        .map(|blob| json!({"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": blob.digest, "size": blob.bytes}))
        .collect();
    let diff_ids: Vec<&str> = blobs.iter().map(|blob| blob.digest.as_str()).collect();
    let config = json!({
        "architecture": if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" },
        "os": "linux",
        "created": snapshot.created_at.to_string(),
        "config": command_config(&snapshot.image_config),
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    });
    let config = small(&mut archive, config.to_string().as_bytes())?;
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": config.0, "size": config.1},
        "layers": layers,
    });
    let manifest = small(&mut archive, manifest.to_string().as_bytes())?;
    for mut blob in blobs {
        let mut header = header(blob.bytes);
        archive.append_data(&mut header, blob_path(&blob.digest), &mut blob.file)?;
    }
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
    for (name, text) in [
        ("index.json", index.to_string()),
        ("oci-layout", json!({"imageLayoutVersion": "1.0.0"}).to_string()),
    ] {
        let mut header = header(text.len() as u64);
        archive.append_data(&mut header, name, text.as_bytes())?;
    }
    archive.into_inner()?.flush()
}

fn command_config(config: &ImageConfig) -> serde_json::Value {
    let env: Vec<String> =
        config.env.iter().map(|(name, value)| format!("{name}={value}")).collect();
    json!({"Env": env, "User": config.user.clone().unwrap_or_default(), "WorkingDir": config.cwd.clone().unwrap_or_default()})
}

/// Appends a document as a blob; answers with its digest and size.
fn small<W: Write>(archive: &mut tar::Builder<W>, bytes: &[u8]) -> io::Result<(String, usize)> {
    let digest = format!("sha256:{}", hex::encode(Sha256::digest(bytes)));
    let mut header = header(bytes.len() as u64);
    archive.append_data(&mut header, blob_path(&digest), bytes)?;
    Ok((digest, bytes.len()))
}

fn blob_path(digest: &str) -> String {
    format!("blobs/{}", digest.replacen(':', "/", 1))
}

fn header(size: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(tar::EntryType::Regular);
    header.set_mode(0o644);
    // Strict readers take an empty field for damage.
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(size);
    header
}

/// Sends what is written, in pieces as it comes.
pub(in crate::engine) struct Sender(pub(in crate::engine) mpsc::Sender<Bytes>);

impl Write for Sender {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let sent = self.0.blocking_send(Bytes::copy_from_slice(bytes));
        sent.map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
