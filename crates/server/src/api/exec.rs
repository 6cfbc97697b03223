//! Running a command: as an NDJSON answer, or over a WebSocket with input, resizing and signals.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::ws::{CloseFrame, Message, WebSocket, close_code};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use sandkeep_client::types::{self, Channel, ClientMessage, ExecEvent, ExecRequest};
use sandkeep_core::model::{CommandId, Name};
use sandkeep_proto::link::TermSize;
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use super::commands::signal_number;
use super::exec_result::Wait;
use super::followers::{Follower, RETURN};
use super::input::{Body, IdempotencyKey, Params, PathParam, Upgrade, parse_json};
use super::secrets::inject_in;
use super::stream::{LineStyle, StreamReader};
use super::{App, stream, wire};
use crate::audit;
use crate::auth::Writer;
use crate::error::ApiError;
use crate::request_id::RequestScope;
use sandkeep_core::engine::{
    Caller, CommandOutput, Exec, OutputStream, Started, StdinHandle, WakeMode,
};

/// How long a WebSocket may be open before it says what to run.
const FIRST_WORD: Duration = Duration::from_secs(30);
/// How long a command may take to end by itself when its caller has left.
const HANG_UP: Duration = Duration::from_secs(5);
/// How many messages a client may send before its command is started: each has at most [`MESSAGE`] bytes.
const EARLY_MESSAGES: usize = 4;
/// The largest message a client may send.
const MESSAGE: usize = (1 << 20) + 1;

/// Runs a command and streams what it prints, or, with `detach`, answers with the command at once. With `wait` the answer is one
/// document, when the command has ended.
#[utoipa::path(post, path = "/v1/sandboxes/{name}/exec", tag = "commands", operation_id = "exec",
    params(
        ("name" = String, Path, description = "The sandbox's name."),
        ("if_running" = Option<bool>, Query, description = "Fail with 409 `not_running` instead of waking the sandbox."),
        ("wait" = Option<bool>, Query, description = "Answer with one JSON document when the command has ended: its output, exit code and end."),
        ("output_limit" = Option<types::Size>, Query, description = "With `wait`: how many bytes of each of standard output and standard error to return, at most 8M; 1M if absent."),
        ("keep_alive" = Option<bool>, Query, description = "Send an empty line whenever the stream was quiet for 15 seconds."),
        ("Idempotency-Key" = Option<String>, Header, description = "A retry with the same key does not start the command again: it gets the output of the first from its beginning."),
    ),
    request_body = ExecRequest,
    responses((status = 200, description = "NDJSON: one event per line; with `wait`, the result; with `detach`, the command.",
        content((ExecEvent = "application/x-ndjson"), (types::ExecAnswer = "application/json")))))]
pub(crate) async fn exec(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    mut params: Params,
    IdempotencyKey(key): IdempotencyKey,
    Body(request): Body<ExecRequest>,
) -> Result<Response, ApiError> {
    let wake = params.wake(&caller)?;
    let wait = Wait::of(&mut params)?;
    let keep_alive = params.flag("keep_alive")?;
    params.end()?;
    let detach = request.detach;
    if detach && wait.is_some() {
        return Err(ApiError::invalid("`wait` and `detach` cannot be combined")
            .hint("with `detach`, wait with `GET …/commands/{id}?wait=true`"));
    }
    let (exec, input) = wanted(request, wake, &caller)?;
    audit::program(&exec.argv);
    let keyed = key.is_some();
    let started = match key {
        None => app.engine.exec(&caller.project, &name, exec).await?,
        Some(key) => app.engine.exec_once(&caller.project, &name, key, exec).await?,
    };
    let Started { command, events, stdin, resumed, session } = started;
    audit::detail("command", &command.id);
    if let (Some(input), Some(stdin)) = (input, stdin) {
        app.spawn_until_shutdown(feed(stdin, input));
    }
    if detach {
        return Ok(Json(wire::command(command)).into_response());
    }
    let mut leash = KillOnDisconnect::new(&app, caller, name, command.id.clone());
    if keyed {
        leash = leash.patient();
    }
    if let Some(wait) = wait {
        return Ok(Json(wait.result(&app, events, resumed, leash).await?).into_response());
    }
    let first = ExecEvent::Started {
        command: wire::command(command),
        session: wire::session(session),
        resumed,
    };
    Ok(stream::lines(
        &app,
        Some(&first),
        events,
        broke_off(),
        StreamReader::Exec(leash),
        LineStyle { keep_alive, ..LineStyle::default() },
    ))
}

/// Ends a command whose caller left without having asked for it to continue: as a terminal that
/// hangs up does, and by force if that has no effect. A server that goes down is not a caller that
/// left.
pub(crate) struct KillOnDisconnect {
    app: Arc<App>,
    caller: Caller,
    name: Name,
    command: Option<CommandId>,
    /// For a caller that can reconnect: it gave an idempotency key.
    follower: Option<Follower>,
}

impl KillOnDisconnect {
    pub(crate) fn new(app: &Arc<App>, caller: Caller, name: Name, command: CommandId) -> Self {
        Self { app: Arc::clone(app), caller, name, command: Some(command), follower: None }
    }

    /// Gives the caller time to reconnect, by another call under its key or by the command's log.
    fn patient(mut self) -> Self {
        self.follower = self.command.clone().map(|command| self.app.followers.add(command));
        self
    }

    /// The command ended, or is detached.
    pub(crate) fn release(&mut self) {
        self.command = None;
    }
}

impl Drop for KillOnDisconnect {
    fn drop(&mut self) {
        let Some(command) = self.command.take() else { return };
        if self.app.closing.is_cancelled() {
            return;
        }
        let (engine, name) = (self.app.engine.clone(), self.name.clone());
        let project = self.caller.project.clone();
        let may_return = self.follower.take().is_some();
        let (followers, closing) = (self.app.followers.clone(), self.app.closing.clone());
        if let Ok(runtime) = Handle::try_current() {
            let hang_up = async move {
                let returned = async { may_return && followers.returned(&command, RETURN).await };
                // A server that goes down ends nothing.
                if closing.run_until_cancelled(returned).await != Some(false) {
                    return;
                }
                // Each fails when the command has ended meanwhile, which is the intended result.
                let _ = engine.signal(&project, &name, &command, 1).await;
                let ended = engine.wait(&project, &name, &command);
                if tokio::time::timeout(HANG_UP, ended).await.is_err() {
                    let _ = engine.signal(&project, &name, &command, 9).await;
                }
            };
            self.app.tasks.spawn_on(hang_up, &runtime);
        }
    }
}

/// The last event of a command whose events end without an exit.
fn broke_off() -> ExecEvent {
    ExecEvent::Error { error: session_ended().into_body() }
}

/// The events of a command ended without an exit.
pub(super) fn session_ended() -> ApiError {
    let message = "the sandbox stopped while the command ran";
    ApiError::new(StatusCode::GONE, "session_ended", message).hint("its log has what it printed")
}

/// A whole standard input. A process that does not read it causes no error.
async fn feed(stdin: StdinHandle, input: Bytes) {
    if input.is_empty() || stdin.send(input).await.is_ok() {
        let _ = stdin.close().await;
    }
}

fn wanted(
    request: ExecRequest,
    wake: WakeMode,
    caller: &Caller,
) -> Result<(Exec, Option<Bytes>), ApiError> {
    let input = match (request.input, request.input_base64) {
        (None, None) => None,
        (Some(text), None) => Some(Bytes::from(text)),
        (None, Some(text)) => {
            let bytes = STANDARD.decode(text);
            Some(Bytes::from(bytes.map_err(|_| ApiError::invalid("input_base64: not base64"))?))
        }
        (Some(_), Some(_)) => {
            return Err(ApiError::invalid("input and input_base64 cannot be combined"));
        }
    };
    if input.is_some() && request.stdin {
        return Err(ApiError::invalid("stdin: cannot be combined with input"));
    }
    let exec = Exec {
        argv: request.argv,
        env: request.env,
        cwd: request.cwd,
        user: request.user,
        sudo: false,
        tty: request.tty.map(|size| TermSize { cols: size.cols, rows: size.rows }),
        stdin: request.stdin || input.is_some(),
        detach: request.detach,
        timeout: request.timeout,
        wake: if request.if_running { WakeMode::IfRunning } else { wake },
        inject: inject_in(request.inject)?,
        by: Some(caller.key.to_string()),
        id: None,
    };
    Ok((exec, input))
}

/// Runs a command over a WebSocket.
#[utoipa::path(get, path = "/v1/sandboxes/{name}/exec/ws", tag = "commands", operation_id = "exec_web_socket",
    params(
        ("name" = String, Path, description = "The sandbox's name."),
        ("if_running" = Option<bool>, Query, description = "Fail with 409 `not_running` instead of waking the sandbox."),
    ),
    responses((status = 101, description = "The WebSocket; docs/API.md describes its messages.")))]
pub(crate) async fn web_socket(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    params: Params,
    Upgrade(upgrade): Upgrade,
) -> Result<Response, ApiError> {
    let wake = params.wake(&caller)?;
    params.end()?;
    let (alive, asked) = (app.tasks.token(), audit::later());
    let scope = RequestScope::current();
    Ok(upgrade.max_message_size(MESSAGE).on_upgrade(async move |socket| {
        let _alive = alive;
        scope.run(converse(socket, &app, caller, &name, wake, asked)).await;
    }))
}

async fn converse(
    socket: WebSocket,
    app: &Arc<App>,
    caller: Caller,
    name: &Name,
    wake: WakeMode,
    asked: Option<audit::Later>,
) {
    let (mut sink, mut source) = socket.split();
    let mut early = Vec::new();
    let last = match begin(&mut source, &mut early, app, &caller, name, wake, asked).await {
        Err(Some(refused)) => ExecEvent::Error { error: refused.into_body() },
        Err(None) => return,
        Ok((started, input)) => {
            let said = (early, &mut source);
            match attend(&mut sink, said, app, &caller, name, started, input).await {
                Some(last) => last,
                None => return,
            }
        }
    };
    let broken = matches!(last, ExecEvent::Error { .. });
    let code = if broken { close_code::ERROR } else { close_code::NORMAL };
    if sink.send(text(&last)).await.is_ok() {
        let _ = sink.send(Message::Close(Some(CloseFrame { code, reason: "".into() }))).await;
        // The peer answers the close; waiting for it lets the last words arrive.
        let _ = tokio::time::timeout(Duration::from_secs(2), async {
            while let Some(Ok(_)) = source.next().await {}
        })
        .await;
    }
}

fn text(event: &ExecEvent) -> Message {
    Message::Text(serde_json::to_string(event).unwrap_or_default().into())
}

type Begun = (Started, Option<Bytes>);

/// Reads what to run and starts it. `Err(None)` when the client left.
async fn begin(
    source: &mut SplitStream<WebSocket>,
    early: &mut Vec<Message>,
    app: &App,
    caller: &Caller,
    name: &Name,
    wake: WakeMode,
    asked: Option<audit::Later>,
) -> Result<Begun, Option<ApiError>> {
    let closing = app.closing.clone();
    let first = tokio::select! {
        first = tokio::time::timeout(FIRST_WORD, first_text(source)) => first,
        () = closing.cancelled() => return Err(Some(ApiError::shutting_down())),
    };
    let Ok(first) = first else {
        return Err(Some(ApiError::invalid("the first message must come within 30 seconds")));
    };
    let request: ExecRequest = parse_json(first?.as_bytes()).map_err(Some)?;
    let (exec, input) = wanted(request, wake, caller).map_err(Some)?;
    let argv = exec.argv.clone();
    // It may have to be approved first. A caller that has left by then does not want it any more.
    let approved = tokio::select! {
        approved = app.engine.exec_approved(&caller.project, name, &exec) => approved,
        () = left(source, early) => return Err(None),
        () = closing.cancelled() => return Err(Some(ApiError::shutting_down())),
    };
    let started = match approved {
        Ok(sandbox) => app.engine.exec_now(&caller.project, name, &sandbox, exec).await,
        Err(refused) => Err(refused),
    };
    if let Some(asked) = asked {
        let failed = started.as_ref().err().map(|error| error.code());
        asked.started(app, name, &argv, failed).await;
    }
    started.map(|started| (started, input)).map_err(|error| Some(error.into()))
}

/// Waits until the client leaves. What it says meanwhile is kept, and not read any more when it is too much.
async fn left(source: &mut SplitStream<WebSocket>, early: &mut Vec<Message>) {
    while early.len() < EARLY_MESSAGES {
        match source.next().await {
            Some(Ok(Message::Close(_)) | Err(_)) | None => return,
            // They keep the connection alive, and mean nothing to a command.
            Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
            Some(Ok(message)) => early.push(message),
        }
    }
    std::future::pending::<()>().await;
}

async fn first_text(source: &mut SplitStream<WebSocket>) -> Result<String, Option<ApiError>> {
    while let Some(message) = source.next().await {
        match message {
            Ok(Message::Text(text)) => return Ok(text.to_string()),
            Ok(Message::Ping(_) | Message::Pong(_)) => {}
            Ok(Message::Binary(_)) => {
                let refused = "the first message must be the exec request, as text";
                return Err(Some(ApiError::invalid(refused)));
            }
            Ok(Message::Close(_)) | Err(_) => return Err(None),
        }
    }
    Err(None)
}

/// Carries both directions at once until the command ends; answers with the last word, or nothing
/// when the client left.
async fn attend(
    sink: &mut SplitSink<WebSocket, Message>,
    (early, source): (Vec<Message>, &mut SplitStream<WebSocket>),
    app: &Arc<App>,
    caller: &Caller,
    name: &Name,
    started: Started,
    input: Option<Bytes>,
) -> Option<ExecEvent> {
    let Started { command, events, mut stdin, resumed, session } = started;
    let id = command.id.clone();
    let mut leash = KillOnDisconnect::new(app, caller.clone(), name.clone(), id.clone());
    if command.detached {
        leash.release();
    }
    let first = ExecEvent::Started {
        command: wire::command(command),
        session: wire::session(session),
        resumed,
    };
    sink.send(text(&first)).await.ok()?;
    if let Some(input) = input
        && let Some(stdin) = stdin.take()
    {
        app.spawn_until_shutdown(feed(stdin, input));
    }
    // Reading and writing do not wait for each other: a process that is stuck printing does not
    // read, and one that waits for input does not print.
    let (complain, complaints) = mpsc::channel(1);
    let said = ClientInput { app, caller, name, id, stdin, complain };
    let closing = app.closing.clone();
    let last = tokio::select! {
        last = speak(sink, events, complaints) => last,
        () = said.listen(early, source) => None,
        () = closing.cancelled() => {
            Some(ExecEvent::Error { error: ApiError::shutting_down().into_body() })
        }
    };
    if matches!(last, Some(ExecEvent::Exited { .. })) {
        leash.release();
    }
    last
}

async fn speak(
    sink: &mut SplitSink<WebSocket, Message>,
    mut events: OutputStream,
    mut complaints: mpsc::Receiver<ApiError>,
) -> Option<ExecEvent> {
    loop {
        let message = tokio::select! {
            event = events.next() => match event {
                Some(CommandOutput::Stdout(bytes)) => framed(Channel::Stdout, &bytes),
                Some(CommandOutput::Stderr(bytes)) => framed(Channel::Stderr, &bytes),
                Some(gap @ CommandOutput::Gap(_)) => text(&stream::event(gap)),
                Some(ended @ CommandOutput::Exited(_)) => return Some(stream::event(ended)),
                None => return Some(broke_off()),
            },
            Some(error) = complaints.recv() => {
                return Some(ExecEvent::Error { error: error.into_body() });
            }
        };
        sink.send(message).await.ok()?;
    }
}

fn framed(channel: Channel, bytes: &[u8]) -> Message {
    let mut frame = Vec::with_capacity(bytes.len() + 1);
    frame.push(channel as u8);
    frame.extend_from_slice(bytes);
    Message::Binary(frame.into())
}

/// What a client may say while its command runs.
struct ClientInput<'a> {
    app: &'a App,
    caller: &'a Caller,
    name: &'a Name,
    id: CommandId,
    stdin: Option<StdinHandle>,
    complain: mpsc::Sender<ApiError>,
}

impl ClientInput<'_> {
    /// Takes messages in until the client leaves.
    async fn listen(mut self, early: Vec<Message>, source: &mut SplitStream<WebSocket>) {
        let mut messages = futures_util::stream::iter(early.into_iter().map(Ok)).chain(source);
        while let Some(Ok(message)) = messages.next().await {
            let taken = match message {
                Message::Binary(bytes) => self.bytes(bytes).await,
                Message::Text(text) => self.word(text.as_bytes()).await,
                Message::Ping(_) | Message::Pong(_) => Ok(()),
                Message::Close(_) => return,
            };
            if let Err(error) = taken {
                let _ = self.complain.send(error).await;
                // The complaint ends the conversation.
                std::future::pending::<()>().await;
            }
        }
    }

    async fn bytes(&mut self, bytes: Bytes) -> Result<(), ApiError> {
        if bytes.first().copied().and_then(Channel::from_byte) != Some(Channel::Stdin) {
            return Err(ApiError::invalid("a binary message must begin with byte 0, for stdin"));
        }
        let Some(stdin) = &self.stdin else {
            return Err(ApiError::invalid("the command was started without `stdin`"));
        };
        // A process that closed its input or ended does not want the rest; its exit is on its way.
        let _ = stdin.send(bytes.slice(1..)).await;
        Ok(())
    }

    async fn word(&mut self, text: &[u8]) -> Result<(), ApiError> {
        let Self { app, caller, name, id, .. } = self;
        // Signals and sizes that come too late change nothing.
        match parse_json(text)? {
            ClientMessage::Resize { cols, rows } => {
                let size = TermSize { cols, rows };
                let _ = app.engine.resize(&caller.project, name, id, size).await;
            }
            ClientMessage::Signal { signal } => {
                let signal = signal_number(&signal)?;
                let _ = app.engine.signal(&caller.project, name, id, signal).await;
            }
            ClientMessage::StdinClose => {
                if let Some(stdin) = self.stdin.take() {
                    let _ = stdin.close().await;
                }
            }
        }
        Ok(())
    }
}
