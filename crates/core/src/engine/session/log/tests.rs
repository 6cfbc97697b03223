use std::io::Write as _;

use std::path::Path;
use std::sync::Arc;

use super::{LogBudget, LogReader, LogStream, LogWriter, Piece};

fn open(path: &Path, limit: u64) -> LogWriter {
    LogWriter::open(path, limit, &LogBudget::new(limit, &Arc::default()))
}

fn on_disk(path: &Path) -> u64 {
    super::files(path).iter().map(|path| super::length(path)).sum()
}

#[test]
fn a_reader_begins_at_any_byte() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let mut writer = open(&path, 1 << 20);
    writer.append(LogStream::Out, b"abc");
    writer.append(LogStream::Err, b"def");
    for offset in 0..=8u64 {
        let mut reader = LogReader::new(path.clone(), offset);
        let (text, gaps) = read_with_gaps(&mut reader);
        assert_eq!(text, "abcdef"[offset.min(6) as usize..]);
        assert_eq!(gaps, Vec::<u64>::new());
        assert_eq!(reader.missing_at_end(6), None);
    }
}

/// What is kept, and how long each gap in it is.
fn read_with_gaps(reader: &mut LogReader) -> (String, Vec<u64>) {
    let (mut text, mut gaps) = (String::new(), Vec::new());
    while let Some(piece) = reader.next().unwrap() {
        match piece {
            Piece::Record(record) => text.push_str(&String::from_utf8_lossy(&record.bytes)),
            Piece::Gap(bytes) => gaps.push(bytes),
        }
    }
    (text, gaps)
}

fn read(reader: &mut LogReader) -> String {
    let (text, gaps) = read_with_gaps(reader);
    assert_eq!(gaps, [0; 0], "nothing is missing");
    text
}

#[test]
fn what_is_printed_is_read_again_also_while_it_grows() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("c.log");
    let mut writer = open(&path, 1 << 20);
    let mut reader = LogReader::new(path.clone(), 0);
    writer.append(LogStream::Out, b"one ");
    writer.append(LogStream::Err, b"two ");
    assert_eq!(read(&mut reader), "one two ");
    writer.append(LogStream::Out, b"three");
    assert_eq!(read(&mut reader), "three");
    assert_eq!(read(&mut LogReader::new(path, 0)), "one two three");
}

#[test]
fn a_long_log_keeps_its_beginning_and_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("c.log");
    let mut writer = open(&path, 4096);
    let mut follower = LogReader::new(path.clone(), 0);
    let mut followed = String::new();
    for line in 0..1000 {
        writer.append(LogStream::Out, format!("line {line}\n").as_bytes());
        followed.push_str(&read(&mut follower));
    }
    let (text, gaps) = read_with_gaps(&mut LogReader::new(path.clone(), 0));
    assert!(text.starts_with("line 0\nline 1\n") && text.ends_with("line 999\n"), "{text}");
    assert_eq!(gaps, [writer.offset() - text.len() as u64], "one, and of all that is missing");
    // A reader that has the beginning and is not too late misses nothing.
    let late = writer.offset() - "line 998\nline 999\n".len() as u64;
    assert_eq!(read(&mut LogReader::new(path.clone(), late)), "line 998\nline 999\n");
    assert!(writer.truncated());
    assert!(followed.ends_with("line 998\nline 999\n"));
    assert_eq!(followed.lines().count(), 1000, "a reader that keeps up misses nothing");
    let size = on_disk(&path);
    assert!(size <= 4096 + 64, "{size}");
}

#[test]
fn what_is_missing_at_the_end_is_told_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("c.log");
    open(&path, 1 << 20).append(LogStream::Out, b"kept");
    let mut reader = LogReader::new(path, 0);
    assert_eq!(read(&mut reader), "kept");
    assert_eq!(reader.missing_at_end(4), None);
    assert_eq!((reader.missing_at_end(9), reader.missing_at_end(9)), (Some(5), None));
    assert_eq!(reader.missing_at_end(0), None, "of a command that was lost no count is known");
}

#[test]
fn half_a_record_left_by_a_crash_is_cut_off() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("c.log");
    let mut writer = open(&path, 1 << 20);
    writer.append(LogStream::Out, b"whole");
    drop(writer);
    std::fs::OpenOptions::new()
        .append(true)
        .open(&path)
        .unwrap()
        .write_all(&[1, 0, 0, 0, 9, 0, 0])
        .unwrap();
    let mut writer = open(&path, 1 << 20);
    assert_eq!(writer.offset(), 5);
    writer.append(LogStream::Out, b", again");
    assert_eq!(read(&mut LogReader::new(path, 0)), "whole, again");
}

#[test]
fn logs_of_running_commands_share_what_they_may_take() {
    const MOST: u64 = 1 << 20;
    const LOGS: usize = 16;
    let dir = tempfile::tempdir().unwrap();
    let budget = LogBudget::of(MOST);
    let path = |number: usize| dir.path().join(format!("{number}.log"));
    let mut writers: Vec<_> =
        (0..LOGS).map(|number| LogWriter::open(&path(number), MOST / 4, &budget)).collect();
    let line = [b'x'; 999];
    for writer in &mut writers {
        for _ in 0..400 {
            writer.append(LogStream::Out, &line);
        }
        writer.append(LogStream::Out, b"the end");
    }
    let sizes: Vec<u64> = (0..LOGS).map(|number| on_disk(&path(number))).collect();
    let sum: u64 = sizes.iter().sum();
    assert_eq!(sum, budget.used());
    assert!(
        sum <= MOST + LOGS as u64 * crate::engine::session::log::budget::SHORTEST,
        "{sum} of {MOST}: {sizes:?}"
    );
    assert!(sizes[0] > MOST / 5 && sizes[1] > MOST / 8, "{sizes:?}");
    for (number, writer) in writers.iter().enumerate() {
        assert!(writer.truncated());
        let (text, gaps) = read_with_gaps(&mut LogReader::new(path(number), 0));
        assert!(text.starts_with("xxx") && text.ends_with("the end"), "{number}");
        assert_eq!(gaps, [writer.offset() - text.len() as u64], "{number}: it is told");
    }
    // A long log is shortened when its command prints more; one that ends makes room.
    for _ in 0..400 {
        writers[0].append(LogStream::Out, &line);
    }
    assert!(on_disk(&path(0)) <= sizes[0]);
    drop(writers.split_off(1));
    assert_eq!(budget.used(), on_disk(&path(0)));
    // An earlier daemon's log counts from the beginning.
    drop(writers);
    assert_eq!(budget.used(), 0);
    let again = LogWriter::open(&path(0), MOST / 4, &budget);
    assert_eq!(budget.used(), on_disk(&path(0)));
    drop(again);
}

/// A disk that does not answer: whatever a log waits for, the only worker thread continues with
/// other tasks.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_log_on_a_disk_that_hangs_stops_nobody_else() {
    let (answer, disk) = std::sync::mpsc::channel::<()>();
    let (begun, begins) = tokio::sync::oneshot::channel();
    let hanging = tokio::spawn(async move {
        let _turn = super::WRITING.acquire().await;
        super::beside(move || {
            let _ = begun.send(());
            disk.recv()
        })
    });
    begins.await.unwrap();
    let other = tokio::spawn(async {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.log");
        let mut writer =
            LogWriter::open_in_turn(&path, 4096, &LogBudget::new(4096, &Arc::default())).await;
        writer.append_in_turn(LogStream::Out, b"line").await;
        LogReader::new(path, 0).next_in_turn().await.unwrap()
    });
    let patience = std::time::Duration::from_secs(20);
    let read = tokio::time::timeout(patience, other).await.expect("it goes on").unwrap();
    assert!(matches!(read, Some(Piece::Record(record)) if record.bytes == "line"));
    answer.send(()).unwrap();
    hanging.await.unwrap().unwrap();
}

/// Logs wait for the disk a few at a time, and without a thread until it is their turn.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_log_waits_for_its_turn_to_be_opened() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("c.log");
    let all = u32::try_from(super::AT_ONCE).unwrap();
    let taken = super::WRITING.acquire_many(all).await.unwrap();
    let opening = tokio::spawn({
        let path = path.clone();
        async move { LogWriter::open_in_turn(&path, 4096, &LogBudget::new(4096, &Arc::default())).await }
    });
    let moment = std::time::Duration::from_millis(100);
    tokio::time::sleep(moment).await;
    assert!(!opening.is_finished() && !path.exists(), "it waits");
    drop(taken);
    opening.await.unwrap();
    assert!(path.exists());
    let taken = super::READING.acquire_many(all).await.unwrap();
    let read = tokio::time::timeout(moment, super::last_records(path.clone(), 1)).await;
    assert!(read.is_err(), "reading waits too");
    drop(taken);
    super::last_records(path, 1).await;
}
