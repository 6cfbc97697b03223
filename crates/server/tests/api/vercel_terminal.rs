//! Terminals as Vercel's CLI opens them.

use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use hyper::Method;
use sandkeep_core::engine::Stop;
use sandkeep_core::model::Patch;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::CloseFrame;

use crate::fixture::Served;

type Socket = WebSocketStream<TcpStream>;

async fn ticket(served: &Served, session: &str) -> (String, String) {
    let answer = served.post(&format!("{session}/interactive"), &served.write, "{}").await.json();
    let text = |name: &str| answer[name].as_str().unwrap().to_owned();
    (text("url"), text("token"))
}

async fn connect(served: &Served, token: &str) -> Result<Socket, u16> {
    let stream = TcpStream::connect(served.address).await.unwrap();
    let url = format!("ws://{}/ws/interactive?token={token}", served.address);
    match tokio_tungstenite::client_async(url, stream).await {
        Ok((socket, _)) => Ok(socket),
        Err(tokio_tungstenite::tungstenite::Error::Http(answer)) => Err(answer.status().as_u16()),
        Err(error) => panic!("{error}"),
    }
}

/// Reads until what was shown holds `wanted`, or to the end: then with the last word and the close.
async fn hear(socket: &mut Socket, wanted: &str) -> (String, Option<Value>, Option<CloseFrame>) {
    let (mut shown, mut last) = (String::new(), None);
    loop {
        let message = tokio::time::timeout(Duration::from_secs(30), socket.next()).await;
        match message.expect("a word in time") {
            Some(Ok(Message::Binary(bytes))) => {
                shown.push_str(&String::from_utf8_lossy(&bytes));
                if !wanted.is_empty() && shown.contains(wanted) {
                    return (shown, None, None);
                }
            }
            Some(Ok(Message::Text(text))) => last = Some(serde_json::from_str(&text).unwrap()),
            Some(Ok(Message::Close(frame))) => return (shown, last, frame),
            Some(Ok(_)) => {}
            other => panic!("{other:?} after {shown:?}"),
        }
    }
}

async fn start(served: &Served, session: &str, word: Value) -> Socket {
    let (_, token) = ticket(served, session).await;
    let mut socket = connect(served, &token).await.unwrap();
    socket.send(Message::text(word.to_string())).await.unwrap();
    socket
}

#[tokio::test]
async fn a_terminal_is_opened_typed_into_resized_and_ended() {
    let Some(served) = Served::with_machines("a_terminal_is_opened").await else { return };
    let patch = Patch { user: Some(Some("user".to_owned())), ..Patch::default() };
    let session = served.session("box", patch).await;
    let (url, _) = ticket(&served, &session).await;
    assert_eq!(url, "ws://sandkeep/ws/interactive", "the host that the client used");
    let word = json!({
        "type": "start", "command": "sh", "args": [], "cwd": "/work", "cols": 100, "rows": 30,
        "env": ["TERM=xterm-256color", "PS1=> ", "A=b=c"],
    });
    let mut socket = start(&served, &session, word).await;
    let typed = |text: &str| Message::binary(text.as_bytes().to_vec());
    socket.send(typed("stty size; pwd; echo $TERM $A; id -un; echo re''ady\n")).await.unwrap();
    let (shown, ..) = hear(&mut socket, "ready").await;
    for line in ["30 100\r\n", "/work\r\n", "xterm-256color b=c\r\n", "user\r\n"] {
        assert!(shown.contains(line), "{line:?} in {shown:?}");
    }
    socket.send(Message::text(r#"{"type":"resize","cols":120,"rows":40}"#)).await.unwrap();
    for nonsense in ["not json", r#"{"type":"resize","cols":0,"rows":0}"#, r#"{"type":"dance"}"#] {
        socket.send(Message::text(nonsense)).await.unwrap();
    }
    socket.send(typed("stty size; exit 5\n")).await.unwrap();
    let (shown, last, close) = hear(&mut socket, "").await;
    assert!(shown.contains("40 120"), "{shown:?}");
    assert_eq!(last, Some(json!({ "type": "exit", "code": 5 })));
    assert_eq!(u16::from(close.unwrap().code), 1000);

    // Without a size, as from a pipe.
    let mut socket = start(&served, &session, json!({ "type": "start", "command": "tty" })).await;
    let (shown, last, _) = hear(&mut socket, "").await;
    assert!(shown.starts_with("/dev/pts/"), "{shown:?}");
    assert_eq!(last, Some(json!({ "type": "exit", "code": 0 })));
    for (command, exit) in [("no-such", 127), ("/etc/passwd", 126)] {
        let mut socket =
            start(&served, &session, json!({ "type": "start", "command": command })).await;
        let (shown, last, _) = hear(&mut socket, "").await;
        assert!(shown.contains(command), "{shown:?}");
        assert_eq!(last, Some(json!({ "type": "exit", "code": exit })));
    }
}

#[tokio::test]
async fn only_a_token_of_that_session_opens_a_terminal() {
    let Some(served) = Served::with_machines("only_a_token_of_that_session").await else { return };
    let session = served.session("box", Patch::default()).await;
    let (_, token) = ticket(&served, &session).await;
    for bad in ["", "x.y.z", &served.write, &format!("{token}x")] {
        assert_eq!(connect(&served, bad).await.err(), Some(401), "{bad}");
    }
    let as_key = served.get(&format!("{session}/cmd"), &token).await;
    assert_eq!(as_key.status, 401, "and it opens nothing else");
    let reader = served.post(&format!("{session}/interactive"), &served.read, "").await;
    assert_eq!(reader.status, 403);
    let plain = served.call(Method::GET, &format!("/ws/interactive?token={token}"), "").await;
    assert!(plain.status.is_client_error(), "{plain:?}");
    for first in [
        "hello",
        r#"{"type":"resize","cols":1,"rows":1}"#,
        r#"{"type":"start"}"#,
        r#"{"type":"start","command":"sh","env":["x"]}"#,
    ] {
        let mut socket = connect(&served, &token).await.unwrap();
        socket.send(Message::text(first)).await.unwrap();
        let (_, last, close) = hear(&mut socket, "").await;
        assert_eq!((last, u16::from(close.unwrap().code)), (None, 1008), "{first}");
    }

    // A client that leaves hangs up.
    let word = json!({ "type": "start", "command": "sh", "args": ["-c", "echo up; trap 'touch /work/hup; exit' HUP; while :; do sleep 0.02; done"] });
    let mut socket = start(&served, &session, word).await;
    hear(&mut socket, "up").await;
    drop(socket);
    let wait = json!({ "command": "sh", "args": ["-c", "while [ ! -e /work/hup ]; do sleep 0.02; done"], "wait": true });
    let waited = served.post(&format!("{session}/cmd"), &served.write, &wait.to_string()).await;
    assert_eq!(waited.status, 200);

    // A session that ends takes its terminals along, and lets none be opened.
    let mut open = start(&served, &session, json!({ "type": "start", "command": "sh" })).await;
    open.send(Message::binary(b"echo up\n".to_vec())).await.unwrap();
    hear(&mut open, "up\r\n").await;
    let (main, name) = ("main".parse().unwrap(), "box".parse().unwrap());
    served.engine.stop(&main, &name, Stop::default(), None).await.unwrap();
    let (_, last, close) = hear(&mut open, "").await;
    assert!(last.is_some() || !close.unwrap().reason.is_empty(), "an exit, or a reason");
    let gone = served.post(&format!("{session}/interactive"), &served.write, "{}").await;
    assert_eq!((gone.status.as_u16(), gone.error().code.as_str()), (410, "sandbox_stopped"));
    let mut late = connect(&served, &token).await.unwrap();
    late.send(Message::text(r#"{"type":"start","command":"sh"}"#)).await.unwrap();
    let (_, last, close) = hear(&mut late, "").await;
    assert_eq!(last, None);
    assert!(close.unwrap().reason.contains("ended"), "with a reason");
}
