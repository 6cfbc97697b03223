//! The seal guard: inspects what a session wrote before it is sealed.
//!
//! ```text
//! asked for    look while it runs ── block ──> refused, the session goes on
//!                  │
//!              machine gone  →  excluded and dropped  →  look at what changed since  →  masked, kept aside
//!                                                              │ block
//!                                                              └──> `failed`, nothing sealed, layer as it is
//! by itself        machine gone  →  the same, without a look before
//! ```
//!
//! Whatever is done to a layer here was decided before (`OpenSession::decision` and the policy, both on record
//! when the sandbox says `stopping`), and can be done again from the start: a daemon that dies on the
//! way looks again. A session that was given no secret is not searched, and large files and junk are
//! found by the walk that measures a layer as it is sealed; only `promote-or-drop` needs to know before.
//!
//! At a checkpoint the session continues with its files, so none of them can be masked or
//! quarantined: there `quarantine` refuses as `block` does.

mod inspection;
mod spotted;
mod taken;

use std::collections::HashMap;
use std::sync::Arc;

use crate::db::Page;
use crate::engine::error::error_chain;
use crate::engine::running::live::RunningSandbox;
use crate::engine::snapshots::SealGuard;
use crate::engine::{Error, Result};
use crate::failpoint;
use crate::model::{
    FORMAT, Finding, FindingKind, LayerId, MemoryId, Mounted, OnSecret, Place, Quarantine, Sandbox,
    SandboxId, Session, SnapshotId, now,
};
use crate::store::search::{Needles, SearchedFiles, Writers};
use crate::store::{Effort, FileToQuarantine, Globs, MeasuredLayer};

pub(super) use self::inspection::{GuardedPart, Inspection};
use self::spotted::Spotted;
pub(in crate::engine) use self::spotted::junk_finding;

/// How many findings are reported and kept on record; the others are like them.
const TOLD: usize = 100;

/// What a look at a running session remembers for the one after its end.
#[derive(Debug, Default)]
pub(in crate::engine) struct GuardScan {
    seen: HashMap<LayerId, SearchedFiles>,
    /// Files in doubt that were accepted.
    pub(in crate::engine) doubtful: Vec<Finding>,
    /// The open layer, if it was visited since the last write to it.
    pub(in crate::engine) measured: Option<MeasuredLayer>,
}

impl SealGuard {
    /// Looks at what a running session wrote, before it is ended because somebody asked.
    pub(in crate::engine) async fn inspect_running(
        &self,
        live: &RunningSandbox,
        sandbox: &Sandbox,
        keep: bool,
    ) -> Result<GuardScan> {
        if sandbox.decision().discard {
            return Ok(GuardScan::default());
        }
        let inspection = self.inspection(sandbox, Some(live.session()), keep)?;
        let parts = inspection.parts();
        let mut looked = GuardScan::default();
        let mut spotted = inspection
            .search(self, &parts, (Writers::Busy, Effort::Foreground), &mut looked)
            .await?;
        spotted.extend(inspection.junk(self, &parts).await?);
        let left_out = Globs::parse(
            &[sandbox.config.exclude.clone(), sandbox.decision().drop.clone()].concat(),
        )?;
        spotted.retain(|one| !left_out.covers(&one.full_path(&parts)));
        let promoted = Globs::parse(&sandbox.decision().promote)?;
        let aside = sandbox.config.guard.secrets == OnSecret::Quarantine;
        let redact = sandbox.decision().redact;
        let settled = |one: &Spotted| redact && one.maskable || aside && one.can_leave();
        let (refused, _) = inspection.split(spotted, &parts, &promoted, settled);
        self.refuse(&inspection, refused, true).await?;
        Ok(looked)
    }

    /// Looks at what a session wrote that is over, and does what was decided or the policy says. What
    /// it answers with is sealed, or was kept aside.
    pub(in crate::engine) async fn guard(
        &self,
        sandbox: &Sandbox,
        keep: bool,
        mut looked: GuardScan,
    ) -> Result<Vec<Finding>> {
        if sandbox.decision().discard {
            return Ok(Vec::new());
        }
        let session = match &sandbox.session {
            Some(id) => self.db.session(id).await?,
            None => None,
        };
        let inspection = self.inspection(sandbox, session, keep)?;
        let parts = inspection.parts();
        let decision = sandbox.decision();
        let mut findings = Vec::new();
        if !inspection.is_needed() {
            return Ok(findings);
        }
        for part in &parts {
            let own = if part.drive.is_none() { &sandbox.config.exclude[..] } else { &[] };
            let globs = [own, &decision.drop[..]].concat();
            self.store.exclude(&part.layer, &globs, &part.prefix).await?;
            let before = self.store.finish_setting_aside(&part.layer).await?;
            findings.extend(before.into_iter().flat_map(|quarantine| quarantine.findings));
        }
        let mut spotted = inspection
            .search(self, &parts, (Writers::None, Effort::Foreground), &mut looked)
            .await?;
        if decision.redact && spotted.iter().any(|one| one.maskable) {
            inspection.mask(self, &parts).await?;
            spotted = inspection
                .search(
                    self,
                    &parts,
                    (Writers::None, Effort::Foreground),
                    &mut GuardScan::default(),
                )
                .await?;
        }
        if sandbox.config.guard.secrets == OnSecret::Quarantine {
            let (secrets, others): (Vec<_>, Vec<_>) =
                spotted.into_iter().partition(Spotted::can_leave);
            spotted = others;
            findings.extend(self.set_aside(&inspection, &parts, secrets).await?);
        }
        spotted.extend(inspection.junk(self, &parts).await?);
        let promoted = Globs::parse(&decision.promote)?;
        let (refused, passed) = inspection.split(spotted, &parts, &promoted, |_| false);
        self.refuse(&inspection, refused, false).await?;
        findings.extend(self.told(&inspection, passed).await?);
        failpoint::pass("guard.done");
        Ok(findings)
    }

    /// Looks at what a running session wrote, before a checkpoint of it: first while it runs, then, with
    /// what that answered, when nothing in it moves.
    pub(in crate::engine) async fn guard_checkpoint(
        &self,
        live: &RunningSandbox,
        sandbox: &Sandbox,
        writers: Writers,
        looked: &mut GuardScan,
    ) -> Result<Vec<Finding>> {
        let inspection = self.inspection(sandbox, Some(live.session()), true)?;
        // Drives are not part of a checkpoint.
        let mut parts = inspection.parts();
        parts.retain(|part| part.drive.is_none());
        // While it runs there is no hurry; once it is suspended there is.
        let effort = match writers {
            Writers::Busy => Effort::Background,
            Writers::None => Effort::Foreground,
        };
        let mut spotted = inspection.search(self, &parts, (writers, effort), looked).await?;
        if writers == Writers::Busy {
            spotted.extend(inspection.junk(self, &parts).await?);
        }
        let (refused, passed) = inspection.split(spotted, &parts, &Globs::parse(&[])?, |_| false);
        self.refuse(&inspection, refused, true).await?;
        self.told(&inspection, passed).await
    }

    /// Searches memory that was captured of a running session. The session continues with it, so
    /// nothing can be masked or quarantined.
    pub(in crate::engine) async fn guard_memory(
        &self,
        live: &RunningSandbox,
        sandbox: &Sandbox,
        memory: &MemoryId,
    ) -> Result<Vec<Finding>> {
        let inspection = self.inspection(sandbox, Some(live.session()), true)?;
        let Some(needles) = &inspection.needles else { return Ok(Vec::new()) };
        let found = self.store.search_memory(memory, needles).await?;
        let spotted = found.into_iter().map(|one| Spotted {
            part: 0,
            path: Vec::new(),
            changed: now(),
            maskable: false,
            told: Finding {
                kind: FindingKind::Secret,
                path: format!("(memory: {})", one.file),
                size: 0,
                secret: Some(one.name),
                place: Some(Place::Contents),
                encoding: Some(one.encoding),
                offset: Some(one.offset),
                detail: Some(
                    "what was in memory, or on the machine's disk, when it was captured".to_owned(),
                ),
                commands: Vec::new(),
            },
        });
        let (refused, passed) =
            inspection
                .split(spotted.collect(), &inspection.parts(), &Globs::parse(&[])?, |_| false);
        self.refuse(&inspection, refused, true).await?;
        self.told(&inspection, passed).await
    }

    /// Searches what a session wrote to a drive, when no caller is left to decide: what must not be
    /// sealed is quarantined, so that nothing is lost and nothing leaks.
    pub(in crate::engine) async fn guard_drive(
        &self,
        sandbox: &Sandbox,
        session: Option<Session>,
        mounted: &Mounted,
    ) -> Result<()> {
        let inspection = self.inspection(sandbox, session, false)?;
        let parts = [GuardedPart::of_drive(mounted)];
        self.store.finish_setting_aside(&mounted.layer).await?;
        let found = inspection
            .search(self, &parts, (Writers::None, Effort::Foreground), &mut GuardScan::default())
            .await?;
        let secrets = found.into_iter().filter(Spotted::can_leave).collect();
        self.set_aside(&inspection, &parts, secrets).await?;
        Ok(())
    }

    /// Removes what is kept aside of a sandbox that goes. What was written to a drive stays.
    pub(in crate::engine) async fn drop_quarantines(&self, sandbox: &SandboxId) -> Result<()> {
        for quarantine in self.store.scan::<Quarantine>().await?.good {
            if quarantine.sandbox == *sandbox && quarantine.drive.is_none() {
                self.store.remove_quarantine(&quarantine.id).await?;
            }
        }
        Ok(())
    }

    fn inspection<'a>(
        &self,
        sandbox: &'a Sandbox,
        session: Option<Session>,
        keep: bool,
    ) -> Result<Inspection<'a>> {
        let values = match &session {
            Some(session) => self.secrets.given_values(&sandbox.project, session),
            None => Ok(Vec::new()),
        };
        let values = match values {
            Err(error) if sandbox.config.guard.secrets == OnSecret::Warn => {
                tracing::warn!(sandbox = %sandbox.name, error = error_chain(&error), "files of a session are not searched for secrets: their values are not available");
                Vec::new()
            }
            values => values?,
        };
        let needles = Needles::new(&values);
        let needles = Some(needles).filter(|needles| !needles.is_empty()).map(Arc::new);
        Ok(Inspection { sandbox, session, needles, keep })
    }

    async fn refuse(
        &self,
        inspection: &Inspection<'_>,
        found: Vec<Spotted>,
        goes_on: bool,
    ) -> Result<()> {
        if found.is_empty() {
            return Ok(());
        }
        let files = found.len();
        let findings = self.told(inspection, found).await?;
        self.context.events.guard_found(inspection.sandbox, &findings, files, true);
        let name = inspection.sandbox.name.clone();
        Err(Error::Guarded { name, files, findings, goes_on })
    }

    /// The report about findings: with the commands that may have caused them.
    pub(super) async fn told(
        &self,
        inspection: &Inspection<'_>,
        found: Vec<Spotted>,
    ) -> Result<Vec<Finding>> {
        let commands = match &inspection.session {
            Some(session) if !found.is_empty() => {
                self.db.session_commands(&session.id, &Page::all()).await?.items
            }
            _ => Vec::new(),
        };
        let told = found.into_iter().take(TOLD).map(|mut one| {
            one.told.commands = inspection.suspects(&commands, &one);
            one.told
        });
        Ok(told.collect())
    }

    async fn set_aside(
        &self,
        inspection: &Inspection<'_>,
        parts: &[GuardedPart],
        found: Vec<Spotted>,
    ) -> Result<Vec<Finding>> {
        let sandbox = inspection.sandbox;
        let mut all = Vec::new();
        for (at, part) in parts.iter().enumerate() {
            let mut leaving: Vec<FileToQuarantine> = Vec::new();
            let mut here = Vec::new();
            for one in found.iter().filter(|one| one.part == at) {
                // A directory takes along what is in it; the layer's own root stays.
                let gone = |known: &FileToQuarantine| {
                    known.path == one.path
                        || one.path.starts_with(&[&known.path[..], b"/"].concat())
                };
                if !one.path.is_empty() && !leaving.iter().any(gone) {
                    let (path, shown) = (one.path.clone(), one.told.path.clone());
                    leaving.push(FileToQuarantine { path, shown, size: one.told.size });
                }
                here.push(Spotted { told: one.told.clone(), path: one.path.clone(), ..*one });
            }
            if leaving.is_empty() {
                continue;
            }
            let findings = self.told(inspection, here).await?;
            let quarantine = Quarantine {
                format: FORMAT,
                id: SnapshotId::of_layer(&part.layer),
                project: sandbox.project.clone(),
                sandbox: sandbox.id.clone(),
                sandbox_name: sandbox.name.clone(),
                drive: part.drive.clone(),
                at: now(),
                findings: findings.clone(),
                files: Vec::new(),
            };
            self.store.set_aside(&part.layer, &part.chain, quarantine, leaving).await?;
            failpoint::pass("guard.aside");
            tracing::warn!(sandbox = %sandbox.name, layer = %part.layer, "files that contain secrets were quarantined");
            all.extend(findings);
        }
        Ok(all)
    }
}
