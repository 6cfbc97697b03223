//! Findings of the guard: where they are, and how they are reported.

use super::inspection::GuardedPart;
use crate::model::{Finding, FindingKind, Timestamp};
use crate::store::Junk;
use crate::store::search::{Match, MatchKind, Needles};

/// A finding, its place and the report about it.
pub(in crate::engine::snapshots) struct Spotted {
    pub(super) part: usize,
    pub(super) path: Vec<u8>,
    pub(super) changed: Timestamp,
    pub(super) maskable: bool,
    pub(super) told: Finding,
}

impl Spotted {
    /// Whether it can be kept aside: all but the root of a layer.
    pub(super) fn can_leave(&self) -> bool {
        self.told.kind == FindingKind::Secret && !self.path.is_empty()
    }

    /// The path in the sandbox, without a leading slash.
    pub(super) fn full_path(&self, parts: &[GuardedPart]) -> Vec<u8> {
        let prefix = &parts[self.part].prefix;
        if prefix.is_empty() { self.path.clone() } else { [prefix, &self.path[..]].join(&b'/') }
    }
}

pub(super) fn spot(at: usize, part: &GuardedPart, needles: &Needles, find: Match) -> Spotted {
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

/// The report about junk in a sandbox's own root.
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
