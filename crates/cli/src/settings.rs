//! The settings of a sandbox on the command line: the options that set them, the request they become, and
//! the lines that `keep show` prints.
//!
//! `create`, `run`, `fork` and `update` share them. `docs/ARCHITECTURE.md` says how to add one.

use std::collections::BTreeMap;
use std::time::Duration;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{ArgGroup, Args};
use sandkeep_client::types::{
    ApprovalAnswer, ApprovalPolicy, Class, Hook, Hooks, Mount, MountMode, OnIdle, OnJunk, OnSecret,
    Port, Sandbox, SecretUse, SetGuard, Size, Span, UpdateSandbox,
};
use serde::de::DeserializeOwned;

use crate::args::{NetworkSettings, pair, published, secret_use, variable};
use crate::command::{bytes, network_change, network_in_short, pairs, word};
use crate::failure::Failure;
use crate::when;

/// Options that set what a sandbox is. An absent option means the default, or no change.
///
/// Options without a heading are the common ones: help lists them first. `[default: ...]` is removed from
/// the help of `fork` and `update`, where absent options keep the value.
#[derive(Debug, Default, Args)]
#[command(group(
    ArgGroup::new("holds").args(["hold", "hold_hosts", "hold_secrets"]).multiple(true)
))]
pub(crate) struct Settings {
    /// Isolation: `container`, or `microvm` for a VM that can be paused with its memory [default: container]
    #[arg(long, value_name = "DRIVER")]
    pub(crate) driver: Option<String>,
    /// CPUs, like 2 or 0.5 [default: 2]
    #[arg(long, value_name = "COUNT", value_parser = millicpus)]
    pub(crate) vcpus: Option<u32>,
    /// Memory, like 512M or 4G; pages in swap count too [default: 4G]
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Option<Size>,
    /// Disk space that one session may write, like 10G [default: 32G]
    #[arg(long, value_name = "SIZE")]
    pub(crate) disk: Option<Size>,
    /// Environment variable of all commands; NAME alone copies the local value (repeatable)
    #[arg(short = 'e', long = "env", value_name = "NAME=VALUE", value_parser = variable)]
    pub(crate) env: Vec<(String, String)>,
    /// Tag to filter by in `keep ls` (repeatable)
    #[arg(long = "tag", value_name = "KEY=VALUE", value_parser = pair)]
    pub(crate) tags: Vec<(String, String)>,
    /// Publish a port: public, or with a token only (repeatable)
    #[arg(long = "publish", value_name = "PORT[:private]", value_parser = published)]
    pub(crate) publish: Vec<Port>,
    /// Stop or pause after this long without a command or connection, or `never` [default: 15m]
    #[arg(long, value_name = "SPAN", value_parser = span_or_never)]
    pub(crate) idle_timeout: Option<Limit>,

    /// Working directory of commands; `image` for the image's own [default: image]
    #[arg(short = 'C', long, value_name = "DIR", help_heading = COMMANDS)]
    pub(crate) cwd: Option<String>,
    /// User of commands, as USER or USER:GROUP; `image` for the image's own [default: image]
    #[arg(short = 'u', long, value_name = "USER", help_heading = COMMANDS)]
    pub(crate) user: Option<String>,
    /// Limit of processes and threads [default: 4096]
    #[arg(long, value_name = "COUNT", help_heading = COMMANDS)]
    pub(crate) pids: Option<u32>,

    /// Lifetime: `ephemeral` (never snapshotted, expires after 1d), `resumable` (30d) or `workspace`
    /// (365d) [default: resumable]
    #[arg(long, value_parser = class(), hide_possible_values = true, help_heading = LIFETIME)]
    pub(crate) class: Option<Class>,
    /// Delete the sandbox this long after its last use, like 12h or 30d [default: by class]
    #[arg(long, value_name = "SPAN", help_heading = LIFETIME)]
    pub(crate) expires: Option<Span>,
    /// Longest duration of one session, or `never` [default: never]
    #[arg(long, value_name = "SPAN", value_parser = span_or_never, help_heading = LIFETIME)]
    pub(crate) timeout: Option<Limit>,
    /// Action after the idle timeout [default: auto]
    #[arg(long, value_parser = on_idle(), value_name = "ACTION", help_heading = LIFETIME)]
    pub(crate) on_idle: Option<IdleAction>,
    /// Let requests to published ports wake the sandbox (the default)
    #[arg(long, overrides_with = "no_wake_on_request", help_heading = LIFETIME)]
    pub(crate) wake_on_request: bool,
    /// Do not let requests to published ports wake the sandbox
    #[arg(long, help_heading = LIFETIME)]
    pub(crate) no_wake_on_request: bool,
    /// Owner of the sandbox, for people [default: the project]
    #[arg(long, value_name = "OWNER", help_heading = LIFETIME)]
    pub(crate) owner: Option<String>,
    /// Purpose of the sandbox, for people
    #[arg(long, value_name = "TEXT", help_heading = LIFETIME)]
    pub(crate) purpose: Option<String>,

    /// Take a snapshot at every stop (the default)
    #[arg(long, help_heading = SNAPSHOTS)]
    pub(crate) persistent: bool,
    /// Do not take a snapshot at a stop: its files are lost
    #[arg(long, overrides_with = "persistent", help_heading = SNAPSHOTS)]
    pub(crate) non_persistent: bool,
    /// Number of snapshots to keep, or `all` [default: 10]
    #[arg(long, value_name = "COUNT", value_parser = count_or_all, help_heading = SNAPSHOTS)]
    pub(crate) keep_last: Option<Count>,
    /// Delete snapshots this long after their last use, or `never` [default: never]
    #[arg(long, value_name = "SPAN", value_parser = span_or_never, help_heading = SNAPSHOTS)]
    pub(crate) snapshot_expires: Option<Limit>,
    /// Glob of paths to leave out of snapshots, like `tmp/**` (repeatable)
    #[arg(long, value_name = "GLOB", help_heading = SNAPSHOTS)]
    pub(crate) exclude: Vec<String>,
    /// When a session ends and a file contains a secret: `block` (keep nothing until you decide),
    /// `quarantine` (move the file aside) or `warn` [default: block]
    #[arg(long, value_parser = on_secret(), hide_possible_values = true, value_name = "POLICY", help_heading = SNAPSHOTS)]
    pub(crate) guard: Option<OnSecret>,
    /// When a session ends and a file is large or junk [default: warn]
    #[arg(long, value_parser = on_junk(), value_name = "POLICY", help_heading = SNAPSHOTS)]
    pub(crate) large_files: Option<OnJunk>,
    /// Size from which a file is large [default: 256M]
    #[arg(long, value_name = "SIZE", help_heading = SNAPSHOTS)]
    pub(crate) large_size: Option<Size>,
    /// Glob of junk files, like `.cache`; replaces the list (repeatable)
    #[arg(long, value_name = "GLOB", help_heading = SNAPSHOTS)]
    pub(crate) junk: Vec<String>,

    /// Shell command to run once, after creation (repeatable)
    #[arg(long, value_name = "COMMAND", help_heading = HOOKS)]
    pub(crate) on_create: Vec<String>,
    /// Shell command to run at every resume (repeatable)
    #[arg(long, value_name = "COMMAND", help_heading = HOOKS)]
    pub(crate) on_resume: Vec<String>,
    /// Shell command whose output must be the same before a stop and after the resume
    #[arg(long, value_name = "COMMAND", help_heading = HOOKS)]
    pub(crate) validate: Option<String>,
    /// Git repository whose commit and changed files must be the same before a stop and after the resume
    #[arg(long, value_name = "PATH", help_heading = HOOKS)]
    pub(crate) validate_git: Option<String>,

    /// Hold commands that match until somebody approves; replaces all that is held, and `none` removes it (repeatable)
    #[arg(long = "hold", value_name = "PATTERN", help_heading = APPROVALS)]
    pub(crate) hold: Vec<String>,
    /// Hold the first contact with each host until somebody approves
    #[arg(long, help_heading = APPROVALS)]
    pub(crate) hold_hosts: bool,
    /// Host that needs no approval: a name, `*.example.com`, or an address (repeatable)
    #[arg(long = "known-host", value_name = "HOST", requires = "hold_hosts", help_heading = APPROVALS)]
    pub(crate) known_hosts: Vec<String>,
    /// Hold the use of a secret until somebody approves: at each host, and for each command that is given it
    /// (repeatable)
    #[arg(long = "hold-secret", value_name = "SECRET", help_heading = APPROVALS)]
    pub(crate) hold_secrets: Vec<String>,
    /// How long what is held waits for an answer [default: 1h]
    #[arg(long, value_name = "SPAN", requires = "holds", help_heading = APPROVALS)]
    pub(crate) hold_expires: Option<Span>,
    /// The answer that counts if nobody answers in time: `approve` or `deny` [default: deny]
    #[arg(long, value_name = "ANSWER", requires = "holds", value_parser = hold_default(), help_heading = APPROVALS)]
    pub(crate) hold_default: Option<ApprovalAnswer>,

    /// Drive to mount from the next session on; MODE is `read-write` or `snapshot` (read-only, as of the
    /// start of the session); replaces the list (repeatable)
    #[arg(long = "mount", value_name = "DRIVE:/PATH[:MODE]", value_parser = mount, help_heading = DRIVES)]
    pub(crate) mounts: Vec<(String, Mount)>,
    /// Mount no drives
    #[arg(long, conflicts_with = "mounts", help_heading = DRIVES)]
    pub(crate) no_mounts: bool,
    /// Secret to use: commands see a placeholder in the variable ENV, and the network replaces it in requests
    /// to the secret's hosts; replaces the list (repeatable)
    #[arg(long = "secret", value_name = "NAME[=ENV]", value_parser = secret_use, help_heading = DRIVES)]
    pub(crate) secrets: Vec<SecretUse>,
    /// Use no secrets
    #[arg(long, conflicts_with = "secrets", help_heading = DRIVES)]
    pub(crate) no_secrets: bool,

    #[command(flatten)]
    pub(crate) network: NetworkSettings,
}

const COMMANDS: &str = "Commands in the sandbox";
const LIFETIME: &str = "Lifetime";
const SNAPSHOTS: &str = "Snapshots";
const HOOKS: &str = "Hooks";
const APPROVALS: &str = "Approvals";
const DRIVES: &str = "Drives and secrets";

/// A span, or no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Limit {
    Never,
    After(Span),
}

impl Limit {
    fn span(self) -> Option<Span> {
        match self {
            Self::Never => None,
            Self::After(span) => Some(span),
        }
    }
}

/// A number, or no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Count {
    All,
    Only(u32),
}

/// The action after the idle timeout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IdleAction {
    /// The driver's default.
    Auto,
    /// A given action.
    Always(OnIdle),
}

/// The settings that were given, as a change. Settings that were not given are absent in it.
pub(crate) fn change(settings: Settings) -> Result<UpdateSandbox, Failure> {
    let own = |text: String| Some(text).filter(|text| text != "image");
    let map = |pairs: Vec<(String, String)>| {
        Some(BTreeMap::from_iter(pairs)).filter(|map| !map.is_empty())
    };
    let hooks = Hooks {
        on_create: settings.on_create.iter().map(|text| shell_hook(text)).collect(),
        on_resume: settings.on_resume.iter().map(|text| shell_hook(text)).collect(),
        validate: settings.validate.as_deref().map(shell_hook),
        validate_git: settings.validate_git,
    };
    let guard = SetGuard {
        secrets: settings.guard,
        junk: settings.large_files,
        large: settings.large_size,
        globs: unless_empty(settings.junk),
    };
    let mounts = BTreeMap::from_iter(settings.mounts);
    let others = settings.hold_hosts || !settings.hold_secrets.is_empty();
    let approvals = match settings.hold.as_slice() {
        [] if !others => None,
        [none] if none == "none" && !others => Some(None),
        _ => Some(Some(ApprovalPolicy {
            commands: settings.hold,
            hosts: settings.hold_hosts,
            known_hosts: settings.known_hosts,
            secrets: settings.hold_secrets,
            expires: settings.hold_expires,
            default: settings.hold_default,
        })),
    };
    Ok(UpdateSandbox {
        image: None,
        driver: settings.driver,
        class: settings.class,
        persistent: switch(settings.persistent, settings.non_persistent),
        owner: settings.owner,
        purpose: settings.purpose,
        expires: settings.expires,
        tags: map(settings.tags),
        env: map(settings.env),
        cwd: settings.cwd.map(own),
        user: settings.user.map(own),
        vcpus: settings.vcpus.map(|millis| f64::from(millis) / 1000.0),
        memory: settings.memory,
        pids: settings.pids,
        disk: settings.disk,
        session_timeout: settings.timeout.map(Limit::span),
        idle_timeout: settings.idle_timeout.map(Limit::span),
        on_idle: settings.on_idle.map(|action| match action {
            IdleAction::Always(action) => Some(action),
            IdleAction::Auto => None,
        }),
        hooks: Some(hooks).filter(|hooks| *hooks != Hooks::default()),
        snapshot_expires: settings.snapshot_expires.map(Limit::span),
        keep_last: settings.keep_last.map(|count| match count {
            Count::All => None,
            Count::Only(count) => Some(count),
        }),
        exclude: unless_empty(settings.exclude),
        mounts: Some(mounts).filter(|mounts| settings.no_mounts || !mounts.is_empty()),
        network: network_change(&settings.network)?,
        secrets: Some(settings.secrets)
            .filter(|secrets| settings.no_secrets || !secrets.is_empty()),
        ports: unless_empty(settings.publish),
        wake_on_request: switch(settings.wake_on_request, settings.no_wake_on_request),
        services: None,
        guard: Some(guard).filter(|guard| *guard != SetGuard::default()),
        approvals,
    })
}

/// The settings of a sandbox as `keep show` prints them.
pub(crate) fn described(sandbox: &Sandbox) -> Vec<(&'static str, String)> {
    let resources = &sandbox.resources;
    let limit = |millis: Option<u64>| millis.map_or("none".to_owned(), when::exact);
    let image = || "the image's".to_owned();
    let kept = match sandbox.keep_last {
        Some(count) => format!("the last {count}"),
        None => "all".to_owned(),
    };
    let age = sandbox
        .snapshot_expires_ms
        .map_or(String::new(), |millis| format!(", each for {}", when::rough(millis)));
    let mut lines = vec![
        ("class", word(sandbox.class)),
        ("persistent", sandbox.persistent.to_string()),
        ("owner", sandbox.owner.clone()),
        ("purpose", sandbox.purpose.clone()),
        ("tags", pairs(&sandbox.tags)),
        ("image", sandbox.image.clone()),
        ("driver", sandbox.driver.clone()),
        ("env", pairs(&sandbox.env)),
        ("cwd", sandbox.cwd.clone().unwrap_or_else(image)),
        ("user", sandbox.user.clone().unwrap_or_else(image)),
        ("vcpus", resources.vcpus.to_string()),
        ("memory", bytes(resources.memory_bytes)),
        ("pids", resources.pids.to_string()),
        ("disk", bytes(resources.disk_bytes)),
        ("timeout", limit(sandbox.session_timeout_ms)),
        ("idle timeout", limit(sandbox.idle_timeout_ms)),
        ("on idle", sandbox.on_idle.map_or("the driver's default".to_owned(), word)),
        ("snapshots kept", kept + &age),
        ("excluded", sandbox.exclude.join(" ")),
        ("drives", mounts(sandbox)),
        ("secrets", secrets(sandbox)),
        ("ports", ports(sandbox)),
        ("services", services(sandbox)),
        ("network", sandbox.network.as_ref().map_or("the project's".to_owned(), network_in_short)),
        ("guard", guard(sandbox)),
        ("held commands", held(sandbox)),
    ];
    for (name, hooks) in [
        ("on create", &sandbox.hooks.on_create[..]),
        ("on resume", &sandbox.hooks.on_resume[..]),
        ("validate", sandbox.hooks.validate.as_slice()),
    ] {
        lines.extend(hooks.iter().map(|hook| (name, hook.argv.join(" "))));
    }
    lines.extend(sandbox.hooks.validate_git.clone().map(|path| ("validate git", path)));
    lines
}

fn held(sandbox: &Sandbox) -> String {
    let Some(policy) = &sandbox.approvals else { return "none".to_owned() };
    let mut held = policy.commands.clone();
    if policy.hosts {
        held.push("new hosts".to_owned());
    }
    held.extend(policy.secrets.iter().map(|secret| format!("secret {secret}")));
    held.join(", ")
}

fn secrets(sandbox: &Sandbox) -> String {
    let named = sandbox.secrets.iter().map(|used| match &used.env {
        Some(env) if *env != used.secret => format!("{}={env}", used.secret),
        _ => used.secret.clone(),
    });
    named.collect::<Vec<_>>().join(" ")
}

fn guard(sandbox: &Sandbox) -> String {
    let guard = &sandbox.guard;
    let (secrets, junk) = (word(guard.secrets), word(guard.junk));
    format!("secrets {secrets}, large files {junk} from {}", bytes(guard.large_bytes))
}

fn mounts(sandbox: &Sandbox) -> String {
    let mounts = sandbox.mounts.iter().map(|(path, mount)| {
        let Mount { drive, mode } = mount;
        format!("{drive}:{path}:{}", word(mode))
    });
    mounts.collect::<Vec<_>>().join(" ")
}

fn ports(sandbox: &Sandbox) -> String {
    let mut ports: Vec<String> =
        sandbox.ports.iter().map(|port| format!("{}:{}", port.port, word(port.access))).collect();
    if !sandbox.wake_on_request {
        ports.push("(requests do not wake the sandbox)".to_owned());
    }
    ports.join(" ")
}

fn services(sandbox: &Sandbox) -> String {
    sandbox.services.iter().map(|service| service.name.as_str()).collect::<Vec<_>>().join(" ")
}

/// Hooks are argument vectors; on the command line they are shell commands.
fn shell_hook(text: &str) -> Hook {
    Hook { argv: vec!["sh".to_owned(), "-c".to_owned(), text.to_owned()], timeout: None }
}

fn unless_empty<T>(list: Vec<T>) -> Option<Vec<T>> {
    Some(list).filter(|list| !list.is_empty())
}

/// The value of a pair of options like `--persistent` and `--non-persistent`.
fn switch(on: bool, off: bool) -> Option<bool> {
    match (on, off) {
        (true, _) => Some(true),
        (false, true) => Some(false),
        (false, false) => None,
    }
}

/// Parses one of a list of words, as the API spells them.
fn one_of<T>(words: impl Into<PossibleValuesParser>) -> impl TypedValueParser<Value = T>
where
    T: DeserializeOwned + Clone + Send + Sync + 'static,
{
    words.into().try_map(|word| serde_json::from_value(serde_json::Value::String(word)))
}

pub(crate) fn class() -> impl TypedValueParser<Value = Class> {
    one_of(["ephemeral", "resumable", "workspace"])
}

fn on_secret() -> impl TypedValueParser<Value = OnSecret> {
    one_of(["block", "quarantine", "warn"])
}

fn hold_default() -> impl TypedValueParser<Value = ApprovalAnswer> {
    one_of(["approve", "deny"])
}

fn on_junk() -> impl TypedValueParser<Value = OnJunk> {
    one_of([
        PossibleValue::new("off").help("Do not look for such files"),
        PossibleValue::new("warn").help("Keep them and report them"),
        PossibleValue::new("promote-or-drop").help("Keep nothing until you decide about each"),
    ])
}

fn on_idle() -> impl TypedValueParser<Value = IdleAction> {
    let words = [
        PossibleValue::new("run").help("Continue to run"),
        PossibleValue::new("pause").help("Pause: keep memory, processes and files (microvm)"),
        PossibleValue::new("stop").help("Stop: keep files"),
        PossibleValue::new("auto").help("Pause if the driver can keep memory, otherwise stop"),
    ];
    PossibleValuesParser::from(words).try_map(|word| match word.as_str() {
        "auto" => Ok(IdleAction::Auto),
        _ => serde_json::from_value(serde_json::Value::String(word)).map(IdleAction::Always),
    })
}

fn mount(text: &str) -> Result<(String, Mount), String> {
    let mut parts = text.splitn(3, ':');
    let (drive, path) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let mode = match parts.next() {
        None | Some("read-write") => MountMode::ReadWrite,
        Some("snapshot") => MountMode::Snapshot,
        Some(other) => {
            return Err(format!("`{other}` is not a mode; write `read-write` or `snapshot`"));
        }
    };
    if drive.is_empty() || !path.starts_with('/') {
        return Err("write DRIVE:/PATH, or DRIVE:/PATH:snapshot".to_owned());
    }
    Ok((path.to_owned(), Mount { drive: drive.to_owned(), mode }))
}

fn millicpus(text: &str) -> Result<u32, String> {
    let bad = || "write a number of CPUs, like 2 or 0.5".to_owned();
    let count: f64 = text.parse().map_err(|_| bad())?;
    if !(0.001..=1024.0).contains(&count) {
        return Err(bad());
    }
    Duration::try_from_secs_f64(count)
        .ok()
        .and_then(|count| u32::try_from(count.as_millis()).ok())
        .ok_or_else(bad)
}

fn span_or_never(text: &str) -> Result<Limit, String> {
    match text {
        "never" => Ok(Limit::Never),
        _ => text.parse().map(Limit::After).map_err(|error| format!("{error}; or `never`")),
    }
}

fn count_or_all(text: &str) -> Result<Count, String> {
    match text {
        "all" => Ok(Count::All),
        _ => text.parse().map(Count::Only).map_err(|_| "write a number, or `all`".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use sandkeep_client::types::UpdateSandbox;
    use sandkeep_core::model::{Config, Span};

    use super::{Count, Limit, Settings, change};

    #[test]
    fn without_options_nothing_changes() {
        assert_eq!(change(Settings::default()).unwrap(), UpdateSandbox::default());
    }

    #[test]
    fn words_that_clear_a_value_become_null() {
        let change = change(Settings {
            idle_timeout: Some(Limit::Never),
            keep_last: Some(Count::All),
            cwd: Some("image".to_owned()),
            validate: Some("git status".to_owned()),
            vcpus: Some(500),
            ..Settings::default()
        })
        .unwrap();
        assert_eq!(
            serde_json::to_string(&change).unwrap(),
            r#"{"cwd":null,"vcpus":0.5,"idle_timeout":null,"hooks":{"validate":{"argv":["sh","-c","git status"]}},"keep_last":null}"#
        );
    }

    /// The defaults in the help of `keep create` are those of the engine.
    #[test]
    fn help_shows_the_real_defaults() {
        let keep = crate::args::command();
        let create = keep.find_subcommand("create").unwrap();
        let shown = |option: &str| {
            let arg = create.get_arguments().find(|arg| arg.get_long() == Some(option)).unwrap();
            let help = arg.get_help().unwrap().to_string();
            let (_, default) = help.split_once("[default: ").unwrap_or_else(|| panic!("{option}"));
            default.trim_end_matches(']').to_owned()
        };
        let config = Config::default();
        assert_eq!(shown("image"), config.image);
        assert_eq!(shown("driver"), config.driver);
        assert_eq!(shown("memory").parse(), Ok(config.resources.memory));
        assert_eq!(shown("disk").parse(), Ok(config.resources.disk));
        assert_eq!(shown("vcpus"), (config.resources.millicpus / 1000).to_string());
        assert_eq!(shown("pids"), config.resources.pids.to_string());
        assert_eq!(shown("idle-timeout").parse::<Span>().ok(), config.idle_timeout);
        assert_eq!((shown("timeout"), config.session_timeout), ("never".to_owned(), None));
        assert_eq!(shown("keep-last"), config.retention.keep_last.unwrap().to_string());
        assert_eq!(shown("large-size").parse(), Ok(config.guard.large));
        assert_eq!(
            format!("\"{}\"", shown("class")),
            serde_json::to_string(&config.class).unwrap()
        );
        assert!(config.persistent && config.wake_on_request);
    }
}
