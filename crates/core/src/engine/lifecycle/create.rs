//! Creates sandboxes: from an image, from a snapshot, or returns the one that has the name.
//!
//! The index decides who gets a name, atomically. A create that fails leaves no sandbox behind and
//! the name free; one that was acknowledged is on stable storage.

use std::sync::Arc;

use crate::engine::error::error_chain;
use crate::engine::lifecycle::Lifecycle;
use crate::engine::lifecycle::sandbox::WakeFrom;
use crate::engine::machine::capabilities::pausing;
use crate::engine::{Create, Delete, Error, IfExists, Opened, Result};
use crate::failpoint;
use crate::model::lifecycle::Phase;
use crate::model::{
    Config, Image, ImageConfig, LayerId, Lineage, Name, OnAccept, Sandbox, Size, Snapshot,
    SnapshotId,
};
use crate::store::image::{HOST, Reporter};
use crate::store::{Durability, LayerHold};

/// The memory of sandboxes that do not say, where a driver keeps it.
const KEPT_MEMORY: Size = Size(1 << 30);

/// What a new sandbox stands on.
#[derive(Debug, Clone)]
pub(in crate::engine) struct StartingPoint {
    pub(in crate::engine) config: Config,
    /// Keeps the layers until a record names them.
    pub(in crate::engine) hold: Option<Arc<LayerHold>>,
    pub(in crate::engine) layers: Vec<LayerId>,
    pub(in crate::engine) image_config: ImageConfig,
    pub(in crate::engine) current: Option<SnapshotId>,
    /// Whether that has memory.
    pub(in crate::engine) memory: bool,
    pub(in crate::engine) forked_from: Option<Lineage>,
    /// [`Sandbox::internal`].
    pub(in crate::engine) internal: bool,
}

impl Lifecycle {
    pub(in crate::engine) async fn create(
        self: &Arc<Self>,
        project: &Name,
        request: Create,
        key: Option<String>,
    ) -> Result<Opened> {
        if let (Some(name), IfExists::Get) = (&request.name, request.if_exists)
            && let Some(found) = self.open_existing(project, name, request.start).await?
        {
            return Ok(found);
        }
        if let Some(made) = self.made_under(project, key.as_deref()).await? {
            return self.open_again(made, request.start).await;
        }
        let mut patch = request.patch;
        self.network.seal_patch(project, &mut patch)?;
        let fresh = self.fresh_config(patch.driver.as_deref());
        let config = patch.apply(fresh)?.with_defaults_for(project);
        if let Some(policy) = &config.network {
            self.network.check_policy(project, &config.tags, policy)?;
        }
        self.storage.drives.check_drives(project, &config.mounts).await?;
        self.secrets.check_secret_uses(project, &config)?;
        let start_point = match &request.from {
            Some(id) => {
                let snapshot = self.storage.snapshots.find_snapshot(project, id).await?;
                let source = self.db.sandbox_by_id(&snapshot.sandbox).await?;
                self.check_driver(&config, Some(&snapshot))?;
                self.starting_point_of(config, source.as_ref(), snapshot)
            }
            None => {
                let (image, hold) = self.hold_image(&config.image).await?;
                StartingPoint {
                    config,
                    hold: Some(Arc::new(hold)),
                    layers: image.layers,
                    image_config: image.config,
                    current: None,
                    memory: false,
                    forked_from: None,
                    internal: false,
                }
            }
        };
        self.check_driver(&start_point.config, None)?;
        self.store.check_room(1).await?;
        match self.register(project, request.name.clone(), start_point, key, request.start).await {
            Err(Error::NameTaken(name)) if request.if_exists == IfExists::Get => {
                // Another call was faster: its sandbox is returned.
                self.open_existing(project, &name, request.start)
                    .await?
                    .ok_or(Error::NameTaken(name))
            }
            other => other,
        }
    }

    /// What a sandbox is that asks for nothing, or for no more than a driver.
    pub(in crate::engine) fn fresh_config(&self, driver: Option<&str>) -> Config {
        let driver = driver.unwrap_or(&self.context.settings.default_driver).to_owned();
        let found = self.context.driver(&driver);
        let keeps = found.is_ok_and(|found| pausing(&*found).is_some());
        let mut config = Config { driver, ..Config::default() };
        if keeps {
            // All of it may have to be kept one day.
            config.resources.memory = KEPT_MEMORY;
        }
        config
    }

    /// What an earlier call under this key made that never got to answer.
    pub(in crate::engine) async fn made_under(
        &self,
        project: &Name,
        key: Option<&str>,
    ) -> Result<Option<Sandbox>> {
        let Some(key) = key else { return Ok(None) };
        let made = self.db.sandbox_created_with(project, key).await?;
        Ok(made.filter(|sandbox| sandbox.phase() != Phase::Deleted))
    }

    /// The image of that name, with its layers held.
    pub(in crate::engine) async fn hold_image(&self, name: &str) -> Result<(Image, LayerHold)> {
        let hold = self.store.hold();
        let mut image = self.image(name).await?;
        loop {
            hold.layers(&image.layers).await;
            // Read again: what is on record after the hold began stays while it lasts.
            let again = self.image(name).await?;
            if again.layers == image.layers {
                return Ok((again, hold));
            }
            image = again;
        }
    }

    /// The image of that name; the one of this host is made when it is first asked for.
    pub(in crate::engine) async fn image(&self, name: &str) -> Result<Image> {
        let image = if name == HOST {
            self.images.host(false, &Reporter::silent()).await?
        } else {
            self.images.get(name).await?
        };
        self.references.count_image_layers(&image.layers).await?;
        Ok(image)
    }

    pub(in crate::engine) async fn open_existing(
        self: &Arc<Self>,
        project: &Name,
        name: &Name,
        start: bool,
    ) -> Result<Option<Opened>> {
        match self.find(project, name).await {
            Ok(sandbox) => Ok(Some(self.open_again(sandbox, start).await?)),
            Err(Error::NoSandbox(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(in crate::engine) async fn open_again(
        self: &Arc<Self>,
        sandbox: Sandbox,
        start: bool,
    ) -> Result<Opened> {
        if !start {
            let session = self.session_of(&sandbox).await?;
            return Ok(Opened { sandbox, session, created: false, resumed: false });
        }
        let (live, resumed) = self.wake(&sandbox.id, &sandbox.name, None, WakeFrom::Any).await?;
        Ok(Opened {
            sandbox: (*live.sandbox()).clone(),
            session: Some(live.session()),
            created: false,
            resumed,
        })
    }

    pub(in crate::engine) fn starting_point_of(
        &self,
        config: Config,
        source: Option<&Sandbox>,
        snapshot: Snapshot,
    ) -> StartingPoint {
        let forked_from = Lineage {
            sandbox: snapshot.sandbox.clone(),
            name: snapshot.sandbox_name.clone(),
            snapshot: Some(snapshot.id.clone()),
            generation: snapshot.generation,
            group: None,
            group_id: None,
            on_accept: OnAccept::Keep,
        };
        let layers =
            source.map_or_else(|| snapshot.layers.clone(), |source| source.image_layers.clone());
        StartingPoint {
            config,
            hold: None,
            layers,
            image_config: snapshot.image_config,
            memory: !snapshot.memory.is_empty(),
            current: Some(snapshot.id),
            forked_from: Some(forked_from),
            internal: false,
        }
    }

    /// Brings a new sandbox into being. The index decides who gets the name.
    pub(in crate::engine) async fn register(
        self: &Arc<Self>,
        project: &Name,
        name: Option<Name>,
        start_point: StartingPoint,
        created_with: Option<String>,
        start: bool,
    ) -> Result<Opened> {
        // Held until the sandbox's record names what it stands on.
        let StartingPoint {
            config,
            hold,
            layers,
            image_config,
            current,
            memory,
            forked_from,
            internal,
        } = start_point;
        let hold = match hold {
            Some(hold) => hold,
            None => {
                let hold = self.store.hold();
                hold.layers(&layers).await;
                Arc::new(hold)
            }
        };
        let made_up = name.is_none();
        let name = name.unwrap_or_else(Name::generate);
        let mut sandbox = Sandbox::new(project.clone(), name, config, memory);
        sandbox.current = current;
        sandbox.image_layers = layers;
        sandbox.image_config = image_config;
        sandbox.forked_from = forked_from;
        sandbox.created_with = created_with;
        sandbox.internal = internal;
        self.turn(sandbox.id.clone(), move |this, slot| async move {
            loop {
                let lost = this.records.lost_names.get(&sandbox.project, &sandbox.name);
                match lost {
                    Some(lost) if !made_up => return Err(Error::Lost(lost)),
                    None if this.context.catalog.claim(&sandbox).await? => break,
                    None if !made_up => return Err(Error::NameTaken(sandbox.name)),
                    _ => sandbox.name = Name::generate(),
                }
            }
            failpoint::pass("create.claimed");
            if let Some(current) = &sandbox.current
                && this.db.snapshot(current).await?.is_none()
            {
                // Dropped between the choice and the claim.
                this.context.catalog.release(&sandbox.id).await?;
                return Err(Error::SnapshotDeleted(current.clone()));
            }
            let durability = if start { Durability::Soon } else { Durability::Synced };
            if let Err(error) = this.records.record(&mut sandbox, durability).await {
                this.context.catalog.release(&sandbox.id).await?;
                return Err(error);
            }
            drop(hold);
            this.context.events.created(&sandbox);
            failpoint::pass("create.recorded");
            if !start {
                this.storage.snapshots.note_use(sandbox.current.as_ref()).await;
                return Ok(Opened { sandbox, session: None, created: true, resumed: false });
            }
            let started = this.start_session(&slot, sandbox.clone(), true).await;
            match started {
                Ok(live) => Ok(Opened {
                    sandbox: (*live.sandbox()).clone(),
                    session: Some(live.session()),
                    created: true,
                    resumed: false,
                }),
                Err(error) => {
                    // A create that fails leaves no sandbox behind: the name is free again.
                    // No effect of it was reported to anybody.
                    if let Some(failed) = this.db.sandbox_by_id(&sandbox.id).await? {
                        sandbox.revision = failed.revision;
                    }
                    let wish = Delete { force: true, at_once: true, ..Delete::default() };
                    if let Err(error) = this.delete_sandbox(&slot, sandbox, wish).await {
                        tracing::error!(
                            error = error_chain(&error),
                            "a sandbox whose create failed was not removed"
                        );
                    }
                    Err(error)
                }
            }
        })
        .await
    }
}
