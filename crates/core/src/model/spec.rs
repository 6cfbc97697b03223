//! The settings of a sandbox: [`Config`], the rules it must meet, and [`Patch`], a change to it.
//!
//! The types of the values are shared with the API (`sandkeep-types`), so that most settings need no
//! translation: `settings!` lists those. `docs/ARCHITECTURE.md` says how to add one.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use sandkeep_types as types;

use super::governance::approval::check_approval_policy;
use super::secret::guard::apply_guard;
use super::service::check_services;
use super::{
    ApprovalPolicy, BadName, Class, Guard, GuardPatch, Hooks, Mounts, Name, OnIdle, Policy, Port,
    SecretUse, Service, Size, Span, Tags, check_env_name, check_mounts, check_tag,
};

/// What a sandbox may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resources {
    /// CPUs, in thousandths of one.
    pub millicpus: u32,
    /// Memory, swap included.
    pub memory: Size,
    /// Processes and threads.
    pub pids: u32,
    /// What a session may add to the disk.
    pub disk: Size,
}

impl Default for Resources {
    fn default() -> Self {
        Self { millicpus: 2000, memory: Size(4 << 30), pids: 4096, disk: Size(32 << 30) }
    }
}

/// How long snapshots are kept. None of this drops one that some sandbox stands on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Retention {
    /// A snapshot goes this long after its last use, which at first is when it was made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires: Option<Span>,
    /// How many of the newest are kept, the current one included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_last: Option<u32>,
    /// Those go this long after their last use; as `expires` says if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept_expires: Option<Span>,
    /// Whether all others are deleted at once. If not they go when `expires` says.
    #[serde(default = "yes")]
    pub delete_evicted: bool,
}

fn yes() -> bool {
    true
}

impl Default for Retention {
    fn default() -> Self {
        Self { expires: None, keep_last: None, kept_expires: None, delete_evicted: true }
    }
}

/// All that was decided about a sandbox; what a fork copies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    /// What it starts from when it has no snapshot.
    pub image: String,
    /// The isolation backend.
    pub driver: String,
    /// How it is governed.
    pub class: Class,
    /// Whether a stop makes a snapshot.
    pub persistent: bool,
    /// Who answers for it.
    pub owner: String,
    /// What it is for.
    pub purpose: String,
    /// How long after its last use it goes away.
    pub expires: Span,
    /// Labels to find it by.
    pub tags: Tags,
    /// Environment of every command.
    pub env: BTreeMap<String, String>,
    /// Working directory of every command; the image's if absent.
    pub cwd: Option<String>,
    /// User of every command; the image's if absent.
    pub user: Option<String>,
    /// What it may use.
    pub resources: Resources,
    /// How long one session may last.
    pub session_timeout: Option<Span>,
    /// How long a session lasts with no command alive and no connection open.
    pub idle_timeout: Option<Span>,
    /// What becomes of it then; if absent it is paused where its driver keeps memory, and stopped elsewhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_idle: Option<OnIdle>,
    /// Commands at turning points.
    pub hooks: Hooks,
    /// How long snapshots are kept.
    pub retention: Retention,
    /// Paths that never enter a snapshot, as globs from the root: `tmp/**`, `**/node_modules/.cache/**`.
    pub exclude: Vec<String>,
    /// Drives it has, by path.
    #[serde(default, skip_serializing_if = "Mounts::is_empty")]
    pub mounts: Mounts,
    /// Whether a persistent sandbox has a snapshot for every session that ended, however it ended and
    /// even if nothing was written.
    #[serde(default)]
    pub snapshot_always: bool,
    /// Ports inside that may be reached from outside.
    #[serde(default)]
    pub ports: Vec<Port>,
    /// Whether a request for a port may wake it; each port may forbid it.
    #[serde(default = "yes")]
    pub wake_on_request: bool,
    /// Commands that are started again after every resume.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub services: Vec<Service>,
    /// What it may reach; what its project says if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<Policy>,
    /// What must not enter a snapshot unseen.
    #[serde(default)]
    pub guard: Guard,
    /// Secrets that its commands have a placeholder of, and that the network puts in its place.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub secrets: Vec<SecretUse>,
    /// What somebody has to approve first; nothing if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub approvals: Option<ApprovalPolicy>,
    /// What a front remembers about the sandbox. The engine never looks.
    #[serde(default)]
    pub notes: BTreeMap<String, String>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            image: "host".to_owned(),
            driver: "container".to_owned(),
            class: Class::Resumable,
            persistent: true,
            owner: String::new(),
            purpose: String::new(),
            expires: Class::Resumable.default_expiry(),
            tags: Tags::new(),
            env: BTreeMap::new(),
            cwd: None,
            user: None,
            resources: Resources::default(),
            session_timeout: None,
            idle_timeout: Some(Span::seconds(15 * 60)),
            on_idle: None,
            hooks: Hooks::default(),
            retention: Retention { keep_last: Some(10), ..Retention::default() },
            exclude: Vec::new(),
            mounts: Mounts::new(),
            snapshot_always: false,
            ports: Vec::new(),
            wake_on_request: true,
            services: Vec::new(),
            network: None,
            guard: Guard::default(),
            secrets: Vec::new(),
            approvals: None,
            notes: BTreeMap::new(),
        }
    }
}

/// A change to a [`Config`]: absent fields stay as they are.
///
/// Create, fork and update are all "a configuration and a patch to it", so that every field is
/// checked in one place for all of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[allow(missing_docs)] // each field is the one of `Config`
pub struct Patch {
    pub image: Option<String>,
    pub driver: Option<String>,
    pub class: Option<Class>,
    pub persistent: Option<bool>,
    pub owner: Option<String>,
    pub purpose: Option<String>,
    pub expires: Option<Span>,
    pub tags: Option<Tags>,
    pub env: Option<BTreeMap<String, String>>,
    pub cwd: Option<Option<String>>,
    pub user: Option<Option<String>>,
    pub millicpus: Option<u32>,
    pub memory: Option<Size>,
    pub pids: Option<u32>,
    pub disk: Option<Size>,
    pub session_timeout: Option<Option<Span>>,
    pub idle_timeout: Option<Option<Span>>,
    pub on_idle: Option<Option<OnIdle>>,
    pub hooks: Option<Hooks>,
    pub snapshot_expires: Option<Option<Span>>,
    pub keep_last: Option<Option<u32>>,
    pub kept_expires: Option<Option<Span>>,
    pub delete_evicted: Option<bool>,
    pub exclude: Option<Vec<String>>,
    pub mounts: Option<Mounts>,
    pub snapshot_always: Option<bool>,
    pub ports: Option<Vec<Port>>,
    /// Ports to publish, or to publish otherwise; the others stay.
    pub publish: Vec<Port>,
    /// Ports to publish no more.
    pub unpublish: Vec<u16>,
    pub wake_on_request: Option<bool>,
    pub services: Option<Vec<Service>>,
    /// Services to add, or to replace by name; the others stay.
    pub set_services: Vec<Service>,
    /// Services to remove.
    pub drop_services: Vec<Name>,
    pub network: Option<Option<Policy>>,
    pub guard: GuardPatch,
    pub secrets: Option<Vec<SecretUse>>,
    pub approvals: Option<Option<ApprovalPolicy>>,
    /// Notes to set, and with `None` to remove; the others stay.
    pub notes: BTreeMap<String, Option<String>>,
    /// Whether the running session stays as it is: the patch is for later ones.
    pub next_session: bool,
}

/// Why a configuration is refused: the field and what is wrong with it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {reason}")]
pub struct BadConfig {
    /// The field.
    pub field: Cow<'static, str>,
    /// What is wrong, and what to do.
    pub reason: String,
}

pub(super) fn refuse(field: &'static str, reason: impl Into<String>) -> BadConfig {
    BadConfig { field: field.into(), reason: reason.into() }
}

/// Implements what is the same for every setting.
///
/// - `same`: one name and one type in a request, a [`Patch`], a [`Config`] and a response.
/// - `spans`: like `same`, but a response has milliseconds, in a field that ends in `_ms`.
///
/// The other settings are in groups of a [`Config`], or have another form in a request or a response.
macro_rules! settings {
    (
        same { $($same:ident,)* }
        spans { $($span:ident => $span_ms:ident,)* }
    ) => {
        impl Patch {
            /// The settings of a request, except `vcpus`, `mounts`, `network`, `secrets`, `ports` and
            /// `services`: the caller parses those.
            #[must_use]
            pub fn from_request(request: types::UpdateSandbox) -> Self {
                let types::UpdateSandbox {
                    $($same,)*
                    $($span,)*
                    expires,
                    memory,
                    pids,
                    disk,
                    snapshot_expires,
                    keep_last,
                    guard,
                    vcpus: _,
                    mounts: _,
                    network: _,
                    secrets: _,
                    ports: _,
                    services: _,
                } = request;
                Self {
                    $($same,)*
                    $($span,)*
                    expires,
                    memory,
                    pids,
                    disk,
                    snapshot_expires,
                    keep_last,
                    guard: guard.unwrap_or_default(),
                    ..Self::default()
                }
            }

            fn apply_listed(&mut self, config: &mut Config) {
                $(set(&mut config.$same, self.$same.take());)*
                $(set(&mut config.$span, self.$span.take());)*
            }
        }

        impl Config {
            /// Puts the settings into a response, except `mounts`, `network`, `secrets`, `ports`, `services`
            /// and `guard`: the caller translates those.
            #[must_use]
            pub fn into_response(self, response: types::Sandbox) -> types::Sandbox {
                types::Sandbox {
                    $($same: self.$same,)*
                    $($span_ms: self.$span.map(|span| span.0),)*
                    expires_ms: self.expires.0,
                    resources: types::Resources {
                        vcpus: f64::from(self.resources.millicpus) / 1000.0,
                        memory_bytes: self.resources.memory.0,
                        pids: self.resources.pids,
                        disk_bytes: self.resources.disk.0,
                    },
                    snapshot_expires_ms: self.retention.expires.map(|span| span.0),
                    keep_last: self.retention.keep_last,
                    ..response
                }
            }
        }
    };
}

settings! {
    same {
        image, driver, class, persistent, owner, purpose, tags, env, cwd, user, on_idle, hooks,
        exclude, wake_on_request, approvals,
    }
    spans {
        session_timeout => session_timeout_ms,
        idle_timeout => idle_timeout_ms,
    }
}

fn set<T>(place: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *place = value;
    }
}

impl Patch {
    /// Applies the patch to `config` and checks the whole.
    ///
    /// # Errors
    ///
    /// Returns [`BadConfig`] for the first field that is wrong.
    pub fn apply(mut self, mut config: Config) -> Result<Config, BadConfig> {
        if let Some(class) = self.class {
            // A class brings its own defaults, which the same patch may override.
            if class != config.class {
                config.expires = class.default_expiry();
                config.persistent = class != Class::Ephemeral;
            }
        }
        self.apply_listed(&mut config);
        set(&mut config.expires, self.expires);
        set(&mut config.resources.millicpus, self.millicpus);
        set(&mut config.resources.memory, self.memory);
        set(&mut config.resources.pids, self.pids);
        set(&mut config.resources.disk, self.disk);
        set(&mut config.retention.expires, self.snapshot_expires);
        set(&mut config.retention.keep_last, self.keep_last);
        set(&mut config.retention.kept_expires, self.kept_expires);
        set(&mut config.retention.delete_evicted, self.delete_evicted);
        set(&mut config.mounts, self.mounts.map(check_mounts).transpose()?);
        set(&mut config.snapshot_always, self.snapshot_always);
        set(&mut config.ports, self.ports);
        config.ports.retain(|port| !self.unpublish.contains(&port.number));
        for port in self.publish {
            match config.ports.iter_mut().find(|there| there.number == port.number) {
                Some(there) => *there = port,
                None => config.ports.push(port),
            }
        }
        set(&mut config.services, self.services);
        config.services.retain(|service| !self.drop_services.contains(&service.name));
        for service in self.set_services {
            match config.services.iter_mut().find(|there| there.name == service.name) {
                Some(there) => *there = service,
                None => config.services.push(service),
            }
        }
        set(&mut config.network, self.network);
        apply_guard(self.guard, &mut config.guard);
        set(&mut config.secrets, self.secrets);
        for (name, note) in self.notes {
            match note {
                Some(text) => config.notes.insert(name, text),
                None => config.notes.remove(&name),
            };
        }
        config.check()?;
        Ok(config)
    }
}

impl Config {
    fn check(&self) -> Result<(), BadConfig> {
        let named = |field: &'static str| move |error: BadName| refuse(field, error.to_string());
        if self.class == Class::Ephemeral && self.persistent {
            return Err(refuse(
                "persistent",
                "an ephemeral sandbox is never snapshotted; choose class resumable or workspace",
            ));
        }
        for (field, text) in
            [("owner", &self.owner), ("purpose", &self.purpose), ("image", &self.image)]
        {
            if text.chars().count() > 512 || text.chars().any(char::is_control) {
                return Err(refuse(field, "at most 512 characters, on one line"));
            }
        }
        if self.tags.len() > 32 {
            return Err(refuse("tags", BadName::TooManyTags(self.tags.len()).to_string()));
        }
        for (key, value) in &self.tags {
            check_tag(key, value).map_err(named("tags"))?;
        }
        if self.env.len() > 512 {
            return Err(refuse("env", "at most 512 variables"));
        }
        for (name, value) in &self.env {
            check_env_name(name).map_err(named("env"))?;
            if value.contains('\0') || value.len() > 128 << 10 {
                return Err(refuse(
                    "env",
                    format!("the value of `{name}` has a NUL byte or is over 128 KiB"),
                ));
            }
        }
        if let Some(cwd) = &self.cwd
            && (!cwd.starts_with('/') || cwd.contains('\0') || cwd.len() > 4096)
        {
            return Err(refuse("cwd", "must be an absolute path"));
        }
        if let Some(user) = &self.user
            && (user.is_empty()
                || user.len() > 128
                || user.chars().any(|c| c.is_control() || c.is_whitespace()))
        {
            return Err(refuse("user", "a name or number, optionally `user:group`"));
        }
        self.check_numbers()?;
        self.check_hooks()?;
        self.check_secrets()?;
        self.check_ports()?;
        if let Some(network) = &self.network {
            network.check("network")?;
        }
        check_services(&self.services)?;
        if let Some(policy) = &self.approvals {
            check_approval_policy(policy)?;
        }
        if self.notes.len() > 64
            || self.notes.iter().map(|(key, value)| key.len() + value.len()).sum::<usize>()
                > 64 << 10
        {
            return Err(refuse("notes", "at most 64, and 64 KiB in all"));
        }
        self.guard.check()?;
        for glob in &self.exclude {
            globset::Glob::new(glob).map_err(|error| refuse("exclude", error.to_string()))?;
        }
        Ok(())
    }

    fn check_numbers(&self) -> Result<(), BadConfig> {
        let Resources { millicpus, memory, pids, disk } = self.resources;
        if !(50..=1_024_000).contains(&millicpus) {
            return Err(refuse("vcpus", "between 0.05 and 1024"));
        }
        if !(16 << 20..=16u64 << 40).contains(&memory.0) {
            return Err(refuse("memory", "between 16M and 16T"));
        }
        if !(8..=4_194_304).contains(&pids) {
            return Err(refuse("pids", "between 8 and 4194304"));
        }
        if !(1 << 20..=1u64 << 50).contains(&disk.0) {
            return Err(refuse("disk", "between 1M and 1024T"));
        }
        if self.expires < Span::seconds(60) {
            return Err(refuse("expires", "at least 60s"));
        }
        for (field, span) in
            [("session_timeout", self.session_timeout), ("idle_timeout", self.idle_timeout)]
        {
            if span.is_some_and(|span| span < Span::seconds(1)) {
                return Err(refuse(field, "at least 1s; leave it out to have none"));
            }
        }
        if self.retention.keep_last.is_some_and(|count| count == 0 || count > 10_000) {
            return Err(refuse("keep_last", "between 1 and 10000; leave it out to keep all"));
        }
        for (field, span) in [
            ("snapshot_expires", self.retention.expires),
            ("kept_expires", self.retention.kept_expires),
        ] {
            if span.is_some_and(|span| span < Span::seconds(60)) {
                return Err(refuse(field, "at least 60s; leave it out to keep them"));
            }
        }
        Ok(())
    }

    fn check_ports(&self) -> Result<(), BadConfig> {
        let mut ports: Vec<u16> = self.ports.iter().map(|port| port.number).collect();
        ports.sort_unstable();
        ports.dedup();
        if self.ports.len() > 64 || ports.len() < self.ports.len() || ports.first() == Some(&0) {
            return Err(refuse("ports", "at most 64, between 1 and 65535, none of them twice"));
        }
        Ok(())
    }

    fn check_secrets(&self) -> Result<(), BadConfig> {
        if self.secrets.len() > 64 {
            return Err(refuse("secrets", "at most 64"));
        }
        let mut taken = BTreeSet::new();
        for SecretUse { env, .. } in &self.secrets {
            check_env_name(env).map_err(|error| refuse("secrets", error.to_string()))?;
            if self.env.contains_key(env) || !taken.insert(env) {
                return Err(refuse("secrets", format!("the variable `{env}` is set twice")));
            }
        }
        Ok(())
    }

    fn check_hooks(&self) -> Result<(), BadConfig> {
        let Hooks { on_create, on_resume, validate, validate_git } = &self.hooks;
        let plain = |path: &String| path.starts_with('/') && path.len() <= 4096;
        if validate_git.as_ref().is_some_and(|path| !plain(path) || path.contains('\0')) {
            return Err(refuse("hooks", "`validate_git` is the absolute path of a repository"));
        }
        if on_create.len() > 16 || on_resume.len() > 16 {
            return Err(refuse("hooks", "at most 16 of a kind"));
        }
        for hook in on_create.iter().chain(on_resume).chain(validate) {
            if hook.argv.is_empty() || hook.argv.iter().any(|arg| arg.contains('\0')) {
                return Err(refuse(
                    "hooks",
                    "a hook needs a program, and no argument may hold a NUL byte",
                ));
            }
            if hook.timeout.is_some_and(|span| span > Span::seconds(3600)) {
                return Err(refuse("hooks", "a hook may take an hour at the most"));
            }
        }
        Ok(())
    }
}

impl Config {
    /// Fills what must never be empty.
    #[must_use]
    pub fn with_defaults_for(mut self, project: &Name) -> Self {
        if self.owner.is_empty() {
            self.owner = project.to_string();
        }
        if self.purpose.is_empty() {
            self.purpose = "unspecified".to_owned();
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::{Config, Patch};
    use crate::model::{Port, Span};

    #[test]
    fn ports_notes_and_retention_are_checked() {
        let good = Patch {
            ports: Some((1..=64).map(Port::from).collect()),
            notes: [("k".to_owned(), Some("v".repeat((64 << 10) - 1)))].into(),
            kept_expires: Some(Some(Span::seconds(60))),
            ..Patch::default()
        };
        good.apply(Config::default()).unwrap();
        let notes = |count: usize, size: usize| {
            (0..count).map(|n| (n.to_string(), Some("v".repeat(size)))).collect()
        };
        for (field, patch) in [
            ("ports", Patch { ports: Some(vec![0.into()]), ..Patch::default() }),
            (
                "ports",
                Patch { ports: Some([80, 8080, 80].map(Port::from).to_vec()), ..Patch::default() },
            ),
            (
                "ports",
                Patch { ports: Some((1..=65).map(Port::from).collect()), ..Patch::default() },
            ),
            ("notes", Patch { notes: notes(65, 0), ..Patch::default() }),
            ("notes", Patch { notes: notes(1, 64 << 10), ..Patch::default() }),
            ("kept_expires", Patch { kept_expires: Some(Some(Span(59_999))), ..Patch::default() }),
        ] {
            let refused = patch.apply(Config::default()).unwrap_err();
            assert_eq!(refused.field, field, "{refused}");
        }
    }
}
