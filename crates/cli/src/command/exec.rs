//! Commands that run something in a sandbox, and commands about what was run. `attach` is the way
//! to a running command.

use std::io;
use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use sandkeep_client::types::{
    Class, Command, CommandEnd, CreateSandbox, ExecEvent, ExecRequest, Sandbox, Signal, Span,
    State, UpdateSandbox,
};
use sandkeep_client::{ListSandboxes, LogQuery, Output, Running};

use super::attach::{RECONNECT, Signals, relay};
use super::sandbox::{failed_hook, tell_session};
use super::{Context, or_dash, patiently, resolve, word};
use crate::args::{ExecArgs, ExecOptions, KillArgs, LogsArgs, PsArgs, RunArgs, ShellArgs};
use crate::failure::{Failure, output_error};
use crate::screen::{Screen, Table, note};
use crate::settings::change;
use crate::terminal;
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
    let reconnect = how.reconnect.map_or(RECONNECT, |Span(millis)| Duration::from_millis(millis));
    let request = ExecRequest { argv, if_running, ..asked(how) };
    if detach {
        let command = context.client.exec_detached(&name, &request).await?;
        context.screen.answer(&command, |command| format!("{}\n", command.id))?;
        return Ok(ExitCode::SUCCESS);
    }
    relay(context, &name, request, Signals::listen()?, reconnect).await
}

pub(super) async fn shell(context: &Context, args: ShellArgs) -> Result<ExitCode, Failure> {
    let ShellArgs { env, cwd, user, name } = args;
    let tty = terminal::is_interactive();
    let how = ExecOptions { interactive: true, tty, env, cwd, user, ..Default::default() };
    let argv = ["/bin/sh", "-c", LOGIN_SHELL].map(str::to_owned).to_vec();
    relay(context, &name, ExecRequest { argv, ..asked(how) }, Signals::listen()?, RECONNECT).await
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
    let request = CreateSandbox { name: args.name, start: Some(true), ..CreateSandbox::default() }
        .with_settings(settings);
    let opened = patiently(context.client.create(&request, None)).await?;
    let sandbox = opened.sandbox;
    tell_session(&sandbox.name, opened.session.as_ref());
    let name = sandbox.name.clone();
    let how = ExecOptions { interactive: args.interactive, tty: args.tty, ..Default::default() };
    let request = ExecRequest { argv: args.argv, ..asked(how) };
    let ended = match failed_hook(&name, opened.session.as_ref()) {
        Some(failure) => Err(failure),
        None => relay(context, &name, request, signals, RECONNECT).await,
    };
    if args.rm {
        context.client.delete(&name, None).await?;
    } else if !context.screen.json {
        note(&left_behind(&sandbox));
    }
    ended
}

/// What `keep run` leaves behind without `--rm`.
fn left_behind(sandbox: &Sandbox) -> String {
    let Sandbox { name, idle_timeout_ms, expires_at, persistent, .. } = sandbox;
    let stops = match idle_timeout_ms {
        Some(millis) => format!("; it stops after {} without use", when::exact(*millis)),
        None => String::new(),
    };
    let files = match (idle_timeout_ms, persistent) {
        (Some(_), true) => ", keeping its files",
        (Some(_), false) => ", losing its files",
        (None, _) => "",
    };
    format!(
        "sandbox {name} runs on{stops}{files}, and is deleted {}\n\
         `keep exec {name} -- ...` runs more in it, `keep rm {name}` deletes it; --rm does so at once",
        when::ago(expires_at)
    )
}

fn asked(how: ExecOptions) -> ExecRequest {
    let ExecOptions { interactive, tty, env, cwd, user, timeout, mut inject, inject_file, .. } =
        how;
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

/// The exit code of a command that is over. Unless it just exited, why it ended goes to stderr.
pub(super) fn ended(
    screen: &Screen,
    code: Option<i32>,
    command: &Command,
) -> Result<ExitCode, Failure> {
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
        CommandEnd::HostDiskFull => {
            "host_disk_full: killed because the disk of the host is full up to \
             its reserve, and the sandbox was filling it"
                .to_owned()
        }
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

pub(super) fn show(screen: &Screen, output: &Output) -> Result<(), Failure> {
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

pub(super) async fn commands(context: &Context, args: &PsArgs) -> Result<(), Failure> {
    let limit = usize::try_from(args.limit).ok();
    let client = &context.client;
    let Some(name) = &args.name else { return running_everywhere(context, limit).await };
    let all = match args.all {
        true => client.commands(name, Some(args.limit.clamp(1, 1000))).collect(limit).await?,
        false => client.running_commands(name).collect(limit).await?,
    };
    context.screen.answer(&all, |all| {
        let mut table =
            Table::new(&["COMMAND", "END", ">EXIT", "STARTED", ">TOOK", ">OUTPUT", "ARGV"]);
        all.iter().for_each(|command| table.row(cells(command)));
        let mut text = context.screen.table(&table);
        if all.is_empty() && !args.all {
            text.push_str(&format!("nothing runs; `keep ps {name} -a` shows ended commands\n"));
        }
        text
    })
}

/// The commands that run in any sandbox of the project.
async fn running_everywhere(context: &Context, limit: Option<usize>) -> Result<(), Failure> {
    let awake = ListSandboxes { state: Some(State::Running), ..ListSandboxes::default() };
    let mut all: Vec<(String, Command)> = Vec::new();
    for sandbox in context.client.sandboxes(&awake).collect(None).await? {
        let found = context.client.running_commands(&sandbox.name).collect(limit).await;
        match found {
            Ok(found) => all.extend(found.into_iter().map(|one| (sandbox.name.clone(), one))),
            // It was deleted meanwhile.
            Err(error) if error.code() == Some("sandbox_not_found") => {}
            Err(error) => return Err(error.into()),
        }
    }
    all.sort_by(|one, other| other.1.started_at.cmp(&one.1.started_at));
    all.truncate(limit.unwrap_or(usize::MAX));
    let commands: Vec<&Command> = all.iter().map(|(_, command)| command).collect();
    context.screen.answer(&commands, |_| {
        let mut table = Table::new(&["COMMAND", "SANDBOX", "STARTED", ">TOOK", ">OUTPUT", "ARGV"]);
        for (name, command) in &all {
            let [id, _, _, started, took, output, argv] = cells(command);
            table.row(vec![id, name.clone(), started, took, output, argv]);
        }
        context.screen.table(&table)
    })
}

fn cells(command: &Command) -> [String; 7] {
    [
        command.id.clone(),
        command.end.map_or_else(|| word(command.state), word),
        or_dash(command.exit_code.map(|code| code.to_string())),
        when::ago(&command.started_at),
        when::between(&command.started_at, command.ended_at.as_deref()),
        super::bytes(command.output_bytes),
        command.argv.join(" "),
    ]
}

pub(super) async fn logs(context: &Context, args: LogsArgs) -> Result<(), Failure> {
    let LogsArgs { name, command, last: _, follow, tail, since, timestamps } = args;
    let id = match &command {
        Some(id) => resolve::command(context, &name, id).await?,
        None => newest(context, &name).await?.id,
    };
    let query = LogQuery { follow, tail, since, times: timestamps, offset: 0 };
    let log = context.client.log(&name, &id, &query).await?;
    print_all(context, log, timestamps).await
}

/// Prints what a command wrote.
pub(super) async fn print_log(
    context: &Context,
    name: &str,
    command: &str,
    follow: bool,
) -> Result<(), Failure> {
    print_all(context, context.client.logs(name, command, follow).await?, false).await
}

async fn print_all(context: &Context, mut log: Running, timestamps: bool) -> Result<(), Failure> {
    let (mut out, mut err) = (Stamped::default(), Stamped::default());
    while let Some(output) = log.next().await? {
        let at = log.printed_at().filter(|_| timestamps);
        let output = match (output, at) {
            (output, Some(at)) if context.screen.json => {
                context.screen.json_line(&event(&output).printed_at(Some(at.to_owned())))?;
                continue;
            }
            (Output::Stdout(bytes), Some(at)) => Output::Stdout(out.lines(&bytes, at)),
            (Output::Stderr(bytes), Some(at)) => Output::Stderr(err.lines(&bytes, at)),
            (output, _) => output,
        };
        show(&context.screen, &output)?;
    }
    Ok(())
}

/// Puts the time before each line of a stream that comes in pieces.
#[derive(Debug, Default)]
struct Stamped {
    in_line: bool,
}

impl Stamped {
    fn lines(&mut self, bytes: &[u8], at: &str) -> bytes::Bytes {
        let mut stamped = Vec::with_capacity(bytes.len() + at.len() + 1);
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            if !self.in_line {
                stamped.extend_from_slice(at.as_bytes());
                stamped.push(b' ');
            }
            stamped.extend_from_slice(line);
            self.in_line = !line.ends_with(b"\n");
        }
        stamped.into()
    }
}

async fn newest(context: &Context, name: &str) -> Result<Command, Failure> {
    let mut newest = context.client.commands(name, Some(1)).collect(Some(1)).await?;
    newest.pop().ok_or_else(|| {
        Failure::here(format!("`{name}` has no commands yet"))
            .with_hint(format!("`keep exec {name} -- ARGV` runs one"))
    })
}

pub(super) async fn kill(context: &Context, args: &KillArgs) -> Result<(), Failure> {
    let KillArgs { name, command, last: _, signal } = args;
    let command = match command {
        Some(command) => resolve::command(context, name, command).await?,
        None => {
            let mut running = context.client.running_commands(name).collect(Some(1)).await?;
            let newest = running.pop().ok_or_else(|| {
                Failure::here(format!("no command runs in `{name}`"))
                    .with_hint(format!("`keep ps {name} -a` shows those that ended"))
            });
            newest?.id
        }
    };
    context.client.signal(name, &command, Signal::Number(*signal)).await?;
    context.screen.answer(&serde_json::json!({}), |_| format!("{command}  sent signal {signal}\n"))
}

#[cfg(test)]
mod tests {
    use super::Stamped;

    #[test]
    fn each_line_has_one_time_however_it_comes() {
        let mut stamped = Stamped::default();
        let mut text = Vec::new();
        for (piece, at) in [("a\nb", "1"), ("c", "2"), ("d\n", "3"), ("\ne\n", "4")] {
            text.extend_from_slice(&stamped.lines(piece.as_bytes(), at));
        }
        assert_eq!(String::from_utf8(text).unwrap(), "1 a\n1 bcd\n4 \n4 e\n");
    }
}
