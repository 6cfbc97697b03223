//! What is on disk, by name alone: the collector compares it with memory before it removes
//! anything.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use crate::model::SandboxId;
use crate::store::manifest::{Durability, id_of, list, versions_of};
use crate::store::{Result, Store, blocking, io_error};

/// Documents larger than this are not searched for ids; no manifest is.
const LARGEST: u64 = 16 << 20;

/// Names of what is on disk.
#[derive(Debug, Clone, Default)]
pub struct DiskListing {
    /// Manifests of sandboxes, snapshots and drives, as paths below the data directory.
    pub manifests: HashSet<String>,
    /// Directories of sandboxes, by id, whatever is in them.
    pub sandboxes: HashSet<SandboxId>,
    /// Directories of sandboxes that hold something and have no manifest.
    pub bare: Vec<String>,
    /// Layers of both sorts, by id.
    pub layers: HashSet<String>,
    /// Sandboxes in the trash, by id.
    pub trashed: HashSet<String>,
    /// Ids of layers of both sorts that documents in `quarantine/` name.
    pub quarantined: HashSet<String>,
    /// Files in `quarantine/`, by name.
    pub quarantine: Vec<String>,
    /// Manifests that are missing and that the index remembered, as paths below the data directory.
    pub remembered: Vec<String>,
    /// Manifests that the index remembered and that are back.
    pub returned: Vec<String>,
}

impl Store {
    /// Lists what is on disk.
    ///
    /// # Errors
    ///
    /// Returns [`crate::store::StoreError::Io`] when a directory cannot be listed.
    pub async fn disk_listing(&self) -> Result<DiskListing> {
        let store = self.clone();
        blocking(move || store.disk_listing_now()).await
    }

    fn disk_listing_now(&self) -> Result<DiskListing> {
        let data = self.data_dir();
        let mut listing = DiskListing::default();
        for dir in list(&data.join("sandboxes"))? {
            let id = id_of(&dir);
            let named = id.parse::<SandboxId>().ok().filter(|_| dir.is_dir());
            let is_sandbox = named.is_some();
            listing.sandboxes.extend(named);
            if versions_of(&dir.join("sandbox.json")).iter().any(|path| path.exists()) {
                listing.manifests.insert(format!("sandboxes/{id}/sandbox.json"));
            } else if is_sandbox && holds_something(&dir)? {
                listing.bare.push(format!("sandboxes/{id}"));
            }
        }
        for part in ["snapshots", "drives"] {
            for path in list(&data.join(part))? {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                let version = [".next", ".last"].iter().find_map(|end| name.strip_suffix(end));
                let name = version.unwrap_or(&name);
                if name.ends_with(".json") {
                    listing.manifests.insert(format!("{part}/{name}"));
                }
            }
        }
        for part in ["layers", "memory"] {
            let names = list(&data.join(part))?;
            listing.layers.extend(names.iter().map(|path| id_of(path).to_owned()));
        }
        for path in list(&self.trash_dir())? {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if let Some((id, _)) = name.rsplit_once('.').filter(|(id, _)| id.starts_with("sbx-")) {
                listing.trashed.insert(id.to_owned());
            }
        }
        self.list_quarantine(&mut listing)?;
        Ok(listing)
    }

    fn list_quarantine(&self, listing: &mut DiskListing) -> Result<()> {
        for path in files_below(&self.data_dir().join("quarantine"))? {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if let Some(place) = name.strip_prefix(REMEMBERED) {
                let place = place.replace('+', "/");
                match listing.manifests.contains(&place) {
                    true => listing.returned.push(place),
                    false => listing.remembered.push(place),
                }
            }
            listing.quarantine.push(name);
            if path.metadata().is_ok_and(|found| found.is_file() && found.len() <= LARGEST) {
                let text = fs::read(&path).map_err(io_error("read", &path))?;
                listing.quarantined.extend(ids_in(&text));
            }
        }
        Ok(())
    }

    /// Keeps what the index remembers of a manifest that is missing: it names layers, which then stay.
    ///
    /// # Errors
    ///
    /// Returns [`crate::store::StoreError::Io`].
    pub async fn remember_missing(&self, place: &str, doc: Vec<u8>) -> Result<()> {
        let store = self.clone();
        let name = remembered(place);
        blocking(move || {
            let dir = store.data_dir().join("quarantine");
            fs::create_dir_all(&dir).map_err(io_error("create", &dir))?;
            store.put(Path::new(&name), &doc, Durability::Synced, false)
        })
        .await
    }

    /// Forgets what the index remembered of a manifest that is back.
    ///
    /// # Errors
    ///
    /// Returns [`crate::store::StoreError::Io`].
    pub async fn forget_missing(&self, place: &str) -> Result<()> {
        let name = remembered(place);
        let path = self.data_dir().join(name);
        blocking(move || fs::remove_file(&path).map_err(io_error("remove", &path))).await
    }

    /// Which of these ids of layers are named by manifests on disk, whatever memory says, and by which.
    ///
    /// # Errors
    ///
    /// Returns [`crate::store::StoreError::Io`] when a manifest cannot be read.
    pub async fn named_on_disk(&self, ids: &[String]) -> Result<HashMap<String, PathBuf>> {
        let (store, wanted) = (self.clone(), ids.iter().cloned().collect::<HashSet<_>>());
        blocking(move || {
            let mut named = HashMap::new();
            if wanted.is_empty() {
                return Ok(named);
            }
            let patterns = [
                "sandboxes/*/sandbox.json",
                "snapshots/*.json",
                "drives/*.json",
                "images/*.json",
                "templates/*.json",
            ];
            for place in crate::store::manifest::list_places(store.data_dir(), &patterns)? {
                for path in versions_of(&place) {
                    let text = match fs::read(&path) {
                        Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                        text => text.map_err(io_error("read", &path))?,
                    };
                    for id in ids_in(&text).filter(|id| wanted.contains(id)) {
                        named.insert(id, path.clone());
                    }
                }
            }
            Ok(named)
        })
        .await
    }
}

/// Where what the index remembered of a manifest is kept, below the data directory.
pub(in crate::store) fn remembered(place: &str) -> String {
    format!("quarantine/{REMEMBERED}{}", place.replace('/', "+"))
}

/// How files in `quarantine/` begin that the index remembered.
const REMEMBERED: &str = "index+";

/// Whether there is anything in a sandbox's directory, in one of its directories at least.
fn holds_something(dir: &Path) -> Result<bool> {
    for path in list(dir)? {
        if !path.is_dir() || !list(&path)?.is_empty() {
            return Ok(true);
        }
    }
    Ok(false)
}

fn files_below(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut dirs = vec![dir.to_owned()];
    while let Some(dir) = dirs.pop() {
        for path in list(&dir)? {
            match path.symlink_metadata() {
                // A layer that was quarantined is not searched: what is in it was written by sandboxes.
                Ok(found) if found.is_dir() && !is_layer(&path) => dirs.push(path),
                Ok(found) if found.is_file() => files.push(path),
                _ => {}
            }
        }
    }
    Ok(files)
}

fn is_layer(path: &Path) -> bool {
    path.join("diff").exists() || path.join("pages").exists()
}

/// All ids of layers of both sorts in a text.
fn ids_in(text: &[u8]) -> impl Iterator<Item = String> {
    const LENGTH: usize = "lay-".len() + 26;
    let starts = text.windows(LENGTH).filter(|window| {
        (window.starts_with(b"lay-") || window.starts_with(b"mem-"))
            && window[4..].iter().all(u8::is_ascii_alphanumeric)
    });
    starts.map(|id| String::from_utf8_lossy(id).into_owned())
}

#[cfg(test)]
mod tests {
    use super::ids_in;
    use crate::model::{LayerId, MemoryId};

    #[test]
    fn ids_are_found_in_what_does_not_parse() {
        let (layer, memory) = (LayerId::fresh(), MemoryId::fresh());
        let text = format!("{{\"layers\": [\"{layer}\", \"lay-short\"], {memory}\" \0");
        let found: Vec<_> = ids_in(text.as_bytes()).collect();
        assert_eq!(found, [layer.to_string(), memory.to_string()]);
    }
}
