//! The network of a running session, and what its commands need to trust its certificate authority.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::engine::observe::network_journal::FileJournal;
use crate::engine::running::live::RunningSandbox;
use crate::model::{Policy, Usage};
use crate::net::{Authority, SessionNetworkStack, Traffic};

/// Where the authority's certificate is inside.
pub(in crate::engine) const CERTIFICATE: &str = "/run/sandkeep/ca.pem";
/// Where it is together with all that the image trusts.
pub(in crate::engine) const BUNDLE: &str = "/run/sandkeep/ca-bundle.pem";
/// Variables by which programs find whom to trust, and what they expect there.
pub(in crate::engine) const TRUST: [(&str, &str); 12] = [
    ("SSL_CERT_FILE", BUNDLE),
    ("REQUESTS_CA_BUNDLE", BUNDLE),
    ("CURL_CA_BUNDLE", BUNDLE),
    ("GIT_SSL_CAINFO", BUNDLE),
    ("PIP_CERT", BUNDLE),
    ("AWS_CA_BUNDLE", BUNDLE),
    ("CARGO_HTTP_CAINFO", BUNDLE),
    ("NIX_SSL_CERT_FILE", BUNDLE),
    ("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", BUNDLE),
    ("BUNDLE_SSL_CA_CERT", BUNDLE),
    ("NODE_EXTRA_CA_CERTS", CERTIFICATE),
    ("DENO_CERT", CERTIFICATE),
];

/// A live session's network.
#[derive(Debug)]
pub(in crate::engine) struct SessionNetwork {
    pub(in crate::engine) network: SessionNetworkStack,
    pub(in crate::engine) journal: Arc<FileJournal>,
    /// The sandbox's own policy in this session; its record may have another for the next.
    pub(in crate::engine) policy: Option<Policy>,
    pub(in crate::engine) trust: Arc<Trust>,
}

/// Who signs for names whose requests are looked at.
#[derive(Debug)]
pub(in crate::engine) struct Trust {
    pub(in crate::engine) authority: Arc<Authority>,
    /// The authority is kept, and trusted inside.
    pub(in crate::engine) established: AtomicBool,
}

impl SessionNetwork {
    /// Adds what connections to the sandbox's ports carried.
    pub(in crate::engine) fn count(&self, traffic: Traffic) {
        self.network.count(traffic);
    }
}

impl RunningSandbox {
    /// What the session's network carried so far; `None` without one.
    pub(in crate::engine) fn traffic(&self) -> Option<Traffic> {
        self.network.lock().as_ref().map(|connected| connected.network.traffic())
    }

    /// How many connections and requests of the session wait for an approval.
    pub(in crate::engine) fn held_flows(&self) -> usize {
        self.network.lock().as_ref().map_or(0, |connected| connected.network.held())
    }

    /// What is open on the session's network.
    pub(in crate::engine) fn connections(&self) -> Vec<crate::model::Connection> {
        self.network.lock().as_ref().map(|connected| connected.network.open()).unwrap_or_default()
    }

    /// What commands must know to trust the sandbox's authority; nothing while it signs no
    /// certificate.
    pub(in crate::engine) fn trust(&self) -> BTreeMap<String, String> {
        let trusts =
            |connected: &SessionNetwork| connected.trust.established.load(Ordering::SeqCst);
        match self.network.lock().as_ref().is_some_and(trusts) {
            true => TRUST.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
            false => BTreeMap::new(),
        }
    }
}

impl Usage {
    pub(in crate::engine) fn count(&mut self, traffic: Traffic) {
        self.network_in = traffic.received;
        self.network_out = traffic.sent;
    }
}
