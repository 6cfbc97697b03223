//! Turns a [`Spawn`] into a running [`Command`].

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, FdFlags};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::pty::OpenptFlags;
use sandkeep_proto::ask::PROGRAM_DIR;
use sandkeep_proto::link::{Failure, Spawn, TermSize};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::serve::command::launch::{Plan, launch, watch};
use crate::serve::command::secret_files::SecretFiles;
use crate::serve::command::user::{Identity, lookup};
use crate::serve::command::{Command, Ends, winsize};
use crate::serve::error::{RequestError, kind_of, say};
use crate::serve::link::outbound::Outbound;
use crate::serve::{Agent, COMMANDS, view_refresh};

/// Where programs are looked for when the command does not say.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// How long a command's id may be, so that a list of all of them fits a frame.
const ID_LIMIT: usize = 128;

/// Starts a process with its output going to `stream` of `out`.
pub(crate) fn start(
    agent: &Rc<Agent>,
    out: &Rc<Outbound>,
    stream: u32,
    spawn: Spawn,
) -> Result<Rc<Command>, RequestError> {
    if spawn.command.is_empty() || spawn.command.len() > ID_LIMIT {
        let message = format!("a command's id has 1 to {ID_LIMIT} bytes");
        return Err(RequestError::new(Failure::Invalid, message));
    }
    if agent.commands.borrow().contains_key(&spawn.command) {
        let message = format!("a command `{}` was started already", spawn.command);
        return Err(RequestError::new(Failure::Exists, message));
    }
    if agent.commands.borrow().len() >= COMMANDS {
        let message = format!("{COMMANDS} commands are known already; forget some");
        return Err(RequestError::new(Failure::Exhausted, message));
    }
    let identity = lookup(spawn.user.as_deref())?;
    let mut env = spawn.env;
    if let Some(from) = &spawn.sudo_from {
        on_behalf(&mut env, &lookup(Some(from))?, &spawn.argv);
    }
    let mut env = environment(env, &identity);
    if agent.questions.is_open() {
        add_to_path(&mut env);
    }
    let secret_files = SecretFiles::write(&spawn.secret_files, &identity)?;
    let (mut ends, theirs) = match spawn.tty {
        Some(size) => terminal(size, &identity),
        None => pipes(spawn.stdin),
    }
    .map_err(|error| {
        let error = std::io::Error::from(error);
        let message = format!("could not make the command's streams: {}", say(&error));
        RequestError::new(kind_of(&error), message)
    })?;
    let oom_kills = agent.oom_kills();
    let [stdin, stdout, stderr] = &theirs;
    let pid = launch(&Plan {
        argv: &spawn.argv,
        env: &env,
        secret_env: &spawn.secret_env,
        identity: &identity,
        cwd: spawn.cwd.as_deref(),
        stdio: [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()],
        tty: spawn.tty.is_some(),
        files: agent.files,
        cpus: agent.view.as_ref().and_then(|view| view.borrow().affinity()),
    })?;
    view_refresh::command_started(agent);
    if spawn.tty.is_some() {
        let [stdin, ..] = theirs;
        ends.held = Some(stdin);
    }
    let number = agent.started.get();
    agent.started.set(number + 1);
    let command = Command::new(spawn.command, pid, number, oom_kills, &ends, spawn.tty.is_some());
    command.hold(secret_files);
    command.begin(out, stream);
    agent.commands.borrow_mut().insert(command.id.clone(), Rc::clone(&command));
    agent.running.borrow_mut().insert(pid, Rc::clone(&command));
    tokio::task::spawn_local(Rc::clone(&command).run(ends, Rc::clone(&agent.scratch)));
    Ok(command)
}

/// What `sudo` says to the program it runs about who asked and who it now is.
fn on_behalf(env: &mut BTreeMap<String, String>, from: &Identity, argv: &[String]) {
    // Filled in for the new user with the rest: the asking user's home is not the one to write to.
    for own in ["HOME", "USER", "LOGNAME"] {
        env.remove(own);
    }
    env.extend([
        ("SUDO_USER".to_owned(), name_of(from)),
        ("SUDO_UID".to_owned(), from.uid.to_string()),
        ("SUDO_GID".to_owned(), from.gid.to_string()),
        ("SUDO_COMMAND".to_owned(), truncated(argv.join(" "))),
    ]);
}

/// No more than `sudo` itself sets: a variable that is too long would keep the program from
/// starting.
fn truncated(mut text: String) -> String {
    text.truncate(text.floor_char_boundary(4096));
    text
}

fn name_of(identity: &Identity) -> String {
    identity.name.clone().unwrap_or_else(|| identity.uid.to_string())
}

/// The command's environment, with what every program expects filled in.
fn environment(mut env: BTreeMap<String, String>, identity: &Identity) -> Vec<(String, String)> {
    let name = name_of(identity);
    for (key, value) in [
        ("HOME", identity.home.as_str()),
        ("USER", &name),
        ("LOGNAME", &name),
        ("SHELL", &identity.shell),
        ("PATH", PATH),
    ] {
        env.entry(key.to_owned()).or_insert_with(|| value.to_owned());
    }
    env.into_iter().collect()
}

type Streams = (Ends, [OwnedFd; 3]);

/// Lets a command find `keep ask`, after everything else.
fn add_to_path(env: &mut [(String, String)]) {
    if let Some((_, path)) = env.iter_mut().find(|(key, _)| key == "PATH") {
        path.push(':');
        path.push_str(PROGRAM_DIR);
    }
}

fn pipes(stdin: bool) -> rustix::io::Result<Streams> {
    let (stdin_ours, stdin_theirs) = if stdin {
        let (read, write) = pipe()?;
        (Some(ours(write, Interest::WRITABLE)?), read)
    } else {
        (None, nothing()?)
    };
    let (out_ours, out_theirs) = pipe()?;
    let (err_ours, err_theirs) = pipe()?;
    let ends = Ends {
        stdin: stdin_ours,
        out: Some(ours(out_ours, Interest::READABLE)?),
        err: Some(ours(err_ours, Interest::READABLE)?),
        held: None,
    };
    Ok((ends, [stdin_theirs, out_theirs, err_theirs]))
}

fn terminal(size: TermSize, identity: &Identity) -> rustix::io::Result<Streams> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let main = above_stdio(rustix::pty::openpt(flags)?)?;
    rustix::pty::unlockpt(&main)?;
    let side = above_stdio(rustix::pty::ioctl_tiocgptpeer(&main, flags)?)?;
    rustix::termios::tcsetwinsize(&main, winsize(size))?;
    // So that the user can open its own terminal by name. Not vital.
    let _ = rustix::fs::fchown(&side, Some(rustix::fs::Uid::from_raw(identity.uid)), None);
    let stdout = rustix::io::fcntl_dupfd_cloexec(&side, 3)?;
    let stderr = rustix::io::fcntl_dupfd_cloexec(&side, 3)?;
    let main = ours(main, Interest::READABLE | Interest::WRITABLE)?;
    let ends = Ends { stdin: Some(Rc::clone(&main)), out: Some(main), err: None, held: None };
    Ok((ends, [side, stdout, stderr]))
}

fn pipe() -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
    Ok((above_stdio(read)?, above_stdio(write)?))
}

/// Standard input for a command that gets none: `/dev/null`, or a pipe without a writer.
fn nothing() -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    match rustix::fs::open("/dev/null", flags, Mode::empty()) {
        Ok(null) => above_stdio(null),
        Err(_) => pipe().map(|(read, _)| read),
    }
}

/// Descriptors 0 to 2 of a child are made from these, so none may be one of them.
fn above_stdio(fd: OwnedFd) -> rustix::io::Result<OwnedFd> {
    if std::os::fd::AsRawFd::as_raw_fd(&fd) > 2 {
        return Ok(fd);
    }
    rustix::io::fcntl_dupfd_cloexec(&fd, 3)
}

/// Puts our end of a stream into the runtime's care.
fn ours(fd: OwnedFd, interest: Interest) -> rustix::io::Result<Rc<AsyncFd<OwnedFd>>> {
    rustix::io::fcntl_setfd(&fd, FdFlags::CLOEXEC)?;
    let flags = rustix::fs::fcntl_getfl(&fd)?;
    rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?;
    watch(fd, interest)
        .map(Rc::new)
        .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::NOMEM))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::{PATH, environment, on_behalf};
    use crate::serve::command::user::Identity;

    #[test]
    fn the_environment_is_completed_and_not_overruled() {
        let identity = Identity {
            uid: 7,
            gid: 7,
            groups: vec![7],
            name: None,
            home: "/h".to_owned(),
            shell: "/bin/sh".to_owned(),
        };
        let asked = BTreeMap::from([("HOME".to_owned(), "/x".to_owned())]);
        let env: BTreeMap<_, _> = environment(asked, &identity).into_iter().collect();
        assert_eq!(env["HOME"], "/x");
        assert_eq!(env["USER"], "7");
        assert_eq!(env["PATH"], PATH);
        assert_eq!(env.len(), 5);
    }

    #[test]
    fn on_behalf_of_another_the_environment_is_kept_but_for_who_one_is() {
        let ada = Identity {
            uid: 1000,
            gid: 1001,
            groups: vec![1001],
            name: Some("ada".to_owned()),
            home: "/home/ada".to_owned(),
            shell: "/bin/sh".to_owned(),
        };
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        let mut env = BTreeMap::from([
            pair("HOME", "/home/ada"),
            pair("USER", "ada"),
            pair("PATH", "/own/bin"),
            pair("COLOUR", "blue"),
        ]);
        on_behalf(&mut env, &ada, &["id".to_owned(), "-u".to_owned()]);
        assert_eq!((env["SUDO_USER"].as_str(), env["SUDO_COMMAND"].as_str()), ("ada", "id -u"));
        assert_eq!((env["SUDO_UID"].as_str(), env["SUDO_GID"].as_str()), ("1000", "1001"));
        assert_eq!((env["PATH"].as_str(), env["COLOUR"].as_str()), ("/own/bin", "blue"));
        assert!(!env.contains_key("HOME") && !env.contains_key("USER"));
    }
}
