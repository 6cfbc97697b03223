//! Webhooks over the API: who may do what, and what is shown. How they deliver is tested in the engine.

use std::time::Duration;

use hyper::{Method, StatusCode};
use sandkeep_client::Client;
use sandkeep_client::types::{CreateWebhook, RotateWebhookSecret, UpdateWebhook};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use crate::fixture::Served;

fn client(served: &Served, key: &str) -> Client {
    Client::new(format!("http://{}", served.address).parse().unwrap(), Some(key)).unwrap()
}

fn wish(url: &str) -> CreateWebhook {
    let events = vec!["sandbox.*".to_owned()];
    CreateWebhook { url: url.to_owned(), events, ..CreateWebhook::default() }
}

#[tokio::test]
async fn a_webhook_from_its_creation_to_its_end() {
    let served = Served::without_machines().await;
    let client = client(&served, &served.write);
    let made = client.create_webhook(&wish("https://hooks.invalid/x?token=abc")).await.unwrap();
    assert!(made.secret.starts_with("whsec_"), "{made:?}");
    let id = &made.webhook.id;
    let shown = client.webhook(id).await.unwrap();
    assert_eq!((shown.enabled, shown.secrets, shown.allow_private), (true, 1, false));
    let all = served.get("/v1/webhooks", &served.read).await;
    assert!(!String::from_utf8_lossy(&all.body).contains(&made.secret));
    assert_eq!(client.webhooks().await.unwrap(), [shown]);
    let given = RotateWebhookSecret {
        secret: Some("given by its owner".to_owned()),
        ..RotateWebhookSecret::default()
    };
    let rotated = client.rotate_webhook_secret(id, &given).await.unwrap();
    assert_eq!((rotated.webhook.secrets, rotated.secret.as_str()), (2, "given by its owner"));
    let off = UpdateWebhook { enabled: Some(false), ..UpdateWebhook::default() };
    let disabled = client.update_webhook(id, &off).await.unwrap();
    assert!(!disabled.enabled && disabled.disabled_reason.is_some(), "{disabled:?}");
    client.delete_webhook(id).await.unwrap();
    let gone = served.get(&format!("/v1/webhooks/{id}"), &served.read).await;
    assert_eq!(
        (gone.status, gone.error().code.as_str()),
        (StatusCode::NOT_FOUND, "webhook_not_found")
    );
    // All of it is in the audit log, with the host and without the token.
    let log = served.get("/v1/audit?action=webhook", &served.write).await;
    let text = String::from_utf8_lossy(&log.body).into_owned();
    for action in ["webhook.create", "webhook.rotate", "webhook.update", "webhook.delete"] {
        assert!(text.contains(action), "{action}: {text}");
    }
    assert!(text.contains("hooks.invalid") && !text.contains("token=abc"), "{text}");
    assert!(!text.contains("given by its owner"), "{text}");
}

#[tokio::test]
async fn only_an_admin_allows_addresses_inside() {
    let served = Served::without_machines().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/hook", listener.local_addr().unwrap());
    let inside = CreateWebhook { allow_private: true, ..wish(&url) };
    let body = serde_json::to_string(&inside).unwrap();
    let refused = served.post("/v1/webhooks", &served.write, &body).await;
    assert_eq!(refused.status, StatusCode::FORBIDDEN, "{refused:?}");
    let made = client(&served, &served.admin).create_webhook(&inside).await.unwrap();
    let path = format!("/v1/webhooks/{}", made.webhook.id);
    for (body, status) in [
        (r#"{"url":"http://127.0.0.1:1/"}"#, StatusCode::FORBIDDEN),
        (r#"{"allow_private":true}"#, StatusCode::FORBIDDEN),
        (r#"{"events":["*"]}"#, StatusCode::OK),
        (r#"{"url":"gopher://x"}"#, StatusCode::FORBIDDEN),
        (r#"{"events":["nothing"]}"#, StatusCode::BAD_REQUEST),
        (r#"{"event":["*"]}"#, StatusCode::BAD_REQUEST),
    ] {
        let answer = served.json(Method::PATCH, &path, &served.write, body).await;
        assert_eq!(answer.status, status, "{body}: {answer:?}");
    }
    for key in [&served.foreign, &served.read] {
        let expected =
            if *key == served.read { StatusCode::FORBIDDEN } else { StatusCode::NOT_FOUND };
        assert_eq!(served.call(Method::DELETE, &path, key).await.status, expected);
        assert_eq!(served.post(&format!("{path}/test"), key, "").await.status, expected);
    }
    // The test event arrives where the admin allowed it.
    let receiver = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut head = vec![0; 8192];
        let length = stream.read(&mut head).await.unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
        String::from_utf8_lossy(&head[..length]).into_owned()
    });
    let sent = client(&served, &served.write).test_webhook(&made.webhook.id).await.unwrap();
    assert!(sent.delivered && sent.status == Some(200), "{sent:?}");
    let head = tokio::time::timeout(Duration::from_secs(10), receiver).await.unwrap().unwrap();
    assert!(head.contains("sandkeep-event: webhook.test\r\n"), "{head}");
}

#[tokio::test]
async fn a_caller_that_leaves_before_the_answer_is_in_the_audit_log() {
    let served = Served::without_machines().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/hook", listener.local_addr().unwrap());
    let inside = CreateWebhook { allow_private: true, ..wish(&url) };
    let admin = client(&served, &served.admin);
    let made = admin.create_webhook(&inside).await.unwrap();
    // The receiver does not answer, and the caller leaves while the server waits for it.
    let test = admin.test_webhook(&made.webhook.id);
    let held = tokio::select! {
        accepted = listener.accept() => accepted.unwrap(),
        answer = test => panic!("{answer:?}"),
    };
    let mut found = Vec::new();
    for _ in 0..200 {
        let answer = served.get("/v1/audit?action=webhook.test", &served.admin).await;
        found = answer.json()["items"].as_array().unwrap().clone();
        if !found.is_empty() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    drop(held);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0]["outcome"], "failed", "{found:?}");
    assert_eq!(found[0]["code"], "disconnected", "{found:?}");
    assert!(found[0].get("status").is_none_or(|status| status.is_null()), "{found:?}");
}

/// Answers every request to a receiver with 200, and passes on what came.
fn receiver(listener: TcpListener) -> tokio::sync::mpsc::UnboundedReceiver<String> {
    let (sender, received) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let (mut text, mut piece) = (String::new(), [0u8; 8192]);
            while !text.ends_with('}') {
                let Ok(length @ 1..) = stream.read(&mut piece).await else { break };
                text.push_str(&String::from_utf8_lossy(&piece[..length]));
            }
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
            if sender.send(text).is_err() {
                return;
            }
        }
    });
    received
}

#[tokio::test]
async fn a_receiver_answers_an_approval_with_its_link_and_without_a_key() {
    let served = Served::without_machines().await;
    served.create("app").await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/hook", listener.local_addr().unwrap());
    let mut received = receiver(listener);
    let events = vec!["approval.asked".to_owned()];
    let create = CreateWebhook { url, events, allow_private: true, ..CreateWebhook::default() };
    let answering = CreateWebhook { answers: true, ..create };
    // A key that may write may not approve, and cannot hand on what it has not.
    let body = r#"{"url":"https://hooks.invalid/","events":["*"],"answers":true}"#;
    let refused = served.post("/v1/webhooks", &served.write, body).await;
    assert_eq!(refused.status, StatusCode::FORBIDDEN, "{refused:?}");
    let made = client(&served, &served.admin).create_webhook(&answering).await.unwrap().webhook;
    assert!(made.answers && made.answers_allowed_by.is_some(), "{made:?}");
    let question = r#"{"question":"deploy?"}"#;
    let asked = served.post("/v1/sandboxes/app/approvals", &served.write, question).await;
    let id = asked.json()["id"].as_str().unwrap().to_owned();
    let delivery = tokio::time::timeout(Duration::from_secs(10), received.recv()).await;
    let delivery = delivery.unwrap().unwrap();
    let (_, body) = delivery.split_once("\r\n\r\n").unwrap();
    let event: serde_json::Value = serde_json::from_str(body).unwrap();
    // Without `public_url` the link is a path.
    let link = event["data"]["answer_url"].as_str().unwrap().to_owned();
    let token = link.strip_prefix(&format!("/v1/approvals/{id}/answer?token=")).unwrap();
    let yes = r#"{"answer":"approve","comment":"from a chat"}"#;
    let post = async |path: &str, body: &str| served.post(path, "", body).await;
    for (path, body, status, code) in [
        (format!("{link}x"), yes, StatusCode::UNAUTHORIZED, "answer_link_not_valid"),
        (
            format!("/v1/approvals/{id}/answer?token="),
            yes,
            StatusCode::UNAUTHORIZED,
            "answer_link_not_valid",
        ),
        (format!("/v1/approvals/{id}/answer"), yes, StatusCode::UNAUTHORIZED, "unauthorized"),
        (format!("{link}&token={token}"), yes, StatusCode::BAD_REQUEST, "invalid"),
        (format!("{link}&x=1"), yes, StatusCode::BAD_REQUEST, "invalid"),
        (link.clone(), "{}", StatusCode::BAD_REQUEST, "invalid"),
        (
            format!("/v1/approvals?token={token}"),
            "",
            StatusCode::METHOD_NOT_ALLOWED,
            "method_not_allowed",
        ),
    ] {
        let refused = post(&path, body).await;
        assert_eq!((refused.status, refused.error().code.as_str()), (status, code), "{path}");
    }
    // It opens nothing else.
    let read = served.get(&format!("/v1/approvals/{id}?token={token}"), "").await;
    assert_eq!(read.status, StatusCode::UNAUTHORIZED, "{read:?}");
    let answered = post(&link, yes).await;
    assert_eq!(answered.status, StatusCode::OK, "{answered:?}");
    let who = format!("webhook:{}", made.id);
    assert_eq!(answered.json()["answered_by"], who.as_str());
    let again = post(&link, yes).await;
    assert_eq!(
        (again.status, again.error().code.as_str()),
        (StatusCode::CONFLICT, "already_answered")
    );
    // Who answered is on record, and the link is nowhere.
    let log = served.get("/v1/audit?actor=webhook", &served.admin).await;
    let entries = log.json()["items"].as_array().unwrap().clone();
    let done = entries.iter().find(|entry| entry["outcome"] == "done").unwrap();
    assert_eq!(done["action"], "approval.answer", "{done}");
    assert_eq!(done["target"], format!("approval/{id}").as_str());
    assert_eq!(done["detail"]["webhook"], made.id.as_str());
    assert_eq!(done["detail"]["answer"], "approve");
    let events = served.get("/v1/events?follow=false&since=1h", &served.admin).await;
    let hook = served.get(&format!("/v1/webhooks/{}", made.id), &served.admin).await;
    let whole = served.get("/v1/audit", &served.admin).await;
    let secret = token.split_once('.').unwrap().1;
    for answer in [&log, &events, &hook, &whole] {
        assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
        assert!(!String::from_utf8_lossy(&answer.body).contains(secret), "{answer:?}");
    }
}
