//! Commands as Vercel's clients run, watch, feed and end them.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::{Method, Response};
use sandkeep_core::engine::{Settings, Stop};
use sandkeep_core::model::{Patch, Size};
use sandkeep_server::Limits;
use serde_json::{Value, json};

use crate::fixture::{Answer, Served, read, session_path};

fn lines(body: &[u8]) -> Vec<Value> {
    assert!(body.is_ascii(), "{}", String::from_utf8_lossy(body));
    let text = std::str::from_utf8(body).unwrap();
    let said = text.lines().filter(|line| !line.is_empty());
    said.map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// All that was printed to one stream.
fn printed(lines: &[Value], stream: &str) -> String {
    let said = lines.iter().filter(|line| line["stream"] == stream);
    said.map(|line| line["data"].as_str().unwrap()).collect()
}

fn shell(script: &str) -> Value {
    json!({ "command": "sh", "args": ["-c", script], "env": {}, "sudo": false })
}

fn and(mut body: Value, more: Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

async fn run(served: &Served, session: &str, body: Value) -> Answer {
    served.post(&format!("{session}/cmd"), &served.write, &body.to_string()).await
}

/// Runs to the end and gives all lines.
async fn watch(served: &Served, session: &str, body: Value) -> Vec<Value> {
    let body = and(body, json!({ "wait": true, "logs": true }));
    let answer = run(served, session, body).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(answer.headers["content-type"], "application/x-ndjson");
    lines(&answer.body)
}

/// Starts one that continues, and returns its path.
async fn begin(served: &Served, session: &str, body: Value) -> String {
    let answer = run(served, session, body).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    let command = &answer.json()["command"];
    assert_eq!(command["exitCode"], Value::Null);
    assert!(command.get("durationMs").is_none(), "absent, never null");
    format!("{session}/cmd/{}", command["id"].as_str().unwrap())
}

async fn code(answer: Answer) -> (u16, String) {
    (answer.status.as_u16(), answer.error().code)
}

#[tokio::test]
async fn a_command_is_run_in_all_forms() {
    let Some(served) = Served::with_machines("a_command_is_run_in_all_forms").await else { return };
    let session = served
        .session("box", Patch { cwd: Some(Some("/work".to_owned())), ..Patch::default() })
        .await;
    let id = session.rsplit('/').next().unwrap();

    let said = watch(&served, &session, shell("echo out; echo err >&2; pwd; exit 7")).await;
    let (first, last) = (&said[0]["command"], &said.last().unwrap()["command"]);
    assert_eq!((&first["exitCode"], &last["exitCode"]), (&Value::Null, &json!(7)));
    assert!(last["durationMs"].is_u64() && first["id"] == last["id"], "{said:?}");
    assert_eq!((&first["name"], &first["args"][0]), (&json!("sh"), &json!("-c")));
    assert_eq!((&first["cwd"], &first["sessionId"]), (&json!("/work"), &json!(id)));
    assert!(first["startedAt"].as_u64().unwrap() > 1_600_000_000_000);
    assert_eq!(printed(&said, "stdout"), "out\n/work\n");
    assert_eq!(printed(&said, "stderr"), "err\n");

    // Without logs: two lines, however much it prints.
    let quiet = and(shell("yes | head -c 1000000"), json!({ "wait": true }));
    let said = lines(&run(&served, &session, quiet).await.body);
    assert_eq!((said.len(), &said[1]["command"]["exitCode"]), (2, &json!(0)));

    // Relative to the session's directory, with its own variables, on behalf of its user.
    std::assert_eq!(
        served
            .post(&format!("{session}/fs/mkdir"), &served.write, r#"{"path":"sub"}"#)
            .await
            .status,
        200
    );
    let body = and(
        shell("pwd; echo $A $HOME $USER $SUDO_USER; id -u"),
        json!({ "cwd": "sub", "env": { "A": "b" }, "sudo": true }),
    );
    let said = watch(&served, &session, body).await;
    assert_eq!(printed(&said, "stdout"), "/work/sub\nb /root root root\n0\n");
    assert_eq!(said[0]["command"]["name"], "sh");

    for (script, exit) in [("kill -INT $$", 130), ("kill -TERM $$", 143), ("kill -KILL $$", 137)] {
        let said = watch(&served, &session, shell(script)).await;
        assert_eq!(said.last().unwrap()["command"]["exitCode"], exit, "{script}");
    }
    let said = watch(&served, &session, and(shell("sleep 1000"), json!({ "timeout": 200 }))).await;
    assert_eq!(said.last().unwrap()["command"]["exitCode"], 137);

    let listed = served.get(&format!("{session}/cmd"), &served.read).await.json();
    let codes: Vec<&Value> =
        listed["commands"].as_array().unwrap().iter().map(|c| &c["exitCode"]).collect();
    assert_eq!(
        codes,
        [&json!(137), &json!(137), &json!(143), &json!(130), &json!(0), &json!(0), &json!(7)]
    );
}

#[tokio::test]
async fn what_is_wrong_is_told_by_status_code_and_field() {
    let Some(served) = Served::with_machines("what_is_wrong_is_told_by_status").await else {
        return;
    };
    let session = served.session("box", Patch::default()).await;
    for (body, expected, word) in [
        (json!({ "command": "no-such" }), "executable_not_found", "no-such"),
        (json!({ "command": "/no/such" }), "executable_not_found", "/no/such"),
        (json!({ "command": "echo hi; ls" }), "executable_not_found", "echo hi"),
        (json!({ "command": "/etc/passwd" }), "bad_request", "command"),
        (json!({ "command": "true", "cwd": "/no/such" }), "bad_request", "cwd"),
        (json!({ "command": "" }), "bad_request", "program"),
        (json!({}), "bad_request", "command"),
        (json!({ "command": 7 }), "bad_request", "command"),
        (json!({ "command": "true", "args": "x" }), "bad_request", "args"),
        (json!({ "command": "true", "args": [1] }), "bad_request", "args"),
        (json!({ "command": "true", "env": { "A": 1 } }), "bad_request", "A"),
        (json!({ "command": "true", "env": { "A=B": "" } }), "bad_request", "env"),
        (json!({ "command": "true", "timeout": 99 }), "bad_request", "timeout"),
        (json!({ "command": "true", "timeout": "1s" }), "bad_request", "timeout"),
        (json!({ "command": "true", "wait": "yes" }), "bad_request", "wait"),
        (json!({ "command": "true", "colour": "red" }), "bad_request", "colour"),
        (json!({ "command": "a\0b" }), "bad_request", "NUL"),
        (json!([]), "bad_request", "object"),
    ] {
        let answer = run(&served, &session, body.clone()).await;
        let error = answer.error();
        assert_eq!((answer.status.as_u16(), error.code.as_str()), (400, expected), "{body}");
        assert!(error.message.contains(word), "{body}: {}", error.message);
    }
    let broken = served.post(&format!("{session}/cmd"), &served.write, "{").await;
    assert_eq!(code(broken).await, (400, "bad_request".to_owned()));
    let listed = served.get(&format!("{session}/cmd"), &served.read).await.json();
    assert_eq!(listed["commands"], json!([]), "what did not start is not there");

    for path in [
        "/api/v2/sandboxes/sessions/sbx_x/cmd",
        "/v2/sandboxes/sessions/sbx_sk01k00000000000000000000000/cmd",
    ] {
        let answer = served.post(path, &served.write, r#"{"command":"true"}"#).await;
        assert_eq!(
            (answer.status.as_u16(), answer.error().message.as_str()),
            (404, "Vercel Sandbox not found.")
        );
    }
    let foreign =
        served.post(&format!("{session}/cmd"), &served.foreign, r#"{"command":"true"}"#).await;
    assert_eq!(foreign.status, 404, "another project's session is none");
    let looker =
        served.post(&format!("{session}/cmd"), &served.read, r#"{"command":"true"}"#).await;
    assert_eq!(looker.status, 403);
    for (method, tail) in [
        (Method::GET, ""),
        (Method::GET, "/logs"),
        (Method::POST, "/kill"),
        (Method::POST, "/stdin"),
    ] {
        for id in ["cmd_x", "cmd_sk01k00000000000000000000000"] {
            let answer = served
                .json(
                    method.clone(),
                    &format!("{session}/cmd/{id}{tail}"),
                    &served.write,
                    r#"{"signal":9}"#,
                )
                .await;
            assert_eq!(
                code(answer).await,
                (404, "command_not_found_or_exited".to_owned()),
                "{tail}"
            );
        }
    }
}

/// Reads until what was read holds `wanted`.
async fn until(response: &mut Response<Incoming>, wanted: &str) -> Vec<u8> {
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains(wanted) {
        let frame = tokio::time::timeout(Duration::from_secs(30), response.frame()).await;
        let frame = frame.expect("a word in time").expect("more to come").unwrap();
        seen.extend_from_slice(&frame.into_data().unwrap());
    }
    seen
}

#[tokio::test]
async fn a_watcher_hears_at_once_may_leave_and_others_hear_all() {
    let Some(served) = Served::with_machines("a_watcher_hears_at_once").await else { return };
    let session = served.session("box", Patch::default()).await;
    let script = "while [ ! -e /work/go ]; do sleep 0.02; done; echo one; \
        while [ ! -e /work/on ]; do sleep 0.02; done; echo two; exit 3";
    let body = and(shell(script), json!({ "wait": true, "logs": true })).to_string();
    let request = served
        .request(Method::POST, &format!("{session}/cmd"), &served.write)
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body)))
        .unwrap();
    let mut response = served.send(request).await;
    // Before it has printed anything.
    let first = lines(&until(&mut response, "\n").await);
    let command = format!("{session}/cmd/{}", first[0]["command"]["id"].as_str().unwrap());
    watch(&served, &session, shell("touch /work/go")).await;
    until(&mut response, "one").await;
    drop(response);

    let follow = || async {
        let request = served
            .request(Method::GET, &format!("{command}/logs"), &served.read)
            .body(Full::new(Bytes::new()))
            .unwrap();
        served.send(request).await
    };
    let (mut second, mut third) = (follow().await, follow().await);
    let mut heard = [until(&mut second, "one").await, until(&mut third, "one").await];
    let wait = format!("{command}?wait=true");
    let waiting = served.get(&wait, &served.read);
    let (ended, _) = tokio::join!(waiting, watch(&served, &session, shell("touch /work/on")));
    assert_eq!(ended.json()["command"]["exitCode"], 3, "whoever left did not end it");
    for (heard, response) in heard.iter_mut().zip([second, third]) {
        heard.extend_from_slice(&read(response).await.body);
        let said = lines(heard);
        assert_eq!(printed(&said, "stdout"), "one\ntwo\n");
        assert!(said.iter().all(|line| line.get("command").is_none()), "{said:?}");
    }

    // Commands and logs exist when the session is over; the session does nothing more.
    let (main, name) = ("main".parse().unwrap(), "box".parse().unwrap());
    served.engine.stop(&main, &name, Stop::default(), None).await.unwrap();
    let again = lines(&served.get(&format!("{command}/logs"), &served.read).await.body);
    assert_eq!(printed(&again, "stdout"), "one\ntwo\n");
    assert_eq!(served.get(&command, &served.read).await.json()["command"]["exitCode"], 3);
    let late = run(&served, &session, shell("true")).await;
    assert_eq!(code(late).await, (410, "sandbox_stopped".to_owned()));
    let kill = served.post(&format!("{command}/kill"), &served.write, r#"{"signal":15}"#).await;
    assert_eq!(code(kill).await, (404, "command_not_found_or_exited".to_owned()));
    // Nor when another one runs.
    let opened = served.engine.start(&main, &name, None).await.unwrap();
    assert_eq!(code(run(&served, &session, shell("true")).await).await.0, 410);
    let other = session_path(&opened);
    assert_eq!(run(&served, &other, shell("true")).await.status, 200);
    let elsewhere = command.replace(&session, &other);
    assert_eq!(served.get(&elsewhere, &served.read).await.status, 404, "of the other session");
}

#[tokio::test]
async fn text_is_whole_however_it_is_cut() {
    let Some(served) = Served::with_machines("text_is_whole_however_it_is_cut").await else {
        return;
    };
    let session = served.session("box", Patch::default()).await;
    // A face in four pieces, on two streams at once; then what is no text.
    let script = r"for b in '\360' '\237' '\230' '\200'; do printf $b; printf $b >&2; sleep 0.05; done; \
        printf 'caf\303\251\n\377\376x\342\202'";
    let said = watch(&served, &session, shell(script)).await;
    assert_eq!(printed(&said, "stdout"), "\u{1f600}caf\u{e9}\n\u{fffd}\u{fffd}x\u{fffd}");
    assert_eq!(printed(&said, "stderr"), "\u{1f600}");
    let id = said[0]["command"]["id"].as_str().unwrap();
    for _ in 0..2 {
        let logs = served.get(&format!("{session}/cmd/{id}/logs"), &served.read).await;
        assert_eq!(
            printed(&lines(&logs.body), "stdout"),
            printed(&said, "stdout"),
            "the same again"
        );
    }
}

#[tokio::test]
async fn long_output_comes_whole() {
    let settings = Settings { log_limit: Size(8 << 20), ..Settings::default() };
    let test = "long_output_comes_whole";
    let Some(served) = Served::with_settings(test, Limits::default(), settings).await else {
        return;
    };
    let session = served.session("box", Patch::default()).await;
    // Over what the log keeps: an attached reader still gets it all.
    for megabytes in [5, 12] {
        let script = format!("yes 'é0123456789' | head -c {}; echo end >&2", megabytes << 20);
        let said = watch(&served, &session, shell(&script)).await;
        let text = printed(&said, "stdout");
        assert_eq!(text.len(), megabytes << 20, "bytes");
        assert!(text.lines().take(100_000).all(|line| line == "é0123456789"));
        assert_eq!(printed(&said, "stderr"), "end\n");

        // A later reader gets all that is kept, and a note where something is missing.
        let id = said[0]["command"]["id"].as_str().unwrap();
        let logs = served.get(&format!("{session}/cmd/{id}/logs"), &served.read).await;
        let said = lines(&logs.body);
        if megabytes == 5 {
            assert_eq!(printed(&said, "stdout"), text);
        } else {
            let kept = printed(&said, "stdout");
            let marker = kept.find("\n[").expect("a marker");
            let end = marker + kept[marker..].find("]\n").expect("its end") + 2;
            let dropped: usize =
                kept[marker + 2..].split(' ').next().unwrap().parse().expect("how much");
            // A character that was cut in two at the gap is a replacement character on either side of it.
            let first = kept[..marker].trim_end_matches('\u{fffd}');
            let last = kept[end..].trim_start_matches('\u{fffd}');
            assert!(text.starts_with(first) && text.ends_with(last), "both ends");
            // Of the end nothing is missing: what is dropped is what lies between.
            let whole = megabytes << 20;
            assert!((whole - 2..=whole).contains(&(first.len() + dropped + last.len())));
            assert!(first.len() > 3 << 20, "half of it is the beginning: {marker}");
            let errors = printed(&said, "stderr");
            assert!(errors.contains("bytes of output are missing") && errors.ends_with("end\n"));
        }
    }
}

#[tokio::test]
async fn all_input_may_be_sent_before_any_output_is_read() {
    let Some(served) = Served::with_machines("all_input_may_be_sent_before").await else { return };
    let session = served.session("box", Patch::default()).await;
    let body = json!({ "command": "cat", "wait": true, "logs": true, "attachStdin": true });
    let request = served
        .request(Method::POST, &format!("{session}/cmd"), &served.write)
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body.to_string())))
        .unwrap();
    let mut response = served.send(request).await;
    let first = lines(&until(&mut response, "\n").await);
    let stdin = format!("{session}/cmd/{}/stdin", first[0]["command"]["id"].as_str().unwrap());
    // More than the buffers of all connections on the way hold.
    let (pieces, piece) = (40, vec![b'x'; 512 << 10]);
    for at in 0..pieces {
        let body = input(&piece, json!({ "offset": at * piece.len() }));
        let answer = served.post(&stdin, &served.write, &body).await;
        assert_eq!(answer.status, 200, "{answer:?}");
    }
    assert_eq!(served.post(&stdin, &served.write, r#"{"close":true}"#).await.status, 200);
    let said = lines(&read(response).await.body);
    assert_eq!(printed(&said, "stdout").len(), pieces * piece.len());
    assert_eq!(said.last().unwrap()["command"]["exitCode"], 0);
}

fn input(bytes: &[u8], more: Value) -> String {
    and(json!({ "data": STANDARD.encode(bytes) }), more).to_string()
}

#[tokio::test]
async fn input_is_counted_skipped_and_refused() {
    let Some(served) = Served::with_machines("input_is_counted_skipped_and_refused").await else {
        return;
    };
    let session = served.session("box", Patch::default()).await;
    let attach = json!({ "attachStdin": true });
    let cat = begin(&served, &session, and(json!({ "command": "cat" }), attach.clone())).await;
    let stdin = format!("{cat}/stdin");
    let send = async |body: String| served.post(&stdin, &served.write, &body).await;
    assert_eq!(send(String::new()).await.json()["bytesWritten"], 0);
    let answer = send(input(b"hello ", json!({ "offset": 0 }))).await.json();
    assert_eq!(
        (&answer["bytesWritten"], &answer["command"]["exitCode"]),
        (&json!(6), &Value::Null)
    );
    assert_eq!(
        send(input(b"hello world", json!({ "offset": 0 }))).await.json()["bytesWritten"],
        11
    );
    assert_eq!(send(input(b"!", json!({}))).await.json()["bytesWritten"], 12);
    let gap = send(input(b"x", json!({ "offset": 13 }))).await;
    assert_eq!(code(gap).await, (400, "bad_request".to_owned()));
    for (body, word) in [
        (r#"{"data":"%%%"}"#.to_owned(), "data"),
        (r#"{"data":7}"#.to_owned(), "data"),
        (r#"{"offset":-1}"#.to_owned(), "offset"),
        (r#"{"close":"yes"}"#.to_owned(), "close"),
        (input(&vec![0; (512 << 10) + 1], json!({})), "data"),
    ] {
        let answer = send(body).await;
        assert_eq!(answer.status, 400, "{word}");
        assert!(answer.error().message.contains(word), "{answer:?}");
    }
    assert_eq!(send(r#"{"offset":12,"close":true}"#.to_owned()).await.json()["bytesWritten"], 12);
    let ended = served.get(&format!("{cat}?wait=true"), &served.read).await.json();
    assert_eq!(ended["command"]["exitCode"], 0);
    let logs = lines(&served.get(&format!("{cat}/logs"), &served.read).await.body);
    assert_eq!(printed(&logs, "stdout"), "hello world!");
    let late = send(input(b"x", json!({}))).await;
    assert_eq!(code(late).await, (404, "command_not_found_or_exited".to_owned()));

    // Not attached: an empty input, and nothing can be sent.
    let none = begin(&served, &session, shell("cat; sleep 1000")).await;
    let refused =
        served.post(&format!("{none}/stdin"), &served.write, &input(b"x", json!({}))).await;
    assert_eq!(code(refused).await, (400, "command_stdin_unavailable".to_owned()));
    let kill = async |body: &str| served.post(&format!("{none}/kill"), &served.write, body).await;
    for bad in ["{}", r#"{"signal":0}"#, r#"{"signal":65}"#, r#"{"signal":"TERM"}"#] {
        assert_eq!(kill(bad).await.error().code, "bad_request", "{bad}");
    }
    let killed = kill(r#"{"signal":15}"#).await.json();
    assert_eq!(killed["command"]["name"], "sh");
    let ended = served.get(&format!("{none}?wait=true"), &served.read).await.json();
    assert_eq!(ended["command"]["exitCode"], 143);
}

#[tokio::test]
async fn a_slow_reader_is_told_with_how_far_it_came() {
    let limits = Limits { input_patience: Duration::from_millis(300), ..Limits::default() };
    let Some(served) = Served::with_machines_and("a_slow_reader_is_told", limits).await else {
        return;
    };
    let session = served.session("box", Patch::default()).await;
    let script = "while [ ! -e /work/go ]; do sleep 0.02; done; wc -c";
    let reader = begin(&served, &session, and(shell(script), json!({ "attachStdin": true }))).await;
    let stdin = format!("{reader}/stdin");
    let body = input(&vec![b'x'; 400_000], json!({ "offset": 0 }));
    let slow = served.post(&stdin, &served.write, &body).await;
    assert_eq!(slow.status, 504);
    assert_eq!(slow.json()["error"]["bytesWritten"], 64 << 10, "what its pipe holds");
    watch(&served, &session, shell("touch /work/go")).await;
    // As their client does: again, for as long as it comes on.
    let written = loop {
        let answer = served.post(&stdin, &served.write, &body).await;
        if answer.status == 200 {
            break answer.json()["bytesWritten"].clone();
        }
        assert_eq!(answer.status, 504);
    };
    assert_eq!(written, 400_000);
    assert_eq!(served.post(&stdin, &served.write, r#"{"close":true}"#).await.status, 200);
    served.get(&format!("{reader}?wait=true"), &served.read).await;
    let logs = lines(&served.get(&format!("{reader}/logs"), &served.read).await.body);
    assert_eq!(printed(&logs, "stdout").trim(), "400000", "each byte once");
}

#[tokio::test]
async fn what_is_silent_is_kept_alive() {
    let limits = Limits { keep_alive: Duration::from_millis(100), ..Limits::default() };
    let Some(served) = Served::with_machines_and("what_is_silent_is_kept_alive", limits).await
    else {
        return;
    };
    let session = served.session("box", Patch::default()).await;
    let script = "while [ ! -e /work/go ]; do sleep 0.02; done; echo done";
    let command = begin(&served, &session, shell(script)).await;
    let open = async |tail: &str| {
        let request = served
            .request(Method::GET, &format!("{command}{tail}"), &served.read)
            .body(Full::new(Bytes::new()))
            .unwrap();
        served.send(request).await
    };
    // The head of a long wait comes while the command runs, and space that keeps the connection.
    let mut waiting = open("?wait=true").await;
    assert_eq!(waiting.headers()["content-type"], "application/json");
    let mut whole = until(&mut waiting, "\n\n\n").await;
    let mut logs = open("/logs").await;
    until(&mut logs, "\n\n").await;
    watch(&served, &session, shell("touch /work/go")).await;
    whole.extend_from_slice(&read(waiting).await.body);
    let whole: Value = serde_json::from_slice(&whole).unwrap();
    assert_eq!(whole["command"]["exitCode"], 0);
    assert_eq!(printed(&lines(&read(logs).await.body), "stdout"), "done\n");
}
