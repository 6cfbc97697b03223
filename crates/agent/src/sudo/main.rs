//! `keep-sudo`: the `sudo` of images that come without one.
//!
//! It lies in a sandbox's image as `/usr/bin/sudo`, belongs to root and has the setuid bit, so its
//! caller controls everything it is given: arguments, environment, descriptors, umask, working
//! directory. It is a program of its own and not the agent under another name: `argv[0]` is the
//! caller's to choose, and an agent that starts as root for anyone would be anyone's root.
//!
//! What it does, in order:
//!
//! 1. [`policy`] says whether the *real* user may: root may, and the users that the policy file
//!    names. No passwords, no groups, no host names; a user made later in the sandbox may not.
//! 2. Descriptors other than the three standard ones are closed, the umask gets at least 022.
//! 3. [`environment`] is kept, as the machines people know do it (`!env_reset`), but for what makes
//!    programs load or run something else; `HOME`, `USER` and `LOGNAME` are the target's.
//! 4. Groups, group and user are switched for good, then the command *replaces* this program: its
//!    exit code, signals and terminal need no process in between. No shell sees the command, unless
//!    `-i` or `-s` asks for one.
//!
//! There is no log: a sandbox's commands are on record outside it.

#[path = "../accounts.rs"]
mod accounts;
mod environment;
mod options;
mod policy;
mod sys;

use std::ffi::{OsStr, OsString};
use std::io::{self, Write as _};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};

use rustix::fs::Mode;
use rustix::thread::{Gid, Uid};

use self::options::{Ask, How, Run};
use self::policy::{Caller, Target};

fn main() -> ExitCode {
    match act() {
        Ok(code) => code,
        Err(message) => {
            // Standard error may be closed, or have no reader.
            let _ = writeln!(io::stderr(), "sudo: {message}");
            ExitCode::FAILURE
        }
    }
}

fn act() -> Result<ExitCode, String> {
    let ask = options::parse(std::env::args_os().skip(1))?;
    let real = rustix::process::getuid().as_raw();
    match &ask {
        Ask::Help => return say(options::USAGE),
        Ask::Version => return say(concat!("keep-sudo ", env!("CARGO_PKG_VERSION"))),
        Ask::Forget => return Ok(ExitCode::SUCCESS),
        Ask::Validate | Ask::List | Ask::Run(_) => {}
    }
    if !rustix::process::geteuid().is_root() {
        return Err("it must belong to root and have the setuid bit, and whoever starts it must \
                    not have given up new privileges"
            .to_owned());
    }
    let passwd = accounts::read("/etc/passwd");
    let caller = Caller::find(real, &passwd)?;
    policy::check(&caller, &policy::read_list(policy::FILE)?)?;
    match ask {
        Ask::List => {
            let host = rustix::system::uname();
            let host = host.nodename().to_string_lossy();
            let name = &caller.name;
            say(&format!(
                "User {name} may run the following commands on {host}:\n    (ALL : ALL) NOPASSWD: ALL"
            ))
        }
        Ask::Run(run) => {
            let group = accounts::read("/etc/group");
            let target = Target::find(&run, &caller, &passwd, &group)?;
            Err(become_command(&run, &caller, &target))
        }
        Ask::Help | Ask::Version | Ask::Forget | Ask::Validate => Ok(ExitCode::SUCCESS),
    }
}

fn say(text: &str) -> Result<ExitCode, String> {
    writeln!(io::stdout(), "{text}").map_err(|error| error.to_string())?;
    Ok(ExitCode::SUCCESS)
}

/// Turns into the command. Returns only when that fails, with the reason.
fn become_command(run: &Run, caller: &Caller, target: &Target) -> String {
    let (program, argv) = words(run, caller, target);
    let env = environment::build(std::env::vars_os(), run, caller, target, &argv);
    if let Err(error) = switch(target) {
        return format!("cannot become {}: {error}", target.account.name);
    }
    if run.how == How::Login
        && let Err(error) = std::env::set_current_dir(&target.account.home)
    {
        let _ = writeln!(io::stderr(), "sudo: cannot enter {}: {error}", target.account.home);
    }
    let mut command = Command::new(&program);
    if let [name, rest @ ..] = argv.as_slice() {
        command.arg0(name).args(rest);
    }
    let failed = command.env_clear().envs(env).exec();
    let program = program.display();
    match failed.kind() {
        io::ErrorKind::NotFound => format!("{program}: command not found"),
        _ => format!("unable to execute {program}: {failed}"),
    }
}

/// The program to execute, and its arguments with its own name in front.
fn words(run: &Run, caller: &Caller, target: &Target) -> (OsString, Vec<OsString>) {
    match run.how {
        How::Command => (run.argv.first().cloned().unwrap_or_default(), run.argv.clone()),
        How::Shell => {
            let given = std::env::var_os("SHELL").filter(|shell| !shell.is_empty());
            let shell = given.unwrap_or_else(|| OsString::from(&caller.shell));
            (shell.clone(), through_shell(shell, &run.argv))
        }
        How::Login => {
            let shell = &target.account.shell;
            // The dash is how a shell knows.
            let name = format!("-{}", shell.rsplit('/').next().unwrap_or(shell));
            (OsString::from(shell), through_shell(OsString::from(name), &run.argv))
        }
    }
}

/// A shell's arguments: none, or one line that means just these words.
fn through_shell(name: OsString, words: &[OsString]) -> Vec<OsString> {
    let mut argv = vec![name];
    if !words.is_empty() {
        let words: Vec<Vec<u8>> = words.iter().map(|word| quoted(word)).collect();
        argv.extend([OsString::from("-c"), OsString::from_vec(words.join(&b' '))]);
    }
    argv
}

/// A word as a shell reads it back: everything that could mean something is escaped, but for `$`, which
/// people use to speak of the target's variables.
fn quoted(word: &OsStr) -> Vec<u8> {
    let mut quoted = Vec::with_capacity(word.len());
    for byte in word.as_bytes() {
        if *byte == b'\n' {
            // An escaped newline would be no character at all.
            quoted.extend_from_slice(b"'\n'");
            continue;
        }
        if byte.is_ascii() && !byte.is_ascii_alphanumeric() && !b"_-$".contains(byte) {
            quoted.push(b'\\');
        }
        quoted.push(*byte);
    }
    if quoted.is_empty() { b"''".to_vec() } else { quoted }
}

/// Becomes the target for good: all three ids, so that there is no way back.
fn switch(target: &Target) -> io::Result<()> {
    sys::close_all_but_standard()?;
    let before = rustix::process::umask(Mode::from_raw_mode(0o022));
    rustix::process::umask(before | Mode::from_raw_mode(0o022));
    let groups: Vec<Gid> = target.groups.iter().map(|gid| Gid::from_raw(*gid)).collect();
    rustix::thread::set_thread_groups(&groups)?;
    let gid = Gid::from_raw(target.gid);
    rustix::thread::set_thread_res_gid(gid, gid, gid)?;
    let uid = Uid::from_raw(target.account.uid);
    rustix::thread::set_thread_res_uid(uid, uid, uid)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::{quoted, through_shell};

    #[test]
    fn a_shell_gets_back_the_words_it_was_meant_to() {
        for (word, line) in [
            ("plain-word_1", "plain-word_1"),
            ("a b", "a\\ b"),
            ("x;rm -rf /", "x\\;rm\\ -rf\\ \\/"),
            ("$HOME", "$HOME"),
            ("", "''"),
            ("a\nb", "a'\n'b"),
            ("é", "é"),
        ] {
            assert_eq!(quoted(OsStr::new(word)), line.as_bytes(), "{word}");
        }
        let argv = through_shell("-sh".into(), &["a b".into(), "c".into()]);
        assert_eq!(argv, ["-sh", "-c", "a\\ b c"]);
        assert_eq!(through_shell("-sh".into(), &[]), ["-sh"]);
    }
}
