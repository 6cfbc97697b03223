//! The environment of the command.
//!
//! It is kept, as `Defaults !env_reset, always_set_home` would have it: people set `PATH` and
//! variables of their own for `sudo apt-get …` and expect them there. What goes is what makes a program
//! run or load something the caller did not name. A user who may use this program is as good as
//! root anyway; the list is against accidents, and is the original's.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};

use crate::options::{How, Run};
use crate::policy::{Caller, Target};

/// Never kept, by name. A `*` at the end stands for any ending.
const DROPPED: &[&str] = &[
    // What the dynamic linker and the C library obey.
    "LD_*",
    "_RLD*",
    "SHLIB_PATH",
    "LIBPATH",
    "GCONV_PATH",
    "GETCONF_DIR",
    "LOCALDOMAIN",
    "RES_OPTIONS",
    "HOSTALIASES",
    "NLSPATH",
    "PATH_LOCALE",
    // Shells.
    "IFS",
    "CDPATH",
    "ENV",
    "BASH_ENV",
    "BASH_FUNC_*",
    "BASHOPTS",
    "SHELLOPTS",
    "PS4",
    "GLOBIGNORE",
    "FPATH",
    "NULLCMD",
    "READNULLCMD",
    "ZDOTDIR",
    "TMPPREFIX",
    // Terminals.
    "TERMINFO",
    "TERMINFO_DIRS",
    "TERMPATH",
    "TERMCAP",
    // Interpreters.
    "JAVA_TOOL_OPTIONS",
    "PERLIO_DEBUG",
    "PERLLIB",
    "PERL5LIB",
    "PERL5OPT",
    "PERL5DB",
    "PYTHONHOME",
    "PYTHONPATH",
    "PYTHONINSPECT",
    "PYTHONUSERBASE",
    "RUBYLIB",
    "RUBYOPT",
];

/// All that a login shell is given of it.
const FOR_LOGIN: &[&str] =
    &["PATH", "TERM", "COLORTERM", "LS_COLORS", "LANG", "LANGUAGE", "LC_*", "TZ", "DISPLAY"];

/// Where programs are when nothing says so.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// One variable may not be longer than the kernel takes, however long the command is.
const LONGEST_COMMAND: usize = 4096;

/// Works out the command's environment. `argv` is what is executed in the end.
pub(super) fn build(
    kept: impl Iterator<Item = (OsString, OsString)>,
    run: &Run,
    caller: &Caller,
    target: &Target,
    argv: &[OsString],
) -> BTreeMap<OsString, OsString> {
    let mut env: BTreeMap<OsString, OsString> =
        kept.filter(|(name, value)| keeps(name, value, run.how)).collect();
    let mut set = |name: &str, value: &OsStr| {
        env.insert(name.into(), value.to_owned());
    };
    let account = &target.account;
    set("HOME", OsStr::new(&account.home));
    set("USER", OsStr::new(&account.name));
    set("LOGNAME", OsStr::new(&account.name));
    set("SUDO_USER", OsStr::new(&caller.name));
    set("SUDO_UID", OsStr::new(&caller.uid.to_string()));
    set("SUDO_GID", OsStr::new(&caller.gid.to_string()));
    let mut command = argv.join(OsStr::new(" ")).into_vec();
    command.truncate(LONGEST_COMMAND);
    set("SUDO_COMMAND", &OsString::from_vec(command));
    if run.how == How::Login {
        set("SHELL", OsStr::new(&account.shell));
    }
    env.entry("PATH".into()).or_insert_with(|| PATH.into());
    // Named by the caller, one by one: these are meant.
    env.extend(run.assignments.iter().cloned());
    env
}

fn keeps(name: &OsStr, value: &OsStr, how: How) -> bool {
    // How shells before 2014 were given functions.
    if value.as_bytes().starts_with(b"()") {
        return false;
    }
    match how {
        How::Login => listed(FOR_LOGIN, name),
        How::Command | How::Shell => !listed(DROPPED, name),
    }
}

fn listed(list: &[&str], name: &OsStr) -> bool {
    list.iter().any(|entry| match entry.strip_suffix('*') {
        Some(start) => name.as_bytes().starts_with(start.as_bytes()),
        None => name == *entry,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::ffi::OsString;

    use super::{LONGEST_COMMAND, PATH, build};
    use crate::accounts::Account;
    use crate::options::{How, Run};
    use crate::policy::{Caller, Target};

    fn built(kept: &[(&str, &str)], run: &Run, argv: &[OsString]) -> BTreeMap<String, String> {
        let caller =
            Caller { name: "ubuntu".into(), uid: 1000, gid: 1001, shell: "/bin/bash".into() };
        let account = Account {
            name: "root".into(),
            uid: 0,
            gid: 0,
            home: "/root".into(),
            shell: "/bin/zsh".into(),
        };
        let target = Target { account, gid: 0, groups: vec![0] };
        let kept = kept.iter().map(|(name, value)| (name.into(), value.into()));
        let text = |text: OsString| text.into_string().unwrap();
        build(kept, run, &caller, &target, argv)
            .into_iter()
            .map(|(name, value)| (text(name), text(value)))
            .collect()
    }

    #[test]
    fn the_environment_stays_and_says_who_it_is() {
        let kept = [
            ("PATH", "/vercel/bin:/bin"),
            ("MINE", "1"),
            ("HOME", "/vercel"),
            ("USER", "ubuntu"),
            ("SHELL", "/bin/bash"),
        ];
        let env = built(&kept, &Run::default(), &["env".into(), "-0".into()]);
        for (name, value) in [
            ("PATH", "/vercel/bin:/bin"),
            ("MINE", "1"),
            ("HOME", "/root"),
            ("USER", "root"),
            ("LOGNAME", "root"),
            ("SHELL", "/bin/bash"),
            ("SUDO_USER", "ubuntu"),
            ("SUDO_UID", "1000"),
            ("SUDO_GID", "1001"),
            ("SUDO_COMMAND", "env -0"),
        ] {
            assert_eq!(env.get(name).map(String::as_str), Some(value), "{name}");
        }
        assert_eq!(built(&[], &Run::default(), &[])["PATH"], PATH);
    }

    #[test]
    fn what_would_load_or_run_something_else_goes() {
        for name in [
            "LD_PRELOAD",
            "LD_LIBRARY_PATH",
            "BASH_ENV",
            "ENV",
            "IFS",
            "BASH_FUNC_x%%",
            "PERL5OPT",
            "PYTHONPATH",
            "SHELLOPTS",
        ] {
            assert!(!built(&[(name, "x")], &Run::default(), &[]).contains_key(name), "{name}");
        }
        assert!(!built(&[("odd", "() { :; }; x")], &Run::default(), &[]).contains_key("odd"));
        let meant = Run { assignments: vec![("LD_PRELOAD".into(), "/x".into())], ..Run::default() };
        assert_eq!(built(&[], &meant, &[])["LD_PRELOAD"], "/x");
        let faked = [("SUDO_USER", "root"), ("SUDO_UID", "0"), ("SUDO_COMMAND", "true")];
        let env = built(&faked, &Run::default(), &["id".into()]);
        assert_eq!((env["SUDO_USER"].as_str(), env["SUDO_UID"].as_str()), ("ubuntu", "1000"));
        assert_eq!(env["SUDO_COMMAND"], "id");
    }

    #[test]
    fn a_login_begins_afresh() {
        let login = Run { how: How::Login, ..Run::default() };
        let env = built(
            &[("MINE", "1"), ("TERM", "xterm"), ("LC_ALL", "C"), ("PATH", "/p")],
            &login,
            &[],
        );
        assert!(!env.contains_key("MINE"));
        assert_eq!((env["TERM"].as_str(), env["LC_ALL"].as_str()), ("xterm", "C"));
        assert_eq!(env["SHELL"], "/bin/zsh");
    }

    #[test]
    fn a_long_command_is_no_long_variable() {
        let argv = vec![OsString::from("x".repeat(100)); 5000];
        assert_eq!(built(&[], &Run::default(), &argv)["SUDO_COMMAND"].len(), LONGEST_COMMAND);
    }
}
