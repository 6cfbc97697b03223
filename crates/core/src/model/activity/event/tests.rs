use super::{Event, EventData, EventFilter, EventId, EventSandbox};
use crate::model::{SandboxId, Tags, Timestamp, now};

fn event(change: EventData, tags: &[(&str, &str)]) -> Event {
    let tags: Tags =
        tags.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    let name = "app".parse().unwrap();
    Event {
        id: EventId(7),
        at: now(),
        project: Some("p".parse().unwrap()),
        sandbox: Some(EventSandbox { id: SandboxId::fresh(), name, tags }),
        change,
    }
}

#[test]
fn an_event_reads_back_as_it_was_written() {
    for change in [
        EventData::SandboxUpdated {},
        EventData::SandboxStopped { generation: 3, snapshot: None },
        EventData::EventsLost { count: 4 },
    ] {
        let event = event(change, &[("team", "a")]);
        let text = serde_json::to_string(&event).unwrap();
        assert!(text.contains(&format!("\"kind\":\"{}\"", event.change.kind())), "{text}");
        assert_eq!(serde_json::from_str::<Event>(&text).unwrap(), event);
    }
}

#[test]
fn a_filter_takes_kinds_groups_names_and_tags() {
    let stopped = event(EventData::SandboxStopped { generation: 1, snapshot: None }, &[("a", "1")]);
    let wants = |filter: EventFilter| filter.wants(&stopped);
    let kinds = |kinds: &[&str]| EventFilter {
        kinds: kinds.iter().map(|kind| (*kind).to_owned()).collect(),
        ..EventFilter::default()
    };
    assert!(wants(EventFilter::default()));
    assert!(wants(kinds(&["sandbox"])) && wants(kinds(&["command", "sandbox.stopped"])));
    assert!(!wants(kinds(&["command"])) && !wants(kinds(&["sandbox.start"])));
    let named =
        |name: &str| EventFilter { sandbox: Some(name.parse().unwrap()), ..EventFilter::default() };
    assert!(wants(named("app")) && !wants(named("other")));
    let tagged = |value: &str| EventFilter {
        tags: Tags::from([("a".to_owned(), value.to_owned())]),
        ..EventFilter::default()
    };
    assert!(wants(tagged("1")) && !wants(tagged("2")));
    assert!(kinds(&["command"]).wants(&event(EventData::EventsLost { count: 1 }, &[])));
    assert!(EventFilter::knows_kind("port") && !EventFilter::knows_kind("ports"));
}

#[test]
fn a_time_is_a_position() {
    let time: Timestamp = "2026-01-01T00:00:00.5Z".parse().unwrap();
    assert_eq!(EventId::at(time), EventId(1_767_225_600_500_000));
    assert_eq!("17".parse(), Ok(EventId(17)));
    for bad in ["", "-1", "+1", "1x", "99999999999999999999999"] {
        assert!(bad.parse::<EventId>().is_err(), "{bad}");
    }
}
