//! Commands and files, streamed. These need containers.

use std::time::Duration;

use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use http_body_util::{BodyExt, Full};
use hyper::{Method, StatusCode};
use sandkeep_client::types::Encoding;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;

use crate::fixture::{Served, pieces, read};

/// Runs a command and reads all its lines.
async fn exec(served: &Served, body: Value) -> Vec<Value> {
    let answer = served.post("/v1/sandboxes/box/exec", &served.write, &body.to_string()).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    assert_eq!(answer.headers["content-type"], "application/x-ndjson");
    lines(&answer.body)
}

fn lines(body: &[u8]) -> Vec<Value> {
    let text = std::str::from_utf8(body).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// All that was printed to one stream, as text.
fn printed(lines: &[Value], stream: &str) -> String {
    let said = lines.iter().filter(|line| line["type"] == stream);
    said.map(|line| line["data"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn a_command_streams_its_output_and_its_exit() {
    let Some(served) = Served::with_machines("a_command_streams_its_output_and_its_exit").await
    else {
        return;
    };
    served.create("box").await;
    let script = "echo out; echo err >&2; cat; exit 7";
    let said = exec(&served, json!({"argv": ["/bin/sh", "-c", script], "input": "in\n"})).await;
    assert_eq!(said[0]["type"], "started");
    assert_eq!(said[0]["resumed"], true, "the first command wakes it");
    assert_eq!(printed(&said, "stdout"), "out\nin\n");
    assert_eq!(printed(&said, "stderr"), "err\n");
    let last = said.last().unwrap();
    assert_eq!((&last["type"], &last["exit_code"]), (&json!("exited"), &json!(7)));

    let bytes = exec(&served, json!({"argv": ["/bin/sh", "-c", "printf '\\377'"]})).await;
    let odd = bytes.iter().find(|line| line["type"] == "stdout").unwrap();
    assert_eq!((&odd["encoding"], &odd["data"]), (&json!("base64"), &json!("/w==")));

    // More than the pipe, the link and the connection hold at once.
    let zeros = json!({"argv": ["/bin/sh", "-c", "head -c 3000000 /dev/zero; echo done >&2"]});
    let zeros = exec(&served, zeros).await;
    let chunks = zeros.iter().filter(|line| line["type"] == "stdout");
    let lengths = chunks.map(|line| {
        let encoding: Encoding = serde_json::from_value(line["encoding"].clone()).unwrap();
        encoding.decode(line["data"].as_str().unwrap()).unwrap().len()
    });
    assert_eq!(lengths.sum::<usize>(), 3_000_000);
    assert_eq!(printed(&zeros, "stderr"), "done\n");

    let id = said[0]["command"]["id"].as_str().unwrap();
    let logs = format!("/v1/sandboxes/box/commands/{id}/logs");
    let replayed = lines(&served.get(&logs, &served.read).await.body);
    assert_eq!(printed(&replayed, "stdout"), "out\nin\n");
    let stopped = served.post("/v1/sandboxes/box/stop", &served.write, "").await.json();
    assert!(stopped["usage"]["wall_ms"].as_u64().is_some(), "{stopped}");
    let replayed = lines(&served.get(&logs, &served.read).await.body);
    assert_eq!(replayed.last().unwrap()["exit_code"], 7, "a log outlives its session");
    assert_eq!(served.get("/v1/sandboxes/box", &served.read).await.json()["state"], "stopped");

    let missing = served.post("/v1/sandboxes/box/exec", &served.write, r#"{"argv":["/no/such"]}"#);
    assert_eq!(missing.await.error().code, "executable_not_found");
}

#[tokio::test]
async fn a_caller_that_waits_gets_one_document() {
    let Some(served) = Served::with_machines("a_caller_that_waits_gets_one_document").await else {
        return;
    };
    served.create("box").await;
    let wait = async |query: &str, script: &str| {
        let body = json!({"argv": ["/bin/sh", "-c", script]}).to_string();
        served.post(&format!("/v1/sandboxes/box/exec?{query}"), &served.write, &body).await
    };
    let said = wait("wait=true", "echo out; echo err >&2; exit 7").await;
    assert_eq!(said.headers["content-type"], "application/json");
    let said = said.json();
    assert_eq!((&said["stdout"], &said["stderr"]), (&json!("out\n"), &json!("err\n")));
    assert_eq!((&said["exit_code"], &said["end"]), (&json!(7), &json!("exited")));
    assert_eq!((&said["resumed"], &said["command"]["exit_code"]), (&json!(true), &json!(7)));
    assert_eq!((&said["stdout_truncated"], &said["missing_bytes"]), (&json!(false), &json!(0)));
    assert!(said.get("stdout_base64").is_none(), "{said}");

    let said = wait("wait=true", "printf 'a\\377'; kill -9 $$").await.json();
    assert_eq!((&said["stdout"], &said["stdout_base64"]), (&json!("a\u{fffd}"), &json!("Yf8=")));
    assert_eq!((&said["exit_code"], &said["end"]), (&json!(137), &json!("signalled")));
    let said = wait("wait=true&output_limit=1K", "head -c 3000000 /dev/zero; echo end >&2").await;
    let said = said.json();
    assert_eq!(said["stdout"].as_str().unwrap().len(), 1024);
    let counted = (&said["stdout_bytes"], &said["stdout_truncated"], &said["stderr"]);
    assert_eq!(counted, (&json!(3_000_000), &json!(true), &json!("end\n")));

    for (query, body) in [
        ("wait=true", r#"{"argv":["true"],"detach":true}"#),
        ("wait=true&output_limit=9M", r#"{"argv":["true"]}"#),
        ("output_limit=1M", r#"{"argv":["true"]}"#),
        ("wait=true&output_limit=much", r#"{"argv":["true"]}"#),
    ] {
        let path = format!("/v1/sandboxes/box/exec?{query}");
        let refused = served.post(&path, &served.write, body).await;
        assert_eq!(refused.error().code, "invalid", "{query}");
    }
    let missing =
        served.post("/v1/sandboxes/box/exec?wait=true", &served.write, r#"{"argv":["/no/such"]}"#);
    assert_eq!(missing.await.error().code, "executable_not_found");
}

/// Runs a command under an idempotency key; its lines, or the error.
async fn exec_once(served: &Served, key: &str, body: &Value) -> Result<Vec<Value>, String> {
    let request = served
        .request(Method::POST, "/v1/sandboxes/box/exec", &served.write)
        .header("content-type", "application/json")
        .header("idempotency-key", key)
        .body(Full::new(Bytes::from(body.to_string())))
        .unwrap();
    let answer = read(served.send(request).await).await;
    match answer.status {
        StatusCode::OK => Ok(lines(&answer.body)),
        _ => Err(answer.error().code),
    }
}

#[tokio::test]
async fn a_command_is_started_once_for_its_idempotency_key() {
    let Some(served) = Served::with_machines("a_command_is_started_once").await else { return };
    served.create("box").await;
    let body = json!({"argv": ["/bin/sh", "-c", "echo $$ >> /work/started; echo out; sleep 0.3"]});
    // Two at the same time, and one when it is over.
    let (one, two) = tokio::join!(exec_once(&served, "a", &body), exec_once(&served, "a", &body));
    let three = exec_once(&served, "a", &body).await.unwrap();
    let (one, two) = (one.unwrap(), two.unwrap());
    for said in [&one, &two, &three] {
        assert_eq!(said[0]["command"]["id"], one[0]["command"]["id"]);
        assert_eq!(printed(said, "stdout"), "out\n");
        assert_eq!(said.last().unwrap()["exit_code"], 0);
    }
    let started = exec(&served, json!({"argv": ["/bin/cat", "/work/started"]})).await;
    assert_eq!(printed(&started, "stdout").lines().count(), 1, "{started:?}");

    let other = json!({"argv": ["/bin/true"]});
    assert_eq!(exec_once(&served, "a", &other).await.unwrap_err(), "idempotency_key_reused");
    // A key that was replaced between two attempts makes no other call of it.
    let request = served
        .request(Method::POST, "/v1/sandboxes/box/exec", &served.admin)
        .header("content-type", "application/json")
        .header("idempotency-key", "a")
        .body(Full::new(Bytes::from(body.to_string())))
        .unwrap();
    let again = lines(&read(served.send(request).await).await.body);
    assert_eq!(again[0]["command"]["id"], one[0]["command"]["id"]);
    assert_ne!(exec_once(&served, "b", &body).await.unwrap()[0]["command"], one[0]["command"]);
    let missing = json!({"argv": ["/no/such"]});
    for _ in 0..2 {
        let refused = exec_once(&served, "c", &missing).await.unwrap_err();
        assert_eq!(refused, "executable_not_found", "it never ran, so it is tried again");
    }
}

#[tokio::test]
async fn a_log_goes_on_at_any_byte() {
    let Some(served) = Served::with_machines("a_log_goes_on_at_any_byte").await else { return };
    served.create("box").await;
    let script = "printf abc; sleep 0.1; printf DEF >&2; sleep 0.1; printf ghi";
    let said = exec(&served, json!({"argv": ["/bin/sh", "-c", script]})).await;
    let id = said[0]["command"]["id"].as_str().unwrap();
    let from = async |offset: usize, follow: bool| {
        let path = format!("/v1/sandboxes/box/commands/{id}/logs?offset={offset}&follow={follow}");
        let said = lines(&served.get(&path, &served.read).await.body);
        let all = said.iter().filter_map(|line| line["data"].as_str()).collect::<String>();
        assert_eq!(said.last().unwrap()["type"], "exited");
        all
    };
    for offset in 0..=12 {
        let rest = &"abcDEFghi"[offset.min(9)..];
        assert_eq!(
            (from(offset, true).await, from(offset, false).await),
            (rest.into(), rest.into())
        );
    }
    let path = format!("/v1/sandboxes/box/commands/{id}/logs?offset=-1");
    assert_eq!(served.get(&path, &served.read).await.error().code, "invalid");
}

#[tokio::test]
async fn lines_come_as_they_are_said_and_a_caller_that_leaves_hangs_up() {
    let Some(served) = Served::with_machines("lines_come_as_they_are_said").await else {
        return;
    };
    served.create("box").await;
    let body = json!({"argv": ["/bin/sh", "-c", "echo now; exec sleep 1000"]}).to_string();
    let request = served
        .request(Method::POST, "/v1/sandboxes/box/exec", &served.write)
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body)))
        .unwrap();
    let mut response = served.send(request).await;
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains("now") {
        let frame = response.frame().await.expect("more to come").unwrap();
        seen.extend_from_slice(&frame.into_data().unwrap());
    }
    let id = lines(&seen)[0]["command"]["id"].as_str().unwrap().to_owned();
    drop(response);
    let path = format!("/v1/sandboxes/box/commands/{id}?wait=true");
    let ended = served.get(&path, &served.read).await.json();
    assert_eq!((&ended["state"], &ended["exit_code"]), (&json!("exited"), &json!(129)), "SIGHUP");
}

#[tokio::test]
async fn a_detached_command_goes_on_and_takes_input_and_signals() {
    let Some(served) = Served::with_machines("a_detached_command_goes_on").await else {
        return;
    };
    served.create("box").await;
    let body = json!({"argv": ["/bin/cat"], "detach": true, "stdin": true}).to_string();
    let made = served.post("/v1/sandboxes/box/exec", &served.write, &body).await.json();
    let command = format!("/v1/sandboxes/box/commands/{}", made["id"].as_str().unwrap());
    let request = served
        .request(Method::POST, &format!("{command}/stdin?close=true"), &served.write)
        .body(pieces([Bytes::from_static(b"a"), Bytes::from_static(b"b")]))
        .unwrap();
    assert_eq!(read(served.send(request).await).await.status, StatusCode::NO_CONTENT);
    let log = lines(&served.get(&format!("{command}/logs?follow=true"), &served.read).await.body);
    assert_eq!(printed(&log, "stdout"), "ab");
    assert_eq!(log.last().unwrap()["exit_code"], 0);

    let body = json!({"argv": ["/bin/sleep", "1000"], "detach": true}).to_string();
    let made = served.post("/v1/sandboxes/box/exec", &served.write, &body).await.json();
    let command = format!("/v1/sandboxes/box/commands/{}", made["id"].as_str().unwrap());
    let more = lines(&served.get(&format!("{command}/logs"), &served.read).await.body);
    assert_eq!(more, [json!({"type": "more"})]);
    let target = format!("{command}/signal");
    let signal = served.post(&target, &served.write, r#"{"signal":"TERM"}"#);
    assert_eq!(signal.await.status, StatusCode::NO_CONTENT);
    let ended = served.get(&format!("{command}?wait=true"), &served.read).await.json();
    assert_eq!(ended["exit_code"], 143);
}

async fn web_socket(served: &Served, key: &str) -> WebSocketStream<TcpStream> {
    let url = format!("ws://{}/v1/sandboxes/box/exec/ws", served.address);
    let mut request = url.into_client_request().unwrap();
    request.headers_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
    let stream = TcpStream::connect(served.address).await.unwrap();
    tokio_tungstenite::client_async(request, stream).await.unwrap().0
}

/// Reads until the last word, and gives it with all output before.
async fn hear(socket: &mut WebSocketStream<TcpStream>, until: &str) -> (String, Value) {
    let mut output = String::new();
    loop {
        let message = tokio::time::timeout(Duration::from_secs(30), socket.next()).await;
        match message.expect("a word in time").expect("a last word").unwrap() {
            Message::Binary(bytes) => {
                assert_eq!(bytes[0], 1, "standard output");
                output.push_str(&String::from_utf8_lossy(&bytes[1..]));
                if !until.is_empty() && output.contains(until) {
                    return (output, Value::Null);
                }
            }
            Message::Text(text) => {
                let event: Value = serde_json::from_str(&text).unwrap();
                if event["type"] != "started" {
                    return (output, event);
                }
            }
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_terminal_over_a_web_socket() {
    let Some(served) = Served::with_machines("a_terminal_over_a_web_socket").await else {
        return;
    };
    served.create("box").await;
    let mut socket = web_socket(&served, &served.write).await;
    let ask = json!({"argv": ["/bin/sh"], "tty": {"cols": 80, "rows": 24}, "stdin": true});
    socket.send(Message::text(ask.to_string())).await.unwrap();
    let stdin = |text: &str| Message::binary([b"\0", text.as_bytes()].concat());
    socket.send(stdin("stty size; echo re''ady\n")).await.unwrap();
    let (output, _) = hear(&mut socket, "ready").await;
    assert!(output.contains("24 80"), "{output:?}");
    let resize = json!({"type": "resize", "cols": 100, "rows": 30});
    socket.send(Message::text(resize.to_string())).await.unwrap();
    socket.send(stdin("stty size; exit 5\n")).await.unwrap();
    let (output, last) = hear(&mut socket, "").await;
    assert!(output.contains("30 100"), "{output:?}");
    assert_eq!((&last["type"], &last["exit_code"]), (&json!("exited"), &json!(5)));

    let mut socket = web_socket(&served, &served.write).await;
    socket.send(Message::text(r#"{"argvv":[]}"#)).await.unwrap();
    let (_, last) = hear(&mut socket, "").await;
    assert_eq!(last["error"]["code"], "invalid", "{last}");
}

#[tokio::test]
async fn files_go_in_and_come_out_whole() {
    let Some(served) = Served::with_machines("files_go_in_and_come_out_whole").await else {
        return;
    };
    served.create("box").await;
    let files = "/v1/sandboxes/box/files";
    // Larger than every buffer on the way.
    let content: Vec<u8> = (0..5_000_000u32).map(|at| (at % 251) as u8).collect();
    let parts: Vec<Bytes> = content.chunks(70_000).map(Bytes::copy_from_slice).collect();
    let request = served
        .request(
            Method::PUT,
            &format!("{files}?path=/work/a/big&parents=true&mode=640"),
            &served.write,
        )
        .body(pieces(parts))
        .unwrap();
    let put = read(served.send(request).await).await;
    assert_eq!(put.json()["bytes"], content.len(), "{put:?}");
    let got = served.get(&format!("{files}?path=/work/a/big"), &served.write).await;
    assert!(got.body == content, "{} bytes", got.body.len());
    let entry: Value =
        serde_json::from_str(got.headers["sandkeep-entry"].to_str().unwrap()).unwrap();
    assert_eq!((&entry["mode"], &entry["kind"]), (&json!(0o640), &json!("file")));
    let part =
        served.get(&format!("{files}?path=/work/a/big&offset=251&limit=3"), &served.write).await;
    assert_eq!(part.body, Bytes::from_static(&[0, 1, 2]));

    let packed = served.get(&format!("{files}/tar?path=/work/a"), &served.write).await;
    assert_eq!(packed.status, StatusCode::OK);
    let request = served
        .request(Method::PUT, &format!("{files}/tar?path=/copy"), &served.write)
        .body(Full::new(packed.body))
        .unwrap();
    let unpacked = read(served.send(request).await).await;
    assert_eq!(unpacked.status, StatusCode::OK, "{unpacked:?}");
    let moved = r#"{"from":"/copy/a/big","to":"/copy/small"}"#;
    assert_eq!(served.post(&format!("{files}/move"), &served.write, moved).await.status, 204);
    let made =
        served.post(&format!("{files}/mkdir"), &served.write, r#"{"path":"/copy/dir"}"#).await;
    assert_eq!(made.status, 204, "{made:?}");
    let listed = served.get(&format!("{files}/list?path=/copy"), &served.write).await.json();
    let names: Vec<&str> = listed["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| item["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["a", "dir", "small"]);
    let target = format!("{files}?path=/copy&recursive=true");
    let gone = served.call(Method::DELETE, &target, &served.write);
    assert_eq!(gone.await.status, 204);
    let missing = served.get(&format!("{files}/stat?path=/copy"), &served.write).await;
    assert_eq!((missing.status.as_u16(), missing.error().code.as_str()), (404, "path_not_found"));
}

#[tokio::test]
async fn a_server_that_goes_down_says_so_and_ends_nothing() {
    let Some(mut served) = Served::with_machines("a_server_that_goes_down_says_so").await else {
        return;
    };
    served.create("box").await;
    let body = json!({"argv": ["/bin/sh", "-c", "echo now; exec sleep 1000"]}).to_string();
    let request = served
        .request(Method::POST, "/v1/sandboxes/box/exec", &served.write)
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body)))
        .unwrap();
    let mut response = served.send(request).await;
    let first = response.frame().await.unwrap().unwrap().into_data().unwrap();
    let id = lines(&first)[0]["command"]["id"].as_str().unwrap().parse().unwrap();
    served.begin_shutdown();
    let rest = read(response).await;
    let last = lines(&rest.body).pop().unwrap();
    assert_eq!(last["error"]["code"], "shutting_down", "{last}");
    served.shut_down_begun().await;
    assert!(TcpStream::connect(served.address).await.is_err(), "nobody listens any more");
    let (main, name) = ("main".parse().unwrap(), "box".parse().unwrap());
    let command = served.engine.command(&main, &name, &id).await.unwrap();
    assert_eq!(command.exit_code, None, "the command goes on");
}

#[tokio::test]
async fn a_snapshot_is_exported_and_a_closed_port_is_told() {
    let Some(served) = Served::with_machines("a_snapshot_is_exported").await else {
        return;
    };
    served.create("box").await;
    exec(&served, json!({"argv": ["/bin/sh", "-c", "echo kept > /kept"]})).await;
    let stopped = served.post("/v1/sandboxes/box/stop", &served.write, "").await.json();
    let id = stopped["snapshot"]["id"].as_str().unwrap();
    let archive = served.get(&format!("/v1/snapshots/{id}/export"), &served.read).await;
    assert_eq!(archive.headers["content-type"], "application/x-tar");
    assert_eq!(archive.headers["content-length"], archive.body.len().to_string());
    assert_eq!(archive.headers["sandkeep-left-out"], "0");
    let request = served
        .request(Method::POST, "/v1/images/import?name=again", &served.admin)
        .header("content-type", "application/x-tar")
        .body(Full::new(archive.body))
        .unwrap();
    let said = lines(&read(served.send(request).await).await.body);
    assert_eq!(said.last().unwrap()["type"], "done", "{said:?}");
    let body = r#"{"name":"copy","image":"again"}"#;
    assert_eq!(served.post("/v1/sandboxes", &served.write, body).await.status, 201);
    let kept = served.get("/v1/sandboxes/copy/files?path=/kept", &served.write).await;
    assert_eq!(kept.body, "kept\n");

    let stream = TcpStream::connect(served.address).await.unwrap();
    let url = format!("ws://{}/v1/sandboxes/copy/ports/9/ws", served.address);
    let mut request = url.into_client_request().unwrap();
    let key = format!("Bearer {}", served.write);
    request.headers_mut().insert("authorization", key.parse().unwrap());
    let refused = tokio_tungstenite::client_async(request, stream).await.unwrap_err();
    let tokio_tungstenite::tungstenite::Error::Http(refused) = refused else {
        panic!("{refused}");
    };
    assert_eq!(refused.status(), 400);
}

#[tokio::test]
async fn an_image_is_customized_and_used() {
    let Some(served) = Served::with_machines("an_image_is_customized_and_used").await else {
        return;
    };
    let body = r#"{"name":"worn","from":"small","env":{"MINE":"1"},"path":["/work"]}"#;
    let said = lines(&served.post("/v1/images/dress", &served.admin, body).await.body);
    let image = &said.last().unwrap()["image"];
    assert_eq!(
        (&image["user"], &image["customized"], &image["dressed"]),
        (&json!("ubuntu"), &json!(true), &json!(true)),
        "{said:?}"
    );
    let body = r#"{"name":"box","image":"worn"}"#;
    assert_eq!(served.post("/v1/sandboxes", &served.write, body).await.status, 201);
    // `small` has a user 1000 of its own, who is not renamed.
    let line = "id -un; id -u; pwd; echo $HOME $MINE $PATH; sudo -n id -u; sudo -u user id -un";
    let said = exec(&served, json!({"argv": ["/bin/sh", "-c", line]})).await;
    let out = printed(&said, "stdout");
    assert!(
        out.starts_with("ubuntu\n1001\n/vercel/sandbox\n/vercel 1 /vercel/bin:/work:"),
        "{out}"
    );
    assert!(out.ends_with("\n0\nuser\n"), "{out}");
}

/// The holes of a sparse file are zeros in an export: a copy of it on the server's disk could be any times larger than the
/// sandbox may be.
#[tokio::test]
async fn an_export_of_holes_takes_nothing_of_the_servers_disk() {
    const HOLES: u64 = 64 << 20;
    let Some(served) = Served::with_machines("an_export_of_holes_takes_nothing").await else {
        return;
    };
    served.create("box").await;
    let argv = ["/bin/sh", "-c", "truncate -s 64M /holes; echo kept > /kept"];
    exec(&served, json!({ "argv": argv })).await;
    let stopped = served.post("/v1/sandboxes/box/stop", &served.write, "").await.json();
    let id = stopped["snapshot"]["id"].as_str().unwrap();
    let path = format!("/v1/snapshots/{id}/export");
    let request = served.request(Method::GET, &path, &served.read);
    let mut answer = served.send(request.body(Full::new(Bytes::new())).unwrap()).await;
    assert_eq!(answer.status(), 200);
    let length: u64 = answer.headers()["content-length"].to_str().unwrap().parse().unwrap();
    assert!(length > HOLES, "{length}");
    answer.body_mut().frame().await.unwrap().unwrap();
    // While it is sent nothing of it is in a file, not even in one without a name.
    let mut held = 0;
    for open in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        if let (Ok(at), Ok(file)) =
            (std::fs::read_link(open.path()), std::fs::metadata(open.path()))
            && at.to_string_lossy().ends_with(" (deleted)")
            && file.is_file()
        {
            held += std::os::unix::fs::MetadataExt::blocks(&file) * 512;
        }
    }
    assert!(held < HOLES / 4, "{held} bytes in files without a name");
    let mut came = 0;
    while let Some(frame) = answer.body_mut().frame().await {
        came += frame.unwrap().into_data().map_or(0, |data| data.len() as u64);
    }
    assert!(came > HOLES && came < length);
}
