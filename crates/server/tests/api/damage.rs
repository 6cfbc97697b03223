//! Damaged data, and data that is too much, over the API.

use std::path::{Path, PathBuf};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{Method, StatusCode};

use crate::fixture::{Served, read};

/// The file of this name under a directory, if there is one.
fn find(dir: &Path, name: &str) -> Option<PathBuf> {
    for entry in std::fs::read_dir(dir).ok()?.flatten() {
        let path = entry.path();
        if entry.file_name() == name {
            return Some(path);
        }
        if entry.file_type().is_ok_and(|kind| kind.is_dir())
            && let Some(found) = find(&path, name)
        {
            return Some(found);
        }
    }
    None
}

#[tokio::test]
async fn a_check_of_a_running_server_finds_a_changed_file() {
    let Some(served) =
        Served::with_machines("a_check_of_a_running_server_finds_a_changed_file").await
    else {
        return;
    };
    served.create("box").await;
    let exec = r#"{"argv":["sh","-c","echo good > /work/kept-file"]}"#;
    let ran = served.post("/v1/sandboxes/box/exec", &served.write, exec).await;
    assert_eq!(ran.status, StatusCode::OK, "{ran:?}");
    let stopped = served.post("/v1/sandboxes/box/stop", &served.write, "").await;
    assert_eq!(stopped.status, StatusCode::OK, "{stopped:?}");

    let verify = r#"{"verify":true}"#;
    let clean = served.post("/v1/fsck", &served.admin, verify).await;
    assert_eq!(clean.status, StatusCode::OK, "{clean:?}");
    assert_eq!(clean.json()["broken"], false, "{clean:?}");
    let refused = served.post("/v1/fsck", &served.write, verify).await;
    assert_eq!(refused.status, StatusCode::FORBIDDEN, "{refused:?}");
    let wrong = served.post("/v1/fsck", &served.admin, r#"{"verify":"maybe"}"#).await;
    assert_eq!(wrong.status, StatusCode::BAD_REQUEST, "{wrong:?}");

    let file = find(&served.data().join("layers"), "kept-file").expect("the file of the layer");
    // The same size and time: only the content differs.
    let changed = std::fs::metadata(&file).unwrap().modified().unwrap();
    let writing = std::fs::File::options().write(true).open(&file).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&writing, b"evil", 0).unwrap();
    writing.set_modified(changed).unwrap();
    drop(writing);
    let found = served.post("/v1/fsck", &served.admin, verify).await.json();
    assert_eq!(found["broken"], true, "{found}");
    let text = found["problems"].to_string();
    assert!(text.contains("kept-file"), "{text}");
    let damage = served.get("/v1/damage", &served.admin).await.json();
    assert!(!damage["items"].as_array().unwrap().is_empty(), "{damage}");
    let refused = served.get("/v1/damage", &served.write).await;
    assert_eq!(refused.status, StatusCode::FORBIDDEN, "{refused:?}");
}

#[tokio::test]
async fn an_upload_beyond_the_disk_limit_is_refused_as_too_large() {
    let Some(served) =
        Served::with_machines("an_upload_beyond_the_disk_limit_is_refused_as_too_large").await
    else {
        return;
    };
    let body = r#"{"name":"box","image":"small","disk":"16M"}"#;
    let made = served.post("/v1/sandboxes", &served.write, body).await;
    assert_eq!(made.status, StatusCode::CREATED, "{made:?}");
    let upload = async |path: &str, bytes: usize| {
        let path = format!("/v1/sandboxes/box/files?path={path}");
        let request = served
            .request(Method::PUT, &path, &served.write)
            .body(Full::new(Bytes::from(vec![1; bytes])))
            .unwrap();
        read(served.send(request).await).await
    };
    let small = upload("/work/small", 1 << 20).await;
    assert!(small.status.is_success(), "{small:?}");
    let large = upload("/work/large", 40 << 20).await;
    assert_eq!(large.status, StatusCode::PAYLOAD_TOO_LARGE, "{large:?}");
    assert_eq!(large.error().code, "disk_limit");
    let again = upload("/work/small-too", 1 << 20).await;
    assert!(again.status.is_success(), "the room of what was refused is free: {again:?}");
}
