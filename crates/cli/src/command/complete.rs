//! Completion in shells: the scripts, and the names that they ask for while somebody types.
//!
//! `keep completions` prints a script that knows commands and options. For names it calls `keep __complete WORDS`, with the
//! words of the line up to the one that is completed. [`names`] finds out what that word stands for, asks the server, and prints
//! a name per line, with a tab and what it is. A shell waits for this: it takes a second at most, and where there is no server,
//! or no name fits, it prints nothing.

use std::time::Duration;

use clap::{Arg, FromArgMatches as _};
use clap_complete::Shell;
use sandkeep_client::{Client, Error, ListSandboxes};

use super::word;
use crate::args::{self, Global, Keep};
use crate::{locate, when};

/// The word that asks for names, in the place of a command.
pub(crate) const ASKED: &str = "__complete";

/// How long the server may take.
const DEADLINE: Duration = Duration::from_secs(1);
/// How many names are told.
const MOST: usize = 200;

/// What can be named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CompletionKind {
    Sandbox,
    Snapshot,
    Command,
}

/// The arguments that are names of things on the server, by command and argument.
const NAMED: &[(&str, &str, CompletionKind)] = {
    use CompletionKind::{Command, Sandbox, Snapshot};
    &[
        ("exec", "name", Sandbox),
        ("sh", "name", Sandbox),
        ("start", "name", Sandbox),
        ("stop", "names", Sandbox),
        ("pause", "names", Sandbox),
        ("fork", "source", Sandbox),
        ("fork", "from", Snapshot),
        ("create", "from", Snapshot),
        ("checkpoint", "name", Sandbox),
        ("rollback", "name", Sandbox),
        ("rollback", "snapshot", Snapshot),
        ("show", "names", Sandbox),
        ("why", "names", Sandbox),
        ("tree", "names", Sandbox),
        ("ps", "name", Sandbox),
        ("history", "name", Sandbox),
        ("logs", "name", Sandbox),
        ("logs", "command", Command),
        ("kill", "name", Sandbox),
        ("kill", "command", Command),
        ("rm", "names", Sandbox),
        ("update", "name", Sandbox),
        ("sessions", "name", Sandbox),
        ("stats", "names", Sandbox),
        ("diff", "points", Sandbox),
        ("changes", "name", Sandbox),
        ("changes", "command", Command),
        ("promote", "fork", Sandbox),
        ("pick", "fork", Sandbox),
        ("merge", "source", Sandbox),
        ("merge", "into", Sandbox),
        ("rename", "name", Sandbox),
        ("prune", "name", Sandbox),
        ("ports", "name", Sandbox),
        ("open", "name", Sandbox),
        ("forward", "name", Sandbox),
        ("service set", "name", Sandbox),
        ("service ls", "name", Sandbox),
        ("service rm", "name", Sandbox),
        ("service start", "name", Sandbox),
        ("service stop", "name", Sandbox),
        ("service logs", "name", Sandbox),
        ("network", "name", Sandbox),
        ("net", "name", Sandbox),
        ("events", "sandbox", Sandbox),
        ("runs start", "sandbox", Sandbox),
        ("runs ls", "sandbox", Sandbox),
        ("approvals ls", "sandbox", Sandbox),
        ("approvals ask", "sandbox", Sandbox),
        ("snapshot ls", "name", Sandbox),
        ("snapshot show", "id", Snapshot),
        ("snapshot rm", "ids", Snapshot),
        ("snapshot export", "id", Snapshot),
        ("ls", "prefix", Sandbox),
    ]
};

/// The completion script of a shell.
pub(super) fn script(shell: Shell) -> String {
    let mut bytes = Vec::new();
    clap_complete::generate(shell, &mut args::command(), "keep", &mut bytes);
    let script = String::from_utf8_lossy(&bytes).into_owned();
    match shell {
        Shell::Bash => script + BASH,
        Shell::Fish => script + FISH,
        // There the function of this name is what the shell calls.
        Shell::Zsh => match script.split_once("if [ \"$funcstack[1]\" = \"_keep\" ]") {
            Some((functions, end)) => {
                let functions = functions.replacen("\n_keep() {", "\n_keep_static() {", 1);
                format!("{functions}{ZSH}if [ \"$funcstack[1]\" = \"_keep\" ]{end}")
            }
            None => script,
        },
        _ => script,
    }
}

const BASH: &str = r#"
_keep_names() {
    local cur="${COMP_WORDS[COMP_CWORD]}" names
    if [[ "$cur" != -* ]]; then
        names=$("${1:-keep}" __complete "${COMP_WORDS[@]:0:COMP_CWORD+1}" 2>/dev/null | cut -f1)
        if [[ -n "$names" ]]; then
            COMPREPLY=( $(compgen -W "$names" -- "$cur") )
            return
        fi
    fi
    _keep "$@"
}

complete -F _keep_names -o bashdefault -o default keep
"#;

const ZSH: &str = r#"_keep() {
    local -a names
    local tab=$'\t'
    if [[ "$words[CURRENT]" != -* ]]; then
        names=("${(@f)$($words[1] __complete "${(@)words[1,CURRENT]}" 2>/dev/null)}")
        if [[ -n "$names[1]" ]]; then
            names=("${(@)names/$tab/:}")
            _describe 'name' names
            return
        fi
    fi
    _keep_static "$@"
}

"#;

const FISH: &str = r#"
function __keep_names
    set -l current (commandline -ct)
    string match -q -- '-*' "$current"; and return
    keep __complete (commandline -opc) "$current" 2>/dev/null
end

complete -c keep -a "(__keep_names)"
"#;

/// The names that fit the last of `words`, which begin with `keep`.
pub(crate) async fn names(words: &[String]) -> String {
    let Some(asked) = CompletionRequest::in_words(words) else { return String::new() };
    let Ok(client) = asked.client() else { return String::new() };
    let found = tokio::time::timeout(DEADLINE, asked.found(&client)).await;
    let mut lines = found.ok().and_then(Result::ok).unwrap_or_default();
    lines.retain(|(name, _)| name.starts_with(&asked.begun));
    lines.truncate(MOST);
    lines.iter().map(|(name, what)| format!("{name}\t{}\n", plain(what))).collect()
}

fn plain(text: &str) -> String {
    text.replace(char::is_control, " ")
}

/// What a shell wants names for.
#[derive(Debug, PartialEq, Eq)]
struct CompletionRequest {
    named: CompletionKind,
    /// The sandbox that was named before on the line.
    sandbox: Option<String>,
    begun: String,
    /// Options of every command that are on the line, with their values.
    global: Vec<String>,
}

impl CompletionRequest {
    fn in_words(words: &[String]) -> Option<Self> {
        let (last, before) = words.get(1..)?.split_last()?;
        let mut keep = args::command();
        keep.build();
        let mut line = LineReader::new(&keep);
        for word in before {
            line.take(word);
        }
        // Shells that break words at `=` give it as a word.
        let begun = last.trim_start_matches('=').to_owned();
        let arg = line.next_argument(last)?;
        let path = line.path.join(" ");
        let found = NAMED.iter().find(|(of, id, _)| *of == path && *id == arg);
        let (_, _, named) = found?;
        let sandbox = line.positionals.first().cloned();
        Some(Self { named: *named, sandbox, begun, global: line.global })
    }

    fn client(&self) -> Result<Client, crate::failure::Failure> {
        let words = ["keep", "version"].map(str::to_owned).into_iter().chain(self.global.clone());
        let parsed = args::command().try_get_matches_from(words);
        let keep = parsed.and_then(|found| Keep::from_arg_matches(&found));
        let keep = keep.map_err(|error| crate::failure::Failure::caused("cannot parse", error))?;
        let global: Global = keep.global;
        let client = locate::client(&global)?;
        match &global.project {
            Some(project) => Ok(client.for_project(project)?),
            None => Ok(client),
        }
    }

    async fn found(&self, client: &Client) -> Result<Vec<(String, String)>, Error> {
        match (self.named, &self.sandbox) {
            (CompletionKind::Sandbox, _) => {
                let name_prefix = Some(self.begun.clone()).filter(|begun| !begun.is_empty());
                let filter = ListSandboxes { name_prefix, ..ListSandboxes::default() };
                let all = client.sandboxes(&filter).collect(Some(MOST)).await?;
                let line = |one: sandkeep_client::types::Sandbox| {
                    (one.name, format!("{}, used {}", word(one.state), when::ago(&one.used_at)))
                };
                Ok(all.into_iter().map(line).collect())
            }
            (CompletionKind::Snapshot, sandbox) => {
                let all = client.snapshots(sandbox.as_deref()).collect(Some(MOST)).await?;
                let line = |one: sandkeep_client::types::Snapshot| {
                    let label = one.label.map(|label| format!("{label}, ")).unwrap_or_default();
                    (one.id, format!("{label}{}, {}", one.sandbox, when::ago(&one.created_at)))
                };
                Ok(all.into_iter().map(line).collect())
            }
            (CompletionKind::Command, Some(sandbox)) => {
                let all = client.commands(sandbox, Some(100)).collect(Some(MOST)).await?;
                let line = |one: sandkeep_client::types::Command| {
                    let argv: String = one.argv.join(" ").chars().take(60).collect();
                    (one.id, format!("{}, {argv}", word(one.state)))
                };
                Ok(all.into_iter().map(line).collect())
            }
            (CompletionKind::Command, None) => Ok(Vec::new()),
        }
    }
}

/// A command line that is read word by word, as far as it makes sense.
struct LineReader<'a> {
    command: &'a clap::Command,
    path: Vec<&'a str>,
    positionals: Vec<String>,
    /// The option whose value comes next.
    pending: Option<&'a Arg>,
    global: Vec<String>,
}

impl<'a> LineReader<'a> {
    fn new(keep: &'a clap::Command) -> Self {
        Self {
            command: keep,
            path: Vec::new(),
            positionals: Vec::new(),
            pending: None,
            global: Vec::new(),
        }
    }

    fn take(&mut self, word: &str) {
        if let Some(option) = self.pending {
            if word != "=" {
                self.value(option, word);
            }
            return;
        }
        if let Some(option) = self.option(word) {
            match word.split_once('=') {
                Some((_, value)) => self.value(option, value),
                None if option.get_action().takes_values() => self.pending = Some(option),
                None => {}
            }
        } else if word.starts_with('-') && word.len() > 1 {
            // An unknown option, or the end of options.
        } else if let Some(inner) =
            self.command.find_subcommand(word).filter(|_| self.positionals.is_empty())
        {
            self.path.push(inner.get_name());
            self.command = inner;
        } else {
            self.positionals.push(word.to_owned());
        }
    }

    fn value(&mut self, option: &Arg, value: &str) {
        if let Some(long) = option.get_long().filter(|_| option.is_global_set()) {
            self.global.push(format!("--{long}={value}"));
        }
        self.pending = None;
    }

    fn option(&self, word: &str) -> Option<&'a Arg> {
        let (name, _) = word.split_once('=').unwrap_or((word, ""));
        let of = |arg: &&Arg| match name.strip_prefix("--") {
            Some(long) => arg.get_long() == Some(long),
            // Of several short options in one word only the last may take a value.
            None => name.starts_with('-') && arg.get_short() == name.chars().skip(1).last(),
        };
        self.command.get_arguments().filter(|arg| !arg.is_positional()).find(of)
    }

    /// The id of the argument that comes next.
    fn next_argument(&self, last: &str) -> Option<&'a str> {
        if let Some(option) = self.pending {
            return Some(option.get_id().as_str());
        }
        if let Some((name, _)) = last.split_once('=').filter(|_| last.starts_with("--")) {
            return self.option(name).map(|option| option.get_id().as_str());
        }
        let positionals: Vec<&Arg> = self.command.get_positionals().collect();
        let index = self.positionals.len();
        let repeated = positionals.last().filter(|arg| takes_many(arg) && !arg.is_last_set());
        positionals.get(index).or(repeated).map(|arg| arg.get_id().as_str())
    }
}

fn takes_many(arg: &Arg) -> bool {
    matches!(arg.get_action(), clap::ArgAction::Append)
}

#[cfg(test)]
mod tests {
    use clap_complete::Shell;

    use super::{CompletionKind, CompletionRequest, NAMED, script};
    use crate::args;

    fn asked(line: &str) -> Option<CompletionRequest> {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        CompletionRequest::in_words(&words)
    }

    #[test]
    fn every_named_argument_exists() {
        let keep = args::command();
        for (path, id, _) in NAMED {
            let mut command = &keep;
            for word in path.split(' ') {
                command = command.find_subcommand(word).unwrap_or_else(|| panic!("{path}"));
            }
            let found = command.get_arguments().any(|arg| arg.get_id() == id);
            assert!(found, "`keep {path}` has no argument `{id}`");
        }
    }

    #[test]
    fn what_is_completed_is_found_in_the_line() {
        use CompletionKind::{Command, Sandbox, Snapshot};
        for (line, named, sandbox, begun) in [
            ("keep exec my", Sandbox, None, "my"),
            ("keep exec -it --user root ", Sandbox, None, ""),
            ("keep exec -e A=b -C /work ", Sandbox, None, ""),
            ("keep --json stop a b c", Sandbox, Some("a"), "c"),
            ("keep list my-", Sandbox, None, "my-"),
            ("keep rollback my-app snp-", Snapshot, Some("my-app"), "snp-"),
            ("keep create --from ", Snapshot, None, ""),
            ("keep create --from = snp", Snapshot, None, "snp"),
            ("keep fork my-app new --from s", Snapshot, Some("my-app"), "s"),
            ("keep snapshot show ", Snapshot, None, ""),
            ("keep logs my-app ", Command, Some("my-app"), ""),
            ("keep commands my", Sandbox, None, "my"),
            ("keep kill my-app cmd-1", Command, Some("my-app"), "cmd-1"),
            ("keep changes my-app --command ", Command, Some("my-app"), ""),
        ] {
            let found = asked(line).unwrap_or_else(|| panic!("{line}"));
            assert_eq!(found.named, named, "{line}");
            assert_eq!(found.sandbox.as_deref(), sandbox, "{line}");
            assert_eq!(found.begun, begun, "{line}");
        }
        for line in [
            "keep",
            "keep ",
            "keep ex",
            "keep exec my-app ",
            "keep exec my-app -- ls ",
            "keep exec --user ",
            "keep nonsense x",
            "keep image ls ",
        ] {
            assert_eq!(asked(line), None, "{line}");
        }
        let found = asked("keep --project other --data=/d exec x").unwrap();
        assert_eq!(found.global, ["--project=other", "--data=/d"]);
    }

    #[test]
    fn scripts_ask_for_names() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            assert_eq!(script(shell).matches("__complete ").count(), 1, "{shell}");
        }
        let zsh = script(Shell::Zsh);
        assert_eq!(zsh.matches("\n_keep() {").count(), 1, "the one that asks for names");
        assert!(zsh.contains("\n_keep_static() {"));
    }
}
