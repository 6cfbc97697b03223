//! The arguments, parsed as `sudo` does.
//!
//! Options come first and may be bundled (`-nE`, `-uroot`); then `NAME=value` for the environment; then
//! the command, which ends all reading. What is not known is refused: an option that was overlooked
//! could mean "do not".

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};

pub(super) const USAGE: &str = "\
usage: sudo [-EHnS] [-u user] [-g group] [VAR=value]... [--] command [argument]...
       sudo [-i | -s] [-EHnS] [-u user] [-g group] [VAR=value]... [command [argument]...]
       sudo -l | -v | -k | -K | -V | -h";

/// What the caller wants.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Ask {
    Help,
    Version,
    /// Forget the password that was never asked for.
    Forget,
    /// Say by the exit code whether the caller may.
    Validate,
    /// Say what the caller may.
    List,
    Run(Run),
}

/// A command to run.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) user: Option<String>,
    pub(super) group: Option<String>,
    pub(super) how: How,
    pub(super) assignments: Vec<(OsString, OsString)>,
    /// Empty only where a shell is started.
    pub(super) argv: Vec<OsString>,
}

/// What runs it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum How {
    /// Nothing: it is executed.
    #[default]
    Command,
    /// The caller's shell.
    Shell,
    /// The target's login shell, in the target's home.
    Login,
}

/// The options that are no command's part.
#[derive(Default)]
struct SeenOptions {
    run: Run,
    instead: Option<Ask>,
    forget: bool,
}

/// Reads the arguments behind the program's name.
///
/// # Errors
///
/// Returns what is wrong with them.
pub(super) fn parse(args: impl Iterator<Item = OsString>) -> Result<Ask, String> {
    let mut args = args.peekable();
    let mut seen = SeenOptions::default();
    while let Some(arg) = args.next_if(|arg| arg.as_bytes().starts_with(b"-") && arg.len() > 1) {
        if arg == "--" {
            break;
        }
        match arg.as_bytes().strip_prefix(b"--") {
            Some(long) => seen.long(long, &mut args)?,
            None => seen.short(&arg.as_bytes()[1..], &mut args)?,
        }
    }
    while let Some(assignment) = args.peek().and_then(|arg| assignment(arg)) {
        seen.run.assignments.push(assignment);
        args.next();
    }
    seen.run.argv = args.collect();
    seen.ask()
}

/// `NAME=value`, with a name that could be one.
fn assignment(arg: &OsStr) -> Option<(OsString, OsString)> {
    let bytes = arg.as_bytes();
    let at = bytes.iter().position(|byte| *byte == b'=')?;
    let name = &bytes[..at];
    let fine = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    if name.is_empty() || name[0].is_ascii_digit() || !name.iter().all(fine) {
        return None;
    }
    let value = OsString::from_vec(bytes[at + 1..].to_vec());
    Some((OsString::from_vec(name.to_vec()), value))
}

impl SeenOptions {
    fn short(
        &mut self,
        letters: &[u8],
        args: &mut impl Iterator<Item = OsString>,
    ) -> Result<(), String> {
        for (at, letter) in letters.iter().enumerate() {
            let name = char::from(*letter);
            if !matches!(name, 'u' | 'g' | 'p') {
                self.flag(name).ok_or_else(|| unknown(&format!("-{name}")))?;
                continue;
            }
            // The rest of the bundle is the value, else the next argument.
            let value = match &letters[at + 1..] {
                [] => args.next().ok_or_else(|| format!("-{name} needs a value\n{USAGE}"))?,
                rest => OsString::from_vec(rest.to_vec()),
            };
            return self.value(name, value);
        }
        Ok(())
    }

    fn long(
        &mut self,
        option: &[u8],
        args: &mut impl Iterator<Item = OsString>,
    ) -> Result<(), String> {
        let text = String::from_utf8_lossy(option);
        let (name, value) = match option.iter().position(|byte| *byte == b'=') {
            Some(at) => (&option[..at], Some(OsString::from_vec(option[at + 1..].to_vec()))),
            None => (option, None),
        };
        let letter = match name {
            b"user" => 'u',
            b"group" => 'g',
            b"prompt" => 'p',
            // With names or without: all of the environment is kept anyway.
            b"preserve-env" => return Ok(()),
            b"set-home" => 'H',
            b"non-interactive" => 'n',
            b"stdin" => 'S',
            b"login" => 'i',
            b"shell" => 's',
            b"reset-timestamp" => 'k',
            b"remove-timestamp" => 'K',
            b"validate" => 'v',
            b"list" => 'l',
            b"version" => 'V',
            b"help" => 'h',
            _ => return Err(unknown(&format!("--{text}"))),
        };
        if matches!(letter, 'u' | 'g' | 'p') {
            let value = value.or_else(|| args.next());
            let value = value.ok_or_else(|| format!("--{text} needs a value\n{USAGE}"))?;
            return self.value(letter, value);
        }
        if value.is_some() {
            return Err(format!("--{text}: it takes no value\n{USAGE}"));
        }
        self.flag(letter).ok_or_else(|| unknown(&format!("--{text}")))
    }

    fn flag(&mut self, letter: char) -> Option<()> {
        match letter {
            // No password is ever asked for, the environment is kept and HOME always set.
            'E' | 'H' | 'n' | 'S' => {}
            'i' => self.run.how = How::Login,
            's' => self.run.how = How::Shell,
            'k' => self.forget = true,
            'K' => self.instead = Some(Ask::Forget),
            'v' => self.instead = Some(Ask::Validate),
            'l' => self.instead = Some(Ask::List),
            'V' => self.instead = Some(Ask::Version),
            'h' => self.instead = Some(Ask::Help),
            _ => return None,
        }
        Some(())
    }

    fn value(&mut self, letter: char, value: OsString) -> Result<(), String> {
        let value = value.into_string().map_err(|value| {
            format!("`{}` is no name of a user or group", value.to_string_lossy())
        })?;
        match letter {
            'u' => self.run.user = Some(value),
            'g' => self.run.group = Some(value),
            // The prompt of the question that is never asked.
            _ => {}
        }
        Ok(())
    }

    fn ask(self) -> Result<Ask, String> {
        let Self { run, instead, forget } = self;
        let idle = run.argv.is_empty() && run.assignments.is_empty();
        match instead {
            // `sudo -l command` asks whether one may, and the answer is the same for all.
            Some(Ask::List) => Ok(Ask::List),
            Some(ask) if idle => Ok(ask),
            Some(_) => Err(format!("that option takes no command\n{USAGE}")),
            None if run.argv.is_empty() && run.how == How::Command => {
                if forget && idle {
                    Ok(Ask::Forget)
                } else {
                    Err(format!("what shall run?\n{USAGE}"))
                }
            }
            None => Ok(Ask::Run(run)),
        }
    }
}

fn unknown(option: &str) -> String {
    format!("unknown option {option}\n{USAGE}")
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::os::unix::ffi::OsStringExt as _;

    use proptest::prelude::{ProptestConfig, any, prop, proptest};

    use super::{Ask, How, Run, parse};

    fn read(args: &[&str]) -> Result<Ask, String> {
        parse(args.iter().map(OsString::from))
    }

    fn run(args: &[&str]) -> Run {
        match read(args) {
            Ok(Ask::Run(run)) => run,
            other => panic!("{args:?} gave {other:?}"),
        }
    }

    #[test]
    fn a_command_begins_where_options_end() {
        assert_eq!(run(&["id", "-u", "--help", "A=b"]).argv, ["id", "-u", "--help", "A=b"]);
        assert_eq!(run(&["-n", "-E", "-H", "id"]).argv, ["id"]);
        assert_eq!(run(&["-nEH", "--", "-odd"]).argv, ["-odd"]);
        assert_eq!(run(&["--", "A=b", "id"]).argv, ["id"], "as the original reads it");
        assert_eq!(run(&["-"]).argv, ["-"]);
        assert_eq!(run(&["-k", "id"]).argv, ["id"]);
        assert_eq!(run(&["--preserve-env=A,B", "id"]).argv, ["id"]);
        assert_eq!(run(&["-p", "really?", "-S", "id"]).argv, ["id"]);
    }

    #[test]
    fn users_and_groups_are_given_in_every_way_people_write_them() {
        for args in [
            &["-u", "ada", "id"][..],
            &["-uada", "id"],
            &["-nu", "ada", "id"],
            &["--user=ada", "id"],
            &["--user", "ada", "id"],
        ] {
            assert_eq!(run(args).user.as_deref(), Some("ada"), "{args:?}");
        }
        assert_eq!(run(&["-u", "#7", "-g", "#8", "id"]).group.as_deref(), Some("#8"));
        assert_eq!(run(&["-u", "-n", "id"]).user.as_deref(), Some("-n"), "a value is a value");
    }

    #[test]
    fn assignments_come_before_the_command() {
        let run = run(&["A=1", "B=", "_c=x=y", "env", "D=2"]);
        let pairs = [("A", "1"), ("B", ""), ("_c", "x=y")].map(|(a, b)| (a.into(), b.into()));
        assert_eq!(run.assignments, pairs);
        assert_eq!(run.argv, ["env", "D=2"]);
        for odd in ["=x", "1A=x", "a-b=x", "a/b=x", "a b=x"] {
            assert_eq!(self::run(&[odd]).argv, [odd]);
        }
    }

    #[test]
    fn shells_need_no_command() {
        assert_eq!(run(&["-i"]).how, How::Login);
        assert_eq!(run(&["-s", "id"]).how, How::Shell);
        assert_eq!(run(&["--login", "-u", "ada"]).how, How::Login);
    }

    #[test]
    fn what_needs_no_command_runs_none() {
        for (option, ask) in [
            ("-k", Ask::Forget),
            ("-K", Ask::Forget),
            ("-v", Ask::Validate),
            ("-l", Ask::List),
            ("-V", Ask::Version),
            ("--help", Ask::Help),
        ] {
            assert_eq!(read(&[option]), Ok(ask), "{option}");
        }
        for wrong in [
            &[][..],
            &["-u"],
            &["-x", "id"],
            &["--nope", "id"],
            &["-v", "id"],
            &["A=b"],
            &["-n"],
            &["--login=x"],
        ] {
            assert!(read(wrong).is_err(), "{wrong:?}");
        }
        let bytes = [OsString::from("-u"), OsString::from_vec(vec![0xff]), OsString::from("id")];
        assert!(parse(bytes.into_iter()).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn any_bytes_are_survived(args in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..6), 0..6)) {
            let _ = parse(args.into_iter().map(OsString::from_vec));
        }

        #[test]
        fn what_follows_two_dashes_is_the_command(word in "[^=]{1,8}", rest in prop::collection::vec(".{0,6}", 0..4)) {
            let mut argv = vec![OsString::from(word)];
            argv.extend(rest.iter().map(OsString::from));
            let args = [OsString::from("--")].into_iter().chain(argv.clone());
            assert_eq!(parse(args), Ok(Ask::Run(Run { argv, ..Run::default() })));
        }
    }
}
