//! Templates: captured memory that belongs to no sandbox, from which machines start.
//!
//! A machine that waits to be assembled is the same for all images. The first start of a size boots one, captures it and keeps that for
//! good; the first create of an image leaves another on top, with the image's root mounted (*image template*). One at a time makes
//! each of them, and the others wait.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sha2::Digest as _;

use crate::driver::{Driver, Machine, Then};
use crate::engine::error::error_chain;
use crate::engine::machine::Machines;
use crate::engine::machine::capabilities::Pausing;
use crate::engine::machine::restore::BOOT_WITHIN;
use crate::engine::running::live::reach;
use crate::engine::{Error, Result};
use crate::keyed_lock::KeyedLock;
use crate::model::{
    FORMAT, Fingerprint, LayerId, Limits, MachineKey, MemoryId, MemoryLayer, RootFs, Sandbox,
    Template, now,
};
use crate::store::{Durability, NewMemory};

/// For how long a template that could not be made is done without.
const NOT_AGAIN: Duration = Duration::from_mins(5);
/// How many templates are kept: no project's limits apply to them.
const MOST_TEMPLATES: usize = 128;
/// What the keys of machines begin with that become templates.
pub(in crate::engine) const TEMPLATE: &str = "template-";

/// Which templates are being made, and which could not be made lately.
#[derive(Debug, Default)]
pub(in crate::engine) struct Templates {
    /// One at a time makes the template of a kind of machine; the others wait for it.
    making: KeyedLock<String>,
    /// Which could not be made, or made machines that did not work, and when: they are not tried again at every start.
    failed: Mutex<HashMap<String, Instant>>,
}

impl Templates {
    pub(in crate::engine) fn has_failed(&self, key: &str) -> bool {
        let mut failed = self.failed.lock();
        failed.retain(|_, at| at.elapsed() < NOT_AGAIN);
        failed.contains_key(key)
    }

    pub(in crate::engine) fn failed(&self, key: String) {
        self.failed.lock().insert(key, Instant::now());
    }
}

impl Machines {
    /// The template of a kind of machine, which is made if there is none.
    pub(in crate::engine) async fn template(
        &self,
        driver: &Arc<dyn Driver>,
        powers: Pausing<'_>,
        machine: Machine,
        here: &Fingerprint,
    ) -> Result<MemoryId> {
        let key = here.key();
        self.template_of(driver, powers, machine, key, None).await
    }

    /// A template in which the root of a sandbox's image is mounted. Of one that has files of its own, or drives, the root is
    /// another each time.
    pub(in crate::engine) async fn image_template(
        &self,
        driver: &Arc<dyn Driver>,
        powers: Pausing<'_>,
        sandbox: &Sandbox,
        machine: Machine,
        here: &Fingerprint,
        base: &MemoryId,
    ) -> Result<Option<MemoryId>> {
        if sandbox.current.is_some() || !sandbox.config.mounts.is_empty() {
            return Ok(None);
        }
        let layers = &sandbox.image_layers;
        let root = RootFs { image: layers.len(), ..self.store.root(&LayerId::fresh(), layers) };
        let machine = Machine { root, ..machine };
        // What it was captured with, and what it got when its root was mounted.
        let roots = powers.disk.roots(&machine.root).await?;
        let Limits { pids, file_size, .. } = machine.limits;
        let parts = format!("{} {base} {roots:?} {pids} {}", here.key(), file_size.0);
        let digest = sha2::Sha256::digest(parts);
        let key = hex::encode(&digest[..16]);
        if self.templates.has_failed(&key) {
            return Ok(None);
        }
        let made = self.template_of(driver, powers, machine, key.clone(), Some(base)).await;
        if made.is_err() {
            self.templates.failed(key);
        }
        made.map(Some)
    }

    /// The template of a name: the one on record, or one that the first caller makes now.
    async fn template_of(
        &self,
        driver: &Arc<dyn Driver>,
        powers: Pausing<'_>,
        machine: Machine,
        key: String,
        base: Option<&MemoryId>,
    ) -> Result<MemoryId> {
        if let Some(found) = self.template_on_record(&key, base).await? {
            return Ok(found);
        }
        let _one = self.templates.making.lock(&key).await;
        if let Some(found) = self.template_on_record(&key, base).await? {
            return Ok(found);
        }
        if self.store.scan::<Template>().await?.good.len() >= MOST_TEMPLATES {
            let reason = format!("there are {MOST_TEMPLATES} already");
            return Err(Error::invalid("template", reason));
        }
        tracing::info!(
            key,
            of_image = base.is_some(),
            "creating a template: memory that new microVMs start from"
        );
        let layer = self.make_template(driver, powers, machine, &key, base).await?;
        self.references.count_memory_layer(&layer);
        let template = Template { format: FORMAT, key, memory: layer.id.clone(), used_at: now() };
        self.store.write(&template, Durability::Synced).await?;
        self.references.counts().hold_template(&template);
        Ok(layer.id)
    }

    async fn template_on_record(
        &self,
        key: &str,
        base: Option<&MemoryId>,
    ) -> Result<Option<MemoryId>> {
        let mut found = match self.store.read::<Template>(&key.to_owned()).await {
            Ok(found) => found,
            Err(error) if error.is_not_found() => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let chain: Vec<_> = std::iter::once(&found.memory).chain(base).cloned().collect();
        if let Err(error) = self.store.check_memory(&chain).await {
            tracing::error!(
                key,
                error = error_chain(&error),
                "a template is damaged; another one is made"
            );
            self.store.remove::<Template>(&key.to_owned()).await?;
            return Ok(None);
        }
        if now().duration_since(found.used_at) > jiff::SignedDuration::from_hours(24) {
            found.used_at = now();
            self.store.write(&found, Durability::Soon).await?;
        }
        Ok(Some(found.memory))
    }

    async fn make_template(
        &self,
        driver: &Arc<dyn Driver>,
        powers: Pausing<'_>,
        machine: Machine,
        key: &str,
        base: Option<&MemoryId>,
    ) -> Result<MemoryLayer> {
        let short: String = key.chars().take(24).collect();
        let named = MachineKey::parse(&format!("{TEMPLATE}{short}"));
        let named = named.ok_or_else(|| Error::invalid("template", "its key is no machine's"))?;
        let machine = self.prepare_unassigned(&named, machine.root, machine.limits).await?;
        let made = self.capture_template(driver, powers, &machine, base).await;
        let ended = self.end_unassigned(driver, machine).await;
        let layer = made?;
        ended.map(|()| layer)
    }

    async fn capture_template(
        &self,
        driver: &Arc<dyn Driver>,
        powers: Pausing<'_>,
        machine: &Machine,
        base: Option<&MemoryId>,
    ) -> Result<MemoryLayer> {
        let below = self.references.memory_dirs(base.map_or(&[], std::slice::from_ref));
        let _guest = match base {
            // Its disk is not frozen: it is of no use without its memory.
            Some(_) => self.start_from_template(driver, powers, machine, &below).await?.1,
            None => {
                let _few = self.boots.acquire().await;
                let link = self
                    .start_replacing(driver, machine, || powers.disk.boot(machine, &[]))
                    .await?;
                reach(&link, BOOT_WITHIN, self.context.settings.guest).await?
            }
        };
        let (id, dir) = self.store.begin_memory().await?;
        let sealed = async {
            let captured = powers.memory.capture(&machine.key, &dir, &below, Then::Hold).await?;
            let (fingerprint, ram, roots) = (captured.fingerprint, captured.ram, captured.roots);
            let disk = Some(powers.disk.disk_file().to_owned());
            let new = NewMemory { fingerprint, ram, roots, disk };
            Ok::<_, Error>(self.store.seal_memory(&id, new).await?)
        };
        let sealed = sealed.await;
        if sealed.is_err() {
            self.store.discard_memory(&id).await?;
        }
        sealed
    }
}
