//! Handles failed syncs: which files are in doubt, and what is refused because of it.
//!
//! The store knows which files a failed sync put in doubt (`store/sync.rs`). Here
//!
//! - a stop, a pause, a checkpoint or a fork that would keep such files is refused before it touches the session, which
//!   continues: files can be copied out, replaced or removed, and then it is not refused any more;
//! - a session that ends all the same (it crashed, its time was up) leaves its layer open and the sandbox
//!   `failed`; the same refusal is what its next start and stop answer;
//! - a stop with [`Decision::accept_doubtful`](crate::model::Decision) keeps them as they can be
//!   read, and the snapshot says so in its findings;
//! - the register of damage has an entry for every layer that is in doubt, until it is sealed, given up, or has
//!   no such file any more.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::db::{Filter, Page};
use crate::engine::Result;
use crate::engine::context::damage::DamageKind;
use crate::engine::error::error_chain;
use crate::engine::integrity::FailedSyncs;
use crate::model::{Finding, FindingKind, LayerId, MountMode, Sandbox};
use crate::store::{DoubtfulFile, StoreError};

/// How many files are on record as findings.
const TOLD: usize = 100;
/// What the entry about syncs is about.
const SUBJECT: &str = "the data directory";

/// What was reported so far.
#[derive(Debug, Default)]
pub(in crate::engine) struct Reported {
    failures: AtomicU64,
}

/// A layer that would be sealed if the session ended now, and where the sandbox has it.
struct Written<'a> {
    layer: &'a LayerId,
    prefix: &'a str,
}

fn written(sandbox: &Sandbox, root: bool, drives: bool) -> Vec<Written<'_>> {
    let own = sandbox.unsealed().into_iter().chain(sandbox.open_layer()).filter(|_| root);
    let mounted = sandbox.mounted().iter().filter(|one| drives && one.mode == MountMode::ReadWrite);
    own.map(|layer| Written { layer, prefix: "" })
        .chain(mounted.map(|one| Written { layer: &one.layer, prefix: &one.path }))
        .collect()
}

impl FailedSyncs {
    /// Refuses to keep what a session wrote while some of it may be lost: its root if that is kept, and its drives if they are.
    pub(in crate::engine) async fn refuse_doubt(
        &self,
        sandbox: &Sandbox,
        root: bool,
        drives: bool,
    ) -> Result<()> {
        for one in written(sandbox, root, drives) {
            self.store.refuse_doubt(one.layer).await?;
        }
        Ok(())
    }

    /// Accepts what is in doubt by now, and returns the note about it for the snapshot.
    pub(in crate::engine) async fn accept_doubt(
        &self,
        sandbox: &Sandbox,
        keep: bool,
    ) -> Result<Vec<Finding>> {
        let mut findings = Vec::new();
        for one in written(sandbox, keep, true) {
            let files = self.store.doubtful(one.layer).await?;
            if files.is_empty() {
                continue;
            }
            tracing::warn!(sandbox = %sandbox.name, layer = %one.layer, files = files.len(), "files that a failed sync may have lost were accepted as they are");
            self.store.accept_doubt(one.layer);
            let on_disk = self.store.has_disk(one.layer)?;
            findings.extend(files.iter().map(|file| finding(file, one.prefix, on_disk)));
        }
        findings.truncate(TOLD);
        Ok(findings)
    }

    /// Refuses what was captured when a sync failed since `failures` were counted.
    pub(in crate::engine) async fn refuse_capture_in_doubt(
        &self,
        sandbox: &Sandbox,
        failures: u64,
    ) -> Result<()> {
        self.store.sync().await?;
        match sandbox.open_layer() {
            Some(open) if self.store.sync_failures() != failures => {
                Err(StoreError::InDoubt { id: open.clone(), files: Vec::new(), total: 0 }.into())
            }
            _ => Ok(()),
        }
    }

    /// Writes dirty data back, so that a stop has little left to do, and notices early when that fails.
    pub(in crate::engine) async fn write_back(&self) {
        if self.turns.all_live().is_empty()
            && !self.store.has_unsynced()
            && !self.references.has_unnamed()
        {
            return;
        }
        if let Err(error) = self.references.sync_and_discard().await {
            let told = "what was written lately may be lost; stops and checkpoints of sandboxes that wrote are refused until it is decided \
                        what becomes of that (`keep stop --accept-doubtful`, `--discard`); see the disk and the kernel's log";
            self.context.report_damage(DamageKind::SyncFailed, SUBJECT, error_chain(&error), told);
        }
        let failures = self.store.sync_failures();
        if self.reported.failures.swap(failures, Ordering::SeqCst) != failures {
            self.review_doubt().await;
        }
    }

    /// Brings the register of damage up to date.
    pub(in crate::engine) async fn review_doubt(&self) {
        let known = self.context.damage.subjects(DamageKind::LayerInDoubt);
        let failed = !self.context.damage.subjects(DamageKind::SyncFailed).is_empty();
        if self.store.sync_failures() == 0 && known.is_empty() && !failed {
            return;
        }
        match self.layers_in_doubt().await {
            Ok(now) => {
                for gone in known.difference(&now) {
                    self.context.clear_damage(DamageKind::LayerInDoubt, gone);
                }
                if now.is_empty() && failed && self.store.sync().await.is_ok() {
                    self.context.clear_damage(DamageKind::SyncFailed, SUBJECT);
                }
            }
            Err(error) => {
                tracing::error!(
                    error = error_chain(&error),
                    "cannot tell which layers a failed sync affects"
                );
            }
        }
    }

    async fn layers_in_doubt(&self) -> Result<BTreeSet<String>> {
        let mut subjects = BTreeSet::new();
        for sandbox in self.db.sandboxes(None, &Filter::default(), &Page::all()).await?.items {
            for one in written(&sandbox, true, true) {
                let files = self.store.doubtful(one.layer).await;
                // Sealed meanwhile, or gone.
                let Ok(files) = files else { continue };
                let Some(first) = files.first() else { continue };
                let subject = format!("layers/{}", one.layer);
                let on_disk = self.store.has_disk(one.layer)?;
                let detail = format!(
                    "{} files that sandbox `{}` of project `{}` wrote may be lost: {}{}",
                    files.len(),
                    sandbox.name,
                    sandbox.project,
                    finding(first, one.prefix, on_disk).path,
                    if files.len() > 1 { ", ..." } else { "" },
                );
                let told = format!(
                    "it is not sealed: replace or remove the files, or decide with `keep stop {0} --accept-doubtful` or `keep stop {0} --discard`",
                    sandbox.name
                );
                self.context.report_damage(DamageKind::LayerInDoubt, subject.clone(), detail, told);
                subjects.insert(subject);
            }
        }
        Ok(subjects)
    }
}

fn finding(file: &DoubtfulFile, prefix: &str, on_disk: bool) -> Finding {
    let name = String::from_utf8_lossy(&file.path);
    let name: String = name.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
    let path = match on_disk {
        true => format!("(disk of the machine: {name})"),
        false => format!("{}/{name}", prefix.trim_end_matches('/')),
    };
    Finding {
        kind: FindingKind::Doubtful,
        path,
        size: file.size,
        secret: None,
        place: None,
        encoding: None,
        offset: None,
        detail: Some("the disk failed while it was written".to_owned()),
        commands: Vec::new(),
    }
}
