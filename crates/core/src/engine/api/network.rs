//! Network policies and the journal of connections.

use std::collections::HashMap;

use crate::db::Paged;
use crate::engine::network::policy::{ConnectionFilter, DestinationTraffic, read_cursor};
use crate::engine::{Engine, Result};
use crate::model::{Connection, Name, Patch, Policy, ProjectNetwork, Sandbox, Tags, Verdict};

impl Engine {
    /// Changes what a sandbox may reach, at once: connections that no longer fit are cut. `None` is what its
    /// project says.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Config`](crate::engine::Error::Config) and changes nothing when the policy is wrong.
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
    /// Returns [`Error::NoProject`](crate::engine::Error::NoProject) when there is no such project.
    pub fn project_network(&self, project: &Name) -> Result<ProjectNetwork> {
        self.parts.tenancy.project_network(project)
    }

    /// Sets what a project says about the network of its sandboxes, at once.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoProject`](crate::engine::Error::NoProject) when there is no such project.
    pub async fn set_project_network(
        &self,
        project: &Name,
        network: ProjectNetwork,
    ) -> Result<ProjectNetwork> {
        let mut network = network;
        network.check()?;
        for policy in [Some(&mut network.default), network.bound.as_mut()].into_iter().flatten() {
            self.parts.network.seal_policy(project, policy)?;
            self.parts.network.check_policy(project, &Tags::new(), policy)?;
        }
        let set = network.clone();
        self.parts.tenancy.change_project(project, |project| project.network = set).await?;
        self.parts.network.project_sockets_changed(project, &network);
        self.parts.network.project_rules_changed(project).await;
        Ok(network)
    }

    /// Lists what went over a sandbox's network, newest first.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSandbox`](crate::engine::Error::NoSandbox) when there is none of that name.
    pub async fn connections(
        &self,
        project: &Name,
        name: &Name,
        filter: &ConnectionFilter,
        limit: usize,
        cursor: Option<&str>,
    ) -> Result<Paged<Connection>> {
        let sandbox = self.parts.lifecycle.find(project, name).await?;
        let after = cursor.map(read_cursor).transpose()?;
        let mut found = Vec::new();
        for session in self.parts.network.journals(&sandbox.id, filter).await? {
            if after.as_ref().is_some_and(|(last, _)| session.as_str() > last.as_str()) {
                continue;
            }
            let mut lines = self.parts.network.journal(&sandbox.id, &session, filter).await?;
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
    /// Returns [`Error::NoSandbox`](crate::engine::Error::NoSandbox) when there is none of that name.
    pub async fn destinations(
        &self,
        project: &Name,
        name: &Name,
        filter: &ConnectionFilter,
    ) -> Result<Vec<DestinationTraffic>> {
        let sandbox = self.parts.lifecycle.find(project, name).await?;
        let mut all: HashMap<String, DestinationTraffic> = HashMap::new();
        for session in self.parts.network.journals(&sandbox.id, filter).await? {
            for line in self.parts.network.journal(&sandbox.id, &session, filter).await? {
                let address = line.to.map(|to| to.ip().to_string());
                let host = line.name.or(address).unwrap_or_default();
                let place = all.entry(host.clone()).or_insert(DestinationTraffic {
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
        let mut all: Vec<DestinationTraffic> = all.into_values().collect();
        all.sort_unstable_by(|a, b| {
            let bytes = |it: &DestinationTraffic| it.bytes_in + it.bytes_out;
            bytes(b).cmp(&bytes(a)).then_with(|| a.host.cmp(&b.host))
        });
        Ok(all)
    }
}
