//! Pausing, forking several, what becomes of idle sandboxes, and why they are where they are.
//!
//! What machines with memory do is tried with real ones in `crates/cli/tests/e2e/microvm.rs`; here are the words.

use std::collections::BTreeMap;

use hyper::{Method, StatusCode};
use sandkeep_core::engine::{Absent, Settings};

use crate::fixture::Served;

const SANDBOXES: &str = "/v1/sandboxes";

#[tokio::test]
async fn a_driver_this_host_cannot_use_says_what_is_missing_and_what_fixes_it() {
    let reason = "no kernel is prepared for machines".to_owned();
    let absent = Absent { reason, fix: Some("run `keep microvm setup`".to_owned()) };
    let settings =
        Settings { absent_drivers: BTreeMap::from([("microvm", absent)]), ..Settings::default() };
    let served = Served::settled(settings).await;
    served.create("box").await;
    let create = r#"{"name":"m","image":"small","driver":"microvm"}"#;
    let change = r#"{"driver":"microvm"}"#;
    for answer in [
        served.post(SANDBOXES, &served.write, create).await,
        served.json(Method::PATCH, "/v1/sandboxes/box", &served.write, change).await,
    ] {
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{answer:?}");
        let error = answer.error();
        assert_eq!(error.code, "driver_not_available");
        assert!(error.message.contains("no kernel is prepared for machines"), "{error:?}");
        assert_eq!(error.hint.as_deref(), Some("run `keep microvm setup`"));
    }
    let there = served.get("/v1/sandboxes/m", &served.read).await;
    assert_eq!(there.status, StatusCode::NOT_FOUND, "nothing was made");
}

#[tokio::test]
async fn sandboxes_that_name_no_driver_get_the_servers() {
    let settings = Settings { default_driver: "warp".to_owned(), ..Settings::default() };
    let served = Served::settled(settings).await;
    let answer = served.post(SANDBOXES, &served.write, r#"{"image":"small"}"#).await;
    assert_eq!(answer.error().code, "unknown_driver", "{answer:?}");
    let asked = r#"{"name":"box","image":"small","driver":"container","start":false}"#;
    let answer = served.post(SANDBOXES, &served.write, asked).await;
    assert_eq!(answer.status, StatusCode::CREATED, "{answer:?}");
    assert_eq!(answer.json()["sandbox"]["driver"], "container");
}

#[tokio::test]
async fn what_becomes_of_an_idle_sandbox_is_set_shown_and_taken_back() {
    let served = Served::without_machines().await;
    let create = r#"{"name":"box","image":"small","start":false,"on_idle":"run"}"#;
    let made = served.post(SANDBOXES, &served.write, create).await;
    assert_eq!(made.json()["sandbox"]["on_idle"], "run", "{made:?}");
    for (change, shown) in [("\"stop\"", "\"stop\""), ("null", "null")] {
        let body = format!(r#"{{"on_idle":{change}}}"#);
        let answer = served.json(Method::PATCH, "/v1/sandboxes/box", &served.write, &body).await;
        assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
        assert_eq!(answer.json()["on_idle"].to_string(), shown);
    }
}

#[tokio::test]
async fn a_sandbox_without_memory_is_not_paused_and_says_what_to_do() {
    let served = Served::without_machines().await;
    served.create("box").await;
    let answer = served.post("/v1/sandboxes/box/pause", &served.write, "").await;
    assert_eq!(answer.status, StatusCode::CONFLICT, "{answer:?}");
    let error = answer.error();
    assert_eq!(error.code, "memory_not_supported");
    assert!(error.hint.is_some_and(|hint| hint.contains("keep stop box")));
    let refused = served.post("/v1/sandboxes/box/pause", &served.read, "").await;
    assert_eq!(refused.status, StatusCode::FORBIDDEN);
}

#[tokio::test]
async fn why_is_for_readers_and_wakes_nobody() {
    let served = Served::without_machines().await;
    served.create("box").await;
    let answer = served.get("/v1/sandboxes/box/why", &served.read).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    let why = answer.json();
    assert_eq!(why["state"], "stopped");
    assert!(why["reason"].as_str().is_some_and(|reason| !reason.is_empty()), "{why}");
    assert!(!why["waking"].as_array().unwrap().is_empty(), "{why}");
    let foreign = served.get("/v1/sandboxes/box/why", &served.foreign).await;
    assert_eq!(foreign.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn several_forks_of_one_sandbox_are_numbered() {
    const TEST: &str = "several_forks_of_one_sandbox_are_numbered";
    let Some(served) = Served::with_machines(TEST).await else { return };
    served.create("box").await;
    let run = r#"{"argv":["sh","-c","echo here > /work/f"]}"#;
    let ran = served.post("/v1/sandboxes/box/exec", &served.write, run).await;
    assert_eq!(ran.status, StatusCode::OK, "{ran:?}");
    let body = r#"{"name":"try","count":3}"#;
    let answer = served.post("/v1/sandboxes/box/fork", &served.write, body).await;
    assert_eq!(answer.status, StatusCode::CREATED, "{answer:?}");
    let forks = answer.json();
    assert_eq!(forks["failed"].as_array().unwrap().len(), 0, "{forks}");
    let made = forks["made"].as_array().unwrap();
    let names: Vec<&str> =
        made.iter().map(|fork| fork["sandbox"]["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["try-1", "try-2", "try-3"]);
    let snapshots: Vec<String> =
        made.iter().map(|fork| fork["sandbox"]["current_snapshot"].to_string()).collect();
    assert!(
        snapshots.iter().all(|one| *one == snapshots[0]),
        "one snapshot for all: {snapshots:?}"
    );
    let found = served.get("/v1/sandboxes/try-3/files?path=/work/f", &served.write).await;
    assert_eq!(&found.body[..], b"here\n");
    // Of one without a count the answer is what it always was.
    let one = served.post("/v1/sandboxes/box/fork", &served.write, r#"{"name":"one"}"#).await;
    assert_eq!(one.json()["sandbox"]["name"], "one");
}
