//! Commands that run something in a sandbox, and commands about what was run.
//!
//! A command is always attached over a WebSocket, also without `-i`: that way signals that reach
//! `keep` reach the remote command, and it ends when `keep` does. Two pumps run side by side, so that
//! the output of a remote command that reads nothing still arrives, and one whose output is not
//! read can still be signalled.

use std::future::pending;
use std::io;
use std::io::Write as _;
use std::process::ExitCode;

use sandkeep_client::types::{
    Class, Command, CommandEnd, CreateSandbox, ExecEvent, ExecRequest, Signal, UpdateSandbox,
};
use sandkeep_client::{Attached, Input, Output};
use tokio::signal::unix::{Signal as Listener, SignalKind, signal};

use super::sandbox::tell_session;
use super::{Context, or_dash, patiently, word};
use crate::args::{ExecArgs, ExecOptions, KillArgs, LogsArgs, PsArgs, RunArgs, ShellArgs};
use crate::failure::{Failure, output_error};
use crate::screen::{Screen, Table, note};
use crate::settings::change;
use crate::terminal::{self, Raw};
use crate::when;

/// The exit code of a command that ran into its timeout, as `timeout` of coreutils has it.
const TIMED_OUT: u8 = 124;

/// Finds the user's shell, or the best there is. `-l` because people expect their profile.
const LOGIN_SHELL: &str = "\
shell=$(getent passwd \"$(id -u)\" 2>/dev/null | cut -d: -f7)
[ -x \"$shell\" ] || shell=$(command -v bash || echo /bin/sh)
exec \"$shell\" -l";

pub(super) async fn exec(context: &Context, args: ExecArgs) -> Result<ExitCode, Failure> {
    let ExecArgs { how, detach, if_running, name, argv } = args;
    let request = ExecRequest { argv, if_running, ..asked(how) };
    if detach {
        let command = context.client.exec_detached(&name, &request).await?;
        context.screen.answer(&command, |command| format!("{}\n", command.id))?;
        return Ok(ExitCode::SUCCESS);
    }
    relay(context, &name, request, Signals::listen()?).await
}

pub(super) async fn shell(context: &Context, args: ShellArgs) -> Result<ExitCode, Failure> {
    let ShellArgs { env, cwd, user, name } = args;
    let tty = terminal::is_interactive();
    let how = ExecOptions { interactive: true, tty, env, cwd, user, ..Default::default() };
    let argv = ["/bin/sh", "-c", LOGIN_SHELL].map(str::to_owned).to_vec();
    relay(context, &name, ExecRequest { argv, ..asked(how) }, Signals::listen()?).await
}

pub(super) async fn run(context: &Context, args: RunArgs) -> Result<ExitCode, Failure> {
    // Before anything is made: what interrupts `keep` from here on must not leave a sandbox behind.
    let signals = Signals::listen()?;
    let settings = change(args.settings)?;
    let settings = UpdateSandbox {
        image: args.image,
        class: settings.class.or(Some(Class::Ephemeral)),
        persistent: settings.persistent.or(Some(false)),
        ..settings
    };
    let request = CreateSandbox { name: args.name, start: true, ..CreateSandbox::default() }
        .with_settings(settings);
    let opened = patiently(context.client.create(&request, None)).await?;
    tell_session(&opened.sandbox.name, opened.session.as_ref());
    let name = opened.sandbox.name;
    let how = ExecOptions { interactive: args.interactive, tty: args.tty, ..Default::default() };
    let ended = relay(context, &name, ExecRequest { argv: args.argv, ..asked(how) }, signals).await;
    if args.rm {
        context.client.delete(&name, None).await?;
    } else if !context.screen.json {
        note(&format!("sandbox {name} is kept until it expires; delete it with `keep rm {name}`"));
    }
    ended
}

fn asked(how: ExecOptions) -> ExecRequest {
    let ExecOptions { interactive, tty, env, cwd, user, timeout, mut inject, inject_file } = how;
    inject.extend(inject_file);
    let mut env: std::collections::BTreeMap<String, String> = env.into_iter().collect();
    if tty && !env.contains_key("TERM") {
        let term = std::env::var("TERM").unwrap_or_else(|_| "xterm".to_owned());
        env.insert("TERM".to_owned(), term);
    }
    ExecRequest {
        env,
        cwd,
        user,
        tty: tty.then(terminal::size),
        stdin: interactive,
        timeout,
        inject,
        ..ExecRequest::default()
    }
}

/// Runs a command as if it ran here, and returns its exit code.
async fn relay(
    context: &Context,
    name: &str,
    request: ExecRequest,
    signals: Signals,
) -> Result<ExitCode, Failure> {
    let (input, mut attached) = context.client.attach(name, &request).await?;
    let first = attached.next().await?;
    if let Some(Output::Started(started)) = &first {
        tell_session(name, Some(&started.session).filter(|_| started.resumed));
    }
    if let Some(first) = &first {
        show(&context.screen, first)?;
    }
    // Only now: until here an error should appear on a terminal that is as it was.
    let raw = request.tty.is_some().then(Raw::enter).flatten();
    let ended = tokio::select! {
        ended = listen(&context.screen, &mut attached) => ended,
        never = talk(input, request.stdin, request.tty.is_some(), signals) => match never {},
    };
    drop(raw);
    ended
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

/// The exit code of a command that is over. Unless it just exited, why it ended goes to stderr.
fn ended(screen: &Screen, code: Option<i32>, command: &Command) -> Result<ExitCode, Failure> {
    let why = why_it_ended(command);
    let Some(code) = code else {
        let lost = "the session ended before the command did".to_owned();
        return Err(Failure::here(why.unwrap_or(lost)));
    };
    if let Some(why) = why
        && !screen.json
    {
        note(&why);
    }
    Ok(match command.end {
        Some(CommandEnd::TimedOut) => ExitCode::from(TIMED_OUT),
        _ => exit_code(code),
    })
}

/// Why a command ended, for people; nothing if it exited by itself.
fn why_it_ended(command: &Command) -> Option<String> {
    let limit = |what: &str| {
        let bound = command.limit.map(|limit| format!(", limit {}", super::bytes(limit)));
        let peak = command.peak.map(|peak| format!(", peak {}", super::bytes(peak)));
        format!("{what}{}{}", bound.unwrap_or_default(), peak.unwrap_or_default())
    };
    let signal = command.exit_code.and_then(|code| code.checked_sub(128)).unwrap_or_default();
    let said = match command.end? {
        CommandEnd::Exited => return None,
        CommandEnd::Signalled => format!("signalled: signal {signal} ended the command"),
        CommandEnd::TimedOut => match command.limit {
            Some(limit) => format!("timed_out: killed after its timeout of {}", when::exact(limit)),
            None => "timed_out: killed after its timeout".to_owned(),
        },
        CommandEnd::OutOfMemory => {
            limit("out_of_memory: killed because the sandbox had no memory left")
        }
        CommandEnd::OutOfDisk => limit("out_of_disk: killed because the disk limit was exceeded"),
        CommandEnd::Killed => format!("killed: signal {signal} was sent to the command"),
        CommandEnd::SessionEnded => {
            "session_ended: the session ended before the command did".to_owned()
        }
        CommandEnd::Lost => "lost: nobody knows how the command ended; its machine died, or \
             the host went down"
            .to_owned(),
    };
    Some(format!("end: {said}"))
}

fn exit_code(code: i32) -> ExitCode {
    ExitCode::from(u8::try_from(code & 0xff).unwrap_or(125))
}

/// Sends keystrokes, window sizes and signals to the command for as long as it is let. When the connection
/// breaks, [`listen`] is the one to say so.
async fn talk(
    mut input: Input,
    stdin: bool,
    tty: bool,
    mut signals: Signals,
) -> std::convert::Infallible {
    let mut keys = stdin.then(terminal::keystrokes);
    loop {
        let sent = tokio::select! {
            typed = next_key(&mut keys) => match typed {
                Some(Ok(bytes)) => input.write(&bytes).await,
                Some(Err(_)) | None => {
                    keys = None;
                    input.close().await
                }
            },
            heard = signals.next() => match heard {
                SignalEvent::Signal(number) => input.signal(number).await,
                SignalEvent::Resize if tty => input.resize(terminal::size()).await,
                SignalEvent::Resize => Ok(()),
            },
        };
        if sent.is_err() {
            return pending().await;
        }
    }
}

async fn next_key(
    keys: &mut Option<tokio::sync::mpsc::Receiver<io::Result<bytes::Bytes>>>,
) -> Option<io::Result<bytes::Bytes>> {
    match keys {
        Some(keys) => keys.recv().await,
        None => pending().await,
    }
}

fn show(screen: &Screen, output: &Output) -> Result<(), Failure> {
    if screen.json {
        return screen.json_line(&event(output));
    }
    match output {
        Output::Stdout(bytes) => screen.bytes(bytes),
        Output::Stderr(bytes) => {
            let mut err = io::stderr().lock();
            err.write_all(bytes).and_then(|()| err.flush()).map_err(output_error)
        }
        Output::Gap(bytes) => {
            note(&format!("{bytes} bytes of output are missing: the log has dropped them"));
            Ok(())
        }
        Output::Started(_) | Output::Exited(_) | Output::More => Ok(()),
    }
}

/// The API's words for what came over the WebSocket.
fn event(output: &Output) -> ExecEvent {
    match output {
        Output::Started(started) => ExecEvent::Started {
            command: started.command.clone(),
            session: started.session.clone(),
            resumed: started.resumed,
        },
        Output::Stdout(bytes) => ExecEvent::stdout(bytes),
        Output::Stderr(bytes) => ExecEvent::stderr(bytes),
        Output::Exited(end) => {
            ExecEvent::Exited { exit_code: end.exit_code, command: end.command.clone() }
        }
        Output::Gap(bytes) => ExecEvent::Gap { bytes: *bytes },
        Output::More => ExecEvent::More,
    }
}

/// The signals that are sent to the command.
#[derive(Debug)]
struct Signals {
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
    fn listen() -> Result<Self, Failure> {
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

pub(super) async fn commands(context: &Context, args: &PsArgs) -> Result<(), Failure> {
    let limit = usize::try_from(args.limit).ok();
    let all = context.client.commands(&args.name, Some(args.limit)).collect(limit).await?;
    context.screen.answer(&all, |all| {
        let mut table =
            Table::new(&["COMMAND", "END", ">EXIT", "STARTED", ">TOOK", ">OUTPUT", "ARGV"]);
        for command in all {
            table.row(vec![
                command.id.clone(),
                command.end.map_or_else(|| word(command.state), word),
                or_dash(command.exit_code.map(|code| code.to_string())),
                when::ago(&command.started_at),
                when::between(&command.started_at, command.ended_at.as_deref()),
                super::bytes(command.output_bytes),
                command.argv.join(" "),
            ]);
        }
        context.screen.table(&table)
    })
}

pub(super) async fn logs(context: &Context, args: &LogsArgs) -> Result<(), Failure> {
    let id = match &args.command {
        Some(id) => id.clone(),
        None => newest(context, &args.name).await?.id,
    };
    print_log(context, &args.name, &id, args.follow).await
}

/// Prints what a command wrote.
pub(super) async fn print_log(
    context: &Context,
    name: &str,
    command: &str,
    follow: bool,
) -> Result<(), Failure> {
    let mut log = context.client.logs(name, command, follow).await?;
    while let Some(output) = log.next().await? {
        show(&context.screen, &output)?;
    }
    Ok(())
}

async fn newest(context: &Context, name: &str) -> Result<Command, Failure> {
    let mut newest = context.client.commands(name, Some(1)).collect(Some(1)).await?;
    newest.pop().ok_or_else(|| {
        Failure::here(format!("`{name}` has no commands yet"))
            .with_hint(format!("`keep exec {name} -- ARGV` runs one"))
    })
}

pub(super) async fn kill(context: &Context, args: &KillArgs) -> Result<(), Failure> {
    let KillArgs { name, command, signal } = args;
    context.client.signal(name, command, Signal::Number(*signal)).await?;
    context.screen.answer(&serde_json::json!({}), |_| format!("{command}  sent signal {signal}\n"))
}
