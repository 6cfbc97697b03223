//! Which of the approvals that are over are kept.
//!
//! A project keeps so many. Every sandbox has the same share of them, so one that asks without end pushes out its own, and no
//! answers that others rely on. Within a sandbox, answers that still decide something are kept before those that decided one
//! request, and newer before older ones.

use std::collections::{BTreeMap, HashMap};

use super::{Approvals, Entry};
use crate::model::{Approval, Name, SandboxId};

/// How many that were answered are kept in a project.
const KEPT: usize = 10_000;
/// And how much their documents may take.
const KEPT_BYTES: u64 = 64 << 20;

/// What counts of an approval.
#[derive(Debug, Clone, Copy)]
struct OverApproval<'a> {
    sandbox: &'a SandboxId,
    /// Whether its answer decides later requests.
    remembered: bool,
    bytes: u64,
}

impl Approvals {
    /// Those that are over and not kept.
    pub(super) fn surplus(&self) -> Vec<Approval> {
        let table = self.table.read();
        if table.len() <= KEPT && self.decided.bytes() <= KEPT_BYTES {
            return Vec::new();
        }
        let mut ended: BTreeMap<&Name, Vec<&Entry>> = BTreeMap::new();
        for entry in table.values().filter(|one| !one.approval.is_pending()) {
            ended.entry(&entry.approval.project).or_default().push(entry);
        }
        let surplus = |all: Vec<&Entry>| {
            let weighed: Vec<OverApproval<'_>> = all.iter().map(|entry| weigh(entry)).collect();
            let beyond = beyond_shares(&weighed, KEPT, KEPT_BYTES);
            beyond.into_iter().map(|at| all[at].approval.clone()).collect::<Vec<_>>()
        };
        ended.into_values().flat_map(surplus).collect()
    }
}

fn weigh(entry: &Entry) -> OverApproval<'_> {
    let remembered = entry.approval.target.is_some() && entry.approval.answer().is_some();
    OverApproval { sandbox: &entry.approval.sandbox.id, remembered, bytes: entry.size.bytes }
}

/// Which of these, the oldest first, are more than are kept.
fn beyond_shares(all: &[OverApproval<'_>], most: usize, most_bytes: u64) -> Vec<usize> {
    // The place of each in its sandbox.
    let mut taken: HashMap<&SandboxId, usize> = HashMap::new();
    let mut places = Vec::with_capacity(all.len());
    for remembered in [true, false] {
        let here = all.iter().enumerate().rev().filter(|(_, one)| one.remembered == remembered);
        for (at, one) in here {
            let place = taken.entry(one.sandbox).or_default();
            places.push((*place, std::cmp::Reverse(at)));
            *place += 1;
        }
    }
    places.sort_unstable();
    let (mut kept, mut bytes) = (0, 0);
    for (_, std::cmp::Reverse(at)) in &places {
        bytes += all[*at].bytes;
        if kept == most || bytes > most_bytes {
            break;
        }
        kept += 1;
    }
    places.split_off(kept).into_iter().map(|(_, std::cmp::Reverse(at))| at).collect()
}

#[cfg(test)]
mod tests {
    use super::{OverApproval, beyond_shares};
    use crate::model::SandboxId;

    fn sorted(mut all: Vec<usize>) -> Vec<usize> {
        all.sort_unstable();
        all
    }

    #[test]
    fn a_sandbox_that_asks_without_end_pushes_out_its_own() {
        let (noisy, quiet) = (SandboxId::fresh(), SandboxId::fresh());
        let of = |sandbox, remembered| OverApproval { sandbox, remembered, bytes: 1 };
        // Two of the quiet one, long ago, then many of the other.
        let mut all = vec![of(&quiet, true), of(&quiet, false)];
        all.extend((0..8).map(|_| of(&noisy, true)));
        assert_eq!(sorted(beyond_shares(&all, 5, 100)), [2, 3, 4, 5, 6]);
        assert_eq!(sorted(beyond_shares(&all, 10, 100)), [] as [usize; 0]);
        assert_eq!(sorted(beyond_shares(&all, 10, 5)), [2, 3, 4, 5, 6], "by bytes, too");
        assert_eq!(beyond_shares(&all, 0, 100).len(), 10);
    }

    #[test]
    fn answers_that_still_decide_something_stay_longer() {
        let one = SandboxId::fresh();
        let of = |remembered| OverApproval { sandbox: &one, remembered, bytes: 1 };
        let all = [of(true), of(false), of(true), of(false), of(false)];
        assert_eq!(sorted(beyond_shares(&all, 3, 100)), [1, 3]);
        assert_eq!(sorted(beyond_shares(&all, 1, 100)), [0, 1, 3, 4]);
    }
}
