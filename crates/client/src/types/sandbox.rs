//! Sandboxes, and what is asked of them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::quantity::given;
use super::{Finding, Guard, Mount, Network, Port, SecretUse, Service, SetGuard, Size, Span};

/// How long a sandbox is meant to live, and how it is governed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// Never snapshotted.
    Ephemeral,
    /// Kept for hours or days.
    Resumable,
    /// Kept on purpose, governed.
    Workspace,
}

/// Where a sandbox is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Files only: no process, no memory. It wakes on the next call that needs it.
    Stopped,
    /// It is coming up.
    Starting,
    /// It takes commands.
    Running,
    /// Memory, processes and files are kept; it wakes where it was on the next call that needs it.
    Paused,
    /// It is being ended and its files kept.
    Stopping,
    /// Something broke. The last good snapshot is safe; start it again or delete it.
    Failed,
    /// Gone.
    Deleted,
}

/// What becomes of a sandbox that nobody uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnIdle {
    /// It goes on running.
    Run,
    /// It is paused: memory, processes and files are kept. For drivers that keep memory.
    Pause,
    /// It is stopped: files are kept.
    Stop,
}

/// What to do when the name is taken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum IfExists {
    /// Answer 409.
    #[default]
    Fail,
    /// Answer with the sandbox that has it.
    Get,
}

/// A command the server runs at a turning point of a sandbox's life.
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
    /// Run in order once, when the sandbox was created. The first that fails ends the list.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub on_create: Vec<Hook>,
    /// Run in order at every resume. A failure is reported and hides nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub on_resume: Vec<Hook>,
    /// Run before every stop and after every resume: its output must be the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validate: Option<Hook>,
}

/// Defines a request that carries a sandbox's settings beside its own fields. They lie side by side
/// in one object, and serde cannot both flatten and refuse unknown fields, hence a macro.
macro_rules! with_settings {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* pub $field:ident: $kind:ty,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
        #[serde(deny_unknown_fields)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $kind,)*
            /// What it starts from when it has no snapshot: `host`, a name, a registry reference.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub image: Option<String>,
            /// The isolation backend: `container` or `microvm`. Changed from the next session on; a sandbox that is
            /// paused has to be stopped first.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub driver: Option<String>,
            /// How it is governed.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub class: Option<Class>,
            /// Whether a stop makes a snapshot.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub persistent: Option<bool>,
            /// Who answers for it.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub owner: Option<String>,
            /// What it is for.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub purpose: Option<String>,
            /// How long after its last use it goes away.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub expires: Option<Span>,
            /// Labels to find it by; replaces all there were.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub tags: Option<BTreeMap<String, String>>,
            /// Environment of every command; replaces all there was.
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
            /// What a session may add to the disk.
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
            /// What happens after that; null for what the driver does best: pause where memory is kept, else stop.
            #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
            #[schema(value_type = Option<OnIdle>)]
            pub on_idle: Option<Option<OnIdle>>,
            /// Commands at turning points; replaces all there were.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub hooks: Option<Hooks>,
            /// How long after it was made a snapshot goes, unless it is the current one; null to keep them.
            #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
            #[schema(value_type = Option<Span>)]
            pub snapshot_expires: Option<Option<Span>>,
            /// How many snapshots are kept, the current one included; null to keep all.
            #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
            #[schema(value_type = Option<u32>)]
            pub keep_last: Option<Option<u32>>,
            /// Paths that never enter a snapshot, as globs from the root: `tmp/**`.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub exclude: Option<Vec<String>>,
            /// Drives by the path they are mounted at, from the next session on: at most four; replaces
            /// all there were. A fork has none but these.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub mounts: Option<BTreeMap<String, Mount>>,
            /// What it may reach, at once; null for what its project says.
            #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
            #[schema(value_type = Option<Network>)]
            pub network: Option<Option<Network>>,
            /// Secrets that its commands have a placeholder of, which the network puts in its place; replaces
            /// all there were.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub secrets: Option<Vec<SecretUse>>,
            /// Ports that may be reached from outside; replaces all there were.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub ports: Option<Vec<Port>>,
            /// Whether a request for a port wakes it, unless the port says no.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub wake_on_request: Option<bool>,
            /// Commands that are there again after every resume; replaces all there were.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub services: Option<Vec<Service>>,
            /// What must not enter a snapshot unseen.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub guard: Option<SetGuard>,
        }

        impl $name {
            /// Takes the settings out, as a change to apply.
            #[must_use]
            pub fn take_settings(&mut self) -> UpdateSandbox {
                UpdateSandbox {
                    image: self.image.take(),
                    driver: self.driver.take(),
                    class: self.class.take(),
                    persistent: self.persistent.take(),
                    owner: self.owner.take(),
                    purpose: self.purpose.take(),
                    expires: self.expires.take(),
                    tags: self.tags.take(),
                    env: self.env.take(),
                    cwd: self.cwd.take(),
                    user: self.user.take(),
                    vcpus: self.vcpus.take(),
                    memory: self.memory.take(),
                    pids: self.pids.take(),
                    disk: self.disk.take(),
                    session_timeout: self.session_timeout.take(),
                    idle_timeout: self.idle_timeout.take(),
                    on_idle: self.on_idle.take(),
                    hooks: self.hooks.take(),
                    snapshot_expires: self.snapshot_expires.take(),
                    keep_last: self.keep_last.take(),
                    exclude: self.exclude.take(),
                    mounts: self.mounts.take(),
                    network: self.network.take(),
                    secrets: self.secrets.take(),
                    ports: self.ports.take(),
                    wake_on_request: self.wake_on_request.take(),
                    services: self.services.take(),
                    guard: self.guard.take(),
                }
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
        /// Its name; made up if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub name: Option<String>,
        /// What to do when the name is taken.
        #[serde(default)]
        pub if_exists: IfExists,
        /// Whether it is started at once; otherwise it wakes on the first call that needs it.
        #[serde(default)]
        pub start: bool,
        /// A snapshot to start from, instead of an image.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub from: Option<String>,
    }
}

with_settings! {
    /// A fork: a new sandbox on the same files, and of a machine that keeps memory and is awake or paused, with the
    /// same memory and processes. Absent settings are the source's.
    Fork {
        /// The new sandbox's name; made up if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub name: Option<String>,
        /// How many, all from one snapshot: `name-1`, `name-2` and so on. The answer is a list then.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(minimum = 1, maximum = 100)]
        pub count: Option<u32>,
        /// A snapshot of the source; its present state if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub from: Option<String>,
        /// Refuse with 412 unless the source is at this generation.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub expect_generation: Option<u64>,
        /// Whether the fork is started at once.
        #[serde(default)]
        pub start: bool,
    }
}

/// A start. An empty body will do.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Start {
    /// Refuse with 412 unless the sandbox is at this generation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expect_generation: Option<u64>,
}

/// A pause. An empty body will do.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Pause {
    /// Refuse with 412 unless the sandbox is at this generation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expect_generation: Option<u64>,
}

/// A checkpoint. An empty body will do.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Checkpoint {
    /// What people call it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
}

/// A rollback.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Rollback {
    /// The snapshot to go back to.
    pub to: String,
    /// Refuse with 412 unless the sandbox is at this generation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expect_generation: Option<u64>,
}

/// More time for the session under way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Extend {
    /// How much more.
    pub by: Span,
}

/// What the commands of a sandbox keep on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CommandsKept {
    /// How many are on record.
    pub count: u64,
    /// The disk space that records and logs take.
    pub bytes: u64,
}

/// What a sandbox may use.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Resources {
    /// CPUs.
    pub vcpus: f64,
    /// Memory, swap included.
    pub memory_bytes: u64,
    /// Processes and threads.
    pub pids: u32,
    /// What a session may add to the disk.
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
}

/// A named, durable machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
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
    /// Why its last session began from its files though it had memory to go on with. Told of one sandbox, not in lists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback: Option<String>,
    /// What its commands keep on disk. Told of one sandbox, and in lists as far as it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commands: Option<CommandsKept>,
    /// How many snapshots were acknowledged.
    pub generation: u64,
    /// What the next session starts from; the image if absent.
    pub current_snapshot: Option<String>,
    /// Where it was forked from.
    pub forked_from: Option<Lineage>,
    /// The session that is under way, or the last one.
    pub session: Option<String>,
    /// What it started from first.
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
    /// Labels to find it by.
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
    /// What happens after that; what the driver does best if null: pause where memory is kept, else stop.
    #[serde(default)]
    pub on_idle: Option<OnIdle>,
    /// Commands at turning points.
    pub hooks: Hooks,
    /// How long after it was made a snapshot goes.
    pub snapshot_expires_ms: Option<u64>,
    /// How many snapshots are kept.
    pub keep_last: Option<u32>,
    /// Paths that never enter a snapshot.
    pub exclude: Vec<String>,
    /// Drives by the path they are mounted at.
    #[serde(default)]
    pub mounts: BTreeMap<String, Mount>,
    /// What it may reach; what its project says if null. Values of headers are not told.
    #[serde(default)]
    pub network: Option<Network>,
    /// Secrets that its commands have a placeholder of.
    #[serde(default)]
    pub secrets: Vec<SecretUse>,
    /// Ports that may be reached from outside.
    #[serde(default)]
    pub ports: Vec<Port>,
    /// Whether a request for a port wakes it, unless the port says no.
    #[serde(default)]
    pub wake_on_request: bool,
    /// Commands that are there again after every resume.
    #[serde(default)]
    pub services: Vec<Service>,
    /// What must not enter a snapshot unseen.
    pub guard: Guard,
    /// What the guard found in what the last session wrote, when nothing of it is sealed until somebody
    /// decides.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub findings: Vec<Finding>,
    /// How long after its last use it goes away.
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
        for text in ["{}", r#"{"cwd":null}"#, r#"{"idle_timeout":"5m"}"#] {
            let change: UpdateSandbox = serde_json::from_str(text).unwrap();
            assert_eq!(serde_json::to_string(&change).unwrap(), text);
        }
    }

    #[test]
    fn unknown_fields_are_named() {
        let error = serde_json::from_str::<CreateSandbox>(r#"{"nmae":"x"}"#).unwrap_err();
        assert!(error.to_string().contains("unknown field `nmae`"), "{error}");
    }
}
