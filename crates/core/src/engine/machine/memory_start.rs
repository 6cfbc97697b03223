//! Starting machines that keep their memory.
//!
//! ```text
//! snapshot has memory ── it can be used ──> restored, told what changed, thawed; its commands go on
//!        │                    └── no, or that failed ──> booted on the disks of the same image (*fallback*)
//!        └── none ──> a warm machine is assigned (`warm_machines.rs`)
//!                └── there is none ──> restored from the template of its image, told who it is (*image template*: its root is mounted)
//!                          └── it has files of its own or drives, or that failed ──> restored from the template of its size, assembled
//!                                    └── there is none and none can be made ──> booted on a blank disk, assembled
//! ```
//!
//! A fallback is never to anything older, and it is reported: in the session, in the log, by `why`.
//! The processes are lost then, and marked so.

use std::path::PathBuf;
use std::sync::Arc;

use sandkeep_proto::link::Known;

use crate::driver::{Driver, DriverError, KeepsMemory, Link, Machine, OwnDisk};
use crate::engine::error::error_chain;
use crate::engine::machine::Machines;
use crate::engine::machine::capabilities::{Pausing, no_memory, pausing};
use crate::engine::machine::restore::{RestoreAs, RestoredMachine, identity};
use crate::engine::{Error, Result};
use crate::failpoint;
use crate::guest::Guest;
use crate::model::{
    Fingerprint, LayerId, MemoryId, MemoryLayer, RootFs, Sandbox, Session, Snapshot,
};
use crate::store::Durability;

/// What a machine begins with.
#[derive(Debug)]
pub(in crate::engine) struct StartPlan {
    /// The image, topmost first.
    pub(in crate::engine) memory: Vec<MemoryId>,
    pub(in crate::engine) how: StartMethod,
}

#[derive(Debug)]
pub(in crate::engine) enum StartMethod {
    /// Its memory, as it was captured with this snapshot.
    Memory(Box<Snapshot>),
    /// The image's disks alone; this is why.
    Disks(String),
    /// Memory of a template, which belongs to no sandbox.
    Template,
    /// The same, with the root of an image mounted already: only its identity is missing.
    ImageTemplate,
    /// Nothing.
    Blank,
}

impl StartPlan {
    /// Whether it is what the sandbox's snapshot has.
    pub(in crate::engine) fn is_of_snapshot(&self) -> bool {
        matches!(self.how, StartMethod::Memory(_) | StartMethod::Disks(_))
    }

    /// The image that a sandbox's like this one would begin with, if that has the root mounted.
    pub(in crate::engine) fn template(&self) -> Option<Vec<MemoryId>> {
        matches!(self.how, StartMethod::ImageTemplate).then(|| self.memory.clone())
    }

    /// How many layers of the captured machine belonged to its image.
    pub(in crate::engine) fn image(&self) -> Option<usize> {
        match &self.how {
            StartMethod::Memory(snapshot) => snapshot.image,
            StartMethod::Disks(_)
            | StartMethod::Template
            | StartMethod::ImageTemplate
            | StartMethod::Blank => None,
        }
    }
}

/// A machine that is up.
pub(in crate::engine) struct StartedMachine {
    pub(in crate::engine) link: Link,
    pub(in crate::engine) guest: Guest,
    /// The snapshot whose memory it resumes from, and the commands that continue in it.
    pub(in crate::engine) restored: Option<(Box<Snapshot>, Vec<Known>)>,
    /// Commands ran in memory that could not be used.
    pub(in crate::engine) commands_lost: bool,
}

impl Machines {
    /// What the next session of a sandbox begins with, checked to be of use; nothing for drivers without memory.
    pub(in crate::engine) async fn plan_start(
        &self,
        driver: &Arc<dyn Driver>,
        sandbox: &Sandbox,
    ) -> Result<Option<StartPlan>> {
        let Some(powers) = pausing(&**driver) else { return Ok(None) };
        // Only what decides about images matters here: where its files are does not.
        let machine = self.describe_unplaced(sandbox);
        let here = powers.memory.fingerprint(&machine).await?;
        let current = self.records.current_snapshot(sandbox).await?;
        if let Some(snapshot) = current.filter(Snapshot::has_memory) {
            let memory = snapshot.memory.clone();
            let how = match self.use_of(&snapshot, sandbox, powers.disk, &here).await {
                Ok(()) => StartMethod::Memory(Box::new(snapshot)),
                Err(reason) => {
                    if let Err(error) = self.store.check_disks(&memory).await {
                        let (name, snapshot) = (sandbox.name.clone(), snapshot.id);
                        let (reason, offers) = (error_chain(&error), Vec::new());
                        return Err(Error::Unresumable { name, snapshot, reason, offers });
                    }
                    StartMethod::Disks(reason)
                }
            };
            return Ok(Some(StartPlan { memory, how }));
        }
        let memory = match self.template(driver, powers, machine.clone(), &here).await {
            Ok(memory) => memory,
            Err(error) => {
                tracing::warn!(sandbox = %sandbox.name, error = error_chain(&error), "there is no template for a sandbox of this size; its VM is booted");
                return Ok(Some(StartPlan { memory: Vec::new(), how: StartMethod::Blank }));
            }
        };
        Ok(Some(
            match self.image_template(driver, powers, sandbox, machine, &here, &memory).await {
                Ok(Some(of_image)) => {
                    StartPlan { memory: vec![of_image, memory], how: StartMethod::ImageTemplate }
                }
                Ok(None) => StartPlan { memory: vec![memory], how: StartMethod::Template },
                Err(error) => {
                    tracing::warn!(sandbox = %sandbox.name, error = error_chain(&error), "there is no template for the image of a sandbox; its root is mounted at the start");
                    StartPlan { memory: vec![memory], how: StartMethod::Template }
                }
            },
        ))
    }

    /// Whether a snapshot's memory can be used here and now, or why not.
    async fn use_of(
        &self,
        snapshot: &Snapshot,
        sandbox: &Sandbox,
        disk: &dyn OwnDisk,
        here: &Fingerprint,
    ) -> Result<(), String> {
        if !sandbox.config.mounts.is_empty() {
            return Err("it was given drives, which its memory does not know".to_owned());
        }
        self.store.check_memory(&snapshot.memory).await.map_err(|error| error_chain(&error))?;
        let Some(top) = snapshot.memory.first() else { return Err("it is empty".to_owned()) };
        let top = self.store.read::<MemoryLayer>(top).await.map_err(|error| error_chain(&error))?;
        if let Some(difference) = top.fingerprint.difference(here) {
            return Err(difference);
        }
        let image = snapshot.image.unwrap_or_default();
        let root = RootFs { image, ..self.store.root(&LayerId::fresh(), &snapshot.layers) };
        match disk.roots(&root).await {
            Ok(roots) if roots == top.roots => Ok(()),
            Ok(_) => Err("its files were packed for machines again since then".to_owned()),
            Err(error) => Err(error_chain(&error)),
        }
    }

    /// Brings a machine up, by what it begins with or by what comes after that.
    pub(in crate::engine) async fn bring_up_machine(
        &self,
        driver: &Arc<dyn Driver>,
        sandbox: &mut Sandbox,
        session: &mut Session,
        begin: StartPlan,
    ) -> Result<StartedMachine> {
        let powers = pausing(&**driver).ok_or_else(|| no_memory(sandbox))?;
        let Pausing { memory, disk } = powers;
        let mut machine = self.machine(sandbox)?;
        let mut begin = begin;
        if let StartMethod::ImageTemplate = begin.how {
            // It was never assigned: what the image calls the machine is as good for this one as for any.
            let who =
                RestoreAs { identity: Some(identity(&machine)), machine_id: false, frozen: false };
            let image = self.references.memory_dirs(&begin.memory);
            if let Some((link, guest)) =
                self.take_warm_machine(memory, &machine, sandbox, &begin.memory).await?
            {
                return Ok(StartedMachine { link, guest, restored: None, commands_lost: false });
            }
            // The ids may be others.
            machine = self.machine(sandbox)?;
            match self.restore_as(driver, memory, &machine, &image, who).await {
                Ok(RestoredMachine { link, guest, .. }) => {
                    return Ok(StartedMachine {
                        link,
                        guest,
                        restored: None,
                        commands_lost: false,
                    });
                }
                Err(error) => {
                    tracing::error!(sandbox = %sandbox.name, error = error_chain(&error), "a sandbox could not be started from the template of its image; its root is mounted instead");
                    self.start_over(driver, &machine, sandbox).await?;
                    begin =
                        StartPlan { memory: begin.memory.split_off(1), how: StartMethod::Template };
                    if let Some(open) = sandbox.open_session_mut() {
                        open.memory.clone_from(&begin.memory);
                    }
                    self.records.record(sandbox, Durability::Soon).await?;
                }
            }
        }
        let image = self.references.memory_dirs(&begin.memory);
        let reason = match begin.how {
            StartMethod::Memory(snapshot) => {
                let mut tried =
                    self.restore(driver, memory, &machine, &image, &snapshot, sandbox).await;
                if let Err(Error::Guest(error)) = &tried {
                    // A host that is overloaded for a moment is no reason to give memory up.
                    tracing::warn!(sandbox = %sandbox.name, error = error_chain(error), "a restored VM does not answer; it is restored once more");
                    self.start_over(driver, &machine, sandbox).await?;
                    tried =
                        self.restore(driver, memory, &machine, &image, &snapshot, sandbox).await;
                }
                match tried {
                    Ok(RestoredMachine { link, guest, commands }) => {
                        return Ok(StartedMachine {
                            link,
                            guest,
                            restored: Some((snapshot, commands)),
                            commands_lost: false,
                        });
                    }
                    Err(error @ (Error::Guest(_) | Error::Driver(DriverError::Build { .. }))) => {
                        error_chain(&error)
                    }
                    // It has to do with the host, not with the image, which stays what the sandbox stands on.
                    Err(error) => return Err(error),
                }
            }
            StartMethod::Template | StartMethod::ImageTemplate => match self
                .start_from_template(driver, powers, &machine, &image)
                .await
            {
                Ok((link, guest)) => {
                    return Ok(StartedMachine {
                        link,
                        guest,
                        restored: None,
                        commands_lost: false,
                    });
                }
                // It has to do with the drive, not with the template.
                Err(error @ Error::Driver(DriverError::MountPoint { .. })) => return Err(error),
                Err(error) => {
                    tracing::error!(sandbox = %sandbox.name, error = error_chain(&error), "a sandbox could not be started from a template; its VM is booted");
                    self.start_over(driver, &machine, sandbox).await?;
                    if let Some(open) = sandbox.open_session_mut() {
                        open.memory.clear();
                    }
                    self.records.record(sandbox, Durability::Soon).await?;
                    let (link, guest) = self.boot_machine(driver, disk, &machine, &[]).await?;
                    return Ok(StartedMachine {
                        link,
                        guest,
                        restored: None,
                        commands_lost: false,
                    });
                }
            },
            StartMethod::Blank => {
                let (link, guest) = self.boot_machine(driver, disk, &machine, &[]).await?;
                return Ok(StartedMachine { link, guest, restored: None, commands_lost: false });
            }
            StartMethod::Disks(reason) => reason,
        };
        tracing::error!(sandbox = %sandbox.name, reason, "the memory of a sandbox cannot be used; it is booted on its files, of the same generation");
        self.start_over(driver, &machine, sandbox).await?;
        session.fallback = Some(reason);
        self.records.keep_session(session).await?;
        failpoint::pass("boot.fallback");
        let image = self.store.check_disks(&begin.memory).await?;
        let (link, guest) = self.boot_machine(driver, disk, &machine, &image).await?;
        Ok(StartedMachine { link, guest, restored: None, commands_lost: true })
    }

    async fn restore(
        &self,
        driver: &Arc<dyn Driver>,
        memory: &dyn KeepsMemory,
        machine: &Machine,
        image: &[PathBuf],
        snapshot: &Snapshot,
        sandbox: &Sandbox,
    ) -> Result<RestoredMachine> {
        let whose = snapshot.identity_of.as_ref().unwrap_or(&snapshot.sandbox);
        let identity = (*whose != sandbox.id).then(|| identity(machine));
        let who = RestoreAs { machine_id: identity.is_some(), identity, frozen: true };
        self.restore_as(driver, memory, machine, image, who).await
    }
}
