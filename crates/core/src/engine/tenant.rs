//! Projects and their keys.
//!
//! A key's secret is 256 random bits, shown once and kept only as a hash, in the project's manifest.
//! Looking one up is a hash and a table in memory: no disk, and no comparison whose time would tell
//! anything about the secret.

use std::collections::HashMap;
use std::sync::{PoisonError, RwLock};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use sha2::{Digest, Sha256};

use super::{Engine, Error, Inner, Result, later};
use crate::db::{Filter, Owner, Page, Tombstones};
use crate::model::{
    FORMAT, Key, KeyId, Name, Project, ProjectNetwork, Scope, Snapshot, Span, Timestamp, now,
};
use crate::store::Durability;

/// Who is asking.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// The project they act for.
    pub project: Name,
    /// What they may do.
    pub scope: Scope,
    /// The key they showed.
    pub key: KeyId,
    /// When what they showed ends, if before its key does.
    pub until: Option<Timestamp>,
}

#[derive(Debug, Default)]
pub(super) struct Tenants {
    projects: RwLock<HashMap<Name, Project>>,
    /// Serialises changes, so that two of them do not undo each other.
    change: tokio::sync::Mutex<()>,
}

impl Tenants {
    pub(super) fn put(&self, project: Project) {
        self.projects
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(project.name.clone(), project);
    }

    fn get(&self, name: &Name) -> Option<Project> {
        self.projects.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }
}

impl Engine {
    /// Finds out who shows this secret, or a token that speaks for one.
    ///
    /// # Errors
    ///
    /// Returns [`Error::BadKey`] when nobody does, or not any more.
    pub fn authenticate(&self, secret: &str) -> Result<Caller> {
        // No key has dots, and every token has two.
        if secret.contains('.') {
            return self.bearer_of(secret);
        }
        let hash = hash_of(secret);
        let projects = self.inner.tenants.projects.read().unwrap_or_else(PoisonError::into_inner);
        for project in projects.values() {
            let found = project.keys.iter().find(|key| key.hash == hash);
            if let Some(key) = found.filter(|key| key.expires_at.is_none_or(|at| at > now())) {
                return Ok(Caller {
                    project: project.name.clone(),
                    scope: key.scope,
                    key: key.id.clone(),
                    until: None,
                });
            }
        }
        Err(Error::BadKey)
    }

    /// Whether a key is good: it was not revoked and has not expired.
    #[must_use]
    pub fn knows_key(&self, id: &KeyId) -> bool {
        self.inner.key(id).is_some()
    }

    /// Lists the projects.
    #[must_use]
    pub fn projects(&self) -> Vec<Project> {
        let projects = self.inner.tenants.projects.read().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<Project> = projects.values().cloned().collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    /// Makes a project.
    ///
    /// # Errors
    ///
    /// Returns [`Error::ProjectTaken`] when there is one of that name.
    pub async fn create_project(&self, name: Name) -> Result<Project> {
        let _change = self.inner.tenants.change.lock().await;
        if self.inner.tenants.get(&name).is_some() {
            return Err(Error::ProjectTaken(name));
        }
        let project = Project {
            format: FORMAT,
            name,
            created_at: now(),
            keys: Vec::new(),
            network: ProjectNetwork::default(),
        };
        self.inner.keep_project(&project).await?;
        Ok(project)
    }

    /// Removes a project that has no sandboxes and no drives, with its keys.
    ///
    /// # Errors
    ///
    /// Returns [`Error::ProjectInUse`] while it has some.
    pub async fn delete_project(&self, name: &Name) -> Result<()> {
        let _change = self.inner.tenants.change.lock().await;
        self.inner.tenants.get(name).ok_or_else(|| Error::NoProject(name.clone()))?;
        let left = self
            .inner
            .db
            .sandboxes(Some(name), &Filter::default(), &Page::all())
            .await?
            .items
            .len();
        let drives = self.inner.db.drives(Some(name), None, &Page::all()).await?;
        let drives = drives.items.len();
        if left > 0 || drives > 0 {
            return Err(Error::ProjectInUse { project: name.clone(), sandboxes: left, drives });
        }
        let owner = Owner::Project(name);
        let left = self.inner.db.snapshots(owner, Tombstones::With, &Page::all()).await?.items;
        for snapshot in left {
            self.inner.store.remove::<Snapshot>(&snapshot.id).await?;
            self.inner.db.remove_snapshot(&snapshot.id).await?;
            self.inner.books().drop_snapshot(&snapshot.id);
        }
        self.inner.drop_secrets(name).await?;
        self.inner.store.remove::<Project>(name).await?;
        self.inner.db.remove_project(name).await?;
        self.inner.tenants.projects.write().unwrap_or_else(PoisonError::into_inner).remove(name);
        Ok(())
    }

    /// Makes a key; the second answer is its secret, which cannot be had again.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoProject`] when there is no such project.
    pub async fn create_key(
        &self,
        project: &Name,
        label: String,
        scope: Scope,
        expires: Option<Span>,
    ) -> Result<(Key, String)> {
        if label.chars().count() > 128 || label.chars().any(char::is_control) {
            return Err(Error::invalid("label", "at most 128 characters, on one line"));
        }
        let mut random = [0u8; 32];
        getrandom::fill(&mut random).expect("the kernel gives random bytes");
        let secret = format!("skp_{}", URL_SAFE_NO_PAD.encode(random));
        let key = Key {
            id: KeyId::fresh(),
            label,
            hash: hash_of(&secret),
            scope,
            created_at: now(),
            expires_at: expires.and_then(later),
        };
        let added = key.clone();
        self.inner.change_project(project, |project| project.keys.push(added)).await?;
        Ok((key, secret))
    }

    /// Ends a key.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoKey`] when the project has none of that id.
    pub async fn revoke_key(&self, project: &Name, id: &KeyId) -> Result<()> {
        let mut found = false;
        let change = |project: &mut Project| {
            let before = project.keys.len();
            project.keys.retain(|key| key.id != *id);
            found = project.keys.len() < before;
        };
        self.inner.change_project(project, change).await?;
        if found { Ok(()) } else { Err(Error::NoKey(id.clone())) }
    }
}

impl Inner {
    pub(super) async fn change_project(
        &self,
        name: &Name,
        change: impl FnOnce(&mut Project),
    ) -> Result<()> {
        let _change = self.tenants.change.lock().await;
        let mut project = self.tenants.get(name).ok_or_else(|| Error::NoProject(name.clone()))?;
        change(&mut project);
        self.keep_project(&project).await
    }

    async fn keep_project(&self, project: &Project) -> Result<()> {
        self.store.write(project, Durability::Synced).await?;
        self.db.put_project(project).await?;
        self.tenants.put(project.clone());
        Ok(())
    }

    /// A key that has not expired, and the project it belongs to.
    pub(super) fn key(&self, id: &KeyId) -> Option<(Name, Key)> {
        let projects = self.tenants.projects.read().unwrap_or_else(PoisonError::into_inner);
        projects.values().find_map(|project| {
            let key = project.keys.iter().find(|key| key.id == *id)?;
            let good = key.expires_at.is_none_or(|at| at > now());
            good.then(|| (project.name.clone(), key.clone()))
        })
    }

    pub(super) fn project_network(&self, name: &Name) -> Result<ProjectNetwork> {
        let project = self.tenants.get(name).ok_or_else(|| Error::NoProject(name.clone()))?;
        Ok(project.network)
    }

    pub(super) fn require_project(&self, name: &Name) -> Result<()> {
        self.tenants.get(name).map(|_| ()).ok_or_else(|| Error::NoProject(name.clone()))
    }
}

fn hash_of(secret: &str) -> String {
    Sha256::digest(secret.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}
