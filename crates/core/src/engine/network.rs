//! What sandboxes may reach, and what they reached: policies of sandboxes and projects, and the journal.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};

use super::{Engine, Error, Inner, Result, journal};
use crate::db::Paged;
use crate::model::{
    Connection, DomainPattern, Name, Patch, Policy, ProjectNetwork, Sandbox, SandboxId, SessionId,
    Tags, Timestamp, Verdict,
};
use crate::store::StoreError;

/// Which connections are wanted. All of what is set must hold.
#[derive(Debug, Clone, Default)]
pub struct ConnectionFilter {
    /// With this outcome.
    pub verdict: Option<Verdict>,
    /// Of this session.
    pub session: Option<SessionId>,
    /// To these names, or to this address.
    pub host: Option<Host>,
    /// That had not ended before this time.
    pub since: Option<Timestamp>,
    /// That are open.
    pub open: bool,
}

/// Where a connection went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Host {
    /// To a name.
    Name(DomainPattern),
    /// To an address, whatever its name.
    Address(std::net::IpAddr),
}

impl ConnectionFilter {
    fn takes(&self, connection: &Connection) -> bool {
        self.verdict.is_none_or(|verdict| connection.verdict == verdict)
            && self.since.is_none_or(|since| connection.ended_at.is_none_or(|end| end >= since))
            && (!self.open || connection.ended_at.is_none())
            && match &self.host {
                None => true,
                Some(Host::Name(pattern)) => {
                    connection.name.as_deref().is_some_and(|name| pattern.matches(name))
                }
                Some(Host::Address(ip)) => connection.to.is_some_and(|to| to.ip() == *ip),
            }
    }
}

/// All that went to one place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Destination {
    /// The name, or the address where none was told.
    pub host: String,
    /// How many connections, refused ones included.
    pub connections: u64,
    /// How many were refused.
    pub denied: u64,
    /// Bytes received.
    pub bytes_in: u64,
    /// Bytes sent.
    pub bytes_out: u64,
    /// When something last began.
    pub last_at: Timestamp,
}

impl Engine {
    /// Changes what a sandbox may reach, at once: connections that no longer fit are cut. `None` is what its
    /// project says.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Config`] and changes nothing when the policy is wrong.
    pub async fn set_network(
        &self,
        project: &Name,
        name: &Name,
        policy: Option<Policy>,
    ) -> Result<Sandbox> {
        self.update(project, name, Patch { network: Some(policy), ..Patch::default() }).await
    }

    /// What a project says about the network of its sandboxes.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoProject`] when there is no such project.
    pub fn project_network(&self, project: &Name) -> Result<ProjectNetwork> {
        self.inner.project_network(project)
    }

    /// Sets what a project says about the network of its sandboxes, at once.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoProject`] when there is no such project.
    pub async fn set_project_network(
        &self,
        project: &Name,
        network: ProjectNetwork,
    ) -> Result<ProjectNetwork> {
        let mut network = network;
        for policy in [Some(&mut network.default), network.bound.as_mut()].into_iter().flatten() {
            self.inner.seal_policy(project, policy)?;
            self.inner.check_policy(project, &Tags::new(), policy)?;
        }
        let set = network.clone();
        self.inner.change_project(project, |project| project.network = set).await?;
        self.inner.project_rules_changed(project).await;
        Ok(network)
    }

    /// Lists what went over a sandbox's network, newest first.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSandbox`] when there is none of that name.
    pub async fn connections(
        &self,
        project: &Name,
        name: &Name,
        filter: &ConnectionFilter,
        limit: usize,
        cursor: Option<&str>,
    ) -> Result<Paged<Connection>> {
        let sandbox = self.inner.find(project, name).await?;
        let after = cursor.map(read_cursor).transpose()?;
        let mut found = Vec::new();
        for session in self.inner.journals(&sandbox.id, filter).await? {
            if after.as_ref().is_some_and(|(last, _)| session.as_str() > last.as_str()) {
                continue;
            }
            let mut lines = self.inner.journal(&sandbox.id, &session, filter).await?;
            if let Some((last, id)) = &after
                && session == *last
            {
                lines.retain(|line| line.id < *id);
            }
            found.extend(lines);
            if found.len() > limit {
                break;
            }
        }
        let more = found.len() > limit;
        found.truncate(limit);
        let next = found.last().filter(|_| more).map(|it| format!("{}:{}", it.session, it.id));
        Ok(Paged { items: found, next })
    }

    /// What went over a sandbox's network by destination, the most bytes first, as far as it is on record.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSandbox`] when there is none of that name.
    pub async fn destinations(
        &self,
        project: &Name,
        name: &Name,
        filter: &ConnectionFilter,
    ) -> Result<Vec<Destination>> {
        let sandbox = self.inner.find(project, name).await?;
        let mut all: HashMap<String, Destination> = HashMap::new();
        for session in self.inner.journals(&sandbox.id, filter).await? {
            for line in self.inner.journal(&sandbox.id, &session, filter).await? {
                let address = line.to.map(|to| to.ip().to_string());
                let host = line.name.or(address).unwrap_or_default();
                let place = all.entry(host.clone()).or_insert(Destination {
                    host,
                    connections: 0,
                    denied: 0,
                    bytes_in: 0,
                    bytes_out: 0,
                    last_at: line.at,
                });
                place.connections += 1;
                place.denied += u64::from(line.verdict == Verdict::Denied);
                place.bytes_in += line.bytes_in;
                place.bytes_out += line.bytes_out;
                place.last_at = place.last_at.max(line.at);
            }
        }
        let mut all: Vec<Destination> = all.into_values().collect();
        all.sort_unstable_by(|a, b| {
            let bytes = |it: &Destination| it.bytes_in + it.bytes_out;
            bytes(b).cmp(&bytes(a)).then_with(|| a.host.cmp(&b.host))
        });
        Ok(all)
    }
}

impl Inner {
    /// The sessions whose journals are to be looked at, newest first.
    async fn journals(
        &self,
        sandbox: &SandboxId,
        filter: &ConnectionFilter,
    ) -> Result<Vec<SessionId>> {
        if let Some(session) = &filter.session {
            return Ok(vec![session.clone()]);
        }
        let dir = self.store.network_dir(sandbox);
        let mut sessions = on_disk("list", dir, journal::sessions).await?;
        // Nothing of it has ended yet, maybe.
        if let Some(live) = self.live(sandbox).map(|live| live.session().id)
            && !sessions.contains(&live)
        {
            sessions.insert(0, live);
        }
        Ok(sessions)
    }

    /// What a session's journal has, newest first.
    async fn journal(
        &self,
        sandbox: &SandboxId,
        session: &SessionId,
        filter: &ConnectionFilter,
    ) -> Result<Vec<Connection>> {
        let dir = self.store.network_dir(sandbox);
        let open = match self.live(sandbox).filter(|live| live.session().id == *session) {
            Some(live) => live.connections(),
            None => Vec::new(),
        };
        let (session, filter) = (session.clone(), filter.clone());
        let open: Vec<_> = open.into_iter().filter(|line| filter.takes(line)).collect();
        let read = move |dir: &Path| {
            let mut lines = Vec::new();
            journal::read(dir, &session, |line| {
                lines.extend(Some(line).filter(|line| filter.takes(line)));
            })?;
            Ok(lines)
        };
        let mut lines = on_disk("read", dir, read).await?;
        // One that ended in between is on disk already.
        let ended: HashSet<u64> = lines.iter().map(|line| line.id).collect();
        lines.extend(open.into_iter().filter(|line| !ended.contains(&line.id)));
        lines.sort_unstable_by_key(|line| std::cmp::Reverse(line.id));
        Ok(lines)
    }
}

/// Does something in a directory, where it may block.
async fn on_disk<T: Send + 'static>(
    action: &'static str,
    dir: PathBuf,
    work: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
) -> Result<T> {
    let path = dir.clone();
    match tokio::task::spawn_blocking(move || work(&dir)).await {
        Ok(outcome) => Ok(outcome.map_err(|source| StoreError::Io { action, path, source })?),
        Err(_) => Err(StoreError::ShuttingDown.into()),
    }
}

fn read_cursor(text: &str) -> Result<(SessionId, u64)> {
    let parts = text.split_once(':');
    let read = parts.and_then(|(session, id)| Some((session.parse().ok()?, id.parse().ok()?)));
    read.ok_or_else(|| Error::invalid("cursor", "this is not `next` of a page of connections"))
}
