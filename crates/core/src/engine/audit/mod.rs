//! The audit log: who did what.
//!
//! ```text
//! fronts (server) ──record──┐
//!                           ├─queue──> one task ──> store/audit (chains on disk) ──sync, ≤ 1 s──> signed head
//! engine ──note─────────────┘                              │
//!                     AuditFollow <── "something was written" (watch channel) ── reads the files
//! ```
//!
//! - Recording costs a caller one place in a queue. What must not be lost (changes of keys, secrets,
//!   policies, approvals) waits for the sync of what was recorded until then: [`AuditLog::record_synced`].
//! - The queue is bounded. When it is full, a front waits ([`QUEUE_WITHIN`]) and the engine does not. What finds
//!   no place is counted, and the number is an entry of its own (`audit.lost`).
//! - What may come thousands of times a second (requests of a page to a published port, uses of a secret) is recorded
//!   once in [`AGAIN_AFTER`], and what callers without a key do is bounded for all of them together.
//!
//! `docs/AUDIT.md` describes for users what is recorded, `docs/formats/audit.md` how it is written.

mod read;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::time::Instant;

use crate::model::{AuditChain, AuditRecord, Name};
use crate::store::{AuditKey, AuditResumed, AuditWriter};

pub use read::{AuditBatch, AuditFollow, AuditQuery};

/// How many records may wait to be written.
const QUEUE: usize = 4096;
/// How long a caller waits for a place in the queue.
const QUEUE_WITHIN: Duration = Duration::from_secs(1);
/// How long after it was written an entry is on stable storage, at the latest.
const SYNC_EVERY: Duration = Duration::from_millis(800);
/// How long a caller waits for its record to be on stable storage.
const SYNC_WITHIN: Duration = Duration::from_secs(10);
/// How long the shutdown waits for the last entries.
const FINISH_WITHIN: Duration = Duration::from_secs(5);
/// How long what happens over and over again is not recorded again.
const AGAIN_AFTER: Duration = Duration::from_secs(60);
/// How many such things are remembered, of each project.
const REMEMBERED: usize = 4096;
/// How many entries callers without a key cause in a minute, all together.
const ANONYMOUS_A_MINUTE: u64 = 60;
/// How many readers may read files at the same time.
const READERS: usize = 4;

/// Has entries written.
#[derive(Debug)]
pub(in crate::engine) struct AuditLog {
    audit: PathBuf,
    key: AuditKey,
    shared: Arc<AuditShared>,
    queue: mpsc::Sender<AuditWork>,
    reading: Arc<Semaphore>,
}

/// What the writing task shares with those who record.
#[derive(Debug)]
struct AuditShared {
    state: Mutex<AuditState>,
    /// Changes when something was written.
    written: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct AuditState {
    /// Records that are in no chain.
    lost: BTreeMap<AuditChain, u64>,
    /// What was recorded and is not to be recorded again yet.
    /// By project, so that what one of them causes does not hide what others do.
    recent: HashMap<Option<Name>, HashMap<String, Instant>>,
    anonymous: AnonymousBucket,
    /// Chains that are not as they were left, until somebody takes them.
    damaged: Vec<(AuditChain, String)>,
}

#[derive(Debug, Default)]
struct AnonymousBucket {
    minute: Option<Instant>,
    count: u64,
    /// How many were not recorded since the last one that was.
    suppressed: u64,
}

#[derive(Debug)]
enum AuditWork {
    Record(Box<AuditRecord>),
    /// Everything that was sent before is to be on stable storage; the answer is whether it is.
    Sync(oneshot::Sender<bool>),
}

impl AuditLog {
    /// Continues the log of a data directory, whose chains take about `limit` bytes each. The second answer is where
    /// a damaged key is kept.
    pub(in crate::engine) fn start(data: &Path, limit: u64) -> io::Result<(Self, Option<String>)> {
        let (key, aside) = AuditKey::open(data)?;
        let audit = data.join("audit");
        let writer = AuditWriter::new(audit.clone(), key.clone(), limit);
        let (queue, work) = mpsc::channel(QUEUE);
        let shared =
            Arc::new(AuditShared { state: Mutex::default(), written: watch::Sender::new(0) });
        tokio::spawn(write_audit(writer, work, Arc::clone(&shared)));
        let reading = Arc::new(Semaphore::new(READERS));
        Ok((Self { audit, key, shared, queue, reading }, aside))
    }

    /// Records something without waiting.
    pub(in crate::engine) fn note(&self, record: AuditRecord) {
        let chain = record.chain();
        if let Err(error) = self.queue.try_send(AuditWork::Record(Box::new(record.bounded()))) {
            drop(error);
            self.shared.lose(chain, 1);
        }
    }

    /// Records something that happens over and over again, unless `what` was recorded a short time ago.
    pub(in crate::engine) fn note_sometimes(
        &self,
        project: Option<&Name>,
        what: String,
        record: impl FnOnce() -> AuditRecord,
    ) {
        if self.shared.is_due(project, what, true) {
            self.note(record());
        }
    }

    /// Records something. Waits for a place in the queue if need be, but not for long. Says whether it found one.
    pub(in crate::engine) async fn record(&self, record: AuditRecord) -> bool {
        let chain = record.chain();
        let record = AuditWork::Record(Box::new(record.bounded()));
        let sent = match self.queue.try_send(record) {
            Ok(()) => true,
            Err(mpsc::error::TrySendError::Full(record)) => {
                self.queue.send_timeout(record, QUEUE_WITHIN).await.is_ok()
            }
            Err(mpsc::error::TrySendError::Closed(_)) => false,
        };
        if !sent {
            self.shared.lose(chain, 1);
        }
        sent
    }

    /// Records something, and waits until it is on stable storage. Says whether it is.
    pub(in crate::engine) async fn record_synced(&self, record: AuditRecord) -> bool {
        self.record(record).await && self.sync(SYNC_WITHIN).await
    }

    /// Records what a caller without a key did, unless there was much of that a short time ago.
    pub(in crate::engine) fn note_anonymous(&self, record: AuditRecord) {
        if let Some(suppressed) = self.shared.admit_anonymous() {
            let record = match suppressed {
                0 => record,
                more => record.with("not_recorded_before", more.to_string()),
            };
            self.note(record);
        }
    }

    /// Whether `what` is to be recorded: it was not a short time ago, and it is not one of more than can be remembered.
    pub(in crate::engine) fn is_due(&self, project: Option<&Name>, what: String) -> bool {
        self.shared.is_due(project, what, false)
    }

    /// Chains that were found to be not as they were left, and what is wrong.
    pub(in crate::engine) fn take_damage(&self) -> Vec<(AuditChain, String)> {
        std::mem::take(&mut self.shared.state.lock().damaged)
    }

    /// Waits, but not for long, until all is on stable storage.
    pub(in crate::engine) async fn finish(&self) {
        if !self.sync(FINISH_WITHIN).await {
            tracing::warn!("the last entries of the audit log are not on stable storage");
        }
    }

    async fn sync(&self, within: Duration) -> bool {
        let (told, done) = oneshot::channel();
        let synced = async {
            self.queue.send(AuditWork::Sync(told)).await.is_ok() && done.await.unwrap_or(false)
        };
        tokio::time::timeout(within, synced).await.unwrap_or(false)
    }
}

impl AuditShared {
    fn lose(&self, chain: AuditChain, count: u64) {
        let mut state = self.state.lock();
        let lost = state.lost.entry(chain.clone()).or_default();
        *lost += count;
        if lost.is_power_of_two() {
            tracing::error!(%chain, lost, "entries of the audit log were lost");
        }
    }

    /// Whether `what` was not recorded a short time ago. Where more happens in a project than can be remembered, the answer
    /// is `unless_known`: events that outside callers can cause must not fill the log.
    fn is_due(&self, project: Option<&Name>, what: String, unless_known: bool) -> bool {
        let (mut state, now) = (self.state.lock(), Instant::now());
        let is_recent = |at: &Instant| now.duration_since(*at) < AGAIN_AFTER;
        let project = project.cloned();
        if !state.recent.contains_key(&project) {
            // Projects that are quiet or gone take no room.
            state.recent.retain(|_, recent| recent.values().any(is_recent));
        }
        let recent = state.recent.entry(project).or_default();
        if recent.len() >= REMEMBERED {
            recent.retain(|_, at| is_recent(at));
        }
        if recent.get(&what).is_some_and(is_recent) {
            return false;
        }
        if recent.len() >= REMEMBERED {
            return unless_known;
        }
        recent.insert(what, now);
        true
    }

    /// Whether what a caller without a key did is recorded, and how many were not since the last one.
    fn admit_anonymous(&self) -> Option<u64> {
        let (mut state, now) = (self.state.lock(), Instant::now());
        let bucket = &mut state.anonymous;
        if bucket.minute.is_none_or(|begun| now.duration_since(begun) >= Duration::from_secs(60)) {
            (bucket.minute, bucket.count) = (Some(now), 0);
        }
        bucket.count += 1;
        if bucket.count > ANONYMOUS_A_MINUTE {
            bucket.suppressed += 1;
            return None;
        }
        Some(std::mem::take(&mut bucket.suppressed))
    }

    /// The records of a batch by chain, each after the records about losses of its chain.
    fn by_chain(&self, batch: Vec<AuditRecord>) -> BTreeMap<AuditChain, Vec<AuditRecord>> {
        let mut all: BTreeMap<AuditChain, Vec<AuditRecord>> = BTreeMap::new();
        let mut state = self.state.lock();
        // Also without another record of that chain: a loss must not wait for one.
        for (chain, count) in std::mem::take(&mut state.lost) {
            let project = match &chain {
                AuditChain::Host => None,
                AuditChain::Project(name) => Some(name),
            };
            let record = AuditRecord::by_system(project, "audit.lost", Some("audit".to_owned()));
            all.entry(chain).or_default().push(record.with("count", count.to_string()));
        }
        drop(state);
        for record in batch {
            all.entry(record.chain()).or_default().push(record);
        }
        all
    }

    /// Takes note of a chain that was opened.
    fn resumed(&self, chain: &AuditChain, found: AuditResumed) {
        match found.damage {
            Some(damage) => {
                tracing::error!(%chain, damage, "a chain of the audit log is not as it was left");
                self.state.lock().damaged.push((chain.clone(), damage));
            }
            None => {
                let AuditResumed { unsigned, dropped_bytes, .. } = found;
                tracing::info!(%chain, unsigned, dropped_bytes, "the audit log is continued after a crash");
            }
        }
    }
}

/// What a turn of the writing task is to do.
struct WriteTurn {
    records: Vec<AuditRecord>,
    flush: bool,
}

async fn write_audit(
    writer: AuditWriter,
    mut work: mpsc::Receiver<AuditWork>,
    shared: Arc<AuditShared>,
) {
    let (mut writer, mut batch) = (Some(writer), Vec::new());
    // Since when something waits for a sync.
    let mut dirty: Option<Instant> = None;
    let mut failures = 0_u64;
    loop {
        let received = match dirty {
            None => Some(work.recv_many(&mut batch, 512).await),
            Some(since) => {
                let due = since + SYNC_EVERY;
                tokio::time::timeout_at(due, work.recv_many(&mut batch, 512)).await.ok()
            }
        };
        let is_over = received == Some(0);
        let (mut records, mut waiting) = (Vec::new(), Vec::new());
        for one in batch.drain(..) {
            match one {
                AuditWork::Record(record) => records.push(*record),
                AuditWork::Sync(told) => waiting.push(told),
            }
        }
        let is_due = dirty.is_some_and(|since| since.elapsed() >= SYNC_EVERY);
        let turn = WriteTurn { records, flush: is_over || is_due || !waiting.is_empty() };
        let Some(taken) = writer.take() else { return };
        let of = Arc::clone(&shared);
        let Ok((given_back, outcome)) =
            tokio::task::spawn_blocking(move || take_turn(taken, turn, &of)).await
        else {
            // The daemon goes down.
            return;
        };
        let is_good = outcome.is_ok();
        if let Err(error) = outcome {
            failures += 1;
            if failures.is_power_of_two() {
                tracing::error!(%error, failures, "the audit log could not be written");
            }
        }
        shared.written.send_modify(|count| *count += 1);
        dirty = match given_back.is_dirty() {
            false => None,
            // After a failed sync it is tried again, but not at once.
            true if is_due => Some(Instant::now()),
            true => dirty.or(Some(Instant::now())),
        };
        writer = Some(given_back);
        for told in waiting {
            let _ = told.send(is_good);
        }
        if is_over {
            return;
        }
    }
}

/// Appends, and syncs if that is due.
fn take_turn(
    mut writer: AuditWriter,
    turn: WriteTurn,
    shared: &AuditShared,
) -> (AuditWriter, io::Result<()>) {
    let mut outcome = Ok(());
    for (chain, records) in shared.by_chain(turn.records) {
        match writer.append(&chain, &records) {
            Ok(None) => {}
            Ok(Some(found)) => shared.resumed(&chain, found),
            Err(error) => {
                // A record that reports a loss does not count as another one.
                let told = |record: &&AuditRecord| record.action == "audit.lost";
                let lost_before = records.iter().filter(told);
                let before: u64 = lost_before
                    .filter_map(|record| record.detail.get("count")?.parse::<u64>().ok())
                    .sum();
                let new = records.iter().filter(|record| !told(record)).count() as u64;
                shared.lose(chain, before + new);
                outcome = Err(error);
            }
        }
    }
    if turn.flush
        && let Err(error) = writer.flush()
    {
        outcome = Err(error);
    }
    (writer, outcome)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{ANONYMOUS_A_MINUTE, AuditLog, QUEUE};
    use crate::model::{AuditChain, AuditEntry, AuditFilter, AuditRecord};
    use crate::store::{read_audit, verify_audit};

    fn record(number: usize) -> AuditRecord {
        AuditRecord::by_system(None, "test.done", Some(format!("thing/{number}")))
    }

    fn entries(log: &AuditLog) -> Vec<AuditEntry> {
        let all = (usize::MAX, u64::MAX);
        let chain = AuditChain::Host;
        read_audit(&log.audit, &chain, None, 0, &AuditFilter::default(), all).unwrap().entries
    }

    #[tokio::test]
    async fn what_is_synced_is_there_and_signed_when_the_call_returns() {
        let dir = tempfile::tempdir().unwrap();
        let (log, _) = AuditLog::start(dir.path(), 1 << 30).unwrap();
        assert!(log.record(record(1)).await);
        assert!(log.record_synced(record(2)).await);
        let report = verify_audit(&log.audit, &AuditChain::Host, &log.key, None).unwrap();
        assert_eq!((report.signed, report.last, report.found), (2, 2, 0));
    }

    #[tokio::test]
    async fn what_is_recorded_is_signed_a_second_later() {
        let dir = tempfile::tempdir().unwrap();
        let (log, _) = AuditLog::start(dir.path(), 1 << 30).unwrap();
        log.note(record(1));
        tokio::time::sleep(Duration::from_millis(1500)).await;
        let report = verify_audit(&log.audit, &AuditChain::Host, &log.key, None).unwrap();
        assert_eq!((report.signed, report.last), (1, 1));
    }

    #[tokio::test]
    async fn a_loss_is_an_entry() {
        let dir = tempfile::tempdir().unwrap();
        let (log, _) = AuditLog::start(dir.path(), 1 << 30).unwrap();
        // The task that writes does not run before this one waits.
        for number in 0..QUEUE + 50 {
            log.note(record(number));
        }
        log.finish().await;
        let all = entries(&log);
        assert_eq!(all.len(), QUEUE + 1);
        let lost: Vec<_> = all.iter().filter(|entry| entry.record.action == "audit.lost").collect();
        assert_eq!(lost.len(), 1);
        assert_eq!(lost[0].record.detail["count"], "50");
    }

    #[tokio::test]
    async fn a_caller_waits_for_a_place_in_the_queue() {
        let dir = tempfile::tempdir().unwrap();
        let (log, _) = AuditLog::start(dir.path(), 1 << 30).unwrap();
        for number in 0..QUEUE {
            log.note(record(number));
        }
        assert!(log.record(record(QUEUE)).await, "it finds a place when the task has run");
        log.finish().await;
        assert_eq!(entries(&log).len(), QUEUE + 1);
    }

    #[tokio::test]
    async fn a_log_that_cannot_be_written_says_so_and_holds_nobody_up() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("audit"), "in the way").unwrap();
        let (log, _) = AuditLog::start(dir.path(), 1 << 30).unwrap();
        let within = Duration::from_secs(5);
        let synced = tokio::time::timeout(within, log.record_synced(record(1))).await.unwrap();
        assert!(!synced);
        assert!(log.record(record(2)).await);
        assert!(!log.record_synced(record(3)).await);
        // When it can be written again, the loss is recorded.
        std::fs::remove_file(dir.path().join("audit")).unwrap();
        assert!(log.record_synced(record(4)).await);
        let all = entries(&log);
        let told: Vec<_> = all.iter().map(|entry| entry.record.action.as_str()).collect();
        assert_eq!(told, ["audit.lost", "test.done"]);
        assert_eq!(all[0].record.detail["count"], "3");
    }

    /// The path of a command: recording does not wait for the disk, even where a sync never
    /// returns.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn recording_waits_for_no_sync() {
        use rustix::fs::{CWD, FileType, Mode, mknodat};

        let dir = tempfile::tempdir().unwrap();
        let (log, _) = AuditLog::start(dir.path(), 1 << 30).unwrap();
        assert!(log.record_synced(record(0)).await);
        // The next head is written to a pipe that nobody reads: opening it never returns.
        let pipe = log.audit.join("host/head.json.new");
        mknodat(CWD, &pipe, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        let most = QUEUE / 2;
        let begun = std::time::Instant::now();
        for number in 0..most {
            assert!(log.record(record(number)).await);
        }
        let took = begun.elapsed();
        eprintln!("audit: {} ns for each record", took.as_nanos() / most as u128);
        assert!(took < Duration::from_secs(1), "{took:?} for {most} records");
        tokio::time::sleep(Duration::from_millis(1200)).await;
        let head = std::fs::read_to_string(log.audit.join("host/head.json")).unwrap();
        assert!(head.contains("\"seq\":1,"), "the sync hangs: {head}");
        let begun = std::time::Instant::now();
        assert!(log.record(record(most)).await);
        assert!(begun.elapsed() < Duration::from_millis(100), "a sync that hangs holds up nobody");
        // A reader ends the wait.
        let read = tokio::task::spawn_blocking(move || std::fs::read(pipe));
        drop(read.await);
        std::fs::remove_file(log.audit.join("host/head.json.new")).ok();
    }

    #[tokio::test]
    async fn what_happens_over_and_over_is_recorded_sometimes() {
        let dir = tempfile::tempdir().unwrap();
        let (log, _) = AuditLog::start(dir.path(), 1 << 30).unwrap();
        for number in 0..10 {
            log.note_sometimes(None, "one".to_owned(), || record(number));
            log.note_sometimes(None, format!("other-{}", number % 2), || record(number));
        }
        for number in 0..ANONYMOUS_A_MINUTE as usize + 10 {
            log.note_anonymous(record(number));
        }
        log.finish().await;
        assert_eq!(entries(&log).len(), 3 + ANONYMOUS_A_MINUTE as usize);
        // However many there are, a bounded number is remembered, and of events that any caller can
        // cause no more is recorded.
        let due = (0..3 * super::REMEMBERED)
            .filter(|number| log.is_due(None, number.to_string()))
            .count();
        assert!((super::REMEMBERED - 10..=super::REMEMBERED).contains(&due), "{due}");
        assert!(log.shared.state.lock().recent[&None].len() <= super::REMEMBERED);
        // That is so for each project: the others do not notice.
        let other = "other".parse().unwrap();
        assert!(log.is_due(Some(&other), "one".to_owned()));
        assert!(!log.is_due(Some(&other), "one".to_owned()));
    }
}
