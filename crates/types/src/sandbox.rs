//! Sandboxes: requests, responses and settings.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::quantity::given;
use super::{
    ApprovalPolicy, Finding, ForkOutcome, Guard, Mount, Network, OnAccept, Port, SecretUse,
    Service, SessionChanges, SetGuard, Size, Span,
};

/// The lifetime class of a sandbox.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// Never snapshotted.
    Ephemeral,
    /// Deleted 30 days after its last use, unless set otherwise.
    #[default]
    Resumable,
    /// Deleted 365 days after its last use, unless set otherwise.
    Workspace,
}

impl Class {
    /// How long after its last use a sandbox of this class is deleted, unless the request says otherwise.
    #[must_use]
    pub fn default_expiry(self) -> Span {
        match self {
            Self::Ephemeral => Span::days(1),
            Self::Resumable => Span::days(30),
            Self::Workspace => Span::days(365),
        }
    }
}

/// The state of a sandbox.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Files only: no process, no memory. It wakes on the next call that needs it.
    #[default]
    Stopped,
    /// It is being started.
    Starting,
    /// It runs commands.
    Running,
    /// Memory, processes and files are saved; it resumes on the next call that needs it.
    Paused,
    /// It is being stopped, and its files are saved.
    Stopping,
    /// An operation failed. The last good snapshot is safe; start the sandbox again or delete it.
    Failed,
    /// It was deleted.
    Deleted,
}

/// The action after the idle timeout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnIdle {
    /// Continue to run.
    Run,
    /// Pause: save memory, processes and files. For drivers that can save memory.
    Pause,
    /// Stop: save files.
    Stop,
}

/// The action if the name is taken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum IfExists {
    /// Fail with 409.
    #[default]
    Fail,
    /// Return the existing sandbox.
    Get,
}

/// A command that the server runs when a sandbox is created, resumed or stopped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Hook {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// How long it may take; 60 seconds if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<Span>,
}

/// The hooks of a sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Hooks {
    /// Run in order once, after creation. The first failure ends the list.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub on_create: Vec<Hook>,
    /// Run in order at every resume. Failures are reported; the resume continues.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub on_resume: Vec<Hook>,
    /// Run before every stop and after every resume; a difference of its output is reported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validate: Option<Hook>,
    /// The absolute path of a Git repository. Its commit and its changed files are compared in the same way. Needs `git` and
    /// `sh` inside.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validate_git: Option<String>,
}

/// Defines a request that has fields of its own and all settings of a sandbox. Both are side by side in one
/// JSON object, and serde cannot both flatten and reject unknown fields, hence a macro.
///
/// This is the only list of the settings in requests. `docs/ARCHITECTURE.md` says how to add one.
macro_rules! with_settings {
    ($($request:tt)*) => {
        define_request! {
            [$($request)*]
            /// The image to start from if there is no snapshot: `host`, a name, or a registry reference.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub image: Option<String>,
            /// The isolation backend: `container` or `microvm`. Changed from the next session on; a sandbox that is
            /// paused has to be stopped first.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub driver: Option<String>,
            /// The lifetime class.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub class: Option<Class>,
            /// Whether a stop makes a snapshot.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub persistent: Option<bool>,
            /// The owner, for people.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub owner: Option<String>,
            /// The purpose, for people.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub purpose: Option<String>,
            /// How long after its last use it is deleted.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub expires: Option<Span>,
            /// Tags to filter by; replaces the list.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub tags: Option<BTreeMap<String, String>>,
            /// Environment of every command; replaces all variables.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub env: Option<BTreeMap<String, String>>,
            /// Working directory of every command; null for the image's.
            #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
            #[schema(value_type = Option<String>)]
            pub cwd: Option<Option<String>>,
            /// User of every command; null for the image's.
            #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
            #[schema(value_type = Option<String>)]
            pub user: Option<Option<String>>,
            /// CPUs, fractions allowed.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub vcpus: Option<f64>,
            /// Memory, swap included.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub memory: Option<Size>,
            /// Processes and threads.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub pids: Option<u32>,
            /// Disk space that a session may write.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub disk: Option<Size>,
            /// How long one session may last; null for no limit.
            #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
            #[schema(value_type = Option<Span>)]
            pub session_timeout: Option<Option<Span>>,
            /// How long a session lasts with no command alive and no connection open; null for no limit.
            #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
            #[schema(value_type = Option<Span>)]
            pub idle_timeout: Option<Option<Span>>,
            /// The action after the idle timeout; null to pause if the driver can save memory, otherwise stop.
            #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
            #[schema(value_type = Option<OnIdle>)]
            pub on_idle: Option<Option<OnIdle>>,
            /// Hooks; replaces all hooks.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub hooks: Option<Hooks>,
            /// How long after its last use a snapshot is deleted, unless it is the current one; null to keep snapshots.
            #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
            #[schema(value_type = Option<Span>)]
            pub snapshot_expires: Option<Option<Span>>,
            /// How many snapshots are kept, the current one included; null to keep all.
            #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
            #[schema(value_type = Option<u32>)]
            pub keep_last: Option<Option<u32>>,
            /// Paths to leave out of snapshots, as globs from the root: `tmp/**`.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub exclude: Option<Vec<String>>,
            /// Drives by the path they are mounted at, from the next session on: at most four; replaces
            /// all there were. A fork has none but these.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub mounts: Option<BTreeMap<String, Mount>>,
            /// The network policy, applied immediately; null for the project's default.
            #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
            #[schema(value_type = Option<Network>)]
            pub network: Option<Option<Network>>,
            /// Secrets that its commands have a placeholder of, which the network puts in its place; replaces
            /// all there were.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub secrets: Option<Vec<SecretUse>>,
            /// Published ports; replaces the list.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub ports: Option<Vec<Port>>,
            /// Whether requests to published ports wake the sandbox, unless the port disables it.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub wake_on_request: Option<bool>,
            /// Services: commands that run in every session; replaces the list.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub services: Option<Vec<Service>>,
            /// The guard: what to do about secrets and junk in snapshots.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub guard: Option<SetGuard>,
            /// What somebody has to approve first; null for nothing. To change or remove it takes a key that may approve.
            #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
            #[schema(value_type = Option<ApprovalPolicy>)]
            pub approvals: Option<Option<ApprovalPolicy>>,
        }
    };
}

macro_rules! define_request {
    (
        [$(#[$doc:meta])* $name:ident { $($(#[$own_attr:meta])* pub $own:ident: $own_type:ty,)* }]
        $($(#[$attr:meta])* pub $setting:ident: $type:ty,)*
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
        #[serde(deny_unknown_fields)]
        pub struct $name {
            $($(#[$own_attr])* pub $own: $own_type,)*
            $($(#[$attr])* pub $setting: $type,)*
        }

        impl $name {
            /// Takes the settings out of the request.
            #[must_use]
            pub fn take_settings(&mut self) -> UpdateSandbox {
                UpdateSandbox { $($setting: self.$setting.take(),)* }
            }

            /// Replaces all settings of the request.
            #[must_use]
            pub fn with_settings(mut self, settings: UpdateSandbox) -> Self {
                $(self.$setting = settings.$setting;)*
                self
            }
        }
    };
}

with_settings! {
    /// A change to a sandbox's settings. Absent fields stay as they are.
    UpdateSandbox {}
}

with_settings! {
    /// A sandbox to create, or to get.
    CreateSandbox {
        /// The name; generated if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub name: Option<String>,
        /// The action if the name is taken.
        #[serde(default)]
        pub if_exists: IfExists,
        /// Whether to start it immediately, which is the default; otherwise it starts on the first call that needs it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub start: Option<bool>,
        /// A snapshot to start from, instead of an image.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub from: Option<String>,
    }
}

with_settings! {
    /// A fork: a new sandbox on the same files, and of a machine that keeps memory and is awake or paused, with the
    /// same memory and processes. Absent settings are the source's.
    Fork {
        /// The name of the new sandbox; generated if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub name: Option<String>,
        /// How many, all from one snapshot: `name-1`, `name-2` and so on. The answer is a list then.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(minimum = 1, maximum = 100)]
        pub count: Option<u32>,
        /// A snapshot of the source; its present state if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub from: Option<String>,
        /// Fail with 412 unless the source is at this generation.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub expect_generation: Option<u64>,
        /// Whether to start the fork immediately.
        #[serde(default)]
        pub start: bool,
        /// What becomes of the fork once it is accepted: promoted, or all of it merged.
        #[serde(default, skip_serializing_if = "OnAccept::is_keep")]
        pub on_accept: OnAccept,
    }
}

/// A start. The body may be empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Start {
    /// Fail with 412 unless the sandbox is at this generation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expect_generation: Option<u64>,
}

/// A pause. The body may be empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Pause {
    /// Fail with 412 unless the sandbox is at this generation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expect_generation: Option<u64>,
}

/// A checkpoint. The body may be empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Checkpoint {
    /// A label, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
}

/// A rollback.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Rollback {
    /// The snapshot to return to.
    pub to: String,
    /// Fail with 412 unless the sandbox is at this generation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expect_generation: Option<u64>,
}

/// An extension of the current session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Extend {
    /// How much more.
    pub by: Span,
}

/// The disk usage of a sandbox's command records and logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CommandsKept {
    /// How many are on record.
    pub count: u64,
    /// The disk space that records and logs take.
    pub bytes: u64,
}

/// What a sandbox may use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Resources {
    /// CPUs.
    pub vcpus: f64,
    /// Memory, swap included.
    pub memory_bytes: u64,
    /// Processes and threads.
    pub pids: u32,
    /// Disk space that a session may write.
    pub disk_bytes: u64,
}

/// Where a fork came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Lineage {
    /// The source's id.
    pub sandbox_id: String,
    /// The source's name at the time.
    pub name: String,
    /// The snapshot; absent when the source had none and both stand on the image.
    pub snapshot: Option<String>,
    /// The source's generation.
    pub generation: u64,
    /// The forks that were made together with it, by the name they begin with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// What becomes of the fork once it is accepted.
    #[serde(default, skip_serializing_if = "OnAccept::is_keep")]
    pub on_accept: OnAccept,
}

/// What a running sandbox would lose if its host went down now.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Unsaved {
    /// Files that were created, modified or deleted.
    pub files: u64,
    /// Disk space of the created and modified ones.
    pub bytes: u64,
    /// When that was looked at: after the last command that ended, or later.
    #[schema(format = DateTime)]
    pub as_of: String,
}

/// A named, durable machine.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Sandbox {
    /// Its name, unique in the project.
    pub name: String,
    /// Its id.
    pub id: String,
    /// The project it belongs to.
    pub project: String,
    /// Where it is.
    pub state: State,
    /// Why it is in the state `failed`.
    pub failure: Option<String>,
    /// Why its last session started from files although there was memory. Not in lists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback: Option<String>,
    /// Whether its last session found it as it was at the stop before; absent without a `validate` hook. Not in lists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub valid: Option<bool>,
    /// The disk usage of its command records and logs. In lists only if already known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commands: Option<CommandsKept>,
    /// How many snapshots were acknowledged.
    pub generation: u64,
    /// What the next session starts from; the image if absent.
    pub current_snapshot: Option<String>,
    /// When that snapshot was taken. In `GET` of one sandbox and in lists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    pub saved_at: Option<String>,
    /// What a running sandbox has written since then. In `GET` of one sandbox and in lists, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unsaved: Option<Unsaved>,
    /// What was changed during the session under way, or the last one. Not in lists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_changes: Option<SessionChanges>,
    /// Where it was forked from.
    pub forked_from: Option<Lineage>,
    /// What became of its work, if it is a fork that was promoted or merged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<ForkOutcome>,
    /// The current session, or the last one.
    pub session: Option<String>,
    /// The image it was created from.
    pub image: String,
    /// The isolation backend.
    pub driver: String,
    /// The lifetime class.
    pub class: Class,
    /// Whether a stop makes a snapshot.
    pub persistent: bool,
    /// The owner, for people.
    pub owner: String,
    /// The purpose, for people.
    pub purpose: String,
    /// Tags to filter by.
    pub tags: BTreeMap<String, String>,
    /// Environment of every command.
    pub env: BTreeMap<String, String>,
    /// Working directory of every command; the image's if absent.
    pub cwd: Option<String>,
    /// User of every command; the image's if absent.
    pub user: Option<String>,
    /// What it may use.
    pub resources: Resources,
    /// How long one session may last.
    pub session_timeout_ms: Option<u64>,
    /// How long a session lasts with no command alive and no connection open.
    pub idle_timeout_ms: Option<u64>,
    /// The action after the idle timeout; if null, pause if the driver can save memory, otherwise stop.
    #[serde(default)]
    pub on_idle: Option<OnIdle>,
    /// Hooks.
    pub hooks: Hooks,
    /// How long after its last use a snapshot is deleted.
    pub snapshot_expires_ms: Option<u64>,
    /// How many snapshots are kept.
    pub keep_last: Option<u32>,
    /// Paths to leave out of snapshots.
    pub exclude: Vec<String>,
    /// Drives by the path they are mounted at.
    #[serde(default)]
    pub mounts: BTreeMap<String, Mount>,
    /// The network policy; the project's default if null. Values of headers are not shown.
    #[serde(default)]
    pub network: Option<Network>,
    /// Secrets that its commands have a placeholder of.
    #[serde(default)]
    pub secrets: Vec<SecretUse>,
    /// Published ports.
    #[serde(default)]
    pub ports: Vec<Port>,
    /// Whether requests to published ports wake the sandbox, unless the port disables it.
    #[serde(default)]
    pub wake_on_request: bool,
    /// Services: commands that run in every session.
    #[serde(default)]
    pub services: Vec<Service>,
    /// The guard: what to do about secrets and junk in snapshots.
    pub guard: Guard,
    /// What somebody has to approve first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub approvals: Option<ApprovalPolicy>,
    /// What the guard found in what the last session wrote, when nothing of it is sealed until somebody
    /// decides.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub findings: Vec<Finding>,
    /// How long after its last use it is deleted.
    pub expires_ms: u64,
    /// When that is, as things stand.
    #[schema(format = DateTime)]
    pub expires_at: String,
    /// When it was created.
    #[schema(format = DateTime)]
    pub created_at: String,
    /// When its settings or state changed.
    #[schema(format = DateTime)]
    pub updated_at: String,
    /// When a session last began or ended.
    #[schema(format = DateTime)]
    pub used_at: String,
}

#[cfg(test)]
mod tests {
    use super::{CreateSandbox, UpdateSandbox};

    #[test]
    fn absent_null_and_value_are_three_things() {
        let read = |text| serde_json::from_str::<UpdateSandbox>(text).unwrap().cwd;
        assert_eq!(read("{}"), None);
        assert_eq!(read(r#"{"cwd":null}"#), Some(None));
        assert_eq!(read(r#"{"cwd":"/work"}"#), Some(Some("/work".to_owned())));
        let written = |text| {
            serde_json::to_string(&serde_json::from_str::<UpdateSandbox>(text).unwrap()).unwrap()
        };
        for text in ["{}", r#"{"cwd":null}"#, r#"{"idle_timeout":300000}"#] {
            assert_eq!(written(text), text);
        }
        assert_eq!(written(r#"{"idle_timeout":"5m"}"#), r#"{"idle_timeout":300000}"#);
    }

    #[test]
    fn unknown_fields_are_named() {
        let error = serde_json::from_str::<CreateSandbox>(r#"{"nmae":"x"}"#).unwrap_err();
        assert!(error.to_string().contains("unknown field `nmae`"), "{error}");
    }
}
