//! Scopes, and projects that do not see each other.

use bytes::Bytes;
use http_body_util::Full;
use hyper::{Method, StatusCode};

use crate::fixture::{Served, read};

#[tokio::test]
async fn a_read_key_looks_and_never_wakes() {
    let served = Served::without_machines().await;
    served.create("box").await;
    let key = &served.read;
    for path in ["/v1/sandboxes", "/v1/sandboxes/box", "/v1/sandboxes/box/commands", "/v1/images"] {
        assert_eq!(served.get(path, key).await.status, StatusCode::OK, "{path}");
    }
    let exec = r#"{"argv":["true"]}"#;
    let refused = [
        served.post("/v1/sandboxes", key, "{}").await,
        served.post("/v1/sandboxes/box/start", key, "").await,
        served.post("/v1/sandboxes/box/stop", key, "").await,
        served.post("/v1/sandboxes/box/exec", key, exec).await,
        served.json(Method::PATCH, "/v1/sandboxes/box", key, "{}").await,
        served.call(Method::DELETE, "/v1/sandboxes/box", key).await,
        served.get("/v1/sandboxes/box/files?path=/etc/passwd", key).await,
        served.get("/v1/sandboxes/box/files/tar?path=/etc", key).await,
        served.get("/v1/projects", key).await,
        served.post("/v1/projects/main/keys", &served.write, r#"{"scope":"admin"}"#).await,
        served.post("/v1/images/pull", &served.write, r#"{"reference":"x"}"#).await,
        served.post("/v1/images/customize", &served.write, r#"{"name":"x"}"#).await,
        served.call(Method::DELETE, "/v1/images/small", &served.write).await,
    ];
    for (at, answer) in refused.iter().enumerate() {
        assert_eq!(answer.status, StatusCode::FORBIDDEN, "{at}: {answer:?}");
        assert!(answer.error().hint.is_some(), "{at}: {answer:?}");
    }
    let polite = served.get("/v1/sandboxes/box/files?path=/etc/passwd&if_running=true", key).await;
    assert_eq!(polite.error().code, "not_running", "allowed, and not woken");
    assert_eq!(served.get("/v1/sandboxes/box", key).await.json()["state"], "stopped");
}

#[tokio::test]
async fn projects_do_not_see_each_other() {
    let served = Served::without_machines().await;
    served.create("box").await;
    let foreign = &served.foreign;
    for answer in [
        served.get("/v1/sandboxes/box", foreign).await,
        served.post("/v1/sandboxes/box/exec", foreign, r#"{"argv":["true"]}"#).await,
        served.post("/v1/sandboxes/box/fork", foreign, "").await,
        served.call(Method::DELETE, "/v1/sandboxes/box", foreign).await,
    ] {
        assert_eq!(answer.status, StatusCode::NOT_FOUND, "{answer:?}");
    }
    let list = served.get("/v1/sandboxes", foreign).await.json();
    assert_eq!(list["items"].as_array().unwrap().len(), 0);
    // The same name is free over there.
    let body = r#"{"name":"box","image":"small","start":false}"#;
    assert_eq!(served.post("/v1/sandboxes", foreign, body).await.status, StatusCode::CREATED);

    let as_other = |key: &str| {
        let request = served.request(Method::GET, "/v1/sandboxes/box", key);
        request.header("sandkeep-project", "other").body(Full::new(Bytes::new())).unwrap()
    };
    let seen = read(served.send(as_other(&served.admin)).await).await;
    assert_eq!(seen.json()["project"], "other", "an admin key may act for any project");
    let refused = read(served.send(as_other(&served.write)).await).await;
    assert_eq!(refused.status, StatusCode::FORBIDDEN);
}

#[tokio::test]
async fn keys_are_made_used_and_taken_away() {
    let served = Served::without_machines().await;
    let made = served.post("/v1/projects", &served.admin, r#"{"name":"third"}"#).await;
    assert_eq!(made.status, StatusCode::CREATED);
    let body = r#"{"label":"ci","scope":"write","expires":"1h"}"#;
    let made = served.post("/v1/projects/third/keys", &served.admin, body).await;
    assert_eq!(made.status, StatusCode::CREATED, "{made:?}");
    let made = made.json();
    let secret = made["secret"].as_str().unwrap();
    assert!(secret.starts_with("skp_"));
    assert_eq!(served.get("/v1/whoami", secret).await.json()["project"], "third");
    let listed = served.get("/v1/projects/third/keys", &served.admin).await;
    assert!(!String::from_utf8_lossy(&listed.body).contains(secret), "a secret is shown once");
    let path = format!("/v1/projects/third/keys/{}", made["key"]["id"].as_str().unwrap());
    let gone = served.call(Method::DELETE, &path, &served.admin).await;
    assert_eq!(gone.status, StatusCode::NO_CONTENT);
    assert_eq!(served.get("/v1/whoami", secret).await.status, StatusCode::UNAUTHORIZED);
}
