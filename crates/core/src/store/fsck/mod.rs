//! Checks the whole data directory and reports problems. Changes something only on request
//! ([`repair`]).
//!
//! A problem is either damage to something that was acknowledged, or a *leftover*: what a power cut or
//! a killed daemon leaves of something that never was. To distinguish them:
//!
//! - records of sessions and commands are not synced when they are written. One that is empty, or full
//!   of zeros, was torn by a power cut; one that is anything else than what was written is damaged.
//! - a directory of a sandbox without a manifest is a leftover, unless there is evidence that the
//!   sandbox lived: a record of a command, or of a session that ended.
//! - the open layer of a start that was not recorded as finished may be missing.

pub(super) mod problem;
pub(super) mod repair;
pub(super) mod unreadable;

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::model::{
    Approval, Command, Drive, Image, KeptAuthority, Layer, LayerId, MemoryId, MemoryLayer, Phase,
    Project, Quarantine, Run, Sandbox, SandboxId, Secret, Session, Snapshot, SnapshotId, Template,
};
use crate::store::fsck::problem::Problem;
use crate::store::gc::trash::Trashed;
use crate::store::manifest::document::check_format;
use crate::store::manifest::{Damaged, Manifest, Scan, id_of, list, parse, sync_parent};
use crate::store::{ALL_PARTS, PARTS, Result, Store, blocking, io_error};

/// What was found.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// What is wrong.
    pub problems: Vec<Problem>,
    /// How many projects there are.
    pub projects: usize,
    /// How many sandboxes there are.
    pub sandboxes: usize,
    /// How many snapshots there are.
    pub snapshots: usize,
    /// How many drives there are.
    pub drives: usize,
    /// How many images there are.
    pub images: usize,
    /// How many sealed layers there are.
    pub layers: usize,
    /// How many sealed memory layers there are.
    pub memory: usize,
}

impl Report {
    /// Whether something that was acknowledged cannot be used. Leftovers are no such thing.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.problems.iter().any(|problem| !problem.is_leftover())
    }
}

impl Store {
    /// Looks at every manifest, and at every name in every layer. Contents are
    /// [`verify`](Self::verify)'s business.
    ///
    /// # Errors
    ///
    /// Returns an error when a directory cannot be listed; anything else is in the report.
    pub async fn fsck(&self) -> Result<Report> {
        let everything = Everything {
            projects: self.scan().await?,
            sandboxes: self.scan().await?,
            sessions: self.scan().await?,
            commands: self.scan().await?,
            snapshots: self.scan().await?,
            drives: self.scan().await?,
            secrets: self.scan().await?,
            images: self.scan().await?,
            layers: self.scan().await?,
            memory: self.scan().await?,
            templates: self.scan().await?,
            authorities: self.scan().await?,
            asides: self.scan().await?,
            runs: self.scan().await?,
            approvals: self.scan().await?,
            trashed: self.trash().await?.iter().filter_map(Trashed::sandbox).collect(),
        };
        let store = self.clone();
        blocking(move || {
            let mut report = everything.judge();
            store.judge_layers(&everything, &mut report)?;
            store.judge_memory(&everything, &mut report)?;
            for path in missing_parts(store.data_dir()) {
                report.problems.push(Problem::MissingPart { path });
            }
            for dir in list(&store.data_dir().join("sandboxes"))? {
                if ["sandbox.json", "sandbox.json.last"].iter().any(|name| dir.join(name).exists())
                {
                    continue;
                }
                // One that was being made when the power went may have left this.
                let begun = dir.join("sandbox.json.next").exists();
                report.problems.push(match has_lived(&dir, begun)? {
                    true => Problem::LostManifest { path: dir },
                    false => Problem::NotASandbox { path: dir },
                });
            }
            Ok(report)
        })
        .await
    }

    /// Moves a damaged file or directory out of the way, into `quarantine/`, and says where it is now.
    /// Nothing is ever deleted by this.
    ///
    /// # Errors
    ///
    /// Returns an error when it cannot be moved; it is then where it was.
    pub async fn quarantine(&self, path: &Path) -> Result<PathBuf> {
        let (store, path) = (self.clone(), path.to_owned());
        blocking(move || {
            let dir = store.data_dir().join("quarantine");
            fs::create_dir_all(&dir).map_err(io_error("create", &dir))?;
            let shown = path.strip_prefix(store.data_dir()).unwrap_or(&path);
            let flat = shown.to_string_lossy().replace('/', "+");
            let mut target = dir.join(&flat);
            let mut count = 1;
            while fs::symlink_metadata(&target).is_ok() {
                count += 1;
                target = dir.join(format!("{flat}.{count}"));
            }
            fs::rename(&path, &target).map_err(io_error("quarantine", &path))?;
            sync_parent(&target)?;
            sync_parent(&path)?;
            Ok(target)
        })
        .await
    }

    fn judge_layers(&self, everything: &Everything, report: &mut Report) -> Result<()> {
        let sealed: HashMap<&LayerId, &Layer> =
            everything.layers.good.iter().map(|layer| (&layer.id, layer)).collect();
        let written = |found: &'_ Sandbox| {
            let drives = found.mounted().iter().map(|mounted| &mounted.layer);
            found
                .open_layer()
                .into_iter()
                .chain(found.unsealed())
                .chain(drives)
                .cloned()
                .collect::<Vec<_>>()
        };
        let attached = everything.drives.good.iter().filter_map(|drive| drive.attached.as_ref());
        let mut open: HashSet<LayerId> =
            everything.sandboxes.good.iter().flat_map(written).collect();
        open.extend(attached.map(|attached| attached.layer.clone()));
        let mut needed = HashSet::new();
        for (holder, layers) in everything.holdings() {
            for layer in layers {
                needed.insert(layer);
                if !sealed.contains_key(layer) && !open.contains(layer) {
                    let needed_by = holder.clone();
                    let layer = layer.clone();
                    report.problems.push(Problem::MissingLayer { needed_by, layer });
                }
            }
        }
        for sandbox in &everything.sandboxes.good {
            // What a start that did not finish began may not have reached the disk.
            if !matches!(sandbox.phase(), Phase::Running | Phase::Stopping) {
                continue;
            }
            for layer in written(sandbox) {
                if !sealed.contains_key(&layer) && !self.layer_dir(&layer).is_dir() {
                    let needed_by = format!("{} {}", Sandbox::KIND, sandbox.id);
                    report.problems.push(Problem::MissingLayer { needed_by, layer });
                }
            }
        }
        let damaged: HashSet<&Path> =
            everything.layers.damaged.iter().map(|damaged| damaged.path.as_path()).collect();
        for dir in list(&self.layers_dir())? {
            let Ok(id) = id_of(&dir).parse::<LayerId>() else {
                report.problems.push(Problem::Stray { path: dir });
                continue;
            };
            match sealed.get(&id) {
                Some(_) if !dir.join("diff").is_dir() => {
                    report.problems.push(Problem::MissingFiles { layer: id });
                }
                Some(_) if needed.contains(&id) => {
                    let differences = match self.compare_summary(&id) {
                        Ok(differences) => differences.iter().map(ToString::to_string).collect(),
                        Err(error) => vec![error.to_string()],
                    };
                    for difference in differences {
                        let layer = id.clone();
                        report.problems.push(Problem::ChangedLayer { layer, difference });
                    }
                }
                Some(layer) if !needed.contains(&id) => {
                    let bytes = layer.bytes;
                    report.problems.push(Problem::UnheldLayer { layer: id, bytes });
                }
                None if !open.contains(&id) && !damaged.contains(&*dir.join("layer.json")) => {
                    report.problems.push(Problem::AbandonedLayer { layer: id });
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn judge_memory(&self, everything: &Everything, report: &mut Report) -> Result<()> {
        let sealed: HashMap<&MemoryId, &MemoryLayer> =
            everything.memory.good.iter().map(|layer| (&layer.id, layer)).collect();
        let mut needed = HashSet::new();
        for (holder, chain) in everything.memory_holdings() {
            for memory in chain {
                if !sealed.contains_key(memory) {
                    let (needed_by, memory) = (holder.clone(), memory.clone());
                    report.problems.push(Problem::MissingMemory { needed_by, memory });
                } else if needed.insert(memory) {
                    for reason in self.trouble_of(sealed[memory])? {
                        let memory = memory.clone();
                        report.problems.push(Problem::DamagedMemory { memory, reason });
                    }
                }
            }
        }
        // Templates are made again when they are needed: what is wrong with one is merely in the way.
        let good = everything.templates.good.iter();
        let (kept, stale): (Vec<_>, Vec<_>) =
            good.partition(|template| sealed.contains_key(&template.memory));
        needed.extend(kept.iter().map(|template| &template.memory));
        for template in stale {
            let path = self.data_dir().join(Template::place(&template.key));
            report.problems.push(Problem::Stray { path });
        }
        let damaged: HashSet<&Path> =
            everything.memory.damaged.iter().map(|damaged| damaged.path.as_path()).collect();
        for dir in list(&self.memories_dir())? {
            let Ok(id) = id_of(&dir).parse::<MemoryId>() else {
                report.problems.push(Problem::Stray { path: dir });
                continue;
            };
            match sealed.get(&id) {
                Some(layer) if !needed.contains(&id) => {
                    let bytes = layer.bytes;
                    report.problems.push(Problem::UnheldMemory { memory: id, bytes });
                }
                None if !damaged.contains(&*dir.join("memory.json")) => {
                    report.problems.push(Problem::AbandonedMemory { memory: id });
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Those that every version made.
const OLDEST: usize = 3;

/// The directories that a data directory should have and has not. One that was never opened has none
/// to miss.
#[must_use]
pub fn missing_parts(data: &Path) -> Vec<PathBuf> {
    let path = data.join("format.json");
    let format = fs::read(&path).ok().and_then(|bytes| check_format(&path, &bytes).ok());
    let expected = match format {
        None => return Vec::new(),
        // Earlier ones did not know all of them.
        Some(format) if format < ALL_PARTS => &PARTS[..OLDEST],
        Some(_) => &PARTS[..],
    };
    expected.iter().map(|part| data.join(part)).filter(|path| !path.is_dir()).collect()
}

/// Whether a file is what a power cut leaves of one that was not synced.
fn is_torn(path: &Path) -> bool {
    fs::read(path).is_ok_and(|bytes| bytes.is_empty() || bytes.contains(&0))
}

/// Whether there is evidence that a sandbox was acknowledged. One whose first manifest was `begun` and
/// not finished may have a session.
fn has_lived(dir: &Path, begun: bool) -> Result<bool> {
    let is_record = |path: &PathBuf| path.extension().is_some_and(|end| end == "json");
    if list(&dir.join("commands"))?.iter().any(is_record) {
        return Ok(true);
    }
    let sessions = list(&dir.join("sessions"))?;
    let ended = |path: &PathBuf| {
        let session = fs::read(path).ok().and_then(|bytes| parse::<Session>(path, &bytes).ok());
        session.is_some_and(|session| session.ended_at.is_some())
    };
    Ok(match begun {
        true => sessions.iter().any(ended),
        false => sessions.iter().any(is_record),
    })
}

/// All manifests.
struct Everything {
    projects: Scan<Project>,
    sandboxes: Scan<Sandbox>,
    sessions: Scan<Session>,
    commands: Scan<Command>,
    snapshots: Scan<Snapshot>,
    drives: Scan<Drive>,
    secrets: Scan<Secret>,
    images: Scan<Image>,
    layers: Scan<Layer>,
    memory: Scan<MemoryLayer>,
    templates: Scan<Template>,
    authorities: Scan<KeptAuthority>,
    asides: Scan<Quarantine>,
    runs: Scan<Run>,
    approvals: Scan<Approval>,
    /// Sandboxes in the trash.
    trashed: HashSet<SandboxId>,
}

impl Everything {
    fn judge(&self) -> Report {
        let mut report = Report {
            problems: Vec::new(),
            projects: self.projects.good.len(),
            sandboxes: self.sandboxes.good.len(),
            snapshots: self.snapshots.good.iter().filter(|s| s.deleted_at.is_none()).count(),
            drives: self.drives.good.len(),
            images: self.images.good.len(),
            layers: self.layers.good.len(),
            memory: self.memory.good.len(),
        };
        for Damaged { path, reason, too_new } in
            self.sessions.damaged.iter().chain(&self.commands.damaged).cloned()
        {
            report.problems.push(match too_new {
                true => Problem::TooNew { path },
                false if is_torn(&path) => Problem::TornRecord { path },
                false => Problem::DamagedManifest { path, reason },
            });
        }
        let damaged: [&[Damaged]; 12] = [
            &self.projects.damaged,
            &self.sandboxes.damaged,
            &self.authorities.damaged,
            &self.asides.damaged,
            &self.snapshots.damaged,
            &self.drives.damaged,
            &self.secrets.damaged,
            &self.images.damaged,
            &self.layers.damaged,
            &self.memory.damaged,
            &self.runs.damaged,
            &self.approvals.damaged,
        ];
        for Damaged { path, reason, too_new } in damaged.into_iter().flatten().cloned() {
            report.problems.push(match too_new {
                true => Problem::TooNew { path },
                false => Problem::DamagedManifest { path, reason },
            });
        }
        for Damaged { path, too_new, .. } in self.templates.damaged.iter().cloned() {
            report.problems.push(match too_new {
                true => Problem::TooNew { path },
                false => Problem::Stray { path },
            });
        }
        self.judge_projects(&mut report);
        self.judge_ages(&mut report);
        // A tombstone is known too: a sandbox that still names one is marked at the next start.
        let known: HashSet<&SnapshotId> =
            self.snapshots.good.iter().map(|snapshot| &snapshot.id).collect();
        for sandbox in &self.sandboxes.good {
            if let Some(snapshot) = sandbox.current.as_ref().filter(|id| !known.contains(id)) {
                let (sandbox, snapshot) = (sandbox.id.clone(), snapshot.clone());
                report.problems.push(Problem::MissingSnapshot { sandbox, snapshot });
            }
        }
        report
    }

    /// Things whose project has no manifest, not even a damaged one: that is a problem already.
    fn judge_projects(&self, report: &mut Report) {
        let damaged = self.projects.damaged.iter().map(|damaged| id_of(&damaged.path).to_owned());
        let mut known: HashSet<String> = damaged.collect();
        known.extend(self.projects.good.iter().map(|project| project.name.to_string()));
        let snapshots = self.snapshots.good.iter().filter(|found| found.deleted_at.is_none());
        let things = (self.sandboxes.good.iter())
            .map(|found| (&found.project, format!("{} {}", Sandbox::KIND, found.id)))
            .chain(
                snapshots.map(|found| (&found.project, format!("{} {}", Snapshot::KIND, found.id))),
            )
            .chain(
                self.drives
                    .good
                    .iter()
                    .map(|found| (&found.project, format!("{} {}", Drive::KIND, found.id))),
            )
            .chain(
                self.secrets
                    .good
                    .iter()
                    .map(|found| (&found.project, format!("{} {}", Secret::KIND, found.name))),
            );
        for (project, needed_by) in things {
            if known.insert(project.to_string()) {
                let project = project.clone();
                report.problems.push(Problem::MissingProject { project, needed_by });
            }
        }
    }

    /// Sandboxes that are older than their snapshots, or gone without them.
    fn judge_ages(&self, report: &mut Report) {
        let damaged = self.sandboxes.damaged.iter().filter_map(|damaged| damaged.path.parent());
        let damaged: HashSet<&str> = damaged.map(id_of).collect();
        let sandboxes: HashMap<&str, &Sandbox> =
            self.sandboxes.good.iter().map(|sandbox| (sandbox.id.as_str(), sandbox)).collect();
        // A snapshot that another sandbox stands on, or stood on, outlives its sandbox.
        let mut used: HashSet<&SnapshotId> = HashSet::new();
        for sandbox in &self.sandboxes.good {
            used.extend(&sandbox.current);
            used.extend(sandbox.forked_from.as_ref().and_then(|from| from.snapshot.as_ref()));
            used.extend(sandbox.merged.iter().map(|merge| &merge.snapshot));
        }
        for snapshot in &self.snapshots.good {
            used.extend(&snapshot.parent);
        }
        let mut newest: HashMap<&str, u64> = HashMap::new();
        let mut told = HashSet::new();
        for snapshot in &self.snapshots.good {
            let sandbox = snapshot.sandbox.as_str();
            let highest = newest.entry(sandbox).or_default();
            *highest = (*highest).max(snapshot.generation);
            // A snapshot that stays behind its deleted sandbox says so itself; earlier versions left more. When a power cut undoes
            // the deletion of a snapshot and not that of its sandbox, the sandbox is in the trash, and the next start deletes the
            // snapshot again.
            let gone = snapshot.format >= 5
                && snapshot.deleted_at.is_none()
                && !snapshot.outlives
                && snapshot.sandbox_deleted_at.is_none()
                && !used.contains(&snapshot.id)
                && !sandboxes.contains_key(sandbox)
                && !damaged.contains(sandbox)
                && !self.trashed.contains(&snapshot.sandbox);
            if gone && told.insert(sandbox) {
                let (sandbox, snapshot) = (snapshot.sandbox.clone(), snapshot.id.clone());
                report.problems.push(Problem::MissingSandbox { sandbox, snapshot });
            }
        }
        for sandbox in &self.sandboxes.good {
            // The snapshot is written first: one that was not reported to anybody yet may be ahead.
            let newest = newest.get(sandbox.id.as_str()).copied().unwrap_or(0);
            if newest > sandbox.generation + 1 {
                let (sandbox, generation) = (sandbox.id.clone(), sandbox.generation);
                report.problems.push(Problem::OldManifest { sandbox, generation, newest });
            }
        }
    }

    /// Who needs which layers.
    fn holdings(&self) -> Vec<(String, &[LayerId])> {
        let mut holdings: Vec<(String, &[LayerId])> = Vec::new();
        for snapshot in &self.snapshots.good {
            holdings.push((format!("{} {}", Snapshot::KIND, snapshot.id), &snapshot.layers));
        }
        for image in &self.images.good {
            holdings.push((format!("{} {}", Image::KIND, image.name), &image.layers));
        }
        for drive in &self.drives.good {
            holdings.push((format!("{} {}", Drive::KIND, drive.id), &drive.layers));
        }
        for sandbox in &self.sandboxes.good {
            let holder = format!("{} {}", Sandbox::KIND, sandbox.id);
            holdings.push((holder.clone(), &sandbox.image_layers));
            for mounted in sandbox.mounted() {
                holdings.push((holder.clone(), &mounted.chain));
            }
            holdings.push((holder, sandbox.open_chain()));
        }
        holdings
    }

    /// Who needs which memory layers; templates are another matter.
    fn memory_holdings(&self) -> Vec<(String, &[MemoryId])> {
        let snapshots =
            self.snapshots.good.iter().map(|snapshot| {
                (format!("{} {}", Snapshot::KIND, snapshot.id), &snapshot.memory[..])
            });
        let sandboxes =
            self.sandboxes.good.iter().map(|sandbox| {
                (format!("{} {}", Sandbox::KIND, sandbox.id), sandbox.open_memory())
            });
        snapshots.chain(sandboxes).collect()
    }
}
