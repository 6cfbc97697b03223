//! Calls about sandboxes as a whole: create, list, start, stop, fork, checkpoint, roll back; and about their sessions.

use crate::paging::Pages;
use crate::query::Target;
use crate::transport::Call;
use crate::types::{
    Checkpoint, Class, CreateSandbox, Delete, Deleted, Extend, Fork, Forks, Opened, Paged, Pause,
    Paused, Quarantine, Rollback, RolledBack, Sandbox, SandboxStats, Session, Snapshot, Start,
    State, Stop, Stopped, Tree, UpdateSandbox, Why,
};
use crate::{Client, Error};

/// The header that makes a retry harmless.
pub(crate) const IDEMPOTENCY: &str = "idempotency-key";

/// Which sandboxes to list. All of what is set must match.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ListSandboxes {
    /// With all these tags.
    pub tags: Vec<(String, String)>,
    /// In this state.
    pub state: Option<State>,
    /// Of this class.
    pub class: Option<Class>,
    /// Whose name begins like this.
    pub name_prefix: Option<String>,
    /// How many to a page; the server's choice if absent.
    pub limit: Option<u32>,
}

// Every call fails with what the server says (`Error::Api`) or with what the way there says.
#[allow(clippy::missing_errors_doc)]
impl Client {
    /// Creates a sandbox, or gets it if the request says so. `idempotency` makes a retry harmless.
    pub async fn create(
        &self,
        request: &CreateSandbox,
        idempotency: Option<&str>,
    ) -> Result<Opened, Error> {
        let call = Call::post(Target::new(&["sandboxes"])).header(IDEMPOTENCY, idempotency);
        self.transport.json(call.json(request)?).await
    }

    /// Gets a sandbox. Never wakes it.
    pub async fn sandbox(&self, name: &str) -> Result<Sandbox, Error> {
        self.transport.json(Call::get(sandbox(name, &[]))).await
    }

    /// What a sandbox uses at this moment. Never wakes it.
    pub async fn stats(&self, name: &str) -> Result<SandboxStats, Error> {
        self.transport.json(Call::get(sandbox(name, &["stats"]))).await
    }

    /// What the running sandboxes of the project use at this moment.
    pub async fn all_stats(&self) -> Result<Vec<SandboxStats>, Error> {
        let page: Paged<SandboxStats> =
            self.transport.json(Call::get(Target::new(&["stats"]))).await?;
        Ok(page.items)
    }

    /// Lists sandboxes.
    #[must_use]
    pub fn sandboxes(&self, filter: &ListSandboxes) -> Pages<Sandbox> {
        let filter = filter.clone();
        Pages::new(self, move || {
            let mut target = Target::new(&["sandboxes"])
                .maybe("state", filter.state.map(word))
                .maybe("class", filter.class.map(word))
                .maybe("name_prefix", filter.name_prefix.as_ref())
                .maybe("limit", filter.limit.map(|limit| limit.to_string()));
            for (key, value) in &filter.tags {
                target = target.with("tag", format!("{key}={value}"));
            }
            target
        })
    }

    /// Wakes a sandbox; one that is awake already stays so.
    pub async fn start(&self, name: &str, request: &Start) -> Result<Opened, Error> {
        self.transport.json(Call::post(sandbox(name, &["start"])).json(request)?).await
    }

    /// Stops a sandbox, and answers when what it wrote is safe.
    pub async fn stop(&self, name: &str, idempotency: Option<&str>) -> Result<Stopped, Error> {
        let call = Call::post(sandbox(name, &["stop"])).header(IDEMPOTENCY, idempotency);
        self.transport.json(call).await
    }

    /// Stops a sandbox, with a decision about what the guard finds.
    pub async fn stop_deciding(
        &self,
        name: &str,
        request: &Stop,
        idempotency: Option<&str>,
    ) -> Result<Stopped, Error> {
        let call = Call::post(sandbox(name, &["stop"])).header(IDEMPOTENCY, idempotency);
        self.transport.json(call.json(request)?).await
    }

    /// Lists what the guard keeps aside, newest first. For operators.
    pub async fn quarantine(&self) -> Result<Vec<Quarantine>, Error> {
        let page: Paged<Quarantine> =
            self.transport.json(Call::get(Target::new(&["quarantine"]))).await?;
        Ok(page.items)
    }

    /// Removes what the guard keeps aside, for good. For operators.
    pub async fn delete_quarantine(&self, id: &str) -> Result<Quarantine, Error> {
        let target = Target::new(&["quarantine", id]);
        self.transport.json(Call::new(hyper::Method::DELETE, target)).await
    }

    /// Changes settings.
    pub async fn update(&self, name: &str, change: &UpdateSandbox) -> Result<Sandbox, Error> {
        let call = Call::new(hyper::Method::PATCH, sandbox(name, &[]));
        self.transport.json(call.json(change)?).await
    }

    /// Deletes a sandbox, in whatever state it is, and its snapshots but for those others stand on.
    pub async fn delete(&self, name: &str, idempotency: Option<&str>) -> Result<Deleted, Error> {
        let call = Call::new(hyper::Method::DELETE, sandbox(name, &[]));
        self.transport.json(call.header(IDEMPOTENCY, idempotency)).await
    }

    /// Deletes a sandbox, in whatever state it is, as it is wished.
    pub async fn delete_as(
        &self,
        name: &str,
        wish: Delete,
        idempotency: Option<&str>,
    ) -> Result<Deleted, Error> {
        let target = sandbox(name, &[]);
        let target = target.flag("keep_snapshots", wish.keep_snapshots).flag("force", wish.force);
        let call = Call::new(hyper::Method::DELETE, target);
        self.transport.json(call.header(IDEMPOTENCY, idempotency)).await
    }

    /// Deletes a sandbox that does not run and was not used after a time, like the `used_at` of a list.
    pub async fn delete_unused(&self, name: &str, since: &str) -> Result<Deleted, Error> {
        let target = sandbox(name, &[]).with("unused_since", since);
        self.transport.json(Call::new(hyper::Method::DELETE, target)).await
    }

    /// Makes a new sandbox from the present state of another, or from one of its snapshots.
    pub async fn fork(
        &self,
        name: &str,
        request: &Fork,
        idempotency: Option<&str>,
    ) -> Result<Opened, Error> {
        let call = Call::post(sandbox(name, &["fork"])).header(IDEMPOTENCY, idempotency);
        self.transport.json(call.json(request)?).await
    }

    /// Makes `count` new sandboxes from one snapshot of another; reports those that could not be
    /// made.
    pub async fn fork_many(
        &self,
        name: &str,
        request: &Fork,
        idempotency: Option<&str>,
    ) -> Result<Forks, Error> {
        let call = Call::post(sandbox(name, &["fork"])).header(IDEMPOTENCY, idempotency);
        self.transport.json(call.json(request)?).await
    }

    /// Pauses a sandbox, and answers when its memory and files are safe.
    pub async fn pause(&self, name: &str, request: &Pause) -> Result<Paused, Error> {
        self.transport.json(Call::post(sandbox(name, &["pause"])).json(request)?).await
    }

    /// Returns why a sandbox is where it is. Never wakes it.
    pub async fn why(&self, name: &str) -> Result<Why, Error> {
        self.transport.json(Call::get(sandbox(name, &["why"]))).await
    }

    /// Takes a snapshot without stopping anything.
    pub async fn checkpoint(&self, name: &str, request: &Checkpoint) -> Result<Snapshot, Error> {
        self.transport.json(Call::post(sandbox(name, &["checkpoint"])).json(request)?).await
    }

    /// Goes back to a snapshot; the present state is kept as a snapshot first.
    pub async fn rollback(&self, name: &str, request: &Rollback) -> Result<RolledBack, Error> {
        self.transport.json(Call::post(sandbox(name, &["rollback"])).json(request)?).await
    }

    /// Gives the session under way more time.
    pub async fn extend(&self, name: &str, request: &Extend) -> Result<Session, Error> {
        self.transport.json(Call::post(sandbox(name, &["extend"])).json(request)?).await
    }

    /// Lists sessions, the newest first.
    #[must_use]
    pub fn sessions(&self, name: &str, limit: Option<u32>) -> Pages<Session> {
        let name = name.to_owned();
        Pages::new(self, move || {
            sandbox(&name, &["sessions"]).maybe("limit", limit.map(|limit| limit.to_string()))
        })
    }

    /// Everything connected with a sandbox by forks and snapshots.
    pub async fn tree(&self, name: &str) -> Result<Tree, Error> {
        self.transport.json(Call::get(sandbox(name, &["tree"]))).await
    }
}

/// A target under a sandbox.
pub(crate) fn sandbox(name: &str, rest: &[&str]) -> Target {
    let mut parts = vec!["sandboxes", name];
    parts.extend(rest);
    Target::new(&parts)
}

/// The word that stands for a value in JSON, for use in a query.
pub(crate) fn word(value: impl serde::Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(word)) => word,
        other => unreachable!("states, classes and verdicts are words, not {other:?}"),
    }
}
