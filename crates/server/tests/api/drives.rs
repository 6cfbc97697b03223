//! Drives, in our words and in Vercel's.

use hyper::{Method, StatusCode};
use serde_json::{Value, json};

use crate::fixture::{Answer, Served};

const THEIRS: &str = "/api/v2/sandboxes/drives";

async fn theirs(served: &Served, method: Method, path: &str, body: &Value) -> Answer {
    let path = format!("{THEIRS}{path}");
    served.json(method, &path, &served.write, &body.to_string()).await
}

fn code(answer: &Answer) -> (u16, String) {
    let body = answer.json();
    (answer.status.as_u16(), body["error"]["code"].as_str().unwrap_or_default().to_owned())
}

#[tokio::test]
async fn their_clients_get_or_create_list_and_delete() {
    let served = Served::without_machines().await;
    let wish = json!({ "projectId": "prj_main", "region": "sfo1", "maxSizeBytes": 1024 });
    let made = theirs(&served, Method::POST, "/cache", &wish).await;
    assert_eq!(made.status, StatusCode::CREATED);
    let drive = made.json()["drive"].clone();
    let id = drive["id"].as_str().unwrap().to_owned();
    assert!(id.starts_with("drive_"), "{id}");
    let mut fields: Vec<&String> = drive.as_object().unwrap().keys().collect();
    fields.sort_unstable();
    let expected = ["createdAt", "id", "maxSizeBytes", "name", "projectId", "region", "updatedAt"];
    assert_eq!(fields, expected, "what is not there is left out");
    assert_eq!(drive["projectId"], "prj_main");
    assert_eq!((&drive["region"], &drive["maxSizeBytes"]), (&json!("sfo1"), &json!(1024)));

    for same in [wish.clone(), json!({}), json!({ "region": "sfo1" })] {
        let got = theirs(&served, Method::POST, "/cache", &same).await;
        assert_eq!((got.status, &got.json()["drive"]), (StatusCode::OK, &drive), "{same}");
    }
    for other in [json!({ "region": "iad1" }), json!({ "maxSizeBytes": 2048 })] {
        let refused = theirs(&served, Method::POST, "/cache", &other).await;
        assert_eq!(code(&refused), (409, "conflict".to_owned()), "{other}");
    }
    for name in ["cache", id.as_str()] {
        let got = served.get(&format!("{THEIRS}/{name}?projectId=prj_main"), &served.read).await;
        assert_eq!((got.status, &got.json()["drive"]), (StatusCode::OK, &drive));
    }
    let plain = theirs(&served, Method::POST, "/b", &json!({})).await.json();
    assert_eq!(plain["drive"]["maxSizeBytes"], 1_u64 << 40);
    let again = json!({ "region": plain["drive"]["region"] });
    let again = theirs(&served, Method::POST, "/b", &again).await;
    assert_eq!(again.status, StatusCode::OK, "the region it was told to have");

    let names = async |query: &str| {
        let page = served.get(&format!("{THEIRS}?{query}"), &served.read).await;
        assert_eq!(page.status, StatusCode::OK, "{query}: {}", page.json());
        let body = page.json();
        let drives = body["drives"].as_array().unwrap();
        let names: Vec<_> = drives.iter().map(|drive| drive["name"].clone()).collect();
        assert_eq!(body["pagination"]["count"], names.len());
        (names, body["pagination"]["next"].as_str().map(ToOwned::to_owned))
    };
    assert_eq!(names("sortBy=name&sortOrder=asc").await.0, ["b", "cache"]);
    assert_eq!(names("").await.0, ["b", "cache"], "newest first");
    assert_eq!(names("sortBy=createdAt&sortOrder=asc").await.0, ["cache", "b"]);
    assert_eq!(names("namePrefix=ca&limit=50&sortBy=name&sortOrder=asc").await.0, ["cache"]);
    let (first, next) = names("limit=1&sortBy=updatedAt").await;
    let (rest, end) = names(&format!("limit=1&sortBy=updatedAt&cursor={}", next.unwrap())).await;
    assert_eq!((first.len(), rest.len(), end), (1, 1, None));

    let gone = theirs(&served, Method::DELETE, "/cache", &json!({})).await;
    assert_eq!((gone.status, &gone.json()["drive"]["id"]), (StatusCode::OK, &json!(id)));
    for name in ["cache", id.as_str(), "drive_missing", "a.b"] {
        for method in [Method::GET, Method::DELETE] {
            let missing = theirs(&served, method, &format!("/{name}"), &json!({})).await;
            assert_eq!(code(&missing), (404, "not_found".to_owned()), "{name}");
        }
    }
}

#[tokio::test]
async fn their_mistakes_are_told_by_field() {
    let served = Served::without_machines().await;
    theirs(&served, Method::POST, "/data", &json!({})).await;
    let long = "x".repeat(65);
    for (path, body, told) in [
        (format!("/{long}"), json!({}), "name"),
        ("/a.b".to_owned(), json!({}), "name"),
        ("/a".to_owned(), json!({ "maxSizeBytes": 0 }), "maxSizeBytes"),
        ("/a".to_owned(), json!({ "maxSizeBytes": "1G" }), "maxSizeBytes"),
        ("/a".to_owned(), json!({ "region": 1 }), "region"),
        ("/a".to_owned(), json!({ "colour": "red" }), "colour"),
        ("/data/fork".to_owned(), json!({}), "name"),
        ("/data/fork".to_owned(), json!({ "name": "a b" }), "name"),
    ] {
        let refused = theirs(&served, Method::POST, &path, &body).await;
        assert_eq!(code(&refused), (400, "bad_request".to_owned()), "{path} {body}");
        let message = refused.json()["error"]["message"].to_string();
        assert!(message.contains(told), "{told} in {message}");
    }
    for query in ["sortBy=size", "limit=0", "limit=51", "sortOrder=up", "cursor=x"] {
        let refused = served.get(&format!("{THEIRS}?{query}"), &served.read).await;
        assert_eq!(code(&refused), (400, "bad_request".to_owned()), "{query}");
    }
    let early = theirs(&served, Method::POST, "/data/fork", &json!({ "name": "copy" })).await;
    assert_eq!(code(&early), (409, "drive_not_initialized".to_owned()));
    let missing = theirs(&served, Method::POST, "/none/fork", &json!({ "name": "copy" })).await;
    assert_eq!(code(&missing), (404, "not_found".to_owned()));
    let reader = served.json(Method::POST, &format!("{THEIRS}/x"), &served.read, "{}").await;
    assert_eq!(reader.status, StatusCode::FORBIDDEN);
}

#[tokio::test]
async fn ours_say_what_they_made() {
    let served = Served::without_machines().await;
    let made = served.post("/v1/drives", &served.write, r#"{"name":"data","max_size":"2G"}"#).await;
    assert_eq!(made.status, StatusCode::CREATED);
    let drive = made.json();
    assert_eq!(drive["max_size_bytes"], 2_u64 << 30);
    assert_eq!((&drive["initialized"], &drive["attached"]), (&json!(false), &Value::Null));
    for (body, status, code) in [
        (r#"{"name":"data"}"#, 409, "drive_taken"),
        (r#"{"name":"data","if_exists":"get","max_size":"1G"}"#, 409, "drive_mismatch"),
        (r#"{"name":"../x"}"#, 400, "invalid"),
        (r#"{"name":"x","max_size":0}"#, 400, "invalid"),
        (r#"{"name":"x","size":1}"#, 400, "invalid"),
    ] {
        let refused = served.post("/v1/drives", &served.write, body).await;
        assert_eq!(
            (refused.status.as_u16(), refused.error().code.as_str()),
            (status, code),
            "{body}"
        );
    }
    let got =
        served.post("/v1/drives", &served.write, r#"{"name":"data","if_exists":"get"}"#).await;
    assert_eq!((got.status, got.json()), (StatusCode::OK, drive.clone()));
    assert_eq!(served.get("/v1/drives/data", &served.read).await.json(), drive);
    let listed = served.get("/v1/drives?name_prefix=da", &served.read).await.json();
    assert_eq!(listed, json!({ "items": [drive], "next": null }));
    let early = served.post("/v1/drives/data/fork", &served.write, r#"{"name":"copy"}"#).await;
    assert_eq!(
        (early.status, early.error().code.as_str()),
        (StatusCode::CONFLICT, "drive_not_initialized")
    );
    let gone = served.call(Method::DELETE, "/v1/drives/data", &served.write).await;
    assert_eq!((gone.status, gone.json()), (StatusCode::OK, drive));
    let missing = served.get("/v1/drives/data", &served.read).await;
    assert_eq!(
        (missing.status, missing.error().code.as_str()),
        (StatusCode::NOT_FOUND, "drive_not_found")
    );
}

#[tokio::test]
async fn mounts_are_checked_before_anything_is_made() {
    let served = Served::without_machines().await;
    served.post("/v1/drives", &served.write, r#"{"name":"data"}"#).await;
    for (mounts, status) in [
        (json!({ "data": { "drive": "data" } }), 400),
        (json!({ "/": { "drive": "data" } }), 400),
        (json!({ "/proc/x": { "drive": "data" } }), 400),
        (json!({ "/a/../b": { "drive": "data" } }), 400),
        (json!({ "/a": { "drive": "data", "mode": "rw" } }), 400),
        (json!({ "/a": { "drive": "a/b" } }), 400),
        (
            json!({ "/a": { "drive": "data" }, "/a/b": { "drive": "data", "mode": "snapshot" } }),
            400,
        ),
        (json!({ "/a": { "drive": "none" } }), 404),
    ] {
        let body = json!({ "name": "box", "mounts": mounts }).to_string();
        // Theirs looks for the drive only after it has made the image, which is not for this test.
        for path in ["/v1/sandboxes", "/api/v2/sandboxes"].into_iter().take(if status == 400 {
            2
        } else {
            1
        }) {
            let refused = served.post(path, &served.write, &body).await;
            assert_eq!(refused.status.as_u16(), status, "{path} {body}: {}", refused.json());
        }
    }
    let listed = served.get("/v1/sandboxes", &served.read).await.json();
    assert_eq!(listed["items"], json!([]));
}
