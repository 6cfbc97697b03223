//! The event feed: what happened, for subscribers.
//!
//! ```text
//! record saved ──catalog watches──> EventFeed::emit ──queue──> one task ──> store/event_journal.rs (journal on disk)
//!                                                                │
//!                     EventStream <── "written up to id N" (watch channel) ── reads the files
//! ```
//!
//! The feed watches the catalog: the saved records give the phases and new snapshots. What no
//! record holds (which command ended, which snapshot a rollback returned to) a component emits
//! after the change is on disk. Emitting never waits: when the queue is full (a disk that hangs)
//! the event is counted as lost, and readers get the number. Readers keep no events in memory: each
//! follows the files of the journal at its own speed, and a reader that is too slow gets a note
//! that it missed some.

mod log_lines;
mod stream;

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};

pub use self::stream::{EventBatch, EventQuery, EventScope, EventStream};
use crate::catalog::CatalogWatcher;
use crate::model::lifecycle::Phase;
use crate::model::{
    Command, Event, EventData, EventFinding, EventId, EventSandbox, Finding, Name, Port, Sandbox,
    SandboxId, Session, SessionId, Snapshot, SnapshotId, Timestamp, now,
};
use crate::store::{EventSource, EventWriter, last_event};

/// How many events may wait to be written.
const QUEUE: usize = 4096;
/// How many bytes of the journal a reader takes at a time, of all sources together.
const READ_BYTES: u64 = 512 << 10;
/// How many readers may read files at the same time.
const READERS: usize = 4;
/// How long the shutdown waits for the last events.
const FINISH_WITHIN: Duration = Duration::from_secs(2);
/// How much of a text an event holds.
const TEXT: usize = 500;
/// How many findings an event lists.
const FINDINGS: usize = 10;

/// Numbers events and has them written.
#[derive(Debug)]
pub(in crate::engine) struct EventFeed {
    journal: PathBuf,
    state: Arc<Mutex<FeedState>>,
    queue: mpsc::Sender<JournalWork>,
    /// Up to which id the journal is written.
    written: watch::Sender<EventId>,
    reading: Arc<Semaphore>,
}

#[derive(Debug, Default)]
struct FeedState {
    last: EventId,
    /// How many events there were since the start, and how many of them were lost.
    counts: (u64, u64),
    /// Events that did not fit into the queue.
    lost: BTreeMap<EventSource, u64>,
    /// The phase that was reported last, of sandboxes that are neither stopped nor paused.
    phases: HashMap<SandboxId, Phase>,
}

#[derive(Debug)]
enum JournalWork {
    Write(Box<Event>),
    Remove(Name),
    Finish(oneshot::Sender<()>),
}

impl EventFeed {
    /// Continues the journal below `journal`.
    pub(in crate::engine) async fn start(journal: PathBuf) -> Self {
        let at = journal.clone();
        let last = match tokio::task::spawn_blocking(move || last_event(&at)).await {
            Ok(Ok(last)) => last,
            Ok(Err(error)) => {
                tracing::warn!(%error, "the event journal cannot be read; ids continue from the time of day");
                EventId(0)
            }
            Err(_) => EventId(0),
        };
        let (queue, work) = mpsc::channel(QUEUE);
        let written = watch::Sender::new(last);
        let state = Arc::new(Mutex::new(FeedState { last, ..FeedState::default() }));
        let writer = EventWriter::new(journal.clone());
        tokio::spawn(write_events(writer, work, written.clone(), Arc::clone(&state)));
        Self { journal, state, queue, written, reading: Arc::new(Semaphore::new(READERS)) }
    }

    /// Adds an event.
    pub(in crate::engine) fn emit(
        &self,
        project: Option<&Name>,
        sandbox: Option<EventSandbox>,
        change: EventData,
    ) {
        self.emit_in(&mut self.state.lock(), project, sandbox, change);
    }

    fn emit_in(
        &self,
        state: &mut FeedState,
        project: Option<&Name>,
        sandbox: Option<EventSandbox>,
        change: EventData,
    ) {
        let source = project.cloned().map_or(EventSource::Host, EventSource::Project);
        if let Some(count) = state.lost.get(&source).copied() {
            // First those that were lost, so that the gap is where it is.
            let event = state.event(project, None, EventData::EventsLost { count });
            if self.queue.try_send(JournalWork::Write(Box::new(event))).is_err() {
                state.lost.insert(source, count + 1);
                state.counts.1 += 1;
                return;
            }
            state.lost.remove(&source);
        }
        let event = state.event(project, sandbox, change);
        log_lines::write(&event);
        if self.queue.try_send(JournalWork::Write(Box::new(event))).is_err() {
            state.counts.1 += 1;
            let lost = state.lost.entry(source).or_default();
            *lost += 1;
            if lost.is_power_of_two() {
                tracing::warn!(lost, "events were lost: they come faster than they can be written");
            }
        }
    }

    fn of(&self, sandbox: &Sandbox, change: EventData) {
        self.emit(Some(&sandbox.project), Some(as_it_is(sandbox)), change);
    }

    /// The record of a sandbox was saved: reports its phase if it changed.
    fn recorded(&self, sandbox: &Sandbox) {
        let phase = sandbox.phase();
        let at_rest = matches!(phase, Phase::Stopped | Phase::Paused);
        let mut state = self.state.lock();
        let before = match at_rest {
            true => state.phases.remove(&sandbox.id),
            false => state.phases.insert(sandbox.id.clone(), phase),
        };
        if before == Some(phase) || (before.is_none() && at_rest) {
            return;
        }
        let (session, generation) = (sandbox.session.clone(), sandbox.generation);
        let snapshot = sandbox.current.clone();
        let change = match phase {
            Phase::Starting => EventData::SandboxStarting { session, generation },
            Phase::Running => EventData::SandboxRunning { session, generation },
            Phase::Stopping => EventData::SandboxStopping { session },
            Phase::Stopped => EventData::SandboxStopped { generation, snapshot },
            Phase::Paused => EventData::SandboxPaused { generation, snapshot },
            Phase::Failed => {
                let reason = sandbox.failure().unwrap_or("not known");
                EventData::SandboxFailed { reason: truncated(reason) }
            }
            Phase::Deleted => EventData::SandboxDeleted {
                expired: sandbox.deletion().is_some_and(|deletion| deletion.expired),
            },
        };
        self.emit_in(&mut state, Some(&sandbox.project), Some(as_it_is(sandbox)), change);
    }

    /// Takes note of a sandbox as an earlier daemon left it, so that its phase is not reported
    /// again.
    pub(in crate::engine) fn learn(&self, sandbox: &Sandbox) {
        if !matches!(sandbox.phase(), Phase::Stopped | Phase::Paused) {
            self.state.lock().phases.insert(sandbox.id.clone(), sandbox.phase());
        }
    }

    /// How many events there were since the start, and how many of them were lost.
    pub(in crate::engine) fn counts(&self) -> (u64, u64) {
        self.state.lock().counts
    }

    pub(in crate::engine) fn created(&self, sandbox: &Sandbox) {
        self.of(sandbox, EventData::SandboxCreated { forked_from: sandbox.forked_from.clone() });
        for port in &sandbox.config.ports {
            self.of(sandbox, published(port));
        }
    }

    pub(in crate::engine) fn restored(&self, sandbox: &Sandbox) {
        self.of(sandbox, EventData::SandboxRestored {});
    }

    pub(in crate::engine) fn updated(&self, before: &[Port], sandbox: &Sandbox) {
        self.of(sandbox, EventData::SandboxUpdated {});
        let after = &sandbox.config.ports;
        let gone = before.iter().filter(|old| !after.iter().any(|new| new.number == old.number));
        for port in gone {
            self.of(sandbox, EventData::PortUnpublished { port: port.number });
        }
        for port in after.iter().filter(|new| !before.contains(new)) {
            self.of(sandbox, published(port));
        }
    }

    pub(in crate::engine) fn rolled_back(&self, sandbox: &Sandbox, to: &Snapshot) {
        let (generation, snapshot) = (sandbox.generation, to.id.clone());
        self.of(sandbox, EventData::SandboxRolledBack { generation, snapshot });
    }

    pub(in crate::engine) fn promoted(&self, sandbox: &Sandbox, to: &SnapshotId, from: &Name) {
        let (generation, snapshot) = (sandbox.generation, to.clone());
        self.of(sandbox, EventData::SandboxPromoted { generation, snapshot, from: from.clone() });
    }

    pub(in crate::engine) fn merged(&self, sandbox: &Sandbox, from: &Name) {
        let generation = sandbox.generation;
        self.of(sandbox, EventData::SandboxMerged { generation, from: from.clone() });
    }

    pub(in crate::engine) fn renamed(&self, sandbox: &Sandbox, from: &Name) {
        self.of(sandbox, EventData::SandboxRenamed { from: from.clone() });
    }

    pub(in crate::engine) fn writes_held(&self, sandbox: &Sandbox) {
        self.of(sandbox, EventData::SandboxWritesHeld {});
    }

    pub(in crate::engine) fn writes_released(&self, sandbox: &Sandbox) {
        self.of(sandbox, EventData::SandboxWritesReleased {});
    }

    pub(in crate::engine) fn session_ended(&self, sandbox: &Sandbox, session: &Session) {
        let change = EventData::SessionEnded {
            session: session.id.clone(),
            end: session.end,
            snapshot: session.snapshot.clone(),
            usage: session.usage.into(),
        };
        self.of(sandbox, change);
    }

    pub(in crate::engine) fn validation_failed(
        &self,
        sandbox: &Sandbox,
        session: SessionId,
        problem: &str,
    ) {
        let problem = truncated(problem);
        self.of(sandbox, EventData::SandboxValidationFailed { session, problem });
    }

    pub(in crate::engine) fn command_started(&self, sandbox: &Sandbox, command: &Command) {
        let change = EventData::CommandStarted {
            command: command.id.clone(),
            session: command.session.clone(),
            line: line_of(&command.argv),
            service: command.service.clone(),
        };
        self.of(sandbox, change);
    }

    pub(in crate::engine) fn command_ended(&self, sandbox: &Sandbox, command: &Command) {
        let change = EventData::CommandEnded {
            command: command.id.clone(),
            session: command.session.clone(),
            exit_code: command.exit_code,
            end: command.ended_by(),
            output_bytes: command.output_bytes,
        };
        self.of(sandbox, change);
    }

    fn snapshot_created(&self, sandbox: &Sandbox, snapshot: &Snapshot) {
        let change = EventData::SnapshotCreated {
            snapshot: snapshot.id.clone(),
            generation: snapshot.generation,
            cause: snapshot.kind,
            label: snapshot.label.as_deref().map(truncated),
        };
        self.of(sandbox, change);
        if !snapshot.findings.is_empty() {
            self.guard_found(sandbox, &snapshot.findings, snapshot.findings.len(), false);
        }
    }

    pub(in crate::engine) fn snapshot_deleted(&self, snapshot: &Snapshot) {
        let (id, name) = (snapshot.sandbox.clone(), snapshot.sandbox_name.clone());
        let sandbox = EventSandbox { id, name, tags: Default::default() };
        let (generation, snapshot_id) = (snapshot.generation, snapshot.id.clone());
        let change = EventData::SnapshotDeleted { snapshot: snapshot_id, generation };
        self.emit(Some(&snapshot.project), Some(sandbox), change);
    }

    pub(in crate::engine) fn guard_found(
        &self,
        sandbox: &Sandbox,
        findings: &[Finding],
        count: usize,
        blocked: bool,
    ) {
        let told = findings.iter().take(FINDINGS).map(|finding| EventFinding {
            what: finding.kind,
            path: truncated(&finding.path),
            secret: finding.secret.clone(),
        });
        let count = u64::try_from(count).unwrap_or(u64::MAX);
        self.of(sandbox, EventData::GuardFound { blocked, findings: told.collect(), count });
    }

    /// Removes the events of a project that is gone.
    pub(in crate::engine) async fn remove(&self, project: &Name) {
        let _ = self.queue.send(JournalWork::Remove(project.clone())).await;
    }

    /// Waits, but not for long, until all events are written.
    pub(in crate::engine) async fn finish(&self) {
        let (told, done) = oneshot::channel();
        let end = async {
            if self.queue.send(JournalWork::Finish(told)).await.is_ok() {
                let _ = done.await;
            }
        };
        if tokio::time::timeout(FINISH_WITHIN, end).await.is_err() {
            tracing::warn!("the last events before the shutdown were not written");
        }
    }
}

/// The records that the catalog saves give the phases and snapshots.
impl CatalogWatcher for EventFeed {
    fn saved(&self, sandbox: &Sandbox, snapshot: Option<&Snapshot>) {
        if let Some(snapshot) = snapshot {
            self.snapshot_created(sandbox, snapshot);
        }
        self.recorded(sandbox);
    }

    fn removed(&self, sandbox: &Sandbox) {
        self.state.lock().phases.remove(&sandbox.id);
    }
}

impl FeedState {
    fn event(
        &mut self,
        project: Option<&Name>,
        sandbox: Option<EventSandbox>,
        change: EventData,
    ) -> Event {
        self.counts.0 += 1;
        let time = EventId::at(Timestamp::now());
        self.last = time.max(EventId(self.last.0 + 1));
        Event { id: self.last, at: now(), project: project.cloned(), sandbox, change }
    }
}

fn as_it_is(sandbox: &Sandbox) -> EventSandbox {
    EventSandbox {
        id: sandbox.id.clone(),
        name: sandbox.name.clone(),
        tags: sandbox.config.tags.clone(),
    }
}

fn published(port: &Port) -> EventData {
    EventData::PortPublished { port: port.number, access: port.access }
}

/// The beginning of a text.
fn truncated(text: &str) -> String {
    match text.char_indices().nth(TEXT) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// The beginning of a command line.
fn line_of(argv: &[String]) -> String {
    let mut line = String::new();
    for argument in argv {
        if !line.is_empty() {
            line.push(' ');
        }
        line.extend(argument.chars().take(TEXT + 1));
        if line.len() > 4 * TEXT {
            break;
        }
    }
    truncated(&line)
}

async fn write_events(
    writer: EventWriter,
    mut work: mpsc::Receiver<JournalWork>,
    written: watch::Sender<EventId>,
    state: Arc<Mutex<FeedState>>,
) {
    let (mut writer, mut batch) = (Some(writer), Vec::new());
    let mut failures = 0_u64;
    while work.recv_many(&mut batch, 256).await > 0 {
        let (mut events, mut removed, mut finished) = (Vec::new(), Vec::new(), Vec::new());
        for one in batch.drain(..) {
            match one {
                JournalWork::Write(event) => events.push(*event),
                JournalWork::Remove(project) => removed.push(project),
                JournalWork::Finish(told) => finished.push(told),
            }
        }
        let last = events.last().map(|event| event.id);
        let Some(mut taken) = writer.take() else { return };
        let wrote = tokio::task::spawn_blocking(move || {
            let outcome = taken.append(&events);
            for project in &removed {
                if let Err(error) = taken.remove(project) {
                    tracing::warn!(%project, %error, "the events of a deleted project were not removed");
                }
            }
            (taken, outcome)
        });
        // The daemon goes down.
        let Ok((given_back, outcome)) = wrote.await else { return };
        writer = Some(given_back);
        if let Err((error, lost)) = outcome {
            for (source, count) in lost {
                let mut state = state.lock();
                *state.lost.entry(source).or_default() += count;
                state.counts.1 += count;
            }
            failures += 1;
            if failures.is_power_of_two() {
                tracing::warn!(%error, failures, "events could not be written");
            }
        }
        if let Some(last) = last {
            written.send_replace(last);
        }
        for told in finished {
            let _ = told.send(());
        }
    }
}

#[cfg(test)]
mod tests;
