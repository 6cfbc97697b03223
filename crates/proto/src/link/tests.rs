use super::{Done, Exit, Reply, Request};

/// The lines of `docs/formats/agent-link.md`, so that the page stays true.
#[test]
fn the_worked_example_is_what_is_said() {
    let page = include_str!("../../../../docs/formats/agent-link.md");
    let mut seen = 0;
    for line in page.lines() {
        let mut words = line.splitn(4, ' ');
        let (Some(">" | "<"), Some(_), Some(kind), Some(rest)) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            continue;
        };
        let json = rest.trim_start();
        let again = match kind {
            "Open" => again::<Request>(json),
            "Reply" => again::<Reply>(json),
            "Done" => again::<Done>(json),
            _ => continue,
        };
        let plain: serde_json::Value = serde_json::from_str(json).expect("JSON");
        assert_eq!(again, plain, "{line}");
        seen += 1;
    }
    assert_eq!(seen, 21);
}

fn again<T: serde::de::DeserializeOwned + serde::Serialize>(json: &str) -> serde_json::Value {
    let word: T = serde_json::from_str(json).unwrap_or_else(|error| panic!("{json}: {error}"));
    serde_json::to_value(word).expect("plain")
}

#[test]
fn what_is_not_asked_for_is_refused() {
    for bad in ["{}", "{\"op\":\"dance\"}", "{\"op\":\"hello\",\"version\":1,\"more\":2}"] {
        assert!(serde_json::from_str::<Request>(bad).is_err(), "{bad}");
    }
    let exited = Done::Exited(Exit::by_signal(9));
    let json = serde_json::to_string(&exited).expect("plain");
    assert_eq!(json, "{\"done\":\"exited\",\"code\":137,\"signal\":9}");
    assert_eq!(serde_json::from_str::<Done>(&json).expect("of an older agent"), exited);
}
