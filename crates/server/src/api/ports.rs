//! TCP ports inside a sandbox, over a WebSocket.

use std::sync::Arc;

use axum::extract::State;
use axum::extract::ws::{CloseFrame, Message, WebSocket, close_code};
use axum::response::Response;
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use sandkeep_core::guest::{Incoming, Outgoing};
use sandkeep_core::model::Name;

use super::App;
use super::input::{Params, Seg, Upgrade};
use crate::auth::Writer;
use crate::error::{ApiError, chain};
use crate::listen::closed;

/// Connects to a port on the sandbox's loopback: binary messages are the bytes of the stream, both
/// ways. Text `end` says that the client sends no more.
#[utoipa::path(get, path = "/v1/sandboxes/{name}/ports/{port}/ws", tag = "ports", operation_id = "connect_port",
    params(
        ("name" = String, Path, description = "The sandbox's name."),
        ("port" = u16, Path, description = "The port."),
        ("if_running" = Option<bool>, Query, description = "Refuse instead of waking it."),
    ),
    responses((status = 101, description = "The WebSocket.")))]
pub(crate) async fn web_socket(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    Seg((name, port)): Seg<(Name, u16)>,
    params: Params,
    Upgrade(upgrade): Upgrade,
) -> Result<Response, ApiError> {
    let wake = params.wake(&caller)?;
    params.end()?;
    // Before the upgrade, so that a refusal has a status.
    let (out, incoming, hold) = app.engine.connect_port(&caller.project, &name, port, wake).await?;
    let alive = app.alive.enter();
    Ok(upgrade.on_upgrade(async move |socket| {
        // The sandbox stays awake as long as the connection lasts.
        let _awake = (alive, hold);
        relay(socket, &app, out, incoming).await;
    }))
}

async fn relay(socket: WebSocket, app: &App, out: Outgoing, mut incoming: Incoming) {
    let (mut sink, mut source) = socket.split();
    let mut closing = app.closing.subscribe();
    let code = tokio::select! {
        code = outwards(&mut sink, &mut incoming) => code,
        () = inwards(&mut source, out) => return,
        () = closed(&mut closing) => close_code::AWAY,
    };
    let _ = sink.send(Message::Close(Some(CloseFrame { code, reason: "".into() }))).await;
}

/// What comes from the port, until it ends.
async fn outwards(sink: &mut SplitSink<WebSocket, Message>, incoming: &mut Incoming) -> u16 {
    loop {
        match incoming.next().await {
            Ok(Some(bytes)) => {
                if sink.send(Message::Binary(bytes)).await.is_err() {
                    return close_code::ABNORMAL;
                }
            }
            Ok(None) => return close_code::NORMAL,
            Err(error) => {
                tracing::debug!(error = chain(&error), "a port's connection broke");
                return close_code::ERROR;
            }
        }
    }
}

/// What the client sends, until it leaves. After its end of input it may still listen.
async fn inwards(source: &mut SplitStream<WebSocket>, out: Outgoing) {
    let mut out = Some(out);
    while let Some(Ok(message)) = source.next().await {
        match message {
            Message::Binary(bytes) => {
                if let Some(open) = &mut out
                    && open.send(bytes).await.is_err()
                {
                    out = None;
                }
            }
            Message::Text(text) if text.as_str() == "end" => {
                if let Some(open) = out.take() {
                    open.end();
                }
            }
            Message::Text(_) | Message::Ping(_) | Message::Pong(_) => {}
            Message::Close(_) => return,
        }
    }
}
