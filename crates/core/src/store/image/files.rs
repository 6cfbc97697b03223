//! The files an image comes in: a directory, or a tar archive of one.
//!
//! An archive is read where it lies: one pass notes where each file begins, and later reads go there.
//! Names out of documents are only ever looked up in that list, so they lead nowhere else.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use super::error::{ImageError, ImageResult};
use super::oci;
use super::unpack::{self, Packing, packing};

/// What a path holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ImageArchiveKind {
    /// A root filesystem in a tar archive.
    Root,
    /// An OCI layout.
    Layout,
    /// What `docker save` writes.
    Docker,
}

/// Files by name.
#[derive(Debug)]
pub(super) enum ImageFiles {
    Directory(PathBuf),
    Archive {
        path: PathBuf,
        /// What people call it.
        what: String,
        /// Where each file begins and how long it is.
        files: BTreeMap<String, (u64, u64)>,
        /// A link's name, and where it leads.
        links: BTreeMap<String, String>,
    },
}

/// Finds out what `path`, which people call `what`, holds, by looking into it.
pub(super) fn detect(path: &Path, what: &str) -> ImageResult<ImageArchiveKind> {
    let reason =
        |reason: &str| ImageError::NotAnImage { what: what.to_owned(), reason: reason.to_owned() };
    let found = std::fs::metadata(path).map_err(ImageError::io("open", path))?;
    if found.is_dir() {
        let has = |name: &str| path.join(name).is_file();
        if has("index.json") && (has("oci-layout") || path.join("blobs").is_dir()) {
            return Ok(ImageArchiveKind::Layout);
        }
        return Err(reason(
            "it is a directory, but no OCI layout; pack a root filesystem with tar",
        ));
    }
    let mut seen_manifest = false;
    let mut seen_index = false;
    let file = File::open(path).map_err(ImageError::io("open", path))?;
    let mut named = 0;
    unpack::names(what, file, |name| {
        named += 1;
        seen_manifest |= name == "manifest.json";
        seen_index |= name == "index.json";
        is_part(name)
    })?;
    match (named, seen_manifest, seen_index) {
        (0, ..) => Err(reason("it is an empty archive")),
        (_, _, true) if !seen_manifest => Ok(ImageArchiveKind::Layout),
        (_, true, _) => Ok(ImageArchiveKind::Docker),
        _ => Ok(ImageArchiveKind::Root),
    }
}

/// Whether a name is one that archives of images have. The first that is not ends the search.
fn is_part(name: &str) -> bool {
    let first = name.split('/').next().unwrap_or(name);
    let stem = first.trim_end_matches(".json").trim_end_matches(".tar");
    matches!(first, "" | "oci-layout" | "index.json" | "manifest.json" | "repositories" | "blobs")
        || (stem.len() == 64 && stem.bytes().all(|b| b.is_ascii_hexdigit()))
}

impl ImageFiles {
    /// Opens a directory or an archive. A packed archive is unpacked into `scratch` first, a file that
    /// the caller removes.
    pub(super) fn open(path: &Path, what: &str, scratch: &Path) -> ImageResult<Self> {
        if path.is_dir() {
            return Ok(Self::Directory(path.to_owned()));
        }
        let open = |path: &Path| File::open(path).map_err(ImageError::io("open", path));
        let mut start = Vec::new();
        open(path)?.take(512).read_to_end(&mut start).map_err(ImageError::io("read", path))?;
        let path = if packing(&start) == Packing::Tar {
            path.to_owned()
        } else {
            let mut plain = unpack::open(what, open(path)?)?;
            let mut file = File::create_new(scratch).map_err(ImageError::io("create", scratch))?;
            io::copy(&mut plain, &mut file)
                .map_err(|source| ImageError::Damaged { what: what.to_owned(), source })?;
            scratch.to_owned()
        };
        let (files, links) = unpack::index(what, open(&path)?)?;
        Ok(Self::Archive { path, what: what.to_owned(), files, links })
    }

    /// Whether there is a file of that name.
    pub(super) fn has(&self, name: &str) -> bool {
        match self {
            Self::Directory(dir) => dir.join(name).is_file(),
            Self::Archive { .. } => self.place(name).is_some(),
        }
    }

    /// Reads a file.
    pub(super) fn reader(&self, name: &str) -> ImageResult<Box<dyn Read + Send>> {
        match self {
            Self::Directory(dir) => {
                let path = dir.join(name);
                let file = File::open(&path).map_err(ImageError::io("open", &path))?;
                Ok(Box::new(file))
            }
            Self::Archive { path, what, .. } => {
                let Some((offset, length)) = self.place(name) else {
                    return Err(ImageError::NotAnImage {
                        what: what.clone(),
                        reason: format!("it has no `{name}`"),
                    });
                };
                let mut file = File::open(path).map_err(ImageError::io("open", path))?;
                file.seek(SeekFrom::Start(offset)).map_err(ImageError::io("read", path))?;
                Ok(Box::new(BufReader::new(file).take(length)))
            }
        }
    }

    /// Reads a document.
    pub(super) fn document(&self, name: &str) -> ImageResult<Vec<u8>> {
        let mut bytes = Vec::new();
        self.reader(name)?
            .take(oci::LARGEST + 1)
            .read_to_end(&mut bytes)
            .map_err(ImageError::io("read", Path::new(name)))?;
        if bytes.len() as u64 > oci::LARGEST {
            let reason = "a document in it is over 16 MiB".to_owned();
            return Err(ImageError::NotAnImage { what: name.to_owned(), reason });
        }
        Ok(bytes)
    }

    fn place(&self, name: &str) -> Option<(u64, u64)> {
        let Self::Archive { files, links, .. } = self else { return None };
        // Old versions of `docker save` link layers that several images share.
        let name = links.get(name).map_or(name, String::as_str);
        files.get(name).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::is_part;

    #[test]
    fn parts_of_images_are_told_from_files_of_a_system() {
        let hex = "0123456789abcdef".repeat(4);
        for name in ["oci-layout", "blobs/sha256/x", "", &hex, &format!("{hex}.json")] {
            assert!(is_part(name), "{name}");
        }
        for name in ["etc/passwd", "bin", "blob", "0123.json", "usr/manifest.json"] {
            assert!(!is_part(name), "{name}");
        }
    }
}
