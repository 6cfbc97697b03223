//! A store of its own for one test, and layers stacked by the kernel.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use sandkeep_core::model::{
    FORMAT, Layer, LayerId, LayerKind, Name, Project, ProjectNetwork, Sandbox, now,
};
use sandkeep_core::store::{SealOptions, Store};
use sandkeep_testkit::tree::{Overlay, describe};
use tempfile::TempDir;

pub(crate) struct World {
    pub(crate) store: Store,
    dir: TempDir,
    mounts: AtomicU32,
}

impl World {
    pub(crate) fn new() -> Self {
        let dir = TempDir::with_prefix("keep").expect("a temporary directory");
        let store = Store::open(&dir.path().join("data")).expect("a new store");
        std::fs::create_dir(dir.path().join("nothing")).expect("a directory");
        Self { store, dir, mounts: AtomicU32::new(0) }
    }

    /// Closes the store and keeps its directory.
    pub(crate) fn closed(self) -> TempDir {
        self.dir
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    /// Seals what `fill` writes as the layer of an image.
    pub(crate) async fn image(&self, fill: impl FnOnce(&Path)) -> LayerId {
        let open = self.store.begin(&[]).await.expect("begun");
        fill(&self.store.diff_dir(&open));
        let options = SealOptions { kind: LayerKind::Image, ..SealOptions::default() };
        self.store.seal(&open, &options).await.expect("sealed").expect("not empty").id
    }

    /// Lets `write` change what `chain` shows, and returns what it then shows.
    pub(crate) async fn session(
        &self,
        chain: &[LayerId],
        write: impl FnOnce(&Path),
    ) -> (Option<Layer>, BTreeMap<String, String>) {
        let open = self.store.begin(chain).await.expect("begun");
        let mount = self.mount(&open, chain);
        write(mount.path());
        let seen = describe(mount.path());
        drop(mount);
        let layer = self.store.seal(&open, &SealOptions::default()).await.expect("sealed");
        if layer.is_none() {
            let again = self.store.seal(&open, &SealOptions::default()).await.expect("sealed");
            assert_eq!(again, None, "an empty layer is none however often it is asked for");
            self.store.discard(&open).await.expect("discarded");
        }
        (layer, seen)
    }

    pub(crate) fn mount(&self, open: &LayerId, chain: &[LayerId]) -> Overlay {
        let root = self.store.root(open, chain);
        let lower: Vec<PathBuf> =
            root.lower.iter().map(|lower| root.layers_dir.join(lower)).collect();
        let (upper, work) =
            (root.writable_dir.join(&root.upper), root.writable_dir.join(&root.work));
        Overlay::writable(&self.place(), &lower, &upper, &work).expect("an overlay")
    }

    /// What a chain shows.
    pub(crate) fn view(&self, chain: &[LayerId]) -> BTreeMap<String, String> {
        let mut lower: Vec<PathBuf> = chain.iter().map(|id| self.store.diff_dir(id)).collect();
        lower.push(self.dir.path().join("nothing"));
        let mount = Overlay::readable(&self.place(), &lower).expect("an overlay");
        describe(mount.path())
    }

    pub(crate) fn place(&self) -> PathBuf {
        let count = self.mounts.fetch_add(1, Ordering::Relaxed);
        self.dir.path().join(format!("mount{count}"))
    }
}

pub(crate) fn name(text: &str) -> Name {
    text.parse().expect("a name")
}

pub(crate) fn project(text: &str) -> Project {
    Project {
        format: FORMAT,
        name: name(text),
        created_at: now(),
        keys: Vec::new(),
        network: ProjectNetwork::default(),
        runs: Default::default(),
    }
}

pub(crate) fn sandbox(image_layers: &[LayerId]) -> Sandbox {
    let mut sandbox = sandkeep_testkit::db::sandbox("p", "box");
    sandbox.image_layers = image_layers.to_vec();
    sandbox
}
