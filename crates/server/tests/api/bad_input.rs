//! Whatever is wrong with a request, the answer is the right 4xx, in JSON, and says what to do.

use bytes::Bytes;
use http_body_util::Full;
use hyper::Method;
use sandkeep_core::model::{Scope, Span};

use crate::fixture::{Served, key, pieces, read};

const DELETE: Method = Method::DELETE;
const GET: Method = Method::GET;
const PATCH: Method = Method::PATCH;
const POST: Method = Method::POST;
const PUT: Method = Method::PUT;

/// A request that is wrong: method, path, body, then the status, the code and a piece of the message.
type Row = (Method, &'static str, &'static str, u16, &'static str, &'static str);

const SANDBOXES: &str = "/v1/sandboxes";
const CUSTOMIZE: &str = "/v1/images/customize";
const ROLLBACK: &str = "/v1/sandboxes/box/rollback";
const NO_SNAPSHOT: &str = "/v1/snapshots/snp-00000000000000000000000000";
const NO_COMMAND: &str = "/v1/sandboxes/box/commands/cmd-00000000000000000000000000";

fn rows() -> Vec<Row> {
    vec![
        // JSON that is none, or not what was asked for.
        (POST, SANDBOXES, "{", 400, "invalid", "not valid JSON"),
        (POST, SANDBOXES, r#"{"name":"x"} trailing"#, 400, "invalid", "not valid JSON"),
        (POST, SANDBOXES, "[]", 400, "invalid", "must be a JSON object"),
        (POST, SANDBOXES, "null", 400, "invalid", "must be a JSON object"),
        (POST, SANDBOXES, r#"{"nmae":"x"}"#, 400, "invalid", "unknown field `nmae`"),
        (POST, SANDBOXES, r#"{"hooks":{"on_creat":[]}}"#, 400, "invalid", "hooks.on_creat"),
        (POST, SANDBOXES, r#"{"name":7}"#, 400, "invalid", "name: invalid type"),
        (POST, SANDBOXES, r#"{"class":7}"#, 400, "invalid", "class: invalid type"),
        (POST, SANDBOXES, r#"{"on_idle":[true]}"#, 400, "invalid", "on_idle: invalid type"),
        (POST, SANDBOXES, r#"{"class":7"#, 400, "invalid", "not valid JSON"),
        // Values that make no sense.
        (
            POST,
            SANDBOXES,
            r#"{"name":"../etc"}"#,
            400,
            "invalid",
            "name: `../etc` cannot be a name",
        ),
        (POST, SANDBOXES, r#"{"name":""}"#, 400, "invalid", "name:"),
        (POST, SANDBOXES, r#"{"memory":-1}"#, 400, "invalid", "memory: invalid type"),
        (POST, SANDBOXES, r#"{"memory":"lots"}"#, 400, "invalid", "memory: `lots` is not a size"),
        (POST, SANDBOXES, r#"{"memory":1}"#, 400, "invalid", "memory: between 16M and 16T"),
        (POST, SANDBOXES, r#"{"disk":"-5G"}"#, 400, "invalid", "disk: `-5G` is not a size"),
        (POST, SANDBOXES, r#"{"vcpus":-2}"#, 400, "invalid", "vcpus: between"),
        (POST, SANDBOXES, r#"{"vcpus":1e300}"#, 400, "invalid", "vcpus: between"),
        (POST, SANDBOXES, r#"{"pids":-1}"#, 400, "invalid", "pids: invalid value"),
        (POST, SANDBOXES, r#"{"expires":"soon"}"#, 400, "invalid", "expires: `soon` is not a span"),
        (POST, SANDBOXES, r#"{"expires":-5}"#, 400, "invalid", "expires: invalid type"),
        (
            POST,
            SANDBOXES,
            r#"{"expires":18446744073709551615}"#,
            400,
            "invalid",
            "expires: at most",
        ),
        (POST, SANDBOXES, r#"{"class":"pet"}"#, 400, "invalid", "class: unknown variant"),
        (
            POST,
            SANDBOXES,
            r#"{"class":"ephemeral","persistent":true}"#,
            400,
            "invalid",
            "persistent:",
        ),
        (POST, SANDBOXES, r#"{"env":{"A=B":"x"}}"#, 400, "invalid", "env:"),
        (POST, SANDBOXES, r#"{"cwd":"relative"}"#, 400, "invalid", "cwd:"),
        (POST, SANDBOXES, r#"{"tags":{"":"x"}}"#, 400, "invalid", "tags:"),
        (POST, SANDBOXES, r#"{"from":"snp-nonsense"}"#, 400, "invalid", "from: `snp-nonsense`"),
        (POST, SANDBOXES, r#"{"if_exists":"maybe"}"#, 400, "invalid", "if_exists"),
        // Things that are not there.
        (POST, SANDBOXES, r#"{"image":"no-such-image"}"#, 404, "image_not_found", "no-such-image"),
        (POST, SANDBOXES, r#"{"image":"small","driver":"warp"}"#, 400, "unknown_driver", "warp"),
        // Memory and what becomes of it.
        (POST, SANDBOXES, r#"{"on_idle":"sleep"}"#, 400, "invalid", "on_idle: unknown variant"),
        (PATCH, "/v1/sandboxes/box", r#"{"on_idle":"later"}"#, 400, "invalid", "on_idle:"),
        (PATCH, "/v1/sandboxes/box", r#"{"driver":"warp"}"#, 400, "unknown_driver", "warp"),
        (POST, "/v1/sandboxes/box/fork", r#"{"count":0}"#, 400, "invalid", "count: between 1 and"),
        (
            POST,
            "/v1/sandboxes/box/fork",
            r#"{"count":101}"#,
            400,
            "invalid",
            "count: between 1 and",
        ),
        (POST, "/v1/sandboxes/box/fork", r#"{"count":-1}"#, 400, "invalid", "count: invalid value"),
        (
            POST,
            "/v1/sandboxes/box/fork",
            r#"{"count":"ten"}"#,
            400,
            "invalid",
            "count: invalid type",
        ),
        (POST, "/v1/sandboxes/nothing/pause", "", 404, "sandbox_not_found", "nothing"),
        (
            POST,
            "/v1/sandboxes/box/pause",
            r#"{"force":true}"#,
            400,
            "invalid",
            "unknown field `force`",
        ),
        (GET, "/v1/sandboxes/nothing/why", "", 404, "sandbox_not_found", "nothing"),
        (GET, "/v1/sandboxes/box/why?deep=1", "", 400, "invalid", "deep"),
        (
            POST,
            SANDBOXES,
            r#"{"from":"snp-00000000000000000000000000"}"#,
            404,
            "snapshot_not_found",
            "snp-",
        ),
        (GET, "/v1/sandboxes/nobody", "", 404, "sandbox_not_found", "nobody"),
        (POST, "/v1/sandboxes/nobody/stop", "", 404, "sandbox_not_found", "nobody"),
        (
            POST,
            "/v1/sandboxes/nobody/exec",
            r#"{"argv":["true"]}"#,
            404,
            "sandbox_not_found",
            "nobody",
        ),
        (DELETE, "/v1/sandboxes/nobody", "", 404, "sandbox_not_found", "nobody"),
        (GET, NO_SNAPSHOT, "", 404, "snapshot_not_found", "snp-"),
        (GET, "/v1/snapshots/xyz", "", 400, "invalid", "xyz"),
        (GET, NO_COMMAND, "", 404, "command_not_found", "cmd-"),
        (GET, "/v1/images/nothing/here", "", 404, "image_not_found", "nothing/here"),
        (GET, "/v1/projects/nothing/keys", "", 404, "project_not_found", "nothing"),
        (
            POST,
            ROLLBACK,
            r#"{"to":"snp-00000000000000000000000000"}"#,
            404,
            "snapshot_not_found",
            "snp-",
        ),
        (
            POST,
            "/v1/images/import",
            r#"{"path":"/no/such","name":"x"}"#,
            400,
            "invalid",
            "/no/such",
        ),
        (POST, CUSTOMIZE, r#"{"name":"x","from":"nothing"}"#, 404, "image_not_found", "nothing"),
        (POST, CUSTOMIZE, r#"{"name":"small","from":"small"}"#, 400, "invalid", "`small`"),
        (POST, CUSTOMIZE, r#"{"name":"a b","from":"small"}"#, 400, "invalid", "a b"),
        (POST, CUSTOMIZE, r#"{"name":"x","path":["bin"]}"#, 400, "invalid", "path `bin`"),
        (POST, CUSTOMIZE, r#"{"name":"x","env":{"A=B":"1"}}"#, 400, "invalid", "A=B"),
        (
            POST,
            CUSTOMIZE,
            r#"{"name":"x","add":[{"from":"/no/such","to":"/x"}]}"#,
            400,
            "invalid",
            "/no/such",
        ),
        (
            POST,
            CUSTOMIZE,
            r#"{"name":"x","add":[{"from":"/","to":"/"}]}"#,
            400,
            "invalid",
            "below `/`",
        ),
        (POST, CUSTOMIZE, r#"{"name":"x","dir":"/"}"#, 400, "invalid", "dir"),
        // What exists already, or is not so.
        (POST, SANDBOXES, r#"{"name":"box","image":"small"}"#, 409, "name_taken", "box"),
        (POST, "/v1/projects", r#"{"name":"main"}"#, 409, "project_taken", "main"),
        (
            POST,
            "/v1/sandboxes/box/exec?if_running=true",
            r#"{"argv":["true"]}"#,
            409,
            "not_running",
            "box",
        ),
        (GET, "/v1/sandboxes/box/files?path=/x&if_running=true", "", 409, "not_running", "box"),
        (
            POST,
            "/v1/sandboxes/box/start",
            r#"{"expect_generation":7}"#,
            412,
            "generation_mismatch",
            "7",
        ),
        // Commands that cannot be.
        (POST, "/v1/sandboxes/box/exec", r#"{"argv":[]}"#, 400, "invalid", "argv"),
        (
            POST,
            "/v1/sandboxes/box/exec",
            r#"{"argv":["a"],"timeout":"x"}"#,
            400,
            "invalid",
            "timeout:",
        ),
        (
            POST,
            "/v1/sandboxes/box/exec",
            r#"{"argv":["a"],"input":"x","input_base64":"eA=="}"#,
            400,
            "invalid",
            "cannot be combined",
        ),
        (
            POST,
            "/v1/sandboxes/box/exec",
            r#"{"argv":["a"],"input_base64":"???"}"#,
            400,
            "invalid",
            "not base64",
        ),
        // Paths and queries.
        (GET, "/v1/sandboxes/b%20x", "", 400, "invalid", "cannot be a name"),
        (GET, "/v1/sandboxes/%ff", "", 400, "invalid", "name"),
        (GET, "/v1/sandboxes?limit=0", "", 400, "invalid", "limit"),
        (GET, "/v1/sandboxes?limit=-1", "", 400, "invalid", "limit"),
        (GET, "/v1/sandboxes?limt=1", "", 400, "invalid", "unknown query parameter `limt`"),
        (GET, "/v1/sandboxes?tag=novalue", "", 400, "invalid", "tag"),
        (GET, "/v1/sandboxes?state=asleep", "", 400, "invalid", "state"),
        (GET, "/v1/sandboxes?limit=1&limit=2", "", 400, "invalid", "more than once"),
        (GET, "/v1/sandboxes/box/files", "", 400, "invalid", "`path` is missing"),
        (PUT, "/v1/sandboxes/box/files?path=/x&mode=999", "", 400, "invalid", "mode"),
        // Routes.
        (GET, "/v9/sandboxes", "", 404, "route_not_found", "no such route"),
        (GET, "/", "", 404, "route_not_found", "no such route"),
        (PUT, SANDBOXES, "", 405, "method_not_allowed", "method"),
        (GET, "/v1/sandboxes/box/exec/ws", "", 426, "upgrade_required", ""),
    ]
}

#[tokio::test]
async fn every_wrong_request_is_told_what_is_wrong() {
    let served = Served::without_machines().await;
    served.create("box").await;
    let mut wrong = Vec::new();
    for (method, path, body, status, code, piece) in rows() {
        let answer = if body.is_empty() {
            served.call(method.clone(), path, &served.admin).await
        } else {
            served.json(method.clone(), path, &served.admin, body).await
        };
        if answer.status.is_success() {
            wrong.push(format!("{method} {path} {body}\n  was taken: {:?}", answer.json()));
            continue;
        }
        let error = answer.error();
        if answer.status != status || error.code != code || !error.message.contains(piece) {
            wrong.push(format!(
                "{method} {path} {body}\n  expected {status} {code} …{piece}…\n  got {} {error:?}",
                answer.status
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test]
async fn what_can_be_helped_has_a_hint() {
    let served = Served::without_machines().await;
    served.create("box").await;
    for (path, body) in [
        ("/v1/sandboxes", r#"{"name":"box","image":"small"}"#),
        ("/v1/sandboxes", r#"{"image":"no-such-image"}"#),
        ("/v1/sandboxes/nobody/stop", ""),
        ("/v1/sandboxes/box/exec?if_running=true", r#"{"argv":["true"]}"#),
    ] {
        let error = served.post(path, &served.write, body).await.error();
        assert!(error.hint.as_ref().is_some_and(|hint| !hint.is_empty()), "{path}: {error:?}");
    }
}

#[tokio::test]
async fn bodies_must_say_that_they_are_json_and_end() {
    let served = Served::without_machines().await;
    for kind in ["text/plain", "application/x-www-form-urlencoded"] {
        let request = served
            .request(POST, SANDBOXES, &served.write)
            .header("content-type", kind)
            .body(Full::new(Bytes::from_static(b"{}")))
            .unwrap();
        let answer = read(served.send(request).await).await;
        assert_eq!(answer.status, 415);
        assert_eq!(answer.error().code, "unsupported_media_type");
        assert!(answer.error().hint.is_some_and(|hint| hint.contains("application/json")));
    }

    // Announced, and not announced.
    let huge = format!(r#"{{"purpose":"{}"}}"#, "x".repeat(1 << 20));
    let announced = served.post(SANDBOXES, &served.write, &huge).await;
    assert_eq!((announced.status.as_u16(), announced.error().code.as_str()), (413, "too_large"));
    let request = served
        .request(PATCH, "/v1/sandboxes/box", &served.write)
        .header("content-type", "application/json")
        .body(pieces((0..200).map(|_| Bytes::from(vec![b' '; 16 << 10]))))
        .unwrap();
    let streamed = read(served.send(request).await).await;
    assert_eq!((streamed.status.as_u16(), streamed.error().code.as_str()), (413, "too_large"));
}

#[tokio::test]
async fn keys_that_do_not_work() {
    let served = Served::without_machines().await;
    served.create("box").await;
    let main = "main".parse().unwrap();
    let short = key(&served.engine, &main, Scope::Write, Some(Span(1))).await;
    tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    for secret in ["", "skp_nonsense", &short] {
        let answer = served.get(SANDBOXES, secret).await;
        assert_eq!(answer.status, 401, "{secret}: {answer:?}");
        assert_eq!(answer.error().code, "unauthorized");
        assert!(answer.error().hint.is_some());
    }
    let request = served
        .request(GET, SANDBOXES, "")
        .header("authorization", "Basic dXNlcjpwYXNz")
        .body(Full::new(Bytes::new()))
        .unwrap();
    assert_eq!(read(served.send(request).await).await.status, 401);
}

#[tokio::test]
async fn idempotency_keys_have_a_form() {
    let served = Served::without_machines().await;
    let long = "k".repeat(201);
    for (key, status) in [("once-1", 201), ("once-1", 201), (long.as_str(), 400)] {
        let request = served
            .request(POST, SANDBOXES, &served.write)
            .header("content-type", "application/json")
            .header("idempotency-key", key)
            .body(Full::new(Bytes::from_static(
                br#"{"name":"twice","image":"small","start":false}"#,
            )))
            .unwrap();
        let answer = read(served.send(request).await).await;
        assert_eq!(answer.status, status, "{key}: {answer:?}");
    }
}
