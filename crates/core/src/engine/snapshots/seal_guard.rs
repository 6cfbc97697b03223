//! The seal guard: what a session wrote is looked at before it is sealed.
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
//! At a checkpoint the session goes on with its files, so none of them can be masked or kept aside:
//! there `quarantine` refuses as `block` does.

use std::collections::HashMap;
use std::sync::Arc;

use crate::db::Page;
use crate::engine::error::error_chain;
use crate::engine::running::live::RunningSandbox;
use crate::engine::snapshots::SealGuard;
use crate::engine::{Error, Result};
use crate::failpoint;
use crate::model::{
    Because, Command, DriveId, FORMAT, Finding, FindingKind, LayerId, MemoryId, MountMode, Mounted,
    OnJunk, OnSecret, Place, Quarantine, Sandbox, SandboxId, Session, SnapshotId, Suspect,
    Timestamp, now,
};
use crate::store::search::{Match, MatchKind, Needles, SearchedFiles, Writers};
use crate::store::{Effort, FileToQuarantine, Globs, Junk, JunkRules, MeasuredLayer};

/// How many findings are told and kept on record; the others are like them.
const TOLD: usize = 100;
/// How far files' times may be behind those of commands, in milliseconds: twice the slowest kernel tick.
const TICK: i64 = 20;

/// What a look at a running session remembers for the one after its end.
#[derive(Debug, Default)]
pub(in crate::engine) struct GuardScan {
    seen: HashMap<LayerId, SearchedFiles>,
    /// Files in doubt that were accepted.
    pub(in crate::engine) doubtful: Vec<Finding>,
    /// The open layer, if it was visited since the last write to it.
    pub(in crate::engine) measured: Option<MeasuredLayer>,
}

/// What a seal looks for on its way. Where each file had to be decided about before, nothing is left to tell.
pub(in crate::engine) fn junk_warned_of(sandbox: &Sandbox) -> Result<Option<JunkRules>> {
    Ok(match sandbox.config.guard.junk {
        OnJunk::Warn => JunkRules::of(&sandbox.config.guard)?,
        OnJunk::Off | OnJunk::PromoteOrDrop => None,
    })
}

/// A layer that is to be sealed.
pub(super) struct GuardedPart {
    pub(super) layer: LayerId,
    pub(super) chain: Vec<LayerId>,
    /// Where the sandbox has it, without a leading slash.
    pub(super) prefix: Vec<u8>,
    pub(super) drive: Option<DriveId>,
}

/// What to look for, and for whom.
pub(super) struct Inspection<'a> {
    pub(super) sandbox: &'a Sandbox,
    pub(super) session: Option<Session>,
    /// What the session was given; `None` when it was given nothing.
    pub(super) needles: Option<Arc<Needles>>,
    pub(super) keep: bool,
}

/// A find, where it is and what is told about it.
pub(super) struct Spotted {
    part: usize,
    path: Vec<u8>,
    changed: Timestamp,
    maskable: bool,
    told: Finding,
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
        // While it runs there is no hurry; once it stands still there is.
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

    /// Looks at memory that was captured of a running session. It goes on with it, so nothing can be masked or kept aside.
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

    /// Looks at what a session wrote to a drive, when there is nobody left to ask: what must not be sealed
    /// is kept aside, so that nothing is lost and nothing leaks.
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

    /// What is told about finds: with the commands that may have done it.
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

impl GuardedPart {
    /// A layer that is sealed already.
    pub(super) fn of_layer(layer: &LayerId) -> Self {
        Self { layer: layer.clone(), chain: Vec::new(), prefix: Vec::new(), drive: None }
    }

    fn of_drive(mounted: &Mounted) -> Self {
        Self {
            layer: mounted.layer.clone(),
            chain: mounted.chain.clone(),
            prefix: mounted.path.trim_matches('/').as_bytes().to_vec(),
            drive: Some(mounted.drive.clone()),
        }
    }
}

impl Spotted {
    /// Whether it can be kept aside: all but the root of a layer.
    fn can_leave(&self) -> bool {
        self.told.kind == FindingKind::Secret && !self.path.is_empty()
    }

    /// The path in the sandbox, without a leading slash.
    fn full_path(&self, parts: &[GuardedPart]) -> Vec<u8> {
        let prefix = &parts[self.part].prefix;
        if prefix.is_empty() { self.path.clone() } else { [prefix, &self.path[..]].join(&b'/') }
    }
}

impl Inspection<'_> {
    /// Whether anything is to be done before a layer is sealed.
    fn is_needed(&self) -> bool {
        let by_hand = self.sandbox.config.guard.junk == OnJunk::PromoteOrDrop;
        self.needles.is_some() || by_hand || !self.sandbox.decision().drop.is_empty()
    }

    /// The layers that would be sealed if the session ended now.
    fn parts(&self) -> Vec<GuardedPart> {
        let mut parts = Vec::new();
        if self.keep {
            let chain = self.sandbox.open_chain();
            let own = |layer: &LayerId, chain: &[LayerId]| GuardedPart {
                layer: layer.clone(),
                chain: chain.to_vec(),
                prefix: Vec::new(),
                drive: None,
            };
            if let Some(under) = self.sandbox.unsealed() {
                let below: Vec<_> = chain.iter().filter(|layer| *layer != under).cloned().collect();
                parts.push(own(under, &below));
            }
            parts.extend(self.sandbox.open_layer().map(|open| own(open, chain)));
        }
        let written = self.sandbox.mounted().iter().filter(|one| one.mode == MountMode::ReadWrite);
        parts.extend(written.map(GuardedPart::of_drive));
        parts
    }

    pub(super) async fn search(
        &self,
        this: &SealGuard,
        parts: &[GuardedPart],
        (writers, effort): (Writers, Effort),
        looked: &mut GuardScan,
    ) -> Result<Vec<Spotted>> {
        let Some(needles) = &self.needles else { return Ok(Vec::new()) };
        let mut spotted = Vec::new();
        for (at, part) in parts.iter().enumerate() {
            let before = looked.seen.remove(&part.layer).unwrap_or_default();
            let searched =
                match this.store.search(&part.layer, needles, writers, effort, before).await {
                    // Nothing was written to it, and an earlier attempt let go of it.
                    Err(error) if error.is_not_found() && part.drive.is_some() => continue,
                    searched => searched?,
                };
            looked.seen.insert(part.layer.clone(), searched.seen);
            spotted.extend(searched.finds.into_iter().map(|find| spot(at, part, needles, find)));
        }
        Ok(spotted)
    }

    /// Masks what can be masked.
    async fn mask(&self, this: &SealGuard, parts: &[GuardedPart]) -> Result<()> {
        let Some(needles) = &self.needles else { return Ok(()) };
        for part in parts {
            let store = &this.store;
            let all = store
                .search(
                    &part.layer,
                    needles,
                    Writers::None,
                    Effort::Foreground,
                    SearchedFiles::default(),
                )
                .await?;
            store.mask(&part.layer, &part.chain, needles, &all.finds).await?;
        }
        failpoint::pass("guard.redacted");
        Ok(())
    }

    /// Large files and junk, if somebody has to decide about each. Drives are for what is large.
    pub(super) async fn junk(
        &self,
        this: &SealGuard,
        parts: &[GuardedPart],
    ) -> Result<Vec<Spotted>> {
        let guard = &self.sandbox.config.guard;
        if guard.junk != OnJunk::PromoteOrDrop {
            return Ok(Vec::new());
        }
        let mut spotted = Vec::new();
        for (at, part) in parts.iter().enumerate().filter(|(_, part)| part.drive.is_none()) {
            let Some(rules) = JunkRules::of(guard)? else { continue };
            let found = this.store.junk_in(&part.layer, rules).await?;
            spotted.extend(found.into_iter().map(|junk| Spotted {
                part: at,
                path: junk.path.clone(),
                changed: junk.changed,
                maskable: false,
                told: junk_finding(&junk, self.needles.as_deref()),
            }));
        }
        Ok(spotted)
    }

    /// What must be decided first, and what is only told.
    pub(super) fn split(
        &self,
        spotted: Vec<Spotted>,
        parts: &[GuardedPart],
        promoted: &Globs,
        settled: impl Fn(&Spotted) -> bool,
    ) -> (Vec<Spotted>, Vec<Spotted>) {
        let guard = &self.sandbox.config.guard;
        spotted.into_iter().partition(|one| match one.told.kind {
            FindingKind::Secret => guard.secrets != OnSecret::Warn && !settled(one),
            FindingKind::Unsearched | FindingKind::Doubtful => false,
            FindingKind::Large | FindingKind::Junk | FindingKind::CoreDump => {
                guard.junk == OnJunk::PromoteOrDrop && !promoted.covers(&one.full_path(parts))
            }
        })
    }

    /// Commands that were given the secret, or ran when the file last changed.
    fn suspects(&self, commands: &[Command], one: &Spotted) -> Vec<Suspect> {
        let mut suspects = Vec::new();
        let changed = one.changed.as_millisecond();
        for command in commands {
            let given = one
                .told
                .secret
                .as_ref()
                .is_some_and(|name| command.secrets.iter().any(|given| given.as_str() == name));
            let ran = command.started_at.as_millisecond() - TICK <= changed
                && command.ended_at.is_none_or(|ended| changed <= ended.as_millisecond() + TICK);
            let because = match (given, ran) {
                (true, true) => Because::GivenAndRunning,
                (true, false) => Because::Given,
                (false, true) => Because::Running,
                (false, false) => continue,
            };
            let masked = |word: &String| match &self.needles {
                Some(needles) => {
                    String::from_utf8_lossy(&needles.mask(word.as_bytes())).into_owned()
                }
                None => word.clone(),
            };
            let argv = command.argv.iter().map(masked).collect();
            suspects.push(Suspect { command: command.id.clone(), argv, because });
        }
        // Those that are under suspicion for more come first, then the latest.
        suspects.reverse();
        suspects.sort_by_key(|suspect| match suspect.because {
            Because::GivenAndRunning => 0,
            Because::Running => 1,
            Because::Given => 2,
        });
        suspects.truncate(5);
        suspects
    }
}

fn spot(at: usize, part: &GuardedPart, needles: &Needles, find: Match) -> Spotted {
    let mut told = Finding {
        kind: FindingKind::Unsearched,
        path: shown(&part.prefix, &find.path, Some(needles)),
        size: find.size,
        secret: None,
        place: None,
        encoding: None,
        offset: None,
        detail: None,
        commands: Vec::new(),
    };
    let mut can_be_masked = false;
    let text = |bytes: &[u8]| printable(&needles.mask(bytes));
    match find.what {
        MatchKind::Secret { name, place, encoding, offset, within, maskable } => {
            can_be_masked = maskable;
            told.kind = FindingKind::Secret;
            told.secret = Some(name);
            told.place = Some(place);
            told.encoding = Some(encoding);
            told.offset = offset;
            told.detail = within.as_deref().map(text).filter(|text| !text.is_empty());
        }
        MatchKind::Unsearched { within, reason } => {
            let within = within.as_deref().map(text);
            told.detail =
                Some(within.map_or(reason.clone(), |within| format!("{within}: {reason}")));
        }
    }
    Spotted { part: at, path: find.path, changed: find.changed, maskable: can_be_masked, told }
}

/// What is told about junk in a sandbox's own root.
pub(in crate::engine) fn junk_finding(junk: &Junk, needles: Option<&Needles>) -> Finding {
    Finding {
        kind: junk.kind,
        path: shown(&[], &junk.path, needles),
        size: junk.size,
        secret: None,
        place: None,
        encoding: None,
        offset: None,
        detail: None,
        commands: Vec::new(),
    }
}

/// A path as the sandbox has it, for people: values masked, nothing that moves a terminal's cursor.
fn shown(prefix: &[u8], path: &[u8], needles: Option<&Needles>) -> String {
    let mut full = Vec::new();
    for part in [prefix, path].into_iter().filter(|part| !part.is_empty()) {
        full.push(b'/');
        full.extend_from_slice(part);
    }
    if full.is_empty() {
        full.push(b'/');
    }
    printable(&needles.map_or(full.clone(), |needles| needles.mask(&full)))
}

fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}
