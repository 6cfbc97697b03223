//! The description and the routes say the same.

use std::os::unix::fs::PermissionsExt;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Method, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;

use crate::fixture::Served;

#[tokio::test]
async fn every_described_route_is_there_and_wants_a_key() {
    let served = Served::without_machines().await;
    let description = served.get("/v1/openapi.json", "").await;
    assert_eq!(description.status, StatusCode::OK);
    assert_eq!(description.json()["openapi"], "3.1.0");
    let mut count = 0;
    for (path, item) in description.json()["paths"].as_object().unwrap() {
        let concrete = path
            .replace("{id}", "cmd-00000000000000000000000000")
            .replace("{key}", "key-00000000000000000000000000")
            .replace("{name}", "x")
            .replace("{project}", "x")
            .replace("{port}", "80");
        for (method, operation) in item.as_object().unwrap() {
            let method: Method = method.to_uppercase().parse().unwrap();
            let answer = served.call(method.clone(), &concrete, "").await;
            let open = operation["security"] == serde_json::json!([{}]);
            let expected = if open { StatusCode::OK } else { StatusCode::UNAUTHORIZED };
            assert_eq!(answer.status, expected, "{method} {path}");
            count += 1;
        }
    }
    assert!(count > 45, "{count}");
}

#[tokio::test]
async fn health_and_who_am_i() {
    let served = Served::without_machines().await;
    assert_eq!(served.get("/healthz", "").await.json()["status"], "ok");
    let me = served.get("/v1/whoami", &served.read).await.json();
    assert_eq!((&me["project"], &me["scope"]), (&Value::from("main"), &Value::from("read")));
    let usage = served.get("/v1/usage", &served.admin).await.json();
    assert!(usage["total_bytes"].as_u64().unwrap() > usage["free_bytes"].as_u64().unwrap());
}

#[tokio::test]
async fn the_unix_socket_is_private_and_wants_a_key_too() {
    let mut served = Served::without_machines().await;
    let mode = std::fs::metadata(&served.socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    for (key, expected) in [("", 401), (served.read.as_str(), 200)] {
        let stream = tokio::net::UnixStream::connect(&served.socket).await.unwrap();
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let request = served.request(Method::GET, "/v1/sandboxes", key);
        let request = request.body(Full::new(Bytes::new())).unwrap();
        let response = sender.send_request(request).await.unwrap();
        assert_eq!(response.status(), expected);
        response.into_body().collect().await.unwrap();
    }
    served.shut_down().await;
    assert!(!served.socket.exists(), "a server that goes takes its socket along");
}

#[tokio::test]
async fn readiness_says_details_only_to_those_with_a_key() {
    let served = Served::without_machines().await;
    for key in ["", "skp_wrong"] {
        let answer = served.get("/readyz", key).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        let checks = answer.json()["checks"].as_array().cloned().unwrap();
        assert!(
            checks.len() >= 3 && checks.iter().all(|check| check["detail"] == ""),
            "{checks:?}"
        );
        assert!(checks.iter().all(|check| check["state"] == "ok"), "{checks:?}");
    }
    let answer = served.get("/readyz", &served.read).await.json();
    let checks = answer["checks"].as_array().unwrap();
    assert!(checks.iter().all(|check| check["detail"] != ""), "{checks:?}");
}
