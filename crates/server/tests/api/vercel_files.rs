//! Files as Vercel's clients write and read them.

use std::io::Write as _;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use http_body_util::Full;
use hyper::{Method, StatusCode};
use sandkeep_core::engine::Stop;
use sandkeep_core::model::Patch;
use serde_json::{Value, json};

use crate::fixture::{Answer, Served, pieces, read};

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// An archive of plain files as their clients make them: owned by root, whichever user unpacks it.
fn archive(files: &[(&str, u32, &[u8])]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, mode, content) in files {
        let mut header = tar::Header::new_ustar();
        header.set_size(content.len() as u64);
        header.set_mode(*mode);
        header.set_entry_type(tar::EntryType::Regular);
        // Names that the library would refuse to write.
        header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
        header.set_cksum();
        builder.append(&header, *content).unwrap();
    }
    builder.into_inner().unwrap()
}

async fn put(served: &Served, session: &str, cwd: &str, kind: &str, body: Vec<u8>) -> Answer {
    let request = served
        .request(Method::POST, &format!("{session}/fs/write"), &served.write)
        .header("content-type", kind)
        .header("x-cwd", cwd)
        .body(Full::new(Bytes::from(body)))
        .unwrap();
    read(served.send(request).await).await
}

async fn write(served: &Served, session: &str, files: &[(&str, u32, &[u8])]) -> Answer {
    put(served, session, "/", "application/gzip", gzip(&archive(files))).await
}

async fn get(served: &Served, session: &str, body: Value) -> Answer {
    served.post(&format!("{session}/fs/read"), &served.write, &body.to_string()).await
}

async fn sh(served: &Served, session: &str, script: &str) -> String {
    let body = json!({ "command": "sh", "args": ["-c", script], "wait": true, "logs": true });
    let answer = served.post(&format!("{session}/cmd"), &served.write, &body.to_string()).await;
    let lines = std::str::from_utf8(&answer.body).unwrap().lines();
    let lines = lines.map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter_map(|line| line["data"].as_str().map(str::to_owned)).collect()
}

fn as_user() -> Patch {
    let cwd = Some(Some("/home/user".to_owned()));
    Patch { user: Some(Some("user".to_owned())), cwd, ..Patch::default() }
}

#[tokio::test]
async fn archives_are_unpacked_as_the_sandboxs_own_user() {
    let Some(served) = Served::with_machines("archives_are_unpacked").await else { return };
    let session = served.session("box", as_user()).await;
    let files: [(&str, u32, &[u8]); 3] = [
        ("home/user/a/b/plain.txt", 0o644, b"hello"),
        ("home/user/run.sh", 0o755, b"echo ran"),
        ("work/empty", 0o600, b""),
    ];
    let written = write(&served, &session, &files).await;
    assert_eq!((written.status, written.json()), (StatusCode::OK, json!({})));
    let facts = sh(
        &served,
        &session,
        "stat -c '%a %U %G %n' a a/b a/b/plain.txt run.sh /work/empty; ./run.sh",
    )
    .await;
    assert_eq!(
        facts,
        "755 user user a\n755 user user a/b\n644 user user a/b/plain.txt\n755 user user run.sh\n\
         600 user user /work/empty\nran\n"
    );
    let again = write(&served, &session, &[("home/user/run.sh", 0o644, b"new")]).await;
    assert_eq!(again.status, 200);
    assert_eq!(get(&served, &session, json!({ "path": "run.sh" })).await.body, "new");

    // Relative to another directory, which is made; and through a link to one, as any program would.
    let relative = gzip(&archive(&[("x", 0o644, b"x")]));
    assert_eq!(put(&served, &session, "made/here", "application/gzip", relative).await.status, 200);
    assert_eq!(get(&served, &session, json!({ "path": "x", "cwd": "made/here" })).await.body, "x");
    sh(&served, &session, "ln -s /work linked").await;
    assert_eq!(write(&served, &session, &[("home/user/linked/y", 0o644, b"y")]).await.status, 200);
    assert_eq!(get(&served, &session, json!({ "path": "/work/y" })).await.body, "y");
}

#[tokio::test]
async fn archives_that_are_none_or_lead_elsewhere_do_no_harm() {
    let Some(served) = Served::with_machines("archives_that_are_none").await else { return };
    let session = served.session("box", as_user()).await;
    let good = gzip(&archive(&[("work/good", 0o644, b"x")]));
    for kind in ["application/json", "application/x-tar", "text/plain", ""] {
        let answer = put(&served, &session, "/", kind, good.clone()).await;
        assert_eq!(answer.status, 415, "{kind}");
        answer.error();
    }
    let cut = good[..good.len() - 6].to_vec();
    for (what, body) in [
        ("nothing", Vec::new()),
        ("no gzip", b"hello, this is no archive at all".to_vec()),
        ("no tar", gzip(&[b'x'; 2000])),
        ("cut off", cut),
    ] {
        let answer = put(&served, &session, "/", "application/gzip", body).await;
        assert_eq!(answer.status, 400, "{what}: {answer:?}");
        answer.error();
    }
    for (name, what) in [
        ("", "the root"),
        ("../../etc/escaped", "up"),
        ("work/../../etc/escaped", "up"),
        ("/etc/escaped", "absolute"),
        ("etc/escaped", "not the user's"),
        ("proc/1/escaped", "not a place for files"),
    ] {
        let answer =
            put(&served, &session, "/", "application/gzip", gzip(&archive(&[(name, 0o644, b"x")])))
                .await;
        assert_eq!(
            (answer.status.as_u16(), answer.error().code.as_str()),
            (400, "file_error"),
            "{name}: {what}"
        );
    }
    assert_eq!(sh(&served, &session, "ls /etc /work | grep -c escaped").await, "0\n");
    // A bomb is unpacked as it comes and ends at the disk, not in our memory; here it just is long.
    let zeros = gzip(&archive(&[("work/zeros", 0o644, &vec![0; 64 << 20])]));
    assert!(zeros.len() < 1 << 20);
    assert_eq!(put(&served, &session, "/", "application/gzip", zeros).await.status, 200);
    assert_eq!(sh(&served, &session, "stat -c %s /work/zeros").await, "67108864\n");
}

#[tokio::test]
async fn large_files_go_in_and_come_out_in_pieces() {
    let Some(served) = Served::with_machines("large_files_go_in_and_come_out").await else {
        return;
    };
    let session = served.session("box", as_user()).await;
    let mut seed = 1_u32;
    let content: Vec<u8> = std::iter::repeat_with(|| {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 24) as u8
    })
    .take(6_000_000)
    .collect();
    let body = gzip(&archive(&[("work/big", 0o644, &content)]));
    let parts: Vec<Bytes> = body.chunks(70_001).map(Bytes::copy_from_slice).collect();
    let request = served
        .request(Method::POST, &format!("{session}/fs/write"), &served.write)
        .header("content-type", "application/gzip")
        .header("x-cwd", "/")
        .body(pieces(parts))
        .unwrap();
    assert_eq!(read(served.send(request).await).await.status, 200);
    let got = get(&served, &session, json!({ "path": "/work/big" })).await;
    assert_eq!(got.headers["content-type"], "application/octet-stream");
    assert!(got.body == content, "{} bytes", got.body.len());
}

#[tokio::test]
async fn what_cannot_be_read_or_made_is_told_in_the_systems_words() {
    let Some(served) = Served::with_machines("what_cannot_be_read_or_made").await else { return };
    let session = served.session("box", as_user()).await;
    let missing = get(&served, &session, json!({ "path": "no/such" })).await;
    assert_eq!((missing.status.as_u16(), missing.error().code.as_str()), (404, "not_found"));
    for (path, words) in [
        ("/work", "Is a directory"),
        ("/root/x", "Permission denied"),
        ("/etc/passwd/x", "Not a directory"),
    ] {
        let answer = get(&served, &session, json!({ "path": path })).await;
        let error = answer.error();
        assert_eq!((answer.status.as_u16(), error.code.as_str()), (400, "file_error"), "{path}");
        assert!(error.message.contains(words), "{}", error.message);
    }
    for bad in [
        json!({}),
        json!({ "path": "" }),
        json!({ "path": 1 }),
        json!({ "path": "a\0b" }),
        json!({ "path": "a", "x": 1 }),
    ] {
        assert_eq!(get(&served, &session, bad.clone()).await.error().code, "bad_request", "{bad}");
    }
    let empty = write(&served, &session, &[("work/empty", 0o644, b"")]).await;
    assert_eq!(empty.status, 200);
    let empty = get(&served, &session, json!({ "path": "/work/empty" })).await;
    assert_eq!((empty.status.as_u16(), empty.body.len()), (200, 0));

    let mkdir = async |body: Value| {
        served.post(&format!("{session}/fs/mkdir"), &served.write, &body.to_string()).await
    };
    for fine in [
        json!({ "path": "a/b/c" }),
        json!({ "path": "a/b/c" }),
        json!({ "path": "d", "recursive": false }),
        json!({ "path": "e", "cwd": "/work" }),
    ] {
        let made = mkdir(fine.clone()).await;
        assert_eq!((made.status.as_u16(), made.json()), (200, json!({})), "{fine}");
    }
    for (bad, words) in [
        (json!({ "path": "d", "recursive": false }), "File exists"),
        (json!({ "path": "/etc/g" }), "Permission denied"),
        (json!({ "path": "/etc/passwd" }), "File exists"),
    ] {
        let answer = mkdir(bad.clone()).await;
        assert_eq!(
            (answer.status.as_u16(), answer.error().code.as_str()),
            (400, "file_error"),
            "{bad}"
        );
        assert!(answer.error().message.contains(words), "{bad}: {}", answer.error().message);
    }
    assert_eq!(
        sh(&served, &session, "stat -c '%U %a' a/b/c /work/e").await,
        "user 755\nuser 755\n"
    );

    let orphan = mkdir(json!({ "path": "f/g", "recursive": false })).await;
    assert_eq!((orphan.status.as_u16(), orphan.error().code.as_str()), (400, "path_not_found"));
    assert!(orphan.error().message.contains("No such file or directory"));

    let (main, name) = ("main".parse().unwrap(), "box".parse().unwrap());
    served.engine.stop(&main, &name, Stop::default(), None).await.unwrap();
    for answer in [
        write(&served, &session, &[("work/late", 0o644, b"x")]).await,
        get(&served, &session, json!({ "path": "/work/empty" })).await,
        mkdir(json!({ "path": "late" })).await,
    ] {
        assert_eq!(
            (answer.status.as_u16(), answer.error().code.as_str()),
            (410, "sandbox_stopped")
        );
    }
}
