//! Projects and their keys.
//!
//! A key's secret is 256 random bits, shown once and kept only as a hash, in the project's manifest.
//! Looking one up is a hash and a table in memory: no disk, and no comparison whose time would
//! reveal anything about the secret.
//!
//! A project's manifest says who may do what and what its sandboxes may reach. When it is damaged, or
//! missing though something belongs to the project, the project is *locked*: none of its keys is
//! accepted, nothing of it starts, and no new project takes its name. What still runs continues
//! without a network. A project that was made afresh in its place would have no bounds.

use std::collections::{BTreeMap, HashMap};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use parking_lot::RwLock;
use sha2::{Digest, Sha256};

use crate::catalog::{Record, RecordKey};
use crate::db::{Filter, Owner, Page, Tombstones};
use crate::engine::context::damage::DamageKind;
use crate::engine::tenancy::Tenancy;
use crate::engine::tenancy::secrets::Secrets;
use crate::engine::{Error, Result, later};
use crate::model::{
    FORMAT, Key, KeyId, Name, Project, ProjectNetwork, ProjectRuns, Scope, Span, Timestamp, now,
};
use crate::store::{Damaged, Durability};

/// Who is asking.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// The project they act for.
    pub project: Name,
    /// What they may do.
    pub scope: Scope,
    /// The key they showed.
    pub key: KeyId,
    /// Whether they may approve, and accept runs. A token never may.
    pub approve: bool,
    /// When what they showed ends, if before its key does.
    pub until: Option<Timestamp>,
}

#[derive(Debug, Default)]
pub(in crate::engine) struct Projects {
    projects: RwLock<HashMap<Name, Project>>,
    /// Serialises changes, so that two of them do not undo each other.
    change: tokio::sync::Mutex<()>,
    /// Projects whose manifest cannot be used, and why.
    locked: RwLock<BTreeMap<Name, String>>,
    /// A key that is on record nowhere and ends with this daemon.
    emergency: RwLock<Option<(String, Caller)>>,
}

impl Projects {
    pub(in crate::engine) fn put(&self, project: Project) {
        self.projects.write().insert(project.name.clone(), project);
    }

    fn lock(&self, name: Name, reason: String) {
        self.locked.write().insert(name, reason);
    }

    fn is_locked(&self, name: &Name) -> bool {
        self.locked.read().contains_key(name)
    }

    /// Why a project that is not known cannot be had.
    fn absent(&self, name: &Name) -> Error {
        let locked = self.locked.read();
        match locked.get(name) {
            Some(reason) => Error::ProjectLocked { project: name.clone(), reason: reason.clone() },
            None => Error::NoProject(name.clone()),
        }
    }

    pub(in crate::engine) fn get(&self, name: &Name) -> Option<Project> {
        self.projects.read().get(name).cloned()
    }
}

impl Tenancy {
    pub(in crate::engine) fn lock_project(&self, name: Name, reason: String) {
        self.context.report_damage(
            DamageKind::SecurityConfig,
            format!("projects/{name}.json"),
            reason.clone(),
            format!(
                "project `{name}` is locked: none of its keys is accepted and nothing of it starts. Bring the file \
                 back from a backup and start the server again, or give its keys and network rules up with \
                 `keep fsck --reset-project {name}`"
            ),
        );
        self.projects.lock(name, reason);
    }

    /// Locks the projects that something belongs to and that have no manifest that can be used.
    pub(in crate::engine) fn lock_unknown_projects(
        &self,
        damaged: &[Damaged],
        named: impl Iterator<Item = Name>,
    ) {
        for Damaged { path, reason, .. } in damaged {
            let stem = path.file_stem().and_then(|stem| stem.to_str());
            if let Some(Ok(name)) = stem.map(str::parse::<Name>) {
                self.lock_project(name, format!("its manifest cannot be used: {reason}"));
            }
        }
        let mut count: BTreeMap<Name, usize> = BTreeMap::new();
        for name in named {
            *count.entry(name).or_default() += 1;
        }
        for (name, things) in count {
            if self.projects.get(&name).is_none() && !self.projects.is_locked(&name) {
                let reason = format!("its manifest is missing, and {things} things belong to it");
                self.lock_project(name, reason);
            }
        }
    }

    pub(in crate::engine) async fn change_project(
        &self,
        name: &Name,
        change: impl FnOnce(&mut Project),
    ) -> Result<()> {
        let _change = self.projects.change.lock().await;
        let mut project = self.projects.get(name).ok_or_else(|| self.projects.absent(name))?;
        change(&mut project);
        self.keep_project(&project).await
    }

    async fn keep_project(&self, project: &Project) -> Result<()> {
        self.context.catalog.put(Record::Project(project), Durability::Synced).await?;
        self.projects.put(project.clone());
        Ok(())
    }

    /// A key that has not expired, and the project it belongs to.
    pub(in crate::engine) fn key(&self, id: &KeyId) -> Option<(Name, Key)> {
        let projects = self.projects.projects.read();
        projects.values().find_map(|project| {
            let key = project.keys.iter().find(|key| key.id == *id)?;
            let good = key.expires_at.is_none_or(|at| at > now());
            good.then(|| (project.name.clone(), key.clone()))
        })
    }

    pub(in crate::engine) fn project_network(&self, name: &Name) -> Result<ProjectNetwork> {
        let project = self.projects.get(name).ok_or_else(|| self.projects.absent(name))?;
        Ok(project.network)
    }

    /// What a project allows its runs.
    pub(in crate::engine) fn project_runs(&self, name: &Name) -> Result<ProjectRuns> {
        let project = self.projects.get(name).ok_or_else(|| self.projects.absent(name))?;
        Ok(project.runs)
    }

    pub(in crate::engine) fn require_project(&self, name: &Name) -> Result<()> {
        self.projects.get(name).map(|_| ()).ok_or_else(|| self.projects.absent(name))
    }
}

/// What every key begins with.
pub(super) const KEY_PREFIX: &str = "skp_";

fn fresh_secret() -> String {
    let mut random = [0u8; 32];
    getrandom::fill(&mut random).expect("the kernel gives random bytes");
    format!("{KEY_PREFIX}{}", URL_SAFE_NO_PAD.encode(random))
}

fn hash_of(secret: &str) -> String {
    hex::encode(Sha256::digest(secret.as_bytes()))
}

impl Tenancy {
    /// Finds out who shows this secret, or a token that speaks for one.
    pub(in crate::engine) fn authenticate(&self, secret: &str) -> Result<Caller> {
        // No key has dots, and every token has two.
        if secret.contains('.') {
            return self.bearer_of(secret);
        }
        let hash = hash_of(secret);
        let emergency = self.projects.emergency.read();
        if let Some((_, caller)) = emergency.as_ref().filter(|(known, _)| *known == hash) {
            return Ok(caller.clone());
        }
        let projects = self.projects.projects.read();
        for project in projects.values() {
            let found = project.keys.iter().find(|key| key.hash == hash);
            if let Some(key) = found.filter(|key| key.expires_at.is_none_or(|at| at > now())) {
                return Ok(Caller {
                    project: project.name.clone(),
                    scope: key.scope,
                    key: key.id.clone(),
                    approve: key.approve || key.scope == Scope::Admin,
                    until: None,
                });
            }
        }
        Err(Error::BadKey)
    }

    /// Whether a key is good: it was not revoked and has not expired.
    pub(in crate::engine) fn knows_key(&self, id: &KeyId) -> bool {
        self.key(id).is_some()
    }

    /// Lists the projects.
    pub(in crate::engine) fn projects(&self) -> Vec<Project> {
        let projects = self.projects.projects.read();
        let mut all: Vec<Project> = projects.values().cloned().collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    /// The projects that are locked, because their manifest is damaged or missing, and why.
    pub(in crate::engine) fn locked_projects(&self) -> BTreeMap<Name, String> {
        self.projects.locked.read().clone()
    }

    /// Makes a key for the operator of a server whose own project is locked. It is written down
    pub(in crate::engine) fn emergency_key(&self, project: Name) -> String {
        let secret = fresh_secret();
        let key = KeyId::fresh();
        let caller = Caller { project, scope: Scope::Admin, key, approve: true, until: None };
        let known = (hash_of(&secret), caller);
        *self.projects.emergency.write() = Some(known);
        secret
    }

    /// Makes a project.
    pub(in crate::engine) async fn create_project(&self, name: Name) -> Result<Project> {
        let _change = self.projects.change.lock().await;
        if self.projects.get(&name).is_some() {
            return Err(Error::ProjectTaken(name));
        }
        if self.projects.is_locked(&name) {
            return Err(self.projects.absent(&name));
        }
        let project = Project {
            format: FORMAT,
            name,
            created_at: now(),
            keys: Vec::new(),
            network: ProjectNetwork::default(),
            runs: ProjectRuns::default(),
        };
        self.keep_project(&project).await?;
        Ok(project)
    }

    /// Removes a project that has no sandboxes and no drives, with its keys.
    pub(in crate::engine) async fn delete_project(
        &self,
        secrets: &Secrets,
        name: &Name,
    ) -> Result<()> {
        let _change = self.projects.change.lock().await;
        self.projects.get(name).ok_or_else(|| self.projects.absent(name))?;
        let left =
            self.db.sandboxes(Some(name), &Filter::default(), &Page::all()).await?.items.len();
        let drives = self.db.drives(Some(name), None, &Page::all()).await?;
        let drives = drives.items.len();
        if left > 0 || drives > 0 {
            return Err(Error::ProjectInUse { project: name.clone(), sandboxes: left, drives });
        }
        let owner = Owner::Project(name);
        let left = self.db.snapshots(owner, Tombstones::With, &Page::all()).await?.items;
        for snapshot in left {
            // The index first: what it remembers and the disk does not have counts as missing.
            self.context.catalog.delete(RecordKey::Snapshot(&snapshot.id)).await?;
            self.references.counts().drop_snapshot(&snapshot.id);
        }
        secrets.drop_secrets(name).await?;
        self.context.catalog.delete(RecordKey::Project(name)).await?;
        self.context.events.remove(name).await;
        self.projects.projects.write().remove(name);
        Ok(())
    }

    /// Makes a key; the second answer is its secret, which cannot be had again.
    pub(in crate::engine) async fn create_key(
        &self,
        project: &Name,
        label: String,
        scope: Scope,
        approve: bool,
        expires: Option<Span>,
    ) -> Result<(Key, String)> {
        if approve && scope == Scope::Read {
            return Err(Error::invalid("approve", "takes a key of scope `write` or `admin`"));
        }
        if label.chars().count() > 128 || label.chars().any(char::is_control) {
            return Err(Error::invalid("label", "at most 128 characters, on one line"));
        }
        let secret = fresh_secret();
        let key = Key {
            id: KeyId::fresh(),
            label,
            hash: hash_of(&secret),
            scope,
            approve,
            created_at: now(),
            expires_at: expires.and_then(later),
        };
        let added = key.clone();
        self.change_project(project, |project| project.keys.push(added)).await?;
        Ok((key, secret))
    }

    /// Ends a key.
    pub(in crate::engine) async fn revoke_key(&self, project: &Name, id: &KeyId) -> Result<()> {
        let mut found = false;
        let change = |project: &mut Project| {
            let before = project.keys.len();
            project.keys.retain(|key| key.id != *id);
            found = project.keys.len() < before;
        };
        self.change_project(project, change).await?;
        if found { Ok(()) } else { Err(Error::NoKey(id.clone())) }
    }
}
