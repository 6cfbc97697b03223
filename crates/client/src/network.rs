//! What sandboxes may reach, and what they reached.

use hyper::Method;

use crate::paging::Pages;
use crate::query::Target;
use crate::sandboxes::{sandbox, word};
use crate::transport::Call;
use crate::types::{
    Connection, NetworkSummary, ProjectNetwork, SandboxNetwork, SetNetwork, Verdict,
};
use crate::{Client, Error};

/// Which connections to list. All of what is set must match.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ListConnections {
    /// With this outcome.
    pub verdict: Option<Verdict>,
    /// Of this session.
    pub session: Option<String>,
    /// To this name, names like `*.example.com`, or this address.
    pub host: Option<String>,
    /// That had not ended before: a time, or a span before now.
    pub since: Option<String>,
    /// Only those that are open.
    pub open: bool,
    /// How many to a page; the server's choice if absent.
    pub limit: Option<u32>,
}

impl ListConnections {
    fn on(&self, target: Target) -> Target {
        target
            .maybe("verdict", self.verdict.map(word))
            .maybe("session", self.session.as_ref())
            .maybe("host", self.host.as_ref())
            .maybe("since", self.since.as_ref())
            .flag("open", self.open)
    }
}

// Every call fails with what the server says (`Error::Api`) or with what the way there says.
#[allow(clippy::missing_errors_doc)]
impl Client {
    /// What a sandbox may reach, and where that comes from.
    pub async fn network(&self, name: &str) -> Result<SandboxNetwork, Error> {
        self.transport.json(Call::get(sandbox(name, &["network"]))).await
    }

    /// Changes what a sandbox may reach, at once.
    pub async fn set_network(
        &self,
        name: &str,
        request: &SetNetwork,
    ) -> Result<SandboxNetwork, Error> {
        let call = Call::new(Method::PUT, sandbox(name, &["network"]));
        self.transport.json(call.json(request)?).await
    }

    /// Lists what went over a sandbox's network or was kept from it, the newest first.
    #[must_use]
    pub fn connections(&self, name: &str, filter: &ListConnections) -> Pages<Connection> {
        let (name, filter) = (name.to_owned(), filter.clone());
        Pages::new(self, move || {
            filter
                .on(sandbox(&name, &["connections"]))
                .maybe("limit", filter.limit.map(|limit| limit.to_string()))
        })
    }

    /// What went over a sandbox's network, by destination.
    pub async fn network_summary(
        &self,
        name: &str,
        filter: &ListConnections,
    ) -> Result<NetworkSummary, Error> {
        let target = filter.on(sandbox(name, &["connections", "summary"]));
        self.transport.json(Call::get(target)).await
    }

    /// What a project says about the network of its sandboxes.
    pub async fn project_network(&self, project: &str) -> Result<ProjectNetwork, Error> {
        self.transport.json(Call::get(Target::new(&["projects", project, "network"]))).await
    }

    /// Sets what a project says about the network of its sandboxes, at once.
    pub async fn set_project_network(
        &self,
        project: &str,
        network: &ProjectNetwork,
    ) -> Result<ProjectNetwork, Error> {
        let target = Target::new(&["projects", project, "network"]);
        self.transport.json(Call::new(Method::PUT, target).json(network)?).await
    }
}
