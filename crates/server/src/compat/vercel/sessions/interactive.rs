//! A terminal in a session, over a WebSocket.
//!
//! ```text
//! POST .../interactive            -> {url, token}
//! GET  /ws/interactive?token=...  -> the WebSocket
//!   > {"type":"start","command","args","env":["K=V"],"cwd","cols","rows"}   once, first
//!   > bytes                       what is typed
//!   > {"type":"resize","cols","rows"}
//!   < bytes                       what the terminal shows
//!   < {"type":"exit","code":n}    last; then the socket is closed
//! ```
//!
//! The token is all that the socket asks for: it is signed here, lasts a few minutes, and opens a
//! terminal in that one session. A command that cannot be started ends as it would under a shell: a line
//! on the terminal, and 127 or 126. A client that leaves hangs up.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::ws::{CloseFrame, Message, WebSocket, close_code};
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Json, Router};
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt as _, StreamExt as _};
use sandkeep_core::engine::{
    Caller, CommandOutput, Error, Exec, OutputStream, Started, StdinHandle,
};
use sandkeep_core::guest::GuestError;
use sandkeep_core::model::{CommandId, KeyId, Name, Scope, Span};
use sandkeep_proto::link::{Failure, TermSize};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::api::App;
use crate::api::exec::KillOnDisconnect;
use crate::api::input::Upgrade;
use crate::audit::Later;
use crate::compat::vercel::protocol::auth::Acts;
use crate::compat::vercel::protocol::error::VercelError;
use crate::compat::vercel::protocol::ids::Foreign as _;
use crate::compat::vercel::protocol::input::{Fields, QueryParams, Reached};
use crate::compat::vercel::sessions::within::Within;

/// What the token is signed for.
const PURPOSE: &str = "vercel-interactive";
/// How long a client may take to use it.
const VALID: Span = Span::seconds(300);
/// How long a socket may be open before it says what to run.
const FIRST_WORD: Duration = Duration::from_secs(30);
/// The largest message a client may send.
const MESSAGE: usize = 1 << 20;
/// The default size of a terminal.
const SIZE: TermSize = TermSize { cols: 80, rows: 24 };

/// What a token opens.
#[derive(Debug, Serialize, Deserialize)]
struct Ticket {
    project: Name,
    session: String,
    key: KeyId,
}

pub(crate) fn routes() -> Router<Arc<App>> {
    Router::new().route("/v2/sandboxes/sessions/{id}/interactive", post(open))
}

/// The socket itself, at the root of the server.
pub(crate) fn socket() -> Router<Arc<App>> {
    Router::new().route("/ws/interactive", get(connect))
}

async fn open(
    Acts(caller): Acts,
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    Reached(host): Reached,
    fields: Fields,
) -> Result<Json<Value>, VercelError> {
    fields.end()?;
    let within = Within::running(&app, &caller, &id).await?;
    let ticket =
        Ticket { project: caller.project, session: within.session.id.out(), key: caller.key };
    let token = app.engine.sign(PURPOSE, VALID, &ticket);
    let public_url = app.vercel.public_url.as_deref();
    let base = crate::gateway::base_url(public_url, host.as_deref(), app.gateway.tls);
    let url = format!("{}/ws/interactive", base.replacen("http", "ws", 1));
    Ok(Json(json!({ "url": url, "token": token })))
}

async fn connect(
    State(app): State<Arc<App>>,
    asked: QueryParams,
    Upgrade(upgrade): Upgrade,
) -> Result<Response, VercelError> {
    let refused = || {
        let message = "The token is not for this, or has expired; ask for another one.";
        VercelError::new(StatusCode::UNAUTHORIZED, "unauthorized", message)
    };
    let ticket: Ticket = asked
        .text("token")
        .and_then(|token| app.engine.signed(PURPOSE, token))
        .ok_or_else(refused)?;
    let Ticket { project, session, key } = ticket;
    if !app.engine.knows_key(&key) {
        return Err(refused());
    }
    let caller = Caller { project, key, scope: Scope::Write, approve: false, until: None };
    crate::audit::caller(&caller);
    let (alive, asked) = (app.tasks.token(), crate::audit::later());
    Ok(upgrade.max_message_size(MESSAGE).on_upgrade(async move |socket| {
        let _alive = alive;
        converse(socket, &app, caller, &session, asked).await;
    }))
}

/// How a conversation ends.
enum Last {
    /// With the command's exit code, after a line on the terminal if there is something to say.
    Exit(i32, Option<String>),
    /// Without one, for this reason.
    Close(u16, String),
    /// The client left.
    Left,
}

async fn converse(
    socket: WebSocket,
    app: &Arc<App>,
    caller: Caller,
    session: &str,
    asked: Option<Later>,
) {
    let (mut sink, mut source) = socket.split();
    let last = match begin(&mut source, app, &caller, session, asked).await {
        Ok((name, started)) => attend(&mut sink, &mut source, app, caller, &name, started).await,
        Err(last) => last,
    };
    let (code, reason) = match last {
        Last::Left => return,
        Last::Close(code, reason) => (code, reason),
        Last::Exit(code, line) => {
            if let Some(line) = line {
                let _ = sink.send(Message::Binary(format!("{line}\r\n").into())).await;
            }
            let exit = json!({ "type": "exit", "code": code });
            let _ = sink.send(Message::Text(exit.to_string().into())).await;
            (close_code::NORMAL, String::new())
        }
    };
    // The protocol has room for no more.
    let reason: String = reason.chars().take(100).collect();
    if sink.send(Message::Close(Some(CloseFrame { code, reason: reason.into() }))).await.is_ok() {
        // The peer answers the close; waiting for it lets the last words arrive.
        let _ = tokio::time::timeout(Duration::from_secs(2), async {
            while let Some(Ok(_)) = source.next().await {}
        })
        .await;
    }
}

/// What a client says, other than what is typed.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Word {
    Start {
        command: String,
        #[serde(default)]
        args: Vec<String>,
        #[serde(default)]
        env: Vec<String>,
        cwd: Option<String>,
        cols: Option<u16>,
        rows: Option<u16>,
    },
    Resize {
        cols: u16,
        rows: u16,
    },
}

/// Reads what to run and starts it.
async fn begin(
    source: &mut SplitStream<WebSocket>,
    app: &Arc<App>,
    caller: &Caller,
    session: &str,
    asked: Option<Later>,
) -> Result<(Name, Started), Last> {
    let invalid = |why: &str| Last::Close(close_code::POLICY, why.to_owned());
    let gone = |error: &VercelError| Last::Close(close_code::AWAY, error.message().to_owned());
    let closing = app.closing.clone();
    let first = tokio::select! {
        first = tokio::time::timeout(FIRST_WORD, first_text(source)) => first,
        () = closing.cancelled() => {
            return Err(Last::Close(close_code::AWAY, "The server is going down.".to_owned()));
        }
    };
    let Ok(first) = first else {
        return Err(invalid("the first message must come within 30 seconds"));
    };
    let Ok(Word::Start { command, args, env, cwd, cols, rows }) = serde_json::from_str(&first?)
    else {
        return Err(invalid("the first message must be `start`, with a `command`"));
    };
    let within = Within::find(app, caller, session).await.map_err(|error| gone(&error))?;
    let size = TermSize {
        cols: cols.filter(|cols| *cols > 0).unwrap_or(SIZE.cols),
        rows: rows.filter(|rows| *rows > 0).unwrap_or(SIZE.rows),
    };
    let mut variables = BTreeMap::from([("TERM".to_owned(), "xterm-256color".to_owned())]);
    for pair in &env {
        let Some((name, value)) = pair.split_once('=') else {
            return Err(invalid("`env` should be an array of KEY=VALUE"));
        };
        variables.insert(name.to_owned(), value.to_owned());
    }
    let exec = Exec {
        argv: [vec![command.clone()], args].concat(),
        env: variables,
        cwd: Some(within.path(cwd.as_deref(), "")),
        tty: Some(size),
        stdin: true,
        wake: within.only(),
        by: Some(within.key.to_string()),
        ..Exec::default()
    };
    let argv = exec.argv.clone();
    let started = app.engine.exec(within.project(), within.name(), exec).await;
    if let Some(asked) = asked {
        let failed = started.as_ref().err().map(|error| error.code());
        asked.started(app, within.name(), &argv, failed).await;
    }
    match started {
        Ok(started) => Ok((within.sandbox.name, started)),
        Err(Error::Guest(GuestError::Refused { kind, message })) => {
            let code = match kind {
                Failure::NoExecutable => 127,
                Failure::NotExecutable => 126,
                _ => 1,
            };
            Err(Last::Exit(code, Some(message)))
        }
        Err(error @ (Error::Invalid { .. } | Error::Config(_))) => {
            Err(Last::Exit(1, Some(error.to_string())))
        }
        Err(error) => Err(gone(&within.explain(app, error).await)),
    }
}

async fn first_text(source: &mut SplitStream<WebSocket>) -> Result<String, Last> {
    while let Some(Ok(message)) = source.next().await {
        match message {
            Message::Text(text) => return Ok(text.to_string()),
            Message::Binary(_) => {
                let why = "the first message must be `start`, as text";
                return Err(Last::Close(close_code::POLICY, why.to_owned()));
            }
            Message::Ping(_) | Message::Pong(_) => {}
            Message::Close(_) => break,
        }
    }
    Err(Last::Left)
}

/// Carries both directions at once until the command ends.
async fn attend(
    sink: &mut SplitSink<WebSocket, Message>,
    source: &mut SplitStream<WebSocket>,
    app: &Arc<App>,
    caller: Caller,
    name: &Name,
    started: Started,
) -> Last {
    let Started { command, events, stdin, .. } = started;
    let mut leash = KillOnDisconnect::new(app, caller.clone(), name.clone(), command.id.clone());
    let typed = TerminalInput { app, caller: &caller, name, id: command.id, stdin };
    let closing = app.closing.clone();
    let last = tokio::select! {
        last = show(sink, events) => last,
        () = typed.listen(source) => Last::Left,
        () = closing.cancelled() => {
            Last::Close(close_code::AWAY, "The server is going down; the command goes on.".to_owned())
        }
    };
    if !matches!(last, Last::Left) {
        leash.release();
    }
    last
}

async fn show(sink: &mut SplitSink<WebSocket, Message>, mut events: OutputStream) -> Last {
    loop {
        match events.next().await {
            Some(CommandOutput::Stdout(bytes) | CommandOutput::Stderr(bytes)) => {
                if sink.send(Message::Binary(bytes)).await.is_err() {
                    return Last::Left;
                }
            }
            Some(CommandOutput::Gap(bytes)) => {
                let said = format!("\r\n[{bytes} bytes of output are missing here]\r\n");
                if sink.send(Message::Binary(said.into())).await.is_err() {
                    return Last::Left;
                }
            }
            Some(CommandOutput::Exited(command)) => match command.exit_code {
                Some(code) => return Last::Exit(code, None),
                None => return over(),
            },
            None => return over(),
        }
    }
}

fn over() -> Last {
    Last::Close(close_code::AWAY, "The sandbox session has ended.".to_owned())
}

/// What a client says while its command runs.
struct TerminalInput<'a> {
    app: &'a App,
    caller: &'a Caller,
    name: &'a Name,
    id: CommandId,
    stdin: Option<StdinHandle>,
}

impl TerminalInput<'_> {
    /// Takes messages in until the client leaves. What comes too late changes nothing.
    async fn listen(self, source: &mut SplitStream<WebSocket>) {
        while let Some(Ok(message)) = source.next().await {
            match message {
                Message::Binary(bytes) => {
                    if let Some(stdin) = &self.stdin {
                        let _ = stdin.send(bytes).await;
                    }
                }
                Message::Text(text) => {
                    if let Ok(Word::Resize { cols, rows }) = serde_json::from_str(&text)
                        && cols > 0
                        && rows > 0
                    {
                        let (project, size) = (&self.caller.project, TermSize { cols, rows });
                        let _ = self.app.engine.resize(project, self.name, &self.id, size).await;
                    }
                }
                Message::Ping(_) | Message::Pong(_) => {}
                Message::Close(_) => return,
            }
        }
    }
}
