//! An engine on a fake host, with its data in memory.

use std::fs;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use sandkeep_core::catalog::{Catalog, DiskCatalog};
use sandkeep_core::db::{Filter, Index, MirroredDb, Page};
use sandkeep_core::engine::{CommandOutput, Create, Delete, Engine, Exec, Parts, Settings};
use sandkeep_core::model::{
    FORMAT, Image, ImageConfig, LayerKind, MachineKey, Name, Patch, SandboxId, now,
};
use sandkeep_core::store::image::{ImageSettings, Images};
use sandkeep_core::store::{Durability, SealOptions, Store, StoreOptions};
use tempfile::TempDir;

use super::FakeHost;
use crate::catalog::{MemoryCatalog, Records};
use crate::house::{Ran, name, project};

/// The image of sandboxes here: a layer with the file `/etc/image`.
const IMAGE: &str = "small";

/// A data directory, a host and records, to open an engine on as often as a test likes.
pub struct FakeHouse {
    dir: TempDir,
    host: Arc<FakeHost>,
    /// Absent if records are manifests in the data directory.
    records: Option<Records>,
    /// How engines opened here behave.
    pub settings: Settings,
}

/// An engine with a runtime of its own, which can be killed.
pub struct RunningEngine {
    engine: Engine,
    runtime: tokio::runtime::Runtime,
}

impl Deref for FakeHouse {
    type Target = FakeHost;

    fn deref(&self) -> &FakeHost {
        &self.host
    }
}

impl FakeHouse {
    /// One whose records are in memory.
    ///
    /// # Panics
    ///
    /// When there is no directory for it.
    #[must_use]
    pub fn new() -> Self {
        Self::with(Some(Records::default()))
    }

    /// One whose records are manifests, as a server has them.
    ///
    /// # Panics
    ///
    /// When there is no directory for it.
    #[must_use]
    pub fn on_disk() -> Self {
        Self::with(None)
    }

    fn with(records: Option<Records>) -> Self {
        // Where a sync has nothing to wait for, if there is such a place.
        let memory = Path::new("/dev/shm");
        let dir = TempDir::with_prefix_in("keep-fake-", memory);
        let dir = dir.or_else(|_| TempDir::with_prefix("keep-fake-")).expect("a directory");
        let settings = Settings {
            uid_claims: dir.path().join("uids"),
            default_driver: "fake".to_owned(),
            clock_settle: Duration::ZERO,
            ..Settings::default()
        };
        let host = FakeHost::new(dir.path());
        Self { host, dir, records, settings }
    }

    /// The records, of a house that has them in memory.
    ///
    /// # Panics
    ///
    /// When they are on disk.
    #[must_use]
    pub fn records(&self) -> &Records {
        self.records.as_ref().expect("records in memory")
    }

    /// The host.
    #[must_use]
    pub fn host(&self) -> &Arc<FakeHost> {
        &self.host
    }

    /// The data directory.
    #[must_use]
    pub fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    /// Opens an engine with the image `small` and the project `default`, and waits until it has recovered.
    ///
    /// # Panics
    ///
    /// When it does not open.
    pub async fn open(&self) -> Engine {
        let parts = self.parts();
        let engine = Engine::open(parts.await).await.expect("the engine opens");
        engine.recovered().await;
        if engine.projects().is_empty() {
            engine.create_project(project()).await.expect("a first project");
        }
        engine
    }

    /// The same with a runtime of its own.
    ///
    /// # Panics
    ///
    /// When it does not open.
    pub async fn open_apart(&self) -> RunningEngine {
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(1).enable_all().build().expect("a runtime");
        let parts = self.parts().await;
        let opened = runtime.spawn(async move {
            let engine = Engine::open(parts).await.expect("the engine opens");
            engine.recovered().await;
            if engine.projects().is_empty() {
                engine.create_project(project()).await.expect("a first project");
            }
            engine
        });
        RunningEngine { engine: opened.await.expect("it opened"), runtime }
    }

    async fn parts(&self) -> Parts {
        let store = self.store().await;
        if store.read::<Image>(&IMAGE.to_owned()).await.is_err() {
            make_image(&store).await;
        }
        let catalog: Arc<dyn Catalog> = match &self.records {
            Some(records) => Arc::new(MemoryCatalog::new(store.clone(), records.clone()).await),
            None => {
                let index = Index::open(&self.data().join("index.sqlite"), store.clone()).await;
                let index = MirroredDb::new(Arc::new(index.expect("an index"))).await;
                Arc::new(DiskCatalog::new(store.clone(), Arc::new(index.expect("an index"))))
            }
        };
        let images = Images::new(store.clone(), ImageSettings::default());
        let drivers = vec![Arc::new(self.host.driver()) as Arc<_>];
        Parts { store, images, catalog, drivers, settings: self.settings.clone() }
    }

    /// Opens the store as soon as an engine before it is gone.
    async fn store(&self) -> Store {
        let ids = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let options = StoreOptions {
            reserve: Some(1 << 20),
            base_owner: Some(ids),
            ..StoreOptions::default()
        };
        for _ in 0..500 {
            if let Ok(store) = Store::open_with(&self.data(), options) {
                return store;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Store::open_with(&self.data(), options).expect("the data directory opens")
    }

    /// Deletes every sandbox, lets the engine end, and looks whether anything is left.
    ///
    /// # Panics
    ///
    /// When something is.
    pub async fn end(self, engine: Engine) {
        for sandbox in all(&engine).await {
            let delete = Delete { at_once: true, ..Delete::default() };
            let deleted = engine.delete(&project(), &sandbox, delete, None).await;
            deleted.expect("it is deleted");
        }
        engine.shutdown().await;
        assert_eq!(self.host.alive(), [], "machines are left");
    }
}

impl Default for FakeHouse {
    fn default() -> Self {
        Self::new()
    }
}

impl RunningEngine {
    /// Does something where the engine's own tasks run, so that all of it ends when it is killed.
    ///
    /// # Panics
    ///
    /// When it panics.
    pub async fn run<T, F>(&self, work: impl FnOnce(Engine) -> F) -> T
    where
        T: Send + 'static,
        F: Future<Output = T> + Send + 'static,
    {
        self.runtime.spawn(work(self.engine.clone())).await.expect("it came to its end")
    }

    /// Ends it in the middle of whatever it does, as SIGKILL ends a daemon. Machines keep running.
    pub fn kill(self) {
        drop(self.engine);
        self.runtime.shutdown_background();
    }
}

async fn all(engine: &Engine) -> Vec<Name> {
    let list = engine.list(&project(), &Filter::default(), &Page::all()).await.expect("a list");
    list.items.into_iter().map(|sandbox| sandbox.name).collect()
}

/// Makes the image without unpacking one, which takes root.
async fn make_image(store: &Store) {
    let layer = store.begin(&[]).await.expect("a layer");
    let etc = store.diff_dir(&layer).join("etc");
    fs::create_dir(&etc).expect("a directory");
    fs::write(etc.join("image"), IMAGE).expect("a file");
    let options = SealOptions { kind: LayerKind::Image, ..SealOptions::default() };
    store.seal(&layer, &options).await.expect("it is sealed").expect("it is not empty");
    let image = Image {
        format: FORMAT,
        name: IMAGE.to_owned(),
        digest: format!("sha256:{}", "0".repeat(64)),
        layers: vec![layer],
        config: ImageConfig::default(),
        created_at: now(),
        source: "a test".to_owned(),
        customized: None,
        step: None,
    };
    store.write(&image, Durability::Synced).await.expect("an image");
}

/// A sandbox on the image, to be started at once.
#[must_use]
pub fn small(text: &str) -> Create {
    let patch = Patch { image: Some(IMAGE.to_owned()), ..Patch::default() };
    Create { name: Some(name(text)), patch, start: true, ..Create::default() }
}

/// Runs a command to its end, its words with a space between them.
///
/// # Panics
///
/// When it cannot be started.
pub async fn run(engine: &Engine, sandbox: &str, line: &str) -> Ran {
    let argv = line.split(' ').map(str::to_owned).collect();
    let exec = Exec { argv, ..Exec::default() };
    let started = engine.exec(&project(), &name(sandbox), exec).await;
    let mut events = started.expect("it starts").events;
    let (mut out, mut err) = (Vec::new(), Vec::new());
    while let Some(event) = events.next().await {
        match event {
            CommandOutput::Stdout(bytes) => out.extend_from_slice(&bytes),
            CommandOutput::Stderr(bytes) => err.extend_from_slice(&bytes),
            CommandOutput::Gap(bytes) => panic!("{bytes} bytes of output are missing"),
            CommandOutput::Exited(command) => {
                let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
                return Ran { command, out: text(&out), err: text(&err) };
            }
        }
    }
    panic!("a command whose end was not told");
}

/// Runs a command that must succeed, and returns what it printed.
///
/// # Panics
///
/// When it does not.
pub async fn ok(engine: &Engine, sandbox: &str, line: &str) -> String {
    let ran = run(engine, sandbox, line).await;
    assert_eq!(ran.command.exit_code, Some(0), "{line}: {} {}", ran.out, ran.err);
    ran.out
}

/// The machine of a sandbox.
#[must_use]
pub fn machine_of(sandbox: &SandboxId) -> MachineKey {
    MachineKey::from(sandbox)
}
