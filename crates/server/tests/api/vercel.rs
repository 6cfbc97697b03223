//! The front for Vercel's clients, where no client makes it visible: tokens, projects, refusals.

use std::sync::atomic::{AtomicUsize, Ordering};

use hyper::{Method, StatusCode};
use sandkeep_core::model::{Name, Scope, Span};
use serde_json::{Value, json};

use crate::fixture::{Answer, Served, key};

async fn token(served: &Served, key: &str, more: &str) -> String {
    let body = format!(r#"{{"for":"vercel"{more}}}"#);
    let made = served.post("/v1/tokens", key, &body).await;
    assert_eq!(made.status, StatusCode::OK, "{made:?}");
    made.json()["token"].as_str().unwrap().to_owned()
}

fn refusal(answer: &Answer) -> (u16, String) {
    let error = &answer.json()["error"];
    assert!(error["message"].is_string(), "{answer:?}");
    (answer.status.as_u16(), error["code"].as_str().unwrap().to_owned())
}

fn says(answer: &Answer, status: u16, code: &str) {
    assert_eq!(refusal(answer), (status, code.to_owned()), "{answer:?}");
}

#[tokio::test]
async fn a_token_speaks_for_its_key_and_ends_with_it() {
    let served = Served::without_machines().await;
    let project: Name = "main".parse().unwrap();
    let (made, secret) =
        served.engine.create_key(&project, "mine".to_owned(), Scope::Write, None).await.unwrap();
    let token = token(&served, &secret, "").await;
    assert_eq!(served.get("/api/v2/sandboxes", &token).await.status, StatusCode::OK);
    assert_eq!(served.get("/v1/whoami", &token).await.json()["key"], made.id.as_str());
    served.engine.revoke_key(&project, &made.id).await.unwrap();
    says(&served.get("/api/v2/sandboxes", &token).await, 401, "unauthorized");
}

#[tokio::test]
async fn a_token_reaches_no_further_than_its_key() {
    let served = Served::without_machines().await;
    // Asked for more than the key has.
    let reader = token(&served, &served.read, r#","scope":"admin""#).await;
    says(&served.post("/api/v2/sandboxes", &reader, "{}").await, 403, "forbidden");
    assert_eq!(served.get("/api/v2/sandboxes", &reader).await.status, StatusCode::OK);
    // Asked for less.
    let narrow = token(&served, &served.write, r#","scope":"read""#).await;
    says(&served.post("/api/v2/sandboxes", &narrow, "{}").await, 403, "forbidden");
    // Expired, forged, cut short.
    let short = token(&served, &served.write, r#","expires":"1s""#).await;
    tokio::time::sleep(std::time::Duration::from_millis(2100)).await;
    for bad in [short.as_str(), &reader[..reader.len() - 2], "a.b.c", "..", "nonsense", ""] {
        says(&served.get("/api/v2/sandboxes", bad).await, 401, "unauthorized");
    }
    let refused = served.post("/v1/tokens", &served.write, r#"{"for":"nobody"}"#).await;
    assert_eq!(refused.status, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn a_token_cannot_make_one_that_lasts_longer() {
    let served = Served::without_machines().await;
    let short = token(&served, &served.write, r#","expires":"2s""#).await;
    let heir = token(&served, &short, r#","expires":"30d""#).await;
    assert_eq!(served.get("/api/v2/sandboxes", &heir).await.status, StatusCode::OK);
    tokio::time::sleep(std::time::Duration::from_millis(2100)).await;
    says(&served.get("/api/v2/sandboxes", &heir).await, 401, "unauthorized");
}

#[tokio::test]
async fn the_token_decides_the_project() {
    let served = Served::without_machines().await;
    let write = token(&served, &served.write, "").await;
    for fine in [
        "/api/v2/sandboxes?teamId=team_sandkeep&project=prj_main",
        "/v2/sandboxes?project=main",
        "/v2/sandboxes?project=vercel-sandbox-default-project",
        "/v2/sandboxes",
    ] {
        assert_eq!(served.get(fine, &write).await.status, StatusCode::OK, "{fine}");
    }
    says(&served.get("/v2/sandboxes?project=prj_other", &write).await, 403, "forbidden");
    says(&served.get("/v2/sandboxes?teamId=team_else", &write).await, 403, "forbidden");
    let body = r#"{"projectId":"prj_other","ports":[]}"#;
    says(&served.post("/v3/sandboxes", &write, body).await, 403, "forbidden");
    // An admin's key may name any project there is.
    let admin = &served.admin;
    assert_eq!(served.get("/v2/sandboxes?project=prj_other", admin).await.status, StatusCode::OK);
    says(&served.get("/v2/sandboxes?project=nowhere", admin).await, 404, "not_found");
    // The account as the CLI looks it up.
    let user = served.get("/api/v2/user", &write).await.json();
    assert_eq!(user["user"]["defaultTeamId"], "team_sandkeep");
    let team = served.get("/api/v2/teams/team_sandkeep", &write).await.json();
    assert_eq!(team["slug"], "sandkeep");
    let path = "/api/v2/projects/vercel-sandbox-default-project?teamId=team_sandkeep";
    assert_eq!(served.get(path, &write).await.json()["id"], "prj_main");
    says(&served.get("/api/v2/projects/other", &write).await, 403, "forbidden");
    says(&served.get("/api/v2/nothing", &write).await, 404, "not_found");
}

/// A body for create, and what the refusal must name.
const BAD_CREATES: [(&str, &str); 31] = [
    (r#"{"name":"a b"}"#, "name"),
    (r#"{"name":7}"#, "name"),
    (r#"{"ports":[80]}"#, "ports"),
    (r#"{"ports":["3000"]}"#, "ports"),
    (r#"{"ports":[3000,3000]}"#, "ports"),
    (r#"{"timeout":10}"#, "timeout"),
    (r#"{"timeout":"5m"}"#, "timeout"),
    (r#"{"timeout":-1}"#, "timeout"),
    (r#"{"timeout":99999999999}"#, "timeout"),
    (r#"{"resources":{"vcpus":3}}"#, "vcpus"),
    (r#"{"resources":{"vcpus":0}}"#, "vcpus"),
    (r#"{"resources":7}"#, "resources"),
    (r#"{"env":{"A":1}}"#, "env.A"),
    (r#"{"env":{"A=B":"1"}}"#, "env"),
    (r#"{"tags":{"a":"1","b":"1","c":"1","d":"1","e":"1","f":"1"}}"#, "tags"),
    (r#"{"snapshotExpiration":1000}"#, "snapshotExpiration"),
    (r#"{"keepLastSnapshots":{"count":0}}"#, "keepLastSnapshots.count"),
    (r#"{"keepLastSnapshots":{}}"#, "keepLastSnapshots.count"),
    (r#"{"networkPolicy":{"allow":["exam ple.com"]}}"#, "networkPolicy.allow[0]"),
    (r#"{"networkPolicy":{"allow":{"a.com":[{}]}}}"#, "networkPolicy.allow.a.com[0]"),
    (r#"{"networkId":"net_1"}"#, "networkId"),
    (r#"{"region":"fra1","failoverRegions":["sfo1","fra1"]}"#, "failoverRegions"),
    (r#"{"failoverRegions":["iad1"]}"#, "failoverRegions"),
    (r#"{"source":{"type":"svn","url":"https://x"}}"#, "source.type"),
    (r#"{"source":{"type":"git","url":"git@x:y"}}"#, "source.url"),
    (r#"{"source":{"type":"git","url":"https://u:p@x/y"}}"#, "source.url"),
    (r#"{"source":{"type":"git","url":"https://x/y","password":"p"}}"#, "source.username"),
    (r#"{"source":{"type":"tarball","url":"https://x/y","depth":1}}"#, "source.depth"),
    (r#"{"mounts":{"relative":{"drive":"d"}}}"#, "mounts"),
    (r#"{"surprise":1}"#, "surprise"),
    (r#"[1]"#, "object"),
];

#[tokio::test]
async fn what_is_wrong_with_a_create_is_said_by_name() {
    let served = Served::without_machines().await;
    for (body, named) in BAD_CREATES {
        let answer = served.post("/api/v2/sandboxes", &served.write, body).await;
        says(&answer, 400, "bad_request");
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(named), "{body}: {message}");
    }
    let many: Vec<u16> = (3000..3016).collect();
    let body = json!({ "ports": many }).to_string();
    let answer = served.post("/api/v3/sandboxes", &served.write, &body).await;
    let message = &answer.json()["error"]["message"];
    assert_eq!(message, "Invalid request: `ports` should NOT have more than 15 items.");
    let answer = served.post("/api/v3/sandboxes", &served.write, r#"{"ports":[26661]}"#).await;
    says(&answer, 400, "reserved_port");
    let answer = served.post("/api/v4/sandboxes", &served.write, r#"{"runtime":"node24"}"#).await;
    says(&answer, 400, "bad_request");
    let source = r#"{"source":{"type":"snapshot","snapshotId":"snap_nothing"}}"#;
    says(&served.post("/api/v2/sandboxes", &served.write, source).await, 404, "not_found");
    // Nothing was made on the way.
    assert_eq!(served.get("/v1/sandboxes", &served.write).await.json()["items"], json!([]));
}

#[tokio::test]
async fn lists_refuse_what_makes_no_sense() {
    let served = Served::without_machines().await;
    for query in [
        "limit=0",
        "limit=51",
        "limit=x",
        "sortBy=size",
        "sortOrder=up",
        "namePrefix=a",
        "sortBy=name&status=running",
        "status=asleep",
        "tags=nocolon",
        "tags=a:1&tags=a:2",
        "cursor=garbage",
    ] {
        let answer = served.get(&format!("/api/v2/sandboxes?{query}"), &served.read).await;
        says(&answer, 400, "bad_request");
    }
    says(&served.get("/api/v2/sandboxes/none", &served.read).await, 404, "not_found");
    says(&served.get("/api/v2/sandboxes/a%20b", &served.read).await, 404, "not_found");
    for id in ["sbx_nothing", "sbx_sk01k00000000000000000000000", "x"] {
        let answer = served.get(&format!("/api/v2/sandboxes/sessions/{id}"), &served.read).await;
        says(&answer, 404, "not_found");
    }
    says(&served.get("/api/v2/sandboxes/snapshots/tree", &served.read).await, 400, "bad_request");
}

async fn create(served: &Served, body: Value) -> Value {
    let made = served.post("/api/v3/sandboxes", &served.write, &body.to_string()).await;
    assert_eq!(made.status, StatusCode::OK, "{made:?}");
    made.json()
}

fn session(answer: &Value) -> String {
    format!("/api/v2/sandboxes/sessions/{}", answer["session"]["id"].as_str().unwrap())
}

#[tokio::test]
async fn a_session_that_is_over_is_gone_to_all_but_lookers() {
    let Some(served) = Served::with_machines("a_session_that_is_over").await else { return };
    let made = create(&served, json!({ "name": "box", "image": "small" })).await;
    let path = session(&made);
    let key = &served.write;
    let stopped = served.post(&format!("{path}/stop"), key, "").await.json();
    assert_eq!(stopped["session"]["status"], "stopped");
    assert!(stopped["snapshot"]["id"].as_str().unwrap().starts_with("snap_"));
    assert_eq!(stopped["sandbox"]["currentSnapshotId"], stopped["snapshot"]["id"]);
    // Again is no mistake, and answers the same.
    let again = served.post(&format!("{path}/stop"), key, "{}").await;
    assert_eq!(
        (again.status, &again.json()["session"]["id"]),
        (StatusCode::OK, &made["session"]["id"])
    );
    assert_eq!(again.json()["snapshot"]["id"], stopped["snapshot"]["id"]);
    for (what, body) in [
        ("extend-timeout", r#"{"duration":1000}"#),
        ("network-policy", r#"{"mode":"deny-all"}"#),
        ("snapshot", "{}"),
    ] {
        let answer = served.post(&format!("{path}/{what}"), key, body).await;
        says(&answer, 410, "sandbox_stopped");
    }
    let seen = served.get(&path, &served.read).await.json();
    assert_eq!(seen["session"]["status"], "stopped");
    // Nothing is null: their clients refuse a whole answer for one.
    assert!(!seen.to_string().contains("null"), "{seen}");
    // Another project does not learn that it exists.
    says(&served.get(&path, &served.foreign).await, 404, "not_found");
    let snapshot = stopped["snapshot"]["id"].as_str().unwrap();
    let path = format!("/api/v2/sandboxes/snapshots/{snapshot}");
    says(&served.get(&path, &served.foreign).await, 404, "not_found");
    says(&served.call(Method::DELETE, &path, &served.foreign).await, 404, "not_found");
    served.call(Method::DELETE, "/v1/sandboxes/box", key).await;
}

#[tokio::test]
async fn what_keeps_nothing_cannot_be_resumed_until_it_kept_something() {
    let Some(served) = Served::with_machines("what_keeps_nothing").await else { return };
    let key = &served.write;
    let body = json!({ "name": "box", "image": "small", "persistent": false });
    let made = create(&served, body).await;
    let stopped = served.post(&format!("{}/stop", session(&made)), key, "").await.json();
    assert!(stopped.get("snapshot").is_none(), "{stopped}");
    let resume = "/api/v2/sandboxes/box?resume=true";
    says(&served.get(resume, key).await, 410, "snapshot_not_found");
    served.call(Method::DELETE, "/api/v2/sandboxes/box", key).await;

    let made =
        create(&served, json!({ "name": "box", "image": "small", "persistent": false })).await;
    let taken = served.post(&format!("{}/snapshot", session(&made)), key, "{}").await;
    assert_eq!(taken.status, StatusCode::CREATED, "{taken:?}");
    assert_eq!(taken.json()["snapshot"]["creationMethod"], "manual");
    assert_eq!(taken.json()["session"]["status"], "stopped");
    let resumed = served.get(resume, key).await.json();
    assert_eq!(resumed["resumed"], true, "{resumed}");
    assert_eq!(resumed["session"]["sourceSnapshotId"], taken.json()["snapshot"]["id"]);
    assert_eq!(served.get(resume, key).await.json()["resumed"], false);

    // A snapshot that need not stop the session.
    let running = served.get("/api/v2/sandboxes/box", key).await.json();
    let live =
        served.post(&format!("{}/snapshot?keepRunning=true", session(&running)), key, "").await;
    assert_eq!(live.json()["session"]["status"], "running", "{live:?}");
    let now = served.get("/api/v2/sandboxes/box", key).await.json();
    assert_eq!(now["sandbox"]["currentSnapshotId"], live.json()["snapshot"]["id"]);
    assert_eq!(now["session"]["id"], running["session"]["id"]);
    served.call(Method::DELETE, "/v1/sandboxes/box", key).await;
}

#[tokio::test]
async fn snapshots_outlive_their_sandbox_unless_told_otherwise() {
    let Some(served) = Served::with_machines("snapshots_outlive").await else { return };
    let key = &served.write;
    let made = create(&served, json!({ "name": "box", "image": "small" })).await;
    let stopped = served.post(&format!("{}/stop", session(&made)), key, "").await.json();
    let snapshot = stopped["snapshot"]["id"].clone();
    let gone = served.call(Method::DELETE, "/api/v2/sandboxes/box", key).await;
    assert_eq!(gone.json()["sandbox"]["name"], "box", "{gone:?}");
    says(&served.call(Method::DELETE, "/api/v2/sandboxes/box", key).await, 404, "not_found");
    let source = json!({ "type": "snapshot", "snapshotId": snapshot });
    let heir = create(&served, json!({ "name": "heir", "source": source })).await;
    assert_eq!(heir["session"]["sourceSnapshotId"], snapshot);
    let path = "/api/v2/sandboxes/heir?deleteOrphanSnapshots=true";
    assert_eq!(served.call(Method::DELETE, path, key).await.status, StatusCode::OK);
    let path = format!("/api/v2/sandboxes/snapshots/{}", snapshot.as_str().unwrap());
    let deleted = served.call(Method::DELETE, &path, key).await.json();
    assert_eq!(deleted["snapshot"]["status"], "deleted");
    let source = json!({ "source": { "type": "snapshot", "snapshotId": snapshot } }).to_string();
    let refused = served.post("/api/v2/sandboxes", key, &source).await;
    says(&refused, 410, "snapshot_not_found");
}

#[tokio::test]
async fn time_is_added_exactly_and_within_bounds() {
    let Some(served) = Served::with_machines("time_is_added").await else { return };
    let key = &served.write;
    let made = create(&served, json!({ "name": "box", "image": "small", "timeout": 60_000 })).await;
    assert_eq!(made["session"]["timeout"], 60_000);
    let path = format!("{}/extend-timeout", session(&made));
    let more = served.post(&path, key, r#"{"duration":1500}"#).await.json();
    assert_eq!(more["session"]["timeout"], 61_500);
    says(&served.post(&path, key, r#"{"duration":999}"#).await, 400, "bad_request");
    says(&served.post(&path, key, "{}").await, 400, "bad_request");
    let far = served.post(&path, key, r#"{"duration":90000000}"#).await;
    says(&far, 400, "sandbox_timeout_invalid");
    // A change of the sandbox is for the sessions to come.
    let patch = r#"{"timeout":120000}"#;
    let changed = served.json(Method::PATCH, "/api/v2/sandboxes/box", key, patch).await.json();
    assert_eq!(changed["sandbox"]["timeout"], 120_000, "{changed}");
    let seen = served.get("/api/v2/sandboxes/box", key).await.json();
    assert_eq!(seen["session"]["timeout"], 61_500);
    served.call(Method::DELETE, "/v1/sandboxes/box", key).await;
}

#[tokio::test]
async fn an_expired_key_makes_no_tokens() {
    let served = Served::without_machines().await;
    let project: Name = "main".parse().unwrap();
    let short = key(&served.engine, &project, Scope::Write, Some(Span(1500))).await;
    let token = token(&served, &short, "").await;
    tokio::time::sleep(std::time::Duration::from_millis(1600)).await;
    says(&served.get("/api/v2/sandboxes", &token).await, 401, "unauthorized");
    let late = served.post("/v1/tokens", &short, r#"{"for":"vercel"}"#).await;
    assert_eq!(late.status, StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn callers_who_want_the_same_new_sandbox_all_get_it() {
    let Some(served) = Served::with_machines("callers_who_want_the_same").await else { return };
    let body = json!({ "name": "box", "image": "small", "ports": [] }).to_string();
    // Their client runs `onCreate` whenever its create succeeds.
    let created = AtomicUsize::new(0);
    let get_or_create = async || {
        let found = served.get("/api/v2/sandboxes/box", &served.write).await;
        if found.status == StatusCode::OK {
            return found;
        }
        says(&found, 404, "not_found");
        created.fetch_add(1, Ordering::SeqCst);
        served.post("/api/v3/sandboxes", &served.write, &body).await
    };
    let answers = futures_util::future::join_all((0..20).map(|_| get_or_create())).await;
    assert_eq!(created.load(Ordering::SeqCst), 1, "the others wait and find it");
    let id = answers[0].json()["session"]["id"].clone();
    for answer in &answers {
        assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
        assert_eq!(answer.json()["session"]["id"], id);
    }
    // A client that creates an existing one, knowingly, gets an error.
    let again = served.post("/api/v3/sandboxes", &served.write, &body).await;
    says(&again, 400, "bad_request");
    served.call(Method::DELETE, "/v1/sandboxes/box", &served.write).await;
}

#[tokio::test]
async fn of_equal_creates_at_the_same_time_one_succeeds() {
    let Some(served) = Served::with_machines("of_equal_creates").await else { return };
    let body = json!({ "name": "box", "image": "small", "ports": [] }).to_string();
    let create = || served.post("/api/v3/sandboxes", &served.write, &body);
    let answers = futures_util::future::join_all((0..8).map(|_| create())).await;
    let made = answers.iter().filter(|answer| answer.status == StatusCode::OK);
    assert_eq!(made.count(), 1, "each would run `onCreate`: {answers:?}");
    for refused in answers.iter().filter(|answer| answer.status != StatusCode::OK) {
        says(refused, 400, "bad_request");
    }
    served.call(Method::DELETE, "/v1/sandboxes/box", &served.write).await;
}

#[tokio::test]
async fn a_slow_creator_is_waited_for() {
    let Some(served) = Served::with_machines("a_slow_creator").await else { return };
    let body = json!({ "name": "box", "image": "small", "ports": [] }).to_string();
    says(&served.get("/api/v2/sandboxes/box", &served.write).await, 404, "not_found");
    let create = async {
        tokio::time::sleep(std::time::Duration::from_millis(3_500)).await;
        served.post("/api/v3/sandboxes", &served.write, &body).await
    };
    let others = (0..4).map(|_| served.get("/api/v2/sandboxes/box", &served.write));
    let (made, others) = tokio::join!(create, futures_util::future::join_all(others));
    assert_eq!(made.status, StatusCode::OK, "{made:?}");
    for other in &others {
        assert_eq!(other.status, StatusCode::OK, "it finds what the first made: {other:?}");
    }
    served.call(Method::DELETE, "/v1/sandboxes/box", &served.write).await;
}
