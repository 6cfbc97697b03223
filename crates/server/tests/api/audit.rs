//! The audit log: what each front leaves in it, who may read it, and that changes of it are found.

use std::fs;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use http_body_util::{BodyExt as _, Full};
use hyper::{Method, StatusCode};
use hyper_util::rt::TokioIo;
use sandkeep_client::{AuditQuery, Client};
use serde_json::Value;

use crate::fixture::Served;

/// The entries of the project, or of the host.
async fn entries(served: &Served, query: &str) -> Vec<Value> {
    let answer = served.get(&format!("/v1/audit?limit=1000&{query}"), &served.admin).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    answer.json()["items"].as_array().unwrap().clone()
}

/// The entries, once there is one of this action.
async fn with_action(served: &Served, action: &str, query: &str) -> Value {
    for _ in 0..200 {
        let found = entries(served, &format!("action={action}&{query}")).await;
        if let Some(entry) = found.last() {
            return entry.clone();
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("no entry {action}: {:?}", entries(served, query).await);
}

#[tokio::test]
async fn what_is_done_is_recorded_with_who_where_and_how_it_ended() {
    let served = Served::without_machines().await;
    served.create("box").await;
    let entry = with_action(&served, "sandbox.create", "").await;
    for (field, expected) in [
        ("actor", "key"),
        ("label", "test"),
        ("front", "api"),
        ("address", "127.0.0.1"),
        ("project", "main"),
        ("target", "sandbox/box"),
        ("outcome", "done"),
    ] {
        assert_eq!(entry[field], expected, "{field}: {entry}");
    }
    assert_eq!(entry["status"], 201);
    let key = entry["key"].as_str().unwrap();
    assert!(key.starts_with("key-"), "{entry}");
    // What is refused, and what fails.
    served.call(Method::DELETE, "/v1/sandboxes/box", &served.read).await;
    let denied = with_action(&served, "sandbox.delete", "").await;
    assert_eq!((&denied["outcome"], &denied["code"]), (&"denied".into(), &"forbidden".into()));
    served.call(Method::DELETE, "/v1/sandboxes/nothing", &served.write).await;
    let failed = with_action(&served, "sandbox.delete", "target=sandbox/nothing").await;
    assert_eq!(
        (&failed["outcome"], &failed["code"], &failed["status"]),
        (&"failed".into(), &"sandbox_not_found".into(), &404.into())
    );
    // Lists are not recorded.
    served.get("/v1/sandboxes", &served.read).await;
    assert!(entries(&served, "target=route").await.is_empty());
    // By actor: the key's id.
    let by_key = entries(&served, &format!("actor={key}")).await;
    assert!(by_key.len() >= 2 && by_key.iter().all(|entry| entry["key"] == key), "{by_key:?}");
}

#[tokio::test]
async fn changes_of_keys_secrets_and_policies_are_signed_before_the_answer() {
    let served = Served::without_machines().await;
    let value = "hunter2-hunter2-hunter2";
    let body = format!(r#"{{"value":"{value}"}}"#);
    let set = served.json(Method::PUT, "/v1/secrets/TOKEN", &served.write, &body).await;
    assert!(set.status.is_success(), "{set:?}");
    let head = || {
        let path = served.data().join("audit/projects/main/head.json");
        let head: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        head["seq"].as_u64().unwrap()
    };
    let signed = head();
    let all = entries(&served, "action=secret.set").await;
    assert_eq!(all.len(), 1, "{all:?}");
    assert!(all[0]["seq"].as_u64().unwrap() <= signed, "{all:?} {signed}");
    let made = served.post("/v1/projects/other/keys", &served.admin, r#"{"scope":"read"}"#).await;
    let secret = made.json()["secret"].as_str().unwrap().to_owned();
    // In the chain of the project that it concerns, and in the host's.
    let of_host = with_action(&served, "key.create", "host=true").await;
    assert_eq!(of_host["detail"]["project"], "other", "{of_host}");
    let text =
        fs::read_to_string(served.data().join("audit/projects/other/00000000000000000001.jsonl"))
            .unwrap();
    assert!(text.contains("key.create"), "{text}");
    // Nothing that is secret is in any file.
    for chain in ["host", "projects/main", "projects/other"] {
        for entry in fs::read_dir(served.data().join("audit").join(chain)).unwrap().flatten() {
            let text = fs::read_to_string(entry.path()).unwrap();
            for hidden in [value, &secret, &served.admin, &served.write] {
                assert!(!text.contains(hidden), "{chain}: {text}");
            }
        }
    }
}

#[tokio::test]
async fn all_fronts_are_seen() {
    let served = Served::without_machines().await;
    served.create("box").await;
    // The Unix socket.
    let stream = tokio::net::UnixStream::connect(&served.socket).await.unwrap();
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let request = served.request(Method::POST, "/v1/sandboxes/box/stop", &served.write);
    let request = request.body(Full::new(Bytes::new())).unwrap();
    sender.send_request(request).await.unwrap().into_body().collect().await.unwrap();
    let stopped = with_action(&served, "sandbox.stop", "").await;
    assert_eq!((&stopped["front"], &stopped["address"]), (&"socket".into(), &Value::Null));
    // Vercel's clients, with both forms of the address.
    for prefix in ["", "/api"] {
        let path = format!("{prefix}/v2/sandboxes/gone?teamId=team_sandkeep");
        served.call(Method::DELETE, &path, &served.write).await;
        let deleted = with_action(&served, "sandbox.delete", "target=sandbox/gone").await;
        assert_eq!((&deleted["front"], &deleted["outcome"]), (&"vercel".into(), &"failed".into()));
        assert_eq!(deleted["project"], "main");
    }
    // A published port; again and again, and once in the log.
    let publish = r#"{"access":"public","wake":false}"#;
    let path = "/v1/sandboxes/box/ports/8080";
    let published = served.json(Method::PUT, path, &served.write, publish).await;
    assert!(published.status.is_success(), "{published:?}");
    let entry = with_action(&served, "port.publish", "").await;
    assert_eq!(
        (&entry["target"], &entry["detail"]["port"]),
        (&"sandbox/box".into(), &"8080".into())
    );
    for _ in 0..5 {
        served.get("/_port/main/box/8080/", "").await;
    }
    with_action(&served, "port.request", "").await;
    let reached = entries(&served, "action=port.request").await;
    assert_eq!(reached.len(), 1, "{reached:?}");
    assert_eq!(
        (&reached[0]["front"], &reached[0]["actor"], &reached[0]["target"]),
        (&"gateway".into(), &"anonymous".into(), &"sandbox/box".into())
    );
}

#[tokio::test]
async fn callers_without_a_key_are_recorded_within_bounds() {
    let served = Served::without_machines().await;
    for _ in 0..100 {
        let path = "/v1/sandboxes/box";
        let answer = served.call(Method::DELETE, path, "skp_nobody-has-this-key").await;
        assert_eq!(answer.status, StatusCode::UNAUTHORIZED);
    }
    let entry = with_action(&served, "sandbox.delete", "host=true").await;
    assert_eq!((&entry["actor"], &entry["outcome"]), (&"anonymous".into(), &"denied".into()));
    let all = entries(&served, "host=true&actor=anonymous").await;
    assert_eq!(all.len(), 60);
    assert!(!format!("{all:?}").contains("nobody-has"), "{all:?}");
}

#[tokio::test]
async fn who_may_read_it() {
    let served = Served::without_machines().await;
    for path in ["/v1/audit", "/v1/audit/verify"] {
        for (key, status) in [(&served.read, 403), (&served.write, 200), (&served.admin, 200)] {
            assert_eq!(served.get(path, key).await.status, status, "{path}");
            let host = served.get(&format!("{path}?host=true"), key).await;
            let expected = if *key == served.admin { 200 } else { 403 };
            assert_eq!(host.status, expected, "{path}");
        }
    }
    served.create("box").await;
    with_action(&served, "sandbox.create", "").await;
    let foreign = served.get("/v1/audit", &served.foreign).await.json();
    assert!(!foreign.to_string().contains("sandbox/box"), "{foreign}");
    for bad in [
        "since=yesterday",
        "until=x",
        "cursor=x",
        "limit=0",
        "format=xml",
        "follow=true&format=jsonl",
        "nothing=1",
    ] {
        let answer = served.get(&format!("/v1/audit?{bad}"), &served.write).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{bad}: {answer:?}");
    }
    let bad = served.get("/v1/audit/verify?expect=7", &served.write).await;
    assert_eq!(bad.error().code, "invalid");
}

#[tokio::test]
async fn pages_exports_and_streams_have_the_same_entries() {
    let served = Served::without_machines().await;
    for number in 0..7 {
        served.create(&format!("box-{number}")).await;
    }
    with_action(&served, "sandbox.create", "target=sandbox/box-6").await;
    let client =
        Client::new(format!("http://{}", served.address).parse().unwrap(), Some(&served.write))
            .unwrap();
    let query = AuditQuery { action: Some("sandbox".to_owned()), ..AuditQuery::default() };
    let all = client.audit(query.clone()).collect(None).await.unwrap();
    let targets: Vec<_> = all.iter().filter_map(|entry| entry.target.clone()).collect();
    let expected: Vec<_> = (0..7).map(|number| format!("sandbox/box-{number}")).collect();
    assert_eq!(targets, expected);
    // Page by page.
    let (mut cursor, mut seen) = (String::new(), Vec::new());
    loop {
        let path = format!("/v1/audit?action=sandbox&limit=3{cursor}");
        let page = served.get(&path, &served.write).await.json();
        seen.extend(
            page["items"].as_array().unwrap().iter().map(|one| one["seq"].as_u64().unwrap()),
        );
        let Some(next) = page["next"].as_str() else { break };
        cursor = format!("&cursor={next}");
    }
    assert_eq!(seen, all.iter().map(|entry| entry.seq).collect::<Vec<_>>());
    let lines = served.get("/v1/audit?action=sandbox&format=jsonl", &served.write).await;
    assert_eq!(String::from_utf8_lossy(&lines.body).lines().count(), 7);
    // From now on.
    let mut follow = client.follow_audit(query).await.unwrap();
    served.create("box-7").await;
    let next = tokio::time::timeout(Duration::from_secs(10), follow.next()).await.unwrap().unwrap();
    assert_eq!(next.target.as_deref(), Some("sandbox/box-7"));
    // From an entry on, as a browser resumes.
    let request = served
        .request(Method::GET, "/v1/audit?action=sandbox&follow=true", &served.write)
        .header("last-event-id", all[5].seq.to_string());
    let answer = served.send(request.body(Full::new(Bytes::new())).unwrap()).await;
    let mut body = answer.into_body().into_data_stream();
    let first = tokio::time::timeout(Duration::from_secs(10), body.next()).await;
    let first = first.unwrap().unwrap().unwrap();
    let text = String::from_utf8_lossy(&first);
    assert!(text.starts_with(&format!("id: {}\n", all[6].seq)), "{text}");
}

#[tokio::test]
async fn verification_names_what_was_changed() {
    let served = Served::without_machines().await;
    for number in 0..5 {
        served.create(&format!("box-{number}")).await;
    }
    let whole = served.get("/v1/audit/verify", &served.write).await.json();
    assert_eq!((&whole["intact"], &whole["chain"]), (&true.into(), &"project/main".into()));
    let (last, hash) = (whole["last"].as_u64().unwrap(), whole["last_hash"].as_str().unwrap());
    let noted = format!("/v1/audit/verify?expect={last}:{}", &hash[..12]);
    assert_eq!(served.get(&noted, &served.write).await.json()["intact"], true);
    let other = format!("/v1/audit/verify?expect={last}:0000000000");
    let other = served.get(&other, &served.write).await.json();
    assert_eq!((&other["intact"], &other["found"]), (&false.into(), &1.into()));
    let path = served.data().join("audit/projects/main/00000000000000000001.jsonl");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replacen("sandbox/box-2", "sandbox/box-9", 1)).unwrap();
    let changed = served.get("/v1/audit/verify", &served.write).await.json();
    assert_eq!(changed["intact"], false);
    let findings = changed["findings"].as_array().unwrap();
    assert!(
        findings.len() == 1 && findings[0].as_str().unwrap().contains("was changed"),
        "{changed}"
    );
}
