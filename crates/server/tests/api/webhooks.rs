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
