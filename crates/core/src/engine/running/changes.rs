//! Attributes changed files of a running sandbox to the commands that may have changed them.
//!
//! The upper directory is compared with an index of its names whenever a command has ended (a *look*,
//! `session/changes.rs`). What changed since the look before belongs to the commands that were alive
//! in between. If that was one command, and nothing else can have written, the record is exact.
//! Otherwise the changes are attributed to each of them, and their records name each other.
//!
//! This file is the bookkeeping: no files are touched here.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sandkeep_upper::{Changes, Index};
use tokio::sync::watch;

use crate::model::{CommandChanges, CommandId, LayerId, SessionChanges, Timestamp, now};

/// How many other commands a record names.
const MOST_NAMED: usize = 16;
/// How many paths a record lists.
pub(in crate::engine) const MOST_LISTED: usize = 1_000;
/// How long these paths are together.
pub(in crate::engine) const MOST_TEXT: usize = 512 << 10;
/// How many results wait to be fetched by the trackers of their commands, and how long their paths are together.
const MOST_RESULTS: usize = 1_024;
const MOST_RESULTS_TEXT: usize = 16 << 20;
/// A look is followed by a rest of this many times its duration, so that looks take at most a fifth
/// of one CPU.
const REST: u32 = 4;
/// How many layers that were exchanged wait for their last look.
const MOST_EARLIER: usize = 16;
/// Shorter looks need no rest.
const SHORT: Duration = Duration::from_millis(2);

/// What a command changed, with the list of paths.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::engine) struct ChangeRecord {
    pub(in crate::engine) counts: CommandChanges,
    pub(in crate::engine) changes: Changes,
}

/// What a running sandbox would lose if its host went down now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unsaved {
    /// Files that are new, other or gone since the last snapshot.
    pub files: u64,
    /// The disk space of the new and other ones.
    pub bytes: u64,
    /// When that was looked at.
    pub as_of: Timestamp,
}

/// The bookkeeping of one running sandbox.
#[derive(Debug)]
pub(in crate::engine) struct ChangeTracking {
    state: Mutex<TrackingState>,
    /// Counts looks that ended.
    looks: watch::Sender<u64>,
    /// One look at a time.
    pub(in crate::engine) looking: tokio::sync::Mutex<()>,
    /// Whether the end of the session is on record. Held while its record is written for that, or after it.
    pub(in crate::engine) over: tokio::sync::Mutex<bool>,
}

/// A layer that was exchanged for another one before it was looked at for the last time.
#[derive(Debug)]
pub(in crate::engine) struct EarlierLayer {
    pub(in crate::engine) layer: LayerId,
    pub(in crate::engine) chain: Vec<LayerId>,
    /// Its names at the last look.
    pub(in crate::engine) names: LayerNames,
    /// Commands that have ended by then.
    commands: Vec<CommandId>,
}

/// The names of the open layer at a look.
#[derive(Debug, Clone, Default)]
pub(in crate::engine) enum LayerNames {
    /// They are not known.
    #[default]
    Unknown,
    /// They are here.
    Here(Arc<Index>),
    /// The agent of a microVM has them.
    InGuest,
}

impl LayerNames {
    fn are_known(&self) -> bool {
        !matches!(self, Self::Unknown)
    }
}

/// What a look found.
#[derive(Debug)]
pub(in crate::engine) struct FoundChanges {
    /// Since the look before, if that is known.
    pub(in crate::engine) changes: Option<Changes>,
    /// Whether everything was visited.
    pub(in crate::engine) complete: bool,
    /// Whether no process is left in the sandbox.
    pub(in crate::engine) alone: bool,
    pub(in crate::engine) names: LayerNames,
    /// Files and bytes that are in no snapshot, if the agent reported them.
    pub(in crate::engine) unsaved: Option<(u64, u64)>,
}

impl FoundChanges {
    /// What is found in a layer that was empty, and will stay so.
    pub(in crate::engine) fn nothing() -> Self {
        let names = LayerNames::Here(Arc::default());
        let changes = Some(Changes::default());
        Self { changes, complete: true, alone: true, names, unsaved: None }
    }
}

#[derive(Debug, Default)]
struct TrackingState {
    /// All that looks have found in this session. `None` if it is not recorded.
    session: Option<SessionChanges>,
    earlier: Vec<EarlierLayer>,
    /// The open layer that the indexes are of.
    layer: Option<LayerId>,
    /// Its names at the last look.
    names: LayerNames,
    /// Its names when the last snapshot was taken.
    saved: Option<Arc<Index>>,
    unsaved: Option<Unsaved>,
    /// Commands that are alive, or have ended since the last look.
    open: BTreeMap<CommandId, OpenCommand>,
    results: BTreeMap<CommandId, ChangeRecord>,
    /// The layer that a look is under way at.
    under_way: Option<LayerId>,
    /// Files were uploaded, or otherwise changed through the API, since the last look.
    uploaded: bool,
    /// At the last look a process was alive that a command had left behind. It keeps writing.
    left_behind: bool,
    not_before: Option<Instant>,
}

#[derive(Debug, Clone, Default)]
struct OpenCommand {
    record: ChangeRecord,
    with: BTreeSet<CommandId>,
    inexact: bool,
    incomplete: bool,
    ended: bool,
    /// It had ended when the look under way began, so that look sees all that it did.
    seen: bool,
    /// It had ended when its layer was exchanged.
    left: bool,
}

impl OpenCommand {
    fn finish(mut self) -> ChangeRecord {
        let changes = &mut self.record.changes;
        changes.list.truncate_to(MOST_LISTED, MOST_TEXT);
        self.record.counts = CommandChanges {
            created: changes.created,
            modified: changes.modified,
            deleted: changes.deleted,
            bytes: changes.bytes,
            exact: !self.inexact && self.with.is_empty(),
            complete: !self.incomplete,
            with: self.with.iter().take(MOST_NAMED).map(ToString::to_string).collect(),
        };
        self.record
    }
}

impl Default for ChangeTracking {
    fn default() -> Self {
        Self {
            state: Mutex::default(),
            looks: watch::Sender::new(0),
            looking: Default::default(),
            over: Default::default(),
        }
    }
}

impl ChangeTracking {
    /// A session begins with an empty layer, or continues with one after a checkpoint. `in_guest`:
    /// the agent looks at it.
    pub(in crate::engine) fn begin_layer(&self, layer: &LayerId, in_guest: bool) {
        let mut state = self.state.lock();
        state.layer = Some(layer.clone());
        state.unsaved = None;
        let empty = Arc::new(Index::default());
        (state.names, state.saved) = match in_guest {
            true => (LayerNames::InGuest, None),
            false => (LayerNames::Here(Arc::clone(&empty)), Some(empty)),
        };
    }

    /// A session begins whose changes are recorded, or continues with what is on record of it.
    pub(in crate::engine) fn begin_session(&self, changes: SessionChanges) {
        self.state.lock().session = Some(changes);
    }

    /// The layer on top of `chain` is about to be exchanged, with no command running. What was not
    /// looked at is looked at later.
    pub(in crate::engine) fn leave_layer(&self, chain: &[LayerId]) {
        let mut state = self.state.lock();
        let state = &mut *state;
        let ended = state.open.iter_mut().filter(|(_, open)| open.ended && !open.left);
        let mut commands = Vec::new();
        for (id, open) in ended {
            // A look under way sees what those did that had ended before it.
            if state.under_way.is_none() || !open.seen {
                open.left = true;
                commands.push(id.clone());
            }
        }
        let uploaded = std::mem::take(&mut state.uploaded);
        if commands.is_empty() && !uploaded && !state.left_behind {
            return;
        }
        let full = state.earlier.len() >= MOST_EARLIER;
        let is_looked_at = state.under_way.is_some() && state.under_way == state.layer;
        let names = match is_looked_at {
            // The look in progress finds them.
            true => LayerNames::Unknown,
            false => state.names.clone(),
        };
        let is_known = is_looked_at || names.are_known();
        match state.layer.clone().filter(|_| !full && is_known) {
            Some(layer) => {
                let chain = chain.to_vec();
                state.earlier.push(EarlierLayer { layer, chain, names, commands });
            }
            None => state.give_up(&commands),
        }
    }

    /// A layer to look at for the last time.
    pub(in crate::engine) fn next_earlier(&self) -> Option<EarlierLayer> {
        let mut state = self.state.lock();
        (!state.earlier.is_empty()).then(|| state.earlier.remove(0))
    }

    /// It was looked at; `None` if that failed.
    pub(in crate::engine) fn earlier_looked(
        &self,
        earlier: &EarlierLayer,
        found: Option<&FoundChanges>,
    ) {
        let mut state = self.state.lock();
        let changes =
            found.and_then(|found| found.changes.as_ref().map(|one| (one, found.complete)));
        let Some((changes, complete)) = changes else { return state.give_up(&earlier.commands) };
        state.count(Some(changes), complete);
        for id in &earlier.commands {
            let Some(mut open) = state.open.remove(id) else { continue };
            open.incomplete |= !complete;
            add(&mut open.record.changes, changes);
            state.results.insert(id.clone(), open.finish());
        }
    }

    /// A snapshot was taken of what was there at the last look, or a moment later.
    pub(in crate::engine) fn saved(&self) {
        let mut state = self.state.lock();
        state.saved = match &state.names {
            LayerNames::Here(index) => Some(Arc::clone(index)),
            LayerNames::InGuest | LayerNames::Unknown => None,
        };
        state.unsaved = None;
    }

    /// A command is about to start.
    pub(in crate::engine) fn starts(&self, command: &CommandId) {
        let mut state = self.state.lock();
        let unknown = !state.names.are_known();
        let mut new = OpenCommand {
            inexact: state.uploaded || state.left_behind || state.under_way.is_some() || unknown,
            incomplete: unknown,
            ..OpenCommand::default()
        };
        for (id, other) in state.open.iter_mut().filter(|(_, other)| !other.left) {
            other.with.insert(command.clone());
            new.with.insert(id.clone());
        }
        state.open.insert(command.clone(), new);
    }

    /// A command was not started after all.
    pub(in crate::engine) fn never_started(&self, command: &CommandId) {
        let mut state = self.state.lock();
        state.open.remove(command);
        for other in state.open.values_mut() {
            other.with.remove(command);
        }
    }

    /// A command that an earlier daemon started, or that ran when its machine was paused,
    /// continues: what it changed before is not known.
    pub(in crate::engine) fn adopted(&self, command: &CommandId) {
        self.starts(command);
        if let Some(open) = self.state.lock().open.get_mut(command) {
            (open.inexact, open.incomplete) = (true, true);
        }
    }

    /// A command has ended.
    pub(in crate::engine) fn ends(&self, command: &CommandId) {
        if let Some(open) = self.state.lock().open.get_mut(command) {
            open.ended = true;
        }
    }

    /// Files are changed through the API.
    pub(in crate::engine) fn uploaded(&self) {
        let mut state = self.state.lock();
        state.uploaded = true;
        state.open.values_mut().for_each(|open| open.inexact = true);
    }

    /// Whether the next command would lack an exact record without a look.
    pub(in crate::engine) fn wants_look(&self) -> bool {
        let state = self.state.lock();
        !state.names.are_known()
            || state.uploaded
            || !state.earlier.is_empty()
            || state.open.values().any(|open| open.ended)
    }

    /// Whether something may have changed that no look has seen.
    pub(in crate::engine) fn may_have_more(&self) -> bool {
        self.state.lock().may_have_more()
    }

    /// What was changed during the session, as far as looks have seen. `None` if it is not recorded.
    pub(in crate::engine) fn session(&self) -> Option<SessionChanges> {
        self.state.lock().session
    }

    /// The same when nothing is changed any more.
    pub(in crate::engine) fn whole_session(&self) -> Option<SessionChanges> {
        let state = self.state.lock();
        let complete = !state.may_have_more();
        state
            .session
            .map(|session| SessionChanges { complete: session.complete && complete, ..session })
    }

    /// What was changed in the session since the last look will not be looked at.
    pub(in crate::engine) fn give_up_session(&self) {
        self.state.lock().count(None, false);
    }

    /// Whether a command has ended whose changes are not known yet.
    pub(in crate::engine) fn is_behind(&self) -> bool {
        self.state.lock().open.values().any(|open| open.ended)
    }

    /// How long the next look has to wait.
    pub(in crate::engine) fn rest(&self) -> Duration {
        let not_before = self.state.lock().not_before;
        not_before.map_or(Duration::ZERO, |at| at.saturating_duration_since(Instant::now()))
    }

    /// A look at a layer begins. Answers with its names at the look before.
    pub(in crate::engine) fn look_begins(&self, layer: &LayerId) -> LayerNames {
        let mut state = self.state.lock();
        (state.under_way, state.uploaded) = (Some(layer.clone()), false);
        state.open.values_mut().for_each(|open| open.seen = open.ended);
        if state.layer.as_ref() != Some(layer) {
            state.layer = Some(layer.clone());
            (state.saved, state.unsaved) = (None, None);
            // Under a microVM a layer is exchanged without its agent taking notice.
            if !matches!(state.names, LayerNames::InGuest) {
                state.names = LayerNames::Unknown;
            }
        }
        state.names.clone()
    }

    /// A look ended; `None` if it failed. The changes of commands that have ended are known then.
    pub(in crate::engine) fn look_ends(&self, found: Option<FoundChanges>, took: Duration) {
        let mut state = self.state.lock();
        // The layer may have been exchanged meanwhile: what was found is true of the one before.
        let begun = state.under_way.take();
        let exchanged = begun.as_ref().is_some_and(|at| state.layer.as_ref() != Some(at));
        state.not_before = (took > SHORT).then(|| Instant::now() + took.saturating_mul(REST));
        let alive = state.open.values().any(|open| !open.ended);
        let left_behind = found.as_ref().is_none_or(|found| !found.alone) && !alive;
        let known = found.as_ref().is_some_and(|found| found.changes.is_some());
        let complete = known && found.as_ref().is_some_and(|found| found.complete);
        state.count(found.as_ref().and_then(|found| found.changes.as_ref()), complete);
        // Those whose layer was exchanged during this look, but not during an earlier one, were still there when it began.
        let TrackingState { open, earlier, .. } = &mut *state;
        let was_there = |id: &CommandId| {
            let left = earlier.iter().filter(|one| Some(&one.layer) == begun.as_ref());
            left.flat_map(|one| &one.commands).any(|one| one == id)
        };
        for (_, open) in open.iter_mut().filter(|(id, open)| !open.left || was_there(id)) {
            open.incomplete |= !complete;
            open.inexact |= !known || left_behind;
            if let Some(changes) = found.as_ref().and_then(|found| found.changes.as_ref()) {
                add(&mut open.record.changes, changes);
            }
        }
        let unsaved = match (&found, &state.saved) {
            _ if exchanged => None,
            (Some(FoundChanges { unsaved: Some(unsaved), .. }), _) => Some(*unsaved),
            (Some(FoundChanges { names: LayerNames::Here(index), .. }), Some(saved)) => {
                Some(index.difference(saved))
            }
            _ => None,
        };
        let as_of = now();
        state.unsaved = unsaved.map(|(files, bytes)| Unsaved { files, bytes, as_of });
        if let (true, Some(at), Some(found)) = (exchanged, &begun, &found) {
            let left = state.earlier.iter_mut().filter(|one| one.layer == *at);
            for one in left.filter(|one| !one.names.are_known()) {
                one.names = found.names.clone();
            }
        }
        if !exchanged {
            state.names = found.map(|found| found.names).unwrap_or_default();
        }
        state.left_behind = left_behind;
        // One that ended while the look was under way is finished by the next.
        let is_over = |open: &OpenCommand| {
            open.ended && !open.left && (open.seen || begun.is_none() || !known)
        };
        let ended: Vec<CommandId> =
            state.open.iter().filter(|(_, open)| is_over(open)).map(|(id, _)| id.clone()).collect();
        for id in &ended {
            if let Some(open) = state.open.remove(id) {
                state.results.insert(id.clone(), open.finish());
            }
        }
        let size = |record: &ChangeRecord| record.changes.list.size();
        let mut text: usize = state.results.values().map(size).sum();
        while state.results.len() > MOST_RESULTS
            || text > MOST_RESULTS_TEXT && state.results.len() > 1
        {
            let Some((_, oldest)) = state.results.pop_first() else { break };
            text -= size(&oldest);
        }
        drop(state);
        self.looks.send_modify(|looks| *looks += 1);
    }

    /// The result of a command, if there is one.
    pub(in crate::engine) fn result(&self, command: &CommandId) -> Option<ChangeRecord> {
        self.state.lock().results.get(command).cloned()
    }

    /// Waits for the result of a command. `None` if there will be none.
    pub(in crate::engine) async fn known(&self, command: &CommandId) -> Option<ChangeRecord> {
        let mut looks = self.looks();
        while self.is_open(command) {
            if let Some(record) = self.result(command) {
                return Some(record);
            }
            looks.changed().await.ok()?;
        }
        None
    }

    /// What an ended command changed will not be looked at: returns what looks have seen by now.
    pub(in crate::engine) fn give_up(&self, command: &CommandId) -> Option<ChangeRecord> {
        let mut state = self.state.lock();
        let Some(mut open) = state.open.remove(command) else {
            return state.results.get(command).cloned();
        };
        (open.inexact, open.incomplete) = (true, true);
        Some(open.finish())
    }

    /// The result of a command is on record.
    pub(in crate::engine) fn recorded(&self, command: &CommandId) {
        self.state.lock().results.remove(command);
        self.looks.send_modify(|looks| *looks += 1);
    }

    /// What a command that is alive has changed by now, as far as looks have seen.
    pub(in crate::engine) fn so_far(&self, command: &CommandId) -> Option<ChangeRecord> {
        self.state.lock().open.get(command).map(|open| open.clone().finish())
    }

    /// Whether the changes of a command are still being found out.
    pub(in crate::engine) fn is_open(&self, command: &CommandId) -> bool {
        let state = self.state.lock();
        state.open.contains_key(command) || state.results.contains_key(command)
    }

    /// Changes when a look ends.
    pub(in crate::engine) fn looks(&self) -> watch::Receiver<u64> {
        self.looks.subscribe()
    }

    /// How many names the open layer had at the last look; 0 if that is not known.
    pub(in crate::engine) fn names(&self) -> u64 {
        match &self.state.lock().names {
            LayerNames::Here(index) => index.names(),
            LayerNames::InGuest | LayerNames::Unknown => 0,
        }
    }

    pub(in crate::engine) fn unsaved(&self) -> Option<Unsaved> {
        self.state.lock().unsaved
    }
}

impl TrackingState {
    fn may_have_more(&self) -> bool {
        self.uploaded
            || self.left_behind
            || self.under_way.is_some()
            || !self.earlier.is_empty()
            || !self.open.is_empty()
    }

    /// Counts what a look found in the session.
    fn count(&mut self, changes: Option<&Changes>, complete: bool) {
        let Some(session) = &mut self.session else { return };
        session.complete &= complete;
        if let Some(Changes { created, modified, deleted, bytes, .. }) = changes {
            session.created += created;
            session.modified += modified;
            session.deleted += deleted;
            session.bytes = session.bytes.saturating_add(*bytes);
        }
    }

    /// What these ended commands changed will not be looked at.
    fn give_up(&mut self, commands: &[CommandId]) {
        self.count(None, false);
        for id in commands {
            if let Some(open) = self.open.get_mut(id) {
                (open.inexact, open.incomplete, open.left) = (true, true, false);
            }
        }
    }
}

/// Adds what one look found to what looks before it found.
fn add(all: &mut Changes, more: &Changes) {
    all.created += more.created;
    all.modified += more.modified;
    all.deleted += more.deleted;
    all.bytes = all.bytes.saturating_add(more.bytes);
    all.list.paths.extend_from_slice(&more.list.paths);
    all.list.more.extend_from_slice(&more.list.more);
    if all.list.paths.len() > 2 * MOST_LISTED || all.list.size() > 2 * MOST_TEXT {
        all.list.truncate_to(MOST_LISTED, MOST_TEXT);
    }
}

#[cfg(test)]
mod tests;
