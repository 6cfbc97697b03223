//! Where the histories of two sandboxes parted.
//!
//! Each sandbox knows which snapshot of which other one it was forked from, so it has a line of *places*: itself,
//! then its origin at that snapshot, then the origin's origin, and so on. The common ancestor of two sandboxes is
//! on the first sandbox that both lines have: the older of the two places. It is only an ancestor of both if
//! the sandbox was not rolled back to something else in between, which the parents of snapshots tell.
//!
//! After a merge the source remembers which of its snapshots it was. That is the common ancestor of the next
//! merge of the two, because the target has everything that the source had then.

use std::collections::BTreeMap;

use crate::engine::lifecycle::Lifecycle;
use crate::engine::{Error, Result};
use crate::model::{Sandbox, SandboxId, SnapshotId};

/// How many origins are followed, and how many parents of a snapshot.
const LONGEST: usize = 10_000;

/// A point on the line of a sandbox. `None`: its image.
type PlaceOn = (u64, Option<SnapshotId>);

/// What two sandboxes have in common.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::engine) enum Ancestor {
    Snapshot(SnapshotId),
    /// The image that both began with.
    Image,
}

impl Lifecycle {
    /// The state that both sandboxes come from.
    pub(in crate::engine) async fn common_ancestor(
        &self,
        source: &Sandbox,
        target: &Sandbox,
    ) -> Result<Ancestor> {
        let merged = source.merged.iter().find(|merge| merge.into == target.id);
        if let Some(merge) = merged {
            if self.db.snapshot(&merge.snapshot).await?.is_none() {
                return Err(Error::AncestorDeleted { snapshot: merge.snapshot.clone() });
            }
            return Ok(Ancestor::Snapshot(merge.snapshot.clone()));
        }
        let unrelated =
            || Error::Unrelated { from: source.name.clone(), into: target.name.clone() };
        let ours: BTreeMap<SandboxId, PlaceOn> = self.line(target).await?.into_iter().collect();
        for (on, theirs) in self.line(source).await? {
            let Some(our) = ours.get(&on) else { continue };
            let (older, newer) = if our.0 <= theirs.0 { (our, &theirs) } else { (&theirs, our) };
            let Some(base) = &older.1 else { return Ok(Ancestor::Image) };
            if self.db.snapshot(base).await?.is_none() {
                return Err(Error::AncestorDeleted { snapshot: base.clone() });
            }
            // A place without a snapshot is the image, which comes before every snapshot.
            let Some(newer) = &newer.1 else { return Ok(Ancestor::Image) };
            if !self.descends(newer, base).await? {
                return Err(unrelated());
            }
            return Ok(Ancestor::Snapshot(base.clone()));
        }
        Err(unrelated())
    }

    /// A sandbox as it is, and where each of its origins was left.
    async fn line(&self, sandbox: &Sandbox) -> Result<Vec<(SandboxId, PlaceOn)>> {
        let mut line = vec![(sandbox.id.clone(), (sandbox.generation, sandbox.current.clone()))];
        let mut from = sandbox.forked_from.clone();
        while let Some(origin) = from.take() {
            if line.len() > LONGEST || line.iter().any(|(id, _)| *id == origin.sandbox) {
                break;
            }
            line.push((origin.sandbox.clone(), (origin.generation, origin.snapshot)));
            let found = self.db.sandbox_by_id(&origin.sandbox).await?;
            from = found.and_then(|origin| origin.forked_from);
        }
        Ok(line)
    }

    /// Whether `base` is a snapshot or one of its ancestors.
    async fn descends(&self, snapshot: &SnapshotId, base: &SnapshotId) -> Result<bool> {
        let mut at = Some(snapshot.clone());
        for _ in 0..LONGEST {
            match at {
                None => return Ok(false),
                Some(id) if id == *base => return Ok(true),
                // Tombstones have parents too. One that is gone for good ends the search.
                Some(id) => at = self.db.snapshot_record(&id).await?.and_then(|one| one.parent),
            }
        }
        Ok(false)
    }
}
