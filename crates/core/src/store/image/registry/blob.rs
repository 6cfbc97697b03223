//! Downloads blobs, and continues where a connection broke.
//!
//! A blob is written to `blobs/partial/<digest>` in the data directory, and stays there when the
//! connection breaks, the daemon dies or the disk is full: the next attempt asks for the rest only. It
//! counts as there when all its bytes are, and they have the digest.

use std::io::SeekFrom;
use std::path::{Path, PathBuf};
use std::time::Duration;

use reqwest::StatusCode;
use reqwest::header::CONTENT_RANGE;
use sha2::{Digest as _, Sha256};
use tokio::fs::File;
use tokio::io::{AsyncSeekExt as _, AsyncWriteExt as _};

use super::super::digest;
use super::super::error::{ImageError, ImageResult};
use super::super::oci::Descriptor;
use super::super::progress::Reporter;
use super::Registry;

/// How often it is tried again without a single byte gained.
const PATIENCE: u32 = 4;
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const REPORT_EVERY: u64 = 256 << 10;

impl Registry {
    /// Downloads a blob into `partial`, and says where it is.
    pub(in super::super) async fn fetch(
        &self,
        blob: &Descriptor,
        partial: &Path,
        progress: &Reporter,
    ) -> ImageResult<PathBuf> {
        let Some(digits) = digest::digits(&blob.digest) else {
            let what = self.reference.to_string();
            let reason = format!("one of its layers has the digest `{}`", blob.digest);
            return Err(ImageError::NotAnImage { what, reason });
        };
        let path = partial.join(digits);
        let mut file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .await
            .map_err(ImageError::io("open", &path))?;
        let mut have = file.seek(SeekFrom::End(0)).await.map_err(ImageError::io("read", &path))?;
        let mut fruitless = 0;
        while have < blob.size {
            let before = have;
            let outcome = self.more(blob, &mut file, &path, &mut have, progress).await;
            fruitless = if have > before { 0 } else { fruitless + 1 };
            match outcome {
                Ok(()) => {}
                Err(error @ ImageError::Unreachable { .. }) => {
                    if fruitless >= PATIENCE {
                        return Err(error);
                    }
                    tokio::time::sleep(FIRST_PAUSE * 2u32.pow(fruitless)).await;
                }
                Err(error) => return Err(error),
            }
        }
        file.sync_data().await.map_err(ImageError::io("sync", &path))?;
        drop(file);
        check(&path, blob).await?;
        Ok(path)
    }

    /// Where a blob is that was downloaded whole and checked a moment ago.
    pub(in super::super) fn fetched(&self, blob: &Descriptor, partial: &Path) -> Option<PathBuf> {
        let path = partial.join(digest::digits(&blob.digest)?);
        let length = std::fs::metadata(&path).ok()?.len();
        (length == blob.size).then_some(path)
    }

    /// Downloads until it is done or breaks off; `have` follows what is in the file.
    async fn more(
        &self,
        blob: &Descriptor,
        file: &mut File,
        path: &Path,
        have: &mut u64,
        progress: &Reporter,
    ) -> ImageResult<()> {
        let wrong = ImageError::io::<std::io::Error>;
        let mut response = self.get(&format!("blobs/{}", blob.digest), *have).await?;
        let goes_on = response.status() == StatusCode::PARTIAL_CONTENT
            && response
                .headers()
                .get(CONTENT_RANGE)
                .and_then(|range| range.to_str().ok())
                .is_some_and(|range| range.starts_with(&format!("bytes {have}-")));
        if !goes_on {
            // A registry that does not continue where we ask begins at the beginning.
            *have = 0;
            file.set_len(0).await.map_err(wrong("truncate", path))?;
            file.seek(SeekFrom::Start(0)).await.map_err(wrong("truncate", path))?;
            if response.status() != StatusCode::OK {
                return Err(self.odd(&format!("{} to a request for a blob", response.status())));
            }
        }
        let label = format!("pulling {}", short(&blob.digest));
        let mut reported = 0;
        loop {
            match response.chunk().await {
                Ok(Some(chunk)) => {
                    if *have + chunk.len() as u64 > blob.size {
                        return Err(self.odd("a blob that is longer than its manifest says"));
                    }
                    file.write_all(&chunk).await.map_err(wrong("write", path))?;
                    *have += chunk.len() as u64;
                    if *have - reported >= REPORT_EVERY || *have == blob.size {
                        reported = *have;
                        progress.say(&label, *have, Some(blob.size));
                    }
                }
                Ok(None) if *have < blob.size => {
                    file.flush().await.map_err(wrong("write", path))?;
                    let registry = self.reference.registry.clone();
                    let reason = "it broke off in the middle of a blob".to_owned();
                    return Err(ImageError::Unreachable { registry, reason });
                }
                Ok(None) => return file.flush().await.map_err(wrong("write", path)),
                Err(error) => {
                    file.flush().await.map_err(wrong("write", path))?;
                    return Err(self.lost(&error));
                }
            }
        }
    }
}

/// Compares the digest; a file that has another is of no use and is removed.
async fn check(path: &Path, blob: &Descriptor) -> ImageResult<()> {
    let (file, expected) = (path.to_owned(), blob.digest.clone());
    let hashing = tokio::task::spawn_blocking(move || -> std::io::Result<String> {
        let mut hash = Sha256::new();
        std::io::copy(&mut std::fs::File::open(file)?, &mut HashWriter(&mut hash))?;
        Ok(digest::text(&hash.finalize()))
    });
    let found = match hashing.await {
        Ok(found) => found.map_err(ImageError::io("read", path))?,
        Err(error) => return Err(ImageError::io("read", path)(std::io::Error::other(error))),
    };
    if found == expected {
        return Ok(());
    }
    tokio::fs::remove_file(path).await.map_err(ImageError::io("remove", path))?;
    Err(ImageError::Digest { what: "a layer".to_owned(), expected, found })
}

struct HashWriter<'a>(&'a mut Sha256);

impl std::io::Write for HashWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn short(digest: &str) -> &str {
    digest.get(7..19).unwrap_or(digest)
}
