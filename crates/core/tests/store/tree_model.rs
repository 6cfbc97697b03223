//! A tree of files in memory, read through the kernel, for comparison with what the store works out from layers.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use sandkeep_core::model::LayerId;
use sandkeep_testkit::tree::Overlay;

use crate::store_world::World;

/// What is at a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Node {
    /// `d`, `f`, `l` or `p`.
    pub(crate) kind: char,
    pub(crate) mode: u32,
    pub(crate) owner: (u32, u32),
    pub(crate) xattr: Option<Vec<u8>>,
    pub(crate) content: Vec<u8>,
}

/// A tree without its root, by path.
pub(crate) type Model = BTreeMap<String, Node>;

/// Reads a tree.
pub(crate) fn read(root: &Path) -> Model {
    let mut model = Model::new();
    let mut dirs = vec![PathBuf::new()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(root.join(&dir)).unwrap() {
            let entry = entry.unwrap();
            let path = dir.join(entry.file_name());
            let full = root.join(&path);
            let found = fs::symlink_metadata(&full).unwrap();
            let kind = found.file_type();
            let (kind, content) = if kind.is_dir() {
                dirs.push(path.clone());
                ('d', Vec::new())
            } else if kind.is_symlink() {
                ('l', fs::read_link(&full).unwrap().as_os_str().as_bytes().to_vec())
            } else if kind.is_file() {
                ('f', fs::read(&full).unwrap())
            } else {
                ('p', Vec::new())
            };
            let mut value = [0u8; 64];
            let xattr = rustix::fs::lgetxattr(&full, "user.k", &mut value[..]).ok();
            let node = Node {
                kind,
                mode: if kind == 'l' { 0 } else { found.mode() & 0o7777 },
                owner: (found.uid(), found.gid()),
                xattr: xattr.map(|length| value[..length].to_vec()),
                content,
            };
            model.insert(path.to_str().unwrap().to_owned(), node);
        }
    }
    model
}

/// When each file and link was last modified, and how many names it has.
pub(crate) type Stamps = BTreeMap<String, (i64, i64, u64)>;

fn stamps(root: &Path, model: &Model) -> Stamps {
    let files = model.iter().filter(|(_, node)| node.kind != 'd');
    let stamp = |path: &String| {
        let found = fs::symlink_metadata(root.join(path)).unwrap();
        (found.mtime(), found.mtime_nsec(), found.nlink())
    };
    files.map(|(path, _)| (path.clone(), stamp(path))).collect()
}

impl World {
    /// The same with times, which no comparison looks at.
    pub(crate) fn stamped(&self, chain: &[LayerId]) -> (Model, Stamps) {
        let mount = self.mount_chain(chain);
        let model = read(mount.path());
        let stamps = stamps(mount.path(), &model);
        (model, stamps)
    }

    /// Which file each name of a regular file is.
    pub(crate) fn inodes(&self, chain: &[LayerId]) -> BTreeMap<String, (u64, u64)> {
        let mount = self.mount_chain(chain);
        let model = read(mount.path());
        let files = model.iter().filter(|(_, node)| node.kind == 'f');
        let inode = |path: &String| {
            let found = fs::symlink_metadata(mount.path().join(path)).unwrap();
            (found.dev(), found.ino())
        };
        files.map(|(path, _)| (path.clone(), inode(path))).collect()
    }

    /// What a chain shows, as the kernel says.
    pub(crate) fn model(&self, chain: &[LayerId]) -> Model {
        let mount = self.mount_chain(chain);
        read(mount.path())
    }

    /// A chain of layers: `count` sessions of random changes on top of `chain`, topmost first.
    pub(crate) async fn churned(&self, chain: &[LayerId], seed: u64, count: usize) -> Vec<LayerId> {
        let mut chain = chain.to_vec();
        for number in 0..count {
            let write = |root: &Path| {
                sandkeep_testkit::tree::churn(root, seed * 31 + number as u64, 25);
            };
            if let (Some(layer), _) = self.session(&chain, write).await {
                chain.insert(0, layer.id);
            }
        }
        chain
    }

    pub(crate) fn mount_chain(&self, chain: &[LayerId]) -> Overlay {
        let mut lower: Vec<PathBuf> = chain.iter().map(|id| self.store.diff_dir(id)).collect();
        lower.push(self.dir().join("nothing"));
        Overlay::readable(&self.place(), &lower).expect("an overlay")
    }
}
