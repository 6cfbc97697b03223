//! What changed in the root since the last look.
//!
//! The host cannot read a machine's disk, so the machine says itself what its commands changed. What it says is for people: a
//! machine that was taken over can say anything, about itself alone.

use std::os::fd::AsFd as _;
use std::sync::Mutex;

use sandkeep_proto::link::{Failure, Looked, LookedPath};
use sandkeep_upper::{ChangeKind, Index, Limits, Lower, path_text};

use super::{Part, Whole, locked};
use crate::serve::RequestError;

/// How many names are looked at. An index of more takes too much of the machine's memory.
const MOST_NAMES: u64 = 250_000;
/// How many paths are listed.
const MOST_LISTED: usize = 1_000;
/// How much text they take.
const MOST_TEXT: usize = 512 << 10;

/// What is remembered from look to look.
#[derive(Debug, Default)]
pub(super) struct Looks(Mutex<Remembered>);

#[derive(Debug, Default)]
struct Remembered {
    /// Absent if it is not known.
    index: Option<Index>,
    saved: Option<Index>,
}

impl Looks {
    /// The root was assembled: what is in its upper directory was there before the first command.
    pub(super) fn begin(&self, parts: &[Part]) {
        let upper = parts.first().and_then(|part| part.upper.as_ref());
        let is_empty = |mut dir: rustix::fs::Dir| {
            dir.all(|entry| {
                entry.is_ok_and(|entry| matches!(entry.file_name().to_bytes(), b"." | b".."))
            })
        };
        if upper.is_some_and(|upper| rustix::fs::Dir::read_from(upper).is_ok_and(is_empty)) {
            let mut remembered = locked(&self.0);
            remembered.index = Some(Index::default());
            remembered.saved = Some(Index::default());
        }
    }
}

/// Looks at the root, and returns what changed.
pub(super) fn look(whole: &Whole, saved: bool) -> Result<Looked, RequestError> {
    let problem = |error: rustix::io::Errno| {
        RequestError::new(Failure::Fault, format!("could not look at the changes: {error}"))
    };
    let root = whole.parts.first().filter(|root| root.upper.is_some());
    let Some((root, upper)) = root.and_then(|root| Some((root, root.upper.as_ref()?))) else {
        return Err(RequestError::new(Failure::NotFound, "nothing can be written to the root"));
    };
    let lower = root.lower.iter().map(std::os::fd::OwnedFd::try_clone);
    let lower = lower.collect::<Result<_, _>>().map_err(|error| {
        RequestError::new(Failure::Fault, format!("could not look at the changes: {error}"))
    })?;
    let mut remembered = locked(&whole.looks.0);
    let known = remembered.index.is_some();
    let before = remembered.index.take().unwrap_or_default();
    let limits = Limits { names: MOST_NAMES, go_on: &|| true };
    let found =
        sandkeep_upper::look(upper.as_fd(), &Lower::new(lower), &before, &limits, &mut |_| {});
    let Some(mut found) = found.map_err(problem)? else {
        return Err(RequestError::new(Failure::Fault, "the look was ended"));
    };
    if saved {
        remembered.saved.clone_from(&found.index);
    }
    let unsaved = found.index.as_ref().zip(remembered.saved.as_ref());
    let unsaved = unsaved.map(|(index, saved)| index.difference(saved));
    remembered.index = found.index;
    found.changes.list.truncate_to(MOST_LISTED, MOST_TEXT);
    let (changes, mut room) = (&found.changes, MOST_TEXT);
    let mut looked = Looked {
        known,
        complete: found.complete,
        counts: [changes.created, changes.modified, changes.deleted],
        bytes: changes.bytes,
        unsaved,
        ..Looked::default()
    };
    let mut rest = [0; 3];
    for one in &changes.list.paths {
        let (path, change) = (path_text(&one.path), number(one.kind));
        if path.len() > room {
            rest[usize::from(change)] += 1;
            continue;
        }
        room -= path.len();
        looked.paths.push(LookedPath { path, change, dir: one.dir, bytes: one.bytes });
    }
    for one in &changes.list.more {
        let path = path_text(&one.path);
        let counts = [one.created, one.modified, one.deleted];
        if path.len() > room {
            rest.iter_mut().zip(counts).for_each(|(rest, count)| *rest += count);
            continue;
        }
        room -= path.len();
        looked.more.push((path, counts));
    }
    if rest != [0; 3] {
        looked.more.push((String::new(), rest));
    }
    Ok(looked)
}

fn number(kind: ChangeKind) -> u8 {
    match kind {
        ChangeKind::Created => 0,
        ChangeKind::Modified => 1,
        ChangeKind::Deleted => 2,
    }
}
