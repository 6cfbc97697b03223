//! Builds images from Dockerfiles. `docs/formats/build.md` tells how.
//!
//! ```text
//! context, Dockerfile ──> stages that are needed (`stages`)
//!                               │  each: FROM, then its instructions (`instructions`)
//!                               v
//!            key of the step ──> in the cache? ── yes ──> its layers
//!                               │ no
//!                               ├── RUN: a sandbox of the project (`run`) ──> its sealed layer
//!                               └── COPY, ADD, WORKDIR: files, unpacked as a layer (`store::image`)
//!                                         │
//!                               record of the step ──> … ──> the image
//! ```
//!
//! A build is nothing but what its caller waits for: there is no record of it. What it has finished is
//! in the cache, step by step, so the same build asked for again goes on where an earlier one ended,
//! however that was. It ends when its caller leaves or the engine shuts down. Its sandboxes are marked
//! as internal, and those that a daemon finds when it starts are deleted.

mod instructions;
mod run;
mod stages;

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use sandkeep_proto::link::Hidden;
use tokio::sync::mpsc;

use self::instructions::StageState;
use crate::db::{Filter, Page};
use crate::dockerfile::{self, Dockerfile, DockerfileError};
use crate::engine::error::error_chain;
use crate::engine::lifecycle::Lifecycle;
use crate::engine::{Delete, Error, Result};
use crate::keyed_lock::KeyedLock;
use crate::model::{Image, Name, SandboxId};
use crate::store::LayerHold;
use crate::store::image::{BuildContext, Progress, Reporter};

/// How many builds of one project run at a time.
const AT_ONCE: usize = 4;
/// How long a caller may leave what it is told lying before it counts as gone.
const HEARD_WITHIN: Duration = Duration::from_secs(60);
/// How long a build waits for another one to make the same step, or to let go of a cache. No step takes longer.
const OTHERS_WITHIN: Duration = run::STEP_WITHIN;

/// An image to be built.
#[derive(Debug, Clone)]
pub struct BuildRequest {
    /// The context, as a tar archive on this host. It is the caller's to remove.
    pub context: PathBuf,
    /// The Dockerfile's path in the context.
    pub dockerfile: String,
    /// What to call the image.
    pub name: String,
    /// Values of `ARG`s.
    pub args: BTreeMap<String, String>,
    /// The stage to build; the last if absent.
    pub target: Option<String>,
    /// Secrets by id.
    pub secrets: BTreeMap<String, Hidden>,
    /// Whether steps are made that are in the cache.
    pub no_cache: bool,
    /// Who wants it: the id of an API key.
    pub by: Option<String>,
}

/// What a caller hears of a build.
#[derive(Debug, Clone)]
pub enum BuildEvent {
    /// A step begins, or was found in the cache.
    Step {
        /// Which, counted from 1.
        number: usize,
        /// How many there are.
        total: usize,
        /// Its line.
        line: usize,
        /// Its text.
        text: String,
        /// Whether it was in the cache.
        cached: bool,
    },
    /// A step printed something.
    Output(Bytes),
    /// How far a pull has come.
    Progress(Progress),
    /// Something that may not be as it was meant.
    Warning(String),
}

/// Builds images.
pub(in crate::engine) struct Builds {
    lifecycle: Arc<Lifecycle>,
    /// Steps that are being made, by their keys.
    steps: KeyedLock<String>,
    /// Caches that a step uses.
    caches: KeyedLock<(Name, String)>,
    /// How many builds each project has under way.
    running: Arc<Mutex<HashMap<Name, usize>>>,
}

/// One of the builds that a project has under way.
struct BuildPlace {
    running: Arc<Mutex<HashMap<Name, usize>>>,
    project: Name,
}

impl Drop for BuildPlace {
    fn drop(&mut self) {
        let mut running = self.running.lock();
        if let Some(count) = running.get_mut(&self.project) {
            *count -= 1;
            if *count == 0 {
                running.remove(&self.project);
            }
        }
    }
}

impl Builds {
    pub(in crate::engine) fn new(lifecycle: &Arc<Lifecycle>) -> Arc<Self> {
        Arc::new(Self {
            lifecycle: Arc::clone(lifecycle),
            steps: KeyedLock::default(),
            caches: KeyedLock::default(),
            running: Arc::default(),
        })
    }

    fn place(&self, project: &Name) -> Result<BuildPlace> {
        let mut all = self.running.lock();
        let running = all.entry(project.clone()).or_default();
        if *running >= AT_ONCE {
            return Err(Error::TooManyBuilds { project: project.clone(), running: *running });
        }
        *running += 1;
        Ok(BuildPlace { running: Arc::clone(&self.running), project: project.clone() })
    }

    /// Builds an image. Ends early when nobody hears the events any more.
    pub(in crate::engine) async fn build(
        self: &Arc<Self>,
        project: &Name,
        request: BuildRequest,
        events: mpsc::Sender<BuildEvent>,
    ) -> Result<Image> {
        self.lifecycle.tenancy.require_project(project)?;
        let images = &self.lifecycle.images;
        images.check_built_name(&request.name)?;
        let _place = self.place(project)?;
        let (context, text) = images.open_context(&request.context, &request.dockerfile).await?;
        let file = dockerfile::parse(&text)?;
        let stages = stages::resolve(&file, &request)?;
        let mut build = Build {
            builds: self,
            project,
            hold: self.lifecycle.store.hold(),
            total: stages.iter().filter(|stage| stage.needed).map(|stage| stage.steps).sum(),
            request: &request,
            context: &context,
            file: &file,
            events,
            number: 0,
            done: BTreeMap::new(),
        };
        build.warn_of_unused(&stages).await?;
        let Some(last) = stages.iter().rposition(|stage| stage.target) else {
            return Err(Error::invalid("target", "there is no such stage"));
        };
        for (at, stage) in stages.iter().enumerate().filter(|(_, stage)| stage.needed) {
            let state = build.stage(&stages, stage, &file.stages[at]).await?;
            build.done.insert(at, state);
        }
        let built = build
            .done
            .remove(&last)
            .ok_or_else(|| Error::Dockerfile(DockerfileError::at(1, "the target was not built")))?;
        let image =
            images.publish_built(&request.name, built.layers, built.config, "build").await?;
        self.lifecycle.references.count_image_layers(&image.layers).await?;
        match images.forget_steps(project, false).await {
            Ok(0) => {}
            Ok(_) => self.lifecycle.storage.collector.collect_soon(),
            Err(error) => tracing::warn!(%error, "old steps of builds were not removed"),
        }
        Ok(image)
    }

    /// Forgets all steps of a project. Answers with how many.
    pub(in crate::engine) async fn forget(&self, project: &Name) -> Result<usize> {
        let forgotten = self.lifecycle.images.forget_steps(project, true).await?;
        self.lifecycle.storage.collector.collect_soon();
        Ok(forgotten)
    }

    /// Deletes in the background what builds of an earlier daemon left.
    pub(in crate::engine) fn clean_up(self: &Arc<Self>) {
        let this = Arc::clone(self);
        let tasks = &self.lifecycle.context.tasks;
        tasks.spawn_until_shutdown(async move {
            let found = this.lifecycle.db.sandboxes(None, &Filter::default(), &Page::all()).await;
            let left = match found {
                Ok(found) => found.items,
                Err(error) => {
                    tracing::warn!(%error, "what builds have left was not looked for");
                    return;
                }
            };
            for sandbox in left.into_iter().filter(|sandbox| sandbox.internal) {
                tracing::info!(sandbox = %sandbox.name, "a build was interrupted; its sandbox is deleted");
                this.delete(sandbox.id).await;
            }
        });
    }

    /// Deletes a sandbox of a build, with all it has.
    async fn delete(&self, id: SandboxId) {
        let gone = self.lifecycle.turn(id.clone(), move |lifecycle, slot| async move {
            let Some(sandbox) = lifecycle.db.sandbox_by_id(&id).await? else { return Ok(()) };
            let wish = Delete { force: true, at_once: true, ..Delete::default() };
            lifecycle.delete_sandbox(&slot, sandbox, wish).await.map(drop)
        });
        if let Err(error) = gone.await {
            tracing::error!(
                error = error_chain(&error),
                "a sandbox of a build was not deleted; the next start of the server tries again"
            );
        }
        self.lifecycle.storage.collector.collect_soon();
    }
}

/// A build under way.
struct Build<'a> {
    builds: &'a Arc<Builds>,
    project: &'a Name,
    request: &'a BuildRequest,
    context: &'a BuildContext,
    file: &'a Dockerfile,
    /// Keeps all layers that the build has come to.
    hold: LayerHold,
    events: mpsc::Sender<BuildEvent>,
    number: usize,
    total: usize,
    /// Stages that are done.
    done: BTreeMap<usize, StageState>,
}

impl Build<'_> {
    /// Tells the caller. One that does not listen any more ends the build.
    async fn tell(&self, event: BuildEvent) -> Result<()> {
        if self.builds.lifecycle.context.tasks.is_shutdown() {
            return Err(Error::ShuttingDown);
        }
        match self.events.send_timeout(event, HEARD_WITHIN).await {
            Ok(()) => Ok(()),
            Err(_) => Err(Error::BuildCanceled),
        }
    }

    /// Waits for something that others hold, but not longer than for the caller.
    async fn while_heard<T>(&self, what: impl Future<Output = T>) -> Result<T> {
        let shutdown = self.builds.lifecycle.context.tasks.shutdown();
        tokio::select! {
            done = tokio::time::timeout(OTHERS_WITHIN, what) => done.map_err(|_| Error::BuildCanceled),
            () = self.events.closed() => Err(Error::BuildCanceled),
            () = shutdown.cancelled() => Err(Error::ShuttingDown),
        }
    }

    fn reporter(&self) -> Reporter {
        let events = self.events.clone();
        // The next report says more anyway.
        Reporter::new(move |progress| drop(events.try_send(BuildEvent::Progress(progress))))
    }

    /// Arguments that nothing declares are mistakes, most of the time.
    async fn warn_of_unused(&self, stages: &[stages::ResolvedStage]) -> Result<()> {
        let declared = |name: &String| {
            let early = self.file.args.iter().any(|(_, arg, _)| arg == name);
            early || stages.iter().any(|stage| stage.declares.contains(name))
        };
        for name in self.request.args.keys() {
            if !declared(name) && !instructions::is_proxy(name) {
                let warning =
                    format!("the build argument `{name}` is not used: no `ARG` declares it");
                self.tell(BuildEvent::Warning(warning)).await?;
            }
        }
        Ok(())
    }
}
