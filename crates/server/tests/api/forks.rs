//! Diff, promote, merge and rename over HTTP: what is refused, and how.

use hyper::{Method, StatusCode};

use crate::fixture::Served;

async fn served() -> Served {
    let served = Served::without_machines().await;
    for name in ["app", "other"] {
        served.create(name).await;
    }
    served
}

#[tokio::test]
async fn points_are_compared_with_a_key_that_may_only_read() {
    let served = served().await;
    let same = served.get("/v1/diff?from=app&to=other@base", &served.read).await;
    assert_eq!(same.status, StatusCode::OK, "{same:?}");
    let diff = same.json();
    assert_eq!(diff["counts"]["added"], 0);
    assert_eq!(diff["to"]["point"], "other@base");
    assert_eq!(diff["truncated"], false);
    let patch = served.get("/v1/diff/patch?from=app&to=other", &served.read).await;
    assert_eq!((patch.status, patch.body.len()), (StatusCode::OK, 0), "{patch:?}");
    assert_eq!(patch.headers["content-type"], "text/x-diff");
    for (path, status, code) in [
        ("/v1/diff?from=app", 400, "invalid"),
        ("/v1/diff?from=app&to=", 400, "invalid"),
        ("/v1/diff?from=app&to=a/b", 400, "invalid"),
        ("/v1/diff?from=app&to=other&limit=0", 400, "invalid"),
        ("/v1/diff?from=app&to=other&limit=100001", 400, "invalid"),
        ("/v1/diff?from=app&to=other&pth=x", 400, "invalid"),
        ("/v1/diff?from=app&to=other&path=", 400, "invalid"),
        ("/v1/diff?from=app&to=other&path=a%2F%5B", 400, "invalid"),
        ("/v1/diff?from=app&to=nobody", 404, "sandbox_not_found"),
        ("/v1/diff?from=app@green&to=other", 404, "label_not_found"),
        ("/v1/diff?from=image:nothing&to=other", 404, "image_not_found"),
        ("/v1/diff/patch?from=app&to=nobody", 404, "sandbox_not_found"),
        ("/v1/forks?of=nobody", 404, "sandbox_not_found"),
        ("/v1/forks?group=a/b", 400, "invalid"),
    ] {
        let answer = served.get(path, &served.read).await;
        assert_eq!(answer.status.as_u16(), status, "{path}: {answer:?}");
        assert_eq!(answer.error().code, code, "{path}");
    }
    // Another project's sandboxes are not there.
    let foreign = served.get("/v1/diff?from=app&to=other", &served.foreign).await;
    assert_eq!(foreign.error().code, "sandbox_not_found");
    let forks = served.get("/v1/forks?of=app", &served.read).await.json();
    assert_eq!(forks["items"].as_array().map(Vec::len), Some(0));
}

#[tokio::test]
async fn what_cannot_be_brought_back_is_refused() {
    let served = served().await;
    for (path, body, status, code) in [
        ("app/promote", "{}", 409, "not_a_fork"),
        ("app/promote", r#"{"expect":1}"#, 400, "invalid"),
        ("nobody/promote", "{}", 404, "sandbox_not_found"),
        ("app/merge", "{}", 409, "not_a_fork"),
        ("app/merge", r#"{"into":"app"}"#, 400, "invalid"),
        ("app/merge", r#"{"into":"other"}"#, 409, "unrelated"),
        ("app/merge", r#"{"into":"other","conflicts":"both"}"#, 400, "invalid"),
        ("app/merge", r#"{"into":"nobody"}"#, 404, "sandbox_not_found"),
        ("app/rename", r#"{"name":"other"}"#, 409, "name_taken"),
        ("app/rename", r#"{"name":"a b"}"#, 400, "invalid"),
        ("app/rename", "{}", 400, "invalid"),
        ("nobody/rename", r#"{"name":"free"}"#, 404, "sandbox_not_found"),
    ] {
        let path = format!("/v1/sandboxes/{path}");
        let answer = served.json(Method::POST, &path, &served.write, body).await;
        assert_eq!(answer.status.as_u16(), status, "{path} {body}: {answer:?}");
        assert_eq!(answer.error().code, code, "{path} {body}");
        let refused = served.json(Method::POST, &path, &served.read, body).await;
        assert_eq!(refused.status, StatusCode::FORBIDDEN, "{path}");
    }
    let body = r#"{"name":"renamed"}"#;
    let renamed = served.json(Method::POST, "/v1/sandboxes/app/rename", &served.write, body).await;
    assert_eq!(renamed.json()["name"], "renamed");
    assert_eq!(served.get("/v1/sandboxes/app", &served.read).await.status, StatusCode::NOT_FOUND);
}
