//! Commands that are attached to from here: their output, our input, window sizes and signals.
//!
//! Attaching goes over a WebSocket, also without `-i`: that way signals that reach `keep` reach the remote command, and it
//! ends when `keep` does. Two pumps run side by side, so that a remote command that reads nothing can still be heard, and one
//! that is not heard can still be signalled.
//!
//! Commands survive a restart of the server. When the connection breaks, [`relay`] looks for the server again, for a while,
//! and goes on with the byte that comes next, in both directions.

use std::io;
use std::process::ExitCode;
use std::time::Duration;

use sandkeep_client::types::ExecRequest;
use sandkeep_client::{Attached, Error, Input, Output};
use tokio::signal::unix::{Signal as Listener, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout_at};

use super::Context;
use super::exec::{ended, show};
use super::sandbox::tell_session;
use crate::failure::Failure;
use crate::screen::{Screen, note};
use crate::terminal::{self, Raw};

/// How long a server that is gone is looked for, unless told otherwise.
pub(super) const RECONNECT: Duration = Duration::from_secs(60);
/// How often it is looked for.
const LOOK: Duration = Duration::from_millis(250);

type Keys = Option<mpsc::Receiver<io::Result<bytes::Bytes>>>;

/// Runs a command here as far as anybody can tell, and returns its exit code.
pub(super) async fn relay(
    context: &Context,
    name: &str,
    request: ExecRequest,
    mut signals: Signals,
    reconnect: Duration,
) -> Result<ExitCode, Failure> {
    let (mut input, mut attached) = context.client.attach(name, &request).await?;
    let first = attached.next().await?;
    if let Some(Output::Started(started)) = &first {
        tell_session(name, Some(&started.session).filter(|_| started.resumed));
    }
    if let Some(first) = &first {
        show(&context.screen, first)?;
    }
    let tty = request.tty.is_some();
    let mut keys: Keys = request.stdin.then(terminal::keystrokes);
    loop {
        // Only now: until here an error should appear on a terminal that is as it was.
        let raw = tty.then(Raw::enter).flatten();
        let over = tokio::select! {
            over = listen(&context.screen, &mut attached) => over,
            refused = talk(&mut input, &mut keys, tty, &mut signals) => Err(refused.into()),
        };
        drop(raw);
        match over {
            Err(Failure::Client(error)) if attached.may_resume(&error) && !reconnect.is_zero() => {
                let link = Link { context, name, attached: &mut attached, input: &mut input };
                link.reconnect(error, reconnect, &mut signals).await?;
                if tty {
                    // It may have changed meanwhile. A command that is over needs no size.
                    let _ = input.resize(terminal::size()).await;
                }
            }
            over => return over,
        }
    }
}

/// The two ends of a command whose connection broke.
struct Link<'a> {
    context: &'a Context,
    name: &'a str,
    attached: &'a mut Attached,
    input: &'a mut Input,
}

impl Link<'_> {
    /// Looks for the server until the deadline, and goes on where the connection broke.
    async fn reconnect(
        mut self,
        broke: Error,
        patience: Duration,
        signals: &mut Signals,
    ) -> Result<(), Failure> {
        let command = self.attached.command().unwrap_or_default().to_owned();
        let limit = crate::when::exact(u64::try_from(patience.as_millis()).unwrap_or(u64::MAX));
        self.say(&format!("{broke}; the command goes on, looking for the server for {limit}"));
        let deadline = Instant::now() + patience;
        let resumed = tokio::select! {
            resumed = timeout_at(deadline, self.resumed(&command)) => resumed,
            () = signals.unless_resized() => {
                let message = format!("interrupted; command {command} goes on in `{}`", self.name);
                return Err(self.left(message, &command));
            }
        };
        match resumed {
            Ok(Ok(())) => {
                self.say("reconnected");
                Ok(())
            }
            Ok(Err(error)) => Err(error.into()),
            Err(_) => {
                let message = format!("the server did not come back within {limit}");
                Err(self.left(message, &command))
            }
        }
    }

    async fn resumed(&mut self, command: &str) -> Result<(), Error> {
        loop {
            let client = &self.context.client;
            let outcome = match self.attached.resume(client, self.name).await {
                Ok(()) => self.input.resume(client, self.name, command).await,
                Err(error) => Err(error),
            };
            match outcome {
                Err(error) if error.may_pass() => sleep(LOOK).await,
                outcome => return outcome,
            }
        }
    }

    fn left(&self, message: String, command: &str) -> Failure {
        let follow = format!("`keep logs -f {} {command}` shows its output", self.name);
        let end = format!("`keep kill {} {command}` ends it", self.name);
        Failure::here(message).with_hint(format!("{follow}, {end}"))
    }

    fn say(&self, text: &str) {
        if !self.context.screen.json {
            note(&format!("keep: {text}"));
        }
    }
}

async fn listen(screen: &Screen, attached: &mut Attached) -> Result<ExitCode, Failure> {
    while let Some(output) = attached.next().await? {
        show(screen, &output)?;
        if let Output::Exited(end) = output {
            return ended(screen, end.exit_code, &end.command);
        }
    }
    Err(Failure::here("the connection ended before the command"))
}

/// Sends keystrokes, window sizes and signals to the command for as long as it is let. When the connection
/// breaks, [`listen`] is the one to say so. Returns if input was lost.
async fn talk(input: &mut Input, keys: &mut Keys, tty: bool, signals: &mut Signals) -> Error {
    loop {
        let sent = tokio::select! {
            typed = next_key(keys) => match typed {
                Some(Ok(bytes)) => input.write(bytes).await,
                Some(Err(_)) | None => {
                    *keys = None;
                    input.close().await
                }
            },
            heard = signals.next() => match heard {
                SignalEvent::Signal(number) => input.signal(number).await,
                SignalEvent::Resize if tty => input.resize(terminal::size()).await,
                SignalEvent::Resize => Ok(()),
            },
        };
        match sent {
            Ok(()) => {}
            Err(error) if error.code() == Some("stdin_gap") => return error,
            Err(_) => std::future::pending().await,
        }
    }
}

async fn next_key(keys: &mut Keys) -> Option<io::Result<bytes::Bytes>> {
    match keys {
        Some(keys) => keys.recv().await,
        None => std::future::pending().await,
    }
}

/// The signals that are sent to the command.
#[derive(Debug)]
pub(super) struct Signals {
    hangup: Listener,
    interrupt: Listener,
    quit: Listener,
    terminate: Listener,
    resize: Listener,
}

enum SignalEvent {
    Signal(i32),
    Resize,
}

impl Signals {
    pub(super) fn listen() -> Result<Self, Failure> {
        let on = |kind: SignalKind| {
            signal(kind).map_err(|error| Failure::caused("cannot listen for signals", error))
        };
        Ok(Self {
            hangup: on(SignalKind::hangup())?,
            interrupt: on(SignalKind::interrupt())?,
            quit: on(SignalKind::quit())?,
            terminate: on(SignalKind::terminate())?,
            resize: on(SignalKind::window_change())?,
        })
    }

    /// Waits for a signal that means to end something.
    async fn unless_resized(&mut self) {
        while let SignalEvent::Resize = self.next().await {}
    }

    async fn next(&mut self) -> SignalEvent {
        let kind = tokio::select! {
            _ = self.hangup.recv() => SignalKind::hangup(),
            _ = self.interrupt.recv() => SignalKind::interrupt(),
            _ = self.quit.recv() => SignalKind::quit(),
            _ = self.terminate.recv() => SignalKind::terminate(),
            _ = self.resize.recv() => return SignalEvent::Resize,
        };
        SignalEvent::Signal(kind.as_raw_value())
    }
}
