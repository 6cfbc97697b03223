//! Policies and the journal, as clients send and read them.

use hyper::{Method, StatusCode};
use serde_json::{Value, json};

use crate::fixture::Served;

const PUT: Method = Method::PUT;
const BOX: &str = "/v1/sandboxes/box/network";
const MAIN: &str = "/v1/projects/main/network";

fn whole() -> Value {
    json!({
        "mode": "custom",
        "domains": ["*.example.com:443", "git.example.org:22,443"],
        "allow": ["10.0.0.0/8", "[2001:db8::/32]:443"],
        "deny": ["10.1.0.0/16"],
        "requests": [
            {
                "domain": "api.example.com",
                "match": {
                    "methods": ["GET", "POST"],
                    "path": { "prefix": "/v1/" },
                    "query": [{ "key": { "exact": "k" }, "value": { "regex": "^v" } }],
                    "headers": [{ "key": { "exact": "x-api-key" } }],
                },
                "action": { "headers": { "authorization": "Bearer s3cret" } },
            },
            { "domain": "api.example.com", "action": { "forward": { "url": "https://p.example.com/in", "prefix": "x-p-" } } },
            { "domain": "*.example.com", "action": { "answer": { "status": 404, "headers": { "x": "y" }, "body": "no" } } },
            { "domain": "a.example.com", "action": "allow" },
            { "domain": "b.example.com", "action": "deny" },
        ],
    })
}

/// As it is returned: without the value.
fn told() -> Value {
    let mut policy = whole();
    policy["requests"][0]["action"]["headers"]["authorization"] = Value::Null;
    policy
}

#[tokio::test]
async fn every_field_goes_in_and_comes_out_but_for_values() {
    let served = Served::without_machines().await;
    let body =
        json!({ "name": "box", "image": "small", "start": false, "network": whole() }).to_string();
    let made = served.post("/v1/sandboxes", &served.write, &body).await;
    assert_eq!(made.status, StatusCode::CREATED, "{made:?}");
    assert_eq!(made.json()["sandbox"]["network"], told());

    let got = served.get(BOX, &served.read).await;
    assert_eq!(got.json(), json!({ "network": told(), "own": true, "bound": null }));
    for path in ["/v1/sandboxes/box", "/v1/sandboxes", BOX] {
        let text = served.get(path, &served.admin).await.body;
        assert!(!String::from_utf8_lossy(&text).contains("s3cret"), "{path}");
    }

    // What was returned may be sent back with a change, and the value stays.
    let mut changed = told();
    changed["domains"] = json!(["only.example.com"]);
    let set = json!({ "network": changed }).to_string();
    let set = served.json(PUT, BOX, &served.write, &set).await;
    assert_eq!((set.status, &set.json()["network"]), (StatusCode::OK, &changed), "{set:?}");

    let fork = served.post("/v1/sandboxes/box/fork", &served.write, r#"{"name":"fork"}"#).await;
    assert_eq!(fork.json()["sandbox"]["network"], changed, "{fork:?}");
    let patched =
        served.json(Method::PATCH, "/v1/sandboxes/fork", &served.write, r#"{"network":null}"#);
    assert_eq!(patched.await.json()["network"], Value::Null);
    let back = served.get("/v1/sandboxes/fork/network", &served.read).await.json();
    assert_eq!((&back["network"], &back["own"]), (&json!({ "mode": "allow-all" }), &json!(false)));
    let refused = served.json(PUT, BOX, &served.read, r#"{"network":null}"#).await;
    assert_eq!(refused.status, StatusCode::FORBIDDEN);
}

#[tokio::test]
async fn a_project_has_a_default_and_a_bound_which_admins_set() {
    let served = Served::without_machines().await;
    served.create("box").await;
    let none =
        json!({ "default": { "mode": "allow-all" }, "bound": null, "max_connections": null });
    assert_eq!(served.get(MAIN, &served.admin).await.json(), none);
    let word = json!({ "default": { "mode": "deny-all" }, "bound": whole() }).to_string();
    for key in [&served.write, &served.read] {
        assert_eq!(served.get(MAIN, key).await.status, StatusCode::FORBIDDEN);
        assert_eq!(served.json(PUT, MAIN, key, &word).await.status, StatusCode::FORBIDDEN);
    }
    let set = served.json(PUT, MAIN, &served.admin, &word).await;
    let as_set =
        json!({ "default": { "mode": "deny-all" }, "bound": told(), "max_connections": null });
    assert_eq!(set.json(), as_set);
    let seen = served.get(BOX, &served.read).await.json();
    assert_eq!((&seen["network"]["mode"], &seen["own"]), (&json!("deny-all"), &json!(false)));
    assert_eq!(seen["bound"], told());
    // Sent back as it was returned.
    let again = served.json(PUT, MAIN, &served.admin, &set.json().to_string()).await;
    assert_eq!(again.json(), set.json(), "{again:?}");
    let gone = served.json(PUT, MAIN, &served.admin, r#"{"default":{"mode":"allow-all"}}"#).await;
    assert_eq!(gone.json(), none);
}

#[tokio::test]
async fn what_is_wrong_with_a_policy_is_told_by_its_place() {
    let served = Served::without_machines().await;
    served.create("box").await;
    let custom = |more: Value| {
        let mut policy = json!({ "mode": "custom" });
        policy.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        policy
    };
    let rule = |matches: Value, action: Value| {
        custom(json!({ "requests": [{ "domain": "a.com", "match": matches, "action": action }] }))
    };
    let rows = [
        (json!({}), "mode"),
        (json!({ "mode": "most" }), ".mode"),
        (json!({ "mode": "allow-all", "domain": [] }), ".domain"),
        (json!({ "mode": "allow-all", "domains": ["a.com"] }), ".domains: "),
        (json!({ "mode": "deny-all", "allow": ["10.0.0.0/8"] }), ".allow: "),
        (custom(json!({ "domains": ["a.com", "10.0.0.1"] })), ".domains[1]: "),
        (custom(json!({ "domains": ["a.com:0"] })), ".domains[0]: "),
        (custom(json!({ "allow": ["10.0.0.0/40"] })), ".allow[0]: "),
        (custom(json!({ "deny": ["10.0.0.0/8", "a.com"] })), ".deny[1]: "),
        (custom(json!({ "deny": "10.0.0.0/8" })), ".deny"),
        (rule(json!({ "path": { "regex": "(" } }), json!("deny")), ".requests[0].match.path"),
        (rule(json!({ "path": { "glob": "x" } }), json!("deny")), ".requests[0].match.path"),
        (rule(json!({ "methods": ["A B"] }), json!("deny")), ".requests[0].match.methods[0]"),
        (rule(json!({ "query": [{ "kee": {} }] }), json!("deny")), ".requests[0].match.query[0]"),
        (rule(json!({}), json!("drop")), ".requests[0].action"),
        (
            rule(json!({}), json!({ "answer": { "status": 99 } })),
            ".requests[0].action.answer.status",
        ),
        (
            rule(json!({}), json!({ "forward": { "url": "ftp://a" } })),
            ".requests[0].action.forward.url",
        ),
        (rule(json!({}), json!({ "headers": {} })), ".requests[0].action.headers"),
        (rule(json!({}), json!({ "headers": { "a b": "c" } })), ".requests[0].action.headers.a b"),
        (rule(json!({}), json!({ "headers": { "x": null } })), ".requests[0].action.headers.x"),
        (rule(json!({}), json!({ "headers": { "x": "a\nb" } })), ".requests[0].action.headers.x"),
        (rule(json!({}), json!({ "headers": { "X": "a", "x": "b" } })), "given twice"),
    ];
    for (policy, place) in rows {
        let create = json!({ "name": "new", "image": "small", "network": policy }).to_string();
        let project = json!({ "default": policy }).to_string();
        for (field, answer) in [
            ("network", served.post("/v1/sandboxes", &served.write, &create).await),
            (
                "network",
                served
                    .json(PUT, BOX, &served.write, &json!({ "network": policy }).to_string())
                    .await,
            ),
            ("default", served.json(PUT, MAIN, &served.admin, &project).await),
        ] {
            assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{policy}: {answer:?}");
            let message = answer.error().message;
            assert!(message.starts_with(field) && message.contains(place), "{policy}: {message}");
        }
    }
    assert_eq!(served.json(PUT, BOX, &served.write, "{}").await.status, StatusCode::BAD_REQUEST);
    assert_eq!(served.get("/v1/sandboxes/new", &served.read).await.status, StatusCode::NOT_FOUND);
    assert_eq!(served.get(BOX, &served.read).await.json()["own"], false, "nothing was changed");
}

#[tokio::test]
async fn the_journal_is_asked_for_in_parts() {
    let served = Served::without_machines().await;
    served.create("box").await;
    let list = "/v1/sandboxes/box/connections";
    for query in [
        "",
        "?verdict=denied&open=true&since=1h&host=*.example.com&limit=5",
        "?since=2026-01-01T00:00:00Z&host=10.0.0.1",
        "?session=ses-00000000000000000000000000",
    ] {
        let empty = served.get(&format!("{list}{query}"), &served.read).await;
        assert_eq!(empty.json(), json!({ "items": [], "next": null }), "{query}");
    }
    let none = served.get(&format!("{list}/summary"), &served.read).await.json();
    assert_eq!(
        none,
        json!({ "destinations": [], "connections": 0, "denied": 0, "bytes_in": 0, "bytes_out": 0 })
    );
    for (query, told) in [
        ("?verdict=maybe", "`verdict`"),
        ("?session=x", "`session`"),
        ("?host=a..b", "`host`"),
        ("?since=yesterday", "`since`"),
        ("?open=perhaps", "`open`"),
        ("?limit=0", "`limit`"),
        ("?cursor=x", "cursor"),
        ("?name=x", "`name`"),
    ] {
        let refused = served.get(&format!("{list}{query}"), &served.read).await;
        assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{query}");
        assert!(refused.error().message.contains(told), "{query}: {refused:?}");
    }
    let gone = served.get("/v1/sandboxes/nobody/connections", &served.read).await;
    assert_eq!(gone.status, StatusCode::NOT_FOUND);
    let foreign = served.get(list, &served.foreign).await;
    assert_eq!(foreign.status, StatusCode::NOT_FOUND);
}
