//! One inspection: what is searched for, and in which layers.

use std::sync::Arc;

use super::GuardScan;
use super::spotted::{Spotted, junk_finding, spot};
use crate::engine::Result;
use crate::engine::snapshots::SealGuard;
use crate::failpoint;
use crate::model::{
    Because, Command, DriveId, FindingKind, LayerId, MountMode, Mounted, OnJunk, OnSecret, Sandbox,
    Session, Suspect,
};
use crate::store::search::{Needles, SearchedFiles, Writers};
use crate::store::{Effort, Globs, JunkRules};

/// How far files' times may be behind those of commands, in milliseconds: twice the slowest kernel tick.
const TICK: i64 = 20;

/// A layer that is to be sealed.
pub(in crate::engine::snapshots) struct GuardedPart {
    pub(super) layer: LayerId,
    pub(super) chain: Vec<LayerId>,
    /// Where the sandbox has it, without a leading slash.
    pub(super) prefix: Vec<u8>,
    pub(super) drive: Option<DriveId>,
}

impl GuardedPart {
    /// A layer that is sealed already.
    pub(in crate::engine::snapshots) fn of_layer(layer: &LayerId) -> Self {
        Self { layer: layer.clone(), chain: Vec::new(), prefix: Vec::new(), drive: None }
    }

    pub(super) fn of_drive(mounted: &Mounted) -> Self {
        Self {
            layer: mounted.layer.clone(),
            chain: mounted.chain.clone(),
            prefix: mounted.path.trim_matches('/').as_bytes().to_vec(),
            drive: Some(mounted.drive.clone()),
        }
    }
}

/// What to look for, and for whom.
pub(in crate::engine::snapshots) struct Inspection<'a> {
    pub(in crate::engine::snapshots) sandbox: &'a Sandbox,
    pub(in crate::engine::snapshots) session: Option<Session>,
    /// What the session was given; `None` when it was given nothing.
    pub(in crate::engine::snapshots) needles: Option<Arc<Needles>>,
    pub(in crate::engine::snapshots) keep: bool,
}

impl Inspection<'_> {
    /// Whether the guard has anything to do before a layer is sealed.
    pub(super) fn is_needed(&self) -> bool {
        let by_hand = self.sandbox.config.guard.junk == OnJunk::PromoteOrDrop;
        self.needles.is_some() || by_hand || !self.sandbox.decision().drop.is_empty()
    }

    /// The layers that would be sealed if the session ended now.
    pub(super) fn parts(&self) -> Vec<GuardedPart> {
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

    pub(in crate::engine::snapshots) async fn search(
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
                    // Nothing was written to it, and an earlier attempt removed it.
                    Err(error) if error.is_not_found() && part.drive.is_some() => continue,
                    searched => searched?,
                };
            looked.seen.insert(part.layer.clone(), searched.seen);
            spotted.extend(searched.finds.into_iter().map(|find| spot(at, part, needles, find)));
        }
        Ok(spotted)
    }

    /// Masks what can be masked.
    pub(super) async fn mask(&self, this: &SealGuard, parts: &[GuardedPart]) -> Result<()> {
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
    pub(in crate::engine::snapshots) async fn junk(
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

    /// What must be decided first, and what is only reported.
    pub(in crate::engine::snapshots) fn split(
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
    pub(super) fn suspects(&self, commands: &[Command], one: &Spotted) -> Vec<Suspect> {
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
