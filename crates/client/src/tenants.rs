//! Calls about projects and their keys, and about the server: health, disk usage, damage, verification.

use hyper::Method;

use crate::query::Target;
use crate::transport::Call;
use crate::types::{
    CreateKey, CreateProject, Damage, Fsck, FsckRequest, Health, IssueToken, Key, NewKey, Paged,
    Project, Readiness, SpaceUsage, Token, WhoAmI,
};
use crate::{Client, Error};

// Every call fails with what the server says (`Error::Api`) or with what the way there says.
#[allow(clippy::missing_errors_doc)]
impl Client {
    /// Asks whether the server is up. Needs no key.
    pub async fn health(&self) -> Result<Health, Error> {
        self.transport.json(Call::get("/healthz")).await
    }

    /// Asks whether the server takes work. Needs no key.
    pub async fn ready(&self) -> Result<Readiness, Error> {
        self.transport.json(Call::get("/readyz")).await
    }

    /// Asks whom the key acts for.
    pub async fn whoami(&self) -> Result<WhoAmI, Error> {
        self.transport.json(Call::get(Target::new(&["whoami"]))).await
    }

    /// What lies on the server's disk.
    pub async fn usage(&self) -> Result<SpaceUsage, Error> {
        self.transport.json(Call::get(Target::new(&["usage"]))).await
    }

    /// Everything the server knows to be wrong with stored data.
    pub async fn damage(&self) -> Result<Vec<Damage>, Error> {
        let page: Paged<Damage> = self.transport.json(Call::get(Target::new(&["damage"]))).await?;
        Ok(page.items)
    }

    /// Has the server check its data directory; with `verify` it reads every file of every layer.
    pub async fn fsck(&self, verify: bool) -> Result<Fsck, Error> {
        let request = FsckRequest { verify };
        self.transport.json(Call::post(Target::new(&["fsck"])).json(&request)?).await
    }

    /// Lists projects.
    pub async fn projects(&self) -> Result<Vec<Project>, Error> {
        let page: Paged<Project> =
            self.transport.json(Call::get(Target::new(&["projects"]))).await?;
        Ok(page.items)
    }

    /// Makes a project.
    pub async fn create_project(&self, request: &CreateProject) -> Result<Project, Error> {
        self.transport.json(Call::post(Target::new(&["projects"])).json(request)?).await
    }

    /// Deletes a project that has no sandboxes.
    pub async fn delete_project(&self, name: &str) -> Result<(), Error> {
        let target = Target::new(&["projects", name]);
        self.transport.done(Call::new(Method::DELETE, target)).await
    }

    /// Lists the keys of a project.
    pub async fn keys(&self, project: &str) -> Result<Vec<Key>, Error> {
        let target = Target::new(&["projects", project, "keys"]);
        let page: Paged<Key> = self.transport.json(Call::get(target)).await?;
        Ok(page.items)
    }

    /// Makes a key for a project. Its secret is in this answer and nowhere else.
    pub async fn create_key(&self, project: &str, request: &CreateKey) -> Result<NewKey, Error> {
        let target = Target::new(&["projects", project, "keys"]);
        self.transport.json(Call::post(target).json(request)?).await
    }

    /// Makes a token of this client's key, for the clients of another vendor.
    pub async fn issue_token(&self, request: &IssueToken) -> Result<Token, Error> {
        self.transport.json(Call::post(Target::new(&["tokens"])).json(request)?).await
    }

    /// Makes a key stop working.
    pub async fn revoke_key(&self, project: &str, id: &str) -> Result<(), Error> {
        let target = Target::new(&["projects", project, "keys", id]);
        self.transport.done(Call::new(Method::DELETE, target)).await
    }
}
