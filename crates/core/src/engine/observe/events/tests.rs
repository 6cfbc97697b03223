use std::time::Duration;

use super::{EventFeed, QUEUE, line_of, truncated};
use crate::model::{Event, EventData, EventId, Name};
use crate::store::{EventSource, read_events};

fn failed() -> EventData {
    EventData::SandboxFailed { reason: "x".to_owned() }
}

fn read(dir: &std::path::Path, source: &EventSource) -> Vec<Event> {
    let range = (EventId(0), EventId(u64::MAX));
    read_events(dir, source, None, range, u64::MAX).unwrap().events
}

#[tokio::test]
async fn ids_increase_over_restarts() {
    let dir = tempfile::tempdir().unwrap();
    let project: Name = "p".parse().unwrap();
    for _ in 0..3 {
        let feed = EventFeed::start(dir.path().into()).await;
        for _ in 0..10 {
            feed.emit(Some(&project), None, failed());
        }
        feed.finish().await;
    }
    let all = read(dir.path(), &EventSource::Project(project));
    assert_eq!(all.len(), 30);
    assert!(all.windows(2).all(|pair| pair[0].id < pair[1].id));
}

#[tokio::test]
async fn what_does_not_fit_is_counted_and_told() {
    let dir = tempfile::tempdir().unwrap();
    let feed = EventFeed::start(dir.path().into()).await;
    // The task that writes does not run before this one waits.
    for _ in 0..QUEUE + 50 {
        feed.emit(None, None, failed());
    }
    feed.finish().await;
    feed.emit(None, None, failed());
    feed.finish().await;
    let all = read(dir.path(), &EventSource::Host);
    let lost: Vec<u64> = all
        .iter()
        .filter_map(|event| match event.change {
            EventData::EventsLost { count } => Some(count),
            _ => None,
        })
        .collect();
    assert_eq!((all.len(), lost), (QUEUE + 2, vec![50]));
}

#[tokio::test]
async fn a_journal_that_cannot_be_written_holds_nobody_up() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("events");
    std::fs::write(&file, "in the way").unwrap();
    let feed = EventFeed::start(file).await;
    feed.emit(None, None, failed());
    tokio::time::timeout(Duration::from_secs(1), feed.finish()).await.unwrap();
}

#[test]
fn texts_are_bounded() {
    assert_eq!(truncated("short"), "short");
    assert!(truncated(&"ä".repeat(10_000)).chars().count() <= 501);
    let argv: Vec<String> = (0..100_000).map(|number| number.to_string()).collect();
    let line = line_of(&argv);
    assert!(line.starts_with("0 1 2 3") && line.chars().count() <= 501, "{}", line.len());
}
