//! Assigns uid ranges: each machine has one of its own, across all daemons of the host.
//!
//! Ranges are given out by this daemon alone, from blocks that it has claimed ([`crate::driver::uids`]). The lowest free range goes first,
//! so that few blocks are claimed.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::path::Path;

use parking_lot::Mutex;

use crate::driver::DriverError;
use crate::driver::{CLAIMS_DIR, UidClaims};
use crate::engine::error::error_chain;
use crate::engine::machine::Machines;
use crate::engine::{Error, Result};
use crate::model::{Sandbox, UidRange};

/// How many ids a sandbox gets.
pub(in crate::engine) const IDS: u32 = 65_536;
/// How many ranges are claimed at once.
const TOGETHER: u32 = 16;

/// The ranges of a daemon.
#[derive(Debug)]
pub(in crate::engine) struct Uids {
    /// The first id.
    base: u32,
    /// How many ranges there are.
    ranges: u32,
    /// Which are taken, by number.
    taken: Mutex<BTreeSet<u32>>,
    claims: UidClaims,
}

impl Uids {
    pub(in crate::engine) fn new(place: &Path, data_dir: &Path, base: u32, ranges: u32) -> Self {
        let claims = UidClaims::at(place, data_dir, IDS * TOGETHER);
        // What stays is only in the way of somebody who looks for what is in use.
        if let Err(error) = claims.remove_ended() {
            tracing::debug!(error = error_chain(&error), "claims of ended daemons stay");
        }
        Self { base, ranges, taken: Mutex::default(), claims }
    }

    fn ids(&self, number: u32) -> Range<u32> {
        let start = self.base.saturating_add(number.saturating_mul(IDS));
        start..start.saturating_add(IDS)
    }

    /// The numbers of the ranges that are wholly in a block.
    fn numbers(&self, block: &Range<u32>) -> Range<u32> {
        let first = block.start.saturating_sub(self.base).div_ceil(IDS);
        let end = block.end.saturating_sub(self.base) / IDS;
        first.min(self.ranges)..end.min(self.ranges)
    }

    fn take(&self) -> Result<UidRange> {
        let mut taken = self.taken.lock();
        let number = match self.among_ours(&taken) {
            Some(number) => number,
            None => self.claim_another(&taken)?,
        };
        taken.insert(number);
        Ok(UidRange { base: self.ids(number).start, count: IDS })
    }

    fn among_ours(&self, taken: &BTreeSet<u32>) -> Option<u32> {
        let ours = self.claims.ours();
        let mut numbers = ours.iter().flat_map(|block| self.numbers(block));
        numbers.find(|number| !taken.contains(number) && self.claims.has(&self.ids(*number)))
    }

    fn claim_another(&self, taken: &BTreeSet<u32>) -> Result<u32> {
        let mut refused = None;
        for number in (0..self.ranges).filter(|number| !taken.contains(number)) {
            let ids = self.ids(number);
            let block = ids.start / (IDS * TOGETHER);
            if refused == Some(block) {
                continue;
            }
            if self.claims.claim(&ids).map_err(failed)? {
                return Ok(number);
            }
            refused = Some(block);
        }
        Err(Error::NoUids)
    }

    fn number(&self, range: UidRange) -> u32 {
        range.base.wrapping_sub(self.base) / IDS
    }
}

fn failed(source: io::Error) -> Error {
    let action = "claim user ids in";
    Error::Driver(DriverError::Io { action, path: CLAIMS_DIR.into(), source })
}

impl Machines {
    /// Takes a range that no other machine on this host has.
    pub(in crate::engine) fn take_uids(&self) -> Result<UidRange> {
        self.uids.take()
    }

    pub(in crate::engine) fn release_uids(&self, range: Option<UidRange>) {
        if let Some(range) = range {
            self.uids.taken.lock().remove(&self.uids.number(range));
        }
    }

    /// Marks the range of a sandbox that an earlier daemon left, with a machine that is alive or without. Another daemon may have taken
    /// it meanwhile if nothing ran in it: then the sandbox gets another.
    pub(in crate::engine) fn adopt_uids(&self, sandbox: &mut Sandbox, alive: bool) {
        let Some(range) = sandbox.uids() else { return };
        self.uids.taken.lock().insert(self.uids.number(range));
        let ids = range.base..range.base.saturating_add(range.count);
        // What runs there is the proof that they are ours, under whatever name the data directory had.
        let claims = &self.uids.claims;
        let claimed = if alive { claims.reclaim(&ids) } else { claims.claim(&ids) };
        match claimed {
            Ok(true) => {}
            Ok(false) if alive => {
                tracing::error!(sandbox = %sandbox.name, "another daemon uses the uids of its machine; restart the sandbox");
            }
            Ok(false) => match self.take_uids() {
                Ok(uids) => {
                    sandbox.replace_uids(Some(uids));
                    self.release_uids(Some(range));
                }
                Err(error) => {
                    tracing::error!(sandbox = %sandbox.name, error = error_chain(&error), "another daemon took the uids of a sandbox, and it got no others");
                }
            },
            Err(error) => {
                let error = failed(error);
                tracing::error!(sandbox = %sandbox.name, error = error_chain(&error), "the uids of a sandbox could not be claimed; another daemon may use them");
            }
        }
    }
}

impl Sandbox {
    /// Gives its open session another range, and answers with the one it had.
    pub(in crate::engine) fn replace_uids(&mut self, uids: Option<UidRange>) -> Option<UidRange> {
        self.open_session_mut().and_then(|open| std::mem::replace(&mut open.uids, uids))
    }
}

#[cfg(test)]
mod tests {
    use super::{IDS, Uids};
    use crate::engine::Error;

    #[test]
    fn two_daemons_never_give_out_the_same_range() {
        let [place, a, b] = [(); 3].map(|()| tempfile::tempdir().expect("a directory"));
        let base = 0x4000_0000;
        let daemon = |data: &tempfile::TempDir| Uids::new(place.path(), data.path(), base, 31);
        let (one, two) = (daemon(&a), daemon(&b));
        let mut given = std::collections::BTreeSet::new();
        for count in 0..15 {
            for (of, uids) in [("one", &one), ("two", &two)] {
                let range = uids.take().expect("there are enough");
                assert!(given.insert(range.base), "{of} was given {range:?}, the {count}th, again");
                assert_eq!((range.base - base) % IDS, 0);
            }
        }
        assert_eq!(one.claims.ours().len(), 1, "no more than it takes");
        one.take().expect("the last of its block");
        assert!(matches!(one.take(), Err(Error::NoUids)), "the other block is the other's");
        drop(two);
        one.take().expect("there is room when the other has ended");
    }
}
