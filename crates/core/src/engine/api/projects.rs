//! Projects, keys and tokens.

use std::collections::BTreeMap;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::engine::tenancy::token::PortPass;
use crate::engine::{Caller, Engine, Result};
use crate::model::{Key, KeyId, Name, Project, Sandbox, SandboxId, Scope, Span, Timestamp};

impl Engine {
    /// Finds out who shows this secret, or a token that speaks for one.
    ///
    /// # Errors
    ///
    /// Returns [`Error::BadKey`](crate::engine::Error::BadKey) when no key has this secret, or not
    /// any more.
    pub fn authenticate(&self, secret: &str) -> Result<Caller> {
        self.parts.tenancy.authenticate(secret)
    }

    /// Whether a key is good: it was not revoked and has not expired.
    #[must_use]
    pub fn knows_key(&self, id: &KeyId) -> bool {
        self.parts.tenancy.knows_key(id)
    }

    /// Whether there is a project of this name.
    #[must_use]
    pub fn knows_project(&self, name: &Name) -> bool {
        self.parts.tenancy.require_project(name).is_ok()
    }

    /// Lists the projects.
    #[must_use]
    pub fn projects(&self) -> Vec<Project> {
        self.parts.tenancy.projects()
    }

    /// The projects that are locked, because their manifest is damaged or missing, and why.
    #[must_use]
    pub fn locked_projects(&self) -> BTreeMap<Name, String> {
        self.parts.tenancy.locked_projects()
    }

    /// Locks a project whose manifest should be there and is not.
    pub fn lock_project(&self, name: Name, reason: impl Into<String>) {
        self.parts.tenancy.lock_project(name, reason.into());
    }

    /// Makes a key for the operator of a server whose own project is locked. It is written down
    /// nowhere, and ends with this daemon; another one takes its place.
    ///
    /// # Panics
    ///
    /// Panics if the kernel gives no random bytes.
    #[must_use]
    pub fn emergency_key(&self, project: Name) -> String {
        self.parts.tenancy.emergency_key(project)
    }

    /// Makes a project.
    ///
    /// # Errors
    ///
    /// Returns [`Error::ProjectTaken`](crate::engine::Error::ProjectTaken) when there is one of that name.
    pub async fn create_project(&self, name: Name) -> Result<Project> {
        self.parts.tenancy.create_project(name).await
    }

    /// Removes a project that has no sandboxes, no drives and no runs under way, with its keys.
    ///
    /// # Errors
    ///
    /// Returns [`Error::ProjectInUse`](crate::engine::Error::ProjectInUse) or
    /// [`Error::ProjectRuns`](crate::engine::Error::ProjectRuns) while it has some.
    pub async fn delete_project(&self, name: &Name) -> Result<()> {
        let delete = async {
            self.parts.tenancy.delete_project(&self.parts.secrets, name).await?;
            self.parts.webhooks.remove_all(name).await
        };
        self.parts.runs.delete_project(name, delete).await
    }

    /// Makes a key; the second answer is its secret, which cannot be had again.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoProject`](crate::engine::Error::NoProject) when there is no such project.
    pub async fn create_key(
        &self,
        project: &Name,
        label: String,
        scope: Scope,
        expires: Option<Span>,
    ) -> Result<(Key, String)> {
        self.parts.tenancy.create_key(project, label, scope, false, expires).await
    }

    /// Makes a key that may approve, and accept runs.
    ///
    /// # Errors
    ///
    /// As [`create_key`](Self::create_key), and [`Error::Invalid`](crate::engine::Error::Invalid) for a key that may only
    /// look.
    pub async fn create_approver_key(
        &self,
        project: &Name,
        label: String,
        scope: Scope,
        expires: Option<Span>,
    ) -> Result<(Key, String)> {
        self.parts.tenancy.create_key(project, label, scope, true, expires).await
    }

    /// Ends a key.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoKey`](crate::engine::Error::NoKey) when the project has none of that id.
    pub async fn revoke_key(&self, project: &Name, id: &KeyId) -> Result<()> {
        self.parts.tenancy.revoke_key(project, id).await
    }

    /// Makes a token that speaks for the caller's key in the caller's project. `more` are claims for
    /// the token's reader; they decide nothing here.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Invalid`](crate::engine::Error::Invalid) when the span cannot be added to the clock, and
    /// [`Error::NoProject`](crate::engine::Error::NoProject) when the project is not there.
    pub fn issue_token(
        &self,
        caller: &Caller,
        scope: Scope,
        expires: Span,
        more: Map<String, Value>,
    ) -> Result<String> {
        self.parts.tenancy.issue_token(caller, scope, expires, more)
    }

    /// Makes a token that opens one private port of one sandbox, and nothing else. It ends with the
    /// caller's key.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Invalid`](crate::engine::Error::Invalid) when the span cannot be added to the clock.
    pub fn issue_port_token(
        &self,
        caller: &Caller,
        sandbox: &SandboxId,
        port: u16,
        expires: Span,
    ) -> Result<(String, Timestamp)> {
        self.parts.tenancy.issue_port_token(caller, sandbox, port, expires)
    }

    /// The keys and tokens of this server in a text, valid or not any more, each once: they must
    /// not be sent elsewhere. Of more than 16, the first ones.
    #[must_use]
    pub fn credentials_in(&self, text: &str) -> Vec<String> {
        self.parts.tenancy.credentials_in(text)
    }

    /// Returns the access that a token gives to a port of a sandbox.
    #[must_use]
    pub fn port_pass(&self, token: &str, sandbox: &Sandbox, port: u16) -> PortPass {
        self.parts.tenancy.port_pass(token, sandbox, port)
    }

    /// Signs a value that a front end wants to get back later, for this purpose only.
    #[must_use]
    pub fn sign(&self, purpose: &str, expires: Span, what: &impl Serialize) -> String {
        self.parts.tenancy.sign(purpose, expires, what)
    }

    /// What was signed for this purpose, if it was and has not expired.
    #[must_use]
    pub fn signed<T: DeserializeOwned>(&self, purpose: &str, token: &str) -> Option<T> {
        self.parts.tenancy.signed(purpose, token)
    }
}
