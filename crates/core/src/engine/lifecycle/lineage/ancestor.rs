//! Finds the common ancestor of two sandboxes.
//!
//! What a sandbox is comes from a line of snapshots: its current one, the parent of that, and so on, into the origin it was
//! forked from. A rollback makes another line. What both lines have is a common ancestor. A merge makes one, too: its result
//! has all that the source's snapshot had. So it is one for the next merge of the two, in either direction, as long as
//! both still come from it. Of several, the latest is taken.
//!
//! Tombstones go after a while, and the line ends there although there was more. Then each sandbox's record says whether it
//! was rolled back since, and of which snapshot of which other one it was forked: from that comes a line of *places*, itself,
//! then its origin at that snapshot, then the origin's origin. The common ancestor is on the first sandbox that both lines
//! have: the older of the two places.

use std::collections::{BTreeMap, HashMap};

use crate::engine::lifecycle::Lifecycle;
use crate::engine::{Error, Result};
use crate::model::{MergePoint, MergeSource, Sandbox, SandboxId, SnapshotId, Timestamp};

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

/// The snapshots that a sandbox comes from.
#[derive(Debug, Default)]
struct History {
    /// Each with when it was made, the latest first.
    snapshots: Vec<(SnapshotId, Timestamp)>,
    places: HashMap<SnapshotId, usize>,
    /// Merges on the way, each with when it was.
    merges: Vec<(MergeSource, Timestamp)>,
    /// Whether there was more, whose records are gone.
    is_cut: bool,
    /// When the sandbox was last rolled back.
    rolled_back_at: Option<u64>,
}

impl History {
    fn has(&self, snapshot: &SnapshotId) -> bool {
        self.places.contains_key(snapshot)
    }

    /// Whether the sandbox comes from what it was at a generation, as far as that is known.
    fn comes_from(&self, snapshot: &SnapshotId, generation: u64) -> bool {
        let not_since = self.rolled_back_at.is_none_or(|at| at <= generation);
        self.has(snapshot) || self.is_cut && not_since
    }
}

impl Lifecycle {
    /// The state that both sandboxes come from.
    pub(in crate::engine) async fn common_ancestor(
        &self,
        source: &Sandbox,
        target: &Sandbox,
    ) -> Result<Ancestor> {
        let (theirs, ours) = (self.history(source).await?, self.history(target).await?);
        let mut found: Vec<(Timestamp, SnapshotId)> = Vec::new();
        found.extend(self.merges_of(source, target, &theirs, &ours).await?);
        found.extend(self.merges_of(target, source, &ours, &theirs).await?);
        let both = theirs.snapshots.iter().find(|(id, _)| ours.has(id));
        found.extend(both.map(|(id, at)| (*at, id.clone())));
        let latest = found.into_iter().max_by_key(|(at, _)| *at);
        if let Some((_, snapshot)) = latest {
            return self.snapshot_ancestor(snapshot).await;
        }
        self.ancestor_by_places(source, target).await
    }

    async fn snapshot_ancestor(&self, id: SnapshotId) -> Result<Ancestor> {
        match self.db.snapshot(&id).await? {
            Some(_) => Ok(Ancestor::Snapshot(id)),
            None => Err(Error::AncestorDeleted { snapshot: id }),
        }
    }

    /// Merges of one sandbox into another one that both still come from: snapshots of the one, and when they were merged.
    async fn merges_of(
        &self,
        from: &Sandbox,
        into: &Sandbox,
        from_history: &History,
        into_history: &History,
    ) -> Result<Vec<(Timestamp, SnapshotId)>> {
        let mut found = Vec::new();
        for (merge, at) in &into_history.merges {
            if merge.sandbox == from.id && from_history.has(&merge.snapshot) {
                found.push((*at, merge.snapshot.clone()));
            }
        }
        for MergePoint { snapshot, result, generation, at, .. } in
            from.merged.iter().filter(|merge| merge.into == into.id)
        {
            let Some(result) = result else { continue };
            let record = self.db.snapshot_record(snapshot).await?;
            let made_at = record.map_or(0, |record| record.generation);
            if into_history.comes_from(result, *generation)
                && from_history.comes_from(snapshot, made_at)
            {
                found.push((*at, snapshot.clone()));
            }
        }
        Ok(found)
    }

    async fn history(&self, sandbox: &Sandbox) -> Result<History> {
        let rolled_back_at = sandbox.rolled_back_at;
        let mut history = History { rolled_back_at, ..History::default() };
        let mut next = sandbox.current.clone().or_else(|| sandbox.missing.clone());
        while let Some(id) = next.take() {
            let length = history.snapshots.len();
            if length >= LONGEST || history.has(&id) {
                history.is_cut = true;
                break;
            }
            let Some(record) = self.db.snapshot_record(&id).await? else {
                history.is_cut = true;
                break;
            };
            history.places.insert(id.clone(), length);
            history.merges.extend(record.merged.map(|merge| (merge, record.created_at)));
            history.snapshots.push((id, record.created_at));
            next = record.parent;
        }
        Ok(history)
    }

    /// The same by where each was forked from.
    async fn ancestor_by_places(&self, source: &Sandbox, target: &Sandbox) -> Result<Ancestor> {
        let unrelated =
            || Error::Unrelated { from: source.name.clone(), into: target.name.clone() };
        let ours: BTreeMap<SandboxId, PlaceOn> = self.line(target).await?.into_iter().collect();
        for (on, theirs) in self.line(source).await? {
            let Some(our) = ours.get(&on) else { continue };
            let (older, newer) = if our.0 <= theirs.0 { (our, &theirs) } else { (&theirs, our) };
            // A place without a snapshot is the image, which comes before every snapshot.
            let (Some(base), Some(newer)) = (&older.1, &newer.1) else {
                return Ok(Ancestor::Image);
            };
            if !self.may_descend(newer, base).await? {
                return Err(unrelated());
            }
            return self.snapshot_ancestor(base.clone()).await;
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

    /// Whether `base` is a snapshot or one of its ancestors. Where records are gone it may be: what changed on either side since
    /// is merged or a conflict then, and nothing is lost.
    async fn may_descend(&self, snapshot: &SnapshotId, base: &SnapshotId) -> Result<bool> {
        let mut at = snapshot.clone();
        for _ in 0..LONGEST {
            if at == *base {
                return Ok(true);
            }
            let Some(record) = self.db.snapshot_record(&at).await? else { return Ok(true) };
            let Some(parent) = record.parent else { return Ok(false) };
            at = parent;
        }
        Ok(true)
    }
}
