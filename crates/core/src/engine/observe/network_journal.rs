//! The journal of a sandbox's connections, on disk, with a size limit.
//!
//! ```text
//! sandboxes/<sbx>/network/<ses>.jsonl       one connection to a line, as they ended
//! sandboxes/<sbx>/network/<ses>.jsonl.old   those before, once the first is half as long as it may be
//! ```
//!
//! Lines are written by a task of the session's own: the packet handler only puts them in a queue,
//! and when the queue is full the line is lost and counted, never waited for. A sandbox that opens
//! connections as fast as it can fills its own two files and nothing else; the journals of old
//! sessions go when there are too many bytes of them.
//!
//! Half a line at the end, left by a crash, is skipped by readers and ended by the next writer.

use std::fs::{File, OpenOptions};
use std::io::{BufRead as _, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use std::{fs, io};

use tokio::sync::{mpsc, oneshot};

use crate::model::{Connection, SessionId};
use crate::net::Journal;

/// How much is kept of one session.
const SESSION_BYTES: u64 = 16 << 20;
/// How much is kept of one sandbox's sessions that are over.
const SANDBOX_BYTES: u64 = 64 << 20;
/// How long the end of a session waits for its journal.
const FINISH_WITHIN: Duration = Duration::from_secs(2);
/// How many lines may wait to be written.
const QUEUE: usize = 4096;
/// A longer line is not from this journal.
const LONGEST: u64 = 64 << 10;

/// The journal of one session, being written. What is in its queue when it is dropped is still written.
#[derive(Debug)]
pub(in crate::engine) struct FileJournal {
    queue: mpsc::Sender<JournalEntry>,
    lost: AtomicU64,
}

#[derive(Debug)]
enum JournalEntry {
    Line(Box<Connection>),
    /// All before this is written: the waiting caller is notified, and no more comes.
    End(oneshot::Sender<()>),
}

impl FileJournal {
    /// Begins, or continues, the journal of a session in the sandbox's `dir`. There is no file
    /// before there is a line.
    pub(in crate::engine) fn new(dir: PathBuf, session: SessionId) -> Self {
        let (queue, waiting) = mpsc::channel(QUEUE);
        tokio::spawn(write_all(dir, session, waiting));
        Self { queue, lost: AtomicU64::new(0) }
    }

    /// Waits, but not for long, until all that came is written, and takes no more.
    pub(in crate::engine) async fn finish(&self) {
        let (told, written) = oneshot::channel();
        let end = async {
            if self.queue.send(JournalEntry::End(told)).await.is_ok() {
                let _ = written.await;
            }
        };
        if tokio::time::timeout(FINISH_WITHIN, end).await.is_err() {
            tracing::warn!("the end of a network journal was not written");
        }
    }
}

impl Journal for FileJournal {
    fn write(&self, connection: Connection) {
        if self.queue.try_send(JournalEntry::Line(Box::new(connection))).is_err() {
            let lost = self.lost.fetch_add(1, Ordering::Relaxed) + 1;
            if lost.is_power_of_two() {
                tracing::warn!(
                    lost,
                    "connections are missing in a network journal: they come faster than they can be written"
                );
            }
        }
    }
}

async fn write_all(dir: PathBuf, session: SessionId, mut waiting: mpsc::Receiver<JournalEntry>) {
    let (mut batch, mut file, mut end) = (Vec::new(), None, None);
    while end.is_none() && waiting.recv_many(&mut batch, 256).await > 0 {
        let mut lines = Vec::with_capacity(batch.len());
        for entry in batch.drain(..) {
            match entry {
                JournalEntry::Line(line) if end.is_none() => lines.push(*line),
                JournalEntry::Line(_) => {}
                JournalEntry::End(told) => end = Some(told),
            }
        }
        if lines.is_empty() {
            break;
        }
        let (dir, of, open) = (dir.clone(), session.clone(), file.take());
        let written = tokio::task::spawn_blocking(move || {
            let mut file = match open {
                Some(file) => file,
                None => begin(&dir, &of)?,
            };
            file.append(&lines)?;
            Ok::<_, io::Error>(file)
        });
        match written.await {
            Ok(Ok(given_back)) => file = Some(given_back),
            // The sandbox was deleted meanwhile. Its directory is not made again for what comes late.
            Ok(Err(error)) if error.kind() == io::ErrorKind::NotFound => {
                tracing::debug!(%session, "the end of a network journal comes after its sandbox is gone");
            }
            // It is opened again for the next lines.
            Ok(Err(error)) => tracing::warn!(%error, "a network journal could not be written"),
            // The daemon goes down.
            Err(_) => return,
        }
    }
    if let Some(told) = end {
        let _ = told.send(());
    }
}

fn begin(dir: &Path, session: &SessionId) -> io::Result<Lines> {
    match fs::create_dir(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    prune(dir, session)?;
    Lines::open(dir, session, SESSION_BYTES)
}

#[derive(Debug)]
struct Lines {
    path: PathBuf,
    file: File,
    size: u64,
    limit: u64,
}

impl Lines {
    fn open(dir: &Path, session: &SessionId, limit: u64) -> io::Result<Self> {
        let path = path(dir, session);
        let mut file =
            OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path)?;
        let mut size = file.seek(SeekFrom::End(0))?;
        if size > 0 {
            let mut last = [0];
            file.seek(SeekFrom::Current(-1))?;
            file.read_exact(&mut last)?;
            if last != *b"\n" {
                file.write_all(b"\n")?;
                size += 1;
            }
        }
        Ok(Self { path, file, size, limit })
    }

    fn append(&mut self, connections: &[Connection]) -> io::Result<()> {
        let mut text = Vec::new();
        for connection in connections {
            serde_json::to_writer(&mut text, connection)?;
            text.push(b'\n');
        }
        if self.size >= self.limit / 2 {
            fs::rename(&self.path, old(&self.path))?;
            self.file = OpenOptions::new().create_new(true).write(true).open(&self.path)?;
            self.size = 0;
        }
        self.file.write_all(&text)?;
        self.size += text.len() as u64;
        Ok(())
    }
}

fn path(dir: &Path, session: &SessionId) -> PathBuf {
    dir.join(format!("{session}.jsonl"))
}

fn old(path: &Path) -> PathBuf {
    path.with_extension("jsonl.old")
}

/// Removes the oldest journals, but the one that is to be written.
fn prune(dir: &Path, but: &SessionId) -> io::Result<()> {
    let mut kept = 0;
    for session in sessions(dir)? {
        let path = path(dir, &session);
        for file in [old(&path), path] {
            let size = fs::metadata(&file).map_or(0, |metadata| metadata.len());
            kept += size;
            if kept > SANDBOX_BYTES && session != *but && size > 0 {
                fs::remove_file(file)?;
            }
        }
    }
    Ok(())
}

/// The sessions that have a journal, newest first.
pub(in crate::engine) fn sessions(dir: &Path) -> io::Result<Vec<SessionId>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut sessions = Vec::new();
    for entry in entries {
        let name = entry?.file_name();
        let name = name.to_string_lossy();
        let stem = name.strip_suffix(".old").unwrap_or(&name).strip_suffix(".jsonl");
        sessions.extend(stem.and_then(|stem| stem.parse::<SessionId>().ok()));
    }
    // Ids sort by when they were made.
    sessions.sort_unstable_by(|a, b| b.as_str().cmp(a.as_str()));
    sessions.dedup();
    Ok(sessions)
}

/// Reads a session's journal, as it was written; `each` gets every line that reads.
pub(in crate::engine) fn read(
    dir: &Path,
    session: &SessionId,
    mut each: impl FnMut(Connection),
) -> io::Result<()> {
    let path = path(dir, session);
    for file in [old(&path), path] {
        let file = match File::open(&file) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        let mut lines = BufReader::new(file);
        let mut line = Vec::new();
        while lines.by_ref().take(LONGEST).read_until(b'\n', &mut line)? > 0 {
            if let Ok(connection) = serde_json::from_slice(&line) {
                each(connection);
            }
            line.clear();
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write as _;
    use std::path::Path;
    use std::time::Duration;

    use super::{FileJournal, Lines, old, path, read, sessions};
    use crate::model::{Connection, Protocol, SessionId, Verdict, now};
    use crate::net::Journal as _;

    fn line(session: &SessionId, id: u64) -> Connection {
        Connection {
            session: session.clone(),
            id,
            at: now(),
            ended_at: Some(now()),
            protocol: Protocol::Tcp,
            to: Some("192.0.2.1:443".parse().unwrap()),
            name: Some("example.com".to_owned()),
            verdict: Verdict::Allowed,
            rule: "allow-all".to_owned(),
            bytes_in: id,
            bytes_out: 0,
            detail: None,
        }
    }

    fn ids(dir: &Path, session: &SessionId) -> Vec<u64> {
        let mut ids = Vec::new();
        read(dir, session, |connection| ids.push(connection.id)).unwrap();
        ids
    }

    #[tokio::test]
    async fn what_is_written_is_read_again_also_after_a_crash() {
        let dir = tempfile::tempdir().unwrap();
        let session = SessionId::fresh();
        assert!(sessions(&dir.path().join("none")).unwrap().is_empty());
        for round in 0..2 {
            let journal = FileJournal::new(dir.path().to_owned(), session.clone());
            for id in 0..10 {
                journal.write(line(&session, round * 10 + id));
            }
            drop(journal);
            let wanted = (round as usize + 1) * 10;
            for _ in 0..200 {
                if ids(dir.path(), &session).len() == wanted {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            assert_eq!(ids(dir.path(), &session).len(), wanted);
            let path = path(dir.path(), &session);
            let mut file = fs::OpenOptions::new().append(true).open(path).unwrap();
            file.write_all(br#"{"session":"#).unwrap();
        }
        assert_eq!(ids(dir.path(), &session), (0..20).collect::<Vec<_>>());
        assert_eq!(sessions(dir.path()).unwrap(), [session]);
    }

    #[tokio::test]
    async fn a_deleted_sandbox_stays_deleted() {
        let home = tempfile::tempdir().unwrap();
        let (sandbox, session) = (home.path().join("sbx"), SessionId::fresh());
        for round in 0..2 {
            fs::create_dir(&sandbox).unwrap();
            let journal = FileJournal::new(sandbox.join("network"), session.clone());
            if round > 0 {
                // One that is being written already.
                journal.write(line(&session, 0));
                while ids(&sandbox.join("network"), &session).is_empty() {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            }
            fs::remove_dir_all(&sandbox).unwrap();
            journal.write(line(&session, 1));
            journal.finish().await;
            assert!(!sandbox.exists(), "round {round}");
        }
    }

    #[test]
    fn a_long_journal_keeps_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let session = SessionId::fresh();
        let mut lines = Lines::open(dir.path(), &session, 8 << 10).unwrap();
        for id in 0..1000 {
            lines.append(&[line(&session, id)]).unwrap();
        }
        let path = path(dir.path(), &session);
        let size = |path: &Path| fs::metadata(path).unwrap().len();
        assert!(size(&path) + size(&old(&path)) <= 9 << 10);
        let kept = ids(dir.path(), &session);
        assert_eq!(kept.last(), Some(&999));
        assert!(kept.len() >= 10 && kept.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{kept:?}");
    }
}
