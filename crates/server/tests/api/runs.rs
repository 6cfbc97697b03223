//! Runs and approvals over HTTP: who may what, and what is refused.

use hyper::{Method, StatusCode};
use serde_json::Value;

use crate::fixture::Served;

async fn served() -> Served {
    let served = Served::without_machines().await;
    served.create("app").await;
    served
}

/// A key of project `main` that may write and approve.
async fn approver(served: &Served) -> String {
    let project = "main".parse().unwrap();
    let scope = sandkeep_core::model::Scope::Write;
    let made = served.engine.create_approver_key(&project, "ops".to_owned(), scope, None).await;
    made.unwrap().1
}

const HARNESS: &str = r#"{"place":{"how":"fork","sandbox":"app","name":"try"},"purpose":"p"}"#;

async fn started(served: &Served, body: &str) -> String {
    let run = served.post("/v1/runs", &served.write, body).await;
    assert_eq!(run.status, StatusCode::CREATED, "{run:?}");
    run.json()["id"].as_str().unwrap().to_owned()
}

/// Calls until the answer has this status.
async fn until(served: &Served, method: Method, path: &str, body: &str, status: u16) -> Value {
    for _ in 0..2000 {
        let answer = served.json(method.clone(), path, &served.write, body).await;
        if answer.status.as_u16() == status {
            return answer.json();
        }
        // It is still queued, or being prepared.
        let code = answer.error().code;
        assert!(["run_busy", "run_status"].contains(&code.as_str()), "{path}: {answer:?}");
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    panic!("{path} is never {status}");
}

#[tokio::test]
async fn a_harness_drives_a_run_and_somebody_else_accepts_it() {
    let served = served().await;
    let id = started(&served, HARNESS).await;
    let path = format!("/v1/runs/{id}");
    let beat = served.post(&format!("{path}/heartbeat"), &served.write, r#"{"cost":2.5}"#).await;
    assert_eq!(beat.status, StatusCode::OK, "{beat:?}");
    let finish = format!("{path}/finish");
    until(&served, Method::POST, &finish, r#"{"cost":3}"#, 200).await;
    let ready = served.get(&format!("{path}?wait=30"), &served.read).await.json();
    assert_eq!(ready["status"], "ready_for_review", "{ready}");
    assert_eq!((&ready["sandbox"], &ready["cost"]), (&"try".into(), &3.0.into()));
    assert_eq!(ready["owner"], "main");
    assert!(ready["review_by"].is_string());
    let review = served.get(&format!("{path}/review"), &served.read).await;
    assert_eq!(review.status, StatusCode::OK, "{review:?}");
    assert_eq!(
        (&review.json()["from"], &review.json()["current"]),
        (&"try@base".into(), &true.into())
    );
    for action in ["accept", "reject", "review"] {
        let refused = served.post(&format!("{path}/{action}"), &served.write, "{}").await;
        assert_eq!(refused.status, StatusCode::FORBIDDEN);
        assert!(refused.error().hint.unwrap().contains("--approve"), "{refused:?}");
    }
    let key = approver(&served).await;
    let accepted = served.post(&format!("{path}/accept"), &key, r#"{"comment":"fine"}"#).await;
    assert_eq!(accepted.status, StatusCode::OK, "{accepted:?}");
    let accepted = accepted.json();
    assert_eq!(accepted["run"]["decision"]["comment"], "fine");
    assert_eq!(accepted["promoted"]["sandbox"]["name"], "app");
    let twice = served.post(&format!("{path}/accept"), &key, "{}").await;
    assert_eq!((twice.status, twice.error().code.as_str()), (StatusCode::CONFLICT, "run_status"));
    let late = served.post(&format!("{path}/cancel"), &served.write, "{}").await;
    assert_eq!(late.error().code, "run_status");
    let listed = served.get("/v1/runs?status=accepted&status=failed", &served.read).await.json();
    assert_eq!(listed["items"].as_array().map(Vec::len), Some(1));
    let foreign = served.get(&path, &served.foreign).await;
    assert_eq!(foreign.error().code, "run_not_found");
}

#[tokio::test]
async fn bad_runs_are_refused_and_say_why() {
    let served = served().await;
    let place = r#""place":{"how":"fork","sandbox":"app"}"#;
    let existing = r#""place":{"how":"existing","sandbox":"app"}"#;
    for (body, status, told) in [
        ("{}".to_owned(), 400, "place"),
        (r#"{"place":{"how":"borrowed"}}"#.to_owned(), 400, "how"),
        (r#"{"place":{"how":"fork","sandbox":"a b"}}"#.to_owned(), 400, "sandbox"),
        (r#"{"place":{"how":"fork","sandbox":"nobody"}}"#.to_owned(), 404, "nobody"),
        (format!(r#"{{{place},"command":{{"argv":[]}}}}"#), 400, "argv"),
        (format!(r#"{{{place},"command":{{"argv":["x"],"env":{{"=":"1"}}}}}}"#), 400, "env"),
        (format!(r#"{{{place},"command":{{"argv":["x"]}},"heartbeat":"5s"}}"#), 400, "heartbeat"),
        (format!(r#"{{{place},"retries":1}}"#), 400, "retries"),
        (format!(r#"{{{place},"command":{{"argv":["x"]}},"retries":11}}"#), 400, "retries"),
        (format!(r#"{{{place},"approve":[""]}}"#), 400, "approve"),
        (format!(r#"{{{place},"priority":101}}"#), 400, "priority"),
        (format!(r#"{{{place},"keep":"1s"}}"#), 400, "keep"),
        (format!(r#"{{{place},"timeout":"0s"}}"#), 400, "timeout"),
        (format!(r#"{{{place},"purpose":"a\nb"}}"#), 400, "purpose"),
        (format!(r#"{{{place},"what":1}}"#), 400, "what"),
        (format!(r#"{{{existing},"on_accept":"promote"}}"#), 400, "on_accept"),
    ] {
        let answer = served.post("/v1/runs", &served.write, &body).await;
        assert_eq!(answer.status.as_u16(), status, "{body}: {answer:?}");
        assert!(answer.error().message.contains(told), "{body}: {answer:?}");
    }
    let refused = served.post("/v1/runs", &served.read, HARNESS).await;
    assert_eq!(refused.status, StatusCode::FORBIDDEN);
    let nobody = "run-00000000000000000000000000";
    for (path, status, code) in [
        (format!("/v1/runs/{nobody}"), 404, "run_not_found"),
        (format!("/v1/runs/{nobody}/review"), 404, "run_not_found"),
        ("/v1/runs/x".to_owned(), 400, "invalid"),
        (format!("/v1/runs/{nobody}?wait=61"), 400, "invalid"),
        ("/v1/runs?status=done".to_owned(), 400, "invalid"),
        ("/v1/runs?cursor=x".to_owned(), 400, "invalid"),
        ("/v1/runs?limit=0".to_owned(), 400, "invalid"),
        ("/v1/approvals?status=open".to_owned(), 400, "invalid"),
        ("/v1/approvals/apr-00000000000000000000000000".to_owned(), 404, "approval_not_found"),
    ] {
        let answer = served.get(&path, &served.read).await;
        assert_eq!(answer.status.as_u16(), status, "{path}: {answer:?}");
        assert_eq!(answer.error().code, code, "{path}");
    }
    // A command cannot run here: that is the run's failure, not the server's.
    let id = started(&served, &format!(r#"{{{place},"command":{{"argv":["true"]}}}}"#)).await;
    let failed = served.get(&format!("/v1/runs/{id}?wait=30"), &served.read).await.json();
    assert_eq!(failed["status"], "failed", "{failed}");
    assert!(failed["why"].as_str().unwrap().contains("no machines"), "{failed}");
}

#[tokio::test]
async fn approvals_are_answered_once_by_those_who_may() {
    let served = served().await;
    let ask = "/v1/sandboxes/app/approvals";
    let asked = served.post(ask, &served.write, r#"{"question":"deploy?","expires":"1h"}"#).await;
    assert_eq!(asked.status, StatusCode::CREATED, "{asked:?}");
    let id = asked.json()["id"].as_str().unwrap().to_owned();
    let path = format!("/v1/approvals/{id}/answer");
    let yes = r#"{"answer":"approve","comment":"go"}"#;
    for key in [&served.write, &served.read] {
        assert_eq!(served.post(&path, key, yes).await.status, StatusCode::FORBIDDEN);
    }
    let foreign = served.post(&path, &served.foreign, yes).await;
    assert_eq!(foreign.status, StatusCode::FORBIDDEN);
    for bad in ["{}", r#"{"answer":"maybe"}"#] {
        assert_eq!(served.post(&path, &served.admin, bad).await.error().code, "invalid");
    }
    let pending = served.get("/v1/approvals?status=pending", &served.read).await.json();
    assert_eq!(pending["items"][0]["id"], id.as_str());
    let key = approver(&served).await;
    let answered = served.post(&path, &key, yes).await.json();
    assert_eq!((&answered["status"], &answered["comment"]), (&"approved".into(), &"go".into()));
    assert!(answered["answered_by"].is_string());
    let twice = served.post(&path, &key, yes).await;
    assert_eq!(
        (twice.status, twice.error().code.as_str()),
        (StatusCode::CONFLICT, "already_answered")
    );
    let waited = served.get(&format!("/v1/approvals/{id}?wait=60"), &served.read).await.json();
    assert_eq!(waited["status"], "approved");
    for (body, told) in [
        ("{}", "question"),
        (r#"{"question":" "}"#, "question"),
        (r#"{"question":"x","expires":"31d"}"#, "expires"),
        (r#"{"question":"x","default":"maybe"}"#, "default"),
    ] {
        let refused = served.post(ask, &served.write, body).await;
        assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{body}");
        assert!(refused.error().message.contains(told), "{refused:?}");
    }
}

/// The only approval that waits.
async fn pending(served: &Served) -> String {
    for _ in 0..2000 {
        let all = served.get("/v1/approvals?status=pending", &served.read).await.json();
        if let Some(id) = all["items"][0]["id"].as_str() {
            return id.to_owned();
        }
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    panic!("nobody asks");
}

#[tokio::test]
async fn a_caller_that_leaves_takes_its_held_command_along() {
    let served = served().await;
    let held = r#"{"approvals":{"commands":["git push*"]}}"#;
    served.json(Method::PATCH, "/v1/sandboxes/app", &served.write, held).await;
    let path = "/v1/sandboxes/app/exec";
    let body = r#"{"argv":["/usr/bin/git","push"]}"#;
    let id = tokio::select! {
        answer = served.post(path, &served.write, body) => panic!("it is held: {answer:?}"),
        id = pending(&served) => id,
    };
    let closed = served.get(&format!("/v1/approvals/{id}?wait=30"), &served.read).await.json();
    assert_eq!(closed["status"], "expired", "{closed}");
    assert_eq!(closed["comment"], "whoever asked is gone");
    let (answer, id) = tokio::join!(served.post(path, &served.write, body), async {
        let id = pending(&served).await;
        let path = format!("/v1/approvals/{id}/answer");
        served.post(&path, &served.admin, r#"{"answer":"deny","comment":"no"}"#).await;
        id
    });
    assert_eq!(
        (answer.status, answer.error().code.as_str()),
        (StatusCode::FORBIDDEN, "not_approved")
    );
    assert!(answer.error().message.contains(&id), "{answer:?}");
}

#[tokio::test]
async fn only_who_may_approve_loosens_what_has_to_be_approved() {
    let served = served().await;
    let path = "/v1/sandboxes/app";
    let held = r#"{"approvals":{"commands":["git push*"]}}"#;
    let free = r#"{"approvals":null}"#;
    let set = served.json(Method::PATCH, path, &served.write, held).await;
    assert_eq!(set.json()["approvals"]["commands"][0], "git push*", "{set:?}");
    let same = served.json(Method::PATCH, path, &served.write, held).await;
    assert_eq!(same.status, StatusCode::OK);
    let other = r#"{"purpose":"more"}"#;
    assert_eq!(served.json(Method::PATCH, path, &served.write, other).await.status, StatusCode::OK);
    for body in [free, r#"{"approvals":{"commands":["nothing"]}}"#] {
        let refused = served.json(Method::PATCH, path, &served.write, body).await;
        assert_eq!(refused.status, StatusCode::FORBIDDEN, "{body}");
        let fork = served.post("/v1/sandboxes/app/fork", &served.write, body).await;
        assert_eq!(fork.status, StatusCode::FORBIDDEN, "{body}");
    }
    let fork = served.post("/v1/sandboxes/app/fork", &served.write, r#"{"name":"copy"}"#).await;
    assert_eq!(fork.json()["sandbox"]["approvals"]["commands"][0], "git push*", "{fork:?}");
    let key = approver(&served).await;
    let freed = served.json(Method::PATCH, path, &key, free).await.json();
    assert_eq!(freed["approvals"], Value::Null);
    let bad = served.json(Method::PATCH, path, &key, r#"{"approvals":{"commands":[""]}}"#).await;
    assert_eq!(bad.error().code, "invalid");
}

#[tokio::test]
async fn a_project_says_how_much_may_run() {
    let served = served().await;
    let path = "/v1/projects/main/governance";
    let usual = served.get(path, &served.admin).await.json();
    assert_eq!((&usual["running"], &usual["separate_approver"]), (&16.into(), &false.into()));
    assert_eq!(served.get(path, &served.write).await.status, StatusCode::FORBIDDEN);
    for bad in [r#"{"running":0,"queued":1}"#, r#"{"running":1,"queued":10001}"#, "{}"] {
        let refused = served.json(Method::PUT, path, &served.admin, bad).await;
        assert_eq!(refused.error().code, "invalid", "{bad}");
    }
    let body = r#"{"running":1,"queued":1,"separate_approver":true}"#;
    let set = served.json(Method::PUT, path, &served.admin, body).await;
    assert_eq!(set.status, StatusCode::OK, "{set:?}");
    let first = started(&served, HARNESS).await;
    let second = HARNESS.replace("try", "try-2");
    // The first may not have left the queue yet.
    until(&served, Method::POST, &format!("/v1/runs/{first}/finish"), "{}", 200).await;
    let ready = served.get(&format!("/v1/runs/{first}?wait=30"), &served.read).await.json();
    assert_eq!(ready["status"], "ready_for_review");
    started(&served, &second).await;
    let key = approver(&served).await;
    let accepted = served.post(&format!("/v1/runs/{first}/accept"), &key, "{}").await;
    assert_eq!(accepted.status, StatusCode::OK, "another key: {accepted:?}");
    let own = served.post("/v1/runs", &key, &HARNESS.replace("try", "try-3")).await;
    if own.status == StatusCode::CREATED {
        let id = own.json()["id"].as_str().unwrap().to_owned();
        served.post(&format!("/v1/runs/{id}/cancel"), &served.write, "{}").await;
    } else {
        assert_eq!((own.status.as_u16(), own.error().code.as_str()), (429, "too_many_runs"));
    }
    let missing = served.get("/v1/projects/nobody/governance", &served.admin).await;
    assert_eq!(missing.error().code, "project_not_found");
}
